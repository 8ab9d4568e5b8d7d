"""The leaves of the trees that collectives inside JAX programs get.

Input: a leaf. Output: an array, or an error that says why JAX has no array for it.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from ..engines.jax.axes import MeshAxes, unreduced_axes, varying_axes
from ..errors import UnsupportedError, shown
from ..frameworks import Array
from ..ops import ACCUMULATORS, ReduceOp
from ..values import IndexedSlices


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


def is_sparse(leaf: Any) -> bool:
    """Return whether a leaf is a sparse array: ``IndexedSlices``, or one of JAX."""
    sparse = sys.modules.get("jax.experimental.sparse")  # slow to import, so only if the program has imported it
    return isinstance(leaf, IndexedSlices) or (sparse is not None and isinstance(leaf, sparse.JAXSparse))


def warn_if_invariant(leaf: Any, axes: MeshAxes, path: str) -> None:
    """Warn, once per line of the caller, about a traced array of floats that is the same on all devices of the axes.

    JAX has probably reduced it already: the gradient by parameters that do not vary over an axis is the sum over it.
    """
    if not axes.checked or not isinstance(leaf, jax.core.Tracer) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return
    if set(axes.names) <= varying_axes(leaf) or unreduced_axes(leaf) or not leaf.size:
        return
    same = ", ".join(repr(name) for name in axes.names if name not in varying_axes(leaf))
    warnings.warn(
        f"crossreduce.jax.all_reduce: leaf x{path} is the same on all devices along {same}, so it may be reduced "
        f"already. If it is a gradient, JAX has added it over the axis: its mean is n times too large, as with pmean.\n"
        f'  try:   params = jax.lax.pcast(params, {axes.names!r}, to="varying") before jax.grad',
        stacklevel=4,
    )
