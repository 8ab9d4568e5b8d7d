"""One clock for the ranks of several hosts, whose monotonic clocks begin at different times.

Input: the groups of a run. Output: for each clock the nanoseconds to add to its times, and the possible error.

Processes of one host share a clock. In a group on several hosts, each call begins with messages by which the leader
ranks of all hosts compare their calls. A message cannot arrive before it is sent, so this phase does not end on one
host before it begins on another host. So each call gives an upper and a lower limit of the difference of two clocks, as
in Cristian's algorithm. The middle between the tightest limits is used. They are close to each other if each of the two
hosts is late in some calls. If clocks drift, they may contradict each other. Then the error is half of their distance.

Source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from .calls import GroupTrace, RankTrace
from .format import ClockReading, Phase

_MOST_COMPARED: Final = 32  # hosts with which each other host is compared: all pairs of thousands would take hours


class ClockShift(NamedTuple):
    """The nanoseconds to add to the times of a clock.

    ``error_ns``: the maximum error of ``add_ns``. It is ``None`` if only the calendar clocks were compared.
    """

    add_ns: int
    error_ns: int | None


def align(groups: Sequence[GroupTrace]) -> dict[str, ClockShift]:
    """Return for each clock the shift to the clock of the first group's lowest rank."""
    traces = [trace for group in groups for _, trace in sorted(group.ranks.items())]
    names = list(dict.fromkeys(trace.facts.clock for trace in traces))
    name, shift, shifts, limits = names[0], ClockShift(0, 0), dict[str, ClockShift](), _limits(groups)
    candidates: dict[str, tuple[int, int]] = {}  # of clocks that messages connect to one with a shift: error, shift
    starts = _calendar_starts(traces)
    rest = iter(names)
    while True:
        shifts[name] = shift
        for other, (low, high) in limits.get(name, {}).items():
            error = (shift.error_ns or 0) + abs(high - low + 1) // 2
            found = error, shift.add_ns + (low + high) // 2
            if other not in shifts:
                candidates[other] = min(found, candidates.get(other, found))
        if candidates:
            name = min(candidates, key=lambda each: (candidates[each][0], each))
            error, add = candidates.pop(name)
            shift = ClockShift(add, error)
        elif (next_name := next((each for each in rest if each not in shifts), None)) is not None:
            name, shift = next_name, ClockShift(starts[next_name] - starts[names[0]], None)
        else:
            return shifts


def _calendar_starts(traces: Iterable[RankTrace]) -> dict[str, int]:
    """Return the calendar time at which each clock was 0, from the reading with the smallest error."""
    best: dict[str, ClockReading] = {}
    for trace in traces:
        for reading in trace.clocks:
            best[trace.facts.clock] = min(best.get(trace.facts.clock, reading), reading, key=lambda each: each.error_ns)
    return {clock: reading.calendar_ns - reading.monotonic_ns for clock, reading in best.items()}


def _limits(groups: Iterable[GroupTrace]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return for pairs of clocks the minimum and maximum shift of times from the second clock to the first one.

    Of many hosts, each is compared with some of them only.
    """
    limits: dict[str, dict[str, tuple[int, int]]] = {}
    for group in groups:
        leaders = min(map(len, group.hosts))
        for place in range(leaders):
            rail = [group.ranks[host[place]] for host in group.hosts if host[place] in group.ranks]
            compared = [(trace, _comparison_times(trace)) for trace in rail]
            pairs = ((each, other) for k, each in enumerate(compared[:_MOST_COMPARED]) for other in compared[k + 1 :])
            for (first, times), (second, other_times) in pairs:
                clock, other_clock, both = first.facts.clock, second.facts.clock, times.keys() & other_times.keys()
                if clock == other_clock or not both:
                    continue
                low = max(times[number][0] - other_times[number][1] for number in both)
                high = min(times[number][1] - other_times[number][0] for number in both)
                for a, b, least, most in ((clock, other_clock, low, high), (other_clock, clock, -high, -low)):
                    earlier = limits.setdefault(a, {}).get(b, (least, most))
                    limits[a][b] = max(earlier[0], least), min(earlier[1], most)
    return limits


def _comparison_times(trace: RankTrace) -> dict[int, tuple[int, int]]:
    """Return the begin and end of a leader's comparison with the other hosts, by the number of the call."""
    return {
        call.number: (part.begin_ns, part.end_ns)
        for call in trace.calls
        for part in call.parts
        if part.phase is Phase.AGREE
    }
