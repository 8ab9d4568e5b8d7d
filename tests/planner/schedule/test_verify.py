"""``verify`` accepts a schedule if and only if running it gives the right sums.

``oracle.run``, an independent interpreter, runs it on powers of one base; ``oracle.right`` checks the sums.
"""

import itertools
import random
from fractions import Fraction

import oracle
import pytest
from budget import SHARE
from mutations import MUTATIONS, agree, mutated, permute_srcs, repeat_in_round
from strategies import ALGORITHMS, names

from crossreduce import Chunk, Schedule, ScheduleError, Step, verify
from crossreduce.planning import PLANNERS


def requests_of(n):
    """Return requests of different kinds on ``n`` devices: (sources, destinations, packs, first)."""
    all_ = names(n)
    return [
        (all_, all_, 1, 0),
        (all_, all_[::-1], 2, 1),
        (all_[: max(1, n - 1)], all_[1:], 1, 1),
        (all_[: n // 2], all_[n // 2 :], 1, 0),
        (all_, all_[-1:], 1, 2),
    ]


def planned(algorithm, n):
    for sources, destinations, packs, first in requests_of(n):
        yield PLANNERS[algorithm](names(n), sources, destinations, packs=packs, first=first)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutants_are_accepted_if_and_only_if_their_sums_are_right(mutate):
    """verify accepts a mutated schedule if and only if running it on the oracle's data gives the right sums."""
    accepted = []
    for algorithm, n in itertools.product(ALGORITHMS, (2, 3, 4, 5, 9)):
        for number, schedule in enumerate(planned(algorithm, n)):
            assert agree(schedule)
            if schedule.rounds:
                accepted.append(agree(mutated(schedule, mutate, random.Random(f"{algorithm} {n} {number}"))))
    assert len(accepted) >= 120
    if mutate is repeat_in_round:
        assert not any(accepted)  # two steps of a round write the same chunk on the same device
    elif mutate is permute_srcs:
        assert all(accepted)  # the sum is the same in any order
    else:
        assert not all(accepted)


def test_random_schedules_of_one_chunk():
    """verify agrees with the interpreter on random schedules of few steps, of which many are right."""
    accepted_count, rng = 0, random.Random(0)
    for _ in range(round(20_000 * SHARE)):
        n = rng.choice([2, 2, 3])
        rounds = tuple(
            tuple(
                Step(0, rng.randrange(n), tuple(rng.sample(range(n), rng.randint(1, n))))
                for _ in range(rng.choice([1, 1, 2, 3]))
            )
            for _ in range(rng.randint(1, 3))
        )
        ends = (tuple(rng.sample(range(n), rng.randint(1, n))) for _ in range(2))
        accepted_count += agree(Schedule("reduce", "random", names(n), (Chunk(Fraction(1), *ends),), rounds))
    assert accepted_count > 20_000 * SHARE / 40  # at least one in 40 is right


def custom(n, *rounds, sources=None, destinations=None):
    """Return a schedule of one chunk. Each round is a list of steps ``(dst, srcs)``."""
    everyone = tuple(range(n))
    chunk = Chunk(Fraction(1), sources or everyone, destinations or everyone)
    steps = tuple(tuple(Step(0, *step) for step in steps) for steps in rounds)
    return Schedule("all_reduce", "custom", names(n), (chunk,), steps)


# Parts of the expected messages, as regular expressions.
FIRST, ADDS = r"round 0, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:1\)", r"\(chunk 0: cpu:0 <- cpu:0 \+ cpu:1\) adds the"
MESSAGES = [
    # Doubled: the contribution of device 1 is added in round 0 and again in round 1.
    (
        custom(2, [(0, (0, 1))], [(0, (0, 1))], [(1, (0,))]),
        rf"round 1, step 0 {ADDS} contribution of device cpu:1 a second time",
    ),
    (
        custom(3, [(0, (0, 1))], [(2, (0, 1, 2))], [(0, (2,)), (1, (2,))]),
        r"round 1, step 0 \(chunk 0: cpu:2 <- cpu:0 \+ cpu:1 \+ cpu:2\) adds the contribution of device cpu:1 a second "
        "time, and it reaches destination cpu:0 doubled",
    ),
    # Lost: no step reads device 2.
    (
        custom(3, [(0, (0, 1))], [(1, (0,)), (2, (0,))]),
        rf"cpu:0 stores chunk 0, made by {FIRST}, and the contribution of device cpu:2 is lost",
    ),
    # Lost: no step copies the result to a destination that stores nothing.
    (
        custom(2, sources=(0,), destinations=(0, 1)),
        "no step brings chunk 0 to its destination cpu:1: the contribution of device cpu:0",
    ),
    # Lost: a destination keeps its own value.
    (custom(2, [(0, (0, 1))]), "cpu:1 stores chunk 0, there from the start, since no step writes it"),
    # Lost: a copy overwrites the destination's own contribution.
    (
        custom(2, [(1, (0,))], destinations=(1,)),
        r"cpu:1 stores chunk 0, made by round 0, step 0 \(chunk 0: cpu:1 <- cpu:0\), and the contribution of device "
        "cpu:1 is lost",
    ),
    # Stale: the copy is made before the sum is complete.
    (
        custom(3, [(0, (0, 1))], [(1, (0,))], [(0, (0, 2))], [(2, (0,))]),
        r"cpu:1 stores a stale chunk 0, made by round 1, step 0 \(chunk 0: cpu:1 <- cpu:0\): the contribution of "
        r"device cpu:2 reaches cpu:0 only later, in round 2, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:2\)",
    ),
    # Stale: a step does not read what another step of its round writes.
    (
        custom(3, [(0, (0, 1)), (2, (0,))], sources=(0, 1), destinations=(0, 2)),
        r"cpu:2 stores a stale chunk 0, made by round 0, step 1 \(chunk 0: cpu:2 <- cpu:0\): the contribution of "
        r"device cpu:1 reaches cpu:0 only at the end of this round, by round 0, step 0",
    ),
    # A step reads a device that stores nothing, or on which only another step of its round writes.
    (
        custom(3, [(0, (0, 2))], sources=(0, 1)),
        r"round 0, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:2\): device cpu:2 does not store chunk 0 yet, so it has no "
        "contribution to send",
    ),
    # Two steps of one round write the same chunk on the same device.
    (
        custom(2, [(0, (0, 1)), (0, (1,))], destinations=(0,)),
        r"round 0, step 1 \(chunk 0: cpu:0 <- cpu:1\): step 0 of the same round writes chunk 0 on cpu:0 too, so a "
        "contribution can be lost",
    ),
    # The second of them writes to a device that is not a destination.
    (
        custom(3, [(0, (0, 1)), (2, (0,)), (2, (1,))], sources=(0, 1), destinations=(0,)),
        r"step \d of the same round writes chunk 0 on cpu:\d too",
    ),
]


@pytest.mark.parametrize(("schedule", "text"), MESSAGES)
def test_messages_name_step_chunk_device_and_contribution(schedule, text):
    """An error names what went wrong: step, chunk, device and contribution."""
    assert not oracle.right(schedule)
    with pytest.raises(ScheduleError, match=text):
        verify(schedule)


def test_right_schedules_are_accepted():
    """verify accepts schedules whose steps read what the round before left. Needless steps are not an error."""
    for schedule in (
        custom(2, [(0, (0, 1)), (1, (0, 1))]),  # both steps read the original values
        custom(2, [(0, (0, 1)), (1, (1, 0))]),  # the two sums add in different orders
        custom(3, [(0, (0, 1)), (1, (0,)), (2, (1, 0, 2))], destinations=(2,)),  # reads values that its round replaces
        custom(2, [(0, (1,)), (1, (0,))], [(0, (0, 1))], destinations=(0,)),  # two devices swap their values
        custom(2, [(0, (0, 1))], [(1, (0,))], [(1, (0,))]),  # the same copy in two rounds
        custom(2, [(0, (0, 1)), (1, (1,))], [(1, (0,))]),  # a device copies to itself
        custom(3, [(2, (0, 0))], [(1, (0,))], sources=(0,), destinations=(0, 1)),  # a wrong value where none is due
        custom(1),  # no steps
    ):
        assert oracle.right(schedule)
        assert verify(schedule) is None
