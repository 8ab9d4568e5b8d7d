"""No schedule undercuts the bound of all-gathers between hosts, benchmarks/hosts_bound.py. Small cases are exact."""

import random
import sys
from fractions import Fraction

import pytest
from paths import ROOT

import crossreduce as cr
from crossreduce.schedule import Chunk, Route, Schedule, Step, simulate, verify

sys.path.insert(0, str(ROOT / "benchmarks"))
from hosts_bound import SAFE, least_seconds
from planning_hosts import their_seconds

FREE = cr.Costs(operation_s=0)


def hosts(gpus, cards, inside_s=0.5e-6, network_s=1e-6):
    """Return two hosts with GPUs on a switch of 100 GB/s, the first of which have cards of 10 GB/s."""
    devices = [f"host{host}/cuda:{k}" for host in (0, 1) for k in range(gpus)]
    both = [(name, f"{name.partition('/')[0]}/switch", 100, inside_s / 2) for name in devices]
    both += [(name, "net", 10, network_s / 2) for name in devices if int(name[-1]) < cards]
    links = [link for a, b, *speed in both for link in ((a, b, *speed), (b, a, *speed))]
    return cr.Topology(devices, links, ["host0/switch", "host1/switch", "net"])


def routes_of(topology):
    """Return the nodes between any two devices, on the quickest route."""
    nodes = {}
    for src in topology.devices:
        for dst in topology.devices:
            nodes[src, dst] = topology.route(src, dst)
    return nodes


def random_schedule(topology, routes, pieces, number):
    """Return an all-gather with random trees, in random rounds."""
    devices, n = topology.devices, len(topology.devices)
    every = [k for k in range(n) for _ in range(pieces)]
    chunks = [Chunk(Fraction(1, len(every)), (k,), tuple(range(n))) for k in every]
    rounds, used = {}, {}
    for chunk, start in enumerate(every):
        have = {start: -1}
        while len(have) < n:
            src, dst = number.choice(list(have)), number.choice([k for k in range(n) if k not in have])
            have[dst] = have[src] + 1 + (number.random() < 0.3) * number.randrange(3)
            rounds.setdefault(have[dst], []).append(Step(chunk, dst, (src,)))
            used[chunk, src, dst] = routes[devices[src], devices[dst]][1:-1]
    steps = tuple(tuple(rounds[r]) for r in sorted(rounds))
    listed = tuple(Route(*ends, through) for ends, through in used.items() if through)
    return Schedule("all_gather", "random", devices, tuple(chunks), steps, routes=listed)


@pytest.mark.parametrize(("gpus", "cards"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_no_random_schedule_is_faster(gpus, cards):
    """Random trees in random rounds never take less time. They come close in the smallest case, and are right."""
    topology, number = hosts(gpus, cards), random.Random(gpus * 10 + cards)
    routes, nearest = routes_of(topology), 100.0
    for nbytes in (1 << 10, 1 << 16, 1 << 20):
        bound = least_seconds(topology, nbytes)
        for k in range(150):
            schedule = random_schedule(topology, routes, 1 + k % 2, number)
            if not k:
                verify(schedule)
            seconds = simulate(schedule, topology, nbytes, costs=FREE).seconds
            assert seconds >= bound
            nearest = min(nearest, seconds / bound)
    assert gpus > 1 or nearest < 1.01


def test_the_bound_of_two_devices_is_exact():
    """Each device sends its half over one link, which takes a latency and the time of the bytes."""
    topology = hosts(1, 1)
    for nbytes in (1 << 10, 1 << 20):
        exact = 1e-6 + nbytes / 2 / 10e9
        assert least_seconds(topology, nbytes) == pytest.approx(exact, rel=1e-5)
        assert cr.plan(topology, "all_gather", nbytes, costs=FREE).seconds == pytest.approx(exact)


def test_the_bound_counts_what_must_still_be_copied():
    """Eight devices with cards: the bound is near the time of one batch over all cards and the copies in the hosts. The
    longest latency plus the time of the tightest cut is less."""
    topology, nbytes = hosts(4, 4), 1 << 20
    bound = least_seconds(topology, nbytes)
    batch = nbytes / 8 / 10e9
    lower = 1.5e-6 + nbytes / 1e9 / float(cr.bound(topology, "all_gather").algbw)
    one_batch = 1e-6 + batch + 0.5e-6 + 3 * nbytes / 8 / 100e9
    assert lower < bound * 0.99
    assert bound <= cr.plan(topology, "all_gather", nbytes, costs=FREE).seconds <= one_batch * 1.0001
    assert bound > 0.95 * cr.plan(topology, "all_gather", nbytes, costs=FREE).seconds


@pytest.mark.parametrize("name", ["dgx-1v", "hgx-h100", "p4d"])
def test_no_plan_is_faster(name):
    """No algorithm is faster on machines with meshes, with switches that multicast, and with shared cards."""
    topology = cr.Topology.machine(name, 2)
    for nbytes in (1 << 12, 1 << 20, 1 << 26):
        bound = least_seconds(topology, nbytes)
        for algorithm in ("auto", "forest", "hierarchical_copy", "one_device", "direct", "ring"):
            assert cr.plan(topology, "all_gather", nbytes, algorithm, costs=FREE).seconds >= bound * SAFE


def test_devices_without_a_card_come_late():
    """One card serves two devices: the share of the other one leaves half a microsecond later. It must also reach the
    other one beyond, so its bytes take their time besides the longest latency."""
    topology, nbytes = hosts(2, 1), 1 << 14
    bound = least_seconds(topology, nbytes)
    longest_s, share_s = 2e-6, nbytes / 4 / 10e9
    assert bound >= (longest_s + share_s) * SAFE**2
    assert bound <= cr.plan(topology, "all_gather", nbytes, costs=FREE).seconds


@pytest.mark.parametrize(("name", "nbytes"), [("dgx-1v", 1 << 26), ("dgx-1v", 1 << 28), ("dgx-a100", 1 << 26)])
def test_plans_are_near_the_bound(name, nbytes):
    """ "auto" takes at most 1.05 times the bound where shares of falling sizes cross one after the other."""
    topology = cr.Topology.machine(name, 2)
    assert cr.plan(topology, "all_gather", nbytes, costs=FREE).seconds <= 1.05 * least_seconds(topology, nbytes)


def test_the_model_in_which_latencies_keep_no_link_busy():
    """Two shares of 1 KB cross one link of 1 GB/s and 5 us in one round, and then a second link. The library sends both
    together, which takes 2 + 5 us on each link: 14 us. In TE-CCL's model the first share arrives after 6 us, the second
    one after 7, and each goes on at once: 7 + 6 us. In two pieces, the last one arrives after 12.5 us."""
    names = ("cpu:0", "cpu:1", "cpu:2")
    topology = cr.Topology(names, [("cpu:0", "cpu:1", 1, 5e-6), ("cpu:1", "cpu:2", 1, 5e-6)])
    chunks = tuple(Chunk(Fraction(1, 2), (0,), (0, 1, 2)) for _ in range(2))
    rounds = tuple(tuple(Step(chunk, src + 1, (src,)) for chunk in (0, 1)) for src in (0, 1))
    for pieces, ours, theirs in ((1, 14, 13), (2, None, 12.5)):
        schedule = Schedule("broadcast", "custom", names, chunks, rounds, pieces=pieces)
        verify(schedule)
        assert their_seconds(schedule, topology, 2000) * 1e6 == pytest.approx(theirs)
        assert ours is None or simulate(schedule, topology, 2000).seconds * 1e6 == pytest.approx(ours)
    # A switch copies: 2 KB cross the link to it once, in 2 us, and each of the others, in 2 us more.
    links = [("cpu:0", "net", 1, 5e-6), *(("net", name, 1, 5e-6) for name in names[1:])]
    star = cr.Topology(names, links, ["net"])
    both = Schedule(
        "broadcast", "custom", names, (Chunk(Fraction(1), (0,), (0, 1, 2)),), ((Step(0, 1, (0,)), Step(0, 2, (0,))),)
    )
    assert their_seconds(both, star, 2000) * 1e6 == pytest.approx(2 + 5 + 2 + 5)
