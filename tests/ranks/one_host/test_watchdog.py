"""The transport that records which other rank this rank waits for, and its thread."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ranks import ranks

from crossreduce.ranks.failures import watchdog
from crossreduce.ranks.failures.watchdog import WatchedTransport


class Slow:
    """A transport whose messages complete, or fail with ``error``, once the test sets ``go``."""

    def __init__(self):
        self.calls, self.go, self.error = [], threading.Event(), None

    def send(self, *message):
        self.calls.append(("send", *message))
        return self

    def receive(self, *message):
        self.calls.append(("receive", *message))
        return self

    def abort(self):
        self.calls.append("abort")

    def wait(self, timeout_s):
        self.calls.append(("wait", timeout_s))
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error


class Checker:
    """A watched transport, and the waits with which its check was called; ``fails``: the first check raises."""

    def __init__(self, fails=False):
        self.transport, self.waits, self.checked, self.fails = Slow(), [], threading.Event(), fails
        self.watched = WatchedTransport(self.transport, self.check)

    def check(self, wait):
        self.waits.append(wait)
        self.checked.set()
        if self.fails:
            self.fails = False
            raise ZeroDivisionError

    def next_check(self):
        self.checked.clear()
        assert self.checked.wait(10)
        return self.waits[-1]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "crossreduce watchdog"]


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch):
    """Check that no test leaves a thread; let the thread call the checks often."""
    monkeypatch.setattr(watchdog._WATCHDOG, "_every_s", 0.02)
    assert not threads()
    yield
    assert not threads()


@pytest.mark.parametrize("error", [None, ConnectionError("gone")])
def test_a_wait_is_recorded_until_it_ends(error):
    """Messages are passed on unchanged; the rank that a wait is for is recorded until the wait completes or fails."""
    checker = Checker()
    transport, watched = checker.transport, checker.watched
    received = watched.receive(5, 6, 7, 8)
    assert checker.next_check() is None
    transport.error = error
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(received.wait, 9.0)
        while (recorded := checker.next_check()) is None:
            pass
        assert recorded.rank == 7
        assert began <= recorded.since_s <= time.monotonic()
        transport.go.set()
        assert waiting.exception() is error
    assert watched.wait is None
    transport.error = None
    watched.send(1, 2, 3, 4).wait(1.0)
    watched.abort()
    assert transport.calls == [("receive", 5, 6, 7, 8), ("wait", 9.0), ("send", 1, 2, 3, 4), ("wait", 1.0), "abort"]
    watched.close()


def test_the_thread_does_not_keep_the_checked_object_alive():
    """The watchdog's thread also ends when the object that it checks is garbage collected without a close."""
    checker = Checker()
    checker.next_check()
    (thread,) = threads()
    del checker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_checking_continues_after_an_error(monkeypatch):
    """An error in a check, such as a log handler's, is reported like any thread's error, and the next check follows."""
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda error: reported.append((error.exc_type, error.thread.name)))
    checker = Checker(fails=True)
    for _ in range(3):
        checker.next_check()
    assert reported == [(ZeroDivisionError, "crossreduce watchdog")]
    checker.watched.close()


def test_one_thread_serves_all_transports():
    """One thread calls the checks of all transports of a process, also of a forked one, until the last is closed."""
    first, *others = checkers = [Checker() for _ in range(3)]
    (thread,) = threads()
    for checker in checkers:
        checker.next_check()
    for checker in others:
        checker.watched.close()
    first.next_check()

    def forked(_):
        assert not threads()
        other = Checker()
        other.next_check()
        first.watched.close()
        other.next_check()
        other.watched.close()
        return len(threads())

    assert ranks(1, forked) == [0]
    first.next_check()
    assert threads() == [thread]
    first.watched.close()
    assert not thread.is_alive()


def test_closing_from_its_own_thread():
    """A check may close the transport in the watchdog's thread, where a finalizer may run, too."""
    checker, watched = Checker(), []
    (thread,) = threads()

    def check(_):
        for each in (checker.watched, *watched):
            each.close()

    watched.append(WatchedTransport(Slow(), check))
    for each in (thread, *threads()):
        each.join(10)
        assert not each.is_alive()
