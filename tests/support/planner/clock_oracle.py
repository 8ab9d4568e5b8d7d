"""The clocks of simulations, tick by tick and in exact fractions. Nothing here imports crossreduce.

Input: a schedule, a topology, bytes, and costs as plain numbers. Output: the times and the bytes.
"""

from collections import Counter, defaultdict
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

GB = 10**9


class Clocks(NamedTuple):
    """The results of an oracle."""

    seconds: Fraction  # of the event-driven clock
    ticks: list  # the seconds of each tick of the lock-step clock
    carried: Counter  # bytes by link, in whole elements
    busy: Counter  # seconds by link
    ends: list  # for each tick of the event-driven clock, when the last transfer of this tick or an earlier one ends


def between_hosts(pair):
    """Return whether a link leads out of a host. A node's host is the part of its name before the last slash."""
    return len({node.rpartition("/")[0] for node in pair}) == 2


def routes(schedule, topology, r, chunk, src, dst):
    """Return the links of a transfer. The schedule's route for its round is preferred to its route for all rounds."""
    a, b = schedule.devices[src], schedule.devices[dst]
    named = [route for route in schedule.routes if route[:3] == (chunk, src, dst) and route.round in (None, r)]
    named.sort(key=lambda route: route.round is None)
    return list(pairwise((a, *named[0].through, b) if named else topology.route(a, b)))


def clocks(schedule, topology, nbytes, itemsize=1, *, queues=(), reduction=None, messages=None, shared=()):
    """Return the times and bytes of a schedule.

    Args:
      queues: a pair. First, for each tick, a Counter of the seconds in which each host queues its operations. Second, a
        function that returns the host that queues a step's operation, or None.
      reduction: the GB/s with which a device combines values.
      messages: the transfers per second of a link between hosts.
      shared: (GB/s, links) of each limit that links share.
    """
    width = {(link.src, link.dst): link.bandwidth * GB for link in topology.links}
    delay = {(link.src, link.dst): link.latency_s for link in topology.links}
    whole = [(stop - start) * itemsize for start, stop in schedule.spans(nbytes // itemsize)]  # the bytes of each chunk
    carried, busy, ticks, ends = Counter(), Counter(), [], []
    by_tick, queue_of = queues or ([], lambda step: None)
    ready, free, queued = {}, defaultdict(Fraction), Counter()
    for t in range(len(schedule.rounds) + schedule.pieces - 1 if nbytes and schedule.rounds else 0):
        load, latency, reads = Counter(), Fraction(0), []
        for r, steps in enumerate(schedule.rounds):
            if not 0 <= t - r < schedule.pieces:
                continue
            for step in steps:
                chunk, dst, srcs = step
                piece = schedule.chunks[chunk].share * nbytes / schedule.pieces
                for src in srcs:
                    path = [] if src == dst else routes(schedule, topology, r, chunk, src, dst)
                    uses = {("link", pair): piece / width[pair] for pair in path}
                    for pair in path:
                        carried[pair] += whole[chunk] * (t == r)  # count the bytes of all pieces once
                        if messages and between_hosts(pair):
                            uses["messages", pair] = 1 / Fraction(messages)
                        for k, (speed, links) in enumerate(shared):
                            if pair in links:
                                uses["shared", k] = uses.get(("shared", k), 0) + piece / Fraction(speed) / GB
                    if reduction and len(srcs) > 1:
                        uses["reduction", dst] = piece * (len(srcs) + 1) / len(srcs) / Fraction(reduction) / GB
                    load.update(uses)
                    delayed = sum(delay[pair] for pair in path)
                    latency = max(latency, delayed)
                    reads.append((t - r, step, src, uses, delayed))
        busy.update({key[1]: seconds for key, seconds in load.items() if key[0] == "link"})
        now = by_tick[t] if by_tick else Counter()
        ticks.append(latency + max([0, *load.values(), *now.values()]))
        queued.update(now)
        occupied, made = defaultdict(Fraction, free), {}
        for piece, step, src, uses, delayed in reads:
            start = max([ready.get((piece, step.chunk, src), Fraction(0)), *(free[key] for key in uses)])
            end = max(start + max([0, *(load[key] for key in uses)]), queued[queue_of(step)]) + delayed
            for key in uses:
                occupied[key] = max(occupied[key], end)
            place = piece, step.chunk, step.dst
            made[place] = max(made.get(place, Fraction(0)), end)
        ready.update(made)
        free = occupied
        ends.append(max([*made.values(), *ends[-1:], Fraction(0)]))
    return Clocks(ends[-1] if ends else Fraction(0), ticks, carried, busy, ends)
