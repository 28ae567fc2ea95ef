// Low-rank adapters: what they add to the rows of a product.
//
// A row's delta is B (s * (A x)), two chains in the steps of simd.h: over the inner dimension, then over the ranks. It is
// never computed in tiles, and it is added after the sum and its bias. So a row's bits depend on its own adapter alone, and a
// row without one has the bits that it has where no row has one.
#pragma once

#include "linear.h"

namespace outrider {

// An adapter's part in one product. Projections that the product fuses lie one below the other in A; only the ranks that
// reach a panel's columns are stored in B for it.
struct Lora {
    const Linear* down;    // A: (ranks, inner)
    const float* scale;    // of each of its packed columns
    const char* up;        // B, in steps of 64 bytes as weights are, panel by panel of the product
    const int32_t* start;  // each panel's first step in B, and the end of the last
    const int32_t* from;   // the word of a row's ranks at which each panel begins
};

// An adapter's part in one layer; null: none.
struct LayerLoras { const Lora *qkv, *out, *gate_up, *down; };

// The adapters of a chunk's rows for one product.
struct Deltas {
    static constexpr int kAhead = 1024;  // prefetch distance in B, in bytes

    const Lora* of[kChunk];  // of each row; null: none
    uint32_t* ranks;         // s * (A x) of each row, as words of a product
    size_t stride;           // words of a row
    PackedRows packed;       // room for the rows in bf16, beside int8 weights

    bool any(int rows) const {
        return std::any_of(of, of + rows, [](const Lora* lora) { return lora; });
    }

    // Calls run(row, count, adapter) for neighbours of one block of packed rows that share an adapter.
    template <class Run>
    void each_run(int rows, const Run& run) const {
        for (int row = 0, end; row < rows; row = end) {
            for (end = row + 1; end < rows && end % kBlock && of[end] == of[row];) end++;
            if (of[row]) run(row, end - row, *of[row]);
        }
    }
};

// s * (A x) of R rows for one panel of A. Units of the rows' words lie every `unit` words.
template <class K, class Form, int R>
__attribute__((noinline)) void shrink(const uint32_t* x, size_t unit, const Lora& lora, int panel, uint32_t* to, size_t stride) {
    typename K::Acc sums[R];
    multiply<K, Form, R>(x, *lora.down, panel, sums, unit);
    const f32x16 scale = load(lora.scale + panel * kLanes);
    to += panel * (kLanes / K::per_step);
    for (int r = 0; r < R; r++) K::encode(sums[r] * scale, 1.0f, to + r * stride);
}

template <class K, class Form, int R = kBlock>
void shrink_run(int rows, const uint32_t* x, size_t unit, const Lora& lora, int panel, uint32_t* to, size_t stride) {
    for (; rows >= R; rows -= R, x += R * kUnit, to += R * stride) shrink<K, Form, R>(x, unit, lora, panel, to, stride);
    if constexpr (R > 1)
        if (rows) shrink_run<K, Form, R / 2>(rows, x, unit, lora, panel, to, stride);
}

// The ranks of all rows, by every thread of a team. Rows are packed already.
template <class K>
void shrink_rows(const Deltas& d, const uint32_t* words, int rows, const Member& m) {
    int units = 0, next = 0;
    d.each_run(rows, [&](int, int, const Lora& lora) { units += static_cast<int>(lora.down->panels); });
    const Share mine = m.share(units);
    d.each_run(rows, [&](int row, int count, const Lora& lora) {
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

template <class K>
void put_deltas(const RowDeltas& block, int rows, int panel, float (*to)[kLanes]) {
    const Deltas& d = *block.all;
    for (int r = 0; r < rows; r++) {
        f32x16 y = splat(-0.0f);
        if (const Lora* lora = d.of[block.first + r]) {
            const char* w = lora->up + static_cast<size_t>(lora->start[panel]) * kStepBytes;
            const uint32_t* x = d.ranks + (block.first + r) * d.stride + lora->from[panel];
            for (int step = lora->start[panel]; step < lora->start[panel + 1]; step++, w += kStepBytes) {
                fetch(w + Deltas::kAhead);
                y = K::join(y, load_words(w), x++);
            }
        }
        store(to[r], y);
    }
}

}  // namespace outrider
