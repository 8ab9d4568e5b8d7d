"""Tensors as memory: addresses for the kernels, copies of tensors that are not contiguous, and tensors that overlap.

Input: CPU tensors. Output: ``ArrayView``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, combinations, starmap
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError, UnsupportedError
from ..frameworks.torch.arrays import is_in_mode, is_traced
from ..ops import DTYPES
from ..ranks.array_views import ArrayView

NAMES: Final = {getattr(torch, name): name for name in sorted(DTYPES) if hasattr(torch, name)}
"""The names of the dtypes that can be reduced. Tensors of other dtypes can only be moved, as bytes."""
_STRIDED: Final = torch.strided
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16}  # by the bytes of an element
_PROBLEMS: Final = {
    "quantized": "{} of quantized tensors would move their integers without the scale that gives them a meaning.",
    "dual": "{} of dual tensors of forward-mode AD would ignore their tangents.",
}
_REMEDIES: Final = {
    "quantized": "tensor.dequantize(); or tensor.int_repr(), with the scale and the zero point as further tensors",
    "nested": "tensor.values() and tensor.offsets(), or each of tensor.unbind()",
    "sparse_coo": "tensor.to_dense(), or tensor.indices() and tensor.values(); all_reduce accepts its SUM",
    "sparse_csr": "tensor.to_dense(), or tensor.crow_indices(), tensor.col_indices() and tensor.values()",
    "dual": "torch.autograd.forward_ad.unpack_dual(tensor), and a call for the primal and one for the tangent",
    "without memory": "a tensor that has memory, outside of torch.func, before its storage is freed",
}


def form_of(tensor: Any) -> str:
    """Return "" if a tensor's values are in its memory, else a word for where they are, such as "sparse_coo"."""
    if tensor.layout is not _STRIDED:
        return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    try:
        if tensor.is_cpu and not tensor.data_ptr() and tensor.numel():
            return "without memory"
    except RuntimeError:  # within torch.func.vmap, for example
        return "without memory"
    is_dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
    return "dual" if is_dual else ""


def name_of(tensor: Any) -> str:
    """Return a tensor's dtype, and its form if it has one (see ``form_of``), as text. Ranks must agree on both."""
    name, form = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch."), form_of(tensor)
    if form == "sparse_coo" and tensor.dense_dim():  # gloo crashes if ranks differ in this
        form = f"{form}_{tensor.sparse_dim()}"
    return f"{form.replace(' ', '_')}_{name}" if form else name


def unsupported_form(call: str, tensor: Any) -> UnsupportedError:
    """Return the error for a call with a tensor that has a form (see ``form_of``)."""
    form = form_of(tensor) or type(tensor).__name__  # a class that wraps others, and does not pass on ops
    problem = _PROBLEMS.get(form, f"{{}} needs tensors whose values are in their memory, not {form} ones.").format(call)
    given = f"a {type(tensor).__name__} of {str(tensor.dtype).removeprefix('torch.')}, {form}"
    return UnsupportedError.of(problem, given, _REMEDIES.get(form, "tensor.to_dense()"))


def require_dense(call: str, tensors: Sequence[Any]) -> None:
    """Raise ``UnsupportedError`` if the call is traced, or if a tensor on the CPU has values outside of its memory."""
    if is_traced():
        raise traced_error(call)
    for tensor in tensors:
        if tensor.is_cpu and form_of(tensor):
            raise unsupported_form(call, tensor)


def traced_error(call: str) -> UnsupportedError:
    """Return the error for a call of which the trace would have no record."""
    problem = f"{call} cannot be traced by make_fx or torch.jit.trace: the traced program would not call it."
    return UnsupportedError.of(problem, "a call in a traced function", "torch.distributed._functional_collectives")


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor is plain: its elements are in C order, and no conjugation or negation is pending."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory(tensor: Any) -> ArrayView:
    """Return the memory of a plain tensor. If its dtype is moved as bytes, the last dimension is that of the bytes."""
    name, size, shape = NAMES.get(tensor.dtype), tensor.numel(), tuple(tensor.shape)
    if name is None:
        name, size, shape = "uint8", size * tensor.itemsize, (*shape, tensor.itemsize)
    return ArrayView(tensor.data_ptr(), size, name, shape)


def raw(tensor: Any) -> Any:
    """Return the memory of a plain tensor as a tensor of bytes, for gloo, which supports few dtypes."""
    line = tensor.detach().as_strided((tensor.numel(),), (1,))  # a plain tensor of one element may have other strides
    return line.view(torch.uint8)


def tensors_in(given: Any) -> list[Any]:
    """Return the tensors in nested lists, also while the interpreter shuts down, when torch's pytrees fail."""
    if isinstance(given, (list, tuple)):
        return [tensor for each in given for tensor in tensors_in(each)]
    return [given] if isinstance(given, torch.Tensor) else []


def equal_parts(tensor: Any, n: int) -> list[ArrayView]:
    """Return the memory of ``n`` equal consecutive parts of a plain tensor."""
    whole = memory(tensor)
    size = whole.size // n
    step = tensor.numel() * tensor.element_size() // n
    return [ArrayView(whole.address + k * step, size, whole.dtype, (size,)) for k in range(n)]


def readable(tensor: Any) -> Any:
    """Return the tensor itself if it is plain, or else a plain copy."""
    if is_plain(tensor):
        return tensor
    return _outside_of_modes(
        lambda: movable(tensor.detach().resolve_conj().resolve_neg()).contiguous().view(tensor.dtype)
    )


def writable(tensor: Any) -> Any:
    """Return the tensor itself if it is plain, or else an uninitialized tensor of its shape, for ``copy_back``."""
    if is_plain(tensor):
        return tensor
    return _outside_of_modes(lambda: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))


def copy_back(tensor: Any, written: Any) -> None:
    """Copy ``written``, which ``writable`` has returned for ``tensor``, into ``tensor``."""
    if written is not tensor:
        _outside_of_modes(lambda: movable(tensor.detach()).copy_(movable(written)))


def receivable(tensor: Any) -> Any:
    """Return ``writable(tensor)`` for a message. If elements of the tensor share memory, raise an ``ArgumentError``."""
    if not is_plain(tensor) and share_memory([tensor]):
        given = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        raise ArgumentError.of("elements of the tensor of a recv share memory.", given, "a tensor without repetitions")
    return writable(tensor)


def movable(tensor: Any) -> Any:
    """Return a view of a tensor in which torch can copy elements, for dtypes such as uint4, of which it cannot."""
    return tensor if tensor.dtype in NAMES or tensor.is_complex() else tensor.view(_INTEGERS[tensor.itemsize])


def _outside_of_modes(function: Callable[[], Any]) -> Any:
    """Return ``function()``. If modes of this thread would change its operations, another thread calls it."""
    if not is_in_mode():
        return function()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def copy_back_all(tensors: Sequence[Any], written: Sequence[Any]) -> None:
    """Call ``copy_back`` for each tensor."""
    for tensor, substitute in zip(tensors, written, strict=True):
        copy_back(tensor, substitute)


def are_apart(tensors: Sequence[Any]) -> bool:
    """Return whether all tensors are contiguous and none overlaps another one. It takes about 0.5 us per tensor."""
    extents = []
    for x in tensors:
        if x.layout is not _STRIDED or not x.is_contiguous():
            return False
        start = x.data_ptr()
        extents.append((start, start + x.nbytes))
    return len(extents) < 2 or _disjoint(extents)


def share_memory(tensors: Sequence[Any]) -> bool:
    """Return whether any two elements of the tensors share memory. Sparse tensors are not checked."""
    dense = [x for x in tensors if x.layout is torch.strided and x.numel()]
    arrays = _as_arrays(dense)
    if any(map(_overlaps_itself, arrays)):
        return True
    return not _disjoint(list(map(_extent, dense))) and any(starmap(np.shares_memory, combinations(arrays, 2)))


def copy_overlapping(
    sources: Sequence[Any], results: Sequence[Any], same: Mapping[int, int] | None = None
) -> list[Any]:
    """Return the sources, but a copy of each source that may overlap a result.

    ``same``: source k is not copied if it begins at the address ``same[k]``: then the call is in place.
    """
    extents = sorted(map(_extent, results))
    starts = [start for start, _ in extents]
    ends = list(accumulate((stop for _, stop in extents), max))  # ends[k]: the last end of the results 0 to k
    read = []
    for k, source in enumerate(sources):
        start, stop = _extent(source)
        before = bisect_left(starts, stop)  # this many results begin before the source ends
        clear = not before or ends[before - 1] <= start or (same or {}).get(k) == start
        read.append(source if clear else movable(source.detach()).clone().view(source.dtype))
    return read


def _disjoint(extents: list[tuple[int, int]]) -> bool:
    """Return whether no extent overlaps another one. Empty extents do not overlap. The list is sorted in place."""
    end = 0
    extents.sort()
    for start, stop in extents:
        if start < stop:
            if start < end:
                return False
            end = stop
    return True


def _extent(tensor: Any) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last one, or (0, 0) if it is sparse."""
    if tensor.layout is not _STRIDED:
        return 0, 0
    start, steps = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return start, start + (last + 1) * tensor.itemsize if tensor.numel() else start


def _as_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Return the memory of strided tensors, of any dtype, as NumPy arrays, whose elements must not be read.

    Tensors of one shape at equal distances, such as the columns of a matrix, become one array with one more dimension.
    """
    alike: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for x in tensors:
        alike.setdefault((x.itemsize, tuple(x.shape), x.stride()), []).append(x.data_ptr())
    arrays = []
    for (itemsize, shape, strides), starts in alike.items():
        starts.sort()
        while starts:
            step = starts[1] - starts[0] if len(starts) > 1 else 0
            count = next((k for k, start in enumerate(starts) if start != starts[0] + k * step), len(starts))
            steps = (step, *(stride * itemsize for stride in strides))
            kept = slice(1 if count == 1 else 0, None)  # no dimension more than needed: NumPy and torch support 64
            interface: dict[str, Any] = {"shape": (count, *shape)[kept], "strides": steps[kept], "version": 3}
            interface |= {"data": (starts[0], True), "typestr": f"|V{itemsize}"}
            arrays.append(np.asarray(SimpleNamespace(__array_interface__=interface)))
            del starts[:count]
    return arrays


def _overlaps_itself(array: Any) -> bool:
    """Return whether any two elements of an array share memory."""
    # Shifting both elements of a pair changes nothing. So it suffices to check pairs with index 0 before the first
    # dimension in which they differ, one of which also has index 0 in this dimension.
    rows = [array[(0,) * k] for k in range(array.ndim)]
    return any(len(each) > 1 and np.shares_memory(each[:1], each[1:]) for each in rows)
