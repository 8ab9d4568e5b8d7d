"""The parts of a topology: links, switches, and exact numbers. ``Topology`` checks names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Rational, Real
from typing import Any, Final, NamedTuple

from ..errors import ArgumentError, shown

_MOST: Final = 10**12  # GB/s or seconds; so far below the limits of floats that calculated times and rates are in range
_LEAST: Final = Fraction(1, _MOST)


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

    @classmethod
    def of(cls, devices: Sequence[str], links: Sequence[Link]) -> Wiring:
        """Return a wiring; all ends of links that are not in ``devices`` are switches that do not reduce."""
        switches = dict.fromkeys(node for link in links for node in link[:2] if node not in devices)
        return cls(tuple(devices), tuple(links), tuple(map(Switch, switches)))


def exact(what: str, value: object) -> Fraction:
    """Return a bandwidth or latency as a fraction; the float 0.1 is read as 1/10.

    >>> exact("bandwidth", 0.1)
    Fraction(1, 10)
    """
    number = Fraction(-1)
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
