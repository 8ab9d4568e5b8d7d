"""Plans with rounded shares, so that sizes of messages fit exported plans, and the ranks of these plans."""

import json
import re
from fractions import Fraction

import pytest
from pairs import pairs

import crossreduce as cr
from crossreduce import planning
from crossreduce.planning.granularity import is_power_of_two, round_shares
from crossreduce.schedule import fluid_rate, verify

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")


def test_most_plans_have_a_power_of_two_of_chunks():
    """With granularity 0.02, 95 % of plans have a power of two of units, and all have 98 % of the exact rate."""
    names = ("dgx-1v", "mi250", "mi300x", "hgx-h100", "epyc-numa-8", "pcie-8")
    outcomes = []
    for name, collective in pairs(names, COLLECTIVES)[::2]:
        exact = cr.plan(name, collective, 1 << 28, operation_s=0)
        plan = cr.plan(name, collective, 1 << 28, operation_s=0, granularity=0.02)
        verify(plan.schedule)
        assert plan.ranks == cr.Topology.machine(name).devices
        assert plan.rate >= exact.rate * Fraction(98, 100)
        assert sum(chunk.share for chunk in plan.schedule.chunks) == 1
        assert plan.schedule.pieces == exact.schedule.pieces
        outcomes.append(is_power_of_two(plan.schedule.units))
    assert sum(outcomes) >= 0.95 * len(outcomes)


def test_shares_stay_exact_where_none_fit():
    """Shares are not rounded without a tolerance, or if no power of two is a multiple of the number of ranks."""
    plan = cr.plan("dgx-1v", "all_reduce", 1 << 28, operation_s=0)
    assert plan.schedule.units == 48
    ring = cr.Topology.ring(6, gb_per_s=25)
    parts = cr.plan(ring, "reduce_scatter", 1 << 28, granularity=0.5).schedule
    assert not is_power_of_two(parts.units)
    exact = planning.ring(ring.devices)
    assert round_shares(exact, ring, 0.00001) is exact  # a tolerance that no rounding meets
    rounded = round_shares(exact, ring, 0.2)
    assert (rounded.units, len(rounded.chunks)) == (2, 2)
    assert fluid_rate(rounded, ring) >= fluid_rate(exact, ring) * Fraction(8, 10)
    for wrong in (-0.1, 1.5, "2", True, float("nan")):
        with pytest.raises(cr.ArgumentError, match="granularity must be the part of the rate"):
            cr.plan(ring, granularity=wrong)


def test_the_command_line(printed, crossreduce, tmp_path):
    """``export`` also writes a file with the ranks, and ``verify`` prints of what number sizes must be a multiple."""
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
    warning = re.search("multiple of ([0-9]+), WHICH IS NOT A POWER OF TWO", " ".join(text.split()))
    assert not is_power_of_two(int(warning[1]))
    assert warning[0] in " ".join(printed("verify", tmp_path / "a.xml").split())
    code, _, error = crossreduce("export", "dgx-1v", "a.xml", "--granularity", "-1")
    assert (code, "--granularity must be a percentage" in error) == (2, True)
