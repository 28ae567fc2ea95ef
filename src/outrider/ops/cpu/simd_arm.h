// What simd.h needs of NEON with dot products (ARMv8.2): everything that is no operator of plain vectors.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace outrider {

// Sixteen lanes are four registers.
constexpr int kRegisters = 8, kRegisterBytes = 16;  // 32 registers hold four quarters each
using Floats = float32x4_t;
using Integers = uint32x4_t;
struct f32x16 { Floats a, b, c, d; };
struct Words { Integers a, b, c, d; };  // 16 x 32 bits, whatever they mean
inline f32x16 joined(Floats a, Floats b, Floats c, Floats d) { return {a, b, c, d}; }
inline Words joined(Integers a, Integers b, Integers c, Integers d) { return {a, b, c, d}; }
template <class Do, class... X>
inline auto each(const Do& f, X... x) { return joined(f(x.a...), f(x.b...), f(x.c...), f(x.d...)); }
template <class Do>
inline auto each_place(const Do& f) { return joined(f(0), f(4), f(8), f(12)); }

// The second where one is NaN.
inline f32x16 maximum(f32x16 a, f32x16 b) { return each([](auto x, auto y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }, a, b); }
inline f32x16 minimum(f32x16 a, f32x16 b) { return each([](auto x, auto y) { return vbslq_f32(vcltq_f32(x, y), x, y); }, a, b); }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return each([](auto x, auto y, auto z) { return vfmaq_f32(z, x, y); }, a, b, c);
}
inline f32x16 to_float(Words a) { return each([](auto x) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x)); }, a); }
// -2^31 where it does not fit, or for NaN
inline Words nearest_integers(f32x16 a) {
    const auto nearest = [](auto x) {
        const uint32x4_t fits = vcaltq_f32(x, vdupq_n_f32(0x1p31f));
        return vbslq_u32(fits, vreinterpretq_u32_s32(vcvtnq_s32_f32(x)), vdupq_n_u32(0x80000000u));
    };
    return each(nearest, a);
}

inline f32x16 splat(float x) { return each_place([&](int) { return vdupq_n_f32(x); }); }
inline f32x16 load(const float* p) { return each_place([&](int at) { return vld1q_f32(p + at); }); }
inline Words splat_word(uint32_t x) { return each_place([&](int) { return vdupq_n_u32(x); }); }

// Sixteen float16 values, and one of them.
inline f32x16 load_halves(const void* p) {
    return each_place([&](int at) {
        float16x4_t half;
        std::memcpy(&half, static_cast<const char*>(p) + 2 * at, sizeof half);
        return vcvt_f32_f16(half);
    });
}
inline float from_half(uint16_t bits) {
    __fp16 half;
    std::memcpy(&half, &bits, sizeof half);
    return half;
}
inline uint16_t to_half(float x) {
    const auto half = static_cast<__fp16>(x);
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}

#define OUTRIDER_OF_BYTES(name, intrinsic)                                                                                 \
    inline Words name(Words a, Words b) {                                                                                  \
        const auto both = [](auto x, auto y) { return (Integers)intrinsic((uint8x16_t)x, (uint8x16_t)y); };                \
        return each(both, a, b);                                                                                           \
    }
// of bytes, within each register
OUTRIDER_OF_BYTES(look_up, vqtbl1q_u8)
OUTRIDER_OF_BYTES(join_bytes_low, vzip1q_u8)
OUTRIDER_OF_BYTES(join_bytes_high, vzip2q_u8)
#undef OUTRIDER_OF_BYTES

// Sixteen bytes.
using Bytes = uint8x16_t;
inline Bytes look_up(Bytes table, Bytes place) { return vqtbl1q_u8(table, place); }
// The low byte of each two, or the high one: those of a, then those of b.
inline Bytes low_bytes(Bytes a, Bytes b) { return vuzp1q_u8(a, b); }
inline Bytes high_bytes(Bytes a, Bytes b) { return vuzp2q_u8(a, b); }
// Four rows of four words become columns.
inline void transpose(Bytes (&row)[4]) {
    const auto a = (uint32x4_t)row[0], b = (uint32x4_t)row[1], c = (uint32x4_t)row[2], d = (uint32x4_t)row[3];
    const uint32x4_t even = vzip1q_u32(a, c), odd = vzip1q_u32(b, d), even_2 = vzip2q_u32(a, c), odd_2 = vzip2q_u32(b, d);
    row[0] = (Bytes)vzip1q_u32(even, odd), row[1] = (Bytes)vzip2q_u32(even, odd);
    row[2] = (Bytes)vzip1q_u32(even_2, odd_2), row[3] = (Bytes)vzip2q_u32(even_2, odd_2);
}

// A bit per lane.
inline uint32_t at_most(f32x16 a, f32x16 b) {
    const Words is = each([](auto x, auto y) { return vcleq_f32(x, y); }, a, b);
    const uint16x8_t low = vuzp1q_u16((uint16x8_t)is.a, (uint16x8_t)is.b), high = vuzp1q_u16((uint16x8_t)is.c, (uint16x8_t)is.d);
    const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bits = vuzp1q_u8((uint8x16_t)low, (uint8x16_t)high) & bit;
    return vaddv_u8(vget_low_u8(bits)) | static_cast<uint32_t>(vaddv_u8(vget_high_u8(bits))) << 8;
}
inline f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    return each([](auto x, auto y, auto p, auto q) { return vbslq_f32(vcltq_f32(x, y), p, q); }, a, b, yes, no);
}
// Lanes together, always in the same pairs: those of AVX.
template <class Join>
inline float across(f32x16 x, Join join) {
    const Floats quarter = join(join(x.a, x.c), join(x.b, x.d));
    const Floats half = join(quarter, vextq_f32(quarter, quarter, 2));
    return join(half, vextq_f32(half, half, 1))[0];
}
inline float sum(f32x16 a) { return across(a, [](Floats x, Floats y) { return x + y; }); }
inline float largest(f32x16 a) { return across(a, [](Floats x, Floats y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }); }

inline void pause() { asm volatile("isb"); }

// Rounding to nearest without traps, and denormals are zero; and what was before.
inline uint64_t float_mode() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
inline void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
constexpr uint64_t kFlushing = 1 << 24;

}  // namespace outrider
