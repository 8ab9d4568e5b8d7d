"""The texts of warnings and errors about ranks that are missing or whose calls differ.

Input: the sequence number and the text of each rank's call, such as ``all_reduce sum float32[1024, 3]``. Output: texts.
They do not depend on the rank that produces them, so all ranks can raise the same error (one names a helper of torch's
libraries, where torch is loaded).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from ..errors import message, rank_list
from ..ops import BitwiseOp, ReduceOp
from .traces.calls import EXACT

DOCTOR: Final = "crossreduce doctor"  # texts append DIR, which ``GroupAbort`` replaces by the folder of its dump
UNUSABLE: Final = "The group cannot be used again: call shrink, or restart the job."
NO_MESSAGES: Final = "This rank can exchange no more messages in the group."
_MAX_CALLS: Final = 8  # one text lists at most this many different calls or lost ranks
_ARRAY: Final = re.compile(r"(\w+)\[([\d, ]*)\]")
_CALL_TEXT: Final = re.compile(
    rf"(?P<collective>\w+)(?: (?!root )(?P<op>\w+))?(?: root (?P<root>\d+))?(?P<arrays>(?:,? {_ARRAY.pattern})*)"
)  # parses a call's text, which may have several arrays


class CallSignature(NamedTuple):
    """One rank's call: its sequence number within the group, starting at 1, and its description.

    >>> CallSignature(17, "broadcast root 2 int8[7]").words
    'op 17, broadcast root 2 int8[7]'
    """

    sequence: int
    text: str

    @property
    def words(self) -> str:
        """The call as shown in errors."""
        return f"op {self.sequence}, {self.text}"


def call_text(
    collective: str,
    op: str | None = None,
    root: int | None = None,
    dtype: str | None = None,
    shape: Iterable[int] | None = None,
) -> str:
    """Return the description of a call, which ``mismatch_text`` parses.

    >>> call_text("reduce", "sum", 2, "float32", (1024, 3))
    'reduce sum root 2 float32[1024, 3]'
    """
    array = dtype and f"{dtype}[{', '.join(map(str, shape or ()))}]"
    return " ".join(filter(None, (collective, op, None if root is None else f"root {root}", array)))


def op_text(op: ReduceOp | BitwiseOp, exact: bool) -> str:
    """Return the name by which call descriptions show an op.

    >>> op_text(ReduceOp.MEAN, exact=True)
    'exact_mean'
    """
    return f"{EXACT}{op.value}" if exact else str(op.value)


def planned_text(text: str, digest: bytes) -> str:
    """Return the description of a call, followed by a digest of its plan.

    >>> planned_text("broadcast root 2 int8[7]", bytes(16))
    'broadcast root 2 int8[7] planned as 0000000000000000'
    """
    return f"{text}{_PLANNED}{digest.hex()[:16]}"


def mismatch_text(calls: Mapping[int, CallSignature], name: str) -> str:
    """Return the text of the ``MismatchError`` that all ranks of a group raise.

    The call that most ranks made is taken for the correct one. Among equally frequent calls this is the call of the
    lowest rank. ``calls``: the call of each rank of the group, of which at least two differ; the same on all ranks.

    >>> few, many = CallSignature(17, "all_reduce sum float32[10]"), CallSignature(17, "all_reduce sum float32[12]")
    >>> print(mismatch_text({0: many, 1: many, 2: few, 3: many}, "world"))
    rank 2 differs from ranks 0, 1, 3 in shape at op 17 of group "world".
      given: rank 2: all_reduce sum float32[10]; ranks 0, 1, 3: all_reduce sum float32[12]
      try:   the same shape on all ranks; nothing was reduced, and the group can still be used
    """
    ranks_of: dict[CallSignature, list[int]] = {}
    for rank in sorted(calls):
        ranks_of.setdefault(calls[rank], []).append(rank)
    assert len(ranks_of) > 1, "the ranks agree"
    # Sorting is stable: equally frequent calls stay in the order of their lowest ranks.
    ordered = sorted(ranks_of, key=lambda call: -len(ranks_of[call]))
    usual, others = ordered[0], ordered[1:]
    differing = [rank for call in others for rank in ranks_of[call]]
    aspects = list(dict.fromkeys(aspect for call in others for aspect in _aspects(usual, call)))
    numbers_differ = len({call.sequence for call in ranks_of}) > 1
    listed = [*others[: _MAX_CALLS - 1], usual]
    shown = [f"{rank_list(ranks_of[call])}: {call.words if numbers_differ else call.text}" for call in listed]
    if len(others) >= _MAX_CALLS:
        shown.insert(-1, f"and {len(others) - _MAX_CALLS + 1} other calls")
    verb = "differs" if len(differing) == 1 else "differ"
    where = f'of group "{name}"' if numbers_differ else f'at op {usual.sequence} of group "{name}"'
    remedy = next((_REMEDIES[x] for x in aspects if x in _REMEDIES), f"the same {' and '.join(aspects)}")
    if aspects == ["shape"] and usual.text.startswith("all_gather"):
        helper = ", or accelerate's gather_for_metrics," if "torch" in sys.modules else ""
        remedy = f"pad the arrays{helper} for {remedy}"
    return message(
        f"{rank_list(differing)} {verb} from {rank_list(ranks_of[usual])} in {' and '.join(aspects)} {where}.",
        "; ".join(shown),
        f"{remedy} on all ranks; nothing was reduced, and the group can still be used",
    )


def stall_text(waited_s: float, call: CallSignature, late: Mapping[int, CallSignature | None], name: str) -> str:
    """Return the warning that is logged while ranks wait in ``call``.

    ``late``: for each missing rank the last call that it began, or ``None`` if it has not answered. ``name``: the name
    of the group.

    >>> call = CallSignature(17, "all_reduce sum float32[10]")
    >>> print(stall_text(5, call, {3: CallSignature(16, "barrier")}, "world"))
    waited 5 s for rank 3 in op 17, all_reduce sum float32[10], of group "world".
      given: rank 3 has not begun it: its last call was op 16, barrier
    """
    problem = f'waited {waited_s:.3g} s for {rank_list(late)} in {call.words}, of group "{name}".'
    return message(problem, _late_text(call, late))


def remote_stall_text(waited_s: float, call: CallSignature, ranks: Iterable[int], peer: int | None, name: str) -> str:
    """Return the warning that is logged while ``ranks`` of this host wait for another host.

    ``peer``: the rank of the other host whose message they wait for, if it is known.

    >>> print(remote_stall_text(5, CallSignature(17, "barrier"), [0, 1], None, "world"))
    waited 5 s for another host in op 17, barrier, of group "world".
      given: ranks 0, 1 exchange messages with other hosts and wait for them
    """
    ranks = sorted(ranks)
    verbs = ("exchange", "wait") if len(ranks) > 1 else ("exchanges", "waits")
    given = f"{rank_list(ranks)} {verbs[0]} messages with other hosts and {verbs[1]} for them"
    if peer is not None:
        given += f": for rank {peer}, which may itself wait for other ranks of its host"
    return message(f'waited {waited_s:.3g} s for another host in {call.words}, of group "{name}".', given)


def timeout_text(timeout_s: float, call: CallSignature, late: Mapping[int, CallSignature | None], name: str) -> str:
    """Return the text of a ``CollectiveTimeout``. For ``call``, ``late`` and ``name`` see ``stall_text``.

    >>> call = CallSignature(17, "barrier")
    >>> print(timeout_text(0.5, call, {0: call, 2: None}, "world"))  # doctest: +ELLIPSIS
    ranks 0, 2 did not complete op 17, barrier, of group "world", within the timeout of 0.5 s. The group cannot be ...
      given: rank 0 has begun it, but not completed it; rank 2 has not answered
      try:   crossreduce doctor DIR shows the last calls of each rank; or a longer timeout
    """
    return message(
        f'{rank_list(late)} did not complete {call.words}, of group "{name}", within the timeout of {timeout_s:.3g} s. '
        f"{UNUSABLE}",
        _late_text(call, late),
        f"{DOCTOR} DIR shows the last calls of each rank; or a longer timeout",
    )


def lost_text(ranks: Mapping[int, str], call: CallSignature, name: str, how: str = "died") -> str:
    """Return the text of a ``PeerLostError``. ``call``: the current call of the other ranks; its text is empty if none.

    ``ranks``: for each lost rank its process and host. ``how``: "died", "left", "died or left" or "was interrupted".

    >>> print(lost_text({3: "pid 4711 on host a"}, CallSignature(17, "barrier"), "world"))  # doctest: +ELLIPSIS
    rank 3 died during op 17, barrier, of group "world". The group cannot be used again: call shrink, or ...
      given: rank 3: pid 4711 on host a
      try:   read the last output of rank 3; crossreduce doctor DIR shows the last calls of each rank
    >>> lost_text({3: "pid 4711 on host a"}, CallSignature(0, ""), "world").partition(". ")[0]
    'rank 3 died before the first op of group "world"'
    """
    assert ranks, "no rank was lost"
    if len(ranks) > 1:
        how = how.replace("was ", "were ")
    where = f'during {call.words}, of group "{name}"' if call.text else f'before the first op of group "{name}"'
    shown = [f"rank {rank}: {ranks[rank]}" for rank in sorted(ranks)[:_MAX_CALLS]]
    if len(ranks) > _MAX_CALLS:
        shown.append(f"and {len(ranks) - _MAX_CALLS} other ranks")
    return message(
        f"{rank_list(ranks)} {how} {where}. {UNUSABLE}",
        "; ".join(shown),
        f"read the last output of {rank_list(ranks)}; {DOCTOR} DIR shows the last calls of each rank",
    )


_CALL: Final = "the call"
_COUNT: Final = "the number of calls"
_PLAN: Final = "the plan between hosts"
_PLANNED: Final = " planned as "
_REMEDIES: Final = {
    _CALL: "the same calls in the same order",
    _COUNT: "the same number of calls in the same order",
    _PLAN: "the same topology, and the same versions of crossreduce, NumPy and SciPy,",
}


def _aspects(usual: CallSignature, call: CallSignature) -> list[str]:
    """Return the names of the aspects in which two calls differ, such as "shape"."""
    if call.sequence != usual.sequence:
        return [_COUNT] if call.text == usual.text else [_COUNT, _CALL]
    if _PLANNED in usual.text and usual.text.partition(_PLANNED)[0] == call.text.partition(_PLANNED)[0]:
        return [_PLAN]
    match, other_match = _CALL_TEXT.fullmatch(usual.text), _CALL_TEXT.fullmatch(call.text)
    if match is None or other_match is None or match["collective"] != other_match["collective"]:
        return [_CALL]
    aspects = [aspect for aspect in ("op", "root") if match[aspect] != other_match[aspect]]
    arrays, other_arrays = _ARRAY.findall(match["arrays"]), _ARRAY.findall(other_match["arrays"])
    if len(arrays) != len(other_arrays):
        return [*aspects, "number of tensors"]
    for k, aspect in enumerate(("dtype", "shape")):
        if [array[k] for array in arrays] != [array[k] for array in other_arrays]:
            aspects.append(aspect)
    return aspects or [_CALL]


def _late_text(call: CallSignature, late: Mapping[int, CallSignature | None]) -> str:
    """Return a text with the last call of each missing rank. Ranks with the same last call are listed together."""
    ranks_of: dict[CallSignature | None, list[int]] = {}
    for rank in sorted(late):
        ranks_of.setdefault(late[rank], []).append(rank)
    texts = []
    for last, ranks in list(ranks_of.items())[:_MAX_CALLS]:
        many = len(ranks) > 1
        have, calls = ("have", "their last calls were") if many else ("has", "its last call was")
        if last is None:
            texts.append(f"{rank_list(ranks)} {have} not answered")
        elif not last.sequence:
            texts.append(f"{rank_list(ranks)} {have} made no call so far")
        elif last.sequence >= call.sequence:
            texts.append(f"{rank_list(ranks)} {have} begun it, but not completed it")
        else:
            texts.append(f"{rank_list(ranks)} {have} not begun it: {calls} {last.words}")
    if len(ranks_of) > _MAX_CALLS:
        texts.append(f"and other ranks with {len(ranks_of) - _MAX_CALLS} other last calls")
    return "; ".join(texts)
