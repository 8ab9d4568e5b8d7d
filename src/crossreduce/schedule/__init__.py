"""Schedules: who sends what to whom, in which order, the proof of the result, and the predicted time."""

from .schedule import Chunk, Route, Schedule, Step, live_rounds
from .simulate import Simulation, byte_count, carried_chunks, fluid_rate, pipelined, seconds_of, simulate
from .verify import verify

__all__ = [
    "Chunk",
    "Route",
    "Schedule",
    "Simulation",
    "Step",
    "byte_count",
    "carried_chunks",
    "fluid_rate",
    "live_rounds",
    "pipelined",
    "seconds_of",
    "simulate",
    "verify",
]
