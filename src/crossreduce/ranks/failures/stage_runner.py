"""``StageRunner``: executes the stages of a rank's ops, and checks the other ranks while it waits for them.

Input: compiled rank programs. Output: whether all ranks of the host made the same call, or the error of a failure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...errors import ReductionError
from ..intra_host.shared_memory import BROKEN, DONE, NO_MEMORY, UNREADABLE, WAITING, GroupAborted, RankMemory, WaitTimer
from .failure_detector import FailureDetector


class StageRunner:
    """Executes stages in ``memory``.

    Like all parts of a group, it does not refer to the group. Such a reference would be a cycle. Then the garbage
    collector could close an unreferenced group at any time, and a Ctrl-C at that moment would be lost.
    """

    def __init__(self, memory: RankMemory, detector: FailureDetector) -> None:
        self.memory, self._detector = memory, detector
        self._timer: WaitTimer | None = None

    def begin(self, program: Any, addresses: Sequence[int], text: bytes, until: int) -> bool:
        """Begin an op and execute its first ``until`` stages. Return whether all ranks of the host made the same call.

        Raises:
          GroupAborted: a rank of this host has aborted the group.
          ReductionError: other ranks cannot take part.
          MemoryError: the kernels cannot allocate working memory.
        """
        return self.start(program, addresses, text, until) == DONE

    def start(self, program: Any, addresses: Sequence[int], text: bytes, until: int) -> int:
        """Begin an op like ``begin``. Return the outcome as ``settle`` does."""
        self._timer = None
        return self.settle(self.memory.begin(program, addresses, text, until), until)

    def reach(self, until: int) -> None:
        """Execute the next stages of the op until its first ``until`` are executed. Errors are those of ``begin``."""
        self.complete(self.memory.advance(until), until)

    def complete(self, outcome: int, until: int) -> bool:
        """Continue an op whose execution has stopped with ``outcome``. Result and errors are those of ``begin``."""
        return self.settle(outcome, until) == DONE

    def settle(self, outcome: int, until: int) -> int:
        """Continue an op like ``complete``. Return DONE, MISMATCH, ELSEWHERE or DIFFERS."""
        while outcome == WAITING:
            self._timer = self._timer or WaitTimer(self._detector.warn_after_s())
            self._detector.check(self._timer)
            outcome = self.memory.advance(until)
        if outcome == BROKEN:
            raise GroupAborted
        if outcome == UNREADABLE:
            for _ in range(100):  # a process that dies releases its memory before its lock
                self._detector.require_alive(self.memory.host)
                time.sleep(0.01)
            problem = "this rank can no longer read the memory of another rank's process (process_vm_readv)."
            remedy = "do not change the user or the rights of a rank while the group is used"
            raise ReductionError.of(problem, f"rank {self.memory.host[self.memory.place]}", remedy)
        if outcome == NO_MEMORY:
            raise MemoryError("the kernels could not allocate working memory")
        return outcome
