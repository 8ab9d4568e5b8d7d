"""Translate values, destinations and devices of ``tf.distribute`` to crossreduce's, and results to TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import tensorflow as tf

# TensorFlow's strategies require its class Mirrored, and no public function creates one.
from tensorflow.python.distribute.values import Mirrored as _Mirrored

from ..devices import canonical
from ..errors import ArgumentError, UnsupportedError, shown
from ..ops import DTYPES
from ..values import DistributedValues, Mirrored, PerReplica, default_devices

_Places = tuple[str, ...]  # TensorFlow's names of the components' devices; "" if TensorFlow does not know the device
_ARRAYS: Final = (tf.Tensor, tf.Variable, tf.IndexedSlices)


class Destinations(NamedTuple):
    """The devices of a result.

    ``devices`` is a distributed value on these devices, by crossreduce's names; ``places`` has TensorFlow's names.
    ``shape`` is a tensor with the result's shape if the value was flattened.
    """

    devices: PerReplica | Mirrored
    places: _Places
    shape: Any = None

    def to_tensorflow(self, result: Mirrored) -> Any:
        """Return a result as TensorFlow's value: a tensor for one device, a ``Mirrored`` for several."""
        components = result.values
        if not tf.executing_eagerly():  # a component whose device was unknown may not be on its destination yet
            components = tuple(map(_move_to_place, components, self.places))
        if self.shape is not None:
            components = tuple(_call_on_its_device(x, tf.reshape, self.shape) for x in components)
        return components[0] if len(components) == 1 else _Mirrored(components)


def _move_to_place(x: Any, place: str) -> Any:
    """Return a copy of a tensor on ``place`` if only the tensor's device is unknown, otherwise the tensor itself."""
    if not place or x.device:
        return x
    with tf.device(place):
        return tf.nest.map_structure(tf.identity, x, expand_composites=True)


def _call_on_its_device(x: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with a tensor on the tensor's device."""
    with tf.device(x.device or None):
        return function(x, *arguments)


def with_rank(value: PerReplica, targets: Destinations) -> tuple[PerReplica, Destinations]:
    """Return a value of known rank, and destinations that restore the shape of its result.

    Tensors may have no known rank, for example those of ``tf.numpy_function``. They get the rank of another replica's
    component if that is known. If no rank is known, all are flattened, after a run-time check of equal shapes.
    """
    if tf.executing_eagerly():
        return value, targets
    ranks = [(x.values if isinstance(x, tf.IndexedSlices) else x).shape.rank for x in value]
    if None not in ranks:
        return value, targets
    xs = tuple(tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x for x in value)
    known_ranks = [rank for rank in ranks if rank is not None]
    unknown = [isinstance(x, tf.Tensor) and rank is None for x, rank in zip(xs, ranks, strict=True)]
    if known_ranks:
        rank = [None] * known_ranks[0]
        xs = tuple(
            _call_on_its_device(x, tf.ensure_shape, rank) if is_unknown else x
            for x, is_unknown in zip(xs, unknown, strict=True)
        )
        return PerReplica.on(xs, value.devices), targets
    if not all(unknown):
        return value, targets
    shapes = [tf.concat([[tf.rank(x)], tf.shape(x)], 0) for x in xs]  # equal lengths alone would be broadcast
    text = "the replicas of one value differ in shape"
    checks = [tf.debugging.assert_equal(shape, shapes[0], message=text) for shape in shapes[1:]]
    with tf.control_dependencies(checks):
        flat = tuple(_call_on_its_device(x, tf.reshape, [-1]) for x in xs)
    return PerReplica.on(flat, value.devices), targets._replace(shape=shapes[0][1:])


def translate(value: Any, destinations: Any) -> tuple[PerReplica, Destinations]:
    """Return a value of TensorFlow and its destinations as crossreduce's. Each may name devices the other lacks."""
    value, destinations = _variable(value), _variable(destinations)
    parts = value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)
    if not parts:
        raise ArgumentError.of("a value must have at least one component.", shown(value), "PerReplica((x, ...))")
    components = tuple(_array(x) for x in parts)
    places = _component_places(tuple(map(place_of, components)))
    if destinations is value and isinstance(value, tf.distribute.DistributedValues):
        translated = PerReplica.on(components, _names(places))
        return translated, Destinations(translated, places)
    if len(components) == 1 and isinstance(destinations, str) and destinations == place_of(components[0]):
        destinations = components[0]  # TensorFlow passes the component's device; "" if it is unknown
    targets = read_destinations(destinations, places)
    if isinstance(destinations, tf.distribute.DistributedValues):
        places = _fill_unknown(places, targets.places)
    return PerReplica.on(components, _names(places)), targets


def read_destinations(destinations: Any, places: _Places) -> Destinations:
    """Return the devices of destinations. Unknown devices are taken from ``places``, the places of the value."""
    destinations = _variable(destinations)
    names: _Places = ()
    if isinstance(destinations, tf.distribute.DistributedValues):
        names = _component_places(tuple(map(place_of, destinations.values)))
    elif isinstance(destinations, _ARRAYS):
        names, places = (place_of(destinations),), places[:1]
    elif isinstance(destinations, str) and destinations:
        names = (destinations,)
    if not names:
        problem = "destinations must be distributed values, a tensor, a variable or a device name, and not empty."
        remedy = 'a name such as "CPU:0"; for several devices, any PerReplica on them'
        raise ArgumentError.of(problem, shown(destinations), remedy)
    names = _fill_unknown(names, places)
    return Destinations(Mirrored.on((), _names(names)), names)


def _component_places(places: _Places) -> _Places:
    """Return the place of each component of a distributed value, given the places that the components report.

    If a place is unknown (as of an argument of ``tf.function``) or occurs twice, the places are the devices of the
    current strategy, provided that it has one for each component.
    """
    if (len(set(places)) < len(places) or "" in places) and tf.distribute.has_strategy():
        devices = tf.distribute.get_strategy().extended.worker_devices
        if len(devices) == len(places):
            return tuple(devices)
    return places


def _fill_unknown(places: _Places, others: _Places) -> _Places:
    """Replace each unknown place by the one at the same position in ``others``, if both have the same length."""
    if len(places) != len(others):
        return places
    return tuple(place or other for place, other in zip(places, others, strict=True))


@lru_cache(maxsize=4096)
def _names(places: _Places) -> tuple[str, ...]:
    """Return crossreduce's names of places.

    An unknown place counts as ``cpu:0``. ``to_device`` sets no device for it, so TensorFlow chooses one.
    """
    return default_devices([canonical(place) if place else None for place in places])


def _variable(given: Any) -> Any:
    """Return the ``tf.Variable`` inside a Keras variable, which may be mirrored. Return any other value unchanged."""
    if isinstance(given, DistributedValues):  # convert_to_tensor would stack its components
        problem = "this is a distributed value of crossreduce, not of tf.distribute."
        remedy = "crossreduce's own op of the same name, or a value that a tf.distribute.Strategy made"
        raise ArgumentError.of(problem, shown(given), remedy)
    inner = getattr(given, "value", None)
    return inner if isinstance(inner, tf.Variable) else given


def _array(value: Any) -> Any:
    """Return a value as a tensor. Tensors, variables and ``tf.IndexedSlices`` are returned unchanged."""
    if isinstance(value, (*_ARRAYS, tf.SparseTensor, tf.RaggedTensor)):  # the framework rejects the last two
        return value
    try:
        return tf.convert_to_tensor(value)
    except (ValueError, TypeError) as error:
        kind = UnsupportedError if isinstance(error, TypeError) else ArgumentError
        remedy = "a tensor, or a PerReplica of tensors"
        raise kind.of("this cannot be converted to a tensor.", shown(value), remedy) from error


def broadcast_source(tensor: Any) -> Any:
    """Return the tensor that a broadcast copies: the argument itself, or the first component of a ``Mirrored``."""
    tensor = _variable(tensor)
    if not isinstance(tensor, tf.distribute.DistributedValues):
        return _array(tensor)
    if isinstance(tensor, _Mirrored):
        return _array(tensor.values[0])
    raise ArgumentError.of("broadcast requires one tensor.", shown(tensor), "one of its components, value.values[0]")


def place_of(x: Any) -> str:
    """Return TensorFlow's name of a tensor's device, or "" if TensorFlow does not know it."""
    return getattr(x, "device", None) or ""


def is_reducible(x: Any) -> bool:
    """Return whether crossreduce supports a tensor's dtype and rank. TensorFlow moves other tensors, such as text."""
    return x.dtype.name in DTYPES and x.shape.rank is not None
