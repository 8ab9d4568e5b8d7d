"""The store that a rank serves to others, the connections to it, and how ranks give up connections by means of it."""

import os
import select
import signal
import socket
import threading
import time
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from kinds_of_groups import wait_until, wait_until_stopped
from ranks import ranks

from crossreduce.errors import PeerLostError
from crossreduce.ranks.connections import listener
from crossreduce.ranks.connections.channel import AuthenticatedChannel
from crossreduce.ranks.connections.listener import MOST_UNKNOWN, Listener
from crossreduce.ranks.connections.rendezvous import ConnectionStore, StoreRendezvous
from crossreduce.ranks.connections.store import StoreClient, StorePart
from crossreduce.ranks.transports import tcp
from crossreduce.torch.rendezvous import PeerStore

KEY = b"of the tests    "


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_does_not_end_the_store_of_its_parent():
    """If a forked process deletes its copy of the store, the parent's connections and server keep running."""
    served = PeerStore(KEY)
    connected = PeerStore(KEY, "127.0.0.1", served.port)
    connected.set("first", b"1")
    if (child := os.fork()) == 0:
        try:
            del served
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    connected.set("second", b"2")
    assert PeerStore(KEY, "127.0.0.1", served.port).get("second") == b"2"


def test_compare_set_returns_the_value_as_a_tcp_store_does():
    """``compare_set`` of a PeerStore and of torch's TCPStore return the same values. If a key has no value although one
    was expected, they return the expected value and store nothing."""
    stores = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), PeerStore(KEY)
    for store in (dist.PrefixStore("prefix", each) for each in stores):
        found = [store.compare_set("key", *pair) for pair in (("a", "b"), ("", "c"), ("d", "e"), ("c", "f"))]
        assert found == [b"a", b"c", b"c", b"f"], store  # for each pair: expected, desired


def stalls(rendezvous):
    if rendezvous.rank == 0:
        served = StoreClient(KEY)
        StoreRendezvous(StorePart(served, "group/"), 0, 2, 20).record_leaving()
        rendezvous.all_gather(f"{os.getpid()} {served.port}".encode())
        rendezvous.all_gather(b"")
        return
    process, port = map(int, rendezvous.all_gather(b"")[0].split())
    meeting = StoreRendezvous(StorePart(StoreClient(KEY, "127.0.0.1", port), "group/"), 1, 2, 20)
    assert meeting.has_left(0)
    os.kill(process, signal.SIGSTOP)
    wait_until_stopped(process)
    assert not meeting.has_left(0)  # as far as it knows
    assert meeting.publish_abort(b"reason") == b"reason"
    assert meeting.abort_cause() is None
    os.kill(process, signal.SIGCONT)
    wait_until(lambda: meeting.has_left(0))
    assert meeting.abort_cause() == b"reason"
    rendezvous.all_gather(b"")


def test_a_store_that_has_stalled_is_used_again():
    """If a store does not answer a query in time, later queries do not wait for it until its late answer arrives. The
    reason of an abort is stored then."""
    ranks(2, stalls)


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_an_answer_of_which_a_part_was_late_is_read_later(cut):
    """If the time for an answer ends when a part of it has arrived, the next attempt reads all of it."""
    (near, far), (written, read) = socket.socketpair(), socket.socketpair()
    with near, far, written, read:
        sender = AuthenticatedChannel(written, KEY, b"numbers", b"a", b"b")
        receiver = AuthenticatedChannel(near, KEY, b"numbers", b"b", b"a")
        for content in ({"answer": ["x" * 50]}, {"answer": None}):
            sender.send(content)
            message = read.recv(1 << 16)
            far.sendall(message[:cut])
            with pytest.raises(TimeoutError, match=r"^$|timed out"):
                receiver.receive(time.monotonic() + 0.05)
            far.sendall(message[cut:])
            assert receiver.receive(time.monotonic() + 20) == content


def test_a_value_that_is_deleted_while_it_is_read_is_waited_for(monkeypatch):
    """If a value is deleted after ``get`` has waited for it, but before it is read, ``get`` waits for the next one."""
    store, later = PeerStore(KEY), iter([b"2"])
    wait = store.wait

    def wait_and_delete(keys):
        wait(keys)
        for value in later:  # only at the first call
            store.delete_key("key")
            threading.Timer(0.05, store.set, ("key", value)).start()

    monkeypatch.setattr(store, "wait", wait_and_delete)
    threading.Timer(0.05, store.set, ("key", b"1")).start()
    assert store.get("key") == b"2"
    assert store.multi_get(["key", "key"]) == [b"2", b"2"]


def test_a_program_that_sends_nothing_is_dropped(monkeypatch):
    """The connection of a program that sends no request for some time is closed. A rank's connection stays open."""
    monkeypatch.setattr(listener, "UNKNOWN_S", 0.3)
    served = StoreClient(b"key")
    rank = StoreClient(b"key", "127.0.0.1", served.port)
    rank.set("known", b"1")
    with socket.create_connection(("127.0.0.1", served.port), 5) as stranger:
        assert stranger.recv(1) == b""
    assert rank.get("known") == b"1"
    served.close()


def test_silent_programs_hold_a_limited_number_of_connections(monkeypatch):
    """If more than ``MOST_UNKNOWN`` programs, plus one per rank, have sent no request, a store closes one of their
    connections. The connections of ranks stay open."""
    monkeypatch.setattr(listener, "UNKNOWN_S", 60)
    served = StoreClient(b"key", ranks=3)
    address = "127.0.0.1", served.port
    rank = StoreClient(b"key", *address)
    rank.set("known", b"1")
    with ExitStack() as stack:
        number = MOST_UNKNOWN + 3 + 1  # one too many
        strangers = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(number)]
        assert len(select.select(strangers, [], [], 20)[0]) == 1
        assert rank.get("known") == b"1"
        assert len(select.select(strangers, [], [], 0)[0]) == 1
    served.close()


def test_watch_ends_a_wait_for_a_process_that_does_not_answer():
    """If the process that serves the store does not answer, a request ends as soon as ``watch`` raises an error."""

    never, lost = threading.Event(), Mock(side_effect=PeerLostError("the rank that serves the store is lost", (0,)))
    stopped = Listener(KEY, lambda channel: never.wait())
    store = StoreClient(KEY, "127.0.0.1", stopped.port, lost)
    with pytest.raises(PeerLostError, match="is lost"):
        store.get("key")
    never.set()
    store.close()
    stopped.close()


def test_many_values_are_read_at_once():
    """``multi_get`` returns all values, also if they do not fit into one message."""
    served = StoreClient(b"key")
    other = StoreClient(b"key", "127.0.0.1", served.port)
    keys = [str(number) for number in range(600)]
    for key in keys:
        served.set(key, key.encode() * 1000)
    assert other.multi_get(keys) == [key.encode() * 1000 for key in keys]
    other.close()
    served.close()


def test_a_rank_gives_up_only_ranks_that_also_miss_it():
    """Two ranks give each other up if both have published that they have no connection to the other. ``stalled`` takes
    the ranks without a connection, and returns those to give up."""
    store, cancelled = dist.HashStore(), threading.Event()
    first, second, third = (ConnectionStore(store, rank, cancelled) for rank in range(3))
    assert first.stalled([1, 2]) == []
    assert second.stalled([2]) == []
    assert third.stalled([0, 1]) == [0, 1]
    assert first.stalled([1, 2]) == [2]
    assert second.stalled([0, 2]) == [0, 2]


def test_only_ranks_beyond_a_lost_link_are_given_up_soon():
    """Two ranks of an earlier group that answer each other only through a third host give each other up at once. Other
    ranks do so after the usual time, since their connections may only be slow."""
    store, cancelled, beyond = dist.HashStore(), threading.Event(), {(0, 2), (2, 0)}
    made = [
        ConnectionStore(store, rank, cancelled, "", lambda peer, rank=rank: (rank, peer) in beyond) for rank in range(3)
    ]
    assert made[0].stalled([1, 2]) == []
    assert made[1].stalled([0, 2]) == []
    assert made[2].stalled([0, 1]) == [0]
    assert made[0].stalled([1, 2]) == [2]
    for one in made:
        one._began -= tcp.PATIENCE_S  # as if the usual time had passed
    assert made[1].stalled([0, 2]) == []
    assert made[2].stalled([0, 1]) == [0, 1]


def test_a_rank_that_was_given_up_learns_it_later():
    """A rank that another rank has given up gives up this rank, too, also if it notices this much later. The other rank
    still publishes this, although it has gone on to wait for further ranks."""
    store, cancelled, beyond = dist.HashStore(), threading.Event(), True
    first = ConnectionStore(store, 0, cancelled, "", lambda peer: peer == 1)
    second = ConnectionStore(store, 1, cancelled, "", lambda _: beyond)
    assert second.stalled([0]) == []
    assert first.stalled([1, 2]) == [1]
    assert first.stalled([2]) == []
    beyond = False
    assert second.stalled([0]) == [0]
