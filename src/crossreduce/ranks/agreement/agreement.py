"""``Agreements``: the ranks of a group agree on which of them are left, although ranks die, stop or are late meanwhile.

Input: the memory of this rank's host, and where ranks of other hosts listen (``peer_requests``). Output: decisions, the
same on all ranks that get one. Agreements are numbered. The members of one agreement are the electors of the next one.
The lowest rank of a host that has arrived is its speaker. When all electors have arrived, have ended, or are too late,
a speaker makes a decision final by a ballot between the hosts (``ballots``). On one host that is one atomic write.

At most one group continues: a decision needs a quorum of hosts, and a rank that is not a member in a decision never
gets another one, also when all members have ended (``departures``). A rank without a quorum raises an error.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Final

from ...errors import ExcludedError
from ..connections import peer_requests
from ..connections.peer_requests import Json, Peer, Place
from ..connections.peers import PeerInfo
from ..connections.repeated_request import RepeatedRequest
from ..intra_host.registers import Contribution, Decision, Overtaken, Registers
from ..intra_host.shared_memory import RankMemory
from ..transports.addresses import reachable
from .ballots import Ballot, has_quorum, read_decided, read_decision
from .departures import Departures

_PAUSES_S: Final = (50e-6, 1e-3)  # between two reads of the registers, first and longest
LOOK_S: Final = 0.02  # between two checks which ranks of the host are alive, and from an answer to the next request
_TURN_S: Final = 0.15  # how much later than one host the next host begins to speak
_VOTE_S: Final = 2.0  # how long the answers to a request of a ballot are waited for; there are ``ROUNDS`` ballots
_TOLD_S: Final = 1.0  # how long a host that has just answered may take to store a decision
_LACKING_S: Final = 10.0  # how long a host without a quorum tries to reach the missing hosts
_BEYOND_S: Final = 2.0  # how long after the timeout a rank waits for a decision of others
JOINER_S: Final = 3.0  # how long a request to join is valid; the process repeats it more often
_MOVED: Final = {"moved": True}  # the answer of a host that has gone on to later agreements
_LOG: Final = logging.getLogger("crossreduce")


class Agreements:
    """The agreements of one group, in the view of one rank. One thread at a time calls ``decide``.

    ``electors``: the ranks that take part in the next agreement. ``published``: values that other ranks may read.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[Sequence[int]],
        memory: RankMemory,
        peers: Sequence[PeerInfo],
        global_ranks: Sequence[int],
        name: str,
    ) -> None:
        self.rank, self.hosts, self._memory, self._infos, self._name = rank, hosts, memory, peers, name
        self._global_ranks = global_ranks
        self.token = peers[0].token
        self._host_of = {each: k for k, host in enumerate(hosts) for each in host}
        self.own_host = self._host_of[rank]
        others = [each for each in self._host_of if self._host_of[each] != self.own_host]
        self.others = {each: Peer(peers[each].place, rank=each) for each in others}
        self.electors: tuple[int, ...] = tuple(range(len(peers)))
        self.number = 0  # of the latest agreement of this rank
        self.waiting: dict[str, tuple[float, Json]] = {}  # of each process that wants to join: time of request, place
        self.published: dict[str, Json] = {}
        self.last: tuple[int, Decision] | None = None  # a ballot's number, and the decision of agreement ``number``
        self._relayed: set[int] = set()  # the hosts to which this process has relayed connections
        self.departures = Departures()

    @property
    def registers(self) -> Registers:
        """The registers of this host."""
        return self._memory.registers

    def know(self, addresses: Mapping[int, str]) -> None:
        """Store addresses at which ranks of other hosts were reached. They hold for all ranks of the same host."""
        for rank, address in addresses.items():
            for other in self.hosts[self._host_of[rank]]:
                if other in self.others:
                    self.others[other].known = self.others[other].known or address

    def connect(self, lost: Collection[tuple[int, int]]) -> None:
        """Make the connections of ``departures``, except to hosts that have lost the link. See ``HostLinks.lost``."""
        own, others = self.own_host, self.others.items()
        linked = {rank: peer for rank, peer in others if tuple(sorted((own, self._host_of[rank]))) not in lost}
        self.departures.connect(linked, self.token, self.rank)

    def joiners(self) -> dict[str, Json]:
        """Return the places, by token, of the processes whose requests to join are valid. Remove older requests."""
        since = time.monotonic() - JOINER_S
        for token, (at, _) in [*self.waiting.items()]:
            if at <= since:
                self.waiting.pop(token, None)  # another thread may have removed it
        return {token: place for token, (_, place) in [*self.waiting.items()]}

    def place_of(self, rank: int) -> Place:
        """Return where a rank of the group listens."""
        return self._infos[rank].place

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return self._host_of[rank]

    def peer(self, rank: int) -> Peer:
        """Return a rank of the group as a process to ask."""
        peer = self.others.get(rank)
        if peer is None:
            place = self._infos[rank].place
            peer = self.others[rank] = Peer(place, place.addresses[-1])  # the last one is the loopback address
        return peer

    def decide(self, kind: int, flag: bool, progress: int, timeout_s: float) -> Decision:
        """Agree with the electors on which of them have called this, and on the other fields of the ``Decision``.

        ``timeout_s``: how long electors that are alive are waited for.

        Raises:
          ExcludedError: the others have decided without this rank, or this rank reaches no quorum.
        """
        self.number, self.last = self.number + 1, None
        number, began = self.number, time.monotonic()
        electors = self.electors
        try:
            self.registers.arrive(Contribution(number, kind, flag, progress))
            speaker = _Speaker(self, number, electors, timeout_s)
            pause_s, look_at, speaks = _PAUSES_S[0], began, False
            while (decided := self.registers.decision(number)) is None:
                now = time.monotonic()
                if now > began + timeout_s + _BEYOND_S:
                    raise self.no_quorum(electors, timeout_s)
                if now >= look_at:
                    speaks, look_at = self._speaks(number, electors), now + LOOK_S
                if not (speaks and speaker.speak()):
                    speaker.wait(pause_s)
                    pause_s = min(2 * pause_s, _PAUSES_S[1])
        except Overtaken:
            raise self._excluded() from None
        decision = decided[1]
        self.electors, self.last = decision.members, decided
        if self.rank not in decision.members:
            raise self._excluded()
        self.departures.tell(electors, number, decided)
        if relayed := self._relayed & {self._host_of[rank] for rank in decision.members}:
            self._tell_relayed(relayed, number, decided)
            self._relayed -= relayed  # until this process relays another connection
        return decision

    def _tell_relayed(self, hosts: Collection[int], number: int, decided: tuple[int, Decision]) -> None:
        """Send a decision to hosts that others may reach only through this process, which may end at once."""
        try:
            request = self.request("decided", number, ballot=decided[0], decision=decided[1])
            _wait_until_noted(self.inquiry(hosts, decided[1].members, request), hosts, lambda _: False)
        except Overtaken:
            raise self._excluded() from None
        except RuntimeError:  # too many threads
            _LOG.warning("a decision was not forwarded, because no thread could be started")

    def _speaks(self, number: int, electors: Sequence[int]) -> bool:
        """Return whether this rank is the speaker of its host: no lower rank has arrived and is running."""
        for rank in self.hosts[self.own_host]:
            if rank == self.rank:
                return True
            if rank in electors and self.has_arrived(rank, number) and self._is_running(rank):
                return False
        raise AssertionError("this rank is on its host")

    def has_arrived(self, rank: int, number: int) -> bool:
        """Return whether a rank of this host has arrived at an agreement, or at a later one."""
        return self.registers.contribution(self._memory.host.index(rank)).number >= number

    def _is_running(self, rank: int) -> bool:
        return self._memory.alive(rank) and not self._memory.is_stopped(rank)

    # Answers to ranks of other hosts

    def answer(self, request: dict[str, Json]) -> dict[str, Json]:
        """Return the answer to a request of another rank. Any thread may call this."""
        what, number = request["what"], int(request.get("number", 0))
        try:
            if what == "connect":
                return self._relays_to(int(request["rank"]))
            if what == "keep":
                return {"keep": partial(self.departures.accept, int(request["rank"]))}
            if what == "published":
                return {"value": self.published.get(str(request["key"]))}
            if what == "join":
                self.waiting[str(request["token"])] = time.monotonic(), request["place"]
                self.joiners()  # removes old requests
                return {"members": [self._infos[rank].place for rank in self.electors]}
            if what == "waiting":
                return {"waiting": self.joiners()}
            if what == "result":
                return {"decided": self.registers.decision(number)}
            if not self.registers.follows(number, read_decided(request["previous"])):
                return {"otherwise": True}  # this host has another decision of the previous agreement
            if what == "status":
                return self.status(number, request["electors"])
            ballot = int(request["ballot"])
            if what == "promise":
                return {"accepted": self.registers.promise(number, ballot, request["ended"])}
            decision = read_decision(request["decision"])
            if what == "accept":
                return {"accepted": self.registers.accept(number, ballot, decision)}
            self.registers.decide(number, ballot, decision)
        except Overtaken:
            return _MOVED
        except (OSError, TypeError, ValueError):  # the memory is closed, or the request is not valid
            return peer_requests.redirection(self.token, request)
        return {}

    def _relays_to(self, rank: int) -> dict[str, Json]:
        """Return the addresses to which this process connects as a relay to another rank."""
        peer = self.others.get(rank)
        if peer is None or self._host_of[rank] == self.own_host or self.rank not in self.electors:
            return {"unknown": True}
        self._relayed.add(self._host_of[rank])
        addresses = reachable(peer.place.addresses, peer.place.machine)
        return {"addresses": [peer.known] if peer.known else addresses, "known": bool(peer.known)}

    def status(self, number: int, electors: Sequence[int]) -> dict[str, Json]:
        """Return the state of an agreement on this host.

        "arrived": the contribution of each elector of this host that has arrived. "late": the other electors, except
        those that have ended or are stopped. "decided": see ``Registers.decision``.
        """
        decided = self.registers.decision(number)
        arrived, late = {}, []
        for place, rank in enumerate(self._memory.host):
            if rank not in electors:
                continue
            contribution = self.registers.contribution(place)
            if rank == self.rank or self._memory.alive(rank):
                if contribution.number == number:
                    arrived[str(rank)] = [contribution.kind, contribution.flag, contribution.progress]
                elif not self._memory.is_stopped(rank):
                    late.append(rank)
        return {"decided": decided, "arrived": arrived, "late": late}

    # Questions to other hosts

    def request(self, what: str, number: int, **content: Json) -> dict[str, Json]:
        """Return a request about an agreement. By "previous", the asked host checks that it has the same electors."""
        previous = self.registers.decision(number - 1) if number > 1 else None
        return {"what": what, "number": number, "previous": previous, **content}

    def inquiry(
        self, hosts: Iterable[int], electors: Sequence[int], request: dict[str, Json], again_s: float | None = None
    ) -> RepeatedRequest:
        """Return a request to these hosts, which any elector there may answer: all of them read the same registers."""
        processes = {host: [self.others[rank] for rank in self.hosts[host] if rank in electors] for host in hosts}
        relays = {host: self.relays(host, electors) for host in processes}
        return RepeatedRequest(processes, self.token, request, again_s, relays)

    def forget_relays(self, members: Sequence[int]) -> None:
        """Use only ``members`` as relays from now on, since other ranks may leave at any time."""
        for peer in self.others.values():
            relay = peer.relay
            if relay is not None and relay.rank not in members:
                peer.relay = None

    def relays(self, host: int, electors: Sequence[int]) -> list[Peer]:
        """Return the electors on third hosts, through which a host may be reached. One of each host comes first."""
        if host == self.own_host:
            return []
        others = [ranks for k, ranks in enumerate(self.hosts) if k not in (self.own_host, host)]
        in_turn = [rank for several in zip_longest(*others) for rank in several if rank in electors]
        return [self.others[rank] for rank in in_turn]

    # Errors

    def _excluded(self) -> ExcludedError:
        own = self._global_ranks[self.rank]
        problem = f'rank {own} is not in group "{self._name}" any more: the other ranks have gone on without it.'
        return ExcludedError.of(problem, "it was late, or could not be reached", "join the group again as a new rank")

    def no_quorum(self, electors: Sequence[int], timeout_s: float) -> ExcludedError:
        """Return the error if this rank reaches too few ranks."""
        own = self._global_ranks[self.rank]
        problem = f'rank {own} cannot reach enough ranks of group "{self._name}" to continue. The others may continue.'
        hosts = Counter(self._host_of[rank] for rank in electors)
        given = f"waited {timeout_s:g} s; this host has {hosts[self.own_host]} of the {len(electors)} ranks"
        remedy = "check the network: a rank must reach hosts with more than half of the ranks, or with half of them "
        remedy += "and the lowest rank, unless the others have certainly ended"
        return ExcludedError.of(problem, given, remedy)


class _Speaker:
    """The actions of the speaker of a host in one agreement."""

    def __init__(self, group: Agreements, number: int, electors: tuple[int, ...], timeout_s: float) -> None:
        self._group, self._number, self._electors = group, number, electors
        self._began = time.monotonic()
        self._until = self._began + timeout_s
        self._weights = Counter(group.host_of(rank) for rank in electors)
        self._others = [host for host in self._weights if host != group.own_host]
        self._turn = sorted(self._weights).index(group.own_host)
        self._statuses: RepeatedRequest | None = None  # the request for the states of the other hosts, once it is sent
        self._gone: set[int] = set()  # the hosts that do not answer any more, since all electors have ended or left
        self._late: list[int] = []  # the late ranks of this host at the last check
        self._look_at = 0.0  # when to check again if no late rank arrives before: a check reads files of the system
        self._ready_at = 0.0  # when ``_ready`` first returned contributions
        self._round = 0  # the number of ballots so far

    def wait(self, seconds: float) -> None:
        """Wait for ``seconds``, or until another host answers."""
        if self._statuses is None or not self._others:
            time.sleep(seconds)
        else:
            self._read(self._statuses, seconds)

    def speak(self) -> bool:
        """Do one step towards a decision. Return whether there is a final decision."""
        now = time.monotonic()
        if self._statuses is None:
            if self._others and now < self._began + _TURN_S * self._turn:
                return False
            request = self._group.request("status", self._number, electors=self._electors)
            self._statuses = self._group.inquiry(self._others, self._electors, request, LOOK_S)
        contributions = self._ready(self._statuses)
        if contributions is None:
            return False
        if self._turn:  # wait for some time if ranks of a lower host have arrived, since it should begin the ballot
            self._ready_at = self._ready_at or now
            is_lower_here = any(self._group.host_of(rank) < self._group.own_host for rank in contributions)
            if now < self._ready_at + 2 * _TURN_S * self._turn and is_lower_here:
                return False
        return self._vote(Decision.of(contributions), self._statuses)

    def _read(self, statuses: RepeatedRequest, wait_s: float = 0.0) -> None:
        """Read answers of other hosts. Record which hosts are gone, and write a decision to the registers."""
        for host in statuses.read(wait_s):
            status = statuses.found[host]
            if status is None:
                self._gone.add(host)
            elif "moved" in status:
                if not self._is_decided():
                    raise Overtaken
            elif (decided := read_decided(status["decided"])) is not None:
                self._group.registers.decide(self._number, *decided)

    def _is_decided(self) -> bool:
        """Return whether this host has the decision, which the speaker of another host may have sent."""
        return self._group.registers.decision(self._number) is not None

    def _ready(self, statuses: RepeatedRequest) -> dict[int, Contribution] | None:
        """Return the contribution of each rank that has arrived, or ``None`` if this host must wait for other ranks.

        Earlier answers of a silent host do not count: its ranks could not continue with the others.
        """
        self._read(statuses)
        if self._is_decided():
            return None
        group, now = self._group, time.monotonic()
        if now < self._look_at and not any(group.has_arrived(rank, self._number) for rank in self._late):
            return None
        contributions: dict[int, Contribution] = {}
        waits = now < self._until
        for host in [*self._others, self._group.own_host]:
            status = None
            if host == self._group.own_host:
                status = self._group.status(self._number, self._electors)
            elif statuses.is_current(host):
                status = statuses.found[host]
            elif host not in self._gone and (statuses.is_due(host) or (waits and not statuses.is_silent(host))):
                return None  # it may still answer
            if status is None:
                continue
            if status["late"] and waits:
                if host == self._group.own_host:
                    self._late, self._look_at = status["late"], time.monotonic() + LOOK_S
                return None
            for rank, (kind, flag, progress) in status["arrived"].items():
                contributions[int(rank)] = Contribution(self._number, kind, flag, progress)
        return contributions

    def _vote(self, decision: Decision, statuses: RepeatedRequest) -> bool:
        """Hold a ballot to make a decision final. Return whether there is a final decision."""
        group, number, own, registers = self._group, self._number, self._group.own_host, self._group.registers
        doubtful = self._gone | {host for host in self._others if statuses.is_silent(host)}
        electors = {host: set(group.hosts[host]) & {*self._electors} for host in doubtful}
        ended = {host for host in doubtful if group.departures.have_left(electors[host], number, registers)}
        if self._is_decided():
            return True
        if (unproved := doubtful - ended) and not has_quorum(self._weights, self._weights.keys() - doubtful):
            if time.monotonic() > max(map(statuses.answered_at.__getitem__, unproved)) + _LACKING_S:
                raise group.no_quorum(self._electors, time.monotonic() - self._began)
            return False  # they may have gone on with a decision, and may have sent it
        ballot = Ballot(self._round * len(group.hosts) + own, own, decision, self._weights, ended)
        self._round += 1
        if ballot.number >= registers.ballots:
            raise group.no_quorum(self._electors, self._until - self._began)
        if not ballot.accepting:
            ballot.promised(own, registers.promise(number, ballot.number, ballot.ended))
            request = group.request("promise", number, ballot=ballot.number, ended=sorted(ballot.ended))
            for host, answer in self._answers(request, lambda: ballot.accepting):
                ballot.promised(host, read_decided(answer["accepted"]))
        if ballot.accepting:
            ballot.accepted(own, registers.accept(number, ballot.number, ballot.decision))
            request = group.request("accept", number, ballot=ballot.number, decision=ballot.decision)
            for host, answer in self._answers(request, lambda: ballot.final or ballot.refused):
                ballot.accepted(host, answer["accepted"] and read_decision(answer["accepted"]))
        if not ballot.final:
            if self._is_decided():
                return True
            last_answers = [statuses.answered_at[k] for k in self._others if k not in ballot.answered | ended]
            if last_answers and not ballot.refused and time.monotonic() > max(last_answers) + _LACKING_S:
                raise group.no_quorum(self._electors, time.monotonic() - self._began)
            time.sleep(random.uniform(0.5, 1.5) * LOOK_S * (1 + self._turn))
            return False
        registers.decide(number, ballot.number, ballot.decision)
        request = group.request("decided", number, ballot=ballot.number, decision=ballot.decision)
        hosts = {group.host_of(rank) for rank in ballot.decision.members} - {own}
        # If this process ended now, other hosts could decide differently without it. A silent host could do so anyway.
        _wait_until_noted(group.inquiry(hosts, self._electors, request), hosts, statuses.is_silent)
        return True

    def _answers(
        self, request: dict[str, Json], is_enough: Callable[[], bool]
    ) -> Iterator[tuple[int, dict[str, Json]]]:
        """Yield other hosts and their answers to a request of a ballot until there are enough, or ``_VOTE_S`` passed.

        A rank that has left this agreement sends the decision only in answers to requests for the status.
        """
        others = [host for host in self._others if host not in self._gone]
        if is_enough() or not others:
            return
        inquiry, until = self._group.inquiry(others, self._electors, request), time.monotonic() + _VOTE_S
        while len(inquiry.found) < len(others) and time.monotonic() < until and not self._is_decided():
            for host in inquiry.read(LOOK_S):
                answer = inquiry.found[host]
                if answer is None:
                    self._gone.add(host)
                elif "moved" not in answer:
                    yield host, answer
                    if is_enough():
                        return


def _wait_until_noted(inquiry: RepeatedRequest, hosts: Collection[int], is_silent: Callable[[int], bool]) -> None:
    """Send a decision to hosts. Wait until all but silent hosts have stored it, for at most ``_TOLD_S``."""
    until = time.monotonic() + _TOLD_S
    inquiry.read()
    while time.monotonic() < until and not all(host in inquiry.found or is_silent(host) for host in hosts):
        inquiry.read(LOOK_S)
