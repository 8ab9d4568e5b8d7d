"""The fastest plan that a format can hold. Runtimes limit peers, steps and threadblocks, so some plans do not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ..errors import PlanError
from ..planning import REGISTRY, Plan
from ..planning.plans import plan_request


class Fitting(NamedTuple):
    """A plan and its text in a format."""

    plan: Plan
    text: str
    refused: str  # why the best plan does not fit; "" if this is the best plan


def fitting(best: Plan, write: Callable[[Plan], str]) -> Fitting:
    """Return ``best`` and its text, or the fastest plan for the same request that fits the format.

    ``write`` returns the text of a plan, or raises PlanError if the plan does not fit. The other plans have other
    algorithms, except for algorithms that ``"auto"`` does not try for this number of devices.

    Raises:
      PlanError: no plan fits. This is the error for ``best``.

    >>> from crossreduce import Topology, plan
    >>> from crossreduce.export import EXPORTERS
    >>> star = Topology.star(24, gb_per_s=450, latency_s=1e-6)
    >>> best = plan(star, "all_reduce", "16 MiB", operation_s=0, granularity=0.02)
    >>> fit = fitting(best, EXPORTERS["mscclpp"].text)
    >>> print(f"{fit.plan.algorithm}; {fit.refused}")  # doctest: +ELLIPSIS
    halving_doubling; the plan of direct is faster, but does not fit: MSCCL++ allows ...
    """
    try:
        return Fitting(best, write(best), "")
    except PlanError as error:
        refusal = error
    others: dict[object, Plan] = {}
    for algorithm, entry in REGISTRY.items():
        if entry.most_devices is None or len(best.request.members) <= entry.most_devices:
            with suppress(PlanError):  # the algorithm cannot plan this request
                other = plan_request(best.request._replace(algorithm=algorithm))
                others.setdefault(other.schedule, other)
    others.pop(best.schedule, None)
    for other in sorted(others.values(), key=lambda other: other.seconds):
        with suppress(PlanError):  # this plan does not fit either
            faster = " is faster, but" if best.seconds < other.seconds * (1 - 1e-9) else ""
            reason = str(refusal).partition("\n")[0]
            return Fitting(other, write(other), f"the plan of {best.algorithm}{faster} does not fit: {reason}")
    raise refusal
