"""Plans of several groups as text: ``GroupsPlan.explain``."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final, NamedTuple

from ...schedule.schedule import many
from ..explain import LEAST_WIDTH, duration, percent, rate, rest_percent, size, wrapped
from ..plans import Plan
from .groups_bound import GroupsBound
from .separate_plans import SeparatePlans, losses

_MOST_ROWS: Final = 32  # of the table
_MOST_ALIKE: Final = 2  # groups with the same numbers; if there are more, the first one is shown
_MOST_LETTERS: Final = 30  # of the names of devices in the first column of the table
_LEAST_LETTERS: Final = 16  # in a narrower column, names have a line of their own above the numbers
_HEADS: Final = ("GB/s", "alone", "separate", "loss", "own links", "time")


def explain_groups(
    bound: GroupsBound,
    plans: tuple[Plan, ...],
    separate: SeparatePlans,
    unhelped: SeparatePlans | None,
    width: int | None = None,
) -> str:
    """Return a text with the rates of all groups, the levels that limit them, and the losses with separate plans.

    ``separate`` are plans for each group alone with helpers, and ``unhelped`` those without helpers. ``unhelped`` is
    ``None`` if some groups are not connected without helpers. ``width``: of the longest line, at least 60.
    """
    needs, rates = bound.groups, bound.rates
    weights = [group.weight for group in needs]
    collectives = ", ".join(dict.fromkeys(group.collective for group in needs))
    title = f"{collectives} of {many(len(needs), 'group')} at the same time on "
    lines = [title + f"{many(len(bound.topology.devices), 'device')}, which share the links"]
    levels = bound.levels
    if not levels:
        return wrapped([f"{lines[0]}: no data has to move."], width)
    loss = f" (a loss of {rest_percent(bound.ratio)})" if bound.ratio < 1 else ""
    lines.append(f"  bound     {percent(bound.ratio)} of the highest possible rates reached{loss}")
    weighted = " x weight" if set(weights) != {1} else ""
    for limit in dict.fromkeys(level.rate for level in levels):
        groups = sorted(k for level in levels if level.rate == limit for k in level.groups)
        word = "group" if len(groups) == 1 else "groups"
        lines.append(f"  rate      {rate(limit)}{weighted}: {word} {_ranges(groups)}")
    alternatives = [("separate", "with helpers", separate), ("own links", "without helpers", unhelped)]
    least = _least(rates, weights)
    for label, how, alternative in alternatives:
        text = "some groups are not connected"
        if alternative is not None:
            lowest = _least(alternative.rates, weights)
            lost_part = _loss(1 - lowest / least)
            text = f"at least {float(lowest):.2f} GB/s{weighted} instead of {float(least):.2f}, {lost_part}"
        lines.append(f"  {label:9s} if each group has its own best plan, {how}, and all run at the same time: {text}")
    sizes = ", ".join(dict.fromkeys(size(plan.nbytes) for plan in plans))
    last = f"  alone: if no other group runs; time: of {sizes} while all groups run, the longest in each row"
    lost = losses(rates, separate.rates)
    rows = []
    for k, group in enumerate(needs):
        numbers = [_gb_per_s(rate) for rate in (rates[k], separate.plans[k].rate, separate.rates[k])]
        numbers += [percent_of(lost[k]), _gb_per_s(None if unhelped is None else unhelped.rates[k])]
        rows.append(_Row(k, group.members, group.weight, tuple(numbers), plans[k].seconds))
    return "\n".join([wrapped(lines, width), *_table(rows, width), wrapped([last], width)])


class _Row(NamedTuple):
    """A group's row of the table."""

    group: int
    members: tuple[str, ...]
    weight: Fraction
    numbers: tuple[str, ...]  # all but the last one of ``_HEADS``
    seconds: float

    @property
    def kind(self) -> tuple[object, ...]:
        """What groups have in common that share a row."""
        return self.numbers, len(self.members), self.weight


def _table(rows: list[_Row], width: int | None) -> list[str]:
    """Return the lines of the table. Of three or more groups with equal numbers, the first one is shown."""
    kinds: dict[tuple[object, ...], list[_Row]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    alike = {row.group: kinds[row.kind] if len(kinds[row.kind]) > _MOST_ALIKE else [row] for row in rows}
    shown = [row for row in rows if row is alike[row.group][0]]
    texts = [(*row.numbers, duration(max(each.seconds for each in alike[row.group]))) for row in shown]
    columns = [max(map(len, column)) + 2 for column in zip(_HEADS, *texts, strict=True)]
    marks = [f" x {float(row.weight):.4g}" if row.weight != 1 else "" for row in shown]
    wide = max(map(len, marks)) + sum(columns) + 6
    letters = _MOST_LETTERS if width is None else min(_MOST_LETTERS, max(width, LEAST_WIDTH) - wide)
    is_narrow = letters < _LEAST_LETTERS
    letters = _MOST_LETTERS if is_narrow else letters
    names = [f"{row.group:>3} {_names(row.members, letters)}{mark}" for row, mark in zip(shown, marks, strict=True)]
    first = 0 if is_narrow else 2 + max(len(name) for name in [*names, "group"])
    lines = [f"{'' if is_narrow else '  group':{first}s}{_cells(_HEADS, columns)}"]
    for row, name, numbers in list(zip(shown, names, texts, strict=True))[:_MOST_ROWS]:
        cells = _cells(numbers, columns)
        lines += [f"  {name}", cells] if is_narrow else [f"{f'  {name}':{first}s}{cells}"]
        others = [each.group for each in alike[row.group][1:]]
        if others:
            of = f" of {many(len(row.members), 'device')}"
            more = f"{' ' * 6}and {many(len(others), 'group')}{of} with these numbers: {_ranges(others)}"
            lines += wrapped([more], width).split("\n")
    hidden = sum(len(alike[row.group]) for row in shown[_MOST_ROWS:])
    if hidden:
        lines.append(f"      and {hidden} more")
    return lines


def _cells(texts: Sequence[str], columns: Sequence[int]) -> str:
    return "".join(f"{text:>{wide}s}" for text, wide in zip(texts, columns, strict=True))


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text; three or more in a row have a range.

    >>> _ranges([0, 1, 3, 4, 5, 6])
    '0, 1, 3-6'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _least(rates: Sequence[Fraction | None], weights: Sequence[Fraction]) -> Fraction:
    """Return the least rate / weight of the groups that have a rate."""
    return min(rate / weight for rate, weight in zip(rates, weights, strict=True) if rate is not None)


def _gb_per_s(rate: Fraction | None) -> str:
    return "-" if rate is None else f"{float(rate):.2f}"


def percent_of(loss: Fraction) -> str:
    """Return the change of a rate in percent, with its sign, given the part of the rate that is lost.

    >>> percent_of(Fraction(1, 3)), percent_of(Fraction(-1, 2)), percent_of(Fraction(0))
    ('-33.3 %', '+50 %', '0 %')
    """
    return "0 %" if not loss else f"{-float(loss) * 100:+.3g} %"


def _loss(loss: Fraction) -> str:
    if not loss:
        return "no loss"
    return f"a {'loss' if loss > 0 else 'gain'} of {abs(float(loss)) * 100:.3g} %"


def _names(members: tuple[str, ...], letters: int = _MOST_LETTERS) -> str:
    """Return the first devices of a group that fit into some letters, and the number of the other devices.

    >>> _names(("cuda:0", "cuda:1")), _names(tuple(f"host0/cuda:{k}" for k in range(8)))
    ('cuda:0 cuda:1', 'host0/cuda:0 and 7 more')
    >>> _names(tuple(f"host0/cuda:{k}" for k in range(8)), 20)
    'host0/cuda:0 + 7'
    """
    text = " ".join(members)
    shown = len(members)
    while len(text) > letters and shown > 1:
        shown -= 1
        more = len(members) - shown
        text = f"{' '.join(members[:shown])} and {more} more"
        if shown == 1 and len(text) > letters:
            text = f"{members[0]} + {more}"
    return text
