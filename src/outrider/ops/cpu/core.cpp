// The layer stack in one call, and the C interface that ctypes binds (ops/native.py mirrors the structs).
//
// All threads run the same code over the same rows and synchronise at barriers. Each computes its share of the columns,
// heads or rows. Nothing is summed across threads, so the bits do not depend on their number.

#include <sys/wait.h>

#include "attention.h"
#include "choice.h"
#include "columns.h"
#include "experts.h"
#include "group_pack.h"
#include "groups.h"
#include "growth.h"
#include "lattice.h"
#include "lora.h"
#include "pack.h"
#include "scan.h"

namespace outrider {

// Cosines and sines (rows, head_dim / 2), and what queries grow by (rows), or null.
struct Rotary { const float *cos, *sin, *growth; };

struct LayerSpec {
    const Linear *qkv, *out, *gate_up, *down;  // columns of qkv are, for each head of keys: its queries, key and value
    Norm norm_in, norm_mlp, norm_attn_out, norm_mlp_out;
    Norm q_norm, k_norm;  // with the weights of all heads
    int64_t over_width;   // q_norm and k_norm norm all heads of a row together, not each by itself
    int64_t parallel;     // attention and MLP read the same rows
    Rotary rotary;        // without cosines queries and keys are not rotated
    double scale;         // of scores
    int64_t window;       // 0: none
    double soft_cap;      // of scores; 0: none
    double residual_scale;  // of what a norm after a part or a mixture leaves; else it is in the part's last product
    const float* sinks;     // of every head, the score of a key without a value; or null
    const Experts* experts;  // instead of gate_up and down, which are null then; or null
};

// How rows enter the first layer.
enum Form : int64_t {
    kTokens = 0,  // embeddings, or hidden rows that left an earlier layer
    kJoined = 1,  // a linear layer over embedding and feature side by side (EAGLE-1), each normed before it (MTP)
    kBeside = 2,  // features; the layer's q, k, v read normed embedding and feature side by side (EAGLE-3)
};

// Gathers the parts of all ranks, in order of rank. False: a rank is gone, and so is what it would have sent.
using Gather = int32_t (*)(const float* part, int64_t values, float* parts);

struct StackSpec {
    const LayerSpec* layer;
    int64_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab;  // ffn: of the widest layer
    int64_t rotary_rows;  // of the shortest rotary table
    const Linear* embedding;           // a column for each token; null: rows come as features
    const float* learned;              // of positions, or null
    int64_t learned_rows;
    double embedding_scale;
    int64_t form, residual_normed;
    const Linear *joined, *output;  // of kJoined, or what makes features of taps; the matrix of logits, or null
    Norm norm, norm_hidden, norm_embedding;  // the last one; the feature's and, of kJoined, the embedding's before they are read
    int64_t ranks;                  // that share every layer: each adds its part of `out` and `down`
    Gather gather;                  // of several ranks; called by the caller's thread
};

// What a forward does with its rows.
enum Mode : int64_t {
    kTextRows = 0,   // rows go through the layers, and see what is before them
    kKeyRows = 1,    // every layer stores keys and values of the features as they come, without its first norm
    kBlockRows = 2,  // rows go through the layers, and see all rows of their feed
};

struct ForwardSpec {
    const int32_t* layout;    // see read_layout
    uint32_t *keys, *values;  // (layers, pages, KV heads, words of a page); see attention.h
    int64_t pages, page_size, per_word;
    int64_t first_layer, last_layer;
    int64_t rotary_lag;       // rotary position = position - lag
    int64_t mode;             // a Mode
    const float* features;    // (rows, hidden): features, or the stream entering first_layer; null: embed tokens. Of key rows: taps
    const int32_t* tapped;    // layers whose input rows are wanted
    int64_t taps;
    float* tap_rows;          // (rows, taps, hidden)
    float *stream, *last;     // (rows, hidden) leaving last_layer, and after the last norm; or null
    const int32_t* wanted;    // rows whose logits are wanted
    int64_t wants;
    float* logits;            // (wants, vocab)
    const LayerLoras* const* adapters;  // of each adapter, its layers; null: there is none of that number
    int64_t adapter_count, ranks;       // ranks: words of the widest A of any adapter
    int64_t* touched;                   // experts whose weights were read, over all layers, are added to it; or null
    int64_t threads;
};

// The rows of a forward, laid out.
struct Layout {
    const int32_t* tokens = nullptr;
    std::vector<Feed> feeds;
    std::vector<Row> row;
    std::vector<int32_t> paths;

    int rows() const { return static_cast<int>(row.size()); }
};

// layout: feeds, rows, then per feed (start, fed, nodes, known, first_key, pages, rotary_start, adapter), then tokens of all
// rows, then the pages of each feed, then the parents of each feed's nodes. Returns false where it contradicts itself or where a feed
// has more slots than its pages. Nothing is derived from unchecked values.
bool read_layout(const int32_t* in, int64_t page_size, Layout& l) {
    const int feeds = in[0], rows = in[1];
    l.tokens = in + 2 + 8 * feeds;
    const int32_t* next = l.tokens + rows;
    l.feeds.clear(), l.row.clear(), l.paths.clear();
    for (const int32_t* head = in + 2; head < l.tokens; next += head[5], head += 8)
        l.feeds.push_back({head[0], head[1], head[2], head[3], head[4], head[5], head[6], head[7], next, nullptr, false});
    std::vector<int> depths;  // of every node of every feed
    size_t steps = 0;
    for (Feed& feed : l.feeds) {
        if (feed.start < 0 || feed.first_key < 0 || feed.first_key > feed.start) return false;
        if (feed.known < 0 || feed.known > feed.nodes) return false;
        if (int64_t{feed.start} + feed.fed + feed.nodes > feed.page_count * page_size) return false;
        feed.parents = next;
        next += feed.nodes;
        const size_t before = depths.size();
        size_t ancestors = 0;
        for (int i = 0; i < feed.nodes; i++) {
            const int parent = feed.parents[i];
            if (parent < -1 || parent >= i) return false;
            depths.push_back(parent < 0 ? 1 : depths[before + parent] + 1);
            feed.tree |= parent != i - 1;
            ancestors += depths.back();
        }
        if (feed.tree) steps += ancestors;
    }
    l.paths.reserve(steps);  // rows point into it
    const int* depth = depths.data();  // of the feed's nodes
    for (const Feed& feed : l.feeds) {
        for (int i = 0; i < feed.fed; i++) l.row.push_back({&feed, feed.start + i, feed.start + i, nullptr});
        for (int i = feed.known; i < feed.nodes; i++) {
            int32_t* path = nullptr;
            if (feed.tree) {
                l.paths.resize(l.paths.size() + depth[i]);
                path = l.paths.data() + l.paths.size() - depth[i];
                for (int node = i, at = depth[i]; node >= 0; node = feed.parents[node]) path[--at] = feed.root() + 1 + node;
            }
            l.row.push_back({&feed, feed.root() + depth[i], feed.root() + 1 + i, path});
        }
        depth += feed.nodes;
    }
    return l.rows() == rows;
}

inline int64_t rotary_row(const Row& row, const ForwardSpec& f) {
    return row.feed->rotary_start + std::max<int64_t>(row.position - f.rotary_lag, 0);
}

// Whether every row reads and writes valid memory: a wrong layout must fail and do no other harm.
bool is_sound(const Layout& l, const StackSpec& s, const ForwardSpec& f) {
    const auto all_below = [](const int32_t* x, int64_t count, int64_t limit) {
        return std::all_of(x, x + count, [&](int32_t value) { return value >= 0 && value < limit; });
    };
    if (f.first_layer < 0 || f.last_layer < f.first_layer || f.last_layer > s.layers || f.rotary_lag < 0) return false;
    if (!f.features && !s.embedding) return false;
    if (f.mode == kKeyRows && !(s.joined && f.features)) return false;
    for (const Feed& feed : l.feeds) {
        if (int64_t{feed.start} + feed.fed + feed.nodes > feed.page_count * f.page_size) return false;  // chains grow
        if (!all_below(feed.pages, feed.page_count, f.pages) || feed.rotary_start < 0) return false;
        if (feed.adapter < 0 || feed.adapter > f.adapter_count) return false;
        if (feed.adapter && !f.adapters[feed.adapter - 1]) return false;
    }
    if (f.mode == kBlockRows && l.rows() > kChunk) return false;  // a block goes through the layers as a whole
    for (const Row& row : l.row)
        if (rotary_row(row, f) >= s.rotary_rows || (s.learned && row.position >= s.learned_rows)) return false;
    return all_below(l.tokens, l.rows(), s.vocab) && all_below(f.wanted, f.wants, l.rows());
}

// Buffers that each calling thread keeps from call to call.
struct Workspace {
    std::array<std::vector<float>, 7> between;  // rows between layers
    std::vector<float> gathered;                // parts of all ranks
    bool alone = false;                         // a rank is gone
    std::vector<uint32_t> words, adapter_words, ranks;
    std::array<PackedRows::Quantum, kChunk> quantum{}, adapter_quantum{};
    std::vector<std::vector<float>> scratch;  // per thread of a team
    Layout layout;
    Scratch choosing;
    Pairs pairs;

    // Room for a chunk of rows of that width.
    Rows rows(int which, int64_t width, int chunk) {
        const int stride = round_up(static_cast<int>(width), kLanes);
        between[which].resize(std::max<size_t>(between[which].size(), static_cast<size_t>(chunk) * stride));
        return {between[which].data(), static_cast<size_t>(stride), static_cast<int>(width)};
    }
    PackedRows packed(size_t width) {
        words.resize(std::max(words.size(), kChunk * (width + kStepBytes)));
        return {words.data(), quantum.data()};
    }
    // Room for what adapters of a chunk's rows compute. Beside int8 weights the rows are packed in bf16 too.
    void make_room_for_adapters(size_t width, size_t words_of_ranks) {
        adapter_words.resize(std::max(adapter_words.size(), kChunk * (width + kStepBytes)));
        ranks.resize(std::max(ranks.size(), kChunk * words_of_ranks));
    }
};

Workspace& workspace() {
    static thread_local Workspace w;
    return w;
}

constexpr int kMixtureChunk = 256;

// One thread's part of a forward.
class Forward {
   public:
    Forward(const StackSpec& s, const ForwardSpec& f, Workspace& w)
        : s(s), f(f), w(w), hidden(static_cast<int>(s.hidden)), group(static_cast<int>(s.heads / s.kv_heads)), chunk(rows_of_chunk(s, f)),
          x(w.rows(0, hidden, chunk)), wide(w.rows(1, 2 * hidden, chunk)), qkv(w.rows(2, (s.heads + 2 * s.kv_heads) * s.head_dim, chunk)),
          mixed(w.rows(3, s.heads * s.head_dim, chunk)), gated(w.rows(4, s.ffn, chunk)), read(w.rows(5, hidden, chunk)),
          part(w.rows(6, hidden, chunk)), packed(w.packed(std::max({wide.stride, mixed.stride, gated.stride, taps_stride(s, f)}))) {
        w.scratch.resize(std::max<size_t>(w.scratch.size(), f.threads));
        if (s.ranks > 1) w.gathered.resize(std::max<size_t>(w.gathered.size(), s.ranks * chunk * part.stride));
        make_room_for_pairs();
        if (f.adapter_count) w.make_room_for_adapters(std::max({wide.stride, mixed.stride, gated.stride}), f.ranks);
    }

    void run(const Member& member) {
        m = member;
        for (first = 0; first < w.layout.rows(); first += chunk) {
            rows = std::min(chunk, w.layout.rows() - first);
            adapted = false;
            for (int r = 0; f.adapter_count && r < rows; r++) adapted |= row(r).feed->adapter > 0;
            enter();
            for (int64_t i = f.first_layer; i < f.last_layer; i++) tap(i), layer(s.layer[i], i);
            tap(f.last_layer);
            leave();
        }
        if (!f.wants) return;
        const Input ends{dense(f.last ? f.last : f.stream, s.hidden), static_cast<int>(f.wants), {}, f.wanted};
        multiply(*s.output, ends, dense(f.logits, s.output->columns), Then::kStore);
    }

   private:
    // Experts are read once for all rows of a chunk, so it is large where there are some. Adapters take kChunk rows.
    static int rows_of_chunk(const StackSpec& s, const ForwardSpec& f) {
        const bool mixes = std::any_of(s.layer, s.layer + s.layers, [](const LayerSpec& l) { return l.experts; });
        return mixes && !f.adapter_count ? kMixtureChunk : kChunk;
    }
    void make_room_for_pairs() const {
        const auto most_rows = static_cast<size_t>(std::min(chunk, w.layout.rows()));
        for (const LayerSpec* l = s.layer; l < s.layer + s.layers; l++) {
            if (!l->experts) continue;
            const Router& r = l->experts->router;
            const Linear &up = *l->experts->gate_up[0], &down = *l->experts->down[0];
            w.pairs.make_room(most_rows, r.chosen, r.experts, down.inner, s.hidden, std::max(up.steps, down.steps));
        }
    }

    // Width of the taps that features are made of.
    static size_t taps_stride(const StackSpec& s, const ForwardSpec& f) { return f.mode == kKeyRows ? s.joined->inner : 0; }

    template <class Do>
    void each_row(const Do& of) const {
        const Share mine = m.share(rows);
        for (int r = mine.begin; r < mine.end; r++) of(r);
    }
    void copy(float* to, const float* from) const { std::memcpy(to, from, hidden * sizeof(float)); }
    const Row& row(int r) const { return w.layout.row[first + r]; }

    // A product, with what adapters add to it where it is part of a layer.
    void multiply(const Linear& l, const Input& in, const Rows& out, Then then, const Lora* LayerLoras::*part = nullptr,
                  bool ready = true) {
        if (!adapted || !part) return multiply_rows(l, in, out, then, packed, m, ready);
        Deltas deltas;
        deltas.ranks = w.ranks.data(), deltas.stride = static_cast<size_t>(f.ranks);
        deltas.packed = {w.adapter_words.data(), w.adapter_quantum.data()};
        for (int r = 0; r < rows; r++) {
            const int adapter = row(r).feed->adapter;
            deltas.of[r] = adapter ? f.adapters[adapter - 1][index].*part : nullptr;
        }
        multiply_rows(l, in, out, then, packed, m, ready, deltas.any(rows) ? &deltas : nullptr);
    }

    void layer(const LayerSpec& l, int64_t number) {
        index = number;
        if (l.parallel) open_mlp(l);
        const bool ready = rows > kChunk;  // a product of more rows needs the whole of the memory that it packs them in
        const Input read = s.form == kBeside ? beside(l) : f.mode == kKeyRows ? Input{x, rows} : Input{x, rows, l.norm_in};
        multiply(*l.qkv, read, qkv, Then::kStore, &LayerLoras::qkv, ready);
        const int kv_heads = static_cast<int>(s.kv_heads), dim = static_cast<int>(s.head_dim), width = round_up(dim, kLanes);
        const int page = static_cast<int>(f.page_size), per_word = static_cast<int>(f.per_word);
        Pages kv{f.keys, f.values, kv_heads, page, dim, width, per_word};
        const size_t before = static_cast<size_t>(f.pages) * kv_heads * kv.head_size() * index;
        kv.keys += before, kv.values += before;
        kv.per_word == 1 ? attend<F32>(l, kv) : attend<BF16>(l, kv);
        if (f.mode == kKeyRows) return;
        join(*l.out, mixed, l.norm_attn_out, l.residual_scale, &LayerLoras::out);
        if (!l.parallel) open_mlp(l);
        if (l.experts) return add_normed(l.norm_mlp_out, l.residual_scale);
        join(*l.down, inner_of(*l.down), l.norm_mlp_out, l.residual_scale, &LayerLoras::down);
    }

    Rows inner_of(const Linear& down) const { return {gated.at, gated.stride, static_cast<int>(down.inner)}; }

    // The first product of the feed-forward part, or all of a mixture of experts.
    void open_mlp(const LayerSpec& l) {
        if (l.experts) return mix_experts(*l.experts, l.norm_mlp);
        multiply(*l.gate_up, {x, rows, l.norm_mlp}, inner_of(*l.down), Then::kStore, &LayerLoras::gate_up);
    }

    // What the experts of each row give, weighted and added in order of their numbers, the shared expert last: to `part`.
    void mix_experts(const Experts& e, const Norm& norm) {
        each_row([&](int r) { norm.weight ? normed(read[r], x[r], norm, hidden) : copy(read[r], x[r]); });
        m.barrier();
        Pairs& p = w.pairs;
        const Router& router = e.router;
        const int chosen = static_cast<int>(router.chosen);
        const Rows logits = p.rows_of(p.logits, static_cast<int>(router.matrix->columns));
        multiply(*router.matrix, {read, rows}, logits, Then::kStore);
        each_row([&](int r) { Chooser(router, logits[r], w.scratch[m.thread]).run(p.routes.data() + r * chosen); });
        m.barrier();
        if (m.thread == 0) {
            p.group(rows, chosen, static_cast<int>(router.experts));
            if (f.touched) *f.touched += static_cast<int64_t>(p.groups.size());
        }
        m.barrier();
        const Rows inner = p.rows_of(p.inner, static_cast<int>(e.down[0]->inner)), given = p.rows_of(p.given, hidden);
        const int pairs = rows * chosen;
        with_plain_kind(e.down[0]->kind, [&](auto kind) {
            multiply_experts<decltype(kind)>(e.gate_up, {read, pairs, {}, p.row.data()}, p, inner, m);
            multiply_experts<decltype(kind)>(e.down, {inner, pairs}, p, given, m);
        });
        if (e.shared_down) {
            multiply(*e.shared_gate_up, {read, rows}, inner_of(*e.shared_down), Then::kStore);
            multiply(*e.shared_down, {inner_of(*e.shared_down), rows}, part, Then::kStore);
        }
        const Share vectors = m.share((hidden + kLanes - 1) / kLanes);
        for (int r = 0; r < rows; r++) {
            const Route* route = p.routes.data() + r * chosen;
            const float gate = logits[r][router.experts * e.has_shared_gate];
            const f32x16 share = e.has_shared_gate ? sigmoid(splat(gate)) : splat(1.0f);
            for (int i = vectors.begin * kLanes; i < vectors.end * kLanes; i += kLanes) {
                f32x16 total = splat(0.0f);
                for (int k = 0; k < chosen; k++)
                    total = fma(load(given[p.place[r * chosen + k]] + i), splat(route[k].weight), total);
                store(part[r] + i, e.shared_down ? fma(load(part[r] + i), share, total) : total);
            }
        }
        m.barrier();
    }

    // Adds the last product of a part to the residual stream, after a norm if there is one.
    void join(const Linear& l, const Rows& in, const Norm& norm, double scale, const Lora* LayerLoras::*lora) {
        if (!norm.weight && s.ranks == 1) return multiply(l, {in, rows}, x, Then::kAdd, lora);
        multiply(l, {in, rows}, part, Then::kStore, lora);
        if (s.ranks > 1) gather();
        add_normed(norm, scale);
    }

    // Adds the part to the residual stream, after a norm if there is one, and scaled then.
    void add_normed(const Norm& norm, double scale) {
        const f32x16 factor = splat(norm.weight || s.ranks == 1 ? static_cast<float>(scale) : 1.0f);
        each_row([&](int r) {
            if (s.ranks > 1) sum_ranks(r);
            if (norm.weight) normed(part[r], part[r], norm, hidden);
            for (int i = 0; i < hidden; i += kLanes) store(x[r] + i, load(x[r] + i) + load(part[r] + i) * factor);
        });
        m.barrier();
    }

    void gather() const {
        if (m.thread == 0 && !w.alone)
            w.alone = !s.gather(part.at, static_cast<int64_t>(rows * part.stride), w.gathered.data());
        m.barrier();
    }

    // The parts of a row, added in order of rank.
    void sum_ranks(int r) const {
        const size_t parts = rows * part.stride;
        const float* first = w.gathered.data() + r * part.stride;
        for (int i = 0; i < hidden; i += kLanes) {
            f32x16 sum = load(first + i);
            for (int64_t rank = 1; rank < s.ranks; rank++) sum = sum + load(first + rank * parts + i);
            store(part[r] + i, sum);
        }
    }

    template <class K>
    void attend(const LayerSpec& l, const Pages& kv) {
        const Share mine = m.share(kv.kv_heads);
        // where the columns that a thread computed are those of whole heads of keys, no thread waits for another
        const bool local_heads = kv.kv_heads % m.threads == 0 && (group + 2) * kv.head_dim % (2 * kLanes) == 0;
        if (!local_heads || l.over_width) m.barrier();
        if (l.over_width) norm_width(l);
        for (int head = mine.begin; head < mine.end; head++)  // of all rows: the values of two share a word
            for (int r = 0; r < rows; r++) place<K>(l, kv, r, head);
        if (!local_heads || f.mode == kKeyRows) m.barrier();
        if (f.mode == kKeyRows) return;
        const Share heads = local_heads ? mine : Share{0, kv.kv_heads};
        const Sight sight{static_cast<int>(l.window), static_cast<float>(l.soft_cap), l.sinks};
        int turn = 0;
        const int max_rows = std::max(1, kQueries / group);
        for (int begin = 0, end; begin < rows; begin = end) {
            for (end = begin + 1; end < rows && end - begin < max_rows && row(end).feed == row(begin).feed;) end++;
            for (int head = heads.begin; head < heads.end; head++) {
                if (!local_heads && turn++ % m.threads != m.thread) continue;
                const int next = head + (local_heads ? 1 : m.threads);
                Attention<K>(kv, &row(begin), end - begin, head, group, sight, w.scratch[m.thread])
                    .run(qkv.from(begin), mixed.from(begin), next < heads.end ? next : -1);
            }
        }
        m.barrier();
    }

    // Norms all queries of a row together, and all keys.
    void norm_width(const LayerSpec& l) const {
        const int dim = static_cast<int>(s.head_dim), kv_heads = static_cast<int>(s.kv_heads), stride = (group + 2) * dim;
        const auto together = [&](const Norm& norm, float* values, int width) {
            const RowNorm row_norm(norm, values, width, kv_heads, stride);
            for (int head = 0; head < kv_heads; head++, values += stride) row_norm(values, values, width, head * width);
        };
        each_row([&](int r) { together(l.q_norm, qkv[r], group * dim), together(l.k_norm, qkv[r] + group * dim, dim); });
        m.barrier();
    }

    // Norms and rotates a row's queries and key of one head of keys, and stores key and value in their slot.
    template <class K>
    void place(const LayerSpec& l, const Pages& kv, int r, int head) {
        const int dim = kv.head_dim, slot = row(r).slot, offset = slot % kv.page_size;
        const int page = row(r).feed->pages[slot / kv.page_size];
        const size_t turn = rotary_row(row(r), f);
        const float scale = static_cast<float>(l.scale) * (l.rotary.growth ? l.rotary.growth[turn] : 1.0f);
        float *queries = qkv[r] + static_cast<size_t>(head * (group + 2)) * dim, *key = queries + group * dim;
        for (int i = 0; i < group; i++) rotate(l, queries + i * dim, l.q_norm, head * group + i, turn, scale);
        rotate(l, key, l.k_norm, head, turn, 1.0f);
        keep_finite(key, dim);
        if (kv.quantised()) return kv.put_integers(page, head, offset, key);
        kv.put_key<K>(page, head, offset, key);
        kv.put_value<K>(page, head, offset, key + dim);
    }

    void rotate(const LayerSpec& l, float* values, const Norm& norm, int head, size_t turn, float factor) const {
        const int dim = static_cast<int>(s.head_dim), half = dim / 2;
        if (norm.weight && !l.over_width) normed(values, values, norm.from(static_cast<size_t>(head) * dim), dim);
        const f32x16 scale = splat(factor);
        for (int i = 0; i < half; i += kLanes) {
            const int left = half - i;
            f32x16 a = load_upto(values + i, left), b = load_upto(values + half + i, left);
            if (l.rotary.cos) {
                const f32x16 cos = load_upto(l.rotary.cos + turn * half + i, left), first = a;
                const f32x16 sin = load_upto(l.rotary.sin + turn * half + i, left);
                a = a * cos - b * sin, b = b * cos + first * sin;
            }
            store_upto(values + i, a * scale, left);
            store_upto(values + half + i, b * scale, left);
        }
    }

    // The chunk's rows as they enter the first layer.
    void enter() {
        if (f.mode == kKeyRows) return make_features();
        each_row([&](int r) {
            if (f.features) copy(x[r], f.features + static_cast<size_t>(first + r) * hidden);
            else embed(x[r], r);
            if (s.form != kTokens) embed(wide[r], r), copy(wide[r] + hidden, x[r]);
            if (s.form == kJoined && s.norm_embedding.weight) {
                normed(wide[r], wide[r], s.norm_embedding, hidden);
                normed(wide[r] + hidden, wide[r] + hidden, s.norm_hidden, hidden);
            }
        });
        m.barrier();
        if (s.form == kJoined) multiply(*s.joined, {wide, rows}, x, Then::kStore);
    }

    // Features of the chunk's rows: a product over the taps, normed.
    void make_features() {
        const Linear& fuse = *s.joined;
        const Rows taps = dense(const_cast<float*>(f.features) + static_cast<size_t>(first) * fuse.inner, fuse.inner);
        multiply(fuse, {taps, rows}, x, Then::kStore);
        each_row([&](int r) { normed(x[r], x[r], s.norm_hidden, hidden); });
        m.barrier();
    }

    void embed(float* to, int r) const {
        read_column(*s.embedding, w.layout.tokens[first + r], to);
        const float* position = s.learned ? s.learned + static_cast<size_t>(row(r).position) * hidden : nullptr;
        const f32x16 scale = splat(static_cast<float>(s.embedding_scale));
        for (int i = 0; i < hidden; i += kLanes) {
            const f32x16 values = load_upto(to + i, hidden - i) * scale;
            store_upto(to + i, position ? values + load_upto(position + i, hidden - i) : values, hidden - i);
        }
    }

    // Normed embedding and normed feature side by side; the residual is the feature, normed or not.
    Input beside(const LayerSpec& l) {
        each_row([&](int r) {
            float *embedding = wide[r], *feature = embedding + hidden;
            normed(embedding, embedding, l.norm_in, hidden);
            normed(feature, feature, s.norm_hidden, hidden);
            if (s.residual_normed) copy(x[r], feature);
        });
        m.barrier();
        return {wide, rows};
    }

    void tap(int64_t index) const {
        for (int t = 0; t < f.taps; t++)
            if (f.tapped[t] == index)
                each_row([&](int r) { copy(f.tap_rows + (static_cast<size_t>(first + r) * f.taps + t) * hidden, x[r]); });
    }

    // Copies the chunk's rows out; after it the chunk's memory is free again.
    void leave() const {
        each_row([&](int r) {
            const size_t at = static_cast<size_t>(first + r) * hidden;
            if (f.stream) copy(f.stream + at, x[r]);
            if (f.last) normed(f.last + at, x[r], s.norm, hidden);
        });
        m.barrier();
    }

    const StackSpec& s;
    const ForwardSpec& f;
    Workspace& w;
    int hidden, group;  // group: of queries per head of keys
    int chunk;          // rows that go through the layers together
    Rows x, wide, qkv, mixed, gated;
    Rows read, part;  // rows that a mixture reads; what a part of a layer gives
    PackedRows packed;
    Member m{};
    int first = 0, rows = 0;  // of the chunk
    bool adapted = false;     // some row of it has an adapter
    int64_t index = 0;        // of the layer
};

// Returns false, and does nothing, where rows are laid out over memory that is not there.
bool run_rows(const StackSpec& stack, const ForwardSpec& forward, Workspace& w) {
    if (!is_sound(w.layout, stack, forward)) return false;
    if (forward.mode == kBlockRows)
        for (Row& row : w.layout.row) row.block_end = row.feed->root();
    w.alone = false;
    const Forward work(stack, forward, w);
    team().run(static_cast<int>(forward.threads), [&](const Member& m) { Forward(work).run(m); });
    return true;
}

// Rows of logits, and the parameters and noise of each row's choice.
struct ChoiceSpec {
    float* logits;  // (rows, vocab)
    int64_t rows, vocab;
    const Shape* shapes;     // of each row
    const float* draft_temperatures;  // of each row, for `rank`
    const uint32_t* keys;    // two of each
    const uint32_t* words;   // of every token
    int64_t best;            // how many are ranked; 0: one is drawn
    int64_t* tokens;         // (rows, best), or of each row its choice; -1 where there is none
    double* chances;         // (rows, best), for `rank`
};

void choose(const ChoiceSpec& c, const Member& m) {
    Scratch& scratch = workspace().choosing;
    const int vocab = static_cast<int>(c.vocab), best = static_cast<int>(c.best);
    for (int64_t r = m.thread; r < c.rows; r += m.threads) {
        const Distribution dist = distribution_of(c.logits + r * vocab, vocab, c.shapes[r], scratch);
        const Noise noise{c.keys + 2 * r, c.words};
        if (best) rank(dist, c.draft_temperatures[r], noise, best, scratch, c.tokens + r * best, c.chances + r * best);
        else c.tokens[r] = draw(dist, noise);
    }
}

// Chains drafted by a model: the layout's feeds are run, then every sequence continues from its drafted tokens.
struct ChainSpec {
    int64_t steps;          // of the longest chain
    const int32_t* wanted;  // tokens of each sequence's chain, the longest first
    double floor;           // drafting ends where the survival of every chain is below it
    int64_t* drawn;         // steps until then
    ChoiceSpec first;       // of all sequences; logits, keys, tokens and chances of the later steps follow
};

bool draft_chains(const StackSpec& stack, ForwardSpec forward, const ChainSpec& chain) {
    Workspace& w = workspace();
    Layout& l = w.layout;
    if (!read_layout(forward.layout, forward.page_size, l)) return false;
    ChoiceSpec choice = chain.first;
    const int64_t sequences = choice.rows;
    if (l.feeds.size() != static_cast<size_t>(sequences)) return false;
    std::vector<float> last(l.row.size() * stack.hidden);
    std::vector<int32_t> ends, tokens(sequences);
    for (const Feed& feed : l.feeds) {
        if (feed.fed < 1 || feed.nodes) return false;
        ends.push_back((ends.empty() ? -1 : ends.back()) + feed.fed);
    }
    forward.last = last.data(), forward.wanted = ends.data();
    std::vector<double> reached(sequences, 1.0);
    for (int step = 0; step < chain.steps; step++) {
        while (choice.rows && chain.wanted[choice.rows - 1] <= step) choice.rows--;
        if (step) {  // one token of each sequence that wants more, in the slot where text would lie
            l.tokens = tokens.data(), l.feeds.resize(choice.rows), l.row.resize(choice.rows);
            for (int s = 0; s < choice.rows; s++) {
                Feed& feed = l.feeds[s];
                feed.start += feed.fed, feed.fed = 1, ends[s] = s;
                l.row[s] = {&feed, feed.start, feed.start, nullptr};
                tokens[s] = static_cast<int32_t>(choice.tokens[s - sequences]);
            }
        }
        forward.wants = choice.rows, forward.logits = choice.logits;
        if (!run_rows(stack, forward, w)) return false;
        flushing([&] { choose(choice, {nullptr, 0, 1}); });
        *chain.drawn = step + 1;
        double survival = 0.0;
        for (int s = 0; s < choice.rows; s++) survival = std::max(survival, reached[s] *= choice.chances[s]);
        // the caller sees what is missing
        if (std::count(choice.tokens, choice.tokens + choice.rows, -1) || survival < chain.floor) return true;
        choice.logits += sequences * choice.vocab, choice.keys += 2 * sequences;
        choice.tokens += sequences, choice.chances += sequences;
    }
    return true;
}

// Trees drafted by a network: the layout's feeds are run, then the best nodes of every sequence's tree, level by level.
struct GrowthSpec {
    int64_t levels, beam, branch;  // `beam` nodes of a level are run, and each has `branch` children
    const int32_t* rooms;          // nodes of each sequence that are kept
    double floor;                  // growth ends where the survival of every node to run is below it
    int64_t feeds_back_normed;     // a node's row after the last norm, not before it, is the feature of its children
    const int32_t* ids;            // the token of each output; null: the same number
    const Shape* shapes;           // of each sequence
    const float* draft_temperatures;
    const uint32_t* keys;          // (levels, sequences, 2)
    const uint32_t* words;         // of every output
    float* logits;                 // (sequences + nodes that are run, outputs): after the roots, then after nodes
    int64_t capacity;              // nodes of a sequence in what follows
    int32_t* counts;               // of kept nodes of each sequence; -1: logits left no choice
    int32_t *tokens, *parents, *places;  // (sequences, capacity); the place of the logits after a node, or -1
    double* survival;              // (sequences, capacity)
    int64_t* done;                 // levels that were run
};

// The frontier's nodes as the rows of the next forward, with the features of their parents' rows where rows have features.
void lay_out_frontier(std::vector<Draft>& drafts, Layout& l, std::vector<int32_t>& tokens, const float* rows, int64_t hidden,
                      std::vector<float>& features) {
    size_t steps = 0;
    for (const Draft& draft : drafts)
        for (int node : draft.frontier) steps += draft.at(node).depth;
    l.row.clear(), l.paths.clear(), l.paths.reserve(steps), tokens.clear(), features.clear();
    for (Draft& draft : drafts) {
        for (int node : draft.frontier) {
            const float* feature = rows + draft.at(draft.at(node).parent).row * hidden;
            if (rows) features.insert(features.end(), feature, feature + hidden);
        }
        draft.lay_out(l.row, tokens, l.paths);
    }
    l.tokens = tokens.data();
}

void write_kept(const Draft& draft, int64_t sequence, const GrowthSpec& g) {
    const std::vector<int> kept = draft.kept();
    const int64_t first = sequence * g.capacity;
    g.counts[sequence] = static_cast<int32_t>(kept.size());
    for (size_t i = 0; i < kept.size(); i++) {
        const Node& node = draft.nodes[kept[i]];
        const auto above = std::lower_bound(kept.begin(), kept.end(), node.parent);
        g.tokens[first + i] = node.token, g.survival[first + i] = node.survival, g.places[first + i] = node.place;
        g.parents[first + i] = node.parent == kRoot ? kRoot : static_cast<int32_t>(above - kept.begin());
    }
}

bool grow_trees(const StackSpec& stack, ForwardSpec forward, const GrowthSpec& g) {
    Workspace& w = workspace();
    Layout& l = w.layout;
    if (!read_layout(forward.layout, forward.page_size, l)) return false;
    const int sequences = static_cast<int>(l.feeds.size()), branch = static_cast<int>(g.branch);
    const int64_t hidden = stack.hidden, outputs = stack.output->columns, most = sequences * std::max<int64_t>(g.beam, 1);
    std::vector<Draft> drafts;
    std::vector<int32_t> ends, tokens;
    for (Feed& feed : l.feeds) {
        if (feed.fed < 1 || feed.nodes) return false;
        ends.push_back((ends.empty() ? -1 : ends.back()) + feed.fed);
        drafts.emplace_back(&feed, g.rooms[drafts.size()], ends.back(), static_cast<int>(drafts.size()));
    }
    const size_t widest = std::max<size_t>(l.row.size(), most) * hidden;
    std::vector<float> stream(widest), last(stack.norm.weight ? widest : 0), features;
    forward.stream = stream.data(), forward.last = stack.norm.weight ? last.data() : nullptr;
    const float* fed_back = !forward.features ? nullptr : g.feeds_back_normed ? forward.last : forward.stream;
    std::vector<Shape> shapes;
    std::vector<float> draft_temperatures;
    std::vector<uint32_t> keys;
    std::vector<int64_t> chosen(most * branch);
    std::vector<double> chances(most * branch);
    forward.logits = g.logits;
    for (int64_t level = 0; level < g.levels; level++) {
        if (level) {
            lay_out_frontier(drafts, l, tokens, fed_back, hidden, features);
            ends.resize(l.row.size()), std::iota(ends.begin(), ends.end(), 0);
            if (fed_back) forward.features = features.data();
        }
        forward.wanted = ends.data(), forward.wants = static_cast<int64_t>(ends.size());
        if (!run_rows(stack, forward, w)) return false;
        *g.done = level + 1;
        shapes.clear(), draft_temperatures.clear(), keys.clear();
        for (int s = 0; s < sequences; s++)
            for (int node : drafts[s].frontier) {
                drafts[s].at(node).place = static_cast<int>((forward.logits - g.logits) / outputs + shapes.size());
                shapes.push_back(g.shapes[s]), draft_temperatures.push_back(g.draft_temperatures[s]);
                const uint32_t* key = g.keys + 2 * (level * sequences + s);
                keys.push_back(key[0]), keys.push_back(key[1]);
            }
        const ChoiceSpec choice{forward.logits, forward.wants, outputs, shapes.data(), draft_temperatures.data(),
                                keys.data(), g.words, branch, chosen.data(), chances.data()};
        flushing([&] { choose(choice, {nullptr, 0, 1}); });
        forward.logits += forward.wants * outputs;
        const int64_t* token = chosen.data();
        const double* chance = chances.data();
        double best = 0.0;
        for (int s = 0; s < sequences; s++) {
            Draft& draft = drafts[s];
            std::vector<int> parents;
            parents.swap(draft.frontier);
            for (int parent : parents) {
                if (*token < 0) return g.counts[s] = -1, true;
                for (int i = 0; i < branch; i++, token++, chance++)  // filters may leave fewer choices than branches
                    if (*token >= 0 && *chance > 0.0) draft.put(parent, g.ids ? g.ids[*token] : static_cast<int32_t>(*token), *chance);
            }
            draft.narrow(static_cast<int>(g.beam));
            for (int node : draft.frontier) best = std::max(best, draft.at(node).survival);
        }
        if (best == 0.0 || best < g.floor) break;
    }
    for (int s = 0; s < sequences; s++) write_kept(drafts[s], s, g);
    return true;
}

// Trees over blocks: every feed of the layout is a block, and gets the best tree through its slots' candidates.
struct BlockSpec {
    int64_t slots, candidates;  // of a block the last rows guess; the best of each
    const int32_t* rooms;       // nodes of each sequence that are kept
    TokenPairs pairs;
    const int32_t* ids;         // the token of each output; null: the same number
    const Shape* shapes;        // of each guessing row
    const float* draft_temperatures;
    const float* divisors;      // of the scores of pairs, of each guessing row
    const uint32_t* keys;       // two of each guessing row
    const uint32_t* words;      // of every output
    float *logits, *last;       // (guessing rows, outputs), with the scores of pairs; (rows, hidden)
    int64_t capacity;           // nodes of a sequence in what follows
    int32_t* counts;            // nodes of each sequence; -1: logits left no choice
    TreeRows trees;             // (sequences, capacity) each
};

// Adds the scores of pairs to the logits of every slot, after the best token of the slot before; of the first after the newest token.
void lead(const BlockSpec& b, std::vector<int32_t> before, int threads) {
    const int64_t outputs = b.pairs.outputs;
    for (int64_t slot = 0; slot < b.slots; slot++)
        for (size_t s = 0; s < before.size(); s++) {
            const int64_t row = static_cast<int64_t>(s) * b.slots + slot;
            int64_t best = -1;
            double chance;
            const ChoiceSpec first{b.logits + row * outputs, 1, outputs, b.shapes + row, b.draft_temperatures + row, b.keys + 2 * row,
                                   b.words, 1, &best, &chance};
            team().run(threads, [&](const Member& m) {
                const Share part = m.share(static_cast<int>(outputs));
                b.pairs.add(before[s], b.logits + row * outputs, part.begin, part.end);
                m.barrier();
                choose(first, m);
            });
            if (best >= 0) before[s] = b.ids ? b.ids[best] : static_cast<int32_t>(best);
        }
}

bool guess_blocks(const StackSpec& stack, ForwardSpec forward, const BlockSpec& b) {
    Workspace& w = workspace();
    if (!read_layout(forward.layout, forward.page_size, w.layout)) return false;
    const int slots = static_cast<int>(b.slots), candidates = static_cast<int>(b.candidates);
    const int64_t sequences = static_cast<int64_t>(w.layout.feeds.size()), outputs = stack.output->columns;
    std::vector<int32_t> wanted, newest;
    int row = 0;
    for (const Feed& feed : w.layout.feeds) {
        if (feed.fed < slots || feed.nodes) return false;
        newest.push_back(w.layout.tokens[row]), row += feed.fed;
        for (int slot = slots; slot > 0; slot--) wanted.push_back(row - slot);
    }
    forward.last = b.last, forward.wanted = wanted.data(), forward.wants = static_cast<int64_t>(wanted.size());
    forward.logits = b.logits;
    if (!run_rows(stack, forward, w)) return false;
    if (b.pairs.left) lead(b, newest, static_cast<int>(forward.threads));
    std::vector<int64_t> chosen(wanted.size() * candidates);
    std::vector<double> chances(wanted.size() * candidates);
    const ChoiceSpec choice{b.logits, forward.wants, outputs, b.shapes, b.draft_temperatures, b.keys, b.words, candidates,
                            chosen.data(), chances.data()};
    team().run(static_cast<int>(forward.threads), [&](const Member& m) { choose(choice, m); });
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t first = s * slots * candidates, at = s * b.capacity;
        if (chosen[first] < 0) return b.counts[s] = -1, true;
        Lattice lattice(slots, candidates, chosen.data() + first, chances.data() + first, b.ids);
        if (b.pairs.left) lattice.join(b.pairs, b.divisors + s * slots);
        b.counts[s] = lattice.tree(b.rooms[s], {b.trees.tokens + at, b.trees.parents + at, b.trees.survival + at});
    }
    return true;
}

#if defined(__AMX_TILE__)
// Tiles against vectors, with values whose sums are exact in every order.
template <class K>
bool tiles_agree() {
    constexpr int kInner = 5 * kUnit, kPanels = 4;
    std::vector<uint32_t> weights(kPanels * kInner * kLanes), x(kBlock * kInner);
    uint32_t random = 1;
    for (auto* words : {&weights, &x})
        for (uint32_t& word : *words) {  // bf16 values 1 and 2 of either sign, or bytes
            random = random * 1664525u + 1013904223u;
            word = (random & 0x80008000u) | (random & 1u << 20 ? 0x3f803f80u : 0x40004000u);
        }
    Linear l{};
    l.steps = kInner, l.weights = reinterpret_cast<const char*>(weights.data());
    alignas(64) Tile tiled[kPanels];
    typename K::Acc sums[kBlock];
    const TilesInUse tiles;
    multiply_tiles<K>(x.data(), kBlock * kUnit, l, 0, kPanels, tiled);
    bool agree = true;
    for (int p = 0; p < kPanels; p++) {
        multiply<K, RawBlock, kBlock>(x.data(), l, p, sums);
        agree &= std::memcmp(tiled[p], sums, sizeof sums) == 0;
    }
    return agree;
}
#endif

// The status of a call that may refuse its arguments. No exception leaves the library.
template <class Do>
int32_t status_of(const Do& run) {
    try {
        return run() ? 0 : 1;
    } catch (const std::exception&) {  // of vectors that grow
        return 2;
    }
}

// Products of zeros with panels of kMeasured steps that lie in a row, or all in one place, for measurements.
constexpr int kMeasured = 8 * kUnit;
template <class K, int R>
void multiply_panels(const char* weights, Share panels, bool in_place) {
    const std::vector<uint32_t> x(R * kMeasured);
    Linear l{};
    l.steps = kMeasured, l.weights = weights;
    typename K::Acc sums[R];
    for (int panel = panels.begin; panel < panels.end; panel++) {
        multiply<K, RawBlock, R>(x.data(), l, in_place ? 0 : panel, sums);
        asm volatile("" : : "m"(sums) : "memory");  // it is made
    }
}

}  // namespace outrider

using namespace outrider;

#define OUTRIDER_API extern "C" __attribute__((visibility("default")))

#ifndef OUTRIDER_SOURCES
#define OUTRIDER_SOURCES ""
#endif

// A digest of the sources this was built from.
OUTRIDER_API const char* outrider_sources() { return OUTRIDER_SOURCES; }

// Whether this processor and kernel run this build: 0, or a code of what is wrong. Some virtual machines offer AMX and fault
// on it, so a child process tries it first.
OUTRIDER_API int32_t outrider_try() {
#if defined(__AMX_TILE__)
    constexpr int kAskForTiles = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, ...)
    if (syscall(SYS_arch_prctl, kAskForTiles, kTileData) != 0) return 1;
    const pid_t child = fork();
    if (child == 0) _exit(tiles_agree<BF16>() && tiles_agree<I8>() ? 0 : 3);
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 2;
    return WEXITSTATUS(status);
#else
    return 0;
#endif
}

// Whether products use AMX tiles. Tiles are loaded straight from memory, so weights may not be 12-bit packed.
OUTRIDER_API int32_t outrider_tiles() { return kTiles; }

// out (rows, columns) = [norm](x) (rows, inner) times the packed weights, plus bias; then the epilogue.
OUTRIDER_API void outrider_linear(const Linear* l, float* x, int64_t rows, const Norm* norm, float* out, int64_t threads) {
    const PackedRows packed = workspace().packed(l->inner);
    const Input in{dense(x, l->inner), static_cast<int>(rows), *norm};
    const Rows to = dense(out, l->columns);
    team().run(static_cast<int>(threads), [&](const Member& m) { multiply_rows(*l, in, to, Then::kStore, packed, m); });
}

// Packs integers in groups; see GroupPacking. Returns 0, or 2 where there is too little memory.
OUTRIDER_API int32_t outrider_pack_groups(const GroupPacking* packing, int64_t threads) {
    std::atomic<bool> failed{false};
    team().run(static_cast<int>(threads), [&](const Member& m) {
        if (status_of([&] { pack_groups(*packing, m); return true; })) failed = true;
    });
    return failed ? 2 : 0;
}

// Packs weights; see Packing. Returns 0, or 2 where there is too little memory.
OUTRIDER_API int32_t outrider_pack(const Packing* packing, int64_t threads) {
    std::mutex adding;
    std::atomic<bool> failed{false};
    team().run(static_cast<int>(threads), [&](const Member& m) {
        if (status_of([&] { pack(*packing, m, adding); return true; })) failed = true;
    });
    return failed ? 2 : 0;
}

// Returns 0; or 1 where rows are laid out over memory that is not there; or 2 where there is too little memory. With 1 or 2
// nothing has been written. With 3 a rank is gone, and nothing that was written means anything.
OUTRIDER_API int32_t outrider_forward(const StackSpec* stack, const ForwardSpec* forward) {
    Workspace& w = workspace();
    const int32_t status = status_of([&] {
        return read_layout(forward->layout, forward->page_size, w.layout) && run_rows(*stack, *forward, w);
    });
    return status == 0 && w.alone ? 3 : status;
}

// Returns the codes of outrider_forward. A token below 0 says that a row of logits left no choice; later tokens of that
// chain are not written.
OUTRIDER_API int32_t outrider_draft(const StackSpec* stack, const ForwardSpec* forward, const ChainSpec* chain) {
    return status_of([&] { return draft_chains(*stack, *forward, *chain); });
}

// Returns the codes of outrider_forward. A count below 0 says that a row of logits left no choice; nothing else is written.
OUTRIDER_API int32_t outrider_grow(const StackSpec* stack, const ForwardSpec* forward, const GrowthSpec* growth) {
    return status_of([&] { return grow_trees(*stack, *forward, *growth); });
}

// Returns the codes of outrider_forward. A count below 0 says that logits left no choice; later ones are not written.
OUTRIDER_API int32_t outrider_guess(const StackSpec* stack, const ForwardSpec* forward, const BlockSpec* block) {
    return status_of([&] { return guess_blocks(*stack, *forward, *block); });
}

// Runs a recurrence along paths of rows. Returns 0, or 2 where there is too little memory.
OUTRIDER_API int32_t outrider_scan(const ScanSpec* scan, int64_t threads) {
    std::atomic<bool> failed{false};
    team().run(static_cast<int>(threads), [&](const Member& m) {
        if (status_of([&] { scan_rows(*scan, m); return true; })) failed = true;
    });
    return failed ? 2 : 0;
}

// By a team, or by this thread without waking anybody.
OUTRIDER_API void outrider_choose(const ChoiceSpec* choice, int64_t threads) {
    if (threads > 1) return team().run(static_cast<int>(threads), [&](const Member& m) { choose(*choice, m); });
    flushing([&] { choose(*choice, {nullptr, 0, 1}); });
}

// Runs `steps` steps with weights from the L1 cache. Returns the multiply-adds of all threads, 0 where AMX tiles are used.
OUTRIDER_API double outrider_multiply_add(int64_t kind, int64_t steps, int64_t threads) {
    const int panels = static_cast<int>(steps / kMeasured);
    const std::vector<char> weights(kMeasured * kStepBytes);
    int values = 0;  // of a step
    with_plain_kind(kind, [&](auto k) {
        using K = decltype(k);
        const auto body = [&](const Member&) { multiply_panels<K, kBlock>(weights.data(), {0, panels}, true); };
        team().run(static_cast<int>(threads), body);
        values = kLanes * K::per_step;
    });
    return kTiles ? 0.0 : static_cast<double>(panels) * kMeasured * threads * kBlock * values;
}

// Reads memory as a forward of one row reads weights, for measuring bandwidth.
OUTRIDER_API void outrider_read(const char* memory, int64_t bytes, int64_t threads) {
    const int panels = static_cast<int>(bytes / (kMeasured * kStepBytes));
    team().run(static_cast<int>(threads), [&](const Member& m) { multiply_panels<F32, 1>(memory, m.share(panels), false); });
}
