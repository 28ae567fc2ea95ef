// Blocks of GGUF tensors as integers in groups; model/formats/gguf_blocks.py is the definition.
#pragma once

#include "simd.h"

namespace outrider {

enum BlockKind : int64_t { kQ4_0 = 2, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14 };  // as in the files

// A value is scale * (code - offset), or scale * code - least where there is one.
struct BlockForm {
    int values, bytes;  // of a block
    int group;          // values that share a scale
    int offset;         // negative: groups have a least value
};

inline BlockForm form_of(int64_t kind) {
    switch (kind) {
        case kQ4_0: return {32, 18, 32, 8};
        case kQ8_0: return {32, 34, 32, 128};
        case kQ4_K: return {256, 144, 32, -1};
        case kQ5_K: return {256, 176, 32, -1};
        default: return {256, 210, 16, 32};
    }
}

inline float half_at(const uint8_t* b) {
    uint16_t half;
    std::memcpy(&half, b, sizeof half);
    return from_half(half);
}

// `count` bytes: low nibbles to `codes`, high nibbles behind them.
inline void split_nibbles(const uint8_t* from, int count, uint8_t* codes) {
    for (int i = 0; i < count; i++) codes[i] = from[i] & 15, codes[count + i] = from[i] >> 4;
}

// Scales and least values of 8 groups, whose six bits lie in 12 bytes.
template <class Put>
void put_six_bits(const uint8_t* b, const Put& put) {
    const float scale = half_at(b), least = half_at(b + 2);
    const uint8_t *first = b + 4, *second = b + 8, *rest = b + 12;
    for (int g = 0; g < 4; g++) {
        put(g, scale * static_cast<float>(first[g] & 63), least * static_cast<float>(second[g] & 63));
        put(4 + g, scale * static_cast<float>((rest[g] & 15) | (first[g] >> 2 & 48)),
            least * static_cast<float>((rest[g] >> 4) | (second[g] >> 2 & 48)));
    }
}

// Writes the codes of a block, and calls put(group, scale, least) for each of its groups.
template <class Put>
void read_block(int64_t kind, const uint8_t* b, uint8_t* codes, const Put& put) {
    if (kind == kQ4_0) {
        split_nibbles(b + 2, 16, codes), put(0, half_at(b), 0.0f);
    } else if (kind == kQ8_0) {
        for (int i = 0; i < 32; i++) codes[i] = b[2 + i] ^ 128;
        put(0, half_at(b), 0.0f);
    } else if (kind == kQ6_K) {
        for (int part = 0; part < 2; part++, codes += 128) {
            split_nibbles(b + 64 * part, 64, codes);
            for (int i = 0; i < 128; i++) codes[i] |= (b[128 + 32 * part + i % 32] >> i / 32 * 2 & 3) << 4;
        }
        for (int g = 0; g < 16; g++) put(g, half_at(b + 208) * static_cast<float>(static_cast<int8_t>(b[192 + g])), 0.0f);
    } else {
        const uint8_t* low = b + (kind == kQ5_K ? 48 : 16);
        for (int part = 0; part < 4; part++) split_nibbles(low + 32 * part, 32, codes + 64 * part);
        for (int i = 0; kind == kQ5_K && i < 256; i++) codes[i] |= (b[16 + i % 32] >> i / 32 & 1) << 4;
        put_six_bits(b, put);
    }
}

}  // namespace outrider
