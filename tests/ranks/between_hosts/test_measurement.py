"""Links that ranks measure: the topology, which is the same on all ranks, and plans on it."""

import json
from fractions import Fraction
from itertools import chain, combinations
from types import SimpleNamespace
from unittest import mock

import pytest
from host_checks import joined, on
from members import summed
from ranks import SocketTransport, ranks

import crossreduce as cr
from crossreduce.errors import ArgumentError, MismatchError, PeerLostError
from crossreduce.ranks import measurement
from crossreduce.ranks.communicator import Communicator
from crossreduce.ranks.measurement import Speeds, host_topology, measure, rank_topology


def measured(rendezvous, seconds):
    comm = joined(rendezvous)
    found = measure(comm, seconds)
    summed(comm)
    comm.close()
    return found


def test_all_ranks_return_the_same_topology():
    """The measured topology is the same on all ranks, and can be used in plans. Its devices are in the order of the
    ranks, and its speeds have three digits. Ranks of a single host get a topology with one switch."""
    (topology,) = set(ranks(5, measured, 0.2, environment=on(*"abcba")))
    assert topology.devices == ("host0/cpu:0", "host1/cpu:0", "host2/cpu:0", "host1/cpu:1", "host0/cpu:1")
    for link in topology.links:
        assert link.bandwidth > 0
        assert len(f"{float(link.bandwidth):.10g}".replace(".", "").strip("0")) <= 3
    assert cr.plan(topology, nbytes=1 << 20).seconds > 0
    (topology,) = set(ranks(2, measured, 0.1))
    assert ([switch.name for switch in topology.switches], len(topology.links)) == (["host0"], 4)
    with pytest.raises(ArgumentError, match="seconds"):
        measure(None, 0)


def test_every_two_hosts_are_paired_once():
    """Every two hosts are a pair in exactly one round, and no host is in two pairs of a round."""
    for count in range(2, 9):
        rounds = measurement._pairings(count)
        assert sorted(chain(*rounds)) == [*combinations(range(count), 2)]
        for pairs in rounds:
            hosts = [host for pair in pairs for host in pair]
            assert len(hosts) == len(set(hosts))


def test_a_host_that_receives_less_from_all_has_one_cable():
    """If the links to a host, all at once, have much less than their single speeds, they share a cable. It is at least
    as fast as the fastest of them. Its switches forward data only to the host, or from it."""
    gb_per_s = ((0, 1, 1), (1, 0, 1), (1, 1, 0))
    latency_s = ((0, 1e-4, 1e-4),) * 3
    speeds = Speeds(gb_per_s, latency_s, cables=(0, 0, 0), memory=(10, 10, 10))
    assert measurement._cables(speeds, [(0.95, 1.9), (0.52, 1.04), (0.2, 0.4)]) == (0.0, 1.04, 1.0)
    topology = host_topology(speeds._replace(cables=(0.0, 1.04, 1.0)))
    assert topology.devices == ("host0/cpu:0", "host1/cpu:0", "host2/cpu:0")
    assert topology.route("host1/cpu:0", "host2/cpu:0") == ("host1/cpu:0", "host1.out", "host2.in", "host2/cpu:0")
    assert topology.link("host1.in", "host1/cpu:0").bandwidth == Fraction("1.04")
    assert topology.link("host1/cpu:0", "host1.out").bandwidth == Fraction("1.04")
    assert topology.out_links("host1.in") == (topology.link("host1.in", "host1/cpu:0"),)  # it forwards nothing else
    for collective in ("all_reduce", "reduce", "broadcast"):
        assert cr.plan(topology, collective, 1 << 20).seconds > 0
    every = rank_topology(speeds._replace(cables=(0.0, 1.04, 1.0)), ((0, 3), (1,), (2,)))
    assert every.devices == ("host0/cpu:0", "host1/cpu:0", "host2/cpu:0", "host0/cpu:1")
    assert cr.plan(every, nbytes=1 << 20).seconds > 0


def test_a_link_has_the_speed_of_its_own_direction():
    """A link has the bandwidth that its receiver measured. Its latency is the mean of both directions."""
    first = {"memory": 9.0, "in": [0, 0.12345], "latency": [0, 1e-4]}
    second = {"memory": 5.0, "in": [0.5, 0], "latency": [3e-4, 0]}
    payloads = [json.dumps(one).encode() for one in (first, second, {"memory": 7.0})]
    hosts = ((0, 2), (1,))
    comm = SimpleNamespace(hosts=hosts, rendezvous=SimpleNamespace(all_gather=lambda _: payloads))
    speeds = measurement._gather_speeds(comm, {})
    assert speeds.gb_per_s == ((0, 0.5), (0.123, 0))  # host 1 received 0.5 from host 0
    assert speeds.latency_s == ((0, 2e-4), (2e-4, 0))
    assert speeds.memory == (8.0, 5.0)
    topology = rank_topology(speeds, hosts)
    assert topology.link("host0", "host1").bandwidth == Fraction(1, 2)
    assert topology.link("host1", "host0").bandwidth == Fraction("0.123")


def for_different_times(rendezvous):
    comm = joined(rendezvous, 8.0)
    with pytest.raises(MismatchError, match=r"measure_topology 0\.2 s") as error:
        measure(comm, 0.2 if comm.rank == 2 else 0.1)
    measure(comm, 0.1)
    comm.close()
    return str(error.value)


def test_ranks_must_measure_for_the_same_time():
    """If a rank passes another number of seconds, all ranks raise an error: their messages would differ in size."""
    (text,) = set(ranks(3, for_different_times, environment=on(*"abc")))
    assert "rank 2 differs from ranks 0, 1" in text


def interrupted(rendezvous):
    transport = SocketTransport(rendezvous)
    comm = Communicator(rendezvous, transport, name="world", timeout_s=400.0)
    if comm.rank == 1:

        def pair(probe, other, seconds):
            probe._receive(other, 8, 0)
            raise KeyboardInterrupt("for the test")

        with (
            mock.patch.object(measurement._Probe, "pair", pair),
            pytest.raises(KeyboardInterrupt, match="for the test"),
        ):
            measure(comm)
        assert transport.closed, "late messages would be written to freed memory"
    with pytest.raises(PeerLostError, match="was interrupted") as error:
        comm.barrier() if comm.rank == 1 else measure(comm)
    return error.value.ranks


def test_an_interrupt_during_a_measurement_aborts_the_group():
    """After Ctrl-C during a measurement, the transport is closed, and all ranks raise an error before the timeout."""
    assert ranks(3, interrupted, environment=on(*"abb")) == [(1,)] * 3
