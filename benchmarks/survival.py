"""How long does a group need to continue after a rank has died?

Four questions, on ranks of one host, with torch and with NumPy: from the error of an op, until an op of the smaller
group has completed (shrink); from the call of grow until an op with the new rank has completed; agree; and, from a
rank's death to the next op, a restart of the job by torchrun with gloo.
Run: python benchmarks/survival.py [--repeats N] [--json FILE]
"""

import argparse
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from common import RESULTS, keep, summary

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


def processes(target, count, *arguments):
    """Run ``target(number, *arguments)`` in processes; the last one may die."""
    context = multiprocessing.get_context("forkserver")
    running = [context.Process(target=target, args=(k, *arguments)) for k in range(count)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert all(process.exitcode in (0, -signal.SIGKILL) for process in running)


class TorchRanks:
    """The default group of torch.distributed, with the backend crossreduce."""

    def __init__(self, number=0, size=0, folder=""):
        import torch
        import torch.distributed as dist

        import crossreduce.torch

        self.module, self.dist = crossreduce.torch, dist
        torch.set_num_threads(1)
        self.x = torch.ones(1000)
        if size:
            dist.init_process_group("crossreduce", f"file://{folder}/store", rank=number, world_size=size)

    def all_reduce(self):
        self.dist.all_reduce(self.x)

    def barrier(self):
        self.dist.barrier()

    def agree(self):
        self.module.agree(True)

    def invitation(self):
        return self.module.invitation()

    def shrink(self):
        self.module.shrink()

    def grow(self):
        return self.module.grow() is not None

    def join(self, invitation):
        self.module.join(invitation)

    def leave(self):
        self.dist.destroy_process_group()


class NumpyRanks:
    """A group of ``crossreduce.processes``."""

    def __init__(self, number=0, size=0, folder=""):
        import numpy as np

        from crossreduce import processes

        self.processes, self.x = processes, np.ones(1000, np.float32)
        if size:
            self.group = processes.join(number, size, Path(folder, "address").read_text())

    def all_reduce(self):
        self.group.all_reduce(self.x, out=self.x)

    def barrier(self):
        self.group.barrier()

    def agree(self):
        self.group.agree(True)

    def invitation(self):
        return self.group.invitation()

    def shrink(self):
        self.group = self.group.shrink()

    def grow(self):
        made = self.group.grow()
        self.group = made or self.group
        return made is not None

    def join(self, invitation):
        self.group = self.processes.join_invited(invitation)

    def leave(self):
        self.group.close()


KINDS = {"torch": TorchRanks, "NumPy": NumpyRanks}


def shrinking(number, kind, size, folder):
    """One rank of a group whose last rank dies; write how long the others need."""
    from crossreduce import PeerLostError

    os.environ["CROSSREDUCE_DUMP_DIR"] = folder  # here, since the server that forks the ranks keeps its first value
    group = KINDS[kind](number, size, folder)
    for _ in range(VICTIM_STEP):
        group.all_reduce()
    if number == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            group.all_reduce()
    except PeerLostError:
        start = time.perf_counter()
    group.shrink()
    group.all_reduce()
    Path(folder, f"took{number}").write_text(str(time.perf_counter() - start))
    group.barrier()


def growing(number, kind, size, folder, repeats):
    """One rank of a group that a process joins, and leaves again; write how long grow takes, and agree."""
    times, invited = {"grow": [], "agree": []}, Path(folder, "invitation")
    if number == size:
        group = KINDS[kind]()
        while not invited.exists():
            time.sleep(0.01)
        for _ in range(repeats):
            group.join(invited.read_text())
            group.barrier()
            group.leave()
        return
    group = KINDS[kind](number, size, folder)
    if number == 0:
        written = Path(folder, "written")
        written.write_text(group.invitation())
        written.rename(invited)
    for _ in range(AGREES):
        start = time.perf_counter()
        group.agree()
        times["agree"].append(time.perf_counter() - start)
    while len(times["grow"]) < repeats:
        start = time.perf_counter()
        if group.grow():
            group.barrier()
            times["grow"].append(time.perf_counter() - start)
            group.shrink()  # the new rank has left
        group.all_reduce()
        time.sleep(0.05)
    Path(folder, f"took{number}").write_text(json.dumps(times))
    group.barrier()


@contextmanager
def meeting():
    """Create a folder for the files of a group, with an address of this host that is free."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            Path(folder, "address").write_text(f"localhost:{free.getsockname()[1]}")
        yield folder


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS / "survival.json")
    arguments = parser.parse_args()
    repeats, rows = arguments.repeats, []
    multiprocessing.set_forkserver_preload(["torch", "crossreduce.torch", "crossreduce.processes"])
    shrinks = {}
    for kind in KINDS:
        for size in range(2, 7):
            times = []
            for _ in range(repeats):
                with meeting() as folder:
                    processes(shrinking, size, kind, size, folder)
                    times.append(took(folder))
            shrinks[kind, size] = summary(times)
            rows.append({"what": "shrink", "kind": kind, "ranks": size, **shrinks[kind, size]})
            median_s = shrinks[kind, size]["median_s"]
            print(f"shrink of {size} {kind} ranks: {median_s * 1e3:.1f} ms, {max(times) * 1e3:.1f} at most")
        for size in (2, 4):
            with meeting() as folder:
                processes(growing, size + 1, kind, size, folder, repeats)
                found = [json.loads(path.read_text()) for path in Path(folder).glob("took*")]
            for what in ("grow", "agree"):
                slowest = [max(times) for times in zip(*(one[what] for one in found), strict=True)]
                rows.append({"what": what, "kind": kind, "ranks": size, **summary(slowest)})
                print(f"{what} of {size} {kind} ranks: {rows[-1]['median_s'] * 1e3:.2f} ms")
    tries = [restarted(4) for _ in range(repeats)]
    worked = [seconds for seconds in tries if seconds is not None]
    row = {"what": "restart by torchrun, gloo", "ranks": 4, "failed": tries.count(None)}
    if worked:
        row |= {"ratio to shrink": statistics.median(worked) / shrinks["torch", 4]["median_s"], **summary(worked)}
    rows.append(row)
    print(", ".join(f"{key} {value}" for key, value in row.items()))
    keep("survival", {"question": "the time until a group goes on after a loss", "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
