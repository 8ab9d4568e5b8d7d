"""A rendezvous at a ``torch.distributed`` store.

Input: the store of a process group. Output: see ``transports.base.Rendezvous``. It waits by polling, so that Ctrl-C
ends a wait. It is used rarely, and not for data.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

import torch.distributed as dist

from ..errors import CollectiveTimeout, PeerLostError, message, rank_list

_CAUSE: Final = "cause"
_PAUSES_S: Final = (0.0002, 0.02)  # between queries, first and longest; a query of a local TCPStore takes 23 us


class StoreRendezvous:
    """A rendezvous of ``size`` ranks at keys of a store that no other code uses."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        """Use ``store`` (a ``PrefixStore`` of its own), and wait at most ``timeout_s`` seconds for other ranks."""
        # A connection of its own: calls on one connection run one after another, and a user's call may take minutes.
        self._store = store.clone() if hasattr(store, "clone") else store
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._calls = 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks; see ``Rendezvous``. PeerLostError: the store cannot be reached."""
        self._calls += 1
        keys = [f"{self._calls}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], b"." + payload)  # some stores do not distinguish empty from missing values
            self._wait_for(keys)
            found = [self._store.get(key)[1:] for key in keys]
            if self._calls > 1:  # every rank has begun this call, so every rank has read the previous one's payloads
                with contextlib.suppress(RuntimeError):  # an old FileStore cannot delete
                    self._store.delete_key(f"{self._calls - 1}/{self.rank}")
        except dist.DistError as error:
            problem = "the store of this group's rendezvous cannot be reached."
            remedy = "check the process that runs it: rank 0, or the torchrun that started the ranks"
            raise PeerLostError.of(problem, str(error), remedy) from error
        return found

    def _wait_for(self, keys: list[str]) -> None:
        deadline, pause = time.monotonic() + self.timeout_s, _PAUSES_S[0]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if late:
                    problem = f"{rank_list(late)} did not reach the rendezvous within {self.timeout_s:g} s."
                    remedy = "start all ranks; the same calls in the same order on all of them; a longer timeout"
                    raise CollectiveTimeout(message(problem, f"rank {self.rank} of {self.size} waited", remedy), late)
                return
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])

    def publish_abort(self, cause: bytes) -> None:
        """Store why the group was aborted; the first reason is kept."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_CAUSE, "", cause)

    def abort_cause(self) -> bytes | None:
        """Return the stored reason, or ``None``."""
        try:
            return bytes(self._store.get(_CAUSE)) if self._store.check([_CAUSE]) else None
        except RuntimeError:
            return None
