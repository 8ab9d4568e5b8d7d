"""Write a trace as Chrome's Trace Event JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Input: the groups of a run, their clocks, and predictions. Output: text. Each rank of a group is a process of the viewer
with the rows "calls", "phases", "plan" (the predicted time, if there is one) and "queue". An arrow ends at each wait;
it begins where the rank that arrived last ended its work.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

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
# Names of colours that chrome://tracing has; Perfetto chooses its own by the events' names.
_COLOURS: Final = {Phase.WAIT: "terrible", Phase.AGREE: "bad", Phase.REDUCE: "good", Phase.BETWEEN_HOSTS: "rail_load"}
_CALLS, _PHASES, _PLAN, _QUEUE = range(4)
_ROWS: Final = ("calls", "phases", "plan", "queue")


def to_chrome(
    groups: Sequence[GroupTrace], shifts: Mapping[str, ClockShift], predict: Predict, notes: Sequence[str] = ()
) -> str:
    """Return the calls of all ranks on one clock, as JSON text for a trace viewer; it begins at 0 microseconds."""
    writer = _EventWriter(groups, shifts, predict)
    clocks = {
        name: {"added_us": shift.add_ns / 1e3, "error_us": None if shift.error_ns is None else shift.error_ns / 1e3}
        for name, shift in shifts.items()
    }
    other = {"clocks": clocks, "start_ns": writer.start_ns, "notes": list(notes)}
    events = [*writer.names, *sorted(writer.events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))]
    content = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}
    return json.dumps(content, separators=(",", ":"))


class _EventWriter:
    """The events of a trace. ``start_ns``: the time of the first one, on the common clock."""

    def __init__(self, groups: Sequence[GroupTrace], shifts: Mapping[str, ClockShift], predict: Predict) -> None:
        self.names: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._predict, self._arrows, self._process = predict, 0, 0
        self._add = {
            (group.token, rank): shifts[trace.facts.clock].add_ns
            for group in groups
            for rank, trace in group.ranks.items()
        }
        begins = [
            (call.begin_ns if call.queued_ns is None else call.queued_ns) + self._add[group.token, rank]
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
        processes = {}
        for rank in sorted(group.ranks):
            self._process += 1
            processes[rank] = self._process
            facts = group.ranks[rank].facts
            self._name(self._process, f'"{group.name}" rank {rank} ({facts.hostname}, pid {facts.pid})')
        work = {rank: _work(trace.calls) for rank, trace in group.ranks.items()}
        for rank, trace in group.ranks.items():
            for call in trace.calls:
                self._add_call(group, rank, call, processes)
                for part in call.parts:
                    if part.waited_for in work and part.waited_for != rank:
                        self._add_arrow(group, rank, part, call, work[part.waited_for], processes)

    def _name(self, process: int, name: str) -> None:
        def about(what: str, row: int, **details: Any) -> None:
            self.names.append({"ph": "M", "name": what, "pid": process, "tid": _tid(process, row), "args": details})

        about("process_name", _CALLS, name=name)
        about("process_sort_index", _CALLS, sort_index=process)
        for row, title in enumerate(_ROWS):
            about("thread_name", row, name=title)
            about("thread_sort_index", row, sort_index=row)

    def _add_call(self, group: GroupTrace, rank: int, call: TracedCall, processes: Mapping[int, int]) -> None:
        process, add = processes[rank], self._add[group.token, rank]
        predicted = self._predict(group, call)
        details: dict[str, Any] = {"op": call.number, "call": call.text, "group": group.name, "rank": rank}
        details["outcome"] = OUTCOMES.get(call.outcome, f"failed ({call.outcome})")
        seconds = (call.last_ns - call.begin_ns) / 1e9
        if call.nbytes is not None:
            details["bytes"] = call.nbytes
            if call.end_ns is not None and seconds > 0:
                details["GB/s"] = round(call.nbytes / seconds / 1e9, 3)
        if predicted is not None:
            details["predicted_us"] = round(predicted * 1e6, 3)
            plan = {"op": call.number, "took_us": round(seconds * 1e6, 3)}
            begin = self._us(call.begin_ns + add)
            self._slice(process, _PLAN, f"plan: {call.collective}", begin, predicted * 1e6, "plan", plan)
        waits = [part for part in call.parts if part.phase in (Phase.WAIT, Phase.AGREE)]
        details["waited_us"] = sum(part.end_ns - part.begin_ns for part in waits) / 1e3
        name = call.text if call.end_ns is not None else f"{call.text} (not ended)"
        begin, end = (self._us(ns + add) for ns in (call.begin_ns, call.last_ns))
        self._slice(process, _CALLS, name, begin, end - begin, "call", details)
        for part in call.parts:
            begin, end = (self._us(ns + add) for ns in (part.begin_ns, part.end_ns))
            name = NAMES[part.phase] + ("" if part.waited_for is None else f" for rank {part.waited_for}")
            about = {"op": call.number, "stage": part.stage}
            self._slice(process, _PHASES, name, begin, end - begin, "phase", about, _COLOURS.get(part.phase))
        if call.queued_ns is not None:  # these may overlap, so they are asynchronous events
            event: dict[str, Any] = {
                "name": f"queue: {call.collective}",
                "cat": "queue",
                "id": f"{group.token}.{rank}.{call.number}",
            }
            event |= {"pid": process, "tid": _tid(process, _QUEUE)}
            self.events.append({"ph": "b", **event, "ts": self._us(call.queued_ns + add), "args": {"op": call.number}})
            self.events.append({"ph": "e", **event, "ts": self._us(call.begin_ns + add)})

    def _add_arrow(
        self,
        group: GroupTrace,
        rank: int,
        part: CallPart,
        call: TracedCall,
        work: Sequence[tuple[int, int]],
        processes: Mapping[int, int],
    ) -> None:
        """Add an arrow from the last work of the rank that arrived last to the end of a wait of this call."""
        assert part.waited_for is not None
        shift, add = self._add[group.token, part.waited_for], self._add[group.token, rank]
        at = bisect_right(work, (part.end_ns + add - shift, 1 << 62)) - 1
        if at < 0:
            return
        begin, end = work[at]
        self._arrows += 1
        event = {"name": "arrives last", "cat": "wait", "id": self._arrows}
        last = min(end + shift, part.end_ns + add)
        source = {"pid": processes[part.waited_for], "tid": _tid(processes[part.waited_for], _PHASES)}
        target = {"pid": processes[rank], "tid": _tid(processes[rank], _PHASES)}
        middle = max(begin + shift, last - 1)  # within the events that it joins
        self.events.append({"ph": "s", **event, **source, "ts": self._us(middle), "args": {"op": call.number}})
        ended = max(part.end_ns + add - 1, part.begin_ns + add, middle)
        event |= {"ph": "f", "bp": "e", "args": {"op": call.number}}
        self.events.append({**event, **target, "ts": self._us(ended)})

    def _slice(
        self,
        process: int,
        row: int,
        name: str,
        begin: float,
        us: float,
        kind: str,
        details: dict[str, Any],
        colour: str | None = None,
    ) -> None:
        where = {"pid": process, "tid": _tid(process, row), "ts": begin, "dur": round(us, 3)}
        event: dict[str, Any] = {"ph": "X", "name": name, "cat": kind, **where, "args": details}
        self.events.append(event if colour is None else {**event, "cname": colour})


def _tid(process: int, row: int) -> int:
    """Return the number of a row: all of them differ, since a viewer may treat rows of one number as one."""
    return process * len(_ROWS) + row


def _work(calls: Sequence[TracedCall]) -> list[tuple[int, int]]:
    """Return when a rank did something else than to wait in its calls, in order."""
    waits = (Phase.WAIT, Phase.AGREE)
    return sorted((part.begin_ns, part.end_ns) for call in calls for part in call.parts if part.phase not in waits)
