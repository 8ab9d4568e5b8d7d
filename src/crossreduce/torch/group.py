"""The process group that ``dist.init_process_group("crossreduce")`` creates.

Input: calls of ``torch.distributed``, from Python and, through its trampolines, from C++ (DDP, functional collectives).
Output: ops for a queue, which runs them in the order of the calls, and messages. NCCL executes calls with CUDA tensors.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from _crossreduce_torch import VARIABLE, InPlaceOfGloo

from ..errors import ArgumentError, MismatchError, UnsupportedError
from ..frameworks.torch.arrays import increment_versions, is_traced
from ..ranks.connections.rendezvous import NEW, Origin
from ..ranks.messages import ANY_RANK, Messages
from ..ranks.survival.survivors import Reformed
from .collectives import Collectives
from .connections import close, connect, own_part, parent, require_place
from .memory import copy_back_all, readable, receivable, require_dense, tensors_in, unsupported_form
from .messages import HostMessage
from .op_queue import REMEDY, Finished, OpQueue, Works, exclude_from_compile, is_called_by_backward, wait_in_backward
from .options import all_reduce_arguments, prepared_calls, read_options
from .profiling import begin_entry, entry, is_profiled
from .subclasses import call_unwrapped, has_wrapper

_DRAIN_S: Final = 10.0  # how long a group that is destroyed waits for its pending ops
_UNSET: Final = timedelta(0)  # a timeout of at most this means that the options have no timeout
_LISTS: Final = {"allreduce", "broadcast", "allgather"}  # calls in which gloo accepts several tensors per rank
BACKEND: Final = "crossreduce"


class Group(dist.ProcessGroup):  # type: ignore[misc]
    """A process group that reduces CPU tensors in the shared memory of a host's ranks, and over TCP between hosts."""

    reformed: Reformed | None = None
    """If the group was formed from an earlier one: its ranks there, and how many ops have succeeded on all of them."""
    base_store: Any = None
    """If the group was formed from an earlier one: the store that one of its ranks serves."""
    backend_name = BACKEND
    """The name of the backend in torch's tables: "gloo" for a group that was made in its place."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_ranks: Sequence[int] = (),
        options: Any = None,
        origin: Origin = NEW,
    ) -> None:
        """Connect the ranks at a rendezvous in ``store``. ``timeout`` applies to every op and to this call.

        ``options``: the group's ``pg_options``; see ``Options``. ``origin``: see ``Origin``.
        """
        super().__init__(rank, size)
        self._store, unique = own_part(store, rank, name, origin)
        place = (store := self._store), rank, size, timeout, name, global_ranks
        gloo, self.communicator, self.exact = connect(*place, options, origin, unique=unique)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        if hasattr(self, "_set_default_backend"):  # torch 2.5 or later
            self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        require_place(self, rank, size)
        self._devices = list(options.devices) if isinstance(options, InPlaceOfGloo) else ["cpu"]
        if isinstance(options, InPlaceOfGloo) and options.value == "1":
            self.backend_name = "gloo"
        for device in self._devices[1:]:  # the first one is "cpu"
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
        if "cuda" not in self._devices and torch.cuda.is_available() and dist.is_nccl_available():
            choices = dist.ProcessGroupNCCL.Options()
            choices._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, choices)
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
            self._devices.append("cuda")
        # torch's set_timeout and _set_pg_timeout change the timeout in gloo's options, so every call reads it there.
        self._timeout, self._settings, self._timeout_lock = timeout, gloo.options, threading.RLock()
        self._messages, self._options = Messages(self.communicator), options
        self._collectives = Collectives(self.communicator, store, self.exact, self._messages)
        self._numbers, self._number = itertools.count(1), 0  # of next and latest call, without those of ``_prepared``
        self._continued = 0  # calls that began in ``_prepared`` and then ran in Python
        back = f"or gloo: unset {VARIABLE}" if isinstance(options, InPlaceOfGloo) else ""
        self.queue = OpQueue(name, inline=True, communicator=self.communicator, alternative=back)
        self._prepared = prepared_calls(self._collectives.calls, self.queue, self._settings, timeout, self.exact)
        self._end = weakref.finalize(self, close, self.queue, self.communicator)

    def getBackendName(self) -> str:  # noqa: N802 - the trampoline's name
        return self.backend_name

    def __repr__(self) -> str:
        """Return a text for torch's errors about a group that is not in its tables."""
        return f'<crossreduce group "{self.queue.name}"{f" was destroyed: {REMEDY}" if self.queue.is_closed else ""}>'

    @property
    def timeout(self) -> timedelta:
        """How long ops wait for other ranks."""
        limit: timedelta = self._settings._timeout
        return limit

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives and messages that this rank has started in this group."""
        return self._number + int(self._prepared.begun()) - self._continued

    def shutdown(self) -> None:
        """Wait for pending ops, end the group, and release its thread, memory and descriptors."""
        try:
            if not self.queue.close(_DRAIN_S):
                self.communicator.abort()
        finally:  # Ctrl-C ends the wait for pending ops, and aborts them
            self._end()

    def abort(self) -> None:
        """Abort the group: pending ops fail. (``shutdown`` waits for them first, up to 10 s.)"""
        self.communicator.abort()
        self._end()

    close = abort

    # ---- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: Any = "sum") -> Any:
        """Reduce a tensor of all ranks in place, and return it.

        It is the same call as ``dist.all_reduce(tensor, op, group)``, with the same checks and in the same order with
        the group's other calls, so some ranks may make one and some the other. It takes less time for small tensors.

        Args:
          tensor: of the same shape and dtype on all ranks.
          op: "sum", "mean", "min", "max" or "product", a ``crossreduce.ReduceOp``, or one of ``dist.ReduceOp``.
        Raises:
          ArgumentError: ``tensor`` is not a tensor, or ``op`` is unknown.
          ReductionError: as for ``dist.all_reduce``, such as a ``MismatchError`` or a ``PeerLostError``.

        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("crossreduce", store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.group.WORLD.all_reduce(torch.ones(3), "mean")
        tensor([1., 1., 1.])
        >>> dist.destroy_process_group()
        """
        if self._prepared.all_reduce(tensor, op) is None:
            self.allreduce(*all_reduce_arguments(tensor, op)).wait()
        return tensor

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, op: Any = None) -> Any:
        if (work := self._prepared.allreduce(tensors, opts)) is not None:
            return work
        tensors, opts = read_options(tensors, opts, c10d.AllreduceOptions, timeout, op)
        return self._run("allreduce", (tensors, opts), tensors, self._one("all_reduce", [opts.reduceOp], tensors))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = read_options(tensors, opts, c10d.AllreduceCoalescedOptions)
        function = self._each("all_reduce", [opts.reduceOp], tensors)
        return self._run("allreduce_coalesced", (tensors, opts), tensors, function)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        tensors, opts = read_options(tensors, opts, c10d.ReduceOptions, timeout, op)
        options = [opts.reduceOp, opts.rootRank]
        function = partial(self._collectives.run_one, self._collectives.reduce, options, tensors)
        return self._run("reduce", (tensors, opts), tensors, function, writes=opts.rootRank == self.rank())

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, op: Any = None) -> Any:
        if isinstance(outputs, torch.Tensor):
            inputs = [inputs]
        outputs, opts = read_options(outputs, opts, c10d.ReduceScatterOptions, timeout, op)
        function = self._one("reduce_scatter", [opts.reduceOp], outputs, inputs)
        return self._run("reduce_scatter", (outputs, inputs, opts), outputs, function)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if (work := self._prepared.reduce_scatter_single(output, tensor, opts)) is not None:
            return work
        outputs, opts = read_options(output, opts, c10d.ReduceScatterOptions)
        function = partial(self._collectives.reduce_scatter_single, output, tensor, opts.reduceOp)
        return self._run("_reduce_scatter_base", (output, tensor, opts), outputs, function)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs, opts = read_options(outputs, opts, c10d.ReduceScatterOptions)
        function = self._each("reduce_scatter_single", [opts.reduceOp], outputs, inputs)
        return self._run("reduce_scatter_tensor_coalesced", (outputs, inputs, opts), outputs, function)

    def _one(self, method: str, options: Sequence[Any], *lists: Any) -> Callable[[], None]:
        """Return a function for the queue that calls a collective with the only element of each list."""
        return partial(self._collectives.run_one, getattr(self._collectives, method), options, *lists)

    def _each(self, method: str, options: Sequence[Any], *lists: Any) -> Callable[[], None]:
        """Return a function for the queue that calls a collective, for each k, with the k-th element of each list."""
        return partial(self._collectives.run_each, getattr(self._collectives, method), options, *lists)

    # ---- moves ----------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, root: int = 0) -> Any:
        if (work := self._prepared.broadcast(tensors, opts)) is not None:
            return work
        tensors, opts = read_options(tensors, opts, c10d.BroadcastOptions, timeout, root=root)
        function = partial(self._collectives.run_one, self._collectives.broadcast, [opts.rootRank], tensors)
        return self._run("broadcast", (tensors, opts), tensors, function, writes=opts.rootRank != self.rank())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs = [outputs]
        inputs, opts = read_options(inputs, opts, c10d.AllgatherOptions, timeout)
        function = partial(self._collectives.run_one, self._collectives.all_gather, [], outputs, inputs)
        return self._run("allgather", (outputs, inputs, opts), inputs, function, tensors_in(outputs))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        # ``outputs[rank][tensor]`` has the transposed order of ``allgather``.
        inputs, opts = read_options(inputs, opts, c10d.AllgatherOptions)
        lists = [[row[k] for row in outputs if k < len(row)] for k in range(max(map(len, outputs), default=0))]
        function = self._each("all_gather", [], lists, inputs)
        return self._run("allgather_coalesced", (outputs, inputs, opts), inputs, function, tensors_in(outputs))

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if (work := self._prepared.all_gather_single(output, tensor, opts)) is not None:
            return work
        inputs, opts = read_options(tensor, opts, c10d.AllgatherOptions)
        function = partial(self._collectives.all_gather_single, output, tensor)
        return self._run("_allgather_base", (output, tensor, opts), inputs, function, [output])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        inputs, opts = read_options(inputs, opts, c10d.AllgatherOptions)
        function = self._each("all_gather_single", [], outputs, inputs)
        return self._run("allgather_into_tensor_coalesced", (outputs, inputs, opts), inputs, function, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, root: int = 0) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs = [outputs] if outputs else []
        inputs, opts = read_options(inputs, opts, c10d.GatherOptions, timeout, root=root)
        results = outputs[0] if outputs else []
        function = self._one("gather", [opts.rootRank], outputs or [[]], inputs)
        return self._run("gather", (outputs, inputs, opts), inputs, function, results)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, root: int = 0) -> Any:
        if isinstance(outputs, torch.Tensor):
            inputs = [inputs] if inputs else []
        outputs, opts = read_options(outputs, opts, c10d.ScatterOptions, timeout, root=root)
        function = self._one("scatter", [opts.rootRank], outputs, inputs or [[]])
        return self._run("scatter", (outputs, inputs, opts), outputs, function)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        inputs, opts = read_options(inputs, opts, c10d.AllToAllOptions)
        function = partial(self._collectives.all_to_all, outputs, inputs)
        return self._run("alltoall", (outputs, inputs, opts), inputs, function, outputs)

    def all_to_all_single(self, output: Any, tensor: Any, received: Any = (), sent: Any = (), opts: Any = None) -> Any:
        differs = None
        if not received and not sent:
            try:
                if (work := self._prepared.all_to_all_single(output, tensor, opts)) is not None:
                    return work
            except MismatchError as error:  # other ranks may have unequal parts
                differs = error.with_traceback(None)
                self._continued += 1
        inputs, opts = read_options(tensor, opts, c10d.AllToAllOptions)
        function = partial(self._collectives.all_to_all_single, output, tensor, received, sent, differs)
        return self._run("alltoall_base", (output, tensor, received, sent, opts), inputs, function, [output])

    def monitored_barrier(self, timeout: timedelta | None = None, **_: Any) -> None:
        """Wait for all ranks. If some are late, all others raise a ``CollectiveTimeout`` that names them."""
        self.barrier(timeout=timeout).wait()

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        _, opts = read_options([], opts, c10d.BarrierOptions, timeout)
        if opts.device is not None and opts.device.type != "cpu":
            return self._backend_of(opts.device, "barrier").barrier(opts)
        return self._run("barrier", (opts,), [], self.communicator.barrier)

    def split_group(
        self, ranks: Sequence[int], timeout: Any = None, _opts: Any = None, group_name: Any = None, *_: Any, **__: Any
    ) -> Group | None:
        """Return a group of ``ranks`` of this one, with its options. On other ranks the result is ``None``."""
        if self.rank() not in ranks:
            return None
        ranks = list(ranks) if hasattr(c10d, "ReconfigureOptions") else sorted(ranks)  # as gloo before torch 2.14
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        numbers, place = [self.communicator.global_ranks[rank] for rank in ranks], ranks.index(self.rank())
        store, limit = dist.PrefixStore(f"split {name}/", self._store), timeout or self.timeout
        origin = Origin(parent=parent(self, ranks, f" {ranks}"))  # others may give the same name
        group = type(self)(store, place, len(ranks), limit, name, numbers, self._options, origin)
        group._set_group_name(name)
        return group

    splitGroup = split_group  # noqa: N815 - the trampoline's name

    # ---- between two ranks ----------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self._message("send", readable, tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self._message("recv", receivable, tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._message("recv_anysource", receivable, tensors, tag)

    def _message(self, method: str, plain: Callable[[Any], Any], tensors: Sequence[Any], *arguments: int) -> Any:
        """Start a send or receive, with an entry in the profiler if it is on. Return its work."""
        try:
            if not is_profiled():
                return self._start_message(method, plain, tensors, *arguments)
            with entry(self, method, tensors if method == "send" else [], [] if method == "send" else tensors):
                return self._start_message(method, plain, tensors, *arguments)
        except UnsupportedError as error:
            raise self.queue.completed(error) from None

    def _start_message(self, method: str, plain: Callable[[Any], Any], tensors: Sequence[Any], *arguments: int) -> Any:
        """Start a send or receive and return its work. ``arguments``: the other rank, if not any, and the tag.

        ``plain`` returns a contiguous tensor to send from or receive into. Ctrl-C during ``wait`` aborts the group.
        """
        if has_wrapper(tensors):
            if works := call_unwrapped(getattr(self, method), (tensors, *arguments)):
                return Works(works, tensors)
            raise unsupported_form(method, tensors[0])
        call, tag, takes_any = method.partition("_")[0], arguments[-1], method == "recv_anysource"
        peer = ANY_RANK if takes_any else arguments[0]
        if not takes_any and not 0 <= peer < self.communicator.size:
            problem = f"the other rank of a {method} is not a rank of the group."
            raise ArgumentError.of(problem, str(peer), f"0 to {self.size() - 1}")
        if peer == self.communicator.rank:
            raise ArgumentError.of("a rank cannot send messages to itself.", f"rank {peer}", "copy the tensor")
        if len(tensors) != 1:
            raise ArgumentError.of(f"a {call} takes a single tensor.", f"{len(tensors)} tensors", "a call for each")
        if tensors[0].is_cpu and tag < 0:
            raise ArgumentError.of("the tag of a message is at least 0.", str(tag))
        require_dense(method, tensors)
        if not takes_any:
            self.communicator.links.require(call, peer)
        tensor, buffer = tensors[0], plain(tensors[0])
        self.queue.require_open()  # else a forked process would write to its parent's connections
        if method != "send":
            increment_versions(tensors)
        self._number = next(self._numbers)
        if not tensor.is_cpu:
            return getattr(self._backend_of(tensor.device, call), method)([buffer], *arguments)
        nbytes, finish = buffer.nbytes, None
        if method == "send":
            number = self._messages.send(buffer, buffer.data_ptr(), nbytes, peer, tag)
            if not number:  # the message is complete
                return Finished([buffer])
        else:
            number = self._messages.receive(buffer, buffer.data_ptr(), nbytes, peer, tag)
            finish = None if tensor is buffer else partial(copy_back_all, tensors, [buffer])
        message = number, call, peer, nbytes
        return HostMessage(self._messages, message, tensors, finish, self.queue.require_open, self._settings)

    def _backend_of(self, device: Any, call: str) -> Any:
        """Return the inner backend for a device.

        Raises:
          UnsupportedError: the device type has no inner backend.
        """
        if device.type in self._devices:
            return self._get_backend(device)
        problem = f"this process group has no backend for {device.type} tensors."
        given = f"{call} on {device}; the group serves {' and '.join(self._devices)}"
        remedy = 'CPU tensors; for CUDA tensors "cpu:crossreduce,cuda:nccl", where torch has NCCL and finds a GPU; for '
        remedy += "other devices dist.new_group(backend=...) with the name of a backend that serves them"
        raise UnsupportedError.of(problem, given, remedy)

    def _refuse(self, device: Any, call: str) -> None:
        self.communicator.require_same(f"{call} on {device.type}")  # if ranks use different devices, this raises on all
        self._backend_of(device, call)

    def _run(
        self,
        inner: str,
        arguments: Sequence[Any],
        tensors: Any,
        function: Callable[[], None],
        results: Any = None,
        writes: bool = True,
    ) -> Any:
        """Run ``function`` in the queue and return the work. Its result is ``results``, by default ``tensors``.

        If ``tensors`` are not in host memory, the method ``inner`` of the inner backend runs instead, with
        ``arguments``, of which the last one is the options. Tensors that wrap other tensors are unwrapped first.
        ``writes``: whether this rank's results are written.
        """
        written = tensors if results is None else results
        if writes:
            increment_versions(written)
        every_tensor = tensors if len(arguments) == 2 else tensors_in(arguments)  # two are ``tensors`` and the options
        if has_wrapper(every_tensor):
            return self._unwrapped(inner, arguments, written)
        self._number = next(self._numbers)
        for tensor in tensors:
            if not tensor.is_cpu:
                if tensor.device.type in self._devices:
                    return getattr(self._get_backend(tensor.device), inner)(*arguments)
                function = partial(self._refuse, tensor.device, inner)
                break
        if len(tensors) > 1 and inner in _LISTS and self.backend_name != BACKEND:
            function = partial(self._collectives.run_lists, inner, arguments)
        opts, is_async = arguments[-1], getattr(arguments[-1], "asyncOp", True)  # torch 2.4 does not tell
        if is_async and is_traced():
            function = partial(self._collectives.checks.refuse_traced, inner)
        function = self.within_timeout(function, opts.timeout)
        if is_profiled():
            with entry(self, inner, tensors, written):
                function = begin_entry(inner, function) if is_async else function
                work = self.queue.run(function, written, is_async)
        else:
            work = self.queue.run(function, written, is_async)
        if is_async and torch._C._current_graph_task_id() != -1 and is_called_by_backward(__file__):
            wait_in_backward(work)
        return work

    def _unwrapped(self, method: str, arguments: Sequence[Any], results: Any) -> Any:
        """Call a method with the tensors that are wrapped in its arguments. Return the work of all these calls."""
        is_async, parts = getattr(arguments[-1], "asyncOp", True), call_unwrapped(lambda *_: None, arguments)
        agreed = self.queue.run(partial(self._collectives.checks.agree_on_parts, method, len(parts)), [], is_async)
        if works := self.queue.call_after(agreed, call_unwrapped, getattr(self, method), arguments):
            return Works([agreed, *works], results)
        wrapper = next(x for x in tensors_in(arguments) if has_wrapper([x]))
        return self.queue.run(partial(self._collectives.checks.refuse_class, method, wrapper), results, is_async)

    def within_timeout(self, function: Callable[[], None], limit: timedelta = _UNSET) -> Callable[[], None]:
        """Return a function that calls ``function`` with a timeout: ``limit``, or what is now that of the group."""
        limit = limit if limit > _UNSET else self._settings._timeout
        return function if limit == self._timeout else partial(self._with_timeout, limit.total_seconds(), function)

    def _with_timeout(self, seconds: float, function: Callable[[], None]) -> None:
        usual = self.communicator.timeout_s
        with self._timeout_lock:
            self.communicator.timeout_s = seconds
            try:
                function()
            finally:
                self.communicator.timeout_s = usual


exclude_from_compile(Group)

# The names by which torch before 2.13 calls these methods.
Group._allgather_base = Group.all_gather_single
Group.allgather_into_tensor_coalesced = Group.all_gather_single_coalesced
Group._reduce_scatter_base = Group.reduce_scatter_single
Group.reduce_scatter_tensor_coalesced = Group.reduce_scatter_single_coalesced
Group.alltoall_base = Group.all_to_all_single
