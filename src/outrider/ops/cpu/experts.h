// Mixtures of experts: which experts a row goes through, and products of every expert with the rows that chose it.
//
// Rows are grouped by expert, so that the weights of a chosen expert are read once, and those of others never. Each product is
// that of linear.h, whose bits do not depend on the other rows, and a row's results are added in order of the experts' numbers.
// So a row's bits depend on the row alone.
#pragma once

#include <cfloat>
#include <vector>

#include "linear.h"

namespace outrider {

enum class Scores : int64_t { kSoftmax, kSigmoid, kSparsemixer };  // ROUTERS of model/spec.py

struct Router {
    const Linear* matrix;     // columns: the experts, and one more where the shared expert has a gate
    const float* correction;  // of each expert, added to the scores that choose; or null
    int64_t experts, chosen;
    Scores scores;
    int64_t groups, chosen_groups, normalised;
    double scale, closeness;  // of weights; of kSparsemixer
};

struct Experts {
    Router router;
    const Linear *const *gate_up, *const *down;  // of each expert, all of one shape
    const Linear *shared_gate_up, *shared_down;  // or null
    int64_t has_shared_gate;
};

// An expert that a row goes through, and the weight of what it gives.
struct Route { int expert; float weight; };

inline f32x16 sigmoid(f32x16 x) { return splat(1.0f) / (splat(1.0f) + exponential(splat(0.0f) - x)); }

// Chooses the experts of one row by its logits.
class Chooser {
   public:
    Chooser(const Router& r, const float* logits, std::vector<float>& memory)
        : r(r), logits(logits), experts(static_cast<int>(r.experts)), chosen(static_cast<int>(r.chosen)) {
        memory.resize(std::max<size_t>(memory.size(), 2 * experts));
        scores = memory.data(), choosing = scores + experts;
        for (int i = 0; i < experts; i++) choosing[i] = comparable(logits[i]);
    }

    // In order of the experts' numbers.
    void run(Route* routes) {
        r.scores == Scores::kSparsemixer ? mix_sparsely(routes) : choose(routes);
        std::sort(routes, routes + chosen, [](const Route& a, const Route& b) { return a.expert < b.expert; });
        if (r.scores == Scores::kSparsemixer) return;
        float all = 0.0f;
        for (int k = 0; k < chosen; k++) all += routes[k].weight;
        const float divisor = r.normalised ? all + 1e-20f : total, scale = static_cast<float>(r.scale);
        for (int k = 0; k < chosen; k++) routes[k].weight = routes[k].weight / divisor * scale;
    }

   private:
    static constexpr float kNever = -INFINITY;  // an expert that is taken; what is never chosen is the lowest number
    static float comparable(float x) { return x > -FLT_MAX ? x : -FLT_MAX; }

    // The largest of some numbers, the first of equal ones.
    static int best(const float* values, int count) {
        int at = 0;
        for (int i = 1; i < count; i++) at = values[i] > values[at] ? i : at;
        return at;
    }
    int take() {
        const int expert = best(choosing, experts);
        choosing[expert] = kNever;
        return expert;
    }

    void choose(Route* routes) {
        const float top = logits[best(choosing, experts)];
        const bool sigmoids = r.scores == Scores::kSigmoid;
        for (int i = 0; sigmoids && i < experts; i += kLanes)
            store_upto(scores + i, sigmoid(load_upto(logits + i, experts - i)), experts - i);
        if (!sigmoids) total = exponentials(top, [](int) { return true; });
        for (int i = 0; (sigmoids || r.correction) && i < experts; i++)  // softmax keeps the order of logits
            choosing[i] = comparable(scores[i] / total + (r.correction ? r.correction[i] : 0.0f));
        if (r.groups > 1) close_groups();
        for (int k = 0; k < chosen; k++) {
            const int expert = take();
            routes[k] = {expert, scores[expert]};
        }
    }

    // Experts outside the best groups, by the sum of their best two scores, are not chosen.
    void close_groups() {
        const int size = experts / static_cast<int>(r.groups);
        std::vector<float> group(r.groups);
        for (int g = 0; g < r.groups; g++) {
            const float* of = choosing + g * size;
            const int top = best(of, size);
            float second = -FLT_MAX;
            for (int i = 0; i < size; i++) second = i == top ? second : std::max(second, of[i]);
            group[g] = comparable(of[top] + second);
        }
        for (int k = 0; k < r.chosen_groups; k++) group[best(group.data(), static_cast<int>(r.groups))] = kNever;
        for (int i = 0; i < experts; i++)
            if (group[i / size] != kNever) choosing[i] = -FLT_MAX;
    }

    // The weight of each expert is its softmax among those left that are close to it.
    void mix_sparsely(Route* routes) {
        const float limit = static_cast<float>(r.closeness);
        for (int k = 0; k < chosen; k++) {
            const int expert = best(choosing, experts);
            const float top = logits[expert];
            const auto near = [&](int i) {
                return choosing[i] != kNever && !((top - logits[i]) / std::max(std::abs(logits[i]), top) > limit);
            };
            routes[k] = {expert, 1.0f / exponentials(top, near)};
            choosing[expert] = kNever;
        }
    }

    // e^(x - top) of every logit that `near` lets in, 0 of others, as scores. Returns their sum.
    template <class Near>
    float exponentials(float top, const Near& near) {
        f32x16 sums = splat(0.0f);
        for (int i = 0; i < experts; i += kLanes) {
            float lane[kLanes];
            for (int j = 0; j < kLanes; j++) lane[j] = i + j < experts && near(i + j) ? logits[i + j] - top : -INFINITY;
            const f32x16 e = exponential(load(lane));
            store_upto(scores + i, e, experts - i);
            sums += e;
        }
        return sum(sums);
    }

    const Router& r;
    const float* logits;
    int experts, chosen;
    float *scores, *choosing;
    float total = 1.0f;  // what scores are divided by
};

// The rows of a chunk by expert. A pair is a row and one of its experts; pairs lie by expert, then by row.
struct Pairs {
    struct Group { int expert, begin, end; };  // pairs of one expert

    std::vector<Route> routes;   // (rows, chosen)
    std::vector<int32_t> place;  // of each route among the pairs
    std::vector<int32_t> row;    // of each pair
    std::vector<Group> groups;   // of experts that some row goes through, in order
    std::vector<float> logits, inner, given;  // of rows; of pairs: between the products, and after them
    std::vector<uint32_t> words;
    std::vector<PackedRows::Quantum> quantum;

    // Room for rows that choose so many experts; `words` are those of a packed row.
    void make_room(size_t rows, size_t chosen, size_t experts, size_t width, size_t hidden, size_t words_of_row) {
        const size_t pairs = rows * chosen;
        const auto grow = [](auto& memory, size_t size) { memory.resize(std::max(memory.size(), size)); };
        grow(routes, pairs), grow(place, pairs), grow(row, pairs), grow(quantum, pairs), grow(logits, rows * (experts + kLanes));
        grow(inner, pairs * round_up(static_cast<int>(width), kLanes)), grow(given, pairs * round_up(static_cast<int>(hidden), kLanes));
        grow(words, pairs * (words_of_row + kStepBytes) + kBlock * kUnit);  // tiles read past the end
        groups.reserve(experts);
    }

    void group(int rows, int chosen, int experts) {
        std::vector<int32_t> next(experts + 1);
        for (int i = 0; i < rows * chosen; i++) next[routes[i].expert + 1]++;
        groups.clear();
        for (int e = 0; e < experts; e++) {
            if (next[e + 1]) groups.push_back({e, next[e], next[e] + next[e + 1]});
            next[e + 1] += next[e];
        }
        for (int i = 0; i < rows * chosen; i++) row[place[i] = next[routes[i].expert]++] = i / chosen;
    }

    Rows rows_of(std::vector<float>& memory, int width) const {
        return {memory.data(), static_cast<size_t>(round_up(width, kLanes)), width};
    }
};

// Every expert's matrix times its pairs, by every thread of a team. `in` are the rows of the pairs.
template <class K>
void multiply_experts(const Linear* const* of, const Input& in, Pairs& p, const Rows& out, const Member& m) {
    const Linear& any = *of[p.groups[0].expert];
    const int steps = static_cast<int>(any.steps);
    const auto packed = [&](const Pairs::Group& g) {
        return PackedRows{p.words.data() + static_cast<size_t>(g.begin) * steps, p.quantum.data() + g.begin};
    };
    const auto overlap = [](Share all, int begin, int end) {
        return Share{std::max(all.begin, begin) - begin, std::min(all.end, end) - begin};
    };
    const Share pairs = m.share(p.groups.back().end);
    for (const Pairs::Group& g : p.groups) {
        const Share mine = overlap(pairs, g.begin, g.end);
        if (mine.begin < mine.end) packed(g).template fill<K>(in.part(g.begin, g.end - g.begin), steps, mine);
    }
    m.barrier();
    const int panels = static_cast<int>(any.panels), halves = (panels + 1) / 2;  // pairs of panels stay together
    const Share all = m.share(halves * static_cast<int>(p.groups.size()));
    int first = 0;
    for (const Pairs::Group& g : p.groups) {
        const Share half = overlap(all, first, first + halves);
        first += halves;
        if (half.begin >= half.end) continue;
        const Linear& l = *of[g.expert];
        const Share mine{2 * half.begin, std::min(2 * half.end, panels)};
        multiply_share<K>(l, packed(g), g.end - g.begin, out.from(g.begin), Then::kStore, mine, nullptr);
    }
    m.barrier();
}

}  // namespace outrider
