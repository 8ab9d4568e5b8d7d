"""An engine of the tests' own: it runs programs on NumPy arrays in plain steps and records what it ran.

It is also an example of a new engine, which takes such a file, its name in the registry, an entry in ``ENGINES`` of
``running.py``, and docs.
"""

from typing import Any, NamedTuple

import numpy as np
import oracle

from crossreduce import ReduceOp


def multiply(a, b):
    """Return the product; of complex numbers that of four real products, each rounded, as the library documents it."""
    if a.dtype.kind != "c":
        return a * b
    parts = [x.astype(a.dtype).view(a.real.dtype).reshape(-1, 2).T for x in (a, b)]
    (re, im), (other_re, other_im) = parts
    return np.stack([re * other_re - im * other_im, im * other_re + re * other_im], -1).reshape(-1).view(a.dtype)


COMBINE = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: multiply,
}


class Run(NamedTuple):
    """One run: the programs' algorithms, the shapes of the tensors, whether ``out`` was given."""

    algorithms: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    with_out: bool


class RecordingEngine:
    """See ``crossreduce.engines.base.Engine``. It copies its operands and results, so that they share no memory."""

    name = "recording"
    checks_overlap = False

    def __init__(self):
        self.runs = []

    def supports(self, layout):
        return layout.framework.name == "numpy" and layout.is_sized and not layout.mixed

    def bind(self, layout, arrays):
        return [[np.array(x) for x in row] for row in arrays]

    def compile(self, layout, numbers, with_out):
        return RecordingExecutable(self, layout, numbers)


class RecordingExecutable:
    prepared = None

    def __init__(self, engine, layout, numbers):
        self.engine, self.layout, self.numbers = engine, layout, numbers

    def run(self, operands: Any, out: Any) -> Any:
        layout, numbers = self.layout, self.numbers
        algorithms = tuple(program.algorithm for program in layout.programs)
        self.engine.runs.append(Run(algorithms, tuple(layout.shapes), out is not None))
        results, at = [], 0
        for buffer, ranges in layout.buffers:
            rows = operands[at : at + len(buffer.spans)]
            at += len(buffer.spans)
            flats = [np.concatenate([row[k].reshape(-1) for row in rows]) for k in range(len(layout.sources))]
            ends = [
                np.concatenate(parts)
                for parts in zip(
                    *(
                        self.reduced(program, [flat[start:stop] for flat in flats], stop - start)
                        for program, start, stop in ranges
                    ),
                    strict=True,
                )
            ]
            for span in buffer.spans:
                pieces = [end[span.start : span.start + span.size].reshape(span.shape).copy() for end in ends]
                results.append(tuple(pieces))
        assert all(x.dtype == oracle.dtype_of(numbers.result) for row in results for x in row)
        if out is None:
            return results
        for targets, row in zip(out, results, strict=True):
            for target, x in zip(targets, row, strict=True):
                target[...] = x
        return out

    def reduced(self, program, flats, size):
        """Run a program chunk by chunk; return each destination's buffer."""
        numbers = self.numbers
        wide, narrow = oracle.dtype_of(numbers.accumulator), oracle.dtype_of(numbers.result)
        ends = [np.zeros(size, narrow) for _ in program.chunks[0].destinations]
        for chunk, (start, stop) in zip(program.chunks, program.spans(size), strict=True):
            with np.errstate(all="ignore"):
                values = [flat[start:stop].astype(wide) for flat in flats]
                if len(values) == 1:
                    values = [self.finished(values[0], narrow)]
                for i in chunk.instructions:
                    total = values[i.operands[0]].copy()
                    for operand in i.operands[1:]:
                        total = np.asarray(COMBINE[numbers.op](total, values[operand]), wide)
                    values.append(self.finished(total, narrow) if i.final else total)
            for end, result in zip(ends, chunk.results, strict=True):
                end[start:stop] = values[result]
        return ends

    def finished(self, x, narrow):
        divisor = self.numbers.divisor
        if divisor != 1 and x.dtype.kind == "c":
            x = (x.view(x.real.dtype) / x.real.dtype.type(divisor)).view(x.dtype)
        elif divisor != 1:
            x = x / x.dtype.type(divisor)
        return x.astype(narrow)


ENGINE = RecordingEngine()
