"""Demands for trees, and the trees that meet them.

Nodes are numbers. All demands share the links. A collective has one demand, or one per root if its roots are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Final, NamedTuple

from .steiner import Parent

_MOST_UNEVEN: Final = 1_000_000  # of bandwidths or weights: the largest divided by the smallest

Arc = tuple[int, int]


class Demand(NamedTuple):
    """Trees that reduce from all sources to a root, copy from the root to all destinations, or both."""

    weight: Fraction  # rates of demands are in proportion to their weights, unless they are fixed
    roots: tuple[int, ...]  # any of these nodes may be the root of a tree
    sources: tuple[int, ...]  # (): trees only copy
    destinations: tuple[int, ...]  # (): trees only reduce


class MixedTree(NamedTuple):
    """A tree of a mixture; parents come before their children."""

    root: int
    weight: Fraction  # in GB/s
    into: tuple[Parent, ...] | None  # how it reduces; a route has the nodes passed before the parent
    out: tuple[Parent, ...] | None  # how it copies; a route has the nodes passed after the parent


def too_uneven(sizes: Iterable[Fraction]) -> bool:
    """Return whether bandwidths or weights are too different for a linear program in floating point."""
    numbers = list(sizes)
    return bool(numbers) and max(numbers) > _MOST_UNEVEN * min(numbers)


def demands_of(
    collective: str, members: tuple[int, ...], roots: Mapping[int, Fraction] | None, joints: tuple[int, ...]
) -> list[Demand]:
    """Return the demands of a collective; the sum of their weights is 1.

    ``roots`` contains the data from (or to) each root. It is ``None`` for an all-reduce, whose trees may have any joint
    as their root. ``joints`` are the nodes at which trees may branch.
    """
    if roots is None:
        return [Demand(Fraction(1), joints, members, members)]
    ends = ((), members) if collective in ("broadcast", "all_gather") else (members, ())
    total = sum(roots.values(), Fraction(0))
    return [Demand(weight / total, (root,), *ends) for root, weight in roots.items()]
