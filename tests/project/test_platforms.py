"""Other systems: without the functions of Linux, the package can be imported, and ranks raise an error that says why.

A new process imports the modules that the package needs, then removes what macOS or Windows lacks, and then imports the
package. So the modules of Python itself and of the frameworks are those of Linux; compiled modules are not loaded.
"""

import ast
import json
import subprocess
import sys

import frameworks
import pytest
from imports import FILES, name, tree
from test_invariants import PACKAGES

LINUX = {
    "os": ("sched_getaffinity", "sched_setaffinity", "memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "eventfd"),
    "socket": ("SO_PASSCRED", "SCM_CREDENTIALS", "MSG_CMSG_CLOEXEC", "TCP_KEEPIDLE"),
}
POSIX = {
    "os": ("fork", "register_at_fork", "getuid", "geteuid", "fchmod", "posix_fallocate", "sysconf", "uname", "killpg"),
    "socket": ("AF_UNIX", "SCM_RIGHTS", "MSG_DONTWAIT", "CMSG_SPACE", "CMSG_LEN"),
    "signal": ("SIGALRM", "SIGHUP", "setitimer", "ITIMER_REAL"),
}
MISSING = {
    "darwin": LINUX,
    "win32": {module: LINUX.get(module, ()) + names for module, names in POSIX.items()},
}
MODULES_OF_POSIX = ("fcntl", "grp", "pwd", "resource", "termios")
COMPILED = ("kernels._native", "frameworks._numpy_arrays", "engines.host._calls", "engines.cuda._cuda")

CHILD = """
import contextlib, ctypes, importlib, json, sys
given = json.loads(sys.argv[1])
for module in given["first"]:
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
for module, names in given["missing"].items():
    for name in names:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
sys.modules |= dict.fromkeys([*given["absent"], *given["blocked"]])  # an import of them fails from now on
sys.platform = given["platform"]

def refuse(*args, **options):
    raise AssertionError("a library was opened during the import")

def only_needs_a_framework(error):
    while error is not None:
        if isinstance(error, ImportError) and error.name and error.name.split(".")[0] in given["absent"]:
            return True
        error = error.__cause__
    return False

opened, ctypes.CDLL = ctypes.CDLL, refuse
imported, failed = [], {}
for module in given["modules"]:
    try:
        importlib.import_module(module)
        imported.append(module)
    except Exception as error:
        if not only_needs_a_framework(error):
            failed[module] = f"{type(error).__name__}: {error}"

def no_process(library=None, *args, **options):
    if library is None and sys.platform == "win32":
        raise TypeError("Windows has no handle of the process itself")
    return opened(library, *args, **options)

ctypes.CDLL = no_process
"""

LONELY = """
from types import SimpleNamespace
import crossreduce as cr
from crossreduce.ranks.communicator import Communicator
alone = SimpleNamespace(rank=0, size=1, owner=None, all_gather=lambda x: [x], publish_abort=lambda cause: cause)
try:
    Communicator(alone, None, name="world", timeout_s=5.0)
except cr.BackendError as error:
    print(error)
"""

TORCH = """
import torch.distributed as dist
import crossreduce as cr
try:
    dist.init_process_group("crossreduce", store=dist.HashStore(), rank=0, world_size=1)
except cr.BackendError as error:
    print(error)
"""

REST = """
import numpy as np
import crossreduce as cr
from crossreduce.cli import main
print(cr.all_reduce([np.arange(3.0)] * 3)[2], cr.Topology.discover().devices, cr.keep_memory(False) in (True, False))
for command in ("topology", "plan dgx-1v --devices 0,1,2"):
    try:
        main(command.split())
    except SystemExit as stopped:
        print("exit code", stopped.code)
"""


def top_level_imports(module):
    """Return the modules outside the package that a file imports when it is imported."""
    nodes = list(module.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            nodes += node.body


def run(platform, code, loaded=()):
    """Import the package on a platform, with some of the frameworks, then run code.

    Return the imported modules and the printed text. Modules that need another framework are left out. The test fails
    if any other module cannot be imported.
    """
    modules = [f"crossreduce.{name(path)}".removesuffix(".") for path in FILES if path.stem != "__main__"]
    absent = {"torchft", "vllm"}.union(*(PACKAGES[framework] for framework in set(PACKAGES) - {"numpy", *loaded}))
    first = {module for path in FILES for module in top_level_imports(tree(path))}
    given = {
        "platform": platform,
        "missing": MISSING[platform],
        "first": sorted(module for module in first if module.split(".")[0] not in {"crossreduce", "mpi4py", *absent}),
        "absent": sorted(absent),
        "blocked": [*(f"crossreduce.{each}" for each in COMPILED), *(MODULES_OF_POSIX if platform == "win32" else ())],
        "modules": modules,
    }
    command = [sys.executable, "-c", f"{CHILD}\n{code}\nprint(json.dumps([imported, failed]))", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *text, report = done.stdout.splitlines()
    imported, failed = json.loads(report)
    assert failed == {}
    return imported, "\n".join(text)


NEED_TORCH = pytest.mark.skipif("torch" not in frameworks.NAMES, reason="left out by CROSSREDUCE_TEST_FRAMEWORKS")


@pytest.mark.parametrize(("platform", "loaded"), [("win32", []), pytest.param("darwin", ["torch"], marks=NEED_TORCH)])
def test_the_package_without_the_functions_of_linux(platform, loaded):
    """Every module of the package that needs no absent framework can be imported, without opening a library. A group of
    ranks, also of torch, raises a BackendError that says that ranks need Linux. Reductions in one process, topologies
    and the command line work."""
    imported, text = run(platform, LONELY + (TORCH if loaded else "") + REST, loaded)
    needed = {"cli.doctor.command", "mpi", "ranks.communicator", "ranks.transports.tcp"}
    if loaded:
        needed |= {"torch", "torch.group", "ranks.transports.gloo"}
    assert {f"crossreduce.{each}" for each in needed} < set(imported)
    problem = "ranks share memory by memfd_create, which this system does not have."
    assert text.startswith(f"rank 0: {problem}\n  given: system {platform}\n")
    assert "try:   ranks on Linux" in text
    assert text.count(problem) == 1 + len(loaded)
    assert "\n[0. 3. 6.]" in text
    assert text.count("exit code 0") == 2
    assert "dgx-1v" in text
