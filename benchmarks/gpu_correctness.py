"""Are the results on CUDA devices those of the host's kernels, bit for bit (NaN is NaN)?

``check_kernels`` launches each kernel with drawn tables on pinned memory, which the devices and the host share, and
compares with the reference kernel, bytes around the results included. ``check_calls`` draws calls of the public API
with torch tensors: ops, dtypes, algorithms, 1 to 20 replicas, odd sizes, offsets, strides, ``out=``, in place.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import cuda_launches
import numpy as np
import torch
from gpu_device import Gpus, executed, host_tensor

import crossreduce as cr
from crossreduce.engines import cuda, host
from crossreduce.engines.cuda import driver

ALGORITHMS = ("one_device", "direct", "one_shot", "hierarchical_copy", "ring", "halving_doubling", "recursive_doubling")
DTYPES = ("float32", "float16", "bfloat16", "float64", "complex64", "complex128")
DTYPES += ("int8", "int16", "int32", "int64", "uint8", "bool")
OPS = ("sum", "mean", "min", "max", "product")
PINNED_NBYTES = 1 << 27


class DeviceKernels:
    """The kernels on a device, each called like its function of cuda_host.cpp of the tests, on pinned memory."""

    def __init__(self, device: int = 0):
        assert not driver.unusable(), driver.unusable()
        self._lib = ctypes.CDLL("libcuda.so.1")
        pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
        self._lib.cuLaunchKernel.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
        self._lib.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
        self._lib.cuMemHostAlloc.argtypes = [pointer, ctypes.c_size_t, unsigned]
        self._lib.cuCtxSetCurrent.argtypes = self._lib.cuMemFreeHost.argtypes = [pointer]
        self._context, self._module, self._pinned = pointer(), pointer(), pointer()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuCtxSetCurrent", self._context)
        code = driver._code(driver.native().describe(device)["capability"])
        self._call("cuModuleLoadData", ctypes.byref(self._module), code)
        self._call("cuMemHostAlloc", ctypes.byref(self._pinned), PINNED_NBYTES, 1)
        bytes_of = (ctypes.c_uint8 * PINNED_NBYTES).from_address(self._pinned.value or 0)
        self._memory, self._used = np.frombuffer(bytes_of, np.uint8), 0
        self._functions: dict[str, ctypes.c_void_p] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        assert code == 0, f"{name} failed with code {code}"

    def block(self, nbytes: int) -> np.ndarray:
        """Return pinned memory, valid until the next launch has been checked; all bytes are 0xA5."""
        begin, self._used = self._used, self._used + -(-nbytes // 64) * 64
        assert self._used <= PINNED_NBYTES
        made = self._memory[begin : begin + nbytes]
        made[:] = 0xA5
        return made

    def reset(self) -> None:
        """Reuse the pinned memory."""
        self._used = 0

    def close(self) -> None:
        """Unload the kernels and free the memory."""
        self._call("cuModuleUnload", self._module)
        self._call("cuMemFreeHost", self._pinned)

    def queue(self, name: str, buffer: Any, blocks: int) -> None:
        """Launch a kernel in the default stream."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._call("cuLaunchKernel", function, blocks, 1, 1, 256, 1, 1, 0, None, arguments, None)

    def __getattr__(self, name: str) -> Callable[[Any, Any], None]:
        def launch(buffer: Any, blocks: Any) -> None:
            self.queue(name, buffer, blocks.value)
            self._call("cuCtxSynchronize")

        return launch


def check_kernels(batches: int, seed: int) -> int:
    """Check at least so many drawn launches, as many of each kernel; return how many there were."""
    every = [
        (numbers, kernel) for numbers in cuda_launches.all_numbers() for kernel in cuda_launches.kernels_of(numbers)
    ]
    if not driver.accepts_large_tables(0):
        every = [(numbers, kernel) for numbers, kernel in every if not kernel.endswith("_large")]
    library, draw, checked = DeviceKernels(), np.random.default_rng(seed), 0
    while checked < batches:
        for numbers, kernel in every:
            library.reset()
            cuda_launches.check(library, numbers, draw, kernel, library.block)
            checked += 1
    library.close()
    return checked


def check_roundings(gpus: Gpus, count: int) -> int:
    """Round many or all of the 2**32 float32 to half types in the kernels, and compare with torch; return how many."""
    library, part = DeviceKernels(), min(count, 1 << 26)
    step = (1 << 32) // count
    for name, dtype in (("sum_f16_mixed", torch.float16), ("sum_bf16_mixed", torch.bfloat16)):
        kernel = getattr(library, name)
        for first in range(0, count, part):
            numbers = torch.arange(first, first + part, dtype=torch.int64, device=gpus.torch_device) * step
            x = gpus.put(numbers.to(torch.int32).view(torch.float32))
            out = gpus.put(torch.empty(part, dtype=dtype))
            tensor = cuda_launches.Tensor(part, 0, [x.data_ptr()], [out.data_ptr()])
            wide = (0, 0, 0, 1)  # an order whose only source is float32
            launch = cuda_launches.packed([tensor], [wide], 1, 1, (2, 4, 2))
            gpus.synchronize()
            kernel(ctypes.create_string_buffer(launch, len(launch) + 8), ctypes.c_uint32(528))
            right = x.to(dtype)
            same = (out.view(torch.int16) == right.view(torch.int16)) | ((out != out) & (right != right))
            assert bool(same.all()), (
                f"{name}: {int((~same).sum())} float32 from number {first * step} on are not rounded"
            )
    library.close()
    return count


def check_calls(gpus: Gpus, batches: int, seed: int) -> dict[str, int]:
    """Check so many drawn calls of the public API; return how many there were, by the dtype."""
    draw, counts, by_engine = np.random.default_rng(seed), Counter[str](), 0
    while sum(counts.values()) < batches:
        dtype, op = str(draw.choice(DTYPES)), str(draw.choice(OPS))
        if (dtype == "bool" and op in ("sum", "mean")) or (dtype.startswith("complex") and op in ("min", "max")):
            continue
        by_engine += _check_call(gpus, draw, dtype, op)
        counts[dtype] += 1
        if sum(counts.values()) % 50 == 0:
            gpus.release()
    gpus.release()
    assert by_engine >= 0.9 * batches, "the CUDA engine ran too few of the calls"
    return dict(sorted(counts.items()))


def _drawn(gpus: Gpus, draw: np.random.Generator, dtype: str, shape: tuple[int, ...], device: int) -> torch.Tensor:
    """Return a tensor of drawn values on a device: at an offset, and maybe transposed or with a stride."""
    step, offset = int(draw.choice([1, 1, 1, 2, 3])), int(draw.integers(0, 9))
    values = cuda_launches.values(draw, dtype, offset + step * int(np.prod(shape)))
    flat = gpus.put(host_tensor(values, dtype), device)[offset::step]
    return flat.view(shape[::-1]).t() if len(shape) == 2 else flat.view(shape)


def _check_call(gpus: Gpus, draw: np.random.Generator, dtype: str, op: str) -> bool:
    """Run a drawn call and compare all results; return whether the CUDA engine ran it."""
    n = int(draw.integers(1, draw.choice([3, 9, 21])))
    places = sorted(int(k) for k in draw.integers(0, gpus.count, n))
    shapes = []
    for _ in range(int(draw.choice([1, 1, 2, 5]))):
        size = int(draw.integers(0, draw.choice([4, 300, 5000])))
        shapes.append((size,) if draw.random() < 0.7 else (3, size // 3))
    rows = [[_drawn(gpus, draw, dtype, shape, place) for place in places] for shape in shapes]
    given = [[gpus.on_host(x).contiguous() for x in row] for row in rows]
    algorithm = str(draw.choice(ALGORITHMS))
    names, used = [], Counter[int]()
    for place in places:
        names.append(f"cuda:{place}" + (f"#{used[place]}" if used[place] else ""))
        used[place] += 1
    values = [cr.PerReplica(row, names) for row in rows]
    chosen = sorted(int(k) for k in draw.choice(n, int(draw.integers(1, n + 1)), replace=False))
    chosen = chosen if draw.random() < 0.3 and algorithm in ("one_device", "direct") else list(range(n))
    to = cr.PerReplica([0] * len(chosen), [names[k] for k in chosen])
    kind = torch.get_default_dtype() if op == "mean" and "int" in dtype else getattr(torch, dtype)
    keywords, mode = {}, str(draw.choice(["new", "out", "in place"]))
    if mode == "in place" and len(chosen) == n and kind == rows[0][0].dtype:
        rows = [[gpus.put(x.contiguous(), place) for x, place in zip(row, places, strict=True)] for row in rows]
        values = [cr.PerReplica(row, names) for row in rows]
        keywords["out"] = values
    elif mode != "new":
        outs = [[gpus.put(torch.empty(x.shape, dtype=kind), places[k]) for k in chosen] for x in (r[0] for r in rows)]
        keywords["out"] = [cr.PerReplica(row, [names[k] for k in chosen]) for row in outs]
    operation = cr.AllReduceCrossDeviceOps(algorithm, int(draw.choice([1, 1, 3])))
    with executed() as found:
        results = operation.batch_reduce(op, [(value, to) for value in values], **keywords)
    got = [[gpus.on_host(x) for x in result] for result in results]
    if keywords.get("out") is not values:  # the second call may run in compiled code
        for result, row in zip(operation.batch_reduce(op, [(x, to) for x in values], **keywords), got, strict=True):
            for x, y in zip(result, row, strict=True):
                again, first = _as_numpy(gpus.on_host(x), "uint8"), _as_numpy(y, "uint8")
                assert again.tobytes() == first.tobytes(), "a second call has other bits"
    for layout, jobs, _ in found:
        numbers = jobs[0][0].facts.numbers
        sources = [[_as_numpy(x, dtype) for x in given[tensor]] for tensor in layout.tensors]
        out_kind = _kind(numbers.result)
        right = [[np.empty(row[0].size, out_kind) for _ in layout.destinations] for row in sources]
        host.kernel(layout, numbers, len(layout.destinations)).run(sources, right, 1, False, False)
        for tensor, expected in zip(layout.tensors, right, strict=True):
            for x, y in zip(got[tensor], expected, strict=True):
                ours = _as_numpy(x, numbers.result)
                case = (op, dtype, algorithm, names, chosen, mode, shapes)
                assert cuda_launches.equal(ours.tobytes(), y.tobytes(), numbers.result), case
    return all(isinstance(executable, cuda.CudaExecutable) for _, _, executable in found)


def _kind(dtype: str) -> np.dtype:
    return np.dtype(np.uint8 if dtype == "bool" else dtype)


def _as_numpy(x: torch.Tensor, dtype: str) -> np.ndarray:
    """Return the elements of a host tensor as a flat NumPy array."""
    flat = torch.empty(x.numel(), dtype=x.dtype)
    flat.copy_(x.reshape(-1))
    return flat.view(torch.uint8).numpy().view(_kind(dtype))
