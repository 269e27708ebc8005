// The loop that every fp8 grouped GEMM here shares: e4m3 rows of the pool times an expert's e4m3 weight, with
// fp32 promotion after every 128 of the contraction.
//
//     acc[r, n] = Σ_b scale_a[b, r] · scale_b[expert, n / 128, b] · Σ_{k in block b} a[r, k] · b[expert, n, k]
//
// Grid: one persistent block per SM that is not reserved; block p takes tiles p, p + G, … of ROWS rows and two
// column blocks of 128 (`left`, `right`: gate and up of the same columns, or neighbours), column tiles fastest.
//
// Roles (384 threads):
//   warpgroups 0, 1   multiply: 64 rows × (128 left + 128 right) each, 128 running sums and 64 products a thread
//   warpgroup 2       one thread fills the ring of STAGES stages through the copy engine: 128 rows of a, 128 +
//                     128 rows of b, 128 bytes of K each, and the 128 scales of the rows
//
// Synchronisation: stage s has barriers full[s] (1 arrival and the bytes) and empty[s] (8 arrivals, one a
// multiplying warp). Both sides walk the same sequence of stages (tiles, then segments and blocks of K, then
// what an epilogue loads), so the n-th fill of a stage waits for the n-1-th release, which waits for nothing
// but the n-1-th fill: by induction every wait ends. No block waits for another block.
//
// Padding rows of the pool: a row of a makes the same row of the result and nothing else, whatever it holds.
// Past K and N the copy engine reads zeros and writes nothing.
//
// Letters: P pool rows, K contraction, N columns of one weight, e experts.

constexpr int ROWS = 128;
constexpr int BLOCK = 128;  // columns of one scale block; K of a stage in bytes
// Two ways to spend shared memory: a deeper ring, or room for all results of a tile.
#ifdef FOUR_STAGES
constexpr int STAGES = 4, PIECES = 2;
#else
constexpr int STAGES = 3, PIECES = 5;
#endif
constexpr int WARPS = 8;  // that multiply
constexpr int WARP_ROWS = 16;
constexpr int MATH_THREADS = 32 * WARPS;
constexpr int THREADS = MATH_THREADS + 128;

constexpr u32 MATRIX_BYTES = ROWS * BLOCK;  // 128 rows of 128 bytes
constexpr u32 STAGE_BYTES = 3 * MATRIX_BYTES;
constexpr u32 SCALES_BYTES = ROWS * 4;
constexpr u32 PIECE_BYTES = WARP_ROWS * 128;  // what one store_box takes: 16 rows of 128 bytes
constexpr u32 WARP_STAGING = PIECES * PIECE_BYTES;

constexpr u32 STAGING_AT = STAGES * STAGE_BYTES;
constexpr u32 SCALES_AT = STAGING_AT + WARPS * WARP_STAGING;
constexpr u32 FULL_AT = SCALES_AT + STAGES * SCALES_BYTES;
constexpr u32 EMPTY_AT = FULL_AT + STAGES * 8;
constexpr u32 SHARED_BYTES = EMPTY_AT + STAGES * 8;
static_assert(SHARED_BYTES <= 227 * 1024, "more shared memory than a block can have");
static_assert(SHARED_BYTES == (STAGES == 3 ? 230960 : 231488), "fp8_gemm.py gives every block so much");
static_assert(THREADS == 384, "fp8_gemm.py launches so many");

constexpr u32 MATH_REGISTERS = 232;
constexpr u32 LOAD_REGISTERS = 40;
constexpr float LOG2_E = 1.4426950408889634f;

// What a launch multiplies. Several segments of K are separate matrices whose products add up.
struct Problem {
    const float* scale_a;    // (segments, K blocks, P)
    const float* scale_b;    // (layers, N blocks, K blocks); a layer is one expert's matrix
    const int* tile_expert;  // (tiles)
    const int* num_tiles;    // (1)
    int pool_rows;           // P
    int columns;             // N
    int k_blocks;            // ⌈K / 128⌉, of one segment
    int segments;
    int experts;             // layers from one segment to the next
    int right_layer;         // layers from the left weight to the right one
    int right_column;        // columns from the left block to the right one: 0 or BLOCK

    DEVICE int column_blocks() const { return (columns + BLOCK - 1) / BLOCK; }
    DEVICE int tile_columns() const { return BLOCK + right_column; }
    DEVICE int column_tiles() const { return (columns + tile_columns() - 1) / tile_columns(); }
};

struct Tile {
    int row, column, expert;

    DEVICE Tile(const Problem& p, int index, int column_tiles) {
        const int m = index / column_tiles;
        row = m * ROWS;
        column = (index - m * column_tiles) * p.tile_columns();
        expert = __ldg(p.tile_expert + m);
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

// Where one side of the ring stands: the stage, and the parity of its current round.
struct Position {
    u32 stage = 0, round = 0;

    DEVICE void advance() {
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        round ^= stage == 0;
    }
};

// Barriers of a new block; all threads. `shared` must be 1024-byte aligned.
DEVICE Shared open_block(void* shared) {
    const Shared s{shared_address(shared)};
    if (threadIdx.x == MATH_THREADS) {
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(s.full(i), 1);
            barrier_init(s.empty(i), WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    return s;
}

// One thread: fill the stages of all tiles of this block. `more(tile, position)` fills what an epilogue loads.
template <typename More>
DEVICE void fill(const Problem& p, const Shared& s, const TensorMap& a, const TensorMap& b, More more) {
    const int column_tiles = p.column_tiles();
    const int total = __ldg(p.num_tiles) * column_tiles;
    Position at;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
        const Tile tile(p, index, column_tiles);
        for (int segment = 0; segment < p.segments; ++segment) {
            const int layer = tile.expert + segment * p.experts;
            const float* scales = p.scale_a + u64(segment * p.k_blocks) * p.pool_rows + tile.row;
            for (int block = 0; block < p.k_blocks; ++block) {
                barrier_wait(s.empty(at.stage), at.round ^ 1);
                const u32 full = s.full(at.stage), to = s.stage(at.stage);
                barrier_expect(full, STAGE_BYTES + SCALES_BYTES);
                load_box(to, a, full, block * BLOCK, tile.row, segment);
                load_box(to + MATRIX_BYTES, b, full, block * BLOCK, tile.column, layer);
                load_box(to + 2 * MATRIX_BYTES, b, full, block * BLOCK, tile.column + p.right_column,
                         layer + p.right_layer);
                load_bytes(s.scales(at.stage), scales + u64(block) * p.pool_rows, SCALES_BYTES, full);
                at.advance();
            }
        }
        more(tile, at);
    }
}

// One multiplying thread's part of a tile: d[4j + 2i + c] of `left` and `right` is row `row + 8i` of the tile,
// column 8j + 2·(lane mod 4) + c of the column block.
struct Sums {
    float left[64], right[64];
};

// The 64 rows of a warpgroup in one stage: where they lie, or, with A_REGISTERS, this thread's share of them: then
// shared memory is read once for left and right, 125 bytes a cycle at full rate and not 141.
struct Rows {
#ifdef A_REGISTERS
    u32 share[BLOCK / 32][4];

    DEVICE Rows(u32 matrix) {
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * WARP_ROWS + lane % 16;
#pragma unroll
        for (u32 k = 0; k < BLOCK / 32; ++k)
            load_matrices(share[k], matrix + row * 128 + (((2 * k + lane / 16) ^ (row & 7)) << 4));
    }
    DEVICE const u32 (&at(int k) const)[4] { return share[k]; }
#else
    u64 first;

    DEVICE Rows(u32 matrix)
        : first(operand(matrix + __shfl_sync(~0u, threadIdx.x / 128, 0) * (MATRIX_BYTES / 2))) {}
    DEVICE u64 at(int k) const { return first + 2 * k; }
#endif
};

// product (64 × 128) of one stage's rows `a` and column block `b`; complete after wgmma_wait.
DEVICE void multiply(float (&product)[64], const Rows& a, u64 b) {
    pin(product);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK / 32; ++k) wgmma_m64n128k32(product, a.at(k), b + 2 * k, k != 0);
    wgmma_commit();
    pin(product);
}

DEVICE void promote(float (&sums)[64], const float (&product)[64], float upper, float lower) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        sums[4 * j] += upper * product[4 * j];
        sums[4 * j + 1] += upper * product[4 * j + 1];
        sums[4 * j + 2] += lower * product[4 * j + 2];
        sums[4 * j + 3] += lower * product[4 * j + 3];
    }
}

// The sums of a tile, for the 64 rows of this warpgroup. While one warpgroup promotes, the other multiplies.
// The scales of a weight's row of blocks live in the lanes of a warp, 32 at a time.
DEVICE void accumulate(const Problem& p, const Shared& s, const Tile& tile, Position& at, Sums& sums) {
    const u32 lane = threadIdx.x % 32;
    const u32 row = threadIdx.x / 32 * WARP_ROWS + lane / 4;
    const int column_blocks = p.column_blocks();
    const int left_block = tile.column / BLOCK;
    // A right block past the last one multiplies zeros; its scale only has to be a readable one.
    const int right_block = min(left_block + p.right_column / BLOCK, column_blocks - 1);
    float product[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums.left[i] = sums.right[i] = 0.f;

    for (int segment = 0; segment < p.segments; ++segment) {
        const int layer = tile.expert + segment * p.experts;
        const float* left_scales = p.scale_b + u64(layer * column_blocks + left_block) * p.k_blocks;
        const float* right_scales =
            p.scale_b + u64((layer + p.right_layer) * column_blocks + right_block) * p.k_blocks;
        float left_of_lane = 0.f, right_of_lane = 0.f;
        for (int block = 0; block < p.k_blocks; ++block) {
            if (block % 32 == 0) {
                const int mine = min(block + int(lane), p.k_blocks - 1);
                left_of_lane = __ldg(left_scales + mine);
                right_of_lane = __ldg(right_scales + mine);
            }
            barrier_wait(s.full(at.stage), at.round);
            const u32 scales = s.scales(at.stage) + 4 * row;
            const float upper = load_shared(scales), lower = load_shared(scales + 32);
            const Rows a(s.stage(at.stage));
            const u64 b = operand(s.stage(at.stage) + MATRIX_BYTES);

            multiply(product, a, b);
            const float left = __shfl_sync(~0u, left_of_lane, block % 32);
            const float right = __shfl_sync(~0u, right_of_lane, block % 32);
            wgmma_wait();
            pin(product);
            promote(sums.left, product, upper * left, lower * left);

            multiply(product, a, b + MATRIX_BYTES / 16);
            wgmma_wait();
            pin(product);
            if (lane == 0) barrier_arrive(s.empty(at.stage));
            promote(sums.right, product, upper * right, lower * right);
            at.advance();
        }
    }
}

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

// 448 / max(amax, 1e-12) as precision/quantize.py defines it (there in fp64: rounding a quotient of floats to
// 53 and then to 24 bits is rounding it to 24 bits). A float that is at most 1e-12f is below 1e-12.
DEVICE float quantization_factor(float amax) { return amax <= 1e-12f ? 4.48e14f : __fdiv_rn(448.f, amax); }

DEVICE float reciprocal(float x) { return __fdiv_rn(1.f, x); }

// values (this thread's part of 16 rows × 128 columns) as e4m3 into a piece, and the scales of its rows.
DEVICE void quantize(const float (&values)[64], float upper_max, float lower_max, u32 piece, float* scales) {
    const u32 lane = threadIdx.x % 32;
    const float upper = quantization_factor(row_max(upper_max));
    const float lower = quantization_factor(row_max(lower_max));
    const u32 to = piece + piece_offset<2>(lane);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const u32 unit = (to ^ (j / 2 << 4)) + j % 2 * 8;
        store_shared_half(unit, pack_e4m3(values[4 * j] * upper, values[4 * j + 1] * upper));
        store_shared_half(unit + 1024, pack_e4m3(values[4 * j + 2] * lower, values[4 * j + 3] * lower));
    }
    if (lane % 4 == 0) {
        scales[lane / 4] = reciprocal(upper);
        scales[lane / 4 + 8] = reciprocal(lower);
    }
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
