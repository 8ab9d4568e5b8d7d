"""``AuthenticatedChannel``: messages over a connection between two processes that both know a key.

Input: a connected socket, and the key. Output: messages in JSON. The process that connects sends a hello: a random
number, and a proof that it knows the key. The process that listens answers with another random number and a proof. The
first process checks this proof, and sends a second one of its own. All proofs but that of the hello, also those of
messages, depend on both numbers, on the sender, and on the position in the connection. So a recorded hello gets an
answer, but no other recorded data does, and no message is sent to a program without the key. Nothing is encrypted.
If the first process has connected directly, the proof of the hello depends on the address and port to which it has
connected. So a program that listens elsewhere, and passes on all bytes, is refused.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import struct
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

from ..transports.addresses import end_text

_NONCE: Final = 16  # bytes, 128 bits
_DIGEST: Final = 16  # bytes, 128 bits
_MOST_BYTES: Final = 1 << 20  # of a message; longer ones are refused before memory is reserved
_LENGTH: Final = struct.Struct("<I")
_CONNECTS, _LISTENS = b"connects", b"listens"
HELLO_NBYTES: Final = _NONCE + _DIGEST


class AuthenticatedChannel:
    """Messages over a connection. Only one thread at a time may send, and only one may receive.

    ``numbers``: the random number of the process that connects, then that of the process that listens. ``own`` and
    ``other``: the roles of this process and of the other one, ``_CONNECTS`` or ``_LISTENS``.
    """

    def __init__(self, connection: socket.socket, key: bytes, numbers: bytes, own: bytes, other: bytes) -> None:
        self._connection, self._own, self._other = connection, own, other
        self._key = blake2b(numbers, key=key).digest()
        self._sent = self._received = 0
        self._begun = bytearray()  # what has arrived of the next message

    @property
    def connection(self) -> socket.socket:
        """The connection, for a relay, which forwards all bytes that follow."""
        return self._connection

    def send(self, content: dict[str, Any]) -> None:
        """Send a message."""
        body = json.dumps(content).encode()
        self._connection.sendall(_LENGTH.pack(len(body)) + self.next_proof(body) + body)

    def receive(self, deadline: float = math.inf) -> dict[str, Any]:
        """Return the next message. All of it must arrive before ``deadline``, a time of ``time.monotonic()``.

        After a ``TimeoutError``, this may be called again, and continues with the same message.

        Raises:
          ValueError: the data is not the next message that the other process has sent.
          OSError, EOFError: the connection has ended, or the deadline has passed.
        """
        begun = self._begun
        _read(self._connection, _LENGTH.size, deadline, begun)
        (length,) = _LENGTH.unpack_from(begun)
        if length > _MOST_BYTES:
            raise ValueError("the message is too long")
        _read(self._connection, _LENGTH.size + _DIGEST + length, deadline, begun)
        proof, body = bytes(begun[_LENGTH.size :][:_DIGEST]), bytes(begun[_LENGTH.size + _DIGEST :])
        begun.clear()
        if not self.is_next(proof, body):
            raise ValueError("the proof of the message is wrong")
        content: dict[str, Any] = json.loads(body)
        return content

    def next_proof(self, body: bytes = b"") -> bytes:
        """Return the proof of the next message that is sent, and count this message."""
        self._sent += 1
        return self._proof(self._own, self._sent, body)

    def is_next(self, proof: bytes, body: bytes = b"") -> bool:
        """Return whether a proof is that of the next message that is received, and count this message."""
        self._received += 1
        return secrets.compare_digest(proof, self._proof(self._other, self._received, body))

    def _proof(self, sender: bytes, position: int, body: bytes) -> bytes:
        """Return a proof that the process with the role ``sender`` knows the key and has sent ``body``."""
        about = sender + position.to_bytes(8, "little")
        return blake2b(about + body, key=self._key, digest_size=_DIGEST).digest()


def open_channel(
    connection: socket.socket,
    key: bytes,
    deadline: float,
    wait: Callable[[], None] = lambda: None,
    *,
    is_direct: bool = False,
) -> AuthenticatedChannel:
    """Return a channel over a connection that this process has made. ``wait`` is called before it reads the answer.

    ``is_direct``: whether the process that listens has the address to which this one has connected. If not, there may
    be a relay, or a network that translates addresses.

    Raises:
      ValueError: the program that listens does not know the key.
      OSError, EOFError: the connection has ended, or the deadline has passed, as for ``AuthenticatedChannel.receive``.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own = secrets.token_bytes(_NONCE)
    end = end_text(connection.getpeername()) if is_direct else ""
    connection.sendall(own + _hello_proof(key, own, end))
    wait()
    channel = AuthenticatedChannel(connection, key, own + _read(connection, _NONCE, deadline), _CONNECTS, _LISTENS)
    if not channel.is_next(_read(connection, _DIGEST, deadline)):
        raise ValueError("the program that listens does not know the key")
    connection.sendall(channel.next_proof())
    return channel


def is_hello(hello: bytes, key: bytes, end: str) -> bool:
    """Return whether a process that knows the key has sent these ``HELLO_NBYTES`` bytes, now or earlier.

    ``end``: the ``end_text`` of this process's end of the connection.
    """
    return any(secrets.compare_digest(hello[_NONCE:], _hello_proof(key, hello[:_NONCE], each)) for each in (end, ""))


def accept_channel(connection: socket.socket, key: bytes, hello: bytes, deadline: float) -> AuthenticatedChannel:
    """Return a channel over a connection that another program has made, and over which it has sent a valid ``hello``.

    For errors see ``open_channel``.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own = secrets.token_bytes(_NONCE)
    channel = AuthenticatedChannel(connection, key, hello[:_NONCE] + own, _LISTENS, _CONNECTS)
    connection.sendall(own + channel.next_proof())
    if not channel.is_next(_read(connection, _DIGEST, deadline)):
        raise ValueError("the program that connects does not know the key")
    return channel


def _hello_proof(key: bytes, number: bytes, end: str = "") -> bytes:
    return blake2b(number + end.encode(), key=key, digest_size=_DIGEST, person=b"hello").digest()


def _read(connection: socket.socket, count: int, deadline: float, begun: bytearray | None = None) -> bytes:
    """Return the next ``count`` bytes. Errors are those of ``AuthenticatedChannel.receive``.

    ``begun``: the first of them, which arrived before. The others are added to it.
    """
    received = bytearray() if begun is None else begun
    while len(received) < count:
        left_s = None
        if deadline < math.inf and (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left_s)  # set again for every part, since each ``recv`` may take the whole timeout
        part = connection.recv(count - len(received))
        if not part:
            raise EOFError
        received += part
    return bytes(received)
