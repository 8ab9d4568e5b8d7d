"""Shares that cross in stages, with the sizes that take the least time.

Input: the styles of shares, and the groups in which they cross. Output: their edges, rounds and sizes. The time is a
convex function of the sizes, so cutting planes find them: the critical path at some sizes bounds the time at all other
sizes from below, and a linear program finds the sizes at which the greatest of these bounds is least.

Source: Kelley, The cutting-plane method for solving convex programs, SIAM J. 8(4), 1960.
"""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any, Final, NamedTuple

from .crossing_trees import Edge, Style, Wires, edges_of
from .list_scheduler import TransferOrder, in_stages

_GAP: Final = 0.001  # the search ends when the time exceeds the lower bound by at most this part
_MOST_PROGRAMS: Final = 40
_UNITS: Final = (16, 32, 64)  # sizes are multiples of 1 / 16 of a device's data, or finer if this takes less time
_FEW_SIZES: Final = 4  # with more sizes, moving a unit from one to another saves less


class Share(NamedTuple):
    """A share, or several if its size can be 0."""

    start: int  # a device
    style: Style
    group: int
    weight: int = 1  # shares of equal size have bytes in this proportion


class Staged(NamedTuple):
    """Shares of some sizes, whose sum is equal for all devices, and the order of their edges."""

    order: TransferOrder
    edges: tuple[Edge, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def staged(wires: Wires, shares: list[Share], nbytes: float, goal_s: float, *, apart: bool) -> Staged | None:
    """Return the shares in stages, or ``None`` if they take ``goal_s`` or more. For the stages see ``in_stages``.

    Shares of the same group, the same way to land and equally far devices have one size. ``nbytes`` are those of a
    device. The weights of the shares of a device that have one size have the same sum everywhere.
    """
    import numpy as np

    numbers: dict[tuple[int, int, int], int] = {}
    size_of = [
        numbers.setdefault((wires.to_card[start], group, style.lands), len(numbers))
        for start, style, group, _ in shares
    ]
    number = np.array(size_of)
    kinds = np.unique([kind for kind, *_ in numbers], return_inverse=True)[1]
    weights = np.array([share.weight for share in shares])
    first = shares[0]
    whole = sum(share.weight for k, share in enumerate(shares) if (share.start, size_of[k]) == (first.start, 0))
    edges = edges_of(wires, tuple(share.start for share in shares), *(share.style for share in shares))
    groups = [share.group for share in shares]
    rounds = in_stages(wires, edges, groups, apart=apart)
    parts = weights * (nbytes / whole)

    def slope(sizes: Any) -> tuple[float, Any]:
        seconds, by_share = rounds.slope(sizes[number] * parts)
        return seconds, np.bincount(number, by_share * parts, len(sizes))

    best = _best_sizes(slope, kinds, goal_s)
    if best is None:
        return None
    found: Staged | None = None
    for units in _UNITS:
        whole_units = _in_units(best, kinds, units)
        for down, up in permutations(range(len(kinds)), 2) if len(kinds) <= _FEW_SIZES and not kinds.any() else ():
            moved = whole_units.copy()
            moved[[down, up]] += (-1, 1)
            if moved[down] >= 0 and slope(moved / units)[0] < slope(whole_units / units)[0]:
                whole_units = moved
        sizes = whole_units[number] * weights
        kept = np.flatnonzero(sizes)
        numbered = {int(share): k for k, share in enumerate(kept)}
        place, left = {-1: -1}, list[Edge]()
        for k, edge in enumerate(edges):
            if edge.share in numbered:
                place[k] = len(left)
                left.append(edge._replace(share=numbered[edge.share], parent=place[edge.parent]))
        crossing = np.unique([groups[k] for k in kept], return_inverse=True)[1].tolist()
        rounds_left = in_stages(wires, left, crossing, apart=apart)
        seconds = rounds_left.seconds(sizes[kept] * (nbytes / (whole * units)))
        if found is None or seconds < found.order.seconds * (1 - _GAP):
            starts = tuple(shares[k].start for k in kept)
            found = Staged(TransferOrder(rounds_left.rounds, seconds), tuple(left), starts, tuple(sizes[kept].tolist()))
    return found


def _best_sizes(slope: Any, kinds: Any, goal_s: float) -> Any:
    """Return the sizes that take the least time, or ``None`` if this is ``goal_s`` or more.

    The sizes of each kind add up to 1. ``slope`` returns the time at some sizes and a subgradient there.
    """
    import numpy as np
    from scipy.optimize import linprog

    count = len(kinds)
    sums = np.zeros((kinds.max() + 1, count + 1))
    sums[kinds, range(count)] = 1
    best, best_s, least_s = 1 / np.bincount(kinds)[kinds], math.inf, 0.0
    point, cuts, offsets = best, list[Any](), list[float]()
    for turn in range(_MOST_PROGRAMS):
        seconds, cut = slope(point)
        cuts.append(np.append(cut, -1.0))
        offsets.append(float(cut @ point) - seconds)
        if seconds < best_s:
            best, best_s = point, seconds
        if best_s <= least_s * (1 + _GAP):
            break
        scale = 1 / best_s  # for HiGHS: seconds are too small for its tolerances
        program = [0.0] * count + [1.0]
        rows = np.array(cuts) * np.array([scale] * count + [1.0])
        found = linprog(program, A_ub=rows, b_ub=np.array(offsets) * scale, A_eq=sums, b_eq=np.ones(len(sums)))
        if found.x is None:
            break
        least_s = max(least_s, float(found.fun) / scale)
        if least_s >= goal_s:
            return None
        point = np.maximum(found.x[:-1], 0.0)
        if turn % 2:
            point = (point + best) / 2
    return best


def _in_units(sizes: Any, kinds: Any, units: int) -> Any:
    """Return sizes as numbers of units. Of each kind, those with the greatest remainders are rounded up."""
    import numpy as np

    whole = np.floor(sizes * units + 1e-6)
    for kind in range(kinds.max() + 1):
        own = np.flatnonzero(kinds == kind)
        missing = units - int(whole[own].sum())
        whole[own[np.argsort(whole[own] - sizes[own] * units, kind="stable")[:missing]]] += 1
    return whole.astype(int)
