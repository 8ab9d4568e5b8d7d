"""``MirroredStrategy``, and the functions that say where a call stands; names and contract are ``tf.distribute``'s.

In: functions to run in replicas, and per-replica values.  Out: what the replicas return, and reductions of it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from numbers import Integral
from typing import Any, Final

from ..cross_device_ops import CrossDeviceOps
from ..devices import parse
from ..errors import ArgumentError, ContextError, MismatchError, message, shown
from ..frameworks import Array, ReplicaFramework, Sparse, ThreadModes, framework_of, get
from ..ops import Numbers, ReduceOp
from ..options import CommunicationOptions, count
from ..trees import check_ops, flatten_tree, unflatten_tree
from ..validation import check_array, check_value, per_replica, read_op, read_options
from ..values import DistributedValues, PerReplica, describe, host_devices, read_devices
from .contexts import Current, ReplicaContext, current, entered, replica_framework, require_cross_replica
from .extended import IN_A_REPLICA, Extended
from .regroup import Whole, arguments, each, mapped, regroup
from .replica_group import TIMEOUT_S, Crew
from .splitting import DistributedDataset, ValueContext, split_tree

_FRAMEWORKS: Final = ("torch", "jax")  # those whose modes are a thread's own


class MirroredStrategy:
    """n replicas of a computation in one process, each in a thread of its own, that reduce as ``tf.distribute`` does.

    For NumPy, PyTorch and JAX. Frameworks let other threads run while they compute, so replicas on several GPUs, or on
    several cores, run at once. (One process a GPU, as DistributedDataParallel has it, spares Python's lock.)

    Args:
      devices: a name for each replica; or how many replicas there are in host memory; ``None``: every accelerator that
        PyTorch, or else JAX, sees, if it was imported, and where there is none, one replica on ``cpu:0``.
      cross_device_ops: how to reduce; ``None``: ``AllReduceCrossDeviceOps("auto")``.
    Raises:
      UnsupportedError: ``cross_device_ops`` is a class, or anything else that is no ``CrossDeviceOps``.
      ArgumentError: no devices, or one twice.

    >>> import numpy as np
    >>> strategy = MirroredStrategy(4)
    >>> halves = strategy.run(lambda x: x / 2, args=(strategy.split(np.arange(6.0)),))
    >>> [x.tolist() for x in halves]
    [[0.0, 0.5], [1.0, 1.5], [2.0], [2.5]]
    >>> float(strategy.reduce("mean", halves, axis=0))
    1.25
    """

    def __init__(
        self, devices: Iterable[str] | int | None = None, cross_device_ops: CrossDeviceOps | None = None
    ) -> None:
        if devices is None:
            names = _accelerators() or host_devices(1)
        elif isinstance(devices, Iterable):
            names = read_devices(devices)
        else:
            names = host_devices(count("devices", devices, '4, or ["cpu:0", "cpu:1"]'))
        if not names:
            raise ArgumentError(message("a strategy needs at least one device.", shown(devices), "4, or None"))
        self._devices = names
        self._ops = check_ops(cross_device_ops)
        self._extended = Extended(self)

    def __repr__(self) -> str:
        return f"MirroredStrategy({', '.join(self._devices)}; {self._ops!r})"

    @property
    def devices(self) -> tuple[str, ...]:
        """The replicas' devices, canonical names, in the replicas' order."""
        return self._devices

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are."""
        return len(self._devices)

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """What reduces."""
        return self._ops

    @property
    def extended(self) -> Extended:
        """The calls for libraries and optimizers: ``reduce_to``, ``update`` and others."""
        return self._extended

    @contextmanager
    def scope(self) -> Iterator[MirroredStrategy]:
        """Enter the cross-replica context; variables made inside belong to this strategy.

        Raises:
          ContextError: inside of a replica, or of another strategy's scope.
        """
        require_cross_replica("scope()", "variables and the strategy's other things are made before run()")
        here = current()
        if here is not None and here.strategy is not self and has_strategy():
            raise ContextError(
                message(
                    "one strategy is used inside of another's scope.",
                    f"{self} inside of {here.strategy}",
                    "leave that scope first; one strategy can have all the devices",
                )
            )
        with entered(Current(self, None)):
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Call a function on all replicas, each in a thread of its own, and return what it returned on each.

        Threads start with the caller's context variables and the frameworks' modes (``torch.no_grad``, autocast,
        ``jax.enable_x64``), and have ended when this returns. While replicas wait for each other nothing polls.

        Args:
          fn: what to call; inside of it, ``get_replica_context()`` is the replica's.
          args: trees; of distributed values in them each replica gets its component. Variables and all else stay.
          kwargs: likewise.
          options: ``timeout_seconds``: how long replicas wait for others (``None``: 600), and, after an error, this
            call for those that still compute.
        Returns:
          A tree as ``fn`` returned it, with a ``PerReplica`` for each leaf, also where there is one replica. None,
          strings and variables stay as they are where all replicas agree.
        Raises:
          The exception of the first replica that fails, with its number in a note; the others are stopped: those that
          wait at once, those that compute at their next call of the context.
          MismatchError: replicas want different things, or return trees of different structure.
          StalledError: a replica keeps others waiting beyond the timeout.
          ContextError: inside of a replica, or of another strategy's scope.
        """
        require_cross_replica("run", "what the replica's function needs, it calls")
        if not callable(fn):
            raise ArgumentError(message("fn must be a function.", shown(fn), "strategy.run(step, args=(x,))"))
        hints = read_options(options)
        n = self.num_replicas_in_sync
        crew = Crew(self._devices, hints.timeout_seconds or TIMEOUT_S)
        modes = [framework.thread_modes() for framework in _loaded()]
        own = [arguments(args, kwargs, k, n) for k in range(n)]
        bodies = [
            partial(_live, ReplicaContext(self, k, crew), modes, fn, positional, named)
            for k, (positional, named) in enumerate(own)
        ]
        with self.scope():
            results = crew.run(bodies)
        return regroup(results, self._devices)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Reduce a tree of per-replica values, over all replicas and maybe an axis, to one array a leaf.

        Args:
          reduce_op: a ``ReduceOp`` or its name.
          value: a tree. Of a leaf that is the same for all replicas already, a single array, the mean, minimum and
            maximum are itself; it has no sum, unless there is one replica or it is the number 0.
          axis: reduced as well. Replicas may differ in size along it, and hold nothing: a mean divides by the number of
            all elements.
        Returns:
          The tree of results, each on the first replica's device.
        Raises:
          ContextError: inside of a replica.
          ArgumentError, MismatchError, UnsupportedError: as ``CrossDeviceOps.reduce``; no such axis; the mean, minimum
            or maximum of no elements.
        """
        require_cross_replica("reduce", IN_A_REPLICA)
        op = read_op(reduce_op)
        leaves, structure = flatten_tree(value)
        with self.scope():
            if axis is not None:
                return unflatten_tree(structure, each(leaves, structure, lambda x: self._reduce_along(op, x, axis)))
            spread = [k for k, leaf in enumerate(leaves) if isinstance(leaf, DistributedValues)]
            results = each(leaves, structure, lambda x: x if isinstance(x, DistributedValues) else self._same(op, x))
            pairs = [(leaves[k], leaves[k].devices[0]) for k in spread]
            try:
                reduced = self._ops.batch_reduce(op, pairs)
            except MismatchError as error:
                error.add_note(
                    "where only the sizes along an axis differ: reduce(..., axis=...) reduces over it as well"
                )
                raise
            for k, one in zip(spread, reduced, strict=True):
                results[k] = one[0]
        return unflatten_tree(structure, results)

    def gather(self, value: Any, axis: int) -> Any:
        """Join the components of each per-replica value of a tree along an axis, in the order of the replicas.

        Args:
          value: a tree of per-replica values, whose components may differ in size along ``axis``.
          axis: from ``-ndim`` to ``ndim - 1``.
        Returns:
          The tree of joined arrays, each on the first replica's device.
        Raises:
          ContextError: inside of a replica.
          ArgumentError, MismatchError: as ``CrossDeviceOps.gather``.
        """
        require_cross_replica("gather", "get_replica_context().all_gather")
        with self.scope():
            return mapped(value, lambda leaf: self._ops.gather(leaf, per_replica(leaf).devices[0], axis)[0])

    def split(self, batch: Any, axis: int = 0) -> Any:
        """Split a batch over the replicas.

        Args:
          batch: a tree of arrays with as many samples along ``axis`` in each.
          axis: that of the samples.
        Returns:
          The tree with a ``PerReplica`` of shares for each array, which together are the array, in its order. They
          differ by at most one sample; the first are larger, and where samples are fewer than replicas, the last are
          empty. In host memory they are views.
        Raises:
          MismatchError: arrays of different size along ``axis``.
          ArgumentError: an array without this axis.

        >>> import numpy as np
        >>> [x.tolist() for x in MirroredStrategy(3).split(np.arange(5))]
        [[0, 1], [2, 3], [4]]
        """
        require_cross_replica("split", "split before run(), and pass the shares as arguments")
        return split_tree(batch, axis, self._devices)

    def distribute_dataset(self, dataset: Iterable[Any], axis: int = 0) -> DistributedDataset:
        """Return an iterable of a dataset's batches, each split over the replicas when it is asked for.

        Args:
          dataset: an iterable of batches as ``split`` takes them (TensorFlow's ``experimental_distribute_dataset``).
          axis: as for ``split``.
        """
        return DistributedDataset(self, dataset, axis)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Call a function for each replica, one after another, and return what it returned as per-replica values.

        Args:
          value_fn: gets a ``ValueContext``.
        Returns:
          The tree of per-replica values; where it returns arrays, they stay where they are.

        >>> strategy = MirroredStrategy(2)
        >>> strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group * 10).values
        (0, 10)
        """
        require_cross_replica("distribute_values_from_function", "make the value in the replica")
        n = self.num_replicas_in_sync
        with self.scope():
            made = [value_fn(ValueContext(k, n, device)) for k, device in enumerate(self._devices)]
        return regroup(made, self._devices)

    def replicate(self, value: Any) -> Any:
        """Return copies of a value, one a replica, each on its device.

        Args:
          value: a tree of arrays and of objects such as a ``torch.nn.Module`` and its optimizer. Each replica gets a
            deep copy of the whole, so that what refers to each other in it still does; modules move by their ``to``.
        Returns:
          The tree of per-replica values.

        >>> import numpy as np
        >>> [x.tolist() for x in MirroredStrategy(2).replicate({"w": np.ones(2)})["w"]]
        [[1.0, 1.0], [1.0, 1.0]]
        """
        require_cross_replica("replicate", "replicate before run(), and pass the copies as arguments")
        copies = [mapped(copy.deepcopy(value), partial(_moved, device=device)) for device in self._devices]
        return regroup(copies, self._devices)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a distributed value, in the order of the replicas; of any other value, itself.

        >>> MirroredStrategy(2).local_results(5)
        (5,)
        """
        return tuple(value) if isinstance(value, DistributedValues) else (value,)

    def _same(self, op: ReduceOp, value: Any) -> Any:
        """Reduce a value that is the same for all replicas."""
        check_array(value)
        zero = isinstance(value, (int, float, complex)) and value == 0
        if op in (ReduceOp.SUM, ReduceOp.PRODUCT) and self.num_replicas_in_sync > 1 and not zero:
            raise ArgumentError(
                message(
                    f"the {op.value} of a single array over {self.num_replicas_in_sync} replicas is not defined.",
                    describe(value),
                    "a PerReplica, such as run() returns",
                )
            )
        return framework_of(value).array(value) if isinstance(value, (int, float, complex)) else value

    def _reduce_along(self, op: ReduceOp, leaf: Any, axis: int) -> Array:
        """Reduce a value over the replicas and an axis: fold each component, then reduce what that gives."""
        value = per_replica(leaf)
        framework = replica_framework(value[0])
        arrays: list[Any] = [framework_of(x).array(x) for x in value]
        for x in arrays:
            inside = not isinstance(x, Sparse) and isinstance(axis, Integral) and -len(x.shape) <= axis < len(x.shape)
            if not inside or isinstance(axis, bool):
                raise ArgumentError(
                    message(
                        "there is no such axis to reduce.",
                        f"axis {axis!r} of {describe(leaf)}",
                        "axis=None, or a dense value's axis",
                    )
                )
        check_value(None, value, axis=axis)  # they fit, but for their sizes along it
        sizes = [int(x.shape[axis]) for x in arrays]
        places = value.devices
        if op in (ReduceOp.MIN, ReduceOp.MAX):  # nothing is neither
            held = [k for k, size in enumerate(sizes) if size]
            arrays, places = [arrays[k] for k in held], tuple(places[k] for k in held)
        if not sum(sizes) and op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MEAN):
            raise ArgumentError(
                message(f"the {op.value} of no elements is not defined.", repr(value), "a batch that is not empty")
            )
        numbers = framework.numbers(op, framework.spec(arrays[0]).dtype, sum(sizes))
        folded = PerReplica.on(tuple(framework.reduce_axis(op, x, axis, numbers) for x in arrays), places)
        across = ReduceOp.SUM if op is ReduceOp.MEAN else op
        total = self._ops.reduce(across, folded, value.devices[0])[0]
        wide = Numbers(op, numbers.accumulator, numbers.accumulator, numbers.result, numbers.divisor)
        return framework.finish(framework.array(total), wide)


def get_strategy() -> MirroredStrategy:
    """Return the strategy that this call stands in; outside of all, one of a single replica on ``cpu:0``."""
    here = current()
    return _default() if here is None else here.strategy


def has_strategy() -> bool:
    """Return whether this call stands in a strategy's ``scope`` or ``run``."""
    here = current()
    return here is not None and here.strategy is not _default()


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica that this call stands in; in the cross-replica context ``None``.

    Outside of all strategies it is that of a single replica, so that code for replicas runs there, too.

    >>> float(get_replica_context().all_reduce("sum", 3.0))
    3.0
    """
    here = current()
    return _default_replica() if here is None else here.replica


def in_cross_replica_context() -> bool:
    """Return whether this call stands in ``scope`` or ``merge_call``, and in no replica."""
    here = current()
    return here is not None and here.replica is None


@cache
def _default() -> MirroredStrategy:
    return MirroredStrategy(1)


@cache
def _default_replica() -> ReplicaContext:
    return ReplicaContext(_default(), 0, None)


def _loaded() -> list[ReplicaFramework]:
    """Return the frameworks of frameworks that are in use."""
    found = [get(name) for name in _FRAMEWORKS if sys.modules.get(name) is not None]
    return [framework for framework in found if isinstance(framework, ReplicaFramework)]


def _accelerators() -> tuple[str, ...]:
    return next((names for framework in _loaded() if (names := framework.accelerators())), ())


def _live(context: ReplicaContext, modes: list[ThreadModes], fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What a replica's thread does."""
    with entered(Current(context.strategy, context)), ExitStack() as stack:
        for within in modes:
            stack.enter_context(within(context.devices[0]))
        return fn(*args, **kwargs)


def _moved(leaf: Any, device: str) -> Any:
    """Return an array or a module on a device."""
    if isinstance(leaf, Whole):
        raise ArgumentError(message("variables are replicated already.", repr(leaf), "hand it to run() as it is"))
    try:
        framework = framework_of(leaf)
    except ArgumentError:
        place = parse(device)
        if place.kind == "cpu" or not hasattr(leaf, "to"):
            return leaf
        return leaf.to(f"{place.kind}:{place.index}")
    framework.require((device,))
    return framework.to_device(leaf, device) if hasattr(leaf, "shape") else leaf
