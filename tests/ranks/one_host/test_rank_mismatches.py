"""Calls that differ between the ranks of one host: the error names the ranks, and nothing is written."""

import numpy as np
import pytest
from members import member, memories, memory, poisoned, summed, untouched
from ranks import ranks

from crossreduce.errors import MismatchError, PeerLostError
from crossreduce.ops import ReduceOp
from crossreduce.ranks.intra_host.programs import PIECE_BYTES


def all_reduce(op="sum", dtype="float32", shape=(10,), exact=False):
    """Return a function of a communicator, which returns (a function that makes the call, its inputs, its results)."""

    def of(comm):
        x, out = np.zeros(shape, dtype), poisoned(int(np.prod(shape)), dtype)
        arrays = memory(x), memory(out.reshape(shape))
        return (lambda: comm.all_reduce(ReduceOp(op), *arrays, exact=exact)), [x], [out]

    return of


def call(name, argument=None):
    """Return the same for another method. ``argument``: the root, or the text of ``require_same``."""

    def of(comm):
        xs, outs = ([make(10, "float32") for _ in range(comm.size)] for make in (np.zeros, poisoned))
        arguments = {
            "reduce": (ReduceOp.SUM, memory(xs[0]), memory(outs[0]) if comm.rank == argument else None, argument),
            "broadcast": (memory(outs[0]), argument),
            "all_gather": (memory(xs[0]), memories(outs)),
            "all_to_all": (memories(xs), memories(outs)),
            "require_same": (argument,),
        }[name]
        return (lambda: getattr(comm, name)(*arguments)), xs, outs

    return of


P = PIECE_BYTES // 4  # float32 elements of a piece
# The call of most ranks, the call of one rank, what differs according to the error, and parts of both calls' texts.
MISMATCHES = [
    (all_reduce(), all_reduce(shape=(12,)), "shape", "float32[10]", "float32[12]"),
    (all_reduce(shape=(2, 3)), all_reduce(shape=(3, 2)), "shape", "float32[2, 3]", "float32[3, 2]"),
    (all_reduce(shape=(P,)), all_reduce(shape=(P + 1,)), "shape", f"[{P}]", f"[{P + 1}]"),
    (all_reduce(shape=(0,)), all_reduce(shape=(P * 2,)), "shape", "[0]", f"[{P * 2}]"),
    (all_reduce(), all_reduce(dtype="int32"), "dtype", "float32[10]", "int32[10]"),
    (all_reduce(), all_reduce(op="max"), "op", "all_reduce sum", "all_reduce max"),
    (all_reduce(), all_reduce(exact=True), "op", "all_reduce sum", "all_reduce exact_sum"),
    (all_reduce(), all_reduce("max", "int8", (4,)), "op and dtype and shape", "sum float32[10]", "max int8[4]"),
    (call("broadcast", 0), call("broadcast", 1), "root", "root 0", "root 1"),
    (call("reduce", 1), call("reduce", 0), "root", "root 1", "root 0"),
    (all_reduce(), call("broadcast", 0), "the call", "all_reduce", "broadcast"),
    (call("all_gather"), all_reduce(), "the call", "all_gather", "all_reduce"),
    (call("all_to_all"), call("require_same", "barrier"), "the call", "all_to_all", "barrier"),
    (call("require_same", "barrier"), all_reduce(shape=(5 * P,)), "the call", "barrier", "all_reduce"),
    (call("require_same", "x" * 500 + "a"), call("require_same", "x" * 500 + "b"), "the call", "xxx", "xxx"),
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
    """If one rank makes another call after 100 correct calls, all ranks raise an error with the same text. It names the
    rank, what differs and both calls. No result is written, and the group can still be used."""
    found = ranks(n, disagreeing)
    assert all(texts == found[0] for texts in found)
    for k, (text, (_, _, what, one, other)) in enumerate(zip(found[0], MISMATCHES, strict=True)):
        odd, usual = k % n, f"ranks {', '.join(str(r) for r in range(n) if r != k % n)}"
        if n == 2:  # of two different calls, that of rank 0 counts as correct
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
    # Odd and even calls use different halves of each rank's slot in shared memory: test the other half, too.
    with pytest.raises(MismatchError, match="root"):
        comm.broadcast(memory(x), comm.rank)
    assert untouched(x)
    summed(comm)
    comm.close()
    return str(error.value)


def test_all_ranks_differ():
    """If no two calls are equal, the call of rank 0 counts as correct. The error shows all calls."""
    (text,) = set(ranks(4, all_different))
    assert text.startswith("ranks 1-3 differ from rank 0 in shape")
    assert all(f"uint8[{k + 5}]" in text for k in range(4))


def skipping(rendezvous):
    """Rank 1 skips one of four different calls, and then leaves."""
    comm, texts = member(rendezvous, 10), []
    for size in (3, 4, 5, 6):
        if size == 4 and comm.rank == 1:
            continue
        try:
            summed(comm, size)
        except (MismatchError, PeerLostError) as error:
            texts.append(str(error))
    comm.close()
    return texts


def test_a_skipped_call_is_named():
    """After a rank has skipped a call, each later call raises an error on all ranks, which contains the call's number.
    After this rank has left, the errors of the others name it."""
    (*both, last), own, again = ranks(3, skipping)
    assert again == [*both, last]
    assert own == both
    assert both[0].startswith('rank 1 differs from ranks 0, 2 in shape at op 2 of group "world"')
    assert "rank 1: all_reduce sum int64[5]; ranks 0, 2: all_reduce sum int64[4]" in both[0]
    assert " at op 3 " in both[1]
    assert last.startswith("rank 1 left during op 4, all_reduce sum int64[6]")
