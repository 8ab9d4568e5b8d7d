"""Planning: from a request to a verified schedule.

Input: a collective, devices, bytes, perhaps a topology and an algorithm. Output: a ``Plan`` or a ``Schedule`` that
``verify`` accepted. Planning depends on no array, file (unless it is given as the topology) or clock, so equal requests
give equal schedules everywhere.
``planners.py`` plans without a topology; ``hierarchies.py``, ``rings.py`` and ``forest.py`` plan with one.
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
