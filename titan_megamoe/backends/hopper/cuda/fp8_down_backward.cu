// The down projection's data gradient with the SwiGLU backward and the quantization of dg and du.
//
//     dh'    = dy·W2                             fp32 sums, see ring.cuh for the roles
//     h      = silu(g)·u                         from the saved bf16 g, u
//     dw     = ⟨dh', h⟩                          one partial sum per row and column tile
//     dg, du = w·dh'·u·silu'(g), w·dh'·silu(g)   e4m3 with one scale per row and 128 columns of I
//     dg, du as bf16 too (WRITE_GRADS), h' = w·h as bf16 (WRITE_H): operands of bf16 weight gradients
//
// A tile is 128 rows × 256 columns of I. After its sums come four more stages of the ring, each with g and u of
// 64 columns (128 bytes a row). bf16 results take the place of what they were computed from, and are stored from
// there; such a stage is released when the copy engine has read it, one stage later, so that a warp seldom waits.
// Released late is still released before the warp waits for the stage after the next, and the ring has at least
// three: the producer can always fill the stage that a warp waits for.

constexpr int QUARTERS = 4;
constexpr u32 QUARTER_BYTES = 2 * MATRIX_BYTES;
#if defined(WRITE_GRADS) || defined(WRITE_H)
constexpr bool LATE_RELEASE = true;
#else
constexpr bool LATE_RELEASE = false;
#endif

struct Backward {
    float upper_weight, lower_weight;
    float upper_dw, lower_dw;
};

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
                store_shared_word(g_at, pack_bf16(sums[at - 1], sums[at]));
                store_shared_word(g_at + MATRIX_BYTES, pack_bf16(du[at - 1], du[at]));
#endif
#ifdef WRITE_H
                store_shared_word(g_at + 2 * MATRIX_BYTES, pack_bf16(hs[0], hs[1]));
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
    const __grid_constant__ TensorMap dgu16,   // (2, P, I) bf16, box (1, 16, 64); unused without WRITE_GRADS
    const __grid_constant__ TensorMap h16,     // (1, P, I) bf16, box (1, 16, 64); unused without WRITE_H
    const float* scale_dy,                     // (⌈H/128⌉, P)
    const float* scale_w2t,                    // (e, ⌈I/128⌉, ⌈H/128⌉)
    float* scale_dgu,                          // (2, ⌈I/128⌉, P)
    const float* weight,                       // (P) top-k weight of each row
    float* dw,                                 // (column tiles, P), or 0
    const int* tile_expert, const int* num_tiles, int pool_rows, int columns, int k_blocks, int experts) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Problem p{scale_dy, scale_w2t, tile_expert, num_tiles, pool_rows, columns, k_blocks, 1, experts,
                    0, BLOCK};
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
        Position at;
        for (Tiles tiles = p.tiles(); tiles.more(); tiles.advance()) {
            const Tile tile = tiles.tile();
            const int row = tile.row + warp * WARP_ROWS;
            Backward state{__ldg(weight + row + lane / 4), __ldg(weight + row + lane / 4 + 8), 0.f, 0.f};
            Sums sums;
            accumulate(p, s, tile, at, sums);
            u32 unreleased = STAGES;  // the stage whose results the copy engine may still be reading

            // After the sums: a stage's bf16 results leave, and the stage before goes back to the producer.
            auto finish = [&](int column) {
                if (LATE_RELEASE) {
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
