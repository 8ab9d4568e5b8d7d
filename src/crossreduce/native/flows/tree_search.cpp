// Searches cheap trees of few steps for planning/optimal/few_step/tree_program.py, at prices of the links.
#include "cheapest_trees.hpp"
#include "module.hpp"

#include <cmath>

namespace {

constexpr int MOST = 256; // devices, steps

struct Edge { // a hop with its route
    int step, src, dst, route;
    bool operator<(const Edge &other) const {
        return std::make_pair(std::make_pair(step, src), dst) < std::make_pair(std::make_pair(other.step, other.src), other.dst);
    }
};

struct Found { // the cheapest trees into and out of a root, and how often they use each link in each row
    double price;
    std::vector<Edge> into, out;
    std::vector<double> load;
};

struct Search {
    int n, steps, rows, links;
    bool paired;                       // whether trees into the roots are searched, too
    std::vector<int> roots, back;      // back: the link in the other direction, which carries the same; or empty
    std::vector<int> src, dst;         // of each route
    std::vector<std::vector<int>> used; // the links of each route

    size_t row_of(int step) const { return static_cast<size_t>(rows == 1 ? 0 : step); }

    // Return the cheapest trees of each root that cost less than `most` of this root. The others have no edges.
    std::vector<Found> cheapest(const double *prices, const std::vector<double> &most) const {
        std::vector<Prices> hops(static_cast<size_t>(rows), Prices(static_cast<size_t>(n * n), NO_TREE)), backwards;
        std::vector<std::vector<int>> routes(hops.size(), std::vector<int>(hops[0].size(), -1)); // the cheapest ones
        for (size_t row = 0; row < hops.size(); row++) {
            const double *of_row = prices + row * static_cast<size_t>(links);
            for (size_t k = 0; k < used.size(); k++) {
                double sum = 0;
                for (const int link : used[k]) sum += back.empty() ? of_row[link] : of_row[link] + of_row[back[static_cast<size_t>(link)]];
                const size_t hop = static_cast<size_t>(src[k] * n + dst[k]);
                if (sum < hops[row][hop]) hops[row][hop] = sum, routes[row][hop] = static_cast<int>(k);
            }
        }
        std::vector<const Prices *> forth, reversed; // of each step
        for (int s = 0; s < steps; s++) forth.push_back(&hops[row_of(s)]);
        if (paired) { // a tree into a root is one out of it if steps and hops are reversed
            for (const Prices &of_row : hops) {
                backwards.emplace_back(of_row.size());
                for (size_t k = 0; k < of_row.size(); k++) backwards.back()[k] = of_row[k % static_cast<size_t>(n) * static_cast<size_t>(n) + k / static_cast<size_t>(n)];
            }
            for (int s = steps; s-- > 0;) reversed.push_back(&backwards[row_of(s)]);
        }
        const int only = roots.size() == 1 ? roots[0] : -1;
        CheapestTrees out(n, forth, only), into(paired ? n : 1, reversed, paired ? only : -1);
        std::vector<Found> found;
        for (size_t k = 0; k < roots.size(); k++) {
            const int root = roots[k];
            int start = 0;
            double price = NO_TREE;
            for (int s = 0; s <= (paired ? steps : 0); s++) { // the step in which the tree out of the root begins
                const double both = out.price(root, s) + (paired ? into.price(root, steps - s) : 0.0);
                if (both < price) price = both, start = s;
            }
            found.push_back({price, {}, {}, {}});
            if (price == NO_TREE || price >= most[k]) continue;
            Found &trees = found.back();
            const auto add = [&](std::vector<Edge> &edges, int step, int u, int v) {
                edges.push_back({step, u, v, routes[row_of(step)][static_cast<size_t>(u * n + v)]});
            };
            for (const Hop &hop : out.hops(root, start)) add(trees.out, hop.step, hop.src, hop.dst);
            if (paired)
                for (const Hop &hop : into.hops(root, steps - start)) add(trees.into, steps - 1 - hop.step, hop.dst, hop.src);
            trees.load.assign(static_cast<size_t>(rows * links), 0.0);
            for (std::vector<Edge> *edges : {&trees.into, &trees.out}) {
                std::sort(edges->begin(), edges->end());
                for (const Edge &edge : *edges) {
                    double *load = &trees.load[row_of(edge.step) * static_cast<size_t>(links)];
                    for (const int link : used[static_cast<size_t>(edge.route)]) {
                        load[link] += 1;
                        if (!back.empty()) load[back[static_cast<size_t>(link)]] += 1;
                    }
                }
            }
        }
        return found;
    }
};

struct SearchObject {
    PyObject_HEAD
    Search *search;
};

// Read (src, dst, links) of each route.
bool read_routes(PyObject *routes, Search &search) {
    const auto is_link = [&](int link) { return link >= 0 && link < search.links; };
    if (!search.back.empty() && (search.back.size() != static_cast<size_t>(search.links) || !std::all_of(search.back.begin(), search.back.end(), is_link)))
        return value_error("each link must have one in the other direction");
    return read_each(routes, [&](PyObject *route) {
        int src, dst;
        PyObject *links;
        search.used.emplace_back();
        if (!PyArg_ParseTuple(route, "(ii)O", &src, &dst, &links) || !read_ints(links, search.used.back())) return false;
        if (std::min(src, dst) < 0 || std::max(src, dst) >= search.n || !std::all_of(search.used.back().begin(), search.used.back().end(), is_link))
            return value_error("a route has an unknown end or link");
        search.src.push_back(src), search.dst.push_back(dst);
        return true;
    });
}

PyObject *search_new(PyTypeObject *type, PyObject *args, PyObject *) {
    int n, links, steps, many, paired;
    PyObject *routes, *roots, *back;
    if (!PyArg_ParseTuple(args, "iiOOOipp", &n, &links, &routes, &roots, &back, &steps, &many, &paired)) return nullptr;
    if (std::min({n, links, steps}) < 1 || std::max(n, steps) > MOST || links > 1 << 20)
        return PyErr_Format(PyExc_ValueError, "the numbers of devices and steps must be from 1 to 256, that of links to 2^20");
    return make_object<SearchObject>(type, [&](SearchObject &self) {
        self.search = new Search{n, steps, many ? 1 : steps, links, paired != 0, {}, {}, {}, {}, {}};
        if (!read_ints(roots, self.search->roots) || !read_ints(back, self.search->back)) return false;
        for (const int root : self.search->roots)
            if (root < 0 || root >= n) return value_error("a root must be a device");
        return read_routes(routes, *self.search);
    });
}

void search_dealloc(PyObject *object) {
    delete reinterpret_cast<SearchObject *>(object)->search;
    free_object(object);
}

PyObject *tuple_of_edges(const std::vector<Edge> &edges) {
    Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(edges.size())));
    for (size_t k = 0; tuple && k < edges.size(); k++) {
        PyObject *edge = Py_BuildValue("(iiii)", edges[k].step, edges[k].src, edges[k].dst, edges[k].route);
        if (edge == nullptr || PyTuple_SetItem(tuple.object, static_cast<Py_ssize_t>(k), edge) < 0) return nullptr;
    }
    return Py_XNewRef(tuple.object);
}

bool read_numbers(PyObject *numbers, std::vector<double> &to) {
    return read_each(numbers, [&](PyObject *number) {
        to.push_back(PyFloat_AsDouble(number));
        return PyErr_Occurred() == nullptr;
    });
}

PyObject *cheapest(PyObject *object, PyObject *args) {
    const Search &search = *reinterpret_cast<SearchObject *>(object)->search;
    PyObject *given, *limits;
    if (!PyArg_ParseTuple(args, "OO", &given, &limits)) return nullptr;
    try {
        std::vector<double> prices, most;
        if (!read_numbers(given, prices) || !read_numbers(limits, most)) return nullptr;
        if (prices.size() != static_cast<size_t>(search.rows) * static_cast<size_t>(search.links) || most.size() != search.roots.size())
            return PyErr_Format(PyExc_ValueError, "there must be a price for each link and row, and a limit for each root");
        std::vector<Found> found;
        if (!without_lock(false, [&] { found = search.cheapest(prices.data(), most); return true; })) return PyErr_NoMemory();
        Ref list(PyList_New(0));
        for (const Found &trees : found) {
            Ref into(tuple_of_edges(trees.into)), out(tuple_of_edges(trees.out));
            Ref load(PyBytes_FromStringAndSize(reinterpret_cast<const char *>(trees.load.data()), static_cast<Py_ssize_t>(trees.load.size() * sizeof(double))));
            if (!list || !into || !out || !load) return nullptr;
            Ref one(Py_BuildValue("dOOO", trees.price, into.object, out.object, load.object));
            if (!one || PyList_Append(list.object, one.object) < 0) return nullptr;
        }
        return Py_XNewRef(list.object);
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
}

PyMethodDef search_methods[] = {
    {"cheapest", cheapest, METH_VARARGS, "Return for each root (price, edges into it, edges out of it, load) of its cheapest trees."},
    {nullptr, nullptr, 0, nullptr}};
} // namespace

int add_tree_search(PyObject *module) {
    return add_class<SearchObject>(module, "crossreduce.kernels._native.TreeSearch", search_new, search_dealloc, search_methods);
}
