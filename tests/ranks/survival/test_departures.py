"""What a rank finds out from the end of a connection to a rank of another host, however that rank ends."""

import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest
from kinds_of_groups import wait_until

from crossreduce.ranks.agreement.departures import MOST_RANKS, Departures
from crossreduce.ranks.intra_host.registers import Decision

DECIDED = 4, Decision((0, 2), 1, True, 17)


@pytest.fixture
def pair():
    """Return the ``Departures`` of rank 0, which has connected to rank 1, and those of rank 1."""
    own, other = Departures(), Departures()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own._keep(1, socket.create_connection(listener.getsockname()))
        other.accept(0, listener.accept()[0])
    yield own, other
    own.close()
    other.close()


def found(own, number=5):
    """Return whether rank 1 has left without a decision of an agreement, and the decisions of it that rank 0 got."""
    decided = []
    registers = SimpleNamespace(decide=lambda *arguments: decided.append(arguments))
    return own.have_left([1], number, registers), decided


def found_at_the_end(own, number=5):
    wait_until(lambda: found(own, number)[0])
    return found(own, number)


def test_a_rank_that_leaves_had_not_gone_on(pair):
    """A rank that is alive, or that was never connected, has not left. One that leaves has not gone on."""
    own, other = pair
    assert found(own) == (False, [])
    assert not own.have_left([1, 2], 5, None)
    other.close()
    assert found_at_the_end(own) == (True, [])
    assert not own.have_left([1, 2], 5, None)


def test_a_decision_is_received_after_its_sender_was_killed():
    """Decisions are received although the sender was killed at once. The sender may have gone on with them, but not
    with one that it has not sent. They are kept, since they arrive only once."""
    own = Departures()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if not (sender := os.fork()):
            try:
                other = Departures()
                other.accept(0, listener.accept()[0])
                other.tell([0, 1], 5, DECIDED)
                other.tell([0], 6, DECIDED)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        own._keep(1, socket.create_connection(listener.getsockname()))
        os.waitpid(sender, 0)
    assert found_at_the_end(own, 7) == (True, [])
    for number in (5, 6):
        assert found(own, number) == (False, [(number, *DECIDED)])
    own.close()


def test_a_reset_proves_nothing(pair):
    """After a reset it is unknown whether the rank had gone on, however often this is read."""
    own, other = pair
    other._accepted[0][0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    other.close()
    time.sleep(0.05)
    assert [found(own) for _ in range(3)] == [(False, [])] * 3


def test_a_decision_that_cannot_be_sent_makes_the_end_a_reset(pair):
    """If a decision does not fit into a full connection, the connection does not end as if the rank had not gone on."""
    own, other = pair
    decided = 4, Decision(tuple(range(500)), 1, True, 17)
    for number in range(10_000):
        other.tell([0], number, decided)
        if other._accepted[0][0].getsockopt(socket.SOL_SOCKET, socket.SO_LINGER):
            break
    assert number < 9_999
    other.close()
    time.sleep(0.05)
    for _ in range(2):
        assert not own.have_left([1], number, SimpleNamespace(decide=lambda *_: None))


def test_many_decisions_fill_no_connection(pair):
    """A rank reads what others have sent whenever it goes on itself, and keeps the latest decisions."""
    own, other = pair
    for number in range(20_000):
        other.tell([0], number, DECIDED)
        own.tell([1], number, DECIDED)
    assert not other._accepted[0][0].getsockopt(socket.SOL_SOCKET, socket.SO_LINGER)
    assert found(own, number) == (False, [(number, *DECIDED)])
    assert len(own._lines[1]) < 1000


def test_a_connection_that_misses_decisions_is_refused(pair):
    """After a decision, and after it has left, a rank accepts no connection, whose end would prove nothing."""
    own, other = pair
    other.tell([0], 5, DECIDED)
    own.close()
    for closed in (other, own):
        with socket.socket() as connection, pytest.raises(ConnectionAbortedError, match="missed a decision"):
            closed.accept(0, connection)
    with pytest.raises(ValueError, match="closed"):
        own.tell([1], 5, DECIDED)


def test_a_rank_of_a_large_group_makes_no_connections():
    """In a large group a rank connects to none of the others, so it never knows that one has ended."""
    own = Departures()
    own.connect(dict.fromkeys(range(1, MOST_RANKS + 2)), "token", 0)
    assert found(own) == (False, [])


def test_a_forked_process_does_not_hold_the_connection(pair):
    """If a rank ends, others notice it although a process that it has forked lives on."""
    own, other = pair
    reader, writer = os.pipe()
    if not (forked := os.fork()):
        os.close(writer)
        os.read(reader, 1)  # until this process closes the pipe
        os._exit(0)
    other.close()
    assert found_at_the_end(own) == (True, [])
    os.close(writer)
    os.close(reader)
    os.waitpid(forked, 0)
