"""Prove that an MSCCL XML file computes what it claims, whoever wrote it.

In: the file's text.  Out: an ``MscclReport``, or ScheduleError.  Nothing runs; contributions are counted (never,
once, more than once), as in ``verify.py``. What a step means is taken from the runtimes' own interpreters, see
``msccl_program.py``.

- All threadblocks of all GPUs run at the same time. Two accesses to the same memory race, if one writes and nothing
  puts one before the other: neither their threadblock's order, nor dependencies, nor a chain of messages. A step's
  own message puts its writes, but not its reads, after the sender's past: the LL protocols read local data before
  they wait for the message. A step that passes on what it receives (rcs, rrs, rrcs) does so chunk by chunk, so its
  message tells of nothing that was not over when it began. Without races every execution gives the same result, so
  counting along one of them is a proof.
- "In place", input and output are the same memory; an all-gather's input is then a part of its output, a
  reduce-scatter's output a part of its input.
- A long message goes through the whole file slice by slice. Slices touch different bytes, and each leaves all
  connections empty, so if one slice is right, all are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import ArgumentError, ScheduleError, message, shown
from .execution import SLOTS, Execution, Move, Program, chunks_per_slot
from .format import (
    BUFFERS,
    JUDGED,
    READS,
    RECEIVES,
    REDUCING,
    RUNTIMES,
    SENDS,
    WRITES,
    Span,
    broken_limits,
    quoted,
    read_msccl_xml,
)


@dataclass(frozen=True)
class MscclReport:
    """What was proved about a file.

    Args:
      name: the algorithm's.
      coll: the collective that it computes.
      root: the rank that a reduce ends at or a broadcast starts from, else ``None``.
      proto: the protocol.
      ngpus: ranks.
      channels: of the file.
      chunks: into how many parts the full buffer is cut.
      threadblocks: of the GPU that has the most.
      steps: of all threadblocks of all GPUs.
      inplace: right where input and output are the same memory.
      outofplace: right where they are not.
      slots: how many sends a connection was taken to hold.
      notes: which runtime's limit it breaks, and what else a user should know.
    """

    name: str
    coll: str
    root: int | None
    proto: str
    ngpus: int
    channels: int
    chunks: int
    threadblocks: int
    steps: int
    inplace: bool
    outofplace: bool
    slots: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        where = " and ".join(word for word, on in (("in place", self.inplace), ("out of place", self.outofplace)) if on)
        rooted = "" if self.root is None else f" at rank {self.root}"
        counts = (
            f"  {self.ngpus} GPUs, {self.channels} channels, {self.chunks} chunks, "
            f"{self.threadblocks} threadblocks a GPU, {self.steps} steps, {self.proto}"
        )
        notes = [f"  note: {note}" for note in self.notes]
        return "\n".join([f"{self.coll}{rooted}, {where}: right.", counts, *notes])


def verify_msccl_xml(text: str, *, root: int | None = None, slots: int | None = None) -> MscclReport:
    """Prove that an MSCCL XML file computes its collective, without deadlock and without races.

    Args:
      text: the file's content.
      root: the rank at which a reduce ends or a broadcast starts; ``None``: found out. The format has no root.
      slots: how many sends a connection holds that nobody has received; ``None``: as NCCL's protocol has.
    Returns:
      What the file is, and notes on limits of the runtimes that it breaks.
    Raises:
      ScheduleError: the file is malformed, deadlocks, races, reads what was never written, or leaves a wrong
        result; the algorithm, GPU, threadblock and step are named. Also for what cannot be judged: another
        collective than all-reduce, reduce, reduce-scatter, broadcast, all-gather and all-to-all.
      ArgumentError: a root that is no rank, or no slot.

    >>> from crossreduce.planning import ring
    >>> from crossreduce.export.msccl.writer import to_msccl_xml
    >>> print(verify_msccl_xml(to_msccl_xml(ring(["cuda:0", "cuda:1"]))))
    allreduce, in place and out of place: right.
      2 GPUs, 1 channels, 2 chunks, 2 threadblocks a GPU, 8 steps, Simple
    """
    algo = read_msccl_xml(text)
    if algo.coll not in JUDGED:
        raise ScheduleError(
            message(
                f"collectives of this kind cannot be judged: {algo.coll}.",
                quoted(algo.name),
                "a file for " + ", ".join(sorted(JUDGED)),
            )
        )
    if root is not None and (algo.coll not in ("reduce", "broadcast") or root not in range(len(algo.gpus))):
        remedy = f"0 to {len(algo.gpus) - 1}, for a reduce or broadcast"
        raise ArgumentError(message("the root is a rank.", f"{shown(root)}, {algo.coll}", remedy))
    if slots is not None and not (isinstance(slots, int) and slots >= 1):
        raise ArgumentError(message("a connection has 1, 2, ... slots.", shown(slots), "slots=8"))
    held = slots or SLOTS[algo.proto]
    program = Program(algo)
    order = Execution(program, held, chunks_per_slot(algo)).order()
    notes = [note for runtime in RUNTIMES.values() for note in broken_limits(algo, runtime)] + program.notes
    if text.lstrip().startswith("<?xml"):
        notes.append("msccl-executor-nccl and RCCL cannot read an XML declaration (<?xml ...?>)")
    for inplace in (True, False):
        if algo.inplace if inplace else algo.outofplace:
            root = _judge(program, order, inplace, root, notes)
    if root is not None:
        notes.append(f"the format has no root: the runtimes use this file for every root, and it is right for {root}")
    return MscclReport(
        algo.name,
        algo.coll,
        root,
        algo.proto,
        len(algo.gpus),
        algo.channels,
        algo.chunks,
        max(len(gpu.threadblocks) for gpu in algo.gpus),
        sum(len(block.steps) for gpu in algo.gpus for block in gpu.threadblocks),
        algo.inplace,
        algo.outofplace,
        held,
        tuple(dict.fromkeys(notes)),
    )


class _Value(NamedTuple):
    """What a chunk of memory holds: which chunk of the collective, and from which ranks (bit r) once, more than
    once. ``chunk`` -1: parts of different chunks were combined, which can never be right again."""

    chunk: int
    once: int
    twice: int


@dataclass
class _Cell:
    value: _Value | None
    writer: int = -1
    readers: list[int] = field(default_factory=list)


Key = tuple[int, str, int]  # GPU, buffer, chunk


def _combined(a: _Value, b: _Value) -> _Value:
    if a.chunk != b.chunk:
        return _Value(-1, 0, 0)
    return _Value(a.chunk, a.once | b.once, a.twice | b.twice | (a.once & b.once))


class _Memory:
    """The buffers of all GPUs during one call, in place or out of place."""

    def __init__(self, program: Program, inplace: bool, givers: range) -> None:
        self.program, self.inplace = program, inplace
        algo = program.algo
        self.ranks = len(algo.gpus)
        self.part = algo.chunks // self.ranks
        self.sizes = {
            "i": self.part if algo.coll == "allgather" else algo.chunks,
            "o": self.part if algo.coll == "reducescatter" else algo.chunks,
        }
        self.cells: dict[Key, _Cell] = {}
        for rank in givers:
            for k in range(self.sizes["i"]):
                label = rank * self.part + k if algo.coll == "allgather" else k
                self.cells[self.key(rank, "i", k)] = _Cell(_Value(label, 1 << rank, 0))

    def key(self, gpu: int, buffer: str, chunk: int) -> Key:
        """Return a chunk of a buffer by the one name that it has where buffers share memory."""
        if self.inplace and buffer in "io":
            coll = self.program.algo.coll
            if coll == "allgather":
                return (gpu, "o", chunk + gpu * self.part) if buffer == "i" else (gpu, buffer, chunk)
            if coll == "reducescatter":
                return (gpu, "i", chunk + gpu * self.part) if buffer == "o" else (gpu, buffer, chunk)
            return gpu, "i", chunk
        return gpu, buffer, chunk

    def span(self, number: int, span: Span) -> list[Key]:
        """Return the chunks that a move touches from ``span`` on."""
        move = self.program.moves[number]
        gpu = self.program.algo.gpus[move.gpu]
        real = self.sizes.get(span.buffer, gpu.sizes["s"])
        size = min(real, gpu.sizes[span.buffer])
        if span.offset < 0 or span.offset + move.count > size:
            raise ScheduleError(
                f"{self.program.at(number)}: chunks {span.offset} to {span.offset + move.count - 1} of the "
                f"{BUFFERS[span.buffer]} buffer, which has {size}."
            )
        return [self.key(move.gpu, span.buffer, span.offset + k) for k in range(move.count)]

    def what(self, key: Key) -> str:
        mode = "in place" if self.inplace else "out of place"
        return f"chunk {key[2]} of the {BUFFERS[key[1]]} buffer ({mode})"


def _judge(program: Program, order: list[int], inplace: bool, root: int | None, notes: list[str]) -> int | None:
    """Run the moves on memory; raise unless the result is right. Return the root, where the collective has one."""
    algo = program.algo
    ranks = len(algo.gpus)
    memory = _Memory(program, inplace, range(ranks))
    _flow(program, order, memory)
    if algo.coll == "broadcast":
        root = _giver(memory) if root is None else root
        memory = _Memory(program, inplace, range(root, root + 1))  # nobody else's input may be read
        _flow(program, order, memory)
    elif algo.coll == "reduce" and root is None:
        wrong = {rank: _wrong(memory, rank, None) for rank in range(ranks)}
        root = next((rank for rank in range(ranks) if wrong[rank] is None), None)
        if root is None:
            raise ScheduleError(f"{program.name}: no rank ends with the whole sum. {wrong[0]}")
    for rank in range(ranks) if algo.coll != "reduce" or root is None else (root,):
        fault = _wrong(memory, rank, root)
        if fault is not None:
            raise ScheduleError(fault)
    if not inplace:
        for number, move in enumerate(program.moves):
            spans = [s for s, types in ((move.step.src, READS), (move.step.dst, WRITES)) if move.step.type in types]
            if algo.coll == "reduce" and move.gpu != root and any(span.buffer == "o" for span in spans):
                raise ScheduleError(f"{program.at(number)}: uses the output buffer, which only the root {root} has.")
            if move.step.type in WRITES and move.step.dst.buffer == "i":
                notes.append(
                    f"gpu {move.gpu}, tb {move.block}, step {move.number} writes the input of an out-of-place call"
                )
    return root


def _giver(memory: _Memory) -> int:
    """Find a broadcast's root: the rank whose data the first output holds."""
    cell = memory.cells.get(memory.key(memory.ranks - 1, "o", 0))
    value = None if cell is None else cell.value
    return value.once.bit_length() - 1 if value is not None and value.once else 0


def _flow(program: Program, order: list[int], memory: _Memory) -> None:
    """Do all moves, one by one; raise at a race, or where something is read that was never written."""
    past: dict[int, tuple[int, int]] = {}  # for moves that someone still asks: bits of what was over, see _clocks
    uses = _uses(program)
    messages: dict[int, list[_Value]] = {}
    for number in order:
        move = program.moves[number]
        start, arrived = _clocks(number, move, past, uses)
        kind = move.step.type
        reads = memory.span(number, move.step.src) if kind in READS else []
        writes = memory.span(number, move.step.dst) if kind in WRITES else []
        if reads and writes and reads != writes and not set(reads).isdisjoint(writes):
            raise ScheduleError(f"{program.at(number)}: src and dst overlap without being the same.")
        values = messages.pop(move.sender, [])
        if reads:
            own = [_read(program, memory, number, key, start) for key in reads]
            values = list(map(_combined, values, own)) if kind in RECEIVES else own
        if kind == "re":
            values = [
                _combined(_read(program, memory, number, key, start), value)
                for key, value in zip(writes, values, strict=True)
            ]
        if writes:
            for key, value in zip(writes, values, strict=True):
                _write(program, memory, number, key, value, arrived)
        if kind in SENDS:
            messages[number] = values


def _uses(program: Program) -> list[int]:
    """Count for each move how many later ones ask for its past."""
    uses = [0] * len(program.moves)
    for move in program.moves:
        for other in (move.last, *move.waits, move.sender):
            if other >= 0:
                uses[other] += 1
    return uses


def _clocks(number: int, move: Move, past: dict[int, tuple[int, int]], uses: list[int]) -> tuple[int, int]:
    """Return which moves are over for certain when this one starts, and when its message is there (bit m: move m).

    ``past`` has for a move what is over once it has begun to send, and once it has ended.
    """
    start = 0
    for other in (move.last, *move.waits):
        if other >= 0:
            start |= _ask(other, past, uses)[1]
    arrived, ended = start, start | 1 << number
    if move.sender >= 0:
        began, over = _ask(move.sender, past, uses)
        arrived |= began
        ended |= over
    if uses[number]:
        past[number] = arrived, ended
    return start, arrived


def _ask(other: int, past: dict[int, tuple[int, int]], uses: list[int]) -> tuple[int, int]:
    uses[other] -= 1
    return past[other] if uses[other] else past.pop(other)


def _read(program: Program, memory: _Memory, number: int, key: Key, over: int) -> _Value:
    cell = memory.cells.get(key)
    if cell is None or cell.value is None:
        raise ScheduleError(f"{program.at(number)}: reads {memory.what(key)}, into which nothing was written.")
    if cell.writer >= 0 and not over >> cell.writer & 1:
        raise ScheduleError(_race(program, memory, number, "reads", key, cell.writer, "writes"))
    cell.readers.append(number)
    return cell.value


def _write(program: Program, memory: _Memory, number: int, key: Key, value: _Value, over: int) -> None:
    cell = memory.cells.setdefault(key, _Cell(None))
    if cell.writer >= 0 and not over >> cell.writer & 1:
        raise ScheduleError(_race(program, memory, number, "writes", key, cell.writer, "writes"))
    for reader in cell.readers:
        if reader != number and not over >> reader & 1:
            raise ScheduleError(_race(program, memory, number, "writes", key, reader, "reads"))
    cell.value, cell.writer = value, number
    cell.readers.clear()


def _race(program: Program, memory: _Memory, number: int, does: str, key: Key, other: int, did: str) -> str:
    far = program.moves[other]
    return (
        f"{program.at(number)}: a race. It {does} {memory.what(key)}, which "
        f"tb {far.block}, step {far.number} ({far.step.type}) {did}, and nothing puts the two in order."
    )


def _wrong(memory: _Memory, rank: int, root: int | None) -> str | None:
    """Return what is wrong with a rank's output in the end, or ``None``."""
    program = memory.program
    coll = program.algo.coll
    everyone = (1 << memory.ranks) - 1
    for k in range(memory.sizes["o"]):
        key = memory.key(rank, "o", k)
        cell = memory.cells.get(key, _Cell(None))
        if coll in REDUCING:
            due = _Value(rank * memory.part + k if coll == "reducescatter" else k, everyone, 0)
        elif coll == "broadcast":
            due = _Value(k, 1 << (root or 0), 0)
        elif coll == "allgather":
            due = _Value(k, 1 << k // memory.part, 0)
        else:
            due = _Value(rank * memory.part + k % memory.part, 1 << k // memory.part, 0)
        if cell.value != due:
            place = f"{program.name}, gpu {rank}"
            if cell.writer >= 0:
                far = program.moves[cell.writer]
                place += f", tb {far.block}, step {far.number} ({far.step.type})"
            return f"{place}: in the end {memory.what(key)} {_fault(cell.value, due)}."
    return None


def _fault(value: _Value | None, due: _Value) -> str:
    if value is None:
        return "was never written"
    if value.chunk == -1:
        return "combines different chunks"
    if value.chunk != due.chunk:
        return f"holds chunk {value.chunk} instead of {due.chunk}"
    for bits, fault in (
        (value.twice, "has the contribution of rank {} more than once"),
        (due.once & ~value.once, "lacks the contribution of rank {}"),
        (value.once & ~due.once, "has a contribution of rank {}, which is not due"),
    ):
        if bits:
            return fault.format((bits & -bits).bit_length() - 1)
    raise AssertionError("a right value was called wrong")
