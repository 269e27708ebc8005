// Gate and up projections with SwiGLU and the top-k weight.
//
//     g, u  = x·W1ᵀ, x·W3ᵀ                       fp32 sums, see bf16_gemm.cuh, ring.cuh for the roles
//     h'    = w · silu(g) · u                    bf16, from g and u as they are rounded to bf16
//     g, u  as bf16 too, where a backward follows (SAVE)
//
// A tile is 128 rows × 128 columns of I, gate and up side by side: a warp's pieces hold gate in the first two, up in
// the others. They leave from there; h' of the tile is computed from them under the products of the next one.
//
// With DISPATCH the rows of x are written here, ahead of the tiles, by the other three warps of the filling one's
// warpgroup: dispatch.cuh.

#ifdef DISPATCH
constexpr u32 UP_REGISTERS = MATH_REGISTERS - 16;  // the warps that dispatch need 72
#else
constexpr u32 UP_REGISTERS = MATH_REGISTERS;
#endif
constexpr int ITEMS = WARP_ROWS / ITEM_LINES * BLOCK / BOX_COLUMNS;

// What a warp does with its parked tile, item by item: gate and up leave, then h' is computed.
struct Activation {
    const TensorMap& gate_up;
    unsigned short* h;  // (P, I)
    int columns;        // I
    u32 pieces;
    int item = ITEMS;  // the next one; -1: gate and up have not left; ITEMS: nothing is parked, or all is done
    int row = 0, column = 0;
    float weight = 0.f;  // of row lane mod 16

    DEVICE void park(const Sums& sums, const Tile& tile, int first_row, float weight_of_lane) {
        ::park(sums, pieces);
        row = first_row, column = tile.column, weight = weight_of_lane, item = -1;
    }

    DEVICE void send() {
        hand_to_copy_engine();
#ifdef SAVE
        if (threadIdx.x % 32 != 0) return;
        send_parked(gate_up, pieces, columns, column, row, 0);
        send_parked(gate_up, pieces + 2 * PIECE_BYTES, columns, column, row, 1);
        store_commit();
#endif
    }

    DEVICE void next() {
        if (item == ITEMS) return;
        if (item < 0) {
            send();
            ++item;
            return;
        }
        const u32 lane = threadIdx.x % 32, half = item % 2, line = item / 2 * ITEM_LINES + lane / 8;
        const u32 at = pieces + half * PIECE_BYTES + parked_unit(line);
        const Words gs = load_shared_words(at), us = load_shared_words(at + 2 * PIECE_BYTES);
        const float w = __shfl_sync(~0u, weight, line);
        Words hs;
#pragma unroll
        for (int i = 0; i < 4; ++i) hs.at[i] = pack_bf16(value(low_bf16(gs.at[i]), low_bf16(us.at[i]), w),
                                                         value(high_bf16(gs.at[i]), high_bf16(us.at[i]), w));
        const int to = column + half * BOX_COLUMNS + lane % 8 * UNIT;
        if (to < columns) store_words(h + u64(row + line) * columns + to, hs);
        ++item;
    }

    static DEVICE float value(float g, float u, float w) { return g * sigmoid(g) * (u * w); }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) bf16_up(
    const __grid_constant__ TensorMap x,        // (1, P, H) bf16, box (1, 128, 64)
    const __grid_constant__ TensorMap w1,       // (e, I, H) bf16, box (1, 128, 64)
    const __grid_constant__ TensorMap w3,       // (e, I, H) bf16, box (1, 128, 64)
    const __grid_constant__ TensorMap gate_up,  // (2, P, I) bf16, box (1, 16, 64); unused without SAVE
    unsigned short* h,                          // (P, I) bf16
    const float* weight,                        // (P) top-k weight of each row
    const int* tile_expert, const int* num_tiles, int columns, int k_blocks
#ifdef DISPATCH
    ,
    const unsigned char* local, const unsigned char* remote, const long long* delta, unsigned char* pool,
    unsigned char* keep, const int* row_source, const int* slot_row, const int* recv_token, const int* recv_count,
    u32* progress, const int* state, int row_bytes, int dispatch_rows, int max_tokens, int top_k
#endif
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Problem p{tile_expert, num_tiles, columns, k_blocks, 1, 0};
    const Shared s = open_block(shared);
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS + 2 * (MATH_REGISTERS - UP_REGISTERS)>();
        const auto weights = [&](int) { return Pair{&w1, &w3}; };
#ifdef DISPATCH
        const bool given_up = state != nullptr && __ldg(state + 1) != 0;
        const Dispatch d{local,         remote,     nullptr,  nullptr,    delta,      pool,     nullptr,
                         keep,          row_source, slot_row, recv_token, recv_count, progress, given_up,
                         row_bytes,     0,          dispatch_rows, ROWS * __ldg(num_tiles), max_tokens, top_k};
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp == WARPS) {
            Written written{d};
            fill(p, s, x, weights, [&](const Tile& tile) { written.wait(tile); });
        } else {
            dispatch(d, warp - WARPS - 1);
        }
#else
        if (threadIdx.x == MATH_THREADS) fill(p, s, x, weights);
#endif
    } else {
        registers_up<UP_REGISTERS>();
        const u32 lane = threadIdx.x % 32;
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
        Activation activation{gate_up, h, columns, s.staging(warp)};
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
                    activation.next();
                });
            while (activation.item < ITEMS) activation.next();
            if (!more) break;
            activation.park(sums, tile, tile.row + warp * WARP_ROWS, weight_of_lane);
        }
        if (lane == 0) store_wait_all();
    }
}
