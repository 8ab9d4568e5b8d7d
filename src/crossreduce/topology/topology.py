"""``Topology``: devices, switches and directed links, a frozen value that planners read.

Bandwidths are exact (``Fraction``) in GB/s, 1e9 bytes a second, per direction; latencies are seconds.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Rational, Real
from typing import Any, Final, NamedTuple

from ..devices import canonical
from ..errors import ArgumentError, message, shown
from ..values import host_devices, read_devices

FORMAT: Final = "crossreduce.topology/1"
_MOST: Final = 10**12  # what a float can still count with, in GB/s or seconds
_LEAST: Final = Fraction(1, _MOST)
_SHOWN: Final = 16  # devices in a topology's repr
_SWITCH: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/#-]*")  # no colon: it cannot be taken for a device


class Switch(NamedTuple):
    """A node that passes data on and holds none. ``reduces``: it can also combine what arrives and
    send it to several links at once, as NVLink SHARP (NVLS) and InfiniBand SHARP do."""

    name: str
    reduces: bool = False


class Link(NamedTuple):
    """A directed connection. ``bandwidth`` in GB/s, ``latency_s`` in seconds."""

    src: str
    dst: str
    bandwidth: Fraction
    latency_s: Fraction = Fraction(0)


@dataclass(frozen=True)
class Topology:
    """Devices, switches, and the links that data may take between them.

    Args:
      devices: canonical names, in the order of the replicas.
      links: at most one for each ordered pair of nodes.
      switches: nodes that hold no data: ``Switch``es, or names of plain ones.
    Raises:
      ArgumentError: no device, a device or switch twice, a switch that is spelled like a device, a link
        to itself, to an unknown node or of no bandwidth, or two links for the same ordered pair.

    >>> Topology.ring(4)
    Topology(4 devices, 8 links: cpu:0, cpu:1, cpu:2, cpu:3)
    >>> Topology(["cuda:0", "cuda:1"], [("cuda:0", "bus", 12), ("bus", "cuda:1", 12)], ["bus"])
    Topology(2 devices, 1 switch, 2 links: cuda:0, cuda:1)
    """

    devices: tuple[str, ...]
    links: tuple[Link, ...]
    switches: tuple[Switch, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", read_devices(self.devices))
        if not self.devices:
            raise ArgumentError(message("a topology needs at least one device.", "none", 'Topology.ring(["cpu:0"])'))
        object.__setattr__(self, "switches", _switches(self.switches))
        try:
            given = [Link(*link) for link in self.links]
        except TypeError as error:
            raise ArgumentError(
                message("links are Links.", shown(self.links), 'Link("cpu:0", "cpu:1", bandwidth=25)')
            ) from error
        links = tuple(
            Link(self._node(src), self._node(dst), _number("bandwidth", bandwidth), _number("latency", latency))
            for src, dst, bandwidth, latency in given
        )
        seen = set()
        for link in links:
            pair = (link.src, link.dst)
            if link.src == link.dst or pair in seen or not self._order.keys() >= set(pair) or link.bandwidth == 0:
                raise ArgumentError(
                    message(
                        "a link joins two different nodes of the topology, once, with some bandwidth.",
                        f"{link.src} -> {link.dst}, {link.bandwidth} GB/s",
                        "add up the bandwidths of parallel links",
                    )
                )
            seen.add(pair)
        links = tuple(sorted(links, key=lambda link: (self._order[link.src], self._order[link.dst])))
        object.__setattr__(self, "links", links)

    @cached_property
    def _hash(self) -> int:
        return hash((self.devices, self.links, self.switches))

    def __hash__(self) -> int:
        # A topology is a key in the plans' cache: its many links are hashed once.
        return self._hash

    def __reduce__(self) -> tuple[type[Topology], tuple[object, ...]]:
        # Without the cached hash, which is another one in another process.
        return Topology, (self.devices, self.links, self.switches)

    @classmethod
    def from_matrix(
        cls,
        gb_per_s: Sequence[Sequence[float | Fraction]],
        devices: Iterable[str] | None = None,
        latency_s: float | Fraction = 0,
    ) -> Topology:
        """Make a topology from bandwidths in GB/s: row src, column dst; 0 means no link.

        Every link has the same latency, in seconds; so has it in the makers below.

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
        if any(_number("bandwidth", row[i]) for i, row in enumerate(rows)):
            raise ArgumentError(
                message("a device needs no link to itself.", "a number on the matrix's diagonal", "0 on the diagonal")
            )
        names = _names(len(rows) if devices is None else devices)
        latency = _number("latency", latency_s)
        if len(names) != len(rows):
            raise ArgumentError(
                message("the matrix needs one row a device.", f"{len(rows)} rows, {len(names)} devices")
            )
        links = [
            Link(names[i], names[j], bandwidth, latency)
            for i, row in enumerate(rows)
            for j, entry in enumerate(row)
            if (bandwidth := _number("bandwidth", entry))
        ]
        return cls(names, tuple(links))

    @classmethod
    def full_mesh(
        cls, devices: int | Iterable[str], gb_per_s: float | Fraction = 1, latency_s: float | Fraction = 0
    ) -> Topology:
        """Make a topology with an equal link between every two devices, both ways.

        >>> len(Topology.full_mesh(3).links)
        6
        """
        names = _names(devices)
        return cls._both_ways(names, ((a, b, gb_per_s) for a in names for b in names if a < b), latency_s)

    @classmethod
    def ring(
        cls, devices: int | Iterable[str], gb_per_s: float | Fraction = 1, latency_s: float | Fraction = 0
    ) -> Topology:
        """Make a topology in which each device has a link to the next and to the one before.

        >>> [f"{link.src}-{link.dst}" for link in Topology.ring(2).links]
        ['cpu:0-cpu:1', 'cpu:1-cpu:0']
        """
        names = _names(devices)
        around = {frozenset((names[i - 1], names[i])) for i in range(len(names))} if len(names) > 1 else set()
        return cls._both_ways(names, ((a, b, gb_per_s) for a, b in map(sorted, around)), latency_s)

    @classmethod
    def mesh(
        cls,
        rows: int,
        columns: int,
        gb_per_s: float | Fraction | tuple[float | Fraction, float | Fraction] = 1,
        latency_s: float | Fraction = 0,
    ) -> Topology:
        """Make a grid of ``rows`` x ``columns`` devices, row by row, each linked to its neighbours.

        Args:
          gb_per_s: of all links; or a pair: of those along the rows, and of those along the columns.

        >>> [len(Topology.mesh(2, 3).links), Topology.mesh(2, 2, (50, 25)).link("cpu:0", "cpu:2").bandwidth]
        [14, Fraction(25, 1)]
        """
        return cls._grid((rows, columns), gb_per_s, latency_s, wraps=False)

    @classmethod
    def torus(
        cls,
        *shape: int,
        gb_per_s: float | Fraction | tuple[float | Fraction, ...] = 1,
        latency_s: float | Fraction = 0,
    ) -> Topology:
        """Make a torus of any number of dimensions: a grid whose ends are joined.

        A dimension of two devices has one link between them, not two.

        Args:
          shape: devices along each dimension; the last varies fastest.
          gb_per_s: of all links; or one number a dimension, the last dimension's first.

        >>> [len(Topology.torus(4, 4, 4).links), len(Topology.torus(2, 3).links)]
        [384, 18]
        """
        return cls._grid(shape, gb_per_s, latency_s, wraps=True)

    @classmethod
    def star(
        cls, devices: int | Iterable[str], gb_per_s: float | Fraction = 1, latency_s: float | Fraction = 0
    ) -> Topology:
        """Make a topology of devices around one switch, "switch", with one link each way between it and each.

        >>> Topology.star(8, 450).route("cpu:0", "cpu:5")
        ('cpu:0', 'switch', 'cpu:5')
        """
        names = _names(devices)
        return cls._both_ways(names, ((name, "switch", gb_per_s) for name in names), latency_s, ("switch",))

    @classmethod
    def _both_ways(
        cls,
        names: tuple[str, ...],
        pairs: Iterable[tuple[str, str, Any]],
        latency_s: float | Fraction,
        switches: tuple[str, ...] = (),
    ) -> Topology:
        latency = _number("latency", latency_s)
        links = []
        for a, b, gb_per_s in pairs:
            bandwidth = _number("bandwidth", gb_per_s)
            links += [Link(a, b, bandwidth, latency), Link(b, a, bandwidth, latency)]
        return cls(names, tuple(links), switches)  # type: ignore[arg-type]

    @classmethod
    def _grid(cls, shape: Sequence[int], gb_per_s: Any, latency_s: float | Fraction, *, wraps: bool) -> Topology:
        if not shape or not all(type(length) is int and length >= 1 for length in shape):
            raise ArgumentError(message("a grid has 1 or more devices along each dimension.", shown(shape), "4, 4"))
        speeds = list(gb_per_s) if isinstance(gb_per_s, (tuple, list)) else [gb_per_s] * len(shape)
        if len(speeds) != len(shape):
            given = f"{len(speeds)} speeds, {len(shape)} dimensions"
            raise ArgumentError(message("a grid has one speed, or one a dimension.", given, "gb_per_s=25"))
        names = host_devices(math.prod(shape))
        pairs: dict[frozenset[str], tuple[str, str, Any]] = {}
        stride = 1
        for length, speed in zip(reversed(shape), speeds, strict=True):
            for here, name in enumerate(names):
                place = here // stride % length
                if place + 1 < length or (wraps and length > 1):
                    there = names[here + ((place + 1) % length - place) * stride]
                    pairs.setdefault(frozenset((name, there)), (name, there, speed))
            stride *= length
        return cls._both_ways(names, pairs.values(), latency_s)

    @classmethod
    def machine(
        cls,
        name: str,
        hosts: int = 1,
        *,
        speeds: str = "raw",
        nics: str | None = None,
        in_network: bool = False,
    ) -> Topology:
        """Return a machine of the library, or several of them and the network between.

        Args:
          name: a name or alias such as "dgx-1v", "hgx-h100", "mi300x"; ``crossreduce topology`` lists them.
          hosts: how many boxes, joined by their network cards.
          speeds: "raw": what the links are built for, for bounds; "effective": what NCCL and RCCL count
            on, for predictions.
          nics: which of the machine's networks joins the hosts; ``None``: the one that the name stands for ("ndv2"
            is a DGX-1V with another card).
          in_network: whether its switches combine and multicast in the network, where they can (NVLS, SHARP).
        Raises:
          ArgumentError: no such machine (the nearest names are shown), network or speeds.

        >>> Topology.machine("dgx-1v")
        Topology(8 devices, 32 links: cuda:0, cuda:1, cuda:2, cuda:3, cuda:4, cuda:5, cuda:6, cuda:7)
        """
        from .machines import machine

        return machine(name, hosts, speeds=speeds, nics=nics, in_network=in_network)

    @classmethod
    def load(cls, path: Any) -> Topology:
        """Read a topology from a file: our JSON, NCCL's topology XML, or the text of ``nvidia-smi topo -m``.

        Raises:
          ArgumentError: a file of no such kind, malformed or truncated, or one that lacks devices or links.
          OSError: it cannot be read.
        """
        from .formats import load

        return load(path)

    @classmethod
    def discover(cls) -> Topology:
        """Return the topology of this machine: its GPUs where NVML sees any, else its memory's NUMA nodes."""
        from .discover import discover

        return discover()

    def subset(self, devices: Iterable[str]) -> Topology:
        """Return the topology of some of the devices, in the given order, all switches, and the links among them."""
        names = read_devices(devices)
        self._require(names)
        kept = {*names, *(switch.name for switch in self.switches)}
        return Topology(names, tuple(link for link in self.links if {link.src, link.dst} <= kept), self.switches)

    def members(self, devices: Iterable[str]) -> tuple[str, ...]:
        """Return devices of the topology by their one spelling, each once."""
        names = read_devices(devices)
        self._require(names)
        if not names or not set(names) <= set(self.devices):
            raise ArgumentError(message("at least one device, and no switch, must be named.", shown(devices)))
        return names

    def without_link(self, a: str, b: str) -> Topology:
        """Return the topology without the links between ``a`` and ``b``, in both directions; either may be a switch."""
        pair = {self._node(a), self._node(b)}
        self._require(tuple(pair))
        left = tuple(link for link in self.links if {link.src, link.dst} != pair)
        if len(left) == len(self.links):
            raise ArgumentError(message("there is no such link.", f"{a} - {b}", self._neighbours(self._node(a))))
        return Topology(self.devices, left, self.switches)

    def with_switches(self, *, reducing: bool) -> Topology:
        """Return the same wiring, with switches that all combine and multicast in the network, or none of which does.

        >>> Topology.star(4).with_switches(reducing=True).switches
        (Switch(name='switch', reduces=True),)
        """
        return Topology(self.devices, self.links, tuple(Switch(switch.name, reducing) for switch in self.switches))

    def renamed(self, devices: Sequence[str]) -> Topology:
        """Return the same wiring with other names: the i-th device is called ``devices[i]``."""
        devices = read_devices(devices)
        if len(devices) != len(self.devices):
            raise ArgumentError(
                message("each device needs a name.", f"{len(devices)} names, {len(self.devices)} devices", repr(self))
            )
        names = dict(zip(self.devices, devices, strict=True))
        names.update((switch.name, switch.name) for switch in self.switches)
        links = tuple(link._replace(src=names[link.src], dst=names[link.dst]) for link in self.links)
        return Topology(tuple(devices), links, self.switches)

    def link(self, src: str, dst: str) -> Link | None:
        """Return the link from ``src`` to ``dst``, devices or switches, or ``None`` where there is none."""
        return self._by_pair.get((self._node(src), self._node(dst)))

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """All devices, then all switches."""
        return (*self.devices, *(switch.name for switch in self.switches))

    def __contains__(self, node: object) -> bool:
        """Whether there is a device or switch of exactly this name."""
        return node in self._order

    def route(self, src: str, dst: str) -> tuple[str, ...] | None:
        """Return the nodes on the way data takes from ``src`` to ``dst`` where a schedule names none.

        The way through the fewest devices, then over the fewest links, then of the greatest bandwidth; of several
        such always the same. ``None``: there is no way.

        >>> Topology.ring(5).route("cpu:0", "cpu:2")
        ('cpu:0', 'cpu:1', 'cpu:2')
        """
        src, dst = self._node(src), self._node(dst)
        self._require((src, dst))
        if (src, dst) in self._by_pair:
            return src, dst
        return self._routes_from(src).get(dst)

    def _routes_from(self, src: str) -> dict[str, tuple[str, ...]]:
        if src in self._routes:
            return self._routes[src]
        ways: dict[str, tuple[str, ...]] = {}
        # Devices passed through, links, minus the bottleneck, the nodes' numbers: the least of these first.
        start = (0, 0, -math.inf, (self._order[src],))
        queue: list[tuple[int, int, Fraction | float, tuple[int, ...]]] = [start]
        while queue:
            through, hops, narrow, numbers = heapq.heappop(queue)
            here = self.nodes[numbers[-1]]
            if here in ways:
                continue
            ways[here] = tuple(self.nodes[number] for number in numbers)
            through += here != src and numbers[-1] < len(self.devices)
            for link in self._by_src.get(here, ()):
                if link.dst not in ways:
                    way = (*numbers, self._order[link.dst])
                    heapq.heappush(queue, (through, hops + 1, max(narrow, -link.bandwidth), way))
        self._routes[src] = ways
        return ways

    def out_links(self, node: str) -> tuple[Link, ...]:
        """Return the links that leave a device or switch."""
        return self._by_src.get(self._node(node), ())

    def reversed(self) -> Topology:
        """Return the topology with every link turned round."""
        turned = (link._replace(src=link.dst, dst=link.src) for link in self.links)
        return Topology(self.devices, tuple(turned), self.switches)

    @cached_property
    def symmetric(self) -> bool:
        """Whether every link has one of the same bandwidth the other way."""
        return all(
            (back := self._by_pair.get((dst, src))) is not None and back.bandwidth == bandwidth
            for src, dst, bandwidth, _ in self.links
        )

    @cached_property
    def _routes(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {}

    @cached_property
    def _by_src(self) -> dict[str, tuple[Link, ...]]:
        out: dict[str, list[Link]] = {}
        for link in self.links:
            out.setdefault(link.src, []).append(link)
        return {src: tuple(links) for src, links in out.items()}

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
        leader = {node: node for node in self.nodes}

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

    @cached_property
    def _order(self) -> dict[str, int]:
        return {node: number for number, node in enumerate(self.nodes)}

    def _node(self, name: str) -> str:
        """Return a switch's name as it is, and a device's in its one spelling."""
        return name if isinstance(name, str) and _SWITCH.fullmatch(name) and name in self._order else canonical(name)

    def _require(self, names: tuple[str, ...]) -> None:
        missing = [name for name in names if name not in self._order]
        if missing:
            raise ArgumentError(
                message("the topology has no such device.", ", ".join(missing), "one of " + ", ".join(self.nodes))
            )

    def _neighbours(self, device: str) -> str:
        return f"links out of {device}: " + ", ".join(link.dst for link in self.links if link.src == device)

    def __repr__(self) -> str:
        count = len(self.switches)
        switches = f"{count} switch{'es' if count > 1 else ''}, " if count else ""
        names = ", ".join(self.devices[:_SHOWN]) + ", ..." * (len(self.devices) > _SHOWN)
        return f"Topology({len(self.devices)} devices, {switches}{len(self.links)} links: {names})"

    def to_json(self) -> str:
        """Return the topology as JSON text; equal topologies give the same bytes.

        Links are [src, dst, bandwidth in GB/s, latency in seconds], numbers exact, as text such as "64/3".
        """
        content = {
            "format": FORMAT,
            "devices": self.devices,
            "switches": self.switches,
            "links": [[src, dst, str(bandwidth), str(latency)] for src, dst, bandwidth, latency in self.links],
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Read a topology back from ``to_json``'s text; numbers may also be JSON's own.

        Raises:
          ArgumentError: the text is no JSON, of another format, or lacks a part.
        """
        try:
            read: dict[str, Any] = json.loads(text)
            if read["format"] != FORMAT:
                raise KeyError(read["format"])  # noqa: TRY301 - one handler says what every fault means
            switches = [
                Switch(_text(name), _flag(reduces)) for name, reduces in map(_list, _list(read.get("switches", [])))
            ]
            links = [
                Link(_text(src), _text(dst), _exact("bandwidth", bandwidth), *(_exact("latency", s) for s in latency))
                for src, dst, bandwidth, *latency in map(_list, _list(read["links"]))
            ]
            return cls(tuple(map(_text, _list(read["devices"]))), tuple(links), tuple(switches))
        except ArgumentError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ArgumentError(
                message(f"this is no topology in JSON: {error!r}.", shown(text), f'text of format "{FORMAT}"')
            ) from error


def _names(devices: int | Iterable[str]) -> tuple[str, ...]:
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            raise ArgumentError(message("a topology needs at least one device.", shown(devices), "1 or more"))
        return host_devices(devices)
    return read_devices(devices)  # type: ignore[arg-type]


def _number(what: str, value: object) -> Fraction:
    """Return a bandwidth or latency exactly; a float as it is written, so that 0.1 is 1/10."""
    exact = Fraction(-1)
    if isinstance(value, Rational) and not isinstance(value, bool):
        exact = Fraction(int(value.numerator), int(value.denominator))
    elif isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        exact = Fraction(repr(float(value)))
    if exact == 0 or _LEAST <= exact <= _MOST:
        return exact
    units = {"bandwidth": "GB/s", "latency": "seconds"}
    problem = f"a {what} is a number of {units[what]}, 0 or more, up to {_MOST}."
    raise ArgumentError(message(problem, shown(value), "25" if what == "bandwidth" else "1e-6"))


def _switches(given: Iterable[Switch | str]) -> tuple[Switch, ...]:
    try:
        if isinstance(given, str):
            raise TypeError(given)  # noqa: TRY301 - its letters would be switches
        switches = tuple(Switch(entry) if isinstance(entry, str) else Switch(*entry) for entry in given)
    except TypeError as error:
        raise ArgumentError(message("switches are Switches or names.", shown(given), 'Switch("nvswitch")')) from error
    count = Counter(switch.name for switch in switches if isinstance(switch.name, str))
    for name, reduces in switches:
        if not isinstance(name, str) or not _SWITCH.fullmatch(name) or _is_device(name) or count[name] > 1:
            problem = "a switch has a name of its own, of letters, digits, . _ / # -, that is no device's."
            raise ArgumentError(message(problem, shown(name), '"nvswitch", "host0/nic3"'))
        if not isinstance(reduces, bool):
            raise ArgumentError(message("a switch reduces or does not.", shown(reduces), f"Switch({name!r}, True)"))
    return switches


def _is_device(name: str) -> bool:
    try:
        canonical(name)
    except ArgumentError:
        return False
    return True


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _exact(what: str, value: object) -> Fraction:
    """Read a number of a file: text such as "64/3" or "12.5", or JSON's own."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(what, value)
    if not re.fullmatch(r"[0-9]{1,40}(/[0-9]{1,40}|\.[0-9]{1,40})?", _text(value)):  # "1e99999999" would take hours
        raise ValueError(f"{value!r} is no number of 0 or more")
    return Fraction(_text(value))
