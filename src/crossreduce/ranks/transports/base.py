"""Protocols of the two objects with which a group of ranks communicates: a rendezvous, and a transport between hosts.

Input and output: see ``Rendezvous`` and ``Transport``. ``mpi.py`` implements both, ``tcp.py`` and ``ucx.py`` a
transport, and ``ranks/connections/rendezvous.py`` a rendezvous; the caller of a ``Communicator`` creates them, and
passes them to it. ``Plugin`` is what the module of another transport has.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Protocol, TypeGuard

MESSAGE_NBYTES: Final = 1 << 20  # of the largest messages of a large call; see ``Transport``
_CHECK_S: Final = 0.05  # between two checks whether an exchange was cancelled
_SIZE: Final = struct.Struct("<I")  # of the text that follows
_MOST_NBYTES: Final = 1 << 15  # of a text: a new connection takes it without waiting


class Rendezvous(Protocol):
    """Where the ranks of one group exchange small messages, apart from the data."""

    rank: int
    size: int
    timeout_s: float
    """How long this rank waits for others."""
    is_near: bool
    """Whether all ranks are on one host, and may read each other's memory, as they have found in an older group."""
    owner: int | None
    """The number in the group of the rank whose process serves the rendezvous; ``None`` if no rank does."""
    watch: Callable[[], None]
    """Called again and again while ``all_gather`` waits for other ranks. An error ends the wait."""

    def all_gather(self, payload: bytes, meanwhile: Callable[[], None] = lambda: None) -> list[bytes]:
        """Return the payloads of all ranks, in the order of the ranks. All ranks call it, in the same order.

        ``meanwhile`` is called once when this rank's payload was sent.

        Raises:
          CollectiveTimeout: some ranks did not call it in time; the error names them.
          ReductionError: a rank has published the reason of an abort, which is this error.
        """

    def first(self, key: str, value: bytes) -> bytes:
        """Return the ``value`` of the first rank with this ``key``. All ranks call it together, with any keys.

        Errors are those of ``all_gather``.
        """

    def publish_abort(self, cause: bytes) -> bytes:
        """Publish the reason of an abort, an encoded error, to all hosts, and return the valid reason.

        The first one that was published is valid; later ones are ignored. Never raises.
        """

    def abort_cause(self) -> bytes | None:
        """Return the published reason, or ``None`` if it cannot be read here. This is quick and never raises."""

    def roll_call(self, ranks: Iterable[int], timed_out: bool) -> dict[int, bool]:
        """Publish that ``ranks`` are alive after the communication failed. Return all ranks of which this is published.

        ``timed_out``: whether the failure was a timeout. The result maps each rank to its ``timed_out``.

        Raises:
          ConnectionError: the rendezvous has ended.
          TimeoutError: it does not answer.
        """

    def record_leaving(self) -> None:
        """Publish that this rank leaves the group on purpose, if others could not notice it otherwise. Never raises."""

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has published that it leaves the group. This is quick and never raises."""

    def announce(self, number: int) -> None:
        """Publish that this rank has begun its check number ``number`` of the links, if it can. This is quick."""

    def have_announced(self, number: int) -> bool:
        """Return whether all ranks have published that they have begun this check. This is quick and never raises."""

    def leave(self, reader: int, readers: Iterable[int]) -> None:
        """Record that the host of rank ``reader`` has read the reason of the abort.

        If this process serves the rendezvous, wait until all ``readers`` have read it, for at most a second.
        """


def first_of(rendezvous: Rendezvous, key: str, value: bytes) -> bytes:
    """Return what ``Rendezvous.first`` does: the ``value`` of the lowest rank with this ``key``."""
    pairs = [each.split(b"\0", 1) for each in rendezvous.all_gather(key.encode() + b"\0" + value)]
    return next(theirs for other, theirs in pairs if other == key.encode())


class PendingMessage(Protocol):
    """A message that is being sent or received."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the memory may be used again (send) or read (receive).

        Raises:
          ConnectionError: the other rank was lost. ``ConnectionResetError``, a subclass: it has left the group.
          TimeoutError: the message did not complete in time.
        """


class RunningCollective(Protocol):
    """A collective that another library runs. ``progress``: changes whenever the timeout of the call begins again."""

    progress: int

    def wait(self, seconds: float) -> bool:
        """Wait about so long, or until it has succeeded or failed. Return whether it has."""

    def finish(self) -> None:
        """Raise the error of a completed collective that has failed: a ``ConnectionError`` if messages have failed."""


class Transport(Protocol):
    """Carries messages between ranks of different hosts. Messages of one tag between two ranks arrive in order.

    The caller must keep the memory of a message until ``wait`` returned. A transport may have an attribute ``carrier``:
    a compiled object that moves its messages, as ``HostTransport.connections``. If it also has a method ``wrap``, that
    returns the ``PendingMessage`` for a message with a rank that this object has begun. ``lag``: how many parts of a
    large array should be under way at once, by default 2. ``message_nbytes``: the most bytes of a message, by default
    1 MiB (a call may need somewhat more). It may be more if the timeout of a wait begins again when bytes have moved.
    """

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> PendingMessage:
        """Start to send ``nbytes`` from ``address`` to rank ``dst`` of the group."""

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> PendingMessage:
        """Start to receive one message, of at most ``nbytes``, from rank ``src`` of the group into ``address``."""

    def abort(self) -> None:
        """Make all messages of this rank fail soon, also later ones. Any thread may call it."""

    def close(self) -> None:
        """Tell the other ranks, if possible, that this rank leaves. Make all messages fail, and release everything."""


@dataclass(frozen=True)
class Links:
    """The connected sockets of a rank, with which a transport begins. Both ends have proved that they know a key.

    Args:
      rank: this rank of the group.
      sockets: for each rank with which messages are exchanged a connected TCP socket. The transport closes it when it
        is closed itself, so that other ranks notice that this rank ends.
      unreached: the ranks to which no connection could be made.
      cancelled: an event. When it is set, another rank has failed, and the group is not made.
      further: for each rank more sockets, which only the library's own TCP transport gets. It closes them, too.
      measures: whether that transport uses them only if it finds that this is faster.
    """

    rank: int
    sockets: dict[int, socket.socket]
    unreached: Sequence[int] = ()
    cancelled: threading.Event = field(default_factory=threading.Event)
    further: Mapping[int, Sequence[socket.socket]] = field(default_factory=dict)
    measures: bool = False

    def exchanged(self, text: bytes) -> dict[int, bytes]:
        """Send ``text`` to the ranks of ``sockets``. Return the texts of these ranks, which call this, too.

        Raises:
          ValueError: the text has more than 32 KiB.
          ConnectionError: another rank has ended, or ``cancelled`` was set.
        """
        if len(text) > _MOST_NBYTES:
            raise ValueError(f"a text has at most {_MOST_NBYTES} bytes; given: {len(text)}")
        for each in self.sockets.values():
            each.setblocking(True)
            each.sendall(_SIZE.pack(len(text)) + text)
        return {rank: self._text(each) for rank, each in self.sockets.items()}

    def _text(self, sender: socket.socket) -> bytes:
        received, wanted = b"", _SIZE.size
        while len(received) < wanted:
            while not select.select([sender], [], [], _CHECK_S)[0]:
                if self.cancelled.is_set():
                    raise ConnectionError("another rank did not connect")
            part = sender.recv(wanted - len(received))
            if not part:
                raise ConnectionError("another rank has closed its connection")
            received += part
            if len(received) == _SIZE.size and wanted == _SIZE.size:
                wanted += _SIZE.unpack(received)[0]
        return received[_SIZE.size :]

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended, or its host does not answer. This is quick."""
        try:
            return self.sockets[rank].recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the sockets."""
        for each in chain(self.sockets.values(), *self.further.values()):
            each.close()


class HostTransport(Transport, Protocol):
    """A transport that began with ``Links``.

    ``reached``: the address of each rank to which there is a connection. ``unreached``: the ranks to which there is
    none. ``connections``: a compiled object that also moves messages while this rank waits for ranks of its host, or
    ``None``.
    """

    reached: dict[int, str]
    unreached: tuple[int, ...]
    connections: Any


def has_links(transport: object) -> TypeGuard[HostTransport]:
    """Return whether a transport began with ``Links``, as all do except that of MPI and those of tests."""
    return hasattr(transport, "connections")


class Plugin(Protocol):
    """A kind of transports: a module, or another object, with these functions."""

    def unusable(self) -> str:
        """Return why this process cannot use such a transport, or "" if it can. Called while a group is made."""

    def connect(self, links: Links) -> Transport:
        """Return a transport to the ranks of ``links``, all of which call this at the same time.

        Raises:
          Exception: it cannot connect. All ranks raise an error that names this rank and has the text of this one.
        """
