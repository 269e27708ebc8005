// The combine in one pass. combine.py says what is computed and which block does what, with one proof that no block
// waits in vain: this kernel has its grid, its order of blocks, and its protocol to the word. Every sum has the same
// addends in the same order, so the bits are those of the Triton kernel.
//
// BESIDE: of a backward, with the gradients of the top-k weights, by one block on each SM that does what several blocks
// of that grid would: it claims their numbers in order (claims.cuh) and leaves room for another kernel's blocks.
// What the proof says of blocks that have started then holds for numbers that have been claimed.
//
// Rows come through shared memory: each warp has a ring of SLOTS slots which the copy engine fills, so what is on its
// way costs no registers. A warp takes every WARPS-th token of its block's chunk. First it loads the indices of all
// its tokens at once, then writes their sources into a list: of each token its rows of the pool in the order of k,
// then, where its block receives, the sums of the peers rank + 1, rank + 2, … that own one of its experts. Columns come
// in pieces of PIECE, all sources of a token's piece before its next one. Lane 0 asks for a source as soon as a slot is
// free, across tokens and pieces; all lanes add, round once and store 16 bytes each. Rows are read once, so L2 is asked to
// drop them first: sums of the peers, which arrive some hundred chunks before they are read, may then still be there.
//
// Synchronisation in a block:
//   ring     `full` of a slot counts the bytes of its copy. All lanes have read a slot at the __syncwarp before lane 0
//            asks for the next source into it. Nothing else is shared between warps.
//   sending  all warps' stores → __syncthreads → thread 0 releases the peer's flag (scope sys).
//   receiving  warps ask for rows of the pool, which wait for no peer. Thread 0 acquires every peer's flag (scope sys)
//            → __syncthreads → lane 0 of each warp fences: the sums came by ordinary stores and are read by the copy
//            engine → it asks for the first sum.
// Where the flags don't come, each warp waits for what it has asked for, since a block must not end before its copies.
// The word that says that the call was given up is read by thread 0 alone: it may change while a block runs, and all
// threads must decide alike.

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int CHUNK = 16;  // tokens of a block: COMBINE_TOKENS of layout.py
constexpr int TOKENS = CHUNK / WARPS;  // of a warp
constexpr int MAX_TOP_K = 32, MAX_WORLD = 32;  // a lane each
constexpr int PIECE = 2048;  // columns
constexpr u32 SLOT_BYTES = 2 * PIECE;
constexpr u32 UNIT_BYTES = 32 * 16;  // that a warp reads at once
constexpr int UNITS = SLOT_BYTES / UNIT_BYTES;
constexpr u32 LIST_WORDS = TOKENS * (MAX_TOP_K + MAX_WORLD);
static_assert(TOKENS * (MAX_TOP_K + MAX_WORLD - 1) < 256, "ends of lists are bytes");

// Shared memory: slots of all warps, their lists, their barriers, three words of the block.
constexpr u32 SLOTS = (HOST_SHARED_BYTES - 16 - 4 * WARPS * LIST_WORDS) / (WARPS * (SLOT_BYTES + 8));
constexpr u32 LISTS_AT = WARPS * SLOTS * SLOT_BYTES;
constexpr u32 BARRIERS_AT = LISTS_AT + 4 * WARPS * LIST_WORDS;
constexpr u32 GIVEN_UP_AT = BARRIERS_AT + 8 * WARPS * SLOTS, CODE_AT = GIVEN_UP_AT + 4, NUMBER_AT = CODE_AT + 4;
static_assert(GIVEN_UP_AT + 16 == HOST_SHARED_BYTES && THREADS == HOST_THREADS, "cuda_kernels.py launches so");
static_assert(SLOTS >= 2, "one slot is read while another is filled");

constexpr u32 FROM_PEER = 1u << 31;  // in a list: the sum of the peer in this place, not a row
constexpr int GENERATION_BITS = 20, MAIL_WORDS = 16;  // symmetric.py
constexpr int GIVEN_UP_BY = 4, AT_READ = 6;  // words of a rank's mail
constexpr int REFUSED = 2;
constexpr int TIMEOUT_COMBINE = 2, PEER_AHEAD = 3, PEER_GAVE_UP = 5, PEER_ENDED_EARLY = 11;  // status.py

struct Combine {
    const unsigned char* rows;     // (P, H) bf16
    const unsigned char* partial;  // this rank's (W - 1, T_max, H) bf16
    const long long* delta;        // (W) bytes from here to each rank
    int* flags;                    // this rank's (W, chunks)
    int* mail;                     // this rank's (W, MAIL_WORDS)
    int* state;
    int* report;
    int world, rank, max_tokens, chunks, signature, call;
    u64 row_bytes;
};

// What is asked for, as the host passes it.
struct Request {
    const unsigned char* rows;     // (P, H) bf16
    const int *slot_row, *tokens, *ok, *ids;
    unsigned char *out, *partial;  // (T, H) bf16; this rank's (W - 1, T_max, H)
    int *flags, *mail;
    const long long* delta;
    int *state, *report;
    int num_tokens, max_tokens, hidden, top_k, experts, world, rank, lead, id_words, signature;
    u64 timeout_ns;
#ifdef BESIDE
    const float* parts;    // (num_parts, P), or null: no gradients of the top-k weights
    float* dweight;        // (T, K)
    float* peers_dweight;  // this rank's (T_max, K), where peers put theirs
    int num_parts, pool_rows;
#endif

    DEVICE int chunks() const { return (max_tokens + CHUNK - 1) / CHUNK; }
    DEVICE Combine call() const {
        return Combine{rows,  partial, delta,      flags,    mail,      state,    report,
                       world, rank,    max_tokens, chunks(), signature, state[0], 2 * u64(hidden)};
    }
};

struct Verdict {
    int code, peer, seen;  // 0, or why the call is given up; -1: another block has given it up
};

DEVICE Verdict await_flag(const Combine& c, int chunk, int peer, u64 begin, u64 timeout_ns) {
    const int* const flag = c.flags + peer * c.chunks + chunk;
    const int* const mail = c.mail + peer * MAIL_WORDS;
    int code = 0, seen = load_acquire_system(flag);
    while (seen < c.call && code == 0) {
        if (load_volatile(c.state + 1) == 1) {
            code = -1;
        } else if (load_volatile(mail + GIVEN_UP_BY) > c.call >> GENERATION_BITS) {
            // Perhaps of the next call, by a peer that finished this one: its flag was there before.
            load_acquire_system(mail + GIVEN_UP_BY);
            seen = load_acquire_system(flag);
            if (seen < c.call) code = PEER_GAVE_UP;
        } else if (load_volatile(mail + AT_READ) == c.call) {
            code = PEER_ENDED_EARLY;
        } else if (global_timer() - begin > timeout_ns) {
            code = TIMEOUT_COMBINE;
        }
        if (code == 0) seen = load_acquire_system(flag);
    }
    if (seen > c.call) code = PEER_AHEAD;
    return Verdict{code, peer, seen};
}

// The first block of this rank that gives up tells the peers and the host.
DEVICE void give_up(const Combine& c, const Verdict& why) {
    if (compare_and_swap(c.state + 1, 0, 1) == 1) return;
    c.state[2] = why.seen >> GENERATION_BITS;
    const int generation = c.call >> GENERATION_BITS;
#pragma unroll 1
    for (int peer = 0; peer < c.world; ++peer) {
        if (peer == c.rank) continue;
        int* const box = c.mail + c.delta[peer] / 4 + c.rank * MAIL_WORDS;
        max_release_system(box + GIVEN_UP_BY, generation + 1);
    }
    if (load_volatile(c.report) != 0) return;
    c.report[1] = c.signature;
    c.report[2] = why.peer;
    c.report[3] = c.call;
    c.report[4] = why.seen;
    c.report[5] = c.call;
    store_release_system(c.report, why.code);
}

// Thread 0: wait for every peer's sums of a chunk. 0 when they are there.
DEVICE int await_peers(const Combine& c, int chunk, u64 timeout_ns) {
    const u64 begin = global_timer();
#pragma unroll 1
    for (int i = 1; i < c.world; ++i) {
        const Verdict verdict = await_flag(c, chunk, (c.rank + i) % c.world, begin, timeout_ns);
        if (verdict.code > 0) give_up(c, verdict);
        if (verdict.code != 0) return verdict.code;
    }
    return 0;
}

// A lane's columns of a piece: 8 of every 256.
struct Sums {
    float at[8 * UNITS];

    DEVICE void set(float value) {
#pragma unroll
        for (int i = 0; i < 8 * UNITS; ++i) at[i] = value;
    }

    DEVICE void add(u32 slot) {
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const Words words = load_shared_words(slot + unit * UNIT_BYTES + threadIdx.x % 32 * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                at[8 * unit + 2 * i] += low_bf16(words.at[i]);
                at[8 * unit + 2 * i + 1] += high_bf16(words.at[i]);
            }
        }
    }

    // `bytes`: of the piece, up to a row's end.
    DEVICE void store(unsigned char* to, u32 bytes) const {
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const u32 place = unit * UNIT_BYTES + threadIdx.x % 32 * 16;
            Words words;
#pragma unroll
            for (int i = 0; i < 4; ++i) words.at[i] = pack_bf16(at[8 * unit + 2 * i], at[8 * unit + 2 * i + 1]);
            if (place < bytes) store_words(to + place, words);
        }
    }
};

// A warp's tokens, first_token + WARPS · i, their lists of sources, and its ring.
struct Stream {
    const Combine& c;
    u32 base, warp;
    int first_token = 0;
    u64 policy = read_once();
    u32 ends = 0;  // byte i: where the list of token i ends and that of the next begins
    // The next source to ask for, and where to.
    int token = 0;
    u32 piece_at = 0;  // bytes of a row before the piece
    u32 next = 0, filling = 0, filled = 0;
    u32 emptying = 0, round = 0;

    DEVICE Stream(const Combine& c, u32 base) : c(c), base(base), warp(threadIdx.x / 32) {
        if (threadIdx.x % 32 == 0) {
#pragma unroll 1
            for (u32 i = 0; i < SLOTS; ++i) barrier_init(full(i), 1);
            fence_barrier_init();
        }
    }

    // Other tokens, when all that was asked for has been read.
    DEVICE void restart(int first) {
        first_token = first;
        ends = next = piece_at = 0;
        token = 0;
    }

    DEVICE u32 slot(u32 i) const { return base + (warp * SLOTS + i) * SLOT_BYTES; }
    DEVICE u32 full(u32 i) const { return base + BARRIERS_AT + (warp * SLOTS + i) * 8; }
    DEVICE u32 list(u32 i) const { return base + LISTS_AT + (warp * LIST_WORDS + i) * 4; }
    DEVICE u32 begin(int i) const { return i == 0 ? 0 : ends >> 8 * (i - 1) & 255; }
    DEVICE u32 end(int i) const { return ends >> 8 * i & 255; }
    DEVICE u32 piece_bytes(u32 at) const { return min(SLOT_BYTES, u32(c.row_bytes) - at); }

    // Token i has rows row ≥ 0, lane k that of k, and sums of the peers in places 1, 2, … of `peers`.
    DEVICE void append(int i, int row, u32 peers) {
        const u32 lane = threadIdx.x % 32, below = (1u << lane) - 1;
        const u32 rows = __ballot_sync(~0u, row >= 0), start = begin(i), sums = start + __popc(rows);
        if (row >= 0) store_shared_word(list(start + __popc(rows & below)), row);
        if (peers >> lane & 1) store_shared_word(list(sums + __popc(peers & below)), FROM_PEER | (lane - 1));
        ends |= (sums + __popc(peers)) << 8 * i;
    }

    // Ask for the next source; false: there is none, or it is a peer's sum and those are not there.
    DEVICE bool fill(bool with_sums) {
        while (token < TOKENS && next == end(token)) {
            if (begin(token) < next && piece_at + SLOT_BYTES < c.row_bytes) {
                next = begin(token);
                piece_at += SLOT_BYTES;
            } else {
                ++token;
                piece_at = 0;
            }
        }
        if (token == TOKENS) return false;
        const u32 source = load_shared_word(list(next));
        if (source & FROM_PEER && !with_sums) return false;
        if (threadIdx.x % 32 == 0) {
            const u64 row = u64(source & ~FROM_PEER);
            const unsigned char* from = c.rows + row * c.row_bytes;
            if (source & FROM_PEER)
                from = c.partial + (row * c.max_tokens + first_token + WARPS * token) * c.row_bytes;
            const u32 bytes = piece_bytes(piece_at);
            barrier_expect(full(filling), bytes);
            load_bytes_once(slot(filling), from + piece_at, bytes, full(filling), policy);
        }
        ++next;
        ++filled;
        filling = filling + 1 == SLOTS ? 0 : filling + 1;
        return true;
    }

    DEVICE void fill_all(bool with_sums) {
#pragma unroll 1
        while (filled < SLOTS && fill(with_sums)) {
        }
    }

    DEVICE void wait() const { barrier_wait(full(emptying), round); }

    DEVICE void emptied() {
        --filled;
        if (++emptying == SLOTS) emptying = 0, round ^= 1;
    }

    // Forget all lists, after what has been asked for.
    DEVICE void drain() {
        for (; filled > 0; emptied()) wait();
        ends = 0;
    }

    // Sums of all tokens below `limit` to their rows of `to`, those of a token without sources only if `all`.
    DEVICE void add_up(unsigned char* to, int limit, bool all, float initial) {
        Sums sums;
#pragma unroll 1
        for (int i = 0; i < TOKENS; ++i) {
            const int t = first_token + WARPS * i;
            const u32 sources = end(i) - begin(i);
            if (t >= limit || (sources == 0 && !all)) continue;
#pragma unroll 1
            for (u32 at = 0; at < c.row_bytes; at += SLOT_BYTES) {
                sums.set(initial);
#pragma unroll 1
                for (u32 j = 0; j < sources; ++j) {
                    wait();
                    sums.add(slot(emptying));
                    __syncwarp();
                    emptied();
                    fill(true);
                }
                sums.store(to + t * c.row_bytes + at, piece_bytes(at));
            }
        }
    }
};

#ifdef BESIDE
// Gradients of the top-k weights of this warp's tokens; lane k has slot k. Sent: to the peer's tokens that have a row
// here. Else this rank's own, with what peers sent for the other slots.
DEVICE void move_weight_gradients(const Request& r, const Stream& stream, const int (&row)[TOKENS],
                                  const int (&id)[TOKENS], int limit, bool sends, long long away, bool ready) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const int t = stream.first_token + WARPS * i, at = t * r.top_k + lane;
        if (lane >= r.top_k || t >= limit) continue;
        const int mine = ready ? row[i] : -1;
        float value = 0.f;
        if (mine >= 0)
            for (int part = 0; part < r.num_parts; ++part) value += r.parts[u64(part) * r.pool_rows + mine];
        if (sends) {
            if (mine >= 0) r.peers_dweight[away / 4 + at] = value;
        } else {
            if (ready && id[i] >= 0 && id[i] / r.experts != r.rank) value += r.peers_dweight[at];
            r.dweight[at] = ready ? value : low_bf16(0x7FFF);
        }
    }
}
#endif

// What block `number` of the grid does. BESIDE has a call and a stream for all of them.
DEVICE void combine_chunk(const Request& r, u32 base, int number
#ifdef BESIDE
                          ,
                          const Combine& c, Stream& stream
#endif
) {
    const int peers = max(r.world - 1, 1), turn = max(number - r.lead, 0);
    const int group = turn / r.world, member = turn - group * r.world;
    const bool sends = number < r.lead || member < r.world - 1;
    const int sender = number < r.lead ? number : r.lead + group * (r.world - 1) + member;
    const int chunk = sends ? sender / peers : group;
    const int owner = sends ? (r.rank + 1 + sender - chunk * peers) % r.world : r.rank;  // of the tokens
    if (chunk >= r.chunks() || (!sends && chunk > 0 && chunk * CHUNK >= r.num_tokens)) return;

    // Loads that need no other: whether they are of use is known later.
    const u32 lane = threadIdx.x % 32;
    const int first_token = chunk * CHUNK + int(threadIdx.x / 32);
    const int limit = sends ? __ldg(r.tokens + owner) : r.num_tokens;
    const bool planned = __ldg(r.ok) != 0;
    int row[TOKENS], id[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const int t = first_token + WARPS * i;
        row[i] = id[i] = -1;
        if (int(lane) < r.top_k && t < r.max_tokens)
            row[i] = __ldg(r.slot_row + (owner * r.max_tokens + t) * r.top_k + lane);
        if (int(lane) < r.top_k && !sends && t < r.num_tokens) id[i] = __ldg(r.ids + (t * r.top_k + lane) * r.id_words);
    }
    const long long away = __ldg(r.delta + owner);
#ifndef BESIDE
    const Combine c = r.call();
#endif
    if (threadIdx.x == 0) store_shared_word(base + GIVEN_UP_AT, load_volatile(r.state + 1));
    __syncthreads();
    const int given_up = load_shared_word(base + GIVEN_UP_AT);
    const bool alive = planned && given_up == 0, refused = given_up == REFUSED;

    if (sends && !(alive && (chunk == 0 || chunk * CHUNK < limit)) && !(refused && chunk == 0)) return;
#ifndef BESIDE
    Stream stream(c, base);
#endif
    stream.restart(first_token);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const bool live = alive && first_token + WARPS * i < limit;
        const int place = live && id[i] >= 0 ? (id[i] / r.experts - r.rank + r.world) % r.world : 0;
        stream.append(i, live ? row[i] : -1, __reduce_or_sync(~0u, 1u << place) & ~1u);
    }
    __syncwarp();
    stream.fill_all(false);
    bool ready = alive;
    if (!sends && r.world > 1 && (alive || (refused && chunk == 0))) {
        if (threadIdx.x == 0) store_shared_word(base + CODE_AT, await_peers(c, chunk, r.timeout_ns));
        __syncthreads();
        ready = alive && load_shared_word(base + CODE_AT) == 0;
        fence_async_proxy_global();
    }
    if (ready) stream.fill_all(true);
    else stream.drain();
    const int mine = (r.rank - owner + r.world - 1) % r.world;  // my place among the peer's peers
    unsigned char* const to = sends ? r.partial + away + u64(mine) * r.max_tokens * c.row_bytes : r.out;
    stream.add_up(to, limit, !sends, ready ? 0.f : low_bf16(0x7FFF));
#ifdef BESIDE
    if (r.parts != nullptr) move_weight_gradients(r, stream, row, id, limit, sends, away, ready);
#endif
    if (sends) {
        __syncthreads();
        if (threadIdx.x == 0) store_release_system(r.flags + away / 4 + r.rank * c.chunks + chunk, c.call);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) combine(
    const unsigned char* rows, const int* slot_row, const int* tokens, const int* ok, const int* ids,
    unsigned char* out, unsigned char* partial, int* flags, int* mail, const long long* delta, int* state, int* report,
    int num_tokens, int max_tokens, int hidden, int top_k, int experts, int world, int rank, int lead, int id_words,
    int signature, long long timeout_ns
#ifdef BESIDE
    ,
    const float* parts, float* dweight, float* peers_dweight, int num_parts, int pool_rows, u32* words, int blocks
#endif
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared);
    const Request r{rows,   slot_row, tokens, ok,     ids,        out,        partial,   flags,
                    mail,   delta,    state,  report, num_tokens, max_tokens, hidden,    top_k,
                    experts, world,   rank,   lead,   id_words,   signature,  u64(timeout_ns),
#ifdef BESIDE
                    parts,  dweight,  peers_dweight, num_parts, pool_rows,
#endif
    };
#ifdef BESIDE
    const Combine c = r.call();
    const Claims claims{words};
    Stream stream(c, base);
    for (;;) {
        __syncthreads();  // everybody is done with the number, and with all other words of the block
        if (threadIdx.x == 0) store_shared_word(base + NUMBER_AT, claims.next());
        __syncthreads();
        const int number = load_shared_word(base + NUMBER_AT);
        if (number >= blocks) break;
        combine_chunk(r, base, number, c, stream);
    }
    if (threadIdx.x == 0) claims.done();
#else
    combine_chunk(r, base, blockIdx.x);
#endif
}
