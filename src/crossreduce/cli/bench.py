"""``crossreduce bench``: how long a collective takes, in the words and columns of nccl-tests.

In: nccl-tests' options.  Out: its table and its JSON. All devices are driven by this one process, unless there are
ranks (``ranks.py``); for devices in host memory the numbers compare algorithms and frameworks, and are no GPU's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from .. import AllReduceCrossDeviceOps, Mirrored, PerReplica, Topology
from ..errors import ArgumentError
from ..frameworks import FRAMEWORKS
from . import exact, nccl_tests, ranks
from .arguments import MOST_DEVICES, at_least, one_of, read_algorithms, read_device_list, read_machine, read_nbytes
from .output import json_file
from .trainers import Trainer, load

OPS: Final = {"sum": "sum", "prod": "product", "min": "min", "max": "max", "avg": "mean"}
TYPES: Final = {"half": "float16", "float": "float32", "double": "float64", "char": "int8", "int": "int32"} | {
    name: name for name in ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "bfloat16")
}
COLLECTIVES: Final = ("all_reduce", "reduce", "broadcast")  # of one process; ranks have more


def bench(
    minbytes: Annotated[str, typer.Option("-b", "--minbytes", help="First size; K, M, G are powers of 1024.")] = "32M",
    maxbytes: Annotated[str, typer.Option("-e", "--maxbytes", help="Last size.")] = "32M",
    stepfactor: Annotated[int, typer.Option("-f", "--stepfactor", help="Multiply sizes by this (2 or more).")] = 1,
    stepbytes: Annotated[str, typer.Option("-i", "--stepbytes", help="Without -f: add this to sizes.")] = "1M",
    iters: Annotated[int, typer.Option("-n", "--iters", help="Timed calls a size.")] = 20,
    warmup_iters: Annotated[int, typer.Option("-w", "--warmup_iters", help="Untimed calls before, at each size.")] = 1,
    devices: Annotated[
        str | None,
        typer.Option(
            "-g", "--ngpus", "--devices", help="How many, or their names: cpu:0,cpu:1; none: the topology's, or 8."
        ),
    ] = None,
    op: Annotated[str, typer.Option("-o", "--op", help=", ".join(OPS))] = "sum",
    datatype: Annotated[
        str, typer.Option("-d", "--datatype", help="half, float, double, bfloat16, int8, uint8, ...; or NumPy's names")
    ] = "float",
    root: Annotated[str, typer.Option("-r", "--root", help="Of reduce and broadcast: a rank, or all.")] = "0",
    check: Annotated[int, typer.Option("-c", "--check", help="1: check every element of the results; 0: do not.")] = 1,
    average: Annotated[
        int,
        typer.Option("-a", "--average", help="Of ranks: the time of rank 0, or their average, least, greatest: 0-3."),
    ] = 1,
    json: Annotated[Path | None, typer.Option("-J", "--json", help="Write nccl-tests' JSON to this file.")] = None,
    per_iter_report: Annotated[
        int, typer.Option("-I", "--per_iter_report", help="1: add columns i_min, i_max, i_p99 and i_cv%.")
    ] = 0,
    algorithm: Annotated[
        str, typer.Option("-A", "--algorithm", "--algo", help="A name, a list, or all: one table each.")
    ] = "auto",
    num_packs: Annotated[int, typer.Option(help="Into how many packs the array is cut; 0: none.")] = 1,
    collective: Annotated[
        str, typer.Option(help=f"{', '.join(COLLECTIVES)}; with ranks also all_gather, reduce_scatter.")
    ] = "all_reduce",
    framework: Annotated[str, typer.Option(help=", ".join(FRAMEWORKS))] = "numpy",
    topology: Annotated[
        str | None,
        typer.Option(metavar="MACHINE|FILE|this", help="Plan on this wiring, whose first devices stand for these."),
    ] = None,
    launch: Annotated[
        int | None,
        typer.Option("--launch", metavar="N", help="Measure N ranks, processes that this starts; torchrun does too."),
    ] = None,
    peers: Annotated[str, typer.Option(help="With ranks: a table for each of these too, and ratios: gloo, mpi.")] = "",
) -> None:
    """Time a collective; prints nccl-tests' table.

    Time is the mean over the calls, each until its results are ready; the
    JSON has median and p99 too. In place the results are written over the
    inputs (out=); N/A (null in JSON) for broadcasts, for means of integers,
    and in JAX and TensorFlow, whose arrays cannot be written.

    Devices in host memory emulate: they compare algorithms, and say nothing
    about GPUs.

    With --launch, or under torchrun, each rank is a process, and the backend
    crossreduce of torch.distributed is measured.

    Exits with 1 if an element is wrong. Inputs are such that every order of
    reduction is exact.
    """
    in_ranks = launch is not None or ranks.here()
    if in_ranks:
        count = _ranks(launch, devices, algorithm, num_packs, framework, topology)
        wiring, names = None, ("cpu:0",) * count
        framework = "torch"
    else:
        if peers:
            raise ArgumentError("--peers are measured beside ranks: add --launch N, or start this with torchrun.")
        wiring = None if topology is None else read_machine(topology)
        names = read_device_list("--devices", devices or str(8 if wiring is None else len(wiring.devices)))
        wiring = _on(wiring, names)
    low, high = read_nbytes("--minbytes", minbytes), read_nbytes("--maxbytes", maxbytes)
    if high < at_least(1, "--minbytes", low):
        raise ArgumentError(f"--maxbytes must be at least --minbytes, and {maxbytes} is less than {minbytes}.")
    nccl_type = _nccl_type(datatype)
    op = one_of(OPS, "--op", {long: short for short, long in OPS.items()}.get(op, op))
    one_of(FRAMEWORKS, "--framework", framework)
    one_of(ranks.COLLECTIVES if in_ranks else COLLECTIVES, "--collective", collective)
    one_of("0123", "--average", str(average))
    at_least(0, "--num-packs", num_packs)
    roots = _roots(root, collective, len(names))
    chosen = (ranks.OURS,) if in_ranks else tuple(read_algorithms("--algorithm", algorithm))
    step = at_least(1, "--stepbytes", read_nbytes("--stepbytes", stepbytes))
    config = nccl_tests.Config(
        framework=framework,
        framework_version="",
        collective=collective,
        algorithms=chosen,
        num_packs=num_packs,
        devices=names,
        minimum_bytes=low,
        maximum_bytes=high,
        step_bytes=step,
        step_factor=at_least(1, "--stepfactor", stepfactor),
        warmup_iters=at_least(0, "--warmup_iters", warmup_iters),
        iterations=at_least(1, "--iters", iters),
        validation=at_least(0, "--check", check),
        per_iter_timing=at_least(0, "--per_iter_report", per_iter_report) > 0,
    )
    redop = "none" if collective in ("broadcast", "all_gather") else op
    if in_ranks:
        request = ranks.Request(
            collective=collective,
            op=OPS.get(redop, "sum"),
            redop=redop,
            dtype=TYPES[nccl_type],
            nccl_type=nccl_type,
            roots=tuple(roots),
            sizes=tuple(sizes(config)),
            config=config,
            average=average,
            backends=(ranks.OURS, *_peers(peers)),
            json=None if json is None else str(json.absolute()),
            args=tuple(sys.argv),
        )
        raise typer.Exit(ranks.measure(request, launch))
    with json_file("--json", json) as write:
        start_time = nccl_tests.now()
        here = load(framework, names)
        config = replace(config, framework_version=here.version)
        _print(nccl_tests.header(config))
        if topology is not None:
            _print([f"# Planned on the topology: {topology}"])
        rows = []
        for name in chosen:
            _print(nccl_tests.table_header(config, name))
            for row in _rows(here, config, name, wiring, redop, nccl_type, roots):
                _print([nccl_tests.line(config, row)])
                rows.append(row)
        _print(nccl_tests.footer(config, rows))
        report = nccl_tests.report(config, rows, sys.argv, start_time)
        report["crossreduce"]["topology"] = topology
        write(report)
    if any(timing.nwrong for row in rows for timing in row.timings):
        raise typer.Exit(1)


def sizes(config: nccl_tests.Config) -> Iterator[int]:
    """Yield the sizes in bytes, as nccl-tests steps through them."""
    size = config.minimum_bytes
    while size <= config.maximum_bytes:
        yield size
        size = size * config.step_factor if config.step_factor > 1 else size + config.step_bytes


def _ranks(
    launch: int | None, devices: str | None, algorithm: str, num_packs: int, framework: str, topology: str | None
) -> int:
    """Return how many ranks there are, and refuse what is said of one process's devices."""
    if launch is not None and ranks.here():
        raise ArgumentError("--launch starts ranks, and this process is one already: leave it out under torchrun.")
    given = {
        "--devices": devices is not None,
        "--algorithm": algorithm != "auto",
        "--num-packs": num_packs != 1,
        "--framework": framework not in ("numpy", "torch"),
        "--topology": topology is not None,
    }
    if any(given.values()):
        wrong = ", ".join(option for option in given if given[option])
        raise ArgumentError(f"{wrong}: not with ranks, which are processes with one tensor each in host memory.")
    count = int(os.environ["WORLD_SIZE"]) if launch is None else at_least(1, "--launch", launch)
    if count > MOST_DEVICES:
        raise ArgumentError(f"--launch takes at most {MOST_DEVICES} ranks, not {count}.")
    return count


def _peers(text: str) -> list[str]:
    """Return the peers of a list, each once."""
    return list(dict.fromkeys(one_of(ranks.PEERS, "--peers", name.strip()) for name in text.split(",") if name.strip()))


def _on(topology: Topology | None, names: tuple[str, ...]) -> Topology | None:
    """Return the topology of its first devices under the names of those that are measured."""
    if topology is None or set(names) <= set(topology.devices):
        return topology
    if len(names) > len(topology.devices):
        raise ArgumentError(f"--devices: the topology has {len(topology.devices)}, and not {len(names)}.")
    return topology.subset(topology.devices[: len(names)]).renamed(names)


def _rows(
    framework: Trainer,
    config: nccl_tests.Config,
    algorithm: str,
    topology: Topology | None,
    op: str,
    nccl_type: str,
    roots: list[int],
) -> Iterator[nccl_tests.Row]:
    """Measure one algorithm at every size and root."""
    ops = AllReduceCrossDeviceOps(algorithm, config.num_packs, topology=topology)
    patterns = exact.inputs(OPS.get(op, "sum"), TYPES[nccl_type], len(config.devices))
    whole = exact.result(OPS.get(op, "sum"), patterns)
    itemsize = patterns[0].itemsize
    for size in sizes(config):
        count = size // itemsize
        values = [np.resize(x, count) for x in patterns]
        for root in roots:
            expected = patterns[root] if config.collective == "broadcast" else whole
            # The mean of integers is a float, which no input can hold.
            fits = op != "avg" or patterns[0].dtype.kind not in "iu"
            writable = fits and config.framework in ("numpy", "torch") and config.collective != "broadcast"
            yield nccl_tests.Row(
                algorithm=algorithm,
                size=count * itemsize,
                count=count,
                type=nccl_type,
                redop=op,
                root=root,
                out_of_place=_timing(framework, config, ops, op, values, root, expected, False),
                in_place=_timing(framework, config, ops, op, values, root, expected, True) if writable else None,
            )


def _timing(
    framework: Trainer,
    config: nccl_tests.Config,
    ops: AllReduceCrossDeviceOps,
    op: str,
    values: list[Any],
    root: int,
    expected: Any,
    in_place: bool,
) -> nccl_tests.Timing:
    """Measure one size, and check the last result."""

    def put() -> list[Any]:
        return [framework.put(x, device) for x, device in zip(values, config.devices, strict=True)]

    given, size = put(), values[0].size
    times, result = _timed(framework, config, _call(ops, config, op, given, root, in_place), given)
    nwrong = None
    if config.validation:
        if in_place:  # every call reduced what the one before had left
            result = _call(ops, config, op, put(), root, True)()
        nwrong = sum(exact.wrong(framework.get(x), expected, size) for x in result)
    factor = nccl_tests.busbw_factor(config.collective, len(config.devices))
    return nccl_tests.Timing(values[0].nbytes, tuple(times), nwrong, factor)


def _timed(
    framework: Trainer, config: nccl_tests.Config, call: Callable[[], Mirrored], values: list[Any]
) -> tuple[list[float], Mirrored]:
    """Return the seconds of each call after those that warm up, and the last result."""
    times: list[float] = []
    result: Any = None
    for k in range(config.warmup_iters + config.iterations):
        result = None  # frees the last one's memory outside of the timed region
        framework.wait(values)
        before = time.perf_counter()
        result = call()
        framework.wait(result)
        if k >= config.warmup_iters:
            times.append(time.perf_counter() - before)
    return times, result


def _call(
    ops: AllReduceCrossDeviceOps, config: nccl_tests.Config, op: str, values: list[Any], root: int, in_place: bool
) -> Callable[[], Mirrored]:
    """Return the call that is timed."""
    value = PerReplica(values, config.devices)
    if config.collective == "broadcast":
        return lambda: ops.broadcast(values[root], value)
    if config.collective == "reduce":
        device = config.devices[root]
        out = PerReplica([values[root]], [device]) if in_place else None
        return lambda: ops.reduce(OPS[op], value, device, out=out)
    return lambda: ops.reduce(OPS[op], value, value, out=value if in_place else None)


def _nccl_type(name: str) -> str:
    """Return nccl-tests' name of a dtype that is spelled its way or NumPy's."""
    short = {"float16": "half", "float32": "float", "float64": "double", "char": "int8", "int": "int32"}
    return one_of(TYPES, "--datatype", short.get(name, name))


def _roots(text: str, collective: str, n: int) -> list[int]:
    """Return the ranks to measure as root; -1, which stands for none, where there is no root."""
    if collective not in ("reduce", "broadcast"):
        return [-1]
    if text in ("all", "-1"):
        return list(range(n))
    if not text.isdecimal() or int(text) >= n:
        raise ArgumentError(f'--root must be a rank from 0 to {n - 1}, or all, not "{text}".')
    return [int(text)]


def _print(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)
