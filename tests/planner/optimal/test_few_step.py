"""Forests of few steps: the cheapest trees, the linear program, its schedules, and published results."""

import itertools
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from published_plans import ALPHA, BRICK, SCCL
from scipy.optimize import linprog

import crossreduce as cr
from crossreduce import Link, Topology
from crossreduce.planning import COLLECTIVES, Request, schedules
from crossreduce.planning.optimal.few_step import few_step_forests, shallow_trees, tree_program
from crossreduce.planning.optimal.few_step.shallow_trees import cheapest_trees
from crossreduce.planning.optimal.few_step.switch_routes import MOST_ROUTES, hops
from crossreduce.planning.optimal.few_step.tree_program import GAP, expected_time, share_among_trees
from crossreduce.planning.topologies import neutral_topology
from crossreduce.schedule import Pieces, fluid_rate, simulate

MICRO = Fraction(1, 10**6)
LOSS = 1 + tree_program._LOSS + 1e-6


def timed_trees(pairs, n, root, steps):
    """Yield all trees out of a root whose hops have steps: for each other device its step and sender."""
    others = [v for v in range(n) if v != root]
    choices = [[(step, u) for step in range(steps) for u in range(n) if (u, v) in pairs] for v in others]
    for chosen in itertools.product(*choices):
        tree = dict(zip(others, chosen, strict=True))
        if all(u == root or tree[u][0] < step for step, u in tree.values()):
            yield tree


@st.composite
def meshes(draw, most=4):
    """Draw a topology of a few devices, linked so that every device reaches every other."""
    n = draw(st.integers(2, most))
    speeds = st.sampled_from([1, 2, 5, 50])
    pairs = {(k, (k + 1) % n) for k in range(n)} | {((k + 1) % n, k) for k in range(n)}
    pairs |= set(draw(st.lists(st.permutations(range(n)).map(lambda order: tuple(order[:2])), max_size=4)))
    pairs = {pair for pair in pairs if pair[0] != pair[1]}
    return Topology(
        [f"cpu:{k}" for k in range(n)], [Link(f"cpu:{a}", f"cpu:{b}", draw(speeds), MICRO) for a, b in sorted(pairs)]
    )


@examples(60)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 10**6))
def test_the_cheapest_trees(n, steps, seed):
    """No tree is cheaper than the one that is found, which is valid; greedy trees are valid, too."""
    rng = np.random.default_rng(seed)
    costs = []
    for _ in range(steps):
        cost = rng.integers(1, 100, (n, n)).astype(float)
        cost[rng.random((n, n)) < 0.3] = math.inf
        np.fill_diagonal(cost, math.inf)
        costs.append(cost)
    every = {(u, v) for u in range(n) for v in range(n) if u != v}
    exact, greedy = cheapest_trees(costs), shallow_trees._Grown(costs)
    for root in range(n):
        for start in range(steps + 1):
            least = math.inf
            for tree in timed_trees(every, n, root, steps - start):
                least = min(least, sum(costs[start + step][u, v] for v, (step, u) in tree.items()))
            if n == 1:
                least = 0.0
            assert exact.price(root, start) == least
            for found in (exact, greedy):
                if found.price(root, start) < math.inf:
                    reached = {root: start}
                    for step, u, v in found.edges(root, start):
                        assert reached[u] <= step < steps
                        assert v not in reached
                        reached[v] = step + 1
                    assert len(reached) == n
                    assert sum(costs[s][u, v] for s, u, v in found.edges(root, start)) == found.price(root, start)
            assert greedy.price(root, start) >= least


@examples(40)
@given(meshes(), st.integers(1, 3), st.sampled_from(["root", "all", "free"]), st.booleans())
def test_the_program_over_all_trees(topology, steps, kind, many):
    """The time is at most the stated gap and loss above the optimum over all trees, and the limit is below it."""
    n = len(topology.devices)
    pairs = {(int(link.src[4:]), int(link.dst[4:])): float(link.bandwidth) for link in topology.links}
    roots = [0] if kind == "root" else range(n)
    columns = [(root, tree) for root in roots for tree in timed_trees(pairs, n, root, steps)]
    given = {"root": 0, "all": -1, "free": None}[kind]
    found = share_among_trees(neutral_topology(topology, topology.devices).topology, given, steps, many=many)
    rooted = {root for root, _ in columns}
    if not columns or (kind == "all" and len(rooted) < n):
        assert found is None
        return
    rows = 1 if many else steps
    listed = sorted(pairs)
    loads = np.zeros((rows * len(listed), len(columns) + rows))
    for k, (_, tree) in enumerate(columns):
        for v, (step, u) in tree.items():
            loads[(0 if many else step) * len(listed) + listed.index((u, v)), k] += 1
    for row in range(rows):
        for k, pair in enumerate(listed):
            loads[row * len(listed) + k, len(columns) + row] = -pairs[pair]
    groups = [[root] for root in roots] if kind == "all" else [list(roots)]
    sums = np.array([[root in group for root, _ in columns] + [0] * rows for group in groups], dtype=float)
    solved = linprog(
        [0] * len(columns) + [1] * rows, A_ub=loads, b_ub=np.zeros(len(loads)), A_eq=sums,
        b_eq=np.full(len(groups), 1 / len(groups)),
    )  # fmt: skip
    assert found is not None
    assert found.limit <= solved.fun * (1 + 1e-6)
    assert solved.fun * (1 - 1e-6) <= found.time <= solved.fun * (1 + GAP) * LOSS


def test_hops_pass_only_switches():
    """A hop is a shortest route through switches; there are at most MOST_ROUTES of them between two devices."""
    names = [f"cpu:{k}" for k in range(3)]
    switches = [f"s{k}" for k in range(MOST_ROUTES + 2)]
    links = [("cpu:0", s, 1) for s in switches] + [(s, "cpu:1", 1) for s in switches] + [("cpu:1", "cpu:2", 1)]
    found = hops(Topology(names, links, switches))
    assert found.pairs == [(0, 1), (1, 2)]
    assert len(found.routes) == MOST_ROUTES + 1
    prices = np.arange(2.0 * found.links).reshape(2, -1)
    prices[1] = prices[1, ::-1]
    costs, best = found.costs(prices)
    for row in range(2):
        cheapest_route = min(sum(prices[row, k] for k in route) for route in found.routes[:-1])
        assert costs[row, 0, 1] == cheapest_route
        assert sum(prices[row, k] for k in found.routes[best[row, 0]]) == cheapest_route
        assert costs[row, 0, 2] == math.inf


@pytest.mark.parametrize(
    ("hosts", "nbytes", "searched"),
    [(8, 1 << 20, {(True, 2), (False, 2)}), (8, 1 << 26, {(False, 2), (False, 4)}), (3, 1 << 10, set())],
)
def test_forests_that_cannot_be_faster_are_not_searched_for(monkeypatch, hosts, nbytes, searched):
    """No linear program is solved for a number of steps, or a kind of forest, that a found forest excludes."""
    found = set()
    real = few_step_forests._expected_time

    def expected_of(request, task, steps, many):
        found.add((many, steps))
        return real(request, task, steps, many)

    monkeypatch.setattr(few_step_forests, "_expected_time", expected_of)
    topology = Topology.full_mesh([f"host{k}/cpu:0" for k in range(hosts)], gb_per_s=1, latency_s=1e-4)
    lost = topology.without_link("host0/cpu:0", "host1/cpu:0")
    schedules.fastest_schedule.cache_clear()
    schedules.fastest_schedule(Request("all_reduce", lost.devices, lost.devices, "auto", lost, nbytes))
    assert found == searched


DGX = Topology.machine("dgx-1v")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_plans_are_as_fast_as_those_of_sccl(collective):
    """From 1 KiB to 1 GiB, plans of a DGX-1V take at most 1.02 times as long as the best of SCCL's published ones."""
    for power in range(10, 31):
        nbytes = 1 << power
        part = nbytes / 8 if collective in ("all_gather", "reduce_scatter") else nbytes
        published = min(s * ALPHA + r / c * part / BRICK for c, s, r in SCCL[collective])
        found = cr.plan(DGX, collective, nbytes, operation_s=0)
        assert found.seconds <= 1.02 * published, (nbytes, found.seconds / published)


@examples(25)
@given(meshes(5), st.sampled_from(COLLECTIVES), st.integers(10, 24), st.integers(0, 4))
def test_forests_of_few_steps_are_valid(topology, collective, power, root):
    """A forest of few steps is right, uses only links, has the promised time, and is never slower."""
    devices = topology.devices
    rooted = (devices[root % len(devices)],)
    sources = rooted if collective == "broadcast" else devices
    destinations = rooted if collective == "reduce" else devices
    request = Request(collective, sources, destinations, "forest", topology, 1 << power)
    slow = cr.plan(topology, collective, 1 << power, "one_device", root=rooted[0] if "_" not in collective else None)
    found = few_step_forests.faster_forest(request, Pieces(slow.schedule, slow.seconds))
    assert found.seconds <= slow.seconds
    cr.verify(found.schedule)
    assert found.seconds == simulate(found.schedule, topology, 1 << power).seconds
    assert fluid_rate(found.schedule, topology) is not None
    ends = {(link.src, link.dst) for link in topology.links}
    if found.schedule.algorithm == "forest":
        names = found.schedule.devices
        for steps in found.schedule.rounds:
            for _, dst, srcs in steps:
                assert all((names[src], names[dst]) in ends for src in srcs if src != dst)


def test_exact_times_of_steps():
    """On a DGX-1V an all-gather in two steps moves 400 / 3 GB/s, one in three steps reaches the bound. On a star of n
    devices of b GB/s a broadcast in two steps moves b n / (2 n - 2), in many pieces b."""
    seen = neutral_topology(DGX, DGX.devices).topology
    two, three = (share_among_trees(seen, -1, steps, many=False) for steps in (2, 3))
    assert 1 / two.limit == pytest.approx(400 / 3)
    assert 1 / three.limit == pytest.approx(1200 / 7)
    assert three.time <= three.limit * (1 + GAP) * LOSS
    star = neutral_topology(Topology.star(8, 450), Topology.star(8, 450).devices).topology
    assert 1 / share_among_trees(star, 3, 2, many=False).limit == pytest.approx(450 * 8 / 14)
    assert 1 / share_among_trees(star, 3, 2, many=True).time == pytest.approx(450)


@pytest.mark.parametrize("name", ["dgx-1v", "pcie-8", "mi300x"])
def test_expected_times(name):
    """The time that decides which forests are planned is near that of the search; more steps take no longer."""
    topology = Topology.machine(name)
    seen = neutral_topology(topology, topology.devices).topology
    for roots, paired, numbers in ((0, False, (2, 3, 4)), (-1, False, (2, 3)), (None, True, (4, 6))):
        times = []
        for steps in numbers:
            early = expected_time(seen, roots, steps, many=False, paired=paired)
            found = share_among_trees(seen, roots, steps, many=False, paired=paired)
            if early is not None:
                assert 0.93 * found.time <= early <= 1.1 * found.time
                times.append(early)
        assert all(after <= before * (1 + 1e-9) for before, after in pairwise(times))
        assert len(times) > 1
    assert expected_time(seen, 0, 3, many=True) == share_among_trees(seen, 0, 3, many=True).time
    line = Topology([f"cpu:{k}" for k in range(3)], [(f"cpu:{k}", f"cpu:{k + 1}", 1) for k in range(2)])
    assert expected_time(neutral_topology(line, line.devices).topology, 0, 1, many=False) is None
