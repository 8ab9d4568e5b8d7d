"""What is wired to what: devices, switches and the directed links between them.

In: devices and bandwidths.  Out: a ``Topology``, a frozen value.  Knows no arrays and does no I/O.
"""

from .topology import Link, Switch, Topology

__all__ = ["Link", "Switch", "Topology"]
