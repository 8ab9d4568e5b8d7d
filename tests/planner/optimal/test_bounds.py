"""Bounds on the rates of collectives equal the least rate that any cut allows, and the known rates of machines."""

import itertools
import re
from fractions import Fraction

import planning_oracle
import pytest
from budget import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_oracle import DIRECTED, LOOSE, LOPSIDED, ODD, SYMMETRIC, WHOLE, WILD, wirings

from crossreduce import ArgumentError, Link, PlanError, Topology, bound

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
ONE_WAY = COLLECTIVES[1:]
ONE = Fraction(1)
ANY = (SYMMETRIC, DIRECTED, LOPSIDED)
DGX_1V = Topology.machine("dgx-1v")


def line(*speeds, back=False):
    """Return devices in a line, linked in one direction or in both."""
    devices = [f"cpu:{k}" for k in range(len(speeds) + 1)]
    links = [Link(a, b, speed) for (a, b), speed in zip(itertools.pairwise(devices), speeds, strict=True)]
    return Topology(devices, links + [Link(b, a, speed) for a, b, speed, _ in links] * back)


def outward(collective):
    return collective in ("broadcast", "all_gather")


@st.composite
def requests(draw, kinds=(*ANY, LOOSE), speeds=WHOLE + ODD + WILD):
    """Draw a topology, a one-way collective, its roots (None, one, or several with bytes) and the members."""
    topology = Topology(*draw(wirings(kinds, speeds, reducing=(False, True))))
    collective = draw(st.sampled_from(ONE_WAY))
    members = draw(st.one_of(st.none(), st.lists(st.sampled_from(topology.devices), min_size=2, unique=True)))
    roots = None
    if collective in ("broadcast", "reduce"):
        device = st.sampled_from(tuple(members or topology.devices))
        bytes_ = st.one_of(st.integers(1, 9), st.sampled_from([Fraction(1, 3), Fraction(7, 10), 10**15]))
        roots = draw(
            st.one_of(device, st.dictionaries(device, bytes_, min_size=1), st.dictionaries(device, st.just(1)))
        )
        assume(roots)
    return topology, collective, roots, members


def even(topology):
    """Return whether all switches that only forward have as much bandwidth in as out."""
    forwarding = [switch.name for switch in topology.switches if not switch.reduces]
    return all(planning_oracle.width(topology, {s}) == planning_oracle.width(topology, {s}, False) for s in forwarding)


def weights(topology, roots, members):
    """Return the bytes of each root."""
    if roots is None:
        return dict.fromkeys(members or topology.devices, ONE)
    return {roots: ONE} if isinstance(roots, str) else {root: Fraction(weight) for root, weight in roots.items()}


@examples(300)
@given(requests())
def test_one_way_bounds_are_what_every_cut_gives(ask):
    """The bound is the least rate that a cut allows, or less at uneven switches; 0 is an error."""
    topology, collective, roots, members = ask
    given_, needed = weights(topology, roots, members), members or topology.devices
    wanted = planning_oracle.cut_bound(topology, given_, outward(collective), needed)
    if not wanted:
        with pytest.raises(PlanError, match="needs a route from") as caught:
            bound(topology, collective, roots, members)
        check_names_a_cut(topology, needed, given_, collective, str(caught.value))
        return
    found = bound(topology, collective, roots, members)
    assert isinstance(found.algbw, Fraction)
    found.check()
    if not even(topology):
        assert found.algbw <= wanted
        return
    assert found.algbw == wanted
    (cut,) = found.cuts
    assert found.tight_cut == cut.nodes
    assert not set(needed) <= cut.nodes
    inside = sum(weight for root, weight in given_.items() if root in cut.nodes)
    assert sum(given_.values()) * planning_oracle.width(topology, cut.nodes, cut.outward) / inside == wanted


def check_names_a_cut(topology, needed, roots, collective, text):
    """Check that a message names a device, the nodes that it can reach, and the destinations that it cannot."""
    src, beyond, inside = re.search(r"from (\S+) to (.*), but no link leads out of {(.*)}", text).groups()
    inside, beyond = set(inside.split(", ")), set(beyond.split(", "))
    reached = planning_oracle.reachable(topology, src)
    assert inside in (reached, reached & set(topology.devices))
    destinations = set(roots) if collective == "reduce" else set(needed)
    assert beyond == destinations - inside
    assert beyond


def test_the_cut_that_is_named_has_its_switches():
    """The set that an error names includes the switches that can be reached."""
    topology = Topology(["cpu:0", "cpu:1"], [("cpu:0", "s", 1), ("cpu:1", "cpu:0", 1)], ["s"])
    with pytest.raises(PlanError, match=r"from cpu:0 to cpu:1, but no link leads out of {cpu:0, s}"):
        bound(topology, "all_gather")


@examples(60)
@given(wirings(ANY, WHOLE + ODD, reducing=(False, True)), st.sampled_from(["broadcast", "reduce"]))
def test_without_a_root_the_best_is_taken(wiring, collective):
    """With root=None the bound is the greatest over all roots, and it names that root."""
    topology = Topology(*wiring)
    best = max(bound(topology, collective, root).algbw for root in topology.devices)
    found = bound(topology, collective)
    assert found.algbw == best
    ((root, weight),) = found.roots
    assert (bound(topology, collective, root).algbw, weight) == (best, 1)
    found.check()


TABLE = [
    # machine, hosts, options, and the bounds of: all-gather and reduce-scatter; broadcast and reduce; all-reduce if
    # switches can reduce
    ("dgx-1p", 1, {}, Fraction(640, 7), 80, Fraction(320, 7)),
    ("dgx-1v", 1, {}, Fraction(1200, 7), 150, Fraction(600, 7)),
    ("pcie-8", 1, {"speeds": "effective"}, Fraction(96, 7), 10, 10),
    ("nvlink-pairs-4", 1, {"speeds": "effective"}, 96, 48, 48),
    ("dgx-2", 1, {}, 160, 150, 150),
    ("dgx-a100", 1, {}, Fraction(2400, 7), 300, 300),
    ("hgx-h100", 1, {}, Fraction(3600, 7), 450, 450),
    ("hgx-h200", 1, {}, Fraction(3600, 7), 450, 450),
    ("hgx-b200", 1, {}, Fraction(7200, 7), 900, 900),
    ("mi250", 1, {}, Fraction(2400, 7), 300, Fraction(1200, 7)),
    ("mi300x", 1, {}, 512, 448, 256),
    ("ndv2", 2, {}, 25, Fraction(25, 2), Fraction(25, 2)),
    ("dgx-a100", 2, {}, Fraction(1040, 3), 200, 200),
    ("hgx-h100", 2, {}, Fraction(1600, 3), 400, 400),
    ("ndv4", 4, {"nics": "hdr"}, Fraction(800, 3), 200, 200),
    ("hgx-h100", 4, {}, Fraction(16000, 31), 400, 400),
    ("hgx-h100", 32, {}, Fraction(12800, 31), 400, 400),
    ("hgx-h100", 128, {}, Fraction(51200, 127), 400, 400),
    ("mi250", 2, {"nics": "16-per-gcd"}, Fraction(5312, 15), 256, 182),
    ("tpu-v4", 1, {}, Fraction(6400, 21), 300, Fraction(3200, 21)),
    ("gb200-nvl72", 1, {}, Fraction(64800, 71), 900, 900),
]


@pytest.mark.parametrize("row", TABLE, ids=[f"{row[0]}-{row[1]}" for row in TABLE])
def test_bounds_of_machines(row):
    """Bounds of machines are those of ForestColl's published search; an all-reduce has half, or more by switches."""
    name, hosts, options, gather, single, in_network = row
    topology = Topology.machine(name, hosts, **options)
    wanted = dict(zip(COLLECTIVES, (Fraction(gather) / 2, single, single, gather, gather), strict=True))
    for collective, rate in wanted.items() if hosts < 32 else [("all_gather", gather)]:
        found = bound(topology, collective)
        assert found.algbw == rate
        found.check()
    if hosts < 32:
        found = bound(topology.with_switches(reducing=True), "all_reduce")
        assert found.algbw == in_network
        found.check()
    else:
        assert len(found.tight_cut.intersection(topology.devices)) % 8 == 0


@pytest.mark.parametrize(
    ("topology", "rates"),
    [
        (Topology.ring(2, 5), (5, 5, 5, 10, 10)),
        (Topology.ring(7, 3), (Fraction(7, 2), 6, 6, 7, 7)),
        (Topology.full_mesh(5, 2), (5, 8, 8, 10, 10)),
        (Topology.star(4, 6), (4, 6, 6, 8, 8)),
        (Topology.mesh(4, 4), (Fraction(8, 5), 2, 2, Fraction(32, 15), Fraction(32, 15))),
        (Topology.mesh(5, 5), (Fraction(5, 3), 2, 2, Fraction(25, 12), Fraction(25, 12))),
        (line(3, 2, back=True), (2, 2, 2, Fraction(3), Fraction(3))),
        # A ring of one-way links: each reduction and each broadcast uses all links but one.
        (
            Topology(
                ["cpu:0", "cpu:1", "cpu:2"], [("cpu:0", "cpu:1", 4), ("cpu:1", "cpu:2", 4), ("cpu:2", "cpu:0", 4)]
            ),
            (Fraction(3), 4, 4, 6, 6),
        ),
    ],
)
def test_bounds_by_hand(topology, rates):
    """Small wirings have the bounds that can be computed on paper."""
    for collective, rate in zip(COLLECTIVES, rates, strict=True):
        assert bound(topology, collective).algbw == rate, collective


def test_one_device_has_no_bound():
    """If no data has to move, the rate is unlimited and needs no proof."""
    for collective in COLLECTIVES:
        for devices, topology in ((None, Topology(["cpu:0"], [])), (["cuda:3"], DGX_1V)):
            found = bound(topology, collective, devices=devices)
            assert (found.algbw, found.cuts, found.tight_cut) == (None, (), frozenset())
            found.check()


def test_members_may_have_others_between_them():
    """Devices that are not members may forward and combine data, but are not roots."""
    topology = line(3, 2, back=True)
    found = bound(topology, "all_gather", devices=["cpu:0", "cpu:2"])
    assert (found.algbw, found.devices) == (4, ("cpu:0", "cpu:2"))
    assert found.roots == (("cpu:0", ONE), ("cpu:2", ONE))
    star = Topology(["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
                    [link for k in "123" for link in (("cpu:0", f"cpu:{k}", 6), (f"cpu:{k}", "cpu:0", 6))])  # fmt: skip
    assert bound(star, "all_reduce", devices=["cpu:1", "cpu:2", "cpu:3"]).algbw == 6  # cpu:0 combines data, like NVLS
    assert bound(Topology.star(3, 6), "all_reduce").algbw == Fraction(9, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ring", "all_reduce"), "there is no machine of this name"),
        ((DGX_1V, "gather"), r"no such collective.*\n.*'gather'"),
        ((DGX_1V, "all_reduce", "cuda:0"), "all_reduce has no root"),
        ((DGX_1V, "all_gather", {"cuda:0": 1}), "all_gather has no root"),
        ((DGX_1V, "broadcast", "cuda:8"), r"root must be a device that takes part.*\n.*cuda:8"),
        ((DGX_1V, "broadcast", "cuda:0", ["cuda:1", "cuda:2"]), "root must be a device that takes part"),
        ((DGX_1V, "reduce", {"cuda:0": -1}), "must be an int or a Fraction, 0 or more"),
        ((DGX_1V, "reduce", {"cuda:0": 0.5}), "must be an int or a Fraction, 0 or more"),
        ((DGX_1V, "reduce", {"cuda:0": True}), "must be an int or a Fraction, 0 or more"),
        ((DGX_1V, "reduce", {"cuda:0": 0}), "at least one root must have more than 0 bytes"),
        ((DGX_1V, "reduce", {}), "at least one root must have more than 0 bytes"),
        ((DGX_1V, "all_reduce", None, ["cuda:9"]), "no such device"),
        ((DGX_1V, "all_reduce", None, []), "at least one device"),
    ],
)
def test_invalid_requests(arguments, words):
    """An invalid argument raises an ArgumentError that shows it."""
    with pytest.raises(ArgumentError, match=words):
        bound(*arguments)
