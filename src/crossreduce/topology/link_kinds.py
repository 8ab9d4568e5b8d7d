"""Kinds of links, such as "nvlink4" or "pcie3": their speeds and latency, from data/links.json with its sources."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ..errors import ArgumentError, shown
from . import links
from .links import Link

SPEEDS: Final = ("raw", "effective")


class Kind(NamedTuple):
    """A kind of link, with the speeds of one link in one direction in GB/s; a PCIe link is x16."""

    raw: Fraction  # as specified
    effective: Fraction  # as NCCL or RCCL assume
    latency_s: Fraction

    def between(self, a: str, b: str, count: int | Fraction, speeds: str) -> tuple[Link, Link]:
        """Return ``count`` links of this kind between two nodes, as one link per direction."""
        bandwidth = count * (self.raw if speeds == "raw" else self.effective)
        return links.both_ways(a, b, bandwidth, self.latency_s)


def kind(name: str) -> Kind:
    """Return the kind of link with this name.

    >>> kind("nvlink4").effective
    Fraction(103, 5)
    """
    return _kinds()[name]


@lru_cache(maxsize=1)
def _kinds() -> dict[str, Kind]:
    return {
        name: Kind(Fraction(entry["raw"]), Fraction(entry["effective"]), Fraction(entry["latency_us"]) / 10**6)
        for name, entry in read_data()["links.json"]["kinds"].items()
    }


@lru_cache(maxsize=1)
def read_data() -> dict[str, Any]:
    """Return the content of each file in data/ by its name, in sorted order. Decimals are read as exact fractions."""
    from importlib.resources import files

    paths = sorted(files(__package__).joinpath("data").iterdir(), key=lambda file: file.name)
    return {file.name: json.loads(file.read_text("utf-8"), parse_float=Fraction) for file in paths}


def nvlink(sm: int) -> tuple[str, str]:
    """Return the kinds of a GPU's NVLinks to another GPU and to an NVSwitch; ``sm`` is its compute capability times 10.

    >>> nvlink(80), nvlink(86)
    (('nvlink3', 'nvswitch2'), ('nvlink3-ga10x', 'nvlink3-ga10x'))
    """
    if sm == 86:
        return "nvlink3-ga10x", "nvlink3-ga10x"
    return next(kinds for least_sm, kinds in _NVLINK if sm >= least_sm)


_NVLINK: Final = (
    (100, ("nvlink5", "nvswitch4")),
    (90, ("nvlink4", "nvswitch3")),
    (80, ("nvlink3", "nvswitch2")),
    (70, ("nvlink2", "nvswitch1")),
    (0, ("nvlink1", "nvlink1")),
)


def check_speeds(speeds: object) -> None:
    """Raise ArgumentError if ``speeds`` is neither "raw" nor "effective"."""
    if not isinstance(speeds, str) or speeds not in SPEEDS:
        remedy = '"raw" for bounds, "effective" for predictions'
        raise ArgumentError.of("speeds must be raw or effective.", shown(speeds), remedy)
