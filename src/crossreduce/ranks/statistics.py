"""``CountedMember``: a rank whose calls are counted, and its file of metrics.

Input: the counters in shared memory. Output: ``Stats``, also after the group is closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event

from ..errors import ContextError
from ..observe.counters import Stats, rank_counts
from . import metrics
from .membership import Hosts, Member
from .transports.base import Rendezvous, Transport


class CountedMember(Member):
    """One rank of a group with statistics; for arguments and errors see ``Communicator``."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        transport: Transport | Callable[[Event, Hosts], Transport] | None,
        name: str,
        timeout_s: float,
        global_ranks: Sequence[int] | None,
        overlapping: bool,
    ) -> None:
        self._pid = os.getpid()
        self._final: Stats | None = None  # the statistics when the group was closed
        super().__init__(rendezvous, transport, name, timeout_s, global_ranks, overlapping)
        self._metrics = metrics.metrics_file(name, self.global_ranks[self.rank])
        self._writer = None if self._metrics is None else metrics.writers.add(self._write_metrics)

    def stats(self) -> Stats:
        """Return what this rank has done in the group so far, or until it was closed. Any thread may call this.

        Raises:
          ContextError: this process was forked from the rank's.
        """
        if os.getpid() != self._pid:
            problem = f'group "{self.name}" belongs to process {self._pid}, from which this process was forked.'
            raise ContextError.of(problem, f"process {os.getpid()}", "call stats() in the rank's process")
        with suppress(ValueError):  # another thread has closed the memory, and stored the final statistics before
            if self._final is None:
                counts = rank_counts(self.memory.counts())
                waits = {self.global_ranks[self.host[place]]: wait for place, wait in counts.waits.items()}
                return Stats(self.name, self.global_ranks[self.rank], self.size, counts.collectives, waits)
        assert self._final is not None
        return self._final

    def _end_statistics(self) -> None:
        """Store the final statistics and write the last file; called before the memory is closed."""
        self._final = self.stats()
        if self._writer is not None:
            metrics.writers.remove(self._writer)
            self._writer = None
            if self._metrics is not None:
                self._metrics.close(self.stats)

    def _write_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.write(self.stats)
