"""MSCCL++ plans with pipelines, port channels and switch channels: proved, run by an interpreter, and timed by a clock.

``mscclpp_clock.py`` reads the exported file and shares no code with the library, so it shows how fast the file is, not
how fast the schedule is.
"""

import copy
import json
from fractions import Fraction

import pytest
from mscclpp_clock import PlanClock, StuckError, algbw
from mscclpp_threads import fault
from mscclpp_threads import operations as listed
from pairs import pairs
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

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
SIZE = 256 << 20
FREE = Costs(operation_s=0)

# Machines, numbers of hosts and collectives whose files are timed here. docs/mscclpp-files.md has the others.
SLOW = pytest.mark.slow
TIMED = [
    ("ncv4", 2, "all_reduce"),
    ("ncv4", 2, "reduce"),
    ("ncv4", 2, "all_gather"),
    *(pytest.param("ncv4", 2, kind, marks=SLOW) for kind in ("broadcast", "reduce_scatter")),
    ("nvlink-pairs-4", 1, "reduce_scatter"),
    ("dgx-1v", 1, "broadcast"),
    pytest.param("dgx-1p", 2, "broadcast", marks=SLOW),
    ("dgx-a100", 1, "all_reduce"),
    ("hgx-h100", 1, "all_gather"),
    *(pytest.param("hgx-h100", 2, kind, marks=SLOW) for kind in ("all_reduce", "all_gather")),
    ("mi300x", 1, "broadcast"),
    pytest.param("dgx-1p", 2, "all_reduce", marks=SLOW),
    ("pcie-8", 1, "reduce"),
]


def planned(topology, kind):
    return plan(topology, kind, SIZE, costs=FREE)


def operations(text):
    """Return all operations of a plan, those of pipelines included."""
    return [ops[k] for ops, k in listed(json.loads(text))]


def small(schedule, **options):
    """Export a schedule in 3 pieces, of 16 bytes per unit, as the interpreter runs it for messages of 48 per unit."""
    return to_mscclpp_json(schedule.cut_into(3), nbytes=3 * 16 * collective(schedule).units, **options)


@pytest.mark.parametrize(("machine", "hosts", "kind"), TIMED)
def test_files_reach_the_planned_rate(machine, hosts, kind):
    """An exported file reaches at least 97 % of the rate that its plan predicts for 256 MiB."""
    topology = Topology.machine(machine, hosts)
    found = planned(topology, kind)
    text = to_mscclpp_json(found.schedule, topology, SIZE)
    assert algbw(text, found.schedule, topology) >= 0.97 * found.algbw


def test_without_pipelines_files_are_slow(monkeypatch):
    """The clock shows the loss of a schedule whose pieces are not exported."""
    monkeypatch.setattr(writer, "LONG_BLOCK", 1 << 60)
    topology = Topology.machine("dgx-1v")
    found = planned(topology, "broadcast")
    text = to_mscclpp_json(found.schedule.cut_into(1), topology, SIZE)
    assert algbw(text, found.schedule, topology) < 0.7 * found.algbw


def test_the_clock_on_known_cases():
    """A chain of two copies takes 2 (bytes / bandwidth + latency), with many pieces half of it; stuck plans raise."""
    line = Topology.from_matrix([[0, 10, 0], [10, 0, 10], [0, 10, 0]], latency_s=Fraction(1, 10**6))
    schedule = plan(line, "broadcast", SIZE, "forest", root=0, costs=FREE).schedule
    whole = PlanClock(to_mscclpp_json(schedule.cut_into(1)), line, 1 << 24).seconds
    assert whole == pytest.approx(2 * ((1 << 24) / 1e10 + 1e-6) + 1e-6, rel=1e-6)  # and 1 us until the call has begun
    pieces = PlanClock(to_mscclpp_json(schedule.cut_into(128), nbytes=1 << 24), line, 1 << 24).seconds
    assert pieces == pytest.approx((1 + 1 / 128) * (1 << 24) / 1e10, rel=0.01)
    content = json.loads(to_mscclpp_json(schedule))
    del content["gpus"][0]["threadblocks"][0]["ops"][-1]
    with pytest.raises(StuckError, match="threadblocks wait"):
        PlanClock(json.dumps(content), line, 1 << 24)


@pytest.mark.parametrize(("machine", "kind", "inplace"), pairs([("ncv4", 1), ("ncv4", 2)], COLLECTIVES, [True, False]))
def test_pipelines_are_right(machine, kind, inplace):
    """Plans with pipelines are proved, without notes, and right for one and more pieces, in many orders."""
    topology = Topology.machine(*machine)
    schedule = planned(topology, kind).schedule
    text = to_mscclpp_json(schedule, topology, SIZE, inplace=inplace)
    assert "pipeline" in {op["name"] for op in operations(text)}
    assert [note for note in verify_mscclpp_json(text).notes if "does not store a root" not in note] == []
    root = collective(schedule).root or 0
    for cells in (1, 3) if machine[1] == 1 else (3,):
        assert fault(small(schedule, inplace=inplace), cells, 1, 16 * cells, root=root) is None


def test_pieces_have_the_planned_bytes():
    """A pipeline's unit is a piece of its block: the planned number of pieces, for the planned number of bytes."""
    topology = Topology.machine("dgx-1v")
    found = planned(topology, "broadcast")
    for op in operations(to_mscclpp_json(found.schedule, nbytes=SIZE)):
        if op["name"] == "pipeline":
            context = op["iter_context"]
            units = collective(found.schedule).units
            assert context["unit_size"] % 16 == 0
            pieces = Fraction(context["num_chunks"] * SIZE, units * context["unit_size"])
            assert found.schedule.pieces * 0.99 <= pieces <= found.schedule.pieces


def test_long_messages_have_too_many_pieces():
    """The executor counts iterations with 16 bits, so the largest message is limited."""
    schedule = ring(names(2)).cut_into(4)
    text = to_mscclpp_json(schedule, nbytes=1 << 20)
    assert json.loads(text)["max_message_size"] == 65535 * (1 << 17) * 2
    assert json.loads(to_mscclpp_json(schedule, nbytes=1 << 20, max_bytes=1 << 30))["max_message_size"] == 1 << 30
    with pytest.raises(PlanError, match="at most 65535 iterations"):
        to_mscclpp_json(schedule, nbytes=1 << 10, min_bytes=1 << 40)


@pytest.mark.parametrize("inplace", [True, False])
def test_hosts_are_joined_by_port_channels(inplace):
    """GPUs of different hosts use port channels, others memory channels; no plan needs a flush, which does nothing."""
    topology = Topology.machine("ncv4", 2)
    for schedule in (planned(topology, "all_gather").schedule, ring(topology.devices)):
        content = json.loads(to_mscclpp_json(schedule, inplace=inplace))
        for rank, gpu in enumerate(content["gpus"]):
            for channel in gpu["channels"]:
                same = {rank // 4 == peer // 4 for peer in channel["connected_to"]}
                assert same == {channel["channel_type"] == "memory"}
            for remote in gpu["remote_buffers"]:
                assert remote["access_channel_types"] == ["memory" if rank // 4 == remote["rank"] // 4 else "port"]
        text = json.dumps(content)
        assert "flush" not in {op["name"] for op in operations(text)}
        assert verify_mscclpp_json(text).notes == ()


def test_every_operation_of_a_pipeline_is_needed():
    """A plan from which one operation is removed, in or out of a pipeline, is wrong, or the verifier refuses it."""
    for topology, kind in ((Topology.machine("ncv4"), "reduce"), (Topology.machine("ncv4", 2), "broadcast")):
        schedule = planned(topology, kind).schedule
        content = json.loads(small(schedule))
        root = collective(schedule).root
        tried = 0
        for g, gpu in enumerate(content["gpus"][:2]):
            for t, block in enumerate(gpu["threadblocks"][:2]):
                places = [(k, None) for k in range(len(block["ops"]))]
                places += [(k, j) for k, op in enumerate(block["ops"]) for j in range(len(op.get("ops", ())))]
                for k, j in places:
                    less = copy.deepcopy(content)
                    ops = less["gpus"][g]["threadblocks"][t]["ops"]
                    if block["ops"][k]["name"] == "nop" and j is None and k + 1 < len(ops):
                        continue  # a nop between two pipelines can be needless
                    del (ops if j is None else ops[k]["ops"])[k if j is None else j]
                    tried += 1
                    assert refused(json.dumps(less), root), (g, t, k, j)
        assert tried > 10


def refused(text, root):
    try:
        report = verify_mscclpp_json(text, root=root)
    except ValueError:
        return True
    return bool([note for note in report.notes if "does not store a root" not in note])


def test_schedules_whose_inputs_are_read_late_have_no_pipelines():
    """In place, a one-shot result could overwrite an input that other GPUs still need, so it is exported by blocks."""
    schedule = one_shot(names(3)).cut_into(3)
    for inplace in (True, False):
        text = to_mscclpp_json(schedule, inplace=inplace)
        assert ("pipeline" in {op["name"] for op in operations(text)}) == (not inplace)
        assert verify_mscclpp_json(text).notes == ()


def test_threadblocks_are_shared_if_there_are_too_many():
    """Pipelines share threadblocks up to the number that threadblocks= allows."""
    topology = Topology.machine("ncv4")
    schedule = planned(topology, "all_reduce").schedule
    free = json.loads(small(schedule))
    most = max(len(gpu["threadblocks"]) for gpu in free["gpus"])
    text = small(schedule, threadblocks=most - 3)
    assert max(len(gpu["threadblocks"]) for gpu in json.loads(text)["gpus"]) == most - 3
    assert verify_mscclpp_json(text).notes == ()
    assert fault(text, 0, 1, 64) is None


def test_more_threadblocks_have_fewer_threads():
    """All threadblocks of a GPU must run at the same time, so a plan of more than 80 has 512 threads in each, or 256. A
    plan of fewer has 1024, also if its blocks differ in size whatever their number, as on nvlink-pairs-4."""
    wide, small_machine, uneven = (Topology.machine(*of) for of in (("dgx-1p", 2), ("ncv4",), ("nvlink-pairs-4",)))
    for schedule, topology, threads, most in (
        (planned(small_machine, "all_reduce").schedule, small_machine, 1024, 80),
        (plan(uneven, "all_reduce", SIZE, costs=FREE, granularity=0.02).schedule, uneven, 1024, 80),
        (planned(wide, "all_reduce").schedule, wide, 512, 160),
    ):
        for options, each in (({}, threads), ({"threadblocks": 80}, 1024), ({"threads": 1024}, 1024)):
            content = json.loads(to_mscclpp_json(schedule, topology, SIZE, **options))
            counts = [len(gpu["threadblocks"]) for gpu in content["gpus"]]
            assert content["num_threads_per_block"] == each
            assert max(counts) <= (most if each == threads else 80)
            assert (max(counts) > 80) == (each == 512)
    text = to_mscclpp_json(schedule, wide, SIZE)
    assert verify_mscclpp_json(text).notes == ()
    alone = text.replace('"num_threads_per_block": 512', '"num_threads_per_block": 1024')
    assert any("1 per multiprocessor; not on GPUs with fewer" in note for note in verify_mscclpp_json(alone).notes)


def test_few_threadblocks_are_doubled():
    """Where a GPU would have up to 4 threadblocks, each chunk has two parts, so that links are busy while one waits."""
    schedule = planned(Topology.machine("pcie-8"), "reduce").schedule
    made = collective(schedule)
    assert even_parts(made, (1,) * 4, 80, pipelines=True) == (2,) * 4
    assert even_parts(made, (1,) * 4, 4, pipelines=True) == (1,) * 4
    assert even_parts(made, (1,) * 4, 80, pipelines=False) == (1,) * 4


@pytest.mark.parametrize("machine", ["hgx-h100", "dgx-1v"])
def test_parts_fill_the_links(machine):
    """Each chunk has at least as many parts as its channels need, and parts cover the buffer without gaps."""
    topology = Topology.machine(machine)
    for kind in COLLECTIVES:
        schedule = planned(topology, kind).schedule
        needed = parts_of_chunks(schedule, topology)
        made = collective(schedule)
        parts = even_parts(made, needed, 80, pipelines=schedule.pieces > 1)
        assert all(found >= least for found, least in zip(parts, needed, strict=True))
        blocks = sorted(divide_chunks(made, parts).blocks, key=lambda block: block.offset)
        ends = [0, *(block.offset + block.size for block in blocks)]
        assert ends[:-1] == [block.offset for block in blocks]
        assert ends[-1] == divide_chunks(made, parts).units


def test_fewer_parts_if_there_are_too_many_threadblocks(monkeypatch):
    """With few threadblocks, chunks have fewer parts than their links need."""
    monkeypatch.setattr(writer, "LONG_BLOCK", 1 << 60)  # no pipelines
    topology = Topology.machine("hgx-b200")
    schedule = planned(topology, "all_gather").schedule
    for most in (80, 40, 8, 4):
        content = json.loads(to_mscclpp_json(schedule, topology, threadblocks=most))
        assert max(len(gpu["threadblocks"]) for gpu in content["gpus"]) == {80: 64, 40: 32, 8: 8, 4: 4}[most]


# ---- switches that reduce


@pytest.mark.parametrize("inplace", [True, False])
def test_in_network_plans_use_switch_channels(inplace):
    """An all-reduce through one switch is proved and right. It takes 1 + 1/n times the buffer's time on n GPUs' links,
    since a GPU also reads its own data through the switch; on 8 GPUs that is no slower than the plan's trees."""
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
        assert len(topology.devices) > 3 or fault(text, 0, 2) is None
        n, link = len(topology.devices), float(topology.links[0].bandwidth)
        reached = algbw(text, ring(topology.devices), topology)
        assert reached == pytest.approx(link / (1 + 1 / n), rel=0.01)
        assert n < 8 or reached >= 0.97 * found.algbw


def test_formats_that_cannot_hold_in_network_plans_are_refused():
    """The error comes before planning, and states the reason."""
    star = Topology.star(names(4)).with_switches(reducing=True)
    for name, topology, text in (
        ("msccl", star, "MSCCL XML has no operation in switches"),
        ("mscclpp", Topology.machine("hgx-h100", 2, in_network=True), "join GPUs of one host"),
        ("mscclpp", Topology.star(names(18)).with_switches(reducing=True), "joins at most 17 GPUs"),
    ):
        with pytest.raises(PlanError, match=text):
            check_exportable(name, topology, "all_reduce")
        check_exportable(name, topology, "broadcast")  # it does not use switches
        check_exportable("trace", topology, "all_reduce")
    two = Topology.machine("hgx-h100", 2, in_network=True)
    with pytest.raises(PlanError, match="MSCCL\\+\\+ cannot hold this plan: its switch channels join GPUs of one host"):
        to_mscclpp_json(planned(two, "all_reduce").schedule, two)
