"""Write a simulation as Chrome's Trace Event JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Input: a ``Schedule``, a ``Topology``, a number of bytes. Output: text. No clock is read: the times are ``simulate``'s.

Each node that sends has a group of rows, each link over which it sends has a row, and each transfer of a piece over a
link has an event. The first group shows the simulation's ticks. The trace of one rank has only its device's links.
"""

from __future__ import annotations

from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Final

from ...chrome_trace import Event, TraceRow, trace_json
from ...lowering import lower
from ...schedule import Schedule, TimedTransfer, simulate, timeline
from ...schedule.costs import Pair
from ...topology import Topology, TopologyLike, byte_count, topology_of
from .ranks import one_rank

# The largest number of transfers in a trace: more would need over 40 MB. A larger trace shows only its first pieces.
EVENTS: Final = 200_000


def to_chrome_trace(schedule: Schedule, topology: TopologyLike, nbytes: int | str, *, rank: int | None = None) -> str:
    """Return the transfers over each link, with their times, as JSON text for a trace viewer.

    Transfers that share a link within a tick follow each other, each at the link's full bandwidth, and start after the
    latency of their route. If a schedule has too many pieces, only the first ones are shown, and ``otherData`` stores
    how many are left out. Transfers of 0 bytes are not shown. Equal arguments give the same bytes.

    Args:
      schedule: its devices and routes are nodes of the topology.
      topology: the topology on which the schedule is simulated, a machine's name or a file's path.
      nbytes: bytes of the whole buffer, 0 or more, or text such as "64M".
      rank: the number of a device in the schedule. Only links into and out of it are shown. By default, all links are.
    Raises:
      ArgumentError: the number of bytes, the schedule, the topology or the rank is invalid.
      PlanError: the topology has no route for a transfer.
      ScheduleError: ``verify`` rejects the schedule.

    >>> import json
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
    is_needed: dict[tuple[int, int, str, str], bool] = {}  # whether the result depends on a transfer

    def shown_links(move: TimedTransfer) -> tuple[Pair, ...]:
        """Return the links on which a transfer is shown."""
        key = move.round, move.chunk, move.src, move.dst
        if key not in is_needed:
            is_needed[key] = program.moves(move.round, move.chunk, number[move.src], number[move.dst])
        return tuple(pair for pair in move.links if is_needed[key] and (node is None or node in pair))

    simulation = simulate(schedule, topology, nbytes)
    used = [pair for pair in simulation.bytes if node is None or node in pair]
    per_piece = sum(len(shown_links(move)) for move in timeline(schedule.cut_into(1), topology, nbytes, node=node))
    shown_pieces = min(schedule.pieces, max(1, EVENTS // max(1, per_piece)))
    rows, events = _rows(used, topology)
    times = list(accumulate(simulation.ticks, initial=0.0))  # at which the ticks begin and end, in seconds
    for t, (start, end) in enumerate(pairwise(times[: schedule.round_count + shown_pieces])):
        first, last = max(0, t - schedule.pieces + 1), min(t, schedule.round_count - 1)
        events.append(_slice(rows[None], f"tick {t}", "tick", start, end, {"rounds": f"{first} to {last}"}))
    speeds = {pair: float(link.bandwidth) * 1e9 for pair, link in topology.by_ends.items()}
    free = dict.fromkeys(used, 0.0)  # the time at which each link has carried all earlier transfers
    moving = timeline(schedule, topology, nbytes, node=node)
    for _, ticks in groupby(moving, key=lambda move: move.round + move.piece):
        # In the order in which the bytes arrive; if they arrive together, earlier pieces come first.
        moves = sorted(
            ticks,
            key=lambda move: (move.start + move.latency_s, move.piece, move.chunk, number[move.dst], number[move.src]),
        )
        if moves[0].round + moves[0].piece >= schedule.round_count + shown_pieces:
            break
        for move in moves:
            size = float(program.shares[move.chunk]) * nbytes / schedule.pieces
            details = {"piece": move.piece, "round": move.round, "bytes": size, "from": move.src, "to": move.dst}
            for pair in shown_links(move) if size and move.piece < shown_pieces else ():
                start = max(free[pair], move.start + move.latency_s)
                free[pair] = start + size / speeds[pair]
                events.append(_slice(rows[pair], f"chunk {move.chunk}", "transfer", start, free[pair], details))
    other = {
        "schedule": schedule.head,
        "bytes": nbytes,
        "seconds": simulation.seconds,
        "pieces": schedule.pieces,
        "pieces_left_out": schedule.pieces - shown_pieces,
    }
    if node is not None:
        other |= {"rank": rank, "device": node}
    return trace_json(events, other)


def _rows(used: list[Pair], topology: Topology) -> tuple[dict[Pair | None, TraceRow], list[Event]]:
    """Return the rows of the ticks (``None``) and of each link, and the events that name them."""
    rows: dict[Pair | None, TraceRow] = {None: TraceRow(1, 1)}
    names = [*rows[None].process_names("schedule"), *rows[None].thread_names("ticks", 1)]
    groups = {node: number for number, node in enumerate(topology.nodes, start=2)}
    for src, pairs in groupby(sorted(used, key=lambda pair: (groups[pair[0]], groups[pair[1]])), key=itemgetter(0)):
        for number, pair in enumerate(pairs):
            row = rows[pair] = TraceRow(groups[src], len(groups) + len(rows) + 1)
            names += row.process_names(f"{src} sends") if number == 0 else []
            names += row.thread_names(f"to {pair[1]}", row.tid)
    return rows, names


def _slice(row: TraceRow, name: str, category: str, start: float, end: float, details: Event) -> Event:
    """Return the event from ``start`` to ``end`` (seconds), rounded to picoseconds so that events do not overlap."""
    start_us, end_us = round(start * 1e6, 6), round(end * 1e6, 6)
    return row.slice(name, category, start_us, round(end_us - start_us, 6), details)
