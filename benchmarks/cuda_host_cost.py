"""How long does the host need to queue a reduction on CUDA devices, apart from the driver's own time?

A stub stands in for the CUDA driver (stub_cuda.cpp of the tests): its calls do nothing. What remains is this library's
time, and that of torch's host allocator: torch has no CUDA tensors here, so host tensors stand in for them. The real
driver adds its own time for each launch, and for each allocation whose origin it is asked for. Calls that occurred
before run in compiled code; a first call runs in Python (its plan is cached). Times are CPU times of the calling
thread, since other programs may use the CPUs.

It needs g++ and torch, and no GPU. Run: python benchmarks/cuda_host_cost.py [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import ctypes
import time
from functools import partial
from pathlib import Path

import optree
import torch
from common import keep, samples, summary, tests_on_path
from host_reduction import resnet50

import crossreduce as cr
from crossreduce.engines.host import prepared

tests_on_path()
import fake_cuda
import fake_cuda_torch

HOST_US, OUT = 150, "batch_reduce with out="  # the target for ResNet-50's gradients on 8 GPUs
MIN_S = 0.01  # about the time of one measurement
RESNET = [tuple(shape) for shape in optree.tree_leaves(resnet50(), is_leaf=lambda node: isinstance(node, tuple))]
ONE, EIGHT = (0,) * 8, tuple(range(8))  # the device of each replica
MOST = "161 gradients of ResNet-50 on 8 GPUs"
JOBS = {  # shapes of float32 tensors, and the devices of the replicas, all of which get the results
    "1 tensor of 1 KiB on one GPU": ([(256,)], ONE),
    "160 tensors of 1 KiB on one GPU": ([(256,)] * 160, ONE),
    "1 tensor of 1 MiB on 8 GPUs": ([(1 << 18,)], EIGHT),
    MOST: (RESNET, EIGHT),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repeats, to see whether it runs; times are too high")
    parser.add_argument("--json", type=Path, help="where the results are written; nowhere if it is not given")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the threads of OpenMP would use the CPU between measurements
    stub = ctypes.CDLL(str(fake_cuda.built(stub=True)), ctypes.RTLD_GLOBAL)
    counters = {name: ctypes.c_uint64.in_dll(stub, f"stub_{name}") for name in ("launches", "copies", "waits")}
    memory, kept = fake_cuda_torch.install(), {}
    prepared.compiled_module().use_device_type(1)  # the CPU's: host tensors are taken for those of cuda:0
    for name, (shapes, places) in JOBS.items():
        rows, outs = ([[memory.put(torch.ones(shape), k) for k in places] for shape in shapes] for _ in range(2))
        values, given = ([cr.PerReplica(row) for row in each] for each in (rows, outs))
        trees = [list(leaves) for leaves in zip(*rows, strict=True)]
        op, first, pairs = (*(cr.AllReduceCrossDeviceOps("direct") for _ in range(2)), [(x, x) for x in values])

        def first_call(first=first, pairs=pairs) -> None:
            first._calls = None  # forget the calls before
            first.batch_reduce("sum", pairs)

        runs = {
            OUT: partial(op.batch_reduce, "sum", pairs, out=given),
            "batch_reduce": partial(op.batch_reduce, "sum", pairs),
            "batch_reduce in place": partial(op.batch_reduce, "sum", pairs, out=values),
            "cr.all_reduce of lists": partial(cr.all_reduce, trees, "sum", cross_device_ops=op),
            "batch_reduce, a first call": first_call,
        }
        runs[OUT]()
        before = {what: counter.value for what, counter in counters.items()}
        runs[OUT]()
        queued = {what: counter.value - before[what] for what, counter in counters.items()}
        print(f"\n{name}: " + ", ".join(f"{count} {what}" for what, count in queued.items()))
        times = samples(runs, 3 if options.quick else 25, least_s=0 if options.quick else MIN_S, clock=time.thread_time)
        kept[name] = {"queued": queued, "rows": {what: summary(each) for what, each in times.items()}}
        for what, row in kept[name]["rows"].items():
            print(f"  {what:28} {row['median_s'] * 1e6:9.2f} us  (least {row['min_s'] * 1e6:.2f})")
        memory.release()
    us = kept[MOST]["rows"][OUT]["median_s"] * 1e6
    verdict = "not judged" if options.quick else "met" if us <= HOST_US else "not met"
    target = {"what": f"{MOST}, {OUT}, us", "target": f"<= {HOST_US}", "measured": us, "met": us <= HOST_US}
    print(f"\n{target['what']}: {us:.1f}, target {target['target']}: {verdict}")
    if options.json:
        about = {"driver": "stub", "clock": "CPU time", "quick": options.quick}
        keep("cuda_host_cost", {**about, "cases": kept, "targets": [target]}, options.json)


if __name__ == "__main__":
    main()
