"""Schedules: who sends what to whom, in which order, the proof that it adds up, and how long it takes.

``schedule.py`` is the value, ``verify.py`` counts contributions, ``simulate.py`` seconds and bytes. Knows no
arrays, frameworks or clocks.
"""

from .schedule import Chunk, Route, Schedule, Step
from .simulate import MOST_BYTES, Simulation, fluid_rate, pipelined, simulate
from .verify import completing, verify

__all__ = [
    "MOST_BYTES",
    "Chunk",
    "Route",
    "Schedule",
    "Simulation",
    "Step",
    "completing",
    "fluid_rate",
    "pipelined",
    "simulate",
    "verify",
]
