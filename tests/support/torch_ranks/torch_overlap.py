"""The program of each rank in test_torch_overlap.py. It reads cases, runs them, and writes their outcomes."""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from overlaps import buffer, outcome_of

from crossreduce.ranks.intra_host import programs

programs.PIECE_BYTES = 16  # small arrays then have many pieces; set it before other modules import it

from crossreduce.ranks.inter_host import multi_host, one_host  # noqa: E402
from crossreduce.ranks.intra_host import peer_memory  # noqa: E402

one_host.SMALL_BYTES = multi_host.SMALLEST_PIECE = 16
peer_memory.LEAST_BYTES = peer_memory.LEAST_BYTES_OF_TWO_RANKS = peer_memory.PIECE_BYTES = 64

import crossreduce.torch  # noqa: E402, F401

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "band": dist.ReduceOp.BAND}


def started(case, rank, base):
    """Start the call of a case, and return its work, or ``None``."""

    def tensors(views):
        return [torch.as_strided(base, shape, strides, offset) for offset, shape, strides in views]

    group, root, op, late = dist.group.WORLD, case["root"], OPS[case["op"]], case["late"]
    reads = [tensors(each["reads"][rank]) for each in case["ops"]]
    writes = [tensors(each["writes"][rank]) for each in case["ops"]]
    xs, ys = ([x for each in lists for x in each] for lists in (reads, writes))
    if case["repeats"][rank]:
        xs[1] = xs[0]
    chosen, sizes = dist.ReduceScatterOptions(), case["ops"][0]["sizes"]
    chosen.reduceOp = op
    uneven = len({size for row in sizes for size in row}) > 1
    splits = [[row[rank] for row in sizes], sizes[rank]] if uneven else []
    return {
        "single all_reduce": lambda: dist.all_reduce(xs[0], op, async_op=late),
        "coalesced all_reduce": lambda: group.allreduce_coalesced(xs, op),
        "single reduce": lambda: dist.reduce(xs[0], root, op, async_op=late),
        "single broadcast": lambda: dist.broadcast(xs[0], root, async_op=late),
        "list all_gather": lambda: dist.all_gather(ys, xs[0], async_op=late),
        "single all_gather": lambda: dist.all_gather_into_tensor(ys[0], xs[0], async_op=late),
        "coalesced all_gather": lambda: group.all_gather_single_coalesced(ys, xs),
        "transposed all_gather": lambda: group.allgather_coalesced(list(zip(*writes, strict=True)), xs),
        "list reduce_scatter": lambda: dist.reduce_scatter(ys[0], xs, op, async_op=late),
        "single reduce_scatter": lambda: dist.reduce_scatter_tensor(ys[0], xs[0], op, async_op=late),
        "coalesced reduce_scatter": lambda: group.reduce_scatter_single_coalesced(ys, xs, chosen),
        "list gather": lambda: dist.gather(xs[0], ys or None, root, async_op=late),
        "list scatter": lambda: dist.scatter(ys[0], xs or None, root, async_op=late),
        "list all_to_all": lambda: dist.all_to_all(ys, xs, async_op=late),
        "single all_to_all": lambda: dist.all_to_all_single(ys[0], xs[0], *splits, async_op=late),
    }[f"{case['form']} {case['collective']}"]()


def main():
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = f"file://{sys.argv[1]}/store"
    dist.init_process_group("crossreduce", where, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    while case := json.loads(sys.stdin.readline()):
        made = buffer(case, rank)
        base = torch.from_numpy(made)
        if case["dtype"] == "float8":
            base = base.view(torch.float8_e4m3fn)

        def call(case=case, base=base):
            work = started(case, rank, base)
            if work is not None:
                work.wait()

        print(json.dumps(outcome_of(call, made)), flush=True)
    dist.destroy_process_group()


main()
