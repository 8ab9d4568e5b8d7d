"""Several sockets between two hosts, and aborts that must reach ranks which wait for messages."""

import ctypes
import os
import signal
import socket
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kinds_of_groups import ranks_at, wait_until, wait_until_stopped
from ranks import ranks

import crossreduce.torch  # noqa: F401 - registers the backend
from crossreduce import PeerLostError
from crossreduce.kernels import native
from crossreduce.torch.rendezvous import TorchRendezvous

HEADER = struct.Struct("<QQQII")  # tag, bytes of the message, offset and number of the part, bytes that follow
LARGE, HALF = 4 << 20, 1000


def part(tag, nbytes, offset, data):
    return HEADER.pack(tag, nbytes, offset, 0, len(data)) + data


@pytest.mark.parametrize("blocked", [0, 1])
def test_a_socket_that_waits_and_ends_does_not_end_the_other_one(blocked):
    """A peer sends a message of two parts over two sockets, then one that is too large to be read before it is expected
    and leaves. Socket ``blocked`` ends before the first message has arrived over the other one: the peer is not lost.
    When both have ended, the large message, of which the peer has sent nothing, fails."""
    ends = [socket.socketpair() for _ in range(2)]
    connections = native().Connections([1], [own.detach() for own, _ in ends], 120.0, False)
    got, room = (ctypes.c_char * (2 * HALF))(), (ctypes.c_char * LARGE)()
    message = connections.receive(ctypes.addressof(got), 2 * HALF, 1, 1)
    sent = [HEADER.pack(1, 2 * HALF, k * HALF, 0, HALF) + bytes([5 + k]) * HALF for k in range(2)]
    large = HEADER.pack(2, LARGE, blocked * LARGE // 2, 0, LARGE // 2)
    ends[0][1].sendall(sent[0][:-10])  # its end is missing
    assert message.poll(0.05) is False
    waiting, late = ends[blocked][1], ends[1 - blocked][1]
    waiting.sendall((sent[1] if blocked else sent[0][-10:]) + large)
    waiting.close()
    for _ in range(3):
        assert message.poll(0.05) is False
    late.sendall(sent[0][-10:] if blocked else sent[1])
    assert message.poll(1.0) is True
    assert got.raw == bytes([5]) * HALF + bytes([6]) * HALF
    late.close()
    expected = connections.receive(ctypes.addressof(room), LARGE, 1, 2)
    with pytest.raises(ConnectionError, match="lost"):
        expected.wait(10)
    connections.close()


@pytest.mark.parametrize("sends", [False, True])
def test_the_timeout_of_a_message_begins_again_when_bytes_have_moved(sends):
    """A large message may take longer than the timeout, if its bytes move. If they stop, the wait ends."""
    near, far = socket.socketpair()
    connections, memory = native().Connections([1], [near.detach()], 120.0, False), (ctypes.c_char * LARGE)()
    begin = connections.send if sends else connections.receive
    message, later = (begin(ctypes.addressof(memory), LARGE, 1, 1) for _ in range(2))

    def move():
        for k in range(4):
            time.sleep(1)
            if sends:
                far.recv(LARGE // 4 + (HEADER.size if k == 3 else 0), socket.MSG_WAITALL)
            else:
                far.sendall((HEADER.pack(1, LARGE, 0, 0, 0) if k == 0 else b"") + bytes(LARGE // 4))

    mover = threading.Thread(target=move, daemon=True)
    mover.start()
    message.wait(2.5)
    with pytest.raises(TimeoutError, match="in time"):
        later.wait(0.5)
    connections.close()
    far.close()
    mover.join()


def served(rendezvous):
    """Return a store that rank 3, which is not in the group, serves, and the process of that rank."""
    if rendezvous.rank == 3:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rendezvous.all_gather(f"{os.getpid()} {store.port}".encode())
        return store, os.getpid()
    process, port = map(int, rendezvous.all_gather(b"")[3].split())
    return dist.TCPStore("127.0.0.1", port, is_master=False), process


def waits(rendezvous, folder, source, stalls=False):
    rank, noticed, store = rendezvous.rank, folder / "noticed", served(rendezvous) if stalls else ()
    if rank < 3:
        group = {"store": store[0]} if stalls else {"init_method": f"file://{folder / 'store'}"}
        dist.init_process_group("crossreduce", rank=rank, world_size=3, timeout=timedelta(seconds=600), **group)
    if rank == 2:
        time.sleep(0.5)
        if stalls:
            os.kill(store[1], signal.SIGSTOP)
            time.sleep(4)  # longer than a query of the store may take
            os.kill(store[1], signal.SIGCONT)
        dist.group.WORLD.abort()
    elif rank in (1, 3):  # it makes no call, and so learns of nothing
        wait_until(noticed.exists)  # long before the timeout, at which the other rank would ask the rendezvous
    else:
        with pytest.raises(PeerLostError, match=r"rank 2 left") as error:
            dist.recv(torch.zeros(1), source)
        assert error.value.ranks == (2,)
        noticed.touch()


def ends_at_the_rendezvous(rendezvous, folder):
    rank = rendezvous.rank
    where, timeout = f"file://{folder / 'store'}", timedelta(seconds=600)
    dist.init_process_group("crossreduce", where, rank=rank, world_size=3, timeout=timeout)
    if rank == 2:
        dist.group.WORLD.communicator.rendezvous.all_gather = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as error:
        dist.all_reduce(torch.ones(3 + rank))
    return error.value.ranks


@pytest.mark.parametrize("place", ["two_hosts", "three_hosts", "ucx"])
def test_ranks_whose_calls_differ_notice_a_death(tmp_path, place):
    """If a rank dies while all exchange the texts of calls that differ, the others name it long before the timeout."""
    found = ranks_at(place, 3, ends_at_the_rendezvous, tmp_path, check=False)
    assert found[:2] == [(2,)] * 2


@pytest.mark.parametrize("place", ["three_hosts", "ucx", "plug_in"])
@pytest.mark.parametrize("source", [1, None])
def test_an_abort_reaches_ranks_of_other_hosts_that_wait_for_messages(tmp_path, source, place):
    """If a rank aborts the group, a rank of another host that waits for a message of a third one raises the same error,
    long before its timeout, although the third one does not notice the abort."""
    ranks_at(place, 3, waits, tmp_path, source)


def test_an_abort_is_noticed_after_the_store_has_stalled(tmp_path):
    """If torch's store does not answer a query in time, but answers later, ranks that wait still learn of an abort."""
    ranks(4, waits, tmp_path, 1, True, environment=[{"CROSSREDUCE_HOST": host} for host in "ABCD"])


def stop(process):
    os.kill(process, signal.SIGSTOP)
    wait_until_stopped(process)


def asks_a_store(rendezvous, ask):
    """Let rank 1 serve torch's store, and stop. Rank 0 calls ``ask`` with a rendezvous there and that process."""
    if rendezvous.rank == 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rendezvous.all_gather(f"{os.getpid()} {store.port}".encode())
        time.sleep(600)  # until it is killed
    process, port = map(int, rendezvous.all_gather(b"")[1].split())
    try:
        store = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", port, is_master=False))
        asking = TorchRendezvous(store, 0, 1, 600.0)
        assert asking.abort_cause() is None
        stop(process)
        ask(asking, process)
    finally:
        os.kill(process, signal.SIGKILL)


def ask_late(asking, process):
    asking.abort_cause()  # times out
    assert asking._unreachable is not None
    os.kill(process, signal.SIGCONT)
    wait_until(asking._limited.connection._unread)
    stop(process)
    query = threading.Thread(target=asking.abort_cause, daemon=True)
    query.start()
    query.join(20)
    assert not query.is_alive()
    os.kill(process, signal.SIGCONT)
    wait_until(lambda: asking.abort_cause() is None and asking._unreachable is None)


def test_a_store_that_stalls_again_is_not_waited_for():
    """If a store answers late, and stalls again at once, a query ends soon. The store is used again when it answers."""
    found = ranks(2, asks_a_store, ask_late, check=False)
    assert found[0] is None


def ask_at_the_end(asking, process):
    threading.Timer(0.5, os.kill, (process, signal.SIGKILL)).start()
    asking.abort_cause()
    assert isinstance(asking._unreachable, ConnectionError)


def test_no_stack_is_printed_if_the_store_ends_during_a_query(capfd):
    """If the process of torch's store dies before it has answered, torch's own client prints a stack of functions."""
    found = ranks(2, asks_a_store, ask_at_the_end, check=False)
    assert found[0] is None
    assert "frame #" not in capfd.readouterr().err
