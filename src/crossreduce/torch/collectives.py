"""The collectives on CPU tensors, which a group's queue runs.

Input: tensors, as ``torch.distributed`` passes them. Output: calls of a ``Communicator``, messages for all-to-alls of
parts of very different sizes, or calls of gloo for sums of sparse tensors. Tensors that are not contiguous are copied.
Tensors whose dtypes cannot be reduced are moved as bytes. All functions block.

An input that overlaps a result is copied first, except in calls in place. In these, the input (or its part for this
rank) has the same memory as the result (or its part from this rank). All-to-alls copy every overlapping input, since
other ranks may read inputs while this rank writes its results. If results share memory, all ranks raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp as TorchOp

from ..engines.host import array_memory
from ..errors import MismatchError, UnsupportedError
from ..observe.diagnostics import op_text
from ..ops import COMPLEX, FLOATS, AnyOp, BitwiseOp, ReduceOp
from ..ranks.communicator import Communicator
from ..ranks.intra_host.instructions import reduction_numbers
from ..ranks.messages import Messages
from ..ranks.prepared import call_name, new_calls, prepare
from .call_checks import alike
from .inner_gloo import InnerGloo
from .memory import (
    NAMES,
    copy_back,
    copy_back_all,
    copy_overlapping,
    equal_parts,
    is_plain,
    memory,
    movable,
    name_of,
    readable,
    tensors_in,
    writable,
)
from .options import OPS

# The ops that give the same sums and products of bools as torch with NCCL.
_OF_BOOLS: Final = {TorchOp.SUM: ReduceOp.MAX, TorchOp.PRODUCT: ReduceOp.MIN}

_STRIDED: Final = torch.strided

# The dtypes of which gloo sums sparse tensors.
_SUMMED_IN_GLOO: Final = {
    getattr(torch, name) for name in ("bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
}

array_memory("torch")  # called for its effect: the compiled code of prepared calls can then read tensors


class Collectives(InnerGloo):
    """The collectives of one rank of a group."""

    def __init__(
        self, communicator: Communicator, store: Any, exact: bool = False, messages: Messages | None = None
    ) -> None:
        """Use ``communicator``; see ``InnerGloo``. ``exact``: whether sums of floats are exact; see ``Options``."""
        super().__init__(communicator, store, messages)
        self.calls = self._calls = new_calls(communicator)
        self._exact = exact
        self._all_reduce = call_name("all_reduce", exact)
        self._reduce_scatter = call_name("reduce_scatter", exact)

    # ---- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, kind: Any) -> None:
        prepared_op = OPS.get(kind.op)
        name = self._all_reduce
        if prepared_op and self._calls.run(self._communicator, name, prepared_op, 0, tensor, tensor) is tensor:
            return
        self._checks.require_dense("all_reduce", *([] if tensor.layout is torch.sparse_coo else [tensor]))
        plain = tensor.layout is _STRIDED and is_plain(tensor)
        if not plain:
            self._checks.are_apart("all_reduce", [tensor])
        op = self._op("all_reduce", kind, tensor)
        if op is None:
            options = self._options(c10d.AllreduceOptions, reduceOp=kind)
            self._reduce_in_gloo("all_reduce", None, "allreduce", tensor, options)
            return
        source = tensor if plain else readable(tensor)
        array = memory(source)
        self._communicator.all_reduce(op, array, array, self._exact)
        if not plain:
            copy_back(tensor, source)
        else:
            prepare(self._calls, self._communicator, "all_reduce", op, None, tensor, array, tensor, self._exact)

    def reduce(self, tensor: Any, kind: Any, root: int, result: Any = None) -> None:
        """Write the reduction of all ranks' ``tensor`` to the root's ``result``, which is by default ``tensor``."""
        result = tensor if result is None else result
        self._checks.require_dense("reduce", tensor, root=root)
        if root == self._rank:
            self._checks.are_apart("reduce", [result])
        op = self._op("reduce", kind, tensor, root)
        if op is None:
            copied = tensor.detach().clone()  # gloo also writes into the tensors of ranks that are not the root
            options = self._options(c10d.ReduceOptions, reduceOp=kind, rootRank=root)
            self._reduce_in_gloo("reduce", root, "reduce", copied, options)
            if root == self._rank:
                result.detach().copy_(copied.reshape(result.shape))
            return
        source = readable(tensor)
        written = writable(result) if root == self._rank else None
        room = None if written is None else memory(written)
        self._communicator.reduce(op, memory(source), room, root, self._exact)
        if written is not None:
            copy_back(result, written)

    def reduce_scatter(self, output: Any, inputs: Sequence[Any], kind: Any) -> None:
        self._checks.require_dense("reduce_scatter", output, *inputs)
        sizes = [x.numel() for x in inputs]
        tensors = [output, *inputs]
        fits = len(inputs) == self._size and sizes[self._rank] == output.numel() and alike(tensors)
        remedy = "one input per rank; this rank's as large as the output"
        self._checks.require(fits, "reduce_scatter", tensors, "elements of the inputs:", sizes, remedy)
        apart = self._checks.are_apart("reduce_scatter", [output], inputs)
        op = self._op("reduce_scatter", kind, output) if len(set(sizes)) == 1 else None
        if op is None:
            self._reduce_each(inputs, output, kind)
            return
        sources, written = [readable(x) for x in inputs], writable(output)
        if not apart:
            sources = copy_overlapping(sources, [written], {self._rank: written.data_ptr()})
        self._communicator.reduce_scatter(op, [memory(x) for x in sources], memory(written), self._exact)
        copy_back(output, written)

    def reduce_scatter_single(self, output: Any, tensor: Any, kind: Any) -> None:
        prepared_op = OPS.get(kind.op)
        name = self._reduce_scatter
        if prepared_op and self._calls.run(self._communicator, name, prepared_op, 0, tensor, output) is output:
            return
        self._checks.require_dense("reduce_scatter", output, tensor)
        fits = tensor.numel() == output.numel() * self._size and output.dtype == tensor.dtype and tensor.is_cpu
        remedy = "an input as large as the outputs of all ranks together"
        self._checks.require(
            fits, "reduce_scatter", [output, tensor], "elements of the input:", [tensor.numel()], remedy
        )
        apart = self._checks.are_apart("reduce_scatter", [output], [tensor])
        op = self._op("reduce_scatter", kind, output)
        source = readable(tensor)
        if op is None:
            self._reduce_each(source.reshape(self._size, *output.shape), output, kind)
            return
        written = writable(output)
        if not apart:  # the output may be this rank's part of the input
            (source,) = copy_overlapping([source], [written], {0: written.data_ptr() - self._rank * written.nbytes})
        array = memory(written)
        self._communicator.reduce_scatter(op, equal_parts(source, self._size), array, self._exact)
        copy_back(output, written)
        if source is tensor and written is output:
            prepare(self._calls, self._communicator, "reduce_scatter", op, None, tensor, array, output, self._exact)

    def _reduce_each(self, inputs: Any, output: Any, kind: Any) -> None:
        """Execute a reduce-scatter as one reduction to each rank."""
        result = torch.empty(output.shape, dtype=output.dtype, device="cpu")  # later inputs may overlap the output
        for root, tensor in enumerate(inputs):
            self.reduce(tensor, kind, root, result)
        output.detach().copy_(result)

    # ---- moves ----------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int) -> None:
        if self._calls.run(self._communicator, "broadcast", None, root, tensor, tensor) is tensor:
            return
        self._checks.require_dense("broadcast", tensor, root=root)
        self._checks.are_apart("broadcast", [tensor])  # also on the root, so that all ranks raise the same error
        self._checks.agree_on_bytes("broadcast", tensor, root)
        plain = readable(tensor)
        array = memory(plain)
        self._communicator.broadcast(array, root)
        if plain is tensor and tensor.dtype in NAMES:
            prepare(self._calls, self._communicator, "broadcast", None, root, tensor, array, tensor)
        if root != self._rank:
            copy_back(tensor, plain)

    def all_gather(self, results: Sequence[Any], tensor: Any) -> None:
        self._checks.require_dense("all_gather", tensor, *results)
        sizes = [x.numel() for x in results]
        tensors = [tensor, *results]
        fits = len(results) == self._size and sizes[self._rank] == tensor.numel() and alike(tensors)
        remedy = "one output per rank, as large as that rank's input"
        self._checks.require(fits, "all_gather", tensors, "elements of the outputs:", sizes, remedy)
        apart = self._checks.are_apart("all_gather", results, [tensor])
        if len(set(sizes)) > 1:
            # Shorter inputs are padded. Each rank's list of results shows the sizes of all inputs.
            self._communicator.require_same(f"all_gather {name_of(tensor)} of sizes {sizes}")
            moved = movable(tensor.detach())
            padded = moved.new_zeros(max(sizes))
            padded[: moved.numel()] = moved.reshape(-1)
            rows = padded.new_empty(self._size, max(sizes))
            self.all_gather_single(rows, padded)
            for result, row in zip(results, rows, strict=True):
                movable(result.detach()).copy_(row[: result.numel()].reshape(result.shape))
            return
        self._checks.agree_on_bytes("all_gather", tensor)
        source, written = readable(tensor), [writable(x) for x in results]
        if not apart:
            (source,) = copy_overlapping([source], written, {0: written[self._rank].data_ptr()})
        self._communicator.all_gather(memory(source), [memory(x) for x in written])
        copy_back_all(results, written)

    def all_gather_single(self, output: Any, tensor: Any) -> None:
        if self._calls.run(self._communicator, "all_gather", None, 0, tensor, output) is output:
            return
        self._checks.require_dense("all_gather", tensor, output)
        fits = output.numel() == tensor.numel() * self._size and output.dtype == tensor.dtype and output.is_cpu
        remedy = "an output as large as the inputs of all ranks together"
        self._checks.require(fits, "all_gather", [tensor, output], "elements of the output:", [output.numel()], remedy)
        apart = self._checks.are_apart("all_gather", [output], [tensor])
        self._checks.agree_on_bytes("all_gather", tensor)
        source, written = readable(tensor), writable(output)
        if not apart:  # the input may be this rank's part of the output
            (source,) = copy_overlapping([source], [written], {0: written.data_ptr() + self._rank * source.nbytes})
        array = memory(source)
        self._communicator.all_gather(array, equal_parts(written, self._size))
        if source is tensor and written is output and tensor.dtype in NAMES:
            prepare(self._calls, self._communicator, "all_gather", None, None, tensor, array, output)
        copy_back(output, written)

    def gather(self, results: Sequence[Any], tensor: Any, root: int) -> None:
        self._checks.require_rooted("gather", tensor, results, root)
        apart = self._checks.are_apart("gather", results, [tensor])
        self._checks.agree_on_bytes("gather", tensor, root)
        source, written = readable(tensor), [writable(x) for x in results]
        if not apart and root == self._rank:
            (source,) = copy_overlapping([source], written, {0: written[root].data_ptr()})
        places = [memory(x) for x in written] if root == self._rank else None
        self._communicator.gather(memory(source), places, root)
        copy_back_all(results, written)

    def scatter(self, output: Any, inputs: Sequence[Any], root: int) -> None:
        self._checks.require_rooted("scatter", output, inputs, root)
        apart = self._checks.are_apart("scatter", [output], inputs)
        self._checks.agree_on_bytes("scatter", output, root)
        sources, written = [readable(x) for x in inputs], writable(output)
        if not apart:
            sources = copy_overlapping(sources, [written], {root: written.data_ptr()})
        places = [memory(x) for x in sources] if root == self._rank else None
        self._communicator.scatter(places, memory(written), root)
        copy_back(output, written)

    def all_to_all(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._checks.require_dense("all_to_all", *inputs, *outputs)
        tensors = [*inputs, *outputs] or [torch.empty(0, device="cpu")]
        counts = [len(inputs), len(outputs)]
        fits = len(outputs) == len(inputs) == self._size and alike(tensors)
        remedy = "one input and one output per rank"
        self._checks.require(fits, "all_to_all", tensors, "numbers of inputs and outputs:", counts, remedy)
        apart = self._checks.are_apart("all_to_all", outputs, inputs)
        sent, received = [x.numel() for x in inputs], [x.numel() for x in outputs]
        sources, written = [readable(x) for x in inputs], [writable(x) for x in outputs]
        if not apart:
            sources = copy_overlapping(sources, written)
        if len({*sent, *received}) > 1 or not self._exchange_equal(sources, written, inputs[0]):
            joined = torch.cat([movable(x.detach()).reshape(-1) for x in sources])
            room = joined.new_empty(sum(received))
            self._exchange_unequal(room, joined, received, sent, inputs[0], "elements")
            for result, part in zip(written, room.split(received), strict=True):
                movable(result.detach()).copy_(part.reshape(result.shape))
        copy_back_all(outputs, written)

    def all_to_all_single(
        self, output: Any, tensor: Any, received: Sequence[int], sent: Sequence[int], differs: Any = None
    ) -> None:
        """``received`` and ``sent``: the numbers of rows from and to each rank. If empty, all are equal.

        ``differs``: the error of this call if it has already been tried with equal parts.
        """
        self._checks.require_dense("all_to_all", tensor, output)
        fits = self._are_splits(tensor, sent) and self._are_splits(output, received) and output.dtype == tensor.dtype
        fits = fits and tensor.shape[1:].numel() == output.shape[1:].numel() and output.is_cpu
        remedy = "splits that add up to the first dimension, or none if the number of ranks divides it; equal rows"
        splits = [list(output.shape), list(received), list(sent)]
        what = "the output's shape, the output's splits and the input's splits:"
        self._checks.require(fits, "all_to_all", [tensor, output], what, splits, remedy)
        apart = self._checks.are_apart("all_to_all", [output], [tensor])
        received = list(received) or [output.shape[0] // self._size] * self._size
        sent = list(sent) or [tensor.shape[0] // self._size] * self._size
        source, written = readable(tensor), writable(output)
        if not apart:
            (source,) = copy_overlapping([source], [written])
        if len({*sent, *received}) > 1 or not self._exchange_equal([source], [written], tensor, differs):
            self._exchange_unequal(written, source, received, sent, tensor, "rows")
        copy_back(output, written)

    def _exchange_equal(self, sources: Sequence[Any], written: Sequence[Any], tensor: Any, differs: Any = None) -> bool:
        """Execute an all-to-all if all parts of all ranks have the same size, and return whether that is so.

        A rank with equal parts assumes that the others have them, too. If not, all ranks notice that the calls differ.
        ``sources``, ``written``: the parts, or one tensor that consists of them. ``tensor``: its dtype is that of all.
        ``differs``: the error of this call if it has already been tried.
        """
        x, out = sources[0], written[0]
        single = len(sources) == 1
        try:
            if differs is not None:
                raise differs
            if single and self._calls.run(self._communicator, "all_to_all", None, 0, x, out) is out:
                return True
            self._checks.agree_on_bytes("all_to_all", tensor)
            both = sources, written
            if self._messages is not None and self._messages.carry_parts(x.nbytes // (self._size if single else 1)):
                self._exchange_equal_parts(tensor, *both)
                return True
            parts, room = (equal_parts(x[0], self._size) if single else list(map(memory, x)) for x in both)
            self._communicator.all_to_all(parts, room)
        except MismatchError as error:
            self._require_parts(error, tensor)
            return False
        if single and tensor.dtype in NAMES:
            prepare(self._calls, self._communicator, "all_to_all", None, None, x, parts[0], out)
        return True

    def _are_splits(self, tensor: Any, splits: Sequence[int]) -> bool:
        if not tensor.ndim or not splits:
            return bool(tensor.ndim) and int(tensor.shape[0]) % self._size == 0
        return len(splits) == self._size and sum(splits) == tensor.shape[0] and min(splits) >= 0

    # ---- helpers --------------------------------------------------------------------------------------------------

    def run_one(self, method: Callable[..., None], options: Sequence[Any], *lists: Sequence[Any]) -> None:
        """Call a method of this class with the only element of each of ``lists``, and ``options``.

        Raises:
          ArgumentError: the length of a list is not 1. All ranks raise it, as gloo would reduce a list to one tensor.
        """
        elements: list[Any] = []
        for each in lists:
            if len(each) != 1:
                self._checks.refuse_lists(method.__name__, list(map(len, lists)))
            elements += each
        method(*elements, *options)

    def run_each(self, method: Callable[..., None], options: Sequence[Any], results: Any, *sources: Any) -> None:
        """Call a method of this class for each element of ``results``: the tensor or tensors that the call writes.

        ``sources``: lists with the tensors that each call reads. If there are none, calls read the tensors they write.
        """
        counts = [len(results), *map(len, sources)]
        if min(counts) < 2 and len(set(counts)) == 1:
            self.run_one(method, options, results, *sources)
            return
        if len(set(counts)) > 1:
            self._checks.refuse_lists(method.__name__, counts)
        self._communicator.require_same(f"coalesced {method.__name__} of {len(results)} tensors")
        if not sources:
            results = self._checks.without_repeats(method.__name__, results)
        written, read = tensors_in(results), tensors_in(sources)
        if not self._checks.are_apart(
            method.__name__, written, read
        ):  # no call may overwrite tensors that a later call reads
            copies = iter(copy_overlapping(read, written))
            sources = tuple([_take_like(x, copies) for x in each] for each in sources)
        for tensors in zip(results, *sources, strict=True):
            method(*tensors, *options)

    def _op(self, collective: str, kind: Any, tensor: Any, root: int | None = None) -> AnyOp | None:
        """Return the op for the communicator, or ``None`` if all ranks agree that gloo runs it.

        If the op is not defined for this dtype, or cannot be exact, all ranks raise an ``UnsupportedError``.
        """
        op, name = OPS.get(kind.op), NAMES.get(tensor.dtype)
        if name == "bool":
            op = _OF_BOOLS.get(kind.op, op)
        strided = tensor.layout is _STRIDED
        if op is not None and name is not None and strided:
            with suppress(UnsupportedError):
                reduction_numbers(op, name, self._size, self._exact)
                return op
        is_float = tensor.is_floating_point() or tensor.is_complex()
        exact = self._exact and is_float
        op_name = kind.op.name.lower() if op is None else op_text(op, exact)
        self._checks.agree(collective, op_name, tensor, root)
        if isinstance(op, ReduceOp) and name is not None and strided:
            reduction_numbers(op, name, self._size, self._exact)  # raises an error if the op is not defined
        if exact:
            problem = f"only dense tensors of {', '.join(sorted(FLOATS | COMPLEX))} can be summed exactly."
            raise UnsupportedError.of(problem, f"{collective} of {name_of(tensor)}", "a group without exact=True")
        if kind.op == TorchOp.SUM and tensor.dtype in _SUMMED_IN_GLOO and not strided:
            return None
        problem = f"tensors of {name_of(tensor)} cannot be reduced by {op_name}."
        if isinstance(op, BitwiseOp) and is_float:
            remedy = "cast to an integer, or use MIN, MAX or SUM"
        elif not strided:
            remedy = "tensor.to_dense(), or the SUM, for which torch lacks some dtypes such as float16"
        elif name is None:
            remedy = f"cast to one of {', '.join(sorted(set(NAMES.values())))}"
        else:
            remedy = "SUM, AVG, MIN, MAX or PRODUCT of the tensor, scaled before if need be"
        raise UnsupportedError.of(problem, f"{collective} of {name_of(tensor)}, op {op_name}", remedy)


def _take_like(given: Any, tensors: Iterator[Any]) -> Any:
    """Return the next of ``tensors``, or a list of the next ones if ``given`` is a list."""
    return [next(tensors) for _ in given] if isinstance(given, (list, tuple)) else next(tensors)
