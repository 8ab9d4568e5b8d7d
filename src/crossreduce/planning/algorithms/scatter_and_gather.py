"""Derive reduce-scatters from all-reduces, by removing steps that they do not need, and reverse them to all-gathers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...schedule import Chunk, GeneratedSchedule, Route, Schedule, Step
from ...schedule.schedule import live_steps


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
    chunks = [Chunk(schedule.chunks[chunk].share, everyone, (owners[chunk],)) for chunk in order]
    rounds = [[Step(place[chunk], dst, srcs) for chunk, dst, srcs in steps] for steps in schedule.rounds]
    routes = [route._replace(chunk=place[route.chunk]) for route in schedule.routes]
    return _derived(schedule, "reduce_scatter", chunks, live_steps(chunks, rounds), routes)


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
    chunks = [Chunk(chunk.share, chunk.destinations, everyone) for chunk in scattered.chunks]
    routes = [route._replace(src=route.dst, dst=route.src, through=route.through[::-1]) for route in scattered.routes]
    return _derived(scattered, "all_gather", chunks, rounds, routes)


def _derived(
    schedule: Schedule, collective: str, chunks: Sequence[Chunk], rounds: list[list[Step]], routes: Sequence[Route]
) -> Schedule:
    """Return a schedule of another collective. Empty rounds, and routes that no round uses, are left out."""
    assert all(route.round is None for route in routes), "trees use the same routes in both directions"
    if routes:
        used = {(chunk, src, dst) for steps in rounds for chunk, dst, srcs in steps for src in srcs}
        routes = [route for route in routes if route[:3] in used]
    listed = tuple(tuple(steps) for steps in rounds if steps)
    return Schedule(collective, schedule.algorithm, schedule.devices, tuple(chunks), listed, routes=tuple(routes))


def _first_complete(schedule: Schedule) -> list[int]:
    """Return for each chunk the device that first stores all contributions: the source, if there is only one."""
    # For each chunk and device, the sources whose contributions the stored value contains, as bits.
    bits = [{source: 1 << source for source in chunk.sources} for chunk in schedule.chunks]
    everyone = [sum(values.values()) for values in bits]
    owners = [chunk.sources[0] if len(chunk.sources) == 1 else -1 for chunk in schedule.chunks]
    for steps in schedule.rounds:
        stored = []  # at the end of the round
        for chunk, dst, srcs in steps:
            if owners[chunk] < 0:
                values, total = bits[chunk], 0
                for src in srcs:
                    total |= values.get(src, 0)
                stored.append((chunk, dst, total))
        for chunk, dst, total in stored:
            bits[chunk][dst] = total
            if owners[chunk] < 0 and total == everyone[chunk]:
                owners[chunk] = dst
    return owners
