"""Counters of a rank's collectives: calls, bytes, seconds, and the waits for each other rank.

Input: what the compiled ``SharedMemory`` and ``Observer`` count. Output: ``Stats``, and its text in the OpenMetrics
format. The compiled code only adds; a counter never decreases while its group exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..ops import OF_ALL_RANKS
from ..packing import itemsize

KINDS: Final = (
    "other",  # the ranks only compare something, or measure
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
"""The names of collectives. The compiled code counts calls by their positions here."""

_INNER: Final = "inner "  # begins the text of a call that another library executes


class CollectiveStats(NamedTuple):
    """The completed calls of one collective by one rank.

    ``nbytes`` counts arrays as nccl-tests does: one rank's array of an all-reduce, a reduce or a broadcast, but the
    arrays of all ranks together of other collectives. Calls that another library executes count no bytes.
    ``waiting_s``: how long the rank waited for other ranks of its host. ``between_hosts_s``: how long it exchanged data
    with other hosts, or waited for them. Both include failed and running calls, which ``seconds`` does not contain.
    """

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waiting_s: float = 0.0
    between_hosts_s: float = 0.0


class WaitStats(NamedTuple):
    """The waits of a rank for another rank: at how many barriers the other one was last, and how long they took."""

    barriers: int = 0
    seconds: float = 0.0


class Stats(NamedTuple):
    """The completed calls and the waits of one rank since its group was made.

    ``collectives``: the collectives that were called, by name. ``waits``: the waits for other ranks, by their numbers.
    The rank with the most seconds of waits is the straggler.

    >>> calls = {"all_reduce": CollectiveStats(10, 4000, 2.0, 0.5), "barrier": CollectiveStats(1, 0, 0.5, 0.25)}
    >>> stats = Stats("world", 0, 2, calls, {1: WaitStats(9, 0.75)})
    >>> stats.total
    CollectiveStats(calls=11, nbytes=4000, seconds=2.5, waiting_s=0.75, between_hosts_s=0.0)
    >>> print(stats)
    group "world", rank 0 of 2: 11 calls, 4000 bytes, 2.500 s, waited 0.750 s
      all_reduce: 10 calls, 4000 bytes, 2.000 s, waited 0.500 s
      barrier: 1 call, 0 bytes, 0.500 s, waited 0.250 s
      waited for rank 1: 0.750 s, at 9 barriers
    """

    group: str
    rank: int
    size: int
    collectives: dict[str, CollectiveStats]
    waits: dict[int, WaitStats]

    @property
    def total(self) -> CollectiveStats:
        """The sums over all collectives."""
        return total_of(self.collectives)

    def openmetrics(self, run: str = "") -> str:
        """Return the counters as text in the OpenMetrics format, which Prometheus reads.

        ``run``: a further label, unless it is empty. It separates programs that run at the same time.
        """
        return openmetrics([self], run)

    def __str__(self) -> str:
        """Return the counters as text for people."""
        lines = [f'group "{self.group}", rank {self.rank} of {self.size}: {_words(self.total)}']
        lines += [f"  {name}: {_words(each)}" for name, each in self.collectives.items()]
        for rank, wait in sorted(self.waits.items(), key=lambda item: -item[1].seconds):
            at = f"{wait.barriers} barrier{'' if wait.barriers == 1 else 's'}"
            lines.append(f"  waited for rank {rank}: {wait.seconds:.3f} s, at {at}")
        return "\n".join(lines)


def total_of(collectives: Mapping[str, CollectiveStats]) -> CollectiveStats:
    """Return the sums over all collectives."""
    return CollectiveStats(*map(sum, zip(CollectiveStats(), *collectives.values(), strict=True)))


def _words(stats: CollectiveStats) -> str:
    text = f"{stats.calls} call{'' if stats.calls == 1 else 's'}, {stats.nbytes} bytes, {stats.seconds:.3f} s"
    text += f", waited {stats.waiting_s:.3f} s"
    text += f", {stats.between_hosts_s:.3f} s between hosts" if stats.between_hosts_s else ""
    return text + (", also in failed calls" if max(stats.waiting_s, stats.between_hosts_s) > stats.seconds else "")


def kind_and_bytes(
    text: bytes, collective: str = "", dtype: str = "", size: int = 0, ranks: int = 1
) -> tuple[int, int]:
    """Return the kind and the bytes by which a call is counted.

    Args:
      text: the call's description.
      collective: the collective's name; empty if the call moves nothing, or if another library executes it.
      dtype: the arrays' dtype.
      size: the elements of each rank's array.
      ranks: the number of the group's ranks.

    >>> kind_and_bytes(b"all_gather float32[10]", "all_gather", "float32", 10, ranks=3), kind_and_bytes(b"barrier")
    ((4, 120), (9, 0))
    """
    name = collective
    if text == b"barrier":
        name = "barrier"
    elif text.startswith(_INNER.encode()):
        name = text.decode(errors="replace").split()[1]
    nbytes = size * itemsize(dtype) * (ranks if name in OF_ALL_RANKS else 1) if collective and size else 0
    return KINDS.index(name) if name in KINDS else 0, nbytes


class RankCounts(NamedTuple):
    """The counters of one rank: ``collectives`` by name, and ``waits`` for other ranks by their places.

    A place is a rank's position among the ranks of its host.
    """

    collectives: dict[str, CollectiveStats]
    waits: dict[int, WaitStats]


def rank_counts(native: tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, int]]]) -> RankCounts:
    """Return the counters of a rank from the result of the compiled ``counts``, in nanoseconds."""
    kinds, waits = native
    collectives = {
        name: CollectiveStats(calls, nbytes, *(ns * 1e-9 for ns in times))
        for name, (calls, nbytes, *times) in zip(KINDS, kinds, strict=True)
        if calls or any(times)
    }
    return RankCounts(
        collectives, {place: WaitStats(count, ns * 1e-9) for place, (count, ns) in enumerate(waits) if count or ns}
    )


_Values = Callable[[Any], float]
_BY_COLLECTIVE: Final[tuple[tuple[str, str, str, _Values], ...]] = (
    ("crossreduce_calls", "", "Completed collectives.", lambda each: each.calls),
    ("crossreduce_bytes", "bytes", "Bytes of the arrays of completed collectives.", lambda each: each.nbytes),
    ("crossreduce_call_seconds", "seconds", "Time in completed collectives.", lambda each: each.seconds),
    ("crossreduce_wait_seconds", "seconds", "Time in waits for other ranks of the host.", lambda each: each.waiting_s),
    (
        "crossreduce_between_hosts_seconds",
        "seconds",
        "Time in the exchange with other hosts, waits for them included.",
        lambda each: each.between_hosts_s,
    ),
)
_BY_STRAGGLER: Final[tuple[tuple[str, str, str, _Values], ...]] = (
    ("crossreduce_straggler_barriers", "", "Barriers at which the straggler was last.", lambda each: each.barriers),
    ("crossreduce_straggler_seconds", "seconds", "Time in waits for the straggler.", lambda each: each.seconds),
)


def openmetrics(every: Iterable[Stats], run: str = "") -> str:
    """Return the counters of some ranks as text in the OpenMetrics format.

    The labels are ``group``, ``rank``, ``run`` unless it is empty, and ``collective``. Waits have the label
    ``straggler``, a rank, instead of ``collective``. Source: OpenMetrics 1.0
    (https://prometheus.io/docs/specs/om/open_metrics_spec/).

    >>> print(Stats("world", 0, 2, {"barrier": CollectiveStats(3)}, {}).openmetrics().split("# TYPE")[1].strip())
    crossreduce_calls counter
    # HELP crossreduce_calls Completed collectives.
    crossreduce_calls_total{group="world",rank="0",collective="barrier"} 3
    """
    stats = list(every)
    run_label = f',run="{_escape(run)}"' if run else ""
    lines: list[str] = []
    for families, label in ((_BY_COLLECTIVE, "collective"), (_BY_STRAGGLER, "straggler")):
        for name, unit, text, value in families:
            lines += [f"# TYPE {name} counter", *([f"# UNIT {name} {unit}"] if unit else []), f"# HELP {name} {text}"]
            for each in stats:
                values: dict[Any, Any] = each.collectives if label == "collective" else each.waits
                for key in sorted(values):
                    labels = f'group="{_escape(each.group)}",rank="{each.rank}"{run_label},{label}="{key}"'
                    lines.append(f"{name}_total{{{labels}}} {value(values[key])}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
