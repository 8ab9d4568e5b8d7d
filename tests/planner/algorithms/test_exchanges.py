"""All-reduces by exchanges in levels: their rounds, and the order in which contributions are combined.

In each level, every device reads the values of all devices of its group. A level is a round.
"""

from math import prod

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st

import crossreduce as cr
from crossreduce.planning import Request
from crossreduce.planning.algorithms.exchanges import exchanges
from crossreduce.schedule import pipelined

FREE = cr.Costs(operation_s=0)


def levels_of(topology):
    """Return the schedules of exchanges for an all-reduce of all devices."""
    return exchanges(topology, Request("all_reduce", topology.devices, topology.devices, "one_shot", topology))


def contributions(schedule):
    """Return, for each device, the sources in the order in which its result combines them."""
    state = {device: (device,) for device in range(len(schedule.devices))}
    for steps in schedule.rounds:
        state |= {dst: sum((state[src] for src in srcs), ()) for _, dst, srcs in steps}
    return state


@pytest.mark.parametrize(
    ("machine", "hosts"), [("dgx-1v", 2), ("mi300x", 1), ("hgx-h100", 3), ("ncv4", 2), ("mi250", 1)]
)
def test_each_device_receives_each_contribution_once(machine, hosts):
    """All devices combine each contribution once and in the same order, so that all results have the same bits."""
    topology = cr.Topology.machine(machine, hosts)
    for schedule in levels_of(topology):
        cr.verify(schedule)
        orders = set(contributions(schedule).values())
        assert len(orders) == 1, schedule.head
        assert sorted(orders.pop()) == list(range(len(topology.devices)))


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_exchange_last(hosts):
    """In schedules of several levels, devices read from their own host, and in the last level from all hosts."""
    topology = cr.Topology.machine("hgx-h100", hosts)
    several = [schedule for schedule in levels_of(topology) if schedule.round_count > 1]
    assert any(schedule.round_count == 2 for schedule in several)
    for schedule in several:
        *inner, last = schedule.rounds
        host = [device.partition("/")[0] for device in schedule.devices]
        assert all(len({host[src] for src in srcs}) == 1 for steps in inner for _, _, srcs in steps)
        assert all(len({host[src] for src in srcs}) == hosts for _, _, srcs in last)


@examples(25)
@given(st.integers(2, 8), st.integers(0, 10))
def test_the_groups_of_a_full_mesh(n, micros):
    """On a full mesh, the group sizes of all levels have the product n. They differ between schedules."""
    found = levels_of(cr.Topology.full_mesh(n, 25, micros * 1e-6))
    sizes = [tuple(len(steps[0].srcs) for steps in schedule.rounds) for schedule in found]
    assert len(set(sizes)) == len(sizes)
    assert all(prod(size) == n for size in sizes)
    assert sizes[0] == (n,)  # the first schedule has one level


def test_two_levels_win_between_hosts():
    """On two hosts, two levels are faster than one for 256 KiB, and "one_shot" returns the fastest schedule."""
    topology = cr.Topology.machine("hgx-h100", 2)
    times = {schedule.round_count: pipelined(schedule, topology, 1 << 18, costs=FREE).seconds
             for schedule in levels_of(topology)}  # fmt: skip
    assert times[2] < times[1]
    assert cr.plan(topology, "all_reduce", 1 << 18, "one_shot", costs=FREE).seconds == min(times.values())


def test_requests_with_idle_devices_have_one_level():
    """If not all devices are both sources and destinations, there is only the schedule with one level."""
    box = cr.Topology.machine("dgx-1v")
    request = Request("all_reduce", box.devices[:4], box.devices[2:6], "one_shot", box)
    assert [schedule.round_count for schedule in exchanges(box, request)] == [1]
