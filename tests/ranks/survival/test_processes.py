"""NumPy arrays in groups of crossreduce.processes: the collectives, and groups that continue after failures."""

import logging
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from array_checks import every_collective, same
from free_port import free_port
from kinds_of_groups import die, summed, wait_until
from ranks import Died, ranks

from crossreduce import processes
from crossreduce.errors import (
    ArgumentError,
    CollectiveTimeout,
    ContextError,
    MismatchError,
    PeerLostError,
    ReductionError,
    UnsupportedError,
)
from crossreduce.processes import meeting, rank_group
from crossreduce.ranks.connections.store import StoreClient
from crossreduce.ranks.survival import survivors
from crossreduce.ranks.survival.formation import GroupKind
from crossreduce.ranks.transports import tcp

LONG_S = 1800.0


def joined(rendezvous, address, timeout_s=LONG_S, **options):
    return processes.join(rendezvous.rank, rendezvous.size, address, timeout_s=timeout_s, **options)


def lost(group):
    """Make calls until one fails because ranks were lost. Return these ranks."""
    while True:
        try:
            summed(group)
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


@pytest.mark.parametrize("hosts", ["a", "aaa", "aba", pytest.param("aabbbc", marks=pytest.mark.system)])
def test_every_collective_of_numpy_arrays(address, hosts):
    """Every collective, dtype and shape gives NumPy's results, on one host and on several simulated hosts."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    assert all(ranks(len(hosts), collectives, address, hosts, environment=environment))


def test_arguments_that_are_refused():
    """A masked array raises an error, also if an array of its shape and dtype was reduced before, and so does a list
    of arrays of different shapes. In every call, a root
    that is not the number of a rank raises an ArgumentError. An integer of NumPy may be a root."""
    x = np.ones((1, 2))
    with processes.join(0, 1) as group:
        for _ in range(3):
            group.all_reduce(np.ones(2))
        with pytest.raises(UnsupportedError, match=r"masked arrays cannot be reduced.*\n.*\n.*filled"):
            group.all_reduce(np.ma.array([1.0, 2.0], mask=[0, 1]))
        for call in (group.all_to_all, group.all_gather, group.all_reduce):
            with pytest.raises(ArgumentError, match=r"must have the same shape[\s\S]*\(3,\), \(4,\)[\s\S]*padded"):
                call([np.ones(3), np.ones(4)])
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


# Groups that continue after failures


def shrinks(rendezvous, address):
    group, x = joined(rendezvous, address), np.ones(1000)
    summed(group)
    answers = [group.agree(True), group.agree(group.rank != 1)]
    group.all_reduce(x)
    if group.rank == 0:  # the rank at whose address the ranks have met
        die()
    assert lost(group) == (0,)
    answers.append(group.agree(True))
    made = group.shrink()
    assert isinstance(made, processes.RankGroup)
    for call in (group.barrier, group.shrink):
        with pytest.raises(ContextError, match="closed"):
            call()
    assert group.reformed is None
    for _ in range(3):
        same(made.all_reduce(x), 3 * x)
    with made:
        return answers, made.reformed, made.rank, made.size, summed(made)


def test_a_group_shrinks_without_its_first_rank(address):
    """After rank 0 has died, shrink makes a group of the others, renumbered in order. ``reformed`` has their old
    numbers, and how many calls had succeeded. The earlier group is closed. agree returns whether the flags of all
    living ranks are true."""
    lost, *found = ranks(4, shrinks, address, check=False)
    assert isinstance(lost, Died)
    assert found == [([True, False, True], processes.Reformed((1, 2, 3), 2), rank, 3, 60) for rank in range(3)]


def commits(rendezvous, address):
    group, steps, done = joined(rendezvous, address), 0, []

    def step(group):
        nonlocal steps
        steps += 1
        if steps == 4 and rendezvous.rank == 1:
            die()
        found = summed(group)
        if steps == 1 and rendezvous.rank == 1:
            raise PeerLostError("a connection of the program was lost")
        return found

    def changed(group):
        done.append(group.reformed.members)
        if len(done) == 2 and rendezvous.rank == 2:
            die()
        group.barrier()

    results = []
    while len(results) < 5:
        group, result = group.committed(step, changed)
        results.append(result)
    return results, done, steps, group.size


def test_a_step_that_failed_on_one_rank_is_repeated_on_all(address):
    """A step succeeds on all ranks or on none: if it fails on rank 1, all ranks repeat it. If rank 1 dies in a step,
    and rank 2 in the callback before its repetition, the other ranks repeat the same step."""
    found = ranks(5, commits, address, check=False)
    changes = [(0, 1, 2, 3, 4), (0, 2, 3, 4), (0, 2, 3)]
    wanted = [150, 150, 60, 60, 60], changes, 7, 3  # 5 results of 7 steps, and 3 ranks that are left
    assert [one for one in found if not isinstance(one, Died)] == [wanted] * 3, found


def other_errors(rendezvous, address):
    group = joined(rendezvous, address)

    def differs(group):
        group.all_reduce(np.ones(1 + group.rank))

    with pytest.raises(MismatchError, match="in shape"):
        group.committed(differs)
    found = [summed(group)]
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
    return [*found, summed(made)]


def test_errors_of_a_step_after_which_a_rank_stays_in_its_group(address):
    """After a MismatchError, which all ranks raise, the group can still be used. After an error by which a library has
    replaced the PeerLostError of a lost rank, the other ranks can still shrink the group."""
    found = ranks(3, other_errors, address, check=False)
    assert isinstance(found.pop(1), Died)
    assert found == [[60, 30]] * 2, found


def computes_for_long(rendezvous, address):
    group, messages = joined(rendezvous, address, timeout_s=60), []
    survivors.SHRINK_S = rank_group.SHRINK_S = 0.3
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("crossreduce").addHandler(handler)

    def step(group):
        if group.size == 3 and rendezvous.rank == 2:
            die()
        if group.size == 3 and rendezvous.rank == 1:
            time.sleep(1)
        return summed(group)

    group, found = group.committed(step)
    return found, group.reformed.members, [text for text in messages if "a step has failed" in text]


def test_a_rank_that_computes_for_long_is_waited_for(address):
    """After a failed step, the others wait for a living rank, by default for the group's timeout plus ``SHRINK_S``. The
    log names the ranks that repeat the step, and the reason."""
    *found, lost = ranks(3, computes_for_long, address, check=False)
    assert isinstance(lost, Died)
    for result, members, messages in found:
        assert (result, members) == (30, (0, 1))
        (text,) = messages
        assert text.startswith("a step has failed, and is repeated by ranks 0, 1 of the earlier group: rank 2 died")
        assert "call shrink" not in text


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
    """After a failed step, committed waits for ``timeout_s``. The default is that of agree (``None``), but 10 s after a
    CollectiveTimeout, which has already waited for late ranks. After a success it waits as agree does by default."""
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


def shrinks_with_failures(rendezvous, address, error, times, timeout_s=10):
    group, left = joined(rendezvous, address), times if rendezvous.rank == 0 else 0

    def serve(*arguments, **options):
        nonlocal left
        if left and len(arguments) == 1:
            left -= 1
            raise error
        return StoreClient(*arguments, **options)

    rank_group.KIND = GroupKind("NumPy ranks", serve, rank_group.make_group)
    try:
        return summed(group.shrink(timeout_s=timeout_s))
    except (ReductionError, KeyboardInterrupt) as caught:
        return caught


NO_SOCKET = OSError(24, "Too many open files")


def test_a_rank_that_cannot_open_a_socket_in_shrink(address):
    """If a rank cannot open a socket to form a group, all ranks try again. After many attempts all of them raise a
    ReductionError; the error of that rank has the reason."""
    assert ranks(2, shrinks_with_failures, address, NO_SOCKET, 1) == [30, 30]
    address = f"127.0.0.1:{free_port()}"
    first, second = ranks(2, shrinks_with_failures, address, NO_SOCKET, 10**6, check=False)
    assert isinstance(first, ReductionError)
    assert re.search(r'rank 0 cannot form group "world" again\.\n.*Too many open files', str(first))
    assert isinstance(second, ReductionError)


def fails_slowly(rendezvous, address, is_lost):
    group, tries = joined(rendezvous, address), []
    decide, calls = group.communicator.decide, iter(range(9))

    def serve(*arguments, **options):
        if len(arguments) == 1 and not (is_lost and (tries or rendezvous.rank)):
            tries.append(time.sleep(1.1 if is_lost else 0.3))
            raise NO_SOCKET
        return StoreClient(*arguments, **options)

    def dies_before_the_second_attempt(*arguments):
        return decide(*arguments) if next(calls) < 2 else die()

    rank_group.KIND = GroupKind("NumPy ranks", serve, rank_group.make_group)
    if is_lost:
        group.communicator.decide = dies_before_the_second_attempt if rendezvous.rank == 2 else decide
        return summed(group.shrink(timeout_s=1))
    with pytest.raises(ReductionError, match="again"):
        group.shrink(timeout_s=1)
    return len(tries)


def test_failures_that_take_long_are_not_repeated_beyond_the_timeout(address):
    """If forming a group fails slowly, and no rank is lost meanwhile, all ranks stop when the timeout has passed. If a
    rank is lost, the others form the group without it."""
    assert ranks(2, fails_slowly, address, False) in ([1, 0], [2, 0], [3, 0])
    assert ranks(3, fails_slowly, f"127.0.0.1:{free_port()}", True, check=False)[:2] == [30, 30]


def connects_late(rendezvous, address):
    group = joined(rendezvous, address)
    group.communicator.timeout_s = 0.5
    if rendezvous.rank == 1:
        die()

    def fails_late(*_, **__):
        time.sleep(0.8)
        raise NO_SOCKET

    serve = fails_late if rendezvous.rank else StoreClient
    rank_group.KIND = GroupKind("NumPy ranks", serve, rank_group.make_group)
    with pytest.raises(ReductionError) as caught:
        group.shrink(timeout_s=1)
    return caught.type, str(caught.value), getattr(caught.value, "ranks", None)


def test_errors_of_forming_a_group_name_ranks_of_the_earlier_group(address):
    """If a rank does not come when a group is formed, the error has its number in the group that the caller has."""
    (kind, text, late), *_ = ranks(3, connects_late, address, check=False)
    assert (kind, late) == (CollectiveTimeout, (2,))
    assert "rank 1 did not reach" in text
    assert "It has ranks 0, 2 of this group, in this order" in text


def test_ctrl_c_while_a_group_is_formed(address):
    """If a rank is interrupted while a group is formed, it leaves, and the others form the group without waiting."""
    first, second = ranks(2, shrinks_with_failures, address, KeyboardInterrupt(), 1, 600, check=False)
    assert isinstance(first, KeyboardInterrupt)
    assert second == 10


def closes_in_shrink(rendezvous, address):
    group = joined(rendezvous, address)
    if rendezvous.rank == 1:
        time.sleep(1)
        return
    signal.signal(signal.SIGALRM, lambda *_: group.close())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(ContextError, match='group "world" is closed'):
        group.shrink()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_signal_handler_closes_a_group_in_shrink(address, hosts):
    """If a group is closed while this rank waits in shrink, shrink raises an error that says so."""
    ranks(2, closes_in_shrink, address, environment=[{"CROSSREDUCE_HOST": host} for host in hosts])


def agrees_in_two_threads(rendezvous, address):
    group = joined(rendezvous, address)
    if rendezvous.rank == 1:
        time.sleep(1)
        return group.agree(True)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(group.agree(True)))
    thread.start()
    wait_until(group._agreeing.locked)
    for call in (group.shrink, group.grow, lambda: group.agree(False)):
        with pytest.raises(ContextError, match="another thread is in agree, shrink or grow"):
            call()
    thread.join()
    return answers[0]


def test_one_thread_at_a_time_agrees(address):
    """A second thread that calls agree, shrink or grow gets an error, and the call of the first one continues."""
    assert ranks(2, agrees_in_two_threads, address) == [True, True]


def grows(rendezvous, address, folder):
    """Form a group of two ranks, which a third process joins. Return results, and where this process has listened."""
    listened, opened, invited = set(), tcp.opened_listener, Path(folder, "invitation")

    def recorded(*given):
        made = opened(*given)
        listened.add(made.getsockname()[0])
        return made

    tcp.opened_listener = recorded
    if rendezvous.rank == 2:
        wait_until(invited.exists)
        group = processes.join_invited(invited.read_text())
        assert group.reformed == processes.Reformed((), 0)
    else:
        group = processes.join(rendezvous.rank, 2, address, timeout_s=LONG_S, name="team")
        assert group.grow() is None
        if group.rank == 0:
            Path(folder, "partial").write_text(group.invitation())
            Path(folder, "partial").rename(invited)
        while group.size == 2:
            summed(group)
            group = group.grow() or group
    with group:
        state = group.broadcast(np.full(1, 7.5 * (group.rank == 0)), 0)
        return state[0], group.size, summed(group), group.communicator.name, listened


@pytest.mark.parametrize("host", ["localhost", "127.1.2.3"])
def test_new_processes_join_and_a_group_of_one_host_listens_at_the_loopback_address(address, tmp_path, host):
    """A process with an invitation joins when the ranks call grow, as the last rank of a group with the same settings.
    If the ranks meet at a loopback address, all their sockets listen only there, also those of a process that joins and
    those for connections between hosts."""
    address = address.replace("127.0.0.1", host)
    environment = [{"CROSSREDUCE_HOST": name} for name in "aab"]
    expected = {"127.0.0.1" if host == "localhost" else host}
    assert ranks(3, grows, address, tmp_path, environment=environment) == [(7.5, 3, 60, "team", expected)] * 3


@pytest.mark.parametrize(
    ("address", "size", "place"),
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
def test_where_the_ranks_listen(address, size, place):
    """Ranks that meet at a loopback address listen only there. A single rank does so if it has no other address."""
    assert meeting.meeting_place(address, size) == place  # host and port of rank 0, and where all ranks listen


def test_the_port_under_torchrun(monkeypatch):
    """If torchrun's own store listens at MASTER_PORT, the ranks that it has started meet at the next port."""
    variables = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert meeting.meeting_place(None, 2) == ("node0", 29501, "")
