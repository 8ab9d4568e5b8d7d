"""The options of a process group, and of its calls.

Input: ``pg_options`` of ``torch.distributed``, or the environment. Output: whether the group's sums are exact,
and what moves data between hosts. Compiled code that runs prepared calls of a group reads their options itself.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from _crossreduce_torch import VALUES, VARIABLE, InPlaceOfGloo

from ..errors import ArgumentError, shown
from ..ops import AnyOp, BitwiseOp, ReduceOp
from ..options import CommunicationOptions
from ..ranks.prepared import RankCalls, call_name, new_torch_calls, read_torch_options
from ..ranks.transports.choice import transport_name
from ..reduction.validation import read_op
from .op_queue import Finished, OpQueue
from .profiling import is_profiled

# The common class of options of torch's own backends. Before torch 2.6 it was ProcessGroup.Options.
_OTHERS: Final = tuple(each.Options for each in (c10d.Backend, c10d.ProcessGroup) if hasattr(each, "Options"))
_NAMES_OF_OPS: Final = (dist.ReduceOp, dist.ReduceOp.RedOpType)
OPS: Final[dict[Any, AnyOp]] = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.MEAN,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.BAND: BitwiseOp.BAND,
    dist.ReduceOp.BOR: BitwiseOp.BOR,
    dist.ReduceOp.BXOR: BitwiseOp.BXOR,
}
NUMBERED_OPS: Final = tuple((op, OPS.get(op)) for op in sorted(dist.ReduceOp.RedOpType.__members__.values(), key=int))
"""For each of torch's ops, by its number: torch's object, and the library's op or ``None``."""
_TORCH_OPS: Final = {ours: op for op, ours in OPS.items()}
_MILLISECOND: Final = timedelta(milliseconds=1)


class Options:
    """Options of a process group, for ``pg_options`` of ``init_process_group`` and ``new_group``.

    Args:
      exact: whether sums and means of floats are computed exactly, and then rounded once, to nearest even. They have
        the same bits for every order of the ranks and any number of hosts. Products of floats are refused. All ranks
        must pass the same value. Without ``pg_options``, the environment variable ``CROSSREDUCE_EXACT`` decides.
      transport: what moves data between hosts: "tcp", "ucx", the name of a plug-in, or "auto": UCX if all hosts have it
        and an RDMA device, else TCP. The same on all ranks. By default the environment variable
        ``CROSSREDUCE_TRANSPORT`` decides, and without it "auto".
    Raises:
      ArgumentError: ``exact`` is not a bool, or no transport has this name.

    >>> Options(exact=True, transport="tcp")
    Options(exact=True, transport='tcp')
    """

    def __init__(self, exact: bool = False, transport: str | None = None) -> None:
        self.exact = CommunicationOptions(exact=exact).exact
        self.transport = transport if transport is None else transport_name(transport)

    def __repr__(self) -> str:
        return f"Options(exact={self.exact}{f', transport={self.transport!r}' if self.transport else ''})"


def read_pg_options(options: Any) -> tuple[bool, str]:
    """Return whether sums are exact in a group with these ``pg_options``, and the name of its transport, or "auto".

    Options of other backends, as in "cpu:crossreduce,cuda:nccl", are ignored.

    Raises:
      ArgumentError: ``options`` are not options of a process group, ``CROSSREDUCE_EXACT`` is neither 0 nor 1, or
        ``CROSSREDUCE_TRANSPORT`` does not name a transport; or ``CROSSREDUCE_FOR_GLOO`` has an invalid value.
    """
    if isinstance(options, InPlaceOfGloo):
        if options.value not in VALUES:
            problem = f"{VARIABLE} must be {', '.join(VALUES[:-1])} or {VALUES[-1]}."
            raise ArgumentError.of(problem, shown(options.value), f"{VARIABLE}=1")
        options = options.options
    if isinstance(options, Options):
        return options.exact, transport_name(options.transport)
    if options is not None and not isinstance(options, _OTHERS):
        problem, remedy = "these are not the options of a process group.", "pg_options=crossreduce.torch.Options()"
        raise ArgumentError.of(problem, shown(options), remedy)
    value = os.environ.get("CROSSREDUCE_EXACT") or "0"
    if value not in ("0", "1"):
        raise ArgumentError.of("CROSSREDUCE_EXACT must be 0 or 1.", shown(value), "CROSSREDUCE_EXACT=1")
    return value == "1", transport_name(None)


def read_options(
    tensors: Any, opts: Any, kind: Any, timeout: Any = None, op: Any = None, root: int = 0
) -> tuple[Any, Any]:
    """Return a list of tensors, and options of class ``kind``, from any arguments that torch's groups accept."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if type(opts) is kind:
        return tensors, opts
    options = kind()
    if isinstance(opts, _NAMES_OF_OPS):
        op = opts
    elif isinstance(opts, int):
        root = opts
    for name, value in (("reduceOp", op), ("rootRank", root or None), ("timeout", timeout)):
        if value is not None:
            setattr(options, name, value)
    return tensors, options


def all_reduce_arguments(tensor: Any, op: Any) -> tuple[list[Any], Any]:
    """Return the arguments of ``allreduce`` with which ``dist.all_reduce`` reduces a tensor in place.

    ``op``: an op of torch, a ``ReduceOp``, or the name of one.

    Raises:
      ArgumentError: ``tensor`` is not a tensor, or ``op`` is none of these.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError.of("all_reduce takes a tensor.", shown(tensor), "torch.as_tensor(x)")
    options = c10d.AllreduceOptions()
    options.reduceOp = op if isinstance(op, _NAMES_OF_OPS) else _TORCH_OPS[read_op(op)]
    if hasattr(options, "asyncOp"):  # torch 2.7 or later
        options.asyncOp = False
    as_real = tensor.is_complex() and dist.distributed_c10d.supports_complex(options.reduceOp)
    return [torch.view_as_real(tensor) if as_real else tensor], options


def prepared_calls(calls: RankCalls, queue: OpQueue, settings: Any, timeout: timedelta, exact: bool) -> Any:
    """Return an object that runs the prepared ``calls`` of a group without Python: see ``torch_calls.cpp``.

    ``settings``: torch keeps the group's timeout there. ``timeout``: that of the communicator.
    """
    timeout_ms = -1 if timeout % _MILLISECOND else timeout // _MILLISECOND
    names = call_name("all_reduce", exact), "broadcast", "all_gather", call_name("reduce_scatter", exact), "all_to_all"
    ranks = queue.communicator
    facts = names, NUMBERED_OPS, is_profiled, Finished, timeout_ms, ranks.rank if ranks else 0
    return new_torch_calls(calls, ranks, queue, settings, *facts)


def option_probes() -> tuple[Any, Any]:
    """Return objects that show the layout of torch's options in memory: the arguments of ``use_torch_options``.

    Compiled code reads the options of a call, and the timeout of a group, where these numbers are in
    the memory of these objects. If torch cannot make them in this way, no number is known.
    """
    try:
        if [int(op) for op, _ in NUMBERED_OPS] != [*range(len(NUMBERED_OPS))]:  # their numbers are not their places
            return [], []
        timeouts = []
        for k in range(8):
            settings = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            settings._timeout = timedelta(milliseconds=7**k - 2)
            timeouts.append((settings, 7**k - 2))
        return _of_known_objects(timeouts), [_kind(*each) for each in _KINDS]
    except Exception:  # noqa: BLE001 - another version of torch may raise any class
        return [], []


# Of each collective that compiled code knows: the class of its options, the fewest bytes of such an object, and the
# number that it has besides ``asyncOp`` and ``timeout``. The order is that of ``torch_calls.cpp``.
_KINDS: Final = (
    (c10d.AllreduceOptions, 64, "reduceOp"),
    (c10d.BroadcastOptions, 32, "rootRank"),
    (c10d.AllgatherOptions, 16, ""),
    (c10d.ReduceScatterOptions, 48, "reduceOp"),
    (c10d.AllToAllOptions, 16, ""),
)


def _kind(kind: Any, least_nbytes: int, number: str) -> tuple[Any, ...]:
    """Return what ``use_torch_options`` takes for one collective."""
    found: dict[str, list[tuple[Any, int]]] = {name: [] for name in ("asyncOp", "timeout", number)}
    for k, (op, _) in enumerate(NUMBERED_OPS[:8]):  # torch makes the later ones in other ways
        options: Any = kind()
        options.asyncOp, options.timeout = k % 3 == 0, timedelta(milliseconds=7**k - 2)
        found["asyncOp"].append((options, int(k % 3 == 0)))
        found["timeout"].append((options, 7**k - 2))
        if number:
            setattr(options, number, op if number == "reduceOp" else k + 3)
            found[number].append((options, int(options.reduceOp.op) if number == "reduceOp" else k + 3))
    probes = (_of_known_objects(found.get(name)) for name in ("reduceOp", "asyncOp", "timeout", "rootRank"))
    return kind, least_nbytes, *probes


def _of_known_objects(probes: Any) -> Any:
    """Return ``probes``, or none of them if their objects were not made by pybind11."""
    known = all(type(type(each)).__name__ == "pybind11_type" for each, _ in probes or ())
    return probes if known else []


read_torch_options(option_probes)
