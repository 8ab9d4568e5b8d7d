"""The CUDA kernels without a GPU: their body runs on the host under sanitizers and gives the bits of the reference."""

import ctypes
import re
import shutil
import subprocess
from functools import cache

import cuda_launches as launches
import ml_dtypes  # noqa: F401 - gives NumPy the dtype "bfloat16"
import numpy as np
import pytest
from budget import count
from fake_cuda import FLAGS, KERNELS, host_library, printed
from paths import NATIVE

from crossreduce.engines.cuda.kernels import ACCUMULATOR, BFLOAT, HALF, OWN
from crossreduce.ops import COMPLEX, DTYPES

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def library():
    return host_library()


def drawn_batches(library, *dtypes, **environment):
    """Check drawn batches of all kernels of ``dtypes`` (default: all) in a new process. Return the number per dtype."""
    found = printed("cuda_launches.py", library, count(300), 1, *dtypes, **environment)
    return {dtype: int(number) for dtype, number in map(str.split, found.splitlines())}


def test_the_body_of_every_kernel_gives_the_bits_of_the_reference(library):
    """Every kernel gives the bits of the reference, in any order and alignment, in place, and writes only results."""
    counts = drawn_batches(library)
    assert sorted(counts) == sorted(DTYPES)
    assert min(counts.values()) >= count(300)


def test_sources_are_read_in_vectors(library):
    """A vector of a source is read at once, or by two reads if it is shifted against the results."""
    loaded = ctypes.CDLL(str(library))
    for kernel in launches.kernels():
        sources, vectors, wide, narrow = launches.reads(loaded, kernel, 0)
        assert (wide, narrow < 8 * sources) == (vectors, True), kernel
        sources, vectors, wide, narrow = launches.reads(loaded, kernel, 1)
        assert wide <= 2 * vectors and narrow < 32 * sources, kernel  # noqa: PT018 - one promise


@pytest.mark.parametrize(
    "dtypes", [["float64", "uint8"], pytest.param(sorted(DTYPES - COMPLEX), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_no_access_is_out_of_bounds_or_misaligned(dtypes, tmp_path):
    """Under sanitizers, drawn batches access no byte beside a source or result, and have no undefined behaviour."""
    rows = {re.sub(r"_(any|mixed|\d)(_large)?$", "", x.name) for x in launches.kernels() if x.dtypes[0] in dtypes}
    shutil.copytree(KERNELS, tmp_path / "native")
    table = tmp_path / "native" / "kernels.inc"  # to compile all kernels takes much longer
    lines = table.read_text().splitlines(keepends=True)
    named = [re.match(r"(KERNEL|MIN_MAX)\((\w+), ", line) for line in lines]
    prefix = {"KERNEL": "", "MIN_MAX": "min_"}
    kept = [line for line, row in zip(lines, named, strict=True) if row is None or prefix[row[1]] + row[2] in rows]
    assert len(kept) < len(lines)
    table.write_text("".join(kept))
    command = ["g++", *FLAGS, "-O0", *SANITIZERS, "-Wno-error", "-Wl,-Bsymbolic", "-shared", f"-I{table.parent}"]
    library = tmp_path / "cuda_host.so"
    subprocess.run([*command, NATIVE / "cuda_host.cpp", "-o", library], check=True, timeout=250)
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    drawn_batches(library, *dtypes, LD_PRELOAD=asan.strip(), ASAN_OPTIONS="detect_leaks=0")


# The kernels round a sum of one source that has the accumulator's dtype, float32, or a mean of float64 values. The
# right results for float64, which ml_dtypes would round twice, follow from the numbers of the half dtype: between two
# neighbours, all values below their middle give the lower one, all above the upper one, and the middle the even one.
INFINITE = {"f16": 0x7C00, "bf16": 0x7F80}
NAMES = {"f16": "float16", "bf16": "bfloat16"}


@cache
def magnitudes(short):
    """Return the float64 values of a half dtype's bit patterns from 0 to infinity, which counts as a power of 2."""
    bits = np.arange(INFINITE[short] + 1, dtype=np.uint16)
    numbers = bits.view(NAMES[short]).astype(np.float64)
    numbers[-1] = 2.0 ** (16 if short == "f16" else 128)
    return numbers


def converted(library, values, short):
    """Return what a kernel makes of values: bits of a half dtype for float32 and float64, and float32 for such bits."""
    name, nbytes, kind = {
        "f": (f"sum_{short}_mixed", (2, 4, 2), OWN),
        "d": ("mean_i32_mixed", (4, 8, 2), HALF if short == "f16" else BFLOAT),  # these means have float64 values
        "H": (f"sum_{short}_mixed", (2, 4, 4), ACCUMULATOR),
    }[values.dtype.char]
    result = np.empty(values.size, np.float32 if nbytes[2] == 4 else np.uint16)
    tensors = [launches.Tensor(values.size, 0, [values.ctypes.data], [result.ctypes.data])]
    launch = launches.packed(tensors, [(0, 0, 0, nbytes[2] == 2)], 1, 1, nbytes, kind)
    getattr(library, name)(ctypes.create_string_buffer(launch, launches.SMALL), ctypes.c_uint32(7))
    return result


def wrong(library, values, right, short):
    """Return how many values are rounded to other bits of a half dtype than ``right``. All NaNs are equal."""
    got, infinite = converted(library, values, short), INFINITE[short]
    return int(((got != right) & ~((got & 0x7FFF > infinite) & (right & 0x7FFF > infinite))).sum())


def wrong_floats(library, bits, short):
    """Return how many bit patterns of float32 are not rounded correctly."""
    with np.errstate(all="ignore"):
        right = bits.view(np.float32).astype(NAMES[short]).view(np.uint16)
    return wrong(library, bits.view(np.float32), right, short)


@cache
def notable_bits(short):
    """Return bit patterns of float32 of both signs: five around every middle, others at zero, infinity and NaNs."""
    numbers = magnitudes(short)
    middle = ((numbers[:-1] + numbers[1:]) / 2).astype(np.float32).view(np.uint32)
    at = middle.astype(np.int64)[:, None] + np.arange(-2, 3)
    ends = [np.arange(1 << 16), np.arange(0x7F7FFF00, 0x7F810000), np.arange(0x7FBFFF00, 0x7FC00100)]
    ends += [np.arange(0x7FFFFF00, 1 << 31), np.random.default_rng(3).integers(0, 1 << 31, 1 << 19)]
    magnitude = np.unique(np.concatenate([at.ravel(), *ends])).astype(np.uint32)
    return np.concatenate([magnitude, magnitude | np.uint32(1 << 31)])


@pytest.mark.parametrize("short", NAMES)
def test_conversions_to_halves_are_rounded_correctly(library, short):
    """Values at and beside all middles, subnormals, overflow and NaN are rounded right, and only once.

    float64 that is rounded through float32 would be rounded twice. All bit patterns are widened to their values.
    """
    loaded, numbers, bits = ctypes.CDLL(str(library)), magnitudes(short), np.arange(1 << 16, dtype=np.uint16)
    assert not wrong_floats(loaded, notable_bits(short), short)
    middle, lower, upper = (numbers[:-1] + numbers[1:]) / 2, bits[: numbers.size - 1], bits[1 : numbers.size]
    for values, right in (
        (middle, np.where(lower & 1, upper, lower)),
        (np.nextafter(middle, -np.inf), lower),
        (np.nextafter(middle, np.inf), upper),
    ):
        assert not wrong(loaded, values, right, short) + wrong(loaded, -values, right | 0x8000, short)
    found, right = converted(loaded, bits, short), bits.view(NAMES[short]).astype(np.float32)
    assert np.where(np.isnan(right), np.isnan(found), found.view(np.uint32) == right.view(np.uint32)).all()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("short", NAMES)
def test_every_float32_is_rounded_correctly(library, short):
    """All 2^32 bit patterns, as NumPy and ml_dtypes round them; this takes minutes."""
    loaded, count = ctypes.CDLL(str(library)), 1 << 22
    for first in range(0, 1 << 32, count):
        assert not wrong_floats(loaded, np.arange(first, first + count, dtype=np.uint32), short), first
