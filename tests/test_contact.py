"""What a process answers for a group that it has left, because the group was formed again."""

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
