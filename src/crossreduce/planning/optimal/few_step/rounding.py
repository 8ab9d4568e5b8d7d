"""Amounts as whole numbers of equal units, as few as possible: a chunk of a schedule is a share of few units.

Input: the amounts of columns, and how much each loads the links. Output: units that cost little time.
"""

from __future__ import annotations

from typing import Any, Final

_LOSS: Final = 0.02  # the part of the time that rounding may cost
_UNITS: Final = (1, 2, 3, 4, 6, 8, 16, 32)  # into how many units each group's part is divided
_COLUMNS_PER_UNIT: Final = 2  # with more columns than this, so few units cost too much time
_MOST_MOVED: Final = 16  # with more units, none are moved afterwards
_MOST_PASSES: Final = 10  # over all units; a pass that moves none is the last one
_FINE: Final = 5040  # 7!, divisible by 2 to 10: most exact shares are multiples of its inverse


def round_to_units(amounts: Any, loads: Any, group: Any, exact: float) -> tuple[Any, int, float]:
    """Return how many units each column gets, the units of the whole buffer, and the time.

    Args:
      amounts: the part of the buffer of each column.
      loads: the seconds of each link in each step for the whole buffer, by column.
      group: the group of each column; the groups have equal parts of the buffer.
      exact: the time with exact amounts.
    """
    import numpy as np

    groups = [np.flatnonzero(group == k) for k in range(int(group.max()) + 1)]
    found, fine = None, _fine_shares(amounts, groups)
    exact_units = int(fine.sum()) // len(groups)
    loss = 0.0 if exact_units <= _UNITS[-1] else _LOSS  # these exact amounts have few units
    enough = [units for units in _UNITS if units * len(groups) * _COLUMNS_PER_UNIT >= len(amounts)]
    for units in (*(units for units in enough if units < exact_units), 0):
        counts = _move_units(amounts, loads, groups, units) if units else fine
        whole = int(counts.sum())
        time = float((counts[:, None, None] * loads).sum(axis=0).max(axis=1).sum()) / whole
        if found is None or time < found[2]:
            found = counts, whole, time
        if time <= exact * (1 + loss + 1e-9):
            break
    assert found is not None
    return found


def _move_units(amounts: Any, loads: Any, groups: list[Any], units: int) -> Any:
    """Return how many units each column gets, ``units`` in each group.

    Columns get the units of their share, rounded down; the units that are left go one by one to the column that makes
    the time least. Then units move between columns of a group as long as this makes the loads more even.
    """
    import numpy as np

    whole = units * len(groups)
    counts = np.floor(amounts * whole + 1e-6)
    total = (counts[:, None, None] * loads).sum(axis=0)

    def cost(total: Any, steep: float) -> Any:
        """Return about the sum of the greatest loads of the steps; other loads near them count a little."""
        most = total.max(axis=-1, keepdims=True)
        return (most[..., 0] + np.log(np.exp(steep * (total - most)).sum(axis=-1)) / steep).sum(axis=-1)

    for group in groups:
        for _ in range(units - int(counts[group].sum())):
            chosen = group[(cost(total + loads[group], 3.0) - 1e-3 * (amounts[group] * whole - counts[group])).argmin()]
            counts[chosen] += 1
            total = total + loads[chosen]
    for steep in (2.0, 8.0) if units <= _MOST_MOVED else ():
        for _ in range(_MOST_PASSES):
            moved = False
            for group in groups:
                for k in group[counts[group] > 0]:
                    rest = total - loads[k]
                    costs = cost(rest + loads[group], steep)
                    if costs.min() < cost(total, steep) - 1e-9:
                        target = group[costs.argmin()]
                        counts[k] -= 1
                        counts[target] += 1
                        total, moved = rest + loads[target], True
            if not moved:
                break
    return counts


def _fine_shares(amounts: Any, groups: list[Any]) -> Any:
    """Return shares as multiples of a unit, exactly if the unit is 1 / ``_FINE`` or more, else rounded.

    >>> import numpy as np
    >>> _fine_shares(np.array([2 / 7, 3 / 14, 0.25, 0.25]), [np.array([0, 1]), np.array([2, 3])])
    array([8., 6., 7., 7.])
    """
    import numpy as np

    parts = len(groups)
    possible = np.arange(parts, _FINE, parts)
    for amount in amounts:  # leaves the numbers of units of which each amount is a multiple
        possible = possible[abs(amount * possible - np.rint(amount * possible)) < 1e-6]
    for whole in possible.tolist():
        counts = np.rint(amounts * whole)
        if counts.sum() == whole:
            return counts
    whole = _FINE // parts * parts
    counts = np.floor(amounts * whole)
    for group in groups:
        rest = whole // parts - int(counts[group].sum())
        counts[group[np.argsort(counts[group] - amounts[group] * whole, kind="stable")[:rest]]] += 1
    return counts
