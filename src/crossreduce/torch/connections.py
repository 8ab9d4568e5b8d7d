"""Connects the ranks of a process group, notices ranks that use gloo instead, and ends the group with its threads.

Input: a store for the rendezvous. Output: a ``Communicator``, and an object that keeps the timeout.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from _crossreduce_torch import NO_ADDRESS, REASON, VARIABLE

from ..errors import ArgumentError, BackendError, MismatchError, encoded, rank_list
from ..ranks.communicator import Communicator
from ..ranks.connections.rendezvous import NEW, PAUSES_S, ConnectionStore, Origin
from ..ranks.membership import shared_failure
from ..ranks.transports.base import Links, Transport
from ..ranks.transports.choice import open_transport
from ..ranks.transports.gloo import settings
from ..ranks.transports.tunnel import Tunnel
from ..ranks.transports.with_messages import WithMessages
from .op_queue import OpQueue
from .options import read_pg_options
from .rendezvous import TorchRendezvous, lost_store_errors

_LOOK_S: Final = 1.0  # between two looks whether other ranks use gloo
_COME_S: Final = 5.0  # how long a rank waits for others before it ends their wait in gloo
_MOST_LOOKED: Final = 32  # ranks in one look, since each rank asks the store for each of them
_MADE: Final[weakref.WeakKeyDictionary[Communicator, Counter[str]]] = weakref.WeakKeyDictionary()  # groups, by name
_LEAVE_S: Final = 1.0  # how long ``close`` waits for pending ops, when a group is garbage collected or a process ends


def connect(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    global_ranks: Sequence[int],
    options: Any,
    origin: Origin = NEW,
    has_messages: bool = True,
    unique: str = "",
) -> tuple[Any, Communicator, bool]:
    """Connect the ranks of a group. Return torch's settings (see there), the communicator, and whether it is exact.

    Ranks of different hosts exchange data over connections of rail leaders. If ``has_messages``, every two of them also
    have a connection for messages. ``global_ranks``: the ranks' numbers in the world, for errors; empty if the group is
    the world. ``options``: see ``read_pg_options``; if they are invalid on one rank, all ranks raise its error.
    ``unique``: see ``own_part``.
    """
    seconds, is_beyond = timeout.total_seconds(), origin.is_beyond

    def connected(cancelled: threading.Event, hosts: tuple[tuple[int, ...], ...], transport: str) -> Transport:
        def links(kind: str, everyone: bool, without: Sequence[int] = ()) -> Links:
            connections = ConnectionStore(dist.PrefixStore(kind, store), rank, cancelled, is_beyond=is_beyond)
            return connections.connect(hosts, transport, everyone, without)

        if not has_messages:
            return open_transport(transport, links("tcp/", everyone=False))
        messages = open_transport(transport, links("messages/", everyone=True))
        messages = Tunnel(messages) if messages.connections is None else messages
        try:
            carrier = open_transport(transport, links("tcp/", False, messages.unreached))
        except BaseException:
            messages.close()
            raise
        return WithMessages(carrier, messages)

    own = dist.PrefixStore("crossreduce/", store)
    board = origin.parent[0].memory.board(origin.parent[1]) if origin.parent else None
    rendezvous = TorchRendezvous(own, rank, size, seconds, global_ranks, origin.watch, unique, board)
    try:
        exact, wanted = read_pg_options(options)
        kept = settings(rank, size, timeout)
    except (ArgumentError, RuntimeError) as error:
        who = f"rank {global_ranks[rank] if global_ranks else rank}"
        raise shared_failure(rendezvous, error, who, alone=True) from error
    communicator = Communicator(
        rendezvous, connected, name=name, timeout_s=seconds, global_ranks=global_ranks, wanted=wanted
    )
    return kept, communicator, exact


def parent(group: Any, ranks: Sequence[int], key: str = "") -> tuple[Communicator, Sequence[int], str] | None:
    """Return ``Origin.parent`` of a group of ``ranks`` of ``group``, or ``None`` if these are empty: then ranks may be
    in other jobs. ``group`` must be of this backend, and this process must have made it."""
    communicator = getattr(group, "communicator", None)
    if not ranks or not isinstance(communicator, Communicator):
        return None
    return (communicator, ranks, key) if communicator.peers[communicator.rank].pid == os.getpid() else None


def own_part(store: Any, rank: int, name: str, origin: Origin) -> tuple[Any, str]:
    """Return a part of a group's store that no other group has, also if it had the name ``name`` and was destroyed.

    The second result is a name that no other group has, the same on all ranks, or "" if the store must find one: all
    ranks of a group make the groups of a name from it in the same order.
    """
    with lost_store_errors(store):
        if origin.parent is None:
            return dist.PrefixStore(f"{store.add(f'turn {rank}', 1)}/", store), ""
        communicator, _, key = origin.parent
        name += key
        counts = _MADE.setdefault(communicator, Counter())
        counts[name] += 1
        unique = f"{communicator.token} {counts[name]} {name}"
        store.set(f"turn {rank}", "")  # not awaited; see ``end_gloo``
        return dist.PrefixStore(f"{unique}/", store), unique


def require_place(group: Any, rank: int, size: int) -> None:
    """Raise a ``BackendError`` if torch reports another rank or size of a group, with which programs would be wrong."""
    if (group.rank(), group.size()) != (rank, size):
        group.communicator.abort()
        problem = (
            f"torch {torch.__version__} reports another rank or size of a group than those with which it was made."
        )
        given = f"rank {group.rank()} of {group.size()} for rank {rank} of {size}"
        raise BackendError.of(problem, given, "torch 2.4, or 2.13 to 2.15; or gloo")


def close(queue: OpQueue, communicator: Communicator) -> None:
    """End a group that is no longer used, and its pending ops. In a forked process this does nothing."""
    if not queue.is_forked and queue.close(_LEAVE_S):
        communicator.close()
    elif not queue.is_forked:
        communicator.abort()
        queue.close(_LEAVE_S)


def gloo_check(store: Any, rank: int, size: int, global_ranks: Sequence[int]) -> Callable[[], None]:
    """Return a function that raises a ``MismatchError`` if other ranks make a group with gloo.

    ``store``: the store of the group, in which gloo publishes where each rank listens. ``global_ranks``: the ranks'
    numbers in errors, by default 0, 1, ... Raise an ``ArgumentError`` if ``rank`` is not below ``size``.
    """
    if not 0 <= rank < size:
        raise ArgumentError.of("the rank must be below the world size.", f"rank {rank}, world size {size}")
    numbers, places = tuple(global_ranks) or range(size), itertools.cycle(range(size))
    look_at = time.monotonic() + _LOOK_S

    def check() -> None:
        nonlocal look_at
        if (now := time.monotonic()) < look_at:
            return
        look_at = now + _LOOK_S
        gloo: list[int] = []
        with contextlib.suppress(RuntimeError), lost_store_errors(store):  # the caller notices a lost store, too
            looked = itertools.islice(places, min(size, _MOST_LOOKED))
            used = [place for place in looked if _uses_gloo(store, place)]
            published = [numbers[place] for place in used if not store.check([f"ends {place}"])]  # see ``end_gloo``
            if published and not _uses_gloo(store, rank):  # else an earlier group of this name may have used gloo
                gloo = published
        if gloo:
            problem = f"not all ranks make the group with the same backend: gloo on {rank_list(gloo)}."
            remedy = f"the same backend, and the same {VARIABLE}, on all ranks"
            error = MismatchError.of(problem, f"crossreduce on rank {numbers[rank]}", remedy)
            end_gloo(store, rank, size, error)
            raise error

    return check


def _uses_gloo(store: Any, rank: int) -> bool:
    """Return whether a rank has published where it listens with gloo."""
    key = f"0/{rank}"
    return bool(store.check([key])) and bytes(store.get(key)) != NO_ADDRESS


def end_gloo(store: Any, rank: int, size: int, error: ArgumentError) -> None:
    """End the wait of other ranks in gloo for this rank, which does not use gloo because of ``error``.

    A rank in gloo waits there until all ranks have connected to each other. So all ranks connect as soon as all have
    come, and then the others find the reason in ``store``. If the library is not installed there, their group fails
    when they use it. If ranks do not come, the others get an invalid address, and their group fails at once.
    """
    deadline, missing = time.monotonic() + _COME_S, list(range(size))
    with contextlib.suppress(RuntimeError):  # a lost store, which the others notice, or a rank that has not connected
        store.set(REASON, encoded(error))
        while missing and time.monotonic() < deadline:
            missing = [place for place in missing if not (_uses_gloo(store, place) or store.check([f"turn {place}"]))]
            time.sleep(PAUSES_S[1])
        if missing:
            store.compare_set(f"0/{rank}", b"", NO_ADDRESS)
        elif any(_uses_gloo(store, place) for place in range(size)) and not store.check([f"ends {rank}"]):
            store.set(f"ends {rank}", b"")  # this rank only ends the wait of others
            gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=_COME_S))
            time.sleep(_LOOK_S)  # others may still connect to it, and have to read the store, which may run here
            del gloo
