"""Plans of several groups as text: ``GroupsPlan.explain``."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final

from ..schedule.schedule import many
from .explain import duration, percent, rest_percent, size

if TYPE_CHECKING:
    from .groups import GroupsPlan

_MOST_GROUPS: Final = 32
_MOST_NAMES: Final = 4


def explained(plan: GroupsPlan) -> str:
    """Return a text: the rates of all groups, what limits them, and what separate plans would lose."""
    needs, separate = plan.bound.groups, plan.separate
    collectives = ", ".join(dict.fromkeys(group.collective for group in needs))
    lines = [
        f"{collectives} of {many(len(needs), 'group')} at the same time on "
        f"{many(len(plan.topology.devices), 'device')}, which share the links"
    ]
    levels = plan.bound.levels
    if not levels:
        return f"{lines[0]}: no data has to move."
    loss = f" (a loss of {rest_percent(plan.ratio)})" if plan.ratio < 1 else ""
    lines.append(f"  proved    {percent(plan.ratio)} of the rates that no plans exceed{loss}, by prices of the links")
    weighted = " x weight" if set(plan.weights) != {1} else ""
    for limit in dict.fromkeys(level.rate for level in levels):
        listed = sorted(k for level in levels if level.rate == limit for k in level.groups)
        word = "group" if len(listed) == 1 else "groups"
        lines.append(f"  level     {float(limit):.2f} GB/s ({limit}){weighted}: {word} {', '.join(map(str, listed))}")
    pairs = [
        (rate / group.weight, apart / group.weight)
        for rate, apart, group in zip(plan.rates, separate.rates, needs, strict=True)
        if rate is not None and apart is not None
    ]
    least, least_apart = min(rate for rate, _ in pairs), min(apart for _, apart in pairs)
    lines.append(
        f"  separate  plans made for each group alone and run at the same time: at least {float(least_apart):.2f} GB/s"
        f" instead of {float(least):.2f}, {_loss(1 - least_apart / least)}"
    )
    lines.append("  groups                                     GB/s     alone  separate      loss      time")
    for k, group in list(enumerate(needs))[:_MOST_GROUPS]:
        rate, alone, apart = plan.rates[k], separate.plans[k].rate, separate.rates[k]
        numbers = "".join(f"{'-' if one is None else f'{float(one):.2f}':>10s}" for one in (rate, alone, apart))
        name = f"{k} {_names(group.members)}"
        weight = f" x {float(group.weight):.4g}" if group.weight != 1 else ""
        lines.append(
            f"    {name + weight:33s}{numbers}{percent_of(plan.losses[k]):>10s}{duration(plan.seconds[k]):>10s}"
        )
    if len(needs) > _MOST_GROUPS:
        lines.append(f"    and {len(needs) - _MOST_GROUPS} more")
    totals = dict.fromkeys(size(one.nbytes) for one in plan.plans)
    lines.append(
        f"  alone: with all links for one group; time: of {', '.join(totals)} with a group's part of the links"
    )
    return "\n".join(lines)


def percent_of(loss: Fraction) -> str:
    """Return a loss in percent, with its sign.

    >>> percent_of(Fraction(1, 3)), percent_of(Fraction(-1, 2)), percent_of(Fraction(0))
    ('-33.3 %', '+50 %', '0 %')
    """
    return "0 %" if not loss else f"{-float(loss) * 100:+.3g} %"


def _loss(loss: Fraction) -> str:
    return "no loss" if not loss else f"a loss of {float(loss) * 100:.3g} %"


def _names(members: tuple[str, ...]) -> str:
    more = len(members) - _MOST_NAMES
    return " ".join(members[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
