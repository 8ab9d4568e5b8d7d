"""Each collective over CPU tensors, from beginning to end: what a group's line runs.

In: tensors, as ``torch.distributed`` has them.  Out: calls of a ``Communicator``, or of gloo for what that has no plan
for. A tensor that does not lie in one piece is copied; dtypes that cannot be reduced are moved as bytes. Blocks.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp as TorchOp

from ..errors import ArgumentError, CollectiveTimeout, MismatchError, PeerLostError, UnsupportedError, message
from ..ops import ReduceOp
from ..ranks.communicator import Communicator
from ..ranks.diagnostics import described
from ..ranks.programs import reduction_numbers
from .memory import NAMES, buffer, readable, settle, settle_all, shares, writable

_OPS: Final = {
    TorchOp.SUM: ReduceOp.SUM,
    TorchOp.AVG: ReduceOp.MEAN,
    TorchOp.MIN: ReduceOp.MIN,
    TorchOp.MAX: ReduceOp.MAX,
    TorchOp.PRODUCT: ReduceOp.PRODUCT,
}

# Sums and products of truths, as torch's NCCL has them.
_OF_BOOLS: Final = {TorchOp.SUM: ReduceOp.MAX, TorchOp.PRODUCT: ReduceOp.MIN}

_LETTING_GO_S: Final = 1.0  # at most, for what takes microseconds


class Collectives:
    """The collectives of one rank of a group."""

    def __init__(self, communicator: Communicator, gloo: Any) -> None:
        """Reduce through ``communicator``; ``gloo``, a ``ProcessGroupGloo`` of the same ranks, is the inner engine."""
        self._ours = communicator
        self._gloo = gloo
        self._rank, self._size = communicator.rank, communicator.size

    # ---- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, kind: Any) -> None:
        op = self._op("all_reduce", kind, tensor)
        if op is None:
            options = c10d.AllreduceOptions()
            options.reduceOp = kind
            self._through_gloo(self._gloo.allreduce, tensor, options)
            return
        source = readable(tensor)
        place = buffer(source)
        self._ours.all_reduce(op, place, place)
        settle(tensor, source)

    def reduce(self, tensor: Any, kind: Any, root: int) -> None:
        self._reduce(self._op("reduce", kind, tensor, root), kind, tensor, tensor, root)

    def _reduce(self, op: ReduceOp | None, kind: Any, tensor: Any, result: Any, root: int) -> None:
        if op is None:
            options = c10d.ReduceOptions()
            options.reduceOp, options.rootRank = kind, root
            held = tensor.detach().clone()  # gloo writes on all ranks
            self._through_gloo(self._gloo.reduce, held, options)
            if root == self._rank:
                result.detach().copy_(held.reshape(result.shape))
            return
        source = readable(tensor)
        written = writable(result) if root == self._rank else None
        self._ours.reduce(op, buffer(source), None if written is None else buffer(written), root)
        if written is not None:
            settle(result, written)

    def reduce_scatter(self, output: Any, inputs: Sequence[Any], kind: Any) -> None:
        sizes = [x.numel() for x in inputs]
        fits = len(inputs) == self._size and sizes[self._rank] == output.numel() and _alike([output, *inputs])
        self._require(
            fits, "reduce_scatter", output, sizes, "one input for each rank; the own one as large as the output"
        )
        op = self._op("reduce_scatter", kind, output) if len(set(sizes)) == 1 else None
        if op is None:
            self._reduce_each(inputs, output, kind)
            return
        sources, written = [readable(x) for x in inputs], writable(output)
        self._ours.reduce_scatter(op, [buffer(x) for x in sources], buffer(written))
        settle(output, written)

    def reduce_scatter_single(self, output: Any, tensor: Any, kind: Any) -> None:
        fits = tensor.numel() == output.numel() * self._size and output.dtype == tensor.dtype
        self._require(fits, "reduce_scatter", output, [tensor.numel()], "an input n times as large as the output")
        op = self._op("reduce_scatter", kind, output)
        source = readable(tensor)
        if op is None:
            self._reduce_each(source.reshape(self._size, *output.shape), output, kind)
            return
        written = writable(output)
        self._ours.reduce_scatter(op, shares(source, self._size), buffer(written))
        settle(output, written)

    def _reduce_each(self, inputs: Any, output: Any, kind: Any) -> None:
        for root, tensor in enumerate(inputs):
            self._reduce(self._op("reduce", kind, tensor, root), kind, tensor, output, root)

    # ---- moves ----------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int) -> None:
        inner = self._is_inner("broadcast", tensor, root)
        held = readable(tensor)
        if inner:
            options = c10d.BroadcastOptions()
            options.rootRank = root
            _finish(self._gloo.broadcast, [_raw(held)], options)
        else:
            self._ours.broadcast(buffer(held), root)
        if root != self._rank:
            settle(tensor, held)

    def all_gather(self, results: Sequence[Any], tensor: Any) -> None:
        sizes = [x.numel() for x in results]
        fits = len(results) == self._size and sizes[self._rank] == tensor.numel() and _alike([tensor, *results])
        self._require(fits, "all_gather", tensor, sizes, "one output for each rank, as large as that rank's input")
        if len(set(sizes)) > 1:
            self._ours.agree(f"all_gather {_name(tensor)} of sizes {sizes}")  # every rank knows all sizes
            padded = tensor.new_zeros(max(sizes))
            padded[: tensor.numel()] = tensor.detach().reshape(-1)
            rows = padded.new_empty(self._size, max(sizes))
            self.all_gather_single(rows, padded)
            for result, row in zip(results, rows, strict=True):
                result.detach().copy_(row[: result.numel()].reshape(result.shape))
            return
        inner = self._is_inner("all_gather", tensor)
        source, written = readable(tensor), [writable(x) for x in results]
        if inner:
            _finish(self._gloo.allgather, [list(map(_raw, written))], [_raw(source)])
        else:
            self._ours.all_gather(buffer(source), [buffer(x) for x in written])
        settle_all(results, written)

    def all_gather_single(self, output: Any, tensor: Any) -> None:
        fits = output.numel() == tensor.numel() * self._size and output.dtype == tensor.dtype
        self._require(fits, "all_gather", tensor, [output.numel()], "an output n times as large as the input")
        inner = self._is_inner("all_gather", tensor)
        source, written = readable(tensor), writable(output)
        if inner:
            _finish(self._gloo._allgather_base, _raw(written), _raw(source))
        else:
            self._ours.all_gather(buffer(source), shares(written, self._size))
        settle(output, written)

    def gather(self, results: Sequence[Any], tensor: Any, root: int) -> None:
        self._require_rooted("gather", tensor, results, root)
        inner = self._is_inner("gather", tensor, root)
        source, written = readable(tensor), [writable(x) for x in results]
        if inner:
            options = c10d.GatherOptions()
            options.rootRank = root
            into = [list(map(_raw, written))] if root == self._rank else []
            _finish(self._gloo.gather, into, [_raw(source)], options)
        else:
            places = [buffer(x) for x in written] if root == self._rank else None
            self._ours.gather(buffer(source), places, root)
        settle_all(results, written)

    def scatter(self, output: Any, inputs: Sequence[Any], root: int) -> None:
        self._require_rooted("scatter", output, inputs, root)
        inner = self._is_inner("scatter", output, root)
        sources, written = [readable(x) for x in inputs], writable(output)
        if inner:
            options = c10d.ScatterOptions()
            options.rootRank = root
            of = [list(map(_raw, sources))] if root == self._rank else []
            _finish(self._gloo.scatter, [_raw(written)], of, options)
        else:
            places = [buffer(x) for x in sources] if root == self._rank else None
            self._ours.scatter(places, buffer(written), root)
        settle(output, written)

    def all_to_all(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        fits = len(outputs) == len(inputs) == self._size and _alike([*outputs, *inputs])
        any_of = (*inputs, *outputs, torch.empty(0))[0]
        self._require(fits, "all_to_all", any_of, [], "one input and one output for each rank")
        sizes, rooms = [x.numel() for x in inputs], [x.numel() for x in outputs]
        even = self._are_even(sizes, rooms, inputs[0])
        sources, written = [readable(x) for x in inputs], [writable(x) for x in outputs]
        if even and not self._is_inner("all_to_all", inputs[0]):
            self._ours.all_to_all([buffer(x) for x in sources], [buffer(x) for x in written])
        else:  # gloo knows no lists
            room = inputs[0].new_empty(sum(rooms))
            self._exchange(room, torch.cat([x.reshape(-1) for x in sources]), rooms, sizes)
            for result, part in zip(written, room.split(rooms), strict=True):
                result.detach().copy_(part.reshape(result.shape))
        settle_all(outputs, written)

    def all_to_all_single(self, output: Any, tensor: Any, rooms: Sequence[int], sizes: Sequence[int]) -> None:
        fits = self._are_splits(tensor, sizes) and self._are_splits(output, rooms) and output.dtype == tensor.dtype
        fits = fits and tensor.shape[1:].numel() == output.shape[1:].numel()
        remedy = "splits that add up to the first dimension, or none and one that the number of ranks divides"
        self._require(fits, "all_to_all", tensor, [*output.shape, *rooms, *sizes], remedy)
        rooms = list(rooms) or [output.shape[0] // self._size] * self._size
        sizes = list(sizes) or [tensor.shape[0] // self._size] * self._size
        even = self._are_even(sizes, rooms, tensor)
        source, written = readable(tensor), writable(output)
        if even and not self._is_inner("all_to_all", tensor):
            self._ours.all_to_all(shares(source, self._size), shares(written, self._size))
        else:
            self._exchange(written, source, rooms, sizes)
        settle(output, written)

    def _exchange(self, result: Any, source: Any, rooms: Sequence[int], sizes: Sequence[int]) -> None:
        width = source.shape[1:].numel() * source.element_size()
        splits = ([width * rows for rows in rooms], [width * rows for rows in sizes])
        _finish(self._gloo.alltoall_base, _raw(result), _raw(source), *splits)

    def _are_splits(self, tensor: Any, splits: Sequence[int]) -> bool:
        if not tensor.ndim or not splits:
            return bool(tensor.ndim) and int(tensor.shape[0]) % self._size == 0
        return len(splits) == self._size and sum(splits) == tensor.shape[0] and min(splits) >= 0

    def _are_even(self, sizes: Sequence[int], rooms: Sequence[int], tensor: Any) -> bool:
        """Return whether all ranks exchange shares of one size; a rank whose own are equal cannot know.

        Raises:
          MismatchError: what a rank sends is not what another expects; on all ranks.
        """
        self._ours.agree(f"all_to_all {_name(tensor)}")
        own = torch.tensor([*sizes, *rooms])
        table = own.new_empty(self._size, 2, self._size)
        self.all_gather_single(table, own)
        for src, dst in (table[:, 0] != table[:, 1].T).nonzero().tolist():
            problem = f"rank {src} sends rank {dst} another number of elements than that one expects."
            given = f"{table[src, 0, dst]} sent, {table[dst, 1, src]} expected"
            raise MismatchError(message(problem, given, "splits that fit together on all ranks"))
        return bool((table == table[0, 0, 0]).all())

    def barrier(self) -> None:
        self._ours.barrier()

    # ---- what all of them need ------------------------------------------------------------------------------------

    def _op(self, collective: str, kind: Any, tensor: Any, root: int | None = None) -> ReduceOp | None:
        """Return the op, or, once the ranks agreed that it is the inner engine's, ``None``.

        Raises:
          UnsupportedError: it is not defined for this dtype; on all ranks, or on none.
        """
        op, name = _OPS.get(kind.op), NAMES.get(tensor.dtype)
        if name == "bool":
            op = _OF_BOOLS.get(kind.op, op)
        wrong = None
        if op is not None and name is not None and tensor.layout is torch.strided:
            wrong = _UNDEFINED.get((op, name))
            if wrong is None and self._ours.plans(collective, op, name):
                return op
        self._agree(collective, kind.op.name.lower() if op is None else op.value, tensor, root)
        if wrong is not None:
            raise UnsupportedError(wrong)
        return None

    def _is_inner(self, collective: str, tensor: Any, root: int | None = None) -> bool:
        """Return whether a move is the inner engine's, once the ranks agreed on it."""
        name = NAMES.get(tensor.dtype)
        inner = not self._ours.plans(collective, None, name or "uint8")
        if inner or name is None:  # what moves as bytes has to be said
            self._agree(collective, None, tensor, root)
        return inner

    def _agree(self, collective: str, op: str | None, tensor: Any, root: int | None) -> None:
        self._ours.agree(described(collective, op, root, _name(tensor), tensor.shape))

    def _require_rooted(self, collective: str, tensor: Any, listed: Sequence[Any], root: int) -> None:
        expected = [tensor.numel()] * self._size if root == self._rank else []
        sizes = [x.numel() for x in listed]
        remedy = "on the root as many as there are ranks, each as large as the others' one; elsewhere none"
        self._require(sizes == expected and _alike([tensor, *listed]), collective, tensor, sizes, remedy)

    def _require(self, fits: bool, collective: str, tensor: Any, sizes: Sequence[int], remedy: str) -> None:
        """Raise on all ranks where one has tensors that cannot be.

        Raises:
          ArgumentError: all ranks have the same such tensors.
          MismatchError: they do not.
        """
        if fits:
            return
        call = described(collective, None, None, _name(tensor), tensor.shape)
        self._ours.agree(f"{call} with {list(sizes)}")
        problem = f"the tensors of this {collective} do not fit together."
        raise ArgumentError(message(problem, f"{call}; sizes {list(sizes)}; {self._size} ranks", remedy))

    @staticmethod
    def _through_gloo(function: Any, tensor: Any, options: Any) -> None:
        dense = tensor.layout is torch.strided
        held = readable(tensor) if dense else tensor
        given = held.detach()  # others may use the tensor itself
        _finish(function, [given], options)
        if dense:
            settle(tensor, held)
        else:  # what is written to a detached one becomes its own
            with torch.no_grad():
                tensor.copy_(given)


def _undefined() -> dict[tuple[ReduceOp, str], str]:
    """Return what cannot be reduced, with what to say."""
    found = {}
    for op in ReduceOp:
        for name in NAMES.values():
            try:
                reduction_numbers(op, name, 1)
            except UnsupportedError as error:
                found[op, name] = str(error)
    return found


_UNDEFINED: Final = _undefined()


def _name(tensor: Any) -> str:
    """Return a tensor's dtype in words, and how it lies in memory where that is not as usual: ranks agree on both."""
    name = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    return name if tensor.layout is torch.strided else f"{str(tensor.layout).removeprefix('torch.')}_{name}"


def _raw(tensor: Any) -> Any:
    """Return a plain tensor's memory as bytes: gloo knows few dtypes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _alike(tensors: Sequence[Any]) -> bool:
    return len({x.dtype for x in tensors}) == 1 and all(x.is_cpu for x in tensors)


def _finish(run: Callable[..., Any], *arguments: Any) -> None:
    """Run an op of gloo's until it has ended, and gloo has let go of its tensors.

    A thread of gloo's lets go of them some time after the end, and needs the interpreter for it. If that ended
    meanwhile, the process would be aborted (https://github.com/pytorch/pytorch/issues/190489).

    Raises:
      PeerLostError: a connection was closed.
      CollectiveTimeout: it took too long.
    """
    tensors = _tensors(arguments)
    before = _references(tensors)
    try:
        work = run(*arguments)
        try:
            work.wait()
        finally:
            del work  # it refers to them, too
    except RuntimeError as error:  # gloo's errors are all of one class
        text = str(error)
        if "Connection" in text or "pair closure" in text:
            raise PeerLostError(message("a rank is gone.", text, "look at what the other ranks say")) from error
        if "Timed out" in text:
            raise CollectiveTimeout(message("a rank did not come in time.", text, "look at the other ranks")) from error
        raise
    finally:
        deadline = time.monotonic() + _LETTING_GO_S
        while any(map(operator.gt, _references(tensors), before)) and time.monotonic() < deadline:
            time.sleep(0)  # gives the interpreter to that thread


def _tensors(given: Any) -> list[Any]:
    """Return the tensors in nested lists; not by optree, which knows no lists once the interpreter ends."""
    if isinstance(given, (list, tuple)):
        return [tensor for each in given for tensor in _tensors(each)]
    return [given] if isinstance(given, torch.Tensor) else []


def _references(tensors: Sequence[Any]) -> list[int]:
    """Return how often each tensor is referred to, from Python and from C++.

    In torch 2.13 C++ lets go of its own count first, then of Python's, for which it needs the interpreter; earlier
    (torch 2.8) it needs it for a tensor that only C++ holds any more.
    """
    return [sys.getrefcount(x) + x._use_count() for x in tensors]
