"""Launches in the form of the compiled plan: tables of limited size, with the masks of their orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .kernels import HEADER_NBYTES, LARGE_NBYTES, MAX_STEPS, ORDER_NBYTES, PART_NBYTES, SMALL_NBYTES
from .operations import Launch


def split(launch: Launch, accepts_large: bool) -> Sequence[Any]:
    """Return the launches, as ``_cuda.Plan`` reads them, that have the parts of one, as many as a table can hold."""
    kernel, count = launch.kernel, launch.sources
    results = len(launch.parts[0].places) - count
    part_nbytes = PART_NBYTES + 8 * (count + results)
    everything = HEADER_NBYTES + ORDER_NBYTES * len(launch.orders) + part_nbytes * len(launch.parts)
    large = accepts_large and kernel.has_large and everything > SMALL_NBYTES
    room = LARGE_NBYTES if large else SMALL_NBYTES
    groups: list[tuple[dict[int, int], list[Any]]] = []
    for part in launch.parts:
        orders, parts = groups[-1] if groups else ({}, [])
        needed = len(orders) + (part.order not in orders)
        if not groups or HEADER_NBYTES + ORDER_NBYTES * needed + part_nbytes * (len(parts) + 1) > room:
            orders, parts = {}, []
            groups.append((orders, parts))
        parts.append((part.size, orders.setdefault(part.order, len(orders)), part.places))
    made = []
    for orders, parts in groups:
        masks = [launch.orders[order] for order in orders]
        nbytes = [
            kernel.nbytes[2] if k >= count else kernel.nbytes[mask[3] >> k & 1 if k < MAX_STEPS else 0]
            for mask in masks
            for k in range(count + results)
        ]
        stack = max(depth(mask) for mask in masks)
        name = kernel.name + ("_large" if large else "")
        made.append(
            (launch.device, name, large, count, results, stack, float(launch.divisor), kernel.kind, kernel.values,
             kernel.units, nbytes, masks, parts)
        )  # fmt: skip
    return made


def depth(order: tuple[int, int, int, int]) -> int:
    """Return the most values that are on a kernel's stack at once."""
    push, fold, twice, _ = order
    most = now = 1
    for k in range((push | fold).bit_length()):
        now += push >> k & 1
        most = max(most, now)
        now -= (fold >> k & 1) + (twice >> k & 1)
    return most
