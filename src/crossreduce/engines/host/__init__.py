"""The host engine: compiled kernels reduce whole batches in host memory, where the arrays are.

Input: a layout. Output: one kernel, compiled once. All devices of a host share one memory, so a program's copies are
not needed: only the order of combination remains, and a chain of combinations is one pass over the data. The file
``host_memory.py`` of each framework gives access to the memory of its arrays.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from ... import kernels
from ...frameworks import FRAMEWORKS, Array
from ...frameworks.host_memory import ArrayMemory
from ...kernels import FusedProgram, Kernel, Segment
from ...lowering import element_ranges
from ...ops import KERNEL_OPS, Numbers
from ...packing import itemsize
from ..base import Layout, OverlapError, PreparedRun
from .prepared import read_tensors


@lru_cache(maxsize=16)
def array_memory(framework: str) -> ArrayMemory | None:
    """Return a framework's ``ArrayMemory``, importing it on first use.

    Return ``None`` if its arrays are never in host memory ("cupy"), or have no memory at all ("null").
    """
    if framework not in FRAMEWORKS or framework == "cupy":
        return None
    module = importlib.import_module(f"...frameworks.{framework}.host_memory", __package__)
    if framework == "torch":
        read_tensors(module.functions_for_compiled_code(), module.layout_probes)
    memory: ArrayMemory = module.MEMORY
    return memory


class HostEngine:
    """See ``engines.base.Engine``."""

    name = "host"
    checks_overlap = True

    def supports(self, layout: Layout) -> bool:
        """Return whether sizes are known, devices are CPUs, no sparse array was made dense, and arrays have memory."""
        fits = layout.is_sized and layout.on_host and not layout.mixed
        return fits and array_memory(layout.framework.name) is not None

    def bind(self, layout: Layout, arrays: Sequence[Sequence[Array]]) -> Any | None:
        """Return what ``ArrayMemory.readable`` returns: buffers, addresses, or ``None`` for arrays without either."""
        memory = array_memory(layout.framework.name)
        assert memory is not None
        return memory.readable(arrays)

    def compile(self, layout: Layout, numbers: Numbers, with_out: bool) -> HostExecutable:
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
        elements = layout.nbytes // itemsize(numbers.dtype)  # of one replica
        written = elements * self._count * itemsize(numbers.result)
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
        # Partial sums would be rounded, so the programs are not used: one combination has all sources as its operands.
        fold = (0, *range(len(layout.sources)))
        programs: tuple[FusedProgram, ...] = (FusedProgram(1, (fold,), (~0,) * results),)
        segments = tuple(Segment(tensor, 0, size, 0) for tensor, size in enumerate(sizes) if size)
    else:
        programs, segments = _programs_and_segments(layout, results)
    op, dtypes = KERNEL_OPS[numbers.op, numbers.exact], (numbers.dtype, numbers.accumulator, numbers.result)
    divisor, count, weights = numbers.divisor, len(layout.sources), numbers.weights
    return kernels.compile_kernel(op, dtypes, divisor, count, results, sizes, programs, segments, weights)


def _programs_and_segments(layout: Layout, results: int) -> tuple[tuple[FusedProgram, ...], tuple[Segment, ...]]:
    """Return the fused programs of a layout, and the segments of its tensors that they compute."""
    programs: dict[FusedProgram, int] = {}
    segments: list[Segment] = []
    offset = 0
    for buffer, ranges in layout.buffers:
        spans = [(offset + k, span.start, span.start + span.size) for k, span in enumerate(buffer.spans) if span.size]
        offset += len(buffer.spans)
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
