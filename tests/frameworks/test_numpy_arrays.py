"""The two compiled functions for NumPy arrays do what their replacements in Python do."""

import sys

import ml_dtypes
import numpy as np
import pytest

from crossreduce.frameworks import _numpy_arrays
from crossreduce.frameworks.numpy import arrays as framework
from crossreduce.frameworks.numpy import host_memory as results


class Subclass(np.ndarray):
    """An array of another class."""


ARRAYS = [
    np.zeros(3), np.ones((3,)), np.zeros((3, 1)), np.zeros((1, 3)), np.zeros(()), np.zeros((0, 4)),
    np.zeros(3, "float32"), np.zeros(3, ">f8"), np.zeros(3, ml_dtypes.bfloat16), np.zeros(6)[::2],
    np.zeros((2, 3)).T, np.zeros(3).view(Subclass), np.ma.zeros(3), np.float64(1), 1.5, None, "text", [1.0],
    np.zeros(3, "S3"), np.zeros(3, object), np.zeros(3, "M8[s]"),
    np.zeros(3, np.dtype("float64", metadata={"unit": "m"})),
]  # fmt: skip


def test_uniform():
    """``uniform`` returns what its Python version does: the common shape and dtype of NumPy arrays, or ``None``."""
    assert framework._uniform is _numpy_arrays.uniform  # the extension is built, and both modules use it
    assert results._empty is _numpy_arrays.empty
    found = 0
    for first in ARRAYS:
        for other in ARRAYS:
            for values in ((first,), (first, first), (first, other), (first, first, other)):
                compiled, plain = framework._uniform(values), framework._uniform_in_python(values)
                assert compiled == plain, values
                found += compiled is not None
    assert found > 50  # cases with a common shape and dtype
    with pytest.raises(SystemError, match="bad argument to internal function"):
        framework._uniform([np.zeros(3)])  # not a tuple


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16], ids=str)
def test_empty(dtype):
    """``empty`` returns separate, writable arrays that own their memory, and keeps no reference to the dtype."""
    empty = results._empty
    dtype = np.dtype(dtype)
    for shape in ((), (0,), (3,), (2, 0, 5), (4, 5)):
        before = sys.getrefcount(dtype)
        arrays = empty(shape, dtype, 3)
        for x in arrays:
            assert (type(x), x.shape, x.dtype) == (np.ndarray, shape, dtype)
            assert x.flags.owndata
            assert x.flags.writeable
            assert x.flags.c_contiguous
        assert len({id(x) for x in arrays}) == 3
        assert not any(np.shares_memory(x, y) for k, x in enumerate(arrays) for y in arrays[:k])
        del arrays, x
        assert sys.getrefcount(dtype) == before
        assert empty(shape, dtype, 0) == []
    for shape, fault in (((-1,), "negative dimensions"), ((2**62, 8), "too big|too large"), ((1.5,), "integer")):
        with pytest.raises((ValueError, TypeError, MemoryError), match=fault):
            empty(shape, dtype, 2)
