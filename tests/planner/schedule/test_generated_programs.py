"""Programs of generated schedules offer the same views, made from a few chunks, as programs with all chunks.

The schedules come from planners that generate them, from a forest for eight hosts with NVSwitches, and from a random
generator, if ``oracle.right`` finds them right: they copy copies, combine equal values and swap values within a round.
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
from crossreduce.lowering import GeneratedProgram, Program, element_ranges, lower
from crossreduce.planning import direct, halving_doubling, ring
from crossreduce.planning.algorithms.scatter_and_gather import all_gather, reduce_scatter
from crossreduce.schedule import GeneratedSchedule
from crossreduce.schedule.generated_schedule import rotations

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
    """Assert that each view of a generated schedule's program equals that of the program of all chunks and steps."""
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
    """Views of generated programs are those of programs with all chunks, also if another device is the first root."""
    for n in (34, 40):  # planners generate schedules for more than 32 devices
        check(PLANNERS[algorithm](names(n)))
    if algorithm == "halving_doubling":  # an odd number of devices beyond a power of two has no symmetry
        assert not isinstance(halving_doubling(names(33)), GeneratedSchedule)
    else:
        check(PLANNERS[algorithm](names(33), first=17))


def test_views_of_other_schedules():
    """Views are also the same with routes through switches, copies of copies, equal combinations and swapped values."""
    assert len(forest().devices) == 64
    assert forest().base.routes
    for schedule in (forest(), *small()):
        check(schedule)


def test_images_are_made_when_they_are_read():
    """Fused programs, parts of devices and spans need only the chunks of the base. Other chunks are made when read."""
    program = lower(ring(names(1024)))
    assert len(program.base.chunks) == 1
    assert len(program.chunks) == 1024
    assert program.fused(5) == program.fused(5)
    assert all(value >= 0 for value in program.on(7).results)  # each chunk has a result on the device
    program.require_uniform()
    assert program.spans(1 << 20)[-1] == ((1 << 20) - 1024, 1 << 20)
    assert not {"by_round", "transfers", "routes"} & {*vars(program)}
    assert program.chunks[1022:] == (program.chunks[1022], program.chunks[-1])
    with pytest.raises(IndexError, match="out of range"):
        program.chunks[1024]


def test_a_wrong_base_is_not_lowered():
    """``lower`` raises the error of ``verify`` for a wrong base, each time. ``on`` refuses unknown device numbers."""
    chunk = Chunk(Fraction(1), (0, 1), (0, 1))
    base = Schedule("all_reduce", "custom", names(2), (chunk,), ((Step(0, 0, (0, 1)),),))
    wrong = GeneratedSchedule(base, rotations([2], 2), base.devices)
    for _ in range(2):
        with pytest.raises(ScheduleError, match="contribution of device cpu:0 is lost"):
            lower(wrong)
    for program in (lower(ring(names(3))), lower(ring(names(40)))):
        with pytest.raises(AssertionError, match="device 40 of"):
            program.on(40)


@pytest.mark.parametrize(("engine", "algorithm", "n"), pairs(ENGINES, PLANNERS, (34, 36, 64)))
def test_engines_give_the_same_bits(engine, algorithm, n):
    """Each engine returns the same bits as for the schedule with all chunks, also if some chunks have no elements."""
    schedule = PLANNERS[algorithm](names(n))
    rng = np.random.default_rng(n)
    for size, dtype in ((1, "float32"), (n - 3, "float16"), (513, "float32")):
        xs = [rng.standard_normal(size).astype(dtype) for _ in range(n)]
        reduced, due = (run_engine(engine, form, "sum", xs) for form in (schedule, schedule.explicit))
        assert [x.tobytes() for x in reduced] == [x.tobytes() for x in due]
        assert len(reduced) == n


def test_derived_collectives_are_those_of_all_chunks():
    """A reduce-scatter or all-gather that is derived from a generated schedule equals the one derived from all chunks.
    If some devices have no chunk, it is always derived from all chunks."""
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


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_exports_are_those_of_all_chunks(algorithm):
    """Exporters, pictures and the permutations of JAX programs are the same as for the schedule with all chunks."""
    devices = [f"cuda:{k}" for k in range(36)]
    mesh = Topology.full_mesh(devices, 25, 1e-6)
    schedule, exports = PLANNERS[algorithm](devices), []
    for form in (schedule, schedule.explicit):
        made = collective_of(form)
        values = [to_chrome_trace(form, mesh, "1M"), trees_of(form, mesh)]
        values += [made.kind, made.root, made.units, made.blocks, compile_permutations(lower(form))]
        exports.append(values + ([rings(form), to_msccl_xml(form)] if algorithm == "ring" else []))
    assert isinstance(schedule, GeneratedSchedule)
    assert exports[0] == exports[1]
