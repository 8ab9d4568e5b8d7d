"""Ops with a topology: results equal those of the oracle on all topologies, and the planned schedule is executed."""

import itertools
from collections import Counter

import expect
import numpy as np
import oracle
import pytest
from budget import examples
from frameworks import NAMES
from hypothesis import given
from hypothesis import strategies as st
from pairs import each
from strategies import NAMED, names, wired

import crossreduce as cr
from crossreduce import AllReduceCrossDeviceOps, Link, PerReplica, Topology, simulate
from crossreduce.frameworks.null import NullFramework
from crossreduce.options import ALGORITHMS
from crossreduce.topology.machines import machine_names

DGX = Topology.machine("dgx-1v")
ON_HOST = DGX.renamed(names(8))
MACHINES = [name for name, _ in machine_names() if name not in ("tpu-v4", "gb200-nvl72")]


def check_sum(ops, n, size=37):
    """Check that ``ops`` reduce ``n`` NumPy arrays to all devices and to one, counting each once, and broadcast one."""
    xs = expect.digits(n, (size,))
    value = PerReplica([x.copy() for x in xs])
    due = sum(xs)
    for destinations in (value, f"cpu:{n - 1}"):
        result = ops.reduce("sum", value, destinations)
        assert all(np.array_equal(part, due) for part in result)
    assert result.devices == (f"cpu:{n - 1}",)
    assert all(np.array_equal(x, part) for x, part in zip(xs, value, strict=True))  # no input was written
    assert all(np.array_equal(part, xs[0]) for part in ops.broadcast(xs[0], value))


@pytest.mark.parametrize(("machine", "algorithm"), each(MACHINES, ["hierarchical_copy", "ring", "forest", "auto"]))
def test_machines_are_matched_by_position(machine, algorithm):
    """If the topology has other device names than the value, its i-th device is the device of the i-th replica."""
    topology = Topology.machine(machine)
    for n, packs in ((2, 3), (len(topology.devices), 1)):
        check_sum(AllReduceCrossDeviceOps(algorithm, packs, topology=topology), n)


@examples(60)
@given(
    st.data(),
    st.integers(1, 7),
    st.sampled_from(ALGORITHMS),
    st.integers(0, 5),
    st.sampled_from(["sum", "mean", "max"]),
    st.booleans(),
)
def test_results_equal_the_oracle_on_any_topology(data, n, algorithm, packs, op, both_ways):
    """On any connected topology, with devices in any order, results equal those of the oracle."""
    topology = data.draw(wired(names(n), both_ways=both_ways))
    topology = topology.renamed(data.draw(st.permutations(names(n))))
    dtype = data.draw(st.sampled_from(["int64", "float32"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    xs = [rng.integers(-9, 9, (4, 5)).astype(dtype) for _ in range(n)]
    ops = AllReduceCrossDeviceOps(algorithm, packs, topology=topology)
    destinations = data.draw(st.lists(st.sampled_from(names(n)), min_size=1, unique=True))
    result = ops.reduce(op, PerReplica(xs), PerReplica([0] * len(destinations), destinations))
    assert result.devices == tuple(destinations)
    for part in result:
        oracle.check(part, op, xs)


@pytest.mark.parametrize("algorithm", [*NAMED, "auto"])
def test_bytes_are_those_of_the_plan(algorithm):
    """An op moves the same bytes over each link as the schedule of ``cr.plan`` for the same size."""
    null, size = NullFramework(), 48 * 1024
    value = PerReplica([null.zeros((size,), "float32", device) for device in DGX.devices])
    result = AllReduceCrossDeviceOps(algorithm, topology=DGX).reduce("sum", value, value)
    assert [(x.shape, x.device) for x in result] == [((size,), device) for device in DGX.devices]
    made = cr.plan(DGX, nbytes=4 * size, algorithm=algorithm)
    over_links = Counter()
    for (src, dst), nbytes in null.counts.bytes.items():
        for link in itertools.pairwise(DGX.route(src, dst)):
            over_links[link] += nbytes
    assert +over_links == +Counter(simulate(made.schedule, DGX, 4 * size, itemsize=4).bytes)


@pytest.mark.parametrize(
    ("algorithm", "framework"), each(["hierarchical_copy", "forest", "auto", "ring"], NAMES), indirect=["framework"]
)
def test_batches_of_each_framework(algorithm, framework):
    """Batches with dense and sparse values of any framework, packed or not, are reduced correctly on a topology."""
    for n, packs in ((8, 2), (5, 0)):
        dense = [expect.small(*kind, n) for kind in (("float32", (6, 5)), ("int32", ()), ("float16", (0,)))]
        rows = [framework.sparse("IndexedSlices", np.full((1, 2), 2.0**k), np.array([k % 3]), (3, 2)) for k in range(n)]
        values = [expect.value(framework, xs) for xs in dense]
        ops = AllReduceCrossDeviceOps(algorithm, packs, 100, 2, topology=ON_HOST)
        batch = [*((value, value) for value in values), (PerReplica(rows, names(n)), "cpu:3")]
        *results, sparse = ops.batch_reduce("sum", batch)
        for xs, value, result in zip(dense, values, results, strict=True):
            expect.check(framework, result, "sum", xs, names(n), value)
        assert framework.parts(sparse[0]).values.tolist() == [[2.0**k] * 2 for k in range(n)]


STAR = Topology.star(6, 450, 1e-6)
SPOKES = [pair for k in range(4) for pair in ((f"cuda:{k}", "cuda:9"), ("cuda:9", f"cuda:{k}"))]
HUB = Topology([*(f"cuda:{k}" for k in range(4)), "cuda:9"], [Link(*pair, 5) for pair in SPOKES])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_devices_and_switches_without_a_replica(algorithm):
    """Switches and devices without a replica only forward data. If there is no route, nothing is moved."""
    check_sum(AllReduceCrossDeviceOps(algorithm, topology=STAR.with_switches(reducing=True)), 6)
    if algorithm != "forest":
        check_sum(AllReduceCrossDeviceOps(algorithm, topology=HUB), 4, size=1 << 12)
    links = [Link(*pair, 1) for k in (0, 2) for pair in itertools.permutations(names(4)[k : k + 2])]
    null = NullFramework()
    value = PerReplica([null.zeros((5,), "float32", device) for device in names(4)])
    ops = AllReduceCrossDeviceOps(algorithm, topology=Topology(names(4), links))
    words = r"needs a route from cpu:0 to cpu:2, cpu:3, but no link leads out of \{cpu:0"
    for call in (lambda: ops.reduce("sum", value, value), lambda: ops.batch_reduce("sum", [(value, value)])):
        with pytest.raises(cr.PlanError, match=words):
            call()
    assert null.counts == NullFramework().counts
    part = PerReplica(list(value)[:2], names(2))
    assert len(ops.reduce("sum", part, part)) == 2


@pytest.mark.xfail(
    strict=True, reason="forest reduces on a device without a replica, which does not exist under the topology's name"
)
def test_forest_on_a_hub_without_a_replica():
    """If a device without a replica is the only connection between the replicas, "forest" must not reduce on it."""
    check_sum(AllReduceCrossDeviceOps("forest", topology=HUB), 4, size=1 << 12)


@pytest.mark.parametrize(
    ("topology", "devices", "words"),
    [
        (ON_HOST, expect.cpus(1, 9), r"the topology lacks a device[\s\S]*request for cpu:1, cpu:9"),
        (DGX, expect.cpus(*range(9)), "lacks a device of this request: it has 8 devices for 9 replicas"),
    ],
)
def test_devices_that_the_topology_does_not_have(topology, devices, words):
    """If the topology lacks devices of a value, or has fewer devices than the value, a PlanError is raised."""
    value = PerReplica([np.ones(3)] * len(devices), devices)
    with pytest.raises(cr.PlanError, match=words):
        AllReduceCrossDeviceOps("ring", topology=topology).reduce("sum", value, value)
