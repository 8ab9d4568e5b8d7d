"""Prove that an MSCCL XML file, of any tool, computes its collective.

No GPU runs; contributions are counted (never, once, more than once), as in ``schedule/verify.py``. Steps have the same
effect as in the runtimes' own interpreters, see ``execution.py``.

- All threadblocks of all GPUs run at the same time. Two accesses to the same memory race if one of them writes and
  they are not ordered by their threadblock, by dependencies or by a chain of messages. When a step receives a message,
  its writes come after the steps that were done before the message was sent, but its reads need not: the LL protocols
  read local data before they wait for the message. A step that forwards its message (rcs, rrs, rrcs) does so chunk by
  chunk, so only the steps that were done when it began precede the message that it sends. Without races every execution
  gives the same result, so one execution is a proof.
- The runtimes run all steps for each slice of a long message, one slice after the other. Slices access different bytes,
  and each leaves all connections empty. So if one slice is right, all are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from ....errors import ArgumentError, ScheduleError, shown
from ..collective import Location, require_integers
from ..proof import (
    BUFFERS,
    Contributions,
    check_request,
    difference,
    prove_results,
    quoted_name,
    report_text,
    right_result,
)
from .execution import SLOTS, Execution, MscclProgram, RuntimeStep, chunks_per_slot
from .format import READS, RECEIVES, RUNTIMES, SENDS, WRITES, broken_limits, read_msccl_xml


@dataclass(frozen=True)
class MscclReport:
    """The proved facts about a file."""

    name: str
    coll: str
    root: int | None  # the destination of a reduce or the source of a broadcast, else None
    proto: str
    ngpus: int  # the number of ranks
    channels: int  # the number of channels
    chunks: int  # the number of equal parts of the full buffer
    threadblocks: int  # the largest number of threadblocks of a GPU
    steps: int  # the number of steps of all threadblocks of all GPUs
    inplace: bool  # whether it is right for calls in which input and output share memory
    outofplace: bool  # whether it is right for calls in which input and output are different memory
    slots: int  # the number of unreceived messages that a connection was assumed to hold
    notes: tuple[str, ...]  # limits of the runtimes that the file exceeds, and other facts for the user

    def __str__(self) -> str:
        mode = " and ".join(word for word, on in (("in place", self.inplace), ("out of place", self.outofplace)) if on)
        counts = (
            f"{self.ngpus} GPUs, {self.channels} channels, {self.chunks} chunks, "
            f"{self.threadblocks} threadblocks per GPU, {self.steps} steps, {self.proto}"
        )
        return report_text(self.coll, self.root, mode, [counts], self.notes)


def verify_msccl_xml(text: str, *, root: int | None = None, slots: int | None = None) -> MscclReport:
    """Prove that an MSCCL XML file computes its collective, without deadlock and without races.

    Args:
      text: the file's content.
      root: the destination of a reduce or source of a broadcast. By default it is found: the format does not store it.
      slots: the number of messages that a connection holds before they are received, by default as in NCCL's protocol.
    Returns:
      The facts about the file, and notes on limits of the runtimes that it breaks.
    Raises:
      ScheduleError: the file is malformed or too large, has a deadlock or race, reads memory that was never written, or
        leaves a wrong result. The message names the step at fault, if there is one. Collectives other than all-reduce,
        reduce, reduce-scatter, broadcast, all-gather and all-to-all raise it, too.
      ArgumentError: the root or the number of slots is invalid.

    >>> from crossreduce.planning import ring
    >>> from crossreduce.export.formats.msccl.writer import to_msccl_xml
    >>> print(verify_msccl_xml(to_msccl_xml(ring(["cuda:0", "cuda:1"]))))
    allreduce, in place and out of place: right.
      2 GPUs, 1 channels, 2 chunks, 2 threadblocks per GPU, 8 steps, Simple
    """
    algo = read_msccl_xml(text)
    require_integers(root=root, slots=slots)
    check_request(f"algo {quoted_name(algo.name)}", algo.coll, len(algo.gpus), root, "file")
    if slots is not None and slots < 1:
        raise ArgumentError.of("the number of slots must be at least 1.", shown(slots), "slots=8")
    slots = slots or SLOTS[algo.proto]
    program = MscclProgram(algo)
    order = Execution(program, slots, chunks_per_slot(algo)).order()
    notes = [note for runtime in RUNTIMES.values() for note in broken_limits(algo, runtime)]
    notes += [*program.notes, *algo.skipped]
    if text.lstrip().startswith("<?xml"):
        notes.append("msccl-executor-nccl and RCCL cannot read an XML declaration (<?xml ...?>)")
    for inplace, is_allowed in ((True, algo.inplace), (False, algo.outofplace)):
        if is_allowed:
            root = _prove(program, order, inplace, root, notes)
    if root is not None:
        limit = f"runtimes use the file for every root, but it is right only for {root}"
        notes.append(f"the format does not store a root: {limit}")
    most = max(len(gpu.threadblocks) for gpu in algo.gpus)
    steps = sum(len(block.steps) for gpu in algo.gpus for block in gpu.threadblocks)
    counts = len(algo.gpus), algo.channels, algo.chunks, most, steps
    modes, unique = (algo.inplace, algo.outofplace), tuple(dict.fromkeys(notes))
    return MscclReport(algo.name, algo.coll, root, algo.proto, *counts, *modes, slots, unique)


@dataclass
class _MemoryCell:
    """A chunk of a buffer, the step that last wrote it (or -1), and the steps that have read it since then."""

    value: Contributions | None = None
    writer: int = -1
    readers: list[int] = field(default_factory=list)


Key = tuple[int, str, int]  # (GPU, buffer, chunk)


def _sums(values: list[Contributions], added: list[Contributions]) -> list[Contributions]:
    return [value.plus(other) for value, other in zip(values, added, strict=True)]


class _Memory:
    """The buffers of all GPUs during one call, in place or not. Only inputs of the ranks ``sources`` may be read."""

    def __init__(self, program: MscclProgram, inplace: bool, sources: range) -> None:
        self.program, self.inplace, self.sources = program, inplace, sources
        self.coll, chunks = program.algo.coll, program.algo.chunks
        self.ranks = len(program.algo.gpus)
        self.part = chunks // self.ranks
        self.sizes = {
            "i": self.part if self.coll == "allgather" else chunks,
            "o": self.part if self.coll == "reducescatter" else chunks,
        }
        self.cells: defaultdict[Key, _MemoryCell] = defaultdict(_MemoryCell)
        for rank in sources:
            for k in range(self.sizes["i"]):
                chunk = rank * self.part + k if self.coll == "allgather" else k
                self.cells[self.key(rank, "i", k)].value = Contributions(chunk, 1 << rank)

    def key(self, gpu: int, buffer: str, chunk: int) -> Key:
        """Return the key of a chunk of a buffer. A chunk that two buffers share, in place, has one key.

        In place, an all-gather's input is a part of its output, and a reduce-scatter's output a part of its input.
        """
        smaller, larger = ("i", "o") if self.coll == "allgather" else ("o", "i")
        if not self.inplace or buffer != smaller:
            return gpu, buffer, chunk
        return gpu, larger, chunk + (gpu * self.part if self.sizes["i"] != self.sizes["o"] else 0)

    def run(self, order: list[int]) -> None:
        """Run all steps in this order. Raise a ScheduleError for a race or another invalid access to memory."""
        clocks = _Clocks(self.program.steps)
        messages: dict[int, list[Contributions]] = {}
        for number in order:
            step = self.program.steps[number]
            start, arrived = clocks.run(number)
            kind = step.xml.type
            reads = self._span(step, step.xml.src) if kind in READS else []
            writes = self._span(step, step.xml.dst) if kind in WRITES else []
            if reads and writes and reads != writes and not set(reads).isdisjoint(writes):
                raise self.program.error(step, "src and dst overlap, but are not the same.")
            values = messages.pop(step.sender, [])
            if reads:
                local = [self._read(number, key, start) for key in reads]
                values = _sums(values, local) if kind in RECEIVES else local
            if kind == "re":
                values = _sums([self._read(number, key, start) for key in writes], values)
            if writes:
                for key, value in zip(writes, values, strict=True):
                    self._write(number, key, value, arrived)
            if kind in SENDS:
                messages[number] = values

    def _span(self, step: RuntimeStep, span: Location) -> list[Key]:
        """Return the keys of the chunks of a step's source or destination."""
        gpu = self.program.algo.gpus[step.gpu]
        size = min(self.sizes.get(span.buffer, gpu.sizes["s"]), gpu.sizes[span.buffer])
        if span.offset < 0 or span.offset + step.count > size:
            chunks = f"chunks {span.offset} to {span.offset + step.count - 1} of the {BUFFERS[span.buffer]} buffer"
            raise self.program.error(step, f"accesses {chunks}, which has {size} chunks.")
        return [self.key(step.gpu, span.buffer, span.offset + k) for k in range(step.count)]

    def _read(self, number: int, key: Key, done: int) -> Contributions:
        """Return the value that step ``number`` reads. ``done`` has the bits of the steps that precede this access."""
        cell = self.cells[key]
        if cell.value is None:
            text = f"reads {self._describe(key)}, which was never written."
            raise self.program.error(self.program.steps[number], text)
        if cell.writer >= 0 and not done >> cell.writer & 1:
            raise self._race(number, "reads", key, cell.writer, "writes")
        cell.readers.append(number)
        return cell.value

    def _write(self, number: int, key: Key, value: Contributions, done: int) -> None:
        """Store a value that step ``number`` writes. ``done`` has the bits of the steps that precede this access."""
        cell = self.cells[key]
        if cell.writer >= 0 and not done >> cell.writer & 1:
            raise self._race(number, "writes", key, cell.writer, "writes")
        for reader in cell.readers:
            if reader != number and not done >> reader & 1:
                raise self._race(number, "writes", key, reader, "reads")
        cell.value, cell.writer = value, number
        cell.readers.clear()

    def _race(self, number: int, does: str, key: Key, other: int, did: str) -> ScheduleError:
        """Return the error for an access ("reads" or "writes") of a step that races with one of step ``other``."""
        step, far = self.program.steps[number], self.program.steps[other]
        earlier = f"tb {far.block}, step {far.number} ({far.xml.type}) {did}"
        text = f"a race. It {does} {self._describe(key)}, which {earlier}, and the two are not ordered."
        return self.program.error(step, text)

    def _describe(self, key: Key) -> str:
        mode = "in place" if self.inplace else "out of place"
        return f"chunk {key[2]} of the {BUFFERS[key[1]]} buffer ({mode})"

    def first_result(self, rank: int) -> Contributions | None:
        """Return the value in the first chunk of a rank's output."""
        return self.cells[self.key(rank, "o", 0)].value

    def fault(self, rank: int) -> str | None:
        """Return the fault of a rank's output at the end, in words, or ``None`` if it is right."""
        for k in range(self.sizes["o"]):
            key = self.key(rank, "o", k)
            cell = self.cells[key]
            due = right_result(self.coll, rank, k, self.part, self.ranks, self.sources[0])
            fault = difference(cell.value, due, "chunk")
            if fault is not None:
                place = f"{self.program.name}, gpu {rank}"
                if cell.writer >= 0:
                    far = self.program.steps[cell.writer]
                    place += f", tb {far.block}, step {far.number} ({far.xml.type})"
                return f"{place}: at the end {self._describe(key)} {fault}."
        return None


class _Clocks:
    """The steps that are certainly done at each moment, as sets of bits: bit k stands for step k."""

    def __init__(self, steps: list[RuntimeStep]) -> None:
        self.steps = steps
        # For each step on which later steps depend: the steps that are done when it begins to send, and when it ends.
        self.past: dict[int, tuple[int, int]] = {}
        self.uses = Counter(other for step in steps for other in (step.previous, *step.waits, step.sender))

    def run(self, number: int) -> tuple[int, int]:
        """Return the steps that are done when step ``number`` starts, and when the message that it receives arrives."""
        step = self.steps[number]
        start = 0
        for other in (step.previous, *step.waits):
            start |= self._use(other)[1]
        begun, over = self._use(step.sender)
        arrived = start | begun
        if self.uses[number]:
            self.past[number] = arrived, arrived | over | 1 << number
        return start, arrived

    def _use(self, other: int) -> tuple[int, int]:
        """Return the entry of ``past`` for a step, and delete it after its last use. Step -1 stands for no step."""
        if other < 0:
            return 0, 0
        self.uses[other] -= 1
        return self.past[other] if self.uses[other] else self.past.pop(other)


def _prove(program: MscclProgram, order: list[int], inplace: bool, root: int | None, notes: list[str]) -> int | None:
    """Prove that the steps leave the right result in calls in place or out of place. Return the collective's root."""

    def run(sources: range) -> _Memory:
        memory = _Memory(program, inplace, sources)
        memory.run(order)
        return memory

    coll = program.algo.coll
    root = prove_results(program.name, coll, range(len(program.algo.gpus)), root, run)
    if inplace:
        return root
    for step in program.steps:
        spans = [s for s, types in ((step.xml.src, READS), (step.xml.dst, WRITES)) if step.xml.type in types]
        if coll == "reduce" and step.gpu != root and any(span.buffer == "o" for span in spans):
            raise program.error(step, f"uses the output buffer, which only the root {root} has.")
        if step.xml.type in WRITES and step.xml.dst.buffer == "i":
            place = f"gpu {step.gpu}, tb {step.block}, step {step.number}"
            notes.append(f"{place} writes the input of an out-of-place call")
    return root
