"""Lowering: a verified schedule becomes a ``Program``, which every engine and every exporter consumes.

Input: a ``Schedule``. Output: a ``Program`` in static single assignment: each chunk has numbered values, and each
instruction makes one value on one device. Instructions that no destination needs are removed. Combinations that produce
the fully reduced chunk are marked as final. The last use of every value is marked, too.
"""

from __future__ import annotations

from functools import lru_cache

from ..schedule import GeneratedSchedule, Schedule, live_rounds, verify
from .device_programs import Combination, DeviceProgram, DeviceStage, LocalValue
from .forwarding import forward_through_devices
from .fusion import fuse
from .generated_program import GeneratedProgram
from .instructions import ChunkProgram, Instruction, Numbered, Read, finish_instructions
from .program import Program, Transfer, element_ranges, part_of

__all__ = [
    "ChunkProgram", "Combination", "DeviceProgram", "DeviceStage", "GeneratedProgram", "Instruction", "LocalValue",
    "Numbered", "Program", "Transfer", "element_ranges", "forward_through_devices", "fuse", "lower", "part_of",
]  # fmt: skip


@lru_cache(maxsize=1024)
def lower(schedule: Schedule) -> Program:
    """Verify a schedule and return its program, which is cached.

    The program of a ``GeneratedSchedule`` stores the chunks of the base, and makes other chunks when they are read.

    Raises:
      ScheduleError: ``verify`` rejects the schedule.
    """
    verify(schedule)
    if isinstance(schedule, GeneratedSchedule):  # verify has proved its base
        return GeneratedProgram(schedule, lower(schedule.base))
    reads: list[list[Read]] = [[] for _ in schedule.chunks]
    # For each chunk, the number of the value that each device stores now.
    current = [{source: k for k, source in enumerate(chunk.sources)} for chunk in schedule.chunks]
    count = [len(chunk.sources) for chunk in schedule.chunks]  # the number of values of each chunk so far
    for r, steps in enumerate(live_rounds(schedule)):
        for chunk, dst, srcs in steps:
            values = current[chunk]
            reads[chunk].append((r, dst, tuple([values[src] for src in srcs])))
        for chunk, dst, _ in steps:
            current[chunk][dst] = count[chunk]
            count[chunk] += 1
    chunks = []
    for (share, sources, destinations), reads_of_chunk, values in zip(schedule.chunks, reads, current, strict=True):
        results = tuple([values[dst] for dst in destinations])
        instructions = finish_instructions(len(sources), reads_of_chunk, results)
        chunks.append(ChunkProgram(share, sources, destinations, instructions, results))
    return Program(
        schedule.collective,
        schedule.algorithm,
        schedule.devices,
        tuple(chunks),
        schedule.round_count,
        schedule.pieces,
        schedule.routes,
    )
