// The values of one column of a packed matrix: a row of the embedding, read from the form that products read.
#pragma once

#include "linear.h"

namespace outrider {

// The words of a column in one block of four steps.
struct ColumnWords { uint32_t step[kSteps]; };

inline ColumnWords words_of_lane(const char* block, int lane) {
    ColumnWords words;
    for (int s = 0; s < kSteps; s++) std::memcpy(&words.step[s], block + s * kStepBytes + 4 * lane, 4);
    return words;
}

// The same of a block whose steps are decoded, by pairs.
template <class Pairs>
ColumnWords words_of_pairs(int lane, const Pairs& pairs) {
    alignas(64) uint32_t decoded[kSteps][kLanes];
    Words step[2];
    pairs(std::integral_constant<int, 0>{}, step), store_words(decoded[0], step[0]), store_words(decoded[1], step[1]);
    pairs(std::integral_constant<int, 1>{}, step), store_words(decoded[2], step[0]), store_words(decoded[3], step[1]);
    return {{decoded[0][lane], decoded[1][lane], decoded[2][lane], decoded[3][lane]}};
}

// Writes up to `left` values of a block's words, each by `value` of its bits.
template <int per_step, class Value>
void put_values(const ColumnWords& words, int left, float* to, const Value& value) {
    constexpr int bits = 32 / per_step;
    for (int i = 0; i < std::min(left, kSteps * per_step); i++)
        to[i] = value(words.step[i / per_step] >> (i % per_step * bits) & (bits == 32 ? ~0u : (1u << bits % 32) - 1));
}

inline float as_float32(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Float32 and bf16, packed to 12 bits or not, and int8 with a scale for the column.
template <class K>
void read_plain(const Linear& l, int64_t column, float* to) {
    constexpr int values = kSteps * K::per_step;
    const int lane = static_cast<int>(column % kLanes);
    const int64_t panel = column / kLanes;
    const char* w = l.weights + l.panel_bytes() * panel;
    const Words table = l.high ? load_words(l.high) : splat_word(0);
    const int32_t* escaped = l.high ? l.escaped + l.first_escaped[panel] : nullptr;
    const char* raw = l.high ? l.raw_blocks + static_cast<size_t>(l.first_escaped[panel] - panel) * RawBlock::bytes : nullptr;
    for (int block = 0, at = 0; at < l.inner; block++, at += values) {
        ColumnWords words;
        if (!l.high) {
            words = words_of_lane(w + block * RawBlock::bytes, lane);
        } else if (block == *escaped) {
            words = words_of_lane(raw, lane), escaped++, raw += RawBlock::bytes;
        } else {
            const char* from = w + block * Packed12Block::bytes;
            words = words_of_pairs(lane, [&](auto half, Words* step) { Packed12Block::pair<half()>(from, table, step); });
        }
        put_values<K::per_step>(words, static_cast<int>(l.inner) - at, to + at, [&](uint32_t bits) {
            if (K::integers) return static_cast<float>(static_cast<int>(bits) - 128) * l.scale[column];
            return as_float32(K::per_step == 1 ? bits : bits << 16);
        });
    }
}

// Integers in groups; see groups.h.
template <class K>
void read_groups(const Linear& l, int64_t column, float* to) {
    constexpr int values = kSteps * K::per_step;
    const int lane = static_cast<int>(column % kLanes), size = static_cast<int>(l.group_blocks);
    const char *w = l.weights + l.panel_bytes() * (column / kLanes), *scales = w;
    alignas(64) float halves[kLanes];
    const auto half = [&](const char* from) { return store(halves, load_halves(from)), halves[lane] * l.scale[column]; };
    for (int group = 0, block = 0; group < l.groups(); group++) {
        const bool second = !K::has_least && group % 2;
        if (!second) scales = w, w += kStepBytes;
        const float scale = half(scales + (second ? 32 : 0)), least = K::has_least ? half(scales + 32) : 0.0f;
        for (const int end = std::min(block + size, l.blocks()); block < end; block++, w += K::block_bytes) {
            const int at = block * values, left = static_cast<int>(l.inner) - at;
            const ColumnWords words =
                words_of_pairs(lane, [&](auto half_of, Words* step) { K::template pair<half_of()>(w, step); });
            put_values<K::per_step>(words, left, to + at, [&](uint32_t code) {
                if (K::has_least) return static_cast<float>(code) * scale + least;
                return static_cast<float>(static_cast<int>(code) - static_cast<int>(l.offset)) * scale;
            });
        }
    }
}

// The inner values of a column of a matrix without pairs.
inline void read_column(const Linear& l, int64_t column, float* to) {
    with_kind(l.kind, [&](auto kind) {
        using K = decltype(kind);
        if constexpr (K::grouped) read_groups<K>(l, column, to);
        else read_plain<K>(l, column, to);
    });
}

}  // namespace outrider
