"""The roundings of the CUDA kernels to float16 and bfloat16, compared with those of NumPy and ml_dtypes.

The kernels round a sum of one source that has the accumulator's dtype, float32, or a mean of float64 values. The right
results for float64, which ml_dtypes would round twice, follow from the numbers of the half dtype: between two
neighbours, all values below their middle give the lower one, all above it the upper one, and the middle the even one.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import cuda_launches as launches
import ml_dtypes  # noqa: F401 - gives NumPy the dtype "bfloat16"
import numpy as np

INFINITE = {"f16": 0x7C00, "bf16": 0x7F80}
NAMES = {"f16": "float16", "bf16": "bfloat16"}


@functools.cache
def magnitudes(short: str) -> np.ndarray:
    """Return the float64 values of a half dtype's bit patterns from 0 to infinity, which counts as a power of 2."""
    bits = np.arange(INFINITE[short] + 1, dtype=np.uint16)
    numbers = bits.view(NAMES[short]).astype(np.float64)
    numbers[-1] = 2.0 ** (16 if short == "f16" else 128)
    return numbers


def rounded(library: Any, values: np.ndarray, short: str) -> np.ndarray:
    """Return the bits of float32 or float64 values that a kernel rounds to a half dtype."""
    result = np.empty(values.size, np.uint16)
    tensors = [launches.Tensor(values.size, 0, [values.ctypes.data], [result.ctypes.data])]
    if values.dtype == np.float32:
        name, nbytes, kind = f"sum_{short}_mixed", (2, 4, 2), ""
    else:  # means of integers have float64 values
        name, nbytes, kind = "mean_i32_mixed", (4, 8, 2), NAMES[short]
    launch = launches.packed(tensors, [(0, 0, 0, 1)], 1, 1, nbytes, launches.KINDS[kind])
    getattr(library, name)(ctypes.create_string_buffer(launch, launches.SMALL), ctypes.c_uint32(7))
    return result


def differences(got: np.ndarray, right: np.ndarray, short: str) -> int:
    """Return how many bit patterns of a half dtype differ. All NaNs are equal."""
    differ = np.flatnonzero(got != right)
    a, b = got[differ] & 0x7FFF, right[differ] & 0x7FFF
    return int((~((a > INFINITE[short]) & (b > INFINITE[short]))).sum())


def wrong_floats(library: Any, bits: np.ndarray, short: str) -> int:
    """Return how many bit patterns of float32 are not rounded correctly."""
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        right = values.astype(NAMES[short]).view(np.uint16)
    return differences(rounded(library, values, short), right, short)


@functools.cache
def notable_bits(short: str) -> np.ndarray:
    """Return bit patterns of float32 of both signs: five around every middle, others at zero, infinity and NaNs."""
    numbers = magnitudes(short)
    middle = ((numbers[:-1] + numbers[1:]) / 2).astype(np.float32).view(np.uint32)
    at = middle.astype(np.int64)[:, None] + np.arange(-2, 3)
    ends = [np.arange(1 << 16), np.arange(0x7F7FFF00, 0x7F810000), np.arange(0x7FBFFF00, 0x7FC00100)]
    ends += [np.arange(0x7FFFFF00, 1 << 31), np.random.default_rng(3).integers(0, 1 << 31, 1 << 19)]
    magnitude = np.unique(np.concatenate([at.ravel(), *ends])).astype(np.uint32)
    return np.concatenate([magnitude, magnitude | np.uint32(1 << 31)])


def wrong_doubles(library: Any, short: str) -> int:
    """Return how many float64 values are rounded wrongly, of those at and beside the middles of all neighbours.

    So a value that is rounded twice, through float32, is found.
    """
    numbers, bits = magnitudes(short), np.arange(INFINITE[short] + 1, dtype=np.uint16)
    middle = (numbers[:-1] + numbers[1:]) / 2
    even = np.where(bits[:-1] & 1, bits[1:], bits[:-1])
    wrong = 0
    for values, right in (
        (middle, even),
        (np.nextafter(middle, -np.inf), bits[:-1]),
        (np.nextafter(middle, np.inf), bits[1:]),
    ):
        wrong += differences(rounded(library, values, short), right, short)
        wrong += differences(rounded(library, -values, short), right | 0x8000, short)
    return wrong


def wrong_widened(library: Any, short: str) -> int:
    """Return how many of all bit patterns of a half dtype are not widened to their value in float32."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    result = np.empty(bits.size, np.float32)
    tensors = [launches.Tensor(bits.size, 0, [bits.ctypes.data], [result.ctypes.data])]
    launch = launches.packed(tensors, [(0, 0, 0, 0)], 1, 1, (2, 4, 4), launches.KINDS["accumulator"])
    getattr(library, f"sum_{short}_mixed")(ctypes.create_string_buffer(launch, launches.SMALL), ctypes.c_uint32(7))
    right = bits.view(NAMES[short]).astype(np.float32)
    same = np.where(np.isnan(right), np.isnan(result), result.view(np.uint32) == right.view(np.uint32))
    return int((~same).sum())
