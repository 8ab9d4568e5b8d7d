"""Ranks of one host die or stop: errors that name them, warnings, timeouts, and dumps."""

import json
import mmap
import os
import random
import re
import signal
import time
import traceback

import numpy as np
import pytest
from members import Warnings, member, memory, starter, summed
from ranks import Died, ranks

from crossreduce.errors import CollectiveTimeout, PeerLostError, encoded
from crossreduce.observe import flight_recorder
from crossreduce.ops import ReduceOp
from crossreduce.ranks.intra_host import programs

pytestmark = pytest.mark.usefixtures("dump_directory")


def until_lost(rendezvous, started, seed):
    """Make random calls, the same on all ranks, until one fails. Return the error's text and ranks."""
    comm, draw = member(rendezvous, 20), random.Random(seed)
    sizes = [16 << 20] if seed % 3 == 0 else [10, 5000, 300_000, 4_000_000]
    started.ready()
    try:
        while True:
            x = np.ones(draw.choice(sizes), np.float32)
            kind = draw.randrange(4)
            if kind == 0:
                comm.broadcast(memory(x), draw.randrange(comm.size))
            elif kind == 1:
                comm.barrier()
            else:
                comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
                assert (x == comm.size).all()
    except PeerLostError as error:
        with pytest.raises(PeerLostError, match=re.escape(str(error))):
            comm.barrier()
        comm.close()
        return str(error), error.ranks


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 30), marks=pytest.mark.system)])
def test_a_killed_rank_is_named(seeds):
    """At whatever moment a rank is killed, all others raise the same PeerLostError before the timeout. It names the
    killed rank. Their next call raises it again."""
    for seed in seeds:
        draw = random.Random(seed)
        n = draw.choice([2, 3, 4])
        victim = draw.randrange(n)
        with starter(n) as started:

            def kill(pids, draw=draw, victim=victim, started=started):
                started.wait()
                time.sleep(draw.random() * 0.12)
                os.kill(pids[victim], signal.SIGKILL)

            found = ranks(n, until_lost, started, seed, check=False, begun=kill)
        assert isinstance(found.pop(victim), Died)
        ((text, lost),) = set(found)
        assert text.startswith(f"rank {victim} died during op "), seed
        assert lost == (victim,), seed


def dies_between(rendezvous, when):
    comm = member(rendezvous, 20)
    if when == "before" and comm.rank == 1:
        if os.fork() == 0:  # the child keeps running, with the descriptors that it inherited
            time.sleep(1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    summed(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    comm.close()
    return "closed"


def test_before_the_first_call_and_after_the_last():
    """If a rank dies before its first call, errors name it, even if a child of it still runs. If a rank dies after the
    last call, no other rank is affected."""
    first, _, third = ranks(3, dies_between, "before", check=False)
    assert [(type(each), each.ranks) for each in (first, third)] == [(PeerLostError, (1,))] * 2
    first, _, third = ranks(3, dies_between, "after", check=False)
    assert first == third == "closed"


def stopped(rendezvous, started):
    """Make calls until one times out. Return the error's text and ranks, and the warnings."""
    comm, kept = member(rendezvous, 1.5), Warnings()
    comm.detector.warn_s = 0.3
    for _ in range(3):
        summed(comm)
    started.ready()
    try:
        while True:
            summed(comm, 10)
    except CollectiveTimeout as error:
        shown = traceback.format_exc()
        with pytest.raises(CollectiveTimeout, match=re.escape(str(error))):
            comm.barrier()
        assert shown.count("Traceback (most recent call last)") == 1, "the traceback shows an internal exception, too"
        return str(error), error.ranks, kept.texts


def test_a_rank_that_stops_beyond_the_timeout(dump_directory):
    """If a rank stops for longer than the timeout, all others log a warning and raise a CollectiveTimeout, which both
    name the rank. They write dumps of all ranks' last calls. When the rank continues, it raises the same error."""
    with starter(4) as started:

        def pause(pids):
            started.wait()
            time.sleep(0.2)
            os.kill(pids[2], signal.SIGSTOP)
            while not all((dump_directory / f"rank{rank}.json").exists() for rank in (0, 1, 3)):
                time.sleep(0.05)
            os.kill(pids[2], signal.SIGCONT)

        found = ranks(4, stopped, started, begun=pause)
    ((text, late),) = {(text, late) for text, late, _ in found}
    assert late == (2,)
    assert re.match(r"rank 2 did not complete op .*, within the timeout of 1\.5 s\. The group cannot be used", text)
    for rank in (0, 1, 3):
        (warning,) = (one for one in found[rank][2] if " s for rank 2 in op " in one)
        assert warning.startswith(f"rank {rank}: waited ")
        assert "all_reduce sum int64[10]" in warning
    read = flight_recorder.read(dump_directory)
    assert ([dump.rank for dump in read.dumps], read.problems) == ([0, 1, 2, 3], ())
    for dump in read.dumps:
        assert dump.cause == text.replace(f"crossreduce doctor {dump_directory}", "crossreduce doctor DIR") != text
        written = json.loads((dump_directory / f"rank{dump.rank}.json").read_text())["histories"]
        assert [history["rank"] for history in written] == [0, 1, 2, 3]
        ops = dump.histories[0].ops
        assert [op.sequence for op in ops] == list(range(ops[-1].sequence - len(ops) + 1, ops[-1].sequence + 1))
        assert 4 <= len(ops) <= 32
        assert ops[-1].ended_s is None


def slow(rendezvous):
    """Make a call of more than 800 stages. Rank 1 pauses after each 200 stages, for more than the timeout in all."""
    programs.PIECE_BYTES = 1 << 11
    comm = member(rendezvous)
    summed(comm, 2 << 20 >> 3)  # compiles the program, which takes a while
    comm.timeout_s = 0.8
    begin = comm.memory.begin

    def slowly(program, addresses, text, until):
        begin(program, addresses, text, 200)
        for stage in (400, 600, 800, until):
            time.sleep(0.3)
            outcome = comm.memory.advance(stage)
        return outcome

    if comm.rank == 1:
        comm.memory.begin = slowly
    summed(comm, 2 << 20 >> 3)
    comm.close()


def test_a_call_that_progresses_does_not_time_out():
    """The timeout applies to the wait at one barrier, not to the whole call."""
    ranks(2, slow)


def slow_to_write(rendezvous, is_killed):
    """Let rank 2 begin to write the reason of an abort. Then it completes the reason late, or is killed before."""
    comm = member(rendezvous, 8)
    if comm.rank == 2:
        with mmap.mmap(comm.memory.fd, 0) as mapped:
            mapped[0] = 2 + 2  # 2 + rank: rank 2 is writing a reason (see shared_memory.hpp)
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1)
            reason = encoded(PeerLostError("the reason", [1]))
            mapped[4:8] = len(reason).to_bytes(4, "little")
            mapped[8 : 8 + len(reason)] = reason
            mapped[0] = 1
    time.sleep(0.2)
    with pytest.raises(PeerLostError, match=r"the reason|rank 2 died during op 1, barrier") as error:
        comm.barrier()
    return str(error.value)


def test_a_rank_that_is_slow_to_write_the_abort_reason():
    """If a rank aborts the group, all ranks wait until it has written the reason, and raise it. If the rank dies
    before, their errors name the dead rank."""
    assert ranks(3, slow_to_write, False) == ["the reason"] * 3
    first, second, died = ranks(3, slow_to_write, True, check=False)
    assert isinstance(died, Died)
    assert first == second
    assert first.startswith("rank 2 died")


def leaves_after_its_last_call(rendezvous):
    comm = member(rendezvous)
    summed(comm)
    missing = comm.memory.missing

    def slow_missing():
        found = missing()
        time.sleep(0.5)
        return found

    if comm.rank == 0:
        comm.memory.missing = slow_missing
    else:
        time.sleep(0.3)
    summed(comm)
    comm.close()


def test_a_rank_that_leaves_after_a_call_is_not_lost_in_it():
    """If a rank arrives and leaves while another rank looks for missing ranks, the call succeeds."""
    ranks(2, leaves_after_its_last_call)
