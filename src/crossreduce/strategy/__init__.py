"""``MirroredStrategy``: n replicas of a function, one thread per replica, that reduce together.

``replica_group.py`` runs the threads. ``regroup.py`` combines n trees into one tree of per-replica values, and splits
it again. ``base.py`` has a strategy's devices and ops. ``contexts.py`` has the current context, and a replica's view of
its strategy. ``splitting.py``, ``variables.py`` and ``extended.py`` are parts of the strategy in ``mirrored.py``. Each
file imports only files that are listed before it, and uses frameworks only through the protocols of ``frameworks``.
"""

from .contexts import ReplicaContext, has_strategy, in_cross_replica_context
from .extended import Extended
from .mirrored import MirroredStrategy, get_replica_context, get_strategy
from .splitting import DistributedDataset, ValueContext
from .variables import Variable, VariableAggregation, VariableSynchronization

__all__ = [
    "DistributedDataset",
    "Extended",
    "MirroredStrategy",
    "ReplicaContext",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
