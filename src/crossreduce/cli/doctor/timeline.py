"""The last calls of a broken group's ranks on one time line.

Input: the dumps of the group. Output: for each rank, bars in seconds relative to the first abort, and an axis on which
long pauses are shortened. The clocks of hosts are aligned by the calendar times of their dumps.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain, pairwise
from typing import Final, NamedTuple

from ...observe.flight_recorder import Dump, History
from ...observe.liveness import LEFT

_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,6})?([+-]\d{4})?")
_SHORTENED: Final = 0.3  # the length of a shortened pause, as a share of the sum of all gaps that are not shortened
_MOST_PAUSES: Final = 12  # the most pauses that are shortened


class CallBar(NamedTuple):
    """A call of a rank."""

    sequence: int
    text: str
    begin_s: float  # relative to the first abort, so mostly negative
    end_s: float
    waited_s: float  # from the begin until the last rank of the host had begun the call
    ended: bool  # whether the call had ended when the group broke


class RankRow(NamedTuple):
    """The calls of one rank."""

    rank: int
    host: int
    bars: tuple[CallBar, ...] | None  # the oldest first; None if no dump describes the rank


class Pause(NamedTuple):
    """A shortened pause."""

    seconds: float
    begin: float  # the positions on the axis, from 0 to 1
    end: float


class Axis(NamedTuple):
    """A piecewise linear map from seconds to positions from 0 to 1."""

    times: tuple[float, ...]
    places: tuple[float, ...]
    pauses: tuple[Pause, ...]

    def place(self, second: float) -> float:
        """Return the position of a time."""
        return _interpolate(second, self.times, self.places)

    def time(self, place: float) -> float:
        """Return the time at a position."""
        return _interpolate(place, self.places, self.times)


class Timeline(NamedTuple):
    """All ranks of a group."""

    rows: tuple[RankRow, ...]
    axis: Axis
    uncertainty_s: float | None  # the possible error between hosts' clocks; None if the dumps are of one host


def host_histories(host: Iterable[int], dumps: dict[int, Dump]) -> tuple[float, dict[int, History]]:
    """Return when the first rank of a host aborted, and the history of each rank.

    The history is that in the rank's own dump, or in the latest dump of the host if the rank has none. A late rank may
    make the call for which the others waited, and then write its dump. So callers ignore calls after the returned time,
    which is one for all ranks of a host, since they share a clock.
    """
    host_dumps = [dumps[rank] for rank in host if rank in dumps]
    by_rank: dict[int, History] = {}
    for dump in sorted(host_dumps, key=lambda dump: dump.now_s):
        by_rank |= {history.rank: history for history in dump.histories if history.rank not in dumps}
    by_rank |= {dump.rank: history for dump in host_dumps for history in dump.histories if history.rank == dump.rank}
    return min((dump.now_s for dump in host_dumps), default=0.0), by_rank


def timeline(dumps: Sequence[Dump]) -> Timeline:
    """Return the time line of one group from the dumps of some of its ranks."""
    newest = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.now_s)}
    hosts = dumps[0].hosts
    offsets = {k: _offset([newest[rank] for rank in host if rank in newest]) for k, host in enumerate(hosts)}
    known_offsets = {k: offset for k, offset in offsets.items() if offset is not None}
    aborts = {k: host_histories(hosts[k], newest)[0] for k in known_offsets}
    several = len(known_offsets) > 1
    # On one host the monotonic clock is enough; the calendar may even have been set while the group ran.
    origin = min(aborts[k] + (known_offsets[k][0] if several else 0.0) for k in known_offsets)
    rows = []
    for k, host in enumerate(hosts):
        abort_s, histories = host_histories(host, newest)
        shift = (known_offsets[k][0] if several and k in known_offsets else 0.0) - origin
        rows += _rows(k, host, histories, abort_s, shift)
    bars = [bar for row in rows for bar in row.bars or ()]
    uncertainty_s = max(error for _, error in known_offsets.values()) if several else None
    return Timeline(tuple(sorted(rows)), _axis(bars), uncertainty_s)


def _rows(
    number: int, host: Sequence[int], histories: dict[int, History], abort_s: float, shift: float
) -> list[RankRow]:
    """Return the rows of a host's ranks; ``shift`` is added to all times of its clock."""
    calls = {}
    for rank, history in histories.items():
        calls[rank] = [op for op in history.ops if op.started_s <= abort_s and op.text != LEFT]
    begun, last_begin = Counter[int](), dict[int, float]()  # by the number of the call
    for op in chain(*calls.values()):
        begun[op.sequence] += 1
        last_begin[op.sequence] = max(op.started_s, last_begin.get(op.sequence, op.started_s))
    oldest = sorted(ops[0].sequence if ops else 0 for ops in calls.values())
    rows = []
    for rank in host:
        if rank not in histories:
            rows.append(RankRow(rank, number, None))
            continue
        bars = []
        for op in calls[rank]:
            ended = op.ended_s is not None and op.ended_s <= abort_s
            end_s = op.ended_s if ended and op.ended_s is not None else abort_s
            # If the oldest recorded call of a rank is a later one, this rank has begun the call, too.
            began = begun[op.sequence] + len(oldest) - bisect_right(oldest, op.sequence)
            latest = last_begin[op.sequence] if began >= len(host) or ended else abort_s
            waited_s = max(0.0, min(latest, end_s) - op.started_s)
            bars.append(CallBar(op.sequence, op.text, op.started_s + shift, end_s + shift, waited_s, ended))
        rows.append(RankRow(rank, number, tuple(bars)))
    return rows


def _offset(dumps: Sequence[Dump]) -> tuple[float, float] | None:
    """Return the seconds from a host's monotonic clock to calendar time, and their greatest error, if it has dumps."""
    low, high = -float("inf"), float("inf")
    for dump in dumps:
        match = _TIME.fullmatch(dump.time)
        if match is None:
            continue
        form = "%Y-%m-%d %H:%M:%S" + ("%z" if match[3] else "")
        try:
            seconds = datetime.strptime(match[1] + (match[3] or ""), form).timestamp()
        except (ValueError, OverflowError):
            continue
        fraction = match[2] or "."
        seconds += float(f"0{fraction}0")
        step = 10.0 ** -(len(fraction) - 1)  # the true time is up to one step later: the text is rounded down
        low, high = max(low, seconds - dump.now_s), min(high, seconds + step - dump.now_s)
    if low == -float("inf"):
        return (0.0, float("inf")) if dumps else None
    return (low + high) / 2, abs(high - low) / 2


def _axis(bars: Sequence[CallBar]) -> Axis:
    """Return an axis for bars on which long gaps between events are shortened.

    A gap is long if it exceeds the sum of all gaps that are not. At most half of them, and ``_MOST_PAUSES``, are long.
    """
    times = sorted({time for bar in bars for time in (bar.begin_s, bar.begin_s + bar.waited_s, bar.end_s)} | {0.0})
    if len(times) < 2:
        times = [times[0] - 1.0, times[0]]
    gaps = [after - before for before, after in pairwise(times)]
    limit, total = float("inf"), 0.0
    for k, gap in enumerate(sorted(gaps)):
        if 2 * k >= len(gaps) and gap > total > 0 and len(gaps) - k <= _MOST_PAUSES:
            limit = gap
            break
        total += gap
    widths = [total * _SHORTENED if gap >= limit else gap for gap in gaps]
    places, whole = [0.0], sum(widths)
    for width in widths:
        places.append(places[-1] + width / whole)
    places[-1] = 1.0
    pauses = tuple(Pause(gap, *ends) for gap, ends in zip(gaps, pairwise(places), strict=True) if gap >= limit)
    return Axis(tuple(times), tuple(places), pauses)


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    k = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    width = xs[k + 1] - xs[k]
    share = (x - xs[k]) / width if width else 0.0
    return ys[k] + min(max(share, 0.0), 1.0) * (ys[k + 1] - ys[k])


def seconds_text(seconds: float) -> str:
    """Return a time in a readable unit.

    >>> [seconds_text(x) for x in (0, 1.5e-6, -0.0123, 75.0)]
    ['0 s', '1.5 us', '-12.3 ms', '75 s']
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 1:
            return f"{seconds * scale:.4g} {unit}" if abs(seconds) < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"
