"""The names and units of the CUDA kernels (``native/kernels.inc``), and the code for each compute capability."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...errors import BackendError
from ...ops import COMPLEX, HALVES, INTEGERS, Numbers, ReduceOp
from ...packing import itemsize

MACHINE_CODE: Final = ("sm_70", "sm_80", "sm_90", "sm_100", "sm_120")
"""The machine code in ``kernels.bin``. It runs on GPUs of the same major compute capability: sm_70 on 7.0 and 7.5,
sm_80 on 8.0, 8.6 and 8.9, sm_90 on 9.0, sm_100 on 10.0 and 10.3, and sm_120 on 12.0 and 12.1."""

TEGRA: Final = frozenset({72, 87, 88, 101, 110})
"""Compute capabilities, times ten, of Tegra GPUs (in Jetson and DRIVE systems), which do not run machine code for other
GPUs. The PTX runs on Thor (11.0, which drivers before CUDA 13 call 10.1). There is no code for 7.2, 8.7 and 8.8."""

PTX: Final = "compute_90"
"""The PTX in ``kernels.bin``, for GPUs of compute capability 9.0 or higher without machine code, such as 11.0."""

PTX_DRIVER: Final = 12090
"""The oldest driver that accepts the PTX (version 8.8), as ``cuDriverGetVersion`` returns it: that of CUDA 12.9."""

MAX_STEPS: Final = 64
"""The maximum number of sources of a kernel with an ``Order``, which has one bit per source. Kernels with more sources
combine them one after another."""

MAX_DEPTH: Final = 3
"""The maximum number of values on a kernel's stack."""

MAX_ADDRESSES: Final = 480
"""The maximum number of sources and results of a part, since their addresses must fit into a small table."""

SMALL_NBYTES: Final = 4096 - 64
LARGE_NBYTES: Final = 32760
HEADER_NBYTES: Final = 32
ORDER_NBYTES: Final = 32
PART_NBYTES: Final = 16
"""The maximum bytes of a launch's parameters with a small table, which every driver accepts, or a large one, and the
bytes of a header, an order and a part in them (``native/reduce.cuh``)."""

VECTOR_NBYTES: Final = 16
"""The most bytes of a source that a thread reads at once."""

MAX_FIXED: Final = 8
"""Sums of floating-point numbers are also compiled for each number of sources from 2 to this one. Such kernels read all
sources before they use the first."""

OWN, ACCUMULATOR, FLOAT, HALF, BFLOAT = range(5)
"""The dtypes of the results of kernels named ``_mixed``: that of all results of other kernels; that of the accumulator;
for means of integers, float32, float16 and bfloat16."""

LAYOUT: Final = (
    *("MAX_STEPS", "MAX_DEPTH", "SMALL_NBYTES", "LARGE_NBYTES", "HEADER_NBYTES", "ORDER_NBYTES", "PART_NBYTES"),
    *("VECTOR_NBYTES", "MAX_FIXED", "OWN", "ACCUMULATOR", "FLOAT", "HALF", "BFLOAT"),
)
"""The constants that scripts/build_cuda_kernels writes to ``native/layout.inc``, for C++."""

_SHORT: Final = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "bool": "bool"} | {
    name: name.replace("uint", "u").replace("int", "i") for name in INTEGERS
}
_FIXED: Final = frozenset({"sum_f16", "sum_bf16", "sum_f32", "sum_f64"})
_RESULT_KINDS: Final = {"float64": OWN, "float32": FLOAT, "float16": HALF, "bfloat16": BFLOAT}


def chosen_code(capability: int, driver: int) -> str:
    """Return the name of the code in ``kernels.bin`` for a compute capability, times ten, and a driver's version.

    Raises:
      BackendError: no code runs on such GPUs, or only PTX, which the driver does not accept.

    >>> [chosen_code(capability, 12090) for capability in (86, 90, 110, 130)]
    ['sm_80', 'sm_90', 'compute_90', 'compute_90']
    """
    numbers = [int(name.removeprefix("sm_")) for name in MACHINE_CODE]
    fitting = [number for number in numbers if number // 10 == capability // 10 and number <= capability]
    if fitting and capability not in TEGRA:
        return f"sm_{max(fitting)}"
    given = f"compute capability {capability // 10}.{capability % 10}"
    if capability < int(PTX.removeprefix("compute_")):
        remedy = "a GPU of capability 7.0 or higher; of those in Jetson and DRIVE systems, 10.1 or 11.0"
        raise BackendError.of("there are no CUDA kernels for this device.", given, remedy)
    if driver < PTX_DRIVER:
        given += f", and a driver for CUDA {driver // 1000}.{driver % 1000 // 10}"
        problem = "the CUDA driver is too old for the kernels' PTX."
        raise BackendError.of(
            problem, given, f"a driver for CUDA {PTX_DRIVER // 1000}.{PTX_DRIVER % 1000 // 10} or later"
        )
    return PTX


class KernelKind(NamedTuple):
    """A kernel, and the sizes of the numbers that it reads and writes.

    Args:
      name: the kernel's name, without ``_large``.
      has_large: whether the kernel also exists as ``_large``, for large tables.
      units: the number of units of an element. A unit is a real number: a complex number has two.
      nbytes: the bytes of a unit of the sources, of sources in the accumulator's dtype, and of the results.
      kind: ``OWN``, ``ACCUMULATOR``, ``FLOAT``, ``HALF`` or ``BFLOAT``.
      values: the number of units of a vector, which a thread processes.
    """

    name: str
    has_large: bool
    units: int
    nbytes: tuple[int, int, int]
    kind: int
    values: int


def _kernel_kind(name: str, has_large: bool, units: int, nbytes: tuple[int, int, int], kind: int) -> KernelKind:
    """Return a kernel. Its threads process 16 bytes of a source, or less if the accumulators need many registers.

    Means of integers of 8 and 16 bits accumulate in 32 bits.
    """
    register = 4 if nbytes[0] < 4 else nbytes[1]
    return KernelKind(name, has_large, units, nbytes, kind, min(VECTOR_NBYTES // nbytes[0], 32 // register, 8))


def copy_kernel(dtype: str) -> KernelKind:
    """Return the kernel that copies one source to all results, without a change of any bit."""
    unit = min(itemsize(dtype), 4)
    # The sum of a single unsigned integer is a copy of its bits.
    return _kernel_kind(f"sum_u{8 * unit}_1", True, itemsize(dtype) // unit, (unit, unit, unit), OWN)


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
        kind = _RESULT_KINDS[numbers.result] if final else ACCUMULATOR
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
        return _kernel_kind(f"{name}_mixed", False, 1, nbytes, OWN if final else ACCUMULATOR)
    return _variant(name, sources, 1, nbytes)


def _variant(name: str, sources: int, units: int, nbytes: tuple[int, int, int]) -> KernelKind:
    """Return the kernel ``name``, compiled for exactly this number of sources if possible, otherwise for any number."""
    fixed = name in _FIXED and 2 <= sources <= MAX_FIXED
    return _kernel_kind(f"{name}_{sources if fixed else 'any'}", name.startswith("sum"), units, nbytes, OWN)
