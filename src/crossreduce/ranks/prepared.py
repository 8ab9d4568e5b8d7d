"""Prepared calls of ranks: a collective that was called before runs again in compiled code.

Input: a collective that has just run in Python. Output: an object of ``RankCalls``, which recognises later calls with
arrays of the same class, dtype and shape. All other calls run in Python again, which checks their arguments.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Final, Protocol

from ..engines.host.prepared import compiled_module
from ..ops import AnyOp
from .array_views import ArrayView
from .communicator import Communicator
from .intra_host.shared_memory import SLICE_S

_LOG: Final = logging.getLogger("crossreduce")
_EXACT: Final = {name: sys.intern(f"exact_{name}") for name in ("all_reduce", "reduce_scatter")}


def call_name(collective: str, exact: bool) -> str:
    """Return the name of a collective in prepared calls: always the same string object, which is found quickly."""
    return _EXACT[collective] if exact else collective


class RankCalls(Protocol):
    """The prepared calls of a group."""

    def run(
        self, communicator: Communicator, collective: str, op: AnyOp | str | None, root: int, x: Any, out: Any, /
    ) -> Any:
        """Run a prepared call. Return its result, or ``None`` if it was not prepared. Errors are the communicator's."""

    def add(self, *call: Any) -> None:
        """Add a prepared call. For its arguments see ``rank_calls.cpp``."""


class _NoCalls:  # no call is ever prepared
    def run(self, *_: Any) -> None:
        return None

    allreduce = all_reduce = broadcast = all_gather_single = reduce_scatter_single = all_to_all_single = run

    def begun(self) -> int:
        return 0

    def add(self, *_: Any) -> None:
        raise AssertionError


NO_CALLS: Final[RankCalls] = _NoCalls()


def new_calls(communicator: Communicator) -> RankCalls:
    """Return an object for the prepared calls of a group."""
    module = compiled_module()
    return NO_CALLS if module is None else module.RankCalls(communicator.memory.native, communicator.lock, SLICE_S)


def new_torch_calls(calls: RankCalls, *group: Any) -> Any:
    """Return an object for the prepared calls of one of torch's groups. For its arguments see ``torch_calls.cpp``."""
    return NO_CALLS if calls is NO_CALLS else compiled_module().TorchCalls(calls, *group)


def read_torch_options(probes: Callable[[], tuple[Any, ...]]) -> None:
    """Enable compiled code to read torch's options of calls, if ``probes`` shows where their numbers are in memory."""
    module = compiled_module()
    if module is not None and not module.use_torch_options(*probes()):
        _LOG.info("options of this version of torch are read with its own functions, which takes longer")


def prepare(
    calls: RankCalls,
    communicator: Communicator,
    collective: str,
    op: AnyOp | None,
    root: int | None,
    x: Any,
    array: ArrayView,
    result: Any,
    exact: bool = False,
) -> None:
    """Prepare a call that has just run.

    Args:
      calls: the prepared calls of the communicator's group, to which this one is added.
      collective: "all_reduce", "broadcast", "all_gather", "reduce_scatter" or "all_to_all".
      op: the reduction, or ``None`` if arrays are copied.
      root: the root of a broadcast.
      x: the NumPy array or torch tensor that was given, in C order.
      array: the view of ``x`` that was passed to the communicator.
      result: the array of the result.
      exact: whether this is an exact reduction, which has another name in ``calls``: see ``call_name``.
    """
    if calls is NO_CALLS:
        return
    size, nbytes, result_nbytes = communicator.size, x.nbytes, result.nbytes
    # Where each buffer of the call begins: an offset in x, or in the result, in bytes; or an address.
    in_x, in_result, in_memory = range(3)
    at_input, at_result = [(in_x, 0)], [(in_result, 0)]
    buffers = {
        "all_reduce": at_input + at_result,
        "broadcast": at_input if root == communicator.rank else at_result,
        "all_gather": at_input + [(in_result, k * nbytes) for k in range(size)],
        "reduce_scatter": [(in_x, k * result_nbytes) for k in range(size)] + at_result,
        "all_to_all": [(base, k * (nbytes // size)) for base in (in_x, in_result) for k in range(size)],
    }[collective]
    with communicator.lock:
        executable = communicator.executable(collective, op, array, root, exact)
        if executable is not None and executable.prepared:
            buffers = [*buffers, *((in_memory, address) for address in executable.addresses)]
            in_place = collective in ("all_reduce", "broadcast")  # whether x may be the result
            copied = (
                collective == "broadcast" and root == communicator.rank
            )  # whether x is copied to the result, on the root
            calls.add(
                *(call_name(collective, exact), op, root or 0, x, result.shape, x.itemsize, executable),
                *(executable.program, executable.cost, executable.text, buffers, in_place, copied),
            )
