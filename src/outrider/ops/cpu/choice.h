// Choosing tokens: argmax of logit / temperature + Gumbel noise. outrider/sampling has the specification.
//
// The noise of a token is a function of a key and the token's word. `draw` is exact: noise is evaluated in double where it
// can matter. `rank` is for drafters, whose guesses need no exact bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "simd.h"

namespace outrider {

// Rows are read in strips of sixteen values. The last strip is padded, logits with -inf.
constexpr float kNone = -std::numeric_limits<float>::infinity();
inline f32x16 strip(const float* x, int left) { return load_upto(x, left, kNone); }

struct Noise {
    const uint32_t *key, *words;  // two words of the row, and one word of every token

    // The random bits of a strip of tokens.
    Words strip(int first, int left) const {
        const uint32_t* token_words = words + first;
        uint32_t filled[kLanes] = {};
        if (left < kLanes) token_words = static_cast<uint32_t*>(std::memcpy(filled, token_words, left * sizeof(uint32_t)));
        Words x = (load_words(token_words) ^ splat_word(key[0])) * splat_word(key[1] | 1u);
        x = (x ^ shift_down<16>(x)) * splat_word(0x7feb352du);
        return (x ^ shift_down<15>(x)) * splat_word(0x846ca68bu);
    }
};

inline double gumbel(uint32_t bits) {
    const double v = std::min((bits + 0.5) * 0x1p-32, 1.0 - 0x1p-24);
    return -std::log(-std::log1p(-v));
}

// The largest value and its first place. The place is -1 where the largest is not finite or any value is NaN.
struct Top {
    float value;
    int place;
};

inline Top top_of(const float* x, int count) {
    f32x16 highest = splat(kNone);
    uint32_t sound = 0xffff;
    for (int i = 0; i < count; i += kLanes) {
        const f32x16 values = strip(x + i, count - i);
        sound &= at_most(splat(kNone), values);
        highest = maximum(values, highest);
    }
    const float value = largest(highest);
    if (sound != 0xffff || !std::isfinite(value)) return {value, -1};
    for (int i = 0;; i += kLanes)
        if (const uint32_t hits = at_most(splat(value), strip(x + i, count - i))) return {value, i + __builtin_ctz(hits)};
}

// Temperature (0 is greedy) and filters of a row. top_k 0, top_p 1 and min_p 0 switch a filter off.
struct Shape {
    double temperature, top_k, top_p, min_p;

    bool filters() const { return temperature > 0.0 && (top_k > 0.0 || top_p < 1.0 || min_p > 0.0); }
    float divisor() const { return static_cast<float>(temperature); }
};

struct Scratch {
    std::vector<float> logits, weights;
    std::vector<std::pair<float, int>> best;
};

// The distribution of a row: the softmax of logits over temperature. `top` has no place where nothing can be chosen.
struct Distribution {
    const float* logits;
    int count;
    float temperature;
    Top top;
};

// Applies min_p, then top_k, then top_p: logits over temperature, -inf for removed tokens. Ties go to the lower id.
inline Distribution distribution_of(const float* logits, int count, const Shape& shape, Scratch& s) {
    const Distribution plain{logits, count, shape.divisor(), top_of(logits, count)};
    if (plain.top.place < 0 || !shape.filters()) return plain;
    s.logits.resize(count + kLanes), s.weights.resize(count + kLanes);
    float *filtered = s.logits.data(), *w = s.weights.data();
    const f32x16 top = splat(plain.top.value / plain.temperature), none = splat(kNone);
    const f32x16 least_share = splat(static_cast<float>(shape.min_p));
    f32x16 sums = splat(0.0f);
    for (int i = 0; i < count; i += kLanes) {
        f32x16 scaled = strip(logits + i, count - i) / splat(shape.divisor()), weight = exponential(scaled - top);
        scaled = where_less(weight, least_share, none, scaled);
        weight = where_less(weight, least_share, splat(0.0f), weight);
        store(filtered + i, scaled), store(w + i, weight);
        sums += weight;
    }
    const int limit = shape.top_k > 0.0 ? std::min(count, static_cast<int>(std::min(shape.top_k, 1e9))) : count;
    if (limit >= count && shape.top_p >= 1.0) return {filtered, count, 1.0f, top_of(filtered, count)};
    size_t kept = 0;
    for (float least = 0x1p-7f; !kept; least = least > 0x1p-100f ? least * least : 0.0f) {
        s.best.clear();  // the most probable tokens: few at first, more until they contain the cut
        for (int i = 0; i < count; i++)
            if (w[i] >= least && filtered[i] > kNone) s.best.emplace_back(-filtered[i], i);
        const bool all = least == 0.0f, cut = limit < count, enough = cut && s.best.size() >= static_cast<size_t>(limit);
        if (cut && !enough && !all) continue;
        std::sort(s.best.begin(), s.best.end());
        if (enough) s.best.resize(limit);
        double total_mass = cut ? 0.0 : sum(sums), mass_before = 0.0;
        for (size_t i = 0; cut && i < s.best.size(); i++) total_mass += w[s.best[i].second];
        size_t inside = 0;
        for (; inside < s.best.size() && mass_before < shape.top_p * total_mass; inside++)
            mass_before += w[s.best[inside].second];
        if (inside < s.best.size() || all || enough) kept = std::max<size_t>(inside, 1);
    }
    std::fill(filtered, filtered + count, kNone);
    for (size_t i = 0; i < kept; i++) filtered[s.best[i].second] = -s.best[i].first;
    return {filtered, count, 1.0f, top_of(filtered, count)};
}

// The choice, or -1 where there is none. Temperature 0 is greedy.
inline int64_t draw(const Distribution& dist, const Noise& noise) {
    if (dist.top.place < 0 || dist.temperature == 0.0f) return dist.top.place;
    // A token wins only if its noise exceeds x = top + g(top) - its logit, and g > x implies bits < 2^32 exp(-x).
    // 1 + f >= 2^f bounds that power from above. The margin is for rounding, and bits are halved to fit a signed integer.
    uint32_t bits[kLanes];
    store_words(bits, noise.strip(dist.top.place, 1));
    const double best_score = static_cast<double>(dist.top.value / dist.temperature) + gumbel(bits[0]);
    const f32x16 offset = splat(static_cast<float>(31.0 + 0.02 + std::abs(best_score) * 1e-6 - best_score * 1.44269504));
    double best = -std::numeric_limits<double>::infinity();
    int64_t chosen = -1;
    for (int i = 0; i < dist.count; i += kLanes) {
        const f32x16 scaled = strip(dist.logits + i, dist.count - i) / splat(dist.temperature);
        const Words random = noise.strip(i, dist.count - i);
        const f32x16 power = minimum(splat(33.0f), maximum(splat(0.0f), scaled * splat(1.44269504f) + offset));
        const f32x16 bound = as_float(nearest_integers((power + splat(127.0f)) * splat(0x1p23f)));
        uint32_t hits = at_most(to_float(shift_down<1>(random)), bound);
        if (!hits) continue;
        float values[kLanes];
        store(values, scaled), store_words(bits, random);
        for (; hits; hits &= hits - 1) {
            const int j = __builtin_ctz(hits);
            const double score = static_cast<double>(values[j]) + gumbel(bits[j]);
            if (score > best) best = score, chosen = i + j;
        }
    }
    return chosen;
}

// -log1p(-v) to five digits, v the uniform numbers of the bits. The Gumbel noise is -log of the result.
inline f32x16 waiting_time(Words bits) {
    const f32x16 one = splat(1.0f), half = splat(0.5f), v = (to_float(shift_down<1>(bits)) + splat(0.25f)) * splat(0x1p-31f);
    const Words raw = as_words(one - v);
    const f32x16 m = as_float((raw & splat_word(0x7fffffu)) ^ splat_word(0x3f800000u));  // 1 - v = m 2^e
    const f32x16 e = to_float(shift_down<23>(raw) - splat_word(127));
    const f32x16 s = where_less(v, half, v, m - one) / where_less(v, half, splat(2.0f) - v, m + one), square = s * s;
    f32x16 series = splat(1.0f / 9);
    for (float c : {1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) series = fma(series, square, splat(c));
    series = series * s * splat(2.0f);  // 2 atanh(s): -log1p(-v), or log m
    const f32x16 late = splat(0.0f) - fma(e, splat(0.69314718f), series);
    return minimum(splat(16.635532f), where_less(v, half, series, late));
}

// The `best` most probable choices, in order, and their chances: the softmax of the noisy scores. The draft temperature
// divides the logits before the noise is added. Tokens are -1 where there is no choice.
inline void rank(const Distribution& dist, float draft_temperature, const Noise& noise, int best, Scratch& s, int64_t* tokens,
                 double* chances) {
    if (dist.top.place < 0) return std::fill(tokens, tokens + best, -1);
    s.weights.resize(dist.count + kLanes);
    float* w = s.weights.data();
    const float divisor = dist.temperature * draft_temperature;
    const f32x16 scale = splat(divisor == 0.0f ? 1.0f : 1.0f / divisor);
    f32x16 sums = splat(0.0f);
    for (int i = 0; i < dist.count; i += kLanes) {
        f32x16 weight = exponential((strip(dist.logits + i, dist.count - i) - splat(dist.top.value)) * scale);
        if (divisor != 0.0f) weight = weight / waiting_time(noise.strip(i, dist.count - i));
        store(w + i, weight);
        sums += weight;
    }
    const double total = sum(sums);
    for (int k = 0; k < best; k++) {
        const Top next = top_of(w, dist.count);
        tokens[k] = next.place;
        chances[k] = next.value / total;
        if (next.place >= 0) w[next.place] = -1.0f;
    }
}

}  // namespace outrider
