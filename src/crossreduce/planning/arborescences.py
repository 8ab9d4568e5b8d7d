"""Spanning trees that share the links: switches are split away, then trees are packed.

In: whole-number capacities between nodes, and how many unit trees start at each root.  Out: trees with weights,
that together use no arc beyond its capacity. Edmonds' theorem says that they exist when every device can be
reached by all of them at once, which is kept true throughout.

Source: Edmonds, Edge-disjoint branchings, 1973; Bérczi & Frank, Packing arborescences, EGRES TR-2009-04 (growing
trees in batches of equal ones); Bang-Jensen, Frank & Jackson, SIAM J. Discrete Math. 8(2), 1995 (splitting a node
away without loss); Zhao et al., ForestColl, arXiv:2402.06787 (both together, for collectives).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .flows import Network
from .treewise import Through

Arc = tuple[int, int]


class Ways(dict[Arc, dict[Through, int]]):
    """Capacities between nodes, by the switches on the way: ``ways[u, t][through]``."""

    def add(self, arc: Arc, through: Through, amount: int) -> None:
        if amount:
            here = self.setdefault(arc, {})
            here[through] = here.get(through, 0) + amount

    def take(self, arc: Arc, amount: int) -> list[tuple[Through, int]]:
        """Take capacity off an arc, and return which ways it was; what is taken must be there."""
        taken, here = [], self[arc]
        for through in list(here):
            part = min(amount, here[through])
            if part:
                taken.append((through, part))
                here[through] -= part
                amount -= part
                if not here[through]:
                    del here[through]
        if not here:
            del self[arc]
        assert not amount
        return taken

    def capacity(self, arc: Arc) -> int:
        return sum(self.get(arc, {}).values())

    def capacities(self) -> dict[Arc, int]:
        return {arc: sum(here.values()) for arc, here in self.items()}


def reaches(capacities: dict[Arc, int], roots: dict[int, int], sinks: Sequence[int], n: int) -> bool:
    """Return whether every sink can be reached by all roots' units at once."""
    whole = sum(roots.values())
    network = Network(n + 1, capacities | {(n, root): units for root, units in roots.items()})
    return all(network.flow(n, sink) >= whole for sink in sinks)


def without_switches(
    ways: Ways, switches: Iterable[int], roots: dict[int, int], devices: Sequence[int], groups: Sequence[int], n: int
) -> Ways:
    """Replace every switch by arcs past it, so that all devices stay reachable.

    First an even share for every two neighbours of a switch is tried (for those of different groups, where it joins
    several); where that would lose something, pairs are split off one at a time, each as far as it loses nothing.

    Args:
      ways: capacities; at each switch as much enters as leaves.
      groups: for each device its group of near ones, by number.
    Returns:
      Capacities between devices, with the switches on the way.
    """
    for switch in switches:
        entering = {u: ways.capacity((u, switch)) for (u, w) in list(ways) if w == switch}
        leaving = {t: ways.capacity((switch, t)) for (w, t) in list(ways) if w == switch}
        spans = len({groups[u] for u in {*entering, *leaving} if u < len(groups)}) > 1

        def apart(u: int, t: int) -> bool:
            return u != t and (u >= len(groups) or t >= len(groups) or groups[u] != groups[t])

        def other(u: int, t: int) -> bool:
            return u != t

        for allowed in (apart, other) if spans else (other,):
            tried = Ways({arc: dict(here) for arc, here in ways.items()})
            for (u, t), amount in _fair(entering, leaving, allowed).items():
                _split(tried, u, switch, t, amount)
            rest = [arc for arc in tried if switch in arc]
            for arc in rest:
                del tried[arc]
            # What is left over is lost; at another switch that would upset what enters against what leaves.
            upset = any(node != switch and node >= len(groups) for arc in rest for node in arc)
            if not upset and reaches(tried.capacities(), roots, devices, n):
                ways = tried
                break
        else:
            ways = _split_off(ways, switch, entering, leaving, roots, devices, n)
    return ways


def _fair(entering: dict[int, int], leaving: dict[int, int], allowed: Callable[[int, int], bool]) -> dict[Arc, int]:
    """Share out what enters a switch evenly among what leaves it, in whole numbers."""
    ends = sorted({*entering, *leaving})
    left_in, left_out = dict(entering), dict(leaving)
    shares: dict[Arc, int] = {}

    def give(u: int, t: int, amount: int) -> None:
        amount = min(amount, left_in[u], left_out[t])
        if amount > 0:
            shares[u, t] = shares.get((u, t), 0) + amount
            left_in[u] -= amount
            left_out[t] -= amount

    for u, width in entering.items():
        others = [t for t in leaving if allowed(u, t)]
        whole = sum(leaving[t] for t in others)
        for t in others:
            give(u, t, width * leaving[t] // whole)
    before = -1
    while before != sum(left_in.values()):
        before = sum(left_in.values())
        for offset in range(1, len(ends)):
            for k, u in enumerate(ends):
                t = ends[(k + offset) % len(ends)]
                if left_in.get(u) and left_out.get(t) and allowed(u, t):
                    give(u, t, max(1, min(left_in[u], left_out[t]) // len(ends)))
    return shares


def _split(ways: Ways, u: int, switch: int, t: int, amount: int) -> None:
    """Lead ``amount`` from u to t past a switch."""
    if not amount:
        return
    first, second = ways.take((u, switch), amount), ways.take((switch, t), amount)
    while first and second:
        (before, have), (after, want) = first[-1], second[-1]
        part = min(have, want)
        if u != t:
            ways.add((u, t), (*before, switch, *after), part)
        first[-1], second[-1] = (before, have - part), (after, want - part)
        if not first[-1][1]:
            first.pop()
        if not second[-1][1]:
            second.pop()


def _split_off(
    ways: Ways,
    switch: int,
    entering: dict[int, int],
    leaving: dict[int, int],
    roots: dict[int, int],
    devices: Sequence[int],
    n: int,
) -> Ways:
    """Split pairs off one at a time, each as far as all devices stay reachable."""
    ends = sorted({*entering, *leaving})
    whole = sum(roots.values())
    for offset in (*range(1, len(ends)), 0):
        for k, u in enumerate(ends):
            t = ends[(k + offset) % len(ends)]
            amount = min(ways.capacity((u, switch)), ways.capacity((switch, t)))
            if not amount:
                continue
            capacities = ways.capacities()
            sources = {(n, root): units for root, units in roots.items()}
            for sink in devices:
                while amount:
                    tried = capacities | sources
                    tried[u, switch] -= amount
                    tried[switch, t] -= amount
                    if u != t:
                        tried[u, t] = tried.get((u, t), 0) + amount
                    lacking = whole - Network(n + 1, tried).flow(n, sink)
                    if lacking <= 0:
                        break
                    amount = max(0, amount - lacking)  # each unit takes at most one off any cut
            _split(ways, u, switch, t, amount)
    for arc in [arc for arc in ways if switch in arc]:
        del ways[arc]
    return ways


def pack(
    capacities: dict[Arc, int], roots: dict[int, int], n: int, most: int | None = None
) -> list[tuple[int, int, list[Arc]]] | None:
    """Pack trees out of all roots into the capacities; each reaches all of the nodes 0 to n - 1.

    Trees grow one after another, as batches of equal ones. An arc is taken for as many of the batch as leaves enough
    for all the others (a minimum cut tells); where no arc can carry the whole batch, it is parted. Arcs near the
    root come first, so that trees stay low.

    Args:
      most: how many batches are of use; ``None``: any number.
    Returns:
      (root, weight, arcs from the root on) of each batch; ``None``: there would be more than ``most``.
    """
    easy = _greedy(capacities, roots, n)
    if easy is not None:
        return easy
    left = dict(capacities)
    waiting: list[tuple[int, int, list[Arc]]] = [(root, units, []) for root, units in roots.items() if units]
    waiting.reverse()
    done: list[tuple[int, int, list[Arc]]] = []
    while waiting:
        if most is not None and len(done) + len(waiting) > most:
            return None
        root, units, arcs = waiting.pop()
        depth = {root: 0}
        for src, dst in arcs:
            depth[dst] = depth[src] + 1
        rest = _Rest(left, waiting, n)
        while len(depth) < n:
            arc, room = rest.choose(depth, units)
            if room < units:  # the others of the batch go on from here on their own
                waiting.append((root, units - room, list(arcs)))
                rest.also(waiting[-1])
                units = room
            arcs.append(arc)
            depth[arc[1]] = depth[arc[0]] + 1
            rest.use(arc, units)
        done.append((root, units, arcs))
    return done


def _greedy(capacities: dict[Arc, int], roots: dict[int, int], n: int) -> list[tuple[int, int, list[Arc]]] | None:
    """Grow all trees together, level by level, over the widest arcs that are left; ``None`` where that gets stuck.

    No flow is needed, since trees that reach everything within the capacities are what is wanted.
    """
    left = dict(capacities)
    into: list[list[int]] = [[] for _ in range(n)]
    for src, dst in left:
        into[dst].append(src)
    trees: list[tuple[int, int, list[Arc], dict[int, int]]] = [
        (root, units, [], {root: 0}) for root, units in roots.items() if units
    ]
    for level in range(n):
        before = sum(len(depth) for *_, depth in trees)
        for root, units, arcs, depth in trees:
            for dst in ((root + hop) % n for hop in range(1, n)):
                if dst in depth:
                    continue
                near = [src for src in into[dst] if depth.get(src, n) <= level and left[src, dst] >= units]
                if near:
                    src = max(near, key=lambda src: (left[src, dst], -((src - root) % n)))
                    left[src, dst] -= units
                    arcs.append((src, dst))
                    depth[dst] = level + 1
        after = sum(len(depth) for *_, depth in trees)
        if after == n * len(trees):
            return [(root, units, arcs) for root, units, arcs, _ in trees]
        if after == before:
            return None
    return None


class _Rest:
    """What is left of the capacities, and what the trees that are still to be grown need of it."""

    def __init__(self, left: dict[Arc, int], waiting: list[tuple[int, int, list[Arc]]], n: int) -> None:
        self.left, self.n = left, n
        self.needs: list[tuple[int, frozenset[int]]] = []
        for batch in waiting:
            self.also(batch)
        self.limits: list[tuple[frozenset[int], int]] = []  # sets of nodes, and how much may still enter each at most

    def also(self, batch: tuple[int, int, list[Arc]]) -> None:
        """Count a batch among those that are still to be grown."""
        root, units, arcs = batch
        self.needs.append((units, frozenset({root, *(dst for _, dst in arcs)})))
        self.limits = []

    def use(self, arc: Arc, units: int) -> None:
        """Take units off an arc."""
        self.left[arc] -= units
        if not self.left[arc]:
            del self.left[arc]
        self.limits = [(nodes, most - units * (arc[1] in nodes and arc[0] not in nodes)) for nodes, most in self.limits]

    def choose(self, depth: dict[int, int], units: int) -> tuple[Arc, int]:
        """Return an arc out of a tree and how many of the batch may take it: all, if any arc allows that."""
        arcs = [arc for arc in self.left if arc[0] in depth and arc[1] not in depth]
        arcs.sort(key=lambda arc: (depth[arc[0]], -self.left[arc], arc))
        best, most = arcs[0], 0
        for arc in arcs:
            if min(self.left[arc], units, self.limit(arc)) <= most:
                continue
            free = min(self.left[arc], units, self.slack(arc))
            if free > most:
                best, most = arc, free
            if most == units:
                break
        assert most > 0, "what is left always has room for another arc"
        return best, most

    def limit(self, arc: Arc) -> int:
        """Return what is known already of the slack of an arc, at most."""
        return min((most for nodes, most in self.limits if arc[1] in nodes and arc[0] not in nodes), default=1 << 62)

    def slack(self, arc: Arc) -> int:
        """Return how many units an arc can give away so that every other tree still reaches all nodes."""
        src, dst = arc
        capacities = dict(self.left)
        nodes, whole = self.n, 0
        for units, reached in self.needs:
            if dst in reached:
                continue
            whole += units
            if reached == {src}:
                continue
            if len(reached) == 1:
                (root,) = reached
                capacities[src, root] = capacities.get((src, root), 0) + units
            else:
                capacities[src, nodes] = units
                capacities.update(((nodes, node), units) for node in reached)
                nodes += 1
        network = Network(nodes, capacities)
        free = network.flow(src, dst) - whole
        if free < self.left[arc]:
            near = network.cut(src, dst)
            self.limits.append((frozenset(range(self.n)) - near, free))
        return free
