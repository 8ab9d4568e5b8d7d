"""``GeneratedSchedule``: a schedule of many chunks, stored as a few of them and a symmetry.

A schedule for n devices has about n chunks with n steps each. On a symmetric machine, most chunks are images of a few
others: the same steps, with every device and switch moved by a permutation that changes no link. This class stores the
few others (the base) and the permutations that generate the images. So memory and the times of the proof and of the
simulation grow with n instead of n**2. All chunks and steps are listed only when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from functools import cached_property
from math import lcm
from typing import Any

from ..errors import ScheduleError, shown
from ..topology.formats.json_format import check_list, check_type
from ..topology.symmetry import Symmetry, SymmetryGenerator
from .schedule import GENERATED_FORMAT, Chunk, Round, Route, Schedule, Step


class GeneratedSchedule(Schedule):
    """The images of a few chunks under a symmetry, as one schedule.

    Args:
      base: the stored chunks and their steps. Each chunk stands for ``symmetry.order`` images with equal shares.
      symmetry: commuting permutations of the positions in ``nodes``. They move devices only to devices.
      nodes: the devices of the base, in order, and then the switches that its routes pass.
      in_order: whether the steps of a chunk in a round, and the operands of each, are sorted by device. If not, they
        keep the order of the base.
    Raises:
      ScheduleError: the permutations do not commute, do not have the stated orders, do not suit the nodes, or make more
        images of a chunk than there are devices.

    >>> from fractions import Fraction
    >>> whole = Chunk(Fraction(1), sources=(0, 1), destinations=(0, 1))
    >>> base = Schedule("all_reduce", "direct", ("cpu:0", "cpu:1"), (whole,),
    ...                 ((Step(0, 0, (0, 1)),), (Step(0, 1, (0,)),)))
    >>> print(GeneratedSchedule(base, Symmetry((SymmetryGenerator((1, 0), 2),), 2), base.devices))
    all_reduce direct: 2 devices, 2 chunks, 2 rounds, 4 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 1: cpu:1 <- cpu:1 + cpu:0
      round 1: chunk 0: cpu:1 <- cpu:0
      round 1: chunk 1: cpu:0 <- cpu:1
    """

    base: Schedule
    symmetry: Symmetry
    nodes: tuple[str, ...]
    in_order: bool

    def __init__(self, base: Schedule, symmetry: Symmetry, nodes: Sequence[str], in_order: bool = False) -> None:
        self._fill(base, symmetry, tuple(nodes), in_order)
        problem = symmetry.problem()
        count = len(base.devices)
        if not problem and (self.nodes[:count] != base.devices or len(self.nodes) != symmetry.nodes):
            problem = "the nodes must be those of the symmetry, the devices of the base first"
        if not problem and len(set(self.nodes)) < len(self.nodes):
            problem = "each node may appear only once"
        if not problem and any(sorted(moves[:count]) != list(range(count)) for moves, _ in symmetry.generators):
            problem = "a symmetry must move devices to devices"
        if not problem and symmetry.order > count:
            problem = "it makes more images of each chunk than there are devices"
        if not problem:
            known = {*self.nodes}
            unknown = {node for route in base.routes for node in route.through if node not in known}
            if unknown:
                problem = f"routes pass {shown(sorted(unknown))}, which are not among the nodes"
        if problem:
            raise ScheduleError.of(f"this symmetry does not suit the schedule: {problem}.", shown(symmetry))

    def _fill(self, base: Schedule, symmetry: Symmetry, nodes: tuple[str, ...], in_order: bool) -> None:
        """Set the fields without checks. The dataclass is frozen, so plain assignments would raise an error."""
        self.__dict__.update(
            base=base, symmetry=symmetry, nodes=nodes, in_order=in_order, collective=base.collective,
            algorithm=base.algorithm, devices=base.devices, pieces=base.pieces,
        )  # fmt: skip

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")  # ``Schedule`` protects only its own fields

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.base, self.symmetry, self.nodes, self.in_order

    def __reduce__(self) -> tuple[type[Schedule], tuple[Any, ...]]:
        return GeneratedSchedule, self._parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneratedSchedule) and self._parts == other._parts

    @cached_property
    def _hash_of_steps(self) -> int:
        return hash((self.base._hash_of_steps, self.symmetry, self.nodes, self.in_order))

    def __hash__(self) -> int:
        return hash((self._hash_of_steps, self.pieces))

    def __repr__(self) -> str:
        return f"<{self.head}>"

    def cut_into(self, pieces: int) -> GeneratedSchedule:
        """Return the same schedule with another number of pieces."""
        other = object.__new__(GeneratedSchedule)
        other._fill(self.base.cut_into(pieces), self.symmetry, self.nodes, self.in_order)
        other.__dict__["_hash_of_steps"] = self._hash_of_steps
        return other

    def ordered_by(self, names: Sequence[str]) -> GeneratedSchedule:
        """Return the same schedule with its devices in the order of ``names``: see ``Schedule.ordered_by``."""
        base = self.base.ordered_by(names)
        if base.devices == self.devices:
            return self
        nodes = (*base.devices, *self.nodes[len(self.devices) :])
        return GeneratedSchedule(base, self.symmetry.renumbered(self.nodes, nodes), nodes, self.in_order)

    @cached_property
    def explicit(self) -> Schedule:
        """The same schedule as a plain ``Schedule`` that stores all chunks and about n**2 steps."""
        return Schedule(
            self.collective, self.algorithm, self.devices, self.chunks, self.rounds, self.pieces, self.routes
        )

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return len(self.base.chunks) * self.symmetry.order

    @property
    def steps(self) -> int:
        """The number of steps in all rounds."""
        return self.base.steps * self.symmetry.order

    @property
    def round_count(self) -> int:
        """The number of rounds."""
        return self.base.round_count

    @property
    def units(self) -> int:
        """The least n such that all shares are multiples of 1/n of the buffer."""
        return lcm(*((chunk.share / self.symmetry.order).denominator for chunk in self.base.chunks if chunk.share))

    @cached_property
    def numbering(self) -> tuple[tuple[int, int], ...]:
        """For each chunk (element of the group, base chunk) by number: the chunk is the image of this base chunk.

        The chunks of an all-gather are in the order of their sources, and those of a reduce-scatter in the order of
        their destinations, as in the buffer. In other collectives, all images of a base chunk are neighbours.
        """
        pairs = [(element, chunk) for chunk in range(len(self.base.chunks)) for element in range(self.symmetry.order)]
        field = {"all_gather": 1, "reduce_scatter": 2}.get(self.collective)  # Chunk.sources or Chunk.destinations
        if field is not None:
            owners = [list(self.symmetry.images(chunk[field][0])) for chunk in self.base.chunks]  # type: ignore[index]
            pairs.sort(key=lambda pair: owners[pair[1]][pair[0]])
        return tuple(pairs)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks."""
        order = self.symmetry.order
        lists = {tuple(devices) for chunk in self.base.chunks for devices in (chunk.sources, chunk.destinations)}
        fixed = {devices for devices in lists if self.keeps(devices)}
        images = [
            {devices: devices if devices in fixed else tuple([moves[k] for k in devices]) for devices in lists}
            for moves in self.symmetry.elements()
        ]
        return tuple(
            Chunk(chunk.share / order, images[element][chunk.sources], images[element][chunk.destinations])
            for element, number in self.numbering
            for chunk in [self.base.chunks[number]]
        )

    def keeps(self, devices: tuple[int, ...]) -> bool:
        """Return whether the symmetry moves each of these devices to a device in the same list."""
        inside = {*devices}
        return all(moves[k] in inside for moves, _ in self.symmetry.generators for k in devices)

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """All steps of each round, chunk by chunk."""
        by_chunk: list[list[list[Step]]] = [[[] for _ in self.base.rounds] for _ in self.base.chunks]
        for r, steps in enumerate(self.base.rounds):
            for step in steps:
                by_chunk[step.chunk][r].append(step)
        elements = list(self.symmetry.elements())
        rounds: list[list[Step]] = [[] for _ in self.base.rounds]
        for number, (element, chunk) in enumerate(self.numbering):
            moves = elements[element]
            for r, base_steps in enumerate(by_chunk[chunk]):
                images = [Step(number, moves[dst], self.operands(moves, srcs)) for _, dst, srcs in base_steps]
                rounds[r] += sorted(images, key=lambda step: step.dst) if self.in_order else images
        return tuple(map(tuple, rounds))

    def operands(self, moves: Sequence[int], srcs: Sequence[int]) -> tuple[int, ...]:
        """Return the operands of the image of a step, sorted if ``in_order``."""
        images = [moves[k] for k in srcs]
        return tuple(sorted(images) if self.in_order else images)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: k for k, name in enumerate(self.nodes)}

    def through(self, r: int, chunk: int, src: int, dst: int) -> tuple[str, ...] | None:
        """Return the same as ``Schedule.through``, without listing all routes."""
        if not self.base.routes:
            return None
        element, number = self.numbering[chunk]
        ends = [self.symmetry.origin(element, node) for node in (src, dst)]
        passed = self.base.through(r, number, *ends)
        if passed is None:
            return None
        return tuple([self.nodes[self.symmetry.image(element, self._position[node])] for node in passed])

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """All routes."""
        if not self.base.routes:
            return ()
        position = self._position
        elements = list(self.symmetry.elements())
        by_chunk: list[list[tuple[Route, list[int]]]] = [[] for _ in self.base.chunks]
        for route in self.base.routes:
            by_chunk[route.chunk].append((route, [position[node] for node in route.through]))
        return tuple(
            Route(number, moves[route.src], moves[route.dst], tuple(self.nodes[moves[k]] for k in through), route.round)
            for number, (element, chunk) in enumerate(self.numbering)
            for moves in [elements[element]]
            for route, through in by_chunk[chunk]
        )

    @property
    def _json(self) -> dict[str, Any]:
        names = self.nodes[len(self.devices) :]
        symmetry = {"nodes": names, "generators": self.symmetry.generators, "in_order": self.in_order}
        return self.base._json | {"format": GENERATED_FORMAT, "symmetry": symmetry}

    @staticmethod
    def read(base: Schedule, given: Any) -> Schedule:
        """Return the schedule of a base and of ``given``, the object "symmetry" of a schedule's JSON text."""
        names = check_list(str, given["nodes"])
        generators = [
            SymmetryGenerator(check_list(int, moves), check_type(int, order)) for moves, order in given["generators"]
        ]
        nodes = (*base.devices, *names)
        return GeneratedSchedule(
            base, Symmetry(tuple(generators), len(nodes)), nodes, check_type(bool, given["in_order"])
        )


Schedule.generated = GeneratedSchedule.read


def rotations(orders: Sequence[int], count: int) -> Symmetry:
    """Return the symmetry of a grid of ``count`` devices: its cyclic shifts in each dimension.

    ``orders`` has the size of each dimension. The last dimension varies fastest.

    >>> [generator.moves for generator in rotations([2, 2], 4).generators]
    [(2, 3, 0, 1), (1, 0, 3, 2)]
    """
    generators, stride = [], count
    for order in orders:
        stride //= order
        # The coordinate of device k in this dimension, k // stride % order, increases by 1.
        moves = tuple(k + ((k // stride + 1) % order - k // stride % order) * stride for k in range(count))
        if order > 1:
            generators.append(SymmetryGenerator(moves, order))
    return Symmetry(tuple(generators), count)
