"""The time of exact all-reduces of ranks beside the default ones, on one host and between two.

``python benchmarks/exact_ranks.py`` measures torch ranks, prints ratios, and keeps them in results/exact_ranks.json:

  one host: 4 ranks, 1 KiB to 64 MiB of float32, and 16 MiB of each other dtype.
  two hosts: 2 x 4 ranks in network namespaces (requires root) that a link of 1 Gbit/s joins. Bytes
    are those that host 0 sends over the link, headers included.

Ordinary data is random with a normal distribution; of "wide" data all exponents are equally frequent, so that almost
every sum needs overflow terms. Default and exact calls alternate; ``ratio`` is the median time of exact calls over that
of default ones. The slowest rank's times count.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from common import keep, size_text, tests_on_path

SIZES = tuple(1 << shift for shift in range(10, 27, 2))
DTYPES = ("bfloat16", "float16", "float64")
RATE, LIMIT_S = "1gbit", 500
REPEATS = 15
Row = dict[str, Any]


def cases_of(part: str) -> list[tuple[int, str, str]]:
    """Return the sizes in bytes, dtypes and kinds of data of a part."""
    sizes = SIZES if part == "one host" else (1 << 10, 1 << 16, 1 << 20, 1 << 25)
    cases = [(nbytes, "float32", "normal") for nbytes in sizes]
    return [*cases, *((1 << 24, dtype, "normal") for dtype in DTYPES), (1 << 24, "float32", "wide")]


def data(torch: Any, nbytes: int, dtype: str, kind: str, rank: int) -> Any:
    """Return a rank's tensor."""
    torch.manual_seed(rank)
    made = getattr(torch, dtype)
    size = nbytes // made.itemsize
    x = torch.randn(size, dtype=torch.float64)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-120, 120, (size,)).double())
    return x.to(made)


def sent() -> int:
    """Return the bytes that this host has sent over its link to the other one; without such a link 0."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("link0:"))


def one_rank(folder: Path, store: str, part: str) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    from crossreduce.torch import Options

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("crossreduce", store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    groups = {"default": dist.new_group(), "exact": dist.new_group(pg_options=Options(exact=True))}
    rows = []
    for nbytes, dtype, kind in cases_of(part):
        given = data(torch, nbytes, dtype, kind, rank)
        inner = max(1, (1 << 16) // nbytes)
        xs = [given.clone() for _ in range(inner)]  # sums of sums would soon overflow
        times: dict[str, list[float]] = {name: [] for name in groups}
        moved: dict[str, int] = {}
        for repeat in range(REPEATS + 1):  # the first is not counted
            for name, group in groups.items():
                for x in xs:
                    x.copy_(given)
                dist.barrier()
                before = sent()
                began = time.perf_counter()
                for x in xs:
                    dist.all_reduce(x, group=group)
                seconds = torch.tensor((time.perf_counter() - began) / inner)
                moved[name] = (sent() - before) // inner
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if repeat:
                    times[name].append(float(seconds))
        medians = {name: statistics.median(found) for name, found in times.items()}
        row: Row = {"bytes": nbytes, "dtype": dtype, "data": kind, "seconds": medians}
        row["ratio"] = medians["exact"] / medians["default"]
        if moved["default"]:
            row |= {"sent": moved, "sent_ratio": moved["exact"] / moved["default"]}
        rows.append(row)
    dist.destroy_process_group()
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))


def part(name: str) -> list[Row]:
    """Run the ranks of a part, and return its rows."""
    tests_on_path()
    import namespaces

    why_not = namespaces.available()
    if why_not:
        raise RuntimeError(why_not)
    hosts, ranks = (1, 4) if name == "one host" else (2, 8)
    with tempfile.TemporaryDirectory() as folder, namespaces.hosts(hosts, rate=RATE) as bed:
        command = [sys.executable, __file__, folder, f"tcp://{bed.addresses[0]}:29500", name]
        running = []
        for rank in range(ranks):
            around = {"WORLD_SIZE": str(ranks), "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            if hosts == 1:
                command[3], around["GLOO_SOCKET_IFNAME"] = f"file://{folder}/store", "lo"
            running.append(bed.run(rank // 4, command, around))
        for process in running:
            if process.wait(LIMIT_S):
                raise subprocess.CalledProcessError(process.returncode, command)
        rows: list[Row] = json.loads((Path(folder) / "rows.json").read_text())
    print(f"{name}: exact over default")
    for row in rows:
        link = f", {row['sent_ratio']:.2f} times the bytes on the link" if "sent" in row else ""
        print(f"  {size_text(row['bytes']):>8} {row['dtype']:>8} {row['data']:>6}: {row['ratio']:.2f}{link}")
    return rows


if __name__ == "__main__":
    if len(sys.argv) == 4:
        one_rank(Path(sys.argv[1]), *sys.argv[2:])
    else:
        parts = {name.replace(" ", "_"): part(name) for name in ("one host", "two hosts")}
        keep("exact_ranks", {"rate": RATE, **parts})
