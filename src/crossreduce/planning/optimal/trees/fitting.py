"""Trees for given roots and bandwidths.

Input: the roots with weights, and the bandwidths. Output: trees that together respect the bandwidths. They reach the
greatest rate. If this takes many trees, fewer trees may be returned, which lose at most the part ``TOLERANCE`` of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

from ....errors import PlanError
from ....topology import Link, Topology
from ..bounds.cuts import cuts_suffice, tightest_cut
from ..bounds.linear_program import optimum
from ..bounds.solver import common_unit
from ..bounds.steiner import Arc, Through
from .packing import Batch, pack_trees
from .switches import Capacities, all_reached, replace_switches
from .tree_schedule import Tree

# If at most this many trees per root, on average, reach the bound exactly, they are used. If more are necessary, fewer
# trees that lose at most the part ``TOLERANCE`` of the rate are tried. NCCL loses more: its search only tries speeds of
# a list (search.cc), most of which are 5 to 33 % below the preceding one.
MOST_TREES: Final = 4
TOLERANCE: Final = Fraction(2, 100)

Pair = tuple[str, str]


def fit_trees(
    topology: Topology, used: Mapping[Pair, Fraction], weights: Mapping[int, Fraction]
) -> tuple[list[Tree], Fraction]:
    """Return the trees out of the roots, and k, their average number per root. A tree of weight w counts w times.

    Args:
      topology: a neutral topology.
      used: the bandwidth that the trees together may use of each link, by (src, dst).
      weights: by the number of the root: its amount of data, relative to that of the other roots.
    Raises:
      PlanError: no such trees were found.
    """
    number = {node: k for k, node in enumerate(topology.nodes)}
    n, devices = len(topology.devices), range(len(topology.devices))
    total = sum(weights.values(), Fraction(0))
    shares = {topology.devices[root]: weight for root, weight in weights.items()}
    rate = 1 / tightest_cut(_set_bandwidths(topology, used), shares, outward=True)[1]  # for a root of weight 1
    # A tree has n - 1 edges and uses a link at most once per edge. More bandwidth would only make the search slower.
    most = (n - 1) * rate * total
    used = {pair: min(bandwidth, most) for pair, bandwidth in used.items()}
    if not cuts_suffice(_set_bandwidths(topology, used)):
        best = optimum(_set_bandwidths(topology, used), tuple(weights.items()))
        if best.reached <= 0:
            raise _no_trees(topology)
        used = best.down
        rate = 1 / tightest_cut(_set_bandwidths(topology, used), shares, outward=True)[1]
    arcs = {(number[src], number[dst]): bandwidth for (src, dst), bandwidth in used.items() if bandwidth}
    groups = [0] * n  # for each device, the number of its island (devices that the fastest links join)
    for k, island in enumerate(topology.islands):
        for device in island:
            groups[number[device]] = k
    switches = range(n, len(number))

    def packed(unit: Fraction, roots: dict[int, int], most: int | None) -> list[Tree] | None:
        """Return trees that use the bandwidth ``unit`` each, or ``None`` if they do not fit, or are more than ``most``.

        ``roots`` is the number of trees of each root. Bandwidths are rounded down to multiples of the unit.
        """
        capacities = Capacities()
        for arc, bandwidth in arcs.items():
            capacities.add(arc, (), int(bandwidth / unit))
        capacities = replace_switches(capacities, switches, roots, devices, groups, len(number))
        if not all_reached(capacities.totals(), roots, devices, n):
            return None
        batches = pack_trees(capacities.totals(), roots, n, most)
        return None if batches is None else _add_routes(batches, capacities)

    unit = common_unit([*(rate * weight for weight in weights.values()), *arcs.values()])
    exact = {root: int(rate * weight / unit) for root, weight in weights.items()}
    trees = packed(unit, exact, MOST_TREES * len(exact))
    if trees is not None and len(trees) <= MOST_TREES * len(exact):
        return trees, Fraction(sum(exact.values()), len(exact))
    least = min(weights.values())
    for k in range(1, MOST_TREES + 1):  # the number of trees of the root with the least weight
        roots = {root: max(1, int(k * weight / least)) for root, weight in weights.items()}
        if sum(roots.values()) > MOST_TREES * len(roots):
            break
        coarse = _largest_unit(arcs, roots, rate * total, devices, len(number))
        if coarse * sum(roots.values()) >= (1 - TOLERANCE) * rate * total:
            few = packed(coarse, roots, None)
            if few is not None:
                return few, Fraction(sum(roots.values()), len(roots))
    trees = trees or packed(unit, exact, None)
    if trees is None:
        raise _no_trees(topology)
    return trees, Fraction(sum(exact.values()), len(exact))


def _no_trees(topology: Topology) -> PlanError:
    problem = "the links' bandwidths could not be divided into trees that join each root with all devices."
    return PlanError.of(problem, repr(topology), 'algorithm="hierarchical_copy"')


def _set_bandwidths(topology: Topology, used: Mapping[Pair, Fraction]) -> Topology:
    """Return the topology with the bandwidths of ``used``. Links that are not used are left out."""
    links = [Link(src, dst, bandwidth) for (src, dst), bandwidth in used.items() if bandwidth]
    return Topology.unchecked(topology.devices, links, topology.switches)


def _largest_unit(
    arcs: Mapping[Arc, Fraction], roots: dict[int, int], rate: Fraction, sinks: Sequence[int], n: int
) -> Fraction:
    """Return the greatest bandwidth per tree with which all trees fit the links, or 0 if there is none.

    ``roots`` is the number of trees of each root. Only parts 1/1, 1/2, ... of the bandwidth of some link are tried, if
    the trees then lose at most ``TOLERANCE`` of the rate.
    """
    most = rate / sum(roots.values())
    candidates = {
        bandwidth / parts
        for bandwidth in set(arcs.values())
        for parts in range(-(-bandwidth // most), int(bandwidth / (most * (1 - TOLERANCE))) + 1)
    }
    units = sorted(candidates, reverse=True)
    low, high = 0, len(units)  # binary search
    while low < high:
        middle = (low + high) // 2
        capacities = {arc: int(bandwidth / units[middle]) for arc, bandwidth in arcs.items()}
        if all_reached(capacities, roots, sinks, n):
            high = middle
        else:
            low = middle + 1
    return units[low] if low < len(units) else Fraction(0)


def _add_routes(batches: Sequence[Batch], capacities: Capacities) -> list[Tree]:
    """Return the trees of the batches with their routes through switches, which are removed from ``capacities``.

    A batch is divided if no single route between two devices has room for all of its trees.
    """
    trees: dict[tuple[int, tuple[tuple[int, int, Through], ...]], int] = {}  # (root, edges) -> number of trees
    for root, weight, arcs in batches:
        left = weight
        while left:
            part, parents = left, []
            for src, dst in arcs:
                routes = capacities[src, dst]
                # The first route with room for all trees, else the first one with the most room.
                through = max(routes, key=lambda route: min(routes[route], left))
                part = min(part, routes[through])
                parents.append((dst, src, through))
            for dst, src, through in parents:
                capacities[src, dst][through] -= part
                if not capacities[src, dst][through]:
                    del capacities[src, dst][through]
            key = (root, tuple((dst, src, _remove_loops(src, through, dst)) for dst, src, through in parents))
            trees[key] = trees.get(key, 0) + part
            left -= part
    return [Tree(root, weight, parents) for (root, parents), weight in trees.items()]


def _remove_loops(src: int, through: Through, dst: int) -> Through:
    """Return a route without its loops. (Loops arise if ``replace_switches`` replaces several switches in turn.)"""
    nodes = [src]
    for node in (*through, dst):
        if node in nodes:
            del nodes[nodes.index(node) + 1 :]
        else:
            nodes.append(node)
    return tuple(nodes[1:-1])
