"""Algorithms with a line in ``planning.schedules.REGISTRY``, except those of ``optimal/``, one file per kind."""
