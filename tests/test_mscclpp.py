"""Exports to MSCCL++ plans, run by an interpreter of their JSON: on numbers, in many orders, two calls in a row.

The interpreter reads a plan as MSCCL++'s execution_plan.cc and executor.cc do: channels of two ranks pair up in the
order in which each lists them, a threadblock's channels and remote buffers are numbered within it.
"""

import copy
import json
import random
from collections import defaultdict
from fractions import Fraction

import pytest
from exports import (
    expression,
    expressions,
    one_shot,
    recursive_doubling,
    reductions,
    results,
    rotated,
    swaps,
    synchronous,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ALGORITHMS, algorithms, names, requests

from crossreduce import ArgumentError, Chunk, PlanError, Schedule, Step, Topology
from crossreduce.export.collective import collective
from crossreduce.export.mscclpp import to_mscclpp_json
from crossreduce.planning import PLANNERS, direct, one_device, plan, ring

DATA = ("put", "re", "copy")


class RunError(Exception):
    """The plan did something that it must not, or nothing that it can do is left."""


def check_form(content):
    """A plan has what the executor reads, within the sizes that it has room for."""
    assert set(content) == {
        "name",
        "collective",
        "protocol",
        "inplace",
        "reuse_resources",
        "gpus",
        "num_threads_per_block",
        "use_double_scratch_buffer",
        "buffer_alignment",
        "min_message_size",
        "max_message_size",
    }
    assert content["protocol"] == "Simple"
    for rank, gpu in enumerate(content["gpus"]):
        assert gpu["id"] == rank
        assert gpu["input_chunks"] > 0
        assert gpu["output_chunks"] > 0
        assert gpu["threadblocks"]
        peers = [peer for channel in gpu["channels"] for peer in channel["connected_to"]]
        assert {channel["channel_type"] for channel in gpu["channels"]} <= {"memory"}
        assert rank not in peers
        for number, block in enumerate(gpu["threadblocks"]):
            assert block["id"] == number
            assert 0 < len(block["ops"]) <= 64
            channels = [k for used in block["channels"] for k in used["channel_ids"]]
            buffers = [k for used in block["remote_buffer_refs"] for k in used["remote_buffer_ids"]]
            assert len(channels) <= 16
            assert len(buffers) <= 16
            assert all(k < len(peers) for k in channels)
            assert all(k < len(gpu["remote_buffers"]) for k in buffers)
            check_threads(block["ops"])
            for op in block["ops"]:
                assert op["name"] in (*DATA, "signal", "wait", "nop")
                if op["name"] in ("signal", "wait"):
                    assert op["channel_type"] == "memory"
                    assert len(set(op["channel_ids"])) == len(op["channel_ids"]) <= 8
                    assert all(k < len(channels) for k in op["channel_ids"])
                if op["name"] == "put":
                    assert op["channel_type"] == "memory"
                    assert len(op["src_buff"]) == len(op["dst_buff"]) <= 8
                    assert len({span["type"] for span in op["src_buff"]}) == 1  # the executor takes the first one's
                    assert all(span["buffer_id"] < len(buffers) for span in op["dst_buff"])
                if op["name"] in ("re", "copy"):
                    assert len(op["dst_buff"]) == 1
                    assert len(op["src_buff"]) <= 10
                    assert len({span["size"] for span in op["src_buff"] + op["dst_buff"]}) == 1


def check_threads(ops):
    """All threads of a threadblock meet (nop) between a wait and data, data and a signal, and data that depend."""
    waited = dirty = ""
    for op in ops:
        kind = op["name"]
        if kind == "nop":
            waited = dirty = ""
        elif kind == "wait":
            waited = kind
        elif kind == "signal":
            if dirty:
                raise RunError("a signal goes out before all threads are done")
        elif waited or (dirty and (dirty, kind) != ("put", "put")):
            raise RunError("threads use data before all of them may")
        else:
            dirty = kind


class Machine:
    """Several calls of a plan, one after the other on each rank. A rank may be one call ahead of another.

    Each call has its own input, which a rank writes into its buffers as it begins; outputs are checked as it ends.
    """

    def __init__(self, text, calls=2, *, root=0, value=None, combine=lambda a, b: a + b):
        self.plan = json.loads(text)
        self.gpus, self.coll, self.inplace = self.plan["gpus"], self.plan["collective"], self.plan["inplace"]
        self.n, self.root, self.calls, self.combine = len(self.gpus), root, calls, combine
        self.value = value or (lambda call, rank, chunk: hash((call, rank, chunk)))
        self.memory = [{} for _ in self.gpus]
        self.counts = defaultdict(int)  # signals on each end of each channel that nobody has waited for
        self.part = self.gpus[0]["input_chunks"] if self.coll == "allgather" else self.gpus[0]["output_chunks"]
        self.pairs = {}
        for rank, gpu in enumerate(self.gpus):
            seen = defaultdict(int)
            for number, peer in enumerate(p for channel in gpu["channels"] for p in channel["connected_to"]):
                self.pairs[rank, number] = peer, seen[peer]
                seen[peer] += 1
        self.ends = {(rank, *pair): number for (rank, number), pair in self.pairs.items()}
        self.call = [-1] * self.n
        self.at = [[len(block["ops"]) for block in gpu["threadblocks"]] for gpu in self.gpus]
        self.part_of_op = [[0] * len(gpu["threadblocks"]) for gpu in self.gpus]

    def address(self, rank, buffer, index):
        if self.inplace and buffer in "io":
            shift = rank * self.part
            if self.coll == "allgather":
                return "io", index + shift if buffer == "i" else index
            return "io", index + (shift if buffer == "o" and self.coll == "reducescatter" else 0)
        return buffer, index

    def cells(self, rank, span, buffer):
        size = self.gpus[rank][{"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}[buffer]]
        if span["index"] + span["size"] > size or span["index"] < 0:
            raise RunError("out of bounds")
        return [self.address(rank, buffer, span["index"] + k) for k in range(span["size"])]

    def load(self, rank, span):
        memory = self.memory[rank]
        if any(cell not in memory for cell in self.cells(rank, span, span["type"])):
            raise RunError("nothing there")
        return [memory[cell] for cell in self.cells(rank, span, span["type"])]

    def store(self, rank, span, buffer, values):
        self.memory[rank].update(zip(self.cells(rank, span, buffer), values, strict=True))

    def begin(self, rank):
        """Check the last call's output and write the next one's input."""
        if self.call[rank] >= 0:
            self.check(rank)
        self.call[rank] += 1
        if self.call[rank] == self.calls:
            return
        self.at[rank] = [0] * len(self.at[rank])
        for buffer, size in (("o", "output_chunks"), ("i", "input_chunks")):
            for k in range(self.gpus[rank][size]):
                given = buffer == "i" and (self.coll != "broadcast" or rank == self.root)
                self.memory[rank].pop(self.address(rank, buffer, k), None)
                if given:
                    self.memory[rank][self.address(rank, buffer, k)] = self.value(self.call[rank], rank, k)

    def check(self, rank):
        call = self.call[rank]
        for k in range(self.gpus[rank]["output_chunks"]):
            if self.coll in ("allreduce", "reduce", "reducescatter"):
                at = rank * self.part + k if self.coll == "reducescatter" else k
                due = sum(self.value(call, r, at) for r in range(self.n))
            elif self.coll == "broadcast":
                due = self.value(call, self.root, k)
            else:
                due = self.value(call, k // self.part, k % self.part)
            if self.coll == "reduce" and rank != self.root:
                continue
            if self.memory[rank].get(self.address(rank, "o", k)) != due:
                raise RunError(f"call {call}, rank {rank}, chunk {k}")

    def able(self, rank):
        """Return the threadblocks of a rank that can go on, or -1 where the rank can begin its next call."""
        if self.call[rank] == self.calls:
            return []
        blocks = self.gpus[rank]["threadblocks"]
        if all(at == len(block["ops"]) for at, block in zip(self.at[rank], blocks, strict=True)):
            return [-1]
        found = []
        for t, block in enumerate(blocks):
            if self.at[rank][t] < len(block["ops"]):
                op = block["ops"][self.at[rank][t]]
                if op["name"] != "wait" or all(self.counts[rank, k] for k in self.channels(rank, t, op)):
                    found.append(t)
        return found

    def channels(self, rank, t, op):
        used = self.gpus[rank]["threadblocks"][t]["channels"][0]["channel_ids"]
        return [used[k] for k in op["channel_ids"]]

    def do(self, rank, t):
        if t < 0:
            self.begin(rank)
            return
        block = self.gpus[rank]["threadblocks"][t]
        op = block["ops"][self.at[rank][t]]
        name = op["name"]
        if name == "wait":
            for k in self.channels(rank, t, op):
                self.counts[rank, k] -= 1
        elif name == "signal":
            for k in self.channels(rank, t, op):
                peer, which = self.pairs[rank, k]
                self.counts[peer, self.ends[peer, rank, which]] += 1
        elif name == "copy":
            self.store(rank, op["dst_buff"][0], op["dst_buff"][0]["type"], self.load(rank, op["src_buff"][0]))
        elif name == "re":
            total = self.load(rank, op["src_buff"][0])
            for span in op["src_buff"][1:]:
                total = [self.combine(a, b) for a, b in zip(total, self.load(rank, span), strict=True)]
            self.store(rank, op["dst_buff"][0], op["dst_buff"][0]["type"], total)
        elif name == "put":  # one block at a time, so that others may come in between
            k = self.part_of_op[rank][t]
            remote = block["remote_buffer_refs"][0]["remote_buffer_ids"][op["dst_buff"][k]["buffer_id"]]
            target = self.gpus[rank]["remote_buffers"][remote]
            self.store(target["rank"], op["dst_buff"][k], target["type"], self.load(rank, op["src_buff"][k]))
            self.part_of_op[rank][t] = (k + 1) % len(op["src_buff"])
            if self.part_of_op[rank][t]:
                return
        self.at[rank][t] += 1

    def run(self, rng):
        order = {(rank, t): rng.random() for rank in range(self.n) for t in range(-1, len(self.at[rank]))}
        fair = rng.random() < 0.5
        while True:
            able = [(rank, t) for rank in range(self.n) for t in self.able(rank)]
            if not able:
                break
            self.do(*(rng.choice(able) if fair else max(able, key=order.__getitem__)))
        if any(call < self.calls for call in self.call):
            raise RunError("stuck")
        if any(self.counts.values()):
            raise RunError("a signal that nobody waits for")


def fault(text, seed, tries, root=0):
    """Return how a plan goes wrong in one of some executions, or ``None``."""
    rng = random.Random(seed)
    try:
        check_form(json.loads(text))
        for _ in range(tries):
            Machine(text, root=root).run(rng)
    except RunError as error:
        return str(error)
    return None


@pytest.mark.parametrize("planner", ALGORITHMS)
@pytest.mark.parametrize("n", range(2, 10))
def test_every_planner_exports(planner, n):
    """Every planner's all-reduce of 2 to 9 devices is right, in place and out of place, in each order that is tried."""
    for packs, inplace in ((1, True), (2, False)) if n < 6 else ((1, n % 2 == 0),):
        text = to_mscclpp_json(PLANNERS[planner](names(n), packs=packs), inplace=inplace)
        assert fault(text, n, 3 if n < 6 else 1) is None


@given(algorithms, requests(st.integers(2, 6), most_packs=3), st.booleans(), st.integers(0, 99))
@settings(max_examples=40)
def test_what_fits_one_of_the_collectives_is_right(algorithm, ask, inplace, seed):
    """A planner's schedule with all devices as sources or destinations is exported, any other is refused."""
    schedule = PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)
    n = len(ask.devices)
    gives, takes = len(ask.sources), len(ask.destinations)
    if not ((gives == n and takes in (1, n)) or (takes == n and gives == 1)):
        with pytest.raises(PlanError, match="NCCL's collectives"):
            to_mscclpp_json(schedule)
        return
    root = ask.devices.index(min(ask.destinations if takes == 1 else ask.sources))
    assert fault(to_mscclpp_json(schedule, inplace=inplace), seed, 2, root) is None


@given(st.sampled_from(["all_reduce", "reduce"]).flatmap(reductions), st.booleans(), st.integers(1, 3))
@settings(max_examples=40)
def test_any_shares_and_orders(schedule, inplace, threadblocks):
    """Uneven shares, own parts anywhere in the list, devices that only pass on, several chunks a threadblock: right."""
    text = to_mscclpp_json(schedule, inplace=inplace, threadblocks=threadblocks)
    assert fault(text, threadblocks, 3) is None
    check_order(schedule, text)


def check_order(schedule, text):
    """Each result is combined in the order that the schedule lists."""
    cells, made = expressions(schedule), collective(schedule)
    machine = Machine(text, 1, root=made.root, value=lambda call, rank, chunk: f"{rank}", combine=expression)
    machine.check = lambda rank: None
    machine.run(random.Random(0))
    for (rank, unit), chunk in results(made).items():
        assert machine.memory[rank][machine.address(rank, "o", unit)] == cells[chunk, rank]


@given(synchronous(), st.booleans(), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=150)
def test_a_round_reads_the_values_of_the_round_before(schedule, inplace, threadblocks, seed):
    """Steps of one round read what the round before left, also from devices whose values the same round replaces."""
    text = to_mscclpp_json(schedule, inplace=inplace, threadblocks=threadblocks)
    assert fault(text, seed, 4, collective(schedule).root or 0) is None
    check_order(schedule, text)


@pytest.mark.parametrize(
    "schedule",
    [
        *(one_shot(n) for n in (2, 3, 5, 8, 12)),
        *(recursive_doubling(n) for n in (2, 4, 8)),
        *(swaps(n) for n in (2, 3, 5)),
    ],
    ids=lambda schedule: f"{schedule.algorithm}-{len(schedule.devices)}",
)
@pytest.mark.parametrize("inplace", [True, False])
def test_exchanges(schedule, inplace):
    """Devices that read each other's values in one round: one-shot, recursive doubling, and swaps."""
    text = to_mscclpp_json(schedule, inplace=inplace)
    assert fault(text, 1, 5) is None
    check_order(schedule, text)


def test_exchanges_put_before_they_wait():
    """In an exchange every device puts its value before it waits for another's, so the puts of a round overlap."""
    for schedule in (recursive_doubling(2), one_shot(5)):
        for gpu in json.loads(to_mscclpp_json(schedule))["gpus"]:
            ops = [op["name"] for op in gpu["threadblocks"][0]["ops"] if op["name"] != "nop"]
            assert ops == ["signal", "wait", "put", "signal", "wait", "re"]


@pytest.mark.parametrize("planner", ALGORITHMS)
def test_combination_order_is_the_schedules(planner):
    """Sums are made in the listed order, also where there are more parts than one operation adds."""
    for n in (3, 6, 12):
        schedule = PLANNERS[planner](names(n))
        check_order(schedule, to_mscclpp_json(schedule))
    late = one_device(names(14), root="cpu:12")
    check_order(late, to_mscclpp_json(late))
    assert fault(to_mscclpp_json(late), 0, 2) is None


@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("inplace", [True, False])
def test_plans_on_a_topology_export(kind, inplace):
    """Plans for a wiring, with trees of different shares, are exported for each collective."""
    wiring = Topology.from_matrix([[0, 25, 50, 0], [25, 0, 0, 50], [50, 0, 0, 25], [0, 50, 25, 0]])
    schedule = plan(wiring, kind, algorithm="forest").schedule
    made = collective(schedule)
    text = to_mscclpp_json(schedule, inplace=inplace)
    assert fault(text, 1, 3, made.root or 0) is None


@pytest.mark.parametrize("which", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("inplace", [True, False])
def test_parts_go_where_their_owner_has_them(which, inplace):
    """Rank k has the k-th part of the buffer, whatever the chunks' order in the schedule."""
    text = to_mscclpp_json(rotated(which), inplace=inplace)
    assert fault(text, 0, 4) is None
    sizes = {(gpu["input_chunks"], gpu["output_chunks"]) for gpu in json.loads(text)["gpus"]}
    assert sizes == {(6, 2) if which == "reduce_scatter" else (2, 6)}


def test_in_place_nobody_reaches_into_a_part_of_another_buffer():
    """The executor finds another GPU's buffer by the own one's offset, so a part of a larger buffer is never remote."""
    for which, buffer in (("reduce_scatter", "o"), ("all_gather", "i")):
        content = json.loads(to_mscclpp_json(rotated(which)))
        assert buffer not in [remote["type"] for gpu in content["gpus"] for remote in gpu["remote_buffers"]]
        ops = [op for gpu in content["gpus"] for block in gpu["threadblocks"] for op in block["ops"]]
        assert "copy" not in [op["name"] for op in ops]


def test_no_input_is_overwritten():
    """Out of place, nothing is written into an input buffer."""
    many = one_device(names(13), root="cpu:0")
    for schedule in (ring(names(4), destinations=["cpu:1"]), rotated("reduce_scatter"), direct(names(4)), many):
        for gpu in json.loads(to_mscclpp_json(schedule, inplace=False))["gpus"]:
            assert "i" not in [remote["type"] for remote in gpu["remote_buffers"]]
            for block in gpu["threadblocks"]:
                spans = [span for op in block["ops"] for span in op.get("dst_buff", [])]
                assert "i" not in [span.get("type") for span in spans]


def test_needless_steps_are_left_out():
    """Steps that no result depends on, such as a copy to itself, are not in the plan."""
    chunk = Chunk(Fraction(1), (0, 1), (0, 1))
    rounds = ((Step(0, 0, (0,)),), (Step(0, 0, (0, 1)),), (Step(0, 1, (1,)),), (Step(0, 1, (0,)),))
    schedule = Schedule("all_reduce", "custom", names(2), (chunk,), rounds)
    needed = Schedule("all_reduce", "custom", names(2), (chunk,), rounds[1::2])
    for inplace in (True, False):
        assert to_mscclpp_json(schedule, inplace=inplace) == to_mscclpp_json(needed, inplace=inplace)


def test_equal_copies_both_ways():
    """Two devices that copy the same value to each other in one round do not wait for each other for ever."""
    chunk = Chunk(Fraction(1), (0, 1), (0, 1))
    rounds = ((Step(0, 0, (0, 1)),), (Step(0, 1, (0,)),), (Step(0, 0, (1,)), Step(0, 1, (0,))))
    schedule = Schedule("all_reduce", "custom", names(2), (chunk,), rounds)
    assert fault(to_mscclpp_json(schedule), 0, 5) is None


@pytest.mark.parametrize(
    "schedule", [direct(names(3)), ring(names(3)), one_device(names(4), packs=2)], ids=["direct", "ring", "one_device"]
)
@pytest.mark.parametrize("inplace", [True, False])
def test_every_operation_is_needed(schedule, inplace):
    """A plan without any one of its operations, or without one of an operation's channels, goes wrong somewhere."""
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


def test_reuse_and_sizes():
    """Arguments are where the executor looks for them."""
    text = to_mscclpp_json(ring(names(2)), name="mine", threads=512, min_bytes=1 << 10, max_bytes=1 << 20)
    content = json.loads(text)
    found = {key: content[key] for key in ("name", "collective", "inplace", "num_threads_per_block")}
    assert found == {"name": "mine", "collective": "allreduce", "inplace": True, "num_threads_per_block": 512}
    assert (content["min_message_size"], content["max_message_size"]) == (1 << 10, 1 << 20)
    assert json.loads(to_mscclpp_json(ring(names(2))))["name"] == "allreduce_ring_2"
    assert to_mscclpp_json(direct(names(5))) == to_mscclpp_json(Schedule.from_json(direct(names(5)).to_json()))


def test_threadblocks_as_asked_for():
    """threadblocks= spreads the chunks over so many of them; by default each chunk has its own."""
    schedule = ring(names(4), packs=3)
    for asked, count in ((None, 12), (5, 5), (80, 12)):
        content = json.loads(to_mscclpp_json(schedule, threadblocks=asked))
        assert [len(gpu["threadblocks"]) for gpu in content["gpus"]] == [count] * 4


@pytest.mark.parametrize(
    ("schedule", "options", "text"),
    [
        (ring(names(8), packs=4), {"threadblocks": 2}, "MSCCL\\+\\+ has 64 operations per threadblock, cpu:0 needs"),
        (direct(names(18)), {}, "MSCCL\\+\\+ has 16 channels per threadblock, cpu:0 needs 17"),
        (one_device(names(3), destinations=["cpu:0", "cpu:1"]), {}, "as destinations, or both, for every chunk"),
        (ring(names(2)), {"threadblocks": 0}, "threadblocks per GPU is out of range"),
        (ring(names(2)), {"threadblocks": 81}, "1 to 80"),
        (ring(names(2)), {"threads": 100}, "32, 64"),
        (ring(names(2)), {"min_bytes": 2, "max_bytes": 1}, "range from min_bytes to max_bytes"),
        (ring(names(2)), {"max_bytes": 1 << 64}, "range from min_bytes to max_bytes"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(schedule, options, text):
    """The limit that is broken is named, and what was given."""
    with pytest.raises((PlanError, ArgumentError), match=text):
        to_mscclpp_json(schedule, **options)
