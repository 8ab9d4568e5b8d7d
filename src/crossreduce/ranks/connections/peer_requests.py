"""Requests from rank to rank: how ranks reach each other when the store of their rendezvous, or any rank, has ended.

Input: requests of other ranks, as JSON. Output: the answers of the functions that are registered for groups. Each
process has one listening socket and one thread, from its first group to the end of its last one; and another one at
the loopback address for groups that meet there. Both ends of a connection prove that they know the key of the socket,
which is sent to the ranks of its groups only.

A process that another one cannot reach directly, since their hosts have lost their link, is reached through a relay: a
process of a third host passes on the bytes of the connection. The two processes at its ends authenticate each other as
on a direct one.
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
from .channel import AuthenticatedChannel, open_channel
from .listener import Listener

ANSWER_S: Final = 1.0  # how long an answer may take; a host that takes longer is asked again
_DIGEST: Final = 16  # bytes, 128 bits
_PART: Final = 1 << 16  # bytes that a relay passes on at a time

Json = Any
Answer = Callable[[dict[str, Json]], dict[str, Json]]


class Place(NamedTuple):
    """Where a process listens: its addresses, in the order in which to try them, and its key."""

    addresses: tuple[str, ...]
    port: int
    key: str

    @classmethod
    def read(cls, given: Sequence[Json]) -> Place:
        """Return a place that was sent as JSON.

        Raises:
          TypeError, ValueError: this is not a place.
        """
        addresses, port, key = given
        if not isinstance(addresses, (list, tuple)) or not all(isinstance(each, str) for each in addresses):
            raise TypeError("the addresses are not texts")
        if type(port) is not int or not 0 < port < 1 << 16 or len(bytes.fromhex(key)) != _DIGEST:
            raise ValueError("the port or the key is not valid")
        return cls(tuple(addresses), port, bytes.fromhex(key).hex())


class Successor(NamedTuple):
    """The later form of a group: its token, and the number and the decision of the agreement that formed it.

    ``decision``: with the number of a ballot, as ``Registers.decision`` returns it.
    """

    token: str
    number: int
    decision: Json


class Ended(Exception):  # noqa: N818 - internal: a fact that the caller uses
    """The system of the other process answers that nothing listens at its place, so that process has ended."""


class _Contact:
    """Where this process listens: at an address; empty: at all. Groups register under their tokens."""

    def __init__(self, address: str) -> None:
        self.process = os.getpid()
        self.key = secrets.token_bytes(_DIGEST)
        self.answers: dict[str, Answer] = {}
        self.joining = 0  # groups that are being made
        self.listener = Listener(self.key, self._answer, address=address)
        addresses = (address,) if address else tuple(tcp.addresses())
        self.place = Place(addresses, self.listener.port, self.key.hex())

    def _answer(self, channel: AuthenticatedChannel) -> None:
        request = channel.receive(time.monotonic() + ANSWER_S)
        token = str(request.pop("group", ""))
        answer = self.answers.get(token)
        found = answer(request) if answer else redirection(token, request)
        if "addresses" in found:
            _pass_on(channel, found["addresses"], int(request["port"]), is_known=found["known"])
        else:
            channel.send(found)


_lock = threading.Lock()
_open: dict[str, _Contact] = {}  # by address
_successors: dict[str, Successor] = {}  # by the tokens of the earlier forms of groups, which this process has left
_MOST_SUCCESSORS: Final = 4096
_onward: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()  # connections to which this process passes on others


def listen(address: str = "") -> Place:
    """Return where this process listens, from now on until ``unregister`` ends its last group at that address.

    ``address``, here and below: one of this host, at which to listen; empty: all of them.

    Raises:
      OSError: this process cannot listen.
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
    """End what ``listen`` began; the process stops listening at an address when its last group there ends.

    ``token``: of the group; "" if it did not register. ``successor``: the later form of the group, in which this
    process continues; the answers to later requests name it.
    """
    with _lock:
        if successor is not None:
            _successors[token] = successor
            if len(_successors) > _MOST_SUCCESSORS:
                del _successors[next(iter(_successors))]
        found = _open.get(address)
        if found is not None and found.process == os.getpid():
            if found.answers.pop(token, None) is None:
                found.joining -= 1
            if not found.answers and not found.joining:
                del _open[address]
                found.listener.close()


def redirection(token: str, request: dict[str, Json]) -> dict[str, Json]:
    """Return the answer to a request to a group that this process is not in, or not any more."""
    found = _successors.get(token)
    if found is None:
        return {"unknown": True}
    if request["what"] in ("result", "status") and request["number"] == found.number:
        return {"decided": found.decision, "arrived": {}, "late": []}
    while (later := _successors.get(found.token)) is not None:
        found = later
    return {"moved": found.token}


def _pass_on(channel: AuthenticatedChannel, addresses: Sequence[str], port: int, *, is_known: bool) -> None:
    """Connect to another process, and pass on all bytes in both directions until either connection ends.

    ``is_known``: its host was reached at these addresses. If not, another host may have one of them, too.
    """
    given, refused = channel.connection, False
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
    _onward.add(onward)
    with onward:
        channel.send({"connected": True})
        others, readable = {given.fileno(): (given, onward), onward.fileno(): (onward, given)}, select.poll()
        for end in others:
            readable.register(end, select.POLLIN)
        for each in (given, onward):
            tcp.keep_alive(each)
            each.settimeout(None)
        while True:
            for end, _ in readable.poll():
                source, target = others[end]
                part = source.recv(_PART)
                if not part:
                    return
                target.sendall(part)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _open.clear()
    for each in list(_onward):  # while it is open here, the other process does not notice the end of the relay
        each.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Peer:
    """A process that this one asks.

    ``known``: an address at which its host was reached; others may be other hosts'. ``rank``: its number in the group,
    by which a relay finds it, or -1. ``relay``: the process through which a process of its host has answered,
    if none has answered directly since. ``reached_at``: when it has last answered directly. ``refused``: whether
    nothing listened at any of its addresses when it was last asked.
    """

    def __init__(self, place: Place, known: str = "", rank: int = -1) -> None:
        self.place, self.known, self.rank = place, known, rank
        self.relay: Peer | None = None
        self.reached_at, self.refused = -math.inf, False
        # Until when no other direct request is sent while there is a relay; see ``RepeatedRequest``.
        self.tried_until = -math.inf

    def ask(self, token: str, request: dict[str, Json], timeout_s: float = ANSWER_S) -> dict[str, Json] | None:
        """Return the answer to a request to a group, or ``None`` if it does not arrive in time.

        Raises:
          Ended: the process has ended.
        """
        deadline = time.monotonic() + timeout_s
        others = [address for address in self.place.addresses if address != self.known]
        self.refused = True
        for address in [self.known, *others] if self.known else others:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.refused = False
                break
            share_s = left_s if address == self.known else min(left_s, timeout_s / 4)
            try:
                with socket.create_connection((address, self.place.port), share_s) as connection:
                    answer = self._answer(connection, token, request, deadline)
            except ConnectionRefusedError:
                if address == self.known:
                    raise Ended from None
            except (OSError, ValueError, EOFError):
                self.refused = False
            else:
                self.known, self.refused = address, False
                self.relay, self.reached_at = None, time.monotonic()
                return answer
        return None

    def ask_through(
        self, relay: Peer, token: str, request: dict[str, Json], timeout_s: float, since: float
    ) -> dict[str, Json] | None:
        """Ask as ``ask`` does, but through another process.

        ``since``: when this process has begun to ask. If a direct answer has come since then, the link is not lost.

        Raises:
          Ended: nothing listens at the place of the process, as the relay says, which knows its host.
        """
        deadline = time.monotonic() + timeout_s
        try:
            with self._passed_on(relay, token, self.place.port, deadline) as connection:
                answer = self._answer(connection, token, request, deadline)
        except (OSError, ValueError, EOFError):  # also if the relay has ended
            if self.relay is relay:
                self.relay = None
            return None
        if self.reached_at < since:
            self.relay = relay
        return answer

    def _answer(
        self, connection: socket.socket, token: str, request: dict[str, Json], deadline: float
    ) -> dict[str, Json]:
        channel = open_channel(connection, bytes.fromhex(self.place.key), deadline)
        channel.send({"group": token, **request})
        return channel.receive(deadline)

    def connection(self, token: str, port: int, timeout_s: float, relays: Collection[int] = ()) -> socket.socket:
        """Return a connection to another port of the process, through its relay if that is one of ``relays``.

        Raises:
          OSError: no connection was made in time.
        """
        relay = self.relay
        if relay is None or relay.rank not in relays:
            if not self.known:
                raise ConnectionError("it was not reached directly")
            return socket.create_connection((self.known, port), timeout_s)
        try:
            return self._passed_on(relay, token, port, time.monotonic() + timeout_s)
        except (Ended, ValueError, EOFError) as error:
            raise ConnectionError(f"the relay has no connection: {error}") from None

    def _passed_on(self, relay: Peer, token: str, port: int, deadline: float) -> socket.socket:
        """Return a connection to a port of the process that a relay passes on.

        Raises:
          Ended: the relay says that nothing listens there.
          OSError, ValueError, EOFError: no connection was made in time.
        """
        made = socket.create_connection((relay.known, relay.place.port), deadline - time.monotonic())
        try:
            channel = open_channel(made, bytes.fromhex(relay.place.key), deadline)
            channel.send({"group": token, "what": "connect", "rank": self.rank, "port": port})
            answer = channel.receive(deadline)
        except BaseException:
            made.close()
            raise
        if "connected" in answer:
            return made
        made.close()
        if answer.get("refused"):
            raise Ended("nothing listens at its place, as the relay says")
        raise ConnectionError("the relay did not reach the process")
