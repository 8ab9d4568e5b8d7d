"""``RepeatedRequest``: a request to other hosts, which is repeated until a rank of each host answers.

Input: the processes that may answer for each host, and the request. Output: the latest answer of each host, and which
hosts are silent. An answer counts whenever it comes, so neither a long round trip nor a lost packet makes a host
silent, and a silent host does not delay the answers of others. A lost link does not make a host silent either: a host
that does not answer soon is also asked through processes of third hosts. The caller's thread decides in ``read`` which
requests to send. Each request runs in a thread of its own.
"""

from __future__ import annotations

import time
from _thread import start_new_thread
from collections.abc import Mapping, Sequence
from queue import Empty, Queue
from typing import Final

from . import peer_requests, shortage
from .peer_requests import Ended, Json, Peer

SILENT_S: Final = 2.0  # how long a host that does not answer is waited for
_AT_ONCE: Final = 4  # processes of a host that are asked at the same time
_STAGGER_S: Final = 0.1  # from asking some processes of a host to asking the next ones
_REPEAT_S: Final = 0.5  # from asking the last ones to asking again; lost packets are sent again after up to 1 s
_RETRY_S: Final = 0.02  # from the last reply to asking again, if all processes have replied without an answer
_RELAY_S: Final = 0.4  # how long a host may take to answer before it is asked through other hosts, too


class _Question:
    """The latest question to a host, sent to several of its processes. ``is_open``: whether no process has answered."""

    def __init__(self, processes: Sequence[Peer], number: int, now: float) -> None:
        self.number, self.asked_at, self.began, self.is_open = number, now, now, True
        self.waiting = [*processes]  # processes that are still to be asked before all are asked again
        self.living = [*processes]  # processes that have not ended
        self.missing = 0  # direct requests without a reply
        self.due, self.again = now, False  # when to ask next; whether all processes were asked already
        self.relay_due, self.relayed = now + _RELAY_S, 0  # when to ask through relays next; how often this was done


class RepeatedRequest:
    """A request to several hosts. One thread at a time uses this.

    ``found``: the latest answer of each host that has answered. It is ``None`` if all processes there have ended.

    Args:
      processes: for each host the processes that may answer for it.
      token: the token of their group.
      again_s: how long after its answer a host is asked again; ``None``: never.
      relays: for each host processes of other hosts, through which it may be reached.
    """

    def __init__(
        self,
        processes: Mapping[int, Sequence[Peer]],
        token: str,
        request: dict[str, Json],
        again_s: float | None = None,
        relays: Mapping[int, Sequence[Peer]] | None = None,
    ) -> None:
        self._relays = relays or {}
        self._processes, self._token, self._request, self._again_s = processes, token, request, again_s
        # No SimpleQueue: in CPython 3.11 its ``get`` waits forever if the remaining time has become negative.
        self._replies = Queue[tuple[int, int, Peer, Peer | None, dict[str, Json] | None, float]]()
        self._read_at = now = time.monotonic()
        self._hosts = {host: _Question(each, 0, now) for host, each in processes.items()}
        self.found: dict[int, dict[str, Json] | None] = {}
        self.answered_at = dict.fromkeys(processes, now)  # the start, until a host has answered

    def read(self, wait_s: float = 0.0) -> list[int]:
        """Send the requests that are due. Return the hosts that have answered since the last call.

        ``wait_s``: how long to wait for the first answer.
        """
        now = time.monotonic()
        if now > self._read_at + SILENT_S:  # no request was repeated since then: this process was stopped, or was busy
            for host in self._hosts.values():
                host.began = now
        answered: list[int] = []
        until = now + wait_s
        while True:
            self._ask(now)
            try:
                left_s = 0.0 if answered else until - now
                reply = self._replies.get(timeout=left_s) if left_s > 0 else self._replies.get_nowait()
            except Empty:
                break
            if self._note(*reply):
                answered.append(reply[0])
            now = time.monotonic()
        self._read_at = time.monotonic()
        return answered

    def is_silent(self, host: int) -> bool:
        """Return whether a host has not answered the latest question within ``SILENT_S``."""
        asked = self._hosts[host]
        return asked.is_open and time.monotonic() >= asked.began + SILENT_S

    def is_due(self, host: int) -> bool:
        """Return whether a host has not answered the latest question, but may still do so within ``ANSWER_S``."""
        asked = self._hosts[host]
        return asked.is_open and time.monotonic() < asked.began + peer_requests.ANSWER_S

    def is_current(self, host: int) -> bool:
        """Return whether the latest answer of a host is at most ``ANSWER_S`` old."""
        return host in self.found and time.monotonic() < self.answered_at[host] + peer_requests.ANSWER_S

    def _ask(self, now: float) -> None:
        """Send the requests that are due at the time ``now``."""
        for host, asked in self._hosts.items():
            if not asked.is_open:
                if self._again_s is None or self.found[host] is None or now < self.answered_at[host] + self._again_s:
                    continue
                asked = self._hosts[host] = _Question(self._processes[host], asked.number + 1, now)
            if now >= asked.relay_due:
                self._ask_through_relays(host, asked, now)
            if now < asked.due:
                continue
            asked.waiting = asked.waiting or [*asked.living]
            count = _AT_ONCE if asked.waiting[0].relay is None else 1  # only one through a relay, to keep its load low
            batch, asked.waiting = asked.waiting[:count], asked.waiting[count:]
            asked.again |= not asked.waiting
            asked.due = now + (_REPEAT_S if asked.again else _STAGGER_S)
            for process in batch:
                relay = process.relay if process.relay in self._relays.get(host, ()) else None
                if relay is not None:
                    start_new_thread(self._reply, (host, asked.number, process, relay, now))
                if relay is None or now >= process.tried_until:  # also directly, to notice a link that works again
                    process.tried_until = now + SILENT_S
                    asked.missing += 1
                    start_new_thread(self._reply, (host, asked.number, process, None, now))

    def _ask_through_relays(self, host: int, asked: _Question, now: float) -> None:
        """Ask processes of a host that does not answer. Each of these requests passes through a relay."""
        if not self._replies.empty():  # this process was delayed: the host may have replied
            return
        asked.relay_due = now + _REPEAT_S
        reached = [relay for relay in self._relays.get(host, ()) if relay.known]
        # First, relays that were reached directly. ``relayed`` selects another pair of relay and process each time.
        relays, living = sorted(reached, key=lambda relay: relay.relay is not None), asked.living
        for _ in range(min(_AT_ONCE, max(len(relays), len(living))) if relays and living else 0):
            relay, process = relays[asked.relayed % len(relays)], living[asked.relayed % len(living)]
            asked.relayed += 1
            start_new_thread(self._reply, (host, asked.number, process, relay, asked.asked_at))

    def _reply(self, host: int, number: int, process: Peer, relay: Peer | None, since: float) -> None:
        """Send the request to a process, and put its reply, or ``None``, into ``_replies``."""
        reply: dict[str, Json] | None = None
        try:
            if relay is None:
                reply = process.ask(self._token, self._request, SILENT_S)
            else:
                reply = process.ask_through(relay, self._token, self._request, SILENT_S, since)
        except Ended:
            reply = {"ended": True}
        except MemoryError as error:
            shortage.note(error)
        self._replies.put((host, number, process, relay, reply, time.monotonic()))

    def _note(
        self, host: int, number: int, process: Peer, relay: Peer | None, reply: dict[str, Json] | None, now: float
    ) -> bool:
        """Record the reply of a process. Return whether it is the answer of its host to the latest question."""
        asked = self._hosts[host]
        if number != asked.number or not asked.is_open:
            return False  # another process, or the same one, has answered this question before
        if relay is None:
            asked.missing -= 1
            if reply is not None:  # the link is not lost
                asked.relay_due = now + _RELAY_S
        elif reply is not None:
            asked.relay_due = now + _RETRY_S  # if this is not an answer, another process of the host is asked
        if reply is not None and reply.keys() & {"ended", "unknown"}:  # it has ended, or has left the group
            asked.living = [each for each in asked.living if each is not process]
            reply = None
        elif reply is not None and "otherwise" in reply:  # see ``Agreements.answer``
            reply = None
        if reply is None and asked.living:
            if not asked.missing and relay is None:
                asked.due = now + _RETRY_S * asked.again
            return False
        asked.is_open, self.answered_at[host], self.found[host] = False, now, reply
        is_reached = max(each.reached_at for each in self._processes[host]) >= asked.asked_at
        for each in self._processes[host]:  # all of them are behind the same link
            each.relay = None if is_reached else relay
        return True
