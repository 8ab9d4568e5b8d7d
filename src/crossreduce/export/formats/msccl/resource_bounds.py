"""The least resources that any MSCCL XML file of a collective needs.

Input: a collective and the limits of runtimes. Output: a limit that every file of the collective breaks, in words.
Resources are counted on one rank of each group of equal ranks, before a file is arranged, to refuse plans at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ....lowering import DeviceProgram
from ..collective import Collective
from .execution import too_large
from .format import LARGEST_COUNT, Runtime


def least_broken(collective: Collective, limits: Sequence[Runtime]) -> str:
    """Return, in words, a limit that every file of a collective breaks, or "" if none is found.

    >>> from crossreduce.export.formats.collective import collective as nccl_collective
    >>> from crossreduce.export.formats.msccl.format import RUNTIMES
    >>> from crossreduce.planning import direct
    >>> least_broken(nccl_collective(direct([f"cuda:{k}" for k in range(80)])), [RUNTIMES["rccl"]])
    'RCCL has 64 threadblocks per GPU, gpu 0 needs at least 79'
    """
    blocks = Counter[int]()  # the least number of blocks of each chunk
    for block in collective.blocks:
        blocks[block.chunk] += -(-block.size // LARGEST_COUNT)
    total = 0
    for rank, equal_ranks in collective.program.alike.items():
        peers = _messages(collective.program.on(rank), blocks)
        # A step sends at most one message and receives at most one.
        steps = max(sum(messages.values()) for messages in peers)
        total += equal_ranks * steps
        for runtime in limits:
            threadblocks = max(sum(-(-n // runtime.steps) for n in messages.values()) for messages in peers)
            elements = 1 + collective.ranks + threadblocks + steps
            for what, need, most in (
                ("threadblocks", threadblocks, runtime.threadblocks),
                ("XML elements", elements, runtime.elements),
            ):
                if need > most:
                    return f"{runtime.name} has {most} {what} per GPU, gpu {rank} needs at least {need}"
    return too_large(total, 0)


def _messages(part: DeviceProgram, blocks: Counter[int]) -> tuple[Counter[int], Counter[int]]:
    """Return how many messages a rank sends to each rank, and how many it receives from each: one for each block."""
    sent, received = Counter[int](), Counter[int]()
    for stage in part.stages:
        for messages, counts in ((stage.sends, sent), (stage.receives, received)):
            for value, other in messages:
                counts[other] += blocks[part.values[value].chunk]
    return sent, received
