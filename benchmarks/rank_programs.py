"""The code of the ranks of processes.py and hosts.py: one rank times the calls of several libraries in turn.

Input: a task as JSON (``torch_rank``, ``mpi_rank``). Output: rank 0 writes a row for each case to the file ``path``:
the case, and for each contender the seconds per call of the slowest rank in each turn. Arrays contain integers from 0
to 7, so that all sums are exact; every result of each contender is compared with NumPy's once, before it is timed.

``bytes`` is the size of the whole array: for all_gather that of the result, for reduce_scatter and all_to_all that of a
rank's input. ``send_recv`` is a round trip between ranks 2 k and 2 k + 1.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

OURS, GLOO, ALONE = "crossreduce", "gloo", "no reduction"
# Of all-reduces of small tensors: the call without torch.distributed, that of NumPy arrays, and torch's code alone.
DIRECT, ARRAYS, DISPATCH = WAYS = ("group.all_reduce", "NumPy arrays", "an empty backend")
SMALL_NBYTES = 1 << 16
NEW, OUT, IN_PLACE = "new", "out=", "in place"
LIMIT_S = 900  # the timeout of all calls, and the time limit of each set of ranks
BLOCK = 1_048_573  # an input repeats this many random elements; a prime, so that the pieces of a collective differ
TURN_S, MOST_CALLS = 0.01, 1024  # a turn has at most so many calls, and as few as take this long
TURNS = (5, 15)  # the least and the greatest number of turns; between them, ``budget_s`` of the task decides
DDP_LAYERS = (1024, 4096, 4096, 1024)  # 25 M parameters
# Samples per rank. With 8 ranks on 2 cores, more samples would hide the reduction: with 16 samples, a step without a
# reduction already takes 0.6 of the time of a step with gloo. Steps without a reduction are measured, too.
DDP_BATCH = 1

Calls = dict[str, Callable[[], Any]]


def in_turn(
    runs: Calls, barriers: Calls, gather: Callable[[float], list[float]], task: dict[str, Any]
) -> dict[str, list[float]]:
    """Return for each contender the slowest rank's seconds per call, by turn. ``gather(x)``: each rank's ``x``."""

    def turn(name: str) -> float:
        run, barrier, count = runs[name], barriers[name], counts[name]
        barrier(), barrier()
        start = time.perf_counter()
        for _ in range(count):
            run()
        return max(gather((time.perf_counter() - start) / count))

    counts = dict.fromkeys(runs, 1)
    for name in runs:
        # Twice, since a single turn may be long because another program ran.
        while counts[name] < MOST_CALLS and any(turn(name) * counts[name] < TURN_S for _ in range(2)):
            counts[name] *= 4
    times: dict[str, list[float]] = {name: [] for name in runs}
    turns = task["repeats"] or TURNS[0]
    while len(times[OURS]) < turns:
        for name in runs:
            times[name].append(turn(name))
        if len(times[OURS]) == 1 and not task["repeats"]:
            once = sum(times[name][0] * counts[name] for name in runs)
            turns = int(min(max(task["budget_s"] / once, TURNS[0]), TURNS[1]))
    return times


def data(rank: int, size: int) -> np.ndarray:
    return np.resize(np.random.default_rng(rank).integers(0, 8, BLOCK).astype(np.float32), size)


def problem(collective: str, rank: int, ranks: int, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's input and the result that it must get; arrays with a part for each rank have a row for each."""
    size, part = nbytes // 4, nbytes // 4 // ranks
    rows = (ranks, part)
    match collective:
        case "all_reduce":
            return data(rank, size), np.resize(sum(data(k, BLOCK) for k in range(ranks)), size)
        case "broadcast":
            return data(rank, size), data(0, size)
        case "send_recv":
            return data(rank, size), data(rank ^ 1, size)
        case "all_gather":
            return data(rank, part), np.stack([data(k, part) for k in range(ranks)])
        case "reduce_scatter":
            total = np.resize(sum(data(k, BLOCK) for k in range(ranks)), rows)
            return data(rank, ranks * part).reshape(rows), total[rank].copy()
        case "all_to_all":
            inputs = (data(k, ranks * part).reshape(rows) for k in range(ranks))
            return data(rank, ranks * part).reshape(rows), np.stack([x[rank] for x in inputs])
    raise ValueError(collective)


def check(result: Any, expected: np.ndarray, what: str) -> None:
    wrong = np.count_nonzero(np.asarray(result).reshape(-1) != expected.reshape(-1))
    assert not wrong, f"{what}: {wrong} of {expected.size} elements are wrong"


# Ranks of MPI.


def mpi_calls(world: Any, group: Any, collective: str, form: str, x: np.ndarray, out: np.ndarray) -> Calls:
    """Return the call of crossreduce and that of MPI; each returns its result. In place, ``x`` is also ``out``."""
    from mpi4py import MPI as mpi  # noqa: N811

    peer = {
        "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE if form == IN_PLACE else x, out),
        "broadcast": lambda: world.Bcast(out, 0),
        "reduce_scatter": lambda: world.Reduce_scatter_block(x, out),
        "all_gather": lambda: world.Allgather(x, out),
        "all_to_all": lambda: world.Alltoall(x, out),
    }[collective]
    method = getattr(group, collective)

    def theirs() -> np.ndarray:
        peer()
        return out

    return {OURS: (lambda: method(x)) if form == NEW else (lambda: method(x, out=out)), "MPI": theirs}


def mpi_rank(task: dict[str, Any]) -> None:
    """Time ``crossreduce.mpi`` and the MPI that started this process."""
    from mpi4py import MPI as mpi  # noqa: N811 - MPI is the name of the contender

    import crossreduce.mpi

    world, rows = mpi.COMM_WORLD, []
    with crossreduce.mpi.join(timeout_s=LIMIT_S) as group:
        barriers: Calls = {OURS: group.barrier, "MPI": world.Barrier}
        for collective, nbytes in task["cases"]:
            given, expected = problem(collective, world.rank, world.size, nbytes)
            out = np.empty_like(expected)
            forms = {"all_reduce": (NEW, OUT, IN_PLACE), "broadcast": (IN_PLACE,)}.get(collective, (NEW, OUT))
            for form in forms:
                x = out if form == IN_PLACE else given
                runs = mpi_calls(world, group, collective, form, x, out)
                for name, run in runs.items():
                    out[...] = given if form == IN_PLACE else np.nan
                    check(run(), expected, f"{name}, {collective} {form} of {nbytes} bytes")
                if form == IN_PLACE:
                    out[...] = 0  # sums of zeros stay finite
                times = in_turn(runs, barriers, world.allgather, task)
                rows.append({"collective": collective, "form": form, "dtype": "float32", "bytes": nbytes})
                rows[-1]["seconds"] = times
    if world.rank == 0:
        library = mpi.Get_library_version().splitlines()[0].rstrip("\0")
        Path(task["path"]).write_text(json.dumps({"library": library, "rows": rows}))


# Ranks of torch.distributed.


def torch_call(collective: str, x: Any, out: Any, group: Any) -> Callable[[], None]:
    """Return a collective of a process group; it writes to ``out``, in place those of one tensor."""
    import torch.distributed as dist

    # torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    rank = dist.get_rank()

    def send_recv() -> None:
        if rank % 2:
            dist.recv(out, rank - 1, group=group)
            dist.send(x, rank - 1, group=group)
        else:
            dist.send(x, rank + 1, group=group)
            dist.recv(out, rank + 1, group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(out, group=group),
        "broadcast": lambda: dist.broadcast(out, 0, group=group),
        "reduce_scatter": lambda: scatter(out, x, group=group),
        "all_gather": lambda: gather(out, x, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
        "send_recv": send_recv,
    }[collective]


def small_calls(group: Any, out: Any) -> Calls:
    """Return further calls that reduce ``out`` in place, and one that only passes through torch's code."""
    import torch
    import torch.distributed as dist

    from crossreduce.processes.array_group import ArrayGroup
    from crossreduce.torch.op_queue import Finished

    class Empty(dist.ProcessGroup):
        def allreduce(self, *_: Any) -> Any:
            return finished

    finished, arrays = Finished([out]), ArrayGroup(group.communicator)
    empty = Empty(dist.get_rank(), dist.get_world_size())
    if out.dtype == torch.bfloat16:
        import ml_dtypes

        array = out.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = out.numpy()
    return {
        DIRECT: lambda: group.all_reduce(out),
        ARRAYS: lambda: arrays.all_reduce(array, out=array),
        DISPATCH: lambda: dist.all_reduce(out, group=empty),
    }


def torch_rank(task: dict[str, Any]) -> None:
    """Time the backends crossreduce and gloo of torch.distributed, as two groups of the same processes."""
    import torch
    import torch.distributed as dist

    import crossreduce.torch  # noqa: F401 - older versions of torch do not find the backend

    torch.set_num_threads(1)
    dist.init_process_group(OURS, timeout=timedelta(seconds=LIMIT_S))
    groups = {OURS: dist.group.WORLD, GLOO: dist.new_group(backend=GLOO)}
    rank, size = dist.get_rank(), dist.get_world_size()
    times, small, rows = torch.zeros(size, dtype=torch.float64), torch.zeros(1), []

    def gather(value: float) -> list[float]:
        times.zero_()[rank] = value
        dist.all_reduce(times, group=groups[GLOO])
        return times.tolist()

    barriers: Calls = {name: lambda group=group: dist.all_reduce(small, group=group) for name, group in groups.items()}
    barriers |= dict.fromkeys(WAYS, barriers[OURS])
    for collective, nbytes, dtype in task["cases"]:
        given, expected = problem(collective, rank, size, nbytes * 4 // getattr(torch, dtype).itemsize)
        form = IN_PLACE if collective in ("all_reduce", "broadcast") else OUT
        x = torch.from_numpy(given).flatten().to(getattr(torch, dtype))
        out = torch.empty(expected.size, dtype=x.dtype)
        runs = {name: torch_call(collective, x, out, group) for name, group in groups.items()}
        if collective == "all_reduce" and nbytes <= SMALL_NBYTES:
            runs |= small_calls(groups[OURS], out)
        for name, run in runs.items():
            out.copy_(x) if form == IN_PLACE else out.fill_(torch.nan)
            run()
            if name != DISPATCH:
                check(out.float(), expected, f"{name}, {collective} of {nbytes} bytes")
        if form == IN_PLACE:
            out.zero_()
        rows.append({"collective": collective, "form": form, "dtype": dtype, "bytes": nbytes})
        rows[-1]["seconds"] = in_turn(runs, barriers, gather, task)
    if task["ddp"]:
        rows.append({"collective": "DDP step", "form": "", "dtype": "float32"} | ddp(groups))
        rows[-1]["seconds"] = in_turn(rows[-1].pop("runs"), {ALONE: barriers[GLOO], **barriers}, gather, task)
    if rank == 0:
        Path(task["path"]).write_text(json.dumps({"library": f"torch {torch.__version__}", "rows": rows}))
    dist.destroy_process_group()


def ddp(groups: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of a model's gradients, and a training step with each group and one without a reduction."""
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
    nbytes = sum(x.nbytes for x in ours)
    return {"bytes": nbytes, "runs": {name: step for name, (_, step) in made.items()}}


if __name__ == "__main__":
    given_task = json.loads(sys.argv[1])
    (mpi_rank if given_task["kind"] == "mpi" else torch_rank)(given_task)
