"""Processes of another user, which try to disturb the ranks of a host while they share memory."""

import contextlib
import mmap
import os
import resource
import signal
import socket
import struct
import time
import traceback
from pathlib import Path

import pytest
from members import Warnings
from ranks import SocketRendezvous, ranks

from crossreduce.ranks.intra_host import bootstrap

NOBODY = 65534
GROUPS = 10


def names():
    """Return the names of this library's sockets, which every user can read."""
    for line in Path("/proc/net/unix").read_text().splitlines():
        if (name := line.rpartition(" ")[2]).startswith("@crossreduce-"):
            yield "\0" + name[1:]


def attacked(name, kept):
    """Make connections, some of which are closed at once, and send many long messages, some with a descriptor."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        for count in (0, 20, *[1] * 20):
            one = socket.socket(socket.AF_UNIX, kind)
            one.setblocking(False)
            with contextlib.suppress(OSError):
                one.connect(name)
            for _ in range(count):
                with contextlib.suppress(OSError):
                    one.send(b"m" * 100)
                with contextlib.suppress(OSError):
                    socket.send_fds(one, [b"m"], [1])
            kept.append(one) if count else one.close()


@contextlib.contextmanager
def attacker():
    """Run a process of another user that attacks each of the sockets; yield the number of those it attacked."""
    count = mmap.mmap(-1, 8)
    pid = os.fork()
    if not pid:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 14, 1 << 14))
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            seen, kept = set(), []
            while True:
                for name in {*names()} - seen:
                    attacked(name, kept)
                    seen.add(name)
                    count[:] = struct.pack("q", len(seen))
        finally:
            traceback.print_exc()
            os._exit(1)
    try:
        yield lambda: struct.unpack("q", count[:])[0]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        count.close()


def groups(rendezvous):
    """Share memory many times, each time with ranks that come one after the other, as programs do."""
    warnings, found = Warnings(), []
    for number in range(GROUPS):
        time.sleep(0.02 * rendezvous.rank)
        one = SocketRendezvous(rendezvous.path, rendezvous.rank, rendezvous.size, f"group {number}")
        result = bootstrap.bootstrap(one, lambda count, _hosts: 4096 * count)
        os.close(result.fd)
        found.append(result.hosts)
    return found, warnings.texts


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_cannot_disturb_the_ranks_of_a_host():
    """Whatever a process of another user does with the sockets of starting ranks, these share memory as
    without it, and log nothing."""
    with attacker() as count:
        results = ranks(3, groups)
        assert count() >= GROUPS  # of at most 5 sockets for each group
    for found, warnings in results:
        assert set(found) == {((0, 1, 2),)}, warnings
        assert warnings == []
