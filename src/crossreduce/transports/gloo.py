"""Messages between hosts through a gloo process group.

In: addresses.  Out: a ``processes.contract.Wire``. Knows no ops; gloo brings the connections, and its errors become
built-in ones here.
"""

from __future__ import annotations

import contextlib
import ctypes
from datetime import timedelta
from typing import Any, Final

import torch

FIRST_TAG: Final = 0x43520000  # users number their own messages from 0
_ABORT_TAG: Final = 0x4352FFFF


class GlooWire:
    """Messages over the connections of a ``ProcessGroupGloo``."""

    def __init__(self, gloo: Any) -> None:
        """Use ``gloo``, also beside other users of it: their tags are others."""
        self._gloo = gloo
        self._aborted = False

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> _Message:
        """Start to send ``nbytes`` to rank ``dst`` of the group."""
        return self._start(self._gloo.send, address, nbytes, dst, tag)

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> _Message:
        """Start to receive ``nbytes`` from rank ``src`` of the group."""
        return self._start(self._gloo.recv, address, nbytes, src, tag)

    def _start(self, start: Any, address: int, nbytes: int, peer: int, tag: int) -> _Message:
        if not 0 <= tag < _ABORT_TAG - FIRST_TAG:
            raise AssertionError(f"tag {tag}")
        if not nbytes:
            return _Message(None, peer)
        # A failure to start is one to be found by who waits: gloo closes all connections at once.
        if self._aborted:
            return _Message(ConnectionError("this rank has hung up"), peer)
        held = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
        try:
            return _Message(start([held], peer, FIRST_TAG + tag), peer)
        except RuntimeError as error:
            return _Message(_translated(error, peer), peer)

    def abort(self) -> None:
        """Make all messages under way fail, on this rank at once and on its peers as soon as they look."""
        self._aborted = True
        # ProcessGroupGloo.abort() leaves waits alone (torch 2.13). A wait that takes too long, however, closes every
        # connection of the group; so wait a millisecond for what nobody sends.
        with contextlib.suppress(RuntimeError):
            other = (self._gloo.rank() + 1) % self._gloo.size()
            self._gloo.recv([torch.empty(1, dtype=torch.uint8)], other, _ABORT_TAG).wait(timedelta(milliseconds=1))


class _Message:
    """A message under way, or what became of it: ``None``, or an error."""

    def __init__(self, work: Any, peer: int) -> None:
        self._work = work
        self._peer = peer

    def wait(self, timeout_s: float) -> None:
        """Return when the memory may be used again; a timeout closes all of the group's connections.

        Raises:
          ConnectionError: the other side is gone.
          TimeoutError: it took too long.
        """
        if self._work is None:
            return
        if isinstance(self._work, Exception):
            raise self._work
        try:
            # Less than a millisecond would be 0, which gloo takes for its own timeout.
            self._work.wait(timedelta(milliseconds=max(1, round(timeout_s * 1e3))))
        except RuntimeError as error:
            self._work = _translated(error, self._peer)
            raise self._work from error
        self._work = None


def _translated(error: RuntimeError, peer: int) -> Exception:
    text = str(error)
    if "Timed out" in text:
        return TimeoutError(f"no message to or from rank {peer} in time")
    return ConnectionError(f"the connection to rank {peer} is gone: {text}")
