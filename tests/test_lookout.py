"""The wire that knows for whom it waits."""

import gc
import threading
import time

import pytest

from crossreduce.ranks.watchdog import Lookout


class Slow:
    """A wire whose messages come when they are let go, or fail."""

    def __init__(self):
        self.calls, self.go, self.error = [], threading.Event(), None

    def send(self, *given):
        self.calls.append(("send", *given))
        return self

    def receive(self, *given):
        self.calls.append(("receive", *given))
        return self

    def abort(self):
        self.calls.append("abort")

    def wait(self, timeout_s):
        self.calls.append(("wait", timeout_s))
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error


class Watcher:
    def __init__(self):
        self.wire, self.seen, self.looked = Slow(), [], threading.Event()
        self.lookout = Lookout(self.wire, self.look)

    def look(self):
        self.seen.append(self.lookout.waits)
        self.looked.set()

    def next_look(self):
        self.looked.clear()
        assert self.looked.wait(10)
        return self.seen[-1]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "crossreduce lookout"]


@pytest.fixture(autouse=True)
def _no_threads():
    assert not threads()
    yield
    assert not threads()


@pytest.mark.parametrize("error", [None, TimeoutError("late"), ConnectionError("gone")])
def test_a_wait_is_seen_while_it_lasts(error):
    """Messages pass as they are; whose is waited for is known until it came or failed."""
    watcher = Watcher()
    wire, lookout = watcher.wire, watcher.lookout
    sent, received = lookout.send(1, 2, 3, 4), lookout.receive(5, 6, 7, 8)
    assert watcher.next_look() is None
    wire.error = error
    began = time.monotonic()
    ended = []

    def wait():
        try:
            received.wait(9.0)
        except OSError as found:
            ended.append(found)
        else:
            ended.append(None)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while (seen := watcher.next_look()) is None:
        pass
    assert seen.rank == 7
    assert began <= seen.since_s <= time.monotonic()
    wire.go.set()
    waiting.join()
    assert ended == [error]
    assert lookout.waits is None
    wire.error = None
    sent.wait(1.0)
    lookout.abort()
    assert wire.calls == [("send", 1, 2, 3, 4), ("receive", 5, 6, 7, 8), ("wait", 9.0), ("wait", 1.0), "abort"]
    lookout.close()


def test_nobody_is_kept_alive_to_be_asked():
    """Whoever is forgotten without a close ends the thread, too."""
    watcher = Watcher()
    watcher.next_look()
    (thread,) = threads()
    del watcher
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_look_that_fails_is_not_the_last(monkeypatch):
    """What a log's handler raises is reported as any thread's error is, and the next look comes all the same."""
    reported, failed = [], []
    monkeypatch.setattr(threading, "excepthook", lambda given: reported.append((given.exc_type, given.thread.name)))

    class Fails(Watcher):
        def look(self):
            super().look()
            if not failed:
                failed.append(True)
                raise ZeroDivisionError

    watcher = Fails()
    for _ in range(3):
        watcher.next_look()
    assert reported == [(ZeroDivisionError, "crossreduce lookout")]
    watcher.lookout.close()


def test_closing_from_its_own_thread():
    """What looks may close, as a finalizer does that happens to run there."""
    watcher = Watcher()
    (thread,) = threads()

    class Closes:
        def look(self):
            watcher.lookout.close()
            self.lookout.close()

    closes = Closes()
    closes.lookout = Lookout(Slow(), closes.look)
    for one in (thread, *threads()):
        one.join(10)
        assert not one.is_alive()
