// Linear layers: weights packed once, activations packed per product, one kernel for every row count.
//
// Weights lie in panels of 16 output columns, each a contiguous run of blocks of four steps (simd.h). A thread's share
// of the panels is one stream of memory: up to kBlock rows meet a panel while it passes, each with one register for its
// sums, so their number never changes the order of additions. Two streams side by side are slower from memory, and one
// row's single chain of additions still keeps up with it.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "simd.h"
#include "threads.h"

namespace outrider {

enum Kind : int32_t { kF32 = 0, kBF16 = 1, kI8 = 2 };

constexpr int kStepBytes = 64;
constexpr int kSteps = 4;                          // of a block
constexpr int kUnit = 16;                          // steps whose words of one row lie together: a row of an AMX tile
constexpr int kBlock = kRegisters == 32 ? 16 : 4;  // rows of one pass over a panel
constexpr int kChunk = 64;                         // rows that share one pass over all weights
constexpr int kPrefetch = 4096;                    // bytes ahead in the stream of weights
#if defined(__AMX_TILE__)
constexpr bool kThin = false;  // tiles are loaded as they lie
constexpr int kGroup = 8;      // panels that meet one block of rows after the other
#else
constexpr bool kThin = true;
constexpr int kGroup = 2;
#endif

inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

// Memory for weights, in huge pages where the kernel grants them: what is packed in a row lies in a row, so that small
// matrices have them too: looking up pages of 4 KB costs 3 to 5 % of a forward.
inline std::shared_ptr<char> allocate(size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    constexpr size_t kArena = 0;  // each by itself, so that overruns are noticed
#else
    constexpr size_t kArena = size_t{32} << 20;
#endif
    constexpr size_t kHuge = size_t{2} << 20;
    static std::mutex mutex;
    static std::shared_ptr<char> arena;
    static size_t size = 0, used = 0;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!arena || used + bytes > size) {
        size = (std::max(bytes, kArena) + kHuge - 1) / kHuge * kHuge, used = 0;
        arena.reset(static_cast<char*>(std::aligned_alloc(kHuge, size)), std::free);
        if (!arena) throw std::bad_alloc();
        madvise(arena.get(), size, MADV_HUGEPAGE);
    }
    std::shared_ptr<char> piece(arena, arena.get() + used);
    used += (bytes + kStepBytes - 1) / kStepBytes * kStepBytes;
    return piece;
}

// A share [begin, end) of `count` things for one of several threads.
struct Share {
    int begin, end;
    Share(int from, int to) : begin(from), end(to) {}
    Share(int count, int thread, int threads)
        : begin(static_cast<int>(int64_t{count} * thread / threads)),
          end(static_cast<int>(int64_t{count} * (thread + 1) / threads)) {}
};

struct Linear {
    Kind kind;
    int columns, inner, panels, steps;
    bool paired;                     // panels alternate between two halves of the columns: gate 0, up 0, gate 1, ...
    bool thin = false;               // blocks are 12 bits a weight; see make_thin
    std::shared_ptr<char> weights;   // [panels][steps][16 columns][4 / size values]
    std::vector<float> bias, scale;  // per packed column, where there are any; scale for int8
    std::vector<int32_t> offset;     // int8: 128 x the column's sum, which the shifted activations add too much
    // of thin panels: their sixteen high bytes; the blocks that need others, behind them -1; where a panel's begin
    std::vector<std::array<uint8_t, 16>> high;
    std::vector<int32_t> escaped, first_escaped;
    std::vector<std::array<uint16_t, kSteps * 32>> whole;  // escaped blocks as they are

    size_t panel_bytes() const { return static_cast<size_t>(steps) * kStepBytes / 4 * (thin ? 3 : 4); }
    size_t bytes() const { return panel_bytes() * panels + whole.size() * sizeof whole[0]; }

    // The panels of one of several threads; pairs stay together.
    Share share(int thread, int threads) const {
        const Share pairs((panels + 1) / 2, thread, threads);
        return {std::min(2 * pairs.begin, panels), std::min(2 * pairs.end, panels)};
    }

    // Which row of the stored matrix a packed column comes from; -1 fills a panel up.
    int source(int packed) const {
        if (!paired) return packed < columns ? packed : -1;
        const int half = columns / 2, panel = packed / kLanes, column = panel / 2 * kLanes + packed % kLanes;
        return column < half ? column + panel % 2 * half : -1;
    }
};

// The high byte of a bf16 value is its sign and all but one bit of its exponent, and sixteen of them cover nearly all
// weights of a panel. A thin block has 128 low bytes and 128 numbers of four bits that say which high byte: a quarter
// less to read, decoded in registers to the same bits. Blocks with other high bytes are kept whole beside the stream.
// False where too many are.
inline bool make_thin(Linear& l, const std::vector<char>& plain) {
    using Block = std::array<uint16_t, kSteps * 32>;
    const int blocks = l.steps / kSteps;
    const auto* from = reinterpret_cast<const Block*>(plain.data());
    std::vector<uint8_t> thin(plain.size() / 4 * 3);
    uint8_t* to = thin.data();
    for (int panel = 0; panel < l.panels; panel++, from += blocks) {
        std::array<int, 256> count{}, order, code;
        for (int b = 0; b < blocks; b++)
            for (uint16_t w : from[b]) count[w >> 8]++;
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return count[a] > count[b]; });
        code.fill(-1);
        l.high.emplace_back();
        for (int i = 0; i < 16; i++) l.high.back()[i] = static_cast<uint8_t>(order[i]), code[order[i]] = i;
        l.first_escaped.push_back(static_cast<int>(l.escaped.size()));
        for (int b = 0; b < blocks; b++, to += 192) {
            int all = 0;
            for (int i = 0; i < kSteps * 32; i++) {
                // two steps are the interleaved halves of 16-byte lanes: that is how bytes unpack to words
                const int step = i / 32, byte = i % 32 / 8 * 16 + step % 2 * 8 + i % 8, own = code[from[b][i] >> 8];
                all |= own;
                to[step / 2 * 64 + byte] = static_cast<uint8_t>(from[b][i]);
                to[128 + byte] |= static_cast<uint8_t>((own & 15) << step / 2 * 4);
            }
            if (all < 0) l.escaped.push_back(b), l.whole.push_back(from[b]);
        }
        l.escaped.push_back(-1);
    }
    l.thin = l.whole.size() * 16 < static_cast<size_t>(l.panels) * blocks;  // fewer than one in sixteen
    if (!l.thin) return l.whole.clear(), false;
    l.weights = allocate(thin.size());
    std::memcpy(l.weights.get(), thin.data(), thin.size());
    return true;
}

// `weight` is (columns, inner) row-major, float32 or bf16. int8 takes the largest magnitude of a row as 127.
inline std::unique_ptr<Linear> pack_linear(Kind kind, int columns, int inner, bool paired, const void* weight, bool is_bf16, const float* bias,
                           bool may_thin) {
    auto l = std::make_unique<Linear>();
    const int per_step = kind == kF32 ? 1 : kind == kBF16 ? 2 : 4;
    l->kind = kind, l->columns = columns, l->inner = inner, l->paired = paired;
    l->panels = paired ? 2 * ((columns / 2 + kLanes - 1) / kLanes) : (columns + kLanes - 1) / kLanes;
    l->steps = round_up((inner + per_step - 1) / per_step, kUnit);
    const int packed = l->panels * kLanes;
    std::vector<char> plain(l->panel_bytes() * l->panels);
    if (bias) l->bias.assign(packed, 0.0f);
    if (kind == kI8) l->scale.assign(packed, 0.0f), l->offset.assign(packed, 0);
    std::vector<float> row(static_cast<size_t>(l->steps) * per_step, 0.0f);
    for (int column = 0; column < packed; column++) {
        const int from = l->source(column);
        std::fill(row.begin(), row.end(), 0.0f);
        if (from >= 0) {
            for (int k = 0; k < inner; k++) {
                const size_t i = static_cast<size_t>(from) * inner + k;
                row[k] = is_bf16 ? from_bf16(static_cast<const uint16_t*>(weight)[i]) : static_cast<const float*>(weight)[i];
            }
            if (bias) l->bias[column] = bias[from];
        }
        float top = 0.0f;
        for (float w : row) top = std::max(top, std::fabs(w));
        const float scale = top / 127.0f;
        if (kind == kI8) l->scale[column] = scale;
        char* out = plain.data() + l->panel_bytes() * (column / kLanes) + column % kLanes * 4;
        for (int step = 0; step < l->steps; step++, out += kStepBytes) {
            const float* w = &row[static_cast<size_t>(step) * per_step];
            if (kind == kF32) std::memcpy(out, w, 4);
            if (kind == kBF16) {
                const uint16_t pair[2] = {to_bf16(w[0]), to_bf16(w[1])};
                std::memcpy(out, pair, 4);
            }
            if (kind == kI8) {
                for (int i = 0; i < 4; i++) {
                    const auto q = static_cast<int8_t>(scale > 0 ? std::lrint(w[i] / scale) : 0);
                    out[i] = static_cast<char>(q);
                    l->offset[column] += 128 * q;
                }
            }
        }
    }
    if (may_thin && kThin && kind == kBF16 && make_thin(*l, plain)) return l;
    l->weights = allocate(plain.size());
    std::memcpy(l->weights.get(), plain.data(), plain.size());
    return l;
}

// Rows of float32 that a product reads, and what is done to them first.
struct Input {
    const float* x;
    size_t stride;
    int rows, width;
    const float* norm = nullptr;  // weights of a root-mean-square norm over the row, or null
    float eps = 0.0f;
    const int32_t* chosen = nullptr;  // which rows of x; null: as they lie

    const float* row(int r) const { return x + (chosen ? chosen[r] : r) * stride; }
    Input part(int first, int count) const {
        return {chosen ? x : row(first), stride, count, width, norm, eps, chosen ? chosen + first : nullptr};
    }
};

inline f32x16 load_upto(const float* x, int left) { return left >= kLanes ? load(x) : load_first(x, left); }
inline void store_upto(float* to, f32x16 v, int left) { left >= kLanes ? store(to, v) : store_first(to, v, left); }

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

// Sixteen values as the words a product reads; one is so many units of int8.
template <class K>
inline void encode(f32x16 v, float units, uint32_t* out) {
    if constexpr (std::is_same<K, F32>::value) store_words(out, as_words(v));
    if constexpr (std::is_same<K, BF16>::value) {
#if defined(__AVX512BF16__)
        const __m256bh half = _mm512_cvtneps_pbh(v.v);
        std::memcpy(out, &half, sizeof half);
#else
        float x[kLanes];
        uint16_t half[kLanes];
        store(x, v);
        for (int i = 0; i < kLanes; i++) half[i] = to_bf16(x[i]);
        std::memcpy(out, half, sizeof half);
#endif
    }
    if constexpr (std::is_same<K, I8>::value) {
        const Words q = nearest_integers(v * splat(units));
        store_low_bytes(out, add_words(q, splat_word(128)));
    }
}

template <class K>
inline void encode_row(const float* x, int width, uint32_t* out) {
    for (int at = 0; at < width; at += kLanes, out += kLanes / K::per_step) {
        encode<K>(load_upto(x + at, width - at), 1.0f, out);
    }
}

// Activations as the kernel reads them: per block of rows, for every unit of the inner dimension, the words of
// one row after the other. Threads pack shares of the rows.
struct Packed {
    uint32_t* words;
    float* scale;  // of each row, for int8

    template <class K>
    void fill(const Input& in, int steps, Share mine) const {
        for (int r = mine.begin; r < mine.end; r++) {
            const float inverse = in.norm ? inverse_rms(in.row(r), in.width, in.eps) : 1.0f;
            const float quantum = std::is_same<K, I8>::value ? largest_of(in, r, inverse) / 127.0f : 1.0f;  // the largest becomes 127
            const float units = quantum > 0.0f ? 1.0f / quantum : 0.0f;
            const int first = r / kBlock * kBlock, apart = std::min(kBlock, in.rows - first) * kUnit;
            uint32_t* to = words + static_cast<size_t>(first) * steps + (r - first) * kUnit;
            for (int at = 0; at < steps * K::per_step; to += apart)
                for (int part = 0; part < K::per_step; part++, at += kLanes)
                    encode<K>(values(in, r, inverse, at), units, to + part * (kLanes / K::per_step));
            scale[r] = quantum;
        }
    }

   private:
    static f32x16 values(const Input& in, int row, float inverse, int at) {
        const int left = in.width - at;
        if (left <= 0) return splat(0.0f);
        const float* x = in.row(row) + at;
        return in.norm ? load_upto(x, left) * splat(inverse) * load_upto(in.norm + at, left) : load_upto(x, left);
    }

    static float largest_of(const Input& in, int row, float inverse) {
        f32x16 top = splat(0.0f);
        for (int at = 0; at < in.width; at += kLanes) top = maximum(magnitude(values(in, row, inverse, at)), top);
        return largest(top);
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
        const Words low = load_words(w + half * kStepBytes), high = look_up(table, and_words(code, splat_word(0x0f0f0f0fu)));
        step[0] = join_bytes_low(low, high), step[1] = join_bytes_high(low, high);
    }
};

// What becomes of a product's results. What is added to has whole vectors of columns.
enum class Then {
    kStore,  // out = y
    kAdd,    // out += y
    kGate,   // paired columns: out = silu(gate) * up
};

struct Output {
    float* out;
    size_t stride;
    int width;  // columns that may be written
    Then then;
};

// A sum as a result: int8 sums are freed of their offset and scaled; bias is added.
template <class K>
inline f32x16 finished(const Linear& l, typename K::Acc sum, int column, float scale) {
    f32x16 y;
    if constexpr (std::is_same<K, I8>::value)
        y = to_float(sub_words(sum, load_words(&l.offset[column]))) * load(&l.scale[column]) * splat(scale);
    else
        y = sum;
    return l.bias.empty() ? y : y + load(&l.bias[column]);
}

// Sums of R rows over one panel. Those of a gate wait in `pair` for its other half.
template <class K, int R>
inline void finish(const Linear& l, const typename K::Acc* sums, int panel, const Output& o, const float* scale, float (*pair)[R][kLanes]) {
    const bool gated = o.then == Then::kGate;
    const int at = (gated ? panel / 2 : panel) * kLanes, room = o.width - at;
    float* to = o.out + at;
    const auto rows = [&](const auto& put) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) put(r, finished<K>(l, sums[r], panel * kLanes, scale[r]));
    };
    if (gated)
        rows([&](int r, f32x16 y) { store(pair[panel % 2][r], y); });
    else if (o.then == Then::kAdd)
        rows([&](int r, f32x16 y) { store(to + r * o.stride, load(to + r * o.stride) + y); });
    else if (room >= kLanes)
        rows([&](int r, f32x16 y) { store(to + r * o.stride, y); });
    else
        rows([&](int r, f32x16 y) { store_first(to + r * o.stride, y, room); });
    if (gated && panel % 2)
        for (int r = 0; r < R; r++) {
            const f32x16 gate = load(pair[0][r]), up = load(pair[1][r]);
            store_upto(to + r * o.stride, gate / (splat(1.0f) + exponential(splat(0.0f) - gate)) * up, room);
        }
}

// What a panel's results need from beside the stream of weights, while the sums are being made.
inline void bring_near(const Linear& l, int panel) {
    const auto near = [&](const auto& values) {
        if (!values.empty()) _mm_prefetch(reinterpret_cast<const char*>(&values[(panel + 1) * kLanes - 1]), _MM_HINT_T0);
    };
    near(l.offset), near(l.scale), near(l.bias);
}

// R rows of words times one panel.
template <class K, class Form, int R>
inline void multiply(const uint32_t* x, const Linear& l, int panel, typename K::Acc* acc) {
    constexpr bool thin = std::is_same<Form, Thin>::value;
    const char* w = l.weights.get() + l.panel_bytes() * panel;
    const Words table = thin ? repeat_quarter(l.high[panel].data()) : zero_words();
    const int32_t* escaped = thin ? &l.escaped[l.first_escaped[panel]] : nullptr;
    const char* whole = thin ? reinterpret_cast<const char*>(l.whole.data() + l.first_escaped[panel] - panel) : nullptr;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = K::zero();
    for (int block = 0, blocks = l.steps / kSteps; block < blocks; x += R * kUnit)
        for (const uint32_t *at = x, *end = x + kUnit; at < end; at += kSteps, block++, w += Form::bytes) {
            const bool escapes = thin && __builtin_expect(block == *escaped, false);
            Words step[2];
            const auto join = [&](const uint32_t* words) {
#pragma GCC unroll 32
                for (int i = 0; i < 2 * R; i++)
                    acc[i % R] = K::join(acc[i % R], step[i / R], splat_word(words[i % R * kUnit + i / R]));
            };
            // many rows take so long with a line that it need not come nearer than the second cache
#pragma GCC unroll 4
            for (int line = 0; line < Form::bytes; line += kStepBytes)
                _mm_prefetch(w + kPrefetch + line, R < 8 ? _MM_HINT_T0 : _MM_HINT_T1);
            Form::template pair<0>(w, table, step);
            if (escapes) Whole::pair<0>(whole, table, step);
            join(at);
            Form::template pair<1>(w, table, step);
            if (escapes) {
                Whole::pair<1>(whole, table, step), escaped++, whole += Whole::bytes;
                for (int line = 0; line < Whole::bytes; line += kStepBytes) _mm_prefetch(whole + line, _MM_HINT_T0);  // the next
            }
            join(at + 2);
        }
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

// Sums of a group of panels.
struct Tile {
    alignas(64) float value[kGroup][kBlock][kLanes];
};

template <class K, int C>
inline void multiply_tiles(const uint32_t* x, size_t unit, const char* w, size_t panel, int steps, Tile& out, int at) {
#define OUTRIDER_JOIN(c, tile)                                                    \
    if constexpr (C > c) {                                                        \
        for (int line = 0; line < kUnit; line++)                                  \
            _mm_prefetch(w + c * panel + ahead + line * kStepBytes, _MM_HINT_T0); \
        _tile_loadd(tile, w + c * panel, kStepBytes);                             \
        if constexpr (std::is_same<K, I8>::value) {                               \
            _tile_dpbusd(c, 4, tile);                                             \
        } else {                                                                  \
            _tile_dpbf16ps(c, 4, tile);                                           \
        }                                                                         \
    }
    asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    size_t ahead = kPrefetch;
    for (int s = 0, end = std::max(steps - kPrefetch / kStepBytes, 0); s < steps; end = steps, ahead += (C - 1) * panel)
        for (; s < end; s += kUnit, x += unit, w += kUnit * kStepBytes) {
            _tile_loadd(4, x, kUnit * sizeof(uint32_t));
            OUTRIDER_JOIN(0, 5) OUTRIDER_JOIN(1, 6) OUTRIDER_JOIN(2, 7) OUTRIDER_JOIN(3, 5)
        }
#undef OUTRIDER_JOIN
    _tile_stored(0, out.value[at], kStepBytes);
    if constexpr (C > 1) {
        _tile_stored(1, out.value[at + 1], kStepBytes);
    }
    if constexpr (C > 2) {
        _tile_stored(2, out.value[at + 2], kStepBytes);
        _tile_stored(3, out.value[at + 3], kStepBytes);
    }
    asm volatile("" ::: "memory");
}

// In place of the vector kernel for bf16 and int8, for every number of rows.
template <class K, int R, int C = 4>
inline void multiply_group_tiles(const uint32_t* x, const Linear& l, int panel, int panels, Tile& out, int done = 0) {
    const size_t bytes = l.panel_bytes();
    for (; done + C <= panels; done += C)
        multiply_tiles<K, C>(x, R * kUnit, l.weights.get() + (panel + done) * bytes, bytes, l.steps, out, done);
    if constexpr (C > 1) multiply_group_tiles<K, R, C / 2>(x, l, panel, panels, out, done);
}
#endif

// Panels [panel, end) times R rows.
using Kernel = void (*)(const uint32_t*, const Linear&, int, int, const Output&, const float*);
template <class K, class Form, int R>
void run_panels(const uint32_t* x, const Linear& l, int panel, int end, const Output& o, const float* scale) {
    alignas(64) float pair[2][R][kLanes];
    typename K::Acc sums[R];
#if defined(__AMX_TILE__)
    if constexpr (!std::is_same<K, F32>::value) {
        Tile tile;
        multiply_group_tiles<K, R>(x, l, panel, end - panel, tile);
        for (int p = panel; p < end; p++) {
            std::memcpy(sums, tile.value[p - panel], sizeof sums);
            finish<K, R>(l, sums, p, o, scale, pair);
        }
        return;
    }
#endif
    for (; panel < end; panel++) {
        bring_near(l, panel);
        multiply<K, Form, R>(x, l, panel, sums);
        finish<K, R>(l, sums, panel, o, scale, pair);
    }
}
template <class K, class Form, int... R>
constexpr std::array<Kernel, kBlock> kernels_of(std::integer_sequence<int, R...>) {
    return {run_panels<K, Form, R + 1>...};
}

// Panels of this thread times all rows.
template <class K, class Form>
void linear_of(const Linear& l, const Packed& x, int rows, const Output& o, int thread, int threads) {
    static constexpr auto kernels = kernels_of<K, Form>(std::make_integer_sequence<int, kBlock>{});
    const Share mine = l.share(thread, threads);
#if defined(__AMX_TILE__)
    const TilesInUse tiles;
#endif
    const int group = rows > kBlock || !kThin ? kGroup : l.panels;
    for (int panel = mine.begin; panel < mine.end; panel += group)
        for (int first = 0; first < rows; first += kBlock)
            kernels[std::min(kBlock, rows - first) - 1](x.words + static_cast<size_t>(first) * l.steps, l, panel,
                                                        std::min(panel + group, mine.end),
                                                        {o.out + first * o.stride, o.stride, o.width, o.then}, x.scale + first);
}

inline void pack_rows(const Packed& x, const Linear& l, const Input& in, int thread, int threads) {
    const Share mine(in.rows, thread, threads);
    if (l.kind == kF32) x.fill<F32>(in, l.steps, mine);
    if (l.kind == kBF16) x.fill<BF16>(in, l.steps, mine);
    if (l.kind == kI8) x.fill<I8>(in, l.steps, mine);
}

inline void linear(const Linear& l, const Packed& x, int rows, const Output& o, int thread, int threads) {
    if (l.kind == kF32) linear_of<F32, Whole>(l, x, rows, o, thread, threads);
    if (l.kind == kBF16 && !l.thin) linear_of<BF16, Whole>(l, x, rows, o, thread, threads);
    if (l.kind == kBF16 && l.thin && kThin) linear_of<BF16, Thin>(l, x, rows, o, thread, threads);
    if (l.kind == kI8) linear_of<I8, Whole>(l, x, rows, o, thread, threads);
}

// All rows times all panels, by every thread of a team; the result is ready for all of them when it returns.
inline void multiply_rows(const Linear& l, const Input& in, const Output& o, const Packed& packed, Team& team, int thread,
                          int threads) {
    const char* mine = l.weights.get() + l.panel_bytes() * l.share(thread, threads).begin;
    for (int line = 0; line < kPrefetch; line += kStepBytes) _mm_prefetch(mine + line, _MM_HINT_T0);  // while rows are packed
    for (int first = 0; first < in.rows; first += kChunk) {
        const Input part = in.part(first, std::min(kChunk, in.rows - first));
        pack_rows(packed, l, part, thread, threads);
        team.barrier();
        linear(l, packed, part.rows, {o.out + first * o.stride, o.stride, o.width, o.then}, thread, threads);
        team.barrier();
    }
}

}  // namespace outrider
