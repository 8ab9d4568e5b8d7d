"""``Costs``: what simulations count besides links, how users state it, and how plans explain it."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossreduce as cr
from crossreduce.export.formats.channels import MOST_PARTS, parts_of_chunks
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.planning import one_device
from crossreduce.schedule import both_directions
from crossreduce.topology.machines import machine_names

H100 = cr.Topology.machine("hgx-h100", 2)
MESH = cr.Topology.full_mesh(["cuda:0", "cuda:1"])
PAIR = one_device(MESH.devices)
FAR = (10**400, 1e-320, 5e-324, 1e19)  # numbers from which no finite time can be computed

positive = st.floats(1e-3, 1e12)
names = st.text("abc:/012", min_size=1, max_size=8)
limits = st.tuples(positive, st.lists(st.tuples(names, names), min_size=1, max_size=3))


@given(st.none() | st.floats(0, 1), st.none() | positive, st.none() | positive, st.lists(limits, max_size=3).map(tuple))
def test_json_keeps_all_costs(operation_s, reduction, messages, shared):
    """Costs that are written and read again are equal, and have an equal hash."""
    costs = cr.Costs(operation_s, reduction, messages, shared)
    again = cr.Costs.from_json(costs.to_json())
    assert again == costs
    assert hash(again) == hash(costs)


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("operation_s", (-1, 1.5, math.nan, "2e-6"), "operation_s must be a number of seconds from 0 to 1"),
        ("operation_s", (True,), "operation_s must be a number of seconds"),
        ("reduction_gb_per_s", (0, "3"), "reduction_gb_per_s must be a number above 0"),
        ("reduction_gb_per_s", FAR, r"must be a number above 0, from 1e-12 to 1e\+18"),
        ("messages_per_s", (math.nan, math.inf), "messages_per_s must be a number above 0"),
        ("shared", (3, [(3,)]), "shared must list tuples"),
        ("shared", ([(3, [])],), "a shared limit must have links"),
        ("shared", ([(0, [("a", "b")])],), "the GB/s of a shared limit must be a number above 0"),
        ("shared", [[(x, [("a", "b")])] for x in FAR], r"must be a number above 0, from 1e-12 to 1e\+18"),
    ],
)
def test_invalid_costs(name, values, text):
    """Numbers that are not positive or not finite, and limits without links, are refused. ``plan`` and ``simulate``,
    which also have an argument ``operation_s``, refuse the same values of it."""
    for value in values:
        with pytest.raises(cr.ArgumentError, match=text):
            cr.Costs(**{name: value})
        if name == "operation_s":
            with pytest.raises(cr.ArgumentError, match=text):
                cr.plan("dgx-1v", operation_s=value)
            with pytest.raises(cr.ArgumentError, match=text):
                cr.simulate(PAIR, MESH, 8, operation_s=value)


def test_invalid_json():
    """Text of another format, with unknown keys or with invalid numbers is refused."""
    for keys, words in (
        (', "speed": 3', "it has an unknown key, speed"),
        (', "shared": [[3, [["a"]]]]', "shared must list tuples"),
        (', "messages_per_s": -3', "messages_per_s must be a number above 0"),
    ):
        with pytest.raises(cr.ArgumentError, match=words):
            cr.Costs.from_json(f'{{"format": "crossreduce.costs/1"{keys}}}')
    for text in ("", "[]", "{}", '{"format": "crossreduce.costs/2"}'):
        with pytest.raises(cr.ArgumentError, match="this text does not have costs in JSON"):
            cr.Costs.from_json(text)


def test_links_must_exist():
    """A shared limit must name links of the topology. ``costs`` must be ``Costs``, and ``operation_s`` stated once."""
    costs = cr.Costs(shared=[(25, [("cpu:0", "cpu:9")])])
    with pytest.raises(cr.ArgumentError, match="a shared limit must name links of the topology"):
        cr.plan(cr.Topology.ring(4), costs=costs)
    with pytest.raises(cr.ArgumentError, match="costs must be Costs"):
        cr.plan("dgx-1v", costs={"operation_s": 0})
    with pytest.raises(cr.ArgumentError, match="operation_s must not be given twice"):
        cr.plan("dgx-1v", costs=cr.Costs(operation_s=1e-6), operation_s=0)
    assert cr.plan("dgx-1v", costs=cr.Costs(), operation_s=0) == cr.plan("dgx-1v", operation_s=0)


def test_each_machine_has_published_costs_or_none():
    """The costs of each machine can be read. Only those of several hosts have the message rate of network cards."""
    for name, _ in machine_names():
        one = cr.Costs.machine(name)
        assert one.messages_per_s is None
        assert one.operation_s is None
        assert one.reduction_gb_per_s is None or one.reduction_gb_per_s > 100
    assert cr.Costs.machine("hgx-h100", 2).reduction_gb_per_s == cr.Costs.machine("hgx-h100").reduction_gb_per_s
    assert cr.Costs.machine("hgx-h100", 2).messages_per_s > 1e8
    with pytest.raises(cr.ArgumentError, match="there is no machine of this name"):
        cr.Costs.machine("no machine")


def test_the_explanation_says_what_binds():
    """The line "busiest" of an explanation begins with the limit that is busy longest. Costs make no plan faster."""
    free = cr.plan(H100, "all_reduce", 1 << 22, costs=cr.Costs(operation_s=0)).seconds
    for costs, text in (
        (cr.Costs(operation_s=0), "the link"),
        (cr.Costs(operation_s=0, reduction_gb_per_s=20), "the reductions of"),
        (cr.Costs(operation_s=0, messages_per_s=1000), "the messages of the link"),
        (cr.Costs(operation_s=0, shared=both_directions(H100, 5)), "the 5 GB/s that 2 links share"),
        (cr.Costs(operation_s=1e-4), "the operations of host0"),
    ):
        costly = cr.plan(H100, "all_reduce", 1 << 22, costs=costs)
        (line,) = [line for line in costly.explain().splitlines() if line.startswith("  busiest")]
        assert line.removeprefix("  busiest").strip().startswith(text), line
        assert costly.seconds >= free * (1 - 1e-9)


def test_the_command_line(printed, crossreduce, tmp_path):
    """``--costs`` reads a file, or the published costs of a machine. ``--operation-us`` is added to the costs."""
    path, bad, topology = tmp_path / "costs.json", tmp_path / "bad.json", tmp_path / "ring.json"
    path.write_text(cr.Costs(reduction_gb_per_s=20).to_json())
    bad.write_bytes(b"\xff")
    topology.write_text(cr.Topology.ring(3).to_json())
    line = ("plan", "dgx-1v", "--json", "--nbytes", "1M", "--costs")
    for costs, options in (
        (cr.Costs(reduction_gb_per_s=20), (path,)),
        (cr.Costs(operation_s=0, reduction_gb_per_s=20), (path, "--operation-us", 0)),
        (cr.Costs.machine("dgx-1v"), ("published",)),
    ):
        report = json.loads(printed(*line, *options))
        assert report["seconds"] == cr.plan("dgx-1v", nbytes="1M", costs=costs).seconds
    for command, text in (
        ((*line, "none.json"), "cannot be read"),
        ((*line, bad), "is not UTF-8"),
        ((*line, tmp_path), "cannot be read"),
        (("plan", topology, "--costs", "published"), "can only be used with a machine of the library"),
    ):
        code, _, error = crossreduce(*command)
        assert (code, text in error) == (2, True)


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_queues_on_links_without_latency(collective):
    """On a chain of CUDA devices whose links have no latency, the number of pieces is bounded."""
    for gb_per_s, nbytes in ((0.1, 1 << 36), (1, 1 << 30), (25, 1 << 36), (25, 1 << 20)):
        chain = cr.Topology.mesh(1, 3, gb_per_s).renamed([f"cuda:{k}" for k in range(3)])
        assert 1 <= cr.plan(chain, collective, nbytes).schedule.pieces <= 1 << 20


def test_links_very_far_apart():
    """If bandwidths are too far apart for the linear program of few-step forests, the other plans remain."""
    names = [f"cpu:{k}" for k in range(3)]
    pairs = itertools.permutations(range(3), 2)
    links = [(names[a], names[b], 1e-5 if (a + b) % 2 else 1e5, 1e-6) for a, b in pairs]  # 1e-5 or 1e5 GB/s
    cr.verify(cr.plan(cr.Topology(names, links), "all_reduce", 1000).schedule)


def test_very_fast_links_have_a_limited_number_of_channels():
    """Files for very fast links have at most ``MOST_PARTS`` parts of each chunk. A negative size is refused."""
    mesh = cr.Topology.full_mesh(["cuda:0", "cuda:1"], 10**6)
    schedule = cr.plan(mesh, "all_reduce", 1 << 20, "direct").schedule
    assert max(parts_of_chunks(schedule, mesh)) == MOST_PARTS
    assert "<algo" in to_msccl_xml(schedule, mesh, "1M")
    with pytest.raises(cr.ArgumentError, match="bytes"):
        to_msccl_xml(schedule, mesh, -5)
