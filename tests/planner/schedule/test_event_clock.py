"""The compiled clock: invalid arguments, and the same times as with NumPy; a lower bound of the time."""

from dataclasses import replace
from unittest import mock

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import algorithms, requests
from test_simulate import plan, wired

import crossreduce as cr
from crossreduce.kernels import native
from crossreduce.schedule import clock
from crossreduce.schedule.simulate import _least_seconds, loads_of

# Arguments of ``EventClock`` for two reads.
READS = [(0, 0, 0, -1, 0, 0, 1e-6, (), [(0, 1.0)]), (0, 0, 1, 0, 1, 0, 1e-6, (), [(0, 1.0), (1, 1.0)])]
LOADS = [{0: (1e-9, 0.0), 1: (1e-9, 0.0)}, {1: (2e-9, 1e-6)}]
CLOCK = {"reads": READS, "by_round": LOADS, "queues": [0, 1], "rounds": 2}


def changed(number, position, value):
    """Return the reads of CLOCK with another value in one of them."""
    reads = [list(read) for read in READS]
    reads[number][position] = value
    return [tuple(read) for read in reads]


def test_the_time_of_valid_arguments():
    """The arguments that the next tests change are valid."""
    assert native().EventClock(*CLOCK.values()).total(1000.0, 1, [[1e-6, 1e-6]]) == pytest.approx(1e-6 + 1e-6 + 4e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 0}, {"rounds": 1}, {"rounds": -1}, {"rounds": (1 << 31) - 1}, {"queues": [0]}, {"queues": [0, -1]},
        {"reads": changed(0, 2, 2)}, {"reads": changed(0, 2, -1)}, {"reads": changed(0, 2, (1 << 31) - 1)},
        {"reads": changed(1, 3, 1)}, {"reads": changed(1, 3, -2)}, {"reads": changed(0, 4, 1) [:1] + READS[:1]},
        {"reads": changed(0, 4, -1)}, {"reads": changed(1, 4, 2)}, {"reads": changed(0, 8, [(2, 1.0)])},
        {"reads": changed(0, 8, [(-1, 1.0)])}, {"by_round": [{0: (1e-9, 0.0)}, {2: (1e-9, 0.0)}]},
        {"by_round": [{-1: (1e-9, 0.0)}, {}]},
    ],
)  # fmt: skip
def test_invalid_clocks(change):
    """Numbers that are out of range are errors."""
    with pytest.raises(ValueError, match=r"must be|must not be|has an unknown|uses an unknown"):
        native().EventClock(*(CLOCK | change).values())


@pytest.mark.parametrize(
    ("pieces", "queues"),
    [
        (0, [[0.0] * 2]),
        (-1, [[0.0] * 2]),
        (1 << 30, [[0.0] * 3]),
        (1, []),
        (1, [[0.0]]),
        (1, [[0.0] * 3]),
        (2, [[0.0] * 2]),
    ],
)
def test_invalid_pieces_and_queues(pieces, queues):
    """The number of pieces has limits, and each queue has the seconds of each window."""
    with pytest.raises(ValueError, match=r"must be from|another number of windows|unknown queue"):
        native().EventClock(*CLOCK.values()).total(1000.0, pieces, queues)


@examples(80)
@given(st.data(), algorithms, requests(st.integers(1, 6), most_packs=3), st.integers(1, 9) | st.sampled_from([40, 300]))
def test_clocks_agree(data, algorithm, ask, pieces):
    """The compiled clock, that in NumPy and the ends of all reads give the same time. The lower bound is not above."""
    topology = data.draw(wired(ask.devices))
    schedule = plan(algorithm, ask)
    costs = cr.Costs(operation_s=data.draw(st.sampled_from([0, 1e-9, 2e-6, 1e-3])))
    nbytes = data.draw(st.integers(1, 10**9))
    clocks = clock.EventClock(loads_of(schedule.cut_into(1), topology, costs), nbytes)
    if not schedule.rounds:
        return
    compiled = clocks.total(pieces)
    assert _least_seconds(schedule, topology, nbytes) <= compiled * (1 + 1e-9)
    with mock.patch.object(clock, "_MOST_COMPILED", 0):
        assert clocks.total(pieces) == pytest.approx(compiled, rel=1e-12)
    assert max((end for *_, end in clocks.intervals(pieces)), default=0) == pytest.approx(compiled, rel=1e-12)


def test_a_detour_does_not_load_the_direct_link():
    """The lower bound counts a link only if all transfers between its devices use it, and not other routes."""
    names = [f"cpu:{k}" for k in range(3)]
    speeds = {(0, 1): 1, (0, 2): 100, (2, 1): 100}
    topology = cr.Topology(names, [(names[a], names[b], gb_per_s) for (a, b), gb_per_s in speeds.items()])
    steps = ((cr.Step(0, 1, (0,)),),)
    direct = cr.Schedule("broadcast", "forest", tuple(names), (cr.Chunk(1, (0,), (1,)),), steps)
    detour = replace(direct, routes=(cr.Route(0, 0, 1, ("cpu:2",)),))
    assert _least_seconds(direct, topology, 10**9) == cr.simulate(direct, topology, 10**9).seconds == 1
    assert _least_seconds(detour, topology, 10**9) < cr.simulate(detour, topology, 10**9).seconds == 0.01
