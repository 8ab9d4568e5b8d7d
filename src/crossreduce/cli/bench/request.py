"""The settings of one run of ``crossreduce bench``, its measurements, and the loop over its sizes and roots.

Input: the options. Output: one ``Row`` per size and root. How a collective runs is a parameter of the loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...devices import parse
from ...errors import ArgumentError, UnsupportedError
from ...frameworks.numpy.arrays import numbers_of
from ...ops import ReduceOp
from ...options import CommunicationOptions
from ...planning.requests import busbw_factor
from ...ranks.intra_host.instructions import reduction_numbers
from . import exact


@dataclass(frozen=True)
class Timing:
    """The times of calls of one size, all out of place or all in place."""

    size: int
    times_s: Sequence[float]  # of each call
    nwrong: int | None  # the number of wrong elements; None if they were not checked
    busbw_factor: float  # busbw / algbw, as defined in nccl-tests' doc/PERFORMANCE.md

    @property
    def time_us(self) -> float:
        """The mean time of a call, which nccl-tests calls time."""
        return 1e6 * sum(self.times_s) / len(self.times_s)

    @property
    def algbw(self) -> float:
        """Bytes of the complete buffer divided by ``time_us``, in GB/s (1e9)."""
        return self.size / self.time_us / 1e3

    @property
    def busbw(self) -> float:
        """The bus bandwidth of nccl-tests, which can be compared between collectives and numbers of ranks."""
        return self.algbw * self.busbw_factor

    def per_iter(self) -> dict[str, Any]:
        """Return statistics of the times of the calls, with nccl-tests' keys."""
        times, n = np.sort(np.array(self.times_s)) * 1e6, len(self.times_s)
        # A percentile is the smallest time that at least so many percent of the times do not exceed.
        p95, p99 = (float(times[min(n - 1, (n * percent + 99) // 100 - 1)]) for percent in (95, 99))
        return {
            "min_us": float(times[0]),
            "max_us": float(times[-1]),
            "avg_us": self.time_us,
            "p50_us": float(np.median(times)),
            "p95_us": p95,
            "p99_us": p99,
            "stdev_us": float(times.std()),
            "cv_pct": float(100 * times.std() / times.mean()),
            "times_us": [1e6 * t for t in self.times_s],
        }


@dataclass(frozen=True)
class Row:
    """The measurements of one algorithm or backend for one size and root."""

    algorithm: str
    size: int
    count: int  # elements of the buffer; for all_gather and reduce_scatter, of one rank's share
    type: str  # nccl-tests' name of the dtype
    redop: str
    root: int
    out_of_place: Timing
    in_place: Timing | None

    @property
    def timings(self) -> list[Timing]:
        """The timings out of place and, if measured, in place."""
        return [self.out_of_place] if self.in_place is None else [self.out_of_place, self.in_place]


@dataclass(frozen=True)
class BenchRequest:
    """The settings of one run, in bytes. Settings in the ``config`` of nccl-tests' JSON have the same names there."""

    framework: str
    collective: str
    op: str  # sum, product, min, max or mean; sum if the collective has no op
    redop: str  # nccl-tests' name of the op; none if the collective has no op
    dtype: str  # NumPy's name of the dtype
    nccl_type: str  # the dtype as nccl-tests spells it
    roots: tuple[int, ...]  # the ranks to measure as root; (-1,) for collectives without a root
    algorithms: tuple[str, ...]
    num_packs: int
    devices: tuple[str, ...]
    minimum_bytes: int
    maximum_bytes: int
    step_bytes: int
    step_factor: int
    warmup_iters: int
    iterations: int
    validation: int  # 0 if elements are not checked
    per_iter_timing: bool
    output: str | None = None  # the file for the report
    json: bool = False  # whether only the report is printed, as JSON
    args: tuple[str, ...] = ()  # the command line, for the report
    average: int = 1  # nccl-tests' -a: how the ranks' times are combined
    backends: tuple[str, ...] = ()  # the ranks' backends; the first is compared with the others
    framework_version: str = ""
    exact: bool = False  # whether crossreduce computes exact sums
    processes: tuple[tuple[int, str], ...] = ()  # the pid and host of each rank; empty: this process has all devices
    hosts: int = 1  # of the ranks
    carrier: str = ""  # the transport of crossreduce between these hosts, such as "tcp"

    @property
    def transport(self) -> str:
        """Where the devices are, as the header of the table states it."""
        if self.processes:
            over = f" over {self.carrier}" if self.carrier else ""
            return f"ranks on {self.hosts} host{'s' if self.hosts > 1 else ''}{over}"
        kinds = {parse(device).kind for device in self.devices}
        return "in-process emulation" if kinds == {"cpu"} else "in-process"

    @property
    def options(self) -> CommunicationOptions | None:
        """The options of crossreduce's calls in one process, or ``None`` for the default options."""
        return CommunicationOptions(exact=True) if self.exact else None

    def require_exact(self) -> None:
        """Raise an error if the collective, the op, the dtype or the devices do not allow exact sums."""
        if self.redop == "none":
            problem = f"--exact cannot be used with {self.collective}, which adds nothing: omit --exact."
            raise ArgumentError(problem)
        others = [device for device in self.devices if parse(device).kind != "cpu"]
        if others:
            problem = "exact sums are computed only in host memory."
            raise UnsupportedError.of(problem, f"--exact on {', '.join(others)}", "cpu devices, as in --devices 8")
        op, count = ReduceOp(self.op), len(self.devices)
        if self.backends:
            reduction_numbers(op, self.dtype, count, exact=True)
        else:
            numbers_of(op, self.dtype, count).exactly()

    def to_json(self) -> str:
        """Return the request as JSON text, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchRequest:
        """Return the request that ``to_json`` wrote."""
        fields: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in json.loads(text).items()}
        return cls(**fields)

    def sizes(self) -> Iterator[int]:
        """Yield the sizes in bytes, in nccl-tests' order."""
        nbytes = self.minimum_bytes
        while nbytes <= self.maximum_bytes:
            yield nbytes
            nbytes = nbytes * self.step_factor if self.step_factor > 1 else nbytes + self.step_bytes

    def counts(self) -> Iterator[tuple[int, int]]:
        """Yield each size in bytes, rounded as in ``rows``, and the number of elements of the complete buffer."""
        n, itemsize = len(self.devices), np.dtype(self.dtype).itemsize
        least = n if self.collective in ("all_gather", "reduce_scatter") else 1
        for nbytes in self.sizes():
            count = max(nbytes // itemsize // least, 1) * least
            yield count * itemsize, count

    def rows(self, name: str, measure: Measure) -> Iterator[Row]:
        """Measure the algorithm or backend ``name`` on the inputs of ``exact``, and yield a row per size and root.

        As in nccl-tests, sizes are rounded down to a number of elements that the ranks can share equally, but not to 0.
        """
        n = len(self.devices)
        in_ranks = bool(self.backends)
        patterns = exact.inputs(self.op, self.dtype, n, in_ranks)
        reduced = exact.result(self.op, patterns, in_ranks)
        shared = self.collective in ("all_gather", "reduce_scatter")
        # In one process the mean of integers is a float, which an array of integers cannot store.
        fits = in_ranks or self.op != "mean" or patterns[0].dtype.kind not in "iu"
        writable = fits and self.framework in ("numpy", "torch", "cupy") and self.collective in ("all_reduce", "reduce")
        factor = busbw_factor(self.collective, n)
        for size, count in self.counts():
            for root in self.roots:
                out_of_place = Timing(size, *measure(patterns, reduced, count, root, False), factor)
                in_place = None
                if writable:
                    in_place = Timing(size, *measure(patterns, reduced, count, root, True), factor)
                row_count = count // n if shared else count
                yield Row(name, size, row_count, self.nccl_type, self.redop, root, out_of_place, in_place)


# Runs a collective. Arguments: the patterns of the inputs, the pattern of their reduction, the number of elements in
# the complete buffer, the root, whether the result is written over the inputs. Returns the seconds of each call, and
# the number of wrong elements, or ``None`` if they were not checked.
Measure = Callable[[list[NDArray[Any]], NDArray[Any], int, int, bool], tuple[Sequence[float], int | None]]
