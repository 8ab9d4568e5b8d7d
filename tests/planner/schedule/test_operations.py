"""The cost of queueing operations: their number, the times with it, and the pieces that plans then have."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
from budget import examples
from clock_oracle import clocks
from hypothesis import given
from hypothesis import strategies as st
from strategies import algorithms, names, requests
from test_simulate import plan, wired

import crossreduce as cr
from crossreduce import Topology, simulate
from crossreduce.devices import parse
from crossreduce.lowering import lower
from crossreduce.schedule import pipelined
from crossreduce.schedule.costs import OPERATION_S
from crossreduce.schedule.simulate import LONGER

NBYTES = 256 << 20
# Plans of 256 MiB: machine, algorithm, collective, pieces, operations, GB/s with and without the cost of operations.
PLANS = """
    dgx-1v    forest  all_reduce      41 1333  79.62  79.72
    dgx-1v    forest  all_gather      44  373 161.24 161.24
    dgx-1v    auto    reduce          58  760 139.46 139.46
    dgx-1v    auto    reduce_scatter   1   56 170.89 170.89
    dgx-2     auto    broadcast       66  990 120.64 120.64
    hgx-h100  auto    all_reduce       1   16 256.22 256.22
    hgx-h100  auto    reduce          14   98 402.32 402.32"""


def launches(schedule):
    """Return for each tick the operations of each device: one for each number of operands of its instructions."""
    ticks = [defaultdict(set) for _ in range(schedule.round_count + schedule.pieces - 1 if schedule.rounds else 0)]
    for r, numbered in enumerate(lower(schedule).by_round):
        for piece in range(schedule.pieces):
            for _, _, instruction in numbered:
                ticks[r + piece][schedule.devices[instruction.device]].add(len(instruction.operands))
    return [{device: len(kinds) for device, kinds in tick.items()} for tick in ticks]


def test_plans_of_cuda_devices():
    """Plans of CUDA devices have these pieces, operations and rates. ``operation_s=0`` makes operations free."""
    for machine, algorithm, collective, *row in map(str.split, PLANS.split("\n")[1:]):
        made = cr.plan(machine, collective, NBYTES, algorithm)
        free = cr.plan(machine, collective, NBYTES, algorithm, operation_s=0)
        done = simulate(made.schedule, machine, NBYTES)
        without_cost = simulate(made.schedule, machine, NBYTES, operation_s=0)
        assert done.seconds == made.seconds
        assert (done.bytes, done.operations) == (without_cost.bytes, without_cost.operations)
        rates = f"{made.algbw:.2f} {NBYTES / without_cost.seconds / 1e9:.2f}"
        assert f"{made.schedule.pieces} {done.operations} {rates}".split() == row, (machine, collective)
        assert done.operations == sum(sum(tick.values()) for tick in launches(made.schedule))
        assert free.seconds == simulate(free.schedule, machine, NBYTES, operation_s=0).seconds
        assert simulate(free.schedule, machine, NBYTES).seconds * LONGER >= made.seconds


@examples(60)
@given(st.data(), algorithms, requests(st.integers(1, 6), most_packs=3), st.integers(1, 9))
def test_any_schedule_agrees_with_the_oracle(data, algorithm, ask, pieces):
    """Hosts queue operations without a pause, and transfers wait for them. By default, only CUDA devices take time."""
    places = [data.draw(st.sampled_from([f"cuda:{k}", f"a/cuda:{k}", f"b/cuda:{k}", f"cpu:{k}"])) for k in range(6)]
    new_name = dict(zip(names(6), places, strict=True))
    base = data.draw(wired(ask.devices))
    topology = base.renamed([new_name[device] for device in base.devices])
    schedule = plan(algorithm, ask)
    schedule = replace(schedule, devices=tuple(new_name[device] for device in schedule.devices), pieces=pieces)
    nbytes = data.draw(st.integers(1, 10**9))
    for given_s in (None, 0, 1e-3):

        def cost(device, given_s=given_s):
            return Fraction(OPERATION_S * (parse(device).kind == "cuda") if given_s is None else given_s)

        def queue_of(step, cost=cost):
            device = schedule.devices[step.dst]
            return parse(device).host if step.srcs != (step.dst,) and cost(device) else None

        by_tick = []
        for made in launches(schedule):
            by_tick.append(Counter())
            for device, count in made.items():
                by_tick[-1][parse(device).host] += count * cost(device)
        due = clocks(schedule, topology, nbytes, queues=(by_tick, queue_of))
        done = simulate(schedule, topology, nbytes, operation_s=given_s)
        assert done.seconds == pytest.approx(float(due.seconds), rel=1e-9)
        assert due.seconds <= sum(due.ticks)
        assert math.fsum(done.ticks) == pytest.approx(done.seconds, rel=1e-9)
        assert done.operations == sum(sum(tick.values()) for tick in launches(schedule))


def test_the_pieces_suit_the_cost():
    """No other number of pieces is much faster than the chosen one. Plans have fewer operations if these cost more.
    Operations of CPUs cost nothing."""
    topology, most_operations = Topology.machine("dgx-1v"), 10**9
    schedule = cr.plan(topology, nbytes=NBYTES, algorithm="forest", operation_s=0).schedule
    for cost in (1e-7, 2e-6, 1e-4):
        best, seconds = pipelined(schedule, topology, NBYTES, cost)
        done = simulate(best, topology, NBYTES, operation_s=cost)
        assert done.seconds == seconds
        around = [max(1, round(best.pieces * factor)) for factor in (0.5, 0.8, 0.9, 1.1, 1.25, 2)]
        tried = [simulate(schedule.cut_into(p), topology, NBYTES, operation_s=cost).seconds for p in (1, 9, *around)]
        assert seconds <= min(tried) * (LONGER + 1e-3)
        assert done.operations <= most_operations
        most_operations = done.operations
    cpus = Topology.machine("dgx-1v").renamed(names(8))
    plan_of_cpus = cr.plan(cpus, nbytes=NBYTES, algorithm="forest")
    assert plan_of_cpus.schedule.pieces == 115
    assert plan_of_cpus.seconds == cr.plan(cpus, nbytes=NBYTES, algorithm="forest", operation_s=0).seconds
