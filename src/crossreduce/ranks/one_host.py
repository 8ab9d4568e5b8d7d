"""The engine for groups whose ranks are all on one host: compiled rank programs in shared memory.

Input: a collective, its size and numbers. Output: an executable, which can run any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..ops import Numbers
from ..packing import itemsize
from .collectives import host_collective
from .instructions import native_program
from .programs import rank_stages
from .shared_memory import StageRunner


class RankExecutable(Protocol):
    """A compiled call of one rank."""

    @property
    def stages(self) -> int:
        """The number of stages."""

    def run(self, addresses: tuple[int, ...], runner: StageRunner, timeout_s: float) -> bool:
        """Run the call; return whether all ranks of the group made the same call. If not, nothing was written.

        Args:
          addresses: the caller's buffers, numbered as in ``host_collective``.
          runner: executes the stages.
          timeout_s: how long to wait for a message of another host.
        Raises:
          GroupAborted, PeerDisconnected, PeerTimeout, ReductionError: other ranks cannot take part.
        """


class RankEngine(Protocol):
    """Compiles the calls of one rank, as ``engines.base.Engine`` does for the devices of one process."""

    def supports(self, collective: str) -> bool:
        """Return whether this engine runs a collective."""

    def compile(self, collective: str, size: int, numbers: Numbers, root: int | None, text: bytes) -> RankExecutable:
        """Return the executable of a call; callers cache it.

        Args:
          collective: one that the engine supports; "": none, the ranks only compare their calls.
          size: elements of each array.
          numbers: how values are computed.
          root: the root's rank, of collectives that have one.
          text: describes the call; all ranks must pass the same.
        """


class OneHostExecutable(NamedTuple):
    """A native ``RankProgram`` with its number of stages and the text of the call. See ``RankExecutable``."""

    program: Any
    stages: int
    text: bytes

    def run(self, addresses: tuple[int, ...], runner: StageRunner, timeout_s: float) -> bool:  # noqa: ARG002
        """Run the call."""
        return runner.begin(self.program, addresses, self.text, self.stages)


class OneHostEngine:
    """See ``RankEngine``. ``rank`` is one of the ``ranks`` ranks of a host."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def supports(self, collective: str) -> bool:  # noqa: ARG002
        """Return ``True``: every collective can run."""
        return True

    def compile(self, collective: str, size: int, numbers: Numbers, root: int | None, text: bytes) -> OneHostExecutable:
        """Return the executable of a call."""
        stages: Sequence[Any] = [[], []]  # one barrier, which compares the calls
        if collective:
            found = host_collective(collective, self._ranks, root, size * itemsize(numbers.dtype))
            stages = rank_stages(found.program, found.inputs, found.outputs, size, numbers, self._rank)
        return OneHostExecutable(native_program(stages), len(stages), text)
