"""The number of pieces that ``pipelined`` chooses."""

from dataclasses import replace
from fractions import Fraction

from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import algorithms, names
from test_simulate import MICRO, chain, line

from crossreduce import Topology, simulate
from crossreduce.planning import PLANNERS
from crossreduce.schedule import pipelined
from crossreduce.schedule.simulate import LEAST_PIECE


def fastest(schedule, topology, nbytes, most=64):
    """Return the least simulated time over all numbers of pieces up to ``most`` with which a piece of an average chunk
    has at least LEAST_PIECE bytes, and over 1."""
    allowed = max(1, nbytes // len(schedule.chunks) // LEAST_PIECE)
    return min(
        simulate(replace(schedule, pieces=p), topology, nbytes).seconds for p in range(1, min(most, allowed) + 1)
    )


@examples(40)
@given(st.integers(2, 40), st.sampled_from([0, 1e-7, 1e-6, 1e-5]), st.sampled_from([1, 25, 450]), st.integers(0, 10**8))
def test_a_chain_is_cut_into_the_best_number_of_pieces(n, latency, speed, nbytes):
    """On a chain, no number of pieces up to 64, each of at least LEAST_PIECE bytes, is faster than the chosen one."""
    topology = line(n, speed, Fraction(latency))
    best, seconds = pipelined(chain(n), topology, nbytes)
    assert replace(best, pieces=1) == chain(n)
    assert seconds == simulate(best, topology, nbytes).seconds
    assert seconds <= fastest(chain(n), topology, nbytes) * (1 + 1e-9)


def test_plans_are_cut_into_the_best_number_of_pieces():
    """For the planners' schedules, no number of pieces that ``fastest`` tries is faster than the chosen one."""
    dgx = Topology.machine("dgx-1v").renamed(names(8))
    latent = Topology(dgx.devices, [link._replace(latency_s=MICRO) for link in dgx.links])
    for algorithm, packs, topology, nbytes in (
        ("ring", 1, Topology.ring(8, 25, MICRO), 10**8),
        ("direct", 2, Topology.star(8, 450, MICRO), 10**7),
        ("one_device", 8, dgx, 10**9),
        ("hierarchical_copy", 8, latent, 10**5),
        ("hierarchical_copy", 8, latent, 10**9),
        ("halving_doubling", 3, Topology.full_mesh(4, 450, Fraction(9, 10**6)), 46_274_461),
        ("hierarchical_copy", 3, Topology.full_mesh(8, 1, Fraction(158, 10**8)), 39_739),
    ):
        schedule = PLANNERS[algorithm](topology.devices, packs=packs)
        best, seconds = pipelined(schedule, topology, nbytes)
        assert seconds == simulate(best, topology, nbytes).seconds
        assert seconds <= fastest(schedule, topology, nbytes, 24) * (1 + 1e-9)


@given(algorithms, st.integers(1, 6), st.integers(0, 10**6), st.integers(1, 4))
def test_no_piece_is_too_small(algorithm, n, nbytes, packs):
    """If an average chunk is cut, its pieces have at least LEAST_PIECE bytes; the number of pieces of the given
    schedule has no effect."""
    schedule = PLANNERS[algorithm](names(n), packs=packs)
    best, seconds = pipelined(replace(schedule, pieces=77), Topology.full_mesh(n), nbytes)
    assert (best, seconds) == pipelined(schedule, Topology.full_mesh(n), nbytes)
    assert best.pieces == 1 or nbytes / len(schedule.chunks) / best.pieces >= LEAST_PIECE
