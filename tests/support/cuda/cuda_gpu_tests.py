"""Run tests of test_gpu.py without a GPU: on the fake driver, with arrays in host memory that count as cuda:0's.

They run with the engine, without JAX's consent to the custom call, and without the compiled module. Prints the outcome
of each: a passing test, or its error. Run as a program: python cuda_gpu_tests.py LIBRARY torch|jax
"""

import sys
from contextlib import contextmanager
from functools import partial
from unittest import mock

import frameworks
from fake_cuda import FakeDriver
from paths import ROOT

from crossreduce import values
from crossreduce.engines.cuda import driver
from crossreduce.reduction import pipeline

sys.path.insert(0, str(ROOT / "tests/cuda"))
import test_gpu

TESTS = (test_gpu.test_every_contribution_is_added_once_on_gpu, test_gpu.test_every_dtype_on_gpu)


@contextmanager
def torch_on(library):
    """Let all tensors be on cuda:0."""
    from fake_cuda_torch import install

    fake, gpu = FakeDriver(library, 1), frameworks.Torch()
    memory = install(fake)
    assert fake.lib.fake_own(1 << 12, (1 << 47) - (1 << 13), 0) == 0  # all memory of this process
    array, to_numpy = gpu.array, gpu.to_numpy
    gpu.array = lambda x, k=0: memory.put(array(x), 0)
    gpu.device_of = lambda x: f"cuda:{memory.device(x)}"
    gpu.to_numpy = lambda x: fake.run() or to_numpy(x)
    yield gpu, fake


@contextmanager
def jax_on(library):
    """Let JAX's first CPU device be cuda:0."""
    from cuda_jax_runs import DEVICES, gpus

    with mock.patch.object(frameworks, "DEVICES", DEVICES):
        gpu = frameworks.Jax()
    gpu.devices = gpu.devices[:1]
    gpu.device_of = lambda x: "gpu:0" if x.devices() == {*gpu.devices} else "elsewhere"
    located = partial(mock.patch.object, attribute="locate", new=lambda _: "cuda:0")
    with gpus(library) as machine, located(values), located(pipeline):
        yield gpu, machine.fake


def show(what, gpu):
    """Print the outcome of each test."""
    for test in TESTS:
        outcome = "passes"
        try:
            test(gpu)
        except AssertionError as error:
            outcome = str(error).splitlines()[0]
        print(f"{what}: {outcome}")


def main(library, framework):
    """Run the tests with and without the engine."""
    with {"torch": torch_on, "jax": jax_on}[framework](library) as (gpu, fake):
        show("with the engine", gpu)
        if framework == "jax":
            from crossreduce.engines.cuda import jax as cuda_jax

            gpu.jax.clear_caches()
            with mock.patch.object(cuda_jax, "_register", return_value=False):
                show("without the call", gpu)
        with mock.patch.object(driver, "native", return_value=None):
            show("without the module", gpu)
        assert not fake.report(), fake.report()[:3]


if __name__ == "__main__":
    main(*sys.argv[1:])
