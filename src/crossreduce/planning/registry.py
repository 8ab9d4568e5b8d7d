"""The registry of algorithms. Adding one takes its file in ``algorithms/``, a line here, and the docs.

Input: a name. Output: its planners and properties. ``plan``, the ops, the command line and the tables of the tests all
take the algorithms from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..errors import PlanError, shown
from ..schedule import Schedule
from .algorithms.direct import direct, direct_schedule
from .algorithms.forest import forest_schedules
from .algorithms.halving_doubling import halving_doubling, halving_doubling_schedule
from .algorithms.hierarchical_copy import hierarchical_copy, hierarchical_copy_schedules
from .algorithms.one_device import one_device, one_device_schedules
from .algorithms.one_shot import one_shot, one_shot_schedule
from .algorithms.recursive_doubling import recursive_doubling, recursive_doubling_schedule
from .algorithms.ring import ring, ring_schedules
from .request import Participants, Request

Schedules = Callable[[Request], list[Schedule]]

MOST_DEVICES: Final = 128  # beyond it, a schedule with n**2 steps has more than 16,384 of them
MOST_TREES: Final = 256  # beyond it, packing trees takes minutes


class Algorithm(NamedTuple):
    """An algorithm.

    Args:
      schedules: returns the schedules of a request for any number of bytes, at least one, or raises PlanError. If there
        are several, the fastest depends on the number of bytes.
      planner: the public function, which plans between devices that are all linked equally; ``None``: it needs a
        topology.
      has_root: each pack has a root, which rotates over the devices or is given by the request.
      scatter: the packs (0: one per device) and the ``first`` of the all-reduce from which a reduce-scatter is derived;
        ``None``: ``schedules`` plans reduce-scatters and all-gathers itself.
      most_devices: the number of devices up to which "auto" considers it; ``None``: any number.
    """

    schedules: Schedules
    planner: Callable[..., Schedule] | None
    has_root: bool = False
    scatter: tuple[int, int] | None = (0, 0)
    most_devices: int | None = MOST_DEVICES


def _one(schedule: Callable[[Participants], Schedule]) -> Schedules:
    """Return the planner of requests for an algorithm that uses no topology."""
    return lambda request: [schedule(request.participants)]


REGISTRY: Final[dict[str, Algorithm]] = {
    "one_device": Algorithm(one_device_schedules, one_device, has_root=True, most_devices=None),
    "hierarchical_copy": Algorithm(hierarchical_copy_schedules, hierarchical_copy, has_root=True, most_devices=None),
    "ring": Algorithm(ring_schedules, ring, scatter=(1, 1)),  # the last device of chunk k is then device k
    "halving_doubling": Algorithm(_one(halving_doubling_schedule), halving_doubling),
    "recursive_doubling": Algorithm(_one(recursive_doubling_schedule), recursive_doubling),
    "direct": Algorithm(_one(direct_schedule), direct, scatter=(1, 0)),
    "one_shot": Algorithm(_one(one_shot_schedule), one_shot),
    "forest": Algorithm(forest_schedules, None, scatter=None, most_devices=MOST_TREES),
}

CHOICES: Final = ("nccl", "auto")
"""Names that stand for one of the algorithms: see ``plan``."""

NAMES: Final = (*REGISTRY, *CHOICES)

PLANNERS: Final = {name: entry.planner for name, entry in REGISTRY.items() if entry.planner is not None}
"""The public planners for lists of devices; they have the same first arguments."""


def algorithm(name: str) -> Algorithm:
    """Return an algorithm of the registry.

    Raises:
      PlanError: it is not in the registry.
    """
    if name not in REGISTRY:
        raise PlanError.of("there is no such planner.", shown(name), "one of " + ", ".join(REGISTRY))
    return REGISTRY[name]
