"""Processes of ranks end cleanly under each launcher: they write nothing but their own errors."""

import re
import subprocess
import sys

import pytest
from torch_running import HERE, finish, start

PROGRAM = HERE / "torch_exits.py"
UNCLEAN = re.compile(r"Exception ignored|terminate called|Fatal Python|NoneType|leaked|resource_tracker")
STATUSES = {"exit": 7, "exception": 1, "one_fails": 1}  # for other endings 0


def status_of(ending):
    return STATUSES.get(ending.removesuffix("_over_hosts"), 0)


@pytest.mark.parametrize(
    "ending",
    ["kept", "exit", "exception", "one_fails", "pending", "one_fails_over_hosts", "exit_over_hosts", "during_gloo"],
)
def test_processes_that_a_launcher_starts(tmp_path, dump_directory, ending):
    """Ranks that are started as programs exit with the program's status, and write its errors and nothing else. At exit
    a global variable still refers to groups that were not destroyed."""
    outputs = finish(start([PROGRAM, "itself", ending, tmp_path / "store"], 2), 200)
    for rank, (status, text) in enumerate(outputs):
        assert status == status_of(ending), f"rank {rank}:\n{text}"
        assert not UNCLEAN.search(text), f"rank {rank}:\n{text}"
        tracebacks = re.findall(r"^\[rank\d\]: ([\w.]*Error): .*", text, re.M)
        if ending.startswith("one_fails") and rank == 1:
            assert tracebacks[-1] == "crossreduce.errors.PeerLostError", text
        else:
            assert tracebacks == ["ArithmeticError"] * (status == 1), f"rank {rank}:\n{text}"
        if status in (0, 7):
            assert text == "", f"rank {rank}:\n{text}"


@pytest.mark.parametrize(
    ("launcher", "ending"),
    [
        ("fork", "kept_over_hosts"),
        pytest.param("spawn", "one_fails", marks=pytest.mark.system),
        pytest.param("torchrun", "exit", marks=pytest.mark.system),
    ],
)
def test_launchers(tmp_path, dump_directory, launcher, ending):
    """Ranks that torch.multiprocessing or torchrun has started write nothing but their own errors when they end."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if launcher == "torchrun" else []
    command += [PROGRAM, "itself" if launcher == "torchrun" else launcher, ending, tmp_path / "store"]
    ((status, text),) = finish(start(command, 1), 90)
    assert (status != 0) == (status_of(ending) != 0), text
    assert not UNCLEAN.search(text), text
    if ending.startswith("kept"):
        assert text == ""


ENDS_LAST = """
import ctypes, sys
import crossreduce.ranks.communicator as module
from crossreduce.ranks.intra_host import shared_memory
from members import member
from ranks import SocketRendezvous, Store

for each in (module, shared_memory):  # as other libraries do: keep the modules alive, so that Python clears them
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
store = Store()
store.start()
kept = member(SocketRendezvous(store.path, 0, 1))
if sys.argv[1] == "closed":
    kept.close()
store.close()
module.kept = kept  # the group is released when most names of the module are None
del kept
"""


@pytest.mark.parametrize("state", ["open", "closed"])
def test_a_group_that_python_releases_last(state):
    """If a group still exists when Python clears its modules, it is released without any output."""
    command = [sys.executable, "-c", ENDS_LAST, state]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
