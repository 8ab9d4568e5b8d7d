"""How runs end: timeouts, threads and processes that replicas start, interrupts, and memory that is freed."""

import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np
import pytest
from replicas import OwnError, notes, number

import crossreduce as cr
from crossreduce.ranks.failures.watchdog import WatchedTransport
from crossreduce.strategy.replica_group import ReplicaGroup
from crossreduce.threads import start_thread

context = cr.get_replica_context
BRIEF = cr.CommunicationOptions(timeout_seconds=0.3)
pytestmark = pytest.mark.usefixtures("no_thread_stays")


@pytest.mark.parametrize("of_the_call", [True, False])
def test_a_replica_that_does_not_call_is_named_after_the_timeout(of_the_call):
    """Waiting longer than the timeout of the call or the run raises a StalledError that lists the missing replicas."""
    resume = threading.Event()

    def step():
        if number() == 1:
            resume.wait(100)
            return
        context().all_reduce("sum", 1.0, BRIEF if of_the_call else None)

    words = "replica 1 on cpu:1 is still computing; replica 2 on cpu:2 waits in"
    with pytest.raises(TimeoutError, match=words) as caught:
        cr.MirroredStrategy(3).run(step, options=None if of_the_call else BRIEF)
    assert type(caught.value) is cr.StalledError
    assert "still computing after 0.3 s, and left running: replica 1" in notes(caught.value)
    resume.set()
    for thread in threading.enumerate():
        if thread.name == "crossreduce replica 1":
            thread.join(100)


@pytest.mark.parametrize("seconds", [0.3, 1e10, float("inf")])
def test_only_waiting_counts_for_the_timeout(seconds):
    """Only the wait in a single call counts for the timeout, not computing or the sum of waits. It may be infinite."""
    barrier = threading.Barrier(2, timeout=100)
    options = cr.CommunicationOptions(timeout_seconds=seconds)

    def step():
        # With the short timeout, one pause exceeds it, and so do the other three together.
        for pause in (0.4, 0.12, 0.12, 0.12) if seconds < 1 else (0.05 * number(),):
            time.sleep(pause)
            barrier.wait()  # so that no replica waits long in the call
            total = context().all_reduce("sum", 1.0, options)
        return total

    assert cr.MirroredStrategy(2).run(step, options=options).values == (2, 2)


def test_a_replica_makes_one_call_at_a_time():
    """If two threads of one replica make a call at the same time, the second call raises a ContextError."""
    calls, begun = [], threading.Event()

    def second(here):
        while here._group._calls[0] is None:  # the replica does not yet wait in its own call
            time.sleep(0.005)
        here.all_reduce("sum", 1.0)

    def step():
        if number() == 0:
            calls.append(pool.submit(contextvars.copy_context().run, second, context()))
            begun.set()
        else:
            begun.wait(100)
            wait(calls, 100)
        context().all_reduce("sum", 1.0)

    with ThreadPoolExecutor(1) as pool:
        cr.MirroredStrategy(2).run(step)
    with pytest.raises(cr.ContextError, match="this replica is already waiting in a collective call of another thread"):
        calls[0].result()


def test_a_thread_that_outlives_its_replica_never_waits_forever():
    """A collective call in a thread that a replica started does not wait forever if the replica returns before it."""
    calls = []

    def step():
        calls.append(pool.submit(contextvars.copy_context().run, context().all_reduce, "sum", 1.0))

    with ThreadPoolExecutor(1) as pool:
        for _ in range(30):
            with suppress(cr.MismatchError):
                cr.MirroredStrategy(1).run(step)
            with suppress(cr.ContextError, cr.MismatchError):
                calls[-1].result(20)


class Observing(cr.AllReduceCrossDeviceOps):
    """Records for each batch whether the main thread reduces it, the value of ``marker``, and the replica's context."""

    def batch_reduce(self, *args, **named):
        self.seen.append((threading.current_thread() is threading.main_thread(), self.marker.get(), context()))
        return super().batch_reduce(*args, **named)


def test_the_context_of_the_caller():
    """Replicas have copies of the caller's context variables, NumPy's errstate included. Batches are reduced with the
    caller's own variables. Functions of merge_call run in the caller's thread."""
    ops = Observing()
    ops.seen, ops.marker = [], contextvars.ContextVar("marker", default="none")

    def step():
        before = ops.marker.get() + " " + np.geterr()["divide"]
        ops.marker.set("replica")
        context().all_reduce("sum", np.ones(3))
        return before, context().merge_call(lambda _: threading.current_thread() is threading.main_thread())

    ops.marker.set("caller")
    with np.errstate(divide="raise"):
        before, merged = cr.MirroredStrategy(3, ops).run(step)
    assert (before, merged.values, ops.marker.get()) == ("caller raise", (True,) * 3, "caller")
    assert ops.seen == [(False, "caller", None)]


class Interrupted:
    """A gate of a replica. Ctrl-C arrives when it is to be opened for the first time."""

    def __init__(self, gate):
        self.acquire, self.locked, self.open = gate.acquire, gate.locked, gate.release

    def release(self):
        self.release = self.open
        raise KeyboardInterrupt


def test_an_interrupt_before_the_replicas_are_woken_ends_them(monkeypatch):
    """Ctrl-C after the replies of a call are stored, and before a replica is woken, ends the run at once."""
    make = ReplicaGroup.__init__

    def interrupted(group, *args):
        make(group, *args)
        group._gates[0] = Interrupted(group._gates[0])

    monkeypatch.setattr(ReplicaGroup, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        cr.MirroredStrategy(3).run(lambda: context().merge_call(lambda _: 1.0), options=BRIEF)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore")  # Python and JAX warn of forks in processes with threads
def test_a_call_in_a_forked_process_is_an_error():
    """A call of the context in a forked child process of a replica raises an error, since it would wait forever."""

    def step():
        if number() == 0:
            child = os.fork()
            if not child:
                signal.alarm(20)
                try:
                    context().all_reduce("sum", 1.0)
                except cr.ContextError as error:
                    os._exit(7 if "a collective call was made in a forked process" in str(error) else 8)
                finally:
                    os._exit(9)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return context().all_reduce("sum", 1.0)

    assert cr.MirroredStrategy(2).run(step).values == (2, 2)


def test_arrays_and_objects_are_freed():
    """Inputs can be freed after an all_reduce. Objects of a failed step are freed at once, without the collector."""
    alive, refs = [], []

    def step():
        x = np.ones(3)
        seen = weakref.ref(x)
        context().all_reduce("sum", x)
        del x
        deadline = time.monotonic() + 60  # the caller's thread, which ran the reduction, may still reference x
        while seen() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        alive.append(seen() is not None)

    cr.MirroredStrategy(2).run(step)
    assert alive == [False, False]

    def failing():
        made = np.ones(3)
        refs.append(weakref.ref(made))
        context().all_reduce("sum", 1.0)
        raise OwnError("own")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(OwnError, match="own"):
            cr.MirroredStrategy(1).run(failing)
        assert [ref() for ref in refs] == [None]  # pytest drops its reference to the exception at the end of the block
    finally:
        gc.enable()


def test_a_thread_that_cannot_start_ends_the_run(monkeypatch):
    """If the system cannot start a thread, the running ones are stopped and the system's error is raised."""
    start, started = threading.Thread.start, []

    def limited(self):
        started.append(self)
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        cr.MirroredStrategy(4).run(lambda: context().all_reduce("sum", 1.0))


IMPORTS = """
import sys, threading
import numpy as np
import crossreduce as cr
class Finder:
    def find_spec(self, name, *_):
        if name == "optree":
            print(threading.current_thread() is threading.main_thread())
sys.meta_path.insert(0, Finder())
cr.MirroredStrategy(2).run(lambda: cr.get_replica_context().all_reduce("sum", {"a": np.ones(2)}))
cr.MirroredStrategy()
print(sorted({"torch", "jax", "tensorflow"} & set(sys.modules)))
sys.modules["jax"] = None
cr.MirroredStrategy(2).run(lambda: 1)
"""


def test_what_replicas_import():
    """The tree library is imported in the main thread, and torch and JAX only if they are used."""
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n[]\n"


CTRL_C = """
import os, signal, threading, time
import crossreduce as cr
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)

def step(merges):
    here = cr.get_replica_context()
    if merges:
        here.merge_call(interrupt)
    elif here.replica_id_in_sync_group == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
    here.all_reduce("sum", 1.0)
    print("continued")

for merges in (False, True):
    try:
        cr.MirroredStrategy(3).run(step, args=(merges,))
    except KeyboardInterrupt:
        print([t.name for t in threading.enumerate() if t.name.startswith("crossreduce")])
"""


def test_ctrl_c_releases_all_threads():
    """KeyboardInterrupt in the caller, while it waits or merges, stops all replicas."""
    ran = subprocess.run([sys.executable, "-c", CTRL_C], capture_output=True, text=True, timeout=200, check=False)
    assert ran.stdout == "[]\n[]\n", ran.stderr


def interrupted(thread):
    """Raise as Python does if Ctrl-C arrives while the condition of a start has released its lock."""
    try:
        raise KeyboardInterrupt("the signal")
    finally:
        raise RuntimeError("release unlocked lock")


def refused(thread):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("kind", "error"), [(interrupted, KeyboardInterrupt), (refused, RuntimeError)])
def test_the_exceptions_of_a_start(monkeypatch, kind, error):
    """If Ctrl-C interrupts the start of a thread, KeyboardInterrupt is raised, not the RuntimeError that follows from
    it. If the system cannot start the thread, its RuntimeError is raised."""
    monkeypatch.setattr(threading.Thread, "start", kind)
    words = "the signal" if error is KeyboardInterrupt else "can't start new thread"
    with pytest.raises(error, match=words):
        start_thread(threading.Thread(target=int))
    try:
        int("earlier")
    except ValueError:
        with pytest.raises(error, match=words):
            start_thread(threading.Thread(target=int))
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt, match="the signal"):
            WatchedTransport(None, lambda: None)


STORM = """
import random, signal, sys
import crossreduce as cr

strategy = cr.MirroredStrategy(8)
strategy.run(lambda: 1)
signal.signal(signal.SIGALRM, signal.default_int_handler)
sys.unraisablehook = lambda _: None  # the handler may raise in a callback of the interpreter, too
random.seed(1)
interrupts = 0
while interrupts < int(sys.argv[1]):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1.5e-3))
        strategy.run(lambda: 1)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupts += 1
signal.signal(signal.SIGALRM, signal.SIG_IGN)
assert strategy.run(lambda: 1).values == (1,) * 8
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no interval timers")
@pytest.mark.parametrize("interrupts", ["100", pytest.param("2000", marks=pytest.mark.system)])
def test_a_storm_of_interrupts_raises_nothing_else(interrupts):
    """Runs of 8 replicas that are interrupted at random moments raise KeyboardInterrupt and no other exception."""
    command = [sys.executable, "-c", STORM, interrupts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
