"""How long does the host need to queue a reduction on CUDA devices, apart from the driver's own time?

A stub stands in for the CUDA driver (stub_cuda.cpp of the tests): its calls do nothing. What remains is this library's
time, and that of torch's host allocator: torch has no CUDA tensors here, so host tensors stand in for them. The real
driver adds its own time for each launch, and for each allocation whose origin it is asked for.
Calls that occurred before run in compiled code; a first call runs in Python (its plan is cached).
Times are CPU times of the calling thread, since other programs may use the CPUs. "torch alone" is what a program in
Python would need only to read the addresses of all tensors, and to allocate the results.

It needs g++ and torch, and no GPU. Run: python benchmarks/cuda_host_cost.py [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import optree
import torch
from common import keep, samples, summary, tests_on_path
from host_reduction import resnet50

import crossreduce as cr
from crossreduce.engines.host import prepared as prepared_calls

tests_on_path()
import fake_cuda
import fake_cuda_torch

HOST_US = 150  # the target for a call with ``out=`` of ResNet-50's gradients on 8 GPUs
MIN_S = 0.01  # about the time of one measurement
RESNET = [tuple(shape) for shape in optree.tree_leaves(resnet50(), is_leaf=lambda node: isinstance(node, tuple))]
ONE, EIGHT = (0,) * 8, tuple(range(8))  # the device of each replica
MOST = "161 gradients of ResNet-50, 8 to 8 on 8 GPUs"
JOBS = {  # shapes of float32 tensors, the devices of the replicas, and how many get the results
    "1 tensor of 1 KiB, 8 to 1 on one GPU": ([(256,)], ONE, 1),
    "1 tensor of 1 KiB, 8 to 8 on one GPU": ([(256,)], ONE, 8),
    "160 tensors of 1 KiB, 8 to 8 on one GPU": ([(256,)] * 160, ONE, 8),
    "161 gradients of ResNet-50, 8 to 8 on one GPU": (RESNET, ONE, 8),
    "1 tensor of 1 MiB, 8 to 8 on 8 GPUs": ([(1 << 18,)], EIGHT, 8),
    MOST: (RESNET, EIGHT, 8),
}


def calls(
    memory: fake_cuda_torch.StandInMemory, shapes: list[tuple[int, ...]], places: tuple[int, ...], results: int
) -> dict[str, Callable[[], object]]:
    """Return the functions to measure."""
    tensors, outs = ([[memory.put(torch.ones(shape), place) for place in places] for shape in shapes] for _ in range(2))
    values = [cr.PerReplica(row) for row in tensors]
    to = values if results > 1 else [values[0].devices[0]] * len(values)
    given = [cr.PerReplica(row[:results]) for row in outs]
    op, first, pairs = (*(cr.AllReduceCrossDeviceOps("direct") for _ in range(2)), list(zip(values, to, strict=True)))

    def first_call() -> object:
        first._calls = None  # forget the calls before
        return first.batch_reduce("sum", pairs)

    trees = [list(leaves) for leaves in zip(*tensors, strict=True)]
    runs: dict[str, Callable[[], object]] = {
        "the call, batch_reduce with out=": lambda: op.batch_reduce("sum", pairs, out=given),
        "the call, batch_reduce": lambda: op.batch_reduce("sum", pairs),
        "a first call, batch_reduce": first_call,
        "torch alone, data_ptr of the sources": lambda: [[x.data_ptr() for x in row] for row in tensors],
        "torch alone, empty and data_ptr of results": lambda: [
            [torch.empty(shape).data_ptr() for _ in range(results)] for shape in shapes
        ],
    }
    if results > 1:
        runs["the call, batch_reduce in place"] = lambda: op.batch_reduce("sum", pairs, out=values)
        runs["the call, cr.all_reduce of a list"] = lambda: cr.all_reduce(trees, "sum", cross_device_ops=op)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repeats, to see whether it runs; times are too high")
    parser.add_argument("--json", type=Path, help="where the results are written; nowhere if it is not given")
    options = parser.parse_args()
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: the folder {options.json.parent} does not exist")
    repeats = 3 if options.quick else 25
    torch.set_num_threads(1)  # the threads of OpenMP would use the CPU between measurements
    stub = ctypes.CDLL(str(fake_cuda.built(stub=True)), ctypes.RTLD_GLOBAL)
    counters = {name: ctypes.c_uint64.in_dll(stub, f"stub_{name}") for name in ("launches", "copies", "waits")}
    memory = fake_cuda_torch.install()
    prepared_calls.compiled_module().use_device_type(1)  # the CPU's: host tensors are taken for those of cuda:0
    kept = {}
    for name, job in JOBS.items():
        runs = calls(memory, *job)
        call = runs["the call, batch_reduce with out="]
        call()
        for counter in counters.values():
            counter.value = 0
        call()
        queued = {what: counter.value for what, counter in counters.items()}
        print(f"\n{name}: " + ", ".join(f"{count} {what}" for what, count in queued.items()))
        times = samples(runs, repeats, least_s=0.0 if options.quick else MIN_S, clock=time.thread_time)
        rows = {what: summary(each) for what, each in times.items()}
        for what, row in rows.items():
            print(f"  {what:42} {row['median_s'] * 1e6:9.2f} us  (least {row['min_s'] * 1e6:.2f})")
        kept[name] = {"queued": queued, "rows": rows}
        memory.release()
    measured = kept[MOST]["rows"]["the call, batch_reduce with out="]["median_s"] * 1e6
    met = measured <= HOST_US
    verdict = "not judged" if options.quick else "met" if met else "not met"
    print(f"\n161 gradients on 8 GPUs with out=: {measured:.1f} us, target <= {HOST_US}: {verdict}")
    target = {"what": "161 gradients on 8 GPUs with out=, us", "target": f"<= {HOST_US}"}
    if options.json:
        about = {"driver": "stub", "clock": "CPU time", "quick": options.quick}
        keep(
            "cuda_host_cost",
            {**about, "cases": kept, "targets": [{**target, "measured": measured, "met": met}]},
            options.json,
        )


if __name__ == "__main__":
    main()
