"""Routes of a schedule: which switches a chunk passes where the topology's own way is not the one to take."""

import json
import pickle
from dataclasses import replace
from fractions import Fraction

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import run_on
from strategies import algorithms, names, requests

from crossreduce import Chunk, Route, Schedule, ScheduleError, Step, verify
from crossreduce.frameworks.null import NullFramework
from crossreduce.planning import PLANNERS, ring

BARE = Schedule(
    "all_reduce",
    "by hand",
    names(2),
    (Chunk(Fraction(1), (0, 1), (0, 1)),),
    ((Step(0, 0, (0, 1)),), (Step(0, 1, (0,)),)),
)
BACK, FORTH = Route(0, 1, 0, ("nvswitch",)), Route(0, 0, 1, ("nic0", "spine", "nic1"))
ROUTED = replace(BARE, routes=(BACK, FORTH))

nodes = st.sampled_from(["nvswitch", "host0/nic3", "spine#1", "cpu:7"])


@st.composite
def routed(draw):
    """Draw a planner's schedule with routes for some of its chunks."""
    ask = draw(requests(st.integers(2, 6), most_packs=3))
    planner = PLANNERS[draw(algorithms)]
    schedule = planner(ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)
    n = len(schedule.devices)
    ends = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda pair: pair[0] != pair[1])
    when = st.none() | st.integers(0, max(0, len(schedule.rounds) - 1)) if schedule.rounds else st.none()
    key = st.tuples(st.integers(0, len(schedule.chunks) - 1), ends, when)
    keys = draw(st.lists(key, max_size=6, unique=True))
    through = st.lists(nodes, min_size=1, max_size=3).map(tuple)
    return replace(schedule, routes=tuple(Route(chunk, *pair, draw(through), r) for chunk, pair, r in keys))


@given(routed())
def test_json_goes_both_ways(schedule):
    """A schedule with routes that is written and read again is equal, hashes alike and is written alike."""
    text = schedule.to_json()
    again = Schedule.from_json(text)
    assert again == schedule
    assert again.routes == schedule.routes
    assert all(type(route) is Route for route in again.routes)
    assert hash(again) == hash(schedule)
    assert again.to_json() == text
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert hash(copy) == hash(schedule)


@given(routed())
def test_text_without_routes_is_what_it_was(schedule):
    """Without routes the text has no word of them, as before there were any; with them they stand at its end."""
    text, bare = schedule.to_json(), replace(schedule, routes=()).to_json()
    assert "routes" not in bare
    routes = json.dumps(
        [route if route.round is not None else route[:4] for route in schedule.routes], separators=(",", ":")
    )
    assert text == (bare[:-1] + f',"routes":{routes}}}' if schedule.routes else bare)
    assert list(json.loads(bare)) == ["format", "collective", "algorithm", "devices", "chunks", "rounds", "pieces"]


def test_json_is_this_text():
    """The format is fixed, with routes and without: what was written before there were routes is read as before."""
    old = (
        '{"format":"crossreduce.schedule/1","collective":"all_reduce","algorithm":"by hand",'
        '"devices":["cpu:0","cpu:1"],"chunks":[["1",[0,1],[0,1]]],"rounds":[[[0,0,[0,1]]],[[0,1,[0]]]],"pieces":1}'
    )
    assert BARE.to_json() == old
    assert Schedule.from_json(old) == BARE
    new = old[:-1] + ',"routes":[[0,1,0,["nvswitch"]],[0,0,1,["nic0","spine","nic1"]]]}'
    assert ROUTED.to_json() == new
    assert Schedule.from_json(new) == ROUTED
    assert Schedule.from_json(old[:-1] + ',"routes":[]}') == BARE


def test_every_prefix_is_refused():
    """A text that is cut off anywhere is a ScheduleError, never another error and never a schedule."""
    text = ROUTED.to_json()
    for end in range(len(text)):
        with pytest.raises(ScheduleError, match="no schedule in JSON"):
            Schedule.from_json(text[:end])


@pytest.mark.parametrize(
    "routes",
    [
        None,
        3,
        True,
        "x",
        [3],
        [None],
        [[]],
        [[0, 0, 1]],
        [[0, 0, 1, ["x"], 0, 0]],
        [[0, 0, 1, ["x"], None]],
        [[0, 0, 1, ["x"], 2]],
        [[0, 0, 1, ["x"], -1]],
        [[0, 0, 1, ["x"], True]],
        [[0, 0, 1, ["x"], "0"]],
        [[0, 0, 1, "x"]],
        [[0, 0, 1, {"x": 1}]],
        [[0, 0, 1, None]],
        [[0, 0, 1, [3]]],
        [[0, 0, 1, [None]]],
        [[0, 0, 1, [["x"]]]],
        [[0, 0, 1, []]],
        [[0, 0, 0, ["x"]]],
        [[0, 0, 2, ["x"]]],
        [[0, -1, 1, ["x"]]],
        [[1, 0, 1, ["x"]]],
        [[-1, 0, 1, ["x"]]],
        [["0", 0, 1, ["x"]]],
        [[0, 0.0, 1, ["x"]]],
        [[0, False, True, ["x"]]],
        [[0, None, 1, ["x"]]],
        [[0, 0, 1, ["x"]], [0, 0, 1, ["x"]]],
        [[0, 0, 1, ["x"]], [0, 0, 1, ["y"]]],
        [[0, 0, 1, ["x"], 1], [0, 0, 1, ["y"], 1]],
        {},
        "",
    ],
)
def test_malformed_routes_are_refused(routes):
    """Routes in a text that are none are a ScheduleError, never Python's own error."""
    with pytest.raises(ScheduleError, match=r"no schedule in JSON|a route is malformed|one route between two devices"):
        Schedule.from_json(json.dumps(json.loads(BARE.to_json()) | {"routes": routes}))


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        ((Route(1, 0, 1, ("x",)),), r"a route is malformed[\s\S]*chunk=1[\s\S]*devices by their numbers, 0 to 1"),
        ((Route(-1, 0, 1, ("x",)),), "a route is malformed"),
        ((Route(0, 0, 2, ("x",)),), "a route is malformed"),
        ((Route(0, -1, 0, ("x",)),), "a route is malformed"),
        ((Route(0, 1, 1, ("x",)),), "a route is malformed"),
        ((Route(0, 0, 1, ()),), "a route is malformed"),
        ((Route(0, 0, 1, ("x",), 2),), r"a route is malformed[\s\S]*round=2"),
        ((Route(0, 0, 1, ("x",), -1),), "a route is malformed"),
        ((BACK, FORTH, BACK), "a chunk has one route between two devices"),
        ((BACK, BACK._replace(through=("other",))), "a chunk has one route between two devices"),
        ((Route(0, 0, 1, "bus"),), "a route is malformed"),
        ((Route(0, 0, 1, (3,)),), "a route is malformed"),
    ],
)
def test_malformed_routes_cannot_be_made(routes, text):
    """A route to itself, through nothing, of no chunk or device, or a second one for the same way is refused."""
    with pytest.raises(ScheduleError, match=text):
        replace(BARE, routes=routes)


def test_routes_of_several_chunks():
    """Each chunk has its own route between the same devices, and one each way."""
    schedule = ring(names(3), packs=2)
    routes = tuple(Route(chunk, *ends, (f"bus{chunk}",)) for chunk in range(6) for ends in ((0, 1), (1, 0)))
    assert replace(schedule, routes=routes).routes == routes


def test_a_round_may_have_a_route_of_its_own():
    """A route for one round is for that round only; one without is for all others; both may stand side by side."""
    schedule = ring(names(3))
    once, ever = Route(0, 1, 2, ("a",), 2), Route(0, 1, 2, ("b", "c"))
    both = replace(schedule, routes=(once, ever))
    assert [both.through(r, 0, 1, 2) for r in range(4)] == [("b", "c"), ("b", "c"), ("a",), ("b", "c")]
    assert both.through(2, 0, 2, 1) is both.through(2, 1, 1, 2) is None
    alone = replace(schedule, routes=(once,))
    assert [alone.through(r, 0, 1, 2) for r in range(4)] == [None, None, ("a",), None]
    assert both.to_json().endswith('"routes":[[0,1,2,["a"],2],[0,1,2,["b","c"]]]}')
    assert both != alone


def test_routes_count_for_equality():
    """Schedules that differ in their routes differ, and so do most of their hashes."""
    assert ROUTED != BARE
    assert replace(BARE, routes=(FORTH, BACK)) != ROUTED
    assert replace(ROUTED, routes=()) == BARE
    assert replace(BARE, routes=[list(BACK), [0, 0, 1, ["nic0", "spine", "nic1"]]]) == ROUTED
    assert len({BARE, ROUTED, replace(BARE, routes=(BACK,)), replace(BARE, routes=(FORTH,))}) == 4


def test_a_schedule_made_of_lists_does_not_change_with_them():
    """Routes given as lists are copied."""
    through = ["nvswitch"]
    routes = [[0, 1, 0, through]]
    schedule = replace(BARE, routes=routes)
    through.append("other")
    routes.clear()
    assert schedule.routes == (BACK,)
    assert str(schedule) == str(BARE)


@settings(max_examples=50)
@given(routed())
def test_results_do_not_depend_on_routes(schedule):
    """A schedule with routes verifies, gives the right sums, and copies and adds what it does without them."""
    verify(schedule)
    assert oracle.right(schedule)
    counts = []
    for one in (schedule, replace(schedule, routes=())):
        null = NullFramework()
        flats = [null.zeros((50,), "float32", one.devices[source]) for source in one.chunks[0].sources]
        run_on(null, one, "sum", flats, 50, "float32")
        counts.append(null.counts)
    assert counts[0] == counts[1]
