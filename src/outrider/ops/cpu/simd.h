// Sixteen float lanes on AVX-512, AVX2 or NEON, and the one step every product is made of.
//
// A *step* is 64 bytes of weights: 16 output columns by 1 float, 2 bf16 or 4 int8 values along the inner
// dimension, times one 32-bit word of an activation row that is broadcast to all columns. Whatever the
// processor, an output element is one chain of steps in order of the inner dimension, so its bits depend
// neither on how many rows nor on how many columns are computed beside it.
#pragma once

#include <cstdint>
#include <cstring>

// Registers, and what the operators of plain vectors lack.
#if defined(__aarch64__)
#include "simd_arm.h"
#else
#include "simd_x86.h"
#endif

namespace outrider {

constexpr int kLanes = 16;
using SignedIntegers = int32_t __attribute__((vector_size(kRegisterBytes)));

#define OUTRIDER_OPERATOR(type, op) \
    inline type operator op(type a, type b) { return each([](auto x, auto y) { return x op y; }, a, b); }
OUTRIDER_OPERATOR(f32x16, +)
OUTRIDER_OPERATOR(f32x16, -)
OUTRIDER_OPERATOR(f32x16, *)
OUTRIDER_OPERATOR(f32x16, /)
OUTRIDER_OPERATOR(Words, +)
OUTRIDER_OPERATOR(Words, -)
OUTRIDER_OPERATOR(Words, *)
OUTRIDER_OPERATOR(Words, &)
OUTRIDER_OPERATOR(Words, ^)
#undef OUTRIDER_OPERATOR
template <int n>
inline Words shift_up(Words a) { return each([](auto x) { return x << n; }, a); }
template <int n>
inline Words shift_down(Words a) { return each([](auto x) { return x >> n; }, a); }
template <int n>
inline Words shift_down_signed(Words a) { return each([](auto x) { return (Integers)((SignedIntegers)x >> n); }, a); }
inline Words as_words(f32x16 a) { return each([](auto x) { return (Integers)x; }, a); }
inline f32x16 as_float(Words a) { return each([](auto x) { return (Floats)x; }, a); }
inline f32x16& operator+=(f32x16& a, f32x16 b) { return a = a + b; }

inline Words load_words(const void* p) {
    Words all;
    std::memcpy(&all, p, sizeof all);
    return all;
}
inline void store(float* p, f32x16 a) { std::memcpy(p, &a, sizeof a); }
inline void store_words(void* p, Words a) { std::memcpy(p, &a, sizeof a); }
// The first n values, or sixteen where n is larger; the other lanes are `fill`.
inline f32x16 load_upto(const float* p, int n, float fill = 0.0f) {
    if (n >= kLanes) return load(p);
    float all[kLanes];
    for (int i = 0; i < kLanes; i++) all[i] = i < n ? p[i] : fill;
    return load(all);
}
inline void store_upto(float* p, f32x16 a, int n) { n < kLanes ? void(std::memcpy(p, &a, n * sizeof(float))) : store(p, a); }
inline Words high_halves(Words a) { return a & splat_word(0xffff0000u); }
inline f32x16 magnitude(f32x16 a) { return as_float(as_words(a) & splat_word(0x7fffffffu)); }

#if !defined(__AVX512F__)
// In two halves of the exponent, so that neither overflows for the exponents exp() asks for.
inline f32x16 scaled_by_power(f32x16 a, Words n) {
    const Words half = shift_down_signed<1>(n);
    const auto power = [](Words by) { return as_float(shift_up<23>(by + splat_word(127))); };
    return a * power(half) * power(n - half);
}
#endif

// e^x to within 2 units in the last place; 0 from -104 down (so also at -inf), NaN for NaN.
inline f32x16 exponential(f32x16 x) {
    x = minimum(splat(88.8f), maximum(splat(-104.0f), x));
    const Words power = nearest_integers(x * splat(1.44269504f));
    const f32x16 n = to_float(power);
    const f32x16 r = fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145752f), x));
    f32x16 p = splat(1.0f / 720.0f);
    for (float c : {1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
    return scaled_by_power(p, power);
}

// The kinds of weights. `Acc` accumulates steps, and `join` adds one step with a row's word from memory. `encode` turns
// sixteen values into the words that a product reads; where rows become integers a value is multiplied by `units` first.
struct F32 {
    static constexpr int per_step = 1;
    using Sums = F32;  // kinds with equal sums finish alike
    static constexpr bool integers = false, grouped = false, tiled = false;
    using Acc = f32x16;
    static Acc zero() { return splat(0.0f); }
    static Acc join(Acc acc, Words w, const uint32_t* x) { return fma(as_float(splat_word(*x)), as_float(w), acc); }
    static void encode(f32x16 v, float, uint32_t* out) { store_words(out, as_words(v)); }
};

struct BF16 {
    static constexpr int per_step = 2;
    using Sums = BF16;
    static constexpr bool integers = false, grouped = false, tiled = true;
    using Acc = f32x16;
    static Acc zero() { return splat(0.0f); }
#if defined(__AVX512BF16__)
    // written out: gcc 12 would load the word first, and run out of registers
    static Acc join(Acc acc, Words w, const uint32_t* x) {
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*x));
        return acc;
    }
    static void encode(f32x16 v, float, uint32_t* out) {
        const __m256bh half = _mm512_cvtneps_pbh(v.v);
        std::memcpy(out, &half, sizeof half);
    }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    static Acc join(Acc acc, Words w, const uint32_t* x) {
        const auto row = (bfloat16x8_t)vdupq_n_u32(*x);
        return each([row](auto sums, auto columns) { return vbfdotq_f32(sums, (bfloat16x8_t)columns, row); }, acc, w);
    }
    static void encode(f32x16 v, float, uint32_t* out) {
        const bfloat16x8_t half[2] = {vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.a), v.b), vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.c), v.d)};
        std::memcpy(out, half, sizeof half);
    }
#else
    static Acc join(Acc acc, Words w, const uint32_t* x) {
        acc = fma(as_float(splat_word(*x << 16)), as_float(shift_up<16>(w)), acc);
        return fma(as_float(splat_word(*x & 0xffff0000u)), as_float(high_halves(w)), acc);
    }
    static uint16_t rounded(uint32_t u) {
        if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);  // NaN stays NaN
        return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
    }
    static void encode(f32x16 v, float, uint32_t* out) {
        uint32_t x[kLanes];
        uint16_t half[kLanes];
        store_words(x, as_words(v));
        for (int i = 0; i < kLanes; i++) half[i] = rounded(x[i]);
        std::memcpy(out, half, sizeof half);
    }
#endif
};

// Weights are bytes with 128 added, because most instructions want one unsigned side. Those of ARMv8.2 want none, so that
// sums lack `missing` times the row's own.
struct I8 {
    static constexpr int per_step = 4;
    using Sums = I8;
    static constexpr bool integers = true, grouped = false, tiled = true;
    using Acc = Words;
    static Acc zero() { return splat_word(0); }
#if defined(__AVX512VNNI__)
    static constexpr int missing = 0;
    static Acc join(Acc acc, Words w, const uint32_t* x) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*x));
        return acc;
    }
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    static constexpr int missing = 0;
    static Acc join(Acc acc, Words w, const uint32_t* x) {
        const auto row = (int8x16_t)vdupq_n_u32(*x);
        const auto dot = [row](auto sums, auto columns) { return (Integers)vusdotq_s32((int32x4_t)sums, (uint8x16_t)columns, row); };
        return each(dot, acc, w);
    }
#elif defined(__aarch64__)
    static constexpr int missing = 128;
    static Acc join(Acc acc, Words w, const uint32_t* x) {
        const auto row = (int8x16_t)vdupq_n_u32(*x);
        const auto dot = [row](auto sums, auto columns) { return (Integers)vdotq_s32((int32x4_t)sums, (int8x16_t)columns, row); };
        return each(dot, acc, w ^ splat_word(0x80808080u));
    }
#else
    static constexpr int missing = 0;
    static Acc join(Acc acc, Words w, const uint32_t* x) {
        const auto pairs = [](auto a, auto b) {
            return (Integers)OUTRIDER_WIDE(madd_epi16)((RawIntegers)a, OUTRIDER_WIDE(srai_epi16)((RawIntegers)b, 8));
        };
        const Words all = splat_word(*x), even = each([](auto v) { return (Integers)OUTRIDER_WIDE(slli_epi16)((RawIntegers)v, 8); }, all);
        const Words low = splat_word(0x00ff00ffu);
        return acc + each(pairs, w & low, even) + each(pairs, shift_down<8>(w) & low, all);
    }
#endif
    static void encode(f32x16 v, float units, uint32_t* out) {
        uint32_t word[kLanes];
        store_words(word, look_up(nearest_integers(v * splat(units)), splat_word(0x0c080400u)));  // the low bytes of each four
        for (int i = 0; i < 4; i++) out[i] = word[4 * i];
    }
};

// Unsigned integers of four or eight bits, in groups along the inner dimension with a scale for each column; see groups.h.
// With `has_least` each group and column has a value to subtract too, otherwise all integers share one offset.
template <int bits, bool least>
struct Grouped : I8 {
    using Sums = Grouped<8, false>;
    static constexpr bool grouped = true, tiled = false, has_least = least;
    static constexpr int block_bytes = 32 * bits;  // of four steps
    using Acc = f32x16;
    // What a product subtracts from the sum of a group, or the sum of the row's integers where groups have a value to subtract.
    static uint32_t group_sum(float sum, int64_t offset) {
        const int32_t whole = static_cast<int32_t>(sum * static_cast<float>(offset - missing));
        uint32_t word;
        least ? std::memcpy(&word, &sum, sizeof word) : std::memcpy(&word, &whole, sizeof word);
        return word;
    }
    static f32x16 in_group(Words sums, uint32_t of_row) {
        if (!least) return to_float(sums - splat_word(of_row));
        float row;
        std::memcpy(&row, &of_row, sizeof row);
        return to_float(missing ? sums + splat_word(static_cast<uint32_t>(missing * static_cast<int32_t>(row))) : sums);
    }
    template <int half>
    static void pair(const char* w, Words* step) {
        if (bits == 8) {
            step[0] = load_words(w + half * 128), step[1] = load_words(w + half * 128 + 64);
        } else {
            const Words both = load_words(w + half * 64), nibble = splat_word(0x0f0f0f0fu);
            step[0] = both & nibble, step[1] = shift_down<4>(both) & nibble;
        }
    }
};

}  // namespace outrider
