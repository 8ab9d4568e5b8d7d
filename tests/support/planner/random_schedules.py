"""Random schedules, right and wrong, of any form that a program must support."""

from fractions import Fraction

from strategies import names

from crossreduce import Chunk, Schedule, Step


def random_schedule(rng):
    """Return a random schedule of 4 or 6 devices and 1 or 2 chunks, for one of three collectives. It may be wrong."""
    n = rng.choice([4, 6])
    everyone = tuple(range(n))
    kind = rng.choice(["all_reduce", "all_reduce", "all_reduce", "reduce_scatter", "all_gather"])
    chunks, rounds, count = [], [[] for _ in range(n + 4)], rng.choice([1, 1, 2])
    for c in range(count):
        root = rng.randrange(n)
        sources = (root,) if kind == "all_gather" else everyone
        destinations = (root,) if kind == "reduce_scatter" else tuple(rng.sample(everyone, n))
        if kind == "all_reduce" and rng.random() < 0.3:
            destinations = tuple(rng.sample(everyone, rng.randint(1, n)))
        chunks.append(Chunk(Fraction(1, count), sources, destinations))
        chain, at = rng.sample(everyone, n), 0  # ``at`` is the round of the next step
        if kind == "all_gather":
            chain = [root]
        for k in range(1, len(chain)):  # collect along a chain of devices
            rounds[at].append(Step(c, chain[k], (chain[k - 1], chain[k])[:: rng.choice([1, -1])]))
            at += 1
        for _ in range(rng.randint(0, 4)):  # steps that are needless, or that spoil the result
            srcs = tuple(rng.sample(everyone, rng.randint(1, 3)))
            rounds[rng.randrange(len(rounds))].append(Step(c, rng.randrange(n), srcs))
        if rng.random() < 0.3:  # two devices swap their values
            a, b = rng.sample(everyone, 2)
            rounds[at] += [Step(c, a, (b,)), Step(c, b, (a,))]
            chain[-1] = {a: b, b: a}.get(chain[-1], chain[-1])
            at += 1
        if rng.random() < 0.4:  # two devices combine the same values, and send their results to different devices
            a, b = rng.sample(everyone, 2)
            rounds[at + 1] += [Step(c, dst, (rng.choice([a, b]),)) for dst in destinations if dst not in (a, b)]
            rounds[at] += [Step(c, dst, (chain[-1],)) for dst in (a, b) if dst != chain[-1]]
        else:
            rounds[at] += [Step(c, dst, (chain[-1],)) for dst in destinations if dst != chain[-1]]
    for steps in rounds:
        rng.shuffle(steps)
    return Schedule(kind, "chance", names(n), tuple(chunks), tuple(map(tuple, rounds)))
