"""Who shares a host: what ranks find out, and what of it stays behind."""

import fcntl
import os
import random
import socket
import stat
import struct
from pathlib import Path

import pytest
from ranks import ranks

from crossreduce.errors import ReductionError
from crossreduce.ranks import hosts
from crossreduce.ranks.bootstrap import meet


def bytes_for(count):
    return 4096 * count


def numbered(rendezvous):
    """Meet, write this rank's number into its place, and read what the host's others wrote."""
    before = set(Path("/proc/self/fd").iterdir())
    meeting = meet(rendezvous, bytes_for)
    here = next(host for host in meeting.hosts if rendezvous.rank in host)
    assert meeting.host == here
    os.pwrite(meeting.fd, struct.pack("<q", 1000 + rendezvous.rank), 4096 * here.index(rendezvous.rank))
    rendezvous.all_gather(b"written")
    read = [struct.unpack("<q", os.pread(meeting.fd, 8, 4096 * place))[0] for place in range(len(here))]
    size = os.fstat(meeting.fd).st_size
    mode = stat.S_IMODE(os.fstat(meeting.fd).st_mode)
    kept = set(Path("/proc/self/fd").iterdir()) - before
    inheritable = os.get_inheritable(meeting.fd)
    os.close(meeting.fd)
    return meeting.hosts, read, size, mode, len(kept), inheritable


def test_ranks_of_one_machine_share_its_memory():
    """Ranks of one machine find one host; all see what each writes, and only their user can open it."""
    for found, read, size, mode, kept, inheritable in ranks(4, numbered):
        assert found == ((0, 1, 2, 3),)
        assert read == [1000, 1001, 1002, 1003]
        assert (size, mode, kept, inheritable) == (4 * 4096, 0o600, 1, False)


def test_a_group_of_one_rank_meets_itself():
    """One rank is one host."""
    assert ranks(1, numbered)[0][:3] == (((0,),), [1000], 4096)


def test_a_name_in_the_environment_splits_a_host():
    """Ranks with other names in CROSSREDUCE_HOST are on other hosts, which come in the order of their lowest ranks."""
    names = ["b", "a", "b", "", "a"]
    found = ranks(5, numbered, environment=[{"CROSSREDUCE_HOST": name} for name in names])
    assert {result[0] for result in found} == {((0, 2), (1, 4), (3,))}
    assert [result[1] for result in found] == [[1000, 1002], [1001, 1004], [1000, 1002], [1003], [1001, 1004]]


def sealed(rendezvous):
    fd = meet(rendezvous, bytes_for).fd
    refused = 0
    for size in (0, 1 << 20):
        try:
            os.ftruncate(fd, size)
        except PermissionError:
            refused += 1
    blocks = os.fstat(fd).st_blocks * 512
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    return refused, blocks, bool(seals & fcntl.F_SEAL_SEAL)


def test_nobody_can_change_its_size_and_all_of_it_is_there():
    """The shared memory cannot shrink or grow under a rank, and is really there, so that no access is a SIGBUS."""
    for refused, blocks, final in ranks(2, sealed):
        assert (refused, final) == (2, True)
        assert blocks >= 2 * 4096


def left_behind(rendezvous):
    before = sorted(Path("/dev/shm").iterdir())
    fd = meet(rendezvous, bytes_for).fd
    during = sorted(Path("/dev/shm").iterdir())
    rendezvous.all_gather(b"seen")
    os.close(fd)
    return before == during


def test_nothing_has_a_name():
    """Nothing is in /dev/shm, while ranks share memory and after."""
    assert ranks(3, left_behind) == [True] * 3


def broken(rendezvous, failing, problem):
    """Meet where one rank cannot do its part of it."""
    if rendezvous.rank in failing:
        real = getattr(hosts, problem)
        calls = []

        def fails(*args):
            calls.append(args)
            if len(calls) == 1:
                raise OSError(28, "no space is left, for the test")
            return real(*args)

        setattr(hosts, problem, fails)
    return numbered(rendezvous)[:3]


@pytest.mark.parametrize(
    ("failing", "problem"), [({0}, "_memory"), ({0}, "_hand_over"), ({2}, "_take"), ({1, 2}, "_take")]
)
def test_a_host_whose_memory_did_not_reach_all_is_dissolved(failing, problem):
    """Where one rank of a host has not got the memory, each rank of it is a host of its own, and all know."""
    found = ranks(3, broken, failing, problem)
    assert found == [(((0,), (1,), (2,)), [1000 + rank], 4096) for rank in range(3)]


def test_only_that_host_is_dissolved():
    """Another host's ranks go on sharing theirs."""
    names = [{"CROSSREDUCE_HOST": name} for name in "abab"]
    found = ranks(4, broken, {3}, "_take", environment=names)
    assert [result[0] for result in found] == [((0, 2), (1,), (3,))] * 4
    assert found[0][1] == found[2][1] == [1000, 1002]


def poor(rendezvous):
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(ReductionError) as error:
        meet(rendezvous, lambda count: 1 << 50)
    return str(error.value), sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_lack_of_memory_is_an_error_on_every_rank():
    """Where not even one rank's memory is to be had, each rank says so, and no file is left open."""
    for said, closed in ranks(2, poor):
        assert "there is no memory to work in" in said
        assert str(1 << 50) in said
        assert closed


def test_what_may_be_taken_is_known_beforehand(monkeypatch):
    """A request beyond what is free is refused, as the kernel would end processes over it; a small one is not."""
    assert 1 << 20 < hosts._available() < 1 << 50
    with pytest.raises(OSError, match="are available"):
        hosts._memory(hosts._available() + 1)
    monkeypatch.setattr(hosts, "_available", lambda: 4096)
    os.close(hosts._memory(4096))
    with pytest.raises(OSError, match="4096 bytes are available"):
        hosts._memory(4097)


@pytest.mark.parametrize(("line", "limit", "usage", "cache"), [
    ("0::/slice/job", "memory.max", "memory.current", "inactive_file"),
    ("4:cpu,memory:/slice/job", "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
])  # fmt: skip
def test_the_least_limit_of_all_control_groups_counts(tmp_path, monkeypatch, line, limit, usage, cache):
    """A limit of this process's control group counts, and one of any above it: a slice's, a pod's, a container's."""
    monkeypatch.setattr(hosts, "_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(hosts, "_GROUPS", tmp_path)
    Path(tmp_path, "cgroup").write_text(f"3:cpuset:/\n{line}\n")

    def limited(group, most):
        for name, text in (
            (limit, str(most)),
            (usage, "3000"),
            (f"{Path(limit).parent}/memory.stat", f"{cache} 500\n"),
        ):
            path = Path(tmp_path, Path(name).parent, group, Path(name).name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    limited("slice/job", "max")
    assert hosts._available() > 1 << 20
    limited("", 9000)
    assert hosts._available() == 6500
    limited("slice", 5000)
    assert hosts._available() == 2500
    limited("slice/job", 7000)
    assert hosts._available() == 2500
    limited("slice/job", 2000)
    assert hosts._available() == 0


def test_another_users_ranks_are_on_another_host():
    """Memory is shared only between ranks of one user."""
    assert hosts._identity()[2] == str(os.getuid())
    found = hosts._hosts(
        [hosts._Card(["boot", "net", "0"], "", []), hosts._Card(["boot", "net", "1"], "", [])], ["", ""]
    )
    assert found == ((0,), (1,))


def test_a_stranger_is_not_believed(monkeypatch):
    """Whoever belongs to another user is not handed memory, nor is memory taken from them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        hosts._require_same_user(ours)
        monkeypatch.setattr(os, "getuid", lambda: 54321)
        with pytest.raises(PermissionError, match="belongs to user"):
            hosts._require_same_user(ours)


def test_systems_without_such_memory_have_one_rank_a_host(monkeypatch):
    """Where memory cannot be handed over, each rank is its own host, and still gets memory."""

    def alone(rendezvous):
        monkeypatch.delattr(os, "memfd_create")
        return numbered(rendezvous)[:3]

    assert ranks(2, alone) == [(((0,), (1,)), [1000 + rank], 4096) for rank in range(2)]


def test_hosts_come_in_the_order_of_their_lowest_ranks():
    """Whatever ranks are on a host, hosts partition the ranks, ascending, the lowest first."""
    draw = random.Random(1)
    for _ in range(200):
        n = draw.randint(1, 9)
        names = [str(draw.randint(0, 3)) for _ in range(n)]
        found = hosts._hosts([hosts._Card([name], "", []) for name in names], [""] * n)
        assert sorted(rank for host in found for rank in host) == list(range(n))
        assert all(list(host) == sorted(host) for host in found)
        assert [host[0] for host in found] == sorted(host[0] for host in found)
        assert all(len({names[rank] for rank in host}) == 1 for host in found)
        assert len(found) == len(set(names))
