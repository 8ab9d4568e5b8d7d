"""The CUDA engine without a GPU: on a fake driver, in random allowed orders, with faults (see cuda_runs.py)."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda_faults
import fake_cuda
import pytest
from paths import program, python_path

import crossreduce

PACKAGE = Path(crossreduce.__file__).parent  # with its compiled modules, where it is installed
PEERS = ("full", "pairs", "mesh", "none")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return the path of the fake driver."""
    return fake_cuda.built(fake_cuda.shared_folder(tmp_path_factory))


def ran(library, peers, what, count, seed=1, package=PACKAGE.parent):
    """Run a check in a process of its own; return the finished process."""
    command = [sys.executable, "-W", "ignore", str(program("cuda_runs.py")), str(library), peers, what]
    environment = os.environ | {"PYTHONPATH": python_path(package)}
    return subprocess.run(
        [*command, str(count), str(seed)], capture_output=True, text=True, check=False, env=environment, timeout=300
    )  # fmt: skip


def ran_with_all_peers(library, what, count):
    """Run a check with each matrix of peers, two at a time; return how much was checked each time."""
    with ThreadPoolExecutor(2) as pool:
        everything = list(pool.map(lambda peers: ran(library, peers, what, count), PEERS))
    for done in everything:
        assert done.returncode == 0, done.stderr[-3000:]
        assert not done.stderr, done.stderr[-3000:]
    return [int(done.stdout.removeprefix(what)) for done in everything]


def test_drawn_layouts(library):
    """All algorithms, devices, dtypes and ops: the bits of the host's kernels, and no two unordered accesses."""
    assert ran_with_all_peers(library, "draws", 98) == [98] * 4
    assert ran_with_all_peers(library, "many", 3) == [3] * 4
    assert ran_with_all_peers(library, "hosts", 6) == [6] * 4


def test_every_dropped_dependency_is_reported(library):
    """Nothing waits without need: without any one of the waits something is unordered."""
    assert min(ran_with_all_peers(library, "dropped", 12)) > 300


def test_failed_calls_of_the_driver(library):
    """The error names call and code, nothing that was queued is still running, nothing leaks, later runs are right."""
    assert min(ran_with_all_peers(library, "failures", 7)) > 50


def test_capture_in_a_graph(library):
    """A captured call runs again on other values; capturing makes no call that a capture forbids."""
    assert ran_with_all_peers(library, "captures", 24) == [24] * 4


def test_threads(library):
    """Threads run the same and other executables at once."""
    assert ran_with_all_peers(library, "threads", 20) == [80] * 4


@pytest.mark.timeout(600)  # about 90 s of CPU time
def test_faults_of_the_engine_are_found(library, tmp_path):
    """Each of the changes of its files in cuda_faults.py lets a check fail, for another reason than an invalid name."""
    objects = cuda_faults.compiled(sorted(cuda_faults.NATIVE.glob("*.cpp")), tmp_path)

    def outcome(number):
        fault = cuda_faults.FAULTS[number]
        package = cuda_faults.package(tmp_path / str(number), fault, objects)
        return ran(library, *fault.found_by, package=package)

    with ThreadPoolExecutor(2) as pool:
        numbers = cuda_faults.some_faults(range(len(cuda_faults.FAULTS)))
        for number, done in zip(numbers, pool.map(outcome, numbers), strict=True):
            fault = cuda_faults.FAULTS[number]
            assert done.returncode != 0, f"{fault} was not found"
            assert re.search(r"^(AssertionError|crossreduce.errors.DriverError)", done.stderr, re.M), (
                fault,
                done.stderr,
            )


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_frameworks(library, framework):
    """The public calls use the engine; later calls with torch tensors run in compiled code."""
    command = [sys.executable, "-W", "ignore", str(program("cuda_frameworks.py")), str(library), framework]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == {"cupy": "cupy 60\n", "torch": "torch 12\n"}[framework]
