"""Chakra execution traces, one per rank, for ASTRA-sim."""

from .remarks import remarks
from .writer import to_chakra

__all__ = ["remarks", "to_chakra"]
