"""The CUDA engine without a GPU: on a fake driver, in random allowed orders, with faults (see cuda_runs.py)."""

import pytest
from budget import count
from fake_cuda import printed

# A check of cuda_runs.py, how much of it the full budget runs, and how much it then reports at least.
CHECKS = [("draws", 98, 98), ("dropped", 12, 300), ("failures", 7, 50), ("captures", 24, 24), ("threads", 20, 80)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "peers", ["full", "none", *(pytest.param(x, marks=pytest.mark.slow) for x in ("pairs", "mesh"))]
)
def test_every_check(library, peers):
    """With any peer access all bits are the host's, every wait is needed, failed calls raise and leak nothing, captured
    calls run again on other values, and threads run executables at once.

    No two accesses are unordered; without any one of the waits, some are.
    """
    checks = ["many=3", "hosts=6", *(f"{what}={count(full, 2)}" for what, full, _ in CHECKS)]
    reported = dict(line.split() for line in printed("cuda_runs.py", library, peers, 1, *checks).splitlines())
    assert reported.keys() == {each.split("=")[0] for each in checks}
    for what, full, least in CHECKS:
        assert int(reported[what]) >= least * count(full, 2) / full / 2, what


@pytest.mark.parametrize(("framework", "count"), [("cupy", 60), ("torch", 12)])
def test_frameworks(library, framework, count):
    """The public calls use the engine; later calls with torch tensors run in compiled code."""
    assert printed("cuda_frameworks.py", library, framework) == f"{framework} {count}\n"
