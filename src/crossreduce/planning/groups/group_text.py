"""Plans of several groups as text: ``GroupsPlan.explain``."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from ...schedule.schedule import many
from ..explain import duration, percent, rest_percent, size
from ..plans import Plan
from .groups_bound import GroupsBound
from .separate_plans import SeparatePlans, losses

_MOST_GROUPS: Final = 32  # rows of the table
_MOST_LETTERS: Final = 30  # of the names of devices in the first column of the table


def explain_groups(
    bound: GroupsBound, plans: tuple[Plan, ...], separate: SeparatePlans, unhelped: SeparatePlans | None
) -> str:
    """Return a text with the rates of all groups, the levels that limit them, and the losses with separate plans.

    ``separate`` are plans for each group alone with helpers, and ``unhelped`` those without helpers. ``unhelped`` is
    ``None`` if some groups are not connected without helpers.
    """
    needs, rates = bound.groups, bound.rates
    weights = [group.weight for group in needs]
    collectives = ", ".join(dict.fromkeys(group.collective for group in needs))
    title = f"{collectives} of {many(len(needs), 'group')} at the same time on "
    lines = [title + f"{many(len(bound.topology.devices), 'device')}, which share the links"]
    levels = bound.levels
    if not levels:
        return f"{lines[0]}: no data has to move."
    loss = f" (a loss of {rest_percent(bound.ratio)})" if bound.ratio < 1 else ""
    lines.append(f"  proved    {percent(bound.ratio)} of the rates that no plans exceed{loss}, by prices of the links")
    weighted = " x weight" if set(weights) != {1} else ""
    for limit in dict.fromkeys(level.rate for level in levels):
        groups = sorted(k for level in levels if level.rate == limit for k in level.groups)
        word = "group" if len(groups) == 1 else "groups"
        lines.append(f"  level     {float(limit):.2f} GB/s ({limit}){weighted}: {word} {', '.join(map(str, groups))}")
    alternatives = [("separate", "with all helpers", separate), ("own links", "without helpers", unhelped)]
    least = _least(rates, weights)
    for label, how, alternative in alternatives:
        text = "some groups are not connected"
        if alternative is not None:
            lowest = _least(alternative.rates, weights)
            text = f"at least {float(lowest):.2f} GB/s{weighted}, not {float(least):.2f}: {_loss(1 - lowest / least)}"
        lines.append(f"  {label:9s} a plan for each group alone, {how}, all at the same time: {text}")
    heads = "".join(f"{head:>10s}" for head in ("GB/s", "alone", "separate", "loss", "own links", "time"))
    lines.append(f"  {'group':35s}{heads}")
    lost = losses(rates, separate.rates)
    for k, group in list(enumerate(needs))[:_MOST_GROUPS]:
        numbers = [_gb_per_s(rate) for rate in (rates[k], separate.plans[k].rate, separate.rates[k])]
        numbers += [percent_of(lost[k]), _gb_per_s(None if unhelped is None else unhelped.rates[k])]
        weight = f" x {float(group.weight):.4g}" if group.weight != 1 else ""
        name = f"{k:>3} {_names(group.members)}{weight}"
        lines.append(f"  {name:35s}" + "".join(f"{text:>10s}" for text in (*numbers, duration(plans[k].seconds))))
    if len(needs) > _MOST_GROUPS:
        lines.append(f"      and {len(needs) - _MOST_GROUPS} more")
    sizes = ", ".join(dict.fromkeys(size(plan.nbytes) for plan in plans))
    lines.append(f"  alone: all links for one group; time: {sizes} with a group's part of the links")
    return "\n".join(lines)


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
    return "no loss" if not loss else f"a loss of {float(loss) * 100:.3g} %"


def _names(members: tuple[str, ...]) -> str:
    """Return the first devices of a group that fit into the table's column, and the number of the other devices.

    >>> _names(("cuda:0", "cuda:1")), _names(tuple(f"host0/cuda:{k}" for k in range(8)))
    ('cuda:0 cuda:1', 'host0/cuda:0 and 7 more')
    """
    text = " ".join(members)
    shown = len(members)
    while len(text) > _MOST_LETTERS and shown > 1:
        shown -= 1
        text = f"{' '.join(members[:shown])} and {len(members) - shown} more"
    return text
