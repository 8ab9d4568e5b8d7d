"""How kernels that read the memory of other devices share the devices' links, in a model of fair shares."""

import ctypes
import struct
from collections import Counter
from unittest import mock

import cuda_launches
import pytest
from cuda_cases import ALGORITHMS, NUMPY
from fake_cuda import host_library

from crossreduce.engines.cuda.batching import operations
from crossreduce.engines.cuda.encoding import split_launch
from crossreduce.ops import ReduceOp
from crossreduce.packing import Packing
from crossreduce.reduction.pipeline import layouts
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
    with mock.patch.object(type(NUMPY), "require", return_value=None):
        (layout,) = layouts(NUMPY, algorithm, names, names, specs, packing or Packing(), None, None)
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
    for first in range(0, len(order), running):
        reads = Counter()
        for tile in order[first : first + running]:
            reads += parts[tiles[tile]]
        size = min(running, len(order) - first)
        groups.append((size, {device: count / size for device, count in reads.items()}))
    return groups


def fair_rates(running):
    """Return the rate of each operation, in tiles: of its device and reads. Links, of rate 1, are shared fairly."""
    used = {
        number: {("in", device): sum(reads.values()), **{("out", owner): count for owner, count in reads.items()}}
        for number, (device, reads) in running.items()
    }
    rates, free = dict.fromkeys(used, 0.0), {number for number in used if used[number]["in", running[number][0]]}
    left = dict.fromkeys([link for links in used.values() for link in links], 1.0)
    while free:
        load = Counter()
        for number in free:
            load.update(used[number])
        step = min(left[link] / count for link, count in load.items() if count)
        full = set()
        for link, count in load.items():
            left[link] -= step * count
            full |= {link} if count and left[link] < 1e-9 else set()
        for number in free:
            rates[number] += step
        free = {number for number in free if not full & {link for link, count in used[number].items() if count}}
    return rates


def simulated(made, groups_of):
    """Return the time of operations, in tiles of a link, and the most devices that read one device at a time.

    An operation begins after those before it in its stream and those that it waits for.
    """
    groups = [groups_of(operation.work) for operation in made.operations]
    last, after = {}, []
    for number, operation in enumerate(made.operations):
        after.append({*operation.waits, last.get(operation.stream, -1)} - {-1})
        last[operation.stream] = number
    now, most, done, at, left = 0.0, 0.0, set(), [0] * len(groups), [float(each[0][0]) for each in groups]
    while len(done) < len(groups):
        begun = [number for number in range(len(groups)) if number not in done and after[number] <= done]
        reads = {number: (made.operations[number].work.device, groups[number][at[number]][1]) for number in begun}
        rates = fair_rates(reads)
        step = min(left[number] / rates[number] if rates[number] else 0.0 for number in begun)
        now += step
        readers = Counter()
        for number in begun:
            size = sum(reads[number][1].values())
            readers.update({owner: count / size for owner, count in reads[number][1].items()})
            left[number] -= step * rates[number] if rates[number] else left[number]
            if left[number] < 1e-6:
                at[number] += 1
                if at[number] == len(groups[number]):
                    done.add(number)
                else:
                    left[number] = float(groups[number][at[number]][0])
        most = max(most, *readers.values(), 0.0) if step > 1e-9 else most
    return now, most


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_device_is_read_more_than_others(library, algorithm):
    """With 2 to 16 devices, launches take as long as if they read all of their parts evenly at any time.

    ``direct`` takes the time of the lower bound, and no device is ever read by many devices while others are idle.
    """
    for devices in range(2, 17):
        elements = devices * 4 * RUNNING * TILE

        def groups_of(launch, devices=devices):
            return reads_over_time(library, launch, devices)

        def evenly(launch):
            total, groups = Counter(), groups_of(launch)
            for size, reads in groups:
                total.update({device: size * count for device, count in reads.items()})
            size = sum(size for size, _ in groups)
            return [(size, {device: count / size for device, count in total.items()})]

        made = all_reduce(algorithm, devices, elements)
        (took, most), (ideal, _) = simulated(made, groups_of), simulated(made, evenly)
        assert took <= 1.05 * ideal, (devices, took / ideal)
        if algorithm == "direct":
            assert took <= 1.05 * 2 * (devices - 1) / devices * elements / TILE, devices
            assert most <= 1.2, (devices, most)


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
