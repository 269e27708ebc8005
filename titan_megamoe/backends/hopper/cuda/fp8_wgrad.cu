// Weight gradients from e4m3 operands: dW[e] = Σ over the expert's tokens of a[:, token] ⊗ b[:, token].
//
//     dW[e, m, n] = Σ_t scale_a[t, m] · scale_b[t, n] · Σ_{tokens of block t} a[m, token] · b[n, token]
//
// over the blocks t of 128 pool rows that are the expert's; see ring.cuh for the roles. a and b lie with the tokens
// contiguous; their padding rows are 0. With two matrices in a there are two gradients (dW1 and dW3 from dg and du).
//
// Tiles of 128 rows × 256 columns of one gradient: columns fastest, then rows, gradients, experts, so that the blocks
// of one moment read the same tokens from L2. An expert without tokens gets zeros. Every tile is written.
//
// Other than in ring.cuh a warpgroup multiplies all 128 rows and 128 of the columns: `left` are rows 0 to 63 of the tile,
// `right` the others. A stage brings 128 + 256 scales along. Those of the columns differ in every register, so promotion
// costs two operations an element; a thread loads them once a stage and keeps them for both products. (With 64 rows
// and 256 columns it would load twice as many, 64 KB a stage, half of what the stage's operands take from shared memory.)

struct Weights {
    const float* scale_a;  // (gradients, blocks, a_scales)
    const float* scale_b;  // (blocks, b_scales)
    const int* offs;       // (e + 1) first pool row of each expert
    int blocks;            // of 128 pool rows
    int a_scales, b_scales;
    int rows, columns;     // M, N
    int gradients, experts;
};

struct WeightTile {
    int row, column, gradient, expert;
    int first, blocks;  // of the expert's tokens
};

struct WeightTiles {
    const Weights& p;
    int row_tiles, column_tiles, unit;

    DEVICE WeightTiles(const Weights& p)
        : p(p),
          row_tiles((p.rows + ROWS - 1) / ROWS),
          column_tiles((p.columns + 2 * BLOCK - 1) / (2 * BLOCK)),
          unit(blockIdx.x) {}

    DEVICE bool more() const { return unit < p.experts * p.gradients * row_tiles * column_tiles; }
    DEVICE void advance() { unit += gridDim.x; }

    DEVICE WeightTile tile() const {
        const int m = unit / column_tiles, matrix = m / row_tiles, expert = matrix / p.gradients;
        const int first = __ldg(p.offs + expert) / BLOCK, end = __ldg(p.offs + expert + 1) / BLOCK;
        return WeightTile{(m - matrix * row_tiles) * ROWS, (unit - m * column_tiles) * 2 * BLOCK,
                          matrix - expert * p.gradients, expert, first, end - first};
    }
};

DEVICE void promote_columns(float (&sums)[64], const float (&product)[64], float upper, float lower,
                            const float (&scale)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int at = 4 * (i / 2) + i % 2;
        sums[at] += upper * scale[i] * product[at];
        sums[at + 2] += lower * scale[i] * product[at + 2];
    }
}

// A full stage as a multiplying thread needs it: its operands, the scales of its four rows, where those of its
// columns are.
struct TokenStage {
    u64 a, b;
    float scale[4];
    u32 columns;

    DEVICE void open(const Shared& s, const Position& at, u32 group) {
        const u32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * WARP_ROWS + lane / 4;
        barrier_wait(s.full(at.stage), at.round);
        a = operand(s.stage(at.stage));
        b = operand(s.stage(at.stage) + (1 + group) * MATRIX_BYTES);
#pragma unroll
        for (int i = 0; i < 4; ++i) scale[i] = load_shared(s.scales(at.stage) + 4 * row + 32 * (i % 2) + 256 * (i / 2));
        columns = s.scales(at.stage) + (1 + group) * (SCALES_BYTES / 3) + 8 * (lane % 4);
    }
};

// The sums of a tile, for the 128 columns of this warpgroup: `left` has rows 0 to 63, `right` the others. Both need the
// scales of the same columns, which stay in registers from one product to the next.
DEVICE void accumulate_tokens(const Shared& s, int blocks, Position& at, Sums& sums) {
    const u32 lane = threadIdx.x % 32;
    const u32 group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    float product[64], scale[32];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums.left[i] = sums.right[i] = 0.f;

    TokenStage stage;
    if (blocks > 0) stage.open(s, at, group);
#pragma unroll 1
    for (int block = 1; block <= blocks; ++block) {
        multiply(product, stage.a, stage.b);
#pragma unroll
        for (int j = 0; j < 16; ++j) load_shared_pair(stage.columns + 32 * j, scale[2 * j], scale[2 * j + 1]);
        wgmma_wait();
        pin(product);
        promote_columns(sums.left, product, stage.scale[0], stage.scale[1], scale);

        multiply(product, stage.a + MATRIX_BYTES / 32, stage.b);
        const u32 used = s.empty(at.stage);
        const float upper = stage.scale[2], lower = stage.scale[3];
        at.advance();
        if (block < blocks) stage.open(s, at, group);
        wgmma_wait();
        pin(product);
        if (lane == 0) barrier_arrive(used);
        promote_columns(sums.right, product, upper, lower, scale);
    }
}

#ifdef FP32
// 32 columns (from column 32·QUARTER of the block) of values into a piece.
template <int QUARTER>
DEVICE void stage_fp32(const float (&values)[64], u32 piece) {
    const u32 lane = threadIdx.x % 32;
    const u32 to = piece + lane / 4 * 128 + ((lane / 4 ^ lane % 4 / 2) << 4) + lane % 2 * 8;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const int at = 4 * (4 * QUARTER + c);
        store_shared_pair(to ^ (c << 5), values[at], values[at + 1]);
        store_shared_pair((to ^ (c << 5)) + 1024, values[at + 2], values[at + 3]);
    }
}

template <int QUARTER>
DEVICE void send_quarter(const TensorMap& map, const float (&values)[64], Pieces& pieces, int columns, int x, int y,
                         int z) {
    const u32 piece = pieces.take();
    stage_fp32<QUARTER>(values, piece);
    send(map, piece, x + 32 * QUARTER < columns, x + 32 * QUARTER, y, z);
}

DEVICE void send_result(const TensorMap& map, const float (&values)[64], Pieces& pieces, int columns, int x, int y,
                        int z) {
    send_quarter<0>(map, values, pieces, columns, x, y, z);
    send_quarter<1>(map, values, pieces, columns, x, y, z);
    send_quarter<2>(map, values, pieces, columns, x, y, z);
    send_quarter<3>(map, values, pieces, columns, x, y, z);
}
#else
DEVICE void send_result(const TensorMap& map, const float (&values)[64], Pieces& pieces, int columns, int x, int y,
                        int z) {
    send_bf16(map, values, pieces, columns, x, y, z);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_wgrad(
    const __grid_constant__ TensorMap a,       // (gradients, M, P) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap b,       // (1, N, P) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap first,   // (e, M, N) bf16, box (1, 16, 64), or FP32, box (1, 16, 32)
    const __grid_constant__ TensorMap second,  // of the second gradient; unused with one
    const float* scale_a, const float* scale_b, const int* offs, int blocks, int a_scales, int b_scales, int rows,
    int columns, int gradients, int experts) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Weights p{scale_a, scale_b, offs, blocks, a_scales, b_scales, rows, columns, gradients, experts};
    const Shared s = open_block(shared);
    Position at;
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS>();
        if (threadIdx.x != MATH_THREADS) return;
        for (WeightTiles tiles(p); tiles.more(); tiles.advance()) {
            const WeightTile tile = tiles.tile();
#pragma unroll 1
            for (int block = tile.first; block < tile.first + tile.blocks; ++block) {
                barrier_wait(s.empty(at.stage), at.round ^ 1);
                const u32 full = s.full(at.stage), to = s.stage(at.stage), scales = s.scales(at.stage);
                barrier_expect(full, STAGE_BYTES + SCALES_BYTES);
                load_box(to, a, full, block * BLOCK, tile.row, tile.gradient);
                load_box(to + MATRIX_BYTES, b, full, block * BLOCK, tile.column, 0);
                load_box(to + 2 * MATRIX_BYTES, b, full, block * BLOCK, tile.column + BLOCK, 0);
                load_bytes(scales, p.scale_a + u64(tile.gradient * p.blocks + block) * p.a_scales + tile.row,
                           SCALES_BYTES / 3, full);
                load_bytes(scales + SCALES_BYTES / 3, p.scale_b + u64(block) * p.b_scales + tile.column,
                           SCALES_BYTES / 3 * 2, full);
                at.advance();
            }
        }
    } else {
        registers_up<MATH_REGISTERS>();
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Pieces pieces{s.staging(warp)};
        for (WeightTiles tiles(p); tiles.more(); tiles.advance()) {
            const WeightTile tile = tiles.tile();
            Sums sums;
            accumulate_tokens(s, tile.blocks, at, sums);
            const int row = tile.row + warp % 4 * WARP_ROWS, column = tile.column + warp / 4 * BLOCK;
            const TensorMap& out = tile.gradient ? second : first;
            // Rows past the last are not sent.
            send_result(out, sums.left, pieces, row < rows ? columns : 0, column, row, tile.expert);
            send_result(out, sums.right, pieces, row + 64 < rows ? columns : 0, column, row + 64, tile.expert);
        }
        if (threadIdx.x % 32 == 0) store_wait_all();
    }
}
