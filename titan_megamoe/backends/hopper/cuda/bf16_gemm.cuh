// The loop that every bf16 grouped GEMM here shares: rows of the pool times an expert's weight, summed in fp32 in
// the tensor cores. Roles, tiles and synchronisation: ring.cuh.
//
//     acc[r, n] = Σ_segments Σ_k a[segment, r, k] · b[segment, expert, k, n]
//
// A stage holds K_STEP = 64 of the contraction. The weight lies in memory along K, as GEMM1 and GEMM2 read it, or
// along N (ALONG_N), as dgrad1 and dgrad2 read the same parameters; then a column block is two boxes of 64 columns.
//
// The products of a stage are started before those of the stage before are waited for, so the tensor cores always
// have work; a stage is released one stage late, and the ring has more than two.

constexpr int K_STEP = 64;
constexpr u32 BOX_BYTES = K_STEP * 128;  // 64 of K × 64 columns
#ifdef WEIGHT_ALONG_N
constexpr bool ALONG_N = true;
#else
constexpr bool ALONG_N = false;
#endif

// Column block `half` of a stage's weight, from column `column` of the expert's matrix in `map` on, if this block is
// the one to load it. Boxes of `map`: (1, 128, 64) along K, (1, 64, 64) along N.
DEVICE void load_half(const Tile& tile, u32 half, u32 stage, u32 full, const TensorMap& map, int k, int column) {
    if (!loads_half(tile, half)) return;
    const u32 to = stage + (1 + half) * MATRIX_BYTES;
    if (ALONG_N) {
        load_weight(tile, to, map, full, column, k, tile.expert);
        load_weight(tile, to + BOX_BYTES, map, full, column + 64, k, tile.expert);
    } else {
        load_weight(tile, to, map, full, k, column, tile.expert);
    }
}

// The sums of a tile, for the 64 rows of this warpgroup, over `steps` stages.
DEVICE void accumulate_bf16(const Shared& s, int steps, Position& at, Sums& sums) {
    const u32 group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const bool releases = threadIdx.x % 32 == 0;
    u32 unreleased = STAGES;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(s.full(at.stage), at.round);
        const u32 stage = s.stage(at.stage);
        const u64 a = operand(stage + group * (MATRIX_BYTES / 2));
        const u64 b = ALONG_N ? operand_along_n(stage + MATRIX_BYTES, BOX_BYTES) : operand(stage + MATRIX_BYTES);
        pin(sums.left);
        pin(sums.right);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_STEP / 16; ++k)
            wgmma_m64n256k16<ALONG_N>(sums.left, sums.right, a + 2 * k, b + k * (ALONG_N ? 128 : 2), step | k);
        wgmma_commit();
        wgmma_wait<1>();
        if (releases && unreleased < STAGES) release(s, unreleased);
        unreleased = at.stage;
        at.advance();
    }
    wgmma_wait();
    pin(sums.left);
    pin(sums.right);
    if (releases) release(s, unreleased);
}
