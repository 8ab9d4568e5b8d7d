"""Amounts of columns, which are trees, rounded to whole numbers of equal units, so that a schedule has few chunks.

Input: the amounts, and the loads of the links by each column. Output: numbers of units that cost little time.
"""

from __future__ import annotations

from typing import Any, Final

_LOSS: Final = 0.02  # the part of the time that rounding may cost
_UNITS: Final = (1, 2, 3, 4, 6, 8, 16, 32)  # the numbers of units per group that are tried
_COLUMNS_PER_UNIT: Final = 2  # with more columns per unit than this, rounding costs too much time
_MOST_MOVED: Final = 16  # with more units per group, none are moved afterwards
_MOST_PASSES: Final = 10  # over all units; a pass that moves none is the last one
_FINE: Final = 5040  # 7!, divisible by 2 to 10: most exact shares are multiples of 1 / _FINE


def round_to_units(amounts: Any, loads: Any, group: Any, exact: float) -> tuple[Any, int, float]:
    """Return the number of units of each column, the number of units of the whole buffer, and the time.

    Args:
      amounts: the part of the buffer of each column.
      loads: for each column, the seconds of each link in each step if the column had the whole buffer.
      group: the group of each column; the groups have equal parts of the buffer.
      exact: the time with exact amounts.
    """
    import numpy as np

    groups = [np.flatnonzero(group == k) for k in range(int(group.max()) + 1)]
    best, fine = None, _fine_shares(amounts, groups)
    exact_units = int(fine.sum()) // len(groups)
    loss = 0.0 if exact_units <= _UNITS[-1] else _LOSS  # without any loss, there are few units
    enough = [units for units in _UNITS if units * len(groups) * _COLUMNS_PER_UNIT >= len(amounts)]
    for units in (*(units for units in enough if units < exact_units), 0):
        counts = _distribute_units(amounts, loads, groups, units) if units else fine
        total_units = int(counts.sum())
        time = float((counts[:, None, None] * loads).sum(axis=0).max(axis=1).sum()) / total_units
        if best is None or time < best[2]:
            best = counts, total_units, time
        if time <= exact * (1 + loss + 1e-9):
            break
    assert best is not None
    return best


def _distribute_units(amounts: Any, loads: Any, groups: list[Any], units: int) -> Any:
    """Return the number of units of each column, if each group has ``units``.

    Columns get the units of their share, rounded down. The remaining units are given one by one to the column with
    which the time is least. Then units move between columns of a group as long as this makes the loads more even.
    """
    import numpy as np

    all_units = units * len(groups)
    counts = np.floor(amounts * all_units + 1e-6)
    total = (counts[:, None, None] * loads).sum(axis=0)

    def cost(total: Any, steep: float) -> Any:
        """Return about the sum of the greatest loads of the steps; other loads near them count a little."""
        most = total.max(axis=-1, keepdims=True)
        return (most[..., 0] + np.log(np.exp(steep * (total - most)).sum(axis=-1)) / steep).sum(axis=-1)

    for group in groups:
        for _ in range(units - int(counts[group].sum())):
            missing = amounts[group] * all_units - counts[group]
            chosen = group[(cost(total + loads[group], 3.0) - 1e-3 * missing).argmin()]
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
    """Return shares in a unit of at least 1 / ``_FINE``: exactly if there is such a unit, otherwise rounded.

    >>> import numpy as np
    >>> _fine_shares(np.array([2 / 7, 3 / 14, 0.25, 0.25]), [np.array([0, 1]), np.array([2, 3])])
    array([8., 6., 7., 7.])
    """
    import numpy as np

    parts = len(groups)
    possible = np.arange(parts, _FINE, parts)
    for amount in amounts:  # keeps the numbers of units with which each amount is a whole number of units
        possible = possible[abs(amount * possible - np.rint(amount * possible)) < 1e-6]
    for units in possible.tolist():
        counts = np.rint(amounts * units)
        if counts.sum() == units:
            return counts
    units = _FINE // parts * parts
    counts = np.floor(amounts * units)
    for group in groups:
        rest = units // parts - int(counts[group].sum())
        counts[group[np.argsort(counts[group] - amounts[group] * units, kind="stable")[:rest]]] += 1
    return counts
