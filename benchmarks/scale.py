"""How long does the plan of an all-reduce on a large machine take, and how good is it?

Each row is a new process on one core: build the topology, plan 64 MiB with "auto", compute the bound, check both. The
seconds are CPU time, without the imports. Beside them, what others publish: ForestColl (Zhao et al., 2024) 5.6 s for 16
GPUs and 147 s for 72 with its published Python, about 36 minutes for 1,024 in its paper.
Run: python benchmarks/scale.py [--most DEVICES]
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

from common import RESULTS, keep, tests_on_path

import crossreduce as cr
from crossreduce import Topology

tests_on_path()
from large_machines import dragonfly, fat_tree, half_empty

MACHINES = {
    "hgx-h100 x 8": (64, lambda: Topology.machine("hgx-h100", 8)),
    "hgx-h100 x 16": (128, lambda: Topology.machine("hgx-h100", 16)),
    "hgx-h100 x 32": (256, lambda: Topology.machine("hgx-h100", 32)),
    "hgx-h100 x 33": (264, lambda: Topology.machine("hgx-h100", 33)),
    "hgx-h100 x 33, one half empty": (260, lambda: half_empty(33)),
    "hgx-h100 x 33, switches reduce": (264, lambda: Topology.machine("hgx-h100", 33, in_network=True)),
    "hgx-h100 x 128": (1024, lambda: Topology.machine("hgx-h100", 128)),
    "hgx-h100 x 128, a lost link": (
        1024,
        lambda: Topology.machine("hgx-h100", 128).without_link("host0/cuda:3", "rail3"),
    ),
    "gb200-nvl72 x 16": (1152, lambda: Topology.machine("gb200-nvl72", 16)),
    "fat tree of 16-port switches": (1024, lambda: fat_tree(16)),
    "dragonfly, 33 groups of 8 routers": (1056, lambda: dragonfly(33, 8, 4)),
    "torus 8 x 8 x 8": (512, lambda: Topology.torus(8, 8, 8)),
    "torus 16 x 16 x 16": (4096, lambda: Topology.torus(16, 16, 16)),
    "dragonfly, 65 groups of 8 routers": (4160, lambda: dragonfly(65, 8, 8)),
    "fat tree of 32-port switches": (8192, lambda: fat_tree(32)),
    "hgx-h100 x 1024": (8192, lambda: Topology.machine("hgx-h100", 1024)),
}


def measured(name: str) -> dict[str, object]:
    """Return the CPU seconds of each part, the rate, its part of the bound, and the memory of this process."""
    import numpy  # noqa: F401 - not a part of the plan's time
    import scipy.optimize  # noqa: F401

    times = [time.process_time()]
    topology = MACHINES[name][1]()
    times.append(time.process_time())
    plan = cr.plan(topology)
    times.append(time.process_time())
    limit = plan.bound
    times.append(time.process_time())
    limit.check()
    cr.verify(plan.schedule)
    times.append(time.process_time())
    names = ("topology", "plan", "bound", "checks")
    parts = {name: b - a for name, (a, b) in zip(names, pairwise(times), strict=True)}
    return {
        "devices": len(topology.devices),
        "algorithm": plan.algorithm,
        "seconds": parts,
        "gb_per_s": float(plan.rate),
        "ratio": str(plan.ratio),
        "steps": plan.schedule.steps,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=RESULTS / "scale.json")
    parser.add_argument("--most", type=int, default=8192, help="the greatest number of devices")
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.child)))
        return
    print(f"{'machine':34} {'devices':>7} {'CPU s':>7} {'of the bound':>12} {'MiB':>6}  algorithm")
    kept = {}
    for name, (devices, _) in MACHINES.items():
        if devices > options.most:
            continue
        command = [sys.executable, __file__, "--child", name]
        row = kept[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        whole, ratio = sum(row["seconds"].values()), float(Fraction(row["ratio"]))
        print(f"{name:34} {devices:7} {whole:7.2f} {ratio:12.2%} {row['peak_mib']:6}  {row['algorithm']}", flush=True)
    clock = "CPU time of the process, without imports"
    keep("scale", {"clock": clock, "nbytes": 1 << 26, "machines": kept}, options.json)


if __name__ == "__main__":
    main()
