"""The simulated hosts: the bandwidth of their links, and that no process or namespace is left when they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import pytest

needs = pytest.mark.skipif(namespaces.available() is not None, reason=f"network namespaces: {namespaces.available()}")

RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as listener:
    print("up", flush=True)
    connection, _ = listener.accept()
    got, room = len(connection.recv(1 << 20)), bytearray(1 << 20)
    start = time.perf_counter()
    while count := connection.recv_into(room):
        got += count
    print(got, time.perf_counter() - start)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def seconds(bed, src, dst, nbytes):
    """Send bytes over one TCP connection and return the seconds that this took."""
    receiver = bed.run(dst, [sys.executable, "-c", RECEIVE, bed.addresses[dst]], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout.readline() == "up\n"
    bed.run(src, [sys.executable, "-c", SEND, bed.addresses[dst], str(nbytes)])
    got, took = receiver.communicate(timeout=30)[0].split()
    assert int(got) == nbytes
    return float(took)


@needs
def test_links_have_their_bandwidth():
    """A link of 1 Gbit/s, or a slower one, carries at most its bandwidth, headers included, and not much less."""
    with namespaces.hosts(3, slower={(0, 2): "200mbit"}) as bed:
        for src, dst, rate, nbytes in ((0, 1, 125e6, 16 << 20), (2, 0, 25e6, 4 << 20)):
            before = bed.sent(src)
            took = seconds(bed, src, dst, nbytes)
            # The token bucket passes 256 KiB at once, the first read is not counted, and headers are 4.6 % of a packet.
            assert 0.9 * nbytes / rate < took < 1.5 * nbytes / rate
            after = bed.sent(src)
            other = 3 - src - dst
            assert nbytes <= after[dst] - before[dst] < 1.1 * nbytes
            assert after[other] - before[other] < 10_000


@needs
def test_hosts_have_their_own_network_namespaces():
    """The network namespaces of hosts differ from each other and from this process's."""
    show = [sys.executable, "-c", "import os; print(os.stat('/proc/self/ns/net').st_ino)"]
    with namespaces.hosts(2) as bed:
        spaces = {bed.run(k, show, stdout=subprocess.PIPE).communicate(timeout=20)[0] for k in range(2)}
    assert len({*spaces, f"{Path('/proc/self/ns/net').stat().st_ino}\n".encode()}) == 3


OWNER = """
import sys, time
import namespaces
with namespaces.hosts(2) as bed:
    child = bed.run(0, ["sh", "-c", "echo up; exec sleep 600"], stdout=-1)
    child.stdout.readline()  # it is now set to end with this process
    print(*[holder.pid for holder in bed.holders], child.pid, flush=True)
    time.sleep(600)
"""


@needs
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_hosts_end_with_their_owner(how):
    """However the process that made the hosts ends, its namespaces and their processes end, too."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    owner.send_signal(how)
    owner.wait(20)
    owner.stdout.close()
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until, "a process of a host is left"
        time.sleep(0.01)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs
def test_hosts_end_with_an_exception():
    """After an exception no process and no namespace is left."""
    with pytest.raises(ZeroDivisionError, match="own"), namespaces.hosts(2) as bed:  # noqa: PT012
        pids = [holder.pid for holder in bed.holders]
        pids.append(bed.run(1, ["sleep", "600"]).pid)
        raise ZeroDivisionError("own")
    assert not any(alive(pid) for pid in pids)


def test_missing_tools_are_named(monkeypatch):
    """If hosts cannot be simulated, namespaces.available returns the reason."""
    monkeypatch.setattr(namespaces, "NEEDED", ("ip", "no-such-tool"))
    assert namespaces.available.__wrapped__() == "no-such-tool not installed"
    monkeypatch.setattr(namespaces, "NEEDED", ())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in namespaces.available.__wrapped__()
