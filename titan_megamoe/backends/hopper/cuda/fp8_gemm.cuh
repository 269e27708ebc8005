// The loop that every fp8 grouped GEMM here shares: e4m3 rows of the pool times an expert's e4m3 weight, with
// fp32 promotion after every 128 of the contraction. Roles, tiles and synchronisation: ring.cuh.
//
//     acc[r, n] = Σ_b scale_a[b, r] · scale_b[expert, n / 128, b] · Σ_{k in block b} a[r, k] · b[expert, n, k]
//
// A multiplying thread has 128 running sums and 64 products. A stage also holds the scales of its 128 rows and of its
// two weight blocks, so that between products nothing comes from farther away than shared memory.

constexpr u32 ROW_SCALES_BYTES = ROWS * 4;
constexpr u32 WEIGHT_SCALES_AT = HEADER_AT - 8;  // of the two weight blocks

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
    u32* claims;             // (2), see claims.cuh

    DEVICE int column_blocks() const { return (columns + BLOCK - 1) / BLOCK; }
    DEVICE int tile_columns() const { return BLOCK + right_column; }
    // Of one row of blocks along K. A column block past the last one multiplies zeros: its scale only has to be one.
    DEVICE const float* weight_scales(int layer, int column) const {
        return scale_b + u64(layer * column_blocks() + min(column / BLOCK, column_blocks() - 1)) * k_blocks;
    }
    DEVICE Tiles tiles() const { return Tiles(tile_expert, num_tiles, columns, tile_columns()); }
};

// The tiles of this block for those that multiply, one after the other.
struct Turns {
    const Tiles tiles;
    u32 unit = blockIdx.x - gridDim.x;

    // False: there are no more.
    DEVICE bool next(const Shared& s, const Position& at, Tile& tile) {
        unit = CLAIMS ? await_header(s, at).first : unit + gridDim.x;
        // By a vote, so that the compiler knows warps stay together and keeps descriptors in uniform registers.
        if (CLAIMS ? __any_sync(~0u, unit == NO_TILE) : unit >= tiles.count()) return false;
        tile = tiles.tile(unit);
        return true;
    }
};

// Rows that were there before the launch: one thread fills.
struct AlwaysReady {
    DEVICE u32 same(u32 unit) const { return unit; }
    DEVICE void wait(const Tile&) {}
};

// Claim tiles and fill their stages: the thread that begins warpgroup 2, or all of its warp, where `ready` needs that
// to wait for a tile's rows. `more(tile, position)` fills what an epilogue loads.
template <typename More, typename Ready = AlwaysReady>
DEVICE void fill(const Problem& p, const Shared& s, const TensorMap& a, const TensorMap& b, More more,
                 Ready ready = Ready()) {
    const bool fills = threadIdx.x == MATH_THREADS;
    const Claims claims{p.claims};
    const Tiles tiles = p.tiles();
    Position at;
    u32 unit = blockIdx.x - gridDim.x, next = CLAIMS && fills ? claims.next() : 0;
    for (;;) {
        unit = CLAIMS ? ready.same(next) : unit + gridDim.x;
        if (unit >= tiles.count()) break;
        if (CLAIMS && fills) next = claims.next();  // its way lies under this tile
        const Tile tile = tiles.tile(unit);
        ready.wait(tile);
        if (!fills) continue;
        for (int segment = 0; segment < p.segments; ++segment) {
            const int layer = tile.expert + segment * p.experts;
            const float* left_scales = p.weight_scales(layer, tile.column);
            const float* right_scales = p.weight_scales(layer + p.right_layer, tile.column + p.right_column);
            float left = __ldg(left_scales), right = __ldg(right_scales);
#pragma unroll 1
            for (int block = 0; block < p.k_blocks; ++block) {
                barrier_wait(s.empty(at.stage), at.round ^ 1);
                const u32 full = s.full(at.stage), to = s.stage(at.stage), scales = s.scales(at.stage);
                load_box(to, a, full, block * BLOCK, tile.row, segment);
                load_box(to + MATRIX_BYTES, b, full, block * BLOCK, tile.column, layer);
                load_box(to + 2 * MATRIX_BYTES, b, full, block * BLOCK, tile.column + p.right_column,
                         layer + p.right_layer);
                const u64 row_of_blocks = segment * p.k_blocks + block;
                load_bytes(scales, p.scale_a + row_of_blocks * p.pool_rows + tile.row, ROW_SCALES_BYTES, full);
                store_shared_words(scales + WEIGHT_SCALES_AT, Words{{__float_as_uint(left), __float_as_uint(right),
                                                                      unit, 0}});
                barrier_expect(full, STAGE_BYTES + ROW_SCALES_BYTES);
                const int next = min(block + 1, p.k_blocks - 1);
                left = __ldg(left_scales + next), right = __ldg(right_scales + next);
                at.advance();
            }
        }
        more(tile, at);
    }
    if (!CLAIMS || !fills) return;
    claims.done();
    send_header(s, at, Header{NO_TILE, 0});
}

// product (64 × 128) of one stage's rows `a` and column block `b`; complete after wgmma_wait.
DEVICE void multiply(float (&product)[64], u64 a, u64 b) {
    pin(product);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK / 32; ++k) wgmma_m64n128k32(product, a + 2 * k, b + 2 * k, k != 0);
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

// A full stage as a multiplying thread needs it: its operands, and the scales of the thread's two rows.
struct Stage {
    u64 a, b;
    float upper, lower;

    DEVICE void open(const Shared& s, const Position& at, u32 group, u32 row) {
        barrier_wait(s.full(at.stage), at.round);
        if (READERS_FENCE) fence_async_proxy_of(s.stage(at.stage), MATRIX_BYTES);
        a = operand(s.stage(at.stage) + group * (MATRIX_BYTES / WARPGROUPS));
        b = operand(s.stage(at.stage) + MATRIX_BYTES);
        upper = load_shared(s.scales(at.stage) + 4 * row);
        lower = load_shared(s.scales(at.stage) + 4 * row + 32);
    }
};

// The sums of a tile, for the 64 rows of this warpgroup. While one warpgroup promotes, the other multiplies: the
// shorter the way from a product's end to the next one's start, the surer. So the next stage is opened under the
// products of this one.
DEVICE void accumulate(const Problem& p, const Shared& s, Position& at, Sums& sums) {
    const u32 lane = threadIdx.x % 32;
    const u32 row = threadIdx.x / 32 * WARP_ROWS + lane / 4;
    const u32 group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    float product[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums.left[i] = sums.right[i] = 0.f;

    Stage stage;
    stage.open(s, at, group, row);
#pragma unroll 1
    for (int stages = p.segments * p.k_blocks; stages > 0; --stages) {
        float left, right;
        multiply(product, stage.a, stage.b);
        load_shared_pair(s.scales(at.stage) + WEIGHT_SCALES_AT, left, right);
        const float upper = stage.upper * right, lower = stage.lower * right;
        wgmma_wait();
        pin(product);
        promote(sums.left, product, stage.upper * left, stage.lower * left);

        multiply(product, stage.a, stage.b + MATRIX_BYTES / 16);
        const u32 used = s.empty(at.stage);
        at.advance();
        if (stages > 1) stage.open(s, at, group, row);
        wgmma_wait();
        pin(product);
        if (lane == 0) barrier_arrive(used);
        promote(sums.right, product, upper, lower);
    }
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
