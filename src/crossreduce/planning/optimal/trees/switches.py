"""Replace capacities through switches by capacities between devices, so that the trees of all roots still fit.

Each tree uses one unit of the capacity of its arcs. By Edmonds' theorem the trees fit if the maximum flow from all
roots together to each device is at least the number of all trees. Each replacement preserves this condition.

Source: Edmonds, Edge-disjoint branchings, 1973; Bang-Jensen, Frank & Jackson, SIAM J. Discrete Math. 8(2), 1995
(splitting off a node without loss); Zhao et al., ForestColl, arXiv:2402.06787 (for collectives).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import ne

from ..bounds.cuts import Network
from ..bounds.steiner import Arc, Through


class Capacities(dict[Arc, dict[Through, int]]):
    """``capacities[u, t][through]`` is the capacity from node u to node t through a sequence of switches."""

    def add(self, arc: Arc, through: Through, amount: int) -> None:
        """Add ``amount`` to the capacity of an arc by the route ``through``."""
        if amount:
            routes = self.setdefault(arc, {})
            routes[through] = routes.get(through, 0) + amount

    def take(self, arc: Arc, amount: int) -> list[tuple[Through, int]]:
        """Remove ``amount``, at most the capacity, from an arc. Return what each route loses: (route, capacity)."""
        taken, routes = [], self[arc]
        for through in list(routes):
            part = min(amount, routes[through])
            if part:
                taken.append((through, part))
                routes[through] -= part
                amount -= part
                if not routes[through]:
                    del routes[through]
        if not routes:
            del self[arc]
        assert not amount
        return taken

    def total(self, arc: Arc) -> int:
        """Return the capacity of an arc over all routes."""
        return sum(self.get(arc, {}).values())

    def totals(self) -> dict[Arc, int]:
        """Return the capacity of each arc over all routes."""
        return {arc: sum(routes.values()) for arc, routes in self.items()}


def all_reached(capacities: dict[Arc, int], roots: dict[int, int], sinks: Sequence[int], n: int) -> bool:
    """Return whether each sink, considered alone, can receive the flow of all roots together.

    ``roots`` is the flow of each root, and the nodes are numbered from 0 to n - 1.
    """
    total = sum(roots.values())
    network = Network(n + 1, capacities | {(n, root): units for root, units in roots.items()})
    return all(network.flow_up_to(total, n, sink) >= total for sink in sinks)


def replace_switches(
    capacities: Capacities,
    switches: Iterable[int],
    roots: dict[int, int],
    devices: Sequence[int],
    groups: Sequence[int],
    n: int,
) -> Capacities:
    """Return capacities in which arcs between neighbours replace each switch. The trees of all roots still fit.

    ``roots`` is the number of trees of each root, and ``groups`` the number of each device's group. At each switch, the
    capacities in and out must be equal. First, the capacity of a switch is shared evenly between pairs of neighbours:
    only between pairs of different groups if the switch joins several, and between all pairs if this fails. It fails if
    the trees then do not fit, or if capacities in and out become unequal at another switch. If all even shares fail,
    ``_split_off`` replaces one pair of arcs (in and out) after the other.
    """
    for switch in switches:
        entering = {u: capacities.total((u, switch)) for (u, w) in list(capacities) if w == switch}
        leaving = {t: capacities.total((switch, t)) for (w, t) in list(capacities) if w == switch}
        joins_groups = len({groups[u] for u in {*entering, *leaving} if u < len(groups)}) > 1

        def in_different_groups(u: int, t: int) -> bool:
            return u != t and (u >= len(groups) or t >= len(groups) or groups[u] != groups[t])

        for allowed in (in_different_groups, ne) if joins_groups else (ne,):
            tried = Capacities({arc: dict(routes) for arc, routes in capacities.items()})
            for (u, t), amount in _even_shares(entering, leaving, allowed, groups).items():
                _bypass(tried, u, switch, t, amount)
            rest = [arc for arc in tried if switch in arc]
            for arc in rest:
                del tried[arc]
            # An arc in the rest that leads to another switch must not be deleted: its capacities would become unequal.
            unequal = any(node != switch and node >= len(groups) for arc in rest for node in arc)
            if not unequal and all_reached(tried.totals(), roots, devices, n):
                capacities = tried
                break
        else:
            capacities = _split_off(capacities, switch, sorted({*entering, *leaving}), roots, devices, n)
    return capacities


def _even_shares(
    entering: dict[int, int], leaving: dict[int, int], allowed: Callable[[int, int], bool], groups: Sequence[int]
) -> dict[Arc, int]:
    """Return the capacity of each pair (node before, node after) if it is shared evenly among the ``allowed`` pairs.

    The capacity of a link into the switch is divided in proportion to the capacities of the links out of it, rounded
    down to integers. The rest is then shared among the allowed pairs in small amounts, first between neighbours that
    have the same place in their groups: if the groups are hosts, GPU 0 is joined to GPU 0.
    """
    ends = sorted({*entering, *leaving})
    place = {u: sum(v < len(groups) and groups[v] == groups[u] for v in ends if v < u) for u in ends if u < len(groups)}
    offsets = [(u, ends[(k + offset) % len(ends)]) for offset in range(1, len(ends)) for k, u in enumerate(ends)]
    pairs = sorted(offsets, key=lambda pair: place.get(pair[0]) != place.get(pair[1]))
    left_in, left_out = dict(entering), dict(leaving)
    shares: dict[Arc, int] = {}

    def share(u: int, t: int, amount: int) -> None:  # at most what is left at both ends
        amount = min(amount, left_in[u], left_out[t])
        if amount > 0:
            shares[u, t] = shares.get((u, t), 0) + amount
            left_in[u] -= amount
            left_out[t] -= amount

    for u, width in entering.items():
        partners = [t for t in leaving if allowed(u, t)]
        total = sum(leaving[t] for t in partners)
        for t in partners:
            share(u, t, width * leaving[t] // total)
    before = -1
    while before != sum(left_in.values()):
        before = sum(left_in.values())
        for u, t in pairs:
            if left_in.get(u) and left_out.get(t) and allowed(u, t):
                share(u, t, max(1, min(left_in[u], left_out[t]) // len(ends)))
    return shares


def _bypass(capacities: Capacities, u: int, switch: int, t: int, amount: int) -> None:
    """Replace ``amount`` of the capacity from u through a switch to t by an arc. If u is t, only remove it."""
    if not amount:
        return
    into, out = capacities.take((u, switch), amount), capacities.take((switch, t), amount)
    while into and out:  # routes into the switch are joined to routes out of it
        (before, amount_in), (after, amount_out) = into[-1], out[-1]
        part = min(amount_in, amount_out)
        if u != t:
            capacities.add((u, t), (*before, switch, *after), part)
        into[-1], out[-1] = (before, amount_in - part), (after, amount_out - part)
        if not into[-1][1]:
            into.pop()
        if not out[-1][1]:
            out.pop()


def _split_off(
    capacities: Capacities, switch: int, ends: list[int], roots: dict[int, int], devices: Sequence[int], n: int
) -> Capacities:
    """Return capacities in which direct arcs between ``ends`` replace pairs of arcs, into and out of a switch.

    Each pair is replaced with the largest amount for which the trees of all roots still fit.
    """
    needed = sum(roots.values())
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
                    lacking = needed - Network(n + 1, tried).flow(n, sink)
                    if lacking <= 0:
                        break
                    amount = max(0, amount - lacking)  # replacing one unit less adds at most 1 to the flow
            _bypass(capacities, u, switch, t, amount)
    for arc in [arc for arc in capacities if switch in arc]:
        del capacities[arc]
    return capacities
