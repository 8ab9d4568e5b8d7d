"""The laws that every ``ranks.transports.base.Transport`` must obey. All ranks of a group run each law."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import numpy as np

from crossreduce.errors import PeerLostError, encoded


def content(src, dst, tag, number, nbytes):
    return np.random.default_rng([src, dst, tag, number]).integers(0, 256, nbytes).astype(np.uint8)


SIZES = (1, 0, 7, 1 << 16, 3 << 20, 64)


def messages_arrive_in_order(transport, rendezvous):
    """Messages with the same tag between two ranks arrive in order and unchanged, mixed with other messages."""
    me, others = rendezvous.rank, [rank for rank in range(rendezvous.size) if rank != rendezvous.rank]
    messages = [*itertools.product(others, (5, 0), enumerate(SIZES))]
    for steps in (("send", "receive"), ("receive", "send")):
        received, sent, pending = [], [], []
        for step in steps:
            for other, tag, (number, nbytes) in messages:
                if step == "send":
                    sent.append(content(me, other, tag, number, nbytes))
                    pending.append(transport.send(sent[-1].ctypes.data, nbytes, other, tag))
                else:
                    room = nbytes + number % 2 * 5  # a message may be shorter than the memory for it
                    buffer = np.zeros(room, np.uint8)
                    received.append((buffer[:nbytes], content(other, me, tag, number, nbytes)))
                    pending.append(transport.receive(buffer.ctypes.data, room, other, tag))
            rendezvous.all_gather(b"")
        for each in reversed(pending):
            each.wait(100.0)
        assert all(buffer.tobytes() == right.tobytes() for buffer, right in received)


def raises(kind, call, *args):
    """Check that a call raises an error, and return it. (This does not use pytest, as mpiexec runs these laws, too.)"""
    try:
        call(*args)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def a_message_that_is_not_sent_times_out(transport, rendezvous):
    """A wait for a message that no rank sends raises TimeoutError after the timeout."""
    if rendezvous.rank == 0:
        buffer = np.zeros(100, np.uint8)
        raises(TimeoutError, transport.receive(buffer.ctypes.data, 100, 1, 0).wait, 0.3)
        assert not buffer.any()
    rendezvous.all_gather(b"")


def an_abort_ends_waits(transport, rendezvous):
    """An abort in another thread soon ends this rank's waits. Later messages fail. A second abort has no effect."""
    if rendezvous.rank == 0:
        buffer = np.zeros(100, np.uint8)
        threading.Timer(0.2, transport.abort).start()
        raises(ConnectionError, transport.receive(buffer.ctypes.data, 100, 1, 0).wait, 100.0)
        for message in (transport.send, transport.receive):
            raises(ConnectionError, lambda message=message: message(buffer.ctypes.data, 100, 1, 0).wait(100.0))
        transport.abort()
    rendezvous.all_gather(b"")


def an_abort_is_noticed_by_other_ranks(transport, rendezvous):
    """If a rank publishes a reason and aborts, waits for its messages soon raise a ConnectionError on other ranks, and
    the rendezvous raises the reason on all ranks."""
    reason = encoded(PeerLostError("the reason", [0]))
    if rendezvous.rank == 0:
        time.sleep(0.2)
        rendezvous.publish_abort(reason)
        transport.abort()
    else:
        buffer = np.zeros(100, np.uint8)
        raises(ConnectionError, transport.receive(buffer.ctypes.data, 100, 0, 0).wait, 100.0)
        deadline = time.monotonic() + 100
        while rendezvous.abort_cause() is None:
            assert time.monotonic() < deadline, "the reason is not published"
            time.sleep(0.01)
        assert rendezvous.abort_cause() == reason
    error = raises(PeerLostError, rendezvous.all_gather, b"")
    assert (str(error), error.ranks) == ("the reason", (0,))


def messages_of_a_rank_that_has_left_arrive(transport, rendezvous):
    """What a rank has sent before it leaves arrives, also if the other rank expects it only later."""
    sent = [content(0, 1, 0, number, 5000) for number in range(3)]
    if rendezvous.rank == 0:
        for message in [transport.send(each.ctypes.data, each.nbytes, 1, 0) for each in sent]:
            message.wait(100.0)
        transport.close()
    if rendezvous.rank == 2:
        for _ in sent:
            time.sleep(0.15)
            transport.send(sent[0].ctypes.data, 1, 1, 0).wait(100.0)
    if rendezvous.rank == 1:
        for right in sent:
            buffer = np.zeros_like(right)
            transport.receive(buffer.ctypes.data, buffer.nbytes, 0, 0).wait(100.0)
            assert buffer.tobytes() == right.tobytes()
            transport.receive(buffer.ctypes.data, 1, 2, 0).wait(100.0)
        raises(ConnectionResetError, transport.receive(buffer.ctypes.data, buffer.nbytes, 0, 0).wait, 100.0)
    rendezvous.all_gather(b"")


def the_memory_of_a_failed_message_is_not_written(transport, rendezvous):
    """After a wait has failed, also while data arrive, nothing is written to the memory of the message."""
    buffer = np.full(1 << 27, 7, np.uint8)
    rendezvous.all_gather(b"")
    if rendezvous.rank == 0:
        with contextlib.suppress(ConnectionError, TimeoutError):
            transport.send(buffer.ctypes.data, buffer.nbytes, 1, 0).wait(100.0)
    if rendezvous.rank == 1:
        with contextlib.suppress(TimeoutError):  # not if this machine is quick
            transport.receive(buffer.ctypes.data, buffer.nbytes, 0, 0).wait(0.03)
        buffer[:] = 1
        raises(TimeoutError, transport.receive(buffer.ctypes.data, 1, 2, 0).wait, 0.3)
        assert (buffer == 1).all()
    rendezvous.all_gather(b"")


LAWS = (
    messages_arrive_in_order,
    a_message_that_is_not_sent_times_out,
    an_abort_ends_waits,
    an_abort_is_noticed_by_other_ranks,
)


# Of transports that begin with ``Links``
LAWS_OF_LINKS = (*LAWS, messages_of_a_rank_that_has_left_arrive, the_memory_of_a_failed_message_is_not_written)


def run_under_mpi():
    """Run the laws on all ranks of an MPI program."""
    from mpi4py import MPI

    from crossreduce.ranks.transports.mpi import MpiRendezvous, MpiTransport

    for law in LAWS:
        comm = MPI.COMM_WORLD.Dup()
        rendezvous = MpiRendezvous(comm, 30.0)
        transport = MpiTransport(comm, rendezvous.abort_cause)
        law(transport, rendezvous)
        transport.close()
        print(f"rank {rendezvous.rank} passed", flush=True)
