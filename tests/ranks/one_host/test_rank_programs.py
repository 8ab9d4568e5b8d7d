"""The rank compiler, tested without processes: a ``Machine`` runs the instructions of all ranks on plain arrays, in any
order that the barriers allow."""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import numpy as np
import oracle
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from planned import planned

from crossreduce.lowering import lower
from crossreduce.ops import ReduceOp
from crossreduce.packing import itemsize
from crossreduce.planning import PLANNERS
from crossreduce.ranks.inter_host import one_host
from crossreduce.ranks.inter_host.one_host import HostCollective, collective_arrays, host_collective, rank_names
from crossreduce.ranks.intra_host import programs
from crossreduce.ranks.intra_host.instructions import reduction_numbers
from crossreduce.ranks.intra_host.programs import analyze, boundary, rank_stages

ROOTED = ("reduce", "broadcast", "gather", "scatter")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *ROOTED)
DTYPES = ("uint8", "int16", "float32", "int64", "float64", "complex128")
POISON = 113  # each byte of a result before an op


class Op(NamedTuple):
    """A collective of ``size`` elements per buffer.

    ``algorithm``: the planner of an all-reduce or reduce, or ``None`` for the one that groups use.
    """

    collective: str
    size: int
    dtype: str
    root: int | None = None
    algorithm: str | None = None


@contextlib.contextmanager
def limits(piece, small=one_host.SMALL_BYTES, slot=programs.SLOT_BYTES):
    """Set the bytes of a piece, of a small array and of a slot, so that few elements make many pieces."""
    pieces_and_slots = mock.patch.multiple(programs, PIECE_BYTES=piece, SLOT_BYTES=slot)
    with pieces_and_slots, mock.patch.object(one_host, "SMALL_BYTES", small):
        yield


def numbers(dtype, op=ReduceOp.SUM, ranks=1):
    return reduction_numbers(op, dtype, ranks)


@functools.cache
def scheduled(algorithm, ranks, root):
    """Return the program of an all-reduce, or of a reduce to ``root``, that a planner makes."""
    names = rank_names(ranks)
    schedule = planned(algorithm, names, names if root is None else (names[root],))
    assert schedule.devices == names, "devices are ranks"
    return HostCollective(lower(schedule), (0,), (1,))


def chosen(op, ranks):
    """Return the program of an op, and the numbers of its input and output buffers."""
    if op.algorithm is not None:
        return scheduled(op.algorithm, ranks, op.root)
    return host_collective(op.collective, ranks, op.root, op.size * itemsize(op.dtype))


def compiled(op, ranks):
    """Return the stages of every rank."""
    program, inputs, outputs = chosen(op, ranks)
    return [rank_stages(program, inputs, outputs, op.size, numbers(op.dtype), rank) for rank in range(ranks)]


def inputs(op, ranks, draw, divisor=1):
    """Return the buffers of every rank before and after an op, in the order in which ``Communicator`` passes them. The
    results are computed without a schedule."""
    dtype = oracle.dtype_of(op.dtype)

    def random():
        if op.algorithm is not None:  # small integers: their sums have the same bits in any order
            return draw.integers(0, 1 << 3, op.size).astype(dtype)
        if dtype.kind in "fc":
            return (draw.standard_normal(op.size) * 10.0 ** draw.integers(-3, 4, op.size)).astype(dtype)
        return draw.integers(0, 256, op.size * dtype.itemsize).astype(np.uint8).view(dtype)

    arrays = collective_arrays(op.collective, ranks, op.root)
    before = [{} for _ in range(ranks)]  # for each rank its buffers by their numbers
    for array in arrays:
        for rank in array.sources:
            before[rank].setdefault(array.input, random())
        for rank in array.destinations:
            blank = np.full(op.size * dtype.itemsize, POISON, np.uint8).view(dtype)
            before[rank].setdefault(array.output, blank)
    after = [{number: buffer.copy() for number, buffer in buffers.items()} for buffers in before]
    for array in arrays:
        result = functools.reduce(np.add, [before[rank][array.input] for rank in array.sources])  # in order of ranks
        for rank in array.destinations:
            after[rank][array.output] = result.copy() if divisor == 1 else (result / divisor).astype(dtype)
    return tuple([[each[number] for number in sorted(each)] for each in buffers] for buffers in (before, after))


def races(spans):
    """Yield pairs of overlapping spans (region, start, stop, rank, written) of two ranks; at least one is written."""
    spans = sorted(spans)
    for k, (region, _, stop, rank, written) in enumerate(spans):
        for other in spans[k + 1 :]:
            if other[0] != region or other[1] >= stop:
                break
            if other[3] != rank and (written or other[4]):
                yield spans[k], other


def computed(instruction, operands):
    """Return the value of an instruction, computed by NumPy."""
    _, dtype, accumulator, result, divisor, *_ = instruction.numbers
    arrays = [operand.view(oracle.dtype_of(dtype)) for operand in operands]
    if len(arrays) == 1:
        return arrays[0].astype(oracle.dtype_of(result))
    assert instruction.numbers.op in (ReduceOp.SUM, ReduceOp.MEAN)
    value = functools.reduce(np.add, [x.astype(oracle.dtype_of(accumulator)) for x in arrays])
    return (value if divisor == 1 else value / divisor).astype(oracle.dtype_of(result))


class Machine:
    """Runs instructions of the ranks of one host on plain arrays, and records which bytes of slots they access.

    Args:
      slots: of shape ``(ranks, 2, bytes)``. Ops with even and odd numbers use one half each.
      memories: ``memories[op][rank]`` lists the rank's buffers as bytes.
    """

    def __init__(self, slots, memories):
        self.slots, self.memories, self.spans = slots, memories, []

    def run(self, number, rank, instruction):
        """Run an instruction of a rank's op."""

        def at(place, dtype, written):
            nbytes = instruction.size * itemsize(dtype)
            if place.region < 0:
                memory = self.memories[number][rank][~place.region]
            else:
                memory = self.slots[place.region, number % 2]
                if nbytes:
                    self.spans.append(((place.region, number % 2), place.offset, place.offset + nbytes, rank, written))
            assert 0 <= place.offset <= place.offset + nbytes <= memory.size, f"{place} is out of range"
            return memory[place.offset : place.offset + nbytes]

        operands = [at(place, instruction.numbers.dtype, written=False) for place in instruction.operands]
        value = np.ascontiguousarray(computed(instruction, operands)).view(np.uint8)
        for place in instruction.results:
            at(place, instruction.numbers.result, written=True)[:] = value
        to_caller = all(place.region < 0 for place in instruction.results)
        assert not instruction.streaming or to_caller, "a streaming store into a slot, which others read soon"

    def barrier(self):
        """Raise if two ranks accessed the same bytes since the last barrier, and one of them wrote."""
        found = list(races(self.spans))
        assert not found, f"(slot, half), start, stop, rank, written: {found[:3]}"
        self.spans = []


def run(ops, ranks, draw, in_place=False):
    """Run ops one after the other on all ranks, and compare all memory with the oracle's.

    There is a barrier after each stage of an op except the last one. So the last stage of an op and the first stage of
    the next one are in the same stretch: a period between two barriers, in which ranks may run in any order.
    """
    memories, wanted, stretches = [], [], []  # ``stretches[k][rank]``: (op, instruction) between two barriers
    for number, op in enumerate(ops):
        before, after = inputs(op, ranks, draw)
        if in_place and op.collective == "all_reduce":  # buffer 1, the result, is also the input
            for buffers, results in zip(before, after, strict=True):
                buffers[1], results[0] = buffers[0], results[1]
        memories.append([[b.view(np.uint8) if b.size else np.zeros(0, np.uint8) for b in bs] for bs in before])
        wanted.append(after)
        stages = compiled(op, ranks)
        (count,) = {len(each) for each in stages}
        assert count >= 2, "the ranks pass no barrier"
        for stage in range(count):
            if stage or not number:  # else the stage belongs to the stretch of the previous op's last stage
                stretches.append([[] for _ in range(ranks)])
            for rank in range(ranks):
                stretches[-1][rank] += [(number, instruction) for instruction in stages[rank][stage]]
    machine = Machine(np.zeros((ranks, 2, programs.SLOT_BYTES // 2), np.uint8), memories)
    for stretch in stretches:
        for rank in draw.permutation(ranks):
            for number, instruction in stretch[rank]:
                machine.run(number, int(rank), instruction)
        machine.barrier()
    for op, buffers, results in zip(ops, memories, wanted, strict=True):
        for rank in range(ranks):
            for k, (found, right) in enumerate(zip(buffers[rank], results[rank], strict=True)):
                assert found.tobytes() == right.tobytes(), f"{op}: buffer {k} of rank {rank} is wrong"


@examples(150)
@given(st.data())
def test_successive_ops_give_the_results_of_the_oracle_without_races(data):
    """One to three successive ops of any kinds give the oracle's bits on every rank, and write nothing else. No rank
    writes a byte of a slot while another rank may read or write it."""
    ranks = data.draw(st.integers(1, 9), "ranks")
    ops = []
    for _ in range(data.draw(st.integers(1, 3), "ops")):
        name = data.draw(st.sampled_from(COLLECTIVES), "collective")
        size = data.draw(st.one_of(st.integers(0, 40), st.integers(0, 700)), "size")
        root = data.draw(st.integers(0, ranks - 1), "root") if name in ROOTED else None
        algorithms = [None, None, *PLANNERS] if name in ("all_reduce", "reduce") else [None]
        dtype, algorithm = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(algorithms))
        ops.append(Op(name, size, dtype, root, algorithm))
    piece = data.draw(st.sampled_from([128, 512, 1024, 1 << 12]), "piece bytes")
    small = data.draw(st.sampled_from([0, 64, 1 << 10]), "small bytes")
    seed = data.draw(st.integers(0, 1 << 20), "seed")
    with limits(piece, small):
        run(ops, ranks, np.random.default_rng(seed), in_place=data.draw(st.booleans(), "in place"))


GENERAL = ("ring", "halving_doubling", "recursive_doubling", "hierarchical_copy", "forest", "one_device")


@pytest.mark.parametrize("algorithm", GENERAL)
def test_the_compiler_runs_every_schedule(algorithm):
    """Schedules with partial results, forwarding and many rounds give the oracle's results. They run in several pieces,
    in place, with small slots, and with partial results that are wider than the inputs (of half types)."""
    draw = np.random.default_rng(7)
    for ranks in (1, 2, 3, 4, 5, 7, 8) if algorithm != "forest" else (2, 3, 4, 6):
        odd = ranks % 2 == 1
        for dtype, in_place in (("float16", not odd), ("bfloat16" if odd else "int64", odd)):
            ops = [Op("all_reduce", size, dtype, None, algorithm) for size in (0, 1, 33, 1000, 2300)]
            ops.append(Op("reduce", 1000, dtype, ranks - 1, algorithm))
            with limits(piece=1 << 12, small=0, slot=1 << 15):
                run(ops, ranks, draw, in_place)


def test_means_are_divided_once_where_they_are_final():
    """Only the instruction that produces the fully reduced chunk divides and rounds."""
    for algorithm, producers in (("ring", 1), ("direct", 1), ("recursive_doubling", 4)):  # ranks that produce a chunk
        program, mean = scheduled(algorithm, 4, None).program, numbers("float16", ReduceOp.MEAN, 4)
        stages = [stage for rank in range(4) for stage in rank_stages(program, [0], [1], 64, mean, rank)]
        divided = [i for stage in stages for i in stage if i.numbers.divisor == 4]
        assert all(i.numbers.result == "float16" and len(i.operands) > 1 for i in divided)
        assert sum(i.size for i in divided) == 64 * producers


def test_only_mixed_combinations_widen_inputs():
    """Inputs of a half type are widened only if an instruction combines them with partial results, which are wider."""
    for algorithm, wide in (("direct", False), ("one_shot", False), ("ring", True), ("hierarchical_copy", False)):
        program = scheduled(algorithm, 4, None).program
        first_stage = rank_stages(program, [0], [1], 640, numbers("float16"), 1)[0]  # copies inputs to the slot
        assert {i.numbers.result for i in first_stage} == {"float32" if wide else "float16"}, algorithm


def test_pieces_of_ranks_that_only_wait_are_small():
    """Three or more ranks that do not compute while an op runs use pieces of 128 KiB, or 256 KiB if they only copy
    data. Other groups, and calls with very large arrays, use pieces of 1 MiB."""
    sums = numbers("float32")
    for ranks, overlapping, sum_pieces, copy_pieces in ((3, False, 32, 16), (3, True, 4, 4), (2, False, 4, 4)):
        engine = one_host.OneHostEngine(0, ranks, overlapping=overlapping)
        assert engine.compile("all_reduce", 1 << 20, sums, None, b"").stages == sum_pieces + 2  # 4 MiB
        assert engine.compile("broadcast", 1 << 20, sums, 0, b"").stages == copy_pieces + 1
    large = one_host.OneHostEngine(0, 8, overlapping=False).compile("all_reduce", 1 << 28, sums, None, b"")
    assert large.stages == (1 << 30) // programs.PIECE_BYTES + 2


@examples(100)
@given(st.data())
def test_slots_are_large_enough(data):
    """No instruction accesses bytes after its half of a slot, for any collective and schedule, for up to 300 ranks (40
    in an all-to-all or with a named algorithm)."""
    collective = data.draw(st.sampled_from(COLLECTIVES), "collective")
    algorithm = data.draw(st.sampled_from([None, None, *PLANNERS]), "algorithm") if collective == "all_reduce" else None
    many = 40 if collective == "all_to_all" or algorithm else 300
    ranks = data.draw(st.one_of(st.integers(1, 9), st.integers(1, many)), "ranks")
    dtype = data.draw(st.sampled_from([*DTYPES, "float16"]), "dtype")
    op = Op(collective, 1 << 24, dtype, ranks - 1 if collective in ROOTED else None, algorithm)
    program, arrays, _ = chosen(op, ranks)
    step = analyze(program, numbers(dtype), len(arrays)).piece_size(op.size, programs.SLOT_BYTES // 2)
    op = op._replace(size=data.draw(st.sampled_from([step - 1, step, step + 1, 3 * step + 7]), "size"))
    program, arrays, results = chosen(op, ranks)
    counts = set()
    for rank in {0, ranks // 2, ranks - 1}:
        stages = rank_stages(program, arrays, results, op.size, numbers(dtype), rank)
        counts.add(len(stages))
        for one in (instruction for stage in stages for instruction in stage):
            for kind, places in ((one.numbers.dtype, one.operands), (one.numbers.result, one.results)):
                ends = [place.offset + one.size * itemsize(kind) for place in places if place.region >= 0]
                assert max(ends, default=0) <= programs.SLOT_BYTES // 2
    assert len(counts) == 1


@given(st.integers(0, 5000), st.integers(1, 300), st.sampled_from([1, 2, 4, 8, 16]))
def test_shares_begin_at_lines(size, count, nbytes):
    """Shares cover all elements in order, begin at multiples of a cache line, and differ by at most two lines."""
    ends, line = [boundary(k, count, size, nbytes) for k in range(count + 1)], 64 // nbytes
    assert (ends[0], ends[-1]) == (0, size)
    assert all(end % line == 0 or end == size for end in ends)
    lengths = np.diff(ends)
    assert 0 <= lengths.min() <= lengths.max() <= lengths.min() + 2 * line


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_least_stages_and_bytes(n):
    """An all-reduce or reduce of p pieces takes p + 2 stages. Other collectives, and all calls of a single rank, take
    p + 1. Only results that other ranks need are copied twice. In an all-reduce, a rank copies its input before and
    after its own share into its slot, by one instruction each."""
    size, nbytes = 1 << 20, 1 << 22
    pieces = nbytes // programs.PIECE_BYTES
    # ``moved``: the bytes that all instructions read and write, as a multiple of the bytes of an array.
    for collective, stages, moved in (
        # Each rank copies the others' shares of its input, combines its own share of all inputs, copies that to its
        # slot, and copies the results of the others.
        ("all_reduce", pieces + 2, n * (2 * (n - 1) / n + (n + 3) / n + 2 * (n - 1) / n)),
        ("reduce", pieces + 2, 2 * (n - 1) + n + 1 + 2 * (n - 1) / n),
        ("broadcast", pieces + 1, 2 + 2 * (n - 1)),
        ("all_gather", pieces + 1, n * 2 + n * 2 * n),
        ("gather", pieces + 1, 2 * (n - 1) + 2 * n),
    ):
        if n == 1:
            stages, moved = pieces + 1, 0 if collective == "broadcast" else 2
        found = compiled(Op(collective, size, "float32", 0 if collective in ROOTED else None), n)
        assert {len(each) for each in found} == {stages}
        accesses = sum(i.size * len(i.operands + i.results) for each in found for stage in each for i in stage)
        assert 4 * accesses == pytest.approx(moved * nbytes, rel=1e-3)
    assert {len(each) for each in compiled(Op("all_reduce", 256, "float32"), n)} == {2}
    for rank, stages in enumerate(compiled(Op("all_reduce", 1 << 15, "float32"), n)):
        assert n == 1 or len(stages[0]) == (1 if rank in (0, n - 1) else 2)  # the first and last share are at an end


def test_streaming_stores_bypass_the_cache_only_for_large_results_of_the_caller():
    """Only large copies into the caller's memory use streaming stores. Slots do not, as other ranks read them soon."""
    for collective in ("all_reduce", "all_gather"):
        for size, streaming in ((1 << 10, False), (1 << 20, True)):
            instructions = [i for stage in compiled(Op(collective, size, "float32"), 2)[0] for i in stage]
            assert any(i.streaming for i in instructions) == streaming
            assert not any(i.streaming for i in instructions if any(place.region >= 0 for place in i.results))
