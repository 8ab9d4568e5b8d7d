"""``hierarchical_copy`` for lists of devices: TensorFlow's trees, without its defects."""

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import names

from crossreduce.planning import hierarchical_copy


# Dumped from a graph of TensorFlow 2.21: for packs 0 to 8 on 8 devices the root and the other device that sums a half.
def trees(schedule):
    """Return for each chunk its combinations, {dst: set of srcs} for each round, and its copies, {dst: src}."""
    found = []
    for chunk in range(len(schedule.chunks)):
        sums, copies = [], {}
        for steps in schedule.rounds:
            mine = [step for step in steps if step.chunk == chunk]
            combined = {step.dst: set(step.srcs) for step in mine if len(step.srcs) > 1}
            sums += [combined] if combined else []
            for step in mine:
                if len(step.srcs) == 1:
                    assert step.dst not in copies
                    copies[step.dst] = step.srcs[0]
        found.append((sums, copies))
    return found


def tf_tree(n, main0, main1):
    """Return the tree of TensorFlow's hierarchical copy for even n, as in its cross_device_utils.py."""
    halves = set(range(n // 2)), set(range(n // 2, n))
    near, far = halves if main0 in halves[0] else halves[::-1]
    sums = [{main0: near, main1: far}] if n > 2 else []
    copies = dict.fromkeys(near - {main0}, main0) | dict.fromkeys(far - {main1}, main1) | {main1: main0}
    return [*sums, {main0: {main0, main1}}], copies


@pytest.mark.parametrize("n", [2, 4, 6, 8])
def test_hierarchical_copy_on_even_counts_has_tensorflows_trees(n):
    """On n devices the root of pack i is device i mod n, and the main (the device that sums the other half) is n / 2
    devices further; the groups' sums, the sum of the mains and the copies are those of TensorFlow 2.21."""
    schedule = hierarchical_copy(names(n), packs=n + 1)
    assert trees(schedule) == [tf_tree(n, i % n, (i + n // 2) % n) for i in range(n + 1)]
    for first in range(n):
        assert trees(hierarchical_copy(names(n), first=first)) == [tf_tree(n, first, (first + n // 2) % n)]
    if n == 8:  # pack 6 in full, as dumped from a graph of TensorFlow
        assert trees(schedule)[6] == (
            [{6: {4, 5, 6, 7}, 2: {0, 1, 2, 3}}, {6: {6, 2}}],
            {2: 6, 4: 6, 5: 6, 7: 6, 0: 2, 1: 2, 3: 2},
        )


@pytest.mark.parametrize("n", range(3, 18))
def test_hierarchical_copy_has_tensorflows_four_stages(n):
    """The four rounds are TensorFlow's stages: the sums of the halves, the sum of the mains, the copy from the root to
    the other main, and the copies inside both halves."""
    schedule = hierarchical_copy(names(n), packs=n)
    near, far = set(range(n // 2)), set(range(n // 2, n))
    assert len(schedule.rounds) == 4
    for pack in range(n):
        sums, across, back, copies = ([step for step in steps if step.chunk == pack] for steps in schedule.rounds)
        (total,), (root,) = across, {step.dst for step in across}
        assert {frozenset(step.srcs) for step in sums} == {frozenset(half) for half in (near, far) if len(half) > 1}
        (copy,) = back
        assert copy.srcs == (root,)
        assert set(total.srcs) == {root, copy.dst}
        mains = {root, copy.dst}
        assert {(*step.srcs, step.dst) for step in copies} == {
            (main, d) for main in mains for d in (near if main in near else far) - {main}
        }


@given(st.integers(1, 17), st.integers(0, 40), st.data())
def test_hierarchical_copy_with_groups(n, first, data):
    """With groups, each group is summed on one of its members, and only these exchange data between groups."""
    labels = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    groups = [[f"cpu:{d}" for d in range(n) if labels[d] == label] for label in sorted(set(labels))]
    schedule = hierarchical_copy(names(n), first=first, groups=groups)
    assert oracle.right(schedule)
    crossing = {
        frozenset({src, step.dst})
        for steps in schedule.rounds
        for step in steps
        for src in step.srcs
        if labels[src] != labels[step.dst]
    }
    assert len(crossing) == len(groups) - 1  # the groups' main devices form a star
