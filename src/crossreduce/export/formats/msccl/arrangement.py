"""Where the messages of a schedule run in an MSCCL XML file: parts, pieces, channels, and forwarded messages.

Input: a schedule as a collective, and into how many parts its chunks are divided. Output: an ``Arrangement``.

The runtimes divide a long message into slices and run all steps of a threadblock for one slice before the next one.
Threadblocks do not wait for each other between slices. So a file is pipelined if each threadblock has the messages of
one stage of a chunk's way only: while it moves a slice, the threadblocks of the later stages move the slices before. A
threadblock of several stages would wait in each slice for the slowest of them.

- A *part* of a chunk has channels of its own, and moves at the same time as the others: one channel does not fill a
  fast link.
- A *piece* is a part of a part. The steps of a threadblock move one piece after the other, so that the next GPU can
  start before a whole part has arrived. A slice is at most 2 MiB, and messages of that size would leave most links of
  a long way idle until the first one has arrived.
- A *path* is a sequence of messages, each of which forwards the one before it: the GPU in between receives, combines
  and sends in one step of one threadblock. This halves the number of threadblocks, of which RCCL has 64, and a GPU
  forwards the first bytes of a message before the last ones have arrived.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Final, NamedTuple

from ....lowering import Instruction
from ..collective import Block, Collective
from .format import LARGEST_COUNT, MOST_CHUNKS, RUNTIMES

FINE: Final = 2
"""The units of a piece, if pieces cannot have equally many; twice as many, if a part is not divided into pieces."""


MOST_SINGLE: Final = 8
"""A part of so few units, without pieces, is moved unit by unit: a step of several units waits for all of them."""


MOST_MESSAGES: Final = 32
"""The messages of a threadblock without pieces. Each may have to wait twice, which takes two steps, of at most 64."""

MOST_CHANNELS: Final = min(runtime.channels for runtime in RUNTIMES.values())


class MessageKey(NamedTuple):
    """A value of a chunk that a device sends to the device that makes another value from it."""

    chunk: int
    operand: int
    value: int


Lane = tuple[int, MessageKey]  # the messages of a part of a chunk
Connection = tuple[int, int]  # the ranks that send and receive


@dataclass(frozen=True)
class Arrangement:
    """The blocks of a file, the channels of their messages, and the receives that forward their messages."""

    made: Collective
    parts: tuple[int, ...]  # of each block: the part of its chunk that it belongs to
    pieces: tuple[int, ...]  # of each block: the piece of its part
    channels: Mapping[Lane, int]
    forwards: Mapping[tuple[int, int], int]  # (chunk, value): the value of the message that forwards it on arrival
    unstored: frozenset[tuple[int, int]]  # the forwarded values that nothing else reads: they need no memory
    spread: bool  # whether the copies of each part of a chunk have a threadblock of their own

    def channel(self, b: int, operand: int, value: int) -> int:
        """Return the channel of a block's message."""
        return self.channels[self.parts[b], MessageKey(self.made.blocks[b].chunk, operand, value)]

    @property
    def messages(self) -> int:
        """The number of messages of all blocks."""
        of_chunk = Counter(message.chunk for message, _ in messages(self.made))
        return sum(of_chunk[block.chunk] for block in self.made.blocks)


def messages(made: Collective) -> list[tuple[MessageKey, Connection]]:
    """Return all messages of a chunk that has blocks, with their connections, in the order of the rounds."""
    used = {block.chunk for block in made.blocks}
    return [
        (MessageKey(c, operand, value), (src, instruction.device))
        for instructions in made.program.by_round
        for c, value, instruction in instructions
        if c in used
        for operand in instruction.operands
        if (src := made.places[c][operand]) != instruction.device
    ]


def plain(made: Collective, channels: int, pieces: int = 1) -> Arrangement:
    """Return an arrangement without pieces: runs of blocks share a channel, and nothing is forwarded."""
    assert pieces == 1, pieces
    blocks = tuple(cut(block, LARGEST_COUNT) for block in made.blocks)
    flat = tuple(block for group in blocks for block in group)
    made = replace(made, blocks=flat)
    numbers: Counter[int] = Counter()
    parts = []
    for block in flat:
        parts.append(numbers[block.chunk])
        numbers[block.chunk] += 1
    of_chunk: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for b, block in enumerate(flat):
        of_chunk[block.chunk].append((parts[b], b * channels // len(flat)))
    chosen = {(part, message): channel for message, _ in messages(made) for part, channel in of_chunk[message.chunk]}
    return Arrangement(made, tuple(parts), (0,) * len(flat), chosen, {}, frozenset(), spread=False)


def cut(block: Block, most: int) -> list[Block]:
    """Return a block in parts of at most so many units.

    >>> cut(Block(0, 10, 5), 2)
    [Block(chunk=0, offset=10, size=2), Block(chunk=0, offset=12, size=2), Block(chunk=0, offset=14, size=1)]
    """
    end = block.offset + block.size
    return [Block(block.chunk, start, min(most, end - start)) for start in range(block.offset, end, most)]


def divide_chunks(made: Collective, parts: Sequence[int], pieces: int) -> tuple[Collective, list[int], list[int]]:
    """Return a collective whose chunks are divided into parts and pieces, and the part and piece of each block.

    ``parts``: the number of parts of each chunk. The number of units is multiplied by a power of two, the least for
    which each piece has equally many units, or at least ``FINE``. Pieces of more units than a step moves are cut.
    """
    factor = 1
    least = FINE if pieces > 1 else 2 * FINE
    while not all(_fine(block.size * factor, parts[block.chunk] * pieces, least) for block in made.blocks):
        if made.units * factor * 2 > MOST_CHUNKS:
            break
        factor *= 2
    blocks, of_part, of_piece = [], [], []
    for chunk, offset, size in made.blocks:
        count = parts[chunk] * pieces
        marks = [offset * factor + size * factor * k // count for k in range(count + 1)]
        for k, (start, stop) in enumerate(pairwise(marks)):
            single = pieces == 1 < stop - start <= MOST_SINGLE
            for n, block in enumerate(cut(Block(chunk, start, stop - start), 1 if single else LARGEST_COUNT)):
                blocks.append(block)
                of_part.append(k // pieces)
                of_piece.append(n if single else k % pieces)
    return replace(made, units=made.units * factor, blocks=tuple(blocks)), of_part, of_piece


def _fine(units: int, count: int, least: int) -> bool:
    return units % count == 0 or units >= least * count


def pipeline_arrangement(made: Collective, parts: Sequence[int], pieces: int) -> Arrangement:
    """Return an arrangement in which each threadblock has the messages of one stage of one part only."""
    found = messages(made)
    forwards = forwarding(made, found)
    paths = list(_paths(found, forwards))
    cells, of_part, of_piece = divide_chunks(made, parts, pieces)
    used: defaultdict[Connection, set[int]] = defaultdict(set)
    chosen: dict[Lane, int] = {}
    for path in sorted(paths, key=len, reverse=True):  # the longest paths have the most connections to agree on
        for part in range(parts[path[0][0].chunk]):
            taken = set().union(*(used[connection] for _, connection in path))
            channel = next(k for k in range(len(taken) + 1) if k not in taken)
            for message, connection in path:
                used[connection].add(channel)
                chosen[part, message] = channel
    reads: Counter[tuple[int, int]] = Counter()
    for c, chunk in enumerate(made.program.chunks):
        operands = (operand for instruction in chunk.instructions for operand in instruction.operands)
        reads.update((c, value) for value in (*operands, *chunk.results))
    unstored = frozenset(key for key in forwards if reads[key] == 1)
    return Arrangement(cells, tuple(of_part), tuple(of_piece), chosen, forwards, unstored, spread=True)


def forwarding(made: Collective, found: list[tuple[MessageKey, Connection]]) -> dict[tuple[int, int], int]:
    """Return which received values are forwarded on arrival: by (chunk, value), the value of the next message.

    A device forwards a value with the step that receives its last operand, to one device. Only one message of each
    value is forwarded: the one with the longest way behind it.
    """
    behind: dict[MessageKey, int] = {}
    next_of: defaultdict[tuple[int, int], list[MessageKey]] = defaultdict(list)
    for message, _ in found:
        next_of[message.chunk, message.operand].append(message)
    for message, _ in reversed(found):
        behind[message] = 1 + max((behind[m] for m in next_of[message.chunk, message.value]), default=0)
    forwards: dict[tuple[int, int], int] = {}
    for message, _ in found:
        chunk, places = made.program.chunks[message.chunk], made.places[message.chunk]
        key = message.chunk, message.value
        instruction = chunk.instructions[message.value - len(chunk.sources)]
        if key not in forwards and next_of[key] and ends_with_a_receive(places, instruction):
            forwards[key] = max(next_of[key], key=lambda m: (behind[m], -m.value)).value
    return forwards


def ends_with_a_receive(places: Sequence[int], instruction: Instruction) -> bool:
    """Return whether the last operation of an instruction receives a message, so that it can forward the result.

    ``places``: the rank of each value of its chunk.
    """
    ranks = [places[operand] for operand in instruction.operands]
    own = ranks.index(instruction.device) if instruction.device in ranks else 0
    return own < 2 or own < len(ranks) - 1


def _paths(
    found: list[tuple[MessageKey, Connection]], forwards: dict[tuple[int, int], int]
) -> Iterator[list[tuple[MessageKey, Connection]]]:
    """Yield the messages that forward each other, path by path; a path that would return to a rank is cut.

    A rank that replaces a value by the result has to wait until the value is sent. If the same path brought the result
    back, the two would wait for each other. Where a path is cut, the entry of ``forwards`` is deleted.
    """
    place = dict(found)
    last = {}  # (chunk, value): the message that completes the value
    for message, _ in found:
        last[message.chunk, message.value] = message
    starts = []
    begun = {MessageKey(chunk, value, after) for (chunk, value), after in forwards.items()}
    starts = [message for message, _ in found if message not in begun]
    while starts:
        message = starts.pop(0)
        path, visited = [(message, place[message])], {*place[message]}
        while (key := (message.chunk, message.value)) in forwards and last[key] == message:
            following = MessageKey(message.chunk, message.value, forwards[key])
            if place[following][1] in visited:
                del forwards[key]
                starts.append(following)
                break
            message = following
            path.append((message, place[message]))
            visited.add(place[message][1])
        yield path


def shared_arrangement(
    made: Collective, parts: Sequence[int], load: Sequence[Fraction], most: int, pieces: int
) -> Arrangement:
    """Return an arrangement in which messages share channels, so that no rank has more than ``most`` threadblocks.

    Without pieces, a connection has the channels that fill its link; with pieces, one for each message, so that each
    stage has its own. Both have fewer if a rank would have too many threadblocks. ``load``: how much one part of
    each chunk loads a channel.
    """
    cells, of_part, of_piece = divide_chunks(made, parts, pieces)
    lanes: defaultdict[Connection, list[Lane]] = defaultdict(list)
    for message, connection in messages(made):
        lanes[connection] += [(part, message) for part in range(parts[message.chunk])]
    counts = {
        connection: min(len(own), MOST_CHANNELS)
        if pieces > 1
        else _filling([load[message.chunk] for _, message in own])
        for connection, own in lanes.items()
    }
    _limit(counts, {connection: len(own) for connection, own in lanes.items()}, most)
    chosen: dict[Lane, int] = {}
    for connection, own in lanes.items():
        loads = [Fraction(0)] * counts[connection]
        for lane in own:
            channel = min(range(len(loads)), key=lambda k: (loads[k], k))
            loads[channel] += load[lane[1].chunk] or 1
            chosen[lane] = channel
    return Arrangement(cells, tuple(of_part), tuple(of_piece), chosen, {}, frozenset(), spread=True)


def _filling(loads: Sequence[Fraction]) -> int:
    """Return how many channels carry messages of these loads: up to twice the least number, to load them equally."""
    least = min(len(loads), max(math.ceil(sum(loads)), math.ceil(len(loads) / MOST_MESSAGES)))
    counts = range(least, min(len(loads), 2 * least) + 1)
    return min(counts, key=lambda k: (k * -(-len(loads) // k), k))


def _limit(counts: dict[Connection, int], lanes: dict[Connection, int], most: int) -> None:
    """Lower the channels of connections until each rank has at most ``most`` threadblocks, if one channel each allows.

    A channel is taken from the connection whose channels then have the fewest messages.
    """
    used: Counter[int] = Counter()
    connections: defaultdict[int, list[Connection]] = defaultdict(list)  # of each rank
    for connection, count in counts.items():
        used.update(dict.fromkeys(connection, count))
        for rank in connection:
            connections[rank].append(connection)
    for rank in sorted(used):
        while used[rank] > most:
            mine = [connection for connection in connections[rank] if counts[connection] > 1]
            if not mine:
                break
            taken = min(mine, key=lambda connection: (lanes[connection] / (counts[connection] - 1), connection))
            counts[taken] -= 1
            used.subtract(taken)
