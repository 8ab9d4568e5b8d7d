"""Algorithms that need no topology: they assume equal links between all devices.

Input: lists of devices in any spelling; or a ``Request`` with canonical names. Output: a schedule. Each algorithm has a
public planner, such as ``ring``, and a function for requests, such as ``ring_schedule``, which the registry lists. All
public planners have the arguments (except ``root``) and the errors of ``one_device``. ``first`` has no effect on
``one_shot``, ``halving_doubling`` and ``recursive_doubling``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from ...errors import PlanError
from ...schedule import Chunk, GeneratedSchedule, Schedule, Step, live_rounds
from ...schedule.generated_schedule import rotations
from ...topology.symmetry import Symmetry, SymmetryGenerator
from ..requests import Request, read_members, read_request

Names = Sequence[str]
# Pairs (number of the round, step) of one pack, in any order. The chunks of each pack are numbered from 0.
RoundSteps = Iterable[tuple[int, Step]]
GENERATED_FROM: Final = 32  # with more devices, schedules store a few chunks, and a symmetry that generates the others


def one_device(
    devices: Names,
    sources: Names | None = None,
    destinations: Names | None = None,
    *,
    packs: int = 1,
    first: int = 0,
    root: str | None = None,
) -> Schedule:
    """Return a schedule in which one device, the root, combines all data and sends the result to all destinations.

    The schedule has at most two rounds and the fewest steps, but all bytes of a pack pass through its root.
    TensorFlow's ``ReductionToOneDevice`` does the same.

    Args:
      devices: the names of all devices.
      sources: the devices that contribute, in the order in which they are combined; ``None``: all ``devices``.
      destinations: the devices that need the result; ``None``: all.
      packs: the number of equal parts, called packs, into which the buffer is divided.
      first: the number (from 0) of the destination that is the root of the first pack. The roots of the other packs are
        the destinations after it, in turn. If there is only one source, it is the root of all packs.
      root: a device that is the root of every pack; it need not be a source or a destination.
    Returns:
      A schedule that ``verify`` accepts.
    Raises:
      PlanError: ``devices`` is empty; a source, destination or root is not in it; or ``packs`` or ``first`` is invalid.

    >>> print(one_device(["cpu:0", "cpu:1", "cpu:2"], destinations=["cpu:1"]))
    reduce one_device: 3 devices, 1 chunk, 1 round, 1 step
      round 0: chunk 0: cpu:1 <- cpu:0 + cpu:1 + cpu:2
    """
    request = read_request("one_device", devices, sources, destinations, packs, first)
    root_name = None if root is None else read_members(request.devices, [root], "the root")[0]
    return one_device_schedule(request._replace(root=root_name))


def one_device_schedule(request: Request) -> Schedule:
    """Return the schedule of ``one_device`` for a request."""
    sources, destinations = request.positions
    roots = sources if len(sources) == 1 else destinations  # a broadcast sends nothing back to its source
    if request.root is not None:
        roots = (request.members.index(request.root),)

    def pack_steps(pack: int, _: Iterable[int]) -> RoundSteps:  # a pack has one chunk
        root = roots[pack % len(roots)]
        if sources != (root,):
            yield 0, Step(0, root, sources)
        for dst in destinations:
            if dst != root:
                yield 1, Step(0, dst, (root,))

    return schedule_of_packs(request, 1, pack_steps)


def hierarchical_copy(
    devices: Names,
    sources: Names | None = None,
    destinations: Names | None = None,
    *,
    packs: int = 1,
    first: int = 0,
    groups: Sequence[Names] | None = None,
) -> Schedule:
    """Return a schedule that reduces inside groups of devices, then between the groups, and copies the result back.

    Each group has a main device, which reduces the data of the group. The root reduces the data of the main devices.
    Then the root copies the result to the main devices, and these copy it to their groups. This takes at most 4 rounds.
    On 8 devices and without ``groups`` these are the trees of TensorFlow's ``HierarchicalCopyAllReduce`` on a DGX-1
    (``aggregate_gradients_using_hierarchical_copy`` in TensorFlow's cross_device_utils.py): the halves are 0-3 and 4-7,
    and root ``i`` has the partner ``i + 4``. If the number of sources is odd, the second half has one source more.

    Args, in addition to those of ``one_device`` except ``root``:
      first: the number of the first pack's root in the list of possible roots, which the packs take in turn. These are
        the sources that are also destinations, or all sources if there are none.
      groups: the devices of each group; ``None``: two groups, each with half of the sources and of other destinations.
    Raises:
      PlanError: as ``one_device``; or a device is in no group, or in more than one.

    >>> print(hierarchical_copy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]))
    all_reduce hierarchical_copy: 4 devices, 1 chunk, 4 rounds, 6 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 0: cpu:2 <- cpu:2 + cpu:3
      round 1: chunk 0: cpu:0 <- cpu:0 + cpu:2
      round 2: chunk 0: cpu:2 <- cpu:0
      round 3: chunk 0: cpu:1 <- cpu:0
      round 3: chunk 0: cpu:3 <- cpu:2
    """
    request = read_request("hierarchical_copy", devices, sources, destinations, packs, first)
    if groups is None:
        return hierarchical_copy_schedule(request)
    names = request.devices
    numbers = [[names.index(read_members(names, [name], "a group's member")[0]) for name in group] for group in groups]
    if sorted(number for group in numbers for number in group) != list(range(len(names))):
        given = "; ".join(", ".join(group) for group in groups)
        remedy = "groups of the devices " + ", ".join(names)
        raise PlanError.of("each device must be in exactly one group.", given, remedy)
    return hierarchical_copy_schedule(request, numbers)


def hierarchical_copy_schedule(request: Request, groups: list[list[int]] | None = None) -> Schedule:
    """Return the schedule of ``hierarchical_copy``. ``groups``: positions of members; by default two halves."""
    sources, destinations = request.positions
    source_set, destination_set = frozenset(sources), frozenset(destinations)
    if groups is None:
        others = [d for d in destinations if d not in source_set]
        s, o = len(sources) // 2, (len(others) + 1) // 2  # where the second half begins
        groups = [[*sources[:s], *others[:o]], [*sources[s:], *others[o:]]]
    groups = [group for group in groups if group]
    roots = [s for s in sources if s in destination_set] or list(sources)
    if request.root is not None:
        roots = [request.members.index(request.root)]
        if not any(roots[0] in group for group in groups):
            raise PlanError.of("the root must be a source or a destination.", request.root, "root=None")

    def pack_steps(pack: int, _: Iterable[int]) -> RoundSteps:
        root = roots[pack % len(roots)]
        place = next(group.index(root) for group in groups if root in group)  # selects other groups' main devices
        mains: list[int] = []  # the main devices of the groups that have a source, in the order of the groups
        for group in groups:
            senders = [d for d in group if d in source_set]
            if senders:
                main = root if root in group else group[place % len(group)]
                mains.append(main if main in source_set else senders[place % len(senders)])
                if senders != [mains[-1]]:
                    yield 0, Step(0, mains[-1], tuple(senders))
        if mains != [root]:
            yield 1, Step(0, root, tuple(mains))
        for group in groups:
            receivers = [d for d in group if d in destination_set]
            # A group without a source has no main device yet: its first receiver becomes the main device.
            main = next((d for d in mains if d in group), receivers[0] if receivers else root)
            if receivers and main != root:
                yield 2, Step(0, main, (root,))
            for dst in receivers:
                if dst != main:
                    yield 3, Step(0, dst, (main,))

    return schedule_of_packs(request, 1, pack_steps)


def ring(
    devices: Names, sources: Names | None = None, destinations: Names | None = None, *, packs: int = 1, first: int = 0
) -> Schedule:
    """Return a schedule in which each chunk is reduced and then distributed on its way round a ring of devices.

    Each pack has one chunk per device; ``first`` is the number of the device at which the first pack's first chunk
    starts. Each chunk of a pack starts at a different device, collects the contributions on its way round the ring, and
    is passed on until every destination has the result. In an all-reduce each device sends 2(n-1)/n of the buffer, the
    least of any all-reduce, but it takes 2(n-1) rounds. Only links from a device to the next one are used, so
    ``devices`` is the order of the ring; devices that are neither source nor destination forward data.

    >>> len(ring(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]).rounds)
    6

    Source: Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009.
    """
    return ring_schedule(read_request("ring", devices, sources, destinations, packs, first))


def ring_schedule(request: Request) -> Schedule:
    """Return the schedule of ``ring`` for a request."""
    n, (sources, destinations) = len(request.members), map(frozenset, request.positions)

    def pack_steps(pack: int, chunks: Iterable[int]) -> RoundSteps:
        for chunk in chunks:
            order = [(chunk + pack + hop) % n for hop in range(n)]  # of the devices that the chunk reaches
            source_hops = [hop for hop in range(n) if order[hop] in sources]
            start, end = source_hops[0], source_hops[-1]
            for hop in range(start + 1, end + 1):  # the chunk is reduced from the first source to the last
                contribution = (order[hop],) if order[hop] in sources else ()
                yield hop - 1, Step(chunk, order[hop], (order[hop - 1], *contribution))
            # The last source copies the result onwards, up to the last destination.
            last = max((hop for hop in range(1, n) if order[(end + hop) % n] in destinations), default=0)
            for hop in range(1, last + 1):
                yield end + hop - 1, Step(chunk, order[(end + hop) % n], (order[(end + hop - 1) % n],))

    return schedule_of_packs(request, n, pack_steps, _rotation(n))


def halving_doubling(
    devices: Names, sources: Names | None = None, destinations: Names | None = None, *, packs: int = 1, first: int = 0
) -> Schedule:
    """Return the schedule of a reduce-scatter by recursive halving and then an all-gather by recursive doubling.

    On 2**k devices it sends as few bytes as a ring, in 2 k rounds. If the number of sources is not a power of two, only
    the first 2**k of them exchange data like this. Each other source first adds its data to that of a partner among
    them, and receives the result from the partner at the end, in 2 more rounds. If one of the 2**k sources is not a
    destination, there is no all-gather: every destination copies each chunk from the device that reduced it.

    >>> len(halving_doubling([f"cpu:{k}" for k in range(8)]).rounds)
    6

    Source: Thakur, Rabenseifner & Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1),
    2005; also of ``recursive_doubling``.
    """
    return halving_doubling_schedule(read_request("halving_doubling", devices, sources, destinations, packs, first))


def halving_doubling_schedule(request: Request) -> Schedule:
    """Return the schedule of ``halving_doubling`` for a request."""
    sources, destinations = request.positions
    width = 1 << (len(sources).bit_length() - 1)
    paired, extras = sources[:width], sources[width:]
    levels = width.bit_length() - 1
    partner_of = dict(zip(extras, paired, strict=False))  # the source to whose data an extra source adds its own
    paired_set = frozenset(paired)
    all_gathers = paired_set <= {*destinations}
    copies = [  # (device that is not paired, the paired device from which it copies the result)
        (dst, partner_of.get(dst, paired[k % width]))
        for k, dst in enumerate(d for d in destinations if d not in paired_set)
    ]

    def pack_steps(_: int, chunks: Iterable[int]) -> RoundSteps:
        """Yield the steps by which paired[k] reduces chunk k, and those by which the destinations receive it."""
        for chunk in chunks:
            for partner, extra in zip(paired, extras, strict=False):
                yield 0, Step(chunk, partner, (partner, extra))
            for level in range(levels):
                far = width >> (level + 1)
                for i in range(chunk & -far, (chunk & -far) + far):  # the devices that keep the half with this chunk
                    yield level + 1, Step(chunk, paired[i], (paired[i & ~far], paired[i | far]))
            after = levels + 1
            if not all_gathers:
                for dst in destinations:
                    if dst != paired[chunk]:
                        yield after, Step(chunk, dst, (paired[chunk],))
                continue
            for level in range(levels):
                near = 1 << level
                first = (chunk ^ near) & -near  # the first of the devices that receive the chunk at this level
                for i in range(first, first + near):
                    yield after + level, Step(chunk, paired[i], (paired[i ^ near],))
            for dst, src in copies:
                yield after + levels, Step(chunk, dst, (src,))

    # Exchanging neighbouring blocks of 1, 2, 4, ... devices maps the steps of a chunk to those of another chunk, if the
    # devices that are partners of extras are exchanged only with each other.
    blocks = [1 << k for k in reversed(range(levels)) if len(extras) % (2 << k) == 0]
    moves = [[k ^ b if k < width else width + ((k - width) ^ b) for k in range(len(sources))] for b in blocks]
    exchanges = tuple([SymmetryGenerator(tuple(moved), 2) for moved in moves])
    return schedule_of_packs(request, width, pack_steps, Symmetry(exchanges, len(sources)), in_order=True)


def recursive_doubling(
    devices: Names, sources: Names | None = None, destinations: Names | None = None, *, packs: int = 1, first: int = 0
) -> Schedule:
    """Return a schedule of pairwise exchanges of the whole buffer, between devices at the distances 1, 2, 4, ...

    An all-reduce on 2**k devices takes k rounds, the fewest if every device sends to one device at a time. In each
    round every device sends its whole buffer. If the number of sources is not a power of two, the extra sources have
    partners, as in ``halving_doubling``. Both devices of a pair combine their values in the same order, so every
    destination receives the same bits. Destinations that are not sources receive the result at the end, along a
    binomial tree. Exchanges that no destination needs are left out, so a reduce to one device is a binomial tree, too.

    >>> print(recursive_doubling(["cpu:0", "cpu:1"]))
    all_reduce recursive_doubling: 2 devices, 1 chunk, 1 round, 2 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 0: cpu:1 <- cpu:0 + cpu:1
    """
    return recursive_doubling_schedule(read_request("recursive_doubling", devices, sources, destinations, packs, first))


def recursive_doubling_schedule(request: Request) -> Schedule:
    """Return the schedule of ``recursive_doubling`` for a request."""
    sources, destinations = request.positions
    width = 1 << (len(sources).bit_length() - 1)
    paired, extras = sources[:width], sources[width:]
    levels = width.bit_length() - 1
    partner_of = dict(zip(extras, paired, strict=False))

    def pack_steps(_: int, __: Iterable[int]) -> RoundSteps:
        for extra, partner in partner_of.items():
            yield 0, Step(0, partner, (partner, extra))
        for level in range(levels):
            distance = 1 << level
            for i in range(width):
                yield level + 1, Step(0, paired[i], (paired[i & ~distance], paired[i | distance]))
        copies = [(dst, partner_of[dst]) for dst in destinations if dst in partner_of]
        waiting = [dst for dst in destinations if dst not in paired and dst not in partner_of]
        complete = list(paired)  # the devices with the result
        after = levels + 1
        while copies or waiting:  # each complete device sends to one other device per round
            busy = {src for _, src in copies}
            free = [device for device in complete if device not in busy]
            copies += zip(waiting, free, strict=False)
            waiting = waiting[len(free) :]
            for dst, src in copies:
                yield after, Step(0, dst, (src,))
            complete += [dst for dst, _ in copies]
            copies, after = [], after + 1

    schedule = schedule_of_packs(request, 1, pack_steps)
    if set(paired) <= set(destinations):
        return schedule
    return replace(schedule, rounds=tuple(tuple(steps) for steps in live_rounds(schedule)))


def direct(
    devices: Names,
    sources: Names | None = None,
    destinations: Names | None = None,
    *,
    packs: int = 1,
    first: int = 0,
    owners: Names | None = None,
) -> Schedule:
    """Return a schedule in which every owner reduces one share of the buffer and then sends it to all destinations.

    It has at most two rounds, sends as few bytes as a ring, and combines every element in the order of the sources, so
    its results have the same bits as those of ``one_device``. It is fast only if every two devices have a link.

    Args, in addition to those of ``one_device`` except ``root``:
      first: the number (from 0) of the owner of the first share of the first pack.
      owners: the devices that reduce one share each; ``None``: the destinations. If all devices are owners, they share
        the work of a reduce to one root.

    >>> print(direct(["cpu:0", "cpu:1"]))
    all_reduce direct: 2 devices, 2 chunks, 2 rounds, 4 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 1: cpu:1 <- cpu:0 + cpu:1
      round 1: chunk 0: cpu:1 <- cpu:0
      round 1: chunk 1: cpu:0 <- cpu:1
    """
    request = read_request("direct", devices, sources, destinations, packs, first)
    names = request.destinations if owners is None else read_members(request.devices, owners, "the owners")
    return direct_schedule(request, names)


def direct_schedule(request: Request, owners: tuple[str, ...] = ()) -> Schedule:
    """Return the schedule of ``direct`` for a request. If ``owners`` is empty, the destinations are the owners."""
    sources, destinations = request.positions
    owning = [request.members.index(owner) for owner in owners] or destinations

    def pack_steps(pack: int, chunks: Iterable[int]) -> RoundSteps:
        for chunk in chunks:
            owner = owning[(chunk + pack) % len(owning)]
            if sources != (owner,):
                yield 0, Step(chunk, owner, sources)
            for dst in destinations:
                if dst != owner:
                    yield 1, Step(chunk, dst, (owner,))

    in_turn = list(owning) == list(range(len(request.members)))  # otherwise, chunks are not images of the first one
    images = _rotation(len(owning)) if in_turn else None
    return schedule_of_packs(request, len(owning), pack_steps, images, in_order=True)


def one_shot(
    devices: Names, sources: Names | None = None, destinations: Names | None = None, *, packs: int = 1, first: int = 0
) -> Schedule:
    """Return a schedule in which every destination reads the contributions of all sources and combines them.

    It has at most one round, but sends the most bytes: every destination receives the whole buffer of every other
    source. So it suits small buffers, if every source has a link to every destination. Every element is combined in the
    order of the sources, so the results have the same bits as those of ``one_device``.

    >>> print(one_shot(["cpu:0", "cpu:1"]))
    all_reduce one_shot: 2 devices, 1 chunk, 1 round, 2 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 0: cpu:1 <- cpu:0 + cpu:1
    """
    return one_shot_schedule(read_request("one_shot", devices, sources, destinations, packs, first))


def one_shot_schedule(request: Request) -> Schedule:
    """Return the schedule of ``one_shot`` for a request."""
    sources, destinations = request.positions
    steps = [(0, Step(0, dst, sources)) for dst in destinations if sources != (dst,)]
    return schedule_of_packs(request, 1, lambda *_: steps)


def schedule_of_packs(
    request: Request,
    chunks: int,
    pack_steps: Callable[[int, Iterable[int]], RoundSteps],
    images: Symmetry | None = None,
    *,
    in_order: bool = False,
) -> Schedule:
    """Return the schedule of all packs of a request, each with ``chunks`` equal chunks.

    ``pack_steps(pack, chunks)`` returns the steps of these chunks of a pack; packs are numbered from ``request.first``.
    If all devices are sources and destinations, the symmetry ``images`` maps the steps of a pack's first chunk to those
    of its other chunks. With more than ``GENERATED_FROM`` devices, only the first chunk is then planned, and the
    schedule is generated by ``images``. ``in_order`` is passed to ``GeneratedSchedule``.
    """
    n = len(request.members)
    everyone = tuple(range(n))
    generated = request.packs == 1 and request.positions == (everyone, everyone) and n > GENERATED_FROM
    if images is not None and not (generated and images.generators):
        images = None
    order = 1 if images is None else images.order  # the number of chunks that each stored chunk stands for
    count = request.packs * chunks // order
    rounds: defaultdict[int, list[Step]] = defaultdict(list)
    for pack in range(request.packs):
        for number, (chunk, dst, srcs) in pack_steps(pack + request.first, range(0, chunks, order)):
            rounds[number].append(Step(pack * chunks + chunk // order, dst, srcs))
    share = Chunk(Fraction(1, count), *request.positions)
    steps = tuple(tuple(rounds[number]) for number in sorted(rounds))
    schedule = Schedule(request.collective, request.algorithm, request.members, (share,) * count, steps)
    return schedule if images is None else GeneratedSchedule(schedule, images, schedule.devices, in_order)


def _rotation(n: int) -> Symmetry:
    """Return the symmetry that moves each of n devices to the next one in a ring."""
    return rotations([n], n)
