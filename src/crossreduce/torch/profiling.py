"""Entries of a group's calls in ``torch.profiler``.

Input: calls, while a profiler is on. Output: an entry such as ``crossreduce:all_reduce`` in the thread of the caller,
with the shapes and dtypes of the tensors, and details of the group. For an asynchronous call this entry ends when the
op is queued. A second entry with the same name lasts until the op has run, like gloo's ``gloo:all_reduce``.

The names of details are those of ``record_param_comms`` for NCCL, so tools such as Holistic Trace Analysis find them.
Source: torch/csrc/distributed/c10d/ParamCommsUtils.hpp and torch/csrc/profiler/util.h in github.com/pytorch/pytorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._C._profiler import _RecordFunctionFast

is_profiled: Final[Callable[[], bool]] = torch.autograd._profiler_enabled
"""Returns whether the calling thread's calls are profiled, in less than 0.1 us."""

# The names of gloo's entries, by the method of a process group; other methods have their own names.
_NAMES: Final = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "recv_anysource": "recv",
}


def entry(group: Any, method: str, tensors: Sequence[Any], results: Sequence[Any]) -> Any:
    """Return a context manager that makes the entry of a call of a group's method.

    ``tensors``: the tensors that the call reads. ``results``: those that it writes. Both may be empty.
    """
    details = {
        "Collective name": method,
        "dtype": str((*tensors, *results)[0].dtype).removeprefix("torch.") if tensors or results else "",
        "In msg nelems": sum(x.numel() for x in tensors),
        "Out msg nelems": sum(x.numel() for x in results),
        "Group size": group.size(),
        "Process Group Name": group.group_name,
        "Process Group Description": group.group_desc,
    }
    return _RecordFunctionFast(_name(method), [*tensors] or [*results], details)


def begin_entry(method: str, function: Callable[[], None]) -> Callable[[], None]:
    """Begin the entry of an asynchronous call. Return a function that runs the op and ends the entry, in any thread."""
    operators, ended = torch.ops.profiler, torch.futures.Future()
    handle = operators._record_function_enter_new(_name(method), None)
    operators._call_end_callbacks_on_jit_fut._RecordFunction(handle, ended)

    def run() -> None:
        try:
            function()
        finally:
            ended.set_result(None)

    return run


def _name(method: str) -> str:
    return f"crossreduce:{_NAMES.get(method, method)}"
