"""Schedules that exports are tried on, and what their results must look like."""

import random
from fractions import Fraction

from hypothesis import strategies as st
from strategies import names

from crossreduce import Chunk, Schedule, Step
from crossreduce.export.collective import collective


@st.composite
def reductions(draw, kind="all_reduce"):
    """Draw a schedule of uneven shares, in which partial sums meet anywhere, in any order, and are copied on."""
    n = draw(st.integers(2, 5))
    parts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(sum))
    rng = random.Random(draw(st.integers(0, 2**32)))
    chunks, rounds = [], []
    everyone = tuple(range(n))
    for c, part in enumerate(parts):
        holders, free = list(everyone), []  # who holds a part of the sum; whose own part is already in another's
        while len(holders) > 1:
            group = rng.sample(holders, rng.randint(2, len(holders)))
            dst = rng.choice(group + free)
            rounds.append((Step(c, dst, tuple(group)),))
            free = [device for device in (*free, *group) if device != dst]
            holders = [device for device in holders if device not in group] + [dst]
        destinations = everyone if kind == "all_reduce" else (0,)
        for dst in rng.sample(destinations, len(destinations)):
            if dst not in holders:
                rounds.append((Step(c, dst, (rng.choice(holders),)),))
                holders.append(dst)
        chunks.append(Chunk(Fraction(part, sum(parts)), everyone, destinations))
    return Schedule(kind, "drawn", tuple(f"cuda:{k}" for k in everyone), tuple(chunks), tuple(rounds))


def rotated(which):
    """A reduce-scatter or all-gather of three devices whose chunks are not in the order of their owners."""
    everyone = (0, 1, 2)
    owners = (1, 2, 0, 1)
    shares = (Fraction(1, 6), Fraction(1, 3), Fraction(1, 3), Fraction(1, 6))
    if which == "reduce_scatter":
        chunks = tuple(Chunk(part, everyone, (owner,)) for part, owner in zip(shares, owners, strict=True))
        steps = tuple(Step(c, owner, everyone) for c, owner in enumerate(owners))
    else:
        chunks = tuple(Chunk(part, (owner,), everyone) for part, owner in zip(shares, owners, strict=True))
        steps = tuple(Step(c, dst, (owner,)) for c, owner in enumerate(owners) for dst in everyone if dst != owner)
    return Schedule(which, "by hand", names(3), chunks, (steps,))


def expression(a, b):
    """Combine two sums in a way that tells (a + b) + c from a + (b + c), but not a + b from b + a."""
    return ("+", *sorted((a, b), key=repr))


def expressions(schedule):
    """Return how each chunk's result is combined in the order that the schedule lists, by chunk and device."""
    cells = {(c, s): f"{s}" for c, chunk in enumerate(schedule.chunks) for s in chunk.sources}
    for chunk, dst, srcs in collective(schedule).steps:
        total = cells[chunk, srcs[0]]
        for src in srcs[1:]:
            total = expression(total, cells[chunk, src])
        cells[chunk, dst] = total
    return cells
