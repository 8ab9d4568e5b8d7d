"""Spanning trees with shares of the buffer: ``fitting.py`` finds them, ``tree_schedule.py`` makes schedules of them."""
