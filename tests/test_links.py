"""Links that ranks measure: what comes out, that all ranks have the same, and that plans follow it."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import namespaces
import numpy as np
import pytest
from ranks import Store, ranks
from test_across import buffer, joined, on

import crossreduce as cr
from crossreduce.errors import ArgumentError, CollectiveTimeout, MismatchError, PeerLostError
from crossreduce.ops import ReduceOp
from crossreduce.ranks import links
from crossreduce.ranks.measurement import Speeds, measure, of_hosts, whole


def measured(rendezvous, seconds):
    comm, wire = joined(rendezvous)
    found = measure(comm, seconds)
    x = np.arange(1000, dtype="int64") + comm.rank
    comm.all_reduce(ReduceOp.SUM, buffer(x), buffer(x))
    comm.close()
    wire.close()
    return found, x


def test_all_ranks_end_with_the_same_topology():
    """What ranks measured is one value on all of them, in the order of ranks, and good for planning."""
    found = ranks(5, measured, 0.2, environment=on(*"abcba"))
    assert len({topology for topology, _ in found}) == 1
    topology = found[0][0]
    assert topology.devices == ("host0/cpu:0", "host1/cpu:0", "host2/cpu:0", "host1/cpu:1", "host0/cpu:1")
    for link in topology.links:
        assert link.bandwidth > 0
        assert len(f"{float(link.bandwidth):.10g}".replace(".", "").strip("0")) <= 3
    assert cr.plan(topology, nbytes=1 << 20).seconds > 0
    for _, x in found:
        assert (x == 5 * np.arange(1000) + 10).all()


def test_ranks_of_one_host_measure_its_memory_only():
    """Without other hosts there are no links to measure, and the topology is one switch."""
    (topology, x), _ = ranks(2, measured, 0.1)
    assert [switch.name for switch in topology.switches] == ["host0"]
    assert len(topology.links) == 4
    assert x[0] == 1


def test_every_two_hosts_meet_once():
    """In a tournament every two hosts meet once, and no host is in two pairs at a time."""
    for count in range(2, 12):
        turns = links._tournament(count)
        met = [pair for turn in turns for pair in turn]
        assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]
        for turn in turns:
            hosts = [host for pair in turn for host in pair]
            assert len(hosts) == len(set(hosts))


def test_a_host_that_takes_in_less_from_all_has_one_cable():
    """Where links one by one add up to more than all together carry, they share a cable; a burst does not hide one."""
    apart = ((0, 1, 1), (1, 0, 1), (1, 1, 0))
    late = ((0, 1e-4, 1e-4),) * 3
    speeds = Speeds(apart, late, (0, 0, 0), (10, 10, 10))
    assert links._cables(speeds, [1.9, 1.04, 0.4]) == (0.0, 1.04, 1.0)
    topology = of_hosts(speeds._replace(cables=(0.0, 1.04, 1.0)))
    assert topology.devices == ("host0/cpu:0", "host1/cpu:0", "host2/cpu:0")
    assert topology.route("host1/cpu:0", "host2/cpu:0") == ("host1/cpu:0", "host1.cable", "host2.cable", "host2/cpu:0")
    assert topology.link("host1.cable", "host1/cpu:0").bandwidth == Fraction("1.04")
    for collective in ("all_reduce", "reduce", "broadcast"):
        assert cr.plan(topology, collective, 1 << 20).seconds > 0
    every = whole(speeds._replace(cables=(0.0, 1.04, 1.0)), ((0, 3), (1,), (2,)))
    assert every.devices == ("host0/cpu:0", "host1/cpu:0", "host2/cpu:0", "host0/cpu:1")
    assert cr.plan(every, nbytes=1 << 20).seconds > 0


def test_a_link_has_the_speed_of_its_own_direction():
    """What a host took in from another is the speed of the link from that one; latencies are of both ways' mean."""

    class Said:
        hosts = ((0, 2), (1,))

        class rendezvous:  # noqa: N801 - an attribute
            @staticmethod
            def all_gather(_):
                first = {"memory": 9.0, "in": [0, 0.12345], "latency": [0, 1e-4]}
                second = {"memory": 5.0, "in": [0.5, 0], "latency": [3e-4, 0]}
                return [json.dumps(one).encode() for one in (first, second, {"memory": 7.0})]

    speeds = links._gathered(Said, {})
    assert speeds.gb_per_s == ((0, 0.5), (0.123, 0))  # host 1 took in 0.5 from host 0
    assert speeds.latency_s == ((0, 2e-4), (2e-4, 0))
    assert speeds.memory == (8.0, 5.0)
    topology = whole(speeds, Said.hosts)
    assert topology.link("host0", "host1").bandwidth == Fraction(1, 2)
    assert topology.link("host1", "host0").bandwidth == Fraction("0.123")


def impatient(rendezvous):
    comm, wire = joined(rendezvous)
    with pytest.raises(ArgumentError, match="seconds"):
        measure(comm, 0)
    comm.close()
    wire.close()


def test_a_time_that_is_none_is_refused():
    """Measuring in no time is refused before anybody waits."""
    ranks(1, impatient)


def deserted(rendezvous):
    comm, wire = joined(rendezvous, 3.0)
    if comm.rank == 1:
        comm.agree("measure_topology 1 s")
        wire.abort()
        return None
    with pytest.raises((PeerLostError, CollectiveTimeout)) as error:
        measure(comm)
    return error.value.ranks


def test_a_host_that_goes_away_meanwhile_is_named():
    """Whoever is lost in the middle of a measurement is named, and the group is given up."""
    found = ranks(2, deserted, environment=on("a", "b"))
    assert list(found[0]) == [1]


def hurried(rendezvous):
    comm, wire = joined(rendezvous, 8.0)
    with pytest.raises(MismatchError, match=r"measure_topology 0\.2 s") as error:
        measure(comm, 0.2 if comm.rank == 2 else 0.1)
    measure(comm, 0.1)
    comm.close()
    wire.close()
    return str(error.value)


def test_all_ranks_measure_for_as_long():
    """Ranks that would take different times would send messages of other sizes than are waited for: all say so."""
    said = ranks(3, hurried, environment=on(*"abc"))
    assert len(set(said)) == 1
    assert "rank 2 differs from ranks 0, 1" in said[0]


def interrupted(rendezvous):
    comm, wire = joined(rendezvous, 20.0)
    if comm.rank == 1:

        def pair(probe, other, seconds):
            probe._receive(other, 8, 0)
            raise KeyboardInterrupt

        links._Probe.pair = pair
        with pytest.raises(KeyboardInterrupt):
            measure(comm)
        assert wire.closed, "what comes late would be written into memory that is gone"
    with pytest.raises(PeerLostError, match="was interrupted") as error:
        comm.barrier() if comm.rank == 1 else measure(comm)
    return error.value.ranks


def test_an_interrupt_meanwhile_gives_up_the_group():
    """After Ctrl-C in the middle of a measurement nothing is received any more, and all ranks hear of it at once."""
    found = ranks(3, interrupted, environment=on(*"abb"), timeout_s=15)
    assert [list(one) for one in found] == [[1]] * 3


PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from ranks import Meet, SocketWire
from crossreduce.ops import ReduceOp
from crossreduce.ranks.communicator import Communicator
from crossreduce.transports.base import Buffer
from crossreduce.ranks.measurement import measure
path, rank, size, address = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
meet = Meet(path, rank, size)
wire = SocketWire(meet, address)
comm = Communicator(meet, wire, name="bed", timeout_s=30)
found = measure(comm)
x = np.full(100_000, 4.0**rank, "float32")
comm.all_reduce(ReduceOp.SUM, *[Buffer(x.ctypes.data, x.size, "float32", x.shape)] * 2)
assert (x == sum(4.0**k for k in range(size))).all()
if rank == 0:
    print(json.dumps([comm.hosts, found.to_json()]))
comm.close()
wire.close()
"""


@pytest.mark.skipif(namespaces.available() is not None, reason=f"test bed: {namespaces.available()}")
def test_on_real_links_the_slow_one_is_found():
    """Of three hosts' links one is five times slower: that is what is measured, and sums over it are right."""
    store = Store()
    store.start()
    here = str(Path(__file__).parent)
    try:
        with namespaces.hosts(3, rate="1gbit", slower={(0, 2): "200mbit"}) as bed:
            running = [
                bed.run(
                    host,
                    [sys.executable, "-c", PROGRAM, here, store.path, str(rank), "4", bed.addresses[host]],
                    stdout=subprocess.PIPE,
                )
                for rank, host in enumerate((0, 1, 2, 2))
            ]
            said = [process.communicate(timeout=60)[0] for process in running]
            assert [process.returncode for process in running] == [0] * 4
    finally:
        store.close()
    hosts, text = json.loads(said[0])
    assert hosts == [[0], [1], [2, 3]]
    topology = cr.Topology.from_json(text)
    between = {
        (link.src, link.dst): float(link.bandwidth) * 8
        for link in topology.links
        if link.src.startswith("host") and link.dst.startswith("host") and "cpu" not in link.src + link.dst
    }
    for (src, dst), gbit_per_s in between.items():
        due = 0.2 if {src[:5], dst[:5]} == {"host0", "host2"} else 1.0
        if src[:5] != dst[:5]:
            assert 0.7 * due < gbit_per_s < 1.15 * due, (src, dst)
