"""Read and check the values of command-line options.

Input: the text or number of one option. Output: its value, or an ``ArgumentError`` that names the option ``option``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ... import Costs, Topology
from ...devices import canonical, parse
from ...errors import ArgumentError, printable
from ...options import ALGORITHMS
from ...topology import byte_count, topology_of
from ...topology.formats import is_table
from ...topology.link_kinds import SPEEDS
from ...topology.topology_like import is_path
from ...values import host_devices, read_devices
from .output import ranges

# JAX and TensorFlow create every device up to the highest index, so a typing error must not create 10**9 of them.
MAX_DEVICES: Final = 4096
MOST_REPEATS: Final = 1_000_000  # calls, epochs and other numbers for which a program could run for ever
_RANGE: Final = re.compile(r"(?P<name>.*[:#])?(?P<first>[0-9]{1,9})-(?P<last>[0-9]{1,9})")


def in_range(option: str, value: int, least: int, most: int = MOST_REPEATS) -> int:
    """Return ``value``, or raise an ``ArgumentError`` if it is less than ``least`` or more than ``most``.

    >>> in_range("--epochs", 3, 1)
    3
    """
    if value < least:
        raise ArgumentError(f"{option} must be {least} or more, not {value}.")
    if value > most:
        raise ArgumentError(f"{option} must be {most} or less, not {value}.")
    return value


def one_of(choices: Iterable[str], option: str, value: str) -> str:
    """Return the choice that a text names, or raise an ``ArgumentError``. Case, "-" and "_" do not matter.

    >>> one_of(["all_reduce", "reduce"], "--collective", "AllReduce"), one_of(["all_reduce"], "-c", "all-reduce")
    ('all_reduce', 'all_reduce')
    """
    choices = list(choices)
    by_letters = {_letters(choice): choice for choice in choices}
    if _letters(value) not in by_letters:
        raise ArgumentError(f'{option} must be one of {", ".join(choices)}, not "{value}".')
    return by_letters[_letters(value)]


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def split_list(text: str) -> list[str]:
    """Split a list of numbers and names at its commas, and expand ranges.

    >>> split_list("0-2, cuda:0-1,nvswitch")
    ['0', '1', '2', 'cuda:0', 'cuda:1', 'nvswitch']
    """
    parts: list[str] = []
    for part in map(str.strip, text.split(",")):
        match = _RANGE.fullmatch(part)
        numbers = range(int(match["first"]), int(match["last"]) + 1) if match else range(0)
        if match and 0 < len(numbers) <= MAX_DEVICES:
            parts += [f"{match['name'] or ''}{number}" for number in numbers]
        else:  # a number, a name, or an empty or too long range, which the caller rejects
            parts.append(part)
    return parts


def read_device_list(
    option: str, text: str, numbered: Callable[[int], tuple[str, ...]] = host_devices
) -> tuple[str, ...]:
    """Return the devices in a list. A number n alone stands for ``numbered(n)``, by default n devices in host memory.

    >>> read_device_list("--devices", "2"), read_device_list("--devices", "cpu:1,GPU:0-1")
    (('cpu:0', 'cpu:1'), ('cpu:1', 'cuda:0', 'cuda:1'))
    """
    if re.fullmatch(r"[+-]?[0-9]{1,99}", text.strip()):
        return numbered(in_range(option, int(text), 1, MAX_DEVICES))
    try:
        names = read_devices(split_list(text))
    except ArgumentError as error:
        why = str(error).partition("\n")[0]
        raise ArgumentError(f'{option} must be a number, or names as in cpu:0-2,cuda:0, not "{text}": {why}') from error
    for name in names:
        if parse(name).index >= MAX_DEVICES:
            raise ArgumentError(f"{option}: the number of a device must be below {MAX_DEVICES}, but {name} is listed.")
    return names


def read_algorithms(option: str, text: str) -> list[str]:
    """Return the algorithms in a list. "all" stands for all except auto and nccl, which select one of the others.

    >>> read_algorithms("--algorithm", "ring, forest")
    ['ring', 'forest']
    """
    names = [one_of([*ALGORITHMS, "all"], option, name.strip()) for name in text.split(",")]
    return [name for name in ALGORITHMS if name not in ("auto", "nccl")] if "all" in names else names


def read_nbytes(option: str, text: str) -> int:
    """Return the number of bytes that a text states. K, M and G are powers of 1024, as in nccl-tests.

    >>> read_nbytes("-e", "128M")
    134217728
    """
    try:
        return byte_count(text)
    except ArgumentError as error:
        problem = f"{option} must be a number of bytes such as 8, 64K or 128M, at most 2**60"
        raise ArgumentError(f'{problem}, not "{text}".') from error


def read_machine(
    text: str,
    hosts: int = 1,
    speeds: str = "raw",
    nics: str | None = None,
    in_network: bool = False,
    **known: Any,
) -> Topology:
    """Return the topology that ``text`` names: a machine of the library, a file, or this machine if it is "this".

    ``known`` has what the user knows about a table of GPUs: see ``Topology.load``.

    >>> read_machine("DGX-1")
    Topology(8 devices, 32 links: cuda:0, cuda:1, cuda:2, cuda:3, cuda:4, cuda:5, cuda:6, cuda:7)
    """
    in_range("--hosts", hosts, 1)
    speeds = one_of(SPEEDS, "--speeds", speeds)
    known = {name: value for name, value in known.items() if value is not None}
    if known and (text == "this" or not is_path(text)):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in known)
        raise ArgumentError(f"{options} can only be used with a table of GPUs in a file, not with {text}.")
    if text != "this" and not is_path(text):
        machine = Topology.machine(text, hosts, speeds=speeds, nics=nics, in_network=in_network)
        if nics is not None and hosts == 1:
            say_unused("--nics", "there is one host")
        if in_network and not any(switch.reduces for switch in machine.switches):
            say_unused("--in-network", f"no switch of {text} combines")
        return machine
    if (speeds, in_network) != ("raw", False) or (text == "this" and (hosts, nics) != (1, None)):
        options = "--hosts, --speeds, --nics and --in-network"
        options = options if text == "this" else "--speeds and --in-network"
        raise ArgumentError(f"{options} can only be used with a machine of the library, not with {text}.")
    if text == "this":
        return topology_of(text)
    known |= {"hosts": hosts, "nics": nics}
    try:
        table = Topology.load(text, **known)
        for name in [name for name, value in known.items() if name != "hosts" and value is not None]:
            with suppress(ArgumentError):  # the table cannot be read without this option
                other = Topology.load(text, **(known | {name: None}))
                if (other, other.assumed) == (table, table.assumed):
                    say_unused(f"--{name.replace('_', '-')}", f"without it, the topology of {text} is the same")
    except OSError as error:
        raise ArgumentError(f"{text} cannot be read: {error.strerror}.") from error
    return table


def read_beside(text: str, hosts: int, nics: str | None, other: str) -> Topology:
    """Return one of two topologies that are compared. ``other`` is the text of the other one.

    The number of hosts is for machines of the library and for tables of GPUs. If one of the two is such a table, the
    network cards are those of the table, and a machine has its own.
    """
    tables = []
    for each in (text, other):
        with suppress(OSError, ArgumentError):  # ``read_machine`` raises it with the name of the file
            tables += [each] if is_path(each) and is_table(each) else []
    if text not in tables and (is_path(text) or text == "this"):
        topology = read_machine(text)
        if hosts > 1:
            say_unused("--hosts", f"{text} states its hosts itself")
        return topology
    return read_machine(text, hosts, nics=nics if text in tables or not tables else None)


def say_unused(option: str, why: str) -> None:
    """Say on standard error that an option has no effect."""
    print(f"crossreduce: {option} has no effect: {printable(why)}", file=sys.stderr)


def read_costs(text: str | None, machine: str, hosts: int = 1, nics: str | None = None) -> Costs:
    """Return the costs in a file, or the published costs of ``machine`` if the text is "published".

    If the option is not given (``None``), return the default costs.

    >>> read_costs("published", "hgx-h100").reduction_gb_per_s
    3350.0
    """
    if text is None:
        return Costs()
    if text == "published":
        if machine == "this" or is_path(machine):
            problem = "--costs published can only be used with a machine of the library"
            raise ArgumentError(f"{problem}, not with {machine}.")
        return Costs.machine(machine, hosts, nics=nics)
    try:
        content = Path(text).read_text("utf-8")
    except OSError as error:
        raise ArgumentError(f"--costs {text} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"--costs {text} is not UTF-8 text.") from error
    try:
        return Costs.from_json(content)
    except ArgumentError as error:
        error.prefix(f"--costs {text}")
        raise


def read_node(option: str, text: str, topology: Topology) -> str:
    """Return a device or switch by its name, or by its number in the output of ``crossreduce topology``.

    >>> [read_node("--root", text, Topology.star(4)) for text in ("2", "CPU:3", "4", "switch")]
    ['cpu:2', 'cpu:3', 'switch', 'switch']
    """
    name = text.strip()
    if re.fullmatch("[0-9]{1,9}", name):
        if int(name) < len(topology.nodes):
            return topology.nodes[int(name)]
    elif name in topology.nodes:
        return name
    else:
        with suppress(ArgumentError):  # canonical() raises if this is not a device's name
            if canonical(name) in topology.nodes:
                return canonical(name)
    names, last = ", ".join(ranges(topology.nodes)), len(topology.nodes) - 1
    names = names if len(names) <= 120 else names[:117] + "..."
    raise ArgumentError(f'{option}: "{name}" is not one of the numbers 0 to {last} or the names {names}.')


def read_subset(option: str, text: str, topology: Topology) -> tuple[str, ...]:
    """Return the devices that a list of numbers, names and ranges selects. Each device may appear only once.

    >>> read_subset("--devices", "0-1,cpu:3", Topology.ring(4))
    ('cpu:0', 'cpu:1', 'cpu:3')
    """
    names = [read_node(option, part, topology) for part in split_list(text)]
    for name in names:
        if name not in topology.devices:
            raise ArgumentError(f"{option} must only list devices, but {name} is a switch.")
        if names.count(name) > 1:
            raise ArgumentError(f"{option} must list each device only once, but {name} appears more than once.")
    return tuple(names)


def read_link(option: str, text: str, topology: Topology) -> tuple[str, str]:
    """Return the two ends of a link: two numbers or names, with a comma or a hyphen between them.

    >>> read_link("--without-link", "0-3", Topology.ring(4)), read_link("--without-link", "1,cpu:2", Topology.ring(4))
    (('cpu:0', 'cpu:3'), ('cpu:1', 'cpu:2'))
    """
    mark = "," if "," in text else "-"
    parts = text.split(mark)
    splits = [(mark.join(parts[:k]), mark.join(parts[k:])) for k in range(1, len(parts))]
    found = []
    for ends in splits:  # several, if names contain hyphens
        with suppress(*[ArgumentError] * (len(splits) > 1)):
            found.append((read_node(option, ends[0], topology), read_node(option, ends[1], topology)))
    if len(found) != 1:
        problem = f"{option} must be two numbers such as 0-3, or two names such as cuda:0,cuda:3"
        raise ArgumentError(f'{problem}, not "{text}".')
    return found[0]
