"""Maximum flows, and the tightest cut: the set of nodes that needs the most time to send (or receive) its data.

Capacities are integers of any size. The compiled module computes flows up to 62 bits; Python computes larger ones, and
all of them where nothing was compiled. Values and cuts are the same. SciPy's maximum flows are not used: they are
limited to capacities of 32 bits, and were not faster on the networks of the planners than those in Python.

Source: Dinitz, Algorithm for solution of a problem of maximum flow in a network with power estimation, Soviet
Mathematics Doklady 11, 1970.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from math import lcm
from typing import Any, Final

from ....kernels import native
from ....topology import Topology

MOST_COMPILED: Final = 1 << 62  # the compiled module computes flows in networks with less capacity in all


def tightest_cut(
    topology: Topology, weights: Mapping[str, Fraction], *, outward: bool
) -> tuple[frozenset[str], Fraction]:
    """Return the set S of nodes with the greatest quotient w(S) / B(S), and this quotient.

    S lacks at least one device. w(S) is the sum of the weights in S, and B(S) is the bandwidth out of S (into S, if
    ``outward`` is false). For weights in GB, the quotient is the time in seconds that the data needs to cross the cut.

    The search is Newton's method on cuts. It starts with the best set that lacks exactly one device. For each device,
    it computes the flow of all weights to this device within the time of the quotient. If not all data arrives, the
    minimum cut of this flow has a greater quotient, and the search continues with it.
    """
    numbers = {node: number for number, node in enumerate(topology.nodes)}
    scale = lcm(*(link.bandwidth.denominator for link in topology.links))
    arcs = {
        (numbers[src], numbers[dst]) if outward else (numbers[dst], numbers[src]): int(bandwidth * scale)
        for src, dst, bandwidth, _ in topology.links
    }
    weight_scale = lcm(*(weight.denominator for weight in weights.values()))
    starts = {numbers[device]: int(weight * weight_scale) for device, weight in weights.items() if weight}
    total, source = sum(starts.values()), len(numbers)  # source: an additional node, which feeds the roots
    entering = [0] * source
    for (_, dst), capacity in arcs.items():
        entering[dst] += capacity

    def quotient_without(sink: int) -> Fraction:
        """Return w(S) / B(S) for the set S of all nodes except ``sink``, in scaled units."""
        needed = total - starts.get(sink, 0)  # 0 for the only root, which may have no link into it
        return Fraction(needed, entering[sink]) if needed else Fraction(0)

    # Begin with the device for which the set of all other nodes has the greatest quotient.
    sinks = sorted(range(len(topology.devices)), key=lambda sink: -quotient_without(sink))
    best, ratio = frozenset(range(source)) - {sinks[0]}, quotient_without(sinks[0])
    network = _network_at_rate(arcs, starts, source, ratio)
    for sink in sinks:
        while network.flow_up_to(total * ratio.denominator, source, sink) < total * ratio.denominator:
            best = network.cut(source, sink) - {source}
            leaving = sum(capacity for (src, dst), capacity in arcs.items() if src in best and dst not in best)
            ratio = Fraction(sum(starts.get(node, 0) for node in best), leaving)
            network = _network_at_rate(arcs, starts, source, ratio)
    return frozenset(topology.nodes[node] for node in best), ratio * scale / weight_scale


def cuts_suffice(topology: Topology) -> bool:
    """Return whether every switch that only forwards has equal bandwidths in and out.

    Trees then reach the rate of the tightest cut (see ``certificate.py``).
    """
    surplus = dict.fromkeys((switch.name for switch in topology.switches if not switch.reduces), Fraction(0))
    for src, dst, bandwidth, _ in topology.links:
        if src in surplus:
            surplus[src] -= bandwidth
        if dst in surplus:
            surplus[dst] += bandwidth
    return not any(surplus.values())


def _network_at_rate(arcs: dict[tuple[int, int], int], starts: dict[int, int], source: int, ratio: Fraction) -> Network:
    """Return the network with an additional node ``source``, whose arc to each root has the capacity weight / ratio.

    ``starts`` is the weight by root. All capacities are multiplied by the numerator of the ratio to become integers.
    """
    capacities = {pair: capacity * ratio.numerator for pair, capacity in arcs.items()}
    capacities.update({(source, start): weight * ratio.denominator for start, weight in starts.items()})
    return Network(source + 1, capacities)


class Network:
    """A directed graph of the nodes 0 to n - 1 whose arcs have capacities.

    >>> network = Network(4, {(0, 1): 3, (0, 2): 1, (1, 3): 2, (2, 3): 5})
    >>> network.flow(0, 3), network.cut(0, 3)
    (3, frozenset({0, 1}))
    """

    def __init__(self, n: int, capacities: dict[tuple[int, int], int]) -> None:
        self._compiled: Any = None
        compiled = native()
        if compiled is not None and sum(capacities.values()) < MOST_COMPILED:
            self._compiled = compiled.FlowNetwork(n, capacities)
        else:
            self._arcs: list[dict[int, int]] = [{} for _ in range(n)]
            for (src, dst), capacity in capacities.items():
                if capacity:
                    self._arcs[src][dst] = capacity
        # The ends and the result of the last flow are cached, since ``cut`` is mostly called after ``flow``.
        self._last: tuple[tuple[int, int], tuple[int, frozenset[int]]] | None = None

    def flow(self, src: int, dst: int) -> int:
        """Return the value of the maximum flow from ``src`` to another node ``dst``."""
        return self._solve(src, dst)[0]

    def flow_up_to(self, enough: int, src: int, dst: int) -> int:
        """Return the value of the maximum flow, or that of a flow of at least ``enough``, which takes less time."""
        value, nodes = self._augment(src, dst, enough)
        if value < enough:
            self._last = (src, dst), (value, nodes)
        return value

    def cut(self, src: int, dst: int) -> frozenset[int]:
        """Return the nodes on the side of ``src`` of the minimum cut. If there are several cuts, take the smallest set.

        This set does not depend on which maximum flow is found: it is reached over the capacity that a flow leaves.
        """
        return self._solve(src, dst)[1]

    def _solve(self, src: int, dst: int) -> tuple[int, frozenset[int]]:
        if self._last is None or self._last[0] != (src, dst):
            self._last = (src, dst), self._augment(src, dst)
        return self._last[1]

    def _augment(self, src: int, dst: int, enough: float = math.inf) -> tuple[int, frozenset[int]]:
        """Return the value of the maximum flow, and the nodes on the side of ``src`` of the minimum cut.

        If a flow of ``enough`` or more is found, return its value, and no nodes.
        """
        if self._compiled is not None:
            flow, reached = self._compiled.flow(src, dst, min(enough, MOST_COMPILED))
            return flow, frozenset(reached)
        left = [arcs.copy() for arcs in self._arcs]
        value = left[src].pop(dst, 0)
        for node, capacity in left[src].items():  # the paths of one and two arcs, which need no search
            pushed = min(capacity, left[node].get(dst, 0))
            if pushed:
                left[src][node] -= pushed
                left[node][dst] -= pushed
                value += pushed
        while value < enough:
            level, queue = {src: 0}, deque([src])
            while queue and dst not in level:
                node = queue.popleft()
                for other, capacity in left[node].items():
                    if capacity and other not in level:
                        level[other] = level[node] + 1
                        queue.append(other)
            if dst not in level:
                return value, frozenset(level)
            value += _push_blocking_flow(left, level, src, dst, enough - value)
        return value, frozenset()


def _push_blocking_flow(left: list[dict[int, int]], level: dict[int, int], src: int, dst: int, enough: float) -> int:
    """Push flow along paths on which ``level`` rises by 1 per arc; return the added flow.

    It ends when there are no more such paths, or when ``enough`` was added.
    """
    value, path = 0, [src]
    onward: dict[int, list[int]] = {}  # for each node, the next nodes that may still lead to ``dst``
    while path and value < enough:
        node = path[-1]
        if node == dst:
            pairs = [(path[k], path[k + 1]) for k in range(len(path) - 1)]
            pushed = min(left[a][b] for a, b in pairs)
            value += pushed
            for a, b in pairs:
                left[a][b] -= pushed
                left[b][a] = left[b].get(a, 0) + pushed
            del path[next(k for k, (a, b) in enumerate(pairs) if not left[a][b]) + 1 :]  # back to the first full arc
            continue
        if node not in onward:
            onward[node] = [other for other in left[node] if level.get(other) == level[node] + 1]
        nodes = onward[node]
        while nodes and not left[node][nodes[-1]]:
            nodes.pop()
        if nodes:
            path.append(nodes[-1])
        else:
            path.pop()
            if path:
                onward[path[-1]].pop()
    return value
