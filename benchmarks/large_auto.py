"""Is "auto" as fast as the best algorithm by name on machines of about 1,024 devices?

For some sizes from 8 bytes to 4 GiB, an all-reduce is planned with "auto", and with each algorithm by name, also those
that "auto" does not consider for so many devices. The seconds are simulated, so they are the same on every computer;
"planning_s" is the wall time of the planning, which is shorter for the sizes after the first one. Some algorithms list
all of their millions of steps, which takes minutes. So without --all, "ring" is left out: it has 2(n - 1) rounds, and
sends as many bytes as a forest. So is "one_shot" from 64 KiB on: each device receives the buffers of all others.
Run: python benchmarks/large_auto.py [--machines NAME;...] [--all]
"""

import argparse
import json
import time
from pathlib import Path

from common import RESULTS, keep, tests_on_path

import crossreduce as cr
from crossreduce import Topology
from crossreduce.planning import REGISTRY

tests_on_path()
from large_machines import dragonfly, fat_tree

MACHINES = {
    "hgx-h100 x 128": lambda: Topology.machine("hgx-h100", 128),
    "fat tree of 16-port switches": lambda: fat_tree(16),
    "dragonfly, 33 groups of 8 routers": lambda: dragonfly(33, 8, 4),
}
SIZES = (8, 1 << 12, 1 << 20, 1 << 26, 1 << 32)
WORST = 0.9  # "auto" must have at least this part of the speed of the best algorithm


def algorithms(nbytes: int, every: bool) -> list[str]:
    """Return the names of the algorithms that are planned for a size."""
    left_out = {"ring", "one_shot"} if nbytes >= 1 << 16 else {"ring"}
    return [name for name in REGISTRY if every or name not in left_out]


def measured(name: str, every: bool) -> dict[str, dict[str, object]]:
    """Return for each size the simulated seconds of "auto" and of each algorithm, and which one "auto" took."""
    topology = MACHINES[name]()
    found = {}
    for nbytes in SIZES:
        seconds, planning = {}, {}
        names = algorithms(nbytes, every)
        for algorithm in ("auto", *names):
            start = time.perf_counter()
            plan = cr.plan(topology, nbytes=nbytes, algorithm=algorithm)
            seconds[algorithm], planning[algorithm] = plan.seconds, round(time.perf_counter() - start, 2)
            if algorithm == "auto":
                chosen = plan.algorithm
        best = min(names, key=seconds.__getitem__)
        part = seconds[best] / seconds["auto"]
        found[str(nbytes)] = {
            "auto": chosen, "best": best, "speed_of_best": part, "seconds": seconds, "planning_s": planning
        }  # fmt: skip
        print(f"{name:34} {nbytes:>10} bytes  auto: {chosen:17} best: {best:17} {part:7.2%} of its speed", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=RESULTS / "large_auto.json")
    parser.add_argument("--machines", default=";".join(MACHINES), help="names, with ; between them")
    parser.add_argument("--all", action="store_true", help="also the algorithms that take minutes")
    options = parser.parse_args()
    kept = json.loads(options.json.read_text())["machines"] if options.json.exists() else {}
    for name in options.machines.split(";"):
        kept[name] = measured(name, options.all)
        keep("large_auto", {"sizes": SIZES, "machines": kept}, options.json)
    slow = [(name, size) for name, rows in kept.items() for size, row in rows.items() if row["speed_of_best"] < WORST]
    print(f'"auto" has less than {WORST:.0%} of the speed of the best algorithm in {len(slow)} cases: {slow}')


if __name__ == "__main__":
    main()
