"""The kernels: the compiled ones and the same in NumPy give the same bits, and both the right ones."""

import ctypes
import json
import logging
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
from crossreduce.ops import INTEGERS, accumulator

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
                # The accumulator of a backend without float64 is float32; the result is what its true division gives.
                yield from ((op, dtype, wide, narrow) for wide in ("float64", "float32") for narrow in strategies.FLOATS)
            else:
                yield op, dtype, accumulator(ReduceOp(op), dtype), dtype


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
        folds.append((slot, draw(st.sampled_from(known)), *draw(st.lists(others, max_size=draw(st.sampled_from([2, 5, 40]))))))
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
        for start, stop in zip(cuts, cuts[1:], strict=False):
            if draw(st.sampled_from([True, True, False])):
                segments.append(Segment(tensor, start, stop, draw(st.integers(0, len(drawn) - 1))))
    divisor = draw(st.integers(1, 40)) if name == "mean" else 1
    op = "sum" if name == "mean" else name
    return Case(op, (dtype, wide, narrow, divisor), sources, results, sizes, drawn, tuple(draw(st.permutations(segments))))


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
    positive = [0, 1, 2, (1 << bits) - 1, 1 << bits, one - 1, one, one + 1, one + 2, infinite - 1, infinite, infinite + 1]
    positive += [quiet - 1, quiet, quiet + 1, sign - 1, quiet | 0b101 << (bits - 4), infinite | 0b11 << (bits - 4)]
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
    past_cache: bool
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
        past_cache=st.booleans(),
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
        row, out = [], []
        places = {}
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
    assert plan.run(given.sources, given.results, how.threads, how.past_cache, how.apart) is None
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
@pytest.mark.parametrize("numbers", [("mean", "float16", "float32", "float16"), ("sum", *["complex128"] * 3),
                                     ("mean", "int8", "float64", "float32"), ("max", *["bfloat16"] * 3)], ids="-".join)
def test_large_arrays_go_past_the_cache_on_several_threads(isa, numbers):
    """Shares of a thread, lines past the cache and what is left beside them meet without a gap."""
    case = simple(*numbers, 3, 300_007, results=3)._replace(segments=(Segment(0, 5, 300_000, 0),))
    for offsets in ((0,), (2, 64, 16), (1, 3)):
        check(case, PLAIN._replace(kind="bytes", offsets=offsets, threads=3, past_cache=True), case.native(isa))


def test_the_backends_numbers_are_known(framework):
    """Whatever a backend's ``numbers`` names, there are kernels for it, and the laws here were tried on it."""
    from crossreduce import UnsupportedError
    from crossreduce.backends import get

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
