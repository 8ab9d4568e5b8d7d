"""Certificates of bounds: exactly the correct ones are accepted."""

import re
from dataclasses import replace
from fractions import Fraction

import planning_oracle
import pytest
from budget import examples
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from planning_oracle import LOPSIDED, ODD, WHOLE, wirings
from test_bounds import ANY, COLLECTIVES, DGX_1V, ONE, ONE_WAY, line, outward

from crossreduce import PlanError, Topology, bound
from crossreduce.planning import Cut


def proved(claim):
    """Return the proved rate that the error of check states, -1 if it states none; None if check accepts the claim."""
    try:
        claim.check()
    except PlanError as error:
        found = re.search(r"GB/s claimed, (\S+) proved", str(error))
        return Fraction(found[1]) if found else Fraction(-1)
    return None


def truth(claim):
    """Return the real bound, in floating point."""
    if claim.collective == "all_reduce":
        return planning_oracle.all_reduce_bound(claim.topology)
    return planning_oracle.trees_bound(claim.topology, dict(claim.roots), outward(claim.collective))


@st.composite
def forgeries(draw, collectives, kinds=ANY, single=False):
    """Draw a bound with another certificate: one cut (``single``), or changed cuts, weights and potentials."""
    topology = Topology(*draw(wirings(kinds, WHOLE, most_devices=4, reducing=(False, True))))
    collective = draw(st.sampled_from(collectives))
    root = draw(st.sampled_from(topology.devices)) if collective in ("broadcast", "reduce") else None
    real = bound(topology, collective, root)
    nodes = st.sets(st.sampled_from(topology.nodes), min_size=1).map(frozenset)
    if single:
        return replace(real, cuts=(Cut(draw(nodes), draw(st.sampled_from([ONE, Fraction(3)])), outward(collective)),))
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


def check_is_sound(forged):
    claimed = proved(forged)
    if claimed is not None:  # the certificate was rejected: claim the rate that it proves, if any
        assume(claimed >= 0)
        forged = replace(forged, algbw=claimed)
        assert proved(forged) is None
    assert float(forged.algbw) >= truth(forged) * (1 - 1e-7)


@examples(200)
@given(forgeries(ONE_WAY, single=True))
def test_no_single_cut_proves_a_false_bound(forged):
    """Whichever set of nodes the certificate has, check accepts no rate below the least that any cut allows."""
    nodes = forged.cuts[0].nodes
    if set(forged.devices) <= nodes:
        with pytest.raises(PlanError, match="must leave out at least one of the devices"):
            forged.check()
        return
    assume(any(weight for root, weight in forged.roots if root in nodes))
    check_is_sound(forged)


@examples(120, suppress_health_check=[HealthCheck.filter_too_much])
@given(forgeries(COLLECTIVES[:1]))
def test_no_certificate_proves_a_false_all_reduce_bound(forged):
    """check accepts no rate below the optimum of a linear program of flows, whatever changes."""
    check_is_sound(forged)


@examples(120)
@given(forgeries(ONE_WAY, (LOPSIDED,)))
def test_no_certificate_proves_a_false_one_way_bound(forged):
    """check accepts no one-way rate below the optimum, at uneven switches too."""
    check_is_sound(forged)


@given(wirings(ANY, WHOLE + ODD, reducing=(False, True)), st.sampled_from(COLLECTIVES), st.integers(1, 10**12))
def test_a_changed_rate_is_refused(wiring, collective, part):
    """check refuses a certificate whose rate was changed, even slightly."""
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
        (lambda real: {"cuts": ()}, "of at least 1"),
        (lambda real: {"cuts": tuple(cut._replace(weight=cut.weight / 2) for cut in real.cuts)}, "of at least 1"),
        (lambda real: {"cuts": tuple(cut._replace(weight=-cut.weight) for cut in real.cuts)}, "a weight of 0 or more"),
        (
            lambda real: {"cuts": tuple(cut._replace(nodes=cut.nodes | {*real.devices}) for cut in real.cuts)},
            "must leave out at least one of the devices",
        ),
        (lambda real: {"cuts": tuple(cut._replace(weight=cut.weight * 2) for cut in real.cuts)}, "does not prove"),
        (lambda real: {"potentials": (("cpu:0", ONE, ONE),)}, "must belong to switches that do not reduce"),
        (lambda real: {"potentials": (("nowhere", ONE, ONE),)}, "must belong to switches that do not reduce"),
        (lambda real: {"potentials": (("s", Fraction(-5), Fraction(5)),)}, "does not prove"),
        (lambda real: {"algbw": None}, "algbw may be None only if one device takes part"),
        (lambda real: {"topology": real.topology.with_switches(reducing=True), "potentials": (("s", ONE, ONE),)},
         "must belong to switches that do not reduce"),
    ],
)  # fmt: skip
def test_a_broken_certificate_is_refused(change, words):
    """check refuses missing cuts, changed weights, cuts of all devices, and wrong potentials."""
    real = bound(LOPSIDED_STAR, "all_reduce")
    real.check()
    with pytest.raises(PlanError, match=words):
        replace(real, **change(real)).check()


def test_a_certificate_applies_to_one_topology():
    """check refuses a certificate for a topology with wider links, and for another collective."""
    for collective in COLLECTIVES:
        real = bound(DGX_1V, collective)
        wide = Topology(real.topology.devices, [link._replace(bandwidth=link.bandwidth * 2) for link in DGX_1V.links])
        with pytest.raises(PlanError, match="does not prove"):
            replace(real, topology=wide).check()
        with pytest.raises(PlanError, match=r"the cuts of|every device must be a root|the cuts that contain a root"):
            replace(real, collective="all_reduce" if collective != "all_reduce" else "all_gather").check()


@pytest.mark.parametrize("collective", ONE_WAY)
def test_cuts_that_prove_nothing_are_refused(collective):
    """check refuses a cut in the wrong direction, no cut, and a cut that contains no root."""
    real = bound(line(3, 2, back=True), collective, "cpu:0" if collective in ("broadcast", "reduce") else None)
    root, right = frozenset({"cpu:0"}), outward(collective)
    for cuts, words in (
        ((Cut(root, ONE, not right),), f"the cuts of {collective} must have outward={right}"),
        ((), "the cuts must contain a root with more than 0 bytes"),
        ((Cut(frozenset(), ONE, right),), "the cuts must contain a root with more than 0 bytes"),
        ((Cut(frozenset({"x"}), ONE, right),), "the cuts must contain a root with more than 0 bytes"),
    ):
        with pytest.raises(PlanError, match=words):
            replace(real, cuts=cuts).check()


# The cut of a broadcast from cpu:0 has 1 GB/s, but s can send to cpu:1 and cpu:2 only data that it receives.
FAN_OUT = Topology(
    ["cpu:0", "cpu:1", "cpu:2"],
    [("cpu:0", "s", 1), ("s", "cpu:1", 1), ("s", "cpu:2", 1), ("cpu:1", "cpu:0", 1), ("cpu:2", "cpu:0", 1)],
    ["s"],
)


@pytest.mark.parametrize(
    ("collective", "topology"), [("broadcast", FAN_OUT), ("reduce", FAN_OUT.reversed())], ids=["broadcast", "reduce"]
)
def test_potentials_of_one_way_certificates(collective, topology):
    """A switch with more bandwidth out than in needs a potential; a missing or wrong one is refused."""
    real = bound(topology, collective, "cpu:0")
    real.check()
    assert (real.algbw, len(real.cuts), len(real.potentials)) == (Fraction(1, 2), 2, 1)
    ((switch, down, up),) = real.potentials
    for potentials, words in (((), "does not prove"), (((switch, up, down),), "must be 0 in the direction")):
        with pytest.raises(PlanError, match=words):
            replace(real, potentials=potentials).check()
    with pytest.raises(PlanError, match="must belong to switches that do not reduce"):
        replace(real, topology=topology.with_switches(reducing=True)).check()
