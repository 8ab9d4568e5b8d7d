"""Cross-device reductions: reduce, batch-reduce and broadcast the per-replica arrays of NumPy,
PyTorch, JAX, TensorFlow and CuPy across devices, along a verified schedule.

>>> import numpy as np
>>> import crossreduce as cr
>>> reduced = cr.all_reduce([{"loss": 1.0}, {"loss": 2.0}, {"loss": 6.0}], "mean")
>>> [tree["loss"].item() for tree in reduced]
[3.0, 3.0, 3.0]
"""

from . import threads  # noqa: F401 - first, since it refuses subinterpreters before NumPy is imported
from .errors import (
    ArgumentError,
    AxisError,
    BackendError,
    CollectiveTimeout,
    ContextError,
    DeviceError,
    DriverError,
    ExcludedError,
    MismatchError,
    PeerLostError,
    PlanError,
    ReductionError,
    ScheduleError,
    StalledError,
    UnsupportedError,
)
from .kernels import empty_cache, keep_memory, memory_usage
from .observe import logs
from .ops import ReduceOp
from .options import CollectiveHints, CommunicationOptions
from .planning import Bound, GroupsBound, GroupsPlan, Plan, SeparatePlans, bound, mesh_groups, plan, plan_groups
from .reduction.all_reduce_ops import AllReduceCrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce
from .reduction.cross_device_ops import CrossDeviceOps, ReductionToOneDevice
from .reduction.trees import all_reduce
from .schedule import (
    Chunk,
    Costs,
    GeneratedSchedule,
    Route,
    Schedule,
    SharedLimit,
    Simulation,
    Step,
    both_directions,
    simulate,
    verify,
)
from .strategy import (
    DistributedDataset,
    MirroredStrategy,
    ReplicaContext,
    ValueContext,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from .topology import Link, Switch, Symmetry, SymmetryGenerator, Topology
from .values import IndexedSlices, Mirrored, PerReplica

__version__ = "0.1.0"
logs.configure()

__all__ = [
    "AllReduceCrossDeviceOps", "ArgumentError", "AxisError", "BackendError", "Bound", "Chunk", "CollectiveHints",
    "CollectiveTimeout", "CommunicationOptions", "ContextError", "Costs", "CrossDeviceOps", "DeviceError",
    "DistributedDataset", "DriverError", "ExcludedError", "GeneratedSchedule", "GroupsBound", "GroupsPlan",
    "HierarchicalCopyAllReduce", "IndexedSlices", "Link", "Mirrored", "MirroredStrategy", "MismatchError",
    "NcclAllReduce", "PeerLostError", "PerReplica", "Plan", "PlanError", "ReduceOp", "ReductionError",
    "ReductionToOneDevice", "ReplicaContext", "Route", "Schedule", "ScheduleError", "SeparatePlans", "SharedLimit",
    "Simulation", "StalledError", "Step", "Switch", "Symmetry", "SymmetryGenerator", "Topology", "UnsupportedError",
    "ValueContext", "Variable", "VariableAggregation", "VariableSynchronization", "all_reduce", "both_directions",
    "bound", "empty_cache", "get_replica_context", "get_strategy", "has_strategy", "in_cross_replica_context",
    "keep_memory", "memory_usage", "mesh_groups", "plan", "plan_groups", "simulate", "verify",
]  # fmt: skip
