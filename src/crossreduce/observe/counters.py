"""Counters of a rank's collectives: calls, bytes, seconds, and the waits for each other rank.

Input: the counters of the native ``SharedMemory`` or ``Observer``. Output: ``Stats``, and its text in the OpenMetrics
format. A counter never decreases while its group exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..ops import OF_ALL_RANKS
from ..packing import itemsize

KINDS: Final = (
    "other",  # calls in which the ranks only compare something or measure links
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
"""The names of collectives. The native code counts calls by positions in this tuple."""

_INNER: Final = "inner "  # the prefix of the text of a call that another library executes


class CollectiveStats(NamedTuple):
    """The completed calls of one collective by one rank.

    ``nbytes`` counts arrays like nccl-tests: of an all-reduce, a reduce or a broadcast the array of one rank, and of
    other collectives the arrays of all ranks. Calls that another library executes count no bytes. ``waiting_s``: how
    long the rank waited for other ranks of its host. ``between_hosts_s``: how long it exchanged data with other hosts,
    or waited for them. Both include failed and running calls; ``seconds`` does not.
    """

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waiting_s: float = 0.0
    between_hosts_s: float = 0.0


class WaitStats(NamedTuple):
    """The waits of a rank for another rank: the number of barriers at which the other rank was last, and their time."""

    barriers: int = 0
    seconds: float = 0.0


class Stats(NamedTuple):
    """The completed calls and the waits of one rank since its group was formed.

    ``collectives``: the collectives that were called, by name. ``waits``: the waits for other ranks, by rank. The rank
    with the most seconds of waits is the straggler.

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
        """The sums of each counter over all collectives."""
        return total_of(self.collectives)

    def openmetrics(self, run: str = "") -> str:
        """Return the counters as text in the OpenMetrics format, which Prometheus reads.

        ``run``: the value of one more label, or empty. It separates programs that run at the same time.
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
    """Return the sums of each counter over all collectives."""
    return CollectiveStats(*map(sum, zip(CollectiveStats(), *collectives.values(), strict=True)))


def _words(stats: CollectiveStats) -> str:
    text = f"{stats.calls} call{'' if stats.calls == 1 else 's'}, {stats.nbytes} bytes, {stats.seconds:.3f} s"
    text += f", waited {stats.waiting_s:.3f} s"
    text += f", {stats.between_hosts_s:.3f} s between hosts" if stats.between_hosts_s else ""
    return text + (", also in failed calls" if max(stats.waiting_s, stats.between_hosts_s) > stats.seconds else "")


def kind_and_bytes(
    text: bytes, collective: str = "", dtype: str = "", size: int = 0, ranks: int = 1
) -> tuple[int, int]:
    """Return how the native code counts a call: its kind, a position in ``KINDS``, and its bytes.

    Args:
      text: the call's description.
      collective: the collective's name. It is empty if the call moves nothing, or if another library executes it.
      dtype: the arrays' dtype.
      size: the elements of each rank's array.
      ranks: the number of ranks of the group.

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
    """The counters of one rank: ``collectives`` by name, ``waits`` by the position of the other rank on the host."""

    collectives: dict[str, CollectiveStats]
    waits: dict[int, WaitStats]


def rank_counts(native: tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, int]]]) -> RankCounts:
    """Return the counters of a rank from the result of the native ``counts``, whose times are in nanoseconds."""
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
# Metrics: name, unit, help text, and a function from ``CollectiveStats`` or ``WaitStats`` to the value.
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

    The labels are ``group``, ``rank``, ``collective`` and, if it is not empty, ``run``. Waits have the label
    ``straggler`` (the other rank) instead of ``collective``. Source: OpenMetrics 1.0
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
