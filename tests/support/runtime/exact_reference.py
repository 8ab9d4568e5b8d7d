"""Random terms, and their exact sums in fixed point, from ``exact_reference.cpp``, which is fast for millions."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from exact_cases import UNSIGNED
from paths import NATIVE

SOURCE = NATIVE / "exact_reference.cpp"
FORMATS = ("float16", "bfloat16", "float32", "float64")
KINDS = ("random", "wide exponents", "cancelling", "ties", "subnormal", "any bits")


@functools.cache
def library():
    """Compile the reference and return it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exact_reference.so"
        command = ["g++", "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(path), str(SOURCE)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(path))


def _addresses(arrays):
    return (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))


def random_terms(dtype, kind, seed, terms, size):
    """Return rows of random terms, as bits. ``kind`` is one of ``KINDS``."""
    rows = np.empty((terms, size), UNSIGNED[dtype])
    numbers = FORMATS.index(dtype), KINDS.index(kind), ctypes.c_uint64(seed)
    library().random_terms(*numbers, _addresses(rows), ctypes.c_size_t(terms), ctypes.c_size_t(size))
    return rows


def reference_sums(terms, dtype, divisor=1, result=None):
    """Return the exact sum of each column of ``terms``, divided by ``divisor``, as bits."""
    n, size = terms.shape
    out = np.empty(size, UNSIGNED[result or dtype])
    formats = FORMATS.index(dtype), FORMATS.index(result or dtype)
    counts = ctypes.c_size_t(n), ctypes.c_size_t(size), ctypes.c_uint64(divisor)
    library().reference_sums(*formats, _addresses(terms), *counts, ctypes.c_void_p(out.ctypes.data))
    return out
