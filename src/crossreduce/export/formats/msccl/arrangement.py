"""Assign the messages of a schedule to parts, pieces and channels of an MSCCL XML file; choose forwarded messages.

Input: a schedule as a collective, and the number of parts of each chunk. Output: an ``Arrangement``.

The runtimes divide a long message into slices and run all steps of a threadblock for one slice before the next one.
Threadblocks do not wait for each other between slices. So a file is pipelined if each threadblock has the messages of
only one stage of a chunk's route. While it moves a slice, the threadblocks of the later stages move earlier slices. A
threadblock of several stages would wait in each slice for the slowest stage.

- A *part* of a chunk has separate channels, and moves at the same time as the other parts, since one channel does not
  fill a fast link.
- A *piece* is a fraction of a part. The steps of a threadblock move one piece after the other, so that the next GPU can
  start before a whole part has arrived. A slice is up to 2 MiB. With messages of that size, most links of a long route
  would be idle until the first message has arrived.
- A *path* is a sequence of messages, each of which forwards the one before it. The GPU between two messages receives,
  combines and sends in one step of one threadblock. This halves the number of threadblocks, of which RCCL has 64. Also,
  a GPU forwards the first bytes of a message before the last ones have arrived.
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

LEAST_UNITS: Final = 2
"""The least number of units of pieces of unequal sizes. Parts without pieces have at least twice as many."""

MOST_SINGLE: Final = 8
"""A part without pieces is moved unit by unit if it has at most so many units, since a step waits for all its units."""

MOST_MESSAGES: Final = 32
"""The most messages of a threadblock without pieces. Each may have to wait twice, which takes two of its 64 steps."""

MOST_CHANNELS: Final = min(runtime.channels for runtime in RUNTIMES.values())


class MessageKey(NamedTuple):
    """A message: the value ``operand`` of a chunk is sent to the device that makes ``value`` from it."""

    chunk: int
    operand: int
    value: int


PartMessage = tuple[int, MessageKey]  # the number of a part of a chunk, and a message of this part
Connection = tuple[int, int]  # the ranks that send and receive


@dataclass(frozen=True)
class Arrangement:
    """The blocks of a file, the channels of their messages, and the receives that forward their messages."""

    collective: Collective
    parts: tuple[int, ...]  # for each block, the part of the chunk to which it belongs
    pieces: tuple[int, ...]  # for each block, the piece of the part
    channels: Mapping[PartMessage, int]
    forwards: Mapping[tuple[int, int], int]  # for a forwarded (chunk, value), the value that its receiver makes from it
    unstored: frozenset[tuple[int, int]]  # the forwarded values that nothing else reads, so they need no memory
    spread: bool  # whether the copies of each part of a chunk have a separate threadblock

    def channel(self, b: int, operand: int, value: int) -> int:
        """Return the channel of the message with which block ``b`` of ``operand`` is sent to the maker of ``value``."""
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


def plain_arrangement(collective: Collective, channels: int, pieces: int = 1) -> Arrangement:
    """Return an arrangement without pieces, in which consecutive blocks share a channel and nothing is forwarded."""
    assert pieces == 1, pieces  # an argument of all functions that build arrangements
    blocks = tuple(short for block in collective.blocks for short in split(block, LARGEST_COUNT))
    collective = replace(collective, blocks=blocks)
    parts = []
    channels_of_parts: defaultdict[int, list[int]] = defaultdict(list)  # by chunk
    for b, block in enumerate(blocks):
        parts.append(len(channels_of_parts[block.chunk]))
        channels_of_parts[block.chunk].append(b * channels // len(blocks))
    channel_of = {
        (part, message): channel
        for message, _ in messages(collective)
        for part, channel in enumerate(channels_of_parts[message.chunk])
    }
    return Arrangement(collective, tuple(parts), (0,) * len(blocks), channel_of, {}, frozenset(), spread=False)


def split(block: Block, most: int) -> list[Block]:
    """Divide a block into blocks of at most ``most`` units.

    >>> split(Block(0, 10, 5), 2)
    [Block(chunk=0, offset=10, size=2), Block(chunk=0, offset=12, size=2), Block(chunk=0, offset=14, size=1)]
    """
    end = block.offset + block.size
    return [Block(block.chunk, start, min(most, end - start)) for start in range(block.offset, end, most)]


def divide_chunks(collective: Collective, parts: Sequence[int], pieces: int) -> tuple[Collective, list[int], list[int]]:
    """Return a collective whose chunks are divided into parts and pieces, and the part and piece of each block.

    ``parts`` has the number of parts of each chunk, and ``pieces`` is the number of pieces of each part. The number of
    units is multiplied by the least power of two with which all pieces of a chunk have the same number of units, or at
    least ``LEAST_UNITS``. Pieces of more units than a step moves are divided into several blocks.
    """
    factor = 1
    least = LEAST_UNITS if pieces > 1 else 2 * LEAST_UNITS
    while not all(_divides(block.size * factor, parts[block.chunk] * pieces, least) for block in collective.blocks):
        if collective.units * factor * 2 > MOST_CHUNKS:
            break
        factor *= 2
    blocks, of_part, of_piece = [], [], []
    for chunk, offset, size in collective.blocks:
        count = parts[chunk] * pieces
        marks = [offset * factor + size * factor * k // count for k in range(count + 1)]
        for k, (start, stop) in enumerate(pairwise(marks)):
            by_unit = pieces == 1 and 1 < stop - start <= MOST_SINGLE
            for n, block in enumerate(split(Block(chunk, start, stop - start), 1 if by_unit else LARGEST_COUNT)):
                blocks.append(block)
                of_part.append(k // pieces)
                of_piece.append(n if by_unit else k % pieces)
    return replace(collective, units=collective.units * factor, blocks=tuple(blocks)), of_part, of_piece


def _divides(units: int, count: int, least: int) -> bool:
    """Return whether units can be divided into ``count`` equal pieces, or into pieces of at least ``least`` units."""
    return units % count == 0 or units >= least * count


def pipeline_arrangement(collective: Collective, parts: Sequence[int], pieces: int) -> Arrangement:
    """Return an arrangement in which each threadblock has the messages of only one stage of one part."""
    all_messages = messages(collective)
    forwards = forwarding(collective, all_messages)
    paths = list(_paths(all_messages, forwards))
    divided, of_part, of_piece = divide_chunks(collective, parts, pieces)
    used: defaultdict[Connection, set[int]] = defaultdict(set)
    channel_of: dict[PartMessage, int] = {}
    # A path needs a channel that is free on all its connections, so the longest paths choose first.
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


def forwarding(collective: Collective, all_messages: list[tuple[MessageKey, Connection]]) -> dict[tuple[int, int], int]:
    """Return, for each (chunk, value) that is forwarded on arrival, the value that the next device makes from it.

    The step that receives the last operand of a value forwards the value to one device. If several devices need the
    value, this is the one from which the longest sequence of messages follows.
    """
    length: dict[MessageKey, int] = {}  # of the longest sequence that begins with a message
    next_of: defaultdict[tuple[int, int], list[MessageKey]] = defaultdict(list)
    for message, _ in all_messages:
        next_of[message.chunk, message.operand].append(message)
    for message, _ in reversed(all_messages):
        length[message] = 1 + max((length[m] for m in next_of[message.chunk, message.value]), default=0)
    forwards: dict[tuple[int, int], int] = {}
    for message, _ in all_messages:
        chunk, places = collective.program.chunks[message.chunk], collective.places[message.chunk]
        key = message.chunk, message.value
        instruction = chunk.instructions[message.value - len(chunk.sources)]
        if key not in forwards and next_of[key] and ends_with_a_receive(places, instruction):
            forwards[key] = max(next_of[key], key=lambda m: (length[m], -m.value)).value
    return forwards


def ends_with_a_receive(places: Sequence[int], instruction: Instruction) -> bool:
    """Return whether the last operation of an instruction receives a message, so that it can forward the result.

    ``places`` has the rank of each value of the chunk. The device's own operand is combined with the first message if
    it is one of the first two operands. Otherwise it is combined after the messages that are listed before it.
    """
    ranks = [places[operand] for operand in instruction.operands]
    local = ranks.index(instruction.device) if instruction.device in ranks else 0
    return local < 2 or local < len(ranks) - 1


def _paths(
    all_messages: list[tuple[MessageKey, Connection]], forwards: dict[tuple[int, int], int]
) -> Iterator[list[tuple[MessageKey, Connection]]]:
    """Yield the paths, each as its messages with their connections. A path ends before it would return to a rank.

    A rank that replaces a value by the result must wait until the value is sent. If the same path brought the result
    back, its two messages would wait for each other. Where a path ends for this reason, ``forwards`` loses an entry.
    """
    connection_of = dict(all_messages)
    last = {}  # by (chunk, value): the message that completes the value
    for message, _ in all_messages:
        last[message.chunk, message.value] = message
    forwarded = {MessageKey(chunk, value, after) for (chunk, value), after in forwards.items()}
    starts = [message for message, _ in all_messages if message not in forwarded]
    while starts:
        message = starts.pop(0)
        path, visited = [(message, connection_of[message])], {*connection_of[message]}
        while (key := (message.chunk, message.value)) in forwards and last[key] == message:
            following = MessageKey(message.chunk, message.value, forwards[key])
            if connection_of[following][1] in visited:
                del forwards[key]
                starts.append(following)
                break
            message = following
            path.append((message, connection_of[message]))
            visited.add(connection_of[message][1])
        yield path


def shared_arrangement(
    collective: Collective, parts: Sequence[int], load: Sequence[Fraction], most: int, pieces: int
) -> Arrangement:
    """Return an arrangement in which messages share channels, so that no rank has more than ``most`` threadblocks.

    Without pieces, a connection has as many channels as fill its link. With pieces, it has one channel for each
    message, so that stages do not share any. In both cases there are fewer if a rank would have too many threadblocks.
    ``load`` has for each chunk the fraction of a channel's rate that one part of the chunk needs.
    """
    divided, of_part, of_piece = divide_chunks(collective, parts, pieces)
    messages_on: defaultdict[Connection, list[PartMessage]] = defaultdict(list)
    for message, connection in messages(collective):
        messages_on[connection] += [(part, message) for part in range(parts[message.chunk])]
    counts = {
        connection: min(len(together), MOST_CHANNELS)
        if pieces > 1
        else _channel_count([load[message.chunk] for _, message in together])
        for connection, together in messages_on.items()
    }
    _lower_counts(counts, {connection: len(together) for connection, together in messages_on.items()}, most)
    channel_of: dict[PartMessage, int] = {}
    for connection, together in messages_on.items():
        loads = [Fraction(0)] * counts[connection]
        for part_message in together:
            channel = min(range(len(loads)), key=lambda k: (loads[k], k))
            loads[channel] += load[part_message[1].chunk] or 1  # without a topology, loads are 0: count messages
            channel_of[part_message] = channel
    return Arrangement(divided, tuple(of_part), tuple(of_piece), channel_of, {}, frozenset(), spread=True)


def _channel_count(loads: Sequence[Fraction]) -> int:
    """Return the least number of channels for these loads of messages, or up to twice it to spread them more evenly."""
    least = min(len(loads), max(math.ceil(sum(loads)), math.ceil(len(loads) / MOST_MESSAGES)))
    counts = range(least, min(len(loads), 2 * least) + 1)
    return min(counts, key=lambda k: (k * -(-len(loads) // k), k))


def _lower_counts(counts: dict[Connection, int], message_counts: dict[Connection, int], most: int) -> None:
    """Lower the numbers of channels, but not below 1, until each rank has at most ``most`` threadblocks.

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
            lowered = min(several, key=lambda pair: (message_counts[pair] / (counts[pair] - 1), pair))
            counts[lowered] -= 1
            used.subtract(lowered)
