"""A collective between hosts as parts: the arrays that move from the same hosts to the same hosts.

Input: the ranks of the hosts, and a collective. Output: its parts, the schedule between hosts, and for each host the
programs of its ranks. Between hosts, each part is an exchange of its own. On a host, rank k of the ``leaders`` first
ranks owns stripe k of each part, an equal share of the part's arrays. If a part has one array per leader, a stripe is
an array: that of the leader itself, if its rank contributes or needs it, which is then not copied through a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from ...lowering import Program, lower
from ...ops import Numbers, copy_numbers
from ...planning import COLLECTIVES, Request, plan, schedule_for
from ...schedule import Schedule
from ...topology import Topology
from ..intra_host.programs import RankAnalysis, analyze, boundary
from .exchange import EAGER_BYTES
from .one_host import CollectiveArray, collective_arrays, one_round, rank_names

SAME_SPEED: Final = Fraction(1, 10)
SAME_LATENCY_S: Final = Fraction(5, 100_000)
"""Plans are kept if no bandwidth changes by more than this part: measurements of one link differ by a few percent. On
busy hosts latencies differ by some 10 us."""

Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host, ascending
Lost = tuple[tuple[int, int], ...]  # pairs of hosts without a link, ascending


class HostPart(NamedTuple):
    """The arrays of a collective that have these source hosts and these destination hosts."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    arrays: tuple[CollectiveArray, ...]

    @property
    def crosses(self) -> bool:
        """Whether it moves between hosts."""
        return len({*self.sources, *self.destinations}) > 1

    def enters(self, host: int) -> bool:
        """Return whether a host needs contributions of other hosts."""
        return host in self.destinations and self.sources != (host,)


@lru_cache(maxsize=256)
def host_parts(hosts: Hosts, collective: str, root: int | None) -> tuple[HostPart, ...]:
    """Return the parts of a collective, in an order that all ranks share.

    >>> for part in host_parts(((0, 1), (2,)), "scatter", 2):
    ...     print(part.sources, part.destinations, len(part.arrays))
    (1,) (0,) 2
    (1,) (1,) 1
    """
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    arrays_of: dict[tuple[tuple[int, ...], tuple[int, ...]], list[CollectiveArray]] = {}
    for array in collective_arrays(collective, len(host_of), root):
        sources, destinations = (tuple(sorted({host_of[rank] for rank in ranks})) for ranks in array[:2])
        arrays_of.setdefault((sources, destinations), []).append(array)
    return tuple(HostPart(*ends, tuple(arrays)) for ends, arrays in arrays_of.items())


def crossing_arrays(hosts: int, parts: Iterable[HostPart]) -> int:
    """Return the most arrays that any host sends, or that it receives, if each array crosses once."""
    known = tuple(parts)

    def moving(chosen: Callable[[HostPart, int], bool]) -> int:
        return max(sum(len(part.arrays) for part in known if chosen(part, host)) for host in range(hosts))

    leaving = moving(lambda part, host: host in part.sources and part.destinations != (host,))
    return max(leaving, moving(HostPart.enters))


# Between hosts


def host_names(hosts: int) -> tuple[str, ...]:
    """Return the names of hosts in their topology and schedules."""
    return tuple(f"host{k}/cpu:0" for k in range(hosts))


def lost_links(hosts: Hosts, unreached: Mapping[int, Iterable[int]]) -> Lost:
    """Return the pairs of hosts without a link, in order: those of which some ranks could not connect to each other.

    ``unreached``: for each rank those to which it could not connect.

    >>> lost_links(((0, 1), (2, 3), (4,)), {0: [4], 1: [], 4: [0]})
    ((0, 2),)
    """
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    pairs = ((host_of[rank], host_of[other]) for rank, others in unreached.items() for other in others)
    return tuple(sorted({(min(pair), max(pair)) for pair in pairs}))


@lru_cache(maxsize=256)
def distances(hosts: int, lost: Lost) -> tuple[tuple[int, ...], ...]:
    """Return for every two hosts the least number of links between them; -1: no route exists.

    >>> distances(3, ((0, 2),))
    ((0, 1, 2), (1, 0, 1), (2, 1, 0))
    """
    rows = []
    for start in range(hosts):
        hops, frontier = {start: 0}, [start]
        for host in frontier:
            for other in range(hosts):
                if other not in hops and (min(host, other), max(host, other)) not in lost:
                    hops[other] = hops[host] + 1
                    frontier.append(other)
        rows.append(tuple(hops.get(host, -1) for host in range(hosts)))
    return tuple(rows)


def same_speeds(planned: Topology, measured: Topology) -> bool:
    """Return whether two topologies have the same links, with nearly the same speeds.

    Bandwidths may differ by a tenth. Latencies, which vary more, may differ by a factor of two, or by 50 us.
    """
    if planned.nodes != measured.nodes or planned.by_ends.keys() != measured.by_ends.keys():
        return False
    pairs = [(link, measured.by_ends[link.src, link.dst]) for link in planned.links]
    slack = 1 + SAME_SPEED
    return all(
        one.bandwidth <= slack * other.bandwidth
        and other.bandwidth <= slack * one.bandwidth
        and abs(one.latency_s - other.latency_s) <= max(min(one.latency_s, other.latency_s), SAME_LATENCY_S)
        for one, other in pairs
    )


@lru_cache(maxsize=256)
def host_schedule(
    topology: Topology | None,
    hosts: Hosts,
    collective: str,
    nbytes: int,
    root: int | None,
    widened: bool = False,
    lost: Lost = (),
) -> Schedule:
    """Return the schedule by which hosts exchange the partial results of their ranks, with chunks for each part.

    Args:
      topology: the links between hosts; ``None``: they were not measured and are assumed to be equal.
      hosts: the ranks of each host.
      collective: its name.
      nbytes: that travel, of all arrays together, rounded up to a power of 2.
      root: the root, of a collective that has one.
      widened: whether partial results are larger than results.
      lost: the pairs of hosts without a link. Data from one to the other has to be forwarded.
    """
    names, count = host_names(len(hosts)), len(hosts)
    # With 2 hosts, or links that are taken for equal, one round is optimal, and so is "direct": hosts send and receive
    # at the same time. A reduce or broadcast of more than 2 hosts is not balanced in that way, so it is planned.
    rooted = count > 2 and collective in ("reduce", "broadcast")
    if collective in COLLECTIVES and count > 2 and (topology is not None or rooted or lost):
        wiring = topology or equal_links(count, lost)
        main = None if root is None else next(names[k] for k, ranks in enumerate(hosts) if root in ranks)
        return plan(wiring, collective, nbytes, root=main).schedule.cut_into(1)
    if collective == "all_reduce":
        # Of 2 hosts each sends its array once with both algorithms, but the second round of direct sends results.
        once = (count == 2 and not widened) or nbytes * (count - 1) <= EAGER_BYTES
        return schedule_for(Request(collective, names, names, "one_shot" if once else "direct"))
    crossing = [part for part in host_parts(hosts, collective, root) if part.crosses]
    return one_round(collective, names, [(part.sources, part.destinations) for part in crossing])


@lru_cache(maxsize=64)
def equal_links(hosts: int, lost: Lost) -> Topology:
    """Return the assumed topology of hosts whose links were not measured: equal ones between all but ``lost`` pairs."""
    wiring = Topology.full_mesh(host_names(hosts), gb_per_s=1, latency_s=1e-4)
    for a, b in lost:
        wiring = wiring.without_link(a, b)
    return wiring


# On a host


class ArrayCut(NamedTuple):
    """The share of array number ``array`` of a part that is in the stripe of a leader.

    It is from ``start`` to ``stop``, which count shares of the array: one share per leader.
    """

    array: int
    leader: int
    start: int
    stop: int


@lru_cache(maxsize=256)
def cuts(arrays: int, leaders: int) -> tuple[ArrayCut, ...]:
    """Return how equal stripes cut arrays, in order; a stripe has at most one cut of an array.

    >>> [tuple(cut) for cut in cuts(3, 2)]
    [(0, 0, 0, 2), (1, 0, 0, 1), (1, 1, 1, 2), (2, 1, 0, 2)]
    """
    whole = arrays * leaders  # an array has ``leaders`` shares, a stripe ``arrays``
    ends = sorted({*range(0, whole + 1, leaders), *range(0, whole, arrays)})
    bounds = [(start // leaders, start // arrays, start, stop) for start, stop in pairwise(ends)]
    return tuple(ArrayCut(k, leader, start - k * leaders, stop - k * leaders) for k, leader, start, stop in bounds)


class Stripe(NamedTuple):
    """A leader's stripe of a piece of a part: its elements, and the cuts of arrays that it consists of.

    ``shifts``: for each array of which it has a cut, the elements from the place in the array to that in the stripe.
    """

    size: int
    shifts: dict[int, int]


@lru_cache(maxsize=4096)
def stripe(arrays: int, leaders: int, leader: int, size: int, nbytes: int) -> Stripe:
    """Return a leader's stripe of ``arrays`` arrays of which a piece has ``size`` elements of ``nbytes`` bytes.

    >>> stripe(3, 2, 1, 100, 8)  # from the line after half of array 1
    Stripe(size=152, shifts={1: -48, 2: 52})
    """
    at, shifts = 0, {}
    for array, owner, start, stop in cuts(arrays, leaders):
        if owner == leader:
            first, end = (boundary(share, leaders, size, nbytes) for share in (start, stop))
            shifts[array] = at - first
            at += end - first
    return Stripe(at, shifts)


class HostArrays(NamedTuple):
    """A program of the ranks of a host, and the arrays of which its flat buffer consists."""

    program: Program
    arrays: tuple[tuple[int, int], ...]  # in order: (number of the part in ``host_parts``, number of its array)


class HostPrograms(NamedTuple):
    """What the ranks of a host execute; ``None``: nothing. Partial results and results are in the leaders' stripes."""

    up: HostArrays | None  # combines the ranks' contributions to partial results
    local: HostArrays | None  # moves arrays from ranks of this host to others of it
    down: HostArrays | None  # distributes results

    def analyses(self, numbers: Numbers) -> list[RankAnalysis]:
        """Return the analyses of those of the three that there are."""
        partial, copied = numbers._replace(result=numbers.accumulator, divisor=1), copy_numbers(numbers.result)
        kinds = zip(self, (partial, copied, copied), strict=True)
        return [analyze(local.program, using, len(local.arrays)) for local, using in kinds if local is not None]


@lru_cache(maxsize=256)
def host_programs(hosts: Hosts, collective: str, root: int | None, host: int) -> HostPrograms:
    """Return the programs of a host. Their devices are its ranks, by their places."""
    ranks, leaders = hosts[host], min(map(len, hosts))
    places = {rank: place for place, rank in enumerate(ranks)}
    parts = host_parts(hosts, collective, root)

    def here(others: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(places[rank] for rank in others if rank in places)

    def program(kind: str, chosen: list[int]) -> HostArrays | None:
        arrays = tuple((p, a) for p in chosen for a in range(len(parts[p].arrays)))
        ends, shares = [], []
        for p in chosen:
            part = parts[p].arrays
            stripes = 1 if kind == "local" else leaders
            for a, leader, start, stop in cuts(len(part), stripes):
                sources = (leader,) if kind == "down" else here(part[a].sources)
                ends.append((sources, (leader,) if kind == "up" else here(part[a].destinations)))
                shares.append(Fraction(stop - start, stripes * len(arrays)))
        if not ends:
            return None
        return HostArrays(lower(one_round(f"{collective} {kind}", rank_names(len(ranks)), ends, shares)), arrays)

    numbered = list(enumerate(parts))
    return HostPrograms(
        program("up", [p for p, part in numbered if part.crosses and host in part.sources]),
        program("local", [p for p, part in numbered if part.sources == (host,) and host in part.destinations]),
        program("down", [p for p, part in numbered if part.enters(host)]),
    )
