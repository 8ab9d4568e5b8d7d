"""The engine for groups whose ranks are all on one host. It runs verified schedules in shared memory.

Input: a collective, its size, and ``Numbers``. Output: an executable, which can run any number of times.

A large all-reduce or reduce uses the ``direct`` schedule with all ranks as owners: each rank reduces one share. A small
one uses the ``one_shot`` schedule, which needs one barrier less. All other collectives take one round, whatever their
size: every destination combines or copies the inputs of the sources. All schedules combine values in the order of the
ranks, so that the same inputs give the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ...lowering import Program, lower
from ...observe.counters import kind_and_bytes
from ...observe.traces.format import Phase
from ...ops import Numbers
from ...packing import itemsize
from ...planning import direct, one_shot
from ...schedule import Chunk, Schedule, Step
from ..failures.stage_runner import StageRunner
from ..intra_host.instructions import PutParts, RankInstruction, TakeParts, native_program
from ..intra_host.peer_memory import LEAST_BYTES, LEAST_BYTES_OF_TWO_RANKS, is_used, peer_stages
from ..intra_host.programs import PIECE_BYTES, SLOT_BYTES, rank_stages
from .exchange import ExchangeProgram

SMALL_BYTES: Final = 1 << 13
SMALL_BYTES_OF_2_RANKS: Final = 1 << 15
"""Up to this many bytes, each rank that needs the result of an all-reduce or reduce reduces everything itself.

Measured, relative to one share per rank: 2 ranks 0.83 for 16 and 32 KiB, 1.0 from 64 KiB on; 4 ranks 1.05 for 8 KiB."""

BLOCKING_PIECE_BYTES: Final = {"all_reduce": 1 << 17, "reduce": 1 << 17, "reduce_scatter": 1 << 17}
COPIED_PIECE_BYTES: Final = 1 << 18
"""The most bytes that a rank contributes to a piece where three or more ranks only wait while an op runs.

Measured on 2 cores, 1 to 16 MiB, as the time over that with pieces of 1 MiB: reductions with 128 KiB 0.84 to 0.96 on 8
ranks and 0.85 to 1.06 on 4 ranks; copies with 256 KiB 0.90 to 1.02. But a step of DDP on 8 ranks, in which each piece
waits until every rank was scheduled on a CPU, takes 1.07 times as long with 128 KiB."""

MOST_PIECES: Final = 4096
"""The maximum of pieces times ranks: very large arrays get larger pieces, since the size of an executable, and the time
to compile it, grow with both numbers."""

CACHED_STAGES: Final = 1 << 15  # the most stages that are cached; on 8 ranks a stage takes 1 to 2 KiB


class RankExecutable(NamedTuple):
    """A compiled call of one rank: what it executes on its host, and on leaders the exchanges with other hosts."""

    program: Any  # the native RankProgram, executed with the other ranks of the host
    stages: int  # the number of stages of the program
    text: bytes  # describes the call
    digest: bytes = b""  # digest of all that must be equal on several hosts: the call and its plan
    exchanges: tuple[ExchangeProgram, ...] = ()  # on leaders: one for each part in which they take part
    deliveries: tuple[list[RankInstruction], ...] = ()  # on leaders: copy results to slots after each exchange stage
    instructions: int = 0  # the number of instructions of the program
    folds: tuple[list[RankInstruction], ...] = ()  # on leaders, if exact: compute the partial sums of each piece
    prepared: bool = True  # whether compiled code executes the whole call, also the exchanges
    compares: bool = False  # if so, on several hosts: whether this rank compares the call with those of other hosts
    memory: Any = None  # if so: owns the memory of the exchanges, which is at ``addresses``
    addresses: tuple[int, ...] = ()

    @property
    def cost(self) -> int:
        """The memory that this executable takes, in stages of usual size (estimated)."""
        return max(self.stages, self.instructions // 2)


class ExecutableCache:
    """A cache of a rank's executables, by a key that describes the call. ``stages``: their total ``cost``.

    If a new executable would raise the total above ``CACHED_STAGES``, all others are removed.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all executables."""
        self._executables: dict[Any, RankExecutable] = {}
        self.stages = 0

    def get(self, key: Any) -> RankExecutable | None:
        """Return the executable of a call, or ``None``."""
        return self._executables.get(key)

    def add(self, key: Any, executable: RankExecutable) -> RankExecutable:
        """Keep the executable of a call, and return it."""
        if self.stages + executable.cost > CACHED_STAGES:
            self.clear()
        self._executables[key] = executable
        self.stages += executable.cost
        return executable


class OneHostEngine:
    """Compiles and runs the calls of rank number ``rank`` of the ``ranks`` ranks of a host."""

    has_unfinished_exchange = False  # for this attribute and the next one see ``MultiHostEngine``
    peers: tuple[int, ...] = ()

    def __init__(self, rank: int, ranks: int, reads_peers: bool = False, overlapping: bool = True) -> None:
        """Make the engine of a rank.

        ``reads_peers``: whether each rank may read the memory of the other ranks' processes.
        ``overlapping``: whether ranks may compute while an op runs; must be the same on all ranks.
        """
        self._rank, self._ranks, self._reads_peers = rank, ranks, reads_peers
        self._small_pieces = ranks > 2 and not overlapping

    def compile(self, collective: str, size: int, numbers: Numbers, root: int | None, text: bytes) -> RankExecutable:
        """Return the executable of a call, which callers cache.

        ``collective`` is the name of a method of ``Communicator``, or "" if the ranks only compare their calls.
        ``text`` describes the call. ``size`` counts the elements of each array.
        """
        stages: Sequence[Any] = [[], []]  # one barrier, which compares the calls
        if collective:
            nbytes = size * itemsize(numbers.dtype)
            if self._reads_peers and is_used(collective, self._ranks, nbytes):
                stages = peer_stages(collective, self._ranks, root, size, numbers, self._rank)
            else:
                host = host_collective(collective, self._ranks, root, nbytes)
                piece = self._piece_bytes(collective, nbytes) if self._small_pieces else None
                stages = rank_stages(host.program, host.inputs, host.outputs, size, numbers, self._rank, piece)
        program = native_program(stages, *kind_and_bytes(text, collective, numbers.dtype, size, self._ranks))
        return RankExecutable(program, len(stages), text, instructions=sum(map(len, stages)))

    def _piece_bytes(self, collective: str, nbytes: int) -> int:
        """Return the maximum bytes that a rank contributes to a piece, if ranks only wait while an op runs."""
        least = BLOCKING_PIECE_BYTES.get(collective, COPIED_PIECE_BYTES)
        contributed = nbytes * self._ranks if collective in ("reduce_scatter", "scatter", "all_to_all") else nbytes
        return max(least, min(PIECE_BYTES, contributed * self._ranks // MOST_PIECES))

    def compile_parts(self, text: bytes) -> RankExecutable:
        """Return the executable of an all-to-all of parts of any sizes; see ``Communicator.exchange_parts``."""
        reads, of_two = self._reads_peers, self._ranks == 2
        most = (LEAST_BYTES_OF_TWO_RANKS if of_two else LEAST_BYTES) - 1 if reads else SLOT_BYTES
        stages: list[list[Any]] = [[PutParts(most, reads)], [TakeParts(most, reads, self._ranks)], []]
        return RankExecutable(native_program(stages, *kind_and_bytes(text, "all_to_all")), len(stages), text)

    @staticmethod
    def compile_inner(text: bytes) -> RankExecutable:
        """Return the executable of a call that another library executes, with a barrier before and after the call."""
        return RankExecutable(native_program([[]] * 3, *kind_and_bytes(text)), 3, text)

    def run(
        self,
        executable: RankExecutable,
        addresses: tuple[int, ...],
        runner: StageRunner,
        timeout_s: float,  # noqa: ARG002
        inner: Callable[[], None] | None = None,
    ) -> bool:
        """Run a call. Return whether all ranks of the group made the same call; if not, nothing was written.

        ``addresses``: the caller's buffers, numbered as in ``host_collective``. ``inner``: executes the call in another
        library; ``executable`` must then be that of ``compile_inner``. It is called after all ranks have made the same
        call, and ``run`` waits until it has returned on all ranks.

        Raises:
          GroupAborted, PeerError, ReductionError: other ranks cannot take part.
        """
        if inner is None:
            return runner.begin(executable.program, addresses, executable.text, executable.stages)
        same = runner.begin(executable.program, addresses, executable.text, 2)
        if same:
            inner()
            runner.memory.native.trace(Phase.INNER, 1)
            runner.reach(executable.stages)
        return same

    @staticmethod
    def resume(executable: RankExecutable, outcome: int, runner: StageRunner, timeout_s: float) -> bool:  # noqa: ARG004
        """Complete a prepared call, which stopped with ``outcome`` in compiled code. Return what ``run`` returns."""
        return runner.complete(outcome, executable.stages)


class HostCollective(NamedTuple):
    """A collective among the ranks of one host.

    Device k of ``program`` is rank number k of the host. The program's flat buffer consists of arrays of equal size.
    ``inputs[i]``: on ranks that contribute to array i, the number of the caller's buffer that contains it.
    ``outputs[i]``: on ranks that need the result of array i, the number of the caller's buffer that receives it.
    """

    program: Program
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def host_collective(collective: str, ranks: int, root: int | None, nbytes: int) -> HostCollective:
    """Return the program by which the ranks of a host execute a collective, and the numbers of their buffers.

    Each rank numbers the buffers that it contributes first, then those for results. A broadcast has one buffer for
    both, and the result of a scatter has number 0. ``nbytes``: the size of one array.

    >>> print(host_collective("all_reduce", 2, None, 400).program)
    all_reduce one_shot: 2 devices, 1 chunk, 2 instructions
      chunk 0: v2 on cpu:0 = v0 + v1 (final)
      chunk 0: v3 on cpu:1 = v0 + v1 (final)
    """
    small = SMALL_BYTES_OF_2_RANKS if ranks == 2 else SMALL_BYTES
    return _host_collective(collective, ranks, root, nbytes <= small)


@lru_cache(maxsize=256)
def _host_collective(collective: str, ranks: int, root: int | None, small: bool) -> HostCollective:
    arrays = collective_arrays(collective, ranks, root)
    if collective in ("all_reduce", "reduce"):
        names = rank_names(ranks)
        destinations = tuple(names[k] for k in arrays[0].destinations)
        schedule = one_shot(names, names, destinations) if small else direct(names, names, destinations, owners=names)
        program = lower(schedule)
    else:
        program = lower(one_round(collective, rank_names(ranks), [array[:2] for array in arrays]))
    return HostCollective(program, tuple(array.input for array in arrays), tuple(array.output for array in arrays))


class CollectiveArray(NamedTuple):
    """One of a collective's arrays: the ranks that contribute to it, and the ranks that need its result.

    ``input`` and ``output``: the numbers of the caller's buffers, as in ``HostCollective``.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    input: int
    output: int


def collective_arrays(collective: str, ranks: int, root: int | None) -> list[CollectiveArray]:
    """Return the arrays of a collective among ``ranks`` ranks.

    >>> for array in collective_arrays("gather", 2, 0):
    ...     print(array)
    CollectiveArray(sources=(0,), destinations=(0,), input=0, output=1)
    CollectiveArray(sources=(1,), destinations=(0,), input=0, output=2)
    """
    everyone, root_only = tuple(range(ranks)), () if root is None else (root,)
    if collective in ("all_reduce", "reduce"):
        return [CollectiveArray(everyone, root_only or everyone, 0, 1)]
    if collective == "broadcast":
        return [CollectiveArray(root_only, everyone, 0, 0)]
    if collective in ("all_gather", "gather"):
        return [CollectiveArray((k,), root_only or everyone, 0, 1 + k) for k in everyone]
    if collective == "scatter":
        return [CollectiveArray(root_only, (k,), 1 + k, 0) for k in everyone]
    if collective == "reduce_scatter":
        return [CollectiveArray(everyone, (k,), k, ranks) for k in everyone]
    assert collective == "all_to_all", collective
    return [CollectiveArray((src,), (dst,), dst, ranks + src) for src in everyone for dst in everyone]


def one_round(
    collective: str,
    devices: tuple[str, ...],
    ends: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
    shares: Sequence[Fraction] | None = None,
) -> Schedule:
    """Return a schedule of one round: every destination combines, or copies, the inputs of the sources.

    ``ends``: the sources and the destinations of each chunk. ``shares``: the sizes of the chunks as fractions of the
    buffer; by default they are equal.

    >>> print(lower(one_round("gather", rank_names(3), [((0,), (0,)), ((1,), (0,)), ((2,), (0,))])))
    gather one_shot: 3 devices, 3 chunks, 2 instructions
      chunk 1: v1 on cpu:0 = v0
      chunk 2: v1 on cpu:0 = v0
    """
    pairs = tuple(ends)
    steps = tuple(
        Step(c, dst, sources)
        for c, (sources, destinations) in enumerate(pairs)
        for dst in destinations
        if sources != (dst,)
    )
    shares = shares or [Fraction(1, len(pairs))] * len(pairs)
    chunks = tuple(Chunk(share, *pair) for share, pair in zip(shares, pairs, strict=True))
    return Schedule(collective, "one_shot", devices, chunks, (steps,) if steps else ())


def rank_names(ranks: int) -> tuple[str, ...]:
    """Return the names of a host's ranks as devices of schedules."""
    return tuple(f"cpu:{k}" for k in range(ranks))
