"""JAX arrays through the CUDA engine without a GPU: on a fake driver (see cuda_jax_runs.py and cuda_jax_xla.py)."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_cuda
import paths as files
import pytest

import crossreduce

PACKAGE = Path(crossreduce.__file__).parent  # with its compiled modules, where it is installed


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return the path of the fake driver."""
    return fake_cuda.built(fake_cuda.shared_folder(tmp_path_factory))


def ran(library, *arguments, program="cuda_jax_runs.py"):
    """Run a check in a process of its own; return what it printed."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(files.program(program)),
        str(library),
        *map(str, arguments),
    ]
    paths = {"PYTHONPATH": files.python_path(PACKAGE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | paths, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_eager_calls(library):
    """All dtypes and ops: the bits of the host engine; results are independent and stay on their device."""
    assert ran(library, "eager") == "eager 159\n"


def test_programs_of_jit(library):
    """The same bits in one custom call; programs for several devices and exported ones are as without the engine."""
    assert ran(library, "traced") == "traced 112\n"


def test_derivatives_and_vmap(library):
    """Gradients, tangents, second derivatives, transposes and vmap are those of the loop engine."""
    assert ran(library, "gradients") == "gradients 20\n"


def test_errors(library):
    """Failed calls of the driver and unknown plans raise errors that name them; later calls are right."""
    assert ran(library, "errors") == "errors 8\n"


def test_capture_in_a_graph(library):
    """A captured call runs again on other values, as XLA's command buffers require."""
    assert ran(library, "graphs") == "graphs 8\n"


def test_executables_of_another_process(library, tmp_path):
    """They raise an error until their plans are made here, and then run these, in whatever order they were made."""
    assert [ran(library, "serialized", tmp_path) for _ in range(2)] == ["serialized 5\n"] * 2


def on_devices(library, *arguments):
    return ran(library, *arguments, program="cuda_jax_devices.py")


def test_several_devices(library):
    """All dtypes, ops, algorithms and destinations, with any peer access: the bits of the host engine, in order."""
    with ThreadPoolExecutor(2) as pool:
        for printed in pool.map(lambda peers: on_devices(library, peers, "bits"), ("full", "pairs", "mesh", "none")):
            assert printed == "bits 80\n"


def test_other_calls_on_several_devices(library):
    """Broadcasts, topologies, arrays on the host or elsewhere; what the engine cannot do is left to the loop."""
    assert on_devices(library, "full", "calls") == "calls 19\n"
    assert on_devices(library, "full", "left") == "left 12\n"


def test_order_on_several_devices(library):
    """Every wait is needed: without it something is unordered. Threads may reduce over the same devices at once."""
    assert on_devices(library, "full", "dropped") == on_devices(library, "none", "dropped") == "dropped 23\n"
    assert on_devices(library, "mesh", "threads") == "threads 24\n"


def test_failures_on_several_devices(library):
    """Failed calls of the driver raise a ``DriverError``; nothing is unordered, and later calls are right."""
    for peers in ("full", "none"):
        assert int(on_devices(library, peers, "failures").removeprefix("failures ")) > 40
