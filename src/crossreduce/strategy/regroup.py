"""Combine one tree per replica into one tree of per-replica values, and split such a tree again.

Input and output: pytrees. The only property of an array that matters here is its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..devices import parse
from ..errors import ArgumentError, ReductionError, UnsupportedError, shown
from ..frameworks import framework_of
from ..reduction.trees import flatten_tree, flatten_trees, name_leaf, unflatten_tree
from ..values import DistributedValues, PerReplica, default_devices, locate


class DistributedVariable(DistributedValues):
    """Base class of variables. Replicas receive the variable itself, not one of its components."""

    __slots__ = ()


def per_replica_on(devices: tuple[str, ...], components: Sequence[Any]) -> PerReplica:
    """Return a ``PerReplica`` of the replicas' components. ``devices`` are those of the replicas.

    Usually, the value is on the devices that the frameworks report. It is on ``devices`` in two cases: a component has
    no single device (such as a module), or ``devices`` are in host memory and all components report "cpu" without an
    index (as arrays of NumPy and PyTorch do).
    """
    reported = [_location(x) for x in components]
    on_replicas = None in reported or (set(reported) == {"cpu"} and all(parse(name).kind == "cpu" for name in devices))
    return PerReplica.on(tuple(components), devices if on_replicas else default_devices(reported))


def _location(x: Any) -> str | None:
    """Return an array's device, or ``None`` if ``x`` is not an array or reports no single device."""
    try:
        framework_of(x)
        return locate(x)
    except (ArgumentError, UnsupportedError):
        return None


def regroup(trees: list[Any], devices: tuple[str, ...]) -> Any:
    """Return one tree for the n trees of the replicas. Each leaf is a ``PerReplica``, also for one replica.

    None, a string or a distributed value (also a variable) is kept if all replicas have the same one. (TensorFlow
    unwraps every object that all replicas share, so the types of its results differ between one replica and two.)

    Raises:
      MismatchError: the trees differ in structure.
      ArgumentError: a leaf is a distributed value, but not the same one in all trees.
    """
    rows, structure = flatten_trees(trees)
    leaves = (_regroup_leaf(components, devices) for components in zip(*rows, strict=True))
    return unflatten_tree(structure, leaves)


def _regroup_leaf(components: tuple[Any, ...], devices: tuple[str, ...]) -> Any:
    """Return the leaf that replaces one leaf of each replica in the tree that ``regroup`` returns."""
    first = components[0]
    if isinstance(first, (str, bytes)) and all(type(x) is type(first) and x == first for x in components):
        return first
    if any(isinstance(x, DistributedValues) for x in components):
        if all(x is first for x in components):
            return first
        problem = "either all replicas must pass or return the same distributed value, or each one an ordinary value."
        given = "; ".join(f"replica {k}: {shown(x, 40)}" for k, x in enumerate(components))
        raise ArgumentError.of(problem, given, "the component of the distributed value that belongs to the replica")
    return per_replica_on(devices, components)


def localize(tree: Any, replica: int, n: int, *, keep_variables: bool = True) -> Any:
    """Return a tree with each distributed value replaced by a replica's component; a tree without them is not copied.

    With ``keep_variables``, variables are not replaced, since their methods use the current replica's component.

    Raises:
      ArgumentError: a distributed value does not have ``n`` components.
    """
    return map_tree(tree, lambda leaf: _component(leaf, replica, n, keep_variables))


def check_arguments(args: Any, kwargs: Any) -> None:
    """Raise ArgumentError if ``args`` is not a tuple or list, or ``kwargs`` is neither a dict nor ``None``."""
    if not isinstance(args, (tuple, list)) or not (kwargs is None or isinstance(kwargs, Mapping)):
        given = f"args {shown(args)}, kwargs {shown(kwargs)}"
        raise ArgumentError.of("args must be a tuple, and kwargs a dict.", given, 'args=(x,), kwargs={"name": y}')


def local_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, replica: int, n: int, *, keep_variables: bool = True
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that a replica receives: each one after ``localize``. Errors name the argument."""
    return map_arguments(args, kwargs, lambda value: localize(value, replica, n, keep_variables=keep_variables))


def map_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, function: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return a function's result for each argument. Its errors name the argument."""
    check_arguments(args, kwargs)

    def result(name: object, value: Any) -> Any:
        try:
            return function(value)
        except ReductionError as error:
            error.prefix(f"argument {name}")
            raise

    positional = [result(k, value) for k, value in enumerate(args)]
    return positional, {name: result(name, value) for name, value in (kwargs or {}).items()}


def _component(leaf: Any, replica: int, n: int, keep_variables: bool) -> Any:
    """Return the leaf that replaces a leaf in the tree that ``localize`` returns."""
    if not isinstance(leaf, DistributedValues) or (keep_variables and isinstance(leaf, DistributedVariable)):
        return leaf
    if len(leaf) != n:
        given = f"{len(leaf)} components on {', '.join(leaf.devices)}, for {n} replicas"
        remedy = "a value of this strategy; or one of its components, which all replicas then receive"
        raise ArgumentError.of("a distributed value needs one component for each replica.", given, remedy)
    return leaf[replica]


def map_tree(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return the tree in which each leaf is replaced by a function's result for it; ``tree`` itself if none changes.

    Raises:
      ArgumentError: the tree contains itself.
    """
    leaves, structure = flatten_tree(tree)
    mapped = map_leaves(leaves, structure, function)
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return tree
    return unflatten_tree(structure, mapped)


def map_leaves(leaves: Iterable[Any], structure: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Return a function's result for each leaf of a tree. The errors that the function raises name the leaf."""
    results = []
    for number, leaf in enumerate(leaves):
        try:
            results.append(function(leaf))
        except ReductionError as error:
            name_leaf(error, structure, number)
            raise
    return results
