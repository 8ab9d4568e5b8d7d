"""NumPy arrays in groups of crossreduce.processes: the collectives, how ranks meet, and how groups go on."""

import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from array_checks import every_collective, same
from members import Resources, resident_bytes
from ranks import Died, ranks
from test_torch_storm import free_port

from crossreduce import processes
from crossreduce.errors import (
    ArgumentError,
    CollectiveTimeout,
    ContextError,
    ExcludedError,
    MismatchError,
    PeerLostError,
    ReductionError,
    UnsupportedError,
    encoded,
)
from crossreduce.ranks import agreement
from crossreduce.ranks.connections import listener
from crossreduce.ranks.connections.listener import MOST_UNKNOWN
from crossreduce.ranks.connections.rendezvous import MET, StoreRendezvous
from crossreduce.ranks.connections.store import StoreClient, StorePart
from crossreduce.ranks.survival import joining, survivors
from crossreduce.ranks.transports import tcp
from crossreduce.torch import forming

LONG_S = 1800.0


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    """Let ranks write their dumps into a directory of the test, and forget what a launcher of the tests has set."""
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "dumps"))
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSSREDUCE_KEY", "TORCHELASTIC_USE_AGENT_STORE")
    for name in names:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def joined(rendezvous, address, timeout_s=LONG_S, **options):
    return processes.join(rendezvous.rank, rendezvous.size, address, timeout_s=timeout_s, **options)


def total(group):
    """Return the sum of the ranks' numbers plus one, times ten."""
    return int(group.all_reduce(np.full(3, 10 * (group.rank + 1)))[0])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def lose(group):
    """Make calls until one fails because ranks were lost, and return these."""
    while True:
        try:
            total(group)
        except (PeerLostError, CollectiveTimeout) as error:
            return error.ranks


# The collectives


def collectives(rendezvous, address, hosts):
    with joined(rendezvous, address) as group:
        every_collective(group)
        topology = group.measure_topology(0.2)
        assert len(topology.devices) == group.size
        same(group.all_reduce(np.arange(300_000)), group.size * np.arange(300_000))
        text = str(group.stats())
        assert f'group "world", rank {group.rank} of {group.size}' in text
    with pytest.raises(ContextError, match="closed"):
        group.barrier()
    return len(group.hosts) == len(set(hosts))


@pytest.mark.parametrize("hosts", ["a", "aa", "aaa", "ab", "aba", "aabbbc"])
def test_every_collective_of_numpy_arrays(address, hosts):
    """Every collective, dtype and shape gives NumPy's results, on one host and on several simulated ones."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    assert all(ranks(len(hosts), collectives, address, hosts, environment=environment, timeout_s=120))


def test_masked_arrays_are_refused():
    """A masked array raises an error, also if an array of its shape and dtype was reduced before."""
    with processes.join(0, 1) as group:
        for _ in range(3):
            group.all_reduce(np.ones(2))
        with pytest.raises(UnsupportedError, match=r"masked arrays cannot be reduced.*\n.*\n.*filled"):
            group.all_reduce(np.ma.array([1.0, 2.0], mask=[0, 1]))


def test_roots_that_are_not_integers():
    """A root that is not the number of a rank is an ArgumentError in every call; NumPy's integers are numbers."""
    x = np.ones((1, 2))
    with processes.join(0, 1) as group:
        calls = (
            lambda root: group.reduce(x, "sum", root),
            lambda root: group.broadcast(x, root),
            lambda root: group.gather(x, root),
            lambda root: group.scatter(x, np.ones(2), root),
        )
        for call in calls:
            for root in (1.0, "0", True, None, np.array([0])):
                with pytest.raises(ArgumentError, match="root must be the number of a rank"):
                    call(root)
            with pytest.raises(ArgumentError, match="the root is not a rank of the group"):
                call(1)
            assert call(np.int64(0)).sum() == 2


# Groups that go on


def shrinks(rendezvous, address):
    group = joined(rendezvous, address)
    total(group)
    x = np.ones(1000)
    group.all_reduce(x)
    if group.rank == 0:  # the rank at whose address the ranks have met
        die()
    assert lose(group) == (0,)
    made = group.shrink()
    assert isinstance(made, processes.RankGroup)
    with pytest.raises(ContextError, match="closed"):
        group.barrier()
    with pytest.raises(ContextError, match="closed"):
        group.shrink()
    assert group.reformed is None
    for _ in range(3):
        same(made.all_reduce(x), 3 * x)
    found = made.reformed, made.rank, made.size, total(made)
    made.close()
    return found


def test_a_group_shrinks_without_its_first_rank(address):
    """After a rank has died, here the first one, shrink makes a group of the others, renumbered in order, which tells
    how many calls had succeeded; the earlier group is closed."""
    lost, *found = ranks(4, shrinks, address, check=False)
    assert isinstance(lost, Died)
    assert found == [(processes.Reformed((1, 2, 3), 2), rank, 3, 60) for rank in range(3)]


def shrinks_to_one(rendezvous, address):
    group = joined(rendezvous, address)
    for _ in range(rendezvous.size - 1):
        total(group)
        if group.rank == 0:
            die()
        lose(group)
        assert group.agree(False) is False
        group = group.shrink()
    again = group.shrink()  # without a loss
    return again.size, again.reformed, total(again), again.agree(True), again.agree(False)


def test_a_group_shrinks_again_and_again(address):
    """Ranks die one after the other, each time the first one, until one is left, which can shrink again."""
    found = ranks(6, shrinks_to_one, address, check=False)
    assert found[-1] == (1, processes.Reformed((0,), 0), 10, True, False), found


def commits(rendezvous, address):
    group, steps, done = joined(rendezvous, address), 0, []

    def step(group):
        nonlocal steps
        steps += 1
        if steps == 3 and rendezvous.rank == 1:
            die()
        return total(group)

    def changed(group):
        done.append(group.reformed.members)
        if len(done) == 1 and rendezvous.rank == 2:
            die()
        group.barrier()

    results = []
    while len(results) < 5:
        group, result = group.committed(step, changed)
        results.append(result)
    return results, done, group.size


def test_a_step_is_repeated_until_all_who_are_left_have_done_it(address):
    """If ranks die in a step, and in what is called before its repetition, the others repeat it, each the same step."""
    found = ranks(5, commits, address, check=False)
    assert [one for one in found if not isinstance(one, Died)] == [
        ([150, 150, 60, 60, 60], [(0, 2, 3, 4), (0, 2, 3)], 3)
    ] * 3, found


def fails_on_one_rank(rendezvous, address):
    group, sizes = joined(rendezvous, address), []

    def step(group):
        sizes.append(group.size)
        found = total(group)
        if len(sizes) == 1 and rendezvous.rank == 1:
            raise PeerLostError("a connection of the program was lost")
        return found

    group, found = group.committed(step)
    return sizes, found, group.reformed.members


def test_a_step_that_failed_on_one_rank_is_repeated_on_all(address):
    """A step counts on all ranks or on none: if one rank has lost a connection, those that succeeded repeat it, too."""
    assert ranks(3, fails_on_one_rank, address) == [([3, 3], 60, (0, 1, 2))] * 3


def fails(rendezvous, address, folder, in_step):
    group = joined(rendezvous, address)

    def step(group):
        total(group)
        if rendezvous.rank == 1:
            raise ValueError("a failure of the program")
        return total(group)

    done = [Path(folder, f"done{rank}") for rank in (0, 2)]
    if rendezvous.rank == 1:
        with pytest.raises(ValueError, match="a failure"):
            group.committed(step if in_step else total_and_failure)
        with pytest.raises(ContextError, match="closed"):
            group.barrier()
        while not all(path.exists() for path in done):  # this process lives on
            time.sleep(0.01)
        group.close()
        return None
    found = group.committed(step if in_step else total)[1]
    Path(folder, f"done{rendezvous.rank}").touch()
    return found


def total_and_failure(group):
    total(group)
    raise ValueError("a failure of the program")


@pytest.mark.parametrize(("in_step", "result"), [(True, 30), (False, 60)])
def test_another_error_of_a_step_ends_only_the_rank_that_raises_it(address, tmp_path, in_step, result):
    """An error that is not about ranks is passed on. The others continue at once, although the process of the rank that
    raised it has not ended: they repeat the step that it did not complete, or count the one that it did."""
    assert ranks(3, fails, address, tmp_path, in_step) == [result, None, result]


def other_errors(rendezvous, address):
    group = joined(rendezvous, address)

    def differs(group):
        group.all_reduce(np.ones(1 + group.rank))

    with pytest.raises(MismatchError, match="in shape"):
        group.committed(differs)
    found = [total(group)]
    if rendezvous.rank == 1:
        die()

    def replaces_the_error(group):
        try:
            group.barrier()
        except PeerLostError as error:
            raise RuntimeError("of a library") from error

    with pytest.raises(RuntimeError, match="of a library"):
        group.committed(replaces_the_error)
    made = group.shrink()
    return [*found, total(made)]


def test_errors_of_a_step_after_which_a_rank_stays_in_its_group(address):
    """After a MismatchError, which all ranks raise, the group can be used. After an error that follows from the loss of
    a rank, the others can still shrink it."""
    found = ranks(3, other_errors, address, check=False)
    assert isinstance(found.pop(1), Died)
    assert found == [[60, 30]] * 2, found


def computes_for_long(rendezvous, address):
    group, messages = joined(rendezvous, address, timeout_s=60), []
    survivors.SHRINK_S = processes.SHRINK_S = 0.3
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("crossreduce").addHandler(handler)

    def step(group):
        if group.size == 3 and rendezvous.rank == 2:
            die()
        if group.size == 3 and rendezvous.rank == 1:
            time.sleep(2)
        return total(group)

    group, found = group.committed(step)
    return found, group.reformed.members, [text for text in messages if "a step has failed" in text]


def test_a_rank_that_computes_for_long_is_waited_for(address):
    """When a step has failed, ranks that are alive are waited for as long as the timeout of the group by default. The
    log tells who repeats the step, and why."""
    *found, lost = ranks(3, computes_for_long, address, check=False)
    assert isinstance(lost, Died)
    for result, members, messages in found:
        assert (result, members) == (30, (0, 1))
        assert len(messages) == 1
        assert re.match(
            r"a step has failed, and is repeated by ranks 0, 1 of the earlier group: rank 2 died", messages[0]
        )


@pytest.mark.parametrize(
    ("error", "timeout_s", "wait_s"),
    [
        (PeerLostError("lost"), None, None),
        (PeerLostError("lost"), 3.0, 3.0),
        (CollectiveTimeout("late"), None, survivors.SHRINK_S),
        (CollectiveTimeout("late"), 30.0, 30.0),
    ],
)
def test_how_long_committed_waits(error, timeout_s, wait_s):
    """After a timeout, in which late ranks were waited for already, committed waits for 10 s only by default."""
    errors, waits = [error], []

    def step():
        if errors:
            raise errors.pop()

    def agree(done, wait_s):
        waits.append((done, wait_s))
        return done

    shrink = lambda: processes.Reformed((0,), 0)  # noqa: E731
    survivors.committed(step, lambda: None, agree, shrink, lambda _: None, lambda _: None, timeout_s)
    assert waits == [(False, wait_s), (True, None)]


def shrinks_with_failures(rendezvous, address, error, times):
    group, left = joined(rendezvous, address), times if rendezvous.rank == 0 else 0

    def serve(*arguments, **options):
        nonlocal left
        if left and len(arguments) == 1:
            left -= 1
            raise error
        return StoreClient(*arguments, **options)

    processes._KIND = processes.GroupKind("NumPy ranks", serve, processes._group_of)
    try:
        return total(group.shrink())
    except (ReductionError, KeyboardInterrupt) as caught:
        return caught


def test_a_rank_that_cannot_open_a_socket_in_shrink(address):
    """If the system refuses what a rank needs to form a group, all ranks try again."""
    error = OSError(24, "Too many open files")
    assert ranks(2, shrinks_with_failures, address, error, 1) == [30, 30]


def test_a_rank_that_can_never_open_a_socket_in_shrink(address):
    """If the system refuses it again and again, all ranks raise an error of the library; that rank's says why."""
    first, second = ranks(2, shrinks_with_failures, address, OSError(24, "Too many open files"), 10**6, check=False)
    assert isinstance(first, ReductionError)
    assert re.search(r'rank 0 cannot form group "world" again\.\n.*Too many open files', str(first))
    assert isinstance(second, ReductionError)


def test_ctrl_c_while_a_group_is_formed(address):
    """A rank that is interrupted while it forms a group leaves it, and the others do not wait for it."""
    began = time.monotonic()
    first, second = ranks(2, shrinks_with_failures, address, KeyboardInterrupt(), 1, check=False)
    assert isinstance(first, KeyboardInterrupt)
    assert second == 10
    assert time.monotonic() - began < 9


def agrees_in_two_threads(rendezvous, address):
    group = joined(rendezvous, address)
    if rendezvous.rank == 1:
        time.sleep(1)
        return group.agree(True)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(group.agree(True)))
    thread.start()
    while not group._agreeing.locked():
        time.sleep(0.001)
    for call in (group.shrink, group.grow, lambda: group.agree(False)):
        with pytest.raises(ContextError, match="another thread is in agree, shrink or grow"):
            call()
    thread.join()
    return answers[0]


def test_one_thread_at_a_time_agrees(address):
    """A second thread that calls agree, shrink or grow gets an error, and that of the first one goes on."""
    assert ranks(2, agrees_in_two_threads, address) == [True, True]


def agrees(rendezvous, address):
    group = joined(rendezvous, address)
    found = [group.agree(True), group.agree(group.rank != 1)]
    if group.rank == 2:
        die()
    found.append(group.agree(True))
    assert lose(group) == (2,)
    return found


def test_agree_gives_one_answer(address):
    """The answer is whether the flag is true on all ranks that are left; a rank that has died does not count."""
    found = ranks(3, agrees, address, check=False)
    assert isinstance(found.pop(), Died)
    assert found == [[True, False, True]] * 2


def stopped(rendezvous, address):
    group = joined(rendezvous, address)
    total(group)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(ExcludedError, match="the other ranks have gone on without it"):
            group.shrink()
        with pytest.raises(ContextError, match="closed"):
            group.agree(True)
        return "excluded"
    began = time.monotonic()
    made = group.shrink(timeout_s=20)
    return made.reformed.members, total(made), time.monotonic() - began < 10


def test_a_rank_that_was_stopped_is_excluded(address):
    """A rank that is stopped is not waited for. When it continues, it gets an ExcludedError; its group is closed."""

    def go_on(pids):
        time.sleep(4)
        os.kill(pids[1], signal.SIGCONT)

    assert ranks(3, stopped, address, begun=go_on) == [((0, 2), 30, True), "excluded", ((0, 2), 30, True)]


def on_hosts(rendezvous, address):
    group = joined(rendezvous, address)
    total(group)
    if rendezvous.rank in (0, 1):
        die()
    lose(group)
    made = group.shrink()
    return made.reformed.members, total(made), len(made.hosts)


def test_a_host_is_lost(address):
    """If all ranks of a host die, the one that serves the store included, those of the other hosts go on."""
    environment = [{"CROSSREDUCE_HOST": host} for host in "aabbc"]
    found = ranks(5, on_hosts, address, environment=environment, check=False)
    assert found[2:] == [((2, 3, 4), 60, 2)] * 3, found


def grows(rendezvous, address, folder):
    invited = Path(folder, "invitation")
    if rendezvous.rank >= 2:
        while not invited.exists():
            time.sleep(0.01)
        with processes.join_invited(invited.read_text()) as group:
            state = group.broadcast(np.zeros(1), 0)
            assert group.reformed == processes.Reformed((), 0)
            return state[0], group.size, total(group), group.communicator.name
    group = processes.join(rendezvous.rank, 2, address, timeout_s=LONG_S, name="team")
    assert group.grow() is None
    if group.rank == 0:
        Path(folder, "partial").write_text(group.invitation())
        Path(folder, "partial").rename(invited)
    while group.size < rendezvous.size:
        group = group.grow() or group
        if group.size < rendezvous.size:
            total(group)
            time.sleep(0.01)
    state = group.broadcast(np.full(1, 7.5), 0)
    found = state[0], group.size, total(group), group.communicator.name
    group.close()
    return found


def test_new_processes_join(address, tmp_path):
    """Processes with an invitation join when the ranks call grow: at the end, in a group with the same settings."""
    assert ranks(3, grows, address, tmp_path) == [(7.5, 3, 60, "team")] * 3


def listens(rendezvous, address, folder):
    found, opened = set(), tcp.opened_listener

    def recorded(*given):
        made = opened(*given)
        found.add(made.getsockname()[0])
        return made

    tcp.opened_listener = recorded
    _, size, summed, _ = grows(rendezvous, address, folder)
    return size, summed, found


@pytest.mark.parametrize("host", ["localhost", "127.1.2.3"])
def test_a_group_of_one_host_listens_at_the_loopback_address(address, tmp_path, host):
    """If ranks meet at the loopback address, no other host can connect to any of them, also when processes have joined,
    and while connections between hosts are made."""
    address = address.replace("127.0.0.1", host)
    environment = [{"CROSSREDUCE_HOST": name} for name in "aab"]
    expected = {"127.0.0.1" if host == "localhost" else host}
    assert ranks(3, listens, address, tmp_path, environment=environment) == [(3, 60, expected)] * 3


@pytest.mark.parametrize(
    ("address", "size", "meeting"),
    [
        ("LocalHost:5", 2, ("LocalHost", 5, "127.0.0.1")),
        ("[::1]:5", 2, ("::1", 5, "::1")),
        ("[::ffff:127.0.0.1]:5", 2, ("::ffff:127.0.0.1", 5, "127.0.0.1")),
        ("node0:5", 2, ("node0", 5, "")),
        ("10.0.0.1:5", 2, ("10.0.0.1", 5, "")),
        (None, 1, ("localhost", 0, "127.0.0.1")),
        ("node0:5", 1, ("localhost", 0, "")),
    ],
)
def test_where_the_ranks_listen(address, size, meeting):
    """Ranks listen at the loopback address if they meet there; a rank alone does so unless it has another address."""
    assert processes._meeting(address, size) == meeting


def test_an_invitation_of_another_kind_or_a_damaged_one():
    """An invitation of a group of torch, and a text that is none, raise errors without the keys in them."""
    with processes.join(0, 1) as group:
        text = group.invitation()
    with pytest.raises(ArgumentError, match=f"not an invitation.*\n.*a text of {len(text) - 5} characters"):
        processes.join_invited(text[:-5])
    with pytest.raises(ArgumentError, match=r"not an invitation.*\n.*given: int"):
        processes.join_invited(7)
    other = text.replace('"NumPy ranks"', f'"{forming.KIND}"')
    assert other != text
    with pytest.raises(ArgumentError, match=r"of another kind.*\n.*a group of torch"):
        processes.join_invited(other)
    with pytest.raises(PeerLostError, match="no rank of the group is left"):
        processes.join_invited(text, timeout_s=5)


PLACE = '[["127.0.0.1"], 1, "0123456789abcdef0123456789abcdef"]'


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '["NumPy ranks", "token", []]',
        f'["NumPy ranks", 7, [{PLACE}]]',
        f'[7, "token", [{PLACE}]]',
        *(f'["NumPy ranks", "token", [{PLACE.replace(*change)}]]' for change in [
            ('"127.0.0.1"', "7"), ('["127.0.0.1"]', '"127.0.0.1"'), ("1, ", "99999999, "), ("1, ", "1e400, "),
            ("1, ", "true, "), ("1, ", "0, "), ("0123", "xxxx"), ("0123", ""), ('"0123', '7, "0123'),
        ]),
    ],
)  # fmt: skip
def test_damaged_invitations(text):
    """Whatever is wrong in an invitation, the error is an ArgumentError."""
    with pytest.raises(ArgumentError, match="this is not an invitation"):
        processes.join_invited(text)


def test_an_invitation_of_a_group_that_is_closed():
    """A group that is closed, or whose rank the others have excluded, makes no invitation."""
    with processes.join(0, 1) as group:
        pass
    with pytest.raises(ContextError, match='group "world" is closed'):
        group.invitation()


def forms_slowly(rendezvous, address, folder):
    invited = Path(folder, "invitation")
    if rendezvous.rank == 1:
        joining._FORMING_S = 0.5
        while not invited.exists():
            time.sleep(0.01)
        began = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="did not let this process join"):
            processes.join_invited(invited.read_text(), timeout_s=1)
        return time.monotonic() - began

    def slow(*arguments):
        time.sleep(6)
        return processes._group_of(*arguments)

    group = processes.join(0, 1, timeout_s=LONG_S)
    kind, processes._KIND = processes._KIND, processes.GroupKind("NumPy ranks", StoreClient, slow)
    Path(folder, "partial").write_text(group.invitation())
    Path(folder, "partial").rename(invited)
    while not group.communicator.agreements.joiners():
        time.sleep(0.01)
    made = group.grow(30)
    processes._KIND = kind
    return made, total(group)


def test_a_process_that_joins_waits_for_a_limited_time(address, tmp_path):
    """join_invited returns after its timeout and the time for forming the group, whatever the timeout of the group is.
    The ranks then go on without that process."""
    (made, found), took = ranks(2, forms_slowly, address, tmp_path)
    assert (made, found) == (None, 10)
    assert took < 5


def test_processes_that_do_not_ask_again_are_forgotten(monkeypatch):
    """A rank keeps no list of all processes that have ever wanted to join."""
    monkeypatch.setattr(agreement, "JOINER_S", 0.05)
    with processes.join(0, 1) as group:
        agreements = group.communicator.agreements
        for token in ("first", "second"):
            agreements.answer({"what": "join", "token": token, "place": []})
            time.sleep(0.1)
        assert [*agreements.waiting] == ["second"]
        assert agreements.joiners() == {}
        assert agreements.waiting == {}


def invalid_timeouts(rendezvous, address):
    group = joined(rendezvous, address)
    calls = (group.shrink, group.grow, lambda timeout_s: group.agree(True, timeout_s))
    for call in (*calls, lambda timeout_s: group.committed(total, timeout_s=timeout_s)):
        for timeout_s in ("10", True, -1, float("nan"), 10**400):
            with pytest.raises(ArgumentError, match="timeout_s must be a number of seconds, 0 or more"):
                call(timeout_s=timeout_s)
    return total(group)


def test_timeouts_that_are_not_seconds(address):
    """A timeout that is not a number of seconds is an error of the caller, before anything happens to the group."""
    assert ranks(2, invalid_timeouts, address) == [30, 30]


CYCLES = int(os.environ.get("CROSSREDUCE_CYCLES", "20"))


def soak(rendezvous, address, cycles):
    """Shrink and grow again and again: the last rank leaves, and joins as a new process would."""
    group = joined(rendezvous, address)
    total(group)
    for cycle in range(cycles):
        if cycle == cycles // 2:
            begun = used(group)
        invited = group.invitation()
        if group.rank == rendezvous.size - 1:
            group.close()
            group = processes.join_invited(invited)
        else:
            group = group.shrink()
            assert total(group) == 10 * sum(range(1, rendezvous.size))
            while (made := group.grow()) is None:
                time.sleep(0.002)
            group = made
        assert total(group) == 10 * sum(range(1, rendezvous.size + 1))
    (begun, before), (ended, after) = begun, used(group)
    return begun, ended, (after - before) / before


def used(group):
    """Return the resources of this process, once the threads that answer other ranks have ended."""
    gc.collect()
    time.sleep(0.5)
    group.barrier()
    return Resources(), resident_bytes()


def test_shrinks_and_grows_leave_nothing(address):
    """Groups that were shrunk and grown leave no descriptor, thread, mapping, file or memory.

    CROSSREDUCE_CYCLES=500 in the environment makes 500 of each.
    """
    before = Resources().shm
    for begun, ended, drift in ranks(3, soak, address, CYCLES, timeout_s=max(60, CYCLES)):
        assert begun == ended
        print(f"drift {drift:.2%}")
        assert drift < 0.02
    assert Resources().shm == before


# How ranks meet


PROGRAM = """
import sys
import numpy as np
import crossreduce.processes
with crossreduce.processes.join() as group:
    sys.stdout.write(f"{group.rank} {group.size} {int(group.all_reduce(np.array(group.rank + 1)))}\\n")  # in one piece
    sys.stdout.flush()
    group, _ = group.committed(lambda group: group.barrier())
    group = group.shrink()
assert not {"torch", "mpi4py", "jax"} & {*sys.modules}
"""


def test_ranks_find_each_other_by_the_variables_of_launchers(address):
    """Programs that a launcher started with RANK and the other variables need no argument, and load no framework."""
    host, port = address.split(":")
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": host, "MASTER_PORT": port, "CROSSREDUCE_KEY": "a secret"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    output = [process.communicate(timeout=60)[0] for process in started]
    assert output == [f"{rank} 3 6\n" for rank in range(3)]


def test_under_torchrun(tmp_path):
    """Under torchrun, whose own store listens at MASTER_PORT, ranks meet at the next port."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(free_port()), str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.split("\n")) == ["", "0 2 3", "1 2 3"]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ((), {}, r"rank was not given, and RANK is not set.*\n.*rank=None\n.*torchrun"),
        ((0,), {}, "size was not given, and WORLD_SIZE is not set"),
        ((), {"RANK": "one", "WORLD_SIZE": "2"}, r"RANK must be an integer.*\n.*'one'"),
        ((1.5, 2), {}, "rank must be an integer"),
        ((2, 2), {}, r"at least 0 and less than the size.*\n.*rank 2, size 2"),
        ((-1, 2), {}, "at least 0 and less than the size"),
        ((0, 0), {}, "at least 0 and less than the size"),
        ((0, 2), {}, r"address was not given.*\n.*MASTER_ADDR=None, MASTER_PORT=None"),
        ((0, 2), {"MASTER_ADDR": "node0"}, "MASTER_ADDR=node0, MASTER_PORT=None"),
        ((0, 2), {"MASTER_ADDR": "node0", "MASTER_PORT": "ssh"}, r"not an address.*\n.*'node0:ssh'.*\n.*node0:29500"),
        ((0, 2, "node0"), {}, "not an address"),
        ((0, 2, "node0:65536"), {}, "not an address"),
        ((0, 2, "node0:0"), {}, "not an address"),
        ((0, 2, ("node0", 1)), {}, "not an address"),
        ((0, 2, ":29500"), {}, "not an address"),
        ((1, 2, "a..b:29500"), {}, "not an address"),
        ((1, 2, f"{'a' * 300}:29500"), {}, "not an address"),
        ((1, 2, "node 0:29500"), {}, "not an address"),
        ((0, 1 << 17, "node0:29500"), {}, r"size, which is at most 65536\.\n.*size 131072"),
        ((True, 2), {}, r"rank must be an integer.*\n.*True"),
    ],
)
def test_invalid_arguments_and_variables(monkeypatch, arguments, variables, message):
    """What is missing or invalid is named, with what was given and what to do, before this waits for anything."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=message):
        processes.join(*arguments)


def test_invalid_options():
    """A key that is not a text and a timeout that is not a number are errors; the key is not shown."""
    with pytest.raises(ArgumentError, match=r"key must be a text.*\n.*bytes") as caught:
        processes.join(0, 1, key=b"a secret")
    assert "a secret" not in str(caught.value)
    with pytest.raises(ArgumentError, match="timeout_s must be a number"):
        processes.join(0, 1, timeout_s="10")
    with pytest.raises(ArgumentError, match=r"name must be a text.*\n.*5"):
        processes.join(0, 1, name=5)
    processes.join(0, 1, key="\ud800").close()  # of an environment variable that is not UTF-8


def at_once(functions):
    """Run functions in threads, and return the errors that they raise."""
    errors = [None] * len(functions)

    def run(number, function):
        try:
            function()
        except Exception as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors


def meets(address, *numbers, timeout_s=20.0, **options):
    """Let processes, here threads, join with these ranks and sizes at the same time; return their errors."""
    calls = [
        lambda rank=rank, size=size: processes.join(rank, size, address, timeout_s=timeout_s, **options)
        for rank, size in numbers
    ]
    began = time.monotonic()
    errors = at_once(calls)
    assert time.monotonic() - began < timeout_s / 2
    return errors


def test_sizes_that_differ(address):
    """If ranks have different sizes, all of them raise the same error at once, which names two of them."""
    errors = meets(address, (0, 3), (1, 3), (2, 4))
    assert {type(error) for error in errors} == {MismatchError}
    for error in errors:
        assert re.search(r"size is \d on rank \d and \d on rank \d\.\n.*same size", str(error)), error


def test_a_rank_that_is_there_twice(address, monkeypatch):
    """If two processes have the same rank, all that are waiting raise an error at once, which names it."""
    monkeypatch.setattr(processes, "_LATE_S", 0.5)
    errors = meets(address, (0, 3), (1, 3), (1, 3))
    assert {type(error) for error in errors} == {ArgumentError}
    assert all("two processes have joined as rank 1" in str(error) for error in errors)


def test_a_rank_that_comes_after_the_error_gets_it_too(address):
    """If ranks cannot meet, a rank that comes some seconds later raises the same error, not that rank 0 is missing."""

    def second():
        time.sleep(2.5)
        processes.join(2, 3, address, timeout_s=20)

    calls = [lambda rank=rank: processes.join(rank, 3, address, timeout_s=20) for rank in (0, 1, 1)]
    errors = at_once([*calls, second])
    assert [type(error) for error in errors] == [ArgumentError] * 4, errors
    assert all("two processes have joined as rank 1" in str(error) for error in errors)


class Interrupted(StorePart):
    """A part of a store in which another process does something before each ``compare_set`` of this one."""

    def compare_set(self, *arguments):
        self.before()
        return super().compare_set(*arguments)


def test_ranks_meet_either_all_or_not_at_all():
    """If an error is published when all ranks have come, but not all of them have seen that, all raise it. If one of
    them has seen it, none does."""
    for fails in (True, False):
        served = StoreClient(b"key")
        parts = [Interrupted(served, "meet/") for _ in range(2)]
        first, second = (StoreRendezvous(part, rank, 2, 5) for rank, part in enumerate(parts))
        third = StoreRendezvous(StorePart(served, "meet/"), 1, 2, 5)
        error = ArgumentError("two processes have joined as rank 1.")
        parts[0].before = partial(third.publish_abort, encoded(error)) if fails else lambda: None
        parts[1].before = lambda: None
        parts[1].set("1/1", b".")  # the second one has come
        if fails:
            for rendezvous in (first, second):
                with pytest.raises(ArgumentError, match="two processes"):
                    rendezvous.meet()
        else:
            first.meet()
            assert third.publish_abort(encoded(error)) == MET
            second.meet()
        served.close()


def late(rendezvous, address, folder):
    if rendezvous.rank < 2:
        group = processes.join(rendezvous.rank, 2, address, timeout_s=LONG_S)
        found = total(group)
        Path(folder, f"made{group.rank}").touch()
        while not group.all_reduce(np.array(Path(folder, "refused").exists()), "max"):
            found = total(group)
        group.close()
        return found
    while not all(Path(folder, f"made{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    errors = (1, 2, ArgumentError, "joined as rank 1"), (1, 3, MismatchError, "size is 3 on rank 1 and 2 on rank")
    for rank, size, kind, message in errors:
        with pytest.raises(kind, match=message) as caught:
            processes.join(rank, size, address, timeout_s=LONG_S)
        assert "join_invited" in str(caught.value)
    time.sleep(0.5)
    Path(folder, "refused").touch()
    return None


def test_a_process_that_comes_too_late_does_not_end_the_group(address, tmp_path):
    """A process that joins as a rank of a group that was made already gets an error, and the group goes on."""
    assert ranks(3, late, address, tmp_path) == [30, 30, None]


def test_missing_ranks_are_named(address):
    """Ranks that do not come are named after the timeout, by the ranks that are there."""
    began = time.monotonic()
    errors = at_once([lambda rank=rank: processes.join(rank, 4, address, timeout_s=1) for rank in (0, 2)])
    assert time.monotonic() - began < 10
    for error in errors:
        assert isinstance(error, CollectiveTimeout), error
        assert error.ranks == (1, 3)
        assert "ranks 1, 3 did not reach the rendezvous within 1 s" in str(error)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_an_address_at_which_nothing_listens(host):
    """If rank 0 does not come, or its host has no address, the error after the timeout shows the address and why."""
    port = free_port()
    with pytest.raises(CollectiveTimeout, match=f"rank 1 did not reach rank 0 at {host}:{port} within 0.5 s") as caught:
        processes.join(1, 2, f"{host}:{port}", timeout_s=0.5)
    assert caught.value.ranks == (0,)
    assert re.search("given: .*(refused|known|resol)", str(caught.value))


def test_a_port_at_which_another_program_listens(monkeypatch):
    """Rank 0 raises an error if its port is taken, and other ranks one if a program answers that is not rank 0."""
    monkeypatch.setattr(processes, "_REFUSED_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ArgumentError, match=rf"rank 0 cannot listen at port {port}\.\n.*in use"):
            processes.join(0, 2, f"127.0.0.1:{port}")

        def hang_up():
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(
            ArgumentError, match=rf"listens at 127.0.0.1:{port} does not accept rank 1\.\n.*\n.*same key"
        ):
            processes.join(1, 2, f"127.0.0.1:{port}")
        listener.shutdown(socket.SHUT_RDWR)


def test_a_port_at_which_a_program_listens_that_sends_nothing():
    """A program that accepts connections and sends nothing does not prolong the timeout; the error says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, began = listener.getsockname()[1], time.monotonic()
        with pytest.raises(
            CollectiveTimeout, match=rf"what listens at 127.0.0.1:{port} did not answer rank 1"
        ) as caught:
            processes.join(1, 2, f"127.0.0.1:{port}", timeout_s=0.5)
        assert time.monotonic() - began < 5
        assert caught.value.ranks == (0,)


def test_ranks_with_another_key_are_refused(address, monkeypatch):
    """A rank without the key of rank 0 can neither join nor read or change what the ranks have stored."""
    monkeypatch.setattr(processes, "_REFUSED_S", 0.3)
    monkeypatch.setenv("CROSSREDUCE_KEY", "of the environment")
    calls = [
        lambda: processes.join(0, 2, address, key="of rank 0", timeout_s=3),
        lambda: processes.join(1, 2, address, timeout_s=3),
    ]
    first, second = at_once(calls)
    assert isinstance(first, CollectiveTimeout)
    assert first.ranks == (1,)
    assert re.search(r"try:.*the same key on all ranks: \d+ connections to this rank did not prove", str(first))
    assert isinstance(second, ArgumentError)
    assert "does not accept rank 1" in str(second)


def with_key(rendezvous, address):
    with joined(rendezvous, address, key="a secret") as group:
        return total(group)


def test_ranks_with_the_same_key_join(address, monkeypatch):
    """A key that is given is used instead of that of the environment."""
    monkeypatch.setenv("CROSSREDUCE_KEY", "of the environment")
    assert ranks(2, with_key, address) == [30, 30]


def test_a_program_that_sends_nothing_is_dropped(monkeypatch):
    """A program that connects to a store has a limited time for its first request; a rank's connection stays open."""
    monkeypatch.setattr(listener, "UNKNOWN_S", 0.3)
    served = StoreClient(b"key")
    rank = StoreClient(b"key", "127.0.0.1", served.port)
    rank.set("known", b"1")
    with socket.create_connection(("127.0.0.1", served.port), 5) as stranger:
        assert stranger.recv(1) == b""
    assert rank.get("known") == b"1"
    served.close()


def test_silent_programs_hold_a_limited_number_of_connections(monkeypatch):
    """A store closes the oldest connections of programs that have sent no request when there are many; those of ranks
    stay open. So such programs cannot use up the files that the process may open."""
    monkeypatch.setattr(listener, "UNKNOWN_S", 60)
    served = StoreClient(b"key", ranks=3)
    rank = StoreClient(b"key", "127.0.0.1", served.port)
    rank.set("known", b"1")
    with ExitStack() as stack:
        number = MOST_UNKNOWN + 3 + 1
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 5)) for _ in range(number)
        ]
        assert strangers[0].recv(1) == b""
        strangers[1].settimeout(0.2)
        with pytest.raises(TimeoutError, match="timed out"):
            strangers[1].recv(1)
        assert rank.get("known") == b"1"
    served.close()


def test_many_values_are_read_at_once():
    """The values of many ranks are more than one message may have; all of them are returned."""
    served = StoreClient(b"key")
    other = StoreClient(b"key", "127.0.0.1", served.port)
    keys = [str(number) for number in range(600)]
    for key in keys:
        served.set(key, key.encode() * 1000)
    assert other.multi_get(keys) == [key.encode() * 1000 for key in keys]
    other.close()
    served.close()


def loses_the_first(rendezvous, address):
    if rendezvous.rank == 0:
        threading.Timer(0.5, die).start()
    with pytest.raises(PeerLostError, match="cannot be reached; rank 0, which runs it, has probably ended") as caught:
        processes.join(rendezvous.rank, rendezvous.size + 1, address, timeout_s=20)
    return caught.value.ranks


def test_rank_0_dies_while_others_wait_for_it(address):
    """If rank 0 dies before all ranks have come, those that are there raise a PeerLostError that names it, at once."""
    lost, *found = ranks(3, loses_the_first, address, check=False)
    assert isinstance(lost, Died)
    assert found == [(0,), (0,)]


def test_importing_the_module_imports_no_framework():
    """Importing ``crossreduce.processes`` imports neither torch nor mpi4py."""
    code = "import sys; import crossreduce.processes; print({'torch', 'mpi4py'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
