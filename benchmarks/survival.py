"""How long does a group need to go on after a rank has died, and what does that cost while none dies?

Four questions, on ranks of one host: from the error of an op, until an op of the smaller group has completed (shrink);
from the call of grow until an op with the new rank has completed; agree; and, from a rank's death to the next op, a
restart of the job by torchrun with gloo. With ``--before``, also the time of an all-reduce with an earlier version.
Run: python benchmarks/survival.py [--repeats N] [--before SRC] [--json FILE]
``--before``: the folder ``src`` of the earlier version, with its compiled files.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import RESULTS, keep, size_text, summary

SMALL, LARGE = 4, 64 << 20  # bytes
AGREES = 200
VICTIM_STEP = 20  # of the job that torchrun restarts

JOB = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, size, count = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore(f"attempt {count}", store)  # else gloo finds addresses of the earlier processes
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=20))
x, folder = torch.ones(1000), sys.argv[1]
again = count > 0
for step in range(40):
    dist.all_reduce(x)
    if again and step == 0:
        open(f"{folder}/again{dist.get_rank()}", "w").write(str(time.time()))
    if not again and step == VICTIM_STEP and dist.get_rank() == dist.get_world_size() - 1:
        open(f"{folder}/died", "w").write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""

COST = """
import sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
number, size, folder, nbytes, count, turns = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
dist.init_process_group("crossreduce", f"file://{folder}/store", rank=number, world_size=size)
x, times = torch.zeros(nbytes // 4), []
clock = time.thread_time if size == 1 else time.perf_counter
for _ in range(turns):
    start = clock()
    for _ in range(count):
        dist.all_reduce(x)
    times.append((clock() - start) / count)
open(f"{folder}/took{number}", "w").write(str(min(times)))
dist.barrier()
"""


def processes(target, count, *arguments):
    """Run ``target(number, *arguments)`` in processes; the last one may die."""
    context = multiprocessing.get_context("forkserver")
    running = [context.Process(target=target, args=(k, *arguments)) for k in range(count)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert all(process.exitcode in (0, -signal.SIGKILL) for process in running)


def begin(number, size, folder):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("crossreduce", f"file://{folder}/store", rank=number, world_size=size)
    return torch.ones(1000), dist


def shrinking(number, size, folder):
    """One rank of a group whose last rank dies; write how long the others need."""
    import crossreduce.torch
    from crossreduce import PeerLostError

    x, dist = begin(number, size, folder)
    for _ in range(VICTIM_STEP):
        dist.all_reduce(x)
    if number == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(x)
    except PeerLostError:
        start = time.perf_counter()
    crossreduce.torch.shrink()
    dist.all_reduce(x)
    Path(folder, f"took{number}").write_text(str(time.perf_counter() - start))
    dist.barrier()


def growing(number, size, folder, repeats):
    """One rank of a group that a process joins, and leaves again; write how long grow takes, and agree."""
    import crossreduce.torch

    times, invited = {"grow": [], "agree": []}, Path(folder, "invitation")
    if number == size:
        while not invited.exists():
            time.sleep(0.01)
        dist = sys.modules["torch.distributed"]
        for _ in range(repeats):
            crossreduce.torch.join(invited.read_text())
            dist.barrier()
            dist.destroy_process_group()
        return
    x, dist = begin(number, size, folder)
    if number == 0:
        written = Path(folder, "written")
        written.write_text(crossreduce.torch.invitation())
        written.rename(invited)
    for _ in range(AGREES):
        start = time.perf_counter()
        crossreduce.torch.agree(True)
        times["agree"].append(time.perf_counter() - start)
    while len(times["grow"]) < repeats:
        start = time.perf_counter()
        if crossreduce.torch.grow() is not None:
            dist.barrier()
            times["grow"].append(time.perf_counter() - start)
            crossreduce.torch.shrink()  # the new rank has left
        dist.all_reduce(x)
        time.sleep(0.05)
    Path(folder, f"took{number}").write_text(json.dumps(times))
    dist.barrier()


def restarted(size):
    """Return the seconds from a rank's death until the restarted job has completed an op; ``None``: gloo failed to."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "job.py")
        program.write_text(JOB.replace("VICTIM_STEP", str(VICTIM_STEP)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
        command += ["--nproc-per-node", str(size), str(program), folder]
        ran = subprocess.run(command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        again = [float(path.read_text()) for path in Path(folder).glob("again*")]
        return max(again) - float(Path(folder, "died").read_text()) if ran.returncode == 0 else None


def took(folder):
    """Return the time of the slowest rank."""
    return max(float(path.read_text()) for path in Path(folder).glob("took*"))


def all_reduce_s(source, nbytes):
    """Return the least time of an all-reduce with the version of the library in a folder.

    A small one runs on one rank, whose CPU time does not depend on other programs.
    """
    size, count, turns = (2, 10, 5) if nbytes == LARGE else (1, 20_000, 10)
    with tempfile.TemporaryDirectory() as folder:
        around = {**os.environ, "PYTHONPATH": str(source)}
        command = [sys.executable, "-c", COST]
        rest = [str(size), folder, str(nbytes), str(count), str(turns)]
        running = [subprocess.Popen([*command, str(k), *rest], env=around) for k in range(size)]
        assert [process.wait() for process in running] == [0] * size
        return took(folder)


def cost(before, repeats):
    """Return rows with the time of an all-reduce of both versions, which run in turn."""
    sources = {"before": before.resolve(), "after": Path(__file__).resolve().parents[1] / "src"}
    rows = []
    for nbytes in (SMALL, LARGE):
        found = {"before": [], "after": []}
        for k in range(repeats):
            for name in ("before", "after") if k % 2 else ("after", "before"):
                found[name].append(all_reduce_s(sources[name], nbytes))
        medians = {name: statistics.median(each) for name, each in found.items()}
        added = statistics.median(a - b for a, b in zip(found["after"], found["before"], strict=True))
        row = {"what": "all_reduce", "bytes": nbytes, "added_s": added, "ratio": medians["after"] / medians["before"]}
        rows.append(row | {name: summary(each) for name, each in found.items()})
        print(f"all-reduce of {size_text(nbytes)}: added {added * 1e6:.3f} us, ratio {row['ratio']:.4f}")
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path, default=RESULTS / "survival.json")
    arguments = parser.parse_args()
    repeats, rows = arguments.repeats, []
    multiprocessing.set_forkserver_preload(["torch", "crossreduce.torch"])
    shrinks = {}
    for size in range(2, 7):
        times = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                os.environ["CROSSREDUCE_DUMP_DIR"] = folder
                processes(shrinking, size, size, folder)
                times.append(took(folder))
        shrinks[size] = summary(times)
        rows.append({"what": "shrink", "ranks": size, **shrinks[size]})
        print(f"shrink of {size} ranks: {shrinks[size]['median_s'] * 1e3:.1f} ms, {max(times) * 1e3:.1f} at most")
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            processes(growing, size + 1, size, folder, repeats)
            found = [json.loads(path.read_text()) for path in Path(folder).glob("took*")]
        for what in ("grow", "agree"):
            slowest = [max(times) for times in zip(*(one[what] for one in found), strict=True)]
            rows.append({"what": what, "ranks": size, **summary(slowest)})
            print(f"{what} of {size} ranks: {rows[-1]['median_s'] * 1e3:.2f} ms")
    tries = [restarted(4) for _ in range(repeats)]
    worked = [seconds for seconds in tries if seconds is not None]
    row = {"what": "restart by torchrun, gloo", "ranks": 4, "failed": tries.count(None)}
    if worked:
        row |= {"ratio to shrink": statistics.median(worked) / shrinks[4]["median_s"], **summary(worked)}
    rows.append(row)
    print(", ".join(f"{key} {value}" for key, value in row.items()))
    if arguments.before:
        rows += cost(arguments.before, repeats)
    keep("survival", {"question": "the time until a group goes on after a loss", "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
