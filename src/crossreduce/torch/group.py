"""The process group that ``dist.init_process_group("crossreduce")`` makes.

In: calls of ``torch.distributed``, from Python and, through its trampolines, from C++ (DDP, functional collectives).
Out: jobs for a line, which runs them in the order in which they came. Whatever does not lie in host memory goes on to
an inner engine, as does what is between two ranks: gloo for the CPU, NCCL for CUDA.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..errors import UnsupportedError, message
from ..ranks.communicator import Communicator
from ..transports.gloo import GlooWire
from .collectives import Collectives
from .memory import readable, settle_all, writable
from .op_queue import Landing, Line, untraced
from .rendezvous import StoreRendezvous

_CPU: Final = torch.device("cpu")
_DRAIN_S: Final = 10.0  # for ops that were started and are still under way when their group is destroyed
_LEAVE_S: Final = 1.0  # likewise, when their process ends
_UNSET: Final = timedelta(0)  # the timeout of options that have none is below
_NAMES_OF_OPS: Final = (dist.ReduceOp, dist.ReduceOp.RedOpType)


def create(options: Any, backend_options: Any = None) -> Group:  # noqa: ARG001 - the registry's signature
    """Make a group, for ``dist.Backend.register_backend``; all its ranks call it together."""
    members = list(options.global_ranks_in_group)  # empty: the world
    return Group(options.store, options.group_rank, options.group_size, options.timeout, options.group_id, members)


class Group(dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose CPU tensors are reduced through memory that ranks share."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, name: str, members: Sequence[int] = ()
    ) -> None:
        """Meet the other ranks at ``store``; ``timeout`` is for every op, and for this."""
        super().__init__(rank, size)
        # A group may get the name, and so the store's keys, of one that was destroyed: each has keys of its own.
        store = dist.PrefixStore(f"{store.add(f'turn {rank}', 1)}/", store)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)
        self._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            choices = dist.ProcessGroupNCCL.Options()
            choices._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, choices)
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        self._timeout, self._settings = timeout, gloo.options  # where _set_pg_timeout and set_timeout put another one
        self.communicator = communicator(dist.PrefixStore("crossreduce/", store), gloo, timeout, name, members)
        self._do = Collectives(self.communicator, gloo)
        self._odd = threading.RLock()
        # On several hosts there is waiting that does not hear Ctrl-C: not in the caller's thread.
        self.line = Line(name, inline=len(self.communicator.hosts) == 1)
        self._end = weakref.finalize(self, close, self.line, self.communicator)

    def getBackendName(self) -> str:  # noqa: N802 - the trampoline's name
        return "crossreduce"

    def shutdown(self) -> None:
        """End the group: no thread, memory or descriptor of it is left."""
        self.line.close(_DRAIN_S)
        self._end()

    def abort(self) -> None:
        """End the group; what is under way fails."""
        self.communicator.abort()
        self._end()

    # ---- reductions -----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, op: Any = None) -> Any:
        tensors, opts = _read(tensors, opts, c10d.AllreduceOptions, timeout, op)
        if (engine := self._elsewhere(tensors)) is not None:
            return engine.allreduce(tensors, opts)
        return self._run(partial(self._all_reduce, tensors, opts.reduceOp), tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = _read(tensors, opts, c10d.AllreduceCoalescedOptions)
        if (engine := self._elsewhere(tensors)) is not None:
            return engine.allreduce_coalesced(tensors, opts)
        return self._run(partial(self._all_reduce, tensors, opts.reduceOp), tensors, opts)

    def _all_reduce(self, tensors: Sequence[Any], kind: Any) -> None:
        for tensor in tensors:
            self._do.all_reduce(tensor, kind)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        tensors, opts = _read(tensors, opts, c10d.ReduceOptions, timeout, op)
        if (engine := self._elsewhere(tensors)) is not None:
            return engine.reduce(tensors, opts)
        return self._run(lambda: self._do.reduce(tensors[0], opts.reduceOp, opts.rootRank), tensors, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, op: Any = None) -> Any:
        if isinstance(outputs, torch.Tensor):
            inputs = [inputs]
        outputs, opts = _read(outputs, opts, c10d.ReduceScatterOptions, timeout, op)
        if (engine := self._elsewhere(outputs)) is not None:
            return engine.reduce_scatter(outputs, inputs, opts)

        def job() -> None:
            for output, sources in zip(outputs, inputs, strict=True):
                self._do.reduce_scatter(output, sources, opts.reduceOp)

        return self._run(job, outputs, opts)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if (engine := self._elsewhere([output])) is not None:
            return engine._reduce_scatter_base(output, tensor, opts or c10d.ReduceScatterOptions())
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs, opts = _read(outputs, opts, c10d.ReduceScatterOptions)
        if (engine := self._elsewhere(outputs)) is not None:
            return engine.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

        def job() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._do.reduce_scatter_single(output, tensor, opts.reduceOp)

        return self._run(job, outputs, opts)

    # ---- moves ----------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, root: int = 0) -> Any:
        tensors, opts = _read(tensors, opts, c10d.BroadcastOptions, timeout, root=root)
        if (engine := self._elsewhere(tensors)) is not None:
            return engine.broadcast(tensors, opts)

        def job() -> None:
            for tensor in tensors:
                self._do.broadcast(tensor, opts.rootRank)

        return self._run(job, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs = [outputs]
        inputs, opts = _read(inputs, opts, c10d.AllgatherOptions, timeout)
        if (engine := self._elsewhere(inputs)) is not None:
            return engine.allgather(outputs, inputs, opts)

        def job() -> None:
            for results, tensor in zip(outputs, inputs, strict=True):
                self._do.all_gather(results, tensor)

        return self._run(job, [x for results in outputs for x in results], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        # Here the lists lie the other way round: outputs[rank][tensor].
        return self.allgather([list(results) for results in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if (engine := self._elsewhere([tensor])) is not None:
            return engine._allgather_base(output, tensor, opts or c10d.AllgatherOptions())
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        inputs, opts = _read(inputs, opts, c10d.AllgatherOptions)
        if (engine := self._elsewhere(inputs)) is not None:
            return engine.allgather_into_tensor_coalesced(outputs, inputs, opts)

        def job() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._do.all_gather_single(output, tensor)

        return self._run(job, outputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, root: int = 0) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs = [outputs] if outputs else []
        inputs, opts = _read(inputs, opts, c10d.GatherOptions, timeout, root=root)
        if (engine := self._elsewhere(inputs)) is not None:
            return engine.gather(outputs, inputs, opts)
        results = outputs[0] if outputs else []
        return self._run(lambda: self._do.gather(results, inputs[0], opts.rootRank), results, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, root: int = 0) -> Any:
        if isinstance(outputs, torch.Tensor):
            inputs = [inputs] if inputs else []
        outputs, opts = _read(outputs, opts, c10d.ScatterOptions, timeout, root=root)
        if (engine := self._elsewhere(outputs)) is not None:
            return engine.scatter(outputs, inputs, opts)
        sources = inputs[0] if inputs else []
        return self._run(lambda: self._do.scatter(outputs[0], sources, opts.rootRank), outputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        inputs, opts = _read(inputs, opts, c10d.AllToAllOptions)
        if (engine := self._elsewhere(inputs)) is not None:
            return engine.alltoall(outputs, inputs, opts)
        return self._run(lambda: self._do.all_to_all(outputs, inputs), outputs, opts)

    def all_to_all_single(self, output: Any, tensor: Any, rooms: Any = (), sizes: Any = (), opts: Any = None) -> Any:
        inputs, opts = _read(tensor, opts, c10d.AllToAllOptions)
        if (engine := self._elsewhere(inputs)) is not None:
            return engine.alltoall_base(output, tensor, rooms, sizes, opts)
        return self._run(lambda: self._do.all_to_all_single(output, tensor, rooms, sizes), [output], opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        _, opts = _read([], opts, c10d.BarrierOptions, timeout)
        if opts.device is not None and opts.device.type != "cpu":
            return self._get_backend(opts.device).barrier(opts)
        return self._run(self._do.barrier, [], opts)

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Refuse: torch's own, in C++, would call itself without end."""
        problem = "a group of this backend cannot be split."
        raise UnsupportedError(message(problem, f'group "{self.group_name}"', "dist.new_group, which all ranks call"))

    splitGroup = split_group  # noqa: N815 - the trampoline's name

    # ---- between two ranks ----------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self._between(tensors).send([readable(x) for x in tensors], dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        held = [writable(x) for x in tensors]
        return _landing(tensors, held, self._between(tensors).recv(held, src, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        held = [writable(x) for x in tensors]
        return _landing(tensors, held, self._between(tensors).recv_anysource(held, tag))

    def _between(self, tensors: Sequence[Any]) -> Any:
        self.line.require_open()  # a forked process would write into its parent's connections
        return self._get_backend(tensors[0].device)

    # ---- what all of them need ------------------------------------------------------------------------------------

    def _run(self, job: Callable[[], None], tensors: Sequence[Any], opts: Any) -> Any:
        limit = opts.timeout
        if limit <= _UNSET:
            limit = self._settings._timeout
        if limit != self._timeout:
            job = partial(self._within, limit.total_seconds(), job)
        later = opts.asyncOp
        work = self.line.run(job, tensors, later)
        if later and torch._C._current_graph_task_id() != -1 and _backward_calls():
            wait_in_backward(work)
        return work

    def _within(self, seconds: float, job: Callable[[], None]) -> None:
        """Run a job whose timeout is not what the group began with."""
        usual = self.communicator.timeout_s
        with self._odd:
            self.communicator.timeout_s = seconds
            try:
                job()
            finally:
                self.communicator.timeout_s = usual

    def _elsewhere(self, tensors: Sequence[Any]) -> Any:
        """Return the inner engine, if the tensors do not lie in host memory."""
        for tensor in tensors:
            if not tensor.is_cpu:
                return self._get_backend(tensor.device)
        return None


untraced(Group)

# What torch before 2.13 calls these.
Group._allgather_base = Group.all_gather_single
Group.allgather_into_tensor_coalesced = Group.all_gather_single_coalesced
Group._reduce_scatter_base = Group.reduce_scatter_single
Group.reduce_scatter_tensor_coalesced = Group.reduce_scatter_single_coalesced
Group.alltoall_base = Group.all_to_all_single


def communicator(store: Any, gloo: Any, timeout: timedelta, name: str, members: Sequence[int]) -> Communicator:
    """Make the communicator of a group whose ranks meet at ``store`` and are joined by ``gloo``.

    ``members``: their numbers in the whole world, which errors name; none: they are the world.
    """
    seconds = timeout.total_seconds()
    meeting = StoreRendezvous(store, gloo.rank(), gloo.size(), seconds)
    return Communicator(meeting, GlooWire(gloo), name=name, timeout_s=seconds, members=members)


def close(line: Line, ours: Communicator) -> None:
    """End a group that is no longer needed, and what is still under way in it; a forked process leaves it alone."""
    if line.foreign:
        return
    if line.close(_LEAVE_S):
        ours.close()
    else:
        ours.abort()
        line.close(_LEAVE_S)


def _read(tensors: Any, opts: Any, kind: Any, timeout: Any = None, op: Any = None, root: int = 0) -> tuple[Any, Any]:
    """Return a list of tensors and options of class ``kind``, of whatever torch's own process groups take for them."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if type(opts) is kind:
        return tensors, opts
    made = kind()
    if isinstance(opts, _NAMES_OF_OPS):
        op = opts
    elif isinstance(opts, int):
        root = opts
    if op is not None:
        made.reduceOp = op
    if root:
        made.rootRank = root
    if timeout is not None:
        made.timeout = timeout
    return tensors, made


def _landing(tensors: Sequence[Any], held: Sequence[Any], work: Any) -> Any:
    """Return the work of receiving ``tensors``, which came into ``held`` where they do not lie in one piece."""
    return work if all(map(operator.is_, tensors, held)) else Landing(work, partial(settle_all, tensors, held), tensors)


def wait_in_backward(work: Any) -> None:
    """Wait for work at the end of the backward pass under way, in the thread that called it.

    DDP, in C++, would wait for a future: deaf to Ctrl-C, and blind to an error's class. What is queued here runs before
    what DDP queues once its last bucket is on its way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(work.wait)


def _backward_calls() -> bool:
    """Return whether C++ called, in a backward pass: the newest Python code below is the one that started that."""
    return sys._getframe(3).f_code.co_name == "_engine_run_backward"
