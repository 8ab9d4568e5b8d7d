"""Replace capacities through switches by capacities between devices, in which the trees of all roots have room.

Each root has a number of trees, and each tree takes one unit of capacity. The maximum flow from all roots together to
each device stays at least the number of all trees; by Edmonds' theorem, trees within the capacities exist then.

Source: Edmonds, Edge-disjoint branchings, 1973; Bang-Jensen, Frank & Jackson, SIAM J. Discrete Math. 8(2), 1995
(splitting off a node without loss); Zhao et al., ForestColl, arXiv:2402.06787 (for collectives).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import ne

from ..bounds.cuts import Network
from ..bounds.steiner import Through

Arc = tuple[int, int]


class Capacities(dict[Arc, dict[Through, int]]):
    """Capacities between nodes, by the switches that data passes: ``capacities[u, t][through]``."""

    def add(self, arc: Arc, through: Through, amount: int) -> None:
        """Add capacity to an arc."""
        if amount:
            here = self.setdefault(arc, {})
            here[through] = here.get(through, 0) + amount

    def take(self, arc: Arc, amount: int) -> list[tuple[Through, int]]:
        """Remove capacity from an arc, which must have it, and return the routes of the removed capacity."""
        taken, here = [], self[arc]
        for through in list(here):
            part = min(amount, here[through])
            if part:
                taken.append((through, part))
                here[through] -= part
                amount -= part
                if not here[through]:
                    del here[through]
        if not here:
            del self[arc]
        assert not amount
        return taken

    def total(self, arc: Arc) -> int:
        """Return the capacity of an arc."""
        return sum(self.get(arc, {}).values())

    def totals(self) -> dict[Arc, int]:
        """Return the capacities of all arcs."""
        return {arc: sum(here.values()) for arc, here in self.items()}


def all_reached(capacities: dict[Arc, int], roots: dict[int, int], sinks: Sequence[int], n: int) -> bool:
    """Return whether the maximum flow from all roots together to each single sink has the units of all roots."""
    whole = sum(roots.values())
    network = Network(n + 1, capacities | {(n, root): units for root, units in roots.items()})
    return all(network.flow(n, sink) >= whole for sink in sinks)


def replace_switches(
    capacities: Capacities,
    switches: Iterable[int],
    roots: dict[int, int],
    devices: Sequence[int],
    groups: Sequence[int],
    n: int,
) -> Capacities:
    """Replace every switch by arcs between its neighbours, so that the unit trees of all roots still reach all devices.

    At each switch, the capacities in and out must be equal. Its neighbours get even shares: first only between groups
    of near devices, if it joins several; then between any two. If with both a unit tree cannot reach a device, or
    another switch becomes unequal, ``_split_off`` instead replaces one pair of arcs (in and out) after the other.
    """
    for switch in switches:
        entering = {u: capacities.total((u, switch)) for (u, w) in list(capacities) if w == switch}
        leaving = {t: capacities.total((switch, t)) for (w, t) in list(capacities) if w == switch}
        spans = len({groups[u] for u in {*entering, *leaving} if u < len(groups)}) > 1

        def apart(u: int, t: int) -> bool:
            return u != t and (u >= len(groups) or t >= len(groups) or groups[u] != groups[t])

        for allowed in (apart, ne) if spans else (ne,):
            tried = Capacities({arc: dict(here) for arc, here in capacities.items()})
            for (u, t), amount in _even_shares(entering, leaving, allowed).items():
                _bypass(tried, u, switch, t, amount)
            rest = [arc for arc in tried if switch in arc]
            for arc in rest:
                del tried[arc]
            # Deleting the rest is allowed only if capacities in and out stay equal at the other switches.
            uneven = any(node != switch and node >= len(groups) for arc in rest for node in arc)
            if not uneven and all_reached(tried.totals(), roots, devices, n):
                capacities = tried
                break
        else:
            capacities = _split_off(capacities, switch, entering, leaving, roots, devices, n)
    return capacities


def _even_shares(
    entering: dict[int, int], leaving: dict[int, int], allowed: Callable[[int, int], bool]
) -> dict[Arc, int]:
    """Share the capacity of each link into a switch among the links out of it, in proportion to their capacities.

    Return the integer amount of each ``allowed`` pair (node before, node after); they also share what rounding leaves.
    """
    ends = sorted({*entering, *leaving})
    left_in, left_out = dict(entering), dict(leaving)
    shares: dict[Arc, int] = {}

    def give(u: int, t: int, amount: int) -> None:
        amount = min(amount, left_in[u], left_out[t])
        if amount > 0:
            shares[u, t] = shares.get((u, t), 0) + amount
            left_in[u] -= amount
            left_out[t] -= amount

    for u, width in entering.items():
        others = [t for t in leaving if allowed(u, t)]
        whole = sum(leaving[t] for t in others)
        for t in others:
            give(u, t, width * leaving[t] // whole)
    before = -1
    while before != sum(left_in.values()):
        before = sum(left_in.values())
        for offset in range(1, len(ends)):
            for k, u in enumerate(ends):
                t = ends[(k + offset) % len(ends)]
                if left_in.get(u) and left_out.get(t) and allowed(u, t):
                    give(u, t, max(1, min(left_in[u], left_out[t]) // len(ends)))
    return shares


def _bypass(capacities: Capacities, u: int, switch: int, t: int, amount: int) -> None:
    """Replace ``amount`` of the capacity from u over a switch to t by an arc from u to t; only remove it if u is t."""
    if not amount:
        return
    first, second = capacities.take((u, switch), amount), capacities.take((switch, t), amount)
    while first and second:
        (before, have), (after, want) = first[-1], second[-1]
        part = min(have, want)
        if u != t:
            capacities.add((u, t), (*before, switch, *after), part)
        first[-1], second[-1] = (before, have - part), (after, want - part)
        if not first[-1][1]:
            first.pop()
        if not second[-1][1]:
            second.pop()


def _split_off(
    capacities: Capacities,
    switch: int,
    entering: dict[int, int],
    leaving: dict[int, int],
    roots: dict[int, int],
    devices: Sequence[int],
    n: int,
) -> Capacities:
    """Replace pairs of arcs, into and out of a switch, by direct arcs, each as far as all devices stay reachable."""
    ends = sorted({*entering, *leaving})
    whole = sum(roots.values())
    for offset in (*range(1, len(ends)), 0):
        for k, u in enumerate(ends):
            t = ends[(k + offset) % len(ends)]
            amount = min(capacities.total((u, switch)), capacities.total((switch, t)))
            if not amount:
                continue
            totals = capacities.totals()
            sources = {(n, root): units for root, units in roots.items()}
            for sink in devices:
                while amount:
                    tried = totals | sources
                    tried[u, switch] -= amount
                    tried[switch, t] -= amount
                    if u != t:
                        tried[u, t] = tried.get((u, t), 0) + amount
                    lacking = whole - Network(n + 1, tried).flow(n, sink)
                    if lacking <= 0:
                        break
                    amount = max(0, amount - lacking)  # one unit less adds at most 1 to the flow
            _bypass(capacities, u, switch, t, amount)
    for arc in [arc for arc in capacities if switch in arc]:
        del capacities[arc]
    return capacities
