"""Arrays of NumPy and torch for tests of ``out=``. Guard bytes around each array detect writes beside the array."""

import numpy as np
import oracle
import pytest

import crossreduce as cr
from crossreduce import Mirrored, PerReplica

GUARD = 64  # bytes before and after each array, which must not change
POISON = 0xA5
WRITABLE = ["numpy", "torch"]
LIKE = "the arrays of out must have the framework, shape and dtype of the result"
SHARED = "results cannot be written into arrays that share memory"


class Arrays:
    """Creates arrays of NumPy or torch in memory blocks with guards, and returns the bytes of all blocks."""

    def __init__(self, framework):
        self.framework, self.blocks = framework, []

    def put(self, x):
        """Return a new array with the elements of ``x``."""
        x = np.asarray(x)
        block = np.full(x.nbytes + 2 * GUARD, POISON, np.uint8)
        self.blocks.append(block)
        part = block[GUARD : GUARD + x.nbytes]
        part.view(x.dtype)[...] = x.reshape(-1)
        if self.framework.name == "numpy":
            return part.view(x.dtype).reshape(x.shape)
        torch = self.framework.torch
        return torch.from_numpy(block)[GUARD : GUARD + x.nbytes].view(getattr(torch, x.dtype.name)).reshape(x.shape)

    def blank(self, shape, dtype):
        """Return an array filled with poison bytes, or with ``True`` if its dtype is bool."""
        kind = oracle.dtype_of(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        poison = np.full(size, POISON, np.uint8) if dtype != "bool" else np.ones(size, np.uint8)
        return self.put(poison.view(kind).reshape(shape))

    def value(self, xs, devices=None):
        return PerReplica([self.put(x) for x in xs], devices)

    def blanks(self, n, shape, dtype="float64", devices=None):
        return PerReplica([self.blank(shape, dtype) for _ in range(n)], devices)

    def contents(self):
        """Return the bytes of all arrays and of their guards."""
        return [block.tobytes() for block in self.blocks]

    def bits(self, x):
        return self.framework.to_numpy(x).tobytes()


def two(k=1.0, shape=(6,)):
    return [np.full(shape, float(k)), np.full(shape, 2.0 * k)]


def added(xs):
    return sum(xs[1:], xs[0])


class Adding(cr.CrossDeviceOps):
    """A custom op that adds the components in Python and returns new arrays."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return Mirrored([added(list(per_replica_value)) for _ in destinations], destinations)


def refused(arrays, error, words, function, *args, **kwargs):
    """Assert that a call raises an error with these words, a given value and a remedy, and changes no byte."""
    before = arrays.contents()
    with pytest.raises(error, match=words) as raised:
        function(*args, **kwargs)
    assert arrays.contents() == before, "something was written"
    text = str(raised.value)
    assert "\n  given: " in text
    assert "\n  try:   " in text
