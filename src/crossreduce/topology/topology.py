"""``Topology``: devices, switches and directed links, a frozen value that planners read.

Bandwidths are exact (``Fraction``) in GB/s, 1e9 bytes per second, per direction; latencies are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import lcm
from operator import attrgetter, index
from typing import Any, Final, SupportsIndex

from ..devices import canonical
from ..errors import ArgumentError, DeviceError, shown
from ..values import read_devices
from . import shapes
from .formats.json_format import read_json, write_json
from .links import Link, Switch, Wiring, exact, read_switches
from .routes import RoutesFrom, groups
from .shapes import Number

Names = tuple[str, ...]
_SHOWN: Final = 16  # devices in a topology's repr


@dataclass(frozen=True)
class Topology:
    """Devices, switches, and the links between them.

    Args:
      devices: canonical names, in the order of the replicas.
      links: at most one for each ordered pair of nodes.
      switches: nodes that store no data: ``Switch``es, or the names of switches that do not reduce.
      assumed: what the source of the topology does not state, in words, such as "18 NVLinks of 25 GB/s each". Plans and
        bounds list it. Topologies that differ only in this are equal.
    Raises:
      ArgumentError: ``devices`` is empty; a device or switch is listed twice; a device and a switch have the same name;
        a link connects a node with itself or with an unknown node; the bandwidth of a link is 0; or two links have the
        same source and destination.

    >>> Topology.ring(4)
    Topology(4 devices, 8 links: cpu:0, cpu:1, cpu:2, cpu:3)
    >>> Topology(["cuda:0", "cuda:1"], [("cuda:0", "bus", 12), ("bus", "cuda:1", 12)], ["bus"])
    Topology(2 devices, 1 switch, 2 links: cuda:0, cuda:1)
    """

    devices: tuple[str, ...]
    links: tuple[Link, ...]
    switches: tuple[Switch, ...] = ()
    assumed: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", read_devices(self.devices))
        if not self.devices:
            raise ArgumentError.of("a topology needs at least one device.", "none", 'Topology.ring(["cpu:0"])')
        object.__setattr__(self, "switches", read_switches(self.switches))
        entry: Any = self.links
        listed = []
        try:
            for entry in self.links:
                listed.append(Link(*entry))
        except TypeError as error:
            problem = "links must be a list of Links, or of tuples of the same fields."
            raise ArgumentError.of(problem, shown(entry), '[Link("cpu:0", "cpu:1", bandwidth=25)]') from error
        links = [
            Link(self.node(src), self.node(dst), exact("bandwidth", bandwidth), exact("latency", latency))
            for src, dst, bandwidth, latency in listed
        ]
        seen = set()
        for link in links:
            pair = (link.src, link.dst)
            problem = remedy = ""
            if link.src == link.dst:
                problem, remedy = "a link must join two different nodes.", "omit this link"
            elif not self._order.keys() >= set(pair):
                problem, remedy = "a link must join nodes of the topology.", "list both in devices or switches"
            elif link.bandwidth == 0:
                problem, remedy = "a link must have a bandwidth above 0.", "omit this link"
            elif pair in seen:
                problem, remedy = "a link may appear only once.", "one link with the sum of the bandwidths"
            if problem:
                raise ArgumentError.of(problem, f"{link.src} -> {link.dst}, {link.bandwidth} GB/s", remedy)
            seen.add(pair)
        object.__setattr__(self, "links", self._sorted(links))

    @classmethod
    def unchecked(
        cls, devices: Names, links: Iterable[Link], switches: tuple[Switch, ...] = (), assumed: Names = ()
    ) -> Topology:
        """Return a topology of valid devices, links and switches with canonical names. Nothing is checked."""
        topology = object.__new__(cls)
        topology.__dict__.update(devices=devices, switches=switches, assumed=assumed)
        topology.__dict__["links"] = topology._sorted(links)
        return topology

    def _sorted(self, links: Iterable[Link]) -> tuple[Link, ...]:
        return tuple(sorted(links, key=lambda link: (self._order[link.src], self._order[link.dst])))

    @cached_property
    def _hash(self) -> int:
        return hash((self.devices, self.links, self.switches))

    def __hash__(self) -> int:
        return self._hash  # computed once, since a topology is a key of caches

    def __reduce__(self) -> tuple[type[Topology], tuple[object, ...]]:
        # Pickles do not contain the cached hash, which differs between processes.
        return Topology, (self.devices, self.links, self.switches, self.assumed)

    @classmethod
    def from_matrix(
        cls, gb_per_s: Sequence[Sequence[Number]], devices: Iterable[str] | None = None, latency_s: Number = 0
    ) -> Topology:
        """Return a topology with the given bandwidths in GB/s. Rows are sources, columns destinations; 0 means no link.

        All links have the same latency, in seconds, as in the methods from ``full_mesh`` to ``star``.

        >>> Topology.from_matrix([[0, 25], [25, 0]]).link("cpu:0", "cpu:1").bandwidth
        Fraction(25, 1)
        """
        return cls(*shapes.matrix(gb_per_s, devices, latency_s))

    @classmethod
    def full_mesh(cls, devices: int | Iterable[str], gb_per_s: Number = 1, latency_s: Number = 0) -> Topology:
        """Return a topology with an equal link between every two devices, in both directions.

        >>> len(Topology.full_mesh(3).links)
        6
        """
        return cls(*shapes.full_mesh(devices, gb_per_s, latency_s))

    @classmethod
    def ring(cls, devices: int | Iterable[str], gb_per_s: Number = 1, latency_s: Number = 0) -> Topology:
        """Return a topology in which each device has a link to the next device and to the previous one.

        >>> [f"{link.src}-{link.dst}" for link in Topology.ring(2).links]
        ['cpu:0-cpu:1', 'cpu:1-cpu:0']
        """
        return cls(*shapes.ring(devices, gb_per_s, latency_s))

    @classmethod
    def mesh(
        cls, rows: int, columns: int, gb_per_s: Number | tuple[Number, Number] = 1, latency_s: Number = 0
    ) -> Topology:
        """Return a grid of ``rows`` x ``columns`` devices, row by row, each linked to its neighbours.

        Args:
          rows: number of rows.
          columns: number of columns.
          gb_per_s: the bandwidth of all links, or a pair: that of links along the rows, and that of links along the
            columns.
          latency_s: the latency of all links.

        >>> [len(Topology.mesh(2, 3).links), Topology.mesh(2, 2, (50, 25)).link("cpu:0", "cpu:2").bandwidth]
        [14, Fraction(25, 1)]
        """
        return cls(*shapes.grid((rows, columns), gb_per_s, latency_s, wraps=False))

    @classmethod
    def torus(cls, *shape: int, gb_per_s: Number | tuple[Number, ...] = 1, latency_s: Number = 0) -> Topology:
        """Return a torus of any number of dimensions: a grid whose ends are linked.

        A dimension of two devices has one link between them per direction, not two.

        Args:
          shape: devices along each dimension; the last varies fastest.
          gb_per_s: the bandwidth of all links, or one number for each dimension, starting with the last dimension.
          latency_s: the latency of all links.

        >>> [len(Topology.torus(4, 4, 4).links), len(Topology.torus(2, 3).links)]
        [384, 18]
        """
        return cls(*shapes.grid(shape, gb_per_s, latency_s, wraps=True))

    @classmethod
    def star(cls, devices: int | Iterable[str], gb_per_s: Number = 1, latency_s: Number = 0) -> Topology:
        """Return a topology of devices around one switch, "switch", with one link per direction to each device.

        >>> Topology.star(8, 450).route("cpu:0", "cpu:5")
        ('cpu:0', 'switch', 'cpu:5')
        """
        return cls(*shapes.star(devices, gb_per_s, latency_s))

    @classmethod
    def machine(
        cls, name: str, hosts: int = 1, *, speeds: str = "raw", nics: str | None = None, in_network: bool = False
    ) -> Topology:
        """Return a machine of the library, or several of them and the network between them.

        Args:
          name: a name (``crossreduce topology`` lists them) or an alias (docs/planning.md), such as "dgx-1v", "p4d".
          hosts: the number of machines, joined by their network cards.
          speeds: "raw" for the specified speeds of the links, which suit bounds, or "effective" for the speeds that
            NCCL and RCCL assume, which suit predictions.
          nics: the network that joins the hosts. The default depends on the name: "ndv2" is a DGX-1V with another card.
          in_network: whether switches that can combine and multicast in the network do so (NVLS, SHARP).
        Raises:
          ArgumentError: the machine (the error lists similar names), the network or the speeds are not known.

        >>> Topology.machine("dgx-1v")
        Topology(8 devices, 32 links: cuda:0, cuda:1, cuda:2, cuda:3, cuda:4, cuda:5, cuda:6, cuda:7)
        """
        from .machines import machine

        return cls(*machine(name, hosts, speeds=speeds, nics=nics, in_network=in_network))

    @classmethod
    def load(cls, path: Any, **known: Any) -> Topology:
        """Read a topology from a file: JSON, NCCL's topology XML, or a table of ``nvidia-smi topo -m`` or ``rocm-smi``.

        Args:
          known: what a table does not state: ``gpu``, the kind of GPU, such as "gb200", unless the text names it;
            ``pcie``, 3 to 6; ``between_cpus``, GB/s; ``hosts``, joined by the cards of the table; ``nics``, the line
            rate of a card in Gb/s, "ndr", or "8x400". What is not known is assumed: see ``assumed``.
        Raises:
          ArgumentError: the format is wrong, the data are malformed or truncated, there are no devices, XML lacks the
            NVLink or xGMI entries of its GPUs, or an argument is invalid.
          OSError: the file cannot be read.
        """
        from .formats import parse, read_file
        from .formats.nvidia_smi import TableOptions

        data = read_file(path), TableOptions(**known)
        try:
            return cls(*parse(*data))
        except ArgumentError as error:
            error.prefix(str(path))
            raise

    @classmethod
    def discover(cls) -> Topology:
        """Return the topology of this machine: its GPUs if NVML finds any, else its NUMA nodes.

        NVML is a library of NVIDIA's driver. ``crossreduce topology this`` shows why it found no GPUs.
        """
        from .discover import discover

        return cls(*discover().wiring)

    def subset(self, devices: Iterable[str | int]) -> Topology:
        """Return the topology of some devices in the given order, all switches, and the links between these nodes.

        Devices are given by name or number: k is the k-th device.

        >>> Topology.machine("dgx-1v").subset(range(4))
        Topology(4 devices, 12 links: cuda:0, cuda:1, cuda:2, cuda:3)
        """
        return self.part(self.members(devices))

    def part(self, devices: tuple[str, ...]) -> Topology:
        """Return the same as ``subset`` for canonical names, without checks."""
        kept = {*devices, *self.nodes[len(self.devices) :]}
        links = (link for link in self.links if kept.issuperset(link[:2]))
        return Topology.unchecked(devices, links, self.switches, self.assumed)

    def members(self, devices: Iterable[str | int]) -> tuple[str, ...]:
        """Return the canonical names of devices of the topology, given by name or number.

        Raises:
          ArgumentError: there are no devices, one is listed twice, or one is not a device of the topology.
        """
        # ``read_devices`` raises the error for an argument that is not a list.
        is_list = isinstance(devices, Iterable) and not isinstance(devices, str)
        names = read_devices(map(self.node, devices) if is_list else devices)  # type: ignore[arg-type]
        self._require(names)
        if not names:
            raise ArgumentError.of("at least one device must be named.", shown(devices), f'["{self.devices[0]}"]')
        return names

    def without_link(self, a: str | int, b: str | int) -> Topology:
        """Return the topology without the links between ``a`` and ``b``, in both directions.

        Each of the two is a device, by name or number, or a switch.
        """
        pair = {self.node(a), self.node(b)}
        self._require(tuple(pair))
        others = tuple(link for link in self.links if {*link[:2]} != pair)
        if len(others) == len(self.links):
            neighbours = ", ".join(link.dst for link in self.out_links(a)) or "none"
            given, remedy = f"{self.node(a)} - {self.node(b)}", f"links out of {self.node(a)}: {neighbours}"
            raise ArgumentError.of("there is no such link.", given, remedy)
        return Topology.unchecked(self.devices, others, self.switches, self.assumed)

    def without_node(self, node: str | int) -> Topology:
        """Return the topology without a device (by name or number) or a switch (such as a network card) and its links.

        >>> Topology.star(3).without_node("cpu:2")
        Topology(2 devices, 1 switch, 4 links: cpu:0, cpu:1)
        >>> len(Topology.machine("dgx-1v", hosts=2).without_node("host0/nic1").switches)
        8
        """
        name = self.node(node)
        self._require((name,))
        devices = tuple(device for device in self.devices if device != name)
        if not devices:
            raise ArgumentError.of("the only device of a topology cannot be removed.", name, "another node")
        links = (link for link in self.links if name not in (link.src, link.dst))
        switches = tuple(switch for switch in self.switches if switch.name != name)
        return Topology.unchecked(devices, links, switches, self.assumed)

    def with_switches(self, *, reducing: bool) -> Topology:
        """Return the same topology in which all switches combine and multicast in the network, or none of them does.

        >>> Topology.star(4).with_switches(reducing=True).switches
        (Switch(name='switch', reduces=True),)
        """
        switches = tuple(Switch(switch.name, reducing) for switch in self.switches)
        return Topology.unchecked(self.devices, self.links, switches, self.assumed)

    def renamed(self, devices: Sequence[str]) -> Topology:
        """Return the same topology with other names: the i-th device is called ``devices[i]``."""
        devices = read_devices(devices)
        if len(devices) != len(self.devices):
            given = f"{len(devices)} names, {len(self.devices)} devices"
            raise ArgumentError.of("there must be one name for each device.", given, f"{len(self.devices)} names")
        names = dict(zip(self.nodes, (*devices, *self.nodes[len(devices) :]), strict=True))
        links = (link._replace(src=names[link.src], dst=names[link.dst]) for link in self.links)
        return Topology.unchecked(tuple(devices), links, self.switches, self.assumed)

    def reversed(self) -> Topology:
        """Return the topology with the direction of every link reversed."""
        links = (link._replace(src=link.dst, dst=link.src) for link in self.links)
        return Topology.unchecked(self.devices, links, self.switches, self.assumed)

    def link(self, src: str | int, dst: str | int) -> Link | None:
        """Return the link from ``src`` to ``dst``, which are devices or switches, or ``None`` if it does not exist."""
        return self.by_ends.get((self.node(src), self.node(dst)))

    @cached_property
    def by_ends(self) -> dict[tuple[str, str], Link]:
        """The links by ``(src, dst)``, canonical names."""
        return {(link.src, link.dst): link for link in self.links}

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """All devices, then all switches."""
        return (*self.devices, *(switch.name for switch in self.switches))

    def __contains__(self, node: object) -> bool:
        """Whether there is a device or switch with exactly this name."""
        return node in self._order

    def route(self, src: str | int, dst: str | int) -> tuple[str, ...] | None:
        """Return the nodes of the route from ``src`` to ``dst`` that data takes unless a schedule names another one.

        It is the route through the fewest devices. Among equal ones, fewer links are better, and then a greater
        bandwidth. If several routes are equal in all this, the choice is always the same. If there is no route, the
        result is ``None``.

        >>> Topology.ring(5).route("cpu:0", "cpu:2")
        ('cpu:0', 'cpu:1', 'cpu:2')
        """
        src, dst = self.node(src), self.node(dst)
        if (src, dst) in self.by_ends:
            return src, dst
        self._require((src, dst))
        if src == dst:
            return (src,)
        if src not in self._routes:
            count = len(self.devices)
            self._routes[src] = RoutesFrom(src, self.nodes, count, self._by_src, self._order, self.speeds)
        return self._routes[src].to(dst)

    def out_links(self, node: str | int) -> tuple[Link, ...]:
        """Return the links that leave a device or switch."""
        return self._by_src.get(self.node(node), ())

    @cached_property
    def speeds(self) -> dict[tuple[str, str], int]:
        """All bandwidths as integers, multiples of a common unit, by ``(src, dst)``."""
        scale = lcm(*(link.bandwidth.denominator for link in self.links))
        return {pair: int(link.bandwidth * scale) for pair, link in self.by_ends.items()}

    @cached_property
    def symmetric(self) -> bool:
        """Whether every link has one of the same bandwidth in the other direction."""
        return all(self.speeds.get((dst, src)) == speed for (src, dst), speed in self.speeds.items())

    @cached_property
    def islands(self) -> tuple[tuple[str, ...], ...]:
        """The groups of devices that the fastest links join.

        Two devices are in one group if a path of links of the greatest bandwidth joins them. A topology whose
        fastest links join all devices is one group.

        >>> Topology.from_matrix([[0, 10, 1, 1], [10, 0, 1, 1], [1, 1, 0, 10], [1, 1, 10, 0]]).islands
        (('cpu:0', 'cpu:1'), ('cpu:2', 'cpu:3'))
        """
        fastest = max((link.bandwidth for link in self.links), default=0)
        joined_nodes = groups(self.nodes, [(link.src, link.dst) for link in self.links if link.bandwidth == fastest])
        inside = [tuple(node for node in group if self._order[node] < len(self.devices)) for group in joined_nodes]
        return tuple(group for group in inside if group)

    @cached_property
    def _routes(self) -> dict[str, RoutesFrom]:
        return {}

    @cached_property
    def _by_src(self) -> dict[str, tuple[Link, ...]]:
        return {src: tuple(links) for src, links in groupby(self.links, key=attrgetter("src"))}

    @cached_property
    def _order(self) -> dict[str, int]:
        return {node: number for number, node in enumerate(self.nodes)}

    def node(self, name: str | int) -> str:
        """Return the name of a node: a number k stands for the k-th device, and other spellings become canonical.

        >>> Topology.star(4).node(2), Topology.star(4).node("switch"), Topology.star(4).node("CPU:3")
        ('cpu:2', 'switch', 'cpu:3')
        """
        if isinstance(name, str):
            return name if name in self._order else canonical(name)
        number = index(name) if isinstance(name, SupportsIndex) and not isinstance(name, bool) else -1
        if not 0 <= number < len(self.devices):
            remedy = f'a name such as "{self.devices[0]}", or a number from 0 to {len(self.devices) - 1}'
            raise DeviceError.of("this is not a device, by name or number.", shown(name), remedy)
        return self.devices[number]

    def _require(self, names: tuple[str, ...]) -> None:
        missing = [name for name in names if name not in self._order]
        if missing:
            remedy = "one of " + ", ".join(self.nodes)
            raise ArgumentError.of("the topology has no such device or switch.", ", ".join(missing), remedy)

    def __repr__(self) -> str:
        count, switch_count = len(self.devices), len(self.switches)
        switches = f"{switch_count} switch{'es' if switch_count > 1 else ''}, " if switch_count else ""
        links = f"{len(self.links)} link{'s' * (len(self.links) != 1)}"
        names = ", ".join(self.devices[:_SHOWN]) + ", ..." * (count > _SHOWN)
        return f"Topology({count} device{'s' * (count > 1)}, {switches}{links}: {names})"

    def to_json(self) -> str:
        """Return the topology as JSON text; equal topologies with equal assumptions give the same bytes.

        Links are [src, dst, bandwidth in GB/s, latency in seconds]. Numbers are exact: they are text such as "64/3".
        """
        return write_json(Wiring(self.devices, self.links, self.switches, self.assumed))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Read a topology from the text of ``to_json``; numbers may also be JSON numbers.

        Raises:
          ArgumentError: the text is not JSON, has another format, or lacks a part.
        """
        return cls(*read_json(text))
