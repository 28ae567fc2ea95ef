// Packing of integers in groups into the layout of groups.h. `packed` in ops/groups.py is the definition.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "linear.h"

namespace outrider {

// A matrix (columns, inner) of bytes with scales (columns, source_groups), and where its packed form goes; all fields have 64 bits.
struct GroupPacking {
    const uint8_t* codes;
    const float *scale, *least;  // least: to subtract, or null
    const int64_t* rows;         // of each packed column its row; negative where a panel is filled up
    int64_t inner, source_groups, panels, blocks, group_blocks, bits, panel_stride;
    char* to;
    float* power;  // of each packed column: what its scales were divided by

    int groups() const { return static_cast<int>((blocks + group_blocks - 1) / group_blocks); }
    int64_t row(int64_t column) const { return std::max<int64_t>(rows[column], 0); }
};

constexpr int kHalfExponent = 15, kLeastExponent = -100;

// The power of two that brings the largest scale of a row near the largest float16; NaN where one is not finite.
inline float power_of(const GroupPacking& p, int64_t row) {
    float largest = 0.0f;
    for (const float* values : {p.scale, p.least})
        for (int64_t g = 0; values && g < p.source_groups; g++) {
            const float value = values[row * p.source_groups + g];
            if (!std::isfinite(value)) return NAN;
            largest = std::max(largest, std::abs(value));
        }
    int exponent = 0;
    std::frexp(largest, &exponent);
    return largest > 0.0f ? std::ldexp(1.0f, std::max(exponent, kLeastExponent) - kHalfExponent) : 1.0f;
}

// The scales of one group, or what to subtract with its sign changed, as sixteen float16.
inline void put_halves(const GroupPacking& p, const float* values, float sign, int64_t panel, int group, char* to) {
    for (int lane = 0; lane < kLanes; lane++) {
        const int64_t column = panel * kLanes + lane;
        const float power = std::isnan(p.power[column]) ? 1.0f : p.power[column];
        const float value = group < p.source_groups ? values[p.row(column) * p.source_groups + group] / power : 0.0f;
        const uint16_t half = p.rows[column] < 0 ? 0 : _cvtss_sh(sign * value, _MM_FROUND_TO_NEAREST_INT);
        std::memcpy(to + 2 * lane, &half, sizeof half);
    }
}

// Four steps of sixteen columns, 256 bytes.
inline void put_codes(const GroupPacking& p, int64_t panel, int block, char* to) {
    constexpr int inputs = kSteps * 4;
    const int64_t left = p.inner - int64_t{block} * inputs;
    __m128i step[kSteps][kLanes / 4];
    for (int part = 0; part < kLanes / 4; part++) {
        __m128 lane[4];
        for (int i = 0; i < 4; i++) {
            const int64_t column = panel * kLanes + 4 * part + i;
            alignas(16) uint8_t bytes[inputs] = {};
            if (p.rows[column] >= 0 && left > 0)
                std::memcpy(bytes, p.codes + p.row(column) * p.inner + int64_t{block} * inputs, std::min<int64_t>(left, inputs));
            std::memcpy(&lane[i], bytes, sizeof bytes);
        }
        _MM_TRANSPOSE4_PS(lane[0], lane[1], lane[2], lane[3]);
        for (int s = 0; s < kSteps; s++) step[s][part] = _mm_castps_si128(lane[s]);
    }
    if (p.bits == 8) return void(std::memcpy(to, step, sizeof step));
    for (int half = 0; half < 2; half++)
        for (int part = 0; part < kLanes / 4; part++, to += sizeof(__m128i)) {
            const __m128i both = _mm_or_si128(step[2 * half][part], _mm_slli_epi16(step[2 * half + 1][part], 4));
            std::memcpy(to, &both, sizeof both);
        }
}

inline void pack_groups(const GroupPacking& p, const Member& m) {
    const Share mine = m.share(static_cast<int>(p.panels));
    const int block_bytes = static_cast<int>(p.bits) * 32;
    for (int panel = mine.begin; panel < mine.end; panel++) {
        for (int lane = 0; lane < kLanes; lane++)
            p.power[panel * kLanes + lane] = power_of(p, p.row(panel * kLanes + lane));
        char *to = p.to + p.panel_stride * panel, *scales = to;
        for (int group = 0, block = 0; group < p.groups(); group++) {
            const bool second = !p.least && group % 2;
            if (!second) scales = to, std::memset(to, 0, kStepBytes), to += kStepBytes;
            put_halves(p, p.scale, 1.0f, panel, group, scales + (second ? 32 : 0));
            if (p.least) put_halves(p, p.least, -1.0f, panel, group, scales + 32);
            for (const int end = std::min<int>(block + p.group_blocks, p.blocks); block < end; block++, to += block_bytes)
                put_codes(p, panel, block, to);
        }
    }
}

}  // namespace outrider
