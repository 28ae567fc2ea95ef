// Linear layers: weights packed once (ops/packing.py), activations packed per product, one kernel for every row count.
//
// Weights lie in panels of 16 output columns, each a contiguous run of blocks of four steps (simd.h). A thread's share
// of the panels is one stream of memory: up to kBlock rows meet a panel while it passes, each with one register for its
// sums, so their number never changes the order of additions. Two streams side by side are slower from memory, and one
// row's single chain of additions still keeps up with it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "simd.h"
#include "threads.h"

namespace outrider {

constexpr int kStepBytes = 64;
constexpr int kSteps = 4;                          // of a block
constexpr int kUnit = 16;                          // steps whose words of one row lie together: a row of an AMX tile
constexpr int kBlock = kRegisters == 32 ? 16 : 4;  // rows of one pass over a panel
constexpr int kChunk = 64;                         // rows that share one pass over all weights
constexpr int kPrefetch = 4096;                    // bytes ahead in the stream of weights
#if defined(__AMX_TILE__)
constexpr bool kTiles = true;
constexpr int kGroup = 8;  // panels that meet one block of rows after the other
#else
constexpr bool kTiles = false;
constexpr int kGroup = 2;
#endif

inline int round_up(int x, int to) { return (x + to - 1) / to * to; }
inline void fetch(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T0); }

// Weights as ops/packing.py lays them out and describes them; all fields have 64 bits.
struct Linear {
    int64_t kind;  // 0 float32, 1 bf16, 2 int8
    int64_t columns, inner;  // of a product
    int64_t panels, steps;
    int64_t paired;          // panels alternate between two halves of the columns: gate 0, up 0, gate 1, ...
    const char* weights;     // [panels][steps][16 columns][4 / size values], or thin blocks
    const float *bias, *scale;  // per packed column, or null; scale for int8
    const uint8_t* high;     // of thin weights their sixteen high bytes, four times; else null
    const int32_t *escaped, *first_escaped;  // the blocks that need others, behind each panel's -1, and where a panel's begin
    const char* whole;       // escaped blocks as they are

    size_t panel_bytes() const { return static_cast<size_t>(steps) * kStepBytes / 4 * (high ? 3 : 4); }

    // The panels of one of several threads; pairs stay together.
    Share share(const Member& m) const {
        const int all = static_cast<int>(panels);
        const Share pairs = m.share((all + 1) / 2);
        return {std::min(2 * pairs.begin, all), std::min(2 * pairs.end, all)};
    }
};

template <class Do>
inline void with_kind(int64_t kind, const Do& run) {
    kind == 0 ? run(F32{}) : kind == 1 ? run(BF16{}) : run(I8{});
}

struct Rows {
    float* at;
    size_t stride;
    int width;

    float* operator[](int r) const { return at + r * stride; }
    Rows from(int r) const { return {at + r * stride, stride, width}; }
};
inline Rows dense(float* at, int64_t width) { return {at, static_cast<size_t>(width), static_cast<int>(width)}; }

// Rows that a product reads, and what is done to them first.
struct Input {
    Rows x;
    int rows;
    const float* norm = nullptr;  // weights of a root-mean-square norm over the row, or null
    float eps = 0.0f;
    const int32_t* chosen = nullptr;  // which rows of x; null: as they lie

    const float* row(int r) const { return x[chosen ? chosen[r] : r]; }
    Input part(int first, int count) const {
        return {chosen ? x : x.from(first), count, norm, eps, chosen ? chosen + first : nullptr};
    }
};

// What becomes of a product's results. What is added to has whole vectors of columns.
enum class Then {
    kStore,  // out = y
    kAdd,    // out += y
    kGate,   // paired columns: out = silu(gate) * up
};

inline float inverse_rms(const float* x, int width, float eps) {
    f32x16 squares = splat(0.0f);
    for (int i = 0; i < width; i += kLanes) {
        const f32x16 own = load_upto(x + i, width - i);
        squares = fma(own, own, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
}

inline void normed(float* to, const float* x, const float* norm, int width, float eps) {
    const float inverse = inverse_rms(x, width, eps);
    for (int i = 0; i < width; i++) to[i] = x[i] * inverse * norm[i];
}

// Activations as the kernel reads them: per block of rows, for every unit of the inner dimension, the words of
// one row after the other. Threads pack shares of the rows.
struct Packed {
    struct Quantum {
        float scale;
        int32_t offset;  // 128 x the row's sum, which the shifted weights add too much
    };
    uint32_t* words;
    Quantum* quantum;  // of each row, for int8

    template <class K>
    void fill(const Input& in, int steps, Share mine) const {
        for (int r = mine.begin; r < mine.end; r++) {
            const float* x = in.row(r);
            const int width = in.x.width;
            const f32x16 inverse = splat(in.norm ? inverse_rms(x, width, in.eps) : 1.0f);
            const auto values = [&](int at) {
                if (at >= width) return splat(0.0f);
                const f32x16 own = load_upto(x + at, width - at);
                return in.norm ? own * inverse * load_upto(in.norm + at, width - at) : own;
            };
            f32x16 top = splat(0.0f);
            for (int at = 0; std::is_same<K, I8>::value && at < width; at += kLanes) top = maximum(magnitude(values(at)), top);
            const float scale = largest(top) / 127.0f, units = scale > 0.0f ? 1.0f / scale : 0.0f;  // the largest becomes 127
            f32x16 total = splat(0.0f);
            const int first = r / kBlock * kBlock, apart = std::min(kBlock, in.rows - first) * kUnit;
            uint32_t* to = words + static_cast<size_t>(first) * steps + (r - first) * kUnit;
            for (int at = 0; at < steps * K::per_step; to += apart)
                for (int part = 0; part < K::per_step; part++, at += kLanes) {
                    const f32x16 own = values(at);
                    K::encode(own, units, to + part * (kLanes / K::per_step));
                    if (std::is_same<K, I8>::value) total += to_float(nearest_integers(own * splat(units)));
                }
            quantum[r] = {scale, 128 * static_cast<int32_t>(sum(total))};
        }
    }
};

// Two of the four steps of a block that lies at `w`.
struct Whole {
    static constexpr int bytes = kSteps * kStepBytes;
    template <int half>
    static void pair(const char* w, Words, Words* step) {
        step[0] = load_words(w + half * 2 * kStepBytes), step[1] = load_words(w + (half * 2 + 1) * kStepBytes);
    }
};
struct Thin {
    static constexpr int bytes = 3 * kStepBytes;
    template <int half>
    static void pair(const char* w, Words table, Words* step) {
        Words code = load_words(w + 2 * kStepBytes);
        if (half) code = shift_down<4>(code);
        const Words low = load_words(w + half * kStepBytes), high = look_up(table, code & splat_word(0x0f0f0f0fu));
        step[0] = join_bytes_low(low, high), step[1] = join_bytes_high(low, high);
    }
};

// Sums of R rows over one panel as results: int8 sums are freed of their offset and scaled; bias is added. Those of a
// gate wait for its other half.
template <class K, int R>
inline void finish(const Linear& l, const typename K::Acc* sums, int panel, const Rows& out, Then then,
                   const Packed::Quantum* rows, float (*gate)[kLanes]) {
    const int at = (then == Then::kGate ? panel / 2 : panel) * kLanes, room = out.width - at;
    float* first = out.at + at;
    const size_t stride = out.stride;
    const int column = panel * kLanes;
    const float* bias = l.bias ? l.bias + column : nullptr;
    const auto all = [&](const auto& put) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            f32x16 y;
            if constexpr (std::is_same<K, I8>::value)
                y = to_float(sums[r] - splat_word(rows[r].offset)) * load(l.scale + column) * splat(rows[r].scale);
            else
                y = sums[r];
            put(r, first + r * stride, bias ? y + load(bias) : y);
        }
    };
    if (then == Then::kStore) return all([&](int, float* to, f32x16 y) { store_upto(to, y, room); });
    if (then == Then::kAdd) return all([&](int, float* to, f32x16 y) { store(to, load(to) + y); });
    if (panel % 2 == 0) return all([&](int r, float*, f32x16 y) { store(gate[r], y); });
    all([&](int r, float* to, f32x16 y) {
        const f32x16 x = load(gate[r]);
        store_upto(to, x / (splat(1.0f) + exponential(splat(0.0f) - x)) * y, room);
    });
}

// R rows of words times one panel.
template <class K, class Form, int R>
inline void multiply(const uint32_t* x, const Linear& l, int panel, typename K::Acc* sums) {
    constexpr bool thin = std::is_same<Form, Thin>::value;
    const char* w = l.weights + l.panel_bytes() * panel;
    const Words table = thin ? load_words(l.high) : splat_word(0);
    const int32_t* escaped = thin ? l.escaped + l.first_escaped[panel] : nullptr;
    const char* whole = thin ? l.whole + static_cast<size_t>(l.first_escaped[panel] - panel) * Whole::bytes : nullptr;
    typename K::Acc acc[R];  // in registers, which gcc does not see of `sums`
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = K::zero();
    for (int block = 0, blocks = static_cast<int>(l.steps) / kSteps; block < blocks; x += R * kUnit)
        for (const uint32_t *at = x, *end = x + kUnit; at < end; at += kSteps, block++, w += Form::bytes) {
            const bool escapes = thin && __builtin_expect(block == *escaped, false);
            Words step[2];
            const auto join = [&](const uint32_t* words) {
#pragma GCC unroll 32
                for (int i = 0; i < 2 * R; i++)
                    acc[i % R] = K::join(acc[i % R], step[i / R], words + i % R * kUnit + i / R);
            };
            // from a few rows on there is time to bring a line to the second cache early and to the first one late
#pragma GCC unroll 4
            for (int line = 0; line < Form::bytes; line += kStepBytes) {
                if (R >= 4) _mm_prefetch(w + 4 * kPrefetch + line, _MM_HINT_T1);
                fetch(w + (R >= 4 ? kPrefetch / 2 : kPrefetch) + line);
            }
            Form::template pair<0>(w, table, step);
            if (escapes) Whole::pair<0>(whole, table, step);
            join(at);
            Form::template pair<1>(w, table, step);
            if (escapes) {
                Whole::pair<1>(whole, table, step), escaped++, whole += Whole::bytes;
                for (int line = 0; line < Whole::bytes; line += kStepBytes) fetch(whole + line);  // the next
            }
            join(at + 2);
        }
    std::memcpy(sums, acc, sizeof acc);
}

#if defined(__AMX_TILE__)
// The same panels by tiles of 16 x 16 results: a unit of a panel is a tile as it lies, so are 16 rows of a block.
// Rows past the block's own read whatever follows and their results are not looked at. Bits differ from the
// vector kernel's (the unit adds in an order of its own) and not with the number of rows.
struct TilesInUse {
    TilesInUse() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        asm volatile("" : "+m"(shape));  // all of it must be in memory; gcc 12 drops what it thinks unread
        _tile_loadconfig(&shape);
    }
    ~TilesInUse() { _tile_release(); }
};

using Tile = float[kBlock][kLanes];

// Sums of up to four panels. A unit of the rows' words lies every `unit` words.
template <class K>
inline void multiply_tiles(const uint32_t* x, size_t unit, const Linear& l, int panel, int count, Tile* out) {
    const size_t apart = l.panel_bytes();
    const char* w = l.weights + apart * panel;
    size_t ahead = kPrefetch;
    asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#define OUTRIDER_JOIN(c, tile)                                                                            \
    if (c < count) {                                                                                      \
        for (int line = 0; line < kUnit; line++) fetch(w + c * apart + ahead + line * kStepBytes);        \
        _tile_loadd(tile, w + c * apart, kStepBytes);                                                     \
        if constexpr (std::is_same<K, I8>::value) { _tile_dpbsud(c, 4, tile); } else { _tile_dpbf16ps(c, 4, tile); } \
    }
    const int steps = static_cast<int>(l.steps);
    for (int s = 0, end = std::max(steps - kPrefetch / kStepBytes, 0); s < steps; end = steps, ahead += (count - 1) * apart)
        for (; s < end; s += kUnit, x += unit, w += kUnit * kStepBytes) {
            _tile_loadd(4, x, kUnit * sizeof(uint32_t));
            OUTRIDER_JOIN(0, 5) OUTRIDER_JOIN(1, 6) OUTRIDER_JOIN(2, 7) OUTRIDER_JOIN(3, 5)
        }
#undef OUTRIDER_JOIN
    _tile_stored(0, out[0], kStepBytes);
    if (count > 1) _tile_stored(1, out[1], kStepBytes);
    if (count > 2) _tile_stored(2, out[2], kStepBytes);
    if (count > 3) _tile_stored(3, out[3], kStepBytes);
    asm volatile("" ::: "memory");
}
#endif

// Panels [panel, end) times so many rows, R at most. Each by itself: among others gcc keeps sums on the stack.
template <class K, class Form, int R = kBlock>
__attribute__((noinline)) void run_panels(int rows, const uint32_t* x, const Linear& l, int panel, int end, const Rows& out,
                                          Then then, const Packed::Quantum* quantum) {
    if constexpr (R > 1)
        if (rows < R) return run_panels<K, Form, R - 1>(rows, x, l, panel, end, out, then, quantum);
    alignas(64) float gate[R][kLanes];
    typename K::Acc sums[R];
#if defined(__AMX_TILE__)
    for (; !std::is_same<K, F32>::value && panel < end; panel += 4) {
        const int count = std::min(4, end - panel);
        alignas(64) Tile tile[4];
        multiply_tiles<K>(x, R * kUnit, l, panel, count, tile);
        for (int p = 0; p < count; p++) {
            std::memcpy(sums, tile[p], sizeof sums);
            finish<K, R>(l, sums, panel + p, out, then, quantum, gate);
        }
    }
#endif
    for (; panel < end; panel++) {
        // what the results need from beside the stream of weights, while the sums are being made
        if (l.scale) fetch(l.scale + (panel + 1) * kLanes - 1);
        if (l.bias) fetch(l.bias + (panel + 1) * kLanes - 1);
        multiply<K, Form, R>(x, l, panel, sums);
        finish<K, R>(l, sums, panel, out, then, quantum, gate);
    }
}

// Panels of this thread times all rows.
template <class K, class Form>
void linear(const Linear& l, const Packed& x, int rows, const Rows& out, Then then, const Member& m) {
    const Share mine = l.share(m);
#if defined(__AMX_TILE__)
    const TilesInUse tiles;
#endif
    const int group = rows > kBlock || kTiles ? kGroup : static_cast<int>(l.panels);
    for (int panel = mine.begin; panel < mine.end; panel += group)
        for (int first = 0; first < rows; first += kBlock)
            run_panels<K, Form>(std::min(kBlock, rows - first), x.words + static_cast<size_t>(first) * l.steps, l, panel,
                                std::min(panel + group, mine.end), out.from(first), then, x.quantum + first);
}

// All rows times all panels, by every thread of a team; the result is ready for all of them when it returns, or of at most
// kChunk rows what this thread has made.
inline void multiply_rows(const Linear& l, const Input& in, const Rows& out, Then then, const Packed& packed, const Member& m,
                          bool ready = true) {
    const char* mine = l.weights + l.panel_bytes() * l.share(m).begin;
    for (int line = 0; line < kPrefetch; line += kStepBytes) fetch(mine + line);  // while rows are packed
    with_kind(l.kind, [&](auto kind) {
        using K = decltype(kind);
        for (int first = 0; first < in.rows; first += kChunk) {
            const Input part = in.part(first, std::min(kChunk, in.rows - first));
            const bool alone = part.rows == 1 && m.threads <= kChunk / 8;  // each for itself is quicker than meeting
            const int slot = alone ? 8 * m.thread : 0;
            const Packed own{packed.words + static_cast<size_t>(slot) * l.steps, packed.quantum + slot};
            own.fill<K>(part, static_cast<int>(l.steps), alone ? Share{0, 1} : m.share(part.rows));
            if (!alone) m.meet();
            const Rows to = out.from(first);
            if constexpr (std::is_same<K, BF16>::value && !kTiles)
                l.high ? linear<K, Thin>(l, own, part.rows, to, then, m) : linear<K, Whole>(l, own, part.rows, to, then, m);
            else
                linear<K, Whole>(l, own, part.rows, to, then, m);
            if (ready) m.meet();
        }
    });
}

}  // namespace outrider
