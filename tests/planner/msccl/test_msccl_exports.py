"""Exports to MSCCL XML and MSCCL++ plans: they are proved, and right on simulated machines, which share no code with
the library; each result is combined in the order that the schedule lists."""

import json
import random
import xml.etree.ElementTree as ET
from fractions import Fraction
from typing import NamedTuple

import msccl_machine
import mscclpp_values
import pytest
from budget import examples
from exports import expression, expressions, results, rotated, synchronous
from hypothesis import given
from hypothesis import strategies as st
from pairs import pairs
from strategies import ALGORITHMS, algorithms, names, requests

from crossreduce import Chunk, PlanError, Schedule, ScheduleError, Step
from crossreduce.export.formats.collective import collective
from crossreduce.export.formats.msccl.verifier import verify_msccl_xml
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.export.formats.mscclpp import to_mscclpp_json, verify_mscclpp_json
from crossreduce.planning import PLANNERS, direct, one_device, ring


class Msccl(NamedTuple):
    """How the tests write, prove and run MSCCL XML. One slot per connection must be enough."""

    def write(self, schedule, *args, inplace=True, **options):
        return to_msccl_xml(schedule, *args, inplace=inplace, outofplace=not inplace, **options)

    def proved(self, text, root=None):
        """Prove a file, and return its collective and root."""
        report = verify_msccl_xml(text, root=root, slots=1)
        return report.coll, report.root

    def fault(self, text, seed, tries, root=None):
        """Return the fault of a file in random executions, or ``None``."""
        return msccl_machine.fault(text, seed, tries, root=root or 0, slots=1)

    def results(self, text, root):
        """Return a function that returns the expression at a unit of a rank's output."""
        machine = msccl_machine.Machine(
            text, inplace=True, root=root, value=lambda rank, _: f"{rank}", combine=expression
        )
        machine.run(random.Random(0))
        return lambda rank, unit: machine.memory[machine.address(rank, "o", unit)]

    def sizes(self, text):
        """Return the pairs of the numbers of chunks of a GPU's input and output."""
        return {tuple(int(gpu.get(f"{buffer}_chunks")) for buffer in "io") for gpu in ET.fromstring(text)}

    def written(self, text):
        """Return the buffers into which the steps of a file write."""
        stores = [step for step in ET.fromstring(text).iter("step") if step.get("type") in msccl_machine.STORING]
        return {step.get("dstbuf") for step in stores}


class Mscclpp(NamedTuple):
    """The same functions for MSCCL++ plans."""

    def write(self, schedule, *args, inplace=True, **options):
        return to_mscclpp_json(schedule, *args, inplace=inplace, **options)

    def proved(self, text, root=None):
        report = verify_mscclpp_json(text, root=root)
        assert all("store a root" in note or "threads of a warp run operations" in note for note in report.notes)
        return report.collective, report.root

    def fault(self, text, seed, tries, root=None):
        return mscclpp_values.fault(text, seed, cells=1 + seed % 3, root=root)

    def results(self, text, root):
        made = mscclpp_values.Interpreter(text, cells=1, root=root, value=lambda rank, _: f"{rank}", combine=expression)
        assert made.run()
        return lambda rank, unit: made.output(rank)[unit]

    def sizes(self, text):
        return {(gpu["input_chunks"], gpu["output_chunks"]) for gpu in json.loads(text)["gpus"]}

    def written(self, text):
        gpus, ops = json.loads(text)["gpus"], mscclpp_values.operations(json.loads(text))
        local = {span.get("type") for listed, k in ops for span in listed[k].get("dst_buff", ())}
        return local | {remote["type"] for gpu in gpus for remote in gpu["remote_buffers"]}


FORMATS = {"msccl": Msccl(), "mscclpp": Mscclpp()}
formats = st.sampled_from(list(FORMATS.values()))
each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def check(form, schedule, *args, seed=0, tries=2, **options):
    """Check that a schedule's file is proved and right in random executions. A file in place, of one piece and without
    a topology, must also combine operands in the listed order."""
    made = collective(schedule)
    text = form.write(schedule, *args, **options)
    assert form.proved(text, made.root) == (schedule.collective.replace("_", ""), made.root)
    assert form.fault(text, seed, tries, made.root) is None
    if options.get("inplace", True) and schedule.pieces == 1 and not args:
        cells, found = expressions(schedule), form.results(text, made.root)
        for (rank, unit), chunk in results(made).items():
            assert found(rank, unit) == cells[chunk, rank], f"rank {rank}, unit {unit}"


@given(formats, algorithms, requests(st.integers(2, 6), most_packs=3), st.booleans(), st.integers(0, 99))
@examples(100)
def test_the_five_collectives_are_exported(form, algorithm, ask, inplace, seed):
    """A planner's schedule from all devices to all, all to one or one to all is exported. Others are refused."""
    schedule = PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)
    n = len(ask.devices)
    if {len(ask.sources), len(ask.destinations)} in ({n}, {n, 1}):
        check(form, schedule, seed=seed, inplace=inplace)
    else:
        with pytest.raises(PlanError, match=r"MSCCL|format|collective of NCCL|NCCL's collectives"):
            form.write(schedule)


@given(formats, synchronous(), st.integers(1, 4), st.booleans(), st.integers(0, 99))
@examples(250)
def test_a_round_reads_the_values_of_the_round_before(form, schedule, spread, inplace, seed):
    """Files on 1 to 4 channels are right for any shares and orders, also if steps read what the same round replaces.
    Messages that do not fit into a connection's one slot do not wait for each other in a cycle."""
    options = {"channels": spread} if form is FORMATS["msccl"] else {"threadblocks": spread}
    check(form, schedule, seed=seed, tries=4, inplace=inplace, **options)


@pytest.mark.parametrize(("form", "planner"), pairs(FORMATS.values(), ALGORITHMS), ids=str)
def test_planners_of_more_devices(form, planner):
    """Each all-reduce of 7 or 8 devices is right, and combines in the listed order. Equal schedules give equal text."""
    schedule = PLANNERS[planner](names(7 if form is FORMATS["msccl"] else 8))
    check(form, schedule, tries=1)
    assert form.write(schedule) == form.write(Schedule.from_json(schedule.to_json()))


def test_more_operands_than_an_operation_has():
    """A sum of 14 operands, of which one operation adds 10, keeps the listed order."""
    check(FORMATS["mscclpp"], one_device(names(14), root="cpu:12"), tries=1)


@each_format
def test_chunks_are_placed_in_the_parts_of_their_owners(form):
    """Rank k owns the k-th part of the buffer. Its chunks are placed there, whatever their order in the schedule."""
    for kind in ("reduce_scatter", "all_gather"):
        schedule = rotated(kind)  # three ranks; chunks 0 and 3 belong to rank 1, chunk 1 to rank 2, chunk 2 to rank 0
        placed = [(block.chunk, block.offset) for block in collective(schedule).blocks]
        assert placed == [(0, 2), (1, 4), (2, 0), (3, 3)]
        assert form.sizes(form.write(schedule)) == {(6, 2) if kind == "reduce_scatter" else (2, 6)}
        for inplace in (True, False):
            check(form, schedule, tries=5, inplace=inplace)


@each_format
def test_needless_steps_are_left_out(form):
    """Steps on which no result depends are not in the file: copies to the same device, unread sums, empty chunks."""
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
    for inplace in (True, False):
        assert form.write(schedule, inplace=inplace) == form.write(needed, inplace=inplace)


@each_format
def test_inputs_stay_unchanged(form):
    """Out of place, no step writes into an input buffer; partial sums are in the output or in scratch memory."""
    many = one_device(names(13), root="cpu:0")
    for schedule in (ring(names(4), destinations=["cpu:1"]), rotated("reduce_scatter"), direct(names(4)), many):
        assert "i" not in form.written(form.write(schedule, inplace=False))


@each_format
def test_schedules_that_no_format_can_hold(form):
    """A schedule that ``verify`` rejects, unequal parts of ranks, and other collectives are refused with the reason."""
    both = (0, 1)
    lost = Chunk(Fraction(1), both, both)  # the step below leaves its result on one device only
    small, large = Chunk(Fraction(1, 3), both, (0,)), Chunk(Fraction(2, 3), both, (1,))
    with pytest.raises(ScheduleError, match="lost"):
        form.write(Schedule("all_reduce", "custom", names(2), (lost,), ((Step(0, 0, both),),)))
    uneven = Schedule("reduce_scatter", "custom", names(2), (small, large), ((Step(0, 0, both), Step(1, 1, both)),))
    with pytest.raises(PlanError, match=r"every rank must have an equal part.*\n.*cpu:0 has 1/3 of it"):
        form.write(uneven)
    for schedule, words in (
        (one_device(names(3), destinations=["cpu:0", "cpu:1"]), "no collective of NCCL has these sources and dest"),
        (one_device(names(1)), "a collective of one device has no transfers"),
    ):
        with pytest.raises(PlanError, match=words):
            form.write(schedule)
