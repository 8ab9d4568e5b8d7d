"""The linear program of the best all-reduce: its rate is that of ``planning_oracle.all_reduce_bound``, a program
of flows instead of cuts, and its solution is checked in exact fractions."""

from fractions import Fraction

import planning_oracle
import pytest
from budget import examples
from hypothesis import assume, example, given
from hypothesis import strategies as st
from planning_oracle import BINARY, DECIMAL, DIRECTED, LOPSIDED, ODD, SYMMETRIC, WHOLE, WILD, Wiring, both_ways, wirings

from crossreduce import Link, Topology, bound
from crossreduce.planning.optimal.bounds.linear_program import optimum

ANY = (SYMMETRIC, DIRECTED, LOPSIDED)
DGX_1V = Topology.machine("dgx-1v")


# Bandwidths that are the exact values of the floats 0.1, 0.3 and 12.5: 0.1 + 0.1 + 0.1 is 0.3 + 3e-17.
NEARLY = Wiring(
    ("cpu:0", "cpu:1", "cpu:2"),
    (("cpu:0", "cpu:1", Fraction(0.1)), ("cpu:1", "cpu:0", Fraction(0.1)), ("cpu:2", "cpu:0", Fraction(0.3)),
     ("cpu:0", "cpu:2", Fraction(12.5))),
    (),
)  # fmt: skip


def near(rate):
    return pytest.approx(rate, rel=1e-6, abs=0)


def leaving(used, inside):
    return sum(rate for (src, dst), rate in used.items() if src in inside and dst not in inside)


def check_solution(topology, found):
    """Check that a solution is feasible: no link is overloaded, the links out of each set of nodes that lacks a device
    carry the rates of the roots in the set, and the rates into and out of a switch that cannot reduce are equal."""
    assert found.reached == sum(found.roots.values())
    assert min([*found.roots.values(), *found.down.values(), *found.up.values()]) >= 0
    for link in topology.links:
        pair = link.src, link.dst
        assert found.down[pair] + found.up[pair] <= link.bandwidth
    back = {(dst, src): rate for (src, dst), rate in found.up.items()}
    for used in (found.down, back):
        for switch, reduces in topology.switches:
            entering = leaving(used, {node for node in topology.nodes if node != switch})
            assert reduces or entering == leaving(used, {switch})
        for inside in planning_oracle.subsets(topology.nodes):
            if not inside >= set(topology.devices):
                assert leaving(used, inside) >= sum(found.roots.get(node, 0) for node in inside)


def check_exact(topology):
    """Check a solution and its proof, which have the same rate, so both are optimal."""
    found = optimum(topology)
    assert found.reached == found.rate
    check_solution(topology, found)
    bound(topology, "all_reduce").check()


@examples(150)
@given(wirings(ANY, WHOLE + ODD, reducing=(False, True)))
def test_the_rate_is_that_of_the_flow_program(wiring):
    """On any connected topology the rate is the oracle's, the solution reaches it exactly, and its proof is valid."""
    topology = Topology(*wiring)
    assert float(optimum(topology).rate) == near(planning_oracle.all_reduce_bound(topology))
    check_exact(topology)


@example(both_ways("0-1 1/8, 0-2 1/10, 0-3 5000, 2-4 1/8"))  # the result is 7/60 instead of 1/10
@example(both_ways("0-1 1/8, 0-2 1/10, 0-3 5000, 1-4 1/8"))  # the rate is 1/10, but the solution reaches only 1/16
@examples(60)
@given(wirings(ANY, DECIMAL, reducing=(False, True)))
def test_decimal_bandwidths(wiring):
    """The rate is right, reached and proved also for decimal bandwidths that differ by a factor of up to 50,000."""
    check_exact(Topology(*wiring))


# Refinement once stopped at a wrong solution for these links: some are equal except for 1e-17, and one is far wider.
STOPPED = Wiring(
    tuple(f"cpu:{k}" for k in range(5)),
    tuple(
        (f"cpu:{a}", f"cpu:{b}", Fraction(speed))
        for a, b, speed in (
            (0, 1, "0.3"), (0, 2, "0.1"), (0, 3, "1e-9"), (1, 0, "12.5"), (1, 3, "0.3"), (1, 4, "12.5"),
            (2, 0, "10555311661833971698207/35184372088832000000000"), (2, 4, "88270552696461721/54043195528445952"),
            (3, 0, "5000"), (3, 4, "10000000019000000001/1000000000"), (4, 3, 0.1),
        )
    ),
    (),
)  # fmt: skip


# The solution of HiGHS, rounded to fractions, violates a constraint by 1e-17.
DISCARDED = Wiring(
    tuple(f"cpu:{k}" for k in range(5)),
    tuple(
        link
        for a, b, speed in (
            ("cpu:0", "cpu:1", Fraction(0.1)), ("cpu:1", "cpu:2", Fraction(0.1) + Fraction(0.3)),
            ("cpu:1", "cpu:3", Fraction(0.3)), ("cpu:2", "cpu:4", Fraction(46.7)), ("s", "cpu:1", Fraction(46.7)),
            ("s", "cpu:2", 25), ("cpu:0", "cpu:4", Fraction(12.5)), ("s", "cpu:4", Fraction(0.1)),
            ("cpu:3", "s", Fraction(59.2)), ("cpu:4", "cpu:1", Fraction(0.3)),
        )
        for link in ((a, b, speed), (b, a, speed))
    ),
    (("s", True),),
)  # fmt: skip


@example(STOPPED)
@example(NEARLY)
@example(DISCARDED)
@examples(60)
@given(wirings(ANY, BINARY + DECIMAL + WILD, reducing=(False, True)))
def test_bandwidths_of_many_digits(wiring):
    """The rate is exact for bandwidths that are the values of floats, or differ by a factor of up to 1e19."""
    check_exact(Topology(*wiring))


BYTES = st.one_of(st.integers(1, 9), st.sampled_from([Fraction(1, 3), Fraction(7, 10), 10**15])).map(Fraction)
LEFT_OUT = 10**9  # HiGHS leaves out coefficients below 1e-9 (its option small_matrix_value)


@examples(80)
@given(wirings((LOPSIDED,), WHOLE + ODD), st.data())
def test_broadcasts_of_weighted_roots(wiring, data):
    """Broadcasts of weighted roots have the greatest rate of any trees, which is proved."""
    topology = Topology(*wiring)
    weights = data.draw(st.dictionaries(st.sampled_from(range(len(topology.devices))), BYTES, min_size=1))
    found = optimum(topology, tuple(weights.items()))
    check_broadcasts(topology, weights, found)
    named = {topology.devices[k]: weight for k, weight in weights.items()}
    assert float(found.rate) == near(planning_oracle.trees_bound(topology, named, outward=True))


@examples(60)
@given(wirings((LOPSIDED,), BINARY + DECIMAL + WILD, reducing=(False, True)), st.data())
def test_broadcasts_with_bandwidths_of_many_digits(wiring, data):
    """So they have for bandwidths far apart, if HiGHS leaves no coefficient out."""
    topology = Topology(*wiring)
    weights = data.draw(st.dictionaries(st.sampled_from(range(len(topology.devices))), BYTES, min_size=1))
    found = optimum(topology, tuple(weights.items()))
    if max(weights.values()) > LEFT_OUT * min(weights.values()):
        assume(found.reached == found.rate)
    check_broadcasts(topology, weights, found)


def check_broadcasts(topology, weights, found):
    """Check a use of links, and the proof that no other one is better."""
    used = found.down
    assert (used.keys(), found.up) == ({(link.src, link.dst) for link in topology.links}, {})
    for (src, dst), rate in used.items():
        assert 0 <= rate <= topology.link(src, dst).bandwidth
    for switch, reduces in topology.switches:
        assert reduces or leaving(used, {switch}) == leaving(used, {node for node in topology.nodes if node != switch})
    named = {topology.devices[k]: weight for k, weight in weights.items()}
    links = [Link(*pair, rate) for pair, rate in used.items() if rate]
    left = Topology.unchecked(topology.devices, links, topology.switches)
    assert planning_oracle.cut_bound(left, named, outward=True) >= found.reached == found.rate
    limit = bound(topology, "broadcast", named)
    assert limit.algbw == found.rate
    limit.check()
