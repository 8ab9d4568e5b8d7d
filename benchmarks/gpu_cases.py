"""A case of a benchmark on CUDA devices: it times contenders in turn, checks their sums and prints ratios to a copy.

A row says how many bytes the contender moves (reads plus writes of device memory, as its kernels are written) and what
share of the measured copy rate that is. A ratio is the median of the ratios within the turns.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from common import size_text, summary
from gpu_device import Gpus, Run

import crossreduce as cr

COPY = "torch copy_"  # a contender of this name sets the copy rate of its case
CHECKED = 1 << 16  # elements at both ends of a result that are compared
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.05}  # relative to the sum of |x|

Tensors = list[list[torch.Tensor]]  # for each tensor one per replica


class Contender(NamedTuple):
    """A way to reduce: the function, the bytes that it moves, and how its results are read and timed.

    Args:
      run: returns one list of results per tensor, or ``None``, and then nothing is checked.
      nbytes: the bytes read plus the bytes written.
      by_wall: timed by the host's clock, since it runs in streams of its own.
    """

    run: Run
    nbytes: int
    by_wall: bool = False


class GpuCase:
    """The times of contenders for one batch, printed beside the copy rate and the targets."""

    def __init__(
        self, name: str, gpus: Gpus, contenders: dict[str, Contender], sizes: Any, tensors: Tensors | None = None
    ):
        self.name, self.gpus, self.sizes, self.targets = name, gpus, sizes, []
        self.times: dict[str, list[float]] = {key: [] for key in contenders}
        self.rows: dict[str, dict[str, Any]] = {}
        calls = {}
        for key, one in contenders.items():
            results = one.run()
            if tensors is not None and results is not None:
                check(gpus, key, results, tensors)
            del results
            once = self._seconds(one, 1)
            calls[key] = 1 if gpus.is_fake else min(1000, max(3, int(sizes.least_s / once)))
        for _ in range(sizes.repeats):
            for key, one in contenders.items():
                self.times[key].append(self._seconds(one, calls[key]))
        print(f"\n{name}\n  {'':44} {'median ms':>10} {'least':>8} {'most':>8} {'moved':>9} {'GB/s':>6} {'of copy':>7}")
        copies = contenders[COPY].nbytes / summary(self.times[COPY])["median_s"] if COPY in contenders else 0.0
        rate = copies / 1e9 or sizes.copy_rate
        for key, one in contenders.items():
            clock = "wall" if one.by_wall else "events"
            row: dict[str, Any] = {**summary(self.times[key]), "bytes": one.nbytes, "clock": clock}
            row["GBps"] = one.nbytes / row["median_s"] / 1e9
            row["of_copy"] = row["GBps"] / rate
            self.rows[key] = row
            times = f"{row['median_s'] * 1e3:10.4f} {row['min_s'] * 1e3:8.4f} {row['max_s'] * 1e3:8.4f}"
            print(f"  {key:44} {times} {size_text(one.nbytes):>9} {row['GBps']:6.0f} {row['of_copy']:7.1%}")

    def _seconds(self, one: Contender, calls: int) -> float:
        return (self.gpus.wall_seconds if one.by_wall else self.gpus.device_seconds)(one.run, calls)

    def add_host_times(self, runs: dict[str, Run]) -> None:
        """Measure and print how long calls take on the host, without waiting for the device."""
        for key, run in runs.items():
            seconds = self.gpus.host_seconds(run)
            self.rows.setdefault(key, {})["host_s"] = seconds
            print(f"  {key:44} {seconds * 1e6:10.1f} us until the call returns")

    def ratio(self, this: str, other: str) -> float | None:
        """Return the median over the turns of time of ``this`` / time of ``other``; ``None``: one was not measured."""
        if not self.times.get(this) or not self.times.get(other):
            return None
        return statistics.median(a / b for a, b in zip(self.times[this], self.times[other], strict=True))

    def require_share(self, key: str, least: float) -> None:
        """Set the target that a contender moves its bytes at a share of the copy rate."""
        self.require(f"{key}: share of the copy rate", self.rows[key]["of_copy"], least=least)

    def require_speed(self, ours: str, other: str, least: float) -> None:
        """Set the target that ``ours`` is at least ``least`` times as fast as another contender."""
        self.require(f"{ours}: times as fast as {other}", self.ratio(other, ours), least=least)

    def require_host_us(self, key: str, most: float) -> None:
        """Set the target that a contender returns on the host after so many microseconds."""
        self.require(f"{key}: us until the call returns", self.rows[key]["host_s"] * 1e6, most=most)

    def require_us(self, key: str, most: float) -> None:
        """Set the target that a contender takes so many microseconds on the device."""
        self.require(f"{key}: us on the device", self.rows[key]["median_s"] * 1e6, most=most)

    def require(self, what: str, measured: float | None, least: float | None = None, most: float | None = None) -> None:
        """Compare a measured value with a target, which is ``least`` or ``most``; print and keep both."""
        limit, sign = (least, ">=") if least is not None else (most, "<=")
        met, text = None, "not measured"
        if measured is not None:
            met = measured >= limit if sign == ">=" else measured <= limit
            text = f"measured {measured:<8.4g} " + ("fake driver" if self.gpus.is_fake else "met" if met else "not met")
        print(f"    {what:84} target {sign} {limit:<6g} {text}")
        self.targets.append(
            {"what": f"{self.name}: {what}", "target": f"{sign} {limit:g}", "measured": measured, "met": met}
        )

    def kept(self) -> dict[str, Any]:
        """Return the rows and the targets, for the JSON file."""
        return {"rows": self.rows, "targets": self.targets}


def check(gpus: Gpus, name: str, results: Any, tensors: Tensors) -> None:
    """Raise unless both ends of every result are the sums, within the error of any order of additions."""
    results = list(results)
    assert len(results) == len(tensors), name
    for components, xs in zip(results, tensors, strict=True):
        for part in (slice(0, CHECKED), slice(-CHECKED, None)):
            parts = [gpus.on_host(x.reshape(-1)[part]).double() for x in xs]
            right, size = sum(parts), sum(x.abs() for x in parts)
            for result in components:
                got = gpus.on_host(torch.as_tensor(result).reshape(-1)[part]).double()
                assert ((got - right).abs() <= TOLERANCE[xs[0].dtype] * size).all(), f"{name}: the sums are wrong"


def torch_contenders(tensors: Tensors, results: int) -> dict[str, Contender]:
    """Return torch's usual ways: a stack and its sum, a chain of additions, and one of lists of tensors."""
    nbytes, n = sum(row[0].nbytes for row in tensors), len(tensors[0])
    copies = results - 1

    def stack() -> object:
        sums = [torch.stack(row).sum(0) for row in tensors]
        return [[x, *(x.clone() for _ in range(copies))] for x in sums]

    def chain() -> object:
        made = []
        for row in tensors:
            x = torch.add(row[0], row[1])
            for y in row[2:]:
                x.add_(y)
            made.append([x, *(x.clone() for _ in range(copies))])
        return made

    replicas = list(zip(*tensors, strict=True))

    def lists() -> object:
        sums = torch._foreach_add(replicas[0], replicas[1])
        for each in replicas[2:]:
            torch._foreach_add_(sums, each)
        return [[x, *(x.clone() for _ in range(copies))] for x in sums]

    to = f", {copies} copies" if copies else ", one result"
    found = {
        f"torch stack().sum(0){to}": Contender(stack, (3 * n + 1 + 2 * copies) * nbytes),
        f"torch add_ chain{to}": Contender(chain, (3 * (n - 1) + 2 * copies) * nbytes),
    }
    if len(tensors) > 1:
        found[f"torch _foreach_add_ chain{to}"] = Contender(lists, (3 * (n - 1) + 2 * copies) * nbytes)
    return found


def peers_on(gpus: Gpus, xs: Sequence[torch.Tensor]) -> dict[str, Contender]:
    """Return the contenders of CuPy and JAX for one tensor; a library that fails is left out, and the error printed."""
    found: dict[str, Contender] = {}
    for peers in (cupy_contenders, jax_contenders):
        try:
            made = {} if gpus.is_fake else peers(xs)
            for one in made.values():
                one.run()
            found |= made
        except Exception as error:  # noqa: BLE001 - any error of another library
            print(f"  {peers.__name__}: {type(error).__name__}: {error}")
    return found


def cupy_contenders(xs: Sequence[torch.Tensor]) -> dict[str, Contender]:
    """Return CuPy's own sum of a stack, and its elementwise kernels; none for bfloat16, which CuPy does not have."""
    if xs[0].dtype is torch.bfloat16 or importlib.util.find_spec("cupy") is None:
        return {}
    import cupy

    arrays, n, made = [cupy.from_dlpack(x) for x in xs], len(xs), {}
    for results in (1, n):
        outs = [f"y{k}" for k in range(results)]
        total = " + ".join(f"x{k}" for k in range(n))
        body = f"T sum = {total}; " + "; ".join(f"{out} = sum" for out in outs)
        inputs = ", ".join(f"T x{k}" for k in range(n))
        kernel = cupy.ElementwiseKernel(inputs, ", ".join(f"T {out}" for out in outs), body, f"sum_{n}_{results}")

        def run(kernel: Callable[..., Any] = kernel) -> object:
            found = kernel(*arrays)
            return [list(found) if isinstance(found, tuple) else [found]]

        name = f"CuPy ElementwiseKernel, {results} result{'s' * (results > 1)}"
        made[name] = Contender(run, (n + results) * xs[0].nbytes)

    def stack() -> object:
        total = cupy.stack(arrays).sum(0)
        return [[total, *(total.copy() for _ in range(n - 1))]]

    made[f"CuPy stack().sum(0), {n - 1} copies"] = Contender(stack, (3 * n + 1 + 2 * (n - 1)) * xs[0].nbytes)
    return made


def jax_contenders(xs: Sequence[torch.Tensor]) -> dict[str, Contender]:
    """Return jitted sums in JAX with one result and with one per replica, and this library's call of JAX arrays."""
    if importlib.util.find_spec("jax") is None:
        return {}
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "gpu":
        return {}
    if xs[0].dtype is torch.float64:
        jax.config.update("jax_enable_x64", True)
    arrays = [jax.dlpack.from_dlpack(x) for x in xs]
    n, names = len(xs), ["cuda:0", *(f"cuda:0#{k}" for k in range(1, len(xs)))]
    last: list[Any] = []

    def contender(results: int, function: Callable[..., Any]) -> Contender:
        def run() -> object:
            last[:] = function(*arrays)
            return [[torch.from_dlpack(x) for x in last]]

        # The stream of XLA runs the calls in order, and torch.from_dlpack makes torch's stream wait for it.
        return Contender(run, (n + results) * xs[0].nbytes, by_wall=True)

    one = jax.jit(lambda *ys: [sum(ys[1:], ys[0])])
    every = jax.jit(lambda *ys: [sum(ys[1:], ys[0])] * n)
    return {
        "JAX jit sum, one result": contender(1, one),
        f"JAX jit sum, {n} results": contender(n, every),
        f"ours direct of JAX arrays, {n} results": contender(n, lambda *ys: cr.all_reduce(list(ys), devices=names)),
    }
