"""Are ranks faster with crossreduce than with gloo and Open MPI, on one host and between hosts?

One host: all-reduces of 2, 4 and 8 ranks, and steps of DistributedDataParallel on 8. Crossreduce and gloo are two
process groups of the same processes and alternate; ratios are medians of the ratios of adjacent turns. Open MPI has
other processes, started afterwards with the same loop; its ratio is that of the medians. Several hosts: network
namespaces joined by links of 1 Gbit/s, in one case also one of 200 Mbit/s (tests/namespaces.py, requires root). The
time of an all-reduce is compared with a lower limit: the time of the bytes that must cross a link or, with unequal
links, the planner's bound. Both assume the links' raw rates, of which headers take 4.6 % at an MTU of 1500.

Data is random, and renewed before each measurement of an all-reduce; the slowest rank's time counts. Every element is
checked once per case, before the measurements.
Run: python benchmarks/processes.py [--quick] [--only NAME] [--repeats N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, keep, summary

import crossreduce as cr
from crossreduce.cli.bench.launch import launch
from crossreduce.cli.bench.ranks import launcher, mpi_environment

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import namespaces

OURS, GLOO, MPI, ALONE = "crossreduce", "gloo", "Open MPI", "no reduction"
LARGE, SMALL, BETWEEN = 1 << 26, 1 << 10, 1 << 25
LIMIT_S = 240  # the timeout of crossreduce's calls, and the time limit of a run under mpiexec or on several hosts
BLOCK = 1_048_573  # an input repeats this many random elements; a prime, so that the pieces of an all-reduce differ
GBIT_BPS = 125e6
SLOW = "200mbit"
DDP_LAYERS = (1024, 4096, 4096, 1024)  # 25 M parameters
# Samples per rank. With 8 ranks on 2 cores, more samples would hide the reduction: with 16 samples, a step without a
# reduction already takes 0.6 of the time of a step with gloo. Steps without a reduction are measured, too.
DDP_BATCH = 1

Case = dict[str, Any]


def all_reduce(name: str, nbytes: int, repeats: int, calls: int, least: dict[str, float], **more: Any) -> Case:
    return {
        "name": name,
        "nbytes": nbytes,
        "dtype": "float32",
        "repeats": repeats,
        "calls": calls,
        "least": least,
    } | more


def one_host(ranks: int) -> list[Case]:
    gloo, mpi = (3, 2) if ranks == 8 else (2, 1.5)
    found = [
        all_reduce("64 MiB", LARGE, 9, 1, {GLOO: gloo, MPI: mpi}),
        # Each in-place call multiplies the values by up to 8; after 40 calls (8**40 = 1.3e36) they are still finite.
        all_reduce("1 KiB", SMALL, 15, 40, {GLOO: 5}, **({"most_s": 60e-6} if ranks == 2 else {})),
    ]
    if ranks == 8:
        found.append(all_reduce("bfloat16, 64 MiB", LARGE, 9, 1, {GLOO: 3}, dtype="bfloat16"))
        found.append(
            {"name": "DDP step, 25 M parameters", "ddp": True, "repeats": 7, "calls": 1, "least": {GLOO: 1 / 0.6}}
        )
    return found


def between_hosts() -> list[dict[str, Any]]:
    """Return the cases of several hosts: the ranks on each, the slow links, and the time to compare with."""
    case = all_reduce("32 MiB", BETWEEN, 5, 1, {})
    three = cr.Topology.from_matrix([[0, 0.125, 0.125], [0.125, 0, 0.025], [0.125, 0.025, 0]])
    bound_s = BETWEEN / float(cr.bound(three, "all_reduce").algbw * 10**9)
    return [
        {
            "name": "2 hosts x 4 ranks",
            "ranks": [4, 4],
            "slower": {},
            "case": case | {"floor_s": BETWEEN / GBIT_BPS, "most": 1.10},
        },
        {
            "name": "3 + 5 ranks",
            "ranks": [3, 5],
            "slower": {},
            "case": case | {"floor_s": BETWEEN / GBIT_BPS, "most": 1.12},
        },
        {
            "name": "3 hosts x 2 ranks, one link at a fifth",
            "ranks": [2, 2, 2],
            "slower": {(1, 2): SLOW},
            "case": case | {"floor_s": bound_s, "most": 1.15, "measure": True},
        },
    ]


# The code that each rank runs.


class Turns:
    """Times the calls of all contenders alternately. ``gather(x)`` returns the ``x`` of every rank."""

    def __init__(self, gather: Callable[[float], list[float]]):
        self.gather = gather

    def timed(
        self, case: Case, renew: Callable[[], object], runs: dict[str, tuple[Any, Any]]
    ) -> dict[str, list[float]]:
        """Return for each contender the slowest rank's seconds per call, by turn. ``runs``: its barrier and call."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(1 + case["repeats"]):
            for name, (barrier, run) in runs.items():
                renew()
                barrier(), barrier()
                start = time.perf_counter()
                for _ in range(case["calls"]):
                    run()
                took = max(self.gather((time.perf_counter() - start) / case["calls"]))
                if turn:
                    times[name].append(took)
        return times


def block(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(BLOCK, np.float32)


def check(got: np.ndarray, inputs: list[np.ndarray], unit: float) -> None:
    """Raise if a sum of repeated blocks is wrong by more than gamma(n) sum |x|; ``unit``: the unit roundoff."""
    n, size = len(inputs), got.size
    due = sum(x.astype(np.float64) for x in inputs)
    allowed = sum(np.abs(x) for x in inputs) * (n * unit / (1 - n * unit))
    for start in range(0, size, BLOCK):
        part = got[start : start + BLOCK]
        wrong = np.abs(part - due[: part.size]) > allowed[: part.size]
        assert not wrong.any(), f"{wrong.sum()} of {part.size} elements are wrong"


def torch_rank(cases: list[Case], path: Path) -> None:
    import torch
    import torch.distributed as dist

    import crossreduce.torch as crt

    torch.set_num_threads(1)
    dist.init_process_group(OURS, timeout=timedelta(seconds=LIMIT_S))
    groups = {OURS: dist.group.WORLD, GLOO: dist.new_group(backend="gloo")}
    rank, size = dist.get_rank(), dist.get_world_size()
    times = torch.zeros(size, dtype=torch.float64)

    def gather(value: float) -> list[float]:
        times.zero_()[rank] = value
        dist.all_reduce(times, group=groups[GLOO])
        return times.tolist()

    small = torch.zeros(1)
    found: dict[str, Any] = {}
    for case in cases:
        if case.get("measure"):
            crt.measure_topology()
        barriers = {name: lambda group=group: dist.all_reduce(small, group=group) for name, group in groups.items()}
        if case.get("ddp"):
            renew, calls = ddp(groups)
        else:
            dtype = getattr(torch, case["dtype"])
            inputs = [torch.from_numpy(block(k)).to(dtype) for k in range(size)]
            count = case["nbytes"] // dtype.itemsize
            source = inputs[rank].repeat(-(-count // BLOCK))[:count].clone()
            x = torch.empty_like(source)

            def renew(x: Any = x, source: Any = source) -> None:
                x.copy_(source)

            calls = {name: lambda group=group, x=x: dist.all_reduce(x, group=group) for name, group in groups.items()}
            for call in calls.values():
                renew()
                call()
                check(x.float().numpy(), [y.float().numpy() for y in inputs], torch.finfo(dtype).eps / 2)
        runs = {name: (barriers.get(name, barriers[GLOO]), call) for name, call in calls.items()}
        found[case["name"]] = Turns(gather).timed(case, renew, runs)
        if rank == 0:
            path.write_text(json.dumps(found))
    dist.destroy_process_group()


def ddp(groups: dict[str, Any]) -> tuple[Callable[[], object], dict[str, Callable[[], None]]]:
    """Return a ``renew`` that does nothing, and a training step for each group and one without a reduction."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def step_of(group: Any) -> tuple[Any, Callable[[], None]]:
        torch.manual_seed(0)
        layers = [layer for a, b in pairwise(DDP_LAYERS) for layer in (torch.nn.Linear(a, b), torch.nn.ReLU())]
        model: Any = torch.nn.Sequential(*layers)
        if group is not None:
            model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        torch.manual_seed(1 + dist.get_rank())
        images, targets = torch.randn(DDP_BATCH, DDP_LAYERS[0]), torch.randn(DDP_BATCH, DDP_LAYERS[-1])

        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(images), targets).backward()
            optimizer.step()

        return model, step

    made = {name: step_of(group) for name, group in (groups | {ALONE: None}).items()}
    for _, step in made.values():
        step(), step()  # before the measurements, since DDP rearranges its buckets after the first step
    ours, theirs = (list(made[name][0].parameters()) for name in groups)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y)
    return lambda: None, {name: step for name, (_, step) in made.items()}


def mpi_rank(cases: list[Case], path: Path) -> None:
    from mpi4py import MPI as mpi  # noqa: N811 - MPI is the name of the contender

    world = mpi.COMM_WORLD
    small = np.zeros(1, np.float32)
    inputs = [block(k) for k in range(world.size)]
    found = {}
    for case in cases:
        source = np.resize(inputs[world.rank], case["nbytes"] // 4)
        x = source.copy()

        def call(x: np.ndarray = x) -> None:
            world.Allreduce(mpi.IN_PLACE, x)

        call()
        check(x, inputs, np.finfo(np.float32).eps / 2)
        runs = {MPI: (lambda: world.Allreduce(mpi.IN_PLACE, small), call)}
        found[case["name"]] = Turns(world.allgather).timed(case, lambda x=x, source=source: np.copyto(x, source), runs)
    if world.rank == 0:
        path.write_text(json.dumps(found))


# The code of the process that starts the ranks.


def command(kind: str, cases: list[Case], path: Path) -> list[str]:
    return [sys.executable, __file__, "--rank", json.dumps({"kind": kind, "cases": cases, "path": str(path)})]


def on_one_host(ranks: int, cases: list[Case], path: Path) -> dict[str, dict[str, list[float]]]:
    """Run crossreduce and gloo in the same processes, then (if it is installed) Open MPI; return times by case."""
    code = launch(command("torch", cases, path), ranks)
    assert code == 0, f"a rank ended with exit code {code}"
    found = json.loads(path.read_text())
    compared = [case for case in cases if MPI in case["least"]]
    if compared and (mpi := launcher("mpi")) and find_spec("mpi4py"):
        line = [mpi[0], "-n", str(ranks), *command("mpi", compared, path)]
        subprocess.run(line, check=True, timeout=LIMIT_S, env=mpi_environment("mpi") | {"OMP_NUM_THREADS": "1"})
        for name, times in json.loads(path.read_text()).items():
            found[name] |= times
    return found


def on_hosts(ranks: list[int], slower: dict[tuple[int, int], str], case: Case, path: Path) -> dict[str, list[float]]:
    """Run crossreduce and gloo in processes of several network namespaces; return the times of both."""
    hosts = [host for host, count in enumerate(ranks) for _ in range(count)]
    with namespaces.hosts(len(ranks), slower=slower) as bed:
        common = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": bed.addresses[0], "MASTER_PORT": "29500"}
        processes = [
            bed.run(host, command("torch", [case], path), {**common, "RANK": str(rank), "OMP_NUM_THREADS": "1"})
            for rank, host in enumerate(hosts)
        ]
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            assert process.wait(deadline - time.monotonic()) == 0, "a rank failed"
    found: dict[str, dict[str, list[float]]] = json.loads(path.read_text())
    return found[case["name"]]


def judged(title: str, case: Case, times: dict[str, list[float]]) -> dict[str, Any]:
    """Print a case's times and targets, and return them for the JSON file."""
    ours = statistics.median(times[OURS])
    print(f"{title}: {ours * 1e3:.3f} ms")
    kept: dict[str, Any] = {"seconds": {name: summary(each) for name, each in times.items()}, "required": []}

    def require(what: str, value: float, limit: float, met: bool) -> None:
        print(f"  {what:<28}{value:8.2f}   required: {limit:g}   {'met' if met else 'NOT MET'}")
        kept["required"].append({"what": what, "value": value, "limit": limit, "met": met})

    for name, least in case["least"].items():
        if name not in times:
            print(f"  {name} is not installed")
            continue
        # Only gloo's calls alternate with crossreduce's, so only they are compared turn by turn.
        each = [b / a for a, b in zip(times[OURS], times[name], strict=True)] if name == GLOO else []
        ratio = statistics.median(each) if each else statistics.median(times[name]) / ours
        require(f"{name} / ours", ratio, least, ratio >= least)
        if each:
            kept["required"][-1] |= {"least_turn": min(each), "greatest_turn": max(each)}
    if ALONE in times:
        print(f"  {ALONE + ' / ours':<28}{statistics.median(times[ALONE]) / ours:8.2f}")
    if "most_s" in case:
        require("microseconds", ours * 1e6, case["most_s"] * 1e6, ours <= case["most_s"])
    if "floor_s" in case:
        require(
            "relative to the limit",
            ours / case["floor_s"],
            case["most"],
            ours <= case["most"] * case["floor_s"],
        )
        print(f"  {'gloo, relative to the limit':<28}{statistics.median(times[GLOO]) / case['floor_s']:8.2f}")
        kept["floor_s"] = case["floor_s"]
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    parser.add_argument("--repeats", type=int, help="measurements of each case")
    parser.add_argument("--only", default="", help="only sets of ranks with this text in their name")
    parser.add_argument("--json", type=Path, default=RESULTS / "processes.json")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        task = json.loads(given.rank)
        (mpi_rank if task["kind"] == "mpi" else torch_rank)(task["cases"], Path(task["path"]))
        return
    repeats = 2 if given.quick else given.repeats
    kept: dict[str, Any] = {}
    begun = time.monotonic()

    def sized(case: Case) -> Case:
        return case if repeats is None else case | {"repeats": repeats}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        for ranks in (2, 4, 8):
            if given.only in (title := f"{ranks} ranks"):
                cases = [sized(case) for case in one_host(ranks)]
                found = on_one_host(ranks, cases, path)
                for case in cases:
                    kept[f"{title}, {case['name']}"] = judged(f"{title}, {case['name']}", case, found[case["name"]])
        why_not = namespaces.available()
        if why_not:
            print(f"between hosts: not measured: {why_not}")
        for several in [] if why_not else between_hosts():
            if given.only in (title := several["name"]):
                case = sized(several["case"])
                kept[f"{title}, {case['name']}"] = judged(
                    f"{title}, {case['name']}", case, on_hosts(several["ranks"], several["slower"], case, path)
                )
    print(f"{time.monotonic() - begun:.0f} s")
    if not given.only:
        keep("processes", {"cases": kept, "between_hosts": why_not or "network namespaces"}, given.json)


if __name__ == "__main__":
    main()
