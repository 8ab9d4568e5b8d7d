"""Compile a layout to batched operations: launches of kernels on CUDA devices, and copies between them.

Input: a ``Layout``, its ``Numbers``, the physical devices, and which of them can read each other's memory. Output:
``Operations``. Steps of different chunks, tensors and pieces that run on one device at the same time become one launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from typing import Final, NamedTuple

from ...lowering import ChunkProgram, element_ranges
from ...ops import Numbers
from ...packing import itemsize
from ..base import Layout
from .fusion import ChunkSteps, DeviceStep, Order, chunk_steps
from .kernels import VECTOR_NBYTES, KernelKind, copy_kernel, reduce_kernel
from .streams import Copy, Launch, Operation, Operations, Part, Place, StreamOrder

_PIECE_ELEMENTS: Final = 128  # pieces begin at multiples of it, so that their vectors are aligned
_ALIGNMENT: Final = 256  # the alignment of temporary values, in bytes
_PIECE_NBYTES: Final = 1 << 16  # the size of the smallest piece: a launch is assumed to take as long as moving it


class _Piece(NamedTuple):
    """A piece of a chunk. The pieces of a chunk are pipelined in the order of their numbers."""

    segments: tuple[tuple[int, int, int], ...]  # (tensor, start, stop): elements of tensors
    number: int  # in its chunk


def operations(
    layout: Layout, numbers: Numbers, places: dict[str, int], readable: tuple[tuple[bool, ...], ...], with_out: bool
) -> Operations:
    """Return the operations of a layout.

    Args:
      layout: a layout of known sizes.
      numbers: how the reduction is computed.
      places: for each device of the layout's programs, the number of its physical device.
      readable: ``readable[a][b]`` is whether kernels on device a can read the memory of device b, where a and b are
        positions in ``sorted(set(places.values()))``.
      with_out: whether results may be in the memory of inputs.
    """
    devices = tuple(sorted(set(places.values())))
    positions = {device: devices.index(place) for device, place in places.items()}
    ends = ([positions[device] for device in each] for each in (layout.sources, layout.destinations))
    builder = _Builder(layout, numbers, readable, *ends)
    first_tensor = 0
    for buffer, ranges in layout.buffers:
        spans = [(first_tensor + k, span.start, span.start + span.size) for k, span in enumerate(buffer.spans)]
        first_tensor += len(spans)
        for program, base, end in ranges:
            chunk_places = tuple(positions[device] for device in program.devices)
            for chunk, low, high in element_ranges(program, end - base):
                steps = chunk_steps(program.chunks[chunk], chunk_places, readable, with_out)
                max_pieces = program.pieces if len(devices) > 1 else 1
                for piece in _pieces(spans, base + low, base + high, max_pieces, itemsize(buffer.dtype)):
                    builder.add(program.chunks[chunk], steps, piece)
    return builder.finish(devices)


def _pieces(spans: Sequence[tuple[int, int, int]], low: int, high: int, most: int, size: int) -> Iterator[_Piece]:
    """Cut elements ``low`` to ``high`` of a buffer into at most ``most`` pieces, and these into segments of tensors.

    ``spans`` has the (tensor, start, stop) of each tensor in the buffer, and ``size`` the bytes of an element.
    """
    count = max(1, min(most, (high - low) * size // _PIECE_NBYTES))
    cuts = [low + (high - low) * k // count for k in range(count + 1)]
    cuts[1:-1] = [cut - cut % _PIECE_ELEMENTS for cut in cuts[1:-1]]
    for number, (start, stop) in enumerate(pairwise(cuts)):
        segments = tuple(
            (tensor, max(start, begin) - begin, min(stop, end) - begin)
            for tensor, begin, end in spans
            if begin < stop and start < end and begin < end
        )
        if segments:
            yield _Piece(segments, number)


class _Draft:
    """A launch or a copy to which parts can still be added.

    Operations are queued in the order of ``key``. A step has three consecutive keys: a move packs the value if
    necessary, copies it, and unpacks it.
    """

    def __init__(self, device: int, key: int) -> None:
        self.device, self.key = device, key
        self.after: set[_Draft] = set()
        self.copy: Copy | None = None
        self.kernel: KernelKind | None = None
        self.sources = 0
        self.divisor: float = 0
        self.orders: dict[tuple[int, int, int, int], int] = {}
        self.parts: list[Part] = []

    def add(self, size: int, order: tuple[int, int, int, int], places: tuple[Place, ...], steps: list[int]) -> None:
        """Add a part, or extend the last one if the new one follows it. ``steps``: a unit's bytes at each place."""
        number = self.orders.setdefault(order, len(self.orders))
        if self.parts:
            last = self.parts[-1]
            if last.order == number and all(
                a[0] == b[0] and a[1] + last.size * nbytes == b[1]
                for a, b, nbytes in zip(last.places, places, steps, strict=True)
            ):
                self.parts[-1] = last._replace(size=last.size + size)
                return
        self.parts.append(Part(size, number, places))

    def work(self) -> Launch | Copy:
        if self.copy is not None:
            return self.copy
        assert self.kernel is not None
        return Launch(self.device, self.kernel, self.sources, self.divisor, tuple(self.orders), tuple(self.parts))


class _Stored(NamedTuple):
    """Where a node is stored, and the operation that makes it."""

    places: tuple[Place, ...]  # one per segment
    maker: _Draft | None  # None for an input
    is_whole: bool  # whether all segments are one range of memory


class _Builder:
    """Collects the operations of all chunks. Steps with the same key and kernel on one device share a launch."""

    def __init__(
        self,
        layout: Layout,
        numbers: Numbers,
        readable: tuple[tuple[bool, ...], ...],
        source_devices: Sequence[int],
        result_devices: Sequence[int],
    ) -> None:
        self._numbers, self._readable = numbers, readable
        self._source_devices, self._result_devices = source_devices, result_devices
        self._sources, self._destinations = len(layout.sources), len(layout.destinations)
        self._first_result = len(layout.shapes) * self._sources
        self._first_scratch = self._first_result + len(layout.shapes) * self._destinations
        self._scratch: dict[int, int] = {}
        self._launches: dict[object, _Draft] = {}
        self._drafts: list[_Draft] = []

    def add(self, chunk: ChunkProgram, steps: ChunkSteps, piece: _Piece) -> None:
        """Add the steps of a piece of a chunk."""
        values: list[_Stored] = []
        makers: list[_Draft] = []
        dtype = self._numbers.dtype
        for position in range(len(chunk.sources)):
            rows = [(tensor * self._sources + position, start * itemsize(dtype)) for tensor, start, _ in piece.segments]
            values.append(_Stored(tuple(rows), None, len(rows) == 1))
        for step in steps.steps:
            after = {makers[k] for k in step.after}
            key = step.level * 3 + piece.number * 3
            if step.kind == "move":
                stored = self._move_value(steps, step, values, piece, after, key)
            else:
                stored = self._kernel(steps, step, values, piece, after, key)
            values.append(stored)
            assert stored.maker is not None
            makers.append(stored.maker)

    def _dtype(self, kind: str) -> str:
        """Return the dtype of an "input", "partial" or "final" node."""
        numbers = self._numbers
        return {"input": numbers.dtype, "partial": numbers.accumulator, "final": numbers.result}[kind]

    def _targets(self, step: DeviceStep, kind: str, piece: _Piece) -> list[tuple[Place, ...]]:
        """Return the places of each result that a step writes; if it writes none, those of new temporary memory."""
        size = itemsize(self._dtype(kind))
        if step.destinations:
            first = self._first_result
            return [
                tuple((first + tensor * self._destinations + k, start * size) for tensor, start, _ in piece.segments)
                for k in step.destinations
            ]
        return [self._temporary(step.device, size, piece)]

    def _temporary(self, device: int, size: int, piece: _Piece) -> tuple[Place, ...]:
        """Reserve temporary memory for a value, in which each segment is aligned to vectors as in the inputs."""
        at = -(-self._scratch.get(device, 0) // _ALIGNMENT) * _ALIGNMENT
        vector = max(1, VECTOR_NBYTES // itemsize(self._numbers.dtype))
        places = []
        for _, start, stop in piece.segments:
            at = -(-at // (vector * size)) * vector * size + start % vector * size
            places.append((self._first_scratch + device, at))
            at += (stop - start) * size
        self._scratch[device] = at
        return tuple(places)

    def _kernel(
        self, steps: ChunkSteps, step: DeviceStep, values: list[_Stored], piece: _Piece, after: set[_Draft], key: int
    ) -> _Stored:
        """Add a kernel's step to the launch that it shares with equal steps, and return where its node is stored."""
        kinds = [steps.kinds[source] for source in step.sources]
        kind, count = steps.kinds[step.node], len(step.sources)
        wide = 0  # bit k: whether source k has the accumulator's dtype
        if step.kind == "copy" and kinds[0] == kind:
            kernel, divisor = copy_kernel(self._dtype(kind)), 1.0
        else:
            for k, each in enumerate(kinds):
                wide |= (each == "partial" and self._numbers.accumulator != self._numbers.dtype) << k
            kernel = reduce_kernel(self._numbers, count, bool(wide), kind == "final")
            divisor = self._numbers.divisor if kind == "final" else 1
        reads = [values[source].places for source in step.sources]
        targets = self._reusable_memory(steps, step, values, kind) or self._targets(step, kind, piece)
        launch = self._launch((key, step.device, kernel, count, len(targets), divisor), step.device, key)
        launch.kernel, launch.sources, launch.divisor = kernel, count, divisor
        nbytes = [kernel.nbytes[wide >> k & 1] for k in range(count)] + [kernel.nbytes[2]] * len(targets)
        for k, (_, start, stop) in enumerate(piece.segments):
            places = tuple(each[k] for each in (*reads, *targets))
            launch.add((stop - start) * kernel.units, (*step.order, wide), places, nbytes)
        for source in step.sources:
            maker = values[source].maker
            if maker is not None:
                launch.after.add(maker)
        launch.after |= after
        return _Stored(targets[0], launch, not step.destinations or len(piece.segments) == 1)

    def _reusable_memory(
        self, steps: ChunkSteps, step: DeviceStep, values: list[_Stored], kind: str
    ) -> list[tuple[Place, ...]] | None:
        """Return the temporary memory of a partial result that only this step reads, so that it may write there."""
        for source in step.sources:
            mine = source in steps.read_once and steps.homes[source] == step.device
            if mine and steps.kinds[source] == kind == "partial":
                return [values[source].places]
        return None

    def _move_value(
        self, steps: ChunkSteps, step: DeviceStep, values: list[_Stored], piece: _Piece, after: set[_Draft], key: int
    ) -> _Stored:
        """Add the copy of a value to another device, and return where the copy is stored.

        If the device can read the other one's memory, a kernel copies the value, perhaps together with others.
        Otherwise the driver copies one range of memory. A value in several places is then first packed into temporary
        memory on its device, and unpacked on the other one.
        """
        (node,) = step.sources
        value, home = values[node], steps.homes[node]
        kind = steps.kinds[step.node]
        size = itemsize(self._dtype(kind))
        is_segmented = len(piece.segments) > 1
        targets = self._targets(step, kind, piece)
        before = after | ({value.maker} if value.maker is not None else set())
        if self._readable[step.device][home]:
            return self._copy_in_kernel(
                step.device, kind, value.places, targets, piece, before, key, not step.destinations
            )
        if not value.is_whole:
            packed = self._temporary(home, size, piece)
            value = self._copy_in_kernel(home, kind, value.places, [packed], piece, before, key, True)
            before = after | {value.maker} if value.maker is not None else after
        direct = targets[0] if not is_segmented or not step.destinations else self._temporary(step.device, size, piece)
        moved = _Draft(home, key + 1)
        _, first, last = piece.segments[-1]
        nbytes = value.places[-1][1] - value.places[0][1] + (last - first) * size  # including gaps between segments
        moved.copy = Copy(home, step.device, value.places[0], direct[0], nbytes)
        moved.after |= before
        self._drafts.append(moved)
        rest = targets if direct is not targets[0] else targets[1:]
        if rest:
            return self._copy_in_kernel(step.device, kind, direct, rest, piece, {moved}, key + 2, False)
        return _Stored(direct, moved, True)

    def _copy_in_kernel(
        self,
        device: int,
        kind: str,
        source: tuple[Place, ...],
        targets: list[tuple[Place, ...]],
        piece: _Piece,
        after: set[_Draft],
        key: int,
        is_whole: bool,
    ) -> _Stored:
        """Add the copy of a value to a launch of the copy kernel on a device, and return where the copy is."""
        kernel = copy_kernel(self._dtype(kind))
        launch = self._launch((key, device, kernel, 1, len(targets), 1), device, key)
        launch.kernel, launch.sources, launch.divisor = kernel, 1, 1
        nbytes = [kernel.nbytes[0]] * (1 + len(targets))
        for k, (_, start, stop) in enumerate(piece.segments):
            places = tuple(each[k] for each in (source, *targets))
            launch.add((stop - start) * kernel.units, (*Order(), 0), places, nbytes)
        launch.after |= after
        return _Stored(targets[0], launch, is_whole or len(piece.segments) == 1)

    def _launch(self, form: object, device: int, key: int) -> _Draft:  # steps of the same ``form`` share a launch
        launch = self._launches.get(form)
        if launch is None:
            launch = self._launches[form] = _Draft(device, key)
            self._drafts.append(launch)
        return launch

    def finish(self, devices: tuple[int, ...]) -> Operations:
        """Return the operations in order, with the waits of each for operations of other streams."""
        drafts = sorted(self._drafts, key=lambda each: each.key)
        for each in drafts if len(devices) > 1 else ():
            self._alternate(each)
        streams: dict[tuple[int, int | None], int] = {(k, None): k for k in range(len(devices))}
        for each in drafts:
            if each.copy is not None:
                streams.setdefault((each.copy.src, each.copy.dst), len(streams))
        order = StreamOrder(len(streams), len(devices))
        numbers = {each: k for k, each in enumerate(drafts)}
        for each in drafts:
            copy = each.copy
            stream = streams[copy.src, copy.dst] if copy else each.device
            order.add([numbers[before] for before in each.after], stream, self._devices_of(each.work()))
        order.end()
        waited = {before for needed in order.waits for before in needed} | set(order.ends)
        ordered = tuple(
            Operation(each.work(), order.streams[k], order.waits[k], k in waited) for k, each in enumerate(drafts)
        )
        scratch = tuple(self._scratch.get(k, 0) for k in range(len(devices)))
        begins, ends, resumes = (tuple(sorted(each)) for each in (order.begins, order.ends, order.resumes))
        return Operations(devices, tuple(streams), scratch, ordered, begins, ends, resumes)

    def _alternate(self, launch: _Draft) -> None:
        """Let parts alternate between the devices that they read first, since a table may be split between any two."""
        parts: dict[int, list[Part]] = {}
        for part in launch.parts:
            parts.setdefault(self._device_of(part.places[0][0]), []).append(part)
        launch.parts = [part for part in chain.from_iterable(zip_longest(*parts.values())) if part is not None]

    def _device_of(self, row: int) -> int:
        """Return the device of a row of the table of addresses."""
        if row >= self._first_scratch:
            return row - self._first_scratch
        if row >= self._first_result:
            return self._result_devices[(row - self._first_result) % len(self._result_devices)]
        return self._source_devices[row % len(self._source_devices)]

    def _devices_of(self, work: Launch | Copy) -> set[int]:
        """Return the devices whose memory an operation reads or writes."""
        if isinstance(work, Copy):
            return {work.src, work.dst}
        return {self._device_of(row) for row in {row for part in work.parts for row, _ in part.places}}
