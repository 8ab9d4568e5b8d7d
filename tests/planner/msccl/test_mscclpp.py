"""Exports to MSCCL++ plans, run by an interpreter of their JSON: on numbers, in many orders, two calls in a row."""

import copy
import json
import random
from fractions import Fraction

import pytest
from budget import examples
from exports import EXCHANGES, exchange_id, expression, expressions, reductions, results, rotated, synchronous
from hypothesis import given
from hypothesis import strategies as st
from mscclpp_machine import Machine, fault
from strategies import ALGORITHMS, algorithms, names, requests

from crossreduce import ArgumentError, Chunk, PlanError, Schedule, Step, Topology
from crossreduce.export.formats.collective import collective
from crossreduce.export.formats.mscclpp import to_mscclpp_json
from crossreduce.planning import PLANNERS, direct, one_device, one_shot, plan, recursive_doubling, ring


@pytest.mark.parametrize("planner", ALGORITHMS)
@pytest.mark.parametrize("n", range(2, 10))
def test_every_planner_exports(planner, n):
    """On 2 to 9 devices every planner's all-reduce is right in random orders, in or out of place (on 2 to 5: both)."""
    for packs, inplace in ((1, True), (2, False)) if n < 6 else ((1, n % 2 == 0),):
        text = to_mscclpp_json(PLANNERS[planner](names(n), packs=packs), inplace=inplace)
        assert fault(text, n, 3 if n < 6 else 1) is None


@given(algorithms, requests(st.integers(2, 6), most_packs=3), st.booleans(), st.integers(0, 99))
@examples(40)
def test_the_five_collectives_are_exported(algorithm, ask, inplace, seed):
    """A planner's schedule from all devices to all or one, or from one to all, is exported; any other is refused."""
    schedule = PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)
    n = len(ask.devices)
    gives, takes = len(ask.sources), len(ask.destinations)
    if not ((gives == n and takes in (1, n)) or (takes == n and gives == 1)):
        with pytest.raises(PlanError, match=r"collective of NCCL|NCCL's collectives"):
            to_mscclpp_json(schedule)
        return
    root = ask.devices.index(min(ask.destinations if takes == 1 else ask.sources))
    assert fault(to_mscclpp_json(schedule, inplace=inplace), seed, 2, root) is None


@given(st.sampled_from(["all_reduce", "reduce"]).flatmap(reductions), st.booleans(), st.integers(1, 3))
@examples(40)
def test_any_shares_and_orders(schedule, inplace, threadblocks):
    """Plans of schedules with uneven shares, own operands at any position and devices that only forward are right, for
    1 to 3 threadblocks, and combine in the listed order."""
    text = to_mscclpp_json(schedule, inplace=inplace, threadblocks=threadblocks)
    assert fault(text, threadblocks, 3) is None
    check_order(schedule, text)


def check_order(schedule, text):
    """Check that each result is combined in the order that the schedule lists."""
    cells, made = expressions(schedule), collective(schedule)
    machine = Machine(text, 1, root=made.root, value=lambda call, rank, chunk: f"{rank}", combine=expression)
    machine.check = lambda rank: None
    machine.run(random.Random(0))
    for (rank, unit), chunk in results(made).items():
        assert machine.memory[rank][machine.address(rank, "o", unit)] == cells[chunk, rank]


@given(synchronous(), st.booleans(), st.integers(1, 3), st.integers(0, 99))
@examples(150)
def test_a_round_reads_the_values_of_the_round_before(schedule, inplace, threadblocks, seed):
    """Steps of a round read what the previous round left, also from devices whose values the same round replaces."""
    text = to_mscclpp_json(schedule, inplace=inplace, threadblocks=threadblocks)
    assert fault(text, seed, 4, collective(schedule).root or 0) is None
    check_order(schedule, text)


@pytest.mark.parametrize("schedule", EXCHANGES, ids=exchange_id)
@pytest.mark.parametrize("inplace", [True, False])
def test_exchanges(schedule, inplace):
    """Plans are right if devices read each other's values in one round: one-shot, recursive doubling, and rotations."""
    text = to_mscclpp_json(schedule, inplace=inplace)
    assert fault(text, 1, 5) is None
    check_order(schedule, text)


def test_exchanges_put_before_they_wait():
    """In an exchange every device puts its own value before it waits for other values, so the puts overlap."""
    for schedule in (recursive_doubling(names(2)), one_shot(names(5))):
        for gpu in json.loads(to_mscclpp_json(schedule))["gpus"]:
            ops = [op["name"] for op in gpu["threadblocks"][0]["ops"] if op["name"] != "nop"]
            assert ops == ["signal", "wait", "res" if len(schedule.devices) > 2 else "put", "signal", "wait", "re"]


@pytest.mark.parametrize("planner", ALGORITHMS)
def test_the_order_of_combination_is_the_schedules(planner):
    """Sums are combined in the listed order, also those of more operands than one operation adds."""
    for n in (3, 6, 12):
        schedule = PLANNERS[planner](names(n))
        check_order(schedule, to_mscclpp_json(schedule))
    late = one_device(names(14), root="cpu:12")
    check_order(late, to_mscclpp_json(late))
    assert fault(to_mscclpp_json(late), 0, 2) is None


@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("inplace", [True, False])
def test_plans_on_a_topology_export(kind, inplace):
    """Plans for a topology, with trees of different shares, are exported for each collective."""
    wiring = Topology.from_matrix([[0, 25, 50, 0], [25, 0, 0, 50], [50, 0, 0, 25], [0, 50, 25, 0]])
    schedule = plan(wiring, kind, algorithm="forest").schedule
    made = collective(schedule)
    text = to_mscclpp_json(schedule, inplace=inplace)
    assert fault(text, 1, 3, made.root or 0) is None


@pytest.mark.parametrize("which", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("inplace", [True, False])
def test_chunks_are_placed_in_the_parts_of_their_owners(which, inplace):
    """Rank k owns the k-th part of the buffer, and its chunks are placed there, in any order of the schedule."""
    text = to_mscclpp_json(rotated(which), inplace=inplace)
    assert fault(text, 0, 4) is None
    sizes = {(gpu["input_chunks"], gpu["output_chunks"]) for gpu in json.loads(text)["gpus"]}
    assert sizes == {(6, 2) if which == "reduce_scatter" else (2, 6)}


def test_in_place_only_whole_buffers_are_remote():
    """In place, no GPU accesses another GPU's buffer if that is a part of a larger one: the executor would use the
    offset of the local GPU's part."""
    for which, buffer in (("reduce_scatter", "o"), ("all_gather", "i")):
        content = json.loads(to_mscclpp_json(rotated(which)))
        assert buffer not in [remote["type"] for gpu in content["gpus"] for remote in gpu["remote_buffers"]]
        ops = [op for gpu in content["gpus"] for block in gpu["threadblocks"] for op in block["ops"]]
        assert "copy" not in [op["name"] for op in ops]


def test_inputs_stay_unchanged():
    """Out of place, no operation writes into an input buffer."""
    many = one_device(names(13), root="cpu:0")
    for schedule in (ring(names(4), destinations=["cpu:1"]), rotated("reduce_scatter"), direct(names(4)), many):
        for gpu in json.loads(to_mscclpp_json(schedule, inplace=False))["gpus"]:
            assert "i" not in [remote["type"] for remote in gpu["remote_buffers"]]
            for block in gpu["threadblocks"]:
                spans = [span for op in block["ops"] for span in op.get("dst_buff", [])]
                assert "i" not in [span.get("type") for span in spans]


def test_needless_steps_are_left_out():
    """Steps that no result depends on, such as a copy to the same device, are not in the plan."""
    chunk = Chunk(Fraction(1), (0, 1), (0, 1))
    rounds = ((Step(0, 0, (0,)),), (Step(0, 0, (0, 1)),), (Step(0, 1, (1,)),), (Step(0, 1, (0,)),))
    schedule = Schedule("all_reduce", "custom", names(2), (chunk,), rounds)
    needed = Schedule("all_reduce", "custom", names(2), (chunk,), rounds[1::2])
    for inplace in (True, False):
        assert to_mscclpp_json(schedule, inplace=inplace) == to_mscclpp_json(needed, inplace=inplace)


def test_equal_copies_both_ways():
    """Two devices that copy the same value to each other in one round do not deadlock."""
    chunk = Chunk(Fraction(1), (0, 1), (0, 1))
    rounds = ((Step(0, 0, (0, 1)),), (Step(0, 1, (0,)),), (Step(0, 0, (1,)), Step(0, 1, (0,))))
    schedule = Schedule("all_reduce", "custom", names(2), (chunk,), rounds)
    assert fault(to_mscclpp_json(schedule), 0, 5) is None


@pytest.mark.parametrize(
    "schedule", [direct(names(3)), ring(names(3)), one_device(names(4), packs=2)], ids=["direct", "ring", "one_device"]
)
@pytest.mark.parametrize("inplace", [True, False])
def test_every_operation_is_needed(schedule, inplace):
    """A plan from which one operation, or one of an operation's channels, is removed is wrong."""
    content = json.loads(to_mscclpp_json(schedule, inplace=inplace))
    tried = 0
    for g, gpu in enumerate(content["gpus"]):
        for t, block in enumerate(gpu["threadblocks"]):
            for k, op in enumerate(block["ops"]):
                less = copy.deepcopy(content)
                ops = less["gpus"][g]["threadblocks"][t]["ops"]
                if len(op.get("channel_ids", ())) > 1:
                    ops[k]["channel_ids"].pop()
                else:
                    del ops[k]
                tried += 1
                assert fault(json.dumps(less), k, 40) is not None, f"gpu {g}, threadblock {t}, {op}"
    assert tried > 30


def test_arguments_are_in_the_plan():
    """The plan has the arguments in the fields that the executor reads; equal schedules give equal plans."""
    text = to_mscclpp_json(ring(names(2)), name="mine", threads=512, min_bytes=1 << 10, max_bytes=1 << 20)
    content = json.loads(text)
    found = {key: content[key] for key in ("name", "collective", "inplace", "num_threads_per_block")}
    assert found == {"name": "mine", "collective": "allreduce", "inplace": True, "num_threads_per_block": 512}
    assert (content["min_message_size"], content["max_message_size"]) == (1 << 10, 1 << 20)
    assert json.loads(to_mscclpp_json(ring(names(2))))["name"] == "allreduce_ring_2"
    assert to_mscclpp_json(direct(names(5))) == to_mscclpp_json(Schedule.from_json(direct(names(5)).to_json()))


def test_the_number_of_threadblocks_can_be_given():
    """With threadblocks=, chunks are spread over at most that many threadblocks; by default each chunk has its own."""
    schedule = ring(names(4), packs=3)
    for number, count in ((None, 12), (5, 5), (80, 12)):
        content = json.loads(to_mscclpp_json(schedule, threadblocks=number))
        assert [len(gpu["threadblocks"]) for gpu in content["gpus"]] == [count] * 4


@pytest.mark.parametrize(
    ("schedule", "options", "text"),
    [
        (ring(names(8), packs=4), {"threadblocks": 2}, "64 operations per threadblock, but cpu:0 needs"),
        (direct(names(18)), {}, "16 channels per threadblock, but cpu:0 needs at least 17"),
        (
            one_device(names(3), destinations=["cpu:0", "cpu:1"]),
            {},
            "no collective of NCCL has these sources and destinations",
        ),
        (ring(names(2)), {"threadblocks": 0}, "threadblocks, the number per GPU, must be 1 to 320"),
        (ring(names(2)), {"threadblocks": 81, "threads": 1024}, "must be 1 to 80"),
        (ring(names(2)), {"threadblocks": "2"}, "threadblocks must be an integer"),
        (ring(names(2)), {"threads": 64.0}, "threads must be an integer"),
        (ring(names(2)), {"threads": 100}, "32, 64"),
        (ring(names(2)), {"min_bytes": 2, "max_bytes": 1}, "0 <= min_bytes <= max_bytes"),
        (ring(names(2)), {"max_bytes": 1 << 64}, "0 <= min_bytes <= max_bytes"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(schedule, options, text):
    """The error states which limit or rule the schedule or the option breaks."""
    with pytest.raises((PlanError, ArgumentError), match=text):
        to_mscclpp_json(schedule, **options)
