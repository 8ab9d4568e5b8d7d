"""Reads the calls of traces, for each group and rank, with the phases of each call.

Input: a directory. Output: the groups of each run. Files of one group have the same token. Groups that have a process
in common belong to one run. Times are still on each rank's own clock; ``clocks`` aligns them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, groupby
from pathlib import Path
from typing import Final, NamedTuple

from ...errors import ArgumentError, ReductionError
from ...ops import OF_ALL_RANKS
from ...packing import itemsize
from ...topology import Topology
from ..files import open_regular, owners_note, statuses
from ..liveness import LEFT
from .format import (
    FILE,
    MOST_READ,
    RECORD,
    RUNNING,
    TOPOLOGY,
    ClockReading,
    Facts,
    Phase,
    TraceContent,
    needed_nbytes,
    read_trace,
)

CALL_TEXT: Final = re.compile(
    r"(?P<collective>\w+)(?: (?!root )(?P<op>\w+))?(?: root (?P<root>\d{1,18}))? (?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]"
)
"""Matches a call with one array, as written by ``observe.diagnostics.call_text``."""
EXACT: Final = "exact_"
"""The prefix of the op of an exact sum or mean in the text of a call."""
_MOST_DIGITS: Final = 18
_MOST_ARRAY_NBYTES: Final = 1 << 60
_TOPOLOGY_NBYTES: Final = 1 << 26
_PHASES: Final = {int(phase): phase for phase in Phase}


class CallPart(NamedTuple):
    """A phase of a call. ``waited_for``: if the phase is a wait, the rank that arrived last at the barrier."""

    phase: Phase
    begin_ns: int
    end_ns: int
    stage: int
    waited_for: int | None


class TracedCall(NamedTuple):
    """A call of one rank. ``end_ns`` is ``None`` if it has not ended. ``queued_ns``: when it began to wait in a queue.

    ``nbytes``: the size of the whole array, or of all ranks' arrays together if each has a part of it. It is ``None``
    if the text has no array. ``outcome``: a number of ``ranks.intra_host.shared_memory``, or ``RUNNING``.
    """

    number: int
    text: str
    nbytes: int | None
    begin_ns: int
    end_ns: int | None
    outcome: int
    queued_ns: int | None
    parts: tuple[CallPart, ...]

    @property
    def collective(self) -> str:
        """The name of the collective."""
        return self.text.partition(" ")[0]

    @property
    def completed(self) -> bool:
        """Whether the call has ended without an error."""
        return self.outcome == 0

    @property
    def last_ns(self) -> int:
        """The end of the call, or the end of its last phase if the call has not ended."""
        if self.end_ns is not None:
            return self.end_ns
        return max([self.begin_ns, *(part.end_ns for part in self.parts)])


class RankTrace(NamedTuple):
    """The calls of one rank, and two readings of its clocks: at the start of the first file, and later."""

    facts: Facts
    calls: tuple[TracedCall, ...]
    clocks: tuple[ClockReading, ClockReading]


class GroupTrace(NamedTuple):
    """The traces of a group's ranks. ``topologies``: the links between hosts, each from a number of calls on."""

    name: str
    token: str
    hosts: tuple[tuple[int, ...], ...]
    ranks: dict[int, RankTrace]
    topologies: tuple[tuple[int, Topology], ...]


class FoundTraces(NamedTuple):
    """The runs of a directory, the oldest first, and notes about incomplete and unreadable files."""

    runs: tuple[tuple[GroupTrace, ...], ...]
    notes: tuple[str, ...]


def read_directory(directory: Path) -> FoundTraces:
    """Return the traces of a directory.

    Raises:
      ArgumentError: the directory cannot be read, or has no trace that can be read.
    """
    remedy = "the directory of CROSSREDUCE_TRACE, or of crossreduce.trace.start"
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise ArgumentError.of(f"{directory} cannot be read: {error.strerror}.", "", remedy) from error
    contents: list[TraceContent] = []
    notes = owners_note(statuses(path for path in paths if FILE.fullmatch(path.name)).values())
    shares = _shares({path: needed_nbytes(path) for path in paths if FILE.fullmatch(path.name)}, MOST_READ)
    for path in sorted(shares):
        try:
            content = read_trace(path, shares[path])
        except (OSError, ValueError, MemoryError) as error:
            why = getattr(error, "strerror", None) or str(error) or "not enough memory"
            notes.append(f"{path.name} cannot be read: {why}.")
            continue
        contents.append(content)
        notes += [f"{path.name}: {note}." for note in content.notes]
    if not contents:
        problem = f"{directory} has no trace that can be read."
        raise ArgumentError.of(problem, "; ".join(notes) or f"{len(paths)} files, none of them a trace", remedy)
    topologies = _topologies(paths, notes)
    contents.sort(key=lambda each: (each.facts.token, each.facts.rank, each.clocks[0].monotonic_ns))
    groups = [
        _group(list(of_group), topologies.get(token, []))
        for token, of_group in groupby(contents, key=lambda each: each.facts.token)
    ]
    return FoundTraces(_runs(groups), tuple(notes))


def _shares(sizes: dict[Path, int], total: int) -> dict[Path, int]:
    """Return how many bytes of each file are read, ``total`` at most together. Small files are read completely.

    >>> _shares({Path("a"): 70, Path("b"): 10, Path("c"): 60}, 100)
    {PosixPath('b'): 10, PosixPath('c'): 45, PosixPath('a'): 45}
    """
    shares: dict[Path, int] = {}
    for path in sorted(sizes, key=lambda each: sizes[each]):
        shares[path] = min(sizes[path], total // (len(sizes) - len(shares)))
        total -= shares[path]
    return shares


def _topologies(paths: Iterable[Path], notes: list[str]) -> dict[str, list[tuple[int, Topology]]]:
    """Return for the token of each group its topologies. Append a note for each file that cannot be read."""
    topologies: dict[str, list[tuple[int, Topology]]] = {}
    matches = {path: match for path in paths if (match := TOPOLOGY.fullmatch(path.name)) is not None}
    sizes = {path: status.st_size for path, status in statuses(matches).items()}
    for path, share in sorted(_shares(sizes, _TOPOLOGY_NBYTES).items()):
        match = matches[path]
        try:
            with open_regular(path) as file:  # JSON that is too large is cut, and so malformed
                topology = Topology.from_json(file.read(share).decode())
        except (OSError, ValueError, ReductionError, RecursionError) as error:
            notes.append(f"{path.name} cannot be read: {error}.")
            continue
        topologies.setdefault(match["token"], []).append((int(match["number"]), topology))
    return {token: sorted(each, key=lambda pair: pair[0]) for token, each in topologies.items()}


def _group(contents: list[TraceContent], topologies: list[tuple[int, Topology]]) -> GroupTrace:
    """Return the trace of a group from the contents of its files, which are sorted by rank and time."""
    ranks: dict[int, RankTrace] = {}
    for content in contents:
        facts, calls, clocks = content.facts, _calls(content), content.clocks
        if (earlier := ranks.get(facts.rank)) is not None:  # tracing was stopped and started again
            calls, clocks = (*earlier.calls, *calls), (earlier.clocks[0], clocks[1])
        ranks[facts.rank] = RankTrace(facts, calls, clocks)
    first = contents[0].facts
    return GroupTrace(first.group, first.token, first.hosts, ranks, tuple(topologies))


def _calls(content: TraceContent) -> tuple[TracedCall, ...]:
    """Return the calls of a file. Phases whose call was replaced by newer records are left out."""
    host = next(ranks for ranks in content.facts.hosts if content.facts.rank in ranks)
    size = sum(map(len, content.facts.hosts))
    calls: dict[int, TracedCall] = {}
    parts: dict[int, list[CallPart]] = {}
    queued: dict[int, int] = {}
    sizes = [array_nbytes(text, size) for text in content.texts]
    records = chain.from_iterable(map(RECORD.iter_unpack, content.records))
    for kind, outcome, rank, detail, begin, end, number in records:
        phase = _PHASES[kind]
        if phase is Phase.CALL:
            has_text = 0 < detail <= len(content.texts)
            text, nbytes = (content.texts[detail - 1], sizes[detail - 1]) if has_text else ("?", None)
            ended = None if outcome == RUNNING else end
            calls[number] = TracedCall(number, text, nbytes, begin, ended, outcome, None, ())
        elif phase is Phase.QUEUE:
            queued[number] = begin
        else:
            waited = host[rank] if phase is Phase.WAIT and rank < len(host) else None
            parts.setdefault(number, []).append(CallPart(phase, begin, end, detail, waited))
    return tuple(
        call._replace(queued_ns=queued.get(number), parts=tuple(parts.get(number, ())))
        for number, call in sorted(calls.items())
        if call.text != LEFT
    )


def array_nbytes(text: str, ranks: int) -> int | None:
    """Return the bytes of the whole array of a call from its text, or ``None`` if it has no valid array.

    >>> array_nbytes("all_reduce sum float32[2, 3]", 4), array_nbytes("all_gather float32[2, 3]", 4)
    (24, 96)
    >>> array_nbytes("reduce mean root 2 int8[]", 4), array_nbytes("barrier", 4)
    (1, None)
    """
    match = CALL_TEXT.fullmatch(text)
    if match is None:
        return None
    try:
        nbytes = itemsize(match["dtype"])
    except (KeyError, ReductionError):
        return None
    for size in filter(None, match["shape"].replace(" ", "").split(",")):
        if len(size) > _MOST_DIGITS:
            return None
        nbytes *= int(size)
    nbytes *= ranks if match["collective"] in OF_ALL_RANKS else 1
    return nbytes if nbytes <= _MOST_ARRAY_NBYTES else None


def _runs(groups: list[GroupTrace]) -> tuple[tuple[GroupTrace, ...], ...]:
    """Return the groups of each run. Runs are sorted by their starts, and so are the groups of a run."""
    runs: dict[str, tuple[set[str], list[GroupTrace]]] = {}  # by each of its processes
    for group in groups:
        processes = {trace.facts.process for trace in group.ranks.values()}
        members = [group]
        for earlier in {id(runs[each]): runs[each] for each in processes & runs.keys()}.values():
            processes |= earlier[0]
            members += earlier[1]
        runs.update(dict.fromkeys(processes, (processes, members)))
    ordered = [sorted(members, key=_start_key) for _, members in {id(run): run for run in runs.values()}.values()]
    return tuple(map(tuple, sorted(ordered, key=lambda members: _start_key(members[0]))))


def _start_key(group: GroupTrace) -> tuple[int, str]:
    return min(trace.clocks[0].calendar_ns for trace in group.ranks.values()), group.token


def newest(group: GroupTrace, most: int) -> tuple[GroupTrace, int]:
    """Return a group with only its newest calls, and the number of calls that were left out.

    All ranks keep the same calls, which have at most ``most`` records together: calls and phases.
    """
    sizes: dict[int, int] = {}
    for trace in group.ranks.values():
        for call in trace.calls:
            sizes[call.number] = sizes.get(call.number, 0) + 1 + len(call.parts)
    first, total = 0, 0
    for number in sorted(sizes, reverse=True):
        total += sizes[number]
        if total > most:
            first = number + 1
            break
    kept = {
        rank: trace._replace(calls=tuple(call for call in trace.calls if call.number >= first))
        for rank, trace in group.ranks.items()
    }
    return group._replace(ranks=kept), sum(number < first for number in sizes)
