"""One process of a survival storm: processes train together while some die, stop, leave by an error, or join.

A step sums a different bit of each process, so its result shows which processes took part. All processes count their
steps and record the committed results.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import namespaces

from crossreduce.errors import CollectiveTimeout, ExcludedError, PeerLostError

MOST = 16  # the maximum number of processes
SIZES = (1, 300, 20_000, 400_000)
GROW_EVERY = 6  # steps
FAILURES = ("kill", "stop", "exit", "exception")


class Failure(BaseException):
    """A failure of the program at any place. The library must not treat it as one of its own errors."""


def shared_counters():
    """Return shared memory: for each process its number of committed steps, and at MOST whether the storm ends."""
    return memoryview(mmap.mmap(-1, 8 * (MOST + 1))).cast("q")


class Process:
    """A process of the storm. ``kind``: the class of its group, in ``kinds_of_groups``. ``case``: see the storms."""

    def __init__(self, number, kind, case, shared):
        self.number, self.kind, self.case, self.shared, self.group = number, kind, case, shared, None
        self.folder = Path(case["folder"])
        self.step_number = self.total = 0
        # Whether this process knows the state (processes that join do not), and whether the last step has run.
        self.known, self.ends = number < case["size"], False
        self.synchronise = False
        self.records = []
        self.failures = [each for each in case["failures"] if each["who"] == number]
        for name, place in kind.places.items():
            setattr(place, name, self.wrapped(name.split("_")[0], getattr(place, name)))

    def wrapped(self, what, function):
        """Return ``function``, in which this process fails if one of its failures is due there."""

        def call(*arguments, **options):
            failure = next((each for each in self.failures if each["where"] == what), None)
            if failure is None or failure["skip"]:
                if failure is not None:
                    failure["skip"] -= 1
                return function(*arguments, **options)
            self.failures.remove(failure)
            self.fail_after(failure)
            try:
                return function(*arguments, **options)
            finally:
                if sys.getprofile() is not None:  # the function has ended before the failure
                    sys.setprofile(None)
                    fail(failure["how"])

        return call

    def fail_after(self, failure):
        """Let this process fail after ``failure["after"]`` calls and returns in functions of the library."""
        left = failure["after"]

        def count(frame, event, function):
            nonlocal left
            if event == "c_call" and function.__name__ == "__exit__":
                return  # no signal is handled between a with block and its end: an error here would leave a lock taken
            if event in ("call", "c_call", "c_return") and "crossreduce" in frame.f_code.co_filename:
                left -= 1
                if left <= 0:
                    sys.setprofile(None)
                    fail(failure["how"])

        sys.setprofile(count)

    def begin(self):
        case = self.case
        if self.known:
            ranks = SimpleNamespace(rank=self.number, size=case["size"])
            self.group = self.kind(ranks, f"{case['address']}:{case['port']}")
            self.group.set_timeout(case["timeout_s"])
            partial, whole = self.folder / f"partial{self.number}", self.folder / f"invitation{self.number}"
            partial.write_text(self.group.invitation())
            partial.rename(whole)
            Path(self.folder, f"ready{self.number}").touch()
            return
        time.sleep(case["join_after_s"])
        while not self.shared[MOST]:
            for path in sorted(self.folder.glob("invitation*")):
                with suppress(PeerLostError, CollectiveTimeout):
                    self.group = self.kind(None, "")
                    self.group.join(path.read_text(), timeout_s=3)
                    self.synchronise = True
                    return
        raise ExcludedError("the storm has ended before this process has joined")

    def step(self):
        """Make random collectives. Return a bit set of the processes that took part, and whether the storm ends."""
        if self.synchronise:
            known, self.step_number, self.total = self.group.broadcast([self.known, self.step_number, self.total])
            assert known, "the lowest rank has no state"
        draw = random.Random(self.step_number)
        mask, ends = self.group.random_calls(draw, draw.choice(SIZES), [1 << self.number, self.shared[MOST]])
        return mask, bool(ends)

    def train(self):
        while not self.ends:
            mask, ends = self.group.committed(self.step, timeout_s=self.case["wait_s"])
            self.known, self.synchronise, self.ends = True, False, ends
            self.total += mask
            self.records.append((self.step_number, mask, self.total))
            self.step_number += 1
            self.shared[self.number] += 1
            if self.case["joiners"] and self.step_number % GROW_EVERY == 0 and self.group.grow():
                self.synchronise = True

    def run(self):
        """Train until the end. Return the committed results of this process, and how it ended."""
        end = "done"
        try:
            self.begin()
            self.train()
        except ExcludedError as error:
            end = f"excluded: {error}"
        if end == "done":
            self.group.leave()
        return {"records": self.records, "end": end}


def fail(how):
    if how == "exit":
        sys.exit(5)
    if how == "exception":
        raise Failure("a failure of the program")
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def fail_on_signal():
    signal.signal(signal.SIGUSR1, lambda *_: fail("exit"))
    signal.signal(signal.SIGUSR2, lambda *_: fail("exception"))


def lives(rendezvous, kind, case, shared):
    """Run one process of a storm. On SIGQUIT it writes the stacks of its threads."""
    fail_on_signal()
    output = Path(case["folder"], f"output{rendezvous.rank}")
    with output.open("w") as opened:
        faulthandler.register(signal.SIGQUIT, opened)
        if case["namespaces"]:
            namespaces.enter(case["namespaces"][rendezvous.rank])
        try:
            return Process(rendezvous.rank, kind, case, shared).run()
        except BaseException:
            opened.write(traceback.format_exc())
            raise
        finally:
            faulthandler.unregister(signal.SIGQUIT)
