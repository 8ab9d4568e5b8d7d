"""Write a schedule of rings as an NCCL graph file, so that NCCL itself uses these rings.

Input: a ``Schedule`` whose chunks travel along rings of the devices. Output: XML for ``NCCL_GRAPH_FILE``.

The file lists the rings of NCCL's channels, but neither chunks nor rounds. NCCL itself divides every collective, and
spreads it evenly over the channels. So a ring that carries more of the buffer than another one is listed more often.
NCCL also searches for trees, and uses at most as many channels as it finds trees. A file is for all GPUs of one host,
and cannot be restricted to one rank.

Source: github.com/NVIDIA/nccl, src/graph/search.cc (ncclTopoGetGraphFromXmlSub, ncclTopoGetXmlFromGraph).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, pairwise
from typing import Final

from ...devices import parse
from ...errors import ArgumentError, PlanError, shown
from ...lowering import GeneratedProgram, Program, lower
from ...schedule import Schedule
from ...schedule.costs import Pair
from ...schedule.traffic import route_links
from ...topology import Topology, TopologyLike, topology_of
from .collective import collective, require_integers

MOST_CHANNELS: Final = 32  # NCCL's MAXCHANNELS before NCCL 2.24 (64 since then), so any version can read the file
# NCCL's names of the slowest connection in a ring: NVLink, NVLink through another GPU, one PCIe bridge, several
# bridges, the host bridge, between sockets.
PATHS: Final = ("NVL", "NVB", "PIX", "PXB", "PHB", "SYS")
# GB/s of a channel, which is one threadblock: that of an NVLink of V100 to H100. NCCL's search tries at most 40 (V100,
# A100), 60 (H100) or 90 (B200) GB/s (speedArray in src/graph/search.cc), with several channels on each ring.
MOST_PER_CHANNEL: Final = 25
FASTEST_PCIE: Final = 121  # GB/s, PCIe 6 x16

Hop = tuple[str, ...]  # the nodes of a route between two GPUs that are neighbours in a ring


def to_nccl_graph_xml(
    schedule: Schedule,
    topology: TopologyLike | None = None,
    *,
    gb_per_s: float | Fraction | None = None,
    path: str | None = None,
    copies: int | None = None,
) -> str:
    """Return the rings of a schedule as an NCCL graph file.

    The name of a GPU determines its number in the file: ``cuda:3`` is device 3 of the host.

    Args:
      schedule: each chunk travels along one ring of all devices, which are GPUs of one host.
      topology: a ``Topology``, a machine's name or a file's path. It determines the speed of a channel. Each link's
        bandwidth is divided by the number of channels that use the link, and the speed is the least result.
      gb_per_s: the speed of a channel, if no topology is given. NCCL predicts times with it.
      path: the connection between the GPUs: "NVL", "NVB", "PIX", "PXB", "PHB" or "SYS". The default is that of the
        slowest hop on the topology: see ``path_type``; without a topology, "NVL".
      copies: a factor for the number of channels of each ring. A channel is one threadblock, and fast links need
        several. The default is the least number with which a channel has at most 25 GB/s, as far as 32 channels allow;
        without a topology, 1.
    Raises:
      PlanError: the schedule does not consist of rings of one host's GPUs, it needs over 32 channels, or the topology
        does not have one of its links.
      ScheduleError: ``verify`` rejects the schedule.
      ArgumentError: not exactly one of ``topology`` and ``gb_per_s`` is given, or an argument is invalid.

    >>> from crossreduce.planning import ring
    >>> print(to_nccl_graph_xml(ring(["cuda:0", "cuda:2", "cuda:1"]), gb_per_s=20))
    <graphs version="1">
      <graph id="0" pattern="4" crossnic="0" nchannels="1" speedintra="20" speedinter="20" latencyinter="0" \
typeintra="NVL" typeinter="PIX" samechannels="1">
        <channel>
          <gpu dev="0"/>
          <gpu dev="2"/>
          <gpu dev="1"/>
        </channel>
      </graph>
    </graphs>
    <BLANKLINE>
    """
    if path is not None and path not in PATHS:
        raise ArgumentError.of("unknown path between GPUs.", shown(path), "one of " + ", ".join(PATHS))
    require_integers(copies=copies)
    if copies is not None and copies < 1:
        raise ArgumentError.of("copies must be at least 1.", shown(copies), "copies=1")
    if (topology is None) == (gb_per_s is None):
        fault, remedy = ("neither is", "gb_per_s=20") if topology is None else ("both are", "gb_per_s=None")
        given = f"topology={shown(topology)}, gb_per_s={shown(gb_per_s)}"
        raise ArgumentError.of(f"give either topology or gb_per_s: {fault} given.", given, remedy)
    devices = [parse(name) for name in schedule.devices]
    for device in devices:
        if device.kind != "cuda" or device.logical or device.host != devices[0].host:
            fault = f"on another host than {devices[0]}" if device.host != devices[0].host else "a part of a GPU"
            fault = fault if device.kind == "cuda" else "not a CUDA device"
            problem = f"an NCCL graph can only have whole GPUs of one host, but {device} is {fault}."
            remedy = "devices such as cuda:0, cuda:1; one file per host"
            raise PlanError.of(problem, ", ".join(schedule.devices), remedy)
    shares = rings(schedule)
    denominator = math.lcm(*(share.denominator for share in shares.values()))
    counts = {cycle: int(share * denominator) for cycle, share in shares.items()}
    divisor = math.gcd(*counts.values())
    once = [cycle for cycle, count in counts.items() for _ in range(count // divisor)]
    links = None if topology is None else topology_of(topology)
    hops = Counter[Hop]() if links is None else _hops(lower(schedule), links, once)
    if copies is None:
        needed = 1 if links is None else math.ceil(_speed(hops, links) / MOST_PER_CHANNEL)
        copies = max(1, min(needed, MOST_CHANNELS // len(once)))
    if len(once) * copies > MOST_CHANNELS:
        given = f"{len(shares)} rings with shares {', '.join(map(str, shares.values()))}, {copies} copies"
        problem = f"NCCL before 2.24 has {MOST_CHANNELS} channels, these rings need {len(once) * copies}."
        remedy = f"shares whose common denominator is at most {MOST_CHANNELS}"
        fewer_copies = f"copies={MOST_CHANNELS // denominator}"
        raise PlanError.of(problem, given, remedy if denominator > MOST_CHANNELS else fewer_copies)
    channels = [cycle for cycle in once for _ in range(copies)]
    speed = float(gb_per_s or 0 if links is None else _speed(hops, links) / copies)
    if path is None:
        path = max((path_type(hop, links) for hop in hops), key=PATHS.index) if links is not None else PATHS[0]
    if not 0 < speed < math.inf:
        given = f"gb_per_s={shown(gb_per_s)}"
        raise ArgumentError.of("the speed of a channel must be above 0 and finite.", given, "gb_per_s=20")
    lines = [
        '<graphs version="1">',
        f'  <graph id="0" pattern="4" crossnic="0" nchannels="{len(channels)}" speedintra="{speed:g}" '
        f'speedinter="{speed:g}" latencyinter="0" typeintra="{path}" typeinter="PIX" '
        f'samechannels="{int(len(shares) == 1)}">',
    ]
    for cycle in channels:
        # Older versions of NCCL read 10 as ten, newer ones as sixteen; all of them read 0xa as ten.
        numbers = [devices[rank].index for rank in cycle]
        gpus = [f'      <gpu dev="{k if k < 10 else hex(k)}"/>' for k in numbers]
        lines += ["    <channel>", *gpus, "    </channel>"]
    return "\n".join([*lines, "  </graph>", "</graphs>", ""])


def rings(schedule: Schedule) -> dict[tuple[int, ...], Fraction]:
    """Return the rings along which chunks travel, and the share of the buffer that each ring carries.

    A ring is a tuple of positions in ``schedule.devices``, in the order of travel, starting with 0. A chunk that does
    not travel along a complete ring belongs to the only ring that contains its path.

    Raises:
      PlanError: a chunk does not travel along a ring; the message has the chunk, the devices and the reason.
      ScheduleError: ``verify`` rejects the schedule.

    >>> from crossreduce.planning import ring
    >>> rings(ring(["cuda:0", "cuda:1", "cuda:2"]))
    {(0, 1, 2): Fraction(1, 1)}
    """
    program = collective(schedule).program
    stored = program.base if isinstance(program, GeneratedProgram) else program
    arcs: dict[int, set[tuple[int, int]]] = {c: set() for c, chunk in enumerate(stored.chunks) if chunk.share}
    for transfer in chain.from_iterable(stored.transfers):
        if transfer.chunk in arcs:
            arcs[transfer.chunk].add((transfer.src, transfer.dst))
    cycles = {c: _ring(schedule, c, pairs) for c, pairs in arcs.items()}
    all_cycles = list(cycles.items())
    if isinstance(program, GeneratedProgram):
        elements = list(program.schedule.symmetry.elements())
        all_cycles = [
            (number, _from_zero([elements[element][k] for k in cycles[c]]))
            for number, (element, c) in enumerate(program.schedule.numbering)
            if c in cycles
        ]
    shares: dict[tuple[int, ...], Fraction] = {}
    for c, cycle in all_cycles:
        shares[cycle] = shares.get(cycle, Fraction(0)) + program.shares[c]
    return shares


def _from_zero(cycle: Sequence[int]) -> tuple[int, ...]:
    """Return the same ring, starting with 0."""
    zero = cycle.index(0)
    return (*cycle[zero:], *cycle[:zero])


def _ring(schedule: Schedule, chunk: int, arcs: set[tuple[int, int]]) -> tuple[int, ...]:
    """Return the ring along which a chunk travels. ``arcs`` has its transfers as (src, dst)."""
    names = schedule.devices

    def refuse(reason: str) -> PlanError:
        return PlanError.of(f"an NCCL graph can only have rings, but {reason}.", schedule.head, 'algorithm="ring"')

    for end, text in ((0, "is sent from {} to both {} and {}"), (1, "is received on {} from both {} and {}")):
        peers: dict[int, int] = {}
        for arc in sorted(arcs):
            rank, peer = arc[end], arc[1 - end]
            if peers.setdefault(rank, peer) != peer:
                raise refuse(f"chunk {chunk} " + text.format(names[rank], names[peers[rank]], names[peer]))
    successor = dict(arcs)
    starts = sorted(set(successor) - set(successor.values())) or [0]  # a complete ring has no first device
    path = [starts[0]]
    while path[-1] in successor and successor[path[-1]] != path[0]:
        path.append(successor[path[-1]])
    assert len(path) == len(names), "a chunk with all devices as sources or destinations passes all of them"
    return _from_zero(path)


def path_type(hop: Hop, topology: Topology) -> str:
    """Return NCCL's name of the connection between two GPUs, given the nodes of the route, both GPUs included.

    A link between GPUs and a switch that is faster than PCIe are NVLinks. Nodes called ``cpu`` are CPUs; other switches
    are PCIe switches.

    >>> box = Topology.machine("pcie-8")
    >>> [path_type(box.route(0, k), box) for k in (1, 2, 4)]
    ['PIX', 'PHB', 'SYS']
    >>> star = Topology.machine("hgx-h100")
    >>> path_type(star.route(0, 1), star)
    'NVL'
    """
    inside = hop[1:-1]
    cpus = sum(node.rpartition("/")[2].startswith("cpu") and ":" not in node for node in inside)
    if cpus:
        return "PHB" if cpus == 1 else "SYS"
    devices = sum(node in topology.devices for node in inside)
    slowest = min(topology.by_ends[ends].bandwidth for ends in pairwise(hop))
    named = all(node.rpartition("/")[2].startswith("nvswitch") for node in inside if node not in topology.devices)
    if named or slowest > FASTEST_PCIE:
        return "NVB" if devices else "NVL"
    return "PIX" if len(inside) - devices == 1 else "PXB"


def _hops(program: Program, topology: Topology, channels: list[tuple[int, ...]]) -> Counter[Hop]:
    """Return how often the channels use each hop between two GPUs."""
    routes = {(route.src, route.dst): route.through for route in program.routes}
    used: Counter[Hop] = Counter()
    for cycle in channels:
        for src, dst in pairwise((*cycle, cycle[0])):
            ends = program.devices[src], program.devices[dst]
            links = list(route_links(topology, *ends, routes.get((src, dst))))
            used[ends[0], *(link[1] for link in links)] += 1
    return used


def _speed(hops: Counter[Hop], topology: Topology) -> Fraction:
    """Return the bandwidth that every channel has if all channels are used at the same time."""
    used: Counter[Pair] = Counter()
    for hop, count in hops.items():
        for ends in pairwise(hop):
            used[ends] += count
    return min(topology.by_ends[ends].bandwidth / count for ends, count in used.items())
