"""The fastest plan that a format can hold: runtimes limit peers, steps and threadblocks, so some plans do not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ..errors import PlanError
from ..planning import REGISTRY, Plan, plan


class Fitting(NamedTuple):
    """A plan with its text in a format, and which faster plan does not fit and why ("": it is the fastest one)."""

    plan: Plan
    text: str
    refused: str


def fitting(best: Plan, write: Callable[[Plan], str]) -> Fitting:
    """Return a plan's text, or that of the fastest plan of another algorithm that can be written.

    Raises:
      PlanError: none can be written; the error is that of ``best``.

    >>> from crossreduce import Topology
    >>> from crossreduce.export import EXPORTERS
    >>> star = Topology.star(24, gb_per_s=450)
    >>> best = plan(star, "all_reduce", "1 MiB", operation_s=0, granularity=0.02)
    >>> found = fitting(best, lambda made: str(EXPORTERS["mscclpp"].write(made)))
    >>> print(f"{found.plan.algorithm}; {found.refused}")  # doctest: +ELLIPSIS
    ring; the plan of direct is faster, but does not fit: MSCCL++ allows ...
    """
    try:
        return Fitting(best, write(best), "")
    except PlanError as error:
        first = error
    others = []
    for algorithm in REGISTRY:
        with suppress(PlanError):
            others.append(_by_name(best, algorithm))
    for other in sorted(others, key=lambda other: other.seconds):
        with suppress(PlanError):
            reason = str(first).partition("\n")[0]
            return Fitting(other, write(other), f"the plan of {best.algorithm} is faster, but does not fit: {reason}")
    raise first


def _by_name(like: Plan, algorithm: str) -> Plan:
    request = like.request
    assert request.topology is not None
    return plan(
        request.topology,
        like.collective,
        like.nbytes,
        algorithm,
        root=like.root,
        costs=request.costs,
        granularity=request.granularity,
    )
