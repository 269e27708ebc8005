// Rows of GEMM1 gathered from tokens instead of read from a pool: all four warps of warpgroup 2 copy the 128 bytes
// of each row of a stage, and its scale, into the ring, by cp.async.
//
//     a[r] = data of row r's token,  scale of r = its scale of the block of K
//
// A call between ranks has two launches: PART_OWN takes the tiles of this rank's tokens only, PART_OTHERS all others,
// when the peers' tokens have come.
//
// Eight lanes have a row, so that a warp reads 4 × 128 contiguous bytes; a lane's rows are 4 apart. Padding rows
// are read as the tile's first row, which is a token's.
//
// A thread's copies arrive at the stage's full barrier by themselves, which so takes 129 arrivals: theirs, and that of
// the thread which loads the weights. Nobody here waits for a copy: whoever multiplies fences when it opens a stage, since
// wgmma reads through the asynchronous proxy. (A fence here, before an ordinary arrival, waits for all copies under way,
// those of later stages too: 15 to 20 % slower; docs/design_fp8.md.)

#ifdef GATHER
constexpr int GATHER_THREADS = 128;
constexpr int ROW_LANES = 8;  // of a row, 16 bytes each
constexpr int ROW_LOADS = ROWS * ROW_LANES / GATHER_THREADS;
static_assert(BLOCK == 16 * ROW_LANES, "a row of a stage");
static_assert(FULL_ARRIVALS == 1 + GATHER_THREADS, "of a stage");
static_assert(CLAIMS, "those that multiply learn each tile from its first stage");
static_assert(STAGES >= 2, "two headers tell these warps their tiles by turns");

constexpr int PART_ALL = 0, PART_OWN = 1, PART_OTHERS = 2;

struct Gathered {
    const unsigned char* local;   // (T, H) e4m3, this rank's tokens
    const unsigned char* copied;  // ((W - 1)·T_max, H), copies of the peers'
    const float* local_scale;     // (T, ⌈H/128⌉)
    const float* copied_scale;    // ((W - 1)·T_max, ⌈H/128⌉)
    const int* row_slot;          // (P): (source·T_max + t)·K + k; -1 pads
    const int* own_tiles;         // how many tiles have own tokens only
    const int* tile_order;        // all tiles, those first
    int part, hidden, blocks;     // blocks = ⌈H/128⌉
    Copies copies;

    // The tile rows of this launch, and which the n-th of them is.
    DEVICE u32 count(const int* num_tiles) const {
        const u32 all = __ldg(num_tiles);
        if (part == PART_ALL) return all;
        return part == PART_OWN ? __ldg(own_tiles) : all - __ldg(own_tiles);
    }
    DEVICE u32 nth(u32 n) const {
        if (part == PART_ALL) return n;
        return __ldg(tile_order + (part == PART_OWN ? 0 : __ldg(own_tiles)) + n);
    }

    DEVICE const unsigned char* data(int place) const {
        return (place >= 0 ? local : copied) + u64(row_of(place)) * u32(hidden);
    }
    DEVICE const float* scales(int place) const {
        return (place >= 0 ? local_scale : copied_scale) + u64(row_of(place)) * u32(blocks);
    }
};

// Warpgroup 2, all of it. A tile's rows are looked up while all stages are full, so that its first copies have
// nothing to wait for when one is free.
DEVICE void fill_gathering(const Problem& p, const Shared& s, const TensorMap& b, const Gathered& g) {
    const u32 thread = threadIdx.x - MATH_THREADS, lane = thread % 32, unit_of_row = lane % ROW_LANES;
    const u32 first_row = thread / 32 * 32 + lane / ROW_LANES;  // and every 4th from there
    const bool fills = thread == 0;
    const Claims claims{p.claims};
    const Tiles tiles = p.tiles();
    const u32 units = g.count(p.num_tiles) * tiles.column_tiles;
    Position at;
    u32 next = fills ? claims.next() : 0;
    // The next tile for these warps: the headers' second words of two stages, by turns, so that one is not written again
    // before all have read it. Nobody else writes or heeds them.
    u32 said = s.scales(0) + HEADER_AT + 4, said_next = s.scales(1) + HEADER_AT + 4;
    for (;;) {
        if (fills) {
            const u32 n = next / tiles.column_tiles;
            store_shared_word(said, next < units ? next + (g.nth(n) - n) * tiles.column_tiles : NO_TILE);
        }
        sync_threads<GATHER_THREADS>();
        const u32 unit = load_shared_word(said);
        if (unit == NO_TILE) break;
        const u32 swap = said;
        said = said_next, said_next = swap;
        if (fills) next = claims.next();  // its way lies under this tile
        const Tile tile = tiles.tile(unit);
        const int* slots = g.row_slot + tile.row;
        const int first = __ldg(slots), of_scale = __ldg(slots + thread);
        int slot[ROW_LOADS];  // all on their way before any is looked at
#pragma unroll
        for (int i = 0; i < ROW_LOADS; ++i) slot[i] = __ldg(slots + first_row + 4 * i);
        const unsigned char* from[ROW_LOADS];
#pragma unroll
        for (int i = 0; i < ROW_LOADS; ++i)
            from[i] = g.data(g.copies.place(slot[i] < 0 ? first : slot[i])) + 16 * unit_of_row;
        const float* scale_from = g.scales(g.copies.place(of_scale < 0 ? first : of_scale));
        const float* left_scales = p.weight_scales(tile.expert, tile.column);
        const float* right_scales = p.weight_scales(tile.expert + p.right_layer, tile.column);
        float left = __ldg(left_scales), right = __ldg(right_scales);
#pragma unroll 1
        for (int block = 0; block < p.k_blocks; ++block) {
            barrier_wait(s.empty(at.stage), at.round ^ 1);
            const u32 full = s.full(at.stage), to = s.stage(at.stage), scales = s.scales(at.stage);
            const u32 bytes = block * BLOCK + 16 * int(unit_of_row) < g.hidden ? 16 : 0;
#pragma unroll
            for (int i = 0; i < ROW_LOADS; ++i) {
                const u32 row = first_row + 4 * i;
                copy_16(to + row * BLOCK + ((unit_of_row ^ row % 8) << 4), bytes ? from[i] + block * BLOCK : from[i],
                        bytes);
            }
            copy_4(scales + 4 * thread, scale_from + block);
            copies_arrive(full);
            if (fills) {
                load_box(to + MATRIX_BYTES, b, full, block * BLOCK, tile.column, tile.expert);
                load_box(to + 2 * MATRIX_BYTES, b, full, block * BLOCK, tile.column, tile.expert + p.right_layer);
                store_shared_pair(scales + WEIGHT_SCALES_AT, left, right);
                store_shared_word(scales + HEADER_AT, unit);
                barrier_expect(full, COLUMN_BLOCKS * COLUMNS_BYTES);
                const int later = min(block + 1, p.k_blocks - 1);
                left = __ldg(left_scales + later), right = __ldg(right_scales + later);
            }
            at.advance();
        }
    }
    barrier_wait(s.empty(at.stage), at.round ^ 1);
    if (fills) {
        claims.done();
        store_shared_word(s.scales(at.stage) + HEADER_AT, NO_TILE);
        barrier_arrive(s.full(at.stage));
    }
    barrier_arrive(s.full(at.stage));
}
#endif
