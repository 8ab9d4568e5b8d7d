"""The operations of a schedule that hosts queue, one after another, and the seconds that this takes.

Input: a ``Schedule``. Output: numbers of operations, and a ``Queue`` for each host, for any number of pieces.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..devices import parse
from .costs import OPERATION_S
from .generated_schedule import GeneratedSchedule
from .schedule import Schedule, live_rounds


class QueuedOperation(NamedTuple):
    """A device's operations with the same number of operands: one in every tick with one of these rounds."""

    rounds: tuple[int, ...]
    number: int  # of such operations, on devices of the same host and kind


def queued_operations(schedule: Schedule) -> dict[str, tuple[QueuedOperation, ...]]:
    """Return the operations of a schedule by queue, as in ``Traffic.hosts``."""
    return _queued_operations(schedule.cut_into(1))


@lru_cache(maxsize=256)
def _queued_operations(schedule: Schedule) -> dict[str, tuple[QueuedOperation, ...]]:
    base, orbits = schedule, tuple(range(len(schedule.devices)))
    if isinstance(schedule, GeneratedSchedule):  # every device of an orbit has the operations of all others
        base, orbits = schedule.base, schedule.symmetry.orbits[: len(schedule.devices)]
    of_orbit: dict[tuple[int, int], dict[int, None]] = {}
    for r, steps in enumerate(live_rounds(base)):
        for _, dst, srcs in steps:
            of_orbit.setdefault((orbits[dst], len(srcs)), {})[r] = None
    members: defaultdict[int, list[int]] = defaultdict(list)
    for device, orbit in enumerate(orbits):
        members[orbit].append(device)
    rounds_of = {(device, count): rounds for (orbit, count), rounds in of_orbit.items() for device in members[orbit]}
    by_queue: dict[str, Counter[tuple[int, ...]]] = {}
    for (dst, _), rounds in rounds_of.items():
        if where := queue_name(schedule.devices[dst]):
            by_queue.setdefault(where, Counter())[tuple(rounds)] += 1
    return {where: tuple(QueuedOperation(*one) for one in counts.items()) for where, counts in by_queue.items()}


def operation_count(schedule: Schedule) -> int:
    """Return the number of operations in all ticks."""
    pieces = schedule.pieces
    return sum(
        launch.number * (pieces + sum(min(b - a, pieces) for a, b in pairwise(launch.rounds)))
        for listed in queued_operations(schedule).values()
        for launch in listed
    )


class Queue(NamedTuple):
    """The operations that one host queues, one after another, and the seconds in which it queues each kind once."""

    steps: frozenset[str]  # the entries of ``Traffic.hosts`` whose operations it queues
    launches: tuple[tuple[QueuedOperation, float], ...]


def queues(schedule: Schedule, operation_s: float | None) -> dict[str, Queue]:
    """Return the queue of each host whose operations cost time, by the host's name."""
    by_host: defaultdict[str, list[tuple[str, QueuedOperation, float]]] = defaultdict(list)
    if not operation_s and not (operation_s is None and any("cuda:" in device for device in schedule.devices)):
        return {}  # without costs, the operations need not be counted
    for where, every in queued_operations(schedule).items():
        host, _, kind = where.rpartition("/")
        cost = operation_s if operation_s is not None else OPERATION_S if kind == "cuda" else 0.0
        if cost:
            by_host[host] += [(where, launch, launch.number * cost) for launch in every]
    if isinstance(schedule, GeneratedSchedule):  # hosts with the same operations have the same times: one is enough
        alike: dict[tuple[tuple[QueuedOperation, float], ...], list[str]] = {}
        for host, entries in by_host.items():
            alike.setdefault(tuple((launch, cost) for _, launch, cost in entries), []).append(host)
        return {
            hosts[0]: Queue(frozenset(where for host in hosts for where, *_ in by_host[host]), launches)
            for launches, hosts in alike.items()
        }
    return {
        host: Queue(frozenset(where for where, *_ in entries), tuple((launch, cost) for _, launch, cost in entries))
        for host, entries in by_host.items()
    }


def queue_name(device: str) -> str:
    """Return the name of the queue of a device's operations: its host and kind; "": a switch, which queues nothing."""
    if ":" not in device:
        return ""
    parsed = parse(device)
    return f"{parsed.host}/{parsed.kind}"
