"""``shrink``, ``grow``, ``join`` and ``agree``: process groups that go on when ranks are lost, or that let new ones in.

Input: the default group, or another one of this backend. Output: a new group in its place, with a store that one of its
ranks serves, and ``Reformed``. The protocol is in ``ranks.survivors``; here a store, gloo and torch's own tables of
groups are made to follow.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from ..errors import (
    ArgumentError,
    CollectiveTimeout,
    PeerLostError,
    ReductionError,
    message,
    shown,
)
from ..ranks import contact, survivors
from ..ranks.agreement import Json, read_decision
from ..ranks.contact import Ended, Peer, Place
from ..ranks.survivors import FORMED, SHRINK_S, Reformed
from .group import READY, Group
from .rendezvous import OWN_STORES

_PAUSE_S: Final = 0.002  # between two questions to the rank that serves the store
_KNOCK_S: Final = 0.3  # between two requests to let this process join
_CHECK_S: Final = 0.1  # between two looks whether the processes are alive that form a group with this one
_CONNECT: Final = timedelta(seconds=5)  # how long a connection to a store may take
_BACKEND: Final = "crossreduce"
Result = TypeVar("Result")


def agree(flag: bool, group: Any = None, timeout_s: float | None = None) -> bool:
    """Return whether ``flag`` is true on all ranks of a group: the same answer on all that survive this call.

    All ranks call it together, also after an op of the group has failed. Ranks that have died do not count. See
    ``committed`` for training steps.

    Args:
      flag: what this rank brings.
      group: a process group of this backend; ``None``: the default group.
      timeout_s: how long ranks that are alive are waited for, in seconds; later ones are excluded from the group for
        good. ``None``: the timeout of the group.
    Raises:
      ArgumentError: there is no default group, or the group has another backend.
      ExcludedError: the other ranks have gone on without this one, or it reaches too few of them.
    """
    found = group_of(group)
    answers: list[bool] = []
    function = lambda: answers.append(survivors.agree(found.communicator, bool(flag), timeout_s))  # noqa: E731
    found.queue.run(function, [], asynchronous=False)
    return answers[0]


def committed(
    step: Callable[[], Result],
    changed: Callable[[Reformed], None] = lambda _: None,
    *,
    timeout_s: float = SHRINK_S,
) -> Result:
    """Run a training step until it has succeeded on all ranks that are left of the default group.

    If ranks are lost, the others shrink the group and repeat the step. So ``step`` computes gradients and reduces them,
    but changes nothing that a repetition needs; what follows, such as ``optimizer.step()``, is done by all ranks or by
    none::

        loss = crossreduce.torch.committed(forward_and_backward, wrap_again)
        optimizer.step()

    Args:
      step: called on all ranks; it raises ``PeerLostError`` or ``CollectiveTimeout`` if ranks are lost.
      changed: called with the result of ``shrink`` before the step is repeated, such as to make
        ``DistributedDataParallel`` again.
      timeout_s: as for ``shrink``.
    Returns:
      What ``step`` returned.
    Raises:
      ExcludedError: as for ``shrink``.
      Exception: what ``step`` raises, if it is another error. Then the other ranks lose this one.
    """
    while True:
        result, done = [], True
        try:
            result.append(step())
        except (PeerLostError, CollectiveTimeout):
            done = False
        if agree(done, timeout_s=timeout_s) and result:
            return result[0]
        made = shrink(timeout_s=timeout_s)
        assert made.reformed is not None
        changed(made.reformed)


def shrink(group: Any = None, timeout_s: float = SHRINK_S) -> Group:
    """Form a group of the ranks that are left of a group, after a ``PeerLostError`` or ``CollectiveTimeout``.

    All ranks that are left call it; a call of the group that another rank is in fails as soon as one rank calls this.
    The new group has ranks 0, 1, ... in the order of the earlier ones. If it was the default group, the new one becomes
    the default group: ``dist.get_rank()`` and ``dist.get_world_size()`` change, all groups made from the earlier one are
    closed, and ``DistributedDataParallel`` and device meshes have to be made again. What a lost rank had not sent is
    gone: repeat the step that failed.

    Args:
      group: a process group of this backend, also one whose ops fail; ``None``: the default group.
      timeout_s: how long ranks that are alive are waited for, in seconds. Ranks that are later, or stopped, are excluded
        for good. Ranks that have ended are not waited for.
    Returns:
      The new group. Its ``reformed`` has the ``members``, which are ranks of the earlier group, and ``completed``: how
      many ops of the earlier group have succeeded on all of them.
    Raises:
      ArgumentError: there is no default group, or the group has another backend.
      ExcludedError: the others have gone on without this rank, or it reaches too few of them: of the hosts' ranks more
        than half, or half with the lowest one, unless all others have ended.
    """
    found = group_of(group)
    made, reformed = survivors.shrink(found.communicator, _Forming(found, grows=False), timeout_s)
    return _replaced(found, made, reformed)


def grow(timeout_s: float = SHRINK_S) -> Group | None:
    """Let the processes into the default group that have called ``join``; all ranks of the group call it together.

    The new group has the ranks of the earlier one first, in their order, and then the new ones. It becomes the default
    group, as with ``shrink``. The new ranks know nothing yet: broadcast the parameters and the state of the optimizer
    from rank 0.

    Args:
      timeout_s: how long ranks of the group are waited for, in seconds.
    Returns:
      The new group; ``None``, on all ranks: no process waits, and the group stays as it is.
    Raises:
      ArgumentError: there is no default group, or it has another backend.
      ExcludedError: the others have gone on without this rank, or it reaches too few of them.
      ReductionError: the new group could not be formed.
    """
    found = group_of(None)
    made, reformed = survivors.grow(found.communicator, _Forming(found, grows=True), timeout_s)
    return None if made is None else _replaced(found, made, reformed)


def invitation(group: Any = None) -> str:
    """Return a text with which a new process can ``join`` a group, by any channel that keeps it secret.

    It names this rank. It stays valid when the group shrinks or grows, as long as this process is in it.
    """
    found = group_of(group)
    agreements = found.communicator.agreements
    return json.dumps([found.communicator.token, [agreements.place_of(found.rank())]])


def join(invited: str, timeout_s: float = 60.0) -> Group:
    """Join the group of an ``invitation`` when its ranks next call ``grow``; the group becomes the default group.

    Args:
      invited: what ``invitation`` returned on any rank of the group.
      timeout_s: how long this waits for ``grow``, in seconds.
    Returns:
      The group, with this process as one of the last ranks.
    Raises:
      ArgumentError: this is no invitation, or this process has a default group already.
      CollectiveTimeout: the ranks did not call ``grow`` in time.
      PeerLostError: no rank of the group can be reached any more.
    """
    if dist.is_initialized():
        remedy = "torch.distributed.destroy_process_group() first"
        raise ArgumentError.of("this process is in a default group already.", shown(dist.group.WORLD), remedy)
    try:
        token, places = json.loads(invited)
        joiner = _Joiner(str(token), [Place.read(place) for place in places])
    except (TypeError, ValueError) as error:
        raise ArgumentError.of("this is not an invitation.", shown(invited), "what invitation() returned") from error
    try:
        return joiner.join(timeout_s)
    finally:
        joiner.close()


# Forming a group


class _Forming:
    """The new group of some ranks of ``old``, and of the processes that want to join if ``grows``."""

    def __init__(self, old: Group, *, grows: bool) -> None:
        self._old, self._grows = old, grows
        self._agreements = old.communicator.agreements
        self._joiners: dict[str, Peer] = {}  # by their tokens; known to the lowest rank only
        self._check_at = 0.0

    def __call__(self, reformed: Reformed, watch: Callable[[], None]) -> Group | None:
        """Make the group; for arguments and result see ``survivors.shrink``. The lowest rank serves the store."""
        members, old = reformed.members, self._old
        key = f"store {self._agreements.number}"
        rank = members.index(old.rank())
        if rank == 0:
            self._joiners = self._waiting(members) if self._grows else {}
            size, store = len(members) + len(self._joiners), None
            if self._joiners or not self._grows:
                store = served(old.timeout)
                self._admit(members, store.port)
            self._agreements.published[key] = [size, 0 if store is None else store.port]
        else:
            peer = self._agreements.peer(members[0])
            size, port = self._asked(peer, key, watch)
            store = connected(peer.known, port, old.timeout) if port else None
        if store is None:
            return None
        return formed(store, rank, size, old.timeout, old.communicator.name, lambda: self._check(watch))

    def _waiting(self, members: Sequence[int]) -> dict[str, Peer]:
        """Return the processes that want to join and answer now."""
        places = self._agreements.joiners()
        for rank in members:
            if rank != self._old.rank():
                with suppress(Ended):
                    peer = self._agreements.peer(rank)
                    answer = peer.ask(self._old.communicator.token, {"what": "waiting"})
                    places |= (answer or {}).get("waiting", {})
        peers = {token: Peer(Place.read(place)) for token, place in sorted(places.items())}
        return {token: peer for token, peer in peers.items() if _answers(peer, token)}

    def _admit(self, members: Sequence[int], port: int) -> None:
        """Tell the processes that join their ranks."""
        agreements = self._agreements
        offer = {
            "what": "admit",
            "size": len(members) + len(self._joiners),
            "port": port,
            "timeout_s": self._old.timeout.total_seconds(),
            "name": self._old.communicator.name,
            "token": self._old.communicator.token,
            "number": agreements.number + 1,
            "members": [agreements.place_of(rank) for rank in members],
        }
        for k, (token, peer) in enumerate(self._joiners.items()):
            with suppress(Ended):  # the check finds that
                peer.ask(token, offer | {"rank": len(members) + k})

    def _check(self, watch: Callable[[], None]) -> None:
        """Raise if the new group cannot be formed any more."""
        watch()
        if self._joiners and (now := time.monotonic()) > self._check_at:
            self._check_at = now + _CHECK_S
            gone = [token for token, peer in self._joiners.items() if not _answers(peer, token)]
            if gone:
                problem = "a process that was to join the group has ended, or does not answer."
                raise PeerLostError(message(problem, f"{len(gone)} of {len(self._joiners)}", "call grow again"))

    def _asked(self, peer: Peer, key: str, watch: Callable[[], None]) -> tuple[int, int]:
        """Return the size of the group and the port of the store that its lowest rank serves; 0: no new group."""
        limit_s = self._old.timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            answer = None
            with suppress(Ended):
                answer = peer.ask(self._old.communicator.token, {"what": "published", "key": key})
            if answer is not None and answer.get("value") is not None:
                size, port = answer["value"]
                return int(size), int(port)
            watch()
            time.sleep(_PAUSE_S)
        problem = "the rank that serves the store of the new group does not answer."
        raise PeerLostError(message(problem, f"waited {limit_s:g} s", "check the network between the hosts"))


def _answers(peer: Peer, token: str) -> bool:
    try:
        return "ready" in (peer.ask(token, {"what": "ready"}) or {})
    except Ended:
        return False


def served(timeout: timedelta) -> Any:
    """Return a store that this process serves, at a free port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    OWN_STORES.add(store.port)
    return store


def connected(address: str, port: int, timeout: timedelta) -> Any:
    """Return the store that another process serves.

    Raises:
      PeerLostError: it cannot be reached.
    """
    try:
        limit = min(timeout, _CONNECT)
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        problem = "the store of the new group cannot be reached."
        raise PeerLostError(message(problem, f"{address}: {error}", "call shrink again")) from None
    store.set_timeout(timeout)
    OWN_STORES.add(port)
    return store


def formed(
    store: Any, rank: int, size: int, timeout: timedelta, name: str, watch: Callable[[], None]
) -> Group:
    """Return a group whose ranks meet at ``store``; ``watch`` raises if they cannot."""
    made = Group(dist.PrefixStore("formed/", store), rank, size, timeout, name, watch=watch)
    made.base_store = store
    return made


# torch's tables of groups


def group_of(group: Any) -> Group:
    """Return a group of this backend; ``None``: the default group.

    Raises:
      ArgumentError: there is no default group, or the group has another backend.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        remedy = f'torch.distributed.init_process_group("{_BACKEND}")'
        raise ArgumentError.of("torch.distributed has no default group yet.", "group=None", remedy)
    if not isinstance(found, Group):
        remedy = f'a process group of the backend "{_BACKEND}"'
        raise ArgumentError.of("this is not a process group of crossreduce.", shown(found), remedy)
    return found


def _replaced(old: Group, made: Group, reformed: Reformed) -> Group:
    """Put a group in the place of an earlier one, which is destroyed."""
    made.reformed = reformed
    old.communicator.successor = made.communicator.token
    if old is dist.group.WORLD:
        dist.destroy_process_group()
        _install(made)
        return made
    numbers = [old.communicator.global_ranks[rank] for rank in reformed.members]
    made.communicator.global_ranks = tuple(numbers)
    dist.destroy_process_group(old)
    tables: Any = dist.distributed_c10d
    READY.append(made)
    name = f"{old.group_name} reformed"
    tables._new_process_group_helper(
        made.size(), made.rank(), numbers, dist.Backend(_BACKEND), made.base_store, name, timeout=made.timeout
    )
    tables._world.pg_group_ranks[made] = {number: rank for rank, number in enumerate(numbers)}
    return made


def _install(made: Group) -> None:
    """Make a group the default group."""
    if sys.excepthook.__qualname__.startswith("init_process_group."):  # torch's, which knows the earlier rank
        names = sys.excepthook.__code__.co_freevars
        cells = dict(zip(names, sys.excepthook.__closure__ or (), strict=True))
        sys.excepthook = cells["old_hook"].cell_contents
    READY.append(made)
    dist.init_process_group(
        _BACKEND, store=made.base_store, rank=made.rank(), world_size=made.size(), timeout=made.timeout
    )


# Joining


class _Joiner:
    """A process that wants to join a group of which it knows some ranks."""

    def __init__(self, group: str, places: Sequence[Place]) -> None:
        self._group, self._places = group, list(places)
        self._token = secrets.token_hex(8)
        self._offer: dict[str, Json] | None = None
        self._own = contact.listen()
        contact.register(self._token, self._answer)

    def close(self) -> None:
        """Answer no more."""
        contact.unregister(self._token)

    def _answer(self, request: dict[str, Json]) -> dict[str, Json]:
        if request["what"] == "admit":
            self._offer = request
        return {"ready": True}

    def join(self, timeout_s: float) -> Group:
        """Wait for a group, and form it together with its ranks."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._knock()
            until = min(deadline, time.monotonic() + _KNOCK_S)
            while self._offer is None and time.monotonic() < until:
                time.sleep(_PAUSE_S)
            offer, self._offer = self._offer, None
            if offer is None:
                continue
            try:
                made = self._formed(offer)
            except ReductionError:  # a rank was lost meanwhile; the others may form another group
                continue
            if self._is_valid(offer, made, deadline):
                made.reformed = Reformed((), 0)
                _install(made)
                return made
            made.close()
        problem = "the ranks of the group did not let this process join."
        raise CollectiveTimeout(message(problem, f"waited {timeout_s:g} s", "call grow on all ranks of the group"))

    def _knock(self) -> None:
        """Ask a rank of the group to let this process join.

        Raises:
          PeerLostError: none can be reached any more.
        """
        request = {"what": "join", "token": self._token, "place": self._own}
        ended = 0
        for place in list(self._places):
            try:
                answer = Peer(place).ask(self._group, request)
            except Ended:
                answer = {"unknown": True}
            if answer is None:
                continue
            if "unknown" in answer:
                ended += 1
            elif "moved" in answer:
                self._group = answer["moved"]
                return self._knock()
            else:
                self._places = [Place.read(each) for each in answer["members"]]
                return None
        if ended == len(self._places):
            problem = "no rank of the group is left that this process knows."
            raise PeerLostError(message(problem, f"{ended} ranks have ended", "a new invitation"))
        return None

    def _formed(self, offer: dict[str, Json]) -> Group:
        members = [Peer(Place.read(place)) for place in offer["members"]]
        leader, timeout = members[0], timedelta(seconds=offer["timeout_s"])

        def watch() -> None:
            if self._decision(offer, members) is False:
                raise PeerLostError(message("the ranks of the group have given up to form it.", "", "wait"))

        watch()  # finds an address of the lowest rank
        if not leader.known:
            raise PeerLostError(message("the rank that serves the store does not answer.", "", "wait"))
        store = connected(leader.known, offer["port"], timeout)
        return formed(store, offer["rank"], offer["size"], timeout, offer["name"], watch)

    def _decision(self, offer: dict[str, Json], members: Sequence[Peer], made: Group | None = None) -> bool | None:
        """Return whether the ranks have formed the group; ``None``: they have not decided yet."""
        request = {"what": "status", "number": offer["number"], "electors": []}
        unreached = 0
        for peer in members:
            try:
                answer = peer.ask(offer["token"], request)
            except Ended:
                answer = None
            if answer is None or "unknown" in answer:
                unreached += 1
            elif "moved" in answer:
                return made is not None and answer["moved"] == made.communicator.token
            elif answer["decided"] is not None:
                decision = read_decision(answer["decided"])
                return decision.flag and decision.kind == FORMED
            else:
                return None
        return False if unreached == len(members) else None

    def _is_valid(self, offer: dict[str, Json], made: Group, deadline: float) -> bool:
        """Wait until the ranks have decided whether the group is formed."""
        members = [Peer(Place.read(place)) for place in offer["members"]]
        while time.monotonic() < deadline + offer["timeout_s"]:
            decided = self._decision(offer, members, made)
            if decided is not None:
                return decided
            time.sleep(_PAUSE_S)
        return False
