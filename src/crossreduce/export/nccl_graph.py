"""Write a schedule of rings as an NCCL graph file, so that NCCL itself runs them.

In: a ``Schedule`` whose chunks travel round the devices.  Out: XML for ``NCCL_GRAPH_FILE``.

The file says which rings NCCL has, one a channel, and nothing of chunks or rounds: NCCL spreads every collective
evenly over its channels and cuts it as it likes. So a ring that carries more of the buffer than another appears
more often. NCCL uses no more channels than its trees have; those it still finds itself.

Source: github.com/NVIDIA/nccl, src/graph/search.cc (ncclTopoGetGraphFromXmlSub, ncclTopoGetXmlFromGraph).
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Final

from ..devices import parse
from ..errors import ArgumentError, PlanError, message, shown
from ..schedule.schedule import Schedule
from ..topology import Topology
from .collective import collective

MOST_CHANNELS: Final = 32  # MAXCHANNELS, 64 from NCCL 2.24 on
# How the GPUs of a ring reach each other at the slowest place, as NCCL calls it: NVLink, NVLink through another GPU,
# one PCIe bridge, several, the host bridge, between sockets.
PATHS: Final = ("NVL", "NVB", "PIX", "PXB", "PHB", "SYS")


def to_nccl_graph_xml(
    schedule: Schedule,
    topology: Topology | None = None,
    *,
    gb_per_s: float | Fraction | None = None,
    path: str = "NVL",
    copies: int = 1,
) -> str:
    """Return the rings of a schedule as an NCCL graph file.

    NCCL takes the number of a GPU from its name: ``cuda:3`` is device 3 of the host.

    Args:
      schedule: each chunk goes round one ring of all devices, which are GPUs of one host.
      topology: its links say how fast a channel is: a link's bandwidth over the number of channels on it.
      gb_per_s: how fast a channel is, where no topology says it. NCCL predicts times by it.
      path: how the GPUs reach each other: "NVL", "NVB", "PIX", "PXB", "PHB" or "SYS".
      copies: how often each ring appears; a channel is one threadblock, and fast links need several.
    Raises:
      PlanError: the schedule is not rings, or needs more than 32 channels, with the reason.
      ScheduleError: the schedule is wrong.
      ArgumentError: no speed, an unknown path, no copies.

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
    if path not in PATHS:
        raise ArgumentError(message("unknown path between GPUs.", shown(path), ", ".join(PATHS)))
    if not isinstance(copies, int) or copies < 1:
        raise ArgumentError(message("each ring appears at least once.", shown(copies), "copies=1"))
    if (topology is None) == (gb_per_s is None):
        raise ArgumentError(message("the speed comes from a topology or from gb_per_s.", "none or both", "one of them"))
    numbers = _numbers(schedule)
    shares = rings(schedule)
    parts = math.lcm(*(share.denominator for share in shares.values()))
    counts = {cycle: int(share * parts) for cycle, share in shares.items()}
    divisor = math.gcd(*counts.values())
    channels = [cycle for cycle, count in counts.items() for _ in range(count // divisor * copies)]
    if len(channels) > MOST_CHANNELS:
        given = f"{len(shares)} rings with shares {', '.join(map(str, shares.values()))}, {copies} copies"
        problem = f"NCCL has {MOST_CHANNELS} channels, these rings need {len(channels)}."
        raise PlanError(message(problem, given, "rounder shares, or fewer copies"))
    speed = float(_speed(schedule, topology, channels) if topology is not None else gb_per_s or 0)
    if not 0 < speed < math.inf:
        raise ArgumentError(message("a channel has some speed.", shown(gb_per_s), "gb_per_s=20"))
    lines = [
        '<graphs version="1">',
        f'  <graph id="0" pattern="4" crossnic="0" nchannels="{len(channels)}" speedintra="{speed:g}" '
        f'speedinter="{speed:g}" latencyinter="0" typeintra="{path}" typeinter="PIX" '
        f'samechannels="{int(len(shares) == 1)}">',
    ]
    for cycle in channels:
        gpus = [f'      <gpu dev="{_dev(numbers[device])}"/>' for device in cycle]
        lines += ["    <channel>", *gpus, "    </channel>"]
    return "\n".join([*lines, "  </graph>", "</graphs>", ""])


def rings(schedule: Schedule) -> dict[tuple[int, ...], Fraction]:
    """Return the rings that chunks travel round, and which share of the buffer goes round each.

    A ring is the devices' numbers in the order of travel, from device 0 on. A chunk that stops before it is round
    is on the only ring that its way leaves open.

    Raises:
      PlanError: a chunk goes no such way; device, chunk and reason are named.
      ScheduleError: the schedule is wrong.

    >>> from crossreduce.planning import ring
    >>> rings(ring(["cuda:0", "cuda:1", "cuda:2"]))
    {(0, 1, 2): Fraction(1, 1)}
    """
    ways: dict[int, set[tuple[int, int]]] = {c: set() for c, chunk in enumerate(schedule.chunks) if chunk.share}
    for chunk, dst, srcs in collective(schedule).steps:
        ways[chunk] |= {(src, dst) for src in srcs if src != dst}
    shares: Counter[tuple[int, ...]] = Counter()
    for chunk, arcs in ways.items():
        shares[_ring(schedule, chunk, arcs)] += schedule.chunks[chunk].share  # type: ignore[assignment]
    return dict(shares)  # type: ignore[arg-type]


def _ring(schedule: Schedule, chunk: int, arcs: set[tuple[int, int]]) -> tuple[int, ...]:
    names = schedule.devices

    def refuse(reason: str) -> PlanError:
        return PlanError(message(f"an NCCL graph has rings, but {reason}.", schedule.head, 'algorithm="ring"'))

    for ends, does in ((0, "goes from {} to {} and {}"), (1, "comes to {} from {} and {}")):
        others: dict[int, int] = {}
        for arc in sorted(arcs):
            here, there = arc[ends], arc[1 - ends]
            if others.setdefault(here, there) != there:
                raise refuse(f"chunk {chunk} " + does.format(names[here], names[others[here]], names[there]))
    onward = dict(arcs)
    starts = sorted(set(onward) - set(onward.values())) or [0]
    way = [starts[0]]
    while way[-1] in onward and onward[way[-1]] != way[0]:
        way.append(onward[way[-1]])
    assert len(way) == len(names), "a chunk that all devices give or get passes all of them"
    zero = way.index(0)
    return (*way[zero:], *way[:zero])


def _numbers(schedule: Schedule) -> list[int]:
    devices = [parse(name) for name in schedule.devices]
    for device in devices:
        if device.kind != "cuda" or device.logical or device.host != devices[0].host:
            raise PlanError(
                message(
                    "an NCCL graph is of the GPUs of one host.",
                    ", ".join(schedule.devices),
                    "devices such as cuda:0, cuda:1; one file a host",
                )
            )
    return [device.index for device in devices]


def _dev(number: int) -> str:
    # Older versions of NCCL read 10 as ten, newer ones as sixteen; all of them read 0xa as ten.
    return str(number) if number < 10 else f"{number:#x}"


def _speed(schedule: Schedule, topology: Topology, channels: list[tuple[int, ...]]) -> Fraction:
    """Return how fast each channel can be, where all run at the same time."""
    routes = {(route.src, route.dst): route.through for route in schedule.routes}
    used: Counter[tuple[str, str]] = Counter()
    for cycle in channels:
        for src, dst in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            ends = schedule.devices[src], schedule.devices[dst]
            through = routes.get((src, dst))
            way = topology.route(*ends) if through is None else (ends[0], *through, ends[1])
            if way is None:
                raise PlanError(message("the topology has no way along the ring.", " -> ".join(ends), repr(topology)))
            used.update(pairwise(way))
    speeds = []
    for (a, b), count in used.items():
        link = topology.link(a, b)
        if link is None:
            raise PlanError(message("the topology lacks a link of the ring.", f"{a} -> {b}", repr(topology)))
        speeds.append(link.bandwidth / count)
    return min(speeds)
