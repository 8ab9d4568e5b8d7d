"""Machines as data: common multi-GPU machines, one or several of them, from the files in data/.

Input: a name and the number of hosts. Output: a ``Wiring``. A file has a name, a description and some of these:

- ``devices``: their kind and number.
- ``links``: ``[a, b, number, kind]``: links each node of ``a`` to each node of ``b`` by so many links of a kind of
  data/links.json, in both directions. Nodes are devices (``"0-7"``, ``"0,2"``; every second one: ``"0-7/2"``) or a
  switch.
- ``matrix`` or ``torus``: a kind, and the number of links between every two devices, or the shape of the grid.
- ``networks``: the networks that join several hosts, by name, the default first. A switch with ``@`` is shared by all
  hosts; of other switches each host has one. ``*`` stands for the number of the device.
- ``reduces``, of the machine or of a network: its switches can combine and multicast.
- ``memory_gb_per_s``: the bandwidth of a device's memory, which limits reductions.
- ``aliases``: other names, each with its network or null. ``sources``: where the entries are from.
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
from .links import Link, Switch, Wiring
from .shapes import grid

_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+)(?:/([0-9]+))?)?")


class _Wire(NamedTuple):
    a: int | str
    b: int | str
    number: int | Fraction
    kind: str


class _Entry(NamedTuple):
    spelling: str
    content: dict[str, Any]
    network: str | None


def machine(
    name: str, hosts: int = 1, *, speeds: str = "raw", nics: str | None = None, in_network: bool = False
) -> Wiring:
    """Return a machine of the library, or several of them and the network between them: see ``Topology.machine``.

    Names are such as these: devices ``cuda:0``, or ``host0/cuda:0`` if there are several hosts; switches of a host
    ``nvswitch`` or ``host0/nvswitch``, those of the network ``ib`` or ``rail0``. A single host has no network. A
    network card that belongs to one device is a link to the network; a card that several devices share is a switch with
    one such link. Of ``name``, only digits and letters count, in either case.

    >>> len(machine("hgx-h100", hosts=2).links)
    64
    """
    _, content, network = _find(name)
    check_speeds(speeds)
    if not isinstance(hosts, int) or isinstance(hosts, bool) or hosts < 1:
        raise ArgumentError.of("hosts must be an int of at least 1.", shown(hosts), "hosts=1")
    return _build(content, _network(content, hosts, nics or network), hosts, speeds, in_network)


def machine_names() -> tuple[tuple[str, str], ...]:
    """Return the machines' names, each with one line that describes it.

    >>> dict(machine_names())["dgx-1v"]
    '8 V100 in a hybrid cube mesh of NVLink 2'
    """
    return tuple((content["name"], content["description"]) for content in _contents())


def machine_costs(name: str, hosts: int = 1, *, nics: str | None = None) -> tuple[float | None, float | None]:
    """Return the GB/s of a device's memory and the messages per second of a network card; ``None``: not known.

    >>> machine_costs("dgx-a100", 2)
    (1555, 215000000)
    """
    _, content, network = _find(name)
    wires = list(_wires(_network(content, hosts, nics or network).get("links", ())))
    rates = [read_data()["links.json"]["kinds"][wire.kind].get("messages_per_s") for wire in wires]
    known = [rate for rate in rates if rate is not None]
    return content.get("memory_gb_per_s"), min(known) if known else None


def _contents() -> tuple[dict[str, Any], ...]:
    return tuple(content for file, content in read_data().items() if file != "links.json")


def _find(name: str) -> _Entry:
    entries = _entries()
    wanted = _key(name) if isinstance(name, str) else ""
    if wanted in entries:
        return entries[wanted]
    from difflib import get_close_matches

    near = get_close_matches(wanted, entries, cutoff=0.5)
    choice = [entries[key].spelling for key in near] or [known for known, _ in machine_names()]
    raise ArgumentError.of("there is no machine of this name.", shown(name), ", ".join(choice))


@lru_cache(maxsize=1)
def _entries() -> dict[str, _Entry]:
    return {
        _key(spelling): _Entry(spelling, content, network)
        for content in _contents()
        for spelling, network in {content["name"]: None, **content.get("aliases", {})}.items()
    }


def _key(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _network(content: dict[str, Any], hosts: int, nics: str | None) -> dict[str, Any]:
    """Return the entry of the network that joins the hosts; empty for a single host."""
    networks: dict[str, Any] = content.get("networks", {})
    if nics is not None and (not isinstance(nics, str) or nics not in networks):
        known = " or ".join(f'"{known}"' for known in networks) or "omit nics: this machine has no network"
        raise ArgumentError.of(f"{content['name']} has no such network.", shown(nics), known)
    if hosts == 1:
        return {}
    if not networks:
        problem = f"{content['name']} does not have a network that joins several hosts."
        raise ArgumentError.of(problem, f"hosts={hosts}", "hosts=1")
    network: dict[str, Any] = networks[nics or next(iter(networks))]
    return network


def _build(content: dict[str, Any], network: dict[str, Any], hosts: int, speeds: str, in_network: bool) -> Wiring:
    device, number = content["devices"]

    def place(node: int | str, host: int) -> str:
        if isinstance(node, int):
            node = f"{device}:{node}"
        return node[1:] if node[0] == "@" else f"host{host}/{node}" if hosts > 1 else node

    box, net = list(_host_wires(content)), list(_wires(network.get("links", ())))
    # Whether each switch can combine: ``own`` has those that exist once per host, ``shared`` the rest.
    own = dict.fromkeys(_switches(box), content.get("reduces", False))
    own |= {node: False for node in _switches(net) if node[0] != "@" and node not in own}
    shared = {node: network.get("reduces", False) for node in _switches(net) if node[0] == "@"}

    every = range(hosts)
    switches = [Switch(place(node, host), able and in_network) for host in every for node, able in own.items()]
    switches += [Switch(place(node, 0), able and in_network) for node, able in shared.items()]
    devices = tuple(place(k, host) for host in every for k in range(number))
    links: list[Link] = []
    for host in every:
        for wire in (*box, *net):
            links += kind(wire.kind).between(place(wire.a, host), place(wire.b, host), wire.number, speeds)
    return Wiring(devices, tuple(links), tuple(switches))


def _host_wires(content: dict[str, Any]) -> Iterator[_Wire]:
    """Yield the links within one host."""
    for of, rows in content.get("matrix", {}).items():
        for i, row in enumerate(rows):
            yield from (_Wire(i, j, int(count), of) for j, count in enumerate(row[:i]) if count != "0")
    for of, shape in content.get("torus", {}).items():
        for link in grid(shape, 1, 0, wraps=True).links:
            a, b = parse(link.src).index, parse(link.dst).index
            if a < b:
                yield _Wire(a, b, 1, of)
    yield from _wires(content.get("links", ()))


def _wires(lines: Iterable[list[Any]]) -> Iterator[_Wire]:
    for a, b, count, of in lines:
        for x in _nodes_of_text(a):
            for y in _nodes_of_text(b):
                if a != b or isinstance(x, str) or isinstance(y, str) or x < y:
                    yield _Wire(x, y.replace("*", str(x)) if isinstance(y, str) else y, count, of)


def _nodes_of_text(text: str) -> tuple[int | str, ...]:
    """Return the devices of a text such as "0-7/2" or "0,2", or the switch that it names."""
    parts = [_RANGE.fullmatch(part) for part in text.split(",")]
    if not all(parts):
        return (text,)
    return tuple(
        number
        for part in parts
        if part
        for number in range(int(part[1]), int(part[2] or part[1]) + 1, int(part[3] or 1))
    )


def _switches(wires: Iterable[_Wire]) -> list[str]:
    return [node for wire in wires for node in wire[:2] if isinstance(node, str)]
