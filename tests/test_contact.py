"""What a process answers for a group that it has left, and that other programs on the network do not block it."""

import socket
import threading
from contextlib import ExitStack, suppress

import pytest

from crossreduce.ranks import contact
from crossreduce.ranks.agreement import read_decided
from crossreduce.ranks.contact import Peer, Successor
from crossreduce.ranks.registers import Decision

DECIDED = 6, Decision((0, 2), 1, True, 17)


@pytest.fixture
def place():
    """Return where this process listens; it has left the groups "first" and "second", and is in "third"."""
    listening = [contact.listen() for _ in range(3)]
    for token in ("first", "second", "third"):
        contact.register(token, lambda request: {"heard": request["what"]})
    contact.unregister("first", Successor("second", 4, DECIDED))
    contact.unregister("second", Successor("third", 9, DECIDED))
    yield listening[0]
    contact.unregister("third")


@pytest.mark.parametrize("what", ["result", "status"])
def test_it_answers_with_the_decision_that_formed_the_next_group(place, what):
    """Ranks of other hosts, which ask for the status, and processes that join, which ask for the result, learn the
    decision in the form in which a rank of the group would return it, however often the process has moved since."""
    answer = Peer(place).ask("first", {"what": what, "number": 4})
    assert read_decided(answer["decided"]) == DECIDED


def test_it_names_the_group_in_which_it_is_now(place):
    """Other requests are told the token of the latest group; those to a group that it never left are answered there."""
    assert Peer(place).ask("first", {"what": "status", "number": 3}) == {"moved": "third"}
    assert Peer(place).ask("second", {"what": "join"}) == {"moved": "third"}
    assert Peer(place).ask("third", {"what": "join"}) == {"heard": "join"}
    assert Peer(place).ask("another", {"what": "join"}) == {"unknown": True}


def test_programs_that_send_a_request_slowly_do_not_block_a_process(place, monkeypatch):
    """A program that connects has a limited time for its whole request. If as many programs as there are threads send a
    byte at a time, the request of a rank is still answered."""
    monkeypatch.setattr(contact, "_UNKNOWN_S", 0.5)
    stop = threading.Event()
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", place.port))) for _ in range(contact._ANSWERING)
        ]

        for stranger in strangers:
            stranger.sendall((1000).to_bytes(4, "little"))  # the length of what follows

        def send_slowly():
            while not stop.wait(0.1):
                for stranger in strangers:
                    with suppress(OSError):  # the process has closed the connection
                        stranger.sendall(b"\0")

        thread = threading.Thread(target=send_slowly)
        thread.start()
        try:
            answer = Peer(place, "127.0.0.1").ask("third", {"what": "join"}, timeout_s=10)
        finally:
            stop.set()
            thread.join()
    assert answer == {"heard": "join"}
