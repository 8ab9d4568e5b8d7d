"""``Statistics``: the counters of one rank in a group, and its file of metrics.

Input: the counters in shared memory. Output: ``Stats``, also after the group is closed.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ..errors import ContextError
from ..observe.counters import Stats, rank_counts
from . import metrics
from .connections.peers import Membership
from .intra_host.shared_memory import RankMemory


class Statistics:
    """The statistics of one rank, which any thread may read."""

    def __init__(self, members: Membership, memory: RankMemory) -> None:
        self._members, self._memory, self._pid = members, memory, os.getpid()
        self._final: Stats | None = None  # the statistics when the group was closed
        self._file = metrics.metrics_file(members.name, members.own)
        self._writer = None if self._file is None else metrics.writers.add(self._write)

    def read(self) -> Stats:
        """Return what the rank has done so far, or until ``close``.

        Raises:
          ContextError: this process was forked from the rank's.
        """
        members = self._members
        if os.getpid() != self._pid:
            problem = f'group "{members.name}" belongs to process {self._pid}, from which this process was forked.'
            raise ContextError.of(problem, f"process {os.getpid()}", "call stats() in the rank's process")
        with suppress(ValueError):  # another thread has closed the memory, and stored the final statistics before
            if self._final is None:
                counts = rank_counts(self._memory.counts())
                waits = {members.global_ranks[members.host[place]]: wait for place, wait in counts.waits.items()}
                return Stats(members.name, members.own, members.size, counts.collectives, waits)
        assert self._final is not None
        return self._final

    def close(self) -> None:
        """Keep the final statistics, and write the file a last time; called before the memory is closed."""
        self._final = self.read()
        if self._writer is not None and self._file is not None:
            metrics.writers.remove(self._writer)
            self._writer = None
            self._file.close(self.read)

    def _write(self) -> None:
        if self._file is not None:
            self._file.write(self.read)
