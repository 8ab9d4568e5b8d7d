"""Where the messages of a schedule run in an MSCCL XML file: parts, pieces, channels, and forwarded messages.

Input: a schedule as a collective, and into how many parts its chunks are divided. Output: an ``Arrangement``.

The runtimes divide a long message into slices and run all steps of a threadblock for one slice before the next one.
Threadblocks do not wait for each other between slices. So a file is pipelined if each threadblock has the messages of
only one stage of a chunk's route: while it moves a slice, the threadblocks of the later stages move the slices before.
A threadblock of several stages would wait in each slice for the slowest stage.

- A *part* of a chunk has separate channels, and moves at the same time as the other parts: one channel does not fill a
  fast link.
- A *piece* is a part of a part. The steps of a threadblock move one piece after the other, so that the next GPU can
  start before a whole part has arrived. A slice is at most 2 MiB, and with messages of that size, most links of a long
  route would be idle until the first message has arrived.
- A *path* is a sequence of messages, each of which forwards the one before it: the GPU in between receives, combines
  and sends in one step of one threadblock. This halves the number of threadblocks, of which RCCL has 64. Also, a GPU
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
"""The least units of a piece, unless all pieces have equally many. It is doubled for a part without pieces."""


MOST_SINGLE: Final = 8
"""A part without pieces and with at most this number of units is moved unit by unit: a step waits for all its units."""


MOST_MESSAGES: Final = 32
"""The most messages of a threadblock without pieces. Each may have to wait twice, which takes two of its 64 steps."""

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

    collective: Collective
    parts: tuple[int, ...]  # for each block, the part of the chunk to which it belongs
    pieces: tuple[int, ...]  # for each block, the piece of the part
    channels: Mapping[Lane, int]
    forwards: Mapping[tuple[int, int], int]  # for (chunk, value), the value that the forwarding message makes
    unstored: frozenset[tuple[int, int]]  # the forwarded values that nothing else reads, so they need no memory
    spread: bool  # whether the copies of each part of a chunk have a separate threadblock

    def channel(self, b: int, operand: int, value: int) -> int:
        """Return the channel of a block's message."""
        return self.channels[self.parts[b], MessageKey(self.collective.blocks[b].chunk, operand, value)]

    @property
    def messages(self) -> int:
        """The number of messages of all blocks."""
        of_chunk = Counter(message.chunk for message, _ in messages(self.collective))
        return sum(of_chunk[block.chunk] for block in self.collective.blocks)


def messages(collective: Collective) -> list[tuple[MessageKey, Connection]]:
    """Return the messages of all chunks with blocks, and their connections, in the order of the rounds."""
    used = {block.chunk for block in collective.blocks}
    return [
        (MessageKey(c, operand, value), (src, instruction.device))
        for instructions in collective.program.by_round
        for c, value, instruction in instructions
        if c in used
        for operand in instruction.operands
        if (src := collective.places[c][operand]) != instruction.device
    ]


def plain(collective: Collective, channels: int, pieces: int = 1) -> Arrangement:
    """Return an arrangement without pieces: runs of blocks share a channel, and nothing is forwarded."""
    assert pieces == 1, pieces
    blocks = tuple(cut(block, LARGEST_COUNT) for block in collective.blocks)
    flat = tuple(block for group in blocks for block in group)
    collective = replace(collective, blocks=flat)
    numbers: Counter[int] = Counter()
    parts = []
    for block in flat:
        parts.append(numbers[block.chunk])
        numbers[block.chunk] += 1
    of_chunk: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for b, block in enumerate(flat):
        of_chunk[block.chunk].append((parts[b], b * channels // len(flat)))
    channel_of = {
        (part, message): channel for message, _ in messages(collective) for part, channel in of_chunk[message.chunk]
    }
    return Arrangement(collective, tuple(parts), (0,) * len(flat), channel_of, {}, frozenset(), spread=False)


def cut(block: Block, most: int) -> list[Block]:
    """Return the parts of a block, each with at most so many units.

    >>> cut(Block(0, 10, 5), 2)
    [Block(chunk=0, offset=10, size=2), Block(chunk=0, offset=12, size=2), Block(chunk=0, offset=14, size=1)]
    """
    end = block.offset + block.size
    return [Block(block.chunk, start, min(most, end - start)) for start in range(block.offset, end, most)]


def divide_chunks(collective: Collective, parts: Sequence[int], pieces: int) -> tuple[Collective, list[int], list[int]]:
    """Return a collective whose chunks are divided into parts and pieces, and the part and piece of each block.

    ``parts`` has the number of parts of each chunk. The number of units is multiplied by the least power of two with
    which all pieces of a chunk have the same number of units, or at least ``FINE``. Pieces of more units than a step
    moves are cut.
    """
    factor = 1
    least = FINE if pieces > 1 else 2 * FINE
    while not all(_fine(block.size * factor, parts[block.chunk] * pieces, least) for block in collective.blocks):
        if collective.units * factor * 2 > MOST_CHUNKS:
            break
        factor *= 2
    blocks, of_part, of_piece = [], [], []
    for chunk, offset, size in collective.blocks:
        count = parts[chunk] * pieces
        marks = [offset * factor + size * factor * k // count for k in range(count + 1)]
        for k, (start, stop) in enumerate(pairwise(marks)):
            single = pieces == 1 < stop - start <= MOST_SINGLE
            for n, block in enumerate(cut(Block(chunk, start, stop - start), 1 if single else LARGEST_COUNT)):
                blocks.append(block)
                of_part.append(k // pieces)
                of_piece.append(n if single else k % pieces)
    return replace(collective, units=collective.units * factor, blocks=tuple(blocks)), of_part, of_piece


def _fine(units: int, count: int, least: int) -> bool:
    return units % count == 0 or units >= least * count


def pipeline_arrangement(collective: Collective, parts: Sequence[int], pieces: int) -> Arrangement:
    """Return an arrangement in which each threadblock has the messages of only one stage of one part."""
    all_messages = messages(collective)
    forwards = forwarding(collective, all_messages)
    paths = list(_paths(all_messages, forwards))
    divided, of_part, of_piece = divide_chunks(collective, parts, pieces)
    used: defaultdict[Connection, set[int]] = defaultdict(set)
    channel_of: dict[Lane, int] = {}
    # All connections of a path have the same channel, so the longest paths come first.
    for path in sorted(paths, key=len, reverse=True):
        for part in range(parts[path[0][0].chunk]):
            taken = set().union(*(used[connection] for _, connection in path))
            channel = next(k for k in range(len(taken) + 1) if k not in taken)
            for message, connection in path:
                used[connection].add(channel)
                channel_of[part, message] = channel
    reads: Counter[tuple[int, int]] = Counter()
    for c, chunk in enumerate(collective.program.chunks):
        operands = (operand for instruction in chunk.instructions for operand in instruction.operands)
        reads.update((c, value) for value in (*operands, *chunk.results))
    unstored = frozenset(key for key in forwards if reads[key] == 1)
    return Arrangement(divided, tuple(of_part), tuple(of_piece), channel_of, forwards, unstored, spread=True)


def forwarding(collective: Collective, found: list[tuple[MessageKey, Connection]]) -> dict[tuple[int, int], int]:
    """Return the received values that are forwarded on arrival, by (chunk, value), with the value that is made next.

    The step that receives the last operand of a value forwards the value to one device. If several devices need the
    value, this is the one from which the longest sequence of messages follows.
    """
    behind: dict[MessageKey, int] = {}
    next_of: defaultdict[tuple[int, int], list[MessageKey]] = defaultdict(list)
    for message, _ in found:
        next_of[message.chunk, message.operand].append(message)
    for message, _ in reversed(found):
        behind[message] = 1 + max((behind[m] for m in next_of[message.chunk, message.value]), default=0)
    forwards: dict[tuple[int, int], int] = {}
    for message, _ in found:
        chunk, places = collective.program.chunks[message.chunk], collective.places[message.chunk]
        key = message.chunk, message.value
        instruction = chunk.instructions[message.value - len(chunk.sources)]
        if key not in forwards and next_of[key] and ends_with_a_receive(places, instruction):
            forwards[key] = max(next_of[key], key=lambda m: (behind[m], -m.value)).value
    return forwards


def ends_with_a_receive(places: Sequence[int], instruction: Instruction) -> bool:
    """Return whether the last operation of an instruction receives a message, so that it can forward the result.

    ``places`` has the rank of each value of the chunk.
    """
    ranks = [places[operand] for operand in instruction.operands]
    local = ranks.index(instruction.device) if instruction.device in ranks else 0
    return local < 2 or local < len(ranks) - 1


def _paths(
    found: list[tuple[MessageKey, Connection]], forwards: dict[tuple[int, int], int]
) -> Iterator[list[tuple[MessageKey, Connection]]]:
    """Yield the paths of messages that forward each other. A path that would return to a rank is cut.

    A rank that replaces a value by the result must wait until the value is sent. If the same path brought the result
    back, its two messages would wait for each other. Where a path is cut, the entry of ``forwards`` is deleted.
    """
    place = dict(found)
    last = {}  # by (chunk, value): the message that completes the value
    for message, _ in found:
        last[message.chunk, message.value] = message
    forwarded = {MessageKey(chunk, value, after) for (chunk, value), after in forwards.items()}
    starts = [message for message, _ in found if message not in forwarded]
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
    collective: Collective, parts: Sequence[int], load: Sequence[Fraction], most: int, pieces: int
) -> Arrangement:
    """Return an arrangement in which messages share channels, so that no rank has more than ``most`` threadblocks.

    Without pieces, a connection has as many channels as fill its link. With pieces, it has one channel for each
    message, so that stages do not share any. In both cases there are fewer if a rank would have too many threadblocks.
    ``load`` has for each chunk the load of a channel by one part.
    """
    divided, of_part, of_piece = divide_chunks(collective, parts, pieces)
    lanes: defaultdict[Connection, list[Lane]] = defaultdict(list)
    for message, connection in messages(collective):
        lanes[connection] += [(part, message) for part in range(parts[message.chunk])]
    counts = {
        connection: min(len(together), MOST_CHANNELS)
        if pieces > 1
        else _channel_count([load[message.chunk] for _, message in together])
        for connection, together in lanes.items()
    }
    _lower_counts(counts, {connection: len(together) for connection, together in lanes.items()}, most)
    channel_of: dict[Lane, int] = {}
    for connection, together in lanes.items():
        loads = [Fraction(0)] * counts[connection]
        for lane in together:
            channel = min(range(len(loads)), key=lambda k: (loads[k], k))
            loads[channel] += load[lane[1].chunk] or 1
            channel_of[lane] = channel
    return Arrangement(divided, tuple(of_part), tuple(of_piece), channel_of, {}, frozenset(), spread=True)


def _channel_count(loads: Sequence[Fraction]) -> int:
    """Return the number of channels for messages of these loads: the least, or up to twice as many for equal loads."""
    least = min(len(loads), max(math.ceil(sum(loads)), math.ceil(len(loads) / MOST_MESSAGES)))
    counts = range(least, min(len(loads), 2 * least) + 1)
    return min(counts, key=lambda k: (k * -(-len(loads) // k), k))


def _lower_counts(counts: dict[Connection, int], lanes: dict[Connection, int], most: int) -> None:
    """Lower the numbers of channels, down to 1, until each rank has at most ``most`` threadblocks.

    A channel is always taken from the connection whose other channels then have the fewest messages.
    """
    used: Counter[int] = Counter()
    connections: defaultdict[int, list[Connection]] = defaultdict(list)  # of each rank
    for connection, count in counts.items():
        used.update(dict.fromkeys(connection, count))
        for rank in connection:
            connections[rank].append(connection)
    for rank in sorted(used):
        while used[rank] > most:
            several = [connection for connection in connections[rank] if counts[connection] > 1]
            if not several:
                break
            lowered = min(several, key=lambda connection: (lanes[connection] / (counts[connection] - 1), connection))
            counts[lowered] -= 1
            used.subtract(lowered)
