// Packing of integers in groups into the layout of groups.h. `packed` in ops/groups.py is the definition.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "blocks.h"
#include "linear.h"

namespace outrider {

// A matrix (columns, inner) of bytes with scales (columns, source_groups), or columns in blocks of GGUF types; and where its
// packed form goes. All fields have 64 bits.
struct GroupPacking {
    const uint8_t* codes;         // null where there are blocks
    const float *scale, *least;   // least: to subtract, or null
    const uint8_t* const* blocks_of;  // of each column, where its blocks begin
    const int64_t* kinds;         // of each column
    const int64_t* rows;          // of each packed column its row; negative where a panel is filled up
    int64_t inner, source_groups, panels, blocks, group_blocks, bits, panel_stride, has_least, offset;
    char* to;
    float* power;  // of each packed column: what its scales were divided by

    int groups() const { return static_cast<int>((blocks + group_blocks - 1) / group_blocks); }
};

constexpr int kHalfExponent = 15, kLeastExponent = -100;

// A row of the source in the groups of the packed form.
struct GroupedRow {
    const uint8_t* codes;
    const float *scale, *least;
};

// A thread's memory for the rows of a panel that are read from blocks.
class RowReader {
   public:
    explicit RowReader(const GroupPacking& p) : p(p), size(static_cast<int>(p.group_blocks) * kSteps * 4) {
        if (!p.kinds) return;
        codes.resize(kLanes * p.inner), scale.resize(kLanes * p.source_groups), least.resize(scale.size());
    }

    GroupedRow read(int64_t row, int lane) {
        if (!p.kinds) {
            const int64_t at = row * p.source_groups;
            return {p.codes + row * p.inner, p.scale + at, p.has_least ? p.least + at : nullptr};
        }
        const int64_t kind = p.kinds[row];
        const BlockForm form = form_of(kind);
        uint8_t* to = codes.data() + lane * p.inner;
        float *scales = scale.data() + lane * p.source_groups, *leasts = least.data() + lane * p.source_groups;
        const int times = form.group / size, per_block = form.values / size;
        const int shift = p.has_least ? 0 : static_cast<int>(p.offset) - form.offset;
        for (int64_t block = 0, blocks = p.inner / form.values; block < blocks; block++, to += form.values) {
            read_block(kind, p.blocks_of[row] + block * form.bytes, to, [&](int group, float unit, float low) {
                const float subtracted = form.offset < 0 ? low : unit * static_cast<float>(form.offset);
                for (int64_t i = block * per_block + group * times, end = i + times; i < end; i++)
                    scales[i] = unit, leasts[i] = subtracted;
            });
            for (int i = 0; shift && i < form.values; i++) to[i] = static_cast<uint8_t>(to[i] + shift);
        }
        return {codes.data() + lane * p.inner, scales, p.has_least ? leasts : nullptr};
    }

   private:
    const GroupPacking& p;
    const int size;  // of a group in the packed form
    std::vector<uint8_t> codes;
    std::vector<float> scale, least;
};

// The power of two that brings the largest scale of a row near the largest float16; NaN where one is not finite.
inline float power_of(const GroupedRow& row, int64_t groups) {
    float largest = 0.0f;
    for (const float* values : {row.scale, row.least})
        for (int64_t g = 0; values && g < groups; g++) {
            if (!std::isfinite(values[g])) return NAN;
            largest = std::max(largest, std::abs(values[g]));
        }
    int exponent = 0;
    std::frexp(largest, &exponent);
    return largest > 0.0f ? std::ldexp(1.0f, std::max(exponent, kLeastExponent) - kHalfExponent) : 1.0f;
}

// Packs one panel after the other; a thread has one.
class GroupPacker {
   public:
    explicit GroupPacker(const GroupPacking& p) : p(p), reader(p) {}

    void pack(int64_t panel) {
        const int64_t* columns = p.rows + panel * kLanes;
        for (int lane = 0; lane < kLanes; lane++) {
            row[lane] = reader.read(std::max<int64_t>(columns[lane], 0), lane);
            absent[lane] = columns[lane] < 0;
            const float power = p.power[panel * kLanes + lane] = power_of(row[lane], p.source_groups);
            divisor[lane] = std::isnan(power) ? 1.0f : power;
        }
        char *to = p.to + p.panel_stride * panel, *scales = to;
        const int groups = p.groups(), block_bytes = static_cast<int>(p.bits) * 32;
        for (int group = 0, block = 0; group < groups; group++) {
            const bool second = !p.has_least && group % 2;
            if (!second) scales = to, std::memset(to, 0, kStepBytes), to += kStepBytes;
            put_halves(group, false, scales + (second ? 32 : 0));
            if (p.has_least) put_halves(group, true, scales + 32);
            for (const int end = static_cast<int>(std::min(block + p.group_blocks, p.blocks)); block < end; block++, to += block_bytes)
                put_codes(block, to);
        }
    }

   private:
    // The scales of one group, or what to subtract with its sign changed, as sixteen float16.
    void put_halves(int group, bool is_least, char* to) const {
        float values[kLanes];
        for (int lane = 0; lane < kLanes; lane++) {
            const float* from = is_least ? row[lane].least : row[lane].scale;
            const float value = group < p.source_groups ? from[group] / divisor[lane] : 0.0f;
            values[lane] = absent[lane] ? 0.0f : is_least ? -value : value;
        }
        for (int lane = 0; lane < kLanes; lane++) {
            const uint16_t half = to_half(values[lane]);
            std::memcpy(to + 2 * lane, &half, sizeof half);
        }
    }

    // Four steps of sixteen columns.
    void put_codes(int block, char* to) const {
        constexpr int inputs = kSteps * 4;
        const int64_t at = int64_t{block} * inputs, left = std::clamp<int64_t>(p.inner - at, 0, inputs);
        Bytes step[kSteps][kLanes / 4];
        for (int part = 0; part < kLanes / 4; part++) {
            Bytes lane[4];
            for (int i = 0; i < 4; i++) {
                alignas(16) uint8_t bytes[inputs] = {};
                if (!absent[4 * part + i]) std::memcpy(bytes, row[4 * part + i].codes + at, left);
                std::memcpy(&lane[i], bytes, sizeof bytes);
            }
            transpose(lane);
            for (int s = 0; s < kSteps; s++) step[s][part] = lane[s];
        }
        if (p.bits == 8) return void(std::memcpy(to, step, sizeof step));
        for (int half = 0; half < 2; half++)
            for (int part = 0; part < kLanes / 4; part++, to += sizeof(Bytes)) {
                const Bytes both = step[2 * half][part] | step[2 * half + 1][part] << 4;
                std::memcpy(to, &both, sizeof both);
            }
    }

    const GroupPacking& p;
    RowReader reader;
    std::array<GroupedRow, kLanes> row{};
    std::array<bool, kLanes> absent{};
    std::array<float, kLanes> divisor{};
};

inline void pack_groups(const GroupPacking& p, const Member& m) {
    const Share mine = m.share(static_cast<int>(p.panels));
    GroupPacker packer(p);
    for (int panel = mine.begin; panel < mine.end; panel++) packer.pack(panel);
}

}  // namespace outrider
