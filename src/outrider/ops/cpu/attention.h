// Attention over paged KV, reduced by logical position.
//
// A page of one head holds keys as [dimension][slot] and values as [slot][dimension]. The score of a query
// and a key is one chain over the dimensions; the mix of values is one chain over logical positions; sums of
// exponentials keep a lane per position modulo 16. Positions a row does not see add exact zeros. So the bits
// depend on the logical positions alone: not on slots, pages, windows of neighbours or rows computed together.
#pragma once

#include "linear.h"

namespace outrider {

// KV memory of one layer.
struct Pages {
    float *keys, *values;
    int kv_heads, page_size, head_dim, width;  // width: head_dim filled up to whole vectors

    size_t head_size() const { return static_cast<size_t>(page_size) * width; }
    float* keys_of(int page, int head) const { return keys + (static_cast<size_t>(page) * kv_heads + head) * head_size(); }
    float* values_of(int page, int head) const { return values + (static_cast<size_t>(page) * kv_heads + head) * head_size(); }
};

// Rows of one sequence: `fed` committed tokens from `start`, then draft nodes in the slots after them.
struct Feed {
    int start, fed, nodes, known;
    int first_key;  // slots before it hold nothing
    const int32_t *pages, *parents;
    bool tree;  // some node does not lie at its logical position

    int root() const { return start + fed - 1; }
};

// One token row: its logical position, the slot of its KV, and for a tree node the slots of its path below the root.
struct Row {
    const Feed* feed;
    int position, slot;
    const int32_t* path;
};

constexpr int kQueries = 16;  // rows x queries per head that one unit aims at

// Consecutive rows of one sequence and the head of keys their queries share.
struct Unit {
    int first, count, head;
};

// acc[r][c] over `steps` of x[r][s] * w[s][16 c ..]: C vectors of columns, R rows of x.
template <int R, int C>
inline void accumulate(const float* x, size_t x_stride, const float* w, size_t w_stride, int steps, float* out, size_t out_stride,
                       bool resume) {
    f32x16 acc[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = resume ? load(out + r * out_stride + c * kLanes) : splat(0.0f);
    for (int s = 0; s < steps; s++, w += w_stride) {
        f32x16 column[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) column[c] = load(w + c * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const f32x16 row = splat(x[r * x_stride + s]);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r][c] = fma(row, column[c], acc[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(out + r * out_stride + c * kLanes, acc[r][c]);
}

// All rows and `vectors` vectors of columns, in register-sized pieces.
template <int C = 4>
inline void accumulate_all(int rows, int vectors, const float* x, size_t x_stride, const float* w, size_t w_stride, int steps,
                           float* out, size_t out_stride, bool resume) {
    int c = 0;
    for (; c + C <= vectors; c += C) {
        const float* from = w + c * kLanes;
        float* to = out + c * kLanes;
        int r = 0;
        for (; r + 4 <= rows; r += 4)
            accumulate<4, C>(x + r * x_stride, x_stride, from, w_stride, steps, to + r * out_stride, out_stride, resume);
        for (; r + 2 <= rows; r += 2)
            accumulate<2, C>(x + r * x_stride, x_stride, from, w_stride, steps, to + r * out_stride, out_stride, resume);
        if (r < rows) accumulate<1, C>(x + r * x_stride, x_stride, from, w_stride, steps, to + r * out_stride, out_stride, resume);
    }
    if constexpr (C > 1)
        if (c < vectors)
            accumulate_all<C / 2>(rows, vectors - c, x, x_stride, w + c * kLanes, w_stride, steps, out + c * kLanes, out_stride, resume);
}

// Attention of units in one layer. Scores lie at [query][position - base], base a multiple of 16.
struct Attention {
    const Pages& kv;
    const Row* rows;
    int group;   // queries per head of keys
    int window;  // positions a row sees, itself included; 0: all

    // q is (rows, heads, head_dim), scaled and rotated; out likewise. `scratch` is the calling thread's.
    void run(const Unit& u, const float* q, size_t q_stride, float* out, size_t stride, std::vector<float>& scratch) const {
        const Feed& feed = *rows[u.first].feed;
        const int queries = u.count * group, dim = kv.head_dim, page = kv.page_size;
        int first = rows[u.first].position, last = 0, end = 0;
        for (int r = u.first; r < u.first + u.count; r++) {
            first = std::min(first, begin_of(rows[r]));
            last = std::max(last, rows[r].position);
            end = std::max(end, rows[r].slot + 1);  // ancestors lie before their descendants
        }
        const int first_page = first / page, base = first_page * page / kLanes * kLanes;
        const size_t span = round_up(end - base, kLanes) + 2 * kLanes;
        scratch.assign(queries * (span + dim + kv.width), 0.0f);
        float *scores = scratch.data(), *query = scores + queries * span, *mixed = query + queries * dim;
        for (int i = 0; i < queries; i++) std::memcpy(query + i * dim, q + place(u, i, q_stride), dim * sizeof(float));
        for (int p = first_page; p * page < end; p++) {
            const int vectors = (std::min(page, end - p * page) + kLanes - 1) / kLanes;
            accumulate_all(queries, vectors, query, dim, kv.keys_of(feed.pages[p], u.head), page, dim,
                           scores + (p * page - base), span, false);
        }
        const int shared = feed.tree ? std::min(feed.root(), last) + 1 : last + 1;  // positions in slots of their own
        std::vector<float>& totals = totals_of(queries);
        for (int i = 0; i < queries; i++) {
            const Row& row = rows[u.first + i / group];
            float* own = scores + i * span;
            // a path's slots rise, and its j-th never lies before position root + j: in place, in order
            for (int at = feed.root() + 1; row.path && at <= row.position; at++) own[at - base] = own[row.path[at - feed.root() - 1] - base];
            totals[i] = soften(own, begin_of(row) - base, row.position + 1 - base, shared - base);
        }
        for (int p = first_page; p * page < shared; p++)
            accumulate_all(queries, kv.width / kLanes, scores + (p * page - base), span, kv.values_of(feed.pages[p], u.head),
                           kv.width, std::min(page, shared - p * page), mixed, kv.width, true);
        for (int i = 0; i < queries; i++) {
            const Row& row = rows[u.first + i / group];
            for (int at = feed.root() + 1; row.path && at <= row.position; at++) {
                const int slot = row.path[at - feed.root() - 1];
                const float* value = kv.values_of(feed.pages[slot / page], u.head) + static_cast<size_t>(slot % page) * kv.width;
                accumulate_all(1, kv.width / kLanes, scores + i * span + (at - base), 1, value, kv.width, 1,
                               mixed + i * kv.width, kv.width, true);
            }
            for (int d = 0; d < dim; d += kLanes)
                put(out + place(u, i, stride) + d, load(mixed + i * kv.width + d) / splat(totals[i]), dim - d);
        }
    }

   private:
    int begin_of(const Row& row) const { return std::max(row.feed->first_key, window > 0 ? row.position + 1 - window : 0); }

    size_t place(const Unit& u, int query, size_t stride) const {
        return (u.first + query / group) * stride + static_cast<size_t>(u.head * group + query % group) * kv.head_dim;
    }

    static std::vector<float>& totals_of(int queries) {
        static thread_local std::vector<float> totals;
        totals.resize(queries);
        return totals;
    }

    // Scores [begin, end) become exponentials, everything else up to `until` zero; returns their sum.
    static float soften(float* score, int begin, int end, int until) {
        constexpr float kNever = -INFINITY;
        const int whole = round_up(end, kLanes);
        std::fill(score, score + begin, kNever);
        std::fill(score + end, score + whole, kNever);
        f32x16 top = splat(kNever), total = splat(0.0f);
        for (int i = 0; i < whole; i += kLanes) top = maximum(top, load(score + i));
        const f32x16 most = splat(largest(top));
        for (int i = 0; i < whole; i += kLanes) {
            const f32x16 e = exponential(load(score + i) - most);
            store(score + i, e);
            total += e;
        }
        if (whole < until) std::fill(score + whole, score + until, 0.0f);
        return sum(total);
    }
};

}  // namespace outrider
