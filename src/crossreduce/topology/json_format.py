"""Topologies as JSON text.

Input: JSON text. Output: a ``Wiring``; and back. Numbers are written exactly, as text such as "64/3".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Final

from ..errors import ArgumentError, shown
from .links import Link, Switch, Wiring, exact

FORMAT: Final = "crossreduce.topology/1"


def write_json(devices: Iterable[str], switches: Iterable[Switch], links: Iterable[Link]) -> str:
    """Return a topology as JSON text: see ``Topology.to_json``."""
    content = {
        "format": FORMAT,
        "devices": devices,
        "switches": switches,
        "links": [[src, dst, str(bandwidth), str(latency)] for src, dst, bandwidth, latency in links],
    }
    return json.dumps(content, separators=(",", ":"))


def read_json(text: str) -> Wiring:
    """Return the wiring in a JSON text: see ``Topology.from_json``."""
    try:
        read: dict[str, Any] = json.loads(text)
        if read["format"] != FORMAT:
            raise KeyError(read["format"])  # noqa: TRY301 - one handler reports all faults
        switches = [
            Switch(_text(name), _flag(reduces)) for name, reduces in map(_list, _list(read.get("switches", [])))
        ]
        links = [
            Link(_text(src), _text(dst), _exact("bandwidth", bandwidth), *(_exact("latency", s) for s in latency))
            for src, dst, bandwidth, *latency in map(_list, _list(read["links"]))
        ]
        return Wiring(tuple(map(_text, _list(read["devices"]))), tuple(links), tuple(switches))
    except ArgumentError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = f"this text is not a topology in JSON: {error!r}."
        raise ArgumentError.of(problem, shown(text), f'text of format "{FORMAT}"') from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _exact(what: str, value: object) -> Fraction:
    """Return a number of a file: text such as "64/3" or "12.5", or a JSON number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return exact(what, value)
    if not re.fullmatch(r"[0-9]{1,40}(/[0-9]{1,40}|\.[0-9]{1,40})?", _text(value)):  # "1e99999999" would take hours
        raise ValueError(f"{value!r} is not a number of 0 or more")
    return Fraction(_text(value))
