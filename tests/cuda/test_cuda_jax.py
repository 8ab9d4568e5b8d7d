"""JAX arrays through the CUDA engine without a GPU: on a fake driver (see cuda_jax_runs.py and cuda_jax_xla.py)."""

import pytest
from fake_cuda import printed


def test_one_device(library):
    """Eager calls and programs of jit give the bits of the host engine, gradients and vmap those of the loop engine.

    Failed calls of the driver raise errors.
    """
    found = printed("cuda_jax_runs.py", library, "eager", "traced", "gradients", "errors").split()
    checked = dict(zip(found[::2], map(int, found[1::2]), strict=True))
    assert checked == {"eager": 12, "traced": 12, "gradients": 4, "errors": 8}


def test_executables_of_another_process(library, tmp_path):
    """Executables of another process raise an error until this process has made their plans. Then they run these plans.

    The first run of the program serializes them, the second loads them.
    """
    for _ in range(2):
        assert printed("cuda_jax_runs.py", library, f"serialized={tmp_path}") == "serialized 3\n"


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
    assert checked.items() <= {"bits": 14, "calls": 9, "left": 7}.items()
