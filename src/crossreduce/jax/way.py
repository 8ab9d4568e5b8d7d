"""How a call reduces: over which axes, whether shard_map checks what varies over them, by which algorithm.

In: what the caller names, while JAX traces.  Out: a ``Way``, a plain value; or an ``AxisError`` or ``ArgumentError``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
from jax import lax

from ..errors import ArgumentError, AxisError, message, shown
from ..topology import Topology

Array = Any
Axes = tuple[Hashable, ...]


class Way(NamedTuple):
    """How a call reduces.

    ``order``: the axes' numbers in the mesh's order. ``checked``: shard_map tracks what varies over which axes
    (``check_vma=True``). ``mapped``: the axis is ``vmap``'s.
    """

    axes: Axes
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    checked: bool
    mapped: bool
    algorithm: str
    topology: Topology | None
    packs: int

    @property
    def devices(self) -> int:
        """How many there are along the axes."""
        return math.prod(self.sizes)


def read_way(axis_name: Any, topology: Any, algorithm: str, packs: int) -> Way:
    """Check what the caller names against the axes that are there, and the topology against their sizes."""
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    try:
        if not axes or len(set(axes)) < len(axes):
            raise ArgumentError(
                message("axis_name is one axis, or several different ones.", shown(axis_name), "an axis")
            )
        sizes = tuple(int(lax.axis_size(axis)) for axis in axes)
        # Only where shard_map checks does the type of a device's position say that it differs from device to device.
        checked = any(varying(lax.axis_index(axis)) for axis in axes)
    except (NameError, TypeError) as error:
        remedy = "a name of the mesh's axes, inside jax.shard_map (or jax.pmap and jax.vmap with axis_name=)"
        raise AxisError(message("there is no such axis here.", shown(axis_name), remedy)) from error
    n = math.prod(sizes)
    if topology is not None and not isinstance(topology, Topology):
        remedy = f"algorithm={topology!r}" if isinstance(topology, str) else 'Topology.machine("dgx-1v")'
        raise ArgumentError(message("topology must be a Topology.", shown(topology), remedy))
    if topology is not None and len(topology.devices) != n:
        raise ArgumentError(
            message(
                "the topology's devices stand for the positions along the axis, one for one.",
                f"{len(topology.devices)} devices; {n} positions along {named(axes)}",
                "topology.subset(...), or other axes",
            )
        )
    mesh = jax.sharding.get_abstract_mesh()
    mapped = not set(axes) <= set(mesh.manual_axes)  # an axis of vmap may have the name of one of a mesh that is set
    order = range(len(axes)) if mapped else sorted(range(len(axes)), key=lambda k: mesh.axis_names.index(axes[k]))
    return Way(
        axes,
        sizes,
        tuple(order),
        checked,
        mapped,
        "auto" if algorithm == "nccl" else algorithm,
        topology,
        min(packs, n),
    )


def varying(x: Array) -> frozenset[Hashable]:
    """Return the axes over which shard_map's check says that a value varies."""
    kind = jax.typeof(x)
    found: frozenset[Hashable] = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
    return found


def vary(x: Array, way: Way) -> Array:
    """Return an array that varies over the way's axes."""
    missing = tuple(axis for axis in way.axes if axis not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def named(axes: Axes) -> str:
    """Return axes as messages spell them."""
    return f"axis {axes[0]!r}" if len(axes) == 1 else "axes " + ", ".join(map(repr, axes))
