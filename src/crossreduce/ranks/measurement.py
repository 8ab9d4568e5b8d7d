"""Measures how fast the links between hosts are, over the transport that the ranks use.

Input: a communicator. Output: the same ``Topology`` on all ranks. Later reductions of the group are planned on its
links between hosts. The first rank of each host measures these links. First, each pair of hosts measures each direction
by itself; pairs without a common host run at the same time. Then all hosts send at once, which shows whether the links
of a host share one cable. Numbers are rounded to three digits.
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
from ..errors import ArgumentError, shown
from ..topology import Link, Switch, Topology
from .communicator import Communicator
from .inter_host.exchange import wait_for
from .inter_host.two_level import host_names
from .transports.base import PendingMessage, Transport

_TAG: Final = 1  # the tag of messages; reductions, which may run at the same time, have another
_PINGS: Final = 9  # round trips; the median of all but the first is the latency
_FIRST_BYTES: Final = 1 << 20  # size of the first stream and the least of any: a token bucket passes some at full speed
_MESSAGES: Final = 8  # messages per stream; the first two are not timed
_STREAMS: Final = 5  # per link; the median counts, since other work may slow one down and a token bucket speed one up
_LONG_S: Final = 2.0  # if the first stream takes longer (less than 4 Mbit/s), its speed counts, and no other is sent
_ALL_AT_ONCE: Final = 3  # repeats of streams between all hosts; the median counts
_MAX_BYTES: Final = 1 << 25  # the most bytes of a stream, and of what a host receives at once
_SHARED: Final = 0.75  # a host's links share a cable if, all at once, they reach less than this part of single speeds
_COPIED_BYTES: Final = 1 << 22  # copied to measure the bandwidth of memory
_LOCAL_LATENCY_S: Final = 1e-6  # assumed, not measured: between the ranks of a host


class Speeds(NamedTuple):
    """Measured speeds. Bandwidths are in GB/s."""

    gb_per_s: tuple[tuple[float, ...], ...]  # row src, column dst, each link measured by itself; 0 if there is no link
    latency_s: tuple[tuple[float, ...], ...]  # row src, column dst, one way
    cables: tuple[float, ...]  # for each host the bandwidth of the cable that its links share; 0 if they share none
    memory: tuple[float, ...]  # for each host the bandwidth of a copy by one of its ranks while all of them copy


def measure(communicator: Communicator, seconds: float = 1.0) -> Topology:
    """Measure the links between a group's hosts, plan its reductions on them from now on, and return the topology.

    All ranks call it together, best while no other program uses the network. A pair of hosts over whose link no message
    arrives within 10 s has no link any more: see ``Communicator.check_links``.

    Args:
      communicator: of the group whose links are measured.
      seconds: about how long this may take in all. Slow links take longer, since a minimum of bytes must be sent.
    Returns:
      A device for each rank, in order, named after its host ("host1/cpu:2"). The ranks of a host are joined by a switch
      with the bandwidth of the host's memory, hosts by links with the measured speeds. It is the same on all ranks.
    Raises:
      ArgumentError: ``seconds`` is not above 0.
      ReductionError: some hosts have no route to each other any more.
      PeerLostError, CollectiveTimeout: as for every call of the group.
    """
    if not seconds > 0:
        raise ArgumentError.of("seconds must be above 0.", f"seconds={shown(seconds)}", "seconds=1.0")
    hosts, rank = communicator.hosts, communicator.rank
    count = len(hosts)
    communicator.check_links(f"measure_topology {seconds:g} s")
    own_host = hosts.index(communicator.host)
    measured: dict[str, object] = {"memory": _memory_bandwidth()}
    if count > 1:
        assert communicator.transport is not None
        leaders = [ranks[0] for ranks in hosts]
        probe = _Probe(communicator.transport, leaders, own_host, communicator.timeout_s) if rank in leaders else None
        rounds = _pairings(count)
        each_s = seconds / (2 * len(rounds) + 1)
        with communicator.calls.aborting():
            for pairs in rounds:
                other = next((b if a == own_host else a for a, b in pairs if own_host in (a, b)), None)
                if probe is not None and other is not None and (own_host, other) in communicator.links:
                    probe.pair(other, each_s)
                communicator.require_same("measure_topology")
        if probe is not None:
            measured |= {"in": probe.bandwidth, "latency": probe.latency}
    speeds = _gather_speeds(communicator, measured)
    if count > 2:
        received = []  # results of ``_Probe.all_at_once``
        with communicator.calls.aborting():
            for _ in range(_ALL_AT_ONCE):
                received.append(probe.all_at_once(speeds.gb_per_s, each_s / _ALL_AT_ONCE) if probe else (0.0, 0.0))
                communicator.require_same("measure_topology")  # all have received before any sends again
        own_cable = json.dumps([median(column) for column in zip(*received, strict=True)]).encode()
        of_ranks = [json.loads(text) for text in communicator.rendezvous.all_gather(own_cable)]
        speeds = speeds._replace(cables=_cables(speeds, [of_ranks[ranks[0]] for ranks in hosts]))
    if count > 1:
        communicator.plan_on(host_topology(speeds))
    return rank_topology(speeds, hosts)


def _memory_bandwidth() -> float:
    """Return the bandwidth in GB/s at which this rank copies memory while all ranks of its host do so."""
    memory = kernels.memory(2 * _COPIED_BYTES)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(at, 1, 2 * _COPIED_BYTES)
    times_s = []
    for _ in range(5):
        began = time.perf_counter()
        ctypes.memmove(at + _COPIED_BYTES, at, _COPIED_BYTES)
        times_s.append(time.perf_counter() - began)
    return _COPIED_BYTES / median(times_s) / 1e9


def _pairings(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds, each a list of pairs of hosts. Every two hosts meet in one round, and each once per round.

    This is the circle method for round-robin tournaments. In an odd number of hosts, the one paired with -1 pauses.

    >>> _pairings(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    seats = [*range(count), *([-1] if count % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = [(min(pair), max(pair)) for pair in zip(seats[:half], reversed(seats[half:]), strict=True)]
        rounds.append(sorted(pair for pair in pairs if pair[0] >= 0))
        seats[1:] = [seats[-1], *seats[1:-1]]
    return rounds


class _Probe:
    """Times messages between the first ranks of the hosts."""

    def __init__(self, transport: Transport, peers: Sequence[int], host: int, timeout_s: float) -> None:
        self.transport, self.peers, self.host, self.timeout_s = transport, peers, host, timeout_s
        self.bandwidth = [0.0] * len(peers)  # from each host to this one, in GB/s
        self.latency = [0.0] * len(peers)
        self.memory = kernels.memory(2 * _MAX_BYTES)  # one half to send, one to receive
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.at, 1, 2 * _MAX_BYTES)

    def pair(self, other: int, seconds: float) -> None:
        """Measure the latency to another host and the bandwidth from it. Both hosts make this call."""
        first = self.host < other
        one_way_s = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            for sending in (first, not first):
                self._wait(self._send(other, 8) if sending else self._receive(other, 8), other)
            one_way_s.append((time.perf_counter() - began) / 2)
        self.latency[other] = median(one_way_s[1:])
        # One host streams to the other, and then back. The speed of a short first stream determines how many bytes fit
        # into ``seconds``; the receiver computes this number, and tells it to the sender.
        for sending in (first, not first):
            if sending:
                self._stream_out(other, _FIRST_BYTES)
                self._wait(self._receive(other, 8), other)
                nbytes = ctypes.c_int64.from_address(self.at + _MAX_BYTES).value
                for _ in range(_STREAMS if nbytes else 0):
                    self._stream_out(other, nbytes)
            else:
                began = time.perf_counter()
                self._stream_in(other, _FIRST_BYTES)
                taken_s = time.perf_counter() - began
                rough = _FIRST_BYTES / taken_s / 1e9
                nbytes = int(min(_MAX_BYTES, max(_FIRST_BYTES, rough * 1e9 * seconds / 2 / _STREAMS)))
                if taken_s > _LONG_S:
                    nbytes = 0  # no further streams
                ctypes.c_int64.from_address(self.at).value = nbytes
                self._wait(self._send(other, 8), other)
                streams = [self._stream_in(other, nbytes) for _ in range(_STREAMS if nbytes else 0)]
                self.bandwidth[other] = median(streams or [rough])

    def all_at_once(self, gb_per_s: Sequence[Sequence[float]], seconds: float) -> tuple[float, float]:
        """Receive from all other hosts, which send at the same time. All hosts make this call.

        Returns the speed of the links to this host as a part of their single speeds, and their joint speed in GB/s.
        """
        room = _MAX_BYTES // len(self.peers)

        def nbytes(src: int, dst: int) -> int:
            return int(min(room, max(_FIRST_BYTES, gb_per_s[src][dst] * 1e9 * seconds / 2)))

        others = [other for other, speed in enumerate(gb_per_s[self.host]) if speed]
        incoming = [(self._receive(other, nbytes(other, self.host), other * room), other) for other in others]
        began = time.perf_counter()
        outgoing = [(self._send(other, nbytes(self.host, other)), other) for other in others]
        for message in incoming:
            self._wait(*message)
        taken_s = time.perf_counter() - began
        for message in outgoing:
            self._wait(*message)
        received = {other: nbytes(other, self.host) for other in others}
        expected_s = max(size / gb_per_s[other][self.host] / 1e9 for other, size in received.items())
        return expected_s / taken_s, sum(received.values()) / taken_s / 1e9

    def _stream_out(self, other: int, nbytes: int) -> None:
        for pending in [self._send(other, nbytes // _MESSAGES) for _ in range(_MESSAGES)]:
            self._wait(pending, other)

    def _stream_in(self, other: int, nbytes: int) -> float:
        """Return the GB/s of a stream of messages. The first two do not count: their time contains its start."""
        size = nbytes // _MESSAGES
        arrivals = []
        for pending in [self._receive(other, size, k * size) for k in range(_MESSAGES)]:
            self._wait(pending, other)
            arrivals.append(time.perf_counter())
        return (_MESSAGES - 2) * size / max(arrivals[-1] - arrivals[1], 1e-9) / 1e9

    def _send(self, other: int, nbytes: int) -> PendingMessage:
        return self.transport.send(self.at, nbytes, self.peers[other], _TAG)

    def _receive(self, other: int, nbytes: int, offset: int = 0) -> PendingMessage:
        return self.transport.receive(self.at + _MAX_BYTES + offset, nbytes, self.peers[other], _TAG)

    def _wait(self, pending: PendingMessage, other: int) -> None:
        wait_for(pending, self.peers[other], self.timeout_s)


def _gather_speeds(communicator: Communicator, measured: dict[str, object]) -> Speeds:
    """Return the measured speeds of all ranks. ``measured``: what this rank has measured. All ranks call this."""
    of_ranks = [json.loads(text) for text in communicator.rendezvous.all_gather(json.dumps(measured).encode())]
    hosts = communicator.hosts
    count = len(hosts)
    incoming, latency = ([of_ranks[ranks[0]].get(key, [0.0] * count) for ranks in hosts] for key in ("in", "latency"))
    return Speeds(
        tuple(tuple(_three_digits(incoming[dst][src]) for dst in range(count)) for src in range(count)),
        tuple(tuple(_three_digits((latency[a][b] + latency[b][a]) / 2) for b in range(count)) for a in range(count)),
        (0.0,) * count,
        tuple(_three_digits(median(of_ranks[rank]["memory"] for rank in ranks)) for ranks in hosts),
    )


def _cables(speeds: Speeds, received: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Return the bandwidth of each host's cable in GB/s, or 0 if its links do not share one (see ``_SHARED``).

    ``received``: for each host what ``_Probe.all_at_once`` returned.
    """
    cables = []
    for dst, (share, together) in enumerate(received):
        singly = [row[dst] for row in speeds.gb_per_s]
        # A link cannot be faster than its cable, but may seem so because of a burst. Then the link's speed counts.
        cables.append(_three_digits(max(together, *singly)) if share < _SHARED else 0.0)
    return tuple(cables)


def _three_digits(number: float) -> float:
    return float(f"{number:.3g}")


def host_topology(speeds: Speeds) -> Topology:
    """Return a topology with hosts as devices. If the links of a host share a cable, they pass through its switches.

    >>> mesh = Speeds(((0, 1), (2, 0)), ((0, 1e-4), (1e-4, 0)), (0, 0), (10, 10))
    >>> host_topology(mesh).link("host1/cpu:0", "host0/cpu:0").bandwidth
    Fraction(2, 1)
    """
    hosts = host_names(len(speeds.cables))
    return _topology(speeds, hosts, hosts)


def rank_topology(speeds: Speeds, hosts: Sequence[Sequence[int]]) -> Topology:
    """Return a topology with ranks as devices. The ranks of a host are linked to its switch, switches to each other."""
    switches = [f"host{k}" for k in range(len(hosts))]
    devices = {rank: f"host{k}/cpu:{place}" for k, ranks in enumerate(hosts) for place, rank in enumerate(ranks)}
    memory = [
        link
        for switch, ranks, speed in zip(switches, hosts, speeds.memory, strict=True)
        for rank in ranks
        for link in _links_both_ways(devices[rank], switch, speed, _LOCAL_LATENCY_S)
    ]
    return _topology(speeds, switches, [devices[rank] for rank in sorted(devices)], switches, memory)


def _topology(
    speeds: Speeds,
    hosts: Sequence[str],
    devices: Sequence[str],
    switches: Sequence[str] = (),
    local: Sequence[Link] = (),
) -> Topology:
    """Return a topology of ``devices`` with measured links between the nodes ``hosts``, and ``local`` links in hosts.

    A cable consists of two switches, one for each direction, since only the host can forward data that it has received.
    """
    shared = [bool(speed) for speed in speeds.cables]
    outs, ins = ([f"host{k}.{way}" if shared[k] else host for k, host in enumerate(hosts)] for way in ("out", "in"))
    links = [
        Link(outs[src], ins[dst], Fraction(repr(speeds.gb_per_s[src][dst])), Fraction(repr(speeds.latency_s[src][dst])))
        for src, dst in permutations(range(len(hosts)), 2)
        if speeds.gb_per_s[src][dst]
    ]
    for host, out, into, speed in zip(hosts, outs, ins, speeds.cables, strict=True):
        if speed:
            links += [
                Link(host, out, Fraction(repr(speed)), Fraction(0)),
                Link(into, host, Fraction(repr(speed)), Fraction(0)),
            ]
    nodes = [*switches, *(end for ends in zip(outs, ins, strict=True) for end in ends if end not in hosts)]
    return Topology(tuple(devices), (*links, *local), tuple(map(Switch, nodes)))


def _links_both_ways(a: str, b: str, gb_per_s: float, latency_s: float) -> list[Link]:
    speed = Fraction(repr(gb_per_s)), Fraction(repr(latency_s))
    return [Link(a, b, *speed), Link(b, a, *speed)]
