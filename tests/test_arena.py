"""The compiled courses and arenas: what is refused, what they report, and their text on the way between ranks."""

import ctypes
import fcntl
import gc
import math
import mmap
import os
import random
import threading
import time

import pytest

from crossreduce import kernels
from crossreduce.errors import CollectiveTimeout, PeerLostError
from crossreduce.kernels import Program, Segment
from crossreduce.ranks.communicator import short
from crossreduce.ranks.shared_memory import (
    DONE,
    LEFT,
    MISMATCH,
    MOST_CAUSE,
    MOST_TEXT,
    WAITING,
    Arena,
    Watch,
    packed,
    unpacked,
)

SLOT = 1 << 14
native = kernels.native()
pytestmark = pytest.mark.skipif(
    native is None or not hasattr(os, "memfd_create"), reason="shared memory needs the compiled kernels, and Linux"
)


def plan(sources=1, results=1, size=8, dtype="int64"):
    program = Program(
        sources > 1, ((0, *range(sources)),) if sources > 1 else (), ((~0 if sources > 1 else 0),) * results
    )
    return kernels.plan(
        "sum", (dtype, dtype, dtype, 1), sources, results, (size,), (program,), (Segment(0, 0, size, 0),)
    )


def copy(source, result, size=8):
    """A job."""
    return plan(size=size), (source,), (result,), False


def nothing(ticks=2):
    return native.Course([[]] * ticks)


@pytest.fixture
def fd():
    number = os.memfd_create("test")
    os.ftruncate(number, native.Arena.bytes(2, SLOT))
    yield number
    os.close(number)


@pytest.fixture
def pair(fd):
    """Two ranks in one process."""
    return [native.Arena(fd, rank, 2, SLOT, 0.0, 1) for rank in (0, 1)]


def raises(kinds, call, *args):
    with pytest.raises(kinds):
        call(*args)


@pytest.mark.parametrize(
    "ticks",
    [
        None,
        5,
        [],
        [[]],
        [[], 5],
        [[5], []],
        [[()], []],
        [[(1, (), (), False)], []],
        [[(plan(), (), ((0, 0),), False)], []],
        [[(plan(), ((0, 0), (0, 0)), ((0, 0),), False)], []],
        [[(plan(), ((0, 0),), (), False)], []],
        [[(plan(), ((0,),), ((0, 0),), False)], []],
        [[(plan(), ((0, 0, 0),), ((0, 0),), False)], []],
        [[(plan(), ((0, -8),), ((0, 0),), False)], []],
        [[(plan(), ((0, 1 << 60),), ((0, 0),), False)], []],
        [[(plan(), ((1 << 70, 0),), ((0, 0),), False)], []],
        [[(plan(), ((1 << 30, 0),), ((0, 0),), False)], []],
        [[(plan(), ((-(1 << 31), 0),), ((0, 0),), False)], []],
        [[(plan(), (("a", 0),), ((0, 0),), False)], []],
        [[(plan(), ((0.5, 0),), ((0, 0),), False)], []],
        [[(plan(), None, ((0, 0),), False)], []],
        [[(plan(), ((0, 0),), ((0, 0),))], []],
    ],
)
def test_malformed_courses_are_refused(ticks):
    """What is no course raises, whatever it is, and leaves nothing behind."""
    raises((ValueError, TypeError, OverflowError, AttributeError), native.Course, ticks)


def test_a_plan_of_several_tensors_is_no_job():
    """A job is one tensor's."""
    two = kernels.plan("sum", ("int8", "int8", "int8", 1), 1, 1, (3, 4), (Program(0, (), (0,)),), ())
    with pytest.raises(ValueError, match="one tensor"):
        native.Course([[(two, ((0, 0),), ((0, 0),), False)], []])


@pytest.mark.parametrize(
    "arguments",
    [
        (2, 2, SLOT, 0.0, 1),  # rank
        (-1, 2, SLOT, 0.0, 1),
        (0, 0, SLOT, 0.0, 1),  # ranks
        (0, -3, SLOT, 0.0, 1),
        (0, 10**6, SLOT, 0.0, 1),
        (0, 2, SLOT + 1, 0.0, 1),  # slot
        (0, 2, SLOT + 4096, 0.0, 1),
        (0, 2, -SLOT, 0.0, 1),
        (0, 2, 1 << 62, 0.0, 1),
        (0, 2, SLOT, -1.0, 1),  # seconds
        (0, 2, SLOT, 5.0, 1),
        (0, 2, SLOT, math.nan, 1),
        (0, 2, SLOT, 0.0, 0),  # threads
        (0, 2, SLOT, 0.0),
        ("0", 2, SLOT, 0.0, 1),
        (0, 2**40, SLOT, 0.0, 1),
    ],
)
def test_malformed_arenas_are_refused(fd, arguments):
    """An arena's numbers are looked at before memory is."""
    raises((ValueError, TypeError, OverflowError), native.Arena, fd, *arguments)


def test_memory_that_cannot_be_shared_is_refused(fd, tmp_path):
    """A descriptor that is closed, too small or no memory raises OSError; whoever touched it would die."""
    raises(OSError, native.Arena, fd, 0, 3, SLOT, 0.0, 1)
    raises(OSError, native.Arena, 1 << 20, 0, 2, SLOT, 0.0, 1)
    raises(OSError, native.Arena, -1, 0, 2, SLOT, 0.0, 1)
    folder = os.open(tmp_path, os.O_RDONLY)
    raises(OSError, native.Arena, folder, 0, 2, SLOT, 0.0, 1)
    os.close(folder)
    reader, writer = os.pipe()
    raises(OSError, native.Arena, reader, 0, 2, SLOT, 0.0, 1)
    os.close(reader)
    os.close(writer)
    for ranks, slot in ((0, SLOT), (-1, SLOT), (10**6, SLOT), (2, -1), (2, 1 << 62)):
        raises(ValueError, native.Arena.bytes, ranks, slot)


def test_malformed_calls_are_refused_and_count_for_nothing(pair):
    """What cannot be run raises, and is no op: the next good one is the first."""
    one, other = pair
    memory = (ctypes.c_int64 * 8)()
    good = ctypes.addressof(memory)
    far = native.Course([[copy((0, SLOT // 2 - 63), (~0, 0))], []])
    third = native.Course([[copy((2, 0), (~0, 0))], []])
    two = native.Course([[copy((~1, 0), (~0, 0))], []])
    kinds = (ValueError, TypeError, OverflowError)
    for arguments in (
        (None, (), "a", 2, 0.0),
        (plan(), (), "a", 2, 0.0),
        (int, (), "a", 2, 0.0),
        (far, (good,), "a", 2, 0.0),
        (third, (good,), "a", 2, 0.0),
        (two, (good,), "a", 2, 0.0),
        (two, (good, "x"), "a", 2, 0.0),
        (two, (good, 1 << 80), "a", 2, 0.0),
        (two, (good, None), "a", 2, 0.0),
        (two, 5, "a", 2, 0.0),
        (nothing(), (), 5, 2, 0.0),
        (nothing(), (), "a", 3, 0.0),
        (nothing(), (), "a", -1, 0.0),
        (nothing(), (), "a", 2, math.nan),
        (nothing(), (), "a", 2, math.inf),
        (nothing(), (), "a", 2, -1.0),
        (nothing(), (), "a", 2),
    ):
        raises(kinds, one.begin, *arguments)
        assert not one.running()
    assert one.number() == 0
    raises(ValueError, one.advance, 1, 0.0)
    for rank in (-1, 2, 1 << 40):
        raises(kinds, one.ops, rank)
        raises(kinds, one.address, rank)
    raises(TypeError, one.give_up, "text")
    assert one.begin(nothing(), (), "a", 2, 0.0) == WAITING
    raises(ValueError, one.begin, nothing(), (), "b", 2, 0.0)
    raises(ValueError, one.advance, 3, 0.0)
    assert other.begin(nothing(), (), "a", 2, 1.0) == DONE
    assert one.advance(2, 1.0) == DONE
    assert one.number() == other.number() == 1
    gc.collect()


def test_a_closed_arena_refuses_all(pair):
    """Nothing can be done with an arena that is closed, and closing it again is nothing."""
    one, other = pair
    one.close()
    one.close()
    assert not one.running()
    for call in (
        lambda: one.begin(nothing(), (), "a", 2, 0.0),
        lambda: one.advance(1, 0.0),
        one.abandon,
        one.cause,
        one.number,
        one.arrivals,
        lambda: one.give_up(b"x"),
        lambda: one.ops(0),
        lambda: one.address(0),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert other.cause() == b""


def test_two_threads_are_kept_out_of_one_arena(pair):
    """While a thread waits in an arena another cannot go on with its op, end it or unmap what it waits in."""
    one, other = pair
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(one.begin(nothing(), (), "a", 2, 5.0)))
    thread.start()
    while one.arrivals()[0] == 0:
        time.sleep(0.001)
    for call in (lambda: one.advance(2, 0.0), one.close, one.abandon, lambda: one.begin(nothing(), (), "b", 2, 0.0)):
        with pytest.raises(ValueError, match="another thread"):
            call()
    other.begin(nothing(), (), "a", 2, 5.0)
    thread.join(5)
    assert outcomes == [DONE]


def test_whoever_ends_right_after_it_came_has_come(fd, pair):
    """The last to come may be killed or stopped before it has said that all are there: the others go on, and miss it
    where they meet next."""
    one, other = pair
    assert one.begin(nothing(3), (), "a", 3, 0.0) == WAITING
    assert other.begin(nothing(3), (), "a", 2, 1.0) == DONE  # it has come, and goes on
    with mmap.mmap(fd, 0) as memory:
        met = 64  # where it is said (arena.hpp)
        assert memory[met] == 1
        memory[met] = 0
        assert one.advance(2, 0.01) == DONE
        assert one.advance(3, 0.01) == WAITING
        assert one.arrivals() == [2, 1]


def test_courses_live_as_long_as_they_run(pair):
    """An op keeps its course and its plans, though the caller drops them."""
    one, other = pair
    source, result = (ctypes.c_int64 * 8)(*range(8)), (ctypes.c_int64 * 8)()
    ends = ctypes.addressof(source), ctypes.addressof(result)
    assert one.begin(native.Course([[copy((~0, 0), (0, 0))], [], []]), ends, "a", 3, 0.0) == WAITING
    gc.collect()
    there = native.Course([[], [copy((0, 0), (~1, 0))], []])
    assert other.begin(there, ends, "a", 3, 0.0) == WAITING
    del there
    gc.collect()
    done = {one: False, other: False}
    for _ in range(10):
        for arena in [arena for arena, over in done.items() if not over]:
            done[arena] = arena.advance(3, 0.01) == DONE
    assert all(done.values())
    assert list(result) == list(range(8))


def test_texts_that_differ_in_any_place_are_told_apart(pair):
    """Two calls are alike only if all of their words are, whatever their length and wherever they differ."""
    one, other = pair
    draw = random.Random(2)
    for length in (0, 1, 7, 8, 9, 63, 64, 231, 232):
        text = bytes(draw.randrange(97, 123) for _ in range(length)).decode()
        changed = [text[:k] + "X" + text[k + 1 :] for k in {0, length // 2, length - 1} if length]
        for second, due in [(text, DONE), *((t, MISMATCH) for t in changed), (text + "y", MISMATCH)]:
            if len(second) > MOST_TEXT:
                continue
            one.begin(nothing(), (), text, 2, 0.0)
            assert other.begin(nothing(3), (), second, 2, 1.0) == due, (text, second)
            assert one.advance(2, 1.0) == due
            if due == DONE:
                other.abandon()
            assert other.ops(0)[-1][1] == text
            assert other.ops(1)[-1][1] == second


def test_the_last_ops_are_remembered(pair):
    """Of each rank the last 32 ops are known, with when they began and ended; of one under way there is no end."""
    one, other = pair
    assert one.ops(0) == one.ops(1) == []
    for k in range(50):
        one.begin(nothing(), (), f"op {k}", 2, 0.0)
        other.begin(nothing(), (), f"op {k}", 2, 1.0)
        assert one.advance(2, 1.0) == DONE
    before = time.monotonic()
    one.begin(nothing(), (), "last", 2, 0.0)
    found = other.ops(0)
    assert [op[0] for op in found] == list(range(20, 52))
    assert [op[1] for op in found] == [f"op {k}" for k in range(19, 50)] + ["last"]
    assert all(op[2] <= op[3] for op in found[:-1])
    assert found[-1][2] >= before
    assert found[-1][3] is None
    assert other.ops(1)[-1][1] == "op 49"


def test_a_given_up_group_stays_so(pair):
    """The first cause stands, whole, whoever asks; nobody arrives or writes any more."""
    one, other = pair
    one.begin(nothing(), (), "a", 2, 0.0)
    one.give_up(b"first")
    other.give_up(b"second")
    assert one.cause() == other.cause() == b"first"
    assert one.advance(2, 1.0) == 3
    arrivals = one.arrivals()
    target = (ctypes.c_int64 * 8)()
    ends = (ctypes.addressof(target), ctypes.addressof(target))
    there = ctypes.cast(other.address(1), ctypes.POINTER(ctypes.c_int64))
    before = there[0]
    target[0] = 77
    assert other.begin(native.Course([[copy((~0, 0), (1, 0))], []]), ends, "a", 2, 1.0) == 3
    one.abandon()
    assert one.begin(nothing(), (), "b", 2, 1.0) == 3
    assert one.arrivals() == arrivals
    assert ctypes.cast(other.address(1), ctypes.POINTER(ctypes.c_int64))[0] in (0, before)


def test_a_rank_that_never_waits_looks_round(fd):
    """Also where all others have come already an op comes back after its slice, so that signals are answered."""
    alone = native.Arena(fd, 0, 1, SLOT, 0.0, 1)
    count, rounds = 100, 0
    outcome = alone.begin(nothing(count), (), "a", count, 0.0)
    while outcome == WAITING:
        rounds, outcome = rounds + 1, alone.advance(count, 0.0)
    assert outcome == DONE
    assert rounds == count - 1


def test_errors_on_their_way_to_other_ranks():
    """An error comes out of shared memory as what it was put in, shortened where there is no room for it."""
    for error in (CollectiveTimeout("late: ü", [3, 1]), PeerLostError('rank 3 "died"\n  given: x', [3])):
        found = unpacked(packed(error))
        assert (type(found), str(found), found.ranks) == (type(error), str(error), error.ranks)
    long = PeerLostError("ü" * 5000, range(1000))
    made = packed(long)
    assert len(made) <= MOST_CAUSE
    assert str(long).startswith(str(unpacked(made)))
    assert unpacked(made).ranks == tuple(range(64))


def test_long_words_keep_their_difference():
    """A call's words are cut to what there is room for; what is cut off counts by its hash."""
    assert short("a" * MOST_TEXT) == b"a" * MOST_TEXT
    one, other = short("ü" * 500 + "a"), short("ü" * 500 + "b")
    assert one != other
    for text in (one, other):
        assert len(text) <= MOST_TEXT
        assert text.decode()


def test_a_rank_holds_its_byte_as_long_as_it_lives(fd):
    """What tells others that a process is there is a lock that the kernel lets go of, whatever ends the process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            lives = Arena(os.dup(fd), (4, 7), 7, SLOT, 0.0)
            lives.leave(nothing())
            os.write(writer, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(reader, 1) == b"x"
    arena = Arena(os.dup(fd), (4, 7), 4, SLOT, 0.0)
    assert arena.alive(4)
    assert arena.alive(7)
    assert arena.said(7).text == LEFT
    assert arena.missing() == []
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert not arena.alive(7)
    assert arena.alive(4)
    arena.close()
    arena.close()
    assert fcntl.fcntl(fd, fcntl.F_GETFD) >= 0
    os.close(reader)
    os.close(writer)


def test_the_clock_of_a_wait_starts_anew_with_progress():
    """A rank's wait counts from when it last came further; it is warned of once."""
    watch = Watch(0.05)
    assert watch.waited_s(3) < 0.04
    time.sleep(0.06)
    assert watch.waited_s(3) >= 0.06
    assert watch.waited_s(4) < 0.04
    assert not watch.due_to_warn()
    time.sleep(0.06)
    assert watch.due_to_warn()
    assert not watch.due_to_warn()
    watch.waited_s(5)
    time.sleep(0.06)
    assert not watch.due_to_warn()
