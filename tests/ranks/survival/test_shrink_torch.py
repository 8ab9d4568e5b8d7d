"""shrink, grow and join in groups of the torch backend: sub-groups, pending ops, and ranks that leave meanwhile."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from kinds_of_groups import Torch, die, total, wait_until
from ranks import Died, ranks

import crossreduce.torch as crt
from crossreduce.errors import ContextError, ExcludedError, PeerLostError
from crossreduce.torch import elastic


def begin(rendezvous, folder):
    """Make the default group. Return this rank's number."""
    Torch(rendezvous, folder)
    return rendezvous.rank


def finished(folder, *ranks_of_test):
    """Return whether these ranks have called ``finish``."""
    return all((folder / f"done{rank}").exists() for rank in ranks_of_test)


def finish(folder, rank, *found):
    (folder / f"done{rank}").touch()
    return found


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
    """shrink of a sub-group does not change the default group. The ranks keep their numbers in the default group."""
    found = ranks(4, shrinks_a_part, tmp_path, check=False)
    assert isinstance(found.pop(2), Died)
    assert found == [None, 60, 60], found


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
    """Asynchronous ops that wait for a dead rank fail when a rank calls shrink, or before."""
    found = ranks(3, pending, tmp_path, check=False)
    assert isinstance(found.pop(1), Died)
    assert found == [(2, 2, 30)] * 2, found


def calls_differ(rendezvous, folder):
    rank = begin(rendezvous, folder)
    if rank == 0:
        with pytest.raises(PeerLostError, match=r"other ranks of group .* have called shrink"):
            crt.grow()
    elif rank == 1:
        assert crt.agree(True) is False
    made = crt.shrink()
    return made.size(), total()


def test_ranks_that_call_different_things(tmp_path):
    """If one rank calls shrink while others call agree and grow, agree returns False and grow raises an error. The
    group shrinks when these ranks call shrink, too."""
    assert ranks(3, calls_differ, tmp_path) == [(3, 60)] * 3


def differs_for_good(rendezvous, folder):
    rank = begin(rendezvous, folder)
    if rank == 0:
        with pytest.raises(ContextError, match="was not formed again, since its ranks made different calls"):
            crt.shrink()
        return
    for _ in range(30):
        try:
            assert crt.agree(True) is (rank == 1 and crt_size() == 1)
        except ExcludedError:
            return


def crt_size():
    """Return the number of ranks that are left."""
    return len(dist.group.WORLD.communicator.agreements.electors)


def test_a_rank_whose_shrink_the_others_do_not_join(tmp_path):
    """shrink ends with an error if the other ranks call agree again and again."""
    ranks(2, differs_for_good, tmp_path)


def interrupted(rendezvous, folder):
    rank = begin(rendezvous, folder)
    total()
    if rank == 2:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            crt.shrink(timeout_s=600)
        with pytest.raises(ContextError, match="closed"):
            crt.shrink()
        (folder / "left").touch()
        wait_until(lambda: finished(folder, 0, 1))  # it is alive, but has left
        return None
    wait_until((folder / "left").exists)
    made = crt.shrink(timeout_s=600)
    return finish(folder, rank, made.reformed.members, total())


def test_an_interrupted_shrink(tmp_path):
    """A rank that is interrupted in shrink leaves the group, and the others do not wait for it."""
    assert ranks(3, interrupted, tmp_path) == [((0, 1), 30)] * 2 + [None]


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
    return finish(folder, rank, crt.shrink().reformed.members, total())


def test_a_rank_that_is_excluded_by_grow_is_not_waited_for(tmp_path):
    """If no process joins, grow keeps the group. If it has excluded a rank, here a stopped one, the next op fails at
    once, and not after the timeout of the group, which is 30 minutes."""

    def go_on(pids):
        wait_until(lambda: finished(tmp_path, 0, 1))
        os.kill(pids[2], signal.SIGCONT)

    found = ranks(3, stopped_before_grow, tmp_path, begun=go_on)
    assert found == [((0, 1), 30), ((0, 1), 30), "excluded"], found


def grow_often(rendezvous, folder):
    begin(rendezvous, folder)
    assert [crt.grow() for _ in range(20)] == [None] * 20
    return len(dist.group.WORLD.communicator.agreements.published)


def test_calls_of_grow_leave_nothing_behind(tmp_path):
    """A rank that calls grow again and again while no process joins keeps only data of the last call."""
    assert ranks(2, grow_often, tmp_path) == [1, 0]  # only rank 0 publishes data


def forked_child(rendezvous, folder):
    rank = begin(rendezvous, folder)
    total()
    if os.fork() == 0:  # as the worker of a DataLoader, it lives on, with all descriptors
        try:
            with pytest.raises(ContextError, match="fork"):
                crt.shrink()
        finally:
            wait_until(lambda: finished(folder, 1, 2))
            os._exit(0)
    if rank == 0:
        die()
    with pytest.raises(PeerLostError, match="rank 0 died"):
        total()
    made = crt.shrink(timeout_s=600)
    return finish(folder, rank, made.size(), total())


def test_a_child_of_a_dead_rank_delays_nobody(tmp_path):
    """If a rank dies and its forked child lives on, the others notice the death, and do not wait for the child."""
    found = ranks(3, forked_child, tmp_path, check=False)
    assert isinstance(found.pop(0), Died)
    assert found == [(2, 30)] * 2, found


def stopped_leader(rendezvous, folder, name):
    rank = begin(rendezvous, folder)
    total()
    if rank == 2:
        die()
    with pytest.raises(PeerLostError, match="rank 2 died"):
        total()
    if rank == 0:  # it decides with the others, and is stopped when it calls ``name``
        continues = getattr(elastic, name)

        def stop(*arguments, **options):
            time.sleep(0.2 * (name == "Options"))  # the others use the store meanwhile
            os.kill(os.getpid(), signal.SIGSTOP)
            return continues(*arguments, **options)

        setattr(elastic, name, stop)
        with pytest.raises(ExcludedError, match="the other ranks have gone on without it"):
            crt.shrink()
        return "excluded"
    made = crt.shrink(timeout_s=600)
    return finish(folder, rank, made.reformed.members, total())


@pytest.mark.parametrize("name", ["PeerStore", "make_group", "Options"])
def test_a_leader_that_is_stopped_while_the_group_is_formed(tmp_path, name):
    """If the rank that serves the new group's store is stopped, before it serves the store or later, the others form
    the group without it. When it continues, it is excluded."""

    def go_on(pids):
        wait_until(lambda: finished(tmp_path, 1, 3))
        os.kill(pids[0], signal.SIGCONT)

    found = ranks(4, stopped_leader, tmp_path, name, check=False, begun=go_on)
    assert found[:2] + found[3:] == ["excluded", ((1, 3), 30), ((1, 3), 30)], found
