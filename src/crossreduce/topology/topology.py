"""``Topology``: devices and directed links, a frozen value that planners read.

Bandwidths are exact (``Fraction``) in GB/s, 1e9 bytes a second, per direction; latencies are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Rational, Real
from typing import NamedTuple

from ..devices import canonical, host_devices
from ..errors import ArgumentError, message, shown
from ..values import read_devices


class Link(NamedTuple):
    """A directed connection. ``bandwidth`` in GB/s, ``latency_s`` in seconds."""

    src: str
    dst: str
    bandwidth: Fraction
    latency_s: Fraction = Fraction(0)


@dataclass(frozen=True)
class Topology:
    """Devices, and the links that data may take between them.

    Args:
      devices: canonical names, in the order of the replicas.
      links: at most one for each ordered pair of devices.
    Raises:
      ArgumentError: no device, a device twice, a link to itself, to an unknown device or of no
        bandwidth, or two links for the same ordered pair.

    >>> Topology.ring(4)
    Topology(4 devices, 8 links: cpu:0, cpu:1, cpu:2, cpu:3)
    """

    devices: tuple[str, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", read_devices(self.devices))
        if not self.devices:
            raise ArgumentError(message("a topology needs at least one device.", "none", 'Topology.ring(["cpu:0"])'))
        try:
            given = [Link(*link) for link in self.links]
        except TypeError as error:
            raise ArgumentError(
                message("links are Links.", shown(self.links), 'Link("cpu:0", "cpu:1", bandwidth=25)')
            ) from error
        links = tuple(
            Link(canonical(src), canonical(dst), _number("bandwidth", bandwidth), _number("latency", latency))
            for src, dst, bandwidth, latency in given
        )
        known, seen = set(self.devices), set()
        for link in links:
            pair = (link.src, link.dst)
            if link.src == link.dst or pair in seen or not known.issuperset(pair) or link.bandwidth == 0:
                raise ArgumentError(
                    message(
                        "a link joins two different devices of the topology, once, with some bandwidth.",
                        f"{link.src} -> {link.dst}, {link.bandwidth} GB/s",
                        "add up the bandwidths of parallel links",
                    )
                )
            seen.add(pair)
        object.__setattr__(self, "links", tuple(sorted(links, key=self._order)))

    @cached_property
    def _hash(self) -> int:
        return hash((self.devices, self.links))

    def __hash__(self) -> int:
        # A topology is a key in the plans' cache: its many links are hashed once.
        return self._hash

    def __reduce__(self) -> tuple[type[Topology], tuple[object, ...]]:
        # Without the cached hash, which is another one in another process.
        return Topology, (self.devices, self.links)

    @classmethod
    def from_matrix(
        cls, gb_per_s: Sequence[Sequence[float | Fraction]], devices: Iterable[str] | None = None
    ) -> Topology:
        """Make a topology from bandwidths in GB/s: row src, column dst; 0 means no link.

        >>> Topology.from_matrix([[0, 25], [25, 0]]).link("cpu:0", "cpu:1").bandwidth
        Fraction(25, 1)
        """
        try:
            rows = [list(row) for row in gb_per_s]
        except TypeError as error:
            raise ArgumentError(
                message("a matrix of bandwidths is a list of rows.", shown(gb_per_s), "[[0, 25], [25, 0]]")
            ) from error
        if any(len(row) != len(rows) for row in rows):
            raise ArgumentError(
                message(
                    "a matrix of bandwidths must be square.",
                    f"{len(rows)} rows of {sorted({len(row) for row in rows})} entries",
                    "one row and one column a device",
                )
            )
        if any(row[i] for i, row in enumerate(rows)):
            raise ArgumentError(
                message("a device needs no link to itself.", "a number on the matrix's diagonal", "0 on the diagonal")
            )
        names = _names(len(rows) if devices is None else devices)
        if len(names) != len(rows):
            raise ArgumentError(
                message("the matrix needs one row a device.", f"{len(rows)} rows, {len(names)} devices")
            )
        links = [
            Link(names[i], names[j], bandwidth)
            for i, row in enumerate(rows)
            for j, entry in enumerate(row)
            if (bandwidth := _number("bandwidth", entry))
        ]
        return cls(names, tuple(links))

    @classmethod
    def full_mesh(cls, devices: int | Iterable[str], gb_per_s: float | Fraction = 1) -> Topology:
        """Make a topology with an equal link between every two devices, both ways.

        >>> len(Topology.full_mesh(3).links)
        6
        """
        names = _names(devices)
        bandwidth = _number("bandwidth", gb_per_s)
        return cls(names, tuple(Link(a, b, bandwidth) for a in names for b in names if a != b))

    @classmethod
    def ring(cls, devices: int | Iterable[str], gb_per_s: float | Fraction = 1) -> Topology:
        """Make a topology in which each device has a link to the next and to the one before.

        >>> [f"{link.src}-{link.dst}" for link in Topology.ring(2).links]
        ['cpu:0-cpu:1', 'cpu:1-cpu:0']
        """
        names = _names(devices)
        bandwidth = _number("bandwidth", gb_per_s)
        around = {(names[i], names[(i + 1) % len(names)]) for i in range(len(names))} if len(names) > 1 else set()
        pairs = sorted(around | {(b, a) for a, b in around})
        return cls(names, tuple(Link(a, b, bandwidth) for a, b in pairs))

    def subset(self, devices: Iterable[str]) -> Topology:
        """Return the topology of some of the devices and the links among them, in the given order."""
        names = read_devices(devices)
        self._require(names)
        return Topology(names, tuple(link for link in self.links if {link.src, link.dst} <= set(names)))

    def without_link(self, a: str, b: str) -> Topology:
        """Return the topology without the links between ``a`` and ``b``, in both directions."""
        pair = {canonical(a), canonical(b)}
        self._require(tuple(pair))
        left = tuple(link for link in self.links if {link.src, link.dst} != pair)
        if len(left) == len(self.links):
            raise ArgumentError(message("there is no such link.", f"{a} - {b}", self._neighbours(canonical(a))))
        return Topology(self.devices, left)

    def renamed(self, devices: Sequence[str]) -> Topology:
        """Return the same wiring with other names: the i-th device is called ``devices[i]``."""
        if len(devices) != len(self.devices):
            raise ArgumentError(
                message("each device needs a name.", f"{len(devices)} names, {len(self.devices)} devices", repr(self))
            )
        names = dict(zip(self.devices, devices, strict=True))
        links = tuple(link._replace(src=names[link.src], dst=names[link.dst]) for link in self.links)
        return Topology(tuple(devices), links)

    def link(self, src: str, dst: str) -> Link | None:
        """Return the link from ``src`` to ``dst``, or ``None`` where there is none."""
        return self._by_pair.get((canonical(src), canonical(dst)))

    @cached_property
    def islands(self) -> tuple[tuple[str, ...], ...]:
        """The groups of devices that the fastest links join, where there is more than one group.

        Devices are in one island when a path of links of the greatest bandwidth joins them. A
        topology whose links are all alike, or whose fastest links join everything, is one island.

        >>> slow, fast = 1, 10
        >>> Topology.from_matrix([[0, 10, 1, 1], [10, 0, 1, 1], [1, 1, 0, 10], [1, 1, 10, 0]]).islands
        (('cpu:0', 'cpu:1'), ('cpu:2', 'cpu:3'))
        """
        fastest = max((link.bandwidth for link in self.links), default=Fraction(0))
        leader = {device: device for device in self.devices}

        def find(device: str) -> str:
            while leader[device] != device:
                device = leader[device]
            return device

        for link in self.links:
            if link.bandwidth == fastest:
                leader[find(link.dst)] = find(link.src)
        groups: dict[str, list[str]] = {}
        for device in self.devices:
            groups.setdefault(find(device), []).append(device)
        return tuple(tuple(group) for group in groups.values())

    @cached_property
    def _by_pair(self) -> dict[tuple[str, str], Link]:
        return {(link.src, link.dst): link for link in self.links}

    def _order(self, link: Link) -> tuple[int, int]:
        return self.devices.index(link.src), self.devices.index(link.dst)

    def _require(self, names: tuple[str, ...]) -> None:
        missing = [name for name in names if name not in self.devices]
        if missing:
            raise ArgumentError(
                message("the topology has no such device.", ", ".join(missing), "one of " + ", ".join(self.devices))
            )

    def _neighbours(self, device: str) -> str:
        return f"links out of {device}: " + ", ".join(link.dst for link in self.links if link.src == device)

    def __repr__(self) -> str:
        return f"Topology({len(self.devices)} devices, {len(self.links)} links: {', '.join(self.devices)})"


def _names(devices: int | Iterable[str]) -> tuple[str, ...]:
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            raise ArgumentError(message("a topology needs at least one device.", shown(devices), "1 or more"))
        return host_devices(devices)
    return read_devices(devices)  # type: ignore[arg-type]


def _number(what: str, value: object) -> Fraction:
    if isinstance(value, Rational) and not isinstance(value, bool):
        exact = Fraction(int(value.numerator), int(value.denominator))
        if exact >= 0:
            return exact
    if isinstance(value, Real) and not isinstance(value, Rational) and math.isfinite(value) and float(value) >= 0:
        return Fraction(float(value))
    units = {"bandwidth": "GB/s", "latency": "seconds"}
    raise ArgumentError(message(f"a {what} is a number of {units[what]}, 0 or more.", shown(value), "25"))
