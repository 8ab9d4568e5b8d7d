"""Errors of the command line that typer finds: unknown options, missing arguments, values of a wrong type.

Input: an exception of typer. Output: an ``ArgumentError`` in the words of this library.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Final

from ...errors import ArgumentError

# Words of an error about the type of a value, and what the value must be.
_WANTED: Final = (
    (r"integer", "a whole number"),
    (r"equal to (-?[0-9]+)", r"\1 or more"),
    (r"number|float", "a number"),
)
# Options of other programs, and the parameters of commands here that mean the same. A name of one letter has its case.
_SAME_MEANING: Final = (
    ("b e bytes nbytes size sizes count message-size buffer-size", "nbytes minbytes maxbytes"),
    ("g n np gpus ngpus devices device nproc nproc-per-node ranks nranks world-size replicas", "devices launch"),
    ("N hosts host nodes nnodes num-nodes machines", "hosts"),
    ("o out output outfile save", "output folder export report picture"),
    ("a alg algo algorithm", "algorithm assume"),
    ("machine topo topology cluster", "machine a topology"),
    ("d type dtype datatype", "datatype"),
    ("iterations iters repeat repeats", "iters epochs"),
)
_EXTRA: Final = re.compile(r"extra argument(?:s|\(s\))? \((.*)\)")


def usage_error(error: Any, args: Sequence[str], examples: Mapping[str, Sequence[str]]) -> ArgumentError:
    """Return the error for the wrong arguments ``args``. ``examples``: for each command, lines to try.

    ``error`` is a ``UsageError`` of typer, or of click in older versions of typer.
    """
    kind, context, param = type(error).__name__, error.ctx, getattr(error, "param", None)
    command = "crossreduce" if context is None else context.command_path
    name = "" if context is None else context.info_name
    lines = [f"crossreduce {line}" for line in examples.get(name, ())]
    if kind == "NoSuchOption":
        given = str(error.option_name)
        near = " or ".join(_same_meaning(given, context, error.possibilities or ()))
        return ArgumentError.of(f"{command} has no option {given}.", "", near or f"{command} --help")
    if kind == "MissingParameter":
        return ArgumentError.of(f"{command} needs {_label(param)}.", "", lines[0] if lines else f"{command} --help")
    if kind == "BadOptionUsage":
        needs = "takes no value" if "does not take" in error.message else "needs a value"
        return ArgumentError.of(f"{error.option_name} {needs}.", shlex.join(args), f"crossreduce {args[0]} --help")
    if kind == "BadParameter" and param is not None:
        found = (
            match.expand(words)
            for pattern, words in _WANTED
            if (match := re.search(pattern, error.message)) is not None
        )
        given = f', not "{_given(param, args)}"'
        return ArgumentError(f"{_label(param)} must be {next(found, 'another value')}{given}.")
    extra = _EXTRA.search(error.message)
    if extra:
        return ArgumentError.of(
            f"{command} takes fewer arguments.", extra[1], lines[0] if lines else f"{command} --help"
        )
    unknown = re.search(r"No such command '(.*?)'", error.message)
    if unknown:
        near = " or ".join(get_close_matches(unknown[1], examples)) or "crossreduce --help"
        return ArgumentError.of(f"crossreduce has no command {unknown[1]}.", "", near)
    return ArgumentError.of(error.format_message(), "", f"{command} --help")


def _same_meaning(option: str, context: Any, similar: Iterable[str]) -> list[str]:
    """Return what to write in place of an option that a command does not have: options, or the command's arguments.

    ``similar``: the options that are spelled like it, which are returned if its meaning is not known.
    """
    word = option.lstrip("-").replace("_", "-")
    wanted = next((params.split() for words, params in _SAME_MEANING if word in words.split()), None)
    if wanted is None:
        return [*similar]
    params = [] if context is None else context.command.params
    found = [_label(param) for param in params if param.name in wanted]
    options = [label for label in found if label.startswith("-")]
    arguments = [label for label in map(_label, params) if not label.startswith("-")]
    return options if options or not found else [" ".join([context.command_path, *arguments])]


def _label(param: Any) -> str:
    """Return the longest name of an option, or the metavar of an argument."""
    names = [name for name in param.opts if name.startswith("-")]
    return max(names, key=len) if names else str(param.metavar or param.name.upper())


def _given(param: Any, args: Sequence[str]) -> str:
    """Return the last value of an option in the arguments."""
    values = [after for arg, after in pairwise(args) if arg in param.opts]
    values += [arg[2:] for arg in args if arg[2:] and arg[:2] in param.opts]  # -n5
    values += [arg.partition("=")[2] for arg in args if arg.partition("=")[0] in param.opts and "=" in arg]
    return values[-1] if values else ""
