"""Everything that the plan explorer shows, as plain values.

Input: a ``Plan``. Output: a dictionary that ``json`` can write. The page formats, adds up and draws these values, but
does not compute times, rates or positions. Texts about the plan are those of ``Plan.explain``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, NamedTuple

from ...devices import parse
from ...errors import PlanError
from ...planning import Plan
from ...planning.explain import duration, heaviest_cuts, percent, size
from ...planning.plans import plan_request
from ...planning.schedules import CHOICES, REGISTRY
from ...schedule.link_use import link_use
from ...schedule.schedule import many
from .positions import places
from .trees import groups

PARTS: Final = 240  # the number of parts of the duration for which the use of links is shown
SIZES: Final = tuple(1 << power for power in range(10, 31, 2))  # 1 KiB to 1 GiB
_MANY: Final = 128  # with more devices, a plan for another size can take half a minute, so fewer sizes are planned

_IDLE: Final = 1e-6  # percent of use; less than this is a rounding error

Advance = Callable[[str], None]


class Detail(NamedTuple):
    """The level of detail of a report."""

    parts: int = PARTS  # of the duration
    trees: bool = True  # whether trees and rings are listed


def model(plan: Plan, detail: Detail, advance: Advance) -> dict[str, Any]:
    """Return a dictionary of all values that the page shows about a plan.

    Args:
      plan: the plan.
      detail: the level of detail.
      advance: called with the name of each stage when it begins; ``stages`` returns the number of stages.
    """
    advance("explaining")
    text = plan.explain()
    head, *rest = text.splitlines()  # in the rest, a fact has a label in columns 2 to 11, and then its text
    facts = [[line[2:12].strip(), line[12:].strip()] for line in rest if line[2:3].strip() and line.startswith("  ")]
    topology, where = plan.topology, places(plan.topology)
    number = {node.name: k for k, node in enumerate(where.nodes)}
    links = [
        [number[link.src], number[link.dst], float(link.bandwidth), where.bends.get((link.src, link.dst), 0)]
        for link in topology.links
    ]
    link_number = {(link.src, link.dst): k for k, link in enumerate(topology.links)}
    has_data = plan.rate is not None and plan.nbytes > 0
    others = [(name, other) for name, other in plan.comparisons.items() if other.schedule != plan.schedule]
    plans = []
    for name, shown_plan in [(plan.algorithm, plan), *others] if has_data else []:
        advance(f"tracing {name}")
        plans.append(_plan(name, shown_plan, plan, link_number, detail))
    return {
        "head": head,
        "text": text,
        "facts": [fact for fact in facts if fact[0] in _FACTS],
        "collective": plan.collective,
        "bytes": plan.nbytes,
        "nodes": [
            [node.name, node.label, round(node.x), round(node.y), node.box, node.is_device] for node in where.nodes
        ],
        "reducing": [number[switch.name] for switch in topology.switches if switch.reduces],
        "boxes": [[box.name, *(round(value) for value in box[1:])] for box in where.boxes],
        "symbol": round(where.size),
        "links": links,
        "parts": detail.parts,
        "cuts": _cuts(plan, number, link_number) if has_data else [],
        "plans": plans,
        "sizes": _sizes(plan, advance) if has_data else None,
    }


_FACTS: Final = ("plan", "predicted", "bound", "limited by", "assumed", "helpers", "busiest")


def stages(plan: Plan) -> int:
    """Return the number of stages of ``model``."""
    return 2 + len(plan.comparisons) + len(_sizes_of(plan))


def _sizes_of(plan: Plan) -> tuple[int, ...]:
    """Return the sizes for which all algorithms are planned."""
    return SIZES if len(plan.request.members) <= _MANY else SIZES[::2]


def _plan(name: str, plan: Plan, best: Plan, link_number: dict[tuple[str, str], int], detail: Detail) -> dict[str, Any]:
    """Return the values of one plan. ``best`` is the plan of the page, with which others are compared."""
    costs, topology, simulation = plan.request.costs, plan.topology, plan.simulation
    use = link_use(plan.schedule, topology, plan.nbytes, plan.seconds, detail.parts, costs)
    curves: dict[tuple[int, ...], int] = {}  # the numbers of curves, since many links have the same one
    links = {}
    for pair, used in use.items():
        link = topology.link(*pair)
        assert link is not None
        curve = _levels(used.carried, float(link.bandwidth) * 1e9 * plan.seconds / detail.parts)
        busy = round(simulation.busy[pair] / plan.seconds * 100, 2)
        links[link_number[pair]] = [
            curves.setdefault(curve, len(curves)), simulation.bytes[pair], busy, used.transfers
        ]  # fmt: skip
    total = [sum(moment) for moment in zip(*(used.carried for used in use.values()), strict=True)]
    rate, bound = plan.rate, best.bound.algbw
    return {
        "name": name,
        "algorithm": plan.algorithm,
        "seconds": plan.seconds,
        "duration": duration(plan.seconds),
        "times": f"{plan.seconds / best.seconds:.2f} x" if plan is not best and best.seconds else "",
        "rate": f"{float(rate):.2f} GB/s when large" if rate else "",
        "ratio": f"{percent(rate / bound)} of the bound" if rate and bound else "",
        "head": plan.schedule.head,
        "pieces": many(plan.schedule.pieces, "piece"),
        "done": [round(moved / total[-1] * 100, 1) for moved in total],
        "curves": list(curves),
        "links": links,
        "groups": _groups(plan, link_number) if detail.trees else [],
    }


def _levels(carried: tuple[float, ...], most: float) -> tuple[int, ...]:
    """Return the use of a link, in percent of its bandwidth, in each part of the time.

    ``most`` is the number of bytes that it can carry in a part. If it carries any bytes, its use is at least 1 %.
    """
    parts = [(after - before) / most * 100 for before, after in pairwise(carried)]
    return tuple([0 if part < _IDLE else min(100, max(1, round(part))) for part in parts])


def _groups(plan: Plan, link_number: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    return [
        {
            "title": group.title,
            "share": str(group.share),
            "count": group.number,
            "routes": [
                {
                    "title": route.title,
                    "share": str(route.share),
                    "chunks": many(route.chunks, "chunk"),
                    "roots": route.roots,
                    "partial": sorted(link_number[pair] for pair in route.partial),
                    "final": sorted(link_number[pair] for pair in route.final),
                }
                for route in group.routes
            ],
        }
        for group in groups(plan)
    ]


def _cuts(plan: Plan, number: dict[str, int], link_number: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    """Return the tight cuts, each with the devices on the smaller side and the links that cross the cut."""
    links_of_cut: dict[tuple[str, ...], set[int]] = {}
    for devices, _, links in heaviest_cuts(plan.bound):
        links_of_cut.setdefault(devices, set()).update(link_number[link.src, link.dst] for link in links)
    return [
        {"name": _cut_name(devices), "nodes": [number[device] for device in devices], "links": sorted(crossing)}
        for devices, crossing in links_of_cut.items()
    ]


def _cut_name(devices: tuple[str, ...]) -> str:
    """Return a short name for the cut around some devices.

    >>> _cut_name(("host0/cuda:0", "host0/cuda:1")), _cut_name(("cuda:5",))
    ('2 devices of host0', 'cuda:5')
    """
    hosts = {parse(device).host for device in devices}
    if len(devices) == 1:
        return devices[0]
    return f"{len(devices)} devices" + (f" of {hosts.pop()}" if len(hosts) == 1 and "" not in hosts else "")


def _sizes(plan: Plan, advance: Advance) -> dict[str, Any]:
    """Return the seconds of each algorithm that "auto" considers, and of "auto" itself, for several sizes."""
    request = plan.request._replace(packs=1, first=0, root=None, granularity=0.0)
    sizes = _sizes_of(plan)
    count = len(request.members)
    names = [name for name, entry in REGISTRY.items() if entry.most_devices is None or count <= entry.most_devices]
    seconds: dict[str, list[float | None]] = {name: [] for name in names}
    best: list[list[Any]] = []
    for nbytes in sizes:
        advance(f"planning {size(nbytes)}")
        auto = plan_request(request._replace(nbytes=nbytes, algorithm=CHOICES[-1]))
        best.append([auto.algorithm, auto.seconds, duration(auto.seconds), f"{auto.algbw:.2f}"])
        for name in names:
            try:
                seconds[name].append(plan_request(request._replace(nbytes=nbytes, algorithm=name)).seconds)
            except PlanError:
                seconds[name].append(None)
    return {
        "bytes": list(sizes),
        "texts": [size(nbytes) for nbytes in sizes],
        "algorithms": {
            name: [None if time is None else [time, duration(time)] for time in times]
            for name, times in seconds.items()
            if any(time is not None for time in times)
        },
        "auto": best,
    }
