"""Chakra traces: the format, the messages and results, and the time on links that are FIFOs."""

import itertools
import json
import random
import sys

import chakra_reader
import exports
import pytest
from budget import examples
from chakra_reader import COMP, RECEIVE, SEND, WITHIN, replay
from command_line import plan_shown
from hypothesis import given
from hypothesis import strategies as st
from pairs import pairs

import crossreduce as cr
from crossreduce.errors import ArgumentError, BackendError, PlanError
from crossreduce.export.formats import chakra
from crossreduce.export.formats.chakra import format as chakra_format
from crossreduce.export.formats.chakra import to_chakra, writer
from crossreduce.export.formats.chakra.format import TraceNode, encode
from crossreduce.lowering import lower
from crossreduce.planning import one_device, ring
from crossreduce.planning.explain import wrapped
from crossreduce.schedule import GeneratedSchedule

LATENCY_S = 7e-7
SHAPES = {"ring": cr.Topology.ring, "mesh": cr.Topology.full_mesh, "star": cr.Topology.star}
ALGORITHMS = ("auto", "ring", "direct", "forest")


def test_a_file_has_the_fields_that_feeders_read():
    """The fields of a file have the numbers and types that ASTRA-sim's feeders read, those of Chakra's et_def.proto. In
    an all-reduce on one device, the rank of this device receives, adds and sends the result."""
    pair = cr.Topology.ring(2, 25, LATENCY_S)
    files = to_chakra(one_device(pair.devices), pair, 1000)
    assert list(files) == ["all_reduce_one_device.0.et", "all_reduce_one_device.1.et"]
    data = files["all_reduce_one_device.0.et"]
    nodes, about = chakra_format.decode(data)
    assert [(node.id, node.kind, node.deps) for node in nodes] == [(0, RECEIVE, ()), (1, COMP, (0,)), (2, SEND, (1,))]
    assert (about["collective"], about["rank"], about["device"]) == ("all_reduce", "0", "cpu:0")
    for field in (
        b"\x0a\x050.0.4",  # GlobalMetadata.version = 1
        b"\x12\x0a\x0a\x04rank\xea\x01\x010",  # GlobalMetadata.attr = 2, string_val = 29
        b"\x18\x06\x52\x0e\x0a\x09is_cpu_op\xd8\x01\x00",  # Node.type = 3, attr = 10, bool_val = 27
        b"\x18\x04\x2a\x01\x00",  # Node.data_deps = 5
        b"\x52\x0c\x0a\x08comm_src\x38\x01",  # int32_val = 7
        b"\x52\x0e\x0a\x09comm_size\x48\xe8\x07",  # int64_val = 9
    ):
        assert field in data


def test_decoding():
    """``decode`` returns the nodes and texts that ``encode`` wrote. It reads other integer types, and control
    dependencies, in traces of other tools. Bytes that are not a complete trace raise an ArgumentError."""
    nodes = [
        TraceNode(0, RECEIVE, "in", (), 3, 1, 1 << 40, 7),
        TraceNode(1, COMP, "add", (0,), duration_micros=5),
        TraceNode(300, SEND, "out", (0, 1), 1, 3, 5, 0, ("cpu:2", "switch")),
    ]
    trace = chakra_format.decode(encode(nodes, {"a": "b"}))
    assert (trace.nodes, trace.about) == (nodes, {"a": "b"})
    _, node = chakra_format._classes()
    other = [{"name": "comm_size", "uint64_val": 9}, {"name": "comm_src", "uint32_val": 2}, {"name": "other"}]
    body = node(id=4, type=6, ctrl_deps=[1], data_deps=[2, 3], attr=other).SerializeToString()
    trace = chakra_format.decode(encode([], {}) + bytes([len(body)]) + body)
    assert trace.nodes == [TraceNode(4, 6, "", (2, 3, 1), src=2, size=9)]
    for data in (b"", b"\x05ab", b"\xff" * 20, b"<xml/>", encode([], {"a": "b"})[:-1], b"\x02\x08"):
        with pytest.raises(ArgumentError, match="not an execution trace of Chakra"):
            chakra_format.decode(data)


def test_without_protobuf(crossreduce, tmp_path, monkeypatch):
    """Without protobuf, an export raises a BackendError that names the package, and the command creates no folder."""
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    chakra_format._classes.cache_clear()
    pair = cr.Topology.ring(2)
    with pytest.raises(BackendError, match=r"need protobuf\.\n  try:   pip install protobuf"):
        to_chakra(ring(pair.devices), pair, 8)
    code, out, error = crossreduce("export", "dgx-1v", tmp_path / "traces", "--format", "chakra")
    assert (code != 0, out) == (True, "")
    assert "pip install protobuf" in error
    assert not (tmp_path / "traces").exists()


@examples(60)
@given(
    exports.synchronous(), st.sampled_from([1, 2, 3]), st.integers(0, 40), st.sampled_from(sorted(SHAPES)), st.data()
)
def test_traces_move_each_transfer_once_and_compute_the_collective(schedule, pieces, nbytes, shape, data):
    """A trace sends each transfer once per piece. Any order of nodes that the dependencies allow computes the
    collective. The replay on links comes to its end."""
    schedule = schedule.cut_into(pieces)
    topology = SHAPES[shape](schedule.devices, 25, LATENCY_S)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    files = to_chakra(schedule, topology, nbytes)
    chakra_reader.check(schedule, nbytes, files.values(), rng)
    assert to_chakra(schedule, topology, nbytes) == files
    replay(files.values(), topology, schedule.devices)


def test_routes_of_a_schedule_are_stored():
    """A send node stores its route if this is not the topology's own route. The replay then uses the stored route."""
    topology = cr.Topology(
        ["cpu:0", "cpu:1"],
        [("cpu:0", node, 25, 1e-6) for node in "ab"] + [(node, "cpu:1", 25, 1e-6) for node in "ab"],
        ["a", "b"],
    )
    assert topology.route("cpu:0", "cpu:1")[1] == "a"
    chunk = cr.Chunk(1, (0,), (1,))
    for switch, stored in (("a", None), ("b", ("b",))):
        route = ((0, 0, 1, (switch,)),)
        schedule = cr.Schedule("broadcast", "custom", ("cpu:0", "cpu:1"), (chunk,), ((cr.Step(0, 1, (0,)),),), 1, route)
        files = to_chakra(schedule, topology, 1000)
        sends = [node for node in chakra_format.decode(files["broadcast_custom.0.et"]).nodes if node.kind == SEND]
        assert {send.through for send in sends} == {stored}
    for slow, gb_per_s in (("a", 25), ("b", 1)):  # now ``files`` go through b
        links = [link._replace(bandwidth=1) if slow in link[:2] else link for link in topology.links]
        seconds = replay(files.values(), cr.Topology(topology.devices, links, ["a", "b"]))
        assert seconds == pytest.approx(2e-6 + 1000 / gb_per_s / 1e9 * (1 + 1 / 128), rel=1e-3)


def test_special_schedules():
    """A trace without messages has one computation that takes no time, since ASTRA-sim rejects traces without nodes. A
    plan in which a switch combines raises a PlanError, since only devices can be ranks of a trace."""
    four = cr.Topology.ring(4)
    files = to_chakra(ring(four.devices), four, 0)
    for data in files.values():
        (node,) = chakra_format.decode(data).nodes
        assert (node.kind, node.deps) == (COMP, ())
    assert replay(files.values(), four) == 0
    plan = cr.plan(cr.Topology.machine("hgx-h100", in_network=True), "all_reduce", "64M")
    with pytest.raises(PlanError, match="must be a device, but in this schedule switches combine"):
        to_chakra(plan.schedule, plan.topology, plan.nbytes)


@pytest.mark.parametrize(
    ("limit", "parts"),
    [(100_000, (51, 16)), (7000, (26, 16)), (1000, (4, 16)), (120, (1, 4)), (30, (1, 1)), (1, (1, 1))],
)
def test_the_number_of_nodes_is_limited(monkeypatch, limit, parts):
    """Fewer pieces, and then fewer packets, keep the number of nodes below the limit, but 28 nodes are always needed.
    ``parts`` is (pieces per chunk, packets per piece)."""
    star = cr.Topology.star(8, 450, LATENCY_S)
    plan = cr.plan(star, "reduce", "256M", "forest")
    monkeypatch.setattr(writer, "MOST_NODES", limit)
    made = writer.traces(plan.schedule, star, "256M")
    assert (made.pieces, made.packets) == parts
    assert sum(map(len, made.nodes.values())) <= max(limit, 28)
    files = to_chakra(plan.schedule, star, "256M")
    chakra_reader.check(plan.schedule, 256 << 20, files.values(), random.Random(1), made.pieces)
    if made.pieces < plan.schedule.pieces:
        assert f"not {plan.schedule.pieces} as planned" in chakra.remarks(plan, files)["traces"]


@pytest.mark.parametrize(
    ("collective", "algorithm", "is_generated"),
    [
        ("all_reduce", "halving_doubling", True),
        ("broadcast", "forest", True),
        ("reduce", "hierarchical_copy", False),
        *(pytest.param(kind, "forest", True, marks=pytest.mark.slow) for kind in ("all_reduce", "all_gather")),
    ],
)
def test_the_trace_of_a_rank_is_that_of_all_ranks(collective, algorithm, is_generated):
    """The trace of one rank alone equals its file among those of all ranks. A generated schedule has the same traces as
    the schedule with all steps."""
    hosts = cr.Topology.machine("hgx-h100", hosts=5)
    plan = cr.plan(hosts, collective, 40_000_003, algorithm, operation_s=0)
    assert isinstance(plan.schedule, GeneratedSchedule) == is_generated
    listed = plan.schedule.explicit if isinstance(plan.schedule, GeneratedSchedule) else plan.schedule
    found = to_chakra(listed, hosts, plan.nbytes)
    assert to_chakra(plan.schedule, hosts, plan.nbytes) == found
    for rank in (0, 1, 17, 39):
        name = f"{collective}_{algorithm}.{rank}.et"
        assert to_chakra(plan.schedule, hosts, plan.nbytes, rank=rank) == {name: found[name]}


def test_the_trace_of_a_rank_lists_no_other_steps():
    """The trace of one of 128 ranks is made without listing the chunks, rounds and routes of the generated schedule."""
    hosts = cr.Topology.machine("hgx-h100", hosts=16)
    plan = cr.plan(hosts, nbytes="1G", algorithm="forest")
    (data,) = to_chakra(plan.schedule, hosts, plan.nbytes, rank=100).values()
    assert len(chakra_format.decode(data).nodes) > 2 * 127
    assert not {"chunks", "rounds", "routes", "explicit"} & plan.schedule.__dict__.keys()
    assert not {"by_round", "transfers", "routes"} & {*vars(lower(plan.schedule))}


def test_there_must_be_such_a_rank():
    """A rank that the schedule does not have, or that is not an integer, raises an ArgumentError."""
    four = cr.Topology.ring(4)
    for rank in (-1, 4, "0", True, 1.0):
        with pytest.raises(ArgumentError, match=r"a rank must be the number of a device(.|\n)*an integer from 0 to 3"):
            to_chakra(ring(four.devices), four, 8, rank=rank)


def test_closed_forms(monkeypatch):
    """A ring in one piece takes 2(n - 1) (latency + time of 1/n of the buffer on a link).

    A direct all-gather through a switch, without packets, takes two latencies and the time of the buffer on a link: the
    n - 1 messages of a rank follow each other on its link, and the last one is then forwarded by the switch."""
    for n in (2, 3, 8):
        topology = cr.Topology.ring(n, 25, LATENCY_S)
        files = to_chakra(ring(topology.devices), topology, n * 1_000_000)
        assert replay(files.values(), topology) == pytest.approx(2 * (n - 1) * (LATENCY_S + 1e6 / 25e9), rel=1e-9)
    monkeypatch.setattr(writer, "PACKETS", 1)
    monkeypatch.setattr(writer, "LEAST_PACKETS", 1)
    for n in (3, 8):
        star = cr.Topology.star(n, 25, LATENCY_S)
        made = writer.traces(cr.plan(star, "all_gather", n * 1_000_000, "direct").schedule, star, n * 1_000_000)
        assert (made.pieces, made.packets) == (1, 1)
        assert replay(made.nodes.values(), star) == pytest.approx(n * 1e6 / 25e9 + 2 * LATENCY_S, rel=1e-9)


# Two plans take longer. A broadcast by "direct" on a ring sends pieces through other devices, and the links idle
# while the last packets of a tick are forwarded. One by "ring" through a switch needs more nodes than ``MOST_NODES``.
DIFFERENT = {("ring", "broadcast", "direct"), ("star", "broadcast", "ring")}
NETWORKS = (("ring", 64, 256), ("ring", 450, 1024), ("mesh", 450, 256), ("star", 450, 256))
DEFAULT = set(pairs(NETWORKS, exports.KINDS, ALGORITHMS))
CASES = [
    pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow, id="-".join(map(str, (*case[0], *case[1:]))))
    for case in itertools.product(NETWORKS, exports.KINDS, ALGORITHMS)
    if (case[0][0], *case[1:]) not in DIFFERENT
]


@pytest.mark.parametrize(("network", "collective", "algorithm"), CASES)
def test_plans_take_as_long_on_fifo_links(network, collective, algorithm):
    """The replay of a large plan on FIFO links takes the predicted time within 2 %, for eight devices in a ring, in a
    full mesh, and around a switch."""
    shape, gb_per_s, mib = network
    topology = SHAPES[shape](8, gb_per_s, LATENCY_S)
    plan = cr.plan(topology, collective, mib << 20, algorithm)
    made = writer.traces(plan.schedule, topology, mib << 20)
    assert replay(made.nodes.values(), topology) == pytest.approx(plan.seconds, rel=WITHIN)


def test_the_command_writes_a_folder(printed, tmp_path):
    """``export MACHINE DIR --format chakra`` writes a trace per rank and the map of ranks."""
    folder = tmp_path / "traces"
    line = ["export", "dgx-1v", folder, "--devices", "3,0-2", "--nbytes", "64M", "--algorithm", "ring"]
    line += ["--format", "chakra"]
    out = printed(*line)
    names = [f"all_reduce_ring.{rank}.et" for rank in range(4)]
    assert sorted(file.name for file in folder.iterdir()) == [*names, "all_reduce_ring.ranks.json"]
    devices = ["cuda:3", "cuda:0", "cuda:1", "cuda:2"]
    assert json.loads((folder / "all_reduce_ring.ranks.json").read_text()) == {"ranks": devices, "nbytes": 64 << 20}
    topology = cr.Topology.machine("dgx-1v").subset(devices)
    plan = cr.plan(topology, "all_reduce", "64M", "ring", operation_s=0)
    files = to_chakra(plan.schedule, topology, "64M")
    assert {name: (folder / name).read_bytes() for name in names} == files
    remarks = chakra.remarks(plan, files)
    notes = ["  ranks     0 cuda:3, 1 cuda:0, 2 cuda:1, 3 cuda:2", f"  traces    {remarks['traces']}"]
    assert out == plan_shown(plan, " ".join(map(str, line))) + wrapped(notes, 80) + f"\n{folder}: written\n"
    report = json.loads(printed(*line, "--json"))
    assert report["remarks"] == remarks
    assert report["seconds"] == plan.seconds


def test_the_command_writes_the_trace_of_one_rank(printed, tmp_path):
    """With ``--rank``, only the trace of this rank is written, also in the format "trace"."""
    line = ["export", "dgx-1v", "--nbytes", "64M", "--algorithm", "ring", "--rank", "3"]
    out = printed(*line, tmp_path / "traces", "--format", "chakra")
    plan = cr.plan("dgx-1v", "all_reduce", "64M", "ring", operation_s=0)
    files = to_chakra(plan.schedule, plan.topology, "64M", rank=3)
    folder = {file.name: file.read_bytes() for file in (tmp_path / "traces").iterdir()}
    assert folder.pop("all_reduce_ring.ranks.json")
    assert folder == files
    assert list(files) == ["all_reduce_ring.3.et"]
    assert "1 file for 67108864 bytes" in out
    printed(*line, tmp_path / "ring.trace.json", "--format", "trace")
    assert json.loads((tmp_path / "ring.trace.json").read_text())["otherData"]["device"] == "cuda:3"


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("x.xml", ["--rank", "0"], "--rank requires a format that can hold one rank alone: chakra, trace."),
        ("x", ["--rank", "8", "--format", "chakra"], "a rank must be the number of a device"),
        ("file", ["--format", "chakra"], "it is not a folder, and this format consists of several files."),
        ("none/there", ["--format", "chakra"], "cannot be written: there is no folder"),
    ],
)
def test_the_rank_and_the_folder_must_suit_the_format(crossreduce, tmp_path, target, options, words):
    """``--rank`` is refused if the format has no files of single ranks, or if there is no such rank. A target is
    refused if it is a file or its parent does not exist. Nothing is written."""
    (tmp_path / "file").write_text("mine")
    code, out, error = crossreduce("export", "dgx-1v", tmp_path / target, *options)
    assert (code != 0, out) == (True, "")
    assert words in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"
