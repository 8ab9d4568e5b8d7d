"""``shrink``, ``grow``, ``join`` and ``agree``: process groups that continue when ranks are lost, or admit new ones.

Input: the default group, or another one of this backend. Output: a new group that replaces it, with a store that one of
its ranks serves, and ``Reformed``. ``ranks.survival.survivors`` implements the protocol. This module makes the torch
groups, and updates torch's own tables of groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from ..errors import ArgumentError, PeerLostError, ReductionError, message, shown
from ..ranks.connections.rendezvous import NEW, Origin, StoreRendezvous
from ..ranks.survival import joiner, survivors
from ..ranks.survival.formation import GroupFormation, GroupKind, Settings
from ..ranks.survival.survivors import SHRINK_S, Reformed
from ..reduction.validation import seconds
from .group import BACKEND, READY, Group, find_group
from .options import Options
from .peer_store import PeerStore

KIND: Final = "torch"
Result = TypeVar("Result")


def agree(flag: bool, group: Any = None, timeout_s: float | None = None) -> bool:
    """Return whether ``flag`` is true on all ranks of a group. All ranks that survive this call get the same answer.

    All ranks call it together, also after an op of the group has failed. Ranks that have died do not count. See
    ``committed`` for training steps.

    Args:
      flag: this rank's vote.
      group: a process group of this backend; ``None``: the default group.
      timeout_s: as for ``shrink``. The default is 10 s longer than the timeout of the group, since a rank may call this
        after an op that timed out.
    Raises:
      ArgumentError: no default group exists, the group has another backend, or ``timeout_s`` is not a number.
      ExcludedError: the other ranks have gone on without this one, or it reaches too few of them.
    """
    group = group_of(group)
    limit_s = group.timeout.total_seconds() + SHRINK_S if timeout_s is None else seconds(timeout_s)
    answers: list[bool] = []
    function = lambda: answers.append(survivors.agree(group.communicator, bool(flag), limit_s))  # noqa: E731
    group.queue.run(function, [], asynchronous=False)
    return answers[0]


def committed(
    step: Callable[[], Result], changed: Callable[[Reformed], None] = lambda _: None, *, timeout_s: float | None = None
) -> Result:
    """Run a training step until it has succeeded on all remaining ranks of the default group.

    If ranks are lost, the others shrink the group and repeat the step. So ``step`` may compute and reduce gradients,
    but must not change anything that a repetition needs. Code after this call, such as ``optimizer.step()``, runs on
    all ranks or on none::

        loss = crossreduce.torch.committed(forward_and_backward, wrap_again)
        optimizer.step()

    Args:
      step: called on all ranks; it raises ``PeerLostError`` or ``CollectiveTimeout`` if ranks are lost.
      changed: called with the result of ``shrink`` before the step is repeated, such as to make
        ``DistributedDataParallel`` again. If ranks are lost in it, the others shrink the group and call it again.
      timeout_s: as for ``shrink``, after a step that has failed. The default is 10 s longer than the timeout of the
        group, but 10 s after a ``CollectiveTimeout``, which has already waited for late ranks. A rank whose step has
        succeeded always waits as ``agree`` does by default.
    Returns:
      What ``step`` returned.
    Raises:
      ArgumentError, ExcludedError: as for ``shrink``.
      MismatchError: ``step`` has raised it, as on all ranks. The group can still be used.
      Exception: what ``step`` raises, if it is another error. This rank then leaves the group, and the others continue
        without it.
    """
    limit_s, results = None if timeout_s is None else seconds(timeout_s), list[Reformed]()

    def shrink_default() -> Reformed:
        shrink_s = group_of(None).timeout.total_seconds() + SHRINK_S if limit_s is None else limit_s
        reformed = shrink(timeout_s=shrink_s).reformed
        assert reformed is not None
        results.append(reformed)
        return reformed

    return survivors.committed(
        step,
        lambda: changed(results[-1]),
        lambda done, wait_s: agree(done, timeout_s=wait_s),
        shrink_default,
        _end_calls,
        _leave,
        limit_s,
    )


def shrink(group: Any = None, timeout_s: float = SHRINK_S) -> Group:
    """Form a group of the remaining ranks of a group, after a ``PeerLostError`` or ``CollectiveTimeout``.

    All remaining ranks call it. As soon as one rank calls it, the current calls of the group on other ranks fail. The
    new group has ranks 0, 1, ... in the order of the earlier ones. Data that a lost rank had not sent is lost: repeat
    the step that failed. If the earlier group was the default group, the new one becomes the default group:
    ``dist.get_rank()`` and ``dist.get_world_size()`` change, groups made from the earlier one are closed, and
    ``DistributedDataParallel`` and device meshes have to be made again.

    Args:
      group: a process group of this backend, also one whose ops fail; ``None``: the default group.
      timeout_s: how long ranks that are alive are waited for, in seconds. Ranks that are later, or are stopped, are
        excluded for good: pass more if ranks may compute for longer before they call this. Ranks that have ended are
        not waited for.
    Returns:
      The new group. Its ``reformed`` has the ``members``, by their ranks in the earlier group, and ``completed``: how
      many ops of the earlier group have succeeded on all of them.
    Raises:
      ArgumentError: no default group exists, the group has another backend, or ``timeout_s`` is not a number.
      ExcludedError: the others have gone on without this rank, or it reaches too few of them. It must reach hosts with
        more than half of the ranks, or with half of them and the lowest rank, unless all others have ended.
    """
    old, limit_s = group_of(group), seconds(timeout_s)
    if old is dist.group.WORLD:
        problem = "a rank shrinks the default group, which ends all groups."
        _end_calls(PeerLostError(message(problem, f"rank {old.rank()}", "call shrink on this rank, too")))
    new, reformed = survivors.shrink(old.communicator, _formation(old, limit_s, grows=False), limit_s)
    return _replaced(old, new, reformed)


def grow(timeout_s: float = SHRINK_S) -> Group | None:
    """Admit the processes that have called ``join`` to the default group; all its ranks call it together.

    The new group has the ranks of the earlier one first, in their order, and then the new ones. It becomes the default
    group, as with ``shrink``. The new ranks have no state yet: broadcast the parameters and the state of the optimizer
    from rank 0.

    Args:
      timeout_s: as for ``shrink``.
    Returns:
      The new group. If no process waits, this is ``None`` on all ranks, and the group does not change. If one of its
      ranks was excluded or has ended, the group's next op then fails with a ``PeerLostError``.
    Raises:
      ArgumentError: no default group exists, it has another backend, or ``timeout_s`` is not a number.
      ExcludedError: the others have gone on without this rank, or it reaches too few of them.
      ReductionError: the new group could not be formed.
    """
    old, limit_s = group_of(None), seconds(timeout_s)
    new, reformed = survivors.grow(old.communicator, _formation(old, limit_s, grows=True), limit_s)
    return None if new is None else _replaced(old, new, reformed)


def invitation(group: Any = None) -> str:
    """Return a text with which a new process can ``join`` a group. Pass it on secretly: it has keys.

    It names this rank and a few others. It stays valid when the group shrinks or grows, as long as any of these
    processes is in the group.

    Raises:
      ArgumentError: no default group exists, or the group has another backend.
      ContextError: the group is closed, or belongs to another process.
    """
    return joiner.invitation(group_of(group).communicator, KIND)


def join(invited: str, timeout_s: float = 60.0) -> Group:
    """Join the group of an ``invitation`` when its ranks next call ``grow``; the group becomes the default group.

    Args:
      invited: the text that ``invitation`` returned on any rank of the group.
      timeout_s: how long this waits for ``grow``, in seconds. If the ranks have called it by then, forming the group
        may take 10 s more.
    Returns:
      The group, with this process as one of the last ranks.
    Raises:
      ArgumentError: this is not an invitation, this process has a default group already, or ``timeout_s`` is not a
        number.
      CollectiveTimeout: the ranks did not call ``grow`` in time.
      PeerLostError: no rank of the group can be reached any more.
    """
    limit_s = seconds(timeout_s)
    if dist.is_initialized():
        remedy = "torch.distributed.destroy_process_group() first"
        raise ArgumentError.of("this process is in a default group already.", shown(dist.group.WORLD), remedy)
    group = joiner.join(invited, _kind(), limit_s)
    _install(group)
    return group


def _kind() -> GroupKind[Group]:
    return GroupKind(KIND, PeerStore, make_group)


def _formation(old: Group, timeout_s: float, *, grows: bool) -> GroupFormation[Group]:
    """Return the formation of a group of ranks of ``old``, and of processes that want to join if ``grows``."""
    settings = Settings(old.timeout.total_seconds(), old.communicator.name, old.exact)
    return GroupFormation(old.communicator, _kind(), settings, timeout_s, grows=grows)


def make_group(store: PeerStore, rank: int, size: int, settings: Settings, origin: Origin) -> Group:
    """Return a group whose ranks meet at ``store``."""
    timeout = timedelta(seconds=settings.timeout_s)
    store.set_timeout(timeout)
    part = dist.PrefixStore("formed/", store)
    group = Group(part, rank, size, timeout, settings.name, options=Options(settings.exact), origin=origin)
    group.base_store, store.watch = store, NEW.watch  # ``origin.watch`` refers to the earlier group
    assert isinstance(group.communicator.rendezvous, StoreRendezvous)
    group.communicator.rendezvous.watch = NEW.watch
    return group


# torch's tables of groups


def group_of(group: Any) -> Group:
    """Return ``group``, or the default group if it is ``None``, after checking that it can be used.

    Raises:
      ArgumentError: no default group exists, or the group has another backend.
      ContextError: the group was destroyed.
    """
    checked: Group = find_group(group)
    checked.queue.require_open()
    return checked


def _end_calls(error: ReductionError) -> None:
    """Make the calls of all groups of this process fail on all ranks, since other ranks may wait there for this one."""
    tables: Any = dist.distributed_c10d
    for group in list(tables._world.pg_map):
        if isinstance(group, Group):
            group.communicator.give_up(error)


def _leave(error: BaseException) -> None:
    """Leave all groups if ``survivors.must_leave`` requires it after an error of a step of ``committed``."""
    tables: Any = dist.distributed_c10d
    with suppress(ReductionError):  # the step has destroyed the default group
        if survivors.must_leave(group_of(None).communicator, error):
            for group in list(tables._world.pg_map):
                if isinstance(group, Group):
                    group.communicator.abort()


def _replaced(old: Group, new: Group, reformed: Reformed) -> Group:
    """Destroy a group, enter ``new`` into torch's tables in its place, and return ``new``."""
    new.reformed = reformed
    old.communicator.succeed(new.communicator.token)
    if old is dist.group.WORLD:
        dist.destroy_process_group()
        _install(new)
        return new
    numbers = [old.communicator.global_ranks[rank] for rank in reformed.members]
    new.communicator.global_ranks = tuple(numbers)
    dist.destroy_process_group(old)
    tables: Any = dist.distributed_c10d
    READY.append(new)
    name = f"{old.group_name} reformed"
    tables._new_process_group_helper(
        new.size(), new.rank(), numbers, dist.Backend(BACKEND), new.base_store, name, timeout=new.timeout
    )
    tables._world.pg_group_ranks[new] = {number: rank for rank, number in enumerate(numbers)}
    return new


def _install(group: Group) -> None:
    """Make a group the default group."""
    # torch's excepthook prints the earlier rank, so restore the hook that torch has replaced.
    if getattr(sys.excepthook, "__qualname__", "").startswith("init_process_group."):
        names = sys.excepthook.__code__.co_freevars
        cells = dict(zip(names, sys.excepthook.__closure__ or (), strict=True))
        sys.excepthook = cells["old_hook"].cell_contents
    READY.append(group)
    place = {"store": group.base_store, "rank": group.rank(), "world_size": group.size()}
    dist.init_process_group(BACKEND, timeout=group.timeout, **place)
