"""What all ranks check before a collective moves anything, so that all of them raise an error if one rank has to.

Input: the tensors of a call. Output: a ``MismatchError`` on all ranks if their calls differ, or an error about the
arguments. All methods that compare calls block until the other ranks have made theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

from torch.nn.parameter import is_lazy

from ..errors import ArgumentError, MismatchError, UnsupportedError
from ..frameworks.torch.arrays import is_in_mode, is_traced
from ..observe.diagnostics import call_text
from ..ranks.communicator import Communicator
from .memory import NAMES, are_apart, form_of, name_of, share_memory, traced_error, unsupported_form
from .op_queue import InMode

_COLLECTIVES: Final = {  # the public name of a collective, by that of a method
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), "all_reduce"),
    **dict.fromkeys(
        ("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"), "all_gather"
    ),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"), "reduce_scatter"),
    **dict.fromkeys(("alltoall", "alltoall_base"), "all_to_all"),
}


class CallChecks:
    """The checks of one rank's calls."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._rank, self._size = communicator, communicator.rank, communicator.size

    def agree(self, collective: str, op: str | None, tensor: Any, root: int | None) -> None:
        self._communicator.require_same(call_text(collective, op, root, name_of(tensor), tensor.shape))

    def agree_on_bytes(self, collective: str, tensor: Any, root: int | None = None) -> None:
        """Compare the ranks' dtypes if a tensor is moved as bytes; then the communicator does not compare them."""
        if tensor.dtype not in NAMES:
            self.agree(collective, None, tensor, root)

    def require(
        self, fits: bool, collective: str, tensors: Sequence[Any], what: str, sizes: Sequence[Any], remedy: str
    ) -> None:
        """Raise an error if the arguments of a collective do not fit (``fits`` is false).

        If the calls of the ranks differ, all ranks raise a ``MismatchError``. Otherwise this rank raises an
        ``ArgumentError``. The first of ``tensors`` is shown in the text of the call. ``what`` is a label of ``sizes``.
        """
        if fits:
            return
        call = call_text(collective, None, None, name_of(tensors[0]), tensors[0].shape)
        self._communicator.require_same(f"{call} with {list(sizes)}")
        if not alike(tensors):
            kinds = ", ".join(sorted({f"{name_of(x)} on {x.device}" for x in tensors}))
            problem = f"the tensors of this {collective} differ in dtype, or are not all on the CPU."
            raise ArgumentError.of(problem, kinds, "CPU tensors of one dtype")
        problem = f"the tensors of this {collective} do not match in number or size."
        raise ArgumentError.of(problem, f"{call}; {what} {list(sizes)}; {self._size} ranks", remedy)

    def require_rooted(self, collective: str, tensor: Any, listed: Sequence[Any], root: int) -> None:
        self.require_dense(collective, tensor, *listed, root=root)
        expected = [tensor.numel()] * self._size if root == self._rank else []
        sizes = [x.numel() for x in listed]
        remedy = "on the root a list of one tensor per rank, each as large as a rank's own tensor; on other ranks none"
        tensors, what = [tensor, *listed], "elements of the tensors in the list:"
        self.require(sizes == expected and alike(tensors), collective, tensors, what, sizes, remedy)

    def require_dense(self, collective: str, *tensors: Any, root: int | None = None) -> None:
        """Raise an error on all ranks if the memory of a tensor does not contain its values (see ``form_of``).

        Raises:
          UnsupportedError: all ranks have such a tensor, or all trace this call.
          MismatchError: only some ranks have one, or they make different calls.
          InMode: see there.
        """
        if is_in_mode():
            if is_traced():
                self.refuse_traced(collective)
            raise InMode
        odd = next(filter(form_of, tensors), None)
        if odd is not None:
            shape = () if odd.is_nested else odd.shape  # a nested tensor has none
            self._communicator.require_same(call_text(collective, None, root, name_of(odd), shape))
            raise unsupported_form(collective, odd)

    def agree_on_parts(self, method: str, parts: int) -> None:
        """Raise a ``MismatchError`` on all ranks if their tensors consist of different numbers of tensors."""
        if parts > 1:
            self._communicator.require_same(f"{_COLLECTIVES.get(method, method)} of {parts} parts of each tensor")

    def refuse_traced(self, collective: str) -> NoReturn:
        """Raise an error on all ranks: the trace would have no record of the call."""
        collective = _COLLECTIVES.get(collective, collective)
        self._communicator.require_same(f"traced {collective}")
        raise traced_error(collective)

    def refuse_class(self, method: str, tensor: Any) -> NoReturn:
        """Raise an error on all ranks: the class of a tensor does not pass ops on to tensors that have memory."""
        collective = _COLLECTIVES.get(method, method)
        name = f"{type(tensor).__name__}_{str(tensor.dtype).removeprefix('torch.')}"
        self._communicator.require_same(call_text(collective, dtype=name))
        problem = (
            f"{collective} needs tensors whose values are in their memory, or that pass the op on to such tensors."
        )
        remedy = "run the module once" if is_lazy(tensor) else "the tensors that it consists of, one by one"
        raise UnsupportedError.of(problem, f"a {type(tensor).__name__}", remedy)

    def are_apart(self, collective: str, results: Sequence[Any], sources: Sequence[Any] = ()) -> bool:
        """Return whether no result can overlap a source.

        Raises:
          ArgumentError: results share memory on all ranks.
          MismatchError: results share memory on some ranks only. All ranks raise it.
        """
        if are_apart([*results, *sources]):
            return True
        if share_memory(results):
            call = call_text(collective, None, None, name_of(results[0]), results[0].shape)
            self._communicator.require_same(f"{call} with results that share memory")
            problem = f"elements of the results of this {collective} share memory, so they would overwrite each other."
            remedy = "results that do not overlap; x.contiguous() for an expanded tensor x"
            raise ArgumentError.of(problem, f"{call}, number of results: {len(results)}", remedy)
        return False

    def require_expected(self, rows: Sequence[Sequence[int]], unit: str) -> None:
        """Raise a ``MismatchError`` if a rank sends more or less than the receiver expects.

        ``rows``: for each rank the bytes of a ``unit``, how many of them it sends to each rank, and how many it expects
        from each.
        """
        if len(widths := {row[0] for row in rows}) > 1:
            problem = f"the {unit} of this all_to_all have different sizes on different ranks."
            given = f"{unit} of {' and '.join(map(str, sorted(widths)))} bytes"
            raise MismatchError.of(problem, given, "tensors that differ only in their first dimension")
        for src, (_, *sent) in enumerate(rows):
            for dst, (_, *received) in enumerate(rows):
                if sent[dst] != (expected := received[self._size + src]):
                    source_rank, target_rank = (self._communicator.global_ranks[rank] for rank in (src, dst))
                    problem = f"rank {source_rank} sends rank {target_rank} another number of {unit} than it expects."
                    given = f"{sent[dst]} sent, {expected} expected"
                    raise MismatchError.of(problem, given, f"the same number of {unit} on both ranks")

    def without_repeats(self, collective: str, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors without repetitions. All ranks must repeat tensors at the same places of the list."""
        first: dict[int, int] = {}
        order = [first.setdefault(id(x), k) for k, x in enumerate(tensors)]
        if len(first) < len(order):
            self._communicator.require_same(f"{collective} of tensors {order}, with results that share memory")
        return [tensors[k] for k in first.values()]

    def refuse_lists(self, name: str, counts: list[int]) -> NoReturn:
        self._communicator.require_same(f"{name} of lists of {counts}")
        problem = f"a list of tensors of this {name} is empty."
        if 0 not in counts:
            problem = f"{name} takes one tensor per rank unless it is coalesced, and then lists of the same length."
        raise ArgumentError.of(problem, f"lengths of the lists: {counts}", "a call for each tensor")


def alike(tensors: Sequence[Any]) -> bool:
    """Return whether all tensors are on the CPU and have the same dtype."""
    return len({x.dtype for x in tensors}) == 1 and all(x.is_cpu for x in tensors)
