// Expert GEMM with a bf16 result: GEMM2 (o = h'·W2ᵀ) and, with two segments, dgrad1 (dx = dg·W1 + du·W3).
//
//     out[r, n] = bf16(acc[r, n])          (P, N), see fp8_gemm.cuh for acc, ring.cuh for the roles
//
// Epilogue: every warp rounds its 16 rows × 256 columns and sends them in four boxes.

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_plain(
    const __grid_constant__ TensorMap a,    // (segments, P, K) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap b,    // (layers, N, K) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap out,  // (1, P, N) bf16, box (1, 16, 64)
    const float* scale_a, const float* scale_b, const int* tile_expert, const int* num_tiles, int pool_rows,
    int columns, int k_blocks, int segments, int experts, u32* claims) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Problem p{scale_a, scale_b, tile_expert, num_tiles, pool_rows, columns, k_blocks, segments, experts,
                    0, BLOCK, claims};
    const Shared s = open_block(shared);
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS>();
        if (threadIdx.x == MATH_THREADS) fill(p, s, a, b, [](const Tile&, Position&) {});
    } else {
        registers_up<MATH_REGISTERS>();
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Pieces pieces{s.staging(warp)};
        Turns turns{p.tiles()};
        Position at;
        for (Tile tile; turns.next(s, at, tile);) {
            Sums sums;
            accumulate(p, s, at, sums);
            const int row = tile.row + warp * WARP_ROWS;
            send_bf16(out, sums.left, pieces, columns, tile.column, row, 0);
            send_bf16(out, sums.right, pieces, columns, tile.column + BLOCK, row, 0);
        }
        if (threadIdx.x % 32 == 0) store_wait_all();
    }
}
