"""Planners for plain lists of devices: each turns a request into a schedule.

In: devices' names, who contributes, who needs the result.  Out: a ``Schedule``.  All share one
signature, work for any sources and destinations, and know no arrays, sizes or clocks.

A request for several packs gets one schedule with the chunks of all packs; pack ``p`` is rooted at
``first + p``, so that roots are spread over the devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from ..errors import PlanError, message
from ..schedule import Chunk, Schedule, Step, live_rounds
from ..values import read_devices


class Request(NamedTuple):
    """What a planner is asked for. ``sources`` and ``destinations`` are positions in ``devices``."""

    devices: tuple[str, ...]
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    packs: int
    first: int


# What one pack needs: (which of the pack's chunks, in which round, what) in any order.
Moves = Iterable[tuple[int, Step]]


def one_device(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
    root: str | None = None,
) -> Schedule:
    """Plan to combine everything on one device and copy the result to all destinations.

    Two rounds and the fewest steps, but all bytes go through one device. What TensorFlow's
    ``ReductionToOneDevice`` does.

    Args:
      devices: names, in the order in which components are combined.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: into how many equal packs the buffer is cut.
      first: which destination is the root of the first pack; further packs take the next ones.
      root: a device that is the root of every pack; it need be neither source nor destination.
    Returns:
      A verified-by-construction schedule of at most 2 rounds.
    Raises:
      PlanError: a source, destination or root that is not among ``devices``; fewer than one pack.

    >>> print(one_device(["cpu:0", "cpu:1", "cpu:2"], destinations=["cpu:1"]))
    reduce one_device: 3 devices, 1 chunk, 1 round, 1 step
      round 0: chunk 0: cpu:1 <- cpu:0 + cpu:1 + cpu:2
    """
    request = _request(devices, sources, destinations, packs, first)
    fixed = None if root is None else _position(request.devices, root, "the root")

    def moves(pack: int) -> Moves:
        main = request.destinations[pack % len(request.destinations)] if fixed is None else fixed
        if request.sources != (main,):
            yield 0, Step(0, main, request.sources)
        for dst in request.destinations:
            if dst != main:
                yield 1, Step(0, dst, (main,))

    return _schedule("one_device", request, 1, moves)


def hierarchical_copy(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
    groups: Sequence[Sequence[str]] | None = None,
) -> Schedule:
    """Plan to reduce inside groups of devices, then between the groups, and to copy back the same way.

    Each group sums on its main device, the mains sum on the root, the root copies to the mains and
    these to their groups. On 8 devices and without ``groups`` these are the trees that TensorFlow's
    ``HierarchicalCopyAllReduce`` uses on a DGX-1 (``aggregate_gradients_using_hierarchical_copy`` in
    its cross_device_utils.py): halves 0-3 and 4-7, root ``i`` and its partner ``i + 4``. Where the
    number is odd the second half has one more device, and every device counts.

    Args:
      devices: names, in the order in which components are combined.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: into how many equal packs the buffer is cut; each has a tree of its own.
      first: which device is the root of the first pack's tree; further packs take the next ones.
      groups: the devices by group; ``None``: two halves of the sources (and of other destinations).
    Returns:
      A schedule of at most 4 rounds.
    Raises:
      PlanError: as ``one_device``; or groups that miss a device or name one twice.

    >>> print(hierarchical_copy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]))
    all_reduce hierarchical_copy: 4 devices, 1 chunk, 4 rounds, 6 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 0: cpu:2 <- cpu:2 + cpu:3
      round 1: chunk 0: cpu:0 <- cpu:0 + cpu:2
      round 2: chunk 0: cpu:2 <- cpu:0
      round 3: chunk 0: cpu:1 <- cpu:0
      round 3: chunk 0: cpu:3 <- cpu:2
    """
    request = _request(devices, sources, destinations, packs, first)
    if groups is None:
        others = [d for d in request.destinations if d not in request.sources]
        s, o = len(request.sources) // 2, (len(others) + 1) // 2
        split = [[*request.sources[:s], *others[:o]], [*request.sources[s:], *others[o:]]]
    else:
        split = _groups(request.devices, groups)
    split = [group for group in split if group]
    roots = [s for s in request.sources if s in request.destinations] or list(request.sources)

    def moves(pack: int) -> Moves:
        root = roots[pack % len(roots)]
        rank = next(group.index(root) for group in split if root in group)
        mains: list[int] = []  # of the groups that have a source, in the groups' order
        for group in split:
            members = [d for d in group if d in request.sources]
            if members:
                main = root if root in group else group[rank % len(group)]
                mains.append(main if main in members else members[rank % len(members)])
                if members != [mains[-1]]:
                    yield 0, Step(0, mains[-1], tuple(members))
        if mains != [root]:
            yield 1, Step(0, root, tuple(mains))
        for group in split:
            needy = [d for d in group if d in request.destinations]
            main = next((d for d in mains if d in group), needy[0] if needy else root)
            if needy and main != root:
                yield 2, Step(0, main, (root,))
            for dst in needy:
                if dst != main:
                    yield 3, Step(0, dst, (main,))

    return _schedule("hierarchical_copy", request, 1, moves)


def ring(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
) -> Schedule:
    """Plan a reduction that travels round the devices in a ring.

    As many chunks as devices; each starts at another device, collects the contributions on its way
    round, and goes on until every destination has it. Of an all-reduce each device sends
    2(n-1)/n of the buffer, the least any all-reduce can; the price is 2(n-1) rounds. Only links from
    a device to the next are used; one that is neither source nor destination passes data on.

    Args:
      devices: names, in the order round the ring.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: into how many equal packs the buffer is cut before the ring cuts each into chunks.
      first: at which device the first chunk of the first pack starts.
    Returns:
      A schedule of 2(n-1) rounds for an all-reduce, else of fewer.
    Raises:
      PlanError: as ``one_device``.

    >>> len(ring(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]).rounds)
    6

    Source: Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
    JPDC 69(2), 2009.
    """
    request = _request(devices, sources, destinations, packs, first)
    n = len(request.devices)
    givers, takers = frozenset(request.sources), frozenset(request.destinations)

    def moves(pack: int) -> Moves:
        for chunk in range(n):
            way = [(chunk + pack + hop) % n for hop in range(n)]
            start = next(hop for hop in range(n) if way[hop] in givers)
            end = max(hop for hop in range(n) if way[hop] in givers)
            for hop in range(start + 1, end + 1):
                own = (way[hop],) if way[hop] in givers else ()
                yield hop - 1, Step(chunk, way[hop], (way[hop - 1], *own))
            last = max((hop for hop in range(1, n) if way[(end + hop) % n] in takers), default=0)
            for hop in range(1, last + 1):
                yield end + hop - 1, Step(chunk, way[(end + hop) % n], (way[(end + hop - 1) % n],))

    return _schedule("ring", request, n, moves)


def halving_doubling(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
) -> Schedule:
    """Plan a reduce-scatter by recursive halving and an all-gather by recursive doubling.

    As few bytes as a ring in 2 log2(n) rounds. Where the number of sources is no power of two, those
    beyond the largest power first add theirs to a partner's, and get the result from it at the end.
    Where the destinations do not include all of the partners, each takes its chunks straight from
    the devices that made them.

    Args:
      devices: names; sources are paired in this order.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: into how many equal packs the buffer is cut; all take the same way, at the same time.
      first: accepted for the sake of one signature; this plan has no root to rotate.
    Returns:
      A schedule of 2 log2(n) rounds for an all-reduce of n = 2**k devices, of 2 more for other n.
    Raises:
      PlanError: as ``one_device``.

    >>> len(halving_doubling([f"cpu:{k}" for k in range(8)]).rounds)
    6

    Source: Thakur, Rabenseifner & Gropp, Optimization of collective communication operations in
    MPICH, IJHPCA 19(1), 2005.
    """
    request = _request(devices, sources, destinations, packs, first)
    width = 1 << (len(request.sources).bit_length() - 1)
    core, beyond = request.sources[:width], request.sources[width:]
    levels = width.bit_length() - 1

    def moves(pack: int) -> Moves:
        for chunk in range(width):
            for partner, extra in zip(core, beyond, strict=False):
                yield 0, Step(chunk, partner, (partner, extra))
            for level in range(levels):
                far = width >> (level + 1)
                for i in range(width):
                    if (i ^ chunk) < far:  # i keeps this half; what the other half's twin has is added
                        pair = sorted((i, i ^ far))
                        yield level + 1, Step(chunk, core[i], (core[pair[0]], core[pair[1]]))
            after = levels + 1
            if not set(core) <= set(request.destinations):
                for dst in request.destinations:
                    if dst != core[chunk]:
                        yield after, Step(chunk, dst, (core[chunk],))
                continue
            for level in range(levels):
                near = 1 << level
                for i in range(width):
                    if near <= (i ^ chunk) < 2 * near:
                        yield after + level, Step(chunk, core[i], (core[i ^ near],))
            for k, dst in enumerate(d for d in request.destinations if d not in core):
                giver = core[beyond.index(dst) if dst in beyond else k % width]
                yield after + levels, Step(chunk, dst, (giver,))

    return _schedule("halving_doubling", request, width, moves)


def recursive_doubling(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
) -> Schedule:
    """Plan pairwise exchanges of everything, at distances 1, 2, 4, ...

    An all-reduce takes log2(n) rounds, the fewest in which every device sends to one device at a time; in each of
    them every device sends its whole buffer. If the number of sources is not a power of two, each source beyond the
    largest power first adds its data to that of a partner, and receives the result from it at the end. Both devices of
    a pair combine their values in the same order, so every destination receives the same bits.

    Args:
      devices: names; sources are paired in this order.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all. Destinations that are not paired receive it at
        the end, along a binomial tree. Exchanges that no destination needs are left out, so a reduce to one device is
        a binomial tree, too.
      packs: the number of equal packs of the buffer; all take the same route, at the same time.
      first: ignored; all planners accept it, and this schedule has no root that could rotate.
    Returns:
      A schedule of log2(n) rounds for an all-reduce of n = 2**k devices, of 2 more for other n.
    Raises:
      PlanError: as ``one_device``.

    >>> print(recursive_doubling(["cpu:0", "cpu:1"]))
    all_reduce recursive_doubling: 2 devices, 1 chunk, 1 round, 2 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 0: cpu:1 <- cpu:0 + cpu:1

    Source: Thakur, Rabenseifner & Gropp, Optimization of collective communication operations in
    MPICH, IJHPCA 19(1), 2005.
    """
    request = _request(devices, sources, destinations, packs, first)
    width = 1 << (len(request.sources).bit_length() - 1)
    core, beyond = request.sources[:width], request.sources[width:]
    levels = width.bit_length() - 1

    def moves(pack: int) -> Moves:
        for partner, extra in zip(core, beyond, strict=False):
            yield 0, Step(0, partner, (partner, extra))
        for level in range(levels):
            far = 1 << level
            for i in range(width):
                yield level + 1, Step(0, core[i], (core[i & ~far], core[i | far]))
        after = levels + 1
        holders = list(core)
        partner_of = dict(zip(beyond, core, strict=False))
        waiting = [d for d in request.destinations if d not in core]
        extras = [d for d in waiting if d in partner_of]
        for dst in extras:
            yield after, Step(0, dst, (partner_of[dst],))
        waiting = [d for d in waiting if d not in partner_of]
        free = [d for d in core if d not in {partner_of[dst] for dst in extras}]
        while waiting:
            pairs = list(zip(free, waiting, strict=False))
            for holder, dst in pairs:
                yield after, Step(0, dst, (holder,))
            holders += [*extras, *(dst for _, dst in pairs)]
            extras, waiting, free, after = [], waiting[len(pairs) :], holders, after + 1

    schedule = _schedule("recursive_doubling", request, 1, moves)
    return replace(schedule, rounds=tuple(tuple(steps) for steps in live_rounds(schedule)))


def direct(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
    owners: Sequence[str] | None = None,
) -> Schedule:
    """Plan that every owner reduces one share of the buffer and then sends it to all destinations.

    Two rounds, as few bytes as a ring, and every element is combined in the order of the devices,
    so its bits equal those of ``one_device``. It needs a link between every two devices.

    Args:
      devices: names, in the order in which components are combined.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: the number of equal packs of the buffer; each is divided into one share per owner.
      first: which owner reduces the first share of the first pack.
      owners: the devices that reduce one share each; ``None``: the destinations. With all devices as owners, a
        reduce to one root is shared by all of them.
    Returns:
      A schedule of at most 2 rounds.
    Raises:
      PlanError: as ``one_device``; or an owner is not one of the devices.

    >>> print(direct(["cpu:0", "cpu:1"]))
    all_reduce direct: 2 devices, 2 chunks, 2 rounds, 4 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 1: cpu:1 <- cpu:0 + cpu:1
      round 1: chunk 0: cpu:1 <- cpu:0
      round 1: chunk 1: cpu:0 <- cpu:1
    """
    request = _request(devices, sources, destinations, packs, first)
    shared = request.destinations if owners is None else _positions(request.devices, owners, "the owners")

    def moves(pack: int) -> Moves:
        for chunk in range(len(shared)):
            owner = shared[(chunk + pack) % len(shared)]
            if request.sources != (owner,):
                yield 0, Step(chunk, owner, request.sources)
            for dst in request.destinations:
                if dst != owner:
                    yield 1, Step(chunk, dst, (owner,))

    return _schedule("direct", request, len(shared), moves)


def one_shot(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
) -> Schedule:
    """Plan that every destination reads the original of every source and combines them all.

    One round, the fewest, at the price of the most bytes: every destination receives the whole buffer of every other
    source. The fastest plan for small buffers. Every element is combined in the order of the sources, so its bits
    equal those of ``one_device``. It needs a link from every source to every destination.

    Args:
      devices: names, in the order in which components are combined.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: the number of equal packs of the buffer; all take the same route, at the same time.
      first: ignored; all planners accept it, and this schedule has no root that could rotate.
    Returns:
      A schedule of at most 1 round.
    Raises:
      PlanError: as ``one_device``.

    >>> print(one_shot(["cpu:0", "cpu:1"]))
    all_reduce one_shot: 2 devices, 1 chunk, 1 round, 2 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 0: cpu:1 <- cpu:0 + cpu:1
    """
    request = _request(devices, sources, destinations, packs, first)

    def moves(pack: int) -> Moves:
        for dst in request.destinations:
            if request.sources != (dst,):
                yield 0, Step(0, dst, request.sources)

    return _schedule("one_shot", request, 1, moves)


def _request(
    devices: Sequence[str],
    sources: Sequence[str] | None,
    destinations: Sequence[str] | None,
    packs: int,
    first: int,
) -> Request:
    names = read_devices(devices)
    if not names:
        raise PlanError(message("a plan needs at least one device.", "no devices"))
    if not isinstance(packs, int) or packs < 1 or not isinstance(first, int):
        raise PlanError(
            message("the buffer is cut into 1, 2, ... packs.", f"packs={packs!r}, first={first!r}", "packs=1")
        )
    return Request(
        names,
        _positions(names, sources, "the sources"),
        _positions(names, destinations, "the destinations"),
        packs,
        first,
    )


def _positions(names: tuple[str, ...], chosen: Sequence[str] | None, what: str) -> tuple[int, ...]:
    """Return the positions of devices in ``names``; ``None``: of all."""
    if chosen is None:
        return tuple(range(len(names)))
    found = tuple(_position(names, name, what) for name in read_devices(chosen))
    if not found:
        raise PlanError(message(f"{what} must be at least one device.", "none", ", ".join(names)))
    return found


def _position(names: tuple[str, ...], name: str, what: str) -> int:
    (name,) = read_devices([name])
    if name not in names:
        raise PlanError(message(f"{what} must be among the devices.", name, "one of " + ", ".join(names)))
    return names.index(name)


def _groups(names: tuple[str, ...], groups: Sequence[Sequence[str]]) -> list[list[int]]:
    split = [[_position(names, name, "a group's member") for name in group] for group in groups]
    if sorted(d for group in split for d in group) != list(range(len(names))):
        raise PlanError(
            message(
                "the groups must have each device once.",
                "; ".join(", ".join(group) for group in groups),
                "each of " + ", ".join(names),
            )
        )
    return split


def _schedule(algorithm: str, request: Request, per_pack: int, moves: Callable[[int], Moves]) -> Schedule:
    """Put the moves of all packs into one schedule: ``per_pack`` equal chunks a pack."""
    rounds: defaultdict[int, list[Step]] = defaultdict(list)
    for pack in range(request.packs):
        for number, step in moves(pack + request.first):
            rounds[number].append(step._replace(chunk=pack * per_pack + step.chunk))
    share = Fraction(1, request.packs * per_pack)
    everyone = len(request.devices)
    if len(request.sources) == len(request.destinations) == everyone:
        collective = "all_reduce"
    elif len(request.sources) == 1:
        collective = "broadcast"
    else:
        collective = "reduce"
    return Schedule(
        collective,
        algorithm,
        request.devices,
        (Chunk(share, request.sources, request.destinations),) * (request.packs * per_pack),
        tuple(tuple(rounds[number]) for number in sorted(rounds)),
    )
