// The loop that every bf16 grouped GEMM here shares: rows of the pool times an expert's weight, summed in fp32 in
// the tensor cores. Roles, tiles and stages: ring.cuh.
//
//     acc[r, n] = Σ_segments Σ_k a[segment, r, k] · b[segment, expert, k, n]
//
// A stage holds K_STEP = 64 of the contraction. The weight lies in memory along K, as GEMM1 and GEMM2 read it, or
// along N (WEIGHT_ALONG_N), as dgrad1 and dgrad2 read the same parameters; then a column block is two boxes of 64
// columns.
//
// The products of a stage are started before those of the stage before are waited for, so the tensor cores always
// have work; a stage is released one stage late, and the ring has more than two.
//
// A tile's sums leave the registers as bf16, into the four pieces of the warp's staging area (`park`), and the next
// tile's products begin at once. All else is done under those products: the pieces are sent and the next tile's place
// is worked out in the first stage, what has to be computed from the pieces follows, one item (16 bytes of four rows a
// warp) in every stage. All of this stays inside a warp: whoever wrote a piece and whoever reads it are lanes of one
// warp, and the copy engine has read the pieces before they are written again. So nothing waits for anything but the
// ring, whose argument is in ring.cuh; an item comes between a stage's products and the wait for those of the stage
// before, and waits for nothing.

constexpr int K_STEP = 64;
constexpr int BOX_COLUMNS = 64;
constexpr u32 BOX_BYTES = K_STEP * 128;  // K_STEP × BOX_COLUMNS of a weight along N
constexpr bool SCALED = false;           // rows travel without scales (dispatch.cuh)
constexpr int UNIT = 8;                  // bf16 in 16 bytes
constexpr int ITEM_LINES = 4;            // rows of an item; 8 lanes have a row's 64 columns
static_assert(PIECES == 4, "a warp's tile is four pieces");
#ifdef WEIGHT_ALONG_N
constexpr bool ALONG_N = true;
#else
constexpr bool ALONG_N = false;
#endif

// The weights of a tile's two column blocks.
struct Pair {
    const TensorMap* left;
    const TensorMap* right;
};

// What a launch multiplies. Several segments of K are separate matrices whose products add up.
struct Problem {
    const int* tile_expert;  // (tiles)
    const int* num_tiles;    // (1)
    int columns;             // N
    int k_blocks;            // ⌈K / K_STEP⌉, of one segment
    int segments;
    int right_column;        // columns from the left block to the right one: 0 or BLOCK

    DEVICE Tiles tiles() const { return Tiles(tile_expert, num_tiles, columns, BLOCK + right_column); }
    DEVICE int stages() const { return segments * k_blocks; }
};

// Rows that were there before the launch.
struct AlwaysReady {
    DEVICE void operator()(const Tile&) const {}
};

// 128 columns of an expert's weight, from `column` on. Boxes of `map`: (1, 128, 64) along K, (1, 64, 64) along N.
DEVICE void load_block(u32 to, const TensorMap& map, u32 full, int k, int column, int expert) {
    if (ALONG_N) {
        load_box(to, map, full, column, k, expert);
        load_box(to + BOX_BYTES, map, full, column + BOX_COLUMNS, k, expert);
    } else {
        load_box(to, map, full, k, column, expert);
    }
}

// Fill the stages of all tiles of this block: the thread that begins warpgroup 2, or all of its warp, where `ready`
// needs that to wait for a tile's rows. `weights(segment)` gives the maps of the left and the right block.
template <typename Weights, typename Ready = AlwaysReady>
DEVICE void fill(const Problem& p, const Shared& s, const TensorMap& a, Weights weights, Ready ready = Ready()) {
    Position at;
    for (Tiles tiles = p.tiles(); tiles.more(); tiles.advance()) {
        const Tile tile = tiles.tile();
        ready(tile);
        if (threadIdx.x != MATH_THREADS) continue;
        for (int segment = 0; segment < p.segments; ++segment) {
            const Pair maps = weights(segment);
#pragma unroll 1
            for (int k = 0; k < p.k_blocks * K_STEP; k += K_STEP) {
                barrier_wait(s.empty(at.stage), at.round ^ 1);
                const u32 full = s.full(at.stage), to = s.stage(at.stage);
                barrier_expect(full, STAGE_BYTES);
                load_box(to, a, full, k, tile.row, segment);
                load_block(to + MATRIX_BYTES, *maps.left, full, k, tile.column, tile.expert);
                load_block(to + 2 * MATRIX_BYTES, *maps.right, full, k, tile.column + p.right_column, tile.expert);
                at.advance();
            }
        }
    }
}

// The sums of a tile, for the 64 rows of warpgroup `group`. `under(step)` is called in every stage, under its
// products.
template <typename Under>
DEVICE void accumulate(const Problem& p, const Shared& s, u32 group, Position& at, Sums& sums, Under under) {
    const bool releases = threadIdx.x % 32 == 0;
    u32 unreleased = STAGES;
#pragma unroll 1
    for (int step = 0; step < p.stages(); ++step) {
        barrier_wait(s.full(at.stage), at.round);
        const u32 stage = s.stage(at.stage);
        const u64 a = operand(stage + group * (MATRIX_BYTES / 2));
        const u64 b = ALONG_N ? operand_along_n(stage + MATRIX_BYTES, BOX_BYTES) : operand(stage + MATRIX_BYTES);
        pin(sums.left);
        pin(sums.right);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_STEP / 16; ++k)
            wgmma_m64n256k16<ALONG_N>(sums.left, sums.right, a + 2 * k, b + k * (ALONG_N ? 128 : 2), step | k);
        wgmma_commit();
        under(step);
        wgmma_wait<1>();
        if (releases && unreleased < STAGES) barrier_arrive(s.empty(unreleased));
        unreleased = at.stage;
        at.advance();
    }
    wgmma_wait();
    pin(sums.left);
    pin(sums.right);
    if (releases) barrier_arrive(s.empty(unreleased));
}

// --- epilogues --------------------------------------------------------------------------------------------

// 64 columns (from column 64·HALF of the block) of values as bf16 into a piece, by whole 8 × 8 blocks.
template <int HALF>
DEVICE void park_half(const float (&values)[64], u32 piece) {
    const u32 lane = threadIdx.x % 32;
    const u32 to = piece + lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
        const float* v = values + 4 * (8 * HALF + c);
        const u32 blocks[4] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                               pack_bf16(v[6], v[7])};
        store_matrices(to ^ (c << 4), blocks);
    }
}

// The warp's 16 rows × 256 columns as bf16 into its pieces: 64 columns each, left ones first. The copy engine has read
// them then. Other lanes may read them after a barrier of the warp, the copy engine after hand_to_copy_engine.
DEVICE void park(const Sums& sums, u32 pieces) {
    if (threadIdx.x % 32 == 0) store_wait_read<0>();
    __syncwarp();
    park_half<0>(sums.left, pieces);
    park_half<1>(sums.left, pieces + PIECE_BYTES);
    park_half<0>(sums.right, pieces + 2 * PIECE_BYTES);
    park_half<1>(sums.right, pieces + 3 * PIECE_BYTES);
}

// Two pieces leave for boxes of `map`, those that begin inside: 128 columns from x on. Lane 0.
DEVICE void send_parked(const TensorMap& map, u32 pieces, int columns, int x, int y, int z) {
    if (x < columns) store_box(map, pieces, x, y, z);
    if (x + BOX_COLUMNS < columns) store_box(map, pieces + PIECE_BYTES, x + BOX_COLUMNS, y, z);
}

// Where in a piece this lane's 16 bytes of an item are: row `line` of the warp, unit lane mod 8.
DEVICE u32 parked_unit(u32 line) { return line * 128 + ((threadIdx.x % 8 ^ line % 8) << 4); }
