"""The leaves of the trees that collectives inside JAX programs get.

Input: a leaf. Output: an array, or an error that says why JAX has no array for it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..engines.jax.axes import MeshAxes
from ..errors import UnsupportedError, shown
from ..frameworks import Array
from ..ops import ACCUMULATORS, ReduceOp


def dense_leaf(leaf: Any, axes: MeshAxes, op: ReduceOp | None = None) -> Array:
    """Check a leaf and return it as an array that varies over the axes. ``op``: the op that must be defined for it."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise UnsupportedError.of("arrays of PRNG keys cannot be reduced.", shown(leaf), "jax.random.key_data(value)")
    try:
        jax.typeof(leaf)
        array = jnp.asarray(leaf)
    except (TypeError, ValueError, OverflowError) as error:  # 2**70 raises an OverflowError
        remedy = "arrays, and numbers that fit their dtype; None for an empty leaf"
        raise UnsupportedError.of("JAX cannot convert this to an array.", shown(leaf), remedy) from error
    if not all(isinstance(size, int) for size in array.shape):
        problem = "arrays of symbolic size (jax.export) cannot be reduced over a mesh axis."
        raise UnsupportedError.of(problem, str(array.shape), "an export for known sizes, or lax.psum")
    if op is not None:
        ACCUMULATORS[op, array.dtype.name]  # raises if the op is not defined
    return axes.vary(array) if axes.checked else array
