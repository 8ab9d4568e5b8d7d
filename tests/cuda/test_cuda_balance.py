"""How kernels that read the memory of other devices share the devices' links."""

import ctypes
import struct
from collections import Counter

import cuda_launches
import pytest
from cuda_cases import ALGORITHMS, NUMPY, made_layouts
from fake_cuda import host_library

from crossreduce.engines.cuda.batching import operations
from crossreduce.engines.cuda.encoding import split_launch
from crossreduce.ops import ReduceOp
from crossreduce.packing import Packing
from crossreduce.values import TensorSpec

RUNNING = 4 * 60  # blocks of a device that run at a time; a GPU of 60 multiprocessors is small
TILE = 1024  # elements of float32


@pytest.fixture(scope="module")
def library():
    return ctypes.CDLL(str(host_library()))


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
        cuda_launches.Tensor(size, 0, [0] * launch.sources, [0] * (len(places) - launch.sources))
        for size, _, places in launch.parts
    ]
    streams = library.streams(devices, len(parts))
    table = cuda_launches.packed(tensors, [(0, 0, 0, 0)], 1, 1, (4, 4, 4), streams=streams)
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
                for device, count in total.items():
                    assert abs(reads.get(device, 0) - count / whole) <= 0.1, (devices, number, reads)
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
