"""The strategy and the replica context of the current call; outside all strategies, those of a single replica.

Input: the current context. Output: a ``MirroredStrategy`` or a ``ReplicaContext``. No context is entered here.
"""

from __future__ import annotations

from functools import cache

from .contexts import ReplicaContext, current
from .mirrored import MirroredStrategy


def get_strategy() -> MirroredStrategy:
    """Return the strategy of this call; outside all strategies, a strategy of a single replica on ``cpu:0``."""
    here = current()
    if here is None:
        return _default_strategy()
    assert isinstance(here.strategy, MirroredStrategy)
    return here.strategy


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica that makes this call; ``None`` in the cross-replica context.

    Outside all strategies it is the context of a single replica, so code for replicas runs there, too.

    >>> float(get_replica_context().all_reduce("sum", 3.0))
    3.0
    """
    here = current()
    return _default_replica() if here is None else here.replica


@cache
def _default_strategy() -> MirroredStrategy:
    strategy = MirroredStrategy(1)
    strategy._is_default = True
    return strategy


@cache
def _default_replica() -> ReplicaContext:
    return ReplicaContext(_default_strategy(), 0, None)
