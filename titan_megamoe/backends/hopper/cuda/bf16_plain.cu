// Expert GEMM with a bf16 result: GEMM2 (o = h'·W2ᵀ) and, with two segments and weights along N, dgrad1
// (dx = dg·W1 + du·W3).
//
//     out[r, n] = bf16(acc[r, n])          (P, N), see bf16_gemm.cuh for acc, ring.cuh for the roles
//
// Epilogue: every warp rounds its 16 rows × 256 columns and sends them in four boxes; they leave under the products
// of the next tile.

extern "C" __global__ void __launch_bounds__(THREADS, 1) bf16_plain(
    const __grid_constant__ TensorMap a,       // (segments, P, K) bf16, box (1, 128, 64)
    const __grid_constant__ TensorMap first,   // weight of segment 0: (e, N, K) bf16, box (1, 128, 64), or
                                               // with WEIGHT_ALONG_N (e, K, N), box (1, 64, 64)
    const __grid_constant__ TensorMap second,  // of segment 1; unused with one
    const __grid_constant__ TensorMap out,     // (1, P, N) bf16, box (1, 16, 64)
    const int* tile_expert, const int* num_tiles, int columns, int k_blocks, int segments) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Problem p{tile_expert, num_tiles, columns, k_blocks, segments, BLOCK};
    const Shared s = open_block(shared);
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS>();
        if (threadIdx.x == MATH_THREADS)
            fill(p, s, a, [&](int segment) {
                const TensorMap* map = segment ? &second : &first;
                return Pair{map, map};
            });
    } else {
        registers_up<MATH_REGISTERS>();
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
        const u32 pieces = s.staging(warp);
        bool parked = false;
        Tile tile{0, 0, 0};
        const auto send = [&] {
            hand_to_copy_engine();
            if (threadIdx.x % 32 != 0) return;
            const int row = tile.row + warp * WARP_ROWS;
            send_parked(out, pieces, columns, tile.column, row, 0);
            send_parked(out, pieces + 2 * PIECE_BYTES, columns, tile.column + BLOCK, row, 0);
            store_commit();
        };
        Position at;
        for (Tiles tiles = p.tiles(); tiles.more(); tiles.advance()) {
            Sums sums;
            accumulate(p, s, group, at, sums, [&](int step) {
                if (step != 0) return;
                if (parked) send();
                tile = tiles.tile();
            });
            park(sums, pieces);
            parked = true;
        }
        if (parked) send();
        if (threadIdx.x % 32 == 0) store_wait_all();
    }
}
