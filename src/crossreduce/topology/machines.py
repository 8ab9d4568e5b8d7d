"""Common multi-GPU machines, one or several of them, read from the files in data/.

Input: a name and the number of hosts. Output: a ``Wiring``. A file has a name, a description and some of these keys:

- ``devices``: their kind and number.
- ``links``: entries ``[a, b, number, kind]``. In both directions, ``number`` links of a kind of data/links.json join
  each node of ``a`` with each node of ``b``. Each of them is the name of a switch, or the numbers of devices, such as
  ``"0-7"``, ``"0,2"`` or, for every second device, ``"0-7/2"``.
- ``matrix``: a kind, and the number of links between every two devices. ``torus``: a kind, and the shape of the grid.
- ``networks``: the networks that join several hosts, by name; the first is the default. All hosts share a switch whose
  name starts with ``@``; each host has its own switch of any other name. ``*`` stands for the number of the device.
- ``reduces``, of the machine or of a network: whether its switches can combine and multicast.
- ``memory_gb_per_s``: the bandwidth of a device's memory, which limits reductions.
- ``aliases``: other names, each with the network that it implies, or null. ``sources``: where the entries are from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ..devices import parse
from ..errors import ArgumentError, shown
from .link_kinds import check_speeds, kind, read_data
from .links import Link, Switch, Wiring, check_hosts
from .shapes import grid

_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+)(?:/([0-9]+))?)?")


class _Wire(NamedTuple):
    """Links in both directions between two nodes: a device's number or a switch's name in a data file."""

    a: int | str
    b: int | str
    number: int | Fraction
    kind: str


class _Entry(NamedTuple):
    """A name or alias of a machine."""

    spelling: str
    content: dict[str, Any]  # of the machine's file
    network: str | None  # that the alias implies


def machine(
    name: str, hosts: int = 1, *, speeds: str = "raw", nics: str | None = None, in_network: bool = False
) -> Wiring:
    """Return a machine of the library, or several of them and the network between them: see ``Topology.machine``.

    Devices are called ``cuda:0``, or ``host0/cuda:0`` if there are several hosts. Switches of a host are called, for
    example, ``nvswitch`` or ``host0/nvswitch``, and those of the network ``ib`` or ``rail0``. A single host has no
    network. A network card that belongs to one device is a link to the network; a card that several devices share is a
    switch with one such link. In ``name``, only digits and letters count, and upper and lower case are equal.

    >>> len(machine("hgx-h100", hosts=2).links)
    64
    """
    _, content, network = _find(name)
    check_speeds(speeds)
    check_hosts(hosts)
    return _build(content, _network(content, hosts, nics or network), hosts, speeds, in_network)


def machine_names() -> tuple[tuple[str, str], ...]:
    """Return the machines' names, each with one line that describes it.

    >>> dict(machine_names())["dgx-1v"]
    '8 V100 in a hybrid cube mesh of NVLink 2'
    """
    return tuple((content["name"], content["description"]) for content in _contents())


def machine_costs(name: str, hosts: int = 1, *, nics: str | None = None) -> tuple[float | None, float | None]:
    """Return the GB/s of a device's memory and the messages per second of a network card, each ``None`` if not known.

    >>> machine_costs("dgx-a100", 2)
    (1555, 215000000)
    """
    _, content, network = _find(name)
    wires = list(_wires(_network(content, hosts, nics or network).get("links", ())))
    rates = [read_data()["links.json"]["kinds"][wire.kind].get("messages_per_s") for wire in wires]
    stated = [rate for rate in rates if rate is not None]
    return content.get("memory_gb_per_s"), min(stated) if stated else None


def _contents() -> tuple[dict[str, Any], ...]:
    return tuple(content for file, content in read_data().items() if file not in ("links.json", "gpus.json"))


def _find(name: str) -> _Entry:
    """Return the entry of a name or alias. If there is none, an ArgumentError lists similar names."""
    entries = _entries()
    wanted = _key(name) if isinstance(name, str) else ""
    if wanted in entries:
        return entries[wanted]
    from difflib import get_close_matches

    similar = get_close_matches(wanted, entries, cutoff=0.5)
    names = [entries[key].spelling for key in similar] or [each for each, _ in machine_names()]
    raise ArgumentError.of("there is no machine of this name.", shown(name), ", ".join(names))


@lru_cache(maxsize=1)
def _entries() -> dict[str, _Entry]:
    """Return the entries of all names and aliases, by ``_key``."""
    return {
        _key(spelling): _Entry(spelling, content, network)
        for content in _contents()
        for spelling, network in {content["name"]: None, **content.get("aliases", {})}.items()
    }


def _key(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _network(content: dict[str, Any], hosts: int, nics: str | None) -> dict[str, Any]:
    """Return the data of the network that joins the hosts: that named ``nics``, or the first; {} for a single host."""
    networks: dict[str, Any] = content.get("networks", {})
    if nics is not None and (not isinstance(nics, str) or nics not in networks):
        remedy = " or ".join(f'"{name}"' for name in networks) or "omit nics: this machine has no network"
        raise ArgumentError.of(f"{content['name']} has no such network.", shown(nics), remedy)
    if hosts == 1:
        return {}
    if not networks:
        problem = f"{content['name']} does not have a network that joins several hosts."
        raise ArgumentError.of(problem, f"hosts={hosts}", "hosts=1")
    network: dict[str, Any] = networks[nics or next(iter(networks))]
    return network


def _build(content: dict[str, Any], network: dict[str, Any], hosts: int, speeds: str, in_network: bool) -> Wiring:
    """Return the wiring of ``hosts`` equal machines, from the data of the machine and of their network."""
    device_kind, number = content["devices"]

    def name(node: int | str, host: int) -> str:
        """Return the name of a node of one host in the wiring; a network switch belongs to no host."""
        if isinstance(node, int):
            node = f"{device_kind}:{node}"
        return node[1:] if node[0] == "@" else f"host{host}/{node}" if hosts > 1 else node

    host_wires, network_wires = list(_host_wires(content)), list(_wires(network.get("links", ())))
    # By switch, whether it can combine: first the switches that each host has, then those that all hosts share.
    per_host = dict.fromkeys(_switches(host_wires), content.get("reduces", False))
    per_host |= {node: False for node in _switches(network_wires) if node[0] != "@" and node not in per_host}
    shared = {node: network.get("reduces", False) for node in _switches(network_wires) if node[0] == "@"}

    nodes = [(name(node, host), reduces) for host in range(hosts) for node, reduces in per_host.items()]
    nodes += [(name(node, 0), reduces) for node, reduces in shared.items()]
    switches = [Switch(node, reduces and in_network) for node, reduces in nodes]
    devices = tuple(name(k, host) for host in range(hosts) for k in range(number))
    links: list[Link] = []
    for host in range(hosts):
        for wire in (*host_wires, *network_wires):
            links += kind(wire.kind).between(name(wire.a, host), name(wire.b, host), wire.number, speeds)
    return Wiring(devices, tuple(links), tuple(switches))


def _host_wires(content: dict[str, Any]) -> Iterator[_Wire]:
    """Yield the links within one host."""
    for link_kind, rows in content.get("matrix", {}).items():
        for i, row in enumerate(rows):
            yield from (_Wire(i, j, int(count), link_kind) for j, count in enumerate(row[:i]) if count != "0")
    for link_kind, shape in content.get("torus", {}).items():
        for link in grid(shape, 1, 0, wraps=True).links:
            a, b = parse(link.src).index, parse(link.dst).index
            if a < b:  # a wire stands for both directions
                yield _Wire(a, b, 1, link_kind)
    yield from _wires(content.get("links", ()))


def _wires(entries: Iterable[list[Any]]) -> Iterator[_Wire]:
    """Yield the links that ``links`` entries stand for. If both sides are equal, each pair is joined once."""
    for a, b, count, link_kind in entries:
        for x in _nodes_of_text(a):
            for y in _nodes_of_text(b):
                if a != b or isinstance(x, str) or isinstance(y, str) or x < y:
                    yield _Wire(x, y.replace("*", str(x)) if isinstance(y, str) else y, count, link_kind)


def _nodes_of_text(text: str) -> tuple[int | str, ...]:
    """Return the device numbers in a text such as "0-7/2" or "0,2"; any other text is the name of a switch."""
    parts = [_RANGE.fullmatch(part) for part in text.split(",")]  # groups: first number, last number, step
    if not all(parts):
        return (text,)
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1, int(part[3] or 1)) for part in parts if part]
    return tuple(number for numbers in ranges for number in numbers)


def _switches(wires: Iterable[_Wire]) -> list[str]:
    return [node for wire in wires for node in wire[:2] if isinstance(node, str)]
