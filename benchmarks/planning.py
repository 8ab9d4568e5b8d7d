"""How close are plans to their bounds, on complete, partial and damaged machines, and how long does planning take?

All results except the times are the same on every machine. Expected values were computed by other code: the optima of
all-gathers by ForestColl (Zhao et al., arXiv:2402.06787), the others by linear programs and manually. Times are medians
of cold runs in one process, with empty caches and SciPy loaded, except those of cached plans. The limits of times are
for wall time; CPU time is also reported, since machines that run benchmarks are often shared.
Run: python benchmarks/planning.py [--quick] [--only TABLES] [--json PATH]
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from itertools import combinations, pairwise
from math import gcd, lcm
from pathlib import Path

import numpy as np
import planning_sizes
import scipy
from common import RESULTS, machine
from planning_files import exported as files
from planning_files import show as show_files
from planning_sizes import proved, published
from planning_sizes import show as show_sizes
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow, shortest_path

import crossreduce as cr
from crossreduce.planning import REGISTRY, Request, hierarchical_copy
from crossreduce.planning.forest import forest
from crossreduce.schedule import fluid_rate
from crossreduce.schedule.traffic import route_links
from crossreduce.topology.machines import machine_names

box = cr.Topology.machine
LARGE = 1 << 30
SIZES = {
    "1 KiB": 1 << 10,
    "64 KiB": 1 << 16,
    "1 MiB": 1 << 20,
    "16 MiB": 1 << 24,
    "256 MiB": 1 << 28,
    "1 GiB": 1 << 30,
}
CUT_BOUNDS = ("all_gather", "reduce_scatter", "broadcast", "reduce")
MOST_SIZED = 16  # devices up to which all sizes are planned
MOST_MIXED = 8  # all directed rings are listed for at most so many devices: 8 have 5,040

# Expected values in GB/s. A result equals an expected decimal if it rounds to it.
# Machine: (topology, all-gather, all-reduce, broadcast from any root, all-reduce if switches reduce; None: unknown).
EXPECTED_BOUNDS = {
    "DGX-1P": (partial(box, "dgx-1p"), "91.43", "45.71", "80", "45.71"),
    "DGX-1V": (partial(box, "dgx-1v"), "171.43", "85.71", "150", "85.71"),
    "8 x PCIe, dual root (12, UPI 10)": (partial(box, "pcie-8", speeds="effective"), "13.71", "6.86", "10", "10.0"),
    "2 NVLink pairs (56) on PCIe 4 (24)": (lambda: nvlink_pairs(56, 24), "96.0", "48.0", "48", "48"),
    "DGX-2": (partial(box, "dgx-2"), "160", "80", "150", "150"),
    "DGX A100": (partial(box, "dgx-a100"), "342.86", "171.43", "300", "300"),
    "HGX H100": (partial(box, "hgx-h100"), "514.29", "257.14", "450", "450"),
    "HGX B200": (partial(box, "hgx-b200"), "1028.57", "514.29", "900", "900"),
    "MI250": (partial(box, "mi250"), "342.86", "171.43", "300", "171.43"),
    "MI300X": (partial(box, "mi300x"), "512", "256", "448", "256"),
    "NDv2 x 2": (partial(box, "ndv2", 2), "25.0", "12.5", "12.5", None),
    "A100 x 2": (partial(box, "dgx-a100", 2), "346.67", "173.33", "200", "200"),
    "H100 x 2": (partial(box, "hgx-h100", 2), "533.33", "266.67", "400", "400"),
}
# Machine: (topology, all-gather, k of ``unit_trees``, all-gather with one tree per root); None: not known.
EXPECTED_OPTIMA = {
    "DGX-1P": (partial(box, "dgx-1p"), "640/7", "4", None),
    "DGX-1V": (partial(box, "dgx-1v"), "1200/7", "6", None),
    "DGX-2": (partial(box, "dgx-2"), "160.00", "1", "160"),
    "DGX A100": (partial(box, "dgx-a100"), "2400/7", "1", "342.86"),
    "A100 x 2": (partial(box, "dgx-a100", 2), "346.67", "13", "342.86"),
    "A100 x 4": (partial(box, "dgx-a100", 4), "800/3", "1", "266.67"),
    "HGX H100": (partial(box, "hgx-h100"), "514.29", "1", None),
    "H100 x 2": (partial(box, "hgx-h100", 2), "533.33", "2", None),
    "H100 x 4": (partial(box, "hgx-h100", 4), "16000/31", "10", None),
    "H100 x 16": (partial(box, "hgx-h100", 16), "1280/3", "1", None),
    "H100 x 32": (partial(box, "hgx-h100", 32), "12800/31", None, None),
    "H100 x 128": (partial(box, "hgx-h100", 128), "51200/127", None, None),
    "MI250": (partial(box, "mi250"), "342.86", "3", None),
    "MI250 x 2": (partial(box, "mi250", 2), "5312/15", "83", "320.0"),
    "MI300X": (partial(box, "mi300x"), "512.00", "1", None),
    "4x4x4 torus": (partial(box, "tpu-v4"), "6400/21", "2", None),
    "GB200 NVL72": (partial(box, "gb200-nvl72"), "64800/71", "1", None),
}
# By machine, GB/s of an all-reduce on TensorFlow's trees: one tree for each root, with all rounds at the same time; the
# same trees, with the four rounds one after another; one tree, for one tensor, with the slowest root; and the bound.
EXPECTED_TENSORFLOW = {"dgx-1v": ("50.0", "100/3", "6.25", "85.71"), "dgx-1p": ("40.0", "80/3", "5.0", "45.71")}
EXPECTED_MESHES = {4: ("32/15", "8/5"), 5: ("25/12", "5/3"), 6: ("72/35", "12/7")}


def nvlink_pairs(bridge: int, pcie: int) -> cr.Topology:
    """Return four devices under one PCIe root; NVLink joins the first two, and the last two."""
    names = [f"cuda:{k}" for k in range(4)]
    both = [(names[0], names[1], bridge), (names[2], names[3], bridge), *((name, "root", pcie) for name in names)]
    return cr.Topology(names, [link for a, b, speed in both for link in ((a, b, speed), (b, a, speed))], ["root"])


# Comparisons.


def staged_rate(schedule: cr.Schedule, topology: cr.Topology) -> Fraction:
    """Return the GB/s of a schedule whose rounds run one after another, each in the time of its busiest link."""
    through = {route[:3]: route.through for route in schedule.routes}
    seconds = Fraction(0)
    for steps in schedule.rounds:
        load: Counter[tuple[str, str]] = Counter()
        for chunk, dst, srcs in steps:
            for src in set(srcs) - {dst}:
                ends = schedule.devices[src], schedule.devices[dst]
                for pair in route_links(topology, *ends, through.get((chunk, src, dst))):
                    load[pair] += schedule.chunks[chunk].share / topology.link(*pair).bandwidth
        seconds += max(load.values(), default=Fraction(0))
    return 1 / seconds


def rings(topology: cr.Topology) -> tuple[Fraction | None, str]:
    """Return the GB/s of an all-reduce on rings over links and switches, and which rings these are.

    For up to ``MOST_MIXED`` devices the rate is that of the best combination of all directed rings whose hops do not
    pass through other devices (``None``: no such ring exists); for more devices it is that of the planner's rings.
    """
    devices, n = topology.devices, len(topology.devices)
    if n > MOST_MIXED:
        return cr.plan(topology, "all_reduce", LARGE, "ring").rate, "planner's"
    routes = {
        (a, b): tuple(pairwise(nodes))
        for a in devices
        for b in devices
        if a != b and (nodes := topology.route(a, b)) and not {*nodes[1:-1]} & {*devices}
    }
    uses = set()
    paths = [(devices[0],)]
    while paths:
        path = paths.pop()
        paths += [(*path, b) for b in devices if b not in path and (path[-1], b) in routes]
        if len(path) == n and (path[-1], path[0]) in routes:
            hops = zip(path, (*path[1:], path[0]), strict=True)
            uses.add(frozenset(Counter(pair for hop in hops for pair in routes[hop]).items()))
    if not uses:
        return None, "best mix"
    number = {(link.src, link.dst): k for k, link in enumerate(topology.links)}
    entries = [(number[pair], column, times) for column, used in enumerate(uses) for pair, times in used]
    rows, columns, values = zip(*entries, strict=True)
    matrix = csr_array((values, (rows, columns)), shape=(len(number), len(uses)))
    found = linprog([-1.0] * len(uses), A_ub=matrix, b_ub=[float(link.bandwidth) for link in topology.links])
    return Fraction(-found.fun).limit_denominator(10_000) * n / (2 * (n - 1)), "best mix"


def least_seconds(topology: cr.Topology) -> float:
    """Return the longest of all shortest routes between devices, in seconds: no all-reduce takes less."""
    number = {node: k for k, node in enumerate(topology.nodes)}
    pairs = [(number[link.src], number[link.dst]) for link in topology.links]
    delays = [float(link.latency_s) for link in topology.links]
    matrix = csr_array((delays, tuple(zip(*pairs, strict=True))), shape=(len(number), len(number)))
    n = len(topology.devices)
    return float(shortest_path(matrix)[:n, :n].max())


# ForestColl's figures of an optimal all-gather: k, and the rate with one tree per root.


def unit_trees(topology: cr.Topology) -> Fraction:
    """Return k, the least number of equal trees per root that reaches the bound of the all-gather."""
    rate = cr.bound(topology, "all_gather").algbw / len(topology.devices)
    values = [rate, *(link.bandwidth for link in topology.links)]
    scale = lcm(*(value.denominator for value in values))
    return rate / Fraction(gcd(*(int(value * scale) for value in values)), scale)


def single_trees(topology: cr.Topology) -> Fraction:
    """Return the GB/s of an all-gather with one tree per root: each link carries a whole number of trees."""
    n, source = len(topology.devices), len(topology.nodes)
    number = {node: k for k, node in enumerate(topology.nodes)}
    arcs = [(number[link.src], number[link.dst]) for link in topology.links] + [(source, k) for k in range(n)]
    widths = [link.bandwidth for link in topology.links]
    places = tuple(zip(*arcs, strict=True))

    def carried(unit: Fraction) -> bool:
        whole = np.array([*(int(width / unit) for width in widths), *[1] * n], np.int32)
        network = csr_array((whole, places), shape=(source + 1, source + 1))
        return all(maximum_flow(network, source, sink).flow_value == n for sink in range(n))

    units = sorted({width / parts for width in set(widths) for parts in range(1, n + 1)})
    low, high = 0, len(units)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if carried(units[middle]) else (low, middle)
    return units[low] * n


# Times.


def clear_caches() -> None:
    """Clear all caches of planning."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("crossreduce.planning", "crossreduce.schedule")):
            for value in vars(module).values():
                getattr(value, "cache_clear", lambda: None)()


def fresh(topology: cr.Topology) -> cr.Topology:
    """Return an equal topology without cached routes."""
    return cr.Topology(topology.devices, topology.links, topology.switches)


def cold(topology: cr.Topology, run: Callable[[cr.Topology], object], runs: int) -> dict[str, float]:
    """Return the median times of ``run`` on a topology with empty caches."""
    wall, cpu = [], []
    for _ in range(runs):
        clear_caches()
        again = fresh(topology)
        start, used = time.perf_counter(), time.process_time()
        run(again)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return {"wall_s": statistics.median(wall), "cpu_s": statistics.median(cpu), "runs": runs}


# The tables.


def compared(name: str, expected: str | None, ours: Fraction | None) -> dict[str, object]:
    """Return a line of the table of expected values."""
    if expected is None or ours is None:
        return {"what": name, "expected": expected, "ours": text(ours), "equal": None}
    digits = len(expected.partition(".")[2])
    equal = ours == Fraction(expected) if "/" in expected or not digits else f"{float(ours):.{digits}f}" == expected
    return {"what": name, "expected": expected, "ours": text(ours), "equal": equal}


def reference(most: int) -> list[dict[str, object]]:
    """Compare our results with the expected values of machines of up to ``most`` devices, and of all meshes."""
    lines = []
    for name, (make, gather, reduce, root, inside) in EXPECTED_BOUNDS.items():
        topology = make()
        if len(topology.devices) > most:
            continue
        bound = partial(cr.bound, topology)
        lines.append(compared(f"{name}: all-gather bound", gather, bound("all_gather").algbw))
        lines.append(compared(f"{name}: reduce-scatter bound", gather, bound("reduce_scatter").algbw))
        lines.append(compared(f"{name}: all-reduce bound", reduce, bound("all_reduce").algbw))
        for collective in ("broadcast", "reduce"):
            rates = {bound(collective, device).algbw for device in topology.devices}
            one = min(rates) if len(rates) == 1 else None
            lines.append(compared(f"{name}: {collective} bound, any root", root, one))
        if inside:
            reducing = topology.with_switches(reducing=True)
            rate = cr.bound(reducing, "all_reduce").algbw
            lines.append(compared(f"{name}: all-reduce bound, switches reduce", inside, rate))
    for name, (make, gather, k, single) in EXPECTED_OPTIMA.items():
        topology = make()
        if len(topology.devices) > most:
            continue
        lines.append(compared(f"{name}: all-gather optimum", gather, cr.bound(topology, "all_gather").algbw))
        if k:
            lines.append(compared(f"{name}: k", k, unit_trees(topology)))
        if single:
            lines.append(compared(f"{name}: one tree per root", single, single_trees(topology)))
    for name, (fluid, stages, tensor, limit) in EXPECTED_TENSORFLOW.items():
        topology = box(name)
        devices, n = topology.devices, len(topology.devices)
        rotated = hierarchical_copy(devices, packs=n)
        slowest = min(staged_rate(hierarchical_copy(devices, first=k), topology) for k in range(n))
        best = cr.bound(topology, "all_reduce").algbw
        lines.append(compared(f"TensorFlow on {name}: all stages at once", fluid, fluid_rate(rotated, topology)))
        lines.append(compared(f"TensorFlow on {name}: stages in turn", stages, staged_rate(rotated, topology)))
        lines.append(compared(f"TensorFlow on {name}: one tensor, slowest root", tensor, slowest))
        lines.append(compared(f"TensorFlow on {name}: all-reduce bound", limit, best))
    for k, (gather, reduce) in EXPECTED_MESHES.items():
        mesh = cr.Topology.mesh(k, k)
        lines.append(compared(f"mesh {k} x {k}: all-gather bound", gather, cr.bound(mesh, "all_gather").algbw))
        lines.append(compared(f"mesh {k} x {k}: all-reduce bound", reduce, cr.bound(mesh, "all_reduce").algbw))
    return lines


def planned(name: str, topology: cr.Topology, collective: str, runs: int) -> dict[str, object]:
    """Plan a forest, and return its bound, rate, ratio, k, trees, depth and planning time."""
    times = cold(topology, lambda again: cr.plan(again, collective, LARGE, "forest"), runs)
    plan = cr.plan(topology, collective, LARGE, "forest")
    chunk, devices = plan.schedule.chunks[0], topology.devices
    sources = [devices[s] for s in chunk.sources] if collective == "broadcast" else devices
    destinations = [devices[d] for d in chunk.destinations] if collective == "reduce" else devices
    packed = forest(Request(collective, tuple(sources), tuple(destinations), topology=topology))
    plan.bound.check()
    return {
        "name": name,
        "devices": len(devices),
        "collective": collective,
        "bound": text(plan.bound.algbw),
        "rate": text(plan.rate),
        "ratio": text(plan.ratio),
        "k": text(packed.k),
        "trees": packed.trees,
        "depth": packed.depth,
        "time": times,
    }


def with_others(name: str, topology: cr.Topology, runs: int) -> dict[str, object]:
    """Return the result of ``planned`` for an all-reduce, and rates of TensorFlow's trees, rings and "one_device"."""
    devices = topology.devices
    rotated = hierarchical_copy(devices, packs=len(devices))
    around, how = rings(topology)
    halves = cr.bound(topology, "all_gather").algbw / 2
    return planned(name, topology, "all_reduce", runs) | {
        "scatter_and_gather_bound": text(halves),
        "tensorflow": text(fluid_rate(rotated, topology)),
        "tensorflow_in_stages": text(staged_rate(rotated, topology)),
        "tensorflow_one_tensor": text(staged_rate(hierarchical_copy(devices), topology)),
        "rings": text(around),
        "rings_are": how,
        "one_device": text(cr.plan(topology, "all_reduce", LARGE, "one_device").rate),
    }


def many(cases: Iterable[tuple[str, cr.Topology]]) -> dict[str, object]:
    """Plan an all-reduce on each topology, once on those that differ only in device names, and combine the results."""
    made: dict[cr.Topology, dict[str, object] | None] = {}
    first: dict[cr.Topology, str] = {}
    counts: Counter[cr.Topology] = Counter()
    for name, topology in cases:
        neutral = topology.renamed([f"cpu:{k}" for k in range(len(topology.devices))])
        counts[neutral] += 1
        if neutral not in made:
            first[neutral] = name
            try:
                made[neutral] = with_others(name, neutral, 1)
            except cr.PlanError:
                made[neutral] = None
    groups: dict[tuple[object, ...], dict[str, object]] = {}
    slowest: dict[str, float] = {"wall_s": 0.0, "cpu_s": 0.0}
    for neutral, line in made.items():
        if line is None:
            continue
        times = line.pop("time")
        slowest = {key: max(value, times[key]) for key, value in slowest.items()}
        key = tuple(value for what, value in line.items() if what != "name")
        groups.setdefault(key, line | {"name": first[neutral], "cases": 0})["cases"] += counts[neutral]
    lines = list(groups.values())
    spread = [line for line in lines for _ in range(line["cases"])]

    def ratios(what: str) -> dict[str, object]:
        found = sorted(Fraction(line[what]) / Fraction(line["bound"]) for line in spread if line[what] is not None)
        middle = statistics.median(found) if found else None
        return {"min": text(min(found, default=None)), "median": text(middle), "max": text(max(found, default=None))}

    return {
        "cases": sum(counts.values()),
        "connected": len(spread),
        "wirings": len(made),
        "at_bound": sum(line["ratio"] == "1" for line in spread),
        "ratio": ratios("rate"),
        "joint_beats_scatter_and_gather": sum(
            Fraction(line["bound"]) > Fraction(line["scatter_and_gather_bound"]) for line in spread
        ),
        "scatter_and_gather": ratios("scatter_and_gather_bound"),
        "tensorflow": ratios("tensorflow"),
        "rings": ratios("rings"),
        "without_ring": sum(line["rings"] is None for line in spread),
        "one_device": ratios("one_device"),
        "slowest_plan": slowest,
        "lines": lines,
    }


def subsets(topology: cr.Topology, sizes: Iterable[int]) -> Iterable[tuple[str, cr.Topology]]:
    """Yield all parts of a machine that have one of these numbers of devices, with their names."""
    for size in sizes:
        for chosen in combinations(topology.devices, size):
            yield " ".join(chosen), topology.subset(chosen)


def failures(topology: cr.Topology) -> Iterable[tuple[str, cr.Topology]]:
    """Yield, for each link of a machine, its name and the machine without it."""
    for pair in dict.fromkeys(tuple(sorted((link.src, link.dst))) for link in topology.links):
        yield " - ".join(pair), topology.without_link(*pair)


def chosen(name: str, topology: cr.Topology) -> list[dict[str, object]]:
    """Return for each size the choice of "auto", its time, and the relative times of all algorithms."""
    latency, limit = least_seconds(topology), float(cr.bound(topology, "all_reduce").algbw)
    lines = []
    for size, nbytes in SIZES.items():
        best = cr.plan(topology, "all_reduce", nbytes)
        others = {}
        for algorithm in REGISTRY:
            try:
                others[algorithm] = cr.plan(topology, "all_reduce", nbytes, algorithm).seconds / best.seconds
            except cr.PlanError:
                others[algorithm] = None
        transfer = nbytes / limit / 1e9
        lines.append(
            {
                "name": name,
                "size": size,
                "algorithm": best.algorithm,
                "seconds": best.seconds,
                "pieces": best.schedule.pieces,
                "relative": others,
                "latency_bound_s": latency,
                "bandwidth_bound_s": transfer,
                "over_bound": best.seconds / max(latency, transfer),
            }
        )
    return lines


def times(runs: int, quick: bool) -> list[dict[str, object]]:
    """Return the measured times of planning, each with its limit."""
    lines = []

    def measure(what: str, limit: float, cases: dict[str, cr.Topology], run: Callable[[cr.Topology], object]) -> None:
        found = {name: cold(topology, run, runs if limit <= 1 else 1) for name, topology in cases.items()}
        slowest = max(found, key=lambda name: found[name]["cpu_s"])
        worst = max(taken["wall_s"] for taken in found.values())
        head = {"what": what, "limit_s": limit, "cases": len(cases), "slowest": slowest}
        lines.append(head | found[slowest] | {"worst_wall_s": worst})

    small = {name: box(name) for name, _ in machine_names() if len(box(name).devices) <= 16}
    small |= {f"{name} x 2": box(name, 2) for name in ("dgx-1v", "ndv2", "dgx-a100", "p4d", "hgx-h100")}
    small = {"dgx-1v": box("dgx-1v")} if quick else small
    sizes = [("up to 16", small, 0.05, 1.0)]
    if not quick:
        several = (("dgx-1v", 4), ("dgx-a100", 4), ("hgx-h100", 4), ("mi250", 2))
        sizes.append(("32", {f"{name} x {n}": box(name, n) for name, n in several}, 1.0, 5.0))
        sizes.append(("64 and 72", {name: box(name) for name in ("tpu-v4", "gb200-nvl72")}, 1.0, 15.0))
        sizes.append(("256", {"hgx-h100 x 32": box("hgx-h100", 32)}, 1.0, None))
        sizes.append(("1,024", {"hgx-h100 x 128": box("hgx-h100", 128)}, 15.0, None))
    for size, cases, cuts, forests in sizes:
        for collective in CUT_BOUNDS:
            measure(f"{collective} bound, {size} devices", cuts, cases, lambda again, c=collective: cr.bound(again, c))
        if cases is small:
            measure("all_reduce bound, up to 16 devices", 1.0, cases, lambda again: cr.bound(again, "all_reduce"))
        for collective in ("all_gather", "all_reduce") if forests else ():
            measure(f"{collective} forest, {size} devices", forests, cases, lambda again, c=collective: grow(again, c))
    eight = {name: topology for name, topology in small.items() if len(topology.devices) == 8}
    links = {f"{name} without {a}": part for name, topology in eight.items() for a, part in failures(topology)}
    devices = {f"{name}, {a}": part for name, topology in eight.items() for a, part in subsets(topology, [7])}
    for what, parts in (("link", links), ("device", devices)):
        whole = {name: part for name, part in list(parts.items())[: 2 if quick else None] if joined(part)}
        for algorithm in ("forest", "auto"):
            run = partial(cr.plan, nbytes=1 << 26, algorithm=algorithm)
            measure(f"re-plan by {algorithm} after a lost {what}, 8 devices", 0.05, whole, run)
    for what, topology in (("", box("dgx-1v")), (", of an equal topology", fresh(box("dgx-1v")))):
        lines.append(
            {"what": f"a cached plan{what}", "limit_s": 1e-4, "cases": 1, "slowest": "dgx-1v"} | cached(topology)
        )
    return lines


def cached(topology: cr.Topology) -> dict[str, float]:
    """Measure the time of requesting the same plan again."""
    cr.plan(topology, nbytes=LARGE)
    start, used, calls = time.perf_counter(), time.process_time(), 1000
    for _ in range(calls):
        cr.plan(topology, nbytes=LARGE)
    wall, cpu = (time.perf_counter() - start) / calls, (time.process_time() - used) / calls
    return {"wall_s": wall, "cpu_s": cpu, "runs": calls, "worst_wall_s": wall}


def grow(topology: cr.Topology, collective: str) -> object:
    """Plan a forest, without verifying and pipelining it."""
    return forest(Request(collective, topology.devices, topology.devices, topology=topology))


def box_of(name: str) -> cr.Topology:
    """Return a machine, or two hosts of it if the name ends in " x 2"."""
    return box(name.removesuffix(" x 2"), 2 if name.endswith(" x 2") else 1)


def joins_hosts(name: str) -> bool:
    """Return whether a machine of the library has a network."""
    try:
        box(name, 2)
    except cr.ArgumentError:
        return False
    return True


def joined(topology: cr.Topology) -> bool:
    """Return whether data can get from each device to every other."""
    # Links go both ways, so routes from the first device suffice.
    return all(topology.route(topology.devices[0], device) for device in topology.devices[1:])


# Printing.


def text(value: Fraction | None) -> str | None:
    """Return an exact number as text."""
    return None if value is None else str(value)


def short(value: object) -> str:
    """Return a number for a table; a dash for ``None``."""
    return "-" if value is None else f"{float(Fraction(value)):.2f}"


def milliseconds(times: dict[str, float]) -> str:
    """Return wall and CPU time as text."""
    return f"{times['wall_s'] * 1e3:.4g} ms ({times['cpu_s'] * 1e3:.4g} CPU)"


def show_plans(title: str, lines: list[dict[str, object]]) -> None:
    """Print lines of plans."""
    print(f"\n{title}: GB/s when large; TF: TensorFlow's trees at once / in stages / one tensor")
    for line in lines:
        rates = f"bound {short(line['bound']):>8}, rate {short(line['rate']):>8}"
        shape = (
            f"ratio {float(Fraction(line['ratio'])):.4f}, k {line['k']}, {line['trees']} trees, depth {line['depth']}"
        )
        print(f"  {line['name']:22} {line['collective']:14} {rates}, {shape}, planned in {milliseconds(line['time'])}")
        if "tensorflow" in line:
            theirs = " / ".join(
                short(line[what]) for what in ("tensorflow", "tensorflow_in_stages", "tensorflow_one_tensor")
            )
            print(
                f"{'':39}RS + AG {short(line['scatter_and_gather_bound'])}, TF {theirs}, rings "
                f"({line['rings_are']}) {short(line['rings'])}, one device {short(line['one_device'])}"
            )


def show_many(title: str, found: dict[str, dict[str, object]]) -> None:
    """Print the combined results of many cases."""
    print(f"\n{title}: ratios to the bound, least / median / greatest")
    for name, result in found.items():
        print(
            f"  {name:15} {result['connected']} of {result['cases']} connected, {result['wirings']} wirings; "
            f"{result['at_bound']} at the bound; joint LP above RS + AG: {result['joint_beats_scatter_and_gather']}; "
            f"no ring: {result['without_ring']}; slowest plan {milliseconds(result['slowest_plan'])}"
        )
        if result["connected"]:
            parts = ("ratio", "scatter_and_gather", "tensorflow", "rings", "one_device")
            spread = [f"{part} {' / '.join(short(value) for value in result[part].values())}" for part in parts]
            print(f"{'':18}{'; '.join(spread)}")


def show_rest(result: dict[str, list[dict[str, object]]]) -> None:
    """Print the tables of "auto" and of times."""
    print(
        "\nAUTO: seconds of an all-reduce, ratio to the bounds of latency and bandwidth, relative times of algorithms"
    )
    for line in result["auto"]:
        others = ", ".join(f"{name} {short(ratio)}" for name, ratio in line["relative"].items())
        print(
            f"  {line['name']:16} {line['size']:>8}: {line['algorithm']:17} {line['seconds'] * 1e6:11.2f} us, "
            f"{line['over_bound']:.2f} x bound; {others}"
        )
    print("\nTIMES: the slowest case, cold; wall and CPU time, since the machine may be shared")
    for line in result["times"]:
        word = "within" if line["worst_wall_s"] < line["limit_s"] else "OVER"
        print(
            f"  {line['what']:48} {milliseconds(line):34} {word:6} {line['limit_s'] * 1e3:g} ms: {line['slowest']}, of "
            f"{line['cases']}; greatest wall time {line['worst_wall_s'] * 1e3:.4g} ms"
        )


def laid_out(value: object, margin: str = "\n") -> str:
    """Return a value as JSON text in which each row of a table is on one line."""

    def levels(part: object) -> int:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else None
        return 0 if inner is None else 1 + max(map(levels, inner), default=0)

    if levels(value) <= (2 if isinstance(value, dict) else 1):
        return json.dumps(value)
    deeper = margin + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {laid_out(part, deeper)}" for key, part in value.items()]
        return "{" + deeper + f",{deeper}".join(parts) + margin + "}"
    return "[" + deeper + f",{deeper}".join(laid_out(part, deeper) for part in value) + margin + "]"


def by_size(quick: bool) -> dict[str, object]:
    """Return and print the tables of plans by size and of published plans."""
    names = [name for name, _ in machine_names() if len(box(name).devices) <= MOST_SIZED]
    names += [f"{name} x 2" for name in names if joins_hosts(name) and len(box(name).devices) <= 8]
    names = ["ncv4"] if quick else names
    sizes = planning_sizes.SIZES[::10] if quick else planning_sizes.SIZES[::2]
    found = {
        "sizes": [line for name in names for line in planning_sizes.compared(name, box_of(name), sizes)],
        "steps": [line for name in names if "x 2" not in name for line in proved(name, box_of(name))],
        "published": published(),
    }
    show_sizes(found["sizes"], found["published"])
    return found


def exported(quick: bool) -> dict[str, object]:
    """Return and print the table of exported files, of one and two hosts."""
    names = [name for name, _ in machine_names()]
    names += [f"{name} x 2" for name in names if joins_hosts(name) and len(box(name).devices) <= 16]
    found = {"files": [line for name in (["ncv4"] if quick else names) for line in files(name, box_of(name))]}
    show_files(found["files"])
    return found


def main() -> None:
    """Make all tables, print them, and store them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one machine of each kind, each time measured once")
    parser.add_argument("--json", type=Path, default=RESULTS / "planning.json")
    parser.add_argument("--only", choices=["sizes", "files"], help="replace only these tables of the stored ones")
    options = parser.parse_args()
    if options.only is not None:
        kept = json.loads(options.json.read_text())
        made = by_size(options.quick) if options.only == "sizes" else exported(options.quick)
        options.json.write_text(laid_out(kept | made) + "\n")
        return
    quick, runs = options.quick, 1 if options.quick else 3

    result: dict[str, object] = {"reference": reference(8 if quick else 1024)}
    print("EXPECTED VALUES: GB/s")
    for line in result["reference"]:
        print(f"  {line['what']:62} {line['expected']:>10} {line['ours']!s:>10} {line['equal']}")

    names = ["dgx-1v", "hgx-h100"] if quick else [name for name, _ in machine_names()]
    lines = [with_others(name, box(name), 1 if len(box(name).devices) > 16 else runs) for name in names]
    lines += [planned(name, box(name), collective, 1) for name in names for collective in CUT_BOUNDS]
    result["machines"] = sorted(lines, key=lambda line: names.index(line["name"]))
    show_plans("MACHINES", result["machines"])

    eights = [name for name in names if len(box(name).devices) == 8]
    boxes = eights[:1] if quick else eights
    result["subsets"] = {name: many(subsets(box(name), range(7 if quick else 2, 9))) for name in boxes}
    show_many("SUBSETS", result["subsets"])
    sixteens = [name for name in names if len(box(name).devices) <= 16]
    result["failures"] = {name: many(failures(box(name))) for name in (boxes if quick else sixteens)}
    if not quick:  # one link of the torus is enough, since all 192 are equivalent
        torus = box("tpu-v4")
        result["failures"]["tpu-v4"] = many([next(iter(failures(torus)))])
        result["failures"]["gb200-nvl72"] = many(failures(box("gb200-nvl72")))
    show_many("FAILED LINKS", result["failures"])

    meshes = {f"mesh {k} x {k}, {speed}": cr.Topology.mesh(k, k, speed) for k in (4, 5, 6) for speed in (1, (50, 25))}
    meshes = dict(list(meshes.items())[:2]) if quick else meshes
    result["meshes"] = [with_others(name, mesh, runs) for name, mesh in meshes.items()]
    result["meshes"] += [planned(name, mesh, "all_gather", runs) for name, mesh in meshes.items()]
    show_plans("MESHES", result["meshes"])

    several = [("ndv2", 2)]
    if not quick:
        several += [("dgx-1v", 2), ("dgx-1v", 4), ("dgx-a100", 2), ("dgx-a100", 4), ("p4d", 2), ("mi250", 2)]
        several += [("mi300x", 2), ("mi100", 2), *(("hgx-h100", n) for n in (2, 4, 8, 16))]
    hosts = {f"{name} x {n}": box(name, n) for name, n in several}
    result["hosts"] = [with_others(name, topology, 1) for name, topology in hosts.items()]
    show_plans("SEVERAL HOSTS", result["hosts"])

    clear_caches()
    result |= by_size(quick) | exported(quick)

    tabled = names if quick else [*sixteens, "gb200-nvl72", "tpu-v4"]
    result["auto"] = [line for name in tabled for line in chosen(name, box(name))]
    result["times"] = times(runs, quick)
    show_rest(result)

    described = machine()
    described["versions"]["scipy"] = scipy.__version__
    kept = {"benchmark": "planning", "date": datetime.date.today().isoformat(), "machine": described, "quick": quick}
    note = "Times are medians of cold runs on a shared machine, wall and CPU time. All other results are exact."
    options.json.write_text(laid_out(kept | {"note": note} | result) + "\n")
    print(f"\nstored in {options.json.name}")


if __name__ == "__main__":
    main()
