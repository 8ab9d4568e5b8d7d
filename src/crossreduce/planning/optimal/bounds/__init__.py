"""Bounds: the rates that no schedule can exceed, each with a certificate."""

from .certificate import COLLECTIVES, Bound, Cut

__all__ = ["COLLECTIVES", "Bound", "Cut"]
