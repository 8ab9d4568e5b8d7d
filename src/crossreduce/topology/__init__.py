"""Topologies: devices, switches and the directed links between them.

Input: devices and bandwidths, the name of a machine, or a file. Output: a ``Topology``, a frozen value. Only
``formats.py`` (a file), ``kinds.py`` (the package's data) and ``discover.py`` (this machine) do I/O. ``shapes.py``,
``machines.py``, ``formats.py`` and ``discover.py`` return ``Wiring``s, of which ``topology.py`` makes topologies.
"""

from .links import Link, Switch
from .topology import Topology

__all__ = ["Link", "Switch", "Topology"]
