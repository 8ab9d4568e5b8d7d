"""The programs of ranks on several hosts, executed in this process. A plain sum replaces the exchange between hosts."""

from __future__ import annotations

import itertools
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
from test_rank_programs import COLLECTIVES, ROOTED, Machine, Op, inputs

from crossreduce.ops import ReduceOp, copy_numbers
from crossreduce.packing import itemsize
from crossreduce.ranks.inter_host import compiled_calls, multi_host, two_level
from crossreduce.ranks.inter_host.multi_host import MultiHostEngine
from crossreduce.ranks.inter_host.two_level import host_names, host_parts
from crossreduce.ranks.intra_host import programs
from crossreduce.ranks.intra_host.instructions import HostCheck, HostMessages, RankInstruction, reduction_numbers
from crossreduce.topology import Topology


def stages_as_lists(stages, kind=0, nbytes=0):
    """Return stages as lists of instructions, in place of a compiled program."""
    return [list(stage) for stage in stages]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Make pieces so small that small arrays have many, and keep stages as lists of instructions."""
    monkeypatch.setattr(multi_host, "SMALLEST_PIECE", 1 << 9)
    monkeypatch.setattr(multi_host, "PIECE_BYTES", 1 << 11)
    monkeypatch.setattr(programs, "SLOT_BYTES", 1 << 14)
    for module in (multi_host, two_level):
        monkeypatch.setattr(module, "SLOT_BYTES", 1 << 14)
    monkeypatch.setattr(multi_host, "native_program", stages_as_lists)


def compiled(ranks, collective, size, numbers, root, topology=None, hosts=None):
    """Return the plans of ``ranks``, some ranks of each host; by default, ``hosts`` has no others. ``topology``: of the
    hosts, if their links were measured."""
    plans, hosts = {}, hosts or ranks
    for host, some in zip(hosts, ranks, strict=True):
        for rank in some:
            engine = MultiHostEngine(hosts, rank, SimpleNamespace(host=host), None)
            engine.topology = topology
            plans[rank] = engine.compile(collective, size, numbers, root, b"")
    return plans


def exchanges_of(hosts, collective, root, host):
    """Return the numbers of a host's exchanges. The keys are the parts of the collective that they carry out."""
    parts = [part for part in host_parts(hosts, collective, root) if part.crosses]
    return {part: k for k, part in enumerate(one for one in parts if host in {*one.sources, *one.destinations})}


def exchanged(plans, hosts, leader, parts, piece, numbers, memories):
    """Write the results of a piece into the memory of a leader of each host, as the exchanges between hosts do.

    ``leader``: its place on each host. ``parts``: for each host the result of ``exchanges_of``.
    """
    wide, narrow = oracle.dtype_of(numbers.accumulator), oracle.dtype_of(numbers.result)

    def place(host, part, at, dtype):
        rank, k = hosts[host][leader], parts[host][part]
        exchange = plans[rank].exchanges[k]
        size = sum(elements for _, _, elements in exchange.pieces[piece].places[: len(exchange.part.results)])
        memory = memories[rank][k - len(plans[rank].exchanges)]
        start = getattr(exchange, at)(piece)
        return memory[start : start + size * dtype.itemsize].view(dtype)

    for part in dict.fromkeys(part for known in parts for part in known):
        partials = [place(host, part, "partial_at", wide).copy() for host in part.sources]
        total = sum(partials[1:], partials[0])
        if len(partials) > 1:
            total = total if numbers.divisor == 1 else total / wide.type(numbers.divisor)
        for host in part.destinations:
            if part.enters(host):
                place(host, part, "results_at", narrow)[:] = total.astype(narrow)


def run(hosts, collective, size, dtype, op=ReduceOp.SUM, root=None, in_place=False, exact=False):
    """Run a call on all ranks and compare all memory with the oracle's."""
    ranks = sorted(rank for host in hosts for rank in host)
    n, reduces = len(ranks), "reduce" in collective
    numbers = reduction_numbers(op, dtype, n, exact) if reduces else copy_numbers(dtype)
    plans = compiled(hosts, collective, size, numbers, root)
    assert len({plan.stages for plan in plans.values()}) == 1
    draw = np.random.default_rng(size)
    given, right = inputs(Op(collective, size, dtype, root, "of integers"), n, draw, numbers.divisor)
    if in_place:
        for buffers, results in zip(given, right, strict=True):
            buffers[1], results[0] = buffers[0], results[1]
    memories = {rank: [x.view(np.uint8) for x in given[rank]] for rank in ranks}
    for rank in ranks:
        memories[rank] += [np.zeros(exchange.nbytes, np.uint8) for exchange in plans[rank].exchanges]
    machines = {
        host: Machine(np.zeros((len(host), 2, 1 << 13), np.uint8), [[memories[rank] for rank in host]])
        for host in hosts
    }
    parts = [exchanges_of(hosts, collective, root, k) for k in range(len(hosts))]

    def execute(host, place, instructions):
        for instruction in instructions:
            machines[host].run(0, int(place), instruction)

    for stage in range(plans[ranks[0]].stages):
        for host in hosts:
            for place in draw.permutation(len(host)):
                execute(host, place, plans[host[place]].program[stage])
            for place, rank in enumerate(host):
                folds = plans[rank].folds  # of exact reductions
                execute(host, place, folds[stage - 1] if 0 < stage <= len(folds) else ())
        for leader in range(min(map(len, hosts))):
            exchange = plans[hosts[0][leader]].exchanges[0]
            piece = stage - 1 - exchange.delay
            if 0 <= piece < len(exchange.pieces):
                exchanged(plans, hosts, leader, parts, piece, numbers, memories)
                for host in hosts:
                    deliveries = plans[host[leader]].deliveries
                    execute(host, leader, deliveries[stage - 1] if deliveries else ())
        for machine in machines.values():
            machine.barrier()
    for rank in ranks:
        for k, due in enumerate(right[rank]):
            assert memories[rank][k].tobytes() == due.tobytes(), (rank, k, hosts, collective, size, root, dtype)


HOSTS = (
    ((0, 1), (2, 3)),
    ((0, 2, 4), (1, 3)),
    ((0,), (1, 2, 3)),
    ((0,), (1,)),
    ((0, 1), (2, 3), (4, 5, 6)),
    ((1, 2), (0,)),
)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_calls_over_hosts_give_the_results_of_the_oracle_without_races(hosts):
    """For any hosts, root, size and dtype, the local programs before and after the exchanges give the oracle's results,
    and write nothing else. Between two barriers, no rank accesses bytes of a slot that another rank writes."""
    ranks = sum(map(len, hosts))
    for collective in COLLECTIVES:
        roots = (0, ranks - 1) if collective in ROOTED else (None,)
        for number, size in enumerate((1, 700, 3000)):
            dtype = ("int64", "float16", "float32")[(number + ranks) % 3]
            run(hosts, collective, size, dtype, root=roots[number % len(roots)])
        if "reduce" in collective:
            run(hosts, collective, 1500, "bfloat16", ReduceOp.MEAN, roots[0])
            run(hosts, collective, 1500, "float32", root=roots[0], exact=True)
    run(hosts, "all_reduce", 1500, "float32", in_place=True)


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_a_large_call_is_planned_with_few_messages(count, collective):
    """The schedule of a large call, whose pieces are pipelined, has two rounds and one share for each other host. That
    of a small one may have more shares."""
    hosts = tuple((k,) for k in range(count))
    for nbytes in (1 << 21, 1 << 24, 1 << 26, 1 << 30):
        schedule = two_level.host_schedule(None, hosts, collective, nbytes, 0)
        assert (schedule.round_count, len(schedule.chunks)) == (2, count - 1), nbytes


@pytest.mark.parametrize("hosts", [2, 3, 5])
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all"])
def test_hosts_of_one_rank_copy_no_large_array(hosts, collective, monkeypatch):
    """Hosts of one rank send from the arrays of the caller and receive into them. Only the array that a rank keeps for
    itself is copied. Other memory only has what is combined, and its size does not depend on that of the arrays."""
    numbers = reduction_numbers(ReduceOp.SUM, "float32", hosts) if "reduce" in collective else copy_numbers("float32")
    monkeypatch.setattr(compiled_calls, "native_program", stages_as_lists)
    buffers = {"broadcast": 1, "all_reduce": 2, "all_to_all": 2 * hosts}.get(collective, 1 + hosts)
    ends, root = set(), 1 if collective == "broadcast" else None
    for size in (1 << 22, 1 << 24):
        parts = SimpleNamespace(host=(0,)), SimpleNamespace(message_nbytes=1 << 24)
        ranks = tuple((k,) for k in range(hosts))
        engine = MultiHostEngine(ranks, 0, *parts, watch=lambda pending, _: pending, ends_at_once=True)
        stages = engine.compile(collective, size, numbers, root, b"").program
        instructions = [each for stage in stages for each in stage if isinstance(each, RankInstruction)]
        copied = sum(each.size for each in instructions if len(each.operands) == 1)
        assert copied == (size if collective in ("all_gather", "all_to_all") else 0)
        messages = [each for stage in stages for each in stage if isinstance(each, HostMessages)]
        moves = [move for each in messages for move in (*each.sends, *each.receives)]
        ends.add(max((move.at.offset + move.nbytes for move in moves if ~move.at.region >= buffers), default=0))
    assert max(ends) <= (10 * two_level.ARRAY_PIECE_BYTES if "reduce" in collective else 0)


@pytest.mark.parametrize("ends_at_once", [True, False])
@pytest.mark.parametrize("collective", ["broadcast", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_hosts_of_one_rank_use_no_slots(collective, ends_at_once, monkeypatch):
    """At any size, hosts of one rank read from the caller's arrays and write into them, and not before the calls were
    compared. If the transport may access memory after its end, only first messages, which compiled code copies, are in
    the caller's arrays. Others are in other memory, also those of later rounds."""
    monkeypatch.undo()
    monkeypatch.setattr(compiled_calls, "native_program", stages_as_lists)
    root = 1 if collective == "broadcast" else None
    for count, size in itertools.product((2, 3), (16, 10_000, 1 << 15, 1 << 18, 1 << 22)):
        numbers = copy_numbers("float32")
        if "reduce" in collective:
            numbers = reduction_numbers(ReduceOp.SUM, "float32", count)
        buffers = {"broadcast": 1, "all_reduce": 2, "all_to_all": 2 * count}.get(collective, 1 + count)
        hosts = tuple((k,) for k in range(count))
        place = SimpleNamespace(host=(0,))
        engine = MultiHostEngine(hosts, 0, place, None, (), lambda pending, _: pending, ends_at_once)
        before, first, last = engine.compile(collective, size, numbers, root, b"").program[:3]
        messages = [each for each in first if isinstance(each, HostMessages)]
        is_eager = len(messages[0].sends + messages[0].receives) > 0
        if is_eager and len(messages) > 1 and not ends_at_once:
            continue  # such calls have later rounds, and use slots
        assert (before, len(first), first[0].compared) == ([], 1, tuple(range(1, count)))
        assert isinstance(last[0], HostCheck)
        used, moved = set(), set()
        for each in last[1:]:
            if isinstance(each, HostMessages):
                moved |= {~move.at.region for move in (*each.sends, *each.receives)}
            else:
                used |= {~place.region for place in (*each.operands, *each.results)}
        assert min(used | moved, default=0) >= 0
        assert used or moved or collective == "broadcast"
        assert is_eager or size > 16
        assert not moved or (min(moved) < buffers) == ends_at_once


def test_pieces_fit_into_slots_of_real_size(monkeypatch):
    """With the real limits, the pieces of large arrays fit into slots, for several numbers of leaders and ranks. The
    compiler itself asserts that they fit."""
    monkeypatch.undo()
    monkeypatch.setattr(multi_host, "native_program", stages_as_lists)
    for counts in ((1, 1), (1, 8), (2, 7, 3)):
        hosts = tuple(tuple(range(end - count, end)) for end, count in zip(accumulate(counts), counts, strict=True))
        for dtype, collective, numbers in (
            ("uint8", "all_to_all", copy_numbers("uint8")),
            ("bfloat16", "all_reduce", reduction_numbers(ReduceOp.SUM, "bfloat16", sum(counts))),
            ("complex128", "reduce_scatter", reduction_numbers(ReduceOp.SUM, "complex128", sum(counts))),
        ):
            size, leaders = (9 << 20) // itemsize(dtype), [host[:1] for host in hosts]
            for plan in compiled(leaders, collective, size, numbers, None, hosts=hosts).values():
                assert plan.stages > 9


@pytest.mark.parametrize(
    ("collective", "size", "travelling"), [("all_reduce", 1 << 19, 6), ("reduce_scatter", 21_845, 8)]
)
def test_exact_reductions_are_planned_for_the_bytes_that_travel(monkeypatch, collective, size, travelling):
    """On measured links, an exact reduction of float32 has the plan and the pieces of a default reduction with as many
    bytes on the links, and not of one with as many elements. ``travelling``: its bytes per element, since partial sums
    are float64 and results are float32. Its least piece has as many elements, so it has twice the bytes."""
    monkeypatch.undo()
    monkeypatch.setattr(multi_host, "native_program", stages_as_lists)
    monkeypatch.setattr(two_level, "PIECE_BYTES", 1 << 30)  # so plans differ, although pieces are pipelined
    two_level.host_schedule.cache_clear()
    hosts = ((0,), (1,), (2,))
    topology = Topology.from_matrix([[0, 5, 1], [5, 0, 5], [1, 5, 0]], host_names(3), latency_s=1e-4)

    def exchanges(size, exact):
        monkeypatch.setattr(multi_host, "SMALLEST_PIECE", 1 << 16 if exact else 1 << 17)
        numbers = reduction_numbers(ReduceOp.SUM, "float32", 3, exact)
        plans = compiled(hosts, collective, size, numbers, None, topology)
        return [plans[rank].exchanges[0] for rank in range(3)]

    found = exchanges(size, True)
    for same, due in ((True, exchanges(size * travelling // 4, False)), (False, exchanges(size, False))):
        assert ([one.part for one in found] == [one.part for one in due]) == same
        counts = len(found[0].pieces), len(due[0].pieces)  # pieces have whole elements, so their numbers may differ
        assert (counts[0] == pytest.approx(counts[1], rel=0.1)) == same
    two_level.host_schedule.cache_clear()
