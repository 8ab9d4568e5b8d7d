"""NVTX ranges of calls, for Nsight Systems and other profilers of NVIDIA. They were not tested on a GPU.

Input: a call. Output: a range such as ``crossreduce:all_reduce sum 64 B float32 x2`` in the calling thread. It lasts
until the call returns. So it contains the launches of the call's kernels, and profilers attribute the kernels to it.

``CROSSREDUCE_NVTX`` turns ranges on (1) or off (0). By default they are on if a profiler has started the process, which
sets ``NVTX_INJECTION64_PATH``. They need NVIDIA's Python package ``nvtx``, or ``libnvToolsExt.so.1`` of older CUDA.
Source: NVTX, c/include/nvtx3/nvToolsExt.h in github.com/NVIDIA/NVTX (``nvtxRangePushA``, ``nvtxRangePop``).
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from .facts import CallFacts

_LOG: Final = logging.getLogger("crossreduce")


class _Functions(NamedTuple):
    push: Callable[[str], Any]
    pop: Callable[[], Any]


def _load() -> _Functions | None:
    """Return the functions of NVTX, or ``None`` if ranges are off or NVTX is not installed."""
    wanted = os.environ.get("CROSSREDUCE_NVTX") or ("1" if os.environ.get("NVTX_INJECTION64_PATH") else "0")
    if wanted == "0":
        return None
    try:
        module = importlib.import_module("nvtx")
        return _Functions(module.push_range, module.pop_range)
    except (ImportError, AttributeError):
        pass
    try:
        library = ctypes.CDLL("libnvToolsExt.so.1")
        push, pop = library.nvtxRangePushA, library.nvtxRangePop
    except (OSError, AttributeError):
        if os.environ.get("CROSSREDUCE_NVTX"):
            _LOG.warning("CROSSREDUCE_NVTX is set, but NVTX is not installed.\n  try:   pip install nvtx")
        return None
    push.argtypes = [ctypes.c_char_p]
    return _Functions(lambda name: push(name.encode()), pop)


FUNCTIONS: Final = _load()
"""The functions of NVTX, or ``None`` if calls have no ranges."""


def is_on() -> bool:
    """Return whether calls have ranges."""
    return FUNCTIONS is not None


@contextmanager
def entry(facts: CallFacts) -> Iterator[None]:
    """Make a range for the call in the ``with`` block."""
    assert FUNCTIONS is not None
    FUNCTIONS.push(f"crossreduce:{facts.name} {facts.op} {facts.nbytes} B {facts.dtypes} x{facts.replicas}")
    try:
        yield
    finally:
        FUNCTIONS.pop()
