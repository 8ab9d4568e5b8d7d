"""Results of the kernels: compiled ones and those in NumPy give the same bits, and both are right."""

import contextlib
import itertools
import math
from fractions import Fraction

import numpy as np
import oracle
import pytest
import strategies
from budget import examples
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import (
    NATIVE,
    NUMBERS,
    SAME,
    SETS,
    Case,
    Setup,
    accumulator,
    cases,
    check,
    operand,
    reduction,
    setups,
    storage,
)
from pairs import each, pairs

from crossreduce import ReduceOp, UnsupportedError
from crossreduce.frameworks import get
from crossreduce.kernels import FusedProgram, Segment
from crossreduce.ops import INTEGERS

every_set = pytest.mark.parametrize("isa", SETS)
# The last arguments of ``run``: the number of threads, whether streaming stores are used, whether overlaps are found.
PLAIN, CHECKED = (1, False, False), (1, False, True)


def joined(value):
    """Return the id of a parameter that is a tuple of names."""
    return "-".join(value) if isinstance(value, tuple) and isinstance(value[0], str) else None


def test_the_extension_was_built():
    """The extension is built. Without it, these tests would prove nothing about the compiled kernels."""
    assert NATIVE is not None, "the extension must be built for the tests: python setup.py build_ext --inplace"
    assert NATIVE.supported()[-1] == "baseline"


@every_set
@examples(60)
@given(case=cases(), setup=setups())
def test_compiled_kernels_give_the_bits_of_the_reference(isa, case, setup):
    """Any program on arrays of any layout gives the bits of the reference, and writes no byte outside the results."""
    check(case, setup, case.native(isa))


FLOAT32 = "float32", "float32", "float32"
SWAP = FusedProgram(0, (), (1, 0))  # result 0 is source 1, and result 1 is source 0
TWO_VALUES = FusedProgram(2, ((0, 0, 1), (1, 1, ~0)), (~0, ~1))  # x0 + x1, and x1 + (x0 + x1)
SWAPPED = Case("sum", ("float64",) * 3, 1, 2, 2, (100,), (SWAP,), (Segment(0, 0, 100, 0),))
SEPARATE = Case("sum", FLOAT32, 1, 2, 2, (100,), (TWO_VALUES,), (Segment(0, 0, 100, 0),))


@every_set
@examples(50)
@given(case=cases(), setup=setups(in_place=True))
@example(case=SWAPPED, setup=Setup(in_place=((0, 0), (1, 1))))
@example(case=SEPARATE, setup=Setup(in_place=((1, 1),)))
def test_a_result_may_be_a_source_of_its_tensor(isa, case, setup):
    """Results that overwrite sources have the same bits as separate results, in the compiled kernels and in NumPy."""
    in_place = tuple((r, s) for r, s in setup.in_place if s < case.sources and r < case.results)
    if storage(case.dtypes[0]).itemsize != storage(case.dtypes[2]).itemsize:
        in_place = ()  # the elements of results and sources differ in size
    check(case, setup._replace(in_place=in_place), case.native(isa))
    check(case, setup._replace(in_place=in_place), case.reference())


@every_set
def test_results_may_be_different_values_in_any_order(isa):
    """Each result is the value that the program names for it: a source, or the value of any fold."""
    a, b = np.arange(100, dtype="float32"), np.arange(100, 200, dtype="float32")
    values = {0: a, 1: b, ~0: a + b, ~1: b + (a + b)}
    for wanted, divisor in pairs([(~1, ~0), (~0, ~1), (0, ~1), (~1, 0), (0, ~0), (1, 0)], [1, 3]):
        case = SEPARATE._replace(divisor=divisor, programs=(TWO_VALUES._replace(results=wanted),))
        outs = [np.zeros(100, "float32") for _ in wanted]
        case.native(isa).run([[a, b]], [outs], *PLAIN)
        for out, name in zip(outs, wanted, strict=True):
            assert (out == values[name] / np.float32(divisor)).all(), (wanted, divisor)


# Integers have the same source code for every instruction set, so each of their rows is tested on one set only; rows of
# floats are tested on every set.
EXACT = [row for row in SAME if row[1] not in (*strategies.FLOATS, *strategies.COMPLEX)]
MEANS = pairs(strategies.INTEGERS, ("float64", "float32"), strategies.FLOATS, SETS)
TABLE = [
    *itertools.product([row for row in SAME if row not in EXACT], SETS),
    *zip(EXACT, itertools.cycle(SETS), strict=False),
    *((("mean", *dtypes), isa) for *dtypes, isa in MEANS),
]


@pytest.mark.parametrize(("numbers", "isa"), TABLE, ids=joined)
def test_every_op_on_every_dtype(isa, numbers):
    """Every op that is defined for a dtype gives the bits of the reference, also in partial cache lines at the ends."""
    for n, size, kind in ((1, 3, "special"), (2, 333, "special"), (3, 1000, "bytes"), (18, 333, "special")):
        case = reduction(*numbers, n, size, results=2)
        check(case, Setup(seed=n, kind=kind, offsets=(1, 8)), case.native(isa))  # arrays at these offsets in turn


# Ops, and the dtypes of sources, accumulators and results.
STREAMED = [
    ("mean", "float16", "float32", "float16"), ("sum", *["complex128"] * 3), ("mean", "int8", "float64", "float32"),
    ("max", *["bfloat16"] * 3),
]  # fmt: skip
ALIGNED = [
    ("product", *["complex128"] * 3), ("product", *["complex64"] * 3), ("mean", *["float64"] * 3),
    ("sum", "bfloat16", "float32", "bfloat16"), ("mean", "int8", "float64", "float16"), ("max", *["uint8"] * 3),
]  # fmt: skip


@pytest.mark.parametrize(("numbers", "isa", "streaming"), pairs(ALIGNED, SETS, [True, False]), ids=joined)
def test_every_alignment(isa, numbers, streaming):
    """Sources and results may have any offsets in a cache line, with and without streaming stores."""
    size = 17_000 // oracle.dtype_of(numbers[1]).itemsize  # enough lines for streaming stores
    case = reduction(*numbers, 2, size, results=2)._replace(segments=(Segment(0, 1, size, 0),))
    for offset in range(65):
        offsets = offset * 7 % 65, offset * 11 % 65, offset, offset if offset % 3 else offset + 16
        check(case, Setup(seed=offset, offsets=offsets, streaming=streaming), case.native(isa))


@pytest.mark.parametrize(("numbers", "isa"), pairs(STREAMED, SETS), ids=joined)
def test_large_arrays_are_streamed_by_several_threads(isa, numbers):
    """The threads' shares, streamed cache lines and partial cache lines leave no gap between them."""
    case = reduction(*numbers, 3, 300_007, results=3)._replace(segments=(Segment(0, 5, 300_000, 0),))
    for offsets in ((0,), (2, 64, 16), (1, 3)):
        check(case, Setup(kind="bytes", offsets=offsets, threads=3, streaming=True), case.native(isa))


def test_there_are_kernels_for_the_numbers_of_every_framework(framework):
    """Everything that a framework's ``numbers`` method returns compiles, and is in the table of these tests."""
    for dtype in strategies.DTYPES:
        for op in strategies.ops_for(dtype):
            with contextlib.suppress(UnsupportedError):
                numbers = get(framework.name).numbers(ReduceOp(op), dtype, 2)
                row = op, numbers.dtype, numbers.accumulator, numbers.result
                assert row in NUMBERS
                for isa in SETS:
                    reduction(*row, 2, 4).native(isa)


# Comparison with plain arithmetic, which shares no code with the kernels or their reference


@pytest.mark.parametrize(("dtype", "isa"), each(strategies.DTYPES, SETS))
@examples(10)
@given(data=st.data())
def test_reductions_are_right(isa, dtype, data):
    """Kernels give the results of exact Python numbers: integers exactly, and floats within the rounding error."""
    n, size = data.draw(st.integers(1, 24)), data.draw(st.integers(0, 90))
    xs = data.draw(strategies.arrays(dtype, (size,), n))
    for op in strategies.ops_for(dtype):
        result = "float64" if op == "mean" and dtype in INTEGERS else dtype
        out = np.zeros(size, storage(result))
        kernel = reduction(op, dtype, accumulator(op, dtype), result, n, size).native(isa)
        kernel.run([[np.array(x).view(storage(dtype)) for x in xs]], [[out]], 2, True, True)
        oracle.check(out.view(oracle.dtype_of(result)), op, xs)


@pytest.mark.parametrize(("dtype", "n", "op", "isa"), pairs(["float16", "bfloat16"], [2, 3, 8], ["sum", "mean"], SETS))
def test_halves_are_rounded_once(isa, dtype, n, op):
    """The sum of up to 8 halves with the magnitudes of gradients has the error of one rounding: at most 0.51 units in
    the last place. It can exceed 0.5, since an addition in float32 may lose 2**-24 of its result."""
    rng = np.random.default_rng(n)
    layers = np.exp2(rng.uniform(-18, -2, 50_000))
    xs = [(rng.normal(size=layers.size) * layers).astype(oracle.dtype_of(dtype)) for _ in range(n)]
    exact = sum(x.astype("float64") for x in xs) / (n if op == "mean" else 1)
    out = np.zeros(layers.size, np.uint16)
    kernel = reduction(op, dtype, "float32", dtype, n, layers.size).native(isa)
    kernel.run([[x.view(np.uint16) for x in xs]], [[out]], *PLAIN)
    bits, least = {"float16": (10, -14), "bfloat16": (7, -126)}[dtype]
    unit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 1e-300))), least) - bits)
    error = np.abs(out.view(oracle.dtype_of(dtype)).astype("float64") - exact) / unit
    assert 0.45 < error.max() <= 0.51, "at most 0.45: data that needs no rounding proves nothing"


def rounded(exact, bits, least, most):
    """Return a fraction rounded to ``bits`` bits (ties to even) and to a multiple of 2**least, or an infinity if the
    result exceeds ``most``."""
    if exact == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(exact)))
    exponent += (abs(exact) >= Fraction(2) ** (exponent + 1)) - (abs(exact) < Fraction(2) ** exponent)
    place = Fraction(2) ** max(exponent - bits + 1, least)
    number = round(exact / place) * place
    return math.copysign(math.inf, exact) if abs(number) > most else float(number)


HALVES = {"float16": (11, -24, 65504.0), "bfloat16": (8, -133, float.fromhex("0x1.fep127"))}


@pytest.mark.parametrize(("dtype", "isa", "half"), pairs(["int8", "uint16", "int32", "uint32"], SETS, HALVES))
@examples(20)
@given(data=st.data())
def test_the_mean_of_integers_is_a_correctly_rounded_half(isa, dtype, half, data):
    """A mean in float64 is rounded to the half type directly. By way of float32 it would be wrong next to a tie."""
    n = data.draw(st.one_of(st.integers(1, 40), st.just(1000)))
    bounds = np.iinfo(dtype)
    low, high = int(bounds.min), int(bounds.max)
    # Integers halfway between two halves. Float32 may round a nearby mean to such a tie, and so to the wrong half.
    ties = [(1 << 15) + 16, (1 << 15) + 48, (1 << 20) + (1 << 12), (1 << 20) + 3 * (1 << 12), (1 << 24) + (1 << 16)]
    near_ties = st.builds(lambda x, y: x + y, st.sampled_from([0, 1 << 10, *ties, *ties]), st.integers(-3, 3))
    numbers = st.one_of(near_ties, near_ties, st.integers(low, high)).map(lambda x: min(max(x, low), high))
    first = data.draw(numbers)
    near_first = st.integers(-1, 1).map(lambda x: min(max(first + x, low), high))
    others = data.draw(st.lists(st.one_of(near_first, numbers), max_size=3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    xs = rng.choice(np.array([first, *others], dtype), (n, 45))
    xs[1:, ::2] = first  # in every other column all sources but the first are equal
    out = np.zeros(45, storage(half))
    reduction("mean", dtype, "float64", half, n, 45).native(isa).run([list(xs)], [[out]], *PLAIN)
    exact = [Fraction(sum(column), n) for column in xs.T.tolist()]
    assert out.view(oracle.dtype_of(half)).astype("float64").tolist() == [rounded(x, *HALVES[half]) for x in exact]


@pytest.mark.parametrize(("tie", "isa"), pairs([("float16", (1 << 15) + 16), ("bfloat16", (1 << 15) + 128)], SETS))
def test_a_mean_next_to_a_tie_is_rounded_once(isa, tie):
    """A mean that exceeds a tie of a half type by less than float32 can represent is rounded up."""
    half, number = tie
    xs = np.full((1000, 45), number, "int32")
    xs[0] += 1
    out = np.zeros(45, storage(half))
    reduction("mean", "int32", "float64", half, 1000, 45).native(isa).run([list(xs)], [[out]], *PLAIN)
    right = rounded(Fraction(1000 * number + 1, 1000), *HALVES[half])
    assert (out.view(oracle.dtype_of(half)).astype("float64") == right).all()


@every_set
def test_sources_with_three_strided_axes(isa):
    """The elements of a source are read in C order, whatever the strides of its axes are."""
    x = np.arange(480, dtype="float32").reshape(6, 8, 10)[::2, ::2, ::2]
    out = np.zeros(60, "float32")
    reduction("sum", *["float32"] * 3, 2, 60).native(isa).run([[x, x]], [[out]], *PLAIN)
    assert (out == 2 * x.reshape(-1)).all()


@pytest.mark.parametrize(("dtype", "isa", "op"), pairs(strategies.FLOATS, SETS, ["min", "max"]))
def test_nan_propagates_and_the_first_of_equal_numbers_is_returned(isa, dtype, op):
    """The minimum or maximum is NaN if any operand is NaN. Of 0 and -0, it is the first one."""
    made = oracle.dtype_of(dtype)
    columns = [(np.nan, 1), (1, np.nan), (0.0, -0.0), (-0.0, 0.0), (np.inf, np.nan), (-np.inf, 3), (2, np.inf)] * 5
    xs = [np.array(column, made) for column in zip(*columns, strict=True)]
    out = np.zeros(len(columns), storage(dtype))
    case = reduction(op, dtype, dtype, dtype, 2, len(columns))
    case.native(isa).run([[x.view(storage(dtype)) for x in xs]], [[out]], *PLAIN)
    for got, (a, b) in zip(out.view(made).astype(float).tolist(), columns, strict=True):
        if math.isnan(a) or math.isnan(b):
            assert math.isnan(got)
        elif a == b:
            assert (got, math.copysign(1, got)) == (a, math.copysign(1, a))
        else:
            assert got == (min if op == "min" else max)(a, b)


# Overlapping memory


@st.composite
def crowded(draw):
    """Draw a case, and its sources and results as arrays within 512 bytes of memory, which is returned as well."""
    dtype, narrow = draw(st.sampled_from([("float32", "float32"), ("int8", "float32"), ("int16", "float16")]))
    sizes = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 6, 12]), min_size=1, max_size=3)))
    sources, results = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    op = "sum" if dtype == narrow else "mean"
    case = reduction(op, dtype, "float32" if op == "sum" else "float64", narrow, sources, 0, results)
    case = case._replace(sizes=sizes, segments=tuple(Segment(t, 0, size, 0) for t, size in enumerate(sizes)))
    memory, itemsize = np.zeros(512, "uint8"), np.dtype(dtype).itemsize
    offset = st.integers(0, 330) if draw(st.booleans()) else st.integers(0, 10).map(lambda k: 32 * k)

    def source(size):
        at, kind = draw(offset), draw(st.sampled_from(["contiguous", "contiguous", "reversed", "columns"]))
        if kind == "columns" and size % 2 == 0:
            return np.ndarray((2, size // 2), dtype, memory, at, (itemsize * (size // 2 + 3), itemsize))
        return np.ndarray(size, dtype, memory, at)[:: -1 if kind == "reversed" else 1]

    rows = [[source(size) for _ in range(sources)] for size in sizes]
    outs = [[np.ndarray(size, narrow, memory, draw(offset)) for _ in range(results)] for size in sizes]
    for size, (first, *_), out in zip(sizes, rows, outs, strict=True):
        if draw(st.booleans()) and first.flags.c_contiguous:  # rejected if the items of both differ in size
            out[-1] = np.ndarray(size, narrow, memory, first.ctypes.data - memory.ctypes.data)
    return case, rows, outs, memory


@examples(150)
@given(drawn=crowded())
def test_overlapping_results_are_found(drawn):
    """If a result shares memory with another result, or with a source that it does not exactly replace, a run writes
    nothing and returns (tensor, result). A strided source counts as all memory from its first byte to its last."""
    case, rows, outs, memory = drawn
    exact, roughly = set(), set()  # results that share bytes, and those whose ranges of bytes overlap
    for t, r in itertools.product(range(len(outs)), range(case.results)):
        out = outs[t][r]
        others = [x for k, row in enumerate(outs) for j, x in enumerate(row) if (k, j) != (t, r)]
        for k, x in ((k, x) for k, row in enumerate(rows) for x in row):
            replaced = k == t and x.itemsize == out.itemsize and x.ctypes.data == out.ctypes.data
            if not (replaced and x.flags.c_contiguous):
                others.append(x)
        exact |= {(t, r)} if any(np.shares_memory(out, x) for x in others) else set()
        roughly |= {(t, r)} if any(np.may_share_memory(out, x) for x in others) else set()
    sources = [[operand(x, "address" if x.flags.c_contiguous else "array", True) for x in row] for row in rows]
    results = [[x.ctypes.data for x in row] for row in outs]
    for kernel in (case.native(SETS[-1]), case.reference()):
        before = memory.tobytes()
        found = kernel.run(sources, results, *CHECKED)
        if found is None:
            assert not exact
        else:
            assert found in roughly
            assert memory.tobytes() == before


def test_arrays_overlap_if_they_share_a_byte():
    """Adjacent arrays do not overlap. Arrays that share one byte do, in the compiled kernels and in NumPy."""
    case = reduction("sum", "int8", "int8", "int8", 1, 32)
    base = (memory := np.zeros(100, "int8")).ctypes.data
    for kernel in (case.native(SETS[0]), case.reference()):
        # The offsets of the source and of the result, which have 32 bytes each, and what is found.
        for source, result, found in ((0, 32, None), (0, 31, (0, 0)), (32, 0, None), (32, 1, (0, 0))):
            assert kernel.run([[base + source]], [[base + result]], *CHECKED) == found
    assert not memory.any()


def test_a_result_in_the_gaps_of_a_source_is_reported():
    """The gaps of a strided source count as its memory, in the compiled kernels and in NumPy."""
    whole = np.zeros((10, 100), "float32")
    case = reduction("sum", *FLOAT32, 1, 20)
    for kernel in (case.native(SETS[0]), case.reference()):
        assert kernel.run([[whole[:, :2]]], [[whole.reshape(-1)[310:330]]], *CHECKED) == (0, 0)
