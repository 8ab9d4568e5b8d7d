"""Schedules made of trees: each share of the buffer has a tree into its root, a tree out of it, or both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from ....schedule import Chunk, Route, Schedule, Step
from ...requests import Request
from ..bounds.steiner import Parent, Through


class Tree(NamedTuple):
    """``weight`` equal trees out of a root."""

    root: int
    weight: int
    parents: tuple[Parent, ...]  # with parents before their children


class TreeShare(NamedTuple):
    """A share of the buffer, in proportion to ``weight``, the tree that reduces it and the tree that copies it."""

    root: int
    weight: Fraction
    into: Tree | None
    out: Tree | None


def reversed_tree(tree: Tree) -> Tree:
    """Return a tree out of a root as a tree into it: its routes list the nodes in the order from child to parent."""
    return tree._replace(parents=tuple((node, parent, through[::-1]) for node, parent, through in tree.parents))


def depth(tree: Tree) -> int:
    """Return the number of edges from the root to the furthest leaf."""
    found = {tree.root: 0}
    for node, parent, _ in tree.parents:
        found[node] = found[parent] + 1
    return max(found.values())


def trees_to_schedule(
    algorithm: str, request: Request, nodes: Sequence[str], devices: int, shares: list[TreeShare]
) -> Schedule:
    """Return the schedule of trees: each step is in the first round in which the values that it reads are complete.

    The first ``devices`` of the nodes are the devices of the schedule. Branches without a source (in a tree that
    reduces) or without a destination (in a tree that copies) are left out. In a reduce-scatter or all-gather, the part
    of a device consists of the shares whose root it is.
    """
    number = {node: k for k, node in enumerate(nodes)}
    sources, destinations = [number[s] for s in request.sources], [number[d] for d in request.destinations]
    whole = sum((share.weight for share in shares), Fraction(0))
    collective = request.collective
    if collective in ("all_gather", "reduce_scatter"):
        shares = sorted(shares, key=lambda share: share.root)
    rounds: defaultdict[int, list[Step]] = defaultdict(list)
    chunks: list[Chunk] = []
    routes: dict[tuple[int, int, int], dict[int, Through]] = {}  # by (chunk, src, dst), then by round
    for c, share in enumerate(shares):
        gives = [share.root] if collective == "all_gather" else sources
        takes = [share.root] if collective == "reduce_scatter" else destinations
        chunks.append(Chunk(share.weight / whole, tuple(gives), tuple(takes)))
        ready = dict.fromkeys(gives, 0)  # the first round at whose start a device has the sum of its subtree
        if share.into is not None:
            children: defaultdict[int, list[int]] = defaultdict(list)
            for node, parent, _ in share.into.parents:
                children[parent].append(node)
            for node in [*(node for node, _, _ in reversed(share.into.parents)), share.root]:  # leaves first
                below = [child for child in children[node] if child in ready]
                if below:
                    start = max(ready[child] for child in below)
                    own = [node] if node in ready else []
                    rounds[start].append(Step(c, node, tuple(sorted(below + own))))
                    ready[node] = start + 1
            for node, parent, through in share.into.parents:
                if node in ready:
                    routes.setdefault((c, node, parent), {})[ready[parent] - 1] = through
        if share.out is not None:
            needed = set(takes)
            for node, parent, _ in reversed(share.out.parents):
                if node in needed:
                    needed.add(parent)
            has = {share.root: ready[share.root]}
            for node, parent, through in share.out.parents:
                if node in needed:
                    rounds[has[parent]].append(Step(c, node, (parent,)))
                    has[node] = has[parent] + 1
                    routes.setdefault((c, parent, node), {})[has[parent]] = through
    steps, listed = tuple(tuple(rounds[r]) for r in sorted(rounds)), tuple(listed_routes(routes, nodes))
    return Schedule(collective, algorithm, tuple(nodes[:devices]), tuple(chunks), steps, routes=listed)


def listed_routes(routes: dict[tuple[int, int, int], dict[int, Through]], nodes: Sequence[str]) -> list[Route]:
    """Return the routes of transfers: one for all rounds if a transfer takes the same in all, else one per round."""
    listed = []
    for (chunk, src, dst), by_round in routes.items():
        same = len(by_round) == 1 or len(set(by_round.values())) == 1
        for r, through in list(by_round.items())[: 1 if same else None]:
            if through:
                listed.append(Route(chunk, src, dst, tuple(nodes[k] for k in through), None if same else r))
    return listed
