"""The prices of trees, for proofs by prices of the links.

Input: the links with their prices, and the nodes that trees join. Output: the price of the cheapest trees, exact; or,
for many nodes, a price that no trees are below. Trees branch only at *joints*: devices and switches that reduce.

Nothing here is used to search for trees. The search has other algorithms (``steiner.py``), except that it also states
the lower price for many nodes.

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

Priced = list[tuple[Any, Any, Any]]  # links: (src, dst, price); nodes and prices of any kind, prices 0 or more


def joints_of(topology: Topology) -> tuple[str, ...]:
    """Return the nodes of a topology at which trees may branch."""
    return (*topology.devices, *(switch.name for switch in topology.switches if switch.reduces))


def price_of_buffer(
    priced: Priced,
    joints: Sequence[str],
    collective: str,
    members: tuple[str, ...],
    roots: Iterable[tuple[str, Fraction]],
    *,
    exact: bool = True,
) -> Fraction:
    """Return the price of the cheapest trees that move a unit of the buffer of a collective; 0: there are none.

    Args:
      roots: for all collectives but all-reduce, the roots and the parts of the buffer that start (or end) there.
      exact: whether the price is exact. Else no trees are cheaper; that is for many members.
    """
    scale = lcm(*(Fraction(price).denominator for *_, price in priced))
    priced = [(src, dst, int(price * scale)) for src, dst, price in priced]  # sums of integers are quick
    if collective == "all_reduce":
        return Fraction(least_price(priced, joints, members, members, joints, exact=exact) or 0, scale)
    outward = collective in ("broadcast", "all_gather")
    sources, destinations = () if outward else members, members if outward else ()
    listed = [(root, weight) for root, weight in roots if weight]
    found = _prices(priced, joints, sources, destinations, [root for root, _ in listed], exact=exact)
    cost = sum((found.get(root, 0) * weight for root, weight in listed), Fraction(0))
    return cost / sum((weight for _, weight in listed), Fraction(0)) / scale


def least_price(
    priced: Priced, joints: Sequence[Any], sources: Any, destinations: Any, roots: Sequence[Any], *, exact: bool
) -> Any:
    """Return the price of the cheapest trees from sources to some root and from there to destinations.

    ``None``: no such trees exist. ``exact``: as for ``price_of_buffer``.
    """
    if not exact and len(roots) > 1 and sources and set(sources) == set(destinations):
        price = {(src, dst): cost for src, dst, cost in priced}
        if all(price.get((dst, src)) == cost for (src, dst), cost in price.items()):
            # A tree that copies is one that reduces, backwards. It costs the same out of each of its nodes.
            found = _prices(priced, joints, (), destinations, destinations, exact=False)
            return 2 * max(found.values()) if found else None
    return min(_prices(priced, joints, sources, destinations, roots, exact=exact).values(), default=None)


def _prices(
    priced: Priced, joints: Sequence[Any], sources: Any, destinations: Any, roots: Sequence[Any], *, exact: bool
) -> dict[Any, Any]:
    """Return for each root that has trees their price."""
    ways = []
    for ends, links in ((destinations, priced), (sources, [(dst, src, price) for src, dst, price in priced])):
        if ends:
            ways.append(
                cheapest_prices(links, ends, set(joints)) if exact else _lower_bounds(links, ends, joints, roots)
            )
    return {root: sum(way[root] for way in ways) for root in roots if all(root in way for way in ways)}


def cheapest_prices(priced: Priced, ends: Sequence[Any], joints: set[Any]) -> dict[Any, Any]:
    """Return the price of the cheapest tree from each node to all ``ends``; trees branch only at ``joints``.

    Nodes without such a tree are left out. The time grows with 3**ends.
    """
    near: dict[Any, list[tuple[Any, Any]]] = {}
    for src, dst, price in priced:
        near.setdefault(dst, []).append((src, price))
    found: list[dict[Any, Any]] = [{}]  # by the set of ends, as bits
    for wanted in range(1, 1 << len(ends)):
        costs: dict[Any, Any] = {}
        if not wanted & (wanted - 1):
            costs[ends[wanted.bit_length() - 1]] = 0
        part = (wanted - 1) & wanted
        while part > wanted ^ part:  # each way to divide the set in two, once
            for node, cost in found[part].items():
                if node in joints and node in found[wanted ^ part]:
                    both = cost + found[wanted ^ part][node]
                    costs[node] = min(costs.get(node, both), both)
            part = (part - 1) & wanted
        queue = [(cost, node) for node, cost in costs.items()]
        heapify(queue)
        done: dict[Any, Any] = {}
        while queue:
            cost, node = heappop(queue)
            if node in done:
                continue
            done[node] = cost
            for src, price in near.get(node, ()):
                if src not in done and cost + price < costs.get(src, cost + price + 1):
                    costs[src] = cost + price
                    heappush(queue, (cost + price, src))
        found.append(done)
    return found[-1]


def _lower_bounds(priced: Priced, ends: Sequence[Any], joints: Sequence[Any], roots: Sequence[Any]) -> dict[Any, Any]:
    """Return for each root a price that no tree from it to all ``ends`` is below.

    Sets of joints without the root, each with an end that the root does not reach yet, are raised one after another:
    every tree enters the set, so it pays at least the cheapest way into it; all ways into it become cheaper by that.
    """
    place = {joint: k for k, joint in enumerate(joints)}
    hops = _hops(priced, place)
    found = {}
    for root in roots:
        left, total = [dict(ways) for ways in hops], 0
        for end in sorted(place[end] for end in ends):  # in the order of the joints
            inside, queue = {end}, [end]
            while True:
                while queue and place[root] not in inside:
                    for src, price in left[queue.pop()].items():
                        if not price and src not in inside:
                            inside.add(src)
                            queue.append(src)
                if place[root] in inside:
                    break
                into = [(dst, src) for dst in inside for src in left[dst] if src not in inside]
                if not into:
                    break
                least = min(left[dst][src] for dst, src in into)
                total += least
                for dst, src in into:
                    left[dst][src] -= least
                    if not left[dst][src]:
                        inside.add(src)
                        queue.append(src)
            if place[root] not in inside:
                break
        else:
            found[root] = total
    return found


def _hops(priced: Priced, place: dict[Any, int]) -> list[dict[int, Any]]:
    """Return for each joint the joints with a way to it that passes no third joint, and the price of the cheapest."""
    near: dict[Any, list[tuple[Any, Any]]] = {}
    for src, dst, price in priced:
        near.setdefault(dst, []).append((src, price))
    hops: list[dict[int, Any]] = []
    for joint in place:
        order = 0  # equal prices are taken in the order in which they were found
        queue, done, ways = [(0, order, joint)], set[Any](), dict[int, Any]()
        while queue:
            cost, _, node = heappop(queue)
            if node in done:
                continue
            done.add(node)
            if node != joint and node in place:
                ways[place[node]] = cost
                continue
            for src, price in near.get(node, ()):
                if src not in done:
                    order += 1
                    heappush(queue, (cost + price, order, src))
        hops.append(ways)
    return hops
