"""How long does the export of one rank of a large machine take, and how long that of all ranks?

Each row is a new process on one core: the plan of 1 GiB by "forest" on hosts with eight H100 is exported. The seconds
are CPU time of the export alone; the memory is the peak of the process beyond that of the plan. MSCCL and MSCCL++ have
no part of one rank, and refuse plans that are too large; then the row has the reason.
Run: python benchmarks/large_exports.py [--most DEVICES]
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from common import RESULTS, keep

import crossreduce as cr
from crossreduce import PlanError
from crossreduce.export import EXPORTERS
from crossreduce.export.formats.nccl_graph import rings
from crossreduce.planning import ring

RANK = 5
HOSTS = (8, 16, 32, 128)
MOST_LISTED = 256  # devices: beyond it, all ranks take minutes and gigabytes
ROWS = ("chakra, one rank", "trace, one rank", "chakra", "trace", "msccl", "mscclpp", "rings")


def measured(row: str, hosts: int) -> dict[str, object]:
    """Return the CPU seconds of one export, the bytes that it has, and the memory in MiB that it takes."""
    topology = cr.Topology.machine("hgx-h100", hosts)
    if row == "rings":
        export = partial(rings, ring(topology.devices))
    else:
        name, _, part = row.partition(", ")
        plan = cr.plan(topology, nbytes="1G", algorithm="forest")
        export = partial(EXPORTERS[name].write, plan, **({"rank": RANK} if part else {}))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        made = export()
        size = len(made) if isinstance(made, str) else sum(map(len, made.values())) if row != "rings" else None
        refused = None
    except PlanError as error:
        size, refused = None, str(error).partition("\n")[0]
    seconds = time.process_time() - start
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    return {"devices": 8 * hosts, "seconds": seconds, "bytes": size, "more_mib": more, "refused": refused}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=RESULTS / "large_exports.json")
    parser.add_argument("--most", type=int, default=1024, help="the greatest number of devices")
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.child[0], int(options.child[1]))))
        return
    print(f"{'export':18} {'devices':>7} {'CPU s':>7} {'bytes':>11} {'MiB':>6}")
    kept: dict[str, list[dict[str, object]]] = {}
    for row in ROWS:
        for hosts in HOSTS:
            if 8 * hosts > options.most or (row in ("chakra", "trace") and 8 * hosts > MOST_LISTED):
                continue
            command = [sys.executable, __file__, "--child", row, str(hosts)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            kept.setdefault(row, []).append(found)
            size = "-" if found["bytes"] is None else found["bytes"]
            print(f"{row:18} {found['devices']:7} {found['seconds']:7.2f} {size:>11} {found['more_mib']:6}", flush=True)
            if found["refused"]:
                print(f"{'':18} {found['refused']}", flush=True)
    keep("large_exports", {"clock": "CPU time of the export", "nbytes": 1 << 30, "exports": kept}, options.json)


if __name__ == "__main__":
    main()
