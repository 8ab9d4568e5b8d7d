"""The one lowering: a verified schedule becomes a ``Program``, which every engine and every exporter consumes.

Input: a ``Schedule``. Output: a ``Program`` in static single assignment: each chunk has numbered values, and each
instruction makes one value on one device. Instructions that no destination needs are removed, the combinations that
produce the fully reduced chunk are marked as final, and the last use of every value is known. The program stores no
sizes, dtypes or arrays, so one program serves every size.

Two functions convert it for two kinds of engine: ``fused`` if devices share memory (no copies; chains of
combinations are merged), and ``for_device`` if devices exchange messages (one device's sends, receives, combinations).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

from .errors import ScheduleError
from .kernels import FusedProgram
from .schedule import Route, Schedule, live_rounds, verify
from .schedule.schedule import spans
from .topology import Topology


class Instruction(NamedTuple):
    """Makes one value of a chunk on ``device``: a copy of one operand, or the combination of several.

    Args:
      device: the number of the device that makes the value.
      operands: values, combined in this order. Those of other devices have to be sent.
      round: the schedule's round.
      final: the combination contains every contribution once: divide and round here, and only here.
      last_uses: the operands that no later instruction reads and that are not results.
      donated: the position, 0 or 1, of an operand whose memory the result may take over; -1: none. Such an operand
        is a combination that is not final, or a copy of one; no later instruction reads it or another value that may
        share its memory.
    """

    device: int
    operands: tuple[int, ...]
    round: int
    final: bool
    last_uses: tuple[int, ...]
    donated: int


class ChunkProgram(NamedTuple):
    """The instructions of one chunk.

    Value k is the input of ``sources[k]``; instruction k makes value ``len(sources) + k``.
    """

    share: Fraction  # the chunk's fraction of the buffer
    sources: tuple[int, ...]  # the devices that contribute
    destinations: tuple[int, ...]  # the devices that need the result
    instructions: tuple[Instruction, ...]  # in an order in which they can run one by one
    results: tuple[int, ...]  # the value that each destination keeps

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each value."""
        return (*self.sources, *(instruction.device for instruction in self.instructions))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each value, and so its dtype: "input", "partial" (an accumulator) or "final" (fully reduced).

        A copy has the kind of what it copies. If a chunk has one input only, that input is "final".
        """
        found = ["final" if len(self.sources) == 1 else "input"] * len(self.sources)
        for _, operands, _, final, *_ in self.instructions:
            found.append(found[operands[0]] if len(operands) == 1 else "final" if final else "partial")
        return tuple(found)


class Numbered(NamedTuple):
    """An instruction with its chunk and the number of the value that it makes."""

    chunk: int
    value: int
    instruction: Instruction


class Transfer(NamedTuple):
    """A value of a chunk that moves from ``src`` to ``dst``.

    ``through``: the nodes that the schedule routes it through; ``None``: the topology's own route. ``final``: whether
    the value is fully reduced.
    """

    chunk: int
    src: int
    dst: int
    through: tuple[str, ...] | None
    final: bool


@dataclass(frozen=True, eq=False)  # lower() is cached, so identity is enough: a cheap cache key
class Program:
    """A verified schedule in static single assignment.

    ``devices`` are canonical names, numbered by their position; ``pieces`` is the number of pipelined pieces per chunk.
    Both, and the collective, the algorithm and the routes, are those of the schedule.

    >>> from crossreduce.planning import one_device
    >>> print(lower(one_device(["cpu:0", "cpu:1"])))
    all_reduce one_device: 2 devices, 1 chunk, 2 instructions
      chunk 0: v2 on cpu:0 = v0 + v1 (final)
      chunk 0: v3 on cpu:1 = v2
    """

    collective: str
    algorithm: str
    devices: tuple[str, ...]
    chunks: tuple[ChunkProgram, ...]
    round_count: int
    pieces: int
    routes: tuple[Route, ...]

    @cached_property
    def by_round(self) -> tuple[tuple[Numbered, ...], ...]:
        """The instructions of each round, chunk by chunk. They read only inputs and values of earlier rounds."""
        rounds: list[list[Numbered]] = [[] for _ in range(self.round_count)]
        for c, chunk in enumerate(self.chunks):
            for value, instruction in enumerate(chunk.instructions, start=len(chunk.sources)):
                rounds[instruction.round].append(Numbered(c, value, instruction))
        return tuple(map(tuple, rounds))

    @cached_property
    def transfers(self) -> tuple[tuple[Transfer, ...], ...]:
        """The transfers of each round, chunk by chunk: every operand that is on another device."""
        through = {(*route[:3], route.round): route.through for route in self.routes}
        places = [chunk.devices for chunk in self.chunks]
        kinds = [chunk.kinds for chunk in self.chunks]
        return tuple(
            tuple(
                Transfer(
                    c,
                    src,
                    instruction.device,
                    through.get((*ends, r), through.get((*ends, None))),
                    kinds[c][v] == "final",
                )
                for c, _, instruction in instructions
                for v in instruction.operands
                if (src := places[c][v]) != instruction.device
                for ends in [(c, src, instruction.device)]
            )
            for r, instructions in enumerate(self.by_round)
        )

    def require_uniform(self) -> None:
        """Raise unless all chunks have the same sources and destinations, so that inputs and results are whole arrays.

        Raises:
          ScheduleError: they differ.
        """
        if len({(chunk.sources, chunk.destinations) for chunk in self.chunks}) > 1:
            problem = "only schedules whose chunks all have the same sources and destinations can run on whole arrays."
            given = f"{self.collective} by {self.algorithm}, {len(self.chunks)} chunks"
            raise ScheduleError.of(problem, given, "all_reduce, reduce or broadcast")

    def spans(self, size: int) -> tuple[tuple[int, int], ...]:
        """Return each chunk's range of elements in a buffer of ``size`` elements: see ``Schedule.spans``."""
        return spans((chunk.share for chunk in self.chunks), size)

    def __str__(self) -> str:
        count = sum(len(chunk.instructions) for chunk in self.chunks)
        plural = "" if len(self.chunks) == 1 else "s"
        lines = [
            f"{self.collective} {self.algorithm}: {len(self.devices)} devices, {len(self.chunks)} chunk{plural}, "
            f"{count} instructions"
        ]
        for c, chunk in enumerate(self.chunks):
            for value, instruction in enumerate(chunk.instructions, start=len(chunk.sources)):
                operands = " + ".join(f"v{operand}" for operand in instruction.operands)
                final = " (final)" if instruction.final else ""
                lines.append(f"  chunk {c}: v{value} on {self.devices[instruction.device]} = {operands}{final}")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def element_ranges(program: Program, size: int) -> tuple[tuple[int, int, int], ...]:
    """Return the chunks that have elements in a buffer of ``size``, as ``(chunk, start, stop)``.

    An empty buffer passes through one chunk, so that its result gets the right dtype.

    >>> from crossreduce.planning import direct
    >>> element_ranges(lower(direct(["cpu:0", "cpu:1", "cpu:2"])), 2)
    ((1, 0, 1), (2, 1, 2))
    """
    spans = enumerate(program.spans(size))
    return tuple((c, start, stop) for c, (start, stop) in spans if stop > start) or ((0, 0, 0),)


@lru_cache(maxsize=1024)
def lower(schedule: Schedule) -> Program:
    """Verify a schedule and return its program, which is cached.

    Raises:
      ScheduleError: ``verify`` rejects the schedule.
    """
    verify(schedule)
    read: list[list[tuple[int, int, tuple[int, ...]]]] = [[] for _ in schedule.chunks]  # (round, device, operands)
    current = [{source: k for k, source in enumerate(chunk.sources)} for chunk in schedule.chunks]
    for r, steps in enumerate(live_rounds(schedule)):
        made = []
        for chunk, dst, srcs in steps:
            made.append((chunk, dst, len(schedule.chunks[chunk].sources) + len(read[chunk])))
            read[chunk].append((r, dst, tuple(current[chunk][src] for src in srcs)))
        for chunk, dst, value in made:
            current[chunk][dst] = value
    chunks = []
    for (share, sources, destinations), instructions, cells in zip(schedule.chunks, read, current, strict=True):
        results = tuple(cells[dst] for dst in destinations)
        chunks.append(ChunkProgram(share, sources, destinations, _finished(sources, instructions, results), results))
    return Program(
        schedule.collective,
        schedule.algorithm,
        schedule.devices,
        tuple(chunks),
        schedule.round_count,
        schedule.pieces,
        schedule.routes,
    )


def _finished(
    sources: tuple[int, ...], read: list[tuple[int, int, tuple[int, ...]]], results: tuple[int, ...]
) -> tuple[Instruction, ...]:
    """Return a chunk's instructions with final flags and liveness."""
    inputs, everyone = len(sources), (1 << len(sources)) - 1
    contributions = [1 << k for k in range(inputs)]
    # A copy may share memory with its operand: ``origin`` is the input or combination behind each value.
    origin = list(range(inputs))
    last_read: dict[int, int] = {}  # for each value, the last value that is computed from it
    last_read_origin: dict[int, int] = {}
    for value, (_, _, operands) in enumerate(read, start=inputs):
        bits = 0
        for operand in operands:
            bits |= contributions[operand]  # a sum: in a verified schedule no contribution occurs twice
            last_read[operand] = value
            last_read_origin[origin[operand]] = value
        contributions.append(bits)
        origin.append(origin[operands[0]] if len(operands) == 1 else value)
    final = [len(operands) > 1 and contributions[inputs + k] == everyone for k, (_, _, operands) in enumerate(read)]
    made = []
    for value, (r, device, operands) in enumerate(read, start=inputs):
        last_uses = tuple(v for v in dict.fromkeys(operands) if last_read[v] == value and v not in results)
        donated = -1
        if len(operands) > 1:  # a combination's operands are inputs or partial sums, never results, and all differ
            origins = enumerate(origin[operand] for operand in operands[:2])
            donated = next((k for k, start in origins if start >= inputs and last_read_origin[start] == value), -1)
        made.append(Instruction(device, operands, r, final[value - inputs], last_uses, donated))
    return tuple(made)


@lru_cache(maxsize=4096)
def fused(chunk: ChunkProgram, results: int | None = None) -> FusedProgram:
    """Return how to compute a chunk's results for the first ``results`` destinations (``None``: all) in shared memory.

    Copies are removed. Equal combinations are computed once. A combination that is read only once, as the first operand
    of another, becomes part of that one. The order of combination does not change, and so neither do the results' bits.

    >>> from crossreduce.planning import direct, hierarchical_copy
    >>> fused(lower(direct(["cpu:0", "cpu:1", "cpu:2"])).chunks[1])
    FusedProgram(slots=1, folds=((0, 0, 1, 2),), results=(-1, -1, -1))
    >>> fused(lower(hierarchical_copy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])).chunks[0]).folds
    ((0, 2, 3), (1, 0, 1, -1))
    """
    inputs = len(chunk.sources)
    number = list(range(inputs))  # for each value of the chunk, its number among inputs and folds
    known: dict[tuple[int, ...], int] = {}
    for instruction in chunk.instructions:
        operands = tuple(number[operand] for operand in instruction.operands)
        if len(operands) == 1:
            number.append(operands[0])
        else:
            number.append(known.setdefault(operands, inputs + len(known)))
    folds = {fold: list(read) for read, fold in known.items()}
    wanted = [number[result] for result in chunk.results[:results]]
    needed = set(wanted)
    for value in reversed(folds):
        if value in needed:
            needed.update(folds[value])
    folds = {fold: read for fold, read in folds.items() if fold in needed}
    reads = Counter([*wanted, *(operand for read in folds.values() for operand in read)])
    joined = set()
    for read in folds.values():
        if read[0] in folds and reads[read[0]] == 1:
            joined.add(read[0])
            read[:1] = folds[read[0]]
    return _with_slots({fold: read for fold, read in folds.items() if fold not in joined}, wanted)


def _with_slots(folds: dict[int, list[int]], results: list[int]) -> FusedProgram:
    """Assign a slot to each value; slots of values that are not read any more are used again."""
    last_read = {operand: value for value, operands in folds.items() for operand in operands}
    slot_of: dict[int, int] = {}
    free: list[int] = []
    slots = 0
    written = []
    for value, operands in folds.items():
        dying = [x for x in dict.fromkeys(operands) if x in folds and last_read[x] == value and x not in results]
        read = [~slot_of[x] if x in folds else x for x in operands]
        if operands[0] in dying and operands.count(operands[0]) == 1:
            slot_of[value] = slot_of[operands[0]]
            dying.remove(operands[0])
        elif free:
            slot_of[value] = free.pop()
        else:
            slot_of[value] = slots
            slots += 1
        free.extend(slot_of[x] for x in dying)
        written.append((slot_of[value], *read))
    return FusedProgram(slots, tuple(written), tuple(~slot_of[x] if x in folds else x for x in results))


@lru_cache(maxsize=4096)
def part_of(program: Program, sources: tuple[int, ...], destinations: tuple[int, ...]) -> Program:
    """Return the program of the chunks with these sources and destinations, as one of a buffer of only these chunks.

    The rounds keep their numbers.

    >>> from crossreduce.planning import plan
    >>> program = lower(plan("dgx-1v", "reduce_scatter").schedule)
    >>> print({chunk.destinations for chunk in part_of(program, tuple(range(8)), (3,)).chunks})
    {(3,)}
    """
    ends = set(sources), set(destinations)
    chunks = [chunk for chunk in program.chunks if (set(chunk.sources), set(chunk.destinations)) == ends]
    whole = sum(chunk.share for chunk in chunks)
    return replace(program, chunks=tuple(chunk._replace(share=chunk.share / whole) for chunk in chunks), routes=())


@lru_cache(maxsize=256)
def forwarded(program: Program, topology: Topology) -> Program:
    """Return the program in which values move only between devices that links, or links and switches, join.

    If the route of a transfer passes through other devices, these receive the value and send it on, each in a round of
    its own. This is for engines that cannot route messages.

    >>> from crossreduce.planning import one_shot
    >>> line = Topology.mesh(1, 3)
    >>> print(forwarded(lower(one_shot(line.devices, destinations=["cpu:2"])), line))
    reduce one_shot: 3 devices, 1 chunk, 2 instructions
      chunk 0: v3 on cpu:1 = v0
      chunk 0: v4 on cpu:2 = v3 + v1 + v2 (final)
    """
    numbers = {device: k for k, device in enumerate(program.devices)}
    through = {(*route[:3], route.round): route.through for route in program.routes}

    def between(chunk: int, src: int, dst: int, r: int) -> tuple[int, ...]:
        """Return the devices on the route of a transfer, without its ends."""
        route = through.get((chunk, src, dst, r), through.get((chunk, src, dst, None)))
        if route is None:
            route = topology.route(program.devices[src], program.devices[dst]) or ()
        return tuple(numbers[node] for node in route if node in numbers and numbers[node] not in (src, dst))

    longest = [
        max((len(between(each.chunk, each.src, each.dst, r)) for each in transfers), default=0)
        for r, transfers in enumerate(program.transfers)
    ]
    if not any(longest):
        return program
    starts = [r + sum(longest[:r]) for r in range(program.round_count)]
    chunks = []
    for c, chunk in enumerate(program.chunks):
        inputs, places = len(chunk.sources), chunk.devices
        numbered = list(range(inputs))  # for each value of the chunk, its number in the new chunk
        read: list[tuple[int, int, tuple[int, ...]]] = []
        copies: dict[tuple[int, int], tuple[int, int]] = {}  # value and device: the copy there, and its round

        for instruction in chunk.instructions:
            operands, r = [], instruction.round
            for operand in instruction.operands:
                value = numbered[operand]
                for hop, device in enumerate(between(c, places[operand], instruction.device, r)):
                    known = copies.get((operand, device))
                    if known is None or known[1] > starts[r] + hop:
                        known = copies[operand, device] = inputs + len(read), starts[r] + hop
                        read.append((starts[r] + hop, device, (value,)))
                    value = known[0]
                operands.append(value)
            numbered.append(inputs + len(read))
            read.append((starts[r] + longest[r], instruction.device, tuple(operands)))
        results = tuple(numbered[value] for value in chunk.results)
        chunks.append(chunk._replace(instructions=_finished(chunk.sources, read, results), results=results))
    return replace(program, chunks=tuple(chunks), round_count=program.round_count + sum(longest), routes=())


class LocalValue(NamedTuple):
    """A value that one device stores. ``final``: fully reduced, in the result's dtype; else an input or partial sum."""

    chunk: int
    final: bool


class Combination(NamedTuple):
    """Local value ``made`` is the combination of the local values ``operands``, in order; see ``Instruction.final``."""

    made: int
    operands: tuple[int, ...]
    final: bool


class DeviceStage(NamedTuple):
    """The part of one device in a round: send, receive, then combine.

    Sends and receives are ``(local value, other device)``. Two devices list the messages between them in the same
    order. A value that is sent was complete when the round began; a combination waits for its received operands.
    """

    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    combinations: tuple[Combination, ...]


class DeviceProgram(NamedTuple):
    """One device's part in a program.

    Args:
      values: all values that the device stores, numbered in this order; the first are its inputs, one for each chunk
        (unused for chunks to which the device does not contribute).
      stages: one per round of the schedule.
      results: for each chunk the local value that is its result here; -1: the device is not a destination.
    """

    values: tuple[LocalValue, ...]
    stages: tuple[DeviceStage, ...]
    results: tuple[int, ...]


@lru_cache(maxsize=1024)
def for_device(program: Program, device: int) -> DeviceProgram:
    """Return the part of one device, for engines whose devices exchange messages.

    Every read of another device's value is a message, as in the simulation.

    >>> from crossreduce.planning import direct
    >>> for stage in for_device(lower(direct(["cpu:0", "cpu:1"])), 0).stages:
    ...     print(*stage)
    ((1, 1),) ((2, 1),) (Combination(made=3, operands=(0, 2), final=True),)
    ((3, 1),) ((4, 1),) ()
    """
    kinds = [chunk.kinds for chunk in program.chunks]
    values = [LocalValue(c, found[0] == "final") for c, found in enumerate(kinds)]
    local: dict[tuple[int, int], int] = {}  # the local number of each value on this device
    places = [chunk.devices for chunk in program.chunks]
    for c, chunk in enumerate(program.chunks):
        local.update(((c, k), c) for k, source in enumerate(chunk.sources) if source == device)
    stages = []
    for instructions in program.by_round:
        sends, receives, combinations = [], [], []
        for c, value, instruction in instructions:
            operands = []
            for operand in instruction.operands:
                src = places[c][operand]
                if src == device != instruction.device:
                    sends.append((local[c, operand], instruction.device))
                elif src != device == instruction.device:
                    receives.append((len(values), src))
                    operands.append(len(values))
                    values.append(LocalValue(c, kinds[c][operand] == "final"))
                elif src == device:
                    operands.append(local[c, operand])
            if instruction.device == device:
                local[c, value] = operands[0]
                if len(operands) > 1:
                    local[c, value] = len(values)
                    combinations.append(Combination(len(values), tuple(operands), instruction.final))
                    values.append(LocalValue(c, instruction.final))
        stages.append(DeviceStage(tuple(sends), tuple(receives), tuple(combinations)))
    results = [-1] * len(program.chunks)
    for c, chunk in enumerate(program.chunks):
        for dst, result in zip(chunk.destinations, chunk.results, strict=True):
            if dst == device:
                results[c] = local[c, result]
    return DeviceProgram(tuple(values), tuple(stages), tuple(results))
