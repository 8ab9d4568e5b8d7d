"""Internal errors of the communication with other ranks, from which the public errors are made.

Raised by the exchange between hosts, and while another library executes a collective.
"""

from __future__ import annotations


class PeerError(OSError):
    """A message from or to rank ``rank`` of another host failed."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank


class PeerDisconnected(PeerError, ConnectionError):  # noqa: N818 - becomes a PeerLostError
    """The connection to the rank is lost."""


class PeerTimeout(PeerError, TimeoutError):  # noqa: N818 - becomes a CollectiveTimeout
    """The message did not complete in time."""


class InnerFailure(Exception):  # noqa: N818 - internal: the public error names the rank at fault
    """The collective of another library failed, or took too long."""

    def __init__(self, why: str, *, timed_out: bool) -> None:
        super().__init__(why)
        self.timed_out = timed_out
