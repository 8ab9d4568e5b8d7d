"""``Statistics``: the counters of one rank in a group, and their metrics file.

Input: the counters in shared memory. Output: ``Stats``, also after the group is closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import ContextError
from . import metrics
from .counters import Stats, rank_counts


class Statistics:
    """The statistics of one rank, which any thread may read.

    Args:
      group: the group's name.
      rank: the rank's number in messages.
      size: the number of ranks in the group.
      host: the numbers, in messages, of the ranks of its host, in the order of their places in shared memory.
      read_counts: returns the counters in shared memory, for ``rank_counts``; raises ``ValueError`` if it is closed.
    """

    def __init__(self, group: str, rank: int, size: int, host: tuple[int, ...], read_counts: Callable[[], Any]) -> None:
        self._group, self._rank, self._size, self._host, self._read_counts = group, rank, size, host, read_counts
        self._pid = os.getpid()
        self._final: Stats | None = None  # the statistics at the time when the group was closed
        self._file = metrics.metrics_file(group, rank)
        self._writer = None if self._file is None else metrics.writers.add(self._write)

    def read(self) -> Stats:
        """Return the rank's statistics until now, or until ``close``.

        Raises:
          ContextError: this process was forked from the rank's process.
        """
        if os.getpid() != self._pid:
            problem = f'group "{self._group}" belongs to process {self._pid}, from which this process was forked.'
            raise ContextError.of(problem, f"process {os.getpid()}", "call stats() in the rank's process")
        with suppress(ValueError):  # raised if another thread has closed the memory, after it set ``_final``
            if self._final is None:
                counts = rank_counts(self._read_counts())
                waits = {self._host[place]: wait for place, wait in counts.waits.items()}
                return Stats(self._group, self._rank, self._size, counts.collectives, waits)
        assert self._final is not None
        return self._final

    def close(self) -> None:
        """Store the final statistics, and write the file a last time. Call this before the memory is closed."""
        self._final = self.read()
        if self._writer is not None and self._file is not None:
            metrics.writers.remove(self._writer)
            self._writer = None
            self._file.close(self.read)

    def _write(self) -> None:
        if self._file is not None:
            self._file.write(self.read)
