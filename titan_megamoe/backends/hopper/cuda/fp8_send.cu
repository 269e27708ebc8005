// GEMM2 (o = h'·W2ᵀ, as in fp8_plain.cu, to the bit) whose idle warps send the combine's partial sums of the columns
// that are complete: send.cuh.

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_send(
    const __grid_constant__ TensorMap a,    // (1, P, K) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap b,    // (e, N, K) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap out,  // (1, P, N) bf16, box (1, 16, 64)
    const float* scale_a, const float* scale_b, const int* tile_expert, const int* num_tiles, int pool_rows,
    int columns, int k_blocks, int segments, int experts,
    const unsigned char* rows, const int* slot_row, const int* tokens, const int* ok, const int* state,  // Sending
    unsigned char* partial, const long long* delta, u32* counters, int wave_columns, int chunk_tokens,
    int max_tokens, int top_k, int world, int rank) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Problem p{scale_a, scale_b, tile_expert, num_tiles, pool_rows, columns, k_blocks, segments, experts,
                    0, BLOCK, wave_columns / (2 * BLOCK)};
    const Sending sending{rows, slot_row, tokens, ok, state, partial, delta, counters, wave_columns, chunk_tokens,
                          max_tokens, top_k, world, rank};
    open_sending(shared);
    const Shared s = open_block(shared);
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp >= WARPS) {
        registers_down<LOAD_REGISTERS>();
        if (threadIdx.x == MATH_THREADS) fill(p, s, a, b, [](const Tile&, Position&) {});
        if (warp == WARPS + 1) tell_blocks(p, s, sending);
        if (warp > WARPS + 1) send_sums(p, s, sending, warp - WARPS - 2);
    } else {
        registers_up<MATH_REGISTERS>();
        open_turns();
        Pieces pieces{s.staging(warp)};
        Position at;
        u32 tiles_sent = 0;
        for (Tiles tiles = p.tiles(); tiles.more(); tiles.advance()) {
            const Tile tile = tiles.tile();
            Sums sums;
            accumulate(p, s, at, sums);
            tell_stored(s, warp, tiles_sent++);
            const int row = tile.row + warp * WARP_ROWS;
            send_bf16(out, sums.left, pieces, columns, tile.column, row, 0);
            send_bf16(out, sums.right, pieces, columns, tile.column + BLOCK, row, 0);
        }
        tell_stored(s, warp, tiles_sent);
    }
}
