"""Spanning trees with shares of the buffer: ``fitting.py`` finds them, ``schedule.py`` makes schedules of them."""
