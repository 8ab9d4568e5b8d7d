"""Argument validation of the cross-device ops, before anything is reduced. Only ``out`` is checked by ``outputs.py``.

Input: the caller's arguments. Output: ``Checked`` values and canonical device names, or an error with a remedy.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

from ..devices import canonical
from ..errors import ArgumentError, MismatchError, UnsupportedError, shown
from ..frameworks import KNOWN, Array, Framework, Sparse, framework_of
from ..ops import HALVES, Numbers, ReduceOp, copy_numbers, require_dtype
from ..options import DEFAULT, CommunicationOptions
from ..values import DistributedValues, IndexedSlices, Mirrored, PerReplica, TensorSpec, describe, host_devices


class ValueFacts(NamedTuple):
    """What the validation of a value has found.

    Args:
      op: the reduction that the value was validated for, or ``None`` for a gather or broadcast.
      framework: the framework of the components.
      arrays: the components as the framework computes with them: all of them sparse, or all dense. A value that is
        sparse on only some replicas has been made dense.
      spec: the shape and dtype of a component, or of its slices if all components are sparse.
      numbers: how the reduction is computed.
      axis: the axis of a gather, not negative.
      sparse: whether all components are sparse.
      mixed: whether some components were sparse and have been made dense, perhaps in a wider dtype.
      out: the arrays that the result will be written into, if the caller gave them.
    """

    op: ReduceOp | None
    framework: Framework
    arrays: Sequence[Any]
    spec: TensorSpec
    numbers: Numbers
    axis: int = 0
    sparse: bool = False
    mixed: bool = False
    out: DistributedValues | None = None


class Checked(PerReplica):
    """A validated ``PerReplica``, with what the validation has found. It is complete when it is made, and immutable."""

    __slots__ = ("facts",)
    facts: ValueFacts

    @classmethod
    def from_facts(cls, values: tuple[Any, ...], devices: tuple[str, ...], facts: ValueFacts) -> Checked:
        """Return a validated value that has these parts, which must be valid: nothing is checked."""
        value = cls.__new__(cls)
        _store_values(value, values)
        _store_devices(value, devices)
        _store_facts(value, facts)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a validated value is immutable, so {name} cannot be set")

    def __reduce__(self) -> tuple[type[PerReplica], tuple[Any, ...]]:
        return PerReplica, (self.values, self.devices)  # a copy is not validated

    def __repr__(self) -> str:
        return repr(PerReplica.on(self.values, self.devices))

    def with_out(self, out: DistributedValues | None) -> Checked:
        """Return the same value with another ``out``."""
        facts = self.facts
        return self if facts.out is out else Checked.from_facts(self.values, self.devices, facts._replace(out=out))

    def exactly(self) -> Checked:
        """Return the same value, to be reduced exactly.

        Raises:
          UnsupportedError: the op has no exact form.
        """
        facts = self.facts
        numbers = facts.numbers.exactly()
        if numbers == facts.numbers or facts.sparse:  # sparse values are concatenated
            return self
        return Checked.from_facts(self.values, self.devices, facts._replace(numbers=numbers))


# The slots of ``Checked``, which its own ``__setattr__`` protects.
_store_values, _store_devices = (vars(DistributedValues)[name].__set__ for name in ("_values", "_devices"))
_store_facts = vars(Checked)["facts"].__set__


def read_op(op: object) -> ReduceOp:
    """Return the ``ReduceOp`` that ``op`` is or names.

    Raises:
      ArgumentError: ``op`` is neither a ``ReduceOp`` nor the name of one.
    """
    if isinstance(op, (ReduceOp, str)):
        return ReduceOp(op)
    return ReduceOp._missing_(op)  # Enum would compare it with ==, which is elementwise for arrays


def seconds(timeout_s: Any) -> float:
    """Return a timeout as a float.

    Raises:
      ArgumentError: ``timeout_s`` is not a number, or is negative.
    """
    with contextlib.suppress(OverflowError):  # an integer that is too large for a float
        if isinstance(timeout_s, Real) and not isinstance(timeout_s, bool) and float(timeout_s) >= 0:
            return float(timeout_s)
    raise ArgumentError.of("timeout_s must be a number of seconds, 0 or more.", shown(timeout_s), "timeout_s=10")


def given_options(options: object, experimental_hints: object) -> object:
    """Return the options of a call from the argument ``options`` or from the one with the older name.

    Raises:
      ArgumentError: both arguments were given.
    """
    if options is not None and experimental_hints is not None:
        problem = "options and its older name experimental_hints cannot both be given."
        given = f"options={shown(options)}, experimental_hints={shown(experimental_hints)}"
        raise ArgumentError.of(problem, given, "options=CommunicationOptions(bytes_per_pack=...)")
    return options if experimental_hints is None else experimental_hints


def read_options(options: object, experimental_hints: object = None) -> CommunicationOptions:
    """Return the options of a call, or the default options if neither argument is given.

    Raises:
      ArgumentError: the options are not ``CommunicationOptions``, or both arguments were given.
    """
    options = given_options(options, experimental_hints)
    if options is None:
        return DEFAULT
    if isinstance(options, CommunicationOptions):
        return options
    remedy = "CommunicationOptions(bytes_per_pack=...)"
    raise ArgumentError.of("options must be CommunicationOptions.", shown(options), remedy)


def per_replica(value: Any) -> PerReplica:
    """Return a distributed value as a ``PerReplica``, and a single array or number as the value of one replica.

    Raises:
      ArgumentError: ``value`` is anything else, including a list of arrays.
      UnsupportedError: ``value`` is a class.
    """
    if isinstance(value, PerReplica):
        return value
    if isinstance(value, DistributedValues):
        return PerReplica.on(value.values, value.devices)
    if isinstance(value, (list, tuple, dict, str, bytes)) or value is None:
        problem = "a value to reduce must be a PerReplica or an array."
        raise ArgumentError.of(problem, shown(value), "PerReplica([a, b, ...])")
    if isinstance(value, type):
        raise UnsupportedError.of("a class was given instead of a value.", shown(value), "an instance of it")
    framework_of(value)  # raises for a value that is not an array
    return PerReplica([value])


def device_names(destinations: Any) -> tuple[str, ...]:
    """Return the devices of a ``destinations`` argument.

    Raises:
      ArgumentError: the argument is not a distributed value, device name, array, variable or parameter.
    """
    if isinstance(destinations, DistributedValues):
        return destinations.devices
    if isinstance(destinations, str):
        return (canonical(destinations),)
    if not isinstance(destinations, (list, tuple, dict, bytes, int, float, complex, type)) and destinations is not None:
        with contextlib.suppress(ArgumentError, UnsupportedError):
            check_array(destinations)
            return PerReplica([destinations]).devices
    problem = "destinations must be distributed values, a device's name, or an array, variable or parameter."
    remedy = 'a name such as "cpu:0"; for several devices, any PerReplica on them'
    raise ArgumentError.of(problem, shown(destinations), remedy)


def check_array(value: Any) -> Framework:
    """Return the framework of one array, dense or sparse.

    Raises:
      ArgumentError: ``value`` is not an array.
      UnsupportedError: this library does not support the kind of array or its dtype.
    """
    framework = framework_of(value)
    x = framework.array(value)
    require_dtype(framework.spec(x.values if isinstance(x, Sparse) else x).dtype)
    return framework


def check_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """Return ``pairs`` as a list of pairs of a value and its destinations.

    Raises:
      ArgumentError: ``pairs`` is not iterable, or an element is not a pair.
    """
    if not isinstance(pairs, Iterable) or isinstance(pairs, (str, bytes, dict, DistributedValues)):
        problem = "value_destination_pairs must be pairs of value and destinations."
        raise ArgumentError.of(problem, shown(pairs), "[(value, value)]")
    pair_list = list(pairs)
    for number, pair in enumerate(pair_list):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            problem = f"element {number} of value_destination_pairs is not a pair."
            raise ArgumentError.of(problem, shown(pair), "(value, destinations)")
    return pair_list


def uniform_value(op: ReduceOp, values: tuple[Any, ...], devices: tuple[str, ...] | None) -> Checked | None:
    """Return ``values`` as a validated value if they are plain arrays of one shape and dtype in host memory.

    This is a fast path for the most common arguments. For other values it returns ``None``, and the caller uses
    ``check_value``. If ``devices`` is ``None``, array k is on ``cpu:k``, as in ``PerReplica``.
    """
    framework = KNOWN.get(type(values[0]))
    spec = None if framework is None else framework.uniform(values)
    if framework is None or spec is None:
        return None
    devices = host_devices(len(values)) if devices is None else devices
    framework.require(devices)
    return Checked.from_facts(
        values, devices, ValueFacts(op, framework, values, spec, framework.numbers(op, spec.dtype, len(values)))
    )


def check_value(op: ReduceOp | None, value: PerReplica, axis: int | None = None) -> Checked:
    """Check that the components agree and that ``op`` is defined for them, and return the validated value.

    Args:
      op: the reduction; ``None`` for a gather.
      value: the value. If it was already validated for this op, it is returned unchanged.
      axis: for a gather, the axis along which components may differ in size.
    Raises:
      MismatchError: components differ in framework, dtype or shape. The message lists all of them.
      UnsupportedError: ``op`` is not defined for the dtype, or not for sparse values.
      ArgumentError: a component is not an array, or the axis does not exist.
    """
    if type(value) is Checked and value.facts.op is op and (op is not None or value.facts.axis == axis):
        return value
    values = value.values
    if op is not None and (quick := uniform_value(op, values, value.devices)) is not None:
        return quick
    framework = framework_of(values[0])
    kind = type(values[0])
    for component in values:
        # IndexedSlices have one type for the arrays of all frameworks.
        if (type(component) is not kind or kind is IndexedSlices) and framework_of(component) is not framework:
            raise _mismatch(value, "are of different frameworks", [framework_of(v).name for v in values])
    framework.require(value.devices)
    arrays: list[Any] = [framework.array(component) for component in values]
    if op is None:
        return Checked.from_facts(values, value.devices, _gather_facts(value, framework, arrays, axis))
    are_sparse = [type(x) is Sparse for x in arrays]
    sparse = all(are_sparse)
    if any(are_sparse):
        spec = _sparse_spec(op, value, framework, arrays)
    else:
        spec, agree = framework.spec(arrays[0]), all(x.dtype == arrays[0].dtype for x in arrays)
        if not agree or any(x.shape != arrays[0].shape for x in arrays):
            specs = [framework.spec(x) for x in arrays]
            common = _common_spec(specs)
            if common is None:
                raise _mismatch(value, "differ in shape or dtype", specs)
            spec, agree = common, False
        if not agree or None in spec.shape:  # sizes are unknown while tracing: check them at run time
            arrays = framework.require_alike(arrays, spec)
    numbers = framework.numbers(op, spec.dtype, len(values))
    if any(are_sparse) and not sparse:
        arrays = [_dense(framework, x, spec, numbers.accumulator) for x in arrays]
    facts = ValueFacts(op, framework, arrays, spec, numbers, 0, sparse, any(are_sparse) and not sparse)
    return Checked.from_facts(values, value.devices, facts)


def check_result(result: Any, destinations: tuple[str, ...], method: str) -> Mirrored:
    """Return ``result`` if it is a ``Mirrored`` on the destinations. ``method`` is the custom method that returned it.

    Raises:
      UnsupportedError: ``result`` is another value.
    """
    if isinstance(result, Mirrored) and result.devices == destinations:
        return result
    problem = f"{method} must return a Mirrored on the destinations."
    given = f"a Mirrored on {list(result.devices)}" if isinstance(result, Mirrored) else shown(result)
    raise UnsupportedError.of(problem, given, f"Mirrored([...], devices={list(destinations)})")


def check_results(results: Any, destinations: list[tuple[str, ...]], ops: str) -> list[Mirrored]:
    """Return ``results``, which a batch implementation of class ``ops`` returned, if they are valid.

    Raises:
      UnsupportedError: ``results`` is not a list of one ``Mirrored`` per pair on the pair's destinations.
    """
    if not isinstance(results, list) or len(results) != len(destinations):
        problem = f"{ops}.batch_reduce_implementation must return a list of one Mirrored per pair."
        given = f"a list of {len(results)}" if isinstance(results, list) else shown(results)
        raise UnsupportedError.of(problem, f"{given} for {len(destinations)} pairs", "[Mirrored([...], devices=[...])]")
    return [
        result
        if type(result) is Mirrored and result.devices == devices
        else check_result(result, devices, "batch_reduce_implementation")
        for result, devices in zip(results, destinations, strict=True)
    ]


def _common_spec(specs: list[TensorSpec]) -> TensorSpec | None:
    """Return the spec on which several specs agree, or ``None`` if they differ. An unknown size agrees with any."""
    if len({(spec.dtype, len(spec.shape)) for spec in specs}) > 1:
        return None
    sizes: list[int | None] = []
    for axis_sizes in zip(*(spec.shape for spec in specs), strict=True):
        known_sizes = {size for size in axis_sizes if size is not None}
        if len(known_sizes) > 1:
            return None
        sizes.append(next(iter(known_sizes), None))
    return TensorSpec(tuple(sizes), specs[0].dtype)


def _dense(framework: Framework, x: Array | Sparse, spec: TensorSpec, dtype: str) -> Array:
    """Return a component as a dense array. ``dtype``: in which the slices of a sparse component are added."""
    if not isinstance(x, Sparse):
        return x
    shape = tuple(size for size in spec.shape if size is not None)
    if len(shape) < len(spec.shape):
        problem = "a sparse array without dense_shape cannot be made dense."
        given = f"{x.kind} with slices {framework.spec(x.values)}"
        raise ArgumentError.of(problem, given, "IndexedSlices(values, indices, dense_shape)")
    return framework.to_dense(x, shape, dtype)


def _sparse_spec(op: ReduceOp, value: PerReplica, framework: Framework, arrays: list[Any]) -> TensorSpec:
    """Check that components, of which some or all are sparse, agree.

    Returns their common spec, or the spec of their slices if all components are sparse.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        problem = "sparse values can only be reduced by sum or mean."
        sparse_at = next(k for k, x in enumerate(arrays) if isinstance(x, Sparse))
        given = f"{op.value} of {describe(value.values[sparse_at])}"
        raise UnsupportedError.of(problem, given, '"sum" or "mean", or make them dense first')
    sparse = [x for x in arrays if isinstance(x, Sparse)]
    specs = [_dense_spec(framework, x) for x in arrays]
    spec = _common_spec(specs)
    if spec is None or len({(x.kind, len(x.indices.shape), *x.indices.shape[1:]) for x in sparse}) > 1:
        kinds = [  # indices of shape (k,) have one sparse axis, and those of shape (k, m) have m
            f"{x.kind}, sparse axes: {(*x.indices.shape, 1)[1]}" if isinstance(x, Sparse) else "dense" for x in arrays
        ]
        formats = [f"{spec}, {kind}" for spec, kind in zip(specs, kinds, strict=True)]
        which = "sparse" if len(sparse) == len(arrays) else "sparse and dense"
        problem = f"are {which} arrays that differ in shape, dtype or sparse format"
        raise _mismatch(value, problem, formats, "shape, dtype and sparse format")
    return framework.spec(sparse[0].values) if len(sparse) == len(arrays) else spec


def _dense_spec(framework: Framework, x: Array | Sparse) -> TensorSpec:
    """Return the spec of a component in dense form. Sizes that a sparse component does not store are ``None``."""
    if not isinstance(x, Sparse):
        return framework.spec(x)
    slices = framework.spec(x.values)
    if x.shape is not None:
        return TensorSpec(tuple(x.shape), slices.dtype)
    rows: tuple[int | None, ...] = (None,) * (1 if len(x.indices.shape) == 1 else int(x.indices.shape[1]))
    return TensorSpec((*rows, *slices.shape[1:]), slices.dtype)


def _gather_facts(value: PerReplica, framework: Framework, arrays: list[Any], axis: Any) -> ValueFacts:
    """Check that components can be concatenated along an axis, and make sparse ones dense. Return what was found."""
    specs = [_dense_spec(framework, x) for x in arrays]
    for spec in specs:
        require_dtype(spec.dtype)
    ndim = len(specs[0].shape)
    try:
        axis_index = None if isinstance(axis, bool) else operator.index(axis)
    except TypeError:
        axis_index = None
    if axis_index is None or not -ndim <= axis_index < ndim:
        problem = "axis must be an integer." if axis_index is None else "the components do not have this axis."
        remedy = f"an axis from {-ndim} to {ndim - 1}" if ndim else "components with one axis: x.reshape(1), axis=0"
        raise ArgumentError.of(problem, f"axis={axis!r}, components such as {specs[0]}", remedy)
    axis_index %= ndim
    others = [spec._replace(shape=spec.shape[:axis_index] + spec.shape[axis_index + 1 :]) for spec in specs]
    if _common_spec(others) is None or any(len(spec.shape) != ndim for spec in specs):
        same = f"dtype, and the same shape except along axis {axis_index},"
        raise _mismatch(value, f"differ in dtype, or in an axis other than {axis_index}", specs, same)
    dtype = specs[0].dtype
    numbers = copy_numbers(dtype)
    if any(isinstance(x, Sparse) for x in arrays):
        wide_numbers = numbers._replace(accumulator="float32" if dtype in HALVES else dtype)
        dense = [_dense(framework, x, spec, wide_numbers.accumulator) for x, spec in zip(arrays, specs, strict=True)]
        arrays = [framework.finish(x, wide_numbers) for x in dense]
    return ValueFacts(None, framework, arrays, specs[0], numbers, axis_index)


def _mismatch(
    value: PerReplica, problem: str, properties: Iterable[object], same: str = "framework, dtype and shape"
) -> MismatchError:
    """Return the error that lists the property in which replicas differ. ``same``: all properties that must agree."""
    listing = "; ".join(
        f"replica {number} on {device}: {text}"
        for number, (device, text) in enumerate(zip(value.devices, properties, strict=True))
    )
    return MismatchError.of(f"the replicas of one value {problem}.", listing, f"the same {same} on all replicas")
