"""Write a trace as Chrome's Trace Event JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Input: the groups of a run, their clocks, and predictions. Output: text. Each rank of a group is shown as a process with
the rows "calls", "phases", "plan" (the predicted time, if there is one) and "queue". At the end of each wait there is
an arrow from the last work of the rank that arrived last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from ...chrome_trace import Event, TraceRow, trace_json
from .calls import CallPart, GroupTrace, TracedCall
from .clocks import ClockShift
from .format import Phase

Predict: TypeAlias = Callable[[GroupTrace, TracedCall], float | None]  # returns seconds, or None

OUTCOMES: Final = {0: "done", 2: "the ranks' calls differ", 3: "the group was aborted", 255: "not ended"}
NAMES: Final = {
    Phase.WAIT: "wait",
    Phase.COPY_IN: "copy in",
    Phase.REDUCE: "reduce",
    Phase.COPY_OUT: "copy out",
    Phase.BETWEEN_HOSTS: "between hosts",
    Phase.AGREE: "wait for other hosts",
    Phase.INNER: "another library",
}
# Names of chrome://tracing for colours. Perfetto ignores them, and chooses colours by the names of events.
_COLOURS: Final = {Phase.WAIT: "terrible", Phase.AGREE: "bad", Phase.REDUCE: "good", Phase.BETWEEN_HOSTS: "rail_load"}
_ROWS: Final = ("calls", "phases", "plan", "queue")
_WAITS: Final = (Phase.WAIT, Phase.AGREE)


def to_chrome(
    groups: Sequence[GroupTrace], shifts: Mapping[str, ClockShift], predict: Predict, notes: Sequence[str] = ()
) -> str:
    """Return the calls of all ranks as JSON text for a trace viewer, on one clock, on which the first event is at 0."""
    writer = _EventWriter(groups, shifts, predict)
    clocks = {
        name: {"added_us": shift.add_ns / 1e3, "error_us": None if shift.error_ns is None else shift.error_ns / 1e3}
        for name, shift in shifts.items()
    }
    events = [*writer.names, *sorted(writer.events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))]
    return trace_json(events, {"clocks": clocks, "start_ns": writer.start_ns, "notes": list(notes)})


class _EventWriter:
    """Makes the ``events`` of a trace. ``names``: the events that name processes and rows. ``start_ns``: time 0."""

    def __init__(self, groups: Sequence[GroupTrace], shifts: Mapping[str, ClockShift], predict: Predict) -> None:
        self.names: list[Event] = []
        self.events: list[Event] = []
        self._predict, self._arrows, self._process = predict, 0, 0
        self._shifts = {  # by group and rank: the nanoseconds to add to the rank's times
            (group.token, rank): shifts[trace.facts.clock].add_ns
            for group in groups
            for rank, trace in group.ranks.items()
        }
        begins = [
            (call.begin_ns if call.queued_ns is None else call.queued_ns) + self._shifts[group.token, rank]
            for group in groups
            for rank, trace in group.ranks.items()
            for call in trace.calls
        ]
        self.start_ns = min(begins, default=0)
        for group in groups:
            self._add_group(group)

    def _us(self, ns: int) -> float:
        return (ns - self.start_ns) / 1e3

    def _add_group(self, group: GroupTrace) -> None:
        rows = {}
        for rank in sorted(group.ranks):
            self._process += 1
            facts = group.ranks[rank].facts
            rows[rank] = {name: TraceRow(self._process, self._process * len(_ROWS) + k) for k, name in enumerate(_ROWS)}
            about = f'"{group.name}" rank {rank} ({facts.hostname}, pid {facts.pid})'
            self.names += rows[rank]["calls"].process_names(about)
            for position, (name, row) in enumerate(rows[rank].items()):
                self.names += row.thread_names(name, position)
        work = {rank: _work(trace.calls) for rank, trace in group.ranks.items()}
        for rank, trace in group.ranks.items():
            for call in trace.calls:
                self._add_call(group, rank, call, rows[rank])
                for part in call.parts:
                    if part.waited_for in work and part.waited_for != rank:
                        self._add_arrow(group, rank, part, call, work[part.waited_for], rows)

    def _add_call(self, group: GroupTrace, rank: int, call: TracedCall, rows: Mapping[str, TraceRow]) -> None:
        shift = self._shifts[group.token, rank]
        predicted = self._predict(group, call)
        details: Event = {"op": call.number, "call": call.text, "group": group.name, "rank": rank}
        details["outcome"] = OUTCOMES.get(call.outcome, f"failed ({call.outcome})")
        seconds = (call.last_ns - call.begin_ns) / 1e9
        if call.nbytes is not None:
            details["bytes"] = call.nbytes
            if call.end_ns is not None and seconds > 0:
                details["GB/s"] = round(call.nbytes / seconds / 1e9, 3)
        begin, end = (self._us(ns + shift) for ns in (call.begin_ns, call.last_ns))
        if predicted is not None:
            us = round(predicted * 1e6, 3)
            details["predicted_us"] = us
            plan = {"op": call.number, "took_us": round(seconds * 1e6, 3)}
            self.events.append(rows["plan"].slice(f"plan: {call.collective}", "plan", begin, us, plan))
        details["waited_us"] = sum(part.end_ns - part.begin_ns for part in call.parts if part.phase in _WAITS) / 1e3
        name = call.text if call.end_ns is not None else f"{call.text} (not ended)"
        self.events.append(rows["calls"].slice(name, "call", begin, round(end - begin, 3), details))
        for part in call.parts:
            started, ended = (self._us(ns + shift) for ns in (part.begin_ns, part.end_ns))
            name = NAMES[part.phase] + ("" if part.waited_for is None else f" for rank {part.waited_for}")
            about, colour = {"op": call.number, "stage": part.stage}, _COLOURS.get(part.phase)
            self.events.append(rows["phases"].slice(name, "phase", started, round(ended - started, 3), about, colour))
        if call.queued_ns is not None:
            number, queued = f"{group.token}.{rank}.{call.number}", self._us(call.queued_ns + shift)
            name = f"queue: {call.collective}"
            self.events += rows["queue"].overlapping(name, "queue", number, queued, begin, {"op": call.number})

    def _add_arrow(
        self,
        group: GroupTrace,
        rank: int,
        part: CallPart,
        call: TracedCall,
        work: Sequence[tuple[int, int]],
        rows: Mapping[int, Mapping[str, TraceRow]],
    ) -> None:
        """Add an arrow to the end of ``part``, a wait, from the last ``work`` (see ``_work``) of the late rank."""
        assert part.waited_for is not None
        late_shift, shift = self._shifts[group.token, part.waited_for], self._shifts[group.token, rank]
        last = bisect_right(work, (part.end_ns + shift - late_shift, 1 << 62)) - 1
        if last < 0:
            return
        begin, end = (ns + late_shift for ns in work[last])
        self._arrows += 1
        # Viewers draw an arrow only if it begins and ends within events.
        start = max(begin, min(end, part.end_ns + shift) - 1)
        stop = max(part.end_ns + shift - 1, part.begin_ns + shift, start)
        source, target = rows[part.waited_for]["phases"], rows[rank]["phases"]
        begin_us, end_us, details = self._us(start), self._us(stop), {"op": call.number}
        self.events += source.arrow("arrives last", "wait", self._arrows, begin_us, target, end_us, details)


def _work(calls: Sequence[TracedCall]) -> list[tuple[int, int]]:
    """Return the begin and the end of each phase in which a rank did not wait, in order of time."""
    return sorted((part.begin_ns, part.end_ns) for call in calls for part in call.parts if part.phase not in _WAITS)
