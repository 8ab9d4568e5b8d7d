"""Starting threads while signals arrive: the caller gets the signal handler's exception and nothing else."""

import signal
import subprocess
import sys
import threading

import pytest

from crossreduce.ranks.failures.watchdog import WatchedTransport
from crossreduce.threads import start_thread


def interrupted(thread, real=threading.Thread.start):
    """Start a thread and raise as Python does if Ctrl-C arrives while the condition has released its lock."""
    real(thread)
    try:
        raise KeyboardInterrupt("the signal")
    finally:
        raise RuntimeError("release unlocked lock")


def refused(thread):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("kind", "error"), [(interrupted, KeyboardInterrupt), (refused, RuntimeError)])
def test_the_exceptions_of_a_start(monkeypatch, kind, error):
    """The handler's exception replaces the RuntimeError that follows from it; the system's own is raised."""
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
    """Of runs of 8 replicas that are interrupted at random moments, none raises another exception."""
    command = [sys.executable, "-c", STORM, interrupts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
