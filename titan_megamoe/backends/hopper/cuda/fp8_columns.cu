// Rows of bf16 as e4m3 with one fp32 scale per column and 128 rows of the pool, columns first: the operands of
// fp8_wgrad.
//
//     data[s, n, r] = e4m3(x[s, r, n] · f),  scale[s, t, n] = 1 / f,  f = 448 / max |x[s, rows of tile t, n]|
//
// over the rows of an expert; what pads its last tile becomes 0. Rows lie in pool order or are gathered: from this rank's
// tokens and those of the peers, which lie as they were received or as copies of whole buffers.
//
// Grid: a block for CHUNK tiles that follow each other × 128 columns of one matrix, of `band` column blocks the chunks
// one after the other: blocks of one moment read the same tokens from L2 and write neighbouring bytes. Blocks past the
// tiles in use end at once. Blocks share nothing; four are on an SM, so that one computes while others read and write.
//
// A tile stays in registers: a thread has 8 columns of 8 rows that follow each other (16 bytes a row), so that the
// bytes of 8 rows of a column make 8 neighbouring bytes. Three barriers a tile: maxima of all threads are there; the
// columns' factors are there; the e4m3 tile is there. Each buffer is written between two barriers, neither of which is
// the one before its readers: they are past the last reading when a thread is past the barrier before the next writing.
// The next tile's rows are asked for as soon as this one's are converted.
//
// A row that pads is read as its tile's first row (no tile in use is without a row), which changes no maximum, and its
// bytes are cleared in the end: whatever it holds touches nothing, and it is 0 beside a NaN, too.

constexpr int ROWS = 128, COLUMNS = 128;  // of a tile
constexpr int THREADS = 256;
constexpr int CHUNK = 4;
constexpr int GROUP = 8;  // rows, and columns, of a thread
constexpr int GROUPS = ROWS / GROUP;
constexpr int COPY_COLUMNS = THREADS / 8, COPIES = COLUMNS / COPY_COLUMNS;  // a thread copies 16 rows of these
static_assert(COPY_COLUMNS == 4 * GROUP, "the next column's unit is the other one of four");

constexpr u32 TILE_BYTES = ROWS * COLUMNS;
// Maxima of a group of rows, in bf16; even and odd groups are read at once from different banks.
constexpr u32 MAXIMA_STRIDE = 2 * COLUMNS + 64;
constexpr u32 MAXIMA_AT = TILE_BYTES;
constexpr u32 FACTORS_AT = MAXIMA_AT + GROUPS * MAXIMA_STRIDE;
constexpr u32 ROWS_AT = FACTORS_AT + 4 * COLUMNS;  // where the rows of the chunk are
constexpr u32 LIVE_AT = ROWS_AT + 8 * CHUNK * ROWS;  // rows of each tile that do not pad
constexpr u32 SHARED_BYTES = LIVE_AT + 4 * CHUNK;
static_assert(SHARED_BYTES == HOST_SHARED_BYTES && THREADS == HOST_THREADS, "cuda_kernels.py launches so");

struct Source {
    const u16* x;         // (matrices, P, N), or (T, N) with a table
    const u16* received;  // (…, N)
    // (P), or null: rows in pool order. With top_k 0 it is the plan's row_source: t ≥ 0, row t of x, or -2 - j, row j of
    // received. Else its row_slot, and received has copies.
    const int* table;
    int columns, rows;  // N, P
    Copies copies;

    // Row of x, or -2 - row of received, of which the table says `entry`.
    DEVICE int find(int entry) const { return copies.top_k == 0 ? entry : copies.place(entry); }

    DEVICE u64 address(int source) const {
        return u64(source >= 0 ? x : received) + u64(row_of(source)) * u32(2 * columns);
    }
};

// Addresses of the rows of `count` tiles from `first` on, and how many of each tile's are rows of its expert.
DEVICE void find_rows(u32 base, const Source& source, const int* tile_expert, const int* offs, const int* counts,
                      int matrix, int first, int count) {
    const int place = threadIdx.x % ROWS;
#pragma unroll
    for (int at = 0; at < CHUNK; at += THREADS / ROWS) {
        const int own = at + threadIdx.x / ROWS;  // of the chunk's tiles
        if (own >= count) break;
        const int start = (first + own) * ROWS, expert = __ldg(tile_expert + first + own);
        int mine = matrix * source.rows + start + place, of_first = mine - place;
        if (source.table) {
            mine = source.find(__ldg(source.table + start + place));
            of_first = source.find(__ldg(source.table + start));
        }
        const int live = __ldg(offs + expert) + __ldg(counts + expert) - start;
        const u64 address = source.address(place < live ? mine : of_first);
        store_shared_words(base + ROWS_AT + 8 * (own * ROWS + place), u32(address), u32(address >> 32));
        if (place == 0) store_shared_word(base + LIVE_AT + 4 * own, live);
    }
}

// This thread's rows of a tile. `rows`: where their addresses are; `offset`: of its columns, in bytes.
DEVICE void load_rows(Words (&x)[GROUP], u32 rows, u32 offset) {
#pragma unroll
    for (int i = 0; i < GROUP; i += 2) {
        const Words at = load_shared_words(rows + 8 * i);
#pragma unroll
        for (int j = 0; j < 2; ++j)
            x[i + j] = load_words((const void*)((u64(at.at[2 * j + 1]) << 32 | at.at[2 * j]) + offset));
    }
}

DEVICE u32 pack_four(float a, float b, float c, float d) {
    return u32(pack_e4m3(a, b)) | u32(pack_e4m3(c, d)) << 16;
}

// 8 rows of a column.
DEVICE void store_column(u32 to, const float (&v)[GROUP], float f) {
    store_shared_words(to, pack_four(v[0] * f, v[1] * f, v[2] * f, v[3] * f),
                       pack_four(v[4] * f, v[5] * f, v[6] * f, v[7] * f));
}

// Of 16 bytes, those from byte `first` on become 0.
DEVICE void clear_from(Words& w, int first) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int kept = first - 4 * k;
        w.at[k] &= kept >= 4 ? ~0u : kept <= 0 ? 0u : (1u << 8 * kept) - 1;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) fp8_columns(
    const u16* x, const u16* received, const int* table, const int* state, unsigned char* data, float* scale,
    const int* tile_expert, const int* num_tiles, const int* offs, const int* counts, int columns, int rows, int scales,
    int matrices, int band, int top_k, int own_first, int max_tokens) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 tiles = __ldg(num_tiles), chunks = (tiles + CHUNK - 1) / CHUNK;
    const u32 column_tiles = (columns + COLUMNS - 1) / COLUMNS, of_matrix = column_tiles * chunks;
    if (blockIdx.x >= matrices * of_matrix) return;
    const u32 matrix = blockIdx.x / of_matrix, unit = blockIdx.x - matrix * of_matrix;
    const u32 before = unit / (band * chunks) * band;  // column blocks of former bands
    const u32 width = min(u32(band), column_tiles - before), place = unit - before * chunks;
    const u32 chunk = place / width;
    const int column = (before + place - chunk * width) * COLUMNS;
    const int first = chunk * CHUNK, count = min(CHUNK, int(tiles) - first);

    const u32 base = shared_address(shared), thread = threadIdx.x;
    const Source source{x, received, table, columns, rows, Copies{top_k, own_first, max_tokens}};
    find_rows(base, source, tile_expert, offs, counts, matrix, first, count);
    const bool given_up = state && state[1] != 0;
    __syncthreads();

    const u32 row_group = thread / 32 * 2 + thread % 2, column_group = thread / 2 % 16;
    const int own_column = column + int(column_group) * GROUP;
    // Column c has its 16-byte unit u at u xor c / 8: the lanes of a half warp write to different banks.
    const u32 to = base + column_group * GROUP * ROWS + ((row_group / 2 ^ column_group % 8) << 4) + row_group % 2 * 8;
    const u32 copied = thread / 8;  // and every COPY_COLUMNS-th column from there on
    const u32 from = base + copied * ROWS + ((thread % 8 ^ copied / GROUP) << 4);
    const int rest = columns - column - int(copied);
    unsigned char* out = data + u64(matrix * columns + column + copied) * rows + first * ROWS + thread % 8 * 16;
    Words w[GROUP] = {};  // what is past N is 0
    if (own_column < columns) load_rows(w, base + ROWS_AT + 8 * GROUP * row_group, 2 * own_column);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        Words most;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            most.at[k] = w[0].at[k];
#pragma unroll
            for (int j = 1; j < GROUP; ++j) most.at[k] = max_magnitudes_any_sign_bf16(most.at[k], w[j].at[k]);
        }
        store_shared_words(base + MAXIMA_AT + MAXIMA_STRIDE * row_group + 16 * column_group, most);
        __syncthreads();

        if (thread < COLUMNS) {  // a column each; two threads take even and odd groups of rows of their two
            const u32 pair = base + MAXIMA_AT + MAXIMA_STRIDE * (thread % 2) + thread / 2 * 4;
            u32 all = load_shared_word(pair);
#pragma unroll
            for (int j = 1; j < GROUPS / 2; ++j)
                all = max_magnitudes_any_sign_bf16(all, load_shared_word(pair + 2 * j * MAXIMA_STRIDE));
            all = max_magnitudes_any_sign_bf16(all, __shfl_xor_sync(~0u, all, 1)) & 0x7FFF7FFF;
            float factor = quantization_factor_bf16(thread % 2 ? high_bf16(all) : low_bf16(all));
            if (given_up) factor = low_bf16(0x7FFF);
            store_shared(base + FACTORS_AT + 4 * thread, factor);
            if (column + int(thread) < columns)
                scale[u64(matrix * (rows / ROWS) + first + i) * scales + column + thread] = __fdiv_rn(1.f, factor);
        }
        __syncthreads();

#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float low, high, v[GROUP];
            load_shared_pair(base + FACTORS_AT + 4 * (GROUP * column_group + 2 * k), low, high);
#pragma unroll
            for (int j = 0; j < GROUP; ++j) v[j] = low_bf16(w[j].at[k]);
            store_column(to + 2 * k * ROWS, v, low);
#pragma unroll
            for (int j = 0; j < GROUP; ++j) v[j] = high_bf16(w[j].at[k]);
            store_column(to + (2 * k + 1) * ROWS, v, high);
        }
        if (own_column < columns && i + 1 < count)
            load_rows(w, base + ROWS_AT + 8 * (GROUP * row_group + (i + 1) * ROWS), 2 * own_column);
        __syncthreads();

        const int live = int(load_shared_word(base + LIVE_AT + 4 * i));
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
            Words y = load_shared_words((from ^ (j % 2 << 6)) + j * COPY_COLUMNS * ROWS);
            if (live < ROWS) clear_from(y, live - int(thread % 8) * 16);
            if (j * COPY_COLUMNS < rest) store_words(out + u64(j * COPY_COLUMNS) * rows, y);
        }
        out += ROWS;
    }
}
