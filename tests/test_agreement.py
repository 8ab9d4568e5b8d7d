"""What ranks do while a host does not answer: a vote needs a quorum only, and no question waits for long."""

import time
from functools import partial
from types import SimpleNamespace

import pytest

from crossreduce.errors import CollectiveTimeout, PeerLostError
from crossreduce.ranks import contact
from crossreduce.ranks.agreement import Agreements, _Speaker
from crossreduce.ranks.membership import Member
from crossreduce.ranks.registers import Decision
from crossreduce.ranks.rendezvous import StoreRendezvous

DECISION = Decision((0, 1), 1, True, 5)


class Registers:
    """The registers of a host in which nothing has been decided."""

    ballots = 100

    def __init__(self):
        self.decided = []

    def promise(self, number, ballot, ended):
        return None

    def accept(self, number, ballot, decision):
        return decision

    def decide(self, number, ballot, decision):
        self.decided.append(decision)


@pytest.mark.parametrize("phases", [("accept",), ("promise", "accept")])
def test_a_vote_does_not_wait_for_hosts_beyond_a_quorum(phases):
    """Of three hosts with a rank each, one does not answer: the others decide without waiting for it."""
    asked, registers = [], Registers()

    def ask_hosts(hosts, electors, request):
        asked.append((request["what"], hosts))
        yield 1, {"accepted": None if request["what"] == "promise" else [*DECISION]}
        pytest.fail(f"it waits for a further answer to {request['what']}") if request["what"] != "decided" else None

    group = SimpleNamespace(
        _host_of={0: 0, 1: 1, 2: 2}, _hosts=((0,), (1,), (2,)), _own=0, _registers=registers,
        request=lambda what, number, **content: {"what": what, **content}, ask_hosts=ask_hosts,
    )  # fmt: skip
    speaker = _Speaker(group, 1, (0, 1, 2), 10.0)
    speaker._round = len(phases) - 1
    assert speaker._vote(DECISION)
    assert asked == [*((phase, [1, 2]) for phase in phases), ("decided", [1])]
    assert registers.decided == [DECISION]


def test_a_host_with_a_quorum_asks_nobody():
    """If this host has most ranks, it decides alone."""

    def ask_hosts(hosts, *_):
        assert not hosts
        return ()

    group = SimpleNamespace(
        _host_of={0: 0, 1: 0, 2: 1}, _hosts=((0, 1), (2,)), _own=0, _registers=Registers(),
        request=lambda what, number, **content: {"what": what}, ask_hosts=ask_hosts,
    )  # fmt: skip
    speaker = _Speaker(group, 1, (0, 1, 2), 10.0)
    speaker._round = 1
    assert speaker._vote(DECISION)


def test_nobody_waits_for_a_silent_host_after_the_decision():
    """A rank that waits for the answer of a host notices soon that the speaker of another host has decided."""
    looks, registers = [], Registers()
    registers.decision = lambda number: looks.append(number) or (DECISION if len(looks) > 3 else None)
    group = SimpleNamespace(
        _host_of={0: 0, 1: 1, 2: 2}, _hosts=((0,), (1,), (2,)), _own=0, _registers=registers,
        request=lambda what, number, **content: {"what": what}, _ask_host=lambda *_: None,
    )  # fmt: skip
    group.ask_hosts = partial(Agreements.ask_hosts, group)
    began = time.monotonic()
    assert _Speaker(group, 1, (0, 1, 2), 10.0)._ready() is None
    assert time.monotonic() - began < contact.ANSWER_S / 2


class SilentStore:
    """A store whose host does not answer. ``limits_s``: how long each question would have waited."""

    def __init__(self):
        self.limit_s, self.limits_s = 10.0, []

    def limit_waits(self, seconds):
        self.limit_s = seconds

    def set(self, key, value):
        self.limits_s.append(self.limit_s)
        raise RuntimeError("Timeout: the rank that serves the store does not answer")


def test_reading_the_reason_of_an_abort_does_not_wait_long_for_a_silent_store():
    """A rank that would wait for 10 s would be excluded by the others, although its host is not lost."""
    store = SilentStore()
    StoreRendezvous(store, 3, 5, 300.0).leave(3, [1, 3])
    assert store.limits_s == [1.0]


@pytest.mark.parametrize(
    ("error", "owner", "lost"),
    [
        (PeerLostError("", [4]), 0, True),
        (PeerLostError("", [5]), 0, False),
        (PeerLostError("", [4]), None, False),  # another program serves the store
        (CollectiveTimeout("", [4]), 0, False),  # it may answer: the rank is only late
    ],
)
def test_the_store_of_a_lost_rank_is_not_asked(error, owner, lost):
    """An error with the global number of the rank that serves the store says that the store is lost, too."""
    member = SimpleNamespace(rendezvous=SimpleNamespace(owner=owner), global_ranks=(4, 5))
    assert Member._has_lost_store(member, error) is lost
