"""The names and units of the CUDA kernels (``native/kernels.inc``)."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...ops import COMPLEX, HALVES, INTEGERS, Numbers, ReduceOp
from ...packing import itemsize

MAX_STEPS: Final = 64
"""The maximum number of sources of a kernel with an ``Order``, which has one bit per source. Kernels with more sources
combine them one after another."""

MAX_DEPTH: Final = 3
"""The maximum number of values on a kernel's stack."""

MAX_ADDRESSES: Final = 480
"""The maximum number of sources and results of a part, since their addresses must fit into a small table."""

SMALL_NBYTES: Final = 4032
LARGE_NBYTES: Final = 32760
HEADER_NBYTES: Final = 32
ORDER_NBYTES: Final = 32
PART_NBYTES: Final = 16
"""The maximum bytes of a launch's parameters with a small or a large table, and the bytes of a header, an order and a
part in them (``native/reduce.cuh``)."""

_SHORT: Final = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "bool": "bool"} | {
    name: name.replace("uint", "u").replace("int", "i") for name in INTEGERS
}
# These kernels are also compiled for each number of sources from 2 to _MAX_FIXED.
_MAX_FIXED: Final = 8
_FIXED: Final = frozenset({"sum_f16", "sum_bf16", "sum_f32", "sum_f64"})
_RESULT_KINDS: Final = {"float64": 0, "float32": 2, "float16": 3, "bfloat16": 4}
_ACCUMULATOR: Final = 1


class KernelKind(NamedTuple):
    """A kernel, and the sizes of the numbers that it reads and writes.

    Args:
      name: the kernel's name, without ``_large``.
      has_large: whether the kernel also exists as ``_large``, for large tables.
      units: the number of units of an element. A unit is a real number: a complex number has two.
      nbytes: the bytes of a unit of the sources, of sources in the accumulator's dtype, and of the results.
      kind: the ``ResultKind`` of ``native/reduce.cuh``.
      values: the number of units that a thread processes.
    """

    name: str
    has_large: bool
    units: int
    nbytes: tuple[int, int, int]
    kind: int
    values: int


def _kernel_kind(name: str, has_large: bool, units: int, nbytes: tuple[int, int, int], kind: int) -> KernelKind:
    """Return a kernel. Its threads process 16 bytes of a source, or less if the accumulators need many registers."""
    return KernelKind(name, has_large, units, nbytes, kind, min(16 // nbytes[0], 32 // nbytes[1], 8))


def copy_kernel(dtype: str) -> KernelKind:
    """Return the kernel that copies one source to all results, without a change of any bit."""
    size = itemsize(dtype)
    units, unit = (2, 8) if size == 16 else (1, size)
    # The sum of a single unsigned integer is a copy of its bits.
    return _kernel_kind(f"sum_u{8 * unit}_any", True, units, (unit, unit, unit), 0)


def is_supported(numbers: Numbers) -> bool:
    """Return whether there is a kernel for these dtypes."""
    if numbers.dtype in INTEGERS and numbers.op is ReduceOp.MEAN:
        return numbers.accumulator == "float64" and numbers.result in _RESULT_KINDS
    wide = "float32" if numbers.dtype in HALVES and numbers.accumulator == "float32" else numbers.dtype
    return numbers.accumulator == wide and numbers.result == numbers.dtype


def reduce_kernel(numbers: Numbers, sources: int, wide: bool, final: bool) -> KernelKind:
    """Return the kernel that combines sources by an op.

    Args:
      numbers: how the reduction is computed; ``is_supported`` must have accepted it.
      sources: the number of sources that are combined.
      wide: whether some of them are partial results, in the accumulator's dtype.
      final: whether the result is the last one, in the result's dtype, instead of a partial result.
    """
    op, dtype = numbers.op, numbers.dtype
    result = itemsize(numbers.result if final else numbers.accumulator)
    nbytes = itemsize(dtype), itemsize(numbers.accumulator), result
    if op is ReduceOp.MEAN and dtype in INTEGERS:
        kind = _RESULT_KINDS[numbers.result] if final else _ACCUMULATOR
        return _kernel_kind(f"mean_{_SHORT[dtype]}_mixed", False, 1, nbytes, kind)
    verb = {ReduceOp.MEAN: "sum"}.get(op, op.value)
    if dtype in COMPLEX:
        half = nbytes[0] // 2
        name = f"sum_f{8 * half}" if verb == "sum" else f"product_c{16 * half}"
        return _variant(name, sources, 2, (half, half, half))
    if dtype == "bool":
        return _variant("max_bool" if verb == "max" else "min_bool", sources, 1, nbytes)
    short = _SHORT[dtype]
    if dtype in INTEGERS and verb in ("sum", "product"):
        short = short.replace("i", "u")  # sums and products of signed and unsigned integers have the same bits
    name = f"{verb}_{short}"
    if numbers.accumulator != dtype and (wide or not final):
        return _kernel_kind(f"{name}_mixed", False, 1, nbytes, 0 if final else _ACCUMULATOR)
    return _variant(name, sources, 1, nbytes)


def _variant(name: str, sources: int, units: int, nbytes: tuple[int, int, int]) -> KernelKind:
    """Return the kernel ``name``, compiled for exactly this number of sources if possible, otherwise for any number."""
    fixed = name in _FIXED and 2 <= sources <= _MAX_FIXED
    return _kernel_kind(f"{name}_{sources if fixed else 'any'}", name.startswith("sum"), units, nbytes, 0)
