// Gate and up projections with SwiGLU, the top-k weight and the quantization of h' in the epilogue.
//
//     g, u  = x·W1ᵀ, x·W3ᵀ                       fp32 sums, see ring.cuh for the roles
//     h'    = w · silu(g) · u                    e4m3 with one scale per row and 128 columns of I
//     g, u  as bf16 too, where a backward follows (SAVE)
//
// A tile is 128 rows × 128 columns of I, gate and up side by side: its rows' 128 values are one scale block, held
// by four threads. So h' is quantized from the fp32 registers and never read back. The 1×128 scale is that of
// precision/quantize.py; NaN and Inf stay in their row's block.
//
// With DISPATCH the rows of x are written here, ahead of the tiles, by the other three warps of the filling one's
// warpgroup: dispatch.cuh. With GATHER there is no pool of them: gather.cuh.

#if defined(DISPATCH) || defined(GATHER)
constexpr u32 UP_REGISTERS = MATH_REGISTERS - 8;  // the warps that dispatch or gather need 72
#else
constexpr u32 UP_REGISTERS = MATH_REGISTERS;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_up(
    const __grid_constant__ TensorMap x,        // (1, P, H) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap w13,      // (2e, I, H) e4m3: all of W1, then all of W3; box (1, 128, 128)
    const __grid_constant__ TensorMap h,        // (1, P, I) e4m3, box (1, 16, 128)
    const __grid_constant__ TensorMap gate_up,  // (2, P, I) bf16, box (1, 16, 64); unused without SAVE
    const float* scale_x,                       // (⌈H/128⌉, P)
    const float* scale_w13,                     // (2e, ⌈I/128⌉, ⌈H/128⌉)
    float* scale_h,                             // (⌈I/128⌉, P)
    const float* weight,                        // (P) top-k weight of each row
    const int* tile_expert, const int* num_tiles, int pool_rows, int columns, int k_blocks, int experts,
    u32* claims
#ifdef DISPATCH
    ,
    const unsigned char* local, const unsigned char* remote, const float* local_scale, const float* remote_scale,
    const long long* delta, unsigned char* pool, float* pool_scale, const int* row_source, const int* slot_row,
    const int* recv_token, const int* recv_count, u32* progress, int hidden, int max_tokens, int top_k
#elif defined(GATHER)
    ,
    const unsigned char* local, const unsigned char* copied, const float* local_scale, const float* copied_scale,
    const int* row_slot, const int* own_tiles, const int* tile_order, int part, int hidden, int top_k, int own_first,
    int max_tokens
#endif
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Problem p{scale_x, scale_w13, tile_expert, num_tiles, pool_rows, columns, k_blocks, 1, experts,
                    experts, 0, claims};
    const Shared s = open_block(shared);
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS + 2 * (MATH_REGISTERS - UP_REGISTERS)>();
        const auto nothing_more = [](const Tile&, Position&) {};
#ifdef DISPATCH
        const int used_rows = ROWS * __ldg(num_tiles);
        const Dispatch d{local,      remote,   local_scale, remote_scale, delta,     pool,
                         pool_scale, row_source, slot_row,  recv_token,   recv_count, progress,
                         hidden,     k_blocks, pool_rows,   used_rows,    max_tokens, top_k};
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp == WARPS) {
            fill(p, s, x, w13, nothing_more, Written{d});
        } else {
            dispatch(d, warp - WARPS - 1);
        }
#elif defined(GATHER)
        fill_gathering(p, s, w13,
                       Gathered{local, copied, local_scale, copied_scale, row_slot, own_tiles, tile_order, part,
                                hidden, k_blocks, Copies{top_k, own_first, max_tokens}});
#else
        if (threadIdx.x == MATH_THREADS) fill(p, s, x, w13, nothing_more);
#endif
    } else {
        registers_up<UP_REGISTERS>();
        const u32 lane = threadIdx.x % 32;
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Pieces pieces{s.staging(warp)};
        Turns turns{p.tiles()};
        Position at;
        for (Tile tile; turns.next(s, at, tile);) {
            const int row = tile.row + warp * WARP_ROWS;
            const float upper_weight = __ldg(weight + row + lane / 4);
            const float lower_weight = __ldg(weight + row + lane / 4 + 8);
            Sums sums;
            accumulate(p, s, at, sums);
#ifdef SAVE
            send_bf16(gate_up, sums.left, pieces, columns, tile.column, row, 0);
#endif
            float upper_max = 0.f, lower_max = 0.f;
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                const float g = sums.left[i];
                const float value = g * sigmoid(g) * sums.right[i] * (i % 4 < 2 ? upper_weight : lower_weight);
                sums.left[i] = value;
                float& most = i % 4 < 2 ? upper_max : lower_max;
                most = max_or_nan(most, fabsf(value));
            }
#ifdef SAVE
            send_bf16(gate_up, sums.right, pieces, columns, tile.column, row, 1);
#endif
            const u32 piece = pieces.take();
            quantize(sums.left, upper_max, lower_max, piece, scale_h + u64(tile.column / BLOCK) * pool_rows + row);
            send(h, piece, true, tile.column, row, 0);
        }
        if (lane == 0) store_wait_all();
    }
}
