"""Calls between hosts that compiled code executes as a whole: those of one piece, over connections that it can use.

Input: what the ranks of a host execute, and the programs of the exchanges. Output: an executable of three stages. Stage
0 copies inputs to slots. Stage 1 makes partial results; then the leaders compare their calls with those of other hosts,
exchange the partial results, and deliver the results to slots. Stage 2 copies results to the caller's buffers, if all
hosts have made the same call. If the data are small, one leader exchanges them, and its first messages have them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

from ... import kernels
from ..intra_host.instructions import HostCheck, HostMessages, RankInstruction, native_program
from ..intra_host.programs import LINE
from .exchange import EAGER_BYTES, ExchangeProgram
from .one_host import RankExecutable


class CompiledCalls:
    """Returns executables. They share the memory of their exchanges, since a group runs one call at a time."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._nbytes = 0

    def executable(
        self,
        stages: Sequence[Sequence[RankInstruction]],
        programs: tuple[ExchangeProgram, ...],
        buffers: int,
        deliveries: Sequence[Sequence[RankInstruction]],
        compared: tuple[int, ...],
        digest: bytes,
        counted: tuple[int, int],
        text: bytes,
    ) -> RankExecutable:
        """Return the executable of a call.

        Args:
          stages: what this rank executes on its host, in three stages.
          programs: the exchanges in which this rank takes part.
          buffers: the number of the caller's buffers. The memories of the exchanges are the next buffers.
          deliveries: copy the results of the exchanges to slots.
          compared: the ranks with which this rank compares its call; empty if another rank of the host does so.
          digest: see ``RankExecutable``.
          counted: the kind of the call, and its bytes; see ``native_program``.
          text: describes the call.
        """
        full: list[list[RankInstruction | HostMessages | HostCheck]] = [list(stage) for stage in stages]
        if compared:
            full[1] += [*message_rounds(programs, buffers, compared, digest), *chain.from_iterable(deliveries)]
        full[2].insert(0, HostCheck())
        sizes = [-(-program.nbytes // LINE) * LINE for program in programs]
        base = self._room(sum(sizes))
        addresses = tuple(base + at for at in accumulate(sizes[:-1], initial=0)) if programs else ()
        program = native_program(full, *counted)
        compares = bool(compared)
        return RankExecutable(
            program, len(full), text, digest, compares=compares, memory=self._memory, addresses=addresses
        )

    def _room(self, nbytes: int) -> int:
        """Return the address of memory. If more is needed than before, executables that use the old one keep it."""
        if nbytes > self._nbytes:
            self._memory, self._nbytes = kernels.memory(2 * nbytes + LINE), 2 * nbytes
        if self._memory is None:
            return 0
        return -(-ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) // LINE) * LINE


def message_rounds(
    programs: Sequence[ExchangeProgram], buffer: int, compared: tuple[int, ...], digest: bytes
) -> list[RankInstruction | HostMessages]:
    """Return the instructions that execute all exchanges of an op of one piece, and first compare the calls.

    ``buffer``: the number of the first exchange's memory; the others follow. ``compared``, ``digest``: see
    ``HostMessages``.
    """
    numbered = list(enumerate(programs, buffer))
    instructions: list[RankInstruction | HostMessages] = []

    def add(r: int, compared: tuple[int, ...]) -> None:
        sends, receives = (
            tuple(chain.from_iterable(program.transfers(r, at, received) for at, program in numbered))
            for received in (False, True)
        )
        instructions.append(HostMessages(sends, receives, compared, digest, EAGER_BYTES))

    eager = any(program.eager for program in programs)
    if not eager:
        instructions.append(HostMessages((), (), compared, digest, EAGER_BYTES))
    for r in range(max((len(program.part.stages) for program in programs), default=0)):
        add(r, compared if eager and r == 0 else ())
        for at, program in numbered:
            instructions += program.combined(r, at)
    return instructions
