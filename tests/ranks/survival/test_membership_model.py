"""The model check of agreements among ranks that may die: the protocol holds, and each rule of it is needed.

``membership_model.py`` has the model and the properties. Each test of a broken protocol names the rule that it breaks.
"""

from random import Random
from unittest.mock import patch

import pytest
from membership_model import SCENARIOS, Model, Scenario, Violation, rounds

from crossreduce.ranks.agreement.agreement import ballots
from crossreduce.ranks.agreement.ballots import Ballot, has_quorum
from crossreduce.ranks.intra_host import registers
from crossreduce.ranks.intra_host.registers import Registers

# Host 0 has half of the ranks, so it decides alone, and its end leaves two hosts that must agree without it.
SURVIVORS = Scenario((2, 1, 1), ((0, 0), (2, 0), (3, 0)), most=2, crashes=1, power=True)
EQUALS = Scenario((1, 1, 1), rounds((0, 1, 2), 1), most=2)
TWO = Scenario((1, 1), rounds((0, 1), 1), most=2)
LEADERS = Scenario((2, 2), rounds((2, 3), 1), most=2)  # two ranks of the host that is no quorum
THEN = Scenario((2, 1, 1), ((0, 0), (2, 0)), most=3, crashes=1, power=True, numbers=2, proposals="all")


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_runs_have_the_properties(name):
    """Every state that a scenario can reach has the properties of ``membership_model``."""
    scenario, states = SCENARIOS[name]
    assert Model(scenario).check() == states


@pytest.mark.parametrize("hosts", [(4,), (2, 2), (3, 1), (1, 1), (1, 1, 1), (2, 1, 1), (1, 1, 1, 1)], ids=str)
def test_random_runs_have_the_properties(hosts):
    """Long runs with many ballots, two agreements, late ranks and ends of any ranks have the properties, too."""
    size = sum(hosts)
    scenario = Scenario(
        hosts, rounds(range(size), 3), most=9, crashes=size - 1, late=(size - 1,), numbers=2, proposals="any"
    )
    Model(scenario).wander(Random(0), walks=100, length=120)


def broken(scenario, wrong, **changes):
    """Check that a model with ``changes`` violates a property in some run of a scenario: ``wrong``."""
    with pytest.raises(Violation, match=wrong):
        type("Broken", (Model,), changes)(scenario).check()


def broken_run(scenario, wrong, steps, **changes):
    """Check the same of one run: a search would take long to find it."""
    with pytest.raises(Violation, match=wrong):
        type("Broken", (Model,), changes)(scenario).follow(line.strip() for line in steps.strip().splitlines())


def broken_quorum(scenario, wrong, rule):
    """Check that another rule for quorums violates a property."""
    with patch.object(ballots, "has_quorum", rule):
        broken(scenario, wrong)


# Quorums


def test_only_one_of_two_halves_may_decide():
    """If half of the ranks were enough, both hosts of two would decide."""
    broken_quorum(
        TWO,
        "agreement",
        lambda weights, answered, ended=(): 2 * sum(map(weights.get, answered)) >= sum(weights.values()),
    )


def test_a_minority_cannot_decide():
    """If any host that answers were enough, one of three hosts would decide alone."""
    broken_quorum(EQUALS, "agreement", lambda weights, answered, ended=(): bool(answered))


def test_ranks_that_ended_are_not_subtracted_from_the_majority():
    """If a majority of the ranks that live were enough, one of two survivors would decide, while the other one has been
    told another decision by a host that has ended since; the two need not reach each other for that."""

    def rule(weights, answered, ended=()):
        living = {host: count for host, count in weights.items() if host not in ended}
        return has_quorum(weights, answered) or has_quorum(living, answered)

    broken_quorum(SURVIVORS, "agreement", rule)


def test_a_host_that_is_late_has_not_ended():
    """A leader that takes a living host for one that has ended decides against it."""
    broken(TWO, "agreement", proofs=lambda self, own, ended: [frozenset({0}) - {own}])


# Registers


class Forgetful(Registers):
    """A promise returns no decision."""

    def promise(self, number, ballot, ended=()):
        super().promise(number, ballot, ended)


class Lenient(Registers):
    """A promise rules nothing out."""

    def promise(self, number, ballot, ended=()):
        accepted = [each for each in range(ballot) if self._state(number, each)[0] == registers._ACCEPTED]
        return max((self._value(number, each) for each in accepted), default=None)


class Earliest(Registers):
    """A promise returns the first accepted decision, not the last one."""

    def promise(self, number, ballot, ended=()):
        last = super().promise(number, ballot, ended)
        first = [each for each in range(ballot) if self._state(number, each)[0] == registers._ACCEPTED]
        return self._value(number, first[0]) if first else last


class Overwriting(Registers):
    """An accepted decision replaces what a register has."""

    def accept(self, number, ballot, decision):
        _, before = self._state(number, ballot)
        unset = before >> registers._STATE_BITS << registers._STATE_BITS
        self._native.swap_word(self._memory, self._register(number, ballot), before, unset)
        return super().accept(number, ballot, decision)


class Trusting(Registers):
    """A host that is told a decision believes it, although it has ruled it out."""

    def decide(self, number, ballot, decision):
        self._accept(number, self._final, ballot, decision)
        return True


class Credulous(Registers):
    """A host takes part with any electors."""

    def follows(self, number, previous):
        super().follows(number, previous)
        return True


class Answering(Registers):
    """A promise without ended hosts does not rule out that these tell decisions."""

    def promise(self, number, ballot, ended=()):
        return super().promise(number, ballot)


class Accepting(Registers):
    """A promise without ended hosts rules out that these tell decisions, but not their later ballots."""

    def promise(self, number, ballot, ended=()):
        found = super().promise(number, ballot)
        told = [self.ballots + host for host in ended]
        accepted = [each for each in told if self._write(number, each, registers._NOTHING) == registers._ACCEPTED]
        return max([*(self._value(number, each) for each in accepted), *([found] if found else [])], default=None)


def test_a_promise_returns_what_is_accepted():
    """If a host's promise did not return what it has accepted, a later ballot would decide something else."""
    broken(EQUALS, "agreement", registers=Forgetful)


def test_a_promise_returns_the_last_decision():
    """If a host's promise returned the first decision that it has accepted, a third ballot would take that."""
    broken(EQUALS._replace(most=3, proposals="own"), "agreement", registers=Earliest)


def test_a_promise_rules_out_earlier_ballots():
    """If a host that has promised accepted in an earlier ballot, both ballots would decide."""
    broken(EQUALS, "agreement", registers=Lenient)


def test_a_register_is_written_once():
    """If a host accepted in a ballot that it has ruled out, both ballots would decide."""
    broken(EQUALS, "agreement", registers=Overwriting)


def test_a_told_decision_may_be_ruled_out():
    """If a host believed each decision that it is told, one that a host sent before it ended would arrive after the
    survivors have decided without that host."""
    broken(SURVIVORS, "agreement", registers=Trusting)


def test_survivors_rule_out_what_ended_hosts_have_decided():
    """The same if survivors did not rule out that ended hosts tell decisions."""
    broken(SURVIVORS, "agreement", registers=Answering)


def test_survivors_rule_out_later_ballots_of_ended_hosts():
    """If survivors ruled out only earlier ballots, a host could accept in a later one of an ended host after they have
    decided, and a third ballot would take that for the last decision."""
    scenario = Scenario((1, 1, 3), ((2, 0), (0, 0), (1, 1)), most=3, crashes=1, power=True, proposals="own")
    steps = """
        rank 2 starts ballot 2 of 1 for [2, 3, 4]
        host 2 ends
        rank 0 starts ballot 0 of 1 for [0], since hosts [2] have ended
        host 1 receives promise of 1, ballot 0
        rank 0 reads the answer of host 1
        host 1 receives accept of 1, ballot 0
        rank 0 reads the answer of host 1
        host 1 receives accept of 1, ballot 2
        rank 1 starts ballot 4 of 1 for [1], since hosts [2] have ended
        host 0 receives promise of 1, ballot 4
        rank 1 reads the answer of host 0
        host 0 receives accept of 1, ballot 4
        rank 1 reads the answer of host 0
    """
    broken_run(scenario, "agreement", steps, registers=Accepting)


def test_other_electors_are_not_answered():
    """If a host answered requests of an agreement with other electors, messages of ended hosts would count, whose
    decision of the agreement before the survivors have replaced."""
    broken(THEN, "validity", registers=Credulous)


def test_two_agreements_are_in_memory():
    """If registers had memory for one agreement only, a host would forget a decision that another member needs."""
    with patch.object(registers, "_RING", 1):
        broken(TWO._replace(numbers=2, most=3), "validity")


# Ballots


class Deaf(Ballot):
    """Ignores accepted decisions in promises."""

    def promised(self, host, accepted):
        super().promised(host, None)


class Hasty(Ballot):
    """Skips the promises of all ballots."""

    def __init__(self, *args):
        super().__init__(*args)
        self.accepting = True


class FirstHasty(Ballot):
    """Skips the promises of ballot 0, also if it counts without ended hosts."""

    def __init__(self, *args):
        super().__init__(*args)
        self.accepting = self.number == 0


class Stubborn(Ballot):
    """Counts hosts that have accepted another decision in this ballot."""

    def accepted(self, host, decision):
        super().accepted(host, decision and self.decision)


class Bold(Ballot):
    """Does not care whether its own host has promised first."""

    def promised(self, host, accepted):
        answered = set(self.answered)
        self.answered.add(self.own)
        super().promised(host, accepted)
        if not self.accepting:
            self.answered = answered | {host}


class Late(Ballot):
    """Counts without ended hosts when it asks to accept, but not when it asks to promise."""

    def __init__(self, number, own, decision, weights, ended=()):
        super().__init__(number, own, decision, weights)
        self.known = ended

    def accepted(self, host, decision):
        self.ended = self.known
        super().accepted(host, decision)


def test_promises_are_heeded():
    """If a leader ignored what hosts have accepted before, a later ballot would decide something else."""
    broken(EQUALS, "agreement", ballot=Deaf)


def test_only_ballot_0_needs_no_promises():
    """If later ballots skipped the promises, each would decide something else."""
    broken(EQUALS, "agreement", ballot=Hasty)


def test_ballot_0_without_ended_hosts_needs_promises():
    """If ballot 0 skipped the promises, it would decide against a decision that an ended host has told another one."""
    scenario = Scenario((1, 1, 3), ((2, 0), (0, 0)), most=2, crashes=1, power=True)
    broken(scenario, "agreement", ballot=FirstHasty)


def test_promises_are_made_without_the_same_hosts():
    """If only accepting counted without ended hosts, a host could accept after one that ended has told it another
    decision."""
    scenario = Scenario((2, 1, 1), ((2, 0), (0, 1)), most=2, crashes=1, power=True, proposals="own")
    broken(scenario, "agreement", ballot=Late)


def test_two_ranks_of_a_host_have_one_decision_per_ballot():
    """If the second rank of a host that leads the same ballot ignored the decision of the first one, both would
    decide."""
    broken(LEADERS, "agreement", ballot=Stubborn)


def test_a_leader_asks_its_own_host_to_accept_first():
    """If other hosts accepted first, one ballot of two ranks of a host would have two decisions."""
    broken(LEADERS, "a ballot has one decision", own_first=lambda self, what: what != "accept")


def test_electors_are_the_members_of_the_agreement_before():
    """If ranks that are no members voted, the members could not decide without them."""
    scenario = Scenario((1, 1, 1), ((0, 0),), most=2, late=(2,), numbers=2, proposals="all")
    broken(scenario, "progress", electors=lambda self, previous: tuple(range(self.size)))


def test_a_rank_that_is_no_member_does_not_go_on():
    """If a rank went on that is no member, a decision would have a member that is no elector."""
    broken(
        TWO._replace(numbers=2, most=3, late=(1,)),
        "validity",
        goes_on=lambda self, rank, decision: True,
    )


def test_a_leader_asks_its_own_host_to_promise_first():
    """If a leader's own host promised after others, the answer of a host that has ended would replace the decision that
    the survivors have made without it."""
    scenario = Scenario((1, 1, 1, 1), ((0, 1), (2, 1), (2, 2), (3, 0)), most=4, crashes=2, proposals="own")
    steps = """
        rank 0 starts ballot 4
        host 1 receives promise of 1, ballot 4
        rank 0 reads the answer of host 1
        rank 2 starts ballot 6
        host 0 receives promise of 1, ballot 6
        rank 0 ends
        rank 1 ends
        rank 3 starts ballot 3 of 1 for [3], since hosts [0, 1] have ended
        host 2 receives promise of 1, ballot 3
        rank 3 reads the answer of host 2
        host 2 receives accept of 1, ballot 3
        rank 3 reads the answer of host 2
        host 2 receives promise of 1, ballot 6
        rank 2 reads the answer of host 2
        rank 2 reads the answer of host 0
        rank 2 starts ballot 10 of 1 for [2], since hosts [0, 1] have ended
        host 2 receives promise of 1, ballot 10
        rank 2 reads the answer of host 2
        host 3 receives promise of 1, ballot 10
        rank 2 reads the answer of host 3
        host 3 receives accept of 1, ballot 10
        rank 2 reads the answer of host 3
    """
    broken_run(scenario, "agreement", steps, ballot=Bold, own_first=lambda self, what: what != "promise")
