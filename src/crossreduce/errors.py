"""The exceptions of crossreduce.

    ReductionError
    ├── ArgumentError      (ValueError)   an argument is invalid: a value, a name, a count, a destination
    │   ├── AxisError      (NameError)    a JAX program has no axis with this name
    │   ├── DeviceError                   a device's name cannot be parsed, or the device does not exist here
    │   └── MismatchError                 arrays, trees, or calls of replicas or ranks differ, but must be equal
    ├── UnsupportedError   (TypeError)    an operation is not defined for this kind of argument
    ├── PlanError          (ValueError)   a schedule, its simulation or its export is not possible
    ├── ScheduleError      (ValueError)   a schedule does not compute its collective, or is malformed
    ├── ContextError       (RuntimeError) a call in the wrong replica context, thread or process, or of a closed group
    ├── StalledError       (TimeoutError) replicas waited too long for other replicas
    ├── CollectiveTimeout  (TimeoutError, RuntimeError) ranks waited too long for other ranks, listed in .ranks
    ├── PeerLostError      (ConnectionError, RuntimeError) ranks, listed in .ranks, died, left or were interrupted
    ├── ExcludedError      (RuntimeError) the other ranks of a group have continued, or may continue, without this one
    ├── DriverError        (RuntimeError) a call of the CUDA driver failed; .call, .device, .code
    └── BackendError       (ImportError)  a framework, library or feature that does not exist here

Each message states the problem, the given value, and a remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Self


class ReductionError(Exception):
    """The base class of all errors of this library."""

    pair: int | None = None
    """The number of the pair of a batch that caused the error, or ``None`` if no single pair did."""

    @classmethod
    def of(cls, problem: str, given: str = "", remedy: str = "") -> Self:
        """Return an error whose text states the problem, the given value, and a remedy."""
        return cls(message(problem, given, remedy))

    def prefix(self, where: str, pair: int | None = None) -> None:
        """Put ``where`` in front of the text, in place of the prefix of an earlier pair, and store ``pair``."""
        text = str(self).removeprefix(f"pair {self.pair}: ")
        self.args = (f"{where}: {text}" if where else text,)
        self.pair = pair


# AutoGraph re-raises errors that leave a tf.function. It keeps the class of an error only if its ``__init__`` is that
# of Exception. Other errors become a StagingError.
ReductionError.__init__ = Exception.__init__  # type: ignore[method-assign]


class ArgumentError(ReductionError, ValueError):
    """An argument is invalid."""


class AxisError(ArgumentError, NameError):
    """A JAX program has no axis with this name."""


class DeviceError(ArgumentError):
    """A device's name cannot be parsed, or the device does not exist here."""


class MismatchError(ArgumentError):
    """Arrays, trees, the calls of replicas or ranks, or the versions of ranks differ, but must be equal."""

    calls: tuple[str, ...] = ()
    """The calls of the ranks of a group, in the order of the ranks, if these differ."""


class UnsupportedError(ReductionError, TypeError):
    """The operation is not defined for this kind of argument."""


class PlanError(ReductionError, ValueError):
    """A request for a schedule, its simulation or its export is invalid or cannot be fulfilled."""


class ScheduleError(ReductionError, ValueError):
    """A schedule loses, doubles or misplaces a contribution, or is malformed."""


class ContextError(ReductionError, RuntimeError):
    """A call was made in the wrong replica context, thread or process, or of a closed group."""


class StalledError(ReductionError, TimeoutError):
    """Replicas waited for other replicas for longer than the timeout."""


class _RanksError(ReductionError, RuntimeError):  # torch's backends raise RuntimeErrors, which existing code catches
    """An error that some ranks caused. Pickled and copied errors keep ``ranks``."""

    ranks: tuple[int, ...]

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        """Create an error with a text and the ranks that caused it."""
        super().__init__(text)
        self.ranks = tuple(ranks)


class CollectiveTimeout(_RanksError, TimeoutError):  # noqa: N818 - a timeout is an error
    """Ranks waited too long for those in ``ranks``, which is empty if they are unknown.

    The group cannot be used any more, except after torch's ``wait(timeout)``.
    """


class PeerLostError(_RanksError, ConnectionError):
    """The ranks in ``ranks`` died, left or were interrupted while others needed them. The group is no longer usable."""


class ExcludedError(ReductionError, RuntimeError):
    """The other ranks of the group have continued, or may continue, without this rank, which can never come back.

    This process can join a later form of the group as a new rank: see ``crossreduce.torch.join`` and
    ``crossreduce.processes.join_invited``.
    """


class DriverError(ReductionError, RuntimeError):
    """A call of the CUDA driver failed."""

    call: str = ""  # the name of the driver's function
    device: int = -1  # the number of the GPU, or -1 if unknown
    code: int = 0  # the driver's CUresult


class BackendError(ReductionError, ImportError):
    """A call requires a framework, a library or a feature of the system or of this build that does not exist here."""


def encoded(error: ReductionError, limit: int = 2040) -> bytes:
    """Return an error as at most ``limit`` bytes for other processes. Long texts and lists of ranks are cut.

    >>> decoded(encoded(PeerLostError("rank 3 died.", [3])))
    PeerLostError('rank 3 died.')
    """
    # ``decoded`` knows only classes of this module, so another class is replaced by its base class here.
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    ranks, text = list(getattr(error, "ranks", ())), str(error)
    while len(data := json.dumps([kind, ranks, text]).encode()) > limit:
        ranks, text = ranks[:64], text[: max(0, len(text) - 64)]
    return data


def decoded(data: bytes) -> ReductionError:
    """Return the error that ``encoded`` encoded. For data that no rank has encoded it is an error that says so.

    Control characters, which a terminal would execute, are replaced.
    """
    try:
        name, ranks, text = json.loads(data)
        kind: type[ReductionError] = globals()[name]
        is_valid = issubclass(kind, ReductionError) and type(text) is str and all(type(rank) is int for rank in ranks)
    except (ValueError, TypeError, KeyError, RecursionError):
        is_valid = False
    if not is_valid:
        return ReductionError.of("a rank has ended the group without a valid reason.", shown(data))
    text = printable(text, "\n")
    return kind(text, ranks) if issubclass(kind, _RanksError) else kind(text)


def printable(text: str, kept: str = "") -> str:
    """Return text without control characters, which a terminal would execute, except those in ``kept``.

    >>> printable("\\x1b[2J\\n"), printable("\\x1b[2J\\n", "\\n")
    ('?[2J?', '?[2J\\n')
    """
    return "".join(char if char.isprintable() or char in kept else "?" for char in text)


def message(problem: str, given: str = "", remedy: str = "") -> str:
    """Return an error's text: the problem, then the given value, then a remedy.

    >>> print(message("num_packs must not be negative.", "-1", "0 switches packing off"))
    num_packs must not be negative.
      given: -1
      try:   0 switches packing off
    """
    lines = [problem]
    if given:
        lines.append(f"  given: {given}")
    if remedy:
        lines.append(f"  try:   {remedy}")
    return printable("\n".join(lines), "\n")


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as text. Three or more consecutive ranks become a range, and a long list is cut.

    >>> rank_list([2]), rank_list([6, 0, 1, 2, 3]), rank_list([0, 1])
    ('rank 2', 'ranks 0-3, 6', 'ranks 0, 1')
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []  # of consecutive ranks
    for rank in ordered:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:12]]
    if len(runs) > 12:
        texts.append(f"... ({len(ordered)} in all)")
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(texts)


def shown(value: object, limit: int = 120) -> str:
    """Return ``repr(value)`` on one line and cut to ``limit`` characters, followed by the name of the type.

    >>> shown([1, 2])
    '[1, 2] (list)'
    """
    try:
        text = " ".join(repr(value[: limit + 1] if isinstance(value, (str, bytes)) else value).split())
    except Exception:  # noqa: BLE001 - a broken __repr__ must not hide the error that is being reported
        text = "<no repr>"
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    return f"{text} ({type(value).__name__})"
