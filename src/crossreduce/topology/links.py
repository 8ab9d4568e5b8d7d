"""The parts of a topology: links, switches, and exact numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fractions import Fraction
from numbers import Rational, Real
from typing import Any, Final, NamedTuple

from ..devices import canonical
from ..errors import ArgumentError, shown

_MOST: Final = 10**12  # GB/s or seconds; far below the limits of floats, so that computed times and rates stay finite
_LEAST: Final = Fraction(1, _MOST)
_MOST_HOSTS: Final = 4096
_SWITCH: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/#-]*")  # no colon: only names of devices have one


class Switch(NamedTuple):
    """A node that forwards data and stores none."""

    name: str
    reduces: bool = False  # it combines and multicasts data, as NVLink SHARP (NVLS) and InfiniBand SHARP do


class Link(NamedTuple):
    """A directed connection. ``bandwidth`` in GB/s, ``latency_s`` in seconds."""

    src: str
    dst: str
    bandwidth: Fraction
    latency_s: Fraction = Fraction(0)


class Wiring(NamedTuple):
    """The arguments of ``Topology``, which checks them. Numbers may have any type, and switches may be names."""

    devices: tuple[str, ...]
    links: tuple[Link, ...]
    switches: tuple[Any, ...] = ()
    assumed: tuple[str, ...] = ()  # what the source of the wiring does not state

    @classmethod
    def of(cls, devices: Sequence[str], links: Sequence[Link]) -> Wiring:
        """Return a wiring in which all ends of links that are not in ``devices`` are switches that do not reduce."""
        switches = dict.fromkeys(node for link in links for node in link[:2] if node not in devices)
        return cls(tuple(devices), tuple(links), tuple(map(Switch, switches)))


def exact(what: str, value: object) -> Fraction:
    """Return a bandwidth or latency as a fraction; the float 0.1 is read as 1/10.

    >>> exact("bandwidth", 0.1)
    Fraction(1, 10)
    """
    number = Fraction(-1)  # other values are refused like a negative number
    if isinstance(value, Rational) and not isinstance(value, bool):
        number = Fraction(int(value.numerator), int(value.denominator))
    elif isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        number = Fraction(repr(float(value)))
    if number == 0 or _LEAST <= number <= _MOST:
        return number
    units = {"bandwidth": "GB/s", "latency": "seconds"}
    problem = f"a {what} must be 0, or a number of {units[what]} from {float(_LEAST):g} to {_MOST}."
    raise ArgumentError.of(problem, shown(value), "25" if what == "bandwidth" else "1e-6")


def both_ways(a: str, b: str, bandwidth: Fraction, latency_s: Fraction) -> tuple[Link, Link]:
    """Return two equal links, one in each direction."""
    return Link(a, b, bandwidth, latency_s), Link(b, a, bandwidth, latency_s)


def read_switches(given: Iterable[Switch | str]) -> tuple[Switch, ...]:
    """Return the switches in a list of ``Switch``es and names. ArgumentError: one is invalid or listed twice."""
    entry: Any = given
    switches = []
    try:
        if isinstance(given, str):
            raise TypeError(given)  # noqa: TRY301 - each of its letters would be a switch
        for entry in given:
            switches.append(Switch(entry) if isinstance(entry, str) else Switch(*entry))
    except TypeError as error:
        problem = "switches must be a list of Switches or names."
        raise ArgumentError.of(problem, shown(entry), '[Switch("nvswitch")]') from error
    count = Counter(switch.name for switch in switches if isinstance(switch.name, str))
    for name, reduces in switches:
        if not isinstance(name, str) or not _SWITCH.fullmatch(name):
            problem = "a switch's name must be ASCII letters, digits, . _ / # -, and start with a letter or digit."
            raise ArgumentError.of(problem, shown(name), '"nvswitch", "host0/nic3"')
        if _is_device(name):
            raise ArgumentError.of("a switch cannot have a device's name.", shown(name), '"nvswitch", "host0/nic3"')
        if count[name] > 1:
            raise ArgumentError.of("each switch may be listed only once.", f"{name!r} {count[name]} times", repr(name))
        if not isinstance(reduces, bool):
            problem = "Switch.reduces must be True or False."
            raise ArgumentError.of(problem, shown(reduces), f"Switch({name!r}, True)")
    return tuple(switches)


def _is_device(name: str) -> bool:
    with suppress(ArgumentError):
        return bool(canonical(name))
    return False


def check_hosts(hosts: object) -> None:
    """Raise an ``ArgumentError`` if this is not a number of hosts that can be joined."""
    if type(hosts) is not int or not 1 <= hosts <= _MOST_HOSTS:
        raise ArgumentError.of(f"hosts must be an integer from 1 to {_MOST_HOSTS}.", shown(hosts), "hosts=2")
