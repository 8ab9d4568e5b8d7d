"""Events of Chrome's Trace Event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Input: rows, names and microseconds. Output: events, which are dictionaries, and the text of a file. No clock is read,
and events keep the order in which the caller lists them.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

Event: TypeAlias = dict[str, Any]


class TraceRow(NamedTuple):
    """A row of the viewer: the numbers of its process and its thread.

    Thread numbers must differ even between processes, since a viewer may treat threads with the same number as one.
    """

    pid: int
    tid: int

    def process_names(self, name: str) -> list[Event]:
        """Return the events that name the row's process and place it, by its number, among the processes."""
        return self._names("process", name, self.pid)

    def thread_names(self, name: str, position: int) -> list[Event]:
        """Return the events that name the row and set its position among the rows of its process."""
        return self._names("thread", name, position)

    def slice(
        self, name: str, category: str, begin_us: float, duration_us: float, details: Event, colour: str | None = None
    ) -> Event:
        """Return an event with a begin and a duration, which the format calls a complete event.

        Args:
          details: the data that the viewer shows when the event is selected.
          colour: a colour name of chrome://tracing; Perfetto ignores it.
        """
        event = {"ph": "X", "name": name, "cat": category, **self._asdict(), "ts": begin_us, "dur": duration_us}
        return {**event, "args": details} | ({} if colour is None else {"cname": colour})

    def overlapping(
        self, name: str, category: str, number: str, begin_us: float, end_us: float, details: Event
    ) -> list[Event]:
        """Return the two events of a slice that may overlap others of its row (an asynchronous event in the format).

        ``number`` identifies the slice, and must differ from the numbers of all other such slices.
        """
        event = {"name": name, "cat": category, "id": number, **self._asdict()}
        return [{"ph": "b", **event, "ts": begin_us, "args": details}, {"ph": "e", **event, "ts": end_us}]

    def arrow(
        self, name: str, category: str, number: int, begin_us: float, end: TraceRow, end_us: float, details: Event
    ) -> list[Event]:
        """Return the two events of an arrow from this row to the row ``end`` (flow events in the format).

        Each time must lie within a slice of its row. ``number`` identifies the arrow, and must be unique among arrows.
        """
        event = {"name": name, "cat": category, "id": number}
        return [
            {"ph": "s", **event, **self._asdict(), "ts": begin_us, "args": details},
            {"ph": "f", **event, "bp": "e", "args": details, **end._asdict(), "ts": end_us},
        ]

    def _names(self, what: str, name: str, position: int) -> list[Event]:
        return [
            {"ph": "M", "name": f"{what}_name", **self._asdict(), "args": {"name": name}},
            {"ph": "M", "name": f"{what}_sort_index", **self._asdict(), "args": {"sort_index": position}},
        ]


def trace_json(events: Iterable[Event], other: dict[str, Any]) -> str:
    """Return the text of a trace file with the events. ``other`` is data about the whole trace, which viewers show."""
    content = {"traceEvents": list(events), "displayTimeUnit": "ns", "otherData": other}
    return json.dumps(content, separators=(",", ":"))
