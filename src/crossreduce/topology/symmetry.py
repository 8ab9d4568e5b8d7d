"""``Symmetry``: permutations of the nodes of a topology that change no link, and the orbits of nodes under them.

A generator is one permutation and its order: applied ``order`` times, it is the identity. The generators of a symmetry
commute. So each element of their group is a product of powers of the generators, each with an exponent below its order.
The images of a node under all elements are spread evenly over its orbit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from .topology import Topology


class SymmetryGenerator(NamedTuple):
    """A permutation that moves node k to node ``moves[k]``. Applied ``order`` times, it is the identity."""

    moves: tuple[int, ...]
    order: int


@dataclass(frozen=True)
class Symmetry:
    """The group that some permutations of nodes 0, 1, ... generate.

    >>> turn = Symmetry((SymmetryGenerator((1, 2, 3, 0), 4),), 4)
    >>> turn.order, turn.orbits, list(turn.images(1))
    (4, (0, 0, 0, 0), [1, 2, 3, 0])
    >>> Symmetry((), 3).orbits
    (0, 1, 2)
    """

    generators: tuple[SymmetryGenerator, ...]
    nodes: int

    def problem(self) -> str:
        """Return a text about an invalid generator, or "" if all are permutations with their orders and commute."""
        for k, (moves, order) in enumerate(self.generators):
            if not all(isinstance(number, int) for number in (*moves, order)):
                return f"generator {k} has numbers that are not integers"
            if sorted(moves) != list(range(self.nodes)):
                return f"generator {k} is not a permutation of {self.nodes} nodes"
            if order < 2 or power(moves, order) != tuple(range(self.nodes)):
                return f"generator {k} is not the identity after {order} times, or its order is below 2"
            for other, (other_moves, _) in enumerate(self.generators[:k]):
                if any(moves[other_moves[node]] != other_moves[moves[node]] for node in range(self.nodes)):
                    return f"the generators {other} and {k} do not commute"
        return ""

    @property
    def order(self) -> int:
        """The number of elements of the group: the product of the generators' orders."""
        return prod(generator.order for generator in self.generators)

    @cached_property
    def orbits(self) -> tuple[int, ...]:
        """For each node the least node to which the generators can move it."""
        return tuple(orbit_minima([generator.moves for generator in self.generators], self.nodes))

    @cached_property
    def sizes(self) -> dict[int, int]:
        """The number of nodes of each orbit, by its least node."""
        return Counter(self.orbits)

    def renumbered(self, before: Sequence[str], after: Sequence[str]) -> Symmetry:
        """Return the same permutations for another numbering: nodes are numbered as in ``after``, not ``before``.

        >>> Symmetry((SymmetryGenerator((1, 0, 2), 2),), 3).renumbered("abc", "cab").generators[0].moves
        (0, 2, 1)
        """
        old = {name: k for k, name in enumerate(before)}
        of_old = tuple(old[name] for name in after)
        to_new = inverse(of_old)
        moved = [SymmetryGenerator(compose(compose(of_old, moves), to_new), order) for moves, order in self.generators]
        return Symmetry(tuple(moved), self.nodes)

    def images(self, node: int) -> Iterator[int]:
        """Yield a node's image under each element of the group; the power of the last generator changes fastest."""
        yield from orbit_images(node, self.generators)

    def origins(self, node: int) -> Iterator[int]:
        """Yield for each element the node that it moves to ``node``, in the order of ``images``."""
        yield from orbit_images(node, [SymmetryGenerator(inverse(moves), order) for moves, order in self.generators])

    def elements(self) -> Iterator[tuple[int, ...]]:
        """Yield the permutation of each element, in the order of ``images``."""
        yield from zip(*map(self.images, range(self.nodes)), strict=True)

    def image(self, element: int, node: int) -> int:
        """Return the image of a node under one element of the group, numbered as in ``images``."""
        return self._apply(element, node, 1)

    def origin(self, element: int, node: int) -> int:
        """Return the node that one element of the group moves to ``node``.

        >>> turn = Symmetry((SymmetryGenerator((1, 2, 3, 0), 4),), 4)
        >>> turn.image(3, 2), turn.origin(3, 1)
        (1, 2)
        """
        return self._apply(element, node, -1)

    def _apply(self, element: int, node: int, direction: int) -> int:
        """Return the image (direction 1) or the origin (-1) of a node under an element of the group."""
        for order, cycles in self._cycles:
            element, exponent = divmod(element, order)
            cycle, position = cycles[node]
            node = cycle[(position + direction * exponent) % len(cycle)]
        return node

    @cached_property
    def _cycles(self) -> list[tuple[int, list[tuple[tuple[int, ...], int]]]]:
        """The order of each generator, from the last to the first, and for each node its cycle and position in it."""
        cycles = []
        for moves, order in reversed(self.generators):
            places: list[tuple[tuple[int, ...], int]] = [((), 0)] * self.nodes
            for first in range(self.nodes):
                if not places[first][0]:
                    cycle = [first]
                    while moves[cycle[-1]] != first:
                        cycle.append(moves[cycle[-1]])
                    for position, node in enumerate(cycle):
                        places[node] = tuple(cycle), position
            cycles.append((order, places))
        return cycles

    def links(self, topology: Topology) -> tuple[tuple[int, ...], dict[int, int]] | None:
        """Return for each link the least link of its orbit, and for each of these the number of links in the orbit.

        Links and nodes are numbered in the order of the topology. The result is ``None`` if this is not a symmetry of
        the topology: a generator changes the kind of a node, or the bandwidth or latency of a link.
        """
        count, kinds = len(topology.devices), [switch.reduces for switch in topology.switches]
        if self.nodes != len(topology.nodes):
            return None
        ends, link_number, speeds = _numbered_links(topology)
        moved: list[list[int]] = []
        for moves, _ in self.generators:
            for node, image in enumerate(moves):
                if (node < count) != (image < count) or (node >= count and kinds[node - count] != kinds[image - count]):
                    return None
            images = [link_number.get((moves[src], moves[dst]), -1) for src, dst in ends]
            if -1 in images or [speeds[image] for image in images] != speeds:
                return None
            moved.append(images)
        minima = orbit_minima(moved, len(ends))
        return tuple(minima), Counter(minima)


@lru_cache(maxsize=16)
def _numbered_links(topology: Topology) -> tuple[list[tuple[int, int]], dict[tuple[int, int], int], list[int]]:
    """Return the ends of each link, the link of each pair of ends, and a number for each bandwidth with latency."""
    number = {node: k for k, node in enumerate(topology.nodes)}
    ends = [(number[link.src], number[link.dst]) for link in topology.links]
    kinds: dict[tuple[object, ...], int] = {}
    return (
        ends,
        {pair: k for k, pair in enumerate(ends)},
        [kinds.setdefault(link[2:], len(kinds)) for link in topology.links],
    )


def orbit_images(node: int, generators: Sequence[SymmetryGenerator]) -> list[int]:
    """Return the image of a node under each product of powers of the generators: see ``Symmetry.images``."""
    images = [node]
    for moves, order in reversed(generators):  # the first generator changes slowest
        layers = [images]
        for _ in range(order - 1):
            layers.append([moves[k] for k in layers[-1]])
        images = [k for layer in layers for k in layer]
    return images


def inverse(moves: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse permutation."""
    origins = [0] * len(moves)
    for node, image in enumerate(moves):
        origins[image] = node
    return tuple(origins)


def compose(first: Sequence[int], then: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that applies ``first`` and then ``then``."""
    return tuple([then[k] for k in first])


def power(moves: Sequence[int], times: int) -> tuple[int, ...]:
    """Return the permutation that applies ``moves`` as often as ``times`` says."""
    result, square = tuple(range(len(moves))), tuple(moves)
    while times:
        if times & 1:
            result = compose(result, square)
        square, times = compose(square, square), times >> 1
    return result


def orbit_minima(moved: Sequence[Sequence[int]], count: int) -> list[int]:
    """Return for each number below ``count`` the least number of its orbit under the permutations ``moved``."""
    minima = [-1] * count
    for first in range(count):
        if minima[first] < 0:
            minima[first] = first
            left = [first]
            while left:
                node = left.pop()
                for moves in moved:
                    if minima[moves[node]] < 0:
                        minima[moves[node]] = first
                        left.append(moves[node])
    return minima
