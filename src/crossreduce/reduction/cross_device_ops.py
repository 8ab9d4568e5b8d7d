"""The cross-device ops: reduce, batch-reduce, broadcast and gather per-replica values.

Input: ``PerReplica`` values and the destinations of their results. Output: ``Mirrored`` values. Each call validates all
of its arguments before it reads an array; then ``pipeline.py`` packs, plans, lowers and runs.

The names and the contract are those of TensorFlow's ``tf.distribute.CrossDeviceOps`` and its subclasses, without their
defects (see docs/contract.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ..autograph import unconverted
from ..devices import canonical
from ..engines.host.prepared import new_calls
from ..errors import ArgumentError, MismatchError, ReductionError, message, shown
from ..frameworks import Array, Sparse, framework_of
from ..observe.profilers import PROFILERS, entry, is_outermost
from ..observe.profilers.facts import by_replica
from ..ops import ReduceOp
from ..options import CommunicationOptions
from ..values import DistributedValues, Mirrored, PerReplica
from .outputs import Job, check_out, check_outs, check_overlap, write_results
from .pipeline import broadcast_array, reduce_to_one
from .validation import (
    check_array,
    check_pairs,
    check_result,
    check_results,
    check_value,
    device_names,
    per_replica,
    read_op,
    read_options,
)

if TYPE_CHECKING:
    from ..engines.host._calls import Calls

Pair = tuple[PerReplica, tuple[str, ...]]


class CrossDeviceOps:
    """The base class of all cross-device ops: it validates arguments and calls the implementations.

    A custom subclass implements ``reduce_implementation``. It may implement ``batch_reduce_implementation``, which
    calls ``reduce_implementation`` for each value by default, and ``broadcast_implementation`` and
    ``gather_implementation``, which copy by default. They receive validated arguments: a ``ReduceOp``, ``PerReplica``
    values, destinations as a tuple of canonical device names, and ``CommunicationOptions``. They return a ``Mirrored``
    on those destinations; for a batch, a list with one per pair. The type and the devices of returned values are
    checked. The subclass must ensure that they have the right shape and share no memory.

    >>> class First(CrossDeviceOps):
    ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
    ...         return self.broadcast_implementation(per_replica_value[0], destinations)
    >>> import numpy as np
    >>> value = PerReplica([np.ones(2), np.zeros(2)])
    >>> First().reduce("sum", value, value)[1]
    array([1., 1.])
    """

    _calls: Calls | None = None  # earlier calls; when one of them is repeated, it runs in compiled code

    @unconverted
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        out: DistributedValues | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Mirrored:
        """Reduce one value and put the result on all destinations.

        Args:
          reduce_op: a ``ReduceOp`` or its name.
          per_replica_value: ``PerReplica`` or ``Mirrored``; a single array is the value of one replica.
          destinations: a device's name; or distributed values, an array, a variable or a parameter, which stand for
            their devices and are not written.
          options: hints for this call.
          out: arrays to write the result into, one per destination, in the order of the destinations. They are arrays
            of NumPy, CuPy or torch with the result's shape and dtype, writable and contiguous in C order. They may be
            the value's own components (in place); otherwise they must not share memory with each other or with inputs.
          experimental_hints: the older name of ``options``; only one of them can be given.
        Returns:
          The result, one component per destination, in the order of the destinations. If ``out`` is given, these are
          the arrays of ``out``. The shape is that of the components; the dtype too, except that the mean of integers
          is a float. A sparse value gives sparse components.
        Raises:
          ArgumentError: an invalid op, value, destination or option.
          DeviceError: a device's name cannot be parsed, or the device does not exist here.
          MismatchError: replicas that differ in shape, dtype, framework or kind of sparse array.
          UnsupportedError: the op is not defined for the dtype; an array of ``out`` cannot be written into.
          PlanError: the topology has no route for the data.

        >>> import numpy as np
        >>> value = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
        >>> ReductionToOneDevice().reduce("mean", value, "cpu:0")[0]
        array([2., 3.])
        >>> _ = ReductionToOneDevice().reduce("sum", value, value, out=value)
        >>> value[1]
        array([4., 6.])
        """
        if PROFILERS.are_on() and is_outermost():
            # not self.reduce: a subclass may have replaced it by a method that calls this one
            call = partial(CrossDeviceOps.reduce, self, out=out, experimental_hints=experimental_hints)
            with entry("reduce", reduce_op, per_replica_value):
                return call(reduce_op, per_replica_value, destinations, options)
        if self._calls is not None and experimental_hints is None:
            prepared = self._calls.reduce(reduce_op, per_replica_value, destinations, options, out)
            if prepared is not None:
                return cast("Mirrored", prepared)
        op = read_op(reduce_op)
        hints = read_options(options, experimental_hints)
        value = check_value(op, per_replica(per_replica_value)).with_out(None)  # not the ``out`` of an earlier call
        devices = device_names(destinations)
        value.facts.framework.require(devices)
        if out is None:
            result = self.reduce_implementation(op, value, devices, hints)
            return check_result(result, devices, "reduce_implementation")
        arrays = check_out(out, value, devices)
        jobs = [(value.with_out(arrays), devices)]
        argument = jobs[0][0] if self._writes_out(jobs) else value
        result = self.reduce_implementation(op, argument, devices, hints)
        return write_results([check_result(result, devices, "reduce_implementation")], jobs)[0]

    @unconverted
    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        out: Iterable[DistributedValues] | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Mirrored]:
        """Reduce several values, each to its own destinations. An implementation may reduce several tensors together.

        Args:
          reduce_op: a ``ReduceOp`` or its name.
          value_destination_pairs: pairs of a value and its destinations, as for ``reduce``.
          options: hints for this call.
          out: one ``out`` per pair, as for ``reduce``.
          experimental_hints: as for ``reduce``.
        Returns:
          One result per pair, in the order of the pairs. If there is an error, no result is written.
        Raises:
          As ``reduce``; and ArgumentError if an element is not a pair (the message has its position), or if ``out``
          does not have one element per pair.

        >>> import numpy as np
        >>> value = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
        >>> ReductionToOneDevice().batch_reduce("sum", [(value, value), (value, "cpu:0")])[0][1]
        array([4., 6.])
        """
        if PROFILERS.are_on() and is_outermost():
            if hasattr(value_destination_pairs, "__next__"):  # an iterator, which can be read only once
                value_destination_pairs = list(value_destination_pairs)
            call = partial(CrossDeviceOps.batch_reduce, self, out=out, experimental_hints=experimental_hints)
            with entry("batch_reduce", reduce_op, by_replica(value_destination_pairs)):
                return call(reduce_op, value_destination_pairs, options)
        if self._calls is not None and experimental_hints is None:
            prepared = self._calls.batch_reduce(reduce_op, value_destination_pairs, options, out)
            if prepared is not None:
                return prepared
        op = read_op(reduce_op)
        hints = read_options(options, experimental_hints)
        jobs: list[Job] = []
        pairs = check_pairs(value_destination_pairs)
        outs = [] if out is None else check_outs(out, len(pairs))
        for number, (value, destinations) in enumerate(pairs):
            try:
                checked = check_value(op, per_replica(value)).with_out(None)
                devices = checked.devices if destinations is value else device_names(destinations)
                if devices is not checked.devices:
                    checked.facts.framework.require(devices)
                if out is not None:
                    arrays = check_out(outs[number], checked, devices)
                    checked = checked.with_out(arrays)
            except ReductionError as error:
                error.prefix(f"pair {number}", number)
                raise
            jobs.append((checked, devices))
        arguments: list[Any] = list(jobs)
        if out is not None and not self._writes_out(jobs):
            arguments = [(checked.with_out(None), devices) for checked, devices in jobs]
        results = self.batch_reduce_implementation(op, arguments, hints)
        delivered = check_results(results, [devices for _, devices in jobs], type(self).__name__)
        return delivered if out is None else write_results(delivered, jobs)

    @unconverted
    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copy one array to all destinations.

        Args:
          tensor: an array, dense or sparse, or a number.
          destinations: as for ``reduce``.
        Returns:
          One copy per destination, in the order of the destinations; none shares memory with ``tensor``.
        Raises:
          ArgumentError: ``tensor`` is not an array (a ``PerReplica`` is not), or the destinations are invalid.
          DeviceError: as for ``reduce``.

        >>> import numpy as np
        >>> CrossDeviceOps().broadcast(np.arange(3), PerReplica([0, 0]))[1]
        array([0, 1, 2])
        """
        if PROFILERS.are_on() and is_outermost():
            with entry("broadcast", "", [tensor]):
                return CrossDeviceOps.broadcast(self, tensor, destinations)
        if isinstance(tensor, DistributedValues):
            remedy = "one of its components, such as value[0]"
            raise ArgumentError.of("broadcast requires a single array.", shown(tensor), remedy)
        framework = check_array(tensor)
        devices = device_names(destinations)
        framework.require(devices)
        return check_result(self.broadcast_implementation(tensor, devices), devices, "broadcast_implementation")

    @unconverted
    def gather(
        self, per_replica_value: Any, destinations: Any, axis: int, options: CommunicationOptions | None = None
    ) -> Mirrored:
        """Concatenate the components along an axis in replica order, and put the result on all destinations.

        Args:
          per_replica_value: as for ``reduce``; components may differ in size along ``axis``. Sparse components are
            made dense first.
          destinations: as for ``reduce``.
          axis: from ``-ndim`` to ``ndim - 1``.
          options: hints for this call.
        Returns:
          One copy per destination.
        Raises:
          ArgumentError: the axis does not exist, or the components are scalars.
          MismatchError: components that differ in size along another axis, in dtype or in framework.

        >>> import numpy as np
        >>> value = PerReplica([np.array([[1, 2]]), np.array([[3, 4], [5, 6]])])
        >>> CrossDeviceOps().gather(value, "cpu:0", axis=0)[0].tolist()
        [[1, 2], [3, 4], [5, 6]]
        """
        if PROFILERS.are_on() and is_outermost():
            with entry("gather", "", per_replica_value):
                return CrossDeviceOps.gather(self, per_replica_value, destinations, axis, options)
        hints = read_options(options)
        value = check_value(None, per_replica(per_replica_value), axis=axis)
        devices = device_names(destinations)
        value.facts.framework.require(devices)
        result = self.gather_implementation(value, devices, value.facts.axis, hints)
        return check_result(result, devices, "gather_implementation")

    @property
    def supports_weights(self) -> bool:
        """Whether the op reduces values that were multiplied by weights, as ``all_reduce`` passes them."""
        return False

    def reduce_prepared(
        self,
        op: ReduceOp,
        rows: list[Any],
        devices: tuple[str, ...] | None,
        options: CommunicationOptions | None,
        out: Any,
    ) -> list[list[Any]] | None:
        """Reduce one list of arrays per replica in compiled code, or return ``None`` if no such call was made before.

        ``rows`` and ``out`` may contain any trees, but only lists of arrays are recognized. ``out`` may be ``None``.
        ``devices`` has one name per replica; if it is ``None``, the results stay on the devices of the arrays.
        """
        if self._calls is None:
            return None
        return self._calls.all_reduce(op, rows, devices, options, out)

    def _writes_out(self, jobs: list[Job]) -> bool:
        """Return whether the implementation writes into ``out`` itself. If not, its results are copied there.

        A custom implementation does not receive ``out``, since it may read a value again after it has reduced it.
        Errors in ``out`` must be found before anything is written. So this method checks ``out`` before it returns
        False; if it returns True, ``reduce_batch`` checks ``out``.
        """
        check_overlap(jobs)
        return False

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: tuple[str, ...],
        options: CommunicationOptions,
    ) -> Mirrored:
        """Reduce one validated value. Subclasses must implement this method."""
        problem = f"{type(self).__name__} does not implement reduce_implementation."
        remedy = "implement it, or use ReductionToOneDevice or HierarchicalCopyAllReduce"
        raise NotImplementedError(message(problem, remedy=remedy))

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: list[Pair], options: CommunicationOptions
    ) -> list[Mirrored]:
        """Reduce validated values. By default, ``reduce_implementation`` reduces one after another."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: tuple[str, ...]) -> Mirrored:
        """Copy an array to all destinations. By default, it is copied directly to each destination."""
        return broadcast_array(tensor, destinations, "one_device", None)

    def gather_implementation(
        self, per_replica_value: PerReplica, destinations: tuple[str, ...], axis: int, options: CommunicationOptions
    ) -> Mirrored:
        """Concatenate validated components along a non-negative axis. By default, the first destination does this."""
        value = check_value(None, per_replica_value, axis=axis)
        framework, main = value.facts.framework, destinations[0]
        joined = framework.concat([framework.to_device(x, main) for x in value.facts.arrays], axis)
        return self.broadcast_implementation(joined, destinations)


class BatchReducingOps(CrossDeviceOps):
    """An op of this library: it reduces one value as a batch of one, and writes into ``out``."""

    own_class: ClassVar[type[BatchReducingOps]]  # the class of this library whose methods reduce

    def _is_own(self) -> bool:
        """Return whether no subclass has replaced a method of ``own_class`` that reduces."""
        kind, own = type(self), self.own_class
        names = ("batch_reduce", "reduce_implementation", "batch_reduce_implementation", "_planner")
        return kind is own or all(getattr(kind, name, None) is getattr(own, name, None) for name in names)

    @property
    def supports_weights(self) -> bool:
        return self._is_own()

    def _prepared_calls(self) -> Calls | None:
        """Return the store of prepared calls, or ``None`` if they would bypass a method that a subclass replaces."""
        if self._calls is None and self._is_own():
            object.__setattr__(self, "_calls", new_calls())  # a subclass may be a frozen dataclass
        return self._calls

    def _writes_out(self, jobs: list[Job]) -> bool:
        return self._is_own() or super()._writes_out(jobs)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: tuple[str, ...],
        options: CommunicationOptions,
    ) -> Mirrored:
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]


class ReductionToOneDevice(BatchReducingOps):
    """Copies all components to one device, reduces them there, and copies the result to the destinations.

    Args:
      reduce_to_device: the device that reduces. It does not have to be a source or a destination. ``None`` means the
        first destination.
      accumulation_fn: takes the list of components, all copied to that device, and returns their sum, or another array
        of the same shape that replaces the sum. A mean divides the returned array by the number of components. The
        function is not called for sparse values, whose slices are concatenated. With ``None``, the components are added
        in the order of the replicas.
    Raises:
      ArgumentError: ``accumulation_fn`` is not callable.
      DeviceError: ``reduce_to_device`` cannot be parsed.

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
            problem = "accumulation_fn must be a function of a list of arrays."
            raise ArgumentError.of(problem, shown(accumulation_fn), "sum")
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
                job[0].facts.framework.require((self._root,))
        if self._accumulate is None:
            return reduce_to_one(jobs, self._root, self._prepared_calls(), options)
        if reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
            problem = "accumulation_fn replaces the sum, so the op must be sum or mean."
            raise ArgumentError.of(problem, shown(reduce_op), "ReductionToOneDevice() without accumulation_fn")
        if options.exact:
            problem = "accumulation_fn replaces the sum, so the sum cannot be made exact."
            raise ArgumentError.of(problem, "exact=True", "ReductionToOneDevice() without accumulation_fn")
        return [
            reduce_to_one([job], self._root)[0] if job[0].facts.sparse else self._reduce_by_function(reduce_op, job)
            for job in jobs
        ]

    @property
    def supports_weights(self) -> bool:
        return self._accumulate is None and super().supports_weights

    def _writes_out(self, jobs: list[Job]) -> bool:
        check_overlap(jobs)  # check the batch as a whole: the reduction on each root receives only a part of it
        return self._is_own()

    def _reduce_by_function(self, op: ReduceOp, job: Job) -> Mirrored:
        """Reduce one value with the caller's function, which gets copies, since it may change them."""
        assert self._accumulate is not None
        value, destinations = job[0].facts, job[1]
        framework, root = value.framework, self._root or destinations[0]
        total = self._accumulate([framework.clone(framework.to_device(x, root)) for x in value.arrays])
        if framework_of(total) is not framework:
            problem = "accumulation_fn must return an array of the same framework as its arguments."
            raise MismatchError.of(problem, shown(total), f"a {framework.name} array")
        total = framework.array(total)
        if isinstance(total, Sparse) or framework.spec(total).shape != value.spec.shape:
            given = shown(total) if isinstance(total, Sparse) else str(framework.spec(total))
            problem = "accumulation_fn must return one array of the components' shape."
            raise MismatchError.of(problem, given, f"an array like {value.spec}")
        dtype = framework.spec(total).dtype
        numbers = framework.numbers(op, dtype, len(value.arrays))
        # If the function changed the dtype, the new one decides the result's dtype.
        result = value.numbers.result if dtype in (value.spec.dtype, value.numbers.accumulator) else numbers.result
        finished = framework.finish(total, numbers._replace(result=result))
        return broadcast_array(finished, destinations, "one_device", None)


ReductionToOneDevice.own_class = ReductionToOneDevice
