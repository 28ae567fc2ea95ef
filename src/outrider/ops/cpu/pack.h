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
constexpr int kHighBytes = 256, kCounted = 64;

// What a call of outrider_pack makes.
enum class Make : int64_t {
    kCounts,  // how often each high byte of bf16 occurs, in 64 panels or a few more
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
    const int64_t* order;   // the source's row of each column, or null
    int64_t listed_count;

    int blocks() const { return static_cast<int>(steps / kSteps); }

    // The source's row for a packed column; null where a panel is filled up.
    const char* row(int panel, int lane) const {
        const int64_t half = columns / halves, at = panel / halves * kLanes + lane;
        if (at >= half) return nullptr;
        const int64_t column = panel % halves * half + at;
        return source + (order ? order[column] : column) * stride;
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

    // The words of the panel's columns, one column after the other, each filled up with zeros.
    void read(int panel) {
        for (int lane = 0; lane < kLanes; lane++) {
            char* words = reinterpret_cast<char*>(words_.data() + lane * p_.steps);
            const char* row = p_.row(panel, lane);
            const size_t filled = p_.inner * (p_.kind == 0 ? 4 : p_.kind == 1 ? 2 : 1), whole = p_.steps * 4;
            if (p_.kind == 2) {
                row ? widen(p_, row, floats_.data()) : floats_.assign(p_.inner, 0.0f);
                const int width = static_cast<int>(p_.inner);
                p_.scale[panel * kLanes + lane] = quantise(floats_.data(), width, reinterpret_cast<uint8_t*>(words));
            } else if (!row) {
                std::memset(words, 0, filled);
            } else if (p_.kind == p_.is_bf16) {  // the kinds of float32 and bf16 are 0 and 1
                std::memcpy(words, row, filled);
            } else {
                convert(row, words);
            }
            std::memset(words + filled, 0, whole - filled);
        }
    }

    void block(int number, uint32_t* to) const {
        for (int lane = 0; lane < kLanes; lane += 4) {
            Bytes part[4];
            for (int i = 0; i < 4; i++)
                std::memcpy(&part[i], words_.data() + (lane + i) * p_.steps + number * kSteps, sizeof part[i]);
            transpose(part);
            for (int step = 0; step < kSteps; step++) std::memcpy(to + step * kLanes + lane, &part[step], sizeof part[step]);
        }
    }

    void count(int64_t* counts) const {
        std::array<std::array<uint32_t, kHighBytes>, 4> parts{};  // apart, because equal bytes follow each other
        for (size_t i = 0; i < words_.size(); i += 2) {  // a panel has whole blocks
            parts[0][words_[i] >> 24]++, parts[1][words_[i] >> 8 & 255]++;
            parts[2][words_[i + 1] >> 24]++, parts[3][words_[i + 1] >> 8 & 255]++;
        }
        for (const auto& part : parts)
            for (int byte = 0; byte < kHighBytes; byte++) counts[byte] += part[byte];
    }

   private:
    void convert(const char* row, char* words) {
        widen(p_, row, floats_.data());
        if (p_.kind == 0) return void(std::memcpy(words, floats_.data(), p_.inner * sizeof(float)));
        auto* halves = reinterpret_cast<uint16_t*>(words);
        for (int64_t i = 0; i < p_.inner; i++) halves[i] = rounded_to_bf16(floats_[i]);
    }

    const Packing& p_;
    std::vector<uint32_t> words_;
    std::vector<float> floats_;
};

// The codes of high bytes, as one table of sixteen for each upper half of a byte that occurs in any.
class Codes {
   public:
    explicit Codes(const uint8_t* codes) {
        for (int upper = 0; codes && upper < 16; upper++) {
            const uint8_t* of = codes + 16 * upper;
            if (std::all_of(of, of + 16, [](uint8_t code) { return code > 15; })) continue;
            std::memcpy(&tables_[count_], of, sizeof tables_[count_]);
            uppers_[count_++] = Bytes{} + static_cast<uint8_t>(upper);
        }
    }

    // Above 15 where a byte has none.
    Bytes of(Bytes bytes) const {
        const Bytes upper = bytes >> 4, lower = bytes & 15;
        Bytes codes = ~Bytes{};
        for (int i = 0; i < count_; i++) codes = upper == uppers_[i] ? look_up(tables_[i], lower) : codes;
        return codes;
    }

   private:
    Bytes tables_[16], uppers_[16];
    int count_ = 0;
};

// 128 low bytes and 128 four-bit codes of high bytes, in the order of the unpack instructions: within 16 bytes, eight values
// of one step and eight of the next. Returns whether a high byte has no code.
inline bool pack_12bit(const uint32_t* words, const Codes& codes, char* to) {
    const auto* from = reinterpret_cast<const char*>(words);
    Bytes code[8], any{};
    for (int i = 0; i < 8; i++) {  // two steps of 64 bytes become 64 low and 64 high bytes
        const char* at = from + i / 4 * 2 * kStepBytes + i % 4 * 16;
        Bytes first, second;
        std::memcpy(&first, at, sizeof first), std::memcpy(&second, at + kStepBytes, sizeof second);
        const Bytes low = low_bytes(first, second);
        std::memcpy(to + 16 * i, &low, sizeof low);
        code[i] = codes.of(high_bytes(first, second));
        any |= code[i];
    }
    for (int i = 0; i < 4; i++) {
        const Bytes both = (code[i] & 15) | code[4 + i] << 4;
        std::memcpy(to + 128 + 16 * i, &both, sizeof both);
    }
    uint64_t halves[2];
    std::memcpy(halves, &any, sizeof halves);
    return (halves[0] | halves[1]) & 0xf0f0f0f0f0f0f0f0u;
}

// One panel of a packing that is not a list.
inline void pack_panel(const Packing& p, Panel& panel, const Codes& codes, int number, int64_t* counts) {
    if (p.make == Make::kCounts && number % std::max<int64_t>(p.panels / kCounted, 1)) return;
    panel.read(number);
    if (p.make == Make::kCounts) return panel.count(counts);
    uint32_t words[kBlockWords];
    const int64_t first = int64_t{number} * p.blocks();
    for (int b = 0; b < p.blocks(); b++) {
        panel.block(b, words);
        if (p.make == Make::kRaw)
            std::memcpy(p.to + (first + b) * kBlockBytes, words, kBlockBytes);
        else
            p.escaped[first + b] = pack_12bit(words, codes, p.to + (first + b) * kPacked12Bytes);
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
    const Codes codes(p.codes);
    if (p.make == Make::kListed) return pack_listed(p, panel, m.share(static_cast<int>(p.listed_count)));
    std::array<int64_t, kHighBytes> counts{};
    const Share mine = m.share(static_cast<int>(p.panels));
    for (int number = mine.begin; number < mine.end; number++) pack_panel(p, panel, codes, number, counts.data());
    if (p.make != Make::kCounts) return;
    std::lock_guard<std::mutex> turn(adding);
    for (int byte = 0; byte < kHighBytes; byte++) p.counts[byte] += counts[byte];
}

}  // namespace outrider
