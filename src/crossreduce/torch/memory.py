"""Tensors as memory: addresses for the kernels, and copies where a tensor does not lie in one piece.

In: CPU tensors.  Out: ``processes.contract.Buffer``. Moves nothing between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ..ops import DTYPES
from ..transports.base import Buffer

NAMES: Final = {getattr(torch, name): name for name in sorted(DTYPES) if hasattr(torch, name)}
"""The names of the dtypes that can be reduced; all others can only be moved, as bytes."""


def is_plain(tensor: Any) -> bool:
    """Return whether the tensor's memory is what it says, element by element in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def buffer(tensor: Any) -> Buffer:
    """Return where a plain tensor lies."""
    name = NAMES.get(tensor.dtype)
    if name is not None:
        return Buffer(tensor.data_ptr(), tensor.numel(), name, tuple(tensor.shape))
    return Buffer(tensor.data_ptr(), tensor.numel() * tensor.element_size(), "uint8", tuple(tensor.shape))


def shares(tensor: Any, n: int) -> list[Buffer]:
    """Return n equal parts of a plain tensor, one after another."""
    whole = buffer(tensor)
    size = whole.size // n
    step = tensor.numel() * tensor.element_size() // n
    return [Buffer(whole.address + k * step, size, whole.dtype, (size,)) for k in range(n)]


def readable(tensor: Any) -> Any:
    """Return the tensor itself where it is plain, else a plain copy."""
    return tensor if is_plain(tensor) else _plain_copy(tensor)


def writable(tensor: Any) -> Any:
    """Return the tensor itself where it is plain, else blank memory of its shape, for ``settle`` to take back."""
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def settle(tensor: Any, written: Any) -> None:
    """Put what was written into the tensor that it was written for."""
    if written is not tensor:
        tensor.detach().copy_(written)


def settle_all(tensors: Sequence[Any], written: Sequence[Any]) -> None:
    """``settle`` many."""
    for tensor, one in zip(tensors, written, strict=True):
        settle(tensor, one)


def _plain_copy(tensor: Any) -> Any:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
