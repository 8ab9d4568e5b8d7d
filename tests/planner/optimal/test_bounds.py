"""Bounds equal the least rate that any cut allows and known rates; exactly the correct certificates are accepted."""

import itertools
import re
from dataclasses import replace
from fractions import Fraction

import planning_oracle
import pytest
from budget import examples
from groups_oracle import best_rate
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from planning_oracle import DIRECTED, LOOSE, LOPSIDED, ODD, SYMMETRIC, WHOLE, WILD, wirings

from crossreduce import ArgumentError, Link, PlanError, Topology, bound
from crossreduce.planning import Cut

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
    """Draw (topology, one-way collective, roots, members). The roots are ``None``, a device, or bytes by device."""
    topology = Topology(*draw(wirings(kinds, speeds, reducing=(False, True))))
    collective = draw(st.sampled_from(ONE_WAY))
    members = draw(st.one_of(st.none(), st.lists(st.sampled_from(topology.devices), min_size=2, unique=True)))
    roots = None
    if collective in ("broadcast", "reduce"):
        device = st.sampled_from(tuple(members or topology.devices))
        bytes_ = st.one_of(st.integers(1, 9), st.sampled_from([Fraction(1, 3), Fraction(7, 10), 10**15]))
        several = st.dictionaries(device, bytes_, min_size=1)
        roots = draw(st.one_of(device, several, st.dictionaries(device, st.just(1))))
        assume(roots)
    return topology, collective, roots, members


def even(topology):
    """Return whether all switches that only forward have as much bandwidth in as out."""
    forwarding = [switch.name for switch in topology.switches if not switch.reduces]
    return all(planning_oracle.width(topology, {s}) == planning_oracle.width(topology, {s}, False) for s in forwarding)


def weights(topology, roots, members):
    """Return the bytes of each root. ``roots`` are those of a request; without roots, all members have 1 byte."""
    if roots is None:
        return dict.fromkeys(members or topology.devices, ONE)
    return {roots: ONE} if isinstance(roots, str) else {root: Fraction(weight) for root, weight in roots.items()}


@examples(300)
@given(requests())
def test_one_way_bounds_are_what_every_cut_gives(ask):
    """The bound of a one-way collective is the least rate that a cut allows.

    It may be lower if a switch has different bandwidths in and out. If the rate is 0, an error names the cut.
    """
    topology, collective, roots, members = ask
    bytes_by_root, needed = weights(topology, roots, members), members or topology.devices
    wanted = planning_oracle.cut_bound(topology, bytes_by_root, outward(collective), needed)
    if not wanted:
        with pytest.raises(PlanError, match="needs a route from") as caught:
            bound(topology, collective, roots, members)
        check_names_a_cut(topology, needed, bytes_by_root, collective, str(caught.value))
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
    inside = sum(weight for root, weight in bytes_by_root.items() if root in cut.nodes)
    assert sum(bytes_by_root.values()) * planning_oracle.width(topology, cut.nodes, cut.outward) / inside == wanted


def check_names_a_cut(topology, needed, roots, collective, text):
    """Check that an error names a source, the nodes that it can reach, and the destinations that it cannot reach."""
    src, unreached, inside = re.search(r"from (\S+) to (.*), but no link leads out of {(.*)}", text).groups()
    inside, unreached = set(inside.split(", ")), set(unreached.split(", "))
    reached = planning_oracle.reachable(topology, src)
    assert inside in (reached, reached & set(topology.devices))  # with or without switches
    destinations = set(roots) if collective == "reduce" else set(needed)
    assert unreached
    assert unreached == destinations - inside


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
    # (machine, hosts, options, bound of all-gather and reduce-scatter, bound of broadcast and reduce, bound of
    # all-reduce if switches can reduce)
    ("dgx-1p", 1, {}, Fraction(640, 7), 80, Fraction(320, 7)),
    ("dgx-1v", 1, {}, Fraction(1200, 7), 150, Fraction(600, 7)),
    ("pcie-8", 1, {"speeds": "effective"}, Fraction(96, 7), 10, 10),
    ("nvlink-pairs-4", 1, {"speeds": "effective"}, 96, 48, 48),
    ("dgx-2", 1, {}, 160, 150, 150),
    ("dgx-a100", 1, {}, Fraction(2400, 7), 300, 300),
    ("hgx-h100", 1, {}, Fraction(3600, 7), 450, 450),
    ("hgx-b200", 1, {}, Fraction(7200, 7), 900, 900),
    ("mi250", 1, {}, Fraction(2400, 7), 300, Fraction(1200, 7)),
    ("mi300x", 1, {}, 512, 448, 256),
    ("ndv2", 2, {}, 25, Fraction(25, 2), Fraction(25, 2)),
    ("dgx-a100", 2, {}, Fraction(1040, 3), 200, 200),
    ("dgx-a100", 2, {"nics": "hdr"}, Fraction(1040, 3), 200, 200),
    ("hgx-h100", 2, {}, Fraction(1600, 3), 400, 400),
    ("ndv4", 4, {"nics": "hdr"}, Fraction(800, 3), 200, 200),
    ("hgx-h100", 4, {}, Fraction(16000, 31), 400, 400),
    ("hgx-h100", 128, {}, Fraction(51200, 127), 400, 400),
    ("mi250", 2, {"nics": "16-per-gcd"}, Fraction(5312, 15), 256, 182),
    ("tpu-v4", 1, {}, Fraction(6400, 21), 300, Fraction(3200, 21)),
    ("gb200-nvl72", 1, {}, Fraction(64800, 71), 900, 900),
]


@pytest.mark.parametrize("row", TABLE, ids=[f"{row[0]}-{row[1]}{row[2].get('nics', '')}" for row in TABLE])
def test_bounds_of_machines(row):
    """Bounds of machines are those that ForestColl's search has published; for an all-reduce, half of an all-gather."""
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
        assert len(found.tight_cut.intersection(topology.devices)) % 8 == 0  # the cut is around complete hosts


@pytest.mark.parametrize(
    ("topology", "rates"),  # in the order of COLLECTIVES
    [
        (Topology.ring(2, 5), (5, 5, 5, 10, 10)),
        (Topology.ring(7, 3), (Fraction(7, 2), 6, 6, 7, 7)),
        (Topology.full_mesh(5, 2), (5, 8, 8, 10, 10)),
        (Topology.star(4, 6), (4, 6, 6, 8, 8)),
        (Topology.mesh(4, 4), (Fraction(8, 5), 2, 2, Fraction(32, 15), Fraction(32, 15))),
        (line(3, 2, back=True), (2, 2, 2, Fraction(3), Fraction(3))),
        # A ring of one-way links: each reduction and each broadcast uses all links but one.
        (Topology(["cpu:0", "cpu:1", "cpu:2"],
                  [("cpu:0", "cpu:1", 4), ("cpu:1", "cpu:2", 4), ("cpu:2", "cpu:0", 4)]), (Fraction(3), 4, 4, 6, 6)),
    ],
)  # fmt: skip
def test_bounds_by_hand(topology, rates):
    """Bounds of small topologies are those that were computed on paper."""
    for collective, rate in zip(COLLECTIVES, rates, strict=True):
        assert bound(topology, collective).algbw == rate, collective


def test_one_device_has_no_bound():
    """If one device takes part, the rate is unlimited (``None``), and the certificate is empty."""
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
    assert bound(Topology.star(3, 6), "all_reduce").algbw == Fraction(9, 2)  # with a switch that only forwards


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ring", "all_reduce"), "there is no machine of this name"),
        ((DGX_1V, "gather"), r"no such collective.*\n.*'gather'"),
        ((DGX_1V, "all_reduce", "cuda:0"), "all_reduce has no root"),
        ((DGX_1V, "all_gather", {"cuda:0": 1}), "all_gather has no root"),
        ((DGX_1V, "broadcast", "cuda:8"), r"root must be a device that takes part.*\n.*cuda:8"),
        ((DGX_1V, "broadcast", "cuda:0", ["cuda:1", "cuda:2"]), "root must be a device that takes part"),
        *(((DGX_1V, "reduce", {"cuda:0": wrong}), "an int or a Fraction, 0 or more") for wrong in (-1, 0.5, True)),
        ((DGX_1V, "reduce", {"cuda:0": 0}), "at least one root must have more than 0 bytes"),
        ((DGX_1V, "reduce", {}), "at least one root must have more than 0 bytes"),
        ((DGX_1V, "all_reduce", None, ["cuda:9"]), "no such device"),
        ((DGX_1V, "all_reduce", None, []), "at least one device"),
    ],
)
def test_invalid_requests(arguments, words):
    """An invalid argument of ``bound`` raises an ArgumentError."""
    with pytest.raises(ArgumentError, match=words):
        bound(*arguments)


def proved(claim):
    """Return ``None`` if ``check`` accepts a bound, else the proved rate in its error, or -1 if that has no rate."""
    try:
        claim.check()
    except PlanError as error:
        found = re.search(r"GB/s claimed, (\S+) proved", str(error))
        return Fraction(found[1]) if found else Fraction(-1)
    return None


@st.composite
def forgeries(draw):
    """Draw a bound whose certificate has changed cuts, weights and potentials."""
    topology = Topology(*draw(wirings(ANY, WHOLE, most_devices=4, reducing=(False, True))))
    collective = draw(st.sampled_from(COLLECTIVES + COLLECTIVES[:1] * 3))  # all-reduces more often
    root = draw(st.sampled_from(topology.devices)) if collective in ("broadcast", "reduce") else None
    real = bound(topology, collective, root)
    nodes = st.sets(st.sampled_from(topology.nodes), min_size=1).map(frozenset)
    amounts = st.sampled_from([Fraction(n, d) for n in range(-2, 5) for d in (1, 2, 3)])
    cuts = list(real.cuts)
    for k in range(len(cuts)):
        what = draw(st.sampled_from(["keep", "keep", "drop", "move", "weight", "turn"]))
        node = draw(st.sampled_from(topology.nodes))
        cuts[k] = {
            "keep": lambda cut: cut,
            "drop": lambda cut: cut._replace(weight=Fraction(0)),
            "move": lambda cut, node=node: cut._replace(nodes=cut.nodes ^ {node}),
            "weight": lambda cut: cut._replace(weight=draw(amounts)),
            "turn": lambda cut: cut._replace(outward=not cut.outward),
        }[what](cuts[k])
    cuts += [Cut(draw(nodes), draw(amounts), draw(st.booleans())) for _ in range(draw(st.integers(0, 2)))]
    shifts = st.tuples(st.sampled_from([*topology.nodes, "nowhere"]), amounts, amounts)
    potentials = draw(st.one_of(st.just(real.potentials), st.lists(shifts, max_size=2).map(tuple)))
    return replace(real, cuts=tuple(cuts), potentials=potentials)


@examples(240, suppress_health_check=[HealthCheck.filter_too_much])
@given(forgeries())
def test_no_certificate_proves_a_false_bound(forged):
    """``check`` accepts no bound below the rate of the best trees, however its certificate is changed."""
    claimed = proved(forged)
    if claimed is not None:  # the certificate was rejected: claim the rate that it proves, if any
        assume(claimed >= 0)
        forged = replace(forged, algbw=claimed)
        assert proved(forged) is None
    members = tuple(device for device, _ in forged.roots) + forged.devices
    best = best_rate(forged.topology, forged.collective, tuple(dict.fromkeys(members)))
    assert float(forged.algbw) >= best * (1 - 1e-6)


@given(wirings(ANY, WHOLE + ODD, reducing=(False, True)), st.sampled_from(COLLECTIVES), st.integers(1, 10**12))
def test_a_changed_rate_is_refused(wiring, collective, part):
    """``check`` refuses a certificate whose rate was changed, even slightly."""
    real = bound(Topology(*wiring), collective)
    for factor in (1 + Fraction(1, part), 1 - Fraction(1, part), Fraction(2)):
        with pytest.raises(PlanError, match=r"does not prove the bound|given: .* claimed, .* proved"):
            replace(real, algbw=real.algbw * factor).check()


LOPSIDED_STAR = Topology(
    ["cpu:0", "cpu:1", "cpu:2"],
    [("cpu:0", "s", 4), ("s", "cpu:0", 3), ("cpu:1", "s", 2), ("s", "cpu:1", 3), ("s", "cpu:2", 1), ("cpu:2", "s", 1),
     ("cpu:0", "cpu:1", 1)],
    ["s"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda real: {"cuts": real.cuts[1:]}, "of at least 1"),
        (lambda real: {"cuts": tuple(cut._replace(weight=cut.weight / 2) for cut in real.cuts)}, "of at least 1"),
        (lambda real: {"cuts": tuple(cut._replace(weight=-cut.weight) for cut in real.cuts)}, "a weight of 0 or more"),
        (
            lambda real: {"cuts": tuple(cut._replace(nodes=cut.nodes | {*real.devices}) for cut in real.cuts)},
            "must leave out at least one of the devices",
        ),
        (lambda real: {"cuts": tuple(cut._replace(weight=cut.weight * 2) for cut in real.cuts)}, "does not prove"),
        (lambda real: {"potentials": (("cpu:0", ONE, ONE),)}, "must belong to switches that do not reduce"),
        (lambda real: {"potentials": (("s", Fraction(-5), Fraction(5)),)}, "does not prove"),
        (lambda real: {"algbw": None}, "algbw may be None only if one device takes part"),
        (lambda real: {"topology": real.topology.with_switches(reducing=True), "potentials": (("s", ONE, ONE),)},
         "must belong to switches that do not reduce"),
    ],
)  # fmt: skip
def test_a_broken_certificate_is_refused(change, words):
    """``check`` refuses missing cuts, changed weights, cuts of all devices, and wrong potentials."""
    real = bound(LOPSIDED_STAR, "all_reduce")
    real.check()
    with pytest.raises(PlanError, match=words):
        replace(real, **change(real)).check()


def test_a_certificate_applies_to_one_topology():
    """``check`` refuses a certificate for a topology with wider links, and for another collective."""
    for collective in COLLECTIVES:
        real = bound(DGX_1V, collective)
        wide = Topology(real.topology.devices, [link._replace(bandwidth=link.bandwidth * 2) for link in DGX_1V.links])
        with pytest.raises(PlanError, match="does not prove"):
            replace(real, topology=wide).check()
        with pytest.raises(PlanError, match=r"the cuts of|every device must be a root|the cuts that contain a root"):
            replace(real, collective="all_reduce" if collective != "all_reduce" else "all_gather").check()


@pytest.mark.parametrize("collective", ONE_WAY)
def test_cuts_that_prove_nothing_are_refused(collective):
    """``check`` refuses a cut in the wrong direction, no cut, and a cut that contains no root."""
    real = bound(line(3, 2, back=True), collective, "cpu:0" if collective in ("broadcast", "reduce") else None)
    root, right = frozenset({"cpu:0"}), outward(collective)
    for cuts, words in (
        ((Cut(root, ONE, not right),), f"the cuts of {collective} must have outward={right}"),
        ((), "the cuts must contain a root with more than 0 bytes"),
        ((Cut(frozenset({"x"}), ONE, right),), "the cuts must contain a root with more than 0 bytes"),
    ):
        with pytest.raises(PlanError, match=words):
            replace(real, cuts=cuts).check()


# In a broadcast from cpu:0, each cut allows 1 GB/s. But s receives 1 GB/s, so it sends half of it to each device.
FAN_OUT = Topology(
    ["cpu:0", "cpu:1", "cpu:2"],
    [("cpu:0", "s", 1), ("s", "cpu:1", 1), ("s", "cpu:2", 1), ("cpu:1", "cpu:0", 1), ("cpu:2", "cpu:0", 1)],
    ["s"],
)


@pytest.mark.parametrize(
    ("collective", "topology"), [("broadcast", FAN_OUT), ("reduce", FAN_OUT.reversed())], ids=["broadcast", "reduce"]
)
def test_a_missing_or_wrong_potential_is_refused(collective, topology):
    """A switch with more bandwidth out than in (in a reduce, in than out) needs a potential: a dual variable that moves
    price from links on this side of the switch to links on its other side. ``check`` refuses a missing or wrong one."""
    real = bound(topology, collective, "cpu:0")
    real.check()
    assert (real.algbw, len(real.cuts), len(real.potentials)) == (Fraction(1, 2), 2, 1)
    ((switch, down, up),) = real.potentials
    for potentials, words in (((), "does not prove"), (((switch, up, down),), "must be 0 in the direction")):
        with pytest.raises(PlanError, match=words):
            replace(real, potentials=potentials).check()
    with pytest.raises(PlanError, match="must belong to switches that do not reduce"):
        replace(real, topology=topology.with_switches(reducing=True)).check()
