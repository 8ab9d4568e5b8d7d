"""A case of a benchmark: it times contenders in turn, checks their results and compares their times with targets."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import numpy as np
from common import samples, summary
from contenders import Contender, address

MIN_S = 0.02  # a faster contender is called repeatedly, so that one measurement takes about this long
REST_S = 0.005  # the pause before a measurement: OpenMP's threads use CPU for some milliseconds after their work


class Sizes(NamedTuple):
    """The sizes of the inputs in bytes, and the numbers of repeats."""

    large: int = 1 << 26
    small: int = 1 << 10
    sources: int = 1 << 29  # of the cases that vary the number of sources: the bytes read and written in total
    repeats: int = 9
    many_repeats: int = 25  # repeats of cases with short calls, and of cases that measure small differences
    quick: bool = False


QUICK = Sizes(large=1 << 16, sources=1 << 20, repeats=2, many_repeats=2, quick=True)


class Turns:
    """Compares contenders that ran in turn: ``times`` are their seconds by turn, and ``rows`` have their bytes."""

    def ratio(self, this: str, other: str) -> float | None:
        """Return the median over the turns of time of ``this`` / time of ``other``; ``None``: one was not measured."""
        if this not in self.times or other not in self.times:
            return None
        return statistics.median(a / b for a, b in zip(self.times[this], self.times[other], strict=True))

    def relative_rate(self, this: str, other: str) -> float:
        """Return the bytes per second of ``this``, divided by those of ``other``."""
        return self.ratio(other, this) * self.rows[this]["bytes"] / self.rows[other]["bytes"]


class Case(Turns):
    """Times contenders in turn, checks their results, and compares measured values with targets."""

    def __init__(self, name: str, contenders: dict[str, Contender], repeats: int, sizes: Sizes):
        self.name, self.judged, self.targets = name, not sizes.quick, []
        runs = {key: one.run for key, one in contenders.items()}
        self.times = samples(runs, repeats, least_s=MIN_S, rest_s=REST_S)
        self.rows = {}
        for key, one in contenders.items():
            counts = checked(one)
            nbytes = one.batch.read_nbytes + sum(counts) * one.batch.replica_nbytes // len(counts)
            row = summary(self.times[key])
            self.rows[key] = {**row, "bytes": nbytes, "GBps": nbytes / row["median_s"] / 1e9, "results": max(counts)}
        print(f"\n{name}\n  {'':42} {'median ms':>10} {'least':>9} {'most':>9} {'GB/s':>6}  results")
        for key, row in self.rows.items():
            times = " ".join(f"{row[x] * 1e3:{w}.4g}" for x, w in (("median_s", 10), ("min_s", 9), ("max_s", 9)))
            print(f"  {key:42} {times} {row['GBps']:6.1f}  {row['results']}")

    def require_speed(self, ours: str, other: str, least: float) -> None:
        """Set the target that ``ours`` is at least ``least`` times as fast as another contender."""
        self.require(f"{ours}: times as fast as {other}", self.ratio(other, ours), least=least)

    def require_rate(self, this: str, other: str, least: float) -> None:
        """Set the target that the bytes per second of ``this`` are at least ``least`` times those of ``other``."""
        self.require(f"{this}: rate / that of {other}", self.relative_rate(this, other), least=least)

    def require(self, what: str, measured: float | None, least: float | None = None, most: float | None = None) -> None:
        """Compare a measured value with a target, which is ``least`` or ``most``; print and keep both."""
        limit, sign = (least, ">=") if least is not None else (most, "<=")
        met, text = None, "not installed"
        if measured is not None:
            met = measured >= limit if sign == ">=" else measured <= limit
            verdict = "" if met else "MISSED" if self.judged else "not judged: too small"
            text = f"measured {measured:<8.4g} {verdict}"
        print(f"    {what:90} target {sign} {limit:<6g} {text}")
        self.targets.append({"what": what, "target": f"{sign} {limit:g}", "measured": measured, "met": met})

    def kept(self) -> dict[str, Any]:
        """Return the rows and the targets, for the JSON file."""
        return {"rows": self.rows, "targets": self.targets}


def checked(one: Contender) -> list[int]:
    """Fill the results with NaN, run again and check them; return per tensor the number of results with own memory."""
    for components in one.read(one.run()):
        for x in components:
            if x.flags.writeable:
                x.fill(np.nan)
    results = one.read(one.run())
    if one.check is not None:
        one.check(results)
    if one.exact is not None:
        one.batch.check(results, one.exact)
    return [len({address(x) for x in components}) for components in results]
