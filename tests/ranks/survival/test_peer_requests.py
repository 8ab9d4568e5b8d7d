"""What a process answers for a group that it has left, and that other programs on the network do not block it."""

import os
import select
import socket
import threading
import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

from crossreduce.errors import PeerLostError
from crossreduce.ranks.agreement.agreement import read_decided
from crossreduce.ranks.connections import listener, peer_requests
from crossreduce.ranks.connections.channel import AuthenticatedChannel
from crossreduce.ranks.connections.peer_requests import Ended, Peer, Successor
from crossreduce.ranks.connections.store import StoreClient
from crossreduce.ranks.intra_host.registers import Decision
from crossreduce.ranks.survival.formation import GroupFormation, Settings

DECIDED = 6, Decision((0, 2), 1, True, 17)


@pytest.fixture
def place():
    """Return where this process listens; it has left the groups "first" and "second", and is in "third"."""
    listening = [peer_requests.listen() for _ in range(3)]
    for token in ("first", "second", "third"):
        peer_requests.register(token, lambda request: {"heard": request["what"]})
    peer_requests.unregister("first", Successor("second", 4, DECIDED))
    peer_requests.unregister("second", Successor("third", 9, DECIDED))
    yield listening[0]
    peer_requests.unregister("third")


def test_what_a_process_answers_for_a_group_that_it_has_left(place):
    """Ranks of other hosts that request the status, and joining processes that request the result, receive the
    decision in the form in which a rank of the group would return it, however often the process has moved since. Other
    requests are told the token of the latest group; those to a group that it never left are answered there."""
    for what in ("result", "status"):
        assert read_decided(Peer(place).ask("first", {"what": what, "number": 4})["decided"]) == DECIDED
    assert Peer(place).ask("first", {"what": "status", "number": 3}) == {"moved": "third"}
    assert Peer(place).ask("second", {"what": "join"}) == {"moved": "third"}
    assert Peer(place).ask("third", {"what": "join"}) == {"heard": "join"}
    assert Peer(place).ask("another", {"what": "join"}) == {"unknown": True}


def test_silent_programs_do_not_delay_a_request(place, monkeypatch):
    """If many programs hold connections and send nothing, a request of a rank is answered at once: the process closes
    the oldest ones."""
    monkeypatch.setattr(listener, "UNKNOWN_S", 60)
    with ExitStack() as stack:
        number = 3 * listener.MOST_UNKNOWN
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", place.port), 5)) for _ in range(number)]
        began = time.monotonic()
        assert Peer(place, "127.0.0.1").ask("third", {"what": "join"}, timeout_s=10) == {"heard": "join"}
        assert time.monotonic() - began < 0.5
        assert strangers[0].recv(1) == b""


def test_a_program_that_sends_slowly_is_not_waited_for(place, monkeypatch):
    """A program that connects has a limited time to prove that it knows the key, also if it sends a byte again and
    again."""
    monkeypatch.setattr(listener, "UNKNOWN_S", 0.5)
    with socket.create_connection(("127.0.0.1", place.port), 0.1) as stranger:
        deadline = time.monotonic() + 5
        with suppress(OSError):  # the process has closed the connection
            while time.monotonic() < deadline:
                stranger.sendall(b"\0")
                with suppress(TimeoutError):
                    assert stranger.recv(1) == b""
                    break
        assert time.monotonic() < deadline


@pytest.mark.parametrize("answer", ["random", "reflected", "recorded"])
def test_nothing_is_sent_to_a_program_that_does_not_know_the_key(place, answer):
    """A program that listens where a process has ended gets no request, such as one with the key of a process that
    joins, also if it returns the received bytes, or has recorded the proof of the process."""
    number = bytes(16)
    with socket.create_connection(("127.0.0.1", place.port), 5) as recorder:
        recorder.sendall(number)
        recorded = recorder.recv(32, socket.MSG_WAITALL)
    got = []
    with socket.create_server(("127.0.0.1", 0)) as imposter:

        def listen():
            made, _ = imposter.accept()
            with made:
                got.append(made.recv(1000))
                made.sendall({"random": os.urandom(32), "reflected": 2 * got[0], "recorded": recorded}[answer])
                while part := made.recv(1000):
                    got.append(part)

        thread = threading.Thread(target=listen)
        thread.start()
        asked = Peer(place._replace(addresses=("127.0.0.1",), port=imposter.getsockname()[1]))
        assert asked.ask("third", {"what": "join", "place": "a secret"}) is None
        thread.join()
    assert len(got[0]) == 16
    assert b"".join(got[1:]) == bytes(16)


def test_requests_that_were_recorded_are_not_executed_again():
    """If all that a rank has sent is sent to the store once more, on another connection, nothing changes; the store
    counts that as a wrong proof."""
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
    with socket.create_connection(("127.0.0.1", served.port), 5) as repeated:
        repeated.sendall(sent)
        with suppress(ConnectionResetError):
            while repeated.recv(1000):
                pass
    assert served.add("number", 0) == 2
    assert served.refused == 1
    served.close()


def test_a_proof_belongs_to_one_message():
    """The proof of a message is wrong at another position of the connection, in the other direction, for another text
    and in another connection."""
    channels = [AuthenticatedChannel(None, b"key", b"1", b"here", b"there") for _ in range(2)]
    other = AuthenticatedChannel(None, b"key", b"1", b"there", b"here")
    first, second = (channels[0].next_proof(b"text") for _ in range(2))
    assert first != second
    assert [other.is_next(proof, b"text") for proof in (first, first, second)] == [True, False, False]
    assert not channels[1].is_next(first, b"text")
    assert not AuthenticatedChannel(None, b"key", b"1", b"there", b"here").is_next(first, b"another")
    assert not AuthenticatedChannel(None, b"key", b"2", b"there", b"here").is_next(first, b"text")


def test_the_rank_that_serves_the_store_of_a_new_group_is_waited_for_as_long_as_the_caller_says(place):
    """The timeout of shrink applies to each rank, although that of the group may be much longer."""
    agreements = SimpleNamespace(relays=lambda *_: [], host_of=lambda rank: 0)
    old = SimpleNamespace(token="third", agreements=agreements)
    formation = GroupFormation(old, None, Settings(300, "world"), 0.2, grows=False)
    with pytest.raises(PeerLostError, match=r"does not answer.*\n.*waited 0.2 s"):
        formation._ask_for_store(Peer(place, "127.0.0.1"), (0, 1), "store 1", lambda: None)


# Relays


@pytest.fixture
def relay():
    """Return a process at 127.0.0.2 that passes on connections, and where it connects to."""
    listening, found = peer_requests.listen("127.0.0.2"), {"addresses": ["127.0.0.1"], "known": True}
    peer_requests.register("third", lambda _: found, "127.0.0.2")
    yield Peer(listening, "127.0.0.2", 1), found
    peer_requests.unregister("third", address="127.0.0.2")


def through(relay, target, **content):
    """Ask a process through a relay; return its answer."""
    return target.ask_through(relay, "third", {"what": "join", **content}, 5, time.monotonic())


def closed_port():
    """Return a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_process_answers_through_a_relay(place, relay):
    """The relay is noted, until the process answers directly again."""
    target = Peer(place, rank=2)
    assert through(relay[0], target) == {"heard": "join"}
    assert target.relay is relay[0]
    assert target.known == ""
    assert target.ask("third", {"what": "join"}, 5) == {"heard": "join"}
    assert target.relay is None


def test_a_direct_answer_counts_more_than_a_relayed_one_that_began_before_it(place, relay, monkeypatch):
    """If a link is only slow, both answers come; the later one does not make the process seem to be beyond a link."""
    target, answer, direct = Peer(place, rank=2), Peer._ask_at, []

    def late(peer, *arguments):
        if not direct:  # this is the relayed request
            direct.append(True)
            assert peer.ask("third", {"what": "join"}, 5) == {"heard": "join"}
        return answer(peer, *arguments)

    monkeypatch.setattr(Peer, "_ask_at", late)
    assert through(relay[0], target) == {"heard": "join"}
    assert target.relay is None


def test_what_a_relay_cannot_tell(place, relay):
    """Both ends of the connection prove that they know the key of the process, so a relay that connects to another one
    is noticed. If the relay reaches the host of a process, but nothing listens there, the process has ended; not so if
    it has reached no other rank, perhaps since it tried addresses of its own host."""
    passed_on, found = relay
    stranger = Peer(place._replace(key="00" * 16), rank=2)
    assert through(passed_on, stranger, place="a secret") is None
    assert stranger.relay is None
    target = Peer(place._replace(port=closed_port()), rank=2)
    with pytest.raises(Ended, match="nothing listens"):
        through(passed_on, target)
    for address, known in (("no address", True), ("127.0.0.1", False)):
        found |= {"addresses": [address], "known": known}
        assert through(passed_on, target) is None


def test_the_end_of_a_relay_is_not_the_end_of_the_process(place, relay):
    """The process may be alive: if it were taken for ended, two groups could continue. The relay is not used again."""
    target, passed_on = Peer(place, rank=2), relay[0]
    assert through(passed_on, target) == {"heard": "join"}
    passed_on.place = passed_on.place._replace(port=closed_port())
    passed_on.known = "127.0.0.1"
    assert through(passed_on, target) is None
    assert target.relay is None


def test_a_store_is_reached_through_a_relay(place, relay):
    """Values of several messages arrive; when the store ends, so does the connection."""
    key = bytes(range(16))
    store = StoreClient(key, serve_at="127.0.0.1")
    target = Peer(place, rank=2)
    target.relay = relay[0]
    with pytest.raises(ConnectionError, match="not reached directly"):
        target.connection("third", store.port, 5, (2,))  # the relay is no member
    client = StoreClient(key, connection=target.connection("third", store.port, 5, (1,)), port=store.port)
    value = bytes(range(256)) * 400
    client.set("large", value)
    assert client.get("large") == value
    assert store.get("large") == value
    store.close()
    with pytest.raises(RuntimeError, match="Lost"):
        client.get("large")
    client.close()
