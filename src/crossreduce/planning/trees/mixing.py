"""Trees of several kinds that share the links: those of one kind branch at some helpers, those of another do not.

Helpers are nodes that can copy and combine but take no part: switches that multicast, or other devices. A tree must
reach each helper at which it may branch. If a helper has little bandwidth, it is best that only some trees branch
there; a linear program decides how many. The number of kinds is 2**helpers.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import combinations
from typing import Final, NamedTuple

from ...topology import Link, Switch, Topology
from ..bounds.linear_program import mixture
from ..topologies import neutral
from .fitting import fit_trees
from .schedule import Tree

MOST_HELPERS: Final = 3


class MixedTrees(NamedTuple):
    """Trees out of roots, on the nodes of ``neutral(topology, members, helpers)``."""

    helpers: tuple[str, ...]  # at which some of the trees branch
    trees: list[tuple[Tree, Fraction]]  # each tree, and its share of the data in any unit
    k: Fraction  # the average number of unit trees per root


def mixed_trees(
    topology: Topology, members: tuple[str, ...], helpers: tuple[str, ...], weights: Mapping[int, Fraction]
) -> MixedTrees | None:
    """Return the best broadcasts with at most ``MOST_HELPERS`` helpers; ``None``: no exact solution was found.

    ``weights`` has the weight of each root, by its position in ``members``.
    """
    seen = neutral(topology, members, helpers)
    first = len(members)
    beyond = [
        frozenset(first + k for k in left)
        for n in range(len(helpers) + 1)
        for left in combinations(range(len(helpers)), n)
    ]
    found = mixture(seen.topology, tuple(weights.items()), beyond)
    used = [(rate, links, left) for (rate, links), left in zip(found, beyond, strict=False) if rate]
    if not used:
        return None
    chosen = tuple(name for k, name in enumerate(helpers) if any(first + k not in left for _, _, left in used))
    number = {name: k for k, name in enumerate(_nodes(topology, members, chosen))}
    trees: list[tuple[Tree, Fraction]] = []
    total = Fraction(0)
    for rate, links, left in used:
        # On a topology in which only the helpers of this kind are devices; its links are those that this kind uses.
        devices = tuple(node for k, node in enumerate(seen.topology.devices) if k not in left)
        switches = tuple(Switch(node) for node in seen.topology.nodes if node not in devices)
        wiring = Topology.unchecked(devices, [Link(*pair, width) for pair, width in links.items() if width], switches)
        of_kind, k = fit_trees(wiring, {pair: width for pair, width in links.items() if width}, weights)
        place = [number[seen.names[node]] for node in wiring.nodes]
        whole = sum(tree.weight for tree in of_kind)
        trees += [(_moved(tree, place), rate * tree.weight / whole) for tree in of_kind]
        total += k
    return MixedTrees(chosen, trees, total)


def _nodes(topology: Topology, members: tuple[str, ...], helpers: tuple[str, ...]) -> list[str]:
    seen = neutral(topology, members, helpers)
    return [seen.names[node] for node in seen.topology.nodes]


def _moved(tree: Tree, place: list[int]) -> Tree:
    """Return a tree whose nodes have other numbers."""
    parents = ((place[node], place[parent], tuple(place[k] for k in via)) for node, parent, via in tree.parents)
    return Tree(place[tree.root], tree.weight, tuple(parents))
