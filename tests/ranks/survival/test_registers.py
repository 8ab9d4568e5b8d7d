"""Registers and ballots. The first value of a register stays, also if threads and processes write simultaneously."""

import itertools
import mmap
import os
import pickle
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st

from crossreduce import kernels
from crossreduce.ranks.agreement.ballots import Ballot, has_quorum
from crossreduce.ranks.intra_host.registers import Contribution, Decision, Overtaken, Registers

MANY = 200


def made(ranks=2, size=None, hosts=2, memory=None, place=0):
    """Return the registers of a host in new memory, or in ``memory``. Arguments as for ``Registers``."""
    size = size or ranks * hosts
    memory = bytearray(Registers.nbytes(ranks, size, hosts)) if memory is None else memory
    return Registers(memory, place, ranks, size, hosts)


def decision(*members, kind=0, flag=True, progress=0):
    return Decision(members, kind, flag, progress)


ONE, OTHER = decision(0, 1, progress=1), decision(2, kind=3, flag=False, progress=2**63)


# One process


def test_electors_follow_from_the_decision_before():
    """A host answers requests of an agreement only if it has the same decision of the previous agreement as the asking
    host. If it has no decision, it stores that of the asking host, unless it has ruled out that ballot."""
    host = made()
    assert host.follows(1, None)
    assert not host.follows(2, None)
    assert host.follows(2, (3, ONE))  # ballot 3, which is one of host 1 of the two hosts
    assert host.decision(1) == (3, ONE)
    assert host.follows(2, (4, ONE))
    assert not host.follows(2, (4, OTHER))
    ruled_out = made()
    ruled_out.promise(1, 0, ended={1})  # rules out all ballots of host 1
    assert not ruled_out.follows(2, (3, ONE))
    assert ruled_out.follows(2, (2, ONE))


def test_agreements_that_follow_each_other_share_memory():
    """Twenty agreements in a row share memory: none finds a ballot or decision of an earlier one in its registers. A
    host keeps the decisions of the last three agreements."""
    host = made()
    for number in range(1, 21):
        assert host.decision(number) is None
        for ballot in range(host.ballots):
            wanted = decision(number % 4, progress=100 * number + ballot)
            assert host.accept(number, ballot, wanted) == wanted
        assert host.promise(number, host.ballots) == (host.ballots - 1, wanted)
        for earlier in range(max(1, number - 3), number):
            assert host.decision(earlier) == (1, decision(progress=earlier))
        assert host.decide(number, 1, decision(progress=number))
        assert host.decision(number) == (1, decision(progress=number))


def test_a_rank_that_is_left_behind_is_told():
    """Calls for an agreement whose memory a later one uses raise ``Overtaken``, and change nothing."""
    current, late = 9, 5  # agreements that share memory
    memory = bytearray(Registers.nbytes(2, 4, 2))
    registers = made(memory=memory)
    for ballot in range(registers.ballots):
        registers.accept(current, ballot, ONE)
    registers.decide(current, 0, ONE)
    registers.decide(current, 1, ONE)
    before = bytes(memory)
    for call, *arguments in (
        (registers.promise, late, 1),
        (registers.accept, late, 0, ONE),
        (registers.decide, late, 0, ONE),
        (registers.decision, late),
        (registers.follows, late + 1, (0, ONE)),
    ):
        with pytest.raises(Overtaken, match=r"^$"):
            call(*arguments)
        assert bytes(memory) == before


def test_a_slot_is_not_reused_under_a_reader():
    """A rank that reads an old decision while another rank writes a new one to its memory gets ``Overtaken``."""
    memory = bytearray(Registers.nbytes(1, 1, 1))
    reader, writer = made(1, 1, 1, memory), made(1, 1, 1, memory)
    writer.accept(1, 0, decision(0, progress=1))

    class Interrupted:
        """Loads words. After the first word, another process stores a new value, but has not accepted it yet."""

        first = True

        def load_word(self, memory, index):
            found = kernels.native().load_word(memory, index)
            if self.first:
                self.first = False
                writer._store(5, 0, 0, decision(0, progress=2))
            return found

    reader._native = Interrupted()
    with pytest.raises(Overtaken, match=r"^$"):
        reader._value(1, 0)


@pytest.mark.parametrize("size", [1, 64, 65, MANY])
def test_decisions_of_any_size(size):
    """A decision with any members of a group of up to 200 ranks is returned unchanged."""
    host = made(size, size, 1, place=size - 1)
    chosen = random.Random(size)
    for ballot in range(8):
        members = tuple(rank for rank in range(size) if chosen.random() < ballot / 7)
        given = Decision(members, ballot, ballot % 2 == 0, chosen.getrandbits(64))
        assert host.accept(1, ballot, given) == given
        assert made(size, size, 1, host._memory).promise(1, ballot + 1) == (ballot, given)


@pytest.mark.parametrize("hosts", [1, 3, MANY])
def test_every_ballot_has_a_register_of_its_own(hosts):
    """With up to 200 hosts, each of which has ballots in 16 rounds, no two ballots share a register."""
    host = made(1, hosts, hosts)
    assert host.ballots == 16 * hosts
    used = {host._register(number, register) for number in range(1, 5) for register in range(host._final + 1)}
    assert used == set(range(host._position(0)))  # one word for each register
    assert host.accept(1, host.ballots - 1, decision(0)) == decision(0)
    assert host.decide(1, host.ballots - 1, decision(0))
    assert host.promise(2, host.ballots, set(range(hosts))) is None


@pytest.mark.parametrize("ranks", [1, 7, MANY])
def test_contributions_of_all_ranks(ranks):
    """A rank's contribution is that of its last arrival. Before the first arrival its number is 0."""
    memory = bytearray(Registers.nbytes(ranks, ranks, 1))
    hosts = [made(ranks, ranks, 1, memory, place) for place in range(ranks)]
    assert {hosts[0].contribution(place) for place in range(ranks)} == {Contribution(0, 0, False, 0)}
    for number in (1, 2):
        for place, host in enumerate(hosts):
            host.arrive(Contribution(number, place, place % 3 == 0, 2**64 - 1 - place))
    for place in range(ranks):
        assert hosts[-1 - place].contribution(place) == Contribution(2, place, place % 3 == 0, 2**64 - 1 - place)


def test_a_decision_follows_from_contributions():
    """The flag of a decision is true if all flags are true and all kinds are equal. Its kind is the greatest kind, and
    its progress is the least progress."""
    given = {3: Contribution(1, 2, True, 9), 1: Contribution(1, 2, True, 7)}
    assert Decision.of(given) == Decision((1, 3), 2, True, 7)
    assert Decision.of(given | {0: Contribution(1, 2, False, 8)}) == Decision((0, 1, 3), 2, False, 7)
    assert Decision.of(given | {0: Contribution(1, 4, True, 8)}) == Decision((0, 1, 3), 4, False, 7)


CALLS = st.tuples(st.sampled_from(["promise", "accept", "decide"]), st.integers(0, 5), st.integers(0, 3), st.booleans())


@examples(1500)
@given(st.lists(CALLS, max_size=12))
def test_registers_are_a_map_that_is_written_once(calls):
    """Any calls return the results of a model: a dict with the first value of each ballot and of the decision of each
    host, where ``None`` means ruled out."""
    host, written, final = made(hosts=3), {}, []
    for call, ballot, ended_host, flag in calls:
        given = decision(progress=ballot + 10 * flag)
        if call == "promise":
            ended = {ended_host} if ended_host < 3 else set()
            ruled_out = {key for key in range(host.ballots) if key < ballot or key % 3 in ended}
            ruled_out |= {("host", each) for each in ended}
            found = [written.setdefault(key, None) for key in ruled_out]
            wanted = max((each for each in found if each is not None), default=None)
            assert host.promise(1, ballot, ended) == wanted
        elif call == "accept":
            first = written.setdefault(ballot, (ballot, given))
            assert host.accept(1, ballot, given) == (first and first[1])
        else:
            first = written.setdefault(("host", ballot % 3), (ballot, given))
            final += [first] if first else []
            assert host.decide(1, ballot, given) == bool(final)
        assert host.decision(1) == (final[0] if final else None)


@given(st.integers(0, 2), st.sets(st.integers(0, 2)), st.integers(0, 5), st.integers(0, 5), st.integers(0, 40))
def test_a_call_that_breaks_off_is_a_shorter_one(accepted, ended, first, ballot, writes):
    """If a rank ends in the middle of a promise, a second promise completes it, with the same result and registers."""

    class EndsError(Exception):
        pass

    class Ending:
        """Swaps words a number of times, and then ends."""

        left = writes

        def __getattr__(self, name):
            return getattr(kernels.native(), name)

        def swap_word(self, *args):
            if not self.left:
                raise EndsError
            self.left -= 1
            return kernels.native().swap_word(*args)

    broken_off, whole = made(hosts=3), made(hosts=3)
    for host in (broken_off, whole):
        host.accept(1, accepted, ONE)
        host.promise(1, first)
    native, broken_off._native = broken_off._native, Ending()
    try:
        broken_off.promise(1, ballot, ended)
    except EndsError:
        broken_off._native = native
    assert broken_off.promise(1, ballot, ended) == whole.promise(1, ballot, ended)
    states = [[host._state(1, each)[0] for each in range(host._final + 1)] for host in (broken_off, whole)]
    assert states[0] == states[1]


# Many writers


def written_by(writer, ranks, number):
    """Return the decision that a writer wants in an agreement. It names the writer, and so shows torn values."""
    return Decision((writer % ranks,), writer, writer % 2 == 0, 1000 * number + writer)


def write_at_random(host, writer, ranks, agreements):
    """Write as one of several threads of a rank until some agreements are decided. Return the calls with results."""
    chosen, seen, number = random.Random(writer), [], 1
    while number <= agreements:
        ballot = chosen.randrange(8 * ranks)
        try:
            if chosen.random() < 0.2:
                ended = frozenset({chosen.randrange(3)} if chosen.random() < 0.2 else ())  # never host 3, so it decides
                ballot //= 2
                seen.append(("promise", number, ballot, ended, host.promise(number, ballot, ended)))
            else:
                accepted = host.accept(number, ballot, written_by(writer, ranks, number))
                seen.append(("accept", number, ballot, None, accepted))
                if accepted is not None and chosen.random() < 0.2:
                    host.decide(number, ballot, accepted)
            known = host.decision(number)
            if known is not None:
                seen.append(("decision", number, None, None, known))
                number += 1
        except Overtaken:
            number += 1
    return seen


def check_seen(seen, ranks):
    """Check the results of all writers: each register has one value, decisions are whole, and a promise reports the
    values that were accepted in earlier ballots."""
    results = {}
    for call, number, ballot, ended, result in seen:
        results.setdefault((call, number, ballot, ended), set()).add(result)
    assert {key: found for key, found in results.items() if len(found) > 1} == {}
    for call, number, _, _, result in seen:
        each = result[1] if isinstance(result, tuple) and call != "accept" else result
        if each is not None:
            assert each == written_by(each.kind, ranks, number), "it is torn, or too old"
    for (call, number, ballot, _), (accepted,) in results.items():
        if call == "accept" and accepted is not None:
            for later in range(ballot + 1, 64):
                for promised in results.get(("promise", number, later, frozenset()), ()):
                    assert promised is not None, "a promise does not include an accepted proposal"
                    assert promised[0] >= ballot, "a promise does not include an accepted proposal"


def test_threads_and_processes_that_write_at_the_same_time():
    """Four processes, the ranks of one host, write at the same time with two threads each, which alternate every
    microsecond. All of them read the same value of each register."""
    ranks = 4
    memory, pipes = mmap.mmap(-1, Registers.nbytes(ranks, ranks, 4)), []
    for place in range(ranks):
        source, target = os.pipe()
        if os.fork() == 0:
            try:
                sys.setswitchinterval(1e-6)
                host = Registers(memory, place, ranks, ranks, 4)
                with ThreadPoolExecutor(2) as pool, os.fdopen(target, "wb") as pipe:
                    write = partial(write_at_random, host, ranks=ranks, agreements=100)
                    pickle.dump([*itertools.chain(*pool.map(write, (place, place + ranks)))], pipe)
            finally:
                os._exit(0)
        os.close(target)
        pipes.append(source)
    seen = []
    for source in pipes:
        with os.fdopen(source, "rb") as pipe:
            seen += pickle.load(pipe)
    for _ in pipes:
        os.wait()
    assert {call for call, *_ in seen} == {"promise", "accept", "decision"}
    check_seen(seen, ranks)


# Ballots

THREE = {0: 2, 1: 1, 2: 1}  # three hosts, with the number of ranks of each
HOSTS = st.sets(st.integers(0, 5))


@examples(1500)
@given(st.dictionaries(st.integers(0, 5), st.integers(1, 4), min_size=1), HOSTS, HOSTS, HOSTS)
def test_two_quorums_have_a_host_in_common(weights, some, others, ended):
    """Two quorums have a host in common. All hosts are a quorum, and no hosts are not. If ended hosts do not count, all
    other hosts are a quorum, and fewer are not."""
    some, others = some & weights.keys(), others & weights.keys()
    if has_quorum(weights, some) and has_quorum(weights, others):
        assert some & others
    assert has_quorum(weights, weights.keys())
    assert not has_quorum(weights, set())
    if has_quorum(weights, some):
        assert has_quorum(weights, some | others)
    if ended:
        assert has_quorum(weights, some, ended) == (weights.keys() - ended <= some)


# (Number of the ballot, own host, ranks of each host, ended hosts), the state at first, answers with the state after
# each of them, and the decision at the end.
BALLOTS = {
    "ballot 0 of the only host is final when that host has accepted it": (
        (0, 0, {0: 4}, ()), "accepting", [("accepted", 0, ONE, "final")], ONE,
    ),
    "a later ballot is accepted when a quorum has promised, and final when a quorum has accepted": (
        (4, 1, THREE, ()), "promising",
        [
            ("promised", 1, None, "promising"),
            ("promised", 0, None, "accepting"),
            ("promised", 2, (3, OTHER), "accepting"),  # too late to count
            ("accepted", 1, ONE, "accepting"),
            ("accepted", 0, ONE, "final"),
        ],
        ONE,
    ),
    "a ballot is for the decision that hosts have accepted last": (
        (7, 1, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, ()), "promising",
        [
            ("promised", 1, (0, ONE), "promising"),
            ("promised", 3, (3, OTHER), "promising"),
            ("promised", 2, (1, ONE), "accepting"),
        ],
        OTHER,
    ),
    "a ballot counts with ended hosts if the others are a quorum": ((0, 0, THREE, {1, 2}), "accepting", [], ONE),
    "without ended hosts, also ballot 0 needs promises": (
        (0, 0, {0: 1, 1: 1, 2: 3}, {2}), "promising",
        [
            ("promised", 0, None, "promising"),
            ("promised", 1, (2, OTHER), "accepting"),
            ("accepted", 0, OTHER, "accepting"),
            ("accepted", 1, OTHER, "final"),
        ],
        OTHER,
    ),
    "a ballot that a host has ruled out is refused": (
        (0, 0, THREE, ()), "accepting", [("accepted", 0, None, "refused")], ONE,
    ),
    "a quorum of other hosts is not enough: the own register has the one decision of the ballot": (
        (0, 0, {0: 1, 1: 1, 2: 1}, ()), "accepting",
        [("accepted", 1, ONE, "accepting"), ("accepted", 2, ONE, "accepting"), ("accepted", 0, ONE, "final")], ONE,
    ),
    "if another rank of the host has begun the ballot with another decision, that one counts": (
        (1, 1, {0: 1, 1: 2}, ()), "promising",
        [("promised", 1, None, "accepting"), ("accepted", 1, OTHER, "final")], OTHER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", BALLOTS)
def test_ballots(rule):
    """Each rule of ``BALLOTS`` holds: after each answer the ballot has the right state, and at the end the decision."""
    (number, own, weights, ended), begins, answers, chosen = BALLOTS[rule]
    ballot = Ballot(number, own, ONE, weights, ended)

    def state():
        return "refused" if ballot.refused else ("promising", "accepting", "final")[ballot.accepting + ballot.final]

    assert state() == begins
    for call, host, value, wanted in answers:
        getattr(ballot, call)(host, value)
        assert state() == wanted
    assert ballot.decision == chosen


def test_a_ballot_asks_its_own_host_first():
    """The caller must ask the own host first: an earlier answer of another host fails an assertion."""
    with pytest.raises(AssertionError, match="host own promises first"):
        Ballot(4, 1, ONE, THREE).promised(0, None)
    with pytest.raises(AssertionError, match="one decision"):
        Ballot(0, 0, ONE, THREE).accepted(1, OTHER)
