"""The trees of a schedule, and groups of trees with the same shape, so that a reader sees each shape once.

Input: a ``Schedule`` and its ``Topology``. Output: ``TreeGroup`` values, in the order of their first chunks. The chunks
of a ring are one group, since they use the same links with different roots and in both directions. Pure: no I/O.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain

from ...lowering import ChunkProgram, Program, lower
from ...schedule import Schedule
from ...schedule.traffic import route_links
from ...topology import Topology

Graph = dict[str, dict[str, int]]  # for each node its neighbours, each with the number of the kind of link between them
Route = tuple[str, ...] | None  # the nodes that a transfer passes, or None for the topology's own route
Ids = dict[object, int]  # numbers of values, in the order of their first use


@dataclass(frozen=True)
class ScheduleTree:
    """Chunks of a schedule with the same roots and the same transfers.

    Roots are the devices that produce the result, or the only source.
    """

    chunks: tuple[int, ...]
    share: Fraction  # the part of the buffer in these chunks
    roots: tuple[str, ...]
    links: Counter[tuple[str, str, bool]]  # the number of values on each link, by (src, dst, whether they are final)

    @cached_property
    def pairs(self) -> frozenset[frozenset[str]]:
        """The pairs of nodes between which data moves, in any direction."""
        return frozenset(frozenset(ends[:2]) for ends in self.links)

    @cached_property
    def is_ring(self) -> bool:
        """Whether the links form one cycle, as in a chunk of the ring algorithm. They are connected in any case."""
        degrees = Counter(node for pair in self.pairs for node in pair)
        return set(degrees.values()) == {2}


@dataclass(frozen=True)
class TreeGroup:
    """Trees of the same shape: their links, without directions, look the same if the names of nodes are ignored.

    Devices, switches, bandwidths and latencies are told apart. Usually, the trees have the same links and different
    roots. The comparison (see ``_colours``) is exact for trees and rings. It cannot tell some exchanges apart in which
    all nodes have equally many links.
    """

    trees: tuple[ScheduleTree, ...]

    @property
    def tree(self) -> ScheduleTree:
        """The tree that represents the group: the first one of the largest share."""
        return max(self.trees, key=lambda tree: tree.share)

    @property
    def count(self) -> int:
        """The number of trees."""
        return len(self.trees)

    @cached_property
    def share(self) -> Fraction:
        """The share of the buffer that all trees carry."""
        return sum((tree.share for tree in self.trees), Fraction(0))

    @property
    def chunks(self) -> tuple[int, ...]:
        """The numbers of the chunks of all trees."""
        return tuple(sorted(chunk for tree in self.trees for chunk in tree.chunks))

    @cached_property
    def link_set_count(self) -> int:
        """How many different sets of undirected links the trees use. If it is 1, trees differ only in their roots."""
        return len({tree.pairs for tree in self.trees})

    @cached_property
    def title(self) -> str:
        """The number of trees and their share of the buffer, such as "2 rings: 32 x 1/48 = 2/3 of the buffer"."""
        whole = "the whole buffer" if self.share == 1 else f"{self.share} of the buffer"
        if self.count == 1:
            return whole
        rings = "ring: " if self.link_set_count == 1 else f"{self.link_set_count} rings: "
        kind = rings if self.tree.is_ring else ""
        shares = {tree.share for tree in self.trees}
        if len(shares) == 1:
            return f"{kind}{self.count} x {shares.pop()} = {whole}"
        return f"{kind}{self.count} trees, {whole}"


def chunk_transfers(program: Program) -> list[list[tuple[int, int, Route, bool]]]:
    """Return the transfers of each chunk, in order, as (src, dst, route, whether the value is final)."""
    transfers: list[list[tuple[int, int, Route, bool]]] = [[] for _ in program.chunks]
    for chunk, src, dst, through, final in chain.from_iterable(program.transfers):
        transfers[chunk].append((src, dst, through, final))
    return transfers


def chunk_roots(chunk: ChunkProgram) -> frozenset[int]:
    """Return the devices that compute the result of a chunk, or its only source."""
    if len(chunk.sources) == 1:
        return frozenset(chunk.sources)
    return frozenset(step.device for step in chunk.instructions if step.final)


def trees_of(schedule: Schedule, topology: Topology) -> tuple[ScheduleTree, ...]:
    """Return the trees of a schedule. Chunks with the same roots and transfers are one tree.

    Raises:
      PlanError: the topology has no route for a transfer.
      ScheduleError: ``verify`` rejects the schedule.
    """
    program = lower(schedule)
    transfers_of = chunk_transfers(program)
    alike: dict[tuple[frozenset[int], tuple[object, ...]], list[int]] = {}
    for c, chunk_program in enumerate(program.chunks):
        alike.setdefault((chunk_roots(chunk_program), (*transfers_of[c],)), []).append(c)
    trees = []
    for (roots, _), chunks in alike.items():
        links: Counter[tuple[str, str, bool]] = Counter()
        for src, dst, through, final in transfers_of[chunks[0]]:
            pairs = route_links(topology, program.devices[src], program.devices[dst], through)
            links.update((*pair, final) for pair in pairs)
        share = sum((program.chunks[c].share for c in chunks), Fraction(0))
        trees.append(ScheduleTree(tuple(chunks), share, tuple(program.devices[root] for root in sorted(roots)), links))
    return tuple(trees)


def tree_groups(schedule: Schedule, topology: Topology) -> tuple[TreeGroup, ...]:
    """Return the trees of a schedule in groups of the same shape, in the order of the first chunks.

    >>> from crossreduce.planning import ring
    >>> topology = Topology.ring(4, gb_per_s=25)
    >>> [group.title for group in tree_groups(ring(topology.devices), topology)]
    ['ring: 4 x 1/4 = the whole buffer']

    Raises:
      PlanError: the topology has no route for a transfer.
      ScheduleError: ``verify`` rejects the schedule.
    """
    by_links: dict[frozenset[frozenset[str]], list[ScheduleTree]] = {}
    for tree in trees_of(schedule, topology):
        by_links.setdefault(tree.pairs, []).append(tree)
    ids: Ids = {}
    shapes: dict[tuple[int, ...], list[ScheduleTree]] = {}
    for pairs, trees in by_links.items():
        graph = _graph(pairs, topology, ids)
        shape = tuple(sorted(_colours(graph, topology, ids).values()))
        shapes.setdefault(shape, []).extend(trees)
    in_order = [sorted(group, key=lambda tree: tree.chunks) for group in shapes.values()]
    return tuple(TreeGroup(tuple(group)) for group in in_order)


def _graph(pairs: frozenset[frozenset[str]], topology: Topology, ids: Ids) -> Graph:
    """Return the graph of some links without directions."""
    graph: Graph = {}
    for a, b in sorted(map(sorted, pairs)):
        both = (topology.link(a, b), topology.link(b, a))
        speeds = sorted((link.bandwidth, link.latency_s) for link in both if link is not None)
        kind = _number(ids, ("link", *speeds))
        graph.setdefault(a, {})[b] = kind
        graph.setdefault(b, {})[a] = kind
    return graph


def _colours(graph: Graph, topology: Topology, ids: Ids) -> dict[str, int]:
    """Return a number for each node. If a renaming can map one node to another, both have the same number.

    Each round refines the numbers by those of the neighbours, until the number of classes stays the same (the
    Weisfeiler-Leman test). Numbers of different graphs can be compared.
    """
    reducing = {switch.name: switch.reduces for switch in topology.switches}
    colours = {node: _number(ids, ("node", reducing.get(node))) for node in graph}
    classes = 0
    while len(set(colours.values())) > classes:
        classes = len(set(colours.values()))
        colours = {
            node: _number(ids, (colours[node], *sorted((kind, colours[other]) for other, kind in near.items())))
            for node, near in graph.items()
        }
    return colours


def _number(ids: Ids, value: object) -> int:
    """Return the number of a value. Equal values have equal numbers."""
    return ids.setdefault(value, len(ids))
