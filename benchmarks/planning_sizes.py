"""How far are the plans of "auto" from the best known ones at each size, and from published times?

``benchmarks/planning.py`` prints and stores these tables. No operations are queued here (``operation_s=0``), as in
exported plans and in the published models. All times are of the event-driven clock, and the same on every machine.

Sources: SCCL: Cai et al., Synthesizing Optimal Collective Algorithms, PPoPP 2021, table 4 (chunks, steps and rounds on
a DGX-1). TE-CCL: Liu et al., Rethinking Machine Learning Collective Communication as a Multi-Commodity Flow Problem,
SIGCOMM 2024, table 4 (all-gathers of chunks of 25 KB on a DGX-1, a latency of 0.7 us, links of 25 GB/s).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from common import tests_on_path

import crossreduce as cr
from crossreduce.planning import COLLECTIVES, Request
from crossreduce.planning.forest import forest_schedules
from crossreduce.planning.optimal.few_step import few_step_forests
from crossreduce.planning.optimal.few_step.tree_program import share_among_trees
from crossreduce.planning.requests import NO_MORE
from crossreduce.planning.topologies import neutral_topology
from crossreduce.schedule import fastest_of

tests_on_path()
from published_plans import ALPHA, BRICK, SCCL

FREE = cr.Costs(operation_s=0)
SIZES = [1 << power for power in range(10, 31)]
MORE_STEPS = 5  # beyond the least number
MOST_TREES = 72  # devices up to which trees are packed here

# For 1, 2 and 3 chunks of 25 KB per device: the microseconds of SCCL's plan with the fewest steps, and of TE-CCL's.
TE_CCL = {1: (3.4, 4.0), 2: (5.1, 5.0), 3: (8.0, 6.1)}


def compared(name: str, topology: cr.Topology, sizes: Iterable[int] = SIZES) -> list[dict[str, object]]:
    """Return for each collective and size the time of "auto" beside those of other ways to plan."""
    lines = []
    for collective in COLLECTIVES:
        shallow = shallow_forests(topology, collective)
        for nbytes in sizes:
            best = cr.plan(topology, collective, nbytes, costs=FREE)
            times = {"few-step forest": fastest_of(shallow, topology, nbytes, costs=FREE).seconds if shallow else None}
            with suppress(cr.PlanError):
                times["one-shot"] = cr.plan(topology, collective, nbytes, "one_shot", costs=FREE).seconds
            times["pipelined forest"] = pipelined_forest(best)
            known = {what: seconds for what, seconds in times.items() if seconds is not None}
            least = min(known, key=lambda what: known[what])
            lines.append(
                {
                    "name": name, "collective": collective, "nbytes": nbytes, "algorithm": best.algorithm,
                    "us": round(best.seconds * 1e6, 4), "best_other": least,
                    "ratio": round(best.seconds / known[least], 4),
                }
            )  # fmt: skip
    return lines


def pipelined_forest(best: cr.Plan) -> float | None:
    """Return the seconds of the forest of trees that reaches the bound, in the number of pieces that suits it."""
    request = best.request._replace(algorithm="forest", nbytes=0, costs=FREE)
    if len(request.members) > MOST_TREES:
        return None
    return fastest_of(forest_schedules(request), best.topology, best.nbytes, costs=FREE).seconds


def shallow_forests(topology: cr.Topology, collective: str) -> list[cr.Schedule]:
    """Return all forests of few steps, with more steps than "auto" tries, and without its limits of the search."""
    found = []
    for steps, task, request in _steps(topology, collective):
        for many in (False, True):
            forest = few_step_forests._forest(request, task, steps, many)
            found += [] if forest is None else [forest]
    return found


def proved(name: str, topology: cr.Topology) -> list[dict[str, object]]:
    """Return for each collective and number of steps the rate in one piece, and the proved limit, in GB/s."""
    lines = []
    for collective in COLLECTIVES:
        for steps, task, request in _steps(topology, collective):
            seen = neutral_topology(topology, request.members, ()).topology
            wiring = seen.reversed() if task.backwards else seen
            shares = share_among_trees(wiring, task.roots, steps, many=False, paired=task.paired)
            if shares is not None:
                limit = min(1 / shares.limit, float(cr.bound(topology, collective).algbw))
                lines.append(
                    {"name": name, "collective": collective, "steps": steps, "rate": round(1 / shares.time, 3),
                     "limit": round(limit, 3)}
                )  # fmt: skip
    return lines


def _steps(topology: cr.Topology, collective: str) -> Iterator[tuple[int, few_step_forests._Task, Request]]:
    """Yield numbers of steps and the task of the trees; nothing for more than ``MOST_DEVICES`` devices."""
    request = cr.plan(topology, collective, 1, costs=FREE).request._replace(nbytes=0, algorithm="auto", costs=NO_MORE)
    task = few_step_forests._task(request)
    if task is None or len(request.members) > few_step_forests.MOST_DEVICES:
        return
    least = few_step_forests._least_steps(topology, request.members, task)
    for steps in range(least, least + MORE_STEPS + 1, 1 + task.paired):
        yield steps, task, request


def published() -> list[dict[str, object]]:
    """Return the times of published plans of a DGX-1 and of ours."""
    box = cr.Topology.machine("dgx-1v")
    lines = []
    for chunks, (sccl, te_ccl) in TE_CCL.items():
        ours = cr.plan(box, "all_gather", 8 * 25_000 * chunks, costs=FREE).seconds * 1e6
        for source, theirs in (("SCCL, as measured by TE-CCL", sccl), ("TE-CCL", te_ccl)):
            case = f"all_gather, {chunks} x 25 KB per device"
            lines.append(
                {"source": source, "case": case, "published_us": theirs, "ours_us": round(ours, 2),
                 "ratio": round(ours / theirs, 4)}
            )  # fmt: skip
    for collective, points in SCCL.items():
        ratios = {}
        for nbytes in SIZES:
            part = nbytes / 8 if collective in ("all_gather", "reduce_scatter") else nbytes
            theirs = min(steps * ALPHA + rounds / chunks * part / BRICK for chunks, steps, rounds in points)
            root = 0 if collective in ("broadcast", "reduce") else None
            ratios[nbytes] = cr.plan(box, collective, nbytes, root=root, costs=FREE).seconds / theirs
        worst = max(ratios, key=lambda nbytes: ratios[nbytes])
        case = f"{collective}, {SIZES[0]} to {SIZES[-1]} bytes, the slowest: {worst}"
        lines.append(
            {"source": "SCCL, the best of its points", "case": case, "ratio": round(ratios[worst], 4),
             "least_ratio": round(min(ratios.values()), 4)}
        )  # fmt: skip
    return lines


def show(lines: list[dict[str, object]], against: list[dict[str, object]]) -> None:
    """Print the worst ratio of each machine and collective, and the published times."""
    print('\nSIZES: the time of "auto" / the best of one-shot, few-step and pipelined forests; the worst size')
    for name in dict.fromkeys(line["name"] for line in lines):
        for collective in COLLECTIVES:
            mine = [line for line in lines if (line["name"], line["collective"]) == (name, collective)]
            worst = max(mine, key=lambda line: line["ratio"])
            where = f"{worst['nbytes']} bytes, {worst['best_other']}"
            print(f"  {name:20} {collective:15} {worst['ratio']:.3f} at {where}")
    print("\nPUBLISHED PLANS OF A DGX-1: our time / theirs")
    for line in against:
        print(f"  {line['source']:30} {line['case']:60} {line['ratio']:.3f}")
