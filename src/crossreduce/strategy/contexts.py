"""The context of the current call, and the view that a replica has of its strategy.

Input: trees of arrays of one replica. Output: the tree reduced, gathered or merged with those of the other replicas.
As in ``tf.distribute`` there are two kinds of contexts. In the context of a replica, inside ``run``, arrays belong to
one replica. In the cross-replica context, inside ``scope`` and ``merge_call``, the values of all replicas are
available. The current context is stored in a context variable, so other threads and tasks are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from numbers import Integral
from types import BuiltinFunctionType
from typing import Any, Final, NamedTuple

from ..devices import parse
from ..errors import ArgumentError, ContextError, UnsupportedError, shown
from ..frameworks import KNOWN, Array, Framework, ReplicaFramework, framework_of
from ..ops import ReduceOp
from ..options import CommunicationOptions
from ..reduction.trees import flatten_tree, reduce_leaves, unflatten_tree
from ..reduction.validation import read_op, read_options
from ..values import DistributedValues, describe, host_devices, locate
from .base import Strategy
from .regroup import check_arguments, localize, map_leaves, per_replica_on, regroup
from .replica_group import CollectiveCall, ReplicaGroup

FRAMEWORKS_WITH_SETTINGS: Final = ("torch", "jax", "cupy")  # settings per thread, such as torch.no_grad
REDUCE_IN_A_REPLICA: Final = "get_replica_context().all_reduce, or merge_call(lambda strategy, x: ..., args=(x,))"


class Current(NamedTuple):
    """The context of a call: a replica of a strategy or, if ``replica`` is ``None``, its cross-replica context."""

    strategy: Strategy
    replica: ReplicaContext | None


_CURRENT: ContextVar[Current | None] = ContextVar("crossreduce_current", default=None)


def current() -> Current | None:
    """Return the context of this call, or ``None`` outside all strategies."""
    return _CURRENT.get()


@contextmanager
def enter(context: Current) -> Iterator[None]:
    """Make a context the current one until the block ends."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def has_strategy() -> bool:
    """Return whether this call is inside the ``scope`` or ``run`` of a strategy other than the default one."""
    here = current()
    return here is not None and not here.strategy.is_default


def in_cross_replica_context() -> bool:
    """Return whether this call is in a strategy's cross-replica context, such as inside ``scope`` or ``merge_call``."""
    here = current()
    return here is not None and here.replica is None


@contextmanager
def cross_replica_context(strategy: Strategy, name: str, remedy: str) -> Iterator[None]:
    """Enter a strategy's cross-replica context while its method ``name`` runs.

    ``remedy`` tells in the error what to call instead inside a replica.

    Raises:
      ContextError: inside a replica, or inside another strategy's scope.
    """
    require_cross_replica(name, remedy)
    here = current()
    if here is not None and here.strategy is not strategy and has_strategy():
        problem = "a strategy is used inside another strategy's scope."
        given = f"{strategy} inside {here.strategy}"
        raise ContextError.of(problem, given, "leave that scope first; one strategy can have all devices")
    with enter(Current(strategy, None)):
        yield


def require_cross_replica(name: str, remedy: str) -> None:
    """Raise ContextError if the method ``name`` is called inside a replica. ``remedy``: what to call there instead."""
    here = current()
    if here is not None and here.replica is not None:
        k = here.replica.replica_id_in_sync_group
        problem = f"{name} can only be called in the cross-replica context."
        raise ContextError.of(problem, f"a call inside replica {k}", remedy)


def replica_framework(value: Any) -> ReplicaFramework:
    """Return the framework of an array that replicas can reduce.

    Raises:
      ArgumentError: it is not an array.
      UnsupportedError: its framework does not support replicas in threads.
    """
    name = framework_of(value).name
    framework = _as_replica_framework(framework_of(value))
    if framework is not None:
        return framework
    problem, remedy = f"MirroredStrategy does not support arrays of {name}.", "arrays of NumPy, PyTorch, JAX or CuPy"
    if name == "tensorflow":
        problem = "crossreduce's MirroredStrategy does not support TensorFlow, which has its own."
        remedy = (
            "tf.distribute.MirroredStrategy(cross_device_ops=crossreduce.tensorflow.HierarchicalCopyAllReduce()), and "
            "inside it tf.distribute.get_replica_context()"
        )
    raise UnsupportedError.of(problem, describe(value), remedy)


@cache  # since isinstance of a protocol is slow: it looks up every method
def _as_replica_framework(framework: Framework) -> ReplicaFramework | None:
    return framework if isinstance(framework, ReplicaFramework) else None


class ReplicaContext:
    """One replica's view of its strategy; ``get_replica_context`` returns it inside ``run``.

    >>> from crossreduce import MirroredStrategy, get_replica_context
    >>> def step():
    ...     context = get_replica_context()
    ...     return context.all_reduce("sum", 10.0 ** context.replica_id_in_sync_group)
    >>> float(MirroredStrategy(3).run(step)[2])
    111.0
    """

    def __init__(self, strategy: Strategy, replica: int, group: ReplicaGroup | None) -> None:
        self._strategy = strategy
        self._replica = replica
        self._group = group  # None for the single replica outside all strategies, which waits for no others

    def __repr__(self) -> str:
        return f"ReplicaContext(replica {self._replica} of {self.num_replicas_in_sync}, on {self.devices[0]})"

    @property
    def strategy(self) -> Strategy:
        """The replica's strategy."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The replica's number, starting at 0."""
        return self._replica

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str]:
        """The replica's device, as a tuple of one name."""
        return (self._strategy.devices[self._replica],)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Return this replica's tree reduced with those of the other replicas, which must make the same call.

        All leaves are reduced in one ``batch_reduce`` of the strategy's ops. If a torch tensor requires a gradient, its
        result does, too. The gradient of a sum is the sum of the replicas' gradients, and that of a mean is their mean,
        so ``backward`` waits for the other replicas as well.

        Args:
          reduce_op: a ``ReduceOp`` or its name, the same on all replicas.
          value: a tree, as for ``crossreduce.all_reduce``. This replica's component of a distributed value is used.
          options: hints for this call, the same on all replicas. ``timeout_seconds`` limits the wait for the others.
        Returns:
          The tree with its leaves reduced. Each leaf stays on its device, and numbers become arrays without axes.
        Raises:
          MismatchError: the replicas make different calls; the message lists them.
          StalledError: other replicas did not call within the timeout.
          ContextError: this is not the context of the calling replica.
          ArgumentError, UnsupportedError: as ``crossreduce.all_reduce``; also for traced values and TensorFlow's
            tensors; and for tensors that require gradients if ``reduce_op`` is min, max or product, or if replicas
            share an accelerator.
        """
        self._require_current("all_reduce")
        if isinstance(value, (str, ReduceOp)):
            given = f"all_reduce({shown(reduce_op)}, {shown(value)})"
            raise ArgumentError.of("the op comes before the value.", given, f"all_reduce({value!r}, value)")
        op = read_op(reduce_op)
        hints = read_options(options)
        leaves, structure = self._flatten(value)
        results = self._all_reduce(op, leaves, structure, hints)
        is_leaf = bool(leaves) and leaves[0] is value
        return results[0] if is_leaf else unflatten_tree(structure, results)

    def _flatten(self, value: Any) -> tuple[list[Any], Any]:
        """Return the leaves and the structure of a tree, with this replica's components of distributed values."""
        if _is_numpy(value):
            return [value], _single_leaf()
        leaves, structure = flatten_tree(value)
        if any(isinstance(leaf, DistributedValues) for leaf in leaves):
            local = localize(value, self._replica, self.num_replicas_in_sync, keep_variables=False)
            leaves, structure = flatten_tree(local)
        return leaves, structure

    def _all_reduce(self, op: ReduceOp, leaves: list[Any], structure: Any, hints: CommunicationOptions) -> list[Any]:
        """Return a tree's leaves, reduced. Backward passes call this directly, possibly in a framework's thread."""
        recorded, in_caller = _gradient_recording(leaves, structure)
        backward = [k for k, has_gradient in enumerate(recorded) if has_gradient]
        if backward and op not in (ReduceOp.SUM, ReduceOp.MEAN):
            problem = f"an all-reduce by {op.value} has no gradient."
            raise UnsupportedError.of(problem, describe(leaves[backward[0]]), "value.detach(), or torch.no_grad()")
        strategy = self._strategy
        if backward:
            _require_own_accelerators(strategy.devices)

        def description() -> str:
            arrays = describe(leaves[0]) if len(leaves) == 1 else f"{len(leaves)} arrays"
            tree = "" if structure.is_leaf() else f" in {shown(structure).rpartition(' (')[0]}"
            return f"all_reduce {op.value} of {arrays}{tree}{' with gradients' * bool(backward)}{_with_hints(hints)}"

        def merge(lists: list[list[Any]]) -> list[Any]:  # the leaves of each replica
            ops, devices = strategy.cross_device_ops, _host_names(lists, strategy.devices)
            return reduce_leaves(lists, structure, op, devices, ops, hints)

        key = ("all_reduce", op, structure, hints, recorded)
        call = CollectiveCall(key, description, leaves, merge, hints.timeout_seconds, in_caller)
        results: list[Any] = self.rendezvous(call)
        if backward:

            def gradient(grads: Sequence[Array]) -> list[Array]:
                return self._all_reduce(op, list(grads), flatten_tree(list(grads))[1], hints)

            inputs = [leaves[k] for k in backward]
            outputs = replica_framework(inputs[0]).differentiable(inputs, [results[k] for k in backward], gradient)
            for k, result in zip(backward, outputs, strict=True):
                results[k] = result
        return results

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate a tree's arrays with those of the other replicas along an axis, in the order of the replicas.

        Args:
          value: a tree of arrays, whose sizes along ``axis`` may differ between replicas. A torch tensor's gradient is
            that part of the sum of the replicas' gradients which belongs to this tensor.
          axis: from ``-ndim`` to ``ndim - 1``.
          options: as for ``all_reduce``.
        Returns:
          The tree with the concatenated arrays.
        Raises:
          As ``all_reduce``; and ArgumentError if an array does not have this axis.
        """
        self._require_current("all_gather")
        hints = read_options(options)
        leaves, structure = self._flatten(value)
        recorded, in_caller = _gradient_recording(leaves, structure)
        strategy = self._strategy

        def description() -> str:
            return f"all_gather along axis {axis} of {', '.join(map(describe, leaves[:3]))}{_with_hints(hints)}"

        def merge(lists: list[list[Any]]) -> list[Any]:  # the leaves of each replica
            def concatenate(components: tuple[Any, ...]) -> tuple[Any, ...]:
                joined = per_replica_on(strategy.devices, components)
                return strategy.cross_device_ops.gather(joined, joined, axis, hints).values

            gathered = map_leaves(zip(*lists, strict=True), structure, concatenate)  # by leaf, then by replica
            sizes = [[x.shape[axis] if has else 0 for x, has in zip(own, recorded, strict=True)] for own in lists]
            return [([components[k] for components in gathered], sizes) for k in range(len(lists))]

        key = ("all_gather", int(axis) if isinstance(axis, Integral) else repr(axis), structure, hints, recorded)
        call = CollectiveCall(key, description, leaves, merge, hints.timeout_seconds, in_caller)
        results, sizes = self.rendezvous(call)
        for k, x in enumerate(leaves):
            if recorded[k]:
                start = sum(others[k] for others in sizes[: self._replica])
                results[k] = self._differentiable_gather(x, results[k], axis % x.ndim, start, hints)
        return unflatten_tree(structure, results)

    def _differentiable_gather(
        self, x: Array, result: Array, axis: int, start: int, hints: CommunicationOptions
    ) -> Array:
        """Return the gathered array ``result``, recorded as a function of ``x``, which starts at ``start`` in it."""
        part = (*(slice(None),) * axis, slice(start, start + x.shape[axis]))

        def gradient(grads: Sequence[Array]) -> list[Array]:
            (total,) = self._all_reduce(ReduceOp.SUM, list(grads), flatten_tree(list(grads))[1], hints)
            return [total[part]]

        (recorded,) = replica_framework(x).differentiable([x], [result], gradient)
        return recorded

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function once for all replicas, in the cross-replica context; all replicas must make this call.

        The function runs in the thread that called ``run``, while the replicas wait. If the replicas pass functions
        with different closures, the first replica's function is called.

        Args:
          merge_fn: receives the strategy, then the arguments.
          args: the replicas' trees are regrouped: an array arrives at ``merge_fn`` as a ``PerReplica``.
          kwargs: the same for keyword arguments.
        Returns:
          The tree that ``merge_fn`` returned, with this replica's components instead of distributed values.
        Raises:
          The exception that ``merge_fn`` raised; otherwise as ``all_reduce``.

        >>> from crossreduce import MirroredStrategy, get_replica_context
        >>> def step():
        ...     context = get_replica_context()
        ...     merge = lambda strategy, x: strategy.reduce("max", x)
        ...     return context.merge_call(merge, args=(context.replica_id_in_sync_group,))
        >>> [int(x) for x in MirroredStrategy(2).run(step)]
        [1, 1]
        """
        self._require_current("merge_call")
        if not callable(merge_fn):
            problem = "merge_fn must be a function whose first argument is the strategy."
            raise ArgumentError.of(problem, shown(merge_fn), "merge_call(lambda strategy, x: ..., args=(x,))")
        check_arguments(args, kwargs)
        strategy, n = self._strategy, self.num_replicas_in_sync
        name = getattr(merge_fn, "__name__", type(merge_fn).__name__)

        def merge(calls: list[Any]) -> list[Any]:
            positional, named = regroup([[list(a), dict(kw)] for _, a, kw in calls], strategy.devices)
            result = calls[0][0](strategy, *positional, **named)
            return [localize(result, k, n) for k in range(n)]

        key = ("merge_call", _code(merge_fn), len(args))
        call = CollectiveCall(key, lambda: f"merge_call of {name}", (merge_fn, args, kwargs or {}), merge)
        return self.rendezvous(call)

    def rendezvous(self, call: CollectiveCall) -> Any:
        """Make a call together with all replicas, in the cross-replica context, and return this replica's result."""
        if self._group is not None:
            return self._group.rendezvous(self._replica, call)
        with enter(Current(self._strategy, None)):
            return call.merge([call.value])[0]

    def _require_current(self, name: str) -> None:
        here = current()
        replica = None if here is None else here.replica
        if replica is not self and self._group is not None:
            caller = "outside all replicas" if replica is None else f"in {replica}"
            problem = f"{name} was called on the context of a replica that is not the current one."
            given = f"the context of replica {self._replica} on {self.devices[0]}, called {caller}"
            raise ContextError.of(problem, given, "get_replica_context() inside the function that run() calls")


def _gradient_recording(leaves: list[Any], structure: Any) -> tuple[tuple[bool, ...], bool]:
    """Return for each leaf whether its framework records operations on it for a gradient, and ``in_caller``.

    ``in_caller`` is whether only the thread that called ``run`` can reduce the leaves. This is so if one of their
    frameworks has settings per thread.
    """
    if all(map(_is_numpy, leaves)):
        return (False,) * len(leaves), False
    settings = False

    def is_recorded(leaf: Any) -> bool:
        nonlocal settings
        framework = replica_framework(leaf)
        settings = settings or framework.name in FRAMEWORKS_WITH_SETTINGS
        return framework.is_recorded(leaf)

    recorded = tuple(map_leaves(leaves, structure, is_recorded))
    return recorded, settings


def _is_numpy(value: Any) -> bool:
    """Return whether a value is a NumPy array or a number, so that it is a leaf without a gradient."""
    framework = KNOWN.get(type(value))
    return framework is not None and framework.name == "numpy"


@cache
def _single_leaf() -> Any:
    """Return the structure of a tree that is a single array."""
    return flatten_tree(0)[1]


def _code(function: Callable[..., Any]) -> object:
    """Return a key that is equal for functions from the same code, such as the lambdas that replicas create."""
    function = getattr(function, "func", function)  # the function of a functools.partial
    default = function if isinstance(function, BuiltinFunctionType) else type(function)
    return getattr(function, "__code__", default)


def _require_own_accelerators(devices: tuple[str, ...]) -> None:
    """Raise UnsupportedError if replicas share an accelerator: torch would block, with one thread for all of them."""
    places = [parse(name) for name in devices]
    shared = [str(place) for place in places if place.logical and place.kind != "cpu"]
    if shared:
        problem = "replicas that share an accelerator cannot compute gradients of an all-reduce."
        remedy = "reduce the gradients after backward(), and detach other tensors before they are reduced"
        raise UnsupportedError.of(problem, f"replicas on {', '.join(devices)}", remedy)


def _with_hints(hints: CommunicationOptions) -> str:
    return "" if hints is read_options(None) else f" with {hints}"


def _host_names(lists: list[list[Any]], devices: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return ``devices`` if they are all in host memory but not called cpu:0, cpu:1, ...; otherwise ``None``."""
    if devices == host_devices(len(devices)) or any(locate(x) != "cpu" for own in lists for x in own):
        return None
    return devices if all(name.startswith("cpu:") for name in devices) else None
