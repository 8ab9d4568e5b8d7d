"""Layouts of the CUDA engine on the fake driver, with the arrays and streams of their callers, for cuda_runs.py."""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from unittest import mock

import cuda_launches
import numpy as np
from fake_cuda import FOREIGN_CONTEXT, MANAGED, MAPPED, PLAIN, POOL

import crossreduce as cr
from crossreduce.engines import cuda, host
from crossreduce.engines.base import LoweredBuffer
from crossreduce.engines.cuda.memory import DeviceMemory, Operands
from crossreduce.frameworks import get
from crossreduce.lowering import Program
from crossreduce.ops import ReduceOp, copy_numbers
from crossreduce.packing import Packing
from crossreduce.reduction.pipeline import layouts
from crossreduce.values import TensorSpec

NUMPY = get("numpy")
ALGORITHMS = ("one_device", "direct", "one_shot", "hierarchical_copy", "ring", "halving_doubling", "recursive_doubling")
PLACES = {  # the physical device of each replica
    "one": (0,) * 8,
    "eight": tuple(range(8)),
    "two": (0, 1) * 4,
    "five": (4, 0, 1, 2, 3),
    "seven": (0, 1, 2, 0, 1, 2, 0),
    "pair": (2, 3),
    "single": (1,),
}


class Memory(DeviceMemory):
    """NumPy arrays in the fake driver's memory, with an allocator that reuses freed memory in the order of a stream."""

    def __init__(self, fake):
        self.fake, self.devices, self.free = fake, {}, {}
        self.kinds = {}  # of memory that is given, for results, or temporary, if it is not PLAIN
        self.is_strided = False  # whether operands are copies, as for strided arrays
        self.threads, self.is_quiet = threading.local(), False
        for device in range(8):  # this makes the contexts, as a framework would have
            fake.memory(1, device)

    def streams(self):
        return self.threads.__dict__.setdefault("streams", {})

    def stream(self, device):
        if device not in self.streams():
            self.streams()[device] = 0 if device % 3 == 2 else self.fake.stream(device)  # 0: the default stream
        return self.streams()[device]

    def array(self, size, dtype, device, shift=0, use="given"):
        """Return an array, whose memory its earlier owner, in the current stream, still writes into.

        The memory may be of another kind now, as if the allocator had meanwhile returned it to the driver.
        """
        kind = np.dtype(dtype)
        nbytes = -(-(size * kind.itemsize + shift + 1) // 512) * 512
        stream = self.stream(device)
        kept = self.free.setdefault((device, stream, nbytes), [])
        address = kept.pop() if kept else self.fake.memory(nbytes, device)
        self.fake.kind(address, self.kinds.get(use, PLAIN))
        if not self.is_quiet:
            self.fake.write(address, bytes(nbytes), stream, device)
        block = (ctypes.c_uint8 * nbytes).from_address(address)
        made = np.frombuffer(block, np.uint8)[shift : shift + size * kind.itemsize].view(kind)
        self.devices[made.ctypes.data if size else 0] = (device, address, nbytes, stream)
        return made

    def release_all(self):
        """Free all arrays, after a call has failed."""
        for address in list(self.devices):
            self.release(address)

    def synchronize(self, device):
        """Wait for the thread's current stream."""
        self.fake.on(device)
        self.fake.call("cuStreamSynchronize", self.stream(device))

    def capturing(self, device):
        """Let a new stream, which can be captured, be the current one."""
        self.streams()[device] = self.fake.stream(device)
        return self.streams()[device]

    def release(self, begin):
        """Free the array at an address. Its next owner, in the same stream, writes into it at once."""
        device, address, nbytes, stream = self.devices.pop(begin)
        if not self.is_quiet:
            self.fake.write(address, bytes(nbytes), stream, device)
        self.free[device, stream, nbytes].append(address)

    def operands(self, arrays, devices):
        if not self.is_strided:
            return Operands([[x.ctypes.data for x in row] for row in arrays], arrays)

        def copied(x, device):
            owner, address = self.scratch(x.nbytes, device) if x.size else (None, 0)
            self.fake.on(device)
            self.fake.call("cuMemcpyAsync", address, x.ctypes.data, x.nbytes, self.stream(device))
            return owner, address

        copies = [list(map(copied, row, devices)) for row in arrays]
        return Operands([[address for _, address in row] for row in copies], arrays, copies)

    def address(self, array):
        return array.ctypes.data

    def allocate(self, shape, dtype, device):
        return self.array(int(np.prod(shape)), np.uint8 if dtype == "bool" else dtype, device, use="results")

    def scratch(self, nbytes, device):
        made = self.array(nbytes, np.uint8, device, use="scratch")
        owner = set()  # when it is not used any more, the memory is freed
        weakref.finalize(owner, self.release, made.ctypes.data).atexit = False
        return owner, made.ctypes.data

    def writable_outputs(self, arrays, devices):
        return [[x.ctypes.data for x in row] for row in arrays]


def made_layouts(*arguments):
    """Return layouts of NumPy arrays as if they were on CUDA devices."""
    with mock.patch.object(type(NUMPY), "require", return_value=None):
        return layouts(NUMPY, *arguments)


def _on(layout, names, pieces):
    """Return a layout with other names of devices (``names``: old to new), and programs of ``pieces`` pieces."""

    def moved(each):
        old, devices = each.program, tuple(names[device] for device in each.program.devices)
        of_old = tuple(old.chunks), old.round_count, pieces, old.routes
        return each._replace(program=Program(old.collective, old.algorithm, devices, *of_old))

    buffers = tuple(LoweredBuffer(buffer, tuple(map(moved, ranges))) for buffer, ranges in layout.buffers)
    sources, destinations = (tuple(names[name] for name in ends) for ends in (layout.sources, layout.destinations))
    return replace(layout, buffers=buffers, sources=sources, destinations=destinations)


class Case:
    """Layouts with their executables, and calls of them on new arrays.

    ``places`` has the number of each replica's device, and ``destinations`` the positions of replicas (by default all).
    Options: ``topology``, ``pieces`` of a chunk, and ``result``, the dtype of the results.
    """

    def __init__(self, memory, algorithm, places, op, dtype, sizes, packing, inplace, *, destinations=None, **options):
        topology, result = options.get("topology"), options.get("result")
        self.memory, self.fake, self.inplace, self.dtype = memory, memory.fake, inplace, dtype
        self.places, self.sizes = places, sizes
        self.names = tuple(f"cuda:{x}" + f"#{places[:k].count(x)}" * (x in places[:k]) for k, x in enumerate(places))
        chosen = range(len(places)) if destinations is None else destinations
        self.destinations, self.result_places = tuple(self.names[k] for k in chosen), [places[k] for k in chosen]
        self.numbers = NUMPY.numbers(ReduceOp(op), dtype, len(places)) if len(places) > 1 else copy_numbers(dtype)
        if result is not None:
            self.numbers = self.numbers._replace(result=result)
        names = self.names if topology is None else tuple(f"cuda:{k}" for k in range(len(places)))
        specs = tuple(TensorSpec((size,), dtype) for size in sizes)
        ends = self.destinations if topology is None else names
        made = made_layouts(algorithm, names, ends, specs, packing, topology, None)
        renamed = dict(zip(names, self.names, strict=True))
        self.layouts = [_on(layout, renamed, options.get("pieces", 1)) for layout in made]
        self.engine = cuda.CudaEngine()
        assert all(self.engine.supports(layout) for layout in self.layouts)
        self.compile()

    def compile(self):
        """Compile all layouts, perhaps again."""
        self.executables = [self.engine.compile(layout, self.numbers, self.inplace) for layout in self.layouts]

    def run(self, draw, check=True, finish=True):
        """Run the layouts once, with the callers' work before and after. Return whether all bits were right.

        Without ``check`` the sources are zeros. Without ``finish`` only the streams of this thread are waited for.
        """
        good = True
        for layout, executable in zip(self.layouts, self.executables, strict=True):
            arrays = self._arrays(layout, draw)
            given = self._written(arrays, draw, check)
            results = executable.run(self.engine.bind(layout, arrays[0]), arrays[1])
            read = self._read(results, self.result_places)
            kept = [] if self.inplace else self._read(arrays[0], self.places)
            self._free(arrays[0], results)
            if finish:
                self.fake.run()
            else:
                for place in set(self.places):
                    self.memory.synchronize(place)
            if check:
                good = self._is_right(layout, given, read) and good
            for row, numbers in zip(kept, given, strict=False):
                good = good and [bytes(x) for x in row] == [x.tobytes() for x in numbers]
        return good

    def run_captured(self, draw, beside=True):
        """Capture a run of each layout in a graph, launch the graph twice, and assert that all bits are right.

        ``beside``: meanwhile, another thread runs and captures the same layouts.
        """
        for k, layout in enumerate(self.layouts):
            fake, memory, arrays, executable = self.fake, self.memory, self._arrays(layout, draw), self.executables[k]
            devices = sorted(set(self.places))
            streams = [memory.capturing(device) for device in devices]
            fake.run()
            fake.on(devices[0])
            fake.call("cuStreamBeginCapture_v2", streams[0], 0)  # 0: a global one, which other threads may invalidate
            for device, stream in zip(devices[1:], streams[1:], strict=True):
                fake.follow(device, stream, devices[0], streams[0])
            before = memory.is_quiet
            memory.is_quiet = True  # work of the allocator's other owners is not in the graph
            results = executable.run(self.engine.bind(layout, arrays[0]), arrays[1])
            memory.is_quiet = before
            if beside:
                with ThreadPoolExecutor(1) as pool:  # another thread runs the layouts, and captures them, too
                    assert pool.submit(self.run, draw, finish=False).result(), fake.report()
                    pool.submit(self.run_captured, draw, beside=False).result()
                self.compile()
            del executable  # the capture keeps its plan
            for device, stream in zip(devices[1:], streams[1:], strict=True):
                fake.follow(devices[0], streams[0], device, stream)
            fake.on(devices[0])
            graph = fake.end_capture(streams[0])
            exec_ = fake.give("cuGraphInstantiateWithFlags", graph, 0)
            memory.threads.streams = {}
            for _ in range(2):
                given = self._written(arrays, draw)
                fake.run()
                freed = {
                    address: ctypes.string_at(address, nbytes)
                    for (_, _, nbytes), addresses in memory.free.items()
                    for address in addresses
                }
                fake.on(devices[0])
                fake.call("cuGraphLaunch", exec_, memory.stream(devices[0]))
                fake.run()
                read = self._read(results, self.result_places)
                fake.run()
                assert self._is_right(layout, given, read), (self.names, self.numbers)
                assert all(ctypes.string_at(at, len(content)) == content for at, content in freed.items())
            fake.call("cuGraphExecDestroy", exec_)
            fake.call("cuGraphDestroy", graph)
            self._free(arrays[0], results)
            fake.run()

    def _kinds(self):  # the NumPy dtypes of the sources and of the results
        return (np.dtype(np.uint8 if dtype == "bool" else dtype) for dtype in (self.dtype, self.numbers.result))

    def _arrays(self, layout, draw):
        """Return the sources, and the arrays for the results, or ``None`` for the latter if not in place."""
        kind, out_kind = self._kinds()
        sizes = [self.sizes[tensor] for tensor in layout.tensors]
        shift = int(draw.integers(0, 3)) * kind.itemsize
        sources = [[self.memory.array(size, kind, place, shift) for place in self.places] for size in sizes]
        if not self.inplace:
            return sources, None
        if kind != out_kind or len(self.result_places) < len(self.places):
            return sources, [
                [self.memory.array(size, out_kind, place) for place in self.result_places] for size in sizes
            ]
        # A result may be in the memory of any source of its device.
        order = list(range(len(self.places)))
        for place in set(self.places):
            mine = [k for k in order if self.places[k] == place]
            for k, other in zip(mine, draw.permutation(mine), strict=True):
                order[k] = int(other)
        return sources, [[row[k] for k in order] for row in sources]

    def _written(self, arrays, draw, check=True):
        """Let the callers' streams write drawn values, or zeros, into the sources, and return these."""

        def written(x, place):
            made = cuda_launches.values(draw, self.dtype, x.size).view(x.dtype) if check else np.zeros_like(x)
            if x.size:
                self.fake.write(x.ctypes.data, made.tobytes(), self.memory.stream(place), place)
            return made

        return [list(map(written, row, self.places)) for row in arrays[0]]

    def _read(self, rows, places):
        """Let the callers' streams read arrays."""

        def read(x, place):
            return self.fake.read(x.ctypes.data, x.nbytes, self.memory.stream(place), place) if x.size else b""

        return [list(map(read, row, places)) for row in rows]

    def _free(self, *arrays):
        for address in {x.ctypes.data for rows in arrays for row in rows for x in row if x.size}:
            self.memory.release(address)

    def _is_right(self, layout, given, read):
        """Return whether ``read`` has the bits that the host kernels compute from the sources ``given``."""
        sizes = [self.sizes[tensor] for tensor in layout.tensors]
        kernel = host.kernel(layout, self.numbers, len(self.destinations))
        _, out_kind = self._kinds()
        right = [[np.empty(size, out_kind) for _ in self.destinations] for size in sizes]
        kernel.run(given, right, 1, False, False)  # one thread, no streaming stores, no check for overlaps
        return all(
            cuda_launches.equal(bytes(got), x.tobytes(), self.numbers.result)
            for row, expected in zip(read, right, strict=True)
            for got, x in zip(row, expected, strict=True)
        )


def drawn(memory, number, seed):
    """Return a random case."""
    choose = random.Random(seed * 100_003 + number)
    combinations = list(product(ALGORITHMS, PLACES))
    algorithm, where = combinations[number % len(combinations)]
    dtype = choose.choice(["float32", "float16", "bfloat16", "float64", "int32", "uint8", "complex64", "int64"])
    op = choose.choice(["sum", "mean", "max", "product"])
    if dtype.startswith("complex") and op == "max":
        op = "sum"
    if choose.random() < 0.15:
        op, dtype = "mean", choose.choice(["int32", "uint8", "int64"])
    sizes = [choose.choice([0, 1, 7, 1000, 2049, 4_000]) for _ in range(choose.choice([1, 1, 3, 6]))]
    packing = choose.choice([Packing(), Packing(num_packs=1), Packing(num_packs=3)])
    topology = None
    if where == "eight" and choose.random() < 0.4:
        topology = cr.Topology.machine("dgx-1v")
        algorithm = choose.choice(["forest", "auto", "ring"])
        where = choose.choice(["eight", "two", "one", "eight"])  # its devices may be logical ones of fewer GPUs
    destinations, count = None, len(PLACES[where])
    if topology is None and choose.random() < 0.2 and count > 1:
        destinations = sorted(choose.sample(range(count), choose.randint(1, count)))
        algorithm = choose.choice(["one_device", "direct"])
    inplace, is_plain, pieces = choose.random() < 0.5, choose.random() < 0.8, choose.choice([1, 1, 3])
    is_integer_mean = op == "mean" and "int" in dtype and count > 1
    result = choose.choice(["float64", "float32", "float16"]) if is_integer_mean else None
    if choose.random() < 0.1:
        sizes = [choose.choice([1, 5, 9]) for _ in range(45)]  # so many that tables are split
    uses = choose.choice([["given"], ["results"], ["scratch"], ["given", "results", "scratch"]])
    memory.kinds = {} if is_plain else dict.fromkeys(uses, choose.choice([POOL, MAPPED, MANAGED, FOREIGN_CONTEXT]))
    memory.is_strided = choose.random() < 0.3
    options = {"topology": topology, "destinations": destinations, "pieces": pieces, "result": result}
    return Case(memory, algorithm, PLACES[where], op, dtype, sizes, packing, inplace, **options)
