"""The library's own connections obey the laws of ``transport_laws``, also if other programs connect to their ports."""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import termios
import threading
import time
from queue import Queue
from types import SimpleNamespace

import numpy as np
import pytest
import transport_laws
from paths import ROOT
from ranks import connected, ranks
from transport_laws import LAWS_OF_LINKS

from crossreduce.errors import PeerLostError
from crossreduce.ranks.transports import choice, tcp
from crossreduce.ranks.transports.addresses import addresses, machine, reachable
from crossreduce.ranks.transports.choice import open_transport
from crossreduce.ranks.transports.strangers import MOST_UNKNOWN, Strangers
from crossreduce.ranks.transports.tcp import TcpTransport, connect


@pytest.mark.parametrize(("name", "count"), [("tcp", 1), ("tcp", 4), ("ucx", 1), ("page", 1)])
def test_transports_obey_the_laws(name, count, monkeypatch):
    """Messages are ordered and unchanged, waits time out, and aborts end waits. ``test_mpi`` checks this for MPI.

    "page" is the plug-in of docs/how-to/rdma.md."""
    page = SimpleNamespace()
    exec((ROOT / "docs/how-to/rdma.md").read_text().split("```py\n")[1].split("```")[0], page.__dict__)
    monkeypatch.setattr(choice, "_others", lambda: {"page": SimpleNamespace(load=lambda: page)})

    def rank(rendezvous, law):
        transport = open_transport(name, connected(rendezvous, count=count))
        law(transport, rendezvous)
        with contextlib.suppress(PeerLostError):  # one of the laws aborts the group
            rendezvous.all_gather(b"")
        transport.close()

    for law in LAWS_OF_LINKS:
        ranks(3, rank, law)


def test_strangers_and_dead_addresses_do_not_disturb_connections():
    """If only the last of a rank's addresses works, the others connect to it. The rank ignores programs that connect to
    its port and send nothing, HTTP or wrong proofs."""

    def rank(rendezvous):
        payloads, kept = [], []

        def answer_wrongly(wrong):
            for other in [wrong.accept()[0] for _ in range(2)]:
                other.sendall(b"x" * 32)
                kept.append(other)

        def publish(payload):
            _, port, key, here = json.loads(payload)
            if rendezvous.rank == 0:
                # At the rank's port, no program listens at 127.0.0.4, and a program at 127.0.0.3 does not answer.
                wrong, silent = (socket.create_server((f"127.0.0.{k}", port)) for k in (2, 3))
                threading.Thread(target=answer_wrongly, args=(wrong,), daemon=True).start()
                kept.extend((wrong, silent))
                for guess in (b"",) * 100 + (b"GET / HTTP/1.0\r\n\r\n", b"\1\0\0\0" + bytes(33), b"x" * 37):
                    kept.append(socket.create_connection(("127.0.0.1", port)))
                    kept[-1].sendall(guess)
            published = [f"127.0.0.{k}" for k in (4, 3, 2, 1)]
            payloads.extend(rendezvous.all_gather(json.dumps([published, port, key, here]).encode()))

        cancelled, read = threading.Event(), payloads.__getitem__
        sockets = connect(rendezvous.rank, range(3), publish, read, cancelled, listen_at="127.0.0.1")
        transport = TcpTransport({other: each[0] for other, each in sockets.items()})
        transport_laws.messages_arrive_in_order(transport, rendezvous)
        transport.close()

    ranks(3, rank)


def test_an_address_of_this_machine_is_not_tried_for_another_machine():
    """Any program of this machine may listen at the loopback addresses, and at addresses that both machines have, such
    as that of a bridge. So these are tried only for processes of this machine."""
    own = addresses()
    assert reachable(own, machine()) == own
    assert reachable(own, "another") == []
    local = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::", "localhost"]
    assert reachable([*local, "192.0.2.7"], "another") == ["192.0.2.7"]
    cancelled = threading.Event()
    threading.Timer(0.5, cancelled.set).start()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        published = json.dumps([["127.0.0.1"], stranger.getsockname()[1], "00" * 16, "another"]).encode()
        with pytest.raises(ConnectionError, match=r"no connection to ranks \[0\]"):
            connect(1, range(2), lambda _: None, lambda _: published, cancelled)
        assert select.select([stranger], [], [], 0)[0] == []


class Meeting:
    """Rank 0, which waits in a thread for ranks 1 and 2. ``sockets``: its connections at the end."""

    def __init__(self, published=("127.0.0.1",)):
        self.cancelled, self.sockets, payload = threading.Event(), {}, Queue()
        self.thread = threading.Thread(target=self._run, args=(payload.put,))
        self.thread.start()
        _, self.port, self.key, here = json.loads(payload.get(timeout=100))
        self.payload = json.dumps([published, self.port, self.key, here]).encode()

    def _run(self, publish):
        with contextlib.suppress(ConnectionError):  # the test has failed
            made = connect(0, range(3), publish, None, self.cancelled, listen_at="127.0.0.1")
            self.sockets |= {rank: each[0] for rank, each in made.items()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cancelled.set()
        self.thread.join()

    def connected(self, rank, patience_s=20.0):
        """Connect a rank to rank 0, and return its socket. After ``patience_s``, raise a ``ConnectionError``."""
        cancelled = threading.Event()
        timer = threading.Timer(patience_s, cancelled.set)
        timer.start()
        try:
            return connect(rank, (0, rank), lambda _: None, lambda _: self.payload, cancelled)[0][0]
        finally:
            timer.cancel()

    def greeting(self, rank):
        """Return what a rank sends first, and a function that returns what it sends after the answer."""
        key, own, end = bytes.fromhex(self.key), os.urandom(16), ("127.0.0.1", self.port)
        hello = tcp._HELLO.pack(rank, 0, own, tcp._proof(key, "hello", (rank, 0), 0, end, own))
        return hello, lambda answer: tcp._proof(key, "use", (rank, 0), 0, end, own + answer[:16])

    def stranger(self, sent=b""):
        """Return a connection over which a program has sent something."""
        made = socket.create_connection(("127.0.0.1", self.port), 100)
        made.sendall(sent)
        return made

    def end(self, *others):
        """Check that rank 0 is connected to the sockets ``others`` of ranks 1 and 2, and close all of them."""
        self.thread.join(100)
        assert [self.sockets[rank].getpeername() for rank in (1, 2)] == [each.getsockname() for each in others]
        for each in [*self.sockets.values(), *others]:
            each.close()


def test_a_program_in_the_middle_is_not_used():
    """A program that listens at another address, and passes on all bytes to the rank, gets the first message only."""
    seen = []
    with Meeting(("127.0.0.2", "127.0.0.1")) as meeting:
        with socket.create_server(("127.0.0.2", meeting.port)) as middle:

            def pass_on():
                one, _ = middle.accept()
                with one, meeting.stranger() as other:
                    seen.append(one.recv(1000))
                    other.sendall(seen[0])
                    seen.append(other.recv(1000))

            thread = threading.Thread(target=pass_on)
            thread.start()
            used = meeting.connected(1)
            thread.join()
        assert [len(each) for each in seen] == [tcp._HELLO.size, 0]
        assert used.getpeername()[0] == "127.0.0.1"
        meeting.end(used, meeting.connected(2))


def test_a_recorded_handshake_cannot_be_repeated():
    """A program that sends what a rank has sent before, while the rank is late, is not taken for it. When the rank has
    connected, no other connection replaces the first one, not even one with right proofs."""
    with Meeting() as meeting:
        hello, use = meeting.greeting(1)
        with meeting.stranger(hello) as early:
            sent = use(early.recv(32, socket.MSG_WAITALL))
        with meeting.stranger(hello) as repeated:
            assert use(repeated.recv(32, socket.MSG_WAITALL)) != sent
            repeated.sendall(sent)
            assert repeated.recv(1) == b""
        with meeting.stranger(hello):
            first = meeting.connected(1)
            with pytest.raises(ConnectionError, match=r"no connection to ranks \[0\]"):
                meeting.connected(1, patience_s=0.5)
            meeting.end(first, meeting.connected(2))


def test_connections_without_a_proof_do_not_take_the_place_of_a_rank():
    """Programs that connect and send nothing, or wrong proofs, do not end the handshake of a rank that is slow."""
    with Meeting() as meeting:
        hello, use = meeting.greeting(1)
        with contextlib.ExitStack() as stack:
            slow = meeting.stranger(hello)
            answer = slow.recv(32, socket.MSG_WAITALL)  # the hello has been read
            for sent in (b"", bytes(tcp._HELLO.size)):
                for _ in range(2 * MOST_UNKNOWN):
                    stack.enter_context(meeting.stranger(sent))
            slow.sendall(use(answer))
            assert slow.recv(1) == b"."
            meeting.end(slow, meeting.connected(2))


def test_the_source_with_the_most_connections_loses_one():
    """If there are too many connections, one of the source that has the most is closed, and not always the same one."""
    places = set()
    for _ in range(100):
        strangers, crowd = Strangers(8), [object() for _ in range(20)]
        rank = [object() for _ in range(4)]
        assert [strangers.add(each, f"10.0.0.{k}") for k, each in enumerate(rank)] == [None] * 4
        dropped = [strangers.add(each, f"::ffff:127.0.0.{k}") for k, each in enumerate(crowd)]
        assert dropped[:4] == [None] * 4
        assert {*dropped[4:]} <= {*crowd}
        places.add(crowd.index(dropped[4]))
        assert strangers.pop(0) is None
        assert strangers.pop(time.monotonic() + 1) is rank[0]
    assert places == {0, 1, 2, 3}
    alone = [object() for _ in range(9)]
    drawn = []
    for _ in range(100):
        strangers = Strangers(8)
        drawn.append([strangers.add(each, f"10.0.0.{k}") for k, each in enumerate(alone)][-1])
    assert len({*drawn}) > 1


def test_a_rank_that_is_not_reached_is_named():
    """If rank 1 does not connect, the others time out with an error that names it. Only rank 2, which connects to rank
    1, has tried addresses, and names them."""

    def rank(rendezvous):
        if rendezvous.rank == 1:
            rendezvous.all_gather(json.dumps([["127.0.0.1"], 1, "00" * 16, machine()]).encode())
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
        transport = TcpTransport(connected(rendezvous).sockets)
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


def part_of(nbytes, data, offset=0, number=0, tag=0, divided=False):
    """Return a part of a message of ``nbytes`` bytes, as connections carry it."""
    return struct.pack("<QQQII", tag, nbytes, offset, number, len(data) if divided else 0) + data


FAREWELL = struct.pack("<QQQII", 2**64 - 1, 0, 0, 0, 0)


@contextlib.contextmanager
def two_connections():
    """Yield a transport with two connections to rank 1, and their other ends."""
    (near, far), (second_near, second_far) = connected_pair(), connected_pair()
    transport = TcpTransport({1: near}, further={1: [second_near]})
    with far, second_far:
        yield transport, far, second_far
        transport.close()


def test_parts_of_messages_may_arrive_in_any_order():
    """Messages of one tag are received in order, whatever the order of their parts on two connections. What is still on
    one of them when the rank leaves over the other one is received, too."""
    nbytes = 300000
    first, second = (content.tobytes() for content in (transport_laws.content(1, 0, 0, k, nbytes) for k in range(2)))
    with two_connections() as (transport, far, second_far):
        into = np.zeros((3, nbytes), np.uint8)
        far.sendall(part_of(8, bytes(range(8)), tag=1) + part_of(nbytes, second[:100], number=1, divided=True))
        second_far.sendall(part_of(nbytes, second[100:], 100, 1, divided=True))
        transport.receive(into[2].ctypes.data, 8, 1, 1).wait(100)
        pending = [transport.receive(each.ctypes.data, nbytes, 1, 0) for each in into]
        far.sendall(part_of(nbytes, first[:70000], divided=True) + FAREWELL)
        far.shutdown(socket.SHUT_WR)
        pending[1].wait(100)  # it reads all that has arrived
        second_far.sendall(part_of(nbytes, first[70000:], 70000, divided=True))
        second_far.shutdown(socket.SHUT_WR)
        pending[0].wait(100)
        with pytest.raises(ConnectionResetError, match="has left"):
            pending[2].wait(100)
    assert [each.tobytes() for each in into[:2]] == [first, second]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_large_message_does_not_wait_for_later_ones(count):
    """A rank may receive one of two large messages before it expects the other one, whatever the number of connections:
    no part of the later message is before parts of the earlier one."""
    ends = [connected_pair() for _ in range(count)]
    near, far = (
        TcpTransport({1 - k: sockets[0]}, further={1 - k: sockets[1:]})
        for k, sockets in enumerate(zip(*ends, strict=True))
    )
    sent, into = np.ones((2, 16 << 20), np.uint8), np.zeros((2, 16 << 20), np.uint8)
    sent[1] = 2
    messages = [near.send(each.ctypes.data, each.nbytes, 1, tag) for tag, each in enumerate(sent)]
    sender = threading.Thread(target=messages[1].wait, args=(20,))
    sender.start()
    for tag, each in enumerate(into):
        far.receive(each.ctypes.data, each.nbytes, 0, tag).wait(10)
    sender.join()
    messages[0].wait(0)
    assert (sent == into).all()
    near.close()
    far.close()


@pytest.mark.parametrize("sends", [True, False])
def test_a_rank_is_lost_if_one_of_its_connections_is(sends):
    """If the second of two connections ends while a message is under way, the message fails at once, and both ranks
    notice it on the first one."""
    data = np.zeros(32 << 20, np.uint8)
    with two_connections() as (transport, far, second_far):
        if sends:
            pending = transport.send(data.ctypes.data, data.nbytes, 1, 0)
        else:
            pending = transport.receive(data.ctypes.data, data.nbytes, 1, 0)
            far.sendall(part_of(data.nbytes, bytes(100), divided=True))
        second_far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ``close`` sends RST
        threading.Timer(0.2, second_far.close).start()
        with pytest.raises(ConnectionError, match="rank 1 was lost"):
            pending.wait(100)
        far.settimeout(20)
        with contextlib.suppress(ConnectionError):
            while far.recv(1 << 20):
                pass


@pytest.mark.parametrize("measures", [False, True])
def test_small_messages_use_one_connection(measures):
    """Small messages neither write to the second connection nor read from it, so they take no more system calls."""
    (near, far), (second_near, second_far) = connected_pair(), connected_pair()
    with far, second_far, second_near.dup() as own:
        transport = TcpTransport({1: near}, further={1: [second_near]}, measures=measures)
        waiting = part_of(1 << 16, bytes(100))
        second_far.sendall(waiting)
        data = np.zeros(1 << 16, np.uint8)
        for number in range(20):
            far.sendall(part_of(data.nbytes, data.tobytes(), number=number))
            transport.receive(data.ctypes.data, data.nbytes, 1, 0).wait(100)
            transport.send(data.ctypes.data, data.nbytes, 1, 0).wait(100)
            assert len(far.recv(data.nbytes + 32, socket.MSG_WAITALL)) == data.nbytes + 32
        unread = struct.unpack("i", fcntl.ioctl(own, termios.FIONREAD, bytes(4)))[0]
        assert (unread, select.select([second_far], [], [], 0)[0]) == (len(waiting), [])
        transport.close()


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
        nbytes = data.size + 32  # with the header
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
    far.sendall(
        struct.pack("<QQQII", 0, 2 << 20, 0, 0, 0) + bytes(1000)
    )  # tag 0, 2 MiB, of which only 1000 bytes are sent
    if reset:  # ``close`` then sends RST in place of FIN
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    threading.Timer(0.2, far.close).start()
    used = time.process_time()
    with pytest.raises(ConnectionError, match="rank 1"):
        pending.wait(100)
    assert time.process_time() - used < 1
    transport.close()
