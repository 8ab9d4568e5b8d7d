"""Derive reduce-scatters from all-reduces, by removing steps that they do not need, and reverse them to all-gathers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import reduce
from operator import or_

from ..schedule import Chunk, GeneratedSchedule, Schedule, Step, live_rounds


def reduce_scatter(schedule: Schedule) -> Schedule:
    """Return the reduce-scatter that consists of the steps of an all-reduce which bring each chunk to its owner.

    Every device owns the same number of chunks. The owner of a chunk is the device on which it is first complete, if
    every device then has the same number. Otherwise each device owns consecutive chunks. Chunks are sorted by owners.

    >>> from crossreduce.planning import direct
    >>> print(reduce_scatter(direct(["cpu:0", "cpu:1"])))
    reduce_scatter direct: 2 devices, 2 chunks, 1 round, 2 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 1: cpu:1 <- cpu:0 + cpu:1
    """
    if isinstance(schedule, GeneratedSchedule):
        return _generated_scatter(schedule) or reduce_scatter(schedule.explicit)
    n, count = len(schedule.devices), len(schedule.chunks)
    owners = _first_complete(schedule)
    consecutive = [chunk * n // count for chunk in range(count)]
    return _scatter(schedule, owners if sorted(owners) == consecutive else consecutive)


def _scatter(schedule: Schedule, owners: list[int]) -> Schedule:
    """Return the reduce-scatter with the steps that bring each chunk to its owner. Chunks are sorted by owners."""
    n, count = len(schedule.devices), len(schedule.chunks)
    order = sorted(range(count), key=lambda chunk: owners[chunk])
    place = {chunk: k for k, chunk in enumerate(order)}
    everyone = tuple(range(n))
    scattered = replace(
        schedule,
        collective="reduce_scatter",
        chunks=tuple(Chunk(schedule.chunks[chunk].share, everyone, (owners[chunk],)) for chunk in order),
        rounds=tuple(tuple(Step(place[chunk], dst, srcs) for chunk, dst, srcs in steps) for steps in schedule.rounds),
        pieces=1,
        routes=tuple(route._replace(chunk=place[route.chunk]) for route in schedule.routes),
    )
    return _set_rounds(scattered, live_rounds(scattered))


def _generated_scatter(schedule: GeneratedSchedule) -> GeneratedSchedule | None:
    """Return the generated reduce-scatter whose base is derived from the base of an all-reduce.

    Return ``None`` if its devices would own different numbers of chunks.
    """
    owners = _first_complete(schedule.base)
    counts = Counter(device for owner in owners for device in schedule.symmetry.images(owner))
    if len(counts) < len(schedule.devices) or len({*counts.values()}) > 1:
        return None
    return GeneratedSchedule(_scatter(schedule.base, owners), schedule.symmetry, schedule.nodes, schedule.in_order)


def all_gather(scattered: Schedule) -> Schedule:
    """Return the all-gather that is a reduce-scatter backwards: a device receives from those to which it sent."""
    if isinstance(scattered, GeneratedSchedule):
        base = all_gather(scattered.base)
        return GeneratedSchedule(base, scattered.symmetry, scattered.nodes, scattered.in_order)
    complete = [{chunk.destinations[0]} for chunk in scattered.chunks]  # for each chunk, the devices that have it
    rounds: list[list[Step]] = []
    for steps in reversed(scattered.rounds):
        copies = [Step(c, src, (dst,)) for c, dst, srcs in steps for src in srcs if src not in complete[c]]
        for copy in copies:
            complete[copy.chunk].add(copy.dst)
        rounds.append(copies)
    everyone = tuple(range(len(scattered.devices)))
    chunks = tuple(Chunk(chunk.share, chunk.destinations, everyone) for chunk in scattered.chunks)
    routes = [route._replace(src=route.dst, dst=route.src, through=route.through[::-1]) for route in scattered.routes]
    gathered = replace(scattered, collective="all_gather", chunks=chunks, rounds=(), routes=tuple(routes))
    return _set_rounds(gathered, rounds)


def _set_rounds(schedule: Schedule, rounds: list[list[Step]]) -> Schedule:
    """Return the schedule with these rounds, except empty ones, and only the routes that they use."""
    assert all(route.round is None for route in schedule.routes), "trees use the same routes in both directions"
    used = {(chunk, src, dst) for steps in rounds for chunk, dst, srcs in steps for src in srcs}
    kept = tuple(route for route in schedule.routes if route[:3] in used)
    return replace(schedule, rounds=tuple(tuple(steps) for steps in rounds if steps), routes=kept)


def _first_complete(schedule: Schedule) -> list[int]:
    """Return for each chunk the device that first stores all contributions: the source, if there is only one."""
    # For each chunk and device, the sources whose contributions the stored value contains, as bits.
    contributions = {(c, source): 1 << source for c, chunk in enumerate(schedule.chunks) for source in chunk.sources}
    everyone = [sum(1 << source for source in chunk.sources) for chunk in schedule.chunks]
    owners = [chunk.sources[0] if len(chunk.sources) == 1 else -1 for chunk in schedule.chunks]
    for steps in schedule.rounds:
        stored = {}  # at the end of the round
        for chunk, dst, srcs in steps:
            stored[chunk, dst] = reduce(or_, [contributions.get((chunk, src), 0) for src in srcs])
            if owners[chunk] < 0 and stored[chunk, dst] == everyone[chunk]:
                owners[chunk] = dst
        contributions.update(stored)
    return owners
