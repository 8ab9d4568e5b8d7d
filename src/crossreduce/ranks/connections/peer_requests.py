"""Requests from rank to rank, which do not depend on the store of the rendezvous, nor on any other single rank.

Input: requests of other ranks, as JSON. Output: the answers of the functions that are registered for groups. Each
process has one listening socket and one thread, from its first group to the end of its last one. It has another socket
at the loopback address for groups that meet there. Both ends of a connection prove that they know the socket's key,
which is sent only to the ranks of the process's groups.

If the link between two hosts is lost, their processes reach each other through a relay: a process of a third host
forwards the bytes of the connection. The two processes at its ends authenticate each other as on a direct connection.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from ..transports import tcp
from ..transports.addresses import addresses, machine, reachable
from . import shortage
from .channel import AuthenticatedChannel, open_channel
from .listener import Listener

ANSWER_S: Final = 1.0  # how long an answer may take; a host that takes longer is asked again
_DIGEST: Final = 16  # bytes, 128 bits
_PART: Final = 1 << 16  # bytes that a relay forwards at a time

Json = Any
Answer = Callable[[dict[str, Json]], dict[str, Json]]


class Place(NamedTuple):
    """Where a process listens: its addresses, in the order in which to try them, its key, and its ``machine``."""

    addresses: tuple[str, ...]
    port: int
    key: str
    machine: str = ""

    @classmethod
    def read(cls, given: Sequence[Json]) -> Place:
        """Return a place that was sent as JSON. Raise a ``TypeError`` or a ``ValueError`` if this is not a place."""
        addresses, port, key, where = given
        if not isinstance(addresses, (list, tuple)) or not all(isinstance(each, str) for each in [where, *addresses]):
            raise TypeError("the addresses are not a list of str")
        if type(port) is not int or not 0 < port < 1 << 16 or len(bytes.fromhex(key)) != _DIGEST:
            raise ValueError("the port or the key is not valid")
        return cls(tuple(addresses), port, bytes.fromhex(key).hex(), where)


class Successor(NamedTuple):
    """The group that has replaced an earlier one: its token, and the agreement that has formed it.

    ``number``: the number of that agreement. ``decision``: the result of ``Registers.decision`` for it.
    """

    token: str
    number: int
    decision: Json


class Ended(Exception):  # noqa: N818 - internal: callers do not treat it as an error
    """The other process has ended: its system has refused a connection, since nothing listens at its place."""


class _Contact:
    """A listening socket of this process, at one address, or at all if ``address`` is "". Groups register by token."""

    def __init__(self, address: str) -> None:
        self.process = os.getpid()
        self.key = secrets.token_bytes(_DIGEST)
        self.answers: dict[str, Answer] = {}
        self.joining = 0  # groups that are being made
        self.listener = Listener(self.key, self._answer, address=address)
        self.place = Place((address,) if address else tuple(addresses()), self.listener.port, self.key.hex(), machine())

    def _answer(self, channel: AuthenticatedChannel) -> None:
        """Answer the request of a connection, or become the relay of this connection."""
        request = channel.receive(time.monotonic() + ANSWER_S)
        token = str(request.pop("group", ""))
        answer = self.answers.get(token)
        content = answer(request) if answer else redirection(token, request)
        if keep := content.pop("keep", None):
            keep(channel.connection.dup())
            content["kept"] = True
        if "addresses" in content:  # this process is to be a relay
            _pass_on(channel, content["addresses"], int(request["port"]), is_known=content["known"])
        else:
            channel.send(content)


_lock = threading.Lock()
_open: dict[str, _Contact] = {}  # by address
_successors: dict[str, Successor] = {}  # by the tokens of the groups that they have replaced
_MOST_SUCCESSORS: Final = 4096
# Connections that a forked process closes: while its copy is open, the other process does not notice their end.
closed_after_fork: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def listen(address: str = "") -> Place:
    """Listen until ``unregister`` ends the last group of this process at that address. Return the process's place.

    ``address``, here and below: the address of this host at which to listen. "" means all its addresses. If this
    process cannot listen there, an ``OSError`` is raised.
    """
    with _lock:
        if address not in _open:
            _open[address] = _Contact(address)
        _open[address].joining += 1
        return _open[address].place


def register(token: str, answer: Answer, address: str = "") -> None:
    """Let ``answer`` answer the requests to the group ``token``."""
    with _lock:
        _open[address].answers[token] = answer
        _open[address].joining -= 1


def unregister(token: str, successor: Successor | None = None, address: str = "") -> None:
    """End a group's use of ``listen``. The process stops listening at an address when its last group there ends.

    ``token``: the token of the group, or "" if it did not register. ``successor``: the group in which this process
    continues. The answers to later requests name it.
    """
    with _lock:
        if successor is not None:
            _successors[token] = successor
            if len(_successors) > _MOST_SUCCESSORS:
                del _successors[next(iter(_successors))]
        contact = _open.get(address)
        if contact is not None and contact.process == os.getpid():
            if contact.answers.pop(token, None) is None:
                contact.joining -= 1
            if not contact.answers and not contact.joining:
                del _open[address]
                contact.listener.close()


def redirection(token: str, request: dict[str, Json]) -> dict[str, Json]:
    """Return the answer to a request to a group that this process has left, or was never in: see ``Agreements.answer``.

    If the group has a successor, the answer is its decision, or else the token of the latest successor.
    """
    successor = _successors.get(token)
    if successor is None:
        return {"unknown": True}
    if request["what"] in ("result", "status") and request["number"] == successor.number:
        return {"decided": successor.decision, "arrived": {}, "late": []}
    while (later := _successors.get(successor.token)) is not None:
        successor = later
    return {"moved": successor.token}


def _pass_on(channel: AuthenticatedChannel, addresses: Sequence[str], port: int, *, is_known: bool) -> None:
    """Connect to another process as a relay, and forward all bytes in both directions until either connection ends.

    ``is_known``: whether the host of that process was reached at these addresses. If not, the addresses may belong to
    another host, so a refused connection does not mean that the process has ended.
    """
    incoming, refused = channel.connection, False
    for address in addresses:
        try:
            onward = socket.create_connection((address, port), ANSWER_S / len(addresses))
        except ConnectionRefusedError:
            refused = is_known
        except OSError:
            continue
        else:
            break
    else:
        channel.send({"refused": refused})
        return
    closed_after_fork.add(onward)
    with onward:
        channel.send({"connected": True})
        pairs = {incoming.fileno(): (incoming, onward), onward.fileno(): (onward, incoming)}
        readable = select.poll()
        for source, _ in pairs.values():
            readable.register(source, select.POLLIN)
            tcp.keep_alive(source)
            source.settimeout(None)
        while True:
            for descriptor, _ in readable.poll():
                source, target = pairs[descriptor]
                part = source.recv(_PART)
                if not part:
                    return
                target.sendall(part)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _open.clear()
    for each in list(closed_after_fork):
        each.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Peer:
    """Another process, to which this one sends requests.

    ``known``: an address at which its host was reached, or "". Its other addresses may belong to other hosts, too.
    ``rank``: its number in the group, by which a relay finds it, or -1. ``relay``: the process through which a process
    of its host has answered, if none has answered directly since. ``reached_at``: when it has last answered directly.
    ``refused``: whether nothing listened at any of its addresses when it was last asked. ``keep``: called with a
    copy of a connection that the process keeps open; see ``Departures``.
    """

    def __init__(self, place: Place, known: str = "", rank: int = -1) -> None:
        self.place, self.known, self.rank = place, known, rank
        self.relay: Peer | None = None
        self.reached_at, self.refused = -math.inf, False
        # While there is a relay, direct requests are sent only after this time; see ``RepeatedRequest``.
        self.tried_until = -math.inf
        self.keep: Callable[[socket.socket], None] | None = None

    def ask(self, token: str, request: dict[str, Json], timeout_s: float = ANSWER_S) -> dict[str, Json] | None:
        """Return the answer to a request to a group, or ``None`` if it does not arrive in time.

        Raises:
          Ended: the process has ended.
        """
        deadline = time.monotonic() + timeout_s
        try:
            others = [each for each in reachable(self.place.addresses, self.place.machine) if each != self.known]
        except OSError as error:
            shortage.note(error)
            others = []
        self.refused = bool(self.known or others)
        for address in [self.known, *others] if self.known else others:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.refused = False
                break
            limit_s = left_s if address == self.known else min(left_s, timeout_s / 4)  # others may be unreachable
            try:
                with socket.create_connection((address, self.place.port), limit_s) as connection:
                    answer = self._ask_at(connection, token, request, deadline, is_direct=True)
                    if "kept" in answer and self.keep is not None:
                        self.keep(connection.dup())
            except ConnectionRefusedError:
                if address == self.known:
                    raise Ended from None
            except (OSError, ValueError, EOFError) as error:
                shortage.note(error)
                self.refused = False
            else:
                self.known, self.refused = address, False
                self.relay, self.reached_at = None, time.monotonic()
                return answer
        return None

    def ask_through(
        self, relay: Peer, token: str, request: dict[str, Json], timeout_s: float, since: float
    ) -> dict[str, Json] | None:
        """Return the answer to a request, as ``ask`` does, but through a relay.

        ``since``: when the request was first sent. If a direct answer has come since then, the link is not lost.

        Raises:
          Ended: the relay has reached the host of the process, and nothing listens there.
        """
        deadline = time.monotonic() + timeout_s
        try:
            with self._connection_through(relay, token, self.place.port, deadline) as connection:
                answer = self._ask_at(connection, token, request, deadline)
        except (OSError, ValueError, EOFError) as error:  # also if the relay has ended
            shortage.note(error)
            if self.relay is relay:
                self.relay = None
            return None
        if self.reached_at < since:
            self.relay = relay
        return answer

    def _ask_at(
        self,
        connection: socket.socket,
        token: str,
        request: dict[str, Json],
        deadline: float,
        *,
        is_direct: bool = False,
    ) -> dict[str, Json]:
        """Send a request over a connection, and return the answer."""
        channel = open_channel(connection, bytes.fromhex(self.place.key), deadline, is_direct=is_direct)
        channel.send({"group": token, **request})
        return channel.receive(deadline)

    def connection(self, token: str, port: int, timeout_s: float, relays: Collection[int] = ()) -> socket.socket:
        """Return a connection to another port of the process: through its relay if this is one of ``relays``.

        Raise an ``OSError`` if no connection is made in time.
        """
        relay = self.relay
        if relay is None or relay.rank not in relays:
            if not self.known:
                raise ConnectionError("it was not reached directly")
            return socket.create_connection((self.known, port), timeout_s)
        try:
            return self._connection_through(relay, token, port, time.monotonic() + timeout_s)
        except (Ended, ValueError, EOFError) as error:
            raise ConnectionError(f"the relay has no connection: {error}") from None

    def _connection_through(self, relay: Peer, token: str, port: int, deadline: float) -> socket.socket:
        """Return a connection through a relay to a port of the process.

        Raises:
          Ended: the relay reports that nothing listens there.
          OSError, ValueError, EOFError: no connection was made in time.
        """
        connection = socket.create_connection((relay.known, relay.place.port), deadline - time.monotonic())
        try:
            channel = open_channel(connection, bytes.fromhex(relay.place.key), deadline, is_direct=True)
            channel.send({"group": token, "what": "connect", "rank": self.rank, "port": port})
            answer = channel.receive(deadline)
        except BaseException:
            connection.close()
            raise
        if "connected" in answer:
            return connection
        connection.close()
        if answer.get("refused"):
            raise Ended("the relay reports that nothing listens at its place")
        raise ConnectionError("the relay did not reach the process")
