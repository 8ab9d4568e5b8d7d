"""The native rank programs and shared memory: argument checks, barriers, copies between processes, and the encoding of
errors and of the texts by which ranks compare their calls."""

import ctypes
import math
import os

import pytest

from crossreduce import kernels
from crossreduce.errors import CollectiveTimeout, PeerLostError, UnsupportedError, decoded, encoded
from crossreduce.kernels import FusedProgram, Segment
from crossreduce.ranks.array_views import encoded_text
from crossreduce.ranks.intra_host import votes
from crossreduce.ranks.intra_host.instructions import PEER_BUFFER, READABLE_BUFFERS
from crossreduce.ranks.intra_host.programs import TURN_BYTES
from crossreduce.ranks.intra_host.shared_memory import (
    DONE,
    MAX_CAUSE_BYTES,
    MAX_TEXT_BYTES,
    NO_MEMORY,
    UNREADABLE,
    WAITING,
    RankMemory,
)

SLOT = 1 << 14
native = kernels.native()
is_supported = native is not None and hasattr(os, "memfd_create")
pytestmark = pytest.mark.skipif(not is_supported, reason="shared memory needs the compiled kernels, and Linux")


def kernel(sources=1, results=1, size=8, dtype="int64"):
    """Return a kernel that writes the sum of its sources, or a copy of the only one, to each result."""
    sums = FusedProgram(1, ((0, *range(sources)),), (~0,) * results)
    program = sums if sources > 1 else FusedProgram(0, (), (0,) * results)
    segments = (Segment(0, 0, size, 0),)
    return kernels.compile_kernel("sum", (dtype,) * 3, 1, sources, results, (size,), (program,), segments)


def copy(source, result, size=8):
    """Return an instruction that copies ``size`` int64 elements from ``source`` to ``result``."""
    return kernel(size=size), (source,), (result,), False


def nothing(stages=2):
    """Return a program that moves nothing."""
    return native.RankProgram([[]] * stages)


@pytest.fixture
def fd():
    number = os.memfd_create("test")
    os.ftruncate(number, native.SharedMemory.nbytes(2, SLOT))
    yield number
    os.close(number)


@pytest.fixture
def pair(fd):
    """Return the shared memory of two ranks in one process."""
    return [native.SharedMemory(fd, rank, 2, SLOT, 0.0, 1) for rank in (0, 1)]


def test_ops_begin_at_places_in_turn():
    """Successive ops use the halves of the slots in turn, and in each half the ``turns`` start offsets in turn. An op
    may use only as many bytes as there are after the last of these offsets."""
    turns, slot = 3, 2 * 4 * TURN_BYTES
    fd = os.memfd_create("test")
    os.ftruncate(fd, native.SharedMemory.nbytes(2, slot))
    one, other = (native.SharedMemory(fd, rank, 2, slot, 0.0, 1, turns) for rank in (0, 1))
    os.close(fd)
    start, room, offsets = one.address(0), slot // 2 - (turns - 1) * TURN_BYTES, []
    for _ in range(12):
        assert one.begin(nothing(), (), "a", 2, 0.0) == WAITING
        assert other.begin(nothing(), (), "a", 2, 1.0) == one.advance(2, 1.0) == DONE
        offsets.append(one.address(0) - start)
    assert offsets == [number % 2 * slot // 2 + number // 2 % turns * TURN_BYTES for number in range(1, 13)]
    beyond = native.RankProgram([[copy((~0, 0), (0, room - 56))], []])  # writes 64 bytes
    source = (ctypes.c_int64 * 8)()
    raises(ValueError, one.begin, beyond, (ctypes.addressof(source),), "a", 2, 0.0)


def test_an_op_allocates_what_it_uses_of_its_slot():
    """If an op uses more of its rank's slot than the system has allocated, it first allocates more. If that fails,
    the op does nothing, since an access could kill the process."""
    slot, ready = 1 << 20, 1 << 14
    fd = os.memfd_create("test")
    os.ftruncate(fd, native.SharedMemory.nbytes(2, slot))
    one, other = (native.SharedMemory(fd, rank, 2, slot, 0.0, 1, 1, ready) for rank in (0, 1))

    def run(nbytes):
        """Run an op that copies so many bytes into the slot of rank 0. Return its outcome and what it allocated."""
        source, before = (ctypes.c_int64 * (nbytes // 8))(), os.fstat(fd).st_blocks
        program = native.RankProgram([[copy((~0, 0), (0, 0), nbytes // 8)], []])
        outcome = one.begin(program, (ctypes.addressof(source),), "a", 1, 0.0)
        allocated = (os.fstat(fd).st_blocks - before) * 512
        if outcome == DONE:
            assert other.begin(nothing(), (), "a", 2, 0.0) == WAITING
            assert one.advance(2, 1.0) == other.advance(2, 1.0) == DONE
        return outcome, allocated

    assert run(ready)[0] == DONE
    outcome, allocated = run(ready + 8)
    assert outcome == DONE
    assert 2 * ready <= allocated + ready < slot // 2
    os.close(fd)
    one_more = (ctypes.c_int64 * (3 * ready // 8))()
    program = native.RankProgram([[copy((~0, 0), (0, 0), 3 * ready // 8)], []])
    assert one.begin(program, (ctypes.addressof(one_more),), "a", 1, 0.0) == NO_MEMORY


def raises(kinds, call, *args):
    """Check that a call raises an error of one of ``kinds``, with a text."""
    with pytest.raises(kinds, match=r"\w"):
        call(*args)


def test_malformed_programs_raise():
    """RankProgram raises an error if its stages are not at least two lists of valid instructions, if a kernel has
    several tensors, or if an instruction writes or combines buffers of other ranks' callers, or sends them."""
    one, good = kernel(), ((0, 0),)
    wrong = [None, 5, [], [[]], [[], 5], *([[each], []] for each in (5, (1, (), (), False), (one, good, good)))]
    part, digest = (1, (0, 0), 8), bytes(16)
    messages = [((), (), (2,), b"short", 0), ((), (), (), digest, -1), ((), (), ("a",), digest, 0), ((), ())]
    for each in ((1, (0, 0), -1), (1, (PEER_BUFFER, 0), 8), (1, (0,), 8), (1, (0, 0)), 5):
        messages += [((each,), (), (), digest, 0), ((), (each,), (), digest, 0)]
    messages += [((part,), (), (1,), digest, 7), ((), (part,), (1,), digest, 7)]  # more data than room
    wrong += [[[each], []] for each in messages]
    operands = [(), None, ((0, 0), (0, 0)), ((0,),), ((0, 0, 0),), ((0, -8),), ((0, 1 << 60),), ((1 << 70, 0),)]
    for each in [*operands, ((1 << 30, 0),), ((-(1 << 31), 0),), (("a", 0),), ((0.5, 0),)]:
        wrong += [[[(one, *ends, False)], []] for ends in ((each, good), (good, each))]
    peer, own = (PEER_BUFFER, 0), (~0, 0)
    for sources, results in (((own,), (peer,)), ((peer, own), (own,)), ((peer,), (own, own))):
        wrong.append([[(kernel(len(sources), len(results)), sources, results, False)], []])
    two = kernels.compile_kernel("sum", ("int8", "int8", "int8"), 1, 1, 1, (3, 4), (FusedProgram(0, (), (0,)),), ())
    for stages in [*wrong, [[(two, good, good, False)], []]]:
        raises((ValueError, TypeError, OverflowError, AttributeError), native.RankProgram, stages)


def test_malformed_memory_arguments_raise(fd, tmp_path):
    """Invalid ranks, numbers of ranks, slots, spin times, threads and turns raise errors before memory is mapped. A
    descriptor that is closed, too small or not of memory raises OSError: an access would kill the process."""
    good = {"rank": 0, "ranks": 2, "slot": SLOT, "spin_s": 0.0, "threads": 1, "turns": 1}
    native.SharedMemory(fd, *good.values()).close()
    wrong = {"rank": (2, -1, "0"), "ranks": (0, -3, 10**6, 2**40), "slot": (SLOT + 1, SLOT + 4096, -SLOT, 1 << 62)}
    wrong |= {"spin_s": (-1.0, 5.0, math.nan), "threads": (0,), "turns": (0, 2)}  # half a slot has no room for 2 turns
    for name, values in wrong.items():
        for value in values:
            raises((ValueError, TypeError, OverflowError), native.SharedMemory, fd, *(good | {name: value}).values())
    for ranks, slot in ((0, SLOT), (-1, SLOT), (10**6, SLOT), (2, -1), (2, 1 << 62)):
        raises(ValueError, native.SharedMemory.nbytes, ranks, slot)
    folder, (reader, writer) = os.open(tmp_path, os.O_RDONLY), os.pipe()
    for bad, ranks in ((fd, 3), (1 << 20, 2), (-1, 2), (folder, 2), (reader, 2)):
        raises(OSError, native.SharedMemory, bad, 0, ranks, SLOT, 0.0, 1)
    for each in (folder, reader, writer):
        os.close(each)


def test_malformed_calls_raise_and_do_not_count(pair):
    """Invalid calls, and calls of closed memory, raise errors and do not count: the next correct call has number 1."""
    one, other = pair
    memory = (ctypes.c_int64 * 8)()
    good = ctypes.addressof(memory)
    beyond = (0, SLOT // 2 - 63), (2, 0), (PEER_BUFFER + 2 * READABLE_BUFFERS, 0)  # no such bytes, slot and rank
    two = native.RankProgram([[copy((~1, 0), (~0, 0))], []])
    wrong = [(program, (), "a", 2, 0.0) for program in (None, kernel(), int)]
    wrong += [(native.RankProgram([[copy(place, (~0, 0))], []]), (good,), "a", 2, 0.0) for place in beyond]
    wrong += [(two, addresses, "a", 2, 0.0) for addresses in ((good,), (good, "x"), (good, 1 << 80), (good, None), 5)]
    wrong += [(nothing(), (), "a", until, 0.0) for until in (3, -1)]
    wrong += [(nothing(), (), "a", 2, slice_s) for slice_s in (math.nan, math.inf, -1.0)]
    kinds = (ValueError, TypeError, OverflowError)
    for arguments in [*wrong, (nothing(), (), 5, 2, 0.0), (nothing(), (), "a", 2)]:
        raises(kinds, one.begin, *arguments)
        assert not one.running()
    assert one.number() == 0
    for call, *arguments in [(one.advance, 1, 0.0), *((f, rank) for f in (one.ops, one.address) for rank in (-1, 2))]:
        raises(kinds, call, *arguments)
    raises(TypeError, one.abort, "text")
    assert one.begin(nothing(), (), "a", 2, 0.0) == WAITING
    raises(ValueError, one.begin, nothing(), (), "b", 2, 0.0)
    raises(ValueError, one.advance, 3, 0.0)
    assert other.begin(nothing(), (), "a", 2, 1.0) == DONE
    assert one.advance(2, 1.0) == DONE
    assert one.number() == other.number() == 1
    one.close()
    one.close()
    assert not one.running()
    calls = [(one.begin, nothing(), (), "a", 2, 0.0), (one.advance, 1, 0.0), (one.abort, b"x"), (one.ops, 0)]
    for call, *arguments in [*calls, (one.address, 0), (one.end_op,), (one.cause,), (one.number,), (one.arrivals,)]:
        with pytest.raises(ValueError, match="closed"):
            call(*arguments)
    assert other.cause() == b""


def test_a_rank_that_ends_right_after_its_arrival_has_arrived(pair):
    """If a rank is killed or stopped right after its arrival at a barrier, before it wakes the others, they continue
    nevertheless. They wait for this rank only at the next barrier."""
    one, other = pair
    assert one.begin(nothing(3), (), "a", 3, 0.0) == WAITING
    assert other.begin(nothing(3), (), "a", 2, 1.0) == DONE  # the last rank arrives, and continues
    assert one.advance(2, 0.0) == DONE  # a slice of 0 s: this does not sleep, so nothing has to wake it
    assert one.advance(3, 0.01) == WAITING
    assert one.arrivals() == [2, 1]


def test_copies_from_the_memory_of_another_process(pair):
    """A rank copies from buffer 0 of another rank's caller. An unreadable address has the outcome ``UNREADABLE``."""
    one, other = pair
    assert one.can_read(1)
    source, result = (ctypes.c_int64 * 8)(*range(8)), (ctypes.c_int64 * 8)()
    copies = native.RankProgram([[], [copy((PEER_BUFFER + READABLE_BUFFERS, 16), (~1, 0), 6)], []])
    for address, outcome in ((ctypes.addressof(source), DONE), (8, UNREADABLE)):
        assert one.begin(copies, (0, ctypes.addressof(result)), "a", 2, 0.0) == WAITING
        assert other.begin(nothing(3), (address,), "a", 2, 1.0) == DONE
        assert one.advance(2, 1.0) == outcome
        assert list(result) == [2, 3, 4, 5, 6, 7, 0, 0]
        one.end_op(), other.end_op()


def test_a_rank_that_never_waits_returns_after_its_slice(fd):
    """``advance`` returns after its slice of time even if no rank is waited for, so that Python can handle signals."""
    alone = native.SharedMemory(fd, 0, 1, SLOT, 0.0, 1)
    assert alone.begin(nothing(100), (), "a", 100, 0.0) == WAITING
    assert [alone.advance(100, 0.0) for _ in range(99)] == [WAITING] * 98 + [DONE]


def test_errors_and_texts_are_encoded():
    """A decoded error equals the encoded one. Texts and lists of ranks that are too long are cut. If a call's text is
    too long, it is cut and ends in a hash of the whole text. So texts that differ only at the end still differ."""
    for error in (CollectiveTimeout("late: ü", [3, 1]), PeerLostError('rank 3 "died"\n  given: x', [3])):
        found = decoded(encoded(error))
        assert (type(found), str(found), found.ranks) == (type(error), str(error), error.ranks)
    made = encoded(PeerLostError("ü" * 5000, range(1000)), MAX_CAUSE_BYTES)
    assert len(made) <= MAX_CAUSE_BYTES
    assert {*str(decoded(made))} == {"ü"}
    assert decoded(made).ranks == tuple(range(64))
    assert encoded_text("a" * MAX_TEXT_BYTES) == b"a" * MAX_TEXT_BYTES
    one, other = encoded_text("ü" * 500 + "a"), encoded_text("ü" * 500 + "b")
    assert one != other
    assert len(one.decode().encode()) == len(one) <= MAX_TEXT_BYTES


def test_memory_without_room_for_the_registers_of_all_hosts():
    """If the group has more hosts than the memory was sized for, there are no registers, and agreements are refused."""
    fd, size = os.memfd_create("registers"), 2000  # ranks of the group
    os.ftruncate(fd, votes.offset(RankMemory.nbytes(1, SLOT, size, 8)) + votes.NBYTES)
    enough, more = (RankMemory(os.dup(fd), (0,), 0, SLOT, size, hosts, 0.0) for hosts in (8, 20))
    assert enough.registers.decision(1) is None
    with pytest.raises(UnsupportedError, match="too many could not share memory"):
        _ = more.registers
    enough.close(), more.close()
    os.close(fd)
