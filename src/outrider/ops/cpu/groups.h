// Products with integers of four or eight bits that have a scale for each column and group of inputs.
//
// A panel of 16 columns is one stream: a line of 64 bytes with the scales of its next groups as float16, then the integers of
// those groups, in blocks of four steps as simd.h has them. Where groups have a value to subtract, a line is of one group, 16
// scales and 16 values with their sign changed; otherwise it has the scales of two groups. Nibbles: 64 low ones are a step,
// and 64 high ones the next.
//
// Sums in a group are exact integers; groups are added in order, each by a fused multiply-add, so a result is one chain.
#pragma once

#include "linear.h"

namespace outrider {

template <class K, int R>
void multiply_groups(const uint32_t* x, size_t unit, const uint32_t* row_sums, const Linear& l, int panel, f32x16* sums) {
    const char *w = l.weights + l.panel_bytes() * panel, *scales = w;
    const int blocks = l.blocks(), groups = l.groups(), size = static_cast<int>(l.group_blocks);
    f32x16 total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r] = splat(0.0f);
    for (int g = 0, block = 0; g < groups; g++) {
        const bool second = !K::has_least && g % 2;
        if (!second) scales = w, w += kStepBytes;
        Words acc[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r] = splat_word(0);
        for (const int end = std::min(block + size, blocks); block < end; block++, w += K::block_bytes) {
            const uint32_t* at = x + block / (kUnit / kSteps) * unit + block % (kUnit / kSteps) * kSteps;
#pragma GCC unroll 4
            for (int line = 0; line < K::block_bytes; line += kStepBytes) fetch(w + kPrefetch + line);
            Words step[2];
            const auto join = [&](int first) {
#pragma GCC unroll 16
                for (int i = 0; i < 2 * R; i++)
                    acc[i % R] = I8::join(acc[i % R], step[i / R], at + i % R * kUnit + first + i / R);
            };
            K::template pair<0>(w, step), join(0);
            K::template pair<1>(w, step), join(2);
        }
        const f32x16 scale = load_halves(scales + (second ? 32 : 0));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const uint32_t* sum = row_sums + static_cast<size_t>(r) * groups + g;
            total[r] = fma(scale, K::in_group(acc[r], *sum), total[r]);
            if (K::has_least) total[r] = fma(load_halves(scales + 32), as_float(splat_word(*sum)), total[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r] = total[r];
}

}  // namespace outrider
