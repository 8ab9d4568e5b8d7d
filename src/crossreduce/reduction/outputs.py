"""Arrays that a caller gives for results: the ``out`` argument of the cross-device ops.

Input: ``out`` and the validated values. Output: one array per destination, or an error before any write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ArgumentError, MismatchError, ReductionError, UnsupportedError, shown
from ..frameworks import Sparse, framework_of
from ..kernels.overlap import find_overlap
from ..values import DistributedValues, Mirrored, TensorSpec, describe
from .validation import Checked

Job = tuple[Checked, tuple[str, ...]]  # a validated value and the devices of its result


def check_outs(out: Any, size: int) -> list[DistributedValues]:
    """Return the ``out`` of a batch as a list with one element for each of its ``size`` pairs.

    Raises:
      ArgumentError: ``out`` is not a list of one ``PerReplica`` or ``Mirrored`` per pair.
    """
    given = ""
    if isinstance(out, Iterable) and not isinstance(out, (DistributedValues, str, bytes, dict)):
        outs = list(out)
        wrong = [f"{shown(x)} as element {k}" for k, x in enumerate(outs) if not isinstance(x, DistributedValues)]
        if len(outs) == size and not wrong:
            return outs
        given = wrong[0] if len(outs) == size else f"{len(outs)} elements"
    problem = "out must have one PerReplica or Mirrored for each pair."
    raise ArgumentError.of(problem, f"{given or shown(out)}, for {size} pairs", "out=[value, ...]")


def check_out(out: Any, value: Checked, destinations: tuple[str, ...]) -> DistributedValues:
    """Return the arrays that a value's result will be written into, one per destination.

    Raises:
      ArgumentError: ``out`` is not a distributed value, or its devices are not the destinations.
      MismatchError: the components of ``out`` differ from the result in framework, shape or dtype.
      UnsupportedError: a component of ``out`` cannot be written into, or the result is sparse.
    """
    facts = value.facts
    if facts.sparse:
        given = f"out for {describe(value[0])}"
        problem = "out cannot be used for a sparse result, whose size is not known in advance."
        raise UnsupportedError.of(problem, given, "omit out=")
    if not isinstance(out, DistributedValues) or out.devices != destinations:
        given = f"out on {', '.join(out.devices)}" if isinstance(out, DistributedValues) else f"a {type(out).__name__}"
        problem = "out must be a PerReplica or Mirrored on the destinations, in their order."
        raise ArgumentError.of(problem, given, f"PerReplica([array, ...], devices={list(destinations)})")
    framework, spec = facts.framework, TensorSpec(facts.spec.shape, facts.numbers.result)
    if framework.uniform(out.values) != spec:
        wrong = []
        for k, (x, device) in enumerate(zip(out.values, destinations, strict=True)):
            owner = framework_of(x)
            component_spec = owner.spec(owner.writable_array(x, device))
            if (owner.name, component_spec) != (framework.name, spec):
                wrong.append(f"component {k} of out: {owner.name} {component_spec}")
        if wrong:
            given = "; ".join(wrong)
            remedy = f"arrays that are {framework.name} {spec}"
            if spec.dtype != facts.spec.dtype:
                remedy += f", the dtype of the {facts.op.value if facts.op else 'result'} of {facts.spec.dtype}"
            problem = "the arrays of out must have the framework, shape and dtype of the result."
            raise MismatchError.of(problem, given, remedy)
    return out


def check_overlap(jobs: Sequence[Job]) -> None:
    """Raise if an array of ``out`` cannot be written into, or shares memory where it must not.

    An array of ``out`` must not share memory with another one. It may share memory with an input only if it is exactly
    a component of the value whose result it receives.

    Raises:
      UnsupportedError: an array cannot be written into.
      ArgumentError: an array shares memory.
    """
    extents: list[tuple[int, int, int, int]] = []  # (start, stop, pair, number of the array of out or -1 for an input)
    for pair, (value, destinations) in enumerate(jobs):
        facts = value.facts
        if facts.out is None:
            continue
        framework = facts.framework
        try:
            targets = [framework.writable_array(x, device) for x, device in zip(facts.out, destinations, strict=True)]
        except ReductionError as error:
            raise name_pair(error, pair, len(jobs)) from None
        results = [framework.memory_range(x) for x in targets]
        extents.extend((start, stop, pair, k) for k, (start, stop, _) in enumerate(results))
        arrays = list(facts.arrays)
        if facts.mixed:  # sparse components were replaced by dense copies: check the originals
            originals = [framework.array(x) for x in value.values]
            arrays += [part for x in originals if isinstance(x, Sparse) for part in (x.values, x.indices)]
        inputs = [framework.memory_range(x) for x in arrays]
        # An input that is exactly an array of out may share its memory, so it is left out.
        extents.extend((start, stop, pair, -1) for start, stop, dense in inputs if (start, stop, dense) not in results)
    overlap = find_overlap(extents)
    if overlap is not None:
        pair, component = overlap
        raise name_pair(overlap_error(component), pair, len(jobs))


def overlap_error(number: int) -> ArgumentError:
    """Return the error for a component of ``out`` that shares memory where it must not."""
    problem = "results cannot be written into arrays that share memory."
    given = f"component {number} of out overlaps another array of out, or an input that is not exactly the same memory"
    return ArgumentError.of(problem, given, "separate arrays, or exactly the value's own components")


def name_pair(error: ReductionError, pair: int, pairs: int) -> ReductionError:
    """Put the number of the pair in front of the error's text if there are several pairs, and return the error."""
    if pairs > 1:
        error.prefix(f"pair {pair}", pair)
    return error


def write_results(results: list[Mirrored], jobs: list[Job]) -> list[Mirrored]:
    """Copy results into the arrays of ``out``, except for results that already are these arrays, and return ``out``.

    Raises:
      MismatchError: a result has another framework, shape or dtype than its array of ``out``.
    """
    copies = []
    for pair, (result, (value, devices)) in enumerate(zip(results, jobs, strict=True)):
        out, framework = value.facts.out, value.facts.framework
        assert out is not None
        if all(x is target for x, target in zip(result, out, strict=True)):
            continue
        for x, target, device in zip(result, out, devices, strict=True):
            writable = framework.writable_array(target, device)
            source = framework.array(x) if framework_of(x) is framework else None
            spec = None if source is None or isinstance(source, Sparse) else framework.spec(source)
            if spec != framework.spec(writable):
                wanted = f"an array like out's, {framework.name} {framework.spec(writable)}"
                problem = "a result differs from its array of out in framework, shape or dtype."
                error = MismatchError.of(problem, describe(x), wanted)
                raise name_pair(error, pair, len(jobs))
            copies.append((framework, writable, source))
    for framework, writable, source in copies:
        framework.write(writable, source)
    return [Mirrored.on(value.facts.out.values, devices) for value, devices in jobs if value.facts.out is not None]
