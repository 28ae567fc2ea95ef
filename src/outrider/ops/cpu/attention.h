// Attention over paged KV, reduced by logical position.
//
// A page of one head holds keys as [dimensions][slot] and values as [slots][dimension], in words of one
// float or two bf16 values (two dimensions of a key, two slots of a value), so that both products are made
// of the steps of simd.h. The score of a query and a key is one chain over the dimensions; the mix of
// values is one chain over logical positions; sums of exponentials keep a lane per position modulo 16.
// Positions a row does not see add exact zeros. So the bits depend on logical positions alone: not on slots,
// pages, the windows of neighbours or the rows computed together.
#pragma once

#include "linear.h"

namespace outrider {

// KV memory of one layer, in words.
struct Pages {
    uint32_t *keys, *values;
    int kv_heads, page_size, head_dim, width;  // width: head_dim filled up to whole vectors
    int per_word;

    size_t head_size() const { return static_cast<size_t>(page_size) * width / per_word; }
    uint32_t* keys_of(int page, int head) const { return keys + (static_cast<size_t>(page) * kv_heads + head) * head_size(); }
    uint32_t* values_of(int page, int head) const { return values + (static_cast<size_t>(page) * kv_heads + head) * head_size(); }

    // `x` has whole vectors of values, zero from head_dim on.
    template <class K>
    void put_key(int page, int head, int offset, const float* x) const {
        uint32_t word[kLanes], *to = keys_of(page, head) + offset;
        for (int i = 0; i < width; i += kLanes) {
            encode<K>(load(x + i), 1.0f, word);
            for (int s = 0; s < kLanes / K::per_step; s++, to += page_size) *to = word[s];
        }
    }
    template <class K>
    void put_value(int page, int head, int offset, const float* x) const {
        uint32_t half[kLanes / 2], *to = values_of(page, head) + static_cast<size_t>(offset / K::per_step) * width;
        if (K::per_step == 1) return void(std::memcpy(to, x, width * sizeof(float)));
        for (int i = 0; i < width; i += kLanes) {
            encode<K>(load(x + i), 1.0f, half);
            const Words own = widened(half), old = load_words(to + i);
            store_words(to + i, offset % 2 ? xor_words(shift_up16(own), and_words(old, splat_word(0xffff))) : xor_words(own, keep_high16(old)));
        }
    }
};

// Rows of one sequence: `fed` committed tokens from `start`, then draft nodes in the slots after them.
struct Feed {
    int start, fed, nodes, known;
    int first_key;  // slots before it hold nothing
    int page_count;
    const int32_t *pages, *parents;
    bool tree;  // some node does not lie at its logical position

    int root() const { return start + fed - 1; }
};

// One token row: its logical position, the slot of its KV, and for a tree node the slots of its path below the root.
struct Row {
    const Feed* feed;
    int position, slot;
    const int32_t* path;

    int slot_of(int at) const { return path && at > feed->root() ? path[at - feed->root() - 1] : at; }
};

constexpr int kQueries = 16;  // rows x queries per head that one unit aims at

// Consecutive rows of one sequence and the head of keys their queries share.
struct Unit {
    int first, count, head;
};

// KV that is wanted next, brought near while arithmetic leaves memory idle: a line with every step.
struct Ahead {
    const uint32_t *at, *end;

    void fetch() {
        if (at >= end) return;
        _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
        at += kLanes;
    }
};

// A product inside attention: out[r][16 c ..] (+)= sum over steps of x[r][s] * w[s][16 c ..].
struct Small {
    const uint32_t *x, *w;
    size_t x_stride, w_stride;
    int steps;
    float* out;
    size_t out_stride;
    bool resume;
    Ahead& ahead;
};

template <class K, int R, int C>
inline void accumulate(const Small& p, int row, int column) {
    const uint32_t *x = p.x + row * p.x_stride, *w = p.w + column * kLanes;
    float* out = p.out + row * p.out_stride + column * kLanes;
    Ahead ahead = p.ahead;
    f32x16 acc[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = p.resume ? load(out + r * p.out_stride + c * kLanes) : splat(0.0f);
    for (int s = 0; s < p.steps; s++, w += p.w_stride) {
        ahead.fetch();
        Words columns[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) columns[c] = load_words(w + c * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const Words one = splat_word(x[r * p.x_stride + s]);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r][c] = K::join(acc[r][c], columns[c], one);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(out + r * p.out_stride + c * kLanes, acc[r][c]);
    p.ahead = ahead;
}

// All rows and vectors of columns, in register-sized pieces.
template <class K, int C = 4>
inline void accumulate_all(const Small& p, int rows, int vectors, int column = 0) {
    for (; column + C <= vectors; column += C) {
        int r = 0;
        for (; r + 4 <= rows; r += 4) accumulate<K, 4, C>(p, r, column);
        for (; r + 2 <= rows; r += 2) accumulate<K, 2, C>(p, r, column);
        if (r < rows) accumulate<K, 1, C>(p, r, column);
    }
    if constexpr (C > 1) accumulate_all<K, C / 2>(p, rows, vectors, column);
}

// Attention of units in one layer.
struct Attention {
    const Pages& kv;
    const Row* rows;
    int group;   // queries per head of keys
    int window;  // positions a row sees, itself included; 0: all
    int threads;

    // q is (rows, heads, head_dim), scaled and rotated; out likewise. `memory` is the calling thread's.
    template <class K>
    void run(const Unit& u, const float* q, size_t q_stride, float* out, size_t out_stride, std::vector<float>& memory) const {
        Work w = plan(u, memory);
        for (int i = 0; i < w.queries; i++) encode_row<K>(q + place(u, i, q_stride), kv.head_dim, w.query + i * kv.width);
        score<K>(u, w);
        for (int i = 0; i < w.queries; i++) {
            const Row& row = rows[u.first + i / group];
            float* own = w.scores + i * w.span;
            // a path's slots rise, and its j-th never lies before position root + j: in place, in order
            for (int at = row.feed->root() + 1; row.path && at <= row.position; at++) own[at - w.base] = own[row.slot_of(at) - w.base];
            w.total[i] = soften<K>(own, begin_of(row) - w.base, row.position + 1 - w.base, w.until - w.base);
        }
        mix<K>(u, w);
        for (int i = 0; i < w.queries; i++) {
            const f32x16 share = splat(1.0f / w.total[i]);
            for (int d = 0; d < kv.head_dim; d += kLanes)
                store_upto(out + place(u, i, out_stride) + d, load(w.mixed + i * kv.width + d) * share, kv.head_dim - d);
        }
    }

   private:
    // Scores lie at [query][position - base] and become weights there; base is a multiple of 16.
    struct Work {
        int queries, first_page, base;
        int end;     // slots from here on are not read
        int shared;  // logical positions below lie in slots of their own, for every row
        int until;   // positions from here on have no weight
        size_t span;
        float *scores, *mixed, *total;
        uint32_t* query;
    };

    Work plan(const Unit& u, std::vector<float>& memory) const {
        const Feed& feed = *rows[u.first].feed;
        int first = rows[u.first].position, last = 0;
        Work w{};
        for (int r = u.first; r < u.first + u.count; r++) {
            first = std::min(first, begin_of(rows[r]));
            last = std::max(last, rows[r].position);
            w.end = std::max(w.end, rows[r].slot + 1);  // ancestors lie before their descendants
        }
        w.queries = u.count * group;
        w.first_page = first / kv.page_size;
        w.base = w.first_page * kv.page_size / kLanes * kLanes;
        w.until = round_up(last + 1, kLanes);
        // whole words: what of the last one lies beyond has no weight, what does not fit goes row by row
        w.shared = feed.tree ? (std::min(feed.root(), last) + 1) / kv.per_word * kv.per_word : round_up(last + 1, kv.per_word);
        w.span = round_up(std::max(w.end, last + 1) - w.base, kLanes) + 2 * kLanes;
        memory.resize(std::max(memory.size(), w.queries * (w.span + 2 * kv.width + 1)));
        w.scores = memory.data();
        w.mixed = w.scores + w.queries * w.span;
        std::fill(w.mixed, w.mixed + w.queries * kv.width, 0.0f);
        w.query = reinterpret_cast<uint32_t*>(w.mixed + w.queries * kv.width);
        w.total = w.mixed + 2 * w.queries * kv.width;
        return w;
    }

    template <class K>
    void score(const Unit& u, const Work& w) const {
        const int page = kv.page_size, steps = (kv.head_dim + K::per_step - 1) / K::per_step;
        for (int p = w.first_page; p * page < w.end; p++) {
            const int own = rows[u.first].feed->pages[p];
            const uint32_t *keys = kv.keys_of(own, u.head), *values = kv.values_of(own, u.head);
            Ahead ahead{values, values + kv.head_size()};
            accumulate_all<K>({w.query, keys, static_cast<size_t>(kv.width), static_cast<size_t>(page), steps,
                               w.scores + (p * page - w.base), w.span, false, ahead},
                              w.queries, (std::min(page, w.end - p * page) + kLanes - 1) / kLanes);
        }
    }

    // Weights times values: what all rows share page by page, then what each row of a tree has to itself.
    template <class K>
    void mix(const Unit& u, const Work& w) const {
        const auto* weights = reinterpret_cast<const uint32_t*>(w.scores);
        const int page = kv.page_size, vectors = kv.width / kLanes;
        const auto width = static_cast<size_t>(kv.width);
        for (int p = w.first_page; p * page < w.shared; p++) {
            const int own = rows[u.first].feed->pages[p], next = u.head + threads;
            const uint32_t *values = kv.values_of(own, u.head), *keys = kv.keys_of(own, std::min(next, kv.kv_heads));
            Ahead ahead{keys, next < kv.kv_heads ? keys + kv.head_size() : keys};
            const int steps = std::min(page, w.shared - p * page) / K::per_step;
            accumulate_all<K>({weights + (p * page - w.base) / K::per_step, values, w.span, width, steps, w.mixed, width, true, ahead},
                              w.queries, vectors);
        }
        std::vector<uint32_t>& pair = gathered(kv.width);
        Ahead ahead{};
        for (int i = 0; i < w.queries; i++) {
            const Row& row = rows[u.first + i / group];
            for (int at = w.shared; at <= row.position; at += K::per_step) {
                gather<K>(u, row, at, pair.data());
                accumulate_all<K>({weights + i * w.span + (at - w.base) / K::per_step, pair.data(), 1, width, 1,
                                   w.mixed + i * width, width, true, ahead}, 1, vectors);
            }
        }
    }

    // The word of values at logical positions at, at + 1, ..., which may lie in any slots.
    template <class K>
    void gather(const Unit& u, const Row& row, int at, uint32_t* to) const {
        for (int i = 0; i < K::per_step; i++) {
            const int slot = row.slot_of(std::min(at + i, row.position));
            const uint32_t* from = kv.values_of(row.feed->pages[slot / kv.page_size], u.head);
            from += static_cast<size_t>(slot % kv.page_size / K::per_step) * kv.width;
            if (K::per_step == 1) return void(std::memcpy(to, from, kv.width * sizeof(uint32_t)));
            for (int d = 0; d < kv.width; d++)
                reinterpret_cast<uint16_t*>(to)[2 * d + i] = reinterpret_cast<const uint16_t*>(from)[2 * d + slot % 2];
        }
    }

    static std::vector<uint32_t>& gathered(int width) {
        static thread_local std::vector<uint32_t> words;
        words.resize(width);
        return words;
    }

    int begin_of(const Row& row) const { return std::max(row.feed->first_key, window > 0 ? row.position + 1 - window : 0); }

    size_t place(const Unit& u, int query, size_t stride) const {
        return (u.first + query / group) * stride + static_cast<size_t>(u.head * group + query % group) * kv.head_dim;
    }

    // Scores [begin, end) become exponentials, everything else up to `until` zero, as words in place: none lies after its
    // values. Returns their sum.
    template <class K>
    static float soften(float* score, int begin, int end, int until) {
        constexpr float kNever = -INFINITY;
        const int whole = round_up(end, kLanes);
        std::fill(score, score + begin, kNever);
        std::fill(score + end, score + whole, kNever);
        f32x16 top = splat(kNever), total = splat(0.0f);
        for (int i = 0; i < whole; i += kLanes) top = maximum(top, load(score + i));
        const f32x16 most = splat(largest(top));
        auto* word = reinterpret_cast<uint32_t*>(score);
        for (int i = 0; i < whole; i += kLanes, word += kLanes / K::per_step) {
            const f32x16 e = exponential(load(score + i) - most);
            encode<K>(e, 1.0f, word);
            total += e;
        }
        std::fill(word, word + (until - whole) / K::per_step, 0u);
        return sum(total);
    }
};

}  // namespace outrider
