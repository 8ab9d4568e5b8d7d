"""Read the arguments of a call of ``all_reduce`` while JAX traces it.

Input: the arguments. Output: a ``ReduceSpec``, a plain value; ``AxisError`` or ``ArgumentError`` for invalid ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax

from ..engines.jax.axes import MeshAxes, varying
from ..errors import ArgumentError, AxisError, shown
from ..topology import Topology


class ReduceSpec(NamedTuple):
    """How a call reduces: over which axes and by which algorithm.

    ``topology``: its devices are the positions along the axes, in order; ``None``: all links are equal.
    """

    axes: MeshAxes
    algorithm: str
    topology: Topology | None
    packs: int


def read_spec(axis_name: Any, topology: Any, algorithm: str, packs: int) -> ReduceSpec:
    """Return the spec of a call, after checking its axes and the size of its topology."""
    axes = _read_axes(axis_name)
    if topology is not None and not isinstance(topology, Topology):
        remedy = f"algorithm={topology!r}" if isinstance(topology, str) else 'Topology.machine("dgx-1v")'
        raise ArgumentError.of("topology must be a Topology.", shown(topology), remedy)
    if topology is not None and len(topology.devices) != axes.devices:
        problem = "the topology must have one device for each position along the axis."
        given = f"{len(topology.devices)} devices; {axes.devices} positions along {axes}"
        raise ArgumentError.of(problem, given, "topology.subset(...), or other axes")
    return ReduceSpec(axes, "auto" if algorithm == "nccl" else algorithm, topology, min(packs, axes.devices))


def _read_axes(axis_name: Any) -> MeshAxes:
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    try:
        if not names or len(set(names)) < len(names):
            problem = "axis_name must be the name of one axis, or of several different axes."
            raise ArgumentError.of(problem, shown(axis_name), "an axis")
        sizes = tuple(int(lax.axis_size(name)) for name in names)
        # The type of a device's position is a varying one only if shard_map checks.
        checked = any(varying(lax.axis_index(name)) for name in names)
    except (NameError, TypeError) as error:
        remedy = "a name of the mesh's axes, inside jax.shard_map (or jax.pmap and jax.vmap with axis_name=)"
        raise AxisError.of("this axis does not exist here.", shown(axis_name), remedy) from error
    mesh = jax.sharding.get_abstract_mesh()
    mapped = not set(names) <= set(mesh.manual_axes)  # vmap may use the name of an axis of the current mesh
    order = range(len(names)) if mapped else sorted(range(len(names)), key=lambda k: mesh.axis_names.index(names[k]))
    return MeshAxes(names, sizes, tuple(order), checked, mapped)
