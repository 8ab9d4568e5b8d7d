"""The memory of PyTorch tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch

from ... import kernels
from ...frameworks import Array
from ...frameworks.host_memory import ArrayMemory
from .arrays import (
    DTYPES_BY_NAME,
    FRAMEWORK,
    has_no_memory,
    increment_versions,
    is_frozen,
    is_transformed,
    is_transformed_at_run_time,
)

_MOST_AXES: Final = 64  # the kernels read strided sources of at most this many dimensions


class TorchMemory(ArrayMemory):
    """See ``ArrayMemory``. The kernels receive addresses, and read strided tensors without a copy."""

    shares_results = False

    def readable(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]] | None:
        if is_transformed() or not all(x.is_cpu for row in arrays for x in row):
            return None
        if any(x.dim() > _MOST_AXES for row in arrays for x in row):
            return None
        try:
            operands = [[x.data_ptr() if x.is_contiguous() else _strided_operand(x) for x in row] for row in arrays]
            lacking = any(map(has_no_memory, chain(*arrays)))
        except RuntimeError:  # a tensor of torch.func, whose transformation has ended
            lacking = True
        if lacking:
            for x in chain(*arrays):
                FRAMEWORK.array(x)  # raises an error for a tensor that has lost its elements
            return None
        return operands

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtype: str, count: int) -> list[list[Any]]:
        kind = DTYPES_BY_NAME[dtype]
        return [_allocate(shape, kind, count) for shape in shapes]

    def writable(self, arrays: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        return [[x.data_ptr() for x in row] for row in arrays]

    def writable_outputs(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]]:
        xs = list(chain(*arrays))
        if not all(x.is_cpu and x.is_contiguous() for x in xs) or any(map(is_frozen, xs)):
            raise BufferError("a tensor cannot be written into")
        try:
            addresses = [[x.data_ptr() for x in row] for row in arrays]
            is_lacking = any(map(has_no_memory, xs))
        except RuntimeError as error:  # a tensor of torch.func, whose transformation has ended
            raise BufferError("a tensor cannot be written into") from error
        if is_lacking:
            raise BufferError("a tensor has no memory")
        return addresses

    def threads(self) -> int | None:
        return int(torch.get_num_threads())

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        increment_versions([*chain(*outs)])


def _strided_operand(x: Array) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a tensor's address, shape, and strides in bytes."""
    size = x.element_size()
    return x.data_ptr(), tuple(x.shape), tuple(step * size for step in x.stride())


def _allocate(shape: tuple[int, ...], dtype: Any, count: int) -> list[Any]:
    """Return new tensors. Large ones use memory from the pool of ``kernels.memory``."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < kernels.POOLED_BYTES:
        return [torch.empty(shape, dtype=dtype, device="cpu") for _ in range(count)]
    return [torch.frombuffer(kernels.memory(nbytes), dtype=dtype).view(shape) for _ in range(count)]


MEMORY: Final = TorchMemory()
_CDATA: Final = attrgetter("_cdata")  # the address of the object in C++


def functions_for_compiled_code() -> tuple[Any, ...] | None:
    """Return the objects of torch that ``Calls`` uses, or ``None`` if torch lacks one of them, as before 2.10."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    is_usual = is_transformed_at_run_time if hasattr(torch.compiler, "_is_compiling_flag") else is_transformed
    functions = is_usual, increment_versions, torch.empty_like, torch.is_inference_mode_enabled
    return None if exchange is None else (torch.Tensor, exchange, *functions, torch.int8, torch.uint8)


def layout_probes() -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Return tensors that show how torch's tensors lie in memory, each with facts about it, and others.

    Compiled code reads tensors without calls of torch if the facts of the first ones are where it expects them, and if
    it then recognizes that each of the others needs torch's functions. If torch cannot make one, both lists are empty.
    """
    try:
        with torch.inference_mode():
            inference = torch.ones(2, 3, device="cpu")
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.ones(2, 3, device="cpu").add_(1)
            plain = [x, x.new_ones(()), x.new_ones(3, 1, 4, 2, 5), x.new_ones(9)[2:7], x.new_ones(0, 3)]
            plain += [x.to(dtype) for dtype in DTYPES_BY_NAME.values()]
            freed, small = x.clone(), x.clone()
            part = freed[1:]
            freed.untyped_storage().resize_(0)
            small.untyped_storage().resize_(20)
            special = [x.t(), x.expand(4, 2, 3), torch._neg_view(x), x.cfloat().conj(), torch._lazy_clone(x), inference]
            special += [x.clone().requires_grad_(), x.to("meta"), x.to_sparse(), freed, part, small]
            facts = [
                (
                    x,
                    _CDATA(x),
                    _CDATA(x.untyped_storage()),
                    x.storage_offset(),
                    x.numel(),
                    x._version,
                    x.untyped_storage().nbytes(),
                )
                for x in plain
            ]
    except Exception:  # noqa: BLE001 -- another version of torch may raise any class
        return [], []
    return facts, special
