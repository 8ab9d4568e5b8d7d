"""Write a schedule as MSCCL XML, which msccl-executor-nccl, microsoft/msccl and RCCL run.

Input: a schedule, the topology that it was planned for, and the runtimes that must accept the file. Output: its text.
``arrangement.py`` assigns messages to channels, and ``xml_operations.py`` makes the steps. Several arrangements are
tried. The file has the first one that the runtimes' limits allow, and the verifier proves it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Final

from ....errors import ArgumentError, PlanError, ScheduleError, shown
from ....schedule import Schedule, fluid_rate
from ....topology import Topology, TopologyLike, byte_count, topology_of
from ..channels import CHANNEL_GB_PER_S, parts_of_chunks
from ..collective import Collective, require_integers
from ..collective import collective as nccl_collective
from .arrangement import MOST_SINGLE, Arrangement, pipeline_arrangement, plain_arrangement, shared_arrangement, split
from .execution import too_large
from .format import LARGEST_COUNT, MOST_CHUNKS, PROTOCOLS, RUNTIMES, Runtime, broken_limits, read_msccl_xml
from .resource_bounds import least_broken
from .verifier import verify_msccl_xml
from .xml_operations import XmlWriter

CHANNELS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

MOST_STEPS: Final = 1 << 15
"""The number of pieces is lowered if a file would have more steps: its proof would take more than half a minute."""

LARGE_STEP: Final = 1 << 20
"""In bytes: half of the runtimes' largest message, so that a GPU forwards a step's data while it receives the next."""

# The runtimes' parsers read at most 255 characters of an attribute, and do not decode XML escapes.
_NAME: Final = re.compile(r"[A-Za-z0-9_.:+/@-]{1,200}")


def to_msccl_xml(
    schedule: Schedule,
    topology: TopologyLike | None = None,
    nbytes: int | str | None = None,
    *,
    name: str | None = None,
    proto: str = "Simple",
    runtime: str = "both",
    channels: int | None = None,
    inplace: bool = True,
    outofplace: bool = True,
    min_bytes: int = 0,
    max_bytes: int = 0,
) -> str:
    """Return a schedule as MSCCL XML.

    Rank k is ``schedule.devices[k]``. The buffer is divided into equal chunks, as small as the shares need. The
    runtimes use the file for messages whose element count is a multiple of the number of chunks. If the schedule has
    pieces, each chunk is divided into as many pieces as a threadblock has steps for, and each stage of a chunk's route
    has separate threadblocks, so that the stages overlap as planned.

    Args:
      schedule: an all-reduce, reduce-scatter, all-gather, broadcast or reduce of all its devices.
      topology: the topology that it was planned for. Chunks are divided into parts with separate channels until each
        channel carries at most ``CHANNEL_GB_PER_S``. Without a topology, each chunk is one part.
      nbytes: the size that it was planned for. If it is given, parts have so many pieces that no piece is larger than
        ``LARGE_STEP`` bytes. Otherwise the number of pieces is the schedule's.
      name: the name in the file. By default, it consists of the collective, the algorithm and the number of ranks.
      proto: "Simple", "LL" or "LL128".
      runtime: the runtime whose limits must hold: "msccl" (msccl-executor-nccl), "rccl", "microsoft"
        (microsoft/msccl, which needs ``max_bytes``, since it uses files only for smaller messages), or "both" for the
        first two.
      channels: the number of channels over which the chunks are spread. If it is given, chunks are not divided into
        parts and pieces. By default, the pieces and the topology determine the channels. Without both, their number is
        the least of ``CHANNELS`` that the limits allow.
      inplace: whether the file is for calls whose input and output are the same memory.
      outofplace: whether the file is for calls whose input and output are different memory.
      min_bytes: the smallest message that the runtimes use the file for.
      max_bytes: the largest such message, or 0 for no limit.
    Returns:
      The text. The format does not store the root of a reduce or broadcast, so such a file is right for only one root.
    Raises:
      PlanError: the schedule is not such a collective, or it breaks a limit of the runtime. The message has the limit
        and a remedy.
      ScheduleError: ``verify`` rejects the schedule.
      ArgumentError: another argument is invalid.

    >>> from crossreduce.planning import direct
    >>> print(to_msccl_xml(direct(["cuda:0", "cuda:1"])))  # doctest: +ELLIPSIS
    <algo name="allreduce_direct_2" proto="Simple" nchannels="1" nchunksperloop="2" ngpus="2" coll="allreduce" ...>
      <gpu id="0" i_chunks="2" o_chunks="2" s_chunks="0">
        <tb id="0" send="-1" recv="1" chan="0">
          <step s="0" type="rrc" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
          <step s="1" type="r" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" depid="1" deps="0" hasdep="0"/>
        </tb>
    ...
    """
    if proto not in PROTOCOLS:
        raise ArgumentError.of("unknown protocol.", shown(proto), ", ".join(PROTOCOLS))
    if runtime not in (*RUNTIMES, "both"):
        raise ArgumentError.of("unknown runtime.", shown(runtime), ", ".join((*RUNTIMES, "both")))
    wiring = None if topology is None else topology_of(topology)
    size = None if nbytes is None else byte_count(nbytes)
    require_integers(channels=channels, min_bytes=min_bytes, max_bytes=max_bytes)
    if channels is not None and channels < 1:
        raise ArgumentError.of("channels must be at least 1.", shown(channels), "channels=None: the fewest")
    if not (inplace or outofplace):
        problem = "a file must be for calls in place, calls out of place, or both."
        raise ArgumentError.of(problem, "inplace=False, outofplace=False", "outofplace=True")
    if min_bytes < 0:
        raise ArgumentError.of("min_bytes must not be negative.", shown(min_bytes), "min_bytes=0")
    if max_bytes and max_bytes < min_bytes:
        given = f"min_bytes={min_bytes}, max_bytes={max_bytes}"
        raise ArgumentError.of("max_bytes must not be below min_bytes.", given, "max_bytes=0: no limit")
    collective = nccl_collective(schedule)
    title = f"{collective.kind}_{schedule.algorithm}_{collective.ranks}" if name is None else name
    title = re.sub(r"[^A-Za-z0-9_.:+/@-]", "_", title)[:200] if name is None else title
    if not isinstance(title, str) or not _NAME.fullmatch(title):
        remedy = "up to 200 letters, digits and _ . : + / @ -"
        raise ArgumentError.of("the name must have 1 to 200 plain characters.", shown(title), remedy)
    if collective.units > MOST_CHUNKS:
        problem = f"the shares need {collective.units} equal chunks, but the runtimes count up to {MOST_CHUNKS}."
        given = f"{len(schedule.chunks)} shares of the buffer, multiples of 1/{collective.units}"
        raise PlanError.of(problem, given, "fewer packs, another algorithm, or shares of a smaller denominator")
    limits = [RUNTIMES["msccl"], RUNTIMES["rccl"]] if runtime == "both" else [RUNTIMES[runtime]]
    if broken := least_broken(collective, limits):
        raise _misfit(schedule, runtime, broken)
    head = (
        f'name="{title}" proto="{proto}" nchannels="{{channels}}" nchunksperloop="{{units}}" '
        f'ngpus="{collective.ranks}" coll="{collective.kind}" inplace="{inplace:d}" outofplace="{outofplace:d}" '
        f'minBytes="{min_bytes}" maxBytes="{max_bytes}"'
    )
    file = _File(head, channels or 1, inplace, outofplace, limits)
    if channels is not None or (wiring is None and schedule.pieces == 1):
        text = file.first(_plain_arrangements(collective, channels))
    else:
        builds = _pipelined_arrangements(collective, schedule, wiring, file.threadblocks)
        text = file.first(builds, _pieces(collective, schedule, wiring, size))
    if text is not None:
        return text
    raise _misfit(schedule, runtime, file.broken)


def _misfit(schedule: Schedule, runtime: str, broken: str) -> PlanError:
    """Return the error for a schedule whose files break a limit. ``broken`` is this limit in words."""
    remedy = "fewer packs or chunks, another algorithm, fewer devices, other channels="
    if runtime in ("rccl", "both") and broken.startswith("RCCL"):
        remedy += ', or runtime="msccl"'
    return PlanError.of(f"this schedule does not fit into the runtime: {broken}.", schedule.head, remedy)


def _pieces(collective: Collective, schedule: Schedule, topology: Topology | None, nbytes: int | None) -> int:
    """Return the number of pieces per part: that of the schedule, or more if pieces would exceed ``LARGE_STEP`` bytes.

    If the schedule has one piece, only parts of more than ``MOST_SINGLE`` units count. Smaller ones are moved unit by
    unit, and the runtimes themselves divide a large unit into slices.
    """
    parts = parts_of_chunks(schedule, topology)
    least = 0 if schedule.pieces > 1 else MOST_SINGLE
    large = [block.size / parts[block.chunk] for block in collective.blocks if block.size > least * parts[block.chunk]]
    if not nbytes or not large:
        return schedule.pieces
    return max(schedule.pieces, math.ceil(max(large) / collective.units * nbytes / LARGE_STEP))


Build = Callable[[int], Arrangement]  # a function that returns an arrangement, given the number of pieces


class _File:
    """The arguments of a file and the last limit that it broke. ``head`` is a template of the attributes of <algo>."""

    def __init__(self, head: str, channels: int, inplace: bool, outofplace: bool, limits: Sequence[Runtime]) -> None:
        self.head, self.channels, self.inplace, self.outofplace = head, channels, inplace, outofplace
        self.limits = limits
        self.steps = min(runtime.steps for runtime in limits)
        self.threadblocks = min(runtime.threadblocks for runtime in limits)
        self.broken = ""

    def first(self, builds: Iterable[Build], pieces: int = 1) -> str | None:
        """Return the text of the first arrangement that the limits allow, with as many pieces as they allow."""
        for build in builds:
            text = self._fitting(build, pieces)
            if text is None:
                continue
            try:
                verify_msccl_xml(text, slots=1)  # a file that ends with one slot ends with any number
            except ScheduleError as error:
                if "a deadlock" not in str(error):
                    raise
                self.broken = "messages that are forwarded on arrival would wait for each other"
                continue
            return text
        return None

    def _fitting(self, build: Build, pieces: int) -> str | None:
        """Return the text of an arrangement with as many pieces as the limits allow, or ``None`` if they allow none."""
        trial = min(2, pieces)  # shows how many steps a piece takes, and whether the other limits hold
        arrangement = build(trial)
        if trial > 1 and too_large(arrangement.messages, 0):  # each step sends at most one
            trial, arrangement = 1, build(1)
        if problem := too_large(arrangement.messages, 0):
            self.broken = problem
            return None
        export, trial_text = self._write(arrangement)
        if trial_text is None and (trial == 1 or export.most_steps <= self.steps):
            return None
        count = min(pieces, max(1, int(trial * min(self.steps / export.most_steps, MOST_STEPS / export.steps))))
        while count > trial or trial_text is None:
            export, text = self._write(build(count))
            if text is not None:
                return text
            if count == 1:
                return None
            count = max(1, min(count - 1, count * self.steps // export.most_steps))
        return trial_text

    def _write(self, arrangement: Arrangement) -> tuple[XmlWriter, str | None]:
        """Return the operations of an arrangement, and its text, or ``None`` if it breaks a limit."""
        export = XmlWriter(arrangement, self.threadblocks, inplace=self.inplace, outofplace=self.outofplace)
        broken = export.too_large()
        text = ""
        if not broken:
            channels = max(self.channels, export.channels)
            text = export.text(self.head.format(channels=channels, units=arrangement.collective.units))
            algo = read_msccl_xml(text)
            broken = next((problem for limit in self.limits for problem in broken_limits(algo, limit)), "")
        self.broken = broken or self.broken
        return export, None if broken else text


def _plain_arrangements(collective: Collective, channels: int | None) -> Iterator[Build]:
    """Yield arrangements without pieces for this number of channels, or by default for increasing numbers."""
    blocks = sum(len(split(block, LARGEST_COUNT)) for block in collective.blocks)
    for count in CHANNELS if channels is None else (channels,):
        if count > max(1, blocks) and channels is None:
            break
        yield partial(plain_arrangement, collective, count)


def _pipelined_arrangements(
    collective: Collective, schedule: Schedule, topology: Topology | None, threadblocks: int
) -> Iterator[Build]:
    """Yield arrangements whose channels fill the links, then some that need fewer threadblocks."""
    parts = parts_of_chunks(schedule, topology)
    rate = Fraction(0) if topology is None else fluid_rate(schedule, topology) or Fraction(0)
    all_parts = parts
    while schedule.pieces > 1:
        yield partial(pipeline_arrangement, collective, parts)
        if max(parts) == 1:
            break
        parts = tuple(-(-count // 2) for count in parts)
    chunks = zip(schedule.chunks, all_parts, strict=True)
    loads = [chunk.share * rate / count / CHANNEL_GB_PER_S for chunk, count in chunks]
    for for_copies in (1, 8, threadblocks):  # threadblocks for copies; at last every connection has one channel
        yield partial(shared_arrangement, collective, all_parts, loads, threadblocks - for_copies)
