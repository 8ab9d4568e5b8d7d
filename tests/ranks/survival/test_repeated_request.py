"""A request to other hosts is repeated until they answer; a silent host does not delay the others."""

import pytest
from simulated_hosts import SimulatedHosts

from crossreduce.ranks.connections.peer_requests import Ended
from crossreduce.ranks.connections.repeated_request import SILENT_S, RepeatedRequest

NEVER = 9.0, None
SOON = 0.01, {"arrived": {}}


@pytest.fixture
def begun(monkeypatch):
    """Return a function that begins an inquiry of hosts, given by the names of their processes, in simulated time."""

    def begin(behaviour, hosts, again_s=None, relays=""):
        simulated = SimulatedHosts(monkeypatch, behaviour)
        processes = {host: [simulated.process(name) for name in names] for host, names in hosts.items()}
        third = [simulated.process(name) for name in relays]
        return simulated, RepeatedRequest(processes, "token", {"what": "status"}, again_s, dict.fromkeys(hosts, third))

    return begin


def read_until(simulated, inquiry, until, step=0.01):
    """Read answers until a time; return the hosts and the times at which they have answered."""
    found = []
    while simulated.now < until - 1e-9:
        found += [(host, round(simulated.now, 2)) for host in inquiry.read()]
        simulated.sleep(step)
    return found


def test_an_answer_counts_whenever_it_comes(begun):
    """A host whose answer takes longer than the time after which it is asked again is not silent. The answer to a
    repeated request is as good as one to the first."""
    simulated, inquiry = begun(lambda *_: (1.5, {"late": []}), {1: "a"})
    assert read_until(simulated, inquiry, 3) == [(1, 1.5)]
    assert inquiry.found == {1: {"late": []}}
    assert not inquiry.is_silent(1)
    simulated, inquiry = begun(lambda name, request, now: SOON if now > 0.9 else NEVER, {1: "a"})
    assert read_until(simulated, inquiry, 3) == [(1, 1.01)]
    assert simulated.asked == [(0, "a"), (0.5, "a"), (1.0, "a")]


def test_a_silent_host_delays_no_other(begun):
    """A host is silent a fixed time after the first request that it has not answered; others answer meanwhile."""
    simulated, inquiry = begun(lambda name, *_: SOON if name == "a" else NEVER, {1: "a", 2: "b"}, again_s=0.02)
    answered = read_until(simulated, inquiry, SILENT_S)
    assert {host for host, _ in answered} == {1}
    assert len(answered) > 50
    assert not inquiry.is_silent(1)
    assert inquiry.is_current(1)
    assert inquiry.is_silent(2)
    assert not inquiry.is_current(2)


def test_a_host_falls_silent_after_an_answer(begun):
    """The time is counted from the first request without an answer; the answers before it do not count then."""
    simulated, inquiry = begun(lambda name, request, now: SOON if now < 1 else NEVER, {1: "a"}, again_s=0.02)
    (*_, (_, last)) = read_until(simulated, inquiry, 1 + SILENT_S - 0.05)
    assert not inquiry.is_silent(1)
    assert not inquiry.is_current(1)
    read_until(simulated, inquiry, last + 0.02 + SILENT_S + 0.01)
    assert inquiry.is_silent(1)


def test_few_processes_of_a_host_are_asked_at_once(begun):
    """Further ones are asked if these do not answer soon; then some of them again, and so on."""
    simulated, inquiry = begun(lambda *_: NEVER, {1: "abcdef"})
    read_until(simulated, inquiry, 1)
    named = [(time, name) for time, name in simulated.asked]
    assert named == [(0, each) for each in "abcd"] + [(0.1, each) for each in "ef"] + [(0.6, each) for each in "abcd"]


def test_a_host_behind_a_lost_link_is_asked_through_others(begun):
    """If a host does not answer soon, processes of other hosts pass on the request; later ones are asked both ways."""
    simulated, inquiry = begun(lambda name, *_: SOON if name.endswith(" r") else NEVER, {1: "ab"}, 0.5, "qr")
    assert read_until(simulated, inquiry, 1.2) == [(1, 0.41), (1, 0.92)]
    first = [(0, "a"), (0, "b"), (0.4, "a through q"), (0.4, "b through r")]
    assert simulated.asked == [*first, (0.91, "a through r")]
    answered = read_until(simulated, inquiry, 3.6)
    assert [at for at, name in simulated.asked if name == "a"] == [0, 2.44]  # a link that works again is noticed
    assert len(answered) == 5
    assert not inquiry.is_silent(1)


def test_a_direct_answer_counts_more_than_a_relayed_one(begun):
    """If the link is only slow, the answer of one process shows that all processes of the host are not beyond it."""
    answers = {"a": (0.5, {"arrived": {}}), "b through r": (0.3, {"arrived": {}})}
    simulated, inquiry = begun(lambda name, *_: answers.get(name, NEVER), {1: "ab"}, relays="qr")
    assert read_until(simulated, inquiry, 1) == [(1, 0.5)]
    assert [process.relay for process in inquiry._processes[1]] == [None, None]


def test_relays_are_asked_in_turn(begun):
    """Some at a time, each for another process of the host, until it answers or is silent."""
    simulated, inquiry = begun(lambda *_: NEVER, {1: "a"}, relays="pqrstu")
    read_until(simulated, inquiry, 1)
    asked = [(at, name) for at, name in simulated.asked if "through" in name]
    assert asked == [(0.4, f"a through {each}") for each in "pqrs"] + [(0.9, f"a through {each}") for each in "tupq"]
    read_until(simulated, inquiry, SILENT_S)
    assert inquiry.is_silent(1)


def test_a_relay_that_reports_the_end_of_a_process_is_asked_for_the_others(begun):
    """A process of the host that has ended says nothing about the link to it."""
    behaviour = {"a through r": (0.01, Ended), "b through r": (0.01, Ended), "f through r": SOON}
    simulated, inquiry = begun(lambda name, *_: behaviour.get(name, NEVER), {1: "abcdef"}, relays="r")
    assert read_until(simulated, inquiry, 1) == [(1, 0.44)]
    assert inquiry.found == {1: {"arrived": {}}}


def test_no_relay_is_needed_if_a_host_replies(begun):
    """Whatever it replies directly, it can be reached; if it falls silent, it is asked through a relay."""
    reply = 0.01, {"otherwise": True}
    simulated, inquiry = begun(lambda name, _, now: reply if name == "a" and now < 1 else NEVER, {1: "a"}, relays="r")
    read_until(simulated, inquiry, 1.3)
    assert not any("through" in name for _, name in simulated.asked)
    read_until(simulated, inquiry, 1.5)
    assert any("through" in name for _, name in simulated.asked)


def test_a_host_has_ended_when_all_its_processes_have(begun):
    """Then it is not asked again. The others are asked at once. A process that is silent may be stopped: only it is
    asked again."""
    ended = 0.001, Ended
    simulated, inquiry = begun(
        lambda name, *_: ended if name < "e" else (0.001, {"unknown": True}), {1: "abcdef"}, 0.02
    )
    assert read_until(simulated, inquiry, 1) == [(1, 0.02)]
    assert inquiry.found == {1: None}
    assert len(simulated.asked) == 6
    simulated, inquiry = begun(lambda name, *_: NEVER if name == "b" else ended, {1: "abc"})
    assert read_until(simulated, inquiry, 3) == []
    assert simulated.asked[3:] == [(0.5, "b"), (1.0, "b"), (1.5, "b"), (2.0, "b"), (2.5, "b")]
    assert inquiry.is_silent(1)


def test_late_answers_do_not_replace_newer_ones(begun):
    """Once a question is answered, replies of other processes to it are not read."""
    answers = {"a": (0.3, {"arrived": {}}), "b": (0.1, {"arrived": {"5": [1, True, 0]}})}
    simulated, inquiry = begun(lambda name, *_: answers[name], {1: "ab"})
    assert read_until(simulated, inquiry, 1) == [(1, 0.1)]
    assert inquiry.found == {1: {"arrived": {"5": [1, True, 0]}}}


def test_a_host_with_other_electors_has_not_answered(begun):
    """It may soon receive the right electors, so the request is repeated soon."""
    simulated, inquiry = begun(lambda name, request, now: SOON if now > 0.2 else (0.001, {"otherwise": True}), {1: "a"})
    assert [host for host, _ in read_until(simulated, inquiry, 1)] == [1]
    assert 5 < len(simulated.asked) < 20


def test_time_in_which_nobody_looked_does_not_count(begun):
    """A process that was stopped gives the others time to answer."""
    simulated, inquiry = begun(lambda name, request, now: SOON if now > 1 else NEVER, {1: "a"})
    inquiry.read()
    simulated.sleep(60)
    assert inquiry.read() == []
    assert not inquiry.is_silent(1)
    assert len(read_until(simulated, inquiry, 61)) == 1
