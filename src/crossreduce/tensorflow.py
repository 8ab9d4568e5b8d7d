"""What plugs into ``tf.distribute``: crossreduce's ops as ``tf.distribute.CrossDeviceOps``.

In: TensorFlow's values, destinations and options.  Out: TensorFlow's values. Each call is translated for the op of
the same name in ``cross_device_ops.py``, which checks, plans, proves and executes; nothing is reduced here.

    strategy = tf.distribute.MirroredStrategy(cross_device_ops=crossreduce.tensorflow.HierarchicalCopyAllReduce())

docs/tensorflow.md says what a strategy hands to its op and what it keeps to itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import tensorflow as tf

# There is no public way to make a Mirrored, and strategies take nothing else.
from tensorflow.python.distribute.values import Mirrored as _Mirrored

from . import cross_device_ops as own
from .autograph import unconverted
from .devices import canonical
from .errors import ArgumentError, ReductionError, UnsupportedError, message, shown
from .ops import DTYPES
from .options import CommunicationOptions
from .outputs import in_pair
from .topology import Topology
from .validation import check_pairs, read_op, read_options
from .values import DistributedValues, Mirrored, PerReplica, default_devices

__all__ = ["AllReduceCrossDeviceOps", "HierarchicalCopyAllReduce", "ReductionToOneDevice"]

_Places = tuple[str, ...]  # where components are, as TensorFlow says it; "" where it does not
_ARRAYS: Final = (tf.Tensor, tf.Variable, tf.IndexedSlices)


class _NoGatherError(UnsupportedError, NotImplementedError):
    """What TensorFlow raises where one ``tf.IndexedSlices`` is to be gathered, and ours too."""


class _Plugged(tf.distribute.CrossDeviceOps):  # type: ignore[misc]
    """A ``tf.distribute.CrossDeviceOps`` that has an op of crossreduce's do the work.

    The front doors are overridden: TensorFlow's do not look at ``reduce_op``, fail on an empty batch, and return a
    value of one component without reducing it. A subclass of yours overrides the ``*_implementation``s, as with
    TensorFlow's own ops.
    """

    def __init__(self, op: own.CrossDeviceOps) -> None:
        super().__init__()
        self._op = op

    def __repr__(self) -> str:
        return f"crossreduce.tensorflow.{self._op!r}"

    @unconverted
    def reduce(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any = None) -> Any:
        """Reduce one value and put the result on all destinations.

        Args:
          reduce_op: ``tf.distribute.ReduceOp``, ``crossreduce.ReduceOp`` or the name of one.
          per_replica_value: a ``tf.distribute.DistributedValues``, or what ``tf.convert_to_tensor`` takes, which
            counts as one replica's.
          destinations: a ``tf.distribute.DistributedValues``, tensor, variable or device's name. It is never written.
          options: ``tf.distribute.experimental.CommunicationOptions``, of which ``bytes_per_pack`` counts; or
            ``crossreduce.CommunicationOptions``.
        Returns:
          A ``Mirrored`` with one component a destination, in the destinations' order; for one destination a
          tensor (or ``tf.IndexedSlices``), as TensorFlow's ops do.
        Raises:
          ArgumentError, MismatchError, DeviceError (ValueErrors), UnsupportedError (a TypeError): as crossreduce's
            op of the same name. Nothing has moved then.
        """
        return self.reduce_implementation(reduce_op, per_replica_value, destinations, options)

    @unconverted
    def batch_reduce(
        self, reduce_op: Any, value_destination_pairs: Iterable[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """Reduce several values, each to its own destinations; tensors may share packs.

        Args:
          reduce_op: as for ``reduce``.
          value_destination_pairs: pairs of what ``reduce`` takes; any iterable, also an empty one.
          options: as for ``reduce``.
        Returns:
          What ``reduce`` returns, for each pair, in their order; all of them, or an error and none.
        Raises:
          As ``reduce``; the message says which pair.
        """
        return self.batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    @unconverted
    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy one tensor to all destinations.

        Args:
          tensor: what ``tf.convert_to_tensor`` takes, ``tf.IndexedSlices``, or a ``Mirrored`` (its first component).
          destinations: as for ``reduce``.
        Returns:
          As ``reduce``.
        Raises:
          ArgumentError: a ``PerReplica`` is no one tensor; destinations that are none.
        """
        return self.broadcast_implementation(tensor, destinations)

    @unconverted
    def _gather(self, per_replica_value: Any, destinations: Any, axis: int, options: Any = None) -> Any:
        # Private in TensorFlow too, where strategy.gather and all_gather call it by this name.
        if isinstance(per_replica_value, tf.IndexedSlices):
            raise _NoGatherError(
                message("gather does not support IndexedSlices.", shown(per_replica_value), "tf.convert_to_tensor")
            )
        return self._gather_implementation(per_replica_value, destinations, axis, options)

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """Reduce one value: ``reduce`` itself, for a subclass to override."""
        value, where = _translated(per_replica_value, destinations)
        return where.returned(self._op.reduce(_op(reduce_op), value, where.devices, _options(options)))

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """Reduce several values: ``batch_reduce`` itself, for a subclass to override."""
        pairs = check_pairs(value_destination_pairs)
        jobs = []
        for number, (value, destinations) in enumerate(pairs):
            try:
                jobs.append(_translated(value, destinations))
            except ReductionError as error:
                raise in_pair(error, number, len(pairs)) from error.__cause__
        given = [(value, where.devices) for value, where in jobs]
        results = self._op.batch_reduce(_op(reduce_op), given, _options(options))
        return [where.returned(result) for result, (_, where) in zip(results, jobs, strict=True)]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copy one tensor: ``broadcast`` itself, for a subclass to override."""
        x = _primary(tensor)
        where = _destinations(destinations, (_place(x),))
        if not _is_known(x):
            return super().broadcast_implementation(x, destinations)
        return where.returned(self._op.broadcast(x, where.devices))

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        value, where = _translated(per_replica_value, destinations)
        if not all(_is_known(x) for x in value):
            return tf.distribute.ReductionToOneDevice()._gather(per_replica_value, destinations, axis)
        return where.returned(self._op.gather(value, where.devices, axis, _options(options)))


class ReductionToOneDevice(_Plugged):
    """``crossreduce.ReductionToOneDevice`` for ``tf.distribute``: copies to one device, reduces there, copies back.

    A batch is packed and planned as one.

    Args:
      reduce_to_device: the device to reduce on; ``None``: the first destination.
      accumulation_fn: takes the list of components, all on that device, and returns their sum or what stands for
        it; ``None``: adds them in the order of the replicas. It is called in the scope of that device.
    Raises:
      ArgumentError: ``accumulation_fn`` cannot be called.
      DeviceError: ``reduce_to_device`` cannot be read.

    >>> ReductionToOneDevice("/device:CPU:0")
    crossreduce.tensorflow.ReductionToOneDevice(reduce_to_device='cpu:0')
    """

    def __init__(self, reduce_to_device: str | None = None, accumulation_fn: Callable[[list[Any]], Any] | None = None):
        placed = _placed(accumulation_fn) if callable(accumulation_fn) else accumulation_fn
        super().__init__(own.ReductionToOneDevice(reduce_to_device, placed))


class AllReduceCrossDeviceOps(_Plugged):
    """``crossreduce.AllReduceCrossDeviceOps`` for ``tf.distribute``: reduces along a planned, verified schedule.

    Args:
      all_reduce_alg: "one_device", "hierarchical_copy", "ring", "halving_doubling", "direct", "forest", "auto" or
        "nccl" (which plans "auto").
      num_packs: into how many packs the tensors of each dtype are joined and cut; 0: no packing.
      agg_small_grads_max_bytes: without packs, neighbouring tensors of one dtype and at most so many bytes each are
        joined. 0: none are.
      agg_small_grads_max_group: the most tensors that are joined so.
      topology: the links that dense values may take; ``None``: any. Its devices are TensorFlow's ("cuda:0" is GPU:0),
        or, where none of the names are, matched by position.
    Raises:
      ArgumentError: an unknown algorithm, a number that is negative or not whole, no ``crossreduce.Topology``.

    >>> AllReduceCrossDeviceOps("ring", num_packs=2)
    crossreduce.tensorflow.AllReduceCrossDeviceOps('ring', num_packs=2)
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        topology: Topology | None = None,
    ) -> None:
        given = all_reduce_alg, num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group, topology
        super().__init__(own.AllReduceCrossDeviceOps(*given))


class HierarchicalCopyAllReduce(_Plugged):
    """``crossreduce.HierarchicalCopyAllReduce`` for ``tf.distribute``: inside groups of devices, then between them.

    Right on any number of devices; TensorFlow's own op of this name loses the last one's contribution where their
    number is odd (1.14 to 2.21).

    Args:
      num_packs: how many trees, with different roots, share the load; 0: one a tensor, unpacked.
      topology: the links that data may take, from which the hierarchy is read; ``None``: any, in two halves.
    Raises:
      ArgumentError: ``num_packs`` is negative or not whole, no ``crossreduce.Topology``.

    >>> op = HierarchicalCopyAllReduce(num_packs=2)
    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"], cross_device_ops=op)
    >>> @tf.function
    ... def step():
    ...     replica = tf.distribute.get_replica_context()
    ...     return replica.all_reduce("sum", 2.0 ** tf.cast(replica.replica_id_in_sync_group, tf.float32))
    >>> [float(x) for x in strategy.experimental_local_results(strategy.run(step))]
    [7.0, 7.0, 7.0]
    """

    def __init__(self, num_packs: int = 1, topology: Topology | None = None) -> None:
        super().__init__(own.HierarchicalCopyAllReduce(num_packs, topology))


def _op(reduce_op: Any) -> Any:
    """Return a reduction as this library reads it; what is none raises an ``ArgumentError``."""
    return read_op(reduce_op.value if isinstance(reduce_op, tf.distribute.ReduceOp) else reduce_op)


def _options(options: Any) -> CommunicationOptions:
    """Return TensorFlow's options as ours.

    Their implementation says which collective MultiWorkerMirroredStrategy takes, and a strategy fills it in where the
    user did not. So it says nothing about the algorithm here.
    """
    if hasattr(options, "bytes_per_pack") and not isinstance(options, CommunicationOptions):
        return CommunicationOptions(options.bytes_per_pack, getattr(options, "timeout_seconds", None) or None)
    return read_options(options)


class _Where(NamedTuple):
    """Destinations, read.

    ``devices``: a distributed value that is on them, by this library's names. ``places``: the same as TensorFlow says
    them. ``alone``: they are one device, for which the result is a bare tensor.
    """

    devices: PerReplica | Mirrored
    places: _Places
    alone: bool

    def returned(self, result: Mirrored) -> Any:
        """Return a result as TensorFlow's."""
        if not tf.executing_eagerly():  # what came from a place that nobody knows may still be there
            components = tuple(map(_put, result, self.places))
            return components[0] if self.alone else _Mirrored(components)
        return result[0] if self.alone else _Mirrored(result.values)


def _put(x: Any, place: str) -> Any:
    if not place or x.device:
        return x
    with tf.device(place):
        return tf.nest.map_structure(tf.identity, x, expand_composites=True)


def _translated(value: Any, destinations: Any) -> tuple[PerReplica, _Where]:
    """Return a value and its destinations as this library reads them."""
    value, destinations = _variable(value), _variable(destinations)
    parts = value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)
    if not parts:
        raise ArgumentError(message("a value must have at least one component.", shown(value), "PerReplica((x, ...))"))
    components = tuple(_array(x) for x in parts)
    places = _settled(tuple(_place(x) for x in components))
    if destinations is value and isinstance(value, tf.distribute.DistributedValues):
        here = PerReplica.on(components, _names(places))
        return here, _Where(here, places, len(components) == 1)
    if len(components) == 1 and isinstance(destinations, str) and destinations == _place(components[0]):
        destinations = components[0]  # so all_reduce puts it on one device, and a function's argument says ""
    where = _destinations(destinations, places)
    if isinstance(destinations, tf.distribute.DistributedValues):
        places = _filled(places, where.places)
    return PerReplica.on(components, _names(places)), where


def _destinations(destinations: Any, places: _Places) -> _Where:
    """Return where destinations are, given where the value is."""
    destinations = _variable(destinations)
    found: _Places = ()
    if isinstance(destinations, tf.distribute.DistributedValues):
        found = _settled(tuple(map(_place, destinations.values)))
    elif isinstance(destinations, _ARRAYS):
        found, places = (_place(destinations),), places[:1]
    elif isinstance(destinations, str) and destinations:
        found = (destinations,)
    if not found:
        raise ArgumentError(
            message(
                "destinations must be distributed values, a tensor, a variable or a device's name, and not empty.",
                shown(destinations),
                'a name such as "CPU:0"; for several devices, the PerReplica itself or any other on those devices',
            )
        )
    found = _filled(found, places)
    return _Where(Mirrored.on((), _names(found)), found, len(found) == 1)


def _settled(places: _Places) -> _Places:
    """Return where the components of a distributed value count as being.

    Those that do not say it (arguments of a ``tf.function``), or lie on one device together, count as on the devices of
    the strategy they are in, replica by replica.
    """
    if (len(set(places)) < len(places) or "" in places) and tf.distribute.has_strategy():
        devices = tf.distribute.get_strategy().extended.worker_devices
        if len(devices) == len(places):
            return tuple(devices)
    return places


def _filled(places: _Places, others: _Places) -> _Places:
    """Return places; one that nobody knows is taken to be where its counterpart is, if there are as many of them."""
    if len(places) != len(others):
        return places
    return tuple(place or other for place, other in zip(places, others, strict=True))


@lru_cache(maxsize=4096)
def _names(places: _Places) -> tuple[str, ...]:
    """Return this library's names of places.

    One that nobody knows counts as on ``cpu:0``, which leaves it to TensorFlow's placer (``frameworks/tensorflow.py``).
    """
    return default_devices([canonical(place) if place else None for place in places])


def _variable(given: Any) -> Any:
    """Return the variable that a Keras variable holds, which may be mirrored, and anything else as it is.

    Raises:
      ArgumentError: a distributed value of crossreduce's own.
    """
    if isinstance(given, DistributedValues):  # TensorFlow would stack its components
        problem = "distributed values of crossreduce are none of tf.distribute's."
        remedy = "crossreduce's own op of the same name, or values that a tf.distribute.Strategy made"
        raise ArgumentError(message(problem, shown(given), remedy))
    held = getattr(given, "value", None)
    return held if isinstance(held, tf.Variable) else given


def _array(value: Any) -> Any:
    """Return a tensor, variable or slices as they are, and make a tensor of anything else."""
    if isinstance(value, (*_ARRAYS, tf.SparseTensor, tf.RaggedTensor)):  # the framework says why it takes no such two
        return value
    try:
        return tf.convert_to_tensor(value)
    except (ValueError, TypeError) as error:
        kind = UnsupportedError if isinstance(error, TypeError) else ArgumentError
        remedy = "a tensor, or a PerReplica of them"
        raise kind(message("this cannot be made a tensor.", shown(value), remedy)) from error


def _primary(tensor: Any) -> Any:
    """Return the one tensor that is to be broadcast."""
    tensor = _variable(tensor)
    if not isinstance(tensor, tf.distribute.DistributedValues):
        return _array(tensor)
    if isinstance(tensor, _Mirrored):
        return _array(tensor.values[0])
    raise ArgumentError(message("broadcast takes one tensor.", shown(tensor), "one of its components, value.values[0]"))


def _place(x: Any) -> str:
    return getattr(x, "device", None) or ""


def _is_known(x: Any) -> bool:
    """Say whether a tensor is one that can be reduced. What cannot, such as text, TensorFlow itself moves."""
    return x.dtype.name in DTYPES and x.shape.rank is not None


def _placed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a function of tensors that runs where they are."""

    @functools.wraps(function)
    def scoped(xs: list[Any]) -> Any:
        with tf.device(xs[0].device or None):
            return function(xs)

    return scoped
