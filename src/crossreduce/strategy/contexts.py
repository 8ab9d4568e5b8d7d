"""What a replica sees of its strategy, and in which context a call stands.

There are two kinds of contexts, as in ``tf.distribute``: a replica's, inside of ``run``, where arrays are one
replica's own; and the cross-replica context, inside of ``scope`` and ``merge_call``, where values of all replicas are
at hand. Which one it is lies in a context variable, so threads and tasks of others see nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from numbers import Integral
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..devices import parse
from ..errors import ArgumentError, ContextError, UnsupportedError, message, shown
from ..frameworks import Array, Framework, ReplicaFramework, framework_of
from ..ops import ReduceOp
from ..options import CommunicationOptions
from ..trees import flatten_tree, reduce_leaves, unflatten_tree
from ..validation import read_op, read_options
from ..values import DistributedValues, describe, host_devices, locate
from .regroup import check_arguments, each, localized, placed, regroup
from .replica_group import Call, Crew

if TYPE_CHECKING:
    from .mirrored import MirroredStrategy


class Current(NamedTuple):
    """Where a call stands: in a replica of a strategy, or, without one, in its cross-replica context."""

    strategy: MirroredStrategy
    replica: ReplicaContext | None


_CURRENT: ContextVar[Current | None] = ContextVar("crossreduce_current", default=None)


def current() -> Current | None:
    """Return where this call stands; ``None``: outside of all strategies."""
    return _CURRENT.get()


@contextmanager
def entered(here: Current) -> Iterator[None]:
    """Let calls stand elsewhere for a while."""
    token = _CURRENT.set(here)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def require_cross_replica(what: str, remedy: str) -> None:
    """Raise where a call that is for all replicas stands in one of them.

    Raises:
      ContextError: it does.
    """
    here = current()
    if here is not None and here.replica is not None:
        k = here.replica.replica_id_in_sync_group
        raise ContextError(
            message(f"{what} belongs to the cross-replica context.", f"a call of it inside replica {k}", remedy)
        )


def replica_framework(value: Any) -> ReplicaFramework:
    """Return the framework of an array that replicas may reduce.

    Raises:
      ArgumentError: it is no array.
      UnsupportedError: its framework has no replicas here.
    """
    framework = _with_replicas(framework_of(value))
    if framework is not None:
        return framework
    raise UnsupportedError(
        message(
            "TensorFlow has a MirroredStrategy of its own, and crossreduce's takes none of its values.",
            describe(value),
            "tf.distribute.MirroredStrategy(cross_device_ops=crossreduce.tensorflow.HierarchicalCopyAllReduce()), and "
            "inside of it tf.distribute.get_replica_context()",
        )
    )


@cache  # isinstance of a protocol looks at every method
def _with_replicas(framework: Framework) -> ReplicaFramework | None:
    return framework if isinstance(framework, ReplicaFramework) else None


class ReplicaContext:
    """One replica's view of its strategy, from ``get_replica_context`` inside of ``run``.

    >>> from crossreduce import MirroredStrategy, get_replica_context
    >>> def step():
    ...     context = get_replica_context()
    ...     return context.all_reduce("sum", 10.0 ** context.replica_id_in_sync_group)
    >>> float(MirroredStrategy(3).run(step)[2])
    111.0
    """

    def __init__(self, strategy: MirroredStrategy, replica: int, crew: Crew | None) -> None:
        self._strategy = strategy
        self._replica = replica
        self._crew = crew  # None: the one replica outside of all strategies, which waits for nobody

    def __repr__(self) -> str:
        return f"ReplicaContext(replica {self._replica} of {self.num_replicas_in_sync}, on {self.devices[0]})"

    @property
    def strategy(self) -> MirroredStrategy:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The replica's number, from 0."""
        return self._replica

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str]:
        """The replica's device, a tuple of one name."""
        return (self._strategy.devices[self._replica],)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduce a tree with those of the other replicas, which must call this as well; return this replica's result.

        All leaves are reduced in one ``batch_reduce`` of the strategy's ops. A torch tensor that requires gradients
        gives one that does: the gradient of a sum is the sum of the replicas' gradients, that of a mean their
        mean. So ``backward`` waits for the other replicas, too.

        Args:
          reduce_op: a ``ReduceOp`` or its name, the same on all replicas.
          value: a tree as ``crossreduce.all_reduce`` takes it; of distributed values in it, this replica's component.
          options: hints for this call, the same on all replicas; ``timeout_seconds``: how long to wait for the others.
        Returns:
          The tree with its leaves reduced; each stays on its device, and numbers become arrays of no axes.
        Raises:
          MismatchError: the replicas want different things; each is named with what it wants.
          StalledError: others did not come within the timeout.
          ContextError: this is not the replica that calls.
          ArgumentError, UnsupportedError: as ``crossreduce.all_reduce``; a value that JAX traces; min, max and product
            of tensors that require gradients; TensorFlow's tensors.
        """
        self._require_here("all_reduce")
        op = read_op(reduce_op)
        hints = read_options(options)
        leaves, structure = self._taken_apart(value)
        return unflatten_tree(structure, self._all_reduce(op, leaves, structure, hints))

    def _taken_apart(self, value: Any) -> tuple[list[Any], Any]:
        """Return a tree's leaves, of distributed values this replica's component, and its structure."""
        leaves, structure = flatten_tree(value)
        if any(isinstance(leaf, DistributedValues) for leaf in leaves):
            leaves, structure = flatten_tree(localized(value, self._replica, self.num_replicas_in_sync, whole=False))
        return leaves, structure

    def _all_reduce(self, op: ReduceOp, leaves: list[Any], structure: Any, hints: CommunicationOptions) -> list[Any]:
        """Reduce a tree's leaves; backward passes come straight here, maybe in a thread of the framework's."""
        recorded = _recorded(leaves, structure)
        backward = [k for k, has_gradient in enumerate(recorded) if has_gradient]
        if backward and op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise UnsupportedError(
                message(
                    f"an all-reduce by {op.value} has no gradient.",
                    describe(leaves[backward[0]]),
                    "value.detach(), or torch.no_grad()",
                )
            )
        strategy = self._strategy
        if backward:
            _require_backward(strategy.devices)

        def wants() -> str:
            what = describe(leaves[0]) if len(leaves) == 1 else f"{len(leaves)} arrays"
            tree = "" if structure.is_leaf() else f" in {shown(structure).rpartition(' (')[0]}"
            return f"all_reduce {op.value} of {what}{tree}{' with gradients' * bool(backward)}{_hinted(hints)}"

        def merge(lists: list[list[Any]]) -> list[Any]:
            ops, devices = strategy.cross_device_ops, _names(lists, strategy.devices)
            reduced = reduce_leaves(list(zip(*lists, strict=True)), structure, op, devices, ops, hints)
            return [[column[k] for column in reduced] for k in range(len(lists))]

        key = ("all_reduce", op, structure, hints, recorded)
        results: list[Any] = self._meet(Call(key, wants, leaves, merge, hints.timeout_seconds))
        if backward:

            def gradient(grads: Sequence[Array]) -> list[Array]:
                return self._all_reduce(op, list(grads), flatten_tree(list(grads))[1], hints)

            own = [leaves[k] for k in backward]
            made = replica_framework(own[0]).differentiable(own, [results[k] for k in backward], gradient)
            for k, result in zip(backward, made, strict=True):
                results[k] = result
        return results

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Join a tree's arrays with those of the other replicas along an axis, in the order of the replicas.

        Args:
          value: a tree of arrays, which may differ from replica to replica in size along ``axis``. The gradient of
            a torch tensor in it is the sum of those that the replicas have for its part.
          axis: from ``-ndim`` to ``ndim - 1``.
          options: as for ``all_reduce``.
        Returns:
          The tree with the joined arrays.
        Raises:
          As ``all_reduce``; and ArgumentError where there is no such axis.
        """
        self._require_here("all_gather")
        hints = read_options(options)
        leaves, structure = self._taken_apart(value)
        recorded = _recorded(leaves, structure)
        strategy = self._strategy

        def wants() -> str:
            return f"all_gather along axis {axis} of {', '.join(map(describe, leaves[:3]))}{_hinted(hints)}"

        def merge(lists: list[list[Any]]) -> list[Any]:
            def joined(components: tuple[Any, ...]) -> tuple[Any, ...]:
                together = placed(components, strategy.devices)
                return strategy.cross_device_ops.gather(together, together, axis, hints).values

            columns = each(zip(*lists, strict=True), structure, joined)
            sizes = [[x.shape[axis] if has else 0 for x, has in zip(own, recorded, strict=True)] for own in lists]
            return [([column[k] for column in columns], sizes) for k in range(len(lists))]

        key = ("all_gather", int(axis) if isinstance(axis, Integral) else repr(axis), structure, hints, recorded)
        results, sizes = self._meet(Call(key, wants, leaves, merge, hints.timeout_seconds))
        for k, x in enumerate(leaves):
            if recorded[k]:
                start = sum(others[k] for others in sizes[: self._replica])
                results[k] = self._gathered(x, results[k], axis % x.ndim, start, hints)
        return unflatten_tree(structure, results)

    def _gathered(self, x: Array, result: Array, axis: int, start: int, hints: CommunicationOptions) -> Array:
        """Return a gathered array whose gradient is the sum of the replicas' gradients, cut to this one's part."""
        part = (*(slice(None),) * axis, slice(start, start + x.shape[axis]))

        def gradient(grads: Sequence[Array]) -> list[Array]:
            (total,) = self._all_reduce(ReduceOp.SUM, list(grads), flatten_tree(list(grads))[1], hints)
            return [total[part]]

        (made,) = replica_framework(x).differentiable([x], [result], gradient)
        return made

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function once for all replicas, which must call this as well, in the cross-replica context.

        It runs in the thread that called ``run``, while the replicas wait. Where the replicas' functions differ in
        what they close over, the first replica's is called.

        Args:
          merge_fn: gets the strategy, then the arguments.
          args: the replicas' trees are regrouped: an array is a ``PerReplica`` to ``merge_fn``.
          kwargs: likewise.
        Returns:
          The tree that it returned; of distributed values in it this replica's component.
        Raises:
          What it raises; and as ``all_reduce``.

        >>> from crossreduce import MirroredStrategy, get_replica_context
        >>> def step():
        ...     context = get_replica_context()
        ...     merge = lambda strategy, x: strategy.reduce("max", x)
        ...     return context.merge_call(merge, args=(context.replica_id_in_sync_group,))
        >>> [int(x) for x in MirroredStrategy(2).run(step)]
        [1, 1]
        """
        self._require_here("merge_call")
        if not callable(merge_fn):
            raise ArgumentError(
                message("merge_fn must be a function of the strategy.", shown(merge_fn), "merge_call(fn)")
            )
        check_arguments(args, kwargs)
        strategy, n = self._strategy, self.num_replicas_in_sync
        name = getattr(merge_fn, "__name__", type(merge_fn).__name__)

        def merge(parts: list[Any]) -> list[Any]:
            positional, named = regroup([[list(a), dict(kw)] for _, a, kw in parts], strategy.devices)
            result = parts[0][0](strategy, *positional, **named)
            return [localized(result, k, n) for k in range(n)]

        key = ("merge_call", _source(merge_fn), len(args))
        return self._meet(Call(key, lambda: f"merge_call of {name}", (merge_fn, args, kwargs or {}), merge))

    def _meet(self, call: Call) -> Any:
        """Wait for the other replicas; what they want is done in the cross-replica context."""
        if self._crew is not None:
            return self._crew.meet(self._replica, call)
        with entered(Current(self._strategy, None)):
            return call.merge([call.value])[0]

    def _require_here(self, what: str) -> None:
        here = current()
        replica = None if here is None else here.replica
        if replica is not self and self._crew is not None:
            k = self._replica
            place = "outside of all replicas" if replica is None else f"in {replica}"
            raise ContextError(
                message(
                    f"{what} of a replica is called where another one, or none, runs.",
                    f"the context of replica {k} on {self.devices[0]}, {place}",
                    "get_replica_context() inside of the function that run() calls",
                )
            )


def _recorded(leaves: list[Any], structure: Any) -> tuple[bool, ...]:
    """Return for each leaf of a tree whether a gradient is to be made of it."""
    return tuple(each(leaves, structure, lambda leaf: replica_framework(leaf).is_recorded(leaf)))


def _source(function: Callable[..., Any]) -> object:
    """Return what is equal of functions that replicas have each made for themselves from the same lines."""
    function = getattr(function, "func", function)  # a partial's
    same = function if isinstance(function, BuiltinFunctionType) else type(function)
    return getattr(function, "__code__", same)


def _require_backward(devices: tuple[str, ...]) -> None:
    """Raise where replicas share an accelerator: torch has one thread for each, and it cannot wait for itself."""
    places = [parse(name) for name in devices]
    shared = [str(place) for place in places if place.logical and place.kind != "cpu"]
    if shared:
        raise UnsupportedError(
            message(
                "gradients pass through an all-reduce only where each replica has an accelerator of its own.",
                f"replicas on {', '.join(devices)}",
                "reduce the gradients after backward(), and detach what is reduced before",
            )
        )


def _hinted(hints: CommunicationOptions) -> str:
    return "" if hints is read_options(None) else f" with {hints}"


def _names(lists: list[list[Any]], devices: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the replicas' devices where all arrays lie in host memory, and so do not say which; else ``None``."""
    if devices == host_devices(len(devices)) or any(locate(x) != "cpu" for own in lists for x in own):
        return None
    return devices if all(name.startswith("cpu:") for name in devices) else None
