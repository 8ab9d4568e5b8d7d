"""Adapters for ``tf.distribute``: crossreduce's ops as ``tf.distribute.CrossDeviceOps``.

Input: TensorFlow's values, destinations and options. Output: TensorFlow's values. Each call is translated for the op of
the same name in ``cross_device_ops.py``, which validates, plans, verifies and runs it; nothing is reduced here.

    strategy = tf.distribute.MirroredStrategy(cross_device_ops=crossreduce.tensorflow.HierarchicalCopyAllReduce())

docs/tensorflow.md lists which reductions a strategy passes to its op and which ones it does itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, cast

try:
    import tensorflow as tf
except ImportError as error:
    from ..frameworks import missing_framework

    raise missing_framework("crossreduce.tensorflow needs TensorFlow, but", "tensorflow", error) from error

from ..autograph import Function, unconverted
from ..errors import MismatchError, ReductionError, UnsupportedError, shown
from ..frameworks.tensorflow.arrays import ShapesError
from ..ops import ReduceOp
from ..options import CommunicationOptions
from ..reduction import all_reduce_ops
from ..reduction import cross_device_ops as own
from ..reduction.outputs import name_pair
from ..reduction.validation import check_pairs, given_options, read_op, read_options
from ..topology import TopologyLike
from .distributed_values import broadcast_source, is_reducible, place_of, read_destinations, translate, with_rank

__all__ = ["AllReduceCrossDeviceOps", "HierarchicalCopyAllReduce", "ReductionToOneDevice"]


class _NoGatherError(UnsupportedError, NotImplementedError):
    """The error for a gather of ``tf.IndexedSlices``. It is also the NotImplementedError that TensorFlow raises."""


def _public(method: Function) -> Function:
    """Return a method that raises ``ShapesError`` instead of ``MismatchError``, and that AutoGraph does not rewrite."""

    @unconverted
    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except MismatchError as error:
            if type(error) is MismatchError:  # not a user's subclass
                error.__class__ = ShapesError
            raise

    return cast(Function, call)


class _Adapter(tf.distribute.CrossDeviceOps):  # type: ignore[misc]
    """A ``tf.distribute.CrossDeviceOps`` that delegates to an op of crossreduce.

    It overrides TensorFlow's public methods, since those do not check ``reduce_op``, fail on an empty batch, and do not
    reduce a value of one component. Subclasses override the ``*_implementation`` methods, as with TensorFlow's own ops.
    """

    def __init__(self, op: own.CrossDeviceOps) -> None:
        super().__init__()
        self._op = op

    def __repr__(self) -> str:
        return f"crossreduce.tensorflow.{self._op!r}"

    @_public
    def reduce(
        self,
        reduce_op: Any,
        per_replica_value: Any,
        destinations: Any,
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> Any:
        """Reduce one value and put the result on all destinations.

        Args:
          reduce_op: ``tf.distribute.ReduceOp``, ``crossreduce.ReduceOp`` or the name of one.
          per_replica_value: a ``tf.distribute.DistributedValues``; or a value that ``tf.convert_to_tensor`` accepts,
            which counts as the value of one replica.
          destinations: a ``tf.distribute.DistributedValues``, tensor, variable or device name; only the devices count.
          options: ``tf.distribute.experimental.CommunicationOptions``, of which only ``bytes_per_pack`` has an effect;
            or ``crossreduce.CommunicationOptions``.
          experimental_hints: the name of ``options`` in TensorFlow 2.2 and 2.3; only one of the two can be given.
        Returns:
          A ``Mirrored`` with one component per destination, in the order of the destinations; for one destination a
          tensor (or ``tf.IndexedSlices``), as TensorFlow's ops return.
        Raises:
          ArgumentError, MismatchError, DeviceError (ValueErrors), UnsupportedError (a TypeError): as crossreduce's
            op of the same name, before any data is moved. A MismatchError is also a tf.errors.InvalidArgumentError.
        """
        hints = given_options(options, experimental_hints)
        return self.reduce_implementation(reduce_op, per_replica_value, destinations, hints)

    @_public
    def batch_reduce(
        self,
        reduce_op: Any,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> list[Any]:
        """Reduce several values, each to its own destinations. Tensors may share packs.

        Args:
          reduce_op: as for ``reduce``.
          value_destination_pairs: pairs of arguments of ``reduce``; any iterable, also an empty one.
          options: as for ``reduce``.
          experimental_hints: as for ``reduce``.
        Returns:
          The result of ``reduce`` for each pair, in order. If a pair is invalid, no pair is reduced.
        Raises:
          As ``reduce``; the message names the pair.
        """
        hints = given_options(options, experimental_hints)
        return self.batch_reduce_implementation(reduce_op, value_destination_pairs, hints)

    @_public
    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy one tensor to all destinations.

        Args:
          tensor: a value that ``tf.convert_to_tensor`` accepts, or ``tf.IndexedSlices``. Of a ``Mirrored``, the first
            component is copied.
          destinations: as for ``reduce``.
        Returns:
          As ``reduce``.
        Raises:
          ArgumentError: ``tensor`` is a ``PerReplica``; invalid destinations.
        """
        return self.broadcast_implementation(tensor, destinations)

    @_public
    def _gather(self, per_replica_value: Any, destinations: Any, axis: int, options: Any = None) -> Any:
        # This overrides a private method of TensorFlow that strategy.gather and all_gather call.
        if isinstance(per_replica_value, tf.IndexedSlices):
            problem = "gather does not support IndexedSlices."
            raise _NoGatherError.of(problem, shown(per_replica_value), "tf.convert_to_tensor(value)")
        return self._gather_implementation(per_replica_value, destinations, axis, options)

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """Reduce one value: implements ``reduce``, and subclasses may override it."""
        value, targets = with_rank(*translate(per_replica_value, destinations))
        result = self._op.reduce(_read_op(reduce_op), value, targets.devices, _read_options(options))
        return targets.to_tensorflow(result)

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """Reduce several values: implements ``batch_reduce``, and subclasses may override it."""
        pairs = check_pairs(value_destination_pairs)
        jobs = []
        for number, (value, destinations) in enumerate(pairs):
            try:
                jobs.append(with_rank(*translate(value, destinations)))
            except ReductionError as error:
                raise name_pair(error, number, len(pairs)) from error.__cause__
        devices_of_values = [(value, targets.devices) for value, targets in jobs]
        results = self._op.batch_reduce(_read_op(reduce_op), devices_of_values, _read_options(options))
        return [targets.to_tensorflow(result) for result, (_, targets) in zip(results, jobs, strict=True)]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copy one tensor: implements ``broadcast``, and subclasses may override it."""
        x = broadcast_source(tensor)
        targets = read_destinations(destinations, (place_of(x),))
        if not is_reducible(x):
            return super().broadcast_implementation(x, destinations)
        return targets.to_tensorflow(self._op.broadcast(x, targets.devices))

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        value, targets = translate(per_replica_value, destinations)
        if not all(is_reducible(x) for x in value):
            return tf.distribute.ReductionToOneDevice()._gather(per_replica_value, destinations, axis)
        return targets.to_tensorflow(self._op.gather(value, targets.devices, axis, _read_options(options)))


class ReductionToOneDevice(_Adapter):
    """``crossreduce.ReductionToOneDevice`` for ``tf.distribute``: copies to one device, reduces there, copies back.

    A batch is planned as a whole, unless ``accumulation_fn`` is given.

    Args:
      reduce_to_device: the device to reduce on. ``None`` means the first destination.
      accumulation_fn: takes the list of components, all on that device (as vectors, if their rank is unknown), and
        returns the result that replaces their sum. It is called in the scope of that device. With ``None``, the
        components are combined in the order of the replicas.
    Raises:
      ArgumentError: ``accumulation_fn`` is not callable.
      DeviceError: ``reduce_to_device`` cannot be parsed.

    >>> ReductionToOneDevice("/device:CPU:0")
    crossreduce.tensorflow.ReductionToOneDevice(reduce_to_device='cpu:0')
    """

    def __init__(self, reduce_to_device: str | None = None, accumulation_fn: Callable[[list[Any]], Any] | None = None):
        function = _run_on_device_of_arguments(accumulation_fn) if callable(accumulation_fn) else accumulation_fn
        super().__init__(own.ReductionToOneDevice(reduce_to_device, function))


class AllReduceCrossDeviceOps(_Adapter):
    """``crossreduce.AllReduceCrossDeviceOps`` for ``tf.distribute``: reduces along a planned, verified schedule.

    Args:
      all_reduce_alg: "one_device", "hierarchical_copy", "ring", "halving_doubling", "recursive_doubling", "direct",
        "one_shot", "forest", "auto" or "nccl" (which plans "auto").
      num_packs: the number of packs into which the tensors of each dtype are joined and cut. 0 switches packing off.
      agg_small_grads_max_bytes: without packs, consecutive tensors of one dtype are joined if each has at most this
        many bytes. 0 joins none.
      agg_small_grads_max_group: the maximum number of tensors that are joined into one.
      topology: the links that dense values may use. ``None`` allows any links. The topology's devices are TensorFlow's
        ("cuda:0" is GPU:0); if no names match, they are matched by position.
    Raises:
      ArgumentError: an unknown algorithm; a number that is negative or not an integer; an invalid topology.

    >>> AllReduceCrossDeviceOps("ring", num_packs=2)
    crossreduce.tensorflow.AllReduceCrossDeviceOps('ring', num_packs=2)
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        topology: TopologyLike | None = None,
    ) -> None:
        arguments = all_reduce_alg, num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group, topology
        super().__init__(all_reduce_ops.AllReduceCrossDeviceOps(*arguments))


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """``crossreduce.HierarchicalCopyAllReduce`` for ``tf.distribute``: inside groups of devices, then between them.

    Results are right for any number of devices; TensorFlow's op of this name loses the last device's contribution if
    the number is odd (1.14 to 2.21).

    Args:
      num_packs: the number of trees that share the load; each has another root. 0 switches packing off: each tensor has
        one tree.
      topology: the links that data may use, which define the groups. ``None`` allows any links; the groups are then two
        halves.
    Raises:
      ArgumentError: ``num_packs`` is negative or not an integer; an invalid topology.

    >>> op = HierarchicalCopyAllReduce(num_packs=2)
    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"], cross_device_ops=op)
    >>> @tf.function
    ... def step():
    ...     replica = tf.distribute.get_replica_context()
    ...     return replica.all_reduce("sum", 2.0 ** tf.cast(replica.replica_id_in_sync_group, tf.float32))
    >>> [float(x) for x in strategy.experimental_local_results(strategy.run(step))]
    [7.0, 7.0, 7.0]
    """

    def __init__(self, num_packs: int = 1, topology: TopologyLike | None = None) -> None:
        _Adapter.__init__(self, all_reduce_ops.HierarchicalCopyAllReduce(num_packs, topology))


def _read_op(reduce_op: Any) -> ReduceOp:
    """Return a reduction of TensorFlow, or of crossreduce, as a ``ReduceOp``. Raise if it is unknown."""
    return read_op(reduce_op.value if isinstance(reduce_op, tf.distribute.ReduceOp) else reduce_op)


def _read_options(options: Any) -> CommunicationOptions:
    """Return TensorFlow's options as crossreduce's.

    TensorFlow's ``implementation`` selects the collective of MultiWorkerMirroredStrategy, and strategies set it even if
    the user did not. So it does not select an algorithm here.
    """
    if hasattr(options, "bytes_per_pack") and not isinstance(options, CommunicationOptions):
        return CommunicationOptions(options.bytes_per_pack, getattr(options, "timeout_seconds", None) or None)
    return read_options(options)


def _run_on_device_of_arguments(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a function that calls ``function`` in the scope of the device of its first tensor."""

    @wraps(function)
    def run(xs: list[Any]) -> Any:
        with tf.device(xs[0].device or None):
            return function(xs)

    return run
