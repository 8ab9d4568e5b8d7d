"""The argument ``rank`` of exporters, which restricts an export to one rank."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ArgumentError, shown


def one_rank(rank: object, devices: Sequence[str]) -> int:
    """Return ``rank`` if it is the number of one of the devices. Otherwise raise an ArgumentError."""
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < len(devices):
        return rank
    remedy = f"an integer from 0 to {len(devices) - 1}"
    raise ArgumentError.of("a rank must be the number of a device.", f"rank={shown(rank)}", remedy)
