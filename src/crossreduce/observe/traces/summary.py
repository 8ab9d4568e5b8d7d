"""The summary of a trace: for each kind of call its times, and the ranks for which other ranks waited.

Input: the groups of a run and their clocks. Output: a row for each group and text of calls.

A wait counts for the rank that arrived last at the barrier, with two exceptions. While that rank itself waited for
other hosts, the wait counts for the leader that was the last to begin. While that rank exchanged data with other hosts,
the wait counts for no rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from statistics import median
from typing import Final, NamedTuple

from .calls import CallPart, GroupTrace, TracedCall
from .clocks import ClockShift
from .format import Phase

_WAITS: Final = (Phase.WAIT, Phase.AGREE)
_DELAYED: Final = (Phase.AGREE, Phase.BETWEEN_HOSTS)


class SummaryRow(NamedTuple):
    """The calls with the same text in one group.

    ``seconds``: the median time of a call, from the first rank's begin to the last rank's end. ``own_seconds``: the
    median time for which a rank did not wait in a call. ``queue_seconds``: the median time in a queue before a call.
    ``waiting``: the fraction of the ranks' time in these calls for which they waited. ``waited_for``: the ranks for
    which they waited, with the fraction of the waiting, the largest first. ``rank_seconds``: each rank's total time.
    """

    group: str
    token: str
    text: str
    nbytes: int | None
    calls: int
    unfinished: int
    seconds: float | None
    own_seconds: float | None
    queue_seconds: float | None
    waiting: float
    waited_for: tuple[tuple[int, float], ...]
    rank_seconds: tuple[tuple[int, float], ...]

    @property
    def gb_per_s(self) -> float | None:
        """The bytes of the whole array divided by the median time."""
        return self.nbytes / self.seconds / 1e9 if self.nbytes and self.seconds else None


def summarize(groups: Iterable[GroupTrace], shifts: Mapping[str, ClockShift]) -> list[SummaryRow]:
    """Return the rows of each group. The row with the most time comes first."""
    rows = []
    for group in groups:
        calls: dict[str, dict[int, dict[int, TracedCall]]] = {}  # by text, number and rank
        for rank, trace in group.ranks.items():
            for call in trace.calls:
                calls.setdefault(call.text, {}).setdefault(call.number, {})[rank] = call
        rows_of_group = [_row(group, text, list(of_text.values()), shifts) for text, of_text in calls.items()]
        rows += sorted(rows_of_group, key=lambda row: -(row.seconds or 0.0) * row.calls)
    return rows


def _row(
    group: GroupTrace, text: str, calls: Sequence[Mapping[int, TracedCall]], shifts: Mapping[str, ClockShift]
) -> SummaryRow:
    """Return the row of the calls with the same text. ``calls`` contains for each call the records of its ranks."""
    add = {rank: shifts[trace.facts.clock].add_ns for rank, trace in group.ranks.items()}
    all_calls = [call for ranks in calls for call in ranks.values()]
    seconds = [
        max(call.last_ns + add[rank] for rank, call in ranks.items())
        - min(call.begin_ns + add[rank] for rank, call in ranks.items())
        for ranks in calls
        if all(call.completed for call in ranks.values())
    ]
    completed = [call for call in all_calls if call.completed]
    own = [call.end_ns - call.begin_ns - _wait_ns(call) for call in completed if call.end_ns is not None]
    queues = [call.begin_ns - call.queued_ns for call in all_calls if call.queued_ns is not None]
    blamed: Counter[int] = Counter()
    spent: Counter[int] = Counter()
    places = {rank: place for host in group.hosts for place, rank in enumerate(host)}
    for ranks in calls:
        latest = _latest(ranks, places, add)
        for rank, call in ranks.items():
            spent[rank] += call.last_ns - call.begin_ns
            for part in call.parts:
                blamed.update(_blame(rank, part, ranks, latest, add))
    waited, total = sum(map(_wait_ns, all_calls)), spent.total()
    return SummaryRow(
        group=group.name,
        token=group.token,
        text=text,
        nbytes=all_calls[0].nbytes,
        calls=len(calls),
        unfinished=sum(not all(call.completed for call in ranks.values()) for ranks in calls),
        seconds=median(seconds) / 1e9 if seconds else None,
        own_seconds=median(own) / 1e9 if own else None,
        queue_seconds=median(queues) / 1e9 if queues else None,
        waiting=waited / total if total else 0.0,
        waited_for=tuple((rank, ns / waited) for rank, ns in blamed.most_common() if ns and waited),
        rank_seconds=tuple((rank, spent[rank] / 1e9) for rank in sorted(spent)),
    )


def straggler(rows: Sequence[SummaryRow]) -> tuple[int, float]:
    """Return the rank for which a group's other ranks waited longest, and the fraction of their time that this took."""
    waited: Counter[int] = Counter()
    spent: Counter[int] = Counter()
    for row in rows:
        seconds = dict(row.rank_seconds)
        spent.update(seconds)
        waited.update({rank: row.waiting * sum(seconds.values()) * share for rank, share in row.waited_for})
    rank = max(waited or spent, key=lambda each: waited[each])
    others = spent.total() - spent[rank]
    return rank, min(1.0, waited[rank] / others) if others else 0.0


def _wait_ns(call: TracedCall) -> int:
    return sum(part.end_ns - part.begin_ns for part in call.parts if part.phase in _WAITS)


def _blame(
    rank: int, part: CallPart, ranks: Mapping[int, TracedCall], latest: Mapping[int, int], add: Mapping[int, int]
) -> dict[int, int]:
    """Return how many ns of a phase count as waiting for which rank, by the rules at the top of this file.

    ``ranks``: the records of the call by rank. ``latest``: see ``_latest``. ``add``: the nanoseconds to add to each
    rank's times.
    """
    if part.phase is Phase.AGREE:
        return {latest[rank]: part.end_ns - part.begin_ns} if rank in latest else {}
    if part.phase is not Phase.WAIT or part.waited_for is None:
        return {}
    late, remaining = part.waited_for, part.end_ns - part.begin_ns
    blamed: dict[int, int] = {}
    if late in ranks:
        shift = add[late] - add[rank]  # from the clock of the late rank to that of the waiting rank
        for other in ranks[late].parts:
            if other.phase in _DELAYED:
                end, begin = min(part.end_ns, other.end_ns + shift), max(part.begin_ns, other.begin_ns + shift)
                overlap = max(0, end - begin)
                remaining -= overlap
                if other.phase is Phase.AGREE and late in latest and overlap:
                    blamed[latest[late]] = blamed.get(latest[late], 0) + overlap
    if remaining > 0:
        blamed[late] = blamed.get(late, 0) + remaining
    return blamed


def _latest(ranks: Mapping[int, TracedCall], places: Mapping[int, int], add: Mapping[int, int]) -> dict[int, int]:
    """Return for ranks which leader of another host was the last to begin to compare the call, where it is known.

    ``places``: the position of each rank on its host. Ranks with equal positions compare the call.
    """
    rails: dict[int, dict[int, int]] = {}  # by position: when each leader began
    for rank, call in ranks.items():
        begins = [part.begin_ns for part in call.parts if part.phase is Phase.AGREE]
        if begins:
            rails.setdefault(places[rank], {})[rank] = begins[-1] + add[rank]
    two = {place: nlargest(2, begins, key=lambda each: begins[each]) for place, begins in rails.items()}
    others = {rank: [other for other in two.get(places[rank], ()) if other != rank] for rank in ranks}
    return {rank: found[0] for rank, found in others.items() if found}
