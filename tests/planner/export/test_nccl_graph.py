"""Exports to NCCL graph files: rings, their channels and speeds. Other schedules are refused with the reason."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from fractions import Fraction

import pytest
from drawings import both_ways
from hypothesis import given
from hypothesis import strategies as st

from crossreduce import ArgumentError, Chunk, PlanError, Route, Schedule, ScheduleError, Step, Topology, plan
from crossreduce.export.formats.nccl_graph import path_type, rings, to_nccl_graph_xml
from crossreduce.planning import PLANNERS, direct, one_device, ring


def gpus(n):
    return tuple(f"cuda:{k}" for k in range(n))


def read(text):
    """Read a graph file as ncclTopoGetGraphFromXmlSub does: its attributes, and the GPUs of each channel."""
    top = ET.fromstring(text)
    assert (top.tag, top.attrib) == ("graphs", {"version": "1"})
    (graph,) = top
    assert graph.tag == "graph"
    for number in ("id", "pattern", "crossnic", "nchannels", "samechannels"):
        int(graph.get(number))
    for number in ("speedintra", "speedinter", "latencyinter"):
        float(graph.get(number))
    assert (graph.get("id"), graph.get("pattern"), graph.get("crossnic")) == ("0", "4", "0")
    channels = []
    for channel in graph:
        assert channel.tag == "channel"
        assert {gpu.tag for gpu in channel} == {"gpu"}
        old, new = ([int(gpu.get("dev"), base) for gpu in channel] for base in (0, 16))
        assert old == new, "older and newer versions of NCCL read a device's number in different bases"
        channels.append(tuple(old))
    assert int(graph.get("nchannels")) == len(channels)
    return graph, channels


def around(cycle, chunk):
    """Return the steps of an all-reduce of one chunk that travels along a ring, from the ring's first device on."""
    n = len(cycle)
    steps = [Step(chunk, cycle[k], (cycle[k - 1], cycle[k])) for k in range(1, n)]
    return steps + [Step(chunk, cycle[k], (cycle[k - 1],)) for k in range(n - 1)]


def circling(n, cycles, shares=None):
    """Return an all-reduce with one chunk per ring. By default the chunks have equal shares."""
    everyone = tuple(range(n))
    shares = shares or [Fraction(1, len(cycles))] * len(cycles)
    chunks = tuple(Chunk(Fraction(part), everyone, everyone) for part in shares)
    rounds = tuple(zip(*(around(cycle, c) for c, cycle in enumerate(cycles)), strict=True))
    return Schedule("all_reduce", "rings", gpus(n), chunks, rounds)


@given(st.integers(2, 9), st.data())
def test_rings_become_channels(n, data):
    """``rings`` returns the rings along which chunks travel, each from device 0 on, with the sum of their shares. Each
    channel is one of these rings, and the number of channels of a ring is proportional to its share."""
    cycles = data.draw(st.lists(st.permutations(range(n)), min_size=1, max_size=3))
    parts = data.draw(st.lists(st.integers(1, 3), min_size=len(cycles), max_size=len(cycles)))
    copies = data.draw(st.integers(1, 3))
    schedule = circling(n, cycles, [Fraction(part, sum(parts)) for part in parts])
    wanted = {}
    for cycle, part in zip(cycles, parts, strict=True):
        zero = cycle.index(0)
        ring_from_0 = (*cycle[zero:], *cycle[:zero])
        wanted[ring_from_0] = wanted.get(ring_from_0, 0) + Fraction(part, sum(parts))
    assert rings(schedule) == wanted
    graph, channels = read(to_nccl_graph_xml(schedule, gb_per_s=12.5, copies=copies))
    for cycle, share in wanted.items():
        assert Fraction(channels.count(cycle), len(channels)) == share
    assert len(channels) % copies == 0
    assert graph.get("samechannels") == str(int(len(set(channels)) == 1))
    assert graph.get("speedintra") == "12.5"


def test_the_ring_planner_is_one_ring():
    """The planner's ring is one channel, in the order of the devices, for all-reduce, broadcast and reduce. The file
    has the numbers of the GPUs, and not those of the ranks."""
    for n, packs in ((2, 1), (3, 3), (8, 1)):
        for ends in ({}, {"sources": ["cuda:0"]}, {"destinations": ["cuda:1"]}):
            _, channels = read(to_nccl_graph_xml(ring(gpus(n), packs=packs, **ends), gb_per_s=20))
            assert channels == [tuple(range(n))]
    graph, channels = read(to_nccl_graph_xml(ring(["cuda:3", "cuda:11", "cuda:10", "cuda:0"]), gb_per_s=20, path="SYS"))
    assert channels == [(3, 11, 10, 0)]
    assert graph.get("typeintra") == "SYS"


def speed(*args, **options):
    return read(to_nccl_graph_xml(*args, **options))[0].get("speedintra")


def test_the_speed_is_the_share_of_the_busiest_link():
    """The bandwidth of each link is divided by the number of channels on it. The least result is a channel's speed."""
    both = circling(4, [(0, 1, 2, 3), (3, 2, 1, 0)])  # two rings in opposite directions
    same = circling(4, [(0, 1, 2, 3), (1, 2, 3, 0)])  # the same ring twice, so one channel
    wiring = Topology.ring(gpus(4), gb_per_s=24)
    assert (speed(both, wiring), speed(both, wiring, copies=3)) == ("24", "8")  # one channel has at most 25 GB/s
    assert read(to_nccl_graph_xml(same, wiring))[0].get("nchannels") == "1"
    # Both rings use each link to the switch.
    assert speed(both, Topology.star(gpus(4), gb_per_s=90), copies=1) == "45"
    assert speed(both, Topology.star(gpus(4), gb_per_s=90)) == "22.5"
    slow = Topology.from_matrix([[0, 20, 0], [0, 0, 10], [40, 0, 0]], gpus(3))
    assert speed(ring(gpus(3)), slow) == "10"


@pytest.mark.parametrize(
    ("name", "devices", "channels", "gb_per_s", "path"),
    [
        ("hgx-h100", 8, 18, "25", "NVL"), ("dgx-a100", 8, 12, "25", "NVL"), ("hgx-b200", 8, 32, "28.125", "NVL"),
        ("dgx-1v", 8, 6, "25", "NVL"), ("pcie-8", 2, 1, "15.75", "PIX"), ("pcie-8", 4, 1, "15.75", "PHB"),
        ("pcie-8", 8, 1, "15.75", "SYS"), ("mi100", 8, 1, "16", "SYS"), ("nvlink-pairs-4", 4, 4, "15.75", "PHB"),
    ],
)  # fmt: skip
def test_channels_and_paths_follow_from_the_links(name, devices, channels, gb_per_s, path):
    """A ring on fast links has several channels of at most 25 GB/s, up to 32 in all. The path is that of the slowest
    hop. Both can be given."""
    topology = Topology.machine(name).subset(range(devices))
    made = plan(topology, nbytes=1 << 28, algorithm="ring").schedule
    graph, found = read(to_nccl_graph_xml(made, topology))
    assert (len(found), graph.get("speedintra"), graph.get("typeintra")) == (channels, gb_per_s, path)
    graph, found = read(to_nccl_graph_xml(made, topology, path="PXB", copies=1))
    assert (len(set(found)) <= len(found) <= channels, graph.get("typeintra")) == (True, "PXB")


def test_paths():
    """The nodes of a route determine its name: NVSwitches and fast switches, GPUs that forward, bridges and CPUs."""
    names = gpus(3)
    star, slow = Topology.star(names, 450), Topology.star(names, 30)
    line = Topology([*names], both_ways(("cuda:0", "cuda:1", 25), ("cuda:1", "cuda:2", 25)))
    tree = Topology(names, both_ways(("cuda:0", "a", 12), ("a", "b", 12), ("b", "cuda:1", 12)), ["a", "b"])
    for topology, ends, name in (
        (star, 1, "NVL"),
        (slow, 1, "PIX"),
        (line, 1, "NVL"),
        (line, 2, "NVB"),
        (tree, 1, "PXB"),
    ):
        assert path_type(topology.route(0, ends), topology) == name


def test_the_schedules_routes_are_followed():
    """If a schedule has a route between two devices, the speed is that of the route."""
    names, switches = gpus(2), {"slow": 10, "fast": 40}
    links = both_ways(*((gpu, switch, gb_per_s) for gpu in names for switch, gb_per_s in switches.items()))
    topology, schedule = Topology(names, links, list(switches)), ring(names)
    assert speed(schedule, topology, copies=1) == "40"  # the topology's route is the fast one
    routes = tuple(Route(c, src, 1 - src, ("slow",)) for c in (0, 1) for src in (0, 1))
    assert speed(replace(schedule, routes=routes), topology) == "10"


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (direct(gpus(3)), "can only have rings, but chunk 0 is sent from cuda:0 to both cuda:1 and cuda:2"),
        (one_device(gpus(3), destinations=["cuda:2"]), "chunk 0 is received on cuda:2 from both cuda:0 and cuda:1"),
        (PLANNERS["halving_doubling"](gpus(4)), "can only have rings, but chunk"),
        (replace(ring(gpus(3)), rounds=()), "lost"),
        (one_device(gpus(1)), "a collective of one device has no transfers"),
        (ring(["cuda:0", "host1/cuda:1"]), "can only have whole GPUs of one host"),
        (ring(["cuda:0", "cuda:0#1"]), "can only have whole GPUs of one host"),
        (ring(gpus(4), destinations=["cuda:1", "cuda:2"]), "no collective of NCCL has these sources and destinations"),
        (circling(3, [(0, 1, 2), (2, 1, 0)], ["1/40", "39/40"]), "before 2.24 has 32 channels, these rings need 40"),
    ],
)
def test_other_schedules_are_refused(schedule, text):
    """The error states the chunk and the devices that do not form a ring, or the rule that the schedule breaks."""
    with pytest.raises((PlanError, ScheduleError), match=text):
        to_nccl_graph_xml(schedule, gb_per_s=20)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give either topology or gb_per_s"),
        ({"gb_per_s": 1, "topology": Topology.ring(gpus(3))}, "give either topology or gb_per_s"),
        ({"gb_per_s": 0}, "speed of a channel must be above 0"),
        ({"gb_per_s": float("nan")}, "speed of a channel must be above 0"),
        ({"gb_per_s": 1, "path": "nvlink"}, "unknown path between GPUs(.|\n)*one of NVL, NVB"),
        ({"gb_per_s": 1, "copies": 0}, "at least 1"),
    ],
)
def test_bad_arguments(options, text):
    """The error states the rule that the arguments break, or the link that the topology lacks."""
    with pytest.raises(ArgumentError, match=text):
        to_nccl_graph_xml(ring(gpus(3)), **options)
    with pytest.raises(PlanError, match=f"these rings need {10**23}."):  # without making a list of this length
        to_nccl_graph_xml(ring(gpus(3)), gb_per_s=1, copies=10**23)
    without_link = Topology.from_matrix([[0, 1, 0], [0, 0, 0], [1, 0, 0]], gpus(3))
    with pytest.raises(PlanError, match="the topology has no route from cuda:1 to cuda:2"):
        to_nccl_graph_xml(ring(gpus(3)), without_link)
