"""The loop engine: runs programs instruction by instruction with a framework's own operations.

Input: a layout. Output: results. It reduces arrays of any framework on any devices, also while they are traced or
recorded for gradients: all known sizes and indices are Python ints, so ``jax.jit`` and ``tf.function`` can trace it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..errors import ScheduleError
from ..frameworks import Array, Framework
from ..lowering import Program, element_ranges
from ..ops import Numbers
from ..packing import Span, cuts, itemsize
from .base import Layout, LoweredBuffer

JOINED_BYTES: Final = 16384  # the size of the largest tensors that are packed in host memory


class LoopEngine:
    """See ``engines.base.Engine``."""

    name = "loop"
    checks_overlap = False

    def supports(self, layout: Layout) -> bool:
        """Return ``True``, since this engine can run any layout."""
        return True

    def bind(self, layout: Layout, arrays: Sequence[Sequence[Array]]) -> Any | None:
        return arrays

    def compile(self, layout: Layout, numbers: Numbers, with_out: bool) -> LoopExecutable:
        return LoopExecutable(layout, numbers)


class LoopExecutable:
    """Packs, reduces and unpacks the buffers one after another. See ``engines.base.Executable``."""

    prepared = None

    def __init__(self, layout: Layout, numbers: Numbers) -> None:
        self._framework, self._numbers, self._destinations = layout.framework, numbers, layout.destinations
        self._buffers = _buffers_and_positions(layout)

    def run(self, operands: Any, out: Sequence[Sequence[Array]] | None) -> Sequence[Sequence[Array]]:
        """Reduce arrays. If ``out`` is given, the results are copied into its arrays."""
        results: list[Any] = [None] * len(operands)
        for lowered, positions in self._buffers:
            reduced = _reduce_buffer(lowered, self._framework, [operands[k] for k in positions], self._numbers)
            for position, components in zip(positions, reduced, strict=True):
                results[position] = components
        if out is None:
            return results
        for targets, components in zip(out, results, strict=True):
            for target, x, device in zip(targets, components, self._destinations, strict=True):
                self._framework.write(self._framework.writable_array(target, device), x)
        return out


def _buffers_and_positions(layout: Layout) -> list[tuple[LoweredBuffer, tuple[int, ...]]]:
    """Return the buffers to reduce, each with the positions of its tensors in the layout.

    In host memory each large tensor gets a buffer of its own, since packing it with others only costs copies there.
    But a buffer that is cut into packs or chunks is not changed, since other cuts would change the order of additions.
    Null arrays are counted as if their devices shared no memory.
    """
    buffers = []
    first = 0  # the position of the buffer's first tensor in the layout
    for lowered in layout.buffers:
        buffer, ranges = lowered
        members = range(len(buffer.spans))
        is_one_chunk = len(ranges) == 1 and len(ranges[0].program.chunks) == 1
        if layout.on_host and layout.is_sized and is_one_chunk and layout.framework.name != "null":
            small = [span.size * itemsize(buffer.dtype) <= JOINED_BYTES for span in buffer.spans]
            groups = [[k for k in members if small[k]], *([k] for k in members if not small[k])]
            buffers += [(_subset(lowered, group), tuple(first + k for k in group)) for group in groups if group]
        else:
            buffers.append((lowered, tuple(first + k for k in members)))
        first += len(members)
    return buffers


def _subset(lowered: LoweredBuffer, members: Sequence[int]) -> LoweredBuffer:
    """Return a buffer of only the tensors ``members`` of a buffer, packed without gaps, with the same program."""
    buffer, (program_range,) = lowered
    spans: list[Span] = []
    size = 0
    for span in (buffer.spans[k] for k in members):
        spans.append(span._replace(start=size))
        size += span.size
    return LoweredBuffer(buffer._replace(size=size, spans=tuple(spans)), (program_range._replace(stop=size),))


def _reduce_buffer(
    lowered: LoweredBuffer, framework: Framework, arrays: list[Sequence[Array]], numbers: Numbers
) -> list[tuple[Array, ...]]:
    """Pack, reduce and unpack one buffer. Return the results of each tensor; ``arrays`` has its components."""
    buffer, ranges = lowered
    program = ranges[0].program
    names = [program.devices[source] for source in program.chunks[0].sources]
    if buffer.size is None:  # one tensor of unknown size
        flats = [framework.to_device(x, name) for x, name in zip(arrays[0], names, strict=True)]
        outputs = run_program(program, framework, flats, None, numbers)
        return [tuple(parts[0] if fresh else framework.clone(parts[0]) for parts, fresh in outputs)]
    flats = [
        framework.pack([framework.to_device(components[replica], name) for components in arrays])
        for replica, name in enumerate(names)
    ]
    if len(ranges) == 1:
        outputs = run_program(program, framework, flats, buffer.size, numbers)
    else:
        outputs = [Output([], False) for _ in program.chunks[0].destinations]
        for program, start, stop in ranges:
            slices = [framework.slice(flat, start, stop) for flat in flats]
            reduced = run_program(program, framework, slices, stop - start, numbers)
            for output, part in zip(outputs, reduced, strict=True):
                output.parts.extend(part.parts)
    del flats  # their memory can be used again while the results are unpacked
    bounds = tuple(
        (base + start, base + stop)
        for program, base, end in ranges
        for _, start, stop in element_ranges(program, end - base)
    )
    pieces = cuts(buffer.spans, bounds)
    unpacked = [framework.unpack(parts, pieces, fresh) for parts, fresh in outputs]
    return list(zip(*unpacked, strict=True))


class Output(NamedTuple):
    """The result of a flat buffer on one destination, in parts: one per element range, in order.

    ``fresh`` is whether the result is a single part that this engine allocated and that no earlier destination shares.
    """

    parts: list[Array]
    fresh: bool


def run_program(
    program: Program, framework: Framework, flats: Sequence[Array], size: int | None, numbers: Numbers
) -> list[Output]:
    """Run a program whose chunks all have the same sources and destinations.

    Chunks run one after another. So each chunk uses the memory that the previous one freed, which may be in the cache.
    ``to_device`` may return the same array, and ``slice`` and ``pack`` may return views, so donated operands are the
    only arrays that are written into.

    Args:
      flats: one flat array per source, in the order of the program's sources, each on its device.
      size: the number of elements of each flat array. ``None`` means unknown, and requires a program of one chunk.
    Returns:
      The result of each destination, in order, with one part for each of ``element_ranges``.
    Raises:
      ScheduleError: the size is unknown and there are several chunks, or chunks differ in sources or destinations.
    """
    program.require_uniform()
    _, sources, destinations, _, _ = program.chunks[0]
    if size is None and len(program.chunks) > 1:
        problem = "arrays of unknown size need a schedule of one chunk."
        given = f"{program.collective} by {program.algorithm}, {len(program.chunks)} chunks"
        raise ScheduleError.of(problem, given, 'the algorithm "one_device"')
    # A single source is not combined, so nothing else would divide and convert it.
    finish_first = len(sources) == 1 and (numbers.divisor != 1 or numbers.result != numbers.dtype)
    outputs: list[list[Array]] = [[] for _ in destinations]
    fresh: list[bool] = []
    active = ((0, 0, 0),) if size is None else element_ranges(program, size)
    for chunk, start, stop in active:
        values: dict[int, Array] = {}
        allocated: set[int] = set()  # the values whose memory this engine allocated
        for k, flat in enumerate(flats):
            x = flat if len(active) == 1 else framework.slice(flat, start, stop)
            values[k] = framework.finish(x, numbers) if finish_first else x
        code = program.chunks[chunk]
        for value, (device, operands, _, final, last_uses, donated) in enumerate(code.instructions, len(sources)):
            place = program.devices[device]
            xs = [framework.to_device(values[operand], place) for operand in operands]
            if len(xs) > 1:
                values[value] = framework.combine(xs, numbers, final, donated)
                allocated.add(value)
            else:
                values[value] = xs[0]
                # Either a new copy, or the same array as a value that this engine allocated.
                if xs[0] is not values[operands[0]] or operands[0] in allocated:
                    allocated.add(value)
            for operand in last_uses:
                del values[operand]
        seen: set[int] = set()
        for parts, result in zip(outputs, code.results, strict=True):
            x = values[result]
            parts.append(x)
            fresh.append(len(active) == 1 and result in allocated and id(x) not in seen)
            seen.add(id(x))
    # If there are several element ranges, ``fresh`` is longer than ``outputs``, and all of it is False.
    return [Output(parts, is_fresh) for parts, is_fresh in zip(outputs, fresh, strict=False)]


ENGINE: Final = LoopEngine()
