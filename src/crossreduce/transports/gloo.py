"""The gloo transport: messages between hosts through a ``ProcessGroupGloo``.

Input: addresses. Output: see ``base.Transport``. gloo keeps the connections; its errors are translated into built-in
exceptions. The caller creates the process group.
"""

from __future__ import annotations

import ctypes
import re
from datetime import timedelta
from typing import Any, Final, Self

import torch

FIRST_TAG: Final = 0x43520000  # users number their own messages from 0
_ABORT_TAG: Final = 0x4352FFFF
_OF_CONNECTIONS: Final = ("Connection", "pair closure", "Timed out", "Broken pipe", "gloo/transport")  # in errors


class GlooTransport:
    """Messages over the connections of a ``ProcessGroupGloo``."""

    def __init__(self, gloo: Any, store: Any = None) -> None:
        """Use ``gloo``, which may have other users at the same time, since their tags differ.

        ``store``: gloo's store, which is kept, since gloo does not keep one that is written in Python.
        """
        self._gloo, self._store, self._aborted = gloo, store, False

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> _GlooMessage:
        """Start to send ``nbytes`` to rank ``dst`` of the group."""
        return self._start(self._gloo.send, address, nbytes, dst, tag)

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> _GlooMessage:
        """Start to receive ``nbytes`` from rank ``src`` of the group."""
        return self._start(self._gloo.recv, address, nbytes, src, tag)

    def _start(self, start: Any, address: int, nbytes: int, peer: int, tag: int) -> _GlooMessage:
        assert 0 <= tag < _ABORT_TAG - FIRST_TAG, tag
        if not nbytes:
            return _GlooMessage(None, peer, self._gloo)
        # ``wait`` reports every failure, also that a message could not be started: after a failure gloo has closed all
        # connections of the group.
        if self._aborted:
            return _GlooMessage(ConnectionError("this rank has aborted the group"), peer, self._gloo)
        memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
        try:
            return _GlooMessage(start([memory], peer, FIRST_TAG + tag), peer, self._gloo)
        except RuntimeError as error:
            return _GlooMessage(_translated(error, peer), peer, self._gloo)

    def abort(self) -> None:
        """Make all messages of this rank fail: here at once, on the other ranks when they next wait."""
        self._aborted = True
        # ProcessGroupGloo.abort() does not end waits (torch 2.13). A wait that times out, however, closes all
        # connections of the group. So this waits a millisecond for a message that no rank sends; a wait for a rank
        # whose connection is closed already fails before that, and closes no other.
        for step in range(1, self._gloo.size()):
            other = (self._gloo.rank() + step) % self._gloo.size()
            try:
                self._gloo.recv([torch.empty(1, dtype=torch.uint8)], other, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return


class _GlooMessage:
    """A message. ``work``: gloo's unfinished operation; ``None``: it succeeded; or the error with which it failed."""

    def __init__(self, work: Any, peer: int, gloo: Any) -> None:
        self._work, self._peer, self._gloo = work, peer, gloo

    def wait(self, timeout_s: float) -> None:
        """Return when the memory may be used again. A timeout closes all connections of the group."""
        if self._work is None:
            return
        if isinstance(self._work, Exception):
            raise self._work
        try:
            # Less than a millisecond would become 0, for which gloo uses its own timeout.
            self._work.wait(timedelta(milliseconds=max(1, round(timeout_s * 1e3))))
        except RuntimeError as error:
            self._work = _translated(self._cause(error), self._peer)
            raise self._work from error
        self._work = None

    def _cause(self, error: RuntimeError) -> RuntimeError:
        """Return why a wait failed, if ``error`` says that it timed out.

        If the connection is lost while gloo begins to send, gloo (torch 2.13) lets the wait time out: in about 2 of 100
        processes killed during large messages. The next call gets the error for which gloo closed the connection.
        """
        if "Timed out" in str(error):
            try:
                self._gloo.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _ABORT_TAG)
            except RuntimeError as first:
                return error if "Application timeout" in str(first) else first
        return error


class GlooCollective:
    """A collective that gloo runs; see ``base.RunningCollective``."""

    _work: Any = None

    def begin(self, work: Any) -> Self:
        """Use ``work``, and return this object."""
        self._work = work
        return self

    def release(self) -> None:
        """Release the work, which references tensors; an error may still reference this object."""
        self._work = None

    def is_completed(self) -> bool:
        """Return whether it has succeeded or failed."""
        return bool(self._work.is_completed())

    def finish(self) -> None:
        """Raise the error of the completed collective; all errors of gloo have one class."""
        try:
            self._work.wait()
        except RuntimeError as error:
            if any(part in str(error) for part in _OF_CONNECTIONS):
                raise ConnectionError(str(error)) from error
            raise


def translated(error: RuntimeError) -> OSError | None:
    """Return an error of gloo about connections as a ``TimeoutError`` or ``ConnectionError``, and ``None`` for others.

    ``ConnectionAbortedError``: this rank closed its connections, by a timeout of another message.

    >>> text = "[pair.cc:553] Connection closed by peer [::1]:3. This is typically caused by a remote worker crashing."
    >>> translated(RuntimeError(text)), translated(RuntimeError("invalid tag"))
    (ConnectionError('Connection closed by peer [::1]:3'), None)
    """
    text = str(error)
    if not any(part in text for part in _OF_CONNECTIONS):
        return None
    kind = ConnectionAbortedError if "timeout caused pair closure" in text else ConnectionError
    return (TimeoutError if "Timed out" in text else kind)(re.sub(r"^\[.*?\] |\. This is .*", "", text))


def _translated(error: RuntimeError, peer: int) -> Exception:
    text = str(error)
    if "Timed out" in text:
        return TimeoutError(f"the message to or from rank {peer} did not complete in time")
    return ConnectionError(f"the connection to rank {peer} was lost: {text}")
