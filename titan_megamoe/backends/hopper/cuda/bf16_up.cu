// Gate and up projections with SwiGLU and the top-k weight in the epilogue.
//
//     g, u  = x·W1ᵀ, x·W3ᵀ                       fp32 sums, see bf16_gemm.cuh, ring.cuh for the roles
//     h'    = w · silu(g) · u                    bf16, from the fp32 sums
//     g, u  as bf16 too, where a backward follows (SAVE)
//
// A tile is 128 rows × 128 columns of I, gate and up side by side, so that one thread has both of an element.

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_DIMS bf16_up(
    const __grid_constant__ TensorMap x,        // (1, P, H) bf16, box (1, 128, 64)
    const __grid_constant__ TensorMap w1,       // (e, I, H) bf16, box (1, 128, 64)
    const __grid_constant__ TensorMap w3,       // (e, I, H) bf16, box (1, 128, 64)
    const __grid_constant__ TensorMap h,        // (1, P, I) bf16, box (1, 16, 64)
    const __grid_constant__ TensorMap gate_up,  // (2, P, I) bf16, box (1, 16, 64); unused without SAVE
    const float* weight,                        // (P) top-k weight of each row
    const int* tile_expert, const int* num_tiles, int columns, int k_blocks) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Shared s = open_block(shared);
    Tiles tiles(tile_expert, num_tiles, columns, BLOCK);
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS>();
        if (threadIdx.x == MATH_THREADS) {
            auto step = [&](const Tile& tile, int, int block, u32 stage) {
                const u32 full = s.full(stage), to = s.stage(stage);
                load_box(to, x, full, block * K_STEP, tile.row, 0);
                load_half(tile, 0, to, full, w1, block * K_STEP, tile.column);
                load_half(tile, 1, to, full, w3, block * K_STEP, tile.column);
            };
            fill(tiles, s, 1, k_blocks, STAGE_BYTES, step, [](const Tile&, Position&) {});
        }
    } else {
        registers_up<MATH_REGISTERS>();
        const u32 lane = threadIdx.x % 32;
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Pieces pieces{s.staging(warp)};
        Position at;
        for (; tiles.more(); tiles.advance()) {
            const Tile tile = tiles.tile();
            const int row = tile.row + warp * WARP_ROWS;
            const float upper_weight = __ldg(weight + row + lane / 4);
            const float lower_weight = __ldg(weight + row + lane / 4 + 8);
            Sums sums;
            accumulate_bf16(s, k_blocks, at, sums);
#ifdef SAVE
            send_bf16(gate_up, sums.left, pieces, columns, tile.column, row, 0);
            send_bf16(gate_up, sums.right, pieces, columns, tile.column, row, 1);
#endif
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                const float g = sums.left[i];
                sums.left[i] = g * sigmoid(g) * sums.right[i] * (i % 4 < 2 ? upper_weight : lower_weight);
            }
            send_bf16(h, sums.left, pieces, columns, tile.column, row, 0);
        }
        if (lane == 0) store_wait_all();
    }
    close_block();
}
