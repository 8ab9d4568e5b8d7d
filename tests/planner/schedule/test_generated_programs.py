"""Programs of generated schedules: their views, made from a few chunks, are those of the program with all chunks.

The schedules are those of the planners that generate them, forests of eight hosts with NVSwitches, and random ones that
``oracle.right`` finds right, whose images copy copies, combine equal values twice and swap values within a round.
"""

import functools
import itertools
import random
from fractions import Fraction

import numpy as np
import oracle
import pytest
from crossreduce.export.collective import collective as collective_of
from crossreduce.export.grouping import trees_of
from crossreduce.export.msccl.writer import to_msccl_xml
from crossreduce.export.nccl_graph import rings
from crossreduce.export.trace import to_chrome_trace
from running import ENGINES, run_engine
from strategies import names

import crossreduce as cr
from crossreduce import Chunk, Schedule, ScheduleError, Step, Topology
from crossreduce.engines.base import Layout, LoweredBuffer, ProgramRange, engine_named
from crossreduce.engines.jax.permutations import compile_permutations
from crossreduce.frameworks.null import NullArray, NullFramework
from crossreduce.lowering import GeneratedProgram, Program, element_ranges, lower, part_of
from crossreduce.packing import Buffer, Span
from crossreduce.planning import direct, halving_doubling, ring
from crossreduce.planning.derived import all_gather, reduce_scatter
from crossreduce.planning.explain import shape, tree_lines
from crossreduce.schedule import GeneratedSchedule
from crossreduce.schedule.generated import rotations
from crossreduce.topology.symmetry import Symmetry

PLANNERS = {"ring": ring, "direct": direct, "halving_doubling": halving_doubling}
each_planned = pytest.mark.parametrize(
    ("algorithm", "n"), list(itertools.product(PLANNERS, (33, 34, 36, 40, 48, 64))), ids=lambda x: str(x)
)


@functools.cache
def forest():
    """Return the schedule of a forest for 64 GPUs in 8 hosts, which is generated."""
    return cr.plan(Topology.machine("hgx-h100", hosts=8), algorithm="forest").schedule


def chance(seed):
    """Return a random generated schedule of 4 or 6 devices, in one of five collectives; it may be wrong."""
    rng = random.Random(seed)
    n = rng.choice([4, 6])
    everyone = tuple(range(n))
    kind = rng.choice(["all_reduce", "all_reduce", "all_reduce", "reduce_scatter", "all_gather"])
    chunks, rounds, count = [], [[] for _ in range(n + 4)], rng.choice([1, 1, 2])
    for c in range(count):
        root = rng.randrange(n)
        sources = (root,) if kind == "all_gather" else everyone
        destinations = (root,) if kind == "reduce_scatter" else tuple(rng.sample(everyone, n))
        if kind == "all_reduce" and rng.random() < 0.3:
            destinations = tuple(rng.sample(everyone, rng.randint(1, n)))
        chunks.append(Chunk(Fraction(1, count), sources, destinations))
        chain, at = rng.sample(everyone, n), 0
        if kind == "all_gather":
            chain = [root]
        for k in range(1, len(chain)):  # collect along a chain of devices
            rounds[at].append(Step(c, chain[k], (chain[k - 1], chain[k])[:: rng.choice([1, -1])]))
            at += 1
        for _ in range(rng.randint(0, 4)):  # steps that are needless, or that spoil the result
            srcs = tuple(rng.sample(everyone, rng.randint(1, 3)))
            rounds[rng.randrange(len(rounds))].append(Step(c, rng.randrange(n), srcs))
        if rng.random() < 0.3:  # two devices swap their values
            a, b = rng.sample(everyone, 2)
            rounds[at] += [Step(c, a, (b,)), Step(c, b, (a,))]
            chain[-1] = {a: b, b: a}.get(chain[-1], chain[-1])
            at += 1
        if rng.random() < 0.4:  # two devices combine the same values, and send their results to different devices
            a, b = rng.sample(everyone, 2)
            rounds[at + 1] += [Step(c, dst, (rng.choice([a, b]),)) for dst in destinations if dst not in (a, b)]
            rounds[at] += [Step(c, dst, (chain[-1],)) for dst in (a, b) if dst != chain[-1]]
        else:
            rounds[at] += [Step(c, dst, (chain[-1],)) for dst in destinations if dst != chain[-1]]
    for steps in rounds:
        rng.shuffle(steps)
    base = Schedule(kind, "chance", names(n), tuple(chunks), tuple(map(tuple, rounds)))
    symmetry = rotations(rng.choice([[n], [2, n // 2], [n // 2, 2]]), n)
    return GeneratedSchedule(base, symmetry, base.devices, rng.random() < 0.6)


def twins(sort):
    """Return schedules in which several devices combine the same values, listed in the same or in another order."""
    everyone = tuple(range(6))
    for orders in itertools.product([(2, 3), (3, 2)], repeat=2):
        rounds = (
            (Step(0, 2, (0, 1, 2)), Step(0, 3, (3, 4, 5))),
            (Step(0, 1, (2,)), Step(0, 4, (3,)), Step(0, 5, (2,)), Step(0, 0, (3,))),
            (Step(0, 2, orders[0]), Step(0, 3, orders[1]), Step(0, 1, (1, 4)), Step(0, 5, (5, 0)), Step(0, 4, (0, 1))),
            (Step(0, 0, (5,)),),
        )
        base = Schedule("all_reduce", "twins", names(6), (Chunk(Fraction(1), everyone, everyone),), rounds)
        for dimensions in ([6], [2, 3], [3, 2]):
            yield GeneratedSchedule(base, rotations(dimensions, 6), base.devices, sort)


@functools.cache
def small():
    """Return small generated schedules that are right."""
    found = [schedule for schedule in map(chance, range(1_500)) if oracle.right(schedule.base)]
    assert len(found) > 300
    assert {(schedule.collective, schedule.in_order) for schedule in found} == {
        *itertools.product(["all_reduce", "reduce_scatter", "all_gather"], [False, True])
    }
    return [*found, *twins(False), *twins(True)]


def check(schedule):
    """Each view of a generated schedule's program is that of the program of all its chunks and steps."""
    program, explicit = lower(schedule), lower(schedule.explicit)
    assert isinstance(program, GeneratedProgram)
    assert type(explicit) is Program
    for chunk, results in itertools.product(range(len(explicit.chunks)), (None, 1, 2)):
        assert program.fused(chunk, results) == explicit.fused(chunk, results), (chunk, results)
    for device in range(len(schedule.devices)):
        assert program.on(device) == explicit.on(device), device
    assert tuple(program.chunks) == explicit.chunks
    assert program.by_round == explicit.by_round
    assert program.transfers == explicit.transfers
    assert program.ends == explicit.ends
    assert program.pieces == explicit.pieces
    for size in (0, 1, 7, 1000):
        assert program.spans(size) == explicit.spans(size)
        assert element_ranges(program, size) == element_ranges(explicit, size)
    return program, explicit


@each_planned
def test_views_of_planned_schedules(algorithm, n):
    """All views of the planners' generated programs are those of the programs with all chunks."""
    schedule = PLANNERS[algorithm](names(n))
    if isinstance(schedule, GeneratedSchedule):
        check(schedule)
    else:  # no exchange of blocks moves an odd number of extras
        assert (algorithm, n) == ("halving_doubling", 33)


def test_planners_rotate_the_first_owner():
    """The views agree also where the first chunk starts at another device than the first."""
    for planner in (ring, direct):
        check(planner(names(40), first=17))


def test_views_of_forests():
    """All views of a forest's program, with routes through switches, are those of the program with all chunks."""
    schedule = forest()
    assert len(schedule.devices) == 64
    assert schedule.base.routes
    check(schedule)


def test_views_of_small_schedules():
    """The views agree for small schedules of any form: with copies of copies, equal combinations, and swaps."""
    for schedule in small():
        check(schedule)


def test_sorted_images_differ_from_their_chunk():
    """An image whose operands are sorted can combine other values than the chunk: equal ones once, or different ones
    twice. So its fused program is not the chunk's with other numbers."""
    counts = {
        len({len(program.folds) for program in map(lower(schedule).fused, range(schedule.chunk_count))})
        for schedule in small()
        if schedule.in_order and len(schedule.base.chunks) == 1
    }
    assert max(counts) > 1


def test_images_are_made_when_they_are_read():
    """The fused program of a chunk and the part of a device make no chunk but those of the base."""
    program = lower(ring(names(1024)))
    assert len(program.base.chunks) == 1
    assert len(program.chunks) == 1024
    assert program.fused(5) == program.fused(5)
    assert program.on(7).results == tuple(part for part in program.on(7).results if part >= 0)
    program.require_uniform()
    assert program.spans(1 << 20)[-1] == ((1 << 20) - 1024, 1 << 20)
    assert not {"by_round", "transfers", "routes"} & {*vars(program)}
    assert program.chunks._made == {}
    first, last = program.chunks[0], program.chunks[-1]
    assert program.chunks[0] is first
    assert program.chunks[1023] is last
    assert {*program.chunks._made} == {0, 1023}
    assert program.chunks[1022:] == (program.chunks[1022], last)
    with pytest.raises(IndexError, match="out of range"):
        program.chunks[1024]


def test_two_devices_list_their_messages_in_the_same_order():
    """In each round a device receives the values that another one sends to it, in the same order."""
    for schedule in (ring(names(40)), direct(names(40)), halving_doubling(names(40)), forest()):
        program = lower(schedule)
        parts = [program.on(device) for device in range(len(schedule.devices))]
        for r in range(program.round_count):
            sent, received = {}, {}
            for device, part in enumerate(parts):
                for value, dst in part.stages[r].sends:
                    sent.setdefault((device, dst), []).append(part.values[value])
                for value, src in part.stages[r].receives:
                    received.setdefault((src, device), []).append(part.values[value])
            assert sent == received, (schedule.head, r)


def test_devices_outside_the_program():
    """The part of a device that the program does not have is a mistake of the caller."""
    for program in (lower(ring(names(3))), lower(ring(names(40)))):
        with pytest.raises(AssertionError, match="device 40 of"):
            program.on(40)


def test_a_wrong_base_is_not_lowered():
    """``lower`` raises the error of ``verify`` for a generated schedule with a wrong base, also at the second call."""
    chunk = Chunk(Fraction(1), (0, 1), (0, 1))
    base = Schedule("all_reduce", "custom", names(2), (chunk,), ((Step(0, 0, (0, 1)),),))
    wrong = GeneratedSchedule(base, rotations([2], 2), base.devices)
    for _ in range(2):
        with pytest.raises(ScheduleError, match="contribution of device cpu:0 is lost"):
            lower(wrong)


def test_parts_of_uniform_programs_are_whole():
    """The part of a program that has the ends of all its chunks is the program itself."""
    program, everyone = lower(direct(names(40))), tuple(range(40))
    assert part_of(program, everyone, everyone) is program
    scattered = next(s for s in small() if s.collective == "reduce_scatter" and len(s.base.chunks) == 1)
    sources = scattered.base.chunks[0].sources
    (chunk,) = part_of(lower(scattered), sources, (1,)).chunks
    assert chunk.destinations == (1,)
    assert chunk.share == 1


def test_chunks_that_differ_cannot_run_on_whole_arrays():
    """``require_uniform`` raises if the symmetry moves the sources or the destinations to other devices."""
    for schedule in small():
        program = lower(schedule)
        if len({chunk[1:3] for chunk in program.chunks}) == 1:
            program.require_uniform()
        else:
            with pytest.raises(ScheduleError, match="same sources and destinations"):
                program.require_uniform()


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@each_planned
def test_engines_give_the_same_bits(engine, algorithm, n):
    """Each engine gives the bits of the program with all chunks, for sizes with and without elements in each chunk."""
    schedule = PLANNERS[algorithm](names(n))
    if not isinstance(schedule, GeneratedSchedule):
        return
    rng = np.random.default_rng(n)
    for size, dtype in ((1, "float32"), (n - 3, "float16"), (513, "float32")):
        xs = [rng.standard_normal(size).astype(dtype) for _ in range(n)]
        found, due = (run_engine(engine, each, "sum", xs) for each in (schedule, schedule.explicit))
        assert [x.tobytes() for x in found] == [x.tobytes() for x in due]
        assert len(found) == n


@pytest.mark.parametrize("algorithm", PLANNERS)
def test_the_null_engine_counts_the_same(algorithm):
    """The counts of transfers and combinations are those of the program with all chunks."""
    schedule = PLANNERS[algorithm](names(40))
    counts = []
    for each in (schedule, schedule.explicit):
        null = NullFramework()
        buffer = LoweredBuffer(
            Buffer("float32", 999, (Span(0, 0, 999, (999,)),), 1, 0), (ProgramRange(lower(each), 0, 999),)
        )
        layout = Layout(null, (0,), (buffer,), each.devices, each.devices)
        numbers = null.numbers(cr.ReduceOp.SUM, "float32", 40)
        rows = [[NullArray((999,), "float32", device, null) for device in each.devices]]
        engine_named("null").compile(layout, numbers, False).run(rows, None)
        counts.append((null.counts.copies, null.counts.additions, dict(null.counts.bytes)))
    assert counts[0] == counts[1]
    assert counts[0][0] > 0


def test_all_reduces_of_many_replicas():
    """The cross-device ops give the oracle's sums on 100 replicas, by each algorithm, to the bit the loop's."""
    xs = oracle.contributions(12, "int64", (501,)) * 9
    value = cr.PerReplica(xs[:100])
    due = sum(x.astype(object) for x in xs[:100]).astype("int64").tolist()
    for algorithm in PLANNERS:
        reduced = cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", value, value)
        assert all(x.tolist() == due for x in reduced.values)


# ---- symmetries -----------------------------------------------------------------------------------------------------


def test_images_of_single_nodes_are_those_of_the_elements():
    """``Symmetry.image`` returns what the permutation of each element makes of each node; ``origins`` undoes it."""
    for symmetry in (rotations([6], 6), rotations([2, 3, 4], 24), forest().symmetry, Symmetry((), 3)):
        elements = list(symmetry.elements())
        assert len(elements) == symmetry.order
        for node in range(symmetry.nodes):
            assert [moves[node] for moves in elements] == list(symmetry.images(node))
            assert [symmetry.image(k, node) for k in range(symmetry.order)] == list(symmetry.images(node))
            assert [symmetry.image(k, origin) for k, origin in enumerate(symmetry.origins(node))] == [
                node
            ] * symmetry.order


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_derived_collectives_are_those_of_all_chunks():
    """A reduce-scatter and an all-gather that are derived from a base and its images have the chunks, and in each round
    the steps, of those that are derived from all chunks."""
    made = [
        ring(names(40), first=1),
        ring(names(36)),
        direct(names(40)),
        direct(names(33)),
        halving_doubling(names(64)),
    ]
    for schedule in made:
        scattered, due = reduce_scatter(schedule), reduce_scatter(schedule.explicit)
        assert isinstance(scattered, GeneratedSchedule)
        for found, right in ((scattered, due), (all_gather(scattered), all_gather(due))):
            assert found.head == right.head
            assert found.chunks == right.chunks
            assert [sorted(steps) for steps in found.rounds] == [sorted(steps) for steps in right.rounds]
            cr.verify(found.explicit)
            check(found)


def test_unequal_parts_are_derived_from_all_chunks():
    """If some devices would get more chunks than others, a reduce-scatter is derived from all chunks."""
    schedule = halving_doubling(names(40))  # 32 chunks, which belong to the first 32 devices
    assert isinstance(schedule, GeneratedSchedule)
    assert reduce_scatter(schedule) == reduce_scatter(schedule.explicit)


def test_plans_of_derived_collectives():
    """A reduce-scatter and an all-gather of many devices by ``direct`` have one chunk per device."""
    mesh = Topology.full_mesh(names(40))
    for collective in ("reduce_scatter", "all_gather"):
        schedule = cr.plan(mesh, collective, "1M", algorithm="direct").schedule
        assert schedule.head.startswith(f"{collective} direct: 40 devices, 40 chunks, 1 round, ")


def test_trees_of_generated_schedules():
    """The trees that ``Plan.explain`` describes are those of the schedule with all chunks, in the same order."""
    for schedule in [planner(names(n)) for planner in PLANNERS.values() for n in (40, 64)] + [forest()]:
        assert shape(schedule) == shape(schedule.explicit)
        assert tree_lines(shape(schedule)) == tree_lines(shape(schedule.explicit))


def test_long_trees_can_be_printed():
    """A tree of a thousand devices in a row has a text, with as many brackets."""
    lines = tree_lines(shape(ring(names(1100))))
    assert lines[0].startswith("  1/1100 cpu:1099(cpu:1098(cpu:1097(")
    assert lines[-1] == "         and 1084 more"


# ---- exporters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", PLANNERS)
def test_exports_are_those_of_all_chunks(algorithm):
    """Exporters, pictures and the permutations of JAX programs give the same for the schedule with all chunks."""
    devices = [f"cuda:{k}" for k in range(36)]
    mesh = Topology.full_mesh(devices, 25, 1e-6)
    schedule = PLANNERS[algorithm](devices)
    assert isinstance(schedule, GeneratedSchedule)
    found = []
    for each in (schedule, schedule.explicit):
        made = collective_of(each)
        texts = [to_chrome_trace(each, mesh, "1M"), trees_of(each, mesh), made.kind, made.root, made.units, made.blocks]
        texts += [rings(each), to_msccl_xml(each)] if algorithm == "ring" else []
        found.append([*texts, compile_permutations(lower(each))])
    assert found[0] == found[1]
