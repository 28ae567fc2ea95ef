// Low-rank adapters: what they add to the rows of a product.
//
// A row's delta is B (s * (A x)) in the steps of simd.h: sums over the inner dimension in four chains, then one chain over the
// ranks. It is never computed in tiles, and it is added after the sum and its bias. So a row's bits depend on its own adapter
// alone, and a row without one has the bits that it has where no row has one.
#pragma once

#include "linear.h"

namespace outrider {

// An adapter's part in one product. Projections that the product fuses lie one below the other in A; only the ranks that
// reach a panel's columns are stored in B for it. B's steps of all panels follow each other as one long panel.
struct Lora {
    const Linear *down, *up;  // A: (ranks, inner); B: 16 columns, and the ranks of one panel after the other
    const float* scale;       // of each packed column of A
    const int32_t* start;     // each panel's first block in B, and the end of the last
    const int32_t* from;      // the word of a row's ranks at which each panel begins
    const int32_t* escaped;   // each panel's first place in the list of escaped blocks
};

// An adapter's part in one layer; null: none.
struct LayerLoras { const Lora *qkv, *out, *gate_up, *down; };

// The adapters of a chunk's rows for one product.
struct Deltas {
    static constexpr int kAhead = 4096;  // prefetch distance in B, in bytes
    static constexpr int kRows = 4;      // of one pass over A or B

    const Lora* of[kChunk];  // of each row; null: none
    uint32_t* ranks;         // s * (A x) of each row, as words of a product
    size_t stride;           // words of a row
    PackedRows packed;       // room for the rows in bf16, beside int8 weights

    bool any(int rows) const {
        return std::any_of(of, of + rows, [](const Lora* lora) { return lora; });
    }

    // Calls run(row, count, adapter) for neighbours among some rows that share an adapter and a block of packed rows.
    template <class Run>
    void each_run(int first, int rows, const Run& run) const {
        for (int row = first, end; row < first + rows; row = end) {
            for (end = row + 1; end < first + rows && end % kBlock && of[end] == of[row];) end++;
            if (of[row]) run(row, end - row, *of[row]);
        }
    }
};

// s * (A x) of R rows for one panel of A. Units of the rows' words lie every `unit` words.
template <class K, class Form, int R>
__attribute__((noinline)) void shrink(const uint32_t* x, size_t unit, const Lora& lora, int panel, uint32_t* to, size_t stride) {
    typename K::Acc sums[R];
    multiply<K, Form, R, kSteps>(x, *lora.down, panel, sums, unit);
    const f32x16 scale = load(lora.scale + panel * kLanes);
    to += panel * (kLanes / K::per_step);
    for (int r = 0; r < R; r++) K::encode(sums[r] * scale, 1.0f, to + r * stride);
}

template <class K, class Form, int R = Deltas::kRows>
void shrink_run(int rows, const uint32_t* x, size_t unit, const Lora& lora, int panel, uint32_t* to, size_t stride) {
    for (; rows >= R; rows -= R, x += R * kUnit, to += R * stride) shrink<K, Form, R>(x, unit, lora, panel, to, stride);
    if constexpr (R > 1)
        if (rows) shrink_run<K, Form, R / 2>(rows, x, unit, lora, panel, to, stride);
}

// The ranks of all rows, by every thread of a team. Rows are packed already.
template <class K>
void shrink_rows(const Deltas& d, const uint32_t* words, int rows, const Member& m) {
    int units = 0, next = 0;
    d.each_run(0, rows, [&](int, int, const Lora& lora) { units += static_cast<int>(lora.down->panels); });
    const Share mine = m.share(units);
    d.each_run(0, rows, [&](int row, int count, const Lora& lora) {
        const int block = row / kBlock * kBlock;
        const size_t unit = static_cast<size_t>(std::min(kBlock, rows - block)) * kUnit;
        const uint32_t* x = words + static_cast<size_t>(block) * lora.down->steps + (row - block) * kUnit;
        uint32_t* to = d.ranks + row * d.stride;
        for (int panel = 0; panel < lora.down->panels; panel++, next++) {
            if (next < mine.begin || next >= mine.end) continue;
            if constexpr (std::is_same<K, BF16>::value && !kTiles)
                if (lora.down->high) {
                    shrink_run<K, Packed12Block>(count, x, unit, lora, panel, to, d.stride);
                    continue;
                }
            shrink_run<K, RawBlock>(count, x, unit, lora, panel, to, d.stride);
        }
    });
}

template <class K>
void prepare_deltas(const Deltas& d, const Input& in, const PackedRows& packed, const Member& m) {
    using Ranks = RankKind<K>;
    const Lora* first = *std::find_if(d.of, d.of + in.rows, [](const Lora* lora) { return lora; });
    if (!std::is_same<K, Ranks>::value)
        d.packed.fill<Ranks>(in, static_cast<int>(first->down->steps), m.share(in.rows));
    m.barrier();
    shrink_rows<Ranks>(d, std::is_same<K, Ranks>::value ? packed.words : d.packed.words, in.rows, m);
}

// The deltas of R rows of one adapter for some panels, each panel's after `stride` rows.
template <class K, class Form, int R>
__attribute__((noinline)) void expand(const Lora& lora, const uint32_t* ranks, size_t words, Share panels, float (*to)[kLanes],
                                      int stride) {
    constexpr bool packed12 = std::is_same<Form, Packed12Block>::value;
    const Linear& l = *lora.up;
    const Words table = packed12 ? load_words(l.high) : splat_word(0);
    const int32_t* escaped = packed12 ? l.escaped + lora.escaped[panels.begin] : nullptr;
    const char* raw = packed12 ? l.raw_blocks + static_cast<size_t>(lora.escaped[panels.begin]) * RawBlock::bytes : nullptr;
    int block = lora.start[panels.begin];
    const char* w = l.weights + static_cast<size_t>(block) * Form::bytes;
    for (int panel = panels.begin; panel < panels.end; panel++, to += stride) {
        const uint32_t* x = ranks + lora.from[panel];
        f32x16 y[R];
        for (int r = 0; r < R; r++) y[r] = splat(-0.0f);  // which changes nothing where no rank reaches the panel
        for (const int end = lora.start[panel + 1]; block < end; block++, w += Form::bytes, x += kSteps) {
            for (int line = 0; line < Form::bytes; line += kStepBytes) fetch(w + Deltas::kAhead + line);
            Words step[kSteps];
            if (packed12 && __builtin_expect(block == *escaped, false)) {
                RawBlock::pair<0>(raw, table, step), RawBlock::pair<1>(raw, table, step + 2);
                escaped++, raw += RawBlock::bytes;
            } else {
                Form::template pair<0>(w, table, step), Form::template pair<1>(w, table, step + 2);
            }
#pragma GCC unroll 16
            for (int i = 0; i < kSteps * R; i++) y[i % R] = K::join(y[i % R], step[i / R], x + i % R * words + i / R);
        }
        for (int r = 0; r < R; r++) store(to[r], y[r]);
    }
}

template <class K, class Form, int R = Deltas::kRows>
void expand_run(int rows, const Lora& lora, const uint32_t* ranks, size_t words, Share panels, float (*to)[kLanes], int stride) {
    for (; rows >= R; rows -= R, ranks += R * words, to += R) expand<K, Form, R>(lora, ranks, words, panels, to, stride);
    if constexpr (R > 1)
        if (rows) expand_run<K, Form, R / 2>(rows, lora, ranks, words, panels, to, stride);
}

template <class K>
void put_deltas(const RowDeltas& block, int rows, Share panels, float (*to)[kLanes]) {
    const Deltas& d = *block.all;
    for (int i = 0; i < rows * (panels.end - panels.begin); i++) store(to[i], splat(-0.0f));
    d.each_run(block.first, rows, [&](int row, int count, const Lora& lora) {
        const uint32_t* ranks = d.ranks + row * d.stride;
        float (*first)[kLanes] = to + (row - block.first);
        if constexpr (std::is_same<K, BF16>::value && !kTiles)
            if (lora.up->high) return expand_run<K, Packed12Block>(count, lora, ranks, d.stride, panels, first, rows);
        expand_run<K, RawBlock>(count, lora, ranks, d.stride, panels, first, rows);
    });
}

}  // namespace outrider
