"""Exports to MSCCL XML: the file of a schedule is right on a simulated machine; a schedule that does not fit the format
is refused with the reason."""

import random
import re
import xml.etree.ElementTree as ET
from fractions import Fraction

import pytest
from budget import examples
from exports import EXCHANGES, exchange_id, expression, expressions, reductions, results, rotated, synchronous
from hypothesis import given
from hypothesis import strategies as st
from msccl_machine import Machine, fault
from strategies import ALGORITHMS, algorithms, names, requests

from crossreduce import ArgumentError, Chunk, PlanError, Schedule, ScheduleError, Step, Topology
from crossreduce.export.formats.collective import collective
from crossreduce.export.formats.msccl.format import read_msccl_xml
from crossreduce.export.formats.msccl.verifier import verify_msccl_xml
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.planning import PLANNERS, direct, one_device, one_shot, plan, recursive_doubling, ring


def check_order(schedule, text):
    """Check that each result is combined in the order that the schedule lists."""
    cells, made = expressions(schedule), collective(schedule)
    machine = Machine(text, True, root=made.root, value=lambda rank, chunk: f"{rank}", combine=expression)
    machine.run(random.Random(0))
    for (rank, unit), chunk in results(made).items():
        assert machine.memory[machine.address(rank, "o", unit)] == cells[chunk, rank], f"rank {rank}, unit {unit}"


@pytest.mark.parametrize("planner", ALGORITHMS)
@pytest.mark.parametrize("n", range(2, 10))
def test_every_planner_exports(planner, n):
    """Each planner's all-reduce of 2 to 9 devices and 1 to 3 packs is exported; one slot per connection is enough."""
    for packs in (1, 2, 3):
        schedule = PLANNERS[planner](names(n), packs=packs)
        text = to_msccl_xml(schedule, inplace=packs != 2, outofplace=packs != 3)
        report = verify_msccl_xml(text, slots=1)
        assert (report.coll, report.ngpus, report.notes) == ("allreduce", n, ())
        assert (report.inplace, report.outofplace) == (packs != 2, packs != 3)
        if n <= 4:
            assert fault(text, n, 3, slots=1) is None


@given(algorithms, requests(st.integers(2, 6), most_packs=3), st.integers(0, 99))
@examples(60)
def test_the_five_collectives_are_exported(algorithm, ask, seed):
    """A planner's schedule of 2 or more devices, from all to all or one, or from one to all, is exported, no other."""
    schedule = PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)
    n = len(ask.devices)
    fits = (len(ask.sources) == n and len(ask.destinations) in (1, n)) or (
        len(ask.destinations) == n and len(ask.sources) in (1, n)
    )
    if not fits or n == 1:
        with pytest.raises(PlanError, match=r"MSCCL|format|collective of NCCL|NCCL's collectives"):
            to_msccl_xml(schedule)
        return
    text = to_msccl_xml(schedule)
    root = min(ask.destinations if len(ask.destinations) == 1 else ask.sources)
    rank = next(k for k, name in enumerate(ask.devices) if name == root)
    report = verify_msccl_xml(text, slots=1)
    assert report.root == (None if len(ask.sources) == len(ask.destinations) == n else rank)
    assert fault(text, seed, 2, root=rank, slots=1) is None


@given(st.sampled_from(["all_reduce", "reduce"]).flatmap(reductions), st.integers(1, 4), st.booleans(), st.booleans())
@examples(60)
def test_any_shares_and_orders(schedule, channels, inplace, outofplace):
    """Files of schedules with uneven shares, own operands at any position and devices that only forward are right, and
    combine in the listed order."""
    text = to_msccl_xml(schedule, channels=channels, inplace=inplace, outofplace=outofplace or not inplace)
    assert fault(text, channels, 2, slots=1) is None
    if inplace:
        check_order(schedule, text)


@given(synchronous(), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 99))
@examples(150)
def test_a_round_reads_the_values_of_the_round_before(schedule, channels, inplace, outofplace, seed):
    """Steps of a round read what the previous round left, also from devices whose values the same round replaces.

    Messages of several chunks do not fit into a connection's one slot, yet must not wait for each other in a cycle.
    """
    text = to_msccl_xml(schedule, channels=channels, inplace=inplace, outofplace=outofplace or not inplace)
    root = collective(schedule).root or 0
    assert fault(text, seed, 4, root=root, slots=1) is None
    if inplace:
        check_order(schedule, text)


@pytest.mark.parametrize("schedule", EXCHANGES, ids=exchange_id)
def test_exchanges(schedule):
    """Files are right if devices read each other's values in one round: one-shot, recursive doubling, and rotations."""
    text = to_msccl_xml(schedule)
    assert fault(text, 1, 5, slots=1) is None
    check_order(schedule, text)


def test_exchanges_of_single_chunks_need_no_scratch_memory():
    """A message that fits into a slot is sent before the sum overwrites its memory, so no scratch memory is needed."""
    for schedule in (recursive_doubling(names(2)), recursive_doubling(names(8)), one_shot(names(2))):
        text = to_msccl_xml(schedule, outofplace=False)
        assert {gpu.sizes["s"] for gpu in read_msccl_xml(text).gpus} == {0}
        assert "cpy" not in text


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_the_own_operand_may_be_at_any_position(place, fresh, last):
    """A device's own input or partial sum may be at any position of the operands."""
    everyone = tuple(range(5))
    others = [1, 2, 3] if fresh else [1, 2]
    group = (*others[:place], 0, *others[place:])
    rounds = [] if fresh else [(Step(0, 0, (0, 3)),)]
    rounds += [(Step(0, 0, group),), (Step(0, 0, (4, 0)),) if last else (Step(0, 4, (0, 4)),)]
    chunk = Chunk(Fraction(1), everyone, (0 if last else 4,))
    schedule = Schedule("reduce", "custom", names(5), (chunk,), tuple(rounds))
    text = to_msccl_xml(schedule)
    assert fault(text, place, 10, root=chunk.destinations[0], slots=1) is None
    check_order(schedule, text)


@pytest.mark.parametrize("planner", ALGORITHMS)
def test_the_order_of_combination_is_the_schedules(planner):
    """Sums are combined in the listed order, so their bits equal the library's own results."""
    for n in (3, 5, 6):
        schedule = PLANNERS[planner](names(n), packs=2)
        check_order(schedule, to_msccl_xml(schedule))


@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"])
def test_plans_on_a_topology_export(kind):
    """Plans for a topology, with trees of different shares, are exported for each collective."""
    wiring = Topology.from_matrix([[0, 25, 50, 0], [25, 0, 0, 50], [50, 0, 0, 25], [0, 50, 25, 0]])
    schedule = plan(wiring, kind, algorithm="forest").schedule
    text = to_msccl_xml(schedule)
    report = verify_msccl_xml(text, slots=1)
    assert report.coll == kind.replace("_", "")
    assert fault(text, 1, 3, root=report.root, slots=1) is None


@pytest.mark.parametrize("which", ["reduce_scatter", "all_gather"])
def test_chunks_are_placed_in_the_parts_of_their_owners(which):
    """Rank k owns the k-th part of the buffer, and its chunks are placed there, whatever their order."""
    schedule = rotated(which)
    made = collective(schedule)
    assert [(block.chunk, block.offset) for block in made.blocks] == [(0, 2), (1, 4), (2, 0), (3, 3)]
    assert (made.inputs, made.outputs) == ((6, 2) if which == "reduce_scatter" else (2, 6))
    text = to_msccl_xml(schedule)
    assert fault(text, 0, 5, slots=1) is None


def test_needless_steps_are_left_out():
    """Steps that no result depends on are not in the file: copies to the same device, unread sums, empty chunks."""
    both = (0, 1)
    chunks = (Chunk(Fraction(1), both, both), Chunk(Fraction(0), both, both))
    rounds = (
        (Step(0, 0, (0,)), Step(1, 0, both)),
        (Step(0, 0, both), Step(1, 1, (0,))),
        (Step(0, 1, (1, 1)),),
        (Step(0, 1, (0,)), Step(0, 0, (0,))),
    )
    schedule = Schedule("all_reduce", "custom", names(2), chunks, rounds)
    needed = Schedule("all_reduce", "custom", names(2), chunks[:1], ((rounds[1][0],), (rounds[3][0],)))
    assert to_msccl_xml(schedule) == to_msccl_xml(needed)


def test_inputs_stay_unchanged():
    """Out of place, no step writes into an input buffer; partial sums are in the output or in scratch memory."""
    for schedule in (ring(names(4), destinations=["cpu:1"]), rotated("reduce_scatter"), direct(names(4))):
        for gpu in ET.fromstring(to_msccl_xml(schedule, inplace=False)).iter("gpu"):
            written = {step.get("dstbuf") for step in gpu.iter("step") if step.get("type") in ("r", "rrc", "re", "cpy")}
            assert "i" not in written


# What the runtimes' parsers read: one blank before each attribute, double quotes, no escapes, one element per line.
LINE = re.compile(r' *<(/?)(algo|gpu|tb|step)((?: [A-Za-z_]+="[A-Za-z0-9_.:+/@-]*")*)(/?)>')


@given(algorithms, st.integers(2, 5), st.integers(1, 3))
@examples(20)
def test_the_runtimes_can_read_the_text(algorithm, n, packs):
    """The text has one element per line, all ten attributes of ``<algo>``, and no prolog, tabs, escapes or comments."""
    text = to_msccl_xml(PLANNERS[algorithm](names(n), packs=packs), min_bytes=1024, max_bytes=1 << 20, proto="LL")
    lines = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(lines)
    algo = dict(re.findall(r'(\w+)="([^"]*)"', lines[0][3]))
    assert list(algo) == [
        "name",
        "proto",
        "nchannels",
        "nchunksperloop",
        "ngpus",
        "coll",
        "inplace",
        "outofplace",
        "minBytes",
        "maxBytes",
    ]
    assert (algo["proto"], algo["minBytes"], algo["maxBytes"]) == ("LL", "1024", "1048576")
    assert {line[2] for line in lines if line[4]} <= {"step"}
    assert len({line[3].count("=") for line in lines if line[2] == "step"}) == 1


def test_equal_schedules_give_equal_text():
    """The text depends only on the schedule and the arguments."""
    for planner in ALGORITHMS:
        schedule = PLANNERS[planner](names(5), packs=2)
        again = Schedule.from_json(schedule.to_json())
        assert to_msccl_xml(schedule) == to_msccl_xml(again)


def test_a_long_threadblock_gets_more_channels():
    """Chunks are spread over more channels if a threadblock would otherwise have more than 64 steps."""
    for packs, channels in ((1, 1), (4, 1), (5, 2), (9, 2), (17, 4)):
        text = to_msccl_xml(ring(names(8), packs=packs))
        algo = read_msccl_xml(text)
        assert algo.channels == channels
        assert max(len(block.steps) for gpu in algo.gpus for block in gpu.threadblocks) <= 64


def test_the_number_of_channels_can_be_given():
    """With channels=, chunks use that many channels; no two threadblocks of a GPU have the same channel and peers."""
    algo = read_msccl_xml(to_msccl_xml(direct(names(4)), channels=4))
    assert algo.channels == 4
    for gpu in algo.gpus:
        used = [(block.channel, block.send, block.recv) for block in gpu.threadblocks]
        assert {channel for channel, *_ in used} == {0, 1, 2, 3}
        assert len(set(used)) == len(used)


def test_large_blocks_are_split():
    """A chunk of more than 71 units, the equal parts of the buffer, is moved by several steps of at most 71 units."""
    parts = (Fraction(199, 201), Fraction(2, 201))
    schedule = Schedule(
        "all_reduce",
        "custom",
        names(2),
        tuple(Chunk(part, (0, 1), (0, 1)) for part in parts),
        (tuple(Step(c, 0, (0, 1)) for c in (0, 1)), tuple(Step(c, 1, (0,)) for c in (0, 1))),
    )
    text = to_msccl_xml(schedule)
    counts = [step.chunks for block in read_msccl_xml(text).gpus[0].threadblocks for step in block.steps]
    assert counts == [71, 71, 57, 2] * 2
    assert fault(text, 0, 2, slots=1) is None


def shares(*parts):
    """Return an all-reduce of two devices by one_device, in chunks of the given shares."""
    chunks = tuple(Chunk(Fraction(part), (0, 1), (0, 1)) for part in parts)
    numbers = range(len(parts))
    rounds = (tuple(Step(c, 0, (0, 1)) for c in numbers), tuple(Step(c, 1, (0,)) for c in numbers))
    return Schedule("all_reduce", "one_device", names(2), chunks, rounds)


@pytest.mark.parametrize(
    ("schedule", "options", "text"),
    [
        (shares("1/40000", "39999/40000"), {}, "need 40000 equal chunks, but the runtimes count up to 32768"),
        (direct(names(24)), {"channels": 2}, "RCCL has 64 threadblocks per GPU, gpu 0 needs 70"),
        (
            direct(names(34)),
            {"runtime": "msccl", "channels": 1},
            "has 32 ranks to send to on a channel, gpu 0 needs 33",
        ),
        (ring(names(4)), {"channels": 33}, "msccl-executor-nccl has 32 channels, the file needs 33"),
        (ring(names(4)), {"channels": 129, "runtime": "rccl"}, "RCCL has 128 channels, the file needs 129"),
        (ring(names(8), packs=5), {"channels": 1}, "has 64 steps per threadblock, gpu 0 needs 70"),
        (shares("1"), {"channels": 0}, "channels must be at least 1"),
        (shares("1"), {"channels": True}, "channels must be an integer"),
        (shares("1"), {"min_bytes": "1M"}, "min_bytes must be an integer"),
        (
            one_device(names(3), destinations=["cpu:0", "cpu:1"]),
            {},
            "no collective of NCCL has these sources and destinations",
        ),
        (
            one_device(names(4), ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"]),
            {},
            "a source or a destination.*\n.*cpu:2, cpu:3\n.*a machine without in_network",
        ),
        (one_device(names(1)), {}, "a collective of one device has no transfers"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(schedule, options, text):
    """The error states which limit or rule the schedule or an argument breaks."""
    with pytest.raises((PlanError, ArgumentError), match=text):
        to_msccl_xml(schedule, **options)


def test_the_limits_of_one_runtime_can_be_chosen():
    """Only the limits of the given runtime must hold."""
    schedule = direct(names(24))
    with pytest.raises(PlanError, match=r'RCCL has 64 threadblocks(.*\n)+.*runtime="msccl"'):
        to_msccl_xml(schedule, channels=2)
    assert verify_msccl_xml(to_msccl_xml(schedule, channels=2, runtime="msccl")).notes == (
        "RCCL has 64 threadblocks per GPU, gpu 0 needs 70",
    )


def test_unequal_parts_are_refused():
    """In NCCL's reduce-scatter every rank must have an equal part."""
    everyone = (0, 1)
    chunks = (Chunk(Fraction(1, 3), everyone, (0,)), Chunk(Fraction(2, 3), everyone, (1,)))
    schedule = Schedule("reduce_scatter", "custom", names(2), chunks, ((Step(0, 0, everyone), Step(1, 1, everyone)),))
    with pytest.raises(PlanError, match=r"every rank must have an equal part.*\n.*cpu:0 has 1/3 of it"):
        to_msccl_xml(schedule)


def test_a_wrong_schedule_is_not_exported():
    """A schedule that ``verify`` rejects is not exported."""
    chunk = Chunk(Fraction(1), (0, 1), (0, 1))
    with pytest.raises(ScheduleError, match="lost"):
        to_msccl_xml(Schedule("all_reduce", "custom", names(2), (chunk,), ((Step(0, 0, (0, 1)),),)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"proto": "simple"}, "unknown protocol"),
        ({"runtime": "nccl"}, "unknown runtime"),
        ({"inplace": False, "outofplace": False}, "in place, calls out of place, or both"),
        ({"min_bytes": -1}, "min_bytes must not be negative"),
        ({"min_bytes": 2, "max_bytes": 1}, "max_bytes must not be below min_bytes"),
        ({"name": 'a"b'}, "1 to 200 plain characters"),
        ({"name": "x" * 256}, "1 to 200 plain characters"),
        ({"name": 3}, "1 to 200 plain characters"),
        ({"channels": 0}, "channels"),
    ],
)
def test_bad_arguments(options, text):
    """The error names the invalid argument."""
    with pytest.raises(ArgumentError, match=text):
        to_msccl_xml(ring(names(2)), **options)


def test_names():
    """A given name is used unchanged; in the default name, "_" replaces characters that are not letters or digits."""
    assert '<algo name="mine-1" ' in to_msccl_xml(ring(names(2)), name="mine-1")
    named = Schedule(*("all_reduce", 'my "ring" & <eye>'), *shares("1")._parts[2:])
    assert '<algo name="allreduce_my__ring_____eye__2" ' in to_msccl_xml(named)
    long = Schedule("all_reduce", "x" * 300, *shares("1")._parts[2:])
    assert f'<algo name="allreduce_{"x" * 190}" ' in to_msccl_xml(long)
