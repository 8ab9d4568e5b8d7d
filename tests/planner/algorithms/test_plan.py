"""``plan``: every collective by every algorithm is correct, simulated and within its bound; invalid requests."""

import heapq
import itertools
from dataclasses import FrozenInstanceError, fields
from fractions import Fraction

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import NAMED, names, wired

import crossreduce as cr
from crossreduce import ArgumentError, Link, PlanError, Topology, simulate, verify
from crossreduce.planning import REGISTRY
from crossreduce.schedule import fluid_rate, live_rounds
from crossreduce.topology.machines import machine_names

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
MICRO = 1e-6
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def one_way(n):
    """Return n devices in a circle, linked in one direction."""
    devices = names(n)
    return Topology(devices, [Link(devices[k - 1], devices[k], 25, MICRO) for k in range(n)])


def lopsided():
    """Return four devices, two switches, and links that differ in the two directions."""
    there = [("cpu:0", "a", 25), ("cpu:1", "a", 12), ("cpu:2", "b", 25), ("cpu:3", "b", 3), ("a", "b", 10)]
    back = [(dst, src, gb_per_s * 2 + 1) for src, dst, gb_per_s in there]
    return Topology(names(4), [Link(*link, MICRO) for link in there + back], ["a", "b"])


DGX = Topology.machine("dgx-1v")
TOPOLOGIES = {
    "one": Topology.full_mesh(1),
    "pair": Topology.full_mesh(2, 25, MICRO),
    "mesh": Topology.full_mesh(4, 25, MICRO),
    "ring": Topology.ring(5, 25, MICRO),
    "line": Topology.mesh(1, 4, 25, MICRO),
    "grid": Topology.mesh(2, 3, (50, 25), MICRO),
    "star": Topology.star(6, 450, MICRO),
    "reducing star": Topology.star(6, 450, MICRO).with_switches(reducing=True),
    "one way": one_way(4),
    "lopsided": lopsided(),
    "dgx-1v": DGX,
    "dgx-1v part": DGX.subset([f"cuda:{k}" for k in (0, 2, 3, 5, 6)]),
    "pcie-8": Topology.machine("pcie-8"),
    "mi100": Topology.machine("mi100", in_network=True),
    "two hosts": Topology.machine("dgx-a100", hosts=2).subset(
        [f"host{host}/cuda:{k}" for host in (0, 1) for k in range(3)]
    ),
}


def distances(topology, start):
    """Return the least latency from a device to each node that can be reached (Dijkstra)."""
    found, queue = {}, [(Fraction(0), start)]
    while queue:
        far, here = heapq.heappop(queue)
        if here not in found:
            found[here] = far
            for link in topology.links:
                if link.src == here:
                    heapq.heappush(queue, (far + link.latency_s, link.dst))
    return found


def ends(made, collective):
    """Return (sources, destinations) of a plan's schedule, as tuples of names in order."""
    schedule = made.schedule
    found = []
    for end, divided in ((1, "all_gather"), (2, "reduce_scatter")):
        positions = sorted({chunk[end] for chunk in schedule.chunks})
        if collective == divided:  # each chunk has one device at this end
            positions = [tuple(k for (k,) in positions)]
        found += [tuple(schedule.devices[k] for k in numbers) for numbers in positions]
    return tuple(found)


def check(made, topology, collective, nbytes, sources, destinations):
    """Check a plan: its schedule, devices, links, simulated time and bound, and that its numbers fit together."""
    schedule, limit = made.schedule, made.bound
    verify(schedule)
    assert live_rounds(schedule) == [list(steps) for steps in schedule.rounds]  # each step has an effect
    assert (made.topology, made.collective, made.nbytes) == (topology, collective, nbytes)
    assert schedule.collective == collective
    assert made.algorithm == schedule.algorithm
    assert ends(made, collective) == (sources, destinations)
    done = simulate(schedule, topology, nbytes)
    assert made.seconds == done.seconds
    assert set(done.bytes) <= {(link.src, link.dst) for link in topology.links}
    limit.check()
    assert limit.topology == topology
    assert made.rate == fluid_rate(schedule, topology)
    if limit.algbw is None:
        assert {*sources, *destinations} == set(limit.devices)
        assert (len(limit.devices), made.seconds, made.ratio, schedule.rounds) == (1, 0, 1, ())
        return
    assert made.ratio == made.rate / limit.algbw <= 1
    assert made.seconds * (1 + 1e-12) >= float(nbytes / limit.algbw) / 1e9
    assert made.algbw == (nbytes / made.seconds / 1e9 if nbytes else 0)
    latencies = [distances(topology, src)[dst] for src, dst in itertools.product(sources, destinations)]
    assert made.seconds * (1 + 1e-12) >= max(latencies) if nbytes else made.seconds == 0


def whole(topology, collective, root):
    """Return (sources, destinations) of a collective of all devices."""
    everyone = topology.devices
    return ((root,) if collective == "broadcast" else everyone, (root,) if collective == "reduce" else everyone)


@pytest.mark.parametrize(
    ("name", "collective"),
    [(name, COLLECTIVES[(k + more) % 5]) for k, name in enumerate(TOPOLOGIES) for more in (0, 2)],
)
def test_every_algorithm(name, collective):
    """On every topology, each algorithm returns a correct plan of a collective, and "auto" is the fastest of them."""
    topology = TOPOLOGIES[name]
    root = topology.devices[-1] if collective in ("reduce", "broadcast") else None
    for nbytes in (0, 3 * MIB) if name in ("one", "mesh", "two hosts") else (3 * MIB,):
        seconds = {}
        for algorithm in (*NAMED, "auto", "nccl"):
            made = cr.plan(topology, collective, nbytes, algorithm, root=root)
            check(made, topology, collective, nbytes, *whole(topology, collective, root))
            assert algorithm in ("auto", "nccl", made.algorithm)
            assert made.bound.algbw == cr.bound(topology, collective, root).algbw
            seconds[algorithm] = made.seconds
        assert seconds["auto"] == seconds["nccl"] <= min(seconds.values())


def test_the_bound_of_different_sources_and_destinations():
    """The bound of any sources and destinations is the least bandwidth of links that separate two of them."""
    lopsided = TOPOLOGIES["lopsided"]  # cpu:3 can receive 7 GB/s and send 3 GB/s
    for sources, destinations, least_bandwidth in (
        (["cpu:0", "cpu:1"], ["cpu:0", "cpu:3"], 7),
        (["cpu:0", "cpu:3"], ["cpu:0", "cpu:1"], 3),
        (["cpu:0", "cpu:1"], ["cpu:1"], 25),
        (["cpu:0"], ["cpu:0", "cpu:1", "cpu:2"], 10),
    ):
        made = cr.plan(lopsided, "all_reduce", MIB, sources=sources, destinations=destinations)
        assert made.bound.algbw == least_bandwidth
        made.bound.check()


@st.composite
def drawn_requests(draw, both_ways):
    """Draw (topology, collective, arguments of ``plan``, sources, destinations)."""
    topology = draw(wired(names(draw(st.integers(1, 6))), both_ways=both_ways))
    if draw(st.booleans()):
        topology = topology.with_switches(reducing=True)
    collective = draw(st.sampled_from(COLLECTIVES))
    some = st.lists(st.sampled_from(topology.devices), min_size=1, unique=True).map(tuple) | st.just(topology.devices)
    sources, destinations = draw(some), draw(some)
    root = draw(st.sampled_from(topology.devices))
    given = {
        "all_reduce": {"sources": sources, "destinations": destinations},
        "reduce": {"sources": sources, "root": root},
        "broadcast": {"root": root, "destinations": destinations},
        "reduce_scatter": {"sources": sources},
        "all_gather": {"destinations": destinations},
    }[collective]
    all_sources = {"broadcast": (root,), "all_gather": destinations}.get(collective, sources)
    all_destinations = {"reduce": (root,), "reduce_scatter": sources}.get(collective, destinations)
    return topology, collective, given, all_sources, all_destinations


@examples(60)
@given(st.booleans().flatmap(drawn_requests), st.sampled_from([0, 1, 1000, 10 * MIB]))
def test_some_devices_of_any_topology(ask, nbytes):
    """Any devices can be sources and destinations. "auto" is at least as fast as every algorithm.

    The bound is that of the devices that take part.
    """
    topology, collective, given, sources, destinations = ask
    best = cr.plan(topology, collective, nbytes, **given)
    check(best, topology, collective, nbytes, sources, destinations)
    members = max(sources, destinations, key=len)
    if {*sources, *destinations} == {*members} and (collective != "all_reduce" or {*sources} == {*destinations}):
        assert best.bound.algbw == cr.bound(topology, collective, given.get("root"), members).algbw
    for algorithm in NAMED:
        made = cr.plan(topology, collective, nbytes, algorithm, **given)
        check(made, topology, collective, nbytes, sources, destinations)
        assert best.seconds <= made.seconds


def test_the_root_of_a_reduce_or_broadcast_is_the_best():
    """If no root is given, it is the only source (or destination), or else the device with the greatest bound."""
    for topology in (TOPOLOGIES["grid"], TOPOLOGIES["lopsided"], DGX):
        for collective, end in (("reduce", 1), ("broadcast", 0)):  # the position of the root in ``ends``
            made = cr.plan(topology, collective, MIB)
            (root,) = ends(made, collective)[end]
            best = max(cr.bound(topology, collective, device).algbw for device in topology.devices)
            assert made.bound.algbw == cr.bound(topology, collective, root).algbw == best
            named = {"destinations" if end else "sources": [root]}
            assert cr.plan(topology, collective, MIB, **named) is cr.plan(topology, collective, MIB, root=root)
    star = TOPOLOGIES["star"]
    for root in star.devices:
        assert ends(cr.plan(star, "broadcast", 8, root=root), "broadcast") == ((root,), star.devices)


@pytest.mark.parametrize("algorithm", [name for name in NAMED if name != "direct"])
def test_a_broadcast_sends_nothing_back(algorithm):
    """In a broadcast, nothing is sent to the root, and each other device receives each chunk once.

    This is not true of "direct", in which the root first divides the buffer among the devices.
    """
    for topology in (DGX, TOPOLOGIES["star"], TOPOLOGIES["grid"]):
        root, n = topology.devices[-1], len(topology.devices)
        schedule = cr.plan(topology, "broadcast", MIB, algorithm, root=root).schedule
        received = dict.fromkeys(schedule.devices, 0)  # numbers of chunks
        for _, dst, _ in itertools.chain(*schedule.rounds):
            received[schedule.devices[dst]] += 1
        assert received.pop(root) == 0
        assert set(received.values()) == {len(schedule.chunks)}
        assert len(received) == n - 1


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nodes_that_do_not_take_part_may_be_unreachable(collective):
    """Devices and switches without links do not change a plan if they do not take part."""
    mesh = Topology.full_mesh(3, 25, MICRO)
    topology = Topology((*mesh.devices, "cpu:9"), mesh.links, ("lost",))
    part = {"broadcast": {"root": "cpu:0", "destinations": names(3)}, "reduce": {"sources": names(3), "root": "cpu:0"}}
    given = part.get(collective, {"sources": names(3), "destinations": names(3)})
    for algorithm in (*NAMED, "auto"):
        made = cr.plan(topology, collective, MIB, algorithm, **given)
        assert made.seconds == cr.plan(mesh, collective, MIB, algorithm, **given).seconds


SLOW = ("gb200-nvl72", "tpu-v4", "hgx-h200", "hgx-b200")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name, _ in machine_names()]
)
def test_auto_is_the_fastest_on_every_machine(name):
    """ "auto" is the fastest algorithm. Its time is near the latency for 8 bytes, and near the bound for 1 GiB."""
    topology = Topology.machine(name)
    for nbytes in (KIB, GIB):
        seconds = {algorithm: cr.plan(topology, nbytes=nbytes, algorithm=algorithm).seconds for algorithm in NAMED}
        assert cr.plan(topology, nbytes=nbytes).seconds <= min(seconds.values())
    furthest = max(
        max(far for node, far in distances(topology, device).items() if node in topology.devices)
        for device in topology.devices
    )
    assert cr.plan(topology, nbytes=8, operation_s=0).seconds <= 1.01 * furthest
    assert cr.plan(topology, nbytes=KIB, operation_s=0).seconds <= 2 * furthest
    large = cr.plan(topology, nbytes=GIB, operation_s=0)
    assert large.ratio == 1
    assert large.algbw >= 0.93 * large.bound.algbw
    large.bound.check()


def test_a_plan_prints_its_head_and_its_time():
    """A plan prints as one line: the head of its schedule, its bytes and its time in microseconds."""
    made = cr.plan(TOPOLOGIES["ring"], nbytes=5 * 10**6, algorithm="ring")
    assert str(made) == f"{made.schedule.head}; 5000000 bytes in {made.seconds * 1e6:.1f} us"
    # Two rings of 5 chunks each have 2 (5 - 1) rounds, each with 1 us and 500 kB over 25 GB/s.
    assert made.seconds == pytest.approx(8 * (1e-6 + 5e5 / 25e9), rel=1e-12)
    assert (made.rate, made.ratio) == (Fraction(125, 4), 1)


def test_results_cannot_be_changed():
    """Fields of results cannot be assigned. A caller that changes a returned dictionary does not change the cache."""
    made = cr.plan(DGX, nbytes=MIB)
    done = simulate(made.schedule, DGX, 300)
    done.bytes.clear()  # changes this result, not the cached one
    assert simulate(made.schedule, DGX, 300).bytes
    for value in (made, made.schedule, made.bound, made.topology, done):
        for field in fields(value):
            with pytest.raises(FrozenInstanceError, match="cannot assign to field"):
                setattr(value, field.name, None)
    assert made.bound == cr.bound(Topology.machine("dgx-1v"), "all_reduce")
    assert hash(made.bound) == hash(cr.bound(Topology.machine("dgx-1v"), "all_reduce"))


SQUARE = Topology.ring(4, 25, MICRO)
BAD = [
    ({"nbytes": -1}, r"nbytes must be an integer from 0 to[\s\S]*-1 \(int\)"),
    ({"nbytes": "8x"}, r"nbytes must be an integer[\s\S]*'8x' \(str\)[\s\S]*nbytes=1 << 20$"),
    ({"nbytes": 1 << 61}, r"nbytes must be an integer from 0 to 1152921504606846976[\s\S]*2305843009213693952"),
    ({"packs": 0}, r"packs must be an integer from 1 to 10000[\s\S]*0 \(int\)[\s\S]*packs=1"),
    ({"packs": 10_001}, r"packs must be an integer from 1 to 10000[\s\S]*10001"),
    ({"packs": 2.0}, r"packs must be an integer[\s\S]*2\.0"),
    ({"collective": "gather"}, r"no such collective[\s\S]*'gather'[\s\S]*one of all_reduce, reduce, broadcast"),
    ({"algorithm": "best"}, r"no such algorithm[\s\S]*'best'[\s\S]*one of one_device[\s\S]*forest, nccl, auto"),
    ({"algorithm": {}}, "no such algorithm"),
    ({"root": "cpu:9"}, r"the root must be a device of the topology[\s\S]*'cpu:9'[\s\S]*one of cpu:0, cpu:1"),
    ({"collective": "reduce_scatter", "root": "cpu:1"}, r"reduce_scatter has no root[\s\S]*root='cpu:1'"),
    ({"collective": "all_gather", "root": "cpu:1"}, r"all_gather has no root[\s\S]*reduce or broadcast"),
    ({"collective": "broadcast", "sources": [0], "root": 1}, r"a broadcast must have one root[\s\S]*root=cpu:1"),
    ({"collective": "reduce", "destinations": [0], "root": 1}, r"a reduce must have one root[\s\S]*root=cpu:1"),
    ({"collective": "broadcast", "sources": [0, 1]}, r"a broadcast must have one root[\s\S]*cpu:0', 'cpu:1"),
    ({"collective": "reduce", "destinations": [0, 1]}, r"a reduce must have one root[\s\S]*all_reduce"),
    ({"collective": "all_gather", "sources": [0], "destinations": [1]},
     "the sources and the destinations of all_gather must be the same"),
    ({"collective": "reduce_scatter", "sources": [0], "destinations": [0, 1]},
     "the sources and the destinations of reduce_scatter must be the same"),
    ({"sources": []}, "at least one device must be named"),
    ({"destinations": ()}, "at least one device must be named"),
    ({"sources": ["cpu:0", "cpu:7"]}, r"the topology has no such device[\s\S]*cpu:7[\s\S]*one of cpu:0, cpu:1"),
    ({"sources": ["cpu:1", "CPU:1"]}, "cpu:1 is listed more than once"),
    ({"sources": "cpu:0"}, "devices must be a list of names"),
    ({"destinations": 3}, "devices must be a list of names"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), BAD, ids=[str(given) for given, _ in BAD])
def test_bad_requests_are_refused(given, text):
    """An invalid request raises an ArgumentError with the problem, the given value and a remedy."""
    with pytest.raises(ArgumentError, match=text) as caught:
        cr.plan(SQUARE, **given)
    assert "\n  given: " in str(caught.value)


def test_algorithms_without_a_root():
    """A root for an algorithm without roots raises a PlanError that lists the algorithms with roots."""
    for algorithm in [name for name, entry in REGISTRY.items() if not entry.has_root]:
        text = rf"{algorithm} does not reduce on a root[\s\S]*root=cpu:1[\s\S]*one_device, hierarch"
        with pytest.raises(PlanError, match=text):
            cr.plan(SQUARE, algorithm=algorithm, root="cpu:1")


HALVES = Topology(names(4), [Link(*pair, 1) for half in (names(4)[:2], names(4)[2:]) for pair in (half, half[::-1])])


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_unreachable_devices_cannot_be_planned(collective):
    """The error names the collective, a device, the devices that it cannot reach, and the cut between them."""
    src, dst, inside = "cpu:0", "cpu:2, cpu:3", "cpu:0, cpu:1"
    if collective == "reduce":
        src, dst, inside = "cpu:2", "cpu:0", "cpu:2, cpu:3"
    root = "cpu:0" if collective in ("reduce", "broadcast") else None
    for algorithm in (*NAMED, "auto"):
        with pytest.raises(PlanError) as caught:
            cr.plan(HALVES, collective, 8, algorithm, root=root)
        first, *rest = str(caught.value).splitlines()
        assert first == f"{collective} needs a route from {src} to {dst}, but no link leads out of {{{inside}}}."
        assert rest[0] == f"  given: {HALVES!r}"
        assert "topology.subset" in rest[1]
        part = HALVES.subset(["cpu:2", "cpu:3"])
        assert cr.plan(part, collective, 8, algorithm).seconds > 0
