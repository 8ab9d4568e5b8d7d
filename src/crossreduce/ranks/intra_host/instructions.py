"""The instructions of ranks, their pipelining over the pieces of an array, and their compilation to native programs.

Input: instructions for each phase of each piece. Output: stages, and the native ``RankProgram``. ``programs`` decides
which instructions a rank executes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, cast

from ... import kernels
from ...errors import UnsupportedError
from ...kernels import FusedProgram, Segment
from ...ops import ACCUMULATORS, COMPLEX, INTEGERS, KERNEL_OPS, AnyOp, BitwiseOp, Numbers, ReduceOp
from ...packing import itemsize

PEER_BUFFER: Final = 1 << 20
READABLE_BUFFERS: Final = 64
"""Region ``PEER_BUFFER + READABLE_BUFFERS r + k`` is buffer k < ``READABLE_BUFFERS`` of rank r's caller. It can only be
copied. The native shared_memory.hpp has the same constants."""


class BufferReference(NamedTuple):
    """A place in memory: ``offset`` bytes after the start of a region. Region k is the slot of rank k of the host, and
    region ~k is the caller's buffer k. For the buffers of another rank's caller see ``PEER_BUFFER``."""

    region: int
    offset: int


class RankInstruction(NamedTuple):
    """Combines ``size`` elements of each operand, in order, and writes them to each of ``results``.

    A single operand is copied. ``streaming``: whether it writes with streaming stores, which bypass the cache.
    """

    size: int
    operands: tuple[BufferReference, ...]
    results: tuple[BufferReference, ...]
    numbers: Numbers
    streaming: bool = False


class HostTransfer(NamedTuple):
    """Data that a rank sends to, or receives from, rank ``rank`` of another host: ``nbytes`` bytes at a place."""

    rank: int
    at: BufferReference
    nbytes: int


class HostMessages(NamedTuple):
    """An instruction: exchanges messages with ranks of other hosts.

    If there are ``compared`` ranks, the call is compared with theirs: each message begins with ``digest``, to which the
    number of the op is added. All data for a rank, ``room`` bytes at most, is then in the same message. ``sent`` and
    ``received``: the instruction waits until so many of the messages that the op has begun so far, from the first, are
    complete; -1 means all of them.
    """

    sends: tuple[HostTransfer, ...]
    receives: tuple[HostTransfer, ...]
    compared: tuple[int, ...]
    digest: bytes
    room: int
    sent: int = -1
    received: int = -1


class HostCheck(NamedTuple):
    """An instruction: ends the op on all ranks of the host if its first rank has found that another host's differs."""


class PutParts(NamedTuple):
    """An instruction: writes this rank's part sizes into its slot, and the parts if none has more than ``most`` bytes.

    ``reads``: whether other ranks read the parts from this process's memory otherwise.
    """

    most: int
    reads: bool


class TakeParts(NamedTuple):
    """An instruction: copies the parts for this rank, after all ``ranks`` have executed ``PutParts``."""

    most: int
    reads: bool
    ranks: int


OtherInstruction: TypeAlias = HostMessages | HostCheck | PutParts | TakeParts

# A phase: its delay, and a function from a piece's number j to the instructions that it executes in stage j + delay.
Phase = tuple[int, Callable[[int], list[RankInstruction]]]


class ArrayPlaces(NamedTuple):
    """Where an array is: the number of the caller's buffer, and the offset in bytes of each piece in it."""

    buffer: int
    starts: tuple[int, ...]


def reduction_numbers(op: AnyOp, dtype: str, ranks: int, exact: bool = False) -> Numbers:
    """Return the ``Numbers`` with which ranks reduce arrays of a dtype to a result of the same dtype.

    The mean of integers is that of NCCL: the sum wraps around in the dtype. Then it is divided and truncated towards
    zero. Source: NCCL, FuncSumPostDiv in src/device/reduce_kernel.h (github.com/NVIDIA/nccl, commit 0180f9a).

    ``exact``: whether sums and means of floats are computed exactly and rounded once; see ``Numbers.exactly``. Partial
    results are then exact, too, and consist of several elements of the accumulator's dtype (see ``partial_sums``).

    Raises:
      UnsupportedError: the op is not defined for the dtype, or is an exact product of floats.
    """
    if isinstance(op, BitwiseOp):
        if dtype != "bool" and dtype not in INTEGERS:
            given = f"op {op.value}, dtype {dtype}"
            raise UnsupportedError.of(f"the {op.value} of {dtype} is not defined.", given, "cast to an integer")
        return Numbers(cast("ReduceOp", op), dtype, dtype, dtype, 1)
    wide = dtype if dtype in INTEGERS else ACCUMULATORS[op, dtype]
    numbers = Numbers(op, dtype, wide, dtype, ranks if op is ReduceOp.MEAN else 1)
    if exact:
        numbers = numbers.exactly()
    if numbers.exact:
        numbers = numbers._replace(accumulator="complex128" if dtype in COMPLEX else "float64")
    return numbers


def join_contiguous(instructions: Iterable[RankInstruction]) -> list[RankInstruction]:
    """Return the instructions, after joining each one that ``_continues`` the previous one with it."""
    joined: list[RankInstruction] = []
    for instruction in instructions:
        if joined and _continues(joined[-1], instruction):
            joined[-1] = joined[-1]._replace(size=joined[-1].size + instruction.size)
        else:
            joined.append(instruction)
    return joined


def _continues(first: RankInstruction, second: RankInstruction) -> bool:
    """Return whether ``second`` does the same as ``first`` on the elements directly after those of ``first``."""

    def after(places: tuple[BufferReference, ...], dtype: str) -> tuple[BufferReference, ...]:
        return tuple(BufferReference(region, offset + first.size * itemsize(dtype)) for region, offset in places)

    operands, results = after(first.operands, first.numbers.dtype), after(first.results, first.numbers.result)
    return second == (second.size, operands, results, first.numbers, first.streaming)


def pipeline(pieces: int, phases: Sequence[Phase], depth: int) -> list[list[RankInstruction]]:
    """Return the stages that execute all phases of ``pieces`` pieces. No phase may have a delay above ``depth``."""
    stages: list[list[RankInstruction]] = [[] for _ in range(max(pieces, 1) + depth)]
    for piece in range(pieces):
        for delay, instructions in phases:
            stages[piece + delay] += instructions(piece)
    return stages


def native_program(
    stages: Sequence[Iterable[RankInstruction | OtherInstruction]], kind: int = 0, nbytes: int = 0
) -> Any:
    """Return the stages as a native ``RankProgram``, which the native ``SharedMemory`` executes.

    ``kind``, ``nbytes``: the kind of call and the bytes that each run counts; see ``counters.kind_and_bytes``.
    """

    def native(each: RankInstruction | OtherInstruction) -> tuple[Any, ...]:
        if not isinstance(each, RankInstruction):
            return each
        run = kernel(each.numbers, each.size, len(each.operands), len(each.results))
        return run, each.operands, each.results, each.streaming

    return kernels.native().RankProgram([list(map(native, stage)) for stage in stages], kind, nbytes)


@lru_cache(maxsize=4096)
def kernel(numbers: Numbers, size: int, operands: int, results: int) -> kernels.Kernel:
    """Return the kernel that combines ``size`` elements of each operand, in order. A single operand is copied."""
    _, dtype, wide, result, divisor, *_ = numbers
    is_bitwise = isinstance(cast("AnyOp", numbers.op), BitwiseOp)
    if is_bitwise and operands > 1:  # kernels combine the bytes, whatever the dtype
        size, dtype, wide, result = size * itemsize(dtype), *("uint8",) * 3
    everything = (Segment(0, 0, size, 0),)  # one segment with all elements
    if operands == 1:
        dtypes = (dtype, dtype if result == dtype else wide, result)
        fused = FusedProgram(0, (), (0,) * results)
        return kernels.compile_kernel("sum", dtypes, 1, 1, results, (size,), (fused,), everything)
    fused = FusedProgram(1, ((0, *range(operands)),), (~0,) * results)
    dtypes = (dtype, wide, result)
    op = KERNEL_OPS[numbers.op, numbers.exact]
    return kernels.compile_kernel(op, dtypes, divisor, operands, results, (size,), (fused,), everything)
