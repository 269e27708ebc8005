// Expert GEMM with a bf16 result: GEMM2 (o = h'·W2ᵀ) and, with two segments and weights along N, dgrad1
// (dx = dg·W1 + du·W3).
//
//     out[r, n] = bf16(acc[r, n])          (P, N), see bf16_gemm.cuh for acc, ring.cuh for the roles
//
// Epilogue: every warp rounds its 16 rows × 256 columns and sends them in four boxes.

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_DIMS bf16_plain(
    const __grid_constant__ TensorMap a,       // (segments, P, K) bf16, box (1, 128, 64)
    const __grid_constant__ TensorMap first,   // weight of segment 0: (e, N, K) bf16, box (1, 128, 64), or
                                               // with WEIGHT_ALONG_N (e, K, N), box (1, 64, 64)
    const __grid_constant__ TensorMap second,  // of segment 1; unused with one
    const __grid_constant__ TensorMap out,     // (1, P, N) bf16, box (1, 16, 64)
    const int* tile_expert, const int* num_tiles, int columns, int k_blocks, int segments) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Shared s = open_block(shared);
    Tiles tiles(tile_expert, num_tiles, columns, 2 * BLOCK);
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS>();
        if (threadIdx.x == MATH_THREADS) {
            auto step = [&](const Tile& tile, int segment, int block, u32 stage) {
                const u32 full = s.full(stage), to = s.stage(stage);
                const TensorMap& b = segment ? second : first;
                load_box(to, a, full, block * K_STEP, tile.row, segment);
                load_half(tile, 0, to, full, b, block * K_STEP, tile.column);
                load_half(tile, 1, to, full, b, block * K_STEP, tile.column + BLOCK);
            };
            fill(tiles, s, segments, k_blocks, STAGE_BYTES, step, [](const Tile&, Position&) {});
        }
    } else {
        registers_up<MATH_REGISTERS>();
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Pieces pieces{s.staging(warp)};
        Position at;
        for (; tiles.more(); tiles.advance()) {
            const Tile tile = tiles.tile();
            Sums sums;
            accumulate_bf16(s, segments * k_blocks, at, sums);
            const int row = tile.row + warp * WARP_ROWS;
            send_bf16(out, sums.left, pieces, columns, tile.column, row, 0);
            send_bf16(out, sums.right, pieces, columns, tile.column + BLOCK, row, 0);
        }
        if (threadIdx.x % 32 == 0) store_wait_all();
    }
    close_block();
}
