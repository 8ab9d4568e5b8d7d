"""Topologies of large machines: fat trees, dragonflies, and hosts of which one is half empty."""

from __future__ import annotations

from fractions import Fraction

from crossreduce import Topology
from crossreduce.topology import Link


def half_empty(hosts: int) -> Topology:
    """Return a machine of H100 hosts, in which host 1 has only four of its eight devices."""
    full = Topology.machine("hgx-h100", hosts)
    return full.subset([device for device in full.devices if device not in [f"host1/cuda:{k}" for k in range(4, 8)]])


def fat_tree(k: int) -> Topology:
    """Return a fat tree of k-port switches (Al-Fares, Loukissas & Vahdat, SIGCOMM 2008), with k**3 / 4 devices."""
    half, links, switches = k // 2, [], []
    for pod in range(k):
        for edge in range(half):
            switches.append(f"edge{pod}.{edge}")
            first = (pod * half + edge) * half
            links += [(f"cpu:{first + x}", switches[-1]) for x in range(half)]
            links += [(switches[-1], f"middle{pod}.{other}") for other in range(half)]
        for other in range(half):
            switches.append(f"middle{pod}.{other}")
            links += [(switches[-1], f"core{other}.{x}") for x in range(half)]
    switches += [f"core{a}.{x}" for a in range(half) for x in range(half)]
    both = [Link(*pair, Fraction(25), Fraction(1, 10**6)) for a, b in links for pair in ((a, b), (b, a))]
    return Topology([f"cpu:{x}" for x in range(k * half * half)], both, switches)


def dragonfly(groups: int, routers: int, each: int) -> Topology:
    """Return a dragonfly (Kim et al., ISCA 2008): each router has ``each`` devices, the routers of a group are all
    linked, and so is one router of each group with one router of each other group."""
    speeds: dict[tuple[str, str], int] = {}

    def join(a: str, b: str) -> None:
        """Add a link of 25 GB/s in both directions. Several links between the same nodes add up."""
        for pair in ((a, b), (b, a)):
            speeds[pair] = speeds.get(pair, 0) + 25

    for group in range(groups):
        for router in range(routers):
            for x in range(each):
                join(f"cpu:{(group * routers + router) * each + x}", f"r{group}.{router}")
            for other in range(router):
                join(f"r{group}.{other}", f"r{group}.{router}")
        for ahead in range(1, (groups + 1) // 2):
            join(f"r{group}.{(ahead - 1) % routers}", f"r{(group + ahead) % groups}.{(groups - ahead - 1) % routers}")
    links = [Link(a, b, Fraction(speed), Fraction(1, 10**6)) for (a, b), speed in speeds.items()]
    names = [f"r{group}.{router}" for group in range(groups) for router in range(routers)]
    return Topology([f"cpu:{x}" for x in range(groups * routers * each)], links, names)
