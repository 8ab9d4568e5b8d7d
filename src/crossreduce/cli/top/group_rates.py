"""Rates of a group of ranks between two snapshots: calls and bytes per second, waits, and the straggler.

Input: two snapshots of ``observe.observer``. Output: rates per rank, and the rank for which the others waited.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ...errors import rank_list
from ...observe.observer import GroupView, RankView

NOTEWORTHY: Final = 0.1  # if the other ranks wait for a smaller share of their time, no rank is called a straggler


class RankRates(NamedTuple):
    """The rates of one rank. Shares are parts of the time between the snapshots, from 0 to 1."""

    calls_per_s: float
    bytes_per_s: float
    waiting: float  # the share of time in which it waited for ranks of this host
    waiting_for: int | None  # the rank of this host for which it waited longest, if any
    between_hosts: float  # the share of time in which it exchanged data with other hosts, including waits for them


class Straggler(NamedTuple):
    """The rank for which the other ranks of this host waited longest."""

    rank: int
    share: float  # of the others' time: how long they waited; with ``hosts``, of its time: how long it exchanged data
    hosts: bool  # whether the reason is that the rank exchanged data with other hosts


class GroupRates(NamedTuple):
    """The rates of the ranks, in the order of the snapshot; ``None`` if there was no earlier snapshot."""

    ranks: tuple[RankRates | None, ...]
    straggler: Straggler | None

    @property
    def sentence(self) -> str:
        """A sentence that names the rank or the hosts for which the others wait.

        >>> GroupRates((), Straggler(3, 0.824, False)).sentence
        'rank 3 keeps the others waiting: 82 % of their time'
        """
        if self.straggler is None:
            return waiting_sentence(None, 0.0)
        rank, share, hosts = self.straggler
        if hosts:
            return (
                f"exchanges with other hosts, and waits for them, take {percent_text(share)} of the time of rank {rank}"
            )
        return waiting_sentence(rank, share)


def percent_text(share: float) -> str:
    """Return a share as text.

    >>> percent_text(0.824)
    '82 %'
    """
    return f"{100 * share:.0f} %"


def waiting_sentence(rank: int | None, share: float) -> str:
    """Return a sentence that names the rank for which the others wait, and for which share of their time, if any."""
    if rank is None:
        return f"no straggler: ranks wait for less than {percent_text(NOTEWORTHY)} of their time"
    return f"rank {rank} keeps the others waiting: {percent_text(share)} of their time"


def compare(before: GroupView | None, after: GroupView) -> GroupRates:
    """Return the rates between two snapshots of a group; ``before`` is ``None`` for a new group.

    A group whose ranks have changed since ``before`` counts as new, too.
    """
    elapsed = 0.0 if before is None else after.now_s - before.now_s
    if before is None or elapsed <= 0 or [view.rank for view in before.ranks] != [view.rank for view in after.ranks]:
        return GroupRates((None,) * len(after.ranks), None)
    pairs = [*zip(before.ranks, after.ranks, strict=True)]
    rates = tuple(_rank_rates(earlier, later, elapsed) for earlier, later in pairs)
    caused = {later.rank: 0.0 for later in after.ranks}  # the seconds that others waited for a rank
    for earlier, later in pairs:
        for other, seconds in _waits(earlier, later).items():
            caused[other] += seconds
    rank = max(caused, key=lambda each: caused[each])
    # Ranks that have left or died do not wait, and would make the share too small.
    waiting = sum(later.rank != rank and later.state not in ("dead", "left") for later in after.ranks)
    share = min(1.0, caused[rank] / (elapsed * max(waiting, 1)))
    # If a rank is late because it exchanges data with other hosts, then these hosts are the reason, and not the rank.
    exchanges = {later.rank: each.between_hosts for later, each in zip(after.ranks, rates, strict=True)}
    exchanger = max(exchanges, key=lambda each: exchanges[each])
    if exchanges[exchanger] <= share and exchanges[rank] > share / 2:  # ``rank`` is late since it waits for other hosts
        exchanger = rank
    hosts = exchanges[exchanger] > (share / 2 if exchanger == rank else share)
    straggler = Straggler(exchanger, exchanges[exchanger], True) if hosts else Straggler(rank, share, False)
    return GroupRates(rates, straggler if straggler.share >= NOTEWORTHY else None)


def _rank_rates(before: RankView, after: RankView, elapsed: float) -> RankRates:
    waits = _waits(before, after)
    longest = max(waits, key=lambda each: waits[each], default=None)
    return RankRates(
        calls_per_s=(after.total.calls - before.total.calls) / elapsed,
        bytes_per_s=(after.total.nbytes - before.total.nbytes) / elapsed,
        waiting=min(1.0, (after.total.waiting_s - before.total.waiting_s) / elapsed),
        waiting_for=longest if longest is not None and waits[longest] > 0 else None,
        between_hosts=min(1.0, (after.total.between_hosts_s - before.total.between_hosts_s) / elapsed),
    )


def _waits(before: RankView, after: RankView) -> dict[int, float]:
    """Return the seconds that a rank waited for each other rank between two snapshots."""
    return {
        other: wait.seconds - (before.waits[other].seconds if other in before.waits else 0.0)
        for other, wait in after.waits.items()
    }


def state_words(view: RankView) -> str:
    """Return the state of a rank as text, or the ranks for which it waits now."""
    return f"waits for {rank_list(view.late)}" if view.late else view.state
