// Attention over paged KV, reduced by logical position.
//
// A page of one head holds keys as [dimensions][slot] and values as [slots][dimension], in words of one float or two bf16
// values (two dimensions of a key, two slots of a value). So both products are made of the steps of simd.h. The score of a
// query and a key is one chain over the dimensions. The weighted sum of values is one chain over logical positions. Sums of
// exponentials keep a lane per position modulo 16. Positions a row does not see add exact zeros, because no value in memory
// is NaN or infinite (`keep_finite`). So the bits depend on logical positions alone: not on slots, pages, the windows of
// neighbours or the rows computed together.
//
// Int8 memory has four values in a word, and behind the words of a page and head a scale for each slot: the largest magnitude
// becomes 127. Pages are widened to bf16, which holds such integers exactly, as they are read. A score is multiplied by the
// scale of its key, a weight by that of its value before it is rounded to bf16.
#pragma once

#include <vector>

#include "linear.h"

namespace outrider {

// KV memory of one layer, in words.
struct Pages {
    uint32_t *keys, *values;
    int kv_heads, page_size, head_dim, width;  // width: head_dim padded to whole vectors
    int per_word;  // 1 float32, 2 bf16, or 4 int8; then a page has whole vectors of slots

    bool quantised() const { return per_word == 4; }
    // Sixteen values of a head, zero past its end.
    f32x16 part(const float* x, int first) const { return load_upto(x + first, std::max(head_dim - first, 0)); }
    size_t codes_size() const { return static_cast<size_t>(page_size) * width / per_word; }
    size_t head_size() const { return codes_size() + (quantised() ? page_size : 0); }
    size_t place(int page, int head) const { return (static_cast<size_t>(page) * kv_heads + head) * head_size(); }

    template <class K>
    void put_key(int page, int head, int offset, const float* x) const {
        uint32_t word[kLanes], *to = keys + place(page, head) + offset;
        for (int i = 0; i < width; i += kLanes) {
            K::encode(part(x, i), 1.0f, word);
            for (int s = 0; s < kLanes / K::per_step; s++, to += page_size) *to = word[s];
        }
    }
    template <class K>
    void put_value(int page, int head, int offset, const float* x) const {
        constexpr size_t size = sizeof(uint32_t) / K::per_step;  // of a value, which lies in every word of a row
        uint32_t word[kLanes], *row = values + place(page, head) + static_cast<size_t>(offset / K::per_step) * width;
        for (int i = 0; i < width; i += kLanes) {
            K::encode(part(x, i), 1.0f, word);
            char* to = reinterpret_cast<char*>(row + i) + offset % K::per_step * size;
            const char* encoded = reinterpret_cast<char*>(word);
            for (int d = 0; d < kLanes; d++) std::memcpy(to + d * sizeof(uint32_t), encoded + d * size, size);
        }
    }

    // A key and the value after it, as integers and a scale each. A key of NaN has a scale of NaN.
    void put_integers(int page, int head, int offset, const float* key) const {
        const float* value = key + head_dim;
        uint32_t word[4], *to = keys + place(page, head), *row = values + place(page, head);
        const float of_key = put_scale(key, to + codes_size() + offset), of_value = put_scale(value, row + codes_size() + offset);
        to += offset, row += static_cast<size_t>(offset / 4) * width;
        for (int i = 0; i < width; i += kLanes) {
            I8::encode(part(key, i), of_key, word);
            for (int s = 0; s < 4; s++, to += page_size) *to = word[s];
            I8::encode(part(value, i), of_value, word);
            for (int d = 0; d < kLanes; d++)
                std::memcpy(reinterpret_cast<char*>(row + i + d) + offset % 4, reinterpret_cast<const char*>(word) + d, 1);
        }
    }

    // Stores the scale of a head's values. Returns what they are multiplied by.
    float put_scale(const float* x, uint32_t* to) const {
        f32x16 top = splat(0.0f);
        for (int i = 0; i < width; i += kLanes) top = maximum(magnitude(part(x, i)), top);
        const float scale = std::isnan(x[0]) ? NAN : largest(top) / 127.0f;
        std::memcpy(to, &scale, sizeof scale);
        return scale > 0.0f ? 1.0f / scale : 0.0f;
    }
};

// Rows of words of four int8 values as bf16, two rows for each.
inline void widen(const uint32_t* from, int rows, int width, uint32_t* to) {
    const auto value = [](Words in_high_byte) { return as_words(to_float(shift_down_signed<24>(in_high_byte))); };
    for (int r = 0; r < rows; r++, to += 2 * width)
        for (int i = 0; i < width; i += kLanes, from += kLanes) {
            const Words four = load_words(from);
            store_words(to + i, shift_down<16>(value(shift_up<24>(four))) + value(shift_up<16>(four)));
            store_words(to + width + i, shift_down<16>(value(shift_up<8>(four))) + value(four));
        }
}

// Checks a key and the value after it before they are stored. Rows that do not see the slot multiply its value by zero,
// which gives NaN for a value that is not finite. Such a value becomes zero and its key NaN, so that only rows that see the
// slot have a result that is not finite.
inline void keep_finite(float* key, int dim) {
    uint32_t sound = 0xffff;
    for (int i = 0; i < 2 * dim; i += kLanes)
        sound &= at_most(magnitude(load_upto(key + i, 2 * dim - i)), splat(0x1.fep127f));  // the largest bf16 value
    if (sound == 0xffff) return;
    std::fill(key, key + dim, NAN);
    std::fill(key + dim, key + 2 * dim, 0.0f);
}

// Rows of one sequence: `fed` committed tokens from `start`, then draft nodes in the slots after them.
struct Feed {
    int start, fed, nodes, known;
    int first_key;  // the first slot with a key; those before are empty
    int page_count;
    int rotary_start;  // the first row of the rotary tables that it uses
    int adapter;       // its number, from 1 on; 0: none
    const int32_t *pages, *parents;
    bool tree;  // some node does not lie at its logical position

    int root() const { return start + fed - 1; }
};

// One token row: its logical position, the slot of its KV, and for a tree node the slots of its path below the root. A row sees
// positions up to its own, a row of a block all up to the block's last one.
struct Row {
    const Feed* feed;
    int position, slot;
    const int32_t* path;
    int block_end = 0;

    int last() const { return std::max(position, block_end); }

    int slot_of(int at) const { return path && at > feed->root() ? path[at - feed->root() - 1] : at; }
};

// What a row sees of the positions up to its own.
struct Sight {
    int window;  // positions, its own included; 0: all
    float cap;   // scores become cap * tanh(score / cap); 0: they stay
    const float* sinks;  // of each head, the score of a key without a value; or null
};

constexpr int kQueries = 16;  // rows x queries per head that one unit aims at

// KV to prefetch while arithmetic leaves memory idle: one cache line with every step.
struct Prefetch {
    const uint32_t *at, *end;
};

// A product inside attention: out[r][16 c ..] (+)= sum over steps of x[r][s] * w[s][16 c ..].
struct Small {
    const uint32_t *x, *w;
    size_t x_stride, w_stride;
    int steps;
    float* out;
    size_t out_stride;
    bool resume;
    Prefetch& prefetch;
};

template <class K, int R, int C>
inline void accumulate(const Small& p, int row, int column) {
    const uint32_t *x = p.x + row * p.x_stride, *w = p.w + column * kLanes;
    float* out = p.out + row * p.out_stride + column * kLanes;
    Prefetch prefetch = p.prefetch;
    f32x16 acc[R * C];
#pragma GCC unroll 16
    for (int i = 0; i < R * C; i++) acc[i] = p.resume ? load(out + i / C * p.out_stride + i % C * kLanes) : splat(0.0f);
    for (int s = 0; s < p.steps; s++, w += p.w_stride) {
        if (prefetch.at < prefetch.end) fetch(prefetch.at), prefetch.at += kLanes;
        Words columns[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) columns[c] = load_words(w + c * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < R * C; i++) acc[i] = K::join(acc[i], columns[i % C], x + i / C * p.x_stride + s);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R * C; i++) store(out + i / C * p.out_stride + i % C * kLanes, acc[i]);
    p.prefetch = prefetch;
}

// R rows and all vectors of columns, in blocks whose sums fit the registers and keep the arithmetic busy.
template <class K, int R, int C = kRegisters == 32 ? 4 : 4 / R>
inline void accumulate_rows(const Small& p, int row, int vectors, int column = 0) {
    for (; column + C <= vectors; column += C) accumulate<K, R, C>(p, row, column);
    if constexpr (C > 1) accumulate_rows<K, R, C / 2>(p, row, vectors, column);
}

template <class K>
inline void accumulate_all(const Small& p, int rows, int vectors) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) accumulate_rows<K, 4>(p, r, vectors);
    for (; r + 2 <= rows; r += 2) accumulate_rows<K, 2>(p, r, vectors);
    if (r < rows) accumulate_rows<K, 1>(p, r, vectors);
}

// Attention in one layer of consecutive rows of one sequence whose queries share a head of keys.
template <class K>
class Attention {
   public:
    // `rows` begin with the first of `count`. `memory` is the calling thread's.
    Attention(const Pages& kv, const Row* rows, int count, int head, int group, const Sight& sight, std::vector<float>& memory)
        : kv(kv), rows(rows), head(head), group(group), sight(sight), queries(count * group) {
        const Feed& feed = *rows->feed;
        int first = rows->position, last = 0;
        for (int r = 0; r < count; r++) {
            first = std::min(first, begin_of(rows[r]));
            last = std::max(last, rows[r].last());
            end = std::max({end, rows[r].slot + 1, rows[r].block_end + 1});  // ancestors lie before their descendants
        }
        first_page = first / kv.page_size;
        base = first_page * kv.page_size / kLanes * kLanes;
        until = round_up(last + 1, kLanes);
        // whole words: positions past the end have no weight, and words that tree nodes do not share go row by row
        shared = feed.tree ? (std::min(feed.root(), last) + 1) / K::per_step * K::per_step : round_up(last + 1, K::per_step);
        span = round_up(std::max(end, last + 1) - base, kLanes) + 2 * kLanes;
        const size_t slots = kv.quantised() ? round_up(end - base, kv.page_size) : 0, page = kv.quantised() ? 2 * kv.codes_size() : 0;
        memory.resize(std::max(memory.size(), queries * (span + 2 * kv.width) + kv.width + 2 * slots + page));
        scores = memory.data();
        mixed = scores + queries * span;
        std::fill(mixed, mixed + queries * kv.width, 0.0f);
        query = reinterpret_cast<uint32_t*>(mixed + queries * kv.width);
        gathered = query + queries * kv.width;
        slot_scales = mixed + 2 * queries * kv.width + kv.width, scales = slot_scales + slots;
        widened = reinterpret_cast<uint32_t*>(scales + slots);
        if (kv.quantised()) read_scales(slots);
    }

    // q has the scaled and rotated queries of each head of keys, then its key and value; out is (rows, heads, head_dim). Keys
    // of head `next` are prefetched if it is not negative.
    void run(const Rows& q, const Rows& out, int next) {
        const int dim = kv.head_dim, width = kv.width;
        for (int i = 0; i < queries; i++) {
            const float* source = place(q, group + 2, i);
            uint32_t* word = query + i * width;
            for (int d = 0; d < dim; d += kLanes) K::encode(load_upto(source + d, dim - d), 1.0f, word + d / K::per_step);
        }
        score();
        for (int i = 0; i < queries; i++) {
            const Row& row = rows[i / group];
            float* row_scores = scores + i * span;
            const int begin = begin_of(row);
            // reorder scores in place: the slots of a path rise, and the j-th is never before position root + j. A window may
            // begin below the root, and positions before the window have no scores
            for (int at = std::max(row.feed->root() + 1, begin); row.path && at <= row.position; at++) {
                row_scores[at - base] = row_scores[row.slot_of(at) - base];
                if (kv.quantised()) scales[at - base] = slot_scales[row.slot_of(at) - base];
            }
            if (sight.cap > 0.0f) cap(row_scores, begin - base, row.last() + 1 - base);
            const float sink = sight.sinks ? sight.sinks[head * group + i % group] : -INFINITY;
            const float* of_values = kv.quantised() ? scales : nullptr;
            row_scores[span - 1] = softmax_weights(row_scores, begin - base, row.last() + 1 - base, until - base, sink, of_values);
        }
        mix(next);
        for (int i = 0; i < queries; i++) {
            const f32x16 share = splat(1.0f / scores[(i + 1) * span - 1]);
            float *target = place(out, group, i), *sums = mixed + i * width;
            for (int d = 0; d < dim; d += kLanes) store_upto(target + d, load(sums + d) * share, dim - d);
        }
    }

   private:
    void score() const {
        const int page = kv.page_size, steps = (kv.head_dim + K::per_step - 1) / K::per_step;
        for (int p = first_page; p * page < end; p++) {
            const size_t at = kv.place(rows->feed->pages[p], head);
            const int vectors = (std::min(page, end - p * page) + kLanes - 1) / kLanes;
            Prefetch prefetch{kv.values + at, kv.values + at + kv.head_size()};
            float* of_page = scores + (p * page - base);
            accumulate_all<K>({query, words_of(kv.keys + at, kv.width / 4, page), static_cast<size_t>(kv.width),
                               static_cast<size_t>(page), steps, of_page, span, false, prefetch},
                              queries, vectors);
            if (!kv.quantised()) continue;
            const auto* of_keys = reinterpret_cast<const float*>(kv.keys + at + kv.codes_size());
            for (int i = 0; i < queries * vectors; i++) {
                float* score = of_page + i / vectors * span + i % vectors * kLanes;
                store(score, load(score) * load(of_keys + i % vectors * kLanes));
            }
        }
    }

    // The words of a page's keys or values. Int8, in rows of that width, is widened first.
    const uint32_t* words_of(const uint32_t* stored, int rows, int width) const {
        if (!kv.quantised()) return stored;
        widen(stored, rows, width, widened);
        return widened;
    }

    // The scales of values by slot. Those by position are the same but for draft nodes, where they differ from row to row.
    void read_scales(size_t slots) const {
        for (int p = first_page; p * kv.page_size < end; p++) {
            const uint32_t* of_page = kv.values + kv.place(rows->feed->pages[p], head) + kv.codes_size();
            std::memcpy(slot_scales + (p * kv.page_size - base), of_page, kv.page_size * sizeof(float));
        }
        std::memcpy(scales, slot_scales, slots * sizeof(float));
    }

    // Weights times values: shared positions page by page, then the path of each tree row.
    void mix(int next) const {
        const auto* weights = reinterpret_cast<const uint32_t*>(scores);
        const int page = kv.page_size, vectors = kv.width / kLanes;
        const auto width = static_cast<size_t>(kv.width);
        Prefetch prefetch{};
        for (int p = first_page; p * page < shared; p++) {
            const int page_id = rows->feed->pages[p];
            if (next >= 0) prefetch = {kv.keys + kv.place(page_id, next), kv.keys + kv.place(page_id, next + 1)};
            const uint32_t* values = words_of(kv.values + kv.place(page_id, head), page / 4, kv.width);
            accumulate_all<K>({weights + (p * page - base) / K::per_step, values, span, width,
                               std::min(page, shared - p * page) / K::per_step, mixed, width, true, prefetch},
                              queries, vectors);
        }
        for (int i = 0; i < queries; i++) {
            const Row& row = rows[i / group];
            for (int at = std::max(shared, begin_of(row) / K::per_step * K::per_step); at <= row.position; at += K::per_step) {
                gather(row, at);
                const uint32_t* weight = weights + i * span + (at - base) / K::per_step;
                accumulate_all<K>({weight, gathered, 1, width, 1, mixed + i * width, width, true, prefetch}, 1, vectors);
            }
        }
    }

    // Gathers the word of values at logical positions at, at + 1, ..., which may lie in any slots.
    void gather(const Row& row, int at) const {
        for (int i = 0; i < K::per_step; i++) {
            const int slot = row.slot_of(std::min(at + i, row.position));
            const uint32_t* from = kv.values + kv.place(row.feed->pages[slot / kv.page_size], head);
            from += static_cast<size_t>(slot % kv.page_size / kv.per_word) * kv.width;
            if (K::per_step == 1) return void(std::memcpy(gathered, from, kv.width * sizeof(uint32_t)));
            for (int d = 0; d < kv.width; d++) {
                const uint32_t half = kv.quantised() ? bf16_of(from[d] >> slot % 4 * 8) : from[d] >> slot % 2 * 16 & 0xffff;
                gathered[d] = i ? gathered[d] | half << 16 : half;
            }
        }
    }

    // The lowest byte, an integer, as bf16.
    static uint32_t bf16_of(uint32_t word) {
        const auto value = static_cast<float>(static_cast<int8_t>(word));
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits >> 16;
    }

    // The first position a row sees; never before base.
    int begin_of(const Row& row) const { return std::max(row.feed->first_key, sight.window > 0 ? row.position + 1 - sight.window : 0); }
    float* place(const Rows& x, int per_head, int query) const {
        return x[query / group] + static_cast<size_t>(head * per_head + query % group) * kv.head_dim;
    }

    void cap(float* score, int begin, int end) const {
        for (int i = begin / kLanes * kLanes; i < end; i += kLanes) store(score + i, soft_capped(load(score + i), sight.cap));
    }

    // Scores [begin, end) become exponentials and all others up to `until` zero, encoded as words in place (a word never
    // lies after its values). Returns the sum of the exponentials, that of the sink last. With scales of values a word is of the
    // exponentials times these.
    static float softmax_weights(float* score, int begin, int end, int until, float sink, const float* scales) {
        constexpr float kNever = -INFINITY;
        const int whole = round_up(end, kLanes);
        std::fill(score, score + begin, kNever);
        std::fill(score + end, score + whole, kNever);
        f32x16 top = splat(kNever), total = splat(0.0f);
        for (int i = 0; i < whole; i += kLanes) top = maximum(top, load(score + i));
        const f32x16 highest = maximum(splat(sink), splat(largest(top)));
        auto* word = reinterpret_cast<uint32_t*>(score);
        for (int i = 0; i < whole; i += kLanes, word += kLanes / K::per_step) {
            const f32x16 e = exponential(load(score + i) - highest);
            K::encode(scales ? e * load(scales + i) : e, 1.0f, word);
            total += e;
        }
        std::fill(word, word + (until - whole) / K::per_step, 0u);
        float last[kLanes];
        store(last, exponential(splat(sink) - highest));
        return sum(total) + last[0];
    }

    const Pages& kv;
    const Row* rows;
    int head, group;  // of queries per head of keys
    Sight sight;
    int queries, first_page;
    int base;    // scores lie at [query][position - base]; a multiple of 16. The last entry is the sum of the weights
    int end = 0;  // slots from here on are not read
    int shared;  // logical positions below lie in the slot of the same number, for every row
    int until;   // positions from here on have no weight
    size_t span;
    float *scores, *mixed;
    uint32_t *query, *gathered;
    float *slot_scales, *scales;  // of int8 values: by slot, and by position for the row at hand
    uint32_t* widened;            // a page of int8
};

}  // namespace outrider
