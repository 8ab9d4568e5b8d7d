"""Schedules for the tests of the exporters, and the expressions that the exported programs must compute."""

import random
from fractions import Fraction
from itertools import combinations

from hypothesis import strategies as st
from strategies import names

from crossreduce import Chunk, Schedule, Step
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.planning import PLANNERS

KINDS = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")


@st.composite
def synchronous(draw, kinds=KINDS):
    """Draw a schedule whose rounds have many steps per chunk, some of which read what other steps of the round replace.

    So devices swap values, rotate them in circles, exchange and add them, and pass a value on in the round that
    replaces it. Some steps are needless. Shares may differ if NCCL's collective allows it.
    """
    kind = draw(st.sampled_from(kinds))
    n = draw(st.integers(2, 5))
    rng = random.Random(draw(st.integers(0, 2**32)))
    everyone = tuple(range(n))
    root = rng.randrange(n)
    owned = kind in ("reduce_scatter", "all_gather")  # each device owns one chunk
    weights = [1] * n if owned else draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    chunks, rounds_by_chunk = [], []
    for c, weight in enumerate(weights):
        owner = c if owned else root
        sources = (owner,) if kind in ("broadcast", "all_gather") else everyone
        destinations = (owner,) if kind in ("reduce", "reduce_scatter") else everyone
        chunks.append(Chunk(Fraction(weight, sum(weights)), sources, destinations))
        rounds_by_chunk.append(rounds_of_a_chunk(rng, c, n, chunks[-1]))
    rounds = []
    for r in range(max(map(len, rounds_by_chunk))):
        steps = [step for of_chunk in rounds_by_chunk if r < len(of_chunk) for step in of_chunk[r]]
        rounds.append(tuple(rng.sample(steps, len(steps))))
    return Schedule(kind, "drawn", tuple(f"cuda:{k}" for k in everyone), tuple(chunks), tuple(rounds))


def rounds_of_a_chunk(rng, c, n, chunk):
    """Return random synchronous rounds of one chunk that end with the result on each destination."""
    cells = {source: frozenset([source]) for source in chunk.sources}  # by device: the contributions in its value
    rounds = []
    for _ in range(rng.randint(0, 4)):
        steps, made = [], {}
        for dst in rng.sample(range(n), rng.randint(1, n)):
            srcs, sum_of = [], frozenset()
            for src in rng.sample(sorted(cells), rng.randint(1, min(3, len(cells)))):
                if not sum_of & cells[src]:
                    srcs.append(src)
                    sum_of |= cells[src]
            steps.append(Step(c, dst, tuple(srcs)))
            made[dst] = sum_of
        if cover(rng, {**cells, **made}, chunk.sources):
            cells.update(made)
            rounds.append(steps)
    last = [
        Step(c, dst, cover(rng, cells, chunk.sources))
        for dst in chunk.destinations
        if cells.get(dst) != frozenset(chunk.sources) or rng.random() < 0.3
    ]
    return [*rounds, last]


def cover(rng, cells, sources):
    """Return devices, in random order, whose values together have each contribution once, or ``None``."""
    found = [
        devices
        for size in range(1, len(cells) + 1)
        for devices in combinations(sorted(cells), size)
        if sorted(source for device in devices for source in cells[device]) == sorted(sources)
    ]
    if not found:
        return None
    chosen = rng.choice(found)
    return tuple(rng.sample(chosen, len(chosen)))


def shares(*parts):
    """Return an all-reduce of two devices by one_device, with chunks of these shares."""
    chunks = tuple(Chunk(Fraction(part), (0, 1), (0, 1)) for part in parts)
    numbers = range(len(parts))
    rounds = (tuple(Step(c, 0, (0, 1)) for c in numbers), tuple(Step(c, 1, (0,)) for c in numbers))
    return Schedule("all_reduce", "one_device", names(2), chunks, rounds)


def rotated(which):
    """Return a reduce-scatter or all-gather of three devices. Its chunks are not in the order of their owners."""
    everyone = (0, 1, 2)
    owners = (1, 2, 0, 1)
    shares = (Fraction(1, 6), Fraction(1, 3), Fraction(1, 3), Fraction(1, 6))
    if which == "reduce_scatter":
        chunks = tuple(Chunk(part, everyone, (owner,)) for part, owner in zip(shares, owners, strict=True))
        steps = tuple(Step(c, owner, everyone) for c, owner in enumerate(owners))
    else:
        chunks = tuple(Chunk(part, (owner,), everyone) for part, owner in zip(shares, owners, strict=True))
        steps = tuple(Step(c, dst, (owner,)) for c, owner in enumerate(owners) for dst in everyone if dst != owner)
    return Schedule(which, "custom", names(3), chunks, (steps,))


def expression(a, b):
    """Return the expression a + b. It differs for (a + b) + c and a + (b + c), but not for a + b and b + a."""
    return ("+", *sorted((a, b), key=repr))


def expressions(schedule):
    """Return the expression of each value that the schedule leaves, by (chunk, device)."""
    cells = {(c, s): f"{s}" for c, chunk in enumerate(schedule.chunks) for s in chunk.sources}
    for steps in schedule.rounds:
        made = {}
        for chunk, dst, srcs in steps:
            made[chunk, dst] = cells[chunk, srcs[0]]
            for src in srcs[1:]:
                made[chunk, dst] = expression(made[chunk, dst], cells[chunk, src])
        cells.update(made)
    return cells


def results(made):
    """Return the chunk whose result a ``Collective`` must put into each unit of an output, by (rank, unit)."""
    found = {}
    for block in made.blocks:
        for rank in made.program.chunks[block.chunk].destinations:
            offset = made.output(rank, block).offset
            found.update({(rank, offset + k): block.chunk for k in range(block.size)})
    return found


def exported(planner, n, **options):
    """Return the MSCCL XML file of a planner's schedule for n devices."""
    return to_msccl_xml(PLANNERS[planner](names(n), **options))
