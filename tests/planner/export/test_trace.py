"""``to_chrome_trace`` writes the transfers of a simulation as events, with the times of the simulation."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import algorithms, names, requests

import crossreduce as cr
from crossreduce import ArgumentError, Chunk, PlanError, Route, Schedule, Step, Topology, simulate
from crossreduce.export.formats import trace
from crossreduce.export.formats.trace import to_chrome_trace
from crossreduce.planning import PLANNERS, direct, one_device, ring
from crossreduce.schedule import GeneratedSchedule, timeline

MICRO = Fraction(1, 10**6)


def read(*args, **options):
    """Return a trace's transfers (with the link and the end of each), its ticks, and its other data."""
    content = json.loads(to_chrome_trace(*args, **options))
    events = content["traceEvents"]
    process = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    thread = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    transfers = [event for event in events if event.get("cat") == "transfer"]
    for transfer in transfers:
        transfer["link"] = process[transfer["pid"]].removesuffix(" sends"), thread[transfer["tid"]].removeprefix("to ")
        transfer["end"] = transfer["ts"] + transfer["dur"]
    return transfers, [event for event in events if event.get("cat") == "tick"], content["otherData"]


@st.composite
def runs(draw):
    """Draw a planner's schedule in several pieces and a topology with its devices, with or without switches."""
    ask = draw(requests(st.integers(1, 5), most_packs=2))
    planner = PLANNERS[draw(algorithms)]
    schedule = planner(ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)
    make = draw(st.sampled_from([Topology.full_mesh, Topology.ring, Topology.star]))
    topology = make(ask.devices, draw(st.sampled_from([1, 25, 450])), draw(st.sampled_from([0, 1e-6, Fraction(1, 3)])))
    return replace(schedule, pieces=draw(st.integers(1, 6))), topology


@examples(100)
@given(runs(), st.integers(0, 10**9))
def test_events_have_the_times_of_the_simulation(run, nbytes):
    """The ticks are those of the simulation. Each piece of a transfer has one event per link. The events of a link last
    as long as its busy time in total, and do not overlap. Each is within the time that ``timeline`` gives its transfer,
    after the latency of the route. None ends after the simulation."""
    schedule, topology = run
    done = simulate(schedule, topology, nbytes)
    transfers, ticks, other = read(schedule, topology, nbytes)
    close = {"rel": 1e-9, "abs": 2e-6}  # microseconds, which are rounded to picoseconds
    starts = [1e6 * start for start in accumulate(done.ticks, initial=0.0)]
    assert [tick["ts"] for tick in ticks] == pytest.approx(starts[:-1], **close)
    assert [tick["dur"] for tick in ticks] == pytest.approx([1e6 * tick for tick in done.ticks], **close)
    busy, rows = Counter(), defaultdict(list)
    for transfer in transfers:
        busy[transfer["link"]] += transfer["dur"]
        rows[transfer["tid"]].append(transfer)
    moved, events = defaultdict(list), 0
    for move in timeline(schedule, topology, nbytes):
        events += len(move.links) if nbytes else 0
        for pair in move.links:
            moved[pair, move.round, move.piece, move.chunk, move.src, move.dst].append(move)
    for transfer in transfers:
        args = transfer["args"]
        chunk = int(transfer["name"].removeprefix("chunk "))
        (move,) = moved[transfer["link"], args["round"], args["piece"], chunk, args["from"], args["to"]]
        slack = 1e-9 * 1e6 * move.end + 2e-6
        assert transfer["ts"] >= 1e6 * (move.start + move.latency_s) - slack
        assert transfer["end"] <= 1e6 * move.end + slack
    assert len(transfers) == events
    due = {link: 1e6 * seconds for link, seconds in done.busy.items() if seconds}
    assert busy == pytest.approx(due, rel=1e-9, abs=2e-6 * (len(transfers) + 1))
    for row in rows.values():
        for before, after in pairwise(row):  # transfers are listed in the order of time
            assert after["ts"] >= before["end"] - 1e-6
    assert max((transfer["end"] for transfer in transfers), default=0.0) <= 1e6 * done.seconds * (1 + 1e-9) + 2e-6
    assert (other["seconds"], other["bytes"], other["pieces"]) == (done.seconds, nbytes, schedule.pieces)
    assert other["pieces_left_out"] == 0


def test_a_pipeline_of_two_pieces():
    """In a chain of two links, the second piece is on the first link while the first piece is on the second link. A
    piece takes 4 us on the first link (latency 1 us), and 2 us on the second one (latency 2 us)."""
    devices, steps = names(3), ((Step(0, 1, (0,)),), (Step(0, 2, (1,)),))
    chain = Schedule("broadcast", "chain", devices, (Chunk(Fraction(1), (0,), (0, 1, 2)),), steps, 2)
    topology = Topology(devices, [("cpu:0", "cpu:1", 1, MICRO), ("cpu:1", "cpu:2", 2, 2 * MICRO)])
    transfers, ticks, _ = read(chain, topology, 8000)
    times = [(one["link"][0], one["args"]["piece"], one["ts"], one["dur"]) for one in transfers]  # in us
    assert times == [("cpu:0", 0, 1, 4), ("cpu:0", 1, 6, 4), ("cpu:1", 0, 7, 2), ("cpu:1", 1, 12, 2)]
    assert [(tick["name"], tick["ts"], tick["dur"], tick["args"]["rounds"]) for tick in ticks] == [
        ("tick 0", 0, 5, "0 to 0"), ("tick 1", 5, 5, "0 to 1"), ("tick 2", 10, 4, "1 to 1"),
    ]  # fmt: skip


def test_links_and_routes():
    """If seven devices send to one device through a switch, the last link carries the transfers one after the other. A
    transfer for which the schedule has a route through a switch uses the links of this switch."""
    topology = Topology.star(8, 1)
    transfers, _, _ = read(one_device(topology.devices, destinations=["cpu:0"]), topology, 1000)
    last = [one for one in transfers if one["link"] == ("switch", "cpu:0")]
    due = [(k, k + 1, f"cpu:{k + 1}") for k in range(7)]  # start, end (each takes 1 us), sender
    assert [(one["ts"], one["end"], one["args"]["from"]) for one in last] == due
    links = [("cpu:0", "cpu:1", 1), ("cpu:1", "cpu:0", 1), ("cpu:0", "bus", 1), ("bus", "cpu:1", 1)]
    routed = replace(direct(names(2)), routes=(Route(1, 0, 1, ("bus",), 0),))
    transfers, _, _ = read(routed, Topology(names(2), links, ["bus"]), 100)
    first = {transfer["link"] for transfer in transfers if transfer["args"]["round"] == 0}
    assert first == {("cpu:0", "bus"), ("bus", "cpu:1"), ("cpu:1", "cpu:0")}


def test_it_is_the_trace_event_format():
    """The text is one object with a list of events, each with the fields that its type (``ph``) requires. Rows are in
    the order of the topology's nodes."""
    topology = Topology.star(3, 25, MICRO)
    content = json.loads(to_chrome_trace(replace(ring(topology.devices), pieces=2), topology, 3000))
    assert list(content) == ["traceEvents", "displayTimeUnit", "otherData"]
    events = content["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid", "args"} <= event.keys()
        assert event["ph"] == "M" or (event["ph"] == "X" and min(event["ts"], event["dur"]) >= 0)
    rows = {event["tid"]: event["pid"] for event in events}
    assert len(rows) == 1 + 6  # the ticks, and the links
    assert not set(rows) & (set(rows.values()) - {1})  # no number is that of a row and of a group of rows
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    nodes = ["schedule", *(f"{node} sends" for node in topology.nodes)]
    assert [named[pid] for pid in sorted(named, key=order.get)] == nodes
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {"ticks", *(f"to {node}" for node in topology.nodes)}


def test_only_the_first_pieces_are_shown(monkeypatch):
    """If there are too many transfers, only those of the first pieces are shown, and the number of the other pieces is
    stored. EVENTS transfers need less than 45 MB."""
    topology = Topology.ring(4, 25, MICRO)
    schedule = replace(ring(topology.devices), pieces=50)
    every, ticks, other = read(schedule, topology, 10**6)
    assert len(every) == 24 * 50  # 24 transfers per piece
    assert other["pieces_left_out"] == 0
    text = to_chrome_trace(schedule, topology, 10**6)
    assert text.count('"cat":"transfer"') / len(text) > trace.EVENTS / 45e6
    monkeypatch.setattr(trace, "EVENTS", 24 * 7 + 23)  # enough for 7 pieces
    some, fewer, other = read(schedule, topology, 10**6)
    assert some == [transfer for transfer in every if transfer["args"]["piece"] < 7]
    assert fewer == ticks[: 6 + 7 - 1]  # of 6 rounds
    assert (other["pieces"], other["pieces_left_out"]) == (50, 43)
    assert other["seconds"] == simulate(schedule, topology, 10**6).seconds


def test_transfers_that_are_not_shown():
    """Without bytes or rounds there are no transfers. Transfers of empty chunks or without effect have no events."""
    still = Schedule("broadcast", "none", names(2), (Chunk(Fraction(1), (0,), (0,)),), ())
    for schedule, nbytes in ((ring(names(3)), 0), (ring(names(1)), 100), (still, 100)):
        transfers, ticks, other = read(schedule, Topology.ring(schedule.devices), nbytes)
        assert transfers == ticks == []
        assert other["seconds"] == 0
    chunks = (Chunk(Fraction(1), (0,), (1,)), Chunk(Fraction(0), (0,), (1,)))
    steps = (Step(0, 1, (0,)), Step(1, 1, (0,)), Step(0, 2, (0,)))
    transfers, _, _ = read(Schedule("broadcast", "custom", names(3), chunks, (steps,)), Topology.full_mesh(3), 100)
    assert [(transfer["name"], transfer["link"]) for transfer in transfers] == [("chunk 0", ("cpu:0", "cpu:1"))]


def test_invalid_arguments_are_refused():
    """Arguments that ``simulate`` refuses are refused with the same errors."""
    topology = Topology.ring(3)
    for nbytes in (-1, 1.5, True, None):
        with pytest.raises(ArgumentError, match="nbytes must be an integer"):
            to_chrome_trace(ring(names(3)), topology, nbytes)
    with pytest.raises(ArgumentError, match="this is not a topology"):
        to_chrome_trace(topology, ring(names(3)), 8)
    with pytest.raises(PlanError, match="no route from"):
        to_chrome_trace(ring(names(3)), Topology(names(3), []), 8)
    with pytest.raises(ArgumentError, match="a rank must be the number of a device"):
        to_chrome_trace(ring(names(3)), Topology.ring(3), 8, rank=3)


@pytest.mark.parametrize(("algorithm", "collective"), [("direct", "all_reduce"), ("forest", "broadcast")])
def test_the_trace_of_a_rank_has_the_events_of_its_links(algorithm, collective):
    """The trace of one rank has the events of the links into and out of its device, as in the trace of all ranks."""
    hosts = Topology.machine("hgx-h100", hosts=5)
    plan = cr.plan(hosts, collective, "40M", algorithm)
    assert isinstance(plan.schedule, GeneratedSchedule)
    listed, ticks, about = read(plan.schedule.explicit, hosts, plan.nbytes)
    for rank in (0, 13, 39):
        device = plan.ranks[rank]
        found, same_ticks, other = read(plan.schedule, hosts, plan.nbytes, rank=rank)
        assert (other["rank"], other["device"], other["pieces_left_out"]) == (rank, device, about["pieces_left_out"])
        assert len(same_ticks) == len(ticks)
        assert len(found) > 38
        mine = [transfer for transfer in listed if device in transfer["link"]]
        for transfers in (found, mine):
            transfers.sort(key=lambda transfer: transfer["link"])  # the transfers of a link keep their order
        for one, due in zip(found, mine, strict=True):
            assert (one["link"], one["name"], one["args"]) == (due["link"], due["name"], due["args"])
            assert (one["ts"], one["dur"]) == pytest.approx((due["ts"], due["dur"]), rel=1e-9, abs=2e-6)
