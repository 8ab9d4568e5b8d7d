"""What ranks do while a host does not answer. A ballot needs only a quorum, and no request waits for long."""

from functools import partial
from types import SimpleNamespace

import pytest
from simulated_hosts import SimulatedHosts

from crossreduce.errors import CollectiveTimeout, ExcludedError, PeerLostError
from crossreduce.observe.diagnostics import CallSignature
from crossreduce.ranks.agreement.agreement import Agreements, _Speaker
from crossreduce.ranks.agreement.lost_ranks import Reach, Watch
from crossreduce.ranks.connections.peer_requests import Ended, Place
from crossreduce.ranks.connections.peers import Membership, PeerInfo
from crossreduce.ranks.connections.rendezvous import StoreRendezvous
from crossreduce.ranks.connections.repeated_request import SILENT_S, RepeatedRequest
from crossreduce.ranks.failures.abort import names_owner
from crossreduce.ranks.failures.failure_detector import FailureDetector
from crossreduce.ranks.failures.peer_errors import PeerDisconnected
from crossreduce.ranks.intra_host.registers import Decision
from crossreduce.ranks.survival import formation
from crossreduce.ranks.survival.formation import GroupFormation, Settings
from crossreduce.ranks.transports.choice import Offer

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

    def decision(self, number):
        return (0, self.decided[0]) if self.decided else None


class Answering:
    """The speaker of host 0 of three hosts with a rank each, in simulated time. ``behaviour(host, request, now)`` is
    the answer of another host after 1 ms, or ``None`` if it does not answer. ``asked``: (request, host) in order."""

    def __init__(self, monkeypatch, behaviour):
        self.asked, self.behaviour = [], behaviour
        self.simulated = SimulatedHosts(monkeypatch, self._answer)
        self.registers = Registers()
        self.group = SimpleNamespace(
            host_of=lambda rank: rank, hosts=((0,), (1,), (2,)), own_host=0, registers=self.registers, token="",
            others={rank: self.simulated.process(rank) for rank in (1, 2)}, rank=0, number=0,
            request=lambda what, number, **content: {"what": what, **content}, status=lambda *_: arrived(0),
            relays=lambda *_: [], departures=SimpleNamespace(have_left=lambda *_: False),
        )  # fmt: skip
        self.group.inquiry = partial(Agreements.inquiry, self.group)
        self.speaker = _Speaker(self.group, number=1, electors=(0, 1, 2), timeout_s=10.0)

    def _answer(self, host, request, now):
        self.asked.append((request["what"], host))
        answer = self.behaviour(host, request, now)
        return (9.0, None) if answer is None else (0.001, answer)

    def speak_until(self, until):
        """Speak until there is a decision or a time is reached. Return whether there is a decision."""
        while self.simulated.now < until:
            if self.speaker.speak():
                return True
            self.speaker.wait(1e-3)
        return False


def arrived(*ranks, late=()):
    """Return the status of a host with these arrived and late ranks. 1, True, 5 are kind, flag and progress."""
    return {"decided": None, "late": [*late], "arrived": {str(rank): [1, True, 5] for rank in ranks}}


def voting(host, request, now):
    """Return the answer of a host whose rank has arrived, and that accepts every ballot."""
    answers = {"status": arrived(host), "promise": {"accepted": None}, "decided": {}}
    return {"accepted": request["decision"]} if request["what"] == "accept" else answers[request["what"]]


@pytest.mark.parametrize("phases", [("accept",), ("promise", "accept")])
def test_a_vote_does_not_wait_for_hosts_beyond_a_quorum(monkeypatch, phases):
    """Of three hosts with a rank each, one does not answer: the others decide without waiting for it. A host that has
    most ranks decides alone."""
    case = Answering(monkeypatch, lambda host, request, now: None if host == 2 else voting(host, request, now))
    case.speaker._round = len(phases) - 1  # the first ballot needs no promises
    statuses = case.group.inquiry([1, 2], (0, 1, 2), {"what": "status"})
    statuses.read()
    assert case.speaker._vote(DECISION, statuses)
    after_status = case.asked[2:]
    assert after_status == [*((phase, host) for phase in phases for host in (1, 2)), ("decided", 1)]
    assert case.registers.decided == [DECISION]
    assert case.simulated.now < 0.1
    alone = Answering(monkeypatch, lambda *_: None)
    alone.speaker._weights, alone.speaker._round = {0: 2, 1: 1}, len(phases) - 1
    assert alone.speaker._vote(Decision((0,), 1, True, 5), alone.group.inquiry([1, 2], (), {}))
    assert not alone.asked


@pytest.mark.parametrize("late_s", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("silent_from_s", [0.0, 0.7])
def test_a_silent_host_is_waited_for_once(monkeypatch, late_s, silent_from_s):
    """A host that does not answer delays a decision until ``SILENT_S`` after its last answer, whether or not a rank of
    another host is late meanwhile. The rank of the silent host is not a member, although it had arrived."""

    def behaviour(host, request, now):
        if host == 2 and now >= silent_from_s:
            return None
        if request["what"] == "status" and ((host == 1 and now < late_s) or now < 1):
            return arrived(late=[host])
        return voting(host, request, now)

    case = Answering(monkeypatch, behaviour)
    silent_at = silent_from_s + SILENT_S
    assert not case.speak_until(max(silent_at - 0.03, late_s))
    assert case.speak_until(max(silent_at, late_s) + 0.1)
    assert [decision.members for decision in case.registers.decided] == [(0, 1)]


def test_a_host_that_answers_late_takes_part(monkeypatch):
    """A slow host becomes a member: its reply after 1.9 s to the first request counts, although others were sent."""
    case = Answering(monkeypatch, voting)
    case.simulated.behaviour = lambda host, request, now: (
        1.9 if host == 2 and now < 1 else 0.001,
        voting(host, request, now),
    )
    assert case.speak_until(2)
    assert case.registers.decided == [DECISION._replace(members=(0, 1, 2))]


def test_a_speaker_that_begins_after_the_timeout_asks_first(monkeypatch):
    """A speaker may begin after the timeout, in place of a rank that ended then. It asks the other hosts before it
    decides, so their ranks that have arrived are members."""
    case = Answering(monkeypatch, voting)
    case.simulated.now = 10.05  # the timeout is 10 s
    assert case.speak_until(12)
    assert case.registers.decided == [DECISION._replace(members=(0, 1, 2))]


def test_hosts_that_answer_again_after_the_timeout_are_members(monkeypatch):
    """All links fail before a ballot, and work again after the timeout. The earlier answers of other hosts are too old,
    so the speaker waits for new ones, and their ranks are members."""
    arrives_s, fails_s, works_s = 8.2, 8.23, 10.4

    def behaviour(host, request, now):
        if request["what"] == "status" and host == 2 and now < arrives_s:
            return arrived(late=[2])
        works = now >= works_s or (request["what"] == "status" and now < fails_s)
        return voting(host, request, now) if works else None

    case = Answering(monkeypatch, behaviour)
    assert case.speak_until(12)
    assert case.registers.decided == [DECISION._replace(members=(0, 1, 2))]


def test_ranks_of_the_host_that_are_late_are_looked_at_rarely(monkeypatch):
    """While a rank of this host is late, its status is read rarely, since this reads files of the system. When the rank
    arrives, it is noticed within 20 ms."""
    case, arrives_s = Answering(monkeypatch, voting), 1.0
    looks = []

    def status(number, electors):
        looks.append(case.simulated.now)
        return arrived(0) if case.simulated.now >= arrives_s else arrived(late=[0])

    case.group.status = status
    case.group.has_arrived = lambda rank, number: case.simulated.now >= arrives_s
    assert case.speak_until(3)
    assert len(looks) < 60
    assert case.simulated.now < arrives_s + 0.02


@pytest.mark.parametrize(("proved_at", "answer"), [(3.0, Ended), (3.0, None), (None, Ended), (None, None)])
def test_hosts_that_may_have_gone_on_are_not_counted_as_ended(monkeypatch, proved_at, answer):
    """If all ranks of a host have ended, but may have gone on with a decision before, a speaker without a quorum waits
    for a proof, here until 3 s. Without one, it raises an error after 10 s. The same holds if the host is silent."""
    case = Answering(monkeypatch, lambda *_: None)
    case.simulated.behaviour = lambda *_: (0.001, answer)
    proves = lambda *_: proved_at is not None and case.simulated.now >= proved_at  # noqa: E731
    case.group.departures = SimpleNamespace(have_left=proves)
    case.group.no_quorum = lambda *_: ExcludedError("no quorum")
    if proved_at is None:
        with pytest.raises(ExcludedError, match="no quorum"):
            case.speak_until(12)
        assert case.simulated.now > 9
        assert case.speaker._round == 0
    else:
        assert case.speak_until(12)
        assert proved_at < case.simulated.now < proved_at + 0.1
        assert case.registers.decided == [DECISION._replace(members=(0,))]


def test_nobody_waits_for_a_silent_host_after_the_decision(monkeypatch):
    """A speaker that waits for answers to a ballot stops when this host gets the decision of another host's speaker."""
    case = Answering(
        monkeypatch, lambda host, request, now: voting(host, request, now) if request["what"] == "status" else None
    )
    decided_at = 0.5
    case.registers.decision = lambda number: (0, DECISION) if case.simulated.now > decided_at else None
    assert case.speak_until(9)
    assert case.simulated.now < decided_at + 0.1


def test_a_host_that_is_told_is_waited_for(monkeypatch):
    """A speaker waits until other hosts have stored the decision: if it ended before, they could decide otherwise."""
    case = Answering(monkeypatch, voting)
    case.simulated.behaviour = lambda host, request, now: (
        0.8 if request["what"] == "decided" else 0.001,
        voting(host, request, now),
    )
    assert case.speak_until(9)
    assert case.simulated.now > 0.8


def test_ranks_of_a_silent_host_are_lost(monkeypatch):
    """The rank of a host that does not answer, here from 1 s on, is lost after ``SILENT_S``."""
    case = Answering(monkeypatch, lambda host, request, now: None if host == 2 and now > 1 else arrived(late=[host]))
    case.group.status = lambda *_: arrived(late=[0])
    watch, lost_at = Watch(case.group, (0, 1, 2)), None
    while lost_at is None and case.simulated.now < 9:
        if lost := watch.lost():
            lost_at = case.simulated.now
        case.simulated.sleep(0.05)
    assert lost == [2]
    assert 1 + SILENT_S < lost_at < 1 + SILENT_S + 0.2


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        (arrived(1), []),
        (arrived(late=[1]), []),
        (arrived(), [1]),  # it has ended, or is stopped
        ({"late": [], "arrived": {"1": [1, False, 5]}}, [1]),  # it has arrived with the flag false
        ({"moved": "another group"}, [1]),
    ],
)
def test_ranks_are_lost_as_their_host_answers(monkeypatch, answer, lost):
    """A rank is lost if its host answers that the rank has ended, is stopped, has failed, or has left the group."""
    case = Answering(monkeypatch, lambda *_: answer)
    watch = Watch(case.group, (0, 1))
    assert watch.lost() == []
    case.simulated.sleep(0.05)
    assert watch.lost() == lost


def test_a_process_that_does_not_answer_when_it_joins_is_waited_for_once(monkeypatch):
    """If a joining process, here "b", does not answer, none is asked again. Every check raises an error."""
    asked, old = [], SimpleNamespace(agreements=None)
    monkeypatch.setattr(formation, "is_answering", lambda peer, token: asked.append(token) or token == "a")
    made = GroupFormation(old, None, Settings(10.0, "world"), 10.0, grows=True)
    made._joiners = dict.fromkeys("abc")
    for _ in range(3):
        made._check_at = 0.0
        with pytest.raises(PeerLostError, match="was to join the group has ended, or does not answer"):
            made._check(lambda: None)
    assert asked == ["a", "b"]


class SilentStore:
    """A store whose host does not answer. ``limits_s``: how long each request would have waited."""

    def __init__(self):
        self.limit_s, self.limits_s = 10.0, []

    def limit_waits(self, seconds):
        self.limit_s = seconds

    def answers_again(self):
        return False

    def set(self, key, value):
        self.limits_s.append(self.limit_s)
        raise RuntimeError("Timeout: the rank that serves the store does not answer")


def test_reading_the_reason_of_an_abort_does_not_wait_long_for_a_silent_store():
    """``leave`` waits for 1 s for a silent store. After the store's 10 s the others would have excluded the rank."""
    store = SilentStore()
    StoreRendezvous(store, rank=3, size=5, timeout_s=300.0).leave(reader=3, readers=[1, 3])
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
    """A ``PeerLostError`` with the global number of the rank that serves the store says that the store is lost."""
    assert names_owner(error, owner, global_ranks=(4, 5)) is lost


@pytest.mark.parametrize(
    ("rank", "why", "text"),
    [
        (0, "its host has not answered for 120 s", "rank 0 died or left during op 3, barrier"),
        (1, "Connection timed out", "ranks 0, 1 died or left during op 3, barrier"),
        (0, "it has closed the connection", "rank 0 did not complete op 3, barrier"),
        (1, "Connection reset by peer", "rank 0 did not complete op 3, barrier"),
    ],
)
def test_a_host_that_vanishes_with_the_store_is_lost(rank, why, text):
    """If the host of the store has not answered for two minutes, the error does not say that the timeout has passed."""
    peer = PeerInfo(1, "a", "", Place((), 1, ""), Offer("tcp", "tcp", ""))
    members = Membership("world", 2, (0, 1, 2), ((0,), (1,), (2,)), (peer,) * 3)
    memory = SimpleNamespace(last_call=lambda _: CallSignature(3, "barrier"))
    detector = FailureDetector(members, memory, SimpleNamespace(owner=0), None, 1800.0)
    assert text in str(detector._unreachable_error(PeerDisconnected(rank, why), timed_out=True))


class Relaying:
    """Rank 2, on host 1 of three hosts with two ranks each, in simulated time. All processes answer."""

    def __init__(self, monkeypatch, addresses=("10.0.0.9", "127.0.0.1")):
        self.simulated = SimulatedHosts(monkeypatch, lambda *_: (0.001, {}))
        hosts = ((0, 1), (2, 3), (4, 5))
        place = Place(addresses, 1, "")
        peers = [PeerInfo(0, "", "token", place, Offer("tcp", "tcp", "")) for _ in range(6)]
        self.decided = 7, Decision((0, 1, 2, 4, 5), 1, True, 3)  # in ballot 7; rank 3 is not a member
        registers = SimpleNamespace(
            arrive=lambda _: None, decision=lambda number: self.decided if number else None, follows=lambda *_: True
        )
        memory = SimpleNamespace(host=(2, 3), registers=registers)
        self.group = Agreements(2, hosts, memory, peers, range(6), "world")

    def connect(self, rank):
        return self.group.answer({"what": "connect", "rank": rank, "port": 1})


def test_relays_are_members_of_third_hosts(monkeypatch):
    """One of each host comes first. The two hosts themselves, and hosts of ranks that are not members, lack one."""
    group = Relaying(monkeypatch).group
    assert [peer.rank for peer in group.relays(0, range(6))] == [4, 5]
    assert [peer.rank for peer in group.relays(2, (1, 2, 4))] == [1]
    assert group.relays(1, range(6)) == []
    peer = group.peer(0)
    peer.relay = group.peer(5)
    group.forget_relays((0, 2, 5))
    assert peer.relay is group.peer(5)
    group.forget_relays((0, 2, 4))
    assert peer.relay is None


def test_a_relay_connects_to_members_of_other_hosts_only(monkeypatch):
    """A relay connects to the address at which it has reached a host. Before that, it tries all but loopback addresses.
    It does not connect to ranks of its own host, to invalid ranks, or after it is no longer a member."""
    relaying = Relaying(monkeypatch)
    assert relaying.connect(4) == {"addresses": ["10.0.0.9"], "known": False}
    relaying.group.peer(4).known = "10.0.0.4"
    assert relaying.connect(4) == {"addresses": ["10.0.0.4"], "known": True}
    relaying.group.peer(3)
    for rank in (2, 3, 6, -1):
        assert relaying.connect(rank) == {"unknown": True}
    relaying.group.electors = (0, 1, 3, 4)
    assert relaying.connect(4) == {"unknown": True}


def test_a_relay_tells_the_decision_to_hosts_behind_it(monkeypatch):
    """A relay sends a decision to the hosts to which it has relayed connections since the last decision. They may be
    reachable only through this process, which may end after the decision."""
    relaying, told = Relaying(monkeypatch), []

    def recorded(hosts, electors, request, again_s=None):
        told.append((set(hosts), request["what"], request.get("ballot")))
        simulated = {host: [relaying.simulated.process(host)] for host in hosts}
        return RepeatedRequest(simulated, "token", request, again_s)

    monkeypatch.setattr(relaying.group, "inquiry", recorded)
    relaying.group.decide(1, True, 3, 10.0)
    assert told == []
    relaying.connect(4)
    relaying.group.decide(1, True, 3, 10.0)
    assert told == [({2}, "decided", 7)]
    relaying.group.decide(1, True, 3, 10.0)
    assert len(told) == 1  # nothing was passed on since


def test_a_rank_is_beyond_a_link_if_it_answers_only_through_a_relay(monkeypatch):
    """A rank is beyond a lost link if it has a relay, and no rank of its host has answered directly for 1 s. A newer
    direct answer shows that the link is only slow."""
    relaying = Relaying(monkeypatch)
    group, reach = relaying.group, Reach(relaying.group, range(6))
    reach._inquiry = SimpleNamespace(read=lambda: None)
    assert not reach.is_beyond(4)
    group.peer(4).relay = group.peer(5).relay = group.peer(0)
    assert reach.is_beyond(4)
    relaying.simulated.now = 10.0
    group.peer(5).reached_at = 9.5
    assert not reach.is_beyond(4)
    relaying.simulated.now = 12.0
    assert reach.is_beyond(4)
    assert not reach.is_beyond(3)
