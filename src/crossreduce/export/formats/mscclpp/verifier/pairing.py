"""Check that the synchronisation of an MSCCL++ plan is paired in each call: signals, semaphores and barriers.

If signals of a call were left over, the next call would receive them, and then run too early or wait forever.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from .....errors import ScheduleError
from .instructions import ChannelEnd, PlanInstruction

Place = tuple[int, int]  # a GPU and one of its threadblocks
GpuNumber = tuple[int, int]  # a GPU and the number of one of its semaphores or barriers


def direction(instruction: PlanInstruction) -> ChannelEnd:
    """Return the end of a channel at which signals are sent, given an instruction that signals, waits or flushes."""
    assert instruction.channel is not None
    kind, rank, peer, number = instruction.channel
    return instruction.channel if instruction.kind != "wait" else (kind, peer, rank, number)


def check_pairs(name: str, places: list[Place], lists: list[list[PlanInstruction]]) -> dict[GpuNumber, Counter[int]]:
    """Check the instructions of all threadblocks, and return how often each threadblock releases each semaphore.

    Raises:
      ScheduleError: in a direction of a channel, the numbers of signals and waits differ; a semaphore is not released
        as often as acquired; or a barrier does not always have the same threadblocks.
    """
    signals: Counter[ChannelEnd] = Counter()
    waits: Counter[ChannelEnd] = Counter()
    barriers: defaultdict[GpuNumber, Counter[tuple[int, int]]] = defaultdict(Counter)
    releases: defaultdict[GpuNumber, Counter[int]] = defaultdict(Counter)
    acquires: Counter[GpuNumber] = Counter()
    for number, (place, listed) in enumerate(zip(places, lists, strict=True)):
        for instruction in listed:
            key = place[0], instruction.number
            if instruction.kind == "signal":
                signals[direction(instruction)] += 1
            elif instruction.kind == "wait":
                waits[direction(instruction)] += 1
            elif instruction.kind == "barrier":
                barriers[key][place[1], instruction.meeting] += 1
            elif instruction.kind == "release":
                releases[key][number] += 1
            elif instruction.kind == "acquire":
                acquires[key] += 1
    for end in signals | waits:
        if signals[end] != waits[end]:
            kind, src, dst, number = end
            text = f"gpu {src} signals gpu {dst} {signals[end]} times in a call on their {kind} channel {number}"
            raise ScheduleError(f"{name}: {text}, but gpu {dst} waits {waits[end]} times.")
    for (rank, number), users in barriers.items():
        blocks, sizes = [block for block, _ in users], sorted({meeting for _, meeting in users})
        if sizes != [len(set(blocks))] or len(set(users.values())) > 1:
            problem = f"{name}, gpu {rank}: all threadblocks of barrier {number} must meet each time."
            given = f"threadblocks {blocks}, num_threadblocks {sizes}, {sorted(users.values())} times"
            raise ScheduleError.of(problem, given, f"num_threadblocks={len(set(blocks))}, and equally many barriers")
    for key in {**releases, **acquires}:
        released, acquired = releases[key].total(), acquires[key]
        if released != acquired:
            text = f"semaphore {key[1]} is released {released} times and acquired {acquired} times in a call"
            raise ScheduleError(f"{name}, gpu {key[0]}: {text}.")
    return dict(releases)
