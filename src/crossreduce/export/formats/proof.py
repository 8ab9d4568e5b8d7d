"""What the proofs of all exported files share: contributions, right results, the search for a root, and reports.

Input: the values that a file leaves in symbolic memory. Output: nothing, or ScheduleError if they are not right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from ...errors import ArgumentError, ScheduleError, shown

REDUCING: Final = frozenset({"allreduce", "reduce", "reducescatter"})
VERIFIABLE: Final = REDUCING | {"broadcast", "allgather", "alltoall"}
BUFFERS: Final = {"i": "input", "o": "output", "s": "scratch"}
_MOST_NOTES: Final = 32  # that the text of a report shows


class TooLargeError(ScheduleError):
    """A file exceeds a limit of the verifier, so whether it is right is not known."""


class Contributions(NamedTuple):
    """The content of a memory location: the sum of some ranks' contributions to a part of the collective's buffer."""

    position: int  # of the part in the full buffer, or -1 if different parts were combined, which is always a fault
    once: int  # bit r is set if the contribution of rank r is in the sum
    twice: int = 0  # bit r is set if it is in the sum more than once

    def plus(self, other: Contributions) -> Contributions:
        if self.position != other.position:
            return Contributions(-1, 0)
        return Contributions(self.position, self.once | other.once, self.twice | other.twice | (self.once & other.once))

    @property
    def lone_rank(self) -> int:
        """The highest rank that contributed, or 0 if none did."""
        return max(0, self.once.bit_length() - 1)


def right_result(kind: str, rank: int, offset: int, part: int, ranks: int, root: int) -> Contributions:
    """Return the value that must be at ``offset`` of a rank's output. ``part``: the size of a rank's buffer part."""
    everyone = (1 << ranks) - 1
    if kind in REDUCING:
        return Contributions(rank * part + offset if kind == "reducescatter" else offset, everyone)
    if kind == "broadcast":
        return Contributions(offset, 1 << root)
    if kind == "allgather":
        return Contributions(offset, 1 << offset // part)
    return Contributions(rank * part + offset % part, 1 << offset // part)  # alltoall


def difference(value: Contributions | None, due: Contributions, unit: str) -> str | None:
    """Return the fault of a value, in words, or ``None`` if it equals ``due``. ``unit`` is "chunk" or "byte"."""
    if value is None:
        return "was never written"
    if value.position == -1:
        return "combines different parts of the buffer"
    if value.position != due.position:
        return f"contains {unit} {value.position} of the buffer instead of {unit} {due.position}"
    for bits, fault in (
        (value.twice, "has the contribution of rank {} more than once"),
        (due.once & ~value.once, "lacks the contribution of rank {}"),
        (value.once & ~due.once, "has the contribution of rank {}, which does not belong there"),
    ):
        if bits:
            return fault.format((bits & -bits).bit_length() - 1)
    return None


class SymbolicRun(Protocol):
    """A run of a file on symbolic memory."""

    def first_result(self, rank: int) -> Contributions | None:
        """Return the value at the start of a rank's output."""

    def fault(self, rank: int) -> str | None:
        """Return the fault of a rank's output at the end, in words, or ``None`` if it is right."""


def prove_results(
    name: str, kind: str, ranks: range, root: int | None, run: Callable[[range], SymbolicRun]
) -> int | None:
    """Raise a ScheduleError unless the results of a file are right. Return the root of its collective, if it has one.

    ``run`` runs the file, and is given the ranks whose input may be read. If ``root`` is ``None``, it is determined: a
    broadcast's root is the rank whose input is at the start of the last rank's output, and a reduce's root is the first
    rank with a right result.
    """
    sources = ranks
    if kind == "broadcast":
        if root is None:
            first = run(ranks).first_result(ranks[-1])
            root = 0 if first is None else first.lone_rank
        sources = range(root, root + 1)
    finished = run(sources)
    faults = [finished.fault(rank) for rank in ranks]
    if kind == "reduce" and root is None:
        if None not in faults:
            raise ScheduleError(f"{name}: no rank has the complete sum at the end. {faults[0]}")
        root = faults.index(None)
    if kind == "reduce" and root is not None:  # the other ranks have no result
        faults = [faults[root]]
    for fault in faults:
        if fault is not None:
            raise ScheduleError(fault)
    return root


def check_request(name: str, kind: str, ranks: int, root: int | None, what: str) -> None:
    """Raise an error unless collectives of this kind can be verified and have such a root. ``what``: file or plan."""
    if kind not in VERIFIABLE:
        problem = f"{name}: collectives of this kind cannot be verified."
        raise ScheduleError.of(problem, shown(kind), f"a {what} for " + ", ".join(sorted(VERIFIABLE)))
    if root is not None and kind not in ("reduce", "broadcast"):
        raise ArgumentError.of(f"the {what}'s collective, {kind}, has no root.", shown(root), "root=None")
    if root is not None and root not in range(ranks):
        raise ArgumentError.of(f"the root must be a rank of the {what}.", shown(root), f"0 to {ranks - 1}, or None")


def report_text(kind: str, root: int | None, mode: str, details: Sequence[str], notes: Sequence[str]) -> str:
    """Return a report as text: the proved collective and ``mode`` ("in place"), a line per detail, and some notes."""
    rooted = "" if root is None else f" at rank {root}"
    lines = [f"{kind}{rooted}, {mode}: right.", *(f"  {detail}" for detail in details)]
    lines += [f"  note: {note}" for note in notes[:_MOST_NOTES]]
    if len(notes) > _MOST_NOTES:
        lines.append(f"  ... and {len(notes) - _MOST_NOTES} further notes")
    return "\n".join(lines)


def quoted_name(name: str) -> str:
    """Return a file's name for a message, cut to 60 characters."""
    return f'"{cut(name, 60)}"'


def cut(text: str, most: int = 200) -> str:
    """Return a text, shortened to at most ``most`` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
