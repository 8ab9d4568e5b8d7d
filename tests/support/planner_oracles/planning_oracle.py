"""Reference results for planning, by slow methods: all cuts, a complete flow program, all trees.

Input: topologies and schedules, of which only plain numbers are read. Output: bounds, cuts, rates; and wirings that
hypothesis draws, for making topologies. Nothing here imports crossreduce.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import coo_array

# Bandwidths, in this order: integers, fractions with small denominators, decimals as in measurements, the binary
# fractions nearest to decimals, and numbers so different in size that a float cannot hold their sum exactly.
WHOLE = (1, 2, 3, 25)
ODD = (1, 2, Fraction(1, 3), Fraction(5, 2), Fraction(64, 3), 450)
DECIMAL = tuple(map(Fraction, ("0.125", "0.1", "0.3", "12.5", "46.7", "5000")))
BINARY = tuple(map(Fraction, (0.1, 0.3, 12.5, 46.7)))
WILD = (1, Fraction(1, 10**9), Fraction(1, 3), 2**31 - 1, 2**31, 10**10 + 19)


def subsets(nodes: Sequence[Any]) -> Iterator[frozenset[Any]]:
    """Yield every set of the nodes."""
    for bits in range(1 << len(nodes)):
        yield frozenset(node for k, node in enumerate(nodes) if bits >> k & 1)


def width(topology: Any, inside: frozenset[str], outward: bool = True) -> Fraction:
    """Return the bandwidth of the links that leave a set of nodes, or of those that enter it."""
    ends = ((link.src, link.dst) if outward else (link.dst, link.src) for link in topology.links)
    bandwidths = (link.bandwidth for link in topology.links)
    crossing = (b for (tail, head), b in zip(ends, bandwidths, strict=True) if tail in inside and head not in inside)
    return sum(crossing, Fraction(0))


def reachable(topology: Any, source: str) -> set[str]:
    """Return the devices and switches to which there is a route from a device, itself included."""
    reached, waiting = {source}, [source]
    while waiting:
        new = {link.dst for link in topology.out_links(waiting.pop())} - reached
        reached |= new
        waiting.extend(new)
    return reached


def cut_bound(
    topology: Any, weights: Mapping[str, Fraction], outward: bool, members: Iterable[str] | None = None
) -> Fraction:
    """Return the least w(all) B(S) / w(S) over all sets S of nodes that lack a member; 0 if no link crosses such a set.

    w(S) are the weights of the roots in S, B(S) is the bandwidth of the links out of S, or into it.
    """
    needed = set(topology.devices if members is None else members)
    whole = sum(weights.values(), Fraction(0))
    found = []
    for inside in subsets(topology.nodes):
        held = sum((weight for root, weight in weights.items() if root in inside), Fraction(0))
        if held and not needed <= inside:
            found.append(whole * width(topology, inside, outward) / held)
    return min(found)


class _Program:
    """A linear program, row by row; solved by HiGHS in floating point."""

    def __init__(self) -> None:
        self.columns = 0
        self.rows: dict[bool, list[dict[int, float]]] = {True: [], False: []}  # True: equalities, False: upper limits
        self.limits: dict[bool, list[float]] = {True: [], False: []}

    def new(self, count: int) -> list[int]:
        self.columns += count
        return list(range(self.columns - count, self.columns))

    def add(self, row: dict[int, float], limit: float = 0.0, *, equal: bool = False) -> None:
        self.rows[equal].append(row)
        self.limits[equal].append(limit)

    def most(self, columns: Sequence[int]) -> float:
        """Return the greatest sum that these columns (variables of the program) can have."""
        cost = np.zeros(self.columns)
        cost[list(columns)] = -1.0
        given: dict[str, Any] = {}
        for equal, (matrix, limit) in ((True, ("A_eq", "b_eq")), (False, ("A_ub", "b_ub"))):
            rows = self.rows[equal]
            if rows:
                entries = [(value, r, c) for r, row in enumerate(rows) for c, value in row.items()]
                values, where, which = zip(*entries, strict=True)
                given[matrix] = coo_array((values, (where, which)), shape=(len(rows), self.columns)).tocsr()
                given[limit] = self.limits[equal]
        solved = linprog(cost, **given, method="highs-ipm")
        assert solved.status == 0, solved.message
        return float(-solved.fun)


def _flows(
    program: _Program,
    topology: Any,
    sinks: Iterable[str],
    roots: Mapping[str, dict[int, float]],
    used: list[int],
    outward: bool,
    whole: dict[int, float],
) -> None:
    """Require for each sink a flow of ``whole`` within the rates ``used``; a root supplies at most its own bytes."""
    ends = [(link.src, link.dst) if outward else (link.dst, link.src) for link in topology.links]
    for sink in sinks:
        along, fed = program.new(len(ends)), dict(zip(roots, program.new(len(roots)), strict=True))
        for flow, most in zip(along, used, strict=True):
            program.add({flow: 1.0, most: -1.0})
        for root, column in fed.items():
            program.add({column: 1.0} | {c: -value for c, value in roots[root].items()})
        for node in topology.nodes:
            row = {flow: 1.0 for flow, (_, head) in zip(along, ends, strict=True) if head == node}
            row |= {flow: -1.0 for flow, (tail, _) in zip(along, ends, strict=True) if tail == node}
            row |= {fed[node]: 1.0} if node in fed else {}
            if node == sink:
                program.add({c: -v for c, v in row.items()} | dict(whole))
            else:
                program.add(row, equal=True)


def _balance(program: _Program, topology: Any, used: list[int]) -> None:
    """Require equal rates into and out of each switch that cannot reduce."""
    for switch in topology.switches:
        if not switch.reduces:
            row = {c: 1.0 for c, link in zip(used, topology.links, strict=True) if link.dst == switch.name}
            row |= {c: -1.0 for c, link in zip(used, topology.links, strict=True) if link.src == switch.name}
            if row:
                program.add(row, equal=True)


def _scale(topology: Any) -> Fraction:
    return max(link.bandwidth for link in topology.links)


def all_reduce_bound(topology: Any) -> float:
    """Return the rate of the best all-reduce by trees among all devices: the complete flow program, without cuts."""
    program = _Program()
    scale = _scale(topology)
    roots = program.new(len(topology.devices))
    down, up = program.new(len(topology.links)), program.new(len(topology.links))
    for d, u, link in zip(down, up, topology.links, strict=True):
        program.add({d: 1.0, u: 1.0}, float(link.bandwidth / scale))
    rooted = {device: {column: 1.0} for device, column in zip(topology.devices, roots, strict=True)}
    whole = dict.fromkeys(roots, 1.0)
    for used, outward in ((down, True), (up, False)):
        _balance(program, topology, used)
        _flows(program, topology, topology.devices, rooted, used, outward, whole)
    return program.most(roots) * float(scale)


def trees_bound(
    topology: Any, weights: Mapping[str, Fraction], outward: bool, members: Iterable[str] | None = None
) -> float:
    """Return the rate of the best trees out of (or into) weighted roots, with switches as in ``_balance``.

    It is ``cut_bound`` if each switch can send as much as it can receive, else it may be less.
    """
    program = _Program()
    scale, sum_ = _scale(topology), sum(weights.values(), Fraction(0))
    (rate,) = program.new(1)
    used = program.new(len(topology.links))
    for column, link in zip(used, topology.links, strict=True):
        program.add({column: 1.0}, float(link.bandwidth / scale))
    _balance(program, topology, used)
    rooted = {root: {rate: float(weight / sum_)} for root, weight in weights.items() if weight}
    sinks = topology.devices if members is None else members
    _flows(program, topology, sinks, rooted, used, outward, {rate: 1.0})
    return program.most([rate]) * float(scale)


def all_trees(
    topology: Any, roots: Iterable[str], outward: bool, members: Iterable[str]
) -> dict[tuple[str, tuple[int, ...]], None]:
    """Return all trees out of (or into) roots that reach all members: the root, and how often each link is used."""
    pairs = [(link.src, link.dst) if outward else (link.dst, link.src) for link in topology.links]
    where = {pair: k for k, pair in enumerate(pairs)}
    able = [*topology.devices, *(switch.name for switch in topology.switches if switch.reduces)]
    edges: dict[str, list[tuple[str, tuple[int, ...]]]] = {node: [] for node in able}  # by head: (tail, links)

    def extend(tail: str, nodes: tuple[str, ...], links: tuple[int, ...]) -> None:
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
            if prod(map(len, choices)) > 20_000:
                raise TooManyTreesError
            for parents in product(*choices):
                up = {node: tail for node, (tail, _) in zip(others, parents, strict=True)}
                reached = {root}
                for _ in others:
                    reached |= {node for node, tail in up.items() if tail in reached}
                if len(reached) == len(nodes):
                    used = Counter(k for _, links in parents for k in links)
                    columns[root, tuple(used[k] for k in range(len(pairs)))] = None
    return columns


class TooManyTreesError(Exception):
    """The trees of a topology are too many to be listed."""


def least_cut(n: int, capacities: Mapping[tuple[int, int], int], src: int, dst: int) -> tuple[int, frozenset[int]]:
    """Return the least capacity out of any set with ``src`` and without ``dst``, and the smallest such set."""
    found = []
    for inside in subsets(range(n)):
        if src in inside and dst not in inside:
            out = sum(c for (a, b), c in capacities.items() if a in inside and b not in inside)
            found.append((out, len(inside), inside))
    best = min(found, key=lambda cut: cut[:2])
    return best[0], best[2]


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the body takes more processor time, so that a faulty loop does not run for very long."""

    def late(*_: Any) -> None:
        raise _LateError

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except _LateError:  # not chained: pytest cannot show its traceback, as signals interrupt anywhere
        error = TimeoutError(f"not done in {seconds} s")
    else:
        return
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    raise error from None


class _LateError(Exception):
    pass


def carried_shares(schedule: Any) -> Iterator[tuple[tuple[str, str], Fraction]]:
    """Yield each link that a transfer passes, with the share of its chunk; by default the link between its devices."""
    routes = {(chunk, src, dst, r): through for chunk, src, dst, through, r in schedule.routes}
    for r, steps in enumerate(schedule.rounds):
        for chunk, dst, srcs in steps:
            for src in srcs:
                through = routes.get((chunk, src, dst, r), routes.get((chunk, src, dst, None), ()))
                nodes = (schedule.devices[src], *through, schedule.devices[dst])
                for pair in pairwise(nodes) if src != dst else ():
                    yield pair, schedule.chunks[chunk].share


def rate(schedule: Any, topology: Any) -> Fraction:
    """Return the rate that the busiest link allows, in GB/s; transfers without a route use the link between their
    devices."""
    width = {(link.src, link.dst): link.bandwidth for link in topology.links}
    load = dict.fromkeys(width, Fraction(0))
    for pair, share in carried_shares(schedule):
        load[pair] += share
    return min(width[pair] / share for pair, share in load.items() if share)


# Wirings: (devices, links, switches), for making a topology.


class Wiring(NamedTuple):
    devices: tuple[str, ...]
    links: tuple[tuple[str, str, Any], ...]
    switches: tuple[tuple[str, bool], ...]


def both_ways(text: str) -> Wiring:
    """Return a wiring by its links, such as "0-1 1/8, 1-s 5000": digits are devices, letters are plain switches."""
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
      speeds: the bandwidths; several on one link add up.
      reducing: whether a switch may reduce.
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
            a, b = (
                nodes[k],
                nodes[draw(st.integers(0, min(k, len(devices)) - 1))],
            )  # every switch is joined to a device
            if kind == SYMMETRIC or (kind == DIRECTED and a in names):
                add((a, b), (b, a))
            else:
                add((a, b))
                add((b, a))
    for a, b, c in draw(st.lists(st.permutations(nodes + ["s9"] * (len(nodes) < 3)).map(lambda o: o[:3]), max_size=8)):
        if "s9" in (a, b):
            continue
        if kind == SYMMETRIC:
            add((a, b), (b, a))
        elif kind != DIRECTED or (a not in names and b not in names):
            add((a, b))
        elif b in names and c not in names and a not in names:
            add((a, b), (b, c))  # a link through switch b
    return Wiring(devices, tuple((src, dst, bandwidth) for (src, dst), bandwidth in width.items()), switches)
