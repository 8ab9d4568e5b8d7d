"""Ctrl-C and other signals during calls of the ranks of one host."""

import contextlib
import gc
import os
import random
import signal
import sys
import time

import pytest
from members import Resources, member, starter, summed
from ranks import ranks

from crossreduce.errors import PeerLostError
from crossreduce.ranks.intra_host import shared_memory


def interrupted(rendezvous, started, state):
    """Call a barrier. Rank 1 is interrupted in it ("waiting") or before it ("between"). Return the error."""
    before, comm = Resources(), None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        comm = member(rendezvous, 60)
        started.ready()
        if state == "waiting" and comm.rank == 0:
            time.sleep(0.6)  # meanwhile the others wait in the barrier
        if state == "between" and comm.rank == 1:
            time.sleep(5)
        comm.barrier()
    except (KeyboardInterrupt, SystemExit, PeerLostError) as caught:
        error = type(caught).__name__, str(caught), getattr(caught, "ranks", None)
    comm.close()
    del comm
    gc.collect()
    assert before == Resources()
    return error


@pytest.mark.parametrize(("state", "number"), [("waiting", signal.SIGINT), ("between", signal.SIGTERM)])
def test_an_interrupted_rank_releases_everything(state, number):
    """Ctrl-C or SIGTERM in or between calls makes a rank leave, and ends the others' calls before the timeout. All of
    them release their threads, descriptors, mappings and files."""
    with starter(3) as started:

        def interrupt(pids):
            started.wait()
            time.sleep(0.25)
            os.kill(pids[1], number)

        found = ranks(3, interrupted, started, state, begun=interrupt)
    assert found[1][0] == ("KeyboardInterrupt" if number == signal.SIGINT else "SystemExit")
    how = {"waiting": "was interrupted", "between": "left"}[state]
    for kind, text, lost in (found[0], found[2]):
        assert (kind, lost) == ("PeerLostError", (1,)), text
        assert text.startswith(f"rank 1 {how} during op "), text


def interrupted_at_the_rendezvous(rendezvous):
    before, error = Resources(), None
    if rendezvous.rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
    time.sleep(0 if rendezvous.rank else 0.6)
    try:
        member(rendezvous)
    except (KeyboardInterrupt, PeerLostError) as caught:
        error = type(caught).__name__
    gc.collect()
    assert before == Resources()
    return error


def test_an_interrupt_during_the_bootstrap():
    """If a rank is interrupted during the bootstrap, the others raise errors at once, and all release everything."""
    assert ranks(3, interrupted_at_the_rendezvous) == ["PeerLostError", "KeyboardInterrupt", "PeerLostError"]


class Alarm(Exception):  # noqa: N818
    pass


def alarmed(rendezvous):
    """Make 20 groups, and interrupt rank 0 of each at a random moment. After most interrupts rank 0 calls again."""
    shared_memory.SLICE_S = 1e-6  # so that calls spend most of their time in Python
    outcomes, rung = [], []
    delays = random.Random(rendezvous.rank)

    def ring(*_):
        rung.append(True)
        raise Alarm

    signal.signal(signal.SIGALRM, ring)
    for number in range(20):
        comm = member(rendezvous, 5, f"group {number}")
        again, delay = delays.random() < 0.7, delays.random() * 0.004 + 1e-5
        size, pause_s = random.Random(number).choice([1, 1000, 100_000]), (2e-4, 2e-3)[number % 2]
        rung.clear()
        try:
            with contextlib.suppress(Alarm):
                if comm.rank == 0:
                    signal.setitimer(signal.ITIMER_REAL, delay)
                while not rung:  # repeat, since Python ignores an alarm in a callback of a weak reference
                    time.sleep(delays.random() * pause_s * comm.rank)
                    summed(comm, size)
            outcome = ("alarm", comm.memory.running)
            if again:
                summed(comm, size)
        except PeerLostError as error:
            outcome = (str(error).split(" during")[0], *error.ranks)
        comm.close()
        outcomes.append(outcome)
    return outcomes


def test_interrupts_at_any_moment():
    """After an interrupt at any moment of a call, the group either breaks with an error that names the interrupted
    rank, or can still be used. There is neither a deadlock nor a wrong result."""
    first, *others = ranks(3, alarmed)
    between = ("alarm", False)
    assert set(first) <= {("alarm", True), between, ("rank 0 was interrupted", 0)}
    assert first.count(between) < 19, "few interrupts were during a call"
    for other in others:
        assert set(other) <= {("rank 0 was interrupted", 0), ("rank 0 left", 0)}
