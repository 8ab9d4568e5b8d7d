"""Several hosts, joined by the network cards that a table of GPUs lists.

Input: the wiring of one host, and for each card the GPUs next to it. Output: the wiring of equal hosts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, product
from typing import NamedTuple

from ..errors import ArgumentError, shown
from .link_kinds import Kind, kind, read_data
from .links import Link, Wiring, both_ways, check_hosts
from .routes import groups

NETWORK = "net"  # the switch that joins all cards


class Cards(NamedTuple):
    """The network cards of a host: their names, and the speed of each in GB/s one way."""

    names: tuple[str, ...]
    speed: Fraction
    latency_s: Fraction


def network_cards(nics: object, hosts: int, listed: Sequence[str]) -> Cards:
    """Return the network cards of a host, given their line rate in Gb/s or their kind, such as "ndr".

    ``hosts`` is the number of hosts, and ``listed`` the cards in the table. If there are none, ``nics`` also states
    their number: "8x400".

    >>> network_cards(400, 2, ["NIC0"]) == network_cards("ndr", 2, ["NIC0"])
    True
    >>> network_cards("2xhdr", 2, []).names
    ('nic0', 'nic1')
    """
    check_hosts(hosts)
    text = str(nics).strip().lower()
    count = re.fullmatch(r"([1-9][0-9]{0,2}) *[x*] *(.*)", text)
    if not listed and (nics is None or count is None):
        problem = "the table lists no network cards, which join several hosts."
        remedy = "their number in each host and their line rate in Gb/s: --nics 8x400"
        raise ArgumentError.of(problem, f"{hosts} hosts" + (f", nics={nics}" if nics is not None else ""), remedy)
    remedy = '--nics 400 (Gb/s, the line rate), or "edr", "hdr", "ndr", "xdr"'
    if nics is None:
        problem = "the table does not state the speed of the network cards, which several hosts need."
        raise ArgumentError.of(problem, f"{hosts} hosts, cards {', '.join(listed[:8])}", remedy)
    if count is not None:
        text = count[2]
        if listed and int(count[1]) != len(listed):
            problem = f"the table lists {len(listed)} network cards, not {count[1]}."
            raise ArgumentError.of(
                problem, f"nics={nics}", f"--nics {text}; cards that are far from all GPUs are left out"
            )
    names = tuple(listed) if listed or count is None else tuple(f"nic{k}" for k in range(int(count[1])))
    entry = read_data()["links.json"]["kinds"].get(text, {})
    if entry and ("messages_per_s" in entry or text in ("xdr", "efa", "25gbe", "100gbe")):
        return Cards(names, kind(text).raw, kind(text).latency_s)
    rate = re.fullmatch(r"([0-9]{1,5}(?:\.[0-9]{1,3})?) *(?:g|gb/?s?|gbit/?s?|gbe)?", text)
    if rate is None or not Fraction(rate[1]):
        raise ArgumentError.of("the speed of a network card must be Gb/s above 0, or a kind.", shown(nics), remedy)
    return Cards(names, Fraction(rate[1]) / 8, kind("ndr").latency_s)


def is_next_to(card: int, gpu: int, cards: int, gpus: int) -> bool:
    """Return whether a card that no table lists is taken to be next to a GPU: both are divided evenly, in order.

    >>> [[is_next_to(card, gpu, 2, 4) for gpu in range(4)] for card in range(2)]
    [[True, True, False, False], [False, False, True, True]]
    """
    return gpu * cards // gpus == card if cards < gpus else card * gpus // cards == gpu


def join_hosts(
    host: Wiring,
    cards: Cards,
    hosts: int,
    nearest: Sequence[tuple[int, tuple[int, ...]]] | None,
    pcie: Kind,
    pcie_speed: Fraction | None,
    pcie_assumed: Sequence[str] = (),
) -> Wiring:
    """Return equal hosts whose network cards a network joins, and what was assumed about it.

    If every GPU has cards of its own, the k-th GPUs of all hosts share a switch, ``rail{k}``; otherwise one switch,
    ``net``, joins all cards. A card that several GPUs share is a node of its host. Cards that share no PCIe switch with
    a GPU are left out if others do.

    Args:
      host: the wiring of one host.
      cards: its network cards. If they are nodes of ``host``, ``nearest`` is ``None``.
      hosts: the number of hosts.
      nearest: for each card, how near its nearest GPUs are (0 or 1: a PCIe switch joins them), and their positions.
      pcie: the kind of PCIe links between a GPU and a card that several GPUs share.
      pcie_speed: GB/s of a GPU's PCIe link, or ``None`` if it is not known.
      pcie_assumed: what is assumed about ``pcie``, which the result lists if a link has its speed.
    """
    rate = f"{float(cards.speed):g} GB/s each"
    inside: list[Link] = []
    outside: list[tuple[str, str, Fraction]] = []  # (node of a host, switch of the network, GB/s)
    limited = False  # whether PCIe is slower than the cards of a GPU
    if nearest is None:
        used = list(cards.names)
        outside = [(name, NETWORK, cards.speed) for name in used]
    else:
        best = min((rank for rank, _ in nearest), default=0)
        kept = [k for k, (rank, _) in enumerate(nearest) if rank <= max(best, 1)]
        used = [cards.names[k] for k in kept]
        pairs = [(k, gpu + len(nearest)) for k in kept for gpu in nearest[k][1]]
        joined = groups(range(len(nearest) + len(host.devices)), pairs)
        shares: list[tuple[list[str], list[str]]] = []  # the GPUs and cards of each group
        for group in joined:
            near_cards = [cards.names[k] for k in group if k < len(nearest)]
            near_gpus = [host.devices[k - len(nearest)] for k in group if k >= len(nearest)]
            if near_cards and near_gpus:
                shares.append((near_gpus, near_cards))
        own = {gpu: len(names) // len(gpus) for gpus, names in shares for gpu in gpus if len(names) % len(gpus) == 0}
        rails = len(own) == len(host.devices)
        for gpus, names in shares:
            if gpus[0] in own:
                for gpu in gpus:
                    speed = own[gpu] * cards.speed
                    switch = f"rail{host.devices.index(gpu)}" if rails else NETWORK
                    outside.append((gpu, switch, min(speed, pcie_speed) if pcie_speed else speed))
                    limited |= outside[-1][2] < speed
            else:
                for gpu in gpus:
                    inside += pcie.between(gpu, names[0], 1, "raw")
                outside.append((names[0], NETWORK, len(names) * cards.speed))
    left_out = [name for name in cards.names if name not in used]
    how = (
        "the k-th GPUs of all hosts share a switch" if outside and outside[0][1] != NETWORK else "one switch joins all"
    )
    text = f"network of {_listed(used)}, {rate}: {how}"
    assumed = text + (f"; {_listed(left_out)} left out, as no PCIe switch joins them with a GPU" if left_out else "")

    def name(node: str, number: int) -> str:
        return f"host{number}/{node}"

    links = []
    for number in range(hosts):  # all hosts before the network, so that its switches come last
        links += [
            link._replace(src=name(link.src, number), dst=name(link.dst, number)) for link in (*host.links, *inside)
        ]
    for number, (node, switch, speed) in product(range(hosts), outside):
        links += both_ways(name(node, number), switch, speed, cards.latency_s)
    devices = [name(device, number) for number in range(hosts) for device in host.devices]
    return Wiring.of(devices, links)._replace(assumed=(*(pcie_assumed if inside or limited else ()), assumed))


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    numbers = [int(name[3:]) if re.fullmatch("NIC[0-9]{1,4}", name) else 0 for name in names]
    if all(b == a + 1 for a, b in pairwise(numbers)):
        return f"{names[0]} to {names[-1]} ({len(names)} cards)"
    return f"{', '.join(names[:16])}{', ...' * (len(names) > 16)} ({len(names)} cards)"
