"""Typed access to the fields of a JSON object, with errors that name the place and the field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ....errors import ScheduleError, shown
from ..proof import cut

LARGEST: Final = 2**64 - 1


class Fields:
    """A JSON object with typed access to its fields. ``at`` is its place in the file, in words, for errors."""

    def __init__(self, content: Any, at: str) -> None:
        self.content, self.at = content, at
        if not isinstance(content, dict):
            raise self.error("must be an object.", shown(content))

    def error(self, problem: str, given: str = "", remedy: str = "") -> ScheduleError:
        return ScheduleError.of(f"{self.at}: {problem}", given, remedy)

    def value(self, key: str, default: Any = None) -> Any:
        """Return a field, or ``default`` if it is missing. Without a default, raise a ScheduleError."""
        if key in self.content:
            return self.content[key]
        if default is None:
            raise self.error(f"the field {key} is missing.", cut(", ".join(self.content)) or "no field")
        return default

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string.", shown(value))
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false.", shown(value))
        return value

    def number(self, key: str, default: int | None = None, least: int = 0, most: int = LARGEST) -> int:
        value = self.value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"{key} must be an integer from {least} to {most}.", shown(value))
        return value

    def items(self, key: str, default: Any = None) -> list[Any]:
        value = self.value(key, default)
        if not isinstance(value, list):
            raise self.error(f"{key} must be a list.", shown(value))
        return value

    def numbers(self, key: str, count: int, what: str) -> tuple[int, ...]:
        """Return a list of numbers from 0 to ``count`` - 1. Errors call the things with these numbers ``what``."""
        values = self.items(key)
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < count for n in values):
            raise self.error(f"{key} must be numbers of {what}, of which there are {count}.", shown(values))
        return tuple(values)

    def children(self, key: str, name: str, default: Any = None) -> list[Fields]:
        """Return the objects in a list. Object k is called "``name`` k" in errors."""
        return [Fields(child, f"{self.at}, {name} {k}") for k, child in enumerate(self.items(key, default))]

    def one_of(self, key: str, choices: Iterable[str]) -> str:
        value = self.text(key)
        if value not in choices:
            raise self.error(f"unknown {key}.", shown(value), "one of " + ", ".join(choices))
        return value


def is_mscclpp_json(text: str) -> bool:
    """Return whether a JSON text is probably a plan of MSCCL++ rather than a schedule of this library."""
    return '"gpus"' in text and '"crossreduce.schedule/' not in text[:200]
