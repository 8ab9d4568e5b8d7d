"""Splits a collective between hosts into parts: the arrays with the same source and destination hosts form a part.

Input: the ranks of the hosts, and a collective. Output: its parts, the schedule between hosts, and for each host the
programs of its ranks. Between hosts, each part is an exchange of its own. The first ranks of a host are its leaders:
leader k owns stripe k of each part, an equal share of the part's arrays. If a part has one array per leader, each
stripe is one array. If the leader itself contributes or needs this array, it does not copy it through a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from ...lowering import ChunkProgram, Program, lower
from ...ops import Numbers, copy_numbers
from ...planning import COLLECTIVES, Request, plan, schedule_for
from ...schedule import Schedule
from ...topology import Topology
from ..intra_host.programs import LINE, PIECE_BYTES, SLOT_BYTES, RankAnalysis, analyze, boundary, fitting_size
from ..transports.base import MESSAGE_NBYTES
from .one_host import CollectiveArray, collective_arrays, one_round, rank_names

SMALL_BYTES: Final = 1 << 14
"""Up to so many bytes, every host sends its partial result of an all-reduce to all others, and one rank does so."""
ARRAY_PIECE_BYTES: Final = 1 << 21
"""The most bytes of a piece of the caller's arrays, if hosts of one rank combine or forward them without copies."""
PIPELINED_BYTES: Final = 1 << 30
"""Large calls are cut into pieces, which are pipelined. So they use the plan for this size, which has the fewest rounds
and messages, since its shares are not pipelined themselves."""
SAME_SPEED: Final = Fraction(1, 10)
SAME_LATENCY_S: Final = Fraction(5, 100_000)
"""Plans are kept if no link changes by more than this; see ``same_speeds``. Two measurements of the same link differ by
a few percent in bandwidth, and on busy hosts by some 10 us in latency."""

Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host, ascending
Lost = tuple[tuple[int, int], ...]  # pairs of hosts without a link, ascending


class HostPart(NamedTuple):
    """All arrays of a collective with the same source hosts and the same destination hosts."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    arrays: tuple[CollectiveArray, ...]

    @property
    def crosses(self) -> bool:
        """Whether the arrays move between hosts."""
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
    """Return the largest number of arrays that a host sends or receives, if each array is sent once."""
    all_parts = tuple(parts)

    def most(moves: Callable[[HostPart, int], bool]) -> int:
        return max(sum(len(part.arrays) for part in all_parts if moves(part, host)) for host in range(hosts))

    sent = most(lambda part, host: host in part.sources and part.destinations != (host,))
    return max(sent, most(HostPart.enters))


def buffer_count(parts: Iterable[HostPart], rank: int) -> int:
    """Return how many buffers the caller of a collective has on a rank."""
    arrays = [array for part in parts for array in part.arrays]
    read = [array.input for array in arrays if rank in array.sources]
    return 1 + max(read + [array.output for array in arrays if rank in array.destinations])


def can_use_arrays(parts: Iterable[HostPart], between: Program, numbers: Numbers) -> bool:
    """Return whether hosts of one rank may exchange the caller's arrays without copies, by the program ``between``.

    In a call in place, results overwrite contributions. A result that a host receives includes the host's contribution.
    So if the host has sent it only once, the other host has it. Before values combine, what was sent in earlier rounds
    is complete (see ``compiled_calls.piece_stages``).
    """
    if _only_moves(parts):
        return True
    return not numbers.exact and numbers.accumulator == numbers.dtype and all(map(_is_sent_before, between.chunks))


def _only_moves(parts: Iterable[HostPart]) -> bool:
    """Return whether hosts combine nothing that they get from others."""
    return all(len(part.sources) == 1 for part in parts if part.crosses)


def _is_sent_before(chunk: ChunkProgram) -> bool:
    """Return whether every host that receives the result of a chunk has sent or combined its contribution only once."""
    count = len(chunk.sources)
    reads = Counter(operand for instruction in chunk.instructions for operand in instruction.operands)
    own = {host: k for k, host in enumerate(chunk.sources)}
    made = [chunk.instructions[result - count] for result in chunk.results if result >= count]
    return not any(len(each.operands) == 1 and reads[own.get(each.device, -1)] > 1 for each in made)


def array_pieces(parts: Iterable[HostPart], between: Program, smallest: int, transport: object) -> tuple[int, int]:
    """Return ``smallest`` and ``largest`` of ``piece_sizes`` if hosts exchange the caller's arrays. No slot limits it.

    ``transport``: its ``message_nbytes`` is used if hosts only send arrays to each other, since then nothing can be
    done while a message is under way.
    """
    if between.round_count == 1 and _only_moves(parts):
        nbytes = int(getattr(transport, "message_nbytes", MESSAGE_NBYTES))
        return nbytes, nbytes
    return smallest, ARRAY_PIECE_BYTES


# Between hosts


def host_names(hosts: int) -> tuple[str, ...]:
    """Return the names of hosts in their topology and schedules."""
    return tuple(f"host{k}/cpu:0" for k in range(hosts))


def lost_links(hosts: Hosts, unreached: Mapping[int, Iterable[int]]) -> Lost:
    """Return, in ascending order, the pairs of hosts of which some ranks could not connect to each other.

    ``unreached``: for each rank the ranks to which it could not connect.

    >>> lost_links(((0, 1), (2, 3), (4,)), {0: [4], 1: [], 4: [0]})
    ((0, 2),)
    """
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    pairs = ((host_of[rank], host_of[other]) for rank, others in unreached.items() for other in others)
    return tuple(sorted({(min(pair), max(pair)) for pair in pairs}))


@lru_cache(maxsize=256)
def distances(hosts: int, lost: Lost) -> tuple[tuple[int, ...], ...]:
    """Return for every two hosts the number of links on the shortest route between them, or -1 if there is none.

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

    Bandwidths may differ by 10%. Latencies, which vary more, may differ by 50 us or by a factor of 2.
    """
    if planned.nodes != measured.nodes or planned.by_ends.keys() != measured.by_ends.keys():
        return False
    pairs = [(link, measured.by_ends[link.src, link.dst]) for link in planned.links]
    slack = 1 + SAME_SPEED
    return all(
        old.bandwidth <= slack * new.bandwidth
        and new.bandwidth <= slack * old.bandwidth
        and abs(old.latency_s - new.latency_s) <= max(min(old.latency_s, new.latency_s), SAME_LATENCY_S)
        for old, new in pairs
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
    """Return the schedule by which hosts exchange the partial results of their ranks; each part has chunks of its own.

    Args:
      topology: the links between hosts, or ``None`` if they were not measured; then they are assumed to be equal.
      hosts: the ranks of each host.
      collective: its name.
      nbytes: the size of all arrays together in a message, rounded up to a power of 2.
      root: the root rank of a collective that has one.
      widened: whether partial results are larger than results.
      lost: the pairs of hosts without a link. Other hosts forward the data between them.
    """
    names, count = host_names(len(hosts)), len(hosts)
    # With 2 hosts, or links that are assumed to be equal, one round (for an all-reduce "direct") is optimal: all hosts
    # send and receive at the same time. In a reduce or broadcast of more than 2 hosts they do not, so it is planned.
    rooted = count > 2 and collective in ("reduce", "broadcast")
    if collective in COLLECTIVES and count > 2 and (topology is not None or rooted or lost):
        nbytes = nbytes if nbytes <= PIECE_BYTES else PIPELINED_BYTES
        wiring = topology or equal_links(count, lost)
        root_host = None if root is None else next(names[k] for k, ranks in enumerate(hosts) if root in ranks)
        return plan(wiring, collective, nbytes, root=root_host).schedule.cut_into(1)
    if collective == "all_reduce":
        # 2 hosts send equally many elements in both algorithms. In "direct" half of them are results, which are smaller
        # than widened partial results.
        once = (count == 2 and not widened) or nbytes * (count - 1) <= SMALL_BYTES
        return schedule_for(Request(collective, names, names, "one_shot" if once else "direct"))
    crossing = [part for part in host_parts(hosts, collective, root) if part.crosses]
    return one_round(collective, names, [(part.sources, part.destinations) for part in crossing])


@lru_cache(maxsize=64)
def equal_links(hosts: int, lost: Lost) -> Topology:
    """Return the topology assumed before links are measured: equal links between all hosts except ``lost`` pairs."""
    wiring = Topology.full_mesh(host_names(hosts), gb_per_s=1, latency_s=1e-4)
    for a, b in lost:
        wiring = wiring.without_link(a, b)
    return wiring


# On a host


class ArrayCut(NamedTuple):
    """The range of an array that belongs to a leader's stripe. ``array``: the number of the array in its part.

    ``start`` and ``stop`` count shares of the array. An array has one share for each leader.
    """

    array: int
    leader: int
    start: int
    stop: int


@lru_cache(maxsize=256)
def cuts(arrays: int, leaders: int) -> tuple[ArrayCut, ...]:
    """Return the cuts by which equal stripes divide arrays, in order. A stripe has at most one cut of each array.

    >>> [tuple(cut) for cut in cuts(3, 2)]
    [(0, 0, 0, 2), (1, 0, 0, 1), (1, 1, 1, 2), (2, 1, 0, 2)]
    """
    shares = arrays * leaders  # an array has ``leaders`` shares, a stripe ``arrays``
    ends = sorted({*range(0, shares + 1, leaders), *range(0, shares, arrays)})
    bounds = [(start // leaders, start // arrays, start, stop) for start, stop in pairwise(ends)]
    return tuple(ArrayCut(k, leader, start - k * leaders, stop - k * leaders) for k, leader, start, stop in bounds)


class Stripe(NamedTuple):
    """A leader's stripe of a piece of a part. ``size``: the number of its elements.

    ``shifts``: for each array with elements in the stripe, an element's index in the stripe minus that in the array.
    """

    size: int
    shifts: dict[int, int]


@lru_cache(maxsize=4096)
def stripe(arrays: int, leaders: int, leader: int, size: int, nbytes: int) -> Stripe:
    """Return a leader's stripe of a piece with ``size`` elements, of ``nbytes`` bytes, of each of ``arrays`` arrays.

    >>> stripe(3, 2, 1, 100, 8)  # begins at the middle of array 1, rounded down to a cache line
    Stripe(size=152, shifts={1: -48, 2: 52})
    """
    at, shifts = 0, {}
    for array, owner, start, stop in cuts(arrays, leaders):
        if owner == leader:
            first, end = (boundary(share, leaders, size, nbytes) for share in (start, stop))
            shifts[array] = at - first
            at += end - first
    return Stripe(at, shifts)


class HostProgram(NamedTuple):
    """A program that the ranks of one host run, and the caller's arrays that its flat buffer consists of, in order."""

    program: Program
    arrays: tuple[tuple[int, int], ...]  # for each: (part number in ``host_parts``, array number in the part)


class HostPrograms(NamedTuple):
    """The programs of a host's ranks; ``None`` if one is not needed. See ``Stripe`` for the leaders' stripes."""

    up: HostProgram | None  # combines the ranks' contributions to partial results, in the leaders' stripes
    local: HostProgram | None  # moves arrays from ranks of this host to other ranks of this host
    down: HostProgram | None  # distributes results from the leaders' stripes to the ranks

    def analyses(self, numbers: Numbers) -> list[RankAnalysis]:
        """Return the analyses of the programs that are not ``None``, in this order."""
        partial, copied = numbers._replace(result=numbers.accumulator, divisor=1), copy_numbers(numbers.result)
        kinds = zip(self, (partial, copied, copied), strict=True)
        return [analyze(local.program, using, len(local.arrays)) for local, using in kinds if local is not None]


@lru_cache(maxsize=256)
def host_programs(hosts: Hosts, collective: str, root: int | None, host: int, leaders: int) -> HostPrograms:
    """Return the programs of a host whose first ``leaders`` ranks exchange. Device k is rank number k of the host."""
    ranks = hosts[host]
    places = {rank: place for place, rank in enumerate(ranks)}
    parts = host_parts(hosts, collective, root)

    def places_of(some_ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(places[rank] for rank in some_ranks if rank in places)

    def program(kind: str, chosen: list[int]) -> HostProgram | None:
        """Return a program for the parts with the numbers ``chosen``, or ``None`` if there are none."""
        arrays = tuple((p, a) for p in chosen for a in range(len(parts[p].arrays)))
        ends, shares = [], []
        for p in chosen:
            part = parts[p].arrays
            stripes = 1 if kind == "local" else leaders  # local arrays are moved whole
            for a, leader, start, stop in cuts(len(part), stripes):
                sources = (leader,) if kind == "down" else places_of(part[a].sources)
                ends.append((sources, (leader,) if kind == "up" else places_of(part[a].destinations)))
                shares.append(Fraction(stop - start, stripes * len(arrays)))
        if not ends:
            return None
        return HostProgram(lower(one_round(f"{collective} {kind}", rank_names(len(ranks)), ends, shares)), arrays)

    numbered = list(enumerate(parts))
    return HostPrograms(
        program("up", [p for p, part in numbered if part.crosses and host in part.sources]),
        program("local", [p for p, part in numbered if part.sources == (host,) and host in part.destinations]),
        program("down", [p for p, part in numbered if part.enters(host)]),
    )


def most_elements(hosts: Hosts, collective: str, root: int | None, numbers: Numbers) -> int:
    """Return the maximum elements per array of a piece that fits into the slots of all hosts."""
    # Hosts with equally many ranks, and the root at the same place, use the same slot memory: analyze one of them.
    kinds = {(len(ranks), ranks.index(root) if root in ranks else -1): k for k, ranks in enumerate(hosts)}
    leaders = min(map(len, hosts))
    analyses = [host_programs(hosts, collective, root, k, leaders).analyses(numbers) for k in kinds.values()]
    return min(fitting_size(analysis, SLOT_BYTES // 2 - LINE, PIECE_BYTES) for analysis in analyses)
