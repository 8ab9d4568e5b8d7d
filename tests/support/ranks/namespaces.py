"""Several simulated hosts on one machine: network namespaces, joined by links with a given bandwidth.

Every two hosts have their own link: a veth pair with a token bucket (``tc tbf``) at both ends. Each namespace is
anonymous and exists as long as its ``cat`` process, which reads from a pipe of this process. So when this process ends,
even if it is killed, namespaces, links and addresses are removed. This requires root and the programs in NEEDED.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

NEEDED = ("ip", "tc", "unshare", "nsenter", "setpriv")
NEW_NETWORK, NEW_MOUNTS, PRIVATE = 0x40000000, 0x20000, 0x44000  # CLONE_NEWNET, CLONE_NEWNS, MS_REC | MS_PRIVATE
# UCX finds the interfaces of a host in /sys.
OWN_DEVICES = ["unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh"]
PATHS = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@functools.cache
def available():
    """Return why hosts cannot be simulated here, or ``None`` if they can."""
    if sys.platform != "linux":
        return "network namespaces exist only on Linux"
    missing = [name for name in NEEDED if shutil.which(name, path=PATHS) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    try:
        with hosts(2):
            return None
    except RuntimeError as error:
        return str(error)


def enter(pid):
    """Move this process to a host, given the process that holds its namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        failed = libc.setns(namespace.fileno(), NEW_NETWORK)
    if os.environ.get("CROSSREDUCE_TRANSPORT") == "ucx" and not failed:
        failed = libc.unshare(NEW_MOUNTS) or libc.mount(b"none", b"/", None, PRIVATE, None)
        failed = failed or libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
    if failed:
        raise OSError(ctypes.get_errno(), "this process cannot enter a namespace")


class Bed:
    """Running simulated hosts. ``addresses``: of each host. ``interface``: an interface name that every host has."""

    def __init__(self, count, rate, mtu, slower):
        self.holders, self.processes, self.lock = [], [], threading.Lock()
        self.addresses = [f"10.213.0.{host + 1}" for host in range(count)]
        self.interface = "link0"
        try:
            for _ in range(count):
                self.holders.append(_namespace())
            names = [itertools.count() for _ in range(count)]
            for host in range(count):
                self._do(host, ["ip", "link", "set", "lo", "up"])
            for a, b in itertools.combinations(range(count), 2):
                ends = [(a, f"link{next(names[a])}", b), (b, f"link{next(names[b])}", a)]
                near, far = ([name, "netns", str(self.holders[host].pid)] for host, name, _ in ends)
                _call(["ip", "link", "add", *near, "type", "veth", "peer", "name", *far])
                for host, name, there in ends:
                    speed = slower.get((a, b), slower.get((b, a), rate))
                    self._do(host, ["ip", "address", "add", self.addresses[host] + "/32", "dev", name])
                    self._do(host, ["ip", "link", "set", name, "mtu", str(mtu), "up"])
                    route = [self.addresses[there] + "/32", "dev", name, "src", self.addresses[host]]
                    self._do(host, ["ip", "route", "add", *route])
                    if speed:
                        self._do(host, ["tc", "qdisc", "add", "dev", name, "root", "tbf", *self._bucket(speed)])
        except BaseException:
            self.close()
            raise

    def _inside(self, host):
        return ["nsenter", f"--net=/proc/{self.holders[host].pid}/ns/net"]

    def _do(self, host, argv):
        return _call([*self._inside(host), *argv])

    def run(self, host, argv, env=None, **options):
        """Start a process on a host, and return its ``Popen``. ``close``, or the end of this thread, kills it.

        ``env``: additional variables of the environment. ``options``: options of ``Popen``.
        """
        around = {**os.environ, "PATH": PATHS, "GLOO_SOCKET_IFNAME": self.interface, **(env or {})}
        devices = OWN_DEVICES if around.get("CROSSREDUCE_TRANSPORT") == "ucx" else []
        command = [*self._inside(host), *devices, "setpriv", "--pdeathsig", "KILL", *argv]
        with self.lock:
            process = subprocess.Popen(command, env=around, start_new_session=True, **options)
            self.processes.append(process)
        return process

    def lose(self, a, b, both=True):
        """Remove the route from host ``a`` to host ``b`` and, if ``both``, the way back. Other routes stay.

        Without a route, a connection fails at once. If only the way back is missing, there is no answer.
        """
        for host, there in ((a, b), (b, a))[: 1 + both]:
            self._do(host, ["ip", "route", "replace", "unreachable", self.addresses[there] + "/32"])

    def isolate(self, host):
        """Take all links of a host down. Packets of other hosts to it are then lost, without an answer."""
        for k in range(len(self.addresses) - 1):
            self._do(host, ["ip", "link", "set", f"link{k}", "down"])

    def mend(self, a, b):
        """Undo ``lose`` and ``isolate`` for the link between two hosts."""
        for host, there in ((a, b), (b, a)):
            self._do(host, ["ip", "link", "set", f"link{there - (there > host)}", "up"])
            route = [self.addresses[there] + "/32", "dev", f"link{there - (there > host)}", "src", self.addresses[host]]
            self._do(host, ["ip", "route", "replace", *route])

    def change_rate(self, a, b, rate):
        """Change the rate of the link between two hosts, in both directions."""
        for host, there in ((a, b), (b, a)):
            name = f"link{there - (there > host)}"
            self._do(host, ["tc", "qdisc", "replace", "dev", name, "root", "tbf", *self._bucket(rate)])

    def limit_connections(self, a, b, each, together):
        """Limit the rate of each connection between two hosts, which ``b`` has begun, and of all of them together.

        Each has one of 256 classes, by its port on ``b``. Of 4 connections, two have the same one in 2 % of all cases.
        """
        for host, there, mask in ((a, b, "1fe"), (b, a, "1fe0000")):  # the destination's port, the source's port
            name, limit = f"link{there - (there > host)}", f"rate {each} burst 256k cburst 256k"
            lines = [
                f"qdisc replace dev {name} root handle 1: htb default ffe r2q 1000",
                f"class add dev {name} parent 1: classid 1:fff htb rate {together} burst 256k cburst 256k",
                f"class add dev {name} parent 1:fff classid 1:ffe htb {limit}",
                f"filter add dev {name} parent 1: prio 1 handle 2: protocol ip u32 divisor 256",
            ]
            rule, tcp = f"filter add dev {name} parent 1: prio 1 protocol ip u32", "match ip protocol 6 0xff"
            for k in range(256):
                lines.append(f"class add dev {name} parent 1:fff classid 1:{k + 1:x} htb {limit}")
                lines.append(f"{rule} ht 2:{k:x}: {tcp} flowid 1:{k + 1:x}")
            lines.append(f"{rule} ht 800:: {tcp} hashkey mask 0x{mask} at 20 link 2:")
            self._do(host, ["sh", "-c", 'echo "$0" | tc -batch -', "\n".join(lines)])

    def add_link(self, a, b):
        """Add a second link between two of two hosts, with addresses of its own: 10.214.0.1 and 10.214.0.2."""
        ends = [["link1", "netns", str(self.holders[host].pid)] for host in (a, b)]
        _call(["ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]])
        for host in (a, b):
            self._do(host, ["ip", "address", "add", f"10.214.0.{host + 1}/24", "dev", "link1"])
            self._do(host, ["ip", "link", "set", "link1", "up"])

    @staticmethod
    def _bucket(rate):
        return ["rate", rate, "burst", "256k", "latency", "50ms"]

    def close(self):
        """End all processes, and thereby remove the namespaces."""
        with self.lock:
            processes, self.processes = self.processes, []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()
        holders, self.holders = self.holders, []
        for holder in holders:
            holder.communicate()  # closes its pipes


def _namespace():
    """Return a process that keeps a new namespace alive."""
    command, pipe = ["unshare", "--net", "sh", "-c", "echo up; exec cat"], subprocess.PIPE
    pipes = {"stdin": pipe, "stdout": pipe, "stderr": pipe}
    holder = subprocess.Popen(command, **pipes, start_new_session=True, env={**os.environ, "PATH": PATHS})
    if holder.stdout.readline() != b"up\n":  # then the namespace exists, and links can be added
        raise RuntimeError(f"no network namespace: {holder.stderr.read().decode().strip()}")
    return holder


def _call(argv):
    """Run a command and return its output."""
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "PATH": PATHS})
    if ran.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {ran.stderr.strip()}")
    return ran.stdout


@contextlib.contextmanager
def hosts(count, rate="1gbit", mtu=1500, slower=None):
    """Make ``count`` hosts, yield their ``Bed``, and remove them in any case.

    Args:
      rate: the rate of each link in each direction, in the notation of ``tc``; "" does not limit it. It includes
        Ethernet headers: at an MTU of 1500, TCP carries 1448 bytes in 1514.
      mtu: the MTU of all links.
      slower: the rates of slower links, by the numbers of two hosts: ``{(0, 2): "200mbit"}``.
    Raises:
      RuntimeError: the system cannot simulate hosts (see ``available``).
    """
    bed = Bed(count, rate, mtu, slower or {})
    atexit.register(bed.close)
    try:
        yield bed
    finally:
        bed.close()
        atexit.unregister(bed.close)
