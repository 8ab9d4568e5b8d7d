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
    """One or more equal trees out of (or into) a root."""

    root: int
    weight: int  # the number of equal trees
    parents: tuple[Parent, ...]  # the edges; parents come before their children


class TreeShare(NamedTuple):
    """A share of the buffer, and the trees over which it moves."""

    root: int
    weight: Fraction  # the size of the share, relative to the weights of the other shares
    into: Tree | None  # the tree that reduces the share to the root
    out: Tree | None  # the tree that copies the share from the root


def reversed_tree(tree: Tree) -> Tree:
    """Return the tree into a root that uses the routes of a tree out of this root backwards."""
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
    """Return the schedule of trees. Each step is in the first round in which the values that it reads are complete.

    ``devices`` is the number of devices of the schedule, which are the first of the ``nodes``. Branches without a
    source (in a tree that reduces) or without a destination (in a tree that copies) are left out. In a reduce-scatter
    or all-gather, a device owns the shares of which it is the root.
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
        ready = dict.fromkeys(chunk_sources, 0)  # by node: the first round that can read the sum of its subtree
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
            final = {share.root: ready[share.root]}  # by node: the first round that can read the final value
            for node, parent, through in share.out.parents:
                if node in needed:
                    rounds[final[parent]].append(Step(c, node, (parent,)))
                    final[node] = final[parent] + 1
                    routes.setdefault((c, parent, node), {})[final[parent]] = through
    steps, listed = tuple(tuple(rounds[r]) for r in sorted(rounds)), tuple(listed_routes(routes, nodes))
    return Schedule(collective, algorithm, tuple(nodes[:devices]), tuple(chunks), steps, routes=listed)


def listed_routes(routes: dict[tuple[int, int, int], dict[int, Through]], nodes: Sequence[str]) -> list[Route]:
    """Return the routes that pass other nodes. ``routes``: the nodes passed, by (chunk, src, dst) and by round.

    A transfer has one ``Route``, or one per round if its routes in several rounds differ.
    """
    listed = []
    names: dict[Through, tuple[str, ...]] = {}
    for (chunk, src, dst), by_round in routes.items():
        same = len(by_round) == 1 or len({*by_round.values()}) == 1
        for r, through in by_round.items():
            if through:
                if through not in names:
                    names[through] = tuple([nodes[k] for k in through])
                listed.append(Route(chunk, src, dst, names[through], None if same else r))
            if same:
                break
    return listed
