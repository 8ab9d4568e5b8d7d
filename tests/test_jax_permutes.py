"""What a schedule becomes for a JAX program, run here on Python numbers: every planner, and many wirings."""

from collections import Counter
from fractions import Fraction

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

import crossreduce as cr
from crossreduce.planning import PLANNERS, planned

program = None


@pytest.fixture(scope="module", autouse=True)
def _program(jax_):  # it is in a package whose face imports JAX
    global program
    from crossreduce.jax.permutes import program


def run(made):
    """Run a program on every device; return for each stack, device and row what it holds in the end.

    Device d starts with ``(n + 1) ** d`` in each row; what nobody sent is None, and stays None.
    """
    n = made.devices
    values = [[[[(n + 1) ** device] * len(chunks) for device in range(n)]] for chunks in made.stacks]

    def take(stack, places, device):
        found = []
        for value, row in places:
            rows = values[stack][value][device]
            found.append(rows[row] if rows is not None and row < len(rows) else None)
        return found

    for permutes, folds in made.rounds:
        came = []
        for pairs, loads in permutes:
            assert all(most == 1 for side in (0, 1) for most in Counter(pair[side] for pair in pairs).values())
            sources = {dst: src for src, dst in pairs}
            came.append(
                [
                    [take(s, load[sources[d]], sources[d]) if d in sources else None for d in range(n)]
                    for s, load in enumerate(loads)
                ]
            )
        for brought in came:  # all of a round's loads were taken before
            for stack, rows in zip(values, brought, strict=True):
                stack.append(rows)
        for stack, operands in folds:
            made_here = []
            for device in range(n):
                columns = zip(*(take(stack, table[device], device) for table in operands), strict=True)
                made_here.append([None if None in column else sum(column) for column in columns])
            values[stack].append(made_here)
    return [[take(s, table[device], device) for device in range(n)] for s, table in enumerate(made.results)]


def check(schedule):
    """A program gives every device every contribution once, in as many permutations as its rounds' busiest devices."""
    made, n = program(schedule), len(schedule.devices)
    whole = sum((n + 1) ** device for device in range(n))
    for chunks, devices in zip(made.stacks, run(made), strict=True):
        assert devices == [[whole] * len(chunks)] * n
        assert len({schedule.chunks[chunk].share for chunk in chunks}) == 1
    assert sorted(chunk for chunks in made.stacks for chunk in chunks) == list(range(len(schedule.chunks)))
    least = 0
    for steps in schedule.rounds:
        pairs = {(src, dst) for _, dst, srcs in steps for src in srcs if src != dst}
        least += (
            max((max(Counter(pair[side] for pair in pairs).values()) for side in (0, 1)), default=0) if pairs else 0
        )
    assert made.permutes == least


@given(st.integers(1, 12), st.sampled_from(sorted(PLANNERS)), st.integers(1, 5), st.integers(0, 12))
def test_every_planners_schedule(n, algorithm, packs, first):
    """Whatever plans for devices that are joined alike, its program is right and takes the fewest permutations."""
    names = strategies.names(n)
    check(planned(algorithm, names, names, packs, first))


@given(st.data())
def test_plans_for_any_wiring(data):
    """So is that of every plan for a drawn topology, whose shares and routes are uneven."""
    topology = data.draw(strategies.wired(strategies.names(data.draw(st.integers(2, 6))), both_ways=False))
    algorithm = data.draw(st.sampled_from(["forest", "hierarchical_copy", "auto"]))
    check(cr.plan(topology, "all_reduce", data.draw(st.sampled_from([8, 1 << 26])), algorithm).schedule)


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1))
def test_pairs_split_into_as_few_matchings_as_can_be(pairs):
    """Any pairs fall into as many sets as the busiest device has partners, and no device is in one twice on a side."""
    from crossreduce.jax.permutes import _matchings

    found = _matchings({pair: [[0]] for pair in pairs})
    assert sorted(pair for matching in found for pair in matching) == sorted(pairs)
    assert len(found) == max(max(Counter(pair[side] for pair in pairs).values()) for side in (0, 1))
    for matching in found:
        assert len({src for src, _ in matching}) == len({dst for _, dst in matching}) == len(matching)


def test_what_does_not_go_from_all_to_all_is_refused():
    """A broadcast is no program for an axis, and nor is what verify refuses."""
    names = strategies.names(3)
    with pytest.raises(cr.ScheduleError, match="every device of an axis gives, and needs, every chunk"):
        program(planned("one_device", names[:1], names))
    both = cr.Chunk(Fraction(1), (0, 1), (0, 1))
    with pytest.raises(cr.ScheduleError, match="lost"):
        program(cr.Schedule("all_reduce", "by hand", names[:2], (both,), ((cr.Step(0, 0, (0, 1)),),)))
