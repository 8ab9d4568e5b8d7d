"""Forests of few steps: the cheapest trees, the linear program, its schedules, and published results."""

import itertools
import math
import operator
import sys
import threading
from fractions import Fraction
from functools import partial
from itertools import chain, repeat
from unittest import mock

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from published_plans import ALPHA, BRICK, SCCL
from scipy.optimize import linprog

import crossreduce as cr
from crossreduce import Link, Topology
from crossreduce.kernels import native
from crossreduce.planning import COLLECTIVES, Request, plans, schedules
from crossreduce.planning.optimal.few_step import few_step_forests, tree_program
from crossreduce.planning.optimal.few_step.tree_program import GAP, share_among_trees
from crossreduce.planning.topologies import neutral_topology
from crossreduce.schedule import Pieces, clock, fluid_rate, simulate
from crossreduce.schedule.simulate import loads_of

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


# Arguments of ``TreeSearch``: three devices in a line, and trees of two steps out of all of them.
LINE = [((0, 1), (0,)), ((1, 0), (1,)), ((1, 2), (2,)), ((2, 1), (3,))]
SEARCH = {
    "n": 3, "links": 4, "routes": LINE, "roots": [0, 1, 2], "back": [], "steps": 2, "many": False, "paired": False,
}  # fmt: skip
PRICES, ANY = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [math.inf] * 3


def test_the_cheapest_trees_of_a_line():
    """The result has the price, the edges with their routes, and the load of each link in each step."""
    search = native().TreeSearch(*SEARCH.values())
    found = search.cheapest(PRICES, [math.inf, 5.0, math.inf])
    assert [price for price, *_ in found] == [1 + 7, 2 + 3, 4 + 6]
    assert [out for _, _, out, _ in found] == [((0, 0, 1, 0), (1, 1, 2, 2)), (), ((0, 2, 1, 3), (1, 1, 0, 1))]
    assert np.frombuffer(found[0][3]).tolist() == [1, 0, 0, 0, 0, 0, 1, 0]  # root 1 has no tree below 5
    mirrored = native().TreeSearch(*(SEARCH | {"back": [1, 0, 3, 2], "many": True}).values())
    price, _, _, load = mirrored.cheapest(PRICES[:4], ANY)[1]
    assert (price, np.frombuffer(load).tolist()) == (3 + 7, [1, 1, 1, 1])
    paired = native().TreeSearch(*(SEARCH | {"roots": [1], "paired": True}).values())
    ((price, into, out, _),) = paired.cheapest(PRICES, ANY[:1])  # one step into the root and one out of it
    assert (price, into, out) == (1 + 4 + 6 + 7, ((0, 0, 1, 0), (0, 2, 1, 3)), ((1, 1, 0, 1), (1, 1, 2, 2)))


@pytest.mark.parametrize("n", [4, 12])
@pytest.mark.parametrize("seed", range(8))
def test_trees_reach_all_devices_for_their_price(n, seed):
    """The edges form a tree of so many steps, and the sum of their prices is its price.

    On few devices no tree out of the root is cheaper, also if only this root is searched.
    """
    rng = np.random.default_rng(seed)
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b and (b == (a + 1) % n or rng.random() < 0.5)]
    steps = 3 if n == 4 else n
    prices = rng.integers(1, 9, (steps, len(pairs))).astype(float)
    routes = [(pair, (k,)) for k, pair in enumerate(pairs)]
    arguments = SEARCH | {"n": n, "links": len(pairs), "routes": routes, "steps": steps}
    found = (
        native()
        .TreeSearch(*(arguments | {"roots": list(range(n))}).values())
        .cheapest(prices.ravel().tolist(), [math.inf] * n)
    )
    for root, (price, _, edges, load) in enumerate(found):
        reached = {root: -1}
        for step, u, v, route in edges:
            assert routes[route][0] == (u, v)
            assert reached[u] < step
            assert v not in reached
            reached[v] = step
        assert len(reached) == n
        assert price == sum(prices[step, route] for step, _, _, route in edges)
        assert (np.frombuffer(load).reshape(prices.shape) * prices).sum() == price
        if n == 4:
            least = min(
                sum(prices[step, pairs.index((u, v))] for v, (step, u) in tree.items())
                for tree in timed_trees(pairs, n, root, steps)
            )
            ((alone, *_),) = (
                native()
                .TreeSearch(*(arguments | {"roots": [root]}).values())
                .cheapest(prices.ravel().tolist(), ANY[:1])
            )
            assert price == alone == least


@pytest.mark.parametrize(
    "change",
    [
        {"n": 0}, {"n": 2}, {"n": 1 << 30}, {"links": 0}, {"links": 3}, {"links": 1 << 30}, {"steps": 0},
        {"steps": 257}, {"routes": [((0, 3), (0,))]}, {"routes": [((-1, 1), (0,))]}, {"routes": [((0, 1), (4,))]},
        {"routes": [((0, 1), (-1,))]}, {"routes": [((0, 1), (1 << 40,))]}, {"roots": [3]}, {"roots": [-1]},
        {"back": [1, 0]}, {"back": [1, 0, 3, -1]}, {"back": [1, 0, 3, 4]},
    ],
)  # fmt: skip
def test_invalid_arguments_of_the_search(change):
    """Numbers that are out of range are errors."""
    with pytest.raises(ValueError, match=r"must be|must have|has an unknown|out of range"):
        native().TreeSearch(*(SEARCH | change).values())


@pytest.mark.parametrize("given", [([1.0] * 7, ANY), ([1.0] * 9, ANY), (PRICES, ANY[:2])])
def test_prices_of_another_length(given):
    """There is a price for each link in each step, and a limit for each root."""
    with pytest.raises(ValueError, match="there must be a price for each link and row"):
        native().TreeSearch(*SEARCH.values()).cheapest(*given)


@pytest.mark.parametrize("kind", ["search", "clock"])
def test_other_threads_run_during_compiled_planning(kind):
    """The search for trees and the clock run without the interpreter's lock.

    No thread is made to release the lock, and no bytecode runs between the release of the thread that waits and the
    last look at what it has done. So this thread runs only if the compiled code releases the lock.
    """
    n, rng = 10, np.random.default_rng(0)
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    routes = [(pair, (k,)) for k, pair in enumerate(pairs)]
    if kind == "search":
        sizes = {"n": n, "links": len(pairs), "routes": routes, "roots": list(range(n)), "steps": 4}
        prices = rng.random(4 * len(pairs)).tolist()
        compiled = partial(native().TreeSearch(*(SEARCH | sizes).values()).cheapest, prices, [math.inf] * n)
    else:
        box = Topology.full_mesh(n, 1, MICRO)
        loads = loads_of(cr.plan(box, algorithm="ring").schedule, box, cr.Costs(operation_s=0))
        compiled = partial(clock._compiled(loads).total, 1e6, 2_000, [])
    may_run, ran = threading.Lock(), []
    may_run.acquire()

    def wait():
        with may_run:
            ran.append(True)

    thread, interval = threading.Thread(target=wait), sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        thread.start()
        calls = chain([may_run.release], repeat(compiled, 500))
        looks = zip(map(operator.call, calls), iter(ran.__len__, None), strict=False)
        seen = next(filter(None, map(operator.itemgetter(1), looks)), 0)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert seen == 1


def test_plans_without_compiled_code():
    """Where the compiled module was not built, there are no forests of few steps, and plans are right."""
    caches = plans.plan_request, schedules.fastest_schedule, tree_program._begun, tree_program.share_among_trees

    def planned():
        for cache in caches:
            cache.cache_clear()
        return cr.plan("dgx-1v", "all_gather", 1 << 16, operation_s=0)

    best = planned()
    with mock.patch.object(tree_program, "native", return_value=None):
        other = planned()
    planned()  # empties the caches again
    cr.verify(other.schedule)
    assert other.seconds > best.seconds


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
