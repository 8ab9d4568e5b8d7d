"""``shrink``, ``grow``, ``join`` and ``agree``: process groups that continue when ranks are lost, or admit new ones.

Input: the default group, or another group of this backend. Output: a new group that replaces it, whose store one of its
ranks serves, and ``Reformed``. ``ranks.survival.survivors`` implements the protocol. This module creates torch's
groups, and updates torch's own tables of groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from _crossreduce_torch import InPlaceOfGloo

from ..errors import ArgumentError, MismatchError, PeerLostError, ReductionError, message, shown
from ..ranks.connections.rendezvous import NEW, Origin, StoreRendezvous
from ..ranks.survival import joiner, survivors
from ..ranks.survival.formation import GroupFormation, GroupKind, Settings
from ..ranks.survival.survivors import SHRINK_S, Reformed
from ..reduction.validation import seconds
from .connections import end_gloo, gloo_check, parent
from .group import BACKEND, Group
from .options import Options
from .rendezvous import PeerStore

KIND: Final = "torch"
READY: Final[list[Group]] = []  # an existing group that ``create`` returns next, so that torch adds it to its tables
Result = TypeVar("Result")


def create(options: Any, backend_options: Any = None) -> Group:
    """Create a group, for ``dist.Backend.register_backend``. All its ranks must call it together."""
    if READY:
        return READY.pop()
    global_ranks = list(options.global_ranks_in_group)  # empty if it has all ranks
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    check = gloo_check(options.store, rank, size, global_ranks)
    origin = Origin(check, parent=parent(dist.group.WORLD, global_ranks))
    try:
        group = Group(options.store, rank, size, timeout, options.group_id, global_ranks, backend_options, origin)
    except ArgumentError as error:
        if isinstance(backend_options, InPlaceOfGloo) and not isinstance(error, MismatchError):
            end_gloo(options.store, rank, size, error)
        raise
    group.communicator.rendezvous.watch = NEW.watch
    return group


def agree(flag: bool, group: Any = None, timeout_s: float | None = None) -> bool:
    """Return whether ``flag`` is true on all ranks of a group. All ranks that survive this call get the same answer.

    All ranks must call it together. They may do so after an op of the group has failed. Ranks that have died do not
    count. For training steps see ``committed``.

    Args:
      flag: this rank's vote.
      group: a process group of this backend; by default the default group.
      timeout_s: as for ``shrink``. The default is 10 s longer than the timeout of the group, since a rank may call this
        after an op that timed out.
    Raises:
      ArgumentError: no default group exists, the group has another backend, or ``timeout_s`` is not a number.
      ExcludedError: the other ranks have continued without this rank, or it reaches too few of them.
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
      step: called on all ranks. It raises ``PeerLostError`` or ``CollectiveTimeout`` if ranks are lost.
      changed: called with the result of ``shrink`` before the step is repeated, for example to create
        ``DistributedDataParallel`` again. If ranks are lost during this call, the others shrink the group and call it
        again.
      timeout_s: as for ``shrink``, on ranks whose step has failed. The default is 10 s longer than the timeout of the
        group; it is only 10 s after a ``CollectiveTimeout``, which has already waited for late ranks. A rank whose step
        has succeeded always waits for the default time of ``agree``.
    Returns:
      The result of ``step``.
    Raises:
      ArgumentError, ExcludedError: as for ``shrink``.
      MismatchError: ``step`` has raised it on all ranks. The group can still be used.
      Exception: ``step`` has raised another error. This rank then leaves the group, and the others continue without it.
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

    All remaining ranks must call it. As soon as one rank calls it, the current calls of the group on other ranks fail.
    The new ranks 0, 1, ... have the order of the earlier ranks. Data that a lost rank had not sent is lost, so repeat
    the step that failed. If the earlier group was the default group, the new group becomes the default group. Then
    ``dist.get_rank()`` and ``dist.get_world_size()`` change, groups created from the earlier group are closed, and
    ``DistributedDataParallel`` and device meshes must be created again.

    Args:
      group: a process group of this backend, also one whose ops fail; by default the default group.
      timeout_s: how many seconds to wait for ranks that are alive. Ranks that are later or stopped are excluded for
        good. So pass more if ranks may compute for longer before they call this.
    Returns:
      The new group. Its ``reformed.members`` are the remaining ranks, as numbered in the earlier group. Its
      ``reformed.completed`` is the number of ops of the earlier group that have succeeded on all of them.
    Raises:
      ArgumentError: no default group exists, the group has another backend, or ``timeout_s`` is not a number.
      ExcludedError: the others have continued without this rank, or it reaches too few of them. Unless all others have
        certainly ended, without continuing before, it must reach hosts with more than half of the ranks, or with half
        of them and the lowest rank.
    """
    old, limit_s = group_of(group), seconds(timeout_s)
    if old is dist.group.WORLD:
        problem = "a rank shrinks the default group, which ends all groups."
        _end_calls(PeerLostError(message(problem, f"rank {old.rank()}", "call shrink on this rank, too")))
    new, reformed = survivors.shrink(old.communicator, _formation(old, limit_s, grows=False), limit_s)
    return _replaced(old, new, reformed)


def grow(timeout_s: float = SHRINK_S) -> Group | None:
    """Admit the processes that have called ``join`` to the default group. All its ranks must call it together.

    In the new group, the ranks of the earlier group come first, in their order. It becomes the default group, as with
    ``shrink``. The new ranks have no state yet: broadcast the parameters and the state of the optimizer from rank 0.

    Args:
      timeout_s: as for ``shrink``.
    Returns:
      The new group, or ``None`` on all ranks if no process wants to join. Then the group does not change. If one of its
      ranks was excluded or has ended, the next op of the group fails with a ``PeerLostError``.
    Raises:
      ArgumentError: no default group exists, it has another backend, or ``timeout_s`` is not a number.
      ExcludedError: the others have continued without this rank, or it reaches too few of them.
      ReductionError: the new group could not be formed.
    """
    old, limit_s = group_of(None), seconds(timeout_s)
    new, reformed = survivors.grow(old.communicator, _formation(old, limit_s, grows=True), limit_s)
    return None if new is None else _replaced(old, new, reformed)


def invitation(group: Any = None) -> str:
    """Return a text with which a new process can ``join`` a group. Keep it secret, since it contains keys.

    It contains the addresses of this rank and a few others. It stays valid when the group shrinks or grows, as long as
    any of these processes is in the group.

    Raises:
      ArgumentError: no default group exists, or the group has another backend.
      ContextError: the group is closed, or belongs to another process.
    """
    return joiner.invitation(group_of(group).communicator, KIND)


def join(invited: str, timeout_s: float = 60.0) -> Group:
    """Join the group of an ``invitation`` when its ranks next call ``grow``. It becomes the default group.

    Args:
      invited: the text that ``invitation`` returned on any rank of the group.
      timeout_s: how many seconds to wait for ``grow``. If the ranks have called it by then, forming the group may take
        10 s more.
    Returns:
      The group, with this process as one of the last ranks.
    Raises:
      ArgumentError: ``invited`` is not an invitation, this process already has a default group, or ``timeout_s`` is
        not a number.
      CollectiveTimeout: the ranks did not call ``grow`` in time.
      PeerLostError: no rank of the group can be reached any more.
      ReductionError: this process lacks open files, memory or threads.
    """
    limit_s = seconds(timeout_s)
    if dist.is_initialized():
        remedy = "torch.distributed.destroy_process_group() first"
        raise ArgumentError.of("this process already has a default group.", shown(dist.group.WORLD), remedy)
    group = joiner.join(invited, _kind(), limit_s)
    _install(group)
    return group


def _kind() -> GroupKind[Group]:
    return GroupKind(KIND, PeerStore, make_group)


def _formation(old: Group, timeout_s: float, *, grows: bool) -> GroupFormation[Group]:
    """Return the formation of a group of ranks of ``old`` and, if ``grows``, of processes that want to join."""
    settings = Settings(
        old.timeout.total_seconds(), old.communicator.name, old.exact, transport=old.communicator.wanted
    )
    return GroupFormation(old.communicator, _kind(), settings, timeout_s, grows=grows)


def make_group(store: PeerStore, rank: int, size: int, settings: Settings, origin: Origin) -> Group:
    """Return a new group whose ranks use ``store`` for the rendezvous."""
    timeout = timedelta(seconds=settings.timeout_s)
    store.set_timeout(timeout)
    part = dist.PrefixStore("formed/", store)
    options = Options(settings.exact, settings.transport)
    group = Group(part, rank, size, timeout, settings.name, options=options, origin=origin)
    # ``origin.watch`` checks the earlier group while the new one is formed. From now on it must not be called.
    group.base_store, store.watch = store, NEW.watch
    assert isinstance(group.communicator.rendezvous, StoreRendezvous)
    group.communicator.rendezvous.watch = NEW.watch
    return group


# torch's tables of groups


def find_group(group: Any, *others: type) -> Any:
    """Return ``group``, or torch's default group if it is ``None``. ``others``: classes that are also allowed.

    Raises:
      ArgumentError: no default group exists, or ``group`` is neither of this backend nor of a class in ``others``.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        remedy = f'torch.distributed.init_process_group("{BACKEND}")'
        raise ArgumentError.of("torch.distributed has no default group yet.", "group=None", remedy)
    if not isinstance(group, (Group, *others)):
        remedy = f'a process group of the backend "{BACKEND}"' + "".join(f", or a {kind.__name__}" for kind in others)
        raise ArgumentError.of("this is not a process group of crossreduce.", shown(group), remedy)
    return group


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
    """Make the calls of all groups of this process fail on all ranks. Other ranks may wait for this rank there."""
    for group in _own_groups():
        group.communicator.give_up(error)


def _leave(error: BaseException) -> None:
    """Leave all groups after ``error`` of a step of ``committed``, if ``survivors.must_leave`` requires it."""
    with suppress(ReductionError):  # the step has destroyed the default group
        if survivors.must_leave(group_of(None).communicator, error):
            for group in _own_groups():
                group.communicator.abort()


def _own_groups() -> list[Group]:
    """Return the groups of this process that are groups of crossreduce."""
    tables: Any = dist.distributed_c10d
    return [group for group in list(tables._world.pg_map) if isinstance(group, Group)]


def _replaced(old: Group, new: Group, reformed: Reformed) -> Group:
    """Replace the group ``old`` by ``new`` in torch's tables, destroy ``old``, and return ``new``."""
    tables: Any = dist.distributed_c10d
    groups = tables._world.pg_map
    new.reformed, new.backend_name, backend = reformed, old.backend_name, groups[old][0]
    old.communicator.succeed(new.communicator.token)
    if old is dist.group.WORLD:
        dist.destroy_process_group()
        _install(new)
        groups[new] = backend, groups[new][1]
        return new
    numbers = [old.communicator.global_ranks[rank] for rank in reformed.members]
    new.communicator.global_ranks = tuple(numbers)
    dist.destroy_process_group(old)
    READY.append(new)
    name = f"{old.group_name} reformed"
    tables._new_process_group_helper(
        new.size(), new.rank(), numbers, dist.Backend(BACKEND), new.base_store, name, timeout=new.timeout
    )
    groups[new] = backend, groups[new][1]
    tables._world.pg_group_ranks[new] = {number: rank for rank, number in enumerate(numbers)}
    return new


def _install(group: Group) -> None:
    """Make a group the default group."""
    # torch's excepthook would print the earlier rank, so restore the hook that torch has replaced.
    if getattr(sys.excepthook, "__qualname__", "").startswith("init_process_group."):
        names = sys.excepthook.__code__.co_freevars
        cells = dict(zip(names, sys.excepthook.__closure__ or (), strict=True))
        sys.excepthook = cells["old_hook"].cell_contents
    READY.append(group)
    place = {"store": group.base_store, "rank": group.rank(), "world_size": group.size()}
    dist.init_process_group(BACKEND, timeout=group.timeout, **place)
