"""The CUDA kernels without a GPU: their body runs on the host under sanitizers and gives the bits of the reference."""

import ctypes
import re
import shutil
import subprocess

import cuda_launches as launches
import cuda_roundings as roundings
import numpy as np
import pytest
from budget import count
from fake_cuda import FLAGS, KERNELS, host_library, ran
from paths import NATIVE

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def library():
    return host_library()


def drawn_batches(library, *dtypes, **environment):
    """Check drawn batches of all kernels of ``dtypes`` (default: all) in a new process. Return the number per dtype."""
    done = ran("cuda_launches.py", library, count(300), 1, *dtypes, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return {dtype: int(number) for dtype, number in map(str.split, done.stdout.splitlines())}


def test_the_body_of_every_kernel_gives_the_bits_of_the_reference(library):
    """Every kernel gives the bits of the reference, in any order and alignment, in place, and writes only results."""
    counts = drawn_batches(library)
    assert sorted(counts) == sorted({numbers.dtype for numbers in launches.all_numbers()})
    assert len(counts) == 15
    assert min(counts.values()) >= count(300)


def test_sources_are_read_in_vectors(library):
    """A vector of a source is read at once, or by two reads if it is shifted against the results."""
    loaded = ctypes.CDLL(str(library))
    for numbers in launches.all_numbers():
        for kernel in launches.kernels_of(numbers):
            sources, vectors, wide, narrow = launches.reads(loaded, numbers, kernel, 0)
            assert (wide, narrow < 8 * sources) == (vectors, True), kernel
            sources, vectors, wide, narrow = launches.reads(loaded, numbers, kernel, 1)
            assert wide <= 2 * vectors and narrow < 32 * sources, kernel  # noqa: PT018 - one promise


@pytest.mark.parametrize(
    "dtypes", [["float64", "uint8"], pytest.param(sorted(launches.SHORT), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_no_access_is_out_of_bounds_or_misaligned(dtypes, tmp_path):
    """Under sanitizers, drawn batches access no byte beside a source or result, and have no undefined behaviour."""
    rows = {launches.kernel_name(numbers)[0] for numbers in launches.all_numbers() if numbers.dtype in dtypes}
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


def test_conversions_to_halves_are_rounded_correctly(library):
    """Values at all middles, subnormals, overflow and NaN are rounded right."""
    loaded = ctypes.CDLL(str(library))
    for short in roundings.NAMES:
        assert not roundings.wrong_floats(loaded, roundings.notable_bits(short), short)
        assert not roundings.wrong_doubles(loaded, short)
        assert not roundings.wrong_widened(loaded, short)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("short", roundings.NAMES)
def test_every_float32_is_rounded_correctly(library, short):
    """All 2^32 bit patterns, as NumPy and ml_dtypes round them; this takes minutes."""
    loaded, count = ctypes.CDLL(str(library)), 1 << 22
    for first in range(0, 1 << 32, count):
        assert not roundings.wrong_floats(loaded, np.arange(first, first + count, dtype=np.uint32), short), first
