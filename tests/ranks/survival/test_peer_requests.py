"""What a process answers for a group that it has left. Other programs on the network cannot block it. Relays."""

import os
import select
import signal
import socket
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

from crossreduce.errors import PeerLostError
from crossreduce.ranks.agreement.ballots import read_decided
from crossreduce.ranks.connections import channel, listener, peer_requests
from crossreduce.ranks.connections.channel import AuthenticatedChannel
from crossreduce.ranks.connections.peer_requests import Ended, Peer, Successor
from crossreduce.ranks.connections.store import StoreClient
from crossreduce.ranks.intra_host.registers import Decision
from crossreduce.ranks.survival import formation
from crossreduce.ranks.survival.formation import GroupFormation, Settings
from crossreduce.ranks.transports.strangers import MOST_UNKNOWN

DECIDED = 6, Decision((0, 2), 1, True, 17)
LATEST = "third"  # the group that the process is in


@pytest.fixture
def place():
    """Return where this process listens. It has left the groups "first" and "second", and is in ``LATEST``."""
    listening = [peer_requests.listen() for _ in range(3)]
    for token in ("first", "second", LATEST):
        peer_requests.register(token, lambda request: {"heard": request["what"]})
    peer_requests.unregister("first", Successor("second", 4, DECIDED))
    peer_requests.unregister("second", Successor(LATEST, 9, DECIDED))
    yield listening[0]
    peer_requests.unregister(LATEST)


def test_what_a_process_answers_for_a_group_that_it_has_left(place):
    """A request for the status or the result of the agreement that replaced the group is answered with its decision.
    The answer to other requests to the group is the token of the latest group. Requests to the current group are
    answered there, and those to a group in which the process never was are answered "unknown"."""
    for what in ("result", "status"):
        assert read_decided(Peer(place).ask("first", {"what": what, "number": 4})["decided"]) == DECIDED
    assert Peer(place).ask("first", {"what": "status", "number": 3}) == {"moved": LATEST}
    assert Peer(place).ask("second", {"what": "join"}) == {"moved": LATEST}
    assert Peer(place).ask(LATEST, {"what": "join"}) == {"heard": "join"}
    assert Peer(place).ask("another", {"what": "join"}) == {"unknown": True}


def test_silent_programs_do_not_delay_a_request(place, monkeypatch):
    """If many programs hold connections and send nothing, a request of a rank is answered at once, also if it began
    before. Some connections of such programs are closed."""
    monkeypatch.setattr(listener, "UNKNOWN_S", 60)
    with ExitStack() as stack:
        strangers = []

        def connect_many():
            made = (socket.create_connection(("127.0.0.1", place.port), 60) for _ in range(3 * MOST_UNKNOWN))
            strangers.extend(stack.enter_context(each) for each in made)

        early = stack.enter_context(socket.create_connection(("127.0.0.1", place.port), 60))
        opened = channel.open_channel(early, bytes.fromhex(place.key), time.monotonic() + 60, connect_many)
        opened.send({"group": LATEST, "what": "join"})
        assert opened.receive() == {"heard": "join"}
        assert Peer(place, "127.0.0.1").ask(LATEST, {"what": "join"}, timeout_s=100) == {"heard": "join"}
        closed = select.select(strangers, [], [], 0)[0]
        assert 2 * MOST_UNKNOWN <= len(closed) < 3 * MOST_UNKNOWN


def test_a_program_that_connects_again_and_again_does_not_delay_a_request(place):
    """Requests of ranks are answered while a program holds 500 connections, and replaces those that are closed."""
    child = os.fork()
    if child == 0:
        made = deque()
        while True:
            with suppress(OSError):
                made.append(socket.create_connection(("127.0.0.1", place.port), 60))
            if len(made) > 500:
                made.popleft().close()
    try:
        for _ in range(20):
            assert Peer(place, "127.0.0.1").ask(LATEST, {"what": "join"}, timeout_s=100) == {"heard": "join"}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_place_of_another_machine_is_not_sought_on_this_one(place):
    """A request to a process of another machine is not sent to this machine's own addresses, where another program may
    listen. The process does not count as ended."""
    peer = Peer(place._replace(machine="another"))
    assert peer.ask(LATEST, {"what": "join"}) is None
    assert not peer.refused


def test_a_program_that_sends_slowly_is_not_waited_for(place, monkeypatch):
    """A program that connects has a limited time to prove that it knows the key, also if it keeps sending bytes."""
    monkeypatch.setattr(listener, "UNKNOWN_S", 0.5)
    with socket.create_connection(("127.0.0.1", place.port), 0.1) as stranger:
        deadline = time.monotonic() + 60
        with suppress(OSError):  # the process has closed the connection
            while time.monotonic() < deadline:
                stranger.sendall(b"\0")
                with suppress(TimeoutError):
                    assert stranger.recv(1) == b""
                    break
        assert time.monotonic() < deadline


def passed_on(port, hello):
    """Return the answer of the process at a port to a hello."""
    with socket.create_connection(("127.0.0.1", port), 60) as other:
        other.sendall(hello)
        return other.recv(32, socket.MSG_WAITALL)


@pytest.mark.parametrize("answer", ["random", "reflected", "recorded", "passed on"])
def test_nothing_is_sent_to_a_program_that_does_not_know_the_key(place, answer):
    """No request is sent to a program that listens in place of an ended process: it gets a hello of 32 bytes. Its proof
    is random, or consists of the received bytes, or was recorded from the process, or is what the process answers when
    the program passes the hello on. (If that worked, the end of the program would count as that of the process.)"""
    with socket.create_connection(("127.0.0.1", place.port), 60) as recorder:
        recorder.sendall(bytes(16) + channel._hello_proof(bytes.fromhex(place.key), bytes(16)))
        recorded = recorder.recv(32, socket.MSG_WAITALL)
    got = []
    with socket.create_server(("127.0.0.1", 0)) as imposter:

        def listen():
            made, _ = imposter.accept()
            with made:
                got.append(made.recv(1000))
                answers = {"random": os.urandom(32), "reflected": got[0], "recorded": recorded}
                made.sendall(answers[answer] if answer in answers else passed_on(place.port, got[0]))
                while part := made.recv(1000):
                    got.append(part)

        thread = threading.Thread(target=listen)
        thread.start()
        asked = Peer(place._replace(addresses=("127.0.0.1",), port=imposter.getsockname()[1]))
        assert asked.ask(LATEST, {"what": "join", "place": "a secret"}) is None
        thread.join()
    assert [len(each) for each in got] == [32]


def test_requests_that_were_recorded_are_not_executed_again():
    """If the bytes that a rank has sent are sent to the store again, no value changes, and a wrong proof is counted."""
    served = StoreClient(b"key")
    sent = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def carry():
            one, _ = between.accept()
            with one, socket.create_connection(("127.0.0.1", served.port)) as other:
                while ready := select.select([one, other], [], [])[0]:
                    part = ready[0].recv(1000)
                    if not part:
                        return
                    sent.extend(part if ready[0] is one else b"")
                    (other if ready[0] is one else one).sendall(part)

        thread = threading.Thread(target=carry)
        thread.start()
        rank = StoreClient(b"key", "127.0.0.1", between.getsockname()[1])
        assert [rank.add("number", 1), rank.add("number", 1)] == [1, 2]
        rank.close()
        thread.join()
    with socket.create_connection(("127.0.0.1", served.port), 60) as repeated:
        repeated.sendall(sent)
        with suppress(ConnectionResetError):
            while repeated.recv(1000):
                pass
    assert served.add("number", 0) == 2
    assert served.refused == 1
    served.close()


def test_a_connection_belongs_to_one_store(place):
    """A process that forms groups serves a store for each. A connection to one cannot be led to another one, nor to the
    requests of the process."""
    with ExitStack() as stack:
        served = StoreClient(formation._store_key(place, LATEST, 1))
        stack.callback(served.close)
        for token, number, port in (LATEST, 2, served.port), ("second", 1, served.port), (LATEST, 1, place.port):
            with socket.create_connection(("127.0.0.1", port), 60) as connection:
                client = StoreClient(formation._store_key(place, token, number), connection=connection)
                with pytest.raises(RuntimeError, match="Lost"):
                    client.set("key", b"value")
        assert served.num_keys() == 0


def test_a_proof_belongs_to_one_message():
    """A proof is wrong at another position, in the other direction, for another text, and in another connection."""
    channels = [AuthenticatedChannel(None, b"key", b"1", own=b"here", other=b"there") for _ in range(2)]
    other = AuthenticatedChannel(None, b"key", b"1", own=b"there", other=b"here")
    first, second = (channels[0].next_proof(b"text") for _ in range(2))
    assert first != second
    assert [other.is_next(proof, b"text") for proof in (first, first, second)] == [True, False, False]
    assert not channels[1].is_next(first, b"text")
    assert not AuthenticatedChannel(None, b"key", b"1", b"there", b"here").is_next(first, b"another")
    assert not AuthenticatedChannel(None, b"key", b"2", b"there", b"here").is_next(first, b"text")


def test_the_rank_that_serves_the_store_of_a_new_group_is_waited_for_as_long_as_the_caller_says(place):
    """The timeout of shrink limits the wait for the store of the new group, also if the group's timeout is longer."""
    agreements = SimpleNamespace(relays=lambda *_: [], host_of=lambda rank: 0)
    old = SimpleNamespace(token=LATEST, agreements=agreements)
    formation = GroupFormation(old, None, Settings(300, "world"), 0.2, grows=False)
    with pytest.raises(PeerLostError, match=r"does not answer.*\n.*waited 0.2 s"):
        formation._ask_for_store(Peer(place, "127.0.0.1"), (0, 1), "store 1", lambda: None)


# Relays


@pytest.fixture
def relay():
    """Return a process at 127.0.0.2 that is a relay, and the addresses to which it connects, which tests may change."""
    listening, found = peer_requests.listen("127.0.0.2"), {"addresses": ["127.0.0.1"], "known": True}
    peer_requests.register(LATEST, lambda _: found, "127.0.0.2")
    yield Peer(listening, "127.0.0.2", rank=1), found
    peer_requests.unregister(LATEST, address="127.0.0.2")


def through(relay, target, **content):
    """Return the answer of a process that is asked through a relay."""
    return target.ask_through(relay, LATEST, {"what": "join", **content}, timeout_s=5, since=time.monotonic())


def closed_port():
    """Return a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_process_answers_through_a_relay(place, relay):
    """The relay through which a process has answered is stored until the process answers directly."""
    target = Peer(place, rank=2)
    assert through(relay[0], target) == {"heard": "join"}
    assert target.relay is relay[0]
    assert target.known == ""  # an answer through a relay shows no address that can be reached directly
    assert target.ask(LATEST, {"what": "join"}, 5) == {"heard": "join"}
    assert target.relay is None


def test_a_direct_answer_counts_more_than_a_relayed_one_that_began_before_it(place, relay, monkeypatch):
    """If a link is only slow, both a direct and a relayed answer arrive. Then no relay is stored."""
    target, answer, direct = Peer(place, rank=2), Peer._ask_at, []

    def late(peer, *arguments, **options):
        if not direct:  # this is the relayed request
            direct.append(True)
            assert peer.ask(LATEST, {"what": "join"}, 5) == {"heard": "join"}
        return answer(peer, *arguments, **options)

    monkeypatch.setattr(Peer, "_ask_at", late)
    assert through(relay[0], target) == {"heard": "join"}
    assert target.relay is None


def test_what_a_relay_cannot_tell(place, relay):
    """Both ends of a connection prove that they know the key of the process, so a wrong process gets no request. If a
    relay reports that nothing listens on the host of a process, the process has ended. If the relay cannot connect, or
    does not know whether its addresses belong to that host, the process has not answered."""
    relaying, found = relay
    stranger = Peer(place._replace(key="00" * 16), rank=2)
    assert through(relaying, stranger, place="a secret") is None
    assert stranger.relay is None
    target = Peer(place._replace(port=closed_port()), rank=2)
    with pytest.raises(Ended, match="nothing listens"):
        through(relaying, target)
    for address, known in (("no address", True), ("127.0.0.1", False)):
        found |= {"addresses": [address], "known": known}
        assert through(relaying, target) is None


def test_the_end_of_a_relay_is_not_the_end_of_the_process(place, relay):
    """If a relay has ended, the process counts as silent and not as ended, or two groups could continue."""
    target, relaying = Peer(place, rank=2), relay[0]
    assert through(relaying, target) == {"heard": "join"}
    relaying.place = relaying.place._replace(port=closed_port())
    relaying.known = "127.0.0.1"
    assert through(relaying, target) is None
    assert target.relay is None


def test_a_store_is_reached_through_a_relay(place, relay):
    """A value that needs several reads of the relay arrives. When the store ends, the connection ends, too."""
    key = bytes(range(16))
    store = StoreClient(key, serve_at="127.0.0.1")
    target = Peer(place, rank=2)
    target.relay = relay[0]
    with pytest.raises(ConnectionError, match="not reached directly"):
        target.connection(LATEST, store.port, 5, relays=(2,))  # the relay is rank 1
    client = StoreClient(key, connection=target.connection(LATEST, store.port, 5, relays=(1,)), port=store.port)
    value = bytes(range(256)) * 400
    client.set("large", value)
    assert client.get("large") == value
    assert store.get("large") == value
    store.close()
    with pytest.raises(RuntimeError, match="Lost"):
        client.get("large")
    client.close()
