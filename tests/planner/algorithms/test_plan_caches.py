"""Plans are cached, verified, and equal in all threads and processes."""

import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from strategies import NAMED, names
from test_plan import COLLECTIVES, DGX, MIB, MICRO

import crossreduce as cr
from crossreduce import Topology
from crossreduce.planning import plans, schedules
from crossreduce.planning.optimal.few_step import few_step_forests


@pytest.fixture
def fresh():
    """A topology on which nothing has been planned yet: its links have a new speed in each test."""
    fresh.speed = getattr(fresh, "speed", 1000) + 1
    return Topology.ring(6, fresh.speed, MICRO)


def test_a_repeated_request_is_one_lookup(fresh, monkeypatch):
    """The same request, however it is written, returns the same object without planning or simulating again."""
    made = {name: cr.plan(fresh, "all_reduce", MIB, name) for name in (*NAMED, "auto")}
    before = plans.plan_request.cache_info()

    def never(*_):
        pytest.fail("this must be looked up")

    for module, functions in ((plans, ("fastest_schedule", "simulate")), (schedules, ("candidates", "fastest_of"))):
        for function in functions:
            monkeypatch.setattr(module, function, never)
    for name, plan in made.items():
        assert cr.plan(fresh, "all_reduce", MIB, name) is plan
        spelled = [f"/device:CPU:{k}" for k in range(6)]
        again = Topology.from_json(fresh.to_json())
        assert cr.plan(again, nbytes=MIB, algorithm=name, sources=spelled, destinations=iter(names(6))) is plan
    after = plans.plan_request.cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) == (2 * len(made), 0)


def test_another_size_only_needs_another_number_of_pieces(fresh, monkeypatch):
    """A plan for another size uses the cached schedules: none is planned or verified again."""
    first = cr.plan(fresh, "all_reduce", MIB)
    monkeypatch.setattr(schedules, "verify", lambda _: pytest.fail("this was verified already"))
    monkeypatch.setattr(schedules, "_schedules", lambda _: pytest.fail("this was planned already"))
    other = cr.plan(fresh, "all_reduce", 2 * MIB)
    assert other.nbytes == 2 * first.nbytes


def test_everything_planned_is_verified(fresh, monkeypatch):
    """The schedule of every plan has been verified."""
    seen = []
    for module in (schedules, few_step_forests):
        monkeypatch.setattr(module, "verify", lambda s: seen.append((s.collective, s.algorithm, s.chunks)))
    for collective, algorithm in itertools.product(COLLECTIVES, NAMED):
        schedule = cr.plan(fresh, collective, MIB, algorithm).schedule
        assert (collective, algorithm, schedule.chunks) in seen


def test_threads_have_equal_plans(fresh):
    """Threads that plan the same requests at the same time, in different orders, receive the plans of one thread."""
    requests = [(c, a, n) for c in COLLECTIVES for a in (*NAMED, "auto") for n in (8, MIB)]
    box = Topology.from_json(DGX.renamed(names(8)).to_json())  # a new topology, without cached routes
    start = threading.Barrier(8)

    def planned(some):
        return {(c, a, n): [cr.plan(t, c, n, a).schedule.to_json() for t in (fresh, box)] for c, a, n in some}

    def work(number):
        start.wait()
        first = number * 7 % len(requests)
        return planned(requests[first:] + requests[:first])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert all(result == results[0] for result in results)
    for cache in (plans.plan_request, schedules.fastest_schedule, schedules.candidates, few_step_forests._forest):
        cache.cache_clear()
    assert results[0] == planned(requests)


REQUESTS = """
import hashlib, crossreduce as cr
from crossreduce.planning import PLANNERS
names = [f"cpu:{k}" for k in range(7)]
box = cr.Topology.machine("dgx-1v").subset(["cuda:6", "cuda:0", "cuda:2", "cuda:3", "cuda:5"])
hosts = cr.Topology.machine("hgx-h100", 2, in_network=True)
hosts = hosts.subset([f"host{h}/cuda:{k}" for h in (0, 1) for k in (0, 1)])
links = [("cpu:0", "s", 2), ("s", "cpu:1", 2), ("s", "cpu:2", 3), ("cpu:0", "cpu:1", 1), ("cpu:1", "cpu:2", 1),
         ("cpu:1", "cpu:0", 5), ("cpu:2", "cpu:0", 5)]
uneven = [cr.Topology(names[:3], links, [("s", reducing)]) for reducing in (True, False)]
boxes = [box, cr.Topology.mesh(2, 3, 25, 1e-6), hosts, *uneven]
def show(text):
    print(hashlib.sha256(str(text).encode()).hexdigest())
for name, planner in PLANNERS.items():
    show(planner(names, names[:4], names[2:], packs=3, first=2).to_json())
for topology in boxes:
    for collective in ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"):
        limit = cr.bound(topology, collective)
        show((limit.roots, [(sorted(cut.nodes), *cut[1:]) for cut in limit.cuts], limit.potentials))
        for algorithm in cr.planning.NAMES if topology not in uneven else ("forest",):
            show(cr.plan(topology, collective, 10**6, algorithm).schedule.to_json())
groups = cr.plan_groups(hosts, cr.mesh_groups(hosts.devices, (2, 2)), nbytes="1M")
show([[one.schedule.to_json() for one in groups.plans], groups.bound.levels, groups.seconds, groups.explain()])
show(box.without_link("cuda:0", "cuda:2").links)
"""


def test_every_process_has_equal_plans():
    """Schedules, certificates and plans of groups are byte-identical in other processes, with any hash seed."""
    command = [sys.executable, "-c", REQUESTS]
    running = [
        subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("0", "4242")
    ]
    first, second = (process.communicate()[0].splitlines() for process in running)
    assert all(process.returncode == 0 for process in running)
    assert first == second
    assert len({*first}) > 60  # the requests have different results
