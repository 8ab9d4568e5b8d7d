"""Cross-device ops that reduce along planned schedules.

Input: as for every ``CrossDeviceOps``, and the algorithm, the packing and the topology of an op. Output: ``Mirrored``.
"""

from __future__ import annotations

from typing import Any

from ..ops import ReduceOp
from ..options import DEFAULT, CommunicationOptions, algorithm_name, count
from ..packing import Packing
from ..topology import TopologyLike, topology_of
from ..values import Mirrored
from .cross_device_ops import BatchReducingOps, Pair
from .pipeline import broadcast_array, log_once, reduce_batch
from .validation import check_value


class AllReduceCrossDeviceOps(BatchReducingOps):
    """Reduces along a planned schedule, with tensors packed into few large buffers.

    Args:
      all_reduce_alg: "one_device", "hierarchical_copy", "ring", "halving_doubling", "recursive_doubling", "direct",
        "one_shot", "forest", "auto" or "nccl". If NCCL cannot be used, for example with a ``topology``, "nccl" plans
        "auto" and logs the reason once, at INFO.
      num_packs: the tensors of each dtype are joined and cut into this number of packs. If the algorithm has roots,
        each pack has another root. 0 switches packing off.
      agg_small_grads_max_bytes: without packs, neighbouring tensors of one dtype with at most this many bytes each are
        joined. 0 joins none.
      agg_small_grads_max_group: the largest number of tensors that are joined in this way.
      topology: the links that dense values may use: a ``Topology``, a machine's name or a file's path. Schedules are
        planned on it for the size of the values. ``None`` allows any links. The topology's devices are those of the
        values; if no names agree, they are matched by position. Sparse values and gathers are sent directly.
    Raises:
      ArgumentError: an unknown algorithm, a number that is negative or not an integer, an invalid topology.

    >>> import numpy as np
    >>> from crossreduce import PerReplica
    >>> value = PerReplica([np.full(3, 2.0**k) for k in range(3)])
    >>> AllReduceCrossDeviceOps("ring", num_packs=2).reduce("sum", value, value)[2]
    array([7., 7., 7.])
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        topology: TopologyLike | None = None,
    ) -> None:
        self._algorithm = algorithm_name(all_reduce_alg)
        self._packing = Packing(
            num_packs=count("num_packs", num_packs, "0 switches packing off"),
            small_bytes=count("agg_small_grads_max_bytes", agg_small_grads_max_bytes, "0 joins no small tensors"),
            small_group=count("agg_small_grads_max_group", agg_small_grads_max_group, "10"),
        )
        self._topology = None if topology is None else topology_of(topology)

    def __repr__(self) -> str:
        algorithm = "" if type(self) in (HierarchicalCopyAllReduce, NcclAllReduce) else f"{self._algorithm!r}, "
        topology = "" if self._topology is None else f", topology={self._topology!r}"
        return f"{type(self).__name__}({algorithm}num_packs={self._packing.num_packs}{topology})"

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: list[Pair], options: CommunicationOptions
    ) -> list[Mirrored]:
        jobs = [(check_value(reduce_op, value), devices) for value, devices in value_destination_pairs]
        packing = self._packing._replace(bytes_per_pack=options.bytes_per_pack)
        return reduce_batch(
            jobs, packing, self._planner(options), self._topology, None, self._prepared_calls(), options
        )

    def broadcast_implementation(self, tensor: Any, destinations: tuple[str, ...]) -> Mirrored:
        return broadcast_array(tensor, destinations, self._planner(DEFAULT), self._topology)

    def _planner(self, options: CommunicationOptions) -> str:
        """Return the algorithm of a call. For an op with "auto" or "nccl", the options may name another algorithm."""
        chosen = options.implementation if self._algorithm in ("auto", "nccl") else self._algorithm
        if chosen == "auto":
            chosen = self._algorithm
        if chosen == "nccl" and self._topology is not None:
            log_once('"nccl" plans "auto": NCCL does not plan on the topology of an op')
            return "auto"
        return chosen


AllReduceCrossDeviceOps.own_class = AllReduceCrossDeviceOps


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """Reduces inside groups of devices, then between the groups, and copies back the same way.

    It works for any number of devices, including odd ones. With a topology, the groups follow from its links, and the
    simulated time is never above that of ``one_device``. Without a topology, the groups are two halves of the devices.
    See ``crossreduce.planning.hierarchical_copy``.

    Args:
      num_packs: the number of trees that share the load; each has another root. 0 switches packing off: each tensor has
        one tree.
      topology: as for ``AllReduceCrossDeviceOps``.
    Raises:
      ArgumentError: ``num_packs`` is negative or not an integer.

    >>> import numpy as np
    >>> from crossreduce import PerReplica
    >>> value = PerReplica([np.float32(2**k) for k in range(9)])
    >>> HierarchicalCopyAllReduce(num_packs=4).reduce("sum", value, "cpu:0")[0]
    array(511., dtype=float32)
    """

    def __init__(self, num_packs: int = 1, topology: TopologyLike | None = None) -> None:
        super().__init__("hierarchical_copy", num_packs, topology=topology)


class NcclAllReduce(AllReduceCrossDeviceOps):
    """Reduces with NCCL if NCCL can be used. Otherwise it plans "auto" and logs the reason once, at INFO.

    NCCL reduces torch tensors if each is on a different GPU of this process: see docs/algorithms.md. If the call's
    options have an ``implementation`` other than "auto" and "nccl", that algorithm is used instead. If NCCL fails, the
    call raises a ``BackendError``, and the content of ``out`` is undefined.

    Args:
      num_packs: as for ``AllReduceCrossDeviceOps``; NCCL ignores it.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__("nccl", num_packs)
