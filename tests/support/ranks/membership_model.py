"""A model of agreements on the surviving ranks: all runs of a small group, with crashes and with lost or late messages.

``Model(scenario).check()`` visits every state that a scenario can reach. If a state violates a property, it raises
``Violation`` with the shortest run to this state. The registers, ballots and quorums are those of the library. Each
call is computed once for each content of a host's memory. The driver, the network and the failures are a model:

- A message is never deleted: it may be received late, repeatedly, out of order, or never (if it is lost).
- An answer stays with the leader that waits for it, even after the host that sent it has ended.
- A leader that proposes ranks has seen their arrivals at some time before. They may have ended since.
- A rank may end between any two steps, also normally, after it has gone on with a decision. A host has ended when all
  its electors have ended.
- Before a rank goes on with a decision, it sends it to all electors of other hosts, one after the other. What it has
  sent is never lost, but received only after it has ended, as if all links were lost until then: see ``Departures``.
- A leader's steps on its own host happen in one step with the event that causes them. Others cannot observe this.
- Calls are not divided: a rank that ends within a call has the same effect as a shorter call (``test_registers.py``).

Properties of every state:

- agreement: all hosts with living ranks that know the decision of an agreement know the same decision. A rank that has
  gone on with a decision, and has ended, had the same one.
- validity: the members of a decision are electors that have arrived, and its other fields follow from their inputs.
- one group: if two ranks are members of their decisions, and live or have gone on before they ended, at least one of
  these decisions contains both ranks.
- progress: if the hosts of a quorum reach each other from now on, and no more ranks end, they decide, and agree with
  all others. One more ballot, in a round of its own, checks this from every state.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, combinations, product
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

from crossreduce.ranks.agreement.ballots import Ballot, has_quorum
from crossreduce.ranks.intra_host import registers as registers_file
from crossreduce.ranks.intra_host.registers import Contribution, Decision, Overtaken, Registers

MOVED = "moved"  # the answer of a host that does not take part
IDLE = -1  # no ballot, or no answer


class Scenario(NamedTuple):
    """The events that may occur.

    Args:
      hosts: the number of ranks on each host.
      ballots: (rank, round) of the ballots that may start, each once per agreement, in any order of the ranks.
      most: the maximum number of ballots that start in a run.
      crashes: the maximum number of ranks (with ``power``: of hosts) that end.
      late: ranks that arrive during the run. All others have arrived before.
      numbers: the number of agreements.
      power: whether all ranks of a host end at the same time.
      proposals: the ranks for which a leader proposes a decision. "all": all that have arrived. "own": those of its
        host. "some": one of these two, those that live, or itself only. "any": itself and any that have arrived.
    """

    hosts: tuple[int, ...]
    ballots: tuple[tuple[int, int], ...]
    most: int
    crashes: int = 0
    late: tuple[int, ...] = ()
    numbers: int = 1
    power: bool = False
    proposals: str = "some"

    @property
    def rounds(self) -> int:
        """The number of rounds in which ballots may start."""
        return 1 + max(round_ for _, round_ in self.ballots)


def rounds(ranks: Iterable[int], count: int) -> tuple[tuple[int, int], ...]:
    """Return the ballots (rank, round) of these ranks in ``count`` rounds."""
    return tuple((rank, round_) for round_ in range(count) for rank in ranks)


class Violation(Exception):  # noqa: N818 - not an error of the model
    """A property does not hold. The text lists the steps to this state."""


class Request(NamedTuple):
    """A leader's request to other hosts: "promise", "accept" or "told". ``content``: ended hosts, or a decision."""

    what: str
    number: int
    ballot: int
    content: Any
    leader: int
    previous: tuple[int, Decision] | None
    electors: tuple[int, ...]


class Rank(NamedTuple):
    """A living rank. ``number``: its agreement, 0 before any. ``pending``: each host's unread answer, or ``IDLE``."""

    number: int
    round: int
    ballot: int
    pending: tuple[int, ...]


class State(NamedTuple):
    """A state. ``memories``: numbers in ``Model``'s table. ``requests``: a bit set of such numbers. ``ranks``: ``None``
    if a rank has ended. ``ballots``, ``crashes``: how many may still occur. ``ends``: of each rank that has ended, the
    number of its agreement, and to how many electors of other hosts it had sent this agreement's decision."""

    memories: tuple[int, ...]
    ranks: tuple[Rank | None, ...]
    requests: int
    ballots: int
    crashes: int
    ends: tuple[tuple[int, int], ...]


class Table(dict):
    """Gives values numbers, in the order of their first look-up. ``seen[number]`` is the value with a number."""

    def __init__(self):
        self.seen = []

    def __missing__(self, value):
        self[value] = len(self.seen)
        self.seen.append(value)
        return self[value]


class Model:
    """The driver, the network and the failures of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.host_of = [host for host, count in enumerate(scenario.hosts) for _ in range(count)]
        self.size, self.hosts = len(self.host_of), range(len(scenario.hosts))
        first = [self.host_of.index(host) for host in self.hosts]
        self.place = [rank - first[host] for rank, host in enumerate(self.host_of)]
        self._idle = (IDLE,) * len(self.hosts)
        self._memories, self._requests, self._answers, self._ballots = Table(), Table(), Table(), Table()
        self._ballot_of: list[Ballot] = []
        self._calls: dict[Any, tuple[int, Any]] = {}
        self._checked: set[Any] = set()  # the parts of states on which properties depend, if checked
        self._agreed: set[Any] = set()  # the same for properties of known decisions
        self._views: dict[tuple[int, int], Any] = {}

    # The search

    def check(self) -> int:
        """Return the number of states that can be reached. Raise ``Violation`` if a property does not hold in one."""
        with patch.object(registers_file, "ROUNDS", self.scenario.rounds + 1):  # the last one is for ``_progress``
            first = self._first()
            came_from: dict[State, tuple[State, str] | None] = {first: None}
            layer, state, step = [first], None, ""
            try:
                self._properties(first)
                while layer:
                    following = []
                    for state in layer:
                        for step, after in self._steps(state):
                            if after not in came_from:
                                came_from[after] = state, step
                                self._properties(after)
                                following.append(after)
                    layer = following
            except (Violation, AssertionError) as error:
                told = [f"-> {error}", step]
                while state is not None and came_from[state] is not None:
                    state, step = came_from[state]
                    told.append(step)
                raise Violation("\n".join(reversed(told))) from error
            return len(came_from)

    def wander(self, random: Random, walks: int, length: int) -> None:
        """Take ``length`` random steps from the first state, ``walks`` times. Raise ``Violation`` like ``check``."""
        with patch.object(registers_file, "ROUNDS", self.scenario.rounds + 1):
            for _ in range(walks):
                state, taken = self._first(), []
                try:
                    while len(taken) < length and (possible := [*self._steps(state)]):
                        step, state = random.choice(possible)
                        taken.append(step)
                        self._properties(state)
                except (Violation, AssertionError) as error:
                    raise Violation("\n".join([*taken, f"-> {error}"])) from error

    def _first(self) -> State:
        sizes = [Registers.nbytes(ranks, self.size, len(self.hosts)) for ranks in self.scenario.hosts]
        memories = tuple(self._memories[bytes(nbytes)] for nbytes in sizes)
        ranks = (Rank(0, 0, IDLE, self._idle),) * self.size
        state = State(memories, ranks, 0, self.scenario.most, self.scenario.crashes, ((0, 0),) * self.size)
        for rank in range(self.size):
            if rank not in self.scenario.late:
                state = self._arrived(state, rank, 1)
        return state

    # Steps

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield each possible step, with the state after it."""
        for rank, living in enumerate(state.ranks):
            if living is None:
                continue
            yield from self._crashes(state, rank)
            number = living.number
            if number == 0:
                yield f"rank {rank} arrives", self._arrived(state, rank, 1)
                continue
            decided = self._known(state.memories, self.host_of[rank], number)
            if decided is not None and number < self.scenario.numbers and rank in decided[1].members:
                yield f"rank {rank} goes on", self._arrived(state, rank, number + 1)
            if decided is None:
                yield from self._starts(state, rank)
            for host, answer in enumerate(living.pending):
                if answer != IDLE:
                    yield f"rank {rank} reads the answer of host {host}", self._read(state, rank, host)
        for request in sorted(self._requests_of(state)):
            yield from self._executions(state, request)

    def electors(self, previous: tuple[int, Decision] | None) -> tuple[int, ...]:
        """Return the ranks that take part in the agreement after ``previous``."""
        return tuple(range(self.size)) if previous is None else previous[1].members

    def _crashes(self, state: State, rank: int) -> Iterator[tuple[str, State]]:
        if not state.crashes or (self.scenario.power and self.place[rank]):
            return
        own, ranks, ends = self.host_of[rank], list(state.ranks), list(state.ends)
        what = f"host {own}" if self.scenario.power else f"rank {rank}"
        ending = [k for k in range(self.size) if k == rank or (self.scenario.power and self.host_of[k] == own)]
        ending = [k for k in ending if ranks[k] is not None]
        decided = self._known(state.memories, own, state.ranks[rank].number) if state.ranks[rank].number else None
        told = len(self._told(state, rank, state.ranks[rank].number)) if decided and rank in decided[1].members else 0
        for k in ending:
            ranks[k], ends[k] = None, (state.ranks[k].number, 0)
        for count in range(told + 1):
            ends[rank] = state.ranks[rank].number, count
            after = state._replace(ranks=tuple(ranks), crashes=state.crashes - 1, ends=tuple(ends))
            yield f"{what} ends" + f", after it has told {count} ranks" * bool(told), after

    def _told(self, state: State, rank: int, number: int) -> list[int]:
        """Return the ranks to which a rank sends the decision of an agreement, in the order in which it sends it."""
        before = self._known(state.memories, self.host_of[rank], number - 1) if number > 1 else None
        return [each for each in self.electors(before) if self.host_of[each] != self.host_of[rank]]

    def _has_told(self, state: State, rank: int, other: int, number: int) -> bool:
        """Return whether a rank that has ended had sent the decision of an agreement to another rank."""
        last, count = state.ends[rank]
        return number < last or (number == last and other in self._told(state, rank, number)[:count])

    def _has_gone_on(self, state: State, rank: int, number: int) -> bool:
        """Return whether a rank that has ended had gone on with the decision of an agreement."""
        last, count = state.ends[rank]
        return number < last or (number == last and count == len(self._told(state, rank, number)) > 0)

    def _noticed(self, state: State, leader: int, number: int, electors) -> tuple[State, frozenset[int]]:
        """Return the state after a leader has looked which hosts have ended, and these hosts.

        It writes the decisions that it has received to the memory of its host. See ``Departures.have_left``.
        """
        own, lasting = self.host_of[leader], set()
        for rank in electors:
            if state.ranks[rank] is None and self.host_of[rank] != own and self._has_told(state, rank, leader, number):
                found = self._known(state.memories, self.host_of[rank], number)
                memory, _ = self._call(own, state.memories[own], "decide", number, *found)
                state = state._replace(memories=_put(state.memories, own, memory))
                lasting.add(self.host_of[rank])
        return state, self._weights(state, electors)[1] - lasting

    def _arrived(self, state: State, rank: int, number: int) -> State:
        host = self.host_of[rank]
        given = self.contribution(rank, number)
        memory, _ = self._call(host, state.memories[host], "arrive", given, place=self.place[rank])
        state = state._replace(memories=_put(state.memories, host, memory))
        return state._replace(ranks=_put(state.ranks, rank, Rank(number, 0, IDLE, self._idle)))

    def contribution(self, rank: int, number: int) -> Contribution:
        """Return the input of a rank to an agreement, which differs from all other inputs."""
        return Contribution(number, 0, rank % 2 == 0, 10 * number + rank)

    def _starts(self, state: State, rank: int) -> Iterator[tuple[str, State]]:
        """Yield the ballots that a rank can start. It may have noticed some of the arrivals and of the ended hosts."""
        living, own = state.ranks[rank], self.host_of[rank]
        rounds = [round_ for leader, round_ in self.scenario.ballots if leader == rank and round_ >= living.round]
        if not state.ballots or not rounds:
            return
        previous = self._previous(state, rank)
        electors = self.electors(previous)
        given = self._contributions(state.memories, living.number, {*electors, rank})
        weights, _ = self._weights(state, electors)
        starts = {(state, frozenset()), self._noticed(state, rank, living.number, electors)}
        proposals = self._proposals(state, rank, set(given))
        for (before, proof), members, round_ in product(starts, proposals, rounds):
            if self._known(before.memories, own, living.number) is not None:
                yield f"rank {rank} reads the decision of a rank that has ended", before
                continue
            decision = Decision.of({each: given[each] for each in members})
            ballot = Ballot(round_ * len(self.hosts) + own, own, decision, weights, proof)
            step = f"rank {rank} starts ballot {ballot.number} of {living.number} for {list(decision.members)}"
            step += f", since hosts {sorted(ballot.ended)} have ended" if ballot.ended else ""
            yield step, self._advanced(before, rank, round_ + 1, ballot, previous, begins=True)

    def _previous(self, state: State, rank: int) -> tuple[int, Decision] | None:
        """Return the decision of the agreement before the current one of a rank, if its host knows it."""
        number = state.ranks[rank].number - 1
        return self._known(state.memories, self.host_of[rank], number) if number > 0 else None

    def _weights(self, state: State, electors) -> tuple[Counter[int], frozenset[int]]:
        """Return how many electors each host has, and the hosts that have ended."""
        weights = Counter(self.host_of[each] for each in electors)
        return weights, frozenset(host for host in weights if not self._living(state.ranks, host, electors))

    def _contributions(self, memories, number: int, electors) -> dict[int, Contribution]:
        found = {}
        for rank in electors:
            host = self.host_of[rank]
            _, given = self._call(host, memories[host], "contribution", self.place[rank])
            if given.number == number:
                found[rank] = given
        return found

    def _proposals(self, state: State, rank: int, arrived: set[int]) -> set[frozenset[int]]:
        if self.scenario.proposals == "any":
            others = sorted(arrived - {rank})
            return {frozenset((rank, *some)) for k in range(len(others) + 1) for some in combinations(others, k)}
        own = {each for each in arrived if self.host_of[each] == self.host_of[rank]}
        if self.scenario.proposals in ("all", "own"):
            return {frozenset(arrived if self.scenario.proposals == "all" else own)}
        living = {each for each in arrived if state.ranks[each] is not None}
        return {frozenset(arrived), frozenset(living), frozenset(own), frozenset({rank})}

    def _advanced(self, state: State, rank: int, round_: int, ballot: Ballot, previous, *, begins: bool) -> State:
        """Return the state after a leader has reacted to an event: it acts on its own host, and sends requests.

        ``begins``: whether a phase of its ballot has begun with this event.
        """
        living, own = state.ranks[rank], self.host_of[rank]
        number, memory, requests, asks = living.number, state.memories[own], state.requests, []
        if begins and not ballot.accepting:
            memory, found = self._call(own, memory, "promise", number, ballot.number, ballot.ended)
            ballot.promised(own, found)
            asks.append(("promise", ballot.ended))
            begins = ballot.accepting
        if begins and ballot.accepting and not ballot.refused:
            memory, found = self._call(own, memory, "accept", number, ballot.number, ballot.decision)
            ballot.accepted(own, found)
            asks.append(("accept", ballot.decision))
        if ballot.final:
            memory, _ = self._call(own, memory, "decide", number, ballot.number, ballot.decision)
            asks.append(("told", ballot.decision))
        for what, content in asks:
            request = Request(what, number, ballot.number, content, rank, previous, self.electors(previous))
            requests |= 1 << self._requests[request]
        over = ballot.final or ballot.refused
        after = Rank(number, round_, IDLE if over else self._number_of(ballot), self._idle)
        return state._replace(
            memories=_put(state.memories, own, memory),
            ranks=_put(state.ranks, rank, after),
            requests=requests,
            ballots=state.ballots - (round_ != living.round),
        )

    def _executions(self, state: State, bit: int) -> Iterator[tuple[str, State]]:
        """Yield the steps in which a host receives a request and answers it."""
        request = self._requests.seen[bit]
        for host in self.hosts:  # the leader has executed it on its own host
            if host == self.host_of[request.leader] or not self._living(state.ranks, host, request.electors):
                continue
            memory, answer = self._executed(host, state.memories[host], bit)
            after = state._replace(memories=_put(state.memories, host, memory))
            leader = state.ranks[request.leader]
            if answer != IDLE and leader is not None and leader.number == request.number and leader.ballot != IDLE:
                ballot = self._ballot_of[leader.ballot]
                waits = ballot.number == request.ballot and ballot.accepting == (request.what == "accept")
                if waits and host not in ballot.answered:
                    leader = leader._replace(pending=_put(leader.pending, host, answer))
                    after = after._replace(ranks=_put(state.ranks, request.leader, leader))
            if after != state:
                what = f"{request.what} of {request.number}, ballot {request.ballot} of rank {request.leader}"
                yield f"host {host} receives {what}", after

    def _executed(self, host: int, memory: int, bit: int) -> tuple[int, int]:
        key = host, memory, bit
        if key not in self._calls:
            request = self._requests.seen[bit]
            after, takes_part = self._call(host, memory, "follows", request.number, request.previous)
            answer = MOVED
            if takes_part is True:
                name = {"told": "decide"}.get(request.what, request.what)
                after, answer = self._call(host, after, name, request.number, request.ballot, request.content)
            waits = answer != MOVED and request.what != "told"
            self._calls[key] = after, self._answers[answer] if waits else IDLE
        return self._calls[key]

    def _read(self, state: State, rank: int, host: int) -> State:
        """Return the state after a leader has read the answer of a host."""
        living = state.ranks[rank]
        answer = self._answers.seen[living.pending[host]]
        ballot = copy.copy(self._ballot_of[living.ballot])
        ballot.answered = set(ballot.answered)
        phase = ballot.accepting
        (ballot.accepted if phase else ballot.promised)(host, answer)
        previous = self._previous(state, rank)
        begins = phase != ballot.accepting
        pending = self._idle if begins else _put(living.pending, host, IDLE)
        after = self._advanced(state, rank, living.round, ballot, previous, begins=begins)
        if after.ranks[rank].ballot == IDLE:
            return after
        return after._replace(ranks=_put(after.ranks, rank, after.ranks[rank]._replace(pending=pending)))

    # The library

    def _call(self, host: int, memory: int, name: str, *args: Any, place: int = 0) -> tuple[int, Any]:
        """Return the memory of a host after a call of its registers, and the result of the call."""
        key = host, memory, name, args, place
        found = self._calls.get(key)
        if found is None:
            content = bytearray(self._memories.seen[memory])
            registers = Registers(content, place, self.scenario.hosts[host], self.size, len(self.hosts))
            try:
                result = getattr(registers, name)(*args)
            except Overtaken:
                result = MOVED
            registers.close()
            found = self._calls[key] = self._memories[bytes(content)], result
        return found

    def _number_of(self, ballot: Ballot) -> int:
        values = {**vars(ballot), "answered": frozenset(ballot.answered), "weights": tuple(ballot.weights.items())}
        number = self._ballots[tuple(values.values())]
        if number == len(self._ballot_of):
            self._ballot_of.append(ballot)
        return number

    def _known(self, memories, host: int, number: int) -> tuple[int, Decision] | None:
        _, found = self._call(host, memories[host], "decision", number)
        return None if found == MOVED else found

    def _living(self, ranks, host: int, electors) -> bool:
        return any(ranks[rank] is not None and self.host_of[rank] == host for rank in electors)

    # Properties

    def _properties(self, state: State) -> None:
        key = state.memories, tuple(rank is not None for rank in state.ranks), state.ends
        if key not in self._checked:
            self._checked.add(key)
            self._agreement(state)
            self._progress(state)

    def _agreement(self, state: State) -> None:
        views = tuple(map(self._view, self.hosts, state.memories))
        key = views, tuple(rank is not None for rank in state.ranks), state.ends
        if key in self._agreed:
            return
        numbers = range(1, self.scenario.numbers + 1)
        decisions = {number: [known[number] for known, _ in views] for number in numbers}
        arrivals = [views[self.host_of[rank]][1][self.place[rank]] for rank in range(self.size)]
        held: dict[
            int, Decision
        ] = {}  # the last decision of each rank that lives or has gone on, and is a member of it
        for number in numbers:
            held_now = set()
            for host, decision in enumerate(decisions[number]):
                if decision is None:
                    continue
                before = decisions[number - 1][host] if number > 1 else None
                if number > 1 and before is None:
                    raise Violation(f"validity: host {host} knows the decision of {number}, but not of the one before")
                electors = range(self.size) if before is None else before.members
                self._valid(number, decision, electors, arrivals)
                for rank in electors:
                    if self.host_of[rank] == host and state.ranks[rank] is not None:
                        held_now.add(decision)
                        held.pop(rank, None)
                        if rank in decision.members:
                            held[rank] = decision
            for rank, host in enumerate(self.host_of):
                if state.ranks[rank] is None and self._has_gone_on(state, rank, number):
                    held[rank] = decisions[number][host]
                    held_now.add(held[rank])
            if len(held_now) > 1:
                raise Violation(f"agreement: number {number} has the decisions {sorted(held_now)}")
        for a, b in combinations(held, 2):
            if a not in held[b].members and b not in held[a].members:
                raise Violation(f"one group: rank {a} has {held[a]}, rank {b} has {held[b]}")
        self._agreed.add(key)

    def _view(self, host: int, memory: int) -> tuple[tuple[Decision | None, ...], tuple[int, ...]]:
        """Return the decisions that a host knows (``[number]`` is that of an agreement), and its ranks' agreements."""
        if (host, memory) not in self._views:
            memories = {host: memory}
            known = [self._known(memories, host, number) for number in range(1, self.scenario.numbers + 1)]
            arrived = [self._call(host, memory, "contribution", k)[1].number for k in range(self.scenario.hosts[host])]
            self._views[host, memory] = (None, *(found and found[1] for found in known)), tuple(arrived)
        return self._views[host, memory]

    def _valid(self, number: int, decision: Decision, electors, arrivals: list[int]) -> None:
        for rank in decision.members:
            if rank not in electors or arrivals[rank] < number:
                raise Violation(f"validity: number {number} has the decision {decision} with rank {rank}")
        if decision != Decision.of({rank: self.contribution(rank, number) for rank in decision.members}):
            raise Violation(f"validity: number {number} has the decision {decision}")

    def _progress(self, state: State) -> None:
        """Check progress: the hosts of any quorum can finish their work, one after the other, without failures."""
        living = [host for host in self.hosts if self._living(state.ranks, host, range(self.size))]
        for reachable in chain(*(combinations(living, count) for count in range(1, len(living) + 1))):
            self._settled(state, reachable, 1)

    def _settled(self, state: State, reachable: tuple[int, ...], number: int) -> None:
        """Check that hosts that reach each other can finish agreement ``number`` and the later ones."""
        for host in reachable:
            if self._view(host, state.memories[host])[0][number] is not None:
                continue
            previous = self._known(state.memories, host, number - 1) if number > 1 else None
            electors = range(self.size) if number == 1 else previous[1].members if previous else ()
            leaders = [rank for rank in electors if self.host_of[rank] == host and state.ranks[rank]]
            if leaders:
                state = self._completed(state, reachable, number, leaders[0], previous, electors)
        self._agreement(state)
        if number < self.scenario.numbers:
            self._settled(state, reachable, number + 1)

    def _completed(self, state: State, reachable, number: int, rank: int, previous, electors) -> State:
        """Return the state after a rank has got the decision from hosts that it reaches, or has made one with them."""
        own = self.host_of[rank]
        for host in reachable:
            found = self._known(state.memories, host, number)
            if found is not None:
                memory, told = self._call(own, state.memories[own], "decide", number, *found)
                state = state._replace(memories=_put(state.memories, own, memory))
                if told:
                    return state
        weights, _ = self._weights(state, electors)
        state, ended = self._noticed(state, rank, number, electors)
        if self._known(state.memories, own, number) is not None:
            return state
        others = [host for host in reachable if host in weights and host != own and host not in ended]
        if not (has_quorum(weights, {own, *others}) or (ended and has_quorum(weights, {own, *others}, ended))):
            return state
        if state.ranks[rank].number < number:
            state = self._arrived(state, rank, number)
        decision = Decision.of({rank: self.contribution(rank, number)})
        ballot = Ballot(self.scenario.rounds * len(self.hosts) + own, own, decision, weights, ended)
        seen = self._requests_of(state)
        state = self._advanced(state, rank, self.scenario.rounds, ballot, previous, begins=True)
        while new := [bit for bit in self._requests_of(state) if bit not in seen]:
            for bit in new:
                seen.add(bit)
                for host in others:
                    memory, answer = self._executed(host, state.memories[host], bit)
                    state = state._replace(memories=_put(state.memories, host, memory))
                    leading = state.ranks[rank].ballot != IDLE
                    wanted = leading and self._ballot_of[state.ranks[rank].ballot].accepting
                    if answer != IDLE and leading and wanted == (self._requests.seen[bit].what == "accept"):
                        pending = _put(state.ranks[rank].pending, host, answer)
                        ranks = _put(state.ranks, rank, state.ranks[rank]._replace(pending=pending))
                        state = self._read(state._replace(ranks=ranks), rank, host)
        if self._known(state.memories, own, number) is None:
            raise Violation(f"progress: rank {rank} with the hosts {reachable} cannot finish agreement {number}")
        return state

    def _requests_of(self, state: State) -> set[int]:
        return {bit for bit in range(state.requests.bit_length()) if state.requests >> bit & 1}


def _put(values: tuple, place: int, value: Any) -> tuple:
    """Return a copy of ``values`` with ``value`` at a place."""
    return (*values[:place], value, *values[place + 1 :])


# Scenarios of the tests, with the number of their states, which shows whether the model still searches all of them.
SCENARIOS: dict[str, tuple[Scenario, int]] = {
    "4": (Scenario((4,), rounds(range(4), 2), most=2, crashes=2, late=(1, 3)), 1016),
    "1+1": (Scenario((1, 1), rounds((0, 1), 2), most=3, crashes=1, late=(1,)), 5799),
    "2+2": (Scenario((2, 2), rounds((0, 2, 3), 1), most=2, crashes=2, late=(1,)), 35292),
    "3+1": (Scenario((3, 1), rounds((0, 1, 3), 1), most=2, crashes=2, late=(2,)), 22512),
    "1+1+1": (Scenario((1, 1, 1), rounds(range(3), 1), most=2, proposals="any"), 30193),
    "1+1+1, a rank ends": (Scenario((1, 1, 1), rounds(range(3), 1), most=2, crashes=1, proposals="own"), 26108),
    "2+1+1, a host ends": (Scenario((2, 1, 1), rounds((0, 2, 3), 1), most=2, crashes=1, power=True), 53859),
    "2+1+1, two hosts end": (
        Scenario((2, 1, 1), ((0, 0), (2, 1)), most=2, crashes=2, power=True, proposals="all"),
        32491,
    ),
    "1+1+1+1": (Scenario((1, 1, 1, 1), ((1, 0), (2, 0)), most=2, proposals="own"), 40037),
    "1+1, twice": (Scenario((1, 1), rounds((0, 1), 1), most=4, crashes=1, numbers=2, late=(1,)), 9610),
    "1+1+1, twice": (Scenario((1, 1, 1), ((0, 0),), most=2, crashes=1, numbers=2, late=(2,), proposals="all"), 5306),
}
