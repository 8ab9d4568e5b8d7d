"""Is there a collective, a size or a number of ranks at which gloo or an MPI is faster than crossreduce?

Three parts; contenders run in turn in the same processes, and the slowest rank's time counts (rank_programs.py):
  mpi: NumPy arrays, ``crossreduce.mpi`` and each MPI in processes that this MPI started, 2, 4 and 8 ranks of one host.
  torch: tensors, the backends crossreduce and gloo of torch.distributed, 2, 4 and 8 ranks of one host; beside small
    all-reduces also other ways to make them.
  ddp: a training step of DistributedDataParallel with 25 M parameters, 8 ranks, the same backends.
hosts.py has the ranks of several hosts.

It prints each point, the points at which a peer is faster, and the requirements.
Run: python benchmarks/processes.py [--mpi NAME=FOLDER ...] [--quick] [--only TEXT] [--repeats N] [--json PATH]
  [--ranks N ...]
FOLDER: a virtual environment with bin/mpiexec, mpi4py and NumPy, such as one with ``pip install impi-rt mpi4py numpy``;
without --mpi, Open MPI beside this interpreter. --only: parts and ranks such as "torch" or "mpi, 8 ranks"; then results
are kept only in given files. --ranks: the numbers of ranks of one host, also for DDP.
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
from functools import partial
from pathlib import Path
from typing import Any

from common import RESULTS, keep, size_text
from rank_programs import ALONE, DIRECT, GLOO, LIMIT_S, OURS, WAYS

import crossreduce as cr
from crossreduce.cli.bench.launch import launch
from crossreduce.cli.bench.ranks import mpi_environment

PROGRAM, SOURCES = Path(__file__).with_name("rank_programs.py"), Path(cr.__file__).parents[1]
RANKS = (2, 4, 8)
COLLECTIVES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all")
MPI_SIZES, TORCH_SIZES = ([1 << k for k in range(6, 27, step)] for step in (2, 4))
QUICK_SIZES = (1 << 10, 1 << 20)

Row = dict[str, Any]
Task = dict[str, Any]

# Requirements: the text, the rows, the compared quantity, and its greatest allowed value in any of the rows.
REQUIRED: tuple[tuple[str, dict[str, Any], Callable[[Row], float], float], ...] = (
    ("one host, every collective, time / that of the faster MPI", {"part": "mpi"}, lambda r: r["ratio"], 1),
    *(
        (
            f"2 ranks, all_reduce of NumPy arrays of {text}, us",
            {"part": "mpi", "place": "2 ranks", "collective": "all_reduce", "form": "out=", "bytes": sizes},
            lambda r: r["ours_s"] * 1e6,
            most,
        )
        for text, sizes, most in (("up to 1 KiB", (64, 256, 1 << 10), 2), ("1 MiB", (1 << 20,), 60))
    ),
    *(
        (
            f"2 ranks, all_reduce of a tensor of 64 B by {what}, us",
            {"part": "torch", "place": "2 ranks", "collective": "all_reduce", "peer": peer, "bytes": (64,)},
            value_of,
            most,
        )
        for what, peer, value_of, most in (
            ("torch.distributed", GLOO, lambda r: r["ours_s"] * 1e6, 5.5),
            (DIRECT, DIRECT, lambda r: r["peer_s"] * 1e6, 1.6),
        )
    ),
    (
        "8 ranks, DDP step, time / gloo's",
        {"part": "ddp", "place": "8 ranks", "peer": "gloo"},
        lambda r: r["ratio"],
        0.55,
    ),
    *(
        (
            f"2 ranks, send and recv of {size_text(nbytes)}, time / gloo's",
            {"part": "torch", "place": "2 ranks", "collective": "send_recv", "bytes": (nbytes,)},
            lambda r: r["ratio"],
            most,
        )
        for nbytes, most in ((1 << 10, 1 / 5), (1 << 26, 1 / 3))
    ),
)


# The ranks of each part. All functions return what rank 0 wrote.


def command(task: Task, path: Path) -> list[str]:
    return [str(PROGRAM), json.dumps(task | {"path": str(path)})]


def of_mpi(ranks: int, folder: Path, task: Task, path: Path) -> dict[str, Any]:
    """Run ``crossreduce.mpi`` and the MPI of a virtual environment."""
    found = [folder / "bin" / name for name in ("mpiexec.hydra", "mpiexec") if (folder / "bin" / name).exists()]
    assert found, f"there is no mpiexec in {folder / 'bin'}"
    site = next(folder.glob("lib/python*/site-packages"))
    settings = {
        "I_MPI_ROOT": str(folder),
        "I_MPI_FABRICS": "shm",
        "LD_LIBRARY_PATH": f"{folder / 'lib'}:{folder / 'lib' / 'libfabric'}",
        "OMP_NUM_THREADS": "1",
        # The MPI's own mpi4py; all other packages are those of this interpreter.
        "PYTHONPATH": os.pathsep.join(map(str, (SOURCES, site, *(p for p in sys.path if p.endswith("site-packages"))))),
    }
    python = [folder / "bin" / "python", "-m", "mpi4py"]  # this module aborts all ranks if one fails
    line = [found[0], "-n", str(ranks), *python, *command(task, path)]
    subprocess.run(line, check=True, timeout=LIMIT_S, env=mpi_environment("mpi") | settings)
    return json.loads(path.read_text())


def of_torch(ranks: int, task: Task, path: Path) -> dict[str, Any]:
    """Run crossreduce and gloo on this host."""
    code = launch([sys.executable, *command(task, path)], ranks)
    assert code == 0, f"a rank ended with exit code {code}"
    return json.loads(path.read_text())


def runs(peers: dict[str, Path], given: argparse.Namespace) -> Iterator[tuple[str, str, str, Any]]:
    """Yield for each set of ranks its part and place, the name of its peer, and a function that runs it at a path."""

    def task(kind: str, sizes: list[int], budget_s: float, collectives: tuple[str, ...] = COLLECTIVES) -> Task:
        cases = [(name, size) for name in collectives for size in (QUICK_SIZES if given.quick else sizes)]
        fixed = given.repeats or (2 if given.quick else None)
        return {"kind": kind, "cases": cases, "budget_s": budget_s, "repeats": fixed}

    def torch(task: Task, ddp: bool = False) -> Task:
        return task | {"cases": [(*case, "float32") for case in task["cases"]], "ddp": ddp}

    counts = given.ranks or (RANKS[:2] if given.quick else RANKS)
    for ranks in counts:
        for name, folder in peers.items():
            yield "mpi", f"{ranks} ranks", name, partial(of_mpi, ranks, folder, task("mpi", MPI_SIZES, 1))
    for ranks in counts:
        one = torch(task("torch", TORCH_SIZES, 1.5, (*COLLECTIVES, "send_recv")))
        halves = QUICK_SIZES if given.quick else (*TORCH_SIZES[:3], TORCH_SIZES[-1])
        one["cases"] += [("all_reduce", size, "bfloat16") for size in halves]
        yield "torch", f"{ranks} ranks", "gloo", partial(of_torch, ranks, one)
    for ranks in given.ranks or (8,):
        yield "ddp", f"{ranks} ranks", "gloo", partial(of_torch, ranks, torch(task("torch", [], 15, ()), ddp=True))


# The rows: a point, crossreduce's time and that of one peer.


def compared(row: Row) -> Iterator[Row]:
    """Yield for each peer of a case a row with the medians, and the ratio of the times of adjacent turns."""
    ours = row["seconds"][OURS]
    for peer, theirs in row["seconds"].items():
        if peer != OURS:
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            numbers = {"ours_s": statistics.median(ours), "peer_s": statistics.median(theirs)}
            numbers |= {"ratio": statistics.median(ratios), "least_ratio": min(ratios), "greatest_ratio": max(ratios)}
            numbers |= {"floor_s": row["floor_s"]} if row.get("floor_s") else {}
            found = {key: row[key] for key in ("collective", "form", "dtype", "bytes")}
            yield found | {"peer": peer, "turns": len(ours)} | {key: float(f"{x:.4g}") for key, x in numbers.items()}


def text(row: Row) -> str:
    """Return a row as a line."""
    kind = "" if row["dtype"] == "float32" else f"{row['dtype']} "
    case = f"{row['collective']} {kind}{row['form']}"
    line = (
        f"{row['part']}, {row['place']}: {case:23} {size_text(row['bytes']):>8}: {OURS} {row['ours_s'] * 1e6:10.4g} us"
    )
    line += f", {row['peer']} {row['peer_s'] * 1e6:10.4g} us, ratio {row['ratio']:.2f}"
    if "floor_s" in row:
        ours, peer = (row[key] / row["floor_s"] for key in ("ours_s", "peer_s"))
        line += f"; relative to the limit of the links: {ours:.2f}, {row['peer']} {peer:.2f}"
    return line


def ahead(rows: list[Row]) -> list[Row]:
    """Return the rows in which a peer is faster."""
    return [row for row in rows if row["ratio"] > 1 and row["peer"] != ALONE]


def required(rows: list[Row]) -> list[dict[str, Any]]:
    """Return for each requirement that has rows the greatest value, its case, the limit, and whether it is met."""
    found = []
    for what, fields, value_of, most in REQUIRED:
        chosen = [
            row
            for row in rows
            if all(row[key] in wanted if key == "bytes" else row[key] == wanted for key, wanted in fields.items())
        ]
        if chosen:
            worst = max(chosen, key=value_of)
            value = float(f"{value_of(worst):.4g}")
            collective = f"{worst['collective']} {worst['form']}".strip()
            case = f"{worst['place']}, {collective}, {size_text(worst['bytes'])}, {worst['peer']}"
            found.append({"what": what, "value": value, "limit": most, "met": value <= most, "greatest": case})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mpi", action="append", metavar="NAME=FOLDER", help="a peer; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few sizes, ranks and repeats, to check that it runs")
    parser.add_argument("--only", default="", help='only sets of ranks with this text, such as "mpi, 8 ranks"')
    parser.add_argument("--repeats", type=int, help="measurements of each case")
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help="numbers of ranks of one host")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    beside = [f"Open MPI={Path(sys.executable).parents[1]}"]
    peers = {name: Path(folder) for name, folder in (one.split("=", 1) for one in given.mpi or beside)}
    whole = not (given.quick or given.only or given.ranks)
    rows, ways, libraries, missing = [], [], {}, {}  # ways: rows whose peer is no other library
    begun = time.monotonic()
    for part, place, peer, run in runs(peers, given):
        title = f"{part}, {place}, {peer}"
        if given.only not in title:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = run(Path(folder) / "rows.json")
        except (AssertionError, OSError, RuntimeError, StopIteration, subprocess.SubprocessError) as error:
            missing[title] = str(error)
            print(f"{title}: not measured: {error}", flush=True)
            continue
        libraries[peer] = found["library"]
        for case in found["rows"]:
            case["seconds"] = {peer if name == "MPI" else name: each for name, each in case["seconds"].items()}
            for row in compared(case):
                chosen = ways if row["peer"] in WAYS else rows
                chosen.append({"part": part, "place": place} | row)
                print(text(chosen[-1]), flush=True)
    faster, requirements = ahead(rows), required(rows + ways)
    print(f"\nA peer is faster at {len(faster)} of {len(rows)} points.", *map(text, faster), sep="\n")
    print("\nRequirements:")
    for each in requirements:
        met = "met" if each["met"] else f"NOT MET ({each['greatest']})"
        print(f"  {each['what']:<78}{each['value']:8.3g}   at most {each['limit']:.3g}   {met}")
    print(*(f"not measured: {title}: {why}" for title, why in missing.items()), sep="\n")
    print(f"{time.monotonic() - begun:.0f} s")
    kept = {"libraries": libraries, "missing": missing, "requirements": requirements, "rows": rows, "ways": ways}
    if given.json or whole:
        keep("processes", kept, given.json or RESULTS / "processes.json")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
