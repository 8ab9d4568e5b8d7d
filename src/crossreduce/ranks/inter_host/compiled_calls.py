"""Calls between hosts that compiled code executes as a whole, over connections that it can use.

Input: what the ranks of a host execute, and the programs of the exchanges. Output: an executable. If there is one
piece, it has three stages. Stage 0 copies inputs to slots. Stage 1 makes partial results; then the leaders compare
their calls with those of other hosts, exchange the partial results, and deliver the results to slots. Stage 2 copies
results to the caller's buffers, if all hosts have made the same call. If the data are small, one leader exchanges them,
and its first messages have them. If the caller's arrays are exchanged, stage 1 only compares the calls, and stage 2
does all the rest. Otherwise, stages are those of ``multi_host``, and leaders execute stage t of the exchanges in stage
t + 1.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, chain, zip_longest
from typing import Any

from ... import kernels
from ..intra_host.instructions import HostCheck, HostMessages, HostTransfer, RankInstruction, native_program
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
        streaming: bool,
    ) -> RankExecutable:
        """Return the executable of a call.

        Args:
          stages: what this rank executes on its host.
          programs: the exchanges in which this rank takes part.
          buffers: the number of the caller's buffers. The memories of the exchanges are the next buffers.
          deliveries: copy the results of the exchanges to slots.
          compared: the ranks with which this rank compares its call; empty if another rank of the host does so.
          digest: see ``RankExecutable``.
          counted: the kind of the call, and its bytes; see ``native_program``.
          text: describes the call.
          streaming: see ``piece_stages``.
        """
        full: list[list[RankInstruction | HostMessages | HostCheck]] = [list(stage) for stage in stages]
        compare = HostMessages((), (), compared, digest, EAGER_BYTES)
        if any(program.arrays for program in programs):
            local = list(chain.from_iterable(stages))
            if any(program.eager for program in programs):
                first, *rest = message_rounds(programs, buffers, compared, digest)
                full = [[], [first], [*local, *rest]]
            else:
                rounds = piece_stages(programs, buffers, compare, local, streaming)
                full = [[], [compare], list(chain.from_iterable(rounds))]
        elif len(full) > 3:
            full[1] += [compare] if compared else []
            rounds = piece_stages(programs, buffers, compare) if programs else []
            for stage, parts in zip(full[1:], zip_longest(rounds, deliveries, fillvalue=()), strict=False):
                stage += chain.from_iterable(parts)
        elif compared:
            full[1] += [*message_rounds(programs, buffers, compared, digest), *chain.from_iterable(deliveries)]
        full[2].insert(0, HostCheck())
        sizes = [-(-program.nbytes // LINE) * LINE for program in programs]
        base = self._room(sum(sizes))
        addresses = tuple(base + at for at in accumulate(sizes[:-1], initial=0)) if programs else ()
        program = native_program(full, *counted)
        count, compares = sum(map(len, full)), bool(compared)
        return RankExecutable(
            *(program, len(full), text, digest, (), (), count),
            compares=compares,
            memory=self._memory,
            addresses=addresses,
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


def piece_stages(
    programs: Sequence[ExchangeProgram],
    buffer: int,
    first: HostMessages,
    local: Sequence[RankInstruction] = (),
    streaming: bool = False,
) -> list[list[RankInstruction | HostMessages]]:
    """Return the instructions of each stage of all exchanges of an op, in the order of ``exchange.run_stage``.

    ``buffer``: see ``message_rounds``. ``first``: compares the calls before. ``local``: executed while the first
    messages of these stages are under way. ``streaming``: whether copies of results use streaming stores.

    Memory from which messages are sent is not written before these are complete: what a stage has sent is complete
    lag - 1 stages later, before values combine, and before the receives of the next stage are posted. One stage more
    waits until all messages are sent. If no memory is used again, all receives are posted at once.
    """
    numbered, lag = list(enumerate(programs, buffer)), programs[0].lag
    count = max(len(program.pieces) + program.delay for program in programs)
    only_moves = all(program.arrays and program.nbytes == 0 for program in programs)
    stages: list[list[RankInstruction | HostMessages]] = []
    sent, received = [len(first.compared)], [len(first.compared)]  # messages until the end of each stage

    def transfers(stage: int, counts: list[int]) -> tuple[HostTransfer, ...]:
        """Return what a stage sends or receives, and count it."""
        moves = [
            each
            for at, program in numbered
            for piece, r in program.active(stage)
            for each in program.transfers(r, at, counts is received, piece)
        ]
        counts.append(counts[-1] + len(moves))
        return tuple(moves)

    def messages(sends: tuple[HostTransfer, ...], receives: tuple[HostTransfer, ...], complete: int) -> HostMessages:
        """Begin messages, and wait for those of the first ``complete`` stages."""
        until = [counts[max(0, min(complete, len(counts) - 1))] for counts in (sent, received)]
        until[0] *= not only_moves
        return first._replace(sends=sends, receives=receives, compared=(), sent=until[0], received=until[1])

    receives = tuple(chain.from_iterable(transfers(stage, received) for stage in range(count if only_moves else 1)))
    for stage in range(count):
        receives += () if only_moves else transfers(stage + 1, received)
        sends = transfers(stage, sent)
        instructions: list[RankInstruction | HostMessages] = [
            each
            for at, program in numbered
            for piece, r in program.active(stage)
            for each in program.copied(r, at, False, piece)
        ]
        if stage == 0 and local:
            instructions += [messages(sends, receives, 0), *local]
            sends = receives = ()
        instructions.append(messages(sends, receives, stage - lag + 2))
        for at, program in numbered:
            for piece, r in program.active(stage - lag + 1):
                instructions += program.copied(r, at, True, piece, streaming)
                instructions += program.combined(r, at, piece)
        stages.append(instructions)
        receives = ()
    return [*stages, [first._replace(compared=())]]
