"""Prepare the library's docstrings for Sphinx, before its extension napoleon reads their sections.

Input and output: the lines of a docstring. Sections "Raises:" become lists, since they may contain sentences; names of
public classes become links; and an inline literal may be followed by a letter, as in ````Switch``es``.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import crossreduce

PUBLIC = {name for name in crossreduce.__all__ if inspect.isclass(getattr(crossreduce, name))}
_NAMES = re.compile(r"\w+(, \w+)*")


def prepare(_app: Any, what: str, name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Change the lines of a docstring in place: a handler of the event ``autodoc-process-docstring``."""
    text = listed_errors(list(lines))
    code = False
    for number, line in enumerate(text):
        code = line.startswith(">>>") or (code and bool(line.strip()))
        if not code:
            text[number] = linked(line, name.rpartition(".")[2])
    if what in ("property", "attribute", "data"):
        text[:0] = ["..", ""]  # an empty comment: else napoleon would take the text before a colon for a type
    lines[:] = text


def linked(line: str, own: str) -> str:
    """Return a line in which the names of public classes, except ``own``, are links.

    >>> linked("a ``Topology``, or ``Switch``es of a ``list``", "Switch")
    'a :class:`~crossreduce.Topology`, or ``Switch``\\\\ es of a ``list``'
    >>> linked("``out`` is on ``cpu:1``", "")  # a match may not begin at the end of a literal
    '``out`` is on ``cpu:1``'
    """

    def link(found: re.Match[str]) -> str:
        known = found[1] in PUBLIC and found[1] != own
        return f":class:`~crossreduce.{found[1]}`" if known else found[0]

    def separated(found: re.Match[str]) -> str:
        return found[1] + "\\ " * found[2].isalnum() + found[2]

    # Each literal is matched as a whole, also if no letter follows it.
    return re.sub(r"(``[^`]+``|:class:`[^`]+`)(\w?)", separated, re.sub(r"``(\w+)``", link, line))


def listed_errors(lines: list[str]) -> list[str]:
    """Return the lines with the entries of a section "Raises:" as a list.

    >>> listed_errors(["Raises:", "  PlanError: no path", "    at all.", "  As ``plan``."])
    ['.. rubric:: Raises', '', '- :exc:`~crossreduce.PlanError`: no path', '  at all.', '- As ``plan``.', '']
    """
    made: list[str] = []
    inside = False
    for line in lines:
        if line == "Raises:":
            inside = True
            made += [*([""] if made and made[-1] else []), ".. rubric:: Raises", ""]
        elif inside and line.startswith("  "):
            names, colon, rest = line.strip().partition(": ")
            if line.startswith("    "):
                made.append("  " + line.strip())
            elif colon and _NAMES.fullmatch(names):
                made.append("- " + ", ".join(error(each) for each in names.split(", ")) + f": {rest}")
            else:  # a sentence: a new entry, if the line before ends one
                made.append(("- " if made[-1][-1:] in (".", "") else "  ") + line.strip())
        else:
            made += [""] if inside else []
            inside = False
            made.append(line)
    return [*made, ""] if inside else made


def error(name: str) -> str:
    """Return the name of an exception as a link, if it is one of the library."""
    return f":exc:`~crossreduce.{name}`" if name in PUBLIC else f"``{name}``"
