"""Spanning trees with shares of the buffer: without switches, packed into capacities, fitted to roots, as schedules."""
