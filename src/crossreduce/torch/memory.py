"""Tensors as memory: addresses for the kernels, and copies of tensors that are not contiguous.

Input: CPU tensors. Output: ``ArrayView``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ..ops import DTYPES
from ..ranks.communicator import ArrayView

NAMES: Final = {getattr(torch, name): name for name in sorted(DTYPES) if hasattr(torch, name)}
"""The names of the dtypes that can be reduced. Tensors of other dtypes can only be moved, as bytes."""


def is_plain(tensor: Any) -> bool:
    """Return whether the memory contains the elements in C order, without pending conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory(tensor: Any) -> ArrayView:
    """Return the memory of a plain tensor."""
    name, size = NAMES.get(tensor.dtype), tensor.numel()
    if name is None:
        name, size = "uint8", size * tensor.element_size()
    return ArrayView(tensor.data_ptr(), size, name, tuple(tensor.shape))


def equal_parts(tensor: Any, n: int) -> list[ArrayView]:
    """Return n equal consecutive parts of a plain tensor."""
    whole = memory(tensor)
    size = whole.size // n
    step = tensor.numel() * tensor.element_size() // n
    return [ArrayView(whole.address + k * step, size, whole.dtype, (size,)) for k in range(n)]


def readable(tensor: Any) -> Any:
    """Return the tensor itself if it is plain, else a plain copy."""
    return tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: Any) -> Any:
    """Return the tensor itself if it is plain, else an uninitialized one of its shape, for ``copy_back``."""
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def copy_back(tensor: Any, written: Any) -> None:
    """Copy ``written``, which ``writable`` returned for the tensor, to the tensor itself."""
    if written is not tensor:
        tensor.detach().copy_(written)


def copy_back_all(tensors: Sequence[Any], written: Sequence[Any]) -> None:
    """Call ``copy_back`` for each tensor."""
    for tensor, substitute in zip(tensors, written, strict=True):
        copy_back(tensor, substitute)
