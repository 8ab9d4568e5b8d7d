"""``InnerGloo``: collectives that the communicator does not have.

Input: tensors. Output: the results in these tensors, or an error that all ranks raise. Bitwise reductions, and
all-to-alls of padded parts, consist of calls of the communicator. Very unequal parts are messages. Sums of sparse
tensors run in gloo, whose group is made for the first of them. Messages and gloo's calls are part of a call of the
communicator.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import ReduceOp as TorchOp

from _crossreduce_torch import say

from ..observe.diagnostics import call_text
from ..ranks.array_views import ArrayView
from ..ranks.communicator import Communicator
from ..ranks.connections.rendezvous import interfaces
from ..ranks.messages import Messages, PartExchange
from ..ranks.transports.gloo import GlooCollective, abort, process_group
from .memory import NAMES, copy_back, equal_parts, form_of, memory, raw, readable, tensors_in
from .rendezvous import CancellableStore

_GLOO_WAITS_S: Final = 10.0  # gloo's timeout is this much longer than the group's, since gloo's errors name no rank
BITWISE: Final = {TorchOp.BAND: "bitwise_and", TorchOp.BOR: "bitwise_or", TorchOp.BXOR: "bitwise_xor"}
_GATHERED_NBYTES: Final = 1 << 14  # up to here, a bitwise reduction gathers the tensors of all ranks on each of them
_STEP_NBYTES: Final = 256  # the sizes of padded parts are multiples of it
_RELEASE_S: Final = 1.0  # the longest wait for gloo to release tensors, which takes microseconds


class InnerGloo:
    """Runs these collectives for one rank of a group."""

    def __init__(self, communicator: Communicator, store: Any, messages: Messages | None) -> None:
        """``store``: where gloo's ranks meet; the group keeps it. ``messages``: of the group, if it has any."""
        self._communicator, self._store, self._messages = communicator, store, messages
        self._gloo: Any = None

    def _run_in_gloo(self, text: str, method: str, *arguments: Any) -> None:
        """Run an op of gloo until all ranks have completed it, and gloo has released its tensors.

        A thread of gloo releases the tensors some time after completion, and needs the interpreter for it. If the
        interpreter ends before, the process aborts (https://github.com/pytorch/pytorch/issues/190489).

        ``text`` describes the call. All ranks raise the same error, even if only one of them fails.
        """
        if self._gloo is None:
            self._gloo = self._made(text)
        tensors, running = tensors_in(arguments), GlooCollective()
        counts, start = _references(tensors), getattr(self._gloo, method)
        try:
            self._communicator.delegate(text, lambda: running.begin(start(*arguments)))
        except BaseException:
            if self._communicator.failure is not None:
                abort(self._gloo)  # it must not write into the caller's memory any more
            raise
        finally:
            running.release()
            deadline = time.monotonic() + _RELEASE_S
            while any(map(operator.gt, _references(tensors), counts)) and time.monotonic() < deadline:
                time.sleep(0)  # lets gloo's thread use the interpreter

    def _made(self, text: str) -> Any:
        """Return gloo's process group, which all ranks make together, as part of a call that ``text`` describes."""
        communicator, cancelled = self._communicator, threading.Event()
        store = CancellableStore(torch.distributed.PrefixStore("gloo/", self._store), cancelled)
        timeout, is_one_host = timedelta(seconds=communicator.timeout_s + _GLOO_WAITS_S), len(communicator.hosts) == 1

        def make() -> Any:
            return process_group(
                store, communicator.rank, communicator.size, timeout, interfaces(), is_one_host=is_one_host
            )

        making = _Making(make)
        try:
            communicator.delegate(text, making.begin)
        finally:
            cancelled.set()
        self._kept = store, making  # gloo does not reference a store that is written in Python
        return making.made

    def run_lists(self, method: str, arguments: Sequence[Any]) -> None:
        """Run ``method`` of gloo with several tensors per rank. The last argument is the options."""
        *lists, given = arguments
        say(logging.INFO, f"gloo runs {method} of several tensors per rank")
        names = [name for name in ("reduceOp", "rootRank", "rootTensor") if hasattr(given, name)]
        options = self._options(type(given), **{name: getattr(given, name) for name in names})
        self._run_in_gloo(f"{method} of {len(lists[-1])} tensors per rank", method, *lists, options)

    def _reduce_in_gloo(self, collective: str, root: int | None, method: str, tensor: Any, options: Any) -> None:
        """Replace a sparse tensor by its reduction, which ``method`` of gloo executes."""
        detached = tensor.detach()  # _run_in_gloo counts references, and other code may refer to the tensor itself
        op = options.reduceOp.op.name.lower()
        text = call_text(collective, op, root, name_of(tensor), tensor.shape)
        self._run_in_gloo(text, method, [detached], options)
        with torch.no_grad():  # gloo replaces the memory of a sparse tensor, and the detached one does not share it
            tensor.copy_(detached)

    def _reduce_bits(self, collective: str, tensor: Any, op: Any, root: int | None) -> None:
        """Replace a tensor by its bitwise reduction on all ranks. A large one is reduced in parts, one on each rank.

        ``collective``, ``root``: of the call, which the ranks compare.
        """
        text = call_text(collective, op.name.lower(), root, name_of(tensor), tensor.shape)
        combine = getattr(torch, BITWISE[op])
        plain = readable(tensor)
        line, ranks = raw(plain), self._communicator.size
        parts = 1 if line.nbytes <= _GATHERED_NBYTES else ranks
        size = line.nbytes if parts == 1 else -(-line.nbytes // (8 * parts)) * 8
        rows = line.new_zeros(ranks, size)
        if parts == 1:
            self._communicator.all_gather(memory(line), equal_parts(rows, ranks), text)
        else:
            self._communicator.require_same(text)
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
        step = max(_STEP_NBYTES, (1 << most.bit_length()) // 8)  # few sizes, since each of them is compiled once
        most = -(-most // step) * step
        padded = torch.empty(2, ranks, most, dtype=torch.uint8, device="cpu")
        for room, part in zip(padded[0], source.split(sent), strict=True):
            room[: part.numel()] = part
        self._communicator.all_to_all(*(equal_parts(each, ranks) for each in padded))
        for room, part in zip(padded[1], result.split(received), strict=True):
            part.copy_(room[: part.numel()])

    def _exchange_parts(
        self, text: str, result: Any, source: Any, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Execute an all-to-all of unequal numbers of bytes, as messages of every two ranks."""
        assert self._messages is not None
        rank = self._communicator.rank
        sources, results = source.split(sent), result.split(received)
        results[rank].copy_(sources[rank])
        views = (
            [ArrayView(x.data_ptr(), x.numel(), "uint8", (x.numel(),)) for x in parts] for parts in (sources, results)
        )
        running = PartExchange(self._messages, (source, result), *views)
        try:
            self._communicator.delegate(text, lambda: running.begin(rank))
        finally:
            running.end()

    def _options(self, kind: Any, **fields: Any) -> Any:
        """Return options of gloo of the class ``kind``, with a timeout and these fields."""
        options = kind()
        options.timeout = timedelta(seconds=self._communicator.timeout_s + _GLOO_WAITS_S)
        for name, value in fields.items():
            setattr(options, name, value)
        return options


class _Making:
    """The making of an object, in a thread, since it may block. See ``base.RunningCollective``."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.made: Any = None
        self._make, self._ended, self._error = make, threading.Event(), ""

    def begin(self) -> _Making:
        """Begin to make the object. Return this one."""
        start_new_thread(self._run, ())  # no Thread, whose end Python would await when it exits
        return self

    def _run(self) -> None:
        try:
            self.made = self._make()
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            self._error = f"{type(error).__name__}: {error}"
        self._ended.set()

    def is_completed(self) -> bool:
        """Return whether it was made, or failed."""
        return self._ended.is_set()

    def finish(self) -> None:
        """Raise a ``ConnectionError`` if it failed."""
        if self._error:
            raise ConnectionError(self._error)


def bits_are_reduced(op: Any, tensor: Any) -> bool:
    """Return whether a bitwise reduction of a tensor is defined."""
    is_integer = tensor.dtype in NAMES and not tensor.is_floating_point() and not tensor.is_complex()
    return op in BITWISE and is_integer and tensor.layout is torch.strided


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
