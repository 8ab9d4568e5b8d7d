"""Prepared calls of ranks: a collective that was called before runs again in compiled code.

Input: a collective that has just taken the path in Python. Output: an object of ``RankCalls``, which recognises later
calls with arrays of the same class, dtype and shape. It only recognises: whatever differs takes the path in Python
again, which checks and explains.
"""

from __future__ import annotations

import sys
from typing import Any, Final, Protocol

from ..engines.host.prepared import compiled_module
from ..ops import ReduceOp
from .array_views import ArrayView
from .communicator import Communicator
from .intra_host.shared_memory import SLICE_S

_EXACT: Final = {name: sys.intern(f"exact_{name}") for name in ("all_reduce", "reduce_scatter")}


def call_name(collective: str, exact: bool) -> str:
    """Return the name by which prepared calls know a collective: the same object for the same name."""
    return _EXACT[collective] if exact else collective


class RankCalls(Protocol):
    """The prepared calls of a group."""

    def run(
        self, communicator: Communicator, collective: str, op: ReduceOp | str | None, root: int, x: Any, out: Any, /
    ) -> Any:
        """Return the result of a call that was prepared; ``None``: it was not. Errors are those of ``communicator``."""

    def add(self, *call: Any) -> None:
        """Add a call; see ``rank_calls.cpp``."""


class _NoCalls:
    def run(self, *_: Any) -> None:
        return None

    def add(self, *_: Any) -> None:
        raise AssertionError


NO_CALLS: Final[RankCalls] = _NoCalls()


def new_calls(communicator: Communicator) -> RankCalls:
    """Return an object for the prepared calls of a group. If its ranks are on several hosts, none are prepared."""
    module = compiled_module() if len(communicator.hosts) == 1 else None
    return NO_CALLS if module is None else module.RankCalls(communicator.memory.native, communicator.lock, SLICE_S)


def prepare(
    calls: RankCalls,
    communicator: Communicator,
    collective: str,
    op: ReduceOp | None,
    root: int | None,
    x: Any,
    array: ArrayView,
    result: Any,
    exact: bool = False,
) -> None:
    """Prepare a call that has just run.

    Args:
      calls: what the call is added to.
      communicator: the group.
      collective: "all_reduce", "broadcast", "all_gather", "reduce_scatter" or "all_to_all".
      op: the reduction; ``None``: arrays are copied.
      root: the root of a broadcast.
      x: the NumPy array or torch tensor that was given, in C order.
      array: the view that the call to the communicator was described by.
      result: the array of the result.
      exact: whether the call asked for an exact reduction; ``calls`` knows it by another name of the collective.
    """
    if calls is NO_CALLS:
        return
    size, nbytes, result_nbytes = communicator.size, x.nbytes, result.nbytes
    whole, whole_result = [(False, 0)], [(True, 0)]
    places = {
        "all_reduce": whole + whole_result,
        "broadcast": whole if root == communicator.rank else whole_result,
        "all_gather": whole + [(True, k * nbytes) for k in range(size)],
        "reduce_scatter": [(False, k * result_nbytes) for k in range(size)] + whole_result,
        "all_to_all": [(to, k * (nbytes // size)) for to in (False, True) for k in range(size)],
    }[collective]
    with communicator.lock:
        executable = communicator.executable(collective, op, array, root, exact)
        if executable is not None:
            in_place, copied = collective in ("all_reduce", "broadcast"), collective == "broadcast" and places is whole
            calls.add(
                *(call_name(collective, exact), op, root or 0, x, result.shape, x.itemsize, executable),
                *(executable.program, executable.cost, executable.text, places, in_place, copied),
            )
