"""Adapters for ``tf.distribute``: crossreduce's ops as ``tf.distribute.CrossDeviceOps``.

Input: TensorFlow's values, destinations and options. Output: TensorFlow's values. Each call is translated for the op of
the same name in ``cross_device_ops.py``, which validates, plans, verifies and runs it; nothing is reduced here.

    strategy = tf.distribute.MirroredStrategy(cross_device_ops=crossreduce.tensorflow.HierarchicalCopyAllReduce())

docs/tensorflow.md lists which reductions a strategy passes to its op and which ones it does itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import Any, Final, NamedTuple, cast

try:
    import tensorflow as tf
except ImportError as error:
    from .frameworks import missing_framework

    raise missing_framework("crossreduce.tensorflow needs TensorFlow, but", "tensorflow", error) from error

# TensorFlow's strategies require its class Mirrored, and no public function creates one.
from tensorflow.python.distribute.values import Mirrored as _Mirrored

from .autograph import Function, unconverted
from .devices import canonical
from .errors import ArgumentError, MismatchError, ReductionError, UnsupportedError, shown
from .frameworks.tensorflow import ShapesError
from .ops import DTYPES, ReduceOp
from .options import CommunicationOptions
from .reduction import all_reduce_ops
from .reduction import cross_device_ops as own
from .reduction.outputs import name_pair
from .reduction.validation import check_pairs, given_options, read_op, read_options
from .topology import TopologyLike
from .values import DistributedValues, Mirrored, PerReplica, default_devices

__all__ = ["AllReduceCrossDeviceOps", "HierarchicalCopyAllReduce", "ReductionToOneDevice"]

_Places = tuple[str, ...]  # TensorFlow's names of the components' devices; "" if TensorFlow does not know the device
_ARRAYS: Final = (tf.Tensor, tf.Variable, tf.IndexedSlices)


class _NoGatherError(UnsupportedError, NotImplementedError):
    """The error for a gather of ``tf.IndexedSlices``: both crossreduce's class of error and TensorFlow's."""


def _public(method: Function) -> Function:
    """Make a method raise ``ShapesError`` where it raises ``MismatchError``; AutoGraph does not rewrite it."""

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

    The public methods are overridden: TensorFlow's do not check ``reduce_op``, fail on an empty batch, and do not
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
          experimental_hints: the name of ``options`` in TensorFlow 2.2 and 2.3; only one of them can be given.
        Returns:
          A ``Mirrored`` with one component per destination, in the order of the destinations; for one destination a
          tensor (or ``tf.IndexedSlices``), as TensorFlow's ops return.
        Raises:
          ArgumentError, MismatchError, DeviceError (ValueErrors), UnsupportedError (a TypeError): as crossreduce's
            op of the same name, before any data is moved. A MismatchError is also a tf.errors.InvalidArgumentError.
        """
        given = given_options(options, experimental_hints)
        return self.reduce_implementation(reduce_op, per_replica_value, destinations, given)

    @_public
    def batch_reduce(
        self,
        reduce_op: Any,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> list[Any]:
        """Reduce several values, each to its own destinations; tensors may share packs.

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
        given = given_options(options, experimental_hints)
        return self.batch_reduce_implementation(reduce_op, value_destination_pairs, given)

    @_public
    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy one tensor to all destinations.

        Args:
          tensor: a value that ``tf.convert_to_tensor`` accepts, ``tf.IndexedSlices``, or a ``Mirrored`` (its first
            component).
          destinations: as for ``reduce``.
        Returns:
          As ``reduce``.
        Raises:
          ArgumentError: ``tensor`` is a ``PerReplica``; invalid destinations.
        """
        return self.broadcast_implementation(tensor, destinations)

    @_public
    def _gather(self, per_replica_value: Any, destinations: Any, axis: int, options: Any = None) -> Any:
        # Overrides a private method of TensorFlow, which strategy.gather and all_gather call.
        if isinstance(per_replica_value, tf.IndexedSlices):
            problem = "gather does not support IndexedSlices."
            raise _NoGatherError.of(problem, shown(per_replica_value), "tf.convert_to_tensor(value)")
        return self._gather_implementation(per_replica_value, destinations, axis, options)

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """Reduce one value: implements ``reduce``, and subclasses may override it."""
        value, targets = _with_rank(*_translate(per_replica_value, destinations))
        result = self._op.reduce(_read_op(reduce_op), value, targets.devices, _read_options(options))
        return targets.to_tensorflow(result)

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """Reduce several values: implements ``batch_reduce``, and subclasses may override it."""
        pairs = check_pairs(value_destination_pairs)
        jobs = []
        for number, (value, destinations) in enumerate(pairs):
            try:
                jobs.append(_with_rank(*_translate(value, destinations)))
            except ReductionError as error:
                raise name_pair(error, number, len(pairs)) from error.__cause__
        given = [(value, targets.devices) for value, targets in jobs]
        results = self._op.batch_reduce(_read_op(reduce_op), given, _read_options(options))
        return [targets.to_tensorflow(result) for result, (_, targets) in zip(results, jobs, strict=True)]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copy one tensor: implements ``broadcast``, and subclasses may override it."""
        x = _broadcast_source(tensor)
        targets = _read_destinations(destinations, (_place(x),))
        if not _is_reducible(x):
            return super().broadcast_implementation(x, destinations)
        return targets.to_tensorflow(self._op.broadcast(x, targets.devices))

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        value, targets = _translate(per_replica_value, destinations)
        if not all(_is_reducible(x) for x in value):
            return tf.distribute.ReductionToOneDevice()._gather(per_replica_value, destinations, axis)
        return targets.to_tensorflow(self._op.gather(value, targets.devices, axis, _read_options(options)))


class ReductionToOneDevice(_Adapter):
    """``crossreduce.ReductionToOneDevice`` for ``tf.distribute``: copies to one device, reduces there, copies back.

    A batch is planned as a whole, unless ``accumulation_fn`` is given.

    Args:
      reduce_to_device: the device to reduce on; ``None``: the first destination.
      accumulation_fn: takes the list of components, all on that device (as vectors, if their rank is unknown), and
        returns the result that replaces their sum. It is called in the scope of that device. ``None``: combines the
        components in the order of the replicas.
    Raises:
      ArgumentError: ``accumulation_fn`` is not callable.
      DeviceError: ``reduce_to_device`` cannot be parsed.

    >>> ReductionToOneDevice("/device:CPU:0")
    crossreduce.tensorflow.ReductionToOneDevice(reduce_to_device='cpu:0')
    """

    def __init__(self, reduce_to_device: str | None = None, accumulation_fn: Callable[[list[Any]], Any] | None = None):
        function = _in_device_scope(accumulation_fn) if callable(accumulation_fn) else accumulation_fn
        super().__init__(own.ReductionToOneDevice(reduce_to_device, function))


class AllReduceCrossDeviceOps(_Adapter):
    """``crossreduce.AllReduceCrossDeviceOps`` for ``tf.distribute``: reduces along a planned, verified schedule.

    Args:
      all_reduce_alg: "one_device", "hierarchical_copy", "ring", "halving_doubling", "recursive_doubling", "direct",
        "one_shot", "forest", "auto" or "nccl" (which plans "auto").
      num_packs: the number of packs into which the tensors of each dtype are joined and cut; 0: no packing.
      agg_small_grads_max_bytes: without packs, consecutive tensors of one dtype are joined if each has at most this
        many bytes. 0: none are joined.
      agg_small_grads_max_group: the maximum number of tensors that are joined into one.
      topology: the links that dense values may use; ``None``: any. Its devices are TensorFlow's ("cuda:0" is GPU:0)
        or, if none of the names match, are matched by position.
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
        given = all_reduce_alg, num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group, topology
        super().__init__(all_reduce_ops.AllReduceCrossDeviceOps(*given))


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """``crossreduce.HierarchicalCopyAllReduce`` for ``tf.distribute``: inside groups of devices, then between them.

    Results are right for any number of devices; TensorFlow's op of this name loses the last device's contribution if
    the number is odd (1.14 to 2.21).

    Args:
      num_packs: the number of trees whose roots rotate, that share the load; 0: one tree per tensor, no packing.
      topology: the links that data may use, which define the groups; ``None``: any links, and two halves as groups.
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
    """Return TensorFlow's reduction as a ``ReduceOp``; raise if it is unknown."""
    return read_op(reduce_op.value if isinstance(reduce_op, tf.distribute.ReduceOp) else reduce_op)


def _read_options(options: Any) -> CommunicationOptions:
    """Return TensorFlow's options as crossreduce's.

    TensorFlow's ``implementation`` selects the collective of MultiWorkerMirroredStrategy, and strategies set it even if
    the user did not. So it does not select an algorithm here.
    """
    if hasattr(options, "bytes_per_pack") and not isinstance(options, CommunicationOptions):
        return CommunicationOptions(options.bytes_per_pack, getattr(options, "timeout_seconds", None) or None)
    return read_options(options)


class _Destinations(NamedTuple):
    """The devices of a result.

    ``devices``: a distributed value on these devices, by crossreduce's names. ``places``: TensorFlow's names of them.
    ``shape``: a tensor with the result's shape, if the value was flattened.
    """

    devices: PerReplica | Mirrored
    places: _Places
    shape: Any = None

    def to_tensorflow(self, result: Mirrored) -> Any:
        """Return a result as TensorFlow's value: a tensor for one device, a ``Mirrored`` for several."""
        components = result.values
        if not tf.executing_eagerly():  # a component whose device was unknown may not be on its destination yet
            components = tuple(map(_on_place, components, self.places))
        if self.shape is not None:
            components = tuple(_at(x, tf.reshape, self.shape) for x in components)
        return components[0] if len(components) == 1 else _Mirrored(components)


def _on_place(x: Any, place: str) -> Any:
    if not place or x.device:
        return x
    with tf.device(place):
        return tf.nest.map_structure(tf.identity, x, expand_composites=True)


def _at(x: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with a tensor on the tensor's device."""
    with tf.device(x.device or None):
        return function(x, *arguments)


def _with_rank(value: PerReplica, targets: _Destinations) -> tuple[PerReplica, _Destinations]:
    """Return a value of known rank, and destinations that restore the shape of its result.

    A tensor of unknown rank (of ``tf.numpy_function``) has the rank of another replica's component. If none is known,
    all are flattened, once the function that runs has found that their shapes agree.
    """
    if tf.executing_eagerly():
        return value, targets
    ranks = [(x.values if isinstance(x, tf.IndexedSlices) else x).shape.rank for x in value]
    if None not in ranks:
        return value, targets
    xs = tuple(tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x for x in value)
    known = [rank for rank in ranks if rank is not None]
    unknown = [isinstance(x, tf.Tensor) and rank is None for x, rank in zip(xs, ranks, strict=True)]
    if known:
        rank = [None] * known[0]
        xs = tuple(_at(x, tf.ensure_shape, rank) if free else x for x, free in zip(xs, unknown, strict=True))
        return PerReplica.from_parts(xs, value.devices), targets
    if not all(unknown):
        return value, targets
    shapes = [tf.concat([[tf.rank(x)], tf.shape(x)], 0) for x in xs]  # equal lengths alone would be broadcast
    text = "the replicas of one value differ in shape"
    checks = [tf.debugging.assert_equal(shape, shapes[0], message=text) for shape in shapes[1:]]
    with tf.control_dependencies(checks):
        flat = tuple(_at(x, tf.reshape, [-1]) for x in xs)
    return PerReplica.from_parts(flat, value.devices), targets._replace(shape=shapes[0][1:])


def _translate(value: Any, destinations: Any) -> tuple[PerReplica, _Destinations]:
    """Return TensorFlow's value and destinations as crossreduce's."""
    value, destinations = _variable(value), _variable(destinations)
    parts = value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)
    if not parts:
        raise ArgumentError.of("a value must have at least one component.", shown(value), "PerReplica((x, ...))")
    components = tuple(_array(x) for x in parts)
    places = _component_places(tuple(map(_place, components)))
    if destinations is value and isinstance(value, tf.distribute.DistributedValues):
        translated = PerReplica.from_parts(components, _names(places))
        return translated, _Destinations(translated, places)
    if len(components) == 1 and isinstance(destinations, str) and destinations == _place(components[0]):
        destinations = components[0]  # TensorFlow passes the component's device; "" if it is unknown
    targets = _read_destinations(destinations, places)
    if isinstance(destinations, tf.distribute.DistributedValues):
        places = _fill_unknown(places, targets.places)
    return PerReplica.from_parts(components, _names(places)), targets


def _read_destinations(destinations: Any, places: _Places) -> _Destinations:
    """Return the devices of destinations, given the places of the value."""
    destinations = _variable(destinations)
    found: _Places = ()
    if isinstance(destinations, tf.distribute.DistributedValues):
        found = _component_places(tuple(map(_place, destinations.values)))
    elif isinstance(destinations, _ARRAYS):
        found, places = (_place(destinations),), places[:1]
    elif isinstance(destinations, str) and destinations:
        found = (destinations,)
    if not found:
        problem = "destinations must be distributed values, a tensor, a variable or a device name, and not empty."
        remedy = 'a name such as "CPU:0"; for several devices, any PerReplica on them'
        raise ArgumentError.of(problem, shown(destinations), remedy)
    found = _fill_unknown(found, places)
    return _Destinations(Mirrored.from_parts((), _names(found)), found)


def _component_places(places: _Places) -> _Places:
    """Return the place of each component of a distributed value, given the places that the components report.

    If one is unknown (an argument of a ``tf.function``) or occurs twice, and the current strategy has as many devices,
    the places are these devices, one per replica.
    """
    if (len(set(places)) < len(places) or "" in places) and tf.distribute.has_strategy():
        devices = tf.distribute.get_strategy().extended.worker_devices
        if len(devices) == len(places):
            return tuple(devices)
    return places


def _fill_unknown(places: _Places, others: _Places) -> _Places:
    """Return places with each unknown one replaced by its counterpart in ``others``, if both have the same length."""
    if len(places) != len(others):
        return places
    return tuple(place or other for place, other in zip(places, others, strict=True))


@lru_cache(maxsize=4096)
def _names(places: _Places) -> tuple[str, ...]:
    """Return crossreduce's names of places.

    An unknown place counts as ``cpu:0``: ``to_device`` sets no device for it, so TensorFlow chooses one.
    """
    return default_devices([canonical(place) if place else None for place in places])


def _variable(given: Any) -> Any:
    """Return the ``tf.Variable`` (which may be mirrored) of a Keras variable; any other value unchanged."""
    if isinstance(given, DistributedValues):  # convert_to_tensor would stack its components
        problem = "this is a distributed value of crossreduce, not of tf.distribute."
        remedy = "crossreduce's own op of the same name, or a value that a tf.distribute.Strategy made"
        raise ArgumentError.of(problem, shown(given), remedy)
    inner = getattr(given, "value", None)
    return inner if isinstance(inner, tf.Variable) else given


def _array(value: Any) -> Any:
    """Return a tensor, variable or slices unchanged, and convert any other value to a tensor."""
    if isinstance(value, (*_ARRAYS, tf.SparseTensor, tf.RaggedTensor)):  # frameworks/tensorflow.py rejects the last two
        return value
    try:
        return tf.convert_to_tensor(value)
    except (ValueError, TypeError) as error:
        kind = UnsupportedError if isinstance(error, TypeError) else ArgumentError
        remedy = "a tensor, or a PerReplica of tensors"
        raise kind.of("this cannot be converted to a tensor.", shown(value), remedy) from error


def _broadcast_source(tensor: Any) -> Any:
    """Return the tensor that is to be broadcast."""
    tensor = _variable(tensor)
    if not isinstance(tensor, tf.distribute.DistributedValues):
        return _array(tensor)
    if isinstance(tensor, _Mirrored):
        return _array(tensor.values[0])
    raise ArgumentError.of("broadcast requires one tensor.", shown(tensor), "one of its components, value.values[0]")


def _place(x: Any) -> str:
    return getattr(x, "device", None) or ""


def _is_reducible(x: Any) -> bool:
    """Return whether a tensor's dtype and rank are supported. TensorFlow moves other tensors, such as text, itself."""
    return x.dtype.name in DTYPES and x.shape.rank is not None


def _in_device_scope(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a function of tensors that runs on their device."""

    @wraps(function)
    def scoped(xs: list[Any]) -> Any:
        with tf.device(xs[0].device or None):
            return function(xs)

    return scoped
