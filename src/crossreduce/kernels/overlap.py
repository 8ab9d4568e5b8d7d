"""Find results that share memory with other arrays.

Input: addresses. Output: a result that must not be written, or ``None``; whether arrays share memory.
"""

from __future__ import annotations

from collections.abc import Iterable


def find_overlap(extents: Iterable[tuple[int, int, int, int]]) -> tuple[int, int] | None:
    """Return a result that shares memory with another result or with a source.

    Args:
      extents: for each array ``(start, stop, tensor, result)``: the address of its first byte, that of the byte after
        its last, and numbers; ``result`` is -1 for a source. A source that has exactly the memory of a result of its
        tensor must be left out.
    Returns:
      The ``(tensor, result)`` of a result that shares memory, or ``None``. Empty arrays share none.

    >>> find_overlap([(0, 8, 0, 0), (8, 16, 0, 1), (0, 4, 1, -1)])
    (0, 0)
    """
    # Of the arrays before the current one, the array and the result that end last, as (stop, tensor, result).
    reached = reached_by_result = (0, 0, -1)
    for start, stop, tensor, result in sorted(extent for extent in extents if extent[1] > extent[0]):
        other = reached if result >= 0 else reached_by_result
        if other[0] > start:
            return (tensor, result) if result >= 0 else other[1:]
        reached = max(reached, (stop, tensor, result))
        if result >= 0:
            reached_by_result = max(reached_by_result, (stop, tensor, result))
    return None


def overlaps(one: tuple[int, int, bool], others: Iterable[tuple[int, int, bool]]) -> bool:
    """Return whether an array shares memory with others. Each is given by its ``memory_range`` in its framework.

    >>> overlaps((0, 8, True), [(8, 16, True)]), overlaps((0, 9, True), [(8, 16, True)])
    (False, True)
    """
    return any(one[0] < stop and start < one[1] for start, stop, _ in others)
