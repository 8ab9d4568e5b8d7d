"""MSCCL++ plans with pipelines, port channels and switch channels are proved, run by an interpreter, and timed by
``file_clock.py``, a simulation of exported files that shares no code with the library."""

import json
from fractions import Fraction

import pytest
from exports import KINDS
from file_clock import StuckError, algbw, mscclpp_seconds
from mscclpp_values import fault
from mscclpp_values import operations as listed
from pairs import each
from strategies import names

from crossreduce import PlanError, Topology, plan
from crossreduce.export.exportable import check_exportable
from crossreduce.export.formats.channels import parts_of_chunks
from crossreduce.export.formats.collective import collective
from crossreduce.export.formats.mscclpp import to_mscclpp_json, verify_mscclpp_json
from crossreduce.export.formats.mscclpp.writer import writer
from crossreduce.export.formats.mscclpp.writer.chunk_division import divide_chunks, even_parts
from crossreduce.planning import one_shot, ring
from crossreduce.schedule import Costs

SIZE = 256 << 20
FREE = Costs(operation_s=0)

# (machine, hosts, collective) of the files that are timed here. docs/mscclpp-files.md has the others.
TIMED = [
    *(("ncv4", 2, kind) for kind in ("all_reduce", "all_gather")),
    ("nvlink-pairs-4", 1, "reduce_scatter"),
    ("dgx-1v", 1, "broadcast"),
    ("hgx-h100", 1, "all_gather"),
    ("pcie-8", 1, "reduce"),
]
SLOW = [("ncv4", 2, "broadcast"), ("hgx-h100", 2, "all_reduce"), ("dgx-1p", 2, "broadcast"), ("mi300x", 1, "broadcast")]
TIMED += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


def planned(topology, kind):
    return plan(topology, kind, SIZE, costs=FREE)


def operations(text):
    """Return all operations of a plan, those of pipelines included."""
    return [ops[k] for ops, k in listed(json.loads(text))]


def small(schedule, **options):
    """Export a schedule in 3 pieces of 16 bytes per unit of the buffer, for messages that the interpreter can run."""
    return to_mscclpp_json(schedule.cut_into(3), nbytes=3 * 16 * collective(schedule).units, **options)


@pytest.mark.parametrize(("machine", "hosts", "kind"), TIMED)
def test_files_reach_the_planned_rate(machine, hosts, kind):
    """An exported file reaches at least 97 % of the rate that its plan predicts for 256 MiB."""
    topology = Topology.machine(machine, hosts)
    found = planned(topology, kind)
    text = to_mscclpp_json(found.schedule, topology, SIZE)
    assert algbw(text, found.schedule, topology) >= 0.97 * found.algbw


def test_the_clock(monkeypatch):
    """A copy along two links takes 2 (bytes / bandwidth + latency), and about half of it with many pieces. The clock
    refuses plans that wait forever. A broadcast without its pieces reaches less than 70 % of the planned rate."""
    line = Topology.from_matrix([[0, 10, 0], [10, 0, 10], [0, 10, 0]], latency_s=Fraction(1, 10**6))
    schedule = plan(line, "broadcast", SIZE, "forest", root=0, costs=FREE).schedule
    whole = mscclpp_seconds(to_mscclpp_json(schedule.cut_into(1)), line, 1 << 24)
    assert whole == pytest.approx(2 * ((1 << 24) / 1e10 + 1e-6) + 1e-6, rel=1e-6)  # and 1 us until the call has begun
    pieces = mscclpp_seconds(to_mscclpp_json(schedule.cut_into(128), nbytes=1 << 24), line, 1 << 24)
    assert pieces == pytest.approx((1 + 1 / 128) * (1 << 24) / 1e10, rel=0.01)
    content = json.loads(to_mscclpp_json(schedule))
    del content["gpus"][0]["threadblocks"][0]["ops"][-1]
    with pytest.raises(StuckError, match="threadblocks wait"):
        mscclpp_seconds(json.dumps(content), line, 1 << 24)
    monkeypatch.setattr(writer, "LONG_BLOCK", 1 << 60)  # so that the writer adds no pieces itself
    topology = Topology.machine("dgx-1v")
    found = planned(topology, "broadcast")
    text = to_mscclpp_json(found.schedule.cut_into(1), topology, SIZE)
    assert algbw(text, found.schedule, topology) < 0.7 * found.algbw


RUN = [*each(["ncv4"], [1], KINDS, [True, False]), ("ncv4", 2, "all_reduce", False), ("ncv4", 2, "broadcast", True)]
RUN += [
    pytest.param("ncv4", 2, *case, marks=pytest.mark.slow)
    for case in (("reduce", True), ("reduce_scatter", True), ("all_gather", False))
]


@pytest.mark.parametrize(("machine", "hosts", "kind", "inplace"), RUN)
def test_pipelines_are_right(machine, hosts, kind, inplace):
    """Plans with pipelines are proved without notes, and are right for messages of one and of three pieces."""
    topology = Topology.machine(machine, hosts)
    schedule = planned(topology, kind).schedule
    text = to_mscclpp_json(schedule, topology, SIZE, inplace=inplace)
    assert "pipeline" in {op["name"] for op in operations(text)}
    assert [note for note in verify_mscclpp_json(text).notes if "does not store a root" not in note] == []
    root = collective(schedule).root or 0
    for cells in (1, 3) if hosts == 1 else (3,):
        assert fault(small(schedule, inplace=inplace), seed=cells, cells=cells, root=root) is None


def test_pieces_have_the_planned_bytes():
    """For the planned message size, a pipeline has the planned number of pieces, except for rounding to 16 bytes."""
    topology = Topology.machine("dgx-1v")
    found = planned(topology, "broadcast")
    for op in operations(to_mscclpp_json(found.schedule, nbytes=SIZE)):
        if op["name"] == "pipeline":
            context = op["iter_context"]
            units = collective(found.schedule).units
            assert context["unit_size"] % 16 == 0
            pieces = Fraction(context["num_chunks"] * SIZE, units * context["unit_size"])
            assert found.schedule.pieces * 0.99 <= pieces <= found.schedule.pieces


def test_the_largest_message_has_65535_iterations():
    """The executor counts iterations with 16 bits, so a plan of 128 KiB per piece has a largest message."""
    schedule = ring(names(2)).cut_into(4)  # 1 MiB: 2 chunks of 4 pieces of 128 KiB; an iteration moves a piece of both
    text = to_mscclpp_json(schedule, nbytes=1 << 20)
    assert json.loads(text)["max_message_size"] == 65535 * (1 << 17) * 2
    assert json.loads(to_mscclpp_json(schedule, nbytes=1 << 20, max_bytes=1 << 30))["max_message_size"] == 1 << 30
    with pytest.raises(PlanError, match="at most 65535 iterations"):
        to_mscclpp_json(schedule, nbytes=1 << 10, min_bytes=1 << 40)


def test_hosts_are_joined_by_port_channels():
    """GPUs of one host use memory channels, and other GPUs port channels. No plan needs a flush, which does nothing."""
    topology = Topology.machine("ncv4", 2)  # 4 GPUs per host

    def kind(a, b):
        return "memory" if a // 4 == b // 4 else "port"

    for schedule, inplace in ((planned(topology, "all_gather").schedule, True), (ring(topology.devices), False)):
        text = to_mscclpp_json(schedule, inplace=inplace)
        for rank, gpu in enumerate(json.loads(text)["gpus"]):
            for channel in gpu["channels"]:
                assert {kind(rank, peer) for peer in channel["connected_to"]} == {channel["channel_type"]}
            for remote in gpu["remote_buffers"]:
                assert remote["access_channel_types"] == [kind(rank, remote["rank"])]
        assert "flush" not in {op["name"] for op in operations(text)}
        assert verify_mscclpp_json(text).notes == ()


def test_schedules_whose_inputs_are_read_late_have_no_pipelines():
    """In place, a one-shot result could overwrite an input that other GPUs still need, so it has no pipelines."""
    schedule = one_shot(names(3)).cut_into(3)
    for inplace in (True, False):
        text = to_mscclpp_json(schedule, inplace=inplace)
        assert ("pipeline" in {op["name"] for op in operations(text)}) == (not inplace)
        assert verify_mscclpp_json(text).notes == ()


def test_threadblocks_are_shared_if_there_are_too_many():
    """If a GPU would have more threadblocks than threadblocks= allows, pipelines share threadblocks."""
    topology = Topology.machine("ncv4")
    schedule = planned(topology, "all_reduce").schedule
    most = max(len(gpu["threadblocks"]) for gpu in json.loads(small(schedule))["gpus"])
    text = small(schedule, threadblocks=most - 3)
    assert max(len(gpu["threadblocks"]) for gpu in json.loads(text)["gpus"]) == most - 3
    assert verify_mscclpp_json(text).notes == ()
    assert fault(text, seed=0, cells=4) is None


def test_more_threadblocks_have_fewer_threads():
    """Only 80 threadblocks of 1024 threads per GPU run at the same time, so a plan of more has 512 threads in each. A
    plan has 1024 threads if more threadblocks would not divide its data more evenly, as on nvlink-pairs-4."""
    uneven, wide = Topology.machine("nvlink-pairs-4"), Topology.machine("dgx-1p", 2)
    for schedule, topology, threads in (
        (plan(uneven, "all_reduce", SIZE, costs=FREE, granularity=0.02).schedule, uneven, 1024),
        (planned(wide, "all_reduce").schedule, wide, 512),
    ):
        for options, due in (({}, threads), ({"threadblocks": 80}, 1024), ({"threads": 1024}, 1024)):
            content = json.loads(to_mscclpp_json(schedule, topology, SIZE, **options))
            count = max(len(gpu["threadblocks"]) for gpu in content["gpus"])
            assert content["num_threads_per_block"] == due
            assert (count > 80) == (due == 512)


def test_the_number_of_parts_of_a_chunk():
    """Each chunk has at least as many parts as its links need, and parts cover the buffer without gaps. If a GPU would
    have up to 4 threadblocks with pipelines, each chunk has two parts, so that links are busy while one part waits."""
    for machine in ("hgx-h100", "dgx-1v"):
        topology = Topology.machine(machine)
        for kind in KINDS:
            schedule = planned(topology, kind).schedule
            needed, made = parts_of_chunks(schedule, topology), collective(schedule)
            parts = even_parts(made, needed, 80, pipelines=schedule.pieces > 1)
            assert all(found >= least for found, least in zip(parts, needed, strict=True))
            blocks = sorted(divide_chunks(made, parts).blocks, key=lambda block: block.offset)
            ends = [0, *(block.offset + block.size for block in blocks)]
            assert ends == [*(block.offset for block in blocks), divide_chunks(made, parts).units]
    made = collective(planned(Topology.machine("pcie-8"), "reduce").schedule)
    for most, pipelines, parts in ((80, True, 2), (4, True, 1), (80, False, 1)):
        assert even_parts(made, (1,) * 4, most, pipelines=pipelines) == (parts,) * 4


@pytest.mark.parametrize("inplace", [True, False])
def test_in_network_plans_use_switch_channels(inplace):
    """An all-reduce through one switch is proved and right. It moves 1 + 1/n times the buffer over each link of n GPUs,
    since a GPU also reads its own data through the switch. On 8 GPUs it reaches 97 % of the planned rate."""
    for topology in (
        Topology.star(["cuda:0", "cuda:1", "cuda:2"], 25, 1e-6).with_switches(reducing=True),
        Topology.machine("hgx-h100", in_network=True),
    ):
        check_exportable("mscclpp", topology, "all_reduce")
        found = planned(topology, "all_reduce")
        assert len(found.schedule.devices) == len(topology.devices) + 1  # the switch
        text = to_mscclpp_json(found.schedule, topology, SIZE, inplace=inplace)
        assert "glres" in {op["name"] for op in operations(text)}
        assert [note for note in verify_mscclpp_json(text).notes if "NVLink switches" not in note] == []
        n, link = len(topology.devices), float(topology.links[0].bandwidth)
        assert n == 8 or fault(text, seed=0, cells=2) is None
        reached = algbw(text, ring(topology.devices), topology)
        assert reached == pytest.approx(link / (1 + 1 / n), rel=0.01)
        assert n == 3 or reached >= 0.97 * found.algbw


def test_formats_that_cannot_hold_in_network_plans_are_refused():
    """``check_exportable`` raises the error before planning, with the reason. A broadcast does not use the switch."""
    star = Topology.star(names(4)).with_switches(reducing=True)
    for name, topology, text in (
        ("msccl", star, "MSCCL XML has no operation in switches"),
        ("mscclpp", Topology.machine("hgx-h100", 2, in_network=True), "join GPUs of one host"),
        ("mscclpp", Topology.star(names(18)).with_switches(reducing=True), "joins at most 17 GPUs"),
    ):
        with pytest.raises(PlanError, match=text):
            check_exportable(name, topology, "all_reduce")
        check_exportable(name, topology, "broadcast")
        check_exportable("trace", topology, "all_reduce")
    two = Topology.machine("hgx-h100", 2, in_network=True)
    with pytest.raises(PlanError, match="MSCCL\\+\\+ cannot hold this plan: its switch channels join GPUs of one host"):
        to_mscclpp_json(planned(two, "all_reduce").schedule, two)
