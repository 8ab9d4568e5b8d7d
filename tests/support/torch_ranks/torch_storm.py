"""One rank of a storm: ``python torch_storm.py FOLDER CASE`` makes random collectives until another rank is lost.

``CASE``, as JSON, is that of test_torch_storm.py. The rank writes the error that it raised to ``FOLDER/rank<r>.json``.
"""

import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import crossreduce.torch
from crossreduce import CollectiveTimeout, PeerLostError

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SIZES = (1, 300, 20_000, 600_000)


def begin(folder, case):
    where = (
        f"file://{folder}/store" if case["port"] is None else f"tcp://{case.get('host', '127.0.0.1')}:{case['port']}"
    )
    timeout = timedelta(seconds=case["timeout_s"])
    dist.init_process_group("crossreduce", where, rank=RANK, world_size=SIZE, timeout=timeout)


def random_call(draw):
    """Make one random collective, the same on all ranks."""
    size, root, asynchronous = draw.choice(SIZES), draw.randrange(SIZE), draw.random() < 0.3
    x, parts = torch.ones(size), [torch.ones(size) for _ in range(SIZE)]
    whole, band = torch.ones(SIZE * size), torch.ones(size, dtype=torch.int32)
    mine = root == RANK
    calls = [
        lambda **how: dist.all_reduce(x, **how),
        lambda **how: dist.reduce(x, root, **how),
        lambda **how: dist.broadcast(x, root, **how),
        lambda **how: dist.barrier(**how),
        lambda **how: dist.all_reduce(band, dist.ReduceOp.BAND, **how),
        lambda **how: dist.all_gather(parts, x, **how),
        lambda **how: dist.all_gather_into_tensor(whole, x, **how),
        lambda **how: dist.reduce_scatter_tensor(x, whole, **how),
        lambda **how: dist.gather(x, parts if mine else None, root, **how),
        lambda **how: dist.scatter(x, parts if mine else None, root, **how),
        lambda **how: dist.all_to_all_single(torch.empty_like(whole), whole, **how),
        lambda **how: dist.all_to_all([torch.empty_like(part) for part in parts], parts, **how),
        lambda **how: dist.all_gather_object([None] * SIZE, root) if not how else dist.barrier(),
    ]
    work = draw.choice(calls)(**({"async_op": True} if asynchronous else {}))
    if work is not None:
        work.wait()


def fail_on_signal(how):
    def fail(*_):
        if how == "exit":
            sys.exit(5)
        raise ArithmeticError("a failure of the program")

    signal.signal(signal.SIGUSR1, fail)


def main(folder, case):
    fail_on_signal(case["how"])
    begin(folder, case)
    Path(folder, f"ready{RANK}").touch()
    draw = random.Random(case["seed"])
    calls = 0
    try:
        while True:
            random_call(draw)
            calls += 1
    except (CollectiveTimeout, PeerLostError) as error:
        at = time.monotonic()
        found = {"kind": type(error).__name__, "text": str(error), "ranks": error.ranks, "at": at, "calls": calls}
        Path(folder, f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert crossreduce.torch.NAME == "crossreduce"
    main(sys.argv[1], json.loads(sys.argv[2]))
