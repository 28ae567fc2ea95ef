// What simd.h needs of AVX-512 or AVX2: everything that is no operator of plain vectors.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace outrider {

// Sixteen lanes are one register of AVX-512 or two of AVX2. Most functions are written once for both.
#if defined(__AVX512F__)
constexpr int kRegisters = 32, kRegisterBytes = 64;
using RawFloats = __m512;
using RawIntegers = __m512i;
#define OUTRIDER_WIDE(name) _mm512_##name
#else
constexpr int kRegisters = 8, kRegisterBytes = 32;  // 16 registers hold two halves each
using RawFloats = __m256;
using RawIntegers = __m256i;
#define OUTRIDER_WIDE(name) _mm256_##name
#endif
using Floats = float __attribute__((vector_size(kRegisterBytes)));
using Integers = uint32_t __attribute__((vector_size(kRegisterBytes)));

#if defined(__AVX512F__)
struct f32x16 { Floats v; };
struct Words { Integers v; };  // 16 x 32 bits, whatever they mean
inline f32x16 joined(Floats v) { return {v}; }
inline Words joined(Integers v) { return {v}; }
template <class Do, class... X>
inline auto each(const Do& f, X... x) { return joined(f(x.v...)); }
template <class Do>
inline auto each_place(const Do& f) { return joined(f(0)); }
#else
struct f32x16 { Floats lo, hi; };
struct Words { Integers lo, hi; };
inline f32x16 joined(Floats lo, Floats hi) { return {lo, hi}; }
inline Words joined(Integers lo, Integers hi) { return {lo, hi}; }
template <class Do, class... X>
inline auto each(const Do& f, X... x) { return joined(f(x.lo...), f(x.hi...)); }
template <class Do>
inline auto each_place(const Do& f) { return joined(f(0), f(8)); }
#endif

// The second where one is NaN.
inline f32x16 maximum(f32x16 a, f32x16 b) { return each([](auto x, auto y) { return (Floats)OUTRIDER_WIDE(max_ps)(x, y); }, a, b); }
inline f32x16 minimum(f32x16 a, f32x16 b) { return each([](auto x, auto y) { return (Floats)OUTRIDER_WIDE(min_ps)(x, y); }, a, b); }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return each([](auto x, auto y, auto z) { return (Floats)OUTRIDER_WIDE(fmadd_ps)(x, y, z); }, a, b, c);
}
inline f32x16 to_float(Words a) { return each([](auto x) { return (Floats)OUTRIDER_WIDE(cvtepi32_ps)((RawIntegers)x); }, a); }
// -2^31 where it does not fit, or for NaN
inline Words nearest_integers(f32x16 a) { return each([](auto x) { return (Integers)OUTRIDER_WIDE(cvtps_epi32)(x); }, a); }

inline f32x16 splat(float x) { return each_place([&](int) { return (Floats)OUTRIDER_WIDE(set1_ps)(x); }); }
inline f32x16 load(const float* p) { return each_place([&](int at) { return (Floats)OUTRIDER_WIDE(loadu_ps)(p + at); }); }
inline Words splat_word(uint32_t x) {
    return each_place([&](int) { return (Integers)OUTRIDER_WIDE(set1_epi32)(static_cast<int>(x)); });
}

// Sixteen float16 values, and one of them.
inline f32x16 load_halves(const void* p) {
    return each_place([&](int at) {
        const char* from = static_cast<const char*>(p) + 2 * at;
#if defined(__AVX512F__)
        return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
        return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
    });
}
inline float from_half(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

#define OUTRIDER_OF_BYTES(name, intrinsic)                                                                           \
    inline Words name(Words a, Words b) {                                                                            \
        const auto both = [](auto x, auto y) { return (Integers)OUTRIDER_WIDE(intrinsic)((RawIntegers)x, (RawIntegers)y); }; \
        return each(both, a, b);                                                                                     \
    }
// of bytes, within each lane of 16 bytes
OUTRIDER_OF_BYTES(look_up, shuffle_epi8)
OUTRIDER_OF_BYTES(join_bytes_low, unpacklo_epi8)
OUTRIDER_OF_BYTES(join_bytes_high, unpackhi_epi8)
#undef OUTRIDER_OF_BYTES

// Sixteen bytes.
using Bytes = uint8_t __attribute__((vector_size(16)));
inline Bytes look_up(Bytes table, Bytes place) { return (Bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)place); }
// The low byte of each two, or the high one: those of a, then those of b.
inline Bytes low_bytes(Bytes a, Bytes b) {
    const __m128i low = _mm_set1_epi16(255);
    return (Bytes)_mm_packus_epi16(_mm_and_si128((__m128i)a, low), _mm_and_si128((__m128i)b, low));
}
inline Bytes high_bytes(Bytes a, Bytes b) {
    return (Bytes)_mm_packus_epi16(_mm_srli_epi16((__m128i)a, 8), _mm_srli_epi16((__m128i)b, 8));
}
// Four rows of four words become columns.
inline void transpose(Bytes (&row)[4]) {
    __m128 a = (__m128)row[0], b = (__m128)row[1], c = (__m128)row[2], d = (__m128)row[3];
    _MM_TRANSPOSE4_PS(a, b, c, d);
    row[0] = (Bytes)a, row[1] = (Bytes)b, row[2] = (Bytes)c, row[3] = (Bytes)d;
}

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
inline uint32_t at_most(f32x16 a, f32x16 b) {
    const f32x16 is = each([](auto x, auto y) { return (Floats)_mm256_cmp_ps(x, y, _CMP_LE_OQ); }, a, b);
    return static_cast<uint32_t>(_mm256_movemask_ps(is.lo) | _mm256_movemask_ps(is.hi) << 8);
}
inline f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    const auto pick = [](auto x, auto y, auto p, auto q) { return (Floats)_mm256_blendv_ps(q, p, _mm256_cmp_ps(x, y, _CMP_LT_OQ)); };
    return each(pick, a, b, yes, no);
}
template <class Join>
inline float across(f32x16 a, Join join) {
    float lane[16];
    std::memcpy(lane, &a, sizeof lane);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = join(lane[i], lane[i + width]);
    return lane[0];
}
inline float sum(f32x16 a) { return across(a, [](float x, float y) { return x + y; }); }
inline float largest(f32x16 a) { return across(a, [](float x, float y) { return x > y ? x : y; }); }
#endif

inline void pause() { _mm_pause(); }

// Rounding to nearest without traps, and denormals are zero; and what was before.
inline uint64_t float_mode() { return _mm_getcsr(); }
inline void set_float_mode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
constexpr uint64_t kFlushing = 0x9fc0;

}  // namespace outrider
