"""Check and measure the CUDA engine in stages, each case in a process of its own, and print one table.

See ``gpu_first_run``. Stages: 0 unpack the wheels; 1 versions, and code that fits the devices; 2 kernels and calls; 3
order; 4 rates; 5 JAX; 6 kernels and grids; 7 memcheck; 8 ranks on the host's cores. The first red case of stages 0 to 3
ends the run. Each stage has a share of the time, to which the earlier ones add what they leave; stages 0 to 3 share
theirs, since the first import of a framework may be slow. Limits grow with the load of the machine, and a later case
may take half of the time that is left. A case is red if it fails (also for lack of JAX or CuPy, which does not end the
run), dies, or exceeds its limit; if the time of its stage is over first, it is left out; a target that is not met is
not red. The record of each case is written to ``results.jsonl`` at once, what it prints to a file of its own. With
``--driver fake`` the fake driver of the tests replaces CUDA's, and times mean nothing. This file uses the standard
library only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
SHARES = (15, 30, 40, 60, 75, 30, 20, 30, 45)  # seconds of each stage, 345 in all
CHECKED, TOGETHER = 3, 4  # stages up to this one end the run at a red case; so many of its cases run at once
CUDA = "/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"  # where compute-sanitizer may be
LEAST_S, KILL_S, LATE = 3, 5, "not finished after"  # the least time of a case; to await its end
TARGETS = {  # the least values, or, if negative, the greatest; of float32, 256 MiB per replica
    "sum 8 to 1, share of the copy rate": 0.92,
    "sum 8 to 8, share of the copy rate": 0.85,
    "sum 2 to 2, share of the copy rate": 0.8,
    "sum 16 to 16, share of the copy rate": 0.8,
    "sum 8 to 1, times as fast as torch stack().sum(0)": 2.4,
    "sum 8 to 8, times as fast as JAX jit": 1.2,
    "161 gradients, in a CUDA graph, share of the copy rate": 0.85,
    "161 gradients, out=, microseconds on the host": -150,
    "161 gradients, deterministic, kernels of a call": -1,
}


class Case(NamedTuple):
    """A command in this folder, its time limit, and variables of its environment."""

    stage: int
    name: str
    command: tuple[str, ...]
    limit_s: float = 60
    variables: dict[str, str] = {}  # noqa: RUF012 - never changed


def cases(is_fake: bool) -> list[Case]:
    """Return all cases in their order."""
    driver = ("--driver", "fake") if is_fake else ()

    def of(stage: int, *names: str, prefix: tuple[str, ...] = (), **more: Any) -> list[Case]:
        program = sys.executable, "gpu_rates.py" if stage in (4, 5, 6) else "gpu_checks.py"
        return [Case(stage, name, (*prefix, *program, name, *driver), **more) for name in names]

    def host(name: str, *command: str) -> Case:
        return Case(8, name, (sys.executable, *command, "--repeats", "2" if is_fake else "7", "--json", "JSON"))

    buffers = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"}
    buffers["CROSSREDUCE_CUDA_JIT"] = "1"  # the custom call, in programs of jit, too
    sanitizer = () if is_fake else ("compute-sanitizer", "--error-exitcode", "9", "--report-api-errors", "no")
    ranks, many = ("processes.py", "--quick", "--ranks"), ("2",) if is_fake else ("2", "4", "8", "16")
    return [
        *of(1, "versions", limit_s=100),
        *of(2, "kernels", "calls"),
        *of(3, "side stream", "reuse", "graph", "threads", "deterministic", "expandable segments"),
        *of(3, "dlpack from cupy", "dlpack from jax"),
        *of(4, "8 to 1", "8 to 8", "2 to 2", "16 to 16", "min and max", "gradients", limit_s=40),
        *of(5, "eager", "jit", variables=buffers),
        *of(6, "kernels and grids"),
        *of(7, "raw launches", limit_s=45, prefix=sanitizer),
        *(host(f"{name}, {n} ranks", *ranks, n, "--only", name) for n in reversed(many) for name in ("ddp", "torch")),
        *([host("MPI", *ranks, *many, "--only", "mpi")] if Path(sys.prefix, "bin", "mpiexec").exists() else []),
        host("host memory", "host_reduction.py", "--only", "one_small" if is_fake else "large"),
    ]


class Run:
    """The records of the cases. Each is kept, printed and written as soon as its case has ended."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.begin, self.scale = out, time.monotonic(), seconds / sum(SHARES)
        self.stopped = ""  # why no further case runs
        self.records: list[dict[str, Any]] = []
        self.site = tempfile.TemporaryDirectory(prefix="gpu_first_run_")  # of unpacked wheels
        self.environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
        for name, folder in ("PYTHONPATH", self.site.name), ("PATH", CUDA):
            self.environment[name] = os.pathsep.join(filter(None, (os.environ.get(name), folder)))
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "table.txt"):
            (out / name).write_text("")

    def write(self, name: str, text: str) -> None:
        """Append to a file of ``out``. The run goes on if that fails, as on a full disk."""
        with contextlib.suppress(OSError), (self.out / name).open("a") as file:
            file.write(text)

    def add(self, case: Case, result: str, why: str = "", **more: Any) -> None:
        """Keep a record. ``result``: ok, RED or "left out". A red case of the first stages ends the run."""
        record = {"stage": case.stage, "case": case.name, "result": result, "why": why, **more}
        self.records.append(record)
        self.write("results.jsonl", json.dumps(record) + "\n")
        if result == "RED" and case.stage <= CHECKED and not re.search("No module named '(jax|cupy)'", why):
            self.stopped = self.stopped or f"{case.name} is red"
        print(f"{time.monotonic() - self.begin:4.0f} s {line(record)}", flush=True)

    def do(self, case: Case) -> None:
        """Run a case, unless it lacks time."""
        crowd = min(4, os.getloadavg()[0] / len(os.sched_getaffinity(0)))  # processes that share a core
        begin, limit_s = time.monotonic(), case.limit_s * max(1, self.scale, crowd)
        left_s = self.scale * sum(SHARES[: max(CHECKED, case.stage) + 1]) - (begin - self.begin)
        limit_s = limit_s if case.stage <= CHECKED else max(limit_s, left_s / 2)
        if self.stopped or left_s < LEAST_S:
            self.add(case, "left out", self.stopped or "the time of the stage is used up")
        else:
            more: dict[str, Any] = {}
            try:
                why = self.child(case, min(limit_s, left_s), more) if case.command else self.unpack(more)
            except Exception as error:  # noqa: BLE001 - such as a full disk: the other cases run all the same
                why = f"{type(error).__name__}: {error}"
            is_cut = case.stage > CHECKED and left_s < limit_s and why.startswith(LATE)
            result = "ok" if not why else "left out" if is_cut else "RED"
            self.add(case, result, why, wall_s=round(time.monotonic() - begin, 2), **more)

    def unpack(self, more: dict[str, Any]) -> str:
        """Unpack this library's wheel, and those of packages that this interpreter lacks; like ``child``."""
        made, modules = [], {"markdown_it_py": "markdown_it"}
        sys.path.insert(0, self.site.name)
        for path in sorted((HERE.parent / "dist/gpu").glob("*.whl")):
            name, version = path.name.split("-")[:2]
            if name == "crossreduce" or importlib.util.find_spec(modules.get(name, name)) is None:
                shutil.unpack_archive(path, self.site.name, "zip")
                made.append(f"{name} {version}")
        more["note"] = ", ".join(made) or "dist/gpu has no wheel that is needed"
        is_there = importlib.util.find_spec("crossreduce") is not None
        return "" if is_there else "crossreduce is missing: run scripts/gpu_wheels where there is a network"

    def child(self, case: Case, limit_s: float, more: dict[str, Any]) -> str:
        """Run a case's process. Return why it is red, or an empty string; ``more`` gets the rest of its record."""
        log, kept = (self.out / f"{case.stage} {case.name}.{suffix}" for suffix in ("log", "json"))
        kept.unlink(missing_ok=True)
        command = [str(kept) if each == "JSON" else each for each in case.command]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=self.environment | case.variables, cwd=HERE, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        code, why = 0, ""
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            why = f"{LATE} {limit_s:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left running, too
        process.wait(KILL_S)
        results = json.loads(kept.read_text()) if kept.exists() else {}
        text, ratios = log.read_text(errors="replace"), {}
        for row in results.get("rows", ()):  # of processes.py
            ratios.setdefault(f"{row['place']}, {row['peer']}", []).append(row["ratio"])
        medians = (f"{place}: {statistics.median(each):.2f} of its time" for place, each in ratios.items())
        more |= {"rows": [], "measured": {}, "done": bool(results), "note": ", ".join(medians)}
        for record in re.findall(r"^{.*}$", text, re.MULTILINE):  # not a line that a killed process did not finish
            with contextlib.suppress(ValueError):
                said = json.loads(record)
                more["rows"] += [said.pop("row")] if "row" in said else []
                more["measured"] |= said.pop("measured", {})
                more |= said
        if code:
            why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = why or ("" if more["done"] else "it ended early, with exit code 0")
        if why:  # what processes.py did not measure, and the last line without indent, with what follows it
            last = re.split(r"\n(?=\S)", re.sub(r"^{.*}$", "", text, flags=re.MULTILINE).strip())[-1]
            why = "; ".join(filter(None, [why, *results.get("missing", {}).values(), last]))
        return why


def line(record: dict[str, Any]) -> str:
    """Return a row of the table."""
    text = " ".join((record["why"] or record.get("note", "")).split())
    return f"{record['stage']} {record['case']:31} {record['result']:8} {record.get('wall_s', 0):6.1f} s  {text[:190]}"


def table(run: Run, is_fake: bool) -> str:
    """Return the table of all cases and targets. Its last line begins with GREEN if nothing is red."""
    lines = ["", *(["FAKE DRIVER: its times mean nothing."] if is_fake else []), *map(line, run.records), ""]
    measured = {key: value for each in run.records for key, value in each.get("measured", {}).items()}
    for key, limit in TARGETS.items():
        value, text = measured.get(key), "not measured"
        if value is not None:
            verdict = "fake" if is_fake else "met" if value >= limit > 0 or value <= -limit else "NOT MET"
            text = f"{value:9.4g}  {verdict}"
        lines.append(f"{key:56} {'<>'[limit > 0]}= {abs(limit):<5g} {text}")
    results = [each["result"] for each in run.records]
    counts = ", ".join(f"{results.count(each)} {each}" for each in ("ok", "RED", "left out"))
    has_run = any(each["stage"] and each["result"] == "ok" for each in run.records)
    verdict = "RED" if "RED" in results or run.stopped else "GREEN" if has_run else "NOTHING RAN"
    return "\n".join([*lines, f"{verdict}: {counts}; {time.monotonic() - run.begin:.0f} s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the folder of the results")
    parser.add_argument("--driver", choices=("real", "fake"), default="real", help="fake: the tests' driver, no GPU")
    parser.add_argument("--only", default="", help="only the cases whose stage and name begin with this")
    parser.add_argument("--seconds", type=int, default=sum(SHARES), help="the time of all stages")
    given = parser.parse_args()
    is_fake = given.driver == "fake"
    names = {f"{case.stage} {case.name}": case for case in cases(is_fake)}
    chosen = [case for name, case in names.items() if name.startswith(given.only)]
    if not chosen:
        parser.error(f"argument --only: no case begins with {given.only!r}. There are: {', '.join(names)}")
    try:
        run = Run(given.out.absolute(), given.seconds)
    except OSError as error:
        parser.error(f"argument out: results cannot be written there: {error}")
    for each in signal.SIGINT, signal.SIGTERM:
        signal.signal(each, lambda *_: setattr(run, "stopped", "a signal came"))
    for stage in range(len(SHARES)):
        is_alone = stage not in (2, CHECKED) or any(each.get("exclusive") for each in run.records)
        with ThreadPoolExecutor(1 if is_alone else TOGETHER) as pool:
            list(pool.map(run.do, [case for case in (Case(0, "unpack", ()), *chosen) if case.stage == stage]))
    text = table(run, is_fake)
    run.write("table.txt", text + "\n")
    print(text)
    return int(not text.splitlines()[-1].startswith("GREEN"))


if __name__ == "__main__":
    sys.exit(main())
