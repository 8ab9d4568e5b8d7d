"""The use of links over time agrees with the simulated transfers, one by one."""

import numpy as np
import pytest

import crossreduce as cr
from crossreduce import Costs, Topology
from crossreduce.schedule import timeline
from crossreduce.schedule.link_use import link_use

CASES = {
    "ring": ("dgx-1v", "ring", 1 << 26),
    "many equal ticks": ("dgx-1v", "forest", 1 << 30),
    "switches": ("hgx-h100", "hierarchical_copy", 1 << 22),
    "latency only": ("dgx-1v", "one_shot", 64),
}


@pytest.mark.parametrize("name", CASES)
def test_against_single_transfers(name):
    """Up to each moment, a link has carried the bytes that its simulated transfers have carried until then. If the
    clock computes equal ticks at once, the difference is at most one piece."""
    machine, algorithm, nbytes = CASES[name]
    plan = cr.plan(machine, nbytes=nbytes, algorithm=algorithm)
    schedule, topology, costs = plan.schedule, plan.topology, plan.request.costs
    due, count = {}, {}
    moments = np.linspace(0, plan.seconds, 64 + 1)  # the ends of 64 equal parts
    for move in timeline(schedule, topology, nbytes, costs=costs):
        size = float(schedule.chunks[move.chunk].share) * nbytes / schedule.pieces
        start = move.start + move.latency_s
        for pair in move.links:
            arrived = np.clip((moments - start) / max(move.end - start, 1e-18), 0, 1)  # the fraction of its bytes
            due[pair] = due.get(pair, 0) + size * arrived
            count[pair] = count.get(pair, 0) + 1
    piece = nbytes / schedule.pieces if schedule.pieces > 1 else 0
    for parts in (1, 64):
        uses = link_use(schedule, topology, nbytes, plan.seconds, parts, costs)
        assert set(uses) == set(due)
        for pair, use in uses.items():
            assert use.transfers == count[pair]
            assert use.carried[0] == 0
            assert use.carried[-1] == pytest.approx(plan.simulation.bytes[pair], abs=max(4, nbytes * 1e-7))
            assert np.abs(use.carried - due[pair][:: 64 // parts]).max() <= piece + nbytes * 1e-6
            assert (np.diff(use.carried) >= 0).all()
    nothing = link_use(schedule, topology, nbytes=0, seconds=0.0, parts=10, costs=costs)
    assert all(use.carried == (0,) * 11 for use in nothing.values())


def test_no_link_exceeds_its_bandwidth():
    """In no part of the time a link carries more than its bandwidth allows, also with costs besides the links."""
    topology, parts = Topology.machine("hgx-h100", 2), 100
    plan = cr.plan(topology, nbytes=1 << 24, costs=Costs.machine("hgx-h100", 2))
    for pair, use in link_use(plan.schedule, topology, plan.nbytes, plan.seconds, parts, plan.request.costs).items():
        most = float(topology.link(*pair).bandwidth) * 1e9 * plan.seconds / parts
        assert np.diff(use.carried).max() <= most * (1 + 1e-6)
