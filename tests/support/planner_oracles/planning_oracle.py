"""Reference results for planning, by slow methods that list all cuts or all trees.

Input: topologies and schedules, of which only plain numbers are read. Output: bounds, cuts and rates, and random
wirings, which tests turn into topologies. Nothing here imports crossreduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

from hypothesis import assume
from hypothesis import strategies as st

# Bandwidths, in this order: integers, fractions with small denominators, decimals as in measurements, the binary
# fractions nearest to decimals, and numbers so different in size that a float cannot hold their sum exactly.
WHOLE = (1, 2, 3, 25)
ODD = (1, 2, Fraction(1, 3), Fraction(5, 2), Fraction(64, 3), 450)
DECIMAL = tuple(map(Fraction, ("0.125", "0.1", "0.3", "12.5", "46.7", "5000")))
BINARY = tuple(map(Fraction, (0.1, 0.3, 12.5, 46.7)))
WILD = (1, Fraction(1, 10**9), Fraction(1, 3), 2**31 - 1, 2**31, 10**10 + 19)


def subsets(nodes: Sequence[Any]) -> Iterator[frozenset[Any]]:
    """Yield every subset of the nodes."""
    for bits in range(1 << len(nodes)):
        yield frozenset(node for k, node in enumerate(nodes) if bits >> k & 1)


def width(topology: Any, inside: frozenset[str], outward: bool = True) -> Fraction:
    """Return the bandwidth of all links that leave a set of nodes, or that enter it if ``outward`` is false."""
    ends = ((link.src, link.dst) if outward else (link.dst, link.src) for link in topology.links)
    bandwidths = (link.bandwidth for link in topology.links)
    crossing = (b for (tail, head), b in zip(ends, bandwidths, strict=True) if tail in inside and head not in inside)
    return sum(crossing, Fraction(0))


def reachable(topology: Any, source: str) -> set[str]:
    """Return the device ``source`` and all devices and switches to which it has a route."""
    reached, waiting = {source}, [source]
    while waiting:
        new = {link.dst for link in topology.out_links(waiting.pop())} - reached
        reached |= new
        waiting.extend(new)
    return reached


def cut_bound(
    topology: Any, weights: Mapping[str, Fraction], outward: bool, members: Iterable[str] | None = None
) -> Fraction:
    """Return the least w(all) B(S) / w(S) over all sets S of nodes that have weight and lack a member.

    w(S) is the sum of ``weights``, which are by root, in S. B(S) is the bandwidth of the links out of S, or into it.
    """
    needed = set(topology.devices if members is None else members)
    whole = sum(weights.values(), Fraction(0))
    found = []
    for inside in subsets(topology.nodes):
        held = sum((weight for root, weight in weights.items() if root in inside), Fraction(0))
        if held and not needed <= inside:
            found.append(whole * width(topology, inside, outward) / held)
    return min(found)


def all_trees(
    topology: Any, roots: Iterable[str], outward: bool, members: Iterable[str]
) -> dict[tuple[str, tuple[int, ...]], None]:
    """Return all trees out of (or into) roots that reach all members, as keys (root, number of uses of each link).

    If there are too many trees, hypothesis draws another example.
    """
    pairs = [(link.src, link.dst) if outward else (link.dst, link.src) for link in topology.links]
    where = {pair: k for k, pair in enumerate(pairs)}
    able = [*topology.devices, *(switch.name for switch in topology.switches if switch.reduces)]
    edges: dict[str, list[tuple[str, tuple[int, ...]]]] = {node: [] for node in able}  # by head: (tail, links)

    def extend(tail: str, nodes: tuple[str, ...], links: tuple[int, ...]) -> None:
        """Add all edges from ``tail`` that begin with the path ``nodes``, which uses ``links``."""
        for a, b in pairs:
            if a == nodes[-1] and b in able and b != tail:
                edges[b].append((tail, (*links, where[a, b])))
            elif a == nodes[-1] and b not in able and b not in nodes:
                extend(tail, (*nodes, b), (*links, where[a, b]))

    for node in able:
        extend(node, (node,), ())
    needed = set(members)
    columns: dict[tuple[str, tuple[int, ...]], None] = {}
    for root in roots:
        for nodes in subsets(able):
            if not nodes >= needed | {root}:
                continue
            others = [node for node in able if node in nodes and node != root]
            choices = [[edge for edge in edges[node] if edge[0] in nodes] for node in others]
            assume(prod(map(len, choices)) <= 20_000)
            for parents in product(*choices):  # for each other node, the edge from its parent
                up = {node: tail for node, (tail, _) in zip(others, parents, strict=True)}
                reached = {root}
                for _ in others:
                    reached |= {node for node, tail in up.items() if tail in reached}
                if len(reached) == len(nodes):
                    used = Counter(k for _, links in parents for k in links)
                    columns[root, tuple(used[k] for k in range(len(pairs)))] = None
    return columns


def carried_shares(schedule: Any) -> Iterator[tuple[tuple[str, str], Fraction]]:
    """Yield each link that a transfer passes, with the share of its chunk. Without a route, it is the direct link."""
    routes = {(chunk, src, dst, r): through for chunk, src, dst, through, r in schedule.routes}
    for r, steps in enumerate(schedule.rounds):
        for chunk, dst, srcs in steps:
            for src in srcs:
                through = routes.get((chunk, src, dst, r), routes.get((chunk, src, dst, None), ()))
                nodes = (schedule.devices[src], *through, schedule.devices[dst])
                for pair in pairwise(nodes) if src != dst else ():
                    yield pair, schedule.chunks[chunk].share


# Wirings: (devices, links, switches), for making a topology.


class Wiring(NamedTuple):
    devices: tuple[str, ...]
    links: tuple[tuple[str, str, Any], ...]
    switches: tuple[tuple[str, bool], ...]


def both_ways(text: str) -> Wiring:
    """Return the wiring of a text such as "0-1 1/8, 1-s 5000": links, of which digits are devices, letters switches."""
    links: list[tuple[str, str, Fraction]] = []
    for link in text.split(", "):
        pair, width = link.split()
        a, b = (f"cpu:{end}" if end.isdigit() else end for end in pair.split("-"))
        links += [(a, b, Fraction(width)), (b, a, Fraction(width))]
    nodes = sorted({src for src, _, _ in links})
    switches = tuple((node, False) for node in nodes if ":" not in node)
    return Wiring(tuple(node for node in nodes if ":" in node), tuple(links), switches)


SYMMETRIC, DIRECTED, LOPSIDED, LOOSE = "symmetric", "directed", "lopsided", "loose"


@st.composite
def wirings(
    draw: st.DrawFn,
    kinds: Sequence[str] = (SYMMETRIC, DIRECTED),
    speeds: Sequence[Any] = WHOLE + ODD,
    most_devices: int = 5,
    most_switches: int = 2,
    reducing: Sequence[bool] = (False,),
) -> Wiring:
    """Draw a wiring of 2 devices or more, perhaps with switches.

    Args:
      kinds: "symmetric": connected, links equal in both directions. "directed": connected, links differ in the two
        directions, but the rates into and out of a switch are equal. "lopsided": these differ, too. "loose": any links.
      speeds: bandwidths to draw from. Several links between the same nodes add up.
      reducing: values to draw from, for each switch: whether it can reduce.
    """
    kind = draw(st.sampled_from(kinds))
    devices = tuple(f"cpu:{k}" for k in range(draw(st.integers(2, most_devices))))
    switches = tuple((f"s{k}", draw(st.sampled_from(reducing))) for k in range(draw(st.integers(0, most_switches))))
    names = [name for name, _ in switches]
    nodes = [*devices, *names]
    width: dict[tuple[str, str], Fraction] = {}
    speed = st.sampled_from(speeds)

    def add(*ways: tuple[str, str]) -> None:
        bandwidth = Fraction(draw(speed))
        for way in ways:
            width[way] = width.get(way, Fraction(0)) + bandwidth

    if kind != LOOSE:
        for k in range(1, len(nodes)):
            a, b = nodes[k], devices[draw(st.integers(0, min(k, len(devices)) - 1))]
            if kind == SYMMETRIC or (kind == DIRECTED and a in names):
                add((a, b), (b, a))
            else:
                add((a, b))
                add((b, a))
    candidates = nodes + ["none"] * (len(nodes) < 3)  # at least three, so that a, b and c exist
    for a, b, c in draw(st.lists(st.permutations(candidates).map(lambda order: order[:3]), max_size=8)):
        if "none" in (a, b):
            continue
        if kind == SYMMETRIC:
            add((a, b), (b, a))
        elif kind != DIRECTED or (a not in names and b not in names):
            add((a, b))
        elif b in names and c not in names and a not in names:
            add((a, b), (b, c))  # a link through switch b
    return Wiring(devices, tuple((src, dst, bandwidth) for (src, dst), bandwidth in width.items()), switches)
