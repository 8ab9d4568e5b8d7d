"""The CUDA kernels without a GPU: their body runs on the host under sanitizers and gives the bits of the reference."""

import ctypes
import re
import shutil
import subprocess

import cuda_launches as launches
import cuda_roundings as roundings
import pytest
from budget import count, some
from compiled import compiled
from fake_cuda import FLAGS, KERNELS, host_bodies, ran
from paths import NATIVE

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Faults of the body: the file, the text, what replaces it, and the dtype whose batches find it.
FAULTS = [
    ("reduce.cuh", "part.head + start", "start", "float32"),  # vectors that are not aligned
    ("reduce.cuh", "start + COUNT : part.head", "start + COUNT : part.head - 1", "float64"),
    ("reduce.cuh", "start + COUNT < part.head ? start + COUNT : part.head", "part.head", "uint8"),  # in place: twice
    ("reduce.cuh", "end = range ? from : first + TILE", "end = from", "float32"),  # parts of any alignment
    ("reduce.cuh", "copy(second, third);", "", "float32"),  # a value under two others
    ("reduce.cuh", "copy(third, second);", "", "float64"),
    ("reduce.cuh", "Op::combine(second, top)", "Op::combine(top, second), copy(second, top)", "float32"),  # b before a
    ("reduce.cuh", "if (order.fold & bit) fold();", "", "int32"),
    ("reduce.cuh", "if (order.fold_twice & bit) fold();", "", "float32"),
    ("reduce.cuh", "value[k] / divisor", "value[k] * (1 / divisor)", "float32"),  # a mean that is rounded twice
    ("reduce.cuh", ".tile <= tile) low", ".tile < tile) low", "int8"),  # the part of a tile
    ("reduce.cuh", "tile += blocks", "tile += blocks + 1", "int64"),
    ("reduce.cuh", "read_vector(at[s + 1] + offset", "read_vector(at[s] + offset", "uint32"),  # the source before
    ("reduce.cuh", "sizeof(Value), x)", "sizeof(Unit), x)", "float16"),  # a source with the accumulator's dtype
    ("reduce.cuh", "write_words(to + static_cast<uint64_t>(k * NBYTES)", "write_words(to", "bfloat16"),  # wide results
    ("reduce.cuh", "launch.kind == ACCUMULATOR ||", "", "float16"),
    ("reduce.cuh", "launch.kind == HALF ?", "launch.kind == BFLOAT ?", "int16"),
    ("numbers.cuh", "a[k] = p - q", "a[k] = p + q", "complex64"),
    ("numbers.cuh", "MAXIMUM ? a[k] >= b[k]", "MAXIMUM ? a[k] > b[k]", "float32"),  # -0 and 0
    ("numbers.cuh", " | (a[k] != a[k])", "", "float32"),  # a NaN that is lost
    ("numbers.cuh", "(first & !nan(b[k]))", "first", "float16"),
    ("numbers.cuh", "-(x & 0x7fff)", "(x & 0x7fff)", "bfloat16"),  # negative numbers are ordered as positive ones
    ("numbers.cuh", "(a[k] | b[k]) != 0", "(a[k] & b[k]) != 0", "bool"),
]
# Faults that a sanitizer reports: the same, and a part of its report.
REPORTED_FAULTS = [
    ("reduce.cuh", "unit + COUNT <= part.size", "unit < part.size", "float64", "AddressSanitizer"),
    ("reduce.cuh", "k < end && k < part.size", "k < end", "uint8", "AddressSanitizer"),
    ("reduce.cuh", "part.is_aligned && unit", "unit", "int64", "misaligned address"),
    ("reduce.cuh", "(part.order).wide >> (s % MAX_STEPS) & 1)\n", "(part.order).wide >> s & 1)\n", "int16", "shift"),
]
# Faults of conversions, which the roundings find.
ROUNDING_FAULTS = [
    ("numbers.cuh", "0x7fff + (bits >> 16 & 1)", "0x8000"),  # ties away from zero
    ("numbers.cuh", "0xfff + (rest >> 13 & 1)", "0x1000"),
    ("numbers.cuh", "rest >= 0x477ff000", "rest >= 0x477fefff"),  # the last number before the tie with infinity
    ("numbers.cuh", "rest > 0x7f800000", "rest >= 0x7f800000"),  # infinity
    ("numbers.cuh", "rest < 0x38800000", "rest < 0x38000000"),  # the largest subnormal numbers
    ("numbers.cuh", "if (x != x) return", "if (false) return"),  # a NaN that becomes infinity
    ("numbers.cuh", "back != x && x == x && !(bits & 1)", "false"),  # float64 is rounded twice
    ("numbers.cuh", "~0u : 1u", "1u : ~0u"),  # to odd, but away from the number
    ("numbers.cuh", "rest > 0x7c00", "rest >= 0x7c00"),  # a half that is infinite
    ("numbers.cuh", "0x1p-24f", "0x1p-25f"),  # subnormal halves
]


@pytest.fixture(scope="module")
def library():
    """Return the path of the body of all kernels, which calls its own functions even beside the fake driver's."""
    return compiled("cuda_host.so", ["g++", "-shared", "-Wl,-Bsymbolic"], [host_bodies()])


def with_rows(folder, dtypes, *flags, fault=None):
    """Compile only the kernels for some dtypes, as all take much longer, with a fault or none, in a new folder."""
    rows = {launches.kernel_name(numbers)[0] for numbers in launches.all_numbers() if numbers.dtype in dtypes}
    source = folder / "native"
    shutil.copytree(KERNELS, source)
    lines = (source / "kernels.inc").read_text().splitlines(keepends=True)
    named = [re.match(r"(KERNEL|MIN_MAX)\((\w+), ", line) for line in lines]
    prefix = {"KERNEL": "", "MIN_MAX": "min_"}
    kept = [line for line, row in zip(lines, named, strict=True) if row is None or prefix[row[1]] + row[2] in rows]
    assert len(kept) < len(lines)
    (source / "kernels.inc").write_text("".join(kept))
    if fault:
        file, old, new = fault
        text = (source / file).read_text()
        assert text.count(old) == 1, old
        (source / file).write_text(text.replace(old, new))
    command = ["g++", *FLAGS, *flags, "-Wno-error", "-Wl,-Bsymbolic", "-shared", f"-I{source}"]
    subprocess.run([*command, NATIVE / "cuda_host.cpp", "-o", folder / "cuda_host.so"], check=True, timeout=250)
    return folder / "cuda_host.so"


def checked(library, batches, *dtypes, sanitized=False):
    """Run drawn batches of every kernel of all or some dtypes in a process of its own; return the finished process."""
    environment = {}
    if sanitized:
        asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
        environment = {"LD_PRELOAD": asan.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    return ran("cuda_launches.py", library, batches, 1, *dtypes, **environment)


def test_the_body_of_every_kernel_gives_the_bits_of_the_reference(library):
    """Drawn batches of every kernel: several parts, orders, alignments, in place; only the bytes of results change."""
    done = checked(library, count(300))
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert sorted(counts) == sorted({numbers.dtype for numbers in launches.all_numbers()})
    assert len(counts) == 15
    assert min(map(int, counts.values())) >= count(300)


@pytest.mark.parametrize(
    "dtypes", [["float64", "uint8"], pytest.param(sorted(launches.SHORT), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_no_access_is_out_of_bounds_or_misaligned(dtypes, tmp_path):
    """Under sanitizers, drawn batches access no byte beside a source or result, and have no undefined behaviour."""
    done = checked(with_rows(tmp_path, dtypes, "-Og", *SANITIZERS), count(300), *dtypes, sanitized=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_faults_are_found(tmp_path):
    """Each fault of the body is found by the same kind of batches."""
    for number, (*fault, dtype, report) in enumerate(some([*((*each, "") for each in FAULTS), *REPORTED_FAULTS])):
        flags = SANITIZERS if report else ()
        library = with_rows(tmp_path / str(number), [dtype], "-O0", *flags, fault=fault)
        done = checked(library, 400, dtype, sanitized=bool(report))
        assert done.returncode != 0, fault
        assert report or done.returncode < 0 or "AssertionError" in done.stderr, (fault, done.stderr[-2000:])
        assert report in done.stderr, (fault, done.stderr[-2000:])


def is_wrong(library):
    """Return whether a library rounds or widens a value wrongly, of those that are notable."""
    loaded = ctypes.CDLL(str(library))
    return any(
        roundings.wrong_floats(loaded, roundings.notable_bits(short), short)
        or roundings.wrong_doubles(loaded, short)
        or roundings.wrong_widened(loaded, short)
        for short in roundings.NAMES
    )


def test_conversions_to_halves_are_rounded_correctly(library):
    """Three million values at all middles, subnormals, overflow and NaN; scripts/cuda_roundings checks all 2**32."""
    assert not is_wrong(library)


@pytest.mark.slow
def test_faults_of_conversions_are_found(tmp_path):
    """Each fault of a conversion rounds a notable value wrongly."""
    for number, fault in enumerate(some(ROUNDING_FAULTS)):
        rows = ["float16", "bfloat16", "int32"]
        assert is_wrong(with_rows(tmp_path / str(number), rows, "-O0", fault=fault)), fault
