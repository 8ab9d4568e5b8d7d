"""Weighted means inside JAX programs: sum(w x) / sum(w) over an axis of the mesh.

Input: a tree, and this device's weight, which may be traced. Output: the tree of means. Both sums are those of
``all_reduce``, so derivatives by the leaves and by the weights exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..engines.jax.axes import read_axes
from ..errors import ArgumentError, ReductionError, UnsupportedError, shown
from ..frameworks import Array
from ..frameworks.jax.arrays import FRAMEWORK
from ..ops import ReduceOp, read_weight, require_mean
from .leaves import dense_leaf, is_sparse, warn_if_invariant


def weighted_mean(
    all_reduce: Callable[..., Any], x: Any, axis_name: Any, op: ReduceOp, weight: Any, exact: bool
) -> Any:
    """Return the weighted mean of a tree over an axis. ``all_reduce``: takes a tree, the axis and the op "sum"."""
    require_mean(op)
    if exact:
        problem = "a weighted mean inside a JAX program cannot be exact."
        raise UnsupportedError.of(problem, "exact=True, weight=...", "crossreduce.all_reduce outside of the program")
    axes = read_axes(axis_name)
    is_traced = isinstance(weight, jax.core.Tracer)
    if not is_traced and read_weight(weight) is None:
        problem = "weight must be a finite number, 0 or more."
        raise ArgumentError.of(problem, shown(weight), "the number of samples of this device")
    if jnp.shape(weight) != () or jnp.issubdtype(jnp.result_type(weight), jnp.complexfloating):
        raise ArgumentError.of("weight must be one real number per device.", shown(weight), "an array of shape ()")
    own = dense_leaf(jnp.asarray(weight, jnp.promote_types(jnp.result_type(weight), jnp.float32)), axes)
    # A power of two, so that products do not overflow and keep their bits. It cancels, also in derivatives.
    largest = all_reduce(jax.lax.stop_gradient(own), axis_name, ReduceOp.MAX)
    own = own * jnp.ldexp(jnp.ones_like(largest), -jnp.frexp(largest)[1])

    def scale(leaf: Array) -> Array:
        wide = leaf.astype(FRAMEWORK.numbers(op, leaf.dtype.name, axes.devices).accumulator)
        factor = own.astype(jnp.finfo(wide.dtype).dtype)
        return jnp.where(factor == 0, 0, wide) * factor  # without the elements of a device of weight 0, even NaN

    def scaled(path: Any, leaf: Any) -> Any:
        try:
            if is_sparse(leaf):
                sparse = FRAMEWORK.array(leaf)
                return FRAMEWORK.rebuild_sparse(sparse._replace(values=scale(dense_leaf(sparse.values, axes, op))))
            return scale(dense_leaf(leaf, axes, op))
        except ReductionError as error:
            error.prefix("leaf x" + jax.tree_util.keystr(path))
            raise

    def finished(leaf: Any, total: Any) -> Any:
        """Return a sum, divided by the sum of the weights, in the dtype of the mean of ``leaf``."""
        if is_sparse(leaf):
            sparse, sums = FRAMEWORK.array(leaf), FRAMEWORK.array(total)
            return FRAMEWORK.rebuild_sparse(sums._replace(values=finished(sparse.values, sums.values)))
        wanted = FRAMEWORK.numbers(op, jnp.asarray(leaf).dtype.name, axes.devices).result
        return (total / weights.astype(jnp.finfo(total.dtype).dtype)).astype(wanted)

    for path, leaf in jax.tree_util.tree_leaves_with_path(x, is_leaf=is_sparse):
        warn_if_invariant(leaf, axes, jax.tree_util.keystr(path))
    leaves = jax.tree_util.tree_map_with_path(scaled, x, is_leaf=is_sparse)
    sums, weights = all_reduce((leaves, own), axis_name, ReduceOp.SUM)
    return jax.tree_util.tree_map(finished, x, sums, is_leaf=is_sparse)
