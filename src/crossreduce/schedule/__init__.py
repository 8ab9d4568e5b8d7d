"""Schedules: who sends what to whom, in which order, and the proof that it adds up.

``schedule.py`` is the value, ``verify.py`` counts contributions.  Knows no arrays, frameworks or clocks.
"""

from .schedule import Chunk, Route, Schedule, Step
from .verify import completing, verify

__all__ = ["Chunk", "Route", "Schedule", "Step", "completing", "verify"]
