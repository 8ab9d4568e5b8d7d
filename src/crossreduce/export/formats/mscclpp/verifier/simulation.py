"""Run the operations of an MSCCL++ plan on symbolic memory, several calls in a row, for messages of one size.

Input: a ``MscclppPlan``, the bytes of a chunk, and the ranks whose input may be read. Output: the fault of each rank's
output. A ScheduleError is raised for a deadlock, a race, an unpaired signal, and a read of memory without a value.

One execution is run, call by call. Two accesses to the same bytes race if one of them writes and they are not ordered
(see ``clocks.py``). Without races, and since signals and semaphores only count, every execution gives the same result.
Between two calls, the user of a GPU reads its output and writes its next input. So another GPU may only access these
buffers after the call has begun, and the call must not end before all such accesses are over. Kernels of one GPU run
one after the other. Other GPUs may be in an earlier or later call.

Source: src/core/executor/executor.cc (launches, flags) and src/core/include/execution_kernel.hpp (handlers) in
github.com/microsoft/mscclpp.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from itertools import count

from .....errors import ScheduleError
from ...proof import Contributions
from ..format import MscclppPlan
from ..layout import PlanLayout, Range
from .buffers import Buffers
from .clocks import NOTHING, AccessRecord, BlockClock, Clock, one_thread
from .data_moves import Move
from .instructions import ChannelEnd, PlanInstruction, instructions
from .memory import Cell, Piece
from .pairing import check_pairs, direction
from .synchronisation import Channel, Semaphore

_MOST_WAITS = 8  # that the error for a deadlock lists


class PlanRun:
    """Several calls of a plan. ``flushes``: whether the operation ``flush`` waits. In the executor it does not."""

    def __init__(self, plan: MscclppPlan, chunk: int, sources: range, *, flushes: bool = True) -> None:
        self.plan, self.flushes = plan, flushes
        layouts = [PlanLayout(plan, chunk, half) for half in ((0, 1) if plan.double else (0,))]
        self.lists = [instructions(plan, layout) for layout in layouts]
        moves = [i.move for lists in self.lists for listed in lists for i in listed if i.move is not None]
        self.buffers = Buffers(plan, layouts[0], sources, moves)
        self.pieces = self.buffers.memory.pieces
        self.places = [(rank, t) for rank, gpu in enumerate(plan.gpus) for t in range(len(gpu.threadblocks))]
        self.bits = count()
        self.blocks = [BlockClock(number, self.bits) for number in range(len(self.places))]
        self.of_rank = [[n for n, place in enumerate(self.places) if place[0] == r] for r in range(len(plan.gpus))]
        self.notes: list[str] = []  # doubts, for which the plan is not refused
        self.faults: list[str | None] = [None] * len(plan.gpus)
        self.channels: dict[ChannelEnd, Channel] = {}
        self.semaphores = {
            (rank, number): Semaphore(f"semaphore {number}", plan.gpus[rank].semaphores[number], releasers)
            for (rank, number), releasers in check_pairs(self.buffers.name, self.places, self.lists[0]).items()
        }

    def run(self) -> PlanRun:
        """Run the calls, and return this run."""
        for call in range(1, 2 + len(self.lists)):  # with two scratch buffers, calls 1 and 3 use the same buffer
            self.buffers.call = call
            for rank in range(len(self.plan.gpus)):
                self._begin(rank)
            self._run_call(self.lists[(call - 1) % len(self.lists)])
            for block in self.blocks:
                block.sync()
            for rank in range(len(self.plan.gpus)):
                self.faults[rank] = self.faults[rank] or self._output_fault(rank)
        return self

    def first_result(self, rank: int) -> Contributions | None:
        """Return the value at the start of a rank's output after the last call."""
        return self.buffers.output(rank)[0].value

    def fault(self, rank: int) -> str | None:
        """Return the fault of a rank's output after the first call with a wrong output, or ``None``."""
        return self.faults[rank]

    def _rank_clock(self, rank: int) -> Clock:
        """Return the clock of a GPU when all its threadblocks have ended."""
        clock = NOTHING
        for number in self.of_rank[rank]:
            clock = clock.union(self.blocks[number].known)
        return clock

    def _begin(self, rank: int) -> None:
        """Let the user of a GPU read the last output and write the next input, and begin the kernel of the call."""
        clock = self._rank_clock(rank)
        user = AccessRecord(next(self.bits), -1, one_thread(-1), f"the user of gpu {rank} between two calls")
        for name in self.buffers.user_areas:
            for cell in self.buffers.memory.cells[rank, name]:
                for record in cell.readers:
                    if not clock.ended >> record.bit & 1:
                        raise self.buffers.late_access(record.text, "reads", cell)
                if cell.writer is not None and not clock.visible >> cell.writer.bit & 1:
                    raise self._late_write(cell, cell.writer, clock)
                cell.readers, cell.writer, cell.received, cell.packets = [], user, False, 0
                cell.value = self.buffers.input_value(cell)
        for number in self.of_rank[rank]:
            self.blocks[number].begin(clock.union(Clock(1 << user.bit, 1 << user.bit)))
        for (of, _), semaphore in self.semaphores.items():
            if of == rank:
                semaphore.begin()

    def _output_fault(self, rank: int) -> str | None:
        """Return the fault of a rank's output at the end of a call, in words, or ``None`` if it is right."""
        clock = self._rank_clock(rank)
        for cell in self.buffers.output(rank):
            fault = self.buffers.output_fault(cell)
            if fault is None and cell.writer is not None and not clock.visible >> cell.writer.bit & 1:
                fault = str(self._late_write(cell, cell.writer, clock))
            if fault is not None:
                return fault
        return None

    def _late_write(self, cell: Cell, writer: AccessRecord, clock: Clock) -> ScheduleError:
        """Return an error about a write that may not be visible when its call ends."""
        error = self.buffers.late_access(writer.text, "writes", cell)
        hint = " (relaxed signals do not make data visible)" if clock.ended >> writer.bit & 1 else ""
        return ScheduleError(f"{str(error).removesuffix('.')}{hint}.")

    def _run_call(self, lists: list[list[PlanInstruction]]) -> None:
        """Run all instructions of a call. Raise a ScheduleError if there is a deadlock."""
        at = [0] * len(lists)  # the position of the next instruction of each threadblock
        waiting: defaultdict[Hashable, list[int]] = defaultdict(list)  # threadblocks, by what they wait for
        meeting: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # threadblocks that wait at a barrier
        ready = OrderedDict.fromkeys(range(len(lists)))  # threadblocks whose next instruction may be able to run
        while ready:
            number, _ = ready.popitem(last=False)
            while at[number] < len(lists[number]):
                instruction = lists[number][at[number]]
                if instruction.kind == "barrier":
                    key = self.places[number][0], instruction.number
                    meeting[key].append(number)
                    if len(meeting[key]) < instruction.meeting:
                        break
                    self._meet(meeting[key])
                    for other in meeting.pop(key):
                        at[other] += 1
                        if other != number:
                            ready[other] = None
                    continue
                missing = self._awaited(number, instruction)
                if missing is not None:
                    waiting[missing].append(number)
                    break
                completed: list[Hashable] = []
                self._execute(number, instruction, completed)
                at[number] += 1
                for event in completed:
                    ready.update(dict.fromkeys(waiting.pop(event, ())))
        stuck = [number for number, listed in enumerate(lists) if at[number] < len(listed)]
        if stuck:
            texts = [self._wait_text(number, lists[number][at[number]]) for number in stuck[:_MOST_WAITS]]
            more = [] if len(stuck) <= _MOST_WAITS else [f"... ({len(stuck)} threadblocks wait)"]
            raise ScheduleError(f"{self.buffers.name}: a deadlock. {'; '.join(texts + more)}.")

    def _awaited(self, number: int, instruction: PlanInstruction) -> Hashable | None:
        """Return the channel direction, semaphore or cell for which an instruction waits, or ``None`` if it can run."""
        if instruction.kind == "wait":
            channel = self.channel(instruction)
            return None if channel.received < len(channel.sent) else direction(instruction)
        if instruction.kind == "acquire":
            key = self.places[number][0], instruction.number
            return None if self.semaphores[key].is_free else key
        if instruction.kind == "move" and instruction.move is not None:
            return self._unread(instruction.move)
        return None

    def _unread(self, move: Move) -> Cell | None:
        """Return a cell that a move reads and whose packets have not arrived, or ``None``."""
        if all(place.scale == 1 for place in move.srcs):
            return None
        for srcs, _ in self.pieces[move]:
            for place, cell in zip(move.srcs, srcs, strict=True):
                if place.scale == 2 and cell.packets != self.buffers.call:
                    return cell
        return None

    def _wait_text(self, number: int, instruction: PlanInstruction) -> str:
        """Return in words what an instruction of threadblock ``number`` waits for."""
        where = self._text(number, instruction)
        if instruction.kind == "wait":
            return f"{where} waits for a signal on {self.channel(instruction).name}"
        if instruction.kind == "acquire":
            return f"{where} waits for a release of semaphore {instruction.number}"
        cell = None if instruction.move is None else self._unread(instruction.move)
        if cell is not None:
            return f"{where} waits for packets in {self.buffers.describe(cell)}"
        return f"{where} waits for other threadblocks"

    def _text(self, number: int, instruction: PlanInstruction) -> str:
        rank, block = self.places[number]
        return f"gpu {rank}, tb {block}, {instruction.operation}"

    def channel(self, instruction: PlanInstruction) -> Channel:
        """Return the channel direction in which an instruction signals or waits."""
        end = direction(instruction)
        if end not in self.channels:
            kind, src, dst, number = end
            name = f"{kind} channel {number} from gpu {src} to gpu {dst}"
            self.channels[end] = Channel(name, kind == "port", self.notes)
        return self.channels[end]

    def _meet(self, numbers: list[int]) -> None:
        """Let threadblocks of a GPU wait for each other."""
        clock = NOTHING
        for number in numbers:
            self.blocks[number].sync()
            clock = clock.union(self.blocks[number].known)
        for number in numbers:
            self.blocks[number].known = clock

    def _execute(self, number: int, instruction: PlanInstruction, completed: list[Hashable]) -> None:
        """Run an instruction, and add to ``completed`` what other threadblocks may wait for: see ``_awaited``."""
        block, kind = self.blocks[number], instruction.kind
        text, thread = self._text(number, instruction), instruction.thread
        named = f"{self.buffers.name}, {text}"
        if kind == "sync":
            block.sync()
        elif kind in ("move", "post"):
            _MoveRun(self, block, instruction, text).run(completed)
        elif kind in ("acquire", "release"):
            key = self.places[number][0], instruction.number
            if kind == "acquire":
                self.semaphores[key].acquire(block, thread, named)
            else:
                self.semaphores[key].release(block, thread, text)
                completed.append(key)
        elif kind in ("flush", "complete"):
            if self.flushes or kind == "complete":
                self.channel(instruction).flush(block, thread)
        elif kind == "signal":
            self.channel(instruction).signal(block, thread, named, relaxed=instruction.relaxed)
            completed.append(direction(instruction))
        else:
            assert kind == "wait"
            self.channel(instruction).wait(block, thread, named, relaxed=instruction.relaxed)


class _MoveRun:
    """A move that the threads of a threadblock make, or that a port channel makes after it was posted.

    When packets with an element have arrived, the accesses to this element in all operands are over. So each piece of a
    move that writes packets has a separate bit, which its packets pass on.
    """

    def __init__(self, run: PlanRun, block: BlockClock, instruction: PlanInstruction, text: str) -> None:
        assert instruction.move is not None
        self.buffers, self.block, self.move, self.text = run.buffers, block, instruction.move, text
        self.threads = run.plan.threads
        self.pieces: list[Piece] = run.pieces[self.move]
        self.is_post = instruction.kind == "post"
        self.separate = self.is_post or any(place.scale == 2 for place in self.move.dsts)
        self.bits = [next(run.bits) if self.separate else block.bit for _ in self.pieces]
        mask = sum(1 << bit for bit in self.bits) if self.separate else 1 << block.bit
        if self.is_post:
            self.clock = run.channel(instruction).post(block, instruction.thread, text, mask)
        else:
            self.clock = block.known
            block.unsynced |= mask

    def run(self, completed: list[Hashable]) -> None:
        """Read, combine and write all pieces. Add cells with new packets to ``completed``."""
        arrived = NOTHING
        for bit, (sources, targets) in zip(self.bits, self.pieces, strict=True):
            value, packets, got = None, 0, NOTHING
            for place, cell in zip(self.move.srcs, sources, strict=True):
                record = self._record(place, bit)
                if place.scale == 1:
                    self._check_read(cell, record)
                    packets = cell.packets if len(sources) == 1 else 0  # a copy of packets has their flags
                if cell.packets:
                    cell.received, got = True, got.union(cell.sent)
                cell.readers.append(record)
                assert cell.value is not None
                value = cell.value if value is None else value.plus(cell.value)
            arrived = arrived.union(got)
            known = self.clock.union(got)
            for place, cell in zip(self.move.dsts, targets, strict=True):
                record = self._record(place, bit)
                self._check_write(cell, record, known)
                cell.value, cell.writer, cell.readers, cell.received = value, record, [], False
                cell.packets = self.buffers.call if place.scale == 2 else packets
                if cell.packets:
                    cell.sent = Clock(known.ended | 1 << bit, self.block.start)
                    completed.append(cell)
        if not self.is_post:
            self.block.arrived = self.block.arrived.union(arrived)

    def _record(self, place: Range, bit: int) -> AccessRecord:
        """Return the record of a piece's accesses to a range. Thread k accesses the words k, k + ``threads``, ..."""
        if self.is_post:
            return AccessRecord(bit, -1, one_thread(-1), self.text)
        step = self.move.word * place.scale
        return AccessRecord(bit, self.block.number, (step, place.start % (step * self.threads)), self.text)

    def _check_read(self, cell: Cell, record: AccessRecord) -> None:
        """Raise a ScheduleError unless the cell has data that is visible to the reading threads."""
        if cell.value is None:
            raise self._error(f"reads {self.buffers.describe(cell)}, which was never written.")
        if cell.packets and len(self.move.srcs) > 1:
            raise self._error(f"reads packets in {self.buffers.describe(cell)} as data.")
        if cell.writer is None or self._is_after(cell.writer, self.clock.visible, record):
            return
        # Coherence: after a thread has read a value, later reads do not return an older one.
        if not any(self._is_after(reader, self.clock.ended, record) for reader in cell.readers):
            raise self._race("reads", cell, cell.writer, "writes")

    def _check_write(self, cell: Cell, record: AccessRecord, known: Clock) -> None:
        """Raise a ScheduleError unless ``known``, the clock of the writing threads, has all accesses to the cell."""
        for reader in cell.readers:
            if not self._is_after(reader, known.ended, record):
                raise self._race("writes", cell, reader, "reads")
        if cell.packets == self.buffers.call and not cell.received:
            text = f"writes {self.buffers.describe(cell)}, whose packets of this call may not have been read."
            raise self._error(f"a race. It {text}")
        # Packets that were read had arrived, so their writer has ended.
        if cell.writer is not None and not cell.received and not self._is_after(cell.writer, known.visible, record):
            raise self._race("writes", cell, cell.writer, "writes")

    def _is_after(self, earlier: AccessRecord, known: int, record: AccessRecord) -> bool:
        if self.is_post:
            return bool(known >> earlier.bit & 1) or earlier.bit == record.bit
        return self.block.is_after(earlier, known, record.threads)

    def _race(self, does: str, cell: Cell, other: AccessRecord, did: str) -> ScheduleError:
        """Return the error for an access ("reads" or "writes") that races with another one."""
        text = f"It {does} {self.buffers.describe(cell)}, which {other.text} {did}, and the two are not ordered"
        relaxed = did == "writes" and self.clock.ended >> other.bit & 1
        return self._error(f"a race. {text}{' (relaxed signals do not make data visible)' if relaxed else ''}.")

    def _error(self, text: str) -> ScheduleError:
        return ScheduleError(f"{self.buffers.name}, {self.text}: {text}")
