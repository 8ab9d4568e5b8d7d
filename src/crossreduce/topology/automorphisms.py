"""Find symmetries of a topology: permutations of its nodes that keep every link, its bandwidth and its latency.

Colour refinement divides the nodes into cells: nodes of different cells have different links. Then one device is moved
to another one, and refinement runs on the topology and on its image side by side. Where cells still have several nodes,
these are matched by guesses that suit machines: cycles of equal length over neighbouring numbers, or no moves at all.
The next refinement detects a guess that contradicts the links. Permutations that are found are verified exactly. So a
wrong guess, or a collision of hashes, can lose a symmetry but never yields a wrong one. Only permutations that commute
with all earlier ones are kept. An irregular topology may have no symmetry except the identity.

Source: McKay & Piperno, Practical graph isomorphism II, J. Symbolic Computation 60, 2014 (refinement and
individualisation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import lcm, prod
from typing import Any, Final

from .symmetry import Symmetry, SymmetryGenerator, orbit_minima
from .topology import Topology

_MOST_TRIES: Final = 400  # refinements in the search for one permutation
_MOST_TARGETS: Final = 16  # devices to which one device is moved in the search for one more generator
_MOST_CHOICES: Final = 12  # images of one node that are tried
_MANY_CELLS: Final = 16  # after this number of cells, and each doubling of it, all other cells are guessed at once
_SOME_CELLS: Final = 6  # after this number of cells, all cells of one size are guessed at once
_SEED: Final = 0x9E3779B97F4A7C15


@lru_cache(maxsize=64)
def symmetry_of(topology: Topology, fixed: tuple[str, ...] = ()) -> Symmetry:
    """Return a symmetry of a topology that leaves the ``fixed`` nodes in their places and has few orbits of devices.

    >>> square = symmetry_of(Topology.torus(4, 4))
    >>> square.order, set(square.orbits)
    (16, {0})
    >>> len(set(symmetry_of(Topology.torus(4, 4).without_link(0, 1)).orbits)) > 1
    True
    """
    search = _PermutationSearch(topology, fixed)
    count = len(topology.devices)
    best: tuple[int, Symmetry] | None = None
    # Four orders of tries: nodes as listed, small cells first, permutations of the greatest order, large cells first.
    for sign, greatest_order in ((0, False), (1, False), (0, True), (-1, False)):
        symmetry = _greedy(search, topology, sign, greatest_order=greatest_order)
        orbits = len({orbit for orbit in symmetry.orbits if orbit < count})
        if best is None or orbits < best[0]:
            best = orbits, symmetry
        if orbits == len([cell for cell in search.cells(search.start) if cell[0] < count]):
            break  # no symmetry has fewer orbits of devices
    assert best is not None
    return best[1] if best[1].links(topology) is not None else Symmetry((), len(topology.nodes))


def extend_to_switches(topology: Topology, moved: Symmetry) -> Symmetry | None:
    """Return the symmetry that moves devices as ``moved`` does, and also switches, or ``None`` if none is found.

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
    """Return a symmetry to which generators are added while one is found: see ``_PermutationSearch.generator``."""
    generators: list[SymmetryGenerator] = []
    cells = search.cells(search.start)
    devices = len(topology.devices)
    for cell in sorted((cell for cell in cells if cell[0] < devices and len(cell) > 1), key=lambda c: (-len(c), c[0])):
        while True:
            orbits = orbit_minima([moves for moves, _ in generators], len(topology.nodes))
            sizes = Counter(orbits)
            if sizes[orbits[cell[0]]] == len(cell):
                break
            # A group with more elements than devices would only repeat chunks.
            most = devices // prod(generator.order for generator in generators)
            others = [node for node in cell if orbits[node] != orbits[cell[0]]]
            generator = search.generator(cell[0], others, generators, sign, most, greatest_order=greatest_order)
            if generator is None:
                break
            generators.append(generator)
    return Symmetry(tuple(generators), len(topology.nodes))


class _PermutationSearch:
    """Searches for permutations of the nodes of one topology."""

    def __init__(self, topology: Topology, fixed: tuple[str, ...]) -> None:
        import numpy as np

        number = {node: k for k, node in enumerate(topology.nodes)}
        self.topology, self.n, self.devices = topology, len(number), len(topology.devices)
        kinds = {kind: k for k, kind in enumerate(sorted({link[2:] for link in topology.links}))}
        src = np.array([number[link.src] for link in topology.links], np.int64)
        dst = np.array([number[link.dst] for link in topology.links], np.int64)
        kind = np.array([kinds[link[2:]] for link in topology.links], np.uint64)
        # For the links out of nodes and those into nodes, sorted by this node: the other ends, hashes of the kinds, and
        # the position at which the links of each node begin.
        self.directions = []
        for direction, (near, far) in enumerate(((src, dst), (dst, src))):
            order = np.argsort(near, kind="stable")
            starts = np.searchsorted(near[order], np.arange(self.n + 1))
            self.directions.append((far[order], _hashes(kind[order] * np.uint64(2) + np.uint64(direction)), starts))
        colours = np.zeros(self.n, np.int64)  # devices 0, switches 1, reducing switches 2, each fixed node its own
        for k, switch in enumerate(topology.switches, start=self.devices):
            colours[k] = 2 if switch.reduces else 1
        for k, name in enumerate(fixed):
            colours[number[name]] = 3 + k
        refined = self.refine(np.stack([colours, colours]))
        assert refined is not None
        self.start = refined[0]
        self.kinds = self.cells(self.start)  # the nodes of each colour

    def refine(self, pair: Any) -> Any:
        """Return the two colourings ``pair``, refined until nodes of one colour have the same links to each colour.

        The result is ``None`` if a colour has different numbers of nodes in the two colourings.
        """
        import numpy as np

        _, colours = np.unique(pair, return_inverse=True)
        colours, count = colours.reshape(pair.shape), 0
        while True:
            if np.bincount(colours[0]).tolist() != np.bincount(colours[1]).tolist():
                return None
            previous_count, count = count, int(colours.max()) + 1
            if count == previous_count:
                return colours
            hashed = _hashes(colours.astype(np.uint64))
            total = hashed * np.uint64(3)  # hashes of the colour, the links and the colours of their ends
            for direction, (far, kind, starts) in enumerate(self.directions):
                sums = np.zeros((2, len(far) + 1), np.uint64)
                np.cumsum(_hashes(hashed[:, far] + kind), axis=1, out=sums[:, 1:])
                total += _hashes(sums[:, starts[1:]] - sums[:, starts[:-1]] + np.uint64(direction + 1))
            # The new colours number the different pairs of old colour and hash.
            order = np.lexsort((total.ravel(), colours.ravel()))
            sorted_hashes, old = total.ravel()[order], colours.ravel()[order]
            differs = (sorted_hashes[1:] != sorted_hashes[:-1]) | (old[1:] != old[:-1])
            colours = np.empty(2 * self.n, np.int64)
            colours[order] = np.concatenate([[0], np.cumsum(differs)])
            colours = colours.reshape(2, self.n)

    def cells(self, colours: Any) -> list[list[int]]:
        """Return the nodes of each colour, sorted."""
        import numpy as np

        order = np.argsort(colours, kind="stable")
        ends = [0, *(np.flatnonzero(np.diff(colours[order])) + 1).tolist(), len(order)]
        return [order[start:end].tolist() for start, end in pairwise(ends)]

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
        """Return a permutation that moves ``first`` to one of ``others`` and commutes with ``generators``.

        Its order is at most ``most``. A refinement in which ``first`` has a colour of its own divides ``others`` into
        cells, and only the first node of each cell is a target. Targets are sorted by ``sign`` times the size of the
        cell. With ``greatest_order``, the permutation with the greatest order among up to ``_MOST_TARGETS`` targets is
        returned, and otherwise the first one that is found.
        """
        import numpy as np

        marked = self.start.copy()
        marked[first] = self.n
        refined = self.refine(np.stack([marked, marked]))
        assert refined is not None
        colours = refined[0]
        sizes = np.bincount(colours)
        first_of_cell: dict[int, int] = {}
        for node in others:
            first_of_cell.setdefault(int(colours[node]), node)
        targets = sorted(first_of_cell.values(), key=lambda node: (sign * int(sizes[colours[node]]), node))
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
    """One search for a permutation that moves ``first`` to ``target``.

    ``pair`` has the colours of the topology's nodes and of the image's nodes. The image of a node has the same colour.
    """

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
        """Return the permutation, or ``None`` if none was found.

        Its order must be the length of the first node's cycle, so that each power moves this node to another place.
        """
        if not self.match([(self.first, self.target)]) or not self.complete():
            return None
        moves = tuple(self.image)
        permutation = SymmetryGenerator(moves, _order(moves))
        if permutation.order != self._period() or Symmetry((*self.generators, permutation), len(moves)).problem():
            return None
        return permutation if Symmetry((permutation,), len(moves)).links(self.search.topology) is not None else None

    def complete(self) -> bool:
        """Guess images for all other nodes, and return whether this succeeded without a contradiction."""
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
        """Record pairs (node, image) and all that follow from them. If they conflict, record none and return False."""
        self.tries += 1
        if self.tries > _MOST_TRIES:
            return False
        image: dict[int, int] = {}
        origin: dict[int, int] = {}
        open_pairs = list(pairs)
        while open_pairs:
            x, y = open_pairs.pop()
            recorded = image.get(x, self.image[x])
            if recorded == y:
                continue
            if recorded >= 0 or origin.get(y, self.origin[y]) >= 0:
                return False
            image[x], origin[y] = y, x
            open_pairs += [(moves[x], moves[y]) for moves, _ in self.generators]  # the permutation commutes with these
        pair = self.pair.copy()
        for k, (x, y) in enumerate(image.items()):
            if pair[0, x] != pair[1, y]:
                return False
            pair[0, x] = pair[1, y] = self.search.n + k
        refined = self.search.refine(pair)
        if refined is None:
            return False
        self.pair = refined
        for x, y in image.items():
            self.image[x], self.origin[y] = y, x
        # The only node of a colour has the only node of this colour in the image as its image.
        import numpy as np

        counts = np.bincount(refined[0])
        node_of_colour = np.empty(len(counts), np.int64)
        node_of_colour[refined[1]] = np.arange(self.search.n)
        for x in np.flatnonzero(counts[refined[0]] == 1).tolist():
            y = int(node_of_colour[refined[0][x]])
            self.image[x], self.origin[y] = y, x
        return True

    def open_cell(self) -> tuple[list[int], list[int]] | None:
        """Return nodes without images, and the nodes that can be their images, or ``None`` if all have images.

        The cell of the last node of the path that starts at ``first`` is preferred, until this path is a closed cycle.
        """
        import numpy as np

        end = self.first
        while self.image[end] >= 0 and self.image[end] != self.first:
            end = self.image[end]
        if self.image[end] >= 0:
            counts = np.bincount(self.pair[0])
            unknown = np.flatnonzero(counts[self.pair[0]] > 1)
            if not len(unknown):
                return None
            # Among the smallest cells, prefer one with a node that is the image of another node.
            smallest = counts[self.pair[0][unknown]].min()
            nodes = unknown[counts[self.pair[0][unknown]] == smallest].tolist()
            end = next((node for node in nodes if self.origin[node] >= 0), nodes[0])
        colour = self.pair[0][end]
        return np.flatnonzero(self.pair[0] == colour).tolist(), np.flatnonzero(self.pair[1] == colour).tolist()

    def all_guesses(self, like: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Return the first guess for each cell with several nodes, or for each of the size and kind of ``like``."""
        kinds, guesses = self.search.start, list[tuple[int, int]]()
        of_image = {int(self.pair[1][ys[0]]): ys for ys in self.search.cells(self.pair[1])}
        for xs in self.search.cells(self.pair[0]):
            if len(xs) > 1 and (not like or (len(xs) == len(like) and kinds[xs[0]] == kinds[like[0]])):
                guesses += next(iter(self.guesses(xs, of_image[int(self.pair[0][xs[0]])])))
        return guesses

    def guesses(self, xs: list[int], ys: list[int]) -> Iterable[list[tuple[int, int]]]:
        """Yield guesses of images in ``ys`` for all nodes of a cell ``xs``, and then for one of these nodes alone.

        Each guess is a list of (node, image). A path is a sequence of nodes, each the image of the one before.
        """
        both = set(xs) & set(ys)  # nodes that no path contains
        ends = [x for x in xs if x not in both]  # the last nodes of paths; the first ones are only in ys
        period = self._period()
        x = next((x for x in xs if self.origin[x] >= 0), xs[0])
        shifted = x + self.target - self.first  # moved by as many numbers as the first node
        if not both:
            if not period and shifted in ys:
                yield [(x, shifted)]
            yield list(zip(xs, ys, strict=True))
        elif ends:  # divide the other nodes evenly among the paths, and close them to cycles
            rest = sorted(both)
            share = len(rest) // len(ends)
            if share * len(ends) == len(rest):
                starts = [self._start(end) for end in ends]
                # The nodes of a path are neighbours in the cell; or there are several paths, as on hosts with several
                # nodes of a kind, and the neighbours belong to different ones.
                divisions = [[rest[k * share : (k + 1) * share] for k in range(len(ends))]]
                divisions += [[rest[k :: len(ends)] for k in range(len(ends))]] if len(ends) > 1 < share else []
                for parts in divisions if set(starts) == set(ys) - both else ():
                    yield [
                        pair
                        for end, part, start in zip(ends, parts, starts, strict=True)
                        for pair in zip([end, *part], [*part, start], strict=True)
                    ]
        else:  # either every node stays, or neighbouring numbers form cycles as long as that of the first node
            fixed = [(x, x) for x in xs]
            stays = self._stays(xs[0])
            if stays:
                yield fixed
            if period and len(xs) % period == 0:
                cycles = [xs[k : k + period] for k in range(0, len(xs), period)]
                yield [pair for cycle in cycles for pair in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
            if not stays:
                yield fixed
        choices = sorted(ys, key=lambda y: (y != shifted, y == self.first, y != x, y))
        for y in choices[:_MOST_CHOICES]:
            yield [(x, y)]

    def _stays(self, node: int) -> bool:
        """Return whether some nodes of this node's kind have images already, and all of them are their own images."""
        of_kind = self.search.kinds[self.search.start[node]]
        moved = (self.image[x] != x for x in of_kind if self.image[x] >= 0)
        return not next(moved, True) and not any(moved)

    def _period(self) -> int:
        """Return the length of the first node's cycle, or 0 until it is closed."""
        node, length = self.image[self.first], 1
        while node >= 0 and node != self.first:
            node, length = self.image[node], length + 1
        return length if node >= 0 else 0

    def _start(self, node: int) -> int:
        """Return the first node of the path to which a node belongs."""
        while self.origin[node] >= 0:
            node = self.origin[node]
        return node


def _order(moves: Sequence[int]) -> int:
    """Return the order of a permutation: the least number of times after which it is the identity."""
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
