"""The checker is checked: verify accepts a schedule if and only if running it gives the right sums.

What is right is worked out by oracle.run, an interpreter of its own on (n + 1) ** device, with each
round's steps in several orders.
"""

import random
import re
from fractions import Fraction

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ALGORITHMS, algorithms, names, requests

from crossreduce import Chunk, Schedule, ScheduleError, Step, verify
from crossreduce.planning import PLANNERS
from crossreduce.schedule import completing


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
    """Return verify's answer, after making sure that it is the interpreter's."""
    answer = accepted(schedule)
    truth = oracle.right(schedule)
    if truth and not answer:  # a rare order may be needed to see it
        truth = oracle.right(schedule, shuffles=3000)
    assert answer == truth, f"verify {'accepts' if answer else 'refuses'}, but the sums are {truth}:\n{schedule}"
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


def asked(n):
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
    for sources, destinations, packs, first in asked(n):
        yield PLANNERS[algorithm](names(n), sources, destinations, packs=packs, first=first)


SEEDS = 2  # mutants of each kind of each schedule


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutants_are_accepted_if_and_only_if_their_sums_are_right(mutate, record_property):
    """Whatever is done to a schedule, verify's answer is that of running it on the oracle's data."""
    tried = taken = 0
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
                    taken += agree(mutant)
    record_property("mutants", f"{tried} tried, {taken} accepted")
    print(f"{mutate.__name__}: {tried} tried, {taken} accepted")
    assert tried >= 300
    if mutate is permute_srcs:
        assert taken == tried  # the sum is the same in any order
    else:
        assert taken < tried


def test_most_mutants_are_wrong_but_not_all():
    """Both answers occur in plenty among mutants of a ring of 4, so the law above is put to the test both ways."""
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


@settings(max_examples=600)
@given(
    st.tuples(subsets, subsets), st.tuples(subsets, subsets), st.lists(st.lists(small_steps, max_size=3), max_size=3)
)
def test_any_steps_at_all(first, second, rounds):
    """For any steps on 3 devices, verify accepts if and only if every order of every round gives the right sums."""
    half = Fraction(1, 2)
    schedule = Schedule(
        "all_reduce", "by chance", names(3), (Chunk(half, *first), Chunk(half, *second)), tuple(map(tuple, rounds))
    )
    assert accepted(schedule) == oracle.right_in_every_order(schedule), str(schedule)


def test_random_schedules_of_one_chunk():
    """The same on 20,000 seeded schedules of few steps, among which many are right by chance."""
    tried = taken = 0
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
        schedule = Schedule("reduce", "by chance", names(n), (Chunk(Fraction(1), sources, destinations),), rounds)
        tried += 1
        answer = accepted(schedule)
        assert answer == oracle.right_in_every_order(schedule), str(schedule)
        taken += answer
    print(f"by chance: {tried} tried, {taken} accepted")
    assert taken > 500


@given(algorithms, requests(most_packs=3))
def test_the_interpreter_agrees_on_planned_schedules(algorithm, ask):
    """Planned schedules are right in every order that is tried, not only to verify's mind."""
    schedule = PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)
    assert agree(schedule)


def by_hand(n, *rounds, sources=None, destinations=None):
    everyone = tuple(range(n))
    chunk = Chunk(Fraction(1), sources or everyone, destinations or everyone)
    return Schedule(
        "all_reduce", "by hand", names(n), (chunk,), tuple(tuple(Step(*s) for s in steps) for steps in rounds)
    )


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        # doubled: 1 is added in round 0 and again in round 1
        (
            by_hand(2, [(0, 0, (0, 1))], [(0, 0, (0, 1))], [(0, 1, (0,))]),
            r"round 1, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:1\) adds the contribution of device cpu:1 a second time",
        ),
        # doubled far from where it shows
        (
            by_hand(3, [(0, 0, (0, 1))], [(0, 2, (0, 1, 2))], [(0, 0, (2,)), (0, 1, (2,))]),
            r"round 1, step 0 \(chunk 0: cpu:2 <- cpu:0 \+ cpu:1 \+ cpu:2\) adds the "
            r"contribution of device cpu:1 a second "
            r"time, and it reaches destination cpu:0 doubled",
        ),
        (
            by_hand(2, [(0, 0, (0, 1, 1))], [(0, 1, (0,))]),
            "round 0, step 0 .*contribution of device cpu:1 a second time",
        ),
        # lost: nobody asks device 2
        (
            by_hand(3, [(0, 0, (0, 1))], [(0, 1, (0,)), (0, 2, (0,))]),
            r"cpu:0 holds chunk 0, made by round 0, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ "
            r"cpu:1\), in which the contribution of "
            r"device cpu:2 is lost",
        ),
        # lost: the result is never brought to a destination that holds nothing
        (
            by_hand(2, sources=(0,), destinations=(0, 1)),
            "no step brings chunk 0 to its destination cpu:1: the contribution of device cpu:0",
        ),
        # lost: a destination keeps its own
        (
            by_hand(2, [(0, 0, (0, 1))]),
            "cpu:1 holds chunk 0, as it was at the start, since no step writes it there, in which the contribution of "
            "device cpu:0 is lost",
        ),
        # lost by overwriting
        (
            by_hand(2, [(0, 1, (0,))], [(0, 0, (0, 1))], [(0, 1, (0,))]),
            r"round 1, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:1\) adds the contribution of device cpu:0 a second time",
        ),
        (
            by_hand(2, [(0, 1, (0,))], destinations=(1,)),
            r"cpu:1 holds chunk 0, made by round 0, step 0 \(chunk 0: cpu:1 <- cpu:0\), in "
            r"which the contribution of device cpu:1 is lost",
        ),
        # stale: the copy leaves before the sum is there
        (
            by_hand(3, [(0, 0, (0, 1))], [(0, 1, (0,))], [(0, 0, (0, 2))], [(0, 2, (0,))]),
            r"cpu:1 holds a stale chunk 0, made by round 1, step 0 \(chunk 0: cpu:1 <- "
            r"cpu:0\): the contribution of device cpu:2 "
            r"reaches cpu:0 only later, in round 2, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:2\)",
        ),
        # a device is asked for what it does not hold
        (
            by_hand(3, [(0, 0, (0, 2))], sources=(0, 1)),
            r"round 0, step 0 \(chunk 0: cpu:0 <- cpu:0 \+ cpu:2\): device cpu:2 holds "
            r"nothing of chunk 0 yet, so it has no contribution",
        ),
        # a race: step 1 reads what step 0 of the same round writes
        (
            by_hand(3, [(0, 0, (0, 1)), (0, 2, (0,))], sources=(0, 1), destinations=(0, 2)),
            r"what cpu:2 holds of chunk 0 in the end, made by round 0, step 1 \(chunk 0: "
            r"cpu:2 <- cpu:0\), depends on the order "
            r"of steps that run in the same round, so a contribution such as device cpu:0's may be stale",
        ),
        # a race: two steps of one round write one cell
        (
            by_hand(2, [(0, 0, (0, 1)), (0, 0, (1,))], destinations=(0,)),
            r"what cpu:0 holds of chunk 0 in the end, made by round 0, step 1 .* depends on the order",
        ),
    ],
)
def test_messages_name_step_chunk_device_and_contribution(schedule, text):
    """What went wrong is named: lost, doubled, stale, on the wrong device, raced; with step and contribution."""
    assert not oracle.right(schedule)
    with pytest.raises(ScheduleError, match=text):
        verify(schedule)


@pytest.mark.parametrize(
    "schedule",
    [
        # one step that adds to its own device runs twice in one round
        by_hand(2, [(0, 0, (0, 1)), (0, 0, (0, 1))], [(0, 1, (0,))]),
        by_hand(2, [(0, 0, (0, 1)), (0, 0, (1, 0))], [(0, 1, (0,))]),
        # one step adds to a device, the other replaces what it holds
        by_hand(3, [(0, 2, (0, 1))], [(0, 0, (0, 1)), (0, 0, (2,))], sources=(0, 1), destinations=(0,)),
        # three steps write one cell: wrong, right, right
        by_hand(3, [(0, 2, (0, 1))], [(0, 0, (1,)), (0, 0, (2,)), (0, 0, (2,))], sources=(0, 1), destinations=(0,)),
    ],
)
def test_steps_of_a_round_that_write_one_cell_race(schedule):
    """A round's steps may run in any order: two that write one cell are refused unless every order gives one result."""
    assert not oracle.right_in_every_order(schedule)
    with pytest.raises(ScheduleError, match=r"chunk 0"):
        verify(schedule)


@pytest.mark.parametrize(
    "schedule",
    [
        by_hand(2, [(0, 0, (0, 1))], [(0, 1, (0,))], [(0, 1, (0,))]),  # a copy twice
        by_hand(2, [(0, 0, (0, 1)), (0, 1, (1,))], [(0, 1, (0,))]),  # a copy to itself
        by_hand(2, [(0, 0, (1, 0))], [(0, 1, (0,)), (0, 1, (0,))]),  # the same copy twice in a round
        by_hand(
            3, [(0, 2, (0, 0))], [(0, 1, (0,))], sources=(0,), destinations=(0, 1)
        ),  # rubbish on a device that needs nothing
        by_hand(1),  # nothing to do
    ],
)
def test_waste_is_no_fault(schedule):
    """Steps that are needless but harm nothing are accepted: what counts is what destinations hold in the end."""
    assert oracle.right_in_every_order(schedule)
    verify(schedule)


def test_verify_returns_nothing():
    """The answer cannot be dropped: it is an exception or nothing."""
    assert verify(by_hand(1)) is None


@given(algorithms, requests(most_packs=2))
def test_completing_steps_make_a_chunk_whole(algorithm, ask):
    """A step completes a chunk if and only if it combines values into the whole sum; with several sources each
    destination's value stems from such a step, once."""
    schedule = PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)
    flags = completing(schedule)
    base = len(schedule.devices) + 1
    cells, finished = oracle.start(schedule), {}
    for steps, wholes in zip(schedule.rounds, flags, strict=True):
        before, done = dict(cells), dict(finished)
        for (chunk, dst, srcs), whole in zip(steps, wholes, strict=True):
            cells[chunk, dst] = sum(before[chunk, src] for src in srcs)
            due = sum(base**source for source in schedule.chunks[chunk].sources)
            assert whole == (len(srcs) > 1 and cells[chunk, dst] == due)
            finished[chunk, dst] = whole + sum(done.get((chunk, src), 0) for src in srcs)
    for c, (_, sources, destinations) in enumerate(schedule.chunks):
        for dst in destinations:
            assert finished.get((c, dst), 0) == (len(sources) > 1)
