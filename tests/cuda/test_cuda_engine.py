"""The CUDA engine without a GPU: on a fake driver, in random allowed orders, with faults (see cuda_runs.py)."""

import json
import os
import subprocess
import sys

import pytest
from budget import count
from fake_cuda import printed
from paths import ROOT

# For each check of cuda_runs.py, how often it repeats, and the least number that it must report. 49 draws have all
# combinations of algorithms and devices.
CHECKS = {
    "private": (3, 3),
    "many": (3, 3),
    "hosts": (6, 6),
    "draws": (count(98, 49), count(98, 49)),
    "dropped": (count(24, 6), count(150)),
    "failures": (count(7, 2), count(25)),
    "captures": (count(24), count(24)),
    "threads": (count(20), 4 * count(20)),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "peers", ["full", "none", *(pytest.param(x, marks=pytest.mark.slow) for x in ("pairs", "mesh"))]
)
def test_every_check(peers):
    """With any peer access, all bits are those of the host, no accesses are unordered, and every wait is needed.

    Failed calls raise and leak nothing, captured calls run again on other values, and threads run executables at once.
    Memory that its owner did not map for other devices is read by none of them.
    """
    repeats = {what: often for what, (often, _) in CHECKS.items()}
    if peers != "full":  # without peers there are five times as many waits, with some peers half as many
        repeats["dropped"] = count(24, 2) if peers == "none" else count(60)
    checks = [f"{what}={often}" for what, often in repeats.items()]
    reported = dict(line.split() for line in printed("cuda_runs.py", peers, 1, *checks).splitlines())
    pairs = {"full": 12, "none": 0, "pairs": 4, "mesh": 12}[peers]
    assert int(reported.pop("devices")) == pairs
    assert reported.keys() == CHECKS.keys()
    for what, (_, least) in CHECKS.items():
        assert int(reported[what]) >= least, what


@pytest.mark.parametrize(("framework", "calls"), [("cupy", 60), ("torch", 42), ("jax", 6), ("commands", 8)])
def test_frameworks(framework, calls):
    """The public calls use the engine, and give the host's results. Later calls with torch run in compiled code.

    So do those of memory that other devices cannot read, where the driver copies. A version of JAX that has moved what
    the engine imports reduces arrays by its own operations. ``info`` makes no context.
    """
    assert printed("cuda_frameworks.py", framework) == f"{framework} {calls}\n"


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
        pytest.param("full", "bits failures", marks=pytest.mark.slow),
        pytest.param("pairs", "bits", marks=pytest.mark.slow),
        pytest.param("mesh", "bits", marks=pytest.mark.slow),
    ],
)
def test_jax_on_several_devices(peers, checks):
    """All dtypes, ops, algorithms and destinations give the bits of the host engine. No accesses are unordered.

    Failed calls of the driver raise a ``DriverError``. What the engine cannot reduce is left to the loop engine.
    """
    found = printed("cuda_jax_devices.py", peers, *checks.split()).split()
    checked = dict(zip(found[::2], map(int, found[1::2]), strict=True))
    assert checked.pop("failures", 2) >= 2
    assert checked.items() <= {"bits": 14, "calls": 8, "left": 7}.items()


@pytest.mark.parametrize(
    ("only", "seconds", "setting", "outcomes"),
    [
        ("2 ", 400, "1", [("ok", ""), ("ok", "")]),  # all kernels, and calls with torch that are drawn
        ("2 kernels", 400, "0", [("RED", "exit code 1; AssertionError: CROSSREDUCE_CUDA is 0")]),
        ("8 ddp", 10, "1", [("left out", "not finished after")]),  # its limit is longer than the time that is left
    ],
)
def test_the_first_run_on_a_gpu(tmp_path, only, seconds, setting, outcomes):
    """The command for the first run on a GPU runs its cases, on the fake driver. Each red case has its reason."""
    options = [tmp_path, "--driver", "fake", "--only", only, "--seconds", str(seconds), "--wheels", tmp_path]
    given = os.environ | {"PYTHON": sys.executable, "CROSSREDUCE_CUDA": setting}
    done = subprocess.run(["bash", ROOT / "benchmarks/gpu_first_run", *options], timeout=450, check=False, env=given)
    _, *records = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert [each["result"] for each in records] == [result for result, _ in outcomes]
    assert all(each["why"].startswith(why) for each, (_, why) in zip(records, outcomes, strict=True))
    assert done.returncode == ("RED" in dict(outcomes))
