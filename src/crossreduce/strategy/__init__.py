"""``MirroredStrategy``: n replicas of a function, each in a thread of its own, that meet to reduce.

From the top: ``mirrored.py`` is the strategy; ``extended.py``, ``variables.py``, ``splitting.py``: what it makes;
``contexts.py``: what a replica sees of it, and which context a call stands in; ``crew.py``: threads, meetings,
failures; ``regroup.py``: n trees into one of per-replica values, and back. No framework is imported here:
``ReplicaFramework`` is what one has to say.
"""

from .contexts import ReplicaContext
from .extended import Extended
from .mirrored import (
    MirroredStrategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
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
