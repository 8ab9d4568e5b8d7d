"""``simulate``: closed forms, an exact oracle of every tick, the bytes that a run moves, and ``pipelined``'s pieces."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from budget import examples
from clock_oracle import clocks
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALGORITHMS, algorithms, names, plan, requests

from crossreduce import ArgumentError, Chunk, Link, PlanError, Route, Schedule, Step, Topology, simulate
from crossreduce.planning import PLANNERS, ring
from crossreduce.schedule import Costs, fastest_of, fluid_rate, pipelined
from crossreduce.schedule.lock_step import Loads, LockStep
from crossreduce.schedule.simulate import LEAST_PIECE
from crossreduce.schedule.traffic import traffic
from crossreduce.topology import byte_count

GB = 10**9
ONE = Fraction(1)
MICRO = Fraction(1, 10**6)


def near(wanted, rel=1e-9):
    return pytest.approx(float(wanted), rel=rel, abs=0)


@st.composite
def wired(draw, devices, most_switches=2):
    """Draw a connected topology of these devices and some switches."""
    switches = [f"bus{k}" for k in range(draw(st.integers(0, most_switches)))]
    nodes = [*devices, *switches]
    pairs = set()
    for k in range(1, len(nodes)):  # a tree, in both directions
        other = draw(st.integers(0, k - 1))
        pairs |= {(nodes[k], nodes[other]), (nodes[other], nodes[k])}
    if len(nodes) > 1:
        pairs |= set(draw(st.lists(st.permutations(nodes).map(lambda order: tuple(order[:2])), max_size=8)))
    speeds = st.sampled_from([1, 2, Fraction(5, 2), 25, Fraction(64, 3), 450])
    latencies = st.sampled_from([Fraction(0), MICRO, Fraction(7, 10**7), Fraction(1, 3)])
    return Topology(devices, [Link(a, b, draw(speeds), draw(latencies)) for a, b in sorted(pairs)], switches)


def line(n, gb_per_s, latency_s):
    """Return a topology of n devices in a line, each with a link to the next one."""
    devices = names(n)
    return Topology(devices, [Link(a, b, gb_per_s, latency_s) for a, b in pairwise(devices)])


def chain(n, pieces=1):
    """Return the schedule of a broadcast in which each device sends the buffer to the next one."""
    rounds = tuple((Step(0, k + 1, (k,)),) for k in range(n - 1))
    return Schedule("broadcast", "chain", names(n), (Chunk(ONE, (0,), tuple(range(n))),), rounds, pieces)


@pytest.mark.parametrize(("latency", "speed", "share"), [(0, 25, 1000), (MICRO, 450, 1), (Fraction(1, 3), 1, 10**6)])
def test_a_ring_takes_its_closed_form(latency, speed, share):
    """An all-reduce of M bytes on a ring of n devices takes 2 (n-1) (a + M / n / b), where a is the latency and b the
    bandwidth of a link. Each used link carries 2 (n-1) M / n bytes. (``share`` is M / n, and ``speed`` is in GB/s.)"""
    for n in (2, 5):
        topology = Topology.ring(n, speed, latency)
        done = simulate(ring(topology.devices), topology, n * share)
        assert done.seconds == near(2 * (n - 1) * (latency + Fraction(share, speed * GB)))
        assert done.bytes == {(f"cpu:{k}", f"cpu:{(k + 1) % n}"): 2 * (n - 1) * share for k in range(n)}
        assert done.busy == {pair: near(Fraction(2 * (n - 1) * share, speed * GB)) for pair in done.bytes}
        assert len(done.ticks) == 2 * (n - 1)


def test_what_waits_for_what():
    """A transfer waits for its operand, for earlier transfers on its links, and for messages of its network card."""
    relay = Topology(names(3), [Link("cpu:0", "cpu:1", 1), Link("cpu:1", "cpu:2", 4)])
    assert simulate(chain(3), relay, GB).seconds == near(1 + Fraction(1, 4))  # 1 GB at 1 GB/s, and then at 4 GB/s
    bus = Topology(names(2), [Link("cpu:0", "bus", 1), Link("bus", "cpu:1", 1)], ["bus"])
    halves = (Chunk(Fraction(1, 2), (0,), (0, 1)),) * 2
    turns = Schedule("broadcast", "turns", names(2), halves, ((Step(0, 1, (0,)),), (Step(1, 1, (0,)),)))
    assert simulate(turns, bus, GB).seconds == near(1)  # the second half waits until the first one has left the link
    hosts = ("a/cpu:0", "b/cpu:0")
    between, costs = replace(chain(2), devices=hosts), Costs(messages_per_s=1000)
    done = simulate(between, Topology(hosts, [Link(*hosts, 1)]), 1000, costs=costs)
    assert done.seconds == near(Fraction(1, 1000))  # the time of one message; the bytes take only 1 us


@examples(120)
@given(st.data(), algorithms, requests(st.integers(1, 6), most_packs=3), st.integers(1, 9) | st.just(70))
def test_any_schedule_agrees_with_an_exact_oracle(data, algorithm, ask, pieces):
    """Bytes, seconds, ticks and busy times are those of the oracle. The lock-step clock predicts no shorter time."""
    topology = data.draw(wired(ask.devices))
    schedule = replace(plan(algorithm, ask), pieces=pieces)
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    nbytes = itemsize * data.draw(st.integers(0, 10) | st.integers(0, 10**9))
    due = clocks(schedule, topology, nbytes, itemsize)
    done = simulate(schedule, topology, nbytes, itemsize)
    assert {pair: moved for pair, moved in done.bytes.items() if moved} == +due.carried  # + drops counts of 0
    due_busy = {pair: near(seconds) for pair, seconds in due.busy.items() if seconds}
    assert {pair: seconds for pair, seconds in done.busy.items() if seconds} == due_busy
    assert done.bytes.keys() == done.busy.keys()
    assert done.seconds == pytest.approx(float(due.seconds), rel=1e-9)
    assert due.seconds <= sum(due.ticks)
    tick_ends = list(accumulate(done.ticks))
    assert tick_ends == [pytest.approx(float(end), rel=1e-9, abs=done.seconds * 1e-9) for end in due.ends]
    if nbytes and schedule.rounds:
        lock_step = LockStep(Loads(traffic(schedule, topology), {}), nbytes)
        assert lock_step.total(pieces) == pytest.approx(float(sum(due.ticks)), rel=1e-9)


@examples(100)
@given(st.data(), algorithms, requests(st.integers(2, 6), most_packs=3), st.integers(1, 9) | st.just(40))
def test_further_costs_agree_with_the_oracle(data, algorithm, ask, pieces):
    """Reductions, messages and shared limits take the time that they take in the oracle, and make nothing faster."""
    base = data.draw(wired(ask.devices))
    topology = base.renamed([f"{data.draw(st.sampled_from('ab'))}/cpu:{k}" for k in range(len(base.devices))])
    new_name = dict(zip(base.devices, topology.devices, strict=True))
    bare = plan(algorithm, ask)
    schedule = replace(bare, devices=tuple(new_name[device] for device in bare.devices), pieces=pieces)
    nbytes = data.draw(st.integers(1, 10**9))
    links = st.lists(st.sampled_from([link[:2] for link in topology.links]), min_size=1, unique=True)
    shared = data.draw(st.lists(st.tuples(st.sampled_from([1, 30]), links)))  # (GB/s, links)
    reduction, messages = data.draw(st.sampled_from([None, 2, 900])), data.draw(st.sampled_from([None, 1e3, 2e6]))
    due = clocks(schedule, topology, nbytes, reduction=reduction, messages=messages, shared=shared)
    costs = Costs(reduction_gb_per_s=reduction, messages_per_s=messages, shared=shared)
    done = simulate(schedule, topology, nbytes, costs=costs)
    assert done.seconds == pytest.approx(float(due.seconds), rel=1e-9)
    assert done.seconds * (1 + 1e-12) >= simulate(schedule, topology, nbytes).seconds
    assert due.seconds <= sum(due.ticks)
    busy_fractions = [fraction for _, fraction in done.limits]
    assert max(busy_fractions, default=0) <= 1 + 1e-9
    assert busy_fractions == sorted(busy_fractions, reverse=True)
    for (src, dst), seconds in done.busy.items():
        assert dict(done.limits)[f"the link {src} -> {dst}"] == near(seconds / done.seconds if done.seconds else 0)


@examples(60)
@given(st.data(), algorithms, requests(st.integers(2, 6), most_packs=3))
def test_routes_through_named_switches(data, algorithm, ask):
    """A transfer uses the schedule's route for its round, or else for all rounds, or else the topology's route."""
    base = data.draw(wired(ask.devices, most_switches=0))
    star = [Link(*ends, 3, MICRO) for device in ask.devices for ends in ((device, "hub"), ("hub", device))]
    topology = Topology(ask.devices, [*base.links, *star], ["hub"])
    bare = plan(algorithm, ask)
    moves = {
        (c, src, dst, r) for r, steps in enumerate(bare.rounds) for c, dst, srcs in steps for src in srcs if src != dst
    }
    moves |= {(*move[:3], None) for move in moves}  # None stands for all rounds
    chosen = data.draw(st.lists(st.sampled_from(sorted(moves, key=str)), unique=True)) if moves else []
    schedule = replace(bare, routes=tuple(Route(*move[:3], ("hub",), move[3]) for move in chosen), pieces=2)
    due, done = clocks(schedule, topology, 5000), simulate(schedule, topology, 5000)
    assert done.bytes == due.carried
    assert done.seconds == pytest.approx(float(due.seconds), rel=1e-9)


@examples(100)
@given(st.data(), requests(st.integers(2, 5), most_packs=3), st.integers(1, 10**8), st.sampled_from([0, 2e-6]))
def test_the_fastest_schedule_is_found_without_running_all(data, ask, nbytes, operation_s):
    """``fastest_of`` finds the least time of all schedules, although lower bounds exclude some without a simulation."""
    topology = data.draw(wired(ask.devices))
    costs = Costs(operation_s=operation_s)
    schedules = [plan(algorithm, ask) for algorithm in data.draw(st.permutations(ALGORITHMS))]
    times = [pipelined(schedule, topology, nbytes, costs=costs).seconds for schedule in schedules]
    assert fastest_of(schedules, topology, nbytes, costs=costs).seconds == near(min(times), rel=1e-12)


@examples(60)
@given(st.data(), algorithms, requests(st.integers(1, 6), most_packs=3))
def test_the_fluid_rate_is_the_limit_of_many_pieces(data, algorithm, ask):
    """Without latencies, R rounds in p pieces take at most 1 + (R - 1) / p times as long as at the fluid rate."""
    drawn, pieces = data.draw(wired(ask.devices)), 1000
    topology = Topology(drawn.devices, [link._replace(latency_s=0) for link in drawn.links], drawn.switches)
    schedule = replace(plan(algorithm, ask), pieces=pieces)
    rate, nbytes = fluid_rate(schedule, topology), 840 * len(schedule.chunks)  # chunks are whole numbers of bytes
    done = simulate(schedule, topology, nbytes)
    if not done.bytes:
        assert rate is None
        return
    assert type(rate) is Fraction
    assert Fraction(nbytes) / rate == max(moved / topology.link(*pair).bandwidth for pair, moved in done.bytes.items())
    reached = nbytes / done.seconds / GB
    assert reached <= float(rate) * (1 + 1e-12)
    assert reached * (1 + (len(schedule.rounds) - 1) / pieces) * (1 + 1e-12) >= float(rate)


def test_what_takes_no_time():
    """A schedule takes no time if it has no rounds, if its steps stay on one device, or for a buffer of 0 bytes."""
    for rounds in ((), ((Step(0, 0, (0,)),),)):
        schedule = Schedule("broadcast", "idle", names(1), (Chunk(ONE, (0,), (0,)),), rounds, 5)
        done = simulate(schedule, Topology.ring(4), 10**6)
        assert (done.seconds, done.busy, done.bytes) == (0.0, {}, {})
        assert fluid_rate(schedule, Topology.ring(4)) is None
        assert pipelined(schedule, Topology.ring(4), 10**6) == (replace(schedule, pieces=1), 0.0)
    topology = Topology.full_mesh(4, 25, MICRO)
    for algorithm in ALGORITHMS:
        schedule = PLANNERS[algorithm](names(4))
        done = simulate(schedule, topology, 0)
        assert (done.seconds, done.ticks, set(done.busy.values())) == (0, (), {0.0})
        assert done.bytes == dict.fromkeys(simulate(schedule, topology, 10**6).bytes, 0)


PAIR = chain(2)


def test_bytes_are_a_whole_number():
    """A number of bytes must be an integer that is not negative, or text such as "64M", in which K, M and G are powers
    of 1024. An item size must be an integer above 0 that divides the bytes. The errors show wrong values."""
    texts = ("", "M", "-1", "1T", "8x", "1e6", "2147483648G")
    for nbytes in (-1, True, False, 1.0, 1e6, None, [8], math.nan, Fraction(8), *texts):
        for use in (simulate, pipelined):
            with pytest.raises(ArgumentError, match=r"nbytes must be an integer[\s\S]*given: nbytes="):
                use(PAIR, Topology.ring(2), nbytes)
    for itemsize in (0, -4, 3, 16, True, 4.0, None):
        is_possible = type(itemsize) is int and itemsize > 0
        fault = "nbytes must be a multiple of" if is_possible else "itemsize must be an integer from 1 to"
        with pytest.raises(ArgumentError, match=rf"{fault}[\s\S]*given: .*itemsize="):
            simulate(PAIR, Topology.ring(2), 8, itemsize)
    for text, nbytes in (("8", 8), (" 1.5k", 1536), ("64M", 1 << 26), ("1GiB", 1 << 30), ("2 KB", 2048)):
        assert byte_count(text) == nbytes == byte_count(nbytes)
        assert simulate(PAIR, Topology.ring(2), text) == simulate(PAIR, Topology.ring(2), nbytes)


def test_a_schedule_and_a_topology():
    """``simulate`` raises an ArgumentError if its arguments are not a schedule and something that names a topology."""
    for wrong in (None, "ring", 3, ring, []):
        with pytest.raises(ArgumentError, match=r"simulate needs a Schedule\."):
            simulate(wrong, Topology.ring(2), 8)
        with pytest.raises(ArgumentError, match=r"this is not a topology|there is no machine of this name"):
            simulate(PAIR, wrong, 8)


def test_a_missing_route_is_named():
    """A transfer without a route raises a PlanError that names its devices, and an unknown or unlinked node of the
    schedule's route or the links out of its source."""
    alone = Topology(names(3), [Link("cpu:0", "cpu:2", 1), Link("cpu:1", "cpu:0", 1)])
    with pytest.raises(PlanError, match=r"no route from cpu:0 to cpu:1\.[\s\S]*links out of cpu:0: cpu:2"):
        simulate(PAIR, alone, 8)
    for use in (simulate, pipelined, lambda *case: fluid_rate(*case[:2])):
        with pytest.raises(PlanError, match=r"no route from cpu:0 to cpu:1\.[\s\S]*links out of cpu:0: none"):
            use(PAIR, Topology(names(2), []), 8)
    star = Topology(names(2), [Link("cpu:0", "bus", 1), Link("cpu:0", "cpu:1", 1)], ["bus", "lost"])
    for topology, node in ((star, "bus"), (star, "lost"), (Topology.ring(2), "cpu:7"), (Topology.ring(2), "bus")):
        text = f"no route from cpu:0 to cpu:1{' through' if topology is star else ': it has no node'} {node}"
        with pytest.raises(PlanError, match=text):
            simulate(replace(PAIR, routes=(Route(0, 0, 1, (node,)),)), topology, 8)


@examples(40)
@given(st.integers(2, 40), st.sampled_from([0, 1e-7, 1e-6, 1e-5]), st.sampled_from([1, 25, 450]), st.integers(0, 10**8))
def test_a_chain_is_cut_into_the_best_number_of_pieces(n, latency, speed, nbytes):
    """On a chain, no number of pieces up to 64, each of at least LEAST_PIECE bytes, is faster than the chosen one."""
    topology = line(n, speed, Fraction(latency))
    best, seconds = pipelined(chain(n), topology, nbytes)
    assert replace(best, pieces=1) == chain(n)
    assert seconds == simulate(best, topology, nbytes).seconds
    most = min(64, max(1, nbytes // LEAST_PIECE))
    assert seconds <= min(simulate(chain(n, p), topology, nbytes).seconds for p in range(1, most + 1)) * (1 + 1e-9)


@given(algorithms, st.integers(1, 6), st.integers(0, 10**6), st.integers(1, 4))
def test_no_piece_is_too_small(algorithm, n, nbytes, packs):
    """Pieces of an average chunk have at least LEAST_PIECE bytes. The pieces of the argument have no effect."""
    schedule = PLANNERS[algorithm](names(n), packs=packs)
    best, seconds = pipelined(replace(schedule, pieces=77), Topology.full_mesh(n), nbytes)
    assert (best, seconds) == pipelined(schedule, Topology.full_mesh(n), nbytes)
    assert best.pieces == 1 or nbytes / len(schedule.chunks) / best.pieces >= LEAST_PIECE
