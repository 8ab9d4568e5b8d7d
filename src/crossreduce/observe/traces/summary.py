"""A trace in a few numbers: for each kind of call its times, and for which ranks the others waited.

Input: the groups of a run and their clocks. Output: a row for each group and text of calls.

A wait counts for the rank that arrived last at the barrier, with two exceptions. While that rank itself waited for
other hosts, the wait counts for the leader that was the last to begin. While that rank exchanged data with other hosts,
the wait counts for no rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

from .calls import CallPart, GroupTrace, TracedCall
from .clocks import ClockShift
from .format import Phase

_WAITS: Final = (Phase.WAIT, Phase.AGREE)
_DELAYED: Final = (Phase.AGREE, Phase.BETWEEN_HOSTS)


class SummaryRow(NamedTuple):
    """The calls with the same text in one group. The three fields with seconds of one call are medians.

    ``seconds``: from the first rank's begin to the last rank's end. ``own_seconds``: the time of a rank in which it did
    not wait. ``queue_seconds``: the time in a queue before the call. ``waiting``: the share of the ranks' time in these
    calls in which they waited. ``waited_for``: the ranks for which they waited, with their shares of this waiting, the
    largest first. ``rank_seconds``: each rank and its time in all these calls.
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
        """The bytes of the whole array over the median time."""
        return self.nbytes / self.seconds / 1e9 if self.nbytes and self.seconds else None


def summarize(groups: Iterable[GroupTrace], shifts: Mapping[str, ClockShift]) -> list[SummaryRow]:
    """Return the rows of each group, the row with the most time first."""
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
    """Return the row of the calls with the same text; ``calls`` has each call on its ranks."""
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
    for ranks in calls:
        for rank, call in ranks.items():
            for part in call.parts:
                blamed.update(_blame(group, rank, part, ranks, add))
    waited = sum(map(_wait_ns, all_calls))
    spent: Counter[int] = Counter()
    for ranks in calls:
        for rank, call in ranks.items():
            spent[rank] += call.last_ns - call.begin_ns
    total = spent.total()
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
    """Return the rank for which a group's other ranks waited longest, and this share of their time in all calls."""
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
    group: GroupTrace, rank: int, part: CallPart, ranks: Mapping[int, TracedCall], add: Mapping[int, int]
) -> dict[int, int]:
    """Return for how many ns of a part of a call a rank waited, by the rank for which this counts; see above."""
    if part.phase is Phase.AGREE:
        latest = _latest(group, rank, ranks, add)
        return {} if latest is None else {latest: part.end_ns - part.begin_ns}
    if part.phase is not Phase.WAIT or part.waited_for is None:
        return {}
    late, left = part.waited_for, part.end_ns - part.begin_ns
    blamed: dict[int, int] = {}
    if late in ranks:
        shift = add[late] - add[rank]
        for other in ranks[late].parts:
            if other.phase in _DELAYED:
                end, begin = min(part.end_ns, other.end_ns + shift), max(part.begin_ns, other.begin_ns + shift)
                overlap = max(0, end - begin)
                left -= overlap
                latest = _latest(group, late, ranks, add) if other.phase is Phase.AGREE else None
                if latest is not None and overlap:
                    blamed[latest] = blamed.get(latest, 0) + overlap
    if left > 0:
        blamed[late] = blamed.get(late, 0) + left
    return blamed


def _latest(group: GroupTrace, rank: int, ranks: Mapping[int, TracedCall], add: Mapping[int, int]) -> int | None:
    """Return the other hosts' leader that was the last to begin to compare this call, or ``None`` if it is unknown."""
    place = next(host.index(rank) for host in group.hosts if rank in host)
    begins = {
        host[place]: part.begin_ns + add[host[place]]
        for host in group.hosts
        if place < len(host) and host[place] in ranks and host[place] != rank
        for part in ranks[host[place]].parts
        if part.phase is Phase.AGREE
    }
    return max(begins, key=lambda other: begins[other]) if begins else None
