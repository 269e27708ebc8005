// What all expert GEMMs here share: roles, tiles, the ring of stages, and the way of results to memory.
//
// Grid: one persistent block per SM that is not reserved. A tile is ROWS rows of the pool × two column blocks of
// 128 (`left`, `right`: gate and up of the same columns, or neighbours), column tiles fastest. Blocks claim tiles in
// order from a counter (CLAIMS, claims.cuh): a block whose SM is held by another kernel (a collective that waits for its peer
// holds 24 of them) comes late and takes fewer, where a share of its own would keep all others waiting. Without CLAIMS
// block p takes tiles p, p + G, …
//
// Roles (384 threads):
//   warpgroups 0, 1   multiply: 64 rows × (128 left + 128 right) each
//   warpgroup 2       one thread fills the ring of STAGES stages through the copy engine: 128 rows of a, 128 +
//                     128 rows (or columns) of the weight, 128 bytes of K each
//
// The filling thread claims, and each tile's first stage brings its Header for those that multiply. A last stage
// without operands says that there are no more.
//
// Synchronisation: stage s has barriers full[s] (1 arrival and the bytes) and empty[s] (8 arrivals, one a
// multiplying warp). Both sides walk the same sequence of stages (tiles, then segments and blocks of K, then
// what an epilogue loads), so the n-th fill of a stage waits for the n-1-th release, which waits for nothing
// but the n-1-th fill: by induction every wait ends. No block waits for another, but for rows that are on
// their way (dispatch.cuh).
//
// Padding rows of the pool: a row of a makes the same row of the result and nothing else, whatever it holds.
// Past K and N the copy engine reads zeros and writes nothing.
//
// cuda_kernels.py sets for each kernel: WARPGROUPS that multiply and COLUMN_BLOCKS of a tile (2 and 2, in fp8_wgrad 3
// and 1), STAGES of the ring, PIECES of results a warp can have on their way out, SCALES (fp32) that a stage brings
// along, with two words for the Header, MATH_REGISTERS of a multiplying thread, CLAIMS, HOST_THREADS and
// HOST_SHARED_BYTES.
//
// Letters: P pool rows, K contraction, N columns of one weight, e experts.

constexpr int ROWS = 64 * WARPGROUPS;
constexpr int BLOCK = 128;  // columns of a column block; K of a stage in bytes
constexpr int WARPS = 4 * WARPGROUPS;  // that multiply
constexpr int WARP_ROWS = 16;
constexpr int MATH_THREADS = 32 * WARPS;
constexpr int THREADS = MATH_THREADS + 128;

#ifdef GATHER  // gather.cuh
constexpr bool READERS_FENCE = true;
constexpr u32 FULL_ARRIVALS = 1 + 128;
#else
constexpr bool READERS_FENCE = false;
constexpr u32 FULL_ARRIVALS = 1;
#endif

constexpr u32 MATRIX_BYTES = ROWS * BLOCK;  // of a stage's rows
constexpr u32 COLUMNS_BYTES = BLOCK * BLOCK;  // of each of its column blocks
constexpr u32 STAGE_BYTES = MATRIX_BYTES + COLUMN_BLOCKS * COLUMNS_BYTES;
constexpr u32 SCALES_BYTES = SCALES * 4;
constexpr u32 HEADER_AT = SCALES_BYTES - 8;
constexpr u32 PIECE_BYTES = WARP_ROWS * 128;  // what one store_box takes: 16 rows of 128 bytes
constexpr u32 WARP_STAGING = PIECES * PIECE_BYTES;

constexpr u32 STAGING_AT = STAGES * STAGE_BYTES;
constexpr u32 SCALES_AT = STAGING_AT + WARPS * WARP_STAGING;
constexpr u32 FULL_AT = SCALES_AT + STAGES * SCALES_BYTES;
constexpr u32 EMPTY_AT = FULL_AT + STAGES * 8;
constexpr u32 SHARED_BYTES = EMPTY_AT + STAGES * 8;
static_assert(SHARED_BYTES <= 227 * 1024, "more shared memory than a block can have");
static_assert(SHARED_BYTES == HOST_SHARED_BYTES, "cuda_kernels.py gives every block so much");
static_assert(THREADS == HOST_THREADS, "cuda_kernels.py launches so many");

// 65,536 in all, in units of 8 a thread, the same for all threads at first.
constexpr u32 LOAD_REGISTERS = (WARPGROUPS + 1) * (65536 / THREADS / 8 * 8) - WARPGROUPS * MATH_REGISTERS;
constexpr float LOG2_E = 1.4426950408889634f;

struct Tile {
    int row, column, expert;
};

// All tiles of a launch.
struct Tiles {
    const int* tile_expert;
    const int* num_tiles;
    int column_tiles, tile_columns;

    DEVICE Tiles(const int* tile_expert, const int* num_tiles, int columns, int tile_columns)
        : tile_expert(tile_expert),
          num_tiles(num_tiles),
          column_tiles((columns + tile_columns - 1) / tile_columns),
          tile_columns(tile_columns) {}

    DEVICE u32 count() const { return __ldg(num_tiles) * column_tiles; }

    DEVICE Tile tile(int unit) const {
        const int m = unit / column_tiles;
        return Tile{m * ROWS, (unit - m * column_tiles) * tile_columns, __ldg(tile_expert + m)};
    }
};

struct Shared {
    u32 base;

    DEVICE u32 stage(u32 s) const { return base + s * STAGE_BYTES; }
    DEVICE u32 scales(u32 s) const { return base + SCALES_AT + s * SCALES_BYTES; }
    DEVICE u32 full(u32 s) const { return base + FULL_AT + s * 8; }
    DEVICE u32 empty(u32 s) const { return base + EMPTY_AT + s * 8; }
    DEVICE u32 staging(u32 warp) const { return base + STAGING_AT + warp * WARP_STAGING; }
};

// What a tile's first stage says of it: two words, of which the first is NO_TILE in the block's last stage.
constexpr u32 NO_TILE = ~0u;
struct Header {
    u32 first, second;
};

// Where one side of the ring stands: the stage, and the parity of its current round.
struct Position {
    u32 stage = 0, round = 0;

    DEVICE void advance() {
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        round ^= stage == 0;
    }
};

// The next tile's Header, when its first stage is there.
DEVICE Header await_header(const Shared& s, const Position& at) {
    barrier_wait(s.full(at.stage), at.round);
    const u32 header = s.scales(at.stage) + HEADER_AT;
    // Equal in all lanes, as the compiler learns from a reduction, which gives a uniform register.
    return Header{__reduce_or_sync(~0u, load_shared_word(header)), __reduce_or_sync(~0u, load_shared_word(header + 4))};
}

// A stage without operands: the end, or a tile for which there is nothing to multiply.
DEVICE void send_header(const Shared& s, Position& at, const Header& header) {
    barrier_wait(s.empty(at.stage), at.round ^ 1);
    store_shared_words(s.scales(at.stage) + HEADER_AT, header.first, header.second);
    barrier_arrive(s.full(at.stage));
    at.advance();
}

// Barriers of a new block; all threads. `shared` must be 1024-byte aligned.
DEVICE Shared open_block(void* shared) {
    const Shared s{shared_address(shared)};
    if (threadIdx.x == MATH_THREADS) {
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(s.full(i), FULL_ARRIVALS);
            barrier_init(s.empty(i), WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    return s;
}

// One multiplying thread's part of a tile: d[4j + 2i + c] of `left` and `right` is row `row + 8i` of the tile,
// column 8j + 2·(lane mod 4) + c of the column block.
struct Sums {
    float left[64], right[64];
};

// --- what the epilogues share -----------------------------------------------------------------------------

// Byte of a 16-row piece (rows of 128 bytes, 128-byte swizzle) where this thread's part of 16-byte unit 0 of its
// upper row begins. Unit c is at `^ (c << 4)`, the lower row at + 1024.
template <u32 BYTES>  // that a thread owns of a unit: 4 (two bf16) or 2 (two e4m3)
DEVICE u32 piece_offset(u32 lane) {
    return lane / 4 * 128 + (lane / 4 << 4) + lane % 4 * BYTES;
}

// The largest value of a row's column block: over the four threads that share the row.
DEVICE float row_max(float value) {
    value = max_or_nan(value, __shfl_xor_sync(~0u, value, 1));
    return max_or_nan(value, __shfl_xor_sync(~0u, value, 2));
}

DEVICE float row_sum(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

// 64 columns (from column 64·HALF of the block) of values as bf16 into a piece.
template <int HALF>
DEVICE void stage_bf16(const float (&values)[64], u32 piece) {
    const u32 to = piece + piece_offset<4>(threadIdx.x % 32);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const int j = 8 * HALF + c;
        store_shared_word(to ^ (c << 4), pack_bf16(values[4 * j], values[4 * j + 1]));
        store_shared_word((to ^ (c << 4)) + 1024, pack_bf16(values[4 * j + 2], values[4 * j + 3]));
    }
}

// Ordinary stores of this warp to its pieces precede what its lane 0 then stores with the copy engine.
DEVICE void hand_to_copy_engine() {
    fence_async_proxy();
    __syncwarp();
}

// A warp's ring of pieces, from which results leave. Every store from one is a bulk group of its own, so that the
// piece used PIECES stores ago may be written again when all but the newest PIECES - 1 groups have been read.
struct Pieces {
    u32 base, next = 0;

    // The next piece, free to be written by the whole warp.
    DEVICE u32 take() {
        if (threadIdx.x % 32 == 0) store_wait_read<PIECES - 1>();
        __syncwarp();
        const u32 piece = base + next * PIECE_BYTES;
        next = next == PIECES - 1 ? 0 : next + 1;
        return piece;
    }
};

// What the warp wrote to a piece leaves for a box of `map`, if it begins inside.
DEVICE void send(const TensorMap& map, u32 piece, bool inside, int x, int y, int z) {
    hand_to_copy_engine();
    if (threadIdx.x % 32 == 0) {
        if (inside) store_box(map, piece, x, y, z);
        store_commit();
    }
}

// 128 columns of values, from column x on, as bf16 to two boxes of `map`.
DEVICE void send_bf16(const TensorMap& map, const float (&values)[64], Pieces& pieces, int columns, int x, int y,
                      int z) {
    u32 piece = pieces.take();
    stage_bf16<0>(values, piece);
    send(map, piece, x < columns, x, y, z);
    piece = pieces.take();
    stage_bf16<1>(values, piece);
    send(map, piece, x + 64 < columns, x + 64, y, z);
}

// sigmoid(g) = 1 / (1 + 2^(-g·log2 e)); both steps within 2 ulp.
DEVICE float sigmoid(float g) { return reciprocal_approx(1.f + exp2_approx(-LOG2_E * g)); }
