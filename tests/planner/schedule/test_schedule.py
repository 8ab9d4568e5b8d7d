"""Schedules are plain frozen values that can be printed, compared, hashed, written and read."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALGORITHMS, algorithms, names, requests

from crossreduce import ArgumentError, Chunk, Schedule, ScheduleError, Step
from crossreduce.planning import PLANNERS, ring

HALF = Fraction(1, 2)
WHOLE = Chunk(Fraction(1), (0, 1), (0, 1))
PAIR = ((Step(0, 0, (0, 1)),), (Step(0, 1, (0,)),))


def pair(**changes):
    parts = {
        "collective": "all_reduce",
        "algorithm": "custom",
        "devices": names(2),
        "chunks": (WHOLE,),
        "rounds": PAIR,
    }
    return Schedule(**(parts | changes))


def plan(algorithm, ask):
    return PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)


@given(algorithms, requests(most_packs=4), st.integers(1, 9))
def test_json_goes_both_ways(algorithm, ask, pieces):
    """A schedule that is written and read again is equal, and has the same hash, text and JSON."""
    schedule = dataclasses.replace(plan(algorithm, ask), pieces=pieces)
    text = schedule.to_json()
    again = Schedule.from_json(text)
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert again.to_json() == text
    assert str(again) == str(schedule)
    assert type(again.rounds[0][0] if again.rounds else Step(0, 0, (0,))) is Step
    assert pickle.loads(pickle.dumps(schedule)) == schedule


def test_the_json_format():
    """The format is fixed: every later version reads files that are written today."""
    text = (
        '{"format":"crossreduce.schedule/1","collective":"all_reduce","algorithm":"custom",'
        '"devices":["cpu:0","cpu:1"],"chunks":[["1",[0,1],[0,1]]],"rounds":[[[0,0,[0,1]]],[[0,1,[0]]]],"pieces":1}'
    )
    assert pair().to_json() == text
    assert Schedule.from_json(text) == pair()


GOOD = json.loads(pair().to_json())


def broken(**changes):
    return json.dumps(GOOD | changes)


def lacking(name):
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"text"',
        "true",
        "{}",
        "nonsense",
        pair().to_json()[:-1],
        pair().to_json() * 2,
        *map(lacking, GOOD),
        broken(format="crossreduce.schedule/2"),
        broken(format=None),
        broken(devices=3),
        broken(devices=None),
        broken(devices=[]),
        broken(chunks=[]),
        broken(chunks=3),
        broken(chunks=[[]]),
        broken(chunks=[["1", [0, 1]]]),
        broken(chunks=[["x", [0], [0]]]),
        broken(chunks=[["1/0", [0], [0]]]),
        broken(chunks=[["1", 0, 0]]),
        broken(chunks=[["1", [0], [9]]]),
        broken(chunks=[["1", [], [0]]]),
        broken(chunks=[["1", [0], []]]),
        broken(chunks=[["1", [0, 0], [0]]]),
        broken(chunks=[["1/2", [0], [0]]]),
        broken(chunks=[["2", [0], [0]], ["-1", [0], [0]]]),
        broken(chunks=[["1", [0.0], [0]]]),
        broken(chunks=[["1", ["0"], [0]]]),
        broken(chunks=[["1", [True], [0]]]),
        broken(chunks=[[None, [0], [0]]]),
        broken(rounds=3),
        broken(rounds=[3]),
        broken(rounds=[[3]]),
        broken(rounds=[[[0, 0]]]),
        broken(rounds=[[[0, 0, []]]]),
        broken(rounds=[[[1, 0, [0]]]]),
        broken(rounds=[[[-1, 0, [0]]]]),
        broken(rounds=[[[0, 2, [0]]]]),
        broken(rounds=[[[0, 0, [2]]]]),
        broken(rounds=[[[0, 0, [-1]]]]),
        broken(rounds=[[[0, 0.5, [0]]]]),
        broken(rounds=[[[0, 0, 0]]]),
        broken(rounds=[[[0, None, [0]]]]),
        broken(pieces=0),
        broken(pieces=-1),
        broken(pieces="1"),
        broken(pieces=1.0),
        broken(pieces=None),
        broken(pieces=True),
    ],
)
def test_malformed_json_raises_schedule_error(text):
    """Text that is not a schedule, or that lacks a part, raises a ScheduleError that states the fault."""
    with pytest.raises(
        ScheduleError, match=r"not a schedule in JSON|is malformed|cover the buffer|pieces must be at least 1"
    ):
        Schedule.from_json(text)


def test_faults_in_json_are_stated():
    """The error states the expected format or the parts that the text lacks, or that the argument is not a str."""
    for text, words in (
        ("{}", r'its format is not "crossreduce.schedule/1"\.'),
        ("[1]", r'its format is not "crossreduce.schedule/1"\.'),
        (
            '{"format":"crossreduce.schedule/1","rounds":[],"pieces":1}',
            "it lacks collective, algorithm, devices, chunks",
        ),
    ):
        with pytest.raises(ScheduleError, match=words):
            Schedule.from_json(text)
    for wrong in (None, 3, ["x"], Path("plan.json")):
        with pytest.raises(ArgumentError, match=r"a schedule in JSON must be text[\s\S]*read_text\(\)"):
            Schedule.from_json(wrong)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, broken(chunks=[[float("inf"), [0], [0]]]), broken(chunks=[[float("nan"), [0], [0]]])]
)
def test_hostile_json_raises_schedule_error(text):
    """Very deep nesting and shares that are infinite or NaN raise a ScheduleError, not an error of Python's own."""
    with pytest.raises(ScheduleError, match="not a schedule in JSON"):
        Schedule.from_json(text)


@pytest.mark.parametrize(
    "text", [broken(devices="ab"), broken(devices=[None, 3]), broken(collective=None), broken(algorithm=[])]
)
def test_names_in_json_are_strings(text):
    """A name that is not a string is refused; a string is not read as a list of devices."""
    with pytest.raises(ScheduleError, match="not a schedule in JSON"):
        Schedule.from_json(text)


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
    """A chunk or step with invalid numbers raises an error that names it; shares that do not add up to 1, and pieces
    below 1, raise errors, too."""
    with pytest.raises(ScheduleError, match=text):
        pair(**changes)


def test_schedules_are_frozen():
    """No part of a schedule can be assigned or deleted."""
    schedule = ring(names(3))
    for field in dataclasses.fields(schedule):
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
            setattr(schedule, field.name, ())
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field"):
            delattr(schedule, field.name)
    with pytest.raises(AttributeError, match="can't set attribute"):
        schedule.chunks[0].share = HALF
    with pytest.raises(AttributeError, match="can't set attribute"):
        schedule.rounds[0][0].dst = 1
    with pytest.raises(TypeError, match="does not support item assignment"):
        schedule.rounds[0][0] = schedule.rounds[0][1]


def test_schedules_copy_lists():
    """Lists are copied into tuples: a schedule does not change after it was verified, and can be a cache key."""
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
    assert pair() == pair()
    assert len({pair(), pair()}) == 1
    for change in (
        {"collective": "reduce"},
        {"algorithm": "other"},
        {"devices": names(3)},
        {"chunks": (Chunk(Fraction(1), (1, 0), (0, 1)),)},
        {"rounds": PAIR[::-1]},
        {"pieces": 2},
    ):
        assert pair(**change) != pair()
        assert len({pair(**change), pair()}) == 2


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


@given(algorithms, requests(most_packs=3))
def test_one_line_per_step(algorithm, ask):
    """The text contains every step, with its round, chunk, destination and sources by name."""
    schedule = plan(algorithm, ask)
    lines = [
        f"  round {r}: chunk {chunk}: {schedule.devices[dst]} <- {' + '.join(schedule.devices[src] for src in srcs)}"
        for r, steps in enumerate(schedule.rounds)
        for chunk, dst, srcs in steps
    ]
    assert str(schedule).split("\n")[1:] == lines
    assert schedule.steps == len(lines)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("n", "packs"), [(1, 1), (2, 3), (3, 1), (5, 4), (8, 1), (9, 20)])
def test_spans_cover_every_size(algorithm, n, packs):
    """Spans of equal shares are consecutive, cover a buffer of any size, and differ by at most one element."""
    schedule = PLANNERS[algorithm](names(n), packs=packs)
    assert len({chunk.share for chunk in schedule.chunks}) == 1
    for size in range(1001):
        spans = schedule.spans(size)
        assert len(spans) == len(schedule.chunks)
        assert spans[0][0] == 0
        assert spans[-1][1] == size
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        lengths = {stop - start for start, stop in spans}
        assert min(lengths) >= 0
        assert max(lengths) - min(lengths) <= 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.integers(0, 1000))
def test_spans_of_unequal_shares(weights, size):
    """Spans of unequal shares cover the buffer, and each is within one element of its share."""
    total = sum(weights)
    chunks = tuple(Chunk(Fraction(weight, total), (0,), (0,)) for weight in weights)
    spans = Schedule("broadcast", "custom", ("cpu:0",), chunks, ()).spans(size)
    assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), size]
    assert all(abs((stop - start) - chunk.share * size) < 1 for (start, stop), chunk in zip(spans, chunks, strict=True))


PRINT_ALL = """
from crossreduce import Topology
from crossreduce.planning import PLANNERS, Request, schedule_for
names = tuple(f"cpu:{k}" for k in range(7))
for planner in PLANNERS.values():
    for packs in (1, 3):
        print(planner(names, names[:4], names[2:], packs=packs, first=2).to_json())
        print(planner(names, packs=packs).to_json())
quads = [[0 if i == j else 50 if i // 4 == j // 4 else 25 for j in range(7)] for i in range(7)]
for algorithm in ("hierarchical_copy", "ring", "forest", "auto"):
    request = Request("all_reduce", names, names, algorithm, Topology.from_matrix(quads), 1 << 20, 2)
    print(schedule_for(request).to_json())
print(Topology.from_matrix(quads).without_link("cpu:0", "cpu:1").links)
"""


def test_the_same_bytes_under_every_hash_seed():
    """The same requests give byte-identical JSON in processes with different hash seeds."""
    outputs = set()
    for seed in ("0", "1", "4242"):
        ran = subprocess.run(
            [sys.executable, "-c", PRINT_ALL],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(ran.stdout)
    assert len(outputs) == 1
    assert outputs.pop().count("crossreduce.schedule/1") == 4 * len(PLANNERS) + 4


PICKLE = """
import pickle, sys
from crossreduce import Schedule, Topology
from crossreduce.planning import ring
made = ring(["cpu:0", "cpu:1", "cpu:2"]), Topology.ring(3)
if sys.argv[1] == "write":
    assert len({*made}) == 2  # they have been hashed, like cache keys
    sys.stdout.write(pickle.dumps(made).hex())
else:
    read = pickle.loads(bytes.fromhex(sys.stdin.read()))
    print(read == made, [hash(a) == hash(b) for a, b in zip(read, made)])
"""


def test_unpickled_values_are_equal_cache_keys():
    """A schedule and a topology unpickled from another process equal those made here, and have the same hashes."""
    text = ""
    for seed, what in (("1", "write"), ("2", "read")):
        command = [sys.executable, "-c", PICKLE, what]
        env = os.environ | {"PYTHONHASHSEED": seed}
        text = subprocess.run(command, env=env, input=text, capture_output=True, text=True, check=True).stdout
    assert text.strip() == "True [True, True]"
