"""Is there a collective, a size or a number of ranks of one host at which an MPI is faster?

Collectives of 2, 4 and 8 ranks on float32 arrays of 64 B to 64 MiB, with out=, new results and (all-reduce) in place.
Each MPI starts processes of its own, in which crossreduce (``crossreduce.mpi``) and that MPI's collectives run in turn;
the slowest rank's time counts. Sizes are those of the whole array: of the concatenation for all_gather and
reduce_scatter. The first call of each case is checked. Without --mpi, Open MPI beside this interpreter is the peer.

Run: python benchmarks/rank_grid.py [--mpi NAME=FOLDER ...] [--quick] [--ranks 2,4,8] [--json PATH] [--picture PATH]
FOLDER: a virtual environment with bin/mpiexec, mpi4py and NumPy, such as one with ``pip install impi-rt mpi4py numpy``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

COLLECTIVES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather")
NEW, OUT, IN_PLACE = "new", "out=", "in place"
LIMIT_S = 900  # of the processes of one MPI
SOURCES = Path(__file__).parents[1] / "src"


# The code that each rank runs.


def calls(
    world: Any, group: Any, collective: str, nbytes: int
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return for each form of a collective our call and the MPI's; each returns its result."""
    from mpi4py import MPI as mpi  # noqa: N811 - MPI is the name of the contender

    n, size = world.size, nbytes // 4
    part = max(1, size // n)
    whole = {"all_reduce": size, "broadcast": size, "reduce_scatter": n * part, "all_gather": part}[collective]
    shape = (n, part) if collective == "reduce_scatter" else (whole,)
    x = np.random.default_rng(world.rank).integers(0, 8, shape).astype(np.float32)
    results = {"reduce_scatter": (part,), "all_gather": (n, part)}
    out, theirs = (np.empty(results.get(collective, shape), np.float32) for _ in range(2))
    if collective == "broadcast":
        here, there = x.copy(), x.copy()

        def bcast() -> Any:
            world.Bcast(there, 0)
            return there

        return {IN_PLACE: (lambda: group.broadcast(here, 0, out=here), bcast)}
    method = getattr(group, collective)
    ours = {NEW: lambda: method(x), OUT: lambda: method(x, out=out)}
    run = {
        "all_reduce": lambda: world.Allreduce(x, theirs),
        "reduce_scatter": lambda: world.Reduce_scatter_block(x, theirs),
        "all_gather": lambda: world.Allgather(x, theirs),
    }[collective]

    def peer() -> Any:
        run()
        return theirs

    found = {form: (call, peer) for form, call in ours.items()}
    if collective == "all_reduce":
        zeros, nothing = np.zeros_like(x), np.zeros_like(x)  # sums of zeros stay finite

        def in_place() -> Any:
            world.Allreduce(mpi.IN_PLACE, nothing)
            return nothing

        found[IN_PLACE] = (lambda: group.all_reduce(zeros, out=zeros), in_place)
    return found


def rank(task: dict[str, Any]) -> None:
    """Measure all cases; rank 0 writes the rows to a file."""
    from mpi4py import MPI as mpi  # noqa: N811

    import crossreduce.mpi

    world, rows = mpi.COMM_WORLD, []
    with crossreduce.mpi.join() as group:
        for collective in COLLECTIVES:
            for nbytes in task["sizes"]:
                for form, runs in calls(world, group, collective, nbytes).items():
                    first = [np.array(run()) for run in runs]
                    assert (first[0] == first[1]).all(), f"{collective} of {nbytes} bytes differs"
                    count = max(2, min(1000, int(task["bytes"] / (nbytes + 8192 * world.size))))
                    times: tuple[list[float], list[float]] = ([], [])
                    for _ in range(task["repeats"]):
                        for run, taken in zip(runs, times, strict=True):
                            run()
                            world.Barrier()
                            start = time.perf_counter()
                            for _ in range(count):
                                run()
                            taken.append(world.allreduce((time.perf_counter() - start) / count, mpi.MAX))
                    ours, theirs = map(statistics.median, times)
                    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
                    rows.append(
                        {"collective": collective, "form": form, "bytes": nbytes, "ours_s": ours, "mpi_s": theirs}
                        | {"ratio": ratio}
                    )
    if world.rank == 0:
        Path(task["path"]).write_text(json.dumps({"library": mpi.Get_library_version().splitlines()[0], "rows": rows}))


# The code of the process that starts the ranks.


def measured(folder: Path, ranks: int, quick: bool) -> dict[str, Any]:
    """Return the rows of one MPI with this many ranks."""
    from crossreduce.cli.bench.ranks import mpi_environment

    launcher = next(path for name in ("mpiexec.hydra", "mpiexec") if (path := folder / "bin" / name).exists())
    site = next(folder.glob("lib/python*/site-packages"))
    settings = {
        "I_MPI_ROOT": str(folder),
        "I_MPI_FABRICS": "shm",
        "LD_LIBRARY_PATH": f"{folder / 'lib'}:{folder / 'lib' / 'libfabric'}",
        "OMP_NUM_THREADS": "1",
        # The MPI's own mpi4py; all other packages are those of this interpreter.
        "PYTHONPATH": os.pathsep.join(map(str, (SOURCES, site, *(p for p in sys.path if p.endswith("site-packages"))))),
    }
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "rows.json"
        exponents = (6, 12, 20) if quick else range(6, 27, 2)
        task = {"sizes": [1 << k for k in exponents], "repeats": 3 if quick else 7, "path": str(path)}
        task["bytes"] = 1e6 if quick else 5e7
        command = [launcher, "-n", str(ranks), folder / "bin" / "python", __file__, "--rank", json.dumps(task)]
        subprocess.run(command, check=True, timeout=LIMIT_S, env=mpi_environment("mpi") | settings)
        return json.loads(path.read_text())


def ahead(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each point at which a peer is faster than crossreduce."""
    from common import size_text

    for row in rows:
        if row["ratio"] > 1:
            yield (
                f"{row['ranks']} ranks, {row['collective']} {row['form']}, {size_text(row['bytes'])}: {row['mpi']} "
                f"takes {row['mpi_s'] * 1e6:.4g} us, crossreduce {row['ratio']:.2f} times as long"
            )


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draw the times of all-reduces with out= over their size, for each number of ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from common import size_text

    counts = sorted({row["ranks"] for row in rows})
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "crossreduce"})
    figure, every = plt.subplots(1, len(counts), figsize=(3.2 * len(counts), 3.2), layout="constrained", squeeze=False)
    for axes, ranks in zip(every[0], counts, strict=True):
        chosen = [r for r in rows if (r["ranks"], r["collective"], r["form"]) == (ranks, "all_reduce", OUT)]
        names = list(dict.fromkeys(row["mpi"] for row in chosen))
        first = [row for row in chosen if row["mpi"] == names[0]]
        axes.loglog(
            [r["bytes"] for r in first], [r["ours_s"] * 1e6 for r in first], "o-", color="#D55E00", label="crossreduce"
        )
        for name, colour, marker in zip(names, ("#0072B2", "#009E73", "#CC79A7"), "sv^", strict=False):
            own = [row for row in chosen if row["mpi"] == name]
            axes.loglog(
                [r["bytes"] for r in own], [r["mpi_s"] * 1e6 for r in own], f"{marker}--", color=colour, label=name
            )
        ticks = [r["bytes"] for r in first][::2]
        axes.set_xticks(ticks, [size_text(tick) for tick in ticks], rotation=45)
        axes.set_title(f"{ranks} ranks")
        axes.grid(alpha=0.3)
    every[0][0].set_ylabel("microseconds of an all-reduce")
    every[0][0].legend()
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mpi", action="append", metavar="NAME=FOLDER", help="a peer; may be repeated")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--quick", action="store_true", help="few sizes and repeats, to see that it runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(json.loads(given.rank))
        return
    from common import RESULTS, keep, size_text

    peers = dict(one.split("=", 1) for one in given.mpi or [f"Open MPI={Path(sys.executable).parents[1]}"])
    rows, libraries = [], {}
    for ranks in map(int, given.ranks.split(",")):
        for name, folder in peers.items():
            found = measured(Path(folder), ranks, given.quick)
            libraries[name] = found["library"]
            for row in found["rows"]:
                rows.append({"mpi": name, "ranks": ranks, **row})
                print(
                    f"{ranks} ranks, {row['collective']:14} {row['form']:8} {size_text(row['bytes']):>7}: crossreduce "
                    f"{row['ours_s'] * 1e6:8.4g} us, {name} {row['mpi_s'] * 1e6:8.4g} us, ratio {row['ratio']:.2f}",
                    flush=True,
                )
    lines = list(ahead(rows))
    print(f"\nA peer is faster at {len(lines)} of {len(rows)} points.", *lines, sep="\n")
    if given.json is not None or not given.quick:
        keep("rank_grid", {"libraries": libraries, "rows": rows}, given.json or RESULTS / "rank_grid.json")
    if given.picture:
        draw(rows, given.picture)


if __name__ == "__main__":
    main()
