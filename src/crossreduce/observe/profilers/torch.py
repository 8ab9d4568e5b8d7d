"""Entries of calls in ``torch.profiler``, with the tensors' shapes and dtypes, the op and the number of replicas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch._C._profiler import _RecordFunctionFast

from .facts import CallFacts

is_on: Final[Callable[[], bool]] = torch.autograd._profiler_enabled
"""Returns whether the calling thread's calls are profiled."""


def entry(facts: CallFacts) -> AbstractContextManager[Any]:
    """Return a context manager that makes the entry of the call in its ``with`` block."""
    tensors = [x for x in facts.arrays if isinstance(x, torch.Tensor)]
    details = {"op": facts.op, "bytes": facts.nbytes, "dtypes": facts.dtypes, "replicas": facts.replicas}
    annotation: AbstractContextManager[Any] = _RecordFunctionFast(f"crossreduce:{facts.name}", tensors, details)
    return annotation
