"""What happens to a checked batch: packing, planning, execution, unpacking.

In: ``Job``s, values that were checked and the devices that need their results.  Out: ``Mirrored``s. This is
the line of ARCHITECTURE.md as functions; the ops above it only choose its arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from .backends import Array, Backend, Numbers, Sparse, backend_of
from .checks import Checked
from .devices import locate
from .execute import Held, execute, ranges
from .ops import ReduceOp
from .packing import Buffer, Packing, cuts, itemsize, layout
from .planning import ROOTED, choose, planned, planned_for
from .schedule import Schedule
from .topology import Topology
from .values import Mirrored, PerReplica

_LOG: Final = logging.getLogger("crossreduce")


class Job(NamedTuple):
    """A checked value and where its result goes."""

    value: Checked
    destinations: tuple[str, ...]


def reduce_batch(
    op: ReduceOp,
    jobs: Sequence[Job],
    packing: Packing,
    algorithm: str,
    topology: Topology | None,
    root: str | None,
) -> list[Mirrored]:
    """Reduce a batch: values that go the same way are packed and planned together.

    All of it is planned before any of it runs, so that what cannot be planned moves nothing.

    Args:
      op: what combines the components.
      jobs: the batch.
      packing: how tensors share buffers.
      algorithm: a planner's name, or "auto".
      topology: the links that may be used; ``None``: all.
      root: the device on which sparse values are listed and ``one_device`` reduces; ``None``: the first
        destination.
    Returns:
      The results, in the order of the jobs.
    Raises:
      PlanError: the topology has no way for some of the data.
    """
    ways: dict[tuple[Backend, tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for number, (value, destinations) in enumerate(jobs):
        if not value.sparse:
            ways.setdefault((value.backend, value.devices, destinations), []).append(number)
    runs: list[tuple[list[Segment], Buffer, list[int]]] = []
    for (backend, sources, destinations), members in ways.items():
        for buffer in layout(tuple(jobs[number].value.spec for number in members), packing):
            segments = _plan(backend, algorithm, sources, destinations, buffer, topology, root)
            runs.append((segments, buffer, [members[span.tensor] for span in buffer.spans]))
    results: list[Any] = [
        _reduce_sparse(value, destinations, root) if value.sparse else None for value, destinations in jobs
    ]
    for segments, buffer, numbers in runs:
        values = [jobs[number].value for number in numbers]
        tensors = _run(segments, values[0].backend, op, [value.arrays for value in values], buffer, values[0].numbers)
        for number, components in zip(numbers, tensors, strict=True):
            results[number] = Mirrored.on(components, jobs[number].destinations)
    return results


def reduce_to_one(op: ReduceOp, jobs: Sequence[Job], root: str | None) -> list[Mirrored]:
    """Reduce each value on the root, or else on its first destination."""
    return [reduce_batch(op, [job], Packing(), "one_device", None, root or job.destinations[0])[0] for job in jobs]


class Segment(NamedTuple):
    """A range of a buffer's elements and the schedule that reduces it."""

    schedule: Schedule
    start: int
    stop: int


def _plan(
    backend: Backend,
    algorithm: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    buffer: Buffer,
    topology: Topology | None,
    root: str | None,
) -> list[Segment]:
    """Plan one buffer: its packs' trees, with roots that rotate from ``buffer.first`` on.

    The trees repeat after as many packs as there are devices (at once, where they have no root), so
    further packs take the same schedule again: a plan does not grow with their number.
    """
    members = len({*sources, *destinations})
    first = buffer.first % members
    size = buffer.size or 0
    nbytes = size * itemsize(buffer.dtype)
    if algorithm == "auto" and topology is None:
        algorithm = choose(sources, destinations, nbytes)
    if buffer.size is None and algorithm not in ROOTED:
        algorithm = "one_device"  # a size that tracing leaves open cannot be cut into chunks
    period = members if algorithm in ROOTED else 1
    segments = []
    for pack in range(0, buffer.packs, period):
        packs = min(period, buffer.packs - pack)
        start, stop = pack * size // buffer.packs, (pack + packs) * size // buffer.packs
        if topology is None:
            schedule = planned(algorithm, sources, destinations, packs, first, root)
        else:
            part = nbytes * packs // buffer.packs
            schedule = planned_for(topology, algorithm, sources, destinations, part, packs, first, root)
        segments.append(Segment(schedule, start, stop))
    for schedule in {segment.schedule for segment in (segments[0], segments[-1])}:
        if topology is not None:
            backend.require(schedule.devices)  # a topology may lead through devices that no value is on
        if _LOG.isEnabledFor(logging.INFO):
            say_once(f"new plan: {schedule.head}; devices {', '.join(schedule.devices)}")
    return segments


def _run(
    segments: list[Segment],
    backend: Backend,
    op: ReduceOp,
    arrays: list[list[Array]],
    buffer: Buffer,
    numbers: Numbers,
) -> list[tuple[Array, ...]]:
    """Pack, execute and unpack one buffer.

    Args:
      segments: from ``_plan``.
      arrays: for each of the buffer's spans the components, in the order of the schedule's sources.
    Returns:
      For each span the result's components, in the order of the schedule's destinations.
    """
    schedule = segments[0].schedule
    names = [schedule.devices[source] for source in schedule.chunks[0].sources]
    if buffer.size is None:
        flats = [backend.copy(x, name) for x, name in zip(arrays[0], names, strict=True)]
        held = execute(schedule, backend, op, flats, None, numbers)
        return [tuple(parts[0] if fresh else backend.own(parts[0]) for parts, fresh in held)]
    flats = [
        backend.pack([backend.copy(components[replica], name) for components in arrays])
        for replica, name in enumerate(names)
    ]
    if len(segments) == 1:
        held = execute(schedule, backend, op, flats, buffer.size, numbers)
    else:
        held = [Held([], False) for _ in schedule.chunks[0].destinations]
        for schedule, start, stop in segments:
            parts_of = execute(
                schedule, backend, op, [backend.part(flat, start, stop) for flat in flats], stop - start, numbers
            )
            for whole, part in zip(held, parts_of, strict=True):
                whole.parts.extend(part.parts)
    del flats
    where = cuts(
        buffer.spans,
        tuple(
            (base + start, base + stop)
            for schedule, base, end in segments
            for _, start, stop in ranges(schedule, end - base)
        ),
    )
    unpacked = [backend.unpack(parts, where, fresh) for parts, fresh in held]
    return list(zip(*unpacked, strict=True))


def _reduce_sparse(value: Checked, destinations: tuple[str, ...], root: str | None) -> Mirrored:
    """List all replicas' slices together on one device and copy them to the destinations."""
    backend, main = value.backend, root or destinations[0]
    parts: list[Sparse] = [x for x in value.arrays if isinstance(x, Sparse)]
    values = backend.concat([backend.copy(x.values, main) for x in parts], 0)
    indices = backend.concat([backend.copy(x.indices, main) for x in parts], 0)
    values = backend.finish(values, value.numbers)
    shape = next((x.shape for x in parts if x.shape is not None), None)
    whole = Sparse(parts[0].kind, values, indices, shape)
    return Mirrored.on(tuple(_sparse_copy(backend, whole, device) for device in destinations), destinations)


def _sparse_copy(backend: Backend, x: Sparse, device: str) -> Any:
    values, indices = (backend.own(backend.copy(part, device)) for part in (x.values, x.indices))
    return backend.sparse(x._replace(values=values, indices=indices))


def broadcast_array(tensor: Any, destinations: tuple[str, ...], algorithm: str, topology: Topology | None) -> Mirrored:
    """Copy one array to all destinations along a schedule whose only source is the array's device."""
    backend = backend_of(tensor)
    x = backend.array(tensor)
    if isinstance(x, Sparse):
        return Mirrored.on(tuple(_sparse_copy(backend, x, device) for device in destinations), destinations)
    source = PerReplica([tensor]).devices
    if locate(tensor) in (None, "cpu") and destinations[0].startswith("cpu:"):
        source = destinations[:1]  # host memory is every cpu:k at once, so the array is there already
    spec = backend.spec(x)
    (buffer,) = layout((spec,), Packing())
    segments = _plan(backend, algorithm, source, destinations, buffer, topology, None)
    numbers = Numbers(spec.dtype, spec.dtype, spec.dtype, 1)
    (components,) = _run(segments, backend, ReduceOp.SUM, [[x]], buffer, numbers)
    return Mirrored.on(components, destinations)


@lru_cache(maxsize=4096)
def say_once(text: str) -> None:
    """Log a text at INFO, the first time it is to be said."""
    _LOG.info(text)
