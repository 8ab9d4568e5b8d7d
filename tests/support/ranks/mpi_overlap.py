"""The program of each rank in test_mpi.py that runs cases of ``overlaps``, which rank 0 reads."""

import json
import os
import sys

import numpy as np
from mpi4py import MPI
from overlaps import buffer, outcome_of

world = MPI.COMM_WORLD
rank = world.Get_rank()
os.environ["CROSSREDUCE_HOST"] = sys.argv[1][rank]

from crossreduce.ranks.intra_host import programs  # noqa: E402

programs.PIECE_BYTES = 16  # before other modules read it: small arrays have many pieces

from crossreduce import mpi  # noqa: E402
from crossreduce.ranks.inter_host import multi_host, one_host  # noqa: E402
from crossreduce.ranks.intra_host import peer_memory  # noqa: E402

one_host.SMALL_BYTES = multi_host.SMALLEST_PIECE = one_host.COPIED_PIECE_BYTES = 16
one_host.BLOCKING_PIECE_BYTES.clear()
peer_memory.LEAST_BYTES = peer_memory.LEAST_BYTES_OF_TWO_RANKS = peer_memory.PIECE_BYTES = 64


def array(made, views):
    """Return the view of the buffer, or ``None``."""
    if not views:
        return None
    ((offset, shape, strides),) = views
    nbytes = [stride * made.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(made[offset:], shape, nbytes)


def run(group, case, made):
    """Make the call of a case."""
    (op,) = case["ops"]
    x, out = array(made, op["reads"][rank]), array(made, op["writes"][rank])
    options = {"op": case["op"]} if case["collective"] in ("all_reduce", "reduce", "reduce_scatter") else {}
    if case["root"] is not None:
        options["root"] = case["root"]
    result = getattr(group, case["collective"])(x, out=out, **options)
    assert result is out


with mpi.join(timeout_s=30) as group:
    while case := world.bcast(json.loads(sys.stdin.readline()) if rank == 0 else None):
        made = buffer(case, rank)
        outcomes = world.gather(outcome_of(lambda case=case, made=made: run(group, case, made), made))
        if rank == 0:
            print(json.dumps(outcomes), flush=True)
