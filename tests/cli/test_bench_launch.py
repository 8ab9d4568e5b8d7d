"""Ranks that ``crossreduce bench --launch`` starts: their numbers, how they end, and that none remains."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from command_line import forked

from crossreduce.cli.bench.launch import launch

# The ranks are small programs that write their pid to a file and then run the code of the test.
PROGRAM = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
here = pathlib.Path(sys.argv[1])
(here / f"{rank}.new").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']} {os.environ['MASTER_PORT']}")
(here / f"{rank}.new").rename(here / str(rank))
while len([x for x in here.iterdir() if x.name.isdigit()]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""


def three(args):
    """Launch three ranks, in a process group of their own."""
    os.setsid()
    sys.exit(launch([sys.executable, "-c", *args], 3))


def files_of(tmp_path):
    """Return what the ranks wrote: the pid, the number of ranks, and the port."""
    return [path.read_text().split() for path in tmp_path.iterdir() if path.name.isdigit()]


def launched(tmp_path, code, **options):
    """Return how the launcher of three ranks ended. All ranks must have ended."""
    ran = forked(three, PROGRAM + code, tmp_path, **options)
    pids = {int(pid) for pid, *_ in files_of(tmp_path)}
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (len(pids), left) == (3, [])
    return ran


def test_ranks_get_their_numbers_and_rank_0_prints(tmp_path):
    """Each rank gets its number, the world size and the port; the launcher prints the output of rank 0 only."""
    ran = launched(tmp_path, "print('rank', rank, flush=True)")
    assert (ran.code, ran.out, ran.error) == (0, "rank 0\n", "")
    assert len({(size, port) for _, size, port in files_of(tmp_path)}) == 1


@pytest.mark.parametrize(
    ("fault", "code", "shown", "how"),
    [
        ("sys.exit(7)", 7, "", "ended with exit code 7"),
        ("raise OSError('boom 17')", 1, "OSError: boom 17\n", "ended with exit code 1"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 1, "", "was killed by SIGKILL", marks=pytest.mark.system),
    ],
)
def test_a_failed_rank_terminates_all(tmp_path, fault, code, shown, how):
    """After one rank fails, the others are terminated. Its output is shown, and then its signal or exit code."""
    ran = launched(tmp_path, f"if rank == 1: {fault}\ntime.sleep(3600)")
    assert ran.code == code
    assert ran.error.endswith(f"{shown}crossreduce: rank 1 {how}; the other ranks were terminated.\n")
    if not shown:
        assert ran.error.count("\n") == 1


@pytest.mark.system
def test_ranks_that_ignore_sigterm_are_killed(tmp_path):
    """A rank that ignores SIGTERM is killed after a timeout."""
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(here / f'ignoring{rank}').touch()\n"
    waiting = "while rank == 0 and len(list(here.glob('ignoring*'))) < 3: time.sleep(0.01)\n"
    assert launched(tmp_path, ignoring + waiting + "sys.exit(3) if rank == 0 else time.sleep(3600)").code == 3


@pytest.mark.parametrize("to", ["the launcher", pytest.param("the process group", marks=pytest.mark.system)])
def test_ctrl_c_leaves_no_rank(tmp_path, to):
    """After SIGINT the launcher ends, and all ranks have ended."""

    def interrupt(pid):
        deadline = time.monotonic() + 120
        while len(files_of(tmp_path)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (os.kill if to == "the launcher" else os.killpg)(pid, signal.SIGINT)

    assert launched(tmp_path, "time.sleep(3600)", begun=interrupt).code != 0
