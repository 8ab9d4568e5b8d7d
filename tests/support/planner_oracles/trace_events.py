"""A strict reader of Chrome's Trace Event JSON: it accepts only what the published format defines.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import json
from collections import defaultdict

ALLOWED = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args", "cname"},
    "b": {"ph", "name", "cat", "id", "pid", "tid", "ts", "args"},
    "e": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts", "args"},
    "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "args", "bp"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
CLOSE_US = 2e-3  # times that differ by less are equal: they are rounded to nanoseconds


def read_events(text):
    """Return the events of a file after checking them: fields have the right types, rows have names, slices of a row
    are nested or apart, asynchronous events are pairs, arrows begin and end within slices, and times are in order."""
    content = json.loads(text)
    assert set(content) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    events = content["traceEvents"]
    slices, named, pending, arrows, last = defaultdict(list), defaultdict(set), {}, defaultdict(dict), 0.0
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= set(event) <= ALLOWED[event["ph"]], event
        assert isinstance(event["name"], str), event
        assert all(type(event[name]) is int for name in ("pid", "tid")), event
        if event["ph"] == "M":
            assert event["name"] in METADATA
            named[event["name"]].add((event["pid"], event["tid"]))
            continue
        assert type(event["ts"]) in (int, float)
        assert event["ts"] >= last, "events are sorted"
        last = event["ts"]
        assert (event["pid"], event["tid"]) in named["thread_name"], event
        assert event["pid"] in {pid for pid, _ in named["process_name"]}
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "be":
            key = event["cat"], event["id"]
            assert (event["ph"] == "b") == (key not in pending), event
            if event["ph"] == "b":
                pending[key] = event
            else:
                assert pending.pop(key)["name"] == event["name"]
        elif event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]], "an arrow has one start and one end"
            arrows[event["id"]][event["ph"]] = event
    assert not pending, "asynchronous events end"
    for of_row in slices.values():
        open_ends = []
        for begin, end in of_row:  # by begin, the longest first
            while open_ends and open_ends[-1] <= begin + CLOSE_US:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + CLOSE_US, "slices of a row are nested or apart"
            open_ends.append(end)
    for ends in arrows.values():
        assert set(ends) == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        for end in ends.values():
            row = slices[end["tid"]]
            assert any(begin - CLOSE_US <= end["ts"] <= stop + CLOSE_US for begin, stop in row), "an arrow joins slices"
    return events
