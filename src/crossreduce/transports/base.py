"""What a group of ranks needs from outside: a place to meet, and a wire between hosts.

In: nothing; these are protocols.  Out: see ``Rendezvous`` and ``Wire``. PyTorch's stores and gloo process groups, and
MPI communicators, are made into them; here is no transport of our own.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Buffer(NamedTuple):
    """Memory in C order: where it begins, how many elements it has, and their dtype's name.

    ``shape`` is for messages, and for finding out that ranks disagree.
    """

    address: int
    size: int
    dtype: str
    shape: tuple[int, ...]


class Rendezvous(Protocol):
    """Where the ranks of one group find each other, before and beside the data."""

    rank: int
    size: int

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in the order of ranks. All ranks call it, in the same order.

        Raises:
          CollectiveTimeout: some did not come in time; it names them.
        """

    def announce(self, cause: bytes) -> None:
        """Put up why the group is broken, for ranks of other hosts to see; the first cause stands. Never raises."""

    def heard(self) -> bytes | None:
        """Return the cause that was put up, or ``None``. Quick, and never raises."""


class Pending(Protocol):
    """A message under way."""

    def wait(self, timeout_s: float) -> None:
        """Return when its memory may be used again (sent) or read (received).

        Raises:
          ConnectionError: the other side is gone.
          TimeoutError: it took too long.
        """


class Wire(Protocol):
    """Messages between ranks of different hosts, by an engine that exists.

    Messages of one tag between two ranks arrive in the order in which they were sent. Whoever hands memory over keeps
    it until ``wait`` returned.
    """

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> Pending:
        """Start to send."""

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> Pending:
        """Start to receive."""

    def abort(self) -> None:
        """Make all messages under way fail soon, here; nothing can be sent afterwards. Any thread may call it."""
