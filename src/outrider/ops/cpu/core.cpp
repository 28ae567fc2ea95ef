// The layer stack in one call, and the C interface that ctypes binds (ops/native.py mirrors the structs).
//
// All threads run the same code over the same rows and meet at barriers; each computes its share of the
// columns, heads or rows. Nothing is summed across threads, so the bits do not depend on their number.

#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>

#include "attention.h"
#include "choice.h"

namespace outrider {

struct LayerSpec {
    const Linear *qkv, *out, *gate_up, *down;
    const float *norm_in, *norm_mlp;  // null: no norm there
    const float *q_norm, *k_norm;
    int64_t window;  // 0: none
};

// How rows enter the first layer.
enum Form : int64_t {
    kTokens = 0,  // embeddings, or hidden rows that left an earlier layer
    kJoined = 1,  // a linear layer over embedding and feature side by side (EAGLE-1)
    kBeside = 2,  // features; the layer's q, k, v read normed embedding and feature side by side (EAGLE-3)
};

struct StackSpec {
    int64_t hidden, heads, kv_heads, head_dim, ffn, layers, vocab, positions, form, residual_normed;
    double eps;
    const LayerSpec* layer;
    const Linear* joined;    // of kJoined
    const Linear* output;    // the matrix of logits, or null
    const float* norm;         // the last norm, or null
    const float* norm_hidden;  // of kBeside: the feature's
    const float* embedding;  // (vocab, hidden)
    const float *cos, *sin;  // (positions, head_dim / 2)
};

struct ForwardSpec {
    const int32_t* layout;  // see read_layout
    uint32_t *keys, *values;  // (layers, pages, KV heads, words of a page); see attention.h
    int64_t pages, page_size, per_word;
    int64_t first_layer, last_layer;
    int64_t rotary_lag;       // rotary position = position - lag
    const float* features;    // (rows, hidden): features, or the stream entering first_layer; null: embed tokens
    const int32_t* tapped;    // layers whose input rows are wanted
    int64_t taps;
    float* tap_rows;          // (rows, taps, hidden)
    float* stream;            // (rows, hidden) leaving last_layer, or null
    float* last;              // the same after the last norm, or null
    const int32_t* wanted;    // rows whose logits are wanted
    int64_t wants;
    float* logits;            // (wants, vocab)
    int64_t threads;
};

// The rows of a forward, laid out.
struct Layout {
    int rows = 0;
    const int32_t* tokens = nullptr;
    std::vector<Feed> feeds;
    std::vector<Row> row;
    std::vector<int32_t> paths;
};

// layout: feeds, rows, then per feed (start, fed, nodes, known, first_key, pages), then tokens of all rows, then
// the pages of each feed, then the parents of each feed's nodes. False where it contradicts itself.
bool read_layout(const int32_t* in, Layout& l) {
    const int feeds = in[0];
    l.rows = in[1];
    const int32_t* head = in + 2;
    l.tokens = head + 6 * feeds;
    const int32_t* rest = l.tokens + l.rows;
    l.feeds.clear(), l.row.clear(), l.paths.clear();
    for (int f = 0; f < feeds; f++, head += 6) {
        l.feeds.push_back({head[0], head[1], head[2], head[3], head[4], head[5], rest, nullptr, false});
        rest += head[5];
    }
    size_t steps = 0;
    for (Feed& feed : l.feeds) {
        feed.parents = rest;
        rest += feed.nodes;
        for (int i = 0; i < feed.nodes; i++) feed.tree |= feed.parents[i] != i - 1;
        if (feed.tree) steps += static_cast<size_t>(feed.nodes) * feed.nodes;
    }
    l.paths.reserve(steps);  // rows point into it
    std::vector<int> depth;
    for (const Feed& feed : l.feeds) {
        for (int i = 0; i < feed.fed; i++) l.row.push_back({&feed, feed.start + i, feed.start + i, nullptr});
        depth.assign(feed.nodes, 1);
        for (int i = 0; i < feed.nodes; i++) {
            if (feed.parents[i] >= i) return false;
            if (feed.parents[i] >= 0) depth[i] = depth[feed.parents[i]] + 1;
            if (i < feed.known) continue;
            const int32_t* path = nullptr;
            if (feed.tree) {
                l.paths.resize(l.paths.size() + depth[i]);
                path = l.paths.data() + l.paths.size() - depth[i];
                for (int node = i, at = depth[i]; node >= 0; node = feed.parents[node])
                    const_cast<int32_t*>(path)[--at] = feed.root() + 1 + node;
            }
            l.row.push_back({&feed, feed.root() + depth[i], feed.root() + 1 + i, path});
        }
    }
    return static_cast<int>(l.row.size()) == l.rows;
}

// Whether every row reads and writes memory that is there: nothing a caller lays out wrongly may do worse than fail.
bool is_sound(const Layout& l, const StackSpec& s, const ForwardSpec& f) {
    for (const Feed& feed : l.feeds) {
        const int64_t slots = int64_t{feed.start} + feed.fed + feed.nodes;
        if (feed.start < 0 || feed.first_key < 0 || slots > feed.page_count * f.page_size) return false;
        for (int p = 0; p < feed.page_count; p++)
            if (feed.pages[p] < 0 || feed.pages[p] >= f.pages) return false;
    }
    for (int r = 0; r < l.rows; r++)
        if (l.tokens[r] < 0 || l.tokens[r] >= s.vocab || l.row[r].position - f.rotary_lag >= s.positions) return false;
    for (int64_t i = 0; i < f.wants; i++)
        if (f.wanted[i] < 0 || f.wanted[i] >= l.rows) return false;
    return true;
}

// Rows between layers, kept from call to call.
struct Workspace {
    std::vector<float> x, wide, qkv, mixed, gated;
    std::vector<uint32_t> words;
    std::array<float, kChunk> scale{};
    std::vector<std::vector<float>> scratch;  // per thread
    Layout layout;

    // Room for a chunk of rows of that width.
    template <class T>
    static T* grow(std::vector<T>& v, size_t width) {
        v.resize(std::max(v.size(), kChunk * width));
        return v.data();
    }
    Packed packed(size_t width) { return {grow(words, width + kStepBytes), scale.data()}; }
};

constexpr int kWidest = 512;  // values of a head; Stack (ops/native.py) refuses wider ones

class Forward {
   public:
    Forward(const StackSpec& s, const ForwardSpec& f, Workspace& w, int threads) : s_(s), f_(f), layout_(w.layout), w_(w) {
        hidden_ = static_cast<int>(s.hidden), eps_ = static_cast<float>(s.eps);
        x_stride_ = round_up(hidden_, kLanes);
        wide_stride_ = round_up(2 * hidden_, kLanes);
        qkv_stride_ = round_up(static_cast<int>((s.heads + 2 * s.kv_heads) * s.head_dim), kLanes);
        mixed_stride_ = round_up(static_cast<int>(s.heads * s.head_dim), kLanes);
        gated_stride_ = round_up(static_cast<int>(s.ffn), kLanes);
        x_ = Workspace::grow(w.x, x_stride_);
        wide_ = Workspace::grow(w.wide, wide_stride_);
        qkv_ = Workspace::grow(w.qkv, qkv_stride_);
        mixed_ = Workspace::grow(w.mixed, mixed_stride_);
        gated_ = Workspace::grow(w.gated, gated_stride_);
        packed_ = w.packed(std::max({wide_stride_, mixed_stride_, gated_stride_}));
        w.scratch.resize(std::max(w.scratch.size(), static_cast<size_t>(threads)));
    }

    // What every thread runs.
    void run(Team& team, int thread, int threads) {
        Member m{*this, team, thread, threads};
        for (int first = 0; first < layout_.rows; first += kChunk) m.chunk(first, std::min(kChunk, layout_.rows - first));
        if (!f_.wants) return;
        const Input ends{f_.last, static_cast<size_t>(hidden_), static_cast<int>(f_.wants), hidden_, nullptr, 0.0f, f_.wanted};
        const Output to{f_.logits, static_cast<size_t>(s_.output->columns), s_.output->columns, Then::kStore};
        multiply_rows(*s_.output, ends, to, packed_, team, thread, threads);
    }

   private:
    // One thread's part of the work on one chunk of rows.
    struct Member {
        Forward& o;
        Team& team;
        int thread, threads;
        int first = 0, rows = 0;

        void chunk(int at, int count) {
            first = at, rows = count;
            enter();
            for (int i = static_cast<int>(o.f_.first_layer); i < o.f_.last_layer; i++) {
                tap(i);
                layer(o.s_.layer[i], i);
            }
            tap(static_cast<int>(o.f_.last_layer));
            leave();
        }

        void barrier() const { team.barrier(); }
        Share share(int count) const { return Share(count, thread, threads); }

        void multiply(const Linear& l, const Input& in, float* out, size_t stride, Then then) {
            multiply_rows(l, in, {out, stride, static_cast<int>(stride), then}, o.packed_, team, thread, threads);
        }

        void layer(const LayerSpec& l, int index) {
            const StackSpec& s = o.s_;
            const Input rows_in = s.form == kBeside ? beside(l) : Input{o.x_, o.x_stride_, rows, o.hidden_, l.norm_in, o.eps_};
            multiply(*l.qkv, rows_in, o.qkv_, o.qkv_stride_, Then::kStore);
            attention(l, index);
            const Input mixed{o.mixed_, o.mixed_stride_, rows, static_cast<int>(s.heads * s.head_dim)};
            multiply(*l.out, mixed, o.x_, o.x_stride_, Then::kAdd);
            multiply(*l.gate_up, {o.x_, o.x_stride_, rows, o.hidden_, l.norm_mlp, o.eps_}, o.gated_, o.gated_stride_, Then::kGate);
            multiply(*l.down, {o.gated_, o.gated_stride_, rows, static_cast<int>(s.ffn)}, o.x_, o.x_stride_, Then::kAdd);
        }

        void attention(const LayerSpec& l, int index) {
            const StackSpec& s = o.s_;
            const int kv_heads = static_cast<int>(s.kv_heads), dim = static_cast<int>(s.head_dim), width = round_up(dim, kLanes);
            const size_t layer_size = static_cast<size_t>(o.f_.pages) * kv_heads * o.f_.page_size * width / o.f_.per_word;
            const Pages kv{o.f_.keys + layer_size * index, o.f_.values + layer_size * index, kv_heads,
                           static_cast<int>(o.f_.page_size), dim, width, static_cast<int>(o.f_.per_word)};
            if (kv.per_word == 1)
                attend<F32>(l, kv);
            else
                attend<BF16>(l, kv);
        }

        template <class K>
        void attend(const LayerSpec& l, const Pages& kv) {
            const StackSpec& s = o.s_;
            const int heads = static_cast<int>(s.heads + 2 * s.kv_heads);
            for (int head = thread; head < heads; head += threads) {  // of all rows: the values of two share a word
                for (int r = 0; r < rows; r++)  // another thread may have them
                    for (int i = 0; i < kv.head_dim; i += kLanes) _mm_prefetch(head_of(r, head, kv.head_dim) + i, _MM_HINT_T0);
                for (int r = 0; r < rows; r++) place_head<K>(l, kv, r, head);
            }
            barrier();
            const Attention attention{kv, &o.layout_.row[first], static_cast<int>(s.heads / s.kv_heads),
                                      static_cast<int>(l.window), threads};
            const int most = std::max(1, kQueries / attention.group);
            int turn = 0;
            for (int begin = 0, end; begin < rows; begin = end) {
                for (end = begin + 1; end < rows && end - begin < most && row(end).feed == row(begin).feed;) end++;
                for (int head = 0; head < kv.kv_heads; head++)
                    if (turn++ % threads == thread)
                        attention.run<K>({begin, end - begin, head}, o.qkv_, o.qkv_stride_, o.mixed_, o.mixed_stride_,
                                         o.w_.scratch[thread]);
            }
            barrier();
        }

        const Row& row(int r) const { return o.layout_.row[first + r]; }
        float* head_of(int r, int head, int dim) const { return o.qkv_ + r * o.qkv_stride_ + static_cast<size_t>(head) * dim; }

        // Norm and rotate one head of q or k, scale q where it lies, and bring k and v to their slot.
        template <class K>
        void place_head(const LayerSpec& l, const Pages& kv, int r, int head) {
            const StackSpec& s = o.s_;
            const int dim = kv.head_dim, half = dim / 2, heads = static_cast<int>(s.heads), kv_heads = kv.kv_heads;
            const int slot = row(r).slot, page = row(r).feed->pages[slot / kv.page_size], offset = slot % kv.page_size;
            float *x = head_of(r, head, dim), filled[kWidest];
            if (head >= heads) {
                for (int i = 0; i < kv.width; i += kLanes) store(filled + i, i < dim ? load_upto(x + i, dim - i) : splat(0.0f));
                x = filled;
            }
            if (head >= heads + kv_heads) return kv.put_value<K>(page, head - heads - kv_heads, offset, x);
            if (const float* norm = head < heads ? l.q_norm : l.k_norm) normed(x, x, norm, dim, o.eps_);
            const size_t turn = static_cast<size_t>(std::max<int64_t>(row(r).position - o.f_.rotary_lag, 0)) * half;
            const f32x16 scale = splat(head < heads ? 1.0f / std::sqrt(static_cast<float>(dim)) : 1.0f);
            for (int i = 0; i < half; i += kLanes) {
                const int left = half - i;
                const f32x16 cos = load_upto(s.cos + turn + i, left), sin = load_upto(s.sin + turn + i, left);
                const f32x16 a = load_upto(x + i, left), b = load_upto(x + half + i, left);
                store_upto(x + i, (a * cos - b * sin) * scale, left);
                store_upto(x + half + i, (b * cos + a * sin) * scale, left);
            }
            if (head >= heads) kv.put_key<K>(page, head - heads, offset, x);
        }

        // The chunk's rows as they enter the first layer.
        void enter() {
            const StackSpec& s = o.s_;
            const Share mine = share(rows);
            for (int r = mine.begin; r < mine.end; r++) {
                const float* token = s.embedding + static_cast<size_t>(o.layout_.tokens[first + r]) * o.hidden_;
                const float* given = o.f_.features ? o.f_.features + static_cast<size_t>(first + r) * o.hidden_ : token;
                std::memcpy(o.x_ + r * o.x_stride_, given, o.hidden_ * sizeof(float));
                if (s.form == kTokens) continue;
                std::memcpy(o.wide_ + r * o.wide_stride_, token, o.hidden_ * sizeof(float));
                std::memcpy(o.wide_ + r * o.wide_stride_ + o.hidden_, given, o.hidden_ * sizeof(float));
            }
            barrier();
            if (s.form == kJoined)
                multiply(*s.joined, {o.wide_, o.wide_stride_, rows, 2 * o.hidden_}, o.x_, o.x_stride_, Then::kStore);
        }

        // Normed embedding and normed feature side by side; the residual is the feature, normed or not.
        Input beside(const LayerSpec& l) {
            const Share mine = share(rows);
            for (int r = mine.begin; r < mine.end; r++) {
                float* pair = o.wide_ + r * o.wide_stride_;
                normed(pair, pair, l.norm_in, o.hidden_, o.eps_);
                normed(pair + o.hidden_, pair + o.hidden_, o.s_.norm_hidden, o.hidden_, o.eps_);
                if (o.s_.residual_normed) std::memcpy(o.x_ + r * o.x_stride_, pair + o.hidden_, o.hidden_ * sizeof(float));
            }
            barrier();
            return {o.wide_, o.wide_stride_, rows, 2 * o.hidden_};
        }

        void tap(int index) const {
            const Share mine = share(rows);
            for (int t = 0; t < o.f_.taps; t++)
                for (int r = mine.begin; o.f_.tapped[t] == index && r < mine.end; r++)
                    std::memcpy(o.f_.tap_rows + (static_cast<size_t>(first + r) * o.f_.taps + t) * o.hidden_,
                                o.x_ + r * o.x_stride_, o.hidden_ * sizeof(float));
        }

        // Rows as they leave, and the chunk's memory is free again.
        void leave() const {
            const Share mine = share(rows);
            for (int r = mine.begin; r < mine.end; r++) {
                const float* x = o.x_ + r * o.x_stride_;
                const size_t at = static_cast<size_t>(first + r) * o.hidden_;
                if (o.f_.stream) std::memcpy(o.f_.stream + at, x, o.hidden_ * sizeof(float));
                if (o.f_.last) normed(o.f_.last + at, x, o.s_.norm, o.hidden_, o.eps_);
            }
            barrier();
        }
    };

    const StackSpec& s_;
    const ForwardSpec& f_;
    const Layout& layout_;
    Workspace& w_;
    int hidden_;
    float eps_;
    size_t x_stride_, wide_stride_, qkv_stride_, mixed_stride_, gated_stride_;
    float *x_, *wide_, *qkv_, *mixed_, *gated_;
    Packed packed_;
};

#if defined(__AMX_TILE__)
// Tiles against vectors, and a row against itself among others.
template <class K>
bool tiles_agree_on(Kind kind) {
    constexpr int kColumns = 96, kInner = 160;
    std::vector<float> weight(kColumns * kInner), x(kBlock * kInner);
    for (size_t i = 0; i < weight.size(); i++) weight[i] = static_cast<float>(i * 7919 % 2003) / 1001.5f - 1.0f;
    for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<float>(i * 104729 % 1999) / 999.5f - 1.0f;
    const auto l = pack_linear(kind, kColumns, kInner, false, weight.data(), false, nullptr, false);
    std::vector<uint32_t> words(kBlock * (l->steps + kUnit));
    std::array<float, kChunk> scale{};
    const Packed packed{words.data(), scale.data()};
    Tile one, all, vectors;
    const TilesInUse tiles;
    pack_rows(packed, *l, {x.data(), kInner, 1, kInner}, 0, 1);
    multiply_group_tiles<K, 1>(words.data(), *l, 0, l->panels, one);
    pack_rows(packed, *l, {x.data(), kInner, kBlock, kInner}, 0, 1);
    multiply_group_tiles<K, kBlock>(words.data(), *l, 0, l->panels, all);
    for (int p = 0; p < l->panels; p++) {
        typename K::Acc sums[kBlock];
        multiply<K, Whole, kBlock>(words.data(), *l, p, sums);
        std::memcpy(vectors.value[p], sums, sizeof sums);
    }
    bool good = true;
    for (int p = 0; p < l->panels; p++) {
        good &= std::memcmp(one.value[p][0], all.value[p][0], kStepBytes) == 0;
        if (std::is_same<K, I8>::value) good &= std::memcmp(all.value[p], vectors.value[p], sizeof all.value[p]) == 0;
        for (int r = 0; r < kBlock && !std::is_same<K, I8>::value; r++)
            for (int c = 0; c < kLanes; c++) good &= std::fabs(all.value[p][r][c] - vectors.value[p][r][c]) < 1e-4f;
    }
    return good;
}

bool tiles_agree() { return tiles_agree_on<BF16>(kBF16) && tiles_agree_on<I8>(kI8); }
#endif

Workspace& workspace() {
    static thread_local Workspace w;
    return w;
}

Scratch& choosing() {
    static thread_local Scratch s;
    return s;
}

// out (rows, columns) = [norm](x) (rows, inner) times the packed weights, plus bias; of paired columns silu(gate) * up.
void run_linear(const Linear& l, const float* x, int64_t rows, const float* norm, double eps, float* out, int threads) {
    const Packed packed = workspace().packed(l.inner);
    const int columns = l.paired ? l.columns / 2 : l.columns;
    const Input in{x, static_cast<size_t>(l.inner), static_cast<int>(rows), l.inner, norm, static_cast<float>(eps)};
    const Output to{out, static_cast<size_t>(columns), columns, l.paired ? Then::kGate : Then::kStore};
    Team& own = team();
    own.run(threads, [&](int thread, int all) { multiply_rows(l, in, to, packed, own, thread, all); });
}

// False where rows are laid out over memory that is not there; nothing has been done then.
bool run_forward(const StackSpec& stack, const ForwardSpec& forward) {
    Workspace& w = workspace();
    if (!read_layout(forward.layout, w.layout) || !is_sound(w.layout, stack, forward)) return false;
    const int threads = static_cast<int>(forward.threads);
    Forward work(stack, forward, w, threads);
    Team& own = team();
    own.run(threads, [&](int thread, int all) { work.run(own, thread, all); });
    return true;
}

// Chains drafted by a model: the layout's feeds are read, then every sequence goes on from its own guesses.
struct ChainSpec {
    int64_t steps;           // of the longest chain
    const int32_t* wanted;   // tokens of each sequence's chain, the longest first
    const Shape* shapes;     // of each sequence
    const float* sharpness;  // likewise
    const NoiseKey* keys;    // (sequences, steps)
    const uint32_t* words;   // of every token
    int64_t* tokens;         // (sequences, steps)
    double* chances;         // likewise
    float* logits;           // (steps, sequences, vocab)
    double floor;            // where no chain is as likely to have come this far, drafting ends
    int64_t* drawn;          // steps until then
};

// The layout of the next step: one token of each sequence that still wants more, where text would lie.
void lay_out_step(const std::vector<Feed>& read, const int64_t* newest, int64_t stride, int step, int active,
                  std::vector<int32_t>& out) {
    out = {active, active};
    for (int s = 0; s < active; s++)
        out.insert(out.end(), {read[s].root() + step, 1, 0, 0, read[s].first_key, read[s].page_count});
    for (int s = 0; s < active; s++) out.push_back(static_cast<int32_t>(newest[s * stride]));
    for (int s = 0; s < active; s++) out.insert(out.end(), read[s].pages, read[s].pages + read[s].page_count);
}

bool draft_chains(const StackSpec& stack, ForwardSpec forward, const ChainSpec& chain) {
    Layout& given = workspace().layout;
    if (!read_layout(forward.layout, given)) return false;
    const std::vector<Feed> read = given.feeds;  // their pages lie in the caller's layout
    const int sequences = static_cast<int>(read.size()), vocab = stack.output->columns;
    std::vector<float> last(static_cast<size_t>(given.rows) * stack.hidden);
    std::vector<int32_t> ends, layout;
    for (const Feed& feed : read) {
        if (feed.fed < 1 || feed.nodes) return false;
        ends.push_back((ends.empty() ? -1 : ends.back()) + feed.fed);
    }
    forward.last = last.data(), forward.stream = nullptr, forward.wanted = ends.data();
    int active = sequences;
    std::vector<double> reached(sequences, 1.0);
    for (int step = 0; step < chain.steps; step++) {
        while (active && chain.wanted[active - 1] <= step) active--;
        if (step) {
            lay_out_step(read, chain.tokens + step - 1, chain.steps, step, active, layout);
            forward.layout = layout.data();
            std::iota(ends.begin(), ends.end(), 0);
        }
        forward.wants = active;
        forward.logits = chain.logits + static_cast<size_t>(step) * sequences * vocab;
        if (!run_forward(stack, forward)) return false;
        bool chosen = true;
        Team::run_alone([&](int, int) {
            for (int s = 0; s < active; s++) {
                const int64_t at = s * chain.steps + step;
                rank_row(forward.logits + static_cast<size_t>(s) * vocab, vocab, chain.shapes[s], chain.sharpness[s],
                         chain.keys[at], chain.words, 1, choosing(), chain.tokens + at, chain.chances + at);
                chosen &= chain.tokens[at] >= 0;
            }
        });
        *chain.drawn = step + 1;
        double most = 0.0;
        for (int s = 0; s < active; s++) most = std::max(most, reached[s] *= chain.chances[s * chain.steps + step]);
        if (!chosen || most < chain.floor) return true;  // the caller sees what is missing
    }
    return true;
}

}  // namespace outrider

using namespace outrider;

#define OUTRIDER_API extern "C" __attribute__((visibility("default")))

#ifndef OUTRIDER_SOURCES
#define OUTRIDER_SOURCES ""
#endif

// A digest of the sources this was built from.
OUTRIDER_API const char* outrider_sources() { return OUTRIDER_SOURCES; }

// Whether this processor and kernel really run this build: 0, or what is wrong. Some virtual machines offer AMX
// and fault on it, so a child process tries it first.
OUTRIDER_API int32_t outrider_try() {
#if defined(__AMX_TILE__)
    constexpr int kAskForTiles = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, ...)
    if (syscall(SYS_arch_prctl, kAskForTiles, kTileData) != 0) return 1;
    const pid_t child = fork();
    if (child == 0) _exit(tiles_agree() ? 0 : 3);
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 2;
    return WEXITSTATUS(status);
#else
    return 0;
#endif
}

// Null where memory is short.
OUTRIDER_API Linear* outrider_pack(int32_t kind, int32_t columns, int32_t inner, int32_t paired, const void* weight, int32_t is_bf16,
                      const float* bias, int32_t may_thin) {
    try {
        return pack_linear(static_cast<Kind>(kind), columns, inner, paired != 0, weight, is_bf16 != 0, bias, may_thin != 0).release();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

OUTRIDER_API void outrider_free(Linear* l) { delete l; }

OUTRIDER_API int64_t outrider_bytes(const Linear* l) { return static_cast<int64_t>(l->bytes()); }

OUTRIDER_API void outrider_linear(const Linear* l, const float* x, int64_t rows, const float* norm, double eps, float* out, int64_t threads) {
    run_linear(*l, x, rows, norm, eps, out, static_cast<int>(threads));
}

// 0, or 1 where rows are laid out over memory that is not there; nothing has been done then.
OUTRIDER_API int32_t outrider_forward(const StackSpec* stack, const ForwardSpec* forward) { return run_forward(*stack, *forward) ? 0 : 1; }

// Likewise; a token below 0 says that a row of logits left no choice, and what follows it is not written.
OUTRIDER_API int32_t outrider_draft(const StackSpec* stack, const ForwardSpec* forward, const ChainSpec* chain) {
    return draft_chains(*stack, *forward, *chain) ? 0 : 1;
}

// A team's run, or one thread's without waking anybody.
template <class Body>
void run_alone_or(int64_t threads, const Body& body) {
    if (threads > 1) return team().run(static_cast<int>(threads), body);
    Team::run_alone(body);
}

// For each of `rows` rows of logits its choice, or -1.
OUTRIDER_API void outrider_draw(const float* logits, int64_t rows, int64_t vocab, const Shape* shapes, const NoiseKey* keys,
                                const uint32_t* words, int64_t* chosen, int64_t threads) {
    run_alone_or(threads, [&](int thread, int all) {
        for (int64_t r = thread; r < rows; r += all)
            chosen[r] = draw_shaped(logits + r * vocab, static_cast<int>(vocab), shapes[r], keys[r], words, choosing());
    });
}

// For each row its `best` likeliest choices and their chances.
OUTRIDER_API void outrider_rank(const float* logits, int64_t rows, int64_t vocab, const Shape* shapes, const float* sharpness,
                                const NoiseKey* keys, const uint32_t* words, int64_t best, int64_t* tokens, double* chances,
                                int64_t threads) {
    run_alone_or(threads, [&](int thread, int all) {
        for (int64_t r = thread; r < rows; r += all)
            rank_row(logits + r * vocab, static_cast<int>(vocab), shapes[r], sharpness[r], keys[r], words, static_cast<int>(best),
                     choosing(), tokens + r * best, chances + r * best);
    });
}

// `steps` steps of a kind on as many accumulators as a product has, from registers, for measuring what the instruction
// gives. Returns the multiply-adds of all threads.
template <class K>
double multiply_add(int64_t steps, int threads) {
    std::vector<uint32_t> words(2 * kLanes + threads * kBlock * kLanes);
    team().run(threads, [&](int thread, int) {
        typename K::Acc acc[kBlock];
#pragma GCC unroll 16
        for (int r = 0; r < kBlock; r++) std::memcpy(&acc[r], &words[(2 + thread * kBlock + r) * kLanes], kStepBytes);  // of unknown value each
        for (int64_t s = 0; s < steps; s++) {
            asm volatile("" ::: "memory");  // every step is made
            const Words w = load_words(words.data()), x = load_words(words.data() + kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < kBlock; r++) acc[r] = K::join(acc[r], w, x);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kBlock; r++) std::memcpy(&words[(2 + thread * kBlock + r) * kLanes], &acc[r], kStepBytes);
    });
    return static_cast<double>(steps) * threads * kBlock * kLanes * K::per_step;
}

// 0 where tiles do the work.
OUTRIDER_API double outrider_multiply_add(int32_t kind, int64_t steps, int64_t threads) {
    if (!kThin) return 0.0;
    const auto mine = kind == kF32 ? multiply_add<F32> : kind == kBF16 ? multiply_add<BF16> : multiply_add<I8>;
    return mine(steps, static_cast<int>(threads));
}

// Reads memory as a forward reads weights, for measuring bandwidth. The sum keeps the reads from vanishing.
OUTRIDER_API double outrider_read(const float* memory, int64_t bytes, int64_t threads) {
    std::vector<float> sums(threads * kLanes);
    team().run(static_cast<int>(threads), [&](int thread, int all) {
        const Share mine(static_cast<int>(bytes / 256), thread, all);
        f32x16 acc[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        for (const float *p = memory + int64_t{mine.begin} * 64, *end = memory + int64_t{mine.end} * 64; p < end; p += 64)
            for (int i = 0; i < 4; i++) {
                _mm_prefetch(reinterpret_cast<const char*>(p + i * kLanes) + kPrefetch, _MM_HINT_T0);
                acc[i] += load(p + i * kLanes);
            }
        sums[thread * kLanes] = sum(acc[0] + acc[1] + acc[2] + acc[3]);
    });
    double total = 0.0;
    for (float each : sums) total += each;
    return total;
}
