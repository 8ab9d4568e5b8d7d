"""Failures among the ranks of one host, by rule R1 to R11: errors, the ranks they name, delays, and resources."""

import contextlib
import gc
import mmap
import os
import random
import re
import select
import signal
import threading
import time

import numpy as np
import pytest
from members import Resources, Warnings, member, memories, memory, poisoned, resident_bytes, untouched
from ranks import Died, Moment, ranks

from crossreduce.cli import main
from crossreduce.errors import CollectiveTimeout, ContextError, MismatchError, PeerLostError
from crossreduce.ops import ReduceOp
from crossreduce.ranks import communicator, flight_recorder, programs, shared_memory
from crossreduce.ranks.programs import PIECE_BYTES


@pytest.fixture(autouse=True)
def dumps(tmp_path, monkeypatch):
    """Let ranks write their flight recorder dumps into a directory of the test."""
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "dumps"))
    return tmp_path / "dumps"


class Starter:
    """Notifies the test's process when all ranks have joined, so that its signals arrive during their calls."""

    def __init__(self, n):
        self.n = n
        self.reader, self.writer = os.pipe()

    def ready(self):
        os.write(self.writer, b"r")

    def wait(self):
        got, deadline = 0, time.monotonic() + 20
        while got < self.n:
            ready = select.select([self.reader], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"only {got} of {self.n} ranks have joined"
            got += len(os.read(self.reader, self.n))

    def close(self):
        os.close(self.reader)
        os.close(self.writer)


@contextlib.contextmanager
def starter(n):
    made = Starter(n)
    try:
        yield made
    finally:
        made.close()


def summed(comm, size=1000):
    """Make one correct call."""
    x = np.full(size, comm.rank + 1, np.int64)
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    assert (x == comm.size * (comm.size + 1) // 2).all()


# R1, R2: calls that differ


def all_reduce(op="sum", dtype="float32", shape=(10,)):
    def call(comm):
        x, out = np.zeros(shape, dtype), poisoned(int(np.prod(shape)), dtype)
        return (lambda: comm.all_reduce(ReduceOp(op), memory(x), memory(out.reshape(shape)))), [x], [out]

    return call


def reduce(root, size=10):
    def call(comm):
        x, out = np.zeros(size, np.float32), poisoned(size, "float32")
        result = memory(out) if comm.rank == root else None
        return (lambda: comm.reduce(ReduceOp.SUM, memory(x), result, root)), [x], [out]

    return call


def broadcast(root, size=10):
    def call(comm):
        out = poisoned(size, "float32")
        return (lambda: comm.broadcast(memory(out), root)), [], [out]

    return call


def all_gather(size=10):
    def call(comm):
        x, outs = np.zeros(size, np.float32), [poisoned(size, "float32") for _ in range(comm.size)]
        return (lambda: comm.all_gather(memory(x), memories(outs))), [x], outs

    return call


def all_to_all(size=10):
    def call(comm):
        xs = [np.zeros(size, np.float32) for _ in range(comm.size)]
        outs = [poisoned(size, "float32") for _ in range(comm.size)]
        return (lambda: comm.all_to_all(memories(xs), memories(outs))), xs, outs

    return call


def agree(text):
    return lambda comm: ((lambda: comm.agree(text)), [], [])


P = PIECE_BYTES // 4
# The call of most ranks, the call of one rank, the aspect that the error names, and texts of both calls.
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
    (all_gather(), all_reduce(), "the call", "all_gather", "all_reduce"),
    (all_to_all(3), agree("barrier"), "the call", "all_to_all", "barrier"),
    (agree("barrier"), all_reduce(shape=(5 * P,)), "the call", "barrier", "all_reduce"),
    (agree("x" * 500 + "a"), agree("x" * 500 + "b"), "the call", "xxx", "xxx"),
]


def disagreeing(rendezvous):
    comm = member(rendezvous)
    n, me = comm.size, comm.rank
    for _ in range(500):
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


@pytest.mark.parametrize("n", [2, 3, 4])
def test_r1_r2_calls_that_differ(n):
    """If one rank makes another call after 500 correct ones, all ranks raise the same text, which names the rank, the
    aspect and both calls; no result is written, and the group can still be used."""
    found = ranks(n, disagreeing)
    assert all(texts == found[0] for texts in found)
    for k, (text, (_, _, what, one, other)) in enumerate(zip(found[0], MISMATCHES, strict=True)):
        odd, usual = k % n, f"ranks {', '.join(str(r) for r in range(n) if r != k % n)}"
        if n == 2:  # of two calls, that of rank 0 counts as correct
            odd, usual, one, other = (1, "rank 0", *((one, other) if odd else (other, one)))
        elif n == 4 and odd in (0, 3):
            usual = f"ranks {1 if odd == 0 else 0}-{3 if odd == 0 else 2}"
        head, calls = text.splitlines()[:2]
        assert head.startswith(f"rank {odd} differs from {usual} in {what} at op "), text
        of_rank, of_others = calls.split("; ")
        assert other in of_rank, text
        assert one in of_others, text
    assert 'at op 501 of group "world"' in found[0][0]


def all_different(rendezvous):
    comm = member(rendezvous)
    x = poisoned(comm.rank + 5, "uint8")
    with pytest.raises(MismatchError) as error:
        comm.all_reduce(ReduceOp.MAX, memory(x), memory(x))
    assert untouched(x)
    with pytest.raises(MismatchError) as second:  # the second call uses the other half of the slots
        comm.broadcast(memory(x), comm.rank)
    summed(comm)
    comm.close()
    return str(error.value), str(second.value)


def test_r1_all_ranks_differ():
    """If no two calls are equal, that of rank 0 counts as correct, and all are shown."""
    found = ranks(4, all_different)
    assert len(set(found)) == 1
    text = found[0][0]
    assert text.startswith("ranks 1-3 differ from rank 0 in shape")
    assert all(f"uint8[{k + 5}]" in text for k in range(4))


# R3: ranks that die


def mixed(comm, draw, stop=None):
    """Make random calls, the same on all ranks, until one fails."""
    arrays = {size: np.ones(size, np.float32) for size in (10, 5000, 300_000, 4_000_000)}
    while True:
        x = arrays[draw.choice(sorted(arrays))]
        what = draw.randrange(4)
        if what == 0:
            comm.broadcast(memory(x), draw.randrange(comm.size))
        elif what == 1:
            comm.barrier()
        else:
            x[:] = 1
            comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
            assert (x == comm.size).all()


def until_lost(rendezvous, started, seed, kind):
    comm = member(rendezvous, 5)
    started.ready()
    try:
        if kind == "long":
            x = np.ones(16 << 20, np.float32)
            while True:
                comm.all_reduce(ReduceOp.MAX, memory(x), memory(x))
        mixed(comm, random.Random(seed))
    except PeerLostError as error:
        at = Moment()
        with pytest.raises(PeerLostError, match="died during op") as second:
            comm.barrier()
        comm.close()
        return str(error), str(second.value), error.ranks, at


@pytest.mark.parametrize("part", range(5))
def test_r3_a_killed_rank_is_named(part):
    """Whenever a rank is killed, all others raise the same PeerLostError within 1.5 s, which names it; their next call
    raises it again."""
    for seed in range(part * 10, part * 10 + 10):
        draw = random.Random(seed)
        n = draw.choice([2, 3, 4])
        victim, kind = draw.randrange(n), draw.choice(["mixed", "mixed", "long"])
        killed = []
        with starter(n) as started:

            def kill(pids, draw=draw, victim=victim, killed=killed, started=started):
                started.wait()
                time.sleep(draw.random() * 0.12)
                os.kill(pids[victim], signal.SIGKILL)
                killed.append(Moment())

            found = ranks(n, until_lost, started, seed, kind, check=False, begun=kill, timeout_s=30)
        assert isinstance(found[victim], Died)
        rest = [found[rank] for rank in range(n) if rank != victim]
        assert all(isinstance(one, tuple) for one in rest), (seed, rest)
        assert len({text for text, *_ in rest}) == 1, (seed, rest)
        for text, again, lost, at in rest:
            assert lost == (victim,), (seed, text)
            assert again == text, seed
            assert text.startswith(f"rank {victim} died during op "), seed
            assert at.seconds_since(killed[0]) < 1.5, (seed, at.seconds_since(killed[0]))


def dies_between(rendezvous, when):
    comm = member(rendezvous, 5)
    if when == "before" and comm.rank == 1:
        if os.fork() == 0:  # its child lives on, with the descriptors that it inherited
            time.sleep(2)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    summed(comm)
    if when == "after" and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "after":
        time.sleep(0.2)
        comm.close()
        return "closed"
    return "done"


def test_r3_before_the_first_call_and_after_the_last():
    """A rank that dies before its first call is named, even if its child lives; one that dies after the last call
    affects no other rank."""
    found = ranks(3, dies_between, "before", check=False)
    for rank in (0, 2):
        assert isinstance(found[rank], PeerLostError), found
        assert found[rank].ranks == (1,)
    found = ranks(3, dies_between, "after", check=False)
    assert found[0] == found[2] == "closed", found


def two_die(rendezvous, started):
    comm = member(rendezvous, 5)
    started.ready()
    with pytest.raises(PeerLostError, match="died during op") as error:
        mixed(comm, random.Random(1))
    return error.value.ranks


def test_r3_several_die_at_once():
    """If several ranks die at once, all others name the same nonempty set of them."""
    with starter(4) as started:

        def kill(pids):
            started.wait()
            time.sleep(0.05)
            for rank in (0, 3):
                os.kill(pids[rank], signal.SIGKILL)

        found = ranks(4, two_die, started, check=False, begun=kill)
    assert found[1] == found[2]
    assert set(found[1]) <= {0, 3}
    assert found[1]


# R4, R11: ranks that stop


def pause(started, victim, seconds):
    """Return a function that stops a rank for some seconds after all have started."""

    def begun(pids):
        started.wait()
        time.sleep(0.2)
        os.kill(pids[victim], signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pids[victim], signal.SIGCONT)

    return begun


def stopped(rendezvous, started, timeout_s):
    kept = Warnings()
    comm = member(rendezvous, timeout_s)
    comm.warn_s = 0.3
    for _ in range(3):
        summed(comm)
    started.ready()
    began = time.monotonic()
    x = np.ones(10, np.float32)
    try:
        while True:
            comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
            at = Moment()
            assert (x == comm.size).all()
            x[:] = 1
            done = np.array([time.monotonic() - began >= 1.9], np.uint8)
            comm.broadcast(memory(done), 0)
            if done[0]:
                break
    except CollectiveTimeout as error:
        took = time.monotonic() - at.time, Moment().seconds_since(at)
        again = None
        try:
            comm.barrier()
        except CollectiveTimeout as second:
            again = str(second) == str(error)
        return str(error), error.ranks, took, again, kept.texts
    comm.close()
    return "done", (), None, None, kept.texts


def test_r4_a_rank_that_stops_for_a_while():
    """While a rank is stopped, the others warn once, naming it and the call; when it continues, results are correct."""
    with starter(3) as started:
        found = ranks(3, stopped, started, 20.0, begun=pause(started, 1, 1))
    assert [one[0] for one in found] == ["done"] * 3
    for rank in (0, 2):
        (text,) = found[rank][4]
        assert f"rank {rank}: " in text
        assert " s for rank 1 in op " in text
        assert "float32[10]" in text or "broadcast" in text


def test_r4_r11_a_rank_that_stops_beyond_the_timeout(dumps, capsys, monkeypatch):
    """After the timeout all others raise a CollectiveTimeout that names it, and write dumps of all ranks' last calls,
    which the doctor reads; the rank itself raises the same when it continues."""
    with starter(4) as started:
        found = ranks(4, stopped, started, 1.5, begun=pause(started, 2, 3.5))
    texts = {one[0] for one in found}
    assert len(texts) == 1, texts
    (text,) = texts
    assert re.match(
        r"rank 2 did not complete op .*, within the timeout of 1\.5 s\. The group cannot be used again", text
    )
    for rank, (_, late, took, again, warned) in enumerate(found):
        assert late == (2,)
        assert again is True
        if rank != 2:
            elapsed, without_cpu_waits = took
            assert elapsed > 1.4
            assert without_cpu_waits < 3
            assert any("s for rank 2 in op" in warning for warning in warned)
    read = flight_recorder.read(dumps)
    assert not read.problems
    assert [dump.rank for dump in read.dumps] == [0, 1, 2, 3]
    for dump in read.dumps:
        assert dump.cause == text.replace(f"crossreduce doctor {dumps}", "crossreduce doctor DIR")
        assert dump.cause != text
        assert [history.rank for history in dump.histories] == [0, 1, 2, 3]
        assert all(4 <= len(history.ops) <= 32 for history in dump.histories)
        numbers = [op.sequence for op in dump.histories[0].ops]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert dump.histories[0].ops[-1].ended_s is None
    monkeypatch.setenv("COLUMNS", "150")
    with pytest.raises(SystemExit, match="0"):
        main(["doctor", str(dumps)])
    assert "rank 2" in capsys.readouterr().out


def slow(rendezvous):
    """Make a call of many stages, of which rank 1 executes a few hundred at a time, with pauses."""
    programs.PIECE_BYTES = 1 << 11
    comm = member(rendezvous)
    x = np.ones(2 << 20 >> 2, np.float32)
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))  # compiles the program, which takes a while
    x[:] = 1
    comm.timeout_s = 0.8
    begin = comm.memory.begin

    def slowly(program, addresses, text, until):
        begin(program, addresses, text, 200)
        for part in (400, 600, 800, until):
            time.sleep(0.3)
            outcome = comm.memory.advance(part)
        return outcome

    if comm.rank == 1:
        comm.memory.begin = slowly
    began = time.monotonic()
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    took = time.monotonic() - began
    right = bool((x == 2).all())
    comm.close()
    return right, took


def test_r4_a_call_that_progresses_does_not_time_out():
    """The timeout applies to the wait at one barrier, not to the whole call."""
    found = ranks(2, slow)
    assert all(right for right, _ in found)
    assert found[0][1] > 1.1, "the call was too short to show it"


# R5: extra and missing calls


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


def test_r5_a_skipped_call_is_named():
    """The first call after a skipped one raises on all ranks with its number; at the end the error of the others names
    the rank that left."""
    found = ranks(3, skipping)
    assert found[0] == found[2]
    assert found[0][:2] == found[1]
    first, second, last = found[0]
    assert first.startswith('rank 1 differs from ranks 0, 2 in shape at op 2 of group "world"')
    assert "rank 1: all_reduce sum float32[5]; ranks 0, 2: all_reduce sum float32[4]" in first
    assert " at op 3 " in second
    assert last.startswith("rank 1 left during op 4, all_reduce sum float32[6]")


def waits_too_long(rendezvous):
    comm = member(rendezvous, 0.7)
    summed(comm)
    if comm.rank == 1:
        time.sleep(1.6)
        return None
    with pytest.raises(CollectiveTimeout, match="rank 1 did not complete op 2") as error:
        comm.broadcast(memory(np.zeros(4, np.int8)), 2)
    return str(error.value), error.value.ranks


def test_r5_an_extra_call_is_named():
    """A call that one rank does not make times out; the error names the call, and the last call of that rank."""
    found = ranks(3, waits_too_long)
    assert found[0] == found[2]
    text, late = found[0]
    assert late == (1,)
    assert text.startswith(
        'rank 1 did not complete op 2, broadcast root 2 int8[4], of group "world", within the timeout of 0.7 s'
    )
    assert "its last call was op 1, all_reduce sum int64[1000]" in text


# R6: interrupts


def interrupted(rendezvous, started, state):
    before = Resources()
    after = None
    error = None
    comm = None

    def ended(*_):
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        comm = member(rendezvous, 10)
        started.ready()
        if state == "waiting" and comm.rank == 0:
            time.sleep(0.6)  # the others are in the call, and rank 1 is interrupted
        if state == "between" and comm.rank == 1:
            time.sleep(5)
        if state == "long":
            x = np.ones(8 << 20, np.float32)
            while True:
                comm.all_reduce(ReduceOp.MAX, memory(x), memory(x))
        comm.barrier()
    except (KeyboardInterrupt, SystemExit, PeerLostError) as caught:
        error = type(caught).__name__, str(caught), getattr(caught, "ranks", None)
    finally:
        if comm is not None:
            comm.close()
        del comm
        gc.collect()
        after = Resources()
    return error, before == after, (before, after)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("state", ["waiting", "between", "long"])
def test_r6_an_interrupted_rank_releases_everything(state, number):
    """Ctrl-C or SIGTERM in any state ends that rank's call at once, and the calls of the others; all of them release
    their threads, descriptors, mappings and files."""
    with starter(3) as started:

        def interrupt(pids):
            started.wait()
            time.sleep(0.25)
            os.kill(pids[1], number)

        began = time.monotonic()
        found = ranks(3, interrupted, started, state, begun=interrupt)
    assert time.monotonic() - began < 6
    assert found[1][0][0] == ("KeyboardInterrupt" if number == signal.SIGINT else "SystemExit")
    for rank in (0, 2):
        kind, text, lost = found[rank][0]
        assert (kind, lost) == ("PeerLostError", (1,)), text
        # A long call is interrupted while it waits, or it completes, and the rank leaves before the next call.
        how = {"waiting": "was interrupted", "between": "left", "long": "(was interrupted|left)"}[state]
        assert re.match(f"rank 1 {how} during op ", text), text
    for rank, (_, same, seen) in enumerate(found):
        assert same, (rank, seen)


def interrupted_at_the_rendezvous(rendezvous):
    rendezvous.timeout_s = 1.5
    before, error = Resources(), None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rendezvous.rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        if rendezvous.rank == 0:
            time.sleep(0.6)
        member(rendezvous)
    except (KeyboardInterrupt, TimeoutError) as caught:
        error = type(caught).__name__
    gc.collect()
    return error, before == Resources(), (before, Resources())


def test_r6_an_interrupt_during_the_bootstrap():
    """A rank that is interrupted during the bootstrap releases everything, and so do the ranks that waited for it."""
    found = ranks(3, interrupted_at_the_rendezvous)
    assert [error for error, *_ in found] == ["TimeoutError", "KeyboardInterrupt", "TimeoutError"]
    for _, same, seen in found:
        assert same, seen


class Alarm(Exception):  # noqa: N818
    pass


def alarmed(rendezvous):
    """Make many groups; interrupt rank 0 at a random moment of its calls in each, and call again."""
    shared_memory.SLICE_S = 1e-6  # so that calls spend most of their time in Python
    outcomes = []
    delays = random.Random(rendezvous.rank)

    def ring(*_):
        raise Alarm

    if rendezvous.rank == 0:
        signal.signal(signal.SIGALRM, ring)
    for number in range(60):
        comm = member(rendezvous, 5, f"group {number}")
        again, delay = delays.random() < 0.7, delays.random() * 0.004 + 1e-5
        size = random.Random(number).choice([1, 1000, 100_000])
        x, wanted = np.empty(size, np.int64), comm.size * (comm.size + 1) // 2
        try:
            if comm.rank == 0:
                signal.setitimer(signal.ITIMER_REAL, delay)
            while True:
                x[:] = comm.rank + 1
                time.sleep(delays.random() * 2e-4 * comm.rank)
                comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
                assert (x == wanted).all(), "a wrong result"
        except Alarm:
            outcome = ("alarm", comm.memory.running)
            if again:
                try:
                    x[:] = comm.rank + 1
                    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
                    assert (x == wanted).all(), "a wrong result"
                except PeerLostError as error:
                    outcome = (str(error).split(" during")[0], *error.ranks)
        except PeerLostError as error:
            outcome = (str(error).split(" during")[0], *error.ranks)
        comm.close()
        outcomes.append(outcome)
    return outcomes


def test_r6_interrupts_at_any_moment():
    """At any moment of a call, an interrupt leads neither to a deadlock nor to a wrong result: the group either breaks
    with an error that names the interrupted rank, or can still be used."""
    first, *others = ranks(3, alarmed)
    assert len(first) == 60
    within, between = ("alarm", True), ("alarm", False)
    assert set(first) <= {within, between, ("rank 0 was interrupted", 0)}
    assert first.count(between) < 50, "few interrupts were during a call"
    for other in others:
        assert set(other) <= {("rank 0 was interrupted", 0), ("rank 0 left", 0)}


def twice(rendezvous):
    """Interrupt rank 0 in a call, and again before it can abort the group; then it continues."""
    comm = member(rendezvous, 8)
    if comm.rank == 0:

        def ring(*_):
            raise Alarm

        def slowly(_):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            time.sleep(5)

        signal.signal(signal.SIGALRM, ring)
        comm._interrupted = slowly
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with contextlib.suppress(Alarm):
            comm.barrier()
        del comm._interrupted
    began = Moment()
    if comm.rank == 1:
        time.sleep(0.5)
    try:
        while True:
            comm.barrier()
    except PeerLostError as error:
        caught = str(error), Moment().seconds_since(began)
    if comm.rank == 0:
        time.sleep(3)  # so that the others do not raise because it left
    comm.close()
    return caught


def test_r6_an_interrupt_during_an_abort():
    """A rank that was interrupted before it could abort the group does so at once in its next call."""
    found = ranks(3, twice)
    assert {text.split(" during")[0] for text, _ in found} == {"rank 0 was interrupted"}
    assert all(took < 2 for _, took in found), found


def slow_to_write(rendezvous):
    comm = member(rendezvous, 8)
    if comm.rank == 2:
        with mmap.mmap(comm.memory.fd, 0) as mapped:
            mapped[128] = 2 + 2
            time.sleep(1.6)
            reason = shared_memory.encoded(PeerLostError("the reason", [1]))
            mapped[132:136] = len(reason).to_bytes(4, "little")
            mapped[136 : 136 + len(reason)] = reason
            mapped[128] = 1
    with pytest.raises(PeerLostError, match="the reason") as error:
        comm.barrier()
    return error.value.ranks


def test_r3_a_rank_that_is_slow_to_write_the_abort_reason():
    """All ranks wait for the reason as long as the rank that writes it is alive, and raise it."""
    assert ranks(3, slow_to_write) == [(1,)] * 3


def killed_while_it_writes(rendezvous):
    comm = member(rendezvous, 8)
    if comm.rank == 2:
        with mmap.mmap(comm.memory.fd, 0) as mapped:
            mapped[128] = 2 + 2  # rank 2 is writing a reason (see shared_memory.hpp)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    try:
        comm.barrier()
    except PeerLostError as error:
        return str(error)


def test_r3_a_rank_killed_while_it_writes_the_abort_reason():
    """An incomplete reason is ignored: the others name the rank that is gone, and not themselves."""
    first, second, died = ranks(3, killed_while_it_writes, check=False)
    assert isinstance(died, Died)
    assert first == second
    assert first.startswith("rank 2 died during op 1, barrier")


# R10: many calls, many groups


def soak(rendezvous):
    communicator._CACHED_STAGES = 2000  # so that executables are removed from the cache, too
    comm = member(rendezvous)
    x = np.ones(5000, np.float32)
    draw = random.Random(3)
    sizes = [draw.randrange(1, 5000) for _ in range(3000)]

    def reductions(count):
        for k in range(count):
            part = x[: sizes[k % 3000]]
            comm.all_reduce(ReduceOp.MAX, memory(part), memory(part))

    reductions(6000)
    gc.collect()
    before, resources = resident_bytes(), Resources()
    reductions(10_000)
    gc.collect()
    after, same = resident_bytes(), Resources() == resources
    comm.close()
    return before, after, same


def test_r10_ten_thousand_reductions_leak_nothing():
    """10,000 reductions of 3,000 shapes change the memory of a rank by less than 1 %, and no other resource."""
    for before, after, same in ranks(2, soak, timeout_s=120):
        assert same
        assert abs(after - before) < before / 100, (before, after)


def many_shapes(rendezvous):
    comm = member(rendezvous)
    x = np.ones(PIECE_BYTES, np.float32)  # programs of 6 stages, and small ones
    highest = 0
    communicator._CACHED_STAGES = 100
    for k in range(200):
        part = x[k if k % 3 else -k - 1 :]
        comm.all_reduce(ReduceOp.MAX, memory(part), memory(part))
        highest = max(highest, sum(each.stages for each in comm._executables.values()))
    comm.close()
    return highest


def test_r10_the_cache_of_executables_is_bounded():
    """The cache is limited by the number of stages, not by the number of calls."""
    for highest in ranks(2, many_shapes):
        assert 50 < highest <= 100


def many_groups(rendezvous):
    def make(count, base):
        for k in range(count):
            comm = member(rendezvous, 20, f"group {base + k}")
            summed(comm, 10)
            if k % 2:
                comm.close()
            else:
                comm.barrier()  # so that no rank leaves before the others have finished
                comm.close()

    make(20, 0)
    gc.collect()
    before, resources = resident_bytes(), Resources()
    make(200, 20)
    gc.collect()
    return resources == Resources(), before, resident_bytes()


def test_r10_two_hundred_groups_leave_nothing():
    """200 groups that are made and closed release all descriptors, mappings, threads and memory."""
    for same, before, after in ranks(2, many_groups, timeout_s=120):
        assert same
        assert after - before < max(before / 50, 1 << 20), (before, after)


def used_after(rendezvous):
    before = Resources()
    comm = member(rendezvous)
    threads = threading.active_count()
    assert before != Resources()
    comm.close()
    assert before == Resources()
    with pytest.raises(ContextError, match='group "world" is closed'):
        comm.barrier()
    return threads


def test_a_closed_group_has_no_resources():
    """A group on one host has no thread of its own; once closed, it has no memory and no descriptor."""
    assert ranks(2, used_after) == [1, 1]
