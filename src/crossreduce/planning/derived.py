"""Reduce-scatters and all-gathers made from all-reduces: what each device needs of it, and that backwards.

In: a schedule.  Out: another one, with the parts in the devices' order.
"""

from __future__ import annotations

from ..schedule import Chunk, Route, Schedule, Step


def reduce_scatter(schedule: Schedule) -> Schedule:
    """Keep of an all-reduce the steps that bring each chunk to one device, equally many to each.

    Chunks go where they first become whole, if that is so; else to the devices in turn.

    >>> from crossreduce.planning import direct
    >>> print(reduce_scatter(direct(["cpu:0", "cpu:1"])))
    reduce_scatter direct: 2 devices, 2 chunks, 1 round, 2 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 1: cpu:1 <- cpu:0 + cpu:1
    """
    n, count = len(schedule.devices), len(schedule.chunks)
    owners = _whole_at(schedule)
    if sorted(owners) != sorted(k * n // count for k in range(count)):
        owners = [k * n // count for k in range(count)]
    order = sorted(range(count), key=lambda chunk: owners[chunk])
    place = {chunk: k for k, chunk in enumerate(order)}
    needed = [{owner} for owner in owners]
    kept: list[list[Step]] = []
    for steps in reversed(schedule.rounds):
        wanted = [step for step in steps if step.dst in needed[step.chunk]]
        for step in wanted:
            needed[step.chunk].discard(step.dst)
        for step in wanted:
            needed[step.chunk].update(step.srcs)
        kept.append([Step(place[chunk], dst, srcs) for chunk, dst, srcs in wanted])
    chunks = [Chunk(schedule.chunks[chunk].share, tuple(range(n)), (owners[chunk],)) for chunk in order]
    routes = [Route(place[route.chunk], *route[1:]) for route in schedule.routes]
    return _made(schedule, "reduce_scatter", chunks, [steps for steps in reversed(kept) if steps], routes)


def all_gather(scattered: Schedule) -> Schedule:
    """Turn a reduce-scatter round: whoever gave to a device now gets from it."""
    held = [{chunk.destinations[0]} for chunk in scattered.chunks]
    rounds: list[list[Step]] = []
    for steps in reversed(scattered.rounds):
        now = [Step(chunk, src, (dst,)) for chunk, dst, srcs in steps for src in srcs if src not in held[chunk]]
        for step in now:
            held[step.chunk].add(step.dst)
        rounds.append(now)
    everyone = tuple(range(len(scattered.devices)))
    chunks = [Chunk(chunk.share, chunk.destinations, everyone) for chunk in scattered.chunks]
    routes = [Route(chunk, dst, src, through[::-1]) for chunk, src, dst, through, _ in scattered.routes]
    return _made(scattered, "all_gather", chunks, [steps for steps in rounds if steps], routes)


def _made(
    schedule: Schedule, collective: str, chunks: list[Chunk], rounds: list[list[Step]], routes: list[Route]
) -> Schedule:
    assert all(route.round is None for route in routes), "the trees these are made from go back as they came"
    used = {(chunk, src, dst) for steps in rounds for chunk, dst, srcs in steps for src in srcs}
    return Schedule(
        collective,
        schedule.algorithm,
        schedule.devices,
        tuple(chunks),
        tuple(map(tuple, rounds)),
        routes=tuple(route for route in routes if route[:3] in used),
    )


def _whole_at(schedule: Schedule) -> list[int]:
    """Return for each chunk the device that first holds all contributions; where there is but one, its source."""
    held = {(c, source): 1 << source for c, chunk in enumerate(schedule.chunks) for source in chunk.sources}
    everyone = [sum(1 << source for source in chunk.sources) for chunk in schedule.chunks]
    owners = [chunk.sources[0] if len(chunk.sources) == 1 else -1 for chunk in schedule.chunks]
    for steps in schedule.rounds:
        made = {}
        for chunk, dst, srcs in steps:
            made[chunk, dst] = 0
            for src in srcs:
                made[chunk, dst] |= held.get((chunk, src), 0)
            if owners[chunk] < 0 and made[chunk, dst] == everyone[chunk]:
                owners[chunk] = dst
        held.update(made)
    return owners
