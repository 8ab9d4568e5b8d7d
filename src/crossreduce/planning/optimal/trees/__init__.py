"""Spanning trees, each with a share of the buffer: ``fitting.py`` finds them, ``tree_schedule.py`` schedules them."""
