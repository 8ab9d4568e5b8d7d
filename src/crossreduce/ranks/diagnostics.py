"""What is said when the ranks of a group do not agree, or do not come.

In: what each rank called: a sequence number and a line such as ``all_reduce sum float32[1024, 3]``.  Out: texts. They
say the same whichever rank asks, so that all ranks can raise the same error. Waits for nobody, reads no clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from ..errors import message

DOCTOR: Final = "crossreduce doctor"  # DIR behind it becomes the directory, where there is one
_MOST_RUNS: Final = 12
_MOST_CALLS: Final = 8  # a text is read by people: so many different calls are shown
_BUFFER: Final = re.compile(r"(\w+)\[([\d, ]*)\]")


class Said(NamedTuple):
    """One rank's call: the how-manieth of its group it is, from 1, and the call in words.

    >>> Said(17, "broadcast root 2 int8[7]").words
    'op 17, broadcast root 2 int8[7]'
    """

    sequence: int
    text: str

    @property
    def words(self) -> str:
        """The call as errors show it."""
        return f"op {self.sequence}, {self.text}"


class _Parts(NamedTuple):
    collective: str
    op: str
    root: str
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]


def described(
    collective: str,
    op: str | None = None,
    root: int | None = None,
    dtype: str | None = None,
    shape: Iterable[int] | None = None,
) -> str:
    """Return a call in words, which every other function here reads.

    >>> described("reduce", "sum", 2, "float32", (1024, 3))
    'reduce sum root 2 float32[1024, 3]'
    """
    words = [collective]
    if op is not None:
        words.append(op)
    if root is not None:
        words.append(f"root {root}")
    if dtype is not None:
        words.append(f"{dtype}[{', '.join(map(str, shape or ()))}]")
    return " ".join(words)


def named(ranks: Iterable[int]) -> str:
    """Return ranks in words, with those that count up joined.

    >>> named([2]), named([6, 0, 1, 2, 3]), named([0, 1])
    ('rank 2', 'ranks 0-3, 6', 'ranks 0, 1')
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:_MOST_RUNS]]
    if len(runs) > _MOST_RUNS:
        texts.append(f"... ({len(ordered)} in all)")
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(texts)


def disagreement(said: Mapping[int, Said], name: str) -> str:
    """Return the text of the ``MismatchError`` that all ranks of a group raise.

    The many are believed against the few, the lowest rank where they are as many.

    Args:
      said: what each rank of the group called, the same on all ranks. Not all are alike.
      name: the group's.

    >>> few, many = Said(17, "all_reduce sum float32[10]"), Said(17, "all_reduce sum float32[12]")
    >>> print(disagreement({0: many, 1: many, 2: few, 3: many}, "world"))
    rank 2 differs from ranks 0, 1, 3 in shape at op 17 of group "world".
      given: rank 2: all_reduce sum float32[10]; ranks 0, 1, 3: all_reduce sum float32[12]
      try:   the same shape on all ranks; nothing was reduced, and the group can go on
    """
    calls: dict[Said, list[int]] = {}
    for rank in sorted(said):
        calls.setdefault(said[rank], []).append(rank)
    assert len(calls) > 1, "the ranks agree"
    # Sorting keeps the order of what is equal, which is that of the lowest ranks.
    ordered = sorted(calls, key=lambda call: -len(calls[call]))
    usual, others = ordered[0], ordered[1:]
    few = [rank for call in others for rank in calls[call]]
    aspects = [aspect for call in others for aspect in _aspects(usual, call)]
    what = list(dict.fromkeys(aspects))
    counted = len({call.sequence for call in calls}) > 1
    shown = [
        f"{named(calls[call])}: {call.words if counted else call.text}" for call in [*others[: _MOST_CALLS - 1], usual]
    ]
    if len(others) >= _MOST_CALLS:
        shown.insert(-1, f"and {len(others) - _MOST_CALLS + 1} other calls")
    verb = "differs" if len(few) == 1 else "differ"
    where = f'of group "{name}"' if counted else f'at op {usual.sequence} of group "{name}"'
    return message(
        f"{named(few)} {verb} from {named(calls[usual])} in {' and '.join(what)} {where}.",
        "; ".join(shown),
        f"{_REMEDIES.get(what[0], f'the same {what[0]}')} on all ranks; nothing was reduced, and the group can go on",
    )


def stalled(waited_s: float, call: Said, late: Mapping[int, Said | None], name: str) -> str:
    """Return the warning that is logged while ranks wait.

    Args:
      waited_s: seconds since the first of them began to wait.
      call: what the others are in.
      late: the last call that each late rank began, ``None`` where that is not known here.
      name: the group's.

    >>> print(stalled(5, Said(17, "all_reduce sum float32[10]"), {3: Said(16, "barrier")}, "world"))
    5 s without rank 3 in op 17, all_reduce sum float32[10], of group "world".
      given: rank 3 has not begun it: its last call was op 16, barrier
    """
    return message(f'{waited_s:.3g} s without {named(late)} in {call.words}, of group "{name}".', _late(call, late))


def stalled_afar(waited_s: float, call: Said, ranks: Iterable[int], peer: int | None, name: str) -> str:
    """Return the warning that is logged while ``ranks`` of this host wait for another host.

    ``peer``: the rank there whose message they wait for, if that is known.

    >>> print(stalled_afar(5, Said(17, "barrier"), [0, 1], None, "world"))
    5 s without another host in op 17, barrier, of group "world".
      given: ranks 0, 1 exchange with other hosts, and wait for them
    """
    ranks = sorted(ranks)
    verbs = ("exchange", "wait") if len(ranks) > 1 else ("exchanges", "waits")
    given = f"{named(ranks)} {verbs[0]} with other hosts, and {verbs[1]} for them"
    if peer is not None:
        given += f": for rank {peer}, or for ranks of its host that it waits for"
    return message(f'{waited_s:.3g} s without another host in {call.words}, of group "{name}".', given)


def timed_out(timeout_s: float, call: Said, late: Mapping[int, Said | None], name: str) -> str:
    """Return the text of the ``CollectiveTimeout`` that is raised in the end; arguments as for ``stalled``.

    >>> print(timed_out(0.5, Said(17, "barrier"), {0: Said(17, "barrier"), 2: None}, "world"))
    ranks 0, 2 did not come within the timeout of 0.5 s to op 17, barrier, of group "world", which is of no use now.
      given: rank 0 has begun it, and then stopped; rank 2 has not answered
      try:   crossreduce doctor DIR shows what each rank did last, or a longer timeout
    """
    return message(
        f"{named(late)} did not come within the timeout of {timeout_s:.3g} s to {call.words}, "
        f'of group "{name}", which is of no use now.',
        _late(call, late),
        f"{DOCTOR} DIR shows what each rank did last, or a longer timeout",
    )


def lost(ranks: Mapping[int, str], call: Said, name: str, how: str = "died") -> str:
    """Return the text of a ``PeerLostError``.

    Args:
      ranks: for each lost rank where it was, such as ``pid 4711 on host a``.
      call: what the others were in.
      name: the group's.
      how: died, left or was interrupted.

    >>> print(lost({3: "pid 4711 on host a"}, Said(17, "all_reduce sum float32[10]"), "world"))
    rank 3 died during op 17, all_reduce sum float32[10], of group "world", which is of no use now.
      given: rank 3: pid 4711 on host a
      try:   look at what rank 3 printed last; crossreduce doctor DIR shows what each rank did last
    """
    assert ranks, "nobody was lost"
    if len(ranks) > 1:
        how = how.replace("was ", "were ")
    shown = [f"rank {rank}: {ranks[rank]}" for rank in sorted(ranks)[:_MOST_CALLS]]
    if len(ranks) > _MOST_CALLS:
        shown.append(f"and {len(ranks) - _MOST_CALLS} other ranks")
    return message(
        f'{named(ranks)} {how} during {call.words}, of group "{name}", which is of no use now.',
        "; ".join(shown),
        f"look at what {named(ranks)} printed last; {DOCTOR} DIR shows what each rank did last",
    )


_ORDER: Final = "what they call"
_COUNT: Final = "how many calls they have made"
_REMEDIES: Final = {_ORDER: "the same calls in the same order", _COUNT: "as many calls, in the same order,"}


def _aspects(usual: Said, call: Said) -> list[str]:
    """Return in words what is different between two calls."""
    if call.sequence != usual.sequence:
        return [_COUNT] if call.text == usual.text else [_COUNT, _ORDER]
    one, other = _parts(usual.text), _parts(call.text)
    if one is None or other is None or one.collective != other.collective:
        return [_ORDER]
    found = [aspect for aspect in ("op", "root") if getattr(one, aspect) != getattr(other, aspect)]
    if len(one.dtypes) != len(other.dtypes):
        return [*found, "number of tensors"]
    if one.dtypes != other.dtypes:
        found.append("dtype")
    if one.shapes != other.shapes:
        found.append("shape")
    return found or [_ORDER]


def _parts(text: str) -> _Parts | None:
    """Return the parts of a call that ``described`` wrote, also of one with several tensors; ``None`` of any other."""
    found = re.fullmatch(rf"(\w+)(?: (?!root )(\w+))?(?: root (\d+))?((?:,? {_BUFFER.pattern})*)", text)
    if found is None:
        return None
    buffers = _BUFFER.findall(found[4])
    return _Parts(found[1], found[2] or "", found[3] or "", *(tuple(part[k] for part in buffers) for k in (0, 1)))


def _late(call: Said, late: Mapping[int, Said | None]) -> str:
    """Return where late ranks are, those that are in the same place together."""
    places: dict[Said | None, list[int]] = {}
    for rank in sorted(late):
        places.setdefault(late[rank], []).append(rank)
    texts = []
    for said, ranks in list(places.items())[:_MOST_CALLS]:
        many = len(ranks) > 1
        have, they = ("have", "their last calls were") if many else ("has", "its last call was")
        if said is None:
            texts.append(f"{named(ranks)} {have} not answered")
        elif not said.sequence:
            texts.append(f"{named(ranks)} {have} made no call so far")
        elif said.sequence >= call.sequence:
            texts.append(f"{named(ranks)} {have} begun it, and then stopped")
        else:
            texts.append(f"{named(ranks)} {have} not begun it: {they} {said.words}")
    if len(places) > _MOST_CALLS:
        texts.append(f"and others in {len(places) - _MOST_CALLS} other places")
    return "; ".join(texts)
