"""Everything that the plan explorer shows, as plain values.

Input: a ``Plan``, and what else the page shows. Output: a dictionary that ``json`` can write. The page formats, adds up
and draws these values, but does not compute times, rates or positions. Texts about the plan are those of
``Plan.explain``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, NamedTuple

from ...devices import parse
from ...errors import PlanError
from ...planning import Plan
from ...planning.explain import duration, percent, size
from ...planning.optimal.bounds.tight_cuts import heaviest_cuts, limited_by
from ...planning.plans import plan_request
from ...planning.requests import busbw_factor
from ...planning.schedules import CHOICES, REGISTRY
from ...schedule.link_use import link_use
from ...schedule.schedule import many
from ...topology.measurements import Measurement
from .link_groups import link_groups
from .losses import Loss, kinds
from .positions import Map, places
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
    lost: int = 3  # the number of losses whose plans are shown


class Beside(NamedTuple):
    """What a page shows beside its plan."""

    plan: Plan | None = None  # another plan of the same or of another topology
    name: str = ""  # of this plan
    measured: tuple[Measurement, ...] = ()
    machine: str = ""  # the name of the topology
    command: str = ""  # that writes the page


Numbers = dict[tuple[str, str], int]  # the number of each link of a topology


def model(plan: Plan, beside: Beside, lost: tuple[Loss, ...], detail: Detail, advance: Advance) -> dict[str, Any]:
    """Return a dictionary of all values that the page shows about a plan.

    Args:
      plan: the plan.
      beside: what the page shows beside it.
      lost: the losses of parts: see ``losses``.
      detail: the level of detail.
      advance: called with the name of each stage when it begins; ``stages`` returns the number of stages.
    """
    advance("explaining")
    text = plan.explain()
    head, *rest = text.splitlines()  # in the rest, a fact has a label in columns 2 to 11, and then its text
    facts = [[line[2:12].strip(), line[12:].strip()] for line in rest if line[2:3].strip() and line.startswith("  ")]
    has_data = plan.rate is not None and plan.nbytes > 0
    other = beside.plan if has_data else None
    if other is not None and (other.rate is None or not other.nbytes):
        other = None
    numbers = _numbers(plan)
    shown = [plan.schedule, *([] if other is None else [other.schedule])]
    others = [(name, each) for name, each in plan.comparisons.items() if each.schedule not in shown]
    plans = []
    for name, shown_plan in [(plan.algorithm, plan), *others] if has_data else []:
        advance(f"tracing {name}")
        plans.append(_plan(name, shown_plan, plan, numbers, detail))
    second = None
    if other is not None:
        advance(f"tracing {beside.name}")
        same = other.topology == plan.topology
        second = None if same else _map(other, places(other.topology))
        entry = _plan(beside.name, other, other, numbers if same else _numbers(other), detail)
        times = f"{other.seconds / plan.seconds:.2f} x" if plan.seconds else ""
        plans.insert(1, entry | {"times": times, "other": not same, "beside": True})
    where = places(plan.topology)
    node_number = {node.name: k for k, node in enumerate(where.nodes)}
    loss_rows = [_loss(each, plan, node_number) for each in lost]
    for row, each in list(zip(loss_rows, lost, strict=True))[: detail.lost]:
        row["plan"] = len(plans)
        name = f"{each.parts[0].name} at half speed" if each.is_half else f"without {each.parts[0].name}"
        entry = _plan(name, each.plan, plan, numbers, detail)
        plans.append(entry | {"lost": row["links"], "card": row["card"], "half": each.is_half})
    return {
        "head": head,
        "text": text,
        "facts": [fact for fact in facts if fact[0] in _FACTS],
        "collective": plan.collective,
        "bytes": plan.nbytes,
        **_map(plan, where),
        "other": second,
        "parts": detail.parts,
        "plans": plans,
        "losses": _losses(loss_rows, lost, plan, node_number, kinds(plan, where)[1] if lost else 0),
        "sizes": _sizes(plan, advance) if has_data else None,
        "measured": _measured(plan, beside.measured, advance) if has_data else [],
    }


def _numbers(plan: Plan) -> Numbers:
    return {(link.src, link.dst): k for k, link in enumerate(plan.topology.links)}


def _map(plan: Plan, where: Map) -> dict[str, Any]:
    """Return the wiring of a plan: its nodes, links, boxes, groups of links, and tight cuts."""
    topology, numbers = plan.topology, _numbers(plan)
    number = {node.name: k for k, node in enumerate(where.nodes)}
    bends = where.bends
    return {
        "nodes": [
            [node.name, node.label, round(node.x), round(node.y), node.box, node.is_device, int(node.is_cell)]
            for node in where.nodes
        ],
        "reducing": [number[switch.name] for switch in topology.switches if switch.reduces],
        "boxes": [[box.name, *(round(value) for value in box[1:])] for box in where.boxes],
        "symbol": round(where.size),
        "links": [
            [number[link.src], number[link.dst], float(link.bandwidth), bends.get((link.src, link.dst), 0)]
            for link in topology.links
        ],
        "rows": [list(group) for group in link_groups(topology, where)],
        "cuts": _cuts(plan, number, numbers) if plan.rate is not None and plan.nbytes > 0 else [],
        "limited": limited_by(plan.bound) if plan.bound.algbw is not None else "",
    }


_FACTS: Final = ("plan", "predicted", "bound", "limited by", "assumed", "changed", "helpers", "busiest")


def stages(plan: Plan, beside: Beside = Beside()) -> int:  # noqa: B008 - it is a frozen value
    """Return the number of stages of ``losses`` and ``model``."""
    count = 2 + len(plan.comparisons) + len(_sizes_of(plan)) + len(_measured_sizes(plan, beside.measured))
    return count + len(kinds(plan, places(plan.topology))[0]) + (beside.plan is not None)


def _sizes_of(plan: Plan) -> tuple[int, ...]:
    """Return the sizes for which all algorithms are planned."""
    return SIZES if len(plan.request.members) <= _MANY else SIZES[::2]


def _plan(name: str, plan: Plan, best: Plan, link_number: Numbers, detail: Detail) -> dict[str, Any]:
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
        "busbw": f"{plan.algbw * _bus_factor(plan):.2f} GB/s busbw",
        "rate": f"{float(rate):.2f} GB/s when large" if rate else "",
        "ratio": f"{percent(rate / bound)} of the bound" if rate and bound else "",
        "head": plan.schedule.head,
        "pieces": many(plan.schedule.pieces, "piece"),
        "done": [round(moved / total[-1] * 100, 1) for moved in total],
        "curves": list(curves),
        "links": links,
        "groups": _groups(plan, link_number) if detail.trees else [],
    }


def _bus_factor(plan: Plan) -> float:
    return busbw_factor(plan.collective, len(plan.request.members))


def _levels(carried: tuple[float, ...], most: float) -> tuple[int, ...]:
    """Return the use of a link, in percent of its bandwidth, in each part of the time.

    ``most`` is the number of bytes that it can carry in a part. If it carries any bytes, its use is at least 1 %.
    """
    parts = [(after - before) / most * 100 for before, after in pairwise(carried)]
    return tuple([0 if part < _IDLE else min(100, max(1, round(part))) for part in parts])


def _groups(plan: Plan, link_number: Numbers) -> list[dict[str, Any]]:
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
                    "fold": route.fold,
                    "roots": route.roots,
                    "partial": sorted(link_number[pair] for pair in route.partial),
                    "final": sorted(link_number[pair] for pair in route.final),
                }
                for route in group.routes
            ],
        }
        for group in groups(plan)
    ]


def _cuts(plan: Plan, number: dict[str, int], link_number: Numbers) -> list[dict[str, Any]]:
    """Return the tight cuts, each with the nodes on the side that has the links, and the links that cross the cut."""
    found: dict[tuple[str, ...], tuple[set[int], set[int]]] = {}
    for cut in heaviest_cuts(plan.bound):
        nodes, links = found.setdefault(cut.devices, (set(), set()))
        nodes.update(number[node] for node in cut.nodes)
        links.update(link_number[link.src, link.dst] for link in cut.links)
    return [
        {"name": _cut_name(devices), "nodes": sorted(nodes), "links": sorted(links)}
        for devices, (nodes, links) in found.items()
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
        rates = [f"{auto.algbw:.2f}", f"{auto.algbw * _bus_factor(plan):.2f}"]
        best.append([auto.algorithm, auto.seconds, duration(auto.seconds), *rates])
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


def _loss(loss: Loss, plan: Plan, number: dict[str, int]) -> dict[str, Any]:
    """Return a row of the table of losses."""
    rate, bound, part = loss.plan.rate, plan.bound.algbw, loss.parts[0]
    return {
        "name": part.name,
        "alike": len(loss.parts),
        "links": list(part.links),
        "card": number[part.nodes[0]] if len(part.nodes) == 1 else None,
        "half": loss.is_half,
        "algorithm": loss.plan.algorithm,
        "duration": duration(loss.plan.seconds),
        "times": f"{loss.plan.seconds / plan.seconds:.2f} x" if plan.seconds else "",
        "rate": f"{float(rate):.2f}" if rate else "",
        "ratio": percent(rate / bound) if rate and bound else "",
        "plan": None,
    }


def _losses(
    rows: list[dict[str, Any]], lost: tuple[Loss, ...], plan: Plan, number: dict[str, int], more: int
) -> dict[str, Any] | None:
    """Return the table of losses, and for each link and each network card the part with which it fails.

    ``more`` is the number of kinds of parts that are not planned.
    """
    if not rows or plan.rate is None:
        return None
    of_links: dict[int, list[Any]] = {}  # by link: the row, and the name, the links and the node of the part
    of_cards: dict[str, list[Any]] = {}
    for k, loss in enumerate(lost):
        for part in loss.parts:
            if len(part.nodes) == 1:
                of_cards[part.nodes[0]] = [k, part.name, part.links, number[part.nodes[0]]]
            for link in part.links:
                if len(part.nodes) == 2 or link not in of_links:  # the cable of a link; without a cable, its card
                    card = number[part.nodes[0]] if len(part.nodes) == 1 else None
                    of_links[link] = [k, part.name, part.links, card]
    return {
        "rows": rows,
        "more": more,
        "links": [of_links.get(k) for k in range(len(plan.topology.links))],
        "cards": of_cards,
        "all": [plan.algorithm, duration(plan.seconds), f"{float(plan.rate):.2f}", percent(plan.ratio)],
    }


def _measured_sizes(plan: Plan, measured: tuple[Measurement, ...]) -> dict[int, float]:
    """Return the least measured seconds of each size, of this plan's collective among the same devices."""
    members, seconds = set(plan.request.members), dict[int, float]()
    for one in measured:
        if one.collective == plan.collective and set(one.devices) == members:
            seconds[one.nbytes] = min(one.seconds, seconds.get(one.nbytes, one.seconds))
    return dict(sorted(seconds.items()))


def _measured(plan: Plan, measured: tuple[Measurement, ...], advance: Advance) -> list[list[Any]]:
    """Return a row for each measured size: the measured time beside the planned one."""
    rows: list[list[Any]] = []
    for nbytes, seconds in _measured_sizes(plan, measured).items():
        advance(f"planning {size(nbytes)}")
        planned = plan if nbytes == plan.nbytes else plan_request(plan.request._replace(nbytes=nbytes))
        rate = nbytes / seconds / 1e9
        times = [seconds, duration(seconds), planned.seconds, duration(planned.seconds)]
        ratio = f"{seconds / planned.seconds:.2f}" if planned.seconds else ""
        rows.append([nbytes, size(nbytes), *times, ratio, f"{rate:.2f}", f"{rate * _bus_factor(plan):.2f}"])
    return rows
