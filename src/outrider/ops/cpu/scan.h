// A linear recurrence along paths of rows: ops/scan.py defines it, and every value here has its bits, but for denormal ones.
//
// Heads and columns of the memory do not meet. So a thread takes sixteen columns of a head through all rows, in memory that
// stays in the L1 cache, and sums over keys are taken by halving.
#pragma once

#include <vector>

#include "simd.h"
#include "threads.h"

namespace outrider {

// Where a row finds the memory of the row before: a slot, or -1 - lane. Where it leaves its own, and among those that are kept.
struct ScanStep { int64_t from, to, kept; };  // kept: -1 where it is not

struct ScanSpec {
    int64_t rows, heads, key_dim, head_dim, slots;
    const float *queries, *keys;  // (rows, heads, key_dim)
    const float* values;          // (rows, heads, head_dim)
    const float *decay, *rate;    // (rows, heads); the rate of the delta rule, or null
    const ScanStep* steps;
    const float* const* memories;  // of every lane, (heads, key_dim, head_dim)
    float* out;                    // (rows, heads, head_dim)
    float* const* kept;            // memories to keep, as those of the lanes
};

// The sum of vectors, which are overwritten: the second half is added to the first until one is left.
inline f32x16 halved(f32x16* x, int64_t count) {
    while (count > 1) {
        const int64_t half = count / 2;
        for (int64_t i = 0; i < half; i++) x[i] = x[i] + x[i + half];
        if (count & 1) x[half] = x[2 * half];
        count = half + (count & 1);
    }
    return x[0];
}

// At most sixteen columns of a head through all rows.
inline void scan_columns(const ScanSpec& s, int64_t head, int64_t column, f32x16* slots, f32x16* products) {
    const int64_t size = s.key_dim, first = head * size * s.head_dim + column;
    const int left = static_cast<int>(s.head_dim - column);
    for (int64_t row = 0; row < s.rows; row++) {
        const ScanStep& step = s.steps[row];
        const int64_t at = row * s.heads + head;
        const float *key = s.keys + at * size, *query = s.queries + at * size;
        const float* memory = step.from < 0 ? s.memories[-1 - step.from] + first : nullptr;
        const f32x16 decay = splat(s.decay[at]);
        f32x16 *now = slots + step.to * size, *before = memory ? nullptr : slots + step.from * size;
        f32x16 value = load_upto(s.values + at * s.head_dim + column, left);
        for (int64_t i = 0; i < size; i++) {
            now[i] = (memory ? load_upto(memory + i * s.head_dim, left) : before[i]) * decay;
            products[i] = now[i] * splat(key[i]);
        }
        if (s.rate) value = (value - halved(products, size)) * splat(s.rate[at]);
        for (int64_t i = 0; i < size; i++) {
            now[i] = now[i] + splat(key[i]) * value;
            products[i] = now[i] * splat(query[i]);
        }
        store_upto(s.out + at * s.head_dim + column, halved(products, size), left);
        if (step.kept < 0) continue;
        float* kept = s.kept[step.kept] + first;
        for (int64_t i = 0; i < size; i++) store_upto(kept + i * s.head_dim, now[i], left);
    }
}

// One thread's share of heads and columns.
inline void scan_rows(const ScanSpec& s, const Member& m) {
    const int64_t blocks = (s.head_dim + kLanes - 1) / kLanes;
    std::vector<f32x16> slots(s.slots * s.key_dim), products(s.key_dim);
    const Share share = m.share(static_cast<int>(s.heads * blocks));
    for (int unit = share.begin; unit < share.end; unit++)
        scan_columns(s, unit / blocks, unit % blocks * kLanes, slots.data(), products.data());
}

}  // namespace outrider
