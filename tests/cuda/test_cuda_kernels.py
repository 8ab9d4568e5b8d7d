"""The CUDA kernels without a GPU: their body runs on the host under sanitizers and gives the bits of the reference."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import cuda_launches as launches
import cuda_roundings as roundings
from cuda_faults import some_faults
from paths import ROOT, SUPPORT, program

NATIVE = ROOT / "src/crossreduce/engines/cuda/native"
# Its own functions, even where the fake driver, which has the same ones, was loaded before.
OWN_FUNCTIONS = "-Wl,-Bsymbolic"
FLAGS = ("-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", OWN_FUNCTIONS)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
BATCHES = 300  # of each dtype
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


def built(folder, *flags, source=NATIVE):
    """Compile the body of the kernels for the host; return the library's path."""
    library = folder / "cuda_host.so"
    command = ["g++", *FLAGS, *flags, f"-I{source}", str(SUPPORT / "native" / "cuda_host.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, timeout=250)
    return library


def rows_of(dtype):
    """Return the names of the rows of kernels.inc that a dtype needs."""
    return {launches.kernel_name(numbers)[0] for numbers in launches.all_numbers() if numbers.dtype == dtype}


def faulty(folder, rows, file, old, new, *flags):
    """Compile the body with a fault and only some rows of kernels.inc, in a new folder: all rows take much longer."""
    source = folder / "native"
    shutil.copytree(NATIVE, source)
    lines = (source / "kernels.inc").read_text().splitlines(keepends=True)
    named = [re.match(r"(KERNEL|MIN_MAX)\((\w+), ", line) for line in lines]
    prefix = {"KERNEL": "", "MIN_MAX": "min_"}
    kept = [line for line, row in zip(lines, named, strict=True) if row is None or prefix[row[1]] + row[2] in rows]
    assert len(kept) < len(lines)
    (source / "kernels.inc").write_text("".join(kept))
    text = (source / file).read_text()
    assert text.count(old) == 1, old
    (source / file).write_text(text.replace(old, new))
    return built(folder, "-O0", *flags, "-Wno-error", source=source)


def checked(library, batches, *dtypes, sanitized=False):
    """Run drawn batches of every kernel of all or some dtypes in a process of its own; return the finished process."""
    environment = dict(os.environ)
    if sanitized:
        asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
        environment |= {"LD_PRELOAD": asan.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-W", "ignore", str(program("cuda_launches.py")), str(library), str(batches), "1"]
    return subprocess.run(
        [*command, *dtypes], capture_output=True, text=True, check=False, env=environment, timeout=250
    )


def test_the_body_of_every_kernel_gives_the_bits_of_the_reference(tmp_path):
    """Drawn batches of every kernel: several parts, orders, alignments, in place; only the bytes of results change."""
    library = built(tmp_path, "-Og", *SANITIZERS)
    dtypes, counts = sorted({numbers.dtype for numbers in launches.all_numbers()}), {}
    with ThreadPoolExecutor(2) as pool:
        for ran in pool.map(lambda k: checked(library, BATCHES, *dtypes[k::2], sanitized=True), range(2)):
            assert ran.returncode == 0, ran.stderr[-2000:]
            counts |= dict(line.split() for line in ran.stdout.splitlines())
    assert sorted(counts) == dtypes
    assert len(counts) == 15
    assert min(map(int, counts.values())) >= BATCHES


def test_faults_are_found(tmp_path):
    """Each fault of the body is found by the same kind of batches, and without a fault these pass."""

    def survives(number):
        file, old, new, dtype, *report = (FAULTS + REPORTED_FAULTS)[number]
        flags = SANITIZERS if report else ()
        library = faulty(tmp_path / str(number), rows_of(dtype), file, old, new, *flags)
        ran = checked(library, 400, dtype, sanitized=bool(report))
        assert report or ran.returncode <= 0 or "AssertionError" in ran.stderr, (old, ran.stderr[-2000:])
        return ran.returncode == 0 or (report and report[0] not in ran.stderr)

    everyone = checked(built(tmp_path, "-O0"), 400)
    assert everyone.returncode == 0, everyone.stderr[-2000:]
    with ThreadPoolExecutor(2) as pool:
        numbers = some_faults(range(len(FAULTS + REPORTED_FAULTS)))
        survivors = list(pool.map(survives, numbers))
    found = zip(numbers, survivors, strict=True)
    assert not any(survivors), [(FAULTS + REPORTED_FAULTS)[k] for k, survived in found if survived]


def is_wrong(library):
    """Return whether a library rounds or widens a value wrongly, of those that are notable."""
    loaded = ctypes.CDLL(str(library))
    return any(
        roundings.wrong_floats(loaded, roundings.notable_bits(short), short)
        or roundings.wrong_doubles(loaded, short)
        or roundings.wrong_widened(loaded, short)
        for short in roundings.NAMES
    )


def test_conversions_to_halves_are_rounded_correctly(tmp_path):
    """Three million values at all middles, subnormals, overflow and NaN; scripts/cuda_roundings checks all 2**32."""
    assert not is_wrong(built(tmp_path, "-O0"))
    rows = {name.removesuffix("_mixed") for name in roundings.KERNELS}
    for number, fault in some_faults(list(enumerate(ROUNDING_FAULTS))):
        assert is_wrong(faulty(tmp_path / str(number), rows, *fault)), fault
