"""Regular topologies: meshes, rings, grids, tori, stars, and matrices of bandwidths, with one latency for all links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from ..errors import ArgumentError, shown
from ..values import host_devices, read_devices
from .links import Link, Wiring, both_ways, exact

Number = float | Fraction


def matrix(gb_per_s: Sequence[Sequence[Number]], devices: Iterable[str] | None, latency_s: Number) -> Wiring:
    """Return the wiring of a matrix of bandwidths: see ``Topology.from_matrix``."""
    try:
        rows = [list(row) for row in gb_per_s]
    except TypeError as error:
        problem = "a matrix of bandwidths must be a list of rows."
        raise ArgumentError.of(problem, shown(gb_per_s), "[[0, 25], [25, 0]]") from error
    if any(len(row) != len(rows) for row in rows):
        given = f"{len(rows)} rows, whose lengths are {sorted({len(row) for row in rows})}"
        problem = "a matrix of bandwidths must be square."
        raise ArgumentError.of(problem, given, "one row and one column for each device")
    for i, row in enumerate(rows):
        if exact("bandwidth", row[i]):
            problem = "a device must not have a link to itself."
            raise ArgumentError.of(problem, f"{row[i]} in row {i}, column {i}", "0 on the matrix's diagonal")
    names = _names(len(rows) if devices is None else devices)
    latency = exact("latency", latency_s)
    if len(names) != len(rows):
        given = f"{len(rows)} rows, {len(names)} devices"
        raise ArgumentError.of("the matrix needs one row for each device.", given)
    links = [
        Link(names[i], names[j], bandwidth, latency)
        for i, row in enumerate(rows)
        for j, entry in enumerate(row)
        if (bandwidth := exact("bandwidth", entry))
    ]
    return Wiring(names, tuple(links))


def full_mesh(devices: int | Iterable[str], gb_per_s: Number = 1, latency_s: Number = 0) -> Wiring:
    """Return the wiring of a full mesh: see ``Topology.full_mesh``."""
    names = _names(devices)
    return _two_way_wiring(names, ((a, b, gb_per_s) for a in names for b in names if a < b), latency_s)


def ring(devices: int | Iterable[str], gb_per_s: Number = 1, latency_s: Number = 0) -> Wiring:
    """Return the wiring of a ring: see ``Topology.ring``."""
    names = _names(devices)
    pairs = {frozenset((names[i - 1], names[i])) for i in range(len(names))} if len(names) > 1 else set()
    return _two_way_wiring(names, ((a, b, gb_per_s) for a, b in map(sorted, pairs)), latency_s)


def star(devices: int | Iterable[str], gb_per_s: Number = 1, latency_s: Number = 0) -> Wiring:
    """Return the wiring of devices around one switch: see ``Topology.star``."""
    names = _names(devices)
    return _two_way_wiring(names, ((name, "switch", gb_per_s) for name in names), latency_s, ("switch",))


def grid(shape: Sequence[int], gb_per_s: Any, latency_s: Number, *, wraps: bool) -> Wiring:
    """Return the wiring of a grid: see ``Topology.mesh`` (``wraps=False``) and ``Topology.torus`` (``True``)."""
    if not shape or not all(type(length) is int and length >= 1 for length in shape):
        raise ArgumentError.of("a grid needs one or more lengths, each an int of at least 1.", shown(shape), "4, 4")
    speeds = list(gb_per_s) if isinstance(gb_per_s, (tuple, list)) else [gb_per_s] * len(shape)
    if len(speeds) != len(shape):
        given = f"{len(speeds)} speeds, {len(shape)} dimensions"
        raise ArgumentError.of("a grid needs one speed, or one for each dimension.", given, "gb_per_s=25")
    names = host_devices(math.prod(shape))
    pairs: dict[frozenset[str], tuple[str, str, Any]] = {}
    stride = 1
    for length, speed in zip(reversed(shape), speeds, strict=True):
        for number, name in enumerate(names):
            coordinate = number // stride % length
            if coordinate + 1 < length or (wraps and length > 1):
                neighbour = names[number + ((coordinate + 1) % length - coordinate) * stride]
                pairs.setdefault(frozenset((name, neighbour)), (name, neighbour, speed))
        stride *= length
    return _two_way_wiring(names, pairs.values(), latency_s)


def _two_way_wiring(
    names: tuple[str, ...], pairs: Iterable[tuple[str, str, Any]], latency_s: Number, switches: tuple[str, ...] = ()
) -> Wiring:
    """Return the wiring with links in both directions between the two nodes of each (node, node, GB/s)."""
    latency = exact("latency", latency_s)
    links = [link for a, b, speed in pairs for link in both_ways(a, b, exact("bandwidth", speed), latency)]
    return Wiring(names, tuple(links), switches)


def _names(devices: int | Iterable[str]) -> tuple[str, ...]:
    """Return the canonical names of listed devices, or for a number of devices "cpu:0", "cpu:1", ..."""
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            raise ArgumentError.of("a topology needs at least one device.", shown(devices), "1 or more")
        return host_devices(devices)
    return read_devices(devices)  # type: ignore[arg-type]
