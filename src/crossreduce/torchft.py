"""A process group for torchft, which creates the group again whenever replica groups join or leave.

Input: calls of torchft's ``Manager``, or of ``configure`` and ``reconfigure``. Output: a group of the current replica
groups, which torchft's lighthouse chooses. (``crossreduce.torch.shrink`` needs no lighthouse.)
"""

from __future__ import annotations

from typing import Any

from .errors import BackendError, ContextError
from .torch import Group

try:
    from torchft.process_group import ProcessGroupWrapper
except ImportError as error:
    problem = f"crossreduce.torchft needs torchft, but torchft cannot be imported: {error}."
    raise BackendError.of(problem, remedy="pip install torchft") from error


class ProcessGroupCrossreduce(ProcessGroupWrapper):  # type: ignore[misc]
    """The process group to pass to torchft: ``Manager(pg=ProcessGroupCrossreduce(timeout=timedelta(seconds=10)))``.

    If a replica group is lost, calls on the others raise a ``PeerLostError`` within a second. The manager then discards
    the step, and creates the group again from the remaining replica groups. Each rank needs a process of its own.

    Args:
      timeout: how long calls, and the creation of the group, wait for other replica groups.
    """

    _aborted: Exception | None = None

    def errored(self) -> Exception | None:
        """Return the error that broke the group, or ``None`` if the group can be used."""
        return self._aborted if self._pg is None else self._pg.communicator.failure

    def abort(self, errored: bool = True) -> None:
        """Leave the group at once, so that pending calls fail on all ranks. If ``errored``, store an error for it."""
        if errored:
            self._aborted = self.errored() or ContextError.of("the process group was aborted.", remedy="reconfigure it")
        super().abort(errored=errored)

    def shutdown(self) -> None:
        """Leave the group when its pending calls have ended."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which torchft's ``register`` registers the group."""
        return "torchft-crossreduce"

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Group:
        """Make the group of the current replica groups. torchft calls this method."""
        self._aborted = None
        return Group(store, rank, world_size, self._timeout, "torchft")
