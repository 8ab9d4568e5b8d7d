"""Batches for the CUDA kernels' body on the host: draws launches, runs them, and compares them with the reference.

Run as a program, it checks a number of batches of each of some dtypes, by default of all:
cuda_launches.py LIBRARY BATCHES SEED [DTYPE ...].
In a process with AddressSanitizer, an access of even one byte beside a source or result is an error.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from contextlib import suppress
from functools import cache
from itertools import product
from typing import NamedTuple

import ml_dtypes
import numpy as np

from crossreduce.engines.cuda.encoding import stack_depth
from crossreduce.engines.cuda.kernels import KernelKind, copy_kernel, is_supported, reduce_kernel
from crossreduce.errors import UnsupportedError
from crossreduce.frameworks import get
from crossreduce.kernels.reference import ReferenceKernel
from crossreduce.ops import COMPLEX, DTYPES, FLOATS, INTEGERS, ReduceOp

THREADS, VECTOR, MAX_STEPS, MAX_FIXED = 256, 16, 64, 8
SMALL, LARGE = 4032, 32760  # bytes of the parameters
SIZE = 5000  # elements
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 6e-8, 65504, 3e38])
THIS_PROCESS = ctypes.CDLL(None)


class Kernel(NamedTuple):
    """A kernel, and one of its uses: an op, and the dtypes of sources, accumulators and results."""

    name: str
    op: str  # "mean": of integers
    dtypes: tuple[str, str, str]
    kind: KernelKind
    sources: int  # 0: any number

    @property
    def room(self):
        return LARGE if self.name.endswith("_large") else SMALL


@cache
def kernels():
    """Return all kernels with all of their uses, as the engine chooses them."""
    found = [("sum", (dtype,) * 3, copy_kernel(dtype), 1) for dtype in ("uint8", "uint16", "uint32")]
    for dtype, op in product(sorted(DTYPES), ReduceOp):
        is_mean = op is ReduceOp.MEAN and dtype in INTEGERS
        for result in ("float64", "float32", "float16", "bfloat16") if is_mean else (dtype,):
            with suppress(UnsupportedError, TypeError):  # the op is not defined for the dtype
                numbers = get("numpy").numbers(op, dtype, 1)._replace(result=result)
                assert is_supported(numbers)
                for count, wide, final in product(range(1, MAX_FIXED + 2), (False, True), (True, False)):
                    kind = reduce_kernel(numbers, count, wide, final)
                    dtypes = dtype, numbers.accumulator, result if final else numbers.accumulator
                    fixed = count if kind.name.endswith(f"_{count}") else 0
                    found.append((op.value if is_mean or op is not ReduceOp.MEAN else "sum", dtypes, kind, fixed))
    return [
        Kernel(kind.name + suffix, op, dtypes, kind, count)
        for op, dtypes, kind, count in dict.fromkeys(found)
        for suffix in ("", "_large")[: 1 + kind.has_large]
    ]


class Tensor(NamedTuple):
    """A part of a launch: its elements, the number of its order, and the addresses of its sources and results."""

    size: int
    order: int
    sources: list[int]
    results: list[int]


def start_of(sources, results, sizes, units, count):
    """Return how many units precede the first vector of a part, and whether all vectors are aligned.

    That of the first result is aligned if it can be, and the aligned vectors around that of a source are in the source.
    ``sizes``: the bytes of a unit of each source and result. ``count``: the units of a vector.
    """

    def past(head, at, nbytes):  # the bytes between the beginning of a vector and unit ``head``
        return (at + head * nbytes) % min(VECTOR, count * nbytes)

    places = [*zip([*sources, *results], sizes, strict=True)]
    ours, first = places[: len(sources)], places[len(sources)]
    valid = (h for h in range(0, 2 * VECTOR, units) if all(past(h, *each) <= h * each[1] for each in ours))
    head = min(valid, key=lambda h: past(h, *first) > 0)
    return head, not any(past(head, *each) for each in places)


def packed(tensors, orders, divisor, units, nbytes, kind=0, room=SMALL, streams=1):
    """Return the parameters of a launch. ``nbytes``: the bytes of a unit of sources, accumulators and results.

    ``units``: the units of an element. ``kind``: the kind of the results. ``room``: the bytes of the parameters.
    ``streams``: how many tiles are processed in turn.
    """
    source_nbytes, value_nbytes, result_nbytes = nbytes
    # Means of integers of 8 and 16 bits have 64 bits in memory, but accumulate in 32.
    count = min(VECTOR // source_nbytes, 32 // (4 if source_nbytes < 4 else value_nbytes), 8)
    tile, parts, addresses = 0, b"", b""
    for size, order, sources, results in tensors:
        size *= units
        wide = orders[order][3]
        sizes = [value_nbytes if wide >> min(k, 63) & 1 else source_nbytes for k in range(len(sources))]
        sizes += [result_nbytes] * len(results)
        head, is_aligned = start_of(sources, results, sizes, units, count)
        parts += struct.pack("<qIHBB", size, tile, order, head, is_aligned)
        tile += max(1, -(-(size - head) // (count * THREADS)))
        addresses += struct.pack(f"<{len(sources) + len(results)}Q", *sources, *results)
    stack = max(map(stack_depth, orders))
    first, length = tensors[0], -(-tile // (2 * streams)) * 2
    counts = len(first.sources), len(first.results), len(orders)
    header = struct.pack("<dIIHHHHHHI", divisor, len(tensors), tile, *counts, stack, kind, streams, length)
    table = b"".join(struct.pack("<4Q", *order) for order in orders) + parts + addresses
    made = header + table
    assert len(made) <= room, "the table of a launch is too large"
    return made.ljust(room, b"\0")


def folds_of(order, sources):
    """Return the folds of a fused program with an order, and the result's slot."""
    push, fold, twice, _ = order
    folds, stack, free = [], [], [2, 1, 0]
    for k in range(sources):
        if k == 0 or push >> k & 1:
            stack.append(free.pop())
            folds.append((stack[-1], k))
        else:
            folds.append((stack[-1], ~stack[-1], k))
        for bits in (fold, twice):
            if bits >> k & 1:
                top = stack.pop()
                free.append(top)
                folds.append((stack[-1], ~stack[-1], ~top))
    assert len(stack) == 1
    return folds, stack[0]


def drawn_order(draw, sources):
    """Return a random order: (push, fold, fold_twice, wide)."""
    push = fold = twice = 0
    now = 1
    for k in range(sources):
        if k and now < 3 and draw.random() < 0.4:
            push |= 1 << k
            now += 1
        left = sources - 1 - k
        if now > 1 and (left == 0 or draw.random() < 0.4):
            fold |= 1 << k
            now -= 1
            if now > 1 and (left == 0 or draw.random() < 0.5):
                twice |= 1 << k
                now -= 1
    return push, fold, twice, 0


def values(draw, dtype, size):
    """Return an array of random bytes, of numbers of similar size, or of special values such as NaN."""
    if dtype == "bool":
        return draw.integers(0, 2, size).astype(np.uint8)
    kind = np.dtype(dtype)
    if draw.random() < 0.4:
        return draw.integers(0, 256, size * kind.itemsize, np.uint8).view(kind)
    if kind.kind in "iu":
        return draw.integers(-100 if kind.kind == "i" else 0, 100, size).astype(kind)
    count = size * (2 if kind.kind == "c" else 1)
    if draw.random() < 0.2:  # many equal ones, zeros of both signs, NaN in several sources
        real = draw.choice(SPECIAL, count)
    else:
        real = draw.standard_normal(count) * 10.0 ** draw.integers(-6, 6)
    if count and draw.random() < 0.5:
        real[draw.integers(0, count, count // 16 + 1)] = draw.choice(SPECIAL, count // 16 + 1)
    return real.view(np.complex128).astype(kind) if kind.kind == "c" else real.astype(kind)


def equal(got, right, dtype):
    """Return whether two byte strings have the same bits. All NaNs are equal."""
    if got == right:
        return True
    if dtype not in FLOATS | COMPLEX:
        return False
    kind = np.dtype({"complex64": "float32", "complex128": "float64"}.get(dtype, dtype))
    a, b = np.frombuffer(got, kind), np.frombuffer(right, kind)
    raw = np.dtype(f"u{kind.itemsize}")
    return bool(((a.view(raw) == b.view(raw)) | ((a != a) & (b != b))).all())


def launch_of(kernel, sizes, results, address_of):
    """Return the parameters of a launch, and the number of its sources.

    ``address_of(size, nbytes, is_source)`` returns where an array of so many elements of so many bytes begins.
    """
    units, (of_source, _, of_result), tensors = kernel.kind.units, kernel.kind.nbytes, []
    for size in sizes:
        ins = [address_of(size, of_source * units, True) for _ in range(kernel.sources or 3)]
        tensors.append(Tensor(size, 0, ins, [address_of(size, of_result * units, False) for _ in range(results)]))
    made = packed(tensors, [(0, 0, 0, 0)], 1, units, kernel.kind.nbytes, kernel.kind.kind, kernel.room)
    return ctypes.create_string_buffer(made, kernel.room), len(ins)


def reads(library, kernel, shift):
    """Run a kernel's body, and return the number of sources, of vectors in all, of their reads, and of other reads.

    ``shift``: how many units the sources begin behind the beginning of a vector. The result begins there.
    """
    blocks, nbytes = [], kernel.kind.nbytes[0]

    def address_of(size, nbytes, is_source):
        blocks.append(np.zeros(size * nbytes + 2 * VECTOR, np.uint8))
        return -(-blocks[-1].ctypes.data // VECTOR) * VECTOR + is_source * shift * nbytes // kernel.kind.units

    launch, sources = launch_of(kernel, [SIZE], 1, address_of)
    library.all_reads.restype = ctypes.POINTER(ctypes.c_int64)
    before = library.all_reads()[: MAX_STEPS + 1]
    getattr(library, kernel.name)(launch, ctypes.c_uint32(2))
    after, vector = library.all_reads()[: MAX_STEPS + 1], min(VECTOR, 8 * nbytes)
    found = [k - old for k, old in zip(after, before, strict=True)]
    return sources, sources * (SIZE * kernel.kind.units * nbytes // vector), found[vector], sum(found) - found[vector]


def host_block(nbytes):
    """Return bytes of host memory, all of them 0xA5."""
    return np.full(nbytes, 0xA5, np.uint8)


def protect(memory, action):
    """Let AddressSanitizer, if it is loaded, "poison" or "unpoison" the bytes of each block around its part."""
    change = getattr(THIS_PROCESS, f"__asan_{action}_memory_region", None)
    for block, part in memory if change else ():
        begin, after = block.ctypes.data, part.ctypes.data + part.nbytes
        for start, stop in (begin, part.ctypes.data), (after, begin + block.nbytes):
            change(ctypes.c_void_p(start), ctypes.c_size_t(stop - start))


def check(library, kernel, draw, block_of=host_block):
    """Run a drawn batch in a kernel's body and in the reference, and raise if a bit or a byte around it differs.

    ``block_of``: allocates like ``host_block``.
    """
    kind, wide_kind, out_kind = (np.dtype(np.uint8 if d == "bool" else d) for d in kernel.dtypes)
    (dtype, accumulator, result), units = kernel.dtypes, kernel.kind.units
    sources = kernel.sources or int(draw.integers(1, draw.choice([3, 9, 20])))
    if not kernel.sources and draw.random() < 0.03:
        sources = int(draw.integers(MAX_STEPS + 1, 2 * MAX_STEPS))
    results = int(draw.integers(1, draw.choice([2, 9])))
    orders = [(0, 0, 0, 0)]
    if sources <= MAX_STEPS and draw.random() < 0.5:
        orders = [drawn_order(draw, sources) for _ in range(int(draw.integers(1, 4)))]
    if kernel.name.endswith("_mixed") and sources <= MAX_STEPS and draw.random() < 0.5:
        orders = [(*order[:3], int(draw.integers(0, 1 << sources))) for order in orders]
    divisor = int(draw.integers(1, 12)) if kernel.op in ("sum", "mean") and accumulator not in INTEGERS else 1
    tile = kernel.kind.values // units * THREADS
    largest = [3, 70, tile + 100, 6 * tile][: 4 if sources <= MAX_STEPS else 3]  # elements
    fits = (kernel.room - 32 - 32 * len(orders)) // (16 + 8 * (sources + results))
    tensors, kept, expected = [], [], []
    for _ in range(int(draw.integers(1, min(40 if kernel.room == LARGE and draw.random() < 0.1 else 6, fits) + 1))):
        size = int(draw.integers(1, draw.choice(largest)))
        order = int(draw.integers(0, len(orders)))
        wide = [bool(orders[order][3] >> k & 1) for k in range(sources)]
        same, others = int(draw.integers(0, 17)), draw.choice([0, 0.3])  # alignments, and how many differ

        def memory(dtype, same=same, others=others, size=size):
            shift = (int(draw.integers(0, 17)) if draw.random() < others else same) * dtype.itemsize
            block = block_of(size * dtype.itemsize + 128)
            start = -block.ctypes.data % 64 + shift % 64
            return block, block[start : start + size * dtype.itemsize]

        ins = [memory(wide_kind if each else kind) for each in wide]
        is_signs = kernel.op in ("min", "max") and draw.random() < 0.3  # zeros of both signs show the order
        given = []
        for (_, part), each in zip(ins, wide, strict=True):
            drawn = values(draw, accumulator if each else dtype, size)
            if each and kernel.op == "mean":  # sums of integers
                drawn = draw.integers(-(1 << 22), 1 << 22, size).astype(wide_kind)
            given.append(draw.choice([0.0, -0.0], size).astype(kind) if is_signs else drawn)
            part[:] = given[-1].view(np.uint8)
        outs = [memory(out_kind) for _ in range(results)]
        for k in range(min(sources, results) if draw.random() < 0.4 else 0):
            if draw.random() < 0.5 and ins[k][1].nbytes == outs[k][1].nbytes:
                outs[k] = ins[k]  # in place
        folds, top = folds_of(orders[order], sources)
        right = np.empty(size, out_kind)
        if any(wide):
            given = [x.astype(wide_kind) for x in given]
        dtypes, op = (accumulator if any(wide) else dtype, accumulator, result), kernel.op.replace("mean", "sum")
        ReferenceKernel(op, dtypes, divisor, [size], [(3, folds, [~top])], [(0, 0, size, 0)]).run(
            [[x.view(bool) if dtype == "bool" else x for x in given]],
            [[right.view(bool) if dtype == "bool" else right]], 1, False, False,
        )  # fmt: skip
        tensors.append(Tensor(size, order, [p.ctypes.data for _, p in ins], [p.ctypes.data for _, p in outs]))
        kept.append((ins, outs, [part.tobytes() for _, part in ins]))
        expected.append(right.tobytes())
    streams = int(draw.integers(1, 6))
    made = packed(tensors, orders, divisor, units, kernel.kind.nbytes, kernel.kind.kind, kernel.room, streams)
    buffer = ctypes.create_string_buffer(made, kernel.room)
    memories = [each for ins, outs, _ in kept for each in (*ins, *outs)]
    protect(memories, "poison")
    getattr(library, kernel.name)(buffer, ctypes.c_uint32(int(draw.integers(1, 40))))
    protect(memories, "unpoison")
    for (ins, outs, given), right in zip(kept, expected, strict=True):
        for block, part in outs:
            assert equal(part.tobytes(), right, result), (kernel, sources, results, divisor, orders)
            begin = part.ctypes.data - block.ctypes.data
            assert (block[:begin] == 0xA5).all(), "a byte before a result was written"
            assert (block[begin + part.size :] == 0xA5).all(), "a byte after a result was written"
        written = {part.ctypes.data for _, part in outs}
        for (_, part), before in zip(ins, given, strict=True):
            assert part.ctypes.data in written or part.tobytes() == before, "a source was written"


def check_each(library, batches, seed, dtypes=()):
    """Check at least ``batches`` batches of each dtype, evenly over kernels and ops. Return the number per dtype."""
    checked = {}
    for dtype in dtypes or sorted(DTYPES):
        mine = [kernel for kernel in kernels() if kernel.dtypes[0] == dtype]
        draw, times = np.random.default_rng([seed, *dtype.encode()]), -(-batches // len(mine))
        for kernel in mine * times:
            check(library, kernel, draw)
        checked[dtype] = len(mine) * times
    return checked


if __name__ == "__main__":
    assert ml_dtypes.bfloat16  # gives NumPy the dtype
    done = check_each(ctypes.CDLL(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    print("\n".join(f"{dtype} {number}" for dtype, number in done.items()))
