// Linear layers: weights packed once (ops/packing.py), activations packed per product, one kernel for every row count.
//
// Weights lie in panels of 16 output columns, each a contiguous run of blocks of four steps (simd.h). A thread's share of
// the panels is one stream of memory. Up to kBlock rows are multiplied by a panel as it streams by, each with one register
// for its sums, so the number of rows never changes the order of additions. Two streams side by side are slower from
// memory, and the single chain of additions of one row still keeps up with it.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "elementwise.h"
#include "threads.h"

namespace outrider {

constexpr int kStepBytes = 64;
constexpr int kSteps = 4;                          // of a block
constexpr int kUnit = 16;                          // steps whose words of one row lie together: a row of an AMX tile
constexpr int kBlock = kRegisters == 32 ? 16 : 4;  // rows of one pass over a panel
constexpr int kChunk = 64;                         // rows that share one pass over all weights
constexpr int kPrefetch = 4096;                    // prefetch distance in the stream of weights, in bytes
#if defined(__AMX_TILE__)
constexpr bool kTiles = true;
constexpr int kGroup = 8;  // panels that stay in cache while the blocks of rows pass
#else
constexpr bool kTiles = false;
constexpr int kGroup = 2;
#endif

inline int round_up(int x, int to) { return (x + to - 1) / to * to; }
inline void fetch(const void* line) { __builtin_prefetch(line); }
inline void fetch_early(const void* line) { __builtin_prefetch(line, 0, 2); }  // into L2

// Weights as ops/packing.py lays them out and describes them; all fields have 64 bits.
struct Linear {
    int64_t kind;  // 0 float32, 1 bf16, 2 int8; groups of integers: 3 and 4 of four bits, 5 and 6 of eight
    int64_t columns, inner;  // of a product
    int64_t panels, steps;
    int64_t paired;          // panels alternate between two halves of the columns: gate 0, up 0, gate 1, ...
    const char* weights;     // [panels][steps][16 columns][4 / size values], or blocks of 12-bit packed bf16, or groups
    const float *bias, *scale;  // per packed column, or null; scale for integers
    const uint8_t* high;     // the sixteen high bytes of 12-bit packed bf16, four times; else null
    const int32_t *escaped, *first_escaped;  // blocks with other high bytes, -1 at the end of each panel; each panel's first
    const char* raw_blocks;  // escaped blocks as they are
    int64_t group_blocks, offset, panel_stride;  // of groups: blocks of each, what integers are too large by, bytes of a panel
    const int32_t* inputs;   // of groups: the input that each place of the inner dimension reads; null: in order
    Epilogue epilogue;       // of paired columns the gate's

    size_t panel_bytes() const {
        if (panel_stride) return static_cast<size_t>(panel_stride);
        return static_cast<size_t>(steps) * kStepBytes / 4 * (high ? 3 : 4);
    }
    int blocks() const { return static_cast<int>(steps) / kSteps; }
    int groups() const { return (blocks() + static_cast<int>(group_blocks) - 1) / static_cast<int>(group_blocks); }

    // The panels of one of several threads; pairs stay together.
    Share share(const Member& m) const {
        const int all = static_cast<int>(panels);
        const Share pairs = m.share((all + 1) / 2);
        return {std::min(2 * pairs.begin, all), std::min(2 * pairs.end, all)};
    }
};

template <class Do>
inline void with_plain_kind(int64_t kind, const Do& run) {
    kind == 0 ? run(F32{}) : kind == 1 ? run(BF16{}) : run(I8{});
}
template <class Do>
inline void with_kind(int64_t kind, const Do& run) {
    switch (kind) {
        case 0: case 1: case 2: return with_plain_kind(kind, run);
        case 3: return run(Grouped<4, false>{});
        case 4: return run(Grouped<4, true>{});
        case 5: return run(Grouped<8, false>{});
        default: return run(Grouped<8, true>{});
    }
}

struct Rows {
    float* at;
    size_t stride;
    int width;

    float* operator[](int r) const { return at + r * stride; }
    Rows from(int r) const { return {at + r * stride, stride, width}; }
};
inline Rows dense(float* at, int64_t width) { return {at, static_cast<size_t>(width), static_cast<int>(width)}; }

// Rows that a product reads, and the norm applied to them first.
struct Input {
    Rows x;
    int rows;
    Norm norm = {};
    const int32_t* chosen = nullptr;  // which rows of x; null: as they lie

    const float* row(int r) const { return x[chosen ? chosen[r] : r]; }
    Input part(int first, int count) const {
        return {chosen ? x : x.from(first), count, norm, chosen ? chosen + first : nullptr};
    }
};

// What is done with the results y of a product, after the function in its epilogue.
enum class Then {
    kStore,  // out = y; of paired columns out = gate * up
    kAdd,    // out += y; the target has whole vectors of columns
};

// A row after its norm, its values in another order, in memory of this thread.
inline const float* in_order(const RowNorm& norm, const float* x, int width, const int32_t* order) {
    static thread_local std::vector<float> room;
    room.resize(std::max<size_t>(room.size(), 2 * static_cast<size_t>(width)));
    float *to = room.data(), *values = to + width;
    if (norm) norm(values, x, width), x = values;
    for (int i = 0; i < width; i++) to[i] = x[order[i]];
    return to;
}

// Activations in the kernel's layout: per block of rows, for every unit of the inner dimension, the words of one row after
// the other. Each thread packs its share of the rows.
struct PackedRows {
    struct Quantum {
        float scale;
        int32_t offset;  // what sums have too much because weights are shifted: a multiple of the row's sum
    };
    uint32_t* words;
    Quantum* quantum;  // of each row, where rows become integers

    // Sums of a row's integers in each group, behind the words of all rows: what the offset adds too much, as an integer;
    // where groups have a value to subtract, the sum as a float.
    uint32_t* group_sums(int rows, int steps) const { return words + static_cast<size_t>(rows) * steps; }

    template <class K>
    void fill(const Input& in, const Linear& l, Share mine) const {
        const int groups = K::grouped ? l.groups() : 0;
        fill<K>(in, static_cast<int>(l.steps), mine, groups, static_cast<int>(l.group_blocks), l.offset, l.inputs);
    }

    template <class K>
    void fill(const Input& in, int steps, Share mine, int groups = 0, int group_blocks = 1, int64_t offset = 0,
              const int32_t* order = nullptr) const {
        for (int r = mine.begin; r < mine.end; r++) {
            const float* x = in.row(r);
            const int width = in.x.width;
            const RowNorm norm(in.norm, x, width);
            if (order) x = in_order(norm, x, width, order);
            const auto values = [&](int at) {
                if (at >= width) return splat(0.0f);
                const f32x16 lanes = load_upto(x + at, width - at);
                return norm && !order ? norm(lanes, at, width - at) : lanes;
            };
            f32x16 top = splat(0.0f);
            for (int at = 0; K::integers && at < width; at += kLanes) top = maximum(magnitude(values(at)), top);
            const float scale = largest(top) / 127.0f, units = scale > 0.0f ? 1.0f / scale : 0.0f;  // the largest becomes 127
            f32x16 total = splat(0.0f), of_group = splat(0.0f);
            uint32_t* sums = group_sums(in.rows, steps) + static_cast<size_t>(r) * groups;
            int left = group_blocks;  // in the group
            const int first = r / kBlock * kBlock, unit_stride = std::min(kBlock, in.rows - first) * kUnit;
            uint32_t* to = words + static_cast<size_t>(first) * steps + (r - first) * kUnit;
            for (int at = 0; at < steps * K::per_step; to += unit_stride)
                for (int part = 0; part < K::per_step; part++, at += kLanes) {
                    const f32x16 lanes = values(at);
                    K::encode(lanes, units, to + part * (kLanes / K::per_step));
                    if constexpr (K::grouped) {
                        of_group += to_float(nearest_integers(lanes * splat(units)));
                        if (--left && at + kLanes < steps * K::per_step) continue;
                        *sums++ = K::group_sum(sum(of_group), offset);
                        total += of_group, of_group = splat(0.0f), left = group_blocks;
                    } else if (K::integers) {
                        total += to_float(nearest_integers(lanes * splat(units)));
                    }
                }
            if constexpr (K::integers) {
                // a value that is not finite becomes -2^31 as an integer, and no row of finite values adds up to that
                const float all = sum(total);
                const bool sound = std::abs(all) <= 128.0f * static_cast<float>(width);
                quantum[r] = {sound ? scale : NAN, sound ? (128 - K::missing) * static_cast<int32_t>(all) : 0};
            }
        }
    }
};

// What adapters add to a product (lora.h): all of it, and the rows of a block from `first` on.
struct Deltas;
struct RowDeltas {
    const Deltas* all = nullptr;  // null: no row has an adapter
    int first = 0;
};
// Adapters beside float32 weights are float32, beside others bf16.
template <class K>
using RankKind = std::conditional_t<std::is_same<K, F32>::value, F32, BF16>;
// Computes the ranks of all rows, by every thread of a team. The rows are packed, and this is the barrier after that.
template <class K>
void prepare_deltas(const Deltas& deltas, const Input& in, const PackedRows& packed, const Member& m);
// What is added to the results of rows over each of some panels: -0, which changes nothing, for rows without an adapter.
template <class K>
__attribute__((noinline)) void put_deltas(const RowDeltas& block, int rows, Share panels, float (*to)[kLanes]);
constexpr int kDeltaPanels = 128;  // of one call, so that each row's B is read as a stream
inline float (*room_for_deltas())[kLanes] {
    alignas(64) static thread_local float room[kDeltaPanels * kBlock][kLanes];
    return room;
}

// Decoding of weights: `pair` gives two of the four steps of the block at `w`. Packed12Block is 12-bit packed bf16
// (lossless): 128 low bytes, then 128 four-bit codes of high bytes.
struct RawBlock {
    static constexpr int bytes = kSteps * kStepBytes;
    template <int half>
    static void pair(const char* w, Words, Words* step) {
        step[0] = load_words(w + half * 2 * kStepBytes), step[1] = load_words(w + (half * 2 + 1) * kStepBytes);
    }
};
struct Packed12Block {
    static constexpr int bytes = 3 * kStepBytes;
    template <int half>
    static void pair(const char* w, Words table, Words* step) {
        Words code = load_words(w + 2 * kStepBytes);
        if (half) code = shift_down<4>(code);
        const Words low = load_words(w + half * kStepBytes), high = look_up(table, code & splat_word(0x0f0f0f0fu));
        step[0] = join_bytes_low(low, high), step[1] = join_bytes_high(low, high);
    }
};

// Finishes a panel of results y by the matrix's epilogue. `y` has room for twice the rows: the results of a gate wait in the
// first half for the other columns. Not inlined: epilogues that are not in `finish` are rare, or follow large products.
__attribute__((noinline)) inline void finish_by_epilogue(const Linear& l, float (*y)[kLanes], int rows, int panel,
                                                         const Rows& out, Then then) {
    const bool gated = l.paired && panel % 2;
    if (!gated) apply(l.epilogue, y, rows);
    if (l.paired && !gated) return;
    const int at = (gated ? panel / 2 : panel) * kLanes, room = out.width - at;
    for (int r = 0; r < rows; r++) {
        const f32x16 value = gated ? load(y[r]) * of_up(l.epilogue, load(y[rows + r])) : load(y[r]);
        float* to = out[r] + at;
        then == Then::kStore ? store_upto(to, value, room) : store(to, load(to) + value);
    }
}

// Turns the sums of R rows over one panel into results: int8 sums lose their offset and are scaled, the bias is added, and
// then what adapters add (`extra`, or null), and the epilogue is applied. `waiting` has room for twice the rows.
template <class K, int R>
__attribute__((always_inline)) inline void finish(const Linear& l, const typename K::Acc* sums, int panel, const Rows& out,
                                                  Then then, const PackedRows::Quantum* rows, float (*waiting)[kLanes],
                                                  const float (*extra)[kLanes]) {
    const bool gate = l.paired && l.epilogue.function == Function::kSilu;
    const bool plain = !l.paired && l.epilogue.function == Function::kNone;
    const int at = (gate ? panel / 2 : panel) * kLanes, room = out.width - at;
    float* first = out.at + at;
    const size_t stride = out.stride;
    const int column = panel * kLanes;
    const float* bias = l.bias ? l.bias + column : nullptr;
    const auto all = [&](const auto& put) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            f32x16 y;
            if constexpr (K::grouped)
                y = sums[r] * load(l.scale + column) * splat(rows[r].scale);
            else if constexpr (K::integers)
                y = to_float(sums[r] - splat_word(rows[r].offset)) * load(l.scale + column) * splat(rows[r].scale);
            else
                y = sums[r];
            y = bias ? y + load(bias) : y;
            put(r, first + r * stride, extra ? y + load(extra[r]) : y);
        }
    };
    if (plain && then == Then::kStore) return all([&](int, float* to, f32x16 y) { store_upto(to, y, room); });
    if (plain) return all([&](int, float* to, f32x16 y) { store(to, load(to) + y); });
    if (gate && panel % 2)
        return all([&](int r, float* to, f32x16 y) { store_upto(to, silu(load(waiting[r])) * y, room); });
    const int half = l.paired && panel % 2 ? R : 0;
    all([&](int r, float*, f32x16 y) { store(waiting[half + r], y); });
    if (!gate) finish_by_epilogue(l, waiting, R, panel, out, then);
}

// R rows of words times one panel. A unit of the rows' words lies every `unit` words. A result is one chain of steps, or
// the sum of four that take a block's steps in turn: adapters have so few results that one chain would wait for itself.
template <class K, class Form, int R, int Chains = 1>
inline void multiply(const uint32_t* x, const Linear& l, int panel, typename K::Acc* sums, size_t unit = R * kUnit) {
    constexpr bool packed12 = std::is_same<Form, Packed12Block>::value;
    const char* w = l.weights + l.panel_bytes() * panel;
    const Words table = packed12 ? load_words(l.high) : splat_word(0);
    const int32_t* escaped = packed12 ? l.escaped + l.first_escaped[panel] : nullptr;
    const char* raw = packed12 ? l.raw_blocks + static_cast<size_t>(l.first_escaped[panel] - panel) * RawBlock::bytes : nullptr;
    typename K::Acc acc[R * Chains];  // a local array stays in registers; `sums` would not
#pragma GCC unroll 16
    for (int r = 0; r < R * Chains; r++) acc[r] = K::zero();
    for (int block = 0, blocks = static_cast<int>(l.steps) / kSteps; block < blocks; x += unit)
        for (const uint32_t *at = x, *end = x + kUnit; at < end; at += kSteps, block++, w += Form::bytes) {
            const bool escapes = packed12 && __builtin_expect(block == *escaped, false);
            Words step[2];
            const auto join = [&](const uint32_t* words, int first) {
#pragma GCC unroll 32
                for (int i = 0; i < 2 * R; i++) {
                    typename K::Acc& sum = acc[i % R + (first + i / R) % Chains * R];
                    sum = K::join(sum, step[i / R], words + i % R * kUnit + i / R);
                }
            };
            // with several rows there is time to prefetch a line into L2 early and into L1 late
#pragma GCC unroll 4
            for (int line = 0; line < Form::bytes; line += kStepBytes) {
                if (R >= 4) fetch_early(w + 4 * kPrefetch + line);
                fetch(w + (R >= 4 ? kPrefetch / 2 : kPrefetch) + line);
            }
            Form::template pair<0>(w, table, step);
            if (escapes) RawBlock::pair<0>(raw, table, step);
            join(at, 0);
            Form::template pair<1>(w, table, step);
            if (escapes) {
                RawBlock::pair<1>(raw, table, step), escaped++, raw += RawBlock::bytes;
                for (int line = 0; line < RawBlock::bytes; line += kStepBytes) fetch(raw + line);  // the next
            }
            join(at + 2, 2);
        }
    for (int r = R; r < R * Chains; r++) acc[r % R] = acc[r % R] + acc[r];
    std::memcpy(sums, acc, R * sizeof acc[0]);
}

// R rows times one panel of groups; see groups.h. Units of the rows' words lie every `unit` words, and a row's group sums
// every l.groups().
template <class K, int R>
__attribute__((noinline)) void multiply_groups(const uint32_t* x, size_t unit, const uint32_t* row_sums, const Linear& l,
                                               int panel, f32x16* sums);

#if defined(__AMX_TILE__)
// Products by AMX tiles of 16 x 16 results. A unit of a panel has the layout of a tile, and so do 16 rows of a block. Rows
// past the end of the block read the memory that follows, and their results are ignored. The bits differ from the vector
// kernel's, because the unit adds in another order, but they do not depend on the number of rows.
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
    const size_t panel_stride = l.panel_bytes();
    const char* w = l.weights + panel_stride * panel;
    size_t prefetch = kPrefetch;
    asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#define OUTRIDER_JOIN(c, tile)                                                                            \
    if (c < count) {                                                                                      \
        for (int line = 0; line < kUnit; line++) fetch(w + c * panel_stride + prefetch + line * kStepBytes);        \
        _tile_loadd(tile, w + c * panel_stride, kStepBytes);                                                     \
        if constexpr (std::is_same<K, I8>::value) { _tile_dpbsud(c, 4, tile); } else { _tile_dpbf16ps(c, 4, tile); } \
    }
    const int steps = static_cast<int>(l.steps);
    for (int s = 0, end = std::max(steps - kPrefetch / kStepBytes, 0); s < steps;
         end = steps, prefetch += (count - 1) * panel_stride)
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

// Packed rows of a block, or of a part of it. A unit of the rows' words lies every `unit` words.
struct PackedBlock {
    const uint32_t *words, *group_sums;
    const PackedRows::Quantum* quantum;
    size_t unit;

    PackedBlock from(int row, int groups) const {
        return {words + row * kUnit, group_sums + static_cast<size_t>(row) * groups, quantum + row, unit};
    }
};

// Rows of one pass over a panel. Of groups, sums take two registers: of the group and of the groups before.
template <class K>
constexpr int kPass = !K::grouped ? kBlock : kRegisters == 32 ? 8 : 2;

// Panels [panel, end) times `rows` rows, at most R. Not inlined: in a larger function gcc keeps the sums on the stack.
template <class K, class Form, int R = kPass<K>>
__attribute__((noinline)) void run_panels(int rows, const PackedBlock& x, const Linear& l, int panel, int end, const Rows& out,
                                          Then then, RowDeltas deltas) {
    if constexpr (R > 1)
        if (rows < R) return run_panels<K, Form, R - 1>(rows, x, l, panel, end, out, then, deltas);
    alignas(64) float waiting[2 * R][kLanes];
    typename K::Acc sums[R];
    const float (*extra)[kLanes] = nullptr;
    if (deltas.all) {
        put_deltas<RankKind<K>>(deltas, R, {panel, end}, room_for_deltas());
        extra = room_for_deltas();
    }
    const auto finish_panel = [&](int at) {
        finish<typename K::Sums, R>(l, sums, at, out, then, x.quantum, waiting, extra);
        if (extra) extra += R;
    };
#if defined(__AMX_TILE__)
    if constexpr (K::tiled) {
        for (; panel < end; panel += 4) {
            const int count = std::min(4, end - panel);
            alignas(64) Tile tile[4];
            multiply_tiles<K>(x.words, x.unit, l, panel, count, tile);
            for (int p = 0; p < count; p++) {
                std::memcpy(sums, tile[p], sizeof sums);
                finish_panel(panel + p);
            }
        }
    }
#endif
    for (; panel < end; panel++) {
        // prefetch scale and bias, which lie outside the stream of weights, while the sums are computed
        if (l.scale) fetch(l.scale + (panel + 1) * kLanes - 1);
        if (l.bias) fetch(l.bias + (panel + 1) * kLanes - 1);
        if constexpr (K::grouped)
            multiply_groups<K, R>(x.words, x.unit, x.group_sums, l, panel, sums);
        else
            multiply<K, Form, R>(x.words, l, panel, sums);
        finish_panel(panel);
    }
}

// Some panels times all rows.
template <class K, class Form>
void linear(const Linear& l, const PackedRows& x, int rows, const Rows& out, Then then, Share mine, const Deltas* deltas) {
#if defined(__AMX_TILE__)
    const TilesInUse tiles;
#endif
    const int group = rows > kBlock || kTiles ? kGroup : deltas ? kDeltaPanels : static_cast<int>(l.panels);
    for (int panel = mine.begin; panel < mine.end; panel += group)
        for (int first = 0; first < rows; first += kBlock) {
            const int end = std::min(panel + group, mine.end), of_block = std::min(kBlock, rows - first);
            const int groups = K::grouped ? l.groups() : 0;
            const PackedBlock block{x.words + static_cast<size_t>(first) * l.steps,
                                    x.group_sums(rows, static_cast<int>(l.steps)) + static_cast<size_t>(first) * groups,
                                    x.quantum + first, static_cast<size_t>(of_block) * kUnit};
            for (int part = 0; part < of_block; part += kPass<K>)
                run_panels<K, Form>(std::min(kPass<K>, of_block - part), block.from(part, groups), l, panel, end,
                                    out.from(first + part), then, RowDeltas{deltas, first + part});
        }
}

template <class K>
void multiply_share(const Linear& l, const PackedRows& x, int rows, const Rows& out, Then then, Share mine, const Deltas* deltas) {
    if constexpr (std::is_same<K, BF16>::value && !kTiles)
        if (l.high) return linear<K, Packed12Block>(l, x, rows, out, then, mine, deltas);
    linear<K, RawBlock>(l, x, rows, out, then, mine, deltas);
}

// All rows times all panels, by every thread of a team. With `ready` the whole result is visible to all threads when it
// returns; without it, for at most kChunk rows, only the columns of this thread are. With `deltas`, of adapters that some row
// has, there are at most kChunk rows.
inline void multiply_rows(const Linear& l, const Input& in, const Rows& out, Then then, const PackedRows& packed,
                          const Member& m, bool ready = true, const Deltas* deltas = nullptr) {
    const char* mine = l.weights + l.panel_bytes() * l.share(m).begin;
    for (int line = 0; line < kPrefetch; line += kStepBytes) fetch(mine + line);  // while rows are packed
    with_kind(l.kind, [&](auto kind) {
        using K = decltype(kind);
        for (int first = 0; first < in.rows; first += kChunk) {
            const Input part = in.part(first, std::min(kChunk, in.rows - first));
            const bool alone = part.rows == 1 && m.threads <= kChunk / 8 && !deltas;  // every thread packs the row: no barrier
            const int slot = alone ? 8 * m.thread : 0;
            const PackedRows part_rows{packed.words + static_cast<size_t>(slot) * l.steps, packed.quantum + slot};
            part_rows.fill<K>(part, l, alone ? Share{0, 1} : m.share(part.rows));
            if (deltas) prepare_deltas<K>(*deltas, part, part_rows, m);
            if (!alone) m.barrier();
            const Rows to = out.from(first);
            multiply_share<K>(l, part_rows, part.rows, to, then, l.share(m), deltas);
            if (ready) m.barrier();
        }
    });
}

}  // namespace outrider
