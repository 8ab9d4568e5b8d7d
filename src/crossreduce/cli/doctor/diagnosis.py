"""Finds the rank that broke a group, from the dumps of the group's flight recorders.

Input: dumps. Output: an ``Incident``. A rank that was stopped or dead wrote no dump; its state is taken from the dumps
of the other ranks of its host, which read it from shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Final

from ...errors import rank_list
from ...observe.diagnostics import DOCTOR
from ...observe.flight_recorder import Dump, History, Thread
from ...observe.liveness import LEFT
from .timeline import host_histories

_MAX_FRAMES: Final = 3
_FRACTION: Final = re.compile(r"(?<=:\d\d)\.\d+")  # the fraction of a second in a time
_MAX_FINDINGS: Final = 20  # the most ranks that get a sentence each
# The error if Ctrl-C ended a wait for a message. Only the error names this rank, since histories have no messages.
_INTERRUPTED: Final = re.compile(r"rank ([0-9]{1,9}) was interrupted while it waited for a message ")
# The ranks that are known to have died, if the error is about them, in the form of ``rank_list``.
_DIED: Final = re.compile(r"ranks? ((?:[0-9]{1,9}(?:, |-)?)+)(?: \.\.\. \(\d+ in all\))? died ")
# Frames of other packages and of Python: shown only if a stack has no others. A frame of the library in a checkout,
# below src/crossreduce/, is one of a package, too; a script of the user in the folder of the checkout is not.
_PACKAGE: Final = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*|src[/\\]crossreduce)[/\\]|^<")


@dataclass(frozen=True)
class RankState:
    """The state of one rank when its group broke."""

    rank: int
    host: int
    hostname: str | None
    pid: int | None
    sequence: int  # the number of the rank's last call, or 0 if it made none
    text: str  # the op, dtype and shape of this call
    # "running" or "finished" (the call), "left" (the group), "died", "idle" (no call), "unknown" (no information)
    state: str
    seconds: float | None  # from the start of a running call, or the end of a finished one, to the host's first abort
    dumped: bool  # whether the rank wrote a dump
    stack: tuple[str, ...]  # the innermost functions of its main thread, the innermost first


@dataclass(frozen=True)
class Incident:
    """The failure of one group."""

    group: str
    time: str  # when the first rank aborted
    cause: str  # the error that this rank raised
    findings: tuple[str, ...]  # the diagnosis, one sentence each
    # The blamed ranks: the rank that was interrupted while it waited for a message, or else the ranks that left or did
    # not begin the last call, or else the ranks that are suspected of hanging.
    behind: tuple[int, ...]
    missing: tuple[int, ...]  # the ranks without any information
    without_dump: tuple[int, ...]  # the ranks that wrote no dump, but that the dumps of others describe
    ranks: tuple[RankState, ...]

    @property
    def about(self) -> str:
        """The size of the group and when it broke, to the second."""
        counts = {"rank": len(self.ranks), "host": len({state.host for state in self.ranks})}
        words = (f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items())
        return f"{' on '.join(words)}, {_FRACTION.sub('', self.time)}"

    @property
    def raised(self) -> str:
        """The error without the advice to run ``crossreduce doctor``."""
        text, _, advice = self.cause.partition("\n  try: ")
        return text if DOCTOR in advice else self.cause


def diagnose(dumps: Sequence[Dump]) -> Incident:
    """Return the failure of one group from dumps of its ranks. One dump of any rank is enough."""
    newest = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.now_s)}
    first = min(newest.values(), key=lambda dump: (dump.time, dump.rank))  # of the rank that aborted first
    states = [state for k in range(len(first.hosts)) for state in _states(k, first.hosts[k], newest)]
    by_rank = {state.rank: state for state in sorted(states, key=lambda state: state.rank)}
    for rank in _died(first.cause) & by_rank.keys():
        if not by_rank[rank].dumped:  # a rank that wrote a dump has not died
            by_rank[rank] = replace(by_rank[rank], state="died")
    states = list(by_rank.values())
    last = max(state.sequence for state in states)  # the number of the last call that any rank made
    text = next(state.text for state in states if state.sequence == last)
    missing = [state.rank for state in states if state.state == "unknown"]
    ended = [state.rank for kind in ("left", "died") for state in states if state.state == kind]
    late = [
        rank for rank, each in by_rank.items() if each.state not in ("unknown", "left", "died") and each.sequence < last
    ]
    match = _INTERRUPTED.match(first.cause)
    interrupted = [rank for rank in by_rank if match and rank == int(match[1])]
    has_died = any(state.state == "died" for state in states)
    behind = interrupted or (ended if has_died else ended + late)
    if not behind:  # no rank is known to be behind: suspect those that are still in the last call and wrote no dump
        in_last = [state for state in states if state.sequence == last and state.state == "running"]
        behind = [state.rank for state in in_last if not state.dumped]
    explained = re.search(" (died|left|was interrupted|were interrupted) ", first.cause.split("\n")[0])
    behind.sort()
    because = "" if explained else ": it was stopped, busy or dead"
    findings = [_finding(by_rank[rank], last, text, because, bool(interrupted)) for rank in behind[:_MAX_FINDINGS]]
    if behind[_MAX_FINDINGS:]:
        findings.append(f"The same, or similar, is true of {rank_list(behind[_MAX_FINDINGS:])}.")
    blamed = set(behind)
    waiting = [state.rank for state in states if state.sequence == last and state.rank not in blamed]
    running = [rank for rank in waiting if by_rank[rank].state == "running"]
    if running and last:
        findings.append(f"{rank_list(running)} {'was' if len(running) == 1 else 'were'} in op {last}, {text}.")
    finished = [rank for rank in waiting if by_rank[rank].state == "finished"]
    if finished:
        findings.append(f"{rank_list(finished)} had finished op {last}, {text}.")
    others = [rank for rank in late if rank not in blamed]
    if others:
        findings.append(f"{rank_list(others)} had not called op {last}, {text}.")
    if missing:
        findings.append(f"Nothing is known about {rank_list(missing)}, which no rank's dump describes.")
    if not behind and not missing:
        findings.append("No rank is behind: all ranks reached the same call.")
    return Incident(
        group=first.group,
        time=first.time,
        cause=first.cause,
        findings=tuple(findings),
        behind=tuple(behind),
        missing=tuple(missing),
        without_dump=tuple(state.rank for state in states if not state.dumped and state.state != "unknown"),
        ranks=tuple(states),
    )


def _states(number: int, host: Sequence[int], dumps: dict[int, Dump]) -> Iterator[RankState]:
    """Yield the state of each rank of a host at the host's first abort, from its own dump or the latest other dump."""
    host_dumps = [dumps[rank] for rank in host if rank in dumps]
    now_s, histories = host_histories(host, dumps)
    latest = max(host_dumps, key=lambda dump: dump.now_s, default=None)
    for rank in host:
        dump = dumps.get(rank)
        source = dump or latest
        hostname = source.hostname if source is not None else None
        yield _state(rank, number, hostname, dump, histories.get(rank), now_s)


def _state(
    rank: int, host: int, hostname: str | None, own: Dump | None, recorded: History | None, now_s: float
) -> RankState:
    """Return a rank's state at ``now_s``, from the rank's dump ``own`` and the calls that a dump recorded, if any."""
    history = recorded or History(rank, ())
    before = [op for op in history.ops if op.started_s <= now_s]
    op = max(before, key=_sequence, default=None)
    left = op is not None and op.text == LEFT
    if left:
        op = max((each for each in before if each.text != LEFT), key=_sequence, default=None)
    state = "unknown" if recorded is None else "left" if left else "idle" if op is None else "finished"
    ended_s = None if op is None or op.ended_s is None or op.ended_s > now_s else op.ended_s
    if state == "finished" and ended_s is None:
        state = "running"
    seconds = None if op is None else now_s - (op.started_s if ended_s is None else ended_s)
    return RankState(
        rank=rank,
        host=host,
        hostname=hostname,
        pid=own.pid if own is not None else history.pid,
        sequence=op.sequence if op else 0,
        text=op.text if op else "",
        state=state,
        seconds=seconds,
        dumped=own is not None,
        stack=_stack(own.threads) if own is not None else (),
    )


_sequence: Final = attrgetter("sequence")


def _died(cause: str) -> set[int]:
    """Return the ranks that died according to the error of the rank that aborted first.

    >>> sorted(_died('ranks 0-2, 6 died during op 3, barrier, of group "0".')), _died("rank 1 left during op 3")
    ([0, 1, 2, 6], set())
    """
    found = _DIED.match(cause)
    runs = (run.split("-") for run in found[1].strip(", ").split(", ")) if found else ()
    return {rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)}


def _finding(state: RankState, last: int, text: str, because: str, in_message: bool) -> str:
    """Return a sentence about a rank that is behind.

    Args:
      state: the state of the rank.
      last: the number of the group's last call.
      text: the description of this call.
      because: the possible reasons if the rank wrote no dump.
      in_message: whether the rank was interrupted while it waited for a message.
    """
    process = "pid unknown" if state.pid is None else f"pid {state.pid}"
    where = process if state.hostname is None else f"{process} on {state.hostname}"
    rank, ago = f"{rank_list([state.rank])} ({where})", f"{state.seconds or 0.0:.1f} s before the group broke"
    never_called = f"; it did not call op {last}, {text}."
    if in_message:
        line = f"{rank} was interrupted while it waited for a message."
    elif state.state == "died":
        line = f"{rank} died: its last call was op {state.sequence}, {state.text}." if state.text else f"{rank} died."
    elif state.state == "left":
        line = f"{rank} left the group after op {state.sequence}{f', {state.text}' if state.text else ''}."
    elif state.sequence == last:
        line = f"{rank} is suspected: it called op {last}, {text}, {ago}, and stopped in this call."
    elif state.state == "idle":
        line = f"{rank} is behind: it called neither op {last}, {text}, nor any op before it."
    elif state.state == "running":
        line = f"{rank} is behind: it was in op {state.sequence}, {state.text}, called {ago}{never_called}"
    else:
        line = f"{rank} is behind: it finished op {state.sequence}, {state.text}, {ago}{never_called}"
    if not state.dumped:
        return f"{line} It wrote no dump{because}."
    return line + (f" Its main thread was in {state.stack[0]}." if state.stack else "")


def _stack(threads: tuple[Thread, ...]) -> tuple[str, ...]:
    """Return the innermost functions of the main thread, the innermost first: those of the user's code, if any."""
    frames = list(threads[0].stack) if threads else []
    external = [frame for frame in frames if not _PACKAGE.search(frame.file)]
    shown = reversed((external or frames)[-_MAX_FRAMES:])
    return tuple(f"{frame.function} ({'/'.join(Path(frame.file).parts[-2:])}:{frame.line})" for frame in shown)
