"""Addresses: those of this machine, and those at which a process of another machine may be reached.

Input: what a process has published about itself. Output: addresses to which to connect. None of them belongs to this
machine unless the process runs on it: any program of this machine may listen there, and could pass on the messages.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from ...errors import ArgumentError

with contextlib.suppress(ImportError):  # Windows has no fcntl; there, ranks raise a BackendError before they need it
    import fcntl

_ADDRESS, _FLAGS, _IS_UP = 0x8915, 0x8913, 1  # of Linux: SIOCGIFADDR, SIOCGIFFLAGS, IFF_UP
_UNUSED: Final = ("192.0.2.1", "2001:db8::1")  # for documentation (RFC 5737, RFC 3849); nothing is sent there
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")
_INTERFACES: Final = Path("/sys/class/net")
_NODES: Final = Path("/sys/devices/system/node")


def addresses(interfaces: Sequence[str] = ()) -> list[str]:
    """Return the addresses of this host. Those of the default routes come first, the loopback addresses last.

    Raise a ``ConnectionError`` if ``interfaces`` are given and none of them has an address.
    """
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no IPv4 address
                (flags,) = struct.unpack_from("H", fcntl.ioctl(query, _FLAGS, request), 16)
                if flags & _IS_UP and (not interfaces or name in interfaces):
                    found.append(socket.inet_ntoa(fcntl.ioctl(query, _ADDRESS, request)[20:24]))
    with contextlib.suppress(OSError):  # no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if (scope == "00" or name == "lo") and (not interfaces or name in interfaces):
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    if interfaces and not found:
        raise ConnectionError(f"no interface of {', '.join(interfaces)} has an address")
    preferred = [address for address in map(_source_for, _UNUSED) if address in found]
    local = [address for address in found if address.startswith("127.") or address == "::1"]
    return list(dict.fromkeys([*preferred, *(x for x in found if x not in local), *local]))


def chosen_interfaces(rule: str) -> list[str]:
    """Return the names of the interfaces of this host, with an address, that a rule selects.

    The rules are those of NCCL_SOCKET_IFNAME (NCCL's user guide, "Environment Variables"): "eth,ib" selects the names
    that begin with one of these texts, "=eth0,eth1" these names, "^docker,veth" all but the names that begin with one
    of these texts, and "^=docker0" all but this name. "^" never selects the loopback interface.

    Raises:
      ArgumentError: the rule selects no interface.
    """
    words = rule.lstrip("^=").split(",")
    excludes, exactly = rule.startswith("^"), rule.startswith(("=", "^="))
    names = [name for _, name in socket.if_nameindex()]
    ranked = [
        (next((k for k, word in enumerate(words) if is_named(name, word, exactly)), None), name) for name in names
    ]
    if excludes:
        found = [name for place, name in ranked if place is None and name != "lo"]
    else:
        found = [name for _, name in sorted((place, name) for place, name in ranked if place is not None)]
    found = [name for name in found if _addresses_of(name)]
    if not found:
        raise ArgumentError.of(
            "CROSSREDUCE_IFNAME selects no interface of this host.", rule, f"one of {', '.join(names)}"
        )
    return found


def is_named(name: str, word: str, exactly: bool) -> bool:
    """Return whether the name of an interface is ``word`` or, unless ``exactly``, begins with it."""
    return bool(word) and (name == word if exactly else name.startswith(word))


def _addresses_of(name: str) -> list[str]:
    with contextlib.suppress(ConnectionError):
        return addresses([name])
    return []


def rails(interfaces: Sequence[str], place: int) -> list[list[str]]:
    """Return the addresses of each interface over which this process spreads its connections, the first one first.

    These are ``interfaces``; or, if none are named, that of the default route and all devices of the same speed. If the
    process may only run on the CPUs of one NUMA node, and one of these interfaces is there, only those that are there.

    Args:
      interfaces: names of interfaces, or none.
      place: the number of this rank among those of its host. Each one begins with another interface.
    """
    names = list(interfaces)
    if not names:
        speeds = {name: speed for _, name in socket.if_nameindex() if (speed := _about(name, "speed")) > 0}
        first = [name for name in speeds if not {*addresses()[:1]}.isdisjoint(_addresses_of(name))]
        names = [name for name in speeds if first and speeds[name] == speeds[first[0]]]
    node = _numa_node()
    near = [name for name in names if node >= 0 and _about(name, "device/numa_node") == node]
    found = [each for each in map(_addresses_of, near or names) if each]
    start = place % max(1, len(found))
    return found[start:] + found[:start]


def by_rail(targets: Sequence[str], rail: Sequence[str]) -> list[str]:
    """Return addresses of another host: first those to which this one sends from an address of ``rail``."""
    return sorted(targets, key=lambda each: _source_for(each) not in rail)


def _about(name: str, what: str) -> int:
    """Return a number that the system knows about a device of an interface, or -1. Virtual ones have no device."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(_INTERFACES, name, what).read_text()) if Path(_INTERFACES, name, "device").exists() else -1
    return -1


def _numa_node() -> int:
    """Return the NUMA node that has all CPUs on which this process may run, or -1 if there is none or only one node."""
    with contextlib.suppress(OSError, ValueError):
        nodes = {int(path.parent.name[4:]): path.read_text() for path in _NODES.glob("node[0-9]*/cpulist")}
        for node, text in nodes.items():
            spans = [[int(end) for end in part.split("-")] for part in text.strip().split(",") if part]
            if len(nodes) > 1 and all(any(a[0] <= cpu <= a[-1] for a in spans) for cpu in os.sched_getaffinity(0)):
                return node
    return -1


def machine() -> str:
    """Return a text that is the same in all processes that have the loopback interface of this one, and in no others.

    If the system has no such identifiers, it is the name of the host. If there are too many open files, raise an
    ``OSError``.
    """
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return "/".join(network_identity())
    return socket.gethostname()


def network_identity() -> list[str]:
    """Return the identifiers of this boot and of this network namespace. If there are none, raise an ``OSError``."""
    network = _NETWORK.stat()
    return [_BOOT.read_text().strip(), f"{network.st_dev}/{network.st_ino}"]


def reachable(published: Sequence[str], where: str) -> list[str]:
    """Return the addresses, of those that a process has published, at which it may be reached from here.

    ``where``: the ``machine`` of that process. On another machine it cannot have an address of this machine. For errors
    see ``machine``.
    """
    is_here = where == machine()
    return [each for each in published if is_here or not _is_own(each)]


def _is_own(address: str) -> bool:
    """Return whether a connection to an address would reach this machine. Names count as such addresses."""
    with contextlib.suppress(ValueError):
        parsed = ip_address(address)
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed
        return parsed.is_loopback or parsed.is_unspecified or _source_for(address) == address
    return True


def loopback(host: str) -> str:
    """Return the loopback address if ``host``, a name or an address, means this host itself, otherwise ""."""
    with contextlib.suppress(ValueError):
        name = host.lower().rstrip(".")
        parsed = ip_address("127.0.0.1" if f".{name}".endswith(".localhost") else host)
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed
        return str(parsed) if parsed.is_loopback else ""
    return ""


def end_text(end: Sequence[object]) -> str:
    """Return the address and port of an end of a connection, in the same form at both ends.

    >>> end_text(("::ffff:10.0.0.1", 80, 0, 0))
    '10.0.0.1 80'
    """
    return f"{str(end[0]).removeprefix('::ffff:')} {end[1]}"


def _source_for(target: str) -> str | None:
    """Return the address from which this host would send to ``target``. Nothing is sent."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as query:
        query.connect((target, 9))  # any port: this only selects the route
        return str(query.getsockname()[0])
    return None
