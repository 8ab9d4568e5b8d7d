"""Run tests of test_gpu.py with JAX, without a GPU: on the fake driver, with host memory that counts as cuda:0's.

They run with the engine, without JAX's consent to the custom call, and without the compiled module. Prints the outcome
of each: a passing test, or its error. Run as a program: python cuda_gpu_tests.py LIBRARY
"""

import sys
from unittest import mock

import frameworks
from cuda_jax_runs import DEVICES, gpus
from paths import ROOT

from crossreduce import values
from crossreduce.engines.cuda import driver
from crossreduce.engines.cuda import jax as cuda_jax
from crossreduce.reduction import pipeline

sys.path.insert(0, str(ROOT / "tests/cuda"))
import test_gpu

TESTS = (test_gpu.test_every_contribution_is_added_once_on_gpu, test_gpu.test_every_dtype_on_gpu)


def show(what, gpu):
    """Print the outcome of each test."""
    for test in TESTS:
        outcome = "passes"
        try:
            test(gpu)
        except AssertionError as error:
            outcome = str(error).splitlines()[0]
        print(f"{what}: {outcome}")


def on_cuda(module):
    """Let all arrays be on cuda:0."""
    return mock.patch.object(module, "locate", return_value="cuda:0")


if __name__ == "__main__":
    with mock.patch.object(frameworks, "DEVICES", DEVICES):
        gpu = frameworks.Jax()
    gpu.devices = gpu.devices[:1]
    gpu.device_of = lambda x: "gpu:0" if x.devices() == {*gpu.devices} else "elsewhere"
    with gpus(sys.argv[1]) as machine, on_cuda(values), on_cuda(pipeline):
        show("with the engine", gpu)
        gpu.jax.clear_caches()
        with mock.patch.object(cuda_jax, "_register", return_value=False):
            show("without the call", gpu)
        with mock.patch.object(driver, "native", return_value=None):
            show("without the module", gpu)
        assert not machine.fake.report(), machine.fake.report()[:3]
