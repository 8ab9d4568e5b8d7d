"""Malformed arguments of the compiled kernels raise, before anything is written."""

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import NATIVE, SETS, Case, run_python
from pairs import each

from crossreduce.kernels import FusedProgram, Segment

GOOD = {
    "op": "sum", "dtype": "float32", "accumulator": "float32", "result": "float32", "divisor": 1, "sources": 2,
    "results": 1, "sizes": (8,), "programs": ((1, ((0, 0, 1),), (~0,)),), "segments": ((0, 0, 8, 0),),
}  # fmt: skip


def of_dtypes(dtype, accumulator=None, result=None, **others):
    """Return arguments for a dtype, which the accumulator and the result have, too, if no other one is given."""
    return {"dtype": dtype, "accumulator": accumulator or dtype, "result": result or dtype, **others}


DTYPES = "unknown instruction set, op or dtype"
SLOTS = "too many slots"
OPERAND = "an operand is out of range"
RANGE = "an integer is out of range"
RESULTS = "the wrong number of results"
SEGMENT = "a segment is out of range"
MALFORMED = {
    "op": (DTYPES, {"op": "average"}),
    "mean": (DTYPES, {"op": "mean"}),
    "dtype": (DTYPES, {"dtype": "float8"}),
    "accumulator": (DTYPES, {"accumulator": "object"}),
    "result": (DTYPES, {"result": "str"}),
    "sum of bools": ("not defined", of_dtypes("bool")),
    "minimum of complex numbers": ("not defined", of_dtypes("complex64", op="min")),
    "exact sum of integers": ("exact sums are not defined", of_dtypes("int8", "complex64", "int8", op="exact_sum")),
    "sum in halves": ("not defined", of_dtypes("float16")),
    "narrower accumulator": ("conversion", of_dtypes("float64", "int8", "float64")),
    "result of another kind": ("conversion", of_dtypes("int8", "int8", "complex64")),
    "divided bools": ("divided", of_dtypes("bool", op="max", divisor=2)),
    **{
        f"integers divided by {divisor}": ("positive integer", of_dtypes("int64", divisor=divisor))
        for divisor in (0, 0.5, -1, 2.5, float("nan"), 1e300)
    },
    "text as divisor": ("real number", {"divisor": "2"}),
    "no sources": ("at least one source", {"sources": 0}),
    "no results": ("one result", {"results": 0, "programs": ((1, ((0, 0, 1),), ()),)}),
    "integer as sizes": ("has no len", {"sizes": 8}),
    "negative size": ("size of a tensor", {"sizes": (-1,), "segments": ()}),
    "size beyond any memory": ("size of a tensor", {"sizes": (1 << 62,), "segments": ((0, 0, 1 << 62, 0),)}),
    "integer as programs": ("has no len", {"programs": 3}),
    "program of two fields": ("a program is", {"programs": ((1, ((0, 0, 1),)),)}),
    "source out of range": (OPERAND, {"programs": ((1, ((0, 0, 2),), (~0,)),)}),
    "source beyond 32 bits": (RANGE, {"programs": ((1, ((0, 0, 1 << 32),), (~0,)),)}),
    "source beyond 64 bits": ("too big|too large", {"programs": ((1, ((0, 0, 1 << 64),), (~0,)),)}),
    "slot out of range": (OPERAND, {"programs": ((1, ((0, 0, 1), (0, ~0, ~1)), (~0,)),)}),
    "fold into a slot out of range": ("a fold is malformed", {"programs": ((1, ((1, 0, 1),), (~0,)),)}),
    "negative slot": ("a fold is malformed", {"programs": ((1, ((-1, 0, 1),), (0,)),)}),
    "negative number of slots": (SLOTS, {"programs": ((-1, (), (0,)),)}),
    "too many slots": (SLOTS, {"programs": ((1 << 20, ((0, 0, 1),), (~0,)),)}),
    "number of slots beyond 32 bits": (SLOTS, {"programs": (((1 << 32) + 1, ((0, 0, 1),), (~0,)),)}),
    "empty fold": ("a fold is malformed", {"programs": ((1, ((),), (0,)),)}),
    "fold without operands": ("a fold is malformed", {"programs": ((1, ((0,),), (~0,)),)}),
    "operand in the memory of the fold": ("before reading it", {"programs": ((1, ((0, 0, 1), (0, 1, ~0)), (~0,)),)}),
    "slot read before it is written": ("before it is written", {"programs": ((2, ((0, 0, ~1),), (~0,)),)}),
    "result in an unwritten slot": ("never written", {"programs": ((2, ((0, 0, 1),), (~1,)),)}),
    "result out of range": ("a result is out of range", {"programs": ((1, ((0, 0, 1),), (2,)),)}),
    "result in a slot out of range": ("a result is out of range", {"programs": ((1, ((0, 0, 1),), (~1,)),)}),
    "too few results": (RESULTS, {"programs": ((1, ((0, 0, 1),), ()),)}),
    "too many results": (RESULTS, {"programs": ((1, ((0, 0, 1),), (~0, ~0)),)}),
    "text in a fold": ("interpreted as an integer", {"programs": ((1, ((0, 0, "1"),), (~0,)),)}),
    "segment of three fields": ("a segment is", {"segments": ((0, 0, 8),)}),
    "segment of another tensor": (SEGMENT, {"segments": ((1, 0, 8, 0),)}),
    "segment of tensor -1": (SEGMENT, {"segments": ((-1, 0, 8, 0),)}),
    "segment of another program": (SEGMENT, {"segments": ((0, 0, 8, 1),)}),
    "segment of program -1": (SEGMENT, {"segments": ((0, 0, 8, -1),)}),
    "segment of a program beyond 32 bits": (SEGMENT, {"segments": ((0, 0, 8, 1 << 32),)}),
    "segment that starts before the tensor": (SEGMENT, {"segments": ((0, -1, 8, 0),)}),
    "segment that ends after the tensor": (SEGMENT, {"segments": ((0, 0, 9, 0),)}),
    "segment that ends before it starts": (SEGMENT, {"segments": ((0, 4, 3, 0),)}),
}
ERRORS = ValueError, TypeError, OverflowError, BufferError
PLAIN = 1, False, False  # the last arguments of ``run``: one thread, no streaming stores, no search for overlaps


# The same code checks the arguments for every instruction set, so each fault is tested on one set.
@pytest.mark.parametrize(("name", "isa"), each(MALFORMED, SETS))
def test_malformed_kernels_are_refused(isa, name):
    """Malformed arguments raise when a kernel is made, so no kernel can read or write out of bounds."""
    NATIVE.Kernel(isa, *GOOD.values())
    fault, arguments = MALFORMED[name]
    with pytest.raises(ERRORS, match=fault):
        NATIVE.Kernel(isa, *{**GOOD, **arguments}.values())


def test_an_unknown_instruction_set_is_refused():
    """An unknown instruction set is an error that lists the given names. So is a call with only an instruction set."""
    with pytest.raises(ValueError, match=rf"{DTYPES} among sse9, sum, float32, float32, float32"):
        NATIVE.Kernel("sse9", *GOOD.values())
    with pytest.raises(TypeError, match="takes at least 11 arguments"):
        NATIVE.Kernel(SETS[0])


X = np.arange(8, dtype="float32")
X8 = np.arange(8, dtype="float64")
TALL = np.zeros((8, 2), "float32")
TENSORS = "the number of tensors"
COUNT = "the number of sources or results"
SIZE = "the size of an array"
ITEM = "the item size of an array"
SHAPE = "the shape and strides of a source"
BUFFER = "a bytes-like object is required"


# Each function returns the sources and the results of a run, given a good source and a good result.
OPERANDS = {
    "no tensors": (TENSORS, lambda a, out: ([], [])),
    "no sources": (COUNT, lambda a, out: ([[]], [[out]])),
    "too many sources": (COUNT, lambda a, out: ([[a, a, a]], [[out]])),
    "too few results": (COUNT, lambda a, out: ([[a, a]], [[]])),
    "too many results": (COUNT, lambda a, out: ([[a, a]], [[out, np.zeros_like(out)]])),
    "more sources than results": (TENSORS, lambda a, out: ([[a, a]] * 2, [[out]])),
    "a source of another size": (SIZE, lambda a, out: ([[a, a[:7]]], [[out]])),
    "a source of another itemsize": (SIZE, lambda a, out: ([[a, a.astype("float64")]], [[out]])),
    "a source of another itemsize and the same size in bytes": (ITEM, lambda a, out: ([[a, X8[:4]]], [[out]])),
    "a strided source of another itemsize": (ITEM, lambda a, out: ([[a, X8[::2]]], [[out]])),
    "a result of another itemsize": (ITEM, lambda a, out: ([[a, a]], [[np.zeros(4)]])),
    "a strided source of another size": (SIZE, lambda a, out: ([[a, TALL[:7, 0]]], [[out]])),
    "a result of another size": (SIZE, lambda a, out: ([[a, a]], [[np.zeros(9, "float32")]])),
    "a list": (BUFFER, lambda a, out: ([[a, [1.0] * 8]], [[out]])),
    "text": (BUFFER, lambda a, out: ([[a, "x" * 32]], [[out]])),
    "None as results": ("has no len", lambda a, out: ([[a, a]], None)),
    "None as a result": (BUFFER, lambda a, out: ([[a, a]], [[None]])),
    "a tuple as a result": (BUFFER, lambda a, out: ([[a, a]], [[(out.ctypes.data, (8,), (4,))]])),
    "a read-only result": ("not writable", lambda a, out: ([[a, a]], [[bytes(32)]])),
    "a read-only array": ("read-only", lambda a, out: ([[a, a]], [[np.broadcast_to(out, (8,))]])),
    "a strided result": ("not C-contiguous", lambda a, out: ([[a, a]], [[TALL[:, 0]]])),
    "address 0": ("address of an array is 0", lambda a, out: ([[a, 0]], [[out]])),
    "an address beyond 64 bits": ("too big|too large", lambda a, out: ([[a, 1 << 80]], [[out]])),
    "a pair": ("3 arguments", lambda a, out: ([[a, (a.ctypes.data, (8,))]], [[out]])),
    "more axes than strides": (SHAPE, lambda a, out: ([[a, (a.ctypes.data, (2, 4), (4,))]], [[out]])),
    "a shape of another size": (SHAPE, lambda a, out: ([[a, (a.ctypes.data, (2, 3), (12, 4))]], [[out]])),
    "a negative shape": (SHAPE, lambda a, out: ([[a, (a.ctypes.data, (-2, -4), (16, 4))]], [[out]])),
    "a size of 2**64 + 8": (SHAPE, lambda a, out: ([[a, (a.ctypes.data, (3, (2**64 + 8) // 3), (0, 0))]], [[out]])),
    "a stride beyond all memory": (SHAPE, lambda a, out: ([[a, (a.ctypes.data, (8,), (2**61,))]], [[out]])),
    "too many axes": (SHAPE, lambda a, out: ([[a, (a.ctypes.data, (8, *[1] * 64), (4, *[4] * 64))]], [[out]])),
    "text in a shape": ("as an integer", lambda a, out: ([[a, (a.ctypes.data, ("8",), (4,))]], [[out]])),
    "an array as address": ("int", lambda a, out: ([[a, (a, (8,), (4,))]], [[out]])),
}


@pytest.mark.parametrize(("name", "isa"), each(OPERANDS, SETS))
def test_malformed_operands_are_refused_and_nothing_is_written(isa, name):
    """A run checks all operands before it writes the first byte."""
    out = np.full(8, 7, "float32")
    fault, operands = OPERANDS[name]
    with pytest.raises(ERRORS, match=fault):
        NATIVE.Kernel(isa, *GOOD.values()).run(*operands(X.copy(), out), *PLAIN)
    assert out.tolist() == [7.0] * 8


ITEMS = st.sampled_from(["int8", "float16", "float32", "float64", "complex128"])


@st.composite
def layouts(draw, nbytes):
    """Draw an array of any dtype and layout, of ``nbytes`` bytes or about that."""
    dtype = np.dtype(draw(ITEMS))
    size = nbytes // dtype.itemsize + draw(st.sampled_from([0, 0, 0, -1, 1]))
    step, gap = draw(st.sampled_from([1, 2, 3, -1, -2])), draw(st.integers(0, 2))
    kind = draw(st.sampled_from(["flat", "columns", "transposed", "broadcast"]))
    if kind == "flat":
        return np.arange(size * abs(step)).astype(dtype)[::step]
    if kind == "columns":
        return np.arange(size * (1 + gap)).astype(dtype).reshape(size, 1 + gap)[:, gap]
    if kind == "transposed":
        return np.arange((size + 1) // 2 * 2).astype(dtype).reshape(2, -1).T
    return np.broadcast_to(np.ones(1, dtype), (size,))


@pytest.mark.parametrize("isa", [*SETS, "numpy"])
@examples(300)
@given(data=st.data())
def test_buffers_are_read_in_full_or_refused(isa, data):
    """A source may have any layout if it has the item size of the kernel, or be contiguous bytes. A result must also be
    contiguous and writable. Other buffers, and those of another size, raise before anything is written."""
    nbytes, dtype = data.draw(st.sampled_from([32, 9600])), data.draw(ITEMS)
    source, out = data.draw(layouts(nbytes)), data.draw(layouts(nbytes))
    itemsize, before = np.dtype(dtype).itemsize, out.tobytes()
    size = nbytes // itemsize
    case = Case("max", (dtype,) * 3, 1, 1, 1, (size,), (FusedProgram(0, (), (0,)),), (Segment(0, 0, size, 0),))
    kernel = case.reference() if isa == "numpy" else case.native(isa)
    plain = [x.flags.c_contiguous for x in (source, out)]
    fits = [x.itemsize == itemsize or (x.itemsize == 1 and c) for x, c in zip((source, out), plain, strict=True)]
    if source.nbytes == out.nbytes == nbytes and all(fits) and plain[1] and out.flags.writeable:
        kernel.run([[source]], [[out]], *PLAIN)
        assert out.tobytes() == source.tobytes()
        return
    with pytest.raises((ValueError, BufferError), match=r"size of an array|contiguous|read-only"):
        kernel.run([[source]], [[out]], *PLAIN)
    assert out.tobytes() == before


def test_unusual_arguments_do_not_end_the_process():
    """A number of threads that is not a positive 32-bit integer raises an error (0 would cause a division by zero). So
    does a sequence that is too long for the memory."""
    code = f"""
import numpy as np
from crossreduce.kernels import native
good = {[*GOOD.values()][:7]!r}
kernel = native().Kernel({SETS[-1]!r}, *good, (1 << 20,), {GOOD["programs"]!r}, ((0, 0, 1 << 20, 0),))
a, out = np.ones(1 << 20, "float32"), np.zeros(1 << 20, "float32")
for threads in (0, -1, -(1 << 31), "2", None, 1.5, 1 << 40):
    try:
        kernel.run([[a, a]], [[out]], threads, False, False)
    except (ValueError, TypeError, OverflowError) as error:
        print(threads, error)
assert not out.any()
try:
    native().Kernel({SETS[-1]!r}, *good, range(1 << 62), (), ())
except (MemoryError, ValueError, OverflowError):
    print("too long")
"""
    done = run_python(code)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "-1", "-2147483648", "2", "None", "1.5", "1099511627776", "too"]
    assert lines[:2] == [f"{count} the number of threads must be at least 1" for count in (0, -1)]
