"""A communication hook for ``DistributedDataParallel`` (DDP): crossreduce reduces the gradients of any group.

Input: DDP's buckets of gradients. Output: futures of their means. The group's own backend executes its other calls.
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

from ..errors import ArgumentError, UnsupportedError, shown
from ..frameworks.torch.arrays import increment_versions
from .collectives import Collectives
from .connections import close, connect
from .op_queue import OpQueue, wait_in_backward
from .options import Options

Hook = Callable[[Any, Any], Any]
_NUMBER: Final = itertools.count()
_STATES: Final[weakref.WeakKeyDictionary[Any, HookState]] = weakref.WeakKeyDictionary()


class HookState:
    """The state of ``all_reduce_hook``: the connections of the ranks and, if there is one, an earlier hook."""

    def __init__(
        self,
        group: Any = None,
        *,
        before: Hook | None = None,
        before_state: Any = None,
        timeout: timedelta = timedelta(minutes=30),
        exact: bool | None = None,
    ) -> None:
        """Connect the ranks. All ranks of the group must call it together.

        Args:
          group: DDP's process group, of any backend; by default the default group.
          before: an earlier hook, called as ``before(before_state, bucket)``. It returns a future, whose value is
            reduced. The hook may change a bucket, observe it, or reduce it over another group.
          before_state: the first argument of ``before``.
          timeout: the longest wait for the other ranks, in this call and in each reduction.
          exact: whether means are exact, as in ``Options``. The default is set by the variable ``CROSSREDUCE_EXACT``.
        """
        options = None if exact is None else Options(exact)
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            remedy = "a process group that contains this rank; dist.init_process_group first"
            raise ArgumentError.of("this is not a process group.", shown(group), remedy)
        self.before, self.before_state = before, before_state
        name = f"{group.group_name} hook {next(_NUMBER)}"
        store = dist.PrefixStore(f"crossreduce {name}/", dist.distributed_c10d._get_process_group_store(group))
        global_ranks = dist.get_process_group_ranks(group)
        rank, size = group.rank(), group.size()
        _, self.communicator, exact = connect(
            store, rank, size, timeout, name, global_ranks, options, has_messages=False
        )
        self._collectives = Collectives(self.communicator, store, exact)
        self.queue = OpQueue(name, inline=False)
        self._end = weakref.finalize(self, close, self.queue, self.communicator)

    def close(self) -> None:
        """Release the thread and the memory. This also happens when the state is garbage collected."""
        self._end()

    def mean(self, get_tensor: Callable[[], Any]) -> Any:
        """Queue an op that gets a tensor from ``get_tensor``, and replaces its contents by the mean over all ranks.

        Ops run in the order of these calls. Return the work; its result is a list with the tensor.
        """
        tensors: list[Any] = []

        def function() -> None:
            value = get_tensor()
            tensors.append(value[0] if isinstance(value, (list, tuple)) else value)  # some hooks return a list with it
            if not tensors[0].is_cpu:
                problem = "this hook reduces only gradients in host memory."
                remedy = "DDP's own reduction, through NCCL, for gradients on GPUs"
                raise UnsupportedError.of(problem, shown(tensors[0]), remedy)
            increment_versions(tensors)
            self._collectives.all_reduce(tensors[0], _MEAN.reduceOp)

        return self.queue.run(function, tensors, asynchronous=True)


_MEAN: Final = c10d.AllreduceOptions()
_MEAN.reduceOp = dist.ReduceOp.AVG


def all_reduce_hook(state: Any, bucket: Any) -> Any:
    """Replace a bucket of gradients by its mean over all ranks.

    ``ddp.register_comm_hook(crossreduce.torch.HookState(), crossreduce.torch.all_reduce_hook)``

    Args:
      state: a ``HookState``, or a process group (``None``: the default group), for which a state is made and cached.
      bucket: DDP's bucket.
    Returns:
      A future of the bucket's tensor.
    Raises:
      UnsupportedError: the gradients are not in host memory.
    """
    if not isinstance(state, HookState):
        group = dist.group.WORLD if state is None else state
        cached = _STATES.get(group) if isinstance(group, dist.ProcessGroup) else None
        state = cached or _STATES.setdefault(group, HookState(group))
    before = state.before
    work = state.mean(bucket.buffer if before is None else before(state.before_state, bucket).wait)
    if torch._C._current_graph_task_id() != -1:
        wait_in_backward(work)
    return work.get_future().then(lambda done: done.value()[0])


# DDP compares annotations with classes. The annotations above are strings (see the import from __future__).
all_reduce_hook.__annotations__ = {
    "state": object,
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}
