"""``MirroredStrategy``: n replicas of a function, one thread per replica, that reduce together.

Files, each importing only the ones before it: ``replica_group.py``: threads, waiting and failures; ``regroup.py``: n
trees into one tree of per-replica values, and back; ``base.py``: a strategy's devices and ops; ``contexts.py``: the
current context, and a replica's view of its strategy; ``splitting.py``, ``variables.py`` and ``extended.py``: parts of
a strategy; ``mirrored.py``: the strategy, and the default one outside all strategies. Frameworks are used only
through the protocols of ``frameworks``.
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
