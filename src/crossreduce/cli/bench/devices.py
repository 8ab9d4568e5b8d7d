"""``crossreduce bench`` for the devices of this process.

Input: a ``BenchRequest`` and, optionally, a topology. Output: nccl-tests' table on standard output, its JSON, an exit
code. For devices in host memory the times compare algorithms and frameworks; they do not predict those of GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ... import AllReduceCrossDeviceOps, Mirrored, PerReplica, Topology
from ..output import atomic_json, print_lines
from ..trainers import Trainer, load
from . import exact, nccl_tests
from .request import BenchRequest

COLLECTIVES: Final = ("all_reduce", "reduce", "broadcast")


def measure(request: BenchRequest, topology: Topology | None, topology_name: str | None) -> int:
    """Measure every algorithm, print, and return the exit code: 1 if an element is wrong."""
    with atomic_json("--json", None if request.json is None else Path(request.json)) as write:
        start_time = nccl_tests.now()
        trainer = load(request.config.framework, request.config.devices)
        config = replace(request.config, framework_version=trainer.version)
        print_lines(nccl_tests.header(config))
        if topology_name is not None:
            print_lines([f"# Planned on the topology: {topology_name}"])
        rows = []
        for algorithm in config.algorithms:
            print_lines(nccl_tests.table_header(config, algorithm))
            ops = AllReduceCrossDeviceOps(algorithm, config.num_packs, topology=topology)
            for row in _rows(trainer, request, ops, algorithm):
                print_lines([nccl_tests.line(config, row)])
                rows.append(row)
        print_lines(nccl_tests.footer(config, rows))
        report = nccl_tests.report(config, rows, list(request.args), start_time)
        report["crossreduce"]["topology"] = topology_name
        write(report)
    return int(any(timing.nwrong for row in rows for timing in row.timings))


def _rows(
    trainer: Trainer, request: BenchRequest, ops: AllReduceCrossDeviceOps, algorithm: str
) -> Iterator[nccl_tests.Row]:
    """Measure one algorithm at every size and root."""
    config = request.config
    patterns = exact.inputs(request.op, request.dtype, len(config.devices))
    reduced = exact.result(request.op, patterns)
    itemsize = patterns[0].itemsize
    # The mean of integers is a float, which an array of integers cannot store.
    fits = request.op != "mean" or patterns[0].dtype.kind not in "iu"
    writable = fits and config.framework in ("numpy", "torch") and config.collective != "broadcast"
    for nbytes in config.sizes():
        count = nbytes // itemsize
        values = [np.resize(x, count) for x in patterns]
        for root in request.roots:
            case = _Case(trainer, request, ops, values, root)
            expected = patterns[root] if config.collective == "broadcast" else reduced
            yield nccl_tests.Row(
                algorithm=algorithm,
                size=count * itemsize,
                count=count,
                type=request.nccl_type,
                redop=request.redop,
                root=root,
                out_of_place=case.timing(expected, False),
                in_place=case.timing(expected, True) if writable else None,
            )


@dataclass
class _Case:
    """One size of a collective, from one root."""

    trainer: Trainer
    request: BenchRequest
    ops: AllReduceCrossDeviceOps
    values: list[NDArray[Any]]
    root: int

    def timing(self, expected: NDArray[Any], in_place: bool) -> nccl_tests.Timing:
        """Time the calls and check the last result."""
        config = self.request.config
        given = self._inputs()
        times, result = self._timed(self._call(given, in_place), given)
        nwrong = None
        if config.validation:
            if in_place:  # each call reduced what the previous one had left
                result = self._call(self._inputs(), True)()
            nwrong = sum(exact.wrong(self.trainer.get(x), expected, self.values[0].size) for x in result)
        factor = nccl_tests.busbw_factor(config.collective, len(config.devices))
        return nccl_tests.Timing(self.values[0].nbytes, tuple(times), nwrong, factor)

    def _inputs(self) -> list[Any]:
        """Return new copies of the inputs, each on its device."""
        devices = self.request.config.devices
        return [self.trainer.put(x, device) for x, device in zip(self.values, devices, strict=True)]

    def _timed(self, call: Callable[[], Mirrored], given: list[Any]) -> tuple[list[float], Mirrored]:
        """Return the seconds of each call after the warm-up, and the last result."""
        config = self.request.config
        times: list[float] = []
        result: Any = None
        for k in range(config.warmup_iters + config.iterations):
            result = None  # frees the memory of the previous result outside of the timed region
            self.trainer.wait(given)
            before = time.perf_counter()
            result = call()
            self.trainer.wait(result)
            if k >= config.warmup_iters:
                times.append(time.perf_counter() - before)
        return times, result

    def _call(self, given: list[Any], in_place: bool) -> Callable[[], Mirrored]:
        """Return the function to time."""
        ops, op, config = self.ops, self.request.op, self.request.config
        value = PerReplica(given, config.devices)
        if config.collective == "broadcast":
            return lambda: ops.broadcast(given[self.root], value)
        if config.collective == "reduce":
            device = config.devices[self.root]
            out = PerReplica([given[self.root]], [device]) if in_place else None
            return lambda: ops.reduce(op, value, device, out=out)
        return lambda: ops.reduce(op, value, value, out=value if in_place else None)
