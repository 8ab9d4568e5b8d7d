"""``Messages``: messages between two ranks of a group, and all-to-alls of parts of any sizes.

Input: memory, the other rank and a tag. Output: received messages, or errors that name the other rank. The compiled
mailboxes carry the messages, in the memory that a host shares and over connections to the ranks of other hosts
(``native/mailboxes/mailboxes.hpp``); this module handles the waits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from ..errors import MismatchError, ReductionError, decoded
from .array_views import ArrayView
from .communicator import Communicator
from .connections.peer_requests import Ended
from .failures.failure_detector import END_S
from .intra_host.shared_memory import SLICE_S

ANY_RANK: Final = -1
_WAITING: Final = -1  # what the compiled ``wait`` returns
_PARTS_TAG: Final = -1  # of messages of exchanges; users' tags are at least 0
# The ``mood`` of a rank whose messages are valid, and of one that has called ``give_up`` or was lost.
_OPEN, _GAVE_UP = 0, 2
_QUERY_S: Final = 0.25  # between two queries whether a rank of another host has aborted the group
_PART_NBYTES: Final = 1 << 22  # the most bytes of a message of an exchange: each one shows that data moves
_CARRIED_NBYTES: Final = 1 << 22  # of the smallest parts for which ``carry_parts`` chooses messages
_SLICE_S: Final = 0.02  # how long an exchange waits for a message before its caller looks for lost ranks


class Messages:
    """The messages of one rank, of any number of threads.

    Messages between two ranks with the same tag are received in the order in which they were sent. A message that is
    received into memory of another size is dropped, and the receiving rank gets a ``MismatchError``.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._native = communicator.memory.mailboxes
        # The mailboxes number the ranks of this host first, then those of other hosts.
        self._ranks = (*communicator.host, *communicator.ranks_of_other_hosts)
        self._numbers = {rank: number for number, rank in enumerate(self._ranks)} | {ANY_RANK: ANY_RANK}
        self._timed_out, self._queried = False, -math.inf
        # When each rank was last found to be alive; the last item is for ``ANY_RANK``.
        self._checked = [-math.inf] * (communicator.size + 1)

    def send(self, owner: Any, address: int, nbytes: int, dst: int, tag: int) -> int:
        """Begin to send memory, and return the message's number, or 0 if it is complete.

        ``owner``: the object that owns the memory. It is referenced while the memory is needed.
        """
        # The check of the other rank takes long compared with a message, so it is repeated only after ``SLICE_S``.
        if self._timed_out or time.monotonic() > self._checked[dst] + SLICE_S:
            failure = self._failure(dst)
            if failure is not None:
                raise self._public_error("send", dst, failure)
        try:
            return int(self._native.send(self._numbers[dst], tag, address, nbytes, owner))
        except ValueError as error:  # the group has been closed
            raise self._public_error("send", dst, ConnectionError(str(error))) from None

    def receive(self, owner: Any, address: int, nbytes: int, src: int, tag: int) -> int:
        """Begin to receive from a rank, or from ``ANY_RANK``. For the other arguments and the result see ``send``.

        The other rank is not checked, since a rank that has ended may have sent the message before.
        """
        try:
            failure = self._own_failure()
            if failure is None:
                return int(self._native.receive(self._numbers[src], tag, address, nbytes, owner))
        except ValueError as error:
            failure = ConnectionError(str(error))
        raise self._public_error("recv", src, failure)

    def wait(
        self, number: int, method: str, peer: int, nbytes: int, timeout_s: float, pause_s: float = 0.0
    ) -> int | None:
        """Wait until a message is complete, and return the other rank.

        If ``timeout_s`` is 0, wait for ``pause_s``, and return ``None`` if the message is not complete then. After an
        error the message's memory is not written any more, and its data is not received. A receive from any rank fails
        if any rank was lost, since the message may be that rank's, or if all other ranks have left.

        Args:
          number: the message's number, which ``send`` or ``receive`` returned.
          method: "send" or "recv".
          peer: the other rank, or ``ANY_RANK``.
          nbytes: the size of the memory.
          timeout_s: 0, or the time after which the message fails. Then all later messages of this rank fail, too.
        Raises:
          MismatchError: the message has another size.
          PeerLostError, CollectiveTimeout: the other rank has ended, or is late.
        """
        # ``outcome``: the other rank; ``_WAITING``; (sender, bytes) of a message of another size, or (``ANY_RANK``, 0)
        # of one that another thread has withdrawn; ``None`` if the message is unknown.
        began, slice_s, failure, wanted = time.monotonic(), min(SLICE_S, timeout_s or pause_s), None, peer
        try:
            while (outcome := self._native.wait(number, 0.0 if failure else slice_s)) == _WAITING:
                if failure is not None:
                    break
                now = time.monotonic()
                if not timeout_s and now < self._checked[peer] + SLICE_S:
                    return None
                if peer == ANY_RANK:
                    source = self._native.source(number)
                    peer = self._lost_sender() if source == ANY_RANK else self._ranks[source]  # it has begun to send
                if timeout_s:  # a poll does not wait for the store
                    self._learn_of_abort(now)
                failure = self._failure(peer)  # the rank may have sent the message before it ended, so look again
                if failure is None and timeout_s and now >= began + timeout_s:
                    failure = TimeoutError(f"the message took more than {timeout_s:g} s")
                if failure is None and not timeout_s:
                    return None
        except BaseException as error:
            if isinstance(error, (ValueError, OSError)) and self._communicator.memory.fd < 0:
                # Another thread or a signal handler has closed the group during the wait.
                raise self._public_error(method, wanted, ConnectionError(str(error))) from None
            self._interrupt(number)  # Ctrl-C, or what a signal handler raised
            raise
        if isinstance(outcome, int) and outcome != _WAITING:
            return self._ranks[outcome]
        if isinstance(outcome, tuple) and outcome[0] != ANY_RANK:
            source, sent_nbytes = outcome
            sender = f'rank {self._communicator.global_ranks[self._ranks[source]]} of group "{self._communicator.name}"'
            problem = f"{sender} sent a message of another size."
            given = f"a message of {sent_nbytes} bytes for a tensor of {nbytes} bytes"
            raise MismatchError.of(problem, given, "a tensor of the size that was sent")
        if isinstance(failure, TimeoutError):
            self._timed_out = True
            with suppress(ValueError):  # raised if the group has been closed
                self._native.give_up()
        self.withdraw(number)
        failure = failure or ConnectionError("another wait for this message has failed")
        raise self._public_error(method, peer, failure, wanted == ANY_RANK)

    def carry_parts(self, nbytes: int) -> bool:
        """Return whether an all-to-all of parts of ``nbytes`` shall consist of messages of every two ranks.

        If hosts have several ranks, it copies less than the exchange of rail leaders. All ranks return the same.
        """
        communicator = self._communicator
        has_both = 1 < len(communicator.hosts) < communicator.size and not communicator.links.lost
        is_compiled = getattr(communicator.transport, "connections", None) is not None
        return has_both and is_compiled and nbytes >= _CARRIED_NBYTES

    def forget(self, number: int) -> None:
        """Free the result of a message when the message is complete."""
        with suppress(ValueError):  # raised if the group has been closed
            self._native.forget(number)

    def withdraw(self, number: int) -> None:
        """End a message that has failed. Its memory is not used any more."""
        with suppress(ValueError):  # raised if the group has been closed
            if not self._native.withdraw(number) and self._communicator.memory.abort_cause() is not None:
                self._native.give_up()  # the other rank may still read the memory, if it has not noticed the abort

    def _failure(self, peer: int) -> OSError | None:
        """Return why no message can be exchanged with a rank any more, or ``None`` if messages can be exchanged."""
        failure = self._own_failure()
        if failure is not None:
            return failure
        if peer != ANY_RANK:
            is_here, number = peer in self._communicator.host, self._numbers[peer]
            if self._native.mood(number) != _OPEN or (is_here and not self._communicator.memory.alive(peer)):
                why = "" if is_here else self._native.why(number)
                return ConnectionError(why or "the other rank ended, or a message of it timed out")
        self._checked[peer] = time.monotonic()
        return None

    def _lost_sender(self) -> int:
        """Return a rank that was lost, or, if all other ranks have left the group, one of them; or ``ANY_RANK``."""
        communicator, left = self._communicator, []
        for number, rank in enumerate(self._ranks):
            if rank == communicator.rank:
                continue
            # This order: a rank that leaves first changes its mood.
            is_alive = number >= len(communicator.host) or communicator.memory.alive(rank)
            mood = self._native.mood(number)
            if mood == _GAVE_UP or (mood == _OPEN and not is_alive):
                return rank
            left += [rank] * (mood != _OPEN)
        return left[0] if left and len(left) == len(self._ranks) - 1 else ANY_RANK

    def _own_failure(self) -> OSError | None:
        """Return why this rank can exchange no message with any rank, or ``None``."""
        if self._communicator.memory.abort_cause() is not None:
            return ConnectionError("the group was aborted")
        return ConnectionAbortedError("this rank closed its connections") if self._timed_out else None

    def _learn_of_abort(self, now: float) -> None:
        """If a rank of another host has aborted the group, abort it on this host, too, with the same error.

        The shared memory only shows aborts of this host, and the other rank of a message may know of none.
        """
        communicator = self._communicator
        if len(communicator.hosts) > 1 and now > self._queried + _QUERY_S and communicator.memory.abort_cause() is None:
            self._queried = now
            cause = communicator.rendezvous.abort_cause()
            error = None if cause is None else decoded(cause)
            # Others may take this rank for dead, since it closed its connections. That is no reason for this rank.
            if error is not None and communicator.global_ranks[communicator.rank] not in getattr(error, "ranks", ()):
                communicator.interrupt(error)

    def _interrupt(self, number: int) -> None:
        """Withdraw a message whose wait was interrupted, and abort the group, since the other rank still expects it."""
        with suppress(ValueError):  # raised if the group has been closed
            if self._native.wait(number, 0.0) == _WAITING:
                if not self._native.withdraw(number):
                    self._native.give_up()
                self._communicator.interrupt()

    def _public_error(self, method: str, peer: int, failure: OSError, takes_any: bool = False) -> ReductionError:
        """Return the error that the caller of ``method`` gets because of ``failure``. See ``message_failure``."""
        died = isinstance(failure, ConnectionError) and self._has_ended(peer)
        other = None if peer == ANY_RANK else peer
        return self._communicator.detector.message_failure(method, other, failure, died, takes_any or other is None)

    def _has_ended(self, peer: int) -> bool:
        """Return whether the process of a rank of another host has ended, as far as its host answers."""
        communicator, until = self._communicator, time.monotonic() + END_S
        if peer in communicator.ranks_of_other_hosts and communicator.memory.fd >= 0:
            # The request has no meaning. Its connection is refused if the process has ended.
            with suppress(Ended):
                request: dict[str, Any] = {"what": "published", "key": ""}
                while communicator.agreements.peer(peer).ask(communicator.token, request, END_S) is not None:
                    if time.monotonic() > until:
                        return False
                    time.sleep(END_S / 20)
                return False
            return True
        return False


class PartExchange:
    """An all-to-all of parts of any sizes: every two ranks exchange their parts. See ``base.RunningCollective``.

    All ranks must make their exchanges in the same order, and know that the sizes of all parts are right. ``progress``:
    the number of messages that are complete.
    """

    def __init__(
        self, messages: Messages, owner: Any, sources: Sequence[ArrayView], results: Sequence[ArrayView]
    ) -> None:
        """Use arrays of bytes: ``sources[k]`` is for rank k, ``results[k]`` comes from it. ``owner``: see ``send``."""
        self._messages, self._owner, self._sources, self._results = messages, owner, sources, results
        self._pending: deque[tuple[int, str, int, int]] = deque()  # see ``Messages.wait``
        self._error: ReductionError | None = None
        self.progress = 0

    def begin(self, rank: int) -> None:
        """Begin all messages of ``rank``, to and from the others."""
        ranks = len(self._sources)
        try:
            for step in range(1, ranks):
                src, dst = (rank - step) % ranks, (rank + step) % ranks
                for method, peer, part in (("recv", src, self._results[src]), ("send", dst, self._sources[dst])):
                    start = self._messages.send if method == "send" else self._messages.receive
                    for at in range(0, part.size, _PART_NBYTES):
                        nbytes = min(_PART_NBYTES, part.size - at)
                        number = start(self._owner, part.address + at, nbytes, peer, _PARTS_TAG)
                        self._pending.append((number, method, peer, nbytes))
        except ReductionError as error:  # ``finish`` raises it: other ranks wait for this one
            self._error = error.with_traceback(None)

    def wait(self, seconds: float) -> bool:
        """Wait about so long. Return whether it has succeeded or failed."""
        try:
            while self._pending and self._error is None:
                number = self._pending[0][0]
                if number and self._messages.wait(*self._pending[0], 0.0, max(seconds, _SLICE_S)) is None:
                    return False
                self._pending.popleft()
                self._messages.forget(number)
                self.progress += 1
        except ReductionError as error:
            self._error = error.with_traceback(None)
        return True

    def finish(self) -> None:
        """Raise a ``ConnectionError`` if a message has failed."""
        if self._error is not None:
            raise ConnectionError(str(self._error))

    def end(self) -> None:
        """Withdraw the messages that are not complete, after a failure."""
        while self._pending:
            self._messages.withdraw(self._pending.pop()[0])
