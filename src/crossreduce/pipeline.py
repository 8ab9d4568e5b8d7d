"""What happens to a checked batch: packing, planning, execution, unpacking.

In: ``Job``s, values that were checked and the devices that need their results.  Out: ``Mirrored``s. This is
the line of ARCHITECTURE.md as functions; the ops above it only choose its arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

from . import kernels
from .devices import locate, parse
from .engines.host import HostPlan, Part, Piece, host_plan, run_on_host
from .engines.loop import Held, execute, ranges
from .frameworks import Array, Framework, Numbers, Sparse, framework_of
from .ops import ReduceOp
from .packing import Buffer, Packing, Span, cuts, itemsize, layout
from .planning import ROOTED, choose, planned, planned_for
from .topology import Topology
from .validation import Checked, check_apart, in_pair, shared
from .values import Mirrored, PerReplica, TensorSpec

_LOG: Final = logging.getLogger("crossreduce")
JOINED_BYTES: Final = 16384  # a tensor of more is not joined with others in host memory, where it can be left out


Job = tuple[Checked, tuple[str, ...]]  # a checked value and the devices where its result goes


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
    ways: dict[tuple[Framework, tuple[str, ...], tuple[str, ...]], list[int]] = {}
    last: Any = None
    for number, (value, destinations) in enumerate(jobs):
        if not value.sparse:
            way = value.framework, value.devices, destinations
            if way != last:  # neighbours mostly go the same way
                last, members = way, ways.setdefault(way, [])
            members.append(number)
    runs: list[tuple[Group, list[int]]] = []
    for (framework, sources, destinations), members in ways.items():
        specs = tuple(jobs[number][0].spec for number in members)
        planned_groups = groups(framework, algorithm, sources, destinations, specs, packing, topology, root)
        runs.extend((group, [members[tensor] for tensor in group.tensors]) for group in planned_groups)
    into = bool(jobs) and all(value.out is not None and value.out.devices == where for value, where in jobs)
    if into and not (len(runs) == 1 and runs[0][0].on_host):
        check_apart(jobs)  # one run of the kernels looks for itself
    if len(runs) > 1:
        kernels.threads()  # raises where the environment is wrong, before the first run
    results: list[Any] = [
        _reduce_sparse(value, destinations, root) if value.sparse else None for value, destinations in jobs
    ]
    for group, numbers in runs:
        for number, components in zip(
            numbers, _run(group, op, [jobs[number] for number in numbers], into), strict=True
        ):
            results[number] = Mirrored.on(components, jobs[number][1])
    return results


def reduce_to_one(op: ReduceOp, jobs: Sequence[Job], root: str | None) -> list[Mirrored]:
    """Reduce each value on the root, or else on its first destination."""
    by_root: dict[str, list[int]] = {}
    for number, (_, destinations) in enumerate(jobs):
        by_root.setdefault(root or destinations[0], []).append(number)
    results: list[Any] = [None] * len(jobs)
    for device, numbers in by_root.items():
        reduced = reduce_batch(op, [jobs[number] for number in numbers], Packing(), "one_device", None, device)
        for number, result in zip(numbers, reduced, strict=True):
            results[number] = result
    return results


@dataclass(frozen=True, eq=False)  # `groups` is cached, so a group is equal to itself only: a cheap key
class Group:
    """Tensors of one dtype that go the same way.

    ``tensors`` are their places in the batch, in the order in which the pieces' buffers hold them. ``on_host``: all
    devices are this host's memory, and every size is known.
    """

    tensors: tuple[int, ...]
    pieces: tuple[Piece, ...]
    destinations: tuple[str, ...]
    on_host: bool

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The tensors' shapes."""
        return [span.shape for piece in self.pieces for span in piece.buffer.spans]


@lru_cache(maxsize=1024)
def groups(
    framework: Framework,
    algorithm: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    specs: tuple[TensorSpec, ...],
    packing: Packing,
    topology: Topology | None,
    root: str | None,
) -> tuple[Group, ...]:
    """Lay out and plan a batch whose tensors have the same sources and destinations; see ``reduce_batch``."""
    by_dtype: dict[object, list[Piece]] = {}
    for buffer in layout(specs, packing):
        parts = _plan(framework, algorithm, sources, destinations, buffer, topology, root)
        alike = buffer.dtype if buffer.size is not None else len(by_dtype)
        by_dtype.setdefault(alike, []).append(Piece(parts, buffer))
    found = []
    for pieces in by_dtype.values():
        devices = {device for parts, _ in pieces for part in parts for device in part.schedule.devices}
        on_host = pieces[0].buffer.size is not None and all(_is_on_host(device) for device in devices)
        tensors = tuple(span.tensor for piece in pieces for span in piece.buffer.spans)
        found.append(Group(tensors, tuple(pieces), destinations, on_host))
    return tuple(found)


@lru_cache(maxsize=4096)
def _is_on_host(device: str) -> bool:
    place = parse(device)
    return place.kind == "cpu" and not place.host


def _plan(
    framework: Framework,
    algorithm: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    buffer: Buffer,
    topology: Topology | None,
    root: str | None,
) -> tuple[Part, ...]:
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
    parts = []
    for pack in range(0, buffer.packs, period):
        packs = min(period, buffer.packs - pack)
        start, stop = pack * size // buffer.packs, (pack + packs) * size // buffer.packs
        if topology is None:
            schedule = planned(algorithm, sources, destinations, packs, first, root)
        else:
            share = nbytes * packs // buffer.packs
            schedule = planned_for(topology, algorithm, sources, destinations, share, packs, first, root)
        parts.append(Part(schedule, start, stop))
    for schedule in {part.schedule for part in (parts[0], parts[-1])}:
        if topology is not None:
            framework.require(schedule.devices)  # a topology may lead through devices that no value is on
        if _LOG.isEnabledFor(logging.INFO):
            say_once(f"new plan: {schedule.head}; devices {', '.join(schedule.devices)}")
    return tuple(parts)


def _run(group: Group, op: ReduceOp, jobs: Sequence[Job], into: bool) -> list[tuple[Array, ...]]:
    """Reduce one group: by the kernels where it is in host memory, else by the loop.

    Args:
      jobs: those of the group, in the order of its tensors.
      into: whether results are written into the values' ``out``.
    Returns:
      For each value the result's components, in the order of the destinations; they are ``out``'s where it is used.
    Raises:
      ArgumentError: components of ``out`` share memory where they must not.
    """
    values = [value for value, _ in jobs]
    framework, numbers = values[0].framework, values[0].numbers
    outs = [value.out.values for value in values if value.out is not None] if into else []
    sources = None
    if group.on_host and not any(value.mixed for value in values):
        sources = framework.readable([value.arrays for value in values])
    if sources is not None:
        if not into:
            shapes = group.shapes
            blanks = framework.blank(shapes, numbers.result, len(group.destinations))
            plan = _host_plan(group, op, numbers, len(blanks[0]))
            run_on_host(plan, sources, framework.writable(blanks), framework.threads())
            return framework.adopt(blanks, shapes, numbers.result, group.destinations)
        plan = _host_plan(group, op, numbers, len(group.destinations))
        try:
            clash = run_on_host(plan, sources, framework.overwritable(outs), framework.threads(), apart=True)
        except (BufferError, ValueError):
            check_apart(jobs)  # says which one cannot be written into, and why
            raise
        if clash is not None:
            raise in_pair(shared(clash[1]), group.tensors[clash[0]], len(jobs))
        framework.overwritten(outs)
        return outs
    if into:
        check_apart(jobs)
    results: list[Any] = [None] * len(values)
    for (parts, buffer), members in _loose(group):
        made = _run_loop(parts, framework, op, [values[member].arrays for member in members], buffer, numbers)
        for member, components in zip(members, made, strict=True):
            results[member] = components
    if not into:
        return results
    for out, components in zip(outs, results, strict=True):
        for target, x, device in zip(out, components, group.destinations, strict=True):
            framework.write(framework.target(target, device), x)
    return outs


@lru_cache(maxsize=1024)
def _host_plan(group: Group, op: ReduceOp, numbers: Numbers, results: int) -> HostPlan:
    return host_plan(group.pieces, op, numbers, results)


@lru_cache(maxsize=1024)
def _loose(group: Group) -> tuple[tuple[Piece, tuple[int, ...]], ...]:
    """Return a group's pieces as the loop runs them, each with the places of its tensors in the group.

    In host memory a large tensor goes by itself, as joining it with others only costs copies there. What is cut into
    packs or chunks stays as it is: the cuts would be others, and so would be the order of additions.
    """
    found = []
    at = 0
    for piece in group.pieces:
        (part, *more), buffer = piece
        members = range(len(buffer.spans))
        if group.on_host and not more and len(part.schedule.chunks) == 1:
            fits = [span.size * itemsize(buffer.dtype) <= JOINED_BYTES for span in buffer.spans]
            runs = [[k for k in members if fits[k]], *([k] for k in members if not fits[k])]
            found += [(_only(piece, run), tuple(at + k for k in run)) for run in runs if run]
        else:
            found.append((piece, tuple(at + k for k in members)))
        at += len(members)
    return tuple(found)


def _only(piece: Piece, members: Sequence[int]) -> Piece:
    """Return some tensors of a piece as a piece of their own, which the same schedule reduces."""
    (part,), buffer = piece
    spans: list[Span] = []
    size = 0
    for span in (buffer.spans[k] for k in members):
        spans.append(span._replace(start=size))
        size += span.size
    return Piece((part._replace(stop=size),), buffer._replace(size=size, spans=tuple(spans)))


def _run_loop(
    parts: Sequence[Part],
    framework: Framework,
    op: ReduceOp,
    arrays: list[list[Array]],
    buffer: Buffer,
    numbers: Numbers,
) -> list[tuple[Array, ...]]:
    """Pack, execute and unpack one buffer.

    Args:
      parts: from ``_plan``.
      arrays: for each of the buffer's spans the components, in the order of the schedule's sources.
    Returns:
      For each span the result's components, in the order of the schedule's destinations.
    """
    schedule = parts[0].schedule
    names = [schedule.devices[source] for source in schedule.chunks[0].sources]
    if buffer.size is None:
        flats = [framework.copy(x, name) for x, name in zip(arrays[0], names, strict=True)]
        held = execute(schedule, framework, op, flats, None, numbers)
        return [tuple(own[0] if fresh else framework.own(own[0]) for own, fresh in held)]
    flats = [
        framework.pack([framework.copy(components[replica], name) for components in arrays])
        for replica, name in enumerate(names)
    ]
    if len(parts) == 1:
        held = execute(schedule, framework, op, flats, buffer.size, numbers)
    else:
        held = [Held([], False) for _ in schedule.chunks[0].destinations]
        for schedule, start, stop in parts:
            made = execute(
                schedule, framework, op, [framework.part(flat, start, stop) for flat in flats], stop - start, numbers
            )
            for whole, part in zip(held, made, strict=True):
                whole.parts.extend(part.parts)
    del flats
    where = cuts(
        buffer.spans,
        tuple(
            (base + start, base + stop)
            for schedule, base, end in parts
            for _, start, stop in ranges(schedule, end - base)
        ),
    )
    unpacked = [framework.unpack(own, where, fresh) for own, fresh in held]
    return list(zip(*unpacked, strict=True))


def _reduce_sparse(value: Checked, destinations: tuple[str, ...], root: str | None) -> Mirrored:
    """List all replicas' slices together on one device and copy them to the destinations."""
    framework, main = value.framework, root or destinations[0]
    parts: list[Sparse] = [x for x in value.arrays if isinstance(x, Sparse)]
    values = framework.concat([framework.copy(x.values, main) for x in parts], 0)
    indices = framework.concat([framework.copy(x.indices, main) for x in parts], 0)
    values = framework.finish(values, value.numbers)
    shape = next((x.shape for x in parts if x.shape is not None), None)
    whole = Sparse(parts[0].kind, values, indices, shape)
    return Mirrored.on(tuple(_sparse_copy(framework, whole, device) for device in destinations), destinations)


def _sparse_copy(framework: Framework, x: Sparse, device: str) -> Any:
    values, indices = (framework.own(framework.copy(part, device)) for part in (x.values, x.indices))
    return framework.sparse(x._replace(values=values, indices=indices))


def broadcast_array(
    tensor: Any,
    destinations: tuple[str, ...],
    algorithm: str,
    topology: Topology | None,
) -> Mirrored:
    """Copy one array to all destinations along a schedule whose only source is the array's device."""
    framework = framework_of(tensor)
    x = framework.array(tensor)
    if isinstance(x, Sparse):
        return Mirrored.on(tuple(_sparse_copy(framework, x, device) for device in destinations), destinations)
    source = PerReplica([tensor]).devices
    if locate(tensor) in (None, "cpu") and destinations[0].startswith("cpu:"):
        source = destinations[:1]  # host memory is every cpu:k at once, so the array is there already
    value = Checked.on((tensor,), source)
    value.framework, value.arrays, value.spec, value.sparse, value.mixed = (
        framework,
        [x],
        framework.spec(x),
        False,
        False,
    )
    value.numbers = Numbers(value.spec.dtype, value.spec.dtype, value.spec.dtype, 1)
    value.out = None
    (group,) = groups(framework, algorithm, source, destinations, (value.spec,), Packing(), topology, None)
    (components,) = _run(group, ReduceOp.SUM, [(value, destinations)], False)
    return Mirrored.on(components, destinations)


@lru_cache(maxsize=4096)
def say_once(text: str) -> None:
    """Log a text at INFO, the first time it is to be said."""
    _LOG.info(text)
