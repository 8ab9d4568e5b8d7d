"""Trees written down as a schedule.

In: shares of the buffer, each with a tree in to its root and a tree out of it.  Out: a ``Schedule``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from ..schedule import Chunk, Route, Schedule, Step

Through = tuple[int, ...]


class Tree(NamedTuple):
    """``weight`` equal trees out of a root.

    ``parents`` has (node, its parent, the nodes that data passes between them), those near the root first.
    """

    root: int
    weight: int
    parents: tuple[tuple[int, int, Through], ...]


class Share(NamedTuple):
    """A share of the buffer, in proportion to ``weight``, the tree that reduces it and the one that copies it out."""

    root: int
    weight: Fraction
    up: Tree | None
    down: Tree | None


def turned(tree: Tree) -> Tree:
    """Return a tree out of a root as one into it: the nodes between a child and its parent as the child passes them."""
    return tree._replace(parents=tuple((node, parent, through[::-1]) for node, parent, through in tree.parents))


def depth(tree: Tree) -> int:
    """Return how many links there are from the root to the furthest leaf, switches aside."""
    found = {tree.root: 0}
    for node, parent, _ in tree.parents:
        found[node] = found[parent] + 1
    return max(found.values())


def treewise(
    algorithm: str,
    collective: str,
    places: Sequence[str],
    members: int,
    sources: Sequence[str],
    destinations: Sequence[str],
    shares: list[Share],
) -> Schedule:
    """Write trees down as rounds: a device combines as soon as all its children have, and copies on at once.

    Args:
      places: the names of the trees' nodes; the first ``members`` are the schedule's devices.
      sources: who contributes; what no source is below in a tree is left out.
      destinations: who needs the result; likewise.
      shares: of a reduce-scatter or all-gather, the root's part is the one at its place.
    """
    number = {place: k for k, place in enumerate(places)}
    givers, takers = [number[s] for s in sources], [number[d] for d in destinations]
    whole = sum((share.weight for share in shares), Fraction(0))
    if collective in ("all_gather", "reduce_scatter"):
        shares = sorted(shares, key=lambda share: share.root)
    rounds: defaultdict[int, list[Step]] = defaultdict(list)
    chunks: list[Chunk] = []
    routes: dict[tuple[int, int, int], dict[int, Through]] = {}  # by chunk, src, dst; then by round
    for c, share in enumerate(shares):
        here = [share.root]
        gives = here if collective == "all_gather" else givers
        takes = here if collective == "reduce_scatter" else takers
        chunks.append(Chunk(share.weight / whole, tuple(gives), tuple(takes)))
        ready = dict.fromkeys(gives, 0)  # from which round on a device has what is below it
        if share.up is not None:
            children: defaultdict[int, list[int]] = defaultdict(list)
            for node, parent, _ in share.up.parents:
                children[parent].append(node)
            for node in [*(node for node, _, _ in reversed(share.up.parents)), share.root]:  # leaves first
                below = [child for child in children[node] if child in ready]
                if below:
                    start = max(ready[child] for child in below)
                    own = [node] if node in ready else []
                    rounds[start].append(Step(c, node, tuple(sorted(below + own))))
                    ready[node] = start + 1
            for node, parent, through in share.up.parents:
                if node in ready:
                    routes.setdefault((c, node, parent), {})[ready[parent] - 1] = through
        if share.down is not None:
            wanted = set(takes)
            for node, parent, _ in reversed(share.down.parents):
                if node in wanted:
                    wanted.add(parent)
            has = {share.root: ready[share.root]}
            for node, parent, through in share.down.parents:
                if node in wanted:
                    rounds[has[parent]].append(Step(c, node, (parent,)))
                    has[node] = has[parent] + 1
                    routes.setdefault((c, parent, node), {})[has[parent]] = through
    listed = []
    for where, ways in routes.items():
        alike = len(set(ways.values())) == 1
        for r, way in list(ways.items())[: 1 if alike else None]:
            if way:
                listed.append(Route(*where, tuple(places[k] for k in way), None if alike else r))
    return Schedule(
        collective,
        algorithm,
        tuple(places[:members]),
        tuple(chunks),
        tuple(tuple(rounds[r]) for r in sorted(rounds)),
        routes=tuple(listed),
    )
