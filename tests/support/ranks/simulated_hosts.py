"""Simulated hosts, which answer requests in simulated time: without processes, threads and the clock."""

import heapq
import itertools
from queue import Empty
from types import SimpleNamespace

from crossreduce.ranks.agreement import agreement, lost_ranks
from crossreduce.ranks.connections import repeated_request
from crossreduce.ranks.connections.peer_requests import Ended


class SimulatedHosts:
    """Replaces the clock, the threads and the queues of agreements. ``now``: the simulated time.

    ``behaviour(process, request, now)`` returns how long a process takes to answer, and its answer: ``None`` if it does
    not answer, or ``Ended`` if it has ended. ``asked``: the time and the process of each request.
    """

    def __init__(self, monkeypatch, behaviour):
        self.now, self.behaviour, self.asked = 0.0, behaviour, []

        class SimulatedQueue(Queue):
            hosts = self

        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        for module in (agreement, lost_ranks, repeated_request):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(repeated_request, "Queue", SimulatedQueue)
        monkeypatch.setattr(repeated_request, "start_new_thread", self._run)

    def sleep(self, seconds):
        self.now = round(self.now + seconds, 6)  # times are compared

    def _run(self, function, arguments):
        began = self.now
        function(*arguments)
        self.now = began

    def process(self, name):
        """Return a simulated process. In ``asked`` a relay is shown after its name, as in "a through b"."""

        def ask(token, request, timeout_s, called=name):
            self.asked.append((round(self.now, 3), called))
            delay_s, answer = self.behaviour(called, request, self.now)
            self.sleep(min(delay_s, timeout_s))
            if answer is Ended:
                raise Ended
            if answer is None or delay_s > timeout_s:
                return None
            if called == name:
                process.relay, process.reached_at = None, self.now
            return answer

        def ask_through(relay, token, request, timeout_s, since):
            answer = ask(token, request, timeout_s, f"{name} through {relay.name}")
            process.relay = relay if answer is not None else None if process.relay is relay else process.relay
            return answer

        process = SimpleNamespace(ask=ask, ask_through=ask_through, name=name, known=name, relay=None)
        process.tried_until, process.reached_at = 0.0, -1.0
        return process


class Queue:
    """A queue whose items are put at later times of the simulation."""

    def __init__(self):
        self._items, self._order = [], itertools.count()

    def __class_getitem__(cls, _):
        return cls

    def put(self, item):
        heapq.heappush(self._items, (self.hosts.now, next(self._order), item))

    def get(self, timeout):
        until = self.hosts.now + timeout
        if self._items and self._items[0][0] <= until:
            self.hosts.now = max(self.hosts.now, self._items[0][0])
            return heapq.heappop(self._items)[2]
        self.hosts.now = until
        raise Empty

    def empty(self):
        return not self._items or self._items[0][0] > self.hosts.now

    def get_nowait(self):
        return self.get(0.0)
