"""Bounds and trees of large machines, computed on the orbits of their symmetry."""
