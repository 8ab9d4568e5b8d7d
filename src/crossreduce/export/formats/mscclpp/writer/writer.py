"""Write a schedule as an MSCCL++ execution plan, JSON that its executor runs on NVIDIA and AMD GPUs.

Input: a ``Schedule``, perhaps the topology and the size that it was planned for. Output: the text of the plan.

A schedule of several pieces becomes pipelines, one per threadblock, which work at the same time (``pipelines.py``). A
schedule of one piece needs none (``blocks.py``). With a topology, chunks are divided into parts, so that enough
threadblocks and channels work at the same time to fill the links. All-reduces through a switch that adds use switch
channels (``switch_reductions.py``).

Source: github.com/microsoft/mscclpp, src/core/executor/execution_plan.cc and src/core/include/execution_kernel.hpp
(the format and its meaning), execution_common.hpp (limits), python/mscclpp/language (examples of plans).
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Final, NamedTuple

from .....errors import ArgumentError, PlanError, shown
from .....schedule import Schedule
from .....topology import Topology, TopologyLike, byte_count, topology_of
from ...channels import parts_of_chunks
from ...collective import Collective, require_integers
from ...collective import collective as nccl_collective
from ..limits import MULTIPROCESSORS, resident
from .blocks import add_blocks
from .channel_bounds import check_least
from .chunk_division import divide_chunks, even_parts, is_uneven
from .connections import GpuPlan, Hosts, check_limits
from .pipelines import MOST_ITERATIONS, WORD, NotSeparableError, add_pipelines
from .switch_reductions import switch_threadblocks, uses_switches

THREADS: Final = (1024, 512, 256)  # per threadblock; with fewer threads each, more threadblocks run at the same time
FULL_THREADS: Final = 512  # threads that reach the rate of a channel; fewer reach a fraction (NCCL_MAX_NTHREADS is 640)
ALIGNMENT: Final = 16  # bytes; the executor requires each unit's size to be a multiple of it
LARGEST: Final = 2**64 - 1
PIECES: Final = 32  # the least number of pieces of long blocks
LEAST_PIECE: Final = 1 << 18  # bytes; if there are more pieces than planned, none is shorter than this
SHORT_PIECE: Final = 1 << 14  # bytes; the same for schedules of one piece
LONG_BLOCK: Final = 1 << 17  # bytes; schedules of one piece with blocks of at least this size have pipelines, too
PLANNED: Final = 1 << 26  # bytes: the size that ``plan`` assumes by default


def to_mscclpp_json(
    schedule: Schedule,
    topology: TopologyLike | None = None,
    nbytes: int | str | None = None,
    *,
    name: str | None = None,
    inplace: bool = True,
    threadblocks: int | None = None,
    threads: int | None = None,
    min_bytes: int = 0,
    max_bytes: int = LARGEST,
) -> str:
    """Return a schedule as an MSCCL++ execution plan.

    Rank k is the schedule's k-th device. The buffer is divided into equal units, as small as the shares need. The size
    of a unit in bytes must be a multiple of 16. The executor adds, so plans are for sums. Devices of different hosts
    (``host0/cuda:0``, ``host1/cuda:0``) exchange data through port channels.

    Args:
      schedule: an all-reduce, reduce-scatter, all-gather, broadcast or reduce of all its devices, each of which must
        have access to the memory of the others.
      topology: the topology on which it runs. It determines the number of parts of each chunk. By default this is 1.
      nbytes: the message size for which the number of pieces is chosen, 64 MiB by default. The plan fixes the bytes per
        piece, so a larger message has more pieces.
      name: the name by which the executor distinguishes plans. By default, it consists of the collective, the algorithm
        and the number of ranks.
      inplace: whether the plan is for calls whose input and output are the same memory, or for other calls.
      threadblocks: the largest number of threadblocks per GPU, over which the chunks are spread. By default it is 80
        with 1024 threads each, 160 with 512, or 320 with 256, since all must run at the same time, even on a V100.
      threads: the number of threads per threadblock. By default it is 1024, or 512 or 256 if the larger number of
        threadblocks then gives each pipeline its own, or divides the data more evenly.
      min_bytes: the smallest message that the plan is for.
      max_bytes: the largest message that the plan is for. It is lowered if pipelines would need over 65535 iterations.
    Raises:
      PlanError: the schedule is not such a collective, or a threadblock needs too many operations or peers.
      ScheduleError: ``verify`` rejects the schedule.
      ArgumentError: another argument is invalid.

    >>> from crossreduce.planning import direct
    >>> plan = json.loads(to_mscclpp_json(direct(["cuda:0", "cuda:1"])))
    >>> [op["name"] for op in plan["gpus"][0]["threadblocks"][0]["ops"]]
    ['signal', 'wait', 'nop', 're', 'wait', 'nop', 'put', 'nop', 'signal']
    """
    wiring = None if topology is None else topology_of(topology)
    size = PLANNED if nbytes is None else byte_count(nbytes) or PLANNED
    require_integers(threadblocks=threadblocks, threads=threads, min_bytes=min_bytes, max_bytes=max_bytes)
    if threads is not None and threads not in range(32, 1025, 32):
        raise ArgumentError.of("threads must be a multiple of 32 up to 1024.", shown(threads), "threads=1024")
    most = {width: most_threadblocks(width) for width in (THREADS if threads is None else (threads,))}
    if threadblocks is not None:
        allowed = max(most.values())
        if not 1 <= threadblocks <= allowed:
            problem = f"threadblocks, the number per GPU, must be 1 to {allowed}."
            raise ArgumentError.of(problem, shown(threadblocks), f"threadblocks={allowed}")
        most = {width: min(count, threadblocks) for width, count in most.items()}
    if not 0 <= min_bytes <= max_bytes <= LARGEST:
        given = f"min_bytes={min_bytes}, max_bytes={max_bytes}"
        raise ArgumentError.of("sizes must satisfy 0 <= min_bytes <= max_bytes < 2**64.", given)
    longest = LARGEST
    if wiring is not None and uses_switches(schedule, wiring):
        width, allowed = next(iter(most.items()))
        gpus, inputs = switch_threadblocks(schedule, wiring, allowed, inplace=inplace)
        kind, outputs = "allreduce", inputs
    else:
        width, gpus, divided, longest, _ = _threadblocks(schedule, wiring, size, most, inplace=inplace)
        kind, inputs, outputs = divided.kind, divided.inputs, divided.outputs
    if longest < min_bytes:
        problem = f"a pipeline has at most {MOST_ITERATIONS} iterations, so messages may have at most {longest} bytes."
        raise PlanError.of(problem, f"min_bytes={min_bytes}", "a plan for messages of about this size")
    plan = {
        "name": f"{kind}_{schedule.algorithm}_{len(gpus)}" if name is None else name,
        "collective": kind,
        "protocol": "Simple",
        "inplace": inplace,
        "reuse_resources": False,
        "gpus": [gpu.content(inputs, outputs) for gpu in gpus],
        "num_threads_per_block": width,
        "use_double_scratch_buffer": False,
        "buffer_alignment": ALIGNMENT,
        "min_message_size": min_bytes,
        "max_message_size": min(max_bytes, longest),
    }
    return json.dumps(plan, indent=1)


def most_threadblocks(threads: int) -> int:
    """Return how many threadblocks run at the same time on every type of GPU. They wait for those of other GPUs."""
    return min(MULTIPROCESSORS.values()) * resident(threads)


class _Loss(NamedTuple):
    """The drawbacks of an assignment. Of two assignments, the one with the smaller tuple is better."""

    shares_threadblocks: bool  # whether blocks or pipelines share threadblocks
    is_uneven: bool  # whether blocks differ much in size


class _Assignment(NamedTuple):
    """Threadblocks of all GPUs."""

    threads: int  # per threadblock
    gpus: list[GpuPlan]
    divided: Collective  # whose chunks are divided into parts
    longest: int  # the most bytes of a message
    loss: _Loss


def _threadblocks(
    schedule: Schedule, topology: Topology | None, nbytes: int, most: dict[int, int], *, inplace: bool
) -> _Assignment:
    """Return the threadblocks of all GPUs, with as many threads as possible without drawbacks (``_Loss``).

    ``most`` has the largest number of threadblocks per GPU, by the number of threads per threadblock. A schedule whose
    stages cannot run in separate threadblocks has no pipelines.
    """
    collective = nccl_collective(schedule)
    check_least(schedule, collective.program)
    # Threadblocks do not work in lock step, so long blocks are faster in several pieces, even if the schedule has one.
    longest_block = max(block.size for block in collective.blocks) * nbytes / collective.units
    is_cut = schedule.pieces > 1 or (topology is not None and longest_block >= LONG_BLOCK)
    for pipelines in (True, False) if is_cut else (False,):
        best: _Assignment | None = None
        failure: PlanError | None = None
        for threads, allowed in most.items():
            try:
                assignment = _assign_threadblocks(
                    schedule, collective, topology, nbytes, threads, allowed, pipelines=pipelines, inplace=inplace
                )
            except NotSeparableError:
                break
            except PlanError as error:
                failure = error
                continue
            if best is None or assignment.loss < best.loss:
                best = assignment
            if not any(best.loss):
                break
        if best is not None:
            return best
        # A schedule of one piece is then planned without pipelines, so its failure with pipelines is not final.
        if failure is not None and (not pipelines or schedule.pieces > 1):
            raise failure
    raise AssertionError("a schedule always has threadblocks without pipelines")


def _assign_threadblocks(
    schedule: Schedule,
    collective: Collective,
    topology: Topology | None,
    nbytes: int,
    threads: int,
    most: int,
    *,
    pipelines: bool,
    inplace: bool,
) -> _Assignment:
    """Return an assignment with at most ``most`` threadblocks per GPU.

    Raises:
      NotSeparableError: the schedule's stages cannot run in separate threadblocks.
      PlanError: a limit of the executor is exceeded.
    """
    parts = parts_of_chunks(schedule, topology, min(Fraction(1), Fraction(threads, FULL_THREADS)))
    if topology is not None:
        parts = even_parts(collective, parts, most, pipelines=pipelines)
    divided = divide_chunks(collective, parts)
    gpus = [GpuPlan(rank) for rank in range(collective.ranks)]
    longest = LARGEST
    if pipelines:
        unit_of = _pieces(divided, schedule.pieces, nbytes)
        shares = add_pipelines(divided, gpus, Hosts(schedule.devices), unit_of, most, inplace=inplace)
        longest = min(MOST_ITERATIONS * unit // size for size, unit in unit_of.items()) * divided.units
    else:
        add_blocks(divided, gpus, Hosts(schedule.devices), most, inplace=inplace)
        shares = len(divided.blocks) > most
    check_limits(schedule, gpus, most)
    return _Assignment(threads, gpus, divided, longest, _Loss(shares, topology is not None and is_uneven(divided)))


def _pieces(collective: Collective, pieces: int, nbytes: int) -> dict[int, int]:
    """Return for each size of a block (in units) the bytes of its pieces.

    Long blocks are cut into at least ``PIECES`` pieces. The planner assumes that threadblocks work in lock step, but
    they do not, and with many pieces they wait less for each other.
    """
    unit_of, least = {}, LEAST_PIECE if pieces > 1 else SHORT_PIECE
    for size in {block.size for block in collective.blocks}:
        nbytes_of_block = size * nbytes / collective.units
        piece = min(nbytes_of_block / pieces, max(nbytes_of_block / PIECES, least))
        unit_of[size] = max(1, math.ceil(piece / WORD)) * WORD
    return unit_of
