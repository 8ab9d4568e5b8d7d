"""The threads of the kernels: concurrent callers, forks, signals, and the memory of threads that end."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from crossreduce import kernels

NATIVE = kernels.native()
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")

# The start of the programs below: a kernel that several threads share, and functions that check its results.
BEGIN = """
import os, signal, sys, threading, time, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts without this handler
import numpy as np
from crossreduce.kernels import native

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if a process with threads forks

SIZE, N = 1 << 18, 4

def kernel(isa, dtype, n, size, program):
    return native().Kernel(isa, "sum", dtype, dtype, dtype, 1, n, 1, (size,), (program,), ((0, 0, size, 0),))

KERNEL = kernel(native().supported()[0], "int32", N, SIZE, (1, ((0, *range(N)),), (~0,)))
XS = [np.arange(SIZE, dtype="int32") * 10**k for k in range(N)]
SUM = sum(XS)

def reduce(threads):
    out = np.zeros(SIZE, "int32")
    assert KERNEL.run([XS], [[out]], threads, False, False) is None
    assert (out == SUM).all()

def forked(threads):
    # Returns the exit status of a child that reduces; a child that hangs is killed.
    child = os.fork()
    if child == 0:
        try:
            assert native().helpers() == 0, "a child has no helpers of its parent"
            for _ in range(3):
                reduce(threads)
            assert native().helpers() == threads - 1
            os._exit(0)
        except BaseException as error:
            print("in the child:", repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    for _ in range(3000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"
"""


def run(code):
    """Run ``BEGIN`` and then ``code`` in a new process, which must succeed, and return the words that it prints."""
    command = [sys.executable, "-c", BEGIN + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


def sum_kernel(size, n, dtype):
    """Return a kernel that adds ``n`` sources of one tensor."""
    program = (1, ((0, *range(n)),), (~0,))
    isa = NATIVE.supported()[0]
    return NATIVE.Kernel(isa, "sum", dtype, dtype, dtype, 1, n, 1, (size,), (program,), ((0, 0, size, 0),))


def test_eight_threads_reduce_at_once():
    """Callers that ask for different numbers of threads share the pool of threads, and each gets its own results."""
    callers, size, n = 8, 150_001, 4
    kernel = sum_kernel(size, n, "int64")
    together = threading.Barrier(callers)

    def work(number):
        xs = [np.arange(size) * (number * n + k + 1) for k in range(n)]
        right, outs = sum(xs), [np.zeros(size, "int64") for _ in range(4)]
        together.wait()
        for turn in range(12):
            out = outs[turn % 4]
            out[:] = 0
            threads, streaming = 1 + (number + turn) % 5, turn % 2 == 0
            assert kernel.run([xs], [[out]], threads, streaming, True) is None  # True: overlaps are found
            assert (out == right).all(), f"caller {number}, turn {turn}"

    with ThreadPoolExecutor(callers) as pool:
        for done in [pool.submit(work, number) for number in range(callers)]:
            done.result(timeout=100)


def test_a_long_run_releases_the_interpreter_lock():
    """While a large batch is reduced, other Python threads run."""
    n, side = 4, 2000
    kernel = sum_kernel(side * side, n, "int8")
    xs = [np.ones((side, side), "int8").T for _ in range(n)]  # strided sources, which take long
    out = np.zeros(side * side, "int8")
    ticks, over = [], threading.Event()

    def tick():
        while not over.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    other = threading.Thread(target=tick)
    other.start()
    inside = 0
    try:
        for _ in range(50):
            began = time.perf_counter()
            kernel.run([xs], [[out]], 1, False, False)
            ended = time.perf_counter()
            inside = sum(began < at < ended for at in ticks)
            if inside >= 2:
                break
    finally:
        over.set()
        other.join()
    assert (out == n).all()
    assert inside >= 2, f"{inside} ticks in {ended - began:.3f} s"


def test_the_pool_starts_no_more_threads_than_requested():
    """The caller is one of the threads. The others, the helpers, are started when they are first needed, and serve all
    callers. A small batch is divided into few shares of work, or only one, so it starts few helpers or none."""
    code = """
counts = [native().helpers()]
for threads in (1, 2, 3, 2, 1):
    reduce(threads)
    counts.append(native().helpers())
callers = [threading.Thread(target=reduce, args=(3,)) for _ in range(6)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
print(*counts, native().helpers())
for size in (20_000, 9):
    out = np.zeros(size, "int32")
    small = kernel("baseline", "int32", 2, size, (1, ((0, 0, 1),), (~0,)))
    before = native().helpers()
    small.run([[XS[0][:size]] * 2], [[out]], 500 + size % 2, False, False)
    assert (out == 2 * XS[0][:size]).all()
    print(native().helpers() - before <= (6 if size > 9 else 0))
"""
    assert run(code) == ["0", "0", "1", "2", "2", "2", "2", "True", "True"]


@forks
def test_a_forked_child_reduces():
    """A child starts without helpers and starts its own, whether or not its parent had started any."""
    code = """
print(forked(1), forked(3))
reduce(3)
print(forked(1), forked(3), native().helpers())
"""
    assert run(code) == ["0", "0", "0", "0", "2"]


@forks
def test_a_child_forked_during_a_run_reduces():
    """A process may fork, also by multiprocessing, while threads run kernels. Both processes can then reduce."""
    code = """
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

over = threading.Event()

def busy(threads):
    while not over.is_set():
        reduce(threads)

def work(number):
    reduce(1 + number % 3)
    return number

with ThreadPoolExecutor(2) as callers:
    running = [callers.submit(busy, threads) for threads in (2, 3)]
    ends = {forked(1 + turn % 3) for turn in range(6)}
    with multiprocessing.get_context("fork").Pool(2) as pool:
        numbers = pool.map_async(work, range(6)).get(timeout=200)
    over.set()
    print(*ends, *(one.result() for one in running), *numbers)
reduce(3)
"""
    assert run(code) == ["0", "None", "None", *"012345"]


@linux
def test_signals_do_not_reach_the_pool():
    """Helpers block signals, so that the program's own threads handle Ctrl-C. These threads keep their signal masks."""
    code = """
def masks():
    found = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as lines:
            found[task] = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
    return found

before = masks()
reduce(3)
after = masks()
helpers = [mask for task, mask in after.items() if task not in before]
blocked = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1]
print(len(helpers), all(mask >> (number - 1) & 1 for mask in helpers for number in blocked))
print({task: after[task] for task in before} == before)
"""
    assert run(code) == ["2", "True", "True"]


def test_an_interrupt_during_a_run_is_handled():
    """Signals that arrive during a run are handled in the main thread, and the results are right."""
    code = """
handled = []
main = threading.main_thread()
signal.signal(signal.SIGALRM, lambda number, frame: handled.append(threading.current_thread() is main))
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
until = time.monotonic() + 60
while len(handled) < 20 and time.monotonic() < until:
    reduce(3)
signal.setitimer(signal.ITIMER_REAL, 0)
try:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        reduce(3)
except KeyboardInterrupt:
    print(len(handled) >= 20, all(handled))
reduce(3)
"""
    assert run(code) == ["True", "True"]


def test_a_process_ends_while_daemon_threads_reduce():
    """Daemon threads that run kernels do not delay or disturb the end of the process."""
    code = """
def busy():
    while True:
        KERNEL.run([XS], [[np.empty(SIZE, "int32")]], 3, False, False)

for _ in range(2):
    threading.Thread(target=busy, daemon=True).start()
time.sleep(0.1)
print("over")
"""
    assert run(code) == ["over"]


@linux
def test_threads_that_end_leave_no_memory():
    """The working memory of a thread is freed when it ends: 400 threads in turn leave less than 8 MB."""
    code = """
size, n = 20_000, 40
xs = [np.ones(size, "float32")[::-1] for _ in range(n)]
# Many slots, all of them used, so that the working memory is large.
slots = 40
folds = tuple((slot, slot % n, (slot + 1) % n) for slot in range(slots))
total = kernel("baseline", "float32", n, size, (slots, (*folds, (0, *(~slot for slot in range(slots)))), (~0,)))

def work():
    out = np.zeros(size, "float32")
    total.run([xs], [[out]], 1, False, False)
    assert (out == 2 * slots).all()

def resident():
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGESIZE")

def threads(count):
    for _ in range(count):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

threads(50)
before = resident()
threads(400)
print((resident() - before) // 1000)
"""
    (grown,) = run(code)
    assert int(grown) < 8000, f"400 threads left {grown} kB"
