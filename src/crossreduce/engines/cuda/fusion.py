"""Compile a chunk of a program to steps of CUDA devices: fused kernels, and copies of values between the devices.

Input: a ``ChunkProgram``, and which devices can read each other's memory. Output: ``DeviceStep``s, the same for every
range of elements. A node is a value in the memory of one device. Logical devices of one GPU share its memory, so copies
among them are not needed, and equal combinations are computed once. If a partial result is read only once, on its own
device, the kernel that reads it also computes it. The order of combination never changes.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from ...lowering import ChunkProgram
from .kernels import MAX_DEPTH, MAX_STEPS


class Order(NamedTuple):
    """How a kernel combines its sources, with a stack of values. Bit k of each field belongs to source k.

    ``push``: the source becomes the top of the stack, instead of being combined into the top. ``fold``: after the
    source, the two uppermost values are combined; ``fold_twice``: once more. (``Order`` of ``native/reduce.cuh``.)
    """

    push: int = 0
    fold: int = 0
    fold_twice: int = 0


class DeviceStep(NamedTuple):
    """A step that makes one node.

    Args:
      kind: "reduce": a kernel on ``device`` combines the sources; "copy": a kernel on ``device`` copies one source;
        "move": the driver copies one value from its device to ``device``.
      device: the number of the physical device.
      sources: the nodes that it reads, in order.
      order: how the sources are combined.
      node: the number of the node that it makes.
      destinations: the positions of the results that it writes; if empty, the node is in temporary memory.
      after: steps of this chunk that must end before this one begins, besides those that make its sources.
      level: 0, or one more than the highest level of the steps that must end before.
    """

    kind: str
    device: int
    sources: tuple[int, ...]
    order: Order
    node: int
    destinations: tuple[int, ...]
    after: tuple[int, ...]
    level: int


class ChunkSteps(NamedTuple):
    """The steps of a chunk, in an order in which they can run.

    The first nodes are the inputs. For each node, ``kinds`` has "input", "partial" or "final", and ``homes`` the device
    in whose memory it is. ``read_once`` are the nodes that exactly one step reads.
    """

    steps: tuple[DeviceStep, ...]
    kinds: tuple[str, ...]
    homes: tuple[int, ...]
    read_once: frozenset[int]


@lru_cache(maxsize=1024)
def chunk_steps(
    chunk: ChunkProgram, places: tuple[int, ...], readable: tuple[tuple[bool, ...], ...], with_out: bool
) -> ChunkSteps:
    """Return the steps of a chunk.

    Args:
      chunk: a chunk of a program.
      places: the number of the physical device of each device of the program.
      readable: ``readable[a][b]`` is whether kernels on device a can read the memory of device b.
      with_out: whether results are written into the caller's arrays, which may be the inputs.
    """
    return _Chunk(chunk, places, readable, with_out).steps()


class _Node(NamedTuple):
    """A value of the program in a device's memory, before combinations are fused."""

    device: int
    operands: tuple[int, ...]  # empty for an input
    final: bool


class _Chunk:
    """Makes the steps of a chunk."""

    def __init__(
        self, chunk: ChunkProgram, places: tuple[int, ...], readable: tuple[tuple[bool, ...], ...], with_out: bool
    ) -> None:
        self._readable, self._with_out, self._inputs = readable, with_out, len(chunk.sources)
        self._single = self._inputs == 1  # then nothing is combined, and the input is final
        self._nodes = [_Node(places[source], (), self._single) for source in chunk.sources]
        self._wanted: dict[int, tuple[int, ...]] = {}  # for some nodes, the positions of their results
        self._number(chunk, places)
        self._steps: list[DeviceStep] = []
        self._makers: dict[int, int] = {}  # for each node in memory, the step that makes it
        self._readers: dict[int, list[int]] = {}
        self._copies: dict[tuple[int, int], int] = {}  # (node, device): the node that is its copy there
        self._kinds = ["final" if self._single else "input"] * self._inputs
        self._homes = [node.device for node in self._nodes[: self._inputs]]

    def _number(self, chunk: ChunkProgram, places: tuple[int, ...]) -> None:
        """Make a node of each value. Copies within a device share a node, and so do equal combinations on a device."""
        number = list(range(self._inputs))  # the node of each value
        known: dict[tuple[int, tuple[int, ...]], int] = {}  # nodes by device and operands
        origin = list(range(self._inputs))  # for each node, the node of which it is a copy, or itself
        here = {(k, node.device): k for k, node in enumerate(self._nodes)}  # nodes by origin and device
        for device, operands, _, final, *_ in chunk.instructions:
            place, read = places[device], tuple(number[operand] for operand in operands)
            if len(read) == 1 and (origin[read[0]], place) in here:
                number.append(here[origin[read[0]], place])
                continue
            node = known.setdefault((place, read), len(self._nodes))
            if node == len(self._nodes):
                self._nodes.append(_Node(place, read, final))
                origin.append(origin[read[0]] if len(read) == 1 else node)
                here[origin[node], place] = node
            number.append(node)
        for position, result in enumerate(chunk.results):
            node = number[result]
            self._wanted[node] = (*self._wanted.get(node, ()), position)

    def steps(self) -> ChunkSteps:
        """Make the steps for all nodes that a result needs, except for the fused ones."""
        needed = set(self._wanted)
        for node in reversed(range(self._inputs, len(self._nodes))):
            if node in needed:
                needed.update(self._nodes[node].operands)
        reads = Counter(operand for node in needed for operand in self._nodes[node].operands)
        fused = self._fused_nodes(needed, reads)
        renamed = dict(enumerate(range(self._inputs)))
        for node in range(self._inputs, len(self._nodes)):
            if node not in needed or node in fused:
                continue
            place, operands, final = self._nodes[node]
            targets = self._wanted.get(node, ())
            if len(operands) == 1:
                renamed[node] = self._move(renamed[operands[0]], place, targets)
                continue
            flat = self._flatten(node, fused)
            assert flat is not None
            leaves, order = flat
            sources = tuple(self._local_node(renamed[leaf], place) for leaf in leaves)
            while len(sources) > MAX_STEPS and any(self._kinds[source] == "partial" for source in sources):
                # ``wide`` has bits for MAX_STEPS sources only. More sources are always combined one after another, so
                # the first ones can be combined in a step of their own.
                first = self._step("reduce", place, sources[:MAX_STEPS], Order(), (), False)
                sources = (first, *sources[MAX_STEPS:])
            renamed[node] = self._step("reduce", place, sources, order, targets, final)
        for node, targets in self._wanted.items():
            if node < self._inputs:
                self._step("copy", self._nodes[node].device, (node,), Order(), targets, True)
        return self._with_levels()

    def _fused_nodes(self, needed: set[int], reads: Counter[int]) -> set[int]:
        """Return the nodes that are fused: the kernel that reads them also computes them."""
        fused: set[int] = set()
        for node in range(self._inputs, len(self._nodes)):
            place, operands, _ = self._nodes[node]
            if node not in needed or len(operands) < 2:
                continue
            for operand in operands:
                inner = self._nodes[operand]
                if (
                    reads[operand] == 1
                    and len(inner.operands) > 1
                    and inner.device == place
                    and self._flatten(node, fused | {operand}) is not None
                ):
                    fused.add(operand)
        return fused

    def _flatten(self, node: int, fused: set[int]) -> tuple[list[int], Order] | None:
        """Return a node's operands, with each fused node replaced by its own operands, and their order.

        Return ``None`` if no kernel can combine them in this order.
        """
        leaves: list[int] = []
        bits = [0, 0, 0]  # the fields of ``Order``

        def visit(node: int, depth: int) -> bool:  # returns whether the stack suffices; ``depth`` is its values so far
            for k, operand in enumerate(self._nodes[node].operands):
                first = len(leaves)
                if operand not in fused:
                    leaves.append(operand)
                    continue
                if depth + (k > 0) > MAX_DEPTH or not visit(operand, depth + (k > 0)):
                    return False
                if k > 0:  # push the operand's first source; after its last source, fold it into the value below
                    last = 1 << (len(leaves) - 1)
                    bits[0] |= 1 << first
                    if bits[1] & last and bits[2] & last:
                        return False
                    bits[2 if bits[1] & last else 1] |= last
            return True

        if not visit(node, 1) or (len(leaves) > MAX_STEPS and any(bits)):
            return None
        return leaves, Order(*bits)

    def _local_node(self, node: int, place: int) -> int:
        """Return the node if kernels on a device can read it, otherwise its copy on that device."""
        return node if self._readable[place][self._homes[node]] else self._move(node, place, ())

    def _move(self, node: int, place: int, targets: tuple[int, ...]) -> int:
        """Return the copy of a node in a device's memory. If it does not exist yet, add the step that makes it."""
        copied = self._copies.get((node, place))
        if copied is None:
            copied = self._step("move", place, (node,), Order(), targets, self._kinds[node] == "final")
            self._copies[node, place] = copied
        return copied

    def _step(
        self, kind: str, place: int, sources: tuple[int, ...], order: Order, targets: tuple[int, ...], final: bool
    ) -> int:
        """Add a step and return the node that it makes."""
        node = len(self._kinds)
        content = "final" if final else self._kinds[sources[0]] if kind != "reduce" else "partial"
        self._kinds.append(content)
        self._homes.append(place)
        self._makers[node] = len(self._steps)
        for source in sources:
            self._readers.setdefault(source, []).append(len(self._steps))
        self._steps.append(DeviceStep(kind, place, sources, order, node, targets, (), 0))
        return node

    def _with_levels(self) -> ChunkSteps:
        """Return the steps with their levels."""
        if self._with_out:
            self._protect_inputs()
        levels: list[int] = []
        for step in self._steps:
            before = [self._makers[source] for source in step.sources if source in self._makers]
            levels.append(max((levels[k] + 1 for k in (*before, *step.after)), default=0))
        once = frozenset(node for node, readers in self._readers.items() if len(readers) == 1)
        steps = tuple(step._replace(level=level) for step, level in zip(self._steps, levels, strict=True))
        return ChunkSteps(steps, tuple(self._kinds), tuple(self._homes), once)

    def _protect_inputs(self) -> None:
        """Delay each step that writes results until all other steps that read inputs of its device have ended."""
        ancestors: list[set[int]] = []
        for step in self._steps:
            ancestors_of_step: set[int] = set()
            for source in step.sources:
                if source in self._makers:
                    ancestors_of_step |= ancestors[self._makers[source]] | {self._makers[source]}
            ancestors.append(ancestors_of_step)
        for k in range(len(self._steps)):
            step = self._steps[k]
            here = (node for node in range(self._inputs) if self._homes[node] == step.device)
            readers = {reader for node in here for reader in self._readers.get(node, [])}
            if not step.destinations or not readers - ancestors[k] - {k}:
                continue
            # A later step may read an input, so this one writes to temporary memory, and a copy follows all readers.
            self._steps[k] = step._replace(destinations=())
            self._step("copy", step.device, (step.node,), Order(), step.destinations, True)
            self._steps[-1] = self._steps[-1]._replace(after=tuple(sorted(readers)))
