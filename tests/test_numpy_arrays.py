"""The NumPy backend's two compiled functions do what the Python ones do that stand in for them."""

import sys

import ml_dtypes
import numpy as np
import pytest

from crossreduce.frameworks import numpy as backend


class Subclass(np.ndarray):
    """An array of another class."""


def test_the_compiled_functions_are_in_use():
    """The extension was built, and the backend uses it."""
    from crossreduce.frameworks import _numpy_arrays

    assert backend._uniform is _numpy_arrays.uniform
    assert backend._empty is _numpy_arrays.empty


ARRAYS = [
    np.zeros(3), np.ones((3,)), np.zeros((3, 1)), np.zeros((1, 3)), np.zeros(()), np.zeros((0, 4)),
    np.zeros(3, "float32"), np.zeros(3, ">f8"), np.zeros(3, ml_dtypes.bfloat16), np.zeros(6)[::2],
    np.zeros((2, 3)).T, np.zeros(3).view(Subclass), np.ma.zeros(3), np.float64(1), 1.5, None, "text", [1.0],
    np.zeros(3, "S3"), np.zeros(3, object), np.zeros(3, "M8[s]"),
    np.zeros(3, np.dtype("float64", metadata={"unit": "m"})),
]  # fmt: skip


def test_uniform():
    """uniform finds exactly those tuples whose arrays are all alike, and says how."""
    found = 0
    for first in ARRAYS:
        for other in ARRAYS:
            for values in ((first,), (first, first), (first, other), (first, first, other)):
                compiled, plain = backend._uniform(values), backend._uniform_in_python(values)
                assert compiled == plain, values
                found += compiled is not None
    assert found > 50


def test_uniform_takes_tuples_only():
    """Anything else than a tuple is a slip of this package, and an error."""
    with pytest.raises(SystemError):
        backend._uniform([np.zeros(3)])


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex128", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (4, 5)])
def test_empty(shape, dtype):
    """empty gives separate, writable arrays of their own, and keeps no reference to the dtype."""
    dtype = np.dtype(dtype)
    before = sys.getrefcount(dtype)
    arrays = backend._empty(shape, dtype, 3)
    for x in arrays:
        assert (type(x), x.shape, x.dtype) == (np.ndarray, shape, dtype)
        assert x.flags.owndata
        assert x.flags.writeable
        assert x.flags.c_contiguous
    assert len({id(x) for x in arrays}) == 3
    assert not any(np.shares_memory(x, y) for k, x in enumerate(arrays) for y in arrays[:k])
    del arrays, x
    assert sys.getrefcount(dtype) == before
    assert backend._empty(shape, dtype, 0) == []


@pytest.mark.parametrize("shape", [(-1,), (2**62, 8), (1,) * 65, ("3",), (1.5,)])
def test_empty_of_impossible_shapes(shape):
    """Shapes that NumPy has no arrays of raise, and nothing is lost."""
    with pytest.raises((ValueError, TypeError, MemoryError)):
        backend._empty(shape, np.dtype("float64"), 2)
