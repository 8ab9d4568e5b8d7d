"""shrink, grow, join, agree and committed: what groups of torch and groups of NumPy arrays have in common."""

import gc
import os
import signal
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from budget import count
from free_port import free_port
from kinds_of_groups import Numpy, Torch, die, lose, total, wait_until
from members import Resources, resident_bytes
from ranks import ranks

from crossreduce.errors import ArgumentError, ContextError, ExcludedError
from crossreduce.ranks.connections.repeated_request import SILENT_S

KINDS = pytest.mark.parametrize("kind", [Torch, Numpy])


def place_of(kind, folder):
    """Return where ranks of a kind of groups meet."""
    return folder if kind is Torch else f"127.0.0.1:{free_port()}"


def shrinks_to_one(rendezvous, kind, place):
    """Shrink the group after its rank 0 has died, again and again. ``total`` is the sum of 10 * (rank + 1)."""
    group = kind(rendezvous, place)
    for _ in range(rendezvous.size - 1):
        if group.rank == 0:
            group.total()
            die()
        lose(group)
        assert group.agree(False) is False
        group.shrink()
    reformed = group.shrink()  # without a loss
    return group.size, reformed, group.total(), group.agree(True), group.agree(False)


@KINDS
def test_a_group_shrinks_again_and_again(tmp_path, kind):
    """Rank 0 dies and the others shrink the group, again and again. The last rank can shrink without a loss, too."""
    *_, last = ranks(4, shrinks_to_one, kind, place_of(kind, tmp_path), check=False)
    assert last == (1, ((0,), 0), 10, True, False), last


def fails(rendezvous, kind, place, folder, in_step):
    group = kind(rendezvous, place)
    part = dist.new_group([1, 2]) if kind is Torch and in_step else None
    done = [folder / f"done{rank}" for rank in (0, 2)]

    def step():
        if rendezvous.rank == 1 and in_step:
            raise ValueError("a failure of the program")
        if part and rendezvous.rank == 2 and group.size == 3:
            total(part)
        found = group.total()
        if rendezvous.rank == 1:
            raise ValueError("a failure of the program")
        return found

    if rendezvous.rank == 1:
        with pytest.raises(ValueError, match="a failure"):
            group.committed(step)
        with pytest.raises(ContextError, match="closed"):
            group.total()
        wait_until(lambda: all(path.exists() for path in done))  # this process lives on
        group.leave()
        return None
    found = group.committed(step)
    done[rendezvous.rank // 2].touch()
    return found


@KINDS
@pytest.mark.parametrize(("in_step", "result"), [(True, 30), (False, 60)])
def test_another_error_of_a_step_ends_only_the_rank_that_raises_it(tmp_path, kind, in_step, result):
    """``committed`` raises an error of the program, and this rank leaves the group, although its process lives on. The
    others continue at once, also those that wait in a sub-group. They repeat the step if the error came before its
    collective; otherwise the step has succeeded on them, with the contribution of the failed rank."""
    assert ranks(3, fails, kind, place_of(kind, tmp_path), tmp_path, in_step) == [result, None, result]


def late(rendezvous, kind, place, folder, how):
    group = kind(rendezvous, place)
    group.total()
    invited = folder / "invitation"
    if rendezvous.rank == 2:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            wait_until(invited.exists)
        with pytest.raises(ExcludedError, match="the other ranks have gone on without it"):
            group.shrink()
        with pytest.raises(ContextError, match="closed"):
            group.agree(True)
        group.leave()
        group.join(invited.read_text())
        return group.rank, group.total()
    group.shrink(timeout_s=1 if how == "late" else 30)
    assert group.total() == 30
    if group.rank == 0:
        (folder / "partial").write_text(group.invitation())
        (folder / "partial").rename(invited)
    wait_until(group.grow)
    return group.rank, group.total()


@pytest.mark.parametrize(("kind", "how"), [(Torch, "late"), (Numpy, "stopped")])
def test_a_late_rank_is_excluded_and_joins_again(tmp_path, kind, how):
    """A rank that is too late in shrink is excluded from the new group, and can join it later as a new rank. The others
    do not wait for a stopped rank: they continue although the timeout is 30 s and the rank continues only later."""

    def go_on(pids):
        wait_until((tmp_path / "invitation").exists)
        os.kill(pids[2], signal.SIGCONT)

    found = ranks(3, late, kind, place_of(kind, tmp_path), tmp_path, how, begun=go_on)
    assert found == [(0, 60), (1, 60), (2, 60)]


def outlasted(rendezvous, kind, place):
    """The last rank is stopped. The others go on without it and end; then it continues."""
    group, own = kind(rendezvous, place, timeout_s=2), rendezvous.rank
    group.total()
    if own == rendezvous.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    lose(group)
    if own == rendezvous.size - 1:
        with pytest.raises(ExcludedError, match="the other ranks have gone on without it"):
            group.shrink()
    else:
        group.shrink()
        group.total()
        group.leave()
    return own


@pytest.mark.parametrize(
    ("kind", "hosts"),
    [(Numpy, "ab"), *(pytest.param(Torch, hosts, marks=pytest.mark.system) for hosts in ("ab", "abc", "abb"))],
)
def test_a_rank_that_continues_when_the_others_have_ended_is_excluded(tmp_path, kind, hosts):
    """A rank that was stopped is excluded, although all ranks that have gone on without it have ended before it
    continues: it does not do the same work again."""

    def go_on(pids):
        wait_until(lambda: all("(zombie)" in Path(f"/proc/{pid}/status").read_text() for pid in pids[:-1]))
        os.kill(pids[-1], signal.SIGCONT)

    size, environment = len(hosts), [{"CROSSREDUCE_HOST": host} for host in hosts]
    found = ranks(size, outlasted, kind, place_of(kind, tmp_path), environment=environment, begun=go_on)
    assert found == [*range(size)]


def on_hosts(rendezvous, kind, place):
    group = kind(rendezvous, place)
    group.total()
    if rendezvous.rank in (0, 1):
        die()
    lose(group)
    reformed = group.shrink()
    return reformed.members, group.total(), len(group.group.communicator.hosts)


@pytest.mark.parametrize(("kind", "transport"), [(Numpy, "tcp"), (Numpy, "ucx"), (Torch, "auto")])
def test_a_host_is_lost(tmp_path, kind, transport):
    """If all ranks of a host die, also the rank that serves the store, the ranks of the other hosts continue."""
    environment = [{"CROSSREDUCE_HOST": host, "CROSSREDUCE_TRANSPORT": transport} for host in "aabbc"]
    found = ranks(5, on_hosts, kind, place_of(kind, tmp_path), environment=environment, check=False)
    assert found[2:] == [((2, 3, 4), 60, 2)] * 3, found  # members, total, hosts


def invalid_timeouts(rendezvous, kind, place):
    group = kind(rendezvous, place)
    calls = group.shrink, group.grow, partial(group.agree, True), partial(group.committed, group.total)
    for call in calls:
        for timeout_s in (timedelta(seconds=10), "10", True, -1, float("nan"), 10**400):
            with pytest.raises(ArgumentError, match="timeout_s must be a number of seconds, 0 or more"):
                call(timeout_s=timeout_s)
    with pytest.raises(ArgumentError, match="timeout_s must be a number of seconds"):
        group.join("[]", timeout_s=timedelta(seconds=10))
    return group.committed(group.total, timeout_s=np.float32(3))


@KINDS
def test_timeouts_that_are_not_seconds(tmp_path, kind):
    """A timeout that is not a number of seconds is an ArgumentError, and the group can still be used afterwards."""
    assert ranks(2, invalid_timeouts, kind, place_of(kind, tmp_path)) == [30, 30]


CYCLES = count(40)  # of shrink and grow


def soak(rendezvous, kind, place):
    """Shrink and grow again and again: the last rank leaves, and joins as a new one. Return the resources that differ
    from those in the middle, with both values, and the relative growth of the memory."""
    group = kind(rendezvous, place)
    everyone, leaves = 10 * sum(range(1, rendezvous.size + 1)), rendezvous.rank == rendezvous.size - 1
    for cycle in range(CYCLES):
        if cycle == CYCLES // 2:
            gc.collect()
            time.sleep(SILENT_S + 0.5)  # the threads that ask and answer other ranks end
            begun, resident = Resources(), resident_bytes()
            group.total()
        invited = group.invitation()
        group.total()
        if leaves:
            group.leave()
            group.join(invited)
        else:
            group.shrink()
            assert group.total() == everyone - 10 * rendezvous.size
            wait_until(group.grow)
        assert group.total() == everyone
    gc.collect()
    deadline = time.monotonic() + 3 * SILENT_S
    while (ended := Resources()) != begun and time.monotonic() < deadline:
        time.sleep(0.05)
    drift = (resident_bytes() - resident) / resident
    group.total()
    changed = {}
    for key, value in vars(begun).items():
        after = getattr(ended, key)
        if value != after:
            changed[key] = (Counter(value), Counter(after)) if isinstance(value, list) else (value, after)
    return changed, drift


@KINDS
def test_shrinks_and_grows_leave_nothing(tmp_path, kind):
    """Groups that were shrunk and grown leave no descriptor, thread, mapping, file or memory."""
    before = Resources().shm
    for changed, drift in ranks(3, soak, kind, place_of(kind, tmp_path)):
        assert not changed
        assert drift < 0.02
    assert Resources().shm == before
