"""The programs of ranks on several hosts, without processes: a sum of the partial results replaces the exchange."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
from test_rank_programs import POISON, Machine

from crossreduce.ops import ReduceOp, copying
from crossreduce.packing import itemsize
from crossreduce.ranks import multi_host, programs
from crossreduce.ranks.instructions import reduction_numbers
from crossreduce.ranks.multi_host import MultiHostEngine


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Make pieces small, so that small arrays have many, and keep stages as lists of instructions."""
    monkeypatch.setattr(multi_host, "SMALLEST_PIECE", 1 << 9)
    monkeypatch.setattr(multi_host, "PIECE_BYTES", 1 << 11)
    monkeypatch.setattr(programs, "SLOT_BYTES", 1 << 14)
    monkeypatch.setattr(multi_host, "SLOT_BYTES", 1 << 14)
    monkeypatch.setattr(multi_host, "native_program", lambda stages: [list(stage) for stage in stages])


def compiled(hosts, collective, size, numbers, root):
    """Return each rank's plan."""
    plans = {}
    for host in hosts:
        for rank in host:
            engine = MultiHostEngine(hosts, rank, SimpleNamespace(host=host), None)
            plans[rank] = engine.compile(collective, size, numbers, root, b"")
    return plans


def exchanged(plans, leaders, sizes_of, piece, numbers, memories, sources):
    """Write the results of a piece into the memory of its leaders, one per host, as the exchange between hosts does."""
    wide, narrow = oracle.dtype_of(numbers.accumulator), oracle.dtype_of(numbers.result)
    size = sizes_of(piece)
    partials = []
    for rank in leaders:
        at = plans[rank].exchange.partial_at(piece)
        if rank in sources:
            partials.append(memories[rank][-1][at : at + size * wide.itemsize].view(wide).copy())
    total = sum(partials[1:], partials[0])
    if len(partials) > 1:
        total = (total if numbers.divisor == 1 else total / wide.type(numbers.divisor)).astype(narrow)
    for rank in leaders:
        exchange = plans[rank].exchange
        if any(value >= 0 for value in exchange.part.results):
            at = exchange.results_at(piece)
            memories[rank][-1][at : at + size * narrow.itemsize] = total.astype(narrow).view(np.uint8)


def run(hosts, collective, size, dtype, op=ReduceOp.SUM, root=None, in_place=False):
    """Run a call on all ranks and compare all memory with the oracle's."""
    ranks = [rank for host in hosts for rank in host]
    n = len(ranks)
    numbers = copying(dtype) if collective == "broadcast" else reduction_numbers(op, dtype, n)
    plans = compiled(hosts, collective, size, numbers, root)
    assert len({plan.stages for plan in plans.values()}) == 1
    made = oracle.dtype_of(dtype)
    draw = np.random.default_rng(size)
    given = {rank: draw.integers(0, 8, size).astype(made) for rank in ranks}
    total = oracle.reduce(op.value, [given[rank] for rank in sorted(ranks)], result=dtype)
    memories, wanted = {}, {}
    for rank in ranks:
        own, blank = given[rank].copy(), np.full(size * made.itemsize, POISON, np.uint8).view(made)
        if collective == "broadcast":
            memories[rank], wanted[rank] = [own], [given[root]]
        elif root not in (None, rank):
            memories[rank], wanted[rank] = [own], [given[rank]]
        else:
            memories[rank], wanted[rank] = (
                ([own, own], [total, total]) if in_place else ([own, blank], [given[rank], total])
            )
        memories[rank] = [x.view(np.uint8) for x in memories[rank]]
        exchange = plans[rank].exchange
        if exchange is not None:
            memories[rank].append(np.zeros(exchange.nbytes, np.uint8))
    machines = [
        Machine(np.zeros((len(host), 2, 1 << 13), np.uint8), [[memories[rank] for rank in host]]) for host in hosts
    ]
    leaders = min(map(len, hosts))
    sources = set(ranks)
    if collective == "broadcast":
        sources = set(next(host for host in hosts if root in host))
    for stage in range(plans[ranks[0]].stages):
        for machine, host in zip(machines, hosts, strict=True):
            for place in draw.permutation(len(host)):
                for instruction in plans[host[place]].program[stage]:
                    machine.run(0, int(place), instruction)
        for leader in range(leaders):
            rail = [host[leader] for host in hosts]
            exchange = plans[rail[0]].exchange
            piece = stage - 1 - exchange.delay
            if 0 <= piece < len(exchange.pieces):

                def stripe(piece, exchange=exchange):
                    return sum(
                        elements for _, _, elements in exchange.pieces[piece].places[: exchange_chunks(exchange)]
                    )

                exchanged(plans, rail, stripe, piece, numbers, memories, sources)
                for machine, host in zip(machines, hosts, strict=True):
                    deliveries = plans[host[leader]].deliveries
                    for instruction in deliveries[piece] if deliveries else ():
                        machine.run(0, leader, instruction)
        for machine in machines:
            machine.barrier()
    for rank in ranks:
        for found, right in zip(memories[rank], wanted[rank], strict=False):
            assert found.tobytes() == right.tobytes(), (rank, hosts, collective, size)


def exchange_chunks(exchange):
    """Return the number of chunks of a piece; the host's partial result has one value of each chunk."""
    return len(exchange.part.results)


HOSTS = (
    ((0, 1), (2, 3)),
    ((0, 2, 4), (1, 3)),
    ((0,), (1, 2, 3)),
    ((0,), (1,)),
    ((0, 1), (2, 3), (4, 5, 6)),
    ((1, 2), (0,)),
)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "broadcast"])
def test_calls_over_hosts_give_the_results_of_the_oracle_without_races(hosts, collective):
    """For any hosts, root, size and dtype, the local programs around the exchange give the oracle's results, write
    nothing else, and no two ranks access the same bytes of a slot between two barriers if one of them writes."""
    ranks = sum(map(len, hosts))
    for size in (1, 100, 700, 3000):
        for dtype in ("int64", "float16", "float32"):
            for root in (0, ranks - 1) if collective != "all_reduce" else (None,):
                run(hosts, collective, size, dtype, root=root)
    if collective != "broadcast":
        run(hosts, collective, 3000, "bfloat16", ReduceOp.MEAN, None if collective == "all_reduce" else 0)
    if collective == "all_reduce":
        run(hosts, collective, 3000, "float32", in_place=True)


def test_pieces_fit_into_slots_of_real_size(monkeypatch):
    """With the real limits the pieces of large arrays fit into slots, which the compiler asserts, for several numbers
    of leaders and ranks."""
    monkeypatch.undo()
    monkeypatch.setattr(multi_host, "native_program", lambda stages: [list(stage) for stage in stages])
    for counts in ((1, 1), (1, 8), (4, 4), (3, 5), (2, 7, 3)):
        ends = np.cumsum([0, *counts])
        hosts = tuple(tuple(range(a, b)) for a, b in pairwise(ends))
        for dtype in ("uint8", "bfloat16", "complex128"):
            numbers = reduction_numbers(ReduceOp.SUM if dtype != "uint8" else ReduceOp.MAX, dtype, int(ends[-1]))
            for plan in compiled(hosts, "all_reduce", (9 << 20) // itemsize(dtype), numbers, None).values():
                assert plan.stages > 9
