"""The operations of a schedule that hosts queue, one after another, and the seconds that this takes.

Input: a ``Schedule``. Output: numbers of operations, and a ``Queue`` for each host, which serves any number of pieces.
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
    """Equal operations. Each runs once in every tick in which one of ``rounds`` is in progress.

    One operation covers all combinations of a device in the tick that have the same number of operands.
    """

    rounds: tuple[int, ...]
    number: int  # the number of these operations, which are on devices of the same host and kind


def queued_operations(schedule: Schedule) -> dict[str, tuple[QueuedOperation, ...]]:
    """Return the operations of a schedule, by the name of the queue (see ``queue_name``)."""
    return _queued_operations(schedule.cut_into(1))


@lru_cache(maxsize=256)
def _queued_operations(schedule: Schedule) -> dict[str, tuple[QueuedOperation, ...]]:
    base, orbits = schedule, tuple(range(len(schedule.devices)))
    if isinstance(schedule, GeneratedSchedule):  # all devices of an orbit have the same operations
        base, orbits = schedule.base, schedule.symmetry.orbits[: len(schedule.devices)]
    rounds_of_orbit: dict[tuple[int, int], dict[int, None]] = {}  # by orbit and number of operands
    for r, steps in enumerate(live_rounds(base)):
        for _, dst, srcs in steps:
            rounds_of_orbit.setdefault((orbits[dst], len(srcs)), {})[r] = None
    members: defaultdict[int, list[int]] = defaultdict(list)
    for device, orbit in enumerate(orbits):
        members[orbit].append(device)
    by_queue: dict[str, Counter[tuple[int, ...]]] = {}  # for each queue, how often each tuple of rounds occurs
    for (orbit, _), rounds in rounds_of_orbit.items():
        for device in members[orbit]:
            if queue := queue_name(schedule.devices[device]):
                by_queue.setdefault(queue, Counter())[tuple(rounds)] += 1
    return {queue: tuple(QueuedOperation(*entry) for entry in counts.items()) for queue, counts in by_queue.items()}


def operation_count(schedule: Schedule) -> int:
    """Return the number of operations in all ticks. With p pieces, round r is in progress in ticks r to r + p - 1."""
    pieces = schedule.pieces
    return sum(  # an operation runs in each tick in which any of its rounds is in progress; these ranges may overlap
        operation.number * (pieces + sum(min(after - r, pieces) for r, after in pairwise(operation.rounds)))
        for operations in queued_operations(schedule).values()
        for operation in operations
    )


class Queue(NamedTuple):
    """The operations that one host queues, one after another."""

    steps: frozenset[str]  # the queue names (see ``Traffic.hosts``) of the steps whose operations the host queues
    launches: tuple[tuple[QueuedOperation, float], ...]  # with the seconds in which all ``number`` are queued once


def queues(schedule: Schedule, operation_s: float | None) -> dict[str, Queue]:
    """Return the queue of each host whose operations cost time, by the host's name.

    For a generated schedule, one queue stands for all hosts with the same operations, under the first host's name.
    """
    by_host: defaultdict[str, list[tuple[str, QueuedOperation, float]]] = defaultdict(list)
    if not operation_s and not (operation_s is None and any("cuda:" in device for device in schedule.devices)):
        return {}  # without costs, the operations need not be counted
    for name, operations in queued_operations(schedule).items():
        host, _, kind = name.rpartition("/")
        cost = operation_s if operation_s is not None else OPERATION_S if kind == "cuda" else 0.0
        if cost:
            by_host[host] += [(name, operation, operation.number * cost) for operation in operations]
    if isinstance(schedule, GeneratedSchedule):
        alike: dict[tuple[tuple[QueuedOperation, float], ...], list[str]] = {}
        for host, entries in by_host.items():
            alike.setdefault(tuple((operation, cost) for _, operation, cost in entries), []).append(host)
        return {
            hosts[0]: Queue(frozenset(name for host in hosts for name, *_ in by_host[host]), launches)
            for launches, hosts in alike.items()
        }
    return {
        host: Queue(frozenset(name for name, *_ in entries), tuple((operation, cost) for _, operation, cost in entries))
        for host, entries in by_host.items()
    }


def queue_name(device: str) -> str:
    """Return the name of the queue for a device's operations, "host/kind", or "" for a switch, which has no queue."""
    if ":" not in device:
        return ""
    parsed = parse(device)
    return f"{parsed.host}/{parsed.kind}"
