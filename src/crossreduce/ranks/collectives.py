"""The schedules by which the ranks of one host execute each collective, and where their arrays are.

Input: a collective, the number of ranks and the root. Output: a verified, lowered program whose devices are the ranks,
and the caller's buffers that its arrays are in. Sizes appear only as the choice between two all-reduces.

A large all-reduce or reduce is the ``direct`` schedule with all ranks as owners: each reduces one share. A small one is
the ``one_shot`` schedule, which needs one barrier less. All others take one round, in which every destination combines
or copies the originals. Either way values are combined in the order of the ranks, so that the same inputs give the same
bits on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

from ..lowering import Program, lower
from ..planning import direct, one_shot
from ..schedule import Chunk, Schedule, Step

SMALL_BYTES: Final = 1 << 13
"""Up to this many bytes, each rank of an all-reduce reduces everything itself."""

COLLECTIVES: Final = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
)


class HostCollective(NamedTuple):
    """A collective among the ranks of one host.

    Args:
      program: device k is the host's rank number k. Its flat buffer consists of arrays of equal size.
      inputs: for each array the number of the buffer that it is in, on ranks that contribute to it.
      outputs: for each array the number of the buffer that it is in, on ranks that need its result.
    """

    program: Program
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def host_collective(collective: str, ranks: int, root: int | None, nbytes: int) -> HostCollective:
    """Return how the ranks of a host execute a collective.

    Args:
      collective: one of ``COLLECTIVES``.
      ranks: the number of ranks.
      root: the root's number on its host, for collectives that have one.
      nbytes: of one array.
    Returns:
      The program. Each rank's buffers are numbered: first those that it contributes, then those for results; a
      broadcast has one for both, and a scatter's result is number 0.

    >>> print(host_collective("all_reduce", 2, None, 400).program)
    all_reduce one_shot: 2 devices, 1 chunk, 2 instructions
      chunk 0: v2 on cpu:0 = v0 + v1 (final)
      chunk 0: v3 on cpu:1 = v0 + v1 (final)
    """
    if collective in ("all_reduce", "reduce"):
        return _reduction(ranks, root, nbytes <= SMALL_BYTES)
    return _one_round_collective(collective, ranks, root)


@lru_cache(maxsize=128)
def _reduction(ranks: int, root: int | None, small: bool) -> HostCollective:
    names = rank_names(ranks)
    destinations = names if root is None else (names[root],)
    schedule = one_shot(names, names, destinations) if small else direct(names, names, destinations, owners=names)
    return HostCollective(lower(schedule), (0,), (1,))


@lru_cache(maxsize=128)
def _one_round_collective(collective: str, ranks: int, root: int | None) -> HostCollective:
    everyone = tuple(range(ranks))
    ends: list[tuple[tuple[int, ...], tuple[int, ...]]]
    if collective == "reduce_scatter":
        ends = [(everyone, (k,)) for k in everyone]
        inputs, outputs = list(everyone), [ranks] * ranks
    elif collective == "all_gather":
        ends = [((k,), everyone) for k in everyone]
        inputs, outputs = [0] * ranks, [1 + k for k in everyone]
    elif collective == "all_to_all":
        ends = [((i,), (k,)) for i in everyone for k in everyone]
        inputs, outputs = list(everyone) * ranks, [ranks + i for i in everyone for _ in everyone]
    else:
        assert root is not None, "the other collectives have a root"
        if collective == "broadcast":
            ends, inputs, outputs = [((root,), everyone)], [0], [0]
        elif collective == "gather":
            ends = [((k,), (root,)) for k in everyone]
            inputs, outputs = [0] * ranks, [1 + k for k in everyone]
        else:
            assert collective == "scatter", collective
            ends = [((root,), (k,)) for k in everyone]
            inputs, outputs = [1 + k for k in everyone], [0] * ranks
    return HostCollective(one_round(collective, ranks, ends), tuple(inputs), tuple(outputs))


def one_round(collective: str, ranks: int, ends: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> Program:
    """Return the program in which every destination combines, or copies, the originals of the sources.

    Args:
      collective: its name.
      ranks: the number of ranks.
      ends: for each of the equal chunks its sources and its destinations.

    >>> print(one_round("gather", 3, [((0,), (0,)), ((1,), (0,)), ((2,), (0,))]))
    gather one_shot: 3 devices, 3 chunks, 2 instructions
      chunk 1: v1 on cpu:0 = v0
      chunk 2: v1 on cpu:0 = v0
    """
    pairs = tuple(ends)
    steps = tuple(
        Step(c, dst, sources)
        for c, (sources, destinations) in enumerate(pairs)
        for dst in destinations
        if sources != (dst,)
    )
    chunks = tuple(Chunk(Fraction(1, len(pairs)), sources, destinations) for sources, destinations in pairs)
    return lower(Schedule(collective, "one_shot", rank_names(ranks), chunks, (steps,) if steps else ()))


def rank_names(ranks: int) -> tuple[str, ...]:
    """Return the names of a host's ranks as devices of schedules."""
    return tuple(f"cpu:{k}" for k in range(ranks))
