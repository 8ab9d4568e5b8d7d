"""``Departures``: finds out that ranks of other hosts have left a group, and what they had decided before.

After a decision, all ranks that know it may end. A rank that was excluded, or not told, then finds only that nothing
listens at their places. So, when a group is made, each rank connects to each rank of other hosts, and both keep the
connection. Over it, the rank that was connected to sends each decision before it goes on with it, and nothing else. TCP
delivers this before the end of the connection, however the process ends, and also if the link was lost or the receiver
was stopped meanwhile. So an end of the connection without a decision proves that the rank has left, and has not gone
on. Neither silence nor a reset proves anything.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from ..connections.peer_requests import Peer, closed_after_fork
from ..connections.repeated_request import RepeatedRequest
from ..intra_host.registers import Decision, Registers
from ..transports import tcp
from .ballots import read_decided

MOST_RANKS: Final = 128  # of other hosts; a rank of a larger group makes no connections, to need few descriptors
_CONNECT_S: Final = 5.0  # how long making the connections may delay a new group
_PAUSE_S: Final = 0.02
_PART: Final = 1 << 16  # bytes to read at a time
_NEEDED: Final = 3  # of the latest decisions of a rank: another rank can miss one, and the one that then excludes it
_RESET: Final = struct.pack("ii", 1, 0)  # of SO_LINGER: the connection ends by a reset


class Departures:
    """The connections of one rank. One thread at a time calls ``connect``, ``tell`` and ``have_left``."""

    def __init__(self) -> None:
        self._lock, self._is_closed, self._has_told = threading.Lock(), False, False
        self._made: dict[int, socket.socket] = {}  # by rank: the connection of this rank to it
        self._lines: dict[int, bytes] = {}  # by rank: its latest decisions, each in a line
        self._accepted: dict[int, list[socket.socket]] = {}  # by rank: its connections to this rank

    def connect(self, peers: Mapping[int, Peer], token: str, own: int) -> None:
        """Connect to ranks of other hosts, and wait until all have answered, for at most ``_CONNECT_S``.

        ``token``: the token of the group. ``own``: the number of this rank.
        """
        if len(peers) > MOST_RANKS:
            return
        for rank, peer in peers.items():
            peer.keep = partial(self._keep, rank)
        request, until = {"what": "keep", "rank": own}, time.monotonic() + _CONNECT_S
        inquiry = RepeatedRequest({rank: [peer] for rank, peer in peers.items()}, token, request)
        with suppress(RuntimeError):  # too many threads
            while len(inquiry.found) < len(peers) and time.monotonic() < until:
                inquiry.read(_PAUSE_S)

    def _keep(self, rank: int, connection: socket.socket) -> None:
        """Keep a connection of this rank to another one, which keeps it, too."""
        with self._lock:
            if self._is_closed or rank in self._made:
                connection.close()
                return
            self._made[rank], self._lines[rank] = connection, b""
            _prepare(connection)

    def accept(self, rank: int, connection: socket.socket) -> None:
        """Keep a connection of another rank to this one. Raise a ``ConnectionError`` if it has missed a decision."""
        with self._lock:
            if self._is_closed or self._has_told:
                connection.close()
                raise ConnectionAbortedError("it has missed a decision, or the group is closed")
            self._accepted.setdefault(rank, []).append(connection)
            _prepare(connection)

    def tell(self, ranks: Iterable[int], number: int, decided: tuple[int, Decision]) -> None:
        """Send the decision of an agreement, and its ballot, to ranks. The caller goes on only if this returns.

        Raises:
          ValueError: the group is closed.
        """
        for rank in [*self._made]:  # so that no connection is ever full
            self._receive(rank)
        with self._lock:
            if self._is_closed:
                raise ValueError("the group is closed")
            self._has_told = True
            line = json.dumps([number, decided]).encode() + b"\n"
            for connection in (each for rank in ranks for each in self._accepted.get(rank, ())):
                sent = 0
                with suppress(OSError):  # such as the end of that rank
                    sent = connection.send(line)
                if sent < len(line):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def have_left(self, ranks: Iterable[int], number: int, registers: Registers) -> bool:
        """Return whether ranks have certainly left the group before they went on with a decision of an agreement.

        Write the decisions that they have sent to the registers. If this host has ruled out such a decision, it stays
        without one: the sender may have gone on.
        """
        result = True
        for rank in ranks:
            has_left = rank in self._made and self._receive(rank)
            lines = self._lines.get(rank, b"").splitlines(keepends=True)
            sent = read_decided(dict(json.loads(line) for line in lines if line.endswith(b"\n")).get(number))
            if sent is not None:
                registers.decide(number, *sent)
            result = result and has_left and sent is None
        return result

    def _receive(self, rank: int) -> bool:
        """Read what a rank has sent. Return whether its connection has ended without a failure."""
        connection = self._made[rank]
        while True:
            try:
                part = connection.recv(_PART)
            except BlockingIOError:
                return False
            except OSError:  # it is reported only once; afterwards, this looks like an end without a failure
                self._made.pop(rank, connection).close()
                return False
            if not part:
                return True
            self._lines[rank] = b"".join((self._lines[rank] + part).splitlines(keepends=True)[-_NEEDED:])

    def close(self) -> None:
        """End all connections, since this rank leaves the group."""
        with self._lock:
            self._is_closed = True
            for connection in (*self._made.values(), *(each for some in self._accepted.values() for each in some)):
                connection.close()
            self._made.clear()
            self._accepted.clear()


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(0.0)
    tcp.keep_alive(connection)
    closed_after_fork.add(connection)
