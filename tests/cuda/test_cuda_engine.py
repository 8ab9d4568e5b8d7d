"""The CUDA engine without a GPU: on a fake driver, in random allowed orders, with faults (see cuda_runs.py)."""

import pytest
from budget import count
from fake_cuda import printed

# For each check of cuda_runs.py, how often it repeats. 49 draws have all combinations of algorithms and devices.
REPEATS = {"private": 3, "many": 3, "hosts": 6, "draws": count(98, 49), "dropped": count(24, 6)}
REPEATS |= {"failures": count(7, 2), "captures": count(24), "threads": count(20)}
LEAST = {"dropped": count(150), "failures": count(25)}  # that they must report


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "peers", ["full", "none", *(pytest.param(x, marks=pytest.mark.slow) for x in ("pairs", "mesh"))]
)
def test_every_check(peers):
    """With any peer access, all bits are those of the host, no accesses are unordered, and every wait is needed.

    Failed calls raise and leak nothing, captured calls run again on other values, and no other device reads memory that
    its owner did not map for it.
    """
    # Without peer access there are five times as many waits.
    repeats = REPEATS if peers == "full" else REPEATS | {"dropped": count(24, 2)}
    checks = [f"{what}={often}" for what, often in repeats.items()]
    reported = dict(line.split() for line in printed("cuda_runs.py", peers, 1, *checks).splitlines())
    assert int(reported.pop("devices")) == {"full": 12, "none": 0, "pairs": 4, "mesh": 12}[peers]
    assert reported.keys() == REPEATS.keys()
    for what, least in LEAST.items():
        assert int(reported[what]) >= least, what


@pytest.mark.parametrize("framework", ["cupy", "torch", "jax", "commands"])
def test_frameworks(framework):
    """The public calls use the engine, and give the host's results. Later calls with torch run in compiled code.

    So do those of memory that other devices cannot read, where the driver copies. A version of JAX that has moved what
    the engine imports reduces arrays by its own operations. ``info`` makes no context.
    """
    assert printed("cuda_frameworks.py", framework) == f"{framework} done\n"


def test_jax_on_one_device():
    """Eager calls and programs of jit give the bits of the host engine, gradients and vmap those of the loop engine.

    By default, XLA's own operations reduce in programs. Failed calls of the driver raise errors. Plans have the same
    numbers in each process, so that a program from JAX's cache on disk runs the right plan. The tests of test_gpu.py
    pass with the engine, and fail without the compiled module, or the custom call.
    """
    numbers = set()
    for jit, checks, calls in (
        ("1", ("bits", "eager", "programs", "gradients", "errors", "numbers=sum=mean=max", "tests"), 2),
        ("0", ("programs", "eager", "numbers=max=mean=sum"), 0),
    ):
        text = printed("cuda_jax_runs.py", *checks, CROSSREDUCE_CUDA_JIT=jit, PYTHONHASHSEED=jit)
        first, *lines = text.splitlines()
        assert first == f"calls in programs: {calls}"
        assert len({line.split()[1] for line in lines}) == 3
        numbers.add(frozenset(lines))
    assert len(numbers) == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("peers", "checks"),
    [
        ("full", "calls left"),
        ("none", "bits failures"),
        *(pytest.param(each, "bits failures", marks=pytest.mark.slow) for each in ("full", "pairs", "mesh")),
    ],
)
def test_jax_on_several_devices(peers, checks):
    """All dtypes, ops, algorithms and destinations give the bits of the host engine. No accesses are unordered.

    Failed calls of the driver raise a ``DriverError``. What the engine cannot reduce is left to the loop engine.
    """
    checked = dict(each.split() for each in printed("cuda_jax_devices.py", peers, *checks.split()).splitlines())
    assert list(checked) == checks.split()
    assert int(checked.get("failures", 2)) >= 2
