"""n trees, one a replica, into one tree of per-replica values, and back.

In and out: pytrees. Arrays are looked at only for where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..devices import parse
from ..errors import ArgumentError, ReductionError, UnsupportedError, message, shown
from ..frameworks import framework_of
from ..trees import flatten_tree, flatten_trees, leaf_paths, unflatten_tree
from ..values import DistributedValues, PerReplica, default_devices, locate


class Whole(DistributedValues):
    """Distributed values that replicas get whole: variables."""

    __slots__ = ()


def placed(components: Sequence[Any], devices: tuple[str, ...]) -> PerReplica:
    """Return one component a replica, on the replicas' devices, or where their framework says that they are.

    What is no array (a module), and arrays in host memory, are on the replicas' devices, where that can be.
    """
    places = [_location(x) for x in components]
    anywhere = None in places or (set(places) == {"cpu"} and all(parse(name).kind == "cpu" for name in devices))
    return PerReplica.on(tuple(components), devices if anywhere else default_devices(places))


def _location(x: Any) -> str | None:
    """Return where an array is; ``None`` for what is no array, or spread over several devices."""
    try:
        framework_of(x)
        return locate(x)
    except (ArgumentError, UnsupportedError):
        return None


def regroup(trees: list[Any], devices: tuple[str, ...]) -> Any:
    """Return one tree in the place of n: of each leaf a ``PerReplica``, whatever n is.

    What is no value of a replica stays as it is where all replicas agree on it: None, strings, and
    distributed values, variables among them. (TensorFlow unwraps whatever is the same object, so that
    one replica gives other types than two.)

    Raises:
      MismatchError: the trees differ in structure.
      ArgumentError: distributed values that differ.
    """
    leaves, structure = flatten_trees(trees)
    return unflatten_tree(structure, [_regrouped(components, devices) for components in leaves])


def _regrouped(components: tuple[Any, ...], devices: tuple[str, ...]) -> Any:
    first = components[0]
    if isinstance(first, (str, bytes)) and all(type(x) is type(first) and x == first for x in components):
        return first
    if any(isinstance(x, DistributedValues) for x in components):
        if all(x is first for x in components):
            return first
        raise ArgumentError(
            message(
                "a replica's result cannot hold values of all replicas, unless it is the same on all.",
                shown(first),
                "return the replica's own component",
            )
        )
    return placed(components, devices)


def localized(tree: Any, replica: int, n: int, *, whole: bool = True) -> Any:
    """Return a tree in which a replica's component stands for each distributed value.

    A tree without any comes back as the same object.

    Args:
      tree: the tree.
      replica: whose components.
      n: how many replicas there are.
      whole: variables stay as they are: they know themselves which replica asks.
    Raises:
      ArgumentError: a distributed value with another number of components.
    """
    return mapped(tree, lambda leaf: _component(leaf, replica, n, whole))


def check_arguments(args: Any, kwargs: Any) -> None:
    """Raise where a function's arguments are no tuple (or list) and no dict.

    Raises:
      ArgumentError: they are not.
    """
    if not isinstance(args, (tuple, list)) or not (kwargs is None or isinstance(kwargs, Mapping)):
        given = f"args {shown(args)}, kwargs {shown(kwargs)}"
        raise ArgumentError(message("args must be a tuple, and kwargs a dict.", given, "args=(x,)"))


def arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, replica: int, n: int, *, whole: bool = True
) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's arguments for a replica, each ``localized`` by itself. Errors name the argument."""

    check_arguments(args, kwargs)

    def own(where: str, value: Any) -> Any:
        try:
            return localized(value, replica, n, whole=whole)
        except ReductionError as error:
            error.prefix(where)
            raise

    positional = [own(f"argument {k}", value) for k, value in enumerate(args)]
    return positional, {name: own(f"argument {name}", value) for name, value in (kwargs or {}).items()}


def _component(leaf: Any, replica: int, n: int, whole: bool) -> Any:
    if not isinstance(leaf, DistributedValues) or (whole and isinstance(leaf, Whole)):
        return leaf
    if len(leaf) != n:
        raise ArgumentError(
            message(
                "a distributed value needs one component for each replica.",
                f"{len(leaf)} components on {', '.join(leaf.devices)}, for {n} replicas",
                "a value of this strategy, or one of its components, which all replicas then get",
            )
        )
    return leaf[replica]


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tree with each leaf replaced; the very tree, where no leaf is. Errors name the leaf.

    Raises:
      ArgumentError: the tree contains itself.
    """
    leaves, structure = flatten_tree(tree)
    made = each(leaves, structure, function)
    if all(new is old for new, old in zip(made, leaves, strict=True)):
        return tree
    return unflatten_tree(structure, made)


def each(leaves: Iterable[Any], structure: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Call a function for each leaf of a tree; its errors say which leaf."""
    made = []
    for number, leaf in enumerate(leaves):
        try:
            made.append(function(leaf))
        except ReductionError as error:
            path = leaf_paths(structure)[number]
            if path != "tree":
                error.prefix(f"leaf {path}")
            raise
    return made
