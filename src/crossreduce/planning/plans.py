"""``plan``: the fastest verified schedule of a collective on a topology, with a proof of how good it is.

Schedules are verified, pipelined and simulated. "auto" takes the fastest one, and tries fewer above 128 devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from importlib import import_module
from os import PathLike
from typing import Final

from ..errors import ArgumentError, PlanError, shown
from ..packing import MOST_PACKS
from ..schedule import Costs, Schedule, Simulation, costs_of, fluid_rate, simulate
from ..schedule.schedule import many
from ..topology import Topology, TopologyLike, byte_count, topology_of
from .algorithms.equal_links import hierarchical_copy_schedule
from .optimal.bound import bound_of_members
from .optimal.bounds.certificate import COLLECTIVES, Bound
from .optimal.bounds.tight_cuts import limited_by
from .requests import Request
from .schedules import CHOICES, MOST_DEVICES, NAMES, fastest_schedule

LOSS: Final = 0.02  # ``replanned`` accepts a new plan that is at most this part farther from its bound than the old one
REPORTER: Final = "crossreduce.export.explorer"  # the module whose ``write_report`` writes the files of ``Plan.report``


@dataclass(frozen=True)
class Plan:
    """A schedule of a request, its predicted time, and its bound.

    A plan is a value and runs nothing: ``AllReduceCrossDeviceOps(plan.algorithm, topology=plan.topology)`` makes and
    runs such plans for arrays, and ``crossreduce export`` writes them for other tools.
    """

    request: Request  # its topology is not None
    schedule: Schedule  # verified; cut into the number of pieces that suits ``nbytes``
    seconds: float  # the simulated duration
    change: str = field(default="", compare=False)  # how and why ``replanned`` made the plan; empty if ``plan`` made it

    @property
    def topology(self) -> Topology:
        """The topology on which the schedule runs."""
        assert self.request.topology is not None
        return self.request.topology

    @property
    def collective(self) -> str:
        """The name of the collective."""
        return self.request.collective

    @property
    def nbytes(self) -> int:
        """The bytes of the whole buffer."""
        return self.request.nbytes

    @property
    def root(self) -> str | None:
        """The source of a broadcast or the destination of a reduce; ``None`` for other collectives."""
        ends = {"broadcast": self.request.sources, "reduce": self.request.destinations}.get(self.collective)
        return None if ends is None else ends[0]

    @property
    def helpers(self) -> tuple[str, ...]:
        """The devices and switches in steps of the schedule that are neither a source nor a destination."""
        members = {*self.request.sources, *self.request.destinations}
        return tuple(device for device in self.schedule.devices if device not in members)

    @property
    def ranks(self) -> tuple[str, ...]:
        """The device of each rank in an exported file. The order is that of the request's devices.

        Switches that combine in the network are devices of the schedule, but have no rank.
        """
        return tuple(device for device in self.schedule.devices if device in self.topology.devices)

    @property
    def algorithm(self) -> str:
        """The algorithm that made the schedule."""
        return self.schedule.algorithm

    @cached_property
    def simulation(self) -> Simulation:
        """The predicted execution: the time of each link, and the utilization of each resource."""
        return simulate(self.schedule, self.topology, self.nbytes, costs=self.request.costs)

    @cached_property
    def rate(self) -> Fraction | None:
        """The algbw in GB/s that the schedule approaches as the buffer grows; ``None`` if nothing moves."""
        return fluid_rate(self.schedule, self.topology)

    @cached_property
    def bound(self) -> Bound:
        """The rate that no schedule of this request can exceed, with its proof."""
        return self._bound_on(self.topology)

    @cached_property
    def bound_without_helpers(self) -> Bound | None:
        """The bound on the topology without the helper devices; ``None`` if some members then have no route."""
        members = {*self.request.sources, *self.request.destinations}
        kept = tuple(device for device in self.topology.devices if device in members)
        with suppress(PlanError):
            return self._bound_on(self.topology.part(kept))
        return None

    def _bound_on(self, topology: Topology) -> Bound:
        """Return the bound of the request's collective, devices and root on ``topology``."""
        sources, destinations = self.request.sources, self.request.destinations
        if self.collective == "all_reduce":
            return _request_bound(topology, sources, destinations)
        members = tuple(dict.fromkeys([*sources, *destinations]))
        root = {"broadcast": sources[0], "reduce": destinations[0]}.get(self.collective)
        roots = None if root is None else ((root, Fraction(1)),)
        return bound_of_members(topology, self.collective, members, roots)

    @property
    def algbw(self) -> float:
        """The predicted rate for ``nbytes``, in GB/s; 0 if nothing moves."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def ratio(self) -> Fraction:
        """The part of the bound that the schedule reaches as the buffer grows. At 1 no schedule can be faster."""
        return Fraction(1) if self.rate is None or self.bound.algbw is None else self.rate / self.bound.algbw

    def explain(self, width: int | None = None) -> str:
        """Return a text about the plan: its trees, speed and limit, and others. ``width``: of its longest line."""
        from . import explain as text

        most, pieces, trees = self.bound.algbw, self.schedule.pieces, text.shape(self.schedule)
        count = len({*self.request.sources, *self.request.destinations})
        hosts = len({device.rpartition("/")[0] for device in (*self.request.sources, *self.request.destinations)})
        head = f"{self.collective} of {text.size(self.nbytes)} by {self.algorithm} on {many(count, 'device')}"
        head += f" of {hosts} hosts" if hosts > 1 else ""
        if self.rate is None or most is None or not self.nbytes:
            return f"{head}: no data has to move."
        loss = f" (a loss of {text.rest_percent(self.ratio)})" if self.ratio < 1 else ""
        outward = self.collective in ("broadcast", "all_gather")
        relation = "it sends to" if outward else "send to it"
        network = text.crossings(self.schedule)
        helpers = self.helpers and text.helped_by(self.helpers, self.rate, self.bound_without_helpers)
        costs = text.counted(self.request.costs, self.ranks)
        only_if = "if the links are as assumed" if self.topology.assumed else ""
        lines = [
            head,
            f"  plan      {many(self.schedule.chunk_count, 'chunk')}, {many(len(trees.roots), 'root')}, trees of depth "
            f"{trees.depth}, {many(self.schedule.round_count, 'round')}, {many(pieces, 'piece')} per chunk",
            f"  predicted {text.duration(self.seconds)}, {self.algbw:.2f} GB/s; {float(self.rate):.2f} GB/s when large",
            *([f"  counted   {costs}"] if costs else []),
            f"  bound     {text.rate(most, only_if)}, {text.percent(self.ratio)} of it reached{loss}",
            f"  limited by {limited_by(self.bound)}",
            *(f"  assumed   {each}" for each in self.topology.assumed),
            *([f"  changed   {self.change}"] if self.change else []),
            *([f"  network   {network}"] if network else []),
            *([f"  helpers   {helpers}"] if helpers else []),
            f"  busiest   {text.busiest_text(self.simulation.limits)}",
            f"  to run    {self._way_to_run}",
            f"  bits      {self._reproducibility}",
            f"  shares of the buffer, each with its tree, written as device(devices that {relation})",
            *text.tree_lines(trees, outward, width),
        ]
        others = [name for name, other in self.comparisons.items() if other.schedule != self.schedule]
        rows = {name: row for name, row in self.others().items() if name in others and name != self.algorithm}
        lines += [f"  other algorithms, for the same request{self._ignored_arguments}"] if rows else []
        return text.wrapped([*lines, *text.other_lines(rows, self.seconds, most)], width)

    @property
    def _way_to_run(self) -> str:
        """A text about how to run the plan."""
        if self.collective in ("all_reduce", "reduce", "broadcast") and not self.helpers:
            name = "auto" if self.request.algorithm in CHOICES else self.request.algorithm
            return f'AllReduceCrossDeviceOps("{name}", topology=...) plans and runs it for arrays'
        return "export it for another tool (crossreduce export)"

    @property
    def _reproducibility(self) -> str:
        """A text about the runs that give the same bits (see docs/explanation/exactness.md)."""
        if self.collective in ("broadcast", "all_gather"):
            return "those of the source"
        return "the same in every run of this plan; with exact=True also for other plans and orders"

    @property
    def _ignored_arguments(self) -> str:
        """A text about the arguments that ``others`` ignores, or "" if the request has none of them."""
        given = {"packs": self.request.packs != 1, "root": self.request.root is not None}
        ignored = " and ".join(name for name, is_given in given.items() if is_given)
        return f" without its {ignored}" if ignored else ""

    def others(self) -> dict[str, tuple[float, Fraction | None]]:
        """Return the seconds and GB/s of some other plans of the request, by algorithm, for comparison.

        The algorithms are "ring", "one_device", and for an all-reduce TensorFlow's hierarchical copy with a tree per
        device. On many devices they are "direct", "hierarchical_copy" with one tree, and "one_device". Algorithms that
        cannot plan the request are omitted. The request's ``packs`` and ``root`` are ignored.
        """
        return {name: (other.seconds, other.rate) for name, other in self.comparisons.items()}

    @cached_property
    def comparisons(self) -> dict[str, Plan]:
        """The plans whose seconds and rates ``others`` returns."""
        request = self.request._replace(packs=1, first=0, root=None)
        plans: dict[str, Plan] = {}
        few = len(self.schedule.devices) <= MOST_DEVICES  # with more, "ring" has about n**2 steps that are all listed
        if self.collective == "all_reduce" and few:
            rotating = request._replace(algorithm="hierarchical_copy", packs=len(request.members))
            schedule = hierarchical_copy_schedule(rotating)
            with suppress(PlanError):
                simulation = simulate(schedule, self.topology, self.nbytes, costs=request.costs)
                plans["TensorFlow's trees"] = Plan(rotating, schedule, simulation.seconds)
        for algorithm in ("ring", "one_device") if few else ("direct", "hierarchical_copy", "one_device"):
            with suppress(PlanError):
                plans[algorithm] = plan_request(request._replace(algorithm=algorithm))
        return plans

    def replanned(self, topology: TopologyLike) -> Plan:
        """Return the plan of the same request on a topology that has changed. The result's ``change`` is the reason.

        The schedule is kept if no link that it uses became slower, and either no link became faster or the schedule
        still reaches the bound. Otherwise this plan's algorithm plans again, and then "forest". For each plan, its time
        is divided by the least time that its own bound allows. The first new plan for which this ratio is at most 2 %
        greater than for this plan is returned. If there is none, all algorithms are tried, as by ``plan``.

        Args:
          topology: as for ``plan``, with the same names of devices and switches as in this plan. Lost devices take no
            part any more. New devices take part if all devices of the old topology did.
        Raises:
          ArgumentError: the root is lost, or all devices are.
          PlanError: a destination cannot be reached any more, or the given algorithm cannot plan on the topology.

        >>> square = Topology.full_mesh(4, gb_per_s=25)
        >>> rest = plan(square, nbytes=1 << 30).replanned(square.without_link(0, 1).without_node(3))
        >>> print(rest.change, rest.request.sources, rest.ratio)
        planned again by forest alone, since cpu:3 is lost; cpu:0-cpu:1 is lost ('cpu:0', 'cpu:1', 'cpu:2') 1
        """
        from .replanning import changes, has_gained, move_request, quick_bound, runs_as_before

        now = topology_of(topology)
        request, what = move_request(self.request, now), changes(self.topology, now)
        if runs_as_before(self.schedule, self.request, request):
            seconds = simulate(self.schedule, now, self.nbytes, costs=request.costs).seconds
            kept = Plan(request, self.schedule, seconds, f"kept, although {what}" if what else "kept: nothing changed")
            if not has_gained(self.topology, now) or kept.ratio == 1:
                return kept
        for name in dict.fromkeys([self.algorithm, "forest"]) if request.algorithm in CHOICES else ():
            with suppress(PlanError):  # the algorithm cannot plan it
                new = replace(plan_request(request._replace(algorithm=name)), request=request)
                # Searching a bound may take longer than all else. "forest" has searched it, and the result is cached.
                most = new.bound.algbw if name == "forest" else quick_bound(self.bound, request)
                # Proportional to a plan's time divided by the least time that its bound allows.
                new_excess = new.seconds * float(most or 0)
                old_excess = self.seconds * float(self.bound.algbw or 0)
                if new_excess <= (1 + LOSS) * old_excess:
                    return replace(new, change=f"planned again by {name} alone, since {what}")
        return replace(plan_request(request), change=f"planned again, since {what}")

    def report(self, path: str | PathLike[str], beside: Plan | None = None) -> None:
        """Write the plan as one HTML file, which shows it in any browser and needs no network.

        Args:
          path: a file that ends in .html; an existing file is replaced. At most 1 MB is written.
          beside: another plan, of the same or of another topology, that the page shows beside this one.
        Raises:
          ArgumentError: an invalid path, or a plan that does not fit into 1 MB.
          OSError: the file cannot be written.
        """
        # Imported by name at the call, like a plug-in, so that planning depends on no module that does I/O.
        import_module(REPORTER).write_report(self, path, beside)

    def __str__(self) -> str:
        return f"{self.schedule.head}; {self.nbytes} bytes in {self.seconds * 1e6:.1f} us"


@lru_cache(maxsize=4096)
def plan_request(request: Request) -> Plan:
    """Return the plan of a checked request; the same request costs one lookup.

    The schedule's devices have the order of the request's sources, or of its destinations if there are more of these.
    So a root keeps its place among the other devices. Exported files number the ranks in this order.
    """
    topology = request.topology
    assert topology is not None
    schedule, seconds = fastest_schedule(request._replace(granularity=0.0))
    schedule = schedule.ordered_by(max(request.sources, request.destinations, key=len))
    if request.granularity:
        from .granularity import round_shares

        schedule = round_shares(schedule, topology, request.granularity, request.nbytes, request.costs)
        seconds = simulate(schedule, topology, request.nbytes, costs=request.costs).seconds
    return Plan(request, schedule, seconds)


def plan(
    topology: TopologyLike,
    collective: str = "all_reduce",
    nbytes: int | str = 1 << 26,
    algorithm: str = "auto",
    sources: Iterable[str | int] | None = None,
    destinations: Iterable[str | int] | None = None,
    root: str | int | None = None,
    *,
    participants: Iterable[str | int] | None = None,
    packs: int = 1,
    operation_s: float | None = None,
    costs: Costs | None = None,
    granularity: float = 0.0,
) -> Plan:
    """Return a plan of a collective on a topology: the fastest schedule that is found, verified.

    Args:
      topology: a ``Topology``, the name of a machine, or the path of a file. Every source needs a route to every
        destination.
      collective: "all_reduce", "reduce", "broadcast", "reduce_scatter" or "all_gather".
      nbytes: the bytes of the whole buffer. In an all-reduce this is the buffer of one replica, in an all-gather all
        parts together. 0 is valid and takes no time; "64M" is 64 MiB.
      algorithm: the name of an algorithm, or "auto" (or "nccl"): the fastest one in simulation.
      sources: the devices that contribute, by name or number; ``None``: all (the root, for a broadcast).
      destinations: the devices that need the result; ``None``: all (the root, for a reduce). Other devices can forward
        data. A reduce-scatter or all-gather has the same sources and destinations: list either.
      root: the root of a reduce or broadcast; ``None``: its listed destination or source, or if none is listed, the
        device with the greatest bound. For an all-reduce by one_device or hierarchical_copy: the device that reduces.
      participants: the devices that are both ``sources`` and ``destinations``, instead of these two arguments. Other
        devices are helpers: they forward data, and combine it where that makes the plan faster.
      packs: for one_device and hierarchical_copy: the number of trees that share the buffer; roots rotate unless given.
      operation_s: short for ``costs=Costs(operation_s=...)``: the seconds in which a host queues one operation;
        ``None``: 2e-6 on CUDA devices, else 0. Set it to 0 if operations are not queued one by one, as in exported
        plans.
      costs: what else takes time, such as reductions, messages and limits that links share: see ``Costs``.
      granularity: rounds the shares to multiples of 1/2, 1/4, 1/8, ..., so that an exported file fits the sizes of most
        messages. The number, such as 0.02, is the largest part of the rate that may be lost. With 0, or if no such
        shares are found, shares stay exact.
    Returns:
      A plan whose schedule is verified; the same request costs one lookup.
    Raises:
      ArgumentError: a name is unknown, a number is invalid, the root is not a device, or arguments contradict others.
      PlanError: a destination cannot be reached (the error names the cut), or the algorithm cannot do the collective.
      OSError: the file of the topology cannot be read.

    >>> print(plan("dgx-1v", "broadcast", "1M", root=2, operation_s=0))
    broadcast forest: 8 devices, 78 chunks, 7 rounds, 546 steps; 1048576 bytes in 15.1 us
    >>> square = Topology.ring(4, gb_per_s=25, latency_s=1e-6)
    >>> best = plan(square, "all_reduce", nbytes=1 << 30)
    >>> best.ratio, str(best.bound.algbw)
    (Fraction(1, 1), '100/3')
    >>> best.algorithm, round(plan(square, nbytes=8).seconds * 1e6)  # two hops of 1 us
    ('ring', 2)
    """
    topology = topology_of(topology)
    for what, value, known in (("collective", collective, COLLECTIVES), ("algorithm", algorithm, NAMES)):
        if not isinstance(value, str) or value not in known:
            raise ArgumentError.of(f"there is no such {what}.", shown(value), "one of " + ", ".join(known))
    if not isinstance(packs, int) or isinstance(packs, bool) or not 1 <= packs <= MOST_PACKS:
        raise ArgumentError.of(f"packs must be an integer from 1 to {MOST_PACKS}.", shown(packs), "packs=1")
    size = byte_count(nbytes)
    if participants is not None:
        if sources is not None or destinations is not None:
            problem = "participants stands for sources and destinations, so neither can be given with it."
            raise ArgumentError.of(problem, "participants with sources or destinations", "participants=[...] alone")
        members = topology.members(participants)
        if root is not None and collective in ("broadcast", "reduce") and topology.node(root) not in members:
            raise ArgumentError.of("the root must be a participant.", shown(root), "one of " + ", ".join(members))
        sources = None if collective == "broadcast" else members
        destinations = None if collective == "reduce" else members
    source_names, destination_names, reducer = _read_devices(topology, collective, sources, destinations, root)
    request = Request(collective, source_names, destination_names, algorithm, topology, size, packs, root=reducer)
    request = request._replace(costs=costs_of(costs, operation_s), granularity=part_of_rate(granularity))
    made = plan_request(request)
    # An equal topology with other assumptions may have been planned before.
    same = made.topology.assumed == topology.assumed
    return made if same else replace(made, request=made.request._replace(topology=topology))


def part_of_rate(given: object) -> float:
    """Return the argument ``granularity`` of ``plan`` as a float. ArgumentError: it is not a number from 0 to 1."""
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given <= 1:
        return float(given)
    problem = "granularity must be the part of the rate that rounded shares may cost, from 0 to 1."
    raise ArgumentError.of(problem, shown(given), "granularity=0.02, or 0 for exact shares")


def _read_devices(
    topology: Topology,
    collective: str,
    sources: Iterable[str | int] | None,
    destinations: Iterable[str | int] | None,
    root: str | int | None,
) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    """Return the canonical names of the sources, of the destinations, and of the root of an all-reduce, if given.

    The last one is ``None`` for other collectives; the root of a broadcast or reduce is its only source or destination.
    """
    source_names = topology.devices if sources is None else topology.members(sources)
    destination_names = topology.devices if destinations is None else topology.members(destinations)
    root_name = None if root is None else topology.node(root)
    if root_name is not None and root_name not in topology.devices:
        known = "one of " + ", ".join(topology.devices)
        raise ArgumentError.of("the root must be a device of the topology.", shown(root), known)
    if collective == "all_reduce":
        return source_names, destination_names, root_name
    if collective in ("reduce_scatter", "all_gather"):
        if root_name is not None:
            remedy = "omit root, or plan a reduce or broadcast"
            raise ArgumentError.of(f"{collective} has no root.", f"root={shown(root)}", remedy)
        if sources is None:
            source_names = destination_names
        elif destinations is None:
            destination_names = source_names
        if set(source_names) != set(destination_names):
            problem = f"the sources and the destinations of {collective} must be the same devices."
            given = f"sources {shown(source_names)}, destinations {shown(destination_names)}"
            raise ArgumentError.of(problem, given, "sources=..., without destinations")
        return source_names, source_names, None
    copies = collective == "broadcast"  # the root is then the source, otherwise the destination
    which, listed = ("sources", sources) if copies else ("destinations", destinations)
    root_side, others = (source_names, destination_names) if copies else (destination_names, source_names)
    problem = f"a {collective} must have one root, so {which} may list no other device."
    if root_name is None and listed is not None:
        if len(root_side) > 1:
            remedy = f'{which}=["{root_side[0]}"]' + ("" if copies else ", or an all_reduce")
            raise ArgumentError.of(problem, f"{which} {shown(root_side)}", remedy)
        root_name = root_side[0]
    if root_name is None:
        root_name = bound_of_members(topology, collective, others).roots[0][0]
    if listed is not None and (root_name,) != root_side:
        given = f"root={root_name}, {which} {shown(root_side)}"
        raise ArgumentError.of(problem, given, f'root="{root_name}", without {which}')
    return ((root_name,), others, None) if copies else (others, (root_name,), None)


@lru_cache(maxsize=1024)
def _request_bound(topology: Topology, sources: tuple[str, ...], destinations: tuple[str, ...]) -> Bound:
    """Return the bound of an all-reduce from some devices to others.

    If the sources and the destinations differ, it is the least bound of the reduces to each single destination and the
    broadcasts from each single source. If they differ but overlap, perhaps no plan reaches this bound.
    """
    if set(sources) == set(destinations):
        return bound_of_members(topology, "all_reduce", sources)

    def rooted_bound(collective: str, root: str, members: tuple[str, ...]) -> Bound:
        return bound_of_members(topology, collective, tuple(dict.fromkeys(members)), ((root, Fraction(1)),))

    reduces = [rooted_bound("reduce", dst, (*sources, dst)) for dst in destinations]
    broadcasts = [rooted_bound("broadcast", src, (src, *destinations)) for src in sources]
    bounds = [limit for limit in (*reduces, *broadcasts) if limit.algbw is not None]
    return min(bounds, key=lambda limit: limit.algbw or 0)
