"""How fast are single kernels on a CUDA device: with a fixed number of sources or a number at run time, in four grids?

The library launches the kernels of fixed numbers with four blocks per multiprocessor. This case says whether that is
the best choice, for each dtype, number of sources and results, and size. Nothing is checked here: ``gpu_correctness``
checks all kernels.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import cuda_launches
import torch
from gpu_cases import COPY, Contender, GpuCase
from gpu_correctness import DeviceKernels
from gpu_device import Gpus

from crossreduce.engines.cuda import driver

BLOCKS = (1, 2, 4, 8)  # per multiprocessor
USED_BLOCKS = 4
COUNTS = ((8, 1), (8, 8), (2, 2), (4, 4), (16, 16))  # of sources and results
DTYPES = {torch.float32: ("sum_f32", 4, 4), torch.bfloat16: ("sum_bf16", 2, 4), torch.float64: ("sum_f64", 8, 8)}


def kernels(gpus: Gpus, sizes: Any) -> list[GpuCase]:
    """Measure the kernels of sums, and compare the grids and kinds with those that the library uses."""
    library, cases = DeviceKernels(), []
    multiprocessors = driver.native().describe(0)["multiprocessors"]
    for dtype, (name, nbytes, wide) in DTYPES.items():
        for size in sizes.grid:
            xs = [gpus.random((size // nbytes,), dtype) for _ in range(32)]
            contenders: dict[str, Contender] = {COPY: Contender(partial(xs[16].copy_, xs[0]), 2 * size)}
            used: dict[str, list[str]] = {}
            for sources, results in COUNTS:
                given, made = [x.data_ptr() for x in xs[:sources]], [x.data_ptr() for x in xs[16 : 16 + results]]
                tensor = cuda_launches.Tensor(size // nbytes, 0, given, made)
                packed = cuda_launches.packed([tensor], [(0, 0, 0, 0)], 1, 1, (nbytes, wide, nbytes))
                buffer = ctypes.create_string_buffer(packed, len(packed) + 8)
                for kind in (str(sources), "any") if sources <= cuda_launches.MAX_FIXED else ("any",):
                    for blocks in BLOCKS:
                        key = f"{sources} to {results}, {name}_{kind}, {blocks} blocks"
                        run = partial(library.queue, f"{name}_{kind}", buffer, blocks * multiprocessors)
                        contenders[key] = Contender(run, (sources + results) * size)
                        used.setdefault(f"{sources} to {results}", []).append(key)
            case = GpuCase(f"kernels, {str(dtype)[6:]}, {size >> 10} KiB per replica", gpus, contenders, sizes)
            for count, keys in used.items():
                ours = next(key for key in keys if key.endswith(f"{USED_BLOCKS} blocks"))
                best = min(keys, key=lambda key: case.rows[key]["median_s"])
                case.require(f"{count}: times as long as the best, {best}", case.ratio(ours, best), most=1.05)
            cases.append(case)
            gpus.release()
    library.close()
    return cases
