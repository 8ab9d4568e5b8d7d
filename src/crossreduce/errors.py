"""Every exception that crossreduce raises on purpose.

    ReductionError
    ├── ArgumentError      (ValueError)   an argument is wrong: a value, a name, a count, a destination
    │   ├── AxisError      (NameError)    a JAX program has no axis of this name
    │   ├── DeviceError                   a device's name cannot be read, or there is no such device here
    │   └── MismatchError                 the replicas of one value, or the calls of ranks, do not fit together
    ├── UnsupportedError   (TypeError)    a kind of thing that cannot be used so: a dtype under an op, a class
    ├── PlanError          (ValueError)   no schedule can be made for this request
    ├── ScheduleError      (ValueError)   a schedule does not compute what it claims
    ├── ContextError       (RuntimeError) a call stands where it cannot: in a replica, or outside of one
    ├── StalledError       (TimeoutError) replicas waited too long for others
    ├── CollectiveTimeout  (TimeoutError) ranks waited too long for others; .ranks: for which
    ├── PeerLostError      (ConnectionError) ranks died, left or were interrupted; .ranks: which
    └── BackendError       (ImportError)  a framework was asked for that is not installed

Each message says what was wrong, what was given, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable


class ReductionError(Exception):
    """The root of all errors of this library."""

    pair: int | None = None
    """Which pair of a batch the error is about, where it is about one."""

    def prefix(self, where: str, pair: int | None = None) -> None:
        """Say in front of the text where the error was found; a place that was said before is replaced."""
        text = str(self).removeprefix(f"pair {self.pair}: ")
        self.args = (f"{where}: {text}",)
        self.pair = pair


# Inside tf.function, AutoGraph raises an error anew as what it is only where this holds; any other arrives
# as a StagingError.
ReductionError.__init__ = Exception.__init__  # type: ignore[method-assign]


class ArgumentError(ReductionError, ValueError):
    """An argument has a value that cannot be used."""


class AxisError(ArgumentError, NameError):
    """A JAX program has no axis of the name that was given."""


class DeviceError(ArgumentError):
    """A device's name cannot be read, or names a device that is not here."""


class MismatchError(ArgumentError):
    """The replicas of one value differ in shape, dtype, framework or structure; or ranks in what they call."""


class UnsupportedError(ReductionError, TypeError):
    """An argument is of a kind that the operation is not defined for."""


class PlanError(ReductionError, ValueError):
    """No schedule exists for the devices, links and algorithm that were named."""


class ScheduleError(ReductionError, ValueError):
    """A schedule loses, doubles or misplaces a contribution, or is malformed."""


class ContextError(ReductionError, RuntimeError):
    """A call that belongs to another context: to a replica's, or to that of all replicas."""


class StalledError(ReductionError, TimeoutError):
    """Replicas waited for others for longer than the timeout."""


class _RanksError(ReductionError):
    """An error that some ranks are to blame for. It keeps them when it is pickled or copied."""

    ranks: tuple[int, ...]

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        """Say what happened, and which ranks did it."""
        super().__init__(text)
        self.ranks = tuple(ranks)


class CollectiveTimeout(_RanksError, TimeoutError):  # noqa: N818 - the name says what it is
    """Ranks waited for ``ranks`` for longer than the timeout; their group cannot be used any more."""


class PeerLostError(_RanksError, ConnectionError):
    """``ranks`` died, left or were interrupted while others needed them; their group cannot be used any more."""


class BackendError(ReductionError, ImportError):
    """An array framework was asked for that is not installed."""


def message(problem: str, given: str = "", remedy: str = "") -> str:
    """Lay out an error's text: the problem, then what was given, then what to do.

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
    return "\n".join(lines)


def shown(value: object, limit: int = 120) -> str:
    """Return ``repr(value)`` with its type, on one line and cut to ``limit`` characters.

    >>> shown([1, 2])
    '[1, 2] (list)'
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - a caller's broken __repr__ must not hide the error that is being reported
        text = "<no repr>"
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    return f"{text} ({type(value).__name__})"
