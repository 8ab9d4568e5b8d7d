"""Are reductions on CUDA devices right, how close are they to the rate of a copy, and how fast are other libraries?

One command of at most ten minutes on a machine with one GPU or more; --quick takes a minute. The replicas are logical
devices of the first GPU (``cuda:0``, ``cuda:0#1``, ...), except in the last case, which needs several GPUs.

First thousands of drawn batches are compared with the host's kernels, bit for bit. Then contenders run in turn, between
CUDA events; a time is the median over the turns of the mean of many calls. JAX is timed by the host's clock around as
many calls. "Until the call returns" is the time on the host, which does not wait for the device. The copy rate is that
of torch's ``copy_``, bytes read plus bytes written. Sums of all contenders are checked before they are timed.

With ``--driver fake`` the fake driver of the tests takes the place of CUDA: all code runs, without a GPU and in tiny
sizes, its times mean nothing, and no JSON is written. Results are written to the file of --json only.
Run: python benchmarks/gpu_reduction.py [--quick] [--driver fake] [--only NAME] [--json PATH]
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from common import keep, size_text
from gpu_cases import COPY, Contender, GpuCase, peers_on, torch_contenders
from gpu_correctness import check_calls, check_kernels, check_roundings
from gpu_device import FakeGpus, Gpus, fake_cuda, queued
from gpu_kernels import kernels
from host_reduction import resnet50

import crossreduce as cr

LIMIT_S = 400  # no further case begins after so many seconds; the last one has two programs of at most 90 s
CHILD_S = 90
N = 8

# Targets for one H100 or H200. S is the size of a tensor; a fraction says how many bytes a peer and we must move.
SHARE = 0.9  # of the copy rate, for large tensors
GRADIENTS_SHARE, GRAPH_SHARE = 0.85, 0.88  # the same for 161 gradients, of which many are small; in a CUDA graph
BY_PEERS = 2.2  # 35 S / 16 S = 2.2: a sum, and copies of it, in place of one pass
BY_TORCH_ONE = 2.0  # 21 S / 9 S = 2.3
BY_JAX = 1.0  # 9 S / 9 S: XLA fuses the sum
BY_LOOP = 5.0  # of 161 gradients: torch's loop launches 2,415 kernels
TREE = 1.1  # hierarchical_copy / direct: on one GPU both are one pass
MANY_HOST_US, MANY_DEVICE_US = 30, 15  # of 160 tensors of 1 KiB
SMALL_HOST_US = 12  # of one tensor of 1 KiB


CALL, GRAPH = "ours batch_reduce", "ours batch_reduce in a CUDA graph"  # contenders of `many`


class Sizes(NamedTuple):
    """Sizes in bytes per replica, and repeats."""

    large: int = 1 << 28
    copied: int = 1 << 30
    grid: tuple[int, ...] = (1 << 20, 1 << 24, 1 << 28)
    gradient: int = 1 << 30  # the greatest number of elements of a gradient
    small: int = 160
    kernels: int = 3000
    calls: int = 3000
    rounded: int = 1 << 32  # how many of all float32
    repeats: int = 11
    least_s: float = 0.02
    copy_rate: float = 0.0


QUICK = Sizes(1 << 25, 1 << 28, (1 << 20, 1 << 25), kernels=400, calls=300, repeats=3, least_s=0.01)
FAKE = Sizes(1 << 14, 1 << 14, (1 << 12,), 40, 20, 150, 40, 1 << 15, 1, 0.0)


def names(n: int) -> list[str]:
    return ["cuda:0", *(f"cuda:0#{k}" for k in range(1, n))]


def batch(gpus: Gpus, shapes: Any, dtype: torch.dtype, n: int = N) -> list[list[torch.Tensor]]:
    return [[gpus.random(shape, dtype) for _ in range(n)] for shape in shapes]


def ours(
    tensors: list[list[torch.Tensor]], algorithm: str, results: int, out: list[list[torch.Tensor]] | None = None
) -> Contender:
    """Return a call of ``batch_reduce`` to one or all replicas; it moves the sources and the results once."""
    replicas = names(len(tensors[0]))
    values = [cr.PerReplica(row, replicas) for row in tensors]
    op, pairs = cr.AllReduceCrossDeviceOps(algorithm), [(x, x if results > 1 else "cuda:0") for x in values]
    keywords = {} if out is None else {"out": [cr.PerReplica(row, replicas) for row in out]}
    nbytes = sum(row[0].nbytes for row in tensors) * (len(tensors[0]) + results)
    return Contender(lambda: op.batch_reduce("sum", pairs, **keywords), nbytes)


def fits(gpus: Gpus, nbytes: int) -> bool:
    """Return whether so many bytes are free; print it if not."""
    free = gpus.free_nbytes()
    if nbytes > free:
        print(f"  not measured: it needs {size_text(nbytes)}, and {size_text(free)} are free")
    return nbytes <= free


def correctness(gpus: Gpus, sizes: Sizes) -> dict[str, Any]:
    """Compare drawn batches with the host's kernels."""
    launches = check_kernels(sizes.kernels, seed=1)
    calls = check_calls(gpus, sizes.calls, seed=1)
    rounded = check_roundings(gpus, sizes.rounded)
    print(f"\ncorrectness: {launches} launches of all kernels and {sum(calls.values())} calls, bit for bit;")
    print(f"  {rounded} float32 rounded to float16 and bfloat16")
    return {"launches": launches, "calls": calls, "rounded": rounded}


def copy_rate(gpus: Gpus, sizes: Sizes) -> GpuCase:
    """Measure the rate of a copy within the device."""
    source, target = (gpus.random((sizes.copied // 4,), torch.float32) for _ in range(2))
    return GpuCase("copy", gpus, {COPY: Contender(lambda: target.copy_(source), 2 * sizes.copied)}, sizes)


def large(gpus: Gpus, sizes: Sizes, dtype: torch.dtype) -> GpuCase | None:
    """One large tensor over 8 replicas: this library, torch, CuPy and JAX, with 8 results and with one."""
    if not fits(gpus, 36 * sizes.large):
        return None
    tensors = batch(gpus, [(sizes.large // dtype.itemsize,)], dtype)
    out = batch(gpus, [(sizes.large // dtype.itemsize,)], dtype)
    to_all, to_one, tree = "ours direct, 8 results", "ours direct, one result", "ours hierarchical_copy, 8 results"

    def copy() -> None:
        for x, y in zip(tensors[0], out[0], strict=True):
            y.copy_(x)

    contenders = {
        COPY: Contender(copy, 2 * N * sizes.large),
        to_all: ours(tensors, "direct", N),
        "ours direct, 8 results, out=": ours(tensors, "direct", N, out),
        tree: ours(tensors, "hierarchical_copy", N),
        to_one: ours(tensors, "direct", 1),
        **torch_contenders(tensors, N),
        **torch_contenders(tensors, 1),
        **peers_on(gpus, tensors[0]),
    }
    case = GpuCase(f"{N} x {size_text(sizes.large)} {str(dtype)[6:]}", gpus, contenders, sizes, tensors)
    case.require_share(to_all, SHARE)
    case.require_share(to_one, SHARE)
    case.require(f"{tree}: times as long as direct", case.ratio(tree, to_all), most=TREE)
    case.require_speed(to_all, f"torch stack().sum(0), {N - 1} copies", BY_PEERS)
    case.require_speed(to_all, f"torch add_ chain, {N - 1} copies", BY_PEERS)
    case.require_speed(to_one, "torch add_ chain, one result", BY_TORCH_ONE)
    if dtype is torch.float32:
        case.require_speed(to_all, f"CuPy stack().sum(0), {N - 1} copies", BY_PEERS)
        case.require_speed(to_all, f"CuPy ElementwiseKernel, {N} results", 1)
    case.require_speed(to_all, f"JAX jit sum, {N} results", BY_PEERS)
    case.require_speed(to_one, "JAX jit sum, one result", BY_JAX)
    return case


def many(gpus: Gpus, sizes: Sizes, name: str, shapes: list[tuple[int, ...]]) -> GpuCase | None:
    """Many tensors in one call: this library, alone and in a CUDA graph, and torch's loops."""
    nbytes = 4 * sum(map(math.prod, shapes))
    if not fits(gpus, 60 * nbytes):
        return None
    tensors, out = batch(gpus, shapes, torch.float32), batch(gpus, shapes, torch.float32)
    one = ours(tensors, "direct", N)
    counts = queued(one.run)
    replay = Contender(gpus.captured(one.run), one.nbytes)
    trees, op = [list(leaves) for leaves in zip(*tensors, strict=True)], cr.AllReduceCrossDeviceOps("direct")
    contenders = {
        CALL: one,
        "ours batch_reduce, out=": ours(tensors, "direct", N, out),
        "ours all_reduce of lists": Contender(
            lambda: list(zip(*cr.all_reduce(trees, cross_device_ops=op), strict=True)), one.nbytes
        ),
        GRAPH: replay,
        **torch_contenders(tensors, N),
    }
    case = GpuCase(f"{name}, 8 replicas", gpus, contenders, sizes, tensors)
    print(f"  ours queues {counts['launches']} launches and {counts['copies']} copies")
    case.add_host_times({key: each.run for key, each in contenders.items()})
    case.require("launches of one call", counts["launches"], most=1)
    for peer in torch_contenders(tensors, N):
        case.require_speed(CALL, peer, 1)
    case.rows["queued"] = counts
    return case


def gradients(gpus: Gpus, sizes: Sizes) -> GpuCase | None:
    """The 161 gradients of ResNet-50."""
    leaves = optree.tree_leaves(resnet50(), is_leaf=lambda node: isinstance(node, tuple))
    shapes = [leaf if math.prod(leaf) <= sizes.gradient else (sizes.gradient,) for leaf in leaves]
    case = many(gpus, sizes, f"{len(shapes)} gradients of ResNet-50", shapes)
    if case is not None:
        case.require_share(CALL, GRADIENTS_SHARE)
        case.require_share(GRAPH, GRAPH_SHARE)
        for loop in (f"torch stack().sum(0), {N - 1} copies", f"torch add_ chain, {N - 1} copies"):
            case.require_speed(CALL, loop, BY_LOOP)
    return case


def many_small(gpus: Gpus, sizes: Sizes) -> GpuCase | None:
    """160 tensors of 1 KiB."""
    case = many(gpus, sizes, f"{sizes.small} x 1 KiB float32", [(256,)] * sizes.small)
    if case is not None:
        case.require_host_us(CALL, MANY_HOST_US)
        case.require_us(GRAPH, MANY_DEVICE_US)
    return case


def one_small(gpus: Gpus, sizes: Sizes) -> GpuCase | None:
    """One tensor of 1 KiB."""
    case = many(gpus, sizes, "1 KiB float32", [(256,)])
    if case is not None:
        case.require_host_us(CALL, SMALL_HOST_US)
    return case


def grid(gpus: Gpus, sizes: Sizes) -> list[GpuCase]:
    """Several dtypes, numbers of sources and results, and sizes, each beside a copy of as many bytes."""
    cases = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for nbytes in sizes.grid:
            if not fits(gpus, 34 * nbytes):
                continue
            every = batch(gpus, [(nbytes // dtype.itemsize,)], dtype, 16)
            contenders = {}
            for n, results in ((8, 1), (8, 8), (2, 2), (4, 4), (16, 16)):
                tensors = [every[0][:n]]
                contenders[f"{n} to {results}"] = one = ours(tensors, "direct", results)
                if nbytes < 1 << 22:  # so short that the host's time would count
                    contenders[f"{n} to {results}, in a CUDA graph"] = one._replace(run=gpus.captured(one.run))
            cases.append(GpuCase(f"{str(dtype)[6:]}, {size_text(nbytes)} per replica", gpus, contenders, sizes))
            del every, tensors, contenders, one
            gpus.release()
    return cases


def several(gpus: Gpus, sizes: Sizes) -> GpuCase | None:
    """All GPUs with a tensor each: which access each other, rates of algorithms, and torch's NCCL."""
    if gpus.count < 2:
        print("\nseveral GPUs: not measured, there is one")
        return None
    from crossreduce.engines.cuda import driver

    enable = driver.native().enable_peer
    matrix = [[a == b or enable(a, b) for b in range(gpus.count)] for a in range(gpus.count)]
    print("\naccess between GPUs:", *("".join("-x"[each] for each in row) for row in matrix))
    rows = [[gpus.random((sizes.large // 4,), torch.float32, k) for k in range(gpus.count)]]
    value = cr.PerReplica(rows[0], [f"cuda:{k}" for k in range(gpus.count)])
    nbytes = 2 * (gpus.count - 1) * sizes.large  # over the links in all, the least of any all-reduce
    contenders = {}
    for algorithm in ("direct", "ring", "forest", "hierarchical_copy"):
        topology = cr.Topology.discover() if algorithm == "forest" and not gpus.is_fake else None
        topology = cr.Topology.ring(gpus.count) if gpus.is_fake and algorithm == "forest" else topology
        op = cr.AllReduceCrossDeviceOps(algorithm, topology=topology)
        contenders[f"ours {algorithm}"] = Contender(
            lambda op=op: [op.reduce("sum", value, value)], nbytes, by_wall=True
        )
    if not gpus.is_fake:
        outs = [torch.empty_like(x) for x in rows[0]]

        def nccl() -> object:
            torch.cuda.nccl.all_reduce(rows[0], outs)
            return [outs]

        contenders["NCCL, torch.cuda.nccl.all_reduce"] = Contender(nccl, nbytes, by_wall=True)
    case = GpuCase(f"{gpus.count} GPUs, {size_text(sizes.large)} float32", gpus, contenders, sizes, rows)
    case.rows["peers"] = {"matrix": [[int(each) for each in row] for row in matrix]}
    return case


def sanitizer(gpus: Gpus, sizes: Sizes) -> dict[str, str]:
    """Run some of the correctness checks under compute-sanitizer."""
    program = shutil.which("compute-sanitizer")
    if program is None or gpus.is_fake:
        print("\ncompute-sanitizer: " + ("not run with the fake driver" if gpus.is_fake else "not installed"))
        return {}
    found = {}
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # memcheck knows the bounds of each tensor
    for tool in ("memcheck", "racecheck"):
        child = [sys.executable, __file__, "--only", "correctness", "--batches", "200" if sizes.repeats > 5 else "40"]
        command = [program, "--tool", tool, "--error-exitcode", "9", *child]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=CHILD_S, check=False, env=environment
            )
            lines = done.stdout.splitlines() or done.stderr.splitlines() or [""]
            found[tool] = f"exit code {done.returncode}: {lines[-1]}"
        except subprocess.TimeoutExpired:
            found[tool] = f"not finished after {CHILD_S} s"
        print(f"\ncompute-sanitizer {tool}: {found[tool]}")
    return found


CASES = {
    "correctness": correctness,
    "large": partial(large, dtype=torch.float32),
    "halves": partial(large, dtype=torch.bfloat16),
    "gradients": gradients,
    "many_small": many_small,
    "one_small": one_small,
    "several": several,
    "grid": grid,
    "kernels": kernels,
    "sanitizer": sanitizer,
}


def measure(gpus: Gpus, sizes: Sizes, only: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the cases; return the results to keep, and the targets. A case that fails does not stop the others."""
    kept: dict[str, Any] = {}
    targets: list[dict[str, Any]] = []
    if not only or any(only in name for name in CASES if name not in ("correctness", "sanitizer")):
        case = copy_rate(gpus, sizes)
        sizes = sizes._replace(copy_rate=case.rows[COPY]["GBps"])
        kept["copy"] = case.kept()
        del case
        gpus.release()
    begin = time.monotonic()
    for name, function in CASES.items():
        if only not in name:
            continue
        if time.monotonic() - begin > LIMIT_S:
            kept[name] = {"error": "not run: out of time"}
            print(f"\n{name}: not run: out of time")
            continue
        try:
            found = function(gpus, sizes)
            cases = found if isinstance(found, list) else [found]
            for case in cases:
                if isinstance(case, GpuCase):
                    kept[case.name] = case.kept()
                    targets += case.targets
                elif case is not None:
                    kept[name] = case
        except Exception as error:  # noqa: BLE001 - the other cases are measured all the same
            traceback.print_exc()
            kept[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        found = cases = case = None  # frees their tensors
        gpus.release()
        print(f"  [{name}: {time.monotonic() - begin:.0f} s so far]")
    return kept, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repeats: about a minute")
    parser.add_argument("--driver", choices=("real", "fake"), default="real", help="fake: the tests' driver, no GPU")
    parser.add_argument("--library", type=Path, help="the fake driver, if it is compiled already")
    parser.add_argument("--only", default="", help="only cases whose name contains this, of " + ", ".join(CASES))
    parser.add_argument("--batches", type=int, help="how many launches and calls are checked")
    parser.add_argument("--json", type=Path, help="where the results are written; nowhere if it is not given")
    options = parser.parse_args()
    fake = options.driver == "fake"
    sizes = FAKE if fake else QUICK if options.quick else Sizes()
    if options.batches:
        sizes = sizes._replace(kernels=options.batches, calls=options.batches)
    if fake and options.json:
        parser.error("--driver fake measures nothing, so it writes no --json")
    if not any(options.only in name for name in CASES):
        parser.error(f'no case contains "{options.only}": ' + ", ".join(CASES))
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: the folder {options.json.parent} does not exist")
    if not fake and not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        parser.error(f"{why}; --driver fake runs without one, and measures nothing")
    gpus = FakeGpus(options.library or fake_cuda.built(), 2) if fake else Gpus()
    about = gpus.describe()
    for device in about["devices"]:
        print(", ".join(f"{key} {value}" for key, value in device.items()))
    if fake:
        print("FAKE DRIVER: NO MEASUREMENT. The times below mean nothing.")
    kept, targets = measure(gpus, sizes, options.only)
    errors = [name for name, each in kept.items() if "error" in each]
    if fake:
        print("\nfake driver: no measurement; nothing was kept")
    else:
        print(f"\n{sum(each['met'] is True for each in targets)} of {len(targets)} targets were met")
        for each in targets:
            if each["met"] is False:
                print(f"  not met: {each['what']}: target {each['target']}, measured {each['measured']:.4g}")
        if options.json:
            keep("gpu_reduction", {**about, "quick": options.quick, "cases": kept, "targets": targets}, options.json)
    if errors:
        sys.exit("failed: " + ", ".join(errors))


if __name__ == "__main__":
    main()
