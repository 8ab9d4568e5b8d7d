"""From a request to a verified schedule: choose a planner, ask it, prove the result, remember it.

In: an algorithm's name, the devices, perhaps a topology.  Out: a ``Plan`` or a ``Schedule`` that ``verify``
accepted. No arrays, no I/O, no clock: the same request gives the same schedule on every machine.
"""

from __future__ import annotations

from .bounds import Bound, Cut, bound
from .choice import PLANNERS, ROOTED, choose, planned, planned_for
from .planners import (
    direct,
    halving_doubling,
    hierarchical_copy,
    one_device,
    one_shot,
    recursive_doubling,
    ring,
)
from .plans import Plan, plan

__all__ = [
    "PLANNERS",
    "ROOTED",
    "Bound",
    "Cut",
    "Plan",
    "bound",
    "choose",
    "direct",
    "halving_doubling",
    "hierarchical_copy",
    "one_device",
    "one_shot",
    "plan",
    "planned",
    "planned_for",
    "recursive_doubling",
    "ring",
]
