"""``Costs``: what simulations count besides links; how users state it, and what a plan says about it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossreduce as cr
from crossreduce.export.formats.channels import MOST_PARTS, parts_of_chunks
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.schedule import both_directions
from crossreduce.topology.machines import machine_names

H100 = cr.Topology.machine("hgx-h100", 2)

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
    ("arguments", "text"),
    [
        ({"operation_s": -1}, "operation_s must be a number of seconds from 0 to 1"),
        ({"operation_s": True}, "operation_s must be a number of seconds"),
        ({"reduction_gb_per_s": 0}, "reduction_gb_per_s must be a number above 0"),
        ({"reduction_gb_per_s": "3"}, "reduction_gb_per_s must be a number above 0"),
        ({"messages_per_s": float("nan")}, "messages_per_s must be a number above 0"),
        ({"messages_per_s": float("inf")}, "messages_per_s must be a number above 0"),
        ({"shared": 3}, "shared must list tuples"),
        ({"shared": [(3,)]}, "shared must list tuples"),
        ({"shared": [(3, [])]}, "a shared limit must have links"),
        ({"shared": [(0, [("a", "b")])]}, "the GB/s of a shared limit must be a number above 0"),
    ],
)
def test_invalid_costs(arguments, text):
    """Numbers that are not positive, and limits without links, are refused."""
    with pytest.raises(cr.ArgumentError, match=text):
        cr.Costs(**arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "this text does not have costs in JSON"),
        ("[]", "this text does not have costs in JSON"),
        ("{}", "this text does not have costs in JSON"),
        ('{"format": "crossreduce.costs/2"}', "this text does not have costs in JSON"),
        ('{"format": "crossreduce.costs/1", "speed": 3}', "it has an unknown part, speed"),
        ('{"format": "crossreduce.costs/1", "shared": [[3, [["a"]]]]}', "shared must list tuples"),
        ('{"format": "crossreduce.costs/1", "messages_per_s": -3}', "messages_per_s must be a number above 0"),
    ],
)
def test_invalid_json(text, words):
    """Text of another format, with unknown parts or with invalid numbers is refused."""
    with pytest.raises(cr.ArgumentError, match=words):
        cr.Costs.from_json(text)


def test_links_must_exist():
    """A shared limit must name links of the topology."""
    costs = cr.Costs(shared=[(25, [("cpu:0", "cpu:9")])])
    with pytest.raises(cr.ArgumentError, match="a shared limit must name links of the topology"):
        cr.plan(cr.Topology.ring(4), costs=costs)
    with pytest.raises(cr.ArgumentError, match="costs must be Costs"):
        cr.plan("dgx-1v", costs={"operation_s": 0})
    with pytest.raises(cr.ArgumentError, match="operation_s must not be given twice"):
        cr.plan("dgx-1v", costs=cr.Costs(operation_s=1e-6), operation_s=0)
    assert cr.plan("dgx-1v", costs=cr.Costs(), operation_s=0) == cr.plan("dgx-1v", operation_s=0)


def test_each_machine_has_published_costs_or_none():
    """Each machine's costs can be read; those of several hosts have the message rate of their network cards."""
    for name, _ in machine_names():
        one = cr.Costs.machine(name)
        assert one.messages_per_s is None
        assert one.operation_s is None
        assert one.reduction_gb_per_s is None or one.reduction_gb_per_s > 100
    assert cr.Costs.machine("hgx-h100", 2).reduction_gb_per_s == cr.Costs.machine("hgx-h100").reduction_gb_per_s
    assert cr.Costs.machine("hgx-h100", 2).messages_per_s > 1e8
    with pytest.raises(cr.ArgumentError, match="there is no machine of this name"):
        cr.Costs.machine("no machine")


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        (cr.Costs(operation_s=0), "the link"),
        (cr.Costs(operation_s=0, reduction_gb_per_s=20), "the reductions of"),
        (cr.Costs(operation_s=0, messages_per_s=1000), "the messages of the link"),
        (cr.Costs(operation_s=0, shared=both_directions(H100, 5)), "the 5 GB/s that 2 links share"),
        (cr.Costs(operation_s=1e-4), "the operations of host0"),
    ],
)
def test_the_explanation_says_what_binds(costs, text):
    """The line "busiest" of an explanation begins with the limit that is busy for most of the time."""
    found = cr.plan(H100, "all_reduce", 1 << 24, costs=costs)
    (line,) = [line for line in found.explain().splitlines() if line.startswith("  busiest")]
    assert line.removeprefix("  busiest").strip().startswith(text), line


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce_scatter"])
def test_costs_never_make_a_plan_faster(collective):
    """A plan with further costs takes at least as long as one without them."""
    free = cr.plan(H100, collective, 1 << 20, costs=cr.Costs(operation_s=0)).seconds
    for costs in (
        cr.Costs(operation_s=0, reduction_gb_per_s=200),
        cr.Costs(operation_s=0, messages_per_s=1e5),
        cr.Costs(operation_s=0, shared=both_directions(H100, 50)),
    ):
        assert cr.plan(H100, collective, 1 << 20, costs=costs).seconds >= free * (1 - 1e-9)


def test_the_command_line(printed, crossreduce, tmp_path):
    """``--costs`` reads a file, or the published costs of a machine; --operation-us is added to either."""
    path = tmp_path / "costs.json"
    path.write_text(cr.Costs(reduction_gb_per_s=20).to_json())
    line = ("plan", "dgx-1v", "--json", "--nbytes", "1M")
    for costs, options in (
        (cr.Costs(reduction_gb_per_s=20), ("--costs", path)),
        (cr.Costs(0, 20), ("--costs", path, "--operation-us", 0)),
        (cr.Costs.machine("dgx-1v"), ("--costs", "published")),
    ):
        report = json.loads(printed(*line, *options))
        assert report["seconds"] == cr.plan("dgx-1v", nbytes="1M", costs=costs).seconds
    bad = tmp_path / "bad.json"
    bad.write_bytes(b"\xff")
    for name, text in (("none.json", "cannot be read"), (bad, "is not UTF-8"), (tmp_path, "cannot be read")):
        code, _, error = crossreduce(*line, "--costs", name)
        assert (code, text in error) == (2, True)
    topology = tmp_path / "ring.json"
    topology.write_text(cr.Topology.ring(3).to_json())
    code, _, error = crossreduce("plan", topology, "--costs", "published")
    assert code == 2
    assert "can only be used with a machine of the library" in error


@pytest.mark.parametrize("value", [10**400, 1e-320, 5e-324, 1e19])
def test_numbers_without_finite_times_are_refused(value):
    """Numbers from which no finite time can be computed are refused, also in JSON."""
    with pytest.raises(cr.ArgumentError, match="must be a number above 0, from 1e-12 to 1e\\+18"):
        cr.Costs(reduction_gb_per_s=value)
    with pytest.raises(cr.ArgumentError, match="must be a number above 0, from 1e-12 to 1e\\+18"):
        cr.Costs(shared=[(value, [("a", "b")])])


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("gb_per_s", [0.1, 1, 25])
def test_queues_on_links_without_latency(collective, gb_per_s):
    """On a chain of CUDA devices whose links have no latency, plans have at most as many pieces as are allowed."""
    names = [f"cuda:{k}" for k in range(3)]
    links = [(names[a], names[b], gb_per_s) for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))]
    for nbytes in (1 << 20, 1 << 30, 1 << 36):
        found = cr.plan(cr.Topology(names, links), collective, nbytes)
        assert 1 <= found.schedule.pieces <= 1 << 20


def test_links_very_far_apart():
    """If bandwidths are too far apart for the linear program of few-step forests, the other plans remain."""
    names = [f"cpu:{k}" for k in range(3)]
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    links = [(names[a], names[b], 1e-5 if (a + b) % 2 else 1e5, 1e-6) for a, b in pairs]
    found = cr.plan(cr.Topology(names, links), "all_reduce", 1000)
    cr.verify(found.schedule)


def test_very_fast_links_have_a_limited_number_of_channels():
    """Files for links of any speed are made at once, with at most ``MOST_PARTS`` parts of each chunk."""
    mesh = cr.Topology.full_mesh(["cuda:0", "cuda:1"], 10**6)
    schedule = cr.plan(mesh, "all_reduce", 1 << 20, "direct").schedule
    assert max(parts_of_chunks(schedule, mesh)) == MOST_PARTS
    assert "<algo" in to_msccl_xml(schedule, mesh, "1M")
    with pytest.raises(cr.ArgumentError, match="bytes"):
        to_msccl_xml(schedule, mesh, -5)
