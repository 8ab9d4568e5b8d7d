"""``strategy.extended``: the calls that libraries and optimizers make in the cross-replica context.

Input: per-replica values, destinations, variables. Output: ``Mirrored`` values, or the results of updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import ArgumentError, shown
from ..ops import ReduceOp
from ..options import CommunicationOptions
from ..reduction.validation import check_pairs
from ..values import DistributedValues, Mirrored
from .base import Strategy
from .contexts import REDUCE_IN_A_REPLICA, cross_replica_context
from .regroup import local_arguments, map_arguments, map_tree, regroup
from .variables import Component, Variable


class Extended:
    """The calls of libraries and optimizers: ``strategy.extended``, as in ``tf.distribute``."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The replicas' devices."""
        return self._strategy.devices

    def variable_created_in_scope(self, variable: Variable) -> bool:
        """Return whether a variable belongs to this strategy."""
        return isinstance(variable, Variable) and variable._strategy is self._strategy

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Mirrored:
        """Reduce one value and put the result on destinations; see ``CrossDeviceOps.reduce``.

        Args:
          destinations: as for ``CrossDeviceOps.reduce``. ``None`` means the devices of all replicas.
        """
        with cross_replica_context(self._strategy, "reduce_to", REDUCE_IN_A_REPLICA):
            return self._strategy.cross_device_ops.reduce(reduce_op, value, self._destinations(destinations), options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Mirrored]:
        """Reduce several values, each to its own destinations; see ``CrossDeviceOps.batch_reduce``."""
        with cross_replica_context(self._strategy, "batch_reduce_to", REDUCE_IN_A_REPLICA):
            pairs = [(value, self._destinations(places)) for value, places in check_pairs(value_destination_pairs)]
            return self._strategy.cross_device_ops.batch_reduce(reduce_op, pairs, options)

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Mirrored:
        """Copy one array to destinations; see ``CrossDeviceOps.broadcast`` and ``reduce_to``."""
        with cross_replica_context(self._strategy, "broadcast_to", "use the array directly: every replica has it"):
            return self._strategy.cross_device_ops.broadcast(tensor, self._destinations(destinations))

    def update(
        self,
        var: DistributedValues,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function for each component of a variable, one after another, in the cross-replica context.

        Args:
          var: a variable or another distributed value. A variable's components are passed as ``Component``s, which can
            be read and assigned; those of another value are passed directly.
          fn: receives the component, then the arguments.
          args: trees. In place of each distributed value in them, ``fn`` receives the component of the same replica.
            Torch tensors that share memory with the variable ``var`` are copied, so that no assignment changes them.
          kwargs: the same for keyword arguments.
        Returns:
          The results of the calls, regrouped as by ``run``; a ``Component`` counts as ``None``.
        Raises:
          ContextError: inside a replica.
          ArgumentError: ``var`` is not a distributed value with one component per replica.

        >>> import numpy as np
        >>> from crossreduce import MirroredStrategy, PerReplica
        >>> strategy = MirroredStrategy(2)
        >>> with strategy.scope():
        ...     weights = Variable(np.array([1.0, 2.0]))
        >>> gradient = PerReplica([np.array([1.0, 1.0])] * 2)
        >>> strategy.extended.update(weights, lambda w, g: w.assign_sub(0.5 * g), args=(gradient,))
        >>> weights.value()
        array([0.5, 1.5])
        """
        n, results = self._strategy.num_replicas_in_sync, []
        remedy = "merge_call(lambda strategy, g: strategy.extended.update(...), args=(g,))"
        with cross_replica_context(self._strategy, "update", remedy):
            if not isinstance(var, DistributedValues) or len(var) != n:
                problem = f"var must be a variable or another distributed value with {n} components, one per replica."
                raise ArgumentError.of(problem, shown(var), "a Variable that was created in strategy.scope()")
            if isinstance(var, Variable):  # no assignment may change the arguments
                args, kwargs = map_arguments(args, kwargs, partial(_separate, var))
            for k in range(n):
                component = Component(var, k) if isinstance(var, Variable) else var[k]
                positional, named = local_arguments(args, kwargs, k, n, keep_variables=False)
                result = fn(component, *positional, **named)
                results.append(None if isinstance(result, Component) else result)
        return regroup(results, self._strategy.devices)

    def _destinations(self, destinations: Any) -> Any:
        """Return ``destinations``, or a value on all replicas' devices instead of ``None``."""
        devices = self._strategy.devices
        return Mirrored.on(devices, devices) if destinations is None else destinations


def _separate(var: Variable, argument: Any) -> Any:
    """Return an argument with ``var.separate`` applied to its leaves."""
    if isinstance(argument, DistributedValues):  # the most common argument
        return var.separate(argument)
    return map_tree(argument, var.separate)
