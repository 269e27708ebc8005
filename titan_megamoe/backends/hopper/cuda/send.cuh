// The sending half of the combine under GEMM2's products (fp8_send.cu): warps that multiply nothing add up rows
// whose columns are complete and write the sums to the ranks of their tokens, as sending blocks of combine.py would.
//
// The columns come in waves (Tiles). A wave's sums are sent while later waves are multiplied, those of the last
// one by combine. Chunks of tokens are numbered as combine numbers its sending blocks: chunk · (W - 1) + peer's
// place. They are claimed in that order, a wave's only when those of the wave before are all claimed. So two
// counters a wave tell all: tiles that are stored, and chunks that are claimed. Combine sends what nobody claimed.
//
// Roles of warpgroup 2 beside warp 8, which fills the ring:
//   warp 9        tells the other blocks which tiles this one has stored
//   warps 10, 11  send: a claim, then the chunk's rows of the pool in the order of its slots, each 512 columns
//                 through a ring of SLOTS slots that the copy engine fills; sums in fp32, rounded once
// Their shared memory is the spare piece of every multiplying warp.
//
// Stored: before its first store of the next tile, when they have long left, and after its last, a multiplying
// warp's lane 0 waits until its stores are complete, then writes the number of its stored tiles to its word of
// shared memory (release). Warp 9 reads the words (acquire) and adds to the wave's counter (release at scope gpu,
// whose fence no multiplying warp waits for); a sending warp reads that (acquire). Results are written and rows
// are read by the copy engine, hence a proxy fence on either side.
//
// No deadlock: multiplying warps wait for nobody here. Warp 9 ends with them. A sending warp waits only for a
// wave, and no longer than until its block has LAST_TILES tiles left; then it claims nothing either, so that its
// last chunk is finished beside the last products. A claimed chunk waits for nothing but copies. So no block waits for
// another, resident or not.
//
// A peer's buffer may be written: a rank reads its partial sums only in the combine of a call, announces the next
// call behind that on the same stream, and waits in it (open_call, scope sys) until all peers have announced it.
// Whoever is past open_call, and so whoever runs GEMM2 of a call, knows that every peer is past its last read of
// former calls. In this call a peer reads a chunk after the chunk's flag, which combine releases. A rank that gave
// up a call reads nothing more of it, and goes on with the next only when all have announced that, each behind its
// combine of this one.
// A peer doesn't leave this call, nor free its memory, before the flag of any chunk that has tokens: only those
// are written. A call that this rank refused or gave up (ok, state) sends nothing.
//
// The flags cover what is written here: the kernel ends before combine starts on the same stream, and every
// sending lane has put a fence at scope sys between its stores and its end, so they are performed at the peer
// before combine's release.

struct Sending {
    const unsigned char* rows;      // (P, N) bf16, what this kernel writes
    const int* slot_row;            // (W · T_max · K) of the plan
    const int* tokens;              // (W)
    const int* ok;                  // (1)
    const int* state;               // this rank's
    unsigned char* partial;         // this rank's (W - 1, T_max, N) bf16
    const long long* delta;         // (W) bytes from here to each rank
    u32* counters;                  // (waves, 2): tiles that are stored, chunks that are claimed
    int wave_columns, chunk_tokens, max_tokens, top_k, world, rank;

    DEVICE u32* stored(int wave) const { return counters + 2 * wave; }
    DEVICE u32* claimed(int wave) const { return counters + 2 * wave + 1; }
};

constexpr int SEND_WARPS = 2;
constexpr int SLOTS = 7;  // rows on their way to a sending warp
constexpr int SLOT_COLUMNS = 512;
constexpr int LAST_TILES = 2;  // of the block, beside which no chunk is claimed
constexpr u32 SLOT_BYTES = 2 * SLOT_COLUMNS;
static_assert(SEND_WARPS * SLOTS + 1 <= WARPS * (PIECE_BYTES / SLOT_BYTES), "slots and one more for words");

struct SendShared {
    const Shared& s;

    DEVICE u32 kilobyte(u32 i) const { return s.staging(i / 2) + OUT_PIECES * PIECE_BYTES + i % 2 * SLOT_BYTES; }
    DEVICE u32 slot(u32 warp, u32 i) const { return kilobyte(warp * SLOTS + i); }
    DEVICE u32 stored(u32 warp) const { return kilobyte(SEND_WARPS * SLOTS) + 4 * warp; }
    DEVICE u32 full(u32 warp, u32 i) const { return stored(WARPS) + (warp * SLOTS + i) * 8; }
};

// Before the block's barriers are opened; all threads.
DEVICE void open_sending(void* shared) {
    const Shared s{shared_address(shared)};
    if (threadIdx.x < WARPS) store_shared_word(SendShared{s}.stored(threadIdx.x), 0);
}

// A multiplying warp has sent `tiles` tiles.
DEVICE void tell_stored(const Shared& s, u32 warp, u32 tiles) {
    if (threadIdx.x % 32 == 0) {
        store_wait_all();
        store_shared_release(SendShared{s}.stored(warp), tiles);
    }
}

// Warp 9.
DEVICE void tell_blocks(const Problem& p, const Shared& s, const Sending& d) {
    const u32 lane = threadIdx.x % 32;
    const int last = (p.columns - 1) / d.wave_columns;
    u32 told = 0;
    for (Tiles tiles = p.tiles(); tiles.more() && tiles.wave() < last;) {
        const u32 of_lane = load_shared_acquire(SendShared{s}.stored(lane % WARPS));
        u32 stored = ~0u;
        for (int warp = 0; warp < WARPS; ++warp) stored = min(stored, __shfl_sync(~0u, of_lane, warp));
        __syncwarp();
        if (stored == told) sleep_ns(200);
        for (; told < stored && tiles.wave() < last; ++told, tiles.advance())
            if (lane == 0) {
                fence_async_proxy_global();
                add_release(d.stored(tiles.wave()), 1);
            }
    }
}

// The rows of consecutive slots in their order, where there are any; by a whole warp, 32 slots at a time.
struct Rows {
    const int* slot_row;
    int slots, top_k;
    int slot, token = 0;  // this lane's
    int row, row_ahead;   // of its slot, and of the one 32 further
    u32 left = 0;         // lanes whose rows are still to come

    DEVICE int load(int slot) const { return slot < slots ? __ldg(slot_row + slot) : -1; }

    DEVICE Rows(const int* slot_row, int slots, int top_k)
        : slot_row(slot_row), slots(slots), top_k(top_k), slot(int(threadIdx.x % 32) - 32) {
        row_ahead = load(slot + 32);
    }

    // The next row and its token's place in the chunk; false at the end.
    DEVICE bool next(u32& next_row, int& its_token) {
        while (left == 0) {
            if (slot - int(threadIdx.x % 32) + 32 >= slots) return false;
            slot += 32;
            row = row_ahead;
            row_ahead = load(slot + 32);
            token = slot / top_k;
            left = __ballot_sync(~0u, row >= 0);
        }
        const int lane = __ffs(left) - 1;
        left &= left - 1;
        next_row = __shfl_sync(~0u, row, lane);
        its_token = __shfl_sync(~0u, token, lane);
        return true;
    }
};

// A lane's columns: 8 from 8 · lane on, and 8 from 256 + 8 · lane on.
struct SlotSums {
    float at[16];

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < 16; ++i) at[i] = 0.f;
    }

    DEVICE void add(u32 slot) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Words words = load_shared_words(slot + half * (SLOT_BYTES / 2) + threadIdx.x % 32 * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                at[8 * half + 2 * i] += low_bf16(words.at[i]);
                at[8 * half + 2 * i + 1] += high_bf16(words.at[i]);
            }
        }
    }

    DEVICE void store(unsigned char* to) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Words words;
#pragma unroll
            for (int i = 0; i < 4; ++i) words.at[i] = pack_bf16(at[8 * half + 2 * i], at[8 * half + 2 * i + 1]);
            store_words(to + half * (SLOT_BYTES / 2) + threadIdx.x % 32 * 16, words);
        }
    }
};

// Where a sending warp stands in its ring: the copy engine fills, the warp empties.
struct Slots {
    RingPosition<SLOTS> filling, emptying;
    int filled = 0;
    int token_of_lane;  // lane i: token of the row in slot i
};

// A chunk's sums of SLOT_COLUMNS columns. `rows` and `to` begin at these columns.
DEVICE void send_columns(const SendShared& s, u32 warp, Slots& slots, Rows walk, const unsigned char* rows,
                         unsigned char* to, u64 row_bytes) {
    const u32 lane = threadIdx.x % 32;
    SlotSums sums;
    int current = -1;
    do {
        u32 row;
        int token;
        while (slots.filled < SLOTS && walk.next(row, token)) {
            const u32 slot = slots.filling.stage;
            if (lane == slot) slots.token_of_lane = token;
            if (lane == 0) {
                barrier_expect(s.full(warp, slot), SLOT_BYTES);
                load_bytes(s.slot(warp, slot), rows + row * row_bytes, SLOT_BYTES, s.full(warp, slot));
            }
            slots.filling.advance();
            ++slots.filled;
        }
        const u32 slot = slots.emptying.stage;
        token = slots.filled ? __shfl_sync(~0u, slots.token_of_lane, slot) : -1;
        if (token != current) {
            if (current >= 0) sums.store(to + current * row_bytes);
            sums.clear();
            current = token;
        }
        if (current < 0) break;
        barrier_wait(s.full(warp, slot), slots.emptying.round);
        sums.add(s.slot(warp, slot));
        __syncwarp();  // the slot may be filled again
        slots.emptying.advance();
        --slots.filled;
    } while (true);
}

// A claimed chunk, all columns of a wave.
DEVICE void send_chunk(const Problem& p, const SendShared& s, const Sending& d, u32 warp, Slots& slots, int claim,
                       int wave) {
    const int peers = d.world - 1, chunk = claim / peers;
    const int peer = (d.rank + 1 + claim - chunk * peers) % d.world;
    const int mine = (d.rank - peer + d.world - 1) % d.world;  // my place among the peer's peers
    const int first = chunk * d.chunk_tokens, tokens = min(d.chunk_tokens, __ldg(d.tokens + peer) - first);
    if (tokens <= 0) return;
    const u64 row_bytes = 2 * u64(p.columns);
    unsigned char* to = d.partial + __ldg(d.delta + peer) + (u64(mine) * d.max_tokens + first) * row_bytes;
    const int* slot_row = d.slot_row + (peer * d.max_tokens + first) * d.top_k;
#pragma unroll 1
    for (int i = 0; i < d.wave_columns; i += SLOT_COLUMNS) {
        const u64 at = 2 * u64(wave * d.wave_columns + i);
        send_columns(s, warp, slots, Rows(slot_row, tokens * d.top_k, d.top_k), d.rows + at, to + at, row_bytes);
    }
}

// Warps 10 and 11: `warp` 0 and 1.
DEVICE void send_sums(const Problem& p, const Shared& shared, const Sending& d, u32 warp) {
    if (__ldg(d.ok) == 0 || __ldg(d.state + 1) != 0) return;
    const SendShared s{shared};
    const u32 lane = threadIdx.x % 32;
    const Tiles tiles = p.tiles();
    const int own_tiles = (tiles.count() - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
    const int last = (p.columns - 1) / d.wave_columns;
    const u32 tiles_of_wave = tiles.row_tiles * tiles.wave_tiles;
    const u32 chunks = (d.max_tokens + d.chunk_tokens - 1) / d.chunk_tokens * (d.world - 1);
    constexpr u32 NOT_YET = ~0u, NO_MORE = ~0u - 1;
    if (lane == 0) {
#pragma unroll 1
        for (u32 i = 0; i < SLOTS; ++i) barrier_init(s.full(warp, i), 1);
        fence_barrier_init();
    }
    __syncwarp();
    Slots slots;
    for (int wave = 0; wave < last;) {
        u32 claim = NOT_YET;
        if (lane == 0) {
            if (int(load_shared_acquire(s.stored(0))) + LAST_TILES >= own_tiles) {
                claim = NO_MORE;
            } else if (load_acquire(d.stored(wave)) == tiles_of_wave) {
                fence_async_proxy_global();
                claim = take(d.claimed(wave), 1);
            }
        }
        claim = __shfl_sync(~0u, claim, 0);
        if (claim == NO_MORE) break;
        if (claim == NOT_YET) sleep_ns(1000);
        else if (claim >= chunks) ++wave;
        else send_chunk(p, s, d, warp, slots, int(claim), wave);
    }
    fence_system();
}
