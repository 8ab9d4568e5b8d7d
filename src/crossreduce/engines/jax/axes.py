"""The mesh axes that a collective in SPMD code runs over, and arrays that vary over them.

Input: the names of axes, inside a function that JAX traces. Output: ``MeshAxes``, or AxisError for unknown names.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from ...errors import ArgumentError, AxisError, shown
from ...frameworks import Array


@dataclass(frozen=True)
class MeshAxes:
    """Axes that are reduced as one axis, in row-major order."""

    names: tuple[Hashable, ...]  # in the order in which the caller lists them
    sizes: tuple[int, ...]  # the number of positions along each axis
    mesh_order: tuple[int, ...]  # indices into ``names``, sorted in the mesh's order of axes; unused if ``mapped``
    checked: bool  # shard_map tracks the axes over which values vary (check_vma=True)
    mapped: bool  # at least one axis belongs to vmap, not to a mesh

    @property
    def devices(self) -> int:
        """The number of devices: the product of ``sizes``."""
        return math.prod(self.sizes)

    def vary(self, x: Array) -> Array:
        """Return ``x`` with a type that varies over these axes, except for those over which it is unreduced."""
        missing = tuple(axis for axis in self.names if axis not in varying_axes(x) | unreduced_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.names))
        return f"axis {names}" if len(self.names) == 1 else f"axes {names}"


def varying_axes(x: Array) -> frozenset[Hashable]:
    """Return the axes over which a value varies, as ``shard_map`` tracks them."""
    aval = jax.typeof(x)
    axes: frozenset[Hashable] = aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying
    return axes


def unreduced_axes(x: Array) -> frozenset[Hashable]:
    """Return the axes over which a value is unreduced: the array is the sum of the devices' parts (explicit meshes)."""
    aval = jax.typeof(x)
    axis_type = aval.manual_axis_type if hasattr(aval, "manual_axis_type") else aval.sharding.spec  # JAX 0.9
    axes: frozenset[Hashable] = axis_type.unreduced
    return axes


def is_partitioned(x: Array, axis: int) -> bool:
    """Return whether an explicit mesh axis divides an axis of an array among devices."""
    spec = jax.typeof(x).sharding.spec
    return axis < len(spec) and spec[axis] is not None


def read_axes(axis_name: Any) -> MeshAxes:
    """Return the axes with one name, or with the names in a tuple or list.

    Raises:
      ArgumentError: there is no name, or a name occurs twice.
      AxisError: an axis does not exist here.
    """
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    try:
        if not names or len(set(names)) < len(names):
            problem = "axis_name must be the name of one axis, or of several different axes."
            raise ArgumentError.of(problem, shown(axis_name), 'axis_name="x"')
        sizes = tuple(int(lax.axis_size(name)) for name in names)
        # A device's position has a varying type only if shard_map checks types.
        checked = any(varying_axes(lax.axis_index(name)) for name in names)
    except (NameError, TypeError) as error:
        remedy = "a name of the mesh's axes, inside jax.shard_map (or jax.pmap and jax.vmap with axis_name=)"
        problem = "the calling function is not mapped over every axis in axis_name."
        raise AxisError.of(problem, shown(axis_name), remedy) from error
    mesh = jax.sharding.get_abstract_mesh()
    mapped = not set(names) <= set(mesh.manual_axes)  # vmap's axis may have the name of a mesh axis that is not manual
    order = range(len(names)) if mapped else sorted(range(len(names)), key=lambda k: mesh.axis_names.index(names[k]))
    return MeshAxes(names, sizes, tuple(order), checked, mapped)
