"""The simulated hosts: the bandwidth of their links, and that no process is left when they end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import pytest

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(namespaces.available() is not None, reason=f"network namespaces: {namespaces.available()}"),
]

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
    connection.sendall(bytes(4 << 20))
"""


def test_links_have_their_bandwidth():
    """A link carries at most its bandwidth, headers included, and no bytes of other links."""
    with namespaces.hosts(3, slower={(0, 2): "200mbit"}) as bed:
        before, nbytes = bed.sent(2), 4 << 20
        receiver = bed.run(0, [sys.executable, "-c", RECEIVE, bed.addresses[0]], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout.readline() == "up\n"
        bed.run(2, [sys.executable, "-c", SEND, bed.addresses[0]])
        got, took = receiver.communicate(timeout=30)[0].split()
        assert int(got) == nbytes
        assert float(took) > 0.9 * nbytes / 25e6  # the bucket passes 256 KiB at once, and the first read is not counted
        assert nbytes <= bed.sent(2)[0] - before[0] < 1.1 * nbytes
        assert bed.sent(2)[1] - before[1] < 10_000


OWNER = """
import time
import namespaces
with namespaces.hosts(2) as bed:
    child = bed.run(0, ["sh", "-c", "echo up; exec sleep 600"], stdout=-1)
    child.stdout.readline()  # it is now set to end with this process
    print(*[holder.pid for holder in bed.holders], child.pid, flush=True)
    time.sleep(600)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_hosts_end_with_their_owner(how):
    """However the process that made the hosts ends, its namespaces and their processes end, too."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    owner.send_signal(how)
    owner.wait(20)
    owner.stdout.close()
    until = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until, "a process of a host is left"
        time.sleep(0.01)
