"""Forests of few steps as schedules, if they are faster than a known schedule.

Input: a request and the fastest known schedule. Output: the fastest of this schedule and the forests of few steps. A
forest is a set of trees, each with a share of the buffer.
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
from ...topologies import neutral_topology, reversed_topology
from ..bound import bound_of_members
from ..bounds.steiner import Through
from ..trees.tree_schedule import Tree, TreeShare, listed_routes, trees_to_schedule
from .switch_routes import hops
from .tree_program import Edge, Shares, expected_time, least_time, share_among_trees

MOST_DEVICES: Final = 16  # with more, the linear programs take long
WORTH: Final = 0.98  # a forest is planned only if it may take less than this part of the time of the known schedule
# If transfers take more than LONG times the latency of a hop, forests for one piece and all-gathers in many pieces are
# not tried. They are never much faster than other schedules (measured on all machines).
LONG: Final = 16_000
# If transfers take more than FAR times the latency of a hop, a forest must take less than WORTH times the time of the
# known schedule, and have at least its rate. If hosts queue operations, only forests for many pieces are tried then.
FAR: Final = 4000
MORE_STEPS: Final = 5  # the most steps above the least number of steps that are tried
_COMPARED: Final = 2  # the two kinds of forests are compared with this many steps above the least number


class _Task(NamedTuple):
    """The kind of trees that a request needs."""

    roots: int | None  # the number of the only root; -1: all devices; None: any devices. See ``share_among_trees``
    paired: bool  # whether there are trees into and out of each root
    backwards: bool  # whether there are only trees into the roots


class _Limits(NamedTuple):
    """Numbers that limit the time of the forests of a request."""

    task: _Task
    least: int  # the least number of steps
    rate: float  # the bound, in GB/s
    transfer: float  # the seconds that the buffer takes at this rate
    delay: float  # the greatest latency between two members, in seconds
    hop: float  # the least latency of a hop, in seconds
    queued: float  # the seconds that the busiest host needs to queue one operation for each destination

    def seconds(self, steps: int, transfer: float, many: bool) -> float:
        """Return the estimated least seconds of a forest, given its steps and the seconds of its transfers alone."""
        busy = self.queued * _receiving_steps(self.task, steps - self.least, self.least, many)
        of_any_forest = max(self.delay + self.transfer, self.queued)
        return max(of_any_forest, _least_s(steps, self.hop, transfer, self.queued, busy, many))


def faster_forest(request: Request, best: Pieces) -> Pieces:
    """Return the fastest of a known schedule, ``best``, and forests of few steps.

    There are two kinds of forests. In forests for ``many`` pieces, all steps are in progress at the same time. In
    forests for one piece, the steps follow each other. Forests of each kind are planned in the order of their expected
    times, and only if their expected time is below the goal.
    """
    task, members, topology = _task(request), request.members, request.topology
    assert topology is not None
    if task is None or not 2 <= len(members) <= MOST_DEVICES or not request.nbytes:
        return best
    least = _least_steps(topology, members, task)
    if least is None:
        return best
    rate = _bound(topology, members, task)
    transfer = request.nbytes / (rate * 1e9)
    limits = _Limits(task, least, rate, transfer, *_latencies(topology, members), _queueing(request))
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
        too_many = math.inf  # the number of steps from which on the operations alone take too long
        for k, (seconds, steps) in enumerate(_options(request, limits, current_goal, many)):
            report("planning forests of few steps", k, 1 + MORE_STEPS)
            if seconds >= goal:
                break
            if steps >= too_many:
                continue
            schedule = _forest(request._replace(nbytes=0, costs=NO_MORE), task, steps, many)
            assert schedule is not None
            if least_rate is not None and (fluid_rate(schedule, topology) or 0) < least_rate:
                continue
            timed = fastest_of([schedule], topology, request.nbytes, costs=request.costs)
            if timed.seconds < best.seconds * least_gain:
                best, least_gain = timed, 1.0
                goal = min(goal, best.seconds * WORTH)
            if limits.queued * operation_count(schedule) >= best.seconds * WORTH * len(request.destinations):
                too_many = steps  # more steps have at least as many operations (measured on all machines)
    return best


def _options(request: Request, limits: _Limits, goal: Callable[[], float], many: bool) -> Iterator[tuple[float, int]]:
    """Yield (expected seconds, steps) of forests that may take less than ``goal()``, the fastest first.

    The caller lowers the goal between two results. Expected times take long to compute. So the expected time of a
    forest is computed only after all forests that must be faster have been yielded.
    """
    paired = limits.task.paired
    more = 4 if paired else MORE_STEPS
    rates: list[float] = []
    waiting: list[tuple[float, int]] = []  # a heap of results that were not yielded yet
    first_goal = goal()

    def expected_s(seconds_per_gb: float) -> float:
        return limits.seconds(steps, max(limits.transfer, request.nbytes / 1e9 * seconds_per_gb), many)

    for left in range(more, -1, -1 - paired):  # the number of steps that may still be added after this forest
        steps = limits.least + more - left
        least_s = limits.seconds(steps, limits.transfer, many)
        while waiting and waiting[0][0] <= least_s:
            yield heapq.heappop(waiting)
        if least_s >= goal():
            break
        is_last = left <= paired or limits.seconds(steps + 1 + paired, limits.transfer, many) >= goal()
        if is_last and expected_s(_limit_per_gb(request, limits.task, steps, many)) >= goal():
            break
        seconds_per_gb = _expected_time(request, limits.task, steps, many)
        if seconds_per_gb is None:
            continue
        seconds = expected_s(seconds_per_gb)
        heapq.heappush(waiting, (seconds, steps))
        rates.append(1 / seconds_per_gb)
        if rates[-1] * (1 + _NEAR) > limits.rate or _cannot_help(rates, left, request.nbytes, first_goal):
            break
    yield from sorted(waiting)


def _least_s(steps: int, hop: float, transfer: float, queued: float, busy: float, many: bool) -> float:
    """Return the least seconds of a forest of some steps.

    Each step has the latency ``hop``, and all transfers alone take ``transfer`` seconds. Cut into p pieces, the forest
    takes (steps - 1 + p) (hop + transfer / p) seconds. The host queues the operations of the first piece in ``busy``
    seconds, and those of each other piece in ``queued`` seconds.
    """
    if not many:
        return max(steps * hop + transfer, busy)

    def pipeline_s(pieces: float) -> float:
        return max(transfer, _LEAST_PART * (steps - 1 + pieces) * (hop + transfer / pieces))

    def queue_s(pieces: float) -> float:
        return busy + queued * (pieces - 1)

    # Numbers of pieces. ``best`` minimises the time of the pipeline.
    few, best = 1.0, max(1.0, math.sqrt((steps - 1) * transfer / hop)) if hop else math.inf
    if not math.isfinite(best):
        return max(transfer, busy)
    if best < _FEW_PIECES:
        return max(steps * hop + transfer, busy)
    if queue_s(best) <= pipeline_s(best):
        return pipeline_s(best)
    while best > few * 1.01:  # bisect: with more pieces, the pipeline takes less time and the queue takes more
        middle = math.sqrt(few * best)
        few, best = (middle, best) if queue_s(middle) < pipeline_s(middle) else (few, middle)
    return max(pipeline_s(best), queue_s(few))


def _receiving_steps(task: _Task, more: int, least: int, many: bool) -> float:
    """Return an estimate of the number of steps, of ``least + more``, in which a device receives data (measured)."""
    if task.roots == -1:
        return 0.85 * (least + more)
    if task.paired:
        return 0.5 * (least + more)
    return 1.0 if many else 0.75 * (1 + more)


def _cannot_help(rates: list[float], left: int, nbytes: int, goal: float) -> bool:
    """Return whether ``left`` more steps cannot reach the goal (seconds) if each adds as many GB/s as the last one."""
    return len(rates) > 1 and (rates[-1] + left * (rates[-1] - rates[-2])) * goal * 1e9 < nbytes


_FEW_PIECES: Final = 4  # if fewer pieces are best, most links carry data in one step only
_QUEUE: Final = 32  # latencies below 1 / _QUEUE of the time to queue the operations of all devices do not matter
_LEAST_PART: Final = 0.9  # forests take at least this part of the pipeline's time, as not all links are always busy
_NEAR: Final = 0.01  # more steps are not tried if the rate is below the bound by at most this part


def _task(request: Request) -> _Task | None:
    """Return the task of a request, or ``None`` if no forests of few steps can be made for it."""
    sources, destinations = request.positions
    if request.packs != 1 or request.root is not None:
        return None
    if request.collective in ("all_gather", "reduce_scatter"):
        return _Task(-1, paired=False, backwards=request.collective == "reduce_scatter")
    if len(sources) == 1:
        return _Task(sources[0], paired=False, backwards=False)
    if len(destinations) == 1:
        return _Task(destinations[0], paired=False, backwards=True)
    return _Task(None, paired=True, backwards=False) if set(sources) == set(destinations) else None


def _bound(topology: Topology, members: tuple[str, ...], task: _Task) -> float:
    """Return the bound in GB/s of the collective that the trees of a task perform."""
    root = None if task.roots is None or task.roots < 0 else ((members[task.roots], Fraction(1)),)
    to_roots, from_roots = ("reduce", "broadcast") if root else ("reduce_scatter", "all_gather")
    collective = "all_reduce" if task.paired else to_roots if task.backwards else from_roots
    return float(bound_of_members(topology, collective, members, root).algbw or 0)


def _expected_time(request: Request, task: _Task, steps: int, many: bool) -> float | None:
    """Return the expected seconds for 1 GB without latencies, or ``None`` if so few steps do not reach all devices."""
    _, topology = _neutral_view(request, task)
    return expected_time(topology, task.roots, steps, many=many, paired=task.paired)


def _limit_per_gb(request: Request, task: _Task, steps: int, many: bool) -> float:
    """Return a lower limit of ``_expected_time``, which takes less time to compute."""
    _, topology = _neutral_view(request, task)
    return least_time(topology, task.roots, steps, many=many, paired=task.paired)


@lru_cache(maxsize=256)
def _forest(request: Request, task: _Task, steps: int, many: bool) -> Schedule | None:
    """Return the verified forest of a request with ``steps`` steps, or ``None`` if these do not reach all devices."""
    names, topology = _neutral_view(request, task)
    solution = share_among_trees(topology, task.roots, steps, many=many, paired=task.paired)
    if solution is None:
        return None
    shares = list(_hops_of_shares(solution, topology, task, steps))
    nodes = [names[name] for name in topology.nodes]
    if many:
        trees = [_trees_without_steps(share) for share in shares]
        schedule = trees_to_schedule("forest", request, nodes, len(request.members), trees)
    else:
        schedule = _schedule_in_steps(request, nodes, shares)
    verify(schedule)
    return schedule


def _neutral_view(request: Request, task: _Task) -> tuple[dict[str, str], Topology]:
    """Return the original names of nodes of the neutral topology, and this topology, reversed for trees into roots."""
    assert request.topology is not None
    neutral = neutral_topology(request.topology, request.members, ())
    return neutral.names, reversed_topology(neutral.topology) if task.backwards else neutral.topology


class _Hop(NamedTuple):
    """A transfer of a step, which passes the switches ``through``."""

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


def _hops_of_shares(solution: Shares, topology: Topology, task: _Task, steps: int) -> Iterator[_Share]:
    """Yield the shares of a solution, with their hops in the direction in which data moves."""
    through = hops(topology).through
    half = (steps + 1) // 2

    def forwards(edges: tuple[Edge, ...], delay: int = 0) -> list[_Hop]:
        return [_Hop(step + delay, u, v, through[route]) for step, u, v, route in edges]

    def backwards(edges: tuple[Edge, ...], count: int) -> list[_Hop]:  # of a tree with ``count`` steps
        return sorted(_Hop(count - 1 - step, v, u, through[route][::-1]) for step, u, v, route in edges)

    for units, column in solution.columns:
        into, out = forwards(column.into), forwards(column.out)
        if task.backwards:
            into, out = backwards(column.out, steps), []
        elif task.paired and topology.symmetric:
            into, out = backwards(column.out, half), forwards(column.out, half)
        yield _Share(Fraction(units, solution.units), column.root, into, out)


def _trees_without_steps(share: _Share) -> TreeShare:
    """Return the trees of a share without the steps of their hops: in a pipeline, all steps run at the same time."""
    out = Tree(share.root, 1, tuple((hop.dst, hop.src, hop.through) for hop in share.out))
    into = Tree(share.root, 1, tuple((hop.src, hop.dst, hop.through) for hop in reversed(share.into)))
    return TreeShare(share.root, share.share, into if share.into else None, out if share.out else None)


def _schedule_in_steps(request: Request, nodes: list[str], shares: list[_Share]) -> Schedule:
    """Return the schedule in which each step is a round. Steps without hops are left out."""
    sources, destinations = request.positions
    collective = request.collective
    if collective in ("all_gather", "reduce_scatter"):
        shares = sorted(shares, key=lambda share: share.root)
    rounds: defaultdict[int, list[Step]] = defaultdict(list)
    chunks: list[Chunk] = []
    routes: defaultdict[tuple[int, int, int], dict[int, Through]] = defaultdict(dict)
    for c, share in enumerate(shares):
        chunk_sources = (share.root,) if collective == "all_gather" else sources
        chunk_destinations = (share.root,) if collective == "reduce_scatter" else destinations
        chunks.append(Chunk(share.share, chunk_sources, chunk_destinations))
        holders = set(chunk_sources)  # the devices that have contributions
        for step, dst, arriving in _group_by_receiver(share.into):
            operands = [hop.src for hop in arriving if hop.src in holders]
            if operands:
                rounds[step].append(Step(c, dst, tuple(sorted(operands + [dst] * (dst in holders)))))
                holders.add(dst)
                for hop in arriving:
                    if hop.src in operands:
                        routes[c, hop.src, hop.dst][hop.step] = hop.through
        needed = set(chunk_destinations)  # only hops that lead to a destination are kept
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
    by_round = {key: {position[step]: through for step, through in by_step.items()} for key, by_step in routes.items()}
    devices, steps = tuple(nodes[: len(request.members)]), tuple(tuple(rounds[step]) for step in order)
    return Schedule(collective, "forest", devices, tuple(chunks), steps, routes=tuple(listed_routes(by_round, nodes)))


def _group_by_receiver(hops: list[_Hop]) -> Iterator[tuple[int, int, list[_Hop]]]:
    """Yield for each step and receiver the hops that arrive together, in the order of the steps."""
    arriving: defaultdict[tuple[int, int], list[_Hop]] = defaultdict(list)
    for hop in hops:
        arriving[hop.step, hop.dst].append(hop)
    for step, dst in sorted(arriving):
        yield step, dst, arriving[step, dst]


def _least_steps(topology: Topology, members: tuple[str, ...], task: _Task) -> int | None:
    """Return the least number of steps in which the trees of a task reach all members, or ``None`` if none do."""
    neutral = neutral_topology(topology, members, ()).topology
    neighbours = defaultdict(list)
    for u, v in hops(reversed_topology(neutral) if task.backwards else neutral).pairs:
        neighbours[u].append(v)
    roots = range(len(members)) if task.roots in (None, -1) else [task.roots]
    depths = []  # the least depth of a tree, for each root whose trees reach all members
    for root in roots:
        depth = {root: 0}
        for node in (queue := [root]):
            for other in neighbours[node]:
                if other not in depth:
                    depth[other] = depth[node] + 1
                    queue.append(other)
        if len(depth) == len(members):
            depths.append(max(depth.values()))
    if task.paired:  # into and out of the same root
        return 2 * min(depths) if depths else None
    return max(depths) if len(depths) == len(roots) else None


@lru_cache(maxsize=512)
def _latencies(topology: Topology, members: tuple[str, ...]) -> tuple[float, float]:
    """Return the greatest latency between two members, and the least latency of a hop, in seconds."""
    worst, least = 0.0, math.inf
    inside = set(members)
    for start in members:
        delays: dict[str, float] = {}
        queue = [(0.0, start)]
        while queue:
            delay, node = heapq.heappop(queue)
            if node in delays:
                continue
            delays[node] = delay
            if node in inside and node != start:
                least = min(least, delay)
            for link in topology.out_links(node):
                if link.dst not in delays:
                    heapq.heappush(queue, (delay + float(link.latency_s), link.dst))
        worst = max(worst, *(delays.get(other, 0.0) for other in members))
    return worst, 0.0 if least == math.inf else least


def _queueing(request: Request) -> float:
    """Return the seconds that the busiest host needs to queue one operation for each destination."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for device in request.destinations:
        place, cost = parse(device), request.costs.operation_s
        seconds[place.host] += cost if cost is not None else OPERATION_S if place.kind == "cuda" else 0.0
    return max(seconds.values())
