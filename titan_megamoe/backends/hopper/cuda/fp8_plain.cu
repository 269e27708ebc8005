// Expert GEMM with a bf16 result: GEMM2 (o = h'·W2ᵀ) and, with two segments, dgrad1 (dx = dg·W1 + du·W3).
//
//     out[r, n] = bf16(acc[r, n])          (P, N), see fp8_gemm.cuh for acc and the roles
//
// Epilogue: every warp rounds its 16 rows × 256 columns into its staging and stores them in four boxes; it waits
// for the copy engine only before it writes there again, a tile later.

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_plain(
    const __grid_constant__ TensorMap a,    // (segments, P, K) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap b,    // (layers, N, K) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap out,  // (1, P, N) bf16, box (1, 16, 64)
    const float* scale_a, const float* scale_b, const int* tile_expert, const int* num_tiles, int pool_rows,
    int columns, int k_blocks, int segments, int experts) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Problem p{scale_a, scale_b, tile_expert, num_tiles, pool_rows, columns, k_blocks, segments, experts,
                    0, BLOCK};
    const Shared s = open_block(shared);
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS>();
        if (threadIdx.x == MATH_THREADS) fill(p, s, a, b, [](const Tile&, Position&) {});
    } else {
        registers_up<MATH_REGISTERS>();
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        const bool first_lane = threadIdx.x % 32 == 0;
        const u32 staging = s.staging(warp);
        const int column_tiles = p.column_tiles();
        const int total = __ldg(num_tiles) * column_tiles;
        Position at;
        for (int index = blockIdx.x; index < total; index += gridDim.x) {
            const Tile tile(p, index, column_tiles);
            Sums sums;
            accumulate(p, s, tile, at, sums);
            reclaim_staging();
            stage_bf16<0>(sums.left, staging);
            stage_bf16<1>(sums.left, staging + PIECE_BYTES);
            stage_bf16<0>(sums.right, staging + 2 * PIECE_BYTES);
            stage_bf16<1>(sums.right, staging + 3 * PIECE_BYTES);
            hand_to_copy_engine();
            if (first_lane) {
                const int row = tile.row + warp * WARP_ROWS;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (tile.column + 64 * i < columns)
                        store_box(out, staging + i * PIECE_BYTES, tile.column + 64 * i, row, 0);
                }
                store_commit();
            }
        }
        if (first_lane) store_wait_all();
    }
}
