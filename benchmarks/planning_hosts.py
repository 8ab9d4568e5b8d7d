"""Plans of "auto" between hosts, for 1 KB to 1 GB: their times beside a lower bound, and how long planning takes.

The lower bound of an all-gather is that of ``hosts_bound.py``, which is proved. For other collectives it is the latency
of the longest route plus the time of the whole buffer at the rate of the tightest cut. Times are of the event-driven
clock, without queued operations, as in exported plans. The first two machines are those of published plans (TE-CCL,
SIGCOMM 2024, teccl/topologies): two boxes of 16 GPUs on a switch of 125 GB/s with a network card of 12.5 GB/s on every
second GPU, and two DGX-1 with one card on one GPU.
Run: python benchmarks/planning_hosts.py [--json PATH] [--name NAME] [--only COLLECTIVE ...] [--machines WORD]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from common import RESULTS, keep
from hosts_bound import least_seconds

import crossreduce as cr

FREE = cr.Costs(operation_s=0)
SIZES = [1 << power for power in range(10, 31, 2)]
NEAR = 1.01  # no better bound is searched if a plan exceeds the known one by this factor only
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
MACHINES = [(name, hosts) for name in ("dgx-1v", "dgx-a100", "hgx-h100", "p4d", "dgx-2", "mi250") for hosts in (2, 4)]


def boxes_with_cards() -> cr.Topology:
    """Return two boxes of 16 GPUs with a network card on every second GPU."""
    devices = [f"host{host}/cuda:{k}" for host in (0, 1) for k in range(16)]
    both = [(name, f"{name.partition('/')[0]}/nvswitch", 125, 0.35e-6) for name in devices]
    both += [(name, "ib", 12.5, 0.85e-6) for name in devices[::2]]
    links = [link for a, b, *speed in both for link in ((a, b, *speed), (b, a, *speed))]
    return cr.Topology(devices, links, ["host0/nvswitch", "host1/nvswitch", "ib"])


def pair_of_dgx1() -> cr.Topology:
    """Return two DGX-1 with one network card each, on their first GPU."""
    box = cr.Topology.machine("dgx-1v")
    links = [
        (f"host{host}/{link.src}", f"host{host}/{link.dst}", link.bandwidth, link.latency_s)
        for host in (0, 1)
        for link in box.links
        if {link.src, link.dst} <= {*box.devices} and link.bandwidth >= 25
    ]
    links += [(f"host{a}/cuda:0", f"host{1 - a}/cuda:0", 12.5, 1.3e-6) for a in (0, 1)]
    return cr.Topology([f"host{host}/{name}" for host in (0, 1) for name in box.devices], links)


def latency_s(topology: cr.Topology) -> float:
    """Return the latency of the longest of the quickest routes."""
    worst = 0.0
    for start in topology.devices:
        reached, waiting = {}, {start: 0.0}
        while waiting:
            node = min(waiting, key=waiting.__getitem__)
            reached[node] = waiting.pop(node)
            for link in topology.out_links(node):
                if link.dst not in reached:
                    at = reached[node] + float(link.latency_s)
                    waiting[link.dst] = min(at, waiting.get(link.dst, at))
        worst = max(worst, *(reached[device] for device in topology.devices))
    return worst


def measured(name: str, topology: cr.Topology, collective: str) -> list[dict[str, object]]:
    """Return a line for each size."""
    least, lines = latency_s(topology), []
    for nbytes in SIZES:
        start, used = time.perf_counter(), time.process_time()
        plan = cr.plan(topology, collective, nbytes, costs=FREE)
        wall, cpu = time.perf_counter() - start, time.process_time() - used
        bound = least + nbytes / 1e9 / float(plan.bound.algbw)
        if collective == "all_gather":
            bound = least_seconds(topology, nbytes, plan.seconds / NEAR)
        line = {
            "name": name, "collective": collective, "nbytes": nbytes, "algorithm": plan.algorithm,
            "us": round(plan.seconds * 1e6, 3), "bound_us": round(bound * 1e6, 3),
            "ratio": round(plan.seconds / bound, 3), "planning_s": round(wall, 2),
            "planning_cpu_s": round(cpu, 2),
        }  # fmt: skip
        print(*line.values(), flush=True)
        lines.append(line)
    return lines


def main() -> None:
    """Measure all machines, and store the lines under a name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "planning_hosts.json")
    parser.add_argument("--name", default="after", help="the key of the results in the file")
    parser.add_argument("--only", nargs="*", default=COLLECTIVES)
    parser.add_argument("--machines", default="", help="only machines whose name has this word")
    options = parser.parse_args()
    topologies = {"2 x 16, a card on every second": boxes_with_cards(), "2 x dgx-1, one card": pair_of_dgx1()}
    topologies |= {f"{hosts} x {name}": cr.Topology.machine(name, hosts) for name, hosts in MACHINES}
    stored = json.loads(options.json.read_text()) if options.json.exists() else {}
    lines = stored.setdefault(options.name, [])
    for name, topology in topologies.items():
        for collective in options.only if options.machines in name else ():
            lines[:] = [line for line in lines if (line["name"], line["collective"]) != (name, collective)]
            lines += measured(name, topology, collective)
            keep("planning_hosts", {key: stored[key] for key in ("before", "after") if key in stored}, options.json)


if __name__ == "__main__":
    main()
