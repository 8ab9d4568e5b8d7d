"""Topologies as JSON."""

import json
import math
from fractions import Fraction

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from test_topology_switches import MICRO, A, B, topologies

from crossreduce import ArgumentError, Link, Switch, Topology


@given(topologies())
def test_json_round_trip(topology):
    """A topology that is written and read is equal, to the last digit, and is written the same way again."""
    text = topology.to_json()
    again = Topology.from_json(text)
    assert again == topology
    assert again.to_json() == text
    assert hash(again) == hash(topology)
    mixed = Topology(topology.devices, topology.links[::-1], topology.switches)
    assert mixed.to_json() == text


def test_json_is_this_text():
    """The format is fixed: a text that is written today can be read by every later version."""
    topology = Topology([A, B], [Link(A, "x", Fraction(64, 3), MICRO), Link("x", B, 25)], [Switch("x", True)])
    text = (
        '{"format":"crossreduce.topology/1","devices":["cpu:0","cpu:1"],"switches":[["x",true]],'
        '"links":[["cpu:0","x","64/3","1/1000000"],["x","cpu:1","25","0"]]}'
    )
    assert topology.to_json() == text
    assert Topology.from_json(text) == topology


def test_json_written_by_people():
    """Numbers may be JSON numbers or decimals, a latency and the switches may be left out, and a device's name need not
    be canonical (GPU:0)."""
    text = """{"format": "crossreduce.topology/1", "devices": ["GPU:0", "cuda:1"],
               "links": [["cuda:0", "cuda:1", 25], ["cuda:1", "cuda:0", "12.5", 1e-6]], "made by": "a person"}"""
    wanted = Topology(["cuda:0", "cuda:1"], [("cuda:0", "cuda:1", 25), ("cuda:1", "cuda:0", 12.5, 1e-6)])
    assert Topology.from_json(text) == wanted


@pytest.mark.parametrize("topology", [Topology.star(3, Fraction(64, 3), MICRO), Topology.ring(2), Topology([A], [])])
def test_every_prefix_is_refused(topology):
    """A truncated text raises an ArgumentError, never another error and never a topology."""
    text = topology.to_json()
    for end in range(len(text)):
        with pytest.raises(ArgumentError, match="this text is not a topology in JSON"):
            Topology.from_json(text[:end])
    with pytest.raises(ArgumentError, match="this text is not a topology in JSON"):
        Topology.from_json(text * 2)


GOOD = json.loads(Topology([A, B], [(A, "x", 1), ("x", B, 1)], ["x"]).to_json())


def broken(**changes):
    return json.dumps(GOOD | changes)


def lacking(name):
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "3",
        "[]",
        "{}",
        '"text"',
        "nonsense",
        None,
        3,
        ["x"],
        b"\xff\xfe",
        "[" * 100_000,
        lacking("format"),
        lacking("devices"),
        lacking("links"),
        lacking("switches"),  # the links name a switch
        broken(format="crossreduce.topology/2"),
        broken(format="crossreduce.schedule/1"),
        broken(format=None),
        broken(devices=[]),
        broken(devices=3),
        broken(devices=None),
        broken(devices="cpu:0"),
        broken(devices=[A, A]),
        broken(devices=[A, 3]),
        broken(devices=[A, "foo"]),
        broken(devices=[[A], B]),
        broken(switches=None),
        broken(switches=3),
        broken(switches=["x"]),
        broken(switches=[["x"]]),
        broken(switches=[["x", 1]]),
        broken(switches=[["x", None]]),
        broken(switches=[["x", "true"]]),
        broken(switches=[[3, True]]),
        broken(switches=[["x", True, 1]]),
        broken(switches=[["x", True], ["x", False]]),
        broken(switches=[["cpu:0", True]]),
        broken(links=None),
        broken(links=3),
        broken(links=[3]),
        broken(links=[[A, "x"]]),
        broken(links=[[A]]),
        broken(links=[[A, "x", "1", "0", "0"]]),
        broken(links=[[A, "y", "1", "0"]]),
        broken(links=[[A, A, "1", "0"]]),
        broken(links=[[A, 3, "1", "0"]]),
        broken(links=[[A, "x", "1", "0"], [A, "x", "2", "0"]]),
        broken(links=[[A, "x", "0", "0"]]),
        broken(links=[[A, "x", "-1", "0"]]),
        broken(links=[[A, "x", -1, "0"]]),
        broken(links=[[A, "x", "1", -1]]),
        broken(links=[[A, "x", "1/0", "0"]]),
        broken(links=[[A, "x", "1e9", "0"]]),
        broken(links=[[A, "x", "inf", "0"]]),
        broken(links=[[A, "x", "nan", "0"]]),
        broken(links=[[A, "x", math.inf, "0"]]),
        broken(links=[[A, "x", math.nan, "0"]]),
        broken(links=[[A, "x", True, "0"]]),
        broken(links=[[A, "x", None, "0"]]),
        broken(links=[[A, "x", [1], "0"]]),
        broken(links=[[A, "x", "9" * 5000, "0"]]),
        broken(links=[[A, "x", "１", "0"]]),  # noqa: RUF001 - a digit of another script
        broken().replace('"1"', "9" * 5000),
        broken(devices={A: 1, B: 2}),
        broken(links={}),
        broken(switches=[["x", True], ["y", False]], links=["xy1"]),
    ],
)
def test_malformed_json_is_refused(text):
    """Text that is not a topology, or lacks a part of one, raises an ArgumentError, never an error of Python's own."""
    with pytest.raises(ArgumentError, match=r"topology|link|switch|device|bandwidth|latency"):
        Topology.from_json(text)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["", "x", A, "1", "1/0", "1e9"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["format", "links"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@examples(300)
@given(st.data())
def test_any_value_in_place_of_any_part(data):
    """With any value in place of any part, the text is read as a topology or raises an ArgumentError."""
    content = json.loads(json.dumps(GOOD))
    place, inside = data.draw(st.sampled_from([*GOOD])), content
    while isinstance(inside[place], list) and inside[place] and data.draw(st.booleans()):
        inside = inside[place]
        place = data.draw(st.integers(0, len(inside) - 1))
    inside[place] = data.draw(values)
    try:
        topology = Topology.from_json(json.dumps(content))
    except ArgumentError:
        return
    assert Topology.from_json(topology.to_json()) == topology
