"""``InnerGloo``: collectives that the communicator does not have.

Input: tensors. Output: the results in these tensors, or an error that all ranks raise. An all-to-all of unequal parts
is one call of the communicator on one host. Otherwise its parts are padded, or are messages if they differ very much.
Sums of sparse tensors run in gloo, whose group is made for the first of them. Messages and gloo's calls are part of a
call of the communicator.
"""

from __future__ import annotations

import logging
import operator
import re
import sys
import threading
import time
from _thread import start_new_thread
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch

from _crossreduce_torch import say

from ..errors import MismatchError
from ..observe.diagnostics import call_text
from ..ranks.array_views import ArrayView
from ..ranks.communicator import Communicator
from ..ranks.connections.rendezvous import interfaces
from ..ranks.messages import Messages, PartExchange
from ..ranks.transports.gloo import GlooCollective, abort, process_group
from .call_checks import CallChecks
from .memory import equal_parts, memory, name_of, raw, tensors_in
from .rendezvous import CancellableStore

_GLOO_WAITS_S: Final = 10.0  # gloo's timeout is this much longer than the group's, since gloo's errors name no rank
_PADDED_NBYTES: Final = 1 << 16  # the parts of unequal all-to-alls up to this size are always padded to the largest one
_MOST_PADDING: Final = 2  # larger ones, if the padded parts together are at most so many times as large as the data
_STEP_NBYTES: Final = 256  # the sizes of padded parts are multiples of it
_RELEASE_S: Final = 1.0  # the longest wait for gloo to release tensors, which takes microseconds


class InnerGloo:
    """Runs these collectives for one rank of a group."""

    def __init__(self, communicator: Communicator, store: Any, messages: Messages | None) -> None:
        """``store``: where gloo's ranks meet; the group keeps it. ``messages``: of the group, if it has any."""
        self._communicator, self._store, self._messages = communicator, store, messages
        self._rank, self._size = communicator.rank, communicator.size
        self.checks = self._checks = CallChecks(communicator)
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

    def _exchange_unequal(
        self, result: Any, source: Any, received: Sequence[int], sent: Sequence[int], tensor: Any, unit: str
    ) -> None:
        """Execute an all-to-all of unequal numbers of rows. ``tensor``: has the dtype that the ranks compare.

        Raises:
          MismatchError: a rank sends more or less than the receiver expects. All ranks raise it.
        """
        text = f"all_to_all {name_of(tensor)} of unequal parts"
        row = [source.shape[1:].numel() * source.element_size(), *sent, *received]
        is_one_host = len(self._communicator.hosts) == 1
        exchange = partial(self._exchange_on_host, text, row, result, source)
        exchange = exchange if is_one_host else partial(self._gather_rows, text, row)
        try:
            rows = exchange()
        except MismatchError as error:
            self._require_parts(error, tensor)
            rows = exchange()
        if rows:
            self._exchange(result, source, rows, unit)

    def _require_parts(self, error: MismatchError, tensor: Any) -> None:
        """Raise ``error`` unless the ranks' calls are all-to-alls that differ only in the sizes of their parts."""
        valid = re.compile(rf"(inner )?all_to_all {name_of(tensor)}(\[[\d, ]*\]| of unequal parts)")  # none raises
        if not all(map(valid.fullmatch, error.calls)):
            raise error

    def _exchange_on_host(self, text: str, row: list[int], result: Any, source: Any) -> list[list[int]]:
        """Execute an all-to-all of unequal parts among ranks of one host, in one call. ``row``: see ``_exchange``.

        Returns:
          An empty list, or the rows of all ranks if no data was moved.
        """
        table, start = array("q", [0]) * (1 + self._size * len(row)), 1 + self._rank * len(row)
        table[start : start + len(row)] = array("q", row)
        self._communicator.exchange_parts(text, (table.buffer_info()[0], source.data_ptr(), result.data_ptr()))
        return [] if table[0] else [list(table[k : k + len(row)]) for k in range(1, len(table), len(row))]

    def _gather_rows(self, text: str, row: list[int]) -> list[list[int]]:
        """Return the rows of all ranks (see ``_exchange``). ``text``: describes the call to other ranks."""
        own = torch.tensor(row, device="cpu")
        table = own.new_empty(self._size, len(row))
        self._communicator.all_gather(memory(own), equal_parts(table, self._size), text)
        return list(table.tolist())

    def _exchange(self, result: Any, source: Any, rows: list[list[int]], unit: str) -> None:
        """Execute an all-to-all of unequal numbers of ``unit``.

        Parts are padded to the size of the largest one if this adds little, or if messages cannot reach all hosts.
        ``rows``: for each rank the bytes of a unit, the numbers to send to each rank, and those to receive from each.

        Raises:
          MismatchError: a rank sends more or less than the receiver expects. All ranks raise it.
        """
        self._checks.require_expected(rows, unit)
        ranks, width = self._size, rows[0][0]
        most = max(max(row[1 : 1 + ranks]) for row in rows) * width
        total = sum(sum(row[1 : 1 + ranks]) for row in rows) * width
        own = [width * count for count in rows[self._rank][1:]]
        to_each, from_each = own[:ranks], own[ranks:]
        is_skewed = most > _PADDED_NBYTES and most * ranks**2 > _MOST_PADDING * total
        if is_skewed and self._messages is not None and not self._communicator.links.lost:
            views = raw(result).split(from_each), raw(source).split(to_each)
            self._exchange_parts(f"all_to_all {name_of(source)}", *views)
            return
        self._exchange_padded(raw(result), raw(source), from_each, to_each, most)

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

    def _exchange_equal_parts(self, tensor: Any, sources: Sequence[Any], results: Sequence[Any]) -> None:
        """Execute an all-to-all of equal parts as messages. For the arguments see ``_exchange_equal``."""
        ranks = self._size // len(sources)
        text = call_text("all_to_all", None, None, name_of(tensor), (sources[0].numel() // ranks,))
        results, sources = ([part for x in each for part in raw(x).chunk(ranks)] for each in (results, sources))
        self._exchange_parts(text, results, sources)

    def _exchange_parts(self, text: str, results: Sequence[Any], sources: Sequence[Any]) -> None:
        """Execute an all-to-all of tensors of bytes, one for each rank, as messages of every two ranks."""
        assert self._messages is not None
        rank = self._communicator.rank
        views = (
            [ArrayView(x.data_ptr(), x.numel(), "uint8", (x.numel(),)) for x in each] for each in (sources, results)
        )
        running = PartExchange(self._messages, (sources, results), *views)

        def begin() -> PartExchange:
            running.begin(rank)
            results[rank].copy_(sources[rank])
            return running

        try:
            self._communicator.delegate(text, begin)
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

    progress = 0

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

    def wait(self, seconds: float) -> bool:
        """Wait so long at most. Return whether it was made, or failed."""
        return self._ended.wait(seconds)

    def finish(self) -> None:
        """Raise a ``ConnectionError`` if it failed."""
        if self._error:
            raise ConnectionError(self._error)


def _references(tensors: Sequence[Any]) -> list[int]:
    """Return the number of references to each tensor, from Python and from C++.

    In torch 2.13, C++ code releases its own reference first, and then that of Python, for which it needs the
    interpreter. Earlier versions (torch 2.8) need the interpreter to release a tensor that only C++ code references.
    """
    return [sys.getrefcount(x) + x._use_count() for x in tensors]
