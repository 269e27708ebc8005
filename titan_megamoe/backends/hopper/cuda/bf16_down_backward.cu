// The down projection's data gradient with the SwiGLU backward.
//
//     dh'    = dy·W2                             fp32 sums, rounded to bf16 on their way; see bf16_gemm.cuh
//     h      = silu(g)·u                         from the saved bf16 g, u
//     dw     = ⟨dh', h⟩                          one partial sum per row and column tile
//     dg, du = w·dh'·u·silu'(g), w·dh'·silu(g)   bf16
//     h'     = w·h                               bf16 (WRITE_H)
//
// A tile is 128 rows × 256 columns of I. All but dh' is computed under the products of the next tile: g and u of an
// item are loaded an item ahead, 16 bytes a lane, and results are stored as wide.
//
// With DISPATCH the rows of dy are written here, ahead of the tiles, by the other three warps of the filling one's
// warpgroup: dispatch.cuh.

#ifdef DISPATCH
constexpr u32 BACKWARD_REGISTERS = MATH_REGISTERS - 16;  // the warps that dispatch need 72
#else
constexpr u32 BACKWARD_REGISTERS = MATH_REGISTERS;
#endif
constexpr int QUARTERS = 2 * BLOCK / BOX_COLUMNS;
constexpr int ITEMS = WARP_ROWS / ITEM_LINES * QUARTERS;

// The SwiGLU backward of a warp's parked tile, item by item; the items of a row follow one another.
struct Backward {
    const unsigned short* gate;  // (P, I)
    const unsigned short* up;    // (P, I)
    unsigned short* dgate;       // (P, I)
    unsigned short* dup;         // (P, I)
    unsigned short* h;           // (P, I), or 0 without WRITE_H
    float* dw;                   // (column tiles, P), or 0
    int columns, pool_rows;      // I, P
    u32 pieces;
    int item = ITEMS;  // the next one; -1: no g and u is on its way; ITEMS: nothing is parked, or all is done
    int row = 0, column = 0;
    float weight = 0.f;  // of row lane mod 16
    float sum = 0.f;     // of dw, of the row so far
    Words gs, us;        // of the next item

    DEVICE u32 line() const { return item / QUARTERS * ITEM_LINES + threadIdx.x % 32 / 8; }
    DEVICE int first() const { return column + item % QUARTERS * BOX_COLUMNS + threadIdx.x % 8 * UNIT; }

    DEVICE void load() {
        if (item == ITEMS || first() >= columns) return;
        const u64 at = u64(row + line()) * columns + first();
        gs = load_words(gate + at);
        us = load_words(up + at);
    }

    DEVICE void park(const Sums& sums, const Tile& tile, int first_row, float weight_of_lane) {
        ::park(sums, pieces);
        row = first_row, column = tile.column, weight = weight_of_lane, item = -1;
    }

    DEVICE void next() {
        if (item == ITEMS) return;
        if (item < 0) {
            __syncwarp();  // all lanes have parked
            ++item;
            load();
            return;
        }
        const u32 lane = threadIdx.x % 32, line = this->line();
        const float w = __shfl_sync(~0u, weight, line);
        const int first = this->first();
        const Words g = gs, u = us;
        const Words dh = load_shared_words(pieces + item % QUARTERS * PIECE_BYTES + parked_unit(line));
        if (item % QUARTERS == 0) sum = 0.f;
        const bool last = item % QUARTERS == QUARTERS - 1;
        ++item;
        load();
        if (first < columns) {
            Words dgs, dus, hs;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const One low(low_bf16(g.at[i]), low_bf16(u.at[i]), low_bf16(dh.at[i]), w);
                const One high(high_bf16(g.at[i]), high_bf16(u.at[i]), high_bf16(dh.at[i]), w);
                sum += low.dw + high.dw;
                dgs.at[i] = pack_bf16(low.dg, high.dg);
                dus.at[i] = pack_bf16(low.du, high.du);
                hs.at[i] = pack_bf16(low.h, high.h);
            }
            const u64 at = u64(row + line) * columns + first;
            store_words(dgate + at, dgs);
            store_words(dup + at, dus);
#ifdef WRITE_H
            store_words(h + at, hs);
#endif
        }
        if (last && dw != nullptr) {
            float all = sum;
#pragma unroll
            for (int other = 1; other < 8; other *= 2) all += __shfl_xor_sync(~0u, all, other);
            if (lane % 8 == 0) dw[u64(column / (2 * BLOCK)) * pool_rows + row + line] = all;
        }
    }

    struct One {
        float dg, du, h, dw;

        DEVICE One(float g, float u, float dhw, float w) {
            const float sg = sigmoid(g), silu = g * sg, plain = silu * u, dh = dhw * w;
            dg = dh * u * (sg + silu * (1.f - sg));
            du = dh * silu;
            h = plain * w;
            dw = dhw * plain;
        }
    };
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) bf16_down_backward(
    const __grid_constant__ TensorMap dy,  // (1, P, H) bf16, box (1, 128, 64)
    const __grid_constant__ TensorMap w2,  // (e, H, I) bf16, box (1, 64, 64)
    const unsigned short* gate, const unsigned short* up,  // (P, I) bf16
    unsigned short* dgate, unsigned short* dup,            // (P, I) bf16
    unsigned short* h,                                     // (P, I) bf16; unused without WRITE_H
    const float* weight,                                   // (P) top-k weight of each row
    float* dw,                                             // (column tiles, P), or 0
    const int* tile_expert, const int* num_tiles, int columns, int k_blocks, int pool_rows
#ifdef DISPATCH
    ,
    const unsigned char* local, const unsigned char* remote, const long long* delta, unsigned char* pool,
    unsigned char* keep, const int* row_source, const int* slot_row, const int* recv_token, const int* recv_count,
    u32* progress, const int* state, int row_bytes, int dispatch_rows, int max_tokens, int top_k
#endif
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Problem p{tile_expert, num_tiles, columns, k_blocks, 1, BLOCK};
    const Shared s = open_block(shared);
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS + 2 * (MATH_REGISTERS - BACKWARD_REGISTERS)>();
        const auto weights = [&](int) { return Pair{&w2, &w2}; };
#ifdef DISPATCH
        const bool given_up = state != nullptr && __ldg(state + 1) != 0;
        const Dispatch d{local,         remote,     nullptr,  nullptr,    delta,      pool,     nullptr,
                         keep,          row_source, slot_row, recv_token, recv_count, progress, given_up,
                         row_bytes,     0,          dispatch_rows, ROWS * __ldg(num_tiles), max_tokens, top_k};
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp == WARPS) {
            Written written{d};
            fill(p, s, dy, weights, [&](const Tile& tile) { written.wait(tile); });
        } else {
            dispatch(d, warp - WARPS - 1);
        }
#else
        if (threadIdx.x == MATH_THREADS) fill(p, s, dy, weights);
#endif
    } else {
        registers_up<BACKWARD_REGISTERS>();
        const u32 lane = threadIdx.x % 32;
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
        Backward backward{gate, up, dgate, dup, h, dw, columns, pool_rows, s.staging(warp)};
        Position at;
        for (Tiles tiles = p.tiles();; tiles.advance()) {
            const bool more = tiles.more();
            Tile tile{0, 0, 0};
            float weight_of_lane = 0.f;
            Sums sums;
            if (more)
                accumulate(p, s, group, at, sums, [&](int step) {
                    if (step == 0) {
                        tile = tiles.tile();
                        weight_of_lane = __ldg(weight + tile.row + warp * WARP_ROWS + lane % 16);
                    }
                    backward.next();
                });
            while (backward.item < ITEMS) backward.next();
            if (!more) break;
            backward.park(sums, tile, tile.row + warp * WARP_ROWS, weight_of_lane);
        }
    }
}
