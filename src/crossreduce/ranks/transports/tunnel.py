"""``Tunnel``: carries the messages of any two ranks over a plug-in.

Input: the transport of another package. Output: a ``base.HostTransport`` with compiled connections. These write to and
read from local sockets; two threads for each other rank pass the bytes on to the plug-in, in messages of one tag.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from contextlib import suppress
from typing import Any, Final

from ... import kernels
from .base import HostTransport

_MOST_NBYTES: Final = 1 << 18  # of a message of the plug-in
_SIZE: Final = struct.Struct("<I")  # of the bytes that follow in a message
_TAG: Final = 0
_NO_LIMIT_S: Final = 1e8  # a plug-in notices by itself that a rank is lost
_LEAVE_S: Final = 1.0  # how long ``close`` waits until the plug-in has sent what this rank has sent


class Tunnel:
    """Messages over ``inner``, which it closes. See ``base.HostTransport``."""

    def __init__(self, inner: HostTransport) -> None:
        self.send, self.receive, self._inner = inner.send, inner.receive, inner
        self.reached, self.unreached = inner.reached, inner.unreached
        pairs = {rank: socket.socketpair() for rank in inner.reached}
        self.connections: Any = kernels.native().Connections(
            list(pairs), [near.detach() for near, _ in pairs.values()], _NO_LIMIT_S
        )
        self._senders = []
        for rank, (_, far) in pairs.items():
            both = [threading.Thread(target=run, args=(rank, far), daemon=True) for run in (self._send, self._receive)]
            self._senders.append(both[0])
            for each in both:
                each.start()

    def _send(self, rank: int, far: socket.socket) -> None:
        """Pass on what this rank sends, until it closes its connection. An empty message says so."""
        room, count = (ctypes.c_char * (_SIZE.size + _MOST_NBYTES))(), 1
        with suppress(OSError):
            while count:
                count = far.recv_into(memoryview(room)[_SIZE.size :])
                _SIZE.pack_into(room, 0, count)
                self._inner.send(ctypes.addressof(room), _SIZE.size + count, rank, _TAG).wait(_NO_LIMIT_S)

    def _receive(self, rank: int, far: socket.socket) -> None:
        """Pass on what another rank sends, until it leaves or is lost."""
        room, count = (ctypes.c_char * (_SIZE.size + _MOST_NBYTES))(), 1
        with suppress(OSError):
            while count:
                self._inner.receive(ctypes.addressof(room), len(room), rank, _TAG).wait(_NO_LIMIT_S)
                (count,) = _SIZE.unpack_from(room)
                far.sendall(memoryview(room)[_SIZE.size : _SIZE.size + count])
        with suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)  # ``_send`` may still use it; it is closed with the last reference

    def abort(self) -> None:
        """Make all messages of this rank fail, and soon also other ranks' messages with this one."""
        self.connections.abort()
        self._inner.abort()

    def close(self) -> None:
        """Tell the other ranks that this one has left, and close the sockets."""
        self.connections.close()
        for each in self._senders:
            each.join(_LEAVE_S)
        self._inner.close()
