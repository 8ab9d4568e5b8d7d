"""Distributed values: one component per replica, each on its device.

Input: arrays of any framework. Output: ``PerReplica`` and ``Mirrored`` values, and ``IndexedSlices`` for sparse arrays.
These store references to arrays and never read their elements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

from .autograph import unconverted
from .devices import Device, canonical, parse
from .errors import ArgumentError, DeviceError, shown


class TensorSpec(NamedTuple):
    """The shape and the dtype's name of an array. A size that tracing leaves unknown is ``None``."""

    shape: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"


class IndexedSlices:
    """A sparse array: ``values[k]`` is row ``indices[k]`` of an array that is zero elsewhere.

    Slices with the same index are summed, as in TensorFlow's class of this name.

    Args:
      values: shape ``(k, *rest)``, any framework.
      indices: integers, shape ``(k,)``, of the same framework.
      dense_shape: the shape of the dense array, ``(rows, *rest)``; ``None`` if it is not known.
    Raises:
      ArgumentError: the shapes do not agree, or an argument is invalid.

    >>> IndexedSlices([[1.0, 2.0]], [3], dense_shape=(5, 2))
    IndexedSlices(values=float64[1, 2], indices=int64[1], dense_shape=(5, 2))
    """

    __slots__ = ("dense_shape", "indices", "values")

    @unconverted
    def __init__(self, values: Any, indices: Any, dense_shape: Iterable[int] | None = None) -> None:
        self.values = _array(values)
        # NumPy would make an empty list an array of float64.
        self.indices = _array(indices, "int64" if isinstance(indices, (list, tuple)) and not indices else None)
        self.dense_shape = None if dense_shape is None else _shape(dense_shape)
        sizes, count = tuple(self.values.shape), tuple(self.indices.shape)  # a size is None if tracing does not know it
        if len(sizes) < 1 or len(count) != 1 or (None not in (sizes[0], count[0]) and sizes[0] != count[0]):
            problem = "IndexedSlices must have one index per slice."
            given = f"values of shape {sizes}, indices of shape {count}"
            raise ArgumentError.of(problem, given, "values of shape (k, ...) and indices of shape (k,)")
        if "int" not in str(self.indices.dtype):
            problem = "the indices of slices must be integers."
            raise ArgumentError.of(problem, describe(self.indices), "int64 or int32 indices")
        shape = self.dense_shape
        if shape is not None and (len(shape) != len(sizes) or shape[1:] != sizes[1:]) and None not in sizes[1:]:
            problem = "dense_shape does not agree with the slices."
            given = f"values of shape {sizes}, dense_shape {shape}"
            wanted = ", ".join(["rows", *map(str, sizes[1:])]) + "," * (len(sizes) == 1)
            raise ArgumentError.of(problem, given, f"({wanted})")

    @property
    def device(self) -> Any:
        """The device of the slices, in the framework's own form."""
        return self.values.device

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={describe(self.values)}, indices={describe(self.indices)}, "
            f"dense_shape={self.dense_shape})"
        )


class DistributedValues:
    """The base class of ``PerReplica`` and ``Mirrored``: components and their devices."""

    __slots__ = ("_devices", "_values")
    _values: tuple[Any, ...]
    _devices: tuple[str, ...]

    @unconverted
    def __init__(self, values: Iterable[Any], devices: Iterable[str] | None = None) -> None:
        kind = type(self).__name__
        if isinstance(values, (str, bytes, dict)) or hasattr(values, "shape") or not isinstance(values, Iterable):
            problem = f"{kind} requires a list of one array per replica."
            raise ArgumentError.of(problem, shown(values), f"{kind}([a, b, ...])")
        self._values = tuple(values)
        for number, value in enumerate(self._values):
            if value is None or isinstance(value, (list, tuple, dict, set, str, bytes, DistributedValues)):
                remedy = "one array per replica; crossreduce.all_reduce takes dicts, lists and other trees"
                raise ArgumentError.of(f"component {number} of a {kind} is not an array.", shown(value), remedy)
        if not self._values:
            raise ArgumentError.of(f"{kind} needs at least one component.", shown(values), f"{kind}([array])")
        if devices is None:
            self._devices = default_devices([locate(value) for value in self._values])
        else:
            self._devices = read_devices(devices)
            if len(self._devices) != len(self._values):
                problem = f"{kind} needs one device for each component."
                given = f"{len(self._values)} components, {len(self._devices)} devices"
                raise ArgumentError.of(problem, given, "devices=None: each component stays on its device")

    @classmethod
    def on(cls, values: tuple[Any, ...], devices: tuple[str, ...]) -> Self:
        """Return a distributed value. Its components and canonical device names are not checked."""
        value = cls.__new__(cls)
        value._values = values
        value._devices = devices
        return value

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, in the order of the replicas."""
        return self._values

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the components, canonical names, in the same order."""
        return self._devices

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __getitem__(self, index: int) -> Any:
        return self._values[index]

    def __repr__(self) -> str:
        lines = (f"  {device}: {describe(value)}" for device, value in zip(self._devices, self._values, strict=True))
        return f"{type(self).__name__}(\n" + ",\n".join(lines) + "\n)"


class PerReplica(DistributedValues):
    """One component per replica, each with its own content: the input of a reduction.

    Args:
      values: the components, in the order of the replicas: arrays or sparse arrays of one framework.
      devices: one device name per component. By default each component stays on the device that its framework reports,
        and arrays in host memory are on ``cpu:0``, ``cpu:1``, ... (see ``default_devices``). A component that is not on
        the named device is copied there when it is reduced.
    Raises:
      ArgumentError: ``values`` is empty or not a list of arrays, there are more or fewer devices than components, or a
        device is listed twice.
      DeviceError: a device's name cannot be parsed.

    >>> import numpy as np
    >>> PerReplica([np.zeros(3, "float32"), np.ones(3, "float32")])
    PerReplica(
      cpu:0: float32[3],
      cpu:1: float32[3]
    )
    """

    __slots__ = ()


class Mirrored(DistributedValues):
    """The same content on every device: the result of a reduction.

    >>> import numpy as np
    >>> len(Mirrored([np.ones(2), np.ones(2)]))
    2
    """

    __slots__ = ()


def read_devices(devices: Iterable[str]) -> tuple[str, ...]:
    """Return the canonical names of a list of devices.

    Raises:
      ArgumentError: ``devices`` is not a list of names, or a device is listed twice.
      DeviceError: a name cannot be parsed.
    """
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise ArgumentError.of("devices must be a list of names.", shown(devices), '["cpu:0", "cpu:1"]')
    given = list(devices)
    names = tuple(canonical(name) for name in given)
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        listed = f"{', '.join(twice)} {'is' if len(twice) == 1 else 'are'} listed more than once"
        problem = f"each device may be listed only once: {listed}."
        physical = twice[0].split("#")[0]
        free = next(name for k in range(1, len(names) + 1) if (name := f"{physical}#{k}") not in names)
        remedy = f'logical devices of the same physical device, such as "{free}"'
        raise ArgumentError.of(problem, ", ".join(str(name) for name in given), remedy)
    return names


def locate(array: object) -> str | None:
    """Return the device that an array reports, or ``None`` if it reports none (a tracer of jit, a list).

    This reads the ``device`` attribute of the array API standard. In NumPy and torch, "cpu" without an index is all of
    host memory. Other names in torch and TensorFlow are single devices. JAX has an object with a platform and an id,
    and CuPy a CUDA device with an id.
    """
    if type(array) in (bool, int, float, complex):
        return "cpu"
    try:
        device: Any = array.device  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - JAX's tracers raise their own kind of error
        if type(array).__module__.partition(".")[0] == "numpy":  # arrays of NumPy 1 have no such attribute
            return "cpu"
        # Tracers of grad and vmap, and JAX's sparse arrays, contain an array that has a device.
        inner = next((getattr(array, name) for name in ("data", "primal", "val") if hasattr(array, name)), None)
        return None if inner is None else locate(inner)
    if type(device) is str:
        return device or None
    if str(device) == "meta":  # torch's tensors without data; frameworks/torch/arrays.py refuses them
        return None
    if hasattr(device, "id"):
        return f"{getattr(device, 'platform', 'cuda')}:{device.id}"
    if hasattr(device, "device_set"):
        problem = "a replica's array must be on one device, and this one is spread over several."
        remedy = "[shard.data for shard in x.addressable_shards], one component per replica"
        raise DeviceError.of(problem, shown(device), remedy)
    return str(device) or None


@lru_cache(maxsize=1024)
def host_devices(n: int) -> tuple[str, ...]:
    """Return the names of ``n`` logical devices in this host's memory: ``cpu:0`` to ``cpu:n-1``."""
    return tuple(f"cpu:{k}" for k in range(n))


def default_devices(places: list[str | None]) -> tuple[str, ...]:
    """Return a different device name for each array. ``places`` has the device that each array reports.

    Array number k is on ``cpu:k`` if it reports host memory (``"cpu"``). Arrays on the same accelerator get different
    logical devices on it, so that one GPU can emulate several. An array without a device counts as on ``cpu:0``.

    >>> default_devices(["cpu", "cpu"]), default_devices(["cuda:0", "cuda:0", "cuda:1"])
    (('cpu:0', 'cpu:1'), ('cuda:0', 'cuda:0#1', 'cuda:1'))
    """
    return _default_devices(tuple(places))


@lru_cache(maxsize=1024)  # one tuple for equal places, so that calls with many values compare it at once
def _default_devices(places: tuple[str | None, ...]) -> tuple[str, ...]:
    if all(place == "cpu" for place in places):
        return host_devices(len(places))
    names: dict[str, None] = {}
    used: dict[Device, int] = {}  # the number of logical devices of each device that have a name so far
    for k, place in enumerate(places):
        device = parse(f"cpu:{k}" if place == "cpu" else place or "cpu:0")
        logical = used.get(device, 0)
        while (name := str(replace(device, logical=device.logical + logical))) in names:
            logical += 1
        used[device] = logical + 1
        names[name] = None
    return tuple(names)


def describe(value: Any) -> str:
    """Return an array's dtype and shape as a short text, or the shortened repr and the type of any other object.

    >>> describe(3)
    '3 (int)'
    """
    if isinstance(value, IndexedSlices):
        return repr(value)
    try:
        name = getattr(value.dtype, "name", None) or str(value.dtype).removeprefix("torch.")
        return str(TensorSpec(tuple(value.shape), name))
    except Exception:  # noqa: BLE001 - a repr must not fail
        return shown(value, 60)


def _shape(sizes: Iterable[int]) -> tuple[int, ...]:
    try:
        shape = tuple(operator.index(size) for size in sizes)
    except TypeError:
        shape = (-1,)  # refused below
    if min(shape, default=0) < 0:
        problem = "dense_shape must be a tuple of whole numbers, each 0 or more."
        raise ArgumentError.of(problem, shown(sizes), "a tuple such as (5, 2)")
    return shape


def _array(value: Any, dtype: str | None = None) -> Any:
    """Return an array unchanged, and a list or number as a NumPy array of ``dtype``."""
    if hasattr(value, "shape"):
        return value
    import numpy  # only lists need NumPy, so it is imported here

    try:
        return numpy.asarray(value, dtype)
    except ValueError as error:
        problem = "IndexedSlices must contain arrays, or lists that NumPy can convert to arrays."
        raise ArgumentError.of(problem, shown(value), "rows of equal lengths: [[1.0, 2.0], [3.0, 4.0]]") from error
