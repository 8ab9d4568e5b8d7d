"""``plan``: the fastest verified schedule for a request on a topology, with the proof of how good it is.

In: a topology, a collective, bytes, perhaps an algorithm.  Out: a ``Plan``. Whatever is planned is verified, pipelined
for its size and simulated; "auto" is the quickest of all algorithms in simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Final

from ..devices import canonical
from ..errors import ArgumentError, PlanError, message, shown
from ..options import ALGORITHMS
from ..packing import MOST_PACKS
from ..schedule import MOST_BYTES, Schedule, fluid_rate, pipelined, simulate, verify
from ..topology import Topology
from .bounds import COLLECTIVES, Bound, bound
from .derived import all_gather, reduce_scatter
from .explain import duration, limited_by, many, percent, shape, size, tree_lines
from .forest import forest
from .hierarchy import centre, hierarchies
from .planners import direct, halving_doubling, hierarchical_copy, one_device, one_shot, recursive_doubling
from .rings import rings
from .views import require_ways

# Beyond these many devices "auto" leaves out what has n**2 steps (a schedule of a million) or takes minutes.
MOST_DEVICES: Final = 128
MOST_TREES: Final = 256  # up to these it still tries forests, and a tree for each device

NAMED: Final = tuple(name for name in ALGORITHMS if name not in ("auto", "nccl"))


@dataclass(frozen=True)
class Plan:
    """A schedule for a request, what it takes and what nothing can beat.

    Args:
      topology: where it runs.
      collective: its name.
      nbytes: of the whole buffer.
      schedule: verified; cut into the number of pieces that suits ``nbytes``.
      seconds: simulated.
    """

    topology: Topology
    collective: str
    nbytes: int
    schedule: Schedule
    seconds: float

    @property
    def algorithm(self) -> str:
        """The planner that made the schedule."""
        return self.schedule.algorithm

    @cached_property
    def rate(self) -> Fraction | None:
        """The algbw in GB/s that the schedule nears as the buffer grows; ``None``: it moves nothing."""
        return fluid_rate(self.schedule, self.topology)

    @cached_property
    def bound(self) -> Bound:
        """What no schedule of this request can beat, with its proof."""
        sources, destinations = self._ends
        members = tuple(dict.fromkeys([*sources, *destinations]))
        if self.collective == "all_reduce":
            return request_bound(self.topology, sources, destinations)
        root = {"broadcast": sources[0], "reduce": destinations[0]}.get(self.collective)
        return bound(self.topology, self.collective, root, members)

    @property
    def _ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Who contributes, and who needs the result."""
        chunk, names = self.schedule.chunks[0], self.schedule.devices
        sources, destinations = (tuple(names[k] for k in part) for part in (chunk.sources, chunk.destinations))
        if self.collective == "all_gather":
            sources = destinations
        elif self.collective == "reduce_scatter":
            destinations = sources
        return sources, destinations

    @property
    def algbw(self) -> float:
        """The predicted rate for ``nbytes``, in GB/s; 0 where nothing moves."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def ratio(self) -> Fraction:
        """How much of the bound the schedule reaches as the buffer grows; 1: nothing can be faster."""
        return Fraction(1) if self.rate is None or self.bound.algbw is None else self.rate / self.bound.algbw

    def explain(self) -> str:
        """Say in words what the plan does, how fast it is, what limits it, and how others compare."""
        limit, found, pieces = self.bound, shape(self.schedule), self.schedule.pieces
        count = len({*self._ends[0], *self._ends[1]})
        head = f"{self.collective} of {size(self.nbytes)} by {self.algorithm} on {many(count, 'device')}"
        if self.rate is None or limit.algbw is None or not self.nbytes:
            return f"{head}: nothing has to move."
        loss = f" (a loss of {percent(1 - self.ratio)})" if self.ratio < 1 else ""
        lines = [
            head,
            f"  plan      {many(len(found.trees), 'chunk')}, k = {float(found.k):.4g} unit trees a root on "
            f"{many(len(found.roots), 'root')}, depth {found.depth}, {many(len(self.schedule.rounds), 'round')}, "
            f"{many(pieces, 'piece')} a chunk",
            f"  predicted {duration(self.seconds)}, {self.algbw:.2f} GB/s; {float(self.rate):.2f} GB/s when large",
            f"  bound     {float(limit.algbw):.2f} GB/s ({limit.algbw}), {percent(self.ratio)} of it reached{loss}",
            f"  limited by {limited_by(limit)}",
            "  shares of the buffer, and the tree of each: a device(those "
            + ("it sends to)" if self.collective in ("broadcast", "all_gather") else "that send to it)"),
            *tree_lines(found),
            "  others, for the same request",
        ]
        for name, (seconds, rate) in self.others().items():
            part = f"{float(rate):8.2f} GB/s when large, {percent(rate / limit.algbw)} of the bound" if rate else ""
            times = seconds / self.seconds if self.seconds else 1.0
            lines.append(f"    {name:20s} {duration(seconds):>10s} ({times:.2f} x) {part}")
        return "\n".join(lines)

    def others(self) -> dict[str, tuple[float, Fraction | None]]:
        """Return seconds and rate in GB/s of what else there is for this request, for comparison.

        TensorFlow's trees, a root for each device, in its four stages; rings; and one device.
        """
        sources, destinations = self._ends
        found: dict[str, tuple[float, Fraction | None]] = {}
        if self.collective == "all_reduce":
            members = tuple(dict.fromkeys([*sources, *destinations]))
            halves = hierarchical_copy(members, sources, destinations, packs=len(members))
            with suppress(PlanError):
                rate = fluid_rate(halves, self.topology)
                found["TensorFlow's trees"] = (simulate(halves, self.topology, self.nbytes).seconds, rate)
        for algorithm in ("ring", "one_device"):
            with suppress(PlanError):
                other = planned_on(self.topology, self.collective, sources, destinations, self.nbytes, algorithm)
                found[algorithm] = (other.seconds, other.rate)
        return found

    def __str__(self) -> str:
        return f"{self.schedule.head}; {self.nbytes} bytes in {self.seconds * 1e6:.1f} us"


def plan(
    topology: Topology,
    collective: str = "all_reduce",
    nbytes: int = 1 << 26,
    algorithm: str = "auto",
    sources: Iterable[str] | None = None,
    destinations: Iterable[str] | None = None,
    root: str | None = None,
    *,
    packs: int = 1,
) -> Plan:
    """Plan a collective on a topology.

    Args:
      topology: any in which data can get from every source to every destination.
      collective: "all_reduce", "reduce", "broadcast", "reduce_scatter" or "all_gather".
      nbytes: of the whole buffer: of one replica's, for an all-reduce; of all parts together, for an all-gather. 0 is
        legal and takes no time.
      algorithm: a planner's name, or "auto" (as is "nccl"): the one that is quickest in simulation.
      sources: the devices that contribute; ``None``: all (the root, for a broadcast).
      destinations: the devices that need the result; ``None``: all (the root, for a reduce). Devices that are neither
        may be led through.
      root: of a reduce or broadcast; ``None``: the one whose bound is greatest. For an all-reduce by one_device or
        hierarchical_copy: where to reduce.
      packs: for one_device and hierarchical_copy: how many trees, with different roots, share the buffer.
    Returns:
      A plan whose schedule is verified; the same request costs one look-up.
    Raises:
      ArgumentError: a name that is none, a negative or broken number, a root that is no device.
      PlanError: no way leads to some destination (the cut is named), or the algorithm cannot do the collective.

    >>> square = Topology.ring(4, gb_per_s=25, latency_s=1e-6)
    >>> best = plan(square, "all_reduce", nbytes=1 << 30)
    >>> best.ratio, str(best.bound.algbw)
    (Fraction(1, 1), '100/3')
    >>> best.algorithm, round(plan(square, "all_reduce", nbytes=8).seconds * 1e6)  # four hops of 1 us
    ('ring', 4)
    """
    if not isinstance(topology, Topology):
        raise ArgumentError(message("a plan needs a Topology.", shown(topology), 'Topology.machine("dgx-1v")'))
    for what, value, known in (("collective", collective, COLLECTIVES), ("algorithm", algorithm, ALGORITHMS)):
        if not isinstance(value, str) or value not in known:
            raise ArgumentError(message(f"there is no such {what}.", shown(value), "one of " + ", ".join(known)))
    for what, number, least, most in (("nbytes", nbytes, 0, MOST_BYTES), ("packs", packs, 1, MOST_PACKS)):
        if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
            problem = f"{what} is a whole number from {least} to {most}."
            raise ArgumentError(message(problem, shown(number), f"{what}={max(least, 1)}"))
    gives, takes, main = _request(topology, collective, sources, destinations, root)
    return planned_on(topology, collective, gives, takes, nbytes, algorithm, packs, 0, main)


def _request(
    topology: Topology,
    collective: str,
    sources: Iterable[str] | None,
    destinations: Iterable[str] | None,
    root: str | None,
) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    """Return who gives, who takes, and the root of an all-reduce."""
    gives = topology.devices if sources is None else topology.members(sources)
    takes = topology.devices if destinations is None else topology.members(destinations)
    main = None if root is None else canonical(root)
    if main is not None and main not in topology.devices:
        known = "one of " + ", ".join(topology.devices)
        raise ArgumentError(message("the root must be a device of the topology.", shown(root), known))
    if collective == "all_reduce":
        return gives, takes, main
    if collective in ("reduce_scatter", "all_gather"):
        if main is not None:
            raise ArgumentError(message(f"{collective} has no root.", f"root={shown(root)}", "reduce or broadcast"))
        if sources is None:
            gives = takes
        elif destinations is None:
            takes = gives
        if set(gives) != set(takes):
            problem = f"in a {collective} every device that contributes takes a part of the result."
            raise ArgumentError(message(problem, f"{shown(gives)} and {shown(takes)}", "sources alone"))
        return gives, gives, None
    given = sources if collective == "broadcast" else destinations
    if main is None and given is not None:
        own = gives if collective == "broadcast" else takes
        if len(own) > 1:
            raise ArgumentError(message(f"a {collective} has one root.", shown(own), "all_reduce, or one device"))
        main = own[0]
    others = takes if collective == "broadcast" else gives
    if main is None:
        main = bound(topology, collective, devices=others).roots[0][0]
    if given is not None and {main} != set(topology.members(given)):
        raise ArgumentError(message(f"a {collective} has one root.", f"root={main}, {shown(given)}", "root alone"))
    return ((main,), takes, None) if collective == "broadcast" else (gives, (main,), None)


@lru_cache(maxsize=4096)
def planned_on(
    topology: Topology,
    collective: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    nbytes: int,
    algorithm: str = "auto",
    packs: int = 1,
    first: int = 0,
    root: str | None = None,
) -> Plan:
    """Return the plan of a request whose arguments are checked; the same request costs one look-up."""
    require_ways(topology, sources, destinations, collective)
    if algorithm not in ("auto", "nccl"):
        return _quickest(topology, collective, sources, destinations, nbytes, algorithm, packs, first, root)
    n = len({*sources, *destinations})
    names = [
        name
        for name in NAMED
        if name in ("one_device", "hierarchical_copy")
        or (root is None and n <= (MOST_TREES if name == "forest" else MOST_DEVICES))
    ]
    tried = [(name, packs, root) for name in names]
    if packs == 1 and root is None and min(len(sources), len(destinations)) > 1 and n <= MOST_TREES:
        # A tree for each device, as TensorFlow rotates its roots; one tree with its root in the middle.
        tried += [("hierarchical_copy", n, None), ("hierarchical_copy", 1, centre(topology, sources, destinations))]
    plans = []
    for name, trees, main in tried:
        try:
            plans.append(_quickest(topology, collective, sources, destinations, nbytes, name, trees, first, main))
        except PlanError as error:
            refused = error
    if not plans:
        raise refused
    return min(plans, key=lambda found: found.seconds)


def _quickest(
    topology: Topology,
    collective: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    nbytes: int,
    algorithm: str,
    packs: int,
    first: int,
    root: str | None,
) -> Plan:
    """Pipeline an algorithm's schedules for a size, simulate them, and return the quickest."""
    made = candidates(topology, collective, sources, destinations, algorithm, packs, first, root)
    schedule, seconds = min((pipelined(one, topology, nbytes) for one in made), key=lambda found: found[1])
    return Plan(topology, collective, nbytes, schedule, seconds)


@lru_cache(maxsize=1024)
def candidates(
    topology: Topology,
    collective: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    algorithm: str,
    packs: int,
    first: int,
    root: str | None,
) -> tuple[Schedule, ...]:
    """Return an algorithm's schedules for a request of any size, verified; at least one.

    Raises:
      PlanError: the algorithm cannot do it.
    """
    if root is not None and algorithm not in ("one_device", "hierarchical_copy"):
        raise PlanError(message(f"{algorithm} reduces on no root.", f"root={root}", "one_device, hierarchical_copy"))
    if algorithm == "forest":
        made = [forest(topology, collective, sources, destinations).schedule]
    elif collective == "all_gather":
        turned = candidates(topology.reversed(), "reduce_scatter", sources, sources, algorithm, packs, first, root)
        made = [all_gather(schedule) for schedule in turned]
    elif collective == "reduce_scatter":
        n = len(sources)
        if algorithm in ("one_device", "hierarchical_copy", "halving_doubling", "recursive_doubling", "one_shot"):
            whole = candidates(topology, "all_reduce", sources, sources, algorithm, n, 0, None)
        elif algorithm == "ring":  # the ring's last stop of the k-th chunk is then the k-th device
            whole = candidates(topology, "all_reduce", sources, sources, algorithm, 1, 1, None)
        else:
            whole = candidates(topology, "all_reduce", sources, sources, algorithm, 1, 0, None)
        made = [reduce_scatter(schedule) for schedule in whole]
    elif algorithm == "hierarchical_copy":
        made = hierarchies(topology, sources, destinations, packs, first, root)
    elif algorithm == "ring":
        made = [rings(topology, sources, destinations, packs, first)]
    else:
        members = tuple(dict.fromkeys([*sources, *destinations, *([] if root is None else [root])]))
        options = {"root": root} if algorithm == "one_device" else {}
        planner: Callable[..., Schedule] = {
            "one_device": one_device,
            "direct": direct,
            "halving_doubling": halving_doubling,
            "recursive_doubling": recursive_doubling,
            "one_shot": one_shot,
        }[algorithm]
        made = [planner(members, sources, destinations, packs=packs, first=first, **options)]
    made = [replace(schedule, collective=collective) for schedule in made]
    for schedule in made:
        verify(schedule)
    return tuple(made)


@lru_cache(maxsize=1024)
def request_bound(topology: Topology, sources: tuple[str, ...], destinations: tuple[str, ...]) -> Bound:
    """Return the bound on getting what all sources together make to all destinations.

    Where these are the same devices: the all-reduce's. Else the least of what each destination can take in and each
    source can give out, which a plan between sets that overlap may not reach.
    """
    if set(sources) == set(destinations):
        return bound(topology, "all_reduce", devices=sources)
    reductions = [bound(topology, "reduce", d, dict.fromkeys([*sources, d])) for d in destinations]
    broadcasts = [bound(topology, "broadcast", s, dict.fromkeys([s, *destinations])) for s in sources]
    bounds = [one for one in (*reductions, *broadcasts) if one.algbw is not None]
    return min(bounds, key=lambda one: one.algbw or 0)
