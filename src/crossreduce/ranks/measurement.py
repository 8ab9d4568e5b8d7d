"""How fast the links between hosts are, measured over the wire that ranks use.

In: a communicator.  Out: the same ``Topology`` on all ranks, by which reductions are planned from then on. The first
rank of each host measures: pairs of hosts one after the other, pairs that share no host together, each direction by
itself; then all at once, which shows where a host's links share one cable. Numbers are rounded to three digits.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations
from statistics import median
from typing import Final, NamedTuple

from .. import kernels
from ..errors import ArgumentError, message, shown
from ..topology import Link, Switch, Topology
from ..transports.base import Pending, Wire
from . import exchange as between
from .communicator import Communicator
from .multi_host import names

_TAG: Final = 1  # another than reductions', which may go on beside
_PINGS: Final = 9
_FIRST: Final = 1 << 20  # bytes of the first try, some of which a token bucket lets by at once
_MESSAGES: Final = 8
_TRIES: Final = 5  # streams, of which the median counts: work beside slows one down, a token bucket speeds one up
_ALL_AT_ONCE: Final = 3  # of these the median likewise
_MOST: Final = 1 << 25  # bytes sent in one direction at most
_SHARED: Final = 0.75  # of what its links carry one by one: a host that takes in less from all has one cable
_COPIED: Final = 1 << 22  # bytes for the speed of memory
_LOCAL_LATENCY_S: Final = 1e-6


class Speeds(NamedTuple):
    """What was measured. Bandwidths in GB/s.

    Args:
      gb_per_s: row src, column dst, of two hosts at a time; 0 on the diagonal.
      latency_s: likewise, one way.
      cables: for each host what it takes in from all others at once; 0: as much as its links one by one.
      memory: for each host what one of its ranks copies while all do.
    """

    gb_per_s: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]
    cables: tuple[float, ...]
    memory: tuple[float, ...]


def measure(communicator: Communicator, seconds: float = 1.0) -> Topology:
    """Measure the links between a group's hosts, plan its reductions by them from now on, and return all of them.

    All ranks call it together, best while nothing else uses the network.

    Args:
      communicator: the group's.
      seconds: about how long it may take, in all; slow links take longer, as something has to go over them.
    Returns:
      A device for each rank, in order, named after its host ("host1/cpu:2"); ranks of a host are joined by a switch of
      the speed of its memory, hosts by links of what was measured. The same on all ranks.
    Raises:
      ArgumentError: ``seconds`` is not above 0.
      PeerLostError, CollectiveTimeout: as every call of the group.
    """
    if not seconds > 0:
        raise ArgumentError(message("measuring takes some time.", f"seconds={shown(seconds)}", "seconds=1.0"))
    hosts, rank = communicator.hosts, communicator.rank
    count = len(hosts)
    communicator.agree(f"measure_topology {seconds:g} s")
    own = hosts.index(communicator.host)
    found: dict[str, object] = {"memory": _memory()}
    if count > 1:
        assert communicator.wire is not None
        leads = [ranks[0] for ranks in hosts]
        probe = _Probe(communicator.wire, leads, own, communicator.timeout_s) if rank in leads else None
        turns = _tournament(count)
        each_s = seconds / (2 * len(turns) + 1)
        with communicator.afar():
            for pairs in turns:
                other = next((b if a == own else a for a, b in pairs if own in (a, b)), None)
                if probe is not None and other is not None:
                    probe.pair(other, each_s)
                communicator.agree("measure_topology")
        if probe is not None:
            found |= {"in": probe.bandwidth, "latency": probe.latency}
    speeds = _gathered(communicator, found)
    if count > 2:
        tries = []
        with communicator.afar():
            for _ in range(_ALL_AT_ONCE):
                tries.append(0.0 if probe is None else probe.all_at_once(speeds.gb_per_s, each_s / _ALL_AT_ONCE))
                communicator.agree("measure_topology")  # nobody sends before all have taken in what came before
        cable = json.dumps(median(tries)).encode()
        said = [json.loads(one) for one in communicator.rendezvous.all_gather(cable)]
        speeds = speeds._replace(cables=_cables(speeds, [said[ranks[0]] for ranks in hosts]))
    if count > 1:
        communicator.plan_on(of_hosts(speeds))
    return whole(speeds, hosts)


def _memory() -> float:
    """Return how many GB/s this rank copies, while all of its host do."""
    source, target = kernels.memory(_COPIED), kernels.memory(_COPIED)
    a, b = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (source, target))
    ctypes.memset(a, 1, _COPIED)
    ctypes.memset(b, 1, _COPIED)
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        ctypes.memmove(b, a, _COPIED)
        taken.append(time.perf_counter() - began)
    return _COPIED / median(taken) / 1e9


def _tournament(count: int) -> list[list[tuple[int, int]]]:
    """Return turns of pairs in which every two hosts meet once and none is in two pairs of a turn.

    >>> _tournament(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    seats = [*range(count), *([-1] if count % 2 else [])]
    turns = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = [(min(pair), max(pair)) for pair in zip(seats[:half], reversed(seats[half:]), strict=True)]
        turns.append(sorted(pair for pair in pairs if pair[0] >= 0))
        seats[1:] = [seats[-1], *seats[1:-1]]
    return turns


class _Probe:
    """Messages between the first ranks of hosts, to see how long they take."""

    def __init__(self, wire: Wire, peers: Sequence[int], host: int, timeout_s: float) -> None:
        self.wire, self.peers, self.host, self.timeout_s = wire, peers, host, timeout_s
        self.bandwidth = [0.0] * len(peers)  # from each host to this one, in GB/s
        self.latency = [0.0] * len(peers)
        self.memory = kernels.memory(2 * _MOST)  # one half to send, one to receive
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.at, 1, 2 * _MOST)

    def pair(self, other: int, seconds: float) -> None:
        """Measure the links from and to another host, which does the same."""
        first = self.host < other
        taken = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            if first:
                self._send(other, 8)
                self._take(other, 8)
            else:
                self._take(other, 8)
                self._send(other, 8)
            taken.append((time.perf_counter() - began) / 2)
        self.latency[other] = median(taken[1:])
        # The first try's speed says how much to send in the time there is; who receives says how much that is.
        for sending in (first, not first):
            if sending:
                self._stream_out(other, _FIRST)
                nbytes = self._told(other)
                for _ in range(_TRIES):
                    self._stream_out(other, nbytes)
            else:
                began = time.perf_counter()
                self._stream_in(other, _FIRST)
                rough = _FIRST / (time.perf_counter() - began) / 1e9
                nbytes = int(min(_MOST, max(_FIRST, rough * 1e9 * seconds / 2 / _TRIES)))
                self._tell(other, nbytes)
                self.bandwidth[other] = median(self._stream_in(other, nbytes) for _ in range(_TRIES))

    def all_at_once(self, gb_per_s: Sequence[Sequence[float]], seconds: float) -> float:
        """Return how many GB/s this host takes in from all others, which all send at once, each as much as it may."""
        room = _MOST // len(self.peers)

        def share(src: int, dst: int) -> int:
            return int(min(room, max(_FIRST, gb_per_s[src][dst] * 1e9 * seconds / 2)))

        others = [other for other in range(len(self.peers)) if other != self.host]
        incoming = [(self._receive(other, share(other, self.host), other * room), other) for other in others]
        began = time.perf_counter()
        outgoing = [(self._start(other, share(self.host, other)), other) for other in others]
        for pending, other in incoming:
            between.wait_for(pending, self.peers[other], self.timeout_s)
        taken = time.perf_counter() - began
        for pending, other in outgoing:
            between.wait_for(pending, self.peers[other], self.timeout_s)
        return sum(share(other, self.host) for other in others) / taken / 1e9

    def _stream_out(self, other: int, nbytes: int) -> None:
        sent = [self._start(other, nbytes // _MESSAGES) for _ in range(_MESSAGES)]
        for pending in sent:
            between.wait_for(pending, self.peers[other], self.timeout_s)

    def _stream_in(self, other: int, nbytes: int) -> float:
        """Return the GB/s of a stream of messages, from the second on: the first few pay for its start."""
        size = nbytes // _MESSAGES
        posted = [self._receive(other, size, k * size) for k in range(_MESSAGES)]
        came = []
        for pending in posted:
            between.wait_for(pending, self.peers[other], self.timeout_s)
            came.append(time.perf_counter())
        return (_MESSAGES - 2) * size / max(came[-1] - came[1], 1e-9) / 1e9

    def _start(self, other: int, nbytes: int) -> Pending:
        return self.wire.send(self.at, nbytes, self.peers[other], _TAG)

    def _receive(self, other: int, nbytes: int, offset: int) -> Pending:
        return self.wire.receive(self.at + _MOST + offset, nbytes, self.peers[other], _TAG)

    def _send(self, other: int, nbytes: int) -> None:
        between.wait_for(self._start(other, nbytes), self.peers[other], self.timeout_s)

    def _take(self, other: int, nbytes: int) -> None:
        between.wait_for(self._receive(other, nbytes, 0), self.peers[other], self.timeout_s)

    def _tell(self, other: int, number: int) -> None:
        ctypes.c_int64.from_address(self.at).value = number
        self._send(other, 8)

    def _told(self, other: int) -> int:
        self._take(other, 8)
        return ctypes.c_int64.from_address(self.at + _MOST).value


def _gathered(communicator: Communicator, found: dict[str, object]) -> Speeds:
    """Put all ranks' numbers together: the same on all of them, as all work with the same texts."""
    said = [json.loads(one) for one in communicator.rendezvous.all_gather(json.dumps(found).encode())]
    hosts = communicator.hosts
    first = [said[ranks[0]] for ranks in hosts]
    count = len(hosts)
    nothing = [0.0] * count
    into = [one.get("in", nothing) for one in first]
    late = [one.get("latency", nothing) for one in first]
    return Speeds(
        tuple(tuple(_rounded(into[dst][src]) for dst in range(count)) for src in range(count)),
        tuple(tuple(_rounded((late[a][b] + late[b][a]) / 2) for b in range(count)) for a in range(count)),
        (0.0,) * count,
        tuple(_rounded(median(said[rank]["memory"] for rank in ranks)) for ranks in hosts),
    )


def _cables(speeds: Speeds, taken_in: Sequence[float]) -> tuple[float, ...]:
    """Return the speed of the cables of hosts that take in less from all at once than from one by one; 0 for others."""
    singly = [sum(row[dst] for row in speeds.gb_per_s) for dst in range(len(taken_in))]
    # A burst may make it seem less than the fastest single link, which it cannot be.
    fastest = [max(row[dst] for row in speeds.gb_per_s) for dst in range(len(taken_in))]
    return tuple(
        _rounded(max(together, most)) if together < _SHARED * apart else 0.0
        for together, apart, most in zip(taken_in, singly, fastest, strict=True)
    )


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def of_hosts(speeds: Speeds) -> Topology:
    """Return the topology of hosts: links of every two, behind a cable where a host has but one.

    >>> mesh = Speeds(((0, 1), (2, 0)), ((0, 1e-4), (1e-4, 0)), (0, 0), (10, 10))
    >>> of_hosts(mesh).link("host1/cpu:0", "host0/cpu:0").bandwidth
    Fraction(2, 1)
    """
    count = len(speeds.cables)
    devices = names(count)
    ends = [f"host{k}.cable" if speeds.cables[k] else devices[k] for k in range(count)]
    switches = [end for end, device in zip(ends, devices, strict=True) if end != device]
    return Topology(devices, tuple(_links(speeds, ends, devices)), tuple(map(Switch, switches)))


def whole(speeds: Speeds, hosts: Sequence[Sequence[int]]) -> Topology:
    """Return the topology of all ranks: those of a host around a switch, hosts joined as measured."""
    count = len(hosts)
    inner = [f"host{k}" for k in range(count)]
    ends = [f"host{k}.cable" if speeds.cables[k] else inner[k] for k in range(count)]
    devices = {rank: f"host{k}/cpu:{place}" for k, ranks in enumerate(hosts) for place, rank in enumerate(ranks)}
    links = _links(speeds, ends, inner)
    for k, ranks in enumerate(hosts):
        for rank in ranks:
            links += _both(devices[rank], inner[k], speeds.memory[k], _LOCAL_LATENCY_S)
    switches = [*inner, *(end for end in ends if end not in inner)]
    return Topology(tuple(devices[rank] for rank in sorted(devices)), tuple(links), tuple(map(Switch, switches)))


def _links(speeds: Speeds, ends: Sequence[str], inner: Sequence[str]) -> list[Link]:
    """Return the links of every two hosts' ends, and those from a host to its end where that is another node."""
    links = []
    for src, dst in permutations(range(len(ends)), 2):
        seconds = Fraction(repr(speeds.latency_s[src][dst]))
        links.append(Link(ends[src], ends[dst], Fraction(repr(speeds.gb_per_s[src][dst])), seconds))
    for end, host, speed in zip(ends, inner, speeds.cables, strict=True):
        if end != host:
            links += _both(host, end, speed, 0.0)
    return links


def _both(a: str, b: str, gb_per_s: float, latency_s: float) -> list[Link]:
    speed, seconds = Fraction(repr(gb_per_s)), Fraction(repr(latency_s))
    return [Link(a, b, speed, seconds), Link(b, a, speed, seconds)]
