"""Collectives of NumPy arrays among processes started by any launcher, which can continue when some of them die.

Input: a rank, the number of ranks, and an address at which rank 0 listens, from the launcher's environment or as
arguments. Output: a ``RankGroup``. It needs neither PyTorch nor MPI. The ranks of a host reduce through shared memory,
and hosts exchange data over TCP. For programs under ``mpiexec`` see ``mpi.py``.
"""

from __future__ import annotations

from ..errors import ArgumentError, shown
from ..ranks.survival import joiner
from ..ranks.survival.formation import Settings
from ..ranks.survival.survivors import Reformed
from ..ranks.transports.choice import transport_name
from ..reduction.validation import seconds
from .meeting import meet
from .rank_group import KIND, RankGroup, make_group

__all__ = ["RankGroup", "Reformed", "join", "join_invited"]


def join(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    *,
    key: str | None = None,
    timeout_s: float = 300.0,
    name: str = "world",
    transport: str | None = None,
) -> RankGroup:
    """Make a group of processes, and return it. All of the processes call this.

    Missing arguments are read from the environment, where ``torchrun`` and other launchers set them: ``RANK``,
    ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. If torchrun serves a store of its own at that port, the next
    port is used. Rank 0 listens at the address until its group ends. If the address is the loopback one ("localhost"),
    only processes of this host can connect to any rank, also when the group shrinks or grows.

    Args:
      rank: this process's number, from 0.
      size: the number of processes.
      address: where rank 0 listens, as "HOST:PORT". If ``size`` is 1, it only determines whether processes of other
        hosts can join later; without an address they cannot.
      key: a secret text, the same on all ranks; by default, the environment variable ``CROSSREDUCE_KEY``. Each message
        to the address, and each answer, then proves that its sender knows the key. Without a key any program that
        reaches the address can take part. Nothing is encrypted; see docs/processes.md.
      timeout_s: how long this call, and every later call of the group, waits for other ranks, in seconds.
      name: the group's name in messages.
      transport: what moves data between hosts: "tcp", "ucx", the name of a plug-in, or "auto": UCX if all hosts have it
        and an RDMA device, else TCP. The same on all ranks. By default the environment variable
        ``CROSSREDUCE_TRANSPORT`` decides, and without it "auto". It has no effect on one host. See docs/how-to/rdma.md.
    Raises:
      ArgumentError: an argument or variable is missing or invalid; two processes have the same rank; rank 0 cannot
        listen at the address; another program, or a rank with another key, answers there.
      MismatchError: processes differ in ``size``, in ``transport``, or in their version of crossreduce.
      CollectiveTimeout: some ranks did not arrive in time.
      BackendError: the compiled kernels are missing, this system is not Linux, or a rank cannot use the transport.

    >>> import numpy as np
    >>> with join(rank=0, size=1) as group:  # a group of this process alone
    ...     group.all_reduce(np.arange(3.0), "mean")
    array([0., 1., 2.])
    """
    timeout_s = seconds(timeout_s)
    if not isinstance(name, str):
        raise ArgumentError.of("name must be a str.", shown(name), 'name="world"')
    wanted = transport_name(transport)
    store, own, count, listen_at = meet(rank, size, address, key, timeout_s)
    return make_group(store, own, count, Settings(timeout_s, name, listen_at=listen_at, transport=wanted))


def join_invited(invitation: str, timeout_s: float = 60.0) -> RankGroup:
    """Join the group to which ``invitation`` invites, when its ranks next call ``grow``.

    Args:
      invitation: the text that ``RankGroup.invitation`` returned on any rank of the group.
      timeout_s: how long this waits for ``grow``, in seconds. If the ranks have called ``grow`` by then, forming the
        group may take 10 s more.
    Returns:
      The group, with this process as one of the last ranks. The first call of this process matches the first call of
      the other ranks in the new group.
    Raises:
      ArgumentError: the text is not an invitation to a group of this module, or ``timeout_s`` is not a number.
      CollectiveTimeout: the ranks did not call ``grow`` in time.
      PeerLostError: no rank of the group can be reached any more.
      ReductionError: this process lacks open files, memory or threads.
    """
    return joiner.join(invitation, KIND, seconds(timeout_s))
