"""The memory of JAX arrays on CPU devices.

The arrays of a result, one per device, share one memory. XLA never writes into it, not even if an array is donated, and
it is freed with the last of the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...frameworks import Array
from ...frameworks.host_memory import SharedResults
from .arrays import cpu_number, place

_X64: Final = frozenset({"float64", "complex128", "int64", "uint64"})


class JaxMemory(SharedResults):
    """See ``ArrayMemory``."""

    def readable(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]] | None:
        shardings = set()
        for row in arrays:
            weak = True
            for x in row:
                if isinstance(x, jax.core.Tracer):
                    return None
                shardings.add(x.sharding)  # much faster than x.device
                weak = weak and x.weak_type
            if weak:  # the result must be weakly typed, too, and ``wrap`` makes no such arrays (mostly scalars)
                return None
        if any(cpu_number(sharding) < 0 for sharding in shardings):
            return None
        views = [[np.asarray(x) for x in row] for row in arrays]  # no copy; waits until the array is computed
        if views and views[0][0].dtype.kind == "V":
            return [[x.view(np.uint16) for x in row] for row in views]  # the buffer protocol has no bfloat16
        return views

    def wrap(
        self, blanks: list[list[Any]], shapes: Sequence[tuple[int, ...]], dtype: str, devices: tuple[str, ...]
    ) -> list[tuple[Array, ...]]:
        # JAX uses the memory without a copy, since ``kernels.memory`` aligns it to 64 bytes.
        kind = np.dtype(dtype)
        filled = [np.frombuffer(memory, kind).reshape(shape) for (memory,), shape in zip(blanks, shapes, strict=True)]
        # Arrays that were made while x64 was enabled keep their 64-bit dtypes. Making such results needs x64 again.
        wide = kind.name in _X64 and not jax.config.jax_enable_x64
        with jax.enable_x64(True) if wide else nullcontext():
            return _on_all(filled, devices)


def _on_all(xs: list[Any], devices: tuple[str, ...]) -> list[tuple[Array, ...]]:
    """Return for each NumPy array one JAX array per device. All of these share the NumPy array's memory."""
    replicated = _replicated_sharding(devices)
    if replicated is None:  # several names are logical devices of one physical device
        shardings = [place(device)[1] for device in devices]
        arrays = jax.device_put([x for x in xs for _ in devices], shardings * len(xs))
        return [tuple(arrays[k : k + len(devices)]) for k in range(0, len(arrays), len(devices))]
    # One array on all devices, split into its shards, is much faster to make than one array per device: 160 arrays
    # of 1 KiB on 8 devices take 14 ms instead of 32.
    rows = []
    for x in jax.device_put(xs, [replicated] * len(xs)):
        here = {shard.device: shard.data for shard in x.addressable_shards}
        rows.append(tuple(here[place(device)[0]] for device in devices))
    return rows


@lru_cache(maxsize=1024)
def _replicated_sharding(devices: tuple[str, ...]) -> NamedSharding | None:
    """Return the sharding with a complete copy on each device, or ``None`` if two names denote one physical device."""
    places = [place(device)[0] for device in devices]
    return None if len(set(places)) < len(places) else NamedSharding(Mesh(np.array(places), ("all",)), PartitionSpec())


MEMORY: Final = JaxMemory()
