"""``forest``: trees that together reach the bound or nearly do, each with a share of the buffer.

Input: a request. Output: a ``Forest``: a schedule whose fluid rate is that of the bound or slightly less. Broadcasts
and all-gathers use trees out of their roots. Reduces and reduce-scatters use trees into their roots, which are found as
trees out of the roots on reversed links. An all-reduce has both for each root; a linear program divides the bandwidths
between the two. Trees may also branch at helpers: switches that reduce or multicast, and devices that are not members.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from ..schedule import Schedule, fluid_rate
from ..topology import Link, Topology
from .optimal.bound import bound_of_members
from .optimal.bounds.demand import MixedTree
from .optimal.bounds.linear_program import optimum
from .optimal.bounds.solver import common_unit
from .optimal.bounds.steiner import Parent
from .optimal.helper_trees import best_helper_trees
from .optimal.symmetric.orbit_forest import symmetric_forest, symmetric_topology
from .optimal.trees.fitting import TOLERANCE, fit_trees
from .optimal.trees.tree_schedule import Tree, TreeShare, depth, reversed_tree, trees_to_schedule
from .requests import Request
from .topologies import NeutralTopology, neutral_topology, reachable_nodes, require_routes

_MOST_PACKED: Final = 256  # with more devices, trees are packed one by one only if symmetry gives none
_MOST_SETS: Final = 3  # the most sets of ``_helper_sets`` besides the empty one

Pair = tuple[str, str]


class Forest(NamedTuple):
    """A schedule of packed trees."""

    schedule: Schedule  # one chunk per tree
    k: Fraction  # the average number of unit trees per root; a tree with w units of bandwidth counts w times
    trees: int  # the number of shares of the buffer; in an all-reduce, a share has a tree into a root and one out of it
    depth: int  # of the deepest tree, in edges from root to leaf; a route through nodes that only forward is one edge


def forest_schedules(request: Request) -> list[Schedule]:
    """Return a list of one schedule, by ``forest``. Without a topology, it is planned on a full mesh of equal links."""
    if request.topology is None:
        members = request.members
        links = [Link(a, b, Fraction(1)) for a in members for b in members if a != b]
        request = request._replace(topology=Topology.unchecked(members, links), collective="all_reduce")
    return [forest(request._replace(algorithm="forest", nbytes=0, packs=1, first=0)).schedule]


@lru_cache(maxsize=512)
def forest(request: Request) -> Forest:
    """Return trees that together reach the rate of the bound or nearly do: see "Limits" in docs/planning.md.

    In an all-reduce, reduce or broadcast, each tree connects all sources and destinations. In a reduce-scatter or
    all-gather, each device is the root of its part of the buffer. Devices that are not members forward data; they also
    reduce or copy it if that makes the trees faster.

    Raises:
      PlanError: no route leads to a destination (or source, if there are several of both); the error names the cut.

    >>> box = Topology.star([f"cuda:{k}" for k in range(8)], 450)
    >>> planned = forest(Request("all_gather", box.devices, box.devices, topology=box))
    >>> planned.k, planned.trees, planned.depth
    (Fraction(1, 1), 8, 1)
    """
    topology, members = request.topology, request.members
    assert topology is not None
    require_routes(topology, request.sources, request.destinations, request.collective)
    if len(request.sources) > 1 and len(request.destinations) > 1:  # each tree connects all members
        require_routes(topology, members, members, f"{request.collective} by trees")
    idle = any(device not in members for device in topology.devices)  # there are devices that may help
    sets = _helper_sets(topology, members)
    best = _helped_forest(request) if idle else None
    if best is not None:
        best_rate = fluid_rate(best.schedule, topology) or Fraction(0)
    else:
        best, best_rate = _best_symmetric_forest(request, sets if not idle else [()])
    if best is not None and (len(members) > _MOST_PACKED or best_rate >= (_limit(request) or 0) * (1 - TOLERANCE)):
        return best  # if it has helpers, idle devices forward data in explicit steps, which any engine can run
    limit = _limit(request) if len(sets) > 1 else None
    if limit is not None and request.collective != "all_reduce":
        limit *= 1 - TOLERANCE  # few trees without helpers are better than a little more bandwidth
    for helpers in [*sets, None] if len(sets) > 1 and not idle else sets:  # None: each tree has helpers of its own
        if helpers is None:
            tried = _helped_forest(request)
        else:
            tried = _packed_forest(neutral_topology(topology, members, helpers), request)
        rate = Fraction(-1) if tried is None else fluid_rate(tried.schedule, topology) or Fraction(0)
        if rate > best_rate:
            best, best_rate = tried, rate
        if limit is not None and best_rate >= limit:
            break
    assert best is not None
    return best


def _best_symmetric_forest(request: Request, sets: list[tuple[str, ...]]) -> tuple[Forest | None, Fraction]:
    """Return the fastest symmetric forest with one of the sets of helpers, and its rate, or ``None`` and -1."""
    collective, _, roots = _bound_arguments(request)
    best, best_rate = None, Fraction(-1)
    for helpers in sets:
        tried = symmetric_forest(request, collective, roots, helpers)
        if tried is not None and tried.rate > best_rate:
            best, best_rate = Forest(tried.schedule, tried.k, tried.trees, tried.depth), tried.rate
            if tried.rate >= tried.limit:
                break
    return best, best_rate


def is_symmetric(request: Request) -> bool:
    """Return whether the topology is symmetric enough to find trees for any number of devices in seconds."""
    assert request.topology is not None
    _, members, roots = _bound_arguments(request)
    return symmetric_topology(request.topology, members, roots) is not None


def _limit(request: Request) -> Fraction | None:
    """Return the bound of a request in GB/s; ``None`` if nothing has to move, or if no bound is known."""
    assert request.topology is not None
    collective, members, roots = _bound_arguments(request)
    if collective == "all_reduce" and set(request.sources) != set(request.destinations):
        return None
    return bound_of_members(request.topology, collective, members, roots).algbw


def _bound_arguments(request: Request) -> tuple[str, tuple[str, ...], tuple[tuple[str, Fraction], ...] | None]:
    """Return the arguments of ``bound_of_members``: the collective, the members, and ((root, 1),) or ``None``.

    An all-reduce from a single source is a broadcast, and one to a single destination is a reduce.
    """
    if len(request.sources) == 1:
        return "broadcast", request.members, ((request.sources[0], Fraction(1)),)
    if len(request.destinations) == 1:
        return "reduce", request.members, ((request.destinations[0], Fraction(1)),)
    return request.collective, request.members, None


def _helper_sets(topology: Topology, members: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the sets of helpers to try: first the empty set, then the nodes with the most bandwidth.

    Each later set adds the nodes with the next lower bandwidth. Every tree passes through all nodes of the set. So a
    fast switch inside a machine makes the trees faster, and a slow one between machines makes them slower.
    """
    widths: defaultdict[Fraction, list[str]] = defaultdict(list)  # the nodes by their bandwidth
    reducing = [switch.name for switch in topology.switches if switch.reduces]
    candidates = [*reducing, *(device for device in topology.devices if device not in members)]
    if not candidates:
        return [()]
    connected = reachable_nodes(topology, members[0]) & reachable_nodes(topology, members[0], backwards=True)
    for node in candidates:
        if node in connected:
            widths[sum((link.bandwidth for link in topology.out_links(node)), Fraction(0))].append(node)
    sets: list[tuple[str, ...]] = [()]
    for width in sorted(widths, reverse=True)[:_MOST_SETS]:
        sets.append((*sets[-1], *widths[width]))
    return sets


def _packed_forest(neutral: NeutralTopology, request: Request) -> Forest:
    """Return the forest on a neutral topology. All devices of the topology may reduce; the switches only forward."""
    topology, collective = neutral.topology, request.collective
    sources, destinations = request.sources, request.destinations
    position = {neutral.names[name]: k for k, name in enumerate(topology.devices)}
    links = {(link.src, link.dst): link.bandwidth for link in topology.links}
    equal = {k: Fraction(1) for k in range(len(request.members))}
    shares: list[TreeShare]
    if len(position) == 1:
        shares, k = [TreeShare(0, Fraction(1), None, None)], Fraction(1)
    elif collective in ("broadcast", "all_gather") or (collective == "all_reduce" and len(sources) == 1):
        roots = equal if collective == "all_gather" else {position[sources[0]]: Fraction(1)}
        trees, k = fit_trees(topology, links, roots)
        shares = [TreeShare(tree.root, Fraction(tree.weight), None, tree) for tree in trees]
    elif collective in ("reduce", "reduce_scatter") or len(destinations) == 1:
        roots = equal if collective == "reduce_scatter" else {position[destinations[0]]: Fraction(1)}
        trees, k = fit_trees(topology, _reversed_links(links), roots)
        shares = [TreeShare(tree.root, Fraction(tree.weight), reversed_tree(tree), None) for tree in trees]
    else:
        shares, k = _all_reduce_shares(topology, links)
    nodes = [neutral.names[name] for name in topology.nodes]
    return _forest_of_shares(request, nodes, len(topology.devices), shares, k)


def _forest_of_shares(request: Request, nodes: list[str], devices: int, shares: list[TreeShare], k: Fraction) -> Forest:
    """Return the forest of shares whose trees contain positions in ``nodes``, of which ``devices`` are devices."""
    schedule = trees_to_schedule("forest", request, nodes, devices, shares)
    deepest = max((depth(tree) for share in shares for tree in (share.into, share.out) if tree), default=0)
    return Forest(schedule, k, len(shares), deepest)


def _helped_forest(request: Request) -> Forest | None:
    """Return the best forest in which every tree has helpers of its own, at which it branches.

    Return ``None`` if there are too many helpers, or no such trees.
    """
    assert request.topology is not None
    best = best_helper_trees(request.topology, *_bound_arguments(request))
    if best is None:
        return None
    names = [best.neutral.names[node] for node in best.neutral.topology.nodes]
    mixed = [tree for demand_trees in best.mixture.trees for tree in demand_trees]
    return forest_of_trees(request, names, range(len(best.neutral.topology.devices)), mixed)


def forest_of_trees(
    request: Request, names: Sequence[str], joints: Sequence[int], mixed: Sequence[MixedTree]
) -> Forest:
    """Return the forest that consists of the trees ``mixed``.

    Args:
      request: its members are the first devices of the schedule; the helpers that some tree uses follow.
      names: the names of the nodes. ``joints`` and ``mixed`` contain positions in them.
      joints: the nodes that can combine or copy, so that trees may branch there.
      mixed: one or more trees.
    """
    edges = [edge for tree in mixed for parents in (tree.into, tree.out) for edge in parents or ()]
    used = {tree.root for tree in mixed} | {node for node, _, _ in edges}
    number = {name: node for node, name in enumerate(names)}
    members = [number[name] for name in request.members]
    devices = [*members, *(node for node in joints if node in used and node not in set(members))]
    order = [*devices, *(node for node in range(len(names)) if node not in set(devices))]
    place = {node: k for k, node in enumerate(order)}

    def tree_of(root: int, parents: Sequence[Parent] | None) -> Tree | None:
        if parents is None:
            return None
        in_order = [(place[node], place[up], tuple(place[k] for k in via)) for node, up, via in parents]
        return Tree(place[root], 1, tuple(in_order))

    shares = [
        TreeShare(place[root], weight, tree_of(root, into), tree_of(root, out)) for root, weight, into, out in mixed
    ]
    weights = [share.weight for share in shares]
    k = sum(weights, Fraction(0)) / common_unit(weights) / len({share.root for share in shares})
    return _forest_of_shares(request, [names[node] for node in order], len(devices), shares, k)


def _all_reduce_shares(topology: Topology, links: dict[Pair, Fraction]) -> tuple[list[TreeShare], Fraction]:
    """Return the shares of an all-reduce, and ``Forest.k``. A share has trees into and out of one root."""
    best = optimum(topology)
    if best.reached <= 0:  # no exact solution was found: use half of every link to reduce, half to broadcast
        half = {pair: bandwidth / 2 for pair, bandwidth in links.items()}
        best = best._replace(roots=dict.fromkeys(topology.devices, Fraction(1)), down=half, up=half)
    roots = {k: best.roots[device] for k, device in enumerate(topology.devices) if best.roots[device]}
    if topology.symmetric:  # each tree that reduces is a tree that broadcasts, backwards
        # If each direction gets half of every link, the trees for the full bandwidths are the same.
        halves = all(used * 2 == links[pair] for pair, used in best.down.items())
        trees, k = fit_trees(topology, links if halves else best.down, roots)
        return [TreeShare(tree.root, Fraction(tree.weight), reversed_tree(tree), tree) for tree in trees], k
    out, out_k = fit_trees(topology, best.down, roots)
    into, into_k = fit_trees(topology, _reversed_links(best.up), roots)
    shares = []
    for root in roots:
        reducing = [reversed_tree(tree) for tree in into if tree.root == root]
        shares += _paired_shares(root, reducing, [tree for tree in out if tree.root == root])
    return shares, max(out_k, into_k)


def _reversed_links(links: dict[Pair, Fraction]) -> dict[Pair, Fraction]:
    return {(dst, src): bandwidth for (src, dst), bandwidth in links.items()}


def _paired_shares(root: int, into: list[Tree], out: list[Tree]) -> list[TreeShare]:
    """Divide a root's data into shares, each with one tree into the root and one tree out of it.

    The weights of each list divide the data into consecutive parts. A share ends where a part of either list ends.
    """
    scale = Fraction(sum(tree.weight for tree in out), sum(tree.weight for tree in into))
    ends_in = [end * scale for end in accumulate(tree.weight for tree in into)]
    ends_out = [Fraction(end) for end in accumulate(tree.weight for tree in out)]
    shares, start = [], Fraction(0)
    for end in sorted({*ends_in, *ends_out}):
        pair = into[bisect_right(ends_in, start)], out[bisect_right(ends_out, start)]
        shares.append(TreeShare(root, end - start, *pair))
        start = end
    return shares
