// Dispatch under the products of GEMM1: the warps of warpgroup 2 that do not fill the ring write the pool's rows,
// ahead of the tiles that multiply them.
//
//     pool[r], pool_scale[:, r] = data and scales of row r's token, as its owner quantized them
//
// Work comes in items of two kinds, claimed in order through one counter each:
//   tokens   ITEM_TOKENS received tokens, in the order of the receive buffer (the lowest local expert that needs a
//            token first). A token is read once, from its owner's symmetric buffer, and written to the rows of all
//            its slots here. Then the word of its group of GROUP_TOKENS tokens grows by the tokens of the item.
//   rows     ITEM_ROWS rows of the pool, in its order. Those of this rank's own tokens are gathered. Then the item's
//            word becomes 1 + the number of received tokens, from the first on, that hold all its other rows.
// Two warps begin with tokens and one with rows; each goes on with the other kind.
//
// Before its first load for a tile, the filling warp acquires the words of the tile's rows, and those of all groups
// of tokens that these name. Rows were written through the generic proxy and are read through the asynchronous one:
// the writer fences before its release, the reader after its acquire.
//
// No deadlock, whatever is resident: a warp that has claimed an item waits for nothing, so it finishes, and the
// item that it claimed ahead too. A filling warp waits for such items, and for items that are not claimed yet, which
// its block's own three warps claim if nobody else does: they stop only when a counter has passed the last item. No
// peer is waited for: all have published their tokens before this launch.
//
// The words decide when a row is read, never what it holds: the same bits whoever wrote it. Padding rows are not
// written. A call that was given up has no tiles and no tokens, and so no items.

constexpr int ITEM_TOKENS = 4;
constexpr int ITEM_ROWS = 8;
constexpr int GROUP_TOKENS = 64;
constexpr int PART = 2048;  // bytes of a row that a warp moves at once, and of a second row beside it
constexpr int PART_LOADS = PART / (32 * 16);
constexpr int PART_BLOCKS = PART / BLOCK;
constexpr u32 POLL_NS = 64;
static_assert(2 * PART_BLOCKS == 32, "a lane moves one scale of a part");

struct Dispatch {
    const unsigned char* local;   // (T, H) e4m3, this rank's tokens
    const unsigned char* remote;  // (T_max, H), this rank's symmetric buffer: rank r's is delta[r] bytes away
    const float* local_scale;     // (T, ⌈H/128⌉)
    const float* remote_scale;    // (T_max, ⌈H/128⌉), symmetric
    const long long* delta;       // (W)
    unsigned char* pool;          // (P, H)
    float* pool_scale;            // (⌈H/128⌉, P)
    const int* row_source;        // (P), slot_row, recv_token, recv_count: see RoutingPlan
    const int* slot_row;
    const int* recv_token;
    const int* recv_count;
    u32* progress;  // counters of rows and of tokens, then from WORDS_AT on words of rows, then of groups; 0 at first
    int hidden, blocks, pool_rows, used_rows, max_tokens, top_k;

    static constexpr u32 TOKENS_AT = 32, WORDS_AT = 64;

    DEVICE u32* rows_word(u32 item) const { return progress + WORDS_AT + item; }
    DEVICE u32* group_word(u32 group) const { return progress + WORDS_AT + pool_rows / ITEM_ROWS + group; }
    DEVICE u32 tokens() const { return __ldg(recv_count); }
};

DEVICE u32 lane_id() { return threadIdx.x % 32; }

// Where a token's row and its scales are.
struct Source {
    const unsigned char* data;
    const float* scale;
};

// PART bytes of two rows and their scales, in a warp's registers. The lower half of the lanes has scales of the
// first row, the upper half of the second.
struct Part {
    Words words[2][PART_LOADS];
    float scale;
    int byte, block;  // where this lane begins

    DEVICE Part(int part)
        : byte(part * PART + lane_id() * 16), block(part * PART_BLOCKS + lane_id() % PART_BLOCKS) {}

    // Lanes past the end load what is there: a value under a condition would keep its registers all the time.
    DEVICE void load(const Dispatch& d, const Source& first, const Source& second) {
        scale = load_float((lane_id() < PART_BLOCKS ? first.scale : second.scale) + min(block, d.blocks - 1));
#pragma unroll
        for (int i = 0; i < PART_LOADS; ++i) {
            const int at = min(byte + i * 512, d.hidden - 16);
            words[0][i] = load_words(first.data + at);
            words[1][i] = load_words(second.data + at);
        }
    }

    template <int WHICH>
    DEVICE void store(const Dispatch& d, int row) const {
        if (lane_id() / PART_BLOCKS == WHICH && block < d.blocks)
            store_float(d.pool_scale + u64(block) * d.pool_rows + row, scale);
        unsigned char* const to = d.pool + u64(row) * d.hidden + byte;
#pragma unroll
        for (int i = 0; i < PART_LOADS; ++i)
            if (i * 512 < d.hidden - byte) store_words(to + i * 512, words[WHICH][i]);
    }

    // To the row of every lane that has one, of which there is at least one: a loop that might not run would
    // let the compiler put loads into it, behind the wait for the rows.
    template <int WHICH>
    DEVICE void store_all(const Dispatch& d, int row_of_lane) const {
        u32 left = __ballot_sync(~0u, row_of_lane >= 0);
        do {
            store<WHICH>(d, __shfl_sync(~0u, row_of_lane, __ffs(left) - 1));
            left &= left - 1;
        } while (left != 0);
    }
};

// What the warp stored is there for whoever acquires `word`.
DEVICE void finished(u32* word, u32 value) {
    fence_async_proxy_global();
    __syncwarp();
    if (lane_id() == 0) add_release(word, value);
}

// A received token: which it is, and the way to its owner.
struct Token {
    int flat;  // source · T_max + t
    long long away;

    DEVICE Token of_lane(int lane) const {
        return Token{__shfl_sync(~0u, flat, lane), __shfl_sync(~0u, away, lane)};
    }
    DEVICE Source source(const Dispatch& d) const {
        const u64 token = flat % d.max_tokens;
        return Source{d.remote + away + token * d.hidden, d.remote_scale + away / 4 + token * d.blocks};
    }
    // Of slot k, in lane k; none is -1.
    DEVICE int row(const Dispatch& d) const {
        return lane_id() < d.top_k ? __ldg(d.slot_row + u64(flat) * d.top_k + lane_id()) : -1;
    }
};

DEVICE void move_tokens(const Dispatch& d, u32 item) {
    const int begin = item * ITEM_TOKENS, count = min(ITEM_TOKENS, int(d.tokens()) - begin);
    Token of_lane{0, 0};
    if (lane_id() < count) {
        of_lane.flat = __ldg(d.recv_token + begin + lane_id());
        of_lane.away = __ldg(d.delta + of_lane.flat / d.max_tokens);
    }
#pragma unroll 1
    for (int i = 0; i < count; i += 2) {
        const Token first = of_lane.of_lane(i), second = of_lane.of_lane(min(i + 1, count - 1));
        const int first_row = first.row(d), second_row = second.row(d);
        const Source from = first.source(d), other = second.source(d);
#pragma unroll 1
        for (int part = 0; part * PART < d.hidden; ++part) {
            Part moving(part);
            moving.load(d, from, other);
            moving.store_all<0>(d, first_row);
            moving.store_all<1>(d, second_row);
        }
    }
    finished(d.group_word(begin / GROUP_TOKENS), count);
}

DEVICE void move_rows(const Dispatch& d, u32 item) {
    const int begin = item * ITEM_ROWS;
    const int source = lane_id() < ITEM_ROWS ? __ldg(d.row_source + begin + lane_id()) : -1;
    const u32 received = __reduce_max_sync(~0u, u32(max(-1 - source, 0)));
    for (u32 left = __ballot_sync(~0u, source >= 0); left != 0;) {
        const int first = __ffs(left) - 1;
        left &= left - 1;
        const int second = left != 0 ? __ffs(left) - 1 : first;  // the same row twice, where one is left
        left &= left - 1;
        const u64 a = __shfl_sync(~0u, source, first), b = __shfl_sync(~0u, source, second);
        const Source from{d.local + a * d.hidden, d.local_scale + a * d.blocks};
        const Source other{d.local + b * d.hidden, d.local_scale + b * d.blocks};
#pragma unroll 1
        for (int part = 0; part * PART < d.hidden; ++part) {
            Part moving(part);
            moving.load(d, from, other);
            moving.store<0>(d, begin + first);
            moving.store<1>(d, begin + second);
        }
    }
    finished(d.rows_word(item), 1 + received);
}

// All items of a kind that nobody else claims. The next one is claimed while one is moved.
template <typename Move>
DEVICE void move_items(u32* counter, u32 items, Move move) {
    u32 next = lane_id() == 0 ? take_one(counter) : 0;
    for (;;) {
        const u32 item = __shfl_sync(~0u, next, 0);
        if (item >= items) return;
        if (lane_id() == 0) next = take_one(counter);
        move(item);
    }
}

// One of the block's three warps that dispatch, by `order`.
DEVICE void dispatch(const Dispatch& d, u32 order) {
    const u32 tokens = (d.tokens() + ITEM_TOKENS - 1) / ITEM_TOKENS;
    for (u32 turn = order / 2; turn < order / 2 + 2; ++turn)
        if (turn % 2 == 0)
            move_items(d.progress + Dispatch::TOKENS_AT, tokens, [&](u32 item) { move_tokens(d, item); });
        else
            move_items(d.progress, d.used_rows / ITEM_ROWS, [&](u32 item) { move_rows(d, item); });
}

// What the filling warp knows to be written.
struct Written {
    const Dispatch& d;
    int row = -ROWS;  // first of the tile that was waited for last
    u32 groups = 0;   // of tokens, from the first on

    // The unit that lane 0 claimed, in all lanes.
    DEVICE u32 same(u32 unit) const { return __shfl_sync(~0u, unit, 0); }

    // All 32 lanes; afterwards lane 0 may load the tile's rows.
    DEVICE void wait(const Tile& tile) {
        __syncwarp();  // the others come here while lane 0 still loads the tile before
        if (tile.row == row) return;
        row = tile.row;
        u32 word = 1;
        for (;;) {
            if (lane_id() < ROWS / ITEM_ROWS) word = load_acquire(d.rows_word(row / ITEM_ROWS + lane_id()));
            if (__ballot_sync(~0u, word == 0) == 0) break;
            sleep_ns(POLL_NS);
        }
        const u32 received = __reduce_max_sync(~0u, word - 1);
        const u32 needed = (received + GROUP_TOKENS - 1) / GROUP_TOKENS;
        const u32 tokens = d.tokens();
        while (groups < needed) {
            const u32 group = groups + lane_id();
            const bool missing = group < needed && load_acquire(d.group_word(group)) <
                                                       min(u32(GROUP_TOKENS), tokens - group * GROUP_TOKENS);
            const u32 first = __ballot_sync(~0u, missing);
            if (first != 0) sleep_ns(POLL_NS);
            groups = min(needed, groups + (first == 0 ? 32 : __ffs(first) - 1));
        }
        __syncwarp();
        fence_async_proxy_global();
    }
};
