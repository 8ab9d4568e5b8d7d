"""MSCCL XML of plans with pieces and fast links: the files are right in any order of events and over several slices of
a message, and they reach the rate of the plan on a simulated clock."""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
from budget import examples
from exports import KINDS, shares, synchronous
from file_clock import msccl_seconds
from hypothesis import given
from hypothesis import strategies as st
from msccl_files import file
from msccl_machine import fault
from strategies import names

from crossreduce import Chunk, Schedule, Step, Topology
from crossreduce.export import EXPORTERS
from crossreduce.export.formats.collective import collective
from crossreduce.export.formats.msccl.format import read_msccl_xml
from crossreduce.export.formats.msccl.verifier import verify_msccl_xml
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.planning import direct, plan
from crossreduce.schedule import Costs

LARGE = 256 << 20
KERNEL = Costs(operation_s=0)  # a file runs as one kernel, so no operations are queued


def types_of(text):
    """Return the types of the steps of each threadblock, by GPU and threadblock."""
    gpus = read_msccl_xml(text).gpus
    return {
        (g, t): [s.type for s in block.steps] for g, gpu in enumerate(gpus) for t, block in enumerate(gpu.threadblocks)
    }


@given(synchronous(), st.integers(2, 5), st.booleans(), st.integers(0, 99))
@examples(60)
def test_files_with_pieces_are_right(schedule, pieces, inplace, seed):
    """Any schedule with pieces gives a right file, also over several slices of a long message, with one slot."""
    text = to_msccl_xml(replace(schedule, pieces=pieces), inplace=inplace, outofplace=not inplace)
    root = collective(schedule).root or 0
    assert verify_msccl_xml(text, slots=1).notes[:1] in ((), verify_msccl_xml(text).notes[:1])
    assert fault(text, seed, tries=2, root=root, slots=1) is None
    assert fault(text, seed, tries=1, root=root, slots=1, loops=3) is None  # three slices


@given(synchronous(), st.integers(1, 3), st.sampled_from([10, 60, 150]), st.booleans(), st.integers(0, 99))
@examples(12)
def test_files_of_fast_links_are_right(schedule, pieces, gb_per_s, inplace, seed):
    """The file of a schedule for fast links, on which chunks have parts with separate channels, is right."""
    wiring = Topology.full_mesh(schedule.devices, gb_per_s)
    text = to_msccl_xml(replace(schedule, pieces=pieces), wiring, LARGE, inplace=inplace, outofplace=not inplace)
    assert fault(text, seed, tries=2, root=collective(schedule).root or 0, slots=1, loops=2) is None


def chain(collective, pieces):
    """Return a broadcast or reduce from end to end of a chain of four devices."""
    if collective == "broadcast":
        chunk, rounds = Chunk(Fraction(1), (0,), (0, 1, 2, 3)), tuple((Step(0, k + 1, (k,)),) for k in range(3))
    else:
        chunk, rounds = Chunk(Fraction(1), (0, 1, 2, 3), (0,)), tuple((Step(0, k, (k, k + 1)),) for k in (2, 1, 0))
    return Schedule(collective, "chain", names(4), (chunk,), rounds, pieces)


def test_a_path_of_messages_is_forwarded_in_one_step():
    """Ranks between the ends of a path receive and send in one step per piece, in one threadblock. Out of place, a
    partial sum that a rank only forwards is not stored."""
    for kind, steps in (("broadcast", "s rcs rcs r"), ("reduce", "rrc rrs rrs s")):
        types = types_of(to_msccl_xml(chain(kind, 8), outofplace=False))
        assert types == {(rank, 0): [step] * 8 for rank, step in enumerate(steps.split())}
    assert {gpu.sizes["s"] for gpu in read_msccl_xml(to_msccl_xml(chain("reduce", 8))).gpus} == {0}


def test_pieces_are_as_many_as_a_threadblock_has_steps_for():
    """A file has the planned number of pieces, or the number that 64 steps of a threadblock allow."""
    for planned, written in ((1, 1), (5, 5), (64, 64), (1000, 64)):
        text = to_msccl_xml(chain("broadcast", planned), outofplace=False)
        assert max(map(len, types_of(text).values())) == written


def test_links_that_are_faster_than_a_channel_get_several():
    """There are so many channels that each carries at most 24 GB/s. Parts are equal, so 150 GB/s need 8 channels."""
    for gb_per_s, channels in ((12, 1), (24, 1), (48, 2), (150, 8)):
        text = to_msccl_xml(direct(names(2)), Topology.full_mesh(names(2), gb_per_s))
        assert read_msccl_xml(text).channels == channels, gb_per_s


def test_a_step_of_several_units_is_divided_if_it_is_large():
    """Without planned pieces, a part of several units is divided if it is known to have more than 1 MiB."""
    schedule = shares("43/64", "21/64")
    for nbytes, steps in ((None, 2), (1 << 20, 2), (64 << 20, 43)):  # 43 pieces of 1 MiB
        text = to_msccl_xml(schedule, Topology.full_mesh(names(2), 12), nbytes)
        assert max(map(len, types_of(text).values())) == steps, nbytes


MACHINES = (("dgx-1p", 1), ("dgx-a100", 1), ("ncv4", 1), ("ncv4", 2), ("pcie-8", 1))
DEFAULT = [*zip(MACHINES, KINDS, strict=True), (("pcie-8", 1), "reduce")]


@pytest.mark.parametrize(
    ("machine", "kind"),
    [
        pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow)
        for case in itertools.product(MACHINES, KINDS)
    ],
)
def test_files_reach_the_rate_of_their_plans(machine, kind):
    """On the clock of file_clock.py, a file for 256 MiB reaches 97 % of the predicted rate of its plan. The file of a
    reduce on ``pcie-8`` reaches 95 %, since its threadblocks have steps for only 32 of 122 pieces."""
    wiring = Topology.machine(*machine)
    made = plan(wiring, kind, LARGE, costs=KERNEL, granularity=0.02)
    text = to_msccl_xml(made.schedule, made.topology, LARGE)
    least = 0.95 if (machine, kind) == (("pcie-8", 1), "reduce") else 0.97
    assert made.seconds / msccl_seconds(text, wiring, LARGE, made.schedule) > least


def test_files_without_pieces_are_slower():
    """On the clock, a file of a forest without pieces takes over 1.8 times as long as planned, since its steps run one
    after the other. A single message takes its bytes divided by the bandwidth, plus the latency."""
    wiring = Topology.machine("epyc-numa-8")
    made = plan(wiring, "all_reduce", LARGE, costs=KERNEL, granularity=0.02)
    slow = to_msccl_xml(replace(made.schedule, pieces=1))
    assert msccl_seconds(slow, wiring, LARGE, made.schedule) > 1.8 * made.seconds
    assert msccl_seconds(to_msccl_xml(made.schedule, wiring), wiring, LARGE, made.schedule) < made.seconds / 0.97
    one = file("broadcast", 1, (0, (1, -1, 0, "s i0 i0 1")), (0, (-1, 0, 0, "r i0 i0 1")))
    assert msccl_seconds(one, Topology.ring(2, 1, 1e-6), 8 << 20) == pytest.approx((8 << 20) / 1e9 + 1e-6)


def test_a_message_must_be_a_multiple_of_the_units_of_the_file():
    """With pieces, a file has more units than the schedule. ``multiple_of`` returns the number of units of the file."""
    made = plan(Topology.machine("ncv4"), "broadcast", LARGE, costs=KERNEL)
    text = EXPORTERS["msccl"].write(made)
    assert EXPORTERS["msccl"].multiple_of(made, text) == read_msccl_xml(text).chunks > made.schedule.units
    assert EXPORTERS["schedule"].multiple_of(made, EXPORTERS["schedule"].write(made)) == made.schedule.units
