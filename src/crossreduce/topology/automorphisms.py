"""Finds symmetries of a topology: permutations of its nodes that keep every link, its bandwidth and its latency.

Colour refinement divides the nodes into cells that links can tell apart. Then one device is moved to another one, and
refinement runs on the topology and on its image side by side; where cells of several nodes are left, their nodes are
matched by guesses that suit machines: cycles of equal length over neighbouring numbers, or every node in its place.
A guess that contradicts the links is seen in the next refinement. Permutations that are found are verified exactly, so
a wrong guess, or a collision of hashes, costs a symmetry but never makes a wrong one. Only permutations that commute
with all earlier ones are kept. Of an irregular topology there may be none.

Source: McKay & Piperno, Practical graph isomorphism II, J. Symbolic Computation 60, 2014 (refinement and
individualisation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import lcm
from typing import Any, Final

from .symmetry import Symmetry, SymmetryGenerator, orbit_minima
from .topology import Topology

_MOST_TRIES: Final = 400  # refinements in the search for one permutation
_MOST_TARGETS: Final = 16  # devices that one device is moved to, for one more generator
_MOST_CHOICES: Final = 12  # images of one node that are tried
_MANY_CELLS: Final = 16  # after so many cells, and after each doubling of their number, all others are guessed at once
_SOME_CELLS: Final = 6  # after so many cells, all cells of one size are guessed at once
_SEED: Final = 0x9E3779B97F4A7C15


@lru_cache(maxsize=64)
def symmetry_of(topology: Topology, fixed: tuple[str, ...] = ()) -> Symmetry:
    """Return symmetries of a topology that leave the ``fixed`` nodes in their places.

    >>> square = symmetry_of(Topology.torus(4, 4))
    >>> square.order, set(square.orbits)
    (16, {0})
    >>> len(set(symmetry_of(Topology.torus(4, 4).without_link(0, 1)).orbits)) > 1
    True
    """
    search = _PermutationSearch(topology, fixed)
    count = len(topology.devices)
    best: tuple[int, Symmetry] | None = None
    # Nodes in their order; those of small orbits first; the greatest orders; those of large orbits first.
    for sign, greatest_order in ((0, False), (1, False), (0, True), (-1, False)):
        symmetry = _greedy(search, topology, sign, greatest_order=greatest_order)
        orbits = len({orbit for orbit in symmetry.orbits if orbit < count})
        if best is None or orbits < best[0]:
            best = orbits, symmetry
        if orbits == len([cell for cell in search.cells(search.start) if cell[0] < count]):
            break
    assert best is not None
    return best[1] if best[1].links(topology) is not None else Symmetry((), len(topology.nodes))


def extend_to_switches(topology: Topology, moved: Symmetry) -> Symmetry | None:
    """Return the symmetry that moves devices as another one does, and switches with them, or ``None``.

    >>> extend_to_switches(Topology.star(3), Symmetry((SymmetryGenerator((1, 2, 0), 3),), 3))
    Symmetry(generators=(SymmetryGenerator(moves=(1, 2, 0, 3), order=3),), nodes=4)
    """
    search = _PermutationSearch(topology, ())
    generators: list[SymmetryGenerator] = []
    for moves, order in moved.generators:
        matching = _PermutationMatching(search, 0, moves[0], generators)
        if not matching.match(list(enumerate(moves))) or not matching.complete():
            return None
        generators.append(SymmetryGenerator(tuple(matching.image), order))
    symmetry = Symmetry(tuple(generators), len(topology.nodes))
    return None if symmetry.problem() or symmetry.links(topology) is None else symmetry


def _greedy(search: _PermutationSearch, topology: Topology, sign: int, *, greatest_order: bool) -> Symmetry:
    """Return a symmetry to which one generator after another is added: see ``_PermutationSearch.generator``."""
    generators: list[SymmetryGenerator] = []
    cells = search.cells(search.start)
    devices = len(topology.devices)
    for cell in sorted((cell for cell in cells if cell[0] < devices and len(cell) > 1), key=lambda c: (-len(c), c[0])):
        limit = devices  # products of powers beyond the number of devices would only repeat chunks
        while True:
            orbits = orbit_minima([moves for moves, _ in generators], len(topology.nodes))
            sizes = Counter(orbits)
            if sizes[orbits[cell[0]]] == len(cell):
                break
            order = 1
            for generator in generators:
                order *= generator.order
            others = [node for node in cell if orbits[node] != orbits[cell[0]]]
            another = search.generator(cell[0], others, generators, sign, limit // order, greatest_order=greatest_order)
            if another is None:
                break
            generators.append(another)
    return Symmetry(tuple(generators), len(topology.nodes))


class _PermutationSearch:
    """Searches permutations of the nodes of one topology."""

    def __init__(self, topology: Topology, fixed: tuple[str, ...]) -> None:
        import numpy as np

        number = {node: k for k, node in enumerate(topology.nodes)}
        self.topology, self.n, self.devices = topology, len(number), len(topology.devices)
        kinds = {kind: k for k, kind in enumerate(sorted({link[2:] for link in topology.links}))}
        src = np.array([number[link.src] for link in topology.links], np.int64)
        dst = np.array([number[link.dst] for link in topology.links], np.int64)
        kind = np.array([kinds[link[2:]] for link in topology.links], np.uint64)
        # Links in the order of one of their ends: the other end, the kind, and where each node's links begin.
        self.ways = []
        for way, (near, far) in enumerate(((src, dst), (dst, src))):
            order = np.argsort(near, kind="stable")
            starts = np.searchsorted(near[order], np.arange(self.n + 1))
            self.ways.append((far[order], _hashes(kind[order] * np.uint64(2) + np.uint64(way)), starts))
        colours = np.zeros(self.n, np.int64)
        for k, switch in enumerate(topology.switches, start=self.devices):
            colours[k] = 2 if switch.reduces else 1
        for k, name in enumerate(fixed):
            colours[number[name]] = 3 + k
        both = self.refine(np.stack([colours, colours]))
        assert both is not None
        self.start = both[0]

    def refine(self, pair: Any) -> Any:
        """Return both colourings, refined until links tell no two nodes of a colour apart; ``None``: they differ."""
        import numpy as np

        _, colours = np.unique(pair, return_inverse=True)
        colours, count = colours.reshape(pair.shape), 0
        while True:
            if np.bincount(colours[0]).tolist() != np.bincount(colours[1]).tolist():
                return None
            here = int(colours.max()) + 1
            if here == count:
                return colours
            count = here
            hashed = _hashes(colours.astype(np.uint64))
            total = hashed * np.uint64(3)
            for way, (far, kind, starts) in enumerate(self.ways):
                sums = np.zeros((2, len(far) + 1), np.uint64)
                np.cumsum(_hashes(hashed[:, far] + kind), axis=1, out=sums[:, 1:])
                total += _hashes(sums[:, starts[1:]] - sums[:, starts[:-1]] + np.uint64(way + 1))
            # Nodes that had different colours keep different ones.
            order = np.lexsort((total.ravel(), colours.ravel()))
            flat, old = total.ravel()[order], colours.ravel()[order]
            new = np.concatenate([[0], np.cumsum((flat[1:] != flat[:-1]) | (old[1:] != old[:-1]))])
            colours = np.empty(2 * self.n, np.int64)
            colours[order] = new
            colours = colours.reshape(2, self.n)

    def cells(self, colours: Any) -> list[list[int]]:
        """Return the nodes of each colour, sorted."""
        import numpy as np

        order = np.argsort(colours, kind="stable")
        ends = np.flatnonzero(np.diff(colours[order])) + 1
        return [part.tolist() for part in np.split(order, ends)]

    def generator(
        self,
        first: int,
        others: list[int],
        generators: Sequence[SymmetryGenerator],
        sign: int,
        most: int,
        *,
        greatest_order: bool,
    ) -> SymmetryGenerator | None:
        """Return a permutation that moves a node to one of ``others``, and commutes with ``found``.

        Of the nodes with the same relation to it, only the first one is tried. The tries are sorted by ``sign`` times
        the number of such nodes, and then by the first of them. The order is at most ``most``. ``greatest_order``:
        return the permutation with the greatest order of up to ``_MOST_TARGETS`` tries; else the first one.
        """
        import numpy as np

        marked = self.start.copy()
        marked[first] = self.n
        seen = self.refine(np.stack([marked, marked]))
        assert seen is not None
        colours = seen[0]
        sizes = np.bincount(colours)
        firsts: dict[int, int] = {}
        for node in others:
            firsts.setdefault(int(colours[node]), node)
        targets = sorted(firsts.values(), key=lambda node: (sign * int(sizes[colours[node]]), node))
        best: SymmetryGenerator | None = None
        for target in targets[:_MOST_TARGETS]:
            permutation = _PermutationMatching(self, first, target, generators).run()
            if permutation is not None and permutation.order > most:
                continue
            if permutation is not None and (best is None or permutation.order > best.order):
                best = permutation
            if permutation is not None and not greatest_order:
                break
        return best


class _PermutationMatching:
    """One search for a permutation that moves ``first`` to ``target``."""

    def __init__(
        self, search: _PermutationSearch, first: int, target: int, generators: Sequence[SymmetryGenerator]
    ) -> None:
        import numpy as np

        self.search, self.first, self.target, self.generators = search, first, target, generators
        self.image = [-1] * search.n
        self.origin = [-1] * search.n
        self.pair = np.stack([search.start, search.start])
        self.tries = 0

    def run(self) -> SymmetryGenerator | None:
        """Return the permutation; ``None``: none was found."""
        if not self.match([(self.first, self.target)]) or not self.complete():
            return None
        moves = tuple(self.image)
        order = _order(moves)
        length = 1
        node = self.target
        while node != self.first:
            node, length = moves[node], length + 1
        permutation = SymmetryGenerator(moves, order)
        if order != length or Symmetry((*self.generators, permutation), len(moves)).problem():
            return None
        return permutation if Symmetry((permutation,), len(moves)).links(self.search.topology) is not None else None

    def complete(self) -> bool:
        """Give all other nodes images by guesses; return whether that contradicts nothing."""
        rounds = 0
        while True:
            cell = self.open_cell()
            if cell is None:
                return True
            rounds += 1
            if rounds >= _MANY_CELLS and rounds & (rounds - 1) == 0 and self.match(self.all_guesses()):
                continue
            if rounds >= _SOME_CELLS and self.match(self.all_guesses(cell[0])):
                continue
            if not any(self.match(guess) for guess in self.guesses(*cell)):
                return False

    def match(self, pairs: Iterable[tuple[int, int]]) -> bool:
        """Give each node an image, and to all nodes what follows; return whether this contradicts nothing."""
        self.tries += 1
        if self.tries > _MOST_TRIES:
            return False
        image: dict[int, int] = {}
        origin: dict[int, int] = {}
        left = list(pairs)
        while left:
            x, y = left.pop()
            known = image.get(x, self.image[x])
            if known == y:
                continue
            if known >= 0 or origin.get(y, self.origin[y]) >= 0:
                return False
            image[x], origin[y] = y, x
            left += [(moves[x], moves[y]) for moves, _ in self.generators]
        pair = self.pair.copy()
        for k, (x, y) in enumerate(image.items()):
            if pair[0, x] != pair[1, y]:
                return False
            pair[0, x] = pair[1, y] = self.search.n + k
        both = self.search.refine(pair)
        if both is None:
            return False
        self.pair = both
        for x, y in image.items():
            self.image[x], self.origin[y] = y, x
        # A cell of one node has its image.
        import numpy as np

        counts = np.bincount(both[0])
        single = counts[both[0]] == 1
        where = np.empty(len(counts), np.int64)
        where[both[1]] = np.arange(self.search.n)
        for x in np.flatnonzero(single).tolist():
            y = int(where[both[0][x]])
            self.image[x], self.origin[y] = y, x
        return True

    def open_cell(self) -> tuple[list[int], list[int]] | None:
        """Return nodes whose images are not known, and the nodes that can be their images; ``None``: all are known."""
        import numpy as np

        end = self.first  # the end of the path that begins with the first node
        while self.image[end] >= 0 and self.image[end] != self.first:
            end = self.image[end]
        if self.image[end] >= 0:
            counts = np.bincount(self.pair[0])
            unknown = np.flatnonzero(counts[self.pair[0]] > 1)
            if not len(unknown):
                return None
            # Of the smallest cells, the first one with a node that another one was moved to.
            smallest = counts[self.pair[0][unknown]].min()
            few = unknown[counts[self.pair[0][unknown]] == smallest].tolist()
            end = next((node for node in few if self.origin[node] >= 0), few[0])
        colour = self.pair[0][end]
        return np.flatnonzero(self.pair[0] == colour).tolist(), np.flatnonzero(self.pair[1] == colour).tolist()

    def all_guesses(self, like: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Return the first guess for each cell with several nodes, or for each one ``like`` another one."""
        kinds, guesses = self.search.start, list[tuple[int, int]]()
        of_image = {int(self.pair[1][ys[0]]): ys for ys in self.search.cells(self.pair[1])}
        for xs in self.search.cells(self.pair[0]):
            if len(xs) > 1 and (not like or (len(xs) == len(like) and kinds[xs[0]] == kinds[like[0]])):
                guesses += next(iter(self.guesses(xs, of_image[int(self.pair[0][xs[0]])])))
        return guesses

    def guesses(self, xs: list[int], ys: list[int]) -> Iterable[list[tuple[int, int]]]:
        """Yield guesses of images for all of ``xs``, and then for one of them alone."""
        both = set(xs) & set(ys)
        ends = [x for x in xs if x not in both]  # the ends of paths, and below their starts
        period = self._period()
        x = self._chosen(xs)
        shifted = x + self.target - self.first
        if not both:
            if not period and shifted in ys:  # straight on
                yield [(x, shifted)]
            yield list(zip(xs, ys, strict=True))
        elif ends:
            rest = sorted(both)
            share = len(rest) // len(ends)
            if share * len(ends) == len(rest):
                paths = [[end, *rest[k * share : (k + 1) * share]] for k, end in enumerate(ends)]
                starts = [self._start(end) for end in ends]
                if set(starts) == set(ys) - both:
                    yield [
                        pair
                        for path, start in zip(paths, starts, strict=True)
                        for pair in zip(path, [*path[1:], start], strict=True)
                    ]
        else:
            still = [(x, x) for x in xs]
            stays = self._stays(xs[0])
            if stays:
                yield still
            if period and len(xs) % period == 0:
                blocks = [xs[k : k + period] for k in range(0, len(xs), period)]
                yield [pair for block in blocks for pair in zip(block, [*block[1:], block[0]], strict=True)]
            if not stays:
                yield still
        choices = sorted(ys, key=lambda y: (y != shifted, y == self.first, y != x, y))
        for y in choices[:_MOST_CHOICES]:
            yield [(x, y)]

    def _stays(self, node: int) -> bool:
        """Return whether some nodes of the same kind as this one stay in their places, and none is known to move."""
        kind = self.search.start[node]
        known = [
            self.image[x] == x for x in range(self.search.n) if self.search.start[x] == kind and self.image[x] >= 0
        ]
        return bool(known) and all(known)

    def _chosen(self, xs: list[int]) -> int:
        return next((x for x in xs if self.origin[x] >= 0), xs[0])

    def _period(self) -> int:
        """Return the length of the first node's cycle; 0: it is not closed yet."""
        node, length = self.image[self.first], 1
        while node >= 0 and node != self.first:
            node, length = self.image[node], length + 1
        return length if node >= 0 else 0

    def _start(self, node: int) -> int:
        while self.origin[node] >= 0:
            node = self.origin[node]
        return node


def _order(moves: Sequence[int]) -> int:
    """Return after how many times a permutation is the identity."""
    seen = [False] * len(moves)
    order = 1
    for first in range(len(moves)):
        node, length = first, 0
        while not seen[node]:
            seen[node] = True
            node, length = moves[node], length + 1
        order = lcm(order, length or 1)
    return order


def _hashes(values: Any) -> Any:
    """Return hashes of 64-bit integers (Steele, Lea & Flood, Fast splittable pseudorandom numbers, OOPSLA 2014)."""
    import numpy as np

    with np.errstate(over="ignore"):
        z = values * np.uint64(_SEED) + np.uint64(_SEED)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
