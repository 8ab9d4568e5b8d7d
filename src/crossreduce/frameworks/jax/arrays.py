"""JAX: eager arrays on JAX's devices, and arrays traced under ``jit``, ``grad`` and ``vmap``.

Each eager function dispatches one compiled program for any number of arrays; results are committed to their device.
While ``jit`` traces, XLA decides where operations run, so copies between devices are omitted.

JAX arrays are immutable, but they can be deleted and donated, which invalidates all arrays with the same buffer. So
each result of ``engines/loop.py`` has its own buffer. ``engines/host/`` makes one buffer per array, too, but the arrays
of one result share memory. XLA does not write into it, not even if an array is donated. The last array frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ...devices import parse
from ...errors import DeviceError, UnsupportedError, shown
from ...ops import ACCUMULATORS, ALONG_AXIS, COMPLEX, ELEMENTWISE, INTEGERS, Numbers, ReduceOp
from ...packing import Cut
from ...values import IndexedSlices, TensorSpec
from ..base import Array, Immutable, Sparse, ThreadModes
from ..numpy.arrays import index_error

FUNCTIONS: Final[dict[ReduceOp, Any]] = {op: getattr(jnp, name) for op, name in ELEMENTWISE.items()}
# Settings that JAX stores per thread, each with the context manager that sets it. Older releases lack some.
_MODES: Final[dict[str, Any]] = {
    f"jax_{name}": getattr(jax, name)
    for name in (
        "default_device",
        "enable_x64",
        "default_matmul_precision",
        "default_prng_impl",
        "numpy_dtype_promotion",
        "numpy_rank_promotion",
        "debug_nans",
        "debug_infs",
        "disable_jit",
    )
    if hasattr(jax, name)
}
_LARGEST_INT32: Final = 2**31 - 1


@lru_cache(maxsize=256)
def _name(dtype: Any) -> str:
    return str(dtype.name)


@lru_cache(maxsize=256)
def _is_opaque(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


@lru_cache(maxsize=1024)
def _numbers(op: ReduceOp, dtype: str, count: int, x64: bool) -> Numbers:
    """Return how JAX computes an op over ``count`` components. ``x64`` is whether 64-bit dtypes are enabled."""
    accumulator = ACCUMULATORS[op, dtype]
    if accumulator == "float64" and dtype != "float64" and not x64:
        accumulator = "float32"
    result = dtype
    if op is ReduceOp.MEAN and dtype in INTEGERS:
        x = jax.ShapeDtypeStruct((), dtype)
        result = jax.eval_shape(jnp.true_divide, x, x).dtype.name
    return Numbers(op, dtype, accumulator, result, count if op is ReduceOp.MEAN else 1)


@lru_cache(maxsize=1024)
def place(name: str) -> tuple[Any, SingleDeviceSharding]:
    """Return the physical device of a canonical name, and the sharding of arrays on it."""
    device = parse(name)
    devices_by_id: dict[int, Any] = {}
    if not device.host:
        with suppress(RuntimeError):  # this platform does not exist here
            # JAX's name for "cuda" is "gpu". Devices are found by id, since arrays report the ids of their devices.
            devices_by_id = {d.id: d for d in jax.local_devices(backend={"cuda": "gpu"}.get(device.kind, device.kind))}
    if device.index in devices_by_id:
        return devices_by_id[device.index], SingleDeviceSharding(devices_by_id[device.index])
    here = jax.local_devices()
    advice = 'for more on the CPU, jax.config.update("jax_num_cpu_devices", n) before JAX is first used'
    if device.kind == "cuda" and not devices_by_id:
        advice = "for GPUs, JAX with its plug-in: pip install 'jax[cuda12]'"
    remedy = f"one of JAX's {len(here)} devices here ({here[0].platform}:{here[0].id}, ...), or, {advice}"
    raise DeviceError.of("JAX has no such device in this process.", name, remedy)


@lru_cache(maxsize=1024)
def _require(devices: tuple[str, ...]) -> None:
    """Raise a ``DeviceError`` if JAX lacks one of these devices."""
    for device in devices:
        # Tracers count as on cpu:0 and its logical devices, even if JAX is configured without CPU devices.
        if parse(device).physical != "cpu:0":
            place(device)


def is_somewhere(x: Array) -> bool:
    """Return whether a value is an array or a tracer that contains one, such as one of ``grad`` outside ``jit``."""
    while isinstance(x, jax.core.Tracer):
        x = getattr(x, "primal", getattr(x, "val", None))
    return isinstance(x, jax.Array)


# The following functions run under jax.jit, compiled once per combination of dtypes, shapes and static arguments.


def _cast(x: Array, dtype: str) -> Array:
    return x if x.dtype.name == dtype else x.astype(dtype)


def _divide_elements(x: Array, divisor: float) -> Array:
    """Return ``x / divisor`` as IEEE 754 defines it, rounded once.

    If all elements have the same divisor ``n``, XLA's CPU compiler replaces ``x / n`` by ``x * (1 / n)``, even if ``n``
    is an argument or is behind an ``optimization_barrier``. For n = 3, this differs in one bit for a third of all
    float32s (jaxlib 0.10.2). So each element has its own divisor: ``n``, or 1 if the element is NaN, which stays NaN.
    """
    if x.dtype.name in COMPLEX:
        return jax.lax.complex(_divide_elements(x.real, divisor), _divide_elements(x.imag, divisor))
    return jax.lax.div(x, jax.lax.select(x == x, jax.lax.full_like(x, divisor), jax.lax.full_like(x, 1)))


def finish(numbers: Numbers, x: Array) -> Array:
    """Return a fully reduced array ``x``, divided for a mean, in the dtype of the result."""
    if numbers.divisor != 1:
        x = _divide_elements(_cast(x, numbers.accumulator), numbers.divisor)
    return _cast(x, numbers.result)


def _combine_traced(numbers: Numbers, final: bool, *xs: Array) -> Array:
    """Return ``xs`` combined from left to right, see ``Framework.combine``."""
    function = FUNCTIONS[numbers.op]
    total = _cast(xs[0], numbers.accumulator)
    for x in xs[1:]:
        total = function(total, _cast(x, numbers.accumulator))
    return finish(numbers, total) if final else total


def _pack_traced(*xs: Array) -> Array:
    return jnp.concatenate([x.reshape(-1) for x in xs])


def _part_traced(flat: Array, start: Any, size: int) -> Array:
    return jax.lax.dynamic_slice(flat.reshape(-1), (start,), (size,))


def _part_beyond_int32(flat: Array, start: int, stop: int) -> Array:
    return flat.reshape(-1)[start:stop]


def _unpack_traced(cuts: tuple[Cut, ...], *parts: Array) -> tuple[Array, ...]:
    flats = [part.reshape(-1) for part in parts]
    tensors = []
    for shape, pieces in cuts:
        ranges = [flats[part][start:stop] for part, start, stop in pieces]
        tensors.append((ranges[0] if len(ranges) == 1 else jnp.concatenate(ranges)).reshape(shape))
    return tuple(tensors)


def _concat_traced(axis: int, *xs: Array) -> Array:
    return jnp.concatenate(xs, axis=axis)


def _dense_traced(shape: tuple[int, ...], dtype: str, values: Array, indices: Array) -> Array:
    """Return a dense array, to which each slice in ``values`` is added at its index in ``indices``."""
    return jnp.zeros(shape, dtype).at[indices].add(values.astype(dtype))


_FINISH: Final = jax.jit(finish, static_argnums=0)
_COMBINE: Final = jax.jit(_combine_traced, static_argnums=(0, 1))
_PACK: Final = jax.jit(_pack_traced)
_PART: Final = jax.jit(_part_traced, static_argnums=2)
_FAR_PART: Final = jax.jit(_part_beyond_int32, static_argnums=(1, 2))
_UNPACK: Final = jax.jit(_unpack_traced, static_argnums=0)
_COPY: Final = jax.jit(jnp.copy)
_CONCAT: Final = jax.jit(_concat_traced, static_argnums=0)
_DENSE: Final = jax.jit(_dense_traced, static_argnums=(0, 1))


class Jax(Immutable):
    """The ``Framework`` of JAX arrays and tracers."""

    name = "jax"
    writes_variables = False
    immutable = "JAX arrays cannot be written into."
    remedy = "omit out=: the memory of results without references is used again"

    def array(self, value: Any) -> Array | Sparse:
        if isinstance(value, jax.Array):  # true for tracers as well
            return self._plain(value)
        if isinstance(value, IndexedSlices):
            return Sparse("IndexedSlices", self._plain(value.values), self._plain(value.indices), value.dense_shape)
        from jax.experimental import sparse  # slow to import, and most programs have no sparse arrays

        if isinstance(value, sparse.BCOO) and value.n_batch == 0:
            return Sparse("BCOO", self._plain(value.data), self._plain(value.indices), tuple(value.shape))
        remedy = "a jax.Array, a BCOO without batch dimensions, or crossreduce.IndexedSlices"
        if isinstance(value, sparse.BCOO):
            remedy = "value.update_layout(n_batch=0)"
        elif isinstance(value, sparse.JAXSparse):
            remedy = "value.to_bcoo() or value.todense()"
        raise UnsupportedError.of("this kind of JAX value cannot be reduced.", shown(value), remedy)

    def _plain(self, value: Any) -> Array:
        if isinstance(value, np.ndarray):  # usually the indices of slices
            return jnp.asarray(value)
        if not isinstance(value, jax.Array):
            problem = "the values and indices of a sparse array must be arrays of JAX or NumPy."
            raise UnsupportedError.of(problem, shown(value), "a jax.Array")
        if _is_opaque(value.dtype):
            problem = "arrays of PRNG keys cannot be reduced."
            raise UnsupportedError.of(problem, shown(value), "jax.random.key_data(value)")
        if isinstance(value, jax.core.Tracer):
            return value
        if type(value.sharding) is not SingleDeviceSharding and len(value.devices()) != 1:
            problem = "a replica's array must be on one device, and this one is spread over several."
            remedy = "[shard.data for shard in x.addressable_shards], one component per replica"
            raise DeviceError.of(problem, shown(value.sharding), remedy)
        return value

    def spec(self, x: Array) -> TensorSpec:
        # Under jax.export a size may be a symbol.
        return TensorSpec(tuple(n if type(n) is int else None for n in x.shape), _name(x.dtype))

    def uniform(self, values: tuple[Any, ...]) -> TensorSpec | None:
        first, kind = values[0], type(values[0])
        if isinstance(first, jax.core.Tracer) or not isinstance(first, jax.Array) or _is_opaque(first.dtype):
            return None
        shape, dtype = first.shape, first.dtype
        for k, x in enumerate(values):
            if type(x) is not kind or x.dtype != dtype or x.shape != shape or cpu_number(x.sharding) != k:
                return None
        return TensorSpec(shape, _name(dtype))

    def require(self, devices: tuple[str, ...]) -> None:
        _require(devices)

    def numbers(self, op: ReduceOp, dtype: str, count: int) -> Numbers:
        return _numbers(op, dtype, count, bool(jax.config.jax_enable_x64))

    def to_device(self, x: Array, device: str) -> Array:
        if isinstance(x, jax.core.Tracer):
            # A tracer of grad or vmap contains an array on a device, and all operands of an op must be on one device.
            return jax.device_put(x, place(device)[0]) if is_somewhere(x) else x
        there, sharding = place(device)
        # Operations on an array that is not committed would run on the default device.
        if x.sharding == sharding:
            return x if x.committed else jax.device_put(x, there)
        # device_put is faster with a device than with a sharding (22 us, 35 us), but given a device, it keeps the type
        # of an array on a mesh of one device, and fails on host memory of the same device (JAX 0.10.2).
        plain = type(x.sharding) is SingleDeviceSharding and x.sharding.memory_kind == sharding.memory_kind
        return jax.device_put(x, there if plain else sharding)

    def pack(self, xs: Sequence[Array]) -> Array:
        # JAX has no views, so flattening would copy: a single array keeps its shape until it is cut.
        return xs[0] if len(xs) == 1 else _PACK(*xs)

    def slice(self, flat: Array, start: int, stop: int) -> Array:
        # The start is an argument of the program, so that chunks of one size share one program. But JAX's indices are
        # int32, so a start beyond that range is a constant in the program.
        return _PART(flat, start, stop - start) if stop <= _LARGEST_INT32 else _FAR_PART(flat, start, stop)

    def combine(self, xs: Sequence[Array], numbers: Numbers, final: bool, donated: int) -> Array:
        return _COMBINE(numbers, final, *xs)

    def finish(self, x: Array, numbers: Numbers) -> Array:
        return x if numbers.divisor == 1 and _name(x.dtype) == numbers.result else _FINISH(numbers, x)

    times = staticmethod(jnp.multiply)

    def unpack(self, parts: Sequence[Array], cuts: tuple[Cut, ...], fresh: bool) -> list[Array]:
        if fresh and len(parts) == len(cuts) == 1 and parts[0].shape == cuts[0][0]:
            return [parts[0]]
        return list(_UNPACK(cuts, *parts))

    def clone(self, x: Array) -> Array:
        return _COPY(x)

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        return _CONCAT(axis, *xs)

    def require_alike(self, xs: Sequence[Array], spec: TensorSpec) -> list[Array]:
        if any(x.shape != xs[0].shape for x in xs):
            problem = "the replicas have different symbolic shapes, so their sizes may differ at run time."
            raise UnsupportedError.of(problem, ", ".join(str(x.shape) for x in xs), "the same symbols on all replicas")
        return list(xs)

    def to_dense(self, sparse: Sparse, shape: tuple[int, ...], dtype: str) -> Array:
        indices = sparse.indices
        if sparse.kind == "BCOO":
            # BCOO's own conversion ignores indices beyond the shape, which are padding, as made by fromdense(nse=...).
            return self.rebuild_sparse(sparse._replace(shape=shape, values=sparse.values.astype(dtype))).todense()
        if indices.size and not isinstance(indices, jax.core.Tracer):
            lowest, highest = int(indices.min()), int(indices.max())
            if lowest < 0 or highest >= shape[0]:
                raise index_error(lowest, highest, shape)
        return _DENSE(shape, dtype, sparse.values, indices)

    def rebuild_sparse(self, sparse: Sparse) -> Any:
        if sparse.kind == "IndexedSlices":
            return IndexedSlices(sparse.values, sparse.indices, sparse.shape)
        from jax.experimental.sparse import BCOO

        return BCOO((sparse.values, sparse.indices), shape=sparse.shape)

    def accelerators(self) -> tuple[str, ...]:
        devices = jax.local_devices()
        return tuple(_canonical_name(device) for device in devices if device.platform != "cpu")

    def thread_modes(self) -> ThreadModes:
        settings = {name: getattr(jax.config, name) for name in _MODES}

        @contextmanager
        def within(_: str) -> Iterator[None]:
            with ExitStack() as stack:
                for name, value in settings.items():
                    if getattr(jax.config, name) is not value:
                        stack.enter_context(_MODES[name](value))
                yield

        return within

    def is_recorded(self, x: Any) -> bool:
        parts = (x.values, x.indices) if isinstance(x, IndexedSlices) else (x, getattr(x, "data", None))
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            problem = "a traced value cannot be reduced with values of other replicas' threads."
            remedy = "reduce outside of jit, grad and vmap: the gradients, not the loss; under jax.shard_map, "
            raise UnsupportedError.of(problem, shown(x), remedy + "crossreduce.jax.all_reduce")
        return False

    def differentiable(
        self, xs: Sequence[Array], results: Sequence[Array], gradient: Callable[[Sequence[Array]], Sequence[Array]]
    ) -> list[Array]:
        raise AssertionError("JAX records only traced values")

    def variable_values(self, olds: Sequence[Array] | None, xs: Sequence[Array], devices: Sequence[str]) -> list[Array]:
        return [self.clone(x) for x in xs]

    def reduce_axis(self, op: ReduceOp, x: Array, axis: int, numbers: Numbers) -> Array:
        return getattr(jnp, ALONG_AXIS[ELEMENTWISE[op]])(x.astype(numbers.accumulator), axis)


def _canonical_name(device: Any) -> str:
    return f"{'cuda' if device.platform == 'gpu' else device.platform}:{device.id}"


@lru_cache(maxsize=1024)
def cpu_number(sharding: Any) -> int:
    """Return the number of the CPU device on which arrays of this sharding are, or -1 if they are not on one device."""
    devices = sharding.device_set
    (device,) = devices if len(devices) == 1 else (None,)
    return device.id if device is not None and device.platform == "cpu" else -1


FRAMEWORK = Jax()
