// The cheapest trees of limited depth. Each step has its own price for each hop.
//
// With up to MOST_EXACT devices the trees are the cheapest, by dynamic programming over the sets of devices that a tree
// has reached. If a tree grows from set A to set B in one step, it pays the cheapest hop from A for each device of B
// that is not in A. With more devices, a few trees grow greedily, and the cheapest of them is taken.
//
// Source: Dreyfus & Wagner, The Steiner problem in graphs, Networks 1(3), 1971 (dynamic programming over sets of nodes);
// Alpert, Hu, Huang, Kahng & Karger, Prim-Dijkstra tradeoffs for improved performance-driven routing tree design, IEEE
// TCAD 14(7), 1995 (greedy trees).
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

struct Hop { // in a tree: the step, the device that sends, the device that receives
    int step, src, dst;
};

constexpr double NO_TREE = std::numeric_limits<double>::infinity();
constexpr int MOST_EXACT = 10; // devices; the exact search takes 3**n times as long as one hop

using Prices = std::vector<double>; // of the hop from u to v at u * n + v

class CheapestTrees {
  public:
    // `prices[s]` are those of step s. If `only` is a device, only trees out of it are searched.
    CheapestTrees(int n, std::vector<const Prices *> prices, int only) : n(n), only(only), prices(std::move(prices)) {
        if (n <= MOST_EXACT) {
            search_sets();
        } else {
            search_steps();
        }
    }

    // Return the price of a tree whose first step is `start`; NO_TREE if there is none.
    double price(int root, int start) {
        if (n <= MOST_EXACT) return least[static_cast<size_t>(start)][size_t{1} << root];
        return greedy(root, start).first;
    }

    std::vector<Hop> hops(int root, int start) { return n <= MOST_EXACT ? hops_of_sets(root, start) : greedy(root, start).second; }

  private:
    using Tree = std::pair<double, std::vector<Hop>>;

    int n, only;
    std::vector<const Prices *> prices;
    // Exact: by step and set A (a bit set), the least price to reach all devices from A, and the set after the step.
    // Greedy: by step and hop, the least price of the hop in this step or a later one, and the earliest such step.
    std::vector<std::vector<double>> least;
    std::vector<std::vector<int>> choice;
    std::vector<std::pair<std::pair<int, int>, Tree>> found; // greedy trees by root and first step

    void search_sets() {
        const size_t sets = size_t{1} << n;
        const unsigned full = static_cast<unsigned>(sets - 1), fixed = only < 0 ? 0 : 1u << only;
        least.assign(prices.size() + 1, std::vector<double>(sets, NO_TREE));
        choice.assign(prices.size(), std::vector<int>(sets, 0));
        least.back()[full] = 0;
        std::vector<double> hops(sets * static_cast<size_t>(n), NO_TREE), sum(sets); // the cheapest hop from set to device
        std::vector<int> last(sets, -1);                                             // the last device of each set
        for (size_t set = 1; set < sets; set++) last[set] = last[set >> 1] + 1;
        for (size_t s = prices.size(); s-- > 0;) {
            if (s + 1 == prices.size() || prices[s] != prices[s + 1]) set_hops(*prices[s], last, hops);
            for (unsigned a = 1; a <= full; a++) {
                if ((a & fixed) != fixed) continue;
                const double *hop = &hops[a * static_cast<size_t>(n)];
                const unsigned outside = full & ~a;
                double best = least[s + 1][a];
                unsigned after = a;
                sum[0] = 0;
                for (unsigned added = -outside & outside; added; added = (added - outside) & outside) {
                    const int v = last[added];
                    sum[added] = sum[added ^ 1u << v] + hop[v];
                    const double total = sum[added] + least[s + 1][a | added];
                    if (total < best) best = total, after = a | added;
                }
                least[s][a] = best;
                choice[s][a] = static_cast<int>(after);
            }
        }
    }

    void set_hops(const Prices &price, const std::vector<int> &last, std::vector<double> &hops) const {
        const size_t size = static_cast<size_t>(n);
        for (size_t set = 1; set < last.size(); set++) {
            const size_t u = static_cast<size_t>(last[set]), rest = set ^ size_t{1} << u;
            for (size_t v = 0; v < size; v++) hops[set * size + v] = std::min(hops[rest * size + v], price[u * size + v]);
        }
    }

    std::vector<Hop> hops_of_sets(int root, int start) const {
        std::vector<Hop> hops;
        unsigned reached = 1u << root;
        for (size_t s = static_cast<size_t>(start); s < prices.size(); s++) {
            const unsigned after = static_cast<unsigned>(choice[s][reached]);
            for (int v = 0; v < n; v++) {
                if (!((after & ~reached) >> v & 1)) continue;
                int best = only; // of several equal hops, that of the only root, else that of the first device
                for (int u = 0; u < n; u++)
                    if ((reached >> u & 1) && (best < 0 || cost(s, u, v) < cost(s, best, v))) best = u;
                hops.push_back({static_cast<int>(s), best, v});
            }
            reached = after;
        }
        return hops;
    }

    double cost(size_t step, int u, int v) const { return (*prices[step])[static_cast<size_t>(u * n + v)]; }

    void search_steps() {
        const size_t steps = prices.size(), size = static_cast<size_t>(n * n);
        least.assign(steps + 1, std::vector<double>(size, NO_TREE));
        choice.assign(steps + 1, std::vector<int>(size, static_cast<int>(steps)));
        for (size_t s = steps; s-- > 0;)
            for (size_t k = 0; k < size; k++) {
                const bool is_cheap = (*prices[s])[k] <= least[s + 1][k];
                least[s][k] = is_cheap ? (*prices[s])[k] : least[s + 1][k];
                choice[s][k] = is_cheap ? static_cast<int>(s) : choice[s + 1][k];
            }
    }

    const Tree &greedy(int root, int start) {
        const std::pair<int, int> key{root, start};
        for (const auto &[known, tree] : found)
            if (known == key) return tree;
        Tree best = grow(root, start, 0.0);
        for (Tree tree : {grow(root, start, 0.5), grow_early(root, start)})
            if (tree.first < best.first) best = std::move(tree);
        found.emplace_back(key, std::move(best));
        return found.back().second;
    }

    // Return a tree that grows device by device, each time over the hop of the least rank: its price plus a part of the
    // rank of the hop by which its sender was reached.
    Tree grow(int root, int start, double part) const {
        const size_t size = static_cast<size_t>(n);
        std::vector<int> sender(size, root), step(size);
        std::vector<double> price(size), rank(size);
        std::vector<char> missing(size, 1);
        missing[static_cast<size_t>(root)] = 0;
        for (int v = 0; v < n; v++) {
            const size_t k = static_cast<size_t>(root * n + v), to = static_cast<size_t>(v);
            step[to] = choice[static_cast<size_t>(start)][k];
            price[to] = rank[to] = least[static_cast<size_t>(start)][k];
        }
        Tree tree{0.0, {}};
        for (int left = n - 1; left > 0; left--) {
            int next = -1;
            for (int v = 0; v < n; v++)
                if (missing[static_cast<size_t>(v)] && (next < 0 || rank[static_cast<size_t>(v)] < rank[static_cast<size_t>(next)])) next = v;
            const size_t at = static_cast<size_t>(next);
            if (rank[at] == NO_TREE) return {NO_TREE, {}};
            tree.first += price[at];
            tree.second.push_back({step[at], sender[at], next});
            const size_t after = static_cast<size_t>(step[at]) + 1; // the first step in which it can send
            const double path = rank[at] * part;
            missing[at] = 0;
            for (int v = 0; v < n; v++) {
                const size_t k = static_cast<size_t>(next * n + v), to = static_cast<size_t>(v);
                if (!missing[to] || !(least[after][k] + path < rank[to])) continue;
                rank[to] = least[after][k] + path;
                price[to] = least[after][k];
                step[to] = choice[after][k];
                sender[to] = next;
            }
        }
        return tree;
    }

    // Return the sum of numbers by eight partial sums, which are added in pairs (the order determines rounding errors).
    static double sum_of(const std::vector<double> &numbers) {
        const size_t whole = numbers.size() / 8 * 8;
        double sums[8] = {}, sum = 0;
        for (size_t k = 0; k < whole; k++) sums[k % 8] += numbers[k];
        if (whole) sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        for (size_t k = whole; k < numbers.size(); k++) sum += numbers[k];
        return sum;
    }

    // Return a tree that reaches each device in the earliest step, over its cheapest hop then.
    Tree grow_early(int root, int start) const {
        std::vector<char> reached(static_cast<size_t>(n), 0);
        reached[static_cast<size_t>(root)] = 1;
        Tree tree{0.0, {}};
        int left = n - 1;
        for (size_t s = static_cast<size_t>(start); s < prices.size(); s++) {
            const std::vector<char> before = reached;
            std::vector<double> paid;
            for (int v = 0; v < n; v++) {
                if (before[static_cast<size_t>(v)]) continue;
                int best = -1;
                for (int u = 0; u < n; u++)
                    if (before[static_cast<size_t>(u)] && (best < 0 || cost(s, u, v) < cost(s, best, v))) best = u;
                if (cost(s, best, v) == NO_TREE) continue;
                paid.push_back(cost(s, best, v));
                tree.second.push_back({static_cast<int>(s), best, v});
                reached[static_cast<size_t>(v)] = 1;
                left--;
            }
            tree.first += sum_of(paid);
        }
        return left ? Tree{NO_TREE, {}} : tree;
    }
};
