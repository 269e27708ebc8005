// Runs the CUDA kernels on a CPU: a stand-in for cuda/ptx.cuh, one fiber per thread of a block.
//
// What it shows: indices, swizzles, fragments, tails, the ring's protocol. It is stricter than a GPU where it can
// be: copies and products take effect late and poison their targets until then, a bulk store that reads shared
// bytes that no fence made visible is an error, and so is a block in which every thread waits.
// What it can't show: timing, and what its author believes wrongly of the hardware.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = unsigned long long;

#define DEVICE inline
#define __device__
#define __global__
#define __grid_constant__
#define __shared__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// The host fills: address; extents, x first; bytes from y to y + 1 and z to z + 1; box; bytes of an element.
struct TensorMap {
    u64 address, extent[3], stride[2], box[3], element, unused[6];
};

struct Index {
    u32 x;
};
static Index threadIdx, blockIdx, gridDim;

constexpr u32 SHARED_SIZE = 227 * 1024;
extern unsigned char shared[];
alignas(1024) unsigned char shared[SHARED_SIZE];

// --- fibers -----------------------------------------------------------------------------------------------

constexpr int MAX_THREADS = 512;
static int block_threads;  // of this launch, whole warps
static std::string error;
static u64 progress;  // grows with everything that a waiting thread could wait for
static u64 random_state = 1;

static u32 random_below(u32 n) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return u32(random_state >> 33) % n;
}

struct Rendezvous {
    int arrived = 0;
    u32 generation = 0;
    u32 slot[2][MAX_THREADS];
};

struct Store {
    TensorMap map;
    u32 from;
    int at[3];
};

struct Product {
    float* d;
    u64 a, b;
    u32 add;
    u64 group;
};

struct Group {
    std::vector<Store> stores;
    bool read = false;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    std::vector<u32> unfenced;
    u64 fenced = 0;  // stores to global memory up to this one are seen by the thread's copies
    std::deque<Product> products;
    u64 committed = 0;  // groups of them
    std::vector<Store> stores;
    std::vector<Group*> groups;
    int* copying = nullptr;  // copies begun since the last arrival: how many are on their way
};

static std::deque<int> copy_groups;
static Fiber fibers[MAX_THREADS];
static ucontext_t main_context;
static int current;
static void enter(int thread) { current = threadIdx.x = thread; }
static Rendezvous warps[MAX_THREADS / 32], groups_of_warps[MAX_THREADS / 128], block_barrier, some_threads;
static std::deque<Group> all_groups;

static void yield_fiber() {
    const int me = current;
    swapcontext(&fibers[me].context, &main_context);
    enter(me);
}

static void fail(const std::string& what) {
    if (error.empty()) error = what;
    fibers[current].done = true;
    yield_fiber();
}

static u32 meet(Rendezvous& r, int size, int index, u32 value, int source) {
    const u32 mine = r.generation;
    r.slot[mine & 1][index] = value;
    if (++r.arrived == size) {
        r.arrived = 0;
        ++r.generation;
        ++progress;
    } else {
        while (r.generation == mine) yield_fiber();
    }
    return r.slot[mine & 1][source];
}

static u32 bits_of(float x) {
    u32 b;
    memcpy(&b, &x, 4);
    return b;
}

static float float_of(u32 b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}

DEVICE void __syncthreads() { meet(block_barrier, block_threads, 0, 0, 0); }
template <int THREADS>
DEVICE void sync_threads() {
    meet(some_threads, THREADS, current, 0, 0);
}
DEVICE void __syncwarp() { meet(warps[current / 32], 32, current % 32, 0, 0); }
template <typename T>
DEVICE T __shfl_sync(u32, T value, int lane) {
    u32 words[(sizeof(T) + 3) / 4];
    memcpy(words, &value, sizeof(T));
    for (u32& word : words) word = meet(warps[current / 32], 32, current % 32, word, lane);
    memcpy(&value, words, sizeof(T));
    return value;
}
// What all lanes of the warp bring.
static const u32* gather(u32 value) {
    Rendezvous& warp = warps[current / 32];
    const u32* slots = warp.slot[warp.generation & 1];
    meet(warp, 32, current % 32, value, 0);
    return slots;
}
DEVICE u32 __ballot_sync(u32, bool vote) {
    const u32* votes = gather(vote);
    u32 all = 0;
    for (int i = 0; i < 32; ++i) all |= votes[i] << i;
    return all;
}
DEVICE bool __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
DEVICE u32 __reduce_max_sync(u32, u32 value) {
    const u32* values = gather(value);
    return *std::max_element(values, values + 32);
}
DEVICE u32 __reduce_or_sync(u32, u32 value) {
    const u32* values = gather(value);
    u32 all = 0;
    for (int i = 0; i < 32; ++i) all |= values[i];
    return all;
}
DEVICE int __ffs(u32 bits) { return __builtin_ffs(int(bits)); }
DEVICE int __popc(u32 bits) { return __builtin_popcount(bits); }
template <typename T>
DEVICE T __shfl_xor_sync(u32 mask, T value, int other) {
    return __shfl_sync(mask, value, current % 32 ^ other);
}

// --- mbarrier ---------------------------------------------------------------------------------------------

struct Barrier {
    int count = 0, pending = 0;
    long bytes = 0;
    u32 phase = 0;

    void check() {
        if (pending == 0 && bytes == 0) {
            phase ^= 1;
            pending = count;
            ++progress;
        }
    }
};
static Barrier barriers[SHARED_SIZE / 8];

static Barrier& barrier_at(u32 address) {
    if (address % 8 && error.empty()) error = "a barrier is misaligned";
    return barriers[address / 8];
}

DEVICE u32 shared_address(const void* pointer) { return u32((const unsigned char*)pointer - shared); }
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    barrier_at(barrier) = Barrier{int(arrivals), int(arrivals), 0, 0};
}
DEVICE void fence_barrier_init() {}
DEVICE void barrier_arrive(u32 barrier) {
    Barrier& b = barrier_at(barrier);
    if (--b.pending < 0) fail("too many arrivals on a barrier");
    b.check();
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    barrier_at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    while (barrier_at(barrier).phase == (parity & 1)) yield_fiber();
}

// --- copy engine ------------------------------------------------------------------------------------------

static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static std::deque<std::function<void()>> pending_loads;
static std::vector<char> unfenced(SHARED_SIZE);

template <typename Visit>
static void for_box(const TensorMap& map, u32 base, const int (&at)[3], Visit visit) {
    if (map.box[0] * map.element != 128 || map.box[2] != 1) fail("not a box of 128-byte rows");
    if (base % 1024) fail("a box is not 1024-byte aligned");
    for (u64 j = 0; j < map.box[1]; ++j)
        for (u64 i = 0; i < map.box[0]; ++i) {
            const long x = at[0] + long(i), y = at[1] + long(j), z = at[2];
            const bool inside = x >= 0 && y >= 0 && z >= 0 && x < long(map.extent[0]) &&
                                y < long(map.extent[1]) && z < long(map.extent[2]);
            char* global = (char*)map.address + z * long(map.stride[1]) + y * long(map.stride[0]) +
                           x * long(map.element);
            visit(swizzled(base + u32(j * 128 + i * map.element)), inside ? global : nullptr);
        }
}

static u64 stores;                          // to global memory by ordinary instructions
static std::unordered_map<u64, u64> stored;  // the last of them, by the 16 bytes that it wrote

static void stored_to(void* at) { stored[u64(at) / 16] = ++stores; }

static void check_fenced(const void* at, u64 fenced) {
    const auto last = stored.find(u64(at) / 16);
    if (last != stored.end() && last->second > fenced && error.empty())
        error = "a copy reads what was stored after its thread's last fence";
}

DEVICE void load_box(u32 to, const TensorMap& map, u32 barrier, int x, int y, int z) {
    const int at[3] = {x, y, z};
    for_box(map, to, at, [&](u32 s, char*) { memset(shared + s, 0xFF, map.element); });
    const u64 fenced = fibers[current].fenced;
    pending_loads.push_back([=] {
        for_box(map, to, at, [&](u32 s, char* g) {
            if (g && u64(g) % 16 == 0) check_fenced(g, fenced);
            if (g) memcpy(shared + s, g, map.element);
            else memset(shared + s, 0, map.element);
        });
        Barrier& b = barrier_at(barrier);
        b.bytes -= long(map.box[1]) * 128;
        b.check();
    });
}

DEVICE void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (to % 16 || u64(from) % 16 || bytes % 16) fail("a bulk copy is misaligned");
    memset(shared + to, 0xFF, bytes);
    const u64 fenced = fibers[current].fenced;
    pending_loads.push_back([=] {
        for (u32 i = 0; i < bytes; i += 16) check_fenced((const char*)from + i, fenced);
        memcpy(shared + to, from, bytes);
        Barrier& b = barrier_at(barrier);
        b.bytes -= bytes;
        b.check();
    });
}

DEVICE u64 read_once() { return 0; }
DEVICE void load_bytes_once(u32 to, const void* from, u32 bytes, u32 barrier, u64) {
    load_bytes(to, from, bytes, barrier);
}

static std::map<int*, u32> arriving;  // where the last copy of a group arrives
static int* copy_group() {
    if (!fibers[current].copying) fibers[current].copying = &copy_groups.emplace_back(0);
    return fibers[current].copying;
}
static void copy(u32 to, const void* from, u32 size, u32 bytes) {
    if (to % size || u64(from) % size) fail("a copy is misaligned");
    memset(shared + to, 0xFF, size);
    int* group = copy_group();
    ++*group;
    const int who = current;
    pending_loads.push_back([=] {
        memset(shared + to, 0, size);
        memcpy(shared + to, from, bytes);
        for (u32 i = to; i < to + size; ++i) {
            unfenced[i] = 1;
            fibers[who].unfenced.push_back(i);
        }
        --*group;
        ++progress;
        if (*group == 0 && arriving.count(group)) barrier_arrive(arriving[group]);
    });
}
DEVICE void copies_arrive(u32 barrier) {
    int* group = copy_group();
    fibers[current].copying = nullptr;
    if (*group) arriving[group] = barrier;
    else barrier_arrive(barrier);
}
DEVICE void copy_16(u32 to, const void* from, u32 bytes) { copy(to, from, 16, bytes); }
DEVICE void copy_4(u32 to, const void* from) { copy(to, from, 4, 4); }

DEVICE void store_box(const TensorMap& map, u32 from, int x, int y, int z) {
    fibers[current].stores.push_back(Store{map, from, {x, y, z}});
}

DEVICE void store_commit() {
    all_groups.push_back(Group{std::move(fibers[current].stores)});
    fibers[current].stores.clear();
    fibers[current].groups.push_back(&all_groups.back());
}

static void perform(Group& group) {
    for (const Store& s : group.stores)
        for_box(s.map, s.from, s.at, [&](u32 at, char* g) {
            for (u64 i = 0; i < s.map.element; ++i)
                if (unfenced[at + i] && error.empty()) error = "a bulk store reads bytes without a fence";
            if (g) memcpy(g, shared + at, s.map.element);
        });
    group.read = true;
    ++progress;
}

template <int PENDING>
DEVICE void store_wait_read() {
    auto& mine = fibers[current].groups;
    for (size_t i = 0; i + PENDING < mine.size(); ++i)
        while (!mine[i]->read) yield_fiber();
}
DEVICE void store_wait_all() { store_wait_read<0>(); }

DEVICE void fence_async_proxy_of(u32 address, u32 bytes) {
    std::fill_n(unfenced.begin() + address, bytes, 0);
}
DEVICE void fence_async_proxy() {
    for (u32 byte : fibers[current].unfenced) unfenced[byte] = 0;
    fibers[current].unfenced.clear();
}

// --- wgmma ------------------------------------------------------------------------------------------------

template <u32 REGISTERS>
DEVICE void registers_up() {}
template <u32 REGISTERS>
DEVICE void registers_down() {}

DEVICE u64 operand(u32 address) {
    return u64((address & 0x3FFFF) >> 4) | u64(1024 >> 4) << 32 | u64(1) << 62;
}
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() { ++fibers[current].committed; }
template <int N>
DEVICE void pin(float (&)[N]) {}

static float e4m3_table[256];

static float e4m3_value(int byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    if ((byte & 0x7F) == 0x7F) return NAN;
    const float magnitude = exponent ? std::ldexp(1.f + mantissa / 8.f, exponent - 7) : std::ldexp(mantissa / 8.f, -6);
    return byte & 0x80 ? -magnitude : magnitude;
}

// Element `k` of row `row` of an operand, of 32 along K.
static float operand_element(u64 operand, int row, int k) {
    const u32 start = u32(operand & 0x3FFF) << 4, stride = u32(operand >> 32 & 0x3FFF) << 4;
    const u32 at = swizzled(start + row / 8 * stride + row % 8 * 128 + k);
    if (unfenced[at] && error.empty()) error = "a product reads bytes without a fence";
    return e4m3_table[shared[at]];
}

DEVICE void wgmma_m64n128k32(float (&d)[64], u64 a, u64 b, u32 add) {
    fibers[current].products.push_back({d, a, b, add, fibers[current].committed});
    if (!add)
        for (float& x : d) x = NAN;
}

static void multiply_now(const Product& p) {
    const int thread = current % 128;
    float a[2][32];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 32; ++k)
            a[i][k] = operand_element(p.a, thread / 32 * 16 + thread % 32 / 4 + 8 * i, k);
    for (int j = 0; j < 16; ++j)
        for (int c = 0; c < 2; ++c) {
            float sum[2];
            for (int i = 0; i < 2; ++i) sum[i] = p.add ? p.d[4 * j + 2 * i + c] : 0.f;
            for (int k = 0; k < 32; ++k) {
                const float b = operand_element(p.b, 8 * j + 2 * (thread % 4) + c, k);
                for (int i = 0; i < 2; ++i) sum[i] += a[i][k] * b;
            }
            for (int i = 0; i < 2; ++i) p.d[4 * j + 2 * i + c] = sum[i];
        }
}

// Products take effect here and no sooner: an operand that is overwritten before was released too early.
template <int PENDING = 0>
DEVICE void wgmma_wait() {
    Rendezvous& group = groups_of_warps[current / 128];
    Fiber& me = fibers[current];
    const int thread = current % 128;
    const u32 first = u32(me.products.empty() ? 0 : me.products[0].a ^ me.products[0].b << 7);
    if (meet(group, 128, thread, first, 0) != first) fail("threads of a warpgroup multiply different operands");
    while (!me.products.empty() && me.products[0].group + PENDING < me.committed) {
        multiply_now(me.products[0]);
        me.products.pop_front();
    }
    meet(group, 128, thread, 0, 0);
}

// --- global memory that several blocks of a launch share --------------------------------------------------

// Blocks run one after the other: what a block waits for must be its own doing, or a former block's.
DEVICE u32 load_acquire(const u32* counter) {
    yield_fiber();
    return *counter;
}
static int sleeps;  // of all threads, since a counter changed
DEVICE void add_release(u32* counter, u32 value) {
    *counter += value;
    ++progress;
    sleeps = 0;
}
DEVICE u32 take_one(u32* counter) {
    yield_fiber();
    const u32 before = *counter;
    add_release(counter, 1);
    return before;
}
DEVICE void fence_async_proxy_global() { fibers[current].fenced = stores; }

// --- words that ranks share, and those of a call ----------------------------------------------------------

// What peers do is written before a launch: `bytes` come from `from` to `to` by their ordinary stores just before the
// look-th look at `word`. And what must have come to `to` when a word is released.
struct Arrival {
    const int* word;
    int look;
    char* to;
    const char* from;
    u64 bytes;
};
static std::vector<Arrival> arrivals;
struct Promise {
    const int* word;
    const char *to, *from;
    u64 bytes;
};
static std::vector<Promise> promises;
static u64 clock_ns;

extern "C" void arrive(const int* word, int look, char* to, const char* from, u64 bytes) {
    arrivals.push_back({word, look, to, from, bytes});
}
extern "C" void promise(const int* word, const char* to, const char* from, u64 bytes) {
    promises.push_back({word, to, from, bytes});
}
extern "C" void forget_peers() {
    arrivals.clear();
    promises.clear();
}

static int look_at(const int* word) {
    yield_fiber();
    for (Arrival& a : arrivals)
        if (a.word == word && --a.look == 0) {
            memcpy(a.to, a.from, a.bytes);
            for (u64 i = 0; i < a.bytes; i += 16) stored_to(a.to + i);
        }
    return *word;
}

// A peer's stores are seen by who has acquired, and by its copies after a fence.
DEVICE int load_acquire_system(const int* word) { return look_at(word); }
DEVICE int load_volatile(const int* word) { return look_at(word); }
DEVICE void store_release_system(int* word, int value) {
    for (const Promise& p : promises)
        if (p.word == word && memcmp(p.to, p.from, p.bytes) != 0 && error.empty())
            error = "a word is released before what it tells of";
    *word = value;
    ++progress;
}
DEVICE void max_release_system(int* word, int value) { *word = std::max(*word, value); }
DEVICE int compare_and_swap(int* word, int expected, int value) {
    const int before = *word;
    if (before == expected) *word = value;
    return before;
}
// Each look at the clock takes a while.
DEVICE u64 global_timer() {
    yield_fiber();
    ++progress;
    return clock_ns += 100000;
}

// --- global memory by ordinary instructions ---------------------------------------------------------------

struct Words {
    u32 at[4];
};

DEVICE Words load_words(const void* from) {
    if (u64(from) % 16) fail("a load of 16 bytes is misaligned");
    Words w;
    memcpy(&w, from, 16);
    return w;
}
DEVICE void store_words(void* to, const Words& w) {
    if (u64(to) % 16) fail("a store of 16 bytes is misaligned");
    memcpy(to, &w, 16);
    stored_to(to);
}
DEVICE float load_float(const float* from) { return *from; }
DEVICE void store_float(float* to, float value) {
    *to = value;
    stored_to(to);
}
// Who polls meets its warp again and again, which is no progress.
DEVICE void sleep_ns(u32) {
    if (++sleeps > 100000) fail("every thread waits");
    yield_fiber();
}

// --- plain memory and arithmetic --------------------------------------------------------------------------

DEVICE float load_shared(u32 address) {
    float x;
    memcpy(&x, shared + address, 4);
    return x;
}
DEVICE void load_shared_pair(u32 address, float& first, float& second) {
    if (address % 8) fail("a shared load is misaligned");
    first = load_shared(address);
    second = load_shared(address + 4);
}
DEVICE u32 __float_as_uint(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
DEVICE u32 load_shared_word(u32 address) {
    u32 x;
    memcpy(&x, shared + address, 4);
    return x;
}
static void store_shared(u32 address, const void* value, u32 bytes) {
    if (address % bytes) fail("a shared store is misaligned");
    memcpy(shared + address, value, bytes);
    for (u32 i = 0; i < bytes; ++i) {
        unfenced[address + i] = 1;
        fibers[current].unfenced.push_back(address + i);
    }
}
DEVICE void store_shared_word(u32 address, u32 value) { store_shared(address, &value, 4); }
DEVICE void store_shared_pair(u32 address, float first, float second) {
    const float pair[2] = {first, second};
    store_shared(address, pair, 8);
}
DEVICE Words load_shared_words(u32 address) {
    if (address % 16) fail("a shared load is misaligned");
    return load_words(shared + address);
}
DEVICE void store_shared(u32 address, float value) { store_shared(address, &value, 4); }
DEVICE void store_shared_words(u32 address, u32 first, u32 second) {
    const u32 pair[2] = {first, second};
    store_shared(address, pair, 8);
}
DEVICE void store_shared_words(u32 address, const Words& w) { store_shared(address, w.at, 16); }
DEVICE void store_shared_half(u32 address, u16 value) { store_shared(address, &value, 2); }

DEVICE void load_transposed(u32 (&d)[4], u32 address) {
    const int lane = current % 32;
    for (int i = 0; i < 4; ++i) {
        u16 pair[2];
        for (int j = 0; j < 2; ++j) {
            const u32 row = __shfl_sync(~0u, address, 8 * i + lane % 4 * 2 + j);
            if (row % 16) fail("a matrix row is misaligned");
            memcpy(&pair[j], shared + row + lane / 4 * 2, 2);
        }
        d[i] = pair[0] | u32(pair[1]) << 16;
    }
    __syncwarp();
}

DEVICE float exp2_approx(float x) { return std::exp2(x); }
DEVICE float reciprocal_approx(float x) { return 1.f / x; }
DEVICE float max_or_nan(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }

static u32 bf16_bits(float x) {
    const u32 b = bits_of(x);
    return x != x ? 0x7FFF : (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
DEVICE u32 pack_bf16(float first, float second) { return bf16_bits(first) | bf16_bits(second) << 16; }

// Nearest, ties to even, saturating.
static u32 e4m3_bits(float x) {
    if (x != x) return 0x7F;
    const u32 sign = std::signbit(x) ? 0x80 : 0;
    const float magnitude = std::fabs(x);
    int best = 0;
    for (int i = 1; i < 0x7F; ++i) {
        const float now = std::fabs(e4m3_table[i] - magnitude), before = std::fabs(e4m3_table[best] - magnitude);
        if (now < before || (now == before && i % 2 == 0)) best = i;
    }
    return sign | best;
}
DEVICE u16 pack_e4m3(float first, float second) { return u16(e4m3_bits(first) | e4m3_bits(second) << 8); }

DEVICE float low_bf16(u32 packed) { return float_of(packed << 16); }
DEVICE float high_bf16(u32 packed) { return float_of(packed & 0xFFFF0000u); }
DEVICE u32 max_magnitudes_bf16(u32 a, u32 b) {
    a &= 0x7FFF7FFF, b &= 0x7FFF7FFF;
    return pack_bf16(max_or_nan(low_bf16(a), low_bf16(b)), max_or_nan(high_bf16(a), high_bf16(b)));
}
// The sign is that of a · b, for a NaN too: nobody may rely on it.
DEVICE u32 max_magnitudes_any_sign_bf16(u32 a, u32 b) { return max_magnitudes_bf16(a, b) | ((a ^ b) & 0x80008000); }
DEVICE float __fdiv_rn(float a, float b) { return a / b; }
using std::max;
using std::min;
template <typename T>
DEVICE T __ldg(const T* p) {
    return *p;
}

// --- launch -----------------------------------------------------------------------------------------------

static std::function<void()> body;

static void fiber_main() {
    body();
    fibers[current].done = true;
    yield_fiber();
}

static void engine_step() {
    if (!pending_loads.empty() && random_below(3) == 0) {
        const u32 pick = random_below(u32(pending_loads.size()));
        auto load = pending_loads[pick];
        pending_loads.erase(pending_loads.begin() + pick);
        load();
        ++progress;
    }
    for (auto& group : all_groups)
        if (!group.read && random_below(4) == 0) {
            perform(group);
            break;
        }
}

static void run_block() {
    error.clear();
    pending_loads.clear();
    all_groups.clear();
    copy_groups.clear();
    memset(shared, 0xFF, SHARED_SIZE);
    std::fill(unfenced.begin(), unfenced.end(), 0);
    for (auto& w : warps) w = Rendezvous{};
    for (auto& g : groups_of_warps) g = Rendezvous{};
    block_barrier = some_threads = Rendezvous{};
    for (int i = 0; i < block_threads; ++i) {
        Fiber& f = fibers[i];
        f.done = false;
        f.fenced = 0, f.unfenced.clear(), f.products.clear(), f.committed = 0, f.stores.clear(), f.groups.clear();
        f.copying = nullptr;
        f.stack.resize(128 * 1024);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = nullptr;
        makecontext(&f.context, fiber_main, 0);
    }
    int idle = 0;
    int stalled[MAX_THREADS / 32] = {};  // rounds that a warp rests: warps drift apart as on a GPU
    while (error.empty()) {
        const u64 before = progress;
        bool alive = false;
        for (int i = 0; i < block_threads; ++i) {
            if (fibers[i].done) continue;
            alive = true;
            if (i % 32 == 0) {
                if (stalled[i / 32] > 0) --stalled[i / 32];
                else if (random_below(16) == 0) stalled[i / 32] = random_below(24);
            }
            if (stalled[i / 32] > 0) continue;
            enter(i);
            swapcontext(&main_context, &fibers[i].context);
        }
        if (!alive) break;
        engine_step();
        const bool engine_busy = !pending_loads.empty() || [] {
            for (auto& g : all_groups)
                if (!g.read) return true;
            return false;
        }();
        idle = progress == before && !engine_busy ? idle + 1 : 0;
        if (idle > 100) error = "every thread waits";
    }
    if (error.empty() && !pending_loads.empty()) error = "a block ended before its loads";
    for (auto& g : all_groups)
        if (error.empty() && !g.read) error = "a block ended before its stores";
}

template <typename... A, size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<A>*)arguments[I]...);
}

template <typename... A>
static const char* launch_all(void (*kernel)(A...), int first, int last, int blocks, int threads, u64 seed,
                              void** arguments) {
    block_threads = threads;
    for (int i = 0; i < 256; ++i) e4m3_table[i] = e4m3_value(i);
    random_state = seed;
    stores = 0, stored.clear();
    sleeps = 0;
    gridDim.x = blocks;
    body = [=] { call(kernel, arguments, std::index_sequence_for<A...>{}); };
    for (blockIdx.x = first; blockIdx.x < u32(last); ++blockIdx.x) {
        run_block();
        if (!error.empty()) break;
    }
    return error.c_str();
}
