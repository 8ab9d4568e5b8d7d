"""``ArrayView``: the address, size and dtype of an array that is passed to a collective of ranks.

Input: arrays of NumPy or a framework. Output: addresses and sizes, and checks of them. The memory is the caller's.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from ..errors import ArgumentError, MismatchError
from .intra_host.shared_memory import MAX_TEXT_BYTES


class ArrayView(NamedTuple):
    """An array in C order: its address, its number of elements and the name of their dtype.

    ``shape`` is a part of the call's description: a call fails if it is not the same on all ranks.
    """

    address: int
    size: int
    dtype: str
    shape: tuple[int, ...]


def require_alike(first: ArrayView | None = None, *others: ArrayView, count: int | None = None) -> None:
    """Raise an error if arrays differ in size or dtype, or if ``others`` are not ``count`` arrays if this is given."""
    if count is not None and len(others) != count:
        raise ArgumentError.of("there must be one array per rank.", f"{len(others)} arrays for {count} ranks")
    assert first is not None, "a group has at least one rank"
    for other in others:
        if (other.size, other.dtype) != (first.size, first.dtype):
            given = f"{first.dtype}{list(first.shape)} and {other.dtype}{list(other.shape)}"
            raise MismatchError.of("inputs and results must have the same dtype and size.", given)


def encoded_text(text: str) -> bytes:
    """Return the description of a call in UTF-8. If it exceeds ``MAX_TEXT_BYTES`` bytes, a hash replaces its end."""
    encoded = text.encode()
    if len(encoded) <= MAX_TEXT_BYTES:
        return encoded
    start = encoded[: MAX_TEXT_BYTES - 20].decode(errors="ignore").encode()  # does not end in a part of a character
    return start + b"... " + blake2b(encoded, digest_size=8).hexdigest().encode()


def require_root(rank: int, size: int, root: int, passed: bool | None = None) -> None:
    """Raise an ``ArgumentError`` if the root is not one of the ``size`` ranks, or if ``passed`` is wrong.

    ``passed``: whether this rank passed the argument that the root must pass, and no other rank, such as the result of
    a reduce. It is ``None`` if the collective has no such argument.
    """
    if not 0 <= root < size:
        problem = "the root is not a rank of the group."
        raise ArgumentError.of(problem, str(root), f"0 to {size - 1}")
    if passed is not None and passed != (rank == root):
        who, given = ("only the root may", "passed") if passed else ("the root must", "did not pass")
        problem = f"{who} pass the result of a reduce, the results of a gather or the sources of a scatter."
        raise ArgumentError.of(problem, f"rank {rank} {given} this argument; the root is rank {root}")
