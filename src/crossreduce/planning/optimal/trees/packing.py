"""Trees packed into integer capacities between devices.

A tree uses one unit of the capacity of each of its arcs. By Edmonds' theorem the trees exist if every device can
receive one unit of flow per tree from the roots. Each step preserves this condition.

Source: Edmonds, Edge-disjoint branchings, 1973; Bérczi & Frank, Packing arborescences, EGRES TR-2009-04 (equal trees
grow in batches).
"""

from __future__ import annotations

from ....progress import report
from ..bounds.cuts import Network
from ..bounds.steiner import Arc

Batch = tuple[int, int, list[Arc]]  # equal trees: the root, the number of trees, and the arcs from the root outwards


def pack_trees(
    capacities: dict[Arc, int], roots: dict[int, int], n: int, most: int | None = None
) -> list[Batch] | None:
    """Return batches of trees from every root to all nodes 0 to n - 1, or ``None`` if there are more than ``most``.

    ``roots`` is the number of trees of each root. If possible, all trees grow at once. Otherwise batches of equal trees
    grow one after another. An arc is used for as many trees of a batch as possible without taking capacity that other
    trees need. A minimum cut gives this number. If no arc has room for the whole batch, the batch is divided. Arcs near
    the root come first, so that trees have few levels.
    """
    simple = _all_at_once(capacities, roots, n)
    if simple is not None:
        return simple
    left = dict(capacities)
    waiting: list[Batch] = [(root, units, []) for root, units in reversed(roots.items()) if units]  # a stack
    done: list[Batch] = []
    packed, to_pack = 0, sum(units for _, units, _ in waiting) * (n - 1)  # numbers of edges of trees, for the progress
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
            report("packing trees", packed, to_pack)
        done.append((root, units, arcs))
    return done


def _all_at_once(capacities: dict[Arc, int], roots: dict[int, int], n: int) -> list[Batch] | None:
    """Return batches that grow together, level by level, over the widest arcs, or ``None`` if a tree gets stuck."""
    left = dict(capacities)
    into: list[list[int]] = [[] for _ in range(n)]
    for src, dst in left:
        into[dst].append(src)
    trees = [(root, units, list[Arc](), {root: 0}) for root, units in roots.items() if units]  # {node: level}
    for level in range(n):
        before = sum(len(depth) for *_, depth in trees)
        for root, units, arcs, depth in trees:
            for dst in ((root + hop) % n for hop in range(1, n)):
                if dst in depth:
                    continue
                parents = [src for src in into[dst] if depth.get(src, n) <= level and left[src, dst] >= units]
                if parents:
                    src = max(parents, key=lambda src: (left[src, dst], -((src - root) % n)))
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
    """The remaining capacities, and what the batches that grow later need of them."""

    def __init__(self, left: dict[Arc, int], waiting: list[Batch], n: int) -> None:
        self.left, self.n = left, n
        self.needs: list[tuple[int, frozenset[int]]] = []  # for each batch, the number of trees and their nodes so far
        for batch in waiting:
            self.reserve(batch)
        self.limits: list[tuple[frozenset[int], int]] = []  # (set of nodes, capacity into it that no tree needs)

    def reserve(self, batch: Batch) -> None:
        """Keep capacity for a batch of trees that grows later."""
        root, units, arcs = batch
        self.needs.append((units, frozenset({root, *(dst for _, dst in arcs)})))
        self.limits = []

    def use(self, arc: Arc, units: int) -> None:
        """Remove units from an arc, and from the limits of the sets that it enters."""
        self.left[arc] -= units
        if not self.left[arc]:
            del self.left[arc]
        self.limits = [(nodes, most - units * (arc[1] in nodes and arc[0] not in nodes)) for nodes, most in self.limits]

    def choose(self, depth: dict[int, int], units: int) -> tuple[Arc, int]:  # depth: the level of each reached node
        """Return the next arc of a batch of ``units`` trees, and the number of these trees that can use it."""
        arcs = [arc for arc in self.left if arc[0] in depth and arc[1] not in depth]
        arcs.sort(key=lambda arc: (depth[arc[0]], -self.left[arc], arc))
        best, most = arcs[0], 0
        for arc in arcs:
            if min(self.left[arc], units) <= most or self.slack_limit(arc) <= most:
                continue
            room = min(self.left[arc], units, self.slack(arc, units))
            if room > most:
                best, most = arc, room
            if most == units:
                break
        assert most > 0, "the remaining capacities always have room for another arc"
        return best, most

    def slack_limit(self, arc: Arc) -> int:
        """Return an upper limit of ``slack`` for an arc, known from the minimum cuts of earlier calls."""
        src, dst = arc
        return min([most for nodes, most in self.limits if dst in nodes and src not in nodes], default=1 << 62)

    def slack(self, arc: Arc, units: int) -> int:
        """Return the number of units that an arc can lose such that all other trees can still reach all nodes.

        If it is at least ``units``, or what is left of the arc, a smaller number of at least so many may be returned.
        """
        src, dst = arc
        capacities = dict(self.left)
        nodes, needed = self.n, 0
        # The flow from src to dst must suffice for all batches that still have to reach dst. So src feeds the nodes
        # that each of these batches has reached, directly or through an additional node.
        for units, reached in self.needs:
            if dst in reached:
                continue
            needed += units
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
        enough = self.left[arc]
        slack = network.flow_up_to(needed + enough, src, dst) - needed
        if slack < enough:
            self.limits.append((frozenset(range(self.n)) - network.cut(src, dst), slack))
        return slack
