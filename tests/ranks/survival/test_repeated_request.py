"""A request to other hosts is repeated until they answer. A silent host does not delay the answers of others."""

import pytest
from simulated_hosts import SimulatedHosts

from crossreduce.ranks.connections.peer_requests import Ended
from crossreduce.ranks.connections.repeated_request import SILENT_S, RepeatedRequest

NEVER = 9.0, None  # seconds until the reply, and the reply
SOON = 0.01, {"arrived": {}}


@pytest.fixture
def begun(monkeypatch):
    """Return a function that begins a request to hosts in simulated time. ``hosts``: for each host the names of its
    processes, one letter each. ``relays``: names of relays. ``behaviour``: see ``SimulatedHosts``."""

    def begin(behaviour, hosts, again_s=None, relays=""):
        simulated = SimulatedHosts(monkeypatch, behaviour)
        processes = {host: [simulated.process(name) for name in names] for host, names in hosts.items()}
        third = [simulated.process(name) for name in relays]
        return simulated, RepeatedRequest(processes, "token", {"what": "status"}, again_s, dict.fromkeys(hosts, third))

    return begin


def read_until(simulated, inquiry, until, step=0.01):
    """Read answers until a time. Return a list of the hosts that have answered and the times of their answers."""
    found = []
    while simulated.now < until - 1e-9:
        found += [(host, round(simulated.now, 2)) for host in inquiry.read()]
        simulated.sleep(step)
    return found


def test_an_answer_counts_whenever_it_comes(begun):
    """An answer counts if it comes after the request was repeated, here 1.5 s after the first request. The answer to a
    repeated request, here to that after 1 s, counts, too."""
    simulated, inquiry = begun(lambda *_: (1.5, {"late": []}), {1: "a"})
    assert read_until(simulated, inquiry, 3) == [(1, 1.5)]
    assert inquiry.found == {1: {"late": []}}
    assert not inquiry.is_silent(1)
    simulated, inquiry = begun(lambda name, request, now: SOON if now > 0.9 else NEVER, {1: "a"})
    assert read_until(simulated, inquiry, 3) == [(1, 1.01)]
    assert simulated.asked == [(0, "a"), (0.5, "a"), (1.0, "a")]


def test_a_silent_host_delays_no_other(begun):
    """A host is silent ``SILENT_S`` after the first request that it has not answered. Others answer meanwhile."""
    simulated, inquiry = begun(lambda name, *_: SOON if name == "a" else NEVER, {1: "a", 2: "b"}, again_s=0.02)
    answered = read_until(simulated, inquiry, SILENT_S)
    assert {host for host, _ in answered} == {1}
    assert len(answered) > 50
    assert not inquiry.is_silent(1)
    assert inquiry.is_current(1)
    assert inquiry.is_silent(2)
    assert not inquiry.is_current(2)


def test_a_host_falls_silent_after_an_answer(begun):
    """A host that has answered before is silent ``SILENT_S`` after the first request without an answer. Soon, its
    earlier answers are not current any more."""
    simulated, inquiry = begun(lambda name, request, now: SOON if now < 1 else NEVER, {1: "a"}, again_s=0.02)
    (*_, (_, last)) = read_until(simulated, inquiry, 1 + SILENT_S - 0.05)
    assert not inquiry.is_silent(1)
    assert not inquiry.is_current(1)
    read_until(simulated, inquiry, last + 0.02 + SILENT_S + 0.01)
    assert inquiry.is_silent(1)


def test_few_processes_of_a_host_are_asked_at_once(begun):
    """Four processes of a host are asked first, the others after 0.1 s, and the first four again after 0.5 s more."""
    simulated, inquiry = begun(lambda *_: NEVER, {1: "abcdef"})
    read_until(simulated, inquiry, 1)
    named = [(time, name) for time, name in simulated.asked]
    assert named == [(0, each) for each in "abcd"] + [(0.1, each) for each in "ef"] + [(0.6, each) for each in "abcd"]


def test_a_host_behind_a_lost_link_is_asked_through_others(begun):
    """If a host does not answer soon, it is asked through relays: later questions, too, and sometimes also directly."""
    simulated, inquiry = begun(lambda name, *_: SOON if name.endswith(" r") else NEVER, {1: "ab"}, 0.5, "qr")
    assert read_until(simulated, inquiry, 1.2) == [(1, 0.41), (1, 0.92)]
    first = [(0, "a"), (0, "b"), (0.4, "a through q"), (0.4, "b through r")]
    assert simulated.asked == [*first, (0.91, "a through r")]
    answered = read_until(simulated, inquiry, 3.6)
    assert [at for at, name in simulated.asked if name == "a"] == [0, 2.44]  # a link that works again is noticed
    assert len(answered) == 5
    assert not inquiry.is_silent(1)


def test_a_direct_answer_counts_more_than_a_relayed_one(begun):
    """A direct answer shows that the link is only slow: no relay is stored, although a relayed answer came before."""
    answers = {"a": (0.5, {"arrived": {}}), "b through r": (0.3, {"arrived": {}})}
    simulated, inquiry = begun(lambda name, *_: answers.get(name, NEVER), {1: "ab"}, relays="qr")
    assert read_until(simulated, inquiry, 1) == [(1, 0.5)]
    assert [process.relay for process in inquiry._processes[1]] == [None, None]


def test_relays_are_asked_in_turn(begun):
    """Four relays at a time are asked, and then the next four, until the host answers or is silent."""
    simulated, inquiry = begun(lambda *_: NEVER, {1: "a"}, relays="pqrstu")
    read_until(simulated, inquiry, 1)
    asked = [(at, name) for at, name in simulated.asked if "through" in name]
    assert asked == [(0.4, f"a through {each}") for each in "pqrs"] + [(0.9, f"a through {each}") for each in "tupq"]
    read_until(simulated, inquiry, SILENT_S)
    assert inquiry.is_silent(1)


def test_a_relay_that_reports_the_end_of_a_process_is_asked_for_the_others(begun):
    """If a relay reports that a process has ended, it is asked for other processes of the host until one answers."""
    behaviour = {"a through r": (0.01, Ended), "b through r": (0.01, Ended), "f through r": SOON}
    simulated, inquiry = begun(lambda name, *_: behaviour.get(name, NEVER), {1: "abcdef"}, relays="r")
    assert read_until(simulated, inquiry, 1) == [(1, 0.44)]
    assert inquiry.found == {1: {"arrived": {}}}


def test_no_relay_is_needed_if_a_host_replies(begun):
    """While a host replies directly, though without an answer, no relay is asked. When it is silent, one is asked."""
    reply = 0.01, {"otherwise": True}
    simulated, inquiry = begun(lambda name, _, now: reply if name == "a" and now < 1 else NEVER, {1: "a"}, relays="r")
    read_until(simulated, inquiry, 1.3)
    assert not any("through" in name for _, name in simulated.asked)
    read_until(simulated, inquiry, 1.5)
    assert any("through" in name for _, name in simulated.asked)


def test_a_host_has_ended_when_all_its_processes_have(begun):
    """A host has ended when all its processes have ended or left the group; then it is not asked again. If one of them
    is silent, it may be stopped: only this process is asked again."""
    ended, left = (0.001, Ended), (0.001, {"unknown": True})
    simulated, inquiry = begun(lambda name, *_: ended if name < "e" else left, {1: "abcdef"}, 0.02)
    assert read_until(simulated, inquiry, 1) == [(1, 0.02)]
    assert inquiry.found == {1: None}
    assert len(simulated.asked) == 6
    simulated, inquiry = begun(lambda name, *_: NEVER if name == "b" else ended, {1: "abc"})
    assert read_until(simulated, inquiry, 3) == []
    assert simulated.asked[3:] == [(0.5, "b"), (1.0, "b"), (1.5, "b"), (2.0, "b"), (2.5, "b")]
    assert inquiry.is_silent(1)


def test_late_answers_do_not_replace_newer_ones(begun):
    """Once a process has answered a question, later replies of other processes to this question are ignored."""
    answers = {"a": (0.3, {"arrived": {}}), "b": (0.1, {"arrived": {"5": [1, True, 0]}})}
    simulated, inquiry = begun(lambda name, *_: answers[name], {1: "ab"})
    assert read_until(simulated, inquiry, 1) == [(1, 0.1)]
    assert inquiry.found == {1: {"arrived": {"5": [1, True, 0]}}}


def test_a_host_with_other_electors_has_not_answered(begun):
    """The reply of a host with other electors is not an answer. It may soon get the same ones, so it is asked again."""
    simulated, inquiry = begun(lambda name, request, now: SOON if now > 0.2 else (0.001, {"otherwise": True}), {1: "a"})
    assert [host for host, _ in read_until(simulated, inquiry, 1)] == [1]
    assert 5 < len(simulated.asked) < 20


def test_time_in_which_nobody_looked_does_not_count(begun):
    """After a pause of the asking process, here of 60 s, a host is not silent before it had time to answer again."""
    simulated, inquiry = begun(lambda name, request, now: SOON if now > 1 else NEVER, {1: "a"})
    inquiry.read()
    simulated.sleep(60)
    assert inquiry.read() == []
    assert not inquiry.is_silent(1)
    assert len(read_until(simulated, inquiry, 61)) == 1
