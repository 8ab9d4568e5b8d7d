"""``crossreduce bench`` for the devices of this process.

Input: a ``BenchRequest`` and, optionally, a topology. Output: nccl-tests' table on standard output, its JSON, an exit
code. For devices in host memory the times compare algorithms and frameworks; they do not predict those of GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ... import AllReduceCrossDeviceOps, Mirrored, PerReplica, Topology
from ..support.output import json_report, print_lines
from ..train.trainers import Trainer, load
from . import exact, nccl_tests
from .request import BenchRequest, Measure, Row

COLLECTIVES: Final = ("all_reduce", "reduce", "broadcast")


def measure(request: BenchRequest, topology: Topology | None, topology_name: str | None) -> int:
    """Measure every algorithm, print the tables, and return the exit code: 1 if an element is wrong."""
    with json_report(request.output, request.json) as write:
        start_time = nccl_tests.now()
        trainer = load(request.framework, request.devices)
        request = replace(request, framework_version=trainer.version)
        print_lines(nccl_tests.header(request))
        if topology_name is not None:
            print_lines([f"# Planned on the topology: {topology_name}"])
        rows: list[Row] = []
        for name in request.algorithms:
            ops = AllReduceCrossDeviceOps(name, request.num_packs, topology=topology)
            rows += nccl_tests.print_table(request, name, request.rows(name, _measure(trainer, request, ops)))
        print_lines(nccl_tests.footer(request, rows))
        report = nccl_tests.report(request, rows, start_time)
        report["crossreduce"]["topology"] = topology_name
        write(report)
    return int(nccl_tests.bad_count(rows) > 0)


def _measure(trainer: Trainer, request: BenchRequest, ops: AllReduceCrossDeviceOps) -> Measure:
    """Return the function that times the calls of one algorithm and counts the wrong elements of a result."""
    devices, collective, op, options = request.devices, request.collective, request.op, request.options

    def prepare(
        patterns: list[NDArray[Any]], count: int, root: int, in_place: bool
    ) -> tuple[list[Any], Callable[[], Mirrored]]:
        """Return new copies of the inputs, each on its device, and the function to time."""
        inputs = [trainer.put(np.resize(x, count), device) for x, device in zip(patterns, devices, strict=True)]
        value = PerReplica(inputs, devices)
        if collective == "broadcast":
            return inputs, lambda: ops.broadcast(inputs[root], value)
        if collective == "reduce":
            out = PerReplica([inputs[root]], [devices[root]]) if in_place else None
            return inputs, lambda: ops.reduce(op, value, devices[root], options, out=out)
        return inputs, lambda: ops.reduce(op, value, value, options, out=value if in_place else None)

    def measure(
        patterns: list[NDArray[Any]], reduced: NDArray[Any], count: int, root: int, in_place: bool
    ) -> tuple[list[float], int | None]:
        times: list[float] = []
        inputs, call = prepare(patterns, count, root, in_place)
        result: Any = None
        for k in range(request.warmup_iters + request.iterations):
            result = None  # frees the memory of the previous result outside of the timed region
            trainer.wait(inputs)
            before = time.perf_counter()
            result = call()
            trainer.wait(result)
            if k >= request.warmup_iters:
                times.append(time.perf_counter() - before)
        if not request.validation:
            return times, None
        if in_place:  # the calls above overwrote their inputs: check another call, on new inputs
            _, check = prepare(patterns, count, root, in_place=True)
            result = check()
        expected = patterns[root] if collective == "broadcast" else reduced
        return times, sum(exact.wrong(trainer.get(x), expected, count) for x in result)

    return measure
