"""All-reduces by exchanges in levels: their rounds, their order of combination, and their place in auto."""

from itertools import combinations
from math import prod

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st

import crossreduce as cr
from crossreduce.planning import Request
from crossreduce.planning.exchanges import exchanges
from crossreduce.schedule import pipelined

FREE = cr.Costs(operation_s=0)


def levels_of(topology, members=None):
    members = topology.devices if members is None else members
    return exchanges(topology, Request("all_reduce", members, members, "one_shot", topology))


def contributions(schedule):
    """Return, for each device, the operands in the order in which they are combined, from the rounds alone."""
    state = {device: (device,) for device in range(len(schedule.devices))}
    for steps in schedule.rounds:
        state |= {dst: sum((state[src] for src in srcs), ()) for _, dst, srcs in steps}
    return state


@pytest.mark.parametrize(
    ("machine", "hosts"), [("dgx-1v", 2), ("mi300x", 1), ("hgx-h100", 3), ("ncv4", 2), ("mi250", 1)]
)
def test_each_device_receives_each_contribution_once(machine, hosts):
    """All devices combine all contributions once and in one order, so that all receive the same bits."""
    topology = cr.Topology.machine(machine, hosts)
    for schedule in levels_of(topology):
        cr.verify(schedule)
        orders = set(contributions(schedule).values())
        assert len(orders) == 1, schedule.head
        assert sorted(orders.pop()) == list(range(len(topology.devices)))


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_exchange_last(hosts):
    """With hosts, the first levels stay inside hosts, and in the last one each device reads its counterparts."""
    topology = cr.Topology.machine("hgx-h100", hosts)
    several = [schedule for schedule in levels_of(topology) if schedule.round_count > 1]
    assert any(schedule.round_count == 2 for schedule in several)
    for schedule in several:
        *inner, last = schedule.rounds
        host = [device.partition("/")[0] for device in schedule.devices]
        assert all(len({host[src] for src in srcs}) == 1 for steps in inner for _, _, srcs in steps)
        assert all(len({host[src] for src in srcs}) == hosts for _, _, srcs in last)


def test_a_clique_of_cliques_is_exchanged_along_its_links():
    """On a DGX-1 two levels use only direct links: no device has links to all others."""
    box = cr.Topology.machine("dgx-1v")
    for schedule in levels_of(box)[1:]:
        assert all((schedule.devices[src], schedule.devices[dst]) in box.by_ends
                   for steps in schedule.rounds for _, dst, srcs in steps for src in srcs if src != dst)  # fmt: skip


@examples(25)
@given(st.integers(2, 8), st.data())
def test_the_groups_of_a_full_mesh(n, data):
    """On a full mesh there is one schedule for each way to write n as a product, of the factors' sizes."""
    latency = data.draw(st.integers(0, 10)) * 1e-6
    names = [f"cpu:{k}" for k in range(n)]
    links = [(a, b, 25, latency) for a, b in combinations(names, 2)]
    mesh = cr.Topology(names, links + [(b, a, *rest) for a, b, *rest in links])
    found = levels_of(mesh)
    sizes = [tuple(len(steps[0].srcs) for steps in schedule.rounds) for schedule in found]
    assert len(set(sizes)) == len(sizes)
    assert all(prod(size) == n for size in sizes)
    assert sizes[0] == (n,)


def test_one_shot_wins_for_small_arrays_on_a_switch():
    """On 8 devices of a switch, auto takes one round for 1 KiB, and its time is that of one_shot."""
    found = cr.plan("hgx-h100", "all_reduce", 1 << 10, costs=FREE)
    one = cr.plan("hgx-h100", "all_reduce", 1 << 10, "one_shot", costs=FREE)
    assert found.schedule.round_count == 1
    assert found.seconds == one.seconds


def test_two_levels_win_between_hosts():
    """On two hosts, two levels beat one for 256 KiB, and one_shot by name returns the faster one."""
    topology = cr.Topology.machine("hgx-h100", 2)
    times = {schedule.round_count: pipelined(schedule, topology, 1 << 18, costs=FREE).seconds
             for schedule in levels_of(topology)}  # fmt: skip
    assert times[2] < times[1]
    assert cr.plan(topology, "all_reduce", 1 << 18, "one_shot", costs=FREE).seconds == min(times.values())


def test_requests_with_idle_devices_have_one_level():
    """If some members are not both sources and destinations, only the schedule with one level is made."""
    box = cr.Topology.machine("dgx-1v")
    request = Request("all_reduce", box.devices[:4], box.devices[2:6], "one_shot", box)
    assert [schedule.round_count for schedule in exchanges(box, request)] == [1]
