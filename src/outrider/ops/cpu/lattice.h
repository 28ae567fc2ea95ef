// The best trees through a block's candidates, some for each slot. draft/lattice.py is the reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace outrider {

// Scores of neighbouring tokens: <left[a], right[b]> is added to the logit of b after a. Without `left` there are none.
struct TokenPairs {
    const float *left, *right;  // (tokens, rank), (rank, outputs)
    int64_t rank, outputs;

    // Adds the scores of some outputs after a token to logits.
    void add(int32_t token, float* __restrict logits, int64_t begin, int64_t end) const {
        for (int64_t r = 0; r < rank; r++) {
            const float weight = left[token * rank + r];
            const float* __restrict scores = right + r * outputs;
            for (int64_t o = begin; o < end; o++) logits[o] += weight * scores[o];
        }
    }

    double score(int32_t token, int64_t output) const {
        double sum = 0.0;
        for (int64_t r = 0; r < rank && output >= 0; r++) sum += double{left[token * rank + r]} * right[r * outputs + output];
        return sum;
    }
};

// Where a tree is written.
struct TreeRows {
    int32_t *tokens, *parents;
    double* survival;
};

class Lattice {
   public:
    // `outputs` and `chances` are (slots, candidates), the best first; an output below 0 is no candidate. `ids` are tokens of outputs.
    Lattice(int slots, int candidates, const int64_t* outputs, const double* chances, const int32_t* ids)
        : slots(slots), candidates(candidates), outputs(outputs), ids(ids), after(static_cast<size_t>(slots) * candidates * candidates) {
        for (int slot = 0; slot < slots; slot++)
            for (int before = 0; before < candidates; before++)
                std::copy_n(chances + slot * candidates, candidates, at(slot, before));
    }

    // Replaces the scores of pairs after the first candidate of the slot before, which chances contain, by those after each other
    // one, divided by the slot's divisor. The chances of a slot's candidates keep their sum.
    void join(const TokenPairs& pairs, const float* divisors) {
        std::vector<double> scores(candidates);
        for (int slot = 1; slot < slots; slot++) {
            const int32_t best = token_of(slot - 1, 0);
            for (int before = 1; before < candidates && best >= 0; before++) {
                const int32_t token = token_of(slot - 1, before);
                if (token < 0) continue;
                double *chance = at(slot, before), top = -INFINITY, sum = 0.0, weights = 0.0;
                for (int c = 0; c < candidates; c++) {
                    const int64_t output = outputs[slot * candidates + c];
                    scores[c] = (pairs.score(token, output) - pairs.score(best, output)) / divisors[slot];
                    top = std::max(top, scores[c]), sum += chance[c];
                }
                for (int c = 0; c < candidates; c++) weights += chance[c] *= std::exp(scores[c] - top);
                for (int c = 0; c < candidates && weights > 0.0; c++) chance[c] *= sum / weights;
            }
        }
    }

    // Writes the best tree of at most `room` nodes, and returns how many there are.
    int tree(int room, const TreeRows& to) {
        waiting.clear(), order = 0;
        int nodes = 0;
        for (wait({1.0, -1, 0, 0, 0}); nodes < room && !waiting.empty(); nodes++) {
            std::pop_heap(waiting.begin(), waiting.end(), is_worse);
            const Step step = waiting.back();
            waiting.pop_back();
            const int candidate = ranking(step.slot, step.before)[step.rank];
            to.tokens[nodes] = token_of(step.slot, candidate), to.parents[nodes] = step.parent, to.survival[nodes] = step.survival;
            wait({step.above, step.parent, step.slot, step.before, step.rank + 1});
            if (step.slot + 1 < slots) wait({step.survival, nodes, step.slot + 1, candidate, 0});
        }
        return nodes;
    }

   private:
    // A candidate that may become a node: the one of that rank in a slot, after a candidate of the slot before.
    struct Step {
        double above;  // survival of its parent
        int parent, slot, before, rank;
        double survival = 0.0;
        int order = 0;
    };
    static bool is_worse(const Step& a, const Step& b) { return a.survival != b.survival ? a.survival < b.survival : a.order > b.order; }

    void wait(Step step) {
        for (const std::vector<int>& best = ranking(step.slot, step.before); step.rank < candidates; step.rank++) {
            const int candidate = best[step.rank];
            const double chance = at(step.slot, step.before)[candidate];
            if (chance <= 0.0 || outputs[step.slot * candidates + candidate] < 0) continue;
            step.survival = step.above * chance, step.order = order++;
            waiting.push_back(step);
            return std::push_heap(waiting.begin(), waiting.end(), is_worse);
        }
    }

    // Candidates in order of their chance after a candidate of the slot before.
    const std::vector<int>& ranking(int slot, int before) {
        rankings.resize(static_cast<size_t>(slots) * candidates);
        std::vector<int>& best = rankings[slot * candidates + before];
        if (best.empty()) {
            best.resize(candidates);
            std::iota(best.begin(), best.end(), 0);
            const double* chance = at(slot, before);
            std::stable_sort(best.begin(), best.end(), [chance](int a, int b) { return chance[a] > chance[b]; });
        }
        return best;
    }

    int32_t token_of(int slot, int candidate) const {
        const int64_t output = outputs[slot * candidates + candidate];
        return output < 0 || !ids ? static_cast<int32_t>(output) : ids[output];
    }
    double* at(int slot, int before) { return after.data() + (static_cast<size_t>(slot) * candidates + before) * candidates; }

    int slots, candidates;
    const int64_t* outputs;
    const int32_t* ids;
    std::vector<double> after;  // chances (slots, candidates before, candidates)
    std::vector<std::vector<int>> rankings;
    std::vector<Step> waiting;  // a heap
    int order = 0;
};

}  // namespace outrider
