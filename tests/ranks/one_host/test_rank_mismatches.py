"""Calls of the ranks of one host that differ: the error names the ranks; nothing is written."""

import numpy as np
import pytest
from members import member, memories, memory, poisoned, summed, untouched
from ranks import ranks

from crossreduce.errors import MismatchError, PeerLostError
from crossreduce.ops import ReduceOp
from crossreduce.ranks.intra_host.programs import PIECE_BYTES


def all_reduce(op="sum", dtype="float32", shape=(10,)):
    """Return a function that makes a call of a communicator and returns its inputs and results, as the others below."""

    def call(comm):
        x, out = np.zeros(shape, dtype), poisoned(int(np.prod(shape)), dtype)
        return (lambda: comm.all_reduce(ReduceOp(op), memory(x), memory(out.reshape(shape)))), [x], [out]

    return call


def reduce(root):
    def call(comm):
        x, out = np.zeros(10, np.float32), poisoned(10, "float32")
        result = memory(out) if comm.rank == root else None
        return (lambda: comm.reduce(ReduceOp.SUM, memory(x), result, root)), [x], [out]

    return call


def broadcast(root):
    def call(comm):
        out = poisoned(10, "float32")
        return (lambda: comm.broadcast(memory(out), root)), [], [out]

    return call


def of_rows(name):
    def call(comm):
        xs = [np.zeros(10, np.float32) for _ in range(comm.size)]
        outs = [poisoned(10, "float32") for _ in range(comm.size)]
        given = memory(xs[0]) if name == "all_gather" else memories(xs)
        return (lambda: getattr(comm, name)(given, memories(outs))), xs, outs

    return call


def agree(text):
    return lambda comm: ((lambda: comm.require_same(text)), [], [])


P = PIECE_BYTES // 4


# The call of most ranks, the call of one rank, what differs in the words of the error, and texts of both calls.
MISMATCHES = [
    (all_reduce(), all_reduce(shape=(12,)), "shape", "float32[10]", "float32[12]"),
    (all_reduce(shape=(2, 3)), all_reduce(shape=(3, 2)), "shape", "float32[2, 3]", "float32[3, 2]"),
    (all_reduce(shape=(P,)), all_reduce(shape=(P + 1,)), "shape", f"[{P}]", f"[{P + 1}]"),
    (all_reduce(shape=(7 * P,)), all_reduce(shape=(1,)), "shape", f"[{7 * P}]", "[1]"),
    (all_reduce(shape=(0,)), all_reduce(shape=(P * 2,)), "shape", "[0]", f"[{P * 2}]"),
    (all_reduce(), all_reduce(dtype="int32"), "dtype", "float32[10]", "int32[10]"),
    (all_reduce(), all_reduce(op="max"), "op", "all_reduce sum", "all_reduce max"),
    (all_reduce(), all_reduce(op="mean"), "op", "all_reduce sum", "all_reduce mean"),
    (all_reduce(), all_reduce("max", "int8", (4,)), "op and dtype and shape", "sum float32[10]", "max int8[4]"),
    (broadcast(0), broadcast(1), "root", "root 0", "root 1"),
    (reduce(1), reduce(0), "root", "root 1", "root 0"),
    (all_reduce(), broadcast(0), "the call", "all_reduce", "broadcast"),
    (of_rows("all_gather"), all_reduce(), "the call", "all_gather", "all_reduce"),
    (of_rows("all_to_all"), agree("barrier"), "the call", "all_to_all", "barrier"),
    (agree("barrier"), all_reduce(shape=(5 * P,)), "the call", "barrier", "all_reduce"),
    (agree("x" * 500 + "a"), agree("x" * 500 + "b"), "the call", "xxx", "xxx"),
]


def disagreeing(rendezvous):
    comm = member(rendezvous)
    n, me = comm.size, comm.rank
    for _ in range(100):
        summed(comm, 10)
    texts = []
    for k, (usual, other, *_) in enumerate(MISMATCHES):
        odd = k % n
        call, given, results = (other if me == odd else usual)(comm)
        with pytest.raises(MismatchError) as error:
            call()
        texts.append(str(error.value))
        assert all(untouched(out) for out in results), texts
        assert not any(x.any() for x in given), texts
        if k % 3:
            summed(comm)
    summed(comm, 100_000)
    comm.close()
    return texts


@pytest.mark.parametrize("n", [2, 3])
def test_calls_that_differ(n):
    """If one rank makes another call after 100 correct ones, all ranks raise the same text, which names the rank, what
    differs and both calls; no result is written, and the group can still be used."""
    found = ranks(n, disagreeing)
    assert all(texts == found[0] for texts in found)
    for k, (text, (_, _, what, one, other)) in enumerate(zip(found[0], MISMATCHES, strict=True)):
        odd, usual = k % n, f"ranks {', '.join(str(r) for r in range(n) if r != k % n)}"
        if n == 2:  # of two calls, that of rank 0 counts as correct
            odd, usual, one, other = (1, "rank 0", *((one, other) if odd else (other, one)))
        head, calls = text.splitlines()[:2]
        assert head.startswith(f"rank {odd} differs from {usual} in {what} at op "), text
        of_rank, of_others = calls.split("; ")
        assert other in of_rank, text
        assert one in of_others, text
    assert 'at op 101 of group "world"' in found[0][0]


def all_different(rendezvous):
    comm = member(rendezvous)
    x = poisoned(comm.rank + 5, "uint8")
    with pytest.raises(MismatchError) as error:
        comm.all_reduce(ReduceOp.MAX, memory(x), memory(x))
    assert untouched(x)
    # Odd and even calls use different halves of each rank's slot in shared memory: test the other half, too.
    with pytest.raises(MismatchError, match="root"):
        comm.broadcast(memory(x), comm.rank)
    summed(comm)
    comm.close()
    return str(error.value)


def test_all_ranks_differ():
    """If no two calls are equal, that of rank 0 counts as correct, and all are shown."""
    (text,) = set(ranks(4, all_different))
    assert text.startswith("ranks 1-3 differ from rank 0 in shape")
    assert all(f"uint8[{k + 5}]" in text for k in range(4))


def skipping(rendezvous):
    """Rank 1 skips one of four different calls, and then leaves."""
    comm = member(rendezvous, 10)
    x = np.ones(10, np.float32)
    calls = [lambda k=k: comm.all_reduce(ReduceOp.SUM, memory(x[:k]), memory(x[:k])) for k in (3, 4, 5, 6)]
    texts = []
    for k, call in enumerate(calls):
        if k == 1 and comm.rank == 1:
            continue
        try:
            call()
        except (MismatchError, PeerLostError) as error:
            texts.append(str(error))
    comm.close()
    return texts


def test_a_skipped_call_is_named():
    """After a rank skipped a call, each further call raises on all ranks, and the error has the call's number; when the
    rank has left, the errors of the others name it."""
    found = ranks(3, skipping)
    assert found[0] == found[2]
    assert found[0][:2] == found[1]
    first, second, last = found[0]
    assert first.startswith('rank 1 differs from ranks 0, 2 in shape at op 2 of group "world"')
    assert "rank 1: all_reduce sum float32[5]; ranks 0, 2: all_reduce sum float32[4]" in first
    assert " at op 3 " in second
    assert last.startswith("rank 1 left during op 4, all_reduce sum float32[6]")
