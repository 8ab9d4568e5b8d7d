"""A ``torch.distributed`` store as the place where the ranks of a group meet.

In: the store that a group came with.  Out: a ``processes.contract.Rendezvous``. Waits by asking again and again, so
that Ctrl-C is heard; meetings are few, and no data goes this way.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

import torch.distributed as dist

from ..errors import CollectiveTimeout, PeerLostError, message
from ..ranks.diagnostics import named

_CAUSE: Final = "cause"
_PAUSES_S: Final = (0.0002, 0.02)  # one question takes 23 us of a TCPStore on the same host


class StoreRendezvous:
    """Where ``size`` ranks meet: at the keys of a store that is theirs alone."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        """Meet at ``store`` (a ``PrefixStore`` of the group's); wait ``timeout_s`` seconds at most for others."""
        # A connection of its own: calls on one connection take turns, and a user's may block for minutes.
        self._store = store.clone() if hasattr(store, "clone") else store
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._meetings = 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in the order of ranks.

        Raises:
          CollectiveTimeout: some did not come in time.
          PeerLostError: the store is gone.
        """
        self._meetings += 1
        keys = [f"{self._meetings}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], b"." + payload)  # not every store tells an empty value from none
            self._await(keys)
            found = [self._store.get(key)[1:] for key in keys]
            if self._meetings > 1:  # whoever is here has read all of the meeting before
                with contextlib.suppress(RuntimeError):  # an old FileStore deletes nothing
                    self._store.delete_key(f"{self._meetings - 1}/{self.rank}")
        except dist.DistError as error:
            problem = "the store at which the ranks of this group meet is gone."
            remedy = "look at the process that keeps it: rank 0, or the torchrun that started the ranks"
            raise PeerLostError(message(problem, str(error), remedy)) from error
        return found

    def _await(self, keys: list[str]) -> None:
        deadline, pause = time.monotonic() + self.timeout_s, _PAUSES_S[0]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if late:
                    problem = f"{named(late)} did not come to where the group meets within {self.timeout_s:g} s."
                    remedy = "start all ranks; the same calls in the same order on all of them; a longer timeout"
                    raise CollectiveTimeout(message(problem, f"rank {self.rank} of {self.size} waited", remedy), late)
                return
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])

    def announce(self, cause: bytes) -> None:
        """Put up why the group is broken; the first cause stands."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_CAUSE, "", cause)

    def heard(self) -> bytes | None:
        """Return the cause that was put up, or ``None``."""
        try:
            return bytes(self._store.get(_CAUSE)) if self._store.check([_CAUSE]) else None
        except RuntimeError:
            return None
