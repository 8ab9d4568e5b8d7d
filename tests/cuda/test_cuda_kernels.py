"""The CUDA kernels without a GPU: their body runs on the host under sanitizers and gives the bits of the reference.

Kernels that read the memory of other devices share the devices' links.
"""

import ctypes
import re
import struct
import subprocess
from collections import Counter
from functools import cache

import cuda_launches as launches
import ml_dtypes  # noqa: F401 - gives NumPy the dtype "bfloat16"
import numpy as np
import pytest
from budget import count
from cuda_cases import ALGORITHMS, NUMPY, made_layouts
from fake_cuda import FLAGS, KERNELS, host_library, printed
from paths import NATIVE

from crossreduce.engines.cuda.batching import operations
from crossreduce.engines.cuda.encoding import split_launch
from crossreduce.engines.cuda.kernels import ACCUMULATOR, BFLOAT, HALF, OWN
from crossreduce.ops import COMPLEX, DTYPES, ReduceOp
from crossreduce.packing import Packing
from crossreduce.values import TensorSpec

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def library():
    return ctypes.CDLL(str(host_library()))


def drawn_batches(path, *dtypes, **environment):
    """Check drawn batches of all kernels of ``dtypes`` (default: all) in a new process. Return the number per dtype."""
    found = printed("cuda_launches.py", path, count(300), 1, *dtypes, **environment)
    return {dtype: int(number) for dtype, number in map(str.split, found.splitlines())}


def test_the_body_of_every_kernel_gives_the_bits_of_the_reference():
    """Every kernel gives the bits of the reference, in any order and alignment, in place, and writes only results."""
    counts = drawn_batches(host_library())
    assert sorted(counts) == sorted(DTYPES)
    assert min(counts.values()) >= count(300)


def test_sources_are_read_in_vectors(library):
    """A vector of a source is read at once, or by two reads if it is shifted against the results."""
    for kernel in launches.kernels():
        sources, vectors, wide, narrow = launches.reads(library, kernel, 0)
        assert (wide, narrow < 8 * sources) == (vectors, True), kernel
        sources, vectors, wide, narrow = launches.reads(library, kernel, 1)
        assert wide <= 2 * vectors and narrow < 32 * sources, kernel  # noqa: PT018 - one promise


@pytest.mark.parametrize(
    "dtypes", [["float64", "uint8"], pytest.param(sorted(DTYPES - COMPLEX), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_no_access_is_out_of_bounds_or_misaligned(dtypes, tmp_path):
    """Under sanitizers, drawn batches access no byte beside a source or result, and have no undefined behaviour."""
    rows = {re.sub(r"_(any|mixed|\d)(_large)?$", "", x.name) for x in launches.kernels() if x.dtypes[0] in dtypes}
    lines = (KERNELS / "kernels.inc").read_text().splitlines(keepends=True)
    named = [re.match(r"(KERNEL|MIN_MAX)\((\w+), ", line) for line in lines]
    prefix = {"KERNEL": "", "MIN_MAX": "min_"}
    kept = [line for line, row in zip(lines, named, strict=True) if row is None or prefix[row[1]] + row[2] in rows]
    assert len(kept) < len(lines)
    (tmp_path / "kernels.inc").write_text("".join(kept))  # to compile all kernels takes much longer
    folders, path = [f"-I{tmp_path}", f"-I{KERNELS}"], tmp_path / "cuda_host.so"
    command = ["g++", *FLAGS, "-O0", *SANITIZERS, "-Wno-error", "-Wl,-Bsymbolic", "-shared", *folders]
    subprocess.run([*command, NATIVE / "cuda_host.cpp", "-o", path], check=True, timeout=250)
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    drawn_batches(path, *dtypes, LD_PRELOAD=asan.strip(), ASAN_OPTIONS="detect_leaks=0")


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


@pytest.mark.parametrize("short", NAMES)
def test_conversions_to_halves_are_rounded_correctly(library, short):
    """Values at and beside all middles, subnormals, overflow and NaN are rounded right, and only once.

    float64 that is rounded through float32 would be rounded twice. All bit patterns are widened to their values.
    """
    numbers, bits = magnitudes(short), np.arange(1 << 16, dtype=np.uint16)
    ends = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)  # of all float32, at and beside all middles
    assert not wrong_floats(library, (np.arange(1 << 19, dtype=np.uint32)[:, None] << 13 | ends).ravel(), short)
    middle, lower, upper = (numbers[:-1] + numbers[1:]) / 2, bits[: numbers.size - 1], bits[1 : numbers.size]
    for values, right in (
        (middle, np.where(lower & 1, upper, lower)),
        (np.nextafter(middle, -np.inf), lower),
        (np.nextafter(middle, np.inf), upper),
    ):
        assert not wrong(library, values, right, short) + wrong(library, -values, right | 0x8000, short)
    found, right = converted(library, bits, short), bits.view(NAMES[short]).astype(np.float32)
    assert np.where(np.isnan(right), np.isnan(found), found.view(np.uint32) == right.view(np.uint32)).all()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("short", NAMES)
def test_every_float32_is_rounded_correctly(library, short):
    """All 2^32 bit patterns, as NumPy and ml_dtypes round them; this takes minutes."""
    count = 1 << 22
    for first in range(0, 1 << 32, count):
        assert not wrong_floats(library, np.arange(first, first + count, dtype=np.uint32), short), first


RUNNING = 4 * 60  # blocks of a device that run at a time; a GPU of 60 multiprocessors is small
TILE = 1024  # elements of float32


def all_reduce(algorithm, devices, elements, tensors=1, packing=None):
    """Return the operations of an all-reduce of equal tensors on devices that can read each other's memory."""
    names = tuple(f"cuda:{k}" for k in range(devices))
    specs = (TensorSpec((elements,), "float32"),) * tensors
    (layout,) = made_layouts(algorithm, names, names, specs, packing or Packing(), None, None)
    numbers = NUMPY.numbers(ReduceOp("sum"), "float32", devices)
    readable = ((True,) * devices,) * devices
    return operations(layout, numbers, {name: k for k, name in enumerate(names)}, readable, False)


def reads_over_time(library, launch, devices):
    """Return for each group of tiles that run at once their number, and how many tiles one of them reads by device."""
    parts = [Counter(row % devices for row, _ in part.places[: launch.sources]) for part in launch.parts]
    for reads in parts:
        del reads[launch.device]
    tiles = [number for number, part in enumerate(launch.parts) for _ in range(-(-part.size // TILE))]
    if len(parts) == 1:
        return [(len(tiles), parts[0])]
    tensors = [
        launches.Tensor(size, 0, [0] * launch.sources, [0] * (len(places) - launch.sources))
        for size, _, places in launch.parts
    ]
    streams = library.streams(devices, len(parts))
    table = launches.packed(tensors, [(0, 0, 0, 0)], 1, 1, (4, 4, 4), streams=streams)
    (length,), together = struct.unpack_from("<I", table, 28), 2 if launch.sources <= 2 else 1
    turns = [library.tile_of(table, turn, together) for turn in range(length // together * streams)]
    order = [tile for first in turns for tile in range(first, first + together) if tile < len(tiles)]
    assert sorted(order) == [*range(len(tiles))]
    groups, running = [], RUNNING * together
    for now in (order[first : first + running] for first in range(0, len(order), running)):
        reads = sum((parts[tiles[tile]] for tile in now), Counter())
        groups.append((len(now), {device: count / len(now) for device, count in reads.items()}))
    return groups


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_device_is_read_more_than_others(library, algorithm):
    """With 2 to 16 devices, tiles that run at once read the devices in the proportions of their whole launch.

    So do the launches that run at once: those of ``direct`` read each device evenly.
    """
    for devices in range(2, 17):
        made, together = all_reduce(algorithm, devices, devices * 4 * RUNNING * TILE), {}
        for number, operation in enumerate(made.operations):
            groups, total = reads_over_time(library, operation.work, devices), Counter()
            for size, reads in groups:
                total.update({device: size * count for device, count in reads.items()})
            whole = sum(size for size, _ in groups)
            for _, reads in groups[:-1]:
                for device, read in total.items():
                    assert abs(reads.get(device, 0) - read / whole) <= 0.1, (devices, number, reads)
            step = together.setdefault(number // devices, Counter())
            step.update({device: count / whole for device, count in total.items()})
        if algorithm == "direct":
            assert all(max(step.values()) <= 1.05 * min(step.values()) for step in together.values()), devices


@pytest.mark.parametrize("packing", [Packing(), Packing(num_packs=1)])
def test_each_table_of_many_parts_has_parts_of_all_devices(packing):
    """If a table is split into several launches, each of them reads about as much from each device."""
    for operation in all_reduce("direct", 8, 1000, tensors=400, packing=packing).operations[8:]:
        tables = split_launch(operation.work, False)
        assert len(tables) > 2
        for table in tables[:-1]:  # the last one has the rest
            parts = table["parts"] if isinstance(table, dict) else table[-1]
            sizes = Counter()
            for size, _, places in parts:
                sizes[places[0][0] % 8] += size
            assert len(sizes) == 7
            assert max(sizes.values()) < 1.5 * min(sizes.values()), sizes
