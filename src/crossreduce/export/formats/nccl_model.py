"""NCCL's model of its algorithms and protocols on a topology: their times, and their numbers of channels.

Input: a topology. Output: for a collective and a size, the seconds of latencies and of transfers, as NCCL adds them up.

The model has rings and trees with the protocols LL, LL128 (only where NCCL enables it) and Simple; NVLS in hosts whose
NVSwitches add (from H100 on); and PAT for one GPU per host. It has no CollNet, which needs SHARP in the network.

Source: NVIDIA/nccl 2.30, src/graph/tuning.cc (latencies in us, bandwidths and their factors, the correction of trees,
where LL128 is enabled) and src/enqueue.cc (the rule for channels, limits of NVLS). NCCL's own output for two hosts of
one GPU, with which a test compares: eunomia-bpf/nccl-eBPF, docs/tmp/default-suboptimal-search.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from typing import Final

from ...errors import PlanError
from ...planning import plan
from ...topology import Topology
from ...topology.links import Link
from ...topology.routes import is_connected
from .nccl_graph import FASTEST_PCIE

ALGORITHMS: Final = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS: Final = ("ll", "ll128", "simple")
MOST_CHANNELS: Final = 64  # NCCL's limit
_LARGE: Final = 1 << 30

# Microseconds, by algorithm, for LL, LL128 and Simple: of a call, of a step over NVLink, over PCIe and over a network.
_CALL: Final = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "pat": (8.0, 8.0, 8.0)}
_NVLINK: Final = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_PCIE: Final = {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)}
_NETWORK: Final = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
_POST: Final = (1.0, 1.0, 3.0)  # the least time of a step of a ring over several hosts, to post its messages
_NVLS: Final = 25.0  # of a call of NVLS inside a host
_NVLS_NETWORK: Final = 20.9  # of a step of the tree of NVLS between hosts
_PLATEAU: Final = (1.9, 1.4, 1.4, 1.4)  # of the latency of rings with Simple between hosts, by the generation
_PLATEAU_BYTES: Final = 1024  # for each device; NCCL has 64 for each device and channel

# The part of its bandwidth that a tree reaches, for sizes of 64 bytes, 128 bytes, ..., 256 MiB. The tree
# of NVLS on Blackwell with x86 CPUs reaches the parts of Simple, up to 512 MiB.
_TREE_PART: Final = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
_NVLS_TREE_PART: Final = (*_TREE_PART[2], 0.9)
_X86_HOSTS: Final = range(5, 9)  # GPUs of a host with Blackwell and x86 CPUs; GB200 has 4 for a host, or 72 in a rack
# GB/s of NVLink out of a GPU, by generation: V100, A100, H100, B200.
_GENERATIONS: Final = (150, 300, 450, math.inf)
# GB/s: the most that LL reaches, by generation, on one host, two hosts and more. Between hosts, it depends on the CPUs:
# those of the DGX of each generation.
_MOST_LL: Final = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 39.0, 20.4), (282.0, 39.0, 20.4))
# The part of the bandwidth of NVLink that NVLS reaches, by generation.
_NVLS_PART: Final = (0.0, 0.0, 0.85, 0.74)
_NVLS_CHANNELS: Final = 16
_MOST_NVLS_RANKS: Final = 32  # for all-gather and reduce-scatter
_P100: Final = 80  # GB/s; GPUs with less NVLink have no LL128

# A channel gets at least so many bytes for each thread, and has so many threads.
_BYTES_PER_THREAD: Final = (8, 8, 64)
_THREADS: Final = (512, 640, 512)
_SLOW_RING: Final = 12  # GB/s; a slower ring has half of the threads


class Model:
    """NCCL's model of its algorithms on a topology."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.ranks = topology, len(topology.devices)
        by_host = defaultdict[str, list[str]](list)
        for device in topology.devices:
            by_host[device.rpartition("/")[0]].append(device)
        self.hosts, self.members = len(by_host), list(by_host.values())

    def choices(self, collective: str) -> list[tuple[str, str]]:
        """Return the algorithms of the model for a collective, each with a protocol that NCCL enables."""
        protocols = PROTOCOLS if self.has_ll128 else ("ll", "simple")
        is_half = collective in ("all_gather", "reduce_scatter")
        algorithms = ("ring", "tree") if collective == "all_reduce" else ("ring",)
        found = [(algorithm, protocol) for algorithm in algorithms for protocol in protocols]
        if self.has_nvls and self.hosts == 1 and (
            collective == "all_reduce" or (is_half and self.ranks <= _MOST_NVLS_RANKS)
        ):  # fmt: skip
            found.append(("nvls", "simple"))
        if self.has_nvls and self.hosts > 1 and collective == "all_reduce":
            found.append(("nvls_tree", "simple"))
        if is_half and 1 < self.hosts == self.ranks:
            found.append(("pat", "simple"))
        return found

    @cached_property
    def ring_gb_per_s(self) -> float:
        """The bandwidth of all rings together, between any two neighbours."""
        return _rate_of_rings(self.topology)

    @cached_property
    def tree_gb_per_s(self) -> float:
        """The bandwidth of all trees together. With two hosts, the network carries half of what a ring needs."""
        if self.hosts != 2:
            return self.ring_gb_per_s
        rates = [_rate_of_rings(self.topology.part(tuple(members))) for members in self.members if len(members) > 1]
        return min([*rates, 2 * self.ring_gb_per_s])

    @cached_property
    def gpu_gb_per_s(self) -> float:
        """The bandwidth of all NVLinks out of the first GPU."""
        links = [link for link in self._nvlinks(self.members[0]) if link.src == self.members[0][0]]
        return float(sum((link.bandwidth for link in links), Fraction(0)))

    @cached_property
    def has_nvlink(self) -> bool:
        """Whether NVLinks (or xGMI links) join all GPUs of each host."""
        return all(is_connected(members, self._nvlinks(members)) for members in self.members)

    @cached_property
    def network_links(self) -> int:
        """The number of links by which the first host sends to the network; 0 if there is only one host."""
        home = self.members[0][0].rpartition("/")[0]
        ends = [(link.src.rpartition("/")[0], link.dst.rpartition("/")[0]) for link in self.topology.links]
        return sum(src == home != dst for src, dst in ends)

    @property
    def generation(self) -> int:
        """The generation of NVLink: 0 for V100 and older, 1 for A100, 2 for H100, 3 for B200."""
        return next(k for k, most in enumerate(_GENERATIONS) if self.gpu_gb_per_s <= most)

    @property
    def has_ll128(self) -> bool:
        """Whether NCCL enables LL128: NVLink joins the GPUs of a host, and cards are not behind a CPU."""
        behind_cpus = any(switch.name.rpartition("/")[2].startswith("cpu") for switch in self.topology.switches)
        return self.has_nvlink and self.gpu_gb_per_s > _P100 and not behind_cpus

    @cached_property
    def is_switched(self) -> bool:
        """Whether one NVSwitch joins all GPUs of each host."""
        for members in self.members:
            ends = [{link.dst for link in self._nvlinks(members) if link.src == member} for member in members]
            if not set.intersection(*ends):
                return False
        return True

    @property
    def has_nvls(self) -> bool:
        """Whether hosts have NVSwitches that add, for at least three GPUs."""
        return self.is_switched and _NVLS_PART[self.generation] > 0 and min(map(len, self.members)) > 2

    def _nvlinks(self, members: list[str]) -> list[Link]:
        """Return the NVLinks (or xGMI links) out of the GPUs of a host."""
        home = members[0].rpartition("/")[0]
        links = []
        for link in (link for member in members for link in self.topology.out_links(member)):
            host, _, name = link.dst.rpartition("/")
            is_fast = name.startswith("nvswitch") or link.bandwidth > FASTEST_PCIE
            if link.dst in members or (host == home and is_fast):
                links.append(link)
        return links

    def parts(self, collective: str, algorithm: str, protocol: str, nbytes: int) -> tuple[float, float]:
        """Return the seconds of latencies and of transfers."""
        if self.ranks == 1:
            return 0.0, 0.0
        p, n = PROTOCOLS.index(protocol), self.ranks
        steps = {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1}.get(collective, n)
        if algorithm == "ring":
            micros, rate = self._ring_latency(collective, p, steps, nbytes), self._ring_rate(p) * n / steps
        elif algorithm == "tree":
            micros, rate = self._tree_latency(p), self._tree_rate(p, nbytes)
        elif algorithm == "pat":
            micros = 8.0 + math.log2(self.hosts) * _NETWORK["tree"][p] / 3.5 + 2.8 * n
            rate = 0.75 * self.tree_gb_per_s
        else:
            micros, rate = self._nvls(collective, n / steps)
            if algorithm == "nvls_tree" and self.generation == 3 and max(map(len, self.members)) in _X86_HOSTS:
                rate *= _part(_NVLS_TREE_PART, nbytes)
        return micros * 1e-6, nbytes / (rate * 1e9)

    def channels(self, algorithm: str, protocol: str, nbytes: int) -> int:
        """Return the number of channels for a size: NCCL's own rule, rounded up to a power of two.

        NCCL uses at most as many as it has made, except for CollNet: for this, the number is that of network links.
        """
        if algorithm.startswith("collnet") or (algorithm == "nvls" and self.hosts > 1):
            return max(1, min(16, self.network_links))
        if algorithm not in ("ring", "tree"):
            return MOST_CHANNELS
        p = PROTOCOLS.index(protocol)
        least = _BYTES_PER_THREAD[p] * _THREADS[p]
        if algorithm == "ring" and protocol == "ll":
            least *= self.ranks
        if algorithm == "ring" and protocol == "simple" and self.ranks > 1 and self.ring_gb_per_s <= _SLOW_RING:
            least //= 2
        return min(MOST_CHANNELS, 1 << max(0, -(-nbytes // least) - 1).bit_length())

    def _ring_latency(self, collective: str, p: int, steps: int, nbytes: int) -> float:
        """Return the microseconds of a ring with protocol number ``p``."""
        home = _NVLINK if self.has_nvlink else _PCIE
        if collective in ("broadcast", "reduce"):
            by = home if self.hosts == 1 else _NETWORK
            if self.ranks == self.hosts or (self.hosts == 1 and self.is_switched):  # all rings have the same order
                return _CALL["ring"][p] + by["ring"][p]
            return _CALL["ring"][p] + steps * by["tree" if p == 2 else "ring"][p]
        inside = home["ring"][p]
        crossing = 0 if self.hosts == 1 else steps * (self.hosts - 1) // (self.ranks - 1)
        if self.hosts > 1:
            inside = max(inside, _POST[p])
        between = _NETWORK["tree" if self.ranks == self.hosts else "ring"][p]
        micros = _CALL["ring"][p] + (steps - crossing) * inside + crossing * between
        if p == 2 and self.hosts > 1 and collective == "all_reduce" and nbytes >= _PLATEAU_BYTES * self.ranks:
            micros *= _PLATEAU[self.generation]
        return micros

    def _tree_latency(self, p: int) -> float:
        """Return the microseconds of a tree with protocol number ``p``."""
        inside = (_NVLINK if self.has_nvlink else _PCIE)["tree"][p]
        within = self.ranks // self.hosts - 1
        levels = self.hosts.bit_length() - 1
        return _CALL["tree"][p] + 2 * (within * inside + levels * _NETWORK["tree"][p])

    def _most_ll(self) -> float:
        return _MOST_LL[self.generation][min(self.hosts, 3) - 1]

    def _ring_rate(self, p: int) -> float:
        """Return the GB/s between neighbours in rings, with protocol number ``p``."""
        rate = self.ring_gb_per_s
        if p == 0:
            return min(rate / 2, self._most_ll())
        return rate * 0.92 if p == 1 else rate

    def _tree_rate(self, p: int, nbytes: int) -> float:
        """Return the GB/s of an all-reduce on trees, with protocol number ``p``."""
        rate = self.tree_gb_per_s * 0.92
        if p == 0:
            rate = min(rate / 3.8, self._most_ll())
        elif p == 1:
            rate *= 7 / 9 if self.hosts == 1 else 120 / 128
        return rate * 0.85 * 0.5 * _part(_TREE_PART[p], nbytes)

    def _nvls(self, collective: str, ratio: float) -> tuple[float, float]:
        """Return the microseconds and the GB/s of NVLS; ``ratio`` is the devices divided by the steps of a ring."""
        members = min(map(len, self.members))
        rate = self.gpu_gb_per_s * _NVLS_PART[self.generation] * (_NVLS_CHANNELS - 1) / _NVLS_CHANNELS
        if collective != "all_reduce":
            return _NVLS, rate * (members - 1) / members
        rate *= 2  # the reduction and the broadcast are pipelined
        if self.hosts == 1:
            return _NVLS, rate * ratio
        network = self.ring_gb_per_s * (2 if self.hosts == 2 else 1)
        micros = _NVLS + 2 * (self.hosts.bit_length() - 1) * _NVLS_NETWORK
        return micros, min(rate, network) * ratio


def _part(parts: Sequence[float], nbytes: int) -> float:
    """Return the entry of ``parts`` for a size; 1 for sizes below 64 bytes, or above all entries."""
    octave = nbytes.bit_length() - 7
    return parts[octave] if 0 <= octave < len(parts) else 1.0


def _rate_of_rings(topology: Topology) -> float:
    """Return the GB/s of the rings on a topology, which is their all-gather rate without the part that is not sent."""
    n = len(topology.devices)
    try:
        rate = plan(topology, "all_gather", _LARGE, "ring").rate
    except PlanError as error:
        error.prefix("NCCL's rings")
        raise
    return float(rate or 1) * (n - 1) / n
