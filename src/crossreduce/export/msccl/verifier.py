"""Prove that an MSCCL XML file, of any tool, computes its collective.

Input: the file's text. Output: an ``MscclReport``, or ScheduleError. No GPU runs; contributions are counted (never,
once, more than once), as in ``schedule/verify.py``. Steps mean what the runtimes' own interpreters do, see
``execution.py``.

- All threadblocks of all GPUs run at the same time. Two accesses to the same memory race if one of them writes and
  they are not ordered by their threadblock, by dependencies or by a chain of messages. A step's own message orders its
  writes, but not its reads, after the sender's past: the LL protocols read local data before they wait for the
  message. A step that forwards its message (rcs, rrs, rrcs) does so chunk by chunk, so its message orders only steps
  that were done when it began. Without races every execution gives the same result, so counting along one of them is a
  proof.
- "In place", input and output are the same memory; an all-gather's input is then a part of its output, a
  reduce-scatter's output a part of its input.
- The runtimes run all steps for each slice of a long message, one slice after the other. Slices touch different bytes,
  and each leaves all connections empty, so if one slice is right, all are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import ArgumentError, ScheduleError, shown
from .execution import SLOTS, Execution, MscclProgram, RuntimeStep, chunks_per_slot
from .format import (
    BUFFERS,
    READS,
    RECEIVES,
    REDUCING,
    RUNTIMES,
    SENDS,
    VERIFIABLE,
    WRITES,
    XmlSpan,
    broken_limits,
    quoted,
    read_msccl_xml,
)


@dataclass(frozen=True)
class MscclReport:
    """The proved facts about a file.

    Args:
      name: the algorithm's name.
      coll: the collective that it computes.
      root: the destination of a reduce or the source of a broadcast, else ``None``.
      proto: the protocol.
      ngpus: the number of ranks.
      channels: the number of channels.
      chunks: the number of equal parts of the full buffer.
      threadblocks: the largest number of threadblocks of a GPU.
      steps: the number of steps of all threadblocks of all GPUs.
      inplace: right for calls whose input and output are the same memory.
      outofplace: right for other calls.
      slots: the number of slots per connection with which deadlocks were excluded.
      notes: limits of the runtimes that it breaks, and other facts that a user should know.
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
            f"{self.threadblocks} threadblocks per GPU, {self.steps} steps, {self.proto}"
        )
        notes = [f"  note: {note}" for note in self.notes]
        return "\n".join([f"{self.coll}{rooted}, {where}: right.", counts, *notes])


def verify_msccl_xml(text: str, *, root: int | None = None, slots: int | None = None) -> MscclReport:
    """Prove that an MSCCL XML file computes its collective, without deadlock and without races.

    Args:
      text: the file's content.
      root: the destination of a reduce or the source of a broadcast; ``None``: any. The format does not store it.
      slots: the number of messages that a connection holds before they are received; ``None``: as in NCCL's protocol.
    Returns:
      The facts about the file, and notes on limits of the runtimes that it breaks.
    Raises:
      ScheduleError: the file is malformed, has a deadlock or a race, reads memory that was never written, or leaves a
        wrong result; the message has the algorithm, GPU, threadblock and step. Also for a collective other than
        all-reduce, reduce, reduce-scatter, broadcast, all-gather and all-to-all.
      ArgumentError: an invalid root or number of slots.

    >>> from crossreduce.planning import ring
    >>> from crossreduce.export.msccl.writer import to_msccl_xml
    >>> print(verify_msccl_xml(to_msccl_xml(ring(["cuda:0", "cuda:1"]))))
    allreduce, in place and out of place: right.
      2 GPUs, 1 channels, 2 chunks, 2 threadblocks per GPU, 8 steps, Simple
    """
    algo = read_msccl_xml(text)
    if algo.coll not in VERIFIABLE:
        problem = f"collectives of this kind cannot be verified: {algo.coll}."
        raise ScheduleError.of(problem, quoted(algo.name), "a file for " + ", ".join(sorted(VERIFIABLE)))
    if root is not None and (algo.coll not in ("reduce", "broadcast") or root not in range(len(algo.gpus))):
        remedy = f"0 to {len(algo.gpus) - 1}, for a reduce or broadcast"
        raise ArgumentError.of("this root is invalid.", f"{shown(root)}, {algo.coll}", remedy)
    if slots is not None and not (isinstance(slots, int) and slots >= 1):
        raise ArgumentError.of("a connection has 1, 2, ... slots.", shown(slots), "slots=8")
    slots = slots or SLOTS[algo.proto]
    program = MscclProgram(algo)
    order = Execution(program, slots, chunks_per_slot(algo)).order()
    notes = [note for runtime in RUNTIMES.values() for note in broken_limits(algo, runtime)] + program.notes
    if text.lstrip().startswith("<?xml"):
        notes.append("msccl-executor-nccl and RCCL cannot read an XML declaration (<?xml ...?>)")
    for inplace in (True, False):
        if algo.inplace if inplace else algo.outofplace:
            root = _prove(program, order, inplace, root, notes)
    if root is not None:
        notes.append(
            f"the format does not store a root: runtimes use the file for every root, but it is right only for {root}"
        )
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
        slots,
        tuple(dict.fromkeys(notes)),
    )


class _Contents(NamedTuple):
    """The value in a chunk of memory.

    Args:
      chunk: its chunk of the collective; -1: different chunks were combined, which cannot be undone.
      once: bit r: it contains the contribution of rank r.
      twice: bit r: it contains the contribution of rank r more than once.
    """

    chunk: int
    once: int
    twice: int


@dataclass
class _MemoryCell:
    value: _Contents | None
    writer: int = -1
    readers: list[int] = field(default_factory=list)


Key = tuple[int, str, int]  # GPU, buffer, chunk


def _combined(a: _Contents, b: _Contents) -> _Contents:
    if a.chunk != b.chunk:
        return _Contents(-1, 0, 0)
    return _Contents(a.chunk, a.once | b.once, a.twice | b.twice | (a.once & b.once))


class _Memory:
    """The buffers of all GPUs during one call, in place or out of place."""

    def __init__(self, program: MscclProgram, inplace: bool, sources: range) -> None:
        self.program, self.inplace = program, inplace
        algo = program.algo
        self.ranks = len(algo.gpus)
        self.part = algo.chunks // self.ranks
        self.sizes = {
            "i": self.part if algo.coll == "allgather" else algo.chunks,
            "o": self.part if algo.coll == "reducescatter" else algo.chunks,
        }
        self.cells: dict[Key, _MemoryCell] = {}
        for rank in sources:
            for k in range(self.sizes["i"]):
                label = rank * self.part + k if algo.coll == "allgather" else k
                self.cells[self.key(rank, "i", k)] = _MemoryCell(_Contents(label, 1 << rank, 0))

    def key(self, gpu: int, buffer: str, chunk: int) -> Key:
        """Return the one name of a chunk of a buffer, which may have two names in calls in place."""
        if self.inplace and buffer in "io":
            coll = self.program.algo.coll
            if coll == "allgather":
                return (gpu, "o", chunk + gpu * self.part) if buffer == "i" else (gpu, buffer, chunk)
            if coll == "reducescatter":
                return (gpu, "i", chunk + gpu * self.part) if buffer == "o" else (gpu, buffer, chunk)
            return gpu, "i", chunk
        return gpu, buffer, chunk

    def span(self, number: int, span: XmlSpan) -> list[Key]:
        """Return the chunks of a step's source or destination."""
        step = self.program.steps[number]
        gpu = self.program.algo.gpus[step.gpu]
        real = self.sizes.get(span.buffer, gpu.sizes["s"])
        size = min(real, gpu.sizes[span.buffer])
        if span.offset < 0 or span.offset + step.count > size:
            raise ScheduleError(
                f"{self.program.describe(number)}: chunks {span.offset} to {span.offset + step.count - 1} of the "
                f"{BUFFERS[span.buffer]} buffer, which has {size}."
            )
        return [self.key(step.gpu, span.buffer, span.offset + k) for k in range(step.count)]

    def describe(self, key: Key) -> str:
        """Return a chunk of memory in words, for messages."""
        mode = "in place" if self.inplace else "out of place"
        return f"chunk {key[2]} of the {BUFFERS[key[1]]} buffer ({mode})"


def _prove(program: MscclProgram, order: list[int], inplace: bool, root: int | None, notes: list[str]) -> int | None:
    """Run the steps on symbolic memory, and raise unless the result is right. Return the root of the collective."""
    algo = program.algo
    ranks = len(algo.gpus)
    memory = _Memory(program, inplace, range(ranks))
    _run(program, order, memory)
    if algo.coll == "broadcast":
        root = _broadcast_root(memory) if root is None else root
        memory = _Memory(program, inplace, range(root, root + 1))  # only the root's input may be read
        _run(program, order, memory)
    elif algo.coll == "reduce" and root is None:
        faults = {rank: _output_fault(memory, rank, None) for rank in range(ranks)}
        root = next((rank for rank in range(ranks) if faults[rank] is None), None)
        if root is None:
            raise ScheduleError(f"{program.name}: no rank has the complete sum at the end. {faults[0]}")
    for rank in range(ranks) if algo.coll != "reduce" or root is None else (root,):
        fault = _output_fault(memory, rank, root)
        if fault is not None:
            raise ScheduleError(fault)
    if not inplace:
        for number, step in enumerate(program.steps):
            spans = [s for s, types in ((step.xml.src, READS), (step.xml.dst, WRITES)) if step.xml.type in types]
            if algo.coll == "reduce" and step.gpu != root and any(span.buffer == "o" for span in spans):
                raise ScheduleError(
                    f"{program.describe(number)}: uses the output buffer, which only the root {root} has."
                )
            if step.xml.type in WRITES and step.xml.dst.buffer == "i":
                notes.append(
                    f"gpu {step.gpu}, tb {step.block}, step {step.number} writes the input of an out-of-place call"
                )
    return root


def _broadcast_root(memory: _Memory) -> int:
    """Return a broadcast's root: the source of the first output of the last rank."""
    cell = memory.cells.get(memory.key(memory.ranks - 1, "o", 0))
    value = None if cell is None else cell.value
    return value.once.bit_length() - 1 if value is not None and value.once else 0


def _run(program: MscclProgram, order: list[int], memory: _Memory) -> None:
    """Run all steps, one by one; raise for a race, or for a read of memory that was never written."""
    past: dict[int, tuple[int, int]] = {}  # see _clocks; for steps with uses left
    uses = _uses(program)
    messages: dict[int, list[_Contents]] = {}
    for number in order:
        step = program.steps[number]
        start, arrived = _clocks(number, step, past, uses)
        kind = step.xml.type
        reads = memory.span(number, step.xml.src) if kind in READS else []
        writes = memory.span(number, step.xml.dst) if kind in WRITES else []
        if reads and writes and reads != writes and not set(reads).isdisjoint(writes):
            raise ScheduleError(f"{program.describe(number)}: src and dst overlap, but are not the same.")
        values = messages.pop(step.sender, [])
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


def _uses(program: MscclProgram) -> list[int]:
    """Count for each step the later steps that use its past."""
    uses = [0] * len(program.steps)
    for step in program.steps:
        for other in (step.previous, *step.waits, step.sender):
            if other >= 0:
                uses[other] += 1
    return uses


def _clocks(number: int, step: RuntimeStep, past: dict[int, tuple[int, int]], uses: list[int]) -> tuple[int, int]:
    """Return the steps that are certainly done when this one starts, and when its message arrives (bit k: step k).

    ``past`` stores for a step the steps that are done once it has begun to send, and once it has ended.
    """
    start = 0
    for other in (step.previous, *step.waits):
        if other >= 0:
            start |= _use(other, past, uses)[1]
    arrived, ended = start, start | 1 << number
    if step.sender >= 0:
        begun, over = _use(step.sender, past, uses)
        arrived |= begun
        ended |= over
    if uses[number]:
        past[number] = arrived, ended
    return start, arrived


def _use(other: int, past: dict[int, tuple[int, int]], uses: list[int]) -> tuple[int, int]:
    """Return a step's past, and drop it after its last use."""
    uses[other] -= 1
    return past[other] if uses[other] else past.pop(other)


def _read(program: MscclProgram, memory: _Memory, number: int, key: Key, done: int) -> _Contents:
    cell = memory.cells.get(key)
    if cell is None or cell.value is None:
        raise ScheduleError(f"{program.describe(number)}: reads {memory.describe(key)}, which was never written.")
    if cell.writer >= 0 and not done >> cell.writer & 1:
        raise ScheduleError(_race(program, memory, number, "reads", key, cell.writer, "writes"))
    cell.readers.append(number)
    return cell.value


def _write(program: MscclProgram, memory: _Memory, number: int, key: Key, value: _Contents, done: int) -> None:
    cell = memory.cells.setdefault(key, _MemoryCell(None))
    if cell.writer >= 0 and not done >> cell.writer & 1:
        raise ScheduleError(_race(program, memory, number, "writes", key, cell.writer, "writes"))
    for reader in cell.readers:
        if reader != number and not done >> reader & 1:
            raise ScheduleError(_race(program, memory, number, "writes", key, reader, "reads"))
    cell.value, cell.writer = value, number
    cell.readers.clear()


def _race(program: MscclProgram, memory: _Memory, number: int, does: str, key: Key, other: int, did: str) -> str:
    far = program.steps[other]
    return (
        f"{program.describe(number)}: a race. It {does} {memory.describe(key)}, which "
        f"tb {far.block}, step {far.number} ({far.xml.type}) {did}, and the two are not ordered."
    )


def _output_fault(memory: _Memory, rank: int, root: int | None) -> str | None:
    """Return the fault of a rank's output at the end in words, or ``None`` if it is right."""
    program = memory.program
    coll = program.algo.coll
    everyone = (1 << memory.ranks) - 1
    for k in range(memory.sizes["o"]):
        key = memory.key(rank, "o", k)
        cell = memory.cells.get(key, _MemoryCell(None))
        if coll in REDUCING:
            expected = _Contents(rank * memory.part + k if coll == "reducescatter" else k, everyone, 0)
        elif coll == "broadcast":
            expected = _Contents(k, 1 << (root or 0), 0)
        elif coll == "allgather":
            expected = _Contents(k, 1 << k // memory.part, 0)
        else:
            expected = _Contents(rank * memory.part + k % memory.part, 1 << k // memory.part, 0)
        if cell.value != expected:
            place = f"{program.name}, gpu {rank}"
            if cell.writer >= 0:
                far = program.steps[cell.writer]
                place += f", tb {far.block}, step {far.number} ({far.xml.type})"
            return f"{place}: at the end {memory.describe(key)} {_fault(cell.value, expected)}."
    return None


def _fault(value: _Contents | None, expected: _Contents) -> str:
    """Return the difference between two values in words."""
    if value is None:
        return "was never written"
    if value.chunk == -1:
        return "combines different chunks"
    if value.chunk != expected.chunk:
        return f"contains chunk {value.chunk} instead of {expected.chunk}"
    for bits, fault in (
        (value.twice, "has the contribution of rank {} more than once"),
        (expected.once & ~value.once, "lacks the contribution of rank {}"),
        (value.once & ~expected.once, "has the contribution of rank {}, which does not belong there"),
    ):
        if bits:
            return fault.format((bits & -bits).bit_length() - 1)
    raise AssertionError("the values are equal")
