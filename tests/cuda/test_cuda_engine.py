"""The CUDA engine without a GPU: on a fake driver, in random allowed orders, with faults (see cuda_runs.py)."""

import pytest
from budget import count
from fake_cuda import printed

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
def test_every_check(library, peers):
    """With any peer access, all bits are those of the host, no accesses are unordered, and every wait is needed.

    Failed calls raise and leak nothing, captured calls run again on other values, and threads run executables at once.
    Memory that its owner did not map for other devices is read by none of them.
    """
    repeats = {what: often for what, (often, _) in CHECKS.items()}
    if peers != "full":
        repeats["dropped"] = count(24, 2)  # there are five times as many waits
    checks = [f"{what}={often}" for what, often in repeats.items()]
    reported = dict(line.split() for line in printed("cuda_runs.py", library, peers, 1, *checks).splitlines())
    pairs = {"full": 12, "none": 0, "pairs": 4, "mesh": 12}[peers]
    assert int(reported.pop("devices")) == pairs
    assert reported.keys() == CHECKS.keys()
    for what, (_, least) in CHECKS.items():
        assert int(reported[what]) >= least, what


@pytest.mark.parametrize(("framework", "calls"), [("cupy", 60), ("torch", 42), ("jax", 6), ("commands", 8)])
def test_frameworks(library, framework, calls):
    """The public calls use the engine, and give the host's results. Later calls with torch run in compiled code.

    So do those of memory that other devices cannot read, where the driver copies. A version of JAX that has moved what
    the engine imports reduces arrays by its own operations. ``info`` makes no context.
    """
    assert printed("cuda_frameworks.py", library, framework) == f"{framework} {calls}\n"
