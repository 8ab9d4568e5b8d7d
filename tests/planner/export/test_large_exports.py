"""Exports of large machines: plans that a format cannot hold are refused at once, and one rank is exported alone."""

import itertools
from collections import Counter
from fractions import Fraction

import exports
import pytest
from budget import examples
from hypothesis import given
from strategies import names

import crossreduce as cr
from crossreduce import Chunk, PlanError, Schedule, Step, Topology
from crossreduce.export.formats.collective import collective
from crossreduce.export.formats.msccl.format import Runtime, read_msccl_xml
from crossreduce.export.formats.msccl.resource_bounds import least_broken
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.export.formats.mscclpp import to_mscclpp_json
from crossreduce.export.formats.nccl_graph import rings
from crossreduce.lowering import lower
from crossreduce.planning import direct, halving_doubling, one_device, ring
from crossreduce.schedule import Costs, GeneratedSchedule, timeline
from crossreduce.schedule.generated_schedule import rotations

MACHINE = Topology.machine("hgx-h100", 5)


def exact_limits(text):
    """Return a runtime whose limits are exactly what a file needs."""
    gpus = read_msccl_xml(text).gpus
    blocks = max(len(gpu.threadblocks) for gpu in gpus)
    steps = max(len(block.steps) for gpu in gpus for block in gpu.threadblocks)
    own = max(len(gpu.threadblocks) + sum(len(block.steps) for block in gpu.threadblocks) for gpu in gpus)
    return Runtime("runtime", channels=128, threadblocks=blocks, steps=steps, elements=1 + len(gpus) + own)


def check_least(schedule, text):
    """Check that ``least_broken`` does not refuse a schedule for a runtime whose limits are those of its file."""
    assert least_broken(collective(schedule), [exact_limits(text)]) == ""


@examples(40)
@given(exports.synchronous())
def test_what_a_file_needs_at_least_is_not_more_than_it_has(schedule):
    """``least_broken`` refuses no schedule for a runtime whose limits are just large enough for its file."""
    check_least(schedule, to_msccl_xml(schedule))


def test_plans_need_at_least_what_is_counted():
    """The same holds for plans with pieces and parts, and for generated schedules, of which few ranks are counted."""
    topology = Topology.machine("hgx-h100")
    for kind in ("all_reduce", "broadcast", "all_gather"):
        schedule = cr.plan(topology, kind, "64M", operation_s=0).schedule
        check_least(schedule, to_msccl_xml(schedule, topology, 64 << 20))
    for schedule in (ring(names(34)), halving_doubling(names(40))):
        assert isinstance(schedule, GeneratedSchedule)
        check_least(schedule, to_msccl_xml(schedule))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (direct(names(66)), "RCCL has 64 threadblocks per GPU, gpu 0 needs at least 65"),
        (one_device(names(66), root="cpu:5"), "RCCL has 64 threadblocks per GPU, gpu 5 needs at least 65"),
        (exports.shares(*[Fraction(1, 4040)] * 4040), "RCCL has 4096 XML elements per GPU, gpu 0 needs at least 4107"),
        (ring(names(190)), "at most 65536 steps are verified, the file needs 71820"),
    ],
)
def test_plans_that_no_msccl_file_can_hold(schedule, words):
    """The error has the limit, the rank that exceeds it, and the least number that the rank needs."""
    with pytest.raises(PlanError, match=words):
        to_msccl_xml(schedule)


@pytest.mark.parametrize(
    ("write", "algorithm", "words"),
    [
        (to_msccl_xml, "forest", "does not fit into the runtime: at most 65536 steps are verified"),
        (to_msccl_xml, "direct", "RCCL has 64 threadblocks per GPU, gpu 0 needs at least"),
        (to_mscclpp_json, "direct", "MSCCL.. allows 16 channels per threadblock, but host0/cuda:0 needs at least"),
    ],
)
def test_plans_of_256_devices_are_refused_at_once(write, algorithm, words):
    """A plan that does not fit is refused before the steps of its generated schedule are listed."""
    hosts = Topology.machine("hgx-h100", 32)
    plan = cr.plan(hosts, nbytes="1G", algorithm=algorithm)
    with pytest.raises(PlanError, match=words):
        write(plan.schedule, hosts, plan.nbytes)
    assert not {"rounds", "routes", "explicit"} & plan.schedule.__dict__.keys()
    assert not {"by_round", "transfers", "routes"} & {*vars(lower(plan.schedule))}


def test_the_receivers_of_a_value_on_one_host_and_on_others_count_apart():
    """A threadblock has 16 channels of each type. They suffice for ten receivers on the root's host and ten on another
    one, but not for 17 senders on one host."""
    devices = [f"host{host}/cuda:{k}" for host in (0, 1) for k in range(11)][:-1]
    assert to_mscclpp_json(one_device(devices, ["host0/cuda:0"], devices))
    with pytest.raises(PlanError, match="16 channels per threadblock, but cuda:0 needs at least 17"):
        to_mscclpp_json(one_device([f"cuda:{k}" for k in range(18)], destinations=["cuda:0"]))


def schedules():
    """Yield generated schedules with and without routes."""
    yield from (planner(names(n)) for planner in (ring, direct, halving_doubling) for n in (34, 40))
    for kind in ("all_reduce", "broadcast", "all_gather"):
        yield cr.plan(MACHINE, kind, "40M", "forest").schedule


def test_routes_and_transfers_are_those_of_all_chunks():
    """For a transfer, ``through`` and ``moves`` return the same in a generated schedule as in one with all steps."""
    for schedule in schedules():
        program, listed = lower(schedule), lower(schedule.explicit)
        for r, sent in enumerate(listed.transfers):
            for one in sent[:: max(1, len(sent) // 200)]:  # about 200 transfers of each round
                transfer = r, one.chunk, one.src, one.dst
                assert program.through(*transfer) == listed.through(*transfer) == one.through
                assert schedule.through(*transfer) == one.through
                assert program.moves(*transfer)
                assert listed.moves(*transfer)
                reverse = r, one.chunk, one.dst, one.src
                assert program.moves(*reverse) == listed.moves(*reverse)


def test_alike_devices_have_equally_many_messages():
    """``alike`` has one device of each group that sends, receives and combines equally often, and the group's size."""

    def counts(part):  # of sends, receives and combinations, for each stage of a device's program
        return [(len(stage.sends), len(stage.receives), len(stage.combinations)) for stage in part.stages]

    for schedule in schedules():
        program, n = lower(schedule), len(schedule.devices)
        assert sum(program.alike.values()) == n
        groups = Counter(map(str, (counts(program.on(device)) for device in range(n))))
        found = Counter()
        for device, size in program.alike.items():
            found[str(counts(program.on(device)))] += size
        assert found == groups
        assert lower(schedule.explicit).alike == dict.fromkeys(range(n), 1)


@pytest.mark.parametrize(
    ("kind", "node"),
    [("all_reduce", None), ("all_reduce", "host0/cuda:3"), ("broadcast", "host2/nvswitch"), ("broadcast", "rail5")],
)
def test_the_times_of_transfers_are_those_of_all_steps(kind, node):
    """``timeline`` gives the transfers of a generated schedule the same times as those of the schedule with all steps.
    With ``node=``, it returns those whose route has this node."""
    schedule = cr.plan(MACHINE, kind, "40M", "forest").schedule.cut_into(3)
    assert isinstance(schedule, GeneratedSchedule)
    costs = Costs(operation_s=1e-6, messages_per_s=1e6)

    def listed(one, **options):
        return sorted(timeline(one, MACHINE, "40M", costs=costs, **options))

    found = listed(schedule, node=node)
    due = [move for move in listed(schedule.explicit) if node is None or any(node in link for link in move.links)]
    assert len(found) >= 48
    assert [move[:6] for move in found] == [move[:6] for move in due]
    for move, other in zip(found, due, strict=True):
        assert move[6:] == pytest.approx(other[6:], rel=1e-9)  # the times


def test_rings_of_generated_schedules():
    """The rings of a generated schedule are those of all its chunks, also if the symmetry maps one ring to another."""
    everyone, order = tuple(range(4)), (0, 1, 3, 2)
    steps = [Step(0, b, (a, b)) for a, b in itertools.pairwise(order)]
    steps += [Step(0, b, (a,)) for a, b in itertools.pairwise((order[-1], *order[:-1]))]
    chunks, rounds = (Chunk(Fraction(1), everyone, everyone),), tuple((step,) for step in steps)
    base = Schedule("all_reduce", "ring", names(4), chunks, rounds)
    schedule = GeneratedSchedule(base, rotations([4], 4), base.devices)
    assert rings(schedule) == rings(schedule.explicit)
    assert list(rings(schedule)) == list(rings(schedule.explicit))
    assert len(rings(schedule)) == 4
    for planned in (ring(names(33)), ring(names(40), first=7)):
        assert rings(planned) == rings(planned.explicit)
