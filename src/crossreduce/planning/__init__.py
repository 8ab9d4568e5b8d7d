"""Planning: from a request to a verified schedule.

Input: a collective, devices, bytes, perhaps a topology and an algorithm. Output: a ``Plan`` or a ``Schedule`` that
``verify`` accepted. Planning uses no arrays, I/O or clock, so the same request gives the same schedule everywhere.

Data flows through the files in this order: ``plans.py`` or ``schedules.py`` make a ``Request`` (``request.py``),
``search.py`` compares the algorithms of ``registry.py``, and ``bounds/`` proves how good the result is. ``trees/``
serves the algorithms, ``derived.py`` makes reduce-scatters and all-gathers, ``explain.py`` describes plans.
"""

from .algorithms.direct import direct
from .algorithms.halving_doubling import halving_doubling
from .algorithms.hierarchical_copy import hierarchical_copy
from .algorithms.one_device import one_device
from .algorithms.one_shot import one_shot
from .algorithms.recursive_doubling import recursive_doubling
from .algorithms.ring import ring
from .bounds.bound import bound
from .bounds.certificate import COLLECTIVES, Bound, Cut
from .plans import Plan, plan
from .registry import NAMES, PLANNERS, REGISTRY
from .request import Request
from .schedules import choose, schedule_for

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
