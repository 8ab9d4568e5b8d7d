"""Find results that share memory with other arrays.

Input: addresses. Output: a result that must not be written, or ``None``.
"""

from __future__ import annotations

from collections.abc import Iterable


def find_overlap(extents: Iterable[tuple[int, int, int, int]]) -> tuple[int, int] | None:
    """Return a result that shares memory with another result or with a source.

    Args:
      extents: ``(start, stop, tensor, result)``: the addresses of an array's first byte and of the byte after its
        last; ``result`` is -1 for a source. The caller leaves out a source that is itself a result.
    Returns:
      The ``(tensor, result)``, or ``None``. Empty arrays share nothing.

    >>> find_overlap([(0, 8, 0, 0), (8, 16, 0, 1), (0, 4, 1, -1)])
    (0, 0)
    """
    reached = reached_by_result = (0, 0, -1)  # what ends last so far (stop, tensor, result): of all, of results
    for start, stop, tensor, result in sorted(extent for extent in extents if extent[1] > extent[0]):
        other = reached if result >= 0 else reached_by_result
        if other[0] > start:
            return (tensor, result) if result >= 0 else other[1:]
        reached = max(reached, (stop, tensor, result))
        if result >= 0:
            reached_by_result = max(reached_by_result, (stop, tensor, result))
    return None
