"""Random kernels, and reproducible batches in memory on which compiled kernels and NumPy must agree."""

import ctypes
import itertools
import os
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import oracle
import strategies
from exact_oracle import FORMATS
from hypothesis import strategies as st

from crossreduce import ReduceOp, kernels
from crossreduce.kernels import FusedProgram, Segment, reference
from crossreduce.ops import ACCUMULATORS, INTEGERS

NATIVE = kernels.native()
# Without the C++ extension one instruction set remains, so that tests of kernels fail instead of being skipped.
SETS = tuple(NATIVE.supported()) if NATIVE else ("baseline",)

# Whether the payloads of NaNs may differ: with a compiler other than GCC, on a processor other than x86-64, or if
# scripts/sanitize sets the variable, since instrumented code chooses other payloads.
ANY_PAYLOAD = os.environ.get("CROSSREDUCE_TEST_NAN_PAYLOADS") == "any" or not getattr(NATIVE, "FIRST_PAYLOAD", True)

GUARD = 64  # bytes before and after a result that must not change
POISON = 0xA5


def accumulator(op, dtype):
    """Return the dtype in which an op, given by name, accumulates if its result may have another dtype."""
    return ACCUMULATORS[ReduceOp(op), dtype]


# (op, dtype, accumulator, result) of the reductions whose results have the dtype of the inputs.
SAME = tuple(
    (op, dtype, dtype if dtype in INTEGERS else accumulator(op, dtype), dtype)
    for dtype in strategies.DTYPES
    for op in strategies.ops_for(dtype)
)
# These, and means of integers whose results are floats. A framework without float64 accumulates them in float32.
NUMBERS = SAME + tuple(
    ("mean", *dtypes) for dtypes in itertools.product(strategies.INTEGERS, ("float64", "float32"), strategies.FLOATS)
)


class Case(NamedTuple):
    """The arguments of ``kernels.compile_kernel``."""

    op: str
    dtypes: tuple[str, str, str]
    divisor: int
    sources: int
    results: int
    sizes: tuple[int, ...]
    programs: tuple[FusedProgram, ...]
    segments: tuple[Segment, ...]

    def native(self, isa):
        """Return the compiled kernel for an instruction set."""
        op, dtypes, *rest = self
        return NATIVE.Kernel(isa, op, *dtypes, *rest)

    def reference(self):
        """Return the kernel in NumPy."""
        return reference.ReferenceKernel(self.op, self.dtypes, self.divisor, self.sizes, self.programs, self.segments)


def reduction(op, dtype, wide, narrow, n, size, results=1):
    """Return the case that combines ``n`` sources of one tensor, left to right, in dtype ``wide``, into ``narrow``."""
    divisor = n if op == "mean" else 1
    program = FusedProgram(1, ((0, *range(n)),), (~0,) * results)
    kernel_op = "sum" if op == "mean" else op
    return Case(kernel_op, (dtype, wide, narrow), divisor, n, results, (size,), (program,), (Segment(0, 0, size, 0),))


@st.composite
def programs(draw, sources, results):
    """Draw a program that reads a slot only after it is written. Operand k >= 0 is source k, and ~k is slot k."""
    slots = draw(st.integers(0, 4))
    written: list[int] = []
    folds = []
    for _ in range(draw(st.integers(0, 5)) if slots else 0):
        slot = draw(st.integers(0, slots - 1))
        known = [*range(sources), *(~other for other in written)]
        others = st.sampled_from([x for x in known if x != ~slot])
        more = draw(st.lists(others, max_size=draw(st.sampled_from([2, 5, 40]))))
        folds.append((slot, draw(st.sampled_from(known)), *more))
        written += [slot] if slot not in written else []
    known = st.sampled_from([*range(sources), *(~slot for slot in written)])
    return FusedProgram(slots, tuple(folds), tuple(draw(known) for _ in range(results)))


@st.composite
def cases(draw):
    """Draw a ``Case`` of 1 to 3 tensors, some cut into segments with gaps. Each segment has one of 1 to 3 programs."""
    name, *dtypes = draw(st.sampled_from(NUMBERS))
    sources = draw(st.one_of(st.integers(1, 5), st.integers(1, 40)))
    results = draw(st.one_of(st.integers(1, 4), st.integers(1, 40)))
    drawn = tuple(draw(st.lists(programs(sources, results), min_size=1, max_size=3)))
    size = st.one_of(st.integers(0, 70), st.integers(0, 5000))
    sizes = tuple(draw(st.lists(size, min_size=1, max_size=3)))
    segments = []
    for tensor, size in enumerate(sizes):
        if draw(st.booleans()):
            segments.append(Segment(tensor, 0, size, draw(st.integers(0, len(drawn) - 1))))
            continue
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
        for start, stop in itertools.pairwise(cuts):
            if draw(st.sampled_from([True, True, False])):
                segments.append(Segment(tensor, start, stop, draw(st.integers(0, len(drawn) - 1))))
    divisor = draw(st.integers(1, 40)) if name == "mean" else 1
    op = "sum" if name == "mean" else name
    shuffled = tuple(draw(st.permutations(segments)))
    return Case(op, tuple(dtypes), divisor, sources, results, sizes, drawn, shuffled)


def storage(dtype):
    """Return the dtype of buffers with elements of a dtype, which differs for bfloat16: buffers do not support it."""
    return np.dtype(np.uint16) if dtype == "bfloat16" else oracle.dtype_of(dtype)


def block(nbytes, offset=0):
    """Return new poisoned memory, and a part of ``nbytes`` that begins ``offset`` bytes after a multiple of 64."""
    whole = np.full(nbytes + offset + 2 * GUARD + 64, POISON, np.uint8)
    whole = whole[-whole.ctypes.data % 64 :][: GUARD + offset + nbytes + GUARD]
    return whole, whole[GUARD + offset :][:nbytes]


def view(part, dtype):
    """Return bytes as the elements of a dtype, aligned or not."""
    kind = storage(dtype)
    return np.ndarray((part.size // kind.itemsize,), kind, part.data)


def specials(dtype):
    """Return the bits of numbers at which arithmetic changes: zeros, subnormals, infinities, NaNs with payloads."""
    nbytes = oracle.dtype_of(dtype).itemsize
    bits, sign = FORMATS[dtype][1], 1 << (8 * nbytes - 1)
    infinite = sign - (1 << bits)
    one = infinite // 2 - infinite // 2 % (1 << bits)  # the bits of 1.0
    quiet = infinite | 1 << (bits - 1)  # a quiet NaN
    finite = [0, 1, 2, (1 << bits) - 1, 1 << bits, one - 1, one, one + 1, one + 2, infinite - 1]
    nans = [infinite + 1, quiet - 1, quiet, quiet + 1, sign - 1, quiet | 5 << (bits - 4), infinite | 3 << (bits - 4)]
    positive = [*finite, infinite, *nans]
    return np.array([*positive, *(x | sign for x in positive)], f"u{nbytes}")


def elements(rng, dtype, size, kind):
    """Return ``size`` elements in their storage: random bytes, numbers of usual magnitude, or special numbers."""
    made = storage(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, size).astype(made)
    if dtype in INTEGERS and kind == "special":
        bounds = np.iinfo(made)
        return rng.choice(np.array([0, 1, 2, bounds.min, bounds.max, bounds.min + 1, bounds.max - 1], made), size)
    if kind == "bytes" or dtype in INTEGERS:
        return np.frombuffer(rng.bytes(size * made.itemsize), made)
    part, count = (f"float{made.itemsize * 4}", 2 * size) if dtype in strategies.COMPLEX else (dtype, size)
    if kind == "special":
        return rng.choice(specials(part), count).view(made)
    with np.errstate(over="ignore"):
        return (rng.normal(size=count) * 10.0 ** rng.integers(-3, 4)).astype(oracle.dtype_of(part)).view(made)


LAYOUTS = ("array", "bytes", "address", "transposed", "reversed", "stepped", "repeated", "moved axes")
CONTIGUOUS = LAYOUTS[:3]


def laid_out(rng, data, layout, offset):
    """Return an array of the dtype and size of ``data`` in a layout. Elements may be reordered or repeated."""
    if layout in CONTIGUOUS:
        array = view(block(data.nbytes, offset)[1], data.dtype.name)
        array[...] = data
        return array
    size = data.size
    rows = int(rng.choice([d for d in (1, 2, 3, 4, 5, 7, 8, 16) if size % d == 0]))
    shape = (rows, size // rows)
    if layout == "transposed":
        return data.reshape(shape[::-1]).T
    if layout == "reversed":
        return data.reshape(shape)[::-1, ::-1]
    if layout == "stepped":
        return np.repeat(data, 3).reshape(rows, 3 * (size // rows))[:, 1::3]
    if layout == "repeated":
        return np.broadcast_to(data[: size // rows], shape)
    half = 2 if shape[1] % 2 == 0 else 1
    return np.moveaxis(data.reshape(half, shape[1] // half, rows), 0, 2)


def operand(array, layout, as_tuple):
    """Return an array in a form that ``Kernel.run`` accepts: bytes, address, (address, shape, strides) or array."""
    if layout == "bytes":
        return memoryview(array).cast("B") if array.size else b""
    if layout == "address":
        return array.ctypes.data
    if as_tuple and array.ndim:
        return array.ctypes.data, array.shape, array.strides
    return array


class Setup(NamedTuple):
    """The content of a batch, its layout in memory, and the arguments of the run."""

    seed: int = 0
    kind: str = "numbers"  # see ``elements``
    layouts: tuple[str, ...] = ("array",)  # of the sources, in turn
    tuples: bool = False  # see ``operand``
    offsets: tuple[int, ...] = (0,)  # of the memory of sources and results, in turn: see ``block``
    in_place: tuple[tuple[int, int], ...] = ()  # (result, source) pairs that have the same memory
    threads: int = 1
    streaming: bool = False
    check_overlap: bool = False


def setups(layouts=LAYOUTS, in_place=False):
    """Return a strategy that draws a ``Setup``."""
    pair = st.tuples(st.integers(0, 3), st.integers(0, 6))
    pairs = st.lists(pair, min_size=1, max_size=3, unique_by=(lambda pair: pair[0], lambda pair: pair[1]))
    return st.builds(
        Setup,
        seed=st.integers(0, 2**32 - 1),
        kind=st.sampled_from(["bytes", "numbers", "special"]),
        layouts=st.lists(st.sampled_from(layouts), min_size=1, max_size=3).map(tuple),
        tuples=st.booleans(),
        offsets=st.lists(st.integers(0, 64), min_size=1, max_size=5).map(tuple),
        in_place=pairs.map(tuple) if in_place else st.just(()),
        threads=st.integers(1, 3),
        streaming=st.booleans(),
        check_overlap=st.booleans(),
    )


class Batch(NamedTuple):
    """The operands of a run, the memory around each result, and the arrays that addresses refer to."""

    sources: list[list[Any]]
    results: list[list[Any]]
    blocks: list[tuple[Any, Any]]
    arrays: list[Any]


def batch(case, setup):
    """Return the ``Batch`` of a case and a setup. The same arguments give equal batches."""
    rng = np.random.default_rng(setup.seed)
    dtype, _, result = case.dtypes
    kind = storage(result)
    made = Batch([], [], [], [])
    for tensor, size in enumerate(case.sizes):
        sources, results, in_place = [], [], {}
        for k in range(case.sources):
            data = elements(rng, dtype, size, setup.kind)
            layout = setup.layouts[(k + tensor) % len(setup.layouts)]
            offset = setup.offsets[k % len(setup.offsets)]
            if k in {source for _, source in setup.in_place}:
                whole, part = block(data.nbytes, offset)
                part[...] = data.view(np.uint8)
                in_place[k] = whole, part
                array, layout = view(part, dtype), CONTIGUOUS[k % 3]
            else:
                array = laid_out(rng, data, layout, offset)
            sources.append(operand(array, layout, setup.tuples))
            made.arrays.append(array)
        for r in range(case.results):
            source = dict(setup.in_place).get(r)
            offset = setup.offsets[(case.sources + r) % len(setup.offsets)]
            whole, part = in_place[source] if source in in_place else block(size * kind.itemsize, offset)
            results.append(operand(view(part, result), CONTIGUOUS[r % 3], False) if size else bytearray())
            made.blocks.append((whole, part))
        made.sources.append(sources)
        made.results.append(results)
    return made


def copies(case, made):
    """Return the sources of a batch as new arrays in C order."""
    kind = storage(case.dtypes[0])

    def copied(source, size):
        if size == 0:
            return np.empty(0, kind)
        if isinstance(source, int):
            source = source, (size,), (kind.itemsize,)
        if isinstance(source, tuple):
            address, shape, strides = source
            ends = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
            low = sum(end for end in ends if end < 0)
            memory = (ctypes.c_char * (sum(map(abs, ends)) + kind.itemsize)).from_address(address + low)
            source = np.ndarray(shape, kind, memory, -low, strides)
        elif not isinstance(source, np.ndarray):
            source = np.frombuffer(source, kind)
        return np.array(source, order="C").reshape(-1)

    return [[copied(source, size) for source in row] for row, size in zip(made.sources, case.sizes, strict=True)]


def expected(case, setup):
    """Return what ``contents`` returns after the kernel in NumPy has run on copies of the sources."""
    made = batch(case, setup)
    results = case.dtypes[2]
    outs = [np.array(view(part, results)) for _, part in made.blocks]
    rows = [outs[k : k + case.results] for k in range(0, len(outs), case.results)]
    case.reference().run(copies(case, made), rows, threads=1, streaming=False, check_overlap=False)
    for (_, part), out in zip(made.blocks, outs, strict=True):
        part[...] = out.view(np.uint8)
    return contents(case, made)


def contents(case, made):
    """Return the bytes of each result and around it. NaNs whose payload the compiler may choose are made equal."""
    dtype = case.dtypes[2]
    if ANY_PAYLOAD or (case.op == "product" and dtype in strategies.COMPLEX):
        for _, part in made.blocks:
            array = view(part, dtype)
            numbers = np.array(array)
            if dtype == "bfloat16":
                numbers[numbers & 0x7FFF > 0x7F80] = 0x7FC0  # all NaNs become the same NaN
            elif dtype in (*strategies.FLOATS, *strategies.COMPLEX):
                parts = numbers.view(f"f{numbers.itemsize // (1 + (dtype in strategies.COMPLEX))}")
                parts[parts != parts] = np.nan
            array[...] = numbers
    return [whole.tobytes() for whole, _ in made.blocks]


def check(case, setup, kernel):
    """Assert that a kernel leaves the expected bytes in the results and around them."""
    made = batch(case, setup)
    assert kernel.run(made.sources, made.results, setup.threads, setup.streaming, setup.check_overlap) is None
    for number, (got, right) in enumerate(zip(contents(case, made), expected(case, setup), strict=True)):
        differs = np.flatnonzero(np.frombuffer(got, np.uint8) != np.frombuffer(right, np.uint8))
        assert not differs.size, f"(tensor, result) {divmod(number, case.results)}: bytes {differs[:5]} differ"


def run_python(code, **environment):
    """Run a program in a new process. Of ``CROSSREDUCE_*`` variables, its environment has only ``environment``."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("CROSSREDUCE_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, check=False, env={**kept, **environment},
    )  # fmt: skip
