"""``WatchedTransport``, which records for which rank this rank waits, and the watchdog thread that checks the waits."""

import gc
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from ranks import ranks

from crossreduce.ranks.failures import watchdog
from crossreduce.ranks.failures.failure_detector import SLICE_S, FailureDetector
from crossreduce.ranks.failures.watchdog import WatchedTransport


class Checker:
    """A watched transport that records its checks. ``fails``: whether the first check raises an error."""

    def __init__(self, fails=False):
        self.checked, self.fails = threading.Event(), fails
        self.watched = WatchedTransport(None, self.check)

    def check(self, wait):
        assert wait is None
        self.checked.set()
        if self.fails:
            self.fails = False
            raise ZeroDivisionError

    def next_check(self):
        self.checked.clear()
        assert self.checked.wait(10)


@pytest.mark.parametrize("moves", [False, True])
def test_the_timeout_of_an_inner_call_begins_again_when_data_moves(moves):
    """While another collective makes progress, it may take longer than the timeout."""
    waits, left = [], iter(range(5))
    running = SimpleNamespace(progress=0)

    def wait(_):
        time.sleep(1.2 * SLICE_S)
        running.progress += moves
        return next(left, None) is None

    running.wait = wait
    detector = SimpleNamespace(
        warn_after_s=lambda: 60.0, _transport=None, _check_inner=lambda timer, waited: waits.append(waited)
    )
    FailureDetector.wait_for_inner(detector, running)
    assert len(waits) == 5
    assert (max(waits) == 0) == moves


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "crossreduce watchdog"]


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch):
    """Let the thread call the checks often, and check that no test leaves a thread."""
    monkeypatch.setattr(watchdog._WATCHDOG, "_every_s", 0.02)
    assert not threads()
    yield
    assert not threads()


def test_a_wait_is_recorded_until_it_ends():
    """``wait.rank`` is the rank that is waited for, until the wait ends (here with an error)."""
    transport, recorded = mock.Mock(), []
    watched = WatchedTransport(transport, lambda _: None)

    def wait(timeout_s):
        recorded.append((watched.wait.rank, timeout_s))
        raise ConnectionError("lost")

    transport.receive.return_value.wait = wait
    with pytest.raises(ConnectionError, match="lost"):
        watched.receive(5, 6, 7, 8).wait(9.0)
    transport.receive.assert_called_once_with(5, 6, 7, 8)
    assert (recorded, watched.wait) == ([(7, 9.0)], None)
    watched.close()


def test_the_thread_does_not_keep_the_checked_object_alive():
    """If the checked object is garbage collected without a ``close``, the watchdog's thread ends."""
    checker = Checker()
    checker.next_check()
    (thread,) = threads()
    del checker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_checking_continues_after_an_error(monkeypatch):
    """An error in a check, such as a log handler's, is reported by ``threading.excepthook``, and checks continue."""
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda error: reported.append((error.exc_type, error.thread.name)))
    checker = Checker(fails=True)
    for _ in range(3):
        checker.next_check()
    assert reported == [(ZeroDivisionError, "crossreduce watchdog")]
    checker.watched.close()


def test_one_thread_serves_all_transports():
    """One thread per process calls the checks of all transports until the last is closed, also after a fork."""
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
