"""shrink, grow, join, agree and committed: what holds for groups, errors and resources, case by case."""

import gc
import os
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from members import Resources, member, resident_bytes, summed
from ranks import Died, SocketRendezvous, ranks

import crossreduce.torch as crt
from crossreduce.errors import ArgumentError, CollectiveTimeout, ContextError, ExcludedError, PeerLostError
from crossreduce.ranks.communicator import Communicator
from crossreduce.ranks.connections.inquiry import SILENT_S
from crossreduce.ranks.survival import survivors
from crossreduce.torch import forming

LONG = timedelta(minutes=30)


@pytest.fixture(autouse=True)
def dumps(tmp_path, monkeypatch):
    """Let ranks write their flight recorder dumps into a directory of the test."""
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "dumps"))


def begin(rendezvous, folder, timeout=LONG):
    """Make the default group; return this rank's number."""
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("crossreduce", where, rank=rendezvous.rank, world_size=rendezvous.size, timeout=timeout)
    return rendezvous.rank


def total(group=None):
    """Return the sum of the ranks' numbers plus one, times ten."""
    x = torch.tensor([10 * (dist.get_rank(group) + 1)])
    dist.all_reduce(x, group=group)
    return int(x)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# Groups of the torch backend


def shrinks(rendezvous, folder):
    rank = begin(rendezvous, folder)
    band = dist.new_group([1, 2, 3])
    total()
    total()
    if rank == 2:
        die()
    with pytest.raises(PeerLostError, match="rank 2 died during op 3"):
        total()
    made = crt.shrink()
    assert made is dist.group.WORLD
    assert dist.get_world_size() == made.size() == 3
    found = made.reformed.members, made.reformed.completed, dist.get_rank(), total()
    if rank in (1, 3):
        with pytest.raises(ContextError, match="destroyed"):
            band.barrier().wait()
    pair = dist.new_group([0, 2])  # in the new numbers
    again = total(pair) if dist.get_rank() in (0, 2) else None
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    return found, again


def test_the_default_group_shrinks(tmp_path):
    """After a rank has died, shrink makes a default group of the others, renumbered in order; it tells which ops have
    succeeded everywhere. Earlier sub-groups are closed, and new ones can be made. It can be destroyed as any group."""
    found = ranks(4, shrinks, tmp_path, check=False)
    assert isinstance(found.pop(2), Died)
    assert found == [(((0, 1, 3), 2, rank, 60), 30 if rank != 1 else None) for rank in range(3)], found


def shrinks_a_part(rendezvous, folder):
    rank = begin(rendezvous, folder)
    part = dist.new_group([1, 2, 3])
    if rank == 0:
        dist.barrier()
        time.sleep(0.3)
        return None
    total(part)
    dist.barrier()
    if rank == 2:
        die()
    with pytest.raises(PeerLostError, match="rank 2 died during op 2"):
        total(part)
    made = crt.shrink(part)
    assert dist.get_process_group_ranks(made) == [1, 3]
    assert dist.get_rank(made) == (0 if rank == 1 else 1)
    found = total(made)
    again = crt.shrink(made)  # without a loss
    assert dist.get_process_group_ranks(again) == [1, 3]
    found += total(again)
    dist.destroy_process_group(again)
    return found


def test_a_sub_group_shrinks(tmp_path):
    """shrink of a sub-group leaves the default group as it is; its ranks keep their numbers in the world."""
    found = ranks(4, shrinks_a_part, tmp_path, check=False)
    assert isinstance(found.pop(2), Died)
    assert found == [None, 60, 60], found


def shrinks_alone(rendezvous, folder):
    begin(rendezvous, folder)
    if rendezvous.rank == 1:
        die()
    while rendezvous.rank == 0:
        try:
            total()
        except PeerLostError:
            break
    found = []
    for _ in range(2):
        made = crt.shrink()
        found.append((made.size(), made.reformed.members, total(), crt.agree(True), crt.agree(False)))
    return found


def test_a_group_of_one_rank_shrinks(tmp_path):
    """If one rank is left, it goes on alone, and can shrink again."""
    found, _ = ranks(2, shrinks_alone, tmp_path, check=False)
    assert found == [(1, (0,), 10, True, False)] * 2, found


def pending(rendezvous, folder):
    rank = begin(rendezvous, folder)
    total()
    if rank == 1:
        time.sleep(0.3)
        die()
    x, y = torch.ones(100_000), torch.ones(10)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    made = crt.shrink() if rank == 0 else None  # while the ops wait for rank 1
    failed = 0
    for work in works:
        try:
            work.wait()
        except PeerLostError:
            failed += 1
    made = made or crt.shrink()
    return failed, made.size(), total()


def test_ops_that_are_pending_in_shrink_fail(tmp_path):
    """Asynchronous ops that another rank's death leaves pending fail when a rank calls shrink, or before."""
    found = ranks(3, pending, tmp_path, check=False)
    assert isinstance(found.pop(1), Died)
    assert found == [(2, 2, 30)] * 2, found


def calls_differ(rendezvous, folder):
    rank = begin(rendezvous, folder)
    if rank == 0:
        with pytest.raises(PeerLostError, match=r"other ranks of group .* shrink it"):
            crt.grow()
    elif rank == 1:
        assert crt.agree(True) is False
    made = crt.shrink()
    return made.size(), total()


def test_ranks_that_call_different_things(tmp_path):
    """If one rank calls shrink while others call agree and grow, these are told, and the group shrinks when they call
    shrink, too."""
    assert ranks(3, calls_differ, tmp_path) == [(3, 60)] * 3


def differs_for_good(rendezvous, folder):
    rank = begin(rendezvous, folder)
    if rank == 0:
        with pytest.raises(ContextError, match="do not form it again together"):
            crt.shrink()
        return
    for _ in range(30):
        try:
            assert crt.agree(True) is (rank == 1 and crt_size() == 1)
        except ExcludedError:
            return


def crt_size():
    return len(dist.group.WORLD.communicator.agreements.electors)


def test_a_rank_whose_shrink_the_others_do_not_join(tmp_path):
    """shrink ends with an error if the other ranks call agree again and again."""
    ranks(2, differs_for_good, tmp_path, timeout_s=40)


def interrupted(rendezvous, folder):
    rank = begin(rendezvous, folder)
    total()
    if rank == 2:
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            crt.shrink(timeout_s=20)
        with pytest.raises(ContextError, match="closed"):
            crt.shrink()
        time.sleep(3)  # it is alive, but has left
        return None
    time.sleep(1)
    began = time.monotonic()
    made = crt.shrink(timeout_s=20)
    return made.reformed.members, total(), time.monotonic() - began < 3


def test_an_interrupted_shrink(tmp_path):
    """A rank that is interrupted in shrink leaves the group, and the others do not wait for it."""
    assert ranks(3, interrupted, tmp_path) == [((0, 1), 30, True)] * 2 + [None]


def late(rendezvous, folder):
    rank = begin(rendezvous, folder)
    total()
    invited = Path(folder, "invitation")
    if rank == 2:
        time.sleep(2)
        with pytest.raises(ExcludedError, match="the other ranks have gone on without it"):
            crt.shrink()
        with pytest.raises(ContextError, match="closed"):
            crt.agree(True)
        dist.destroy_process_group()
        return crt.join(invited.read_text()).rank(), total()
    crt.shrink(timeout_s=1)
    assert total() == 30
    invited.write_text(crt.invitation())
    while crt.grow() is None:
        time.sleep(0.01)
    return dist.get_rank(), total()


def test_a_late_rank_is_excluded_and_joins_again(tmp_path):
    """A rank that is alive, but too late in shrink, never gets into that group; as a new rank it can join."""
    assert ranks(3, late, tmp_path) == [(0, 60), (1, 60), (2, 60)]


def stopped_before_grow(rendezvous, folder):
    rank = begin(rendezvous, folder)
    total()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(ExcludedError, match="the other ranks have gone on without it"):
            crt.grow()
        return "excluded"
    assert crt.grow(timeout_s=1) is None
    with pytest.raises(PeerLostError, match=r"rank 2 of group .* did not take part in an agreement"):
        total()
    return crt.shrink().reformed.members, total()


def test_a_rank_that_is_excluded_by_grow_is_not_waited_for(tmp_path):
    """If no process joins, grow keeps the group. If it has excluded a rank, the next op fails at once: the timeout of
    this group is 30 minutes."""

    def go_on(pids):
        time.sleep(8)
        os.kill(pids[2], signal.SIGCONT)

    found = ranks(3, stopped_before_grow, tmp_path, begun=go_on)
    assert found == [((0, 1), 30), ((0, 1), 30), "excluded"], found


def grow_often(rendezvous, folder):
    begin(rendezvous, folder)
    assert [crt.grow() for _ in range(20)] == [None] * 20
    return len(dist.group.WORLD.communicator.agreements.published)


def test_calls_of_grow_leave_nothing_behind(tmp_path):
    """A rank that calls grow again and again while no process joins keeps only what it published for the last call."""
    assert ranks(2, grow_often, tmp_path) == [1, 0]


def test_the_error_for_a_damaged_invitation_does_not_show_its_key():
    """An invitation has the key of the group; errors are printed where others may read them."""
    for damage in ("", '[["token", '):
        damaged = damage + '["token", [[["127.0.0.1"], 1, "secret"]]]'
        with pytest.raises(ArgumentError, match=f"a text of {len(damaged)} characters") as caught:
            crt.join(damaged)
        assert "secret" not in str(caught.value)


def fails(rendezvous, folder):
    rank = begin(rendezvous, folder)
    part = dist.new_group([1, 2])
    done = [Path(folder, f"done{rank}") for rank in (0, 2)]

    def step():
        if rank == 1:
            raise ValueError("a failure of the program")
        if rank == 2 and dist.get_world_size() == 3:
            total(part)
        return total()

    if rank == 1:
        with pytest.raises(ValueError, match="a failure"):
            crt.committed(step)
        with pytest.raises(ContextError, match="closed"):
            total()
        while not all(path.exists() for path in done):  # this process lives on
            time.sleep(0.01)
        dist.destroy_process_group()
        return None
    found = crt.committed(step)
    done[rank // 2].touch()
    return found


def test_another_error_of_a_step_ends_only_the_rank_that_raises_it(tmp_path):
    """An error that is not about ranks is passed on. The others continue at once, also those that wait in a sub-group,
    although the process of the rank that raised it has not ended."""
    assert ranks(3, fails, tmp_path) == [30, None, 30]


def wrong_timeouts(rendezvous, folder):
    begin(rendezvous, folder)
    calls = crt.shrink, crt.grow, partial(crt.agree, True), partial(crt.committed, total)
    for call in calls:
        for timeout_s in (timedelta(seconds=10), "10", True, -1, float("nan")):
            with pytest.raises(ArgumentError, match="timeout_s must be a number of seconds, 0 or more"):
                call(timeout_s=timeout_s)
    return crt.committed(total, timeout_s=np.float32(3))


def test_timeouts_that_are_not_seconds(tmp_path):
    """A timeout that is not a number of seconds is an error of the caller, before anything happens to the group."""
    assert ranks(2, wrong_timeouts, tmp_path) == [30, 30]
    with pytest.raises(ArgumentError, match="timeout_s must be a number of seconds"):
        crt.join("[]", timeout_s=timedelta(seconds=10))


def forked_child(rendezvous, folder):
    rank = begin(rendezvous, folder)
    total()
    if os.fork() == 0:  # as the worker of a DataLoader, it lives on, with all descriptors
        try:
            with pytest.raises(ContextError, match="fork"):
                crt.shrink()
        finally:
            time.sleep(4)
            os._exit(0)
    if rank == 0:
        die()
    with pytest.raises(PeerLostError, match="rank 0 died"):
        total()
    began = time.monotonic()
    made = crt.shrink(timeout_s=20)
    return made.size(), total(), time.monotonic() - began < 3


def test_a_child_of_a_dead_rank_delays_nobody(tmp_path):
    """If a rank dies whose forked child lives on, the others notice its death, and need no answer of the child."""
    found = ranks(3, forked_child, tmp_path, check=False)
    assert isinstance(found.pop(0), Died)
    assert found == [(2, 30, True)] * 2, found


def stopped_leader(rendezvous, folder, name):
    rank = begin(rendezvous, folder)
    total()
    if rank == 2:
        die()
    with pytest.raises(PeerLostError, match="rank 2 died"):
        total()
    if rank == 0:  # it has decided with the others, and is stopped before it serves the store, or after that
        continues = getattr(forming, name)

        def stop(*arguments, **options):
            time.sleep(0.2 * (name == "Group"))  # the others use the store meanwhile
            os.kill(os.getpid(), signal.SIGSTOP)
            return continues(*arguments, **options)

        setattr(forming, name, stop)
        with pytest.raises(ExcludedError, match="the other ranks have gone on without it"):
            crt.shrink()
        return "excluded"
    began = time.monotonic()
    made = crt.shrink(timeout_s=20)
    return made.reformed.members, total(), time.monotonic() - began < 3


@pytest.mark.parametrize("name", ["PeerStore", "formed", "Group"])
def test_a_leader_that_is_stopped_while_the_group_is_formed(tmp_path, name):
    """If the rank that serves the new group's store is stopped before or after the others have its address, the others
    form the group without it. When it continues, it is excluded."""

    def go_on(pids):
        time.sleep(4)
        os.kill(pids[0], signal.SIGCONT)

    found = ranks(4, stopped_leader, tmp_path, name, check=False, begun=go_on)
    assert found[:2] + found[3:] == ["excluded", ((1, 3), 30, True), ((1, 3), 30, True)], found


def on_hosts(rendezvous, folder):
    rank = begin(rendezvous, folder)
    total()
    if rank in (0, 1):
        die()
    with pytest.raises((PeerLostError, CollectiveTimeout), match="rank"):
        total()
    made = crt.shrink()
    return made.reformed.members, total(), len(made.communicator.hosts)


def test_hosts_by_name(tmp_path):
    """If all ranks of a host die, here one of three that CROSSREDUCE_HOST makes of one machine, the others go on."""
    environment = [{"CROSSREDUCE_HOST": host} for host in "aabbc"]
    found = ranks(5, on_hosts, tmp_path, environment=environment, check=False)
    assert found[2:] == [((2, 3, 4), 60, 2)] * 3, found


# Ranks without a framework


class WatchedRendezvous(SocketRendezvous):
    """A rendezvous at which a wait ends when ``watch`` raises."""

    def __init__(self, *arguments, watch):
        super().__init__(*arguments, timeout_s=0.02)
        self.watch = watch

    def all_gather(self, payload):
        while True:
            try:
                return super().all_gather(payload)
            except CollectiveTimeout:
                self.calls -= 1
                self.watch()


def shrunk(comm, timeout_s=10.0):
    """Return a group of the ranks that are left of a NumPy group."""

    def form(reformed, watch):
        name = f"{comm.name} {comm.agreements.number}"
        rank, size = reformed.members.index(comm.rank), len(reformed.members)
        place = WatchedRendezvous(comm.rendezvous.path, rank, size, name, watch=watch)
        return Communicator(place, None, name=name, timeout_s=comm.timeout_s)

    made, reformed = survivors.shrink(comm, form, timeout_s)
    comm.close()
    return made, reformed


def numpy_ranks(rendezvous, first, count):
    comm = member(rendezvous, 1800)
    assert survivors.agree(comm, True)
    own, lost = comm.rank, []
    for victim in range(first, first + count):
        summed(comm)
        if own == victim:
            die()
        try:
            while True:
                summed(comm)
        except PeerLostError as error:
            lost.append(error.ranks)
        assert survivors.agree(comm, False) is False
        comm, reformed = shrunk(comm)
        assert len(reformed.members) == comm.size
    summed(comm)
    return comm.size, comm.rank


def test_ranks_without_a_framework(tmp_path):
    """Groups of Communicators shrink, the first rank's death included."""
    found = ranks(5, numpy_ranks, 0, 3, check=False)
    assert found[3:] == [(2, 0), (2, 1)], found


def test_more_ranks_than_bits_of_a_word(tmp_path):
    """A group of 70 ranks shrinks: their set does not fit into one word."""
    found = ranks(70, numpy_ranks, 66, 2, check=False, timeout_s=100)
    assert [one for one in found if isinstance(one, tuple)] == [(68, rank) for rank in range(68)], found


# Resources

CYCLES = int(os.environ.get("CROSSREDUCE_CYCLES", "60"))


def used():
    """Return the resources of this process, once the threads that ask and answer other ranks have ended."""
    gc.collect()
    time.sleep(SILENT_S + 0.5)
    dist.barrier()
    return Resources(), resident_bytes()


def soak(rendezvous, folder, cycles):
    """Shrink and grow again and again: the last rank leaves, and joins as a new one."""
    rank = begin(rendezvous, folder)
    total()
    invited, begun = crt.invitation(), None
    for cycle in range(cycles):
        if cycle == cycles // 2:
            begun = used()
        if rank == rendezvous.size - 1:
            dist.destroy_process_group()
            made = crt.join(invited)
        else:
            crt.shrink()
            assert total() == 10 * sum(range(1, rendezvous.size))
            while (made := crt.grow()) is None:
                time.sleep(0.002)
        assert made.size() == rendezvous.size
        assert total() == 10 * sum(range(1, rendezvous.size + 1))
        invited = crt.invitation()
        del made
        dist.barrier()
    ended = used()
    after, changed = vars(ended[0]), {}
    for key, value in vars(begun[0]).items():
        if value != after[key]:
            changed[key] = (Counter(value), Counter(after[key])) if isinstance(value, list) else (value, after[key])
    return changed, (ended[1] - begun[1]) / begun[1]


def test_shrinks_and_grows_leak_nothing(tmp_path):
    """Many shrinks and grows in one process leave no descriptor, no thread and no memory.

    CROSSREDUCE_CYCLES=500 in the environment makes 500 of each.
    """
    for changed, drift in ranks(3, soak, tmp_path, CYCLES, timeout_s=max(60, CYCLES)):
        print(f"drift {drift:.2%}")
        assert not changed
        assert drift < 0.02
