"""NumPy arrays in groups of crossreduce.processes: the collectives, the rendezvous, and survival."""

import logging
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from array_checks import every_collective, same
from free_port import free_port
from kinds_of_groups import die
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


def lost(group):
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


@pytest.mark.parametrize("hosts", ["a", "aaa", "aba", pytest.param("aabbbc", marks=pytest.mark.system)])
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


# Groups that continue after failures


def shrinks(rendezvous, address):
    group = joined(rendezvous, address)
    total(group)
    x = np.ones(1000)
    group.all_reduce(x)
    if group.rank == 0:  # the rank at whose address the ranks have met
        die()
    assert lost(group) == (0,)
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
    """If ranks die in a step, and in the callback before its repetition, the others repeat it, each the same step."""
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
    survivors.SHRINK_S = rank_group.SHRINK_S = 0.3
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("crossreduce").addHandler(handler)

    def step(group):
        if group.size == 3 and rendezvous.rank == 2:
            die()
        if group.size == 3 and rendezvous.rank == 1:
            time.sleep(1)
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
        return total(group.shrink(timeout_s=timeout_s))
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
    first, second = ranks(2, shrinks_with_failures, address, KeyboardInterrupt(), 1, 600, check=False)
    assert isinstance(first, KeyboardInterrupt)
    assert second == 10


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
    """A second thread that calls agree, shrink or grow gets an error, and the call of the first one continues."""
    assert ranks(2, agrees_in_two_threads, address) == [True, True]


def agrees(rendezvous, address):
    group = joined(rendezvous, address)
    found = [group.agree(True), group.agree(group.rank != 1)]
    if group.rank == 2:
        die()
    found.append(group.agree(True))
    assert lost(group) == (2,)
    return found


def test_agree_gives_one_answer(address):
    """The answer is whether the flag is true on all ranks that are left; a rank that has died does not count."""
    found = ranks(3, agrees, address, check=False)
    assert isinstance(found.pop(), Died)
    assert found == [[True, False, True]] * 2


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


def listens(rendezvous, address, folder):
    found, opened = set(), tcp.opened_listener

    def recorded(*given):
        made = opened(*given)
        found.add(made.getsockname()[0])
        return made

    tcp.opened_listener = recorded
    return *grows(rendezvous, address, folder), found


@pytest.mark.parametrize("host", ["localhost", "127.1.2.3"])
def test_new_processes_join_and_a_group_of_one_host_listens_at_the_loopback_address(address, tmp_path, host):
    """Processes with an invitation join when the ranks call grow: at the end, in a group with the same settings. If the
    ranks meet at the loopback address, no other host can connect to any of them, also when processes have joined, and
    while connections between hosts are made."""
    address = address.replace("127.0.0.1", host)
    environment = [{"CROSSREDUCE_HOST": name} for name in "aab"]
    expected = {"127.0.0.1" if host == "localhost" else host}
    assert ranks(3, listens, address, tmp_path, environment=environment) == [(7.5, 3, 60, "team", expected)] * 3


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
    """Ranks listen at the loopback address if they meet there; a rank alone does so unless it has another address."""
    assert meeting.meeting_place(address, size) == place
