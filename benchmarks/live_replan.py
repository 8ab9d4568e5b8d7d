"""The speed of plans on measured links, and the time to plan again after a failure.

``python benchmarks/live_replan.py [PART ...]`` measures three parts, or some of them, prints them, and keeps them in
results/live_replan.json:

  hosts: eight torch ranks on four network namespaces (requires root), with links of 200 Mbit/s for
    each pair, one of 20 Mbit/s, and one pair without a link. All-reduces before ``measure_topology``, after it, and
    before and after another one when a link has become slower. ``ratio``: the achieved algbw over the bound of the
    topology that was measured last; of the rows "slower link, old plan", over that of the next measurement.
  planning: the CPU seconds of ``Plan.replanned`` after a change of a machine, and of ``plan`` on the changed machine in
    a new process, with the predicted times of both plans: all-reduces of 256 MiB by "auto", and by "one_device" where a
    link is lost that the plan does not use. Neither searches a bound that it does not need.
  lost: the CPU seconds in which ranks plan an all-reduce between hosts when they find that the link between two of them
    is lost, each case in a new process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from common import tests_on_path

import crossreduce as cr

SIZES = (1 << 20, 1 << 22, 1 << 24, 1 << 26)
RATE, SLOW, SLOWER, REPEATS = "200mbit", "20mbit", "60mbit", 3
LIMIT_S = 400
MACHINES = (("dgx-1v", 1), ("mi300x", 1), ("mi300x", 4), ("hgx-h100", 4))
CHANGES = ("lost link", "lost device", "slower link", "unused link lost")
NBYTES = 256 << 20
HOSTS, HOST_BYTES = (3, 4, 6, 8), (1 << 10, 1 << 20, 1 << 26)

Row = dict[str, Any]


def meet(folder: Path, name: str, rank: int) -> None:
    """Tell the parent that a rank is at a point, and wait until it lets all continue."""
    (folder / f"{name}-{rank}").touch()
    while not (folder / name).exists():
        time.sleep(0.02)


def one_rank(folder: Path, store: str) -> None:
    """Be one rank of the part "hosts"."""
    import torch
    import torch.distributed as dist

    import crossreduce.torch

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("crossreduce", store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    communicator = dist.group.WORLD.communicator
    rows: list[Row] = []

    def measured(label: str) -> None:
        for nbytes in SIZES:
            base = torch.arange(nbytes // 4, dtype=torch.float32) % 1021
            x = base * 2**rank
            dist.all_reduce(x)
            assert torch.equal(x, base * (2**size - 1)), f"rank {rank}: wrong bits"
            seconds = []
            for _ in range(REPEATS):
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(x)
                seconds.append(time.perf_counter() - began)
            rows.append({"when": label, "bytes": nbytes, "seconds": statistics.median(seconds)})

    def measure() -> tuple[float, float]:
        """Measure the links; return the bound of the topology in GB/s, and the seconds that this took."""
        began = time.perf_counter()
        crossreduce.torch.measure_topology()
        taken = time.perf_counter() - began
        digests: list[Any] = [None] * size
        dist.all_gather_object(digests, communicator.plan_digest)
        assert len(set(digests)) == 1, "the ranks have different plans"
        return float(cr.bound(communicator.host_topology, "all_reduce").algbw or 0), taken

    measured("links taken for equal")
    bound, first_s = measure()
    measured("measured links")
    bounds = {"links taken for equal": bound, "measured links": bound}
    meet(folder, "slow", rank)
    measured("slower link, old plan")
    again, again_s = measure()
    measured("slower link, new plan")
    bounds |= {"slower link, old plan": again, "slower link, new plan": again}
    for row in rows:
        row["bound_gb_per_s"] = bounds[row["when"]]
        row["gb_per_s"] = row["bytes"] / row["seconds"] / 1e9
        row["ratio"] = row["gb_per_s"] / row["bound_gb_per_s"]
    if rank == 0:
        found = {"lost": communicator.links.lost, "measure_s": [first_s, again_s], "rows": rows}
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def of_hosts() -> Row:
    """Run the part "hosts"."""
    tests_on_path()
    import namespaces

    why_not = namespaces.available()
    if why_not:
        raise RuntimeError(why_not)
    with tempfile.TemporaryDirectory() as name, namespaces.hosts(4, rate=RATE, slower={(0, 2): SLOW}) as bed:
        folder = Path(name)
        bed.lose(1, 3)
        command = [sys.executable, __file__, "rank", name, f"tcp://{bed.addresses[0]}:29500"]
        around = {"WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"}
        running = [bed.run(rank // 2, command, around | {"RANK": str(rank)}) for rank in range(8)]
        deadline = time.monotonic() + LIMIT_S
        while not all((folder / f"slow-{rank}").exists() for rank in range(8)):
            assert time.monotonic() < deadline, "the ranks are late"
            assert all(process.poll() is None for process in running), "a rank failed"
            time.sleep(0.1)
        bed.change_rate(0, 3, SLOWER)
        (folder / "slow").touch()
        for process in running:
            assert process.wait(max(1, deadline - time.monotonic())) == 0, "a rank failed"
        found: Row = json.loads((folder / "found.json").read_text())
    links = {"each pair": RATE, "hosts 0 and 2": SLOW, "hosts 1 and 3": "none", "hosts 0 and 3, later": SLOWER}
    return {"links": links, **found}


def changed(topology: cr.Topology, change: str, plan: cr.Plan) -> cr.Topology | None:
    """Return a topology after a change; ``None``: no link is unused."""
    link = topology.links[0]
    if change == "lost device":
        return topology.without_node(topology.devices[-1])
    if change == "lost link":
        return topology.without_link(link.src, link.dst)
    if change == "slower link":
        links = [
            each._replace(bandwidth=each.bandwidth / 2) if {each.src, each.dst} == {link.src, link.dst} else each
            for each in topology.links
        ]
        return cr.Topology(topology.devices, links, topology.switches)
    used = {frozenset(pair) for pair, nbytes in plan.simulation.bytes.items() if nbytes}
    free = [each for each in topology.links if {each.src, each.dst} not in used]
    return topology.without_link(free[0].src, free[0].dst) if free else None


def one_case(machine: str, hosts: int, change: str, how: str) -> Row | None:
    """Plan once in this process, on the changed machine or again after the change."""
    topology = cr.Topology.machine(machine, hosts)
    algorithm = "one_device" if change == "unused link lost" else "auto"
    assert cr.plan(cr.Topology.ring(3), nbytes=1 << 20).bound.algbw  # load all modules
    if how == "again":
        plan = cr.plan(topology, nbytes=NBYTES, algorithm=algorithm)
        now = changed(topology, change, plan)
    else:
        now = cr.Topology.from_json(sys.stdin.read())
    if now is None:
        return None
    began = time.process_time()
    found = plan.replanned(now) if how == "again" else cr.plan(now, nbytes=NBYTES, algorithm=algorithm)
    taken = time.process_time() - began
    row = {"cpu_s": taken, "algorithm": found.algorithm, "predicted_s": found.seconds, "change": found.change}
    return row | {"topology": now.to_json()}


def of_planning() -> list[Row]:
    """Run the part "planning"."""
    rows = []
    for machine, hosts in MACHINES:
        for change in CHANGES:
            again = in_process("again", machine, hosts, change)
            if again is None:
                continue
            cold = in_process("cold", machine, hosts, change, again["topology"])
            assert cold is not None
            case = {"machine": machine, "hosts": hosts, "change": change}
            both = {"again_cpu_s": again["cpu_s"], "cold_cpu_s": cold["cpu_s"]}
            both |= {"again_predicted_s": again["predicted_s"], "cold_predicted_s": cold["predicted_s"]}
            rows.append(case | {key: float(f"{x:.4g}") for key, x in both.items()} | {"what": again["change"]})
    return rows


def in_process(how: str, machine: str, hosts: int, change: str, topology: str = "") -> Row | None:
    """Return what ``one_case`` does in a new process."""
    argv = [sys.executable, __file__, "plan", machine, str(hosts), change, how]
    found = subprocess.run(argv, input=topology, capture_output=True, text=True, check=True)
    row: Row | None = json.loads(found.stdout)
    return row


def one_lost_link(hosts: int, nbytes: int) -> float:
    """Return the CPU seconds of one case of the part "lost"."""
    from crossreduce.ranks.inter_host.two_level import host_schedule

    def planned(count: int, lost: tuple[int, int]) -> None:
        host_schedule(None, tuple((k,) for k in range(count)), "all_reduce", nbytes, None, False, (lost,))

    planned(3, (1, 2))  # load all modules
    began = time.process_time()
    planned(hosts, (0, 1))
    return time.process_time() - began


def of_lost_links() -> list[Row]:
    """Run the part "lost"."""
    rows = []
    for hosts in HOSTS:
        for nbytes in HOST_BYTES:
            argv = [sys.executable, __file__, "link", str(hosts), str(nbytes)]
            runs = [float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout) for _ in range(5)]
            rows.append({"hosts": hosts, "bytes": nbytes, "cpu_s": float(f"{statistics.median(runs):.3g}")})
    return rows


PARTS = {"hosts": of_hosts, "planning": of_planning, "lost": of_lost_links}


def main(parts: list[str]) -> None:
    from common import RESULTS, keep, size_text

    path = RESULTS / "live_replan.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept = {part: kept[part] for part in PARTS if part in kept} | {part: PARTS[part]() for part in parts}
    hosts, planning = kept["hosts"], kept["planning"]
    for row in hosts["rows"]:
        row |= {key: float(f"{row[key]:.4g}") for key in ("seconds", "gb_per_s", "bound_gb_per_s", "ratio")}
        numbers = f"{row['seconds']:8.3f} s, {row['gb_per_s'] * 1e3:6.2f} MB/s, {row['ratio']:.1%} of the bound"
        print(f"{row['when']:24} {size_text(row['bytes']):>7}: {numbers}")
    print("measure_topology took", *(f"{seconds:.1f} s" for seconds in hosts["measure_s"]))
    for row in planning:
        case = f"{row['machine']} x {row['hosts']}, {row['change']}:"
        times = f"{row['again_cpu_s']:.3f} s, cold {row['cold_cpu_s']:.3f} s"
        slower = row["again_predicted_s"] / row["cold_predicted_s"]
        print(f"{case:36} {times}; predicted time over that of the cold plan {slower:.3f}; {row['what']}")
    for row in kept["lost"]:
        print(f"{row['hosts']} hosts, {size_text(row['bytes']):>7}, a lost link: {1e3 * row['cpu_s']:.0f} ms")
    keep("live_replan", kept, path)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        one_rank(Path(sys.argv[2]), sys.argv[3])
    elif sys.argv[1:2] == ["plan"]:
        print(json.dumps(one_case(sys.argv[2], int(sys.argv[3]), *sys.argv[4:6])))
    elif sys.argv[1:2] == ["link"]:
        print(one_lost_link(int(sys.argv[2]), int(sys.argv[3])))
    else:
        main(sys.argv[1:] or list(PARTS))
