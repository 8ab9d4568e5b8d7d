"""Where the checkout and the programs of the tests are."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests/support"
NATIVE = SUPPORT / "native"
# Each folder with modules of the tests, in the order of sys.path. pyproject.toml has the same list for pytest.
FOLDERS = [
    SUPPORT,
    *(SUPPORT / name for name in ("runtime", "planner", "planner_oracles", "cuda", "ranks", "torch_ranks")),
]

# Tests of ranks, which share memory on Linux only, and of libraries that are compiled as on Linux.
LINUX_ONLY = [
    "ranks",
    "cuda",
    *(f"cli/test_{part}.py" for part in ("bench_launch", "cli_bench_ranks", "cli_doctor", "cli_top")),
    *(f"project/test_{part}.py" for part in ("docs", "examples")),
    "planner/export/test_report_browser.py",
    "planner/topology/test_discover.py",
    "runtime/engines/test_nccl.py",
]


def program(name):
    """Return the path of a Python file in one of ``FOLDERS``."""
    (path,) = (folder / name for folder in FOLDERS if (folder / name).exists())
    return path


def python_path(*first):
    """Return a PYTHONPATH of the given folders and ``FOLDERS``."""
    return os.pathsep.join(str(folder) for folder in (*first, *FOLDERS))
