"""What the words of a command line mean.

In: the text or number of one option.  Out: a value, or an ``ArgumentError`` of one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from ..devices import host_devices, parse
from ..errors import ArgumentError
from ..options import ALGORITHMS
from ..values import read_devices

# JAX and TensorFlow make every device up to the last one named, so a slip of the finger must not ask for 10**9.
MOST_DEVICES: Final = 4096
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) *([kmg]?)(?:i?b)?", re.IGNORECASE)


def at_least(least: int, option: str, value: int) -> int:
    """Return a number that is not too small.

    >>> at_least(1, "--epochs", 3)
    3
    """
    if value < least:
        raise ArgumentError(f"{option} must be {least} or more, not {value}.")
    return value


def one_of(choices: Iterable[str], option: str, value: str) -> str:
    """Return a word that is one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise ArgumentError(f'{option} must be one of {", ".join(choices)}, not "{value}".')
    return value


def read_device_list(option: str, text: str) -> tuple[str, ...]:
    """Return the devices of a number, which counts devices in host memory, or of a list of names.

    >>> read_device_list("--devices", "2"), read_device_list("--devices", "cpu:1,GPU:0")
    (('cpu:0', 'cpu:1'), ('cpu:1', 'cuda:0'))
    """
    if re.fullmatch(r"[+-]?[0-9]+", text.strip()):
        count = at_least(1, option, int(text))
        if count <= MOST_DEVICES:
            return host_devices(count)
    else:
        try:
            names = read_devices([name.strip() for name in text.split(",")])
        except ArgumentError as error:
            why = str(error).partition("\n")[0]
            raise ArgumentError(f'{option} takes a number, or names such as "cpu:0,cpu:1": "{text}": {why}') from error
        if all(parse(name).index < MOST_DEVICES for name in names):
            return names
    raise ArgumentError(f"{option} takes at most {MOST_DEVICES} devices, not {text}.")


def read_algorithms(option: str, text: str) -> list[str]:
    """Return the algorithms of a list; "all" is every planner (not auto and nccl, which choose one of them)."""
    if text == "all":
        return [name for name in ALGORITHMS if name not in ("auto", "nccl")]
    return [one_of([*ALGORITHMS, "all"], option, name.strip()) for name in text.split(",")]


def read_nbytes(option: str, text: str) -> int:
    """Return a number of bytes; K, M and G are powers of 1024, as nccl-tests has it.

    >>> read_nbytes("-e", "128M")
    134217728
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentError(f'{option} takes bytes such as 8, 64K or 128M, not "{text}".')
    return int(float(match[1]) * _UNITS[match[2].lower()])
