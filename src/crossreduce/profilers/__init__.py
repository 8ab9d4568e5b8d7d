"""Entries of this library's calls in the profilers of PyTorch and JAX, and NVTX ranges for NVIDIA's profilers.

Input: a call and its values. Output: an entry such as ``crossreduce:all_reduce`` with op, bytes, dtypes and number of
replicas in each profiler that is on. A framework's profiler is used if the program has imported the framework. The
process groups of ``torch.distributed`` have entries of their own: see ``torch/profiling.py``.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from . import nvtx

_FRAMEWORKS: Final = ("torch", "jax")
_MOST_LEAVES: Final = 10_000


class CallFacts(NamedTuple):
    """What an entry shows. ``nbytes``: of one replica; ``arrays``: those of all replicas."""

    name: str
    op: str
    replicas: int
    nbytes: int
    dtypes: str
    arrays: tuple[Any, ...]


class Profiler(Protocol):
    """A file of this folder."""

    @staticmethod
    def is_on() -> bool:
        """Return whether calls of this thread are recorded now; takes less than 0.1 us."""

    @staticmethod
    def entry(facts: CallFacts) -> AbstractContextManager[Any]:
        """Return the entry of a call."""


class _Profilers:
    """The profilers that this process can use. ``are_on``: return whether one of them records this thread's calls now.

    Each call of the library calls ``are_on``, so it is a function of the framework itself where that is possible.
    """

    def __init__(self) -> None:
        self.found: tuple[Any, ...] = ()
        self.unseen: tuple[str, ...] = _FRAMEWORKS
        self.are_on: Callable[[], bool] = self._look_first

    def look(self) -> None:
        """Find the profilers of the frameworks that the program has imported by now."""
        found, unseen = [nvtx] if nvtx.is_on() else [], []
        for name in _FRAMEWORKS:
            try:
                if name in sys.modules:
                    found.append(importlib.import_module(f".{name}", __name__))
                    continue
            except (ImportError, AttributeError):  # its import has not ended, or it is too old
                pass
            unseen.append(name)
        self.found, self.unseen = tuple(found), tuple(unseen)
        first, second, *_ = [*(profiler.is_on for profiler in found), bool, bool]  # bool() is False
        if nvtx.is_on() or len(found) < 2:
            self.are_on = first
        else:
            self.are_on = lambda: first() or second()

    def look_again(self) -> None:
        """Look for profilers if the program has imported a framework since the last time."""
        for name in self.unseen:
            if name in sys.modules:
                self.look()
                return

    def _look_first(self) -> bool:
        self.look()
        return self.are_on()


class _Thread(threading.local):
    inside = False


PROFILERS: Final = _Profilers()
_THREAD: Final = _Thread()


def is_outermost() -> bool:
    """Return whether this thread is not in a call that already has an entry."""
    return not _THREAD.inside


@contextmanager
def entry(name: str, op: Any, value: Any) -> Iterator[None]:
    """Make the entry of a call in each profiler that is on. ``value``: any arguments, which need not be valid."""
    facts = call_facts(name, op, value)
    with ExitStack() as entries:
        for profiler in PROFILERS.found:
            if profiler.is_on():
                entries.enter_context(profiler.entry(facts))
        _THREAD.inside = True
        try:
            yield
        finally:
            _THREAD.inside = False


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
    """Return the values of a batch as a list for each replica; of invalid ones, as many as there are."""
    values = [pair[0] for pair in pairs if isinstance(pair, (list, tuple)) and pair] if _is_list(pairs) else []
    rows = [list(getattr(each, "values", [each])) if _is_list(each) else [each] for each in values]
    return [list(row) for row in zip(*rows, strict=False)]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or isinstance(getattr(value, "values", None), tuple)


def _leaves(tree: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the arrays of a tree of lists, tuples, dicts and distributed values; other nodes are left out."""
    if hasattr(tree, "dtype"):
        yield tree
    elif depth < 50:
        values = tree.values() if isinstance(tree, dict) else getattr(tree, "values", tree) if _is_list(tree) else ()
        for each in values:
            yield from _leaves(each, depth + 1)
