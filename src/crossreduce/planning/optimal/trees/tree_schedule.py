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
    """Equal trees with the same root; ``weight`` is their number."""

    root: int
    weight: int
    parents: tuple[Parent, ...]  # the edges; parents come before their children


class TreeShare(NamedTuple):
    """A share of the buffer, and the trees over which it moves."""

    root: int
    weight: Fraction  # the share is in proportion to it
    into: Tree | None  # reduces the share
    out: Tree | None  # copies the share


def reversed_tree(tree: Tree) -> Tree:
    """Return a tree out of a root as a tree into it: each route lists the nodes in the order from child to parent."""
    return tree._replace(parents=tuple((node, parent, through[::-1]) for node, parent, through in tree.parents))


def depth(tree: Tree) -> int:
    """Return the number of edges from the root to the furthest leaf."""
    depths = {tree.root: 0}
    for node, parent, _ in tree.parents:
        depths[node] = depths[parent] + 1
    return max(depths.values())


def trees_to_schedule(
    algorithm: str, request: Request, nodes: Sequence[str], devices: int, shares: list[TreeShare]
) -> Schedule:
    """Return the schedule of trees: each step is in the first round in which the values that it reads are complete.

    The first ``devices`` of the nodes are the devices of the schedule. Branches without a source (in a tree that
    reduces) or without a destination (in a tree that copies) are left out. In a reduce-scatter or all-gather, the part
    of a device consists of the shares of which it is the root.
    """
    number = {node: k for k, node in enumerate(nodes)}
    sources, destinations = [number[s] for s in request.sources], [number[d] for d in request.destinations]
    total = sum((share.weight for share in shares), Fraction(0))
    collective = request.collective
    if collective in ("all_gather", "reduce_scatter"):
        shares = sorted(shares, key=lambda share: share.root)
    rounds: defaultdict[int, list[Step]] = defaultdict(list)
    chunks: list[Chunk] = []
    routes: dict[tuple[int, int, int], dict[int, Through]] = {}  # by (chunk, src, dst), then by round
    for c, share in enumerate(shares):
        chunk_sources = [share.root] if collective == "all_gather" else sources
        chunk_destinations = [share.root] if collective == "reduce_scatter" else destinations
        chunks.append(Chunk(share.weight / total, tuple(chunk_sources), tuple(chunk_destinations)))
        ready = dict.fromkeys(chunk_sources, 0)  # by device: the first round that can read the sum of the subtree
        if share.into is not None:
            children: defaultdict[int, list[int]] = defaultdict(list)
            for node, parent, _ in share.into.parents:
                children[parent].append(node)
            for node in [*(node for node, _, _ in reversed(share.into.parents)), share.root]:  # leaves first
                operands = [child for child in children[node] if child in ready]
                if operands:
                    start = max(ready[child] for child in operands)
                    operands += [node] if node in ready else []  # the device's own contribution
                    rounds[start].append(Step(c, node, tuple(sorted(operands))))
                    ready[node] = start + 1
            for node, parent, through in share.into.parents:
                if node in ready:
                    routes.setdefault((c, node, parent), {})[ready[parent] - 1] = through
        if share.out is not None:
            needed = set(chunk_destinations)
            for node, parent, _ in reversed(share.out.parents):
                if node in needed:
                    needed.add(parent)
            final = {share.root: ready[share.root]}  # by device: the first round that can read the final value
            for node, parent, through in share.out.parents:
                if node in needed:
                    rounds[final[parent]].append(Step(c, node, (parent,)))
                    final[node] = final[parent] + 1
                    routes.setdefault((c, parent, node), {})[final[parent]] = through
    steps, listed = tuple(tuple(rounds[r]) for r in sorted(rounds)), tuple(listed_routes(routes, nodes))
    return Schedule(collective, algorithm, tuple(nodes[:devices]), tuple(chunks), steps, routes=listed)


def listed_routes(routes: dict[tuple[int, int, int], dict[int, Through]], nodes: Sequence[str]) -> list[Route]:
    """Return a route for each transfer (chunk, src, dst), or one per round if its routes in several rounds differ."""
    listed = []
    for (chunk, src, dst), by_round in routes.items():
        same = len(set(by_round.values())) == 1
        for r, through in list(by_round.items())[: 1 if same else None]:
            if through:
                listed.append(Route(chunk, src, dst, tuple(nodes[k] for k in through), None if same else r))
    return listed
