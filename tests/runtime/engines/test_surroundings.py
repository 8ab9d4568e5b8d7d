"""What surrounds the library in a process: interpreters, repeated imports, forks, little memory, junk in variables.

Each case runs in a process of its own, and must end in time, with the right sums or with an error that has a name: not
by a signal, with wrong sums, or after waiting for ever. The default set has a sample of the cases.
"""

import os

import pytest
from budget import SHARE, some
from kernel_cases import run_python

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="uses functions of Linux")

VARIABLES = (
    "CROSSREDUCE_CUDA", "CROSSREDUCE_DUMP_DIR", "CROSSREDUCE_EXACT", "CROSSREDUCE_HOST", "CROSSREDUCE_JAX_TIMEOUT",
    "CROSSREDUCE_KERNELS", "CROSSREDUCE_KEY", "CROSSREDUCE_METRICS", "CROSSREDUCE_NUM_THREADS", "CROSSREDUCE_NVTX",
    "CROSSREDUCE_PROGRESS_FD", "CROSSREDUCE_TRACE", "CROSSREDUCE_TRACE_BYTES", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES",
    "TMPDIR", "NVTX_INJECTION64_PATH", "HOME", "LC_ALL", "TZ",
)  # fmt: skip
JUNK = (
    "", " ", "0", "-1", "1", "abc", "1e9", "9" * 20, "1.5", "\udcff\udcfe", "é", "/dev/null/x", "/dev/null", "nan",
    "inf", "/proc/self/mem", "a" * 5000, "%s%n", "{}", "true", "0x10", "\uff11", "127.0.0.1", "::1", "../..",
    "numpy,avx2", "\n", "-",
)  # fmt: skip

# Functions of the programs below. ``ended`` runs a function in a forked child and returns how the child has ended.
BEGIN = """
import encodings.idna, os, resource, signal, sys, tempfile, traceback
import numpy as np
import crossreduce as cr, crossreduce.processes

def large():
    assert all((x == 3).all() for x in cr.all_reduce([np.full(1 << 21, 1, "f4"), np.full(1 << 21, 2, "f4")]))

def small():
    assert cr.all_reduce([np.float32(x) for x in (1, 2, 3)], "mean")[2] == 2

def exact():
    options = cr.CommunicationOptions(exact=True)
    assert cr.all_reduce([np.float32(x) for x in (1e8, 3, -1e8)], options=options)[0] == 3

def strategy():
    results = cr.MirroredStrategy(3).run(lambda: cr.get_replica_context().all_reduce("sum", np.ones(1000)))
    assert all((x == 3).all() for x in results)

def group():
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({name: text for name, text in defaults.items() if name not in os.environ})
    with crossreduce.processes.join(timeout_s=2) as ranks:
        assert (ranks.all_reduce(np.ones(100)) == 1).all()

def ended(*functions):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(30)
        os.chdir(tempfile.gettempdir())
        lines = []
        for function in functions:
            try:
                function()
                lines.append("right")
            except Exception as error:
                named = isinstance(error, (cr.ReductionError, MemoryError, ImportError)) or "can't start" in str(error)
                lines.append("named" if named else "".join(traceback.format_exception(error)).replace(chr(10), " | "))
        os.write(write, chr(10).join(lines).encode("utf-8", "replace")[:60000])
        os._exit(0)
    os.close(write)
    with open(read) as text:
        lines = text.read().splitlines()
    status = os.waitpid(child, 0)[1]
    return lines if status == 0 else [*lines, f"ended with {status}"]

def check(case, *functions):
    outcome = ended(*functions)
    if not {"right", "named"}.issuperset(outcome) or len(outcome) != len(functions):
        print(case, outcome)
"""


@pytest.mark.parametrize("first", ["", "import numpy"])
def test_a_subinterpreter_cannot_import_the_library(first):
    """In a subinterpreter, where NumPy and other libraries would wait for ever, the import raises an error."""
    code = f"""
{first}
try:
    import _interpreters as interpreters  # since Python 3.13
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string
for module in ("crossreduce", "crossreduce.torch", "crossreduce.processes"):
    try:
        print(str(run(interpreters.create(), "import " + module)).replace("\\n", " "))
    except RuntimeError as error:
        print(str(error).replace("\\n", " "))
import crossreduce
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    refused = done.stdout.splitlines()
    assert len(refused) == 3
    for text in refused:
        assert "BackendError" in text
        assert "cannot be imported in a subinterpreter" in text
        assert "main interpreter" in text


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_library_can_be_imported_again(name, request):
    """After its modules were removed from ``sys.modules``, as by in-process tests of plug-ins, it works again."""
    request.getfixturevalue(f"{name}_")
    code = """
import dataclasses, sys
import numpy as np
@dataclasses.dataclass
class Tree:
    leaf: object
for _ in range(3):
    import crossreduce as cr
    import NAME, crossreduce.NAME
    make = {"torch": lambda: torch.ones(3), "jax": lambda: jax.numpy.ones(3)}["NAME"]
    if "NAME" == "torch":
        import torch.distributed as dist
        dist.init_process_group("crossreduce", rank=0, world_size=1, store=dist.HashStore())
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
    for leaf in (make(), np.ones(3)):
        print(cr.all_reduce([Tree(leaf), Tree(leaf)], "mean")[1].leaf.tolist())
    for module in [name for name in sys.modules if name.partition(".")[0] == "crossreduce"]:
        del sys.modules[module]
""".replace("NAME", name)
    done = run_python(code)
    assert done.stdout.splitlines() == ["[1.0, 1.0, 1.0]"] * 6, done.stderr


def test_removed_modules_of_numpy_are_named():
    """If NumPy's modules were removed, NumPy cannot be loaded again: the error says so, not that NumPy is missing."""
    code = """
import sys
import numpy as np
import crossreduce as cr
arrays = [np.ones(3), np.ones(3)]
for module in [name for name in sys.modules if name.partition(".")[0] == "numpy"]:
    del sys.modules[module]
try:
    cr.all_reduce(arrays)
except cr.BackendError as error:
    print(error)
"""
    assert "before anything that removes modules from sys.modules" in run_python(code).stdout


@linux
def test_junk_in_variables():
    """With any value of any environment variable, calls return right sums, or raise errors of this library."""
    cases = some(some((name, text) for name in VARIABLES for text in JUNK))
    for first in range(0, len(cases), 50):
        code = f"""{BEGIN}
for name, text in {cases[first : first + 50]!r}:
    os.environ[name] = text
    check((name, text), small, large, exact, strategy, group)
    del os.environ[name]
"""
        done = run_python(code)
        assert (done.stdout, done.returncode) == ("", 0), done.stderr[-2000:]


@linux
def test_closed_standard_streams():
    """If the standard streams are closed, what is printed there changes no memory or connection of ranks."""
    code = f"""{BEGIN}
def printed():
    os.closerange(0, 3)
    with crossreduce.processes.join(0, 1, "127.0.0.1:0") as ranks:
        for stream in range(3):
            os.write(stream, bytes(10000))
        assert (ranks.all_reduce(np.ones(3)) == 1).all()

check("closed", printed)
"""
    done = run_python(code)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


@linux
@pytest.mark.parametrize("first", ["small", "large", "exact", "strategy", "group"])
def test_little_memory(first):
    """With little address space, or memory for data, left, calls return right sums, or raise errors: the process does
    not end, and waits for no thread that could not start."""
    code = f"""{BEGIN}
def limited(kind, left):
    name = "VmSize:" if kind == resource.RLIMIT_AS else "VmData:"
    with open("/proc/self/status") as lines:
        now = next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
    resource.setrlimit(kind, (now + left, now + left))

calls = (small, large, exact, strategy, group)
for call in calls:  # so that all modules are imported: other libraries cannot be imported without memory
    call()
for left in range(0, 64 << 20, {1 << 20 if SHARE == 1 else 32 << 20}):
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        check((kind, left, {first}), lambda: limited(kind, left), {first}, *calls)
"""
    done = run_python(code)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr[-2000:]


@linux
def test_a_connection_without_memory():
    """A rank that lacks memory for messages that it does not expect yet raises a MemoryError: no peer is blamed."""
    code = """
import ctypes, os, resource, socket, threading
from crossreduce import kernels
ends = socket.socketpair()
first, second = (kernels.native().Connections([1 - k], [end.fileno()], 120.0) for k, end in enumerate(ends))
data = (ctypes.c_char * (1 << 20))()
sent = [first.send(ctypes.addressof(data), 1 << 20, 1, tag) for tag in range(100)]
threading.Thread(target=lambda: sent[-1].wait(30), daemon=True).start()
expected = second.receive(ctypes.addressof(data), 8, 0, 1000)
with open("/proc/self/statm") as pages:
    now = int(pages.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (8 << 20),) * 2)
try:
    expected.wait(100)
except MemoryError:
    print("MemoryError", flush=True)
os._exit(0)
"""
    done = run_python(code)
    assert done.stdout == "MemoryError\n", done.stderr


@linux
def test_forks_at_any_time():
    """A child that is forked before, between and within calls reduces, and so does its parent afterwards."""
    code = (
        BEGIN
        + """
calls = (small, large, exact, strategy, group)
check("fork before the first call", *calls)
for call in calls:
    call()
    check(call, *calls)
    check((call, "twice"), lambda: check((call, "in a child"), *calls), *calls)

def within():
    def step():
        context = cr.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            check("within a step", small, large, exact)
        return context.all_reduce("sum", np.ones(3))
    assert [x.tolist() for x in cr.MirroredStrategy(2).run(step)] == [[2.0] * 3] * 2

within()
check("within", within)
with crossreduce.processes.join(0, 1, "127.0.0.1:0") as ranks:
    check("with a group", small, large, strategy, lambda: ranks.all_reduce(np.ones(3)))
    assert ranks.all_reduce(np.ones(3)).tolist() == [1.0] * 3
"""
    )
    done = run_python(code)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr[-2000:]
