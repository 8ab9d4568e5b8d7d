"""``all_gather``, ``reduce_scatter`` and ``all_to_all`` inside JAX programs, with the arguments of ``jax.lax``.

Input: a pytree of this device's arrays, and the names of axes. Output: the same tree of results. Among CPU devices of
several processes the processes exchange the data (``process_group``), elsewhere XLA's own collectives do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..engines.jax import collectives
from ..engines.jax.axes import MeshAxes, read_axes, unreduced_axes
from ..errors import ArgumentError, ReductionError, UnsupportedError, shown
from ..frameworks import Array
from ..frameworks.jax.arrays import FRAMEWORK, finish
from ..ops import ACCUMULATORS, DTYPES, Numbers, ReduceOp, copy_numbers
from ..options import CommunicationOptions
from ..reduction.validation import read_op
from .leaves import dense_leaf
from .reduction import all_reduce

Axes = Hashable | Sequence[Hashable]
Function = Callable[[Array], Array]


def all_gather(x: Any, axis_name: Axes, *, axis_index_groups: None = None, axis: int = 0, tiled: bool = False) -> Any:
    """Gather a pytree over axes of the mesh, leaf by leaf. Every device receives the arrays of all of them.

    Call it in place of ``lax.all_gather``. It is differentiable, and works under ``vmap``.

    Args:
      x: a pytree of arrays and numbers.
      axis_name: the name of an axis, or several names, which are gathered as one axis, in row-major order.
      axis_index_groups: not supported; a mesh with more axes has the same groups.
      axis: the axis of the results along which the devices' arrays follow one another.
      tiled: whether they are joined along an existing axis, instead of stacked along a new one.
    Returns:
      The same tree. For n devices, a leaf of shape ``(a, b)`` becomes one of shape ``(n, a, b)``, or ``(n * a, b)`` if
      ``tiled``. With ``check_vma=True`` the results count as varying, like those of ``lax.all_gather``.
    Raises:
      AxisError: an axis does not exist here.
      ArgumentError: ``axis`` is not one of the result.
      UnsupportedError: a leaf is not an array; ``axis_index_groups`` are given.

    Example, with ``P = jax.sharding.PartitionSpec``::

        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(None, "data"))
        def columns(x):
            return crossreduce.jax.all_gather(x, "data", axis=0, tiled=True)
    """
    axes = _axes("all_gather", axis_name, axis_index_groups)

    def gathered(leaf: Array) -> Array:
        place = _axis("axis", axis, leaf.ndim + (not tiled))
        rows = collectives.run("all_gather", leaf, copy_numbers(leaf.dtype.name), axes, _otherwise)
        return _joined(rows, place) if tiled else jnp.moveaxis(rows, 0, place)

    return _map("all_gather", x, axes, gathered)


def reduce_scatter(
    x: Any,
    axis_name: Axes,
    op: ReduceOp | str = "sum",
    *,
    scatter_dimension: int = 0,
    axis_index_groups: None = None,
    tiled: bool = False,
    exact: bool = False,
) -> Any:
    """Reduce a pytree over axes of the mesh, leaf by leaf. Each device receives its share of the result.

    Call it in place of ``lax.psum_scatter``. Sums and means are differentiable, and work under ``vmap``.

    Args:
      x: a pytree of arrays. The size along ``scatter_dimension`` is the number of devices, or a multiple if ``tiled``.
      axis_name: the name of an axis, or several names, which are reduced as one axis, in row-major order.
      op: a ``ReduceOp`` or its name.
      scatter_dimension: the axis of the arrays that is divided among the devices.
      axis_index_groups: not supported; a mesh with more axes has the same groups.
      tiled: whether each device keeps a share of that axis, instead of one element of it without the axis.
      exact: whether sums and means of floats are exact, rounded once: see ``all_reduce``.
    Returns:
      The same tree. For n devices, a leaf of shape ``(n, b)`` becomes one of shape ``(b,)``; ``(1, b)`` if ``tiled``.
      Dtypes are those of ``all_reduce``.
    Raises:
      AxisError: an axis does not exist here.
      ArgumentError: an unknown op; the size of an array does not fit the number of devices.
      UnsupportedError: a leaf is not an array, or the op is not defined for it; ``axis_index_groups`` are given.

    Example, with ``P = jax.sharding.PartitionSpec``::

        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        def shares(gradients):
            return crossreduce.jax.reduce_scatter(gradients, "data", "mean", tiled=True)
    """
    axes, op = _axes("reduce_scatter", axis_name, axis_index_groups), read_op(op)
    exact = CommunicationOptions(exact=exact).exact

    def scattered(leaf: Array) -> Array:
        ACCUMULATORS[op, leaf.dtype.name]  # raises if the op is not defined
        place = _axis("scatter_dimension", scatter_dimension, leaf.ndim)
        rows = _rows("scatter_dimension", leaf, place, axes.devices, tiled)
        numbers = FRAMEWORK.numbers(op, leaf.dtype.name, axes.devices)
        numbers = numbers.exactly() if exact and axes.devices > 1 else numbers
        if numbers.exact or op not in (ReduceOp.SUM, ReduceOp.MEAN):
            own = _own_row(rows, axis_name, op, exact)
        else:
            own = collectives.run("reduce_scatter", rows, numbers, axes, _otherwise)
        return jnp.moveaxis(own, 0, place) if tiled else own

    return _map("reduce_scatter", x, axes, scattered)


def all_to_all(
    x: Any, axis_name: Axes, split_axis: int, concat_axis: int, *, axis_index_groups: None = None, tiled: bool = False
) -> Any:
    """Exchange the parts of a pytree over axes of the mesh, leaf by leaf: each device sends a part to each device.

    Call it in place of ``lax.all_to_all``. It is differentiable, and works under ``vmap``.

    Args:
      x: a pytree of arrays. The size along ``split_axis`` is the number of devices, or a multiple of it if ``tiled``.
      axis_name: the name of an axis, or several names, which count as one axis, in row-major order.
      split_axis: the axis of the arrays that is divided among the devices.
      concat_axis: the axis of the results along which the received parts follow one another.
      axis_index_groups: not supported; a mesh with more axes has the same groups.
      tiled: whether parts are cut and joined along existing axes, instead of removing one axis and making a new one.
    Returns:
      The same tree. For n devices, split axis 0 and concat axis 1, a leaf of shape ``(n, b)`` becomes one of shape
      ``(b, n)``, or ``(1, n * b)`` if ``tiled``.
    Raises:
      AxisError: an axis does not exist here.
      ArgumentError: the size of an array does not fit the number of devices; an axis of the array does not exist.
      UnsupportedError: a leaf is not an array; ``axis_index_groups`` are given.

    Example, with ``P = jax.sharding.PartitionSpec``: from rows to columns of a matrix::

        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(None, "data"))
        def transposed(rows):
            return crossreduce.jax.all_to_all(rows, "data", 1, 0, tiled=True)
    """
    axes = _axes("all_to_all", axis_name, axis_index_groups)

    def exchanged(leaf: Array) -> Array:
        split, concat = _axis("split_axis", split_axis, leaf.ndim), _axis("concat_axis", concat_axis, leaf.ndim)
        rows = _rows("split_axis", leaf, split, axes.devices, tiled)
        received = collectives.run("all_to_all", rows, copy_numbers(leaf.dtype.name), axes, _otherwise)
        if not tiled:
            return jnp.moveaxis(received, 0, concat)
        return _joined(jnp.moveaxis(received, 1, split + 1), concat)  # the part's own axis is back at its place

    return _map("all_to_all", x, axes, exchanged)


def _axes(name: str, axis_name: Any, axis_index_groups: Any) -> MeshAxes:
    if axis_index_groups is not None:
        remedy = "a mesh with one more axis, such as mesh.devices.reshape(2, -1), and the name of that axis"
        raise UnsupportedError.of(f"{name} has no axis_index_groups.", shown(axis_index_groups), remedy)
    return read_axes(axis_name)


def _axis(name: str, axis: Any, count: int) -> int:
    """Return the number of an axis of an array with ``count`` axes, from 0. Raise an error if it does not exist."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -count <= axis < count:
        raise ArgumentError.of(f"{name} must be an axis of an array with {count} axes.", shown(axis), f"{name}=0")
    return axis % count


def _rows(name: str, leaf: Array, axis: int, devices: int, tiled: bool) -> Array:
    """Return an array with one row per device as its first axis. If ``tiled``, the share of the axis is the second."""
    size = leaf.shape[axis]
    if size % devices or not (tiled or size == devices):
        problem = f"the size along {name} must be {'a multiple of ' * tiled}the number of devices, {devices}."
        raise ArgumentError.of(problem, f"shape {leaf.shape}, {name}={axis}", "pad the array, or tiled=True")
    if not tiled:
        return jnp.moveaxis(leaf, axis, 0)
    parts = leaf.reshape(*leaf.shape[:axis], devices, size // devices, *leaf.shape[axis + 1 :])
    return jnp.moveaxis(jnp.moveaxis(parts, axis, 0), axis + 1, 1)


def _joined(rows: Array, axis: int) -> Array:
    """Return the rows of an array joined along one of the other axes, which is number ``axis`` without the first."""
    parts = jnp.moveaxis(rows, 0, axis)
    joined = parts.shape[axis] * parts.shape[axis + 1]  # not -1, which is not defined for empty arrays
    return parts.reshape(*parts.shape[:axis], joined, *parts.shape[axis + 2 :])


def _own_row(rows: Array, axis_name: Any, op: ReduceOp, exact: bool) -> Array:
    """Return this device's row of a reduction that no collective of XLA scatters."""
    total = all_reduce(rows, axis_name, op, exact=exact)
    return lax.dynamic_index_in_dim(total, lax.axis_index(axis_name), keepdims=False)


def _otherwise(kind: str, x: Array, numbers: Numbers, axes: MeshAxes) -> Array:
    """Compute a collective by XLA's own."""
    if kind == "all_gather":
        return lax.all_gather(x, axes.names)
    if kind == "all_to_all":
        return lax.all_to_all(x, axes.names, 0, 0)
    return finish(numbers, lax.psum_scatter(x.astype(numbers.accumulator), axes.names))


def _map(name: str, x: Any, axes: MeshAxes, function: Function) -> Any:
    """Call a function with each leaf of a tree, as an array that varies over the axes. Errors have the leaf's path."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(x)
    results = []
    with jax.named_scope(f"crossreduce:{name}"):
        for path, leaf in leaves:
            try:
                array = dense_leaf(leaf, axes)
                if unreduced_axes(array) or array.dtype.name not in DTYPES:
                    problem = f"{name} needs complete arrays of a supported dtype."
                    raise UnsupportedError.of(problem, str(jax.typeof(array)), f"jax.lax's {name}, or another dtype")
                results.append(function(array))
            except ReductionError as error:
                error.prefix("leaf x" + jax.tree_util.keystr(path))
                raise
    return jax.tree_util.tree_unflatten(structure, results)
