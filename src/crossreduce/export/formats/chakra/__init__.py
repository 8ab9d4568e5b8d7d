"""Chakra execution traces, one per rank, for ASTRA-sim; and their replay on links that are FIFOs."""

from .remarks import remarks
from .replay import replay
from .writer import to_chakra

__all__ = ["remarks", "replay", "to_chakra"]
