"""crossreduce for PyTorch processes: a ``torch.distributed`` backend, and a hook for DDP.

Importing this registers the backend::

    import crossreduce.torch
    torch.distributed.init_process_group("crossreduce")  # or "cpu:crossreduce,cuda:nccl"

If the library is installed, PyTorch 2.5 and later register the backend themselves when torch is imported.

Input: calls of ``torch.distributed``. Output: collectives in memory that the ranks of a host share, and over TCP
between hosts. For replicas in one process use ``crossreduce.all_reduce``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

try:
    import torch.distributed  # noqa: F401 - the modules below need it
except ImportError as error:
    from ..frameworks import missing_framework

    raise missing_framework("crossreduce.torch needs PyTorch, but", "torch", error) from error

from _crossreduce_torch import register

from ..errors import UnsupportedError
from ..frameworks.torch.arrays import increment_versions
from ..observe.counters import CollectiveStats, Stats, WaitStats
from ..options import CommunicationOptions
from ..processes.weighted_mean import as_array
from ..processes.weighted_mean import weighted_mean as _mean_of_ranks
from ..ranks.measurement import measure
from ..ranks.survival.survivors import Reformed
from ..topology import Topology
from .elastic import agree, committed, find_group, grow, invitation, join, shrink
from .group import BACKEND, Group
from .hook import HookState, all_reduce_hook
from .memory import NAMES, copy_back, readable, require_dense
from .memory import memory as _memory  # ``crossreduce.torch.memory`` is the module
from .options import Options

__all__ = [
    "NAME",
    "CollectiveStats",
    "Group",
    "HookState",
    "Options",
    "Reformed",
    "Stats",
    "WaitStats",
    "agree",
    "all_reduce_hook",
    "committed",
    "grow",
    "invitation",
    "join",
    "measure_topology",
    "shrink",
    "stats",
    "weighted_mean",
]

NAME: Final = BACKEND
"""The name of the backend, for ``torch.distributed.init_process_group``."""


def measure_topology(group: Any = None, seconds: float = 1.0) -> Topology:
    """Measure the links between a group's hosts, and plan the group's reductions on the measured links from now on.

    All ranks of the group must call it together, while no other program uses the network.

    Args:
      group: a process group of this backend, or a ``HookState``; by default the default group.
      seconds: about how long the measurement may take.
    Returns:
      A topology for ``cr.plan``, the same on all ranks: a device for each rank ("host1/cpu:2"), and the links.
    Raises:
      ArgumentError: no default group exists, the group has another backend, or ``seconds`` is not above 0.
      PeerLostError, CollectiveTimeout: as for every call of the group.
    """
    group = find_group(group, HookState)
    measured: list[Topology] = []
    _run(group, lambda: measured.append(measure(group.communicator, seconds)), [])
    return measured[0]


def weighted_mean(tensor: Any, weight: Any, group: Any = None, *, exact: bool = False) -> None:
    """Replace ``tensor`` by the weighted mean of all ranks' tensors: sum(w x) / sum(w).

    All ranks of the group call it together, each with its own weight, and get the same bits.

    Args:
      tensor: a dense CPU tensor, of the same shape and dtype on all ranks. Half types are accumulated in float32. The
        mean of integers is computed in float64 (integers above 2**53 are rounded), and truncated towards zero.
      weight: this rank's weight, such as its number of samples. The tensor of a rank of weight 0 is not used, even if
        it contains NaN.
      group: a process group of this backend, or a ``HookState``; by default the default group.
      exact: whether the result is the real weighted mean, rounded once. The weights must then be in the ratio of whole
        numbers with a sum of at most 2**24. ``Options(exact=True)`` and CROSSREDUCE_EXACT=1 do not change this.
    Raises:
      ArgumentError: no default group exists, or the group has another backend. Or, on all ranks, a weight is negative,
        infinite or NaN, or all are 0.
      MismatchError: ranks differ in shape or dtype, or make another call.
      UnsupportedError: the tensor is not on the CPU or not dense, the mean of its dtype is not defined or cannot be
        exact.
      PeerLostError, CollectiveTimeout: as for every call of the group.

    >>> crossreduce.torch.weighted_mean(loss, len(batch))  # doctest: +SKIP
    """
    group = find_group(group, HookState)
    exact = CommunicationOptions(exact=exact).exact
    if not tensor.is_cpu or tensor.dtype not in NAMES:
        problem = "weighted_mean needs a CPU tensor of a dtype that can be reduced."
        raise UnsupportedError.of(
            problem, f"{tensor.dtype} on {tensor.device}", "tensor.cpu(), and its result copied back"
        )
    require_dense("weighted_mean", [tensor])

    def run() -> None:
        written = readable(tensor)
        array = as_array(_memory(written))
        _mean_of_ranks(group.communicator, array, array, weight, exact)
        copy_back(tensor, written)

    increment_versions([tensor])
    _run(group, run, [tensor])


def _run(group: Group | HookState, function: Callable[[], None], results: list[Any]) -> None:
    """Run a function in the queue of a group, with its timeout."""
    group.queue.run(group.within_timeout(function) if isinstance(group, Group) else function, results, False)


def stats(group: Any = None) -> Stats:
    """Return the statistics of this rank: its calls, their bytes and seconds, and how long it waited for which rank.

    Messages and collectives of NCCL are not counted. Ranks may call this at different times.

    Args:
      group: a process group of this backend, or a ``HookState``; by default the default group.
    Raises:
      ArgumentError: no default group exists, or the group has another backend.
    """
    counted: Stats = find_group(group, HookState).communicator.stats()
    return counted


register()
