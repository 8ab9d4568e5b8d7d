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
from itertools import combinations
from typing import NamedTuple

from .calls import GroupTrace, RankTrace
from .format import Phase


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
    shifts = {names[0]: ClockShift(0, 0)}
    limits = _limits(groups)
    while len(shifts) < len(names):
        # Of the clocks that messages connect to a clock with a shift, the next one is that with the smallest error.
        candidates = []
        for (clock, other), (low, high) in limits.items():
            if clock in shifts and other not in shifts:
                error = (shifts[clock].error_ns or 0) + abs(high - low + 1) // 2
                candidates.append((error, other, ClockShift(shifts[clock].add_ns + (low + high) // 2, error)))
        if candidates:
            _, name, shift = min(candidates)
        else:
            name = next(name for name in names if name not in shifts)
            shift = ClockShift(_calendar(traces, name) - _calendar(traces, names[0]), None)
        shifts[name] = shift
    return shifts


def _calendar(traces: Iterable[RankTrace], clock: str) -> int:
    """Return the calendar time at which a clock was 0, from the reading with the smallest error."""
    readings = [reading for trace in traces if trace.facts.clock == clock for reading in trace.clocks]
    best = min(readings, key=lambda reading: reading.error_ns)
    return best.calendar_ns - best.monotonic_ns


def _limits(groups: Iterable[GroupTrace]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return for pairs of clocks the minimum and maximum shift of times from the second clock to the first one."""
    limits: dict[tuple[str, str], tuple[int, int]] = {}
    for group in groups:
        leaders = min(map(len, group.hosts))
        for place in range(leaders):
            rail = [group.ranks[host[place]] for host in group.hosts if host[place] in group.ranks]
            compared = [_comparison_times(trace) for trace in rail]
            for (first, times), (second, other_times) in combinations(zip(rail, compared, strict=True), 2):
                clock, other_clock, both = first.facts.clock, second.facts.clock, times.keys() & other_times.keys()
                if clock == other_clock or not both:
                    continue
                low = max(times[number][0] - other_times[number][1] for number in both)
                high = min(times[number][1] - other_times[number][0] for number in both)
                for pair, (least, most) in (((clock, other_clock), (low, high)), ((other_clock, clock), (-high, -low))):
                    earlier = limits.get(pair, (least, most))
                    limits[pair] = max(earlier[0], least), min(earlier[1], most)
    return limits


def _comparison_times(trace: RankTrace) -> dict[int, tuple[int, int]]:
    """Return the begin and end of a leader's comparison with the other hosts, by the number of the call."""
    return {
        call.number: (part.begin_ns, part.end_ns)
        for call in trace.calls
        for part in call.parts
        if part.phase is Phase.AGREE
    }
