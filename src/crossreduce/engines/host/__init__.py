"""The host engine: compiled kernels reduce whole batches in host memory, where the arrays are.

Input: a layout. Output: one kernel, compiled once. All devices of a host share one memory, so a program's copies are
not needed: only the order of combination remains, and a chain of combinations is one pass over the data. Each
framework's file in this folder gives access to the memory of its arrays.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Protocol

from ... import kernels
from ...frameworks import FRAMEWORKS, Array
from ...kernels import FusedProgram, Kernel, Segment
from ...lowering import element_ranges
from ...ops import Numbers
from ...packing import itemsize
from ..base import Layout, OverlapError, PreparedRun


class ArrayMemory(Protocol):
    """Lets kernels read and write one framework's arrays, and makes new arrays of memory that a kernel has filled.

    Nested sequences have one row per tensor of a batch, with one array per replica or destination.
    """

    shares_results: bool
    """Whether one result suffices for all destinations, because arrays are immutable."""

    def readable(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]] | None:
        """Return what the kernels read: buffers, addresses or strided addresses.

        ``None``: the kernels cannot read some arrays; they are traced, for example, or on an accelerator.
        """

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtype: str, count: int) -> list[list[Any]]:
        """Return memory for ``count`` results of each shape: new arrays, or buffers of which ``wrap`` makes arrays."""

    def writable(self, arrays: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Return allocated memory in the form that the kernels accept: writable buffers or addresses."""
        return arrays

    def writable_outputs(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]]:
        """Return a user's arrays in the form that the kernels accept, as for ``writable``.

        Raises:
          BufferError, ValueError: an array cannot be written into. Some frameworks leave this check to the kernel.
        """

    def wrap(
        self, blanks: list[list[Any]], shapes: Sequence[tuple[int, ...]], dtype: str, devices: tuple[str, ...]
    ) -> list[tuple[Array, ...]]:
        """Return filled memory as arrays: for each tensor one array per device."""
        return list(map(tuple, blanks))

    def threads(self) -> int | None:
        """Return the framework's own limit of threads on the host; ``None``: unlimited."""
        return None

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        """Tell the framework that a user's arrays were written into."""


class SharedResults(ArrayMemory, Protocol):
    """For frameworks with immutable arrays: one result is computed, and all devices' arrays share its memory."""

    shares_results: bool = True

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtype: str, count: int) -> list[list[Any]]:
        assert count == 1
        size = itemsize(dtype)
        return [[kernels.memory(math.prod(shape) * size)] for shape in shapes]

    def writable_outputs(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]]:
        raise BufferError("these arrays are immutable")

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        raise AssertionError("immutable arrays are never written into")


@lru_cache(maxsize=16)
def array_memory(framework: str) -> ArrayMemory | None:
    """Return a framework's ``ArrayMemory``, importing it on first use.

    ``None``: its arrays are never in host memory ("cupy"), or nowhere ("null").
    """
    if framework not in FRAMEWORKS or framework == "cupy":
        return None
    memory: ArrayMemory = importlib.import_module(f".{framework}", __package__).MEMORY
    return memory


class HostEngine:
    """See ``engines.base.Engine``."""

    name = "host"
    checks_overlap = True

    def supports(self, layout: Layout) -> bool:
        """Return whether sizes are known, devices are CPUs, no sparse array was made dense, and arrays have memory."""
        known = layout.is_sized and layout.on_host and not layout.mixed
        return known and array_memory(layout.framework.name) is not None

    def bind(self, layout: Layout, arrays: Sequence[Sequence[Array]]) -> Any | None:
        """Return buffers or addresses; ``None`` if the kernels cannot read the arrays: see ``ArrayMemory.readable``."""
        memory = array_memory(layout.framework.name)
        assert memory is not None
        return memory.readable(arrays)

    def compile(self, layout: Layout, numbers: Numbers, with_out: bool) -> HostExecutable:
        """Return the executable of a layout."""
        return HostExecutable(layout, numbers, with_out)


class HostExecutable:
    """A kernel and the memory of its results. See ``engines.base.Executable``.

    If the framework's arrays are immutable, one result per tensor is computed, and all destinations share its memory.
    """

    def __init__(self, layout: Layout, numbers: Numbers, with_out: bool) -> None:
        memory = array_memory(layout.framework.name)
        assert memory is not None
        self._memory: ArrayMemory = memory
        self._shapes, self._dtype, self._destinations = layout.shapes, numbers.result, layout.destinations
        self._count = 1 if memory.shares_results and not with_out else len(layout.destinations)
        self.kernel = kernel(layout, numbers, self._count)
        written = layout.nbytes // itemsize(numbers.dtype) * self._count * itemsize(numbers.result)
        self.streaming = written >= kernels.STREAMING_BYTES
        self.threaded = written + layout.nbytes * len(layout.sources) >= kernels.THREADED_BYTES

    @property
    def prepared(self) -> PreparedRun:
        """How compiled code runs the kernel."""
        return PreparedRun(self.kernel, self.streaming, self.threaded)

    def threads(self) -> int:
        """Return the number of threads of a run."""
        if not self.threaded:
            return 1
        limit = self._memory.threads()
        return kernels.threads() if limit is None else min(kernels.threads(), limit)

    def run(self, operands: Any, out: Sequence[Sequence[Array]] | None) -> Sequence[Sequence[Array]]:
        """Reduce arrays in one run of the kernel."""
        memory, threads = self._memory, self.threads()
        if out is None:
            blanks = memory.allocate(self._shapes, self._dtype, self._count)
            self.kernel.run(operands, memory.writable(blanks), threads, self.streaming, False)
            return memory.wrap(blanks, self._shapes, self._dtype, self._destinations)
        overlap = self.kernel.run(operands, memory.writable_outputs(out), threads, self.streaming, True)
        if overlap is not None:
            raise OverlapError(*overlap)
        memory.mark_dirty(out)
        return out


def kernel(layout: Layout, numbers: Numbers, results: int) -> Kernel:
    """Return the kernel of a layout that writes the first ``results`` results of each tensor."""
    sizes = tuple(math.prod(shape) for shape in layout.shapes)
    if numbers.exact:
        # Rounded partial sums would not do, so the programs' order is not used: one fold has all sources.
        sources = range(len(layout.sources))
        programs: tuple[FusedProgram, ...] = (FusedProgram(1, ((0, *sources),), (~0,) * results),)
        segments = tuple(Segment(tensor, 0, size, 0) for tensor, size in enumerate(sizes) if size)
    else:
        programs, segments = _programs_and_segments(layout, results)
    dtypes = numbers.dtype, numbers.accumulator, numbers.result
    return kernels.compile_kernel(
        numbers.kernel_op, dtypes, numbers.divisor, len(layout.sources), results, sizes, programs, segments
    )


def _programs_and_segments(layout: Layout, results: int) -> tuple[tuple[FusedProgram, ...], tuple[Segment, ...]]:
    """Return the fused programs of a layout, and the segments of its tensors that they compute."""
    programs: dict[FusedProgram, int] = {}
    segments: list[Segment] = []
    tensors = 0
    for buffer, ranges in layout.buffers:
        spans = [(tensors + k, span.start, span.start + span.size) for k, span in enumerate(buffer.spans) if span.size]
        tensors += len(buffer.spans)
        first = 0  # the first span that ends after the current position
        for program, base, end in ranges:
            for chunk, low, high in element_ranges(program, end - base):
                low, high = base + low, base + high
                number = programs.setdefault(program.fused(chunk, results), len(programs))
                while first < len(spans) and spans[first][2] <= low:
                    first += 1
                for tensor, start, stop in itertools.islice(spans, first, None):
                    if start >= high:
                        break
                    segment = Segment(tensor, max(low, start) - start, min(high, stop) - start, number)
                    last = segments[-1] if segments else None
                    if last is not None and (last.tensor, last.stop, last.program) == (tensor, segment.start, number):
                        segments[-1] = last._replace(stop=segment.stop)
                    else:
                        segments.append(segment)
    return tuple(programs), tuple(segments)


ENGINE: Final = HostEngine()
