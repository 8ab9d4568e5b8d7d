"""``verify`` accepts a schedule if and only if running it gives the right sums.

``oracle.run``, an independent interpreter, runs it on the data ``(n + 1) ** device``; ``oracle.right`` checks the sums.
"""

import random
import re
from fractions import Fraction

import oracle
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALGORITHMS, algorithms, names, requests

from crossreduce import Chunk, Schedule, ScheduleError, Step, verify
from crossreduce.planning import PLANNERS


def accepted(schedule):
    try:
        verify(schedule)
    except ScheduleError as error:
        text = str(error)
        assert re.search(r"chunk \d", text), text
        assert re.search(r"cpu:\d", text), text
        assert "contribution" in text
        return False
    return True


def agree(schedule):
    """Return whether verify accepts a schedule, and check that this agrees with the interpreter."""
    answer = accepted(schedule)
    right = oracle.right(schedule)
    assert answer == right, f"verify {'accepts' if answer else 'refuses'}, but the sums are {right}:\n{schedule}"
    return answer


def drop_step(rng, rounds, n):
    r, s = pick(rng, rounds)
    del rounds[r][s]


def repeat_later(rng, rounds, n):
    r, s = pick(rng, rounds)
    later = rng.randrange(r + 1, len(rounds) + 1)
    (rounds if later == len(rounds) else rounds[later]).append([rounds[r][s]] if later == len(rounds) else rounds[r][s])


def repeat_in_round(rng, rounds, n):
    r, s = pick(rng, rounds)
    rounds[r].insert(rng.randrange(len(rounds[r]) + 1), rounds[r][s])


def redirect(rng, rounds, n):
    r, s = pick(rng, rounds)
    rounds[r][s] = rounds[r][s]._replace(dst=rng.randrange(n))


def change_src(rng, rounds, n):
    r, s = pick(rng, rounds)
    srcs = list(rounds[r][s].srcs)
    srcs[rng.randrange(len(srcs))] = rng.randrange(n)
    rounds[r][s] = rounds[r][s]._replace(srcs=tuple(srcs))


def swap_rounds(rng, rounds, n):
    a, b = rng.sample(range(len(rounds)), 2) if len(rounds) > 1 else (0, 0)
    rounds[a], rounds[b] = rounds[b], rounds[a]


def merge_rounds(rng, rounds, n):
    a = rng.randrange(len(rounds))
    if a + 1 < len(rounds):
        rounds[a] += rounds.pop(a + 1)


def add_src(rng, rounds, n):
    r, s = pick(rng, rounds)
    srcs = list(rounds[r][s].srcs)
    srcs.insert(rng.randrange(len(srcs) + 1), rng.randrange(n))
    rounds[r][s] = rounds[r][s]._replace(srcs=tuple(srcs))


def drop_src(rng, rounds, n):
    r, s = pick(rng, rounds)
    srcs = list(rounds[r][s].srcs)
    if len(srcs) > 1:
        del srcs[rng.randrange(len(srcs))]
        rounds[r][s] = rounds[r][s]._replace(srcs=tuple(srcs))


def move_step(rng, rounds, n):
    r, s = pick(rng, rounds)
    step = rounds[r].pop(s)
    rounds[rng.randrange(len(rounds))].append(step)


def permute_srcs(rng, rounds, n):
    r, s = pick(rng, rounds)
    srcs = list(rounds[r][s].srcs)
    rng.shuffle(srcs)
    rounds[r][s] = rounds[r][s]._replace(srcs=tuple(srcs))


def pick(rng, rounds):
    r = rng.choice([r for r, steps in enumerate(rounds) if steps])
    return r, rng.randrange(len(rounds[r]))


MUTATIONS = [
    drop_step,
    repeat_later,
    repeat_in_round,
    redirect,
    change_src,
    swap_rounds,
    merge_rounds,
    add_src,
    drop_src,
    move_step,
    permute_srcs,
]


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


SEEDS = 2  # mutants of each kind of each schedule


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutants_are_accepted_if_and_only_if_their_sums_are_right(mutate, record_property):
    """verify accepts a mutated schedule if and only if running it on the oracle's data gives the right sums."""
    tried = passed = 0
    for algorithm in ALGORITHMS:
        for n in range(2, 10):
            for number, schedule in enumerate(planned(algorithm, n)):
                assert agree(schedule)
                if not schedule.rounds:
                    continue
                for seed in range(SEEDS):
                    rng = random.Random(f"{mutate.__name__} {algorithm} {n} {number} {seed}")
                    rounds = [list(steps) for steps in schedule.rounds]
                    mutate(rng, rounds, n)
                    mutant = Schedule(
                        schedule.collective, algorithm, schedule.devices, schedule.chunks, tuple(map(tuple, rounds))
                    )
                    tried += 1
                    passed += agree(mutant)
    record_property("mutants", f"{tried} tried, {passed} accepted")
    print(f"{mutate.__name__}: {tried} tried, {passed} accepted")
    assert tried >= 300
    if mutate is repeat_in_round:
        assert passed == 0  # two steps of a round write the same chunk on the same device
    elif mutate is permute_srcs:
        assert passed == tried  # the sum is the same in any order
    else:
        assert passed < tried


def test_most_mutants_are_wrong_but_not_all():
    """Of the mutants of a ring of 4 many are right and many are wrong, so the test above covers both answers."""
    (schedule,) = [PLANNERS["ring"](names(4))]
    answers = []
    for seed in range(400):
        rng = random.Random(seed)
        rounds = [list(steps) for steps in schedule.rounds]
        rng.choice([m for m in MUTATIONS if m is not repeat_in_round])(rng, rounds, 4)
        answers.append(agree(Schedule("all_reduce", "ring", names(4), schedule.chunks, tuple(map(tuple, rounds)))))
    assert 40 <= sum(answers) <= 360


small_steps = st.builds(
    Step, st.integers(0, 1), st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)
)
subsets = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple)


@examples(600)
@given(
    st.tuples(subsets, subsets), st.tuples(subsets, subsets), st.lists(st.lists(small_steps, max_size=3), max_size=3)
)
def test_any_steps_at_all(first, second, rounds):
    """For any steps on 3 devices, verify accepts if and only if running them gives the right sums."""
    half = Fraction(1, 2)
    schedule = Schedule(
        "all_reduce", "random", names(3), (Chunk(half, *first), Chunk(half, *second)), tuple(map(tuple, rounds))
    )
    assert accepted(schedule) == oracle.right(schedule), str(schedule)


def test_random_schedules_of_one_chunk():
    """verify agrees with the interpreter on 20,000 random schedules of few steps, of which many are right."""
    tried = passed = 0
    for seed in range(20_000):
        rng = random.Random(seed)
        n = rng.choice([2, 2, 3])
        rounds = tuple(
            tuple(
                Step(0, rng.randrange(n), tuple(rng.sample(range(n), rng.randint(1, n))))
                for _ in range(rng.choice([1, 1, 2, 3]))
            )
            for _ in range(rng.randint(1, 3))
        )
        sources = tuple(rng.sample(range(n), rng.randint(1, n)))
        destinations = tuple(rng.sample(range(n), rng.randint(1, n)))
        schedule = Schedule("reduce", "random", names(n), (Chunk(Fraction(1), sources, destinations),), rounds)
        tried += 1
        answer = accepted(schedule)
        assert answer == oracle.right(schedule), str(schedule)
        passed += answer
    print(f"random schedules: {tried} tried, {passed} accepted")
    assert passed > 500


@given(algorithms, requests(most_packs=3))
def test_the_interpreter_agrees_on_planned_schedules(algorithm, ask):
    """The interpreter and verify both accept planned schedules."""
    schedule = PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)
    assert agree(schedule)


def custom(n, *rounds, sources=None, destinations=None):
    everyone = tuple(range(n))
    chunk = Chunk(Fraction(1), sources or everyone, destinations or everyone)
    return Schedule(
        "all_reduce", "custom", names(n), (chunk,), tuple(tuple(Step(*s) for s in steps) for steps in rounds)
    )


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        # doubled: the contribution of device 1 is added in round 0 and again in round 1
        (
            custom(2, [(0, 0, (0, 1))], [(0, 0, (0, 1))], [(0, 1, (0,))]),
            r"round 1, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:1\) adds the contribution of device cpu:1 a second time",
        ),
        # doubled in an earlier round than the one that writes the destination
        (
            custom(3, [(0, 0, (0, 1))], [(0, 2, (0, 1, 2))], [(0, 0, (2,)), (0, 1, (2,))]),
            r"round 1, step 0 \(chunk 0: cpu:2 <- cpu:0 \+ cpu:1 \+ cpu:2\) adds the "
            r"contribution of device cpu:1 a second "
            r"time, and it reaches destination cpu:0 doubled",
        ),
        (
            custom(2, [(0, 0, (0, 1, 1))], [(0, 1, (0,))]),
            "round 0, step 0 .*contribution of device cpu:1 a second time",
        ),
        # lost: no step reads device 2
        (
            custom(3, [(0, 0, (0, 1))], [(0, 1, (0,)), (0, 2, (0,))]),
            r"cpu:0 stores chunk 0, made by round 0, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ "
            r"cpu:1\), and the contribution of device cpu:2 is lost",
        ),
        # lost: no step copies the result to a destination that stores nothing
        (
            custom(2, sources=(0,), destinations=(0, 1)),
            "no step brings chunk 0 to its destination cpu:1: the contribution of device cpu:0",
        ),
        # lost: a destination keeps its own value
        (
            custom(2, [(0, 0, (0, 1))]),
            "cpu:1 stores chunk 0, there from the start, since no step writes it, and the contribution of "
            "device cpu:0 is lost",
        ),
        # doubled, since an earlier copy overwrote the other contribution
        (
            custom(2, [(0, 1, (0,))], [(0, 0, (0, 1))], [(0, 1, (0,))]),
            r"round 1, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:1\) adds the contribution of device cpu:0 a second time",
        ),
        # lost: a copy overwrites the destination's own contribution
        (
            custom(2, [(0, 1, (0,))], destinations=(1,)),
            r"cpu:1 stores chunk 0, made by round 0, step 0 \(chunk 0: cpu:1 <- cpu:0\), and "
            r"the contribution of device cpu:1 is lost",
        ),
        # stale: the copy is made before the sum is complete
        (
            custom(3, [(0, 0, (0, 1))], [(0, 1, (0,))], [(0, 0, (0, 2))], [(0, 2, (0,))]),
            r"cpu:1 stores a stale chunk 0, made by round 1, step 0 \(chunk 0: cpu:1 <- "
            r"cpu:0\): the contribution of device cpu:2 "
            r"reaches cpu:0 only later, in round 2, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:2\)",
        ),
        # stale: a step does not read what another step of its round writes
        (
            custom(3, [(0, 0, (0, 1)), (0, 2, (0,))], sources=(0, 1), destinations=(0, 2)),
            r"cpu:2 stores a stale chunk 0, made by round 0, step 1 \(chunk 0: cpu:2 <- cpu:0\): the contribution of "
            r"device cpu:1 reaches cpu:0 only at the end of this round, by round 0, step 0",
        ),
        # a step reads a device that stores nothing
        (
            custom(3, [(0, 0, (0, 2))], sources=(0, 1)),
            r"round 0, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:2\): device cpu:2 does not store chunk 0 yet, so it "
            "has no contribution to send",
        ),
        # a step reads a device on which only another step of its round writes
        (
            custom(3, [(0, 2, (0,)), (0, 1, (1, 2))], sources=(0, 1), destinations=(1,)),
            r"round 0, step 1 \(chunk 0: cpu:1 <- cpu:1 \+ cpu:2\): device cpu:2 does not store chunk 0 yet",
        ),
        # two steps of one round write the same chunk on the same device
        (
            custom(2, [(0, 0, (0, 1)), (0, 0, (1,))], destinations=(0,)),
            r"round 0, step 1 \(chunk 0: cpu:0 <- cpu:1\): step 0 of the same round writes chunk 0 on cpu:0 too, so a "
            "contribution can be lost",
        ),
    ],
)
def test_messages_name_step_chunk_device_and_contribution(schedule, text):
    """An error names what went wrong, the chunk and the device, and the step and the contribution if there is one."""
    assert not oracle.right(schedule)
    with pytest.raises(ScheduleError, match=text):
        verify(schedule)


@pytest.mark.parametrize(
    "schedule",
    [
        custom(2, [(0, 0, (0, 1)), (0, 0, (0, 1))], [(0, 1, (0,))]),  # the same step twice
        custom(2, [(0, 0, (1, 0))], [(0, 1, (0,)), (0, 1, (0,))]),  # the same copy twice
        custom(2, [(0, 0, (0, 1)), (0, 0, (1, 0))], [(0, 1, (0,))]),  # two equal sums on one device
        # one step adds to a device, the other replaces its value
        custom(3, [(0, 2, (0, 1))], [(0, 0, (0, 1)), (0, 0, (2,))], sources=(0, 1), destinations=(0,)),
        # two steps write to a device that is not a destination
        custom(3, [(0, 0, (0, 1)), (0, 2, (0,)), (0, 2, (1,))], sources=(0, 1), destinations=(0,)),
    ],
)
def test_two_steps_of_a_round_that_write_one_cell_are_refused(schedule):
    """No two steps of a round may write the same chunk on the same device, even if they write the same value."""
    assert not oracle.right(schedule)
    with pytest.raises(ScheduleError, match=r"step \d of the same round writes chunk 0 on cpu:\d too"):
        verify(schedule)


@pytest.mark.parametrize(
    "schedule",
    [
        custom(2, [(0, 0, (0, 1)), (0, 1, (0, 1))]),  # both steps read the original values
        custom(2, [(0, 0, (0, 1)), (0, 1, (1, 0))]),  # the two sums add in different orders
        custom(
            3, [(0, 0, (0, 1)), (0, 1, (0,)), (0, 2, (1, 0, 2))], destinations=(2,)
        ),  # the last step reads values that its round replaces
        custom(2, [(0, 0, (1,)), (0, 1, (0,))], [(0, 0, (0, 1))], destinations=(0,)),  # two devices swap their values
    ],
)
def test_steps_of_a_round_read_what_the_previous_round_left(schedule):
    """A step does not read values that other steps of its round write."""
    assert oracle.right(schedule)
    verify(schedule)


@pytest.mark.parametrize(
    "schedule",
    [
        custom(2, [(0, 0, (0, 1))], [(0, 1, (0,))], [(0, 1, (0,))]),  # the same copy in two rounds
        custom(2, [(0, 0, (0, 1)), (0, 1, (1,))], [(0, 1, (0,))]),  # a device copies to itself
        # a wrong value on a device that is not a destination
        custom(3, [(0, 2, (0, 0))], [(0, 1, (0,))], sources=(0,), destinations=(0, 1)),
        custom(1),  # no steps
    ],
)
def test_needless_steps_are_accepted(schedule):
    """Steps that no destination needs are not an error: only the final values of destinations count."""
    assert oracle.right(schedule)
    verify(schedule)


def test_verify_returns_nothing():
    """verify raises an exception or returns ``None``, so a caller cannot ignore its answer."""
    assert verify(custom(1)) is None
