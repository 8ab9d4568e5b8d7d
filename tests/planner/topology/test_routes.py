"""Routes of a schedule: the switches and devices that a chunk passes if it does not take the route of the topology."""

import json
import pickle
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import algorithms, names, requests

from crossreduce import Chunk, Route, Schedule, ScheduleError, Step
from crossreduce.planning import PLANNERS, ring

PAIR = ((Step(0, 0, (0, 1)),), (Step(0, 1, (0,)),))
BARE = Schedule("all_reduce", "custom", names(2), (Chunk(Fraction(1), (0, 1), (0, 1)),), PAIR)
BACK, FORTH = Route(0, 1, 0, ("nvswitch",)), Route(0, 0, 1, ("nic0", "spine", "nic1"))
ROUTED = replace(BARE, routes=(BACK, FORTH))

nodes = st.sampled_from(["nvswitch", "host0/nic3", "spine#1", "cpu:7"])


@st.composite
def routed(draw):
    """Draw a planner's schedule with routes for some of its chunks."""
    request = draw(requests(st.integers(2, 6), most_packs=3))
    planner, (devices, sources, destinations) = PLANNERS[draw(algorithms)], request[:3]
    schedule = planner(devices, sources, destinations, packs=request.packs, first=request.first)
    n = len(schedule.devices)
    ends = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda pair: pair[0] != pair[1])
    when = st.none() | st.integers(0, max(0, len(schedule.rounds) - 1)) if schedule.rounds else st.none()
    key = st.tuples(st.integers(0, len(schedule.chunks) - 1), ends, when)
    keys = draw(st.lists(key, max_size=6, unique=True))
    through = st.lists(nodes, min_size=1, max_size=3).map(tuple)
    return replace(schedule, routes=tuple(Route(chunk, *pair, draw(through), r) for chunk, pair, r in keys))


@given(routed(), st.integers(1, 9))
def test_json_round_trip(schedule, pieces):
    """A schedule that is written and read is equal in every way. Its routes are the last part of the JSON."""
    schedule = replace(schedule, pieces=pieces)
    text, bare = schedule.to_json(), replace(schedule, routes=()).to_json()
    for again in (Schedule.from_json(text), pickle.loads(pickle.dumps(schedule))):
        assert again == schedule
        assert again.routes == schedule.routes
        assert all(type(route) is Route for route in again.routes)
        assert type(again.rounds[0][0] if again.rounds else Step(0, 0, (0,))) is Step
        assert hash(again) == hash(schedule)
        assert again.to_json() == text
        assert str(again) == str(schedule)
    assert list(json.loads(bare)) == ["format", "collective", "algorithm", "devices", "chunks", "rounds", "pieces"]
    routes = [route if route.round is not None else route[:4] for route in schedule.routes]
    listed = json.dumps(routes, separators=(",", ":"))
    assert text == (bare[:-1] + f',"routes":{listed}}}' if routes else bare)


def test_json_is_this_text():
    """The format is fixed: texts without a list of routes, as the first version wrote them, can still be read."""
    old = (
        '{"format":"crossreduce.schedule/1","collective":"all_reduce","algorithm":"custom",'
        '"devices":["cpu:0","cpu:1"],"chunks":[["1",[0,1],[0,1]]],"rounds":[[[0,0,[0,1]]],[[0,1,[0]]]],"pieces":1}'
    )
    assert BARE.to_json() == old
    assert Schedule.from_json(old) == BARE
    new = old[:-1] + ',"routes":[[0,1,0,["nvswitch"]],[0,0,1,["nic0","spine","nic1"]]]}'
    assert ROUTED.to_json() == new
    assert Schedule.from_json(new) == ROUTED
    assert Schedule.from_json(old[:-1] + ',"routes":[]}') == BARE


ROUTES = [
    None, 3, True, "x", [3], [None], [[]], {}, "", [[0, 0, 1]], [[0, 0, 1, ["x"], 0, 0]], [[0, 0, 1, ["x"], None]],
    [[0, 0, 1, ["x"], 2]], [[0, 0, 1, ["x"], -1]], [[0, 0, 1, ["x"], True]], [[0, 0, 1, ["x"], "0"]], [[0, 0, 1, "x"]],
    [[0, 0, 1, {"x": 1}]], [[0, 0, 1, None]], [[0, 0, 1, [3]]], [[0, 0, 1, [None]]], [[0, 0, 1, [["x"]]]],
    [[0, 0, 1, []]], [[0, 0, 0, ["x"]]], [[0, 0, 2, ["x"]]], [[0, -1, 1, ["x"]]], [[1, 0, 1, ["x"]]],
    [[-1, 0, 1, ["x"]]], [["0", 0, 1, ["x"]]], [[0, 0.0, 1, ["x"]]], [[0, False, True, ["x"]]], [[0, None, 1, ["x"]]],
    [[0, 0, 1, ["x"]], [0, 0, 1, ["x"]]], [[0, 0, 1, ["x"]], [0, 0, 1, ["y"]]],
    [[0, 0, 1, ["x"], 1], [0, 0, 1, ["y"], 1]],
]  # fmt: skip
MALFORMED = "this text is not a schedule in JSON|a route is malformed|only one route between two devices"


@pytest.mark.parametrize("routes", ROUTES, ids=json.dumps)
def test_malformed_routes_are_refused(routes):
    """Malformed routes in a text raise a ScheduleError, never an error of Python's own."""
    with pytest.raises(ScheduleError, match=MALFORMED):
        Schedule.from_json(json.dumps(json.loads(BARE.to_json()) | {"routes": routes}))


def test_truncated_texts_are_refused():
    """A truncated text of a schedule with routes raises a ScheduleError."""
    text = ROUTED.to_json()
    for end in range(len(text)):
        with pytest.raises(ScheduleError, match="this text is not a schedule in JSON"):
            Schedule.from_json(text[:end])


def test_malformed_routes_cannot_be_made():
    """A Route with an invalid field, or a second Route of the same transfer, raises a ScheduleError."""
    twice, malformed = "a chunk can have only one route between two devices in a round", "a route is malformed"
    for routes, text in (
        ((Route(1, 0, 1, ("x",)),), rf"{malformed}[\s\S]*chunk=1[\s\S]*device numbers from 0 to 1"),
        *(((Route(0, 0, 1, through),), malformed) for through in ((), "bus", (3,))),
        ((Route(0, 0, 1, ("x",), 2),), rf"{malformed}[\s\S]*round=2"),
        ((BACK, FORTH, BACK), twice),
        ((BACK, BACK._replace(through=("other",))), rf"{twice}[\s\S]*'other'"),
    ):
        with pytest.raises(ScheduleError, match=text):
            replace(BARE, routes=routes)


def test_a_round_may_have_its_own_route():
    """A route with a round applies to that round, and one without a round to all other rounds. Neither applies to the
    opposite direction or to another chunk."""
    schedule = ring(names(3))
    once, ever = Route(0, 1, 2, ("a",), round=2), Route(0, 1, 2, ("b", "c"))  # of chunk 0, from device 1 to 2
    both = replace(schedule, routes=(once, ever))
    assert [both.through(r, 0, 1, 2) for r in range(4)] == [("b", "c"), ("b", "c"), ("a",), ("b", "c")]
    assert both.through(2, 0, 2, 1) is both.through(2, 1, 1, 2) is None
    alone = replace(schedule, routes=(once,))
    assert [alone.through(r, 0, 1, 2) for r in range(4)] == [None, None, ("a",), None]
    assert both.to_json().endswith('"routes":[[0,1,2,["a"],2],[0,1,2,["b","c"]]]}')


def test_routes_count_for_equality():
    """Schedules are equal only if they have equal routes in the same order. Routes given as lists become tuples. The
    str of a schedule omits its routes."""
    assert ROUTED != BARE
    assert replace(BARE, routes=(FORTH, BACK)) != ROUTED
    assert replace(ROUTED, routes=()) == BARE
    assert replace(BARE, routes=[list(BACK), [0, 0, 1, ["nic0", "spine", "nic1"]]]) == ROUTED
    assert len({BARE, ROUTED, replace(BARE, routes=(BACK,)), replace(BARE, routes=(FORTH,))}) == 4
    assert str(ROUTED) == str(BARE)
