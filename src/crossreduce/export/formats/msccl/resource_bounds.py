"""What every MSCCL XML file of a collective needs at least.

Input: a collective and the limits of runtimes. Output: a limit that each of its files breaks, in words. This is counted
on one rank of each group of equal ranks before any file is arranged, so a plan that cannot fit is refused at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ....lowering import DeviceProgram
from ..collective import Collective
from .execution import too_large
from .format import LARGEST_COUNT, Runtime


def least_broken(made: Collective, limits: Sequence[Runtime]) -> str:
    """Return the first limit that is found to be broken by every file of a collective; "": none.

    >>> from crossreduce.export.formats.collective import collective
    >>> from crossreduce.export.formats.msccl.format import RUNTIMES
    >>> from crossreduce.planning import direct
    >>> least_broken(collective(direct([f"cuda:{k}" for k in range(80)])), [RUNTIMES["rccl"]])
    'RCCL has 64 threadblocks per GPU, gpu 0 needs at least 79'
    """
    blocks = Counter[int]()  # of each chunk
    for block in made.blocks:
        blocks[block.chunk] += -(-block.size // LARGEST_COUNT)
    total = 0
    for rank, count in made.program.alike.items():
        peers = _messages(made.program.on(rank), blocks)
        steps = max(sum(messages.values()) for messages in peers)  # a step sends at most one message, and receives one
        total += count * steps
        for runtime in limits:
            threadblocks = max(sum(-(-n // runtime.steps) for n in messages.values()) for messages in peers)
            elements = 1 + made.ranks + threadblocks + steps
            for what, need, most in (
                ("threadblocks", threadblocks, runtime.threadblocks),
                ("XML elements", elements, runtime.elements),
            ):
                if need > most:
                    return f"{runtime.name} has {most} {what} per GPU, gpu {rank} needs at least {need}"
    return too_large(total, 0)


def _messages(part: DeviceProgram, blocks: Counter[int]) -> tuple[Counter[int], Counter[int]]:
    """Return how many messages a rank sends to each other rank, and receives from it."""
    sent, received = Counter[int](), Counter[int]()
    for stage in part.stages:
        for messages, found in ((stage.sends, sent), (stage.receives, received)):
            for value, other in messages:
                found[other] += blocks[part.values[value].chunk]
    return sent, received
