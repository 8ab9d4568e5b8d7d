"""Connects the ranks of a process group by a communicator and by gloo, and ends the group with its threads.

Input: a store for the rendezvous. Output: a ``Communicator`` and a ``ProcessGroupGloo`` of the same ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from ..errors import ArgumentError
from ..ranks.communicator import Communicator
from ..ranks.connections.rendezvous import NEW, ConnectionStore, Origin, interfaces
from ..ranks.membership import shared_failure
from ..ranks.transports.base import Transport
from ..ranks.transports.choice import open_transport
from ..ranks.transports.gloo import BesideGloo, process_group
from .op_queue import OpQueue
from .options import read_pg_options
from .rendezvous import CancellableStore, TorchRendezvous

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
) -> tuple[Any, Communicator, bool]:
    """Connect the ranks of a group. Return gloo's process group, the communicator, and whether the group is exact.

    Ranks of different hosts exchange data over TCP connections of their own, not over gloo's. gloo connects after the
    rendezvous of the ranks, since it would wait for a missing rank 5 times as long, and could not name it. If some
    ranks cannot connect to each other, gloo connects two ranks only when they exchange their first message.
    ``global_ranks``: the ranks' numbers in the world, for errors; empty if the group is the world. ``options``: see
    ``read_pg_options``; if they are invalid on one rank, all ranks raise its error.
    """
    seconds, gloo = timeout.total_seconds(), []

    def connected(cancelled: threading.Event, hosts: tuple[tuple[int, ...], ...], transport: str) -> Transport:
        connections = ConnectionStore(dist.PrefixStore("tcp/", store), rank, cancelled, is_beyond=origin.is_beyond)
        links = connections.connect(hosts, transport)
        carrier = open_transport(transport, links)
        lazy = len(hosts) > 1 and connections.any_of_all(bool(links.unreached), size)
        inner = CancellableStore(dist.PrefixStore("gloo/", store), cancelled)
        alone = len(hosts) == 1
        gloo.append(process_group(inner, rank, size, timeout, interfaces(), is_one_host=alone, lazy=lazy))
        return BesideGloo(carrier, gloo[0], inner, lazy=lazy)

    own = dist.PrefixStore("crossreduce/", store)
    rendezvous = TorchRendezvous(own, rank, size, seconds, global_ranks, origin.watch)
    try:
        exact, wanted = read_pg_options(options)
    except ArgumentError as error:
        who = f"rank {global_ranks[rank] if global_ranks else rank}"
        raise shared_failure(rendezvous, error, who, alone=True) from error
    communicator = Communicator(
        rendezvous, connected, name=name, timeout_s=seconds, global_ranks=global_ranks, wanted=wanted
    )
    return gloo[0], communicator, exact


def close(queue: OpQueue, communicator: Communicator, messages: OpQueue | None = None) -> None:
    """End a group that is no longer used, and its pending ops. In a forked process this does nothing."""
    if messages is not None and not messages.is_forked and not messages.close(0):  # a message is still waited for
        communicator.interrupt()
        messages.close(_LEAVE_S)
    if not queue.is_forked and queue.close(_LEAVE_S):
        communicator.close()
    elif not queue.is_forked:
        communicator.abort()
        queue.close(_LEAVE_S)
