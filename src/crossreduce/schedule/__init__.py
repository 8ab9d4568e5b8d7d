"""Schedules: which device sends what to which device, in which order; their proof and their predicted time."""

from .costs import Costs, SharedLimit, both_directions, costs_of, seconds_of
from .generated_schedule import GeneratedSchedule
from .schedule import Chunk, Route, Schedule, Step, live_rounds
from .simulate import Pieces, Simulation, fastest_of, pipelined, simulate
from .timed_transfers import TimedTransfer, timeline
from .traffic import carried_chunks, fluid_rate, link_shares
from .verify import verify

__all__ = [
    "Chunk", "Costs", "GeneratedSchedule", "Pieces", "Route", "Schedule", "SharedLimit", "Simulation", "Step",
    "TimedTransfer", "both_directions", "carried_chunks", "costs_of", "fastest_of", "fluid_rate",
    "link_shares", "live_rounds", "pipelined", "seconds_of", "simulate", "timeline", "verify",
]  # fmt: skip
