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
from budget import SHARE
from pairs import pairs
from random_schedules import random_schedule
from running import ENGINES, run_engine
from strategies import names

import crossreduce as cr
from crossreduce import Chunk, Schedule, ScheduleError, Step, Topology
from crossreduce.engines.jax.permutations import compile_permutations
from crossreduce.export.formats.collective import collective as collective_of
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.export.formats.nccl_graph import rings
from crossreduce.export.formats.trace import to_chrome_trace
from crossreduce.export.pictures.grouping import trees_of
from crossreduce.frameworks.null import NullFramework
from crossreduce.lowering import GeneratedProgram, Program, element_ranges, lower, part_of
from crossreduce.planning import direct, halving_doubling, ring
from crossreduce.planning.explain import shape, tree_lines
from crossreduce.planning.scatter_and_gather import all_gather, reduce_scatter
from crossreduce.schedule import GeneratedSchedule
from crossreduce.schedule.generated_schedule import rotations
from crossreduce.topology.symmetry import Symmetry

PLANNERS = {"ring": ring, "direct": direct, "halving_doubling": halving_doubling}


@functools.cache
def forest():
    """Return the schedule of a forest for 64 GPUs in 8 hosts, which is generated."""
    return cr.plan(Topology.machine("hgx-h100", hosts=8), algorithm="forest").schedule


def chance(seed):
    """Return a random generated schedule, which may be wrong."""
    rng = random.Random(seed)
    base = random_schedule(rng)
    n = len(base.devices)
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
    right = [schedule for schedule in map(chance, range(round(1_500 * max(SHARE, 0.3)))) if oracle.right(schedule.base)]
    assert len(right) > 90
    kinds = itertools.product(["all_reduce", "reduce_scatter", "all_gather"], [False, True])
    assert {(schedule.collective, schedule.in_order) for schedule in right} == {*kinds}
    return [*right, *twins(False), *twins(True)]


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


@pytest.mark.parametrize("algorithm", PLANNERS)
def test_views_of_planned_schedules(algorithm):
    """Views of generated programs are those of all chunks, also if the first chunk starts elsewhere."""
    for n in (34, 40):
        check(PLANNERS[algorithm](names(n)))
    if algorithm == "halving_doubling":  # no exchange of blocks moves an odd number of extras
        assert not isinstance(halving_doubling(names(33)), GeneratedSchedule)
    else:
        check(PLANNERS[algorithm](names(33), first=17))


def test_views_of_other_schedules():
    """So they are with routes through switches, copies of copies, equal combinations, and swaps."""
    assert len(forest().devices) == 64
    assert forest().base.routes
    for schedule in (forest(), *small()):
        check(schedule)


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


def test_a_wrong_base_is_not_lowered():
    """``lower`` raises the error of ``verify`` for a wrong base, each time; unknown devices are refused."""
    chunk = Chunk(Fraction(1), (0, 1), (0, 1))
    base = Schedule("all_reduce", "custom", names(2), (chunk,), ((Step(0, 0, (0, 1)),),))
    wrong = GeneratedSchedule(base, rotations([2], 2), base.devices)
    for _ in range(2):
        with pytest.raises(ScheduleError, match="contribution of device cpu:0 is lost"):
            lower(wrong)
    for program in (lower(ring(names(3))), lower(ring(names(40)))):
        with pytest.raises(AssertionError, match="device 40 of"):
            program.on(40)


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


@pytest.mark.parametrize(("engine", "algorithm", "n"), pairs(ENGINES, PLANNERS, (34, 36, 64)))
def test_engines_give_the_same_bits(engine, algorithm, n):
    """Each engine gives the bits of the program with all chunks, for sizes with and without elements in each chunk."""
    schedule = PLANNERS[algorithm](names(n))
    rng = np.random.default_rng(n)
    for size, dtype in ((1, "float32"), (n - 3, "float16"), (513, "float32")):
        xs = [rng.standard_normal(size).astype(dtype) for _ in range(n)]
        reduced, due = (run_engine(engine, each, "sum", xs) for each in (schedule, schedule.explicit))
        assert [x.tobytes() for x in reduced] == [x.tobytes() for x in due]
        assert len(reduced) == n


@pytest.mark.parametrize("algorithm", PLANNERS)
def test_the_null_engine_counts_the_same(algorithm):
    """The counts of transfers and combinations are those of the program with all chunks."""
    schedule, counts = PLANNERS[algorithm](names(40)), []
    for each in (schedule, schedule.explicit):
        null = NullFramework()
        run_engine("null", each, "sum", [null.zeros((999,), "float32", device) for device in each.devices], null)
        counts.append(null.counts)
    assert counts[0] == counts[1]
    assert counts[0].copies > 0


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


def test_derived_collectives_are_those_of_all_chunks():
    """Reduce-scatters and all-gathers of a base are those of all chunks, from which uneven ones come."""
    for schedule in (ring(names(40), first=1), direct(names(33)), halving_doubling(names(64))):
        scattered, due = reduce_scatter(schedule), reduce_scatter(schedule.explicit)
        assert isinstance(scattered, GeneratedSchedule)
        for derived, right in ((scattered, due), (all_gather(scattered), all_gather(due))):
            assert (derived.head, derived.chunks) == (right.head, right.chunks)
            assert [sorted(steps) for steps in derived.rounds] == [sorted(steps) for steps in right.rounds]
            cr.verify(derived.explicit)
            check(derived)
    uneven = halving_doubling(names(40))  # 32 chunks, which belong to the first 32 devices
    assert isinstance(uneven, GeneratedSchedule)
    assert reduce_scatter(uneven) == reduce_scatter(uneven.explicit)
    for collective in ("reduce_scatter", "all_gather"):
        schedule = cr.plan(Topology.full_mesh(names(40)), collective, "1M", algorithm="direct").schedule
        assert schedule.head.startswith(f"{collective} direct: 40 devices, 40 chunks, 1 round, ")


def test_trees_of_generated_schedules():
    """``Plan.explain`` describes the trees of all chunks; a tree of a thousand devices has a text."""
    for schedule in [*(planner(names(40)) for planner in PLANNERS.values()), forest()]:
        assert shape(schedule) == shape(schedule.explicit)
        assert tree_lines(shape(schedule)) == tree_lines(shape(schedule.explicit))
    lines = tree_lines(shape(ring(names(1100))))
    assert lines[0].startswith("  1/1100 cpu:1099(cpu:1098(cpu:1097(")
    assert lines[-1] == "         and 1084 more"


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_exports_are_those_of_all_chunks(algorithm):
    """Exporters, pictures and the permutations of JAX programs give the same for the schedule with all chunks."""
    devices = [f"cuda:{k}" for k in range(36)]
    mesh = Topology.full_mesh(devices, 25, 1e-6)
    schedule, exports = PLANNERS[algorithm](devices), []
    for each in (schedule, schedule.explicit):
        made = collective_of(each)
        texts = [to_chrome_trace(each, mesh, "1M"), trees_of(each, mesh), made.kind, made.root, made.units, made.blocks]
        texts += [rings(each), to_msccl_xml(each)] if algorithm == "ring" else []
        exports.append([*texts, compile_permutations(lower(each))])
    assert isinstance(schedule, GeneratedSchedule)
    assert exports[0] == exports[1]
