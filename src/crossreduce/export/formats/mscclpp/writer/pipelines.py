"""Make threadblocks whose pipelines work at the same time: one for each value of a block that a GPU makes or sends.

Input: a collective. Output: threadblocks in ``GpuPlan``s.

A stage is a value of a block on a rank: it waits for the operands from other ranks, combines them, and sends the value
to the ranks that read it. Each stage has a threadblock with a pipeline, so it works on one piece of the block while the
stage before it already works on the next piece. Every operand has separate scratch memory, and copies are put into the
memory where they stay, so no sender ever waits for memory. Stages that send nothing, such as the last wait of a rank,
come after the pipeline of another stage of the same block and rank.

A sender puts nothing before the receiving threadblock has signalled that its call has begun, since the memory may
belong to an earlier call. A port channel reads its source later. So if no result depends on the transfer, the receiver
signals at the end that the data has arrived. (``flush`` would do this, but in MSCCL++ it does nothing.)

In place, the result overwrites a rank's input. This is right only if the result depends on all values that are made
from this input. Otherwise, as in a one-shot all-reduce, ``blocks.py`` exports the schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby, product
from operator import attrgetter
from typing import Final

from ...collective import Block, Collective, Location
from ..limits import MOST_CHANNELS
from .connections import Extent, GpuPlan, Hosts, LocalEnd, Target, ThreadblockPlan, connect

MOST_ITERATIONS: Final = (1 << 16) - 1  # the executor counts the iterations of a pipeline with 16 bits
WORD: Final = 16  # bytes

_NO_END: Final = LocalEnd("", -1)


class NotSeparableError(Exception):
    """The stages of a schedule cannot run in separate threadblocks."""


@dataclass(eq=False)
class _Transfer:
    """A value that one stage sends and another one receives."""

    src: _Stage
    dst: _Stage
    to: Extent
    kind: str  # of the channel: "memory" or "port"
    acknowledged: bool  # whether the receiver signals at the end that the value has arrived
    src_end: LocalEnd = _NO_END  # of the channel between the two threadblocks
    dst_end: LocalEnd = _NO_END


@dataclass(eq=False)
class _Stage:
    """A value of a block on a rank, with the memory where it is stored."""

    rank: int
    round: int  # of the schedule; -1 for an input
    memory: Extent
    operands: list[Extent] = field(default_factory=list)  # in the order of combination; copies have one, inputs 0
    aside: Extent = ("", 0, 0)  # memory for partial sums
    output: Extent | None = None  # for an input that is also a result: the memory into which it must be copied
    receives: list[_Transfer] = field(default_factory=list)
    sends: list[_Transfer] = field(default_factory=list)

    @property
    def stored(self) -> Extent:
        """The memory of the value after the stage has run."""
        return self.memory if self.output is None else self.output


@dataclass(eq=False)
class _Segment:
    """Stages on one rank that run in one pipeline. Their blocks have the same size."""

    size: int
    stages: list[_Stage]

    @property
    def sends(self) -> bool:
        return any(stage.sends for stage in self.stages)

    @property
    def channels(self) -> int:
        """An upper bound of the number of channels that it uses."""
        return sum(len(stage.sends) + len(stage.receives) for stage in self.stages)

    @property
    def only_waits(self) -> bool:
        """Whether no stage has anything to do but to wait for a copied value."""
        return all(not stage.sends and len(stage.operands) == 1 and not stage.output for stage in self.stages)


@dataclass(eq=False)
class _Worker:
    """A threadblock, which runs its pipelines one after the other."""

    rank: int
    segments: list[_Segment]

    @property
    def size(self) -> int:
        return self.segments[0].size

    @property
    def sends(self) -> bool:
        return self.segments[0].sends

    @property
    def stages(self) -> list[_Stage]:
        return [stage for segment in self.segments for stage in segment.stages]


class _BlockStages:
    """The stages of one block, on all ranks."""

    def __init__(
        self, collective: Collective, block: Block, gpus: list[GpuPlan], hosts: Hosts, *, inplace: bool
    ) -> None:
        self.collective, self.block, self.gpus, self.hosts, self.inplace = collective, block, gpus, hosts, inplace
        chunk = self.chunk = collective.program.chunks[block.chunk]
        self.devices, self.inputs = chunk.devices, len(chunk.sources)
        self.results = dict(zip(chunk.destinations, chunk.results, strict=True))
        self.readers: defaultdict[int, list[int]] = defaultdict(list)
        self.ancestors = [0] * len(self.devices)  # for each value, the values from which it is made, as bits
        for value, instruction in enumerate(chunk.instructions, start=self.inputs):
            for operand in instruction.operands:
                self.readers[operand].append(value)
                self.ancestors[value] |= self.ancestors[operand] | 1 << operand
        self.stages: dict[int, _Stage] = {}
        self.pipeline = list(range(len(self.devices)))  # for each value, the number of its stage's pipeline
        for value, source in enumerate(chunk.sources):
            self.stages[value] = _Stage(source, -1, self._extent(source, collective.input(source, block)))
            if not inplace and self.results.get(source) == value:
                self.stages[value].output = self._extent(source, collective.output(source, block))
        for value, instruction in enumerate(chunk.instructions, start=self.inputs):
            self._add(value, instruction.device, instruction.operands, instruction.round)

    def _extent(self, rank: int, location: Location) -> Extent:
        place = self.collective.in_place(rank, location) if self.inplace else location
        return (*place, self.block.size)

    def _add(self, value: int, rank: int, operands: tuple[int, ...], in_round: int) -> None:
        """Add the stage of an instruction, and the transfers of its operands.

        Raises:
          NotSeparableError: the result would overwrite an input that is still needed, or no operand is on another rank.
        """
        memory = None
        if self.results.get(rank) == value:
            if not self._may_overwrite_input(value, rank):
                raise NotSeparableError
            memory = self._extent(rank, self.collective.output(rank, self.block))
        copies = len(operands) == 1
        if copies and self.devices[operands[0]] == rank:
            raise NotSeparableError
        # The memory in which the operands from other ranks arrive. A copied result arrives where it stays.
        landed = {
            operand: memory if copies and memory else self.gpus[rank].fresh(self.block.size)
            for operand in operands
            if self.devices[operand] != rank
        }
        aside = next(iter(landed.values()), ("", 0, 0))  # partial sums overwrite the first of them
        stage = self.stages[value] = _Stage(rank, in_round, memory or aside, aside=aside)
        for operand in operands:
            if operand in landed:
                self._transfer(operand, value, landed[operand])
                stage.operands.append(landed[operand])
            else:
                stage.operands.append(self.stages[operand].memory)
                if operand >= self.inputs:
                    self._join(operand, value)
        if not stage.receives and not copies:
            raise NotSeparableError

    def _transfer(self, value: int, reader: int, to: Extent) -> None:
        """Add the transfer of a value to the stage of ``reader``, a value that is made from it."""
        src, dst = self.stages[value], self.stages[reader]
        kind = self.hosts.kind(src.rank, dst.rank)
        result = self.results.get(src.rank)
        depends = result is not None and bool(self.ancestors[result] >> reader & 1)
        transfer = _Transfer(src, dst, to, kind, acknowledged=kind == "port" and not depends)
        src.sends.append(transfer)
        dst.receives.append(transfer)

    def _may_overwrite_input(self, value: int, rank: int) -> bool:
        """Return whether all values that are made from a rank's input are complete when the result is stored."""
        if not self.inplace or rank not in self.chunk.sources:
            return True
        readers = self.readers[self.chunk.sources.index(rank)]
        before = self.ancestors[value] | 1 << value
        local = [reader for reader in readers if self.devices[reader] == rank]
        remote = [reader for reader in readers if self.devices[reader] != rank]
        ports = [reader for reader in remote if self.hosts.kind(rank, self.devices[reader]) == "port"]
        if any(not before >> reader & 1 for reader in local + ports):
            return False
        # One threadblock sends to all remote readers, and signals only after all of these sends.
        return not remote or any(before >> reader & 1 for reader in remote)

    def _join(self, a: int, b: int) -> None:
        """Merge the pipelines of two values."""
        old, new = self.pipeline[b], self.pipeline[a]
        self.pipeline = [new if number == old else number for number in self.pipeline]

    def segments(self) -> list[_Segment]:
        """Return the pipelines of the block. Pipelines that send data come first."""
        groups: defaultdict[int, list[_Stage]] = defaultdict(list)
        for value, stage in self.stages.items():
            if stage.operands or stage.sends or stage.output:
                groups[self.pipeline[value]].append(stage)
        segments = [_Segment(self.block.size, stages) for stages in groups.values()]
        return sorted(segments, key=lambda segment: not segment.sends)


def add_pipelines(
    collective: Collective, gpus: list[GpuPlan], hosts: Hosts, unit_of: dict[int, int], most: int, *, inplace: bool
) -> bool:
    """Add threadblocks with pipelines for all blocks of a collective. Return whether a GPU's stages had to share them.

    Args:
      gpus: an empty plan for each rank.
      unit_of: for each size of a block (in units), the bytes of its pieces, or 0 for a block that is not cut.
      most: the largest number of threadblocks per GPU. Stages share threadblocks if there would be more.
      inplace: for calls whose input and output are the same memory.
    Raises:
      NotSeparableError: the schedule needs stages of a block in one threadblock.
    """
    workers: list[list[_Worker]] = [[] for _ in gpus]
    for block in collective.blocks:
        of_block: dict[int, _Worker] = {}  # by rank, the threadblock for stages of this block that send nothing
        for segment in _BlockStages(collective, block, gpus, hosts, inplace=inplace).segments():
            rank = segment.stages[0].rank
            if not segment.sends and (worker := of_block.get(rank) or _worker_with_room(workers[rank], segment)):
                worker.segments.append(segment)
                continue
            workers[rank].append(_Worker(rank, [segment]))
            of_block.setdefault(rank, workers[rank][-1])
    crowded = any(len(of_rank) > most for of_rank in workers)
    workers = [_merge_workers(of_rank, most) for of_rank in workers]
    _connect(gpus, [worker for of_rank in workers for worker in of_rank])
    for gpu, of_rank in zip(gpus, workers, strict=True):
        gpu.threadblocks += [_threadblock(gpu, worker, unit_of) for worker in of_rank]
    return crowded


def _worker_with_room(workers: list[_Worker], segment: _Segment) -> _Worker | None:
    """Return a threadblock that only waits and has channels left for a segment that only waits, too, or ``None``."""
    if not segment.only_waits:
        return None
    for worker in workers:
        if all(other.only_waits for other in worker.segments):
            count = sum(len(stage.receives) for other in [*worker.segments, segment] for stage in other.stages)
            if count <= MOST_CHANNELS:
                return worker
    return None


def _merge_workers(workers: list[_Worker], most: int) -> list[_Worker]:
    """Merge threadblocks until there are at most ``most``, if possible. Only blocks of the same size are merged.

    Every threadblock processes a piece of each block in the order of the rounds, so no threadblocks wait for each other
    in a cycle. Pipelines of the same round are merged first, since they work on the same piece at the same time. A
    threadblock gets as few pipelines as possible.
    """
    for same_round, most_merged in product((True, False), range(2, MOST_CHANNELS + 1)):
        groups: list[list[_Worker]] = []
        for worker in sorted(workers, key=lambda worker: _merging_order(worker, same_round=same_round)):
            merged = [*groups[-1], worker] if groups else []
            fits = 0 < len(merged) <= most_merged and _may_merge(merged, same_round=same_round)
            count = len(workers) - sum(len(group) - 1 for group in groups)  # if nothing else is merged
            if fits and count > most:
                groups[-1].append(worker)
            else:
                groups.append([worker])
        if len(groups) <= most:
            return [_join_workers(group) for group in groups]
    return workers


def _merging_order(worker: _Worker, *, same_round: bool) -> tuple[int, int, bool, int]:
    """Return a key by which threadblocks that may be merged are neighbours."""
    first = worker.segments[0].stages[0].round
    return first if same_round else 0, worker.size, worker.sends, first


def _may_merge(workers: list[_Worker], *, same_round: bool) -> bool:
    """Return whether threadblocks are alike, have one pipeline each, and need few enough channels together."""
    segments = [segment for worker in workers for segment in worker.segments]
    kinds = {(w.size, w.sends, w.segments[0].stages[0].round if same_round else 0) for w in workers}
    have_channels = sum(segment.channels for segment in segments) <= MOST_CHANNELS
    return len(kinds) == 1 and len(segments) == len(workers) and have_channels


def _join_workers(workers: list[_Worker]) -> _Worker:
    """Return one threadblock with one pipeline for the stages of several threadblocks."""
    if len(workers) == 1:
        return workers[0]
    return _Worker(workers[0].rank, [_Segment(workers[0].size, [s for worker in workers for s in worker.stages])])


def _connect(gpus: list[GpuPlan], workers: list[_Worker]) -> None:
    """Assign channels to transfers. A channel connects two threadblocks for at most one transfer in each direction."""
    worker_of = {id(stage): worker for worker in workers for stage in worker.stages}
    ends: dict[tuple[int, int], list[LocalEnd]] = defaultdict(list)  # by the ids of this and the other threadblock
    used: Counter[tuple[int, int]] = Counter()
    for worker in workers:
        for stage in worker.stages:
            for transfer in stage.sends:
                other = worker_of[id(transfer.dst)]
                there, back = (id(worker), id(other)), (id(other), id(worker))
                if used[there] == len(ends[there]):
                    near, far = connect(gpus, worker.rank, other.rank, transfer.kind)
                    ends[there].append(near)
                    ends[back].append(far)
                transfer.src_end, transfer.dst_end = ends[there][used[there]], ends[back][used[there]]
                used[there] += 1


def _threadblock(gpu: GpuPlan, worker: _Worker, unit_of: dict[int, int]) -> ThreadblockPlan:
    """Return a threadblock with the operations of a worker."""
    block = ThreadblockPlan(gpu)
    sends = [transfer for stage in worker.stages for transfer in stage.sends]
    receives = [transfer for stage in worker.stages for transfer in stage.receives]
    block.signal(_unique(transfer.dst_end for transfer in receives))  # permits the senders to write to its memory
    block.wait(_unique(transfer.src_end for transfer in sends))
    for segment in worker.segments:
        if block.unread or block.dirty:
            block.sync()
        unit = unit_of[segment.size]
        with block.pipeline(unit, segment.size) if unit else nullcontext():
            by_round = attrgetter("round")
            for _, together in groupby(sorted(segment.stages, key=by_round), key=by_round):
                _add_stages(block, list(together))
    arrived = _unique(transfer.dst_end for transfer in receives if transfer.acknowledged)
    if arrived:
        block.sync()
    block.signal(arrived)
    block.wait(_unique(transfer.src_end for transfer in sends if transfer.acknowledged))
    return block


def _add_stages(block: ThreadblockPlan, stages: list[_Stage]) -> None:
    """Add the operations of stages of one round, for one piece."""
    block.wait([transfer.dst_end for stage in stages for transfer in stage.receives])
    near = [transfer for stage in stages for transfer in stage.sends if transfer.kind == "memory"]
    far = [transfer for stage in stages for transfer in stage.sends if transfer.kind == "port"]
    puts: defaultdict[str, list[tuple[Extent, Target]]] = defaultdict(list)
    for stage in stages:
        to = [transfer for transfer in near if transfer.src is stage]
        # Each rank begins with the next rank, so that not all ranks send to the same one first.
        to.sort(key=lambda transfer: (transfer.dst.rank < transfer.src.rank, transfer.dst.rank))
        targets = [Target("memory", transfer.dst.rank, transfer.to) for transfer in to]
        if len(stage.operands) > 1:
            block.reduce(stage.operands, stage.stored, stage.aside, targets)
        elif len(targets) == 1 and stage.output is None:
            puts[stage.memory[0]].append((stage.memory, targets[0]))
        elif targets or stage.output is not None:
            block.reduce([stage.memory], stage.stored, stage.stored, targets)
    for moves in puts.values():
        block.put(moves)
    block.signal([transfer.src_end for transfer in near])
    block.post([(t.src.stored, Target("port", t.dst.rank, t.to), t.src_end) for t in far])


def _unique(ends: Iterable[LocalEnd]) -> list[LocalEnd]:
    return list(dict.fromkeys(ends))
