"""The fastest plan that a format can hold: runtimes limit peers, steps and threadblocks, so some plans do not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ..errors import PlanError
from ..planning import REGISTRY, Plan
from ..planning.plans import plan_request


class Fitting(NamedTuple):
    """A plan with its text in a format, and which faster plan does not fit and why ("": it is the fastest one)."""

    plan: Plan
    text: str
    refused: str


def fitting(best: Plan, write: Callable[[Plan], str]) -> Fitting:
    """Return a plan's text, or that of the fastest plan of another algorithm that can be written.

    The other plans are for the same request. Algorithms that cannot plan it are left out, as are those that ``"auto"``
    does not try for so many devices.

    Raises:
      PlanError: none can be written; the error is that of ``best``.

    >>> from crossreduce import Topology, plan
    >>> from crossreduce.export import EXPORTERS
    >>> star = Topology.star(24, gb_per_s=450, latency_s=1e-6)
    >>> best = plan(star, "all_reduce", "16 MiB", operation_s=0, granularity=0.02)
    >>> found = fitting(best, EXPORTERS["mscclpp"].text)
    >>> print(f"{found.plan.algorithm}; {found.refused}")  # doctest: +ELLIPSIS
    halving_doubling; the plan of direct is faster, but does not fit: MSCCL++ allows ...
    """
    try:
        return Fitting(best, write(best), "")
    except PlanError as error:
        first = error
    others: dict[object, Plan] = {}
    for algorithm, entry in REGISTRY.items():
        if entry.most_devices is None or len(best.request.members) <= entry.most_devices:
            with suppress(PlanError):
                made = plan_request(best.request._replace(algorithm=algorithm))
                others.setdefault(made.schedule, made)
    others.pop(best.schedule, None)
    for other in sorted(others.values(), key=lambda other: other.seconds):
        with suppress(PlanError):
            faster = " is faster, but" if best.seconds < other.seconds * (1 - 1e-9) else ""
            reason = str(first).partition("\n")[0]
            return Fitting(other, write(other), f"the plan of {best.algorithm}{faster} does not fit: {reason}")
    raise first
