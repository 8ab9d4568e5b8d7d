"""Entries of this library's calls in the profilers of PyTorch and JAX, and NVTX ranges for NVIDIA's profilers.

Input: a call and its values. Output: in each profiler that is on, an entry such as ``crossreduce:all_reduce`` with op,
bytes, dtypes and number of replicas. A framework's profiler is used if the program has imported the framework. The
process groups of ``torch.distributed`` have entries of their own: see ``torch/profiling.py``.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from . import nvtx
from .facts import call_facts

_FRAMEWORKS: Final = ("torch", "jax")


class _Profilers:
    """The profilers that this process can use: modules with the functions ``is_on`` and ``entry``.

    ``found``: these modules. ``unseen``: the frameworks that the program had not imported at the last ``look``.
    ``are_on``: returns whether a profiler currently records the calls of this thread. Every call of the library calls
    it, so it is a function of the framework itself if possible, which is fastest.
    """

    def __init__(self) -> None:
        self.found: tuple[Any, ...] = ()
        self.unseen: tuple[str, ...] = _FRAMEWORKS
        self.are_on: Callable[[], bool] = self._look_and_return_on

    def look(self) -> None:
        """Find the profilers of the frameworks that the program has imported by now."""
        found, unseen = [] if nvtx.FUNCTIONS is None else [nvtx], []
        for name in _FRAMEWORKS:
            try:
                if name in sys.modules:
                    found.append(importlib.import_module(f".{name}", __name__))
                    continue
            except (ImportError, AttributeError):  # the framework is still being imported, or is too old
                pass
            unseen.append(name)
        self.found, self.unseen = tuple(found), tuple(unseen)
        first, second, *_ = [*(profiler.is_on for profiler in found), bool, bool]  # ``bool`` returns False
        if nvtx.FUNCTIONS is not None or len(found) < 2:
            self.are_on = first  # NVTX comes first and is always on
        else:
            self.are_on = lambda: first() or second()

    def look_again(self) -> None:
        """Find the profilers again if the program has imported a framework since the last time."""
        if any(name in sys.modules for name in self.unseen):
            self.look()

    def _look_and_return_on(self) -> bool:
        self.look()
        return self.are_on()


class _Thread(threading.local):
    inside = False  # whether the thread is in a call that has an entry


PROFILERS: Final = _Profilers()
_THREAD: Final = _Thread()


def is_outermost() -> bool:
    """Return whether this thread is not in a call that already has an entry."""
    return not _THREAD.inside


@contextmanager
def entry(name: str, op: Any, value: Any) -> Iterator[None]:
    """Make an entry in each profiler that is on, for the call in the ``with`` block. ``value`` need not be valid."""
    facts = call_facts(name, op, value)
    with ExitStack() as entries:
        for profiler in PROFILERS.found:
            with suppress(Exception):  # a profiler must not make a call fail
                if profiler.is_on():
                    entries.enter_context(profiler.entry(facts))
        _THREAD.inside = True
        try:
            yield
        finally:
            _THREAD.inside = False
