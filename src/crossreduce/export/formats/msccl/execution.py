"""The steps of an MSCCL XML file as the runtimes run them, and a proof that all of them end.

Input: an ``Algo`` as read from a file. Output: an ``MscclProgram``, and an order in which its steps can run.
ScheduleError if there is none, for example because a connection has only one end or the steps have a deadlock.

- A ``nop`` only carries a dependency, which the next step of another type waits for. A step with ``hasdep`` signals
  when it is done. The first such signal at or after step k satisfies a dependency on step k. Adjacent ``re`` steps
  (local reductions) with the same destination and source buffer run as one step if no wait or signal is between them.
- The k-th send of a connection (source, destination, channel) is received by the k-th receive of the connection. A
  connection has a few slots for messages that are not yet received, and a send waits for a free slot. A step of many
  chunks may need several slots.

Source: the parsers and interpreters in github.com/Azure/msccl-executor-nccl (src/misc/msccl/msccl_parser.cc,
src/device/msccl_kernel.cu) and github.com/ROCm/rccl (src/device/msccl_kernel_impl.h).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Final

from ....errors import ScheduleError
from ..collective import Location
from ..proof import TooLargeError, quoted_name
from .format import LARGEST_COUNT, RECEIVES, SENDS, Algo, Threadblock, XmlStep

# The number of slots of a connection. NCCL_STEPS is 8. A send takes one of them under LL and LL128, and 4 under Simple
# (MSCCL_CHUNKSTEPS is NCCL_STEPS / 2).
SLOTS: Final = {"Simple": 2, "LL": 8, "LL128": 8}
# Bytes of a slot. A larger chunk is sent in slices, several smaller ones in one message. The values are those of the
# smallest default buffers of NCCL and RCCL (init.cc, devcomm.h): 1 MiB / 2 (Simple, on Arm), RCCL's 256 threads x 8
# lines x 8 bytes (LL) and 256 x 28 x 8 x 7/8 (LL128).
SLOT_BYTES: Final = {"Simple": 1 << 19, "LL": 1 << 14, "LL128": 50_176}
MOST_FUSED: Final = 16  # the runtimes' MSCCL_MAX_REDUCE_FUSION
# Larger files are not verified: at these limits it takes minutes and 1 GB. The runtimes' own limits are far lower.
MOST_STEPS: Final = 1 << 16
MOST_WORK: Final = 20_000_000
_MOST_WAITS: Final = 32  # that the error for a deadlock lists

ThreadblockId = tuple[int, int]  # a GPU and the number of one of its threadblocks
Connection = tuple[int, int, int]  # the sending GPU, the receiving GPU and the channel


@dataclass
class RuntimeStep:
    """A step other than ``nop``. Fields after ``count`` are positions in ``MscclProgram.steps``; -1 stands for none."""

    gpu: int
    block: int
    number: int  # the step's number in the file
    xml: XmlStep
    count: int  # the number of chunks that the runtimes move
    waits: list[int]  # the steps whose signals it waits for
    previous: int  # the previous step of the threadblock
    sender: int = -1  # the step whose message this one receives
    receiver: int = -1  # the step that receives the message of this one

    @property
    def threadblock(self) -> ThreadblockId:
        return self.gpu, self.block

    def __str__(self) -> str:
        return f"gpu {self.gpu}, tb {self.block}, step {self.number} ({self.xml.type})"


def too_large(steps: int, work: int) -> str:
    """Return the reason why a file is too large to be verified, or "" if it is not.

    ``steps`` is its number of steps, and ``work`` the number of chunks in its buffers and steps together.
    """
    if steps > MOST_STEPS:
        return f"at most {MOST_STEPS} steps are verified, the file needs {steps}"
    if work > MOST_WORK:
        return f"at most {MOST_WORK} chunks in buffers and steps are verified, the file has {work}"
    return ""


class MscclProgram:
    """All steps of a file, with their dependencies and messages. A ScheduleError is raised if these do not match."""

    def __init__(self, algo: Algo) -> None:
        self.algo = algo
        self.name = f"algo {quoted_name(algo.name)}"
        self.steps: list[RuntimeStep] = []
        self.blocks: dict[ThreadblockId, range] = {}
        self.notes: list[str] = []
        parsers = {
            (g, t): _ThreadblockParser(self, g, t, block)
            for g, gpu in enumerate(algo.gpus)
            for t, block in enumerate(gpu.threadblocks)
        }
        work = 2 * len(algo.gpus) * algo.chunks + sum(step.count for step in self.steps)
        if too_large(len(self.steps), work):
            problem = f"{self.name}: the file is too large to be verified."
            given = f"{len(self.steps)} steps, {work} chunks in the buffers and steps"
            raise TooLargeError.of(problem, given, f"up to {MOST_STEPS} steps, {MOST_WORK} chunks")
        for parser in parsers.values():
            for step, targets in zip(parser.steps, parser.waits, strict=True):
                for block_number, number in targets:
                    step.waits.append(self._signal(step, block_number, number, parsers.get((step.gpu, block_number))))
        self._connect()

    def error(self, step: RuntimeStep, text: str) -> ScheduleError:
        return ScheduleError(f"{self.name}, {step}: {text}")

    def _signal(self, step: RuntimeStep, block: int, number: int, parser: _ThreadblockParser | None) -> int:
        """Return the step whose signal satisfies a dependency on step ``number`` of the threadblock of ``parser``."""
        if parser is None:
            raise self.error(step, f"waits for tb {block}, which gpu {step.gpu} does not have.")
        position = bisect_left(parser.signals, (number, 0))  # the counters increase
        if position < len(parser.signals):
            return parser.signals[position][1]
        reason = "no step of that threadblock signals from there on (none has hasdep=1), so it would wait forever"
        raise self.error(step, f"waits for tb {block}, step {number}, but {reason}.")

    def _connect(self) -> None:
        """Pair each connection's sends with its receives, in order. Raise a ScheduleError if they do not match."""
        # For each connection and each end ("send", "recv"): the threadblock at this end, and its steps.
        connections: defaultdict[Connection, dict[str, tuple[int, list[int]]]] = defaultdict(dict)
        for (g, t), run in self.blocks.items():
            block = self.algo.gpus[g].threadblocks[t]
            here = f"{self.name}, gpu {g}, tb {t}"
            if max(block.send, block.recv) >= 0 and not 0 <= block.channel < self.algo.channels:
                raise ScheduleError(f"{here}: channel {block.channel} does not exist, nchannels={self.algo.channels}.")
            for end, peer, types, pair in (
                ("send", block.send, SENDS, (g, block.send)),
                ("recv", block.recv, RECEIVES, (block.recv, g)),
            ):
                if peer < 0:
                    continue
                connection_ends = connections[*pair, block.channel]
                if end in connection_ends:
                    same = f"tb {connection_ends[end][0]} has the same {end} peer {peer} on channel {block.channel}"
                    raise ScheduleError(f"{here}: {same}, but a connection's end belongs to one threadblock.")
                connection_ends[end] = t, [number for number in run if self.steps[number].xml.type in types]
        for (src, dst, channel), ends in connections.items():
            for end, gpu, missing in (("send", src, f"gpu {dst} receives from"), ("recv", dst, f"gpu {src} sends to")):
                if [*ends] == [end]:
                    problem = f"no threadblock of {missing} gpu {gpu} on channel {channel}."
                    raise ScheduleError(f"{self.name}, gpu {gpu}, tb {ends[end][0]}: {problem}")
            (t, sends), (u, receives) = ends["send"], ends["recv"]
            if len(sends) != len(receives):
                text = f"gpu {src}, tb {t}: sends {len(sends)} times to gpu {dst} on channel {channel}"
                raise ScheduleError(f"{self.name}, {text}, where tb {u} receives {len(receives)} times.")
            for send, recv in zip(sends, receives, strict=True):
                sent, received = self.steps[send], self.steps[recv]
                if sent.count != received.count:
                    text = f"sends {sent.count} chunks, but {received} receives {received.count} chunks."
                    raise self.error(sent, text)
                sent.receiver, received.sender = recv, send


class _ThreadblockParser:
    """Converts the elements of one threadblock to steps in the same way as the runtimes' parsers."""

    def __init__(self, program: MscclProgram, gpu: int, number: int, block: Threadblock) -> None:
        self.program, self.gpu, self.block = program, gpu, number
        self.steps: list[RuntimeStep] = []
        self.waits: list[list[tuple[int, int]]] = []  # for each step: the (threadblock, step) pairs that it waits for
        self.signals: list[tuple[int, int]] = []  # (counter value that a step signals, its position in the program)
        first = len(program.steps)
        self._parse(block)
        program.blocks[gpu, number] = range(first, len(program.steps))

    def _parse(self, block: Threadblock) -> None:
        """Add the steps to the program."""
        pending: list[tuple[int, int]] = []
        # The destination and source buffer with which the next ``re`` would run as one step with the ``re`` before it.
        chain: tuple[Location, str] | None = None
        fused: list[RuntimeStep] = []
        counter = 0  # the runtimes' number of the step, which does not count nops that wait for nothing
        reductions = 0
        for number, xml in enumerate(block.steps):
            if xml.threadblock >= 0:
                pending.append((xml.threadblock, xml.step))
            if xml.type == "nop":
                continue
            here = len(self.program.steps)
            step = RuntimeStep(self.gpu, self.block, number, xml, xml.chunks, [], here - 1 if self.steps else -1)
            if xml.type == "re" and chain == (xml.dst, xml.src.buffer) and xml.threadblock < 0:
                fused.append(step)
                self.waits.append([])
                self._fuse(number, fused)
            else:
                if pending and xml.threadblock < 0:
                    refusal = "msccl-executor-nccl and RCCL refuse the file: after a nop that waits, it must wait, too"
                    self._note(number, refusal)
                fused = [step]
                self.waits.append(pending)
                counter += max(len(pending) - 1, 0)
                pending = []
            reductions += xml.type == "re"
            ends_chain = xml.type != "re" or xml.signals or reductions == MOST_FUSED
            chain = None if ends_chain else (xml.dst, xml.src.buffer)
            if xml.signals:
                self.signals.append((counter, here))
                if counter != number:
                    self._note(number, f"the runtimes count it as step {counter}: a nop before it waits for nothing")
            counter += 1
            self.steps.append(step)
            self.program.steps.append(step)

    def _fuse(self, number: int, fused: list[RuntimeStep]) -> None:
        """Give all steps that run as one the count of the last one, as the runtimes do, and note faults."""
        count = fused[-1].count
        if any(step.count != count for step in fused):
            self._note(number, "the runtimes fuse it with the re steps before it, and use its cnt for all of them")
        for step in fused:
            step.count = count
        if len(fused) == MOST_FUSED + 1:
            self._note(number, f"the runtimes fuse more than {MOST_FUSED} re here, and write beyond their list")

    def _note(self, number: int, text: str) -> None:
        self.program.notes.append(f"gpu {self.gpu}, tb {self.block}, step {number}: {text}")


def chunks_per_slot(algo: Algo) -> int:
    """Return how many chunks of a message fit into a slot if the buffer has ``max_bytes`` bytes, but at least 1."""
    if not algo.max_bytes:
        return 1
    chunk = -(-algo.max_bytes // algo.chunks)
    return max(1, min(LARGEST_COUNT, SLOT_BYTES[algo.proto] // chunk))


class Execution:
    """One execution of a program's steps that respects all waits.

    A connection has ``slots`` slots, each for a part of a message: up to ``per_slot`` chunks. Steps depend on other
    threadblocks only through counts that never decrease. So if one execution ends, every execution does.
    """

    def __init__(self, program: MscclProgram, slots: int, per_slot: int) -> None:
        self.program, self.slots, self.per_slot = program, slots, per_slot
        self.current = {threadblock: run.start for threadblock, run in program.blocks.items()}
        self.done = [False] * len(program.steps)
        self.passed = [0] * len(program.steps)  # for each step, the parts of its message that it has sent or received
        self.used: Counter[ThreadblockId] = Counter()  # slots in use of each threadblock's outgoing connection
        self.ready = OrderedDict.fromkeys(program.blocks)  # a queue of threadblocks whose next step may be able to run

    def order(self) -> list[int]:
        """Return all steps in an order in which they can run. Raise a ScheduleError if they have a deadlock."""
        order: list[int] = []
        waiting: defaultdict[int, list[ThreadblockId]] = defaultdict(list)
        while self.ready:
            threadblock, _ = self.ready.popitem(last=False)
            while self.current[threadblock] < self.program.blocks[threadblock].stop:
                number = self.current[threadblock]
                target = self._waits_for(number)
                if target >= 0:
                    waiting[target].append(threadblock)
                    break
                if not self._transmit(number):
                    break
                self.done[number] = True
                order.append(number)
                self.current[threadblock] += 1
                self.ready.update(dict.fromkeys(waiting.pop(number, ())))
        if len(order) < len(self.program.steps):
            raise ScheduleError(f"{self.program.name}: a deadlock. {self._wait_cycle()}")
        return order

    def _waits_for(self, number: int) -> int:
        """Return the first step that step ``number`` waits for and that is not done, or -1 if there is none."""
        return next((target for target in self.program.steps[number].waits if not self.done[target]), -1)

    def _transmit(self, number: int) -> bool:
        """Receive and send the parts of a step's message that can be moved now. Return whether the step is done."""
        steps = self.program.steps
        step = steps[number]
        parts = -(-step.count // self.per_slot)
        movable = parts - self.passed[number]
        if step.sender >= 0:
            movable = min(movable, self.passed[step.sender] - self.passed[number])
        if step.receiver >= 0:
            movable = min(movable, self.slots - self.used[step.threadblock])
        self.passed[number] += movable
        if movable and step.sender >= 0:
            self.used[steps[step.sender].threadblock] -= movable
            self.ready[steps[step.sender].threadblock] = None
        if movable and step.receiver >= 0:
            self.used[step.threadblock] += movable
            self.ready[steps[step.receiver].threadblock] = None
        return self.passed[number] == parts

    def _wait_cycle(self) -> str:
        """Return a description of threadblocks that wait for each other in a cycle."""
        steps = self.program.steps
        blocks = self.program.blocks
        threadblock = next(key for key, run in blocks.items() if self.current[key] < run.stop)
        seen: dict[ThreadblockId, str] = {}
        while threadblock not in seen:
            number = self.current[threadblock]
            step, target = steps[number], self._waits_for(number)
            if target >= 0:
                reason = f"waits for tb {steps[target].block}, step {steps[target].number}"
            elif step.sender >= 0 and self.passed[step.sender] == self.passed[number]:
                target = step.sender
                reason = f"waits for the message of {steps[target]}"
            else:
                target = step.receiver
                reason = f"waits for one of {self.slots} slots to gpu {steps[target].gpu}, tb {steps[target].block}"
            seen[threadblock] = f"{step} {reason}"
            threadblock = steps[target].threadblock
        cycle = list(seen)
        waits = [seen[key] for key in cycle[cycle.index(threadblock) :]]
        more = [] if len(waits) <= _MOST_WAITS else [f"... ({len(waits)} waits in all)"]
        return "; ".join(waits[:_MOST_WAITS] + more) + "."
