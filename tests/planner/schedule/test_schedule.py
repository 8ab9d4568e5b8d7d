"""Schedules are plain frozen values that can be printed, compared, hashed, written and read."""

import json
import pickle
from fractions import Fraction
from pathlib import Path

import pytest
from command_line import run_python
from hypothesis import given
from hypothesis import strategies as st
from strategies import names

from crossreduce import ArgumentError, Chunk, Schedule, ScheduleError, Step, Topology
from crossreduce.planning import ring

HALF = Fraction(1, 2)
WHOLE = Chunk(Fraction(1), (0, 1), (0, 1))
PAIR = ((Step(0, 0, (0, 1)),), (Step(0, 1, (0,)),))


def pair(**changes):
    parts = {"collective": "all_reduce", "algorithm": "custom", "devices": names(2), "chunks": (WHOLE,), "rounds": PAIR}
    return Schedule(**(parts | changes))


GOOD = json.loads(pair().to_json())

# For each key of the JSON text, values that are not allowed.
WRONG = {
    "format": ["crossreduce.schedule/2", None],
    "collective": [None],
    "algorithm": [[]],
    "devices": [3, None, [], "ab", [None, 3]],
    "chunks": [
        [], 3, [[]], [["1", [0, 1]]], [["x", [0], [0]]], [["1/0", [0], [0]]], [["1", 0, 0]], [["1", [0], [9]]],
        [["1", [], [0]]], [["1", [0], []]], [["1", [0, 0], [0]]], [["1/2", [0], [0]]],
        [["2", [0], [0]], ["-1", [0], [0]]], [["1", [0.0], [0]]], [["1", ["0"], [0]]], [["1", [True], [0]]],
        [[None, [0], [0]]], [[float("inf"), [0], [0]]], [[float("nan"), [0], [0]]],
    ],
    "rounds": [
        3, [3], [[3]], [[[0, 0]]], [[[0, 0, []]]], [[[1, 0, [0]]]], [[[-1, 0, [0]]]], [[[0, 2, [0]]]], [[[0, 0, [2]]]],
        [[[0, 0, [-1]]]], [[[0, 0.5, [0]]]], [[[0, 0, 0]]], [[[0, None, [0]]]],
    ],
    "pieces": [0, -1, "1", 1.0, None, True],
}  # fmt: skip
MALFORMED = "not a schedule in JSON|is malformed|cover the buffer|pieces must be at least 1"


def test_malformed_json_raises_schedule_error():
    """Text that is not a schedule in JSON raises a ScheduleError, and not an error of Python's own."""
    text = pair().to_json()
    texts = ["", "{", "[]", "null", "3", '"text"', "true", "{}", "nonsense", text[:-1], text * 2, "[" * 100_000]
    texts += [json.dumps({key: value for key, value in GOOD.items() if key != name}) for name in GOOD]
    texts += [json.dumps(GOOD | {name: value}) for name, values in WRONG.items() for value in values]
    for wrong in texts:
        with pytest.raises(ScheduleError, match=MALFORMED):
            Schedule.from_json(wrong)


def test_faults_in_json_are_stated():
    """The error states the expected format, or the keys that the text lacks, or that the argument is not text."""
    for text, words in (
        ("{}", r'its format is not "crossreduce.schedule/1"\.'),
        ("[1]", r'its format is not "crossreduce.schedule/1"\.'),
        ('{"format":"crossreduce.schedule/1","rounds":[],"pieces":1}', "lacks collective, algorithm, devices, chunks"),
    ):
        with pytest.raises(ScheduleError, match=words):
            Schedule.from_json(text)
    for wrong in (None, 3, ["x"], Path("plan.json")):
        with pytest.raises(ArgumentError, match=r"a schedule in JSON must be text[\s\S]*read_text\(\)"):
            Schedule.from_json(wrong)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"chunks": (Chunk(Fraction(1), (0, 2), (0,)),)}, r"chunk 0 is malformed[\s\S]*0 to 1"),
        ({"chunks": (Chunk(Fraction(1), (0, 0), (0,)),)}, "chunk 0 is malformed"),
        ({"chunks": (Chunk(HALF, (0,), (0,)), Chunk(HALF, (0,), (-1,)))}, "chunk 1 is malformed"),
        ({"chunks": (Chunk(Fraction(2), (0,), (0,)), Chunk(Fraction(-1), (0,), (0,)))}, "chunk 1 is malformed"),
        ({"chunks": (Chunk(HALF, (0,), (0,)),)}, r"shares must add up to 1[\s\S]*shares 1/2"),
        ({"chunks": ()}, "shares none"),
        ({"rounds": ((Step(0, 0, (0, 1)),), (Step(0, 0, (1,)), Step(1, 0, (0,))))}, "round 1, step 1 is malformed"),
        ({"rounds": ((Step(0, 2, (0,)),),)}, "round 0, step 0 is malformed"),
        ({"rounds": ((Step(0, 0, ()),),)}, "round 0, step 0 is malformed"),
        ({"rounds": ((Step(0, 0, (0, 5)),),)}, "round 0, step 0 is malformed"),
        ({"pieces": 0}, r"pieces must be at least 1[\s\S]*given: 0"),
    ],
)
def test_malformed_schedules_are_refused(changes, text):
    """Invalid numbers in a chunk or step, shares that do not add up, and pieces below 1 raise errors."""
    with pytest.raises(ScheduleError, match=text):
        pair(**changes)


def test_schedules_copy_lists():
    """A schedule copies lists into tuples, so it never changes after it is made, and can be a cache key."""
    rounds = [[Step(0, 0, [0, 1])], [Step(0, 1, [0])]]
    schedule = pair(devices=list(names(2)), chunks=[Chunk(Fraction(1), [0, 1], [0, 1])], rounds=rounds)
    before = schedule.to_json()
    rounds.append([Step(0, 0, [1])])
    rounds[0].clear()
    assert schedule.to_json() == before
    assert hash(schedule) == hash(pair())
    assert schedule == pair()


def test_equality_is_by_every_field():
    """Schedules are equal if and only if all fields are equal."""
    changes = [{"collective": "reduce"}, {"algorithm": "other"}, {"devices": names(3)}, {"rounds": PAIR[::-1]}]
    changes += [{"chunks": (Chunk(Fraction(1), (1, 0), (0, 1)),)}, {"pieces": 2}, {}]
    different = {pair(**change) for change in changes}
    assert len(different) == len(changes)
    assert pair() in different


def test_printing():
    """The text of a schedule is a head with counts and one line per step, in order."""
    assert str(pair()) == (
        "all_reduce custom: 2 devices, 1 chunk, 2 rounds, 2 steps\n"
        "  round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1\n"
        "  round 1: chunk 0: cpu:1 <- cpu:0"
    )
    alone = Schedule("broadcast", "custom", ("cuda:0",), (Chunk(Fraction(1), (0,), (0,)),), ())
    assert str(alone) == "broadcast custom: 1 device, 1 chunk, 0 rounds, 0 steps"
    assert alone.steps == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.integers(0, 1000))
def test_spans_of_unequal_shares(weights, size):
    """Spans of unequal shares cover the buffer, and each is within one element of its share."""
    total = sum(weights)
    chunks = tuple(Chunk(Fraction(weight, total), (0,), (0,)) for weight in weights)
    spans = Schedule("broadcast", "custom", ("cpu:0",), chunks, ()).spans(size)
    assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), size]
    assert all(abs((stop - start) - chunk.share * size) < 1 for (start, stop), chunk in zip(spans, chunks, strict=True))


PICKLE = """
import pickle, sys
from crossreduce import Schedule, Topology
from crossreduce.planning import ring
made = ring(["cpu:0", "cpu:1", "cpu:2"]), Topology.ring(3)
read = pickle.loads(bytes.fromhex(sys.argv[1]))
print(read == made, [hash(a) == hash(b) for a, b in zip(read, made)])
"""


def test_unpickled_values_are_equal_cache_keys():
    """A schedule and a topology that another process unpickles equal those made there, and have the same hashes."""
    made = ring(names(3)), Topology.ring(3)
    assert len({*made}) == 2  # this hashes both, as a cache does, before they are pickled
    ran = run_python(PICKLE, pickle.dumps(made).hex(), PYTHONHASHSEED="2")
    assert ran.stdout.strip() == "True [True, True]", ran.stderr
