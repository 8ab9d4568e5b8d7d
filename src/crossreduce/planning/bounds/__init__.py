"""Bounds: the rates that no schedule can exceed, each with a certificate.

``bound.py`` has ``bound`` and its value, ``certificate.py`` checks certificates, ``cuts.py`` finds the limiting cut,
``linear_program.py`` solves the all-reduce, and ``flows.py`` has maximum flows.
"""

from .certificate import COLLECTIVES, Bound, Cut

__all__ = ["COLLECTIVES", "Bound", "Cut"]
