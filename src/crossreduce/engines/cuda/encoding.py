"""Convert operations to the form of the compiled ``_cuda.Plan``, in which launches have tables of limited size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .driver import accepts_large_tables, native
from .kernels import HEADER_NBYTES, LARGE_NBYTES, MAX_STEPS, ORDER_NBYTES, PART_NBYTES, SMALL_NBYTES
from .streams import BEGIN, Launch, Operation, Operations


def plan_of(made: Operations, reads_peers: bool = False) -> Any:
    """Return the ``_cuda.Plan`` of operations. ``reads_peers``: whether kernels may read memory of other devices."""
    events: dict[int, int] = {}  # the number of the event that each operation records when it ends
    for number, operation in enumerate(made.operations):
        if operation.is_waited_for:
            events[number] = len(events)
    encoded = []
    for number, operation in enumerate(made.operations):
        waits, event = tuple(BEGIN if k == BEGIN else events[k] for k in operation.waits), events.get(number, -1)
        encoded += _encode(operation, made.devices, waits, event)
    streams = [(device, -1 if to is None else to) for device, to in made.streams]
    return native().Plan(
        devices=made.devices, streams=streams, scratch=made.scratch, operations=encoded, begins=made.begins,
        ends=tuple(events[k] for k in made.ends), resumes=made.resumes, reads_peers=reads_peers,
    )  # fmt: skip


def _encode(operation: Operation, devices: tuple[int, ...], waits: tuple[int, ...], event: int) -> list[Any]:
    """Return an operation in the form of ``_cuda.Plan``. A launch whose table is too large becomes several ones."""
    work = operation.work
    if not isinstance(work, Launch):
        copy = (work.src, work.dst, (work.source, work.target), work.nbytes)
        return [(None, copy, operation.stream, waits, event)]
    launches = list(split_launch(work, accepts_large_tables(devices[work.device])))
    last = len(launches) - 1
    return [
        (launch, None, operation.stream, waits if k == 0 else (), event if k == last else -1)
        for k, launch in enumerate(launches)
    ]


def split_launch(launch: Launch, accepts_large: bool) -> Sequence[dict[str, Any]]:
    """Split a launch into launches whose tables fit into the parameters of a kernel, in the form of ``_cuda.Plan``."""
    kernel, count = launch.kernel, launch.sources
    results = len(launch.parts[0].places) - count
    part_nbytes = PART_NBYTES + 8 * (count + results)
    all_nbytes = HEADER_NBYTES + ORDER_NBYTES * len(launch.orders) + part_nbytes * len(launch.parts)
    large = accepts_large and kernel.has_large and all_nbytes > SMALL_NBYTES
    room = LARGE_NBYTES if large else SMALL_NBYTES
    groups: list[tuple[dict[int, int], list[Any]]] = []  # for each launch the new numbers of its orders, and its parts
    for part in launch.parts:
        orders, parts = groups[-1] if groups else ({}, [])
        needed = len(orders) + (part.order not in orders)
        if not groups or HEADER_NBYTES + ORDER_NBYTES * needed + part_nbytes * (len(parts) + 1) > room:
            orders, parts = {}, []
            groups.append((orders, parts))
        parts.append((part.size, orders.setdefault(part.order, len(orders)), part.places))
    encoded = []
    for orders, parts in groups:
        masks = [launch.orders[order] for order in orders]
        nbytes = [
            kernel.nbytes[2] if k >= count else kernel.nbytes[mask[3] >> k & 1 if k < MAX_STEPS else 0]
            for mask in masks
            for k in range(count + results)
        ]
        stack = max(stack_depth(mask) for mask in masks)
        encoded.append({
            "device": launch.device, "kernel": kernel.name + ("_large" if large else ""), "large": large,
            "sources": count, "results": results, "stack": stack, "divisor": float(launch.divisor),
            "kind": kernel.kind, "values": kernel.values, "units": kernel.units, "unit_nbytes": nbytes,
            "orders": masks, "parts": parts,
        })  # fmt: skip
    return encoded


def stack_depth(order: tuple[int, int, int, int]) -> int:
    """Return the largest number of values that are on a kernel's stack at once."""
    push, fold, twice, _ = order
    deepest = depth = 1
    for k in range((push | fold).bit_length()):
        depth += push >> k & 1
        deepest = max(deepest, depth)
        depth -= (fold >> k & 1) + (twice >> k & 1)
    return deepest
