"""Forests of few steps: the cheapest trees, the linear program, its schedules, and published results."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from published_plans import ALPHA, BRICK, SCCL
from scipy.optimize import linprog

import crossreduce as cr
from crossreduce import Link, Topology
from crossreduce.planning import COLLECTIVES, Request
from crossreduce.planning.optimal.few_step import few_step_forests, tree_program
from crossreduce.planning.optimal.few_step.tree_program import GAP, share_among_trees
from crossreduce.planning.topologies import neutral_topology
from crossreduce.schedule import Pieces, fluid_rate, simulate

MICRO = Fraction(1, 10**6)
LOSS = 1 + tree_program._LOSS + 1e-6  # the factor by which rounding to units may increase the time


def timed_trees(pairs, n, root, steps):
    """Yield all trees out of a root in so many steps. A tree is, by receiver, (step, sender)."""
    others = [v for v in range(n) if v != root]
    choices = [[(step, u) for step in range(steps) for u in range(n) if (u, v) in pairs] for v in others]
    for chosen in itertools.product(*choices):
        tree = dict(zip(others, chosen, strict=True))
        if all(u == root or tree[u][0] < step for step, u in tree.values()):
            yield tree


@st.composite
def meshes(draw, most=4):
    """Draw a topology of a few devices: a ring in both directions, and some more links."""
    n = draw(st.integers(2, most))
    speeds = st.sampled_from([1, 2, 5, 50])
    pairs = {(k, (k + 1) % n) for k in range(n)} | {((k + 1) % n, k) for k in range(n)}
    pairs |= set(draw(st.lists(st.permutations(range(n)).map(lambda order: tuple(order[:2])), max_size=4)))
    pairs = {pair for pair in pairs if pair[0] != pair[1]}
    return Topology(
        [f"cpu:{k}" for k in range(n)], [Link(f"cpu:{a}", f"cpu:{b}", draw(speeds), MICRO) for a, b in sorted(pairs)]
    )


@examples(40)
@given(meshes(), st.integers(1, 3), st.sampled_from(["root", "all", "free"]), st.booleans())
def test_the_program_over_all_trees(topology, steps, kind, many):
    """The time exceeds the optimum over all trees by at most GAP and LOSS. The proved limit is at most the optimum."""
    n = len(topology.devices)
    pairs = {(int(link.src[4:]), int(link.dst[4:])): float(link.bandwidth) for link in topology.links}
    roots = [0] if kind == "root" else range(n)
    columns = [(root, tree) for root in roots for tree in timed_trees(pairs, n, root, steps)]
    roots_argument = {"root": 0, "all": -1, "free": None}[kind]
    neutral = neutral_topology(topology, topology.devices).topology
    found = share_among_trees(neutral, roots_argument, steps, many=many)
    roots_with_trees = {root for root, _ in columns}
    if not columns or (kind == "all" and len(roots_with_trees) < n):
        assert found is None
        return
    # The linear program over all trees: the load of each link in each step is at most its bandwidth x the step's time.
    rows = 1 if many else steps
    listed = sorted(pairs)
    loads = np.zeros((rows * len(listed), len(columns) + rows))
    for k, (_, tree) in enumerate(columns):
        for v, (step, u) in tree.items():
            loads[(0 if many else step) * len(listed) + listed.index((u, v)), k] += 1
    for row, (k, pair) in itertools.product(range(rows), enumerate(listed)):
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


DGX = Topology.machine("dgx-1v")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_plans_are_as_fast_as_those_of_sccl(collective):
    """From 1 KiB to 1 GiB, plans of a DGX-1V take at most 1.02 times as long as the best published plan of SCCL."""
    for power in range(10, 31):
        nbytes = 1 << power
        part = nbytes / 8 if collective in ("all_gather", "reduce_scatter") else nbytes
        published = min(s * ALPHA + r / c * part / BRICK for c, s, r in SCCL[collective])  # chunks, steps, rounds
        found = cr.plan(DGX, collective, nbytes, operation_s=0)
        assert found.seconds <= 1.02 * published, (nbytes, found.seconds / published)


@examples(25)
@given(meshes(5), st.sampled_from(COLLECTIVES), st.integers(10, 24), st.integers(0, 4))
def test_forests_of_few_steps_are_valid(topology, collective, power, root):
    """``faster_forest`` returns a correct schedule with its simulated time, which is at most that of the given one."""
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
