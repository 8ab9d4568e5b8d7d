"""The rank whose part of an export is made alone."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ArgumentError, shown


def one_rank(rank: object, devices: Sequence[str]) -> int:
    """Return the number of a rank, if these devices have it.

    Raises:
      ArgumentError: it is not an integer, or not the number of one of the devices.
    """
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < len(devices):
        return rank
    last = len(devices) - 1
    raise ArgumentError.of(
        "a rank must be the number of a device.", f"rank={shown(rank)}", f"an integer from 0 to {last}"
    )
