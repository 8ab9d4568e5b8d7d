"""Errors in replicas: the caller receives them with the replica named, and the other replicas end."""

import functools
import re
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from pairs import each
from replicas import OwnError, notes, number

import crossreduce as cr

context = cr.get_replica_context
pytestmark = pytest.mark.usefixtures("no_thread_stays")


def reduce_(op="sum", value=1.0, **options):
    return lambda: context().all_reduce(op, value, cr.CommunicationOptions(**options))


def gather(shape, axis):
    return lambda: context().all_gather(np.ones(shape), axis)


def merge(function):
    return lambda: context().merge_call(function)


MERGE = merge(lambda strategy: None)


ERRORS = [OwnError("mine", 5), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(1)]


@pytest.mark.parametrize(("error", "n"), each(ERRORS, [1, 2, 5]), ids=repr)
def test_an_exception_keeps_its_traceback_and_names_the_replica(error, n):
    """The caller gets the same exception, with its traceback and the replica in a note."""

    def raises_here():
        raise error

    def step():
        if number() == n - 1:
            raises_here()
        context().all_reduce("sum", 1.0)

    with pytest.raises(type(error)) as caught:
        cr.MirroredStrategy(n).run(step)
    assert caught.value is error
    assert notes(error) == f"in replica {n - 1} of {n}, on cpu:{n - 1}"
    assert "raises_here" in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("wait", [reduce_(), MERGE, gather(1, 0)], ids=["all_reduce", "merge_call", "all_gather"])
def test_other_replicas_end_at_their_next_call(wait):
    """If one replica fails, the others end in the call in which they wait, or at their next call. They cannot handle
    this as an ``Exception``, and each later call ends them again."""
    ended, failing, begun = [], threading.Event(), threading.Barrier(4)

    def step():
        k = number()
        begun.wait(100)  # a replica that has not begun when another one fails is not run
        if k == 0:
            time.sleep(0.05)
            failing.set()
            raise OwnError("own")
        if k == 1:
            failing.wait(100)  # still computes
        for _ in range(3):
            try:
                wait()
            except Exception:
                ended.append("handled")  # must not happen: the replica would continue
            except BaseException:
                ended.append(k)
        wait()
        ended.append("never")

    with pytest.raises(OwnError, match="own"):
        cr.MirroredStrategy(4).run(step)
    assert sorted(ended) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


class BrokenError(Exception):
    """An error that cannot be printed."""

    def __str__(self):
        raise RuntimeError


def test_the_first_failure_is_raised_and_the_others_are_named():
    """Of several failures, the earliest one is raised. Notes name the others, also one that cannot be printed."""
    threads, earlier = {}, {2: 1, 0: 2, 3: 0}  # replicas 1, 2, 0 and 3 fail, in this order

    def step():
        threads[number()] = threading.current_thread()
        k = context().all_reduce("sum", 0) + number()
        if k in earlier:
            threads[earlier[k]].join(100)
        raise (ValueError, KeyError, OwnError, BrokenError)[k](f"text {k}")

    with pytest.raises(KeyError) as caught:
        cr.MirroredStrategy(4).run(step)
    assert caught.value.__notes__ == [
        "in replica 1 of 4, on cpu:1",
        "replica 2 on cpu:2 failed later: OwnError: text 2",
        "replica 0 on cpu:0 failed later: ValueError: text 0",
        "replica 3 on cpu:3 failed later: BrokenError",
    ]


MISMATCHES = {
    "op": ([reduce_("sum"), reduce_("max")], ["all_reduce sum of 1.0", "all_reduce max of 1.0"]),
    "structure": (
        [reduce_(value={"a": 1.0}), reduce_(value={"b": 1.0})],
        [r"all_reduce sum of 1.0 \(float\) in PyTreeSpec\(\{'a': \*\}", r"PyTreeSpec\(\{'b': \*\}"],
    ),
    "kind": ([reduce_(), MERGE], ["all_reduce sum of 1.0", "merge_call of <lambda>"]),
    "gather": ([gather(1, 0), reduce_()], ["all_gather along axis 0", "all_reduce"]),
    "axis": ([gather((1, 1), 0), gather((1, 1), 1)], ["all_gather along axis 0 of", "all_gather along axis 1 of"]),
    "options": ([reduce_(), reduce_(bytes_per_pack=8)], ["all_reduce sum", "bytes_per_pack=8"]),
    "merges": ([MERGE, merge(print)], ["merge_call of <lambda>", "merge_call of print"]),
    "builtins": ([merge(id), merge(print)], ["merge_call of id", "merge_call of print"]),
    "returned": ([lambda: None, reduce_()], ["has returned", "waits in all_reduce sum"]),
}


@pytest.mark.parametrize(("case", "late", "n"), each(MISMATCHES, [0, 1], [3, 3, 2]))
def test_different_calls_are_listed_at_once(case, late, n):
    """Different calls raise a MismatchError that lists each replica's call, without waiting for the timeout."""
    calls, words = MISMATCHES[case]
    found_out = threading.Event()

    def step():
        k = number()
        if k == 2:
            found_out.wait(100)  # the error does not wait for this replica
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
        assert "replica 2 on cpu:2 is still computing" in text
    assert len(caught.value.__notes__) == 1


def test_wrong_arguments_of_calls_are_listed():
    """If a leaf differs between replicas, the error lists it for each replica. Other wrong arguments are errors."""
    strategy = cr.MirroredStrategy(3)
    ones = cr.PerReplica([np.ones(2), np.ones(3), np.ones(2)])
    words = r"(?s)leaf tree\['w'\]: .*replica 0 on cpu:0: float64\[2\]; replica 1 on cpu:1: float64\[3\]"
    with pytest.raises(cr.MismatchError, match=words) as caught:
        strategy.run(lambda x: context().all_reduce("sum", {"v": 1.0, "w": x}), args=(ones,))
    assert "test_strategy_failures.py" in "".join(traceback.format_exception(caught.value))
    kinds = cr.PerReplica([np.ones(2, "f4"), np.ones(2), np.ones(2)])
    for error, words, call in (
        (cr.MismatchError, r"float32\[2\]; replica 1 on cpu:1: float64\[2\]", reduce_("sum", kinds)),
        (cr.UnsupportedError, "the mean of bools", reduce_("mean", np.array([True]))),
        (cr.ArgumentError, r"leaf tree\['a'\]: this is not an array", reduce_("mean", {"a": "text"})),
        (cr.ArgumentError, "not a known reduction", reduce_("average")),
        (cr.ArgumentError, r"the op comes before the value(?s:.*)all_reduce\(.sum., value", reduce_(np.ones(2), "sum")),
        (cr.ArgumentError, "do not have this axis", gather(2, 1)),
        (cr.MismatchError, r"(?s)structure.*replica 1", lambda: context().merge_call(print, (["a"] * number(),))),
    ):
        with pytest.raises(error, match=words):
            strategy.run(call)


def test_an_error_of_merge_call_is_raised_at_the_call():
    """The caller gets the error of merge_call's function, with the call and the function in its traceback."""
    continued = []

    def failing_merge(strategy):
        raise OwnError("own")

    def called_here():
        context().merge_call(failing_merge)
        continued.append(number())

    with pytest.raises(OwnError, match="own") as caught:
        cr.MirroredStrategy(3).run(called_here)
    assert re.search("called_here[\\s\\S]*in failing_merge\n", "".join(traceback.format_exception(caught.value)))
    assert continued == []
    assert notes(caught.value).startswith("in replica 0 of 3")


def test_a_context_is_used_only_in_its_replica():
    """A context used in another replica, in a merge_call, after the run or in another thread raises a ContextError."""
    strategy, contexts = cr.MirroredStrategy(2), {}

    def wrong_replica():
        contexts[number()] = context()
        context().all_reduce("sum", 0.0)
        contexts[1 - number()].all_reduce("sum", 1.0)

    with pytest.raises(cr.ContextError, match=r"(?s)a replica that is not the current one.*context of replica"):
        strategy.run(wrong_replica)
    with pytest.raises(cr.ContextError, match="outside all replicas"):
        contexts[0].all_reduce("sum", 1.0)

    def inside_merge():
        here = context()
        here.merge_call(lambda _: here.merge_call(print))

    with pytest.raises(cr.ContextError, match="outside all replicas"):
        strategy.run(inside_merge)

    def other_thread():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(context().all_reduce, "sum", 1.0).result()

    with pytest.raises(cr.ContextError, match="outside all replicas"):
        strategy.run(other_thread)


def test_merge_call_accepts_functions_made_per_replica():
    """Each replica may pass its own function to merge_call if the same code makes them: lambdas, partials, methods."""

    class Method:
        def call(self, strategy, x=0):
            return strategy.num_replicas_in_sync

        __call__ = call

    def step():
        functions = (lambda s: 3, functools.partial(lambda s, x: 3, x=number()), Method().call, Method())
        return [context().merge_call(function) for function in functions]

    assert [x.values for x in cr.MirroredStrategy(3).run(step)] == [(3, 3, 3)] * 4
