"""Spanning trees with shares of the buffer.

``switches.py`` replaces switches by direct arcs, ``packing.py`` packs trees into capacities, ``fitting.py`` finds trees
for given roots and bandwidths, and ``schedule.py`` makes schedules of trees.
"""
