"""Prepared calls: a call that was made before runs again in compiled code, without Python objects per array.

Input: the jobs, executables and results of a call that has just taken the path in Python (``pipeline.py``). Output: a
``Calls`` object of ``native/calls/calls.cpp``, which recognises later calls with arrays of the same dtypes and sizes.
It does not validate: a call that differs from all earlier ones takes the path in Python, which checks its arguments.
"""

from __future__ import annotations

import copyreg
import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ... import kernels
from ...devices import canonical
from ...ops import ReduceOp
from ...options import DEFAULT
from ...values import Mirrored, PerReplica

if TYPE_CHECKING:
    from ._calls import Calls

_LOG = logging.getLogger("crossreduce")

FRAMEWORKS = ("numpy", "torch")
"""The frameworks whose arrays the compiled code reads and makes."""


@cache
def compiled_module() -> Any:
    """Return the compiled module, ready for use, or ``None`` where it was not built."""
    if kernels.native() is None:
        return None
    try:
        module = importlib.import_module("._calls", __package__)
    except ImportError:
        return None
    from ...frameworks.numpy.host_memory import large_array_offset

    names = {name.lower(): op for name, op in ReduceOp.__members__.items()}
    names |= {name.upper(): op for name, op in names.items()}
    module.use(PerReplica, Mirrored, ReduceOp, names, lambda name: (canonical(name),), DEFAULT, large_array_offset())
    copyreg.pickle(module.Calls, _without_calls)
    return module


def new_calls() -> Calls | None:
    """Return an empty object for the prepared calls of one op, or ``None`` if this machine cannot prepare calls."""
    module = None if kernels.instruction_set() == "numpy" else compiled_module()
    return None if module is None else module.Calls()


def read_tensors(functions: tuple[Any, ...] | None, layout_probes: Callable[[], tuple[Any, Any]]) -> None:
    """Enable compiled code to read and write tensors of torch, with these functions of torch.

    It reads them where they are in memory if ``layout_probes`` shows that their layout is as expected.
    """
    module = compiled_module()
    if module is not None and functions is not None:
        module.use_torch(*functions)
        if not module.use_torch_layout(*layout_probes()):
            _LOG.info("tensors of this version of torch are read with its own functions, which takes longer")


def _without_calls(_: Calls) -> tuple[Callable[..., Any], tuple[()]]:
    """Return the function and arguments with which ``copyreg`` makes a copy: an object without prepared calls."""
    return new_calls, ()


def prepare(
    calls: Calls,
    op: ReduceOp,
    options: Any,
    devices: tuple[tuple[str, ...], tuple[str, ...]],
    rows: Sequence[tuple[Any, ...]],
    results: Sequence[tuple[Any, ...]],
    with_out: bool,
    executables: Sequence[tuple[Any, Sequence[int]]],
) -> None:
    """Prepare a call that has just run.

    Args:
      calls: the object that the call is added to.
      op: the reduction.
      options: the ``CommunicationOptions`` of the call.
      devices: the sources and the destinations of all values.
      rows: for each tensor its arrays, one per source.
      results: for each tensor its results, one per destination.
      with_out: whether the results were written into given arrays.
      executables: each with the numbers of its tensors; ``executable.prepared`` must not be ``None``.
    """
    described = []
    for executable, tensors in executables:
        kernel, streaming, threaded = executable.prepared
        described.append((kernel, executable, list(tensors), streaming, threaded))
    sources, destinations = devices
    is_default = sources == destinations == PerReplica(rows[0]).devices  # as in a call without ``devices``
    calls.add(op, options, sources, destinations, is_default, rows, results, with_out, described)
