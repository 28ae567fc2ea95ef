// Packing of weights into the layout that linear.h reads. The source is read where it lies, a mapped file for one, and is
// never copied as a whole.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "linear.h"

namespace outrider {

constexpr int kBlockBytes = kSteps * kStepBytes, kBlockWords = kBlockBytes / 4;
constexpr int kPacked12Bytes = kBlockBytes / 4 * 3;
constexpr int kHighBytes = 256;

// What a call of outrider_pack makes.
enum class Make : int64_t {
    kCounts,  // how often each high byte of bf16 occurs
    kRaw,     // [panels][steps][16 columns][4 / size values], and the scales of int8
    k12Bit,   // 12-bit packed bf16, and which blocks escape
    kListed,  // the raw blocks in `listed`
};

// A matrix (columns, inner) of float32 or bf16, and where its packed form goes; all fields have 64 bits.
struct Packing {
    Make make;
    int64_t kind;     // of the packed form, as in Linear
    int64_t is_bf16;  // of the source
    const char* source;
    int64_t stride;   // bytes from row to row
    int64_t columns, inner, halves, panels, steps;
    char* to;
    float* scale;          // per packed column
    int64_t* counts;       // [256]
    const uint8_t* codes;  // of high bytes; above 15 where there is none
    uint8_t* escaped;      // of each block, [panels][steps / kSteps]
    const int64_t* listed;  // block numbers over all panels
    int64_t listed_count;

    int blocks() const { return static_cast<int>(steps / kSteps); }

    // The source's row for a packed column; null where a panel is filled up.
    const char* row(int panel, int lane) const {
        const int64_t half = columns / halves, at = panel / halves * kLanes + lane;
        return at < half ? source + (panel % halves * half + at) * stride : nullptr;
    }
};

inline void widen(const Packing& p, const char* row, float* to) {
    if (!p.is_bf16) return void(std::memcpy(to, row, p.inner * sizeof(float)));
    for (int64_t i = 0; i < p.inner; i++) {
        uint16_t half;
        std::memcpy(&half, row + 2 * i, sizeof half);
        const uint32_t word = static_cast<uint32_t>(half) << 16;
        std::memcpy(to + i, &word, sizeof word);
    }
}

// One row as bytes with 128 added, and its scale: the largest magnitude becomes 127. NaN where a value is not finite.
inline float quantise(const float* x, int width, uint8_t* to) {
    f32x16 top = splat(0.0f), zeros = splat(0.0f);
    for (int i = 0; i < width; i += kLanes) {
        const f32x16 values = load_upto(x + i, width - i);
        top = maximum(magnitude(values), top), zeros += values * splat(0.0f);
    }
    const float scale = largest(top) / 127.0f, unit = scale > 0.0f ? scale : 1.0f;
    for (int i = 0; i < width; i += kLanes) {
        uint32_t whole[kLanes];
        store_words(whole, nearest_integers(load_upto(x + i, width - i) / splat(unit)) + splat_word(128));
        for (int j = 0; j < std::min(kLanes, width - i); j++) to[i + j] = static_cast<uint8_t>(whole[j]);
    }
    return sum(zeros) == 0.0f ? scale : NAN;
}

inline uint16_t rounded_to_bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);  // NaN stays NaN
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// A thread's memory for the sixteen columns of a panel.
class Panel {
   public:
    explicit Panel(const Packing& p) : p_(p), words_(kLanes * p.steps), floats_(p.inner) {}

    // The words of the panel's columns, one column after the other.
    void read(int panel) {
        for (int lane = 0; lane < kLanes; lane++) {
            uint32_t* words = words_.data() + lane * p_.steps;
            const char* row = p_.row(panel, lane);
            std::fill(words, words + p_.steps, 0);
            if (p_.kind == 2) {
                floats_.assign(p_.inner, 0.0f);
                if (row) widen(p_, row, floats_.data());
                p_.scale[panel * kLanes + lane] =
                    quantise(floats_.data(), static_cast<int>(p_.inner), reinterpret_cast<uint8_t*>(words));
            } else if (row && p_.kind == p_.is_bf16) {  // the kinds of float32 and bf16 are 0 and 1
                std::memcpy(words, row, p_.inner * (p_.is_bf16 ? 2 : 4));
            } else if (row) {
                convert(row, words);
            }
        }
    }

    void block(int number, uint32_t* to) const {
        for (int lane = 0; lane < kLanes; lane++) {
            const uint32_t* words = words_.data() + lane * p_.steps + number * kSteps;
            for (int step = 0; step < kSteps; step++) to[step * kLanes + lane] = words[step];
        }
    }

    void count(int64_t* counts) const {
        std::array<std::array<uint32_t, kHighBytes>, 4> parts{};  // apart, because equal bytes follow each other
        for (const uint32_t word : words_) parts[0][word >> 24]++, parts[1][word >> 8 & 255]++;
        for (int byte = 0; byte < kHighBytes; byte++) counts[byte] += int64_t{parts[0][byte]} + parts[1][byte];
    }

   private:
    void convert(const char* row, uint32_t* words) {
        widen(p_, row, floats_.data());
        if (p_.kind == 0) return void(std::memcpy(words, floats_.data(), p_.inner * sizeof(float)));
        auto* halves = reinterpret_cast<uint16_t*>(words);
        for (int64_t i = 0; i < p_.inner; i++) halves[i] = rounded_to_bf16(floats_[i]);
    }

    const Packing& p_;
    std::vector<uint32_t> words_;
    std::vector<float> floats_;
};

// 128 low bytes and 128 four-bit codes of high bytes, in the order of the unpack instructions: within 16 bytes, eight values
// of one step and eight of the next. Returns whether a high byte has no code.
inline bool pack_12bit(const uint32_t* words, const uint8_t* codes, uint8_t* to) {
    uint16_t values[2 * kBlockWords];
    uint8_t code[2 * kBlockWords], any = 0;
    std::memcpy(values, words, sizeof values);
    for (int part = 0; part < 2 * kBlockWords; part += 8) {
        const int half = part / 64 * 64, lane = part % 32 / 8 * 16, second = part / 32 % 2 * 8;
        for (int i = 0; i < 8; i++) {
            to[half + lane + second + i] = static_cast<uint8_t>(values[part + i]);
            any |= code[half + lane + second + i] = codes[values[part + i] >> 8];
        }
    }
    for (int i = 0; i < 64; i++) to[128 + i] = static_cast<uint8_t>((code[i] & 15) | code[64 + i] << 4);
    return any > 15;
}

// One panel of a packing that is not a list.
inline void pack_panel(const Packing& p, Panel& panel, int number, int64_t* counts) {
    panel.read(number);
    if (p.make == Make::kCounts) return panel.count(counts);
    uint32_t words[kBlockWords];
    const int64_t first = int64_t{number} * p.blocks();
    for (int b = 0; b < p.blocks(); b++) {
        panel.block(b, words);
        if (p.make == Make::kRaw)
            std::memcpy(p.to + (first + b) * kBlockBytes, words, kBlockBytes);
        else
            p.escaped[first + b] = pack_12bit(words, p.codes, reinterpret_cast<uint8_t*>(p.to) + (first + b) * kPacked12Bytes);
    }
}

// Some of the listed blocks, which are in order.
inline void pack_listed(const Packing& p, Panel& panel, Share mine) {
    for (int64_t i = mine.begin, held = -1; i < mine.end; i++) {
        const int64_t number = p.listed[i] / p.blocks();
        if (number != held) panel.read(static_cast<int>(held = number));
        panel.block(static_cast<int>(p.listed[i] % p.blocks()), reinterpret_cast<uint32_t*>(p.to + i * kBlockBytes));
    }
}

inline void pack(const Packing& p, const Member& m, std::mutex& adding) {
    Panel panel(p);
    if (p.make == Make::kListed) return pack_listed(p, panel, m.share(static_cast<int>(p.listed_count)));
    std::array<int64_t, kHighBytes> counts{};
    const Share mine = m.share(static_cast<int>(p.panels));
    for (int number = mine.begin; number < mine.end; number++) pack_panel(p, panel, number, counts.data());
    if (p.make != Make::kCounts) return;
    std::lock_guard<std::mutex> turn(adding);
    for (int byte = 0; byte < kHighBytes; byte++) p.counts[byte] += counts[byte];
}

}  // namespace outrider
