"""A communication hook for ``DistributedDataParallel``: its gradients go through crossreduce, whatever its backend.

In: DDP's buckets of gradients.  Out: futures of their means. What else the group does stays with its own backend.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..errors import ArgumentError, UnsupportedError, message, shown
from ..ranks.communicator import Communicator
from .collectives import Collectives
from .group import Group, close, communicator, wait_in_backward
from .op_queue import Line

Hook = Callable[[Any, Any], Any]
_NUMBER: Final = itertools.count()
_STATES: Final[weakref.WeakKeyDictionary[Any, HookState]] = weakref.WeakKeyDictionary()


class HookState:
    """What ``all_reduce_hook`` works with: the ranks' shared memory, and a hook that is called before."""

    def __init__(
        self,
        group: Any = None,
        *,
        before: Hook | None = None,
        before_state: Any = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """Meet the other ranks; all ranks of the group call it together.

        Args:
          group: DDP's process group, of any backend; ``None``: the default group.
          before: an earlier hook, ``before(before_state, bucket)``. What its future holds is what is reduced: it may
            change a bucket, watch it, or reduce it over another group.
          timeout: for each reduction, and for the others to come here.
        """
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            remedy = "a process group that this rank is in; dist.init_process_group first"
            raise ArgumentError(message("there is no such process group.", shown(group), remedy))
        self.before, self.before_state = before, before_state
        name = f"{group.group_name} hook {next(_NUMBER)}"
        store = dist.PrefixStore(f"crossreduce {name}/", dist.distributed_c10d._get_process_group_store(group))
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), group.rank(), group.size(), timeout=timeout)
        self.communicator = communicator(store, gloo, timeout, name, dist.get_process_group_ranks(group))
        self._do = Collectives(self.communicator, gloo)
        self.line = Line(name, inline=False)
        self._end = weakref.finalize(self, close, self.line, self.communicator)

    def close(self) -> None:
        """Let go of thread and memory; also done when the state is no longer used."""
        self._end()

    def mean(self, tensor: Callable[[], Any]) -> Any:
        """Start to replace what ``tensor`` will return by its mean over all ranks, in the order of these calls.

        Returns:
          The work; its result is a list of the tensor.
        """
        held: list[Any] = []

        def job() -> None:
            held.append(_one(tensor()))
            if not held[0].is_cpu:
                problem = "only gradients in host memory are reduced by this hook."
                remedy = "DDP's own reduction, through NCCL, for gradients on GPUs"
                raise UnsupportedError(message(problem, shown(held[0]), remedy))
            self._do.all_reduce(held[0], _MEAN.reduceOp)

        return self.line.run(job, held, later=True)


_MEAN: Final = c10d.AllreduceOptions()
_MEAN.reduceOp = dist.ReduceOp.AVG


def all_reduce_hook(state: Any, bucket: Any) -> Any:
    """Replace a bucket of gradients by its mean over all ranks.

    ``ddp.register_comm_hook(crossreduce.torch.HookState(), crossreduce.torch.all_reduce_hook)``

    Args:
      state: a ``HookState``; or a process group, or ``None`` for the default one, for which one is made and kept.
      bucket: what DDP hands over.
    Returns:
      A future of the bucket's tensor.
    Raises:
      UnsupportedError: the gradients are not in host memory.
    """
    if not isinstance(state, HookState):
        state = _state_of(dist.group.WORLD if state is None else state)
    if state.before is None:
        work = state.mean(bucket.buffer)
    else:
        work = state.mean(state.before(state.before_state, bucket).wait)
    if torch._C._current_graph_task_id() != -1:
        wait_in_backward(work)
    return work.get_future().then(lambda done: done.value()[0])


def communicator_of(group: Any) -> tuple[Line, Communicator]:
    """Return in which order a group's calls run, and what they run on.

    Raises:
      ArgumentError: it is a group of another backend.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, (Group, HookState)):
        problem = "this is no group of ranks that reduce through crossreduce."
        remedy = 'a process group of the backend "crossreduce", or a HookState'
        raise ArgumentError(message(problem, shown(found), remedy))
    return found.line, found.communicator


# DDP compares annotations with classes, not with their names.
all_reduce_hook.__annotations__ = {
    "state": object,
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}


def _state_of(group: Any) -> HookState:
    if isinstance(group, dist.ProcessGroup) and group in _STATES:
        return _STATES[group]
    state = HookState(group)
    _STATES[group] = state
    return state


def _one(value: Any) -> Any:
    """Return the tensor of a future: some hooks leave a list of one."""
    return value[0] if isinstance(value, (list, tuple)) else value
