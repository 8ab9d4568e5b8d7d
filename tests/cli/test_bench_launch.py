"""Ranks that ``crossreduce bench --launch`` starts: their numbers, how they end, and that none remains."""

import os
import signal
import subprocess
import time
from contextlib import suppress

import pytest
from bench_launcher import LIMIT_S, launching


def gone(pid):
    """Return whether a process has ended and was reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# Launching: the ranks are small programs that write their pid to a file and then run the code of the test.
PROGRAM = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
here = pathlib.Path(sys.argv[1])
(here / f"{rank}.new").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']} {os.environ['MASTER_PORT']}")
(here / f"{rank}.new").rename(here / str(rank))
while len([x for x in here.iterdir() if x.name.isdigit()]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""


def launcher(tmp_path, code, count=3):
    command = launching(count, PROGRAM + code, str(tmp_path))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def launched(tmp_path, code, count=3):
    """Launch and wait; return the exit code, stdout, stderr and the ranks' pids. All ranks must have ended."""
    running = launcher(tmp_path, code, count)
    try:
        out, err = running.communicate(timeout=LIMIT_S)
    finally:
        left = ended(running, tmp_path)
    assert left == []
    assert len(pids_of(tmp_path)) == count
    return running.returncode, out, err, pids_of(tmp_path)


def ended(running, tmp_path):
    """Kill a launcher and its remaining ranks, and return the pids of these ranks."""
    left = [pid for pid in pids_of(tmp_path) if not gone(pid)]
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.communicate(timeout=30)
    return left


def pids_of(tmp_path):
    return [int(path.read_text().split()[0]) for path in tmp_path.iterdir() if path.name.isdigit()]


def test_ranks_get_their_numbers_and_rank_0_prints(tmp_path):
    """Each rank gets its number, the world size and the port; the launcher prints the output of rank 0 only."""
    code, out, err, pids = launched(tmp_path, "print('rank', rank, flush=True)")
    assert (code, out, err) == (0, "rank 0\n", "")
    assert len(set(pids)) == 3
    assert len({tuple((tmp_path / str(rank)).read_text().split()[1:]) for rank in range(3)}) == 1


@pytest.mark.parametrize(
    ("fault", "code", "shown", "how"),
    [
        ("sys.exit(7)", 7, "", "ended with exit code 7"),
        ("raise OSError('boom 17')", 1, "OSError: boom 17\n", "ended with exit code 1"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 1, "", "was killed by SIGKILL", marks=pytest.mark.system),
    ],
)
def test_a_failed_rank_terminates_all(tmp_path, fault, code, shown, how):
    """After one rank fails the others are terminated; its error is shown, with its signal or exit code."""
    found, _, err, _ = launched(tmp_path, f"if rank == 1: {fault}\ntime.sleep(3600)")
    assert found == code
    assert err.endswith(f"{shown}crossreduce: rank 1 {how}; the other ranks were terminated.\n")
    assert (err.count("\n") == 1) == (not shown)


@pytest.mark.system
def test_ranks_that_ignore_sigterm_are_killed(tmp_path):
    """A rank that ignores SIGTERM is killed after a timeout."""
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(here / f'ignoring{rank}').touch()\n"
    code, _, _, _ = launched(
        tmp_path,
        ignoring + "while rank == 0 and len(list(here.glob('ignoring*'))) < 3: time.sleep(0.01)\n"
        "sys.exit(3) if rank == 0 else time.sleep(3600)",
    )
    assert code == 3


@pytest.mark.parametrize("to", ["the launcher", pytest.param("the process group", marks=pytest.mark.system)])
def test_ctrl_c_leaves_no_rank(tmp_path, to):
    """After SIGINT the launcher ends, and all ranks have ended."""
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
