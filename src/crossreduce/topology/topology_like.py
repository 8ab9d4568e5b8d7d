"""Topologies as callers give them: a ``Topology``, the name of a machine, or the path of a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ..errors import ArgumentError, shown
from .topology import Topology

TopologyLike = Topology | str | os.PathLike[str]

_SUFFIXES: Final = (".json", ".xml", ".txt")


def topology_of(given: object) -> Topology:
    """Return a topology that was given as such, by a machine's name, by a file's path, or as "this" machine.

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

    Text with a / or with the suffix .json, .xml or .txt is a path; so is the name of an existing file, unless a machine
    of the library has this name.
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
