"""Histories and dumps of ranks, for tests of the flight recorder and of ``crossreduce doctor``."""

from crossreduce.observe import flight_recorder
from crossreduce.observe.flight_recorder import Dump, History, Op

SUM = "all_reduce sum float32[10]"


def history(rank: int, last: int, ended: float | None = None, pid: int | None = None) -> History:
    """Return a rank's history: up to 31 ended calls, then call ``last``, which is running if ``ended`` is ``None``."""
    ops = [Op(k, SUM, k + 0.25, k + 0.5) for k in range(max(1, last - 31), last)]
    return History(rank, (*ops, Op(last, SUM, last + 0.25, ended)) if last else (), pid)


def new_dump(
    rank: int,
    *histories: History,
    hosts: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),),
    group: str = "world",
    token: str = "7",
) -> Dump:
    """Return the dump of a rank."""
    return flight_recorder.new_dump(group, token, rank, hosts, "why", histories)
