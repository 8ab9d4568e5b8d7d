"""The trees and rings of a plan, grouped, for the plan explorer.

Input: a ``Plan``. Output: groups of routes. Chunks that move along the same links to the same roots are one route. All
chunks of a ring are one route, regardless of where they start. Routes of one kind and number of devices are one group.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final, NamedTuple

from ...lowering import lower
from ...planning import Plan
from ...planning.explain import tree_text
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
    for form, chunks in alike.items():
        share = sum((program.chunks[c].share for c in chunks), Fraction(0))
        partial, final_hops = (
            {hop for c in chunks for hop, final in hops[c] if final is wanted} for wanted in (False, True)
        )
        title = _title(form, partial or final_hops, program.devices)
        roots = tuple(program.devices[k] for k in sorted(form.roots))
        links = (_links(used_hops, plan, program.devices) for used_hops in (partial, final_hops))
        devices = len({end for hop in form.used for end in hop[:2]})
        kinds.setdefault((_kind(form), devices), []).append(ShownRoute(title, share, len(chunks), roots, *links))
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


def _title(form: _Form, hops: set[_Hop], names: tuple[str, ...]) -> str:
    """Return a text: the devices of a ring in order, a tree as in ``Plan.explain``, or the roots of an exchange."""
    if form.cycle:
        return " → ".join(names[k] for k in form.cycle)
    if _kind(form) != "tree":
        return f"result on {', '.join(names[k] for k in sorted(form.roots))}"
    (root,) = form.roots
    to_root = all(src != root for src, *_ in hops)
    return tree_text(names[root], {names[a]: names[b] for a, b in ((s, d) if to_root else (d, s) for s, d, _ in hops)})


def _limit_routes(route_groups: list[RouteGroup]) -> tuple[RouteGroup, ...]:
    """Return the groups with as many routes as ``_MOST_LINKS`` allows, but with at least their first route."""
    most_links = _MOST_LINKS // max(1, len(route_groups))  # the limit of each group
    limited = []
    for group in route_groups:
        links = len(group.routes[0].partial) + len(group.routes[0].final)
        limited.append(group._replace(routes=group.routes[: max(1, most_links // max(1, links))]))
    return tuple(limited)
