"""Build the GPUs and threadblocks of a plan: channels, remote buffers, and the operations that use them.

Input: operations, one by one, on ranks and memory. Output: threadblocks and GPUs in the form of the plan.

Memory channels join GPUs of one host. GPUs of different hosts need port channels, whose transfers a thread of the
host makes. The k-th channel of a type from rank a to b and the k-th one from b to a are the two ends of one channel,
so both lists get an entry at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from .....devices import parse
from .....errors import PlanError
from .....schedule import Schedule
from ..limits import MOST_AT_ONCE, MOST_BUFFERS, MOST_CHANNELS, MOST_OPERATIONS

T = TypeVar("T")

KINDS: Final = ("memory", "port", "switch")

Extent = tuple[str, int, int]  # neighbouring units: the buffer, the first unit and the number of units


class Target(NamedTuple):
    """Memory of another rank, and the kind of channel to it."""

    kind: str
    rank: int
    extent: Extent


class LocalEnd(NamedTuple):
    """One end of a channel: its kind, and its number in the list of its GPU."""

    kind: str
    number: int


@dataclass
class GpuPlan:
    """One rank's part of the plan, to which threadblocks are added."""

    rank: int
    scratch: int = 0  # the size of the scratch buffer, in units
    peers: dict[str, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS[:2]})
    buffers: list[tuple[int, str, str]] = field(default_factory=list)  # rank, buffer, kind of channel
    switches: list[dict[str, Any]] = field(default_factory=list)
    threadblocks: list[ThreadblockPlan] = field(default_factory=list)

    def fresh(self, size: int) -> Extent:
        """Return ``size`` units of scratch memory that nothing else uses."""
        self.scratch += size
        return "s", self.scratch - size, size

    def content(self, inputs: int, outputs: int) -> dict[str, Any]:
        """Return the GPU as a JSON object of the plan."""
        channels: list[dict[str, Any]] = [
            {"channel_type": kind, "connected_to": peers} for kind, peers in self.peers.items() if peers
        ]
        return {
            "id": self.rank,
            "input_chunks": inputs,
            "output_chunks": outputs,
            "scratch_chunks": self.scratch,
            "threadblocks": [block.content(number) for number, block in enumerate(self.threadblocks)],
            "channels": channels + self.switches,
            "remote_buffers": [
                {"rank": rank, "type": buffer, "access_channel_types": [kind]} for rank, buffer, kind in self.buffers
            ],
            "semaphores": [],
        }


class Hosts:
    """The kinds of channels between devices, which follow from the hosts in the names of the devices."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.hosts = [parse(device).host for device in devices]

    def kind(self, a: int, b: int) -> str:
        """Return the kind of the channels between two ranks."""
        return "memory" if self.hosts[a] == self.hosts[b] else "port"


def connect(gpus: list[GpuPlan], a: int, b: int, kind: str) -> tuple[LocalEnd, LocalEnd]:
    """Add a channel between two ranks, and return its ends at ``a`` and at ``b``."""
    ends = LocalEnd(kind, len(gpus[a].peers[kind])), LocalEnd(kind, len(gpus[b].peers[kind]))
    gpus[a].peers[kind].append(b)
    gpus[b].peers[kind].append(a)
    return ends


class ThreadblockPlan:
    """The operations of one threadblock, with a ``nop`` wherever its threads must wait for each other.

    Thread k waits and signals on the k-th channel of an operation, and all threads access data. So a ``nop`` is
    necessary between a wait and an access to data, between accesses of different kinds, between accesses and a signal,
    and between two signals (or waits) of different threads on one channel, whose order would be undefined.
    """

    def __init__(self, gpu: GpuPlan) -> None:
        self.gpu = gpu
        self.ops: list[dict[str, Any]] = []
        self.channels: dict[str, list[int]] = {kind: [] for kind in KINDS}
        self.buffers: dict[str, list[int]] = {kind: [] for kind in KINDS[:2]}
        # The next three describe the operations since the threads were last synchronised.
        self.unread = False  # whether there was a wait
        self.dirty = ""  # the name of the last operation on data
        self.threads: dict[tuple[str, LocalEnd], int] = {}  # the thread that signalled or waited on each channel

    def sync(self) -> None:
        """Synchronise the threads of the threadblock."""
        self.ops.append({"name": "nop"})
        self.unread, self.dirty, self.threads = False, "", {}

    def wait(self, ends: Sequence[LocalEnd]) -> None:
        """Wait for a signal on each of some channels."""
        self._on_channels("wait", ends)
        self.unread = self.unread or bool(ends)

    def signal(self, ends: Sequence[LocalEnd]) -> None:
        """Signal on each of some channels, after all accesses to data so far."""
        if ends and self.dirty:
            self.sync()
        self._on_channels("signal", ends)

    def put(self, moves: Sequence[tuple[Extent, Target]]) -> None:
        """Put blocks of one local buffer into memory of other ranks of this host."""
        for group in _groups(moves, MOST_AT_ONCE):
            self._access("put")
            spans = {"src_buff": [_span(src) for src, _ in group], "dst_buff": [self._remote(to) for _, to in group]}
            self.ops.append({"name": "put", **spans, "channel_type": "memory"})

    def post(self, moves: Sequence[tuple[Extent, Target, LocalEnd]]) -> None:
        """Put blocks into memory of ranks on other hosts, and signal their arrival, through port channels."""
        self._post("pws", moves)

    def _post(self, name: str, moves: Sequence[tuple[Extent, Target, LocalEnd]]) -> None:
        """Add operations of this name on port channels."""
        for group in _groups(moves, MOST_AT_ONCE):
            if self.unread or self.dirty:
                self.sync()
            srcs, dsts = [_span(src) for src, _, _ in group], [self._remote(target) for _, target, _ in group]
            spans = {"src_buff": srcs, "dst_buff": dsts}
            ids = [self._channel(end) for _, _, end in group]
            self.ops.append({"name": name, **spans, "channel_type": "port", "channel_ids": ids})

    def put_on_ports(self, moves: Sequence[tuple[Extent, Target, LocalEnd]]) -> None:
        """Put blocks into memory of ranks on other hosts through port channels, without signals."""
        self._post("put", moves)
        self.dirty = "put on ports"

    def reduce(self, srcs: Sequence[Extent], dst: Extent, aside: Extent, targets: Sequence[Target] = ()) -> None:
        """Add blocks in the listed order, and store the sum locally and in memory of other ranks of this host.

        A single source is copied. If there are too many sources for one operation, ``aside`` stores partial sums.
        """
        remaining = list(srcs)
        while len(remaining) > MOST_BUFFERS:
            self._reduce(remaining[:MOST_BUFFERS], aside, ())
            remaining = [aside, *remaining[MOST_BUFFERS:]]
        groups = _groups(targets, MOST_AT_ONCE) or [()]
        for k, group in enumerate(groups):
            self._reduce(remaining if k == 0 else [dst], dst, group)

    def _reduce(self, srcs: Sequence[Extent], dst: Extent, targets: Sequence[Target]) -> None:
        """Add one operation that stores the sum of its sources, or a single source, locally and at the targets."""
        name = "res" if targets else "re" if len(srcs) > 1 else "copy"
        self._access(name)
        spans = {"src_buff": [_span(src) for src in srcs], "dst_buff": [_span(dst), *map(self._remote, targets)]}
        kind = {"channel_type": "memory"} if targets else {}
        self.ops.append({"name": name, **spans, **kind, **({} if name == "copy" else {"reduce_op": "sum"})})

    def reduce_in_switch(self, first: int, size: int, switches: int) -> None:
        """Sum ``size`` units over all GPUs through a switch, and store the sum on all GPUs.

        Of the GPU's ``switches`` switch channels, the first one has the operands, and the last one gets the sum.
        """
        self._access("glres")
        ids = [position(self.channels["switch"], number) for number in range(switches)]
        spans = [{"switch_channel_id": number, "index": first, "size": size} for number in ids]
        kind = {"channel_type": "switch", "reduce_op": "sum"}
        self.ops.append({"name": "glres", "src_buff": spans[:1], "dst_buff": spans[-1:], **kind})

    @contextmanager
    def pipeline(self, unit: int, chunks: int) -> Iterator[None]:
        """Put the operations that are added inside into a pipeline that runs for each ``unit`` bytes of ``chunks``."""
        if self.unread or self.dirty:
            self.sync()
        outer, self.ops = self.ops, []
        self.threads = {}
        yield
        inner, self.ops = self.ops, outer
        self.unread, self.dirty = True, "pipeline"  # so that a nop follows
        if inner:
            context = {"unit_size": unit, "num_chunks": chunks}
            self.ops.append({"name": "pipeline", "iter_context": context, "ops": inner})

    def _on_channels(self, name: str, ends: Sequence[LocalEnd]) -> None:
        """Add waits or signals. If another thread has done the same on one of the channels, add a ``nop`` before."""
        for kind in KINDS[:2]:
            for group in _groups([end for end in ends if end.kind == kind], MOST_AT_ONCE):
                threads = {(name, end): thread for thread, end in enumerate(group)}
                if any(self.threads.get(use, thread) != thread for use, thread in threads.items()):
                    self.sync()
                self.threads |= threads
                ids = [self._channel(end) for end in group]
                self.ops.append({"name": name, "channel_ids": ids, "channel_type": kind})

    def _access(self, name: str) -> None:
        """Add a ``nop`` if an access to data needs one. Only successive puts need none between them."""
        if self.unread or (self.dirty and (name, self.dirty) != ("put", "put")):
            self.sync()
        self.dirty = name

    def _channel(self, end: LocalEnd) -> int:
        return position(self.channels[end.kind], end.number)

    def _remote(self, target: Target) -> dict[str, Any]:
        buffer, first, size = target.extent
        number = position(self.gpu.buffers, (target.rank, buffer, target.kind))
        return {"buffer_id": position(self.buffers[target.kind], number), "index": first, "size": size}

    def content(self, number: int) -> dict[str, Any]:
        """Return the threadblock as a JSON object of the plan."""
        return {
            "id": number,
            "ops": self.ops,
            "channels": [{"channel_type": kind, "channel_ids": ids} for kind, ids in self.channels.items() if ids],
            "remote_buffer_refs": [
                {"access_channel_type": kind, "remote_buffer_ids": ids} for kind, ids in self.buffers.items() if ids
            ],
        }


def check_limits(schedule: Schedule, gpus: list[GpuPlan], most_threadblocks: int) -> None:
    """Raise a PlanError if a GPU or threadblock exceeds a limit of the executor."""
    for gpu in gpus:
        counts = [("threadblocks per GPU", len(gpu.threadblocks), most_threadblocks)]
        for block in gpu.threadblocks:
            operations = len(block.ops) + sum(len(op.get("ops", ())) for op in block.ops)
            counts.append(("operations per threadblock", operations, MOST_OPERATIONS))
            counts += [("channels per threadblock", len(ids), MOST_CHANNELS) for ids in block.channels.values()]
            counts += [("remote buffers per threadblock", len(ids), MOST_CHANNELS) for ids in block.buffers.values()]
        for what, count, most in counts:
            if count > most:
                raise over_limit(schedule, gpu.rank, what, str(count), most)


def over_limit(schedule: Schedule, rank: int, what: str, count: str, most: int) -> PlanError:
    """Return the error for a rank that needs more than ``most`` of ``what``, such as "channels per threadblock"."""
    problem = f"MSCCL++ allows {most} {what}, but {schedule.devices[rank]} needs {count}."
    remedy = "fewer packs or trees, a larger threadblocks=, another algorithm, fewer devices"
    return PlanError.of(problem, schedule.head, remedy)


def position(values: list[Any], value: Any) -> int:
    """Return the position of a value in a list. A new value is appended first."""
    if value not in values:
        values.append(value)
    return values.index(value)


def _groups(items: Sequence[T], most: int) -> list[Sequence[T]]:
    return [items[k : k + most] for k in range(0, len(items), most)]


def _span(extent: Extent) -> dict[str, Any]:
    buffer, first, size = extent
    return {"type": buffer, "index": first, "size": size}
