"""TensorFlow: tensors on logical devices, eagerly and inside ``tf.function``.

Each operation runs on the device of its operands; ``tf.device`` scopes of the caller have no effect. All operations
have gradients, so a tape can record a reduction. Most are raw ops, because in an eager batch of small tensors, the
Python code of TensorFlow's other functions takes most of the time.

Inside ``tf.function`` the device of an argument is not known. This library then assumes ``cpu:0``, and TensorFlow's
placer chooses the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import tensorflow as tf

from ...devices import canonical, parse
from ...errors import DeviceError, MismatchError, UnsupportedError, shown
from ...ops import DTYPES, ELEMENTWISE, Numbers, ReduceOp
from ...packing import Cut
from ...values import IndexedSlices, TensorSpec
from ..base import Array, Immutable, Sparse
from ..numpy.arrays import index_error, numbers_of

_RAW: Final = tf.raw_ops
_in_tensorflow_2: Final = tf.compat.v1.executing_eagerly_outside_functions  # False in a graph of TensorFlow 1
# All of these ops propagate NaN.
_RAW_NAMES: Final = {"minimum": "Minimum", "maximum": "Maximum", "multiply": "Mul"}
_RAW_NAMES_OF_BOOLS: Final = {"minimum": "LogicalAnd", "maximum": "LogicalOr", "multiply": "LogicalAnd"}
# AddN adds up to 9 tensors from left to right, but more of them in groups of 8. So no call has more than 9.
_ADDN: Final = 9
_NAMES: Final[dict[Any, str]] = {tf.as_dtype(name): name for name in DTYPES}
_DTYPES: Final[dict[str, Any]] = {name: dtype for dtype, name in _NAMES.items()}


def _logical_devices() -> dict[str, str]:
    """Return TensorFlow's names of the logical devices, by canonical name."""
    names = {}
    for device in tf.config.list_logical_devices():
        with contextlib.suppress(DeviceError):  # devices without arrays, such as TPU_SYSTEM
            names[canonical(device.name)] = device.name
    return names


@lru_cache(maxsize=1024)
def _require(devices: tuple[str, ...]) -> None:
    """Raise a ``DeviceError`` if TensorFlow lacks one of these devices."""
    here = _logical_devices()
    for device in devices:
        if parse(device).physical not in here:
            raise _absent_device(device, here)


def _absent_device(device: str, here: dict[str, str]) -> DeviceError:
    """Return the error for a device that is not in ``here``, the result of ``_logical_devices``."""
    return DeviceError.of(
        "TensorFlow has no such logical device.",
        f"{device}; logical devices: {', '.join(here)}",
        "one of these; or, for n CPU devices and before TensorFlow is first used, "
        "tf.config.set_logical_device_configuration("
        'tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * n)',
    )


@lru_cache(maxsize=4096)
def _physical_name(device: str) -> str:
    return parse(device).physical


@lru_cache(maxsize=4096)
def _scope(physical: str) -> str:
    """Return the full name of a logical device, as tensors report it."""
    spec = tf.DeviceSpec.from_string(_logical_devices()[physical])
    if spec.job is None:  # local devices are listed without a job
        spec = spec.replace(job="localhost", replica=0, task=0)
    return str(spec.to_string())


@lru_cache(maxsize=4096)
def _scope_in_graph(physical: str) -> str:
    """Return the name of a device in a graph of TensorFlow 1: without a job, or with the job and task of a worker.

    It is not checked whether the device exists, since only the session that runs the graph has devices.
    """
    device = parse(physical)
    job, _, task = device.host.rpartition("-")
    if device.host and not (job and task.isdigit()):
        raise _absent_device(physical, _logical_devices())
    kind = "GPU" if device.kind == "cuda" else device.kind.upper()
    spec = tf.DeviceSpec(job or None, replica=0, task=int(task or 0), device_type=kind, device_index=device.index)
    return str(spec.to_string())


def _scope_at(x: Array) -> Any:
    """Return the scope of an array's device or, if that is not known, one in which the placer chooses a device."""
    return tf.device(x.device or None)


def _scope_beside(x: Array) -> Any:
    """Return the scope of an array's device or, if that is not known, of the device that the placer chooses for it.

    Operations that join many arrays must run on the arrays' device, or each array would be sent separately. Operations
    that combine arrays of several devices use ``_scope_at``: additions are merged only if no device is prescribed.
    """
    return tf.device(x.device) if x.device else tf.compat.v1.colocate_with(x)


@lru_cache(maxsize=4096)
def _constant(sizes: tuple[int, ...]) -> Any:
    with tf.device("CPU:0"):
        return tf.constant(sizes, tf.int64)


def _sizes(*sizes: int) -> Any:
    """Return sizes as an operand of an op.

    Eagerly, the tensors are cached, since converting a list to a tensor takes 40 us, four times as long as the op that
    reads it. A graph needs its own constant, so that XLA can read it.
    """
    return _constant(sizes) if tf.executing_eagerly() else np.array(sizes, np.int64)


def _cast(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else _RAW.Cast(x=x, DstT=dtype)


class ShapesError(MismatchError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """A ``MismatchError`` that is also a ``tf.errors.InvalidArgumentError``, so that callers can catch either."""

    _node_def = _op = None  # TensorFlow's constructor, which is not called, sets these
    _error_code = tf.errors.INVALID_ARGUMENT
    _experimental_payloads: Final[dict[str, str]] = {}
    __reduce__ = Exception.__reduce__

    @property
    def message(self) -> str:
        """The text, under the name that all errors of TensorFlow use for it."""
        return Exception.__str__(self)


class TensorFlow(Immutable):
    """The ``Framework`` of TensorFlow's tensors, variables and ``tf.IndexedSlices``."""

    name = "tensorflow"
    immutable = "TensorFlow's tensors cannot be written into."
    remedy = "omit out=: the memory of results without references is used again; or variable.assign(result)"

    def array(self, value: Any) -> Array | Sparse:
        if isinstance(value, IndexedSlices):
            return Sparse("IndexedSlices", self._dense(value.values), self._dense(value.indices), value.dense_shape)
        if isinstance(value, tf.IndexedSlices):
            # If the dense shape is unknown while tracing, that of the result is unknown, too.
            sizes = None if value.dense_shape is None else tf.get_static_value(value.dense_shape)
            shape = None if sizes is None else tuple(int(size) for size in sizes)
            return Sparse("tf.IndexedSlices", self._dense(value.values), self._dense(value.indices), shape)
        return self._dense(value)

    def _dense(self, value: Any) -> Array:
        if not isinstance(value, tf.Tensor):
            inner = getattr(value, "value", None)  # a Keras variable has a tf.Variable as its value
            if isinstance(inner, tf.Variable):
                value = inner
            if not isinstance(value, tf.Variable):
                raise _unsupported_error(value)
            value = tf.convert_to_tensor(value)
        if value.dtype not in _NAMES or value.shape.rank is None or _has_escaped(value):
            raise _unsupported_error(value)
        return value

    def spec(self, x: Array) -> TensorSpec:
        return TensorSpec(tuple(x.shape.as_list()), _NAMES[x.dtype])

    def uniform(self, values: tuple[Any, ...]) -> TensorSpec | None:
        return None

    def require(self, devices: tuple[str, ...]) -> None:
        if _in_tensorflow_2():
            _require(devices)
        else:
            for device in devices:
                _scope_in_graph(_physical_name(device))

    def numbers(self, op: ReduceOp, dtype: str, count: int) -> Numbers:
        # Means of integers have the dtype of TensorFlow's true division.
        return numbers_of(op, dtype, count, "float32" if _DTYPES[dtype].size <= 2 else "float64")

    def to_device(self, x: Array, device: str) -> Array:
        there, here = _physical_name(device), x.device
        if (_physical_name(here) if here else "cpu:0") == there:
            return x
        with tf.device(_scope(there) if _in_tensorflow_2() else _scope_in_graph(there)):
            return _RAW.Identity(input=x)

    def pack(self, xs: Sequence[Array]) -> Array:
        with _scope_beside(xs[0]):
            if len({x.dtype for x in xs}) > 1:  # some were sparse, and were made dense in a wider dtype
                wide = max((x.dtype for x in xs), key=lambda dtype: dtype.size)
                xs = [_cast(x, wide) for x in xs]
            flats = [x if x.shape.rank == 1 else _RAW.Reshape(tensor=x, shape=_sizes(-1)) for x in xs]
            return flats[0] if len(flats) == 1 else _RAW.ConcatV2(values=flats, axis=0)

    def slice(self, flat: Array, start: int, stop: int) -> Array:
        with _scope_at(flat):
            return _RAW.Slice(input=flat, begin=_sizes(start), size=_sizes(stop - start))

    def combine(self, xs: Sequence[Array], numbers: Numbers, final: bool, donated: int) -> Array:
        wide = _DTYPES[numbers.accumulator]
        with _scope_at(xs[0]):
            out = _cast(xs[0], wide)
            if numbers.op in (ReduceOp.SUM, ReduceOp.MEAN):
                # Operands that must be cast are added one by one, so that only one exists in the wider dtype at a time.
                more = _ADDN - 1 if numbers.accumulator == numbers.dtype else 1
                for k in range(1, len(xs), more):
                    out = _RAW.AddN(inputs=[out, *(_cast(x, wide) for x in xs[k : k + more])])
            else:
                names = _RAW_NAMES_OF_BOOLS if numbers.accumulator == "bool" else _RAW_NAMES
                binary = getattr(_RAW, names[ELEMENTWISE[numbers.op]])
                for x in xs[1:]:
                    out = binary(x=out, y=_cast(x, wide))
        return self.finish(out, numbers) if final else out

    def finish(self, x: Array, numbers: Numbers) -> Array:
        if numbers.divisor == 1 and numbers.result == _NAMES[x.dtype]:
            return x
        with _scope_at(x):
            if numbers.divisor != 1:
                x = _divide_elements(_cast(x, _DTYPES[numbers.accumulator]), numbers.divisor)
            return _cast(x, _DTYPES[numbers.result])

    def times(self, x: Array, factor: float) -> Array:
        with _scope_at(x):
            return x * factor

    def unpack(self, parts: Sequence[Array], cuts: tuple[Cut, ...], fresh: bool) -> list[Array]:
        # Tensors are immutable, so they may share memory and ``fresh`` does not matter. The pieces tile each part in
        # order, so one split returns all of them.
        sizes: list[list[int]] = [[] for _ in parts]
        for _, pieces in cuts:
            for part, start, stop in pieces:
                sizes[part].append(stop - start)
        with _scope_at(parts[0]):
            views = [
                iter(
                    [part]
                    if len(part_sizes) == 1
                    else _RAW.SplitV(value=part, size_splits=_sizes(*part_sizes), axis=0, num_split=len(part_sizes))
                )
                for part, part_sizes in zip(parts, sizes, strict=True)
            ]
            tensors = []
            for shape, pieces in cuts:
                flats = [next(views[part]) for part, _, _ in pieces]
                x = flats[0] if len(flats) == 1 else _RAW.ConcatV2(values=flats, axis=0)
                tensors.append(x if len(shape) == 1 else _RAW.Reshape(tensor=x, shape=_sizes(*shape)))
        return tensors

    def clone(self, x: Array) -> Array:
        return x

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        if len({x.dtype for x in xs}) > 1:  # indices, some of int32 and some of int64
            xs = [_cast(x, tf.int64) for x in xs]
        if len(xs) == 1:
            return xs[0]
        with _scope_at(xs[0]):
            return _RAW.ConcatV2(values=list(xs), axis=axis)

    def require_alike(self, xs: Sequence[Array], spec: TensorSpec) -> list[Array]:
        if None not in spec.shape:
            return [tf.ensure_shape(x, spec.shape) for x in xs]
        sizes = [tf.shape(x) for x in xs]
        same = [
            tf.debugging.assert_equal(size, sizes[0], message="the replicas of one value differ in shape")
            for size in sizes[1:]
        ]
        with tf.control_dependencies([check for check in same if check is not None]):
            return [tf.ensure_shape(tf.identity(x), spec.shape) for x in xs]

    def to_dense(self, sparse: Sparse, shape: tuple[int, ...], dtype: str) -> Array:
        values, indices = _cast(sparse.values, _DTYPES[dtype]), sparse.indices
        if not tf.is_symbolic_tensor(indices) and math.prod(indices.shape):
            rows = indices.numpy()
            if rows.min() < 0 or rows.max() >= shape[0]:
                raise index_error(int(rows.min()), int(rows.max()), shape)
        with _scope_at(values):
            return _RAW.ScatterNd(
                indices=tf.expand_dims(indices, 1), updates=values, shape=tf.constant(shape, indices.dtype)
            )

    def rebuild_sparse(self, sparse: Sparse) -> Any:
        if sparse.kind == "IndexedSlices":
            return IndexedSlices(sparse.values, sparse.indices, sparse.shape)
        with _scope_at(sparse.values):
            shape = None if sparse.shape is None else tf.constant(sparse.shape, tf.int64)
        return tf.IndexedSlices(sparse.values, sparse.indices, shape)


def _divide_elements(x: Array, divisor: float) -> Array:
    """Return ``x / divisor``, rounded once. A multiplication by the reciprocal would round twice."""
    if x.dtype.is_complex:  # TensorFlow's complex division rounds several times, and turns inf into NaN
        return tf.complex(_divide_elements(tf.math.real(x), divisor), _divide_elements(tf.math.imag(x), divisor))
    y = tf.constant(divisor, x.dtype)
    if not tf.executing_eagerly():
        # Grappler would multiply by a constant's rounded reciprocal; it does not treat a placeholder as a constant.
        # (XLA does, and its result differs by at most one unit in the last place.)
        y = _RAW.PlaceholderWithDefault(input=y, shape=())
    return _RAW.RealDiv(x=x, y=y)


def _has_escaped(x: Any) -> bool:
    """Return whether a tensor is symbolic although nothing is traced: it has escaped from a tf.function."""
    return not hasattr(x, "numpy") and tf.executing_eagerly()


def _unsupported_error(value: Any) -> UnsupportedError:
    """Return the error for a value that cannot be reduced, with the reason and a remedy for its kind."""
    if isinstance(value, tf.Tensor) and value.shape.rank is None:
        problem = "a tensor of unknown rank cannot be reduced; one of known rank and unknown sizes can."
        remedy = "tf.ensure_shape(tensor, [None, None]), with one None per axis; or an input_signature with a rank"
        return UnsupportedError.of(problem, shown(value), remedy)
    if isinstance(value, tf.Tensor) and value.dtype in _NAMES:
        problem = "a symbolic tensor of a tf.function has no value outside of it."
        return UnsupportedError.of(problem, shown(value), "reduce it inside the function, or use the function's result")
    if isinstance(value, tf.Tensor):
        problem = f"tensors of dtype {value.dtype.name} cannot be reduced."
        return UnsupportedError.of(problem, shown(value), "cast to one of " + ", ".join(sorted(_DTYPES)))
    remedies = {
        "SparseTensor": "tf.sparse.to_dense(value), or tf.IndexedSlices",
        "RaggedTensor": "value.to_tensor(), or reduce value.flat_values",
    }
    kind = type(value).__name__
    remedy = remedies.get(kind, "a tf.Tensor, tf.Variable or tf.IndexedSlices")
    return UnsupportedError.of(f"a {kind} cannot be reduced.", shown(value), remedy)


FRAMEWORK = TensorFlow()
