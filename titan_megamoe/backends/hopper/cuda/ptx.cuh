// The PTX instructions that the kernels use, one function each. Nothing is included: nvcc and NVRTC both
// compile this file as it is. Source: PTX ISA 8.x, sections on wgmma, mbarrier, cp.async.bulk.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// CUtensorMap, as the host encodes it.
struct alignas(64) TensorMap {
    u64 words[16];
};

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* pointer) {
    u32 address;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(address) : "l"(pointer));
    return address;
}

// --- mbarrier ---------------------------------------------------------------------------------------------

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Initialised barriers become visible to the copy engine.
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

// THREADS threads of the block, the same ones each time.
template <int THREADS>
DEVICE void sync_threads() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// --- copy engine ------------------------------------------------------------------------------------------

// A box of a rank-3 map to shared memory; its bytes are counted on `barrier`.
DEVICE void load_box(u32 to, const TensorMap& map, u32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

// `bytes` contiguous bytes (a multiple of 16) to shared memory, counted on `barrier`.
DEVICE void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// The same for bytes that are read once: L2 evicts them before others. `policy` is read_once().
DEVICE u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void load_bytes_once(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// 16 bytes to shared memory by this thread, of which the first `bytes` come from `from` and the others are 0.
DEVICE void copy_16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

DEVICE void copy_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// One arrival at `barrier` for each thread, when all copies that it has begun are there.
DEVICE void copies_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// A box of a rank-3 map from shared memory; part of this thread's current bulk group.
DEVICE void store_box(const TensorMap& map, u32 from, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
        "r"(from), "r"(x), "r"(y), "r"(z) : "memory");
}

DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until the shared memory of all but the newest PENDING groups has been read.
template <int PENDING>
DEVICE void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

DEVICE void store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// What this thread wrote to shared memory by ordinary stores becomes visible to the copy engine.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same on the other side: what others wrote, and this thread has waited for, for its own products. `bytes` from
// `address` on are what is meant.
DEVICE void fence_async_proxy_of(u32 address, u32 bytes) { fence_async_proxy(); }

// --- wgmma ------------------------------------------------------------------------------------------------

template <u32 REGISTERS>
DEVICE void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <u32 REGISTERS>
DEVICE void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Shared-memory operand of wgmma: rows of 128 bytes along K, 128-byte swizzle, 8 rows (1024 bytes) an atom.
// The next 32 bytes of K are at + 2.
DEVICE u64 operand(u32 address) {
    return u64((address & 0x3FFFF) >> 4) | u64(1024 >> 4) << 32 | u64(1) << 62;
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the newest PENDING groups are done.
template <int PENDING = 0>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler moves no access to these registers across this point.
template <int N>
DEVICE void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define REGISTERS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define REGISTERS_16(d, i) \
    REGISTERS_4(d, i), REGISTERS_4(d, i + 4), REGISTERS_4(d, i + 8), REGISTERS_4(d, i + 12)

// d (64 × 128, fp32) = a (64 × 32) · b (128 × 32)ᵀ, both e4m3; added to d if `add`. Thread t of the warpgroup
// holds of rows 16·(t / 32) + t / 4 mod 8 and 8 below it the columns 8·j + 2·(t mod 4) and the next one:
// d[4j], d[4j + 1] of the upper row, d[4j + 2], d[4j + 3] of the lower.
DEVICE void wgmma_m64n128k32(float (&d)[64], u64 a, u64 b, u32 add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1;\n"
        "}"
        : REGISTERS_16(d, 0), REGISTERS_16(d, 16), REGISTERS_16(d, 32), REGISTERS_16(d, 48)
        : "l"(a), "l"(b), "r"(add));
}

// --- global memory that several blocks of a launch share --------------------------------------------------

// What other blocks wrote before their add_release is visible after this has seen the sum.
DEVICE u32 load_acquire(const u32* counter) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

DEVICE void add_release(u32* counter, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// Adds one, of less than 2^31 in all: the value before; orders nothing. Not an addition: that is combined over the warp,
// which waits for the sum at once.
DEVICE u32 take_one(u32* counter) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(0x7FFFFFFF)
                 : "memory");
    return before;
}

// --- words that ranks share, and those of a call ----------------------------------------------------------

// What a peer wrote before its store_release_system or max_release_system is visible after this has seen the value.
DEVICE int load_acquire_system(const int* word) {
    int value;
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

DEVICE void store_release_system(int* word, int value) {
    asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

DEVICE void max_release_system(int* word, int value) {
    asm volatile("red.release.sys.global.max.s32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// What is there now; orders nothing.
DEVICE int load_volatile(const int* word) {
    int value;
    asm volatile("ld.volatile.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// The value before, of which `expected` was replaced.
DEVICE int compare_and_swap(int* word, int expected, int value) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(word), "r"(expected), "r"(value)
                 : "memory");
    return before;
}

// Nanoseconds.
DEVICE u64 global_timer() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    return now;
}

// --- global memory by ordinary instructions ---------------------------------------------------------------

// Between accesses to global memory by ordinary instructions and by the copy engine, on the side of either.
DEVICE void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

struct Words {
    u32 at[4];
};

// 16 aligned bytes of this GPU's or a peer's memory, past L1.
DEVICE Words load_words(const void* from) {
    Words w;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.at[0]), "=r"(w.at[1]), "=r"(w.at[2]), "=r"(w.at[3])
                 : "l"(from)
                 : "memory");
    return w;
}

DEVICE void store_words(void* to, const Words& w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w.at[0]), "r"(w.at[1]), "r"(w.at[2]),
                 "r"(w.at[3]) : "memory");
}

DEVICE float load_float(const float* from) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
    return value;
}

DEVICE void store_float(float* to, float value) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

DEVICE void sleep_ns(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory"); }

// --- plain memory and arithmetic --------------------------------------------------------------------------

DEVICE float load_shared(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// Two values, 8-byte aligned.
DEVICE void load_shared_pair(u32 address, float& first, float& second) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address) : "memory");
}

DEVICE u32 load_shared_word(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

DEVICE void store_shared_word(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DEVICE Words load_shared_words(u32 address) {
    Words w;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.at[0]), "=r"(w.at[1]), "=r"(w.at[2]), "=r"(w.at[3])
                 : "r"(address)
                 : "memory");
    return w;
}

DEVICE void store_shared(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// 8 or 16 aligned bytes.
DEVICE void store_shared_words(u32 address, u32 first, u32 second) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}

DEVICE void store_shared_words(u32 address, const Words& w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w.at[0]), "r"(w.at[1]), "r"(w.at[2]),
                 "r"(w.at[3]) : "memory");
}

DEVICE void store_shared_pair(u32 address, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

DEVICE void store_shared_half(u32 address, u16 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// Four 8 × 8 blocks of 16-bit elements, transposed. Lane t gives the address of row t mod 8 of block t / 8, and gets
// of each block column t / 4: rows 2·(t mod 4), in the low half, and the next.
DEVICE void load_transposed(u32 (&d)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger one, NaN if either is.
DEVICE float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// The larger magnitude of each half, NaN if either is.
DEVICE u32 max_magnitudes_bf16(u32 a, u32 b) {
    u32 y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a & 0x7FFF7FFF), "r"(b & 0x7FFF7FFF));
    return y;
}

// The same with some sign, which saves clearing those of a and b.
DEVICE u32 max_magnitudes_any_sign_bf16(u32 a, u32 b) {
    u32 y;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// Two values side by side, the first in the low half.
DEVICE u32 pack_bf16(float first, float second) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}

DEVICE u16 pack_e4m3(float first, float second) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(second), "f"(first));
    return packed;
}

DEVICE float low_bf16(u32 packed) { return __uint_as_float(packed << 16); }
DEVICE float high_bf16(u32 packed) { return __uint_as_float(packed & 0xFFFF0000u); }
