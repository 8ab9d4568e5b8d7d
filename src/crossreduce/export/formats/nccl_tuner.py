"""Write the CSV file that the tuner plug-in in NCCL's repository reads: an algorithm and a protocol for each size.

Input: a topology, perhaps reports of nccl-tests. Output: text. The times are those of a model of NCCL, fitted to the
reports. Where at least two algorithms or protocols were measured for a size, the measured times decide instead.

The model is NCCL's own: a latency, and bytes divided by a bandwidth. It has rings and trees with the protocols LL,
LL128 and Simple. Algorithms in switches (NVLS, CollNet) and PAT are chosen only if they were measured.

Source: NVIDIA/nccl, plugins/tuner/example/plugin.c (the columns; lines have at most 255 characters; ``#`` begins a
comment; the first row that matches counts; both sizes are inclusive), src/graph/tuning.cc (latencies in us, factors of
bandwidths, the correction of trees); NVIDIA/nccl-tests, src/util.cu (``env`` in reports).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

from ...errors import ArgumentError, PlanError, shown
from ...planning import COLLECTIVES, plan
from ...topology import Topology
from ...topology.measurements import read_measurements

ALGORITHMS: Final = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS: Final = ("ll", "ll128", "simple")
HEADER: Final = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
LONGEST_LINE: Final = 250  # the plug-in reads 255 characters
LARGEST: Final = 2**64 - 1  # a size_t
_SIZES: Final = tuple(1 << power for power in range(6, 36))  # the sizes for which times are compared
_LARGE: Final = 1 << 30

# Microseconds, by algorithm, for LL, LL128 and Simple: of a call, of a step over NVLink, over PCIe and over a network.
_CALL: Final = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_NVLINK: Final = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_PCIE: Final = {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)}
_NETWORK: Final = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
_POST: Final = (1.0, 1.0, 3.0)  # more for each step over a network, to post its message

# The part of its bandwidth that a tree reaches, for sizes of 64 bytes, 128 bytes, ..., 128 MiB.
_TREE_PART: Final = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.7, 0.8, 0.9),
)
# GB/s: the most that LL reaches on one host, by a GPU's NVLink bandwidth in one direction (V100, A100, H100, B200).
_MOST_LL: Final = ((150, 39.0), (300, 87.7), (450, 141.0), (math.inf, 282.0))
_FASTEST_PCIE: Final = 64  # GB/s; a GPU with more bandwidth has NVLink


class Choice(NamedTuple):
    """An algorithm and a protocol, with their time."""

    seconds: float
    algorithm: str
    protocol: str
    measured: bool


class TunerRow(NamedTuple):
    """A row of the file. Sizes include both ends."""

    collective: str
    least_bytes: int
    most_bytes: int
    choice: Choice
    at_bytes: int  # the size for which the time of the choice is


Key = tuple[str, str, str]  # a collective, an algorithm and a protocol
Times = Mapping[Key, Mapping[int, float]]  # measured seconds by bytes


def to_nccl_tuner_csv(topology: Topology, times: Times | None = None) -> str:
    """Return the file for all five collectives and all sizes, on the devices of a topology.

    Args:
      topology: the machine. Its number of hosts and of devices are those of NCCL's communicator.
      times: measured seconds, from ``read_runs``.
    Raises:
      PlanError: some devices are not connected.

    >>> text = to_nccl_tuner_csv(Topology.machine("hgx-h100"))
    >>> print(text.splitlines()[-1])
    reducescatter,25165825,18446744073709551615,ring,simple,-1,1,8,-1,-1
    """
    model = Model(topology)
    fits = _fits(model, times or {})
    nodes, ranks = model.hosts, len(topology.devices)
    lines = [
        f"# NCCL tuner configuration: {ranks} GPUs, {nodes} hosts; for the plug-in NVIDIA/nccl plugins/tuner/example.",
        "# Use: NCCL_TUNER_PLUGIN=PATH/libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=THIS_FILE.",
        "# -1: NCCL's own number of channels, or any number of operations and any buffer.",
        f"# {HEADER}",
    ]
    for row in rows_of(model, times or {}, fits):
        how = "measured" if row.choice.measured else "modelled"
        micros = row.choice.seconds * 1e6
        lines.append(f"# {how}: {micros:.1f} us for {row.at_bytes} bytes")
        name = row.collective.replace("_", "")
        chosen = f"{row.choice.algorithm},{row.choice.protocol}"
        lines.append(f"{name},{row.least_bytes},{row.most_bytes},{chosen},-1,{nodes},{ranks},-1,-1")
    assert all(len(line) <= LONGEST_LINE for line in lines)
    return "\n".join(lines) + "\n"


def rows_of(model: Model, times: Times, fits: Mapping[str, tuple[float, float]]) -> list[TunerRow]:
    """Return the rows of all collectives. Rows of a collective have no gaps and do not overlap."""
    rows = []
    for collective in COLLECTIVES:
        sizes = sorted({*_SIZES, *(n for key, by_size in times.items() if key[0] == collective for n in by_size)})
        found = [(size, _best(model, times, fits, collective, size)) for size in sizes]
        least, first = 0, found[0]
        for (before, _), (size, choice) in pairwise(found):
            if choice[1:] != first[1][1:]:
                most = (before + size) // 2 if size - before > 1 else before
                rows.append(TunerRow(collective, least, most, first[1], first[0]))
                least, first = most + 1, (size, choice)
        rows.append(TunerRow(collective, least, LARGEST, first[1], first[0]))
    return sorted(rows, key=lambda row: (row.collective, row.least_bytes))


def _best(model: Model, times: Times, fits: Mapping[str, tuple[float, float]], collective: str, nbytes: int) -> Choice:
    """Return the fastest choice. If several were measured, only they are compared."""
    measured = []
    for (name, algorithm, protocol), by_size in times.items():
        if name == collective:
            inside = min(by_size) <= nbytes <= max(by_size)
            measured.append(Choice(_seconds_at(by_size, nbytes), algorithm, protocol, inside))
    if len(measured) > 1:
        return min(measured)
    latency, transfer = fits.get(collective, (1.0, 1.0))
    known = {choice[1:3] for choice in measured}
    modelled = [
        Choice(parts[0] * latency + parts[1] * transfer, algorithm, protocol, False)
        for algorithm in model.algorithms(collective)
        for protocol in PROTOCOLS
        if (algorithm, protocol) not in known
        for parts in [model.parts(collective, algorithm, protocol, nbytes)]
    ]
    return min(measured + modelled)


def _seconds_at(by_size: Mapping[int, float], nbytes: int) -> float:
    """Return the seconds for a size from those for the sizes around it.

    Below all sizes, the time is that of the least size; above, the rate is that of the greatest size.

    >>> [_seconds_at({1000: 1.0, 4000: 4.0}, nbytes) for nbytes in (500, 2000, 8000)]
    [1.0, 2.0, 8.0]
    """
    sizes = sorted(by_size)
    k = bisect_left(sizes, nbytes)
    if k == 0:
        return by_size[sizes[0]]
    if k == len(sizes):
        return by_size[sizes[-1]] * nbytes / sizes[-1]
    low, high = sizes[k - 1], sizes[k]
    part = (math.log(nbytes) - math.log(low)) / (math.log(high) - math.log(low))
    return round(math.exp((1 - part) * math.log(by_size[low]) + part * math.log(by_size[high])), 15)


def _fits(model: Model, times: Times) -> dict[str, tuple[float, float]]:
    """Return for each measured collective the factors of the model's latencies and transfers that fit best.

    They minimize the sum of the squares of the relative errors. A factor that is not above 0 is not fitted.
    """
    rows = defaultdict[str, list[tuple[float, float]]](list)
    for (collective, algorithm, protocol), by_size in times.items():
        if algorithm in model.algorithms(collective):
            for nbytes, seconds in by_size.items():
                latency, transfer = model.parts(collective, algorithm, protocol, nbytes)
                rows[collective].append((latency / seconds, transfer / seconds))
    fits = {}
    for collective, pairs in rows.items():
        aa, ab, bb = (math.fsum(row[i] * row[j] for row in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
        a, b = math.fsum(row[0] for row in pairs), math.fsum(row[1] for row in pairs)
        determinant = aa * bb - ab * ab
        if determinant > 1e-9 * aa * bb:
            latency, transfer = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
            if latency > 0 and transfer > 0:
                fits[collective] = latency, transfer
    return fits


class Model:
    """NCCL's model of its algorithms on a topology."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.ranks = topology, len(topology.devices)
        by_host = defaultdict[str, list[str]](list)
        for device in topology.devices:
            by_host[device.rpartition("/")[0]].append(device)
        self.hosts, self.members = len(by_host), list(by_host.values())

    def algorithms(self, collective: str) -> tuple[str, ...]:
        """Return the algorithms of the model for a collective."""
        return ("ring", "tree") if collective == "all_reduce" else ("ring",)

    @cached_property
    def ring_gb_per_s(self) -> float:
        """The bandwidth of all rings together, between any two neighbours."""
        return _ring_rate(self.topology)

    @cached_property
    def host_gb_per_s(self) -> float:
        """The bandwidth of all rings of a host, the slowest host's."""
        if self.hosts == 1:
            return self.ring_gb_per_s
        rates = [_ring_rate(self.topology.part(tuple(members))) for members in self.members if len(members) > 1]
        return min(rates, default=self.ring_gb_per_s)

    @cached_property
    def gpu_gb_per_s(self) -> float:
        """The bandwidth of all links out of the first GPU that stay in its host."""
        first = self.members[0][0]
        home = first.rpartition("/")[0]
        links = self.topology.out_links(first)
        return float(sum((link.bandwidth for link in links if link.dst.rpartition("/")[0] == home), Fraction(0)))

    def parts(self, collective: str, algorithm: str, protocol: str, nbytes: int) -> tuple[float, float]:
        """Return the seconds of latencies and of transfers."""
        p, n, hosts = PROTOCOLS.index(protocol), self.ranks, self.hosts
        if n == 1:
            return 0.0, 0.0
        inside = (_NVLINK if self.gpu_gb_per_s > _FASTEST_PCIE else _PCIE)[algorithm][p]
        between = _NETWORK[algorithm][p] + _POST[p]
        if algorithm == "tree":
            steps = 2 * ((-(-n // hosts) - 1) * inside + math.log2(hosts) * between)
            rate = self._tree_rate(p, nbytes)
        else:
            rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(collective)
            count = rounds * (n - 1) if rounds else n  # of a broadcast or reduce, which pass all devices
            crossing = 0 if hosts == 1 else rounds * (hosts - 1) if rounds else hosts
            steps = (count - crossing) * inside + crossing * between
            rate = self._ring_rate(p) * n / count
        return (_CALL[algorithm][p] + steps) * 1e-6, nbytes / (rate * 1e9)

    def _ring_rate(self, p: int) -> float:
        """Return the GB/s between neighbours in rings, with protocol number ``p``."""
        rate = self.ring_gb_per_s
        if p == 0:
            most = next(most for least, most in _MOST_LL if self.gpu_gb_per_s <= least)
            return min(rate / 2, most) if self.hosts == 1 else rate / 4
        return rate * 0.92 if p == 1 else rate

    def _tree_rate(self, p: int, nbytes: int) -> float:
        """Return the GB/s of an all-reduce on trees. With two hosts, the network carries half of what a ring needs."""
        rate = min(self.host_gb_per_s, 2 * self.ring_gb_per_s) if self.hosts == 2 else self.ring_gb_per_s
        rate *= 0.92 * 0.85 * 0.5
        rate *= (1 / 3.8, 7 / 9 if self.hosts == 1 else 0.915, 1.0)[p]
        octave = max(0, nbytes.bit_length() - 7)
        return rate * (_TREE_PART[p][octave] if octave < len(_TREE_PART[p]) else 1.0)


def _ring_rate(topology: Topology) -> float:
    """Return the GB/s of the rings on a topology, which is their all-gather rate without the part that is not sent."""
    n = len(topology.devices)
    try:
        rate = plan(topology, "all_gather", _LARGE, "ring").rate
    except PlanError as error:
        error.prefix("NCCL's rings")
        raise
    return float(rate or 1) * (n - 1) / n


def read_runs(reports: Iterable[tuple[str, bytes]], topology: Topology) -> dict[Key, dict[int, float]]:
    """Return measured seconds from reports of nccl-tests, each a (name, content), of runs with a forced choice.

    The report states ``NCCL_ALGO`` and ``NCCL_PROTO`` in ``env``. Of several times for a size, the least counts.

    Raises:
      ArgumentError: a content is not a report, or was not measured on all devices of the topology; NCCL_ALGO or
        NCCL_PROTO is missing, or does not name exactly one algorithm or protocol.
    """
    times: dict[Key, dict[int, float]] = {}
    for name, content in reports:
        try:
            measurements = read_measurements(content, topology)
        except ArgumentError as error:
            error.prefix(name)
            raise
        algorithm = _forced(name, content, "NCCL_ALGO", ALGORITHMS)
        protocol = _forced(name, content, "NCCL_PROTO", PROTOCOLS)
        for measured in measurements:
            if set(measured.devices) != set(topology.devices):
                given = f"{len(measured.devices)} devices in {name}, {len(topology.devices)} in the topology"
                raise ArgumentError.of("a report must have all devices of the topology.", given, "--devices")
            by_size = times.setdefault((measured.collective, algorithm, protocol), {})
            by_size[measured.nbytes] = min(measured.seconds, by_size.get(measured.nbytes, math.inf))
    return times


def _forced(name: str, content: bytes, variable: str, known: tuple[str, ...]) -> str:
    """Return the value of an environment variable in a report, in lower case."""
    environment = json.loads(content).get("env")
    entries = [entry for entry in environment if isinstance(entry, str)] if isinstance(environment, list) else []
    given = [value for key, _, value in (entry.partition("=") for entry in entries) if key == variable]
    # NCCL_ALGO=CollnetDirect and NVLSTree; later versions also read "allreduce:ring".
    value = given[0].rpartition(":")[2].strip().lower() if given else ""
    found = [choice for choice in known if choice.replace("_", "") == value.replace("_", "")]
    if not found:
        problem = f"a report must state in env which {variable} was forced, and only one."
        shown_value = shown(given[0]) if given else "no such variable"
        raise ArgumentError.of(problem, f"{name}: {shown_value}", f"{variable}={known[1]} all_reduce_perf -J FILE")
    return found[0]
