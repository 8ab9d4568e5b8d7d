"""Exported plans: rank k is the k-th device of the topology, and files fit sizes that users have."""

import json
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from xml.etree import ElementTree

import pytest
from pairs import pairs

import crossreduce as cr
from crossreduce import planning
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.planning.granularity import is_power_of_two, round_shares
from crossreduce.schedule import fluid_rate, verify
from crossreduce.schedule.traffic import route_links

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")


def traffic_of_xml(text):
    """Return for each pair of ranks the part of the buffer that one sends to the other."""
    algo = ElementTree.fromstring(text)
    sent, units = Counter(), int(algo.get("nchunksperloop"))
    for gpu in algo:
        for block in gpu:
            for step in block:
                if step.get("type") in ("s", "rcs", "rrs", "rrcs"):
                    sent[int(gpu.get("id")), int(block.get("send"))] += Fraction(int(step.get("cnt")), units)
    return sent


def rate_of(sent, topology):
    """Return the rate of the busiest link if rank k is the k-th device of the topology."""
    busy = Counter()
    for (src, dst), part in sent.items():
        for pair in route_links(topology, topology.devices[src], topology.devices[dst], None):
            busy[pair] += part
    return min(topology.by_ends[pair].bandwidth / part for pair, part in busy.items())


@pytest.mark.parametrize(
    "name", ["nvlink-pairs-4", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dgx-1v", "mi250", "hgx-h100"))]
)
def test_rank_k_is_the_kth_device(name):
    """For every collective and root, the file on these devices has the predicted rate."""
    topology, checked = cr.Topology.machine(name), 0
    n = len(topology.devices)
    for collective, root in product(COLLECTIVES, [topology.devices[k] for k in (0, n // 2, n - 1)]):
        if collective not in ("reduce", "broadcast") and root != topology.devices[0]:
            continue
        given = root if collective in ("reduce", "broadcast") else None
        for algorithm in ("auto", "direct"):
            plan = cr.plan(topology, collective, 1 << 28, algorithm, root=given, operation_s=0, granularity=0.02)
            assert plan.ranks == topology.devices
            # Two pieces have the same way as all others; a file of many takes long to write and to prove.
            schedule = replace(plan.schedule, pieces=min(plan.schedule.pieces, 2))
            if not schedule.routes:
                assert rate_of(traffic_of_xml(to_msccl_xml(schedule)), topology) == plan.rate, (collective, root)
                checked += 1
    assert checked >= n


def test_most_plans_have_a_power_of_two_of_chunks():
    """Of small machines x collectives at 256 MiB, at least 95 %; the rate is within the tolerance."""
    names = ("dgx-1v", "mi250", "mi300x", "hgx-h100", "epyc-numa-8", "pcie-8")
    outcomes = []
    for name, collective in pairs(names, COLLECTIVES)[::2]:
        exact = cr.plan(name, collective, 1 << 28, operation_s=0)
        plan = cr.plan(name, collective, 1 << 28, operation_s=0, granularity=0.02)
        verify(plan.schedule)
        assert plan.rate >= exact.rate * Fraction(98, 100)
        assert sum(chunk.share for chunk in plan.schedule.chunks) == 1
        assert plan.schedule.pieces == exact.schedule.pieces
        outcomes.append(is_power_of_two(plan.schedule.units))
    assert sum(outcomes) >= 0.95 * len(outcomes)


def test_shares_stay_exact_where_none_fit():
    """A tolerance of 0 changes nothing, nor does a number of ranks that no power of two is a multiple of."""
    plan = cr.plan("dgx-1v", "all_reduce", 1 << 28, operation_s=0)
    assert plan.schedule.units == 48
    ring = cr.Topology.ring(6, gb_per_s=25)
    parts = cr.plan(ring, "reduce_scatter", 1 << 28, granularity=0.5).schedule
    assert not is_power_of_two(parts.units)
    whole = planning.ring(ring.devices)
    assert round_shares(whole, ring, 0.00001) is whole
    loose = round_shares(whole, ring, 0.2)
    assert (loose.units, len(loose.chunks)) == (2, 2)
    assert fluid_rate(loose, ring) >= fluid_rate(whole, ring) * Fraction(8, 10)
    for wrong in (-0.1, 1.5, "2", True, float("nan")):
        with pytest.raises(cr.ArgumentError, match="granularity must be the part of the rate"):
            cr.plan(ring, granularity=wrong)


def test_the_command_line(printed, crossreduce, tmp_path):
    """An exported file has a map of its ranks beside it; sizes that do not fit are reported there and by ``verify``."""
    line = ("export", "dgx-1v", tmp_path / "a.xml")
    text = printed(*line)
    assert "  ranks     0 cuda:0, 1 cuda:1," in text
    about = json.loads((tmp_path / "a.xml.ranks.json").read_text())
    units = about["elements_multiple_of"]
    ranks = [f"cuda:{k}" for k in range(8)]
    assert about == {"file": "a.xml", "ranks": ranks, "root": None, "elements_multiple_of": units}
    assert is_power_of_two(units)
    assert f"multiple of {units}\n" in text
    assert f"multiple of {units}\n" in printed("verify", tmp_path / "a.xml")
    text = printed(*line, "--granularity", "0")
    warning = re.search("multiple of ([0-9]+), WHICH IS NOT A POWER OF TWO", text)
    assert not is_power_of_two(int(warning[1]))
    assert warning[0] in printed("verify", tmp_path / "a.xml")
    code, _, error = crossreduce("export", "dgx-1v", "a.xml", "--granularity", "-1")
    assert (code, "--granularity must be a percentage" in error) == (2, True)
