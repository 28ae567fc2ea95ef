// Drafts that grow level by level: which nodes there are, which are run next, which are kept. draft/growth.py is the
// reference: both give the same trees.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "attention.h"

namespace outrider {

constexpr int kRoot = -1;

struct Node {
    int32_t token;
    int parent, depth;        // a root's child has depth 1
    double chance, survival;  // chance after its parent, and of the whole path
    int row = -1;             // in the forward that ran it
    int place = -1;           // of the logits after it
    int slot = -1;            // after the root's, once it is run
};

// One sequence's draft. Nodes are numbered in the order they were added, so a parent comes before its children.
class Draft {
   public:
    Draft(Feed* feed, int room, int root_row, int root_place) : feed(feed), room(room), root{0, kRoot, 0, 1.0, 1.0, root_row, root_place} {}

    const Node& at(int node) const { return node == kRoot ? root : nodes[node]; }
    Node& at(int node) { return node == kRoot ? root : nodes[node]; }

    void put(int parent, int32_t token, double chance) {
        frontier.push_back(static_cast<int>(nodes.size()));
        nodes.push_back({token, parent, at(parent).depth + 1, chance, at(parent).survival * chance});
    }

    // The `room` likeliest nodes in order. A parent is never less likely than its child, so the tree stays whole.
    std::vector<int> kept() const {
        std::vector<int> order(nodes.size());
        std::iota(order.begin(), order.end(), 0);
        if (order.size() > static_cast<size_t>(room)) rank(order), order.resize(room), std::sort(order.begin(), order.end());
        return order;
    }

    // Leaves on the frontier the best nodes whose children could still be kept, as many as slots allow.
    void narrow(int beam) {
        const int size = static_cast<int>(nodes.size());
        if (size == room && beam == 1) return frontier.clear();
        if (size > room) {
            const std::vector<int> alive = kept();
            const auto is_dead = [&](int node) { return !std::binary_search(alive.begin(), alive.end(), node); };
            frontier.erase(std::remove_if(frontier.begin(), frontier.end(), is_dead), frontier.end());
        }
        rank(frontier);
        const int most = std::max(0, std::min(beam, room - static_cast<int>(ran.size())));
        if (frontier.size() > static_cast<size_t>(most)) frontier.resize(most);
    }

    // Gives the frontier's nodes slots and appends their rows. `paths` has room for what is appended.
    void lay_out(std::vector<Row>& rows, std::vector<int32_t>& tokens, std::vector<int32_t>& paths) {
        for (int node : frontier) {
            Node& n = nodes[node];
            feed->tree |= n.parent != (ran.empty() ? kRoot : ran.back());
            n.slot = static_cast<int>(ran.size());
            ran.push_back(node);
        }
        feed->nodes = static_cast<int>(ran.size());
        for (int node : frontier) {
            Node& n = nodes[node];
            int32_t* path = nullptr;
            if (feed->tree) {
                paths.resize(paths.size() + n.depth);
                path = paths.data() + paths.size() - n.depth;
                for (int above = node, i = n.depth; above != kRoot; above = nodes[above].parent)
                    path[--i] = feed->root() + 1 + nodes[above].slot;
            }
            n.row = static_cast<int>(rows.size());
            rows.push_back({feed, feed->root() + n.depth, feed->root() + 1 + n.slot, path});
            tokens.push_back(n.token);
        }
    }

    Feed* feed;
    int room;
    Node root;
    std::vector<Node> nodes;
    std::vector<int> frontier{kRoot};  // nodes to put children under
    std::vector<int> ran;              // nodes in the order of their slots

   private:
    void rank(std::vector<int>& order) const {
        std::sort(order.begin(), order.end(), [&](int a, int b) {
            return nodes[a].survival != nodes[b].survival ? nodes[a].survival > nodes[b].survival : a < b;
        });
    }
};

}  // namespace outrider
