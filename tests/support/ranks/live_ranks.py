"""One torch rank on four simulated hosts: ``python live_ranks.py FOLDER STORE``, for test_live_hosts.py.

It makes a group, reduces, measures the links, and reduces on them. It writes its results to ``FOLDER/rank<r>.json``.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import crossreduce as cr
import crossreduce.torch

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MIB = 1 << 20


def summed(nbytes):
    """Return whether the sum of an array of all ranks is right."""
    base = torch.arange(nbytes // 4, dtype=torch.float32) % 1021
    x = base * 2**RANK
    dist.all_reduce(x)
    return bool(torch.equal(x, base * (2**SIZE - 1)))


def meet(folder, name):
    """Tell the test that this rank is there, and wait until it says that all are."""
    Path(folder, f"{name}{RANK}").touch()
    while not Path(folder, name).exists():
        time.sleep(0.02)


def main(folder, store):
    dist.init_process_group("crossreduce", store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60))
    communicator = dist.group.WORLD.communicator
    found = {"before": summed(MIB), "lost": communicator.links.lost}
    topology = crossreduce.torch.measure_topology()
    planned = cr.plan(communicator.host_topology, nbytes=64 * MIB)
    found |= {"topology": topology.to_json(), "hosts": communicator.host_topology.to_json()}
    found |= {"digest": communicator.plan_digest, "ratio": float(planned.ratio)}
    found["after"] = summed(100)
    meet(folder, "measured")
    found["after"] &= summed(4 * MIB)
    meet(folder, "reduced")
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
