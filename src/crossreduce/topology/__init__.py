"""Topologies: devices, switches and the directed links between them.

Input: devices and bandwidths, the name of a machine, or a file. Output: a ``Topology``, a frozen value. Only
``formats.py`` and ``given.py`` (a file), ``kinds.py`` (the package's data), ``discover.py`` and ``nvml.py`` (this
machine) do I/O.
``given.py`` makes topologies of names and paths; of the ``Wiring``s that ``shapes.py``,
``machines.py``, ``formats.py`` and ``discover.py`` return, ``topology.py`` makes topologies.
"""

from .given import TopologyLike, topology_of
from .links import Link, Switch
from .symmetry import Symmetry, SymmetryGenerator
from .topology import Topology

__all__ = ["Link", "Switch", "Symmetry", "SymmetryGenerator", "Topology", "TopologyLike", "topology_of"]
