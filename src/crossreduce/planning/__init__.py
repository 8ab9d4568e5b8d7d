"""Planning: from a request to a verified schedule.

Input: a collective, devices, bytes, perhaps a topology and an algorithm. Output: a ``Plan`` or a ``Schedule`` that
``verify`` accepted. Planning depends on no array, file (unless it is given as the topology) or clock, so equal requests
give equal schedules everywhere.
``algorithms/equal_links.py`` plans without a topology; ``algorithms/``, ``hierarchies.py`` and ``forest.py`` with one.
"""

from .algorithms.equal_links import (
    direct,
    halving_doubling,
    hierarchical_copy,
    one_device,
    one_shot,
    recursive_doubling,
    ring,
)
from .groups.groups import GroupsPlan, mesh_groups, plan_groups
from .groups.groups_bound import GroupNeed, GroupsBound, RateLevel
from .groups.separate_plans import SeparatePlans
from .optimal.bound import bound
from .optimal.bounds.certificate import COLLECTIVES, Bound, Cut
from .plans import Plan, plan
from .requests import Request
from .schedules import NAMES, PLANNERS, REGISTRY, choose, schedule_for

__all__ = [
    "COLLECTIVES",
    "NAMES",
    "PLANNERS",
    "REGISTRY",
    "Bound",
    "Cut",
    "GroupNeed",
    "GroupsBound",
    "GroupsPlan",
    "Plan",
    "RateLevel",
    "Request",
    "SeparatePlans",
    "bound",
    "choose",
    "direct",
    "halving_doubling",
    "hierarchical_copy",
    "mesh_groups",
    "one_device",
    "one_shot",
    "plan",
    "plan_groups",
    "recursive_doubling",
    "ring",
    "schedule_for",
]
