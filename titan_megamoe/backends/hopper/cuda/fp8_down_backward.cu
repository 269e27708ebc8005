// The down projection's data gradient with the SwiGLU backward and the quantization of dg and du.
//
//     dh'    = dy·W2                             fp32 sums, see ring.cuh for the roles
//     h      = silu(g)·u                         from the saved bf16 g, u
//     dw     = ⟨dh', h⟩                          one partial sum per row and column tile
//     dg, du = w·dh'·u·silu'(g), w·dh'·silu(g)   e4m3 with one scale per row and 128 columns of I
//     dg, du as bf16 too (WRITE_GRADS), h' = w·h as bf16 (WRITE_H): operands of bf16 weight gradients
//     with COLUMNS the same rounded to bf16 and then to e4m3, with one scale per column and 128 rows, tokens
//     contiguous: operands of fp8 weight gradients, to the bit what fp8_wgrad.py makes of the bf16 ones
//
// A tile is 128 rows × 256 columns of I. After its sums come four more stages of the ring, each with g and u of
// 64 columns (128 bytes a row). bf16 results take the place of what they were computed from, and are stored from
// there; such a stage is released when the copy engine has read it, one stage later, so that a warp seldom waits.
// Released late is still released before the warp waits for the stage after the next, and the ring has at least
// three: the producer can always fill the stage that a warp waits for.
//
// COLUMNS: a scale block is a column of the tile. When all warps have put their rows of 64 columns in place (a barrier
// of the multiplying warps), every warp takes 8 columns of each matrix through ldmatrix, which transposes: a thread gets
// 32 rows of a column, four threads the whole. Padding rows are put there as 0.

constexpr int QUARTERS = 4;
constexpr u32 QUARTER_BYTES = 2 * MATRIX_BYTES;
#ifdef COLUMNS
constexpr bool WRITE_COLUMNS = true, LATE_RELEASE = false;
#elif defined(WRITE_GRADS) || defined(WRITE_H)
constexpr bool WRITE_COLUMNS = false, LATE_RELEASE = true;
#else
constexpr bool WRITE_COLUMNS = false, LATE_RELEASE = false;
#endif

// With COLUMNS: of dg, du and h', those that are written.
#ifdef WRITE_GRADS
constexpr int FIRST_MATRIX = 0;
#else
constexpr int FIRST_MATRIX = 2;
#endif
#ifdef WRITE_H
constexpr int END_MATRIX = 3;
#else
constexpr int END_MATRIX = 2;
#endif

struct Backward {
    float upper_weight, lower_weight;
    float upper_dw, lower_dw;
    bool upper_live, lower_live;  // rows of the expert, no padding; COLUMNS only
};

// The 8 columns of 16-byte unit `unit` of a matrix of 128 rows × 64 bf16 as e4m3 into a piece, a column after the
// other, and their scales. A thread has of column lane / 4 the rows 8·b + 2·(lane mod 4) and the next, b = 0 … 15. It
// reads them twice: there is no room for them beside the sums.
DEVICE void quantize_unit(u32 matrix, u32 unit, u32 piece, float* scales) {
    const u32 lane = threadIdx.x % 32;
    const u32 from = matrix + lane * 128 + ((unit ^ lane % 8) << 4);
    u32 most = 0, pairs[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        load_transposed(pairs, from + 4096 * q);
#pragma unroll
        for (int b = 0; b < 4; ++b) most = max_magnitudes_bf16(most, pairs[b]);
    }
    const float factor = quantization_factor_bf16(row_max(max_or_nan(low_bf16(most), high_bf16(most))));
    const u32 to = piece + piece_offset<2>(lane);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        load_transposed(pairs, from + 4096 * q);
#pragma unroll
        for (int b = 0; b < 4; ++b)
            store_shared_half((to ^ ((2 * q + b / 2) << 4)) + b % 2 * 8,
                              pack_e4m3(low_bf16(pairs[b]) * factor, high_bf16(pairs[b]) * factor));
    }
    if (lane % 4 == 0) scales[lane / 4] = reciprocal(factor);
}

// One 64-column quarter: sums (dh') becomes dg, du is set, for columns 64·HALF of the block.
template <int HALF>
DEVICE void swiglu_backward(float (&sums)[64], float (&du)[64], Backward& state, u32 stage, u32 warp,
                            float (&most)[4]) {
    const u32 to = stage + warp * PIECE_BYTES + piece_offset<4>(threadIdx.x % 32);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            const u32 g_at = (to ^ (c << 4)) + lower * 1024;
            const u32 gs = load_shared_word(g_at), us = load_shared_word(g_at + MATRIX_BYTES);
            const float weight = lower ? state.lower_weight : state.upper_weight;
            const bool zero = WRITE_COLUMNS && !(lower ? state.lower_live : state.upper_live);
            float hs[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = 4 * (8 * HALF + c) + 2 * lower + i;
                const float g = i ? high_bf16(gs) : low_bf16(gs), u = i ? high_bf16(us) : low_bf16(us);
                const float sg = sigmoid(g), silu = g * sg, h = silu * u, dhw = sums[at];
                (lower ? state.lower_dw : state.upper_dw) += dhw * h;
                const float dh = weight * dhw;
                sums[at] = dh * u * (sg + silu * (1.f - sg));
                du[at] = dh * silu;
                hs[i] = weight * h;
                most[lower] = max_or_nan(most[lower], fabsf(sums[at]));
                most[2 + lower] = max_or_nan(most[2 + lower], fabsf(du[at]));
                if (i == 0) continue;
#ifdef WRITE_GRADS
                store_shared_word(g_at, zero ? 0 : pack_bf16(sums[at - 1], sums[at]));
                store_shared_word(g_at + MATRIX_BYTES, zero ? 0 : pack_bf16(du[at - 1], du[at]));
#endif
#ifdef WRITE_H
                store_shared_word(g_at + 2 * MATRIX_BYTES, zero ? 0 : pack_bf16(hs[0], hs[1]));
#endif
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_down_backward(
    const __grid_constant__ TensorMap dy,      // (1, P, H) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap w2t,     // (e, I, H) e4m3, W2 transposed; box (1, 128, 128)
    const __grid_constant__ TensorMap saved,   // (2, P, I) bf16 gate and up, box (1, 128, 64)
    const __grid_constant__ TensorMap dgu,     // (2, P, I) e4m3, box (1, 16, 128)
    const __grid_constant__ TensorMap dgu16,   // (2, P, I) bf16, box (1, 16, 64); unused without WRITE_GRADS;
                                               // with COLUMNS (2, I, P) e4m3, box (1, 8, 128)
    const __grid_constant__ TensorMap h16,     // (1, P, I) bf16, box (1, 16, 64); unused without WRITE_H;
                                               // with COLUMNS (1, I, P) e4m3, box (1, 8, 128)
    const float* scale_dy,                     // (⌈H/128⌉, P)
    const float* scale_w2t,                    // (e, ⌈I/128⌉, ⌈H/128⌉)
    float* scale_dgu,                          // (2, ⌈I/128⌉, P)
    const float* weight,                       // (P) top-k weight of each row
    float* dw,                                 // (column tiles, P), or 0
    const int* tile_expert, const int* num_tiles, int pool_rows, int columns, int k_blocks, int experts,
    const int* offs, const int* counts,        // of the experts' rows; these and what follows with COLUMNS only
    float* scale_columns,                      // (3, P / 128, column_scales), of dg, du, h'
    int column_scales) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Problem p{scale_dy, scale_w2t, tile_expert, num_tiles, pool_rows, columns, k_blocks, 1, experts,
                    0, BLOCK, nullptr};
    const Shared s = open_block(shared);
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS>();
        if (threadIdx.x == MATH_THREADS) {
            fill(p, s, dy, w2t, [&](const Tile& tile, Position& at) {
                for (int quarter = 0; quarter < QUARTERS; ++quarter) {
                    barrier_wait(s.empty(at.stage), at.round ^ 1);
                    const u32 full = s.full(at.stage), to = s.stage(at.stage);
                    barrier_expect(full, QUARTER_BYTES);
                    load_box(to, saved, full, tile.column + 64 * quarter, tile.row, 0);
                    load_box(to + MATRIX_BYTES, saved, full, tile.column + 64 * quarter, tile.row, 1);
                    at.advance();
                }
            });
        }
    } else {
        registers_up<MATH_REGISTERS>();
        const u32 lane = threadIdx.x % 32;
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Pieces pieces{s.staging(warp)};
        const u64 scale_block = pool_rows, scale_matrix = u64(p.column_blocks()) * pool_rows;
        Turns turns{p.tiles()};
        Position at;
        for (Tile tile; turns.next(s, at, tile);) {
            const int row = tile.row + warp * WARP_ROWS;
            Backward state{__ldg(weight + row + lane / 4), __ldg(weight + row + lane / 4 + 8), 0.f, 0.f, true,
                           true};
            if (WRITE_COLUMNS) {
                const int end = __ldg(offs + tile.expert) + __ldg(counts + tile.expert);
                state.upper_live = row + int(lane / 4) < end;
                state.lower_live = row + int(lane / 4) + 8 < end;
            }
            Sums sums;
            accumulate(p, s, at, sums);
            u32 unreleased = STAGES;  // the stage whose results the copy engine may still be reading

            // After the sums: a stage's bf16 results leave, and the stage before goes back to the producer.
            auto finish = [&](int column) {
                if (WRITE_COLUMNS) {
                    sync_threads<MATH_THREADS>();
                    const int mine = column + 8 * int(warp);  // this warp's 8 columns
#pragma unroll 1
                    for (int m = FIRST_MATRIX; m < (column < columns ? END_MATRIX : 0); ++m) {
                        const u64 block = (m * pool_rows + tile.row) / BLOCK;
                        const u32 piece = pieces.take();
                        quantize_unit(s.stage(at.stage) + m * MATRIX_BYTES, warp, piece,
                                      scale_columns + block * column_scales + mine);
                        send(m < 2 ? dgu16 : h16, piece, mine < columns, tile.row, mine, m & 1);
                    }
                    fence_async_proxy();
                    __syncwarp();
                    if (lane == 0) barrier_arrive(s.empty(at.stage));
                } else if (LATE_RELEASE) {
                    hand_to_copy_engine();
                    if (lane == 0) {
                        const u32 from = s.stage(at.stage) + warp * PIECE_BYTES;
                        if (column < columns) {
#ifdef WRITE_GRADS
                            store_box(dgu16, from, column, row, 0);
                            store_box(dgu16, from + MATRIX_BYTES, column, row, 1);
#endif
#ifdef WRITE_H
                            store_box(h16, from + 2 * MATRIX_BYTES, column, row, 0);
#endif
                        }
                        store_commit();
                        if (unreleased < STAGES) {
                            store_wait_read<1>();
                            barrier_arrive(s.empty(unreleased));
                        }
                    }
                    unreleased = at.stage;
                } else {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(s.empty(at.stage));
                }
                at.advance();
            };
            auto half_tile = [&](float (&half)[64], int block) {
                const int column = tile.column + block * BLOCK;
                float du[64];
                float most[4] = {0.f, 0.f, 0.f, 0.f};
                barrier_wait(s.full(at.stage), at.round);
                swiglu_backward<0>(half, du, state, s.stage(at.stage), warp, most);
                finish(column);
                barrier_wait(s.full(at.stage), at.round);
                swiglu_backward<1>(half, du, state, s.stage(at.stage), warp, most);
                finish(column + 64);
                if (column >= columns) return;
                float* scales = scale_dgu + (column / BLOCK) * scale_block + row;
                u32 piece = pieces.take();
                quantize(half, most[0], most[1], piece, scales);
                send(dgu, piece, true, column, row, 0);
                piece = pieces.take();
                quantize(du, most[2], most[3], piece, scales + scale_matrix);
                send(dgu, piece, true, column, row, 1);
            };
            half_tile(sums.left, 0);
            half_tile(sums.right, 1);
            if (LATE_RELEASE && lane == 0) {
                store_wait_read<0>();
                barrier_arrive(s.empty(unreleased));
            }
            if (dw != nullptr) {
                float* out = dw + u64(tile.column / p.tile_columns()) * pool_rows + row;
                const float upper = row_sum(state.upper_dw), lower = row_sum(state.lower_dw);
                if (lane % 4 == 0) {
                    out[lane / 4] = upper;
                    out[lane / 4 + 8] = lower;
                }
            }
        }
        if (lane == 0) store_wait_all();
    }
}
