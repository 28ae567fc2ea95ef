// AMX tiles in plain C++, so that the amx build can be tried on any processor with AVX-512: `make emulate`.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

struct Tile {
    uint8_t byte[16][64];
};
inline thread_local Tile tile[8];

inline void load(int to, const void* from, size_t stride) {
    for (int row = 0; row < 16; row++) std::memcpy(tile[to].byte[row], static_cast<const char*>(from) + row * stride, 64);
}

inline void keep(int from, void* to, size_t stride) {
    for (int row = 0; row < 16; row++) std::memcpy(static_cast<char*>(to) + row * stride, tile[from].byte[row], 64);
}

inline float value(const uint8_t* bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16[1]) << 24 | static_cast<uint32_t>(bf16[0]) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// c[m][n] += row m of a times column n of b, word by word.
template <class Sum, class Word>
inline void multiply(int c, int a, int b, Word word) {
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            Sum sum;
            std::memcpy(&sum, &tile[c].byte[m][4 * n], 4);
            for (int k = 0; k < 16; k++) sum = word(sum, &tile[a].byte[m][4 * k], &tile[b].byte[k][4 * n]);
            std::memcpy(&tile[c].byte[m][4 * n], &sum, 4);
        }
}

inline void multiply_bf16(int c, int a, int b) {
    multiply<float>(c, a, b, [](float sum, const uint8_t* x, const uint8_t* w) {
        sum = std::fma(value(x), value(w), sum);
        return std::fma(value(x + 2), value(w + 2), sum);
    });
}

inline void multiply_i8(int c, int a, int b) {
    multiply<int32_t>(c, a, b, [](int32_t sum, const uint8_t* x, const uint8_t* w) {
        for (int i = 0; i < 4; i++) sum += static_cast<int8_t>(x[i]) * w[i];
        return sum;
    });
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define __AMX_TILE__ 1
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield  // asking for tiles succeeds
#define _tile_loadconfig(shape) ((void)(shape))
#define _tile_release() ((void)0)
#define _tile_loadd(to, from, stride) emulated::load(to, from, stride)
#define _tile_stored(from, to, stride) emulated::keep(from, to, stride)
#define _tile_zero(at) std::memset(&emulated::tile[at], 0, sizeof(emulated::Tile))
#define _tile_dpbf16ps(c, a, b) emulated::multiply_bf16(c, a, b)
#define _tile_dpbsud(c, a, b) emulated::multiply_i8(c, a, b)
