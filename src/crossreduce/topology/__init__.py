"""Topologies: devices, switches and the directed links between them.

Input: devices and bandwidths, the name of a machine, or a file. Output: a ``Topology``, a frozen value. It is made from
the ``Wiring`` that ``shapes.py``, ``machines.py``, ``formats`` or ``discover.py`` returns. I/O is done only by
``formats`` and ``topology_like.py`` (files), ``link_kinds.py`` (the package's data), ``discover.py`` and ``nvml.py``
(this machine).
"""

from .links import Link, Switch
from .symmetry import Symmetry, SymmetryGenerator
from .topology import Topology
from .topology_like import TopologyLike, byte_count, topology_of

__all__ = ["Link", "Switch", "Symmetry", "SymmetryGenerator", "Topology", "TopologyLike", "byte_count", "topology_of"]
