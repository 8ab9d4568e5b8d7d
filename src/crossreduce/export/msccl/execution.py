"""What the threadblocks of an MSCCL XML file do, and whether all of them come to an end.

In: an ``Algo`` as read.  Out: a ``Program``, whose moves are the steps as the runtimes run them, and an order in
which they can be done; or ScheduleError for a connection with one end, a dependency that nothing meets, a deadlock.

- A ``nop``'s dependency is waited for by the next real step. A step with ``hasdep`` signals when it is done; a
  dependency on step k is met by the first such signal at or after k. ``re`` steps in a row on one destination run
  as one.
- The k-th send of a connection (source, destination, channel) meets its k-th receive. A send waits for one of a
  few slots; a step of many chunks may need several.

Source: the parsers and interpreters in github.com/Azure/msccl-executor-nccl (src/misc/msccl/msccl_parser.cc,
src/device/msccl_kernel.cu) and github.com/ROCm/rccl (src/device/msccl_kernel_impl.h).
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Final

from ...errors import ScheduleError, message
from .format import LARGEST_COUNT, RECEIVES, SENDS, Algo, Span, Threadblock, XmlStep, quoted

# How many sends a connection holds that nobody has received: NCCL_STEPS is 8, and a send takes one of them under
# LL and LL128, 4 under Simple (MSCCL_CHUNKSTEPS is NCCL_STEPS / 2).
SLOTS: Final = {"Simple": 2, "LL": 8, "LL128": 8}
# Bytes of a send: a chunk that is larger goes in slices, smaller ones go together. Of NCCL's and RCCL's default
# buffers (init.cc, devcomm.h) the smallest: 1 MiB / 2 (Simple, on Arm), RCCL's 256 threads x 8 lines x 8 bytes (LL)
# and 256 x 28 x 8 x 7/8 (LL128).
SLOT_BYTES: Final = {"Simple": 1 << 19, "LL": 1 << 14, "LL128": 50_176}
MOST_FUSED: Final = 16  # MSCCL_MAX_REDUCE_FUSION
# A file that asks for more than minutes and 1 GB ends here; the largest that the runtimes take is well below.
MOST_MOVES: Final = 1 << 16
MOST_WORK: Final = 20_000_000

Place = tuple[int, int]  # a GPU and its threadblock


@dataclass
class Move:
    """A step that does something. Other moves are positions in the program's ``moves``; -1: none.

    Args:
      gpu: where.
      block: the threadblock.
      number: the step's, as in the file.
      step: as in the file.
      count: chunks, as the runtimes take it.
      waits: whose signals it waits for.
      last: the same threadblock's move before.
      sender: whose message it receives.
      receiver: who receives the message that it sends.
    """

    gpu: int
    block: int
    number: int
    step: XmlStep
    count: int
    waits: list[int]
    last: int
    sender: int = -1
    receiver: int = -1

    @property
    def place(self) -> Place:
        """The GPU and threadblock."""
        return self.gpu, self.block

    @property
    def words(self) -> str:
        """The move as messages name it."""
        return f"gpu {self.gpu}, tb {self.block}, step {self.number} ({self.step.type})"


class Program:
    """All moves of a file, what they wait for and which of them meet.

    Raises:
      ScheduleError: a dependency that nothing meets, a connection with one end or two owners, a message that is
        received as another number of chunks than were sent.
    """

    def __init__(self, algo: Algo) -> None:
        self.algo = algo
        self.name = f"algo {quoted(algo.name)}"
        self.moves: list[Move] = []
        self.blocks: dict[Place, range] = {}
        self.notes: list[str] = []
        lowered: dict[Place, _Lowering] = {}
        for g, gpu in enumerate(algo.gpus):
            for t, block in enumerate(gpu.threadblocks):
                lowered[g, t] = _Lowering(self, g, t)
                lowered[g, t].run(block)
        work = 2 * len(algo.gpus) * algo.chunks + sum(move.count for move in self.moves)
        if len(self.moves) > MOST_MOVES or work > MOST_WORK:
            problem = f"{self.name}: too large to judge."
            given = f"{len(self.moves)} steps, {work} chunks in the buffers and steps"
            raise ScheduleError(message(problem, given, f"up to {MOST_MOVES} steps, {MOST_WORK} chunks"))
        for lowering in lowered.values():
            for move, targets in zip(lowering.moves, lowering.waits, strict=True):
                for number, step in targets:
                    move.waits.append(self._signal(move, number, step, lowered.get((move.gpu, number))))
        self._connect()

    def at(self, number: int) -> str:
        """Return a move's place in words, for messages."""
        return f"{self.name}, {self.moves[number].words}"

    def _signal(self, move: Move, block: int, step: int, target: _Lowering | None) -> int:
        if target is None:
            raise ScheduleError(f"{self.name}, {move.words}: waits for tb {block}, which gpu {move.gpu} does not have.")
        for count, number in target.signals:
            if count >= step:
                return number
        raise ScheduleError(
            f"{self.name}, {move.words}: waits for tb {block}, step {step}, but that threadblock signals nothing from "
            "there on (no step has hasdep=1), so it would wait for ever."
        )

    def _connect(self) -> None:
        """Pair each connection's sends with its receives, in order."""
        sends: dict[tuple[int, int, int], tuple[int, list[int]]] = {}
        recvs: dict[tuple[int, int, int], tuple[int, list[int]]] = {}
        for (g, t), run in self.blocks.items():
            block = self.algo.gpus[g].threadblocks[t]
            here = f"{self.name}, gpu {g}, tb {t}"
            if max(block.send, block.recv) >= 0 and not 0 <= block.channel < self.algo.channels:
                raise ScheduleError(f"{here}: channel {block.channel} of {self.algo.channels} does not exist.")
            for way, peer, types, ends, key in (
                ("send", block.send, SENDS, sends, (g, block.send, block.channel)),
                ("recv", block.recv, RECEIVES, recvs, (block.recv, g, block.channel)),
            ):
                if peer >= 0 and key in ends:
                    raise ScheduleError(
                        f"{here}: tb {ends[key][0]} has the same {way} peer {peer} on channel {block.channel}, "
                        "but a connection's end belongs to one threadblock."
                    )
                if peer >= 0:
                    ends[key] = t, [number for number in run if self.moves[number].step.type in types]
        for key in {**sends, **recvs}:
            src, dst, channel = key
            if key not in recvs or key not in sends:
                own, other, t = (src, dst, sends[key][0]) if key in sends else (dst, src, recvs[key][0])
                does = "receives from" if own == src else "sends to"
                raise ScheduleError(
                    f"{self.name}, gpu {own}, tb {t}: no threadblock of gpu {other} {does} gpu {own} "
                    f"on channel {channel}."
                )
            (t, out), (u, into) = sends[key], recvs[key]
            if len(out) != len(into):
                raise ScheduleError(
                    f"{self.name}, gpu {src}, tb {t}: sends {len(out)} times to gpu {dst} on channel {channel}, "
                    f"where tb {u} receives {len(into)} times."
                )
            for send, recv in zip(out, into, strict=True):
                if self.moves[send].count != self.moves[recv].count:
                    raise ScheduleError(
                        f"{self.at(send)}: sends {self.moves[send].count} chunks, which meet "
                        f"{self.moves[recv].words} for {self.moves[recv].count}."
                    )
                self.moves[send].receiver, self.moves[recv].sender = recv, send


class _Lowering:
    """One threadblock's steps, turned into moves as the runtimes' parsers do it."""

    def __init__(self, program: Program, gpu: int, block: int) -> None:
        self.program, self.gpu, self.block = program, gpu, block
        self.moves: list[Move] = []
        self.waits: list[list[tuple[int, int]]] = []  # for each move: threadblocks and the steps waited for
        self.signals: list[tuple[int, int]] = []  # how the runtimes count a signalling step, and its move

    def run(self, block: Threadblock) -> None:
        """Add the moves to the program."""
        first = len(self.program.moves)
        pending: list[tuple[int, int]] = []
        chain: tuple[Span, str] | None = None  # what a further ``re`` must be like to run together with the last one
        fused: list[Move] = []
        counter = reductions = 0
        for number, step in enumerate(block.steps):
            if step.threadblock >= 0:
                pending.append((step.threadblock, step.step))
            if step.type == "nop":
                continue
            here = len(self.program.moves)
            move = Move(self.gpu, self.block, number, step, step.chunks, [], here - 1 if self.moves else -1)
            if step.type == "re" and chain == (step.dst, step.src.buffer) and step.threadblock < 0:
                fused.append(move)
                self.waits.append([])
                self._fuse(number, fused)
            else:
                if pending and step.threadblock < 0:
                    self._note(
                        number, "msccl-executor-nccl and RCCL refuse the file: after a waiting nop it must wait too"
                    )
                fused = [move]
                self.waits.append(pending)
                counter += max(len(pending) - 1, 0)
                pending = []
            reductions += step.type == "re"
            ends = step.type != "re" or step.signals or reductions == MOST_FUSED
            chain = None if ends else (step.dst, step.src.buffer)
            if step.signals:
                self.signals.append((counter, here))
                if counter != number:
                    self._note(
                        number, f"the runtimes count it as step {counter}, since a nop before it waits for nothing"
                    )
            counter += 1
            self.moves.append(move)
            self.program.moves.append(move)
        self.program.blocks[self.gpu, self.block] = range(first, len(self.program.moves))

    def _fuse(self, number: int, fused: list[Move]) -> None:
        count = fused[-1].count
        if any(move.count != count for move in fused):
            self._note(number, "the runtimes join it with the re before, and take its cnt for all of them")
        for move in fused:
            move.count = count
        if len(fused) == MOST_FUSED + 1:
            self._note(number, f"the runtimes join more than {MOST_FUSED} re here, and overrun their list")

    def _note(self, number: int, text: str) -> None:
        self.program.notes.append(f"gpu {self.gpu}, tb {self.block}, step {number}: {text}")


def chunks_per_slot(algo: Algo) -> int:
    """Return how many chunks of a step go together in the largest message that the file is for, as far as it says."""
    if not algo.max_bytes:
        return 1
    chunk = -(-algo.max_bytes // algo.chunks)
    return max(1, min(LARGEST_COUNT, SLOT_BYTES[algo.proto] // chunk))


class Execution:
    """A run of a program's moves, as far as they depend on each other.

    Each threadblock's next move depends on others only through counts that never fall, so if one execution ends,
    every execution does.
    """

    def __init__(self, program: Program, slots: int, per_slot: int) -> None:
        self.program, self.slots, self.per_slot = program, slots, per_slot
        self.current = {place: run.start for place, run in program.blocks.items()}
        self.done = [False] * len(program.moves)
        self.passed = [0] * len(program.moves)  # parts of each move's message that are through
        self.queues: defaultdict[tuple[int, int, int], int] = defaultdict(int)  # parts on their way, by connection
        self.awake = deque(program.blocks)
        self.queued = set(program.blocks)

    def order(self) -> list[int]:
        """Return all moves in an order in which they can be done.

        Raises:
          ScheduleError: a deadlock; threadblocks that wait for each other are named.
        """
        order: list[int] = []
        sleepers: defaultdict[int, list[Place]] = defaultdict(list)
        while self.awake:
            place = self.awake.popleft()
            self.queued.discard(place)
            while self.current[place] < self.program.blocks[place].stop:
                number = self.current[place]
                target = self._waits_for(number)
                if target >= 0:
                    sleepers[target].append(place)
                    break
                if not self._through(number):
                    break
                self.done[number] = True
                order.append(number)
                self.current[place] += 1
                for sleeper in sleepers.pop(number, ()):
                    self._wake(sleeper)
        if len(order) < len(self.program.moves):
            raise ScheduleError(f"{self.program.name}: a deadlock. {self._circle()}")
        return order

    def _wake(self, place: Place) -> None:
        if place not in self.queued:
            self.queued.add(place)
            self.awake.append(place)

    def _waits_for(self, number: int) -> int:
        return next((target for target in self.program.moves[number].waits if not self.done[target]), -1)

    def _connections(self, move: Move) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        block = self.program.algo.gpus[move.gpu].threadblocks[move.block]
        return (block.recv, move.gpu, block.channel), (move.gpu, block.send, block.channel)

    def _through(self, number: int) -> bool:
        """Pass on as much of a move's message as can be; say whether that was all."""
        moves = self.program.moves
        move = moves[number]
        if move.sender < 0 and move.receiver < 0:
            return True
        incoming, outgoing = self._connections(move)
        parts = -(-move.count // self.per_slot)
        can = parts - self.passed[number]
        if move.sender >= 0:
            can = min(can, self.queues[incoming])
        if move.receiver >= 0:
            can = min(can, self.slots - self.queues[outgoing])
        self.passed[number] += can
        if can and move.sender >= 0:
            self.queues[incoming] -= can
            self._wake(moves[move.sender].place)
        if can and move.receiver >= 0:
            self.queues[outgoing] += can
            self._wake(moves[move.receiver].place)
        return self.passed[number] == parts

    def _circle(self) -> str:
        """Name threadblocks that wait for each other in a circle."""
        moves = self.program.moves
        place = next(place for place, run in self.program.blocks.items() if self.current[place] < run.stop)
        seen: dict[Place, str] = {}
        while place not in seen:
            move = moves[self.current[place]]
            target = self._waits_for(self.current[place])
            incoming, _ = self._connections(move)
            if target >= 0:
                reason = f"waits for tb {moves[target].block}, step {moves[target].number}"
            elif move.sender >= 0 and not self.queues[incoming]:
                target = move.sender
                reason = f"waits for the message of {moves[target].words}"
            else:
                target = move.receiver
                reason = f"waits for one of {self.slots} slots to gpu {moves[target].gpu}, tb {moves[target].block}"
            seen[place] = f"{move.words} {reason}"
            place = moves[target].place
        circle = list(seen)
        return "; ".join(seen[place] for place in circle[circle.index(place) :]) + "."
