"""A simulation as Chrome's Trace Event JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

In: a ``Schedule``, a ``Topology``, bytes.  Out: text. Reads no clock: the times are ``simulate``'s.

One group of rows for each node that sends, one row for each link that it sends over, one event for each piece of
a chunk that crosses a link. The first group has the ticks: moves of one tick start together, once its latency is over.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import accumulate
from typing import Any, Final, NamedTuple

from ..schedule.schedule import Schedule
from ..schedule.simulate import Pair, simulate, way
from ..topology import Topology

EVENTS: Final = 200_000
"""How many moves a trace shows: whole pieces, the first ones, and never less than one piece. More would
make a file of over 40 MB."""


def to_chrome_trace(schedule: Schedule, topology: Topology, nbytes: int) -> str:
    """Return what each link carries when, as JSON text for a trace viewer; equal arguments give the same bytes.

    Moves that share a link within a tick follow each other there, each at the link's full bandwidth. Of a
    schedule of very many pieces the first are shown, and ``otherData`` says how many are left out. Moves of no bytes
    are not shown.

    Args:
      schedule: any; its devices and routes are nodes of the topology.
      topology: where it runs.
      nbytes: of the whole buffer, 0 or more.
    Raises:
      ArgumentError: a broken number of bytes, no schedule or no topology.
      PlanError: a move for which the topology has no way.

    >>> from crossreduce.planning import ring
    >>> topology = Topology.ring(2, gb_per_s=25)
    >>> events = json.loads(to_chrome_trace(ring(topology.devices), topology, 50_000))["traceEvents"]
    >>> [(event["name"], event["ts"], event["dur"]) for event in events if event.get("cat") == "move"]
    [('chunk 0', 0.0, 1.0), ('chunk 1', 0.0, 1.0), ('chunk 0', 1.0, 1.0), ('chunk 1', 1.0, 1.0)]
    """
    simulation = simulate(schedule, topology, nbytes)
    sizes = [float(chunk.share) * nbytes / schedule.pieces for chunk in schedule.chunks]  # of a piece
    rounds = _rounds(schedule, topology)
    moves = sum(len(crossings) for crossings, _ in rounds)
    pieces = min(schedule.pieces, max(1, EVENTS // max(1, moves)))
    speeds = {(link.src, link.dst): float(link.bandwidth) * 1e9 for link in topology.links}
    rows, events = _rows(list(simulation.bytes), topology)
    ends = list(accumulate(simulation.ticks, initial=0.0))
    free = dict.fromkeys(simulation.bytes, 0.0)  # when each link has carried what came before
    for t in range(min(len(simulation.ticks), len(rounds) + pieces - 1)):
        together = range(max(0, t - schedule.pieces + 1), min(t + 1, len(rounds)))
        latency = max(rounds[r].latency_s for r in together)
        what = {"rounds": f"{together[0]} to {together[-1]}", "latency_us": _us(latency)}
        events.append(_event(rows[None], f"tick {t}", "tick", ends[t], ends[t + 1], what))
        for r in reversed(together):  # the first pieces first
            for pair, chunk, src, dst in rounds[r].crossings if t - r < pieces else ():
                start = max(free[pair], ends[t] + latency)
                free[pair] = start + sizes[chunk] / speeds[pair]
                what = {"piece": t - r, "round": r, "bytes": sizes[chunk], "from": src, "to": dst}
                if sizes[chunk]:
                    events.append(_event(rows[pair], f"chunk {chunk}", "move", start, free[pair], what))
    other = {
        "schedule": schedule.head,
        "bytes": nbytes,
        "seconds": simulation.seconds,
        "pieces": schedule.pieces,
        "pieces_left_out": schedule.pieces - pieces,
    }
    content = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}
    return json.dumps(content, separators=(",", ":"))


class _Round(NamedTuple):
    """A round's moves: (link, chunk, src, dst) for each link on the way of each; and the longest latency of a way."""

    crossings: list[tuple[Pair, int, str, str]]
    latency_s: float


def _rounds(schedule: Schedule, topology: Topology) -> list[_Round]:
    latencies = {(link.src, link.dst): link.latency_s for link in topology.links}
    rounds = []
    for r, steps in enumerate(schedule.rounds):
        crossings = []
        longest = Fraction(0)
        for chunk, dst, srcs in steps:
            for src in srcs:
                if src != dst:
                    names = schedule.devices[src], schedule.devices[dst]
                    pairs = way(topology, *names, schedule.through(r, chunk, src, dst))
                    longest = max(longest, sum((latencies[pair] for pair in pairs), Fraction(0)))
                    crossings += [(pair, chunk, *names) for pair in pairs]
        rounds.append(_Round(crossings, float(longest)))
    return rounds


def _rows(used: list[Pair], topology: Topology) -> tuple[dict[Pair | None, dict[str, int]], list[dict[str, Any]]]:
    """Return the process and thread of the ticks (``None``) and of each link, and the events that name them.

    All numbers differ: a viewer may take threads of one number for the same, whatever their process.
    """
    rows: dict[Pair | None, dict[str, int]] = {None: {"pid": 1, "tid": 1}}
    names = [_name("process", rows[None], "schedule"), _name("thread", rows[None], "ticks")]
    groups = {node: number for number, node in enumerate(topology.nodes, start=2)}
    named = set()
    for src, dst in sorted(used, key=lambda pair: (groups[pair[0]], groups[pair[1]])):
        row = {"pid": groups[src], "tid": len(groups) + len(rows) + 1}
        rows[src, dst] = row
        if src not in named:
            named.add(src)
            names.append(_name("process", row, f"{src} sends"))
        names.append(_name("thread", row, f"to {dst}"))
    return rows, [event for pair in names for event in pair]


def _name(what: str, row: dict[str, int], name: str) -> list[dict[str, Any]]:
    """Return the events that name a process or thread, and place it in the order of the numbers."""
    place = row["pid" if what == "process" else "tid"]
    return [
        {"ph": "M", "name": f"{what}_name", **row, "args": {"name": name}},
        {"ph": "M", "name": f"{what}_sort_index", **row, "args": {"sort_index": place}},
    ]


def _event(row: dict[str, int], name: str, kind: str, start: float, end: float, what: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": _us(start), "dur": round(_us(end) - _us(start), 6)}
    return {"ph": "X", "name": name, "cat": kind, **row, **times, "args": what}


def _us(seconds: float) -> float:
    """Return microseconds, rounded to picoseconds, so that events that follow each other do not overlap."""
    return round(seconds * 1e6, 6)
