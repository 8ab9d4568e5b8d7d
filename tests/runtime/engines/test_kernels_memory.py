"""The memory of results: its pool, how long and how much the pool keeps, and the memory that the system has left."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernel_cases import run_python
from paths import NATIVE as NATIVE_SOURCES

from crossreduce import kernels
from crossreduce.errors import ArgumentError
from crossreduce.kernels import reference

NATIVE = kernels.native()
MIB = 1 << 20
UNLIMITED = 1 << 62
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def pooled():
    return kernels.memory_usage()["pooled"]


def address(memory):
    return np.frombuffer(memory, np.uint8).ctypes.data if len(memory) else 0


@pytest.mark.parametrize("allocate", [kernels.memory, reference.memory], ids=["kernels", "reference"])
def test_memory_is_aligned_and_writable(allocate):
    """Memory has the requested size, starts at a cache line, and is shared with no other memory."""
    for nbytes in (0, 1, 63, 64, 65, 1000, 4096, (1 << 21) - 1, 1 << 21, (1 << 22) + 5):
        blocks = [allocate(nbytes) for _ in range(3)]
        for k, memory in enumerate(blocks):
            view = memoryview(memory)
            assert (view.nbytes, view.readonly, len(memory)) == (nbytes, False, nbytes)
            assert address(memory) % 64 == 0
            np.frombuffer(memory, np.uint8)[:] = k
        for k, memory in enumerate(blocks):
            assert bytes(memory) == bytes([k]) * nbytes


def test_memory_of_an_invalid_size_is_refused():
    """A size that is negative, too large for the system or not an integer raises, and the usage does not change."""
    before = kernels.memory_usage()["live"]
    integer = "cannot be interpreted as an integer"
    for size, error, text in (
        (-1, ValueError, "must not be negative"), ("1", TypeError, integer), (1.5, TypeError, integer),
        (None, TypeError, integer), (1 << 62, MemoryError, ""), (1 << 70, OverflowError, "too large"),
    ):  # fmt: skip
        with pytest.raises(error, match=text or None):
            kernels.memory(size)
    assert kernels.memory_usage()["live"] == before


def test_freed_memory_is_reused(empty_pool):
    """The next request of the same size receives the memory that was freed last. A request of another size does not.
    Memory in use is kept, also by ``empty_cache``, which frees all pooled memory."""
    array = np.frombuffer(kernels.memory(123_457), np.uint8)
    array[:] = 3
    blocks = [kernels.memory(123_457) for _ in range(4)]
    assert array.ctypes.data not in map(address, blocks)
    before = kernels.memory_usage()
    while blocks:
        freed = address(blocks[-1])
        del blocks[-1]
        assert kernels.memory_usage()["pooled"] > before["pooled"]
        assert address(kernels.memory(123_456)) != freed
        again = kernels.memory(123_457)
        assert address(again) == freed
        del again
    kernels.empty_cache()
    assert kernels.memory_usage()["pooled"] == 0
    assert (array == 3).all()


def printed(code):
    """Run a program in a new process, which must succeed and write no errors, and return the words that it prints."""
    done = run_python(BEGIN + code)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


BEGIN = """
import os, signal, sys, threading, time, warnings
from crossreduce import kernels
warnings.simplefilter("ignore")  # Python 3.12 warns if a process with threads forks
MIB = 1 << 20

def resident():
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * os.sysconf("SC_PAGESIZE") // MIB

def threads():
    return len(os.listdir("/proc/self/task"))

def use(sizes):
    blocks = [kernels.memory(nbytes) for nbytes in sizes]
    for block in blocks:
        memoryview(block)[::4096] = bytes(len(memoryview(block)[::4096]))

def until(condition):
    stop = time.monotonic() + 60
    while not condition() and time.monotonic() < stop:
        time.sleep(0.05)
    assert condition()
"""
ALONE = "ALONE = threads()\n"  # a sanitizer may have threads of its own


ALLOCATE = """
import random
import numpy as np

random.seed(0)
live, peak = [], 0
for _ in range(4000):
    action = random.random()
    if action < 0.45 or not live:
        live.append(kernels.memory(random.choice([0, 1, 64, 1000, 1000, 5000, 70_000, 3_000_000])))
    elif action < 0.9:
        live.pop(random.randrange(len(live)))
    elif action < 0.98:
        del live[random.randrange(len(live)) :]
    else:
        kernels.empty_cache()
    usage, total = kernels.memory_usage(), sum(map(len, live))
    peak = max(peak, total)
    assert (usage["live"], usage["peak"]) == (total, peak), (usage, total, peak)
    assert usage["live"] + usage["pooled"] <= usage["peak"], usage
    starts = sorted((np.frombuffer(x, np.uint8).ctypes.data, len(x)) for x in live if len(x))
    assert all(a + n <= b for (a, n), (b, _) in zip(starts, starts[1:]))
"""


def test_pooled_memory_and_memory_in_use_never_exceed_the_peak():
    """The library never holds more memory than was once in use, and no two blocks overlap."""
    assert printed(ALLOCATE) == []  # in a new process, whose peak is that of these allocations


@pytest.fixture
def empty_pool():
    """Empty the pool, and let it grow without a limit."""
    NATIVE.trim_pool(10.0, UNLIMITED)  # as if 10 seconds had passed, and as much memory was available
    yield
    NATIVE.trim_pool(10.0, UNLIMITED)


@pytest.fixture
def five_mib(empty_pool):
    """Put blocks of 1, 1 and 3 MiB into the pool, and nothing else."""
    blocks = [kernels.memory(nbytes) for nbytes in (MIB, MIB, 3 * MIB)]
    del blocks
    assert pooled() == 5 * MIB


@linux
def test_what_the_pool_keeps(five_mib):
    """Blocks that were not used for 5 seconds go back to the system. The pool keeps at most half of the memory that the
    system would have available without it. A freed block for which it has no room goes back at once."""
    NATIVE.trim_pool(3.0, UNLIMITED)
    NATIVE.trim_pool(0.0, 6 * MIB)  # without the pool, 11 MiB would be available
    assert pooled() == 5 * MIB
    used = kernels.memory(2 * MIB)  # without the pool, 9 MiB would be available, so it may keep 4 MiB
    assert pooled() == 2 * MIB
    NATIVE.trim_pool(0.0, 2 * MIB)
    assert pooled() == 2 * MIB  # 4 MiB would be available
    del used
    assert pooled() == 2 * MIB  # 6 MiB would be available: not enough for 2 + 2 MiB
    NATIVE.trim_pool(0.0, 0)
    assert pooled() == MIB
    NATIVE.trim_pool(5.0, UNLIMITED)
    assert pooled() == 0


@linux
def test_the_pool_gives_way_to_a_request_that_fails():
    """If the system refuses memory for a result, the pool is emptied, and the request succeeds."""
    code = """
import resource
kernels.memory(400 << 20)
kernels.empty_cache()
blocks = [kernels.memory(64 << 20) for _ in range(3)]
del blocks
assert kernels.memory_usage()["pooled"] == 192 << 20
with open("/proc/self/statm") as sizes:
    now = int(sizes.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (100 << 20),) * 2)
block = kernels.memory(150 << 20)
print(kernels.memory_usage()["pooled"])
"""
    assert printed(code) == ["0"]


@pytest.mark.slow
@linux
def test_results_that_were_dropped_leave_no_memory():
    """An idle process, and its forked child, return the memory of small and large freed results after about 5 s."""
    # The C library keeps freed blocks for the process once it has freed a larger one that it had mapped.
    code = """
child = os.fork()
before = resident()
use([20 * MIB, *[MIB + 64] * 200, *[200_000] * 200, *[64 * MIB] * 4])
freed = time.monotonic()
assert resident() - before >= 500 and threads() == ALONE + 1
until(lambda: kernels.memory_usage()["pooled"] == 0)
seconds = time.monotonic() - freed
until(lambda: threads() == ALONE)
assert resident() - before < 20 and 4.5 < seconds
if child:
    print(os.waitpid(child, 0)[1])
"""
    assert printed(ALONE + code) == ["0"]


@linux
def test_a_forked_child_starts_with_an_empty_pool():
    """A child has neither the pooled blocks nor the pool's thread of its parent. It starts its own thread when it frees
    blocks. The thread handles no signals, and a process whose pool is full ends at once."""
    code = """
use([8 * MIB] * 8)
assert kernels.memory_usage()["pooled"] == 64 * MIB
for generation in range(2):  # children of children, too
    child = os.fork()
    if child:
        os._exit(os.waitpid(child, 0)[1] != 0)
    assert threads() == ALONE and kernels.memory_usage()["pooled"] == 0
    use([8 * MIB] * 3)
    assert threads() == ALONE + 1 and kernels.memory_usage()["pooled"] == 24 * MIB
for task in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{task}/status") as lines:
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
    blocked = [bool(mask >> (number - 1) & 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    assert blocked == [int(task) != os.getpid()] * 3
"""
    assert printed(ALONE + code) == []


def test_threads_and_forks_share_the_pool():
    """Threads can allocate and free memory while the pool is trimmed and the process forks."""
    code = """
from concurrent.futures import ThreadPoolExecutor
over = threading.Event()

def work(seed):
    while not over.is_set():
        blocks = [kernels.memory(1000 * (seed + k % 5)) for k in range(50)]
        for k, block in enumerate(blocks):
            memoryview(block)[:8] = k.to_bytes(8, "little")
        assert [int.from_bytes(memoryview(block)[:8], "little") for block in blocks] == list(range(50))
        del block, blocks

with ThreadPoolExecutor(3) as pool:
    workers = [pool.submit(work, 1 + k) for k in range(3)]
    for turn in range(12):
        kernels.native().trim_pool(10.0, turn % 2 * MIB)
        child = os.fork()
        if child == 0:
            use([MIB] * 3)
            kernels.native().trim_pool(10.0, MIB)
            os._exit(kernels.memory_usage()["pooled"] != 0)
        assert os.waitpid(child, 0)[1] == 0
    over.set()
    print(*(worker.result() for worker in workers))
"""
    assert printed(code) == ["None"] * 3


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")
def test_the_c_library_keeps_freed_memory_until_it_is_told_otherwise():
    """After ``keep_memory()``, freed arrays (also those of threads) stay resident and are reused without page faults.
    ``empty_cache`` returns them to the system. After ``keep_memory(False)``, freed arrays are returned again."""
    code = """
import ctypes, resource
import crossreduce as cr
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def use():
    size = ctypes.c_size_t(96 * MIB)
    block = ctypes.c_void_p(libc.malloc(size))
    libc.memset(block, 1, size)
    libc.free(block)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    worker = threading.Thread(target=lambda: [use() for _ in range(5)])
    worker.start()
    worker.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

start = resident()
print(cr.keep_memory(), cr.keep_memory())
use()
print(faults() < 5000, resident() - start > 90)
cr.empty_cache()
print(resident() - start < 10)
use()
print(cr.keep_memory(False), resident() - start < 10)
use()
print(resident() - start < 10, faults() > 50_000)
"""
    assert printed(code) == ["True"] * 9


def test_other_c_libraries_are_told_nothing(monkeypatch):
    """If the C library is not glibc, ``keep_memory`` returns False. An argument that is not a bool is an error."""

    def windows(name):
        raise TypeError("bad argument type for built-in operation")

    for library in (windows, lambda name: object()):
        monkeypatch.setattr(kernels.ctypes, "CDLL", library)
        assert (kernels.keep_memory(), kernels.keep_memory(False)) == (False, False)
        kernels.empty_cache()
    with pytest.raises(ArgumentError, match=r"keep_memory requires a bool\.\n  given: 1 \(int\)"):
        kernels.keep_memory(1)


@linux
def test_the_available_memory_is_that_of_this_machine():
    """The available memory is above 1 MiB and at most the memory of the machine."""
    assert MIB < kernels.available_memory() <= os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("line", "limit", "usage", "cache"), [
    ("0::/slice/job", "memory.max", "memory.current", "inactive_file"),
    ("4:cpu,memory:/slice/job", "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
])  # fmt: skip
def test_the_smallest_limit_of_all_control_groups_counts(tmp_path, line, limit, usage, cache):
    """The available memory is the least that any limit of this process's control group and its parent groups leaves."""
    Path(tmp_path, "cgroup").write_text(f"3:cpuset:/\n{line}\n")
    Path(tmp_path, "meminfo").write_text("MemTotal:       99999 kB\nMemAvailable:   20 kB\n")

    def limited(group, most):
        stats = f"x{cache} 7\n{cache}_x 8\n{cache} 500\n"
        for name, text in ((limit, str(most)), (usage, "3000"), (f"{Path(limit).parent}/memory.stat", stats)):
            path = Path(tmp_path, Path(name).parent, group, Path(name).name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def left():
        return NATIVE.available_memory(str(tmp_path / "meminfo"), str(tmp_path / "cgroup"), str(tmp_path))

    for group, most, available in (
        ("slice/job", "max", 20 << 10),
        ("", 9000, 6500),
        ("slice", 5000, 2500),
        ("slice/job", 7000, 2500),
        ("slice/job", 2000, 0),
    ):
        limited(group, most)
        assert left() == available


@pytest.mark.parametrize("text", ["", "MemAvailable:\n", "MemAvailable: many kB\n", "0::\n:\n::::\n", "4:memory"])
def test_files_of_another_form_limit_nothing(tmp_path, text):
    """Without the files, or in files of another form, no limit is found."""
    for name in ("meminfo", "cgroup"):
        Path(tmp_path, name).write_text(text)
    names = [str(tmp_path / name) for name in ("meminfo", "cgroup", "groups")]
    assert NATIVE.available_memory(*names) == UNLIMITED
    assert NATIVE.available_memory(*(f"{name}/missing" for name in names)) == UNLIMITED


def run_without_memory_in_threads(code, tmp_path):
    """Run a program in a new process, in which only the thread that calls ``refuse`` can then allocate memory."""
    library = tmp_path / "no_memory_in_threads.so"
    source = NATIVE_SOURCES / "no_memory_in_threads.cpp"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return run_python(code, LD_PRELOAD=str(library), CROSSREDUCE_NUM_THREADS="2")


@linux
def test_a_large_call_needs_no_memory_in_its_helper_threads(tmp_path):
    """If there is no memory for the threads that help with a large call, the calling thread does their work. The C
    library would end a process whose thread cannot allocate a ``thread_local`` variable."""
    code = """
import ctypes, os, numpy as np
import crossreduce as cr
op = cr.AllReduceCrossDeviceOps("direct")
def is_right(size):
    values, results = cr.PerReplica([np.ones(size, np.float32)] * 2), [np.zeros(size, np.float32) for _ in range(2)]
    op.reduce("sum", values, values, out=cr.PerReplica(results))
    return all((x == 2).all() for x in results)
is_right(8)
before = len(os.listdir("/proc/self/task"))
ctypes.CDLL(None).refuse()  # several calls follow, since the helper may start late
print(all(is_right(1 << 21) for _ in range(30)), len(os.listdir("/proc/self/task")) - before)
"""
    ran = run_without_memory_in_threads(code, tmp_path)
    assert ran.stdout.split() == ["True", "1"], ran.stderr


@linux
@pytest.mark.parametrize("started", [True, False])
def test_messages_need_no_memory_in_the_helper(tmp_path, started):
    """If there is no memory for the thread that helps with messages, from its start or later, waiting threads do its
    work."""
    code = f"""
import ctypes, os
from crossreduce import kernels
native, data = kernels.native(), (ctypes.c_char * 1000)(*b"a" * 1000)
fd = os.memfd_create("test")
os.ftruncate(fd, native.Mailboxes.nbytes(2))
first, second = (native.Mailboxes(fd, 0, rank, 2, 0.0, True) for rank in (0, 1))
got = [(ctypes.c_char * 1000)() for _ in range(40)]
numbers = []
if not {started}:
    ctypes.CDLL(None).refuse()
numbers.append(second.receive(0, 0, ctypes.addressof(got[0]), 1000, got))
if {started}:
    first.wait(first.receive(1, 50, ctypes.addressof(data), 1000, data), 0.3)  # the helper of the other rank wakes
    ctypes.CDLL(None).refuse()
for tag in [*range(1, 40), 0]:
    first.send(1, tag, ctypes.addressof(data), 1000, data)
other = first.receive(1, 51, ctypes.addressof(data), 1000, data)
assert first.wait(other, 0.3) == -1  # asks the other rank's helper for help
numbers += [second.receive(0, tag, ctypes.addressof(got[tag]), 1000, got) for tag in range(1, 40)]
assert all(second.wait(number, 5.0) in (0, None) for number in numbers)
print(all(x.raw == data.raw for x in got))
"""
    ran = run_without_memory_in_threads(code, tmp_path)
    assert ran.stdout.split() == ["True"], ran.stderr
