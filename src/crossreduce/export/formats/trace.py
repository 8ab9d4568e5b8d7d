"""Write a simulation as Chrome's Trace Event JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Input: a ``Schedule``, a ``Topology``, a number of bytes. Output: text. No clock is read: the times are ``simulate``'s.

There is one group of rows per node that sends, one row per link that it sends over, and one event for each transfer of
a piece over a link. The first group shows by how much each tick of the simulation extends the time. The trace of one
rank has the links into and out of its device.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any, Final

from ...lowering import lower
from ...schedule import Schedule, TimedTransfer, byte_count, simulate, timeline
from ...schedule.costs import Pair
from ...topology import Topology, TopologyLike, topology_of
from .ranks import one_rank

# The largest number of transfers in a trace: more would need over 40 MB. If there are more, only the first
# pieces are shown, at least one.
EVENTS: Final = 200_000


def to_chrome_trace(schedule: Schedule, topology: TopologyLike, nbytes: int | str, *, rank: int | None = None) -> str:
    """Return the transfers over each link, with their times, as JSON text for a trace viewer.

    Transfers that share a link within a tick follow each other, each at the link's full bandwidth, and start after the
    latency of their route. If a schedule has too many pieces, the first ones are shown, and ``otherData`` stores the
    number of the others. Transfers of 0 bytes are not shown. Equal arguments give the same bytes.

    Args:
      schedule: its devices and routes are nodes of the topology.
      topology: the topology on which the schedule is simulated, a machine's name or a file's path.
      nbytes: bytes of the whole buffer, 0 or more, or text such as "64M".
      rank: only the links into and out of the schedule's device of this number, without the work for the others;
        ``None``: all links.
    Raises:
      ArgumentError: an invalid number of bytes, schedule, topology or rank.
      PlanError: the topology has no route for a transfer.
      ScheduleError: ``verify`` rejects the schedule.

    >>> from crossreduce.planning import ring
    >>> topology = Topology.ring(2, gb_per_s=25)
    >>> events = json.loads(to_chrome_trace(ring(topology.devices), topology, 50_000))["traceEvents"]
    >>> [(event["name"], event["ts"], event["dur"]) for event in events if event.get("cat") == "transfer"]
    [('chunk 0', 0.0, 1.0), ('chunk 1', 0.0, 1.0), ('chunk 0', 1.0, 1.0), ('chunk 1', 1.0, 1.0)]
    """
    topology, nbytes = topology_of(topology), byte_count(nbytes)
    program, names = lower(schedule), schedule.devices
    node = None if rank is None else names[one_rank(rank, names)]
    number = {name: k for k, name in enumerate(names)}
    known: dict[tuple[int, int, str, str], bool] = {}

    def shown_links(move: TimedTransfer) -> tuple[Pair, ...]:
        """Return the links with an event for a transfer."""
        key = move.round, move.chunk, move.src, move.dst
        if key not in known:
            known[key] = program.moves(move.round, move.chunk, number[move.src], number[move.dst])
        return tuple(pair for pair in move.links if known[key] and (node is None or node in pair))

    simulation = simulate(schedule, topology, nbytes)
    used = [pair for pair in simulation.bytes if node is None or node in pair]
    count = sum(len(shown_links(move)) for move in timeline(schedule.cut_into(1), topology, nbytes, node=node))
    shown = min(schedule.pieces, max(1, EVENTS // max(1, count)))
    rows, events = _rows(used, topology)
    ends = list(accumulate(simulation.ticks, initial=0.0))
    for t, (start, end) in enumerate(pairwise(ends[: schedule.round_count + shown])):
        first, last = max(0, t - schedule.pieces + 1), min(t, schedule.round_count - 1)
        events.append(_event(rows[None], f"tick {t}", "tick", start, end, {"rounds": f"{first} to {last}"}))
    speeds = {pair: float(link.bandwidth) * 1e9 for pair, link in topology.by_ends.items()}
    free = dict.fromkeys(used, 0.0)  # the time at which each link has carried all earlier transfers
    moving = timeline(schedule, topology, nbytes, node=node)
    for _, ticks in groupby(moving, key=lambda move: move.round + move.piece):
        # In the order in which their bytes arrive; earlier pieces first.
        moves = sorted(
            ticks,
            key=lambda move: (move.start + move.latency_s, move.piece, move.chunk, number[move.dst], number[move.src]),
        )
        if moves[0].round + moves[0].piece >= schedule.round_count + shown:
            break
        for move in moves:
            size = float(program.shares[move.chunk]) * nbytes / schedule.pieces
            details = {"piece": move.piece, "round": move.round, "bytes": size, "from": move.src, "to": move.dst}
            for pair in shown_links(move) if size and move.piece < shown else ():
                start = max(free[pair], move.start + move.latency_s)
                free[pair] = start + size / speeds[pair]
                events.append(_event(rows[pair], f"chunk {move.chunk}", "transfer", start, free[pair], details))
    other = {
        "schedule": schedule.head,
        "bytes": nbytes,
        "seconds": simulation.seconds,
        "pieces": schedule.pieces,
        "pieces_left_out": schedule.pieces - shown,
    }
    if node is not None:
        other |= {"rank": rank, "device": node}
    content = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}
    return json.dumps(content, separators=(",", ":"))


def _rows(used: list[Pair], topology: Topology) -> tuple[dict[Pair | None, dict[str, int]], list[dict[str, Any]]]:
    """Return the numbers of process and thread for the ticks (``None``) and each link, and the events that name them.

    All threads' numbers differ, since a viewer may treat threads of one number as one, even in different processes.
    """
    rows: dict[Pair | None, dict[str, int]] = {None: {"pid": 1, "tid": 1}}
    names = [*_name("process", rows[None], "schedule"), *_name("thread", rows[None], "ticks")]
    groups = {node: number for number, node in enumerate(topology.nodes, start=2)}
    for src, pairs in groupby(sorted(used, key=lambda pair: (groups[pair[0]], groups[pair[1]])), key=itemgetter(0)):
        for number, pair in enumerate(pairs):
            rows[pair] = {"pid": groups[src], "tid": len(groups) + len(rows) + 1}
            names += _name("process", rows[pair], f"{src} sends") if number == 0 else []
            names += _name("thread", rows[pair], f"to {pair[1]}")
    return rows, names


def _name(what: str, row: dict[str, int], name: str) -> list[dict[str, Any]]:
    """Return the events that give a process or thread its name, and its number as its position in the viewer."""
    place = row["pid" if what == "process" else "tid"]
    return [
        {"ph": "M", "name": f"{what}_name", **row, "args": {"name": name}},
        {"ph": "M", "name": f"{what}_sort_index", **row, "args": {"sort_index": place}},
    ]


def _event(
    row: dict[str, int], name: str, kind: str, start: float, end: float, details: dict[str, Any]
) -> dict[str, Any]:
    """Return an event with a start and a duration, which the format calls a complete event."""
    times = {"ts": _us(start), "dur": round(_us(end) - _us(start), 6)}
    return {"ph": "X", "name": name, "cat": kind, **row, **times, "args": details}


def _us(seconds: float) -> float:
    """Return microseconds, rounded to picoseconds, so that events that follow each other do not overlap."""
    return round(seconds * 1e6, 6)
