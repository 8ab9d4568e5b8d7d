"""The TCP transport: messages between hosts over its own connections. The threads that wait for messages move them.

Input: the ranks to connect to, and a store where ranks read each other's addresses. Output: see ``base.Transport``. A
rank listens while the group is made. Both ends of a connection prove that they know the listener's key, which only the
ranks of the group can read. The messages are neither encrypted nor authenticated, as those of gloo and NCCL.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ... import kernels
from .addresses import addresses, by_rail, end_text, machine, rails, reachable
from .base import PendingMessage
from .strangers import MOST_UNKNOWN, Strangers

_STAGGER_S: Final = 0.25  # from an attempt to connect to the attempt with the next address (RFC 8305, section 5)
_RETRY_S: Final = 1.0  # from an attempt with the last address of a rank to another attempt with its first address
PATIENCE_S: Final = 10.0  # a connection that takes longer may be impossible; a lost SYN is sent again after 1, 3, 7 s
_HANDSHAKE_S: Final = 5.0  # the longest time that an unknown program may take to prove that it is a rank
_CHECK_S: Final = 0.05  # between two checks whether ``connect`` was cancelled
_BACKLOG: Final = 4096  # connections that wait to be accepted; a rank that finds no place waits for 1 s and longer
_MOST_ACCEPTED: Final = 64  # connections that are accepted before others are continued
_DIGEST: Final = 16  # bytes, 128 bits
_NUMBER: Final = 16  # bytes of a random number, 128 bits
# The rank that connects, the number of the connection, a random number, and a proof
_HELLO: Final = struct.Struct(f"<iB{_NUMBER}s{_DIGEST}s")
# A connection fails if its other host does not answer for two minutes. If no data is under way: 60 s, then 6 probes
# that are 10 s apart. Otherwise ``Connections`` reads when the host has last answered. TCP_USER_TIMEOUT would also end
# connections to ranks that read nothing for two minutes.
_SILENT_S: Final = 120.0
_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
_RTO_MAX: Final = 44, 60_000  # TCP_RTO_MAX_MS, since Linux 6.15: the most time between two repetitions, else 120 s
_STANDARD_ERROR: Final = 2  # the last descriptor of a standard stream
_ALL: Final[weakref.WeakSet[TcpTransport]] = weakref.WeakSet()

Handshake: TypeAlias = Generator[int, None, None]  # yields the events to wait for
Link: TypeAlias = tuple[int, int]  # one of the connections to a rank: the rank, and the number of the connection


class TcpTransport:
    """Messages over connected sockets. See ``base.Transport``.

    ``connections``: the compiled object. It also moves messages while this rank waits for ranks of its host.
    ``unreached``: the ranks to which no connection could be made.
    ``reached``: the address of each rank to which there is a connection.
    ``message_nbytes``: see ``base.Transport``.
    """

    message_nbytes = 1 << 24

    def __init__(
        self,
        sockets: dict[int, socket.socket],
        unreached: Sequence[int] = (),
        further: Mapping[int, Sequence[socket.socket]] = MappingProxyType({}),
        measures: bool = False,
    ) -> None:
        """Use connected sockets, which the transport closes.

        ``sockets``: for each rank with which messages are exchanged a socket. ``further``: more of them, equally many
        for each rank. ``measures``: whether they are used only if this is found to be faster.
        """
        self.unreached, self._measures = tuple(unreached), measures
        self.reached = addresses_of(sockets)
        all_sockets = [each for rank, first in sockets.items() for each in (first, *further.get(rank, ()))]
        for each in all_sockets:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(each)
        self.connections = self._connections(list(sockets), [each.fileno() for each in all_sockets], _SILENT_S)
        for each in all_sockets:
            each.detach()
        _ALL.add(self)

    def _connections(self, ranks: list[int], descriptors: list[int], silent_s: float) -> Any:
        """Return the compiled object for ``ranks``. It closes their sockets."""
        return kernels.native().Connections(ranks, descriptors, silent_s, self._measures)

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> PendingMessage:
        """Start to send."""
        pending: PendingMessage = self.connections.send(address, nbytes, dst, tag)
        return pending

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> PendingMessage:
        """Start to receive."""
        pending: PendingMessage = self.connections.receive(address, nbytes, src, tag)
        return pending

    def abort(self) -> None:
        """Make all messages of this rank fail, and soon also other ranks' messages with this one."""
        self.connections.abort()

    def close(self) -> None:
        """Tell the other ranks that this one has left, and close the sockets."""
        self.connections.close()


def addresses_of(sockets: Mapping[int, socket.socket]) -> dict[int, str]:
    """Return the address of the other end of each socket."""
    return {rank: str(each.getpeername()[0]).removeprefix("::ffff:") for rank, each in sockets.items()}


def keep_alive(connection: socket.socket) -> None:
    """Make a connection fail if the other host does not answer any more, even while no data is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with contextlib.suppress(OSError):  # an older system
        connection.setsockopt(socket.IPPROTO_TCP, *_RTO_MAX)


def _after_fork() -> None:
    """Close the sockets in a forked process: while they are open there, other ranks do not notice that a rank ends."""
    for transport in list(_ALL):
        transport.connections.close_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def connect(
    rank: int,
    peers: Sequence[int],
    publish: Callable[[bytes], None],
    read: Callable[[int], bytes],
    cancelled: threading.Event,
    interfaces: Sequence[str] = (),
    stalled: Callable[[Sequence[int]], Collection[int]] | None = None,
    listen_at: str = "",
    patience_s: float = PATIENCE_S,
    count: int = 1,
    place: int = 0,
) -> dict[int, list[socket.socket]]:
    """Return connected sockets for each other rank. Each of them calls this, too, with a list that contains ``rank``.

    Args:
      peers: the ranks to connect to. The higher one of two ranks connects to the lower one.
      publish: publishes the addresses and the key of this rank, so that only the other ranks can read them.
      read: waits until a rank has published, and returns what it published.
      cancelled: an event. When it is set, this raises an error.
      interfaces: names of the network interfaces to use, such as "eth0". If empty, any are used.
      stalled: called after ``patience_s`` with the ranks that have no connection yet, and then each second (more often
        if ``patience_s`` is below 5 s). It returns the ranks to give up, which are then missing in the result. Without
        it, no rank is given up.
      listen_at: the only address of this host at which it listens. "" means all addresses of ``interfaces``.
      patience_s: the seconds after which a connection that is not made yet may be impossible.
      count: how many connections are made to each rank, at most 255; the same on all ranks.
      place: the number of this rank among those of its host. See ``rails``, over which connections are spread.
    Raises:
      ConnectionError: ``cancelled`` was set before all connections were made, or no interface has an address.
    """
    others = [peer for peer in peers if peer != rank]
    if not others:
        return {}
    key = secrets.token_bytes(_DIGEST)
    with contextlib.ExitStack() as stack:
        listener = opened_listener(0, listen_at) if max(others) > rank else None
        if listener is not None:
            stack.enter_context(listener)
        port = 0 if listener is None else listener.getsockname()[1]
        own = [listen_at] if listen_at else addresses(interfaces)
        spread = rails(interfaces, place)
        publish(json.dumps([own, port, key.hex(), machine()]).encode())
        expected = [(peer, number) for peer in others if peer > rank for number in range(count)]
        meeting = stack.enter_context(_Meeting(rank, key, expected, listener))
        for peer in others:
            if peer < rank:
                published, peer_port, peer_key, where = json.loads(read(peer))
                there = reachable(published, where)
                for number in range(count):
                    there = by_rail(there, spread[number % len(spread)]) if len(spread) > 1 else there
                    meeting.reach((peer, number), [(each, peer_port) for each in there], bytes.fromhex(peer_key))
        given_up: set[int] = set()
        check_at = time.monotonic() + patience_s
        while missing := [peer for peer in others if len(meeting.of(peer)) < count and peer not in given_up]:
            if cancelled.is_set():
                tried = {peer: [address for address, _ in meeting.targets[peer, 0]] for peer in missing if peer < rank}
                addresses_tried = tried or "none, since these ranks connect to this one"
                raise ConnectionError(f"no connection to ranks {missing}; tried addresses: {addresses_tried}")
            if stalled is not None and time.monotonic() > check_at:
                check_at = time.monotonic() + min(_RETRY_S, patience_s / 5)
                given_up.update(stalled(missing))
            meeting.step()
        return {peer: meeting.take(peer) for peer in others if peer not in given_up}


def opened_listener(port: int = 0, address: str = "") -> socket.socket:
    """Return a socket that listens at a port of this host. Port 0 is a free port, address "" means all addresses."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            # IPv6 is disabled
    return socket.create_server(("", port), backlog=_BACKLOG)


def open_standard_streams() -> None:
    """Open the null device in place of standard input, output and error if they are closed, as in some daemons.

    Otherwise memory that ranks share, or a connection, would get such a number, and receive what a library prints.
    """
    with contextlib.suppress(OSError):
        while (opened := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
            pass
        os.close(opened)


def _proof(key: bytes, word: str, link: Link, listener: int, end: Sequence[object], numbers: bytes) -> bytes:
    """Return the proof that the sender of ``word`` knows the key.

    ``link``: the rank that connects, and the number of its connection. ``listener``: the rank that listens. ``end``:
    the address and port of the latter in this connection. A program at another address, which passes on all bytes,
    cannot change it. ``numbers``: random numbers.
    """
    about = f"{word} {link[0]} {link[1]} {listener} {end_text(end)} ".encode()
    return blake2b(about + numbers, key=key, digest_size=_DIGEST).digest()


class _Meeting:
    """Makes the connections of one rank. ``targets``: for each of those that it begins, the addresses and ports to try.

    The connecting rank sends its number, a random number and a proof. The listening rank answers with another random
    number and a proof that depends on both. The connecting rank may have made several connections. Over the one that it
    uses, it sends a third proof, and the listening rank confirms it. So a recorded handshake cannot be repeated.
    """

    def __init__(self, rank: int, key: bytes, expected: Sequence[Link], listener: socket.socket | None) -> None:
        self.connected: dict[Link, socket.socket] = {}
        self.targets: dict[Link, list[tuple[str, int]]] = {}
        self._rank, self._key, self._expected = rank, key, set(expected)
        self._keys: dict[Link, bytes] = {}
        self._due: dict[Link, tuple[float, int]] = {}  # when to try which of the addresses next
        self._used: set[Link] = set()  # those that the other ranks are to confirm
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, Handshake] = {}
        self._tried: dict[tuple[Link, tuple[str, int]], socket.socket] = {}  # the last attempt with each address
        self._unknown = Strangers(MOST_UNKNOWN + len(expected))
        self._known = Strangers(MOST_UNKNOWN + len(expected))  # their first proof was right; it may be a recorded one
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections that were not taken."""
        for each in [*self._open, *self.connected.values()]:
            each.close()
        self._selector.close()

    def of(self, peer: int) -> list[Link]:
        """Return the finished connections to a rank, in order."""
        return sorted(link for link in self.connected if link[0] == peer)

    def take(self, peer: int) -> list[socket.socket]:
        """Return the sockets of the finished connections to a rank, which the caller then owns."""
        return [self.connected.pop(link) for link in self.of(peer)]

    def reach(self, link: Link, targets: list[tuple[str, int]], key: bytes) -> None:
        """Begin to connect to a rank at any of its addresses."""
        self.targets[link], self._keys[link] = targets, key
        if targets:
            self._due[link] = time.monotonic(), 0

    def step(self) -> None:
        """Close connections without a proof, begin due attempts, and continue handshakes. Wait at most ``_CHECK_S``."""
        now = time.monotonic()
        while (late := self._unknown.pop(now - _HANDSHAKE_S)) is not None:
            self._drop(late)
        for link, (at, number) in list(self._due.items()):
            if now >= at:
                self._try(link, self.targets[link][number])
                last = number + 1 == len(self.targets[link])
                self._due[link] = (now + _RETRY_S, 0) if last else (now + _STAGGER_S, number + 1)
        for key, _ in self._selector.select(_CHECK_S):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj in self._open:  # it was not dropped just now
                assert isinstance(key.fileobj, socket.socket)
                self._continue(key.fileobj)

    def _accept(self) -> None:
        """Accept the connections that wait, and begin their handshakes."""
        assert self._listener is not None
        for _ in range(_MOST_ACCEPTED):
            try:
                sock, (address, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it was closed again, or this process has too many open files
                time.sleep(_CHECK_S)
                return
            self._limit(self._unknown, sock, address)
            self._begin(sock, self._accepted(sock, address))

    def _limit(self, strangers: Strangers, sock: socket.socket, address: str) -> None:
        """Count a connection among others that have proved as much. If there are too many, close one of the others."""
        if (dropped := strangers.add(sock, address)) is not None:
            self._drop(dropped)

    def _try(self, link: Link, target: tuple[str, int]) -> None:
        """Begin to connect to an address, unless the last attempt to do so has not ended."""
        if self._tried.get((link, target)) in self._open:
            return
        with contextlib.suppress(OSError):  # no IPv6 here, or too many open files
            sock = socket.socket(socket.AF_INET6 if ":" in target[0] else socket.AF_INET, socket.SOCK_STREAM)
            self._tried[link, target] = sock
            self._begin(sock, self._connecting(sock, link, target))

    def _begin(self, sock: socket.socket, handshake: Handshake) -> None:
        sock.setblocking(False)
        self._open[sock] = handshake
        self._continue(sock)

    def _continue(self, sock: socket.socket) -> None:
        """Continue a handshake. Close the connection if it fails."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)
        try:
            self._selector.register(sock, next(self._open[sock]))
        except StopIteration:
            del self._open[sock]
            self._known.discard(sock)
        except (OSError, EOFError):
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        """Close a connection whose handshake has not ended."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)
        self._unknown.discard(sock)
        self._known.discard(sock)
        self._open.pop(sock).close()
        sock.close()

    def _connecting(self, sock: socket.socket, link: Link, target: tuple[str, int]) -> Handshake:
        """Execute the connecting rank's handshake."""
        with contextlib.suppress(BlockingIOError):
            sock.connect(target)
        yield selectors.EVENT_WRITE
        key, end, own = self._keys[link], sock.getpeername(), secrets.token_bytes(_NUMBER)
        about = (self._rank, link[1]), link[0], end
        sock.sendall(_HELLO.pack(*about[0], own, _proof(key, "hello", *about, own)))
        answer = yield from _receive(sock, _NUMBER + _DIGEST)
        numbers = own + answer[:_NUMBER]
        if not secrets.compare_digest(answer[_NUMBER:], _proof(key, "welcome", *about, numbers)):
            raise EOFError  # another program
        if link in self.connected or link in self._used:
            raise EOFError  # the connection to another address was faster
        self._used.add(link)
        try:
            sock.sendall(_proof(key, "use", *about, numbers))
            yield from _receive(sock, 1)
        finally:
            self._used.discard(link)
        self.connected[link] = sock
        del self._due[link]

    def _accepted(self, sock: socket.socket, address: str) -> Handshake:
        """Execute the listening rank's handshake."""
        *link, other, proof = _HELLO.unpack((yield from _receive(sock, _HELLO.size)))
        about, own = ((link[0], link[1]), self._rank, sock.getsockname()), secrets.token_bytes(_NUMBER)
        if not secrets.compare_digest(proof, _proof(self._key, "hello", *about, other)):
            raise EOFError  # another program
        self._unknown.discard(sock)
        self._limit(self._known, sock, address)
        sock.sendall(own + _proof(self._key, "welcome", *about, other + own))
        proof = yield from _receive(sock, _DIGEST)
        if not secrets.compare_digest(proof, _proof(self._key, "use", *about, other + own)):
            raise EOFError  # a program that has recorded a hello
        if about[0] not in self._expected or about[0] in self.connected:
            raise EOFError  # a rank never makes one connection twice
        sock.sendall(b".")
        self.connected[about[0]] = sock


def _receive(sock: socket.socket, count: int) -> Generator[int, None, bytes]:
    """Receive ``count`` bytes, and yield the event to wait for. Raise an ``EOFError`` if the connection is closed."""
    received = b""
    while len(received) < count:
        yield selectors.EVENT_READ
        part = sock.recv(count - len(received))
        if not part:
            raise EOFError
        received += part
    return received
