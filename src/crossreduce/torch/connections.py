"""Connects the ranks of a process group, and ends the group with its threads.

Input: a store for the rendezvous. Output: a ``Communicator``, and an object that keeps the timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from ..errors import ArgumentError
from ..ranks.communicator import Communicator
from ..ranks.connections.rendezvous import NEW, ConnectionStore, Origin
from ..ranks.membership import shared_failure
from ..ranks.transports.base import Links, Transport
from ..ranks.transports.choice import open_transport
from ..ranks.transports.gloo import settings
from ..ranks.transports.tunnel import Tunnel
from ..ranks.transports.with_messages import WithMessages
from .op_queue import OpQueue
from .options import read_pg_options
from .rendezvous import TorchRendezvous

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
) -> tuple[Any, Communicator, bool]:
    """Connect the ranks of a group. Return torch's settings (see there), the communicator, and whether it is exact.

    Ranks of different hosts exchange data over connections of rail leaders. If ``has_messages``, every two of them also
    have a connection for messages. ``global_ranks``: the ranks' numbers in the world, for errors; empty if the group is
    the world. ``options``: see ``read_pg_options``; if they are invalid on one rank, all ranks raise its error.
    """
    seconds = timeout.total_seconds()

    def connected(cancelled: threading.Event, hosts: tuple[tuple[int, ...], ...], transport: str) -> Transport:
        def links(kind: str, everyone: bool, without: Sequence[int] = ()) -> Links:
            connections = ConnectionStore(dist.PrefixStore(kind, store), rank, cancelled, is_beyond=origin.is_beyond)
            return connections.connect(hosts, transport, everyone, without)

        if len(hosts) == 1 or not has_messages:
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
    rendezvous = TorchRendezvous(own, rank, size, seconds, global_ranks, origin.watch)
    try:
        exact, wanted = read_pg_options(options)
        kept = settings(timeout)
    except (ArgumentError, RuntimeError) as error:
        who = f"rank {global_ranks[rank] if global_ranks else rank}"
        raise shared_failure(rendezvous, error, who, alone=True) from error
    communicator = Communicator(
        rendezvous, connected, name=name, timeout_s=seconds, global_ranks=global_ranks, wanted=wanted
    )
    return kept, communicator, exact


def close(queue: OpQueue, communicator: Communicator) -> None:
    """End a group that is no longer used, and its pending ops. In a forked process this does nothing."""
    if not queue.is_forked and queue.close(_LEAVE_S):
        communicator.close()
    elif not queue.is_forked:
        communicator.abort()
        queue.close(_LEAVE_S)
