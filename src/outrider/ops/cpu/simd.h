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

#if defined(__AVX512F__)

constexpr int kRegisters = 32;
using Words = __m512i;  // 16 x 32 bits, whatever they mean
struct f32x16 { __m512 v; };

inline f32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline f32x16 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps((1u << n) - 1, p)}; }
inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
inline void store_first(float* p, f32x16 a, int n) { _mm512_mask_storeu_ps(p, (1u << n) - 1, a.v); }
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 maximum(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where one is NaN
inline f32x16 minimum(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 magnitude(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline f32x16 rounded(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline f32x16 scaled_by_power(f32x16 a, f32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

inline Words zero_words() { return _mm512_setzero_si512(); }
inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline void store_words(void* p, Words a) { _mm512_storeu_si512(p, a); }
inline Words splat_word(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words sub_words(Words a, Words b) { return _mm512_sub_epi32(a, b); }
inline Words multiply_words(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
inline Words and_words(Words a, Words b) { return _mm512_and_si512(a, b); }
inline Words xor_words(Words a, Words b) { return _mm512_xor_si512(a, b); }
template <int n> inline Words shift_down(Words a) { return _mm512_srli_epi32(a, n); }
inline uint32_t at_most(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }  // a bit per lane
inline f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline f32x16 to_float(Words a) { return {_mm512_cvtepi32_ps(a)}; }
inline Words nearest_integers(f32x16 a) { return _mm512_cvtps_epi32(a.v); }
inline void store_low_bytes(void* p, Words a) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
inline Words as_words(f32x16 a) { return _mm512_castps_si512(a.v); }
inline f32x16 as_float(Words a) { return {_mm512_castsi512_ps(a)}; }
inline Words shift_up16(Words a) { return _mm512_slli_epi32(a, 16); }
inline Words widened(const void* halves) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(halves))); }
inline Words keep_high16(Words a) { return _mm512_and_si512(a, _mm512_set1_epi32(static_cast<int>(0xffff0000u))); }
inline Words even_unsigned(Words a) { return _mm512_and_si512(a, _mm512_set1_epi16(0x00ff)); }
inline Words odd_unsigned(Words a) { return _mm512_srli_epi32(_mm512_andnot_si512(_mm512_set1_epi16(0x00ff), a), 8); }
inline Words even_signed(Words a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
inline Words odd_signed(Words a) { return _mm512_srai_epi16(a, 8); }
inline Words multiply_pairs(Words a, Words b) { return _mm512_madd_epi16(a, b); }
// Of bytes, in each quarter by itself.
inline Words repeat_quarter(const void* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline Words look_up(Words table, Words at) { return _mm512_shuffle_epi8(table, at); }
inline Words join_bytes_low(Words low, Words high) { return _mm512_unpacklo_epi8(low, high); }
inline Words join_bytes_high(Words low, Words high) { return _mm512_unpackhi_epi8(low, high); }

#else  // AVX2: two halves of eight

constexpr int kRegisters = 8;  // 16 registers hold two halves each
struct f32x16 { __m256 lo, hi; };
struct Words { __m256i lo, hi; };

inline f32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, f32x16 a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
inline f32x16 load_first(const float* p, int n) {
    float all[kLanes] = {};
    std::memcpy(all, p, n * sizeof(float));
    return load(all);
}
inline void store_first(float* p, f32x16 a, int n) {
    float all[kLanes];
    store(all, a);
    std::memcpy(p, all, n * sizeof(float));
}
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 maximum(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline f32x16 minimum(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline __m256 magnitude8(__m256 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline f32x16 magnitude(f32x16 a) { return {magnitude8(a.lo), magnitude8(a.hi)}; }
inline __m256 rounded8(__m256 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline f32x16 rounded(f32x16 a) { return {rounded8(a.lo), rounded8(a.hi)}; }
// In two halves of the exponent, so that neither overflows for the exponents exp() asks for.
inline __m256 scaled8(__m256 a, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    const __m256i bias = _mm256_set1_epi32(127);
    a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
inline f32x16 scaled_by_power(f32x16 a, f32x16 n) { return {scaled8(a.lo, n.lo), scaled8(a.hi, n.hi)}; }

inline Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Words load_words(const void* p) {
    const auto* half = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(half), _mm256_loadu_si256(half + 1)};
}
inline void store_words(void* p, Words a) {
    auto* half = static_cast<__m256i*>(p);
    _mm256_storeu_si256(half, a.lo), _mm256_storeu_si256(half + 1, a.hi);
}
inline Words splat_word(uint32_t x) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(x));
    return {all, all};
}
inline Words add_words(Words a, Words b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Words sub_words(Words a, Words b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline Words multiply_words(Words a, Words b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline Words and_words(Words a, Words b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline Words xor_words(Words a, Words b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
template <int n> inline Words shift_down(Words a) { return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)}; }
inline uint32_t at_most8(__m256 a, __m256 b) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LE_OQ))); }
inline uint32_t at_most(f32x16 a, f32x16 b) { return at_most8(a.lo, b.lo) | at_most8(a.hi, b.hi) << 8; }
inline __m256 where_less8(__m256 a, __m256 b, __m256 yes, __m256 no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    return {where_less8(a.lo, b.lo, yes.lo, no.lo), where_less8(a.hi, b.hi, yes.hi, no.hi)};
}
inline f32x16 to_float(Words a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Words nearest_integers(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline void store_low_bytes(void* p, Words a) {
    uint32_t word[kLanes];
    store_words(word, a);
    for (int i = 0; i < kLanes; i++) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(word[i]);
}
inline Words as_words(f32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline f32x16 as_float(Words a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline Words shift_up16(Words a) { return {_mm256_slli_epi32(a.lo, 16), _mm256_slli_epi32(a.hi, 16)}; }
inline Words widened(const void* halves) {
    const auto* eight = static_cast<const __m128i*>(halves);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(eight)), _mm256_cvtepu16_epi32(_mm_loadu_si128(eight + 1))};
}
inline __m256i mask8(__m256i a, __m256i m) { return _mm256_and_si256(a, m); }
inline Words keep_high16(Words a) {
    const __m256i m = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {mask8(a.lo, m), mask8(a.hi, m)};
}
inline Words even_unsigned(Words a) {
    const __m256i m = _mm256_set1_epi16(0x00ff);
    return {mask8(a.lo, m), mask8(a.hi, m)};
}
inline Words odd_unsigned(Words a) { return {_mm256_srli_epi16(a.lo, 8), _mm256_srli_epi16(a.hi, 8)}; }
inline __m256i even8(__m256i a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
inline Words even_signed(Words a) { return {even8(a.lo), even8(a.hi)}; }
inline Words odd_signed(Words a) { return {_mm256_srai_epi16(a.lo, 8), _mm256_srai_epi16(a.hi, 8)}; }
inline Words multiply_pairs(Words a, Words b) { return {_mm256_madd_epi16(a.lo, b.lo), _mm256_madd_epi16(a.hi, b.hi)}; }
inline Words repeat_quarter(const void* p) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    return {all, all};
}
inline Words look_up(Words table, Words at) { return {_mm256_shuffle_epi8(table.lo, at.lo), _mm256_shuffle_epi8(table.hi, at.hi)}; }
inline Words join_bytes_low(Words a, Words b) { return {_mm256_unpacklo_epi8(a.lo, b.lo), _mm256_unpacklo_epi8(a.hi, b.hi)}; }
inline Words join_bytes_high(Words a, Words b) { return {_mm256_unpackhi_epi8(a.lo, b.lo), _mm256_unpackhi_epi8(a.hi, b.hi)}; }

#endif

inline f32x16& operator+=(f32x16& a, f32x16 b) { return a = a + b; }

// Lanes together, always in the same pairs.
#if defined(__AVX512F__)
inline float sum(f32x16 a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }
#else
template <class Join>
inline float across(f32x16 a, Join join) {
    float lane[kLanes];
    store(lane, a);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = join(lane[i], lane[i + width]);
    return lane[0];
}
inline float sum(f32x16 a) {
    return across(a, [](float x, float y) { return x + y; });
}
inline float largest(f32x16 a) {
    return across(a, [](float x, float y) { return x > y ? x : y; });
}
#endif

// e^x to within 2 units in the last place; 0 from -104 down (so also at -inf), NaN for NaN.
inline f32x16 exponential(f32x16 x) {
    x = minimum(splat(88.8f), maximum(splat(-104.0f), x));
    const f32x16 n = rounded(x * splat(1.44269504f));
    const f32x16 r = fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145752f), x));
    f32x16 p = splat(1.0f / 720.0f);
    for (float c : {1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
    return scaled_by_power(p, n);
}

// The three kinds of weights. `Acc` gathers steps; `join` adds one.
struct F32 {
    static constexpr int per_step = 1;
    using Acc = f32x16;
    static Acc zero() { return splat(0.0f); }
    static Acc join(Acc acc, Words w, Words x) { return fma(as_float(x), as_float(w), acc); }
};

struct BF16 {
    static constexpr int per_step = 2;
    using Acc = f32x16;
    static Acc zero() { return splat(0.0f); }
    static Acc join(Acc acc, Words w, Words x) {
#if defined(__AVX512BF16__)
        return {_mm512_dpbf16_ps(acc.v, (__m512bh)w, (__m512bh)x)};
#else
        acc = fma(as_float(shift_up16(x)), as_float(shift_up16(w)), acc);
        return fma(as_float(keep_high16(x)), as_float(keep_high16(w)), acc);
#endif
    }
};

// Activations are bytes with 128 added, because the instruction wants one unsigned side; see Linear::offset.
struct I8 {
    static constexpr int per_step = 4;
    using Acc = Words;
    static Acc zero() { return zero_words(); }
    static Acc join(Acc acc, Words w, Words x) {
#if defined(__AVX512VNNI__)
        return _mm512_dpbusd_epi32(acc, x, w);
#else
        acc = add_words(acc, multiply_pairs(even_unsigned(x), even_signed(w)));
        return add_words(acc, multiply_pairs(odd_unsigned(x), odd_signed(w)));
#endif
    }
};

inline uint16_t to_bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);  // NaN stays NaN
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t x) {
    const uint32_t u = static_cast<uint32_t>(x) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

}  // namespace outrider
