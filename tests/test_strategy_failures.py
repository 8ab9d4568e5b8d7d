"""What goes wrong in replicas: it reaches the caller, names who, ends the others, and never hangs."""

import contextvars
import functools
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref

import numpy as np
import pytest

import crossreduce as cr

context = cr.get_replica_context
BRIEF = cr.CommunicationOptions(timeout_seconds=0.3)
pytestmark = pytest.mark.usefixtures("no_thread_stays")


def number():
    return context().replica_id_in_sync_group


def notes(error):
    return "\n".join(error.__notes__)


class OwnError(Exception):
    pass


def reduce_(op="sum", value=1.0, **options):
    return lambda: context().all_reduce(op, value, cr.CommunicationOptions(**options))


MERGE = lambda: context().merge_call(lambda strategy: None)  # noqa: E731


@pytest.mark.parametrize("n", [1, 2, 5])
def test_an_exception_keeps_type_and_traceback_and_names_the_replica(n):
    """The caller gets the very exception, with the line that raised it, and the replica's number in a note."""
    raised = []

    def raises_here():
        raised.append(OwnError("mine", 5))
        raise raised[0]

    def step():
        if number() == n - 1:
            raises_here()
        context().all_reduce("sum", 1.0)

    with pytest.raises(OwnError) as caught:
        cr.MirroredStrategy(n).run(step)
    assert caught.value is raised[0]
    assert caught.value.args == ("mine", 5)
    assert notes(caught.value) == f"in replica {n - 1} of {n}, on cpu:{n - 1}"
    assert "raises_here" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("wait", [reduce_(), MERGE], ids=["all_reduce", "merge_call"])
def test_those_that_wait_are_released_at_once(wait):
    """When one replica fails, the others' all_reduce and merge_call end at once, whatever handlers they have."""
    ended = []

    def step():
        k = number()
        if k == 0:
            time.sleep(0.05)
            raise OwnError
        try:
            while True:
                try:
                    wait()
                except Exception:
                    ended.append("handled")  # must not happen: the replica would go on
        finally:
            ended.append(k)

    began = time.monotonic()
    with pytest.raises(OwnError):
        cr.MirroredStrategy(5).run(step)
    assert time.monotonic() - began < 5
    assert sorted(ended) == [1, 2, 3, 4]


def test_those_that_compute_end_at_their_next_call():
    """A replica that computes while another fails is stopped at its next call of the context; run waits for that."""
    reached = []

    def step():
        context().all_reduce("sum", 1.0)  # so that all have begun
        if number() == 0:
            raise OwnError
        time.sleep(0.2)
        reached.append("computed")
        context().all_gather(np.ones(1), 0)
        reached.append("never")

    with pytest.raises(OwnError):
        cr.MirroredStrategy(2).run(step)
    assert reached == ["computed"]


def test_the_first_failure_is_raised_and_the_others_are_named():
    """Of several failures the first by time is raised; notes name the others."""

    def step():
        k = context().all_reduce("sum", 0) + number()
        time.sleep((0.2, 0.0, 0.1)[k])
        raise (ValueError, KeyError, OwnError)[k](f"text {k}")

    with pytest.raises(KeyError) as caught:
        cr.MirroredStrategy(3).run(step)
    assert caught.value.__notes__ == [
        "in replica 1 of 3, on cpu:1",
        "replica 2 on cpu:2 failed later: OwnError: text 2",
        "replica 0 on cpu:0 failed later: ValueError: text 0",
    ]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration])
def test_exits_in_a_replica_reach_the_caller(kind):
    """SystemExit and the like, raised in a replica, are no exception to the rule."""

    def step():
        if number():
            raise kind
        context().all_reduce("sum", 1.0)

    with pytest.raises(kind) as caught:
        cr.MirroredStrategy(2).run(step)
    assert "in replica 1 of 2" in notes(caught.value)


DISAGREE = {
    "op": ([reduce_("sum"), reduce_("max")], ["all_reduce sum of 1.0", "all_reduce max of 1.0"]),
    "structure": (
        [reduce_(value={"a": 1.0}), reduce_(value={"b": 1.0})],
        [r"all_reduce sum of 1.0 \(float\) in PyTreeSpec\(\{'a': \*\}", r"PyTreeSpec\(\{'b': \*\}"],
    ),
    "kind": ([reduce_(), MERGE], ["all_reduce sum of 1.0", "merge_call of <lambda>"]),
    "gather": ([lambda: context().all_gather(np.ones(1), 0), reduce_()], ["all_gather along axis 0", "all_reduce"]),
    "axis": (
        [lambda: context().all_gather(np.ones((1, 1)), 0), lambda: context().all_gather(np.ones((1, 1)), 1)],
        ["all_gather along axis 0 of", "all_gather along axis 1 of"],
    ),
    "options": ([reduce_(), reduce_(bytes_per_pack=8)], ["all_reduce sum", "bytes_per_pack=8"]),
    "merges": ([MERGE, lambda: context().merge_call(print)], ["merge_call of <lambda>", "merge_call of print"]),
    "builtins": (
        [lambda: context().merge_call(id), lambda: context().merge_call(print)],
        ["merge_call of id", "merge_call of print"],
    ),
    "returned": ([lambda: None, reduce_()], ["has returned", "waits in all_reduce sum"]),
}


@pytest.mark.parametrize("case", DISAGREE)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("late", [0, 1])
def test_replicas_that_want_different_things_are_named_at_once(case, n, late):
    """Replicas that disagree get a MismatchError that says which wants what, without waiting for the timeout."""
    calls, words = DISAGREE[case]

    found_out = threading.Event()

    def step():
        k = number()
        if k == 2:
            found_out.wait(20)  # what is known to be wrong need not wait for it
            return
        if k == late:
            time.sleep(0.05)
        try:
            calls[k]()
        except BaseException:
            found_out.set()
            raise

    with pytest.raises(cr.MismatchError) as caught:
        cr.MirroredStrategy(n).run(step)
    text = str(caught.value)
    for k, word in enumerate(words):
        part = text[text.index(f"replica {k} on cpu:{k}") :].partition(";" if k + 1 < n else "\n")[0]
        assert re.search(word, part), part
    if n == 3:
        assert "replica 2 on cpu:2 still computes" in text
    assert len(caught.value.__notes__) == 1
    assert "in replica" in notes(caught.value)


def test_shapes_and_dtypes_that_differ_are_named():
    """Leaves that differ in shape or dtype are a MismatchError with the leaf and what each replica has."""
    strategy = cr.MirroredStrategy(3)
    ones = cr.PerReplica([np.ones(2), np.ones(3), np.ones(2)])
    words = r"(?s)leaf tree\['w'\]: .*replica 0 on cpu:0: float64\[2\]; replica 1 on cpu:1: float64\[3\]"
    with pytest.raises(cr.MismatchError, match=words) as caught:
        strategy.run(lambda x: context().all_reduce("sum", {"v": 1.0, "w": x}), args=(ones,))
    assert "test_strategy_failures.py" in "".join(traceback.format_exception(caught.value))
    kinds = cr.PerReplica([np.ones(2, "f4"), np.ones(2), np.ones(2)])
    with pytest.raises(cr.MismatchError, match=r"float32\[2\]; replica 1 on cpu:1: float64\[2\]"):
        strategy.run(lambda x: context().all_reduce("sum", x), args=(kinds,))
    with pytest.raises(cr.UnsupportedError, match="the mean of bools"):
        strategy.run(lambda: context().all_reduce("mean", np.array([True])))
    with pytest.raises(cr.ArgumentError, match=r"leaf tree\['a'\]: this is no array"):
        strategy.run(lambda: context().all_reduce("mean", {"a": "text"}))
    with pytest.raises(cr.ArgumentError, match="no such reduction"):
        strategy.run(lambda: context().all_reduce("avg", 1.0))
    with pytest.raises(cr.ArgumentError, match="gather needs an axis"):
        strategy.run(lambda: context().all_gather(np.ones(2), 1))
    with pytest.raises(cr.MismatchError, match=r"(?s)structure.*replica 1"):
        strategy.run(lambda: context().merge_call(print, args=({"a": 1.0} if number() else [1.0],)))


def test_an_error_of_merge_call_is_raised_where_it_was_called():
    """What merge_call's function raises reaches the caller with both tracebacks; no replica goes on."""
    went_on = []

    def merge(strategy):
        raise OwnError("in merge")

    def called_here():
        context().merge_call(merge)
        went_on.append(number())

    with pytest.raises(OwnError, match="in merge") as caught:
        cr.MirroredStrategy(3).run(called_here)
    lines = "".join(traceback.format_exception(caught.value))
    assert "called_here" in lines
    assert "in merge\n" in lines
    assert went_on == []
    assert notes(caught.value).startswith("in replica 0 of 3")


@pytest.mark.parametrize("of_the_call", [True, False])
def test_a_replica_that_does_not_come_is_named_after_the_timeout(of_the_call):
    """Those that wait longer than the timeout, the call's or the run's, get a StalledError that says who is missing."""
    go_on = threading.Event()

    def step():
        if number() == 1:
            go_on.wait(20)
            return
        context().all_reduce("sum", 1.0, BRIEF if of_the_call else None)

    began = time.monotonic()
    with pytest.raises(TimeoutError, match="replica 1 on cpu:1 still computes; replica 2 on cpu:2 waits in") as caught:
        cr.MirroredStrategy(3).run(step, options=None if of_the_call else BRIEF)
    assert type(caught.value) is cr.StalledError
    assert 0.3 <= time.monotonic() - began < 5
    assert "after 0.3 s still computing, and left behind: replica 1" in notes(caught.value)
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "crossreduce replica 1":
            thread.join(20)


def test_waiting_is_counted_from_when_a_replica_waits():
    """Computing alone never times out; neither do meetings that follow each other for longer than the timeout."""

    def step():
        time.sleep(0.5)
        for _ in range(4):
            context().all_reduce("sum", 1.0)
            time.sleep(0.15)
        return 1

    assert cr.MirroredStrategy(2).run(step, options=BRIEF).values == (1, 1)


def test_a_replica_that_swallows_the_stop_cannot_meet_again():
    """A replica that catches even what stops it is stopped again at each call, and run ends when it returns."""
    caught = []

    def step():
        context().all_reduce("sum", 1.0)
        if number() == 0:
            raise OwnError
        for _ in range(3):
            try:
                context().all_reduce("sum", 1.0)
            except BaseException as error:
                caught.append(type(error).__name__)

    with pytest.raises(OwnError):
        cr.MirroredStrategy(2).run(step)
    assert caught == ["Stopped"] * 3


def test_contexts_are_used_where_they_belong():
    """A context used in another replica, in a merge_call, after the run or in another thread is a ContextError."""
    strategy = cr.MirroredStrategy(2)
    contexts = {}

    def wrong_replica():
        contexts[number()] = context()
        context().all_reduce("sum", 0.0)
        contexts[1 - number()].all_reduce("sum", 1.0)

    with pytest.raises(cr.ContextError, match=r"(?s)is called where another one, or none, runs.*context of replica"):
        strategy.run(wrong_replica)
    with pytest.raises(cr.ContextError, match="outside of all replicas"):
        contexts[0].all_reduce("sum", 1.0)

    def inside_merge():
        here = context()
        here.merge_call(lambda _: here.merge_call(print))

    with pytest.raises(cr.ContextError, match="outside of all replicas"):
        strategy.run(inside_merge)

    def other_thread():
        here, errors = context(), []

        def work():
            try:
                here.all_reduce("sum", 1.0)
            except cr.ContextError as error:
                errors.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return errors[0]

    assert "outside of all replicas" in next(iter(strategy.local_results(strategy.run(other_thread))))


def test_a_replica_does_one_thing_at_a_time():
    """Two threads of one replica cannot meet the others at once; the second one's error says so."""
    errors = []

    def second(here):
        time.sleep(0.1)
        try:
            here.all_reduce("sum", 1.0)
        except cr.ContextError as error:
            errors.append(str(error))

    def step():
        here = context()
        if here.replica_id_in_sync_group == 0:
            thread = threading.Thread(target=contextvars.copy_context().run, args=(second, here))
            thread.start()
            here.all_reduce("sum", 1.0)
            thread.join()
        else:
            time.sleep(0.3)
            here.all_reduce("sum", 1.0)

    cr.MirroredStrategy(2).run(step)
    assert len(errors) == 1
    assert "a replica can do one thing at a time" in errors[0]


def test_a_thread_that_a_replica_leaves_behind_never_waits_for_ever():
    """A replica's own thread that calls when all have returned, or waits while they return, gets an error at once."""
    for _ in range(30):
        threads, errors = [], []

        def work(here, errors=errors):
            try:
                here.all_reduce("sum", 1.0)
            except (cr.ContextError, cr.MismatchError) as error:
                errors.append(error)

        def step(work=work, threads=threads):
            threads.append(threading.Thread(target=contextvars.copy_context().run, args=(work, context()), daemon=True))
            threads[-1].start()

        try:
            cr.MirroredStrategy(1).run(step)
        except cr.MismatchError as error:
            assert "replica 0 on cpu:0 has returned" in str(error)  # noqa: PT017 - or the thread was quicker
        threads[0].join(20)
        assert not threads[0].is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_meets_nobody():
    """In a child of a replica's process a call of the context is an error; nobody there would ever answer."""

    def step():
        if number() == 0:
            child = os.fork()
            if not child:
                try:
                    context().all_reduce("sum", 1.0)
                except cr.ContextError as error:
                    os._exit(7 if "a forked process has no other replicas" in str(error) else 8)
                finally:
                    os._exit(9)
            deadline = time.monotonic() + 20
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
                time.sleep(0.01)
            if not ended[0]:
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(ended[1]) == 7
        return context().all_reduce("sum", 1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of forks among threads
        assert cr.MirroredStrategy(2).run(step).values == (2, 2)


@pytest.mark.parametrize("seconds", [1e10, float("inf")])
def test_a_timeout_may_be_longer_than_a_clock_can_say(seconds):
    """Timeouts that no lock takes, infinity among them, mean what they say."""
    options = cr.CommunicationOptions(timeout_seconds=seconds)

    def step():
        time.sleep(0.05 * number())
        return context().all_reduce("sum", 1.0, options)

    assert cr.MirroredStrategy(2).run(step, options=options).values == (2, 2)


def test_an_exception_without_a_text_hides_no_other():
    """The first failure reaches the caller even where a later one cannot be printed."""

    class BrokenError(Exception):
        def __str__(self):
            raise RuntimeError

    def step():
        if context().all_reduce("sum", 0) + number():
            time.sleep(0.1)
            raise BrokenError
        raise OwnError

    with pytest.raises(OwnError) as caught:
        cr.MirroredStrategy(2).run(step)
    assert caught.value.__notes__[1] == "replica 1 on cpu:1 failed later: BrokenError"


def test_arrays_that_were_reduced_are_free_again():
    """After an all_reduce nothing holds what went into it, while the replicas compute on."""
    alive = []

    def step():
        x = np.ones(3)
        seen = weakref.ref(x)
        context().all_reduce("sum", x)
        del x
        deadline = time.monotonic() + 5  # the caller's thread may still be on its way back to sleep
        while seen() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        alive.append(seen() is not None)

    cr.MirroredStrategy(2).run(step)
    assert alive == [False, False]


def test_merge_call_takes_what_each_replica_made():
    """Functions that replicas make from the same lines, partials and methods among them, count as the same."""

    class Taker:
        def take(self, strategy, x=0):
            return strategy.num_replicas_in_sync

        __call__ = take

    def step():
        makers = (lambda s: 3, functools.partial(lambda s, x: 3, x=number()), Taker().take, Taker())
        return [context().merge_call(made) for made in makers]

    assert [x.values for x in cr.MirroredStrategy(3).run(step)] == [(3, 3, 3)] * 4


def test_nothing_is_held_after_an_error():
    """What a failed step made is freed at once: no cycle of frames keeps it."""

    class Large:
        pass

    seen = []

    def step():
        made = Large()
        seen.append(weakref.ref(made))
        context().all_reduce("sum", 1.0)
        raise OwnError

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(OwnError):
            cr.MirroredStrategy(1).run(step)
        # pytest's own record of the exception is gone with the block
        assert [ref() for ref in seen] == [None]
    finally:
        gc.enable()


def test_a_thread_that_cannot_start_ends_the_run(monkeypatch):
    """Where the system gives no more threads, those that run are stopped and the error is the system's."""
    start, started = threading.Thread.start, []

    def limited(self):
        if self.name.startswith("crossreduce"):
            started.append(self)
            if len(started) == 3:
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        cr.MirroredStrategy(4).run(lambda: context().all_reduce("sum", 1.0))


CTRL_C = """
import os, signal, sys, threading, time
import crossreduce as cr
signal.signal(signal.SIGINT, signal.default_int_handler)
def step():
    k = cr.get_replica_context().replica_id_in_sync_group
    if k == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
    if MERGE:
        cr.get_replica_context().merge_call(lambda strategy: time.sleep(20))
    cr.get_replica_context().all_reduce("sum", 1.0)
    if k == 0:
        time.sleep(20)
    print("went on")
MERGE = sys.argv[1] == "merge"
if MERGE:
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    old, os.kill = os.kill, lambda *args: None
try:
    cr.MirroredStrategy(3).run(step)
except KeyboardInterrupt:
    print([t.name for t in threading.enumerate() if t.name.startswith("crossreduce")])
"""


@pytest.mark.parametrize("where", ["wait", "merge"])
def test_ctrl_c_releases_all_threads(where):
    """KeyboardInterrupt in the caller, while it waits or while it merges, stops the replicas; none is left."""
    code = CTRL_C
    if where == "merge":
        code = code.replace("old, os.kill = os.kill, lambda *args: None", "kill = os.kill").replace(
            "        os.kill(os.getpid(), signal.SIGINT)\n", "        pass\n"
        )
    began = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", code, where], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "[]\n", ran.stderr
    assert time.monotonic() - began < 15


def test_random_failures_never_hang():
    """Whatever fails, and whenever: run returns or raises what was planned, in time, and no thread is left."""
    rng = random.Random(7)
    outcomes = set()
    for _ in range(150):
        n = rng.randint(1, 9)
        strategy = cr.MirroredStrategy(n)
        steps = rng.randint(1, 6)
        plan = {}
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            what = rng.choice(("raise", "return", "op", "tree", "merge", "shape", "swallow"))
            plan[rng.randrange(n), rng.randrange(steps)] = what
        naps = [rng.choice((0, 0, 0.002)) for _ in range(n)]

        def step(plan=plan, steps=steps, naps=naps):
            k = number()
            for at in range(steps):
                what = plan.get((k, at))
                time.sleep(naps[k])
                if what == "raise":
                    raise OwnError(k, at)
                if what == "return":
                    return at
                if what == "merge":
                    context().merge_call(lambda strategy: 1)
                try:
                    value = {"a": np.ones(3 if what == "shape" else 2)}
                    op = "max" if what == "op" else "sum"
                    context().all_reduce(op, [value] if what == "tree" else value)
                except BaseException:
                    if what != "swallow":
                        raise
            return steps

        began = time.monotonic()
        try:
            result = strategy.run(step, options=cr.CommunicationOptions(timeout_seconds=20))
        except (OwnError, cr.MismatchError) as error:
            failed = error
        else:
            failed = None
            assert len(result) == n
            harmless = {"swallow"} | (set(plan.values()) if n == 1 else set())
            # all replicas may stray alike, so that they agree
            assert set(plan.values()) <= harmless or len({k for k, _ in plan}) == n
        if type(failed) is OwnError:
            assert plan[failed.args] == "raise"
            assert f"in replica {failed.args[0]} of {n}" in notes(failed)
        elif failed:
            assert set(plan.values()) - {"raise"}
        outcomes.add(type(failed))
        assert time.monotonic() - began < 10
    assert outcomes == {OwnError, cr.MismatchError, type(None)}
