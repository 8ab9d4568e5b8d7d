"""Forests of few steps as schedules, if they are faster than a known schedule.

Input: a request and the fastest schedule that is known. Output: the faster one of this and of forests of few steps.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

from ....devices import parse
from ....progress import report
from ....schedule import Chunk, Pieces, Schedule, Step, fastest_of, fluid_rate, verify
from ....schedule.costs import OPERATION_S
from ....schedule.host_queues import operation_count
from ....topology import Topology
from ...requests import NO_MORE, Request
from ...topologies import neutral_topology
from ..bound import bound_of_members
from ..bounds.steiner import Through
from ..trees.tree_schedule import Tree, TreeShare, listed_routes, trees_to_schedule
from .switch_routes import hops
from .tree_program import Edge, Shares, expected_time, share_among_trees

MOST_DEVICES: Final = 16  # with more, the linear programs take long
WORTH: Final = 0.98  # a forest is searched for only if it may take less than this part of the known time
# With transfers of more than so many times a hop's latency, forests for one piece, and those of all-gathers in many
# pieces, are never much faster than other schedules (measured on all machines).
LONG: Final = 16_000
# Beyond this limit they must be faster by more than 1 - WORTH, and their rate for still larger buffers must be that of
# the known schedule. If operations are queued, forests for one piece are not searched for.
FAR: Final = 4000
MORE_STEPS: Final = 5  # the most steps above the least that are tried
_COMPARED: Final = 2  # the steps above the least with which the two kinds of forests are compared


class _Task(NamedTuple):
    """What a request needs of its trees."""

    roots: int | None  # see ``shared``
    paired: bool  # trees into and out of each root
    backwards: bool  # trees into the roots only


class _Limits(NamedTuple):
    """What bounds the time of the forests of a request."""

    task: _Task
    least: int  # steps
    rate: float  # the bound, in GB/s
    transfer: float  # the seconds of the buffer at this rate
    delay: float  # the latency of the longest way between two members, in seconds
    hop: float  # the least latency of a hop, in seconds
    queued: float  # the seconds in which the busiest host queues an operation for each destination

    def seconds(self, steps: int, transfer: float, many: bool) -> float:
        """Return about the least seconds of a forest of so many steps whose transfers alone take ``transfer``."""
        busy = self.queued * _rounds(self.task, steps - self.least, self.least, many)
        always = max(self.delay + self.transfer, self.queued)
        return max(always, _least_s(steps, self.hop, transfer, self.queued, busy, many))


def faster_forest(request: Request, best: Pieces) -> Pieces:
    """Return the fastest of a known schedule and of forests of few steps, and its time.

    Forests of the first kind are for many pieces, so all steps are in progress together. Those of the second kind are
    for one piece: their steps follow each other. Forests of each kind are planned in the order of the times that are
    expected, and only if no limit makes them too slow.
    """
    task, members, topology = _task(request), request.members, request.topology
    assert topology is not None
    if task is None or not 2 <= len(members) <= MOST_DEVICES or not request.nbytes:
        return best
    least = _least_steps(topology, members, task)
    if least is None:
        return best
    rate = _bound(topology, members, task)
    limits = _Limits(
        task, least, rate, request.nbytes / (rate * 1e9), *_latencies(topology, members), _queueing(request)
    )
    delay = max(limits.hop, limits.queued / _QUEUE)
    far = limits.transfer > FAR * delay > 0
    long = far if limits.queued else limits.transfer > LONG * delay > 0
    least_rate = fluid_rate(best.schedule, topology) if far else None
    least_gain = WORTH if far else 1.0
    kinds = [] if long and task.roots == -1 else [True]
    kinds += [] if long else [False]
    # The kind that is probably faster is searched first: its time then excludes most forests of the other kind.
    kinds.sort(key=lambda many: limits.seconds(least + _COMPARED, limits.transfer, many))
    worth = goal = best.seconds * WORTH  # only forests that may take less than the goal are planned

    def current_goal() -> float:
        return goal

    for many in kinds:
        goal = min(worth, best.seconds)
        too_many = math.inf  # steps whose operations alone take too long
        for k, (seconds, steps) in enumerate(_options(request, limits, current_goal, many)):
            report("planning forests of few steps", k, 1 + MORE_STEPS)
            if seconds >= goal:
                break
            if steps >= too_many:
                continue
            found = _forest(request._replace(nbytes=0, costs=NO_MORE), task, steps, many)
            assert found is not None
            if least_rate is not None and (fluid_rate(found, topology) or 0) < least_rate:
                continue
            timed = fastest_of([found], topology, request.nbytes, costs=request.costs)
            if timed.seconds < best.seconds * least_gain:
                best, least_gain = timed, 1.0
                goal = min(goal, best.seconds * WORTH)
            if limits.queued * operation_count(found) >= best.seconds * WORTH * len(request.destinations):
                too_many = steps  # more steps have at least as many operations (measured on all machines)
    return best


def _options(request: Request, limits: _Limits, goal: Callable[[], float], many: bool) -> Iterator[tuple[float, int]]:
    """Yield the expected seconds and the steps of forests, the fastest first, that may take less than ``goal()``.

    A time is computed only when all forests that are expected to be faster have been yielded, since the goal may become
    less.
    """
    paired = limits.task.paired
    more = 4 if paired else MORE_STEPS
    rates: list[float] = []
    waiting: list[tuple[float, int]] = []
    first_goal = goal()
    for left in range(more, -1, -1 - paired):
        steps = limits.least + more - left
        least_s = limits.seconds(steps, limits.transfer, many)
        while waiting and waiting[0][0] <= least_s:
            yield heapq.heappop(waiting)
        if least_s >= goal():
            break
        part = _expected_time(request, limits.task, steps, many)
        if part is None:
            continue
        seconds = limits.seconds(steps, max(limits.transfer, request.nbytes / 1e9 * part), many)
        heapq.heappush(waiting, (seconds, steps))
        rates.append(1 / part)
        if rates[-1] * (1 + _NEAR) > limits.rate or _cannot_help(rates, left, request.nbytes, first_goal):
            break
    yield from sorted(waiting)


def _least_s(steps: int, hop: float, transfer: float, queued: float, busy: float, many: bool) -> float:
    """Return the seconds of so many steps, each with a latency, whose transfers alone take ``transfer`` seconds.

    Cut into p pieces they take (steps - 1 + p) (hop + transfer / p). The operations of one piece are queued in ``busy``
    seconds, those of each further piece in ``queued`` seconds.
    """
    if not many:
        return max(steps * hop + transfer, busy)

    def ramp(pieces: float) -> float:
        return max(transfer, _RAMP * (steps - 1 + pieces) * (hop + transfer / pieces))

    def queue(pieces: float) -> float:
        return busy + queued * (pieces - 1)

    few, best = 1.0, max(1.0, math.sqrt((steps - 1) * transfer / hop)) if hop else math.inf
    if not math.isfinite(best):
        return max(transfer, busy)
    if best < _FEW:  # then most links carry data in one step only
        return max(steps * hop + transfer, busy)
    if queue(best) <= ramp(best):
        return ramp(best)
    while best > few * 1.01:  # the ramp falls and the queue grows until they are equal
        middle = math.sqrt(few * best)
        few, best = (middle, best) if queue(middle) < ramp(middle) else (few, middle)
    return max(ramp(best), queue(few))


def _rounds(task: _Task, more: int, least: int, many: bool) -> float:
    """Return in about how many of ``least + more`` steps a device receives data, as measured on all machines."""
    if task.roots == -1:
        return 0.85 * (least + more)
    if task.paired:
        return 0.5 * (least + more)
    return 1.0 if many else 0.75 * (1 + more)


def _cannot_help(rates: list[float], left: int, nbytes: int, goal: float) -> bool:
    """Return whether so many further numbers of steps cannot help if each adds at most as many GB/s as the last one."""
    return len(rates) > 1 and (rates[-1] + left * (rates[-1] - rates[-2])) * goal * 1e9 < nbytes


_FEW: Final = 4  # pieces; if fewer are best, most links carry data in one step only
_QUEUE: Final = 32  # latencies below this part of the time to queue the operations of all devices do not matter
_RAMP: Final = 0.9  # the least part of this time that forests take, measured: not every link is busy all the time
_NEAR: Final = 0.01  # a forest whose rate is so near to the bound needs no more steps


def _task(request: Request) -> _Task | None:
    """Return the task of a request; ``None``: forests of few steps are not made for it."""
    sources, destinations = request.positions
    if request.packs != 1 or request.root is not None:
        return None
    if request.collective in ("all_gather", "reduce_scatter"):
        return _Task(-1, False, request.collective == "reduce_scatter")
    if len(sources) == 1:
        return _Task(sources[0], False, False)
    if len(destinations) == 1:
        return _Task(destinations[0], False, True)
    return _Task(None, True, False) if set(sources) == set(destinations) else None


def _bound(topology: Topology, members: tuple[str, ...], task: _Task) -> float:
    """Return the bound in GB/s of the collective that the trees of a task make."""
    root = None if task.roots is None or task.roots < 0 else ((members[task.roots], Fraction(1)),)
    to_roots, from_roots = ("reduce", "broadcast") if root else ("reduce_scatter", "all_gather")
    collective = "all_reduce" if task.paired else to_roots if task.backwards else from_roots
    return float(bound_of_members(topology, collective, members, root).algbw or 0)


def _expected_time(request: Request, task: _Task, steps: int, many: bool) -> float | None:
    """Return about the seconds for 1 GB without latencies; ``None``: so few steps do not reach all devices."""
    _, wiring = _neutral_view(request, task)
    return expected_time(wiring, task.roots, steps, many=many, paired=task.paired)


@lru_cache(maxsize=256)
def _forest(request: Request, task: _Task, steps: int, many: bool) -> Schedule | None:
    """Return the verified forest of a request with so many steps; ``None``: they do not reach all devices."""
    names, wiring = _neutral_view(request, task)
    found = share_among_trees(wiring, task.roots, steps, many=many, paired=task.paired)
    if found is None:
        return None
    shares = list(_forward_columns(found, wiring, task, steps))
    nodes = [names[name] for name in wiring.nodes]
    if many:
        schedule = trees_to_schedule(
            "forest", request, nodes, len(request.members), [_trees(share) for share in shares]
        )
    else:
        schedule = _schedule_in_steps(request, nodes, shares)
    verify(schedule)
    return schedule


def _neutral_view(request: Request, task: _Task) -> tuple[dict[str, str], Topology]:
    """Return a neutral topology in which the trees lead out of roots, and the names of its nodes."""
    assert request.topology is not None
    seen = neutral_topology(request.topology, request.members, ())
    return seen.names, seen.topology.reversed() if task.backwards else seen.topology


class _Hop(NamedTuple):
    step: int
    src: int
    dst: int
    through: Through


class _Share(NamedTuple):
    """A share of the buffer, its root, and the hops that reduce it and that copy it, sorted by step."""

    share: Fraction
    root: int
    into: list[_Hop]
    out: list[_Hop]


def _forward_columns(found: Shares, wiring: Topology, task: _Task, steps: int) -> Iterator[_Share]:
    """Yield the columns with their hops in the direction in which data moves."""
    through = hops(wiring).through
    half = (steps + 1) // 2

    def forwards(edges: tuple[Edge, ...], delay: int = 0) -> list[_Hop]:
        return [_Hop(step + delay, u, v, through[route]) for step, u, v, route in edges]

    def turned(edges: tuple[Edge, ...], count: int) -> list[_Hop]:
        return sorted(_Hop(count - 1 - step, v, u, through[route][::-1]) for step, u, v, route in edges)

    for units, column in found.columns:
        into, out = forwards(column.into), forwards(column.out)
        if task.backwards:
            into, out = turned(column.out, steps), []
        elif task.paired and wiring.symmetric:
            into, out = turned(column.out, half), forwards(column.out, half)
        yield _Share(Fraction(units, found.units), column.root, into, out)


def _trees(share: _Share) -> TreeShare:
    """Return the trees of a share without the steps of their hops."""
    out = Tree(share.root, 1, tuple((hop.dst, hop.src, hop.through) for hop in share.out))
    into = Tree(share.root, 1, tuple((hop.src, hop.dst, hop.through) for hop in reversed(share.into)))
    return TreeShare(share.root, share.share, into if share.into else None, out if share.out else None)


def _schedule_in_steps(request: Request, nodes: list[str], shares: list[_Share]) -> Schedule:
    """Return the schedule in which each hop is in the round of its step."""
    sources, destinations = request.positions
    collective = request.collective
    if collective in ("all_gather", "reduce_scatter"):
        shares = sorted(shares, key=lambda share: share.root)
    rounds: defaultdict[int, list[Step]] = defaultdict(list)
    chunks: list[Chunk] = []
    routes: defaultdict[tuple[int, int, int], dict[int, Through]] = defaultdict(dict)
    for c, share in enumerate(shares):
        gives = (share.root,) if collective == "all_gather" else sources
        takes = (share.root,) if collective == "reduce_scatter" else destinations
        chunks.append(Chunk(share.share, gives, takes))
        has = set(gives)
        for step, dst, arriving in _group_by_receiver(share.into):
            operands = [hop.src for hop in arriving if hop.src in has]
            if operands:
                rounds[step].append(Step(c, dst, tuple(sorted(operands + [dst] * (dst in has)))))
                has.add(dst)
                for hop in arriving:
                    if hop.src in operands:
                        routes[c, hop.src, hop.dst][hop.step] = hop.through
        needed = set(takes)
        kept = []
        for hop in reversed(share.out):
            if hop.dst in needed:
                needed.add(hop.src)
                kept.append(hop)
        for hop in reversed(kept):
            rounds[hop.step].append(Step(c, hop.dst, (hop.src,)))
            routes[c, hop.src, hop.dst][hop.step] = hop.through
    order = sorted(rounds)
    position = {step: r for r, step in enumerate(order)}
    moved = {key: {position[step]: through for step, through in by_step.items()} for key, by_step in routes.items()}
    return Schedule(
        collective, "forest", tuple(nodes[: len(request.members)]), tuple(chunks),
        tuple(tuple(rounds[step]) for step in order), routes=tuple(listed_routes(moved, nodes)),
    )  # fmt: skip


def _group_by_receiver(hops: list[_Hop]) -> Iterator[tuple[int, int, list[_Hop]]]:
    """Yield for each step and receiver the hops that arrive together, in the order of the steps."""
    found: defaultdict[tuple[int, int], list[_Hop]] = defaultdict(list)
    for hop in hops:
        found[hop.step, hop.dst].append(hop)
    for step, dst in sorted(found):
        yield step, dst, found[step, dst]


def _least_steps(topology: Topology, members: tuple[str, ...], task: _Task) -> int | None:
    """Return the least number of steps in which trees reach all members; ``None``: they cannot."""
    seen = neutral_topology(topology, members, ()).topology
    neighbours = defaultdict(list)
    for u, v in hops(seen.reversed() if task.backwards else seen).pairs:
        neighbours[u].append(v)
    far: dict[int, int | None] = {}
    for start in range(len(members)) if task.roots in (None, -1) else [task.roots]:
        depth = {start: 0}
        for node in (queue := [start]):
            for other in neighbours[node]:
                if other not in depth:
                    depth[other] = depth[node] + 1
                    queue.append(other)
        far[start] = max(depth.values()) if len(depth) == len(members) else None
    found = [steps for steps in far.values() if steps is not None]
    if task.paired:
        return 2 * min(found) if found else None
    return max(found) if len(found) == len(far) else None


@lru_cache(maxsize=512)
def _latencies(topology: Topology, members: tuple[str, ...]) -> tuple[float, float]:
    """Return the greatest latency between two members, and the least latency of a hop, in seconds."""
    worst, least = 0.0, math.inf
    inside = set(members)
    for start in members:
        known: dict[str, float] = {}
        queue = [(0.0, start)]
        while queue:
            delay, node = heapq.heappop(queue)
            if node in known:
                continue
            known[node] = delay
            if node in inside and node != start:
                least = min(least, delay)
            for link in topology.out_links(node):
                if link.dst not in known:
                    heapq.heappush(queue, (delay + float(link.latency_s), link.dst))
        worst = max(worst, *(known.get(other, 0.0) for other in members))
    return worst, 0.0 if least == math.inf else least


def _queueing(request: Request) -> float:
    """Return the seconds in which the busiest host queues one operation for each destination."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for device in request.destinations:
        place, cost = parse(device), request.costs.operation_s
        seconds[place.host] += cost if cost is not None else OPERATION_S if place.kind == "cuda" else 0.0
    return max(seconds.values())
