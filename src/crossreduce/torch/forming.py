"""Groups of torch that are formed again: what ``ranks.survival.forming`` needs to make them.

Input: an earlier group, or a store that a rank of the new one serves. Output: a ``Forming``, or the new ``Group``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch.distributed as dist

from ..ranks.connections.rendezvous import Origin, StoreRendezvous
from ..ranks.survival.forming import Forming, GroupKind, Settings
from .group import Group
from .options import Options
from .peer_store import PeerStore

KIND: Final = "torch"


def kind() -> GroupKind[Group]:
    """Return what makes torch's groups and their stores."""
    return GroupKind(KIND, PeerStore, formed)


def forming(old: Group, timeout_s: float, *, grows: bool) -> Forming[Group]:
    """Return what forms a group of ranks of ``old``, and of processes that want to join if ``grows``."""
    settings = Settings(old.timeout.total_seconds(), old.communicator.name, old.exact)
    return Forming(old.communicator, kind(), settings, timeout_s, grows=grows)


def _nothing() -> None:
    """Watch nothing."""


def formed(store: PeerStore, rank: int, size: int, settings: Settings, origin: Origin) -> Group:
    """Return a group whose ranks meet at ``store``."""
    timeout = timedelta(seconds=settings.timeout_s)
    store.set_timeout(timeout)
    part = dist.PrefixStore("formed/", store)
    made = Group(part, rank, size, timeout, settings.name, options=Options(settings.exact), origin=origin)
    made.base_store, store.watch = store, _nothing
    assert isinstance(made.communicator.rendezvous, StoreRendezvous)
    made.communicator.rendezvous.watch = _nothing  # ``origin`` refers to the earlier group
    return made
