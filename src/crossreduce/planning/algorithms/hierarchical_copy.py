"""``hierarchical_copy``: reduce inside groups of devices, then between the groups, and copy back the same way."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import PlanError
from ...schedule import Schedule, Step
from ..request import Participants, Request, positions, read_participants
from .hierarchy import tree_schedules
from .one_device import on_root
from .packed import Moves, packed_schedule


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

    The devices of each group are summed on its main device, and the mains are summed on the root; the root copies to
    the mains, and these to their groups. On 8 devices and without ``groups`` these are the trees of TensorFlow's
    ``HierarchicalCopyAllReduce`` on a DGX-1 (``aggregate_gradients_using_hierarchical_copy`` in its
    cross_device_utils.py): halves 0-3 and 4-7, root ``i`` and its partner ``i + 4``. If the number of devices is odd,
    the second half has one more device, and no contribution is lost.

    Args:
      devices: names, in the order in which components are combined.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: the number of equal packs of the buffer; each has its own tree.
      first: the device that is the root of the first pack; the roots of further packs are the next devices.
      groups: the devices by group; ``None``: two halves of the sources (and of other destinations).
    Returns:
      A schedule of at most 4 rounds.
    Raises:
      PlanError: as ``one_device``; or the groups miss a device or name one twice.

    >>> print(hierarchical_copy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]))
    all_reduce hierarchical_copy: 4 devices, 1 chunk, 4 rounds, 6 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 0: cpu:2 <- cpu:2 + cpu:3
      round 1: chunk 0: cpu:0 <- cpu:0 + cpu:2
      round 2: chunk 0: cpu:2 <- cpu:0
      round 3: chunk 0: cpu:1 <- cpu:0
      round 3: chunk 0: cpu:3 <- cpu:2
    """
    participants = read_participants(devices, sources, destinations, packs, first)
    return in_groups(participants, None if groups is None else _read_groups(participants.devices, groups))


def hierarchical_copy_schedules(request: Request) -> list[Schedule]:
    """Return the schedules of a request.

    Without a topology there is one, with two halves as groups. On a topology there are several, since a hierarchy can
    be derived from its links in several ways, and the size of the buffer determines which one is the fastest:

    - all devices send straight to the root, as in ``one_device``;
    - two halves as groups, as in TensorFlow;
    - the islands of the topology as groups: these are the boards of a DGX-1;
    - spanning trees of the links: see ``tree_schedules``.

    With a root of all packs, only the first and the last kind are possible, and only the first one if the root is
    neither a source nor a destination.
    """
    participants, topology, root = request.participants, request.topology, request.root
    if topology is None:
        return [in_groups(participants)]
    devices = participants.devices
    found = [on_root(participants, None if root is None else devices.index(root), "hierarchical_copy")]
    if root is None:
        found.append(in_groups(participants))
        inside = {device: k for k, device in enumerate(devices)}
        groups = [[inside[device] for device in island if device in inside] for island in topology.islands]
        groups = [group for group in groups if group]
        if len(groups) > 1:
            found.append(in_groups(participants, groups))
    if root is None or root in request.sources or root in request.destinations:
        found += tree_schedules(topology, request)
    return found


def in_groups(participants: Participants, groups: list[list[int]] | None = None) -> Schedule:
    """Return the schedule of ``hierarchical_copy`` with positions; ``None``: two halves."""
    sources, destinations = participants.sources, participants.destinations
    giving, taking = frozenset(sources), frozenset(destinations)
    if groups is None:
        others = [d for d in destinations if d not in giving]
        s, o = len(sources) // 2, (len(others) + 1) // 2
        groups = [[*sources[:s], *others[:o]], [*sources[s:], *others[o:]]]
    split = [group for group in groups if group]
    roots = [s for s in sources if s in taking] or list(sources)

    def moves(pack: int) -> Moves:
        root = roots[pack % len(roots)]
        rank = next(group.index(root) for group in split if root in group)
        mains: list[int] = []  # of the groups that have a source, in the order of the groups
        for group in split:
            members = [d for d in group if d in giving]
            if members:
                main = root if root in group else group[rank % len(group)]
                mains.append(main if main in giving else members[rank % len(members)])
                if members != [mains[-1]]:
                    yield 0, Step(0, mains[-1], tuple(members))
        if mains != [root]:
            yield 1, Step(0, root, tuple(mains))
        for group in split:
            receivers = [d for d in group if d in taking]
            main = next((d for d in mains if d in group), receivers[0] if receivers else root)
            if receivers and main != root:
                yield 2, Step(0, main, (root,))
            for dst in receivers:
                if dst != main:
                    yield 3, Step(0, dst, (main,))

    return packed_schedule(participants, "hierarchical_copy", 1, moves)


def _read_groups(names: tuple[str, ...], groups: Sequence[Sequence[str]]) -> list[list[int]]:
    split = [[positions(names, [name], "a group's member")[0] for name in group] for group in groups]
    if sorted(d for group in split for d in group) != list(range(len(names))):
        given = "; ".join(", ".join(group) for group in groups)
        raise PlanError.of("the groups must have each device once.", given, "each of " + ", ".join(names))
    return split
