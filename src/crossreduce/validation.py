"""What stands at the door: every argument is checked here, before an array is touched.

In: what a caller gave.  Out: ``Checked`` values and canonical device names, or an error that says what
was given and what to do.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from . import kernels
from .devices import canonical
from .errors import ArgumentError, MismatchError, ReductionError, UnsupportedError, message, shown
from .frameworks import KNOWN, Array, Framework, Sparse, framework_of
from .ops import HALVES, Numbers, ReduceOp, require_dtype
from .options import DEFAULT, CommunicationOptions
from .values import DistributedValues, IndexedSlices, PerReplica, TensorSpec, describe, host_devices


class Checked(PerReplica):
    """A ``PerReplica`` whose components were found to fit together, and what was found out.

    ``arrays`` are the components as the framework takes them: all of them sparse (``sparse``), or all dense. A
    value that is sparse on some replicas only has been made dense. ``spec`` is that of a component (of
    its slices, where it is sparse). ``mixed``: sparse components were made dense, perhaps in a wider dtype. ``out`` are
    the arrays that the result is to be written into, where the caller gave some.
    """

    __slots__ = ("arrays", "axis", "framework", "mixed", "numbers", "op", "out", "sparse", "spec")
    arrays: list[Array | Sparse]
    axis: int
    framework: Framework
    mixed: bool
    numbers: Numbers
    op: ReduceOp | None
    out: DistributedValues | None
    sparse: bool
    spec: TensorSpec

    def __repr__(self) -> str:
        return repr(PerReplica.on(self.values, self.devices))

    def with_out(self, out: DistributedValues | None, fresh: bool = False) -> Checked:
        """Return the same value whose result goes into ``out``: this one, if it is ``fresh``: held by nobody else."""
        if self.out is out:
            return self
        if not fresh:
            other = Checked.on(self.values, self.devices)
            for name in Checked.__slots__:
                setattr(other, name, getattr(self, name))
            return other.with_out(out, fresh=True)
        self.out = out
        return self


def read_op(op: object) -> ReduceOp:
    """Return a ``ReduceOp``, given itself or its name.

    Raises:
      ArgumentError: it is neither.
    """
    if isinstance(op, (ReduceOp, str)):
        return ReduceOp(op)
    return ReduceOp._missing_(op)  # Enum would compare it with ==, which arrays answer elementwise


def read_options(options: object) -> CommunicationOptions:
    """Return the options of a call: the default for ``None``; anything of another kind is an error."""
    if options is None:
        return DEFAULT
    if isinstance(options, CommunicationOptions):
        return options
    raise ArgumentError(
        message("options must be CommunicationOptions.", shown(options), "CommunicationOptions(bytes_per_pack=...)")
    )


def per_replica(value: Any) -> PerReplica:
    """Return a distributed value as it is; a single array or number as one replica's.

    Raises:
      ArgumentError: anything else, a list of arrays included.
    """
    if isinstance(value, PerReplica):
        return value
    if isinstance(value, DistributedValues):
        return PerReplica.on(value.values, value.devices)
    if isinstance(value, (list, tuple, dict, str, bytes)) or value is None:
        raise ArgumentError(
            message("a value to reduce must be a PerReplica or an array.", shown(value), "PerReplica([a, b, ...])")
        )
    if isinstance(value, type):
        raise UnsupportedError(message("a class stands where a value is meant.", shown(value), "an instance of it"))
    framework_of(value)
    return PerReplica([value])


def place(destinations: Any) -> tuple[str, ...]:
    """Return the devices that a ``destinations`` argument names.

    Raises:
      ArgumentError: it is no distributed value, device name, array, variable or parameter.
    """
    if isinstance(destinations, DistributedValues):
        return destinations.devices
    if isinstance(destinations, str):
        return (canonical(destinations),)
    if not isinstance(destinations, (list, tuple, dict, bytes, int, float, complex, type)) and destinations is not None:
        with contextlib.suppress(ArgumentError, UnsupportedError):
            check_array(destinations)
            return PerReplica([destinations]).devices
    raise ArgumentError(
        message(
            "destinations must be distributed values, a device's name, or an array, variable or parameter.",
            shown(destinations),
            'a name such as "cpu:0"; for several devices, the PerReplica itself or any other on those devices',
        )
    )


def check_array(value: Any) -> Framework:
    """Return the framework of one array, dense or sparse, whose dtype this library knows.

    Raises:
      ArgumentError: it is no array.
      UnsupportedError: a kind of array or a dtype that cannot be used.
    """
    framework = framework_of(value)
    x = framework.array(value)
    require_dtype(framework.spec(x.values if isinstance(x, Sparse) else x).dtype)
    return framework


def check_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of value and destinations as a list.

    Raises:
      ArgumentError: ``pairs`` cannot be iterated, or an element is no pair.
    """
    if not isinstance(pairs, Iterable) or isinstance(pairs, (str, bytes, dict, DistributedValues)):
        raise ArgumentError(
            message(
                "value_destination_pairs must be pairs of value and destinations.", shown(pairs), "[(value, value)]"
            )
        )
    found = list(pairs)
    for number, pair in enumerate(found):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError(
                message(
                    f"element {number} of value_destination_pairs is no pair.", shown(pair), "(value, destinations)"
                )
            )
    return found


def uniform_value(op: ReduceOp, values: tuple[Any, ...], devices: tuple[str, ...] | None) -> Checked | None:
    """Return values that need no further look as a checked one; ``None``: see ``check_value``.

    A short cut for what most calls give: plain arrays in host memory, all alike. ``devices``: ``None`` for those that
    ``PerReplica`` would name.
    """
    framework = KNOWN.get(type(values[0]))
    spec = None if framework is None else framework.uniform(values)
    if framework is None or spec is None:
        return None
    checked = Checked.on(values, host_devices(len(values)) if devices is None else devices)
    framework.require(checked.devices)
    checked.op, checked.framework, checked.axis, checked.out = op, framework, 0, None
    checked.arrays, checked.spec, checked.sparse, checked.mixed = list(values), spec, False, False
    checked.numbers = framework.numbers(op, spec.dtype, len(values))
    return checked


def check_value(op: ReduceOp | None, value: PerReplica, axis: int | None = None) -> Checked:
    """Check that the components fit together and that ``op`` is defined for them.

    Args:
      op: the reduction; ``None`` for a gather.
      value: what to check; one that was checked for this op comes back as it is.
      axis: for a gather, the axis along which components may differ.
    Raises:
      MismatchError: components of different framework, dtype or shape; all of them are named.
      UnsupportedError: ``op`` is not defined for the dtype, or not for sparse values.
      ArgumentError: a component is no array, or there is no such axis.
    """
    if type(value) is Checked and value.op is op and (op is not None or value.axis == axis):
        return value
    values = value.values
    if op is not None and (quick := uniform_value(op, values, value.devices)) is not None:
        return quick
    framework = framework_of(values[0])
    kind = type(values[0])
    for component in values:
        # IndexedSlices are of one type, whatever is in them.
        if (type(component) is not kind or kind is IndexedSlices) and framework_of(component) is not framework:
            raise _mismatch(value, "are of different frameworks", [framework_of(v).name for v in values])
    framework.require(value.devices)
    arrays: list[Any] = [framework.array(component) for component in values]
    checked = Checked.on(values, value.devices)
    checked.op, checked.framework, checked.arrays, checked.axis, checked.out = op, framework, arrays, 0, None
    kinds = [type(x) is Sparse for x in arrays]
    checked.sparse = all(kinds) and op is not None
    checked.mixed = any(kinds) and not checked.sparse
    if op is None:
        _check_gather(checked, axis)
        return checked
    if any(kinds):
        checked.spec = _sparse_spec(op, value, framework, arrays)
    else:
        shape, dtype = arrays[0].shape, arrays[0].dtype
        agree = all(x.shape == shape and x.dtype == dtype for x in arrays)
        if agree:
            spec = framework.spec(arrays[0])
        else:
            specs = [framework.spec(x) for x in arrays]
            common = _common(specs)
            if common is None:
                raise _mismatch(value, "differ in shape or dtype", specs)
            spec = common
        checked.spec = spec
        if not agree or None in spec.shape:  # as far as tracing knows, they fit; make sure when they run
            checked.arrays = framework.require_alike(arrays, spec)
    checked.numbers = framework.numbers(op, checked.spec.dtype, len(values))
    if any(kinds) and not checked.sparse:
        checked.arrays = [_dense(framework, x, checked.spec, checked.numbers.accumulator) for x in arrays]
    return checked


def check_out(out: Any, value: Checked, destinations: tuple[str, ...]) -> DistributedValues:
    """Return the arrays that a value's result is to be written into, one a destination.

    Raises:
      ArgumentError: ``out`` is no distributed value, or on other devices.
      MismatchError: its components differ from the result in framework, shape or dtype.
      UnsupportedError: they cannot be written into, or the result is sparse.
    """
    if value.sparse:
        raise UnsupportedError(
            message("sparse results have sizes of their own.", f"out for {describe(value[0])}", "leave out= out")
        )
    if not isinstance(out, DistributedValues) or out.devices != destinations:
        raise ArgumentError(
            message(
                "out must be a PerReplica or Mirrored on the destinations, in their order.",
                f"a {type(out).__name__}"
                if not isinstance(out, DistributedValues)
                else f"out on {', '.join(out.devices)}",
                f"PerReplica([array, ...], devices={list(destinations)})",
            )
        )
    framework, spec = value.framework, TensorSpec(value.spec.shape, value.numbers.result)
    if framework.uniform(out.values) != spec:
        found = [(framework_of(x), x, device) for x, device in zip(out.values, destinations, strict=True)]
        specs = [(of.name, of.spec(of.writable_array(x, device))) for of, x, device in found]
        if any(each != (framework.name, spec) for each in specs):
            each = "; ".join(f"{name} {spec}" for name, spec in specs)
            remedy = f"arrays that are {framework.name} {spec}"
            if spec.dtype != value.spec.dtype:
                remedy += f", as the {value.op.value if value.op else 'result'} of {value.spec.dtype} is"
            raise MismatchError(message("the arrays of out must be like the result.", each, remedy))
    return out


def check_overlap(jobs: Sequence[tuple[Checked, tuple[str, ...]]]) -> None:
    """Raise where an array of ``out`` cannot be written, or shares memory where it must not.

    That is with another one, or with an input, unless it is exactly one of its own value.
    """
    extents: list[tuple[int, int, int, int]] = []  # start, stop, the pair, and which result, or -1
    for pair, (value, destinations) in enumerate(jobs):
        if value.out is None:
            continue
        framework = value.framework
        try:
            targets = [framework.writable_array(x, device) for x, device in zip(value.out, destinations, strict=True)]
        except ReductionError as error:
            raise in_pair(error, pair, len(jobs)) from None
        own = [framework.memory_range(x) for x in targets]
        extents.extend((start, stop, pair, k) for k, (start, stop, _) in enumerate(own))
        arrays = list(value.arrays)
        if value.mixed:  # what was sparse is looked at as it came
            given = [framework.array(x) for x in value.values]
            arrays += [part for x in given if isinstance(x, Sparse) for part in (x.values, x.indices)]
        inputs = [framework.memory_range(x) for x in arrays]
        extents.extend((start, stop, pair, -1) for start, stop, dense in inputs if (start, stop, dense) not in own)
    found = kernels.find_overlap(extents)
    if found is not None:
        raise in_pair(overlap_error(found[1]), found[0], len(jobs))


def overlap_error(number: int) -> ArgumentError:
    """Return the error for a component of ``out`` that shares memory where it must not."""
    return ArgumentError(
        message(
            "results cannot be written into arrays that share memory.",
            f"component {number} of out shares memory with another one, or with an input other than by being it",
            "arrays of their own, or exactly the value's own",
        )
    )


def in_pair(error: ReductionError, pair: int, pairs: int) -> ReductionError:
    """Return an error that says which pair of a batch it is about; a single value has no number."""
    if pairs > 1:
        error.prefix(f"pair {pair}", pair)
    return error


def _common(specs: list[TensorSpec]) -> TensorSpec | None:
    """Return what several specs have in common, or ``None``; a size that is not known fits any."""
    if len({(spec.dtype, len(spec.shape)) for spec in specs}) > 1:
        return None
    sizes: list[int | None] = []
    for along in zip(*(spec.shape for spec in specs), strict=True):
        known = {size for size in along if size is not None}
        if len(known) > 1:
            return None
        sizes.append(next(iter(known), None))
    return TensorSpec(tuple(sizes), specs[0].dtype)


def _dense(framework: Framework, x: Array | Sparse, spec: TensorSpec, dtype: str) -> Array:
    """Return a component as a dense array; a sparse one's slices are added up in ``dtype``."""
    if not isinstance(x, Sparse):
        return x
    shape = tuple(size for size in spec.shape if size is not None)
    if len(shape) < len(spec.shape):
        raise ArgumentError(
            message(
                "a sparse array without dense_shape cannot be made dense.",
                f"{x.kind} with slices {framework.spec(x.values)}",
                "IndexedSlices(values, indices, dense_shape)",
            )
        )
    return framework.to_dense(x, shape, dtype)


def _sparse_spec(op: ReduceOp, value: PerReplica, framework: Framework, arrays: list[Any]) -> TensorSpec:
    """Check sparse components against each other and against dense ones; return the common spec."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise UnsupportedError(
            message(
                "sparse values can be added, and nothing else.",
                f"{shown(op)} of {describe(value.values[0])}",
                '"sum" or "mean", or make them dense first',
            )
        )
    sparse = [x for x in arrays if isinstance(x, Sparse)]
    specs = [_dense_spec(framework, x) for x in arrays]
    spec = _common(specs)
    if spec is None or len({(x.kind, len(x.indices.shape), *x.indices.shape[1:]) for x in sparse}) > 1:
        kinds = [x.kind if isinstance(x, Sparse) else "dense" for x in arrays]
        found = [f"{spec}, {kind}" for spec, kind in zip(specs, kinds, strict=True)]
        which = "sparse" if len(sparse) == len(arrays) else "sparse and dense"
        raise _mismatch(value, f"are {which} arrays that do not fit together", found)
    return framework.spec(sparse[0].values) if len(sparse) == len(arrays) else spec


def _dense_spec(framework: Framework, x: Array | Sparse) -> TensorSpec:
    """Return the spec that a component has, or would have if it were dense; what is not known is ``None``."""
    if not isinstance(x, Sparse):
        return framework.spec(x)
    slices = framework.spec(x.values)
    if x.shape is not None:
        return TensorSpec(tuple(x.shape), slices.dtype)
    rows: tuple[int | None, ...] = (None,) * (1 if len(x.indices.shape) == 1 else int(x.indices.shape[1]))
    return TensorSpec((*rows, *slices.shape[1:]), slices.dtype)


def _check_gather(checked: Checked, axis: Any) -> None:
    specs = [_dense_spec(checked.framework, x) for x in checked.arrays]
    for spec in specs:
        require_dtype(spec.dtype)
    ndim = len(specs[0].shape)
    try:
        number = operator.index(axis)
    except TypeError:
        number = ndim
    if not -ndim <= number < ndim or isinstance(axis, bool):
        raise ArgumentError(
            message(
                "gather needs an axis of its components.",
                f"axis={axis!r}, components such as {specs[0]}",
                f"an axis from {-ndim} to {ndim - 1}" if ndim else "components of one axis: x.reshape(1), axis=0",
            )
        )
    checked.axis = number % ndim
    others = [spec._replace(shape=spec.shape[: checked.axis] + spec.shape[checked.axis + 1 :]) for spec in specs]
    if _common(others) is None or any(len(spec.shape) != ndim for spec in specs):
        raise _mismatch(checked, f"differ in dtype or in another axis than {checked.axis}", specs)
    checked.spec = specs[0]
    framework, dtype = checked.framework, checked.spec.dtype
    if any(isinstance(x, Sparse) for x in checked.arrays):
        wide = "float32" if dtype in HALVES else dtype
        numbers = Numbers(ReduceOp.SUM, dtype, wide, dtype, 1)
        checked.arrays = [
            framework.finish(_dense(framework, x, spec, wide), numbers)
            for x, spec in zip(checked.arrays, specs, strict=True)
        ]


def _mismatch(value: PerReplica, problem: str, found: Iterable[object]) -> MismatchError:
    each = "; ".join(
        f"replica {number} on {device}: {text}"
        for number, (device, text) in enumerate(zip(value.devices, found, strict=True))
    )
    return MismatchError(
        message(f"the replicas of one value {problem}.", each, "one framework, dtype and shape on all replicas")
    )
