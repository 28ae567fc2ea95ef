// Sixteen float lanes on AVX-512 or AVX2, and the one step every product is made of.
//
// A *step* is 64 bytes of weights: 16 output columns by 1 float, 2 bf16 or 4 int8 values along the inner
// dimension, times one 32-bit word of an activation row that is broadcast to all columns. Whatever the
// processor, an output element is one chain of steps in order of the inner dimension, so its bits depend
// neither on how many rows nor on how many columns are computed beside it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace outrider {

constexpr int kLanes = 16;

// Sixteen lanes are one register of AVX-512 or two of AVX2. The functions below are written once for both.
#if defined(__AVX512F__)
constexpr int kRegisters = 32;
using Floats = __m512;
using Integers = __m512i;
#define OUTRIDER_WIDE(name) _mm512_##name
struct f32x16 { Floats v; };
struct Words { Integers v; };  // 16 x 32 bits, whatever they mean
inline f32x16 joined(Floats v) { return {v}; }
inline Words joined(Integers v) { return {v}; }
template <class Do, class... X>
inline auto each(const Do& f, X... x) { return joined(f(x.v...)); }
template <class Do>
inline auto each_place(const Do& f) { return joined(f(0)); }
#else
constexpr int kRegisters = 8;  // 16 registers hold two halves each
using Floats = __m256;
using Integers = __m256i;
#define OUTRIDER_WIDE(name) _mm256_##name
struct f32x16 { Floats lo, hi; };
struct Words { Integers lo, hi; };
inline f32x16 joined(Floats lo, Floats hi) { return {lo, hi}; }
inline Words joined(Integers lo, Integers hi) { return {lo, hi}; }
template <class Do, class... X>
inline auto each(const Do& f, X... x) { return joined(f(x.lo...), f(x.hi...)); }
template <class Do>
inline auto each_place(const Do& f) { return joined(f(0), f(8)); }
#endif

#define OUTRIDER_BINARY(type, name, intrinsic) \
    inline type name(type a, type b) { return each([](auto x, auto y) { return OUTRIDER_WIDE(intrinsic)(x, y); }, a, b); }
OUTRIDER_BINARY(f32x16, operator+, add_ps)
OUTRIDER_BINARY(f32x16, operator-, sub_ps)
OUTRIDER_BINARY(f32x16, operator*, mul_ps)
OUTRIDER_BINARY(f32x16, operator/, div_ps)
OUTRIDER_BINARY(f32x16, maximum, max_ps)  // the second where one is NaN
OUTRIDER_BINARY(f32x16, minimum, min_ps)
OUTRIDER_BINARY(Words, operator+, add_epi32)
OUTRIDER_BINARY(Words, operator-, sub_epi32)
OUTRIDER_BINARY(Words, operator*, mullo_epi32)
OUTRIDER_BINARY(Words, multiply_pairs, madd_epi16)
// of bytes, within each lane of 16 bytes
OUTRIDER_BINARY(Words, look_up, shuffle_epi8)
OUTRIDER_BINARY(Words, join_bytes_low, unpacklo_epi8)
OUTRIDER_BINARY(Words, join_bytes_high, unpackhi_epi8)
inline f32x16 to_float(Words a) { return each([](auto x) { return OUTRIDER_WIDE(cvtepi32_ps)(x); }, a); }
inline Words nearest_integers(f32x16 a) { return each([](auto x) { return OUTRIDER_WIDE(cvtps_epi32)(x); }, a); }
inline Words operator&(Words a, Words b) { return each([](auto x, auto y) { return x & y; }, a, b); }
inline Words operator^(Words a, Words b) { return each([](auto x, auto y) { return x ^ y; }, a, b); }
template <int n>
inline Words shift_up(Words a) { return each([](auto x) { return OUTRIDER_WIDE(slli_epi32)(x, n); }, a); }
template <int n>
inline Words shift_down(Words a) { return each([](auto x) { return OUTRIDER_WIDE(srli_epi32)(x, n); }, a); }
inline Words as_words(f32x16 a) { return each([](auto x) { return (Integers)x; }, a); }
inline f32x16 as_float(Words a) { return each([](auto x) { return (Floats)x; }, a); }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return each([](auto x, auto y, auto z) { return OUTRIDER_WIDE(fmadd_ps)(x, y, z); }, a, b, c);
}
inline f32x16& operator+=(f32x16& a, f32x16 b) { return a = a + b; }

inline f32x16 splat(float x) { return each_place([&](int) { return OUTRIDER_WIDE(set1_ps)(x); }); }
inline Words splat_word(uint32_t x) { return each_place([&](int) { return OUTRIDER_WIDE(set1_epi32)(static_cast<int>(x)); }); }
inline f32x16 load(const float* p) { return each_place([&](int at) { return OUTRIDER_WIDE(loadu_ps)(p + at); }); }
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
// Sixteen float16 values.
inline f32x16 load_halves(const void* p) {
    return each_place([&](int at) {
        const char* from = static_cast<const char*>(p) + 2 * at;
#if defined(__AVX512F__)
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
    });
}
inline Words high_halves(Words a) { return a & splat_word(0xffff0000u); }
inline f32x16 magnitude(f32x16 a) { return as_float(as_words(a) & splat_word(0x7fffffffu)); }

#if defined(__AVX512F__)
inline f32x16 scaled_by_power(f32x16 a, Words n) { return {_mm512_scalef_ps(a.v, to_float(n).v)}; }
inline uint32_t at_most(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }  // a bit per lane
inline f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
// Lanes together, always in the same pairs.
inline float sum(f32x16 a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }
#else
// In two halves of the exponent, so that neither overflows for the exponents exp() asks for.
inline f32x16 scaled_by_power(f32x16 a, Words n) {
    const Words half = each([](auto x) { return _mm256_srai_epi32(x, 1); }, n);
    const auto power = [](Words by) { return as_float(shift_up<23>(by + splat_word(127))); };
    return a * power(half) * power(n - half);
}
inline uint32_t at_most(f32x16 a, f32x16 b) {
    const f32x16 is = each([](auto x, auto y) { return _mm256_cmp_ps(x, y, _CMP_LE_OQ); }, a, b);
    return static_cast<uint32_t>(_mm256_movemask_ps(is.lo) | _mm256_movemask_ps(is.hi) << 8);
}
inline f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    const auto pick = [](auto x, auto y, auto p, auto q) { return _mm256_blendv_ps(q, p, _mm256_cmp_ps(x, y, _CMP_LT_OQ)); };
    return each(pick, a, b, yes, no);
}
template <class Join>
inline float across(f32x16 a, Join join) {
    float lane[kLanes];
    store(lane, a);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = join(lane[i], lane[i + width]);
    return lane[0];
}
inline float sum(f32x16 a) { return across(a, [](float x, float y) { return x + y; }); }
inline float largest(f32x16 a) { return across(a, [](float x, float y) { return x > y ? x : y; }); }
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

// Weights are bytes with 128 added, because the instruction wants one unsigned side.
struct I8 {
    static constexpr int per_step = 4;
    using Sums = I8;
    static constexpr bool integers = true, grouped = false, tiled = true;
    using Acc = Words;
    static Acc zero() { return splat_word(0); }
    static Acc join(Acc acc, Words w, const uint32_t* x) {
#if defined(__AVX512VNNI__)
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*x));
        return acc;
#else
        const auto pairs = [](auto a, auto b) { return OUTRIDER_WIDE(madd_epi16)(a, OUTRIDER_WIDE(srai_epi16)(b, 8)); };
        const Words all = splat_word(*x), even = each([](auto v) { return OUTRIDER_WIDE(slli_epi16)(v, 8); }, all);
        const Words low = splat_word(0x00ff00ffu);
        return acc + each(pairs, w & low, even) + each(pairs, shift_down<8>(w) & low, all);
#endif
    }
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
    static uint32_t group_sum(float sum, int64_t offset) {
        const int32_t whole = static_cast<int32_t>(sum * static_cast<float>(offset));
        uint32_t word;
        least ? std::memcpy(&word, &sum, sizeof word) : std::memcpy(&word, &whole, sizeof word);
        return word;
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
