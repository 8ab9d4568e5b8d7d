"""The memory of TensorFlow's eager tensors on CPU devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import tensorflow as tf

from ...devices import canonical, parse
from ...frameworks import Array
from ...frameworks.host_memory import SharedResults
from .arrays import FRAMEWORK


class TensorFlowMemory(SharedResults):
    """See ``ArrayMemory``."""

    def readable(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]] | None:
        if not tf.executing_eagerly() or _is_recording():  # a tape records TensorFlow's own operations only
            return None
        if not all(_is_cpu(x.device) for row in arrays for x in row):
            return None
        if arrays and arrays[0][0].dtype == tf.bfloat16:  # the buffer protocol has no bfloat16
            return [[tf.raw_ops.Bitcast(input=x, type=tf.uint16) for x in row] for row in arrays]
        return arrays

    def wrap(
        self, blanks: list[list[Any]], shapes: Sequence[tuple[int, ...]], dtype: str, devices: tuple[str, ...]
    ) -> list[tuple[Array, ...]]:
        # ``to_device`` to another logical device of the host copies no memory.
        tensors = [_wrap(memory, shape, dtype) for (memory,), shape in zip(blanks, shapes, strict=True)]
        return [tuple(FRAMEWORK.to_device(x, device) for device in devices) for x in tensors]


@lru_cache(maxsize=4096)
def _is_cpu(device: str) -> bool:
    return parse(canonical(device)).kind == "cpu"


def _is_recording() -> bool:
    """Return whether a gradient tape or a forward accumulator may be recording."""
    from tensorflow.python.eager import record  # TensorFlow has no public function for this

    return bool(record.could_possibly_record())


def _wrap(memory: Any, shape: tuple[int, ...], dtype: str) -> Array:
    """Return a tensor on cpu:0 that uses aligned memory without a copy."""
    bits = dtype == "bfloat16"  # NumPy's DLPack export has no bfloat16
    array = np.frombuffer(memory, np.uint16 if bits else dtype).reshape(shape)
    x = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.raw_ops.Bitcast(input=x, type=tf.bfloat16) if bits else x


MEMORY: Final = TensorFlowMemory()
