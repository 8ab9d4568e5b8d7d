"""The library's own connections obey the laws of ``transport_laws``, also if other programs connect to their ports."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import threading
import time

import numpy as np
import pytest
import transport_laws
from ranks import connected, ranks
from transport_laws import LAWS

from crossreduce.errors import PeerLostError
from crossreduce.ranks.transports import tcp
from crossreduce.ranks.transports.tcp import TcpTransport, connect


def test_connections_of_the_library_obey_the_laws():
    """Messages are ordered and unchanged, waits time out, and aborts end waits. ``test_mpi`` checks this for MPI."""

    def rank(rendezvous, law):
        transport = TcpTransport(connected(rendezvous))
        law(transport, rendezvous)
        with contextlib.suppress(PeerLostError):  # one of the laws aborts the group
            rendezvous.all_gather(b"")
        transport.close()

    for law in LAWS:
        ranks(3, rank, law)


def test_strangers_and_dead_addresses_do_not_disturb_connections():
    """If only the last of a rank's addresses works, the others connect to it. The rank ignores programs that connect to
    its port and send nothing, HTTP or wrong proofs."""

    def rank(rendezvous):
        payloads, kept = [], []

        def answer_wrongly(wrong):
            for other in [wrong.accept()[0] for _ in range(2)]:
                other.sendall(b"x" * 16)
                kept.append(other)

        def publish(payload):
            _, port, key = json.loads(payload)
            if rendezvous.rank == 0:
                # At the rank's port, no program listens at 127.0.0.4, and a program at 127.0.0.3 does not answer.
                wrong, silent = (socket.create_server((f"127.0.0.{k}", port)) for k in (2, 3))
                threading.Thread(target=answer_wrongly, args=(wrong,), daemon=True).start()
                kept.extend((wrong, silent))
                for guess in (b"",) * 100 + (b"GET / HTTP/1.0\r\n\r\n", b"\1\0\0\0" + bytes(16), b"x" * 20):
                    kept.append(socket.create_connection(("127.0.0.1", port)))
                    kept[-1].sendall(guess)
            addresses = [f"127.0.0.{k}" for k in (4, 3, 2, 1)]
            payloads.extend(rendezvous.all_gather(json.dumps([addresses, port, key]).encode()))

        cancelled, read = threading.Event(), payloads.__getitem__
        sockets = connect(rendezvous.rank, range(3), publish, read, cancelled, listen_at="127.0.0.1")
        transport = TcpTransport(sockets)
        transport_laws.messages_arrive_in_order(transport, rendezvous)
        transport.close()

    ranks(3, rank)


def test_a_rank_that_is_not_reached_is_named():
    """If rank 1 does not connect, the others time out with an error that names it. Only rank 2, which connects to rank
    1, has tried addresses, and names them."""

    def rank(rendezvous):
        if rendezvous.rank == 1:
            rendezvous.all_gather(json.dumps([["127.0.0.1"], 1, "00" * 16]).encode())
        else:
            cancelled = threading.Event()
            threading.Timer(0.7, cancelled.set).start()
            with pytest.raises(ConnectionError, match=r"ranks \[1\]") as error:
                connected(rendezvous, cancelled)
            assert ("127.0.0.1" in str(error.value)) == (rendezvous.rank > 1)
        rendezvous.all_gather(b"")

    ranks(3, rank)


def test_a_forked_process_does_not_keep_connections_open():
    """The end of a rank's connections is noticed at once, although a process that the rank has forked lives on."""

    def rank(rendezvous):
        transport = TcpTransport(connected(rendezvous))
        if rendezvous.rank == 0:
            child = os.fork()
            if child == 0:
                time.sleep(20)
                os._exit(0)
            rendezvous.all_gather(str(child).encode())
            transport.connections = None  # the end of the process would do the same
            del transport
        else:
            child = int(rendezvous.all_gather(b"")[0])
            memory = np.zeros(8, np.uint8)
            with pytest.raises(ConnectionError, match="rank 0"):
                transport.receive(memory.ctypes.data, 8, 0, 0).wait(15)
            os.kill(child, signal.SIGKILL)
        rendezvous.all_gather(b"")

    ranks(2, rank)


def connected_pair():
    """Return the ends of a connection over the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def vanish(far):
    """Let the system drop all packets that arrive for a socket, as if its host had lost its power."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # a program of one instruction: return 0
    far.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(drop_all)))  # SO_ATTACH_FILTER


@pytest.mark.parametrize("full", [False, True], ids=["data under way", "buffers full"])
def test_a_host_that_vanishes_is_noticed_and_a_rank_that_reads_nothing_is_kept(monkeypatch, full):
    """A wait fails soon after the limit if the other host does not answer any more, whether data is under way or the
    other rank had stopped to read before. As long as its host answers, a rank that reads nothing is waited for."""
    monkeypatch.setattr(tcp, "_SILENT_S", 1.0)
    data = np.ones(16 << 20, np.uint8)
    (near, far), (to_stopped, stopped) = connected_pair(), connected_pair()
    transport = TcpTransport({1: near, 2: to_stopped})
    with far, stopped:
        if not full:
            vanish(far)
        kept, lost = (transport.send(data.ctypes.data, data.size, rank, 0) for rank in (2, 1))
        if full:
            time.sleep(0.5)
            vanish(far)
        with pytest.raises(ConnectionError, match=r"rank 1 was lost: its host has not answered for 1 s"):
            lost.wait(60)
        nbytes = data.size + 16  # with the header
        reader = threading.Thread(target=stopped.recv, args=(nbytes, socket.MSG_WAITALL))
        reader.start()
        kept.wait(60)
        reader.join()
        transport.close()


@pytest.mark.parametrize("reset", [False, True])
def test_a_lost_connection_is_noticed_behind_a_large_message(reset):
    """A wait fails at once if its connection ends while a large message with another tag, which no receive expects yet,
    blocks the connection. The wait does not spin."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    transport, memory = TcpTransport({1: near}), np.zeros(8, np.uint8)
    pending = transport.receive(memory.ctypes.data, 8, 1, 1)
    far.sendall(struct.pack("<QQ", 0, 2 << 20) + bytes(1000))  # tag 0, 2 MiB, of which only 1000 bytes are sent
    if reset:  # ``close`` then sends RST in place of FIN
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    threading.Timer(0.2, far.close).start()
    used = time.process_time()
    with pytest.raises(ConnectionError, match="rank 1"):
        pending.wait(20)
    assert time.process_time() - used < 1
    transport.close()
