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


TEXT = Topology([A, B], [(A, "x", 1), ("x", B, 1)], ["x"]).to_json()
GOOD = json.loads(TEXT)
# Values that are not allowed for a part of the text. Without switches, the links name an unknown one.
WRONG = {
    "format": ["crossreduce.topology/2", "crossreduce.schedule/1", None],
    "devices": [[], 3, None, "cpu:0", [A, A], [A, 3], [A, "foo"], [[A], B], {A: 1, B: 2}],
    "switches": [
        None, 3, ["x"], [["x"]], [["x", 1]], [["x", None]], [["x", "true"]], [[3, True]], [["x", True, 1]], [],
        [["x", True], ["x", False]], [["cpu:0", True]],
    ],
    "links": [
        None, 3, {}, [3], ["xy1"], [[A, "x"]], [[A]], [[A, "x", "1", "0", "0"]], [[A, "y", "1", "0"]],
        [[A, A, "1", "0"]], [[A, 3, "1", "0"]], [[A, "x", "1", "0"], [A, "x", "2", "0"]], [[A, "x", "1", -1]],
        *([[A, "x", speed, "0"]] for speed in ("0", "-1", -1, "1/0", "1e9", "inf", "nan", math.inf, math.nan, True)),
        *([[A, "x", speed, "0"]] for speed in (None, [1], "9" * 5000, "\uff11")),  # \uff11 is a digit, too
    ],
}  # fmt: skip
MALFORMED = "topology|link|switch|device|bandwidth|latency"


def test_malformed_json_is_refused():
    """Text that is not a topology, or lacks a part of one, raises an ArgumentError, never an error of Python's own and
    never a topology."""
    texts = ["null", "3", "[]", "{}", '"text"', "nonsense", None, 3, ["x"], b"\xff\xfe", "[" * 100_000, TEXT * 2]
    texts += [TEXT[:end] for end in range(len(TEXT))]
    texts += [TEXT.replace('"1"', "9" * 5000)]
    texts += [json.dumps({key: value for key, value in GOOD.items() if key != name}) for name in GOOD]
    texts += [json.dumps(GOOD | {name: value}) for name, values in WRONG.items() for value in values]
    for text in texts:
        with pytest.raises(ArgumentError, match=MALFORMED):
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
