"""What is wired to what: devices and the directed links between them.

In: devices and bandwidths.  Out: a ``Topology``, a frozen value.  Knows no arrays and does no I/O.
"""

from .topology import Link, Topology

__all__ = ["Link", "Topology"]
