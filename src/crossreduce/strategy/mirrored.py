"""``MirroredStrategy``, with the names and the contract of ``tf.distribute``, and the current strategy and context.

Input: functions that run in replicas, and per-replica values. Output: the functions' results, and their reductions.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from numbers import Integral
from typing import Any

from ..devices import parse
from ..errors import ArgumentError, MismatchError, shown
from ..frameworks import Array, ReplicaFramework, Sparse, ThreadModes, framework_of, get
from ..ops import Numbers, ReduceOp
from ..options import CommunicationOptions, count
from ..reduction.cross_device_ops import CrossDeviceOps
from ..reduction.trees import check_ops, flatten_tree, unflatten_tree
from ..reduction.validation import check_array, check_value, per_replica, read_op, read_options
from ..values import DistributedValues, PerReplica, describe, host_devices, read_devices
from .base import Strategy
from .contexts import (
    FRAMEWORKS_WITH_SETTINGS,
    REDUCE_IN_A_REPLICA,
    Current,
    ReplicaContext,
    cross_replica_context,
    current,
    enter,
    replica_framework,
    require_cross_replica,
)
from .extended import Extended
from .regroup import DistributedVariable, local_arguments, map_leaves, map_tree, regroup
from .replica_group import TIMEOUT_S, ReplicaGroup
from .splitting import DistributedDataset, ValueContext, split_tree


class MirroredStrategy(Strategy):
    """n replicas of a computation in one process, one thread per replica, that reduce as ``tf.distribute`` does.

    It supports NumPy, PyTorch, JAX and CuPy. These release Python's lock while they compute, so replicas on several
    GPUs, or on several cores, run at the same time. (One process per GPU, as in DistributedDataParallel, avoids the
    lock entirely.)

    Args:
      devices: one name per replica, or the number of replicas in host memory. ``None`` means all accelerators of the
        first of PyTorch, JAX and CuPy that is imported and reports any. Without accelerators, there is one replica on
        ``cpu:0``.
      cross_device_ops: how to reduce. ``None`` means ``AllReduceCrossDeviceOps("auto")``.
    Raises:
      UnsupportedError: ``cross_device_ops`` is a class, or not a ``CrossDeviceOps``.
      ArgumentError: no devices, an invalid one, or one that is listed twice.

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
            problem = "a strategy needs at least one device."
            raise ArgumentError.of(problem, shown(devices), "devices=4, or devices=None")
        # Imported before replicas have threads: a process that is forked during an import can never import the module.
        import optree  # noqa: F401

        super().__init__(names, check_ops(cross_device_ops))
        self._extended = Extended(self)

    @property
    def extended(self) -> Extended:
        """The calls for libraries and optimizers: ``reduce_to``, ``update`` and others."""
        return self._extended

    @contextmanager
    def scope(self) -> Iterator[MirroredStrategy]:
        """Enter the cross-replica context. Variables created inside belong to this strategy.

        Raises:
          ContextError: inside a replica, or inside another strategy's scope.
        """
        with cross_replica_context(self, "scope()", "create variables and use the scope before run()"):
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Call a function on all replicas, one thread per replica, and return the results of all.

        Threads start with the caller's context variables and the frameworks' modes (``torch.no_grad``, autocast,
        ``jax.enable_x64``, CuPy's current streams). They have ended when this method returns. Waiting replicas sleep.

        Args:
          fn: the function; inside it, ``get_replica_context()`` returns the replica's context.
          args: trees. In place of each distributed value in them, a replica receives its own component. Variables and
            other values are passed unchanged.
          kwargs: the same for keyword arguments.
          options: only ``timeout_seconds`` is used. It limits how long replicas wait for others, and how long this call
            waits, after an error, for replicas that are still computing. ``None`` means 600.
        Returns:
          A tree of the structure that ``fn`` returned, with a ``PerReplica`` for each leaf, also for one replica. None,
          strings and variables are kept if all replicas returned the same one.
        Raises:
          The exception of the first replica that fails, with its number in a note. Other replicas are stopped at once
          if they wait, and otherwise at their next call of the context.
          MismatchError: replicas make different calls, or return trees of different structure.
          StalledError: a replica keeps others waiting beyond the timeout.
          ContextError: inside a replica, or inside another strategy's scope.
        """
        require_cross_replica("run", "call the function directly: it already runs in a replica")
        if not callable(fn):
            raise ArgumentError.of("fn must be a function.", shown(fn), "strategy.run(step, args=(x,))")
        hints = read_options(options)
        n = self.num_replicas_in_sync
        group = ReplicaGroup(self._devices, hints.timeout_seconds or TIMEOUT_S)
        modes = [framework.thread_modes() for framework in _loaded_frameworks()]
        arguments = [local_arguments(args, kwargs, k, n) for k in range(n)]
        bodies = [
            partial(_run_replica, ReplicaContext(self, k, group), modes, fn, positional, named)
            for k, (positional, named) in enumerate(arguments)
        ]
        with self.scope():
            results = group.run(bodies)
        return regroup(results, self._devices)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Reduce a tree of per-replica values, over all replicas and optionally an axis, to one array per leaf.

        Args:
          reduce_op: a ``ReduceOp`` or its name.
          value: a tree. A leaf may also be a single array: without ``axis`` it counts as the same on all replicas, so
            it is its own mean, minimum and maximum. Its sum and product are defined only for one replica, or for the
            number 0.
          axis: an axis of the arrays that is reduced, too. Components may differ in size along it, and some may be
            empty: a mean divides by the number of all elements.
        Returns:
          The tree of results, each on the first device of its value.
        Raises:
          ContextError: inside a replica.
          ArgumentError, MismatchError, UnsupportedError: as ``CrossDeviceOps.reduce``; an invalid axis; the mean,
            minimum or maximum of no elements.
        """
        with cross_replica_context(self, "reduce", REDUCE_IN_A_REPLICA):
            op = read_op(reduce_op)
            leaves, structure = flatten_tree(value)
            if axis is not None:
                results = map_leaves(leaves, structure, lambda x: self._reduce_axis(op, x, axis))
                return unflatten_tree(structure, results)
            distributed = [k for k, leaf in enumerate(leaves) if isinstance(leaf, DistributedValues)]
            results = map_leaves(
                leaves, structure, lambda x: x if isinstance(x, DistributedValues) else self._reduce_single(op, x)
            )
            pairs = [(leaves[k], leaves[k].devices[0]) for k in distributed]
            try:
                reduced = self._ops.batch_reduce(op, pairs)
            except MismatchError as error:
                error.add_note("if only the sizes along one axis differ: reduce(..., axis=...) reduces that axis, too")
                raise
            for k, result in zip(distributed, reduced, strict=True):
                results[k] = result[0]
        return unflatten_tree(structure, results)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the components of each per-replica value of a tree along an axis, in the order of the replicas.

        Args:
          value: a tree of per-replica values, whose components may differ in size along ``axis``.
          axis: from ``-ndim`` to ``ndim - 1``.
        Returns:
          The tree of concatenated arrays, each on the first replica's device.
        Raises:
          ContextError: inside a replica.
          ArgumentError, MismatchError: as ``CrossDeviceOps.gather``.
        """
        with cross_replica_context(self, "gather", "get_replica_context().all_gather"):
            return map_tree(value, lambda leaf: self._ops.gather(leaf, per_replica(leaf).devices[0], axis)[0])

    def split(self, batch: Any, axis: int = 0) -> Any:
        """Split a batch over the replicas.

        Args:
          batch: a tree of arrays with the same number of samples along ``axis``.
          axis: the axis of the samples.
        Returns:
          The tree with a ``PerReplica`` of shares for each array. Joined in order, the shares are the array. Their
          sizes differ by at most one sample; the first shares are the larger ones, and if there are fewer samples than
          replicas, the last shares are empty. Shares of NumPy arrays are views, and so are those of torch tensors
          unless they are moved to another device.
        Raises:
          ContextError: inside a replica.
          MismatchError: arrays of different size along ``axis``.
          ArgumentError: an array without this axis.

        >>> import numpy as np
        >>> [x.tolist() for x in MirroredStrategy(3).split(np.arange(5))]
        [[0, 1], [2, 3], [4]]
        """
        return split_tree(batch, axis, self._devices)

    def distribute_dataset(self, dataset: Iterable[Any], axis: int = 0) -> DistributedDataset:
        """Return an iterable of a dataset's batches, each split over the replicas when the iteration reaches it.

        Args:
          dataset: an iterable of batches, as for ``split`` (TensorFlow's ``experimental_distribute_dataset``).
          axis: as for ``split``.
        """
        return DistributedDataset(self._devices, dataset, axis)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Call a function for each replica, one after another, and return its results as per-replica values.

        Args:
          value_fn: receives a ``ValueContext``.
        Returns:
          The tree of per-replica values. Arrays are not moved.

        >>> strategy = MirroredStrategy(2)
        >>> strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group * 10).values
        (0, 10)
        """
        n = self.num_replicas_in_sync
        with cross_replica_context(self, "distribute_values_from_function", "create the value in the replica"):
            components = [value_fn(ValueContext(k, n, device)) for k, device in enumerate(self._devices)]
        return regroup(components, self._devices)

    def replicate(self, value: Any) -> Any:
        """Return copies of a value, one per replica, each on the replica's device.

        Args:
          value: a tree of arrays and of objects such as a ``torch.nn.Module`` and its optimizer. Each replica receives
            a deep copy of the entire tree, so references between its objects are preserved. Modules are moved to
            accelerators by their method ``to``; if the device is a CPU, they stay where they are.
        Returns:
          The tree of per-replica values.

        >>> import numpy as np
        >>> [x.tolist() for x in MirroredStrategy(2).replicate({"w": np.ones(2)})["w"]]
        [[1.0, 1.0], [1.0, 1.0]]
        """
        require_cross_replica("replicate", "replicate before run(), and pass the copies as arguments")
        copies = [map_tree(copy.deepcopy(value), partial(_to_device, device=device)) for device in self._devices]
        return regroup(copies, self._devices)

    def _reduce_single(self, op: ReduceOp, value: Any) -> Any:
        """Return the reduction of a single array over all replicas, where it counts as the same on each."""
        check_array(value)
        zero = isinstance(value, (int, float, complex)) and value == 0
        if op in (ReduceOp.SUM, ReduceOp.PRODUCT) and self.num_replicas_in_sync > 1 and not zero:
            problem = f"the {op.value} of a single array over {self.num_replicas_in_sync} replicas is not defined."
            raise ArgumentError.of(problem, describe(value), "a PerReplica, such as run() returns")
        return framework_of(value).array(value) if isinstance(value, (int, float, complex)) else value

    def _reduce_axis(self, op: ReduceOp, leaf: Any, axis: int) -> Array:
        """Return a value reduced over the replicas and an axis: each component along the axis, then the results."""
        value = per_replica(leaf)
        framework = replica_framework(value[0])
        arrays: list[Any] = [framework_of(x).array(x) for x in value]
        for x in arrays:
            given = f"axis {axis!r} of {describe(leaf)}"
            if isinstance(x, Sparse):
                raise ArgumentError.of("a sparse value cannot be reduced along an axis.", given, "axis=None")
            inside = isinstance(axis, Integral) and -len(x.shape) <= axis < len(x.shape)
            if not inside or isinstance(axis, bool):
                remedy = "axis=None or axis=0" if x.shape else "axis=None"
                raise ArgumentError.of("axis must be None or an axis of the value.", given, remedy)
        check_value(None, value, axis=axis)  # the components must be alike, except for their sizes along the axis
        sizes = [int(x.shape[axis]) for x in arrays]
        devices = value.devices
        if op in (ReduceOp.MIN, ReduceOp.MAX):  # empty components do not have a minimum or maximum
            nonempty = [k for k, size in enumerate(sizes) if size]
            arrays, devices = [arrays[k] for k in nonempty], tuple(devices[k] for k in nonempty)
        if not sum(sizes) and op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MEAN):
            problem = f"the {op.value} of no elements is not defined."
            raise ArgumentError.of(problem, repr(value), "a batch that is not empty")
        numbers = framework.numbers(op, framework.spec(arrays[0]).dtype, sum(sizes))
        reduced_along_axis = PerReplica.on(tuple(framework.reduce_axis(op, x, axis, numbers) for x in arrays), devices)
        over_replicas = ReduceOp.SUM if op is ReduceOp.MEAN else op
        total = self._ops.reduce(over_replicas, reduced_along_axis, value.devices[0])[0]
        # The total is already in the accumulator's dtype; only the division and the conversion to the result are left.
        final_numbers = Numbers(op, numbers.accumulator, numbers.accumulator, numbers.result, numbers.divisor)
        return framework.finish(framework.array(total), final_numbers)


def get_strategy() -> MirroredStrategy:
    """Return the strategy in whose scope the caller is. Outside all scopes, it has one replica, on ``cpu:0``."""
    here = current()
    if here is None:
        return _default_strategy()
    assert isinstance(here.strategy, MirroredStrategy)
    return here.strategy


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica that makes this call, or ``None`` in the cross-replica context.

    Outside all strategies it is the context of a single replica, so code for replicas runs there, too.

    >>> float(get_replica_context().all_reduce("sum", 3.0))
    3.0
    """
    here = current()
    return _default_replica() if here is None else here.replica


@cache
def _default_strategy() -> MirroredStrategy:
    strategy = MirroredStrategy(1)
    strategy.is_default = True
    return strategy


@cache
def _default_replica() -> ReplicaContext:
    return ReplicaContext(_default_strategy(), 0, None)


def _loaded_frameworks() -> list[ReplicaFramework]:
    """Return the frameworks that are imported and have settings per thread."""
    frameworks = [get(name) for name in FRAMEWORKS_WITH_SETTINGS if sys.modules.get(name) is not None]
    return [framework for framework in frameworks if isinstance(framework, ReplicaFramework)]


def _accelerators() -> tuple[str, ...]:
    """Return the accelerators of the first loaded framework that has any."""
    return next((names for framework in _loaded_frameworks() if (names := framework.accelerators())), ())


def _run_replica(context: ReplicaContext, modes: list[ThreadModes], fn: Any, args: list[Any], named: Any) -> Any:
    """Call a replica's function in its own thread, with the replica's context and the caller's modes."""
    with enter(Current(context.strategy, context)), ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode(context.devices[0]))
        return fn(*args, **named)


def _to_device(leaf: Any, device: str) -> Any:
    """Return an array or a module on a device. Other values, and modules if it is a CPU, are returned unchanged."""
    if isinstance(leaf, DistributedVariable):
        raise ArgumentError.of("a variable cannot be replicated again.", repr(leaf), "pass it to run() unchanged")
    try:
        framework = framework_of(leaf)
    except ArgumentError:
        place = parse(device)
        if place.kind == "cpu" or not hasattr(leaf, "to"):
            return leaf
        return leaf.to(f"{place.kind}:{place.index}")
    framework.require((device,))
    return framework.to_device(leaf, device) if hasattr(leaf, "shape") else leaf
