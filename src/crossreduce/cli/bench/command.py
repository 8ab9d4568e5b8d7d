"""The options of ``crossreduce bench``. Those that nccl-tests has, too, have the same names.

Input: options. Output: a ``BenchRequest``, and its measurement on devices of this process or on ranks.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from typer import Exit, Option

from ... import Topology
from ...errors import ArgumentError
from ...planning.optimal.bounds import COLLECTIVES
from ...topology.topology_like import MOST_BYTES
from ..support.arguments import (
    MAX_DEVICES,
    in_range,
    one_of,
    read_algorithms,
    read_device_list,
    read_machine,
    read_nbytes,
    say_unused,
)
from ..support.topologies import Json, check_picture
from ..train.trainers import TRAINERS, numbered_devices
from . import against as contests
from . import devices as in_process
from . import ranks
from .request import BenchRequest

MOST_SIZES: Final = 10_000
DEVICES: Final = "Number of devices, or names: cuda:0-7."
LAUNCH: Final = "Measure N ranks, one process each."
OPS: Final = {"sum": "sum", "prod": "product", "min": "min", "max": "max", "avg": "mean"}
TYPES: Final = {"half": "float16", "float": "float32", "double": "float64", "char": "int8", "int": "int32"} | {
    name: name for name in ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "bfloat16")
}

# Other names of these types: NumPy's, and those of nccl-tests that its table does not print.
SPELLINGS: Final = {"float16": "half", "float32": "float", "float64": "double", "char": "int8", "int": "int32"}


def bench(
    minbytes: Annotated[str | None, Option("-b", "--minbytes", help="First size. Default: 32M.")] = None,
    maxbytes: Annotated[str | None, Option("-e", "--maxbytes", help="Last size. Default: 32M.")] = None,
    stepfactor: Annotated[
        int | None, Option("-f", "--stepfactor", help="Factor between sizes. Default: 1: see -i.")
    ] = None,
    stepbytes: Annotated[str, Option("-i", "--stepbytes", help="Step between sizes if -f is 1.")] = "1M",
    iters: Annotated[int, Option("-n", "--iters", help="Timed calls per size.")] = 20,
    warmup_iters: Annotated[
        int | None, Option("-w", "--warmup_iters", help="Untimed calls before the timed ones. Default: 1.")
    ] = None,
    devices: Annotated[str | None, Option("-g", "--ngpus", "--devices", help=DEVICES)] = None,
    op: Annotated[str, Option("-o", "--op", help=", ".join(OPS))] = "sum",
    datatype: Annotated[str, Option("-d", "--datatype", help="half, float, ..., or NumPy's names")] = "float",
    root: Annotated[str, Option("-r", "--root", help="Root: a rank, or all.")] = "0",
    check: Annotated[int, Option("-c", "--check", help="1: check all elements; 0: do not.")] = 1,
    average: Annotated[int, Option("-a", "--average", help="Time of ranks: 0: rank 0's, 1: mean, 2: min, 3: max.")] = 1,
    output: Annotated[Path | None, Option("-J", "--output", help="Write nccl-tests' JSON to this file, too.")] = None,
    per_iter_report: Annotated[
        int, Option("-I", "--per_iter_report", help="1: add columns i_min, i_max, i_p99 and i_cv%.")
    ] = 0,
    algorithm: Annotated[str, Option("-A", "--algorithm", "--algo", help="A name, a list, or all.")] = "auto",
    num_packs: Annotated[int, Option(help="Packs of the array; 0: no packing.")] = 1,
    collective: Annotated[
        str, Option(help=f"{', '.join(in_process.COLLECTIVES)}; for ranks also all_gather, reduce_scatter.")
    ] = "all_reduce",
    framework: Annotated[str, Option(help=", ".join(TRAINERS))] = "numpy",
    exact: Annotated[
        bool, Option("--exact", metavar=" ", help="Exact sums and means, which are rounded once.")
    ] = False,
    topology: Annotated[str | None, Option(metavar="MACHINE|FILE|this", help="Plan on this topology.")] = None,
    launch: Annotated[int | None, Option("--launch", metavar="N", help=LAUNCH)] = None,
    peers: Annotated[str, Option(help=f"With ranks: measure {', '.join(ranks.PEERS)}, too.")] = "",
    against: Annotated[str, Option(metavar="PEERS", help=f"Print ratios to {', '.join(contests.PEERS)}.")] = "",
    picture: Annotated[Path | None, Option(metavar="FILE.svg|.png", help="With --against: draw the ratios.")] = None,
    keep_memory: Annotated[
        bool, Option("--keep-memory", metavar=" ", help="With --against: also with keep_memory().")
    ] = False,
    json: Json = False,
) -> None:
    """Time a collective and print the table of nccl-tests.

    Times are means over the calls, each until its results are ready. With
    --launch or under torchrun, each rank is a process; with --against, each
    peer all-reduces in turn.
    The exit code is 1 if an element is wrong.
    """
    in_ranks = launch is not None or ranks.is_rank()
    excluded = {"--launch": in_ranks, "--peers": bool(peers), "--topology": topology is not None}
    excluded |= {
        "--collective": collective != "all_reduce",
        "--algorithm": len(read_algorithms("--algorithm", algorithm)) > 1,
    }
    needs_against = {"--picture": picture is not None, "--keep-memory": keep_memory}
    opponents = _chosen_peers(against, needs_against, excluded)
    check_picture(picture)
    defaults = ("1K", "64M", 4, 10) if against else ("32M", "32M", 1, 1)  # first and last size, factor, warm-up calls
    minbytes, maxbytes = minbytes or defaults[0], maxbytes or defaults[1]
    stepfactor = defaults[2] if stepfactor is None else stepfactor
    warmup_iters = defaults[3] if warmup_iters is None else warmup_iters
    if in_ranks:
        count = _rank_count(launch, devices, algorithm, num_packs, framework, topology)
        planned_on, names = None, ("cpu:0",) * count
        framework = "torch"
    else:
        if peers:
            raise ArgumentError("--peers requires ranks: add --launch N, or start this command with torchrun.")
        machine = None if topology is None else read_machine(topology)
        count = 8 if machine is None else len(machine.devices)
        framework = one_of(TRAINERS, "--framework", framework)
        names = read_device_list("--devices", devices or str(count), partial(numbered_devices, framework))
        planned_on = None if machine is None else _rename_devices(machine, names)
    low, high = read_nbytes("--minbytes", minbytes), read_nbytes("--maxbytes", maxbytes)
    if high < in_range("--minbytes", low, 1, MOST_BYTES):
        raise ArgumentError(f"--maxbytes must be at least --minbytes, but {maxbytes} is less than {minbytes}.")
    step = in_range("--stepbytes", read_nbytes("--stepbytes", stepbytes), 1, MOST_BYTES)
    if stepfactor == 1 and (high - low) // step >= MOST_SIZES:
        count = (high - low) // step + 1
        raise ArgumentError(f"--stepbytes {stepbytes} results in {count} sizes, more than {MOST_SIZES}: add -f 2.")
    datatype = one_of(dict.fromkeys([*TYPES, *SPELLINGS]), "--datatype", datatype)
    op = one_of(dict.fromkeys([*OPS, *OPS.values()]), "--op", op)
    nccl_type = SPELLINGS.get(datatype, datatype)
    op = {numpy_name: name for name, numpy_name in OPS.items()}.get(op, op)
    collective = one_of(COLLECTIVES if in_ranks else in_process.COLLECTIVES, "--collective", collective)
    in_range("--average", average, 0, 3)
    in_range("--num-packs", num_packs, 0)
    roots = _roots(root, collective, len(names))
    chosen = (ranks.OURS,) if in_ranks else tuple(read_algorithms("--algorithm", algorithm))
    listed = [one_of(ranks.PEERS, "--peers", name.strip()) for name in peers.split(",") if name.strip()]
    redop = "none" if collective in ("broadcast", "all_gather") else op
    request = BenchRequest(
        framework=framework,
        collective=collective,
        op=OPS.get(redop, "sum"),
        redop=redop,
        dtype=TYPES[nccl_type],
        nccl_type=nccl_type,
        roots=roots,
        algorithms=chosen,
        num_packs=num_packs,
        devices=names,
        minimum_bytes=low,
        maximum_bytes=high,
        step_bytes=step,
        step_factor=in_range("--stepfactor", stepfactor, 1),
        warmup_iters=in_range("--warmup_iters", warmup_iters, 0),
        iterations=in_range("--iters", iters, 1),
        validation=in_range("--check", check, 0),
        per_iter_timing=in_range("--per_iter_report", per_iter_report, 0) > 0,
        output=None if output is None else str(output.absolute()),
        json=json,
        args=tuple(sys.argv),
        average=average,
        exact=exact,
        backends=tuple(dict.fromkeys([ranks.OURS, *listed])) if in_ranks else (),
    )
    no_root, no_op = roots == (-1,), redop == "none"
    unused = {
        "--root": (root != "0" and no_root, f"{collective} has no root"),
        "--op": (op != "sum" and no_op, f"{collective} reduces nothing"),
        "--stepbytes": (stepbytes != "1M" and stepfactor > 1, "the sizes are multiplied by --stepfactor"),
        "--average": (average != 1 and not in_ranks, "one process has no times of several ranks"),
    }
    for option, (is_given, why) in unused.items():
        if is_given:
            say_unused(option, why)
    if exact:
        request.require_exact()
    if against:
        raise Exit(contests.measure(request, opponents, keep_memory, picture))
    code = ranks.measure(request, launch) if in_ranks else in_process.measure(request, planned_on, topology)
    raise Exit(code)


def _chosen_peers(against: str, needs_against: dict[str, bool], excluded: dict[str, bool]) -> tuple[str, ...]:
    """Return the peers of --against, or raise an ``ArgumentError`` if other options do not fit.

    ``needs_against`` has options that require --against, ``excluded`` options that cannot be used with it; the values
    tell whether they are given.
    """
    if not against:
        wrong = ", ".join(option for option, is_given in needs_against.items() if is_given)
        if wrong:
            raise ArgumentError(f"{wrong} can only be used with peers: add --against {','.join(contests.PEERS)}.")
        return ()
    wrong = ", ".join(option for option, is_given in excluded.items() if is_given)
    if wrong:
        problem = "cannot be used with --against, which measures one all-reduce of arrays in host memory"
        raise ArgumentError(f"{wrong} {problem}: omit {wrong}.")
    names = [name.strip() for name in against.split(",")]
    return tuple(dict.fromkeys(one_of(contests.PEERS, "--against", name) for name in names))


def _rank_count(
    launch: int | None, devices: str | None, algorithm: str, num_packs: int, framework: str, topology: str | None
) -> int:
    """Return the number of ranks. Raise an error if an option is given that only applies to devices of one process."""
    if launch is not None and ranks.is_rank():
        raise ArgumentError("--launch cannot be used in a process that is already a rank: omit it under torchrun.")
    options = {
        "--devices": devices is not None,
        "--algorithm": algorithm != "auto",
        "--num-packs": num_packs != 1,
        "--framework": framework not in ("numpy", "torch"),
        "--topology": topology is not None,
    }
    wrong = ", ".join(option for option, is_given in options.items() if is_given)
    if wrong:
        raise ArgumentError(f"{wrong} cannot be used with ranks: omit {wrong}, or start without --launch and torchrun.")
    if launch is None:
        return in_range("torchrun's WORLD_SIZE", int(os.environ["WORLD_SIZE"]), 1, MAX_DEVICES)
    return in_range("--launch", launch, 1, MAX_DEVICES)


def _rename_devices(topology: Topology, names: tuple[str, ...]) -> Topology:
    """Return the topology if it has all these devices. Otherwise rename its first devices, and leave out the others."""
    if set(names) <= set(topology.devices):
        return topology
    if len(names) > len(topology.devices):
        raise ArgumentError(f"--devices: the topology has only {len(topology.devices)} devices, not {len(names)}.")
    return topology.subset(topology.devices[: len(names)]).renamed(names)


def _roots(text: str, collective: str, n: int) -> tuple[int, ...]:
    """Return the ranks to measure as root, or (-1,) for a collective without a root."""
    if collective not in ("reduce", "broadcast"):
        return (-1,)
    if text in ("all", "-1"):
        return tuple(range(n))
    if not text.isdecimal() or int(text) >= n:
        raise ArgumentError(f'--root must be a rank from 0 to {n - 1}, or all, not "{text}".')
    return (int(text),)
