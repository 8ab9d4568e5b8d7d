// Maximum flows and minimum cuts for the planners, by Dinitz' algorithm. planning/optimal/bounds/cuts.py has the same in
// Python; both return the same numbers and sets.
#include "module.hpp"

#include <algorithm>
#include <cstdint>

namespace {

struct Arc {
    int head, twin; // twin: the number of the arc in the other direction, over which flow is returned
    int64_t capacity;
};

// A directed graph. The sum of all capacities fits into 62 bits: the caller checks this.
struct Network {
    std::vector<int> first; // for each node the number of its first arc, and then the number of all arcs
    std::vector<Arc> arcs;
    std::vector<int64_t> left; // the capacity that the flow leaves on each arc
    std::vector<int> level, next, queue, path;

    void build(int nodes, const std::vector<int> &ends, const std::vector<int64_t> &capacities) {
        first.assign(static_cast<size_t>(nodes) + 1, 0);
        for (const int end : ends) first[static_cast<size_t>(end) + 1]++;
        for (size_t node = 0; node + 1 < first.size(); node++) first[node + 1] += first[node];
        next.assign(first.begin(), first.end() - 1);
        arcs.resize(ends.size());
        for (size_t k = 0; k < capacities.size(); k++) {
            const int src = ends[2 * k], dst = ends[2 * k + 1], there = next[src]++, back = next[dst]++;
            arcs[there] = {dst, back, capacities[k]};
            arcs[back] = {src, there, 0};
        }
        level.resize(static_cast<size_t>(nodes));
    }

    // Set the distance of each node from `src` over arcs with capacity left, or -1. Return whether `dst` was reached.
    bool find_levels(int src, int dst) {
        std::fill(level.begin(), level.end(), -1);
        level[src] = 0;
        queue.assign(1, src);
        for (size_t k = 0; k < queue.size() && level[dst] < 0; k++) {
            const int node = queue[k];
            for (int a = first[node]; a < first[node + 1]; a++) {
                if (left[a] == 0 || level[arcs[a].head] >= 0) continue;
                level[arcs[a].head] = level[node] + 1;
                queue.push_back(arcs[a].head);
            }
        }
        return level[dst] >= 0;
    }

    // Push flow along paths on which the level rises by 1 per arc, until there are none, or `enough` was added.
    int64_t push(int src, int dst, int64_t enough) {
        int64_t value = 0;
        next.assign(first.begin(), first.end() - 1);
        path.clear();
        for (int node = src;;) {
            if (node == dst) {
                int64_t pushed = INT64_MAX;
                for (const int a : path) pushed = std::min(pushed, left[a]);
                value += pushed;
                size_t full = path.size();
                for (size_t k = path.size(); k-- > 0;) {
                    left[path[k]] -= pushed;
                    left[arcs[path[k]].twin] += pushed;
                    if (left[path[k]] == 0) full = k;
                }
                if (value >= enough) return value;
                node = arcs[arcs[path[full]].twin].head; // back to the first full arc
                path.resize(full);
                continue;
            }
            int &a = next[node];
            while (a < first[node + 1] && (left[a] == 0 || level[arcs[a].head] != level[node] + 1)) a++;
            if (a < first[node + 1]) {
                path.push_back(a);
                node = arcs[a].head;
            } else if (path.empty()) {
                return value;
            } else {
                node = arcs[arcs[path.back()].twin].head;
                path.pop_back();
                next[node]++;
            }
        }
    }
};

struct NetworkObject {
    PyObject_HEAD
    Network *network;
};

// Read {(src, dst): capacity}. Return false with an error set if that fails.
bool read_arcs(PyObject *capacities, int nodes, std::vector<int> &ends, std::vector<int64_t> &amounts) {
    Ref items(PyMapping_Items(capacities));
    return items && read_each(items.object, [&](PyObject *entry) {
        int src, dst;
        long long amount;
        if (!PyArg_ParseTuple(entry, "(ii)L", &src, &dst, &amount)) return false;
        if (std::min(src, dst) < 0 || std::max(src, dst) >= nodes || amount < 0)
            return value_error("an arc must join two nodes, and its capacity must not be negative");
        if (amount == 0 || src == dst) return true;
        ends.push_back(src);
        ends.push_back(dst);
        amounts.push_back(amount);
        return true;
    });
}

PyObject *network_new(PyTypeObject *type, PyObject *args, PyObject *) {
    int nodes;
    PyObject *capacities;
    if (!PyArg_ParseTuple(args, "iO", &nodes, &capacities)) return nullptr;
    if (nodes < 0) return PyErr_Format(PyExc_ValueError, "the number of nodes must not be negative");
    return make_object<NetworkObject>(type, [&](NetworkObject &self) {
        std::vector<int> ends;
        std::vector<int64_t> amounts;
        if (!read_arcs(capacities, nodes, ends, amounts)) return false;
        self.network = new Network();
        self.network->build(nodes, ends, amounts);
        return true;
    });
}

void network_dealloc(PyObject *object) {
    delete reinterpret_cast<NetworkObject *>(object)->network;
    free_object(object);
}

PyObject *flow(PyObject *object, PyObject *args) {
    Network &network = *reinterpret_cast<NetworkObject *>(object)->network;
    int src, dst;
    long long enough;
    if (!PyArg_ParseTuple(args, "iiL", &src, &dst, &enough)) return nullptr;
    if (std::min(src, dst) < 0 || std::max(src, dst) >= static_cast<int>(network.level.size()) || src == dst)
        return PyErr_Format(PyExc_ValueError, "a flow must have two different nodes of the network");
    network.left.resize(network.arcs.size());
    for (size_t k = 0; k < network.arcs.size(); k++) network.left[k] = network.arcs[k].capacity;
    int64_t value = 0;
    while (value < enough) {
        if (network.find_levels(src, dst)) {
            value += network.push(src, dst, enough - value);
            continue;
        }
        Ref nodes(PyList_New(0));
        for (const int node : network.queue) { // all nodes that were reached
            Ref number(PyLong_FromLong(node));
            if (!nodes || !number || PyList_Append(nodes.object, number.object) < 0) return nullptr;
        }
        return nodes ? Py_BuildValue("LO", static_cast<long long>(value), nodes.object) : nullptr;
    }
    return Py_BuildValue("L()", static_cast<long long>(value));
}

PyMethodDef network_methods[] = {
    {"flow", flow, METH_VARARGS, "Return the maximum flow, and the nodes before the minimum cut; or a flow that is enough."},
    {nullptr, nullptr, 0, nullptr}};
} // namespace

int add_flow_network(PyObject *module) {
    return add_class<NetworkObject>(module, "crossreduce.kernels._native.FlowNetwork", network_new, network_dealloc, network_methods);
}
