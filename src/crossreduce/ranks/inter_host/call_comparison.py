"""The first messages of an op between hosts: they show whether all hosts make the same call.

Input: a digest of this rank's call, and data. Output: the data of the other hosts, if their digests are the same. In a
check of the links, ranks are given up whose messages do not arrive.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Final

from ..failures.peer_errors import PeerDisconnected, PeerTimeout
from ..transports.base import PendingMessage, Transport
from .exchange import EAGER_BYTES, wait_for

_PRESENCE_TAG: Final = 3  # the tags of other messages are in multi_host, measurement and exact_exchange
_EARLY: Final = 0.9  # no rank gives up this rank before this fraction of a check's limit; below 1, since clocks differ
_LATE: Final = 3  # a rank that begins a check more than this many limits after this rank may have made another call
_PAUSES_S: Final = (0.01, 0.1)  # between two queries whether all ranks have begun a check, first and longest


def call_digest(digest: bytes, number: int) -> bytes:
    """Return the digest of a call with its number: both are the same on all hosts that make the same call."""
    first = (int.from_bytes(digest[:8], sys.byteorder) + number) % (1 << 64)
    return first.to_bytes(8, sys.byteorder) + digest[8:]


def exchange_digests(
    digest: bytes,
    data: Mapping[int, bytes],
    ranks: Sequence[int],
    transport: Transport,
    tag: int,
    timeout_s: float,
    diameter: int = 1,
    patience: Patience | None = None,
) -> dict[int, bytes] | None:
    """Exchange the first messages of an op with ``ranks`` of other hosts: a digest of the call, and data.

    Return the data of each of these ranks, padded to ``EAGER_BYTES``, or ``None`` if the digests of any hosts differ.
    If some hosts have no link to each other, their neighbours pass on that digests differ.

    Args:
      digest: the digest of this rank's call, of the same length on all hosts.
      data: at most ``EAGER_BYTES`` for each receiving rank; ranks may be missing.
      ranks: one rank of each host to which this host has a link.
      transport: the connection to other hosts.
      tag: the tag of the messages.
      timeout_s: how long each message may take.
      diameter: the most links on the shortest route between any two hosts.
      patience: gives up ranks whose link is lost, and the others continue. If it is ``None``, no rank is given up.
    Raises:
      PeerError: a rank of another host was lost or is late.
    """
    size = len(digest)
    received = [ctypes.create_string_buffer(size + EAGER_BYTES) for _ in ranks]
    messages, all_ranks = [digest + data.get(rank, b"") for rank in ranks], ranks
    wait = wait_for if patience is None else patience.wait
    _exchange(messages, received, ranks, transport, tag, timeout_s, wait)
    given_up = set() if patience is None else patience.given_up
    answers = [memory for rank, memory in zip(ranks, received, strict=True) if rank not in given_up]
    same = all(memory.raw[:size] == digest for memory in answers)
    # A host with another digest is at most ``diameter`` links away. On the route to it there are two neighbours with
    # different digests. The nearer one, at most ``diameter - 1`` links away, detects this in the first messages.
    for _ in range(diameter - 1):
        ranks = [rank for rank in ranks if rank not in given_up]
        if patience is not None:
            patience.begun += 1
        verdicts = [ctypes.create_string_buffer(b"=", 1) for _ in ranks]
        _exchange([b"=" if same else b"!"] * len(ranks), verdicts, ranks, transport, tag, timeout_s, wait)
        same = same and all(memory.raw == b"=" for memory in verdicts)
    return {rank: memory.raw[size:] for rank, memory in zip(all_ranks, received, strict=True)} if same else None


def _exchange(
    messages: Sequence[bytes],
    received: Sequence[ctypes.Array[ctypes.c_char]],
    ranks: Sequence[int],
    transport: Transport,
    tag: int,
    timeout_s: float,
    wait: Callable[[PendingMessage, int, float], None],
) -> None:
    """Send a message to each rank, and receive a message from each. ``wait`` waits like ``wait_for``."""
    sent = [ctypes.create_string_buffer(message, len(message)) for message in messages]
    started = [*zip(ranks, received, repeat(transport.receive)), *zip(ranks, sent, repeat(transport.send))]
    pending = [(start(ctypes.addressof(memory), len(memory), rank, tag), rank) for rank, memory, start in started]
    for message, rank in pending:
        wait(message, rank, timeout_s)


class Presence:
    """Notices that ranks of other hosts are lost, while all ranks wait for each other in another way than by messages.

    All of these ranks make such an object before they wait, and call ``end`` when they have waited.
    """

    def __init__(self, ranks: Sequence[int], transport: Transport) -> None:
        self._ranks, self._transport = ranks, transport
        self._rooms, self._sent = [ctypes.create_string_buffer(1) for _ in ranks], ctypes.create_string_buffer(1)
        rooms = zip(ranks, self._rooms, strict=True)
        # The messages that these ranks send at the end. If a rank is lost, its message fails.
        self._expected = [
            (transport.receive(ctypes.addressof(room), 1, rank, _PRESENCE_TAG), rank) for rank, room in rooms
        ]

    def check(self) -> None:
        """Raise a ``PeerError`` if a rank was lost. Messages of a plug-in are only checked by ``end``."""
        for message, rank in [*self._expected]:
            poll = getattr(message, "poll", None)
            try:
                if poll is not None and poll(0.0):
                    self._expected.remove((message, rank))
            except OSError as error:
                raise PeerDisconnected(rank, str(error)) from error

    def end(self, timeout_s: float) -> None:
        """Wait until all ranks have called this. Raise a ``PeerError`` if one is lost or late."""
        sent = ctypes.addressof(self._sent)
        messages = [(self._transport.send(sent, 1, rank, _PRESENCE_TAG), rank) for rank in self._ranks]
        for message in messages + self._expected:
            wait_for(*message, timeout_s)


class Patience:
    """Waits for messages in a check of the links, and gives up ranks whose messages do not arrive.

    A message of round k may take k times ``limit_s`` seconds, since its sender may have waited in vain for other ranks
    before. This time begins when all ranks of the group have begun the check; then ``are_there`` returns ``True``. No
    rank is given up before. If a rank is very late or makes another call, messages may take as long as in other calls.
    The transport must close the connection of a message that has not arrived, so that memory is not written any more.
    """

    def __init__(self, are_there: Callable[[], bool], limit_s: float) -> None:
        self.given_up: set[int] = set()
        self.begun = 1  # how many rounds of messages have begun
        self._are_there, self._limit_s, self._began = are_there, limit_s, time.monotonic()
        self._all_begun_at: float | None = None

    def wait(self, pending: PendingMessage, rank: int, timeout_s: float) -> None:
        """Wait for a message from or to a rank like ``wait_for``, but return at once if the rank was given up."""
        if rank in self.given_up:
            return
        late, pause_s = self._began + _LATE * self._limit_s, _PAUSES_S[0]
        while not self._have_all_begun() and time.monotonic() < late:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])
        if self._all_begun_at is not None:
            left_s = self._all_begun_at + self.begun * self._limit_s - time.monotonic()
            timeout_s = min(max(0.0, left_s), timeout_s)
        try:
            wait_for(pending, rank, timeout_s)
        except (PeerDisconnected, PeerTimeout) as error:
            # A rank that gives up this rank closes their connection, but not before the limit. If a connection is
            # closed earlier, the other rank has probably died, which is an error.
            early = isinstance(error, PeerDisconnected) and time.monotonic() - self._began < _EARLY * self._limit_s
            if early or not self._have_all_begun():
                raise
            self.given_up.add(rank)

    def _have_all_begun(self) -> bool:
        if self._all_begun_at is None and self._are_there():
            self._all_begun_at = time.monotonic()
        return self._all_begun_at is not None
