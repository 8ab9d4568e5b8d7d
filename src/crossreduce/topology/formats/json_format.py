"""Topologies as JSON text, and back. Numbers are written exactly, as text such as "64/3"."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any, Final, TypeVar

from ...errors import ArgumentError, shown
from ..links import Link, Switch, Wiring, exact

FORMAT: Final = "crossreduce.topology/1"

T = TypeVar("T")
_KINDS: Final = {dict: "an object", list: "a list", str: "text", int: "a whole number", bool: "true or false"}


def write_json(wiring: Wiring) -> str:
    """Return a topology as JSON text: see ``Topology.to_json``."""
    links = [[src, dst, str(bandwidth), str(latency)] for src, dst, bandwidth, latency in wiring.links]
    content = {"format": FORMAT, "devices": wiring.devices, "switches": wiring.switches, "links": links}
    content |= {"assumed": wiring.assumed} if wiring.assumed else {}
    return json.dumps(content, separators=(",", ":"))


def read_json(text: str) -> Wiring:
    """Return the wiring in a JSON text: see ``Topology.from_json``."""
    try:
        read = load(text, FORMAT, "devices", "links")
        listed = check_list(list, read.get("switches", []))
        switches = [Switch(check_type(str, name), check_type(bool, reduces)) for name, reduces in listed]
        links = []
        for src, dst, speed, *latency in check_list(list, read["links"]):  # the latency may be missing
            ends = check_type(str, src), check_type(str, dst)
            links.append(Link(*ends, _exact("bandwidth", speed), *(_exact("latency", s) for s in latency)))
        assumed = check_list(str, read.get("assumed", []))
        return Wiring(check_list(str, read["devices"]), tuple(links), tuple(switches), assumed)
    except ArgumentError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = f"this text is not a topology in JSON: {why_not(error)}."
        raise ArgumentError.of(problem, shown(text), f'text of format "{FORMAT}"') from error


def load(text: str, accepted: str | tuple[str, ...], *keys: str) -> dict[str, Any]:
    """Return the object in a JSON text. ValueError: its "format" is not ``accepted``, or it lacks one of ``keys``."""
    content = json.loads(text)
    formats = (accepted,) if isinstance(accepted, str) else accepted
    if not isinstance(content, dict) or content.get("format") not in formats:
        raise ValueError(f'its format is not "{formats[0]}"')
    if missing := [key for key in keys if key not in content]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return content


def why_not(error: Exception) -> str:
    """Return why a text cannot be read, in the words of this library, where the error is one of Python's."""
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON at line {error.lineno}, column {error.colno}"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    texts = {UnicodeDecodeError: "it is not UTF-8 text", RecursionError: "it is nested too deeply"}
    return texts.get(type(error), str(error))


def check_type(kind: type[T], value: object) -> T:
    """Return a value of a JSON text. TypeError: it does not have exactly this type; a bool is not an int."""
    if type(value) is not kind:
        raise TypeError(f"{json.dumps(value)[:80]} is not {_KINDS[kind]}")
    return value


def check_list(kind: type[T], values: object) -> tuple[T, ...]:
    """Return the values of a list in a JSON text. TypeError: it is not a list, or a value has another type."""
    return tuple(check_type(kind, value) for value in check_type(list, values))


def _exact(what: str, value: object) -> Fraction:
    """Return the number that a JSON number, or text such as "64/3" or "12.5", stands for."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return exact(what, value)
    text = check_type(str, value)
    if not re.fullmatch(r"[0-9]{1,40}(/[0-9]{1,40}|\.[0-9]{1,40})?", text):  # Fraction("1e99999999") would take hours
        raise ValueError(f'{value!r} must be like "12.5" or "64/3": no sign or exponent, at most 40 digits per part')
    return Fraction(text)
