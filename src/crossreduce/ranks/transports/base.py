"""Protocols of the two objects with which a group of ranks communicates: a rendezvous, and a transport between hosts.

Input and output: see ``Rendezvous`` and ``Transport``. ``mpi.py`` implements both, ``tcp.py`` a transport and
``ranks/connections/rendezvous.py`` a rendezvous; the caller of a ``Communicator`` creates them, and passes them to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Rendezvous(Protocol):
    """Where the ranks of one group exchange small messages, apart from the data."""

    rank: int
    size: int
    owner: int | None
    """The number in the group of the rank whose process serves the rendezvous; ``None`` if no rank does."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in the order of the ranks. All ranks call it, in the same order.

        Raises:
          CollectiveTimeout: some ranks did not call it in time; the error names them.
          ReductionError: a rank has published the reason of an abort, which is this error.
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


class PendingMessage(Protocol):
    """A message that is being sent or received."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the memory may be used again (send) or read (receive).

        Raises:
          ConnectionError: the other rank was lost. ``ConnectionResetError``, a subclass: it has left the group.
          TimeoutError: the message did not complete in time.
        """


class RunningCollective(Protocol):
    """A collective that another library runs."""

    def is_completed(self) -> bool:
        """Return whether it has succeeded or failed. This is quick."""

    def finish(self) -> None:
        """Raise the error of a completed collective that has failed: a ``ConnectionError`` if messages have failed."""


class Transport(Protocol):
    """Carries messages between ranks of different hosts. Messages of one tag between two ranks arrive in order.

    The caller must keep the memory of a message until ``wait`` returned.
    """

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> PendingMessage:
        """Start to send ``nbytes`` from ``address`` to rank ``dst`` of the group."""

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> PendingMessage:
        """Start to receive one message, of at most ``nbytes``, from rank ``src`` of the group into ``address``."""

    def abort(self) -> None:
        """Make all messages of this rank fail soon, also later ones. Any thread may call it."""

    def close(self) -> None:
        """Tell the other ranks, if possible, that this rank leaves. Make all messages fail, and release everything."""
