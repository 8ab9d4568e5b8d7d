"""What a call's entry in a profiler shows, from the call's arguments, which need not be valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from ...values import DistributedValues, IndexedSlices

_MOST_LEAVES: Final = 10_000  # only so many leaves of a pytree are counted, since the entry must not take long
_DEEPEST: Final = 50  # only so many levels of a pytree are searched, since an object may contain itself


class CallFacts(NamedTuple):
    """What an entry shows. ``nbytes``: the bytes of one replica. ``arrays``: the arrays of all replicas."""

    name: str
    op: str
    replicas: int
    nbytes: int
    dtypes: str
    arrays: tuple[Any, ...]


def call_facts(name: str, op: Any, value: Any) -> CallFacts:
    """Return what an entry shows of a call. ``value``: distributed values, or a list with one tree per replica.

    If ``value`` cannot be read, only the name is returned, since a profiler must not make a call fail.

    >>> import numpy as np
    >>> facts = call_facts("all_reduce", "SUM", [{"w": np.ones(3), "b": [np.ones(2, np.int8)]}] * 4)
    >>> facts.op, facts.replicas, facts.nbytes, facts.dtypes
    ('sum', 4, 26, 'float64, int8')
    """
    try:
        return _facts(name, op, value)
    except Exception:  # noqa: BLE001 - objects of other libraries may raise any error
        return CallFacts(name, "", 0, 0, "", ())


def _facts(name: str, op: Any, value: Any) -> CallFacts:
    trees = _components(value) if isinstance(value, (list, tuple, DistributedValues)) else [value]
    arrays = tuple(islice(_leaves(trees), _MOST_LEAVES))
    nbytes = sum(map(_nbytes, arrays))
    dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in arrays)
    op = str(getattr(op, "value", op)).lower()[:20]
    return CallFacts(name, op, len(trees), nbytes // max(1, len(trees)), ", ".join(dtypes), arrays)


def by_replica(pairs: Any) -> list[list[Any]]:
    """Return the values of (value, destination) pairs as one list per replica. Invalid pairs are left out."""
    listed = pairs if isinstance(pairs, (list, tuple)) else ()
    values = [pair[0] for pair in listed if isinstance(pair, (list, tuple)) and pair]
    rows = [_components(each) if isinstance(each, (list, tuple, DistributedValues)) else [each] for each in values]
    return [list(row) for row in zip(*rows, strict=False)]


def _components(value: Any) -> list[Any]:
    return list(value.values if isinstance(value, DistributedValues) else value)


def _nbytes(x: Any) -> int:
    try:
        return int(x.nbytes)
    except Exception:  # noqa: BLE001 - sparse tensors of torch and keys of JAX have no such attribute
        return 0


def _leaves(tree: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the arrays of a tree of lists, tuples, dicts and distributed values. Other objects are left out."""
    nodes: Iterable[Any] = ()
    if isinstance(tree, IndexedSlices):
        nodes = (tree.values, tree.indices)
    elif isinstance(tree, dict):
        nodes = tree.values()
    elif isinstance(tree, (list, tuple, DistributedValues)):
        nodes = _components(tree)
    elif hasattr(tree, "dtype"):
        yield tree
    if depth < _DEEPEST:
        for each in nodes:
            yield from _leaves(each, depth + 1)
