"""``InnerGloo``: collectives that the communicator does not have.

Input: tensors. Output: the results in these tensors, or an error that all ranks raise. Bitwise reductions, and
all-to-alls of padded parts, consist of calls of the communicator. Others run in gloo, as part of such a call.
"""

from __future__ import annotations

import logging
import operator
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import ReduceOp as TorchOp

from _crossreduce_torch import say

from ..observe.diagnostics import call_text
from ..ranks.communicator import Communicator
from ..ranks.transports.gloo import GlooCollective
from .memory import NAMES, copy_back, equal_parts, form_of, memory, raw, readable, tensors_in

_GLOO_WAITS_S: Final = 10.0  # gloo's timeout is this much longer than the group's, since gloo's errors name no rank
BITWISE: Final = {TorchOp.BAND: "bitwise_and", TorchOp.BOR: "bitwise_or", TorchOp.BXOR: "bitwise_xor"}
_GATHERED_NBYTES: Final = (
    1 << 14
)  # a bitwise reduction of so many bytes gathers the tensors of all ranks on each of them
_RELEASE_S: Final = 1.0  # the longest wait for gloo to release tensors, which takes microseconds


class InnerGloo:
    """Runs collectives in gloo for one rank of a group."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def _run_in_gloo(self, text: str, start: Callable[..., Any], *arguments: Any) -> None:
        """Run an op of gloo until all ranks have completed it, and gloo has released its tensors.

        A thread of gloo releases the tensors some time after completion, and needs the interpreter for it. If the
        interpreter ends before, the process aborts (https://github.com/pytorch/pytorch/issues/190489).

        ``text`` describes the call. All ranks raise the same error, even if only one of them fails.
        """
        tensors, running = tensors_in(arguments), GlooCollective()
        counts = _references(tensors)
        try:
            self._communicator.delegate(text, lambda: running.begin(start(*arguments)))
        finally:
            running.release()
            deadline = time.monotonic() + _RELEASE_S
            while any(map(operator.gt, _references(tensors), counts)) and time.monotonic() < deadline:
                time.sleep(0)  # lets gloo's thread use the interpreter

    def run_lists(self, method: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Run ``method`` of gloo, ``function``, with several tensors per rank. The last argument is the options."""
        *lists, given = arguments
        say(logging.INFO, f"gloo runs {method} of several tensors per rank")
        names = [name for name in ("reduceOp", "rootRank", "rootTensor") if hasattr(given, name)]
        options = self._options(type(given), **{name: getattr(given, name) for name in names})
        self._run_in_gloo(f"{method} of {len(lists[-1])} tensors per rank", function, *lists, options)

    def _reduce_in_gloo(self, collective: str, root: int | None, function: Any, tensor: Any, options: Any) -> None:
        """Replace a sparse tensor by its reduction, which ``function`` of gloo executes."""
        detached = tensor.detach()  # _run_in_gloo counts references, and other code may refer to the tensor itself
        op = options.reduceOp.op.name.lower()
        text = call_text(collective, op, root, name_of(tensor), tensor.shape)
        self._run_in_gloo(text, function, [detached], options)
        with torch.no_grad():  # gloo replaces the memory of a sparse tensor, and the detached one does not share it
            tensor.copy_(detached)

    def _reduce_bits(self, tensor: Any, op: Any) -> None:
        """Replace a tensor by its bitwise reduction on all ranks. A large one is reduced in parts, one on each rank."""
        combine = getattr(torch, BITWISE[op])
        plain = readable(tensor)
        line, ranks = raw(plain), self._communicator.size
        parts = 1 if line.nbytes <= _GATHERED_NBYTES else ranks
        size = line.nbytes if parts == 1 else -(-line.nbytes // (8 * parts)) * 8
        rows = line.new_zeros(ranks, size)
        if parts == 1:
            self._communicator.all_gather(memory(line), equal_parts(rows, ranks))
        else:
            sent = line.new_zeros(parts, size)
            sent.view(-1)[: line.numel()] = line
            self._communicator.all_to_all(equal_parts(sent, parts), equal_parts(rows, parts))
        words = rows.view(torch.int64) if size and size % 8 == 0 else rows  # ``line`` may begin at any byte
        for word in words[1:]:
            combine(words[0], word, out=words[0])
        if parts > 1:
            self._communicator.all_gather(memory(rows[0]), equal_parts(sent, ranks))
            rows = sent.view(1, -1)
        line.copy_(rows[0][: line.numel()])
        copy_back(tensor, plain)

    def _exchange_padded(
        self, result: Any, source: Any, received: Sequence[int], sent: Sequence[int], most: int
    ) -> None:
        """Execute an all-to-all of unequal numbers of bytes, ``most`` at most, in parts of this size."""
        ranks = self._communicator.size
        padded = torch.empty(2, ranks, most, dtype=torch.uint8, device="cpu")
        for room, part in zip(padded[0], source.split(sent), strict=True):
            room[: part.numel()] = part
        self._communicator.all_to_all(*(equal_parts(each, ranks) for each in padded))
        for room, part in zip(padded[1], result.split(received), strict=True):
            part.copy_(room[: part.numel()])

    def _options(self, kind: Any, **fields: Any) -> Any:
        """Return options of gloo of the class ``kind``, with a timeout and these fields."""
        options = kind()
        options.timeout = timedelta(seconds=self._communicator.timeout_s + _GLOO_WAITS_S)
        for name, value in fields.items():
            setattr(options, name, value)
        return options


def name_of(tensor: Any) -> str:
    """Return a tensor's dtype, and its form if it has one (see ``form_of``), as text. Ranks must agree on both."""
    name, form = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch."), form_of(tensor)
    if form == "sparse_coo" and tensor.dense_dim():  # gloo crashes if ranks differ in this
        form = f"{form}_{tensor.sparse_dim()}"
    return f"{form.replace(' ', '_')}_{name}" if form else name


def _references(tensors: Sequence[Any]) -> list[int]:
    """Return the number of references to each tensor, from Python and from C++.

    In torch 2.13, C++ code releases its own reference first, and then that of Python, for which it needs the
    interpreter. Earlier versions (torch 2.8) need the interpreter to release a tensor that only C++ code references.
    """
    return [sys.getrefcount(x) + x._use_count() for x in tensors]
