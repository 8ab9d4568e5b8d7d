"""Bounds and trees of large machines, computed on orbits: sets of nodes or links that a symmetry maps to each other."""
