"""Progress of long computations, for a caller that wants to show it.

A computation reports steps. Nothing happens unless a caller has registered a watcher. This module does no I/O and reads
no clock, so pure modules may report steps, and results do not depend on this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Watcher = Callable[[str, int, int], None]  # called with a text, the number of completed steps, and the number of steps

_watcher: ContextVar[Watcher | None] = ContextVar("crossreduce_progress", default=None)


@contextmanager
def watched(by: Watcher) -> Iterator[None]:
    """Call ``by`` for each step that computations of this thread report inside the block.

    >>> with watched(lambda *step: print(*step)):
    ...     squares = [k * k for k in steps((1, 2), "squaring")]
    squaring 0 2
    squaring 1 2
    squaring 2 2
    """
    token = _watcher.set(by)
    try:
        yield
    finally:
        _watcher.reset(token)


def report(text: str, done: int, total: int) -> None:
    """Report that ``done`` of ``total`` steps of a computation are complete."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(text, done, total)


def steps(items: Sequence[T], text: str | Callable[[T], str]) -> Iterator[T]:
    """Yield the items, and report each as a step. ``text`` describes every step, or returns an item's description."""
    for k, item in enumerate(items):
        report(text if isinstance(text, str) else text(item), k, len(items))
        yield item
    if items:
        report(text if isinstance(text, str) else text(items[-1]), len(items), len(items))
