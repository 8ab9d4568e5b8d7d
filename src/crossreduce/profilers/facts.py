"""The facts that a call's entry shows, from its arguments, which need not be valid."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

_MOST_LEAVES: Final = 10_000
_DEEPEST: Final = 50


class CallFacts(NamedTuple):
    """What an entry shows. ``nbytes``: of one replica; ``arrays``: those of all replicas."""

    name: str
    op: str
    replicas: int
    nbytes: int
    dtypes: str
    arrays: tuple[Any, ...]


def call_facts(name: str, op: Any, value: Any) -> CallFacts:
    """Return the facts of a call about ``value``: distributed values, or lists of trees, one per replica.

    >>> import numpy as np
    >>> facts = call_facts("all_reduce", "SUM", [{"w": np.ones(3), "b": [np.ones(2, np.int8)]}] * 4)
    >>> facts.op, facts.replicas, facts.nbytes, facts.dtypes
    ('sum', 4, 26, 'float64, int8')
    """
    trees = list(getattr(value, "values", None) or value) if _is_list(value) else [value]
    arrays = tuple(islice(_leaves(trees), _MOST_LEAVES))
    nbytes = sum(getattr(x, "nbytes", 0) for x in arrays if type(getattr(x, "nbytes", 0)) is int)
    dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in arrays)
    op = str(getattr(op, "value", op)).lower()[:20]
    return CallFacts(name, op, len(trees), nbytes // max(1, len(trees)), ", ".join(dtypes), arrays)


def by_replica(pairs: Any) -> list[list[Any]]:
    """Return the values of a batch as a list for each replica; invalid pairs are left out."""
    values = [pair[0] for pair in pairs if isinstance(pair, (list, tuple)) and pair] if _is_list(pairs) else []
    rows = [list(getattr(each, "values", [each])) if _is_list(each) else [each] for each in values]
    return [list(row) for row in zip(*rows, strict=False)]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or isinstance(getattr(value, "values", None), tuple)


def _leaves(tree: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the arrays of a tree of lists, tuples, dicts and distributed values; other nodes are left out."""
    if hasattr(tree, "dtype"):
        yield tree
    elif depth < _DEEPEST:
        values = tree.values() if isinstance(tree, dict) else getattr(tree, "values", tree) if _is_list(tree) else ()
        for each in values:
            yield from _leaves(each, depth + 1)
