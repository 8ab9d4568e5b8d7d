"""The tightest cut: the set of nodes that needs the longest time to send out (or receive) its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

from ....topology import Topology
from .flows import Network


def tightest_cut(
    topology: Topology, weights: Mapping[str, Fraction], *, outward: bool
) -> tuple[frozenset[str], Fraction]:
    """Return the set S of nodes with the greatest w(S) / B(S), and this quotient: exact seconds, for weights in GB.

    S lacks at least one device. w(S) is the sum of the weights in S, and B(S) is the bandwidth out of S (if not
    ``outward``: into S). The search is Newton's method on cuts. It starts with the best set that lacks exactly one
    device. If the weights cannot all flow to some device (if not ``outward``: from it) in so many seconds as the
    quotient, the minimum cut of this flow has a greater quotient, and the search continues with it.
    """
    numbers = {node: number for number, node in enumerate(topology.nodes)}
    scale = lcm(*(link.bandwidth.denominator for link in topology.links))
    arcs = {
        (numbers[src], numbers[dst]) if outward else (numbers[dst], numbers[src]): int(bandwidth * scale)
        for src, dst, bandwidth, _ in topology.links
    }
    parts = lcm(*(weight.denominator for weight in weights.values()))
    starts = {numbers[device]: int(weight * parts) for device, weight in weights.items() if weight}
    total = sum(starts.values())
    source = len(numbers)
    entering = [0] * source
    for (_, dst), capacity in arcs.items():
        entering[dst] += capacity

    def quotient_without(sink: int) -> Fraction:
        needed = total - starts.get(sink, 0)  # 0 for the only root, which may have no link into it
        return Fraction(needed, entering[sink]) if needed else Fraction(0)

    # First the device without which the set of all other nodes has the greatest quotient.
    sinks = sorted(range(len(topology.devices)), key=lambda sink: -quotient_without(sink))
    best, ratio = frozenset(range(source)) - {sinks[0]}, quotient_without(sinks[0])
    network = _network_at_rate(arcs, starts, source, ratio)
    for sink in sinks:
        while network.flow(source, sink) < total * ratio.denominator:
            best = network.cut(source, sink) - {source}
            leaving = sum(capacity for (src, dst), capacity in arcs.items() if src in best and dst not in best)
            ratio = Fraction(sum(starts.get(node, 0) for node in best), leaving)
            network = _network_at_rate(arcs, starts, source, ratio)
    return frozenset(topology.nodes[node] for node in best), ratio * scale / parts


def cuts_suffice(topology: Topology) -> bool:
    """Return whether every switch that only forwards has equal bandwidths in and out.

    If so, trees reach the rate of the tightest cut.
    """
    surplus = dict.fromkeys((switch.name for switch in topology.switches if not switch.reduces), Fraction(0))
    for src, dst, bandwidth, _ in topology.links:
        if src in surplus:
            surplus[src] -= bandwidth
        if dst in surplus:
            surplus[dst] += bandwidth
    return not any(surplus.values())


def _network_at_rate(arcs: dict[tuple[int, int], int], starts: dict[int, int], source: int, ratio: Fraction) -> Network:
    """Return the network with an additional node ``source``, from which each root gets its weight divided by ``ratio``.

    All capacities are multiplied by the numerator of the ratio, so that they are integers.
    """
    capacities = {pair: capacity * ratio.numerator for pair, capacity in arcs.items()}
    capacities.update({(source, start): weight * ratio.denominator for start, weight in starts.items()})
    return Network(source + 1, capacities)
