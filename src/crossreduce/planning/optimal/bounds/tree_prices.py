"""The prices of trees, for proofs by prices of the links.

Input: the links with their prices, and the nodes that trees join. Output: the exact price of the cheapest tree, or, for
many nodes, a lower limit of the prices of all trees. Trees branch only at *branch nodes*: devices and switches that
reduce. The search for trees uses other algorithms (``steiner.py``), so that it does not share an error with the check.
It only takes the lower limits from here.

Source: Erickson, Monma & Veinott, Send-and-split method for minimum-concave-cost network flows, Math. of Operations
Research 12(4), 1987; Wong, A dual ascent approach for Steiner tree problems on a directed graph, Math. Programming 28,
1984.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import lcm
from typing import Any

from ....topology import Topology

Priced = list[tuple[Any, Any, Any]]  # links: (src, dst, price), with nodes of any type and prices of 0 or more


def branch_nodes_of(topology: Topology) -> tuple[str, ...]:
    """Return the nodes of a topology at which trees may branch."""
    return (*topology.devices, *(switch.name for switch in topology.switches if switch.reduces))


def price_of_buffer(
    priced: Priced,
    branch_nodes: Sequence[str],
    collective: str,
    members: tuple[str, ...],
    roots: Iterable[tuple[str, Fraction]],
    *,
    exact: bool = True,
) -> Fraction:
    """Return the price of moving one unit of the buffer over the cheapest trees, or 0 if no trees exist.

    Args:
      roots: (root, amount of data that starts or ends at it) of all collectives except all-reduce.
      exact: whether the price is exact. Otherwise it is a lower limit, which is found quickly for many members.
    """
    scale = lcm(*(Fraction(price).denominator for *_, price in priced))
    priced = [(src, dst, int(price * scale)) for src, dst, price in priced]  # sums of integers are quick
    if collective == "all_reduce":
        return Fraction(least_price(priced, branch_nodes, members, members, branch_nodes, exact=exact) or 0, scale)
    outward = collective in ("broadcast", "all_gather")
    sources, destinations = () if outward else members, members if outward else ()
    weights = [(root, weight) for root, weight in roots if weight]
    prices = _prices(priced, branch_nodes, sources, destinations, [root for root, _ in weights], exact=exact)
    cost = sum((prices.get(root, 0) * weight for root, weight in weights), Fraction(0))
    return cost / sum((weight for _, weight in weights), Fraction(0)) / scale


def least_price(
    priced: Priced, branch_nodes: Sequence[Any], sources: Any, destinations: Any, roots: Sequence[Any], *, exact: bool
) -> Any:
    """Return the least price, over all roots, of a tree from all sources to the root and one to all destinations.

    Return ``None`` if no root has such trees. If ``exact`` is false, return a lower limit of the price.
    """
    if not exact and len(roots) > 1 and sources and set(sources) == set(destinations):
        price = {(src, dst): cost for src, dst, cost in priced}
        if all(price.get((dst, src)) == cost for (src, dst), cost in price.items()):
            # A tree that copies, read backwards, is a tree that reduces, and any of its nodes can be its root at the
            # same price. So the limit of each root is valid for all trees, and the greatest limit is the best.
            prices = _prices(priced, branch_nodes, (), destinations, destinations, exact=False)
            return 2 * max(prices.values()) if prices else None
    return min(_prices(priced, branch_nodes, sources, destinations, roots, exact=exact).values(), default=None)


def _prices(
    priced: Priced, branch_nodes: Sequence[Any], sources: Any, destinations: Any, roots: Sequence[Any], *, exact: bool
) -> dict[Any, Any]:
    """Return, by root, the price of a tree to all destinations plus that of a tree from all sources.

    If there are no destinations or no sources, that tree is not counted. Roots without such trees are left out.
    """
    prices = []  # for each direction: the price of the tree of each root
    for ends, links in ((destinations, priced), (sources, [(dst, src, price) for src, dst, price in priced])):
        if ends and exact:
            prices.append(cheapest_prices(links, ends, set(branch_nodes)))
        elif ends:
            prices.append(_lower_bounds(links, ends, branch_nodes, roots))
    served = [root for root in roots if all(root in by_root for by_root in prices)]
    return {root: sum(by_root[root] for by_root in prices) for root in served}


def cheapest_prices(priced: Priced, ends: Sequence[Any], branch_nodes: set[Any]) -> dict[Any, Any]:
    """Return, by node, the price of the cheapest tree from it to all ``ends``; trees branch only at ``branch_nodes``.

    Nodes without such a tree are left out. The time grows with 3**ends.
    """
    entering: dict[Any, list[tuple[Any, Any]]] = {}
    for src, dst, price in priced:
        entering.setdefault(dst, []).append((src, price))
    cheapest: list[dict[Any, Any]] = [{}]  # for each set of ends (a number, one bit per end): the price by node
    for wanted in range(1, 1 << len(ends)):
        costs: dict[Any, Any] = {}
        if not wanted & (wanted - 1):
            costs[ends[wanted.bit_length() - 1]] = 0
        part = (wanted - 1) & wanted
        while part > wanted ^ part:  # each division of the set in two parts, once
            for node, cost in cheapest[part].items():
                if node in branch_nodes and node in cheapest[wanted ^ part]:
                    both = cost + cheapest[wanted ^ part][node]
                    costs[node] = min(costs.get(node, both), both)
            part = (part - 1) & wanted
        queue = [(cost, node) for node, cost in costs.items()]  # Dijkstra, over the links backwards
        heapify(queue)
        done: dict[Any, Any] = {}
        while queue:
            cost, node = heappop(queue)
            if node in done:
                continue
            done[node] = cost
            for src, price in entering.get(node, ()):
                if src not in done and cost + price < costs.get(src, cost + price + 1):
                    costs[src] = cost + price
                    heappush(queue, (cost + price, src))
        cheapest.append(done)
    return cheapest[-1]


def _lower_bounds(
    priced: Priced, ends: Sequence[Any], branch_nodes: Sequence[Any], roots: Sequence[Any]
) -> dict[Any, Any]:
    """Return, by root, a lower limit of the prices of all trees from it to all ``ends``.

    Each end is connected to the root in turn. ``inside`` contains the branch nodes from which the end can be reached
    over hops whose remaining price is 0. While the root is outside, each tree must enter this set, so it costs at least
    the price of the cheapest hop into the set. This price is added to the limit and subtracted from all these hops.
    """
    position = {node: k for k, node in enumerate(branch_nodes)}
    hops = _hops(priced, position)
    limits = {}
    for root in roots:
        left, total = [dict(prices) for prices in hops], 0  # the remaining prices of the hops, and the limit
        for end in sorted(position[end] for end in ends):  # in the order of the branch nodes
            inside, queue = {end}, [end]
            while True:
                while queue and position[root] not in inside:
                    for src, price in left[queue.pop()].items():
                        if not price and src not in inside:
                            inside.add(src)
                            queue.append(src)
                if position[root] in inside:
                    break
                into = [(dst, src) for dst in inside for src in left[dst] if src not in inside]
                if not into:  # the root cannot reach this end
                    break
                least = min(left[dst][src] for dst, src in into)
                total += least
                for dst, src in into:
                    left[dst][src] -= least
                    if not left[dst][src]:
                        inside.add(src)
                        queue.append(src)
            if position[root] not in inside:
                break
        else:
            limits[root] = total
    return limits


def _hops(priced: Priced, position: dict[Any, int]) -> list[dict[int, Any]]:
    """Return, for each branch node, the prices of the hops into it from other branch nodes, by their ``position``.

    A hop is the cheapest path that passes no third branch node.
    """
    entering: dict[Any, list[tuple[Any, Any]]] = {}
    for src, dst, price in priced:
        entering.setdefault(dst, []).append((src, price))
    hops: list[dict[int, Any]] = []
    for end in position:
        order = 0  # equal prices are taken in the order in which they were found
        queue, done, prices = [(0, order, end)], set[Any](), dict[int, Any]()
        while queue:
            cost, _, node = heappop(queue)
            if node in done:
                continue
            done.add(node)
            if node != end and node in position:
                prices[position[node]] = cost
                continue
            for src, price in entering.get(node, ()):
                if src not in done:
                    order += 1
                    heappush(queue, (cost + price, order, src))
        hops.append(prices)
    return hops
