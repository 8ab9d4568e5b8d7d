"""How long does the host need to queue a reduction on CUDA devices, apart from the driver's own time?

A stub stands in for the CUDA driver (stub_cuda.cpp of the tests): its calls do nothing. What remains is this library's
time: "launch preparation" is the compiled part (``Plan.run``: pointer tables, streams, events), "the call" is a call
of the public API with torch tensors. torch has no CUDA tensors here, so host tensors stand in for them; allocating
results is torch's host allocator. The real driver adds its own time for each launch, which is not measured here.
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
from typing import Any, NamedTuple
from unittest import mock

import optree
import torch
from common import keep, samples, summary, tests_on_path
from host_reduction import resnet50

import crossreduce as cr
from crossreduce.engines.host import prepared as prepared_calls
from crossreduce.reduction import pipeline

tests_on_path()
import fake_cuda
import fake_cuda_torch

PREPARATION_US = 25  # the target for the launch preparation of ResNet-50's gradients
MIN_S = 0.01  # about the time of one measurement
RESNET = [tuple(shape) for shape in optree.tree_leaves(resnet50(), is_leaf=lambda node: isinstance(node, tuple))]


class Job(NamedTuple):
    """A reduction: the shapes of its float32 tensors, the device of each replica, and how many get the results."""

    shapes: list[tuple[int, ...]]
    places: tuple[int, ...]
    results: int
    algorithm: str = "direct"


JOBS = {
    "1 tensor of 1 KiB, 8 to 1 on one GPU": Job([(256,)], (0,) * 8, 1),
    "1 tensor of 1 KiB, 8 to 8 on one GPU": Job([(256,)], (0,) * 8, 8),
    "160 tensors of 1 KiB, 8 to 8 on one GPU": Job([(256,)] * 160, (0,) * 8, 8),
    "161 gradients of ResNet-50, 8 to 8 on one GPU": Job(RESNET, (0,) * 8, 8),
    "1 tensor of 1 MiB, 8 to 8 on 8 GPUs": Job([(1 << 18,)], tuple(range(8)), 8),
    "161 gradients of ResNet-50, 8 to 8 on 8 GPUs": Job(RESNET, tuple(range(8)), 8),
}


class _Recorder:
    """In place of a compiled plan: keeps the arguments of a run."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.arguments = plan, ()

    def run(self, *arguments: Any) -> bool:
        self.arguments = arguments
        return bool(self.plan.run(*arguments))


class Prepared(NamedTuple):
    """The calls of a job's contenders, and the work that they queue."""

    runs: dict[str, Callable[[], object]]
    launches: int
    copies: int
    waits: int


def prepared(job: Job, memory: fake_cuda_torch.StandInMemory) -> Prepared:
    """Return the functions to measure: the compiled plan alone, and calls of the public API."""
    tensors = [[memory.put(torch.ones(shape), place) for place in job.places] for shape in job.shapes]
    outs = [[memory.put(torch.ones(shape), place) for place in job.places] for shape in job.shapes]
    values = [cr.PerReplica(row) for row in tensors]
    to = values if job.results > 1 else [values[0].devices[0]] * len(values)
    given = [cr.PerReplica(row[: job.results]) for row in outs]
    op, pairs = cr.AllReduceCrossDeviceOps(job.algorithm), list(zip(values, to, strict=True))
    fresh = cr.AllReduceCrossDeviceOps(job.algorithm)

    def first() -> object:
        fresh._calls = None  # forget the calls before
        return fresh.batch_reduce("sum", pairs)

    trees = [list(leaves) for leaves in zip(*tensors, strict=True)]

    found = []
    inner = pipeline._run

    def run(*arguments: Any) -> Any:
        found.append(inner(*arguments))
        return found[-1]

    with mock.patch.object(pipeline, "_run", run):
        op.batch_reduce("sum", pairs)
    ((executable, _),) = found
    recorder = _Recorder(executable.planned.plan)
    executable.planned = executable.planned._replace(plan=recorder)
    first()  # the stub accesses no memory, so the recorded addresses may be invalid later
    executable.planned = executable.planned._replace(plan=recorder.plan)
    library = ctypes.CDLL("libcuda.so.1")
    counters = {name: ctypes.c_uint64.in_dll(library, f"stub_{name}") for name in ("launches", "copies", "waits")}
    for each in counters.values():
        each.value = 0
    recorder.plan.run(*recorder.arguments)
    counts = {name: each.value for name, each in counters.items()}
    runs: dict[str, Callable[[], object]] = {
        "launch preparation": lambda: recorder.plan.run(*recorder.arguments),
        "torch alone, data_ptr of the sources": lambda: [[x.data_ptr() for x in row] for row in tensors],
        "torch alone, empty and data_ptr of results": lambda: [
            [torch.empty(shape).data_ptr() for _ in range(job.results)] for shape in job.shapes
        ],
        "the call, batch_reduce": lambda: op.batch_reduce("sum", pairs),
        "the call, batch_reduce with out=": lambda: op.batch_reduce("sum", pairs, out=given),
        "a first call, batch_reduce": first,
    }
    if job.results > 1:
        runs["the call, batch_reduce in place"] = lambda: op.batch_reduce("sum", pairs, out=values)
        runs["the call, cr.all_reduce of a list"] = lambda: cr.all_reduce(trees, "sum", cross_device_ops=op)
        runs["the call, cr.all_reduce with devices="] = lambda: cr.all_reduce(
            trees, "sum", devices=values[0].devices, cross_device_ops=op
        )
    return Prepared(runs, **counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repeats, to see whether it runs; times are too high")
    parser.add_argument("--json", type=Path, help="where the results are written; nowhere if it is not given")
    options = parser.parse_args()
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: the folder {options.json.parent} does not exist")
    repeats = 3 if options.quick else 25
    torch.set_num_threads(1)  # the threads of OpenMP would use the CPU between measurements
    ctypes.CDLL(str(fake_cuda.built(stub=True)), ctypes.RTLD_GLOBAL)
    memory = fake_cuda_torch.install()
    prepared_calls.compiled_module().use_device_type(1)  # the CPU's: host tensors are taken for those of cuda:0
    kept = {}
    for name, job in JOBS.items():
        made = prepared(job, memory)
        queued = {what: getattr(made, what) for what in ("launches", "copies", "waits")}
        print(f"\n{name}: " + ", ".join(f"{count} {what}" for what, count in queued.items()))
        times = samples(made.runs, repeats, least_s=0.0 if options.quick else MIN_S, clock=time.thread_time)
        rows = {what: summary(each) for what, each in times.items()}
        for what, row in rows.items():
            print(f"  {what:42} {row['median_s'] * 1e6:9.2f} us  (least {row['min_s'] * 1e6:.2f})")
        kept[name] = {"queued": queued, "rows": rows}
        memory.release()
    measured = kept["161 gradients of ResNet-50, 8 to 8 on one GPU"]["rows"]["launch preparation"]["median_s"] * 1e6
    met = measured <= PREPARATION_US
    verdict = "not judged" if options.quick else "met" if met else "not met"
    print(f"\nlaunch preparation of 161 gradients: {measured:.1f} us, target <= {PREPARATION_US}: {verdict}")
    target = {"what": "launch preparation of 161 gradients, us", "target": f"<= {PREPARATION_US}"}
    targets = [{**target, "measured": measured, "met": met}]
    if options.json:
        about = {"driver": "stub", "clock": "CPU time", "quick": options.quick}
        keep("cuda_host_cost", {**about, "cases": kept, "targets": targets}, options.json)


if __name__ == "__main__":
    main()
