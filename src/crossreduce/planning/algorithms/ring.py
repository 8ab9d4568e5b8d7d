"""``ring``: data travels round the devices, on one ring or on several rings of a topology."""

from __future__ import annotations

from collections.abc import Sequence

from ...schedule import Chunk, Schedule, Step
from ...topology import Topology
from ..request import Participants, Request, read_participants
from .packed import Moves, packed_schedule
from .ring_search import ring_orders


def ring(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
) -> Schedule:
    """Plan a reduction that travels round the devices in a ring.

    The buffer has one chunk per device. Each chunk starts at another device, collects the contributions on its way
    round the ring, and travels on until every destination has the result. In an all-reduce each device sends 2(n-1)/n
    of the buffer, the least of any all-reduce; the price is 2(n-1) rounds. Only links from a device to the next one are
    used; devices that are neither source nor destination forward data.

    Args:
      devices: names, in the order of the ring.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: the number of equal packs of the buffer; each has one chunk per device.
      first: the device at which the first chunk of the first pack starts.
    Returns:
      A schedule of 2(n-1) rounds for an all-reduce, else of fewer.
    Raises:
      PlanError: as ``one_device``.

    >>> len(ring(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]).rounds)
    6

    Source: Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009.
    """
    return ring_schedule(read_participants(devices, sources, destinations, packs, first))


def ring_schedules(request: Request) -> list[Schedule]:
    """Return the schedule of a request: one ring in the order of the devices, or rings along a topology's links."""
    if request.topology is None:
        return [ring_schedule(request.participants)]
    return [_parallel_rings(request.topology, request)]


def ring_schedule(participants: Participants) -> Schedule:
    """Return the schedule of ``ring`` with positions."""
    n = len(participants.devices)
    sources, destinations = frozenset(participants.sources), frozenset(participants.destinations)

    def moves(pack: int) -> Moves:
        for chunk in range(n):
            order = [(chunk + pack + hop) % n for hop in range(n)]
            hops = [hop for hop in range(n) if order[hop] in sources]
            start, end = hops[0], hops[-1]
            for hop in range(start + 1, end + 1):
                own = (order[hop],) if order[hop] in sources else ()
                yield hop - 1, Step(chunk, order[hop], (order[hop - 1], *own))
            last = max((hop for hop in range(1, n) if order[(end + hop) % n] in destinations), default=0)
            for hop in range(1, last + 1):
                yield end + hop - 1, Step(chunk, order[(end + hop) % n], (order[(end + hop - 1) % n],))

    return packed_schedule(participants, "ring", n, moves)


def _parallel_rings(topology: Topology, request: Request) -> Schedule:
    """Return a schedule of rings that share the links of a topology, each with an equal share of the buffer."""
    participants = request.participants
    chunks: list[Chunk] = []
    rounds: list[list[Step]] = []
    orders = ring_orders(topology, participants.devices)
    for order in orders:
        number = {device: k for k, device in enumerate(order)}
        here = [participants.devices.index(device) for device in order]
        one = ring_schedule(
            participants._replace(
                devices=order,
                sources=tuple(number[device] for device in request.sources),
                destinations=tuple(number[device] for device in request.destinations),
            )
        )
        base = len(chunks)
        chunks += [
            Chunk(share / len(orders), participants.sources, participants.destinations) for share, _, _ in one.chunks
        ]
        for r, steps in enumerate(one.rounds):
            if r == len(rounds):
                rounds.append([])
            rounds[r] += [Step(base + c, here[dst], tuple(here[src] for src in srcs)) for c, dst, srcs in steps]
    return Schedule(participants.collective, "ring", participants.devices, tuple(chunks), tuple(map(tuple, rounds)))
