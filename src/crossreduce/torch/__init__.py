"""crossreduce for PyTorch processes: a ``torch.distributed`` backend, and a hook for DDP.

Importing this registers the backend::

    import crossreduce.torch
    torch.distributed.init_process_group("crossreduce")  # or "cpu:crossreduce,cuda:nccl"

If the library is installed, PyTorch 2.5 and later register the backend themselves when torch is imported.

Input: calls of ``torch.distributed``. Output: collectives in memory that the ranks of a host share, and over TCP
between hosts. For replicas in one process use ``crossreduce.all_reduce``.
"""

from __future__ import annotations

from typing import Any, Final

try:
    import torch.distributed  # noqa: F401 - the modules below need it
except ImportError as error:
    from ..frameworks import missing_framework

    raise missing_framework("crossreduce.torch needs PyTorch, but", "torch", error) from error

from _crossreduce_torch import register

from ..observe.counters import CollectiveStats, Stats, WaitStats
from ..ranks.measurement import measure
from ..ranks.survival.survivors import Reformed
from ..topology import Topology
from .elastic import agree, committed, find_group, grow, invitation, join, shrink
from .group import BACKEND, Group
from .hook import HookState, all_reduce_hook
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
    group.queue.run(lambda: measured.append(measure(group.communicator, seconds)), [], asynchronous=False)
    return measured[0]


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
