// Weight gradients from e4m3 operands: dW[e] = Σ over the expert's tokens of a[:, token] ⊗ b[:, token].
//
//     dW[e, m, n] = Σ_t scale_a[t, m] · scale_b[t, n] · Σ_{tokens of block t} a[m, token] · b[n, token]
//
// over the blocks t of 128 pool rows that are the expert's; see ring.cuh for the roles. a and b lie with the tokens
// contiguous; their padding rows are 0. With two matrices in a there are two gradients (dW1 and dW3 from dg and du).
//
// Tiles of 192 rows × 128 columns of one gradient: columns fastest, then rows, gradients, experts, so that the blocks
// of one moment read the same tokens from L2. An expert without tokens gets zeros. Every tile is written. Its Header:
// its number, and how many blocks of 128 pool rows the expert has.
//
// A stage brings the scales of its rows and columns along. Those of the columns differ in every register, so promotion
// costs two operations an element; they come from shared memory eight columns at a time. Two of the three warpgroups
// can multiply while one promotes.

struct Weights {
    const float* scale_a;  // (gradients, blocks, a_scales)
    const float* scale_b;  // (blocks, b_scales)
    const int* offs;       // (e + 1) first pool row of each expert
    int blocks;            // of 128 pool rows
    int a_scales, b_scales;
    int rows, columns;     // M, N
    int gradients, experts;
};

static_assert(COLUMN_BLOCKS == 1, "of a tile");
static_assert(SCALES == ROWS + BLOCK + 4, "a scale for every row and column, and the Header");

struct WeightTile {
    int row, column, gradient, expert;
};

struct WeightTiles {
    const Weights& p;
    int row_tiles, column_tiles;

    DEVICE WeightTiles(const Weights& p)
        : p(p),
          row_tiles((p.rows + ROWS - 1) / ROWS),
          column_tiles((p.columns + BLOCK - 1) / BLOCK) {}

    DEVICE u32 count() const { return p.experts * p.gradients * row_tiles * column_tiles; }

    DEVICE WeightTile tile(int unit) const {
        const int m = unit / column_tiles, matrix = m / row_tiles, expert = matrix / p.gradients;
        return WeightTile{(m - matrix * row_tiles) * ROWS, (unit - m * column_tiles) * BLOCK,
                          matrix - expert * p.gradients, expert};
    }
};

// Columns [8·FROM, 8·FROM + 64) of a column block. `scales`: of this thread's first column.
template <int FROM>
DEVICE void promote_columns(float (&sums)[64], const float (&product)[64], float upper, float lower,
                            const float (&scale)[16]) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int at = 4 * (FROM + j) + c;
            sums[at] += upper * scale[2 * j + c] * product[at];
            sums[at + 2] += lower * scale[2 * j + c] * product[at + 2];
        }
}

template <int FROM>
DEVICE void load_scales(float (&scale)[16], u32 scales) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
        load_shared_pair(scales + 32 * (FROM + j), scale[2 * j], scale[2 * j + 1]);
}

// The sums of a tile.
DEVICE void accumulate_tokens(const Shared& s, int blocks, Position& at, float (&sums)[64]) {
    const u32 lane = threadIdx.x % 32;
    const u32 row = threadIdx.x / 32 * WARP_ROWS + lane / 4;
    const u32 group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    float product[64], scale[16];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = 0.f;

    Stage stage;
    if (blocks > 0) {
        stage.open(s, at, group, row);
    } else {  // the stage brought the Header only
        __syncwarp();
        if (lane == 0) barrier_arrive(s.empty(at.stage));
        at.advance();
    }
#pragma unroll 1
    for (int block = 1; block <= blocks; ++block) {
        const float upper = stage.upper, lower = stage.lower;
        const u32 scales = s.scales(at.stage) + ROW_SCALES_BYTES + 8 * (lane % 4);

        multiply(product, stage.a, stage.b);
        const u32 used = s.empty(at.stage);
        at.advance();
        if (block < blocks) stage.open(s, at, group, row);
        wgmma_wait();
        pin(product);
        load_scales<0>(scale, scales);
        promote_columns<0>(sums, product, upper, lower, scale);
        load_scales<8>(scale, scales);
        __syncwarp();  // every lane has read its scales
        if (lane == 0) barrier_arrive(used);
        promote_columns<8>(sums, product, upper, lower, scale);
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
    const __grid_constant__ TensorMap a,       // (gradients, M, P) e4m3, box (1, ROWS, 128)
    const __grid_constant__ TensorMap b,       // (1, N, P) e4m3, box (1, 128, 128)
    const __grid_constant__ TensorMap first,   // (e, M, N) bf16, box (1, 16, 64), or FP32, box (1, 16, 32)
    const __grid_constant__ TensorMap second,  // of the second gradient; unused with one
    const float* scale_a, const float* scale_b, const int* offs, int blocks, int a_scales, int b_scales, int rows,
    int columns, int gradients, int experts, u32* words) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Weights p{scale_a, scale_b, offs, blocks, a_scales, b_scales, rows, columns, gradients, experts};
    const Shared s = open_block(shared);
    const WeightTiles tiles(p);
    Position at;
    if (threadIdx.x >= MATH_THREADS) {
        registers_down<LOAD_REGISTERS>();
        if (threadIdx.x != MATH_THREADS) return;
        const Claims claims{words};
        u32 next = claims.next();
        for (;;) {
            const u32 unit = next;
            if (unit >= tiles.count()) break;
            next = claims.next();  // its way lies under this tile
            const WeightTile tile = tiles.tile(unit);
            const int first = __ldg(p.offs + tile.expert) / BLOCK, end = __ldg(p.offs + tile.expert + 1) / BLOCK;
            const Header header{unit, u32(end - first)};
            if (first == end) send_header(s, at, header);
#pragma unroll 1
            for (int block = first; block < end; ++block) {
                barrier_wait(s.empty(at.stage), at.round ^ 1);
                const u32 full = s.full(at.stage), to = s.stage(at.stage), scales = s.scales(at.stage);
                store_shared_words(scales + HEADER_AT, header.first, header.second);
                barrier_expect(full, STAGE_BYTES + ROW_SCALES_BYTES + BLOCK * 4);
                load_box(to, a, full, block * BLOCK, tile.row, tile.gradient);
                load_box(to + MATRIX_BYTES, b, full, block * BLOCK, tile.column, 0);
                load_bytes(scales, p.scale_a + u64(tile.gradient * p.blocks + block) * p.a_scales + tile.row,
                           ROW_SCALES_BYTES, full);
                load_bytes(scales + ROW_SCALES_BYTES, p.scale_b + u64(block) * p.b_scales + tile.column,
                           BLOCK * 4, full);
                at.advance();
            }
        }
        claims.done();
        send_header(s, at, Header{NO_TILE, 0});
    } else {
        registers_up<MATH_REGISTERS>();
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Pieces pieces{s.staging(warp)};
        for (;;) {
            const Header header = await_header(s, at);
            if (header.first == NO_TILE) break;
            const WeightTile tile = tiles.tile(header.first);
            float sums[64];
            accumulate_tokens(s, header.second, at, sums);
            const int row = tile.row + warp * WARP_ROWS;
            const int inside = row < rows ? columns : 0;  // rows past the last are not sent
            const TensorMap& out = tile.gradient ? second : first;
            send_result(out, sums, pieces, inside, tile.column, row, tile.expert);
        }
        if (threadIdx.x % 32 == 0) store_wait_all();
    }
}
