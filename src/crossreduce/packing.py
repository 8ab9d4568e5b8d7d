"""Lay out tensors in flat buffers, and find the parts of a buffer that belong to each tensor.

Input: the specs of a batch, and the packing options. Output: ``Buffer``s with the position of each tensor, according to
which the frameworks join and cut arrays. Layouts do not depend on values, so they are computed once per kind of batch.

A batch is packed in one of two ways, and dtypes never mix:

* ``bytes_per_pack`` > 0, or ``num_packs`` > 0: all tensors of a dtype are in one buffer, in order, and the buffer is
  cut into packs whose sizes differ by at most one element. A pack's boundary may be inside a tensor.
* ``num_packs`` = 0: each tensor has its own buffer, except that neighbouring small tensors share one
  (``agg_small_grads_max_bytes``, ``agg_small_grads_max_group``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache
from typing import Final, NamedTuple

from .errors import ArgumentError
from .ops import INTEGERS
from .values import TensorSpec

# More packs than this are a mistake, such as bytes_per_pack=1 for a model, and would take minutes.
MOST_PACKS: Final = 10_000

BITS: Final = {name: int("".join(filter(str.isdigit, name))) for name in INTEGERS} | {
    "bool": 8, "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex64": 64, "complex128": 128,
}  # fmt: skip


class Packing(NamedTuple):
    """The packing arguments of ``AllReduceCrossDeviceOps``, and ``bytes_per_pack`` of ``CommunicationOptions``."""

    num_packs: int = 0
    bytes_per_pack: int = 0
    small_bytes: int = 0  # agg_small_grads_max_bytes
    small_group: int = 0  # agg_small_grads_max_group


class Span(NamedTuple):
    """The position of a tensor in a flat buffer, in elements. ``tensor`` is its number in the batch."""

    tensor: int
    start: int
    size: int
    shape: tuple[int, ...]


class Buffer(NamedTuple):
    """A flat buffer of one dtype. A tensor whose shape tracing leaves unknown has its own buffer, which is not cut."""

    dtype: str
    size: int | None  # in elements, or None if it is unknown while tracing
    spans: tuple[Span, ...]
    packs: int  # the number of packs that the buffer is cut into
    first: int  # the replica that is the root of the first pack; the next packs have the next replicas


Cut = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]  # a tensor's shape and pieces: see ``cuts``


def itemsize(dtype: str) -> int:
    """Return the number of bytes of one element.

    >>> itemsize("bfloat16")
    2
    """
    return BITS[dtype] // 8


@lru_cache(maxsize=1024)
def layout(specs: tuple[TensorSpec, ...], packing: Packing) -> tuple[Buffer, ...]:
    """Return the buffers of a batch. Each tensor is in exactly one of them.

    Raises:
      ArgumentError: more than ``MOST_PACKS`` packs would result.

    >>> specs = (TensorSpec((2, 3), "float32"), TensorSpec((), "int32"), TensorSpec((5,), "float32"))
    >>> [(buffer.dtype, buffer.size, len(buffer.spans)) for buffer in layout(specs, Packing(num_packs=1))]
    [('float32', 11, 2), ('int32', 1, 1)]
    """
    if packing.num_packs or packing.bytes_per_pack:
        groups: dict[object, list[int]] = {}
        for tensor, spec in enumerate(specs):
            groups.setdefault(tensor if None in spec.shape else spec.dtype, []).append(tensor)
        return tuple(_buffer(specs, group, packing, 0) for group in groups.values())
    return tuple(_buffer(specs, group, packing, group[0]) for group in _small_groups(specs, packing))


@lru_cache(maxsize=4096)
def cuts(spans: tuple[Span, ...], bounds: tuple[tuple[int, int], ...]) -> tuple[Cut, ...]:
    """Return how to assemble each tensor of a buffer from consecutive parts of the buffer.

    Args:
      spans: the tensors of one buffer.
      bounds: for each part, the range of elements ``(start, stop)`` of the buffer that it contains.
    Returns:
      For each tensor its shape and its pieces ``(part, start, stop)``, in elements of the part. An empty tensor is an
      empty piece of the first part.

    >>> cuts((Span(0, 0, 3, (3,)), Span(1, 3, 2, (2,))), ((0, 2), (2, 5)))
    (((3,), ((0, 0, 2), (1, 0, 1))), ((2,), ((1, 1, 3),)))
    """
    ends = [high for _, high in bounds]
    tensors = []
    for span in spans:
        stop = span.start + span.size
        pieces = []
        part = bisect_right(ends, span.start)  # the first part that ends after the start of the tensor
        while part < len(bounds) and bounds[part][0] < stop:
            low, high = bounds[part]
            if low < high:
                pieces.append((part, max(span.start, low) - low, min(stop, high) - low))
            part += 1
        tensors.append((span.shape, tuple(pieces) if span.size else ((0, 0, 0),)))
    return tuple(tensors)


def _small_groups(specs: tuple[TensorSpec, ...], packing: Packing) -> list[list[int]]:
    """Return the tensors of each buffer: up to ``small_group`` small neighbours of one dtype share a buffer."""
    groups: list[list[int]] = []
    for tensor, spec in enumerate(specs):
        if (
            groups
            and len(groups[-1]) < packing.small_group
            and specs[groups[-1][-1]].dtype == spec.dtype
            and all(_is_small(specs[member], packing) for member in (groups[-1][-1], tensor))
        ):
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    return groups


def _is_small(spec: TensorSpec, packing: Packing) -> bool:
    if None in spec.shape:
        return False
    return math.prod(spec.shape) * itemsize(spec.dtype) <= packing.small_bytes  # type: ignore[arg-type]


def _buffer(specs: tuple[TensorSpec, ...], tensors: list[int], packing: Packing, first: int) -> Buffer:
    """Return the buffer of some tensors of a batch, which all have the same dtype."""
    dtype = specs[tensors[0]].dtype
    spans: list[Span] = []
    start = 0
    for tensor in tensors:
        shape = specs[tensor].shape
        if None in shape:
            return Buffer(dtype, None, (Span(tensor, 0, 0, ()),), 1, first)
        size = math.prod(shape)  # type: ignore[arg-type]
        spans.append(Span(tensor, start, size, shape))  # type: ignore[arg-type]
        start += size
    packs = packing.num_packs
    if packing.bytes_per_pack:
        fitting = max(1, packing.bytes_per_pack // itemsize(dtype))
        packs = max(packs, -(-start // fitting))  # rounded up
    packs = max(1, min(packs, start))
    if packs > MOST_PACKS:
        problem = f"{start} elements of {dtype} would be cut into {packs} packs; {MOST_PACKS} is the most."
        given = f"num_packs={packing.num_packs}, bytes_per_pack={packing.bytes_per_pack}"
        least = -(-start // MOST_PACKS) * itemsize(dtype)
        remedy = f"num_packs of at most {MOST_PACKS}, and bytes_per_pack of 0 or at least {least}"
        raise ArgumentError.of(problem, given, remedy)
    return Buffer(dtype, start, tuple(spans), packs, first)
