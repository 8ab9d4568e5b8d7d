"""Plans of "auto" between hosts, for 1 KB to 1 GB: their times beside a lower bound, and how long planning takes.

The lower bound of an all-gather is that of ``hosts_bound.py``, which is proved. For other collectives it is the latency
of the longest route plus the time of the whole buffer at the rate of the tightest cut. Times are of the event-driven
clock, without queued operations, as in exported plans. The first two machines are those of published plans (TE-CCL,
SIGCOMM 2024, teccl/topologies): two boxes of 16 GPUs on a switch of 125 GB/s with a network card of 12.5 GB/s on every
second GPU, and two DGX-1 with one card on one GPU.

The times of TE-CCL's own all-gathers of two and four NDv2 are compared on two clocks: ours, and that of TE-CCL's model
(``their_seconds``). In TE-CCL's files for two hosts the first GPU only forwards; here all 16 GPUs have a share.
Run: python benchmarks/planning_hosts.py [--json PATH] [--name NAME] [--only COLLECTIVE ...] [--machines WORD]
     python benchmarks/planning_hosts.py --published
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from heapq import heapify, heappop, heappush
from pathlib import Path

from common import RESULTS, keep
from hosts_bound import least_seconds

import crossreduce as cr

FREE = cr.Costs(operation_s=0)
SIZES = [1 << power for power in range(10, 31, 2)]
NEAR = 1.01  # no better bound is searched if a plan exceeds the known one by this factor only
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
MACHINES = [(name, hosts) for name in ("dgx-1v", "dgx-a100", "hgx-h100", "p4d", "dgx-2", "mi250") for hosts in (2, 4)]

# Microseconds of TE-CCL's all-gathers by the bytes of all shares, on two and four hosts: Collective_Finish_Time in
# microsoft/TE-CCL, teccl/examples/experiments/output_provided/NDv2_output, the least of Fast, Fast_Early_Stop and Slow.
TE_CCL = {
    2: {10**3: 4.135, 4_000: 4.185, 16_000: 4.44, 64_000: 6.08, 256_000: 14.72, 10**6: 48.75, 4 * 10**6: 190,
        16 * 10**6: 700, 64 * 10**6: 2800, 256 * 10**6: 11200, 10**9: 43750},
    4: {10**3: 5.4495, 4_000: 5.516, 16_000: 5.81, 64_000: 8.32, 256_000: 20.96, 10**6: 69.375, 4 * 10**6: 280,
        16 * 10**6: 1040, 64 * 10**6: 4160, 256 * 10**6: 16640, 10**9: 65000},
}  # fmt: skip


def boxes_with_cards() -> cr.Topology:
    """Return two boxes of 16 GPUs with a network card on every second GPU."""
    devices = [f"host{host}/cuda:{k}" for host in (0, 1) for k in range(16)]
    both = [(name, f"{name.partition('/')[0]}/nvswitch", 125, 0.35e-6) for name in devices]
    both += [(name, "ib", 12.5, 0.85e-6) for name in devices[::2]]
    links = [link for a, b, *speed in both for link in ((a, b, *speed), (b, a, *speed))]
    return cr.Topology(devices, links, ["host0/nvswitch", "host1/nvswitch", "ib"])


def hosts_of_dgx1(hosts: int, into: int) -> cr.Topology:
    """Return DGX-1 whose first GPUs send over a network card; what they send arrives at the GPU ``into``.

    Two hosts have a link in each direction, more hosts a switch.
    """
    box = cr.Topology.machine("dgx-1v")
    links = [
        (f"host{host}/{link.src}", f"host{host}/{link.dst}", link.bandwidth, link.latency_s)
        for host in range(hosts)
        for link in box.links
        if {link.src, link.dst} <= {*box.devices} and link.bandwidth >= 25
    ]
    ends = [(f"host{host}/cuda:0", f"host{host}/cuda:{into}") for host in range(hosts)]
    if hosts == 2:
        pairs = [(ends[0][0], ends[1][1]), (ends[1][0], ends[0][1])]
    else:
        pairs = [pair for out, back in ends for pair in ((out, "network"), ("network", back))]
    links += [(*pair, 12.5, 1.3e-6) for pair in pairs]
    devices = [f"host{host}/{name}" for host in range(hosts) for name in box.devices]
    return cr.Topology(devices, links, ["network"] * (hosts > 2))


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


def their_seconds(schedule: cr.Schedule, topology: cr.Topology, nbytes: int) -> float:
    """Return the seconds of a schedule in TE-CCL's model.

    A link sends one piece of a share after the other, each as soon as it is there, in the order of the rounds, and is
    free again as soon as the bytes are sent: latencies only delay the arrival, at a switch, too. Switches copy: what a
    round sends to several devices crosses the link to a switch once. On the clock of the library, a link is busy until
    the data has arrived, what a round sends on one link arrives together, and switches do not copy.
    """
    through = {route[:3]: route.through for route in schedule.routes}
    arrived: dict[tuple[int, int, int], float] = {}
    free: dict[tuple[str, str], float] = defaultdict(float)
    for tick in range(len(schedule.rounds) + schedule.pieces - 1):
        moving = []  # by the time: the place of the result, the bytes and the nodes that are left of the way
        for r, steps in enumerate(schedule.rounds):
            for chunk, dst, srcs in steps if 0 <= tick - r < schedule.pieces else ():
                for src in srcs:
                    ends = schedule.devices[src], schedule.devices[dst]
                    via = through.get((chunk, src, dst))
                    nodes = (ends[0], *via, ends[1]) if via else topology.route(*ends) if src != dst else ends[:1]
                    size = float(schedule.chunks[chunk].share) * nbytes / schedule.pieces
                    ready = arrived.get((tick - r, chunk, src), 0.0)
                    moving.append((ready, len(moving), (tick - r, chunk, dst), size, tuple(nodes)))
        heapify(moving)
        made: dict[tuple[int, int, int], float] = defaultdict(float)
        sent: dict[object, float] = {}  # when a piece of a share has crossed a link in this round
        while moving:
            time_s, number, place, size, nodes = heappop(moving)
            if len(nodes) == 1:
                made[place] = max(made[place], time_s)
                continue
            link, copied = topology.link(*nodes[:2]), (place[:2], nodes[:2])
            if copied not in sent or nodes[1] in topology.devices:
                free[nodes[:2]] = max(time_s, free[nodes[:2]]) + size / 1e9 / float(link.bandwidth)
                sent[copied] = free[nodes[:2]] + float(link.latency_s)
            heappush(moving, (sent[copied], number, place, size, nodes[1:]))
        arrived.update(made)
    return max(arrived.values(), default=0.0)


def published() -> list[dict[str, object]]:
    """Return the times of our plans beside those of TE-CCL, on both clocks."""
    lines = []
    for hosts, times in TE_CCL.items():
        topology = hosts_of_dgx1(hosts, 3)
        for nbytes, theirs in times.items():
            plan = cr.plan(topology, "all_gather", nbytes, costs=FREE)
            theirs_s = their_seconds(plan.schedule, topology, nbytes)
            line = {
                "hosts": hosts, "nbytes": nbytes, "published_us": theirs, "us": round(plan.seconds * 1e6, 3),
                "ratio": round(plan.seconds * 1e6 / theirs, 3), "us_in_their_model": round(theirs_s * 1e6, 3),
                "ratio_in_their_model": round(theirs_s * 1e6 / theirs, 3),
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
    parser.add_argument("--published", action="store_true", help="only compare with TE-CCL's plans")
    options = parser.parse_args()
    topologies = {"2 x 16, a card on every second": boxes_with_cards(), "2 x dgx-1, one card": hosts_of_dgx1(2, 0)}
    topologies |= {f"{hosts} x {name}": cr.Topology.machine(name, hosts) for name, hosts in MACHINES}
    stored = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.published:
        stored["te_ccl"] = published()
    lines = stored.setdefault(options.name, [])
    for name, topology in topologies.items() if not options.published else ():
        for collective in options.only if options.machines in name else ():
            lines[:] = [line for line in lines if (line["name"], line["collective"]) != (name, collective)]
            lines += measured(name, topology, collective)
            kept(stored, options.json)
    kept(stored, options.json)


def kept(stored: dict[str, object], path: Path) -> None:
    """Write all stored lines."""
    keep("planning_hosts", {key: stored[key] for key in ("before", "after", "te_ccl") if key in stored}, path)


if __name__ == "__main__":
    main()
