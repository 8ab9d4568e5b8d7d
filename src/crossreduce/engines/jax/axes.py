"""The mesh axes that a collective in SPMD code runs over, and arrays that vary over them.

Input: values that the caller has read from JAX. Output: ``MeshAxes``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import jax
from jax import lax

from ...frameworks import Array


@dataclass(frozen=True)
class MeshAxes:
    """Axes that are reduced as one axis, in row-major order.

    Args:
      names: in the order in which the caller lists them.
      sizes: the number of positions along each axis.
      mesh_order: positions in ``names``, in the order in which the mesh lists its axes.
      checked: ``shard_map`` tracks the axes over which values vary (``check_vma=True``).
      mapped: at least one axis belongs to ``vmap``, not to a mesh.
    """

    names: tuple[Hashable, ...]
    sizes: tuple[int, ...]
    mesh_order: tuple[int, ...]
    checked: bool
    mapped: bool

    @property
    def devices(self) -> int:
        """The number of positions along all axes."""
        return math.prod(self.sizes)

    def vary(self, x: Array) -> Array:
        """Return an array that varies over these axes."""
        missing = tuple(axis for axis in self.names if axis not in varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.names))
        return f"axis {names}" if len(self.names) == 1 else f"axes {names}"


def varying(x: Array) -> frozenset[Hashable]:
    """Return the axes over which a value varies, as ``shard_map`` tracks them."""
    kind = jax.typeof(x)
    found: frozenset[Hashable] = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
    return found
