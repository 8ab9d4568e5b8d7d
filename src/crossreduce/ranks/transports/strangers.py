"""``Strangers``: connections of programs that have not proved yet that they know a key.

Input: connections that were accepted. Output: which one to close if there are too many. One program with many
connections cannot take the places of ranks on other hosts, and no program can foresee which connection is closed.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections import Counter
from ipaddress import ip_address
from typing import Final

MOST_UNKNOWN: Final = 64  # connections of unknown programs that are open at once


class Strangers:
    """At most ``most`` connections. One thread at a time uses this."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: dict[socket.socket, tuple[bytes, float]] = {}  # source and time, the oldest first
        self._counts = Counter[bytes]()  # of the connections of each source

    def add(self, connection: socket.socket, address: str) -> socket.socket | None:
        """Add a connection from an address. If there were enough before, remove one of them, and return it.

        It is drawn at random from those of the sources that have the most connections.
        """
        dropped = None
        if len(self._found) >= self._most:
            most = max(self._counts.values())
            dropped = secrets.choice(
                [each for each, (source, _) in self._found.items() if self._counts[source] == most]
            )
            self.discard(dropped)
        source = _source(address)
        self._found[connection] = source, time.monotonic()
        self._counts[source] += 1
        return dropped

    def discard(self, connection: socket.socket) -> None:
        """Remove a connection, if it is there."""
        if connection in self._found:
            source, _ = self._found.pop(connection)
            self._counts[source] -= 1
            if not self._counts[source]:
                del self._counts[source]

    def pop(self, before: float) -> socket.socket | None:
        """Remove the oldest connection if it was added ``before`` a time, and return it. If there is none: ``None``."""
        connection, (_, at) = next(iter(self._found.items()), (None, (b"", before)))
        if connection is None or at >= before:
            return None
        self.discard(connection)
        return connection


def _source(address: str) -> bytes:
    """Return the part of an address that a program cannot change easily.

    >>> _source("10.0.0.1"), _source("::ffff:10.0.0.1"), _source("127.3.0.1") == _source("127.0.0.1")
    (b'\\n\\x00\\x00\\x01', b'\\n\\x00\\x00\\x01', True)
    """
    parsed = ip_address(address.partition("%")[0])
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return parsed.packed[: 1 if parsed.is_loopback else 8]
