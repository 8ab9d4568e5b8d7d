"""``agree``, ``shrink`` and ``grow``: the ranks of a group agree on a flag, or form the group again.

Input: a ``Communicator``, and a function that makes a new group of some of its ranks. Output: a group of the remaining
ranks, or with new ranks. All ranks get the same group. ``agreement`` explains why no second group is ever formed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

from ...errors import CollectiveTimeout, ContextError, MismatchError, PeerLostError, ReductionError, message, rank_list
from ...observe.diagnostics import UNUSABLE
from ..agreement.lost_ranks import Watch
from ..communicator import Communicator
from ..connections import shortage
from ..failures.abort import copy_error, shortage_named

AGREE, FORMED, GROW, SHRINK = range(4)  # the kinds of agreements; if ranks call different ones, the greatest counts
SHRINK_S: Final = 10.0  # how long ranks that are alive are waited for by default
_TRIES: Final = 20  # how often forming a group is tried
_WATCH_S: Final = 0.05  # between two checks of the other ranks while a group is formed
_LOG: Final = logging.getLogger("crossreduce")


class Closable(Protocol):
    """A group that can be left."""

    def close(self) -> None:
        """Leave the group."""


Group = TypeVar("Group", bound=Closable)
Result = TypeVar("Result")
Form: TypeAlias = Callable[["Reformed", Callable[[], None]], Group | None]


class Reformed(NamedTuple):
    """The earlier group from which a new group was formed.

    ``members``: the ranks of the earlier group that are in the new one, by their numbers in the earlier group,
    ascending. ``completed``: how many ops of the earlier group have succeeded on all of ``members``. A process that has
    joined as a new rank was in no earlier group: its ``members`` is empty and its ``completed`` is 0.
    """

    members: tuple[int, ...]
    completed: int


def agree(group: Communicator, flag: bool, timeout_s: float | None = None) -> bool:
    """Return whether ``flag`` is true on all ranks. All ranks that survive this call get the same result.

    Ranks that have died before or during the call do not count. If a rank does not take part, or calls ``shrink``
    instead, later ops of the group fail. Only ranks that get a result here can shrink the group afterwards.

    Args:
      group: all its ranks call this together, also after an op has failed.
      flag: this rank's vote.
      timeout_s: how long ranks that are alive are waited for. The default is the group's timeout plus ``SHRINK_S``: a
        rank may first wait in an op for a lost rank, until the group's timeout has passed.
    Raises:
      ExcludedError: the others have gone on without this rank, or it reaches too few of them.
    """
    electors = group.agreements.electors
    limit_s = group.timeout_s + SHRINK_S if timeout_s is None else timeout_s
    with shortage_named(_own_problem(group)):
        decision = group.decide(AGREE, flag, limit_s)
    _end_without(group, electors)
    return decision.flag


def shrink(group: Communicator, form: Form[Group], timeout_s: float) -> tuple[Group, Reformed]:
    """Form a new group of the remaining ranks. All of them call this together. ``group`` cannot be used any more.

    Args:
      group: the earlier group. Its calls on other ranks fail as soon as one rank calls this. The caller closes it.
      form: makes the new group. Its arguments: the ranks of the group, and a function that ``form`` calls while it
        waits for others. This function raises a ``ReductionError`` if the new group cannot be formed any more. If ranks
        fail to form the group, it is closed on all of them, and formed again without those that have died.
      timeout_s: how long ranks that are alive are waited for. Later ones are excluded.
    Raises:
      ExcludedError: the others have gone on without this rank, or it reaches too few of them.
      ContextError: other ranks call ``agree`` again and again.
      ReductionError: the group cannot be formed, for the reason in the text. If no rank is lost meanwhile, this is
        tried again for ``timeout_s`` seconds.
    """
    own = group.global_ranks[group.rank]
    problem = f'rank {own} forms group "{group.name}" again without the ranks that were lost. {UNUSABLE}'
    group.give_up(PeerLostError(message(problem, "", "call shrink on this rank, too")))
    with shortage_named(_own_problem(group)):
        new_group, reformed = _reform(group, SHRINK, form, timeout_s)
    assert new_group is not None, "form makes a group"
    return new_group, reformed


def grow(group: Communicator, form: Form[Group], timeout_s: float) -> tuple[Group | None, Reformed]:
    """Form a new group of the ranks of an intact group and of processes that want to join. See also ``shrink``.

    If no process wants to join, ``form`` returns ``None`` on all ranks, and the group is kept. If ranks of the group do
    not take part, its later ops fail.

    Raises:
      PeerLostError: other ranks shrink the group.
    """
    electors = group.agreements.electors
    with shortage_named(_own_problem(group)):
        new_group, reformed = _reform(group, GROW, form, timeout_s)
    if new_group is None:
        _end_without(group, electors)
    return new_group, reformed


def committed(
    step: Callable[[], Result],
    changed: Callable[[], None],
    agree: Callable[[bool, float | None], bool],
    shrink: Callable[[], Reformed],
    end_calls: Callable[[ReductionError], None],
    leave: Callable[[BaseException], None],
    timeout_s: float | None,
) -> Result:
    """Run a step until it has succeeded on all ranks that are left, and return its result.

    Args:
      step: raises ``PeerLostError`` or ``CollectiveTimeout`` if ranks are lost.
      changed: called after the group has shrunk, before the step is repeated.
      agree: returns whether the step has succeeded on all ranks; see the function ``agree``.
      shrink: forms the group again.
      end_calls: called with the error of a step that has failed, so that no rank waits for this one in the step.
      leave: called with any other error of a step before this error is raised; see ``must_leave``.
      timeout_s: how long ``agree`` waits if the step has failed. The default is that of ``agree``, but only
        ``SHRINK_S`` after a ``CollectiveTimeout``, which has already waited for late ranks.
    """
    is_repeated = False
    while True:
        result, failure, limit_s = [], None, None  # ``result`` is a list, since a step may return ``None``
        try:
            if is_repeated:
                changed()
            result.append(step())
        except (PeerLostError, CollectiveTimeout) as error:
            failure = str(error)
            limit_s = SHRINK_S if timeout_s is None and isinstance(error, CollectiveTimeout) else timeout_s
            end_calls(error)
        except MismatchError:  # all ranks raise it, and the group can still be used
            raise
        except BaseException as error:
            leave(error)
            raise
        if agree(failure is None, limit_s) and result:
            return result[0]
        members = shrink().members
        cause = (failure or "it has failed on another rank.").replace(f" {UNUSABLE}", "")  # this function shrinks it
        _LOG.warning("a step has failed, and is repeated by %s of the earlier group: %s", rank_list(members), cause)
        is_repeated = True


def must_leave(group: Communicator, error: BaseException) -> bool:
    """Return whether a rank must leave its group because its step raised an error other than the loss of a rank.

    Usually it must leave, or the other ranks would wait for it. It may stay, and its caller may call ``shrink``, if the
    group had failed before and the error is an ``Exception``: a library may have replaced our error by its own.
    """
    return group.failure is None or not isinstance(error, Exception)


def _reform(group: Communicator, kind: int, form: Form[Group], timeout_s: float) -> tuple[Group | None, Reformed]:
    """Agree on the ranks of a new group, form it, and agree on whether all have formed it. Repeat this if it fails."""
    failure: ReductionError | None = None
    members, until, is_over = tuple[int, ...](), 0.0, False
    for _ in range(_TRIES):
        decision = group.decide(kind, not is_over, timeout_s)
        if decision.kind != kind:
            problem = f'other ranks of group "{group.name}" have called shrink. {UNUSABLE}'
            raise PeerLostError(message(problem, "a call of grow on this rank", "call shrink"))
        if not decision.flag:
            if decision.members == members:  # some rank has no time left
                break
            is_over = False
            continue  # other ranks have called something else, and get an error, or were lost
        began = time.monotonic()
        if decision.members != members:  # the first attempt, or ranks were lost: all of them may fail for that reason
            members, until = decision.members, began + timeout_s
        reformed, new_group, failure = Reformed(decision.members, decision.progress), None, None
        try:
            new_group = form(reformed, _Watch(group, decision.members))
        except ReductionError as error:
            failure = error
        except BaseException as error:
            if not shortage.note(error) and not isinstance(error, OSError):  # such as Ctrl-C: the others must not wait
                group.abort()
                raise
            # The agreement below tells the other ranks.
            failure = ReductionError.of(_own_problem(group), str(error) or "not enough memory", shortage.REMEDY)
        try:
            formed = group.decide(FORMED, failure is None, timeout_s)
        except BaseException:
            if new_group is not None:
                new_group.close()
            raise
        if formed.flag:  # all ranks have formed the group
            return new_group, reformed
        if new_group is not None:
            new_group.close()
        now = time.monotonic()
        is_over = now + (now - began) > until  # another attempt would take as long
    if failure is not None and not isinstance(failure, PeerLostError):
        raise _renumbered(failure, [group.global_ranks[rank] for rank in members])
    if members:  # no rank is known to be lost, but another one may have failed
        problem, given = f'group "{group.name}" could not be formed again.', str(failure or "").partition("\n")[0]
        raise ReductionError.of(problem, given, "read the errors of its other ranks") from failure
    problem = f'group "{group.name}" was not formed again, since its ranks made different calls.'
    remedy = "the same calls of agree, shrink and grow on all ranks"
    raise ContextError.of(problem, f"{_TRIES} attempts", remedy)


def _renumbered(error: ReductionError, numbers: Sequence[int]) -> ReductionError:
    """Return an error of a group that was not formed, with its ranks' other ``numbers`` in the earlier group."""
    if numbers == [*range(len(numbers))] or "cannot form group" in str(error):  # the latter has those numbers already
        return error
    named = f"numbers: those in the group that was not formed. It has {rank_list(numbers)} of this group, in this order"
    found = copy_error(error, f"{error}\n  {named}")
    if isinstance(found, CollectiveTimeout):
        found.ranks = tuple(numbers[rank] for rank in found.ranks if rank < len(numbers))
    return found


def _own_problem(group: Communicator) -> str:
    return f'rank {group.global_ranks[group.rank]} cannot form group "{group.name}" again.'


class _Watch:
    """A function that raises an error if a rank of the new group is lost, or has failed to form the group."""

    def __init__(self, group: Communicator, members: Sequence[int]) -> None:
        self._group, self._watch, self._next = group, Watch(group.agreements, members), 0.0

    def __call__(self) -> None:
        if (now := time.monotonic()) < self._next:
            return
        lost = self._watch.lost()
        self._next = now + _WATCH_S
        if {*lost} - {*self._watch.failed}:
            raise _absence_error(self._group, lost)
        if lost:
            named = rank_list(self._group.global_ranks[rank] for rank in lost)
            problem = f'{named} cannot form group "{self._group.name}" again.'
            raise ReductionError.of(problem, remedy=f"read the error of {named}")


def _end_without(group: Communicator, electors: Sequence[int]) -> None:
    """Make later ops of a group fail if some of its earlier electors did not take part in its latest agreement."""
    missing = sorted(set(electors) - set(group.agreements.electors))
    if missing:
        group.give_up(_absence_error(group, missing))


def _absence_error(group: Communicator, ranks: Sequence[int]) -> PeerLostError:
    """Return the error about ranks that did not take part in an agreement."""
    named = [group.global_ranks[rank] for rank in ranks]
    problem = f'{rank_list(named)} of group "{group.name}" did not take part in an agreement of its ranks. {UNUSABLE}'
    return PeerLostError(message(problem, "they have ended, or were late"), named)
