"""From a validated batch to its results: packing, planning, lowering, and running the selected engine.

Input: ``Job``s, validated values with the devices that need their results. Output: ``Mirrored`` values. These
functions are the steps of the diagram in ARCHITECTURE.md; ``cross_device_ops.py`` only chooses their arguments.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from .. import kernels
from ..engines.base import (
    ENGINES,
    EXACT_ENGINES,
    Engine,
    Executable,
    Layout,
    LoweredBuffer,
    OverlapError,
    ProgramRange,
    engine_named,
)
from ..engines.host.prepared import FRAMEWORKS, prepare
from ..engines.nccl import ENGINE as NCCL
from ..errors import ReductionError, UnsupportedError
from ..frameworks import Array, Framework, Sparse, framework_of
from ..lowering import lower
from ..observe.profilers import PROFILERS
from ..ops import Numbers, copy_numbers
from ..options import DEFAULT, CommunicationOptions
from ..packing import Buffer, Packing, itemsize, layout
from ..planning import REGISTRY, Request, choose, schedule_for
from ..topology import Topology
from ..values import Mirrored, PerReplica, TensorSpec, locate
from .outputs import Job, check_overlap, name_pair, overlap_error
from .validation import Checked, ValueFacts

if TYPE_CHECKING:
    from ..engines.host._calls import Calls

_LOG: Final = logging.getLogger("crossreduce")


def reduce_batch(
    jobs: Sequence[Job],
    packing: Packing,
    algorithm: str,
    topology: Topology | None,
    root: str | None,
    calls: Calls | None = None,
    options: CommunicationOptions = DEFAULT,
) -> list[Mirrored]:
    """Reduce a batch: values with the same sources and destinations are packed and planned together.

    The whole batch is planned before any of it runs, so a batch that cannot be planned moves nothing.

    Args:
      jobs: the values, with the devices that need their results.
      packing: how tensors are joined and cut.
      algorithm: the algorithm's name.
      topology: the links that may be used; ``None`` allows any.
      root: the device on which ``one_device`` reduces and sparse values are concatenated. If it is ``None``,
        ``one_device`` rotates its roots, and sparse values are concatenated on their first destination.
      calls: if compiled code can repeat this call, it is added here. The other arguments must follow from ``options``.
      options: the options of the call.
    Raises:
      PlanError: the topology has no route for some of the data.
    """
    if options.exact:
        jobs = _exact_jobs(jobs)
    PROFILERS.look_again()  # compiled code need not do this: the first call of a framework always takes this path
    routes: dict[tuple[Framework, tuple[str, ...], tuple[str, ...], bool], list[int]] = {}
    last_route: Any = None
    for number, (value, destinations) in enumerate(jobs):
        facts = value.facts
        if not facts.sparse:
            route = facts.framework, value.devices, destinations, facts.mixed
            if route != last_route:  # saves a lookup: most pairs have the same route as the previous one
                last_route, members = route, routes.setdefault(route, [])
            members.append(number)
    runs: list[tuple[Layout, list[int]]] = []  # each executes a layout for the jobs with these numbers
    for (framework, sources, destinations, mixed), members in routes.items():
        specs = tuple(jobs[number][0].facts.spec for number in members)
        planned = layouts(framework, algorithm, sources, destinations, specs, packing, topology, root, mixed)
        runs.extend((run_layout, [members[tensor] for tensor in run_layout.tensors]) for run_layout in planned)
    outs = [(value.facts.out, destinations) for value, destinations in jobs]
    with_out = bool(jobs) and all(out is not None and out.devices == destinations for out, destinations in outs)
    if len(runs) > 1:
        if with_out:
            check_overlap(jobs)  # check the batch as a whole: each engine receives only a part of it
        kernels.threads()  # raises before the first run if CROSSREDUCE_NUM_THREADS is invalid
        for run_layout, numbers in runs:
            if jobs[numbers[0]][0].facts.numbers.exact:  # also raise before the first run if no engine can add exactly
                select(run_layout, [jobs[number][0].facts.arrays for number in numbers], exact=True)
    results: list[Any] = [
        _reduce_sparse(value.facts, destinations, root) if value.facts.sparse else None for value, destinations in jobs
    ]
    executables: list[tuple[Any, list[int]]] = []
    for run_layout, numbers in runs:
        executable, reduced = _run(run_layout, [jobs[number] for number in numbers], with_out)
        executables.append((executable, numbers))
        for number, components in zip(numbers, reduced, strict=True):
            results[number] = Mirrored.on(tuple(components), jobs[number][1])
    if calls is not None and len(routes) == 1 and _is_preparable(jobs, with_out, executables):
        (first, destinations), rows = jobs[0], [value.values for value, _ in jobs]
        op = first.facts.op
        assert op is not None
        components = [result.values for result in results]
        prepare(calls, op, options, (first.devices, destinations), rows, components, with_out, executables)
    return results


def _is_preparable(jobs: Sequence[Job], with_out: bool, executables: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether ``Calls`` can repeat a batch in which all values have the same framework and devices."""
    return all(executable.prepared is not None for executable, _ in executables) and all(
        not facts.sparse
        and not facts.numbers.weights  # prepared calls are found by op and options, without weights
        and (facts.out is not None) is with_out
        and all(map(operator.is_, facts.arrays, value.values))
        # In torch, the mean of integers has the default dtype, which may change.
        and (facts.framework.name == "numpy" or facts.numbers.result == facts.spec.dtype)
        and facts.framework.name in FRAMEWORKS
        for value, facts in ((value, value.facts) for value, _ in jobs)
    )


def reduce_to_one(
    jobs: Sequence[Job], root: str | None, calls: Calls | None = None, options: CommunicationOptions = DEFAULT
) -> list[Mirrored]:
    """Reduce each value on ``root``, or on its first destination if ``root`` is ``None``. See ``reduce_batch``."""
    if options.exact:
        jobs = _exact_jobs(jobs)
    by_root: dict[str, list[int]] = {}
    for number, (_, destinations) in enumerate(jobs):
        by_root.setdefault(root or destinations[0], []).append(number)
    results: list[Any] = [None] * len(jobs)
    calls = calls if len(by_root) == 1 else None  # only a call with one root can be prepared
    for device, numbers in by_root.items():
        members = [jobs[number] for number in numbers]
        reduced = reduce_batch(members, Packing(), "one_device", None, device, calls, options)
        for number, result in zip(numbers, reduced, strict=True):
            results[number] = result
    return results


def _exact_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Return the same jobs with values that are reduced exactly. Raise if a reduction cannot be exact."""
    exact_jobs: list[Job] = []
    for number, (value, destinations) in enumerate(jobs):
        try:
            exact_jobs.append((value.exactly(), destinations))
        except ReductionError as error:
            raise name_pair(error, number, len(jobs)) from None
    return exact_jobs


@lru_cache(maxsize=1024)
def layouts(
    framework: Framework,
    algorithm: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    specs: tuple[TensorSpec, ...],
    packing: Packing,
    topology: Topology | None,
    root: str | None,
    mixed: bool = False,
) -> tuple[Layout, ...]:
    """Return layouts, with lowered programs, of tensors that have the same sources and destinations.

    ``mixed``: see ``ValueFacts``. For the other arguments see ``reduce_batch``.
    """
    by_dtype: dict[object, list[LoweredBuffer]] = {}
    for buffer in layout(specs, packing):
        ranges = _plan(framework, algorithm, sources, destinations, buffer, topology, root)
        key = buffer.dtype if buffer.size is not None else len(by_dtype)  # unknown size: a layout of its own
        by_dtype.setdefault(key, []).append(LoweredBuffer(buffer, ranges))
    made, is_nccl = [], algorithm == "nccl"
    for buffers in by_dtype.values():
        tensors = tuple(span.tensor for buffer, _ in buffers for span in buffer.spans)
        made.append(Layout(framework, tensors, tuple(buffers), sources, destinations, mixed, prefers_nccl=is_nccl))
    return tuple(made)


def _plan(
    framework: Framework,
    algorithm: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    buffer: Buffer,
    topology: Topology | None,
    root: str | None,
) -> tuple[ProgramRange, ...]:
    """Return the lowered programs for one buffer, each with the range of elements that it reduces.

    Unless ``root`` is given, the root rotates from pack to pack, starting with device ``buffer.first``. A schedule
    covers one pack per device, or a single pack if its algorithm has no root. The next packs use the same schedule
    again, so a plan does not grow with the number of packs.
    """
    device_count = len({*sources, *destinations})
    first = buffer.first % device_count
    size = buffer.size or 0
    nbytes = size * itemsize(buffer.dtype)
    if algorithm in ("auto", "nccl") and topology is None:
        algorithm = choose(sources, destinations, nbytes)
    rotates = algorithm in REGISTRY and REGISTRY[algorithm].has_root
    if buffer.size is None and not rotates:
        algorithm, rotates = "one_device", True  # a buffer of unknown size cannot be cut into chunks
    period = device_count if rotates else 1
    request = Request("all_reduce", sources, destinations, algorithm, topology, first=first, root=root)
    ranges = []
    for pack in range(0, buffer.packs, period):
        packs = min(period, buffer.packs - pack)
        start, stop = pack * size // buffer.packs, (pack + packs) * size // buffer.packs
        schedule = schedule_for(request._replace(nbytes=nbytes * packs // buffer.packs, packs=packs))
        if topology is not None:
            framework.require(schedule.devices)  # on a topology a schedule may also use devices without a value
        if _LOG.isEnabledFor(logging.INFO):
            log_once(f"new plan: {schedule.head}; devices {', '.join(schedule.devices)}")
        ranges.append(ProgramRange(lower(schedule), start, stop))
    return tuple(ranges)


def select(layout: Layout, arrays: Sequence[Sequence[Array]], exact: bool = False) -> tuple[Engine, Any]:
    """Return the first engine that can run a layout with these arrays, and the arrays in the form that engine reads.

    Raises:
      UnsupportedError: the sums must be exact, and no engine can add these arrays exactly.
    """
    for engine in map(engine_named, EXACT_ENGINES if exact else ENGINES):
        if engine.supports(layout):
            operands = engine.bind(layout, arrays)
            if operands is not None:
                return engine, operands
    assert exact, "the last engine runs any arrays"
    problem = "exact sums are computed only in host memory, from dense arrays that are neither traced nor recorded."
    what = "sparse and dense arrays" if layout.mixed else "arrays"
    given = f"{what} of {layout.framework.name} on {', '.join(dict.fromkeys(layout.sources))}; exact=True"
    remedy = "a copy in host memory, a call outside of jit, tf.function and tapes, or exact=False"
    raise UnsupportedError.of(problem, given, remedy)


def _nccl_operands(layout: Layout, arrays: Sequence[Sequence[Array]], numbers: Numbers) -> Any | None:
    """Return the arrays as NCCL's engine reads them. If NCCL cannot be used, log the reason and return ``None``."""
    reason = NCCL.refusal(layout, numbers)
    operands = NCCL.bind(layout, arrays) if reason is None else None
    if operands is None:
        log_once(f'"nccl" plans "auto": {reason or "arrays are traced, or not on the devices of their replicas"}')
    return operands


@lru_cache(maxsize=1024)
def _compile(engine: Engine, layout: Layout, numbers: Numbers, with_out: bool) -> Executable:
    return engine.compile(layout, numbers, with_out)


def _run(layout: Layout, jobs: Sequence[Job], with_out: bool) -> tuple[Executable, Sequence[Sequence[Array]]]:
    """Reduce the values of one layout with the first engine that accepts their arrays.

    Returns the executable, and for each value the result's components: the arrays of its ``out`` if ``with_out``.
    """
    arrays = [value.facts.arrays for value, _ in jobs]
    numbers = jobs[0][0].facts.numbers
    operands = _nccl_operands(layout, arrays, numbers) if layout.prefers_nccl and not numbers.exact else None
    engine, operands = select(layout, arrays, numbers.exact) if operands is None else (NCCL, operands)
    executable = _compile(engine, layout, numbers, with_out)
    if not with_out:
        return executable, executable.run(operands, None)
    if not engine.checks_overlap:
        check_overlap(jobs)
    try:
        outs = [value.facts.out.values for value, _ in jobs if value.facts.out is not None]
        return executable, executable.run(operands, outs)
    except OverlapError as overlap:
        raise name_pair(overlap_error(overlap.result), layout.tensors[overlap.tensor], len(jobs)) from None
    except (BufferError, ValueError):
        check_overlap(jobs)  # raises an error that names an array of out and its fault, if one has a fault
        raise


def _reduce_sparse(value: ValueFacts, destinations: tuple[str, ...], root: str | None) -> Mirrored:
    """Concatenate all replicas' slices on one device and copy them to the destinations."""
    framework, main = value.framework, root or destinations[0]
    parts: list[Sparse] = [x for x in value.arrays if isinstance(x, Sparse)]
    values = framework.concat([framework.to_device(x.values, main) for x in parts], 0)
    indices = framework.concat([framework.to_device(x.indices, main) for x in parts], 0)
    values = framework.finish(values, value.numbers)
    shape = next((x.shape for x in parts if x.shape is not None), None)
    joined = Sparse(parts[0].kind, values, indices, shape)
    return Mirrored.on(tuple(_sparse_copy(framework, joined, device) for device in destinations), destinations)


def _sparse_copy(framework: Framework, x: Sparse, device: str) -> Any:
    """Return a copy on a device, in the framework's own class of sparse arrays."""
    values, indices = (framework.clone(framework.to_device(part, device)) for part in (x.values, x.indices))
    return framework.rebuild_sparse(x._replace(values=values, indices=indices))


def broadcast_array(tensor: Any, destinations: tuple[str, ...], algorithm: str, topology: Topology | None) -> Mirrored:
    """Copy one array to all destinations along a schedule whose only source is the array's device."""
    framework = framework_of(tensor)
    x = framework.array(tensor)
    if isinstance(x, Sparse):
        return Mirrored.on(tuple(_sparse_copy(framework, x, device) for device in destinations), destinations)
    source = PerReplica([tensor]).devices
    if locate(tensor) in (None, "cpu") and destinations[0].startswith("cpu:"):
        source = destinations[:1]  # all cpu:k are the same memory, so the array is there already
    spec = framework.spec(x)
    value = Checked.from_facts((tensor,), source, ValueFacts(None, framework, [x], spec, copy_numbers(spec.dtype)))
    (copy_layout,) = layouts(framework, algorithm, source, destinations, (spec,), Packing(), topology, None)
    _, (components,) = _run(copy_layout, [(value, destinations)], False)
    return Mirrored.on(tuple(components), destinations)


@lru_cache(maxsize=4096)
def log_once(text: str) -> None:
    """Log a text at INFO, unless this process has logged the same text before."""
    _LOG.info(text)
