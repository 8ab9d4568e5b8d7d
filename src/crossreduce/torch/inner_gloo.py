"""``InnerGloo``: runs a collective in gloo, as part of a call of the communicator.

Input: a function of gloo and its tensors. Output: the results in these tensors, or an error that all ranks raise.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import ReduceOp as TorchOp

from ..observe.diagnostics import call_text
from ..ranks.communicator import Communicator
from ..ranks.transports.gloo import GlooCollective
from .memory import NAMES, copy_back, form_of, raw, readable, tensors_in

_GLOO_WAITS_S: Final = 10.0  # gloo's timeout is this much longer than the group's, since gloo's errors name no rank
BITWISE: Final = (TorchOp.BAND, TorchOp.BOR, TorchOp.BXOR)
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

    def _reduce_in_gloo(self, collective: str, root: int | None, function: Any, tensor: Any, options: Any) -> None:
        """Replace a dense or sparse tensor by its reduction, which ``function`` of gloo executes."""
        dense = tensor.layout is torch.strided
        plain = readable(tensor) if dense else tensor
        # Bitwise ops combine bytes. Else a detached tensor: _run_in_gloo counts references, and other code may refer to
        # the tensor itself.
        detached = raw(plain) if options.reduceOp.op in BITWISE else plain.detach()
        op = options.reduceOp.op.name.lower()
        text = call_text(collective, op, root, name_of(tensor), tensor.shape)
        self._run_in_gloo(text, function, [detached], options)
        if dense:
            copy_back(tensor, plain)
        else:  # gloo replaces the memory of a sparse tensor, and the detached one does not share it
            with torch.no_grad():
                tensor.copy_(detached)

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
