"""Mutations of schedules, and whether ``verify`` agrees with the interpreter on a schedule.

A mutation changes ``rounds``, lists of steps on ``n`` devices, at a place that ``rng`` chooses.
"""

import re

import oracle

from crossreduce import Schedule, ScheduleError, verify


def accepted(schedule):
    """Return whether verify accepts a schedule. Check that an error names a chunk, a device and a contribution."""
    text = ""
    try:
        verify(schedule)
    except ScheduleError as error:
        text = str(error)
    assert not text or all(re.search(part, text) for part in (r"chunk \d", r"cpu:\d", "contribution")), text
    return not text


def agree(schedule):
    """Return whether verify accepts a schedule, and check that it does so if and only if the interpreter does."""
    is_accepted, right = accepted(schedule), oracle.right(schedule)
    assert is_accepted == right, f"verify accepts it: {is_accepted}; its sums are right: {right}\n{schedule}"
    return is_accepted


def mutated(schedule, mutate, rng):
    """Return a schedule with one mutation of its rounds."""
    rounds = [list(steps) for steps in schedule.rounds]
    mutate(rng, rounds, len(schedule.devices))
    steps = tuple(map(tuple, rounds))
    return Schedule(schedule.collective, schedule.algorithm, schedule.devices, schedule.chunks, steps)


def pick(rng, rounds):
    """Return a random step as (round, position in the round)."""
    r = rng.choice([r for r, steps in enumerate(rounds) if steps])
    return r, rng.randrange(len(rounds[r]))


def replace_srcs(rng, rounds, change):
    """Call ``change`` with the list of sources of one step, and store the changed list."""
    r, s = pick(rng, rounds)
    srcs = list(rounds[r][s].srcs)
    change(srcs)
    rounds[r][s] = rounds[r][s]._replace(srcs=tuple(srcs))


def drop_step(rng, rounds, n):
    r, s = pick(rng, rounds)
    del rounds[r][s]


def repeat_later(rng, rounds, n):
    r, s = pick(rng, rounds)
    later = rng.randrange(r + 1, len(rounds) + 1)
    if later == len(rounds):
        rounds.append([])
    rounds[later].append(rounds[r][s])


def repeat_in_round(rng, rounds, n):
    r, s = pick(rng, rounds)
    rounds[r].insert(rng.randrange(len(rounds[r]) + 1), rounds[r][s])


def redirect(rng, rounds, n):
    r, s = pick(rng, rounds)
    rounds[r][s] = rounds[r][s]._replace(dst=rng.randrange(n))


def change_src(rng, rounds, n):
    replace_srcs(rng, rounds, lambda srcs: srcs.__setitem__(rng.randrange(len(srcs)), rng.randrange(n)))


def swap_rounds(rng, rounds, n):
    a, b = rng.sample(range(len(rounds)), 2) if len(rounds) > 1 else (0, 0)
    rounds[a], rounds[b] = rounds[b], rounds[a]


def merge_rounds(rng, rounds, n):
    a = rng.randrange(len(rounds))
    if a + 1 < len(rounds):
        rounds[a] += rounds.pop(a + 1)


def add_src(rng, rounds, n):
    replace_srcs(rng, rounds, lambda srcs: srcs.insert(rng.randrange(len(srcs) + 1), rng.randrange(n)))


def drop_src(rng, rounds, n):
    replace_srcs(rng, rounds, lambda srcs: srcs.pop(rng.randrange(len(srcs))) if len(srcs) > 1 else None)


def move_step(rng, rounds, n):
    r, s = pick(rng, rounds)
    step = rounds[r].pop(s)
    rounds[rng.randrange(len(rounds))].append(step)


def permute_srcs(rng, rounds, n):
    replace_srcs(rng, rounds, rng.shuffle)


MUTATIONS = [drop_step, repeat_later, repeat_in_round, redirect, change_src, swap_rounds, merge_rounds, add_src]
MUTATIONS += [drop_src, move_step, permute_srcs]
