"""The trees and rings of a plan, grouped, for the plan explorer.

Input: a ``Plan``. Output: groups of routes. Chunks that move along the same links to the same roots are one route. All
chunks of a ring are one route, regardless of where they start. Routes of one kind and number of devices are one group.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final, NamedTuple

from ...lowering import lower
from ...planning import Plan
from ...planning.explain import Tree, folded, tree_text
from ...schedule.costs import Pair
from ...schedule.schedule import many
from ...schedule.traffic import route_links
from ..pictures.grouping import Route, chunk_roots, chunk_transfers

MOST_STEPS: Final = 100_000  # schedules with more steps would need a minute, so their trees are not listed
_MOST_LINKS: Final = 24_000  # in all routes of a plan; this limits the size of the file

_Hop = tuple[int, int, Route]  # source, destination, and the nodes between them


class ShownRoute(NamedTuple):
    """Chunks that move along the same links. These form a tree, a ring, or another exchange."""

    title: str
    share: Fraction  # of the buffer
    chunks: int
    roots: tuple[str, ...]  # the devices that compute the result, or the only source
    partial: frozenset[Pair]  # the links that carry partial results
    final: frozenset[Pair]  # the links that carry results
    fold: str = ""  # the text of the entry below which the page folds this route and those of the same shape


class RouteGroup(NamedTuple):
    """Routes of one kind with equally many devices."""

    title: str
    share: Fraction
    number: int  # of all its routes
    routes: tuple[ShownRoute, ...]  # all or, if they have too many links, only the first ones


class _Form(NamedTuple):
    """The properties that all chunks of one route share."""

    used: frozenset[_Hop]
    roots: frozenset[int]  # empty for a ring
    cycle: tuple[int, ...]  # the devices of a ring in order, or empty


def groups(plan: Plan) -> tuple[RouteGroup, ...]:
    """Return the groups of a plan's trees and rings, sorted by share, the greatest first.

    >>> from crossreduce import plan, Topology
    >>> [group.title for group in groups(plan(Topology.ring(4), algorithm="ring"))]
    ['2 rings of 4 devices']
    """
    if plan.schedule.steps > MOST_STEPS:
        return ()
    program = lower(plan.schedule)
    hops = [[(transfer[:3], transfer[3]) for transfer in transfers] for transfers in chunk_transfers(program)]
    alike: dict[_Form, list[int]] = {}
    for c, chunk_program in enumerate(program.chunks):
        used = frozenset(hop for hop, _ in hops[c])
        cycle = _cycle(used)
        alike.setdefault(_Form(used, frozenset() if cycle else chunk_roots(chunk_program), cycle), []).append(c)
    kinds: dict[tuple[str, int], list[ShownRoute]] = {}
    trees: dict[tuple[str, int], list[Tree]] = {}  # of the routes of each kind of tree
    outward = False
    for form, chunks in alike.items():
        share = sum((program.chunks[c].share for c in chunks), Fraction(0))
        partial, final_hops = (
            {hop for c in chunks for hop, final in hops[c] if final is wanted} for wanted in (False, True)
        )
        roots = tuple(program.devices[k] for k in sorted(form.roots))
        links = [_links(used_hops, plan, program.devices) for used_hops in (partial, final_hops)]
        kind = _kind(form), len({end for hop in form.used for end in hop[:2]})
        title = " → ".join(program.devices[k] for k in form.cycle) or f"result on {', '.join(roots)}"
        if kind[0] == "tree":
            tree, outward = _tree(roots[0], share, partial or final_hops, program.devices)
            trees.setdefault(kind, []).append(tree)
            title = tree_text(*tree[1:])
        kinds.setdefault(kind, []).append(ShownRoute(title, share, len(chunks), roots, links[0], links[1]))
    for kind, same in trees.items():
        routes = kinds[kind]
        for text, more, places in folded(same, outward):
            for k in places if len(places) > 1 else ():
                routes[k] = routes[k]._replace(fold=f"{routes[k].share} {text}{more}")
    route_groups = [
        RouteGroup(
            f"{many(len(routes), kind)} of {many(devices, 'device')}",
            sum((route.share for route in routes), Fraction(0)),
            len(routes),
            tuple(sorted(routes, key=lambda route: -route.share)),
        )
        for (kind, devices), routes in kinds.items()
    ]
    return _limit_routes(sorted(route_groups, key=lambda group: -group.share))


def _links(hops: set[_Hop], plan: Plan, names: tuple[str, ...]) -> frozenset[Pair]:
    """Return the links that hops use."""
    return frozenset(pair for a, b, via in hops for pair in route_links(plan.topology, names[a], names[b], via))


def _cycle(used: frozenset[_Hop]) -> tuple[int, ...]:
    """Return the devices of a ring in order if the hops form a ring, and otherwise an empty tuple."""
    after = {src: dst for src, dst, _ in used}
    if len(after) != len(used) or len(after) < 3:
        return ()
    order = [min(after)]
    while after.get(order[-1], order[0]) != order[0] and len(order) < len(after):
        order.append(after[order[-1]])
    return tuple(order) if len(order) == len(after) and after.get(order[-1]) == order[0] else ()


def _kind(form: _Form) -> str:
    """Return "ring", or "tree" if the hops form a tree with one root, or "exchange"."""
    edges = {frozenset(hop[:2]) for hop in form.used}
    nodes = form.roots.union(*edges)
    return "ring" if form.cycle else "tree" if len(edges) == len(nodes) - 1 and len(form.roots) == 1 else "exchange"


def _tree(root: str, share: Fraction, hops: set[_Hop], names: tuple[str, ...]) -> tuple[Tree, bool]:
    """Return a tree as ``explain`` has it, and whether data flow from its root."""
    outward = any(names[src] == root for src, *_ in hops)
    return (share, root, {names[a]: names[b] for a, b in ((d, s) if outward else (s, d) for s, d, _ in hops)}), outward


def _limit_routes(route_groups: list[RouteGroup]) -> tuple[RouteGroup, ...]:
    """Return the groups with as many routes as ``_MOST_LINKS`` allows, but with at least their first route."""
    most_links = _MOST_LINKS // max(1, len(route_groups))  # the limit of each group
    limited = []
    for group in route_groups:
        links = len(group.routes[0].partial) + len(group.routes[0].final)
        limited.append(group._replace(routes=group.routes[: max(1, most_links // max(1, links))]))
    return tuple(limited)
