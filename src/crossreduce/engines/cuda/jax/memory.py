"""The memory of eager JAX arrays on the CUDA devices of this process.

XLA queues its programs on one internal stream per device, the compute stream, which it does not expose. It exposes only
the streams that it uses for DLPack. One of them per device is the current stream of this file; a plan runs on it.

- **Inputs**: ``x.__dlpack__(stream=...)`` lets the stream wait until ``x`` is ready, and returns a capsule that keeps
  its memory, even if ``x`` is deleted.
- **Results and temporary memory**: a program with a custom call that does nothing returns them, so they are memory of
  XLA's allocator with undefined content. A capsule of each, which is released at once, lets the stream wait for that
  program, and so for the programs that used the memory before.
- **The end of a plan**: after the plan was queued, ``jax.dlpack.from_dlpack`` imports a small array per device. It
  records an event on one of the streams for DLPack, taken in turn, and all users of that array wait for the event; so
  this stream first has to wait for the current one. A program then reads the small array, and returns the memory of
  the results, which it receives as donated arguments. So all users of a result wait for the plan.
- **Freed memory**: XLA's allocator gives it to the next program of the compute stream. That does not wait for the
  current stream, but it runs after the program that reads the small array. So inputs and temporary memory are kept
  until the latter is queued on every device of the plan.

All threads use the same stream of a device. It waits only for work queued before, so calls cannot block each other for
ever. Source: PjRtStreamExecutorClient and LocalDeviceState in xla/pjrt of OpenXLA; DLPack's specification for Python.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import SingleDeviceSharding

from ....frameworks import Array
from ....frameworks.jax import arrays as framework
from ..driver import native
from ..memory import DeviceMemory, Operands
from . import WIDE

EMPTY: Final = "crossreduce_cuda_empty"
_LOG: Final = logging.getLogger("crossreduce")
_KDLCUDA: Final = 2
_STREAMS: Final[dict[int, int]] = {}
_PASS_ON: Final = jax.jit(lambda small, xs: jax.lax.optimization_barrier((small + 1, xs)), donate_argnums=1)
_state: Any = getattr(core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state  # JAX 0.9
with jax.core.eval_context():
    _EAGER: Final = _state()


class _Block(NamedTuple):
    """The memory of an array. ``capsule`` keeps it if the user may delete the array."""

    array: Array
    address: int
    device: int
    capsule: Any = None


class JaxDeviceMemory(DeviceMemory):
    """See ``DeviceMemory``. Devices are the CUDA driver's numbers; JAX's names have the ids of JAX's devices."""

    def ordinal(self, index: int) -> int | None:
        number = _number(framework.place(f"cuda:{index}")[0])
        try:
            _register()  # only now that JAX has started: a handler that it does not accept would prevent its start
            self.stream(number)
        except Exception as error:  # noqa: BLE001 -- another runtime or version of XLA may raise any class
            _LOG.info("the CUDA engine cannot reduce JAX arrays on several devices: %s", error)
            return None
        return number

    def operands(self, arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> Operands | None:
        flat = [x for row in arrays for x in row]
        if any(isinstance(x, jax.core.Tracer) for x in flat) or not _is_plain_mode():
            return None
        dtype = flat[0].dtype
        if not jax.dlpack.is_supported_dtype(dtype) or (dtype.name in WIDE and not jax.config.jax_enable_x64):
            return None
        if any(all(x.weak_type for x in row) for row in arrays):
            return None  # the result must be weakly typed, too (mostly scalars)
        names = [f"cuda:{_device(number).id}" for number in devices]
        on_devices = [
            [framework.FRAMEWORK.to_device(x, name) for x, name in zip(row, names, strict=True)] for row in arrays
        ]
        if not all(_is_dense(x) for row in on_devices for x in row):
            return None
        blocks = [[self._exported(x, number) for x, number in zip(row, devices, strict=True)] for row in on_devices]
        return Operands([[block.address for block in row] for row in blocks], on_devices, blocks)

    def _exported(self, x: Array, device: int) -> _Block:
        """Return an array's memory with its capsule, and let the current stream wait for the array."""
        if not x.size:
            return _Block(x, 0, device)
        return _Block(x, x.unsafe_buffer_pointer(), device, _capsule(x, self.stream(device)))

    def address(self, array: Any) -> int:
        return int(array.address)

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        return self.allocate_all([shape], dtype, [device])[0][0]

    def allocate_all(self, shapes: Sequence[tuple[int, ...]], dtype: str, devices: Sequence[int]) -> list[list[Any]]:
        fresh = {  # by device, its new arrays for all its positions in ``devices``, made by one program
            number: iter(_empty(number, tuple(shapes) * devices.count(number), dtype)())
            for number in sorted({*devices})
        }
        columns = [
            [self._exported(next(fresh[number]), number)._replace(capsule=None) for _ in shapes] for number in devices
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    def scratch(self, nbytes: int, device: int) -> tuple[Any, int]:
        block = self.allocate((nbytes,), "uint8", device)
        return block, block.address

    def stream(self, device: int) -> int:
        known = _STREAMS.get(device)
        return _STREAMS.setdefault(device, _external_stream(_device(device))) if known is None else known

    @contextmanager
    def queueing(self, devices: Sequence[int], results: list[list[Any]]) -> Iterator[list[list[Array]]]:
        finished = [[block.array for block in row] for row in results]
        with ExitStack() as stack:  # runs all callbacks, whatever fails
            for device in devices:
                stack.callback(self._pass_on, device, results, finished)
            yield finished

    def _pass_on(self, device: int, results: list[list[_Block]], finished: list[list[Array]]) -> None:
        """Make XLA's later programs on a device wait for the current stream; update its results in ``finished``."""
        small = _imported(self._exported(_small(device), device))
        places = [
            (j, k)
            for j, row in enumerate(results)
            for k, block in enumerate(row)
            if block.device == device and block.address
        ]
        _, arrays = _PASS_ON(small, [finished[j][k] for j, k in places])
        for (j, k), x in zip(places, arrays, strict=True):
            finished[j][k] = x

    def writable_outputs(self, arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> list[list[int]]:
        raise BufferError("JAX arrays are immutable")

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        pass


class _Exported:
    """A block as the array of another library, which ``from_dlpack`` imports."""

    def __init__(self, block: _Block) -> None:
        self._block = block

    def __dlpack_device__(self) -> tuple[int, int]:
        return _KDLCUDA, self._block.device

    def __dlpack__(self, *, stream: int) -> Any:
        """Return the capsule, after letting ``stream`` wait for the work in the current stream."""
        device = self._block.device
        if stream != MEMORY.stream(device):
            native().follow(device, stream, MEMORY.stream(device))
        return self._block.capsule


def _is_plain_mode() -> bool:
    """Return whether JAX executes calls immediately (no tracing), and does not check the content of arrays."""
    config = jax.config
    return _state() == _EAGER and not (config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs)


def _is_dense(x: Array) -> bool:
    """Return whether the elements of an array are in the order of C."""
    layout = x.format.layout if x.ndim > 1 else None  # also ``None`` if the array was deleted
    return layout is None or bool(layout.major_to_minor == tuple(range(x.ndim)))


@cache
def _device(number: int) -> Any:
    """Return JAX's device with a number of the CUDA driver."""
    (device,) = [device for device in _local_devices() if _number(device) == number]
    return device


@cache
def _register() -> None:
    jax.ffi.register_ffi_target(EMPTY, native().xla_empty_handler(), platform="CUDA")


@lru_cache(maxsize=1024)
def _empty(number: int, shapes: tuple[tuple[int, ...], ...], dtype: str) -> Any:
    """Return a function that returns new arrays with undefined content on a device."""
    kinds = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(jax.ffi.ffi_call(EMPTY, kinds), out_shardings=SingleDeviceSharding(_device(number)))


@cache
def _small(number: int) -> Array:
    """Return the small array of a device that ends plans. It is never freed or written."""
    return jax.device_put(jnp.zeros(1, "uint8"), _device(number))


# Access to JAX's devices and streams; tests replace these functions.


def _local_devices() -> list[Any]:
    return list(jax.local_devices(backend="gpu"))


def _number(device: Any) -> int:
    return int(device.local_hardware_id)


def _external_stream(device: Any) -> int:
    return int(device.get_stream_for_external_ready_events())


def _capsule(x: Array, stream: int) -> Any:
    return x.__dlpack__(stream=stream)


def _imported(block: _Block) -> Array:
    return jax.dlpack.from_dlpack(_Exported(block))


MEMORY: Final = JaxDeviceMemory()
