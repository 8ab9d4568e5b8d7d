"""The cross-device ops: reduce, batch-reduce, broadcast and gather per-replica values.

In: ``PerReplica`` values and where their results go.  Out: ``Mirrored`` values. Each call checks all
of its arguments before it touches an array; then ``pipeline.py`` packs, plans, executes and unpacks.

The names and the contract are those of TensorFlow's ``tf.distribute.CrossDeviceOps`` and its
subclasses; what they get wrong is put right (see docs/contract.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .autograph import unconverted
from .devices import canonical
from .errors import ArgumentError, MismatchError, ReductionError, UnsupportedError, message, shown
from .frameworks import Array, Sparse, framework_of
from .ops import ReduceOp
from .options import CommunicationOptions, algorithm_name, count
from .packing import Packing
from .pipeline import Job, broadcast_array, log_once, reduce_batch, reduce_to_one
from .topology import Topology
from .validation import (
    check_array,
    check_out,
    check_overlap,
    check_pairs,
    check_value,
    in_pair,
    per_replica,
    place,
    read_op,
    read_options,
)
from .values import DistributedValues, Mirrored, PerReplica, describe

Pair = tuple[PerReplica, tuple[str, ...]]


class CrossDeviceOps:
    """The base of all cross-device ops: it checks arguments and calls the implementations.

    A subclass of your own implements ``reduce_implementation``, and may implement
    ``batch_reduce_implementation`` (by default one ``reduce_implementation`` after another),
    ``broadcast_implementation`` and ``gather_implementation`` (by default copies). They receive checked
    arguments: a ``ReduceOp``, ``PerReplica`` values, destinations as a tuple of canonical device
    names, and ``CommunicationOptions``; they return a ``Mirrored`` whose devices are those
    destinations (a list of them, for a batch). Kind and devices of what they return are checked; its
    shape, and whether it shares memory, is theirs to get right.

    >>> class First(CrossDeviceOps):
    ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
    ...         return self.broadcast_implementation(per_replica_value[0], destinations)
    >>> import numpy as np
    >>> value = PerReplica([np.ones(2), np.zeros(2)])
    >>> First().reduce("sum", value, value)[1]
    array([1., 1.])
    """

    @unconverted
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        out: DistributedValues | None = None,
    ) -> Mirrored:
        """Reduce one value and put the result on all destinations.

        Args:
          reduce_op: a ``ReduceOp`` or its name.
          per_replica_value: ``PerReplica`` or ``Mirrored``; a single array counts as one replica's.
          destinations: distributed values (their devices), a device's name, or an array, variable or
            parameter (its device). It is never written.
          options: hints for this call.
          out: arrays to write the result into, one a destination, in their order: NumPy arrays or torch
            tensors like the result, writable, in C order. They may be the value's own components (in place), and
            share memory with nothing else here.
        Returns:
          The result, one component a destination, in the destinations' order: the very arrays of ``out``,
          where it is given. The shape is that of the
          components; the dtype too, except that the mean of integers is a float. A sparse value gives
          sparse components.
        Raises:
          ArgumentError: an op, value, destination or option that is none.
          DeviceError: a device that cannot be read, or is not here.
          MismatchError: replicas that differ in shape, dtype, framework or sparseness' kind.
          UnsupportedError: the op is not defined for the dtype; arrays of ``out`` that cannot be written into.
          PlanError: the topology has no way for the data.

        >>> import numpy as np
        >>> value = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
        >>> ReductionToOneDevice().reduce("mean", value, "cpu:0")[0]
        array([2., 3.])
        >>> _ = ReductionToOneDevice().reduce("sum", value, value, out=value)
        >>> value[1]
        array([4., 6.])
        """
        op = read_op(reduce_op)
        hints = read_options(options)
        value = check_value(op, per_replica(per_replica_value)).with_out(None)
        devices = place(destinations)
        value.framework.require(devices)
        if out is None:
            result = self.reduce_implementation(op, value, devices, hints)
            return _delivered(result, devices, "reduce_implementation")
        found = check_out(out, value, devices)
        into = [(value.with_out(found, fresh=value is not per_replica_value), devices)]
        given = into[0][0] if self._ready(into) else into[0][0].with_out(None)
        result = self.reduce_implementation(op, given, devices, hints)
        return _written([_delivered(result, devices, "reduce_implementation")], into)[0]

    @unconverted
    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        out: Iterable[DistributedValues] | None = None,
    ) -> list[Mirrored]:
        """Reduce several values, each to its own destinations; tensors may share packs.

        Args:
          reduce_op: a ``ReduceOp`` or its name.
          value_destination_pairs: pairs of what ``reduce`` takes.
          options: hints for this call.
          out: for each pair what ``reduce`` takes.
        Returns:
          One result a pair, in the order of the pairs; all of them, or an error and none.
        Raises:
          As ``reduce``; and ArgumentError for an element that is no pair, naming its place, or an ``out``
          of another length.

        >>> import numpy as np
        >>> value = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
        >>> HierarchicalCopyAllReduce().batch_reduce("sum", [(value, value), (value, "cpu:0")])[0][1]
        array([4., 6.])
        """
        op = read_op(reduce_op)
        hints = read_options(options)
        pairs: list[Job] = []
        unchecked = check_pairs(value_destination_pairs)
        outs = _outs(out, len(unchecked))
        for number, (value, destinations) in enumerate(unchecked):
            try:
                checked = check_value(op, per_replica(value)).with_out(None)
                devices = checked.devices if destinations is value else place(destinations)
                if devices is not checked.devices:
                    checked.framework.require(devices)
                if out is not None:
                    found = check_out(outs[number], checked, devices)
                    checked = checked.with_out(found, fresh=checked is not value)
            except ReductionError as error:
                error.prefix(f"pair {number}", number)
                raise
            pairs.append((checked, devices))
        given: list[Any] = list(pairs)
        if out is not None and not self._ready(pairs):
            given = [(checked.with_out(None), devices) for checked, devices in pairs]
        results = self.batch_reduce_implementation(op, given, hints)
        if not isinstance(results, list) or len(results) != len(pairs):
            raise UnsupportedError(
                message(
                    f"{type(self).__name__}.batch_reduce_implementation must return a list of one Mirrored a pair.",
                    f"{shown(results)} for {len(pairs)} pairs",
                )
            )
        delivered = [
            result
            if type(result) is Mirrored and result.devices == devices
            else _delivered(result, devices, "batch_reduce_implementation")
            for result, (_, devices) in zip(results, pairs, strict=True)
        ]
        return delivered if out is None else _written(delivered, pairs)

    @unconverted
    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copy one array to all destinations.

        Args:
          tensor: an array, dense or sparse, or a number.
          destinations: as for ``reduce``.
        Returns:
          One copy a destination, in the destinations' order; none shares memory with ``tensor``.
        Raises:
          ArgumentError: ``tensor`` is no array (a ``PerReplica`` is none), or destinations are none.
          DeviceError: as for ``reduce``.

        >>> import numpy as np
        >>> CrossDeviceOps().broadcast(np.arange(3), PerReplica([0, 0]))[1]
        array([0, 1, 2])
        """
        if isinstance(tensor, DistributedValues):
            raise ArgumentError(
                message("broadcast takes one array.", shown(tensor), "one of its components, such as value[0]")
            )
        framework = check_array(tensor)
        devices = place(destinations)
        framework.require(devices)
        return _delivered(self.broadcast_implementation(tensor, devices), devices, "broadcast_implementation")

    @unconverted
    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Mirrored:
        """Join the components along an axis, in the order of the replicas, and put that on all destinations.

        Args:
          per_replica_value: as for ``reduce``; components may differ in size along ``axis``. Sparse ones
            are made dense first.
          destinations: as for ``reduce``.
          axis: from ``-ndim`` to ``ndim - 1``.
          options: hints for this call.
        Returns:
          One copy a destination.
        Raises:
          ArgumentError: no such axis, 0-d components.
          MismatchError: components that differ in another axis, in dtype or framework.

        >>> import numpy as np
        >>> value = PerReplica([np.array([[1, 2]]), np.array([[3, 4], [5, 6]])])
        >>> CrossDeviceOps().gather(value, "cpu:0", axis=0)[0].tolist()
        [[1, 2], [3, 4], [5, 6]]
        """
        hints = read_options(options)
        value = check_value(None, per_replica(per_replica_value), axis=axis)
        devices = place(destinations)
        value.framework.require(devices)
        result = self.gather_implementation(value, devices, value.axis, hints)
        return _delivered(result, devices, "gather_implementation")

    def _ready(self, pairs: list[Job]) -> bool:
        """Return whether the implementation writes into ``out`` itself; where it does not, results are copied there.

        A user's own does not hear of ``out``: it may reduce a value twice. What is wrong with ``out`` is found before
        anything is written; ``reduce_batch`` looks for itself.
        """
        kind = type(self)
        batch = getattr(kind, "batch_reduce_implementation", None)
        own = kind.reduce_implementation is _BatchReducing.reduce_implementation
        if own and batch is AllReduceCrossDeviceOps.batch_reduce_implementation:
            return True
        check_overlap(pairs)
        return own and batch is ReductionToOneDevice.batch_reduce_implementation

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: tuple[str, ...],
        options: CommunicationOptions,
    ) -> Mirrored:
        """Reduce one checked value; a subclass must say how."""
        raise NotImplementedError(
            message(
                f"{type(self).__name__} does not say how to reduce.",
                "no reduce_implementation",
                "implement it, or use AllReduceCrossDeviceOps, HierarchicalCopyAllReduce or ReductionToOneDevice",
            )
        )

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: list[Pair], options: CommunicationOptions
    ) -> list[Mirrored]:
        """Reduce checked values; by default one after another."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: tuple[str, ...]) -> Mirrored:
        """Copy an array to all destinations; by default straight to each."""
        return broadcast_array(tensor, destinations, "one_device", None)

    def gather_implementation(
        self, per_replica_value: PerReplica, destinations: tuple[str, ...], axis: int, options: CommunicationOptions
    ) -> Mirrored:
        """Join checked components along a non-negative axis; by default on the first destination."""
        value = check_value(None, per_replica_value, axis=axis)
        framework, main = value.framework, destinations[0]
        whole = framework.concat([framework.to_device(x, main) for x in value.arrays], axis)
        return self.broadcast_implementation(whole, destinations)


class _BatchReducing(CrossDeviceOps):
    """An op for which one value is a batch of one."""

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: tuple[str, ...],
        options: CommunicationOptions,
    ) -> Mirrored:
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]


class ReductionToOneDevice(_BatchReducing):
    """Copies all components to one device, reduces them there, and copies the result to the destinations.

    Args:
      reduce_to_device: the device to reduce on; ``None``: the first destination. It may be neither
        source nor destination.
      accumulation_fn: takes the list of components, all on that device, and returns their sum or what
        stands for it, in the same shape; ``None``: adds them in the order of the replicas. It gets
        copies. A mean divides what it returns by the number of components. It is not asked for sparse
        values, whose slices are only listed together.
    Raises:
      ArgumentError: ``accumulation_fn`` cannot be called, or returned another shape.
      DeviceError: ``reduce_to_device`` cannot be read.

    >>> import numpy as np
    >>> value = PerReplica([np.array([1.0, 5.0]), np.array([3.0, 4.0])])
    >>> ReductionToOneDevice(accumulation_fn=lambda xs: np.maximum(*xs)).reduce("sum", value, value)[1]
    array([3., 5.])
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[Array]], Array] | None = None,
    ) -> None:
        self._root = None if reduce_to_device is None else canonical(reduce_to_device)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise ArgumentError(
                message("accumulation_fn must be a function of a list of arrays.", shown(accumulation_fn), "sum")
            )
        self._accumulate = accumulation_fn

    def __repr__(self) -> str:
        given = {"reduce_to_device": self._root, "accumulation_fn": self._accumulate}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items() if v is not None)})"

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: list[Pair], options: CommunicationOptions
    ) -> list[Mirrored]:
        jobs = [(check_value(reduce_op, value), devices) for value, devices in value_destination_pairs]
        if self._root is not None:
            for job in jobs:
                job[0].framework.require((self._root,))
        if self._accumulate is None:
            return reduce_to_one(jobs, self._root)
        if reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ArgumentError(
                message(
                    "accumulation_fn stands for the sum, so the op must be sum or mean.",
                    shown(reduce_op),
                    "ReductionToOneDevice() without accumulation_fn",
                )
            )
        return [
            reduce_to_one([job], self._root)[0] if job[0].sparse else self._accumulated(reduce_op, job) for job in jobs
        ]

    def _accumulated(self, op: ReduceOp, job: Job) -> Mirrored:
        """Reduce one value by the caller's own function."""
        assert self._accumulate is not None
        value, destinations = job
        framework, root = value.framework, self._root or destinations[0]
        total = self._accumulate([framework.clone(framework.to_device(x, root)) for x in value.arrays])
        if framework_of(total) is not framework:
            raise MismatchError(
                message(
                    "accumulation_fn must return an array of the framework it was given.",
                    shown(total),
                    f"a {framework.name} array",
                )
            )
        total = framework.array(total)
        if isinstance(total, Sparse) or framework.spec(total).shape != value.spec.shape:
            raise MismatchError(
                message(
                    "accumulation_fn must return one array of the components' shape.",
                    shown(total) if isinstance(total, Sparse) else str(framework.spec(total)),
                    f"an array like {value.spec}",
                )
            )
        dtype = framework.spec(total).dtype
        numbers = framework.numbers(op, dtype, len(value))
        result = value.numbers.result if dtype in (value.spec.dtype, value.numbers.accumulator) else numbers.result
        whole = framework.finish(total, numbers._replace(result=result))
        return broadcast_array(whole, destinations, "one_device", None)


class AllReduceCrossDeviceOps(_BatchReducing):
    """Reduces along a planned schedule, with tensors packed into few large buffers.

    Args:
      all_reduce_alg: "one_device", "hierarchical_copy", "ring", "halving_doubling", "direct", "forest", "auto"
        or "nccl" (plans "auto" where NCCL cannot be used, and says so once, at INFO).
      num_packs: into how many packs the tensors of each dtype are joined and cut; packs are reduced by
        trees with different roots. 0: no packing.
      agg_small_grads_max_bytes: without packs, neighbouring tensors of one dtype and at most so many
        bytes each are joined. 0: none are.
      agg_small_grads_max_group: the most tensors that are joined so.
      topology: the links that dense values may take, on which ``crossreduce.plan`` plans for their size;
        ``None``: any. Its devices are those of the values, or, where none of the names are, matched by
        position. Sparse values and gathers go straight.
    Raises:
      ArgumentError: an unknown algorithm, a number that is negative or not whole, no ``Topology``.

    >>> import numpy as np
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
        topology: Topology | None = None,
    ) -> None:
        self._algorithm = algorithm_name(all_reduce_alg)
        self._packing = Packing(
            count("num_packs", num_packs, "0 switches packing off"),
            0,
            count("agg_small_grads_max_bytes", agg_small_grads_max_bytes, "0 joins no small tensors"),
            count("agg_small_grads_max_group", agg_small_grads_max_group, "10"),
        )
        if topology is not None and not isinstance(topology, Topology):
            raise ArgumentError(message("topology must be a Topology.", shown(topology), "Topology.ring(8)"))
        self._topology = topology

    def __repr__(self) -> str:
        named = "" if type(self) in (HierarchicalCopyAllReduce, NcclAllReduce) else f"{self._algorithm!r}, "
        wiring = "" if self._topology is None else f", topology={self._topology!r}"
        return f"{type(self).__name__}({named}num_packs={self._packing.num_packs}{wiring})"

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: list[Pair], options: CommunicationOptions
    ) -> list[Mirrored]:
        jobs = [(check_value(reduce_op, value), devices) for value, devices in value_destination_pairs]
        packing = self._packing._replace(bytes_per_pack=options.bytes_per_pack)
        return reduce_batch(jobs, packing, self._planner(options), self._topology, None)

    def broadcast_implementation(self, tensor: Any, destinations: tuple[str, ...]) -> Mirrored:
        return broadcast_array(tensor, destinations, self._planner(read_options(None)), self._topology)

    def _planner(self, options: CommunicationOptions) -> str:
        """Return the algorithm to plan with; the options decide where the op leaves it open."""
        chosen = options.implementation if self._algorithm in ("auto", "nccl") else self._algorithm
        if chosen == "nccl" or (chosen == "auto" and self._algorithm == "nccl"):
            log_once('"nccl" plans "auto": this release has no binding to NCCL')
            return "auto"
        return chosen


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """Reduces inside groups of devices, then between them, and copies back the same way.

    Any number of devices, odd ones too. With a topology the hierarchy is read from its wiring, and never slower
    in simulation than one device; without, it is two halves (``crossreduce.planning.hierarchical_copy``).

    Args:
      num_packs: how many trees, with different roots, share the load; 0: one a tensor, unpacked.
      topology: the links that data may take; ``None``: any.
    Raises:
      ArgumentError: ``num_packs`` is negative or not whole.

    >>> import numpy as np
    >>> value = PerReplica([np.float32(2**k) for k in range(9)])
    >>> HierarchicalCopyAllReduce(num_packs=4).reduce("sum", value, "cpu:0")[0]
    array(511., dtype=float32)
    """

    def __init__(self, num_packs: int = 1, topology: Topology | None = None) -> None:
        super().__init__("hierarchical_copy", num_packs, topology=topology)


class NcclAllReduce(AllReduceCrossDeviceOps):
    """Reduces with NCCL where it can be used; elsewhere it plans "auto" and says so once, at INFO.

    This release has no binding to NCCL yet, so it always plans "auto".

    Args:
      num_packs: as for ``AllReduceCrossDeviceOps``.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__("nccl", num_packs)


def _outs(out: Any, size: int) -> list[Any]:
    """Return what each pair of a batch is to be written into."""
    if out is None:
        return [None] * size
    if isinstance(out, Iterable) and not isinstance(out, (DistributedValues, str, bytes, dict)):
        outs = list(out)
        if len(outs) == size and all(isinstance(x, DistributedValues) for x in outs):
            return outs
    raise ArgumentError(
        message(
            "out must have one PerReplica or Mirrored for each pair.", f"{shown(out)} for {size} pairs", "[value, ...]"
        )
    )


def _delivered(result: Any, destinations: tuple[str, ...], method: str) -> Mirrored:
    """Return a subclass's result if it is what the contract asks for."""
    if isinstance(result, Mirrored) and result.devices == destinations:
        return result
    raise UnsupportedError(
        message(
            f"{method} must return a Mirrored on the destinations.",
            shown(result),
            f"Mirrored([...], devices={list(destinations)})",
        )
    )


def _written(results: list[Mirrored], pairs: list[Job]) -> list[Mirrored]:
    """Return results in the arrays of ``out``; those that an implementation has not put there itself are copied."""
    copies = []
    for pair, (result, (value, devices)) in enumerate(zip(results, pairs, strict=True)):
        out = value.out
        assert out is not None
        if all(x is target for x, target in zip(result, out, strict=True)):
            continue
        for x, target, device in zip(result, out, devices, strict=True):
            taken = value.framework.writable_array(target, device)
            given = value.framework.array(x) if framework_of(x) is value.framework else None
            spec = None if given is None or isinstance(given, Sparse) else value.framework.spec(given)
            if spec != value.framework.spec(taken):
                wanted = f"an array like out's, {value.framework.name} {value.framework.spec(taken)}"
                error = MismatchError(message("a result does not fit into out.", describe(x), wanted))
                raise in_pair(error, pair, len(pairs))
            copies.append((value.framework, taken, given))
    for framework, taken, given in copies:
        framework.write(taken, given)
    return [Mirrored.on(value.out.values, devices) for value, devices in pairs if value.out is not None]
