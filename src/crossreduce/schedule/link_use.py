"""The use of each link over time in a simulation: how many bytes it has carried at each of several moments.

Input: a ``Schedule``, a ``Topology``, bytes, ``Costs``. Output: one list of numbers per link. The moments divide the
simulated time into equal parts, so the size of the result does not depend on the number of transfers.

In the simulation a transfer has a fixed part of its links' bandwidths from the end of its latency to its end, so its
bytes are spread evenly over this time. Equal ticks that the clock computes at once are spread evenly too.
"""

from __future__ import annotations

from typing import NamedTuple

from ..topology import Topology
from .clock import EventClock
from .costs import Costs, Pair
from .schedule import Schedule
from .simulate import loads_of
from .traffic import Traffic


class LinkUse(NamedTuple):
    """What a link carries in a simulation."""

    carried: tuple[float, ...]  # bytes up to each moment; the first is 0.0
    transfers: int  # pieces of chunks that pass over the link


def link_use(
    schedule: Schedule, topology: Topology, nbytes: int, seconds: float, parts: int, costs: Costs
) -> dict[Pair, LinkUse]:
    """Return the use of each link that carries data, by (src, dst).

    Args:
      schedule: the schedule; its chunks are cut into its own number of pieces.
      topology: the topology on which it is simulated.
      nbytes: the bytes of the whole buffer.
      seconds: the simulated duration, ``Simulation.seconds``.
      parts: the number of equal parts of the duration, which have ``parts + 1`` moments as ends.
      costs: the costs of the simulation.
    Raises:
      PlanError: the topology has no route for a transfer.

    >>> from crossreduce.planning import ring
    >>> pair = Topology.ring(2, gb_per_s=25)
    >>> use = link_use(ring(pair.devices), pair, 50_000, 2e-6, 4, Costs())
    >>> [round(nbytes) for nbytes in use["cpu:0", "cpu:1"].carried], use["cpu:0", "cpu:1"].transfers
    ([0, 12500, 25000, 37500, 50000], 2)
    """
    import numpy as np

    loads = loads_of(schedule.cut_into(1), topology, costs)
    traffic = loads.traffic
    pairs, pieces = list(traffic.links), schedule.pieces
    # In a generated schedule, each link of an orbit carries an equal number of all transfers over the orbit.
    order = traffic.orbits.order if traffic.orbits else 1
    counts = {
        pair: pieces * sum(map(len, by_round.values())) * order // traffic.copies(pair)
        for pair, by_round in traffic.links.items()
    }
    if not nbytes or not seconds:
        return _use_of_all_links({pair: LinkUse((0.0,) * (parts + 1), counts[pair]) for pair in pairs}, traffic)
    number = {pair: k for k, pair in enumerate(pairs)}
    links = [[number[pair] for pair in read.pairs] for read in traffic.reads]
    first = np.concatenate([[0], np.cumsum(list(map(len, links)))])  # for each read, the position of its links in link
    link = np.array([k for links_of_read in links for k in links_of_read], dtype=np.intp)
    size = np.array([traffic.shares[read.chunk] for read in traffic.reads]) * nbytes / pieces
    latency = np.array([read.latency_s for read in traffic.reads])
    # Up to moment m, a link has carried the sum of rate * (m - time) over the changes of its rate until then.
    rates, products = np.zeros((len(pairs), parts + 2)), np.zeros((len(pairs), parts + 2))
    for served in EventClock(loads, nbytes).served(pieces):
        reads = slice(served.first, served.first + len(served.start))
        start, end, moved = served.start + latency[reads], served.end, size[reads] * served.ticks
        start = np.minimum(start, end)
        span = np.maximum(end - start, 1e-9 * seconds / parts)  # not 0: a rate is finite
        rate = np.where(moved > 0, moved / span, 0.0)
        uses = slice(first[reads.start], first[reads.stop])
        link_counts = np.diff(first[reads.start : reads.stop + 1])
        for change, time in ((rate, start), (-rate, start + span)):
            next_moment = np.ceil(time * (parts / seconds)).clip(0, parts + 1).astype(np.intp)
            cells = link[uses], np.repeat(next_moment, link_counts)
            np.add.at(rates, cells, np.repeat(change, link_counts))
            np.add.at(products, cells, np.repeat(change * time, link_counts))
    moments = np.linspace(0.0, seconds, parts + 1)
    carried = rates.cumsum(axis=1)[:, :-1] * moments - products.cumsum(axis=1)[:, :-1]
    carried = np.maximum.accumulate(carried.clip(0.0), axis=1)
    carried /= np.array([traffic.copies(pair) for pair in pairs]).reshape(-1, 1)
    return _use_of_all_links(
        {pair: LinkUse(tuple(carried[k].tolist()), counts[pair]) for k, pair in enumerate(pairs)}, traffic
    )


def _use_of_all_links(used: dict[Pair, LinkUse], traffic: Traffic) -> dict[Pair, LinkUse]:
    """Return the use of every link, given the use of the links that stand for orbits: see ``Traffic``."""
    return {pair: used[listed] for pair, listed in traffic.used.items()}
