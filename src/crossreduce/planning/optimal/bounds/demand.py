"""``Demand``: what the trees of a collective must connect; and ``MixedTree``: one of the trees that do so.

Nodes are numbers. An all-reduce has one demand. Another collective has one demand per root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Final, NamedTuple

from .steiner import Parent

_MOST_UNEVEN: Final = 1_000_000  # the largest bandwidth or weight divided by the smallest one


class Demand(NamedTuple):
    """A demand for trees that reduce from all sources to a root, copy from it to all destinations, or do both."""

    weight: Fraction  # the rates of all demands on the same links are in proportion to their weights, unless fixed
    roots: tuple[int, ...]  # any of these nodes may be the root of a tree
    sources: tuple[int, ...]  # (): trees only copy
    destinations: tuple[int, ...]  # (): trees only reduce


class MixedTree(NamedTuple):
    """A tree, and the rate at which it carries data. In ``into`` and ``out``, parents come before their children."""

    root: int
    weight: Fraction  # the rate in GB/s
    into: tuple[Parent, ...] | None  # edges to reduce over; a route lists the nodes from the child to the parent
    out: tuple[Parent, ...] | None  # edges to copy over; a route lists the nodes from the parent to the child


def too_uneven(sizes: Iterable[Fraction]) -> bool:
    """Return whether bandwidths or weights differ too much for a linear program in floating point."""
    numbers = list(sizes)
    return bool(numbers) and max(numbers) > _MOST_UNEVEN * min(numbers)


def demands_of(
    collective: str, members: tuple[int, ...], roots: Mapping[int, Fraction] | None, branch_nodes: tuple[int, ...]
) -> list[Demand]:
    """Return the demands of a collective; the sum of their weights is 1.

    ``roots`` is the amount of data that starts or ends at each root. It is ``None`` for an all-reduce: its trees may
    have any of the ``branch_nodes``, the nodes at which trees may branch, as their root.
    """
    if roots is None:
        return [Demand(Fraction(1), branch_nodes, members, members)]
    ends = ((), members) if collective in ("broadcast", "all_gather") else (members, ())
    total = sum(roots.values(), Fraction(0))
    return [Demand(weight / total, (root,), *ends) for root, weight in roots.items()]
