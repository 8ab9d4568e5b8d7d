"""Trees packed into integer capacities between devices.

A unit tree uses one unit of each of its arcs. By Edmonds' theorem the trees exist if every device can receive a flow of
one unit per unit tree from the roots; every step keeps that true.

Source: Edmonds, Edge-disjoint branchings, 1973; Bérczi & Frank, Packing arborescences, EGRES TR-2009-04 (growing trees
in batches of equal ones).
"""

from __future__ import annotations

from ....progress import report
from ..bounds.cuts import Network
from .switches import Arc

Batch = tuple[int, int, list[Arc]]  # equal trees: their root, their number, and their arcs, from the root outwards


def pack_trees(
    capacities: dict[Arc, int], roots: dict[int, int], n: int, most: int | None = None
) -> list[Batch] | None:
    """Return batches of trees from every root to all nodes 0 to n - 1; ``None``: more than ``most`` batches are needed.

    Unless all can grow at once, trees grow one after another, as batches of equal trees. An arc is used for as many
    trees of the batch as possible without taking capacity that the other trees need (a minimum cut gives that number);
    if no arc has room for the whole batch, the batch is divided. Arcs near the root come first, so trees stay low.
    """
    simple = _all_at_once(capacities, roots, n)
    if simple is not None:
        return simple
    left = dict(capacities)
    waiting: list[Batch] = [(root, units, []) for root, units in roots.items() if units]
    waiting.reverse()
    done: list[Batch] = []
    packed, wanted = 0, sum(units for _, units, _ in waiting) * (n - 1)  # arcs of trees
    while waiting:
        if most is not None and len(done) + len(waiting) > most:
            return None
        root, units, arcs = waiting.pop()
        depth = {root: 0}
        for src, dst in arcs:
            depth[dst] = depth[src] + 1
        remaining = _Remaining(left, waiting, n)
        while len(depth) < n:
            arc, room = remaining.choose(depth, units)
            if room < units:  # the other trees of the batch become a batch of their own
                waiting.append((root, units - room, list(arcs)))
                remaining.reserve(waiting[-1])
                units = room
            arcs.append(arc)
            depth[arc[1]] = depth[arc[0]] + 1
            remaining.use(arc, units)
            packed += units
            report("packing trees", packed, wanted)
        done.append((root, units, arcs))
    return done


def _all_at_once(capacities: dict[Arc, int], roots: dict[int, int], n: int) -> list[Batch] | None:
    """Grow all trees at once, level by level, over the widest arcs, without flows; ``None``: some cannot grow."""
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


class _Remaining:
    """The remaining capacities, and what the batches that are still to be grown need of them."""

    def __init__(self, left: dict[Arc, int], waiting: list[Batch], n: int) -> None:
        self.left, self.n = left, n
        self.needs: list[tuple[int, frozenset[int]]] = []
        for batch in waiting:
            self.reserve(batch)
        self.limits: list[tuple[frozenset[int], int]] = []  # sets of nodes, each with the unneeded capacity into it

    def reserve(self, batch: Batch) -> None:
        """Add a batch of trees to the list of batches that have yet to be grown."""
        root, units, arcs = batch
        self.needs.append((units, frozenset({root, *(dst for _, dst in arcs)})))
        self.limits = []

    def use(self, arc: Arc, units: int) -> None:
        """Remove units from an arc."""
        self.left[arc] -= units
        if not self.left[arc]:
            del self.left[arc]
        self.limits = [(nodes, most - units * (arc[1] in nodes and arc[0] not in nodes)) for nodes, most in self.limits]

    def choose(self, depth: dict[int, int], units: int) -> tuple[Arc, int]:
        """Return an arc out of a tree and the number of trees of the batch that may use it: all, if possible."""
        arcs = [arc for arc in self.left if arc[0] in depth and arc[1] not in depth]
        arcs.sort(key=lambda arc: (depth[arc[0]], -self.left[arc], arc))
        best, most = arcs[0], 0
        for arc in arcs:
            if min(self.left[arc], units, self.known_slack(arc)) <= most:
                continue
            free = min(self.left[arc], units, self.slack(arc))
            if free > most:
                best, most = arc, free
            if most == units:
                break
        assert most > 0, "the remaining capacities always have room for another arc"
        return best, most

    def known_slack(self, arc: Arc) -> int:
        """Return an upper limit of ``slack`` for an arc, from the minimum cuts of earlier calls."""
        return min((most for nodes, most in self.limits if arc[1] in nodes and arc[0] not in nodes), default=1 << 62)

    def slack(self, arc: Arc) -> int:
        """Return the number of units that an arc can lose without preventing another tree from reaching all nodes."""
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
