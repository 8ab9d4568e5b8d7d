"""Reference rates of several groups on shared links: linear programs over all possible trees.

Input: a topology, of which only plain numbers are read, and the collectives of groups. Output: the max-min fair rates:
the least rate is as large as possible, then the second least, and so on. Nothing here imports crossreduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from planning_oracle import all_trees
from scipy.optimize import linprog


class Group(NamedTuple):
    collective: str
    members: tuple[str, ...]
    root: str | None
    weight: float


def _shares(topology: Any, group: Group) -> tuple[list[str], float | None]:
    """Return the roots of a group's trees, and each root's fraction of the data, or ``None`` if it may be any."""
    if group.collective == "all_reduce":
        able = [*topology.devices, *(switch.name for switch in topology.switches if switch.reduces)]
        return able, None
    roots = list(group.members) if group.root is None else [group.root]
    return roots, 1 / len(roots)


def best_rate(topology: Any, collective: str, members: tuple[str, ...]) -> float:
    """Return the rate of the best trees of one collective. The root of a broadcast or reduce is the first member."""
    root = members[0] if collective in ("broadcast", "reduce") else None
    return best_rates(topology, [Group(collective, members, root, 1.0)])[0]


class _Rates:
    """All rates that trees can have at the same time, as the variables of a linear program."""

    def __init__(self, topology: Any, groups: Sequence[Group]) -> None:
        self.groups = groups
        uses: list[tuple[int, ...]] = [(0,) * len(topology.links)] * len(groups)  # the first variables are the rates
        equal: list[dict[int, float]] = []
        for g, group in enumerate(groups):
            roots, part = _shares(topology, group)
            directions = [True] * (group.collective not in ("reduce", "reduce_scatter"))
            directions += [False] * (group.collective not in ("broadcast", "all_gather"))
            rooted = {}
            if part is None:  # a variable for the data of each root
                rooted = {root: len(uses) + k for k, root in enumerate(roots)}
                uses += [(0,) * len(topology.links)] * len(roots)
                equal.append({g: -1.0} | dict.fromkeys(rooted.values(), 1.0))
            for outward in directions:
                rows: dict[str, dict[int, float]] = {
                    root: {g: -part} if part is not None else {rooted[root]: -1.0} for root in roots
                }
                for root, used in all_trees(topology, roots, outward, group.members):
                    rows[root][len(uses)] = 1.0
                    uses.append(used)
                equal += rows.values()
        self.columns = len(uses)
        self.scale = float(max(link.bandwidth for link in topology.links))
        self.within = np.array(uses, dtype=float).T
        self.limits = [float(link.bandwidth) / self.scale for link in topology.links]
        self.equal = np.zeros((len(equal), self.columns))
        for r, row in enumerate(equal):
            for c, value in row.items():
                self.equal[r, c] = value

    def most(self, raised: Sequence[int], least: Sequence[float]) -> float:
        """Return the greatest rate / weight that all groups in ``raised`` can have at the same time.

        Every group g, also each in ``raised``, keeps at least the rate ``least[g]``.
        """
        cost = np.zeros(self.columns + 1)
        cost[-1] = -1.0
        above = np.zeros((len(raised), self.columns + 1))
        for r, g in enumerate(raised):
            above[r, g], above[r, -1] = -1.0, self.groups[g].weight
        within = np.hstack([self.within, np.zeros((len(self.limits), 1))])
        bounds = [(rate / self.scale * (1 - 1e-9), None) for rate in least]
        bounds += [(0, None)] * (self.columns + 1 - len(least))
        solved = linprog(
            cost,
            A_ub=np.vstack([within, above]),
            b_ub=[*self.limits, *[0.0] * len(raised)],
            A_eq=np.hstack([self.equal, np.zeros((len(self.equal), 1))]),
            b_eq=np.zeros(len(self.equal)),
            bounds=bounds,
            method="highs",
        )
        assert solved.status == 0, solved.message
        return float(-solved.fun) * self.scale


def best_rates(topology: Any, groups: Sequence[Group]) -> list[float]:
    """Return the rates of groups of two devices or more.

    Rates grow together in proportion to the weights. A group stops when its rate cannot grow further while no other
    rate decreases; this is tested for each group with a program of its own.
    """
    program = _Rates(topology, groups)
    free, rates = list(range(len(groups))), [0.0] * len(groups)
    while free:
        level = program.most(free, rates)
        for g in free:
            rates[g] = max(rates[g], level * groups[g].weight)
        stopped = [g for g in free if program.most([g], rates) <= level * (1 + 1e-6)]
        assert stopped, "a level stops at least one group"
        free = [g for g in free if g not in stopped]
    return rates
