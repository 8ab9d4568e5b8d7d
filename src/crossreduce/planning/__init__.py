"""Planning: from a request to a verified schedule.

Input: a collective, devices, bytes, perhaps a topology and an algorithm. Output: a ``Plan`` or a ``Schedule`` that
``verify`` accepted. Planning uses no arrays, I/O or clock, so the same request gives the same schedule everywhere.

``plans.py`` has ``plan``; ``schedules.py`` has the registry of algorithms and finds the fastest schedule of a
``Request``; ``planners.py`` plans without a topology, ``hierarchies.py``, ``rings.py`` and ``forest.py`` with one;
``derived.py`` makes reduce-scatters and all-gathers; ``bounds/`` proves bounds; ``explain.py`` describes plans.
"""

from .bounds.bound import bound
from .bounds.certificate import COLLECTIVES, Bound, Cut
from .planners import (
    Request,
    direct,
    halving_doubling,
    hierarchical_copy,
    one_device,
    one_shot,
    recursive_doubling,
    ring,
)
from .plans import Plan, plan
from .schedules import NAMES, PLANNERS, REGISTRY, choose, schedule_for

__all__ = [
    "COLLECTIVES",
    "NAMES",
    "PLANNERS",
    "REGISTRY",
    "Bound",
    "Cut",
    "Plan",
    "Request",
    "bound",
    "choose",
    "direct",
    "halving_doubling",
    "hierarchical_copy",
    "one_device",
    "one_shot",
    "plan",
    "recursive_doubling",
    "ring",
    "schedule_for",
]
