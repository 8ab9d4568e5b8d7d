"""Read arguments that callers give in one of several forms: a topology, and a number of bytes."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Final

from ..errors import ArgumentError, shown
from .topology import Topology

TopologyLike = Topology | str | os.PathLike[str]

# The largest buffer that is simulated: an exbibyte, more memory than any machine has.
MOST_BYTES: Final = 1 << 60

_SUFFIXES: Final = (".json", ".xml", ".txt")
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_NBYTES: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) *([kmg]?)(?:i?b)?", re.IGNORECASE)


def topology_of(given: object) -> Topology:
    """Return the topology that a ``Topology``, a machine's name, a file's path or the text "this" stands for.

    "this" is the machine that runs the program.

    Raises:
      ArgumentError: it is none of these, the machine is unknown, or the file has another format.
      OSError: the file cannot be read.

    >>> topology_of("dgx-1v") == topology_of(Topology.machine("dgx-1v"))
    True
    """
    if isinstance(given, Topology):
        return given
    if not isinstance(given, (str, os.PathLike)):
        remedy = 'Topology.ring(4), the name of a machine such as "dgx-1v", or the path of a file'
        raise ArgumentError.of("this is not a topology.", shown(given), remedy)
    if given == "this":
        return Topology.discover()
    return Topology.load(given) if is_path(given) else Topology.machine(str(given))


def is_path(given: str | os.PathLike[str]) -> bool:
    """Return whether this is the path of a file and not the name of a machine.

    Text is a path if it has a / or the suffix .json, .xml or .txt. The name of an existing file is also a path, unless
    a machine of the library has this name.
    """
    path = Path(given)
    if not isinstance(given, str) or os.sep in given or path.suffix.lower() in _SUFFIXES:
        return True
    if not path.is_file():
        return False
    try:
        Topology.machine(given)
    except ArgumentError:
        return True
    return False


def byte_count(given: object) -> int:
    """Return the number of bytes that an int, or text such as "64M", stands for; K, M and G are powers of 1024.

    Raises:
      ArgumentError: the argument is something else, or the number is not from 0 to ``MOST_BYTES``.

    >>> byte_count("64M") == byte_count("65536 KiB") == byte_count(64 << 20)
    True
    """
    number = given
    if isinstance(given, str) and (match := _NBYTES.fullmatch(given.strip())) is not None:
        number = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MOST_BYTES:
        return number
    problem = f'nbytes must be an integer from 0 to {MOST_BYTES}, or text such as "64K" or "128M".'
    raise ArgumentError.of(problem, f"nbytes={shown(given)}", "nbytes=1 << 20")
