"""``GroupsBound``: max-min fair rates of several groups on shared links, and the certificate that proves them.

Input: a ``GroupsBound``. Output: nothing, or PlanError. As in ``certificate.py``, the check does not use the search: it
computes the prices of trees again.

Rates are better if the least rate / weight of a group is greater; if it is equal, the next one decides, and so on. The
certificate has levels. At each level, the groups of earlier levels keep the rates that were fixed there. The prices of
the links then prove a limit of the rate / weight of all other groups. Let c be the price of a group's cheapest trees,
per unit of the group's rate. If each fixed group has its rate r, and each other group has t times its weight w, then
the sum of all r c and t w c is at most the sum of bandwidth x price. The greatest such t is ``most``. If ``rate``
equals ``most``, a group whose trees cost more than 0 can only have a greater rate if another group has a smaller one.
So these groups are fixed at this level.

Source: Radunović & Le Boudec, A unified framework for max-min and min-max fairness with applications, IEEE/ACM
Transactions on Networking 15(5), 2007 (levels).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from ...errors import PlanError, shown
from ...topology import Topology
from ..optimal.bounds.certificate import COLLECTIVES
from ..optimal.bounds.steiner import MANY, few_enough
from ..optimal.bounds.tree_prices import Priced, branch_nodes_of, price_of_buffer


class GroupNeed(NamedTuple):
    """A collective of one group. All names are canonical."""

    collective: str
    members: tuple[str, ...]
    root: str | None  # of a broadcast or reduce; None: another collective
    weight: Fraction

    @property
    def roots(self) -> tuple[tuple[str, Fraction], ...]:
        """The roots, each as (root, amount of data that starts or ends at it). All amounts are equal."""
        return tuple((root, Fraction(1)) for root in (self.members if self.root is None else (self.root,)))


class RateLevel(NamedTuple):
    """The rate / weight of some groups, and the prices which prove that it cannot be raised."""

    rate: Fraction  # the planned rate / weight of all groups that are not fixed at earlier levels, in GB/s
    most: Fraction  # the greatest rate / weight that the prices allow
    groups: tuple[int, ...]  # the numbers of the groups that are fixed at this level
    prices: tuple[tuple[str, str, Fraction], ...]  # (src, dst, price per GB/s); other links have the price 0


@dataclass(frozen=True)
class GroupsBound:
    """Rates of groups, and the proof that no rate can be raised without reducing one that is as low or lower."""

    topology: Topology
    groups: tuple[GroupNeed, ...]
    levels: tuple[RateLevel, ...]  # from the least rate to the greatest

    @property
    def rates(self) -> tuple[Fraction | None, ...]:
        """The planned rate of each group in GB/s; ``None`` for a group of one device, in which nothing has to move."""
        rates = {k: level.rate * self.groups[k].weight for level in self.levels for k in level.groups}
        return tuple(rates.get(k) for k in range(len(self.groups)))

    @property
    def ratio(self) -> Fraction:
        """The least quotient of a planned and a proved rate over all levels. If it is 1, no rates are better."""
        return min((level.rate / level.most for level in self.levels), default=Fraction(1))

    def check(self) -> None:
        """Raise PlanError unless the certificate proves the rate ``most`` of each level.

        ``GroupsPlan.check`` proves in addition that the planned rates are reached.
        """
        self._check_groups()
        fixed: dict[int, Fraction] = {}
        before = Fraction(0)
        for number, level in enumerate(self.levels):
            if level.rate < before or level.rate <= 0:
                raise PlanError.of("rates of levels must be above 0 and not decrease.", f"{before}, then {level.rate}")
            before = level.rate
            proved = self._proved_rate(level, fixed)
            if proved != level.most or level.rate > level.most:
                given = f"level {number}: {level.rate} GB/s planned, {level.most} claimed, {proved} proved"
                raise PlanError.of("the certificate does not prove the rates of the groups.", given)
            fixed |= {k: level.rate * self.groups[k].weight for k in level.groups}
        missing = [k for k, group in enumerate(self.groups) if len(group.members) > 1 and k not in fixed]
        if missing:
            raise PlanError.of("each group of two or more devices must have a level.", f"without one: {shown(missing)}")

    def _check_groups(self) -> None:
        """Raise PlanError if a group is invalid."""
        for group in self.groups:
            rooted = group.collective in ("broadcast", "reduce")
            problem = ""
            if group.collective not in COLLECTIVES:
                problem = "no collective has this name."
            elif not group.members or not set(group.members) <= set(self.topology.devices):
                problem = "a group must have one or more devices, all of them in the topology."
            elif len(set(group.members)) < len(group.members):
                problem = "a group must list each device once."
            elif (group.root in group.members) != rooted or (group.root is None) == rooted:
                problem = "the root of a broadcast or reduce must be in its group, and other collectives have no root."
            elif not isinstance(group.weight, (int, Fraction)) or group.weight <= 0:
                problem = "a weight must be an int or a Fraction above 0."
            if problem:
                raise PlanError.of(problem, shown(tuple(group)))

    def _proved_rate(self, level: RateLevel, fixed: dict[int, Fraction]) -> Fraction:
        """Return the rate / weight that the prices of a level prove. ``fixed`` has the rates of the fixed groups."""
        links = {(src, dst): bandwidth for src, dst, bandwidth, _ in self.topology.links}
        prices = {(src, dst): price for src, dst, price in level.prices}
        numbers = [level.rate, level.most, *prices.values()]
        inexact = [number for number in numbers if not isinstance(number, (int, Fraction))]
        if inexact:
            raise PlanError.of("the numbers of a certificate must be ints or Fractions.", shown(inexact[0]))
        wrong = [pair for pair, price in prices.items() if pair not in links or price < 0]
        if wrong or len(prices) < len(level.prices):
            problem = "prices must be 0 or more, and each link of the topology may have one price."
            raise PlanError.of(problem, shown(wrong or level.prices))
        if not level.groups or any(k in fixed or not 0 <= k < len(self.groups) for k in level.groups):
            problem = "a level must fix one or more groups that no earlier level has fixed."
            raise PlanError.of(problem, shown(level.groups))
        priced = [(src, dst, prices.get((src, dst), Fraction(0))) for src, dst in links]
        costs = [self._cost(group, priced) for group in self.groups]
        if not all(costs[k] for k in level.groups):
            problem = "the prices prove nothing about a group whose trees cost 0."
            raise PlanError.of(problem, f"groups {shown(level.groups)}, prices {shown(level.prices)}")
        value = sum((links[src, dst] * price for src, dst, price in level.prices), Fraction(0))
        value -= sum((rate * costs[k] for k, rate in fixed.items()), Fraction(0))
        free = [group.weight * costs[k] for k, group in enumerate(self.groups) if k not in fixed]
        return value / sum(free, Fraction(0))

    def _cost(self, group: GroupNeed, priced: Priced) -> Fraction:
        """Return the price of the cheapest trees of a group, or a lower limit of it if the group has many members."""
        if len(group.members) == 1:
            return Fraction(0)
        branch_nodes = branch_nodes_of(self.topology)
        exact = few_enough(len(group.members), len(branch_nodes), MANY)
        return price_of_buffer(priced, branch_nodes, group.collective, group.members, group.roots, exact=exact)
