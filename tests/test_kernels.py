"""The kernels: the compiled ones and the same in NumPy give the same bits, and both the right ones."""

import ctypes
import itertools
import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import strategies
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crossreduce import ArgumentError, BackendError, ReduceOp, kernels
from crossreduce.kernels import Program, Segment, reference
from crossreduce.ops import ACCUMULATORS, INTEGERS

NATIVE = kernels.native()
# Where nothing was compiled one set is left, so that its tests fail and none is left out.
SETS = tuple(NATIVE.supported()) if NATIVE else ("baseline",)
every_set = pytest.mark.parametrize("isa", SETS)

GUARD = 64  # bytes before and after a result that must stay as they are
POISON = 0xA5


def _numbers():
    """Yield op, dtype, accumulator and result of every reduction that some backend's ``numbers`` names."""
    for dtype in strategies.DTYPES:
        for op in strategies.ops_for(dtype):
            if op == "mean" and dtype in INTEGERS:
                # A backend without float64 accumulates in float32; the result is what its true division gives.
                for wide, narrow in itertools.product(("float64", "float32"), strategies.FLOATS):
                    yield op, dtype, wide, narrow
            else:
                yield op, dtype, ACCUMULATORS[ReduceOp(op), dtype], dtype


NUMBERS = tuple(_numbers())


class Case(NamedTuple):
    """What a plan is made of, as ``kernels.plan`` takes it."""

    op: str
    numbers: tuple[str, str, str, int]
    sources: int
    results: int
    sizes: tuple[int, ...]
    programs: tuple[Program, ...]
    segments: tuple[Segment, ...]

    def native(self, isa):
        op, numbers, *rest = self
        return NATIVE.Plan(isa, op, *numbers, *rest)

    def reference(self):
        op, numbers, *rest = self
        return reference.Plan(op, *numbers, *rest)


def simple(name, dtype, wide, narrow, n, size, results=1):
    """Return the case that combines ``n`` sources of one tensor from the left."""
    numbers = dtype, wide, narrow, n if name == "mean" else 1
    fold = Program(1, ((0, *range(n)),), (~0,) * results)
    return Case("sum" if name == "mean" else name, numbers, n, results, (size,), (fold,), (Segment(0, 0, size, 0),))


@st.composite
def programs(draw, sources, results):
    """Draw a program that reads no slot before something is in it."""
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
    return Program(slots, tuple(folds), tuple(draw(known) for _ in range(results)))


@st.composite
def cases(draw):
    """Draw a batch: several tensors, cut into segments that leave parts out, each with one of several programs."""
    name, dtype, wide, narrow = draw(st.sampled_from(NUMBERS))
    sources = draw(st.one_of(st.integers(1, 5), st.integers(1, 40)))
    results = draw(st.integers(1, 4))
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
    return Case(op, (dtype, wide, narrow, divisor), sources, results, sizes, drawn, shuffled)


# Memory


def storage(dtype):
    """Return the dtype whose buffers hold a dtype's elements: no buffer can name bfloat16."""
    return np.dtype(np.uint16) if dtype == "bfloat16" else oracle.dtype_of(dtype)


def block(nbytes, offset=0):
    """Return new poisoned bytes, and ``nbytes`` of them that begin ``offset`` bytes after a multiple of 64."""
    whole = np.full(nbytes + offset + 2 * GUARD + 64, POISON, np.uint8)
    whole = whole[-whole.ctypes.data % 64 :][: GUARD + offset + nbytes + GUARD]
    return whole, whole[GUARD + offset :][:nbytes]


def view(part, dtype):
    """Return bytes as the elements of a dtype, aligned or not."""
    kind = storage(dtype)
    return np.ndarray((part.size // kind.itemsize,), kind, part.data)


BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}  # of the mantissa


def specials(dtype):
    """Return numbers at which arithmetic changes, as bits: zeros, subnormals, infinities, NaNs with payloads."""
    nbytes = oracle.dtype_of(dtype).itemsize
    bits, sign = BITS[dtype], 1 << (8 * nbytes - 1)
    infinite = sign - (1 << bits)
    one = infinite // 2 - infinite // 2 % (1 << bits)
    quiet = infinite | 1 << (bits - 1)
    positive = [0, 1, 2, (1 << bits) - 1, 1 << bits, one - 1, one, one + 1, one + 2, infinite - 1, infinite]
    positive += [
        infinite + 1,
        quiet - 1,
        quiet,
        quiet + 1,
        sign - 1,
        quiet | 5 << (bits - 4),
        infinite | 3 << (bits - 4),
    ]
    return np.array([*positive, *(x | sign for x in positive)], f"u{nbytes}")


def elements(rng, dtype, size, kind):
    """Return ``size`` elements in their storage: any bytes, numbers of usual size, or special ones."""
    made = storage(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, size).astype(made)
    if kind == "bytes" or (dtype in INTEGERS and kind == "numbers"):
        return np.frombuffer(rng.bytes(size * made.itemsize), made)
    if dtype in INTEGERS:
        bounds = np.iinfo(made)
        few = np.array([0, 1, 2, bounds.min, bounds.max, bounds.min + 1, bounds.max - 1], made)
        return few[rng.integers(0, few.size, size)]
    part, count = (f"float{made.itemsize * 4}", 2 * size) if dtype in strategies.COMPLEX else (dtype, size)
    if kind == "special":
        few = specials(part)
        return few[rng.integers(0, few.size, count)].view(made)
    with np.errstate(over="ignore"):
        return (rng.normal(size=count) * 10.0 ** rng.integers(-3, 4)).astype(oracle.dtype_of(part)).view(made)


LAYOUTS = ("array", "bytes", "address", "transposed", "reversed", "stepped", "repeated", "sliced", "moved axes")
DENSE = LAYOUTS[:3]


def laid_out(rng, data, layout, offset):
    """Return an array of the dtype and size of ``data``, in memory as ``layout`` says; elements may differ from it."""
    if layout in DENSE:
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
    if layout == "sliced":
        return np.concatenate([data.reshape(shape)] * 2, axis=1)[:, size // rows :]
    half = 2 if shape[1] % 2 == 0 else 1
    return np.moveaxis(data.reshape(half, shape[1] // half, rows), 0, 2)


def operand(array, layout, as_tuple):
    """Return what stands for an array in a run."""
    if layout == "bytes":
        return memoryview(array).cast("B") if array.size else b""
    if layout == "address":
        return array.ctypes.data
    if as_tuple and array.ndim:
        return array.ctypes.data, array.shape, array.strides
    return array


class How(NamedTuple):
    """How a batch lies in memory and is run."""

    seed: int
    kind: str
    layouts: tuple[str, ...]
    tuples: bool
    offsets: tuple[int, ...]
    in_place: tuple[tuple[int, int], ...]  # (result, source)
    threads: int
    streaming: bool
    apart: bool


def hows(layouts=LAYOUTS, in_place=False):
    pairs = st.tuples(st.integers(0, 3), st.integers(0, 6))
    some = st.lists(pairs, min_size=1, max_size=3, unique_by=(lambda pair: pair[0], lambda pair: pair[1]))
    return st.builds(
        How,
        seed=st.integers(0, 2**32 - 1),
        kind=st.sampled_from(["bytes", "numbers", "special"]),
        layouts=st.lists(st.sampled_from(layouts), min_size=1, max_size=3).map(tuple),
        tuples=st.booleans(),
        offsets=st.lists(st.integers(0, 64), min_size=1, max_size=5).map(tuple),
        in_place=some.map(tuple) if in_place else st.just(()),
        threads=st.integers(1, 3),
        streaming=st.booleans(),
        apart=st.booleans(),
    )


class Batch(NamedTuple):
    """A case's operands; the memory around each result, which is checked as a whole; what addresses point into."""

    sources: list[list[Any]]
    results: list[list[Any]]
    blocks: list[tuple[Any, Any]]
    held: list[Any]


def batch(case, how):
    """Lay a case's arrays out; twice the same for the same arguments."""
    rng = np.random.default_rng(how.seed)
    dtype, _, result, _ = case.numbers
    kind = storage(result)
    sources, results, blocks, held = [], [], [], []
    for tensor, size in enumerate(case.sizes):
        row, out, places = [], [], {}
        for k in range(case.sources):
            data = elements(rng, dtype, size, how.kind)
            layout = how.layouts[(k + tensor) % len(how.layouts)]
            offset = how.offsets[k % len(how.offsets)]
            if k in {source for _, source in how.in_place}:
                whole, part = block(data.nbytes, offset)
                part[...] = data.view(np.uint8)
                places[k] = whole, part
                array, layout = view(part, dtype), DENSE[k % 3]
            else:
                array = laid_out(rng, data, layout, offset)
            row.append(operand(array, layout, how.tuples))
            held.append(array)
        for r in range(case.results):
            source = dict(how.in_place).get(r)
            if source in places:
                whole, part = places[source]
            else:
                whole, part = block(size * kind.itemsize, how.offsets[(case.sources + r) % len(how.offsets)])
            out.append(operand(view(part, result), DENSE[r % 3], False) if size else bytearray())
            blocks.append((whole, part))
        sources.append(row)
        results.append(out)
    return Batch(sources, results, blocks, held)


def plain(case, given):
    """Return a batch's sources as arrays of their own in C order."""
    kind = storage(case.numbers[0])

    def copied(source, size):
        if size == 0:
            return np.empty(0, kind)
        if isinstance(source, int):
            source = (ctypes.c_char * (size * kind.itemsize)).from_address(source)
        if isinstance(source, tuple):
            address, shape, strides = source
            low = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True) if stride < 0)
            high = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True) if stride > 0)
            memory = (ctypes.c_char * (high - low + kind.itemsize)).from_address(address + low)
            source = np.ndarray(shape, kind, memory, -low, strides)
        elif not isinstance(source, np.ndarray):
            source = np.frombuffer(source, kind)
        return np.array(source, order="C").reshape(-1)

    return [[copied(source, size) for source in row] for row, size in zip(given.sources, case.sizes, strict=True)]


def wanted(case, how):
    """Return the bytes around each result as the kernels in NumPy leave them, from copies of the sources."""
    given = batch(case, how)
    results = case.numbers[2]
    outs = [np.array(view(part, results)) for _, part in given.blocks]
    rows = [outs[k : k + case.results] for k in range(0, len(outs), case.results)]
    case.reference().run(plain(case, given), rows, 1, False, False)
    for (_, part), out in zip(given.blocks, outs, strict=True):
        part[...] = out.view(np.uint8)
    return contents(case, given)


def contents(case, given):
    """Return the bytes around each result.

    Where several NaNs meet in a complex product any of their payloads may come out; here they are all made one.
    """
    if case.op == "product" and case.numbers[2] in strategies.COMPLEX:
        for _, part in given.blocks:
            array = view(part, case.numbers[2])
            numbers = np.array(array)
            parts = numbers.view(f"f{numbers.itemsize // 2}")
            parts[parts != parts] = np.nan
            array[...] = numbers
    return [whole.tobytes() for whole, _ in given.blocks]


def check(case, how, plan):
    """A plan leaves the bytes that are wanted, inside of the results and around them."""
    given = batch(case, how)
    assert plan.run(given.sources, given.results, how.threads, how.streaming, how.apart) is None
    for number, (got, right) in enumerate(zip(contents(case, given), wanted(case, how), strict=True)):
        if got != right:
            tensor, result = divmod(number, case.results)
            array, due = np.frombuffer(got, np.uint8), np.frombuffer(right, np.uint8)
            whole, part = given.blocks[number]
            offsets = np.flatnonzero(array != due) - (part.ctypes.data - whole.ctypes.data)
            places = np.unique(offsets // storage(case.numbers[2]).itemsize)
            raise AssertionError(f"tensor {tensor}, result {result}: {places.size} elements differ, first {places[:5]}")


def test_the_extension_was_built():
    """A test that ran on NumPy alone has shown nothing about the compiled kernels."""
    assert NATIVE is not None, "the extension must be built for the tests: python setup.py build_ext --inplace"
    assert NATIVE.supported()[-1] == "baseline"


@every_set
@settings(max_examples=60)
@given(case=cases(), how=hows())
def test_compiled_kernels_give_the_bits_of_the_reference(isa, case, how):
    """Any program over any arrays wherever they lie: the same bits, and no byte beside the results is written."""
    check(case, how, case.native(isa))


@settings(max_examples=60)
@given(case=cases(), how=hows())
def test_the_reference_reads_operands_where_they_lie(case, how):
    """The kernels in NumPy give the same bits from strided arrays and addresses as from copies of them."""
    check(case, how, case.reference())


SWAP = Program(0, (), (1, 0))
TWO = Program(2, ((0, 0, 1), (1, 1, ~0)), (~0, ~1))
SWAPPED = Case("sum", ("float64", "float64", "float64", 1), 2, 2, (100,), (SWAP,), (Segment(0, 0, 100, 0),))
APART = Case("sum", ("float32", "float32", "float32", 1), 2, 2, (100,), (TWO,), (Segment(0, 0, 100, 0),))
DIVIDED = APART._replace(numbers=("float32", "float32", "float32", 3))
PLAIN = How(0, "numbers", ("array",), False, (0,), (), 1, False, False)


@every_set
@settings(max_examples=50)
@given(case=cases(), how=hows(in_place=True))
@example(case=SWAPPED, how=PLAIN._replace(in_place=((0, 0), (1, 1))))
@example(case=APART, how=PLAIN._replace(in_place=((1, 1),)))
def test_a_result_may_be_a_source_of_its_tensor(isa, case, how):
    """In place the bits are those of results with memory of their own, in the compiled kernels and in NumPy."""
    used = range(case.sources), range(case.results)
    pairs = tuple((r, s) for r, s in how.in_place if s in used[0] and r in used[1])
    if storage(case.numbers[0]).itemsize != storage(case.numbers[2]).itemsize:
        pairs = ()  # such a result can be no source
    check(case, how._replace(in_place=pairs), case.native(isa))
    check(case, how._replace(in_place=pairs), case.reference())


@every_set
@pytest.mark.parametrize("case", [APART, DIVIDED], ids=["added", "divided"])
@pytest.mark.parametrize("wanted", [(~1, ~0), (~0, ~1), (0, ~1), (~1, 0), (0, ~0), (1, 0)])
def test_results_may_be_different_values_in_any_order(isa, case, wanted):
    """Each result is the value that its program names, whichever the last fold made."""
    case = case._replace(programs=(TWO._replace(results=wanted),))
    a, b = np.arange(100, dtype="float32"), np.arange(100, 200, dtype="float32")
    outs = [np.zeros(100, "float32") for _ in wanted]
    case.native(isa).run([[a, b]], [outs], 1, False, False)
    for out, operand in zip(outs, wanted, strict=True):
        whole = {0: a, 1: b, ~0: a + b, ~1: b + (a + b)}[operand]
        assert (out == whole / np.float32(case.numbers[3])).all()


@every_set
@pytest.mark.parametrize("numbers", NUMBERS, ids="-".join)
def test_every_op_on_every_dtype(isa, numbers):
    """No pair of op and dtypes is left out of the table, in the middle of lines and at both their ends."""
    for n, size, kind in ((1, 3, "special"), (2, 333, "special"), (3, 1000, "bytes"), (18, 333, "special")):
        case = simple(*numbers, n, size, results=2)
        check(case, PLAIN._replace(seed=n, kind=kind, offsets=(1, 8)), case.native(isa))


@every_set
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "numbers",
    [
        ("product", *["complex128"] * 3),
        ("product", *["complex64"] * 3),
        ("mean", *["float64"] * 3),
        ("sum", "bfloat16", "float32", "bfloat16"),
        ("mean", "int8", "float64", "float16"),
        ("max", *["uint8"] * 3),
    ],
    ids="-".join,
)
def test_every_alignment(isa, numbers, streaming):
    """Wherever results begin, lines past the cache begin with a whole element, and sources lie anywhere beside them."""
    size = 17_000 // oracle.dtype_of(numbers[1]).itemsize  # enough that the wish to go past the cache is heard
    case = simple(*numbers, 2, size, results=2)._replace(segments=(Segment(0, 1, size, 0),))
    for offset in range(65):
        offsets = offset * 7 % 65, offset * 11 % 65, offset, offset if offset % 3 else offset + 16
        check(case, PLAIN._replace(seed=offset, offsets=offsets, streaming=streaming), case.native(isa))


@every_set
@pytest.mark.parametrize(
    "numbers",
    [
        ("mean", "float16", "float32", "float16"),
        ("sum", *["complex128"] * 3),
        ("mean", "int8", "float64", "float32"),
        ("max", *["bfloat16"] * 3),
    ],
    ids="-".join,
)
def test_large_arrays_go_past_the_cache_on_several_threads(isa, numbers):
    """Shares of a thread, lines past the cache and what is left beside them meet without a gap."""
    case = simple(*numbers, 3, 300_007, results=3)._replace(segments=(Segment(0, 5, 300_000, 0),))
    for offsets in ((0,), (2, 64, 16), (1, 3)):
        check(case, PLAIN._replace(kind="bytes", offsets=offsets, threads=3, streaming=True), case.native(isa))


def test_the_backends_numbers_are_known(framework):
    """Whatever a backend's ``numbers`` names, there are kernels for it, and the laws here were tried on it."""
    from crossreduce import UnsupportedError
    from crossreduce.frameworks import get

    backend = get(framework.name)
    for dtype in strategies.DTYPES:
        for op in strategies.ops_for(dtype):
            try:
                named = backend.numbers(ReduceOp(op), dtype, 2)
            except UnsupportedError:
                continue
            assert (op, *named[:3]) in NUMBERS
            for isa in SETS:
                simple(op, *named[:3], 2, 4).native(isa)


# Against plain arithmetic, which shares no code with either


@every_set
@pytest.mark.parametrize("dtype", strategies.DTYPES)
@settings(max_examples=5)
@given(data=st.data())
def test_reductions_are_right(isa, dtype, data):
    """A bare Python loop over exact numbers gives the same: integers to the bit, floats as rounding allows."""
    n, size = data.draw(st.integers(1, 24)), data.draw(st.integers(0, 90))
    xs = data.draw(strategies.arrays(dtype, (size,), n))
    for op in strategies.ops_for(dtype):
        result = "float64" if op == "mean" and dtype in INTEGERS else dtype
        out = np.zeros(size, storage(result))
        plan = simple(op, dtype, ACCUMULATORS[ReduceOp(op), dtype], result, n, size).native(isa)
        plan.run([[np.array(x).view(storage(dtype)) for x in xs]], [[out]], 2, True, True)
        oracle.check(out.view(oracle.dtype_of(result)), op, xs)


def spaced(x, dtype):
    """Return the distance of a dtype's numbers at each ``x``, subnormals included."""
    bits, least = {"float16": (10, -14), "bfloat16": (7, -126)}[dtype]
    return np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-300))), least) - bits)


@every_set
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_halves_are_rounded_once(isa, dtype, n, op):
    """Of up to 8 halves that look like gradients the sum is off by no more than rounding it once: 0.51 places, not 0.5,
    since additions in float32 may lose what is 2**-24 of a term."""
    rng = np.random.default_rng(n)
    layers = np.exp2(rng.uniform(-18, -2, 50_000))
    xs = [(rng.normal(size=layers.size) * layers).astype(oracle.dtype_of(dtype)) for _ in range(n)]
    exact = sum(x.astype("float64") for x in xs) / (n if op == "mean" else 1)
    out = np.zeros(layers.size, np.uint16)
    simple(op, dtype, "float32", dtype, n, layers.size).native(isa).run(
        [[x.view(np.uint16) for x in xs]], [[out]], 1, False, False
    )
    off = np.abs(out.view(oracle.dtype_of(dtype)).astype("float64") - exact) / spaced(exact, dtype)
    assert off.max() <= 0.51
    assert off.max() > 0.45, "data that needs no rounding shows nothing"


def rounded(exact, bits, least, most):
    """Return a fraction as the nearest number of ``bits`` bits, ties to even, spaced 2**least at least."""
    if exact == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(exact)))
    exponent += (abs(exact) >= Fraction(2) ** (exponent + 1)) - (abs(exact) < Fraction(2) ** exponent)
    place = Fraction(2) ** max(exponent - bits + 1, least)
    number = round(exact / place) * place
    return math.copysign(math.inf, exact) if abs(number) > most else float(number)


HALVES = {"float16": (11, -24, 65504.0), "bfloat16": (8, -133, float.fromhex("0x1.fep127"))}


@every_set
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("half", HALVES)
@settings(max_examples=20)
@given(data=st.data())
def test_the_mean_of_integers_is_a_correctly_rounded_half(isa, dtype, half, data):
    """Rounding a float64 to a half by way of float32 would round twice; what is nearly a tie shows it."""
    n = data.draw(st.one_of(st.integers(1, 40), st.just(1000)))
    bounds = np.iinfo(dtype)
    # Halfway between two halves, where a mean that is off by less than 1 is a float32 that is not.
    ties = [(1 << 15) + 16, (1 << 15) + 48, (1 << 20) + (1 << 12), (1 << 20) + 3 * (1 << 12), (1 << 24) + (1 << 16)]
    near = st.builds(lambda x, y: x + y, st.sampled_from([0, 1 << 10, *ties, *ties]), st.integers(-3, 3))
    number = st.one_of(near, near, st.integers(int(bounds.min), int(bounds.max))).map(
        lambda x: min(max(x, int(bounds.min)), int(bounds.max))
    )
    first = data.draw(number)
    number = st.one_of(st.integers(-1, 1).map(lambda x: min(max(first + x, int(bounds.min)), int(bounds.max))), number)
    few = data.draw(st.lists(number, max_size=3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    xs = rng.choice(np.array([first, *few], dtype), (n, 45))
    xs[1:, ::2] = first  # all but one the same
    out = np.zeros(45, storage(half))
    simple("mean", dtype, "float64", half, n, 45).native(isa).run([list(xs)], [[out]], 1, False, False)
    exact = [Fraction(sum(column), n) for column in xs.T.tolist()]
    assert out.view(oracle.dtype_of(half)).astype("float64").tolist() == [rounded(x, *HALVES[half]) for x in exact]


@every_set
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_wins_and_of_equal_numbers_the_first(isa, dtype, op):
    """The least or greatest is NaN where any is; of 0 and -0 it is the one that came first."""
    made = oracle.dtype_of(dtype)
    columns = [(np.nan, 1), (1, np.nan), (0.0, -0.0), (-0.0, 0.0), (np.inf, np.nan), (-np.inf, 3), (2, np.inf)] * 5
    xs = [np.array(column, made) for column in zip(*columns, strict=True)]
    out = np.zeros(len(columns), storage(dtype))
    case = simple(op, dtype, dtype, dtype, 2, len(columns))
    case.native(isa).run([[x.view(storage(dtype)) for x in xs]], [[out]], 1, False, False)
    for got, (a, b) in zip(out.view(made).astype(float).tolist(), columns, strict=True):
        if a != a or b != b:
            assert got != got
        elif a == b:
            assert (got, math.copysign(1, got)) == (a, math.copysign(1, a))
        else:
            assert got == (min if op == "min" else max)(a, b)


# What lies where


def taken(operand, size, itemsize):
    """Return the addresses of the bytes of an operand, and those from its first to its last."""
    if not size:
        return set(), set()
    address, shape, strides = operand if isinstance(operand, tuple) else (operand, (size,), (itemsize,))
    starts = {address}
    for n, stride in zip(shape, strides, strict=True):
        starts = {start + k * stride for start in starts for k in range(n)}
    exact = {start + k for start in starts for k in range(itemsize)}
    return exact, set(range(min(exact), max(exact) + 1))


def begins(operand, itemsize):
    """Return where an operand begins that is one run of memory in C order, else ``None``."""
    if not isinstance(operand, tuple):
        return operand
    address, shape, strides = operand
    runs = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return address if all(n == 1 or a == b for n, a, b in zip(shape, strides, runs, strict=True)) else None


@st.composite
def crowded(draw):
    """Draw a case whose operands lie in 400 bytes of memory, at offsets."""
    dtype, narrow = draw(st.sampled_from([("float32", "float32"), ("int8", "float32"), ("int16", "float16")]))
    sizes = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 6, 12]), min_size=1, max_size=3)))
    sources, results = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    name = "sum" if dtype == narrow else "mean"
    case = simple(name, dtype, "float32" if name == "sum" else "float64", narrow, sources, 0, results)
    case = case._replace(sizes=sizes, segments=tuple(Segment(t, 0, size, 0) for t, size in enumerate(sizes)))
    itemsize = oracle.dtype_of(dtype).itemsize
    spot = st.integers(0, 330) if draw(st.booleans()) else st.integers(0, 10).map(lambda k: 32 * k)

    def source(size):
        at = draw(spot)
        steps = [(size,), (2, size // 2)][size % 2 == 0 and draw(st.booleans())]
        kind = draw(st.sampled_from(["dense", "dense", "reversed", "columns"]))
        if kind == "reversed" and size:
            return at + itemsize * (size - 1), (size,), (-itemsize,)
        if kind == "columns" and len(steps) == 2:
            return at, steps, (itemsize * (size // 2 + 3), itemsize)
        return at

    given = [[source(size) for _ in range(sources)] for size in sizes]
    outs = [[draw(spot) for _ in range(results)] for _ in sizes]
    for row, out in zip(given, outs, strict=True):
        if draw(st.booleans()) and isinstance(row[0], int):
            out[-1] = row[0]  # in place, where both are of one size
    return case, given, outs


@settings(max_examples=150)
@given(drawn=crowded())
@pytest.mark.parametrize("isa", SETS[-1:])
def test_what_is_not_apart_is_found(isa, drawn):
    """``apart`` names a result that shares memory with another, or with a source that it is not; nothing is written."""
    case, given, outs = drawn
    dtype, _, result, _ = case.numbers
    sizes = oracle.dtype_of(dtype).itemsize, oracle.dtype_of(result).itemsize
    exact, roughly = set(), set()
    places = [(t, r, *taken(out, case.sizes[t], sizes[1])) for t, row in enumerate(outs) for r, out in enumerate(row)]
    for t, r, own, _ in places:
        others = [place for k, x, place, _ in places if (k, x) != (t, r)]
        spans = list(others)
        for k, row in enumerate(given):
            for source in row:
                if k == t and sizes[0] == sizes[1] and begins(source, sizes[0]) == outs[t][r]:
                    continue
                found = taken(source, case.sizes[k], sizes[0])
                others.append(found[0])
                spans.append(found[1])
        if any(own & other for other in others):
            exact.add((t, r))
        if any(own & other for other in spans):
            roughly.add((t, r))
    for plan, due, never in ((case.native(isa), exact, not roughly), (case.reference(), exact, not exact)):
        whole, part = block(512)
        base = part.ctypes.data
        before = whole.tobytes()
        moved = [[(x[0] + base, *x[1:]) if isinstance(x, tuple) else x + base for x in row] for row in given]
        found = plan.run(moved, [[x + base for x in row] for row in outs], 1, False, True)
        if found is None:
            assert not due
        else:
            assert not never
            assert found in roughly
            assert whole.tobytes() == before


@every_set
def test_a_result_apart_in_the_gaps_of_a_source_may_be_named(isa):
    """Whether a strided source is met is told from its first and last byte: what lies between is not looked at."""
    whole = np.zeros((10, 100), "float32")
    case = simple("sum", "float32", "float32", "float32", 1, 100)
    assert case.native(isa).run([[whole[:, :10]]], [[whole.reshape(-1)[300:400]]], 1, False, True) == (0, 0)


# What is refused


GOOD = {
    "op": "sum",
    "dtype": "float32",
    "accumulator": "float32",
    "result": "float32",
    "divisor": 1,
    "sources": 2,
    "results": 1,
    "sizes": (8,),
    "programs": ((1, ((0, 0, 1),), (~0,)),),
    "segments": ((0, 0, 8, 0),),
}
WRONG = {
    "op": {"op": "average"},
    "mean": {"op": "mean"},
    "dtype": {"dtype": "float8"},
    "accumulator": {"accumulator": "object"},
    "result": {"result": "str"},
    "sum of bools": {"dtype": "bool", "accumulator": "bool", "result": "bool"},
    "least complex": {"op": "min", "dtype": "complex64", "accumulator": "complex64", "result": "complex64"},
    "sum in halves": {"dtype": "float16", "accumulator": "float16", "result": "float16"},
    "narrower accumulator": {"dtype": "float64", "accumulator": "int8", "result": "float64"},
    "result of another kind": {"dtype": "int8", "accumulator": "int8", "result": "complex64"},
    "divided integers": {"dtype": "int32", "accumulator": "int32", "result": "int32", "divisor": 2},
    "no number": {"divisor": "2"},
    "no sources": {"sources": 0},
    "no results": {"results": 0, "programs": ((1, ((0, 0, 1),), ()),)},
    "sources below 0": {"sources": -1},
    "sizes": {"sizes": 8},
    "size below 0": {"sizes": (-1,), "segments": ()},
    "size that no memory has": {"sizes": (1 << 62,), "segments": ((0, 0, 1 << 62, 0),)},
    "programs": {"programs": 3},
    "program of two": {"programs": ((1, ((0, 0, 1),)),)},
    "source out of range": {"programs": ((1, ((0, 0, 2),), (~0,)),)},
    "source beyond 32 bits": {"programs": ((1, ((0, 0, 1 << 32),), (~0,)),)},
    "source beyond 64 bits": {"programs": ((1, ((0, 0, 1 << 64),), (~0,)),)},
    "slot out of range": {"programs": ((1, ((0, 0, 1), (0, ~0, ~1)), (~0,)),)},
    "slot that is not there": {"programs": ((1, ((1, 0, 1),), (~0,)),)},
    "slot below 0": {"programs": ((1, ((-1, 0, 1),), (0,)),)},
    "slots below 0": {"programs": ((-1, (), (0,)),)},
    "too many slots": {"programs": ((1 << 20, ((0, 0, 1),), (~0,)),)},
    "slots beyond 32 bits": {"programs": (((1 << 32) + 1, ((0, 0, 1),), (~0,)),)},
    "empty fold": {"programs": ((1, ((),), (0,)),)},
    "fold of nothing": {"programs": ((1, ((0,),), (~0,)),)},
    "overwritten operand": {"programs": ((1, ((0, 0, 1), (0, 1, ~0)), (~0,)),)},
    "slot read before it is written": {"programs": ((2, ((0, 0, ~1),), (~0,)),)},
    "result that nothing wrote": {"programs": ((2, ((0, 0, 1),), (~1,)),)},
    "result out of range": {"programs": ((1, ((0, 0, 1),), (2,)),)},
    "result of no slot": {"programs": ((1, ((0, 0, 1),), (~1,)),)},
    "too few results": {"programs": ((1, ((0, 0, 1),), ()),)},
    "too many results": {"programs": ((1, ((0, 0, 1),), (~0, ~0)),)},
    "text in a fold": {"programs": ((1, ((0, 0, "1"),), (~0,)),)},
    "segment of three": {"segments": ((0, 0, 8),)},
    "segment of five": {"segments": ((0, 0, 8, 0, 0),)},
    "segment of another tensor": {"segments": ((1, 0, 8, 0),)},
    "segment of tensor -1": {"segments": ((-1, 0, 8, 0),)},
    "segment of another program": {"segments": ((0, 0, 8, 1),)},
    "segment of program -1": {"segments": ((0, 0, 8, -1),)},
    "segment of a program beyond 32 bits": {"segments": ((0, 0, 8, 1 << 32),)},
    "segment that begins before the tensor": {"segments": ((0, -1, 8, 0),)},
    "segment that goes beyond the tensor": {"segments": ((0, 0, 9, 0),)},
    "segment that goes backwards": {"segments": ((0, 4, 3, 0),)},
}


@every_set
@pytest.mark.parametrize("name", WRONG)
def test_malformed_plans_are_refused(isa, name):
    """A plan that could read or write where it must not is not made."""
    NATIVE.Plan(isa, *GOOD.values())
    with pytest.raises((ValueError, TypeError, OverflowError)):
        NATIVE.Plan(isa, *{**GOOD, **WRONG[name]}.values())


def test_an_unknown_set_is_refused():
    """The name of the instruction set is checked, and the error says which names were given."""
    with pytest.raises(ValueError, match=r"unknown to the kernels: one of sse9, sum, float32, float32, float32"):
        NATIVE.Plan("sse9", *GOOD.values())
    with pytest.raises(TypeError):
        NATIVE.Plan(SETS[0])


def test_a_sequence_that_lies_about_its_length_is_refused():
    """Lengths that no memory holds are an error, not the end of the process."""
    code = "from crossreduce.kernels import native; native().Plan({!r}, *{!r}, range(1 << 62), (), ())"
    good = list(GOOD.values())[:7]
    done = run_python(code.format(SETS[-1], good))
    assert done.returncode == 1, f"ended with {done.returncode}"
    assert done.stderr.splitlines()[-1].startswith(("MemoryError", "ValueError", "OverflowError"))


X = np.arange(8, dtype="float32")
TALL = np.zeros((8, 2), "float32")


def frozen():
    array = np.zeros(8, "float32")
    array.flags.writeable = False
    return array


SPOILED = {
    "no tensors": lambda a, out: ([], []),
    "no sources": lambda a, out: ([[]], [[out]]),
    "too few sources": lambda a, out: ([[a]], [[out]]),
    "too many sources": lambda a, out: ([[a, a, a]], [[out]]),
    "too few results": lambda a, out: ([[a, a]], [[]]),
    "too many results": lambda a, out: ([[a, a]], [[out, np.zeros_like(out)]]),
    "too many tensors": lambda a, out: ([[a, a]] * 2, [[out], [np.zeros_like(out)]]),
    "more sources than results": lambda a, out: ([[a, a]] * 2, [[out]]),
    "a source of another size": lambda a, out: ([[a, a[:7]]], [[out]]),
    "a source of another itemsize": lambda a, out: ([[a, a.astype("float64")]], [[out]]),
    "a strided source of another size": lambda a, out: ([[a, TALL[:7, 0]]], [[out]]),
    "a result of another size": lambda a, out: ([[a, a]], [[np.zeros(9, "float32")]]),
    "None": lambda a, out: ([[a, None]], [[out]]),
    "a list": lambda a, out: ([[a, [1.0] * 8]], [[out]]),
    "a float": lambda a, out: ([[a, 1.0]], [[out]]),
    "text": lambda a, out: ([[a, "x" * 32]], [[out]]),
    "None for sources": lambda a, out: ([None], [[out]]),
    "None for results": lambda a, out: ([[a, a]], None),
    "no result": lambda a, out: ([[a, a]], [[None]]),
    "a tuple as result": lambda a, out: ([[a, a]], [[(out.ctypes.data, (8,), (4,))]]),
    "a read-only result": lambda a, out: ([[a, a]], [[bytes(32)]]),
    "a read-only array": lambda a, out: ([[a, a]], [[frozen()]]),
    "a strided result": lambda a, out: ([[a, a]], [[TALL[:, 0]]]),
    "an address that is none": lambda a, out: ([[a, 1 << 80]], [[out]]),
    "a pair": lambda a, out: ([[a, (a.ctypes.data, (8,))]], [[out]]),
    "axes that do not fit": lambda a, out: ([[a, (a.ctypes.data, (2, 4), (4,))]], [[out]]),
    "a shape of another size": lambda a, out: ([[a, (a.ctypes.data, (2, 3), (12, 4))]], [[out]]),
    "a shape below 0": lambda a, out: ([[a, (a.ctypes.data, (-2, -4), (16, 4))]], [[out]]),
    "a shape that wraps round": lambda a, out: ([[a, (a.ctypes.data, (1 << 62, 4, 8, 1 << 62), (0,) * 4)]], [[out]]),
    "too many axes": lambda a, out: ([[a, (a.ctypes.data, (8, *[1] * 64), (4, *[4] * 64))]], [[out]]),
    "text in a shape": lambda a, out: ([[a, (a.ctypes.data, ("8",), (4,))]], [[out]]),
    "an array as address": lambda a, out: ([[a, (a, (8,), (4,))]], [[out]]),
}


@every_set
@pytest.mark.parametrize("name", SPOILED)
def test_malformed_operands_are_refused_and_nothing_is_written(isa, name):
    """Everything that a run is given is looked at before the first byte is written."""
    out = np.full(8, 7, "float32")
    sources, results = SPOILED[name](X.copy(), out)
    with pytest.raises((ValueError, TypeError, BufferError, OverflowError)):
        NATIVE.Plan(isa, *GOOD.values()).run(sources, results, 1, False, False)
    assert out.tolist() == [7.0] * 8


@pytest.mark.parametrize("threads", [0, -1, -(1 << 31), "2", None, 1.5, 1 << 40])
def test_a_count_of_threads_is_positive(threads):
    """No thread at all would divide by zero: an error instead."""
    code = f"""
import numpy as np
from crossreduce.kernels import native
plan = native().Plan({SETS[-1]!r}, *{[*GOOD.values()][:7]!r}, (1 << 20,), {GOOD["programs"]!r}, ((0, 0, 1 << 20, 0),))
a, out = np.ones(1 << 20, "float32"), np.zeros(1 << 20, "float32")
try:
    plan.run([[a, a]], [[out]], {threads!r}, False, False)
except (ValueError, TypeError, OverflowError):
    assert not out.any()
else:
    raise SystemExit("accepted")
"""
    done = run_python(code)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"


# The environment


def run_python(code, **environment):
    """Run a program in a fresh process, in which only these variables of ours are set."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("CROSSREDUCE_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, check=False, env={**kept, **environment},
    )  # fmt: skip


def test_threads_count_the_cpus_of_the_process(monkeypatch):
    """Where nothing is said, each CPU that the process may use is one thread."""
    monkeypatch.delenv("CROSSREDUCE_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert kernels.threads() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 7})
    assert kernels.threads() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert kernels.threads() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert kernels.threads() == 1


@pytest.mark.parametrize(
    ("own", "openmp", "wanted"),
    [
        ("2", None, 2),
        ("64", None, 64),
        (" 3 ", "1", 3),
        ("4096", "nonsense", 4096),  # which is not read then
        (None, "2", 2),
        (None, "64", 6),
        (None, "2,8", 2),
        ("", "", 6),
        ("", "1", 1),
    ],
)
def test_threads_are_as_many_as_the_environment_says(monkeypatch, own, openmp, wanted):
    """Ours decides; OpenMP's only makes them fewer."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    for name, text in (("CROSSREDUCE_NUM_THREADS", own), ("OMP_NUM_THREADS", openmp)):
        monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setenv(name, text)
    assert kernels.threads() == wanted


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", " ", "4097", "9" * 30, "9" * 5000, "²", "٣"])
def test_a_wrong_count_of_threads_is_an_error(monkeypatch, text):
    """The message names the variable, what it holds and what it could hold; OpenMP's own is not ours to judge."""
    name = "CROSSREDUCE_NUM_THREADS"
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError, match=rf"{name} must be a whole number from 1 to 4096[\s\S]*try:   {name}=4"):
        kernels.threads()
    monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert kernels.threads() == len(os.sched_getaffinity(0))


CHOSEN = """
import json, logging
import numpy as np
heard = []
class Handler(logging.Handler):
    def emit(self, record):
        heard.append((record.name, record.levelname, record.getMessage()))
logging.getLogger("crossreduce").addHandler(Handler())
logging.getLogger("crossreduce").setLevel(logging.DEBUG)
from crossreduce import kernels
halves = "float16", "float32", "float16", 2
program = kernels.Program(1, ((0, 0, 1),), (~0,))
for _ in range(2):
    plan = kernels.plan("sum", halves, 2, 1, (3,), (program,), (kernels.Segment(0, 0, 3, 0),))
    out = np.zeros(3, "float16")
    assert plan.run([[np.float16([1, 2, 40000]), np.float16([3, 4, 40000])]], [[out]], 2, True, True) is None
memory = kernels.memory(1000)
address = np.frombuffer(memory, np.uint8).ctypes.data
found = out.tolist(), address % 64, len(memory), kernels.usage(), heard
kernels.empty_cache()
print(json.dumps((kernels.instruction_set(), type(plan).__module__, *found)))
"""


def test_the_best_set_is_taken():
    """Unless the environment names another, the first that is supported computes; nothing is said about it."""
    name, module, out, off, size, usage, heard = json.loads(run_python(CHOSEN).stdout)
    assert name == SETS[0]
    assert module == "crossreduce.kernels._native"
    assert (out, off, size, heard) == ([2, 3, 40000], 0, 1000, [])
    assert usage["peak"] >= usage["live"] >= 1000


@pytest.mark.parametrize("wanted", [*SETS, "numpy"])
def test_the_environment_names_the_set(wanted):
    """Every set that is supported can be had, and NumPy."""
    name, module, out, *_ = json.loads(run_python(CHOSEN, CROSSREDUCE_KERNELS=wanted).stdout)
    assert name == wanted
    assert module == "crossreduce.kernels." + ("reference" if wanted == "numpy" else "_native")
    assert out == [2, 3, 40000]


@pytest.mark.parametrize("wanted", ["sse9", "AVX2", "auto", "avx2 "])
def test_an_unknown_set_is_an_error(monkeypatch, wanted):
    """The message says what was asked for and what there is."""
    monkeypatch.setenv("CROSSREDUCE_KERNELS", wanted)
    text = rf"CROSSREDUCE_KERNELS names kernels that cannot run here[\s\S]*{wanted}[\s\S]*{', '.join(SETS)}, numpy"
    kernels.instruction_set.cache_clear()
    try:
        with pytest.raises(BackendError, match=text):
            kernels.instruction_set()
    finally:
        kernels.instruction_set.cache_clear()


ABSENT = "import sys\nsys.modules['crossreduce.kernels._native'] = None\n"


def test_without_the_extension_numpy_computes_and_says_so_once():
    """An installation that could not compile works, slower, and its log says why."""
    done = run_python(ABSENT + CHOSEN)
    name, module, out, off, size, usage, heard = json.loads(done.stdout)
    assert (name, module) == ("numpy", "crossreduce.kernels.reference")
    assert (out, off, size, usage) == ([2, 3, 40000], 0, 1000, {"live": 0, "pooled": 0, "peak": 0})
    ((logger, level, text),) = heard
    assert (logger, level) == ("crossreduce", "INFO")
    assert "NumPy computes instead" in text
    assert done.stderr == ""


def test_without_the_extension_no_compiled_set_can_be_named():
    """What is not there is not on the list of what there is."""
    code = "from crossreduce import kernels; kernels.instruction_set()"
    done = run_python(ABSENT + code, CROSSREDUCE_KERNELS=SETS[0])
    assert "BackendError: CROSSREDUCE_KERNELS names kernels that cannot run here." in done.stderr
    assert "try:   one of numpy\n" in done.stderr


def test_it_is_quiet_by_default():
    """Where nobody asked for the log, nothing is printed."""
    done = run_python(ABSENT + "from crossreduce import kernels; kernels.instruction_set()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Memory


def address(memory):
    return np.frombuffer(memory, np.uint8).ctypes.data if len(memory) else 0


@pytest.mark.parametrize("make", [kernels.memory, reference.memory], ids=["kernels", "reference"])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1000, 4096, (1 << 21) - 1, 1 << 21, (1 << 22) + 5])
def test_memory_is_aligned_and_writable(make, nbytes):
    """Lines of results can be written whole; as many bytes as were asked for, and all of them ours."""
    given = [make(nbytes) for _ in range(3)]
    for k, memory in enumerate(given):
        view = memoryview(memory)
        assert (view.nbytes, view.readonly, len(memory)) == (nbytes, False, nbytes)
        assert address(memory) % 64 == 0
        np.frombuffer(memory, np.uint8)[:] = k
    for k, memory in enumerate(given):
        assert bytes(memory) == bytes([k]) * nbytes


@pytest.mark.parametrize("wrong", [-1, "1", 1.5, None, 1 << 70])
def test_memory_of_no_size_is_refused(wrong):
    """A size is a whole number, not below 0."""
    with pytest.raises((ValueError, TypeError, OverflowError)):
        kernels.memory(wrong)


def test_memory_that_there_is_not_is_an_error():
    """What the system refuses is a MemoryError, and counts as nothing."""
    before = kernels.usage()["live"]
    with pytest.raises(MemoryError):
        kernels.memory(1 << 62)
    assert kernels.usage()["live"] == before


def test_freed_memory_is_used_again():
    """The next that asks for as many bytes gets the same memory, and another size does not."""
    kernels.memory(1 << 20)  # so much may be kept from now on
    kernels.empty_cache()
    first = kernels.memory(123_457)
    held = address(first)
    before = kernels.usage()
    del first
    assert kernels.usage()["pooled"] == before["pooled"] + 123_457
    assert address(kernels.memory(123_456)) != held
    again = kernels.memory(123_457)
    assert address(again) == held
    assert kernels.usage()["live"] == before["live"]


def test_memory_lives_as_long_as_a_view_of_it():
    """What a result's array lies in is not given to another while the array lives."""
    array = np.frombuffer(kernels.memory(77_777), np.uint8)
    array[:] = 3
    others = [kernels.memory(77_777) for _ in range(3)]
    assert array.ctypes.data not in map(address, others)
    assert (array == 3).all()


def test_the_cache_can_be_emptied():
    """Afterwards nothing is kept; what lives goes on living."""
    held = kernels.memory(5000)
    np.frombuffer(held, np.uint8)[:] = 9
    for nbytes in (0, 1, 100, 1 << 22):
        kernels.memory(nbytes)
    kernels.empty_cache()
    assert kernels.usage()["pooled"] == 0
    assert bytes(held) == b"\t" * 5000


TAKEN = """
import random
import numpy as np
from crossreduce import kernels

draw = random.Random({seed})
live, most = [], 0
for _ in range(2000):
    step = draw.random()
    if step < 0.45 or not live:
        live.append(kernels.memory(draw.choice([0, 1, 64, 1000, 1000, 5000, 70_000, 3_000_000])))
    elif step < 0.9:
        live.pop(draw.randrange(len(live)))
    elif step < 0.98:
        del live[draw.randrange(len(live)) :]
    else:
        kernels.empty_cache()
    now, held = kernels.usage(), sum(map(len, live))
    most = max(most, held)
    assert (now["live"], now["peak"]) == (held, most), (now, held, most)
    assert now["live"] + now["pooled"] <= now["peak"], now
    starts = sorted((np.frombuffer(x, np.uint8).ctypes.data, len(x)) for x in live if len(x))
    assert all(a + n <= b for (a, n), (b, _) in zip(starts, starts[1:]))
"""


@pytest.mark.parametrize("seed", range(3))
def test_memory_kept_and_in_use_never_exceed_the_peak(seed):
    """The library never holds more than was once in use at a time, and gives no byte away twice."""
    done = run_python(TAKEN.format(seed=seed))  # in a process whose peak is that of these steps
    assert (done.returncode, done.stderr) == (0, "")
