"""Bootstrap: ranks find out which of them share a host, and share memory."""

import fcntl
import gc
import mmap
import os
import random
import socket
import stat
import struct
import threading
import time
from pathlib import Path

import pytest
from host_checks import on
from members import Resources, member
from ranks import SocketRendezvous, ranks

from crossreduce import kernels
from crossreduce.errors import ArgumentError, MismatchError, ReductionError
from crossreduce.observe import flight_recorder
from crossreduce.ranks import membership
from crossreduce.ranks.communicator import Communicator
from crossreduce.ranks.intra_host import bootstrap, votes
from crossreduce.ranks.transports import addresses


def bytes_for(count, _hosts):
    return 4096 * count


def numbered(rendezvous):
    """Share memory, write this rank's number into it, and return the hosts, and the numbers of all ranks of this host.
    Check that only the user can open the memory, that it has no name, and that its size cannot be changed."""
    before, files = set(Path("/proc/self/fd").iterdir()), sorted(Path("/dev/shm").glob("*crossreduce*"))
    found = bootstrap.bootstrap(rendezvous, bytes_for)
    here = next(host for host in found.hosts if rendezvous.rank in host)
    assert found.host == here
    os.pwrite(found.fd, struct.pack("<q", 1000 + rendezvous.rank), 4096 * here.index(rendezvous.rank))
    rendezvous.all_gather(b"written")
    read = [struct.unpack("<q", os.pread(found.fd, 8, 4096 * place))[0] for place in range(len(here))]
    status = os.fstat(found.fd)
    assert (status.st_size, stat.S_IMODE(status.st_mode)) == (votes.offset(4096 * len(here)) + votes.NBYTES, 0o600)
    assert status.st_blocks * 512 >= status.st_size, "an access may raise SIGBUS"
    assert len(set(Path("/proc/self/fd").iterdir()) - before) == 1
    assert not os.get_inheritable(found.fd)
    assert sorted(Path("/dev/shm").glob("*crossreduce*")) == files, "the memory has a name"
    for other in (0, 1 << 20):
        with pytest.raises(PermissionError, match="not permitted"):
            os.ftruncate(found.fd, other)
    assert fcntl.fcntl(found.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    os.close(found.fd)
    return found.hosts, read


def test_ranks_of_one_machine_share_its_memory():
    """The ranks of one machine are one host. All ranks can read what each of them writes."""
    assert ranks(4, numbered) == [(((0, 1, 2, 3),), [1000, 1001, 1002, 1003])] * 4


def test_a_name_in_the_environment_splits_a_host():
    """Ranks with different names in CROSSREDUCE_HOST are on different hosts, in the order of their lowest ranks."""
    names = ["b", "a", "b", "", "a"]
    found = ranks(5, numbered, environment=on(*names))
    assert {hosts for hosts, _ in found} == {((0, 2), (1, 4), (3,))}
    assert [read for _, read in found] == [[1000, 1002], [1001, 1004], [1000, 1002], [1003], [1001, 1004]]


def first_kept(rendezvous):
    found = bootstrap.bootstrap(rendezvous, lambda count, _hosts: count << 20, first=lambda count, _hosts: [(0, 8192)])
    allocated = os.fstat(found.fd).st_blocks * 512
    rendezvous.all_gather(b"")
    os.pwrite(found.fd, b"x", (len(found.host) << 20) - 1)  # the whole size can be used
    return allocated


def test_only_what_is_needed_at_first_is_allocated():
    """If all ranks are on one host, only the given ranges of its memory are allocated, otherwise everything; and the
    memory for votes."""
    assert ranks(2, first_kept) == [8192 + votes.NBYTES] * 2
    assert ranks(2, first_kept, environment=on(*"ab")) == [(1 << 20) + votes.NBYTES] * 2


def of_another_version(rendezvous):
    if rendezvous.rank == 2:  # its messages and its memory have another form, too
        bootstrap.version = lambda: "9.9"
        bootstrap._HostInfo = lambda version, *_: (version, {"form": "another"})
        membership.SLOT_BYTES *= 2
    with pytest.raises(MismatchError, match="different versions of crossreduce") as caught:
        Communicator(rendezvous, None, name="world", timeout_s=100, global_ranks=[10, 11, 12, 14])
    return str(caught.value)


def test_versions_are_compared_first():
    """If ranks have different versions, all raise the same error, which lists the global ranks of each version."""
    (text,) = set(ranks(4, of_another_version))
    assert f"given: ranks 10, 11, 14: {flight_recorder.version()}; rank 12: 9.9" in text
    assert text.startswith("the ranks have different versions")


def broken(rendezvous, failing, problem, function=numbered):
    """Share memory, which rank 0 makes. The function ``problem`` fails on the ranks ``failing``, but not at the end."""
    time.sleep(0 if rendezvous.rank == 0 else 0.3)
    if rendezvous.rank in failing:
        real = getattr(bootstrap, problem)
        calls, failures = [], 2 if problem == "_memory" else 1  # memory is first made for a group on a single host

        def fails(*args):
            calls.append(args)
            if len(calls) <= failures:
                raise OSError(28, "no space is left, for the test")
            return real(*args)

        setattr(bootstrap, problem, fails)
    return function(rendezvous)


PROBLEMS = [({0}, "_memory"), ({0}, "_send"), ({2}, "_receive_memory"), ({1, 2}, "_receive_memory")]


@pytest.mark.parametrize(("failing", "problem"), PROBLEMS)
def test_a_host_whose_ranks_cannot_all_share_memory_is_split(failing, problem):
    """If a rank cannot allocate, send or receive its host's memory, each rank of this host becomes a host of its own.
    The ranks of another host still share memory."""
    found = ranks(5, broken, failing, problem, environment=on(*"aaabb"))
    assert {hosts for hosts, _ in found} == {((0,), (1,), (2,), (3, 4))}
    assert [read for _, read in found] == [[1000], [1001], [1002], [1003, 1004], [1003, 1004]]


def split(rendezvous):
    before = Resources()
    with pytest.raises(ArgumentError, match=r"a transport between them.\n  given: hosts .* \[0\], \[1\], \[2\]"):
        member(rendezvous)
    gc.collect()
    assert Resources() == before


@pytest.mark.parametrize(("failing", "problem"), [*PROBLEMS[1:], ({2}, "_receive_only_from")])
def test_the_only_host_of_a_group_is_split(failing, problem):
    """The same holds if all ranks are on one host, although ranks that have the memory do not ask the others."""
    ranks(3, broken, failing, problem, split)


def changed(rendezvous, name, value, module=bootstrap):
    setattr(module, name, value)
    return numbered(rendezvous)


def small_sender(name, real=bootstrap._sender):
    """Return a sender whose buffer has room for few messages."""
    made = real(name)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return made


def test_memory_is_sent_to_more_ranks_than_a_buffer_has_room_for():
    """Each rank of a host gets the memory, also if the sender's buffer has no room for the messages to all ranks."""
    found = ranks(7, changed, "_sender", small_sender, environment=on(*"aaabaaa"))
    assert {hosts for hosts, _ in found} == {((0, 1, 2, 4, 5, 6), (3,))}
    assert [read for _, read in found[:3]] == [[1000, 1001, 1002, 1004, 1005, 1006]] * 3


def test_a_rank_whose_host_cannot_be_identified_is_its_own_host():
    """If the identifiers of the system cannot be read, each rank becomes a host of its own and gets memory."""
    found = ranks(2, changed, "_BOOT", Path("/proc/missing"), addresses)
    assert found == [(((0,), (1,)), [1000 + rank]) for rank in range(2)]


def without_memory(rendezvous):
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(ReductionError, match=rf"memory could not be allocated[\s\S]*{1 << 50}"):
        bootstrap.bootstrap(rendezvous, lambda _count, _hosts: 1 << 50)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    rendezvous = SocketRendezvous(rendezvous.path, rendezvous.rank, 3, "next")
    if rendezvous.rank == 2:
        kernels.available_memory = lambda: 0
        with pytest.raises(ReductionError, match=r"given: 2097152 bytes: \[Errno 12\] 0 bytes are available"):
            bootstrap.bootstrap(rendezvous, lambda count, _hosts: count << 21)
    else:
        assert bootstrap.bootstrap(rendezvous, lambda count, _hosts: count << 21).hosts == ((0, 1), (2,))


def test_a_lack_of_memory_is_an_error():
    """If there is not enough memory even for one rank, each rank raises an error and leaves no file open. If only one
    host lacks memory, its rank raises an error, and the ranks of other hosts share memory."""
    ranks(3, without_memory, environment=on(*"aab"))


@pytest.fixture
def sockets():
    """Yield a sender, a receiver of its messages, the receiver's name, and a socket like that of another program."""
    with (
        bootstrap._sender(name := bootstrap._new_name()) as sender,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger,
    ):
        yield sender, receiver, bootstrap._receive_only_from(name, receiver), stranger


def test_only_the_sender_can_send_to_a_receiver(sockets):
    """Linux refuses messages of other sockets to a sender and to a receiver. So other programs cannot fill or block
    them, or send descriptors that are slow to close."""
    sender, receiver, name, stranger = sockets
    with pytest.raises(BrokenPipeError, match="Broken pipe"):
        stranger.sendto(b"rubbish", sender.getsockname())
    with pytest.raises(PermissionError, match="not permitted"):
        stranger.sendto(b"rubbish", name)
    with pytest.raises(PermissionError, match="not permitted"):
        stranger.connect(name)
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as other, pytest.raises(OSError, match=r"refused|wrong type"):
            other.connect(name)
    with pytest.raises(TimeoutError, match="did not come"):
        bootstrap._receive_memory(receiver, 0, 0.05)
    fd = bootstrap._memory(4096)
    bootstrap._send(sender, fd, [name])
    with os.fdopen(bootstrap._receive_memory(receiver, 4096, 1e6)) as received, os.fdopen(fd) as sent:
        assert os.path.sameopenfile(received.fileno(), sent.fileno())
        assert not os.get_inheritable(received.fileno())


@pytest.mark.parametrize(
    ("user", "nbytes", "text"), [(54321, 4096, "process of user"), (os.getuid(), 1 << 20, "1048576")]
)
def test_memory_of_another_user_or_of_a_wrong_size_is_not_used(sockets, monkeypatch, user, nbytes, text):
    """Received memory is used only if a process of this rank's user has sent it, and if it is large enough."""
    sender, receiver, name, _ = sockets
    with os.fdopen(bootstrap._memory(4096)) as memory:
        before = sorted(Path("/proc/self/fd").iterdir())
        bootstrap._send(sender, memory.fileno(), [name])
        monkeypatch.setattr(os, "getuid", lambda: user)
        with pytest.raises(OSError, match=text):
            bootstrap._receive_memory(receiver, nbytes, 1e6)
        assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_memory_of_a_rank_that_has_ended(sockets):
    """A rank stops waiting for memory when the rank that should send it has ended. What was sent before is used. Memory
    is also sent to the others if one of the ranks that should receive it has ended."""
    sender, receiver, name, _ = sockets
    with os.fdopen(bootstrap._memory(4096)) as memory, pytest.raises(OSError, match="refused"):
        bootstrap._send(sender, memory.fileno(), [bootstrap._new_name(), name])
    sender.close()
    os.close(bootstrap._receive_memory(receiver, 4096, 1e6))
    with pytest.raises(ConnectionResetError, match="has ended"):
        bootstrap._receive_memory(receiver, 4096, 1e6)


def test_only_the_memory_that_a_rank_has_made_is_opened():
    """A rank opens the memory of another one in /proc, but no file that has got the descriptor's number since then."""
    with os.fdopen(bootstrap._memory(4096)) as memory:
        path, inode = f"{os.getpid()}/fd/{memory.fileno()}", os.fstat(memory.fileno()).st_ino
        with os.fdopen(bootstrap._opened(f"{path} {inode}", 4096)) as opened:
            assert os.path.sameopenfile(memory.fileno(), opened.fileno())
            assert not os.get_inheritable(opened.fileno())
        for name, nbytes in ((f"{path} {inode + 1}", 4096), (f"{path} {inode}", 1 << 30), ("", 4096)):
            before = sum(1 for _ in Path("/proc/self/fd").iterdir())
            with pytest.raises(OSError, match=r"closed|there is none"):
                bootstrap._opened(name, nbytes)
            assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_memory_that_its_owner_can_make_smaller_is_not_used(sockets):
    """Memory without a seal is not used: its owner could cut it, and the system would then end this rank's process."""
    sender, receiver, name, _ = sockets
    with os.fdopen(os.memfd_create("test", os.MFD_ALLOW_SEALING)) as memory:
        os.ftruncate(memory.fileno(), 4096)
        bootstrap._send(sender, memory.fileno(), [name])
        with pytest.raises(OSError, match="make it smaller"):
            bootstrap._receive_memory(receiver, 4096, 1e6)


def test_hosts_are_in_the_order_of_their_lowest_ranks():
    """Each rank is on one host. The ranks of a host ascend, and hosts are sorted by their lowest ranks. Ranks of
    different users are on different hosts."""
    assert bootstrap._identity()[2] == str(os.getuid())
    draw = random.Random(1)
    for _ in range(50):
        names = [draw.randint(0, 3) for _ in range(draw.randint(1, 9))]
        found = bootstrap._hosts([bootstrap._HostInfo("1", name, "", [], None) for name in names])
        due = {name: tuple(rank for rank, other in enumerate(names) if other == name) for name in names}
        assert found == tuple(due.values())


@pytest.mark.parametrize(
    ("pause_s", "answers", "due"), [(0, "yyy", True), (0, "yny", False), (0, "y?n", None), (0.3, "yyy", None)]
)
def test_a_vote_has_one_result(pause_s, answers, due):
    """All ranks get the same result of a vote: whether all agree, or none at all if one of them comes late."""
    memory, found = mmap.mmap(-1, votes.offset(1) + votes.NBYTES), [0, 0, 0]

    def run(rank):
        time.sleep(pause_s * rank)
        found[rank] = votes.vote(memory, 3, {"y": True, "n": False}.get(answers[rank]))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [due] * 3
    assert not any(memory[: votes.offset(1)])
