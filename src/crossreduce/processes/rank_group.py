"""``RankGroup``: ranks that reduce NumPy arrays, and that can continue when some of them die.

Input: a store at which the ranks meet. Output: a ``RankGroup``, and later groups without lost ranks or with new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from ..errors import ContextError
from ..ranks.communicator import Communicator
from ..ranks.connections.peers import Hosts
from ..ranks.connections.rendezvous import NEW, ConnectionStore, Origin, StoreRendezvous
from ..ranks.connections.store import StoreClient, StorePart
from ..ranks.survival import joiner, survivors
from ..ranks.survival.formation import GroupFormation, GroupKind, Settings
from ..ranks.survival.survivors import SHRINK_S, Reformed
from ..ranks.transports.base import Transport
from ..ranks.transports.choice import open_transport
from ..reduction.validation import seconds
from .array_group import ArrayGroup

Result = TypeVar("Result")


class RankGroup(ArrayGroup):
    """The processes that joined. All make the same calls in the same order. Each call returns this rank's result.

    Arrays may have any shape and layout; results are new arrays in C order, or ``out``, which may be the input array.
    Dtypes are those of the library, bfloat16 of ml_dtypes included. ``with`` or ``close`` leaves the group.

    ``rank`` is this process's number, from 0; ``size`` is the number of ranks; ``hosts`` has the ranks of each host,
    which share memory. ``reformed`` is ``None`` unless ``shrink`` or ``grow`` has formed the group. Then its
    ``members`` are the ranks that were in the earlier group, by their numbers there, and ``completed`` is the number of
    calls that succeeded there on all of them. After ``join_invited`` it is ``Reformed((), 0)``.

    If a rank dies, calls of the others raise a ``PeerLostError``. They continue with ``shrink`` or ``committed``. One
    thread at a time calls ``agree``, ``shrink``, ``committed`` or ``grow``; a second one gets a ``ContextError``.
    """

    def __init__(self, communicator: Communicator, store: StoreClient) -> None:
        """Users call ``join`` instead."""
        super().__init__(communicator)
        self.reformed: Reformed | None = None
        self._store, self._agreeing = store, threading.Lock()

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get a ``PeerLostError``."""
        super().close()
        self._store.close()

    def agree(self, flag: bool, timeout_s: float | None = None) -> bool:
        """Return whether ``flag`` is true on all ranks. All ranks that survive this call get the same result.

        All ranks call it together, also after a call of the group has failed. Ranks that have died do not count.

        Args:
          flag: this rank's vote.
          timeout_s: as for ``shrink``. The default is 10 s longer than the timeout of the group, since a rank may call
            this after a call that timed out.
        Raises:
          ArgumentError: ``timeout_s`` is not a number.
          ExcludedError: the other ranks have gone on without this one, or it reaches too few of them.
        """
        limit_s = None if timeout_s is None else seconds(timeout_s)
        with self._alone():
            return survivors.agree(self.communicator, bool(flag), limit_s)

    def shrink(self, timeout_s: float = SHRINK_S) -> RankGroup:
        """Form a group of the remaining ranks, after a ``PeerLostError`` or ``CollectiveTimeout``. Close this group.

        All remaining ranks call it. As soon as one rank calls it, the current calls of this group on other ranks fail.
        The new group has ranks 0, 1, ... in the order of the earlier ones. Data that a lost rank had not sent is lost:
        repeat the step that failed.

        Args:
          timeout_s: how long this waits for ranks that are alive, in seconds. Ranks that are later, or are stopped, are
            excluded for good. So pass more if ranks may compute for longer before they call this. This does not wait
            for ranks that have ended.
        Returns:
          The new group, with ``reformed``.
        Raises:
          ArgumentError: ``timeout_s`` is not a number.
          ContextError: this group is closed, or another thread is in ``agree``, ``shrink`` or ``grow``.
          ExcludedError: the others have gone on without this rank, or it reaches too few of them. It must reach hosts
            with more than half of the ranks, or with half of them and the lowest rank, unless all others have
            certainly ended, without going on before.
        """
        limit_s = seconds(timeout_s)
        with self._alone():
            group, reformed = survivors.shrink(self.communicator, self._formation(limit_s, grows=False), limit_s)
            return self._continue_in(group, reformed)

    def committed(
        self,
        step: Callable[[RankGroup], Result],
        changed: Callable[[RankGroup], None] = lambda _: None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[RankGroup, Result]:
        """Run a step until it has succeeded on all remaining ranks. Return their group, and the result of the step.

        If ranks are lost, the others shrink the group and repeat the step in the new one. So ``step`` must not change
        anything that a repetition needs. Code after this call runs on all ranks or on none::

            group, gradient = group.committed(lambda group: group.all_reduce(gradient_of(weights, group.rank)))
            weights -= 0.1 * gradient

        Args:
          step: called with the group, on all ranks; it raises ``PeerLostError`` or ``CollectiveTimeout`` if ranks are
            lost.
          changed: called with the new group before the step is repeated, to divide the work again. If ranks are lost
            while it runs, the others shrink the group and call it again.
          timeout_s: how long to wait for other ranks after a step that has failed, as for ``shrink``. The default is
            10 s after a ``CollectiveTimeout``, which has already waited for late ranks, and otherwise the timeout of
            the group plus 10 s. A rank whose step has succeeded always waits as ``agree`` does by default.
        Returns:
          The group in which the step has succeeded, and its result there. The group is this one if no rank was lost.
        Raises:
          ArgumentError, ExcludedError: as for ``shrink``.
          MismatchError: ``step`` has raised it, as on all ranks. The group can still be used.
          Exception: any other error that ``step`` raises. This rank then leaves the group, and the others continue
            without it.
        """
        limit_s, groups = None if timeout_s is None else seconds(timeout_s), [self]
        shrink_s = self.communicator.timeout_s + SHRINK_S if limit_s is None else limit_s

        def shrink() -> Reformed:
            groups.append(groups[-1].shrink(shrink_s))
            assert groups[-1].reformed is not None
            return groups[-1].reformed

        result = survivors.committed(
            lambda: step(groups[-1]),
            lambda: changed(groups[-1]),
            lambda done, wait_s: groups[-1].agree(done, wait_s),
            shrink,
            lambda error: groups[-1].communicator.give_up(error),
            lambda error: groups[-1]._leave(error),
            limit_s,
        )
        return groups[-1], result

    def grow(self, timeout_s: float = SHRINK_S) -> RankGroup | None:
        """Admit the processes that have called ``join_invited``. All ranks call this together.

        The new group has the ranks of this one first, in their order, and then the new ones. This group is closed. The
        new ranks have no state yet: if this returns a group, all its ranks must broadcast the state from rank 0.

        Args:
          timeout_s: as for ``shrink``.
        Returns:
          The new group, with ``reformed``. If no process waits, this is ``None`` on all ranks, and this group does not
          change. If a rank of this group was excluded or has ended, the next call then fails with a ``PeerLostError``.
        Raises:
          ArgumentError: ``timeout_s`` is not a number.
          ContextError: this group is closed.
          ExcludedError: the others have gone on without this rank, or it reaches too few of them.
          PeerLostError: other ranks call ``shrink``.
          ReductionError: the new group could not be formed.
        """
        limit_s = seconds(timeout_s)
        with self._alone():
            group, reformed = survivors.grow(self.communicator, self._formation(limit_s, grows=True), limit_s)
            return None if group is None else self._continue_in(group, reformed)

    def invitation(self) -> str:
        """Return a text with which a new process can join this group by ``join_invited``. Keep it secret: it has keys.

        It names this rank and a few others. It stays valid when the group shrinks or grows, as long as any of these
        processes is in the group. If the group met at "localhost", only processes of this host can join.

        Raises:
          ContextError: this group is closed, or belongs to another process.
        """
        return joiner.invitation(self.communicator, KIND.name)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise a ``ContextError`` if another thread is in ``agree``, ``shrink`` or ``grow``."""
        if not self._agreeing.acquire(blocking=False):
            problem = f'another thread is in agree, shrink or grow of group "{self.communicator.name}".'
            raise ContextError.of(problem, threading.current_thread().name, "call them in one thread")
        try:
            yield
        finally:
            self._agreeing.release()

    def _leave(self, error: BaseException) -> None:
        """Leave the group because a step has raised ``error``, if this is necessary."""
        if survivors.must_leave(self.communicator, error):
            self.communicator.abort()

    def _formation(self, timeout_s: float, *, grows: bool) -> GroupFormation[RankGroup]:
        group = self.communicator
        settings = Settings(group.timeout_s, group.name, listen_at=group.listen_at, transport=group.wanted)
        return GroupFormation(group, KIND, settings, timeout_s, grows=grows)

    def _continue_in(self, group: RankGroup, reformed: Reformed) -> RankGroup:
        """Close this group, and return ``group``, in which its ranks continue."""
        group.reformed = reformed
        self.communicator.succeed(group.communicator.token)
        self.close()
        return group


def make_group(
    store: StoreClient,
    rank: int,
    size: int,
    settings: Settings,
    origin: Origin = NEW,
    global_ranks: Sequence[int] = (),
) -> RankGroup:
    """Return a group whose ranks meet at a store. If they cannot, close the store.

    ``global_ranks``: the ranks' numbers in errors, by default 0, 1, ...
    """

    def connected(cancelled: threading.Event, hosts: Hosts, transport: str) -> Transport:
        part = StorePart(store, "tcp/")
        connections = ConnectionStore(part, rank, cancelled, settings.listen_at, origin.is_beyond)
        return open_transport(transport, connections.connect(hosts, transport))

    name, timeout_s, listen_at = settings.name, settings.timeout_s, settings.listen_at
    try:
        part = StorePart(store, "group/")
        rendezvous = StoreRendezvous(part, rank, size, timeout_s, global_ranks, watch=origin.watch)
        communicator = Communicator(
            rendezvous,
            connected,
            name=name,
            timeout_s=timeout_s,
            global_ranks=tuple(global_ranks) or None,
            overlapping=False,
            listen_at=listen_at,
            wanted=settings.transport,
        )
    except BaseException:
        store.close()
        raise
    rendezvous.watch = store.watch = NEW.watch  # ``origin.watch`` refers to the earlier group
    return RankGroup(communicator, store)


KIND: Final[GroupKind[RankGroup]] = GroupKind("NumPy ranks", StoreClient, make_group)
