"""JAX arrays through the CUDA engine without a GPU: on a fake driver."""

import pytest
from fake_cuda import printed


def test_one_device(library):
    """Eager calls and programs of jit give the bits of the host engine, gradients and vmap those of the loop engine.

    By default, XLA's own operations reduce in programs. Failed calls of the driver raise errors. Plans have the same
    numbers in each process, so that a program from JAX's cache on disk runs the right plan.
    """
    numbers = set()
    for jit, checks, calls in (
        ("1", ("bits", "eager", "programs", "gradients", "errors", "numbers=sum=mean=max"), 2),
        ("0", ("programs", "eager", "numbers=max=mean=sum"), 0),
    ):
        text = printed("cuda_jax_runs.py", library, *checks, CROSSREDUCE_CUDA_JIT=jit, PYTHONHASHSEED=jit)
        first, *lines = text.splitlines()
        assert first == f"calls in programs: {calls}"
        assert len({line.split()[1] for line in lines}) == 3
        numbers.add(frozenset(lines))
    assert len(numbers) == 1


def test_tests_on_a_gpu_fail_without_the_engine(library):
    """The tests of test_gpu.py pass with the engine. They fail without the compiled module, or the custom call."""
    outcomes = {
        "with the engine": "passes",
        "without the call": "the kernels of the CUDA engine did not run",
        "without the module": "the compiled module of the CUDA engine is missing",
    }
    text = "".join(f"{what}: {outcome}\n" * 2 for what, outcome in outcomes.items())
    assert printed("cuda_gpu_tests.py", library) == text


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("peers", "checks"),
    [
        ("full", "calls left"),
        ("none", "bits failures"),
        pytest.param("full", "bits failures", marks=pytest.mark.slow),
        pytest.param("pairs", "bits", marks=pytest.mark.slow),
        pytest.param("mesh", "bits", marks=pytest.mark.slow),
    ],
)
def test_several_devices(library, peers, checks):
    """All dtypes, ops, algorithms and destinations give the bits of the host engine. No accesses are unordered.

    Failed calls of the driver raise a ``DriverError``. What the engine cannot reduce is left to the loop engine.
    """
    found = printed("cuda_jax_devices.py", library, peers, *checks.split()).split()
    checked = dict(zip(found[::2], map(int, found[1::2]), strict=True))
    assert checked.pop("failures", 2) >= 2
    assert checked.items() <= {"bits": 14, "calls": 8, "left": 7}.items()
