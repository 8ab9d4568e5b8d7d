"""The null engine: counts the transfers and combinations of a program, and moves no data.

Input: a layout of ``NullArray``s. Output: results without elements, and the framework's ``Counts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..frameworks import Array
from ..frameworks.null import NullArray, NullFramework
from ..lowering import ChunkProgram, element_ranges
from ..ops import Numbers
from ..packing import itemsize
from .base import Layout


class NullEngine:
    """See ``engines.base.Engine``."""

    name = "null"
    checks_overlap = False

    def supports(self, layout: Layout) -> bool:
        """Return whether the arrays are ``NullArray``s."""
        return isinstance(layout.framework, NullFramework)

    def bind(self, layout: Layout, arrays: Sequence[Sequence[Array]]) -> Any | None:
        return arrays

    def compile(self, layout: Layout, numbers: Numbers, with_out: bool) -> NullExecutable:
        return NullExecutable(layout, numbers)


class NullExecutable:
    """Counts the transfers and combinations of each run. See ``engines.base.Executable``."""

    prepared = None

    def __init__(self, layout: Layout, numbers: Numbers) -> None:
        self._layout, self._numbers = layout, numbers

    def run(self, operands: Any, out: Sequence[Sequence[Array]] | None) -> Sequence[Sequence[Array]]:
        """Count the operations of an engine whose devices share no memory, and return arrays without elements."""
        layout, numbers = self._layout, self._numbers
        assert isinstance(layout.framework, NullFramework)
        for components in operands:
            for x, device in zip(components, layout.sources, strict=True):
                layout.framework.to_device(x, device)  # counts a copy if the component is on another device
        for buffer, ranges in layout.buffers:
            assert buffer.size is not None, "every shape is known here"
            for program, start, stop in ranges:
                for chunk, low, high in element_ranges(program, stop - start):
                    self._count(program.chunks[chunk], program.devices, high - low)
        if out is not None:
            return out
        framework = layout.framework
        return [
            tuple(NullArray(shape, numbers.result, device, framework) for device in layout.destinations)
            for shape in layout.shapes
        ]

    def _count(self, code: ChunkProgram, names: tuple[str, ...], size: int) -> None:
        """Count the operations of one chunk of ``size`` elements; ``names`` has the names of the program's devices."""
        numbers, counts = self._numbers, self._layout.framework.counts  # type: ignore[attr-defined]
        dtype_of = {"input": numbers.dtype, "partial": numbers.accumulator, "final": numbers.result}
        places, kinds = code.devices, code.kinds
        for instruction in code.instructions:
            for operand in instruction.operands:
                src, dst = places[operand], instruction.device
                if src != dst:
                    counts.copies += 1
                    counts.bytes[names[src], names[dst]] += size * itemsize(dtype_of[kinds[operand]])
            counts.additions += (len(instruction.operands) - 1) * size


ENGINE: Final = NullEngine()
