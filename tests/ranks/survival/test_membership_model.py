"""The model check of agreements among ranks that may die: the protocol holds, and each rule of it is needed.

``membership_model.py`` has the model and the properties.
"""

from random import Random
from unittest.mock import patch

import pytest
from budget import SHARE
from membership_model import SCENARIOS, Model, Scenario, Violation, rounds

from crossreduce.ranks.agreement import ballots
from crossreduce.ranks.agreement.ballots import Ballot, has_quorum
from crossreduce.ranks.intra_host import registers
from crossreduce.ranks.intra_host.registers import Registers

# Host 0 has half of the ranks, so it decides alone, and its end leaves two hosts that must agree without it.
SURVIVORS = Scenario((2, 1, 1), ((0, 0), (2, 0), (3, 0)), most=2, crashes=1, power=True)
EQUALS = Scenario((1, 1, 1), rounds((0, 1, 2), 1), most=2)
TWO = Scenario((1, 1), rounds((0, 1), 1), most=2)
LEADERS = Scenario((2, 2), rounds((2, 3), 1), most=2)  # two ranks of the host without a quorum
THEN = Scenario((2, 1, 1), ((0, 0), (2, 0)), most=3, crashes=1, power=True, numbers=2, proposals="all")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (SCENARIOS[name][1] > 17_000)) for name in SCENARIOS]
)
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
    Model(scenario).wander(Random(0), walks=round(150 * SHARE) + 1, length=120)


# Each rule that a broken protocol breaks


def is_half(weights, answered, ended=()):
    return 2 * sum(map(weights.get, answered)) >= sum(weights.values())


def is_majority_of_the_living(weights, answered, ended=()):
    """One of two survivors would decide, while the other one has been told another decision by a host that ended."""
    living = {host: count for host, count in weights.items() if host not in ended}
    return has_quorum(weights, answered) or has_quorum(living, answered)


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


LATER_BALLOT = """
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
OWN_HOST_LAST = """
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

THREE = Scenario((1, 1, 3), ((2, 0), (0, 0)), most=2, crashes=1, power=True)
BROKEN = {
    "half of the ranks are enough": (TWO, "agreement", {"has_quorum": is_half}),
    "any host that answers is enough": (EQUALS, "agreement", {"has_quorum": lambda _, answered, __=(): bool(answered)}),
    "ranks that ended are subtracted": (SURVIVORS, "agreement", {"has_quorum": is_majority_of_the_living}),
    "a late host is taken for ended": (TWO, "agreement", {"proofs": lambda _, own, __: [frozenset({0}) - {own}]}),
    "a promise returns no decision": (EQUALS, "agreement", {"registers": Forgetful}),
    "a promise returns the first decision": (
        EQUALS._replace(most=3, proposals="own"), "agreement", {"registers": Earliest},
    ),
    "a promise does not rule out earlier ballots": (EQUALS, "agreement", {"registers": Lenient}),
    "a register is written twice": (EQUALS, "agreement", {"registers": Overwriting}),
    "a told decision is believed although it was ruled out": (SURVIVORS, "agreement", {"registers": Trusting}),
    "survivors do not rule out what ended hosts tell": (SURVIVORS, "agreement", {"registers": Answering}),
    "other electors are answered": (THEN, "validity", {"registers": Credulous}),
    "one agreement is in memory": (TWO._replace(numbers=2, most=3), "validity", {"ring": 1}),
    "promises are not heeded": (EQUALS, "agreement", {"ballot": Deaf}),
    "later ballots need no promises": (EQUALS, "agreement", {"ballot": Hasty}),
    "ballot 0 without ended hosts needs no promises": (THREE, "agreement", {"ballot": FirstHasty}),
    "promises are made without other hosts than ballots": (
        Scenario((2, 1, 1), ((2, 0), (0, 1)), most=2, crashes=1, power=True, proposals="own"),
        "agreement", {"ballot": Late},
    ),
    "two ranks of a host have two decisions in a ballot": (LEADERS, "agreement", {"ballot": Stubborn}),
    "other hosts accept before the own one": (
        LEADERS, "a ballot has one decision", {"own_first": lambda _, what: what != "accept"},
    ),
    "ranks that are not members vote": (
        Scenario((1, 1, 1), ((0, 0),), most=2, late=(2,), numbers=2, proposals="all"),
        "progress", {"electors": lambda model, _: tuple(range(model.size))},
    ),
    "a rank that is not a member continues": (
        TWO._replace(numbers=2, most=3, late=(1,)), "validity", {"goes_on": lambda *_: True},
    ),
}  # fmt: skip


def broken(scenario, wrong, changes, check):
    """Check that a model with ``changes`` violates a property in some run of a scenario: ``wrong``."""
    changes = dict(changes)
    with (
        patch.object(ballots, "has_quorum", changes.pop("has_quorum", has_quorum)),
        patch.object(registers, "_RING", changes.pop("ring", registers._RING)),
        pytest.raises(Violation, match=wrong),
    ):
        check(type("Broken", (Model,), changes)(scenario))


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_is_needed(rule):
    """A protocol that breaks one rule has a run that violates a property."""
    broken(*BROKEN[rule], Model.check)


@pytest.mark.parametrize(
    ("scenario", "steps", "changes"),
    [
        (
            Scenario((1, 1, 3), ((2, 0), (0, 0), (1, 1)), most=3, crashes=1, power=True, proposals="own"),
            LATER_BALLOT,
            {"registers": Accepting},
        ),
        (
            Scenario((1, 1, 1, 1), ((0, 1), (2, 1), (2, 2), (3, 0)), most=4, crashes=2, proposals="own"),
            OWN_HOST_LAST,
            {"ballot": Bold, "own_first": lambda _, what: what != "promise"},
        ),
    ],
    ids=["survivors rule out later ballots of ended hosts", "a leader asks its own host to promise first"],
)
def test_each_rule_is_needed_in_one_run(scenario, steps, changes):
    """The same of two rules, in a run that a search would take long to find."""
    broken(scenario, "agreement", changes, lambda model: model.follow(steps.strip().splitlines()))
